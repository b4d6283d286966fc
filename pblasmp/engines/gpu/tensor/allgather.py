# SPDX-License-Identifier: Apache-2.0
"""AllGather + GEMM on GPUs: every rank has some of the tokens, and gets its outputs for all tokens."""

from __future__ import annotations

from ...tensor.tensor_product import Memory
from ..kernels.views import View
from ..peers.flags import PIECES
from .base import CopyProduct, NcclProduct, Views

__all__ = ["NcclGather", "PushedGather"]


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
