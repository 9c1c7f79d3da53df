"""KVStoreConnector with a slow worker side, so that a test can do something in the middle of a load. Loaded by the server
under test; $SLOW_LOADS names a file: while it exists, each page takes PAGE_S, and "<file>.started" says that one began."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engine_connector import vllm
from kvstore.kernels.paged import PagedCache

PAGE_S = 0.05


class SlowPages(PagedCache):
    """Pages whose copy_in can be slowed down from outside."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._switch = Path(os.environ["SLOW_LOADS"])

    def copy_in(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """As PagedCache.copy_in."""
        if self._switch.exists():
            Path(f"{self._switch}.started").touch()
            time.sleep(PAGE_S)
        super().copy_in(block_id, block)


vllm.PagedCache = SlowPages
KVStoreConnector = vllm.KVStoreConnector
