# SPDX-License-Identifier: Apache-2.0
"""Algorithm "push": copy engines carry tensor-parallel products between GPUs while the next part is multiplied.

Where there are several domains of GPUs that reach each other, nodes mostly, with equally many GPUs, the GPUs that have
the same place in their domains are a *rail*. Parts are added up in a domain first, and NCCL's collectives of each rail
carry what is added up, so each byte crosses between two domains once; what comes is passed on in the domain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING

from ...tensor.tensor_product import EVEN, FEW, SMALL_LAST, Memory, offsets, pieces, shares, waves
from ..kernels.views import View
from ..runtime.windows import PIECES
from .base import CopyProduct, Views

if TYPE_CHECKING:
    from ....layout import ParallelProblem
    from ...request import Options
    from ..runtime.gpu import Gpu
    from ..session import Session

_PASSED_ON = 8  # the first flag of what has come from other domains
_PULL = 2  # most ranks that pull sums
_MOST = 4  # pieces between domains
WORTH = 1e11
"""Operations of a rank that take as long as one more collective between nodes, over sockets: of two H200s, 0.1 ms."""


class PushedTensorProduct(CopyProduct):
    """What all have in common.

    Attributes:
        near: the other ranks of this one's domain, from the next one on.
        rail: the ranks with its place in their domains, in the order of their collectives.
        far: there are other domains.
        count: how many pieces travel between domains; 0: there is one.
    """

    name = "push"
    needs_windows = False

    @classmethod
    def why_not(cls, gpu: Gpu, p: ParallelProblem, options: Options) -> str:
        why = gpu.why_no_windows if gpu.size == 1 else ""
        if not why and len({len(ranks) for ranks in gpu.domains}) > 1:
            why = "nodes have unlike numbers of GPUs"
        return why or super().why_not(gpu, p, options)

    def __init__(self, session: Session, p: ParallelProblem, options: Options) -> None:
        domains, rank = session.gpu.domains, session.gpu.rank
        self._places = {rank: i for ranks in domains for i, rank in enumerate(ranks)}
        self._members = next(ranks for ranks in domains if rank in ranks)
        at = self._places[rank]
        self.near = [*self._members[at + 1 :], *self._members[:at]]
        self._rails = [sorted(ranks[i] for ranks in domains) for i in range(len(self._members))]
        self.rail, self.far = self._rails[at], len(domains) > 1
        if self.far:
            self.streams = (*self.streams, *{"copy", "sum", "net"}.difference(self.streams))
        super().__init__(session, p, options)

    def _prepare(self) -> None:
        self.count = max(1, min(_MOST, int(self.p.flops / self.size / WORTH))) if self.far else 0

    def rail_of(self, rank: int) -> list[int]:
        """Return the rail of a rank. Local."""
        return self._rails[self._places[rank]]


def _chunk(rows: slice, i: int, count: int) -> slice:
    """Return a part of some rows."""
    start, length = rows.start, rows.stop - rows.start
    return slice(start + length * i // count, start + length * (i + 1) // count)


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


_Slices = dict[tuple[int, int], slice]


class _ByRail(PushedTensorProduct):
    """Ranks' rows are cut into pieces. Those of a rail are one behind another in memory: NCCL takes them together.

    Attributes:
        rows: of each rank, in X or D.
        piece: by rank and number, the rows of a piece there.
        place: likewise, where a piece is in memory.
        together: likewise, where the pieces of the rank's rail are.
    """

    rows: Sequence[slice]
    piece: _Slices
    place: _Slices
    together: _Slices

    def _lay_out(self, rows: Sequence[slice]) -> None:
        """Set where pieces of ranks' rows are in memory; in one domain as in X or D."""
        self.rows = rows
        if not self.count:
            self.piece = self.place = self.together = {(rank, 0): part for rank, part in enumerate(rows)}
            return
        self.piece, self.place, self.together, at = {}, {}, {}, 0
        for rail, i in product(self._rails, range(self.count)):
            first = at
            for rank in rail:
                self.piece[rank, i] = _chunk(rows[rank], i, self.count)
                part, start = self.piece[rank, i], at
                at += part.stop - part.start
                self.place[rank, i] = slice(start, at)
            for rank in rail:
                self.together[rank, i] = slice(first, at)


