# SPDX-License-Identifier: Apache-2.0
"""GEMM + AllReduce on GPUs: every rank multiplies all tokens by its inputs, and gets the sums for all tokens.

Every entry is added by one rank, or by all in the same order: in float32 or wider, in the order of the ranks, rounded
once. So every rank has the same bits, in every run; only NCCL rounds on the way.
"""

from __future__ import annotations

from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any

from ....dtypes import is_float8
from ..kernels.views import View
from ..peers.flags import PIECES
from .base import CopyProduct, Views, travels
from .pieces import EVEN, HALVES, SMALL_LAST, offsets, pieces, shares

if TYPE_CHECKING:
    from ....layout import ParallelProblem
    from ...request import Options
    from ..runtime.gpu import Gpu

__all__ = ["NcclAllReduce", "OneShotAllReduce", "PushedAllReduce", "RingAllReduce", "TwoShotAllReduce"]

_PULL = 2  # most ranks that pull sums


class _AllReduce(CopyProduct):
    form = "matmul_allreduce"

    def _prepare(self) -> None:
        p = self.p
        self.rows, self.cols = p.tokens[0], p.outputs[0]
        self.part_bytes = self.rows * self.cols * self.travels.itemsize
        self.sum_bytes = self.rows * self.cols * p.out_dtype.itemsize

    def parts_of(self, rank: int) -> View:
        """Return a rank's parts of all tokens, in symmetric memory."""
        at = self.gpu.symmetric("parts", rank)
        return View(at, self.rows, self.cols, self.cols, self.travels)

    def sums_of(self, rank: int) -> View:
        """Return where a rank's sums are for its peers, as many rows as all have."""
        return View(self.gpu.symmetric("sums", rank), self.rows, self.cols, self.cols, self.p.out_dtype)

    def partial(self) -> View:
        """Return this GPU's own memory for its parts of all tokens."""
        at = self.gpu.scratch("partial", self.part_bytes)
        return View(at, self.rows, self.cols, self.cols, self.travels)

    def finish_lines(self, call: Views, start: int, stop: int) -> dict[str, Any]:
        """Return the steps that follow the addition of the parts of these rows."""
        return self.finish(call, call.c.lines(start, stop) if call.c else None, call.out)


class NcclAllReduce(_AllReduce):
    """One product, then NCCL's AllReduce."""

    name = "nccl"
    needs_windows = False

    def _prepare(self) -> None:
        super()._prepare()
        self._reserve("partial", self.part_bytes)

    def _multiply(self, call: Views) -> None:
        gpu, out = self.gpu, call.out
        gpu.begin()
        plain = not (call.c or call.bias or call.activation or call.amax or is_float8(out.dtype))
        straight = plain and out.contiguous and out.dtype == self.travels
        partial = out if straight else self.partial()
        self.part("main", call, call.x, partial)
        gpu.all_reduce(partial)
        if not straight:
            gpu.add("main", [partial], [out], **self.finish(call, call.c, out))
        gpu.end()


class OneShotAllReduce(_AllReduce):
    """One product into symmetric memory, then every rank reads all parts of all peers: for small results."""

    name = "one_shot"

    def _buffers(self) -> dict[str, int]:
        return {"parts": self.part_bytes}

    def _multiply(self, call: Views) -> None:
        gpu = self.gpu
        gpu.begin()
        self.part("main", call, call.x, self.parts_of(self.rank))
        gpu.meet()
        parts = [self.parts_of(rank) for rank in range(self.size)]
        gpu.add("main", parts, [call.out], **self.finish(call, call.c, call.out))
        gpu.end()


class TwoShotAllReduce(_AllReduce):
    """One product into symmetric memory; every rank adds its share of the tokens; then each reads the others' sums."""

    name = "two_shot"

    def _prepare(self) -> None:
        super()._prepare()
        self.starts = offsets(shares(self.rows, self.size))

    def _buffers(self) -> dict[str, int]:
        return {"parts": self.part_bytes, "sums": self.sum_bytes}

    def _multiply(self, call: Views) -> None:
        gpu, out = self.gpu, call.out
        gpu.begin()
        self.part("main", call, call.x, self.parts_of(self.rank))
        gpu.meet()
        start, stop = self.starts[self.rank : self.rank + 2]
        parts = [self.parts_of(rank).lines(start, stop) for rank in range(self.size)]
        sums = [out.lines(start, stop), self.sums_of(self.rank).lines(start, stop)]
        gpu.add("main", parts, sums, **self.finish_lines(call, start, stop))
        gpu.meet()
        for rank in self.peers:
            start, stop = self.starts[rank : rank + 2]
            gpu.copy("main", out.lines(start, stop), self.sums_of(rank).lines(start, stop))
        gpu.end()


