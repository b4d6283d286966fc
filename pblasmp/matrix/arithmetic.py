# SPDX-License-Identifier: Apache-2.0
"""Element by element: operators, functions of one matrix, triangles, copies and conversions.

The result is laid out like the left operand, or like the only matrix. A right operand in another layout is
redistributed to it first; if both have the same layout, only the agreement is communicated. One row or one column goes
to all ranks, as a vector.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DTYPES, FLOAT8, as_dtype, is_foreign, real_dtype, scalar
from ..engines.arrays import same_memory
from ..errors import ArgumentError, ArgumentTypeError, short_repr
from ..layout import MatrixDescriptor
from ..layout.grid import integer
from ..runtime.handle import Handle, Matrix, no_matrix
from ..runtime.reading import check_operands, context_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_MULTIPLIED = 100  # exponents of complex numbers below which NumPy multiplies

FUNCTIONS = {"+": "add", "-": "subtract", "*": "multiply", "/": "true_divide", "**": "power"}
"""Of the array modules, by operator."""

_REFLECTED = {"+": "__radd__", "-": "__rsub__", "*": "__rmul__", "/": "__rtruediv__", "**": "__rpow__"}


def is_scalar(value: object) -> bool:
    """Return whether ``value`` is a number of a Python or NumPy type, or an array of no dimensions. Local."""
    if isinstance(value, (np.generic, np.ndarray)):
        known = value.dtype.kind in "biufc" or value.dtype in (DTYPES | FLOAT8).values()
        return known and value.ndim == 0 and not isinstance(value, np.ma.MaskedArray)
    return isinstance(value, (int, float, complex))


def promote(a: np.dtype, b: np.dtype) -> np.dtype:
    """Return the type that holds both, as NumPy says; float32 for two types of 16 or 8 bits that differ. Local.

    ArgumentError if that is not an element type of pblasmp.
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


def reflected(operator: str, left: Any, right: Any) -> Any:
    """Return what the right operand's own operator makes of a matrix; NotImplemented if it knows no matrices.

    Numbers, arrays and sequences do not: every rank refuses what is neither a matrix nor a number. Python would raise a
    TypeError on the ranks with such an operand only, while the others wait.
    """
    try:
        unknowing = is_scalar(right) or hasattr(right, "ndim") or isinstance(right, Sequence)
    except Exception:  # noqa: BLE001 - of the user's own type, whose fault is found where all ranks hear it
        unknowing = True
    if unknowing:
        return NotImplemented
    method = getattr(type(right), operator, None)
    return NotImplemented if method is None else method(right, left)


def binary(
    symbol: str, matrix: Matrix, other: Any, *, turned: bool = False, in_place: bool = False
) -> Matrix:
    """Return ``matrix symbol other``; with ``turned`` the matrix is the right operand. Collective over the context.

    The other is a matrix, also one row or one column, a number, or a vector that every rank has, as a NumPy array. A
    row and a column make a matrix, as in NumPy. ``in_place`` writes the result into ``matrix``.
    """
    left, right = (other, matrix) if turned else (matrix, other)
    found: Matrix = reflected(_REFLECTED[symbol], left, right)
    if found is not NotImplemented:
        return found
    both = isinstance(other, Handle)
    call = f"matrix {symbol}{'=' if in_place else ''}"
    if both and not in_place:
        matrix, other, turned = _arranged(call, matrix, other, turned)
        left, right = (other, matrix) if turned else (matrix, other)
    d, along = matrix.descriptor, both and _is_along(other, matrix)
    ctx = context_of(call, matrix, other)
    with ctx.agreement(call) as facts:
        is_vector = isinstance(other, np.ndarray) and (
            other.ndim == 1 or (other.ndim == 2 and 1 in other.shape)
        )
        if not (both or is_vector or is_scalar(other)):
            raise ArgumentTypeError(
                f"{call}: {no_matrix(other, 'a DistributedMatrix, a number or a vector')}"
            )
        number = "a vector" if is_vector else other
        facts.update(
            {side: getattr(x, "descriptor", number) for side, x in (("left", left), ("right", right))}
        )
        if is_vector:
            other = as_numbers(other, call)
            facts["the vector's shape, type and digest"] = digest(other)
        dtype = _result_dtype(d.dtype, other) if not both else promote(d.dtype, other.dtype)
        if both:
            check_operands(ctx, "", {"left": matrix})
            if not along:
                check_pair(call, left, right)
        elif is_vector:
            here = _part_of_vector(call, other, matrix)
            left, right = (here, matrix) if turned else (matrix, here)
        else:
            scalar(other, DTYPES["complex128"], "scalar")
        if in_place:
            check_writable(call, matrix, dtype)
        moves = both and (along or not d.same_places(other.descriptor))
        if not (moves or in_place):  # nothing that the caller has is written before the ranks have agreed
            return _compute(symbol, left, right, matrix, dtype, in_place)
    with ctx.running(call):
        if along:
            here = _part_of_vector(call, other.allgather(), matrix)
            left, right = (here, matrix) if turned else (matrix, here)
        elif moves:
            with ctx.agreement(f"{call}: moving"):
                right = ctx.allocate(replace(d, dtype=other.dtype))
            other.move_to(right)
        with ctx.agreement(f"{call}: computing"):
            return _compute(symbol, left, right, matrix, dtype, in_place)


