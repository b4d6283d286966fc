# SPDX-License-Identifier: Apache-2.0
"""Algorithm "one_kernel": tensor-parallel products that one persistent kernel multiplies and communicates.

Partial sums and results go to boxes in symmetric memory, tile by tile, followed by a flag for each on the rank that
needs it. There are two sets of boxes and flags, for odd and for even calls. A call ends on a rank when it has all tiles
that it needs of its peers, so no rank is two calls ahead of another, and no barrier is needed. Flags hold the number of
the call and are never lowered.

There is none for AllGather + GEMM: copy engines and a GEMM for each shard are as fast (docs/internals/one-kernel.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ....dtypes import DTYPES, is_float8
from ....layout import ParallelProblem
from ...request import Options
from ...tensor.tensor_product import offsets, shares
from ..kernels.one_kernel import (
    TILE_ROWS,
    KernelJob,
    OneKernel,
    Tiling,
    Types,
    parts_in_boxes,
    tiling,
    way_of_parts,
)
from ..kernels.views import View
from ..runtime.gpu import Gpu
from ..runtime.windows import ONE_KERNEL_CONTROL, ONE_KERNEL_FLAGS, ONE_KERNEL_INBOXES
from ..types import carried
from .base import CopyProduct, Views

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..session import Session

_KINDS = 2  # of flags: parts of sums, results
_MOST_RANKS = 16
_LEFT = 26
"""Multiprocessors left to other communicators, a fifth of the GPU. NCCL's blocks come in clusters of four on Hopper,
which may run one after another, but each on all ranks at once. Wherever this kernel's blocks are, one of the eight GPCs
has four multiprocessors left if more than three of each are."""
_BESIDE_OTHERS = {
    2: {"matmul_reduce_scatter": 3e11, "matmul_allreduce": 3e11, "matmul_allgather": 1.5e11},
    4: {"matmul_reduce_scatter": 1.5e11, "matmul_allreduce": 1e12, "matmul_allgather": 2e12},
}
"""By the ranks and the form: operations up to which this kernel is the fastest without those multiprocessors.

