# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products by NCCL's collectives, in symmetric memory that peers read, and in turn on two GPUs."""

from __future__ import annotations

from itertools import cycle, pairwise
from typing import TYPE_CHECKING

from ...tensor.algorithms import PulledOutput, PulledSum
from ...tensor.tensor_product import HALVES, Memory, offsets, pieces
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
        gathered = Memory(p.dtype, [(sum(p.tokens), inputs)])
        self.own["shard"] = shard = Memory(p.dtype, [(p.tokens[self.rank], inputs)])
        self._reach((gathered if p.return_gathered else shard).nbytes)
        if not (p.return_gathered and self.registers):
            self.own["gathered"] = gathered

    def _multiply(self, operands: Views) -> None:
        p, x = self.p, operands.a
        wanted = operands.gathered
        gathered = wanted if wanted and self.in_place else self.memory("gathered")
        if not (self.in_place and x.contiguous):
            x = self.memory("shard")
            self.copy(x, operands.a)
        self.all_gather(x, gathered, [tokens * p.inputs[0] for tokens in p.tokens])
        self.whole(operands, gathered, operands.c, operands.d)
        if wanted and wanted is not gathered:
            self.copy(wanted, gathered)


class PulledGather(CopyProduct):
    """Each rank's tokens copied to symmetric memory, then a kernel that collects them from there, then one product."""

    form = "allgather_matmul"
    name = "pull"

    def _prepare(self) -> None:
        p, inputs = self.p, self.p.inputs[0]
        self.shared["tokens"] = Memory(p.dtype, [(tokens, inputs) for tokens in p.tokens])
        if not p.return_gathered:
            self.own["gathered"] = Memory(p.dtype, [(sum(p.tokens), inputs)])

    def _multiply(self, operands: Views) -> None:
        shards, x, rows = self.everyones("tokens"), operands.a, self.p.slices("tokens")
        gathered = operands.gathered or self.memory("gathered")
        self.copy(shards[self.rank], x)
        self.meet()
        theirs = [(gathered[rows[rank]], shards[rank]) for rank in self.peers]
        self.copy_all([*theirs, (gathered[rows[self.rank]], x)])
        self.whole(operands, gathered, operands.c, operands.d)


class NcclReduceScatter(NcclSum):
    """One product, then NCCL's ReduceScatter (its Reduce to each rank if their tokens differ)."""

    form = "matmul_reduce_scatter"


class PulledReduceScatter(PulledSum[Views], CopyProduct):
    """One product into symmetric memory, then a kernel that reads its tokens' parts from all peers and adds them."""

    form = "matmul_reduce_scatter"
    name = "pull"


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


class RingAllReduce(CopyProduct):
    """On two GPUs: products of the peer's rows first, pushed to it; those of a rank's own rows add what came.

    Each rank adds half of the tokens, in cuBLASLt's epilogue instead of a kernel, and pulls the peer's half. Pieces
    alternate between two streams, so that one begins when the previous one leaves multiprocessors idle.
    """

    form = "matmul_allreduce"
    name = "ring"
    ranks = 2
    streams = ("gemm", "copy", "sum", "back", "pull")
    lanes = 2

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
        halves = [(rows.stop - rows.start, self.p.outputs[0]) for rows in self.added]
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
        x, out = ([matrix[rows] for rows in self.added] for matrix in (operands.a, operands.d))
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


class PulledGatheredOutput(PulledOutput[Views], CopyProduct):
    """One product into symmetric memory, then a kernel that copies every rank's columns from there to D."""

    form = "matmul_allgather"
    name = "pull"


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
        parts = [
            View(gathered.address + start * gathered.dtype.itemsize, rows, cols, cols, gathered.dtype)
            for start, (rows, cols) in zip(offsets(sizes), shapes, strict=False)
        ]
        self.copy_all((operands.d[:, place], part) for place, part in zip(columns, parts, strict=True))