class PushedAllReduce(_AllReduce):
    """In pieces: copy engines push parts to the ranks that add them, and bring back the sums, during the next GEMMs.

    Two ranks pull each other's sums straight into D. More ranks push sums into each other's memory, and copy them from
    there: pulls and pushes at the same time between the same GPUs were slower. The additions have a stream of high
    priority, and run when a piece's GEMM ends. GEMMs that leave them 8 to 32 multiprocessors were slower on H200.
    """

    name = "push"

    def _prepare(self) -> None:
        super()._prepare()
        self._reserve("partial", self.part_bytes)
        self.pulls = self.size <= _PULL
        weights = SMALL_LAST if self.pulls else EVEN
        sizes = pieces(self.rows, self.cols, self.gpu.multiprocessors, weights)
        self.starts = offsets(sizes)
        self.split = [shares(size, self.size) for size in sizes]

    def _buffers(self) -> dict[str, int]:
        return {"parts": self.size * self._most() * self._line(), "sums": self.sum_bytes}

    def _line(self) -> int:
        return self.cols * self.travels.itemsize

    def _most(self) -> int:
        """Rows that the first rank adds: no other rank adds more."""
        return sum(split[0] for split in self.split)

    def slot(self, owner: int, source: int, piece: int) -> View:
        """Return where ``owner`` receives the part of ``source``."""
        before = sum(split[owner] for split in self.split[:piece])
        at = self.gpu.symmetric("parts", owner) + (source * self._most() + before) * self._line()
        return View(at, self.split[piece][owner], self.cols, self.cols, self.travels)

    def bounds(self, owner: int, piece: int) -> tuple[int, int]:
        """Return the rows that ``owner`` adds of a piece."""
        start = self.starts[piece] + sum(self.split[piece][:owner])
        return start, start + self.split[piece][owner]

    def _multiply(self, call: Views) -> None:
        gpu, count = self.gpu, len(self.split)
        partial = self.partial()
        streams = ("copy", "sum", "back", *(["pull"] if self.pulls else []))
        gpu.begin(*streams)
        for piece in range(count):
            lines = slice(*self.starts[piece : piece + 2])
            x, d = (matrix.lines(lines.start, lines.stop) for matrix in (call.x, partial))
            self.part("main", call, x, d)
            gpu.follow("copy", "main")
            for owner in self.peers:
                start, stop = self.bounds(owner, piece)
                if stop > start:
                    gpu.push("copy", self.slot(owner, self.rank, piece), partial.lines(start, stop))
                    gpu.raise_flag("copy", owner, PIECES.at(piece))
            self._add(call, partial, piece)
            if self.pulls:
                self._pull(call, piece)
            elif piece:
                self._take(call, piece - 1)
        if not self.pulls:
            self._take(call, count - 1)
        gpu.end(*streams)

    def _add(self, call: Views, partial: View, piece: int) -> None:
        """Add this rank's rows of a piece once all parts have arrived; signal the peers, or send them the sums."""
        gpu = self.gpu
        start, stop = self.bounds(self.rank, piece)
        if stop == start:
            return
        gpu.follow("sum", "main")
        for source in self.peers:
            gpu.await_flag("sum", source, PIECES.at(piece))
        parts = [
            partial.lines(start, stop) if source == self.rank else self.slot(self.rank, source, piece)
            for source in range(self.size)
        ]
        own = self.sums_of(self.rank).lines(start, stop)
        gpu.add("sum", parts, [call.out.lines(start, stop), own], **self.finish_lines(call, start, stop))
        gpu.follow("back", "sum")
        for peer in self.peers:
            if not self.pulls:
                gpu.push("back", self.sums_of(peer).lines(start, stop), own)
            gpu.raise_flag("back", peer, PIECES.at(len(self.split) + piece))

    def _pull(self, call: Views, piece: int) -> None:
        """Copy the peers' sums of a piece from their memory to D."""
        for owner in self.peers:
            start, stop = self.bounds(owner, piece)
            if stop > start:
                self.gpu.await_flag("pull", owner, PIECES.at(len(self.split) + piece))
                self.gpu.push("pull", call.out.lines(start, stop), self.sums_of(owner).lines(start, stop))

    def _take(self, call: Views, piece: int) -> None:
        """Copy the peers' sums of a piece, which they pushed here, to D."""
        for owner in self.peers:
            start, stop = self.bounds(owner, piece)
            if stop > start:
                self.gpu.await_flag("sum", owner, PIECES.at(len(self.split) + piece))
                self.gpu.copy("sum", call.out.lines(start, stop), self.sums_of(self.rank).lines(start, stop))


