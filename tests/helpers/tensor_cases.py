# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products for tests on ranks: whole matrices on every rank, and what the rank has of them."""

from __future__ import annotations

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import DTYPES
from tests.helpers.cases import exact, numbers
from tests.helpers.epilogues import tanh_gelu

FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")
SPLITS = {  # what is split over the ranks: x, w and the result, as (tokens, outputs, inputs)
    "allgather_matmul": ("t", "n", "n"),
    "matmul_reduce_scatter": ("k", "k", "t"),
    "matmul_allreduce": ("k", "k", ""),
    "matmul_allgather": ("", "n", ""),
}


def shard(n, comm):
    return pb.tensor_parallel.shard(n, comm.size, comm.rank)


def other_split(n, comm):
    """Not by the rule: the first rank has most."""
    starts = [0, *(n - (comm.size - r) // 2 for r in range(1, comm.size)), n]
    return slice(max(0, starts[comm.rank]), max(0, starts[comm.rank + 1]))


class Case:
    """One product: whole matrices on every rank, and this rank's parts of them."""

    def __init__(
        self,
        rng,
        comm,
        form,
        dtype,
        t,
        n,
        k,
        *,
        lead=(),
        split=shard,
        out_dtype=None,
        transposed=False,
        draw=numbers,
    ):
        """X is (t, *lead, k) and W (n, k); integers that are exact in every type, or what else is drawn."""
        self.form, self.dtype = form, np.dtype(DTYPES[dtype])
        self.out_dtype = np.dtype(DTYPES[out_dtype or dtype])
        self.transposed = transposed
        self.x, self.w = draw(rng, (t, *lead, k), self.dtype), draw(rng, (n, k), self.dtype)
        self.c = draw(rng, (t, *lead, n), self.out_dtype)
        self.bias = draw(rng, (n,), self.out_dtype)
        cut = {"t": (0, split(t, comm)), "n": (0, split(n, comm)), "k": (-1, split(k, comm))}
        out = {"t": (0, shard(t, comm)), "n": (-1, split(n, comm)), "": (0, slice(None))}
        everything = (0, slice(None))
        of_x, of_w, of_y = SPLITS[form]
        self._out = out[of_y]
        self.local_x = self._part(self.x, cut.get(of_x, everything))
        self.local_w = self._part(self.w, cut.get(of_w, everything))
        if transposed:
            self.local_w = np.ascontiguousarray(self.local_w.T)
        self.local_c = self.of(self.c)
        self.local_bias = self._part(self.bias, cut["n"]) if of_w == "n" else self.bias

    @staticmethod
    def _part(whole, cut):
        axis, where = cut
        return (whole[where] if axis == 0 else whole[..., where]).copy()

    def of(self, whole):
        """This rank's part of what is like the result."""
        return self._part(whole, self._out)

    def expected(self, alpha=1, beta=0, *, bias=False):
        y = alpha * (exact(self.x) @ exact(self.w).T)
        y = y + beta * exact(self.c) if beta else y
        y = y + exact(self.bias) if bias else y
        return self.of(y.astype(self.out_dtype))

    def __call__(self, ctx, **how):
        if self.out_dtype != self.dtype:
            how.setdefault("dtype", self.out_dtype.name)
        return getattr(pb, self.form)(self.local_x, self.local_w, ctx, transposed=self.transposed, **how)


def sizes(comm):
    p = comm.size
    yield 4 * p, 6 * p, 5 * p  # even
    yield 3 * p + 1, 2 * p + 1, 4 * p + 1  # uneven
    yield p + 1, p + 1, p + 1  # empty last shards from 4 ranks on
    yield 1, 1, 1
    yield 0, 3, 2
    yield 3, 0, 2
    yield 3, 2, 0
    yield 5, 600 * p + 1, 3  # several panels


def check_gelu(ctx, case):
    """Fail unless bias and GELU after a product of small numbers are NumPy's."""
    found = np.asarray(case(ctx, alpha=0.1, bias=case.local_bias, activation="gelu"))
    y = 0.1 * (case.x @ case.w.T) + case.bias
    worst = np.abs(found - case.of(tanh_gelu(y))).max(initial=0)
    assert worst < 1e-13, f"{case.form} of {case.x.shape}"


def on_gpu(case: Case) -> Case:
    """Move a case's arrays to the GPU that is played."""
    import cupy

    for name in ("local_x", "local_w", "local_c", "local_bias"):
        setattr(case, name, cupy.asarray(getattr(case, name)))
    return case
