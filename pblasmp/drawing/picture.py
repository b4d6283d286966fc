# SPDX-License-Identifier: Apache-2.0
"""Who owns what, as a picture: each matrix with its blocks, and next to it every rank's local array. Needs matplotlib.

All coordinates are inches from the upper left corner of the picture.
"""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnsupportedError
from ..extras import install
from .labels import PALETTE, Colours, View, block_count, blocks, formula, grid_in_words, sizes, views

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..layout.axis import Axis
    from ..layout.descriptor import MatrixDescriptor
    from ..layout.files import ProblemFile

__all__ = ["draw", "figure", "picture_format", "save", "settings"]

FORMATS = (".pdf", ".png", ".svg")
_MISSING = f"pictures need matplotlib: {install('plot')}"

_SIDE = 3.2  # the longest side of the largest matrix
_ELEMENT = 0.4  # the largest side of an element
_THIN = 0.4  # the shortest side of a matrix: thin ones are not to scale
_MOST_BLOCKS = 96  # on a side; if a matrix has more, a corner is drawn
_MOST_RANKS = 36  # whose local arrays are drawn
_MARGIN, _COLUMN, _ROW = 0.35, 0.8, 0.42
_HEADING = 0.6  # from the top of a row to what is above its matrices
_ABOVE = 0.28  # a matrix, for the indices of its blocks, and a local array, for its rank
_BESIDE = 0.3  # a matrix, for the indices of its blocks
_GAP = 0.25  # between local arrays
_EMPTY = 0.14  # a side of a local array without elements
_PADDING = 0.3  # as much of it is drawn as this
_LEGEND = (
    "Left: which rank owns which block. Right: the local array of each rank; in its blocks the global row and "
    "column of their first element; the arrow next to it runs along contiguous memory."
)
_INK, _GREY, _PALE, _RED = "#222222", "#6b6b6b", "#bbbbbb", "#a02020"


def draw(file: ProblemFile, output: str | PathLike[str], *, dpi: int = 160) -> None:
    """Draw a problem into ``output``: a .png, .svg or .pdf file. Local.

    Each matrix is drawn with its blocks in the colours of their ranks, and next to it the local array of every rank,
    where the rank is in the process grid. A sub-matrix is outlined in the matrix that it is a part of.

    Args:
        file: the problem; it need not be legal.
        output: the file to write.
        dpi: pixels per inch of a .png.

    Raises:
        UnsupportedError: matplotlib is missing, or pictures of this kind cannot be made.
    """
    picture_format(output)
    save(figure(file), output, dpi)


def save(picture: Figure, output: str | PathLike[str], dpi: int) -> None:
    """Write a figure to ``output``; the same picture gives the same file. Local."""
    kind = picture_format(output)
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with settings():
        picture.savefig(output, dpi=dpi, format=kind, facecolor="white", metadata=dates.get(kind))


def picture_format(output: str | PathLike[str]) -> str:
    """Return the format that a picture's file name asks for: "pdf", "png" or "svg". Local.

    Raises:
        UnsupportedError: matplotlib is missing, or pictures of this kind cannot be made.
    """
    if find_spec("matplotlib") is None:
        raise UnsupportedError(_MISSING)
    suffix = Path(output).suffix.lower()
    if suffix not in FORMATS:
        raise UnsupportedError(
            f"cannot draw {str(output)!r}: expected a name that ends in {', '.join(FORMATS)}"
        )
    return suffix[1:]


def figure(file: ProblemFile) -> Figure:
    """Return the picture of a problem as a matplotlib figure. Local.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    try:
        with settings():
            return _figure(file)
    except ImportError as error:
        raise UnsupportedError(_MISSING) from error


def settings() -> AbstractContextManager[None]:
    """Return a block with the settings for pictures, whatever the user's are."""
    import matplotlib as mpl

    return mpl.rc_context({"font.family": "DejaVu Sans", "text.usetex": False, "svg.hashsalt": "pblasmp"})


