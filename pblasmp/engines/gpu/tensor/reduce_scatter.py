# SPDX-License-Identifier: Apache-2.0
"""GEMM + ReduceScatter on GPUs: every rank multiplies all tokens by its inputs, and gets the sums for its own tokens.

Parts are added in the order of the ranks, in float32 or wider, and rounded once; only NCCL rounds on the way.
"""

from __future__ import annotations

from ....dtypes import is_float8
from ..kernels.views import View
from ..peers.flags import PIECES
from .base import CopyProduct, Views
from .pieces import offsets

__all__ = ["NcclReduceScatter", "PulledReduceScatter", "PushedReduceScatter", "StoredReduceScatter"]


class _ReduceScatter(CopyProduct):
    form = "matmul_reduce_scatter"

    def _prepare(self) -> None:
        p = self.p
        self.tokens = p.rows  # of each rank's result
        self.rows = sum(p.rows)
        self.starts = offsets(p.rows)
        self.mine = p.rows[self.rank]
        self.cols = p.outputs[0]
        self.row_bytes = self.cols * self.travels.itemsize

    def lines_of(self, matrix: View, rank: int) -> View:
        """Return the rows of a rank."""
        return matrix.lines(self.starts[rank], self.starts[rank + 1])

    def slot(self, owner: int, source: int) -> View:
        """Return where ``owner`` receives the part of ``source``."""
        rows = self.tokens[owner]
        at = self.gpu.symmetric("parts", owner) + source * rows * self.row_bytes
        return View(at, rows, self.cols, self.cols, self.travels)

    def partial(self) -> View:
        """Return this GPU's own memory for its parts of all tokens."""
        at = self.gpu.scratch("partial", self.rows * self.row_bytes)
        return View(at, self.rows, self.cols, self.cols, self.travels)

    def slots_bytes(self) -> int:
        """Bytes of the parts that the rank with the most tokens receives."""
        return int(self.size * max(self.tokens) * self.row_bytes)


class NcclReduceScatter(_ReduceScatter):
    """One product, then NCCL's ReduceScatter (its Reduce to each rank if their tokens differ)."""

    name = "nccl"
    needs_windows = False

    def _prepare(self) -> None:
        super()._prepare()
        self._reserve("partial", self.rows * self.row_bytes)
        self._reserve("sums", self.mine * self.row_bytes)

    def _multiply(self, call: Views) -> None:
        gpu, out = self.gpu, call.out
        gpu.begin()
        partial = self.partial()
        self.part("main", call, call.x, partial)
        plain = not (call.c or call.bias or call.activation or call.amax or is_float8(out.dtype))
        straight = plain and out.contiguous and out.dtype == self.travels
        sums = out
        if not straight:
            at = gpu.scratch("sums", self.mine * self.row_bytes)
            sums = View(at, self.mine, self.cols, self.cols, self.travels)
        gpu.reduce_scatter(partial, sums, self.tokens)
        if not straight:
            gpu.add("main", [sums], [out], **self.finish(call, call.c, out))
        gpu.end()


class PulledReduceScatter(_ReduceScatter):
    """One product into symmetric memory, then a kernel that reads its tokens' parts from all peers and adds them."""

    name = "pull"

    def _buffers(self) -> dict[str, int]:
        return {"parts": self.rows * self.row_bytes}

    def _multiply(self, call: Views) -> None:
        gpu = self.gpu
        gpu.begin()
        everywhere = [
            View(gpu.symmetric("parts", rank), self.rows, self.cols, self.cols, self.travels)
            for rank in range(self.size)
        ]
        self.part("main", call, call.x, everywhere[self.rank])
        gpu.meet()
        parts = [self.lines_of(matrix, self.rank) for matrix in everywhere]
        gpu.add("main", parts, [call.out], **self.finish(call, call.c, call.out))
        gpu.end()


class StoredReduceScatter(_ReduceScatter):
    """A product for each rank's tokens that stores straight into that rank's memory, then one sum of what came."""

    name = "store"

    def _buffers(self) -> dict[str, int]:
        return {"parts": self.slots_bytes()}

    def _multiply(self, call: Views) -> None:
        gpu = self.gpu
        gpu.begin("gemm")
        for step, owner in enumerate([*self.peers, self.rank]):
            stream = "gemm" if step % 2 else "main"
            self.part(stream, call, self.lines_of(call.x, owner), self.slot(owner, self.rank))
        gpu.follow("main", "gemm")
        gpu.meet()
        parts = [self.slot(self.rank, source) for source in range(self.size)]
        gpu.add("main", parts, [call.out], **self.finish(call, call.c, call.out))
        gpu.end()


class PushedReduceScatter(_ReduceScatter):
    """A product for each rank's tokens, peers' first, pushed by copy engines while the next one is computed."""

    name = "push"

    def _prepare(self) -> None:
        super()._prepare()
        self._reserve("partial", self.rows * self.row_bytes)

    def _buffers(self) -> dict[str, int]:
        return {"parts": self.slots_bytes()}

    def _multiply(self, call: Views) -> None:
        gpu = self.gpu
        gpu.begin("copy")
        partial = self.partial()
        for owner in self.peers:
            lines = self.lines_of(partial, owner)
            if lines.rows:
                self.part("main", call, self.lines_of(call.x, owner), lines)
                gpu.follow("copy", "main")
                gpu.push("copy", self.slot(owner, self.rank), lines)
                gpu.raise_flag("copy", owner, PIECES.at(0))
        self.part("main", call, self.lines_of(call.x, self.rank), self.slot(self.rank, self.rank))
        if self.mine:
            gpu.await_flags("main", [(source, PIECES.at(0)) for source in self.peers])
            parts = [self.slot(self.rank, source) for source in range(self.size)]
            gpu.add("main", parts, [call.out], **self.finish(call, call.c, call.out))
        gpu.end("copy")
