# SPDX-License-Identifier: Apache-2.0
"""MatmulProblem: a matrix product on descriptors, ways to make one, its rules, and the nearest problem that obeys them.

Most algorithms take operands in any layout, except that C must have D's; cuBLASMp's products have more rules.
Source: cublasmp.h of 0.10.0; docs/layouts.md explains them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..dtypes import as_dtype, is_float8, plain, result_dtype
from ..errors import ArgumentError, ArgumentTypeError, LayoutError, short_repr
from .descriptor import MatrixDescriptor, MemoryOrder
from .grid import Grid, as_grid, integer, one_of
from .schemes import SCHEMES, Op, Scheme, scheme_faults, scheme_operands, scheme_ops
from .value import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import DTypeLike


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


def _column_major_operand(x: MatrixDescriptor, op: Op) -> tuple[MatrixDescriptor, Op, bool]:
    if op == "C" and x.dtype.kind != "c":
        op = "T"
    if x.order == "F":
        return x, op, False
    if op == "N":
        return x.T, "T", False
    return x.T, "N", op == "C"


@dataclass(frozen=True, slots=True, repr=False)
class MatmulProblem(Problem):
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
            object.__setattr__(self, name, plain(op))
        object.__setattr__(self, "scheme", plain(self.scheme))
        if not one_of(self.scheme, SCHEMES):
            known = ", ".join(map(repr, SCHEMES))
            raise ArgumentError(f"scheme: expected one of {known}, got {short_repr(self.scheme)}")

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
        orders = str(order) * (3 if len(str(order)) == 1 else 1)
        if len(orders) != 3 or set(orders) - {"C", "F"}:
            raise ArgumentError(
                f"order: expected 'C', 'F' or three of these letters, got {short_repr(order)}"
            )

        def operand(
            rows: int, cols: int, rb: int, cb: int, op: str, letter: str, kind: DTypeLike
        ) -> MatrixDescriptor:
            shape, blocks = ((rows, cols), (rb, cb)) if one_of(op, "N") else ((cols, rows), (cb, rb))
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

    def __repr__(self) -> str:
        return f"MatmulProblem({self})"

    def column_major(self) -> ColumnMajorProduct:
        """Return the same product of the same memory as one product of F-ordered matrices. Local.

        A C-ordered matrix is its F-ordered transpose, so a C-ordered D means the transposed product
        (D^T = op(B)^T op(A)^T), and an operand whose order is not D's has its op flipped. Nothing moves.
        """
        swapped = self.d.order == "C"
        p = self.T if swapped else self
        a, op_a, conj_a = _column_major_operand(p.a, p.op_a)
        b, op_b, conj_b = _column_major_operand(p.b, p.op_b)
        copy_c = p.c is not None and p.c.order != p.d.order
        c = None if p.c is None else replace(p.d, dtype=p.c.dtype) if copy_c else p.c
        return ColumnMajorProduct(a, b, p.d, c, op_a, op_b, swapped, conj_a, conj_b, copy_c)

    def _keys(self) -> dict[str, Any]:
        scheme = {} if self.scheme == "gemm" else {"scheme": self.scheme}
        return {**scheme, "ops": self.op_a + self.op_b}

    def faults(self, result: str = "d") -> list[str]:
        """Return every reason why the problem is not legal, each with a remedy; empty if it is legal. Local.

        Args:
            result: the name of D in messages: the caller's argument that gives its layout.
        """
        found = list(_sizes(self, result))
        if self.scheme == "gemm":
            found += [*_grids(self, result), *_blocks(self, result)]
        elif not found:  # a scheme's layouts follow from the sizes
            found += _scheme(self, result)
        return [*found, *_types(self, result), *_alignment(self, result), *_c_like_d(self, result)]


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


_FLOAT8_MULTIPLE = 16


def _axis(op: str, axis: int) -> int:
    """Return which dimension of the stored matrix is dimension ``axis`` of op(matrix)."""
    return axis if op == "N" else 1 - axis


def _sizes(p: MatmulProblem, d: str) -> Iterator[str]:
    k_of_b = p.b.shape[_axis(p.op_b, 0)]
    if p.k != k_of_b:
        yield (
            f"sizes: op(A) is {p.m}x{p.k} and op(B) is {k_of_b}x{p.n}: the columns of op(A) must be the rows "
            f"of op(B); a is {shape_text(p.a)} with op {p.op_a}, b is {shape_text(p.b)} with op {p.op_b}"
        )
    expected = (p.m, p.n)
    if p.scheme == "matmul_allreduce":
        ranks = p.d.grid.size
        expected = (p.m, p.n * ranks) if p.d.order == "F" else (p.m * ranks, p.n)
    if p.d.shape != expected:
        size = f"{expected[0]}x{expected[1]}"
        yield f"{d}: shape is {shape_text(p.d)}, expected {size} = rows of op(A) x columns of op(B)"


def shape_text(x: MatrixDescriptor) -> str:
    """Return the rows and columns of a matrix as errors say them. Local."""
    return f"{x.shape[0]}x{x.shape[1]}"


def _types(p: MatmulProblem, d: str) -> Iterator[str]:
    if is_float8(p.a.dtype) or is_float8(p.b.dtype):
        yield from _float8(p, d)
        return
    if p.a.dtype != p.b.dtype:
        yield f"b: dtype is {p.b.dtype.name}, expected {p.a.dtype.name} like a"
    legal = [p.a.dtype.name] + (["float32"] if p.a.dtype.itemsize == 2 else [])
    if p.d.dtype.name not in legal:
        yield f"{d}: dtype is {p.d.dtype.name}, expected {' or '.join(legal)} for operands of {p.a.dtype.name}"


def _float8(p: MatmulProblem, d: str) -> Iterator[str]:
    """Yield the faults under the rules for 8-bit floats. Source: cuBLASLt's documentation; cublasmp.h of 0.10.0."""
    names = (p.a.dtype.name, p.b.dtype.name)
    for name, x in (("a", p.a), ("b", p.b)):
        if not is_float8(x.dtype):
            yield f"{name}: dtype is {x.dtype.name}, expected an 8-bit float like the other operand"
    if names == ("float8_e5m2", "float8_e5m2"):
        yield "b: dtype is float8_e5m2 like a, expected float8_e4m3fn for one of them"
    legal = ["bfloat16", "float16", "float32", "float8_e4m3fn"] + ["float8_e5m2"] * ("float8_e5m2" in names)
    if p.d.dtype.name not in legal:
        yield f"{d}: dtype is {p.d.dtype.name}, expected {', '.join(legal)} for operands of {' and '.join(names)}"
    form = p.column_major()
    if (form.op_a, form.op_b) != ("T", "N"):
        yield (
            f"ops: 8-bit operands have k contiguous in memory (TN in column-major terms), got {form.op_a}{form.op_b}: "
            "in C order op_a='N' and op_b='T'"
        )
    for name, x in _operands(p, d):
        for axis, what in ((x.rows, "rows"), (x.cols, "columns")):
            if axis.extent % _FLOAT8_MULTIPLE or (
                axis.block % _FLOAT8_MULTIPLE and axis.nprocs > 1 and axis.block < axis.extent
            ):
                yield (
                    f"{name}: has {axis.extent} {what} in blocks of {axis.block}, expected multiples of "
                    f"{_FLOAT8_MULTIPLE} for 8-bit operands"
                )


