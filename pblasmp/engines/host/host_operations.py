# SPDX-License-Identifier: Apache-2.0
"""The operations of a CPU rank on its own arrays: NumPy and the local BLAS."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import accumulation_dtype
from ...errors import short_repr
from ...layout.intersection import copy_all
from ...layout.pieces import LocalPart
from ..dense.factor_panels import SharedPanels
from ..dense.split_panels import SplitPanels
from ..local.extremes import scale_by_power
from ..operations import Operations
from ..product import Workspace
from . import blas
from .host_transport import Buffers

Array = NDArray[Any]

_WIDTH = 96  # columns of a panel
_LARGE_WIDTH = 128  # of a matrix of a large order
_LARGE = 2048
_CHUNK = 1 << 16  # elements added at a time: they stay in the caches


class HostOperations(Operations):
    """See ``engines.protocol.Operations``. Making one is local.

    Args:
        buffers: memory that all products use, one at a time.
        workers: ranks of the node that may compute at the same time.

    Attributes:
        factor_width: columns of a panel; 0: by the order of the matrix.
    """

    xp: Any = np
    tile = 64  # smaller tiles waste less work but slow BLAS down
    band, coarser = 0, 1
    panel = 1024  # a panel below 256 costs BLAS its speed
    lead = 0
    solved = panel, lead
    panel_flops = 1.0
    stripes = 1  # messages are short anyway
    batches = False
    update_order = "C"  # k contiguous: BLAS then computes parts of a triangle a tenth faster

    scale_by_power = staticmethod(scale_by_power)

    factor_width = 0
    factor_alone = 384  # one core's LAPACK is then as fast as two ranks that wait for each other
    factor_wait = 100_000  # 80 microseconds at 10 GB/s
    shared_panels: Any = SharedPanels
    own_panels: Any = None
    grid_panels: Any = None
    split_panels: Any = SplitPanels
    spread: Any = None
    shared_from = shared_width = 0

    def __init__(self, library: str, buffers: Buffers, workers: int = 1) -> None:
        self._library, self._buffers, self.workers = library, buffers, workers

    def workspace(self, nbytes: int, *, apart: bool = False, follows: bool = False) -> Workspace:
        return Workspace(0, nbytes)

    def scratch(self, name: str, shape: tuple[int, int], dtype: np.dtype, order: str = "C") -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._buffers.get(f"scratch {name}", nbytes, shared=False)
        return memory[:nbytes].view(dtype).reshape(shape, order=order)  # type: ignore[call-overload, no-any-return]

    def slab_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type that BLAS multiplies: operands are converted on arrival. Local."""
        return accumulation_dtype(dtype)

    multiplies = slab_dtype

    def store(self, d: Array, x: Array, dtype: np.dtype) -> None:
        d[...] = x

    def writes(self, dtype: np.dtype) -> bool:
        return accumulation_dtype(dtype) == dtype

    def operand(self, array: Array, dtype: np.dtype, name: str = "") -> Array:
        return array.astype(self.multiplies(dtype), copy=False)

    def refusal(self, dtype: np.dtype, compute: str | None) -> str:
        return (
            "" if compute is None else f"compute: the host engine takes only None, got {short_repr(compute)}"
        )

    def gemm(
        self,
        alpha: complex,
        a: Array,
        b: Array,
        beta: complex,
        d: Array,
        compute: str | None = None,
        c: Array | None = None,
    ) -> None:
        if c is not None and beta != 0:
            self.copy_where(d, c, None)
        exact = accumulation_dtype(d.dtype)
        if exact == d.dtype:
            blas.gemm(self._library, alpha, a, b, beta, d)
            return
        rows, cols = d.shape
        target = self.scratch("exact", (rows, cols), exact)
        if beta != 0:
            target[...] = d
        blas.gemm(self._library, alpha, a, b, beta, target)
        d[...] = target

    def trsm(self, alpha: complex, a: Array, x: Array, *, lower: bool, unit: bool) -> None:
        blas.trsm(self._library, alpha, a, x, lower=lower, unit=unit)

    def panel_width(self, order: int) -> int:
        """Return how many columns a panel has: wide ones multiply faster, narrow ones let ranks wait less. Local."""
        return self.factor_width or (_WIDTH if order < _LARGE else _LARGE_WIDTH)

    def potrf(self, a: Array, info: Array, first: int) -> None:
        n = a.shape[1]
        square, below = a[:n], a[n:]
        found = blas.potrf(self._library, square, lower=True)
        if found and np.isnan(square[found - 1, found - 1]):  # LAPACK's libraries differ in this
            a[...] = np.nan
            found = 0
        info[0] = first + found if found else 0
        if not found and below.size:
            left = square.conj() if square.dtype.kind == "c" else square
            self.trsm(1, left, below.T, lower=True, unit=False)

    def getrf(self, a: Array, pivots: Array, info: Array, first: int) -> None:
        found = blas.getrf(self._library, a, pivots)
        blas.legal_pivots(pivots, len(a))
        pivots += first
        if found:
            info[0] = first + found

    def swap_rows(self, a: Array, first: int, last: int, pivots: Array, *, back: bool = False) -> None:
        blas.laswp(self._library, a, first, last, pivots, back=back)

    def geqrt(self, a: Array, t: Array) -> None:
        blas.geqrt(self._library, a, t)

    def gemqrt(self, v: Array, t: Array, x: Array, *, adjoint: bool) -> None:
        work = self.scratch("reflected", (x.shape[1], len(t)), x.dtype, "F")
        blas.gemqrt(self._library, v, t, x, work, adjoint=adjoint)

    def larft(self, v: Array, tau: Array, t: Array) -> None:
        blas.larft(self._library, v, tau, t)

    def block_reflector(self, products: Array, tau: Array, t: Array) -> None:
        """Write the T of Householder vectors V, whose factors are ``tau``, from V^H V. Local."""
        t[...] = 0
        for i, factor in enumerate(tau):
            t[:i, i] = -factor * (t[:i, :i] @ products[:i, i])
            t[i, i] = factor

    def copy_where(self, dst: Array, src: Any, mask: Array | None) -> None:
        np.copyto(dst, src, where=True if mask is None else mask)

    def multiply_part(self, *_about: Any) -> bool:
        """Return False: pieces are multiplied one by one. Local."""
        return False

    def add(
        self,
        d: Array,
        alpha: complex,
        x: Array,
        beta: complex,
        c: Array,
        part: LocalPart | None,
        *,
        conjugate: bool,
    ) -> None:
        if d.strides[0] > d.strides[1]:
            d, x, c, part = d.T, x.T, c.T, part and part.T
        if part is None:
            _add(d, alpha, x, beta, c, None, conjugate)
            return
        for piece in part.pieces(self.tile):
            to, of, old = (y[piece.here] for y in (d, x, c))
            tile = part.tile(piece)
            mask, real = (None, None) if tile is None else (tile.mask, tile.real)
            if mask is None or real is None:
                _add(to, alpha, of, beta, old, mask, conjugate)
                continue
            product = np.zeros_like(to)
            for factor, term in ((alpha, of.conj() if conjugate else of), (beta, old)):
                if factor != 0:
                    term = np.where(mask, np.where(real, term.real, term), 0)  # the rest may be anything
                    product += term if factor == 1 else to.dtype.type(factor) * term
            self.copy_where(to, np.where(real, product.real, product), mask)


