# SPDX-License-Identifier: Apache-2.0
"""Epilogues on GPUs against float64 NumPy; PBLASMP_TRACE=1 says which one runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import pblasmp as pb
from tests.helpers.epilogues import KINDS, TOLERANCES, check_epilogue, follow, matrix, part, part_of_d, placed
from tests.helpers.gpu.tables import check_each
from tests.helpers.schemes import AG, AR, MAKERS, RS
from tests.helpers.slow import fewer

APPROXIMATE = 2e-3  # gelu by the GPU's own tanh


def problem(ctx: pb.Context, scheme: str, dtype: str, order: str, ops: str, unit: int) -> pb.MatmulProblem:
    """Parts whose extents are no multiples of the padding of auxiliary arrays, if ``unit`` is not."""
    m, n, k = 3 * unit * ctx.size, 2 * unit * ctx.size, 4 * unit * ctx.size
    if scheme == "gemm":
        grid = pb.Grid.squarest(ctx.size)
        return pb.MatmulProblem.gemm(m, n, k, grid, unit, op_a=ops[0], op_b=ops[1], dtype=dtype, order=order)
    if scheme == AR:
        ops = "TN" if order == "F" else "NT"
    return MAKERS[scheme](m, n, k, ctx.size, *ops, dtype=dtype, order=order)


def each_with(others: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every epilogue with all of these, or where cases are to be few with one of them in turn."""
    for number, kind in enumerate(KINDS):
        yield from ((kind, other) for other in fewer(others, number))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("scheme", [AG, RS, AR, "gemm"])
def test_epilogues_are_right(ctx, scheme, dtype):
    rng = np.random.default_rng(41)

    def cases():
        for kind, (order, unit) in each_with(tuple(itertools.product("CF", (64, 20)))):
            matched = "NT" if order == "C" else "TN"
            ops = matched if unit == 64 else ("NN", "TN", "NT", "TT")[rng.integers(4)]
            p = problem(ctx, scheme, dtype, order, ops, unit)
            tolerance = max(TOLERANCES[dtype], APPROXIMATE if "gelu" in kind and dtype != "float64" else 0)
            beta = float(rng.choice([0.0, 0.0, -0.5])) if scheme != AR else 0.0
            yield partial(check_epilogue, ctx, rng, p, kind, tolerance=tolerance, beta=beta)

    check_each(ctx, cases())


@pytest.mark.parametrize("scheme", [AG, RS])
def test_schemes_are_fused(ctx, scheme):
    """Every epilogue that this version has is computed with the product, under every algorithm.

    Between hosts only those that pblasmp's algorithms compute so.
    """
    rng = np.random.default_rng(42)
    late = {"drelu": 801, "bias_grad": 800 if scheme == RS else 700}

    def cases():
        for kind, algo in each_with(("auto", "default", "no_overlap")):
            if all(word not in kind or ctx.engine.version >= since for word, since in late.items()):
                p = problem(ctx, scheme, "bfloat16", "C", "TN" if "bias_grad_" in kind else "NT", 128)
                yield partial(check_epilogue, ctx, rng, p, kind, fused=True, algo=algo, tolerance=3e-2)

    check_each(ctx, cases())


def gpu(ctx: pb.Context, values: np.ndarray) -> Any:
    return placed(ctx, values)[0]


def test_a_graph_of_an_epilogue_sees_new_biases(ctx):
    p = problem(ctx, AG, "float32", "C", "NT", 64)
    rng = np.random.default_rng(43)
    (a, left), (b, right) = (matrix(ctx, rng.standard_normal(x.shape), x) for x in (p.a, p.b))
    length = part("bias", np.zeros(p.n), p, ctx.rank).size
    bias, aux = gpu(ctx, np.zeros(length, np.float32)), ctx.empty_aux(p.d, "relu")
    epilogue = pb.Epilogue("relu", bias=bias, aux=aux)
    with pb.plan(pb.matmul, a, b, op_b="T", scheme=AG, epilogue=epilogue) as plan:
        graph = plan.graph()
        for _ in range(3):
            whole = rng.standard_normal(p.n).astype(np.float32)
            ctx.engine.from_host(bias.reshape(1, -1), part("bias", whole, p, ctx.rank)[None])
            expected = follow("relu bias", left @ right.T, left, right.T, "C", whole.astype(np.float64)).d
            got = ctx.engine.to_host(graph.replay().local)
            assert np.abs(got - part_of_d(expected, p, ctx.rank)).max() < 1e-3


def test_biases_of_pytorch_are_taken_without_a_copy(ctx):
    p = problem(ctx, AG, "bfloat16", "C", "NT", 64)
    ones = [matrix(ctx, np.ones(x.shape), x)[0] for x in (p.a, p.b)]
    bias = torch.zeros(
        (p.d.local_shape(ctx.rank)[1],), dtype=torch.bfloat16, device=f"cuda:{ctx.engine.device.index}"
    )
    with pb.plan(pb.matmul, *ones, op_b="T", scheme=AG, epilogue=pb.Epilogue(bias=bias)) as plan:
        for value in (p.k, -p.k / 2):  # bfloat16 stores the sums
            bias.fill_(value)
            torch.cuda.synchronize()
            assert (plan().on_host().astype(np.float64) == p.k + value).all()