class RingAllReduce(_AllReduce):
    """On two GPUs: products of the peer's rows first, pushed to it; those of a rank's own rows add what came.

    Each rank adds half of the tokens, in cuBLASLt's epilogue instead of a kernel, and pulls the peer's half. Pieces
    alternate between two streams, so that one begins when the previous one leaves multiprocessors idle.
    """

    name = "ring"
    ranks = 2

    @classmethod
    def why_not(cls, gpu: Gpu, p: ParallelProblem, options: Options) -> str:
        """Return why this algorithm cannot compute the product here, "" if it can; the same on every rank. Local."""
        if options.beta != 0:
            return "cuBLASLt adds the peer's part in place of C"
        if travels(p, options) != p.out_dtype:
            return f"cuBLASLt adds no {travels(p, options).name} to a {p.out_dtype.name} D"
        return super().why_not(gpu, p, options)

    def _prepare(self) -> None:
        super()._prepare()
        self.starts = offsets(shares(self.rows, self.size))
        self.ends = [offsets(self._pieces(rank)) for rank in range(self.size)]
        self.count = max(len(ends) - 1 for ends in self.ends)
        self._reserve("partial", self._half_bytes())

    def _pieces(self, owner: int) -> tuple[int, ...]:
        start, stop = self.starts[owner : owner + 2]
        return pieces(stop - start, self.cols, self.gpu.multiprocessors, HALVES)

    def _half_bytes(self) -> int:
        return self.starts[1] * self.cols * self.p.out_dtype.itemsize

    def _buffers(self) -> dict[str, int]:
        return dict.fromkeys(("parts", "sums"), self._half_bytes())

    def half(self, address: int, owner: int) -> View:
        """Return the matrix of an owner's rows at an address."""
        start, stop = self.starts[owner : owner + 2]
        return View(address, stop - start, self.cols, self.cols, self.p.out_dtype)

    def _multiply(self, call: Views) -> None:
        gpu, mine, (peer,) = self.gpu, self.rank, self.peers
        streams = "gemm", "copy", "sum", "back", "pull"
        gpu.begin(*streams)
        x, out = ([m.lines(*self.starts[r : r + 2]) for r in range(self.size)] for m in (call.x, call.out))
        partial = self.half(gpu.scratch("partial", self._half_bytes()), peer)
        inbox, sent = (self.half(gpu.symmetric("parts", rank), rank) for rank in (mine, peer))
        sums, theirs = (self.half(gpu.symmetric("sums", rank), rank) for rank in (mine, peer))
        turns = cycle(("main", "gemm"))
        for piece, lines in enumerate(pairwise(self.ends[peer])):
            stream = next(turns)
            self.part(stream, call, x[peer].lines(*lines), partial.lines(*lines))
            gpu.follow("copy", stream)
            gpu.push("copy", sent.lines(*lines), partial.lines(*lines))
            gpu.raise_flag("copy", peer, PIECES.at(piece))
        for piece, lines in enumerate(pairwise(self.ends[mine])):
            stream = next(turns)
            gpu.await_flag(stream, peer, PIECES.at(piece))
            self.whole(stream, call, x[mine].lines(*lines), inbox.lines(*lines), sums.lines(*lines), beta=1)
            gpu.follow("back", stream)
            gpu.raise_flag("back", peer, PIECES.at(self.count + piece))
            gpu.follow("sum", stream)
            gpu.copy("sum", out[mine].lines(*lines), sums.lines(*lines))
        for piece, lines in enumerate(pairwise(self.ends[peer])):
            gpu.await_flag("pull", peer, PIECES.at(self.count + piece))
            gpu.push("pull", out[peer].lines(*lines), theirs.lines(*lines))
        gpu.end(*streams)
