# SPDX-License-Identifier: Apache-2.0
"""GEMM + AllGather of the output on GPUs: every rank computes its outputs for all tokens, and gets all outputs."""

from __future__ import annotations

from itertools import pairwise

from ...tensor.tensor_product import Memory, offsets, pieces
from ..kernels.views import View
from ..peers.flags import PIECES
from .base import CopyProduct, NcclProduct, Views

__all__ = ["NcclGatheredOutput", "PushedGatheredOutput"]


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
