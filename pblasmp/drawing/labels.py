# SPDX-License-Identifier: Apache-2.0
"""Texts and colours of both kinds of drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..layout.schemes import SCHEMES
from ..layout.svg import PALETTE, Block, Colours, block_count, blocks

if TYPE_CHECKING:
    from ..layout.descriptor import MatrixDescriptor
    from ..layout.files import ProblemFile
    from ..layout.grid import Grid

__all__ = [
    "PALETTE",
    "Block",
    "Colours",
    "View",
    "block_count",
    "blocks",
    "formula",
    "grid_in_words",
    "sizes",
    "views",
]


class View(NamedTuple):
    """An operand to be drawn: ``descriptor`` is the window of ``parent``, rows and columns given half-open."""

    name: str
    descriptor: MatrixDescriptor
    parent: MatrixDescriptor
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def windowed(self) -> bool:
        """Whether it is a part of something larger."""
        return self.descriptor.shape != self.parent.shape

    def local_shape(self, rank: int) -> str:
        """The shape of a rank's local array, and of the one that it is a part of. Local."""
        text = "{} × {}".format(*self.descriptor.local_shape(rank))
        return text + (" of {} × {}".format(*self.parent.local_shape(rank)) if self.windowed else "")


def views(file: ProblemFile) -> list[View]:
    """Return the operands in the order A, B, D, C; C only if its layout differs from D's."""
    found = []
    for name, parent in file.parents.items():
        rows, cols = parent.ranges(file.windows[name])
        found.append(View(name.upper(), getattr(file.problem, name), parent, rows, cols))
    if len(found) == 4 and found[2][1:] == found[3][1:]:
        found[2:] = [found[2]._replace(name="D, C")]
    return found


def formula(file: ProblemFile) -> str:
    """Return the product in a line: D = 2 Aᵀ B - C."""
    p = file.problem
    ops = {"N": "", "T": "ᵀ", "C": "ᴴ"}
    text = f"D = {_factor(file.alpha)}A{ops[p.op_a]} B{ops[p.op_b]}"
    if p.c is None or file.beta == 0:
        return text
    beta = _factor(file.beta)
    return f"{text} - {beta[1:].lstrip()}C" if beta.startswith("-") else f"{text} + {beta}C"


def _factor(value: complex) -> str:
    """Return how a scalar is written before a matrix: "3 ", "-", "(1 - 2i) ", nothing for 1."""
    real, imag = complex(value).real, complex(value).imag
    if imag == 0:
        return {1.0: "", -1.0: "-"}.get(real, f"{real:g} ")
    if real == 0:
        return {1.0: "i ", -1.0: "-i "}.get(imag, f"{imag:g}i ")
    size = "" if abs(imag) == 1 else f"{abs(imag):g}"
    return f"({real:g} {'+' if imag > 0 else '-'} {size}i) "


def sizes(file: ProblemFile) -> str:
    """Return the sizes and the scheme of a product in a line."""
    p = file.problem
    copies = ", a copy of D on every rank" if p.scheme == "ar" else ""
    return f"m = {p.m}, n = {p.n}, k = {p.k}; {SCHEMES[p.scheme]}{copies}"


def grid_in_words(grid: Grid) -> str:
    """Return a grid in words: 2 × 3 processes, numbered along rows."""
    processes = "1 process" if grid.size == 1 else f"{grid.nprow} × {grid.npcol} processes"
    if 1 in grid.shape:
        return processes
    return f"{processes}, numbered {'along rows' if grid.order == 'row' else 'down columns'}"
