# SPDX-License-Identifier: Apache-2.0
"""What would be lost in silence, or make ranks wait for each other, is an error on every rank instead."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrizations, parametrize, prune

import pblasmp as pb
import pblasmp.torch as pt
from tests.helpers.cases import refuses
from tests.helpers.mpi import on_ranks
from tests.helpers.torch_ranks import host, world

FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")


# -- gradients


@on_ranks(2)
def test_gradients_are_not_lost(comm: Any) -> None:
    with host(comm) as ctx:
        for form in FORMS:
            lost_by(ctx, form)
        d = pb.MatrixDescriptor((8, 8), (8, 4), pb.Grid(1, ctx.size))
        words = ["local array", "a gradient is required", "pblasmp.torch", "on rank 1"]
        mine = torch.zeros(8, 4, dtype=torch.float64, requires_grad=ctx.rank == 1)
        refuses(ctx, pb.ArgumentError, words, ctx.from_local, mine, d)
        with torch.no_grad():
            assert ctx.from_local(mine, d).shape == (8, 8)


def lost_by(ctx: pb.Context, form: str) -> None:
    call, last = getattr(pb, form), ctx.rank == 1
    x, w, bias = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)
    y = call(x, w, ctx, bias=bias)
    out, c = torch.empty_like(y), torch.ones_like(y)
    for _ in range(3):  # the first run, and repeated ones
        for name, given in {
            "x": {"x": x.clone().requires_grad_(last)},
            "w": {"w": torch.nn.Parameter(w, requires_grad=not last)},
            "bias": {"bias": bias.clone().requires_grad_()},
            "c": {"c": c.clone().requires_grad_(last), "beta": 1},
            "out": {"out": out.clone().requires_grad_(last)},
        }.items():
            how = {"x": x, "w": w, "bias": bias, **given}
            words = [f"{name}: a gradient is required", f"pblasmp.torch.{form}", "torch.no_grad()"]
            refuses(ctx, pb.ArgumentError, words, partial(call, ctx=ctx), **how)
            with torch.no_grad():
                assert torch.equal(call(ctx=ctx, **how), y + (name == "c")), (
                    f"{form} {name} without gradients"
                )
        assert torch.equal(call(x, w, ctx, bias=bias), y)
    words = [f"w: a gradient is required, which pblasmp.{form} does not", f"call pblasmp.torch.{form}"]
    parameter = torch.nn.Parameter(w, requires_grad=last)
    for make in (pb.plan, pb.tune):
        refuses(ctx, pb.ArgumentError, words, make, call, x, parameter, ctx)
    with torch.no_grad():
        split = pt.ColumnParallelLinear(4, 4, ctx=ctx).weight
        words = ["w: a DTensor", "to_local()"]
        refuses(ctx, pb.ArgumentError, words, call, x, split, ctx)
        plan = pb.plan(call, x, parameter, ctx)
    words = [f"w: a gradient is required, which pblasmp.{form} does not", f"call pblasmp.torch.{form}"]
    with plan:
        refuses(ctx, pb.ArgumentError, words, plan)
        refuses(ctx, pb.ArgumentError, words, plan, w=parameter)
        assert torch.equal(plan(w=w), y - 1)


# -- calls that other ranks do not make


@on_ranks(2)
def test_different_calls(comm: Any) -> None:
    """On contexts that have no layer yet: the first one meets the other ranks in another way."""
    linear = nn.Linear(8, 8)
    layers = {"q": linear, "k": nn.Linear(8, 8)}
    unlike = {"q": linear, "k": nn.Linear(8 + comm.rank, 8)}
    row, fused = pt.RowParallelLinear, pt.FusedColumnParallelLinear

    def dense(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.eye(4, dtype=dtype).to_sparse() if comm.rank else torch.eye(4, dtype=dtype)

    with pytest.raises(pb.ArgumentTypeError, match="initialize: expected a parameter and a function"):
        pt.initialize(linear, nn.init.zeros_)  # type: ignore[arg-type]
    cases = (
        (
            pb.RankMismatchError, ["norm", "ColumnParallelLinear"],
            lambda ctx: ctx.a.norm(), lambda ctx: pt.ColumnParallelLinear(8, 8, ctx=ctx),
        ),
        (
            pb.RankMismatchError, ["eye", "VocabParallelEmbedding"],
            lambda ctx: ctx.eye((4, 4)), lambda ctx: pt.VocabParallelEmbedding(8, 8, ctx=ctx),
        ),
        (
            pb.RankMismatchError, ["RowParallelLinear"],
            lambda ctx: row.from_linear(linear, ctx), lambda ctx: row(8, 8, ctx=ctx),
        ),
        (
            pb.RankMismatchError, ["ColumnParallelLinear", "FusedColumnParallelLinear"],
            lambda ctx: fused.from_linears(layers, ctx=ctx), lambda ctx: pt.ColumnParallelLinear(8, 8, ctx=ctx),
        ),
        (
            pb.RankMismatchError, ["layers", "q, k", "q, v"],
            lambda ctx: fused(8, {"q": 8, "k": 8}, ctx=ctx), lambda ctx: fused(8, {"q": 8, "v": 8}, ctx=ctx),
        ),
    )  # fmt: skip
    zeros = torch.zeros(4, dtype=torch.int64)
    loss, embedded = pt.vocab_parallel_cross_entropy, pt.VocabParallelEmbedding
    wrong_on_rank_1 = (
        (pb.ArgumentError, "linears: expected one number of inputs", lambda ctx: fused.from_linears(unlike, ctx=ctx)),
        (pb.ArgumentError, "in_features: expected", lambda ctx: row(8 - 9 * ctx.rank, 8, ctx=ctx)),
        (pb.ArgumentError, "input_is_parallel: expected True",
         lambda ctx: row(8, 8, ctx=ctx, sequence_parallel=True, input_is_parallel=not ctx.rank)),
        (pb.ArgumentError, "padding_idx: expected -8 to 7",
         lambda ctx: embedded(8, 8, ctx=ctx, padding_idx=8 * ctx.rank)),
        (pb.ArgumentError, "device_mesh: expected a DeviceMesh",
         lambda ctx: row(8, 8, ctx=ctx, device_mesh="tp" if ctx.rank else None)),
        (TypeError, "dtype", lambda ctx: row(8, 8, ctx=ctx, dtype="float32" if ctx.rank else None)),
        (pb.ArgumentError, "out_features: expected", lambda ctx: fused(8, {} if ctx.rank else {"q": 8}, ctx=ctx)),
        (pb.ArgumentError, "expected dense tensors", lambda ctx: loss(dense(), zeros, ctx)),
        (pb.ArgumentError, "words: expected a plain tensor, got one that is torch.sparse",
         lambda ctx: embedded(8, 8, ctx=ctx)(dense(torch.int64))),
        (pb.ArgumentError, "x: a tensor that is torch.sparse_coo",
         lambda ctx: pb.matmul_allreduce(dense(), torch.ones(4, 4), ctx)),
        (pb.ArgumentError, "x: expected a tensor, got one that is torch.sparse_coo",
         lambda ctx: pt.matmul_allgather(dense(), torch.ones(4, 4), ctx)),
        (pb.ArgumentError, "on meta",
         lambda ctx: loss(torch.ones(4, 4, device="meta" if ctx.rank else "cpu"), zeros, ctx)),
        (pb.ArgumentError, "on meta", lambda ctx: embedded(8, 8, ctx=ctx)(zeros.to("meta" if ctx.rank else "cpu"))),
        (KeyError, "a.b", lambda ctx: fused(8, {"a.b" if ctx.rank else "a": 8}, ctx=ctx)),
    )  # fmt: skip
    cases = (*cases, *((error, [word, "on rank 1"], call, call) for error, word, call in wrong_on_rank_1))
    with world(comm):
        for error, words, *calls in cases:
            with host(comm) as ctx:
                ctx.a = ctx.eye((4, 4))
                refuses(ctx, error, words, calls[comm.rank], ctx)
                assert row(8, 8, ctx=ctx).weight.shape == (8, 8)


@on_ranks(2)
def test_backward_alone(comm: Any) -> None:
    """Rank 0 goes back through a layer, rank 1 makes another call."""
    with world(comm), host(comm) as ctx:
        a, x = ctx.eye((4, 4)), torch.ones(4, 16 // comm.size, requires_grad=True)
        whole = torch.ones(4, 16, requires_grad=True)
        mesh = pt.ColumnParallelLinear(8, 8, ctx=ctx).weight.device_mesh
        eight: dict[str, Any] = {"ctx": ctx, "scales": pt.DelayedScaling()}
        for layer, given in (
            (pt.VocabParallelEmbedding(8, 4, ctx=ctx, sequence_parallel=True), torch.arange(8)),
            (pt.RowParallelLinear(16, 16, bias=False, **eight), x),
            (pt.RowParallelLinear(16, 16, sequence_parallel=True, **eight), x),
            (pt.ColumnParallelLinear(16, 16, ctx=ctx, gather_output=True), whole),
            (parallelize_module(nn.LayerNorm(16), mesh, pt.SequenceParallel()), whole),
        ):  # fmt: skip
            loss = layer(given).sum()
            call = a.norm if comm.rank else loss.backward
            refuses(ctx, pb.RankMismatchError, ["norm", "on rank 0"], call)


# -- what layers have besides their parameters


class Adapted(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.adapter = nn.Linear(8, 8)


class Hiding(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def with_parameter(layer: nn.Module) -> nn.Module:
    layer.scale = nn.Parameter(torch.ones(8))
    return layer


def with_buffer(layer: nn.Module) -> nn.Module:
    layer.register_buffer("mask", torch.ones(8))
    return layer


class Scaled(nn.Linear):
    """Its weight is what it holds, scaled."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value * 2 if name == "weight" else value