def _alignment(p: MatmulProblem, d: str) -> Iterator[str]:
    for name, x in _operands(p, d):
        for axis, what in enumerate(("row", "column")):
            lead, block = x.lead[axis], x.block[axis]
            if lead:
                distance = f"{lead} {what}{'s' if lead > 1 else ''}"
                yield (
                    f"{name}: the sub-matrix starts {distance} into a block of {block}, expected at a block "
                    f"boundary: start {distance} earlier or {block - lead} later"
                )


def _operands(p: MatmulProblem, d: str) -> list[tuple[str, MatrixDescriptor]]:
    named = [("a", p.a), ("b", p.b), (d, p.d)]
    return named if p.c is None else [*named, ("c", p.c)]


def _grids(p: MatmulProblem, d: str) -> Iterator[str]:
    legal = (p.d.grid, p.d.grid.T)
    for name, x in _operands(p, d)[:2]:
        if not any(x.grid.same_ranks(grid) for grid in legal):
            yield f"{name}: grid is {x.grid}, expected that of {d} ({p.d.grid}) or its transpose ({p.d.grid.T})"


def _blocks(p: MatmulProblem, d: str) -> Iterator[str]:
    a_rows, a_cols = (p.a.block[_axis(p.op_a, axis)] for axis in (0, 1))
    b_rows, b_cols = (p.b.block[_axis(p.op_b, axis)] for axis in (0, 1))
    for name, what, got, like, expected in (
        ("a", "rows of op(A)", a_rows, f"the rows of {d}", p.d.block[0]),
        ("b", "rows of op(B)", b_rows, "the columns of op(A)", a_cols),
        ("b", "columns of op(B)", b_cols, f"the columns of {d}", p.d.block[1]),
    ):
        if got != expected:
            yield (
                f"{name}: the {what} are in blocks of {got}, expected {expected} like {like} "
                f"(legal: {_legal_block(p, name)})"
            )


