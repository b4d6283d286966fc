# SPDX-License-Identifier: Apache-2.0
"""Every way of the tensor-parallel functions on GPUs, asked for by name: against NumPy, in graphs, measured."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers import tensor_cases
from tests.helpers.cases import exact
from tests.helpers.copy_products import PRODUCTS
from tests.helpers.epilogues import tanh_gelu
from tests.helpers.factor_cases import random
from tests.helpers.slow import thinned

NAMES = [(form, name) for form, kinds in PRODUCTS.items() for name in kinds]
SUMS = ("matmul_reduce_scatter", "matmul_allreduce")
ONE_KERNEL = ("bfloat16", "float16")
RUNS = thinned(1000)  # of a product whose bits are compared
WORST = {
    "bfloat16": 8e-3, "float16": 2e-3, "float32": 1e-5, "float64": 1e-13, "complex64": 1e-5, "complex128": 1e-13,
}  # fmt: skip


def sixteen_each(total: int, ctx: pb.Context) -> slice:
    """Of a split by which the last rank has the rest."""
    cuts = [*(16 * rank for rank in range(ctx.size)), total]
    return slice(cuts[ctx.rank], cuts[ctx.rank + 1])


class Case(tensor_cases.Case):
    """Operands that are rounded, this rank's parts on its GPU, and what NumPy makes of them."""

    def __init__(
        self, ctx: pb.Context, form: str, dtype: str, *, uneven: bool = False, large: bool = False, **how: Any
    ) -> None:
        sizes = (4096, 2048, 1024) if large else (96, 128, 112)
        how = {"split": sixteen_each if uneven else tensor_cases.shard, "draw": random, **how}
        super().__init__(np.random.default_rng(5), ctx, form, dtype, *sizes, **how)
        tensor_cases.on_gpu(self)
        self.ctx, (self.x, self.w, self.bias) = ctx, map(exact, (self.x, self.w, self.bias))

    def check(self, y: Any, expected: Any, dtype: str | None = None) -> None:
        """Every rank learns of a fault on any."""
        expected = self.of(expected)
        got = self.ctx.engine.to_host(y).astype(expected.dtype)
        error = float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))
        errors = self.ctx.comm.allgather(error if np.isfinite(got).all() else float("inf"))
        assert max(errors) < WORST[dtype or self.dtype.name], errors


@pytest.mark.parametrize(("form", "name"), NAMES)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("dtype", list(WORST))
def test_types_and_sizes(ctx, form, name, dtype, uneven):
    case = Case(ctx, form, dtype, uneven=uneven)
    if name == "one_kernel" and dtype not in ONE_KERNEL:
        with pytest.raises(
            pb.UnsupportedError, match=r"the kernel is for bfloat16, float16|ranks share a GPU"
        ):
            getattr(pb, form)(case.local_x, case.local_w, ctx, algo=name)
        return
    y = getattr(pb, form)(case.local_x, case.local_w, ctx, algo=name)
    case.check(y, case.x @ case.w.T)


