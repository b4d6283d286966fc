# SPDX-License-Identifier: Apache-2.0
"""Triangular solves by products: triangles on the diagonal are inverted, all at once.

cuBLAS's ``trsm``, which solves with small blocks, leaves most multiprocessors idle.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import real_dtype
from ..arrays import blas_operand, same_memory
from .kernels.lt_product import Op

Array = Any

Rows = tuple[Array, int]
"""An array, and the first row that is meant."""

_OTHER: dict[Op, Op] = {"N": "T", "T": "N"}
_JOINED = 2  # inverted blocks in a row of a triangle that ``Halves`` inverts: products with it fill a GPU


class Triangles:
    """Triangles on the diagonal of a matrix, and their inverses. Making one is local.

    Both are lower ones: an upper triangle is transposed. They are ``wide`` columns wide, with a diagonal of ones behind
    those of a panel.

    Args:
        a: the rank's panels, in F order.
        count: how many it has.
        deal: see ``FactorKernels.triangles``.
        n: the order of the whole matrix.
        wide: ``kernels.leaf``, or a power of two times as much.
        unit: its diagonal is taken as ones.
        turn: which memory they are in: what has the same number is overwritten.
    """

    def __init__(
        self,
        operations: Any,
        a: Array,
        count: int,
        deal: tuple[int, int, int, int],
        n: int,
        wide: int,
        *,
        lower: bool,
        unit: bool,
        turn: int = 0,
    ) -> None:
        self._operations, self._dtype, self.wide, self._count = operations, np.dtype(a.dtype), wide, count
        self._turn = turn
        if not count:
            return
        kernels, stream = operations.kernels, operations.xp.cuda.get_current_stream()
        size = count * wide * (wide + 1)
        self._both, self._inverses = (
            operations.temporary(f"triangles {name} {turn}", (1, size), self._dtype)[0]
            for name in ("themselves", "inverted")
        )
        kernels.triangles(stream, a, count, deal, n, self._both, self._inverses, wide, lower=lower, unit=unit)
        kernels.invert(stream, self._both, self._inverses, wide)

    def of(self, i: int) -> tuple[int, int]:
        """Return where the inverse of a triangle is, and the triangle. Local."""
        behind = i * self.wide * (self.wide + 1) * self._dtype.itemsize
        return int(self._inverses.data.ptr) + behind, int(self._both.data.ptr) + behind

    def conditions(self) -> Array:
        """Return the condition of each triangle in the maximum norm. Local to queue."""
        operations, real = self._operations, real_dtype(self._dtype)
        found = operations.temporary(f"triangles' conditions {self._turn}", (1, self._count), real)[0]
        stream = operations.xp.cuda.get_current_stream()
        operations.kernels.conditions(stream, self._both, self._inverses, self.wide, found)
        return found


class Halves:
    """The solution of ``a y = x`` by recursive halves. Making and running one is local.

    One half of the equations is solved, one product subtracts its contribution from the other: most operations are in
    few large products. At the end are triangles, whose inverses are multiplied. A large condition asks for more: see
    ``FactorKernels.refine``.

    Args:
        operations: of the GPU; inverses are queued on CuPy's current stream, the rest where it is run.
        a: the triangle.
        x: the right-hand sides, which are overwritten.
        y: the unknowns, in the same order in memory; may be ``x``.
        unit: its diagonal is taken as ones.
        turn: as for ``Triangles``.
    """

    def __init__(
        self, operations: Any, a: Array, x: Array, y: Array, *, lower: bool, unit: bool, turn: int = 0
    ) -> None:
        self._operations, self._lower, self._dtype = operations, lower, np.dtype(x.dtype)
        self._n, self._columns = x.shape
        flag, self._lda = blas_operand(a)
        self._of: Op = "N" if flag == "N" else "T"
        self._by_rows = blas_operand(x)[0] == "T"  # cuBLAS writes columns: compute the transpose
        self._at, self._steps = int(a.data.ptr), [int(step) for step in a.strides]
        self._x, self._y, self._in_place = x, y, same_memory(x, y)
        wide = _JOINED * operations.kernels.leaf(self._dtype)
        by_columns = a if self._of == "N" else a.T
        self._triangles = Triangles(
            operations, by_columns, -(-self._n // wide), (wide, 1, 1, 0), self._n, wide,
            lower=lower == (self._of == "N"), unit=unit, turn=turn,
        )  # fmt: skip
        # what is stored is the lower triangle of a, or the transpose of its upper one
        conditions = self._triangles.conditions()
        self._condition, self._real = int(conditions.data.ptr), conditions.itemsize
        self._found = y
        if self._in_place:
            shape = (self._columns, wide) if self._by_rows else (wide, self._columns)
            found = operations.temporary("found", shape, self._dtype)
            self._found = found.T if self._by_rows else found

    def run(self) -> None:
        """Queue it."""
        self._stream = self._operations.xp.cuda.get_current_stream()
        self._solve(0, -(-self._n // self._triangles.wide))

    def _solve(self, first: int, stop: int) -> None:
        """Solve with the triangles from ``first`` to ``stop``."""
        if stop - first == 1:
            self._by_inverse(first)
            return
        middle = (first + stop) // 2
        halves = (first, middle), (middle, stop)
        now, then = halves if self._lower else halves[::-1]
        self._solve(*now)
        self._subtract(self._rows(*now), self._rows(*then))
        self._solve(*then)

    def _rows(self, first: int, stop: int) -> tuple[int, int]:
        """Return the first row of some triangles, and how many they have."""
        start = first * self._triangles.wide
        return start, min(stop * self._triangles.wide, self._n) - start

    def _subtract(self, known: tuple[int, int], rest: tuple[int, int]) -> None:
        """Subtract the contribution of known rows from others."""
        (of, depth), (to, rows) = known, rest
        down, across = self._steps
        factor = self._at + to * down + of * across, self._lda
        self._multiply(self._of, factor, (self._y, of), (self._x, to), (rows, depth), -1, 1)

    def _by_inverse(self, i: int) -> None:
        (start, size), wide = self._rows(i, i + 1), self._triangles.wide
        inverse, triangle = self._triangles.of(i)
        right, found = (self._x, start), (self._found, 0 if self._in_place else start)
        self._multiply("N" if self._lower else "T", (inverse, wide), right, found, (size, size), 1, 0)
        about = triangle, inverse, self._condition + i * self._real
        self._operations.kernels.refine(
            self._stream, right, found, size, about, wide, turned=not self._lower, stays=not self._in_place
        )

    def _multiply(
        self,
        op: Op,
        a: tuple[int, int],
        x: Rows,
        y: Rows,
        sizes: tuple[int, int],
        alpha: int,
        beta: int,
    ) -> None:
        """Queue ``y = alpha op(a) x + beta y``; ``a`` is an address and its ld, ``sizes`` are rows and depth."""
        of, to = (
            (int(array.data.ptr) + row * int(array.strides[0]), max(array.strides) // array.itemsize)
            for array, row in (x, y)
        )
        (rows, depth), columns = sizes, self._columns
        ops, factors, extents = (op, "N"), (*a, *of), (rows, columns, depth)
        if self._by_rows:
            ops, factors, extents = ("N", _OTHER[op]), (*of, *a), (columns, rows, depth)
        self._operations.multiply_at(
            self._stream.ptr, ops, extents, alpha, beta, (*factors, *to), self._dtype
        )
