# SPDX-License-Identifier: Apache-2.0
"""geadd and tradd on the host: op(A) is moved to where D lies, and added there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Cell, Exchange, Side
from ...comm.shared import aligned, carve
from ...layout import Level3Problem, MatrixDescriptor
from ..base import Options, Workspace
from .common import HostProduct, Means
from .kernels import update

__all__ = ["SumProduct"]

_CHUNK = 1 << 15  # elements added at a time: they stay in the caches

Array = NDArray[Any]


class SumProduct(HostProduct):
    """``D = alpha op(A) + beta C``. Making and running one is collective over the ranks."""

    def __init__(self, p: Level3Problem, options: Options, means: Means) -> None:
        self._p, self._rank, self._means = p, means.comm.rank, means
        self._node: tuple[int, ...] = ()
        self._alpha, self._beta, self._part = options.alpha, options.beta, p.written
        self._flip = p.op_a != "N"
        self._conjugate = p.op_a == "C" and p.d.dtype.kind == "c"
        self._exchange, self._shared = None, 0
        source = p.a.T if self._flip else p.a
        if not source.same_places(p.d) and options.alpha != 0:
            self._share(source)
            side = Side.of(source)
            if self._shared:
                nodes = {rank: node for node in means.nodes for rank in node}
                cells = (Cell(c.coords, (*c.ranks, *nodes[c.ranks[0]])) for c in side.cells)
                side = Side(side.rows, side.cols, tuple(cells), side.order)
            self._exchange = Exchange(means.comm, side, Side.of(p.d), p.d.dtype)
            self.sent_bytes, self.copied_bytes = self._exchange.sent_bytes, self._exchange.copied_bytes
        self.path = "where it lies" if self._exchange is None else "shared" if self._shared else "moved"
        self._straight = p.written is None and options.alpha == 1 and options.beta == 0
        self._inside = self._rank < p.d.grid.size
        shape = p.d.local_shape(self._rank) if self._inside else (0, 0)
        room = 0 if self._exchange is None or self._straight else shape[0] * shape[1] * p.d.dtype.itemsize
        self.workspace = Workspace(0, room + self._shared * len(self._node))

    def _share(self, source: MatrixDescriptor) -> None:
        """Find out whether each node has room for its ranks' parts of A: ``_shared`` bytes a rank. Collective."""
        means = self._means
        self._source = source
        self._node = next(node for node in means.nodes if self._rank in node)
        sizes = (rows * cols for rows, cols in map(source.local_shape, range(source.grid.size)))
        nbytes = aligned(max(sizes) * source.dtype.itemsize)
        most = max(map(len, means.nodes))
        if most > 1 and not means.why_not_shared and means.fits(nbytes * most)[0]:
            self._shared = nbytes

    def _copies(self) -> dict[int, Array]:
        """Return what the ranks of this node share of A, by rank."""
        memory = self._means.buffers.get("x", self._shared * len(self._node), shared=True)
        x = self._source
        return {
            rank: carve(memory, i * self._shared, x.local_shape(rank), x.dtype, x.order)
            for i, rank in enumerate(self._node)
            if rank < x.grid.size
        }

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:  # noqa: ARG002 - there is no B
        """Compute D, which may be C. Collective over the ranks."""
        x = a.T if self._flip else a
        if self._exchange is not None:
            x = self._moved(x, d)
        elif self._conjugate and self._alpha != 0:
            x = x.conj()
        if not self._inside or x is d:
            return
        x = x if self._alpha != 0 else d  # of which nothing is read
        c = d if c is None else c
        if self._part is None:
            self._add(x, c, d)
            return
        part, (rows, cols) = self._part, self._p.d.global_indices(self._rank)
        if self._p.d.order == "C":  # some rows at a time
            x, c, d, part, rows, cols = x.T, c.T, d.T, part.T, cols, rows
        for down, across, mask in part.parts(rows, cols):
            if mask is None:
                self._add(x[down, across], c[down, across], d[down, across])
            else:
                self._add_masked(x[down, across], c[down, across], d[down, across], mask)

    def _moved(self, x: Array, d: Array) -> Array:
        """Return op(A) as D lies: D itself where that is all there is to do. Collective over the ranks."""
        assert self._exchange is not None
        there: Array = d
        if not self._straight:
            memory = self._means.buffers.get("sum", d.size * d.itemsize, shared=False)
            there = carve(memory, 0, d.shape, d.dtype, self._p.d.order)
        known = {self._rank: x}
        if self._shared:
            known = self._copies()
            if self._rank in known:
                known[self._rank][...] = x
            self._means.comm.barrier()  # every rank's part is there
        of = [known.get(i) for i in range(self._p.a.grid.size)]
        to = [there if i == self._rank else None for i in range(self._p.d.grid.size)]
        self._exchange.run(of, to, conjugate=self._conjugate)
        return there

    def _add(self, x: Array, c: Array, d: Array) -> None:
        """Write all of ``d``, a few rows (in F order: columns) at a time."""
        if abs(d.strides[0]) < abs(d.strides[1]):
            x, c, d = x.T, c.T, d.T
        alpha, beta = (self._p.d.dtype.type(value) for value in (self._alpha, self._beta))
        step = max(1, _CHUNK // max(1, d.shape[1]))
        for at in range(0, d.shape[0], step):
            added, there, out = (y[at : at + step] for y in (x, c, d))
            if beta == 0:
                np.multiply(added, alpha, out=out) if alpha != 0 else out.fill(0)
            elif alpha == 0:
                np.multiply(there, beta, out=out)
            else:
                scaled = there if beta == 1 else beta * there
                np.add(scaled, added if alpha == 1 else alpha * added, out=out)

    def _add_masked(self, x: Array, c: Array, d: Array, mask: NDArray[np.bool_]) -> None:
        """Write ``d`` where ``mask`` says so."""
        if self._beta != 0 and c is not d:
            np.copyto(d, c, where=mask)
        zero = d.dtype.type(0)
        added = np.zeros_like(d) if self._alpha == 0 else d.dtype.type(self._alpha) * np.where(mask, x, zero)
        update(d, added, self._beta, mask)