def _figure(file: ProblemFile) -> Figure:
    from matplotlib.figure import Figure

    drawn = [_Drawn.of(view) for view in views(file)]
    longest = max(1, *(extent for item in drawn for extent in item.matrix.shape))
    colours = Colours(file.problem.d.grid)
    rows = [_Row(item, min(_ELEMENT, _SIDE / longest), colours) for item in drawn]
    above = [_Line(file.title, 14, 0.4, "bold"), _Line(f"{formula(file)}      {sizes(file)}", 10, 0.32)]
    above += [
        _Line(text, 9, 0.19 if i else 0.25, colour=_GREY) for i, text in enumerate(_wrapped(file.description))
    ]
    below = [_Line(line, 8, 0.17, colour=_GREY) for line in _wrapped(_LEGEND)]
    faults = file.problem.faults()
    if faults:
        below.append(_Line("This product is not legal:", 9, 0.3, "bold", _RED))
        below += [_Line(line, 9, 0.19, colour=_RED) for fault in faults for line in _wrapped(fault, "•  ")]

    left = _MARGIN + _BESIDE
    right = left + max(row.width for row in rows) + _COLUMN
    ends = [right + max(row.local_width for row in rows)]
    ends += [_MARGIN + row.heading_width for row in rows]
    ends += [_MARGIN + _text_width(line.text, line.size, line.weight) for line in above + below]
    width = max(ends) + _MARGIN
    top = sum(line.height for line in above) + _MARGIN
    bottom = top + sum(row.height + _ROW for row in rows)
    height = bottom + sum(line.height for line in below) + _MARGIN

    fig = Figure(figsize=(width, height))
    axes = fig.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    pen = _Pen(axes)
    for y, lines in ((0.0, above), (bottom, below)):
        for line in lines:
            y += line.height
            pen.text(_MARGIN, y, line.text, line.size, weight=line.weight, color=line.colour)
    for row in rows:
        row.draw(pen, left, right, top)
        top += row.height + _ROW
    return fig


class _Line(NamedTuple):
    """A line of text as wide as the picture; ``height`` is from the middle of the line above."""

    text: str
    size: float
    height: float
    weight: str = "normal"
    colour: str = _INK


def _wrapped(text: str, bullet: str = "") -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=bullet, subsequent_indent=" " * 2 * len(bullet))


def _text_width(text: str, size: float, weight: str = "normal") -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), text, size=size, prop=FontProperties(weight=weight))
    return float(path.vertices[:, 0].max(initial=0)) / 72  # control points enclose the curves


class _Drawn(NamedTuple):
    """What is drawn of an operand: the matrix that it is a part of, or a corner of one with too many blocks."""

    view: View
    matrix: MatrixDescriptor
    rows: tuple[int, int]
    cols: tuple[int, int]
    corner: bool

    @classmethod
    def of(cls, view: View) -> _Drawn:
        if all(block_count(axis) <= _MOST_BLOCKS for axis in (view.parent.rows, view.parent.cols)):
            return cls(view, view.parent, view.rows, view.cols, corner=False)
        x = view.descriptor
        rows, cols = (min(max(8, 3 * axis.nprocs), 24) * axis.block for axis in (x.rows, x.cols))
        x = x[:rows, :cols]
        return cls(view, x, (0, x.shape[0]), (0, x.shape[1]), corner=True)


class _Cell(NamedTuple):
    """A range of indices of one axis on one process, in the window or out of it."""

    start: int
    stop: int
    first: int  # the global index of ``start``
    process: int
    inside: bool


def _cells(axis: Axis, window: tuple[int, int]) -> list[_Cell]:
    found = []
    for block in blocks(axis):
        cuts = sorted({block.start, block.stop, *(cut for cut in window if block.start < cut < block.stop)})
        for start, stop in pairwise(cuts):
            found.append(_Cell(start, stop, start, block.process, window[0] <= start < window[1]))
    return found


def _pack(cells: Sequence[_Cell], process: int) -> list[_Cell]:
    """Return the cells of one process in the order of its local array: end to end."""
    found, at = [], 0
    for cell in cells:
        if cell.process == process:
            size = cell.stop - cell.start
            found.append(cell._replace(start=at, stop=at + size))
            at += size
    return found


