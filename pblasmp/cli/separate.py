# SPDX-License-Identifier: Apache-2.0
"""What ``pblasmp bench`` compares with, on the same arrays: a GEMM and a separate collective."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..context import Context
from ..dtypes import accumulation_dtype

__all__ = ["Separate"]

Array = Any


class Separate:
    """Arrays of random numbers, and their product by cuBLAS and NCCL, or by BLAS and MPI. Making one is local.

    Args:
        ctx: the context, on CPUs one of MPI's ranks.
        name: "allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce" or "matmul_allgather".
        shape: T, N, K; N is per rank for the gathers, K is over all ranks for the sums.
        dtype: of x, w and the result.

    Attributes:
        x, w: this rank's operands.
    """

    def __init__(self, ctx: Context, name: str, shape: tuple[int, int, int], dtype: np.dtype) -> None:
        t, n, k = shape
        p = ctx.size
        self._ctx, self._name, self._operations = ctx, name, ctx.engine.operations
        self._random = np.random.default_rng([7, ctx.rank])
        self._shared = np.random.default_rng(7)
        sums = name in ("matmul_reduce_scatter", "matmul_allreduce")
        self.x = self._numbers((t // p if name == "allgather_matmul" else t, k // p if sums else k), dtype)
        self.w = self._numbers((n, k // p if sums else k), dtype)
        # MPI cannot sum 16-bit types
        travels = dtype if ctx.engine.traits.on_gpus else accumulation_dtype(dtype)
        self._gathered = self._empty((t, k), dtype) if name == "allgather_matmul" else self.x
        self._part = self._empty((t, n), travels if sums else dtype)
        self._sent = self._empty((t // p, n), travels) if name == "matmul_reduce_scatter" else None
        self._panels = self._empty((p * t, n), dtype) if name == "matmul_allgather" else None
        self._y = self._empty((t, n * p), dtype) if name == "matmul_allgather" else None

    @staticmethod
    def name(ctx: Context) -> str:
        """Return its name in reports. Local."""
        return "NCCL + cuBLAS" if ctx.engine.traits.on_gpus else "MPI + BLAS"

    def _numbers(self, shape: tuple[int, int], dtype: np.dtype) -> Array:
        random = self._shared if self._name == "matmul_allgather" and not hasattr(self, "x") else self._random
        out = self._empty(shape, dtype)
        self._ctx.engine.from_host(out, (random.random(shape, dtype=np.float32) - 0.5).astype(dtype))
        return out

    def _empty(self, shape: tuple[int, int], dtype: np.dtype) -> Array:
        return self._ctx.engine.empty(shape, dtype, "C", max(1, shape[1]))

    def gemm(self) -> None:
        """Multiply without communication, as if all of x were here. Local."""
        x, w = (self._operations.operand(array, array.dtype) for array in (self._gathered, self.w))
        self._operations.gemm(1, x, w.T, 0, self._part)

    def run(self) -> Array:
        """Return the product, by a GEMM and a collective. Collective over the context."""
        if self._name == "allgather_matmul":
            self._collective("gather", self.x, self._gathered)
            self.gemm()
            return self._part
        self.gemm()
        if self._name == "matmul_reduce_scatter":
            self._collective("scatter", self._part, self._sent)
            return self._sent
        if self._name == "matmul_allreduce":
            self._collective("sum", self._part, self._part)
            return self._part
        assert self._panels is not None
        assert self._y is not None
        self._collective("gather", self._part, self._panels)
        p, (t, n) = self._ctx.size, self._part.shape
        self._y.reshape(t, p, n)[...] = self._panels.reshape(p, t, n).transpose(1, 0, 2)
        return self._y

    def _collective(self, name: str, source: Array, target: Array) -> None:
        if not self._ctx.engine.traits.on_gpus:
            self._by_mpi(name, source, target)
            return
        import cupy
        import nccl.core as nccl_core

        stream, comm = cupy.cuda.get_current_stream().ptr, self._ctx.engine.session.nccl.all  # type: ignore[attr-defined]  # cublasmp has one
        if name == "gather":
            comm.allgather(source, target, stream=stream)
        elif name == "scatter":
            comm.reduce_scatter(source, target, nccl_core.SUM, stream=stream)
        else:
            comm.allreduce(source, target, nccl_core.SUM, stream=stream)

    def _by_mpi(self, name: str, source: Array, target: Array) -> None:
        if self._ctx.size == 1:
            if source is not target:
                target[...] = source
            return
        from mpi4py import MPI

        given = self._ctx.made_of
        comm: Any = MPI.COMM_WORLD if given is None else given
        if name == "gather":
            comm.Allgather(source.view(np.uint8), target.view(np.uint8))
        elif name == "scatter":
            comm.Reduce_scatter_block(source, target)
        else:
            comm.Allreduce(MPI.IN_PLACE, target)

    def error(self, y: Array) -> float:
        """Return how far ``y`` is from what ``run()`` returns, relative in the Frobenius norm. Collective."""
        precise = np.dtype(np.float64 if y.dtype.itemsize == 8 else np.float32)
        expected = self.run().astype(precise)
        difference = y.astype(precise) - expected
        squares = [float((each * each).sum()) for each in (difference, expected)]
        return (squares[0] / squares[1]) ** 0.5 if squares[1] else squares[0]
