"""BlockLayout against numpy's own idea of the same array."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import SpecMismatch
from kvstore.core.keys import QUANTISATIONS, KVSpec
from kvstore.core.layout import BlockLayout, ByteRun

dims = st.integers(1, 6)
layouts = st.builds(
    BlockLayout,
    num_layers=dims,
    num_kv_heads=dims,
    block_tokens=dims,
    planes=st.integers(1, 2),
    head_dim=st.integers(1, 4).map(lambda n: 4 * n),
    item_nbytes=st.sampled_from([1, 2, 4]),
    scale_nbytes=st.sampled_from([0, 2, 4]),
)


def byte_numbers(layout: BlockLayout) -> np.ndarray:
    """[L, H, T, P, D, item] of each byte's own offset, in C order."""
    return np.arange(layout.data_nbytes).reshape(*layout.shape, layout.item_nbytes)


@given(layouts, st.data())
def test_an_offset_is_that_of_a_c_ordered_array(layout, data):
    index = tuple(data.draw(st.integers(0, n - 1)) for n in layout.shape)

    offset = layout.offset(**dict(zip(("layer", "head", "token", "plane", "dim"), index, strict=True)))

    assert offset == byte_numbers(layout)[index][0]


@given(layouts, st.data())
def test_a_head_run_holds_exactly_the_bytes_of_its_heads(layout, data):
    layer = data.draw(st.integers(0, layout.num_layers - 1))
    first = data.draw(st.integers(0, layout.num_kv_heads - 1))
    count = data.draw(st.integers(1, layout.num_kv_heads - first))

    run = layout.head_run(layer, first, count)

    expected = byte_numbers(layout)[layer, first : first + count].ravel()
    assert np.array_equal(np.arange(run.offset, run.offset + run.nbytes), expected)


@given(layouts)
def test_layer_runs_then_scale_runs_tile_the_block(layout):
    position = 0
    for layer in range(layout.num_layers):
        run = layout.head_run(layer, 0, layout.num_kv_heads)
        assert run.offset == position
        position += run.nbytes
    assert position == layout.data_nbytes
    for layer in range(layout.num_layers):
        for head in range(layout.num_kv_heads):
            run = layout.scale_run(layer, head, 1)
            assert run == ByteRun(position, layout.planes * layout.scale_nbytes)
            position += run.nbytes
    assert position == layout.nbytes


@given(layouts, st.integers(1, 4))
def test_the_heads_of_all_ranks_make_the_layer(layout, ranks):
    heads = layout.num_kv_heads
    bounds = [rank * heads // ranks for rank in range(ranks + 1)]
    runs = [layout.head_run(0, a, b - a) for a, b in itertools.pairwise(bounds) if b > a]

    assert sum(run.nbytes for run in runs) == layout.head_run(0, 0, heads).nbytes
    assert all(left.offset + left.nbytes == right.offset for left, right in itertools.pairwise(runs))


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_a_quantised_specs_layout_has_scales_behind_the_numbers(quantisation):
    stored_format = f"kvstore:LHTPD:{quantisation}"
    spec = KVSpec(weights="w", num_layers=30, num_kv_heads=3, head_dim=64, dtype="float16", stored_format=stored_format)

    layout = BlockLayout.from_spec(spec)

    assert layout.nbytes == spec.block_nbytes
    assert layout.data_nbytes == 30 * 3 * 16 * 2 * 64
    assert layout.scale_run(1, 2, 1) == ByteRun(layout.data_nbytes + (1 * 3 + 2) * 2 * 4, 8)


def test_a_specs_layout_has_the_specs_block_size():
    spec = KVSpec(weights="w", num_layers=30, num_kv_heads=3, head_dim=64, dtype="float16")

    layout = BlockLayout.from_spec(spec)

    assert layout.nbytes == spec.block_nbytes == 16 * 23040
    assert layout.shape == (30, 3, 16, 2, 64)


@pytest.mark.parametrize(
    ("field", "value", "numbers"),
    [
        ("num_layers", 0, ("0", "65536")),
        ("num_kv_heads", 65537, ("65537", "65536")),
        ("block_tokens", -1, ("-1", "65536")),
        ("planes", 3, ("3", "2")),
        ("head_dim", 0, ("0", "65536")),
        ("item_nbytes", 3, ("3", "(1, 2, 4)")),
        ("scale_nbytes", 1, ("1", "(0, 2, 4)")),
    ],
)
def test_a_wrong_dimension_is_refused_with_both_numbers(field, value, numbers):
    good = {"num_layers": 2, "num_kv_heads": 2, "block_tokens": 4, "planes": 2, "head_dim": 8, "item_nbytes": 2}

    with pytest.raises(SpecMismatch) as caught:
        BlockLayout(**(good | {field: value}))

    assert caught.value.fields == {"field": field, "value": value}
    assert all(number in str(caught.value) for number in numbers)


def test_scales_that_would_start_unaligned_are_refused_with_both_numbers():
    with pytest.raises(SpecMismatch, match=r"4-byte scales cannot start at byte 3") as caught:
        BlockLayout(num_layers=1, num_kv_heads=1, block_tokens=1, planes=1, head_dim=3, item_nbytes=1, scale_nbytes=4)

    assert caught.value.fields["field"] == "scale_nbytes"


def test_opaque_pages_have_no_layout():
    spec = KVSpec(
        weights="w",
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        dtype="bfloat16",
        page_format="opaque:vllm:cpu",
        stored_format="opaque:vllm:cpu",
        opaque_block_nbytes=4096,
    )

    with pytest.raises(SpecMismatch, match="opaque:vllm:cpu"):
        BlockLayout.from_spec(spec)
