"""What a plot shows, whatever it is drawn with."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.calculator.axes import Axis, axis_over


class Series(NamedTuple):
    """A line through its points in their order; a point that is not finite, or has no logarithm, leaves a gap."""

    label: str  # for the legend
    points: Sequence[tuple[float, float]]
    marks: bool = False  # a dot on each point; without a line when `line` is false
    line: bool = True
    dashed: bool = False


class Drawing(NamedTuple):
    """Some series on one pair of axes."""

    series: Sequence[Series]
    title: str
    x_label: str
    y_label: str
    log_x: bool
    log_y: bool

    def can_show(self, point: tuple[float, float]) -> bool:
        """Whether it has a place on the axes."""
        x, y = point
        return math.isfinite(x) and math.isfinite(y) and (x > 0 or not self.log_x) and (y > 0 or not self.log_y)

    def shown_points(self) -> list[tuple[float, float]]:
        """Of all series."""
        return [point for series in self.series for point in series.points if self.can_show(point)]

    def axes(self) -> tuple[Axis, Axis]:
        """That of x, that of y; there are points to show."""
        points = self.shown_points()
        x_axis = axis_over((x for x, _ in points), log=self.log_x)
        y_axis = axis_over((y for _, y in points), log=self.log_y)
        assert x_axis is not None
        assert y_axis is not None
        return x_axis, y_axis