def called(layer: Any, method: str) -> nn.Module:
    getattr(layer, method)(lambda *_: None)
    return layer


def watched(layer: Any, method: str = "register_hook") -> nn.Module:
    getattr(layer.weight, method)(lambda *_: None)
    return layer


def with_attribute(layer: Any, name: str, value: Any) -> nn.Module:
    setattr(layer, name, value)
    return layer


def trained(layer: Any) -> nn.Module:
    layer.weight.grad = torch.ones_like(layer.weight)
    return layer


def of_two_types(layer: nn.Linear) -> nn.Linear:
    layer.bias = nn.Parameter(layer.bias.detach().half())
    return layer


def table(**how: Any) -> nn.Embedding:
    return nn.Embedding(8, 8, **how)


ALWAYS = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "weight is computed"),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), "remove_parametrizations"),
    "a parametrized bias": (
        lambda: parametrize.register_parametrization(nn.Linear(8, 8), "bias", nn.Tanh()), "bias is computed",
    ),
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(8, 8)), "weight is computed from weight_g, weight_v"),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), "weight is computed from weight_orig"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), "weight is computed from weight_orig"),
    "a pruned bias": (lambda: prune.random_unstructured(nn.Linear(8, 8), "bias", 1), "bias is computed from bias_orig"),
    "a weight by a property": (lambda: Scaled(8, 8), "weight is computed"),
    "an adapter": (lambda: Adapted(8, 8), "the children adapter would be lost"),
    "a parameter": (lambda: with_parameter(nn.Linear(8, 8)), "the parameters scale would be lost"),
    "lazy": (lambda: nn.LazyLinear(8), "weight is a UninitializedParameter"),
    "of two types": (lambda: of_two_types(nn.Linear(8, 8)), "bias is torch.float16 on cpu, weight is torch.float32"),
    "a forward of its own": (lambda: with_attribute(nn.Linear(8, 8), "forward", len), "overrides forward"),
    "a pruned table": (lambda: prune.l1_unstructured(table(), "weight", 0.5), "weight is computed from weight_orig"),
    "a table with a child": (lambda: with_attribute(table(), "adapter", nn.Linear(8, 8)), "the children adapter"),
    "a table with a limit": (lambda: table(max_norm=1.0), "max_norm is 1.0, expected None"),
    "a table with frequencies": (lambda: table(scale_grad_by_freq=True), "scale_grad_by_freq is True"),
    "a sparse table": (lambda: table(sparse=True), "sparse is True"),
    "a watched weight": (lambda: watched(nn.Linear(8, 8)), "the hooks of weight"),
    "a watched gradient": (
        lambda: watched(table(), "register_post_accumulate_grad_hook"), "the hooks of weight",
    ),
}  # fmt: skip
"""By name, layers of which something would be lost in place and in a new layer, and words that say so."""

