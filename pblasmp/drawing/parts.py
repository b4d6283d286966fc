# SPDX-License-Identifier: Apache-2.0
"""What a level-3 routine reads and writes of its matrices, as a picture. Needs matplotlib.

All coordinates are elements, from the upper left corner of the picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .picture import save
from .words import PALETTE, Colours

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.figure import Figure

    from ..layout import Level3Problem, MatrixDescriptor

__all__ = ["draw_parts", "parts_figure"]

_SCALE = 0.19  # inches of an element
_LEFT, _TOP, _BETWEEN = 1.5, 4.5, 3.0
_UNTOUCHED = "#f4f4f4"


def draw_parts(problem: Level3Problem, output: str | PathLike[str], *, dpi: int = 160) -> None:
    """Draw each matrix of a routine, what is read or written of it in the colours of its ranks. Local.

    Args:
        problem: of matrices with a few dozen elements a side.
        output: a .png, .svg or .pdf file.
        dpi: pixels per inch of a .png.

    Raises:
        UnsupportedError: matplotlib is missing, or pictures of this kind cannot be made.
    """
    save(lambda: parts_figure(problem), output, dpi)


def parts_figure(problem: Level3Problem) -> Figure:
    """Return the picture as a matplotlib figure. Local."""
    from matplotlib.figure import Figure

    drawn = [(name, x) for name in "abcd" if (x := getattr(problem, name)) is not None]
    width = _LEFT + sum(x.shape[1] + _BETWEEN for _, x in drawn) - _BETWEEN + _LEFT
    height = _TOP + max(x.shape[0] for _, x in drawn) + 1.0
    fig = Figure(figsize=(width * _SCALE, height * _SCALE))
    axes = fig.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    options = ", ".join(f'{name}="{getattr(problem, name)}"' for name in problem.traits.options)
    style: dict[str, Any] = {"va": "center", "parse_math": False, "color": "#222222"}
    axes.text(_LEFT, 1.1, f"{problem.routine}   {problem.traits.formula}   {options}", size=9, **style)
    left = _LEFT
    for name, x in drawn:
        verb = "written" if name == "d" else "read"
        axes.text(left, _TOP - 0.9, f"{name.upper()}, {verb}", size=8, **style)
        across, down = np.arange(x.shape[1] + 1) + left, np.arange(x.shape[0] + 1) + _TOP
        axes.pcolormesh(across, down, _colours(problem, name, x), edgecolors="white", linewidth=0.6)
        left += x.shape[1] + _BETWEEN
    return fig


def _colours(problem: Level3Problem, name: str, x: MatrixDescriptor) -> list[list[tuple[float, ...]]]:
    """Return the colour of each element: its rank's, or next to none where it is not touched."""
    from matplotlib.colors import to_rgb

    part, colour = problem.touched(name), Colours(x.grid)
    rows, cols = (np.arange(extent) for extent in x.shape)
    mask = np.ones(x.shape, bool) if part is None else part.mask(rows, cols)
    return [
        [to_rgb(PALETTE[colour(x.owner(i, j))] if mask[i, j] else _UNTOUCHED) for j in range(x.shape[1])]
        for i in range(x.shape[0])
    ]
