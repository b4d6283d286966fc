# SPDX-License-Identifier: Apache-2.0
"""AllGather + GEMM on GPUs: every rank has some of the tokens, and gets its outputs for all tokens."""

from __future__ import annotations

from itertools import cycle, pairwise
from typing import TYPE_CHECKING

from ...tensor.algorithms import PulledSum
from ...tensor.tensor_product import EVEN, HALVES, SMALL_LAST, Memory, offsets, pieces, shares
from ..kernels.views import View
from ..peers.windows import PIECES
from ..types import carried
from .base import CopyProduct, NcclProduct, NcclSum, Views

if TYPE_CHECKING:
    from ....layout import ParallelProblem
    from ...request import Options
    from ..runtime.gpu import Gpu


class NcclGather(NcclProduct):
    """NCCL's AllGather (its Broadcasts if the ranks' tokens differ), then one product."""

    form = "allgather_matmul"

    def _prepare(self) -> None:
        p, inputs = self.p, self.p.inputs[0]
        if not p.return_gathered:
            self.own["gathered"] = Memory(p.dtype, [(sum(p.tokens), inputs)])
        self.own["shard"] = Memory(p.dtype, [(p.tokens[self.rank], inputs)])

    def _multiply(self, operands: Views) -> None:
        p, x = self.p, operands.a
        gathered = operands.gathered or self.memory("gathered")
        if not x.contiguous:
            x = self.memory("shard")
            self.copy(x, operands.a)
        self.all_gather(x, gathered, [tokens * p.inputs[0] for tokens in p.tokens])
        self.whole(operands, gathered, operands.c, operands.d)


class PushedGather(CopyProduct):
    """Copy engines push every rank's tokens to all peers; each multiplies its own first, the others' as they come.

    If the caller wants all of X, kernels copy it there when no product runs.
    """

    form = "allgather_matmul"
    name = "push"
    streams = ("copy",)

    def _prepare(self) -> None:
        self.rows = self.p.slices("tokens")
        everything = sum(self.p.tokens), self.p.inputs[0]
        self.shared["gathered"] = Memory(self.p.dtype, [everything] * self.size)

    def _multiply(self, operands: Views) -> None:
        gpu, rows, everyones = self.gpu, self.rows, self.everyones("gathered")
        mine, gathered = rows[self.rank], everyones[self.rank]
        # first the peer that needs this shard first
        for peer in reversed(self.peers) if operands.a.rows else ():
            gpu.push("copy", everyones[peer][mine], operands.a)
            gpu.raise_flag("copy", peer, PIECES.at(0))
        self._shard(operands, mine, operands.a)
        for peer in self.peers:
            if self.p.tokens[peer]:
                gpu.await_flags("main", [(peer, PIECES.at(0))])
                self._shard(operands, rows[peer], gathered[rows[peer]])
        if operands.gathered:
            for others in (slice(0, mine.start), slice(mine.stop, None)):
                self.copy(operands.gathered[others], gathered[others])
            self.copy(operands.gathered[mine], operands.a)

    def _shard(self, operands: Views, rows: slice, x: View) -> None:
        """Queue the product of a rank's tokens."""
        self.whole(operands, x, operands.c[rows] if operands.c else None, operands.d[rows])


class NcclReduceScatter(NcclSum):
    """One product, then NCCL's ReduceScatter (its Reduce to each rank if their tokens differ)."""

    form = "matmul_reduce_scatter"


class PulledReduceScatter(PulledSum[Views], CopyProduct):
    """One product into symmetric memory, then a kernel that reads its tokens' parts from all peers and adds them."""

    form = "matmul_reduce_scatter"
    name = "pull"


