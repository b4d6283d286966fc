# SPDX-License-Identifier: Apache-2.0
"""Triangular solves by products: triangles on the diagonal are inverted, all at once.

cuBLAS's ``trsm``, which solves with small blocks, leaves most multiprocessors idle.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import blas_operand
from .kernels.lt import Op

Array = Any

_OTHER: dict[Op, Op] = {"N": "T", "T": "N"}
_JOINED = 2  # inverted blocks in a row of a triangle that ``Halves`` inverts: products with it fill a GPU


class Triangles:
    """Triangles on the diagonal of a matrix, and their inverses. Making one is local.

    Both are lower ones: an upper triangle is transposed. They are ``wide`` columns wide, with a diagonal of ones behind
    those of a panel.

    Args:
        operations: of the GPU.
        a: the rank's panels, in F order.
        count: how many it has.
        deal: see ``FactorKernels.triangles``.
        n: the order of the whole matrix.
        wide: ``kernels.leaf``, or a power of two times as much.
        lower: which triangle.
        unit: its diagonal is taken as ones.

    Attributes:
        wide: as above.
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
    ) -> None:
        self._operations, self._dtype, self.wide, self._count = operations, np.dtype(a.dtype), wide, count
        if not count:
            return
        kernels, stream = operations.kernels, operations.xp.cuda.get_current_stream()
        size = count * wide * (wide + 1)
        self._both, self._inverses = (
            operations.temporary(f"triangles {name}", (1, size), self._dtype)[0]
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
        operations, real = self._operations, np.dtype(self._dtype.char.lower())
        found = operations.temporary("triangles' conditions", (1, self._count), real)[0]
        stream = operations.xp.cuda.get_current_stream()
        operations.kernels.conditions(stream, self._both, self._inverses, self.wide, found)
        return found


class Halves:
    """The solution of ``a y = x``, in the place of ``x``, by recursive halves. Making and running one is local.

    One half of the equations is solved, one product subtracts its contribution from the other: most operations are in
    few large products. At the end are triangles, whose inverses are multiplied. A large condition asks for more: see
    ``FactorKernels.refine``.

    Args:
        operations: of the GPU; everything is queued on CuPy's current stream.
        a: the triangle.
        x: the right-hand sides.
        lower: which triangle.
        unit: its diagonal is taken as ones.
    """

    def __init__(self, operations: Any, a: Array, x: Array, *, lower: bool, unit: bool) -> None:
        self._operations, self._lower, self._dtype = operations, lower, np.dtype(x.dtype)
        self._stream = operations.xp.cuda.get_current_stream()
        self._n, self._columns = x.shape
        (flag, self._lda), (flag_x, self._ldx) = blas_operand(a), blas_operand(x)
        self._of: Op = "N" if flag == "N" else "T"
        self._by_rows = flag_x == "T"  # cuBLAS writes columns: compute the transpose
        self._item = item = int(self._dtype.itemsize)
        self._at, self._steps = int(a.data.ptr), [int(step) for step in a.strides]
        self._to, self._apart = int(x.data.ptr), [int(step) // item for step in x.strides]
        wide = _JOINED * operations.kernels.leaf(self._dtype)
        by_columns = a if self._of == "N" else a.T
        self._triangles = Triangles(
            operations, by_columns, -(-self._n // wide), (wide, 1, 1, 0), self._n, wide,
            lower=lower == (self._of == "N"), unit=unit,
        )  # fmt: skip
        # what is stored is the lower triangle of a, or the transpose of its upper one
        conditions = self._triangles.conditions()
        self._condition, self._real = int(conditions.data.ptr), conditions.itemsize
        self._ldf = self._columns if self._by_rows else wide
        self._found = int(operations.temporary("found", (wide, self._columns), self._dtype).data.ptr)

    def run(self) -> None:
        """Queue it."""
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
        self._multiply(
            self._of, (self._at + to * down + of * across, self._lda), (self._row(of), self._ldx),
            (self._row(to), self._ldx), (rows, depth), -1, 1,
        )  # fmt: skip

    def _by_inverse(self, i: int) -> None:
        (start, size), wide = self._rows(i, i + 1), self._triangles.wide
        (inverse, triangle), own, by_rows = self._triangles.of(i), self._row(start), self._by_rows
        op: Op = "N" if self._lower else "T"
        self._multiply(op, (inverse, wide), (own, self._ldx), (self._found, self._ldf), (size, size), 1, 0)
        found = self._found, *((self._ldf, 1) if by_rows else (1, self._ldf))
        about = triangle, inverse, self._condition + i * self._real
        self._operations.kernels.refine(
            self._stream, self._dtype, (size, self._columns), (own, *self._apart), found, about, wide,
            turned=not self._lower,
        )  # fmt: skip

    def _row(self, row: int) -> int:
        """Return where a row of the right-hand sides begins."""
        return self._to + row * self._apart[0] * self._item

    def _multiply(
        self,
        op: Op,
        a: tuple[int, int],
        x: tuple[int, int],
        y: tuple[int, int],
        sizes: tuple[int, int],
        alpha: int,
        beta: int,
    ) -> None:
        """Queue ``y = alpha op(a) x + beta y``; ``sizes`` are y's rows and the depth, the rest address and ld."""
        (rows, depth), columns = sizes, self._columns
        ops, factors, extents = (op, "N"), (*a, *x), (rows, columns, depth)
        if self._by_rows:
            ops, factors, extents = ("N", _OTHER[op]), (*x, *a), (columns, rows, depth)
        self._operations.multiply_at(self._stream.ptr, ops, extents, alpha, beta, (*factors, *y), self._dtype)