class _Row:
    """A row of the picture: a matrix, and the local array of every rank."""

    def __init__(self, drawn: _Drawn, scale: float, colours: Colours) -> None:
        self.drawn, self.colours = drawn, colours
        x = self.matrix = drawn.matrix
        self.grid = x.grid
        self.sy, self.sx = (max(scale, _THIN / extent) if extent else 0.0 for extent in x.shape)
        self.rows, self.cols = _cells(x.rows, drawn.rows), _cells(x.cols, drawn.cols)
        self.width = max(_THIN, self.sx * x.shape[1])
        self.heading_width = _text_width(self._details(), 8.5)
        self.local_widths: list[float] = []
        self.local_heights: list[float] = []
        if x.grid.size <= _MOST_RANKS:
            for pcol in range(x.grid.npcol):
                labels = [
                    _text_width(self._label(x.grid.rank(prow, pcol)), 8) for prow in range(x.grid.nprow)
                ]
                count = x.cols.count(pcol)
                self.local_widths.append(max(self.sx * count + self._padding(count, "C"), *labels))
            for prow in range(x.grid.nprow):
                count = x.rows.count(prow)
                self.local_heights.append(_ABOVE + max(_EMPTY, self.sy * count + self._padding(count, "F")))
        self.local_width = sum(self.local_widths) + _GAP * max(0, len(self.local_widths) - 1)
        local_height = sum(self.local_heights) + _GAP * max(0, len(self.local_heights) - 1)
        self.height = _HEADING + max(_ABOVE + max(_THIN, self.sy * x.shape[0]), local_height)

    def _padding(self, count: int, order: str) -> float:
        """Return how much memory beyond ``count`` columns (in C order) or rows (F) to draw."""
        x = self.matrix
        if x.order != order or x.ld is None or self.drawn.corner or count == 0:
            return 0.0
        return min(_PADDING, (x.ld - count) * (self.sx if order == "C" else self.sy))

    def _details(self) -> str:
        view, x = self.drawn.view, self.matrix
        text = f"{x.dtype.name}, {x.order} order, blocks of {x.block[0]} × {x.block[1]} on {grid_in_words(x.grid)}"
        if x.source != (0, 0):
            text += f", from process {x.source}"
        if x.ld is not None:
            text += f", ld {x.ld}"
        if view.windowed:
            (i0, i1), (j0, j1) = view.rows, view.cols
            text += f"; [{i0}:{i1}, {j0}:{j1}] of {view.parent.shape[0]} × {view.parent.shape[1]}"
        if self.drawn.corner:
            text += f"; the first {x.shape[0]} × {x.shape[1]} are drawn, the pattern repeats"
        return text

    def _label(self, rank: int) -> str:
        return f"rank {rank}   {self.drawn.view.local_shape(rank)}"

    def draw(self, pen: _Pen, left: float, right: float, top: float) -> None:
        """Draw the matrix at ``left`` and its local arrays at ``right``, the heading at ``top``."""
        rows, cols = self.drawn.view.descriptor.shape
        name = self.drawn.view.name
        pen.text(_MARGIN, top + 0.1, name, 13, weight="bold")
        pen.text(_MARGIN + _text_width(name, 13, "bold") + 0.12, top + 0.1, f"{rows} × {cols}", 11)
        pen.text(_MARGIN, top + 0.33, self._details(), 8.5, color=_GREY)
        y = top + _HEADING
        self._whole(pen, left, y + _ABOVE)
        if self.local_widths:
            self._locals(pen, right, y)
        else:
            for line, rank in enumerate((0, self.grid.size - 1)):
                pen.text(right, y + _ABOVE + 0.1 + 0.25 * line, self._label(rank), 9)

    def _whole(self, pen: _Pen, x: float, y: float) -> None:
        """Draw the matrix with the first index of each block next to it, the numbers of the ranks in it."""
        height, width = (
            s * extent for s, extent in ((self.sy, self.matrix.shape[0]), (self.sx, self.matrix.shape[1]))
        )
        if 0 in self.matrix.shape:
            pen.frame(x, y, width or _THIN, height or _THIN, dashed=True)
            return
        self._mesh(pen, x, y, self.rows, self.cols)
        for cell in pen.spaced(self.rows, self.sy, 0.24):
            pen.text(
                x - 0.08,
                y + self.sy * cell.start + 0.02,
                str(cell.first),
                7,
                color=_GREY,
                ha="right",
                va="top",
            )
        for cell in pen.spaced(self.cols, self.sx, 0.1 + 0.07 * len(str(self.matrix.shape[1]))):
            pen.text(x + self.sx * cell.start + 0.02, y - 0.08, str(cell.first), 7, color=_GREY)
        for row in self.rows:
            for col in self.cols:
                rank = str(self.grid.rank(row.process, col.process))
                self._write(pen, x, y, row, col, rank, 12, letters=len(str(self.grid.size - 1)))
        if self.drawn.view.windowed and not self.drawn.corner:
            (i0, i1), (j0, j1) = self.drawn.rows, self.drawn.cols
            pen.frame(x + self.sx * j0, y + self.sy * i0, self.sx * (j1 - j0), self.sy * (i1 - i0))
        if self.drawn.corner:
            pen.text(x + width + 0.08, y + height / 2, "…", 14, color=_GREY)
            pen.text(x + width / 2, y + height + 0.12, "…", 14, color=_GREY, rotation=90, ha="center")

    def _write(
        self, pen: _Pen, x: float, y: float, row: _Cell, col: _Cell, text: str, most: float, letters: int = 0
    ) -> None:
        """Write into a cell if there is room for ``letters``, of at most size ``most`` and still legible."""
        tall, wide = self.sy * (row.stop - row.start), self.sx * (col.stop - col.start)
        size = min(most, 72 * 0.6 * tall, 72 * 1.25 * wide / (max(letters, len(text)) + 0.5))
        if size >= 5:
            middle = x + self.sx * col.start + wide / 2, y + self.sy * row.start + tall / 2
            pen.text(*middle, text, size, color=_INK if row.inside and col.inside else _GREY, ha="center")

    def _mesh(self, pen: _Pen, x: float, y: float, rows: Sequence[_Cell], cols: Sequence[_Cell]) -> None:
        colours = [
            [
                _rgb(
                    self.colours(self.grid.rank(row.process, col.process)),
                    faded=not (row.inside and col.inside),
                )
                for col in cols
            ]
            for row in rows
        ]
        across = [x + self.sx * cell.start for cell in cols] + [x + self.sx * cols[-1].stop]
        down = [y + self.sy * cell.start for cell in rows] + [y + self.sy * rows[-1].stop]
        pen.mesh(across, down, colours)

    def _locals(self, pen: _Pen, right: float, top: float) -> None:
        """Draw the local array of every rank, its padding hatched, in the arrangement of the process grid."""
        y = top
        for prow, tall in enumerate(self.local_heights):
            x = right
            for pcol, wide in enumerate(self.local_widths):
                self._local(pen, x, y, prow, pcol)
                x += wide + _GAP
            y += tall + _GAP

    def _local(self, pen: _Pen, x: float, y: float, prow: int, pcol: int) -> None:
        rank = self.grid.rank(prow, pcol)
        pen.text(x, y + 0.08, self._label(rank), 8)
        y += _ABOVE
        rows, cols = _pack(self.rows, prow), _pack(self.cols, pcol)
        m, n = self.matrix.rows.count(prow), self.matrix.cols.count(pcol)
        if m == 0 or n == 0:
            pen.frame(x, y, max(_EMPTY, self.sx * n), max(_EMPTY, self.sy * m), dashed=True)
            return
        height, width = self.sy * m, self.sx * n
        if self._padding(n, "C"):
            pen.hatched(x + width, y, self._padding(n, "C"), height)
        if self._padding(m, "F"):
            pen.hatched(x, y + height, width, self._padding(m, "F"))
        self._mesh(pen, x, y, rows, cols)
        for row in rows:
            for col in cols:
                self._write(pen, x, y, row, col, f"{row.first}, {col.first}", 7)
        if self.matrix.order == "C":
            pen.arrow(x, y - 0.07, x + width, y - 0.07)
        else:
            pen.arrow(x - 0.07, y, x - 0.07, y + height)
        inside = [[cell for cell in cells if cell.inside] for cells in (rows, cols)]
        if self.drawn.view.windowed and all(inside):
            (i0, i1), (j0, j1) = ((cells[0].start, cells[-1].stop) for cells in inside)
            pen.frame(x + self.sx * j0, y + self.sy * i0, self.sx * (j1 - j0), self.sy * (i1 - i0))