class PushedReduceScatter(CopyProduct):
    """A product for each rank's tokens, peers' first, pushed by copy engines while the next one is computed.

    Parts end in a slot for each source.
    """

    form = "matmul_reduce_scatter"
    name = "push"
    streams = ("copy",)

    def _prepare(self) -> None:
        p = self.p
        self.rows = p.slices("rows")
        self.shared["parts"] = Memory(self.travels, [(self.size * max(p.rows), p.outputs[0])] * self.size)
        self.own["partial"] = Memory(self.travels, [(sum(p.rows), p.outputs[0])])

    def slot(self, owner: int, source: int) -> View:
        """Return where ``owner`` receives the part of ``source``."""
        rows = self.p.rows[owner]
        return self.at("parts", owner)[source * rows : (source + 1) * rows]

    def _multiply(self, operands: Views) -> None:
        gpu, partial = self.gpu, self.memory("partial")
        for owner in self.peers:
            lines = partial[self.rows[owner]]
            if lines.rows:
                self.part(operands, operands.a[self.rows[owner]], lines)
                gpu.follow("copy", "main")
                gpu.push("copy", self.slot(owner, self.rank), lines)
                gpu.raise_flag("copy", owner, PIECES.at(0))
        self.part(operands, operands.a[self.rows[self.rank]], self.slot(self.rank, self.rank))
        if self.p.rows[self.rank]:
            gpu.await_flags("main", [(source, PIECES.at(0)) for source in self.peers])
            parts = [self.slot(self.rank, source) for source in range(self.size)]
            self.add(operands, parts, [operands.d], operands.c)


_PULL = 2  # most ranks that pull sums


class NcclAllReduce(NcclSum):
    """One product, then NCCL's AllReduce."""

    form = "matmul_allreduce"


class OneShotAllReduce(CopyProduct):
    """One product into symmetric memory, then every rank reads all parts of all peers: for small results."""

    form = "matmul_allreduce"
    name = "one_shot"

    def _prepare(self) -> None:
        self.shared["parts"] = Memory(self.travels, [(self.p.tokens[0], self.p.outputs[0])] * self.size)

    def _multiply(self, operands: Views) -> None:
        parts = self.everyones("parts")
        self.part(operands, operands.a, parts[self.rank])
        self.meet()
        self.add(operands, parts, [operands.d], operands.c)


class TwoShotAllReduce(PulledSum[Views], CopyProduct):
    """One product into symmetric memory; every rank adds its share of the tokens; then each reads the others' sums."""

    form = "matmul_allreduce"
    name = "two_shot"


