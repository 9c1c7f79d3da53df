"""TTFT against input length as a picture. Needs matplotlib, the extra `plot`."""

import importlib.util
from pathlib import Path

from kvstore.bench.measures import percentile
from kvstore.bench.plan import Result
from kvstore.core.errors import ConfigError

_BINS = 12
_GROUP = 5  # points; a median of fewer jumps about


def check_plot(path: Path) -> None:
    """Raise ConfigError, before anything is run, when the picture could not be made."""
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise ConfigError(f"--plot: {path}; use a name that ends in .png, .svg or .pdf", field="plot", value=str(path))
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot: matplotlib is not installed; use pip install 'kvstore-tiered[plot]'", field="plot", value=str(path)
        )


def medians(points: list[tuple[int, float]], bins: int = _BINS) -> list[tuple[float, float]]:
    """(middle of the lengths, median) of at most `bins` groups of nearly equal size, in order of length."""
    ordered = sorted(points)
    count = min(bins, -(-len(ordered) // _GROUP))
    groups = [ordered[len(ordered) * at // count : len(ordered) * (at + 1) // count] for at in range(count)]
    return [
        (percentile([length for length, _ in group], 50), percentile([value for _, value in group], 50))
        for group in groups
    ]


def save_plot(result: Result, path: Path) -> None:
    """A point for each request that succeeded, and the medians of groups of like length as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, side in enumerate(result.sides):
        points = [(s.prompt_tokens, s.ttft_s * 1000) for s in side.samples if s.ok and s.ttft_s is not None]
        if points:
            lengths, values = zip(*points, strict=True)
            axes.scatter(lengths, values, s=14, alpha=0.5, color=f"C{number}", label=side.target.label)
            axes.plot(*zip(*medians(points), strict=True), color=f"C{number}")
    axes.set(xlabel="prompt tokens", ylabel="TTFT, ms", title=f"{result.plan.workload.name}: TTFT against input length")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)
