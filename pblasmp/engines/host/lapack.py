# SPDX-License-Identifier: Apache-2.0
"""The local LAPACK through C pointers: what factors one panel, in place, whatever its leading dimension.

SciPy's wrappers copy an array whose columns are further apart than its rows are long; panels of a larger matrix are
such arrays. Every array here is in F order: its columns are contiguous.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import element_type
from . import blas

__all__ = ["gemqrt", "geqrt", "getrf", "larft", "laswp", "legal_pivots", "potrf"]

Array = NDArray[Any]


def _integer(n: int) -> bytes:
    """Return an INTEGER of Fortran."""
    return n.to_bytes(4, sys.byteorder, signed=True)


def _place(a: Array) -> tuple[int, bytes]:
    """Return the address and the leading dimension of an array in F order."""
    rows, cols = a.shape
    assert a.strides[0] == a.itemsize or rows <= 1, "expected contiguous columns"
    return a.ctypes.data, _integer(max(1, rows, a.strides[1] // a.itemsize if cols > 1 else 1))


def _routine(library: str, name: str, a: Array) -> Any:
    return blas.load(library, element_type(a.dtype).blas, name)


def potrf(library: str, a: Array, *, lower: bool) -> int:
    """Replace a triangle of ``a`` by its Cholesky factor. Local.

    Returns:
        0, or i if the leading minor of order i is not positive definite; then the columns before it are factored.

    Source: LAPACK, ?POTRF.
    """
    if not a.size:
        return 0
    info = ctypes.c_int(0)
    address, ld = _place(a)
    _routine(library, "potrf", a)(b"L" if lower else b"U", _integer(len(a)), address, ld, ctypes.byref(info))
    return info.value


def getrf(library: str, a: Array, pivots: NDArray[np.int32]) -> int:
    """Replace ``a`` by its LU factors with partial pivoting. Local.

    Args:
        library: "scipy" or "mkl".
        a: m × n.
        pivots: min(m, n) integers to write: row i was exchanged with row ``pivots[i]``, both counted from 1.

    Returns:
        0, or i if U[i-1, i-1], the first such, is exactly zero.

    Source: LAPACK, ?GETRF.
    """
    if not a.size:
        return 0
    info = ctypes.c_int(0)
    address, ld = _place(a)
    _routine(library, "getrf", a)(
        _integer(a.shape[0]), _integer(a.shape[1]), address, ld, pivots.ctypes.data, ctypes.byref(info)
    )
    return info.value


def legal_pivots(pivots: NDArray[np.int32], rows: int) -> None:
    """Make pivots rows of a matrix, from 1 to ``rows``: a BLAS may find no largest element among NaN. Local."""
    np.maximum(pivots, 1, out=pivots)
    np.minimum(pivots, rows, out=pivots)  # faster than np.clip


def laswp(
    library: str, a: Array, first: int, last: int, pivots: NDArray[np.int32], *, back: bool = False
) -> None:
    """Exchange rows ``first`` to ``last`` (half-open, from 0) of ``a`` with those in ``pivots`` (from 1). Local.

    ``pivots[i]`` belongs to row i. With ``back`` in reverse order, which undoes it.

    Source: LAPACK, ?LASWP.
    """
    if not a.size or first >= last:
        return
    address, ld = _place(a)
    _routine(library, "laswp", a)(
        _integer(a.shape[1]), address, ld, _integer(first + 1), _integer(last), pivots.ctypes.data,
        _integer(-1 if back else 1),
    )  # fmt: skip


def geqrt(library: str, a: Array, t: Array) -> None:
    """Replace ``a`` by R and the Householder vectors, and write the Ts of their block reflectors to ``t``. Local.

    Args:
        library: "scipy" or "mkl".
        a: m × n.
        t: w × min(m, n): the Ts of w columns each, side by side; the factors of the reflectors are their diagonals.

    Source: LAPACK, ?GEQRT; ?GEQRT3 for a single T.
    """
    if not a.size:
        return
    info = ctypes.c_int(0)
    (address, ld), (at, ldt) = _place(a), _place(t)
    (rows, cols), width = a.shape, len(t)
    if width == cols <= rows:
        _routine(library, "geqrt3", a)(
            _integer(rows), _integer(cols), address, ld, at, ldt, ctypes.byref(info)
        )
        return
    work = np.empty(width * cols, a.dtype)
    _routine(library, "geqrt", a)(
        _integer(rows), _integer(cols), _integer(min(width, *a.shape)), address, ld, at, ldt, work.ctypes.data,
        ctypes.byref(info),
    )  # fmt: skip


def gemqrt(library: str, v: Array, t: Array, x: Array, work: Array, *, adjoint: bool) -> None:
    """Replace ``x`` by Q x, or by the product with the adjoint of Q. Local.

    Args:
        library: "scipy" or "mkl".
        v: m × k with the Householder vectors below its diagonal; the rest is not read.
        t: w × k, as ``geqrt`` has written it.
        x: m × n.
        work: as many elements as n × w, which are overwritten.
        adjoint: multiply by the adjoint.

    Source: LAPACK, ?GEMQRT.
    """
    if not (x.size and v.size):
        return
    info = ctypes.c_int(0)
    (at_v, ldv), (at_t, ldt), (at_x, ldx) = map(_place, (v, t, x))
    (rows, cols), count = x.shape, v.shape[1]
    block = min(count, len(t))
    trans = b"N" if not adjoint else b"C" if x.dtype.kind == "c" else b"T"
    _routine(library, "gemqrt", x)(
        b"L", trans, _integer(rows), _integer(cols), _integer(count), _integer(block), at_v, ldv, at_t, ldt, at_x, ldx,
        work.ctypes.data, ctypes.byref(info),
    )  # fmt: skip


def larft(library: str, v: Array, tau: Array, t: Array) -> None:
    """Write the upper triangle T of a block reflector I - V T V^H to ``t``; the rest of ``t`` keeps its values. Local.

    Args:
        library: "scipy" or "mkl".
        v: m × k with the Householder vectors below its diagonal; the rest is not read.
        tau: their k factors.
        t: k × k.

    Source: LAPACK, ?LARFT, forward and by columns.
    """
    if not v.size:
        return
    (address, ld), (at, ldt) = _place(v), _place(t)
    rows, cols = v.shape
    _routine(library, "larft", v)(
        b"F", b"C", _integer(rows), _integer(cols), address, ld, tau.ctypes.data, at, ldt
    )
