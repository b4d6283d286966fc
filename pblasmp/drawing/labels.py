# SPDX-License-Identifier: Apache-2.0
"""Texts and colors of both kinds of drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..layout import FactorProblem, Level3Problem
from ..layout.schemes import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..layout.axis import Axis
    from ..layout.descriptor import MatrixDescriptor
    from ..layout.grid import Grid
    from ..layout.pieces import Trapezoid
    from ..problems.files import ProblemFile

PALETTE = ("#77AADD", "#EEDD88", "#EE8866", "#44BB99", "#FFAABB", "#BBCC33", "#99DDFF", "#BBAADD")
"""Light colors that the color-blind can tell apart, for black text on them (after Paul Tol's qualitative "light")."""


class Block(NamedTuple):
    """A block of one dimension: the half-open range of its indices, and the process that owns them."""

    start: int
    stop: int
    process: int


def blocks(axis: Axis) -> Iterator[Block]:
    """Yield the blocks of an axis in order, on any process. Local."""
    start, number = 0, 0
    while start < axis.extent:
        stop = min(axis.extent, (number + 1) * axis.block - axis.lead)
        yield Block(start, stop, (axis.source + number) % axis.nprocs)
        start, number = stop, number + 1


def block_count(axis: Axis) -> int:
    """Return how many blocks an axis has. Local."""
    return -(-(axis.lead + axis.extent) // axis.block) if axis.extent else 0


class Colors:
    """Maps a rank to an index in ``PALETTE``: few ranks have a color each; of many, neighbors differ."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __call__(self, rank: int) -> int:
        """Return the color of ``rank``."""
        if self.grid.size <= len(PALETTE) or rank >= self.grid.size:
            return rank % len(PALETTE)
        prow, pcol = self.grid.coords(rank)
        return (3 * prow + pcol) % len(PALETTE)


class MatrixView(NamedTuple):
    """A matrix to be drawn, of which some rows and columns are used.

    Attributes:
        name: what it is called.
        parent: the whole matrix.
        rows, cols: those that are used, half-open.
        part: the elements that are read or written; None for all.
        about: its shape and type in words, if not as they are.
    """

    name: str
    parent: MatrixDescriptor
    rows: tuple[int, int]
    cols: tuple[int, int]
    part: Trapezoid | None = None
    about: str = ""

    @classmethod
    def of(cls, x: MatrixDescriptor, name: str = "", part: Trapezoid | None = None) -> MatrixView:
        """Return a whole matrix, faded but for ``part``. Local."""
        return cls(name, x, (0, x.shape[0]), (0, x.shape[1]), part)

    @property
    def descriptor(self) -> MatrixDescriptor:
        """What is used."""
        return self.parent[slice(*self.rows), slice(*self.cols)]

    @property
    def windowed(self) -> bool:
        """Whether it is a part of something larger."""
        return self.descriptor.shape != self.parent.shape

    @property
    def window(self) -> str:
        """Which part of something larger it is, in words; empty if it is all of it."""
        return "[{}:{}, {}:{}] of ".format(*self.rows, *self.cols) if self.windowed else ""

    @property
    def details(self) -> str:
        """Its shape, type and order in words."""
        x = self.parent
        return self.window + (self.about or f"{x.shape[0]} × {x.shape[1]}, {x.dtype.name}, {x.order} order")

    def local_shape(self, rank: int) -> str:
        """The shape of a rank's local array, and of the one that it is a part of. Local."""
        text = "{} × {}".format(*self.descriptor.local_shape(rank))
        return text + (" of {} × {}".format(*self.parent.local_shape(rank)) if self.windowed else "")


def views(file: ProblemFile) -> list[MatrixView]:
    """Return the operands; C only if its layout differs from D's."""
    found = []
    for name, parent in file.parents.items():
        view = MatrixView(name.upper(), parent, *parent.ranges(file.windows[name]))
        if isinstance(file.problem, Level3Problem) and not view.windowed:
            view = view._replace(part=file.problem.touched(name))
        found.append(view)
    of_d, of_c = (next((view for view in found if view.name == name), None) for name in "DC")
    if of_d is not None and of_c is not None and of_d[1:] == of_c[1:]:
        found = [view._replace(name="D, C") if view is of_d else view for view in found if view is not of_c]
    return found


def formula(file: ProblemFile) -> str:
    """Return the problem in a line: D = 2 Aᵀ B - C."""
    p = file.problem
    if isinstance(p, FactorProblem):
        return str(p)
    if isinstance(p, Level3Problem):
        return p.traits.formula
    product = f"A{OPS[p.op_a]} B{OPS[p.op_b]}"
    return f"D = {terms(file.alpha, product, 0 if p.c is None else file.beta)}"


OPS = {"N": "", "T": "ᵀ", "C": "ᴴ"}
"""What is written after a matrix for each op."""


def terms(alpha: complex, product: str, beta: complex) -> str:
    """Return a product and C with their factors: 2 Aᵀ B - C. Local."""
    text = f"{_factor(alpha)}{product}"
    if beta == 0:
        return text
    of_c = _factor(beta)
    return f"{text} - {of_c[1:].lstrip()}C" if of_c.startswith("-") else f"{text} + {of_c}C"


def _factor(value: complex) -> str:
    """Return how a scalar is written before a matrix: "3 ", "-", "(1 - 2i) ", nothing for 1."""
    real, imag = complex(value).real, complex(value).imag
    if imag == 0:
        return {1.0: "", -1.0: "-"}.get(real, f"{real:.15g} ")
    if real == 0:
        return {1.0: "i ", -1.0: "-i "}.get(imag, f"{imag:.15g}i ")
    size = "" if abs(imag) == 1 else f"{abs(imag):.15g}"
    return f"({real:.15g} {'+' if imag > 0 else '-'} {size}i) "


def sizes(file: ProblemFile) -> str:
    """Return the sizes and the scheme or the options of a problem in a line."""
    p = file.problem
    if isinstance(p, FactorProblem):
        return ", ".join(f"{name}={value}" for name, value in p.options.items())
    if isinstance(p, Level3Problem):
        options = "".join(f", {name}={getattr(p, name)}" for name in p.traits.options)
        return f"m = {p.m}, n = {p.n}, k = {p.k}; {p.routine}{options}"
    copies = ", a copy of D on every rank" if p.scheme == "matmul_allreduce" else ""
    return f"m = {p.m}, n = {p.n}, k = {p.k}; {SCHEMES[p.scheme]}{copies}"


def grid_in_words(grid: Grid) -> str:
    """Return a grid in words: 2 × 3 processes, numbered along rows."""
    processes = "1 process" if grid.size == 1 else f"{grid.nprow} × {grid.npcol} processes"
    if 1 in grid.shape:
        return processes
    return f"{processes}, numbered {'along rows' if grid.order == 'row' else 'down columns'}"
