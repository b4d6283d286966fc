# SPDX-License-Identifier: Apache-2.0
"""Slabs: copies of an operand's parts, in memory that the ranks of a node share, and the steps of a program."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....layout.intersection import Stretch, tiled
from ....resources import rank_share
from ...direct.spans import Span, spread
from ...direct.sub_matrix import SubMatrix

__all__ = [
    "ALIGNED", "Factor", "SharedSlabs", "Step", "Steps", "Strided", "along", "back", "integer", "real", "scalar",
]  # fmt: skip

Array = NDArray[Any]
Step = tuple[Callable[..., Any], tuple[Any, ...]]
Steps = list[Step]

ALIGNED = 64
_KEPT = rank_share(1 << 16, 1 << 20)  # integers


class _Integers(dict[int, bytes]):
    """INTEGERs of Fortran, by their values."""

    def __missing__(self, n: int) -> bytes:
        if len(self) > _KEPT:
            self.clear()
        found = self[n] = struct.pack("=i", n)
        return found


integer = _Integers()


def scalar(x: complex, letter: str) -> bytes:
    """Return a number as BLAS takes it: infinity if its type has none so large. Local."""
    if letter == "d":
        return struct.pack("=d", x)
    if letter == "z":
        x = complex(x)
        return struct.pack("=2d", x.real, x.imag)
    return _single(x.real) if letter == "s" else _single(x.real) + _single(x.imag)


def real(x: complex, letter: str) -> bytes:
    """Return a number as BLAS takes it if it is real for complex types, too. Local."""
    return struct.pack("=d", x.real) if letter in "dz" else _single(x.real)


def _single(x: float) -> bytes:
    return bytes(ctypes.c_float(x))  # struct.pack raises OverflowError for what is too large


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
        offsets, at = {}, start
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

    def strided(self, memory: Array, p: int, q: int) -> Strided:
        """Return a slab, of which arrays are made."""
        ld = self._down[p] if self.by_columns else self._across[q]
        return Strided.of(memory, self.offsets[p, q], self.x.held.pattern.dtype, self.by_columns, ld)

    def write(self, memory: Array) -> Steps:
        """Return the steps that write this rank's part of the operand into the slabs."""
        x = self.x
        if not x.active:
            return []
        local, function = Strided.of_part(x), np.conjugate if x.conjugated else np.copyto
        return [
            (function, (of, to) if x.conjugated else (to, of))
            for slab, rows, cols in self._shared_with(x, memory)
            for to, of in slab.copied_from(local, rows, cols)
        ]

    def read(self, to: SubMatrix, memory: Array) -> Steps:
        """Return the steps that write what the slabs hold into this rank's part of a matrix of their shape."""
        if not to.active:
            return []
        local = Strided.of_part(to)
        return [
            (np.copyto, pair)
            for slab, rows, cols in self._shared_with(to, memory)
            for pair in local.copied_from(slab, back(rows), back(cols))
        ]

    def _shared_with(self, x: SubMatrix, memory: Array) -> Iterator[tuple[Strided, Stretch, Stretch]]:
        """Yield what this rank's part of a matrix has in common with each slab, and where it is in both."""
        across = spread(x.cols, x.col, self.cols)
        for p, rows in spread(x.rows, x.row, self.rows):
            for q, cols in across:
                yield self.strided(memory, p, q), rows, cols


class Strided(NamedTuple):
    """A matrix in memory, of which arrays are made: in a tenth of the time that NumPy's ``as_strided`` takes.

    Attributes:
        memory: the bytes that it is in.
        start: the offset of its first element.
        down, across: bytes from an element to the next one in its column, and in its row.
        dtype: its type.
    """

    memory: Array
    start: int
    down: int
    across: int
    dtype: np.dtype

    @classmethod
    def of(cls, memory: Array, start: int, dtype: np.dtype, by_columns: bool, ld: int) -> Strided:
        """Return the matrix that has a leading dimension. Local."""
        item = dtype.itemsize
        if by_columns:
            return cls(memory, start, item, ld * item, dtype)
        return cls(memory, start, ld * item, item, dtype)

    @classmethod
    def of_part(cls, x: SubMatrix) -> Strided:
        """Return what this rank has of a sub-matrix. Local."""
        held = x.held
        return cls.of(held.memory, x.at - held.address, held.pattern.dtype, x.by_columns, x.ld)

    @classmethod
    def of_array(cls, x: Array) -> Strided:
        """Return an array, one in C or Fortran order. Local."""
        down, across = x.strides
        return cls(x if x.flags.c_contiguous else x.T, 0, down, across, x.dtype)

    def beginning(self, i: int, j: int) -> Strided:
        """Return the matrix that begins at a row and a column. Local."""
        return self._replace(start=self.start + i * self.down + j * self.across)

    def copied_from(self, source: Strided, rows: Stretch, cols: Stretch) -> Iterable[tuple[Array, Array]]:
        """Return what is copied to this matrix from another: to where, and what. Local."""
        (repeat, m, i, down, p, to_down), (columns, n, j, right, q, to_right) = rows, cols
        if repeat == columns == 1 and (self.down < self.across) == (source.down < source.across):
            return [(self._block(m, n, p, q), source._block(m, n, i, j))]
        shape = repeat, m, columns, n
        return tiled(self.runs(shape, p, q, to_down, to_right), source.runs(shape, i, j, down, right))

    def _block(self, m: int, n: int, i: int, j: int) -> Array:
        memory, start, down, across, dtype = self
        found: Array = np.ndarray((m, n), dtype, memory, start + i * down + j * across, (down, across))
        return found

    def runs(self, shape: tuple[int, ...], i: int, j: int, step: int, step_across: int) -> Array:
        """Return runs of rows × runs of columns, ``step`` and ``step_across`` apart, in 4 dimensions. Local."""
        memory, start, down, across, dtype = self
        strides = step * down, down, step_across * across, across
        found: Array = np.ndarray(shape, dtype, memory, start + i * down + j * across, strides)
        return found


def back(s: Stretch) -> Stretch:
    """Return a stretch from its destination to its source."""
    return Stretch(s.repeat, s.length, s.dst, s.dst_step, s.src, s.src_step)