def _legal_block(p: MatmulProblem, name: str) -> str:
    """Name the block of ``a`` or ``b`` that would obey every rule."""
    k_block = p.a.block[_axis(p.op_a, 1)]
    block = (p.d.block[0], k_block) if name == "a" else (k_block, p.d.block[1])
    op = p.op_a if name == "a" else p.op_b
    return f"{name} in blocks of {block if op == 'N' else block[::-1]}"


def _c_like_d(p: MatmulProblem, d: str) -> Iterator[str]:
    if p.c is None:
        return
    if is_float8(p.d.dtype):
        if p.c.dtype.name not in ("bfloat16", "float16"):
            yield f"c: dtype is {p.c.dtype.name}, expected bfloat16 or float16 for a D of 8 bits"
        if p.c.order != p.d.order:
            yield f"c: is in {p.c.order} order, expected {p.d.order} order like a D of 8 bits"
    elif p.c.dtype != p.d.dtype:
        yield f"c: dtype is {p.c.dtype.name}, expected {p.d.dtype.name} like {d}"
    yield from _differences("c", p.c, p.d, f"like {d}")


def _differences(name: str, got: MatrixDescriptor, expected: MatrixDescriptor, why: str) -> Iterator[str]:
    for field in ("shape", "block", "source"):
        have, want = getattr(got, field), getattr(expected, field)
        if have != want:
            yield f"{name}: {field} is {have}, expected {want} {why}"
    if not got.grid.same_ranks(expected.grid):
        yield f"{name}: grid is {got.grid}, expected {expected.grid} {why}"


def _scheme(p: MatmulProblem, result: str) -> Iterator[str]:
    form = p.column_major()
    m, n, ranks = p.m, p.n, p.d.grid.size
    if form.swapped:
        m, n = n, m
    found = scheme_faults(p.scheme, m, n, p.k, ranks, form.op_a, form.op_b, "nmk" if form.swapped else "mnk")
    if found:
        yield from found
        return
    a, b, d = scheme_operands(p.scheme, m, n, p.k, ranks, form.op_a, form.op_b, p.a.dtype)
    if form.swapped:
        a, b = b, a
    why = f"for {SCHEMES[p.scheme]} on {'one rank' if ranks == 1 else f'{ranks} ranks'}"
    for name, got, legal in (("a", p.a, a), ("b", p.b, b), (result, p.d, d)):
        yield from _differences(name, got, legal if got.order == "F" else legal.T, why)


def nearest_legal(p: MatmulProblem) -> MatmulProblem:
    """Return ``p`` with the operands that break one of cuBLASMp's rules in new layouts. Local.

    These begin on process (0, 0) of D's grid. D keeps its blocks, and k those of A. Faults that no move can remedy
    (sizes, types) remain.
    """
    d = _aligned(p.d)
    a, b = _aligned(p.a), _aligned(p.b)
    k_block = a.block[1 if p.op_a == "N" else 0]
    a = _fit(a, (d.block[0], k_block), p.op_a, d)
    b = _fit(b, (k_block, d.block[1]), p.op_b, d)
    c = p.c
    alike = c is not None and c.grid.same_ranks(d.grid) and c.rows == d.rows and c.cols == d.cols
    if c is not None and not alike and c.shape == d.shape:
        c = replace(d, dtype=c.dtype, order=c.order, ld=None)
    return replace(p, a=a, b=b, d=d, c=c)


def _aligned(x: MatrixDescriptor) -> MatrixDescriptor:
    return x if x.lead == (0, 0) else replace(x, lead=(0, 0), source=(0, 0), ld=None)


def _fit(x: MatrixDescriptor, block: tuple[int, int], op: str, d: MatrixDescriptor) -> MatrixDescriptor:
    if op != "N":
        block = block[::-1]
    if x.block == block and any(x.grid.same_ranks(grid) for grid in (d.grid, d.grid.T)):
        return x
    return replace(x, block=block, grid=d.grid, source=(0, 0), ld=None)
