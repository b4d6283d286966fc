# SPDX-License-Identifier: Apache-2.0
"""A matrix product: D = op(A) op(B) as descriptors, and its column-major form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ArgumentError, ArgumentTypeError, short_repr
from .descriptor import MatrixDescriptor
from .grid import one_of
from .schemes import SCHEMES, Op, Scheme
from .value import Problem

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ColumnMajorProduct", "MatrixProduct", "Op"]


@dataclass(frozen=True, slots=True)
class ColumnMajorProduct:
    """The same product of the same memory with every matrix F-ordered, as BLAS and cuBLASMp know it.

    Attributes:
        a, b, d, c: F-ordered descriptors of the memory (``c`` is laid out like ``d``, or is None).
        op_a, op_b: their ops.
        swapped: the product is the transpose of the caller's: ``a`` is the caller's B, ``b`` the caller's A.
        conj_a, conj_b: conjugate the operand first (op C of an operand whose memory order is not D's: BLAS
            has no conjugate without a transpose). Never set for real types.
        copy_c: the caller's C is not in D's memory order: first copy it locally.
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


@dataclass(frozen=True, slots=True, repr=False)
class MatrixProduct(Problem):
    """The operands and options of a ``MatmulProblem``, which documents them. Local."""

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
                raise ArgumentTypeError(f"{name}: expected a MatrixDescriptor, got {short_repr(value)}")
        for name in ("op_a", "op_b"):
            op = getattr(self, name)
            if not one_of(op, "NTC"):
                raise ArgumentError(f"{name}: expected 'N', 'T' or 'C', got {short_repr(op)}")
        if not one_of(self.scheme, SCHEMES):
            known = ", ".join(map(repr, SCHEMES))
            raise ArgumentError(f"scheme: expected one of {known}, got {short_repr(self.scheme)}")

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

    def facts(self) -> dict[str, object]:
        """Return by name what must be the same on every rank. Local."""
        return {
            "a": self.a, "b": self.b, "c": self.c, "d": self.d,
            "op_a": self.op_a, "op_b": self.op_b, "scheme": self.scheme,
        }  # fmt: skip

    @property
    def flops(self) -> int:
        """Floating-point operations of the product: 2 m n k, four times that for complex types."""
        return 2 * self.m * self.n * self.k * (4 if self.a.dtype.kind == "c" else 1)

    @property
    def T(self) -> Self:  # noqa: N802
        """The transposed product of the same memory: D^T = op(B)^T op(A)^T."""
        c = None if self.c is None else self.c.T
        return type(self)(self.b.T, self.a.T, self.d.T, self.op_b, self.op_a, c, self.scheme)

    def __str__(self) -> str:
        scheme = "" if self.scheme == "gemm" else f", scheme {self.scheme}"
        sizes = f"{self.m} x {self.n} x {self.k}"
        return f"{self.a.dtype.name} {self.op_a}{self.op_b} product of {sizes} on {self.d.grid}{scheme}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def column_major(self) -> ColumnMajorProduct:
        """Return the same product of the same memory as one product of F-ordered matrices. Local.

        A C-ordered matrix is its F-ordered transpose, so a C-ordered D means the transposed product
        (D^T = op(B)^T op(A)^T), and an operand whose order is not D's has its op flipped. Nothing moves.
        """
        swapped = self.d.order == "C"
        p: MatrixProduct = self.T if swapped else self
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