def _is_along(other: Handle, matrix: Handle) -> bool:
    """Return whether a matrix is one row, or one column, that goes along a larger one of its context. Local."""
    (m, n), its = matrix.shape, other.shape
    return other.context is matrix.context and its != (m, n) and its in ((1, n), (m, 1), (1, 1))


def _arranged(call: str, matrix: Matrix, other: Matrix, turned: bool) -> tuple[Matrix, Matrix, bool]:
    """Return two matrices, the first of which has the result's shape, and whether it is on the right.

    Local, but collective over the context for a row and a column: the first is spread over a matrix.
    """
    if _is_along(matrix, other):
        return other, matrix, not turned
    (m, n), (rows, cols) = matrix.shape, other.shape
    if other.context is matrix.context and (m == 1, n == 1, rows == 1, cols == 1) in _ACROSS:
        return _spread(call, matrix, other), other, turned
    return matrix, other, turned


_ACROSS = ((True, False, False, True), (False, True, True, False))  # a row and a column, a column and a row


def _spread(call: str, matrix: Any, other: Handle) -> Any:
    """Return a matrix whose rows, or columns, are all equal to one, as many as another one has. Collective."""
    ctx, d, its = matrix.context, matrix.descriptor, other.descriptor
    with ctx.agreement(call) as facts:
        facts.update({"one": d, "the other": its})
        rows, cols = (d, its) if d.shape[1] == 1 else (its, d)
        shape, block = (rows.shape[0], cols.shape[1]), (rows.block[0], cols.block[1])
        out = ctx.allocate(MatrixDescriptor(shape, block, d.grid, dtype=d.dtype, order=d.order))
    line = matrix.allgather()
    with ctx.agreement(f"{call}: spreading"):
        here = np.broadcast_to(_part_of_vector(call, line, out), out.local.shape)
        ctx.engine.from_host(out.local, np.ascontiguousarray(here))
    return out


def _part_of_vector(call: str, vector: NDArray[Any], matrix: Handle) -> NDArray[Any]:
    """Return what of a vector goes along this rank's part of a matrix, as one row or one column. Local."""
    d, ctx, (m, n) = matrix.descriptor, matrix.context, matrix.shape
    whole = vector if vector.ndim == 2 else vector[None, :]
    if whole.shape[0] not in (1, m) or whole.shape[1] not in (1, n):
        raise ArgumentError(
            f"{call}: the matrix is {m} x {n}, the vector has shape {vector.shape}: expected ({n},) for a number for "
            f"each column, or ({m}, 1), as vector[:, None] is, for one for each row"
        )
    if ctx.coords(d) is None:
        return whole[:0, :0]
    for axis, indices in enumerate(d.global_indices(ctx.rank)):
        if whole.shape[axis] == d.shape[axis]:
            whole = whole.take(indices, axis)
    return whole