@pytest.mark.parametrize(("form", "name"), [*NAMES, *((form, "auto") for form in PRODUCTS)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_epilogues_and_c(ctx, form, name, dtype):
    import cupy

    if name == "one_kernel" and dtype not in ONE_KERNEL:
        pytest.skip("the kernel is for 16-bit types")
    case = Case(ctx, form, dtype)
    function = getattr(pb, form)
    y = function(
        case.local_x, case.local_w, ctx, algo=name, bias=case.local_bias, activation="relu", alpha=0.5
    )
    case.check(y, np.maximum(0.5 * (case.x @ case.w.T) + case.bias, 0))
    out = cupy.ones_like(y)
    if name in ("ring", "one_kernel"):
        with pytest.raises(pb.UnsupportedError, match=r"in place of C|adds no C"):
            function(case.local_x, case.local_w, ctx, algo=name, beta=2, c=out, out=out)
        return
    function(case.local_x, case.local_w, ctx, algo=name, beta=2, c=out, out=out)
    case.check(out, case.x @ case.w.T + 2)


OPTIONS = (
    ("bfloat16", {"transposed": True}, {"alpha": 2, "beta": -1}),
    ("bfloat16", {}, {"activation": "gelu", "beta": 0.5}),
    ("float32", {"uneven": True}, {"activation": "gelu"}),
    ("complex64", {}, {"alpha": 1j, "beta": 1 - 1j}),
    ("bfloat16", {"out_dtype": "float32"}, {}),
    ("bfloat16", {}, {"comm_dtype": "float32", "beta": 1}),
)


@pytest.mark.parametrize(("form", "name"), NAMES)
@pytest.mark.parametrize(("dtype", "made", "how"), OPTIONS, ids=str)
def test_options(ctx, form, name, dtype, made, how):
    """With a bias; what an algorithm cannot compute it refuses: see tests/unit/engines_gpu."""
    if "comm_dtype" in how and form not in SUMS:
        pytest.skip("nothing is summed between ranks")
    case = Case(ctx, form, dtype, **made)
    given = {**how, "algo": name, "bias": case.local_bias, **({"c": case.local_c} if "beta" in how else {})}
    if name in ("ring", "one_kernel"):
        try:
            y = case(ctx, **given)
        except pb.UnsupportedError as error:
            pytest.skip(str(error))
    else:
        y = case(ctx, **given)
    expected = how.get("alpha", 1) * (case.x @ case.w.T) + how.get("beta", 0) * exact(case.c) + case.bias
    expected = tanh_gelu(expected) if "activation" in how else expected
    case.check(y, expected, "bfloat16" if "out_dtype" in made else None)


@pytest.mark.parametrize(("form", "name"), NAMES)
def test_plans_replay_what_they_recorded(ctx, form, name):
    case = Case(ctx, form, "bfloat16", large=True)
    product = case.x @ case.w.T
    with pb.plan(form, case.local_x, case.local_w, ctx, algo=name) as plan:
        assert plan.report().algorithm == name
        for factor in (1, 2, 4):
            y = plan()
            case.check(y, factor * product)
            case.local_x *= 2
        small = Case(ctx, form, "float64")  # other products in between, larger ones too
        getattr(pb, form)(small.local_x, small.local_w, ctx)
        case.check(plan(), 8 * product)
        other = case.local_x.copy()
        other /= 2
        case.check(plan(x=other), 4 * product)
        graph = plan.graph()
        other /= 4
        case.check(graph.replay(), product)


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "push", "ring", "one_kernel"])
def test_allreduce_has_the_same_bits_in_every_run(ctx, name):
    import cupy

    case = Case(ctx, "matmul_allreduce", "bfloat16", large=True)
    with pb.plan(pb.matmul_allreduce, case.local_x, case.local_w, ctx, algo=name) as plan:
        first = plan().view(np.uint16).copy()
        differ = cupy.zeros((), np.int64)
        for _ in range(RUNS):  # compared on the GPU, so that the host never waits
            differ += (plan().view(np.uint16) != first).any()
    bits = zlib.crc32(first.get().tobytes())
    assert ctx.comm.allgather((int(differ), bits)) == [(0, bits)] * ctx.size


def test_gathered_x(ctx):
    case = Case(ctx, "allgather_matmul", "bfloat16", uneven=True)
    y, gathered = pb.allgather_matmul(case.local_x, case.local_w, ctx, return_gathered=True, algo="nccl")
    case.check(y, case.x @ case.w.T)
    np.testing.assert_array_equal(ctx.engine.to_host(gathered).astype(float), case.x)


@pytest.mark.parametrize("form", ["allgather_matmul", *SUMS, "matmul_allgather"])
def test_what_was_measured_is_taken(ctx, form, tmp_path, monkeypatch):
    file = ctx.comm.bcast(str(tmp_path / "tuning.json"))
    monkeypatch.setenv("PBLASMP_TUNING", file)
    case = Case(ctx, form, "bfloat16", large=True)
    found = pb.tune(form, case.local_x, case.local_w, ctx)
    names = {
        name for name, verdict in pb.algorithms(form, case.local_x, case.local_w, ctx).items() if verdict
    }
    assert names.intersection(PRODUCTS[form]) <= set(found.seconds)
    with pb.plan(form, case.local_x, case.local_w, ctx) as plan:
        assert plan.report().algorithm == found.best
        assert "measured on this machine" in str(plan.report())
        case.check(plan(), case.x @ case.w.T)
    if ctx.rank == 0:
        assert json.loads((tmp_path / "tuning.json").read_text())["measurements"]


@pytest.mark.parametrize("algo", ["ring", "push", "one_shot", "auto"])
def test_a_rank_without_inputs(ctx, algo):
    """The inputs may be split in any way."""
    import cupy

    if algo == "ring" and ctx.size != 2:
        pytest.skip("it is for two GPUs")
    rows, cols = 2048, 1024
    x, w = (cupy.ones((n, int(ctx.rank == 0)), np.float32) for n in (rows, cols))
    bias = cupy.arange(cols, dtype=np.float32)
    with pb.plan(pb.matmul_allreduce, x, w, ctx, algo=algo, bias=bias) as plan:
        for _ in range(3):  # the second run records a graph
            y = plan()
        wrong = int((y != 1 + bias).sum())
    assert ctx.comm.allgather(wrong) == [0] * ctx.size
