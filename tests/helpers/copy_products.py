# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products of the GPU engine by themselves: problems by their sizes, products on a GPU, their runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.engines.gpu.tensor.copy_methods import PRODUCTS as KINDS
from pblasmp.engines.request import Operands, Options
from pblasmp.layout import ParallelProblem

SPLIT = {
    "allgather_matmul": ("tokens", "outputs"),
    "matmul_reduce_scatter": ("tokens", "inputs"),
    "matmul_allreduce": ("inputs",),
    "matmul_allgather": ("outputs",),
}
"""Which extents a form splits over the ranks; of "matmul_reduce_scatter", the tokens of the result."""

PRODUCTS = {form: {kind.name: kind for kind in KINDS if kind.form == form} for form in SPLIT}
"""The products of each form, by their names."""


def problem(
    form: str, size: int, parts: Mapping[str, tuple[int, ...]], dtype: np.dtype, **how: Any
) -> ParallelProblem:
    """Return a product.

    Args:
        form: which one.
        size: number of ranks.
        parts: "tokens", "outputs" and "inputs": of every rank if the form splits them, otherwise a single number.
        dtype: of X, and by default of W and the result.
        how: further attributes.
    """
    of = {name: counts if name in SPLIT[form] else counts * size for name, counts in parts.items()}
    rows = of["tokens"]
    if form == "matmul_reduce_scatter":
        of["tokens"] = (sum(rows),) * size
    elif form == "allgather_matmul":
        rows = (sum(rows),) * size
    how = {"w_dtype": dtype, "out_dtype": dtype} | how
    return ParallelProblem(form, **of, rows=rows, dtype=dtype, **how)


def product(
    gpu: Any, name: str, p: ParallelProblem, options: Options, *, beside_others: bool = False, later: bool = False,
) -> Any:  # fmt: skip
    """Return a product on a GPU without a context, and whose process has other communicators or none, now and later."""
    runtime = SimpleNamespace(
        queueing=lambda what: nullcontext(), beside_others=lambda: beside_others, others_of_late=later
    )
    nccl = SimpleNamespace(take_largest=lambda amax: None)
    session = SimpleNamespace(gpu=gpu, runtime=runtime, nccl=nccl, graphs_pay=len(gpu.domains) == 1)
    return PRODUCTS[p.form][name](session, p, options)


def queue(
    product: Any, x: Any, w: Any, c: Any, out: Any, bias: Any = None, scales: Any = None, gathered: Any = None,
    activation: str | None = None,
) -> None:  # fmt: skip
    """Queue a run."""
    follows = bias is not None or activation is not None
    e = pb.Epilogue(bias=bias, activation=activation) if follows else None
    product._queue(Operands(x, w, c, out, epilogue=e, scales=scales, gathered=gathered))
