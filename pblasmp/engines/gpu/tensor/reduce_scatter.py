# SPDX-License-Identifier: Apache-2.0
"""GEMM + ReduceScatter on GPUs: every rank multiplies all tokens by its inputs, and gets the sums for its own tokens.

Parts are added in the order of the ranks, in float32 or wider, and rounded once; only NCCL rounds on the way.
"""

from __future__ import annotations

from ...tensor.algorithms import PulledSum
from ...tensor.tensor_product import Memory
from ..kernels.views import View
from ..peers.flags import PIECES
from .base import CopyProduct, NcclSum, Views

__all__ = ["NcclReduceScatter", "PulledReduceScatter", "PushedReduceScatter"]


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
