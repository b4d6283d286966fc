# SPDX-License-Identifier: Apache-2.0
"""The rules a matrix product must obey, in one place: sizes, types, grids, blocks, alignment, schemes.

Source: cublasmp.h of 0.10.0; docs/layouts.md explains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dtypes import is_float8
from .descriptor import MatrixDescriptor
from .schemes import SCHEMES, scheme_faults, scheme_operands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .product import MatrixProduct

__all__ = ["faults", "shape_text"]

_FLOAT8_MULTIPLE = 16


def faults(p: MatrixProduct, result: str = "d") -> list[str]:
    """Return every fault of ``p``: operand, got, expected, the closest legal choice. Local.

    Args:
        p: the product.
        result: what messages call D.
    """
    found = list(_sizes(p, result))
    if p.scheme == "gemm":
        found += [*_grids(p, result), *_blocks(p, result)]
    elif not found:  # a scheme's layouts follow from the sizes
        found += _scheme(p, result)
    return [*found, *_types(p, result), *_alignment(p, result), *_c_like_d(p, result)]


def _axis(op: str, axis: int) -> int:
    """Return which dimension of the stored matrix is dimension ``axis`` of op(matrix)."""
    return axis if op == "N" else 1 - axis


def _sizes(p: MatrixProduct, d: str) -> Iterator[str]:
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


def _types(p: MatrixProduct, d: str) -> Iterator[str]:
    if is_float8(p.a.dtype) or is_float8(p.b.dtype):
        yield from _float8(p, d)
        return
    if p.a.dtype != p.b.dtype:
        yield f"b: dtype is {p.b.dtype.name}, expected {p.a.dtype.name} like a"
    legal = [p.a.dtype.name] + (["float32"] if p.a.dtype.itemsize == 2 else [])
    if p.d.dtype.name not in legal:
        yield f"{d}: dtype is {p.d.dtype.name}, expected {' or '.join(legal)} for operands of {p.a.dtype.name}"


def _float8(p: MatrixProduct, d: str) -> Iterator[str]:
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


def _alignment(p: MatrixProduct, d: str) -> Iterator[str]:
    for name, x in _operands(p, d):
        for axis, what in enumerate(("row", "column")):
            lead, block = x.lead[axis], x.block[axis]
            if lead:
                distance = f"{lead} {what}{'s' if lead > 1 else ''}"
                yield (
                    f"{name}: the sub-matrix starts {distance} into a block of {block}, expected at a block "
                    f"boundary: start {distance} earlier or {block - lead} later"
                )


def _operands(p: MatrixProduct, d: str) -> list[tuple[str, MatrixDescriptor]]:
    named = [("a", p.a), ("b", p.b), (d, p.d)]
    return named if p.c is None else [*named, ("c", p.c)]


def _grids(p: MatrixProduct, d: str) -> Iterator[str]:
    legal = (p.d.grid, p.d.grid.T)
    for name, x in _operands(p, d)[:2]:
        if not any(x.grid.same_ranks(grid) for grid in legal):
            yield f"{name}: grid is {x.grid}, expected that of {d} ({p.d.grid}) or its transpose ({p.d.grid.T})"


def _blocks(p: MatrixProduct, d: str) -> Iterator[str]:
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


def _legal_block(p: MatrixProduct, name: str) -> str:
    """Name the block of ``a`` or ``b`` that would obey every rule."""
    k_block = p.a.block[_axis(p.op_a, 1)]
    block = (p.d.block[0], k_block) if name == "a" else (k_block, p.d.block[1])
    op = p.op_a if name == "a" else p.op_b
    return f"{name} in blocks of {block if op == 'N' else block[::-1]}"


def _c_like_d(p: MatrixProduct, d: str) -> Iterator[str]:
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


def _scheme(p: MatrixProduct, result: str) -> Iterator[str]:
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
