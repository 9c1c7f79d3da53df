"""Pages and their bytes are one memory."""

import numpy as np
import pytest
import torch

from kvstore.core.errors import ConfigError, SpecMismatch
from kvstore.core.layout import BlockLayout
from kvstore.kernels.paged import PagedCache, allocate_pages, pages_as_bytes

LAYOUT = BlockLayout(num_layers=2, num_kv_heads=3, block_tokens=4, planes=2, head_dim=8, item_nbytes=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_number_lies_where_the_layout_says(dtype):
    pages = allocate_pages(5, LAYOUT, dtype)
    pages[3, 1, 2, 3, 1, 7] = 1.5

    page = pages_as_bytes(pages)[3]

    at = LAYOUT.offset(layer=1, head=2, token=3, plane=1, dim=7)
    assert np.flatnonzero(page).tolist() == [i for i in (at, at + 1) if page[i]]
    assert torch.from_numpy(page[at : at + 2].copy()).view(pages.dtype).item() == 1.5


def test_bytes_copied_into_a_page_are_its_numbers():
    pages = allocate_pages(3, LAYOUT, "float16")
    source = torch.randn(LAYOUT.shape).to(torch.float16)

    np.copyto(pages_as_bytes(pages)[1], source.numpy().view(np.uint8).reshape(-1))

    assert torch.equal(pages[1], source)
    assert not pages[0].any()
    assert not pages[2].any()


def test_the_view_of_all_pages_has_one_row_a_block():
    pages = allocate_pages(3, LAYOUT, "float16")

    view = pages_as_bytes(pages)

    assert view.shape == (3, LAYOUT.nbytes)
    view[2] = 1
    assert pages[2].view(torch.uint8).eq(1).all()


def test_more_pages_than_memory_is_a_config_error():
    with pytest.raises(ConfigError) as caught:
        allocate_pages(1 << 50, LAYOUT, "float16")

    assert caught.value.fields["field"] == "num_pages"


def _numbered(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def test_a_page_in_one_piece_a_layer_goes_out_and_in_again():
    layers = [_numbered(4, 3, 2, 5) + 1000 * layer for layer in range(3)]
    cache, copies = PagedCache(layers), [torch.zeros_like(layer) for layer in layers]
    block = np.zeros(cache.page_nbytes, np.uint8)

    cache.copy_out(2, block)
    PagedCache(copies).copy_in(1, block)

    assert block.tobytes() == b"".join(layer[2].numpy().tobytes() for layer in layers)
    assert all(torch.equal(copy[1], layer[2]) for copy, layer in zip(copies, layers, strict=True))
    assert not any(copy[[0, 2, 3]].any() for copy in copies)


def test_a_permuted_view_is_copied_as_it_lies_in_memory():
    tokens_outermost = _numbered(4, 2, 3, 5)  # vLLM's LBNHC; its view is [B, H, N, C]
    block = np.zeros(2 * 3 * 5 * 4, np.uint8)

    PagedCache([tokens_outermost.permute(0, 2, 1, 3)]).copy_out(3, block)

    assert block.tobytes() == tokens_outermost[3].numpy().tobytes()


def test_pages_with_gaps_between_them_are_copied_without_the_gaps():
    both_layers = _numbered(4, 2, 3, 5)  # [B, L, H, C]: one layer's pages lie two pages apart
    block = np.zeros(3 * 5 * 4, np.uint8)

    PagedCache([both_layers[:, 1]]).copy_out(2, block)

    assert block.tobytes() == both_layers[2, 1].numpy().tobytes()


def test_pages_that_are_not_one_run_of_bytes_are_refused():
    heads_outermost = _numbered(3, 4, 2, 5).permute(1, 0, 2, 3)

    with pytest.raises(SpecMismatch) as caught:
        PagedCache([heads_outermost])

    assert caught.value.fields["field"] == "pages"


@pytest.mark.parametrize("nbytes", [1, 119, 121])
def test_a_block_of_another_size_is_never_broadcast(nbytes):
    cache = PagedCache([_numbered(4, 2, 3, 5)])

    with pytest.raises(AssertionError):
        cache.copy_in(0, np.zeros(nbytes, np.uint8))


def test_layers_of_a_page_go_out_and_in_alone_whatever_the_pieces_are():
    """In one piece a page, and in a piece a layer: the same bytes."""
    pages = _numbered(4, 6, 2, 5)
    whole = PagedCache([pages], num_layers=6)
    in_pieces = PagedCache([pages[:, layer] for layer in range(6)], num_layers=6)
    target = torch.zeros_like(pages)
    for cache in (whole, in_pieces):
        block = np.zeros(cache.page_nbytes, np.uint8)

        cache.copy_out_layers(3, block, range(1, 4))
        PagedCache([target], num_layers=6).copy_in_layers(2, block, range(2, 6))

        layers = block.view(np.float32).reshape(6, 2, 5)
        assert np.array_equal(layers[1:4], pages[3, 1:4].numpy())
        assert not layers[[0, 4, 5]].any()
        assert torch.equal(target[2, 2:4], pages[3, 2:4])
        assert not target[2, [0, 1, 4, 5]].any()


@pytest.mark.parametrize("layers", [range(1, 7), range(-1, 2), range(3, 1), range(0, 4, 2)])
def test_layers_that_a_page_has_not_are_refused(layers):
    cache = PagedCache([_numbered(2, 6, 5)], num_layers=6)

    with pytest.raises(AssertionError):
        cache.copy_in_layers(0, np.zeros(cache.page_nbytes, np.uint8), layers)


def test_a_page_that_is_not_so_many_equal_layers_is_refused():
    with pytest.raises(AssertionError):
        PagedCache([_numbered(2, 5)], num_layers=3)
    with pytest.raises(AssertionError):
        PagedCache([_numbered(2, 2), _numbered(2, 6)], num_layers=2)