NEW = {
    **{
        name: (lambda name=name: called(nn.Linear(8, 8), f"register_{name}"), name.rsplit("_", 1)[0].replace("_", " "))
        for name in (
            "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_post_hook",
            "load_state_dict_post_hook",
        )
    },
    "a buffer": (lambda: with_buffer(nn.Linear(8, 8)), "buffers mask"),
    "a table with a hook": (lambda: called(table(), "register_forward_hook"), "forward hooks"),
}  # fmt: skip
"""The same of layers that keep it in place."""
NEW["full_backward_hook"] = NEW["full_backward_hook"][0], "backward hooks"
NEW["full_backward_pre_hook"] = NEW["full_backward_pre_hook"][0], "backward pre hooks"
NEW["state_dict_post_hook"] = NEW["state_dict_post_hook"][0], "state dict hooks"

IN_PLACE = {
    "a gradient": (lambda: trained(nn.Linear(8, 8)), "the gradient of weight"),
    "an attribute that a split layer has": (lambda: with_attribute(nn.Linear(8, 8), "algo", 3), "algo"),
    "a method that it has": (lambda: Hiding(8, 8), "reset_parameters of this Hiding would be hidden"),
    "a hook of a norm": (lambda: watched(nn.LayerNorm(8)), "the hooks of weight"),
}  # fmt: skip


