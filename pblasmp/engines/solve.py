# SPDX-License-Identifier: Apache-2.0
"""trsm on the host: A where every rank can read it, the right-hand sides dealt out evenly, one local solve per rank.

What stands to the left of A is seen transposed, so that A is always to the left. With panels of A, each panel's
equations are solved and what they contribute to the others is subtracted.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ...comm import Cell, Exchange, Side
from ...comm.shared import aligned, carve
from ...layout import Level3Problem
from ...layout.axis import Axis
from ..base import Options, Workspace
from .common import HostProduct, Means
from .level3 import left_of
from .operand import Operand
from .product import choose, cut

__all__ = ["SolveProduct"]

_EVEN = 1.25  # columns of the rank that has most of them, by the average, that D's own layout may have

Array = NDArray[Any]


class SolveProduct(HostProduct):
    """X of ``op(A) X = alpha B``. Making and running one is collective over the ranks."""

    def __init__(self, p: Level3Problem, options: Options, means: Means) -> None:
        assert p.b is not None
        comm = means.comm
        self._means, self._alpha, self._unit = means, options.alpha, p.diag == "U"
        self._turned = p.side == "R"
        flip, conjugate, uplo = left_of(p)
        self._lower = uplo == "L"
        source, target = (Side.of(x).T if self._turned else Side.of(x) for x in (p.b, p.d))
        order, free = source.rows.extent, source.cols.extent
        rows = Side.of(p.a).T.rows if flip else Side.of(p.a).rows
        whole = rows if rows.nprocs == 1 else Axis(order, max(1, order))
        self._a = Operand(p.a, flip, conjugate, ((0,),) * comm.size, whole, "a")

        columns = [target.cols.count(cell.coords[1]) for cell in target.cells]
        self._in_d = target.rows.nprocs == 1 and max(columns) * comm.size <= _EVEN * free + comm.size
        self._may_stay = self._in_d and p.b.same_places(p.d)
        dealt = Axis.even(free, comm.size)
        self._bytes = 0 if self._in_d else aligned(order * max(dealt.counts()) * p.d.dtype.itemsize)
        self.path, self.notes = choose([self._a], order, options.algo, means, self._bytes)
        if self._in_d:
            self.notes = tuple(note for note in self.notes if "where they lie" not in note)
            self.notes += ("the right-hand sides are solved for where the result lies",)
        self._shared = self.path == "shared"
        domains = means.domains(self.path)
        self._domain = next(ranks for ranks in domains if comm.rank in ranks)
        sharing = {rank: ranks for ranks in domains for rank in ranks}
        self._shape = {rank: (order, dealt.count(rank)) for rank in range(comm.size)}
        cells = tuple(
            Cell((0, rank), (rank, *(other for other in sharing[rank] if other != rank)))
            for rank in range(comm.size)
        )
        slabs = target if self._in_d else Side(Axis(order, max(1, order)), dealt, cells, source.order)
        self._dtype, self._order, self._sizes = p.d.dtype, source.order, (p.b.grid.size, p.d.grid.size)
        self._in = Exchange(comm, source, slabs, p.d.dtype)
        self._out = None if self._in_d else Exchange(comm, slabs, target, p.d.dtype)
        self._panels = cut(order, self.path) if self._alpha != 0 else []
        if not self._lower:
            self._panels.reverse()
        still = self._a.in_place()
        self._stagings = [None if still else means.staging(self._a, domains, *each) for each in self._panels]
        moves = [self._in, self._out, *self._stagings] if self._panels else []
        self.sent_bytes = sum(move.sent_bytes for move in moves if move is not None)
        self.copied_bytes = sum(move.copied_bytes for move in moves if move is not None)
        width = max((stop - start for start, stop in self._panels), default=0)
        self._a_bytes = 0 if still else self._a.memory_bytes(self._domain, width)
        depth = 2 if len(self._panels) > 1 else 1
        self.workspace = Workspace(0, depth * self._a_bytes + self._bytes if self._panels else 0)

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:  # noqa: ARG002 - there is no C
        """Solve for D, which may be B. Collective over the ranks."""
        if not self._panels:
            d[...] = 0
            return
        if self._turned:
            b, d = b.T, d.T
        rank = self._means.comm.rank
        given, wanted = (
            [x if i == rank else None for i in range(size)]
            for x, size in zip((b, d), self._sizes, strict=True)
        )
        slabs: list[Array | None] = wanted if self._in_d else self._carved()
        if not (self._may_stay and b.ctypes.data == d.ctypes.data and b.strides == d.strides):
            self._in.run(given, slabs)
        mine = slabs[rank] if rank < len(slabs) else None
        coming = self._stage(0, a)
        for i, (start, stop) in enumerate(self._panels):
            panel = self._arrived(coming, a, start, stop)
            if self._shared:
                self._means.comm.barrier()  # every slab of the node is written
            coming = self._stage(i + 1, a) if i + 1 < len(self._panels) else None
            if mine is not None and mine.size:
                self._solve(panel, mine, start, stop, first=i == 0)
        if self._out is not None:
            if self._shared:
                self._means.comm.barrier()  # every slab of the node is solved for
            self._out.run(slabs, wanted)

    def _solve(self, panel: Array, x: Array, start: int, stop: int, *, first: bool) -> None:
        """Solve the equations ``start`` to ``stop`` and subtract what they contribute to those that follow."""
        blas = self._means.blas
        rest = slice(stop, None) if self._lower else slice(0, start)
        with blas.seated():
            alpha = self._alpha if first else 1
            blas.trsm(alpha, panel[start:stop], x[start:stop], lower=self._lower, unit=self._unit)
            blas.gemm(-1, panel[rest], x[start:stop], alpha, x[rest])

    def _carved(self) -> list[Array | None]:
        """Return the slabs of right-hand sides that this rank can write; None for those of other domains."""
        memory = self._means.buffers.get("x", self._bytes * len(self._domain), shared=self._shared)
        return [
            carve(memory, self._bytes * self._domain.index(rank), shape, self._dtype, self._order)
            if rank in self._domain
            else None
            for rank, shape in self._shape.items()
        ]

    def _stage(self, i: int, a: Array) -> Any:
        staging = self._stagings[i]
        if staging is None:
            return None
        memory = self._means.buffers.get(f"a{i % 2}", self._a_bytes, shared=self._shared)
        return staging.start(a, memory, ahead=len(self._panels) > 1)

    def _arrived(self, part: Any, a: Array, start: int, stop: int) -> Array:
        if part is None:
            return self._a.local(a)[:, start:stop]
        transfer, slabs = part
        transfer.finish()
        panel: Array = slabs[0]
        return panel