class PushedGather(_ByRail):
    """Copy engines push every rank's tokens to all peers; each multiplies its own first, the others' as they come.

    What comes once, and takes less time than the host takes to queue it, is one product when all of it has come: a
    kernel copies it, which the host queues sooner than a copy for each rank.

    If the caller wants all of X, kernels copy it there when no product runs.
    """

    form = "allgather_matmul"
    streams: tuple[str, ...] = ("copy",)

    def _prepare(self) -> None:
        super()._prepare()
        self._lay_out(self.p.slices("tokens"))
        everything = sum(self.p.tokens), self.p.inputs[0]
        few = waves(everything[0], max(self.p.outputs), self.gpu.multiprocessors) <= 1
        self.at_once = self.once and few and not self.far  # on every rank, or on none
        if not self.far:
            self.streams = () if self.at_once else type(self).streams
        self.shared["gathered"] = Memory(self.p.dtype, [everything] * self.size)
        if self.far:
            self.own["shard"] = Memory(self.p.dtype, [(self.p.tokens[self.rank], self.p.inputs[0])])

    def _multiply(self, operands: Views) -> None:
        if self.at_once:
            self._all(operands)
            return
        gpu, x, memories = self.gpu, operands.a, self.reached("gathered")
        gathered, come = memories[self.rank], PIECES.at(0)
        # first the peer that needs this shard first; between domains all its pieces
        for peer, i in product(reversed(self.near), range(self.count or 1)):
            part = x[_chunk(slice(0, x.rows), i, self.count)] if self.count else x
            gpu.push("copy", memories[peer][self.place[self.rank, i]], part)
        for peer in reversed(self.near) if x.rows else ():
            gpu.raise_flag("copy", peer, come)
        if self.far:
            self._gather(x, gathered)
        self._shard(operands, self.rows[self.rank], x)
        for peer in self.near:
            if self.p.tokens[peer]:
                gpu.await_flags("main", [(peer, come)])
                for i in range(self.count or 1):
                    self._shard(operands, self.piece[peer, i], gathered[self.place[peer, i]])
        for i, agent in product(range(self.count), (self.rank, *self.near)):
            self._arrived(operands, gathered, agent, i)
        if operands.gathered:
            for rank, i in product(range(self.size), range(self.count or 1)):
                if rank != self.rank:
                    self.copy(operands.gathered[self.piece[rank, i]], gathered[self.place[rank, i]])
            self.copy(operands.gathered[self.rows[self.rank]], x)

    def _all(self, operands: Views) -> None:
        """Queue a kernel that copies this rank's tokens to all ranks, and the product of all once these have come."""
        gathered = self.at("gathered", self.rank)
        first = gathered.lines(self.rows[self.rank].start, 0).address - gathered.address
        places = self.gpu.symmetric_of_all("gathered").values()
        self.gpu.spread("main", [at + first for at in places], operands.a)
        self.meet()
        self.whole(operands, gathered, operands.c, operands.d)
        if operands.gathered:
            self.copy(operands.gathered, gathered)

    def _gather(self, x: View, gathered: View) -> None:
        """Queue the collectives of this rail, and the pushes of what comes."""
        gpu, item = self.gpu, x.dtype.itemsize
        if not x.contiguous:
            shard = self.memory("shard")
            self.copy(shard, x)
            x = shard
        gpu.follow("net", "main")
        for i in range(self.count):
            part = x[_chunk(slice(0, x.rows), i, self.count)]
            sizes = [_length(self.piece[rank, i]) * x.cols * item for rank in self.rail]
            gpu.all_gather(part, gathered[self.together[self.rank, i]].address, sizes, across=True)
            gpu.mark(f"piece {i}", "net")
            others = self._others(self.rank, i)
            if self.near and others:
                gpu.await_mark("copy", f"piece {i}")
            for peer in reversed(self.near) if others else ():
                for rank in others:
                    gpu.push(
                        "copy", self.at("gathered", peer)[self.place[rank, i]], gathered[self.place[rank, i]]
                    )
                gpu.raise_flag("copy", peer, PIECES.at(_PASSED_ON + i))

    def _others(self, agent: int, i: int) -> list[int]:
        """Return the ranks of other domains that have a piece which comes through a rank."""
        return [rank for rank in self.rail_of(agent) if rank != agent and _length(self.piece[rank, i])]

    def _arrived(self, operands: Views, gathered: View, agent: int, i: int) -> None:
        """Queue the products of what comes from other domains through a rank."""
        others = self._others(agent, i)
        if others and agent == self.rank:
            self.gpu.await_mark("main", f"piece {i}")
        elif others:
            self.gpu.await_flags("main", [(agent, PIECES.at(_PASSED_ON + i))])
        for rank in others:
            self._shard(operands, self.piece[rank, i], gathered[self.place[rank, i]])

    def _shard(self, operands: Views, rows: slice, x: View) -> None:
        """Queue the product of a rank's tokens."""
        self.whole(operands, x, operands.c[rows] if operands.c else None, operands.d[rows])


