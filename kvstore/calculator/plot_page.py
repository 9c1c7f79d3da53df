"""A drawing as one HTML page: an SVG with its legend, and the numbers below. No script, nothing fetched, light and dark."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from kvstore.calculator.axes import Axis, tick_label
from kvstore.calculator.drawing import Drawing, Series

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 24, 12, 58  # around the plot's area
_COLOURS = 8

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #5c6570; --grid: #dfe3e8;
  --c0: #0b66b0; --c1: #c4540a; --c2: #12805c; --c3: #a8397f; --c4: #8a6d00; --c5: #6a51c7; --c6: #b3261e; --c7: #4f5b66; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e9ed; --soft: #9aa4af; --grid: #2c3238;
  --c0: #63b3f3; --c1: #f2935a; --c2: #4fc79c; --c3: #e585c0; --c4: #d9b83f; --c5: #ab98f5; --c6: #f28b82; --c7: #a9b4bf; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.15rem; margin: 0 0 .5rem; } svg { width: 100%; height: auto; display: block; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; margin: 0 0 .5rem; padding: 0; }
.legend svg { display: inline-block; width: 26px; height: 10px; margin-right: .4rem; }
.grid { stroke: var(--grid); } .frame { stroke: var(--soft); fill: none; }
.ticks text { fill: var(--soft); font-size: 12px; } .name { fill: var(--ink); font-size: 13px; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .hit { fill: transparent; stroke: none; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } details { overflow-x: auto; color: var(--soft); }
td, th { padding: .1rem .9rem .1rem 0; text-align: right; } td:first-child, th:first-child { text-align: left; }
""" + "\n".join(
    f".s{n} {{ stroke: var(--c{n}); }} .d{n} {{ fill: var(--c{n}); stroke: none; }}" for n in range(_COLOURS)
)


def make_page(drawing: Drawing) -> str:
    """The page's text. There are points to show."""
    html = ET.Element("html", {"lang": "en"})
    head = ET.SubElement(html, "head")
    ET.SubElement(head, "meta", {"charset": "utf-8"})
    ET.SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
    _add(head, "title", drawing.title)
    _add(head, "style", _STYLE)
    body = ET.SubElement(html, "body")
    _add(body, "h1", drawing.title)
    _add_legend(body, drawing)
    _add_picture(body, drawing)
    _add_numbers(body, drawing)
    return "<!DOCTYPE html>\n" + ET.tostring(html, encoding="unicode", method="html") + "\n"


def _add(parent: ET.Element, tag: str, text: str, attributes: dict[str, str] | None = None) -> ET.Element:
    element = ET.SubElement(parent, tag, attributes or {})
    element.text = text
    return element


def _add_legend(body: ET.Element, drawing: Drawing) -> None:
    legend = ET.SubElement(body, "ul", {"class": "legend"})
    for number, series in enumerate(drawing.series):
        entry = ET.SubElement(legend, "li")
        swatch = ET.SubElement(entry, "svg", {"viewBox": "0 0 26 10", "aria-hidden": "true"})
        if series.line:
            ET.SubElement(swatch, "path", _line_attributes(series, number, "M0,5L26,5"))
        if series.marks:
            ET.SubElement(swatch, "circle", {"cx": "13", "cy": "5", "r": "3.5", "class": f"d{number % _COLOURS}"})
        swatch.tail = series.label


def _add_picture(body: ET.Element, drawing: Drawing) -> None:
    x_axis, y_axis = drawing.axes()
    svg = ET.SubElement(body, "svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img"})
    _add(svg, "title", drawing.title)
    _add_axes(svg, x_axis, y_axis, drawing)
    for number, series in enumerate(drawing.series):
        _add_series(svg, x_axis, y_axis, series, number)


def _add_axes(svg: ET.Element, x_axis: Axis, y_axis: Axis, drawing: Drawing) -> None:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    ticks = ET.SubElement(svg, "g", {"class": "ticks"})
    for value in x_axis.ticks():
        x = f"{_x(x_axis, value):.1f}"
        ET.SubElement(ticks, "line", {"x1": x, "x2": x, "y1": f"{_TOP}", "y2": f"{bottom}", "class": "grid"})
        _add(ticks, "text", tick_label(value), {"x": x, "y": f"{bottom + 18}", "text-anchor": "middle"})
    for value in y_axis.ticks():
        y = _y(y_axis, value)
        ET.SubElement(
            ticks, "line", {"x1": f"{_LEFT}", "x2": f"{right}", "y1": f"{y:.1f}", "y2": f"{y:.1f}", "class": "grid"}
        )
        _add(ticks, "text", tick_label(value), {"x": f"{_LEFT - 8}", "y": f"{y + 4:.1f}", "text-anchor": "end"})
    frame = {"width": f"{right - _LEFT}", "height": f"{bottom - _TOP}", "class": "frame"}
    ET.SubElement(svg, "rect", {"x": f"{_LEFT}", "y": f"{_TOP}", **frame})
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    place = {"text-anchor": "middle", "class": "name"}
    _add(svg, "text", drawing.x_label, {"x": f"{middle_x}", "y": f"{_HEIGHT - 14}", **place})
    turned = f"translate(18 {middle_y}) rotate(-90)"
    _add(svg, "text", drawing.y_label, {"transform": turned, **place})


def _add_series(svg: ET.Element, x_axis: Axis, y_axis: Axis, series: Series, number: int) -> None:
    group = ET.SubElement(svg, "g", {"class": "series"})
    runs = list(_runs(x_axis, y_axis, series))
    if series.line:
        path = "".join(
            "M" + "L".join(f"{_x(x_axis, x):.1f},{_y(y_axis, y):.1f}" for x, y in run) for run in runs if len(run) > 1
        )
        if path:
            ET.SubElement(group, "path", _line_attributes(series, number, path))
    for x, y in (point for run in runs for point in run):
        place = {"cx": f"{_x(x_axis, x):.1f}", "cy": f"{_y(y_axis, y):.1f}"}
        seen = series.marks or any(len(run) == 1 and run[0] == (x, y) for run in runs)
        size = {"r": "4", "class": f"d{number % _COLOURS}"} if seen else {"r": "7", "class": "hit"}
        _add(ET.SubElement(group, "circle", place | size), "title", f"{series.label}: {_exact(x)}, {_exact(y)}")


def _runs(x_axis: Axis, y_axis: Axis, series: Series) -> Iterator[list[tuple[float, float]]]:
    """The points between gaps."""
    run: list[tuple[float, float]] = []
    for x, y in series.points:
        if x_axis.can_show(x) and y_axis.can_show(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _line_attributes(series: Series, number: int, path: str) -> dict[str, str]:
    attributes = {"d": path, "class": f"line s{number % _COLOURS}"}
    if series.dashed:
        attributes["stroke-dasharray"] = "6 4"
    elif number >= _COLOURS:  # its colour is taken
        attributes["stroke-dasharray"] = "2 4"
    return attributes


def _add_numbers(body: ET.Element, drawing: Drawing) -> None:
    details = ET.SubElement(body, "details")
    _add(details, "summary", "The numbers")
    table = ET.SubElement(details, "table")
    header = ET.SubElement(table, "tr")
    for name in ("series", drawing.x_label, drawing.y_label):
        _add(header, "th", name)
    for series in drawing.series:
        for x, y in series.points:
            row = ET.SubElement(table, "tr")
            for text in (series.label, _exact(x), _exact(y)):
                _add(row, "td", text)


def _exact(value: float) -> str:
    return f"{value:.6g}"


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.position(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.position(value) * (_HEIGHT - _TOP - _BOTTOM)
