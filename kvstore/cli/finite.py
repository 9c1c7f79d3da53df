"""Numbers that are numbers: click's FloatRange takes nan in any range, and inf where a range has no end."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """As click's, without nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: D102
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


POSITIVE = FiniteRange(1e-12, 1e15)
"""An amount: what is squared, or divided by another such, stays finite."""

NOT_NEGATIVE = FiniteRange(0, 1e15)

SECONDS = FiniteRange(0, 1e6, min_open=True)
"""To wait for something: 11 days at most; clocks and locks refuse much longer ones."""
