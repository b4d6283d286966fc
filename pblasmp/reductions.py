# SPDX-License-Identifier: Apache-2.0
"""Norms, sums, the trace and the diagonal: numbers and vectors, the same on every rank.

Everything is summed in double precision, in an order that depends only on the layout: every rank gets the same bits in
every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .comm import Cell, Exchange, Side
from .creation import diagonal_places
from .dtypes import as_dtype, is_foreign
from .engines.local.sums import joined, root, squares
from .errors import ArgumentError
from .handle import Handle
from .layout.axis import Axis

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


__all__ = ["diagonal", "norm", "total", "trace"]

_SLAB = 1 << 18  # elements that are converted at a time
_SLAB_GPU = 1 << 24


def _wide(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def _local(matrix: Handle) -> tuple[Any, Any]:
    """Return the array module and the local array to compute with: on the host for types that CuPy lacks. Local."""
    engine = matrix.context.engine
    engine.synchronize()  # before values are read: that would wait forever if a rank is gone
    xp = engine.xp
    return (xp, matrix.local) if xp is np or not is_foreign(matrix.dtype) else (np, matrix.on_host())


def _slabs(matrix: Handle) -> Iterator[tuple[Any, slice, Any]]:
    """Yield the array module, which columns, and their elements: the local array, slab by slab, as double precision."""
    xp, local = _local(matrix)
    rows, cols = local.shape
    size, wide = (_SLAB if xp is np else _SLAB_GPU), _wide(matrix.dtype)
    if not local.size:
        return
    if matrix.descriptor.order == "C":
        step = max(1, size // cols)
        for at in range(0, rows, step):
            yield xp, slice(0, cols), local[at : at + step].astype(wide, copy=False)
    else:
        step = max(1, size // rows)
        for at in range(0, cols, step):
            yield xp, slice(at, at + step), local[:, at : at + step].astype(wide, copy=False)


# -- norms


def norm(matrix: Handle, which: object) -> float:
    """Return a norm. Collective over the context; see ``DistributedMatrix.norm``."""
    kind = _kind(which)
    if kind == "fro":
        return _frobenius(matrix)
    if kind == "max":
        return _largest(matrix)
    summed = matrix if kind == "1" else matrix.T
    sums = _column_sums(summed, "norm", {"matrix": matrix.descriptor, "ord": which}, absolute=True)
    return float(sums.max(initial=0))


def _kind(which: object) -> str | None:
    """Return the norm meant, None if there is no such norm."""
    if isinstance(which, str):
        return which if which in ("fro", "1", "inf", "max") else None
    if isinstance(which, (int, float, np.number)) and not isinstance(which, bool):
        return "1" if which == 1 else "inf" if which == math.inf else None
    return None


def _check(which: object) -> None:
    if _kind(which) is None:
        raise ArgumentError(f"ord: expected 'fro', 1, 'inf' or 'max', got {which!r}")


def _frobenius(matrix: Handle) -> float:
    """Scale like LAPACK's lassq: no square overflows, and none that matters underflows."""
    ctx = matrix.context
    with ctx.agreement("norm") as facts, np.errstate(all="ignore"):
        facts.update(matrix=matrix.descriptor, ord="fro")
        mine = joined([squares(xp, values) for xp, _, values in _slabs(matrix)])
    return root(joined(ctx.comm.allgather(mine)))


def _largest(matrix: Handle) -> float:
    ctx = matrix.context
    with ctx.agreement("norm") as facts, np.errstate(all="ignore"):
        facts.update(matrix=matrix.descriptor, ord="max")
        mine = [float(xp.abs(values).max()) for xp, _, values in _slabs(matrix)]
    return float(np.max(ctx.comm.allgather(float(np.max(mine, initial=0))), initial=0))


# -- sums


