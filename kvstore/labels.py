"""What people call their prompts: a short text on the blocks of a prompt, for tools to show. Nothing is decided by it.

A block has the label that was given last to a prompt with it: the beginning that two prompts share has that of the later one.
A restart forgets labels; the next request with one brings it back.
"""

import numpy as np

from kvstore.core.limits import MAX_LABELS
from kvstore.index import BlockIndex, Rows


class Labels:
    """Texts by number; the numbers are a column of the index. Loop thread only."""

    def __init__(self, index: BlockIndex, *, max_labels: int = MAX_LABELS) -> None:
        self._index = index
        self._max_labels = max_labels
        self._texts = [""]
        self._numbers = {"": 0}
        self._free: list[int] = []  # numbers whose text no block has any more
        self._next_sweep = 0  # blocks used until then

    def give(self, rows: Rows, text: str) -> bool:
        """These rows are of a prompt that is called so. False: there are too many labels, and these rows keep what they have."""
        number = self._numbers.get(text)
        if number is None:
            number = self._add(text)
        if number is not None:
            self._index.label[rows] = number
        return number is not None

    def of(self, row: int) -> str:
        """A row's label; "" when it has none."""
        return self._texts[int(self._index.label[row])]

    def check(self) -> None:
        """Every text has one number, and every row's number a text."""
        assert self._numbers == {text: number for number, text in enumerate(self._texts) if text or not number}
        assert self._index.label.max(initial=0) < len(self._texts) <= self._max_labels + 1

    def _add(self, text: str) -> int | None:
        if len(self._texts) <= self._max_labels:
            self._texts.append(text)
            self._numbers[text] = len(self._texts) - 1
            return len(self._texts) - 1
        if not self._free:
            self._sweep()
        if not self._free:
            return None
        number = self._free.pop()
        self._texts[number] = text
        self._numbers[text] = number
        return number

    def _sweep(self) -> None:
        """Forget labels that no block has any more. 2 ms for a million rows, so not again before as many blocks as there are
        labels were used."""
        if self._index.sequence < self._next_sweep:
            return
        self._next_sweep = self._index.sequence + self._max_labels
        used = np.bincount(self._index.label, minlength=len(self._texts)) > 0
        self._free = [number for number in np.flatnonzero(~used).tolist() if number]
        for number in self._free:
            del self._numbers[self._texts[number]]
            self._texts[number] = ""
