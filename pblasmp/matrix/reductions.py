# SPDX-License-Identifier: Apache-2.0
"""Single elements, norms, sums, extremes, the diagonal, comparisons: numbers and vectors, the same on every rank.

Everything is summed in double precision, in an order that depends only on the layout: every rank gets the same bits in
every run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..comm import Cells, Exchange, Side, largest_size
from ..dtypes import as_dtype, double_dtype, is_foreign, real_dtype, scalar
from ..engines.arrays import as_numpy
from ..engines.local.sums import joined, root, squares_of_stored, stored
from ..errors import ArgumentError, ArgumentTypeError, short_repr
from ..layout import Grid
from ..layout.axis import Axis
from ..layout.descriptor import is_integer
from ..layout.grid import one_of
from ..runtime.handle import Handle
from ..runtime.reading import check_operands, context_of
from .arithmetic import check_pair, is_scalar
from .creation import diagonal_places

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

SLAB = 1 << 18  # elements that are converted at a time
_SLAB_OF_GPUS = 1 << 24


def _local(matrix: Handle, *, on_host: bool = False) -> tuple[Any, Any]:
    """Return the array module and the local array to compute with: on the host for types that CuPy lacks. Local."""
    engine = matrix.context.engine
    engine.synchronize()  # before values are read: that would wait forever if a rank is gone
    if on_host or not engine.traits.computes(matrix.dtype):
        return np, matrix.on_host()
    return engine.xp, matrix.local


class _Stored(NamedTuple):
    """What a triangle of a matrix describes; see ``engines.local.sums.stored``."""

    kind: str
    uplo: str
    diag: str

    @property
    def T(self) -> _Stored:  # noqa: N802
        """The same of the transpose."""
        return self._replace(uplo="L" if self.uplo == "U" else "U")


def _slabs(
    matrix: Handle, of: _Stored | None = None, *, on_host: bool = False
) -> Iterator[tuple[Any, slice, Any, Any]]:
    """Yield the array module, which columns, their elements in double precision, and which count twice; None: none.

    These are the local array, slab by slab, or what a triangle in it describes.
    """
    xp, local = _local(matrix, on_host=on_host)
    rows, cols = local.shape
    size = SLAB if isinstance(local, np.ndarray) else _SLAB_OF_GPUS
    wide, d = double_dtype(matrix.dtype), matrix.descriptor
    if not local.size:
        return
    indices = None if of is None else [xp.asarray(each) for each in d.global_indices(matrix.context.rank)]
    step = max(1, size // (cols if d.order == "C" else rows))
    for at in range(0, rows if d.order == "C" else cols, step):
        some, every = slice(at, at + step), slice(None)
        down, across = (some, every) if d.order == "C" else (every, some)
        values, twice = local[down, across].astype(wide, copy=False), None
        if of is not None and indices is not None:
            lines = indices[0][down], indices[1][across]
            if d.order == "C":
                values, twice = stored(xp, values, *lines, *of)
            else:  # its masks have the order of the values: on GPUs others take ten times as long
                found = stored(xp, values.T, *lines[::-1], *of.T)
                values, twice = (each if each is None else each.T for each in found)
        yield xp, across, values, twice


# -- norms


def norm(
    matrix: Handle, which: object, uplo: object = None, diag: object = "N", kind: object = "triangular"
) -> float:
    """Return a norm. Collective over the context; see ``DistributedMatrix.norm``."""
    ctx, named, what = matrix.context, kind_of_norm(which), {"matrix": matrix.descriptor, "ord": which}
    of = None
    if uplo is not None or not one_of(diag, ("N",)) or not one_of(kind, ("triangular",)):
        of = _Stored(*(each if isinstance(each, str) else "" for each in (kind, uplo, diag)))
        what |= {"uplo": uplo, "diag": diag, "kind": kind}

    def check() -> None:
        if named is None:
            raise ArgumentError(f"ord: expected 'fro', 1, 'inf' or 'max', got {short_repr(which)}")
        if of is not None:
            _check_stored(matrix.shape, uplo, diag, kind)

    if named not in ("fro", "max"):
        summed, of = (matrix, of) if named == "1" else (matrix.T, of and of.T)
        sums = _columns(summed, "norm", what, check, _SUMS_OF_ABSOLUTES, of)
        if of is not None and of.kind != "triangular":
            sums = sums + _columns(summed.T, "norm", what, check, _SUMS_OF_ABSOLUTES, of.T, mirrored=True)
        return float(sums.max(initial=0))
    with ctx.agreement("norm") as facts, np.errstate(all="ignore"):
        facts.update(what)
        check()
        if named == "max":
            largest = float(np.max([float(xp.abs(x).max()) for xp, _, x, _ in _slabs(matrix, of)], initial=0))
        else:  # scaled like LAPACK's lassq: no square overflows, and none that matters underflows
            mine = joined([squares_of_stored(xp, x, twice) for xp, _, x, twice in _slabs(matrix, of)])
    return largest_size(ctx.comm, largest)[0] if named == "max" else root(joined(ctx.comm.allgather(mine)))


def _check_stored(shape: tuple[int, int], uplo: object, diag: object, kind: object) -> None:
    """Raise ArgumentError unless a triangle can describe a matrix of this shape in this way. Local."""
    for name, value, legal in (
        ("uplo", uplo, ("L", "U")),
        ("diag", diag, ("N", "U")),
        ("kind", kind, ("triangular", "symmetric", "hermitian")),
    ):
        if not one_of(value, legal):
            raise ArgumentError(f"{name}: expected {' or '.join(map(repr, legal))}, got {short_repr(value)}")
    if kind != "triangular" and shape[0] != shape[1]:
        raise ArgumentError(f"kind: a {kind} matrix is square, got {shape[0]}x{shape[1]}")
    if kind != "triangular" and diag == "U":
        raise ArgumentError(f"diag: 'U' is for triangular matrices, got {kind!r}")


def kind_of_norm(which: object) -> str | None:
    """Return the norm meant, None if there is no such norm."""
    if isinstance(which, str):
        return which if which in ("fro", "1", "inf", "max") else None
    if isinstance(which, (int, float, np.number)) and not isinstance(which, bool):
        return "1" if which == 1 else "inf" if which == math.inf else None
    return None


# -- sums, means, extremes


class _ColumnReduction(NamedTuple):
    """How columns become numbers.

    Attributes:
        of: returns a number for each column of an array.
        join: joins the numbers of two parts of the columns.
        start: the number of a column without elements.
        real: the numbers are real even if the elements are complex.
    """

    of: Callable[[Any], Any]
    join: np.ufunc
    start: complex
    real: bool = False


_SUMS = _ColumnReduction(lambda values: values.sum(axis=0), np.add, 0)
_SUMS_OF_ABSOLUTES = _ColumnReduction(lambda values: abs(values).sum(axis=0), np.add, 0, real=True)
_EXTREMES = {
    "min": (_ColumnReduction(lambda values: values.min(axis=0), np.minimum, math.inf), 1),
    "max": (_ColumnReduction(lambda values: values.max(axis=0), np.maximum, -math.inf), -1),
}


def deviation(matrix: Any, axis: int | None) -> Any:
    """Return a standard deviation. Collective over the context; see ``DistributedMatrix.std``."""
    with np.errstate(all="ignore"):
        middle = total(matrix, "mean", axis, double_dtype(matrix.dtype))
        away = abs(matrix - (middle[:, None] if _of_rows(axis) else middle))
        found = np.sqrt(total(away * away, "mean", axis, None))
        return found.astype(real_dtype(matrix.dtype))[()]


def total(matrix: Handle, call: str, axis: int | None, dtype: DTypeLike | None) -> Any:
    """Return the "sum", or the "mean", of all elements or along an axis. Collective over the context."""

    def check() -> None:
        _check_axis(axis)
        kind = matrix.dtype if dtype is None else as_dtype(dtype)
        if matrix.dtype.kind == "c" and kind.kind != "c":
            raise ArgumentError(f"dtype: {matrix.dtype.name} does not convert to {kind.name}")

    facts = {"matrix": matrix.descriptor, "axis": axis, "dtype": dtype}
    turned = matrix.T if _of_rows(axis) else matrix
    sums = _columns(turned, call, facts, check, _SUMS)
    with np.errstate(all="ignore"):
        out = np.asarray(sums if axis is not None else sums.sum())
        if call == "mean":
            out = out / (turned.shape[0] if axis is not None else turned.shape[0] * turned.shape[1])
        return out.astype(matrix.dtype if dtype is None else as_dtype(dtype))[()]


def extreme(matrix: Handle, which: str, axis: int | None) -> Any:
    """Return the least or the largest element. Collective over the context; see ``DistributedMatrix.min``."""
    reduction, sign = _EXTREMES[which]
    if matrix.dtype.kind == "c":
        reduction = reduction._replace(start=complex(sign * math.inf, sign * math.inf))

    def check() -> None:
        _check_axis(axis)
        if 0 in (matrix.shape if axis is None else (matrix.shape[axis],)):
            raise ArgumentError(f"{which}: expected at least one element, the matrix is {matrix.shape}")

    facts = {"matrix": matrix.descriptor, "axis": axis}
    found = _columns(matrix.T if _of_rows(axis) else matrix, which, facts, check, reduction)
    out = np.asarray(found if axis is not None else reduction.join.reduce(found))
    return out.astype(matrix.dtype)[()]


def _of_rows(axis: Any) -> bool:
    """Return whether rows are summed, not columns. Local."""
    return is_integer(axis) and operator.index(axis) in (1, -1)


def _check_axis(axis: Any) -> None:
    legal = axis is None or (is_integer(axis) and operator.index(axis) in (0, 1, -1, -2))
    if not legal:
        raise ArgumentError(f"axis: expected None, 0 or 1, got {short_repr(axis)}")


def _columns(
    matrix: Handle,
    call: str,
    what: dict[str, Any],
    check: Callable[[], None],
    reduction: _ColumnReduction,
    of: _Stored | None = None,
    *,
    mirrored: bool = False,
) -> NDArray[Any]:
    """Return a number for each column, in double precision. Collective over the context.

    With ``of`` they are of what a triangle describes, or of what is ``mirrored`` to its other side.

    The processes of a column have numbers of their parts: each rank joins those of an equal share of the columns,
    always in the order of the process rows, and gets the others' shares.
    """
    ctx, d = matrix.context, matrix.descriptor
    wide = np.dtype(np.float64) if reduction.real else double_dtype(d.dtype)
    join = reduction.join
    with ctx.agreement(call) as facts, np.errstate(all="ignore"):
        facts.update(what)
        check()
        mine = np.full((1, matrix.local.shape[1]), reduction.start, wide)
        for xp, cols, values, twice in _slabs(matrix, of):
            found = reduction.of(xp.where(twice, values, 0) if mirrored else values)
            mine[0, cols] = join(mine[0, cols], as_numpy(xp, found))
    n, (nprow, _) = d.shape[1], d.grid.shape
    partial = Side(Axis(nprow, 1, 0, nprow), d.cols, Side.of(d).cells, "C")
    shares = Axis(n, max(1, -(-n // ctx.size)), 0, ctx.size)
    cells = Cells.of_grid(Grid(1, ctx.size))
    room = np.zeros((nprow, shares.count(ctx.rank)), wide)
    exchange = Exchange(ctx.comm, partial, Side(Axis.whole(nprow), shares, cells, "C"), wide)
    exchange.run(ctx.cells(d, mine), {ctx.rank: room})
    with np.errstate(all="ignore"):
        share = reduce(join, room)
    return np.concatenate(ctx.comm.allgather(share))


def trace(matrix: Handle) -> Any:
    """Return the sum of the diagonal. Collective over the context; see ``DistributedMatrix.trace``."""
    found = diagonal(matrix, "trace")
    with np.errstate(all="ignore"):
        return np.asarray(found.astype(double_dtype(matrix.dtype)).sum()).astype(matrix.dtype)[()]


def diagonal(matrix: Handle, call: str = "diagonal") -> NDArray[Any]:
    """Return the diagonal. Collective over the context; see ``DistributedMatrix.diagonal``."""
    ctx, d = matrix.context, matrix.descriptor
    with ctx.agreement(call) as facts:
        facts["matrix"] = d
        coords, mine = ctx.coords(d), None
        if coords is not None:
            i, j = diagonal_places(d, coords)
            xp, local = _local(matrix)
            values = local[xp.asarray(i), xp.asarray(j)]
            mine = d.rows.globals(coords[0])[i], as_numpy(xp, values)
    out = np.empty(min(d.shape), d.dtype)
    for each in ctx.comm.allgather(mine):
        if each is not None:
            out[each[0]] = each[1]
    return out


# -- elements and comparisons


def element(matrix: Handle, index: object) -> Any:
    """Return one element, as a NumPy scalar on every rank. Collective over the context."""
    ctx, d = matrix.context, matrix.descriptor
    with ctx.agreement("matrix[i, j]") as facts:
        (i, _), (j, _) = d.ranges(index)
        facts.update(matrix=d, index=(i, j))
        owner = d.owner(i, j)
        if ctx.rank == owner:
            ctx.engine.synchronize()
        mine = matrix.part((i, j)).on_host()[0, 0] if ctx.rank == owner else None
    return ctx.comm.bcast(mine, owner)


def allclose(
    a: Handle, b: Handle | complex, rtol: float = 1e-5, atol: float = 1e-8, *, equal_nan: bool = False
) -> bool:
    """Return whether two matrices are equal within a tolerance, on every rank. Collective over the context.

    As ``numpy.allclose``: for all elements, ``|a - b| <= atol + rtol |b|``, in double precision. Infinities are close
    if they are equal. Layouts and element types may differ.

    Args:
        a: a matrix.
        b: a matrix of the same shape, or a number.
        rtol: relative tolerance, at least 0; half and quarter precision need more than the default.
        atol: absolute tolerance, at least 0.
        equal_nan: NaN is close to NaN.

    Raises:
        ArgumentError: the shapes or contexts differ, or a tolerance is negative.
        TypeError: ``a`` is no matrix, or ``b`` is neither a matrix nor a number.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> pb.allclose(a, a + 1e-12), pb.allclose(a, a + 1)
        (True, False)

    See Also:
        verify, which checks results without a reference.
    """
    ctx = context_of("allclose", a, b)
    with ctx.running("allclose"):
        with ctx.agreement("allclose") as facts:
            check_operands(ctx, ("a",), {"a": a})
            d = a.descriptor
            facts.update(a=d, b=b.descriptor if isinstance(b, Handle) else b)
            facts.update(rtol=rtol, atol=atol, equal_nan=equal_nan)
            tolerances: dict[str, Any] = {}
            for name, tolerance in (("rtol", rtol), ("atol", atol)):
                tolerances[name] = scalar(tolerance, np.dtype(np.float64), name).real
                if not tolerances[name] >= 0:
                    raise ArgumentError(f"{name}: expected at least 0, got {short_repr(tolerance)}")
            if isinstance(b, Handle):
                check_pair("allclose", a, b)
            elif not is_scalar(b):
                raise ArgumentTypeError(
                    f"b: expected a DistributedMatrix or a number, got {type(b).__name__}"
                )
            else:
                scalar(b, np.dtype(np.complex128), "b")
            if not isinstance(equal_nan, (bool, np.bool_)):
                raise ArgumentTypeError(f"equal_nan: expected True or False, got {short_repr(equal_nan)}")
        other = b
        if isinstance(b, Handle) and not (d.same_places(b.descriptor) and d.order == b.descriptor.order):
            with ctx.agreement("allclose: moving"):
                other = ctx.allocate(replace(d, dtype=b.dtype, ld=None))
            b.move_to(other)
        with ctx.agreement("allclose: comparing"):
            on_host = is_foreign(d.dtype) or (isinstance(other, Handle) and is_foreign(other.dtype))
            theirs = (
                (v for _, _, v, _ in _slabs(other, on_host=on_host)) if isinstance(other, Handle) else None
            )
            mine = True
            for xp, _, values, _ in _slabs(a, on_host=on_host):
                right = other if theirs is None else next(theirs)
                close = xp.isclose(values, right, **tolerances, equal_nan=equal_nan)
                mine = mine and bool(close.all())
        return all(ctx.comm.allgather(mine))
