# SPDX-License-Identifier: Apache-2.0
"""Bar charts of times, relative to a reference: what benchmarks draw. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

from .picture import picture_format, save, settings

__all__ = ["Panel", "draw_bars"]

_COLOURS = ("#1b6ca8", "#5ab1e6", "#e08a2e", "#8a8a8a", "#5b8c5a")


class Panel(NamedTuple):
    """One chart: cases, each with its times by contender."""

    title: str
    cases: Sequence[tuple[str, Mapping[str, float]]]


def draw_bars(
    panels: Sequence[Panel], output: str | PathLike[str], *, reference: str, order: Sequence[str] = ()
) -> None:
    """Draw each contender's time divided by the reference's, as grouped bars. Local.

    Cases without the reference are left out; if none is left, nothing is drawn.

    Args:
        panels: one above the other.
        output: a .png, .svg or .pdf file.
        reference: the contender that is 1.
        order: the order of the contenders; others follow as they come.

    Raises:
        UnsupportedError: matplotlib is missing, or pictures of this kind cannot be made.
    """
    picture_format(output)
    drawn = [
        Panel(panel.title, cases)
        for panel in panels
        if (cases := [case for case in panel.cases if reference in case[1]])
    ]
    if not drawn:
        return
    from matplotlib.figure import Figure

    with settings():
        figure = Figure(figsize=(12, 3.6 * len(drawn)), layout="constrained")
        found = [name for panel in drawn for _, times in panel.cases for name in times]
        names = [name for name in dict.fromkeys([*order, *found]) if name != reference and name in found]
        axes = figure.subplots(len(drawn), 1, squeeze=False)
        for ax, panel in zip(axes[:, 0], drawn, strict=True):
            _panel(ax, panel, names, reference)
    save(figure, output, 130)


def _panel(ax: Any, panel: Panel, names: Sequence[str], reference: str) -> None:
    here = [name for name in names if any(name in times for _, times in panel.cases)]
    width = 0.8 / max(1, len(here))
    for at, name in enumerate(here):
        ran = [(i, times) for i, (_, times) in enumerate(panel.cases) if name in times]
        places = [i + (at - (len(here) - 1) / 2) * width for i, _ in ran]
        heights = [times[name] / times[reference] for _, times in ran]
        bars = ax.bar(places, heights, width, label=name, color=_COLOURS[names.index(name) % len(_COLOURS)])
        ax.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    ax.axhline(1, color="black", linewidth=1)
    ax.set_xticks(range(len(panel.cases)), [case.replace(", ", "\n") for case, _ in panel.cases], fontsize=8)
    ax.set_ylabel(f"time / {reference}")
    ax.set_title(f"{panel.title} (less is better)", fontsize=11)
    if here:
        ax.legend(fontsize=8, ncols=len(here), loc="upper left")
        ax.set_ylim(top=ax.get_ylim()[1] * 1.2)
    ax.spines[["top", "right"]].set_visible(False)
