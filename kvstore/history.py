"""What figures were over the last day, in a fixed piece of memory: two rings of samples, a fine and a coarse one."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

MAX_SERIES = 160
"""Figures that are kept; those that appear later than so many others are not."""

_FINE_SAMPLES = 300
_COARSE_SAMPLES = 1440


class Table(NamedTuple):
    """Samples in order of time; a figure that was not known at a time is None there."""

    at_s: list[float]
    series: dict[str, list[float | None]]


class _Ring:
    """The last `num_samples` rows of [time, figures...], at least `every_s` apart."""

    def __init__(self, num_samples: int, every_s: float) -> None:
        self.every_s = every_s
        self._rows = np.full((num_samples, 1 + MAX_SERIES), np.nan)
        self._num_added = 0

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    @property
    def newest_s(self) -> float:
        return float(self._rows[(self._num_added - 1) % len(self._rows), 0]) if self._num_added else -np.inf

    def add(self, row: np.ndarray) -> None:
        self._rows[self._num_added % len(self._rows)] = row
        self._num_added += 1

    def since(self, from_s: float) -> np.ndarray:
        first = max(0, self._num_added - len(self._rows))
        rows = self._rows[np.arange(first, self._num_added) % len(self._rows)]
        return rows[rows[:, 0] >= from_s]


class History:
    """Every sample for ten minutes if there is one each `every_s` = 2 s, and one a minute for 24 hours. 2.3 MB, taken at once;
    `nbytes` is exact. Sums since start stay sums, so that leaving samples out loses nothing of a rate. One thread at a time."""

    def __init__(self, *, every_s: float = 2.0) -> None:
        self._fine = _Ring(_FINE_SAMPLES, every_s)
        self._coarse = _Ring(_COARSE_SAMPLES, 60.0)
        self._columns: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the samples."""
        return self._fine.nbytes + self._coarse.nbytes

    def add(self, at_s: float, figures: Mapping[str, float]) -> None:
        """A sample, later than all before."""
        row = np.full(1 + MAX_SERIES, np.nan)
        row[0] = at_s
        for name, value in figures.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) == MAX_SERIES:
                    continue
                column = self._columns[name] = 1 + len(self._columns)
            row[column] = value
        self._fine.add(row)
        if at_s >= self._coarse.newest_s + self._coarse.every_s:
            self._coarse.add(row)

    def table(self, from_s: float, max_samples: int = 300) -> Table:
        """Samples from then on, evenly thinned to about `max_samples`, the newest always among them. Where the fine ring reaches
        that far back and has few enough samples, they are its own."""
        coarse, fine = self._coarse.since(from_s), self._fine.since(from_s)
        if len(fine):
            older = coarse[coarse[:, 0] < fine[0, 0]]
            fits = len(older) + len(fine) <= max_samples
            rows = np.concatenate((older, fine)) if fits else np.concatenate((coarse[:-1], _minutely(coarse, fine)))
        else:
            rows = coarse
        step = max(1, -(-len(rows) // max_samples))
        rows = rows[(len(rows) - 1) % step :: step]
        series = {name: _known(rows[:, column]) for name, column in self._columns.items()}
        return Table(rows[:, 0].tolist(), {name: values for name, values in series.items() if values})


def _minutely(coarse: np.ndarray, fine: np.ndarray) -> np.ndarray:
    """The newest coarse sample, and the newest of all where that is later."""
    newest = fine[-1:]
    return newest if len(coarse) and coarse[-1, 0] == newest[0, 0] else np.concatenate((coarse[-1:], newest))


def _known(column: np.ndarray) -> list[float | None]:
    values: list[float | None] = column.tolist()
    unknown = np.isnan(column)
    if unknown.all():
        return []
    return [None if missing else value for value, missing in zip(values, unknown.tolist(), strict=True)]
