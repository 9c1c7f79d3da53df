"""The engine's pages: who holds which, which are free, and which blocks can be found again by their hash.

    taken  -> free    when the last holder lets go; the page keeps its hash and can be found until it is taken again
    free   -> taken   by match (found by hash) or by allocate (oldest free page first, its hash is forgotten)

Pages without a hash are taken before any other; of a freed sequence, the tail is taken before the head, since a prefix is
worth nothing without its beginning. Same idea as vLLM's block pool (vllm/v1/core/block_pool.py), with an ordered dict in
place of its linked list.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvstore.engine_connector.protocol import PoolListener


class BlockManager:
    """Bookkeeping of `num_pages` pages; touches no page's content. `listener` hears what can be found here."""

    def __init__(self, num_pages: int, listener: PoolListener | None = None) -> None:
        self.num_pages = num_pages
        self._listener = listener
        if listener is not None:
            listener.pool_has(num_pages)
        self._holders = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))  # first to be taken first

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def num_holders(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._holders[page]

    def match(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest prefix of `block_hashes` that is here. Takes nothing."""
        found: list[int] = []
        for block_hash in block_hashes:
            page = self._page_of.get(block_hash)
            if page is None:
                break
            found.append(page)
        return found

    def can_allocate(self, matched: Sequence[int], num_new: int) -> bool:
        """Whether `matched` pages (from match) can be taken and `num_new` more allocated."""
        return num_new + sum(self._holders[page] == 0 for page in matched) <= len(self._free)

    def take(self, matched: Iterable[int]) -> None:
        """Hold pages found by match, in addition to their other holders."""
        for page in matched:
            if self._holders[page] == 0:
                del self._free[page]
            self._holders[page] += 1

    def allocate(self, num_new: int) -> list[int]:
        """Hold `num_new` <= num_free fresh pages; what they held is forgotten."""
        assert num_new <= len(self._free), (num_new, len(self._free))
        pages = [self._free.popitem(last=False)[0] for _ in range(num_new)]
        for page in pages:
            self._forget(page)
            self._holders[page] = 1
        return pages

    def publish(self, page: int, block_hash: bytes, parent_hash: bytes) -> None:
        """The page's content is complete and is the block `block_hash`, behind `parent_hash` (b"": the first of its sequence). If
        another page has it already, that one stays."""
        assert self._holders[page] > 0
        if self._hashes[page] is None and block_hash not in self._page_of:
            self._hashes[page] = block_hash
            self._page_of[block_hash] = page
            if self._listener is not None:
                self._listener.blocks_cached(parent_hash, (block_hash,))

    def free(self, block_ids: Sequence[int]) -> None:
        """Let go of a sequence's pages, in the order of its blocks."""
        for page in reversed(block_ids):
            assert self._holders[page] > 0
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free[page] = None
                if self._hashes[page] is None:
                    self._free.move_to_end(page, last=False)

    def forget_all(self) -> None:
        """Forget every hash: the next request finds nothing here."""
        self._hashes = [None] * self.num_pages
        self._page_of.clear()
        if self._listener is not None:
            self._listener.cache_cleared()

    def check(self) -> None:
        """Assert that pages are either free or held, and that hashes and pages point at each other."""
        assert len(self._free) == self._holders.count(0)
        assert all(self._holders[page] == 0 for page in self._free)
        assert all(holders >= 0 for holders in self._holders)
        assert self._page_of == {h: page for page, h in enumerate(self._hashes) if h is not None}

    def _forget(self, page: int) -> None:
        block_hash = self._hashes[page]
        if block_hash is not None:
            del self._page_of[block_hash]
            self._hashes[page] = None
            if self._listener is not None:
                self._listener.blocks_forgotten((block_hash,))