@on_ranks(2)
def test_nothing_of_a_layer_is_lost_in_silence(comm: Any) -> None:
    """Only rank 1 has such a layer: every rank raises, and the layer is as it was."""
    with host(comm) as ctx:
        mesh = pt.ColumnParallelLinear(8, 8, ctx=ctx).weight.device_mesh
        for name, (make, words) in {**ALWAYS, **NEW, **IN_PLACE}.items():
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what PyTorch had before parametrizations
                layer: Any = make()
            given = layer  # SequenceParallel has no context to agree on
            if comm.rank == 0 and not isinstance(layer, nn.LayerNorm):
                given = table() if isinstance(layer, nn.Embedding) else nn.Linear(8, 8)
            before = kept(given)
            ways = {
                **(in_place(ctx, layer) if name not in NEW else {}),
                **(anew(ctx, layer) if name not in IN_PLACE else {}),
            }
            for way, split in ways.items():
                refuses(ctx, pb.ArgumentError, [words], split, given, mesh)
                assert kept(given) == before, f"{name}: {way}"
        kept_in_place(ctx, mesh)


def in_place(ctx: pb.Context, layer: nn.Module) -> dict[str, Any]:
    if isinstance(layer, nn.LayerNorm):
        return {"SequenceParallel": lambda given, mesh: pt.SequenceParallel()._apply(given, mesh)}
    styles = {"RowwiseParallel": pt.RowwiseParallel(ctx=ctx)}
    if isinstance(layer, nn.Linear):
        styles["ColwiseParallel"] = pt.ColwiseParallel(ctx=ctx)
    return {name: partial(parallelize_module, parallelize_plan=style) for name, style in styles.items()}


def anew(ctx: pb.Context, layer: nn.Module) -> dict[str, Any]:
    if isinstance(layer, nn.Embedding):
        return {"from_embedding": lambda given, _: pt.VocabParallelEmbedding.from_embedding(given, ctx)}
    return {
        "from_linear": lambda given, _: pt.ColumnParallelLinear.from_linear(given, ctx),
        "from_linears": lambda given, _: pt.FusedColumnParallelLinear.from_linears({"q": given}, ctx=ctx),
    }


def kept(layer: nn.Module) -> Any:
    """All that a module is made of, by identity."""
    held = {name: {key: id(value) for key, value in vars(layer)[name].items()} for name in HELD}
    return type(layer), sorted(vars(layer)), held


HELD = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


def kept_in_place(ctx: pb.Context, mesh: Any) -> None:
    """What a layer in place keeps: hooks, buffers, attributes, what is frozen, the mode, its type and its ties."""
    seen: list[Any] = []
    layer: Any = with_buffer(nn.Linear(8, 8, dtype=torch.float64)).eval()
    layer.register_forward_hook(lambda module, *_: seen.append(module.tag))
    layer.tag, layer.weight.mark = "mine", 7
    layer.bias.requires_grad_(False)
    parallelize_module(layer, mesh, pt.ColwiseParallel(ctx=ctx))
    layer(torch.ones(2, 8, dtype=torch.float64))
    found = (
        seen, "mask" in layer.state_dict(), layer.weight.mark, layer.weight.requires_grad, layer.bias.requires_grad,
        layer.training, layer.weight.dtype, type(layer),
    )  # fmt: skip
    expected = ["mine"], True, 7, True, False, False, torch.float64, pt.ColumnParallelLinear
    assert found == expected, "kept in place"
    words, head = table(), nn.Linear(8, 8, bias=False)
    head.weight = words.weight
    with torch.no_grad():
        apart = pt.ColumnParallelLinear.from_linear(head, ctx)  # a layer of its own
    for each, style in ((words, pt.RowwiseParallel(ctx=ctx)), (head, pt.ColwiseParallel(ctx=ctx))):
        parallelize_module(each, mesh, style)
    tied = words.weight is head.weight and apart.weight is not head.weight
    assert tied, "ties"
