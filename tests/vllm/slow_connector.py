"""KVStoreConnector whose copies can be slowed down, so that a test can do something in the middle of one.

Loaded by the server under test. $SLOW names a directory: while it holds a file `loads` or `saves`, each page takes as many
seconds as the file says, and `loads.started` or `saves.started` tells that it has come to that.
"""

import os
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engine_connector import vllm, vllm_engine
from kvstore.kernels.paged import PagedCache


class SlowPages(PagedCache):
    """Pages whose copies take their time."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._switches = Path(os.environ["SLOW"])

    def copy_in(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """As PagedCache.copy_in."""
        self._wait("loads")
        super().copy_in(block_id, block)

    def copy_out(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """As PagedCache.copy_out."""
        self._wait("saves")
        super().copy_out(block_id, block)

    def _wait(self, name: str) -> None:
        try:
            seconds = float((self._switches / name).read_text())
        except FileNotFoundError:
            return
        (self._switches / f"{name}.started").touch()
        time.sleep(seconds)


vllm_engine.PagedCache = SlowPages
KVStoreConnector = vllm.KVStoreConnector
