"""Opaque pages of which each rank has a part: blocks are whole in the store."""

import numpy as np
import pytest

from kvstore.engine_connector.page_part import PagePart


class FakePages:
    """Two pages of 4 bytes."""

    num_pages, page_nbytes = 2, 4

    def __init__(self, value):
        self.memory = np.full((2, 4), value, np.uint8)

    def copy_in(self, block_id, block):
        self.memory[block_id][:] = block

    def copy_out(self, block_id, block):
        block[:] = self.memory[block_id]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_parts_of_all_ranks_are_the_block_and_no_rank_touches_anothers(num_ranks):
    written = [PagePart(FakePages(rank + 1), rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    block = np.zeros(4 * num_ranks, np.uint8)
    for rank, part in enumerate(written):
        part.copy_out(1, block)

        assert block.tolist() == [value + 1 if value <= rank else 0 for value in range(num_ranks) for _ in range(4)]

    read = [FakePages(99) for _ in range(num_ranks)]
    for rank, pages in enumerate(read):
        PagePart(pages, rank=rank, num_ranks=num_ranks).copy_in(0, block)

    assert [pages.memory.tolist() for pages in read] == [[[rank + 1] * 4, [99] * 4] for rank in range(num_ranks)]


def test_a_block_that_is_not_whole_is_refused():
    with pytest.raises(AssertionError):
        PagePart(FakePages(1), rank=0, num_ranks=2).copy_in(0, np.zeros(4, np.uint8))