def _rgb(colour: int, *, faded: bool) -> tuple[float, ...]:
    """Return a colour of the palette, mixed with white if it is ``faded``."""
    from matplotlib.colors import to_rgb

    return tuple(0.3 * part + 0.7 if faded else part for part in to_rgb(PALETTE[colour]))


class _Pen:
    """Drawing on the one pair of axes that covers the picture."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def text(self, x: float, y: float, text: str, size: float, **style: Any) -> None:
        self.axes.text(
            x, y, text, **{"size": size, "color": _INK, "va": "center", "parse_math": False, **style}
        )

    def mesh(self, across: list[float], down: list[float], colours: list[list[tuple[float, ...]]]) -> None:
        """Draw cells between these lines, white lines between them."""
        self.axes.pcolormesh(across, down, colours, edgecolors="face", linewidth=0.4)
        width = min(1.3, 72 * 0.08 * min(across[1] - across[0], down[1] - down[0]))
        self.axes.vlines(across[1:-1], down[0], down[-1], colors="white", linewidths=width)
        self.axes.hlines(down[1:-1], across[0], across[-1], colors="white", linewidths=width)
        self.frame(across[0], down[0], across[-1] - across[0], down[-1] - down[0], thin=True)

    def frame(
        self, x: float, y: float, width: float, height: float, *, thin: bool = False, dashed: bool = False
    ) -> None:
        from matplotlib.patches import Rectangle

        colour, line = (_PALE, 0.8) if thin or dashed else (_INK, 1.8)
        style = (0, (3, 2)) if dashed else "-"
        self.axes.add_patch(
            Rectangle((x, y), width, height, fill=False, ec=colour, lw=line, ls=style, zorder=3)
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        style = {
            "arrowstyle": "-|>,head_length=0.25,head_width=0.12",
            "color": _GREY,
            "lw": 0.7,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        self.axes.annotate("", (x1, y1), (x0, y0), arrowprops=style)

    def hatched(self, x: float, y: float, width: float, height: float) -> None:
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, y), width, height, fc="white", ec=_PALE, lw=0.8, hatch="////"))

    @staticmethod
    def spaced(cells: Sequence[_Cell], scale: float, distance: float) -> list[_Cell]:
        """Return the cells that start a block at least ``distance`` after the one before."""
        found: list[_Cell] = []
        for cell in cells:
            if not found or scale * (cell.start - found[-1].start) >= distance:
                found.append(cell)
        return found