class PushedReduceScatter(_ByRail):
    """A product for each rank's tokens, peers' first, pushed by copy engines while the next one is computed.

    Parts end in a slot for each source.
    """

    form = "matmul_reduce_scatter"
    streams = ("copy",)

    def _prepare(self) -> None:
        super()._prepare()
        p = self.p
        self._lay_out(p.slices("rows"))
        self._span = max([sum([p.rows[rank] for rank in rail]) for rail in self._rails])
        self.shared["parts"] = Memory(
            self.travels, [(len(self._members) * self._span, p.outputs[0])] * self.size
        )
        self.own["partial"] = Memory(self.travels, [(sum(p.rows), p.outputs[0])])
        if self.far:
            self.own["sums"] = Memory(self.travels, [(p.rows[self.rank], p.outputs[0])])

    def slot(self, memory: View, owner: int, source: int, i: int) -> View:
        """Return where ``owner`` receives, in its memory, the parts of ``source`` for its rail."""
        block, first = self.together[owner, i], self.together[owner, 0].start
        start = self._places[source] * self._span + block.start - first
        return memory.lines(start, start + block.stop - block.start)

    def _multiply(self, operands: Views) -> None:
        gpu, partial, memories = self.gpu, self.memory("partial"), self.reached("parts")
        for i, owner in product(range(self.count or 1), (*self.near, self.rank)):
            for rank in self.rail_of(owner):
                rows = self.piece[rank, i]
                if rows.stop > rows.start:
                    self.part(operands, operands.a[rows], partial[self.place[rank, i]])
            block = self.together[owner, i]
            if block.stop == block.start:
                continue
            parts = partial[block]
            if owner == self.rank:
                self._add(operands, memories[owner], parts, i)
            else:
                gpu.follow("copy", "main")
                gpu.push("copy", self.slot(memories[owner], owner, self.rank, i), parts)
                gpu.raise_flag("copy", owner, PIECES.at(i))

    def _add(self, operands: Views, memory: View, block: View, i: int) -> None:
        """Queue the sum of the parts of a piece, here and, between domains, by NCCL."""
        gpu, came = self.gpu, PIECES.at(i)
        flags = [(source, came) for source in self.near]
        parts = [
            block if rank == self.rank else self.slot(memory, self.rank, rank, i) for rank in self._members
        ]
        if not self.far:
            gpu.await_flags("main", flags)
            self.add(operands, parts, [operands.d], operands.c)
            return
        gpu.follow("sum", "main")
        for flag in flags:
            gpu.await_flag("sum", *flag)
        if flags:
            gpu.add("sum", parts, [block])
        gpu.follow("net", "sum")
        rows = _chunk(slice(0, operands.d.rows), i, self.count)
        out = operands.d[rows]
        straight = self.plain(operands) and out.contiguous and out.dtype == block.dtype
        total = out if straight else self.memory("sums")[rows]
        gpu.reduce_scatter(block, total, [_length(self.piece[rank, i]) for rank in self.rail], across=True)
        if not straight:
            gpu.follow("sum", "net")
            c = operands.c[rows] if operands.c else None
            gpu.add("sum", [total], [out], **self.finish(operands, c, out))


