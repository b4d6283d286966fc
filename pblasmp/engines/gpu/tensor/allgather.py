# SPDX-License-Identifier: Apache-2.0
"""AllGather + GEMM on GPUs: every rank has some of the tokens, and gets its outputs for all tokens."""

from __future__ import annotations

from ...tensor.base import Memory
from ...tensor.collective import CollectiveGather
from ..kernels.views import View
from ..peers.flags import PIECES
from .base import CopyProduct, Views

__all__ = ["NcclGather", "PushedGather"]


class NcclGather(CollectiveGather[Views], CopyProduct):
    """NCCL's AllGather (its Broadcasts if the ranks' tokens differ), then one product."""

    name = "nccl"
    registers = True
    needs_windows = False


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

    def _multiply(self, call: Views) -> None:
        gpu, rows, everyones = self.gpu, self.rows, self.everyones("gathered")
        mine, gathered = rows[self.rank], everyones[self.rank]
        for peer in reversed(self.peers) if call.x.rows else ():  # first the peer that needs this shard first
            gpu.push("copy", everyones[peer][mine], call.x)
            gpu.raise_flag("copy", peer, PIECES.at(0))
        self._shard(call, mine, call.x)
        for peer in self.peers:
            if self.p.tokens[peer]:
                gpu.await_flags("main", [(peer, PIECES.at(0))])
                self._shard(call, rows[peer], gathered[rows[peer]])
        if call.gathered:
            for others in (slice(0, mine.start), slice(mine.stop, None)):
                self.copy(call.gathered[others], gathered[others])
            self.copy(call.gathered[mine], call.x)

    def _shard(self, call: Views, rows: slice, x: View) -> None:
        """Queue the product of a rank's tokens."""
        self.whole(call, x, call.c[rows] if call.c else None, call.out[rows])
