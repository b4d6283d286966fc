# SPDX-License-Identifier: Apache-2.0
"""Element-wise sums, differences, products and quotients of matrices and scalars; copies and conversions.

The result is laid out like the left operand, or like the only matrix. A right operand in another layout is
redistributed to it first; if both have the same layout, only the agreement is communicated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import DTYPES, FLOAT8, as_dtype, is_foreign, scalar
from .engines.arrays import same_memory
from .errors import ArgumentError
from .handle import Handle, Matrix

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = ["assign", "binary", "cast", "copy", "fill", "is_scalar", "negative", "promote"]

ASSIGN = "matrix[...] ="
_FUNCTIONS = {"+": "add", "-": "subtract", "*": "multiply", "/": "true_divide"}


def is_scalar(value: object) -> bool:
    """Return whether ``value`` is a number of a Python or NumPy type, or an array of no dimensions. Local."""
    if isinstance(value, (np.generic, np.ndarray)):
        known = value.dtype.kind in "biufc" or value.dtype in (DTYPES | FLOAT8).values()
        return known and value.ndim == 0 and not isinstance(value, np.ma.MaskedArray)
    return isinstance(value, (int, float, complex))


def promote(a: np.dtype, b: np.dtype) -> np.dtype:
    """Return the type that holds both, as NumPy says; float32 for two types of 16 or 8 bits that differ. Local.

    Raises:
        ArgumentError: that is not an element type of pblasmp.
    """
    try:
        found = np.result_type(a, b)
    except TypeError:  # NumPy knows no common type of float16 and bfloat16
        narrow = (DTYPES | FLOAT8).values()
        found = np.result_type(*("float32" if x in narrow and x.itemsize <= 2 else x for x in (a, b)))
    return as_dtype(found)


def _result_dtype(dtype: np.dtype, other: Any) -> np.dtype:
    """Return the type of a result: Python numbers take on the matrix's precision, NumPy numbers keep their own."""
    if isinstance(other, (np.generic, np.ndarray)):
        return promote(dtype, other.dtype)
    if isinstance(other, complex):
        return promote(dtype, DTYPES["complex64"])
    return dtype


def _computable(matrix: Handle, dtype: np.dtype) -> bool:
    """Return whether the engine's array module computes with both types: CuPy has no bfloat16 and 8-bit floats."""
    return matrix.context.engine.xp is np or not (is_foreign(matrix.dtype) or is_foreign(dtype))


def binary(symbol: str, left: Any, right: Any, *, in_place: bool = False) -> Any:
    """Return ``left symbol right``, of which at least one is a matrix and the other may be a scalar.

    Collective over the context.

    Args:
        symbol: "+", "-", "*" or "/".
        left, right: the operands.
        in_place: write the result into ``left``, a matrix.

    Raises:
        ArgumentError: the shapes or contexts differ, a complex result does not fit, or ``left`` is read-only.
    """
    matrix: Handle = left if isinstance(left, Handle) else right
    other = right if matrix is left else left
    ctx, d = matrix.context, matrix.descriptor
    both = isinstance(other, Handle)
    call = f"matrix {symbol}{'=' if in_place else ''}"
    with ctx.agreement(call) as facts:
        facts.update(left=_fact(left), right=_fact(right))
        dtype = _result_dtype(d.dtype, other) if not both else promote(d.dtype, other.dtype)
        if both:
            _check_pair(call, matrix, other)
        else:
            scalar(other, DTYPES["complex128"], "scalar")
        if in_place:
            _check_writable(call, matrix, dtype)
        moves = both and not d.same_places(other.descriptor)
        if not (moves or in_place):  # nothing that the caller has is written before the ranks have agreed
            return _compute(symbol, left, right, matrix, dtype, in_place)
    with ctx.running(call):
        if moves:
            with ctx.agreement(f"{call}: moving"):
                right = ctx.allocate(replace(d, dtype=other.dtype))
            other.move_to(right)
        with ctx.agreement(f"{call}: computing"):
            return _compute(symbol, left, right, matrix, dtype, in_place)


def _fact(operand: Any) -> str:
    return repr(getattr(operand, "descriptor", operand))


def _check_pair(call: str, matrix: Handle, other: Handle) -> None:
    if other.context is not matrix.context:
        raise ArgumentError(f"{call}: the right matrix belongs to another context")
    if other.shape != matrix.shape:
        raise ArgumentError(f"{call}: the left matrix is {matrix.shape}, the right one {other.shape}")


