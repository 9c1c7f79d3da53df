"""Opaque pages of which each rank of an engine has a part: the parts lie one after the other in a block.

    block      | rank 0's bytes | rank 1's bytes | ... |      one slot, one lease, one commit

Each rank copies its own. For pages whose heads we know, a block's bytes need not depend on the number of ranks
(kernels/page_map.py); of these we know nothing.
"""

import numpy as np
from numpy.typing import NDArray

from kvstore.engine_connector.protocol import Pages


class PagePart:
    """Pages of which one rank has the bytes `[rank * part, (rank + 1) * part)` of a block. Satisfies protocol.Pages."""

    def __init__(self, pages: Pages, *, rank: int, num_ranks: int) -> None:
        assert 0 <= rank < num_ranks, (rank, num_ranks)
        self._pages = pages
        self.num_pages = pages.num_pages
        self.page_nbytes = pages.page_nbytes * num_ranks
        self._part = slice(rank * pages.page_nbytes, (rank + 1) * pages.page_nbytes)

    def copy_in(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """See protocol.Pages. Reads this rank's part of `block`."""
        assert block.shape == (self.page_nbytes,), (block.shape, self.page_nbytes)
        self._pages.copy_in(block_id, block[self._part])

    def copy_out(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """See protocol.Pages. Writes this rank's part of `block`, and nothing else."""
        assert block.shape == (self.page_nbytes,), (block.shape, self.page_nbytes)
        self._pages.copy_out(block_id, block[self._part])
