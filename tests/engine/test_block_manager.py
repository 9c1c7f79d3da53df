"""Pages against a model made of plain lists: which are free and in what order, and what can be found."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.engine_connector.engine.block_manager import BlockManager

NUM_PAGES = 8


class Heard:
    """A PoolListener that believes what it is told."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.parents: dict[bytes, bytes] = {}

    def pool_has(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def blocks_cached(self, parent_hash: bytes, block_hashes: Sequence[bytes]) -> None:
        for block_hash in block_hashes:
            assert block_hash not in self.parents
            self.parents[block_hash] = parent_hash
            parent_hash = block_hash

    def blocks_forgotten(self, block_hashes: Sequence[bytes]) -> None:
        for block_hash in block_hashes:
            del self.parents[block_hash]

    def cache_cleared(self) -> None:
        self.parents.clear()


class Pages(RuleBasedStateMachine):
    """Sequences are lists of pages; a chain hash is a tuple of block numbers, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.blocks = BlockManager(NUM_PAGES, self.heard)
        self.free = list(range(NUM_PAGES))  # first to be taken first
        self.found: dict[bytes, int] = {}
        self.sequences: list[tuple[list[int], list[bytes]]] = []

    @rule(chain=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def start(self, chain: list[int]) -> None:
        hashes = [bytes(chain[: i + 1]) for i in range(len(chain))]
        matched = self.blocks.match(hashes)
        expected = []
        for block_hash in hashes:
            if block_hash not in self.found:
                break
            expected.append(self.found[block_hash])
        assert matched == expected
        num_new = len(chain) - len(matched)
        room = len([p for p in self.free if p not in matched])
        assert self.blocks.can_allocate(matched, num_new) == (num_new <= room)
        if num_new > room:
            return
        self.blocks.take(matched)
        self.free = [p for p in self.free if p not in matched]
        taken, self.free = self.free[:num_new], self.free[num_new:]
        assert self.blocks.allocate(num_new) == taken
        self.found = {h: p for h, p in self.found.items() if p not in taken}
        self.sequences.append((matched + taken, hashes))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        pages, hashes = data.draw(st.sampled_from(self.sequences))
        index = data.draw(st.integers(0, len(pages) - 1))
        self.blocks.publish(pages[index], hashes[index], hashes[index - 1] if index else b"")
        if hashes[index] not in self.found and pages[index] not in self.found.values():
            self.found[hashes[index]] = pages[index]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        pages, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.blocks.free(pages)
        for page in reversed(pages):
            if not any(page in others for others, _ in self.sequences):
                position = len(self.free) if page in self.found.values() else 0
                self.free.insert(position, page)

    @rule()
    def forget(self) -> None:
        self.blocks.forget_all()
        self.found.clear()

    @invariant()
    def agrees(self) -> None:
        self.blocks.check()
        assert self.heard.num_blocks == NUM_PAGES
        assert self.heard.parents == {block_hash: block_hash[:-1] for block_hash in self.found}
        assert self.blocks.num_free == len(self.free)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_freed_prefix_is_found_until_its_pages_are_taken_tail_first():
    blocks = BlockManager(4)
    hashes = [b"a", b"ab", b"abc"]
    pages = blocks.allocate(3)
    for page, block_hash in zip(pages, hashes, strict=True):
        blocks.publish(page, block_hash, block_hash[:-1])
    blocks.free(pages)

    found = []
    for _ in range(4):
        found.append(len(blocks.match(hashes)))
        blocks.allocate(1)

    assert found == [3, 3, 2, 1]  # the page that never held anything goes first


def test_a_page_held_twice_is_free_after_both_let_go():
    blocks = BlockManager(2)
    (page,) = blocks.allocate(1)
    blocks.publish(page, b"a", b"")
    blocks.take([page])

    blocks.free([page])
    assert blocks.num_free == 1
    blocks.free([page])

    assert blocks.num_free == 2
    with pytest.raises(AssertionError):
        blocks.free([page])


def test_the_second_page_with_the_same_content_is_not_found():
    blocks = BlockManager(2)
    first, second = blocks.allocate(2)

    blocks.publish(first, b"a", b"")
    blocks.publish(second, b"a", b"")

    assert blocks.match([b"a"]) == [first]
    blocks.check()
