# SPDX-License-Identifier: Apache-2.0
"""Functions and layers of PyTorch split over CPU ranks give what one process gives, with mpirun and with torchrun."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.torch import float8, meshes, operators
from tests.helpers import inside
from tests.helpers.mpi import ROOT, on_ranks, run_torch, starts_ranks
from tests.helpers.pairs import pairs
from tests.helpers.slow import only_long
from tests.helpers.torch_ranks import (
    PRODUCTS,
    TOLERANCE,
    UNEVEN,
    Mlp,
    compare,
    device,
    host,
    integers,
    local,
    matmul_local,
    one_function,
    own,
    raises,
    split_matmul_allreduce,
    splits,
    taken_in_turn,
)


@on_ranks(
    1, *only_long(2, 4), (4, "interleaved:2"), *only_long((4, "blocks:2"), (2, "blocks:2")), timeout=300
)
def test_with_mpirun(comm: Any) -> None:
    """Functions; and all layers and ways to train on one rank, half of them on two ranks, the others on more."""
    functions_and_layers(comm)
    training(comm)


@starts_ranks
@on_ranks(2, *only_long(4), runner=run_torch, timeout=300)
def test_with_torchrun(comm: Any) -> None:
    test_with_mpirun.on_rank(comm)


def functions_and_layers(comm: Any) -> None:
    with host(comm) as ctx:
        for sizes in ((8, 12, 16), *UNEVEN):
            functions(ctx, sizes, torch.float64)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            functions(ctx, (8, 12, 16), dtype)
        for each in taken_in_turn(LAYERS, size=ctx.size):
            each(ctx)


def training(comm: Any) -> None:
    with host(comm) as ctx:
        models = *((Mlp, sizes) for sizes in ((8, 12, 16), *UNEVEN)), (Attention, (8, 12, 16))
        kinds = (torch.float64, torch.float32), (False, True), models
        for dtype, sequence_parallel, (model, sizes) in pairs(*kinds):
            ten_steps(ctx, model, sizes, sequence_parallel, dtype)


# -- functions


def functions(ctx: pb.Context, sizes: tuple[int, int, int], dtype: torch.dtype, tolerance: float = 0) -> None:
    """Every function against PyTorch on whole arrays: integers, so that all is equal as long as they are small."""
    t, k, n = sizes
    for split in splits(ctx, sizes):
        for lead, has_bias in (((), True), ((3,), True), ((2, 1), False)):
            whole = [
                integers(ctx, 1, t, *lead, k, dtype=dtype),
                integers(ctx, 2, n, k, dtype=dtype),
                *([integers(ctx, 3, n, dtype=dtype)] if has_bias else []),
            ]
            one_function(ctx, split, whole, tolerance)


# -- layers


def column_and_row(ctx: pb.Context, sequence_parallel: bool, k: int = 12, n: int = 16) -> tuple[Any, ...]:
    """Two layers of integers, whole and split."""
    up, down = whole_linear(ctx, 5, k, n), whole_linear(ctx, 6, n, k)
    return (
        up,
        down,
        pt.ColumnParallelLinear.from_linear(up, ctx=ctx, sequence_parallel=sequence_parallel),
        pt.RowParallelLinear.from_linear(down, ctx=ctx, sequence_parallel=sequence_parallel),
    )


def whole_linear(ctx: pb.Context, seed: int, k: int, n: int) -> nn.Linear:
    linear = nn.Linear(k, n, dtype=torch.float64, device=device(ctx))
    with torch.no_grad():
        linear.weight.copy_(integers(ctx, seed, n, k))
        linear.bias.copy_(integers(ctx, seed + 100, n))
    return linear


def compare_gradients(name: str, split: Any, whole: nn.Linear) -> None:
    part = split.shard
    expected = (
        None
        if whole.weight.grad is None
        else whole.weight.grad[part if inside.split(split) == 0 else (..., part)]
    )
    compare(f"{name}.weight", split.weight.grad, expected)
    grad = whole.bias.grad
    compare(
        f"{name}.bias", split.bias.grad, grad[part] if grad is not None and inside.split(split) == 0 else grad
    )


def partly_frozen(ctx: pb.Context) -> None:
    """Only what needs a gradient gets one, whatever else does."""
    for sequence_parallel in (False, True):
        tokens = own(8, ctx) if sequence_parallel else slice(None)
        for needs in range(32):
            up, down, split_up, split_down = column_and_row(ctx, sequence_parallel)
            for pair in ((up, down), (split_up, split_down)):
                for i, p in enumerate((pair[0].weight, pair[0].bias, pair[1].weight, pair[1].bias)):
                    p.requires_grad_(bool(needs >> i & 1))
            whole = integers(ctx, 7, 8, 12).requires_grad_(bool(needs >> 4 & 1))
            x = whole.detach()[tokens].clone().requires_grad_(whole.requires_grad)
            expected, y = down(up(whole).relu()), split_down(split_up(x).relu())
            assert y.requires_grad == expected.requires_grad
            if not needs:
                continue
            expected.square().sum().backward()
            y.square().sum().backward()
            compare(f"{needs}: x", x.grad, None if whole.grad is None else whole.grad[tokens])
            compare_gradients(f"{needs}: up", split_up, up)
            compare_gradients(f"{needs}: down", split_down, down)


def used_twice(ctx: pb.Context) -> None:
    """One pair of layers twice in one graph."""
    for sequence_parallel in (False, True):
        up, down, split_up, split_down = column_and_row(ctx, sequence_parallel)
        tokens = own(8, ctx) if sequence_parallel else slice(None)
        whole = integers(ctx, 7, 8, 12).requires_grad_()
        x = whole.detach()[tokens].clone().requires_grad_()
        once, split_once = down(up(whole).relu()), split_down(split_up(x).relu())
        expected, y = down(up(once).relu()) + once, split_down(split_up(split_once).relu()) + split_once
        compare("y", y, expected[tokens])
        expected.sum().backward()
        y.sum().backward()  # an expanded gradient, all its strides 0
        compare("x", x.grad, whole.grad[tokens])
        compare_gradients("up", split_up, up)
        compare_gradients("down", split_down, down)


def accumulated(ctx: pb.Context) -> None:
    """Gradients of several steps add up; a graph that is kept goes back twice."""
    for sequence_parallel in (False, True):
        up, down, split_up, split_down = column_and_row(ctx, sequence_parallel)
        tokens = own(8, ctx) if sequence_parallel else slice(None)
        for seed in (7, 8, 9):
            whole = integers(ctx, seed, 8, 12)
            losses = down(up(whole)).sum(), split_down(split_up(whole[tokens])).sum()
            for loss in losses:
                loss.backward(retain_graph=True)
                loss.backward()
        compare_gradients("up", split_up, up)
        compare_gradients("down", split_down, down)


def values_of_rank_0(ctx: pb.Context) -> None:
    """Shards come from rank 0's layer or generator; state_dict holds shards."""
    torch.manual_seed(3)
    expected = nn.Linear(13, 10)
    after = torch.rand(1)
    torch.manual_seed(3 + ctx.rank)
    column = pt.ColumnParallelLinear(13, 10, ctx=ctx)
    part = column.shard
    compare("weight", column.weight.cpu(), expected.weight[part])
    compare("bias", column.bias.cpu(), expected.bias[part])
    if ctx.rank == 0:
        compare("the generator", torch.rand(1), after)
    torch.manual_seed(3)
    column.reset_parameters()
    compare("weight, drawn again", column.weight.cpu(), expected.weight[part])
    other = nn.Linear(13, 10, bias=False)
    row = pt.RowParallelLinear.from_linear(other, ctx=ctx)
    values = other.weight.detach() if ctx.rank == 0 else torch.empty(10, 13)
    ctx.comm.bcast_into(values.numpy(), 0)
    compare("weight of rank 0", row.weight.cpu(), values[:, row.shard])
    assert row.bias is None
    state = {name: value.clone() for name, value in column.state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == {"weight": (10, 13), "bias": (10,)}
    assert {name: local(value).shape for name, value in state.items()} == {
        "weight": (part.stop - part.start, 13),
        "bias": (part.stop - part.start,),
    }
    column.reset_parameters()
    column.load_state_dict(state)
    compare("weight, loaded", column.weight.cpu(), expected.weight[part])
    for plain in (expected.state_dict(), {name: local(value) for name, value in state.items()}):
        column.reset_parameters()
        column.load_state_dict(plain)
        compare("weight, of a plain tensor", column.weight.cpu(), expected.weight[part])
        compare("bias, of a plain tensor", column.bias.cpu(), expected.bias[part])
    for parameter, dim in ((column.weight, 0), (column.bias, 0), (row.weight, 1)):
        assert parameter.tensor_model_parallel
        assert (parameter.partition_dim, parameter.partition_stride) == (dim, 1)
    assert not pt.RowParallelLinear(3, 4, ctx=ctx).bias.tensor_model_parallel
    copied = copy.deepcopy(column)
    assert copied.ctx is ctx
    pointers = [local(each.weight).data_ptr() for each in (copied, column)]
    assert pointers[0] != pointers[1] or not local(column.weight).numel()
    raises(r"a Context cannot be pickled.*state_dict\(\)", pickle.dumps, column, kind=TypeError)
    assert "out_features=10" in repr(column)
    assert f"ranks={ctx.size}" in repr(column)


def autocast(ctx: pb.Context) -> None:
    """Layers of float32 compute in the type that autocast asks for; gradients are float32."""
    where = device(ctx)
    up, _, split_up, _ = column_and_row(ctx, False)
    x = integers(ctx, 7, 8, 12) / 3
    with torch.autocast(where.type, torch.bfloat16):
        compare("float64 stays", split_up(x), up(x)[..., split_up.shard], 1e-13)
    for dtype in (torch.bfloat16, torch.float16):
        for sequence_parallel in (False, True):
            up, down, split_up, split_down = (m.float() for m in column_and_row(ctx, sequence_parallel))
            tokens = own(8, ctx) if sequence_parallel else slice(None)
            whole = integers(ctx, 7, 8, 12, dtype=torch.float32).requires_grad_()
            x = whole.detach()[tokens].clone().requires_grad_()
            with torch.autocast(where.type, dtype):
                expected, y = down(up(whole) / 16), split_down(split_up(x) / 16)
            assert y.dtype == dtype
            compare("y", y, expected[tokens], TOLERANCE[dtype])
            expected.float().sum().backward()
            y.float().sum().backward()
            compare("x", x.grad, whole.grad[tokens], TOLERANCE[dtype])
            compare("weight", split_up.weight.grad, up.weight.grad[split_up.shard], TOLERANCE[dtype])


def strided(ctx: pb.Context) -> None:
    """Inputs and gradients that are not contiguous."""
    up, down, split_up, split_down = column_and_row(ctx, False)
    whole = integers(ctx, 7, 8, 3, 12).requires_grad_()
    x = whole.detach().clone().requires_grad_()
    expected, y = (
        b(a(z.transpose(0, 1)).relu()).transpose(0, 1)
        for a, b, z in ((up, down, whole), (split_up, split_down, x))
    )
    compare("y", y, expected)
    weights = integers(ctx, 8, 12, 3, 8).permute(2, 1, 0)
    (expected * weights).sum().backward()
    (y * weights).sum().backward()
    compare("x", x.grad, whole.grad)
    compare_gradients("up", split_up, up)
    compare_gradients("down", split_down, down)
    everything, replicated = whole_linear(ctx, 9, 12, 10), integers(ctx, 7, 12, 8).t()
    gathers = pt.ColumnParallelLinear.from_linear(everything, ctx=ctx, gather_output=True)
    splits = pt.RowParallelLinear.from_linear(everything, ctx=ctx, input_is_parallel=False)
    compare("all outputs", gathers(replicated), everything(replicated))
    compare("own inputs", splits(replicated), everything(replicated))


def one_row(ctx: pb.Context) -> None:
    """An input of one dimension, where rows are not split; on one rank, PyTorch's own check of all functions."""
    for function, dim in ((pt.matmul_allreduce, 1), (pt.matmul_allgather, 0)):
        whole = [integers(ctx, 1, 12).requires_grad_(), integers(ctx, 2, 10, 12).requires_grad_()]
        part = (..., own((10, 12)[dim], ctx))
        x = whole[0].detach()[part if dim else ...].clone().requires_grad_()
        w = (whole[1][part] if dim else whole[1][part[1]]).detach().clone().requires_grad_()
        expected, y = nn.functional.linear(*whole), function(x, w, ctx)
        compare("y", y, expected)
        expected.sum().backward()
        y.sum().backward()
        compare("x", x.grad, whole[0].grad[part if dim else ...])
        compare("w", w.grad, whole[1].grad[part] if dim else whole[1].grad[part[1]])
    if ctx.size == 1:
        for function in PRODUCTS:
            values = [
                torch.randn(shape, dtype=torch.float64, device=device(ctx))
                for shape in ((4, 2, 5), (3, 5), (3,))
            ]
            operands = [value.requires_grad_() for value in values]
            assert torch.autograd.gradcheck(lambda x, w, b, f=function: f(x, w, ctx, bias=b), operands)


class FakeStream:
    """A stream of a GPU that writes down what is asked of it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_event(self) -> str:
        self.log.append("ready")
        return "event"

    def wait_event(self, event: str) -> None:
        self.log.append(f"side waits for {event}")

    def wait_stream(self, _: FakeStream) -> None:
        self.log.append("joined")


@contextmanager
def fake_streams(log: list[str]) -> Iterator[None]:
    """Let tensors of the CPU have two streams; write down when products of several ranks and of one are queued."""

    def logged(module: Any, name: str, text: str) -> None:
        function = getattr(module, name)
        patch.setattr(module, name, lambda *args, **how: log.append(text) or function(*args, **how))

    @contextmanager
    def stream(_: FakeStream) -> Iterator[None]:
        log.append("on side")
        yield
        log.append("off side")

    streams = FakeStream(log), FakeStream(log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "streams_of", lambda _: streams)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(Tensor, "record_stream", lambda *_: log.append("recorded"))
        logged(operators, "multiply", "collective")
        patch.setattr(operators, "WORTH_A_STREAM", 0)
        logged(operators, "of_parameters", "weights")
        logged(float8, "scaled_weight", "weights")
        yield


BESIDE = ["ready", "collective", "side waits for event", "on side", "weights", "off side", "joined"]


def weights_beside(ctx: pb.Context) -> None:
    """Going back, the weights' gradient is queued after the collective product, on another stream, and joined."""
    x, w = (integers(ctx, seed, *shape, dtype=torch.float32) for seed, shape in ((1, (8, 12)), (2, (16, 12))))
    tokens, inputs, outputs = (own(extent, ctx) for extent in (8, 12, 16))
    for function, of_x, of_w, expected in (
        (pt.allgather_matmul, tokens, outputs, BESIDE),
        (pt.matmul_allgather, slice(None), outputs, BESIDE),
        (matmul_local, slice(None), outputs, BESIDE),
        (split_matmul_allreduce, slice(None), (..., inputs), BESIDE),
        (pt.matmul_reduce_scatter, (..., inputs), (..., inputs), ["collective", "weights"]),
    ):
        for scales in (None, pt.DelayedScaling().to(x.device)):
            for needs_x in (True, False):
                log: list[str] = []
                mine, weights = x[of_x].clone().requires_grad_(needs_x), w[of_w].clone().requires_grad_()
                y = function(mine, weights, ctx, scales=scales)
                with fake_streams(log):
                    y.sum().backward()
                wanted = expected
                if not needs_x and expected is BESIDE:
                    wanted = ["weights"]
                found = [entry for entry in log if entry != "recorded"]
                assert found == wanted, f"{function.__name__} {scales}: {found}"
                assert ("recorded" in log) == (wanted is BESIDE)


def known(ctx: pb.Context) -> None:
    """Calls that are found without a second reading: what changes between them is seen nevertheless."""
    tokens, inputs = own(8, ctx), own(12, ctx)
    forms = (
        (pt.allgather_matmul, tokens, (own(16, ctx),)),
        (pt.matmul_reduce_scatter, (..., inputs), (..., inputs)),
        (split_matmul_allreduce, slice(None), (..., inputs)),
    )
    for function, of_x, of_w in forms:
        of_y = {0: (..., own(16, ctx)), 1: tokens, 2: slice(None)}[
            [each[0] for each in forms].index(function)
        ]
        room = torch.empty(2 * 8 * 12, dtype=torch.float64, device=device(ctx))
        for turn in range(10):
            x, w = (integers(ctx, 40 + turn + seed, *shape) for seed, shape in ((0, (8, 12)), (20, (16, 12))))
            part, weights = x[of_x], w[of_w].clone()
            cols = part.shape[1]
            # at the same address, at times with rows that are further apart
            mine = room.as_strided(part.shape, (2 * cols if turn % 3 == 1 else cols, 1)).detach().copy_(part)
            needs = turn % 4 > 1, turn % 5 > 2
            for tensor, need in zip((mine, weights), needs, strict=True):
                tensor.requires_grad_(need)
            x.requires_grad_(), w.requires_grad_()
            expected = nn.functional.linear(x, w)
            factors = integers(ctx, 60 + turn, 8, 16)
            (expected * factors).sum().backward()
            with torch.set_grad_enabled(turn != 7):
                y = function(mine, weights, ctx)
            where = f"{function.__name__}, turn {turn}"
            compare(where, y, expected[of_y])
            assert y.requires_grad == (any(needs) and turn != 7), where
            if not y.requires_grad:
                continue
            (y * factors[of_y]).sum().backward()
            for name, tensor, whole, of in (("x", mine, x, of_x), ("w", weights, w, of_w)):
                gradient = whole.grad[of] if tensor.requires_grad else None
                if name == "x" and function is split_matmul_allreduce and gradient is not None:
                    gradient = whole.grad
                compare(f"{where}: gradient of {name}", tensor.grad, gradient)
        assert any(isinstance(found, tuple) and found[0].form for found in ctx.parallel_calls.values())


def refused(ctx: pb.Context) -> None:
    linear = nn.Linear(12, 16)
    how: dict[str, Any] = {"ctx": ctx}
    raises(
        "gather_output",
        lambda: pt.ColumnParallelLinear(12, 16, **how, gather_output=True, sequence_parallel=True),
    )
    raises(
        "input_is_parallel",
        lambda: pt.RowParallelLinear(12, 16, **how, input_is_parallel=False, sequence_parallel=True),
    )
    no_context = {**how, "ctx": None}
    raises("RowParallelLinear: ctx: expected a pblasmp.Context", pt.RowParallelLinear, 16, 12, **no_context)
    raises("linear: 16x12 .*, expected 12x16", pt.ColumnParallelLinear, 16, 12, **how, linear=linear)
    raises("expected .* without bias", pt.RowParallelLinear, 12, 16, False, **how, linear=linear)
    w = torch.ones(4, 12, dtype=torch.complex64, device=device(ctx))
    raises("x: dtype is torch.complex64, expected a real", pt.matmul_allreduce, w, w, ctx)
    raises("w: dtype is torch.int64, expected a real", pt.allgather_matmul, w.real, w.real.long(), ctx)
    raises("w: expected a tensor, got ndarray", pt.matmul_reduce_scatter, w.real, np.ones((4, 12)), ctx)
    raises("x: shape is .., expected 1 dim", pt.matmul_allgather, torch.tensor(1.0), w.real, ctx)
    raises("x: expected a tensor, got list", pt.RowParallelLinear(12, 16, **how), [1.0])
    raises("x: the last .* is 3, expected w's 12", pt.ColumnParallelLinear(12, 16, **how), w.real[:, :3])
    raises("in_features: expected an integer, got '12'", pt.ColumnParallelLinear, "12", 16, **how)
    raises("linear: expected a torch.nn.Linear", pt.ColumnParallelLinear.from_linear, w, ctx=ctx)
    raises("linear: expected a torch.nn.Linear", pt.RowParallelLinear(12, 16, **how).load_linear, w)
    raises("ctx: expected a pblasmp.Context", pt.matmul_allreduce, w.real, w.real, None)
    mine = w.real.long() if ctx.rank == ctx.size - 1 else w.real.contiguous()  # raised on every rank
    raises("x: dtype is torch.int64, expected a real", pt.matmul_allreduce, mine, w.real.contiguous(), ctx)
    if ctx.size > 1:  # raised on every rank, even where the operand is right
        held = torch.ones(1 if ctx.rank == 0 else 3, 12, device=device(ctx))
        words = r": the ranks hold \[1, 3.*, expected \["
        needs = held.clone().requires_grad_()
        raises("x" + words, pt.allgather_matmul, needs, w.real.contiguous(), ctx)
        raises("w" + words, pt.matmul_allgather, w.real.contiguous(), held, ctx)
        last = ctx.rank == ctx.size - 1
        x = torch.ones(4, 13 if last else 12, device=device(ctx))
        raises(
            r"x: shape is \(4, 13\), expected 12",
            lambda: pt.RowParallelLinear(12, 16, **how, input_is_parallel=False)(x),
        )
        dtype = torch.float64 if last else torch.float32
        with pytest.raises(pb.RankMismatchError, match=r"dtype:\n +torch.float32 on rank"):
            pt.ColumnParallelLinear(12, 16, **how, dtype=dtype)


def uneven_gradients(ctx: pb.Context) -> None:
    """Of parts of unlike sizes: with other strides PyTorch before 2.13 accumulates them whole on every rank."""
    _, _, _, down = column_and_row(ctx, False, n=13)
    if ctx.size == 1:
        return  # no DTensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "GRADIENTS_STAY_SPLIT", False)
        (gradient,) = torch.autograd.grad(meshes.local(down.weight).sum(), down.weight)
    assert gradient.placements == down.weight.placements
    assert gradient.stride() == down.weight.stride(), f"{gradient.stride()}, not {down.weight.stride()}"
    compare("gradient", gradient, torch.ones_like(local(down.weight)))


def kept_gradients(ctx: pb.Context) -> None:
    """PyTorch keeps gradients of split parameters without what else it does to compute with DTensors."""
    _, _, _, down = column_and_row(ctx, False)
    if ctx.size == 1:
        return  # no DTensor
    y, ran = down(integers(ctx, 7, 5, 16)[:, own(16, ctx)]), set[str]()
    with torch.autograd.set_multithreading_enabled(False):
        before = sys.getprofile()
        sys.setprofile(lambda frame, *_: ran.add(frame.f_code.co_filename))
        try:
            y.backward(torch.ones_like(y))
        finally:
            sys.setprofile(before)
    assert operators.__file__ in ran
    assert not [name for name in ran if "/torch/distributed/tensor/" in name]
    for parameter in down.parameters():
        assert type(parameter.grad) is DTensor
        assert parameter.grad.placements == parameter.placements


def held_gradients(ctx: pb.Context) -> None:
    """PyTorch copies what something else holds, perhaps on one rank alone: room for that is not dispatched to DTensor.

    Before 2.13 the room for parts of unlike sizes would have all of the gradient, and the ranks would wait.
    """
    up, down, split_up, split_down = column_and_row(ctx, False, n=13)
    if ctx.size == 1:
        return  # no DTensor
    held: dict[str, Tensor] = {}
    whole = integers(ctx, 7, 5, 12)
    parameters = [*split_up.named_parameters("up"), *split_down.named_parameters("down")]
    for name, parameter in parameters if ctx.rank == 0 else ():
        parameter.register_hook(lambda gradient, name=name: held.update({name: gradient}))
    split_down(split_up(whole)).sum().backward()
    down(up(whole)).sum().backward()
    compare_gradients("up", split_up, up)
    compare_gradients("down", split_down, down)
    if ctx.rank:
        return
    ran = set[str]()
    for name, parameter in parameters:
        gradient, before = held[name], sys.getprofile()
        sys.setprofile(lambda frame, *_: ran.add(frame.f_code.co_filename))
        try:
            room = gradient.new_empty_strided(parameter.shape, parameter.stride())
        finally:
            sys.setprofile(before)
        assert type(room) is DTensor, name
        assert (room.placements, local(room).shape) == (parameter.placements, local(parameter).shape), name
        wide = gradient.new_empty_strided(parameter.shape, parameter.stride(), dtype=torch.complex128)
        assert wide.dtype == torch.complex128, name
    assert meshes.__file__ in ran
    assert not [name for name in ran if "/torch/distributed/tensor/" in name]


class Doubled(nn.Module):
    """Twice what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def computed_weight(ctx: pb.Context) -> None:
    """A split layer multiplies by what PyTorch puts in a parameter's place."""
    _, whole, _, down = column_and_row(ctx, False)
    nn.utils.parametrize.register_parametrization(down, "weight", Doubled())
    x = integers(ctx, 7, 5, 16)
    y = down(x[:, own(16, ctx)])
    compare("y", y, 2 * whole(x) - whole.bias)
    y.sum().backward()
    whole(x).sum().backward()
    gradient = down.parametrizations.weight.original.grad
    compare("gradient", gradient, 2 * whole.weight.grad[:, own(16, ctx)])


LAYERS = (
    partly_frozen, used_twice, accumulated, values_of_rank_0, autocast, strided, one_row, weights_beside,
    known, refused, uneven_gradients, kept_gradients, held_gradients, computed_weight
)  # fmt: skip

# -- training


class Attention(nn.Module):
    """Eight heads between split projections; x is sequence × batch × inputs."""

    def __init__(
        self, sizes: tuple[int, int, int], like: Attention | None, ctx: pb.Context, **how: Any
    ) -> None:
        super().__init__()
        _, k, n = sizes
        self.width = n // 8
        if like is None:
            self.q, self.k, self.v = (nn.Linear(k, n, **how) for _ in range(3))
            self.out = nn.Linear(n, k, **how)
        else:
            self.q, self.k, self.v = (
                pt.ColumnParallelLinear.from_linear(each, ctx=ctx, **how) for each in (like.q, like.k, like.v)
            )
            self.out = pt.RowParallelLinear.from_linear(like.out, ctx=ctx, **how)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).permute(1, 2, 0, 3) for layer in (self.q, self.k, self.v)
        )
        heads = (q @ k.transpose(-1, -2) / self.width**0.5).softmax(-1) @ v
        return self.out(heads.permute(2, 0, 1, 3).flatten(-2))