Measured by ``benchmarks/one_kernel.py --groups others`` on two and four H200.
"""
_ALIGN = 16  # bytes
HOPPER = 90
"""Its compute capability."""
_MMA_SINCE = 80
_TYPES = DTYPES["bfloat16"], DTYPES["float16"]


def by_mma(capability: int) -> bool:
    """Return whether GPUs of a compute capability, 90 for 9.0, multiply by ``mma.sync``. Local."""
    return capability != HOPPER


def pays_beside_others(p: ParallelProblem) -> bool:
    """Return whether this kernel is taken by rule although it leaves multiprocessors to other communicators. Local."""
    return p.flops <= _BESIDE_OTHERS.get(p.size, {}).get(p.form, 0)


@dataclass(slots=True)
class _Tiled:
    """What products that are cut into as many tiles have in common.

    Attributes:
        tiles: the tiles.
        kernel: the kernel.
        buffers: the bytes of their symmetric memory.
        covered: whether that is known to be there.
        generation: of the arena when it was found where that is.
        places: where, as ``KernelJob`` has it.
    """

    tiles: Tiling
    kernel: OneKernel
    buffers: dict[str, int]
    covered: bool = False
    generation: int = -1
    places: dict[str, Any] = field(default_factory=dict)


class _OneKernelProduct(CopyProduct):
    """One kernel multiplies and communicates, tile by tile."""

    name = "one_kernel"
    leaves_sms = True
    lanes = 0
    starts: Sequence[int]  # of the ranks' shares of the rows
    tiles: Tiling
    _tiled: _Tiled
    copies = True  # whether a rank's results are fetched by the others
    _gaps: list[tuple[str, int, Any]] | None = None  # whose tight rows TMA cannot reach, for any tokens

    def __init__(self, session: Session, p: ParallelProblem, options: Options) -> None:
        left = options.comm_sms
        if left is None:
            left = _LEFT if session.runtime.beside_others() else 0
        gpu = session.gpu
        self._left, self._mma = left, by_mma(gpu.capability)
        self.blocks = max(1, gpu.multiprocessors - left)
        self._line = sum(p.inputs) // len(p.inputs) * p.dtype.itemsize
        self._known: dict[tuple[str, int], _Tiled] = {}  # of all products that are made of this one
        super().__init__(session, p, options)
        if left:
            self.path += f"; {left} multiprocessors are left to others"

    def resized(self, problem: ParallelProblem, *, once: bool = True) -> Self | None:
        """Return the same product of other sizes, without the other ranks; None if they must be asked. Local."""
        if self.options.comm_sms is None:
            others = self._session.runtime.others_of_late
            refused = others and self.options.algo == "auto" and not pays_beside_others(problem)
            if others is None or others != bool(self._left) or refused:
                return None
        return super().resized(problem, once=once)

    @classmethod
    def why_not(cls, gpu: Gpu, p: ParallelProblem, options: Options) -> str:
        if why := super().why_not(gpu, p, options):
            return why
        if gpu.capability < _MMA_SINCE:
            return "the kernel is for GPUs of compute capability 8.0 or above"
        if by_mma(gpu.capability) and (is_float8(p.dtype) or is_float8(p.out_dtype)):
            return "the kernel has 8-bit floats on Hopper GPUs (compute capability 9.0) only"
        if gpu.shared_gpus:
            return "ranks share a GPU: their kernels would wait for each other"
        if options.comm_sms is not None and options.comm_sms >= gpu.multiprocessors:
            return f"comm_sms={options.comm_sms} leaves none of {gpu.multiprocessors} multiprocessors"
        if gpu.size > _MOST_RANKS:
            return f"the kernel is for {_MOST_RANKS} ranks at most"
        if why := _why_not_types(p, carried(p.out_dtype, options.comm_dtype)):
            return why
        if not p.outputs_first:
            return "W must be outputs × inputs in memory"
        if options.beta != 0:
            return "the kernel adds no C"
        if complex(options.alpha).imag or options.compute is not None:
            return "the kernel takes a real alpha and no compute type"
        if 0 in (*p.tokens, *p.rows, *p.outputs, *p.inputs):
            return "a rank has no part of the product"
        return ""

    def _prepare(self) -> None:
        p, form, size, rank, line, mma = self.p, self.form, self.size, self.rank, self._line, self._mma
        width = sum(p.outputs) if form == "matmul_allgather" else p.outputs[0]
        self.parts = way_of_parts(form, size, p.tokens[0], width, line, self.blocks, mma=mma)
        self._cut()
        high, wide = self._share()
        kind = self.parts, -(-high // TILE_ROWS)
        cut = self._known.get(kind)
        if cut is None:
            tiles = tiling(form, size, high, wide, line, self.parts, self.blocks, mma=mma)
            self.kernel = OneKernel(form, Types(p.dtype, p.w_dtype, self.travels, p.out_dtype), size, tiles)
            cut = self._known[kind] = _Tiled(tiles, self.kernel, self._boxes_of(tiles))
        self._tiled, self.tiles, self.kernel = cut, cut.tiles, cut.kernel
        if self._gaps is None:
            inputs = p.inputs[rank]
            matrices = ("x", inputs, p.dtype), ("w", inputs, p.w_dtype), ("out", width, p.out_dtype)
            self._gaps = [each for each in matrices if each[1] * each[2].itemsize % _ALIGN]
        for name, cols, dtype in self._gaps:  # unless the caller's rows are further apart
            rows = {"x": p.tokens, "w": p.outputs, "out": p.rows}[name][rank]
            self._reserve(f"one_kernel {name}", rows * _aligned_ld(cols, dtype) * dtype.itemsize)

    def _cut(self) -> None:
        """Set ``starts``, of the ranks' shares of the rows. Local."""
        raise NotImplementedError

    def _share(self) -> tuple[int, int]:
        """Return rows and columns of the largest share. Local."""
        high = max([stop - start for start, stop in pairwise(self.starts)])
        return high, self.p.outputs[0]

    def _boxes_of(self, tiling: Tiling) -> dict[str, int]:
        tiles, in_boxes = 2 * tiling.count, parts_in_boxes(self.parts, sums=self.kernel.sums)
        sources = self.size if in_boxes else int(self.copies and not self.kernel.gives)
        stores = self.kernel.gives + (self.kernel.sums and self.parts in ("stored", "exchanged"))
        flags = _KINDS * self.size * tiles * np.dtype(np.uint32).itemsize
        return {
            "one_kernel": sources * tiles * tiling.image_bytes,
            ONE_KERNEL_INBOXES: stores * self.size * tiles * tiling.image_bytes,
            ONE_KERNEL_FLAGS: ONE_KERNEL_CONTROL + flags,
        }

    def buffers(self) -> dict[str, int]:
        return self._tiled.buffers

    @property
    def covered(self) -> bool:
        """Whether all symmetric memory that it needs is there, on every rank then: it never shrinks."""
        cut = self._tiled
        if not cut.covered:
            cut.covered = super().covered
        return cut.covered

    def _start(self) -> None:
        self.gpu.use_current_stream()

    def _end(self) -> None:
        """Do nothing: no rank is two calls ahead of another."""

    def _multiply(self, operands: Views) -> None:
        gpu, x, w, out = self.gpu, operands.a, operands.b, operands.d
        places = x.address | w.address | out.address
        if (
            places | x.ld * x.dtype.itemsize | w.ld * w.dtype.itemsize | out.ld * out.dtype.itemsize
        ) % _ALIGN:
            out = self._aligned("one_kernel out", out, copy=False)
            x, w = self._aligned("one_kernel x", x), self._aligned("one_kernel w", w)
        job = self._job(operands, x, w, out)
        gpu.one_kernel(self.kernel, job, self.blocks)
        if out is not operands.d:
            gpu.copy("main", operands.d, out)

    def _aligned(self, name: str, matrix: View, *, copy: bool = True) -> View:
        """Return a matrix that TMA can reach: itself, or memory of this GPU's own, to which it is copied. Local."""
        size = matrix.dtype.itemsize
        if not (matrix.address % _ALIGN or matrix.ld * size % _ALIGN):
            return matrix
        ld = _aligned_ld(matrix.cols, matrix.dtype)
        own = View(
            self.gpu.scratch(name, matrix.rows * ld * size), matrix.rows, matrix.cols, ld, matrix.dtype
        )
        if copy:
            self.gpu.copy("main", own, matrix)
        return own

    def _job(self, operands: Views, x: View, w: View, out: View) -> KernelJob:
        """Return the arguments of a launch. Local."""
        raise NotImplementedError

    def _with_boxes(self, operands: Views, w: View, **how: Any) -> KernelJob:
        tiled, arena, gpu, flags = self._tiled, self.gpu.arena, self.gpu, ONE_KERNEL_FLAGS
        if (
            tiled.generation != arena.generation or arena.captured
        ):  # then what is captured holds the addresses
            words = (gpu.symmetric_bytes(flags) - ONE_KERNEL_CONTROL) // np.dtype(np.uint32).itemsize
            controls = [gpu.symmetric(flags, rank) for rank in range(self.size)]
            tiled.generation, tiled.places = arena.generation, {
                "capacity": words // (2 * _KINDS * self.size), "control": controls[self.rank],
                "flags": [at + ONE_KERNEL_CONTROL for at in controls], "boxes": self._halves("one_kernel"),
                "inboxes": self._halves(ONE_KERNEL_INBOXES),
            }  # fmt: skip
        return KernelJob(
            w=w, rank=self.rank, starts=self.starts, bias=operands.bias, activation=operands.activation,
            alpha=float(complex(self.options.alpha).real), scale_x=operands.scale_x, scale_w=operands.scale_w,
            scale_d=operands.scale_d, amax=operands.amax, **tiled.places, **how,
        )  # fmt: skip

    def _halves(self, name: str) -> list[list[int]]:
        """Return the address of every rank's buffer, for even and for odd calls; 0 if it is not needed. Local."""
        if not self._sizes[name]:
            return [[0] * self.size] * 2
        half = self.gpu.symmetric_bytes(name) // 2 // TILE_ROWS * TILE_ROWS
        boxes = [self.gpu.symmetric(name, rank) for rank in range(self.size)]
        return [boxes, [at + half for at in boxes]]


