# SPDX-License-Identifier: Apache-2.0
"""GEMM + AllGather of the output on GPUs: every rank computes its outputs for all tokens, and gets all outputs."""

from __future__ import annotations

from ..kernels.views import View
from ..peers.flags import PIECES
from .base import CopyProduct, Views
from .pieces import offsets, pieces

__all__ = ["NcclGatheredOutput", "PushedGatheredOutput"]


class _GatheredOutput(CopyProduct):
    form = "matmul_allgather"

    def _prepare(self) -> None:
        p = self.p
        self.rows = p.tokens[0]
        self.starts = offsets(p.outputs)
        self.size_of = [self.rows * outputs * p.out_dtype.itemsize for outputs in p.outputs]

    def columns_of(self, matrix: View, rank: int) -> View:
        """Return the columns of a rank."""
        return matrix.columns(self.starts[rank], self.starts[rank + 1])

    def view(self, address: int, rank: int) -> View:
        """Return a view of a rank's columns alone, contiguous at an address."""
        outputs = self.p.outputs[rank]
        return View(address, self.rows, outputs, outputs, self.p.out_dtype)


class NcclGatheredOutput(_GatheredOutput):
    """One product, then NCCL's AllGather (or its Broadcasts, of unlike parts), and copies to the ranks' columns."""

    name = "nccl"
    needs_windows = False

    def _prepare(self) -> None:
        super()._prepare()
        self._reserve("partial", self.size_of[self.rank])
        self._reserve("gathered", sum(self.size_of))

    def _multiply(self, call: Views) -> None:
        gpu = self.gpu
        gpu.begin()
        own = self.view(gpu.scratch("partial", self.size_of[self.rank]), self.rank)
        if own.cols:
            c = self.columns_of(call.c, self.rank) if call.c else None
            self.whole("main", call, call.x, c, own)
        at = gpu.scratch("gathered", sum(self.size_of))
        gpu.all_gather(own, at, self.size_of)
        for rank, before in enumerate(offsets(self.size_of)[:-1]):
            gpu.copy("main", self.columns_of(call.out, rank), self.view(at + before, rank))
        gpu.end()


class PushedGatheredOutput(_GatheredOutput):
    """In pieces of the tokens: copy engines carry each to its columns everywhere, during the GEMM of the next."""

    name = "push"

    def _prepare(self) -> None:
        super()._prepare()
        widest = max(self.p.outputs)
        self.pieces = offsets(pieces(self.rows, widest, self.gpu.multiprocessors))

    def _buffers(self) -> dict[str, int]:
        return {"parts": max(self.size_of)}

    def _multiply(self, call: Views) -> None:
        gpu = self.gpu
        gpu.begin("pull", "tell")
        own = self.view(gpu.symmetric("parts", self.rank), self.rank)
        columns = self.columns_of(call.out, self.rank)
        c = self.columns_of(call.c, self.rank) if call.c else None
        for piece, (start, stop) in enumerate(zip(self.pieces, self.pieces[1:], strict=False)):
            if own.cols:
                d = own.lines(start, stop)
                self.whole("main", call, call.x.lines(start, stop), c.lines(start, stop) if c else None, d)
                gpu.follow("tell", "main")
                for peer in self.peers:
                    gpu.raise_flag("tell", peer, PIECES.at(piece))
            for peer in self.peers:
                if self.p.outputs[peer]:
                    gpu.await_flag("pull", peer, PIECES.at(piece))
                    theirs = self.view(gpu.symmetric("parts", peer), peer).lines(start, stop)
                    gpu.push("pull", self.columns_of(call.out, peer).lines(start, stop), theirs)
        gpu.copy("main", columns, own)
        gpu.end("pull", "tell")