class PushedAllReduce(PushedTensorProduct):
    """In pieces: copy engines push parts to the ranks that add them, and bring back the sums, during the next GEMMs.

    Two ranks pull each other's sums straight into D. More ranks push sums into each other's memory, and copy them from
    there: pulls and pushes at the same time between the same GPUs were slower. The additions have a stream of high
    priority, and run when a piece's GEMM ends. GEMMs that leave them 8 to 32 multiprocessors were slower on H200.
    """

    form = "matmul_allreduce"

    def _prepare(self) -> None:
        super()._prepare()
        rows, cols = everything = self.p.tokens[0], self.p.outputs[0]
        self.pulls = len(self._members) <= _PULL
        self.streams = (
            "copy",
            "sum",
            "back",
            *(["pull"] if self.pulls else []),
            *(["net"] if self.far else []),
        )
        weights = FEW if self.once else SMALL_LAST if self.pulls else EVEN
        sizes = pieces(rows, cols, self.gpu.multiprocessors, weights)
        if self.far:
            sizes = tuple(size for size in shares(rows, self.count) if size)
        self.starts = offsets(sizes)
        self.split = [shares(size, len(self._members)) for size in sizes]
        # rows that the first rank adds: no other one adds more
        self.most = sum(split[0] for split in self.split)
        self.own["partial"] = Memory(self.travels, [everything])
        self.shared["parts"] = Memory(self.travels, [(len(self._members) * self.most, cols)] * self.size)
        self.shared["sums"] = Memory(self.p.out_dtype, [everything] * self.size)

    def slot(self, owner: int, source: int, piece: int) -> View:
        """Return where ``owner`` receives the part of ``source``."""
        place = self._places[owner]
        start = self._places[source] * self.most + sum(split[place] for split in self.split[:piece])
        return self.at("parts", owner)[start : start + self.split[piece][place]]

    def share(self, owner: int, piece: int) -> slice:
        """Return the rows that ``owner`` adds of a piece."""
        place = self._places[owner]
        start = self.starts[piece] + sum(self.split[piece][:place])
        return slice(start, start + self.split[piece][place])

    def _multiply(self, operands: Views) -> None:
        gpu, count, partial = self.gpu, len(self.split), self.memory("partial")
        for piece in range(count):
            lines = slice(*self.starts[piece : piece + 2])
            self.part(operands, operands.a[lines], partial[lines])
            if self.near:
                gpu.follow("copy", "main")
            for owner in self.near:
                rows = self.share(owner, piece)
                if _length(rows):
                    gpu.push("copy", self.slot(owner, self.rank, piece), partial[rows])
                    gpu.raise_flag("copy", owner, PIECES.at(piece))
            self._add(operands, partial, piece)
            if self.pulls:
                self._pull(operands, piece)
            elif piece:
                self._take(operands, piece - 1)
        if not self.pulls:
            self._take(operands, count - 1)

    def _add(self, operands: Views, partial: View, piece: int) -> None:
        """Add this rank's rows of a piece once all parts have arrived; signal the peers, or send them the sums."""
        gpu, rows = self.gpu, self.share(self.rank, piece)
        if not _length(rows):
            return
        gpu.follow("sum", "main")
        for source in self.near:
            gpu.await_flag("sum", source, PIECES.at(piece))
        parts = [
            partial[rows] if source == self.rank else self.slot(self.rank, source, piece)
            for source in self._members
        ]
        if self.far:
            if self.near:
                gpu.add("sum", parts, [partial[rows]])
            gpu.follow("net", "sum")
            gpu.all_reduce(partial[rows], across=True)
            gpu.follow("sum", "net")
            parts = [partial[rows]]
        out, own = operands.d[rows], self.at("sums", self.rank)[rows]
        c = operands.c[rows] if operands.c else None
        gpu.add("sum", parts, [out, own] if self.near else [out], **self.finish(operands, c, out))
        if self.near:
            gpu.follow("back", "sum")
        for peer in self.near:
            if not self.pulls:
                gpu.push("back", self.at("sums", peer)[rows], own)
            gpu.raise_flag("back", peer, PIECES.at(len(self.split) + piece))

    def _pull(self, operands: Views, piece: int) -> None:
        """Copy the peers' sums of a piece from their memory to D."""
        for owner in self.near:
            rows = self.share(owner, piece)
            if _length(rows):
                self.gpu.await_flag("pull", owner, PIECES.at(len(self.split) + piece))
                self.gpu.push("pull", operands.d[rows], self.at("sums", owner)[rows])

    def _take(self, operands: Views, piece: int) -> None:
        """Copy the peers' sums of a piece, which they pushed here, to D."""
        sums = self.at("sums", self.rank)
        for owner in self.near:
            rows = self.share(owner, piece)
            if _length(rows):
                self.gpu.await_flag("sum", owner, PIECES.at(len(self.split) + piece))
                self.gpu.copy("sum", operands.d[rows], sums[rows])


