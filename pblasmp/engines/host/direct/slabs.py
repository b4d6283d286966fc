# SPDX-License-Identifier: Apache-2.0
"""Slabs: copies of an operand's parts, in memory that the ranks of a node share, and the steps of a program."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....layout.intersection import Piece, Stretch, parts_to_copy
from ...direct.spans import Span, spread
from ...direct.sub_matrix import SubMatrix

__all__ = ["ALIGNED", "Factor", "SharedSlabs", "Step", "Steps", "along", "integer", "real", "scalar"]

Array = NDArray[Any]
Step = tuple[Callable[..., Any], tuple[Any, ...]]
Steps = list[Step]

ALIGNED = 64


class _Integers(dict[int, bytes]):
    """INTEGERs of Fortran, by their values."""

    def __missing__(self, n: int) -> bytes:
        if len(self) > 1 << 16:
            self.clear()
        found = self[n] = struct.pack("=i", n)
        return found


integer = _Integers()


def scalar(x: complex, letter: str) -> bytes:
    """Return a number as BLAS takes it. Local."""
    if letter == "d":
        return struct.pack("=d", x)
    if letter == "s":
        return struct.pack("=f", x)
    x = complex(x)
    return struct.pack("=2d" if letter == "z" else "=2f", x.real, x.imag)


def real(x: complex, letter: str) -> bytes:
    """Return a number as BLAS takes it if it is real for complex types, too. Local."""
    return struct.pack("=d" if letter in "dz" else "=f", complex(x).real)


class Factor:
    """A local array as BLAS takes it. Local.

    Attributes:
        at: its address.
        by_columns: whether it is in Fortran order.
        ld: its leading dimension.
        conjugated: its conjugate is meant.
    """

    __slots__ = ("at", "by_columns", "conjugated", "ld")

    def __init__(self, at: int, by_columns: bool, ld: int, conjugated: bool = False) -> None:
        self.at, self.by_columns, self.ld, self.conjugated = at, by_columns, ld, conjugated

    def below(self, i: int, item: int) -> Factor:
        """Return its rows from ``i`` on; ``item`` is the size of an element."""
        return Factor(self.at + i * item * (1 if self.by_columns else self.ld), self.by_columns, self.ld)


def along(x: Factor | SubMatrix) -> tuple[int, bytes]:
    """Return where a column begins and how far apart its elements are, as BLAS takes it. Local."""
    return x.at, integer[1 if x.by_columns else x.ld]


class SharedSlabs:
    """Copies of an operand's parts, one for each process of another distribution, in shared memory. Local.

    Args:
        x: the operand.
        rows, cols: how its rows and columns are dealt out to those who need them.
        start: the offset of the first slab.
        by_columns: their memory order.
    """

    def __init__(self, x: SubMatrix, rows: Span, cols: Span, start: int, by_columns: bool) -> None:
        self.x, self.rows, self.cols, self.by_columns = x, rows, cols, by_columns
        item = x.held.pattern.itemsize
        self._down = down = rows.counts()
        self._across = across = cols.counts()
        offsets: dict[tuple[int, int], int] = {}
        at = start
        for p, m in enumerate(down):
            for q, n in enumerate(across):
                offsets[p, q] = at
                at += -(-m * n * item // ALIGNED) * ALIGNED
        self.offsets, self.end = offsets, at

    def shape(self, p: int, q: int) -> tuple[int, int]:
        """Return a slab's rows and columns."""
        return self._down[p], self._across[q]

    def array(self, memory: Array, p: int, q: int) -> Array:
        """Return a slab."""
        order: Any = "F" if self.by_columns else "C"
        dtype: Any = self.x.held.pattern.dtype
        found: Array = np.ndarray(self.shape(p, q), dtype, memory, self.offsets[p, q], order=order)
        return found

    def factor(self, base: int, p: int, q: int) -> Factor:
        """Return a slab as BLAS takes it; ``base`` is the memory's address."""
        m, n = self.shape(p, q)
        return Factor(base + self.offsets[p, q], self.by_columns, max(1, m if self.by_columns else n))

    def write(self, memory: Array) -> Steps:
        """Return the steps that write this rank's part of the operand into the slabs."""
        steps: Steps = []
        x = self.x
        if x.active:
            local = x.local()
            for slab, rows, cols in self._shared_with(x, memory):
                for to, of in self._parts(slab, local, rows, cols, x):
                    steps.append((np.conjugate, (of, to)) if x.conjugated else (np.copyto, (to, of)))
        return steps

    def read(self, to: SubMatrix, memory: Array) -> Steps:
        """Return the steps that write what the slabs hold into this rank's part of a matrix of their shape."""
        steps: Steps = []
        if to.active:
            local = to.local()
            for slab, rows, cols in self._shared_with(to, memory):
                steps += [
                    (np.copyto, part) for part in self._parts(local, slab, _back(rows), _back(cols), to)
                ]
        return steps

    def _parts(
        self, to: Array, of: Array, rows: Stretch, cols: Stretch, x: SubMatrix
    ) -> Iterable[tuple[Array, Array]]:
        """Return what is copied from a slab to this rank's part of a matrix, or back: to where, and what."""
        if rows.repeat == cols.repeat == 1 and self.by_columns == x.by_columns:
            _, m, i, _, p, _ = rows
            _, n, j, _, q, _ = cols
            return [(to[p : p + m, q : q + n], of[i : i + m, j : j + n])]
        return parts_to_copy(to, of, Piece((rows,), (cols,)))

    def _shared_with(self, x: SubMatrix, memory: Array) -> Iterator[tuple[Array, Stretch, Stretch]]:
        """Yield what this rank's part of a matrix has in common with each slab, and where it is in both."""
        slabs: dict[tuple[int, int], Array] = {}
        across = spread(x.cols, x.col, self.cols)
        for p, rows in spread(x.rows, x.row, self.rows):
            for q, cols in across:
                slab = slabs.get((p, q))
                if slab is None:
                    slab = slabs[p, q] = self.array(memory, p, q)
                yield slab, rows, cols


def _back(s: Stretch) -> Stretch:
    """Return a stretch from its destination to its source."""
    return Stretch(s.repeat, s.length, s.dst, s.dst_step, s.src, s.src_step)
