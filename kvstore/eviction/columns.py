"""A column by row that a policy keeps for itself."""

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.index import BlockIndex, grown

_T = TypeVar("_T", bound=np.generic)


class Column(Generic[_T]):
    """Grows with the index's capacity; `values` is numpy, `at` the same memory for single rows. Ask `grow` before writing."""

    def __init__(self, index: BlockIndex, dtype: type[_T]) -> None:
        self._index = index
        self.values: NDArray[_T] = np.empty(0, dtype)
        self.size = 0
        self.grow()

    def grow(self) -> None:
        """Follow the index."""
        if self.size < self._index.capacity:
            self.values = grown(self.values, self._index.capacity)
            self.at = self.values.data
            self.size = len(self.values)
