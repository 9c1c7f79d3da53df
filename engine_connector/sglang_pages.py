"""Where the pages of an SGLang host pool lie. Imports nothing of SGLang, so that it is tested without it.

A page is several pieces of memory, by the pool's layout; a block in the store is these pieces one after the other, in the order
of the flat page that SGLang's own file backend writes. With `num_shards` above 1 (layout page_head, whose pages have heads
outermost) a page is that many blocks, each with some of the heads, so that ranks of another number find them:

    layer_first   K0 | V0 | K1 | V1 ...  as the pool tells   ->   K0 K1 ... V0 V1 ...
    others        K | V                                      ->   K V
    page_head, 2  K heads a | V heads a | K heads b | V heads b   ->   two blocks:  Ka Va,  Kb Vb
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError

KV_POOL = "kv"


class Piece(NamedTuple):
    """Consecutive bytes of a page."""

    address: int
    nbytes: int


Pages = Sequence[Sequence[Piece]]
"""For each page its pieces, in the order of the block."""


class HostPool(Protocol):
    """What is read of sglang.srt.mem_cache.pool_host.HostKVCache, and of other pools if they have it."""

    layout: str

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None:
        """Addresses and sizes of the pieces of the pages whose tokens these are; None for a pool without memory."""
        ...


class PoolPages:
    """The pages of one pool. Raises ConfigError for one that has no memory of its own."""

    def __init__(self, name: str, host_pool: HostPool, *, num_shards: int = 1) -> None:
        self.name = name
        self.host_pool = host_pool
        self.num_shards = num_shards
        self.page_tokens = int(getattr(host_pool, "page_size", 1))
        meta = self._meta(torch.arange(self.page_tokens))
        if not meta or not sum(meta[1]):
            raise ConfigError(
                f"host pool {name}: a {type(host_pool).__name__} has no memory of its own; kvstore does not serve such models",
                field="host_pool",
                value=name,
            )
        self.page_nbytes = sum(meta[1])
        self._num_pieces = len(meta[0])
        two_planes = name == KV_POOL and self._num_pieces == 2 * int(getattr(host_pool, "layer_num", 0))
        self._num_turns = 2 if two_planes and host_pool.layout == "layer_first" else 1

    @property
    def block_nbytes(self) -> int:
        """Of one shard of a page."""
        return self.page_nbytes // self.num_shards

    def pieces(self, host_indices: torch.Tensor, shard: int) -> Pages:
        """Of the pages whose tokens these are, what belongs to the shard; none if these are no whole pages."""
        if host_indices.numel() % self.page_tokens:
            return ()
        meta = self._meta(host_indices)
        assert meta is not None, "looked at when the pool was registered"
        all_pieces = [Piece(address, nbytes) for address, nbytes in zip(*meta, strict=True)]
        width = self._num_pieces // self.num_shards
        pages = []
        for start in range(0, len(all_pieces), self._num_pieces):
            told = all_pieces[start : start + self._num_pieces]
            ordered = [piece for turn in range(self._num_turns) for piece in told[turn :: self._num_turns]]
            pages.append(ordered[shard * width : (shard + 1) * width])
        return pages

    def flat_pieces(self, flat_pages: Sequence[torch.Tensor], shard: int) -> Pages:
        """The same of pages that SGLang has copied out of the pool or is going to copy into it; none if they are not such."""
        if any(page.nbytes != self.page_nbytes or not page.is_contiguous() for page in flat_pages):
            return ()
        width = self.block_nbytes if self.num_shards == 1 else self.block_nbytes // 2
        planes = range(0, self.page_nbytes, width * self.num_shards)
        return [[Piece(page.data_ptr() + plane + shard * width, width) for plane in planes] for page in flat_pages]

    def _meta(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]] | None:
        if self.num_shards == 1:
            return self.host_pool.get_page_buffer_meta(host_indices)
        split: Callable[[torch.Tensor, int], tuple[list[int], list[int]]]
        split = self.host_pool.get_split_heads_page_buffer_meta  # type: ignore[attr-defined]  # of page_head's pools
        return split(host_indices, self.num_shards)


def copy_in(pages: Pages) -> Callable[[int, NDArray[np.uint8]], None]:
    """KeyedBlocks.load's: block -> page. Lets go of the GIL."""

    def copy(i: int, block: NDArray[np.uint8]) -> None:
        source = block.ctypes.data
        for address, nbytes in pages[i]:
            ctypes.memmove(address, source, nbytes)
            source += nbytes

    return copy


def copy_out(pages: Pages) -> Callable[[int, NDArray[np.uint8]], None]:
    """KeyedBlocks.save's: page -> block; likewise."""

    def copy(i: int, block: NDArray[np.uint8]) -> None:
        target = block.ctypes.data
        for address, nbytes in pages[i]:
            ctypes.memmove(target, address, nbytes)
            target += nbytes

    return copy
