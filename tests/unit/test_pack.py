"""Pages to stored blocks and back, in torch: what the kernels are compared with (test_triton_pack.py)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_cases import CASES, LAYERS, NUM_PAGES, PLACES, QUANTISATIONS, SHAPES, Case, Shape, error_bound, tensor_of

from kvstore.core.errors import SpecMismatch
from kvstore.kernels.block_part import QUANTISED, BlockPart
from kvstore.kernels.host_pages import HostPages, host_pages
from kvstore.kernels.pack import dequantise, quantise
from kvstore.kernels.page_map import PageMap
from kvstore.kernels.paged import PagedCache


def filled(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def cases(place: str, quantisation: str) -> list[Case]:
    return [case for case in CASES if (case.place, case.quantisation) == (place, quantisation)]


@pytest.mark.parametrize("place", PLACES)
def test_a_number_lies_in_the_block_where_the_layout_says(place):
    for case in cases(place, ""):
        _check_block(case)


def _check_block(case: Case) -> None:
    pages = case.pages(seed=1)
    copies = HostPages(pages, case.part(pages))
    block = filled(copies.page_nbytes)

    copies.copy_out(3, block)

    numbers = torch.from_numpy(block).view(pages.first.dtype).view(case.part(pages).layout.shape)
    assert torch.equal(numbers, tensor_of(pages)[3]), case.name


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize("place", PLACES)
def test_what_comes_back_is_what_went_out(place, quantisation):
    """To the bit; within the bound that pack.py states, when it was quantised. Other pages do not change."""
    for case in cases(place, quantisation):
        _check_round_trip(case)


def _check_round_trip(case: Case) -> None:
    pages, back = case.pages(seed=2), case.pages()
    part = case.part(pages)
    block = np.zeros(part.layout.nbytes, np.uint8)

    HostPages(pages, part).copy_out(1, block)
    HostPages(back, part).copy_in(4, block)

    sent, got = tensor_of(pages)[1], tensor_of(back)
    if case.quantisation == "":
        assert torch.equal(got[4], sent), case.name
    else:
        tiles = sent.movedim(3, 2)  # [L, H, P, T, D]
        assert (
            (got[4].movedim(3, 2).double() - tiles.double()).abs() <= error_bound(case.quantisation, tiles)
        ).all(), case.name
    assert not got[:4].any()


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_ranks_that_write_their_heads_make_the_block_that_one_rank_makes(quantisation):
    whole = Case("separate NHD", Shape(4, 3, 16), "bfloat16", quantisation).pages(seed=3)
    part = BlockPart.of(whole, quantisation=quantisation)
    expected, block = np.zeros(part.layout.nbytes, np.uint8), np.zeros(part.layout.nbytes, np.uint8)
    HostPages(whole, part).copy_out(2, expected)

    for rank in range(2):
        heads = tuple(tuple(view[:, 2 * rank : 2 * rank + 2] for view in planes) for planes in whole.views)
        of_rank = PageMap(heads)
        mine = BlockPart.of(of_rank, quantisation=quantisation, num_kv_heads=4, first_head=2 * rank)
        HostPages(of_rank, mine).copy_out(2, block)

    assert block.tobytes() == expected.tobytes()


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_a_part_touches_nothing_but_its_runs(quantisation):
    """Of one layer, of two heads of four, of a pipeline stage that has layers 1 and 2 of four."""
    pages = Case("packed", Shape(2, 4, 16), "float16", quantisation).pages(seed=4)
    part = BlockPart.of(pages, quantisation=quantisation, num_layers=4, first_layer=1, num_kv_heads=4, first_head=1)
    copies, before = HostPages(pages, part), filled(part.layout.nbytes)
    block = before.copy()

    copies.copy_out_layers(0, block, range(1, 2))

    runs = part.runs(range(1, 2))
    inside = np.zeros(part.layout.nbytes, bool)
    for run in runs:
        inside[run.offset : run.offset + run.nbytes] = True
    assert (block[~inside] == before[~inside]).all()
    assert (block[inside] != before[inside]).mean() > 0.9
    tile = part.layout.strides_bytes[1]
    assert runs[0] == ((2 * 4 + 1) * tile, 2 * tile)
    assert len(runs) == (1 if quantisation == "" else 2)


def test_the_runs_of_all_layers_and_heads_are_one():
    pages = Case("packed", SHAPES[0], "float16", "int8").pages()
    part = BlockPart.of(pages, quantisation="int8")

    assert part.runs(range(LAYERS)) == [(0, part.layout.nbytes)]


def test_heads_that_another_rank_writes_are_read_but_not_written():
    pages = Case("packed", SHAPES[0], "float16", "").pages(seed=5)
    part = BlockPart.of(pages, writer=False)
    block = np.zeros(part.layout.nbytes, np.uint8)
    copies = host_pages(pages, part)

    copies.copy_out(0, block)
    copies.copy_in(1, block)

    assert not block.any()
    assert not tensor_of(pages)[1].any()


def test_pages_that_were_made_in_inference_mode_are_written():
    """vLLM's are; outside of that mode torch lets nobody change such a tensor in place."""
    with torch.inference_mode():
        pages = Case("separate NHD", SHAPES[0], "float16", "").pages()
    copies = HostPages(pages, BlockPart.of(pages))

    copies.copy_in(1, filled(copies.page_nbytes) // 4)

    assert tensor_of(pages)[1].any()


@pytest.mark.parametrize("place", PLACES)
def test_pages_that_are_blocks_already_are_copied_as_runs_of_bytes(place):
    """And give the same bytes as number by number."""
    case = Case(place, Shape(1, 3, 80), "float16", "")
    pages, back = case.pages(seed=6), case.pages()
    copies, other = host_pages(pages), HostPages(pages, BlockPart.of(pages))
    block, expected = np.zeros(copies.page_nbytes, np.uint8), np.zeros(copies.page_nbytes, np.uint8)

    copies.copy_out_layers(3, block, range(1, LAYERS))
    other.copy_out_layers(3, expected, range(1, LAYERS))
    host_pages(back).copy_in_layers(0, block, range(1, LAYERS))

    assert isinstance(copies, PagedCache) is (place in {"packed", "fused", "fused, tokens outermost", "latent"})
    assert block.tobytes() == expected.tobytes()
    assert torch.equal(tensor_of(back)[0, 1], tensor_of(pages)[3, 1])


def test_a_page_out_of_range_or_layers_that_are_not_there_are_refused():
    copies = HostPages(*(pages := Case("gaps", SHAPES[0], "float16", "").pages(), BlockPart.of(pages)))
    block = np.zeros(copies.page_nbytes, np.uint8)

    for block_id, layers in ((-1, range(1)), (NUM_PAGES, range(1)), (0, range(LAYERS + 1)), (0, range(0, 2, 2))):
        with pytest.raises(AssertionError):
            copies.copy_in_layers(block_id, block, layers)
    with pytest.raises(AssertionError):
        copies.copy_out(0, block[1:])


@pytest.mark.parametrize("quantisation", QUANTISED)
@settings(max_examples=100, deadline=None)
@given(
    numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6).filter(
        lambda xs: max(map(abs, xs)) < 2.0**127
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_error_is_within_the_bound_whatever_the_numbers(quantisation, numbers, dtype):
    tile = (
        torch.tensor(numbers).clamp(-6e4, 6e4).to(dtype) if dtype is torch.float16 else torch.tensor(numbers).to(dtype)
    )
    tile = tile.view(1, 2, 3)

    read = dequantise(quantise(tile, QUANTISED[quantisation])).to(dtype)

    flushed = 2.0**-100 if tile.abs().max() < 2.0**-100 else 0.0
    assert ((read.double() - tile.double()).abs() <= error_bound(quantisation, tile) + flushed).all()


@pytest.mark.parametrize("quantisation", QUANTISED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_tile_with_a_number_that_is_none_is_read_as_nan_and_its_neighbour_is_not(quantisation, bad):
    tiles = torch.ones(2, 3, 4)
    tiles[0, 1, 2] = bad

    read = dequantise(quantise(tiles, QUANTISED[quantisation]))

    assert read[0].isnan().all()
    assert torch.equal(read[1], tiles[1])


@pytest.mark.parametrize("quantisation", QUANTISED)
def test_zeros_and_what_is_next_to_nothing_are_zeros(quantisation):
    tiles = torch.zeros(2, 3, 4)
    tiles[1] = 1e-38

    assert not dequantise(quantise(tiles, QUANTISED[quantisation])).any()


KEYS = torch.zeros(4, 3, 2, 8)


@pytest.mark.parametrize(
    ("make", "field", "words"),
    [
        (lambda: PageMap.of_layers([], "BHTC"), "pages", "at least one layer"),
        (lambda: PageMap.of_layers([KEYS], "BHTX"), "dims", "'BHTX'"),
        (lambda: PageMap.of_layers([KEYS], "LBTD"), "dims", "no L"),
        (lambda: PageMap.packed(KEYS, "BHTD"), "dims", "L"),
        (lambda: PageMap.of_layers([KEYS], "BHT"), "dims", "'BHT'"),
        (lambda: PageMap.of_layers([KEYS], "BTD"), "pages", "4 dimensions"),
        (lambda: PageMap.of_layers([torch.zeros(4, 3, 2, 7)], "BHTC"), "pages", "odd size"),
        (lambda: PageMap.of_layers([torch.zeros(4, 3, 2, 8)], "BPTD"), "pages", "3 planes"),
        (lambda: PageMap.of_separate([KEYS], []), "pages", "0 of values"),
        (lambda: PageMap.of_separate([KEYS], [KEYS.half()]), "pages", "float16"),
        (lambda: PageMap.of_separate([KEYS], [KEYS[:3]]), "pages", "[3, 2, 3, 8]"),
        (lambda: PageMap.of_layers([torch.zeros(1, 3, 2, 8).expand(4, 3, 2, 8)], "BHTC"), "pages", "one place"),
        (lambda: PageMap.of_layers([torch.zeros(0, 3, 2, 8)], "BHTC"), "pages", "at least 1"),
        (lambda: BlockPart.of(PageMap.of_layers([KEYS], "BHTC"), quantisation="fp4"), "quantisation", "'fp4'"),
        (lambda: BlockPart.of(PageMap.of_layers([KEYS.byte()], "BHTC"), quantisation="int8"), "quantisation", "uint8"),
        (lambda: BlockPart.of(PageMap.of_layers([KEYS], "BHTC"), num_kv_heads=4, first_head=2), "first_head", "2 to 4"),
        (lambda: BlockPart.of(PageMap.of_layers([KEYS], "BHTC"), num_layers=2, first_layer=2), "first_layer", "2 to 2"),
    ],
)
def test_tensors_that_are_no_pages_are_refused_with_what_would_be_right(make, field, words):
    with pytest.raises(SpecMismatch) as caught:
        make()

    assert caught.value.fields["field"] == field
    assert words in caught.value.message


def test_an_address_is_that_of_the_number_that_a_view_has_there():
    pages = Case("gaps", SHAPES[3], "float16", "").pages()
    strides = pages.strides

    for layer, plane in ((0, 1), (1, 0)):
        at = (3, 1, 2, 5)
        offset = sum(i * stride for i, stride in zip(at, strides, strict=True))
        assert pages.bases()[layer][plane] + 2 * offset == pages.views[layer][plane][at].data_ptr()


def test_rows_that_begin_at_multiples_of_16_bytes_are_seen():
    def alignment(place: str, shape: Shape) -> int:
        return Case(place, shape, "float16", "").pages().alignment()

    assert alignment("packed", SHAPES[0]) == 16
    assert alignment("separate NHD", SHAPES[2]) == 16
    assert alignment("packed", SHAPES[3]) == 8
    assert alignment("gaps", SHAPES[0]) == 2
