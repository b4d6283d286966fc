# SPDX-License-Identifier: Apache-2.0
"""Every way of the tensor-parallel functions on GPUs, asked for by name: against NumPy, in graphs, measured."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import DTYPES
from tests.helpers.copy_products import PRODUCTS

NAMES = [(form, name) for form, kinds in PRODUCTS.items() for name in kinds]
SUMS = ("matmul_reduce_scatter", "matmul_allreduce")
ONE_KERNEL = ("bfloat16", "float16")
RUNS = 1000  # of a product whose bits are compared
WORST = {"bfloat16": 8e-3, "float16": 2e-3, "float32": 1e-5, "float64": 1e-13, "complex64": 1e-5}


class Case:
    """Random operands that every rank knows, this rank's parts on its GPU, and what NumPy makes of them."""

    def __init__(
        self, ctx: pb.Context, form: str, dtype: str, *, uneven: bool = False, large: bool = False
    ) -> None:
        import cupy

        self.ctx, self.form, self.kind = ctx, form, DTYPES[dtype]
        t, n, k = (4096, 2048, 1024) if large else (96, 128, 112)
        rng = np.random.default_rng(5)
        self.x, self.w, self.bias = (self._numbers(rng, shape) for shape in ((t, k), (n, k), (n,)))
        tokens, outputs, inputs = (self._part(total, uneven) for total in (t, n, k))
        everything = slice(None)
        mine = {
            "allgather_matmul": (tokens, everything, outputs, everything),
            "matmul_allgather": (everything, everything, outputs, everything),
        }.get(form, (everything, inputs, everything, inputs))
        self.local_x, self.local_w = (
            cupy.asarray(np.ascontiguousarray(x).astype(self.kind))
            for x in (self.x[mine[0], mine[1]], self.w[mine[2], mine[3]])
        )
        self.local_bias = cupy.asarray(self.bias[mine[2]].astype(self.kind))
        rows = (
            pb.tensor_parallel.shard(t, ctx.size, ctx.rank) if form == "matmul_reduce_scatter" else everything
        )
        self.result = rows, (outputs if form == "allgather_matmul" else everything)

    def _numbers(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        values = rng.standard_normal(shape)
        values = values + 1j * rng.standard_normal(shape) if self.kind.kind == "c" else values
        return values.astype(self.kind).astype(complex if self.kind.kind == "c" else float)

    def _part(self, total: int, uneven: bool) -> slice:
        size, rank = self.ctx.size, self.ctx.rank
        cuts = [total * i // size for i in range(size + 1)]
        if uneven and size > 1:
            cuts[1:-1] = [16 * i for i in range(1, size)]
        return slice(cuts[rank], cuts[rank + 1])

    def check(self, y: Any, expected: Any) -> None:
        """Every rank learns of a fault on any."""
        expected = expected[self.result]
        got = y.get().astype(expected.dtype)
        error = float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))
        errors = self.ctx.comm.allgather(error if np.isfinite(got).all() else float("inf"))
        assert max(errors) < WORST[self.kind.name], errors


@pytest.mark.parametrize(("form", "name"), NAMES)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("dtype", list(WORST))
def test_types_and_sizes(ctx, form, name, dtype, uneven):
    case = Case(ctx, form, dtype, uneven=uneven)
    if name == "one_kernel" and dtype not in ONE_KERNEL:
        with pytest.raises(pb.UnsupportedError, match="the kernel is for bfloat16 and float16"):
            getattr(pb, form)(case.local_x, case.local_w, ctx, algo=name)
        return
    y = getattr(pb, form)(case.local_x, case.local_w, ctx, algo=name)
    case.check(y, case.x @ case.w.T)


@pytest.mark.parametrize(("form", "name"), NAMES)
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


@pytest.mark.parametrize(("form", "name"), NAMES)
def test_plans_replay_what_they_recorded(ctx, form, name):
    case = Case(ctx, form, "bfloat16", large=True)
    with pb.plan(form, case.local_x, case.local_w, ctx, algo=name) as plan:
        assert plan.report().algorithm == name
        for factor in (1, 2, 4):
            y = plan()
            case.check(y, factor * (case.x @ case.w.T))
            case.local_x *= 2
        small = Case(ctx, form, "float64")  # other products in between, larger ones too
        getattr(pb, form)(small.local_x, small.local_w, ctx)
        case.check(plan(), 8 * (case.x @ case.w.T))
        other = case.local_x.copy()
        other /= 2
        case.check(plan(x=other), 4 * (case.x @ case.w.T))
        graph = plan.graph()
        other /= 4
        case.check(graph.replay(), case.x @ case.w.T)


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
    np.testing.assert_array_equal(gathered.get().astype(float), case.x)


@pytest.mark.parametrize("form", ["allgather_matmul", *SUMS, "matmul_allgather"])
def test_what_was_measured_is_taken(ctx, form, tmp_path, monkeypatch):
    file = ctx.comm.bcast(str(tmp_path / "tuning.json"))
    monkeypatch.setenv("PBLASMP_TUNING", file)
    case = Case(ctx, form, "bfloat16", large=True)
    found = pb.tune(form, case.local_x, case.local_w, ctx)
    names = {name for name, kind in PRODUCTS[form].items() if kind.ranks in (None, ctx.size)}
    assert names <= set(found.seconds)
    with pb.plan(form, case.local_x, case.local_w, ctx) as plan:
        assert plan.report().algorithm == found.best
        assert "measured on this machine" in str(plan.report())
        case.check(plan(), case.x @ case.w.T)
    if ctx.rank == 0:
        assert json.loads((tmp_path / "tuning.json").read_text())["measurements"]
