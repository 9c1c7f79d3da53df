"""Pages of a host pool and blocks of the store: the same bytes, in the order of a flat page, whatever the layout."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.sglang_pages import PoolPages, copy_in, copy_out

LAYERS, HEADS, PAGE, DIM, NUM_PAGES = 3, 4, 8, 16, 5
SHAPES = {  # as SGLang's MHATokenToKVPoolHost has them; tests/sglang has the real ones
    "layer_first": (2, LAYERS, NUM_PAGES * PAGE, HEADS, DIM),
    "page_first": (2, NUM_PAGES * PAGE, LAYERS, HEADS, DIM),
    "page_head": (2, NUM_PAGES, HEADS, PAGE, LAYERS, DIM),
}


@dataclass
class Pool:
    layout: str
    page_size: int = PAGE
    layer_num: int = LAYERS

    def __post_init__(self) -> None:
        self.buffer = torch.randint(0, 1 << 15, SHAPES[self.layout], dtype=torch.int16)

    def page(self, index: int) -> torch.Tensor:
        """The flat page."""
        tokens = slice(index * PAGE, (index + 1) * PAGE)
        if self.layout == "layer_first":
            return self.buffer[:, :, tokens].flatten()
        return (self.buffer[:, tokens] if self.layout == "page_first" else self.buffer[:, index]).flatten()

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        return self._meta(indices, 1)

    def get_split_heads_page_buffer_meta(self, indices: torch.Tensor, split: int) -> tuple[list[int], list[int]]:
        return self._meta(indices, split)

    def _meta(self, indices: torch.Tensor, split: int) -> tuple[list[int], list[int]]:
        parts: list[torch.Tensor] = []
        for token in indices.tolist()[::PAGE]:
            if self.layout == "layer_first":
                parts += [self.buffer[p, layer, token : token + PAGE] for layer in range(LAYERS) for p in (0, 1)]
            elif self.layout == "page_first":
                parts += [self.buffer[p, token : token + PAGE] for p in (0, 1)]
            else:
                width = HEADS // split
                page = self.buffer[:, token // PAGE]
                parts += [page[p, i * width : (i + 1) * width] for i in range(split) for p in (0, 1)]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


def tokens_of(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("layout", SHAPES)
def test_a_block_is_the_flat_page_and_comes_back_to_another_place(layout: str) -> None:
    pool = Pool(layout)
    pages = PoolPages("kv", pool)
    blocks = np.zeros((2, pages.block_nbytes), np.uint8)
    expected = [as_bytes(pool.page(i)).copy() for i in (3, 1)]

    save = copy_out(pages.pieces(tokens_of(3, 1), 0))
    save(0, blocks[0]), save(1, blocks[1])
    load = copy_in(pages.pieces(tokens_of(0, 4), 0))
    load(0, blocks[0]), load(1, blocks[1])

    assert np.array_equal(blocks, expected)
    assert np.array_equal([as_bytes(pool.page(0)), as_bytes(pool.page(4))], expected)
    assert np.array_equal(as_bytes(pool.page(3)), expected[0])


def test_the_heads_of_two_ranks_are_the_halves_of_one_rank_s_page() -> None:
    pool = Pool("page_head")
    pages = PoolPages("kv", pool, num_shards=2)
    block = np.zeros(pages.block_nbytes, np.uint8)

    for shard, heads in enumerate((slice(0, HEADS // 2), slice(HEADS // 2, HEADS))):
        copy_out(pages.pieces(tokens_of(2), shard))(0, block)

        assert np.array_equal(block, as_bytes(pool.buffer[:, 2, heads].flatten()))


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_flat_page_has_the_same_blocks(num_shards: int) -> None:
    pool = Pool("page_head")
    pages = PoolPages("kv", pool, num_shards=num_shards)
    flat = pool.page(1)
    ours, theirs = np.zeros((2, pages.block_nbytes), np.uint8)

    for shard in range(num_shards):
        copy_out(pages.pieces(tokens_of(1), shard))(0, ours)
        copy_out(pages.flat_pieces([flat], shard))(0, theirs)

        assert np.array_equal(ours, theirs)


def test_what_is_no_page_has_no_pieces() -> None:
    pages = PoolPages("kv", Pool("page_first"))

    assert not pages.flat_pieces([torch.zeros(7, dtype=torch.int16)], 0)
    assert not pages.pieces(torch.arange(PAGE + 1), 0)


def test_a_pool_without_memory_is_refused() -> None:
    class Logical:
        layout, page_size = "layer_first", PAGE

        def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
            return None

    with pytest.raises(ConfigError, match="Logical has no memory of its own"):
        PoolPages("kv", Logical())
