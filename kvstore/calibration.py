"""What an engine's computing and copying cost, learned from what they took; and how good the predictions were.

Wall times of shared machines have heavy tails and sudden changes, and the two look alike at first. So one odd sample moves an
estimate a little, and several in a row that are off to the same side move it all the way.
"""

import itertools
import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.costs import LoadCost, PrefillCost

MIN_SAMPLE_BYTES = 256 << 10
"""Fewer bytes say more about latency than about bandwidth."""

_WEIGHTS = (0.2, 0.5, 0.8)  # of a sample: by how many before it, in a row, were as surprising to the same side
_SURPRISE = 2.0  # times more or less than expected
_MOST = 4.0  # a sample counts as at most so many times more or less
_STEPS_FOR_MORE = (6, 12)  # so many steps for a second constant, for a third
_SINGULAR = 1e-6  # a determinant below this: the columns, each of length 1, are nearly the same
_NOISE = 0.002  # relative: a fit that is nearer than any clock is not better


class Smoothed:
    """A positive quantity that is seen with noise: an average that forgets, and what moves it.

    The weight of a sample is 1/2, 1/3, 1/4 and then 1/5, so that the first ones count alike. A surprising one counts as 4
    times more or less at most; from the second on, in a row and to the same side, their weight rises. After a sudden change
    to ten times more or less, four samples bring the value to within a third of it.
    """

    def __init__(self, prior: float | None = None) -> None:
        self.value = prior
        self.num_samples = 0
        self._surprises = 0  # in a row; negative: below what was expected

    def set_prior(self, prior: float) -> None:
        """What to believe until there are samples."""
        if not self.num_samples:
            self.value = prior

    def observe(self, sample: float) -> None:
        """It was `sample` this time."""
        self.num_samples += 1
        if self.value is None:
            self.value = sample
            return
        self._count_surprise(sample / self.value)
        level = min(max(abs(self._surprises), 1), len(_WEIGHTS)) - 1
        weight = max(_WEIGHTS[level], 1 / (self.num_samples + 1))
        bounded = min(max(sample, self.value / _MOST), self.value * _MOST)
        self.value += weight * (bounded - self.value)

    def _count_surprise(self, ratio: float) -> None:
        if 1 / _SURPRISE <= ratio <= _SURPRISE:
            self._surprises = 0
        elif ratio > 1:
            self._surprises = max(self._surprises, 0) + 1
        else:
            self._surprises = min(self._surprises, 0) - 1


class CopySpeed:
    """Copies from RAM into an engine's pages, as engines report them: many at once, so that there is no latency to be seen."""

    def __init__(self) -> None:
        self._byte_s = Smoothed()

    def observe(self, nbytes: int, seconds: float) -> None:
        """`nbytes` took `seconds` of copying."""
        if nbytes >= MIN_SAMPLE_BYTES and seconds > 0:
            self._byte_s.observe(seconds / nbytes)

    @property
    def cost(self) -> LoadCost | None:
        """None until there was a copy."""
        byte_s = self._byte_s.value
        return None if byte_s is None else LoadCost(0.0, 1 / byte_s)


class PredictionLog:
    """Predicted against actual seconds of one kind of thing. What only took long because it was small is not judged apart:
    sums weigh by length, `ratio` does not."""

    def __init__(self) -> None:
        self.num = 0
        self.num_close = 0  # within a quarter either way
        self.predicted_s = 0.0  # sums
        self.actual_s = 0.0
        self._log_ratio = 0.0

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """`predicted_s` had been said, and it took `actual_s`. What has no length is left out."""
        if predicted_s <= 0 or actual_s <= 0:
            return
        log_ratio = math.log(actual_s / predicted_s)
        self.num += 1
        self.num_close += abs(log_ratio) <= math.log(1.25)
        self.predicted_s += predicted_s
        self.actual_s += actual_s
        self._log_ratio += max(_WEIGHTS[0], 1 / self.num) * (log_ratio - self._log_ratio)

    @property
    def ratio(self) -> float:
        """Actual / predicted, the recent ones' geometric mean; 1.0 before there are any."""
        return math.exp(self._log_ratio)


class _Step(NamedTuple):
    tokens: float
    pairs: float
    seconds: float