class PushedAllReduce(CopyProduct):
    """In pieces: copy engines push parts to the ranks that add them, and bring back the sums, during the next GEMMs.

    Two ranks pull each other's sums straight into D. More ranks push sums into each other's memory, and copy them from
    there: pulls and pushes at the same time between the same GPUs were slower. The additions have a stream of high
    priority, and run when a piece's GEMM ends. GEMMs that leave them 8 to 32 multiprocessors were slower on H200.
    """

    form = "matmul_allreduce"
    name = "push"

    def _prepare(self) -> None:
        rows, cols = everything = self.p.tokens[0], self.p.outputs[0]
        self.pulls = self.size <= _PULL
        self.streams = ("copy", "sum", "back", *(["pull"] if self.pulls else []))
        weights = SMALL_LAST if self.pulls else EVEN
        sizes = pieces(rows, cols, self.gpu.multiprocessors, weights)
        self.starts = offsets(sizes)
        self.split = [shares(size, self.size) for size in sizes]
        # rows that the first rank adds: no other one adds more
        self.most = sum(split[0] for split in self.split)
        self.own["partial"] = Memory(self.travels, [everything])
        self.shared["parts"] = Memory(self.travels, [(self.size * self.most, cols)] * self.size)
        self.shared["sums"] = Memory(self.p.out_dtype, [everything] * self.size)

    def slot(self, owner: int, source: int, piece: int) -> View:
        """Return where ``owner`` receives the part of ``source``."""
        start = source * self.most + sum(split[owner] for split in self.split[:piece])
        return self.at("parts", owner)[start : start + self.split[piece][owner]]

    def share(self, owner: int, piece: int) -> slice:
        """Return the rows that ``owner`` adds of a piece."""
        start = self.starts[piece] + sum(self.split[piece][:owner])
        return slice(start, start + self.split[piece][owner])

    def _multiply(self, operands: Views) -> None:
        gpu, count, partial = self.gpu, len(self.split), self.memory("partial")
        for piece in range(count):
            lines = slice(*self.starts[piece : piece + 2])
            self.part(operands, operands.a[lines], partial[lines])
            gpu.follow("copy", "main")
            for owner in self.peers:
                if self.split[piece][owner]:
                    gpu.push("copy", self.slot(owner, self.rank, piece), partial[self.share(owner, piece)])
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
        if not self.split[piece][self.rank]:
            return
        gpu.follow("sum", "main")
        for source in self.peers:
            gpu.await_flag("sum", source, PIECES.at(piece))
        parts = [
            partial[rows] if source == self.rank else self.slot(self.rank, source, piece)
            for source in range(self.size)
        ]
        sums = [matrix[rows] for matrix in self.everyones("sums")]
        own = sums[self.rank]
        c = operands.c[rows] if operands.c else None
        gpu.add("sum", parts, [operands.d[rows], own], **self.finish(operands, c, operands.d))
        gpu.follow("back", "sum")
        for peer in self.peers:
            if not self.pulls:
                gpu.push("back", sums[peer], own)
            gpu.raise_flag("back", peer, PIECES.at(len(self.split) + piece))

    def _pull(self, operands: Views, piece: int) -> None:
        """Copy the peers' sums of a piece from their memory to D."""
        sums = self.everyones("sums")
        for owner in self.peers:
            rows = self.share(owner, piece)
            if self.split[piece][owner]:
                self.gpu.await_flag("pull", owner, PIECES.at(len(self.split) + piece))
                self.gpu.push("pull", operands.d[rows], sums[owner][rows])

    def _take(self, operands: Views, piece: int) -> None:
        """Copy the peers' sums of a piece, which they pushed here, to D."""
        sums = self.at("sums", self.rank)
        for owner in self.peers:
            rows = self.share(owner, piece)
            if self.split[piece][owner]:
                self.gpu.await_flag("sum", owner, PIECES.at(len(self.split) + piece))
                self.gpu.copy("sum", operands.d[rows], sums[rows])


class RingAllReduce(CopyProduct):
    """On two GPUs: products of the peer's rows first, pushed to it; those of a rank's own rows add what came.

    Each rank adds half of the tokens, in cuBLASLt's epilogue instead of a kernel, and pulls the peer's half. Pieces
    alternate between two streams, so that one begins when the previous one leaves multiprocessors idle.
    """

    form = "matmul_allreduce"
    name = "ring"
    ranks = 2
    streams = ("gemm", "copy", "sum", "back", "pull")

    @classmethod
    def why_not(cls, gpu: Gpu, p: ParallelProblem, options: Options) -> str:
        """Return why this algorithm cannot compute the product here, "" if it can; the same on every rank. Local."""
        if options.beta != 0:
            return "cuBLASLt adds the peer's part in place of C"
        if carried(p.out_dtype, options.comm_dtype) != p.out_dtype:
            return (
                f"cuBLASLt adds no {carried(p.out_dtype, options.comm_dtype).name} to a {p.out_dtype.name} D"
            )
        return super().why_not(gpu, p, options)

    def _prepare(self) -> None:
        self.rows = [self.rows_of(rank) for rank in range(self.size)]
        halves = [(rows.stop - rows.start, self.p.outputs[0]) for rows in self.rows]
        self.pieces = [self._pieces(rows) for rows, _ in halves]
        self.count = max(len(found) for found in self.pieces)
        (peer,) = self.peers
        self.own["partial"] = Memory(self.p.out_dtype, [halves[peer]])
        self.shared["parts"] = self.shared["sums"] = Memory(self.p.out_dtype, halves)

    def _pieces(self, rows: int) -> list[slice]:
        sizes = pieces(rows, self.p.outputs[0], self.gpu.multiprocessors, HALVES)
        return [slice(start, stop) for start, stop in pairwise(offsets(sizes))]

    def _multiply(self, operands: Views) -> None:
        gpu, mine, (peer,) = self.gpu, self.rank, self.peers
        x, out = ([matrix[rows] for rows in self.rows] for matrix in (operands.a, operands.d))
        partial, inboxes, sums = self.memory("partial"), self.everyones("parts"), self.everyones("sums")
        turns = cycle(("main", "gemm"))
        for piece, lines in enumerate(self.pieces[peer]):
            stream = next(turns)
            self.part(operands, x[peer][lines], partial[lines], stream)
            gpu.follow("copy", stream)
            gpu.push("copy", inboxes[peer][lines], partial[lines])
            gpu.raise_flag("copy", peer, PIECES.at(piece))
        for piece, lines in enumerate(self.pieces[mine]):
            stream = next(turns)
            gpu.await_flag(stream, peer, PIECES.at(piece))
            self.whole(operands, x[mine][lines], inboxes[mine][lines], sums[mine][lines], stream, beta=1)
            gpu.follow("back", stream)
            gpu.raise_flag("back", peer, PIECES.at(self.count + piece))
            gpu.follow("sum", stream)
            gpu.copy("sum", out[mine][lines], sums[mine][lines])
        for piece, lines in enumerate(self.pieces[peer]):
            gpu.await_flag("pull", peer, PIECES.at(self.count + piece))
            gpu.push("pull", out[peer][lines], sums[peer][lines])


