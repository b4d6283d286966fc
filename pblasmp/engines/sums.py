# SPDX-License-Identifier: Apache-2.0
"""geadd and tradd on the host: op(A) is moved to where D lies, and added there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Cell, Exchange, Side
from ...comm.shared import aligned, carve
from ...layout import Level3Problem
from ...layout.intersection import copy_all
from ..base import Options, Workspace
from .common import HostProduct, Means

__all__ = ["SumProduct"]

_CHUNK = 1 << 16  # elements added at a time: they stay in the caches

Array = NDArray[Any]
Mask = NDArray[np.bool_] | bool


class SumProduct(HostProduct):
    """``D = alpha op(A) + beta C``. Making and running one is collective over the ranks.

    A part of op(A) is read where D needs it: in the rank's own A, in the copy that another rank of the node shares of
    its A, where that is dealt out like D, or else in a buffer that it is moved to.
    """

    def __init__(self, p: Level3Problem, options: Options, means: Means) -> None:
        self._p, self._rank, self._means = p, means.comm.rank, means
        self._node: tuple[int, ...] = ()
        self._alpha, self._beta, self._part = options.alpha, options.beta, p.written
        self._flip = p.op_a != "N"
        self._conjugate = p.op_a == "C" and p.d.dtype.kind == "c"
        self._exchange, self._shared = None, 0
        self._peer = self._rank  # the rank that has what this one needs, unless it is moved
        self._inside = self._rank < p.d.grid.size
        source = self._source = p.a.T if self._flip else p.a
        if not source.same_places(p.d) and options.alpha != 0:
            self._share()
            if self._shared and self._reaches():
                if self._inside:
                    self._peer = source.grid.rank(*p.d.grid.coords(self._rank))
                self.copied_bytes = self._shared if self._peer != self._rank else 0
            else:
                self._exchange = self._moves()
                self.sent_bytes, self.copied_bytes = self._exchange.sent_bytes, self._exchange.copied_bytes
        self.path = "shared" if self._shared else "where it lies" if self._exchange is None else "moved"
        self._straight = p.written is None and options.alpha == 1 and options.beta == 0
        shape = p.d.local_shape(self._rank) if self._inside else (0, 0)
        room = 0 if self._exchange is None or self._straight else shape[0] * shape[1] * p.d.dtype.itemsize
        self.workspace = Workspace(0, room + self._shared * len(self._node))

    def _share(self) -> None:
        """Find out whether each node has room for its ranks' parts of A: ``_shared`` bytes a rank. Collective."""
        means, source = self._means, self._source
        self._node = next(node for node in means.nodes if self._rank in node)
        sizes = (rows * cols for rows, cols in map(source.local_shape, range(source.grid.size)))
        nbytes = aligned(max(sizes) * source.dtype.itemsize)
        most = max(map(len, means.nodes))
        if most > 1 and not means.why_not_shared and means.fits(nbytes * most)[0]:
            self._shared = nbytes

    def _reaches(self) -> bool:
        """Return whether what each rank needs of op(A) is all that one rank of its node has."""
        source, d = self._source, self._p.d
        if (source.rows, source.cols) != (d.rows, d.cols):
            return False
        node = {rank: i for i, ranks in enumerate(self._means.nodes) for rank in ranks}
        return all(node[source.grid.rank(*d.grid.coords(rank))] == node[rank] for rank in range(d.grid.size))

    def _moves(self) -> Exchange:
        """Return the exchange that brings op(A) to where D lies."""
        means, side = self._means, Side.of(self._source)
        if self._shared:
            nodes = {rank: node for node in means.nodes for rank in node}
            cells = (Cell(c.coords, (*c.ranks, *nodes[c.ranks[0]])) for c in side.cells)
            side = Side(side.rows, side.cols, tuple(cells), side.order)
        return Exchange(means.comm, side, Side.of(self._p.d), self._p.d.dtype)

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:  # noqa: ARG002 - there is no B
        """Compute D, which may be C. Collective over the ranks."""
        x = a.T if self._flip else a
        known = self._copies(x) if self._shared else {self._rank: x}
        if self._exchange is not None:
            x = self._moved(known, d)
        elif self._peer != self._rank:
            x = known[self._peer]
        if not self._inside or x is d:
            return
        c = d if c is None else c
        part, (rows, cols) = self._part, self._p.d.global_indices(self._rank)
        if self._p.d.order == "C":
            x, c, d, part, rows, cols = x.T, c.T, d.T, part and part.T, cols, rows
        if part is None:
            self._add(x, c, d, True)
            return
        for down, across, mask in part.parts(rows, cols):
            self._add(x[down, across], c[down, across], d[down, across], True if mask is None else mask)

    def _copies(self, mine: Array) -> dict[int, Array]:
        """Return what the ranks of this node share of op(A), by rank. Collective over the ranks."""
        memory = self._means.buffers.get("x", self._shared * len(self._node), shared=True)
        x = self._source
        known = {
            rank: carve(memory, i * self._shared, x.local_shape(rank), x.dtype, x.order)
            for i, rank in enumerate(self._node)
            if rank < x.grid.size
        }
        if self._rank in known and (self._exchange is not None or self._peer != self._rank):
            copy, part = known[self._rank], self._part
            rows, cols = x.global_indices(self._rank)
            if x.order == "C":
                copy, mine, part, rows, cols = copy.T, mine.T, part and part.T, cols, rows
            everything = [(slice(None), slice(None), None)]
            for down, across, _ in everything if part is None else part.parts(rows, cols):
                copy[down, across] = mine[down, across]
        self._means.comm.barrier()  # every rank's part is there
        return known

    def _moved(self, known: dict[int, Array], d: Array) -> Array:
        """Return op(A) as D lies: D itself where that is all there is to do. Collective over the ranks."""
        assert self._exchange is not None
        there: Array = d
        if not self._straight:
            memory = self._means.buffers.get("sum", d.size * d.itemsize, shared=False)
            there = carve(memory, 0, d.shape, d.dtype, self._p.d.order)
        of = [known.get(i) for i in range(self._p.a.grid.size)]
        to = [there if i == self._rank else None for i in range(self._p.d.grid.size)]
        self._exchange.run(of, to, conjugate=self._conjugate)
        return there

    def _add(self, x: Array, c: Array, d: Array, mask: Mask) -> None:
        """Write ``d``, which is in F order, where ``mask`` says so, a few columns at a time."""
        alpha, beta = (self._p.d.dtype.type(value) for value in (self._alpha, self._beta))
        conjugate = self._conjugate and self._exchange is None
        step = max(1, _CHUNK // max(1, d.shape[0]))
        for at in range(0, d.shape[1], step):
            added, there, out = (y[:, at : at + step] for y in (x, c, d))
            where = mask if isinstance(mask, bool) else mask[:, at : at + step]
            if alpha != 0:
                added = _like(out, added, conjugate)
            if alpha == beta == 0:
                np.copyto(out, alpha, where=where)
            elif beta == 0:
                np.multiply(added, alpha, out=out, where=where)
            elif alpha == 0:
                np.multiply(there, beta, out=out, where=where)
            else:
                np.add(_scaled(there, beta, where), _scaled(added, alpha, where), out=out, where=where)


def _like(out: Array, x: Array, conjugate: bool) -> Array:
    """Return ``x``, or its conjugate, in the memory order of ``out``."""
    if not conjugate and (x.strides[0] <= x.strides[1]) == (out.strides[0] <= out.strides[1]):
        return x
    y = np.empty_like(out)
    copy_all(y, x, conjugate=conjugate)
    return y


def _scaled(x: Array, factor: np.generic, where: Mask) -> Array:
    """Return ``factor x`` where ``where`` says so, the rest is anything."""
    return x if factor == 1 else np.multiply(x, factor, out=np.empty_like(x), where=where)