def total(matrix: Handle, axis: int | None, dtype: DTypeLike | None) -> Any:
    """Return a sum over everything or along an axis. Collective over the context; see ``DistributedMatrix.sum``."""
    facts = {"matrix": matrix.descriptor, "axis": axis, "dtype": dtype}
    sums = _column_sums(matrix.T if axis in (1, -1) else matrix, "sum", facts)
    with np.errstate(all="ignore"):
        out = np.asarray(sums if axis is not None else sums.sum())
        return out.astype(matrix.dtype if dtype is None else as_dtype(dtype))[()]


def _check_sum(matrix: Handle, axis: object, dtype: Any) -> None:
    if axis is not None and (isinstance(axis, bool) or axis not in (0, 1, -1, -2)):
        raise ArgumentError(f"axis: expected None, 0 or 1, got {axis!r}")
    kind = matrix.dtype if dtype is None else as_dtype(dtype)
    if matrix.dtype.kind == "c" and kind.kind != "c":
        raise ArgumentError(f"dtype: {matrix.dtype.name} does not convert to {kind.name}")


def _column_sums(matrix: Handle, call: str, what: dict[str, Any], *, absolute: bool = False) -> NDArray[Any]:
    """Return the sum of each column, or of its absolute values, in double precision. Collective over the context.

    The processes of a column have partial sums: each rank adds up those of an equal share of the columns, always in
    the order of the process rows, and gets the others' shares.
    """
    ctx, d = matrix.context, matrix.descriptor
    wide = np.dtype(np.float64) if absolute else _wide(d.dtype)
    with ctx.agreement(call) as facts, np.errstate(all="ignore"):
        facts.update(what)
        if absolute:
            _check(what["ord"])
        else:
            _check_sum(matrix, what["axis"], what["dtype"])
        mine = np.zeros((1, matrix.local.shape[1]), wide)
        for xp, cols, values in _slabs(matrix):
            sums = (xp.abs(values) if absolute else values).sum(axis=0)
            mine[0, cols] += sums if xp is np else xp.asnumpy(sums)
    n, (nprow, _) = d.shape[1], d.grid.shape
    partial = Side(Axis(nprow, 1, 0, nprow), d.cols, Side.of(d).cells, "C")
    shares = Axis(n, max(1, -(-n // ctx.size)), 0, ctx.size)
    cells = tuple(Cell((0, rank), (rank,)) for rank in range(ctx.size))
    room = np.zeros((nprow, shares.count(ctx.rank)), wide)
    exchange = Exchange(ctx.comm, partial, Side(Axis(nprow, nprow), shares, cells, "C"), wide)
    everyone = range(ctx.size)
    exchange.run(ctx.cells(d, mine), [room if rank == ctx.rank else None for rank in everyone])
    with np.errstate(all="ignore"):
        share = reduce(np.add, room)
    return np.concatenate(ctx.comm.allgather(share))


def trace(matrix: Handle) -> Any:
    """Return the sum of the diagonal. Collective over the context; see ``DistributedMatrix.trace``."""
    found = _diagonal(matrix, "trace")
    with np.errstate(all="ignore"):
        return np.asarray(found.astype(_wide(matrix.dtype)).sum()).astype(matrix.dtype)[()]


def diagonal(matrix: Handle) -> NDArray[Any]:
    """Return the diagonal. Collective over the context; see ``DistributedMatrix.diagonal``."""
    return _diagonal(matrix, "diagonal")


def _diagonal(matrix: Handle, call: str) -> NDArray[Any]:
    ctx, d = matrix.context, matrix.descriptor
    with ctx.agreement(call) as facts:
        facts["matrix"] = d
        coords, mine = ctx.coords(d), None
        if coords is not None:
            i, j = diagonal_places(d, coords)
            xp, local = _local(matrix)
            values = local[xp.asarray(i), xp.asarray(j)]
            mine = d.rows.globals(coords[0])[i], (values if xp is np else xp.asnumpy(values))
    out = np.empty(min(d.shape), d.dtype)
    for each in ctx.comm.allgather(mine):
        if each is not None:
            out[each[0]] = each[1]
    return out
