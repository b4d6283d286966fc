# SPDX-License-Identifier: Apache-2.0
"""Products by "one_kernel" on real GPUs, and a kernel that makes a GPU late."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import pblasmp as pb
from pblasmp.dtypes import DTYPES, FLOAT8, is_float8
from tests.helpers.copy_products import PRODUCTS

FORMS = [form for form, kinds in PRODUCTS.items() if "one_kernel" in kinds]

SLEEP = r"""
extern "C" __global__ void sleep(long long cycles) { long long t = clock64(); while (clock64() - t < cycles) {} }
"""


class Product:
    """A product of small integers, whose sums are exact; operands on the GPU, and what NumPy makes of them.

    Args:
        ctx: on all of whose ranks it is.
        form, sizes: of a rank.
        dtype: of the result.
        operands: the types of X and W, by default the result's.
    """

    def __init__(
        self, ctx: pb.Context, form: str, sizes: tuple[int, int, int], dtype: str = "bfloat16",
        operands: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        import cupy

        t, n, k = sizes
        self.ctx, self.form, self.dtype, size = ctx, form, (DTYPES | FLOAT8)[dtype], ctx.size
        types = [(DTYPES | FLOAT8)[name] for name in operands or (dtype, dtype)]
        self.how: dict[str, Any] = {}
        if operands:
            self.amax = cupy.zeros(1, np.float32)
            unit = cupy.full(1, 0.5, np.float32)
            self.scales = pb.Scales(a=unit, b=2.0, amax=self.amax)
            self.how = {
                "x_dtype": operands[0], "w_dtype": operands[1], "dtype": dtype, "scales": self.scales,
            }  # fmt: skip
        if form in ("allgather_matmul", "matmul_reduce_scatter"):
            t *= size
        if form == "matmul_allgather":
            n = -(-n // 8) * 8  # which it needs
        n = n * size if form in ("allgather_matmul", "matmul_allgather") else n
        k = k * size if form in ("matmul_reduce_scatter", "matmul_allreduce") else k
        rng = np.random.default_rng(n + k)
        x, w = (self._sparse(rng, shape) for shape in ((t, k), (n, k)))
        self.bias = rng.integers(-3, 4, n).astype(float)
        rows, inputs, outputs = (pb.tensor_parallel.shard(count, size, ctx.rank) for count in (t, k, n))
        whole = slice(None)
        if form == "allgather_matmul":
            mine, weights, self.part = (rows, whole), (outputs, whole), (whole, outputs)
        elif form == "matmul_allgather":
            mine, weights, self.part = (whole, whole), (outputs, whole), (whole, whole)
        else:
            mine, weights = (whole, inputs), (whole, inputs)
            self.part = (rows if form == "matmul_reduce_scatter" else whole, whole)
        self.expected = (x @ w.T)[self.part]
        of_bias = outputs if form in ("allgather_matmul", "matmul_allgather") else whole
        self.x, self.w = (
            cupy.asarray(values.view(np.uint8) if is_float8(kind) else values)
            for a, kind in zip((x[mine], w[weights]), types, strict=True)
            for values in [np.ascontiguousarray(a).astype(kind)]
        )
        of_type = DTYPES["bfloat16"] if is_float8(self.dtype) else self.dtype
        self.local_bias = cupy.asarray(self.bias[of_bias].astype(of_type))
        self.bias_here = self.bias[self.part[1]]

    @staticmethod
    def _sparse(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
        """At most 40 numbers a row, so that no sum needs more than 8 bits."""
        values = rng.integers(-2, 3, shape).astype(float)
        return values * (rng.random(shape) < 40 / max(shape[1], 40))

    def __call__(self, **how: Any) -> Any:
        return getattr(pb, self.form)(self.x, self.w, self.ctx, algo="one_kernel", **self.how, **how)

    def check(self, y: Any, expected: Any = None) -> None:
        """Every rank learns of a fault on any."""
        expected, got = self.expected if expected is None else expected, y.get()
        if is_float8(self.dtype):
            most = float(ml_dtypes.finfo(self.dtype).max)
            got, expected = got.view(self.dtype), np.clip(expected, -most, most)
        wrong = int((got.astype(float) != expected.astype(self.dtype).astype(float)).sum())
        assert self.ctx.comm.allgather(wrong) == [0] * self.ctx.size, (self.form, self.x.shape, self.w.shape)
