"""Charts as inline SVG, coloured by the style sheet of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple
from xml.etree import ElementTree

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 40

MOST_NAMES = 15
"""An axis with more names labels only about eight of them."""

Point = tuple[float, float]
KINDS = "abcefghd"
"""Classes of the style sheet for curves, in the order of their use."""


class Series(NamedTuple):
    """One curve; only dots if `line` is False. `kind` is a class of the style sheet."""

    name: str
    points: Sequence[Point]
    kind: str
    dots: bool = False
    line: bool = True


class Frame:
    """The plane of a chart: maps values to positions and draws axes with labels."""

    def __init__(self, x: Point, y: Point, *, log: bool = False, names: Sequence[str] = ()) -> None:
        self.log, self.names = log, names
        self.x = _widened(*map(math.log10, x)) if log else _widened(*x)
        self.y = _widened(*y)

    def marks(self) -> list[tuple[float, str]]:
        """Return the values at which the axis has labels, and the labels."""
        if self.names:
            every = 1 if len(self.names) <= MOST_NAMES else len(self.names) // 8
            return [(float(place), name) for place, name in enumerate(self.names) if place % every == 0]
        if not self.log:
            return [(value, short(value)) for value in ticks(*self.x)]
        low, high = math.floor(self.x[0]), math.ceil(self.x[1])
        factors = (1, 2, 5) if high - low < 3 else (1,)
        values = [m * 10.0**e for e in range(low, high + 1) for m in factors]
        return [(x, short(x)) for x in values if self.x[0] - 1e-9 <= math.log10(x) <= self.x[1] + 1e-9]

    def at(self, x: float, y: float) -> Point:
        if self.log:
            x = math.log10(x)
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    def axes(self, x_label: str, y_label: str) -> list[str]:
        out = []
        left = 10.0 ** self.x[0] if self.log else self.x[0]
        for value in ticks(*self.y):
            _, y = self.at(left, value)
            out.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
            out.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{short(value)}</text>')
        for value, label in self.marks():
            x, _ = self.at(value, self.y[0])
            out.append(
                f'<text class="tick" x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(label)}</text>'
            )
        base = HEIGHT - BOTTOM
        out.append(f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        out.append(f'<text class="name" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
        if y_label:
            out.append(
                f'<text class="name" transform="translate(13 {(TOP + base) / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
            )
        return out


def lines(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str = "",
    *,
    x: Point | None = None,
    y: Point | None = None,
    diagonal: bool = False,
    bars: Sequence[tuple[float, float, float]] = (),
    log: bool = False,
    names: Sequence[str] = (),
    level: float | None = None,
) -> str:
    """Draw curves over a common axis. Omit those without points; return an empty string if none is left.

    The axis is linear, logarithmic (`log`), or has `names` at 0, 1, 2 … `bars` are spans (x, low, high) behind the curves;
    `level` is a dashed line.
    """
    series = [one for one in series if one.points]
    if not series:
        return ""
    points = [point for one in series for point in one.points]
    low, high = [min(p) for p in zip(*points, strict=True)], [max(p) for p in zip(*points, strict=True)]
    if level is not None:
        low[1], high[1] = min(low[1], level), max(high[1], level)
    across = (-0.5, len(names) - 0.5) if names else x or (low[0], high[0])
    frame = Frame(across, y or _with_room(low[1], high[1]), log=log, names=names)
    out = frame.axes(x_label, y_label)
    if level is not None:
        left = 10.0 ** frame.x[0] if log else frame.x[0]
        up = frame.at(left, level)[1]
        out.append(f'<line class="diagonal" x1="{LEFT}" y1="{up}" x2="{WIDTH - RIGHT}" y2="{up}"/>')
    if diagonal:
        (x1, y1), (x2, y2) = frame.at(frame.x[0], frame.y[0]), frame.at(frame.x[1], frame.y[1])
        out.append(f'<line class="diagonal" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')
    for place, bottom, top in bars:
        (x1, y1), (_, y2) = frame.at(place, max(bottom, frame.y[0])), frame.at(place, min(top, frame.y[1]))
        out.append(f'<line class="span" x1="{x1}" y1="{y1}" x2="{x1}" y2="{y2}"/>')
    for one in series:
        places = [frame.at(*point) for point in one.points]
        if len(places) > 1 and one.line:
            path = " ".join(f"{a:g},{b:g}" for a, b in places)
            out.append(f'<polyline class="curve {one.kind}" points="{path}"/>')
        seen = "dot" if one.dots or len(places) == 1 or not one.line else "dot hidden"
        for (a, b), (place, up) in zip(places, one.points, strict=True):
            where = escape(names[round(place)]) if names else short(place)
            label = f"{escape(one.name)}: {short(up, 5)} at {where}"
            out.append(f'<circle class="{seen} {one.kind}" cx="{a:g}" cy="{b:g}" r="3"><title>{label}</title></circle>')
    return _figure(title, series, out)


def histogram(title: str, edges: Sequence[float], series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Draw bars from edge to edge; the series overlap. The points of a series are (position of the bar, height)."""
    top = max((height for one in series for _, height in one.points), default=1.0)
    frame = Frame((edges[0], edges[-1]), (0.0, top * 1.05))
    out = frame.axes(x_label, y_label)
    for one in series:
        for (_, height), left, right in zip(one.points, edges, edges[1:], strict=False):
            (x1, y1), (x2, y2) = frame.at(left, height), frame.at(right, 0)
            label = f"{escape(one.name)}: {height:.2%} between {short(left, 4)} and {short(right, 4)}"
            size = f'width="{max(x2 - x1 - 0.5, 0.5):g}" height="{max(y2 - y1, 0):g}"'
            out.append(f'<rect class="bar {one.kind}" x="{x1}" y="{y1}" {size}><title>{label}</title></rect>')
    return _figure(title, series, out)


