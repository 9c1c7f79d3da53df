"""Constants from what was measured: a few (tokens, seconds) of prefills, and of loads.

With two points the constants a and b of a prefill could be solved for, and come out wrong: a step's floor bends the short end
up, and the solution puts that into a negative b. What attention costs is known well from FLOPs, what the rest costs is not. So
the constants are the most probable ones, given the points and what was expected before them (priors.py): logarithms of t0, a
and b are normal, points have a relative error. Logarithms keep them positive. With many points the points decide.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.calculator.priors import Prior, scaled
from kvstore.core.errors import ConfigError
from kvstore.costs import LoadCost, PrefillCost

_POINT_ERROR = 0.02
_FORM_ERROR = 0.04
"""Relative errors: of a published or measured point, and of the form a x + b x^2/2 between points that it fits."""

_ROUNDING = 1e-9
"""A part of the answer below this is rounding, and as a factor of n^2 would still give a length that is never reached."""

_STEPS = 60
_NINETY = 1.64
"""A band of so many sigmas has nine of ten."""

Vector = NDArray[np.floating[Any]]


class Point(NamedTuple):
    """A prefill, or a request whose first `loaded_tokens` were loaded, up to its first token."""

    num_tokens: float
    seconds: float
    loaded_tokens: float = 0.0


class FittedPrefill(NamedTuple):
    """Constants, and how sure they are: `covariance` is of the logarithms of t0, a, b; None if nothing was expected of them."""

    cost: PrefillCost
    covariance: Vector | None
    floor_bound: bool = False

    def prefill_s(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """Seconds of computing `num_tokens` behind `context_tokens`, in one go."""
        if num_tokens <= 0:
            return 0.0
        return float(_parts(self.cost, num_tokens, context_tokens, floor_bound=self.floor_bound).sum())

    def error_of(self, num_tokens: float, context_tokens: float = 0.0) -> float:
        """Relative error, one sigma, of the predicted seconds of a prefill; nan if not known."""
        if self.covariance is None or num_tokens <= 0:
            return math.nan
        parts = _parts(self.cost, num_tokens, context_tokens, floor_bound=self.floor_bound)
        share = parts / max(parts.sum(), 1e-300)
        return math.sqrt(float(share @ self.covariance @ share) + _FORM_ERROR**2)


def band(seconds: float, error: float) -> tuple[float, float]:
    """The two ends between which nine of ten would lie."""
    factor = math.exp(_NINETY * error)
    return seconds / factor, seconds * factor


def unfitted(expected: Prior) -> FittedPrefill:
    """The expectation itself."""
    sigmas = (expected.t0_sigma, expected.a_sigma, expected.b_sigma)
    covariance: Vector = np.diag(np.array(sigmas, np.float64) ** 2)
    return FittedPrefill(expected.cost, covariance, expected.floor_bound)


def fit_prefill(points: Sequence[Point], expected: Prior) -> FittedPrefill:
    """The most probable constants: Gauss-Newton with damping on the logarithms of the factors of `expected`."""
    logs, damping = np.zeros(3), 1e-3
    residuals, slopes = _residuals(points, expected, logs)
    for _ in range(_STEPS):
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ residuals)
        tried, tried_slopes = _residuals(points, expected, logs + step)
        if tried @ tried <= residuals @ residuals:
            logs, residuals, slopes, damping = logs + step, tried, tried_slopes, damping / 4
        else:
            damping *= 8
        if float(np.abs(step).max()) < 1e-10:
            break
    covariance = np.linalg.inv(slopes.T @ slopes)
    return FittedPrefill(_with_factors(expected.cost, logs), covariance, expected.floor_bound)


def fit_prefill_alone(points: Sequence[Point]) -> FittedPrefill:
    """a and b of two points or more, when nothing is expected: least squares of the relative errors, neither negative, t0 0."""
    needs(points, 2, "--measured")
    rows = np.array([[point.num_tokens, point.num_tokens**2 / 2] for point in points]) / _seconds(points)[:, None]
    a_s, b_s = _non_negative(rows, np.ones(len(points)))
    return FittedPrefill(PrefillCost(t0_s=0.0, a_s=a_s, b_s=b_s), None)


def fit_load(points: Sequence[Point], kv_bytes_per_token: float, prefill: FittedPrefill) -> LoadCost:
    """Latency and bandwidth of two points or more, by least squares of the relative errors, neither negative. Of a point with
    tokens behind the loaded ones, what computing them takes is taken off."""
    needs(points, 2, "--measured-load")
    loads = [load_part(point, prefill) for point in points]
    weights = np.array([1 / point.seconds for point in points])
    rows = np.array([[1.0, kv_bytes_per_token * point.loaded_tokens] for point in points]) * weights[:, None]
    latency_s, s_per_byte = _non_negative(rows, np.array(loads) * weights)
    if s_per_byte <= 0:
        raise ConfigError(
            "--measured-load: longer loads take no longer, so there is no bandwidth in these points",
            field="--measured-load",
        )
    return LoadCost(latency_s, 1 / s_per_byte)


def load_part(point: Point, prefill: FittedPrefill) -> float:
    """Seconds of a request up to its first token that are not the computing behind the loaded tokens."""
    left = point.num_tokens - point.loaded_tokens
    return max(point.seconds - (prefill.prefill_s(left, point.loaded_tokens) if left > 1 else 0.0), 0.0)


def needs(points: Sequence[Point], count: int, field: str) -> None:
    """Raise ConfigError if there are fewer different lengths than constants."""
    lengths = sorted({point.num_tokens for point in points})
    if len(lengths) < count:
        raise ConfigError(
            f"{field}: {len(lengths)} length(s) given, {lengths}; needs {count} different ones",
            field=field,
            value=str(lengths),
        )


def _residuals(points: Sequence[Point], expected: Prior, logs: Vector) -> tuple[Vector, Vector]:
    """Of the points and of the expectation, in sigmas, and their slopes by the logarithms."""
    sigmas = np.array([expected.t0_sigma, expected.a_sigma, expected.b_sigma])
    cost = _with_factors(expected.cost, logs)
    parts = np.array([_parts(cost, point.num_tokens, floor_bound=expected.floor_bound) for point in points])
    sums = parts.sum(axis=1)
    of_points = np.log(sums / _seconds(points)) / _POINT_ERROR
    residuals = np.concatenate([of_points, logs / sigmas])
    return residuals, np.concatenate([parts / sums[:, None] / _POINT_ERROR, np.diag(1 / sigmas)])


def _parts(cost: PrefillCost, num_tokens: float, context_tokens: float = 0.0, *, floor_bound: bool) -> Vector:
    """Seconds owed to t0, to the tokens, to attention: their sum is the prefill's, each is the sum's slope by the logarithm of
    its constant.

    On top of one another: t0 + a n. Of a floor, which hides behind the tokens' work when that is the larger (and in part when
    it is like it): sqrt(t0^2 + (a n)^2).
    """
    linear_s = cost.a_s * num_tokens
    attention_s = cost.work_s(context_tokens + num_tokens) - cost.work_s(context_tokens) - linear_s
    if floor_bound:
        both = math.hypot(cost.t0_s, linear_s)
        return np.array([cost.t0_s**2 / both, linear_s**2 / both, attention_s])
    return np.array([cost.t0_s, linear_s, attention_s])


def _with_factors(cost: PrefillCost, logs: Vector) -> PrefillCost:
    t0, a, b = (float(factor) for factor in np.exp(logs))
    return scaled(cost, linear=a, attention=b, t0_s=cost.t0_s * t0)


def _non_negative(rows: Vector, wanted: Vector) -> tuple[float, float]:
    """The two factors, neither negative, of the columns that come nearest: if one would be, the other alone."""
    both = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    both = np.where(np.abs(rows * both).max(axis=0) < _ROUNDING * np.abs(wanted).max(), 0.0, both)
    if both.min() >= 0:
        return float(both[0]), float(both[1])
    alone = [max(float(rows[:, at] @ wanted / (rows[:, at] @ rows[:, at])), 0.0) for at in (0, 1)]
    errors = [float(np.square(rows[:, at] * alone[at] - wanted).sum()) for at in (0, 1)]
    return (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])


def _seconds(points: Sequence[Point]) -> Vector:
    return np.array([point.seconds for point in points])
