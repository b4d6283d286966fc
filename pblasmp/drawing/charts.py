# SPDX-License-Identifier: Apache-2.0
"""Charts of times as SVG: bars relative to a reference, and lines over sizes. Needs no library.

All coordinates are pixels from the upper left corner.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..layout.value import bytes_text
from .svg import Drawing

__all__ = ["Bars", "Lines", "bar_chart", "line_chart"]

_COLORS = ("#1b6ca8", "#e08a2e", "#5ab1e6", "#8a8a8a", "#5b8c5a", "#b05a9a", "#a05a2c", "#444444")
_INK, _GRAY, _PALE = "#222222", "#6b6b6b", "#dddddd"
_WIDTH, _LABELS, _MARGIN = 760.0, 190.0, 12.0
_BAR = 11.0  # the height of a bar
_PLOT = 300.0  # the height of a line chart


class Bars(NamedTuple):
    """A bar chart: cases, each with its times by contender."""

    title: str
    cases: Sequence[tuple[str, Mapping[str, float]]]


class Lines(NamedTuple):
    """A line chart: sizes in bytes, each with its times in microseconds by contender."""

    title: str
    points: Sequence[tuple[int, Mapping[str, float]]]


def bar_chart(charts: Sequence[Bars], *, reference: str, order: Sequence[str] = ()) -> Drawing | None:
    """Draw each contender's time divided by the reference's, as grouped bars. Local.

    Cases without the reference are left out. If no case is left, there is no chart: None.

    Args:
        charts: one above the other.
        reference: the contender whose time is 1.
        order: contenders in this order come first; the others follow in the order of the cases.
    """
    kept = [Bars(title, [case for case in cases if reference in case[1]]) for title, cases in charts]
    kept = [chart for chart in kept if chart.cases]
    if not kept:
        return None
    found = dict.fromkeys([*order, *(name for chart in kept for _, times in chart.cases for name in times)])
    everywhere = {name for chart in kept for _, times in chart.cases for name in times}
    names = [name for name in found if name != reference and name in everywhere]
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    canvas = _Canvas()
    for chart in kept:
        _draw_bars(canvas, chart, reference, colors)
    return canvas.drawing(", ".join(chart.title for chart in kept))


def line_chart(charts: Sequence[Lines]) -> Drawing:
    """Draw each contender's time over the size, on logarithmic axes. Local.

    Args:
        charts: one above the other.
    """
    canvas = _Canvas()
    for chart in charts:
        _draw_lines(canvas, chart)
    return canvas.drawing(", ".join(chart.title for chart in charts))


class _Canvas:
    """The elements of a picture, and how far down they reach."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.bottom = _MARGIN

    def text(
        self, x: float, y: float, text: str, size: float = 11, *, fill: str = _INK, anchor: str = "start",
        bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}>'
            f"{html.escape(text, quote=False)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float = 1) -> None:
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{where}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'
        )

    def heading(self, title: str, colors: Mapping[str, str]) -> None:
        """Write a title, and below it the contenders in their colors."""
        self.text(_MARGIN, self.bottom + 14, f"{title} (less is better)", 13, bold=True)
        x, self.bottom = _MARGIN, self.bottom + 24
        for name, color in colors.items():
            width = 26 + 6.5 * len(name)
            if x > _MARGIN and x + width > _WIDTH:
                x, self.bottom = _MARGIN, self.bottom + 16
            self.parts.append(
                f'<rect x="{x:.1f}" y="{self.bottom:.1f}" width="10" height="10" fill="{color}"/>'
            )
            self.text(x + 14, self.bottom + 9, name)
            x += width
        self.bottom += 22

    def drawing(self, title: str) -> Drawing:
        height = self.bottom + _MARGIN
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" font-family="sans-serif">'
        )
        white = '<rect width="100%" height="100%" fill="white"/>'
        about = f"<title>{html.escape(title, quote=False)}</title>"
        return Drawing("\n".join([head, about, white, *self.parts, "</svg>"]))


def _draw_bars(canvas: _Canvas, chart: Bars, reference: str, colors: Mapping[str, str]) -> None:
    here = {n: c for n, c in colors.items() if any(n in times for _, times in chart.cases)}
    canvas.heading(f"{chart.title}: time / {reference}", here)
    ratios = [
        (case, {n: times[n] / times[reference] for n in here if n in times}) for case, times in chart.cases
    ]
    most = max([1.0, *(ratio for _, each in ratios for ratio in each.values())])
    scale = (_WIDTH - _LABELS - 50) / most
    top = canvas.bottom
    for case, each in ratios:
        middle = canvas.bottom + _BAR * max(1, len(each)) / 2
        canvas.text(_LABELS - 8, middle + 4, case, anchor="end")
        for name, ratio in each.items():
            canvas.parts.append(
                f'<rect x="{_LABELS:.1f}" y="{canvas.bottom:.1f}" width="{scale * ratio:.1f}" '
                f'height="{_BAR - 1:.1f}" fill="{here[name]}"/>'
            )
            canvas.text(_LABELS + scale * ratio + 4, canvas.bottom + 9, f"{ratio:.2f}", 9, fill=_GRAY)
            canvas.bottom += _BAR
        canvas.bottom += 6 if each else _BAR + 6
    canvas.line([(_LABELS + scale, top - 4), (_LABELS + scale, canvas.bottom)], _INK)
    canvas.bottom += 16


def _draw_lines(canvas: _Canvas, chart: Lines) -> None:
    names = dict.fromkeys(name for _, times in chart.points for name in times)
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}
    canvas.heading(f"{chart.title}: µs", colors)
    values = [time for _, times in chart.points for time in times.values()]
    if not values:
        return
    least, most = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    most = max(most, least + 1)
    sizes = sorted({size for size, _ in chart.points})
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])
    left, right, top = 60.0, _WIDTH - 30, canvas.bottom

    def across(size: int) -> float:
        return left + (right - left) * ((math.log2(size) - first) / (last - first) if last > first else 0.5)

    def down(time: float) -> float:
        return top + _PLOT * (most - math.log10(time)) / (most - least)

    for power in range(least, most + 1):
        y = down(10.0**power)
        canvas.line([(left, y), (right, y)], _PALE)
        canvas.text(left - 6, y + 4, f"{10.0**power:g}", 10, fill=_GRAY, anchor="end")
    shown = -math.inf
    for size in sizes:
        canvas.line([(across(size), top + _PLOT), (across(size), top + _PLOT + 4)], _GRAY)
        if across(size) - shown >= 56:
            shown = across(size)
            canvas.text(shown, top + _PLOT + 17, bytes_text(size), 10, fill=_GRAY, anchor="middle")
    for name, color in colors.items():
        points = [
            (across(size), down(times[name]))
            for size, times in sorted(chart.points, key=lambda p: p[0])
            if name in times
        ]
        canvas.line(points, color, 1.5)
        canvas.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points]
    canvas.bottom = top + _PLOT + 40