def digest(array: NDArray[Any]) -> tuple[Any, ...]:
    """Return what is equal for equal arrays. Local."""
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.shape, array.dtype.str, blake2b(values.data, digest_size=16).hexdigest()


def as_numbers(values: Any, name: str, xp: Any = np) -> NDArray[Any]:
    """Return ``values`` as an array of NumPy, or of ``xp``, or raise ArgumentError if they are not numbers, or masked.

    Local.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise ArgumentError(
            f"{name}: a masked array, whose mask would be lost: fill it first, as with .filled(0)"
        )
    try:
        array: NDArray[Any] = xp.asarray(values)
    except ValueError as error:  # rows of several lengths
        raise ArgumentError(f"{name}: {error}") from None
    if array.dtype.kind not in "biufc" and array.dtype not in (DTYPES | FLOAT8).values():
        raise ArgumentTypeError(f"{name}: expected numbers, got {array.dtype}")
    return array


def check_pair(call: str, matrix: Handle, other: Handle) -> None:
    """Raise ArgumentError unless both matrices are of one context and one shape. Local."""
    if other.context is not matrix.context:
        raise ArgumentError(f"{call}: the right matrix belongs to another context")
    if other.shape != matrix.shape:
        hint = ": a row has as many columns, a column as many rows" if 1 in other.shape else ""
        hint = ": transpose it, other.T" if other.shape == matrix.shape[::-1] else hint
        raise ArgumentError(f"{call}: the left matrix is {matrix.shape}, the right one {other.shape}{hint}")


def check_writable(call: str, matrix: Handle, dtype: np.dtype) -> None:
    """Raise ArgumentError unless elements of ``dtype`` can be written into a matrix. Local."""
    if dtype.kind == "c" and matrix.dtype.kind != "c":
        raise ArgumentError(
            f"{call}: the result is {dtype.name}, which does not fit into {matrix.dtype.name}"
        )
    if not getattr(matrix.local.flags, "writeable", True):
        raise ArgumentError(f"{call}: the left matrix's local array is read-only")


def _compute(symbol: str, left: Any, right: Any, matrix: Matrix, dtype: np.dtype, in_place: bool) -> Matrix:
    """Compute on this rank's parts, which are in the same places. Local."""
    engine = matrix.context.engine
    out = matrix if in_place else matrix.context.allocate(replace(matrix.descriptor, dtype=dtype))
    known = engine.traits.computes(dtype, *(x.dtype for x in (left, right) if hasattr(x, "descriptor")))
    xp = engine.xp if known else np
    x, y = (_operand(each, dtype, xp, known) for each in (left, right))
    if in_place and isinstance(right, type(out)) and engine.overlap(out.local, right.local):
        y = y if same_memory(out.local, right.local) else y.copy()  # NumPy does so itself, CuPy does not
    function = getattr(xp, FUNCTIONS[symbol])
    if symbol == "**" and dtype.kind == "c" and y.ndim == 0 and _is_whole(y):
        function = partial(_whole_power, xp)
    if not known:
        engine.from_host(out.local, function(x, y).astype(out.dtype, copy=False))
    elif out.dtype == dtype:
        function(x, y, out=out.local)
    else:
        out.local[...] = function(x, y)
    return out


def _is_whole(exponent: Any) -> bool:
    """Return whether NumPy multiplies for this exponent of complex numbers. Local."""
    return bool(exponent.imag == 0 and abs(exponent.real) < _MULTIPLIED and exponent.real % 1 == 0)


def _whole_power(xp: Any, x: Any, exponent: Any, out: Any = None) -> Any:
    """Return a power of complex numbers by products, as NumPy does: CuPy takes logarithms, which round. Local."""
    n = int(exponent.real)
    found, square = xp.ones_like(x), x
    for bit in reversed(f"{abs(n):b}"):
        if bit == "1":
            found = found * square
        square = square * square
    found = 1 / found if n < 0 else found
    if out is None:
        return found
    out[...] = found
    return out


