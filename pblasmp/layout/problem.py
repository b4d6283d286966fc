# SPDX-License-Identifier: Apache-2.0
"""MatmulProblem: D = op(A) op(B) as descriptors, whether it is legal, and its column-major form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..dtypes import as_dtype, result_dtype
from ..errors import LayoutError
from .descriptor import MatrixDescriptor, MemoryOrder
from .grid import Grid, one_of
from .rules import faults
from .schemes import Scheme, scheme_operands

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["ColumnMajorProduct", "MatmulProblem", "Op"]

Op = Literal["N", "T", "C"]


@dataclass(frozen=True, slots=True)
class ColumnMajorProduct:
    """The same product of the same memory with every matrix F-ordered, as BLAS and cuBLASMp know it.

    Attributes:
        a, b, d, c: F-ordered descriptors of the memory (``c`` lies like ``d``, or is None).
        op_a, op_b: what is done to them.
        swapped: the product is the transpose of the caller's: ``a`` is the caller's B, ``b`` the caller's A.
        conj_a, conj_b: conjugate the operand first (op C of an operand whose memory order is not D's: BLAS
            has no conjugate without a transpose). Never set for real types.
        copy_c: the caller's C is not in D's memory order: copy it locally first.
    """

    a: MatrixDescriptor
    b: MatrixDescriptor
    d: MatrixDescriptor
    c: MatrixDescriptor | None
    op_a: Op
    op_b: Op
    swapped: bool
    conj_a: bool
    conj_b: bool
    copy_c: bool


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """``D = alpha op(A) op(B) + beta C`` on distributed matrices. Local.

    Args:
        a, b, d: descriptors; d is op(A)'s rows × op(B)'s columns (scheme "ar": declared ``(m, n * P)``).
        op_a, op_b: "N", "T" or "C" (conjugate transpose).
        c: descriptor of C, or None.
        scheme: "gemm" for any layout; "ag", "rs" or "ar" for the 1D layouts that overlap communication.

    Making one checks nothing but the kind of its arguments: see ``validate``.

    Raises:
        LayoutError: an operand is no descriptor, or an op or the scheme is unknown.
    """

    a: MatrixDescriptor
    b: MatrixDescriptor
    d: MatrixDescriptor
    op_a: Op = "N"
    op_b: Op = "N"
    c: MatrixDescriptor | None = None
    scheme: Scheme = "gemm"

    def __post_init__(self) -> None:
        for name in "abdc":
            value = getattr(self, name)
            if not isinstance(value, MatrixDescriptor) and not (name == "c" and value is None):
                raise LayoutError(f"{name}: expected a MatrixDescriptor, got {value!r}")
        for name in ("op_a", "op_b"):
            op = getattr(self, name)
            if not one_of(op, "NTC"):
                raise LayoutError(f"{name}: expected 'N', 'T' or 'C', got {op!r}")
        if not one_of(self.scheme, ("gemm", "ag", "rs", "ar")):
            raise LayoutError(f"scheme: expected 'gemm', 'ag', 'rs' or 'ar', got {self.scheme!r}")

    @classmethod
    def gemm(
        cls,
        m: int,
        n: int,
        k: int,
        grid: Grid,
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
            grid: where all the matrices lie.
            block: one block size for every dimension, or ``(mb, nb)`` or ``(mb, nb, kb)``; kb defaults to nb.
            op_a: "N", "T" or "C": A is stored k × m unless it is "N".
            op_b: "N", "T" or "C": B is stored n × k unless it is "N".
            dtype: type of A and B.
            out_dtype: type of C and D, by default that of A and B, bfloat16 for 8-bit ones.
            order: memory order of all, "C" or "F", or three letters for A, B and D.
            with_c: the product adds to a C that lies like D.
        """
        sizes = tuple(block) if isinstance(block, Sequence) else (block, block)
        if len(sizes) not in (2, 3):
            raise LayoutError(f"block: expected one, two or three integers, got {block!r}")
        mb, nb, kb = sizes if len(sizes) == 3 else (*sizes, sizes[1])
        orders = order * 3 if len(order) == 1 else order
        if len(orders) != 3 or set(orders) - {"C", "F"}:
            raise LayoutError(f"order: expected 'C', 'F' or three of these letters, got {order!r}")

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
        op_a: Op,
        op_b: Op,
        dtype: DTypeLike,
        out_dtype: DTypeLike | None,
        order: MemoryOrder,
    ) -> MatmulProblem:
        if order == "C":  # the transpose of the F-ordered problem, whose A is our B
            return cls._one_dimensional(scheme, n, m, k, nranks, op_b, op_a, dtype, out_dtype, "F").T
        if order != "F":
            raise LayoutError(f"order: expected 'C' or 'F', got {order!r}")
        a, b, d = scheme_operands(scheme, m, n, k, nranks, op_a, op_b, as_dtype(dtype))
        d = replace(d, dtype=result_dtype(a.dtype) if out_dtype is None else as_dtype(out_dtype))
        return cls(a, b, d, op_a, op_b, scheme=scheme)

    @classmethod
    def allgather(
        cls,
        m: int,
        n: int,
        k: int,
        nranks: int,
        op_a: Op = "T",
        op_b: Op = "N",
        *,
        dtype: DTypeLike = "float32",
        out_dtype: DTypeLike | None = None,
        order: MemoryOrder = "F",
    ) -> MatmulProblem:
        """Return AllGather + GEMM on ``nranks`` ranks: B (in C order: A) is gathered meanwhile. Local.

        Raises:
            LayoutError: m or n does not divide by ``nranks``.
        """
        return cls._one_dimensional("ag", m, n, k, nranks, op_a, op_b, dtype, out_dtype, order)

    @classmethod
    def reduce_scatter(
        cls,
        m: int,
        n: int,
        k: int,
        nranks: int,
        op_a: Op = "T",
        op_b: Op = "N",
        *,
        dtype: DTypeLike = "float32",
        out_dtype: DTypeLike | None = None,
        order: MemoryOrder = "F",
    ) -> MatmulProblem:
        """Return GEMM + ReduceScatter on ``nranks`` ranks: k is split, D scattered. Local.

        Raises:
            LayoutError: n (in C order: m) or k does not divide by ``nranks``.
        """
        return cls._one_dimensional("rs", m, n, k, nranks, op_a, op_b, dtype, out_dtype, order)

    @classmethod
    def allreduce(
        cls,
        m: int,
        n: int,
        k: int,
        nranks: int,
        op_a: Op = "T",
        op_b: Op = "N",
        *,
        dtype: DTypeLike = "float32",
        out_dtype: DTypeLike | None = None,
        order: MemoryOrder = "F",
    ) -> MatmulProblem:
        """Return GEMM + AllReduce on ``nranks`` ranks: k is split and every rank gets all of D. Local.

        D is declared ``(m, n * nranks)`` in F order, ``(m * nranks, n)`` in C order: each rank's local array
        is all of the m × n result.

        Raises:
            LayoutError: k does not divide by ``nranks``, or the ops are not TN (in C order: NT).
        """
        return cls._one_dimensional("ar", m, n, k, nranks, op_a, op_b, dtype, out_dtype, order)

    @property
    def m(self) -> int:
        """Rows of op(A)."""
        return self.a.shape[0 if self.op_a == "N" else 1]

    @property
    def k(self) -> int:
        """Columns of op(A)."""
        return self.a.shape[1 if self.op_a == "N" else 0]

    @property
    def n(self) -> int:
        """Columns of op(B)."""
        return self.b.shape[1 if self.op_b == "N" else 0]

    @property
    def flops(self) -> int:
        """Floating-point operations of the product: 2 m n k, four times that for complex types."""
        return 2 * self.m * self.n * self.k * (4 if self.a.dtype.kind == "c" else 1)

    @property
    def T(self) -> MatmulProblem:  # noqa: N802
        """The transposed product of the same memory: D^T = op(B)^T op(A)^T."""
        c = None if self.c is None else self.c.T
        return MatmulProblem(self.b.T, self.a.T, self.d.T, self.op_b, self.op_a, c, self.scheme)

    def __str__(self) -> str:
        scheme = "" if self.scheme == "gemm" else f", scheme {self.scheme}"
        sizes = f"{self.m} x {self.n} x {self.k}"
        return f"{self.a.dtype.name} {self.op_a}{self.op_b} product of {sizes} on {self.d.grid}{scheme}"

    def faults(self) -> list[str]:
        """Return every reason why the problem is not legal, each with what to do; empty when it is. Local."""
        return faults(self)

    def validate(self) -> None:
        """Raise LayoutError naming every fault at once, or return None. Local.

        The rules are those of cuBLASMp, and the same on every engine: what runs on a laptop runs on GPUs.

        Source: cublasmp.h of 0.10.0 and docs/layouts.md.
        """
        found = self.faults()
        if found:
            count = "a fault" if len(found) == 1 else f"{len(found)} faults"
            raise LayoutError("\n  - ".join([f"{count} in this product:", *found]))

    def column_major(self) -> ColumnMajorProduct:
        """Return the same product of the same memory as one product of F-ordered matrices. Local.

        A C-ordered matrix is its F-ordered transpose, so a C-ordered D turns the product round
        (D^T = op(B)^T op(A)^T) and an operand whose order is not D's has its op flipped. Nothing moves.
        """
        swapped = self.d.order == "C"
        p = self.T if swapped else self
        a, op_a, conj_a = _column_major_operand(p.a, p.op_a)
        b, op_b, conj_b = _column_major_operand(p.b, p.op_b)
        copy_c = p.c is not None and p.c.order != p.d.order
        c = None if p.c is None else replace(p.d, dtype=p.c.dtype) if copy_c else p.c
        return ColumnMajorProduct(a, b, p.d, c, op_a, op_b, swapped, conj_a, conj_b, copy_c)


def _column_major_operand(x: MatrixDescriptor, op: Op) -> tuple[MatrixDescriptor, Op, bool]:
    if op == "C" and x.dtype.kind != "c":
        op = "T"
    if x.order == "F":
        return x, op, False
    if op == "N":
        return x.T, "T", False
    return x.T, "N", op == "C"