def ten_steps(
    ctx: pb.Context, model: Any, sizes: tuple[int, int, int], sequence_parallel: bool, dtype: torch.dtype
) -> None:
    """Ten steps of momentum: outputs, input gradients, parameters and their gradients as in one process."""
    torch.manual_seed(0)
    whole = model(sizes, None, ctx, dtype=dtype, device=device(ctx))
    split = model(sizes, whole, ctx, sequence_parallel=sequence_parallel)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (whole, split)]
    tokens = own(sizes[0], ctx) if sequence_parallel else slice(None)
    tolerance = TOLERANCE[dtype]
    for step in range(10):
        data = torch.Generator().manual_seed(step)
        x, target = (
            torch.randn(sizes[0], 2, sizes[1], dtype=dtype, generator=data).to(device(ctx)) for _ in range(2)
        )
        mine = x[tokens].clone().requires_grad_()
        x.requires_grad_()
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, y = whole(x), split(mine)
        compare(f"step {step}: y", y, expected[tokens], tolerance)
        (expected - target).square().mean().backward()
        ((y - target[tokens]).square().sum() / target.numel()).backward()
        compare(f"step {step}: gradient of x", mine.grad, x.grad[tokens], tolerance)
        for layer_name, layer in split.named_children():
            like = getattr(whole, layer_name)
            part = layer.shard if inside.split(layer) == 0 else (..., layer.shard)
            compare(
                f"step {step}: gradient of {layer_name}", layer.weight.grad, like.weight.grad[part], tolerance
            )
        for optimizer in optimizers:
            optimizer.step()
    for layer_name, layer in split.named_children():
        like = getattr(whole, layer_name)
        part = layer.shard if inside.split(layer) == 0 else (..., layer.shard)
        compare(f"{layer_name}.weight", layer.weight, like.weight[part], tolerance)
        compare(
            f"{layer_name}.bias",
            layer.bias,
            like.bias[layer.shard] if inside.split(layer) == 0 else like.bias,
            tolerance,
        )


# -- the tests


def test_what_users_call_is_documented():
    import pblasmp.torch

    page = (ROOT / "docs" / "api" / "torch.md").read_text()
    assert all(f":: pblasmp.torch.{name}" in page for name in pblasmp.torch.__all__)
    docs = {name: getattr(pblasmp.torch, name).__doc__ for name in pblasmp.torch.__all__}
    assert not [name for name, doc in docs.items() if "ollective over" not in doc and "Local" not in doc]


def test_a_temporary_tensor_lasts_as_long_as_what_is_over_its_memory():
    from pblasmp.runtime.interop import as_local

    with pb.Context(engine="host") as ctx:
        over = as_local(ctx.engine, torch.full((300, 300), 7.0), "x")
    assert isinstance(over, np.ndarray)
    others = [torch.full((300, 300), 3.0) for _ in range(20)]
    assert (over == 7).all(), others


def test_what_is_missing_is_said():
    script = """
import sys
sys.modules["torch"] = None
try:
    import pblasmp.torch
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pblasmp[torch]" in done.stdout