class NcclGatheredOutput(NcclProduct):
    """One product, then NCCL's AllGather (or its Broadcasts, of unlike parts), and copies to the ranks' columns."""

    form = "matmul_allgather"

    def _prepare(self) -> None:
        p, tokens = self.p, self.p.tokens[0]
        self.own["partial"] = Memory(p.out_dtype, [(tokens, p.outputs[self.rank])])
        self.own["gathered"] = Memory(p.out_dtype, [(1, tokens * sum(p.outputs))])

    def _multiply(self, operands: Views) -> None:
        columns, shapes = self.p.slices("outputs"), [(self.p.tokens[0], cols) for cols in self.p.outputs]
        mine = columns[self.rank]
        part, gathered = self.memory("partial"), self.memory("gathered")
        if part.cols:
            self.whole(operands, operands.a, operands.c[:, mine] if operands.c else None, part)
        sizes = [rows * cols for rows, cols in shapes]
        self.all_gather(part, gathered, sizes)
        for place, start, (rows, cols) in zip(columns, offsets(sizes), shapes, strict=False):
            at = gathered.address + start * gathered.dtype.itemsize
            self.copy(operands.d[:, place], View(at, rows, cols, cols, gathered.dtype))


class PushedGatheredOutput(CopyProduct):
    """In pieces of the tokens: copy engines carry each to its columns everywhere, during the GEMM of the next."""

    form = "matmul_allgather"
    name = "push"
    streams = ("pull", "tell")

    def _prepare(self) -> None:
        p, tokens = self.p, self.p.tokens[0]
        self.pieces = offsets(pieces(tokens, max(p.outputs), self.gpu.multiprocessors))
        self.shared["parts"] = Memory(p.out_dtype, [(tokens, outputs) for outputs in p.outputs])

    def _multiply(self, operands: Views) -> None:
        gpu, columns, parts = self.gpu, self.p.slices("outputs"), self.everyones("parts")
        mine, own = columns[self.rank], parts[self.rank]
        for piece, (start, stop) in enumerate(pairwise(self.pieces)):
            rows = slice(start, stop)
            if own.cols:
                self.whole(
                    operands, operands.a[rows], operands.c[rows, mine] if operands.c else None, own[rows]
                )
                gpu.follow("tell", "main")
                for peer in self.peers:
                    gpu.raise_flag("tell", peer, PIECES.at(piece))
            for peer in self.peers:
                if self.p.outputs[peer]:
                    gpu.await_flag("pull", peer, PIECES.at(piece))
                    gpu.push("pull", operands.d[rows, columns[peer]], parts[peer][rows])
        self.copy(operands.d[:, mine], own)