class PrefillEstimator:
    """t0, a and b from an engine's steps: `seconds = t0 + a * tokens + b * pairs`.

    A share of n tokens behind s of context has n*s + n*n/2 pairs of a token and one it looks back at; that is what b counts
    in C(s + n) - C(s), so steps with several shares, and decodes among them, are samples like any other. The last 96 steps are
    fitted by weighted least squares: of relative errors, since a step of 10 ms is measured as well as one of 1 s; newer
    ones weigh more; ones that are far off count as less far. No constant is negative, and t0 and b are left at 0 unless with
    them the fit is better by more than chance makes it: chunks of one length cannot tell t0 from a, nor short prompts b.
    """

    MIN_STEPS = 3
    MIN_STEP_TOKENS = 16
    """Steps with fewer are decodes. Those wait for memory, not for arithmetic, and say nothing about prefill."""

    _KEPT = 96
    _REFIT = 8  # after so many steps at the latest, so that surprises are noticed
    _ROUNDS = 4
    _FADE = 0.98  # each step weighs so much less than the next one
    _CHANGED = 6  # steps in a row, off by more than _OFF to one side, are another speed
    _OFF = 1.5
    _SUBSETS = tuple(subset for size in (1, 2, 3) for subset in itertools.combinations((1, 0, 2), size) if 1 in subset)

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=self._KEPT)
        self._fitted: PrefillCost | None = None
        self._error = 1.0  # relative, of a typical step
        self._off = 0  # steps in a row to one side; negative: faster than expected
        self._num_unfitted = 0

    def observe(self, num_tokens: float, num_pairs: float, seconds: float) -> None:
        """A step computed so many tokens, which looked back at so many pairs, in `seconds`."""
        if num_tokens < self.MIN_STEP_TOKENS or seconds <= 0 or num_pairs < 0:
            return
        step = _Step(num_tokens, num_pairs, seconds)
        if self._num_unfitted >= self._REFIT and len(self._steps) >= self.MIN_STEPS:
            self._fit()
        self._steps.append(step)
        self._num_unfitted += 1
        if self._fitted is not None:
            self._notice_change(step, self._fitted)

    @property
    def cost(self) -> PrefillCost | None:
        """None until there were a few steps. The first call after a step takes a millisecond."""
        if len(self._steps) >= self.MIN_STEPS and self._num_unfitted:
            self._fit()
        return self._fitted

    @property
    def confidence(self) -> float:
        """0 to 1: grows with the number of steps, and shrinks with how far they scatter."""
        if self.cost is None:
            return 0.0
        num_steps = len(self._steps)
        return num_steps / (num_steps + 4) * max(0.0, 1 - self._error)

    def _notice_change(self, step: _Step, fitted: PrefillCost) -> None:
        """Forget the steps before the last few if those were all off to one side, and no three constants explain both."""
        ratio = step.seconds / max(_predicted_s(fitted, step), 1e-9)
        side = 1 if ratio > self._OFF else -1 if ratio < 1 / self._OFF else 0
        self._off = self._off + side if side * self._off >= 0 and side else side
        if abs(self._off) < self._CHANGED:
            return
        self._off = 0
        self._fit(robust=False)
        assert self._fitted is not None
        recent = list(self._steps)[-self._CHANGED :]
        ratios = [each.seconds / max(_predicted_s(self._fitted, each), 1e-9) for each in recent]
        if min(ratios) > self._OFF**0.5 or max(ratios) < self._OFF**-0.5:
            self._steps = deque(recent, maxlen=self._KEPT)
        self._fit()

    def _fit(self, *, robust: bool = True) -> None:
        """Errors are relative to what is predicted, since those relative to what was measured would favour the quickest: so
        predictions are found in a few rounds, beginning with what was measured."""
        rows = np.array(self._steps)
        columns = np.column_stack((np.ones(len(rows)), rows[:, 0], rows[:, 1]))
        seconds = rows[:, 2]
        fade = self._FADE ** np.arange(len(rows) - 1, -1, -1.0)
        weights, predicted_s = fade, seconds
        for _ in range(self._ROUNDS):
            constants = _best_fit(columns / predicted_s[:, None], seconds / predicted_s, weights, self._SUBSETS)
            predicted_s = np.maximum(columns @ constants, 1e-9)
            misses = np.abs(seconds / predicted_s - 1)
            typical = float(np.median(misses))
            if robust:
                weights = fade * np.minimum(1.0, 2 * max(typical, 0.01) / np.maximum(misses, 1e-12))
        self._error = typical
        self._fitted = PrefillCost(*constants.tolist())
        self._num_unfitted = 0


def _predicted_s(cost: PrefillCost, step: _Step) -> float:
    return cost.t0_s + cost.a_s * step.tokens + cost.b_s * step.pairs


def _best_fit(
    columns: NDArray[np.float64],
    target: NDArray[np.float64],
    weights: NDArray[np.float64],
    subsets: tuple[tuple[int, ...], ...],
) -> NDArray[np.float64]:
    """The constants, none negative, for which `columns @ constants` is nearest to `target`. A further constant must make the
    sum of squares smaller by more than chance would (Akaike's criterion)."""
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    most = 1 + sum(len(columns) >= enough for enough in _STEPS_FOR_MORE)
    share = weights / weights.sum()
    scale = np.sqrt(np.maximum(share @ columns**2, 1e-300))
    scaled = columns / scale
    gram, goal, total = (scaled.T * share) @ scaled, scaled.T @ (share * target), float(share @ target**2)
    best, best_score = np.zeros(columns.shape[1]), math.inf
    for subset in subsets:
        chosen = list(subset)
        square = gram[np.ix_(chosen, chosen)]
        if len(subset) > most or np.linalg.det(square) < _SINGULAR:
            continue
        solved = np.linalg.solve(square, goal[chosen])
        if (solved < 0).any():
            continue
        variance = max(total - float(solved @ goal[chosen]), 0.0) / max(1 - len(subset) / effective, 0.1)
        score = effective * math.log(variance + _NOISE**2) + 2 * len(subset)
        if score < best_score:
            best, best_score = np.zeros(columns.shape[1]), score
            best[chosen] = solved / scale[chosen]
    return best
