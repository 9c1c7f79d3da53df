"""Lines as pictures: both kinds are made, parsed again, and hold what was drawn; what cannot be drawn is refused."""

import importlib.util
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.calculator.axes import Axis, axis_over, tick_label
from kvstore.calculator.plots import Series, check_plot, plot_lines
from kvstore.core.errors import ConfigError

SERIES = [
    Series("recompute <& co>", [(n, 2e-5 * n) for n in (128, 1024, 8192)]),
    Series("nvme", [(128, 0.1), (1024, math.inf), (8192, 0.2), (16384, 0.3)], dashed=True),
    Series("measured", [(512, 0.01), (0, 3)], marks=True, line=False),
]
LABELS = {"title": "TTFT", "x_label": "tokens", "y_label": "s"}


class Page(HTMLParser):
    """Elements with their attributes, and the text in each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data.strip()))

    def of(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [
            found for name, found in self.elements if name == tag and kind in [*(found.get("class") or "").split(), ""]
        ]


@pytest.mark.parametrize("log", [True, False])
def test_a_page_parses_and_has_lines_legend_and_numbers(tmp_path: Path, log: bool) -> None:
    path = tmp_path / "plot.html"

    plot_lines(path, SERIES, **LABELS, log_x=log, log_y=log)

    page = Page(path.read_text())
    assert ("li", "recompute <& co>") in page.texts
    assert ("td", "8192") in page.texts
    assert len(page.of("path", "line")) == 2 + 2  # in the plot, in the legend
    dashed = [found for found in page.of("path", "s1") if "L26" not in (found["d"] or "")]
    assert [found["stroke-dasharray"] for found in dashed] == ["6 4"]
    assert (dashed[0]["d"] or "").count("M") == 1, "a gap at infinity; a point alone is a dot"
    assert len(page.of("circle", "d2")) == (1 if log else 2) + 1, "0 has no logarithm"


def test_a_page_fetches_nothing_and_suits_light_and_dark(tmp_path: Path) -> None:
    path = tmp_path / "plot.html"

    plot_lines(path, SERIES, **LABELS)

    text = path.read_text()
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img", text)
    assert "prefers-color-scheme: dark" in text
    assert text.startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("log", [True, False])
def test_a_picture_is_a_png(tmp_path: Path, log: bool) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = tmp_path / "plot.PNG"

    plot_lines(path, SERIES, **LABELS, log_x=log, log_y=log)

    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = imread(path, format="png")
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, 4)[::7].tolist()}) > 5, "not all of one colour"


def test_many_series_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "plot.html"

    plot_lines(path, [Series(str(number), [(1, number), (2, number)]) for number in range(11)], **LABELS)

    looks = [(found["class"], found.get("stroke-dasharray")) for found in Page(path.read_text()).of("path", "line")]
    assert len(set(looks)) == 11


@pytest.mark.parametrize(
    ("name", "words"), [("plot.pdf", "ends in .png or .html"), ("plot", "ends in"), ("absent/plot.html", "no folder")]
)
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_plot(tmp_path / name)


def test_without_matplotlib_a_png_is_refused_and_a_page_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"matplotlib is not installed; use pip install 'kvstore-tiered\[plot\]'"):
        check_plot(tmp_path / "plot.png")
    check_plot(tmp_path / "plot.html")


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no point to draw"):
        plot_lines(tmp_path / "plot.html", [Series("a", [(0, 1), (1, math.inf)])], **LABELS, log_x=True)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plot.html").mkdir()

    with pytest.raises(ConfigError, match="cannot write"):
        plot_lines(tmp_path / "plot.html", SERIES, **LABELS)


numbers = st.floats(-1e12, 1e12, allow_subnormal=False).filter(lambda value: value == 0 or abs(value) > 1e-9)


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=20), st.booleans())
def test_an_axis_holds_all_that_it_can_show_and_few_ticks(values: list[float], log: bool) -> None:
    axis = axis_over(values, log=log)

    shown = [value for value in values if value > 0 or not log]
    if axis is None:
        assert not shown
        return
    assert all(-1e-9 <= axis.position(value) <= 1 + 1e-9 for value in shown)
    ticks = axis.ticks()
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 16
    assert all(-1e-6 <= axis.position(tick) <= 1 + 1e-6 for tick in ticks)


def test_ticks_are_round() -> None:
    assert Axis(0, 30, log=False).ticks() == [0, 5, 10, 15, 20, 25, 30]
    assert Axis(1, 1e5, log=True).ticks() == [1, 10, 100, 1000, 10_000, 100_000]
    assert Axis(1, 100, log=True).ticks() == [1, 2, 5, 10, 20, 50, 100]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.05, "0.05"), (999, "999"), (1000, "1k"), (32_768, "32.77k"), (1.5e6, "1.5M")]
)
def test_labels_are_short(value: float, text: str) -> None:
    assert tick_label(value) == text