def _add(
    d: Array, alpha: complex, x: Array, beta: complex, c: Array, mask: Array | None, conjugate: bool
) -> None:
    """Write ``alpha x + beta c`` into ``d``, which is in F order, where ``mask`` is true."""
    factor, other = d.dtype.type(alpha), d.dtype.type(beta)
    step = max(1, _CHUNK // max(1, d.shape[0]))
    for at in range(0, d.shape[1], step):
        added, there, out = (y[:, at : at + step] for y in (x, c, d))
        where = True if mask is None else mask[:, at : at + step]
        if alpha != 0:
            added = _like(out, added, conjugate)
        if alpha == beta == 0:
            np.copyto(out, factor, where=where)
        elif beta == 0 and alpha == 1:
            np.copyto(out, added, where=where)
        elif beta == 0:
            np.multiply(added, factor, out=out, where=where)
        elif alpha == 0 and beta == 1:
            np.copyto(out, there, where=where)
        elif alpha == 0:
            np.multiply(there, other, out=out, where=where)
        else:
            np.add(_scaled(there, other, where), _scaled(added, factor, where), out=out, where=where)


def _like(out: Array, x: Array, conjugate: bool) -> Array:
    """Return ``x``, or its conjugate, in the memory order of ``out``."""
    if not conjugate and (x.strides[0] <= x.strides[1]) == (out.strides[0] <= out.strides[1]):
        return x
    y = np.empty_like(out)
    copy_all(y, x, conjugate=conjugate)
    return y


def _scaled(x: Array, factor: np.generic, where: Array | bool) -> Array:
    """Return ``factor x`` where ``where`` is true; the rest is undefined."""
    return x if factor == 1 else np.multiply(x, factor, out=np.empty_like(x), where=where)