def _check_writable(call: str, matrix: Handle, dtype: np.dtype) -> None:
    if dtype.kind == "c" and matrix.dtype.kind != "c":
        raise ArgumentError(
            f"{call}: the result is {dtype.name}, which does not fit into {matrix.dtype.name}"
        )
    if not getattr(matrix.local.flags, "writeable", True):
        raise ArgumentError(f"{call}: the left matrix's local array is read-only")


def _compute(symbol: str, left: Any, right: Any, matrix: Handle, dtype: np.dtype, in_place: bool) -> Any:
    """Compute on this rank's parts, which are in the same places. Local."""
    engine = matrix.context.engine
    out = matrix if in_place else matrix.context.allocate(replace(matrix.descriptor, dtype=dtype))
    known = all(_computable(x, dtype) for x in (left, right) if hasattr(x, "descriptor"))
    x, y = (_operand(each, dtype, known) for each in (left, right))
    if in_place and isinstance(right, type(out)) and engine.overlap(out.local, right.local):
        y = y if same_memory(out.local, right.local) else y.copy()  # NumPy does so itself, CuPy does not
    function = getattr(engine.xp if known else np, _FUNCTIONS[symbol])
    if not known:
        engine.from_host(out.local, function(x, y).astype(out.dtype, copy=False))
    elif out.dtype == dtype:
        function(x, y, out=out.local)
    else:
        out.local[...] = function(x, y)
    return out


def _operand(operand: Any, dtype: np.dtype, known: bool) -> Any:
    if not hasattr(operand, "descriptor"):
        return np.asarray(operand).astype(dtype)[()]
    values = operand.local if known else operand.on_host()
    return values.astype(dtype, copy=False)


def as_element(matrix: Handle, number: complex) -> Any:
    """Return a number in the form in which a matrix's local array stores it. Local."""
    element = np.array(number).astype(matrix.dtype)
    return element.view(matrix.context.engine.operations.stored(matrix.dtype)).item()


def negative(matrix: Matrix) -> Matrix:
    """Return ``-matrix``. Collective over the context."""
    ctx = matrix.context
    with ctx.agreement("-matrix") as facts:
        facts["matrix"] = matrix.descriptor
        out: Matrix = ctx.allocate(matrix.descriptor)
        if _computable(matrix, matrix.dtype):
            ctx.engine.xp.negative(matrix.local, out=out.local)
        else:
            ctx.engine.from_host(out.local, np.negative(matrix.on_host()))
        return out


def copy(matrix: Matrix) -> Matrix:
    """Return a new matrix of the same elements and layout. Collective over the context."""
    with matrix.context.agreement("copy") as facts:
        facts["matrix"] = matrix.descriptor
        return _copied(matrix)


def _copied(matrix: Matrix) -> Matrix:
    """Return a copy without agreement. Local."""
    out: Matrix = matrix.context.allocate(matrix.descriptor)
    out.local[...] = matrix.local
    return out


def assign(part: Handle, value: Handle) -> None:
    """Write a matrix of the same shape into ``part``, with which it may share memory. Collective over the context.

    Nothing is written if both are the same part of one matrix: Python ends ``A[i, j] += B`` with such a call.
    """
    ctx, call = part.context, ASSIGN
    same = value.place == part.place
    with ctx.running(call):
        with ctx.agreement(call) as facts:
            facts.update(matrix=part.descriptor, value=value.descriptor, same=same)
            _check_pair(call, part, value)
            if same:
                return
            _check_writable(call, part, value.dtype)
            if ctx.engine.overlap(part.local, value.local):  # maybe on this rank alone
                value = _copied(value)
        value.move_to(part)


def cast(matrix: Matrix, dtype: DTypeLike) -> Matrix:
    """Return a new matrix of another element type. Collective over the context; see ``DistributedMatrix.astype``."""
    ctx = matrix.context
    with ctx.agreement("astype") as facts:
        kind = as_dtype(dtype)
        facts.update(matrix=matrix.descriptor, dtype=kind)
        if matrix.dtype.kind == "c" and kind.kind != "c":
            raise ArgumentError(f"astype: {matrix.dtype.name} does not convert to {kind.name}")
        out: Matrix = ctx.allocate(replace(matrix.descriptor, dtype=kind))
        if _computable(matrix, kind):
            out.local[...] = matrix.local
        else:
            ctx.engine.from_host(out.local, matrix.on_host().astype(kind))
        return out


def fill(matrix: Handle, value: Any) -> None:
    """Write a number into every element. Collective over the context."""
    with matrix.context.agreement(ASSIGN) as facts:
        number = scalar(value, matrix.dtype, "value")
        facts.update(matrix=matrix.descriptor, value=number)
        _check_writable(ASSIGN, matrix, matrix.dtype)
        element = as_element(matrix, number)
    with matrix.context.running(ASSIGN):
        matrix.local[...] = element