def _operand(operand: Any, dtype: np.dtype, xp: Any, known: bool) -> Any:
    if not hasattr(operand, "descriptor"):
        has_no_type = isinstance(operand, int) and not -(2**63) <= operand < 2**64
        values = np.asarray(float(operand) if has_no_type else operand).astype(dtype)
        return xp.asarray(values) if values.ndim else values[()]
    values = operand.local if known else operand.on_host()
    return values.astype(dtype, copy=False)


def as_element(matrix: Handle, number: complex) -> Any:
    """Return a number in the form in which a matrix's local array stores it. Local."""
    element = np.array(number).astype(matrix.dtype)
    return element.view(matrix.context.engine.operations.stored(matrix.dtype)).item()


def negative(matrix: Matrix) -> Matrix:
    """Return ``-matrix``. Collective over the context."""
    return _unary(matrix, "-matrix", "negative", matrix.dtype)


def absolute(matrix: Matrix) -> Matrix:
    """Return the absolute values, which are real. Collective over the context."""
    return _unary(matrix, "abs", "absolute", real_dtype(matrix.dtype))


def conjugate(matrix: Matrix) -> Matrix:
    """Return the complex conjugate; of a real matrix, a copy. Collective over the context."""
    if matrix.dtype.kind != "c":
        return copy(matrix, "conj")
    return _unary(matrix, "conj", "conjugate", matrix.dtype)


def _unary(matrix: Matrix, call: str, name: str, dtype: np.dtype) -> Matrix:
    """Return a function of each element: the array module's of this name. Collective over the context."""
    ctx = matrix.context
    with ctx.agreement(call) as facts:
        facts["matrix"] = matrix.descriptor
        out: Matrix = ctx.allocate(replace(matrix.descriptor, dtype=dtype))
        if ctx.engine.traits.computes(matrix.dtype, dtype):
            getattr(ctx.engine.xp, name)(matrix.local, out=out.local)
        else:
            ctx.engine.from_host(out.local, getattr(np, name)(matrix.on_host()))
        return out


def real(matrix: Matrix) -> Matrix:
    """Return the real part: of a real matrix a view, else a new matrix. Local."""
    if matrix.dtype.kind != "c":
        return matrix.part(...)
    return _part_of_numbers(matrix, matrix.local.real)


def imaginary(matrix: Matrix) -> Matrix:
    """Return the imaginary part as a new matrix. Local."""
    return _part_of_numbers(matrix, matrix.local.imag if matrix.dtype.kind == "c" else 0)


def _part_of_numbers(matrix: Matrix, values: Any) -> Matrix:
    descriptor = replace(matrix.descriptor, dtype=real_dtype(matrix.dtype), ld=None)
    with matrix.context.engine.on_device():
        out: Matrix = matrix.context.allocate(descriptor)
        out.local[...] = values
    return out


def triangle(matrix: Matrix, uplo: str, k: int) -> Matrix:
    """Return a copy with zeros above ("L") or below ("U") the diagonal ``k``. Collective over the context."""
    ctx, d = matrix.context, matrix.descriptor
    call = "tril" if uplo == "L" else "triu"
    with ctx.agreement(call) as facts:
        k = min(d.shape[1], max(-d.shape[0], integer(k, "k", -(10**100), ArgumentError)))
        facts.update(matrix=d, k=k)
        out = copied(matrix)
        if ctx.coords(d) is not None:
            xp = ctx.engine.xp
            i, j = (xp.asarray(each) for each in d.global_indices(ctx.rank))
            away = j[None, :] - i[:, None]  # from the main diagonal, to the right
            ctx.engine.operations.copy_where(out.local, 0, (away > k) if uplo == "L" else (away < k))
        return out


