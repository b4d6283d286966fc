# SPDX-License-Identifier: Apache-2.0
"""``algo`` and ``backward_algo`` of PyTorch's functions, layers and styles: what is named runs, and gives the same."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.runtime.planned import UserCall
from pblasmp.runtime.plans import Plan
from tests.helpers import inside
from tests.helpers.mpi import on_ranks, run_on_one_node, run_torch, starts_ranks
from tests.helpers.slow import in_turn, only_long
from tests.helpers.torch_ranks import (
    PRODUCTS,
    Split,
    compare,
    host,
    import_compiler,
    integers,
    local,
    matmul_local,
    one_function,
    own,
    raises,
    split_matmul_allreduce,
    split_of,
    taken_in_turn,
)

NAMES = {
    "allgather_matmul": {"shared", "gathered", "panels", "pull", "push"},
    "matmul_reduce_scatter": {"shared", "gathered", "panels", "pull", "ring", "push"},
    "matmul_allreduce": {"two_shot", "ring", "sum", "push"},
    "matmul_allgather": {"pull", "push"},
}
KEEP_GATHERED = {"pull", "push"}
Ran = list[tuple[str, str]]


@on_ranks(*only_long(2), 4, runner=run_on_one_node, timeout=300)
def test_with_mpirun(comm: Any) -> None:
    """All cases on one rank, half of them on two ranks, the others on more."""
    with host(comm) as ctx:
        for function, sizes in itertools.product(PRODUCTS, ((8, 12, 16), (7, 13, 10))):
            by_name(ctx, function, sizes)
        cases = table_is_whole, layers, scaled, dtensors, unknown, unlike, styles
        for each in taken_in_turn(cases, size=ctx.size):
            each(ctx)


@starts_ranks
@on_ranks(2, runner=run_torch, timeout=300)
def test_with_torchrun(comm: Any) -> None:
    test_with_mpirun.on_rank(comm)


@contextmanager
def spied() -> Iterator[Ran]:
    """Yield the products that run, each with the algorithm that it takes."""
    ran: Ran = []
    run = getattr(*inside.RUN_AGAIN)

    def run_with(plan: Plan[Any], call: UserCall[Any], *more: Any) -> Any:
        ran.append((call.name, plan.report().algorithm))
        return run(plan, call, *more)

    again = Plan.repeat

    def repeat(plan: Plan[Any], call: UserCall[Any], *more: Any) -> Any:
        found = again(plan, call, *more)
        if found is not None:
            ran.append((call.name, plan.report().algorithm))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*inside.RUN_AGAIN, run_with)
        patch.setattr(Plan, "repeat", repeat)
        yield ran


def choices(function: Callable[..., Tensor]) -> Iterator[dict[str, str]]:
    """Every algorithm forward, and every one back."""
    for argument, form in zip(("algo", "backward_algo"), PRODUCTS[function], strict=True):
        for name in sorted(NAMES.get(form, ())):
            yield {argument: name}


def by_name(ctx: pb.Context, function: Callable[..., Tensor], sizes: tuple[int, int, int]) -> None:
    """Results and gradients are those of one process, by the algorithm that was named, or it refuses by name."""
    t, k, n = sizes
    split = split_of(function, ctx, sizes)
    whole = [integers(ctx, 1, t, 3, k), integers(ctx, 2, n, k), integers(ctx, 3, n)]
    forward, back = PRODUCTS[function]
    for how in choices(function):
        ((argument, name),) = how.items()
        product = forward if argument == "algo" else back
        keeps = product != "allgather_matmul" or name in KEEP_GATHERED
        with spied() as ran:
            if keeps:
                one_function(ctx, split._replace(function=partial(function, **how)), whole, 0)
            else:
                frozen(ctx, split, whole, how)
        named = {algorithm for form, algorithm in ran if form == product}
        assert named == {name}, f"{how}: {ran}"
        if not keeps:
            with pytest.raises(
                pb.UnsupportedError, match=f"algo '{name}': it does not return the gathered X"
            ):
                one_function(ctx, split._replace(function=partial(function, **how)), whole, 0)


def frozen(ctx: pb.Context, split: Split, whole: list[Tensor], how: dict[str, str]) -> None:
    """As one_function, without gradients of parameters: nothing that is gathered is kept."""
    x, w, bias = (each[part].clone() for each, part in zip(whole, split[1:4], strict=True))
    whole_x = whole[0].clone().requires_grad_()
    expected = nn.functional.linear(whole_x, *whole[1:])
    y = split.function(x.requires_grad_(), w, ctx, bias=bias, **how)
    compare("y", y, expected[split.y])
    weights = integers(ctx, 4, *expected.shape)
    (expected * weights).sum().backward()
    (y * weights[split.y]).sum().backward()
    assert whole_x.grad is not None
    compare("gradient of x", x.grad, whole_x.grad[split.x])


def table_is_whole(ctx: pb.Context) -> None:
    """The tests above take every name that there is."""
    for form, names in NAMES.items():
        split = split_of(getattr(pt, form), ctx, (8, 12, 16))
        x, w = integers(ctx, 1, 8, 12)[split.x].contiguous(), integers(ctx, 2, 16, 12)[split.w].contiguous()
        with pb.plan(form, x, w, ctx) as plan:
            assert set(pb.algorithms(plan.problem, ctx)) == names, form


# -- layers


class Kind:
    """A way to make a layer: its product and that of its gradient, and which parts it takes and gives."""

    def __init__(self, ctx: pb.Context, make: Any, how: dict[str, bool], form: Callable[..., Tensor]) -> None:
        self.make, self.how, self.form = make, how, form
        self.split = split_of(form, ctx, (8, 12, 16))

    def __call__(self, linear: nn.Linear, ctx: pb.Context, **how: Any) -> Any:
        return self.make.from_linear(linear, ctx=ctx, **self.how, **how)


def kinds(ctx: pb.Context) -> Iterator[Kind]:
    column, row = pt.ColumnParallelLinear, pt.RowParallelLinear
    yield Kind(ctx, column, {}, matmul_local)
    yield Kind(ctx, column, {"gather_output": True}, pt.matmul_allgather)
    yield Kind(ctx, column, {"sequence_parallel": True}, pt.allgather_matmul)
    yield Kind(ctx, row, {}, pt.matmul_allreduce)
    yield Kind(ctx, row, {"input_is_parallel": False}, split_matmul_allreduce)
    yield Kind(ctx, row, {"sequence_parallel": True}, pt.matmul_reduce_scatter)


def picked(form: Callable[..., Tensor], ctx: pb.Context) -> dict[str, str]:
    """A name for each direction, of those that "auto" would not take here, and that keep what is gathered."""
    how = {}
    for argument, product in zip(("algo", "backward_algo"), PRODUCTS[form], strict=True):
        names = {
            "allgather_matmul": "push", "matmul_reduce_scatter": "push", "matmul_allreduce": "ring",
            "matmul_allgather": "push",
        }  # fmt: skip
        if product:
            how[argument] = names[product]
    return how


def expected_runs(form: Callable[..., Tensor], how: dict[str, str]) -> Ran:
    pairs = zip(PRODUCTS[form], ("algo", "backward_algo"), strict=True)
    return [(product, how[argument]) for product, argument in pairs if product]


def whole_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(12, 16, dtype=torch.float64)


def layers(ctx: pb.Context) -> None:
    """What a layer names runs forward and back, under autocast too, with the gradients of "auto"; repr shows it."""
    linear, whole = whole_linear(), integers(ctx, 1, 8, 12)
    for kind in kinds(ctx):
        how = picked(kind.form, ctx)
        for autocast in (False, True):
            results = []
            for names in ({}, how):
                layer = kind(linear, ctx, **names)
                x = whole[kind.split.x].clone().requires_grad_()
                with spied() as ran, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    y = layer(x)
                    y.double().square().sum().backward()
                results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
            assert ran == expected_runs(kind.form, how), f"{kind.how} {how}: {ran}"
            for got, expected in zip(results[1], results[0], strict=True):
                compare(f"{kind.how}", got, local(expected), 3e-2 if autocast else 1e-14)
        shown = repr(layer)
        for name, value in how.items():
            assert f", {name}='{value}'" in shown, shown
        assert "algo" not in repr(kind(linear, ctx))
        assert (layer.algo, layer.backward_algo) == (
            how.get("algo", "auto"),
            how.get("backward_algo", "auto"),
        )
        made = kind.make(12, 16, ctx=ctx, **kind.how, **how)
        assert repr(made) == shown
        assert (copy.deepcopy(layer).algo, copy.deepcopy(layer).backward_algo) == (
            layer.algo, layer.backward_algo,
        )  # fmt: skip


def scaled(ctx: pb.Context) -> None:
    """Products of 8 bits by every algorithm, forward and back."""
    for function in PRODUCTS:
        split = split_of(function, ctx, (16, 32, 48))
        draw = torch.Generator().manual_seed(1)
        x, w = torch.randn(16, 32, generator=draw), torch.randn(48, 32, generator=draw)

        def run(split: Split = split, x: Tensor = x, w: Tensor = w, **how: str) -> list[Tensor]:
            mine = [each[part].clone().requires_grad_() for each, part in ((x, split.x), (w, split.w))]
            y = split.function(*mine, ctx, scales=pt.DelayedScaling(amax_history_len=1), **how)
            (y * y.detach()).sum().backward()
            return [y, *(each.grad for each in mine)]

        expected = run()
        for how in choices(function):
            ((argument, name),) = how.items()
            product = PRODUCTS[function][argument == "backward_algo"]
            if product == "allgather_matmul" and name not in KEEP_GATHERED:
                raises(f"algo '{name}': ", run, kind=pb.UnsupportedError, **how)
                continue
            with spied() as ran:
                results = run(**how)
            assert (product, name) in ran, f"{function.__name__} {how}: {ran}"
            for got, wanted in zip(results, expected, strict=True):
                compare(f"{function.__name__} {how}", got, wanted, 2e-2 if argument == "algo" else 2e-5)
        with torch.no_grad(), spied() as ran:
            static = partial(function, ctx=ctx, scales=pb.Scales(a=0.01, b=0.01))
            how = picked(function, ctx)
            how.pop("backward_algo", "")
            y = static(x[split.x].contiguous(), w[split.w].contiguous(), **how)
            assert ran == [(PRODUCTS[function][0], name) for name in how.values()]
            compare("static", y, static(x[split.x].contiguous(), w[split.w].contiguous()), 2e-5)


def dtensors(ctx: pb.Context) -> None:
    mesh = pt.meshes.mesh_of(ctx)
    if mesh is None:
        return
    whole = [integers(ctx, 1, 7, 13), integers(ctx, 2, 10, 13)]
    x, w = (distribute_tensor(each, mesh, [Shard(0)]).requires_grad_() for each in whole)
    with spied() as ran:
        y = pt.allgather_matmul(x, w, ctx, algo="push", backward_algo="ring")
        compare("y", y.full_tensor(), whole[0] @ whole[1].t())
        y.sum().backward()
    assert ran == [("allgather_matmul", "push"), ("matmul_reduce_scatter", "ring")]
    compare("gradient", x.grad.full_tensor(), whole[1].sum(0).expand(7, 13))


def styles(ctx: pb.Context) -> None:
    mesh = pt.meshes.mesh_of(ctx)
    linear, x = whole_linear(), integers(ctx, 1, 8, 12)
    whole = Replicate()
    for style, form, layouts in (
        (pt.ColwiseParallel, matmul_local, {}),
        (pt.ColwiseParallel, pt.matmul_allgather, {"output_layouts": whole}),
        (pt.ColwiseParallel, pt.allgather_matmul, {"input_layouts": Shard(0)}),
        (pt.RowwiseParallel, pt.matmul_allreduce, {}),
        (pt.RowwiseParallel, split_matmul_allreduce, {"input_layouts": whole}),
        (pt.RowwiseParallel, pt.matmul_reduce_scatter, {"output_layouts": Shard(0)}),
    ):
        split, how = split_of(form, ctx, (8, 12, 16)), picked(form, ctx)
        layer = parallelize_module(copy.deepcopy(linear), mesh, style(ctx=ctx, **layouts, **how))
        with spied() as ran:
            mine = x[split.x].clone().requires_grad_()
            y = layer(mine)
            y.sum().backward()
        assert ran == expected_runs(form, how)
        compare("y", y, linear(x)[split.y], 1e-14)
    for argument in ("algo", "backward_algo"):
        with pytest.raises(
            pb.UnsupportedError, match=f"{argument}: expected 'auto' for a torch.nn.Embedding"
        ):
            parallelize_module(nn.Embedding(8, 4), mesh, pt.RowwiseParallel(ctx=ctx, **{argument: "push"}))


# -- errors


def unknown(ctx: pb.Context) -> None:
    """A wrong name is refused on every rank, even if only one rank gives it, and the context stays usable."""
    last = ctx.rank == ctx.size - 1
    for function, products in PRODUCTS.items():
        split = split_of(function, ctx, (8, 12, 16))
        x, w = integers(ctx, 1, 8, 12)[split.x].contiguous(), integers(ctx, 2, 16, 12)[split.w].contiguous()
        for argument, product in zip(("algo", "backward_algo"), products, strict=True):
            if not product:
                continue
            match = f"^.*{argument}: the host engine has 'auto', .*'push'.* here, got 'nope'"
            one_alone = (
                "nope" if last or function is matmul_local else "auto"
            )  # which is at nothing of all ranks
            for mine in ("nope", one_alone):
                raises(match, function, x, w, ctx, kind=pb.UnsupportedError, **{argument: mine})
            for wrong in (3, None):
                with pytest.raises(pb.ArgumentError, match=f"{argument}: expected a string, got {wrong}"):
                    function(x, w, ctx, **{argument: wrong})
        compare("afterwards", function(x, w, ctx), function(x, w, ctx, **picked(function, ctx)))
    for kind in kinds(ctx):
        make = partial(kind.make, 12, 16, ctx=ctx, **kind.how)
        for argument, product in zip(("algo", "backward_algo"), PRODUCTS[kind.form], strict=True):
            if not product:
                way = "forward" if argument == "algo" else "backward"
                match = (
                    f"{argument}: expected 'auto', got 'push': in this {way} pass each rank multiplies alone"
                )
                raises(match, make, kind=pb.UnsupportedError, **{argument: "push"})
                continue
            match = f"{argument}: the host engine has 'auto', .*'push'.* here, got 'nope'"
            for mine in ("nope", "nope" if last else "push"):
                raises(match, make, kind=pb.UnsupportedError, **{argument: mine})
            raises(f"{argument}: expected a string, got 1.0", make, **{argument: 1.0 if last else "push"})
            raises(argument, make, kind=pb.RankMismatchError, **{argument: "push" if last else "auto"})


def unlike(ctx: pb.Context) -> None:
    """Ranks that name different algorithms are told so, on the way back too."""
    x, w = integers(ctx, 1, 8, 12), integers(ctx, 2, 16, 12)
    mine = "push" if ctx.rank else "ring"
    raises("algo='push'", pt.matmul_allreduce, x, w, ctx, kind=pb.RankMismatchError, algo=mine)
    y = matmul_local(x.clone().requires_grad_(), w, ctx, backward_algo=mine)
    raises("algo='push'", y.sum().backward, kind=pb.RankMismatchError)


@on_ranks(2)
def test_algorithms_that_refuse(comm: Any) -> None:
    """An algorithm that refuses the product raises that on every rank, forward and back: nothing else is taken."""
    os.environ["PBLASMP_RANKS_PER_NODE"] = "1"
    try:
        with host(comm) as ctx:
            linear, x = whole_linear(), integers(ctx, 1, 8, 12)
            row = pt.RowParallelLinear.from_linear(linear, ctx=ctx, algo="two_shot")
            raises(r"algo 'two_shot': .*share no memory", row, x[:, row.shard], kind=pb.UnsupportedError)
            column = pt.ColumnParallelLinear.from_linear(linear, ctx=ctx, backward_algo="two_shot")
            y = column(x.requires_grad_())
            compare("y", y, linear(x)[:, column.shard], 1e-14)
            raises(r"algo 'two_shot': .*share no memory", y.sum().backward, kind=pb.UnsupportedError)
    finally:
        del os.environ["PBLASMP_RANKS_PER_NODE"]


@on_ranks(2)
def test_measuring_in_the_first_pass(comm: Any, tuning_file: str) -> None:
    """``algo="measure"``, as of the functions of pblasmp."""
    with host(comm) as ctx:
        layer = pt.RowParallelLinear(12, 16, ctx=ctx, algo="measure")
        layer(torch.ones(8, 12)[:, layer.shard])
        assert len(ctx.engine.measured.entries) == 1


# -- torch.compile


@starts_ranks
@on_ranks(2, runner=run_on_one_node, timeout=500, launch=True, backend="aot_eager")
def test_compiled(comm: Any, backend: str) -> None:
    """torch.compile without a graph break: what is named runs, and what there is not is refused when it runs."""
    import_compiler()
    with host(comm) as ctx:
        for number, kind in enumerate(kinds(ctx)):
            for scales in in_turn((None, pt.DelayedScaling(amax_history_len=1)), keep=2, first=number):
                one_compiled(ctx, kind, scales, backend)
        compiled_unknown(ctx, backend=backend)


def one_compiled(ctx: pb.Context, kind: Kind, scales: Any, backend: str) -> None:
    torch._dynamo.reset()
    how = picked(kind.form, ctx)
    eager = kind(whole_linear().float(), ctx, scales=scales, **how)
    other = copy.deepcopy(eager)
    fast = torch.compile(other, backend=backend, fullgraph=True)
    results = []
    for run, layer in ((eager, eager), (fast, other)):
        x = integers(ctx, 1, 8, 12, dtype=torch.float32)[kind.split.x].clone().requires_grad_()
        with spied() as ran:
            y = run(x)
            y.square().sum().backward()
        assert ran == expected_runs(kind.form, how), f"{ran}"
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for got, expected in zip(*reversed(results), strict=True):
        compare("compiled", got, local(expected), 1e-6)


def compiled_unknown(ctx: pb.Context, backend: str) -> None:
    torch._dynamo.reset()
    x, w = integers(ctx, 1, 8, 12).requires_grad_(), integers(ctx, 2, 16, 12)
    fast = torch.compile(pt.matmul_allreduce, backend=backend, fullgraph=True)
    with pytest.raises(pb.UnsupportedError, match=r"algo: the host engine has 'auto', .*, got 'nope'"):
        fast(x, w, ctx, algo="nope")
    fast = torch.compile(pt.matmul_allgather, backend=backend, fullgraph=True)
    mine = w[own(16, ctx)].clone()
    y = fast(x, mine, ctx, backward_algo="nope")
    raises(r"algo: the host engine has 'auto', .*, got 'nope'", y.sum().backward, kind=pb.UnsupportedError)