class OneKernelReduceScatter(_OneKernelProduct):
    """One kernel: peers' tiles first, which they fetch or are sent; its own, to which it adds the peers' parts."""

    form = "matmul_reduce_scatter"
    copies = False

    def _cut(self) -> None:
        self.starts = offsets(self.p.rows)

    def _job(self, operands: Views, x: View, w: View, out: View) -> KernelJob:
        return self._with_boxes(operands, w, x=x, d=out)


class OneKernelAllReduce(_OneKernelProduct):
    """One kernel: as for GEMM + ReduceScatter, and peers fetch the sums."""

    form = "matmul_allreduce"

    def _cut(self) -> None:
        tokens = self.p.tokens[0]
        self.copies = self.parts != "exchanged"
        self.starts = offsets(shares(tokens, self.size)) if self.copies else [0, tokens]

    @classmethod
    def why_not(cls, gpu: Gpu, p: ParallelProblem, options: Options) -> str:
        few = "there are fewer tokens than ranks" if p.tokens[0] < gpu.size else ""
        return super().why_not(gpu, p, options) or few

    def _job(self, operands: Views, x: View, w: View, out: View) -> KernelJob:
        if not self.copies:
            return self._with_boxes(operands, w, x=x, d=out)
        parts = [out.lines(start, stop) for start, stop in pairwise(self.starts)]
        return self._with_boxes(
            operands, w, x=x, d=parts[self.rank],
            copies=[None if rank == self.rank else part for rank, part in enumerate(parts)],
        )  # fmt: skip


