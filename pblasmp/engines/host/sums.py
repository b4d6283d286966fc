# SPDX-License-Identifier: Apache-2.0
"""geadd and tradd on the host: op(A) is moved to where D lies, and added there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Exchange, Side
from ...layout import Level3Problem
from ..base import Options, Workspace
from .blas import scale
from .common import HostProduct, Means
from .kernels import update

__all__ = ["SumProduct"]

_CHUNK = 1 << 15  # elements added at a time: they stay in the caches

Array = NDArray[Any]


class SumProduct(HostProduct):
    """``D = alpha op(A) + beta C``. Making one is local, running one collective over the ranks."""

    def __init__(self, p: Level3Problem, options: Options, means: Means) -> None:
        self._p, self._rank = p, means.comm.rank
        self._alpha, self._beta, self._part = options.alpha, options.beta, p.written
        self._flip = p.op_a != "N"
        self._conjugate = p.op_a == "C" and p.d.dtype.kind == "c"
        source = p.a.T if self._flip else p.a
        self._exchange = None
        if not source.same_places(p.d) and options.alpha != 0:
            self._exchange = Exchange(means.comm, Side.of(source), Side.of(p.d), p.d.dtype)
            self.sent_bytes, self.copied_bytes = self._exchange.sent_bytes, self._exchange.copied_bytes
        self.path = "where it lies" if self._exchange is None else "moved"
        self._straight = p.written is None and options.alpha == 1 and options.beta == 0
        self._inside = self._rank < p.d.grid.size
        shape = p.d.local_shape(self._rank) if self._inside else (0, 0)
        room = 0 if self._exchange is None or self._straight else shape[0] * shape[1] * p.d.dtype.itemsize
        self.workspace = Workspace(0, room)

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:  # noqa: ARG002 - there is no B
        """Compute D, which may be C. Collective over the ranks."""
        x = a.T if self._flip else a
        if self._exchange is not None:
            there = d if self._straight else np.empty_like(d)
            sizes = self._p.a.grid.size, self._p.d.grid.size
            arrays = zip((x, there), sizes, strict=True)
            self._exchange.run(
                *([y if i == self._rank else None for i in range(size)] for y, size in arrays),
                conjugate=self._conjugate,
            )
            if self._straight:
                return
            x = there
        elif self._conjugate and self._alpha != 0:
            x = x.conj()
        if self._inside and d.size:
            if self._part is None:
                self._add(x, c, d)
            else:
                self._add_part(x, c, d)

    def _add(self, x: Array, c: Array | None, d: Array) -> None:
        """Write all of D, a few rows (in F order: columns) at a time."""
        arrays = [d, d if c is None else c, x if self._alpha != 0 else d]
        if self._p.d.order == "F":
            arrays = [y.T for y in arrays]
        out, there, added = arrays
        step = max(1, _CHUNK // out.shape[1])
        for at in range(0, out.shape[0], step):
            rows = slice(at, at + step)
            if self._beta == 0 and self._alpha != 0:
                np.multiply(added[rows], self._scalar(self._alpha), out=out[rows])
                continue
            if self._beta != 0 and there is not out:
                out[rows] = there[rows]
            scale(out[rows], self._scalar(self._beta))
            if self._alpha == 1:
                out[rows] += added[rows]
            elif self._alpha != 0:
                out[rows] += self._scalar(self._alpha) * added[rows]

    def _add_part(self, x: Array, c: Array | None, d: Array) -> None:
        """Write D's triangle."""
        assert self._part is not None
        for down, across, mask in self._part.parts(*self._p.d.global_indices(self._rank)):
            view = d[down, across]
            if self._beta != 0 and c is not None and c is not d:
                np.copyto(view, c[down, across], where=True if mask is None else mask)
            if self._alpha == 0:
                added = np.zeros(view.shape, view.dtype)
            else:
                added = self._scalar(self._alpha) * x[down, across]
            update(view, added, self._beta, mask)

    def _scalar(self, value: complex) -> Any:
        return self._p.d.dtype.type(value)
