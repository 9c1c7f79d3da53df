"""A tier in which nothing moves, and single blocks: what tests of parts of a policy stand on."""

import numpy as np
from small_store import spec

from kvstore.index import NO_PARENT, BlockIndex, Rows
from kvstore.replay.cache import block_key


class StillTier:
    """TierRows of a tier of so many blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def is_evictable(self, row: int) -> bool:
        return True

    def num_placed(self) -> int:
        return self.num_blocks

    def bytes_by_tenant(self) -> dict[str, int]:
        return {"": self.num_blocks}


def index_of_single_blocks(num_rows: int) -> tuple[BlockIndex, Rows]:
    index = BlockIndex()
    entry = index.open_namespace(b"n" * 16, spec(), "", 1)
    rows = index.new_rows(num_rows)
    index.add(entry, [block_key(number) for number in range(num_rows)], np.full(num_rows, NO_PARENT), rows)
    return index, rows