class OneKernelGatheredOutput(_OneKernelProduct):
    """One kernel: every tile goes to D and to a box, from which all peers fetch it to their D."""

    form = "matmul_allgather"

    @classmethod
    def why_not(cls, gpu: Gpu, p: ParallelProblem, options: Options) -> str:
        if why := super().why_not(gpu, p, options):
            return why
        if any(n * p.out_dtype.itemsize % _ALIGN for n in p.outputs[:-1]):
            return "every rank but the last needs a multiple of 8 outputs"
        return ""

    def _cut(self) -> None:
        self.starts = [0, self.p.tokens[0]]

    def _share(self) -> tuple[int, int]:
        return self.p.tokens[0], max(self.p.outputs)

    def _job(self, operands: Views, x: View, w: View, out: View) -> KernelJob:
        ends = offsets(self.p.outputs)
        parts = [out.columns(start, stop) for start, stop in pairwise(ends)]
        return self._with_boxes(
            operands, w, x=x, d=parts[self.rank],
            copies=[None if rank == self.rank else part for rank, part in enumerate(parts)],
        )  # fmt: skip


def _why_not_types(p: ParallelProblem, travels: np.dtype) -> str:
    """Return why the kernel has no product of these types, whose sums travel in another; "" if it has. Local."""
    eight = is_float8(p.dtype)
    if not eight and p.dtype not in _TYPES:
        return f"the kernel is for bfloat16, float16 and 8-bit floats, not {p.dtype.name}"
    wide = {travels} if eight else {travels, p.dtype, p.w_dtype}
    if not is_float8(p.out_dtype):
        wide.add(p.out_dtype)
    if len(wide) > 1 or travels not in _TYPES:
        return "but for 8-bit operands and results, the kernel has a single type of 16 bits"
    return ""


def _aligned_ld(cols: int, dtype: np.dtype) -> int:
    """Return how many entries apart rows of so many are in memory that TMA can reach. Local."""
    each = _ALIGN // dtype.itemsize
    return -(-cols // each) * each
