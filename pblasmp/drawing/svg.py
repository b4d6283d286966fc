# SPDX-License-Identifier: Apache-2.0
"""Layouts as SVG: which rank owns which block, and the shape of every local array. Needs no library.

All coordinates are pixels from the upper left corner.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentTypeError, LayoutError, UnsupportedError, short_repr
from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor, ParallelProblem
from ..layout.axis import Axis
from ..layout.factor_problem import FactorProblem
from ..layout.grid import Grid
from ..layout.pieces import Trapezoid
from ..trust import as_path
from .labels import PALETTE, Block, Colors, MatrixView, block_count, blocks, formula, sizes, views

if TYPE_CHECKING:
    from ..problems.files import ProblemFile

_SIDE = 260.0  # the longest side of a matrix
_ELEMENT = 26.0  # the largest side of an element
_THIN = 8.0  # the shortest side of a matrix
_MOST_BLOCKS = 24  # on a side; if a matrix has more, a corner is drawn
_MOST_ROWS, _MOST_COLUMNS = 8, 6  # of processes
_MARGIN, _GAP = 12.0, 34.0
_INK, _GRAY, _RED = "#222222", "#6b6b6b", "#a02020"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture of a layout, which notebooks show.

    Attributes:
        svg: the picture, as the text of an SVG element.
    """

    svg: str

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture as an SVG file. Local.

        Raises:
            UnsupportedError: the name of the file does not end in .svg.
        """
        file = as_path(path)
        if file.suffix.lower() != ".svg":
            raise UnsupportedError(f"cannot save {str(path)!r}: expected a name that ends in .svg")
        file.write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{self.svg}\n', encoding="utf-8")

    def __repr__(self) -> str:
        return f"Drawing(svg of {len(self.svg)} characters)"


@singledispatch
def draw(x: Any) -> Drawing:
    """Return a picture of a layout: which rank owns which block, and the shape of every local array. Local.

    In a notebook the returned object shows itself; ``.svg`` is its text, and ``.save("layout.svg")`` writes a file.

    Args:
        x: a grid, a descriptor or a problem; or an object with one of the latter two: a matrix, plan or problem file.

    Raises:
        ArgumentTypeError: ``x`` is none of these.
        LayoutError: ``x`` is a tensor-parallel product that has no block-cyclic layout.

    Example:
        >>> picture = pb.draw(pb.MatrixDescriptor((10, 13), (3, 2), "2x3"))
        >>> picture.svg[:4], picture.svg.count("rank 5") > 0
        ('<svg', True)

    See Also:
        load_problem, to draw a descriptor file; ``pblasmp show`` in a terminal.
    """
    if getattr(x, "windows", None):
        return _of_file(x)
    for each in (getattr(x, "problem", None), getattr(x, "descriptor", None)):
        if isinstance(each, (MatrixDescriptor, MatmulProblem, Level3Problem, ParallelProblem, FactorProblem)):
            return draw(each)
    raise ArgumentTypeError(
        f"draw: expected a grid, descriptor, problem, matrix or plan, got {short_repr(x)}"
    )


@draw.register
def _(x: Grid) -> Drawing:
    return _draw_all([], str(x), grid=x)


@draw.register
def _(x: MatrixDescriptor) -> Drawing:
    return _draw_all([MatrixView.of(x)], str(x))


@draw.register
def _(x: MatmulProblem) -> Drawing:
    named = {"A": x.a, "B": x.b, "D": x.d}
    if x.c is not None and not x.c.same_places(x.d):
        named["C"] = x.c
    return _draw_all([MatrixView.of(each, name) for name, each in named.items()], str(x), faults=x.faults())


@draw.register
def _(x: Level3Problem) -> Drawing:
    panels = [
        MatrixView.of(each, name.upper(), x.touched(name)) for name in "abcd" if (each := getattr(x, name))
    ]
    return _draw_all(panels, f"{x}: {x.traits.formula}", faults=x.faults())


@draw.register
def _(x: FactorProblem) -> Drawing:
    lower = Trapezoid("L") if x.routine in ("cholesky", "triangular", "eigh") else None
    panels = [MatrixView.of(x.a, "A", lower)]
    named = {
        "B": x.b,
        "V^H" if x.routine == "svd" else "factors": x.c,
        "D" if x.inverse or x.routine in ("qr", "eigh", "svd") else "X": x.d,
    }
    panels += [MatrixView.of(each, name) for name, each in named.items() if each is not None]
    return _draw_all(panels, str(x), faults=x.faults())


@draw.register
def _(x: ParallelProblem) -> Drawing:
    kept = replace(x, return_gathered=False)
    if x.form == "matmul_allgather":
        raise LayoutError(
            f"draw: {x} has no picture: every rank holds all of X and of Y, which are not block-cyclic layouts"
        )
    p = kept.as_allreduce() if x.form == "matmul_allreduce" else kept.as_gemm()
    if isinstance(p, str):
        raise LayoutError(f"draw: {x} has no picture: {p}")
    y = MatrixView.of(p.d, "Y")
    if x.form == "matmul_allreduce":  # the copies below each other
        y = y._replace(about=f"{p.m} × {p.n}, {p.d.dtype.name}, C order, a copy on every rank")
    return _draw_all([MatrixView.of(p.a, "X"), MatrixView.of(p.b, "W"), y], str(x))


def _of_file(file: ProblemFile) -> Drawing:
    """Return the picture of a descriptor file, in which windows are outlined in the matrices that they are part of."""
    lines = [*textwrap.wrap(file.description, 110), f"{formula(file)}    {sizes(file)}"]
    return _draw_all(views(file), file.title, lines=lines, faults=file.problem.faults())


def _draw_all(
    panels: Sequence[MatrixView],
    title: str,
    *,
    lines: Sequence[str] = (),
    faults: Sequence[str] = (),
    grid: Grid | None = None,
) -> Drawing:
    """Return a picture of matrices next to each other, and of the local arrays of each, or of a process grid. Local.

    Title and lines are above it, faults of the matrices below.
    """
    picture = _Picture()
    picture.text(_MARGIN, 16, title, 13, weight="bold")
    top = 30.0
    for line in lines:
        picture.text(_MARGIN, top + 4, line, 12)
        top += 18
    left, bottom = _MARGIN, top
    for panel in panels:
        right, down = picture.matrix(panel, left, top)
        left, bottom = right + _GAP, max(bottom, down)
    if grid is not None:
        _, bottom = picture.processes(grid, [""] * grid.npcol, [""] * grid.nprow, _MARGIN, top)
    if faults:
        bottom += 22
        picture.text(_MARGIN, bottom, "Not legal:", 12, weight="bold", fill=_RED)
    for fault in faults:
        for i, line in enumerate(textwrap.wrap(fault, 110)):
            bottom += 16
            picture.text(_MARGIN + (12 if i else 0), bottom, line if i else f"• {line}", 12, fill=_RED)
    return Drawing(picture.svg(title, bottom))


class _Picture:
    """The elements of a picture, and how far they reach."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width = 0.0

    def text(self, x: float, y: float, text: str, size: float, **style: str) -> float:
        """Write a line of text, and return about how far right it reaches."""
        style = {"fill": _INK, "font-size": f"{size:g}", **{k.replace("_", "-"): v for k, v in style.items()}}
        given = " ".join(f'{key.replace("weight", "font-weight")}="{value}"' for key, value in style.items())
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {given}>{html.escape(text, quote=False)}</text>')
        right = x + (0.64 if "weight" in style else 0.56) * size * len(text)
        if "text-anchor" not in style:
            self.width = max(self.width, right)
        return right

    def box(self, x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> None:
        """Draw a rectangle with a white edge; ``tip`` is shown at the mouse."""
        inner = f"><title>{html.escape(tip, quote=False)}</title></rect>" if tip else "/>"
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
            f'stroke="white" stroke-width="{min(1.0, 0.1 * min(width, height)):.2g}"{inner}'
        )
        self.width = max(self.width, x + width)

    def label(self, x: float, y: float, width: float, height: float, text: str) -> None:
        """Write into the middle of a box, if there is room."""
        size = min(12.0, 0.7 * height, 1.5 * width / (len(text) + 0.5))
        if size >= 6:
            self.text(x + width / 2, y + height / 2 + 0.35 * size, text, size, text_anchor="middle")

    def matrix(self, view: MatrixView, left: float, top: float) -> tuple[float, float]:
        """Draw a matrix and its local arrays below; return how far right and down they reach."""
        whole, windowed = view.parent, view.windowed
        grid, colors = whole.grid, Colors(whole.grid)
        right = self.text(left, top + 14, f"{view.name}  {view.details}".strip(), 12)
        rows, cols = _corner(whole.rows), _corner(whole.cols)
        extents = [cells[-1].stop if cells else 0 for cells in (rows, cols)]
        scale = min(_ELEMENT, _SIDE / max(1, *extents))
        down, across = (max(scale, _THIN / extent) if extent else 0.0 for extent in extents)
        x, y = left + 7.0 * len(str(extents[0])), top + 42
        height, width = down * extents[0], across * extents[1]
        if not (rows and cols):
            self.text(x, y, "(empty)", 11, fill=_GRAY)
            y += 8
        for i in _spaced(rows, down, 12) if cols else ():
            self.text(x - 4, y + down * i + 9, str(i), 9, fill=_GRAY, text_anchor="end")
        for j in _spaced(cols, across, 8 + 6 * len(str(extents[1]))) if rows else ():
            self.text(x + across * j + 1, y - 4, str(j), 9, fill=_GRAY, text_anchor="start")
        for row in rows:
            for col in cols:
                rank = grid.rank(row.process, col.process)
                place = x + across * col.start, y + down * row.start
                size = across * (col.stop - col.start), down * (row.stop - row.start)
                where = f"rank {rank}: [{row.start}:{row.stop}, {col.start}:{col.stop}]"
                self.box(*place, *size, PALETTE[colors(rank)], where)
                self.label(*place, *size, str(rank))
        if view.part is not None and rows and cols:
            self.veil(view.part, x, y, width, height, extents)
        if windowed and rows and cols:
            self.outline((view.rows, view.cols), x, y, (down, across), extents)
        total = block_count(whole.rows), block_count(whole.cols)
        if total != (len(rows), len(cols)):
            note = f"{len(rows)} × {len(cols)} of {total[0]} × {total[1]} blocks"
            self.text(x, y + height + 14, note, 10, fill=_GRAY)
            height += 16
        whose = "local arrays" if not windowed else "local arrays of the part"
        self.text(left, y + height + 22, whose, 10, fill=_GRAY)
        used = view.descriptor.rows, view.descriptor.cols
        heights, widths = (
            [str(axis.count(p)) for p in range(min(axis.nprocs, most))]
            for axis, most in zip(used, (_MOST_ROWS, _MOST_COLUMNS), strict=True)
        )
        wide, deep = self.processes(grid, widths, heights, left, y + height + 28)
        return max(right, wide, x + width), deep

    def processes(
        self, grid: Grid, widths: Sequence[str], heights: Sequence[str], left: float, top: float
    ) -> tuple[float, float]:
        """Draw the process grid with the shape of each local array; return how far right and down it reaches."""
        colors = Colors(grid)
        shapes = [[f"{m} × {n}" if m else "" for n in widths[:_MOST_COLUMNS]] for m in heights[:_MOST_ROWS]]
        width = 18 + 6.5 * max(len(str(grid.size - 1)) + 5, *(len(text) for row in shapes for text in row))
        for prow, row in enumerate(shapes):
            for pcol, text in enumerate(row):
                rank = grid.rank(prow, pcol)
                x, y = left + width * pcol, top + 32 * prow
                self.box(x, y, width, 32, PALETTE[colors(rank)], f"rank {rank} at ({prow}, {pcol})")
                self.text(x + 5, y + (13 if text else 20), f"rank {rank}", 10, text_anchor="start")
                if text:
                    self.text(x + 5, y + 26, text, 10, text_anchor="start")
        right, bottom = left + width * len(shapes[0]), top + 32 * len(shapes)
        if grid.nprow > len(shapes) or grid.npcol > len(shapes[0]):
            self.text(left, bottom + 14, f"… of {grid.nprow} × {grid.npcol} processes", 10, fill=_GRAY)
            bottom += 16
        return right, bottom

    def veil(
        self, part: Trapezoid, x: float, y: float, width: float, height: float, extents: Sequence[int]
    ) -> None:
        """Fade the elements of a matrix that are not in ``part``."""
        rows, cols = extents
        edge = part.diagonal + (0.5 if part.uplo == "L" else -0.5)
        far = cols if part.uplo == "L" else 0
        points = (
            f"{edge:g},0 {edge + rows:g},{rows} {max(far, edge + rows) if far else min(0, edge):g},{rows} "
        )
        points += f"{max(far, edge) if far else min(0, edge):g},0"
        self.parts.append(
            f'<svg x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" viewBox="0 0 {cols} {rows}" '
            f'preserveAspectRatio="none"><polygon points="{points}" fill="white" fill-opacity="0.8"/></svg>'
        )

    def outline(
        self,
        window: tuple[tuple[int, int], ...],
        x: float,
        y: float,
        scales: tuple[float, float],
        extents: Sequence[int],
    ) -> None:
        """Fade the elements outside a window, as far as they are drawn, and draw its edge."""
        down, across = scales
        (i0, i1), (j0, j1) = (
            (min(start, extent), min(stop, extent))
            for (start, stop), extent in zip(window, extents, strict=True)
        )
        rows, cols = extents
        for top, bottom, left, right in (
            (0, i0, 0, cols),
            (i1, rows, 0, cols),
            (i0, i1, 0, j0),
            (i0, i1, j1, cols),
        ):
            if top < bottom and left < right:
                self.parts.append(
                    f'<path d="M{x + across * left:.1f} {y + down * top:.1f}H{x + across * right:.1f}'
                    f'V{y + down * bottom:.1f}H{x + across * left:.1f}Z" fill="white" fill-opacity="0.7"/>'
                )
        self.parts.append(
            f'<path d="M{x + across * j0:.1f} {y + down * i0:.1f}H{x + across * j1:.1f}V{y + down * i1:.1f}'
            f'H{x + across * j0:.1f}Z" fill="none" stroke="{_INK}" stroke-width="2"/>'
        )

    def svg(self, title: str, bottom: float) -> str:
        """Return the whole picture, on white."""
        width, height = self.width + _MARGIN, bottom + _MARGIN
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="sans-serif">'
        )
        white = '<rect width="100%" height="100%" fill="white"/>'
        return "\n".join(
            [head, f"<title>{html.escape(title, quote=False)}</title>", white, *self.parts, "</svg>"]
        )


def _corner(axis: Axis) -> list[Block]:
    """Return the blocks of an axis that are drawn."""
    return [*islice(blocks(axis), _MOST_BLOCKS)]


def _spaced(cells: Sequence[Block], scale: float, distance: float) -> list[int]:
    """Return where blocks start, each at least ``distance`` after the one before."""
    found: list[int] = []
    for cell in cells:
        if not found or scale * (cell.start - found[-1]) >= distance:
            found.append(cell.start)
    return found
