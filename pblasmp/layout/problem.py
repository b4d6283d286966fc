# SPDX-License-Identifier: Apache-2.0
"""MatmulProblem: a matrix product on descriptors, ways to make one, and whether it is legal."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..dtypes import as_dtype, result_dtype
from ..errors import ArgumentError, LayoutError, faults_text, short_repr
from .descriptor import MatrixDescriptor, MemoryOrder
from .grid import Grid, as_grid, integer
from .product import ColumnMajorProduct, MatrixProduct, Op
from .rules import faults
from .schemes import Scheme, scheme_operands, scheme_ops

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["ColumnMajorProduct", "MatmulProblem", "Op"]


@dataclass(frozen=True, slots=True, repr=False)
class MatmulProblem(MatrixProduct):
    """``D = alpha op(A) op(B) + beta C`` on distributed matrices. Local.

    Args:
        a, b, d: descriptors; d is op(A)'s rows × op(B)'s columns; in scheme "matmul_allreduce" P copies of that.
        op_a, op_b: "N", "T" or "C" (conjugate transpose).
        c: descriptor of C, or None.
        scheme: "gemm" for any layout; "allgather_matmul", "matmul_reduce_scatter" or "matmul_allreduce" for the 1D
            layouts of these products.

    Making one checks only the types of the arguments: see ``validate``.

    Raises:
        ArgumentError: an operand is not a descriptor, or an op or the scheme is unknown.
    """

    @classmethod
    def gemm(
        cls,
        m: int,
        n: int,
        k: int,
        grid: Grid | str | Sequence[int],
        block: int | Sequence[int],
        *,
        op_a: Op = "N",
        op_b: Op = "N",
        dtype: DTypeLike = "float64",
        out_dtype: DTypeLike | None = None,
        order: str = "C",
        with_c: bool = False,
    ) -> MatmulProblem:
        """Return the product of an m × k by a k × n matrix on one grid, all from process (0, 0). Local.

        Args:
            m: rows of D.
            n: columns of D.
            k: columns of op(A).
            grid: the process grid of all the matrices: a ``Grid``, ``(2, 3)`` or ``"2x3"``.
            block: one block size for every dimension, or ``(mb, nb)`` or ``(mb, nb, kb)``; kb defaults to nb.
            op_a: "N", "T" or "C": A is stored k × m unless it is "N".
            op_b: "N", "T" or "C": B is stored n × k unless it is "N".
            dtype: type of A and B.
            out_dtype: type of C and D, by default that of A and B, bfloat16 for 8-bit ones.
            order: memory order of all, "C" or "F", or three letters for A, B and D.
            with_c: the product adds to a C laid out like D.
        """
        m, n, k = (integer(extent, name, 0) for name, extent in zip("mnk", (m, n, k), strict=True))
        grid, (mb, nb, kb) = as_grid(grid), _block_sizes(block)
        orders = order * 3 if len(order) == 1 else order
        if len(orders) != 3 or set(orders) - {"C", "F"}:
            raise ArgumentError(
                f"order: expected 'C', 'F' or three of these letters, got {short_repr(order)}"
            )

        def operand(
            rows: int, cols: int, rb: int, cb: int, op: str, letter: str, kind: DTypeLike
        ) -> MatrixDescriptor:
            shape, blocks = ((rows, cols), (rb, cb)) if op == "N" else ((cols, rows), (cb, rb))
            memory: MemoryOrder = "F" if letter == "F" else "C"
            return MatrixDescriptor(shape, blocks, grid, dtype=kind, order=memory)

        d = operand(
            m, n, mb, nb, "N", orders[2], result_dtype(as_dtype(dtype)) if out_dtype is None else out_dtype
        )
        return cls(
            operand(m, k, mb, kb, op_a, orders[0], dtype),
            operand(k, n, kb, nb, op_b, orders[1], dtype),
            d,
            op_a,
            op_b,
            d if with_c else None,
        )

    @classmethod
    def _one_dimensional(
        cls,
        scheme: Scheme,
        m: int,
        n: int,
        k: int,
        nranks: int,
        op_a: Op | None,
        op_b: Op | None,
        dtype: DTypeLike,
        out_dtype: DTypeLike | None,
        order: MemoryOrder,
    ) -> MatmulProblem:
        common = scheme_ops(order)
        op_a, op_b = common[0] if op_a is None else op_a, common[1] if op_b is None else op_b
        a, b, d = scheme_operands(scheme, m, n, k, nranks, op_a, op_b, as_dtype(dtype), order)
        d = replace(d, dtype=result_dtype(a.dtype) if out_dtype is None else as_dtype(out_dtype))
        return cls(a, b, d, op_a, op_b, scheme=scheme)

    @classmethod
    def allgather_matmul(
        cls,
        m: int,
        n: int,
        k: int,
        nranks: int,
        op_a: Op | None = None,
        op_b: Op | None = None,
        *,
        dtype: DTypeLike = "float64",
        out_dtype: DTypeLike | None = None,
        order: MemoryOrder = "C",
    ) -> MatmulProblem:
        """Return AllGather + GEMM on ``nranks`` ranks: A (in F order: B) is gathered. Local.

        Args:
            m: rows of D.
            n: columns of D.
            k: columns of op(A).
            nranks: number of ranks.
            op_a, op_b: "N", "T" or "C"; by default the ops that every scheme has: NT in C order, TN in F order.
            dtype: type of A and B.
            out_dtype: type of D, by default that of A and B, bfloat16 for 8-bit ones.
            order: memory order of all.

        Raises:
            LayoutError: m or n is not divisible by ``nranks``.
        """
        return cls._one_dimensional("allgather_matmul", m, n, k, nranks, op_a, op_b, dtype, out_dtype, order)

    @classmethod
    def matmul_reduce_scatter(
        cls,
        m: int,
        n: int,
        k: int,
        nranks: int,
        op_a: Op | None = None,
        op_b: Op | None = None,
        *,
        dtype: DTypeLike = "float64",
        out_dtype: DTypeLike | None = None,
        order: MemoryOrder = "C",
    ) -> MatmulProblem:
        """Return GEMM + ReduceScatter on ``nranks`` ranks: k is split, D scattered. Local.

        Args:
            m, n, k, nranks, op_a, op_b, dtype, out_dtype, order: as for ``allgather_matmul``.

        Raises:
            LayoutError: m (in F order: n) or k is not divisible by ``nranks``.
        """
        return cls._one_dimensional(
            "matmul_reduce_scatter", m, n, k, nranks, op_a, op_b, dtype, out_dtype, order
        )

    @classmethod
    def matmul_allreduce(
        cls,
        m: int,
        n: int,
        k: int,
        nranks: int,
        op_a: Op | None = None,
        op_b: Op | None = None,
        *,
        dtype: DTypeLike = "float64",
        out_dtype: DTypeLike | None = None,
        order: MemoryOrder = "C",
    ) -> MatmulProblem:
        """Return GEMM + AllReduce on ``nranks`` ranks: k is split and every rank gets all of D. Local.

        D is declared ``(m * nranks, n)`` in C order, ``(m, n * nranks)`` in F order: each rank's local array
        is all of the m × n result.

        Args:
            m, n, k, nranks, op_a, op_b, dtype, out_dtype, order: as for ``allgather_matmul``.

        Raises:
            LayoutError: k is not divisible by ``nranks``, or the ops are not NT (in F order: TN).
        """
        return cls._one_dimensional("matmul_allreduce", m, n, k, nranks, op_a, op_b, dtype, out_dtype, order)

    def to_dict(self, title: str = "") -> dict[str, Any]:
        """Return a table of plain values that ``from_dict`` reads back: JSON and TOML can hold it. Local.

        Args:
            title: of the file; by default ``str`` of the product.
        """
        operands = {name: x.to_dict() for name in "abdc" if (x := getattr(self, name)) is not None}
        scheme = {} if self.scheme == "gemm" else {"scheme": self.scheme}
        return {"title": title or str(self), **scheme, "ops": self.op_a + self.op_b, **operands}

    def faults(self, result: str = "d") -> list[str]:
        """Return every reason why the problem is not legal, each with a remedy; empty if it is legal. Local.

        Args:
            result: the name of D in messages: the caller's argument that gives its layout.
        """
        return faults(self, result)

    def validate(self, result: str = "d") -> None:
        """Raise LayoutError naming every fault at once, or return None. Local.

        The rules are cuBLASMp's. ``pblasmp.matmul`` asks less of scheme "gemm": sizes and types must fit, but its own
        algorithms multiply matrices in any layouts.

        Args:
            result: the name of D in messages: the caller's argument that gives its layout.

        Source: cublasmp.h of 0.10.0 and docs/layouts.md.
        """
        found = self.faults(result)
        if found:
            raise LayoutError(faults_text("this product", found))


def _block_sizes(block: int | Sequence[int]) -> tuple[int, int, int]:
    """Return ``(mb, nb, kb)`` for one, two or three block sizes."""
    try:
        size = operator.index(block)  # type: ignore[arg-type]
    except TypeError:
        sizes = tuple(block) if isinstance(block, Sequence) else ()
    else:
        return size, size, size
    if len(sizes) not in (2, 3):
        raise LayoutError(f"block: expected one, two or three integers, got {short_repr(block)}")
    return sizes[0], sizes[1], sizes[-1]