def mapped(matrix: Matrix, function: Callable[[Any], Any], dtype: DTypeLike | None) -> Matrix:
    """Return a function of each element. Collective over the context; see ``DistributedMatrix.map``."""
    ctx, d = matrix.context, matrix.descriptor
    engine = ctx.engine
    with ctx.agreement("map") as facts:
        wanted = None if dtype is None else as_dtype(dtype)
        facts.update(matrix=d, dtype=wanted)
        if not callable(function):
            raise ArgumentTypeError(f"function: expected a function of an array, got {short_repr(function)}")
        values = matrix.local if ctx.engine.traits.computes(d.dtype) else matrix.on_host()
        if isinstance(values, np.ndarray):
            values = values.view()
            values.flags.writeable = False  # the function returns new values
        found = on_arrays("map", function, values)
        if getattr(found, "shape", None) != values.shape or not hasattr(found, "dtype"):
            raise ArgumentError(
                f"map: the function returned {_described(found)}, expected an array of shape {values.shape}"
            )
        kind = _mapped_dtype(found, wanted)
    with ctx.agreement("map: result") as facts:
        facts["dtype of the function's result"] = kind
        out: Matrix = ctx.allocate(replace(d, dtype=kind))
        if isinstance(found, np.ndarray) or is_foreign(kind):
            values = found if isinstance(found, np.ndarray) else engine.to_host(found)
            engine.from_host(out.local, values.astype(kind, copy=False))
        else:
            out.local[...] = found
        return out


_MEANT_FOR_NUMBERS = re.compile(r"truth value of an|arrays can be converted|(numpy|cupy)\S*\.ndarray")
"""What NumPy and CuPy say where a number was expected, and Python of an array's type."""


def on_arrays(call: str, function: Callable[..., Any], *arrays: Any) -> Any:
    """Return ``function(*arrays)``, or raise ArgumentError if it takes numbers, but no arrays. Local.

    It is called once: it may do more than return something.
    """
    try:
        return function(*arrays)
    except (TypeError, ValueError) as error:
        if not _MEANT_FOR_NUMBERS.search(str(error)):
            raise
        raise ArgumentError(
            f"{call}: the function takes single numbers, expected one of arrays: use numpy.where instead of if, or "
            f"wrap it: numpy.vectorize(function) ({error})"
        ) from error


def _described(found: Any) -> str:
    shape = getattr(found, "shape", None) if hasattr(found, "dtype") else None
    return repr(found) if shape is None else f"an array of shape {tuple(shape)}"


def _mapped_dtype(found: Any, wanted: np.dtype | None) -> np.dtype:
    """Return the element type of the result of a map: that of the values, or the one asked for. Local."""
    kind: np.dtype = np.dtype(found.dtype)
    if wanted is None:
        if kind not in (DTYPES | FLOAT8).values():
            raise ArgumentError(
                f"map: the function returned {kind}, which is not an element type of matrices: give dtype=, such as "
                "dtype='float64'"
            )
        return kind
    if kind.kind not in "biufc" and kind not in (DTYPES | FLOAT8).values():
        raise ArgumentTypeError(f"map: expected numbers, got {kind}")
    if kind.kind == "c" and wanted.kind != "c":
        raise ArgumentError(f"map: {kind} does not convert to {wanted.name}")
    return wanted


def copy(matrix: Matrix, call: str = "copy") -> Matrix:
    """Return a new matrix of the same elements and layout. Collective over the context."""
    with matrix.context.agreement(call) as facts:
        facts["matrix"] = matrix.descriptor
        return copied(matrix)


def copied(matrix: Matrix) -> Matrix:
    """Return a copy without agreement. Local."""
    out: Matrix = matrix.context.allocate(matrix.descriptor)
    out.local[...] = matrix.local
    return out


def cast(matrix: Matrix, dtype: DTypeLike) -> Matrix:
    """Return a new matrix of another element type. Collective over the context; see ``DistributedMatrix.astype``."""
    ctx = matrix.context
    with ctx.agreement("astype") as facts:
        kind = as_dtype(dtype)
        facts.update(matrix=matrix.descriptor, dtype=kind)
        if matrix.dtype.kind == "c" and kind.kind != "c":
            raise ArgumentError(f"astype: {matrix.dtype.name} does not convert to {kind.name}")
        out: Matrix = ctx.allocate(replace(matrix.descriptor, dtype=kind))
        if ctx.engine.traits.computes(matrix.dtype, kind):
            out.local[...] = matrix.local
        else:
            ctx.engine.from_host(out.local, matrix.on_host().astype(kind))
        return out