def _figure(title: str, series: Sequence[Series], content: list[str]) -> str:
    keys = "".join(f'<span><i class="key {one.kind}"></i>{escape(one.name)}</span>' for one in series if one.name)
    legend = f'<div class="legend">{keys}</div>' if keys else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption>{legend}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(content)}</svg></figure>'
    )


COLOURS = dict(
    zip(
        "abcdefgh",
        ["#2b6cd4", "#d9731a", "#18936a", "#9aa4b2", "#8a5cd6", "#c23b5a", "#0f8ea8", "#8a7a12"],
        strict=True,
    )
)
PICTURE_STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1c2430}.tick,.name,.legend{font-size:12px;fill:#667085}"
    ".grid{stroke:#d9dee6}.axis,.diagonal{stroke:#667085}.curve{fill:none;stroke-width:2}.hidden{opacity:0}"
) + "".join(f".curve.{k}{{stroke:{c}}}.dot.{k},.bar.{k},.key.{k}{{fill:{c}}}" for k, c in COLOURS.items())
HEADER = 44
"""Height of a chart's title and legend in a picture."""


def picture(figures: Sequence[str], columns: int) -> str:
    """Arrange charts in columns and return them as one SVG document that needs no style sheet."""
    parts = []
    for place, figure in enumerate(figures):
        root = ElementTree.fromstring(figure)
        x, y = WIDTH * (place % columns), (HEIGHT + HEADER) * (place // columns)
        title = escape(root.findtext("figcaption") or "")
        parts.append(f'<g transform="translate({x} {y})"><text x="{LEFT}" y="18">{title}</text>')
        across = LEFT
        for entry in root.iterfind("div/span"):
            key, name = entry[0], entry[0].tail or ""
            parts.append(f'<rect class="{key.get("class")}" x="{across}" y="27" width="10" height="10"/>')
            parts.append(f'<text class="legend" x="{across + 15}" y="36">{escape(name)}</text>')
            across += 35 + 7 * len(name)
        drawn = "".join(ElementTree.tostring(shape, "unicode") for shape in root.iterfind("svg/*"))
        parts.append(f'<g transform="translate(0 {HEADER})">{drawn}</g></g>')
    width, height = WIDTH * min(columns, len(figures)), (HEIGHT + HEADER) * -(-len(figures) // columns)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{PICTURE_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers from low to high.

    >>> ticks(0.71, 0.78)
    [0.72, 0.74, 0.76, 0.78]
    """
    raw = (high - low) / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * m for m in (1, 2, 5, 10) if raw <= scale * m * 1.0001)
    digits = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, digits) for n in range(first, last + 1)]


def short(value: float, digits: int = 3) -> str:
    """Format a number in few characters.

    >>> short(1500000.0), short(20000.0), short(0.0125), short(0.5)
    ('1.5M', '20k', '0.0125', '0.5')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.{max(digits, 3)}g}{letter}"
    return f"{value:.{digits + 1 if abs(value) >= 1000 else digits}g}"


def _with_room(low: float, high: float) -> Point:
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def _widened(low: float, high: float) -> Point:
    return (low, high) if high > low else (low - 0.5, high + 0.5)
