# SPDX-License-Identifier: Apache-2.0
"""What would be lost in silence, or make ranks wait for each other, is an error on every rank instead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import pblasmp as pb
import pblasmp.torch as pt
from tests.helpers.cases import agreed_error
from tests.helpers.mpi import run_mpi
from tests.helpers.torch_ranks import Case, failure, host

FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")


# -- gradients


def lost_gradients(comm: Any) -> Iterator[Case]:
    with host(comm) as ctx:
        for form in FORMS:
            yield from lost_by(ctx, form)
        d = pb.MatrixDescriptor((8, 8), (8, 4), pb.Grid(1, ctx.size))
        words = ["local array", "requires a gradient", "pblasmp.torch", "on rank 1"]
        mine = torch.zeros(8, 4, dtype=torch.float64, requires_grad=ctx.rank == 1)
        yield "from_local", agreed_error(ctx, pb.ArgumentError, words, ctx.from_local, mine, d)
        with torch.no_grad():
            assert ctx.from_local(mine, d).shape == (8, 8)


def lost_by(ctx: pb.Context, form: str) -> Iterator[Case]:
    call, last = getattr(pb, form), ctx.rank == 1
    x, w, bias = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)
    y = call(x, w, ctx, bias=bias)
    out, c = torch.empty_like(y), torch.ones_like(y)
    for turn in range(3):  # the first run, and repeated ones
        for name, given in {
            "x": {"x": x.clone().requires_grad_(last)},
            "w": {"w": torch.nn.Parameter(w, requires_grad=not last)},
            "bias": {"bias": bias.clone().requires_grad_()},
            "c": {"c": c.clone().requires_grad_(last), "beta": 1},
            "out": {"out": out.clone().requires_grad_(last)},
        }.items():
            how = {"x": x, "w": w, "bias": bias, **given}
            words = [f"{name}: requires a gradient", f"pblasmp.torch.{form}", "torch.no_grad()"]
            fault = agreed_error(ctx, pb.ArgumentError, words, partial(call, ctx=ctx), **how)
            yield f"{form} {turn}: {name}", fault
            with torch.no_grad():
                assert torch.equal(call(ctx=ctx, **how), y + (name == "c")), (
                    f"{form} {name} without gradients"
                )
        assert torch.equal(call(x, w, ctx, bias=bias), y)
    words = [f"w: requires a gradient, which pblasmp.{form} does not", f"call pblasmp.torch.{form}"]
    parameter = torch.nn.Parameter(w, requires_grad=last)
    for make in (pb.plan, pb.tune):
        fault = agreed_error(ctx, pb.ArgumentError, words, make, call, x, parameter, ctx)
        yield f"{form}: {make.__name__}", fault
    with torch.no_grad():
        split = pt.ColumnParallelLinear(4, 4, ctx=ctx).weight
        words = ["w: a DTensor", "to_local()"]
        yield f"{form}: a DTensor", agreed_error(ctx, pb.ArgumentError, words, call, x, split, ctx)
        plan = pb.plan(call, x, parameter, ctx)
    words = [f"w: requires a gradient, which pblasmp.{form} does not", f"call pblasmp.torch.{form}"]
    with plan:
        yield f"{form}: the run of a plan", agreed_error(ctx, pb.ArgumentError, words, plan)
        yield f"{form}: other arrays", agreed_error(ctx, pb.ArgumentError, words, plan, w=parameter)
        assert torch.equal(plan(w=w), y - 1)


def test_gradients_are_not_lost():
    run_mpi(lost_gradients, 2)
