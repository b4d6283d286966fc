# SPDX-License-Identifier: Apache-2.0
"""GEMM + AllReduce on GPUs: every rank multiplies all tokens by its inputs, and gets the sums for all tokens.

Every entry is added by one rank, or by all in the same order: in float32 or wider, in the order of the ranks, rounded
once. So every rank has the same bits, in every run; only NCCL rounds on the way.
"""

from __future__ import annotations

from itertools import cycle, pairwise
from typing import TYPE_CHECKING

from ...tensor.algorithms import PulledSum
from ...tensor.tensor_product import EVEN, HALVES, SMALL_LAST, Memory, offsets, pieces, shares
from ..kernels.views import View
from ..peers.flags import PIECES
from ..types import carried
from .base import CopyProduct, NcclSum, Views

if TYPE_CHECKING:
    from ....layout import ParallelProblem
    from ...request import Options
    from ..runtime.gpu import Gpu

__all__ = ["NcclAllReduce", "OneShotAllReduce", "PushedAllReduce", "RingAllReduce", "TwoShotAllReduce"]

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
