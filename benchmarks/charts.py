# SPDX-License-Identifier: Apache-2.0
"""Charts of times as SVG: bars relative to a reference. Needs no library.

All coordinates are pixels from the upper left corner.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pblasmp.drawing import Drawing

__all__ = ["Bars", "bar_chart"]

_COLORS = ("#1b6ca8", "#e08a2e", "#5ab1e6", "#8a8a8a", "#5b8c5a", "#b05a9a", "#a05a2c", "#444444")
_INK, _GRAY = "#222222", "#6b6b6b"
_WIDTH, _LABELS, _MARGIN = 760.0, 190.0, 12.0
_BAR = 11.0  # the height of a bar


class Bars(NamedTuple):
    """A bar chart: cases, each with its times by contender."""

    title: str
    cases: Sequence[tuple[str, Mapping[str, float]]]


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
