# SPDX-License-Identifier: Apache-2.0
"""AllGather + GEMM on GPUs: every rank has some of the tokens, and gets its outputs for all tokens."""

from __future__ import annotations

from ..kernels.views import View
from ..peers.flags import PIECES
from .base import CopyProduct, Views
from .pieces import offsets

__all__ = ["NcclGather", "PushedGather"]


class _Gather(CopyProduct):
    form = "allgather_matmul"

    def _prepare(self) -> None:
        p = self.p
        self.rows = sum(p.tokens)
        self.starts = offsets(p.tokens)
        self.line_bytes = p.inputs[0] * p.dtype.itemsize

    def lines_of(self, matrix: View, rank: int) -> View:
        """Return the rows of a rank."""
        return matrix.lines(self.starts[rank], self.starts[rank + 1])

    def view(self, address: int) -> View:
        """Return a view of the X of all tokens at an address."""
        inputs = self.p.inputs[0]
        return View(address, self.rows, inputs, inputs, self.p.dtype)

    def shard(self, stream: str, call: Views, rank: int, x: View) -> None:
        """Queue the product of a rank's tokens."""
        c = self.lines_of(call.c, rank) if call.c else None
        self.whole(stream, call, x, c, self.lines_of(call.out, rank))


class NcclGather(_Gather):
    """NCCL's AllGather (its Broadcasts if the ranks' tokens differ), then one product."""

    name = "nccl"
    needs_windows = False

    def _prepare(self) -> None:
        super()._prepare()
        self._reserve("gathered", self.rows * self.line_bytes)
        self._reserve("shard", self.p.tokens[self.rank] * self.line_bytes)

    def _multiply(self, call: Views) -> None:
        gpu = self.gpu
        gpu.begin()
        gathered = call.gathered or self.view(gpu.scratch("gathered", self.rows * self.line_bytes))
        own = call.x
        if not own.contiguous:
            at = gpu.scratch("shard", own.nbytes)
            own = View(at, own.rows, own.cols, own.cols, own.dtype)
            gpu.copy("main", own, call.x)
        gpu.all_gather(own, gathered.address, [rows * self.line_bytes for rows in self.p.tokens])
        self.whole("main", call, gathered, call.c, call.out)
        gpu.end()


class PushedGather(_Gather):
    """Copy engines push every rank's tokens to all peers; each multiplies its own first, the others' as they come.

    If the caller wants all of X, kernels copy it there when no product runs.
    """

    name = "push"

    def _buffers(self) -> dict[str, int]:
        return {"gathered": self.rows * self.line_bytes}

    def _multiply(self, call: Views) -> None:
        gpu = self.gpu
        gpu.begin("copy")
        for peer in reversed(self.peers) if call.x.rows else ():  # first the peer that needs this shard first
            gathered = self.view(gpu.symmetric("gathered", peer))
            gpu.push("copy", self.lines_of(gathered, self.rank), call.x)
            gpu.raise_flag("copy", peer, PIECES.at(0))
        self.shard("main", call, self.rank, call.x)
        gathered = self.view(gpu.symmetric("gathered", self.rank))
        for peer in self.peers:
            if self.p.tokens[peer]:
                gpu.await_flags("main", [(peer, PIECES.at(0))])
                self.shard("main", call, peer, self.lines_of(gathered, peer))
        if call.gathered:
            start, stop = self.starts[self.rank], self.starts[self.rank + 1]
            for first, end, of in ((0, start, gathered), (stop, self.rows, gathered)):
                gpu.copy("main", call.gathered.lines(first, end), of.lines(first, end))
            gpu.copy("main", call.gathered.lines(start, stop), call.x)
        gpu.end("copy")