class PushedGatheredOutput(PushedTensorProduct):
    """In pieces of the tokens: copy engines carry each to its columns everywhere, during the GEMM of the next."""

    form = "matmul_allgather"
    streams = ("pull", "tell")

    def _prepare(self) -> None:
        super()._prepare()
        p, tokens = self.p, self.p.tokens[0]
        weights = FEW if self.once else SMALL_LAST
        sizes = pieces(tokens, max(p.outputs), self.gpu.multiprocessors, weights)
        if self.far:
            sizes = tuple(size for size in shares(tokens, self.count) if size)
        self.pieces, self._columns = offsets(sizes), p.slices("outputs")
        widths = [sum([p.outputs[other] for other in self.rail_of(rank)]) for rank in range(self.size)]
        self.shared["parts"] = Memory(p.out_dtype, [(tokens, width) for width in widths])

    def block(self, agent: int, rank: int, rows: slice) -> View:
        """Return where a rank has, in some piece, the outputs of one of its rail: one behind another."""
        memory, rail, outputs = self.at("parts", agent), self.rail_of(agent), self.p.outputs
        before, count = sum([outputs[other] for other in rail[: rail.index(rank)]]), rows.stop - rows.start
        at = memory.address + (rows.start * memory.cols + count * before) * memory.dtype.itemsize
        return View(at, count, outputs[rank], outputs[rank], memory.dtype)

    def _multiply(self, operands: Views) -> None:
        gpu, mine = self.gpu, self._columns[self.rank]
        for piece, (start, stop) in enumerate(pairwise(self.pieces)):
            rows = slice(start, stop)
            own = self.block(self.rank, self.rank, rows)
            if own.cols:
                c = operands.c[rows, mine] if operands.c else None
                self.whole(operands, operands.a[rows], c, own)
                if self.near:
                    gpu.follow("tell", "main")
                for peer in self.near:
                    gpu.raise_flag("tell", peer, PIECES.at(piece))
            if self.far:
                self._gather(operands, own, rows, piece)
            for peer in self.near:
                self._pull(operands, peer, [peer], rows, PIECES.at(piece))
                if self.far:
                    self._pull(operands, peer, self._others(peer), rows, PIECES.at(_PASSED_ON + piece))
        for rows in (
            slice(*ends) for ends in (pairwise(self.pieces) if self.far else [(0, operands.d.rows)])
        ):
            self.copy(operands.d[rows, mine], self.block(self.rank, self.rank, rows))

    def _others(self, agent: int) -> list[int]:
        """Return the ranks of other domains that have outputs which come through a rank."""
        return [rank for rank in self.rail_of(agent) if rank != agent and self.p.outputs[rank]]

    def _pull(self, operands: Views, agent: int, ranks: Sequence[int], rows: slice, flag: int) -> None:
        """Copy outputs of ranks from an agent's memory to D."""
        columns, found = self._columns, [rank for rank in ranks if self.p.outputs[rank]]
        if found:
            self.gpu.await_flag("pull", agent, flag)
        for rank in found:
            self.gpu.push("pull", operands.d[rows, columns[rank]], self.block(agent, rank, rows))

    def _gather(self, operands: Views, own: View, rows: slice, piece: int) -> None:
        """Queue the collective of this rail for a piece, let the peers have what comes, and copy it to D."""
        gpu, columns, others = self.gpu, self._columns, self._others(self.rank)
        if not (own.cols or others):
            return
        gpu.follow("net", "main")
        sizes = [_length(rows) * self.p.outputs[rank] * own.dtype.itemsize for rank in self.rail]
        gpu.all_gather(own, self.block(self.rank, self.rail[0], rows).address, sizes, across=True)
        if others:
            gpu.follow("sum", "net")
        for peer in self.near if others else ():
            gpu.raise_flag("net", peer, PIECES.at(_PASSED_ON + piece))
        for rank in others:
            gpu.copy("sum", operands.d[rows, columns[rank]], self.block(self.rank, rank, rows))
