"""Lines as a picture: .png by matplotlib (the extra `plot`), or .html as a page that fetches nothing and needs nothing."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from kvstore.calculator.axes import tick_label
from kvstore.calculator.drawing import Drawing, Series
from kvstore.calculator.plot_page import make_page
from kvstore.core.errors import ConfigError

__all__ = ["Series", "check_plot", "plot_lines"]

_SUFFIXES = (".png", ".html")


def check_plot(path: Path, option: str = "plot") -> None:
    """Raise ConfigError, before anything is calculated, when the picture could not be made."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--{option}: {path}; use a name that ends in .png or .html", field=option, value=str(path))
    if not path.parent.is_dir():
        raise ConfigError(f"--{option}: there is no folder {path.parent}", field=option, value=str(path))
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"--{option}: {path}: matplotlib is not installed; use pip install 'kvstore-tiered[plot]', or a name that "
            "ends in .html",
            field=option,
            value=str(path),
        )


def plot_lines(
    path: Path,
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Write the picture; ConfigError when it cannot be, or when no point of any series can be shown."""
    check_plot(path)
    drawing = Drawing(series, title, x_label, y_label, log_x, log_y)
    if not drawing.shown_points():
        raise ConfigError(f"--plot: {path}: no point to draw", field="plot", value=str(path))
    try:
        if path.suffix.lower() == ".png":
            _write_png(path, drawing)
        else:
            path.write_text(make_page(drawing), encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"--plot: cannot write {path}: {err.strerror}", field="plot", value=str(path)) from err


def _write_png(path: Path, drawing: Drawing) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, line in enumerate(drawing.series):
        shown = [point if drawing.can_show(point) else (math.nan, math.nan) for point in line.points]
        axes.plot(
            *zip(*shown, strict=True),
            linestyle=("--" if line.dashed else "-") if line.line else "None",
            marker="o" if line.marks else "",
            markersize=4,
            color=f"C{number}",
            label=line.label,
        )
    x_axis, y_axis = drawing.axes()
    axes.set(xlabel=drawing.x_label, ylabel=drawing.y_label, title=drawing.title)
    axes.set(xscale="log" if drawing.log_x else "linear", yscale="log" if drawing.log_y else "linear")
    axes.set(xlim=(x_axis.low, x_axis.high), ylim=(y_axis.low, y_axis.high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: tick_label(value))
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=130)
