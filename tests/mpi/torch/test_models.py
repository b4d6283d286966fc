# SPDX-License-Identifier: Apache-2.0
"""Whole models, split by styles or layer by layer: what is known of parameters lasts, and values are one process's."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.torch import parameters
from tests.helpers.mpi import on_ranks, run_torch, starts_ranks
from tests.helpers.slow import only_long
from tests.helpers.torch_ranks import (
    compare,
    full,
    host,
    import_compiler,
    integers,
    local,
    own,
    raises,
    taken_in_turn,
    world,
)

MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")


@on_ranks(1, *only_long(2, 4), 3, timeout=300)
def test_with_mpirun(comm: Any) -> None:
    """All cases on one rank, half of them on two ranks, the others on more."""
    with world(comm) as size, host(comm) as ctx:
        mesh = init_device_mesh("cpu", (size,))
        for case in taken_in_turn(CASES, size=size):
            case(ctx, mesh=mesh)


@starts_ranks
@on_ranks(2, runner=run_torch, timeout=300)
def test_with_torchrun(comm: Any) -> None:
    test_with_mpirun.on_rank(comm)


def drawn(seed: int, *shape: int) -> Tensor:
    """The same numbers on every rank, on PyTorch's default device: on GPUs some of these cases run, too."""
    numbers = torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu"
    )
    return numbers.to(torch.get_default_device())


# -- what lasts


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(module: nn.Module) -> nn.Module:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    return module


def assigned_whole(module: nn.Module) -> nn.Module:
    whole = {name: full(value).clone() for name, value in module.state_dict().items()}
    module.load_state_dict(whole, assign=True)
    return module


def swapped(module: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict(copy.deepcopy(module.state_dict()))
        return module.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def emptied(module: nn.Module) -> nn.Module:
    module.to_empty(device="cpu")
    module.reset_parameters()  # type: ignore[operator]
    return module


def through_meta(module: nn.Module) -> nn.Module:
    return emptied(module.to("meta"))


CHANGES: tuple[Callable[[nn.Module], nn.Module], ...] = (
    copy.deepcopy, assigned, assigned_whole, swapped, emptied, through_meta,
    lambda m: m.to("cpu"), lambda m: m.to(torch.float64), lambda m: m.bfloat16().double(), lambda m: m.double(),
    lambda m: m.requires_grad_(True), lambda m: copy.deepcopy(m.bfloat16()).double(),
)  # fmt: skip


def marks_last(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Megatron's attributes outlast whatever replaces parameters; those of one parameter, pickling it."""
    for make in (
        lambda: pt.ColumnParallelLinear(8, 11, ctx=ctx),
        lambda: pt.RowParallelLinear(11, 8, ctx=ctx),
        lambda: pt.VocabParallelEmbedding(10, 8, ctx=ctx),
        lambda: parallelize_module(nn.Linear(11, 8), mesh, pt.RowwiseParallel(ctx=ctx)),
    ):
        expected = {name: [getattr(p, mark) for mark in MARKS] for name, p in make().named_parameters()}
        assert expected["weight"][0]
        for number, change in enumerate(CHANGES):
            layer = change(make())
            found = {name: [getattr(p, m, None) for m in MARKS] for name, p in layer.named_parameters()}
            assert found == expected, f"{type(layer).__name__}, change {number}: {found}"
        for name, parameter in make().named_parameters():
            again = pickle.loads(pickle.dumps(parameter))
            assert [getattr(again, mark) for mark in MARKS] == expected[name]


def frozen_stays_frozen(ctx: pb.Context, mesh: DeviceMesh) -> None:
    for style, make in (
        (pt.ColwiseParallel(ctx=ctx), lambda: nn.Linear(6, 8)),
        (pt.RowwiseParallel(ctx=ctx), lambda: nn.Linear(6, 8)),
        (pt.RowwiseParallel(ctx=ctx), lambda: nn.Embedding(6, 8)),
        (pt.SequenceParallel(), lambda: nn.LayerNorm(8)),
    ):
        whole = make().eval()
        whole.weight.requires_grad_(False)
        split = parallelize_module(whole, mesh, style)
        assert {name: p.requires_grad for name, p in split.named_parameters()} == {
            name: name != "weight" for name, _ in make().named_parameters()
        }
        assert not split.training


# -- parts of sequences


class Norm(nn.Module):
    """A norm written in Python, with something learned in a module inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(width)), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        return self.inner(x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()) * self.scale * factor


SEQUENCE_MODULES: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8), lambda: nn.LayerNorm(8, bias=False), lambda: Norm(8),
    lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), lambda: nn.Linear(8, 8),
    lambda: nn.LayerNorm(8, elementwise_affine=False),
)  # fmt: skip


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    module = make().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def sequences(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Any module, dimension and number of tokens, also fewer than ranks: outputs and gradients of one process."""
    for make, dim in itertools.product(SEQUENCE_MODULES, (0, 1)):
        whole = made(make)
        split = parallelize_module(copy.deepcopy(whole), mesh, pt.SequenceParallel(sequence_dim=dim))
        assert isinstance(split, type(whole))
        for tokens in range(2 * ctx.size + 1, -1, -1):
            on_part(ctx, whole, split, tokens, dim)


def on_part(ctx: pb.Context, whole: nn.Module, split: nn.Module, tokens: int, dim: int) -> None:
    x = drawn(tokens, *((tokens, 2, 8) if dim == 0 else (2, tokens, 8))).requires_grad_()
    part = (slice(None),) * dim + (own(tokens, ctx),)
    mine = x.detach()[part].clone().requires_grad_()
    whole.zero_grad()
    split.zero_grad()
    for _ in range(2):  # gradients add up
        expected, y = whole(x), split(mine)
        compare("y", y, expected[part], 1e-12)
        expected.square().sum().backward()
        y.square().sum().backward()
    compare("x", mine.grad, x.grad[part], 1e-12)
    for (name, got), like in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(got, DTensor)
        assert got.grad.placements == (Replicate(),)
        compare(f"{tokens} tokens along {dim}: {name}", full(got.grad), like.grad, 1e-12)


def copies_of_sequence_modules(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Copies, conversions and pickles of a module sum gradients, too."""
    changes = (*CHANGES[:2], pickled, saved, *CHANGES[6:10])
    for make, change in itertools.product((SEQUENCE_MODULES[0], SEQUENCE_MODULES[3]), changes):
        split = change(parallelize_module(made(make), mesh, pt.SequenceParallel()))
        whole = made(make)
        whole.load_state_dict({name: full(value) for name, value in split.state_dict().items()})
        on_part(ctx, whole, split, 2 * ctx.size - 1, 0)


def copies_in_a_training(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Copies of layers, as for averaged weights, have their gradients, also those that were computed in one tensor."""
    for layer in (
        pt.ColumnParallelLinear(8, 7, ctx=ctx),
        pt.RowParallelLinear(7, 8, ctx=ctx),
        pt.VocabParallelEmbedding(9, 8, ctx=ctx),
        pt.FusedColumnParallelLinear(8, {"q": 7, "k": 4}, ctx=ctx),
        parallelize_module(nn.LayerNorm(8), mesh, pt.SequenceParallel()),
    ):
        x = torch.arange(8 if isinstance(layer, pt.VocabParallelEmbedding) else 2 * 8)
        split = own(7, ctx) if isinstance(layer, pt.RowParallelLinear) else slice(None)
        outputs = layer(x if len(x) == 8 else x.reshape(2, 8)[:, split].float())
        for y in outputs if isinstance(outputs, tuple) else (outputs,):
            y.square().sum().backward(retain_graph=True)
        copied = copy.deepcopy(layer)
        for (name, got), like in zip(copied.named_parameters(), layer.parameters(), strict=True):
            assert got.grad is not like.grad
            assert torch.equal(full(got.grad), full(like.grad)), name
            assert full(like.grad).any(), name


def dtensors_through_sequence_modules(ctx: pb.Context, mesh: DeviceMesh) -> None:
    whole = made(SEQUENCE_MODULES[0])
    split = parallelize_module(copy.deepcopy(whole), mesh, pt.SequenceParallel(use_local_output=False))
    tokens = 2 * ctx.size - 1
    x = drawn(1, tokens, 2, 8)
    for given in (
        x[own(tokens, ctx)],
        DTensor.from_local(x, mesh, [Replicate()]),
        DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)]),
    ):
        y = split(given)
        assert y.placements == (Shard(0),)
        compare("y", full(y), whole(x), 1e-12)
    if ctx.size > 1:
        raises(r"the ranks hold \[1, .* tokens, expected", split, x[: 1 if ctx.rank == 0 else 3])


def what_sequences_refuse(ctx: pb.Context, mesh: DeviceMesh) -> None:
    for wrong in (nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))):
        raises(
            "BatchNorm1d takes statistics over tokens",
            lambda w=wrong: parallelize_module(w, mesh, pt.SequenceParallel()),
        )
    x = torch.ones(2, 8)
    norm = parallelize_module(nn.LayerNorm((2, 8)), mesh, pt.SequenceParallel())
    raises("dimension 0 is split over the ranks, expected one of the first 0", norm, x)
    group = parallelize_module(nn.GroupNorm(2, 4), mesh, pt.SequenceParallel(sequence_dim=1))
    raises("dimension 1 is split over the ranks, expected one of the first 1", group, torch.ones(3, 4))
    assert parallelize_module(norm, mesh, pt.SequenceParallel()) is norm
    raises(
        "this LayerNorm is split already, in another way",
        lambda: parallelize_module(norm, mesh, pt.SequenceParallel(sequence_dim=1)),
    )
    raises("sequence_dim: expected", pt.SequenceParallel, sequence_dim=-1)


def gradients_of_sequence_modules_take_one_sum(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """All parameters of a module take one sum and, repeated, one vote without an agreement; frozen ones none."""
    split = parallelize_module(made(SEQUENCE_MODULES[4]), mesh, pt.SequenceParallel())
    x, kind = drawn(1, ctx.size, 8)[own(ctx.size, ctx)], type(ctx)
    for frozen in (0, 1, 4):
        for parameter in list(split.parameters())[:frozen]:
            parameter.requires_grad_(False)
        for _ in range(3):
            with (
                patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
                patch.object(kind, "agreement", autospec=True, side_effect=kind.agreement) as agreements,
            ):
                split(x.clone().requires_grad_()).sum().backward()
            assert sums.call_count == (frozen < 4)
        assert not agreements.called
    split = parallelize_module(made(SEQUENCE_MODULES[0]), mesh, pt.SequenceParallel())
    other = init_device_mesh("cpu", (ctx.size,), mesh_dim_names=("other",))
    split.bias = nn.Parameter(DTensor.from_local(local(split.bias.detach()), other, [Replicate()]))
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        split(x).sum().backward()
    assert sums.call_count == 2
    assert (split.weight.grad.device_mesh, split.bias.grad.device_mesh) == (mesh, other)


def dropout(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Ranks seeded alike drop different elements, and their generators stay in step."""
    drop = parallelize_module(nn.Dropout(0.5), mesh, pt.SequenceParallel())
    torch.manual_seed(3)
    kept = drop(torch.ones(400)) > 0
    everyone = ctx.comm.allgather((kept.tolist(), torch.rand(1).item()))
    assert len({tuple(mask) for mask, _ in everyone}) == ctx.size
    assert len({number for _, number in everyone}) == 1
    assert 120 < int(kept.sum()) < 280
    assert torch.equal(drop.eval()(torch.ones(5)), torch.ones(5))


# -- parameters that modules share


class Tied(nn.Module):
    """A language model whose embedding, head and, ``times`` over, further layers share one weight."""

    def __init__(self, times: int = 0) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.more = nn.ModuleList(nn.Linear(6, 10, bias=False) for _ in range(times))
        self.head = nn.Linear(6, 10, bias=False)
        for layer in (*self.more, self.head):
            layer.weight = self.emb.weight

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.emb(words))
        return self.head(x) + sum(layer(x) * (i + 2) for i, layer in enumerate(self.more))


def losses(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    words = torch.arange(8) % 10
    sgd, values = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(4):
        sgd.zero_grad()
        value = loss(model(words), (words + 3) % 10)
        value.backward()
        sgd.step()
        values.append(value.item())
    return values


def new_tied(times: int) -> Tied:
    torch.manual_seed(0)
    return Tied(times).double()


def ties(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """One parameter stays one, in whatever order and however many modules share it."""
    column, row = pt.ColwiseParallel(ctx=ctx), pt.RowwiseParallel(ctx=ctx)
    for times in (0, 1, 3):
        expected = losses(new_tied(times), nn.functional.cross_entropy)
        for names in (("emb", "more.*", "head"), ("head", "emb", "more.*")):
            model = new_tied(times)
            plan = {name: row if name == "emb" else column for name in names if times or name != "more.*"}
            parallelize_module(model, mesh, plan)
            assert len(list(model.parameters())) == 1
            assert all(layer.weight is model.emb.weight for layer in (*model.more, model.head))
            got = losses(model, lambda y, t: pt.vocab_parallel_cross_entropy(y, t, ctx))
            assert got == pytest.approx(expected, rel=1e-10)
            copied = copy.deepcopy(model).bfloat16()
            assert copied.head.weight is copied.emb.weight
    norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
    norms[1].weight = norms[0].weight
    parallelize_module(norms, mesh, {"*": pt.SequenceParallel()})
    assert norms[0].weight is norms[1].weight
    assert norms[0].bias is not norms[1].bias


def ties_that_cannot_be_kept(ctx: pb.Context, mesh: DeviceMesh) -> None:
    column, row = pt.ColwiseParallel(ctx=ctx), pt.RowwiseParallel(ctx=ctx)
    match = (
        r"RowwiseParallel: a parameter of shape \(10, 6\) is tied .*, split along dimension 0 by "
        "RowwiseParallel; here it would be split along dimension 1"
    )
    raises(match, parallelize_module, new_tied(0), mesh, {"emb": row, "head": row})
    square = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    square[1].weight = square[0].weight
    with pytest.raises(pb.ArgumentError, match="split along dimension 0 by ColwiseParallel"):
        parallelize_module(square, mesh, {"0": column, "1": row})
    model = new_tied(0)
    parallelize_module(model, mesh, {"head": column})
    x = drawn(1, 3, 6)
    raises("weight of a ColumnParallelLinear was tied to that of Embedding", model.head, x)
    model = new_tied(0)
    parallelize_module(model, mesh, {"emb": row})
    raises("weight of a VocabParallelEmbedding was tied to that of Linear", model, torch.arange(3))
    twice = nn.Sequential(nn.Linear(6, 6))
    parallelize_module(twice, mesh, {"0": column})
    for other in (row, pt.ColwiseParallel(ctx=ctx, output_layouts=Replicate())):
        with pytest.raises(
            pb.ArgumentError, match="this ColumnParallelLinear is split already, in another way"
        ):
            parallelize_module(twice, mesh, {"0": other})


def modules_in_several_places(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """One module that a plan's pattern finds twice is split once."""
    torch.manual_seed(0)
    up, norm, down = nn.Linear(6, 8), nn.LayerNorm(6), nn.Linear(8, 6)
    whole = nn.ModuleList(
        nn.ModuleDict({"norm": norm, "up": up, "down": each}) for each in (down, nn.Linear(8, 6))
    ).double()
    split = copy.deepcopy(whole)
    plan = {
        "*.norm": pt.SequenceParallel(), "*.up": pt.ColwiseParallel(ctx=ctx, input_layouts=Shard(0)),
        "*.down": pt.RowwiseParallel(ctx=ctx, output_layouts=Shard(0)),
    }  # fmt: skip
    parallelize_module(split, mesh, plan)
    assert split[0].up is split[1].up
    assert len(list(split.parameters())) == len(list(whole.parameters()))
    x = drawn(1, 2 * ctx.size, 6)
    mine, expected = x[own(2 * ctx.size, ctx)], x
    for a, b in zip(split, whole, strict=True):
        mine, expected = a.down(a.up(a.norm(mine))), b.down(b.up(b.norm(expected)))
    compare("y", mine, expected[own(2 * ctx.size, ctx)], 1e-12)
    for value in (mine, expected):
        value.square().sum().backward()
    for (name, got), like in zip(split.named_parameters(), whole.parameters(), strict=True):
        compare(name, full(got.grad), like.grad, 1e-12)


# -- values


def on_meta(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Made on the meta device, split, and filled then: the values of one process with the same seed."""

    def whole(device: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        layers = (nn.Embedding(9, 7, padding_idx=2, **how), nn.LayerNorm(7, **how), nn.Linear(7, 11, **how),
                  nn.Tanh(), nn.Linear(11, 7, **how))  # fmt: skip
        return nn.Sequential(*layers)

    def by_style() -> nn.Module:
        row, column = pt.RowwiseParallel(ctx=ctx), pt.ColwiseParallel(ctx=ctx)
        return parallelize_module(whole("meta"), mesh, {"0": row, "2": column, "4": row})

    def by_layer() -> nn.Module:
        plain = whole("meta")
        return nn.Sequential(
            pt.VocabParallelEmbedding.from_embedding(plain[0], ctx=ctx), plain[1],
            pt.ColumnParallelLinear.from_linear(plain[2], ctx=ctx), plain[3],
            pt.RowParallelLinear.from_linear(plain[4], ctx=ctx),
        )  # fmt: skip

    def new() -> nn.Module:
        scales = pt.DelayedScaling(amax_history_len=2)
        return nn.Sequential(
            pt.VocabParallelEmbedding(9, 7, ctx=ctx, padding_idx=2, device="meta"), nn.LayerNorm(7, device="meta"),
            pt.ColumnParallelLinear(7, 11, ctx=ctx, device="meta", scales=scales), nn.Tanh(),
            pt.RowParallelLinear(11, 7, ctx=ctx, device="meta"),
        )  # fmt: skip

    def by_default() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(
                pt.VocabParallelEmbedding(9, 7, ctx=ctx, padding_idx=2), nn.LayerNorm(7),
                pt.ColumnParallelLinear(7, 11, ctx=ctx), nn.Tanh(), pt.RowParallelLinear(11, 7, ctx=ctx),
            )  # fmt: skip

    expected = whole("cpu")
    for make in (by_style, by_layer, by_default, new):
        model = make()
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        for each in (model, expected):
            for layer in (each[0], each[1], each[2], each[4]):
                torch.manual_seed(3)
                layer.reset_parameters()
        for (name, got), like in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(full(got), like), name
        words = torch.arange(9)
        compare("y", model(words), expected(words), 0.1 if make is new else 1e-6)
    model = by_style()
    model.load_state_dict(expected.state_dict(), assign=True)
    compare("y, assigned", model(words), expected(words), 1e-6)


def values_at_rank_0_only(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Rank 0's whole layer is enough: the others' may be on the meta device, by style and by layer."""
    torch.manual_seed(3)
    wholes = nn.Linear(7, 11), nn.Linear(11, 7), nn.Embedding(9, 7, padding_idx=2)
    given = wholes if ctx.rank == 0 else (
        nn.Linear(7, 11, device="meta"), nn.Linear(11, 7, device="meta"),
        nn.Embedding(9, 7, padding_idx=2, device="meta"),
    )  # fmt: skip
    for split in (
        (
            pt.ColumnParallelLinear.from_linear(given[0], ctx=ctx), pt.RowParallelLinear.from_linear(given[1], ctx=ctx),
            pt.VocabParallelEmbedding.from_embedding(given[2], ctx=ctx),
        ),
        parallelize_module(
            copy.deepcopy(nn.ModuleList(given)), mesh,
            {"0": pt.ColwiseParallel(ctx=ctx), "[12]": pt.RowwiseParallel(ctx=ctx)},
        ),
    ):  # fmt: skip
        for layer, whole in zip(split, wholes, strict=True):
            for (name, got), like in zip(layer.named_parameters(), whole.parameters(), strict=True):
                assert torch.equal(full(got), like), f"{type(layer).__name__}.{name}"


INITIALIZERS: tuple[tuple[str, dict[str, float]], ...] = (
    ("uniform_", {"a": -1, "b": 3}), ("normal_", {"mean": 1, "std": 0.1}), ("trunc_normal_", {}),
    ("trunc_normal_", {"a": 1.0, "b": 3.0}), ("xavier_uniform_", {}), ("xavier_normal_", {}),
    ("kaiming_uniform_", {"a": 2}), ("kaiming_normal_", {}), ("constant_", {"val": 2}), ("ones_", {}), ("zeros_", {}),
)  # fmt: skip
ON_WHOLES = (*INITIALIZERS, ("orthogonal_", {}), ("sparse_", {"sparsity": 0.3}), ("eye_", {}))


def initializers(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """torch.nn.init gives split weights the whole one's numbers, drawn all at once or some at a time."""
    for at_once, (n, k), dtype in (
        (2**18, (7, 8), torch.float32), (64, (40, 33), torch.float64), (64, (3, 64), torch.bfloat16),
        (16, (37, 5), torch.float32),
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parameters, "DRAWN_AT_ONCE", at_once)
            for name, how in INITIALIZERS:
                for layer in (
                    pt.ColumnParallelLinear(k, n, ctx=ctx, dtype=dtype, bias=False),
                    pt.RowParallelLinear(k, n, ctx=ctx, dtype=dtype, bias=False),
                    parallelize_module(nn.Embedding(n, k, dtype=dtype), mesh, pt.RowwiseParallel(ctx=ctx)),
                ):
                    plain = torch.empty(n, k, dtype=dtype)
                    generators = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
                    after = []
                    for weight, generator in zip((layer.weight, plain), generators, strict=True):
                        torch.manual_seed(7)
                        getattr(nn.init, name)(weight, **how)
                        if "val" not in how and name not in ("ones_", "zeros_"):
                            weight_of_both = full(weight).clone()
                            getattr(nn.init, name)(weight, **how, generator=generator)
                            assert not torch.equal(full(weight), weight_of_both), name
                        after.append(torch.rand(1))
                    assert torch.equal(full(layer.weight), plain), (
                        f"{name} {how} {type(layer).__name__} {n}x{k}"
                    )
                    if name != "trunc_normal_":  # which draws again until this rank's part is right
                        assert after[0] == after[1], (
                            f"{name}: the generators are elsewhere than in one process"
                        )
    layer = pt.ColumnParallelLinear(8, 6, ctx=ctx)
    for name, how in ON_WHOLES:
        for split, dim in ((layer, 0), (pt.RowParallelLinear(8, 6, ctx=ctx), 1)):
            plain = torch.empty(6, 8)
            torch.manual_seed(7)
            getattr(nn.init, name)(plain, **how)
            torch.manual_seed(7)
            pt.initialize(split.weight, getattr(nn.init, name), **how)
            assert torch.equal(full(split.weight), plain), f"{name} {dim}"
            assert len(set(ctx.comm.allgather(torch.rand(1).item()))) == 1, f"{name}: no longer in step"


def rank_0s_numbers(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """reset_parameters draws with rank 0's generator, moves generators that are in step, and leaves others alone."""
    torch.manual_seed(4)
    plain, after = nn.Linear(13, 10), torch.rand(1)
    torch.manual_seed(4 if ctx.rank == 0 else 9)
    before = torch.get_rng_state()
    layer = pt.RowParallelLinear(13, 10, ctx=ctx)
    assert torch.equal(full(layer.weight), plain.weight)
    assert torch.equal(full(layer.bias), plain.bias)
    if ctx.rank == 0:
        assert torch.equal(torch.rand(1), after)
    else:
        assert torch.equal(torch.get_rng_state(), before)


# -- losses


def loss_options(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Every option of torch.nn.functional.cross_entropy with every other, values and gradients."""
    for vocabulary, lead in ((7, (6,)), (2 * ctx.size + 1, (3, 2)), (1, (4,))):
        part, data = own(vocabulary, ctx), torch.Generator().manual_seed(0)
        target = torch.randint(0, vocabulary, lead, generator=data, device="cpu").to(
            torch.get_default_device()
        )
        logits = drawn(2, *lead, vocabulary) * (1000 if lead == (6,) else 1)  # of which exp is no number
        for weight, smoothing, ignore, reduction in itertools.product(
            (None, torch.arange(1.0, vocabulary + 1, dtype=torch.float64) / 3), (0.0, 0.1, 1.0),
            (-100, 0, int(target.flatten()[0])), ("mean", "sum", "none"),
        ):  # fmt: skip
            a, b = logits.clone().requires_grad_(), logits[..., part].clone().requires_grad_()
            how: dict[str, Any] = {
                "weight": weight, "label_smoothing": smoothing, "ignore_index": ignore, "reduction": reduction
            }  # fmt: skip
            expected = nn.functional.cross_entropy(a.flatten(0, -2), target.flatten(), **how)
            got = pt.vocab_parallel_cross_entropy(b, target, ctx, **how)
            text = f"{vocabulary} {how}"
            assert torch.allclose(got.flatten(), expected.flatten(), rtol=1e-12, equal_nan=True), text
            factors = drawn(3, *expected.shape)
            (expected * factors).sum().backward()
            (got * factors.reshape(got.shape)).sum().backward()
            assert torch.allclose(b.grad, a.grad[..., part], rtol=1e-10, atol=1e-14, equal_nan=True), text
    ignored = torch.full(lead, -100)
    assert pt.vocab_parallel_cross_entropy(logits[..., part], ignored, ctx).isnan()
    token, mine = logits[0].clone().requires_grad_(), logits[0][part].clone().requires_grad_()
    expected = nn.functional.cross_entropy(token, target[0])
    loss = pt.vocab_parallel_cross_entropy(mine, target[0], ctx)
    expected.backward()
    loss.backward()
    compare("one token", loss, expected, 1e-12)
    compare("its gradient", mine.grad, token.grad[part], 1e-12)
    half = logits[..., part].bfloat16()
    assert pt.vocab_parallel_cross_entropy(half, target, ctx).dtype == torch.float32
    for given, of, match in (
        (
            logits[..., part],
            target[:, None],
            r"target: .* of shape \(4, 1\), expected integers of shape \(4,\)",
        ),
        (logits[0, :1].sum(), target[0], r"target: .* of shape \(\), expected integers"),
        (logits[..., part].long(), target, "expected logits of a floating-point type and integer targets"),
        (logits[..., part], [0], "expected logits of a floating-point type and integer targets"),
    ):
        raises(match, pt.vocab_parallel_cross_entropy, given, of, ctx)
    last, target = ctx.rank == ctx.size - 1, torch.zeros(lead, dtype=torch.int64)
    for name, wrong, match in (
        ("label_smoothing", 1.5, "label_smoothing: expected a number from 0 to 1, got 1.5"),
        ("label_smoothing", "x", "label_smoothing: expected a number"),
        ("weight", torch.ones(vocabulary, 1), "weight: shape is .*, expected one number for each word"),
        ("weight", torch.ones(vocabulary, dtype=torch.int64), "weight: expected a plain tensor of floating-point"),
        ("ignore_index", 1.5, "ignore_index: expected an integer, got 1.5"),
        ("reduction", "max", "reduction: expected 'mean', 'sum' or 'none', got 'max'"),
    ):  # fmt: skip
        with pytest.raises(pb.ArgumentError, match=match):  # on every rank, though only one is wrong
            pt.vocab_parallel_cross_entropy(logits[..., part], target, ctx, **({name: wrong} if last else {}))
    if target.device.type == "cpu":  # it is not checked on GPUs
        with pytest.raises(pb.ArgumentError, match="target: from 9 to 9, expected 0 to 0"):
            pt.vocab_parallel_cross_entropy(logits[..., part], torch.full(lead, 9 if last else 0), ctx)
    if ctx.size > 1:
        with pytest.raises(pb.RankMismatchError, match="label_smoothing"):
            pt.vocab_parallel_cross_entropy(logits[..., part], target, ctx, label_smoothing=0.1 * last)


# -- layers


class Plain(nn.Linear):
    """A subclass that computes what Linear does."""

    def doubled(self) -> int:
        return 2 * self.out_features


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def subclasses(ctx: pb.Context, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    whole = Plain(8, 6, dtype=torch.float64)
    split = parallelize_module(copy.deepcopy(whole), mesh, pt.ColwiseParallel(ctx=ctx))
    assert isinstance(split, Plain)
    assert isinstance(split, pt.ColumnParallelLinear)
    assert split.doubled() == 12
    x = drawn(1, 4, 8)
    compare("y", split(x), whole(x)[:, own(6, ctx)], 1e-12)
    compare("y of a copy", copy.deepcopy(split)(x), whole(x)[:, own(6, ctx)], 1e-12)
    attention = nn.MultiheadAttention(8, 2)
    split = parallelize_module(attention, mesh, {"out_proj": pt.RowwiseParallel(ctx=ctx)}).out_proj
    assert isinstance(split, pt.RowParallelLinear)
    for style, wrong in (
        (pt.ColwiseParallel(ctx=ctx), Scaled(8, 6)),
        (pt.RowwiseParallel(ctx=ctx), type("Twice", (nn.Embedding,), {"forward": Scaled.forward})(8, 6)),
    ):
        raises("which overrides forward", parallelize_module, wrong, mesh, style, kind=pb.ArgumentTypeError)


def padding(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """The row of padding_idx starts as zeros and gets no gradient, on whichever rank it is."""
    words = torch.tensor([[0, 3, 9], [7, 0, 3]])
    for index in (0, 3, 9, -1):
        torch.manual_seed(0)
        whole = nn.Embedding(10, 8, padding_idx=index, dtype=torch.float64)
        torch.manual_seed(0)
        drawn_here = pt.VocabParallelEmbedding(10, 8, ctx=ctx, padding_idx=index, dtype=torch.float64)
        assert torch.equal(full(drawn_here.weight), whole.weight)
        for sequence_parallel in (False, True):
            layout = Shard(0) if sequence_parallel else Replicate()
            split = parallelize_module(
                copy.deepcopy(whole), mesh, pt.RowwiseParallel(ctx=ctx, output_layouts=layout)
            )
            tokens = own(2, ctx) if sequence_parallel else slice(None)
            whole.zero_grad()
            whole(words).square().sum().backward()
            y = split(words)
            compare("y", y, whole(words)[tokens])
            y.square().sum().backward()
            compare(f"padding_idx {index}", full(split.weight.grad), whole.weight.grad)
        assert f"padding_idx={index % 10}" in repr(split)
    with pytest.raises(pb.ArgumentError, match="padding_idx: expected -10 to 9, got 10"):
        pt.VocabParallelEmbedding(10, 8, ctx=ctx, padding_idx=10)


def scattered(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """An embedding of a split sequence moves half the bytes of a sum on every rank: nothing is all-reduced."""
    embedding = pt.VocabParallelEmbedding(10, 4, ctx=ctx, sequence_parallel=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda *_, **__: pytest.fail("it was all-reduced"))
        for tokens in (2 * ctx.size + 1, 1):
            words = torch.arange(tokens) % 10
            y = embedding(words)
            compare("y", y, full(embedding.weight).detach()[words][own(tokens, ctx)])
            y.sum().backward()
    counts = torch.bincount(words, minlength=10) + torch.bincount(
        torch.arange(2 * ctx.size + 1) % 10, minlength=10
    )
    compare("gradient", full(embedding.weight.grad), counts[:, None].float().expand(10, 4))


def batch_first(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Sequences along dimension 1, any number of tokens: embedding, norm and layers of a model, by style."""
    torch.manual_seed(0)
    whole = nn.Sequential(
        nn.Embedding(10, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)
    ).double()
    split = parallelize_module(
        copy.deepcopy(whole), mesh,
        {
            "0": pt.RowwiseParallel(ctx=ctx, output_layouts=Shard(1)), "1": pt.SequenceParallel(sequence_dim=1),
            "2": pt.ColwiseParallel(ctx=ctx, input_layouts=Shard(1)),
            "4": pt.RowwiseParallel(ctx=ctx, output_layouts=Shard(1)),
        },
    )  # fmt: skip
    assert "sequence_dim=1" in repr(split[2])
    for tokens in (7, 4, 1):
        words = torch.arange(3 * tokens).reshape(3, tokens) % 10
        part = (slice(None), own(tokens, ctx))
        for each in (whole, split):
            each.zero_grad()
        expected, y = whole(words), split(words)
        compare("y", y, expected[part], 1e-12)
        expected.square().sum().backward()
        y.square().sum().backward()
        for (name, got), like in zip(split.named_parameters(), whole.parameters(), strict=True):
            compare(f"{tokens}: {name}", full(got.grad), like.grad, 1e-12)
    raises(r"x: shape is \(3, 6\), expected a sequence along dimension 1", split[2], drawn(1, 3, 6))
    with pytest.raises(
        pb.ArgumentError, match=r"words: shape is \(3,\), expected a sequence along dimension 1"
    ):
        split[0](torch.zeros(3, dtype=torch.int64))
    for style, layouts in ((pt.ColwiseParallel, "input_layouts"), (pt.RowwiseParallel, "output_layouts")):
        with pytest.raises(
            pb.ArgumentError, match=rf"{layouts} is .*, expected Replicate\(\) or Shard\(dim\)"
        ):
            style(ctx=ctx, **{layouts: Shard(-2)})


def bias_apart(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """skip_bias_add gives the bias to whoever adds it, and its gradient comes back."""
    whole, x = nn.Linear(8, 6, dtype=torch.float64), integers(ctx, 1, 4, 8)
    for make, part in (
        (partial(pt.ColumnParallelLinear.from_linear, gather_output=False), (slice(None), own(6, ctx))),
        (partial(pt.RowParallelLinear.from_linear, input_is_parallel=False), (slice(None), slice(None))),
    ):
        layer = make(whole, ctx=ctx, skip_bias_add=True)
        whole.load_state_dict({name: full(value) for name, value in layer.state_dict().items()})
        whole.zero_grad()
        y, bias = layer(x)
        compare("y", y + bias, whole(x)[part], 1e-12)
        (y + bias).square().sum().backward()
        whole(x).square().sum().backward()
        compare("bias", full(layer.bias.grad), whole.bias.grad, 1e-12)
        compare("weight", full(layer.weight.grad), whole.weight.grad, 1e-12)
        assert make(nn.Linear(8, 6, bias=False), ctx=ctx, skip_bias_add=True)(x.float())[1] is None


def wrong_types(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """The same error from all layers; on every rank if they wait for each other."""
    last = ctx.rank == ctx.size - 1
    for make, k in (
        (partial(pt.ColumnParallelLinear, sequence_parallel=True), 8),
        (partial(pt.ColumnParallelLinear, gather_output=True), 8),
        (pt.ColumnParallelLinear, 8),
        (partial(pt.RowParallelLinear, sequence_parallel=True), own(8, ctx)),
        (partial(pt.RowParallelLinear, input_is_parallel=False), 8),
        (pt.RowParallelLinear, own(8, ctx)),
    ):
        layer = make(8, 12, ctx=ctx)
        x = torch.ones(4, 8)[:, k if isinstance(k, slice) else slice(None)]
        for one_alone in (False, True):
            if one_alone and make is pt.ColumnParallelLinear:
                continue  # the others multiply alone
            wrong = x if one_alone and not last else x.double()
            with pytest.raises(
                pb.LayoutError, match=r"x: dtype is torch.float64, expected w's torch.float32"
            ):
                layer(wrong)
        raises("x: on meta, expected w's cpu", layer, x.to("meta"), kind=pb.LayoutError)
        layer(x)
    embedding = pt.VocabParallelEmbedding(9, 4, ctx=ctx)
    with pytest.raises(pb.ArgumentError, match=r"words: expected a tensor of integers, got torch\.float32"):
        embedding(torch.ones(3) if last else torch.ones(3, dtype=torch.int64))
    raises("words: from 9 to 9, expected 0 to 8", embedding, torch.full((3,), 9 if last else 0))


# -- between layers, and several layers at once


def regions(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Megatron's functions between layers: values, and the gradients that follow from what each rank has."""
    ranks = range(ctx.size)
    for t, k in ((2 * ctx.size, 3 * ctx.size), (2 * ctx.size + 1, 5), (1, 2)):
        every = [drawn(10 + rank, t, 2, k) for rank in ranks]
        mine, tokens, width = every[ctx.rank], own(t, ctx), (..., own(k, ctx))
        for function, x, y, gradient in (
            (pt.copy_to_tensor_model_parallel_region, every[0], every[0], sum),
            (pt.reduce_from_tensor_model_parallel_region, mine, sum(every), None),
            (pt.scatter_to_tensor_model_parallel_region, every[0], every[0][width], width),
            (pt.gather_from_tensor_model_parallel_region, every[0][width], every[0], None),
            (pt.scatter_to_sequence_parallel_region, every[0], every[0][tokens], tokens),
            (pt.gather_from_sequence_parallel_region, every[0][tokens], every[0], tokens),
            (
                partial(pt.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False),
                every[0][tokens], every[0], None,
            ),
            (pt.reduce_scatter_to_sequence_parallel_region, mine, sum(every)[tokens], tokens),
        ):  # fmt: skip
            name = getattr(function, "__name__", "gather_from_sequence_parallel_region, False")
            asked = x.clone().requires_grad_()
            got = function(asked, ctx)
            compare(name, got, y, 1e-12)
            factors = [drawn(50 + rank, *every[0].shape) for rank in ranks]  # as of the whole tensor
            if gradient is sum or name == "gather_from_sequence_parallel_region":  # each rank has its own
                (got * factors[ctx.rank]).sum().backward()
                whole = sum(factors)
                expected = whole if gradient is sum else whole[tokens]
            else:
                split = y.shape != every[0].shape
                part = factors[0][gradient] if split else factors[0]
                (got * part).sum().backward()
                expected = factors[0] if split or x.shape == every[0].shape else (
                    factors[0][width] if name.startswith("gather_from_tensor") else factors[0][tokens]
                )  # fmt: skip
            compare(f"gradient of {name}", asked.grad, expected, 1e-12)
    last = ctx.rank == ctx.size - 1
    with pytest.raises(pb.ArgumentTypeError, match="x: expected a plain tensor, got int"):
        pt.scatter_to_sequence_parallel_region(1 if last else torch.ones(3), ctx)
    with pytest.raises(pb.ArgumentError, match=r"x: torch.int64 of shape \(3,\), expected real numbers"):
        pt.copy_to_tensor_model_parallel_region(torch.zeros(3, dtype=torch.int64), ctx)
    if ctx.size > 1:
        with pytest.raises(pb.ArgumentError, match=r"x: the ranks hold \[1, 3.*, expected \["):
            pt.gather_from_sequence_parallel_region(torch.ones(1 if ctx.rank == 0 else 3, 2), ctx)
        with pytest.raises(pb.RankMismatchError, match="x:"):
            pt.reduce_from_tensor_model_parallel_region(torch.ones(3 + last), ctx)


def fused(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Several column-parallel layers at once give what each gives; sizes that no number of ranks divides."""
    sizes = {"q": 9, "k": 4, "v": 5}
    for sequence_parallel, dim in ((False, 0), (True, 0), (True, 1)):
        torch.manual_seed(0)
        wholes = {name: nn.Linear(6, n, dtype=torch.float64) for name, n in sizes.items()}
        how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "sequence_dim": dim}
        split = pt.FusedColumnParallelLinear.from_linears(wholes, ctx=ctx, **how)
        tokens = 2 * ctx.size
        x = (drawn(1, tokens, 3, 6) if dim == 0 else drawn(1, 3, tokens, 6)).requires_grad_()
        part = (slice(None),) * dim + (own(tokens, ctx),) if sequence_parallel else slice(None)
        mine = x.detach()[part].clone().requires_grad_()
        outputs, expected = split(mine), [whole(x) for whole in wholes.values()]
        for y, like, n in zip(outputs, expected, sizes.values(), strict=True):
            compare("y", y, like[..., own(n, ctx)], 1e-12)
        sum(y.square().sum() for y in outputs).backward()
        sum(y.square().sum() for y in expected).backward()
        compare("x", mine.grad, x.grad[part], 1e-12)
        for name, whole in wholes.items():
            compare(f"{name}.weight", full(getattr(split, name).weight.grad), whole.weight.grad, 1e-12)
            compare(f"{name}.bias", full(getattr(split, name).bias.grad), whole.bias.grad, 1e-12)
    assert set(split.state_dict()) == {f"{name}.{each}" for name in sizes for each in ("weight", "bias")}
    apart = pt.FusedColumnParallelLinear(6, sizes, ctx=ctx, skip_bias_add=True)(torch.ones(2, 6))
    assert [y.shape[-1] for y, _ in apart] == [bias.shape[0] for _, bias in apart]
    for option in ("gather_output", "scales"):
        with pytest.raises(pb.ArgumentError, match=f"{option}: not an option of a FusedColumnParallelLinear"):
            pt.FusedColumnParallelLinear(6, sizes, ctx=ctx, **{option: True})
    with pytest.raises(pb.ArgumentError, match="out_features: expected a size for each layer, by name"):
        pt.FusedColumnParallelLinear(6, [3, 4], ctx=ctx)
    with pytest.raises(pb.ArgumentError, match="linears: expected one number of inputs and one type"):
        pt.FusedColumnParallelLinear.from_linears({"a": nn.Linear(6, 3), "b": nn.Linear(5, 3)}, ctx=ctx)


def main_grads(ctx: pb.Context, mesh: DeviceMesh) -> None:
    """Gradients of two micro-batches are summed in main_grad's type, by every form; without main_grad it is refused."""
    tokens, how = (
        2 * ctx.size + 1,
        {"ctx": ctx, "gradient_accumulation_fusion": True, "dtype": torch.bfloat16},
    )
    sizes = {"q": 5, "v": 3}
    for layer, whole_x in (
        (pt.ColumnParallelLinear(6, 7, sequence_parallel=True, **how), (own(tokens, ctx), slice(None))),
        (pt.ColumnParallelLinear(6, 7, gather_output=True, **how), (slice(None), slice(None))),
        (pt.ColumnParallelLinear(6, 7, **how), (slice(None), slice(None))),
        (pt.RowParallelLinear(6, 7, sequence_parallel=True, **how), (slice(None), own(6, ctx))),
        (pt.RowParallelLinear(6, 7, input_is_parallel=False, **how), (slice(None), slice(None))),
        (pt.RowParallelLinear(6, 7, bias=False, **how), (slice(None), own(6, ctx))),
        (
            pt.FusedColumnParallelLinear(6, sizes, sequence_parallel=True, **how),
            (own(tokens, ctx), slice(None)),
        ),
    ):
        fused = isinstance(layer, pt.FusedColumnParallelLinear)
        for each in layer.children() if fused else [layer]:
            with pytest.raises(
                pb.ArgumentError, match=r"weight.main_grad: expected .* of shape \(.*\), got NoneType"
            ):
                layer(torch.ones(2, 6, dtype=torch.bfloat16)[:, whole_x[1]])
            nn.init.ones_(each.weight)
            each.weight.main_grad = torch.zeros(local(each.weight).shape, dtype=torch.float32)
        expected = 0.0
        for seed in (1, 2):
            x = integers(ctx, seed, tokens, 6) * 129  # 258 * 129 has more bits than bfloat16
            mine = x[whole_x].to(torch.bfloat16).requires_grad_()
            y = layer(mine)
            sum(each.sum() * 129 for each in (y if fused else [y])).backward()
            expected = expected + x.float().to(torch.bfloat16).float().sum(0) * 129
            assert mine.grad is not None
        for each in layer.children() if fused else [layer]:
            rows = expected.expand(each.out_features, -1)
            part = (
                (each.shard, slice(None))
                if isinstance(each, pt.ColumnParallelLinear)
                else (slice(None), each.shard)
            )
            assert torch.equal(each.weight.main_grad, rows[part]), layer
            assert each.weight.grad is None
            assert each.bias is None or each.bias.grad is not None
    with pytest.raises(pb.ArgumentError, match="gradient_accumulation_fusion: expected False with scales"):
        pt.RowParallelLinear(32, 32, scales=pt.DelayedScaling(), **how)
    fast = torch.compile(pt.RowParallelLinear(6, 7, **how), backend="eager", fullgraph=True)
    fast.weight.main_grad = torch.zeros(local(fast.weight).shape)
    with pytest.raises(Exception, match=r"not in code that torch\.compile compiles"):
        fast(torch.ones(2, 6, dtype=torch.bfloat16)[:, own(6, ctx)])


CASES = (
    marks_last, frozen_stays_frozen, sequences, copies_of_sequence_modules, copies_in_a_training,
    dtensors_through_sequence_modules, gradients_of_sequence_modules_take_one_sum, what_sequences_refuse,
    dropout, ties, ties_that_cannot_be_kept, modules_in_several_places, on_meta, initializers,
    rank_0s_numbers, loss_options, subclasses, padding, batch_first, bias_apart, wrong_types, regions, fused,
    values_at_rank_0_only, scattered, main_grads,
)  # fmt: skip


# -- contexts one after the other


@starts_ranks
@on_ranks(1, 2, timeout=300, launch=True)
def test_compiled_code_runs_in_later_contexts(comm: Any) -> None:
    """Compiled code runs in a later context with the same ranks, without being compiled again."""
    compiled = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph

    fast = torch.compile(
        lambda x, w, c: pt.matmul_allgather(x, w, c).square(), backend=backend, fullgraph=True
    )
    x, w = torch.ones(4, 8), torch.ones(6 // comm.size, 8)
    with host(comm) as first:
        layer = pt.ColumnParallelLinear(8, 6, ctx=first, gather_output=True, device_mesh=None)
        graph = torch.compile(layer, backend=backend, fullgraph=True)
        expected = layer(x)
        compare("layer", graph(x), expected)
        fast(x, w, first)
    made = compiled
    with pytest.raises(pb.ClosedError):
        graph(x)
    for _ in range(10):  # more than torch.compile would compile anew
        with host(comm) as ctx:
            compare("function", fast(x, w, ctx), torch.full((4, 6), 64.0))
            compare("layer", graph(x), expected)
            assert compiled == made, "it was compiled again"
    raises("is closed", fast, x, w, first, kind=pb.ClosedError)
    if comm.size > 1:
        one = comm.Split(comm.rank, 0)
        with host(one), pytest.raises(pb.ClosedError):
            graph(x)
        one.Free()


# -- memory


def peak_bytes(make: Callable[[], object], kept: list[object]) -> int:
    """The most memory that this process had while ``make`` ran, above what it had before; keep what it made.

    What is freed may stay with the process and be used again, so that nothing would be seen.
    """

    def of_status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(name))
        return 1024 * int(line.split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = of_status("VmRSS")
    kept.append(make())
    return of_status("VmHWM") - before


@starts_ranks
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of memory")
@on_ranks(4, timeout=300, launch=True)
def test_no_rank_has_a_whole_weight(comm: Any) -> None:
    """Making a layer takes a shard and some buffers of memory, not a whole weight, on ranks that have none."""
    n, k = 8192, 4096  # 128 MiB in float32, shards of 32
    whole, kept = 4 * n * k, []
    with host(comm) as ctx:
        pt.ColumnParallelLinear(64, 64, ctx=ctx)  # what is loaded and opened once
        linear = nn.Linear(k, n, device="cpu" if ctx.rank == 0 else "meta")
        for name, make in (
            ("column", lambda: pt.ColumnParallelLinear(k, n, ctx=ctx)),
            ("row", lambda: pt.RowParallelLinear(k, n, ctx=ctx)),
            ("embedding", lambda: pt.VocabParallelEmbedding(n, k, ctx=ctx)),
            ("from_linear", lambda: pt.ColumnParallelLinear.from_linear(linear, ctx=ctx)),
            ("from_linear by rows", lambda: pt.RowParallelLinear.from_linear(linear, ctx=ctx)),
            ("init", lambda: nn.init.normal_(pt.RowParallelLinear(k, n, ctx=ctx, device="cpu").weight)),
        ):
            peaks = ctx.comm.allgather(peak_bytes(make, kept))
            assert max(peaks) < 0.6 * whole, f"{name}: {[round(p / 2**20) for p in peaks]} MiB"
            assert min(peaks) > 0.1 * whole, f"{name}: {[round(p / 2**20) for p in peaks]} MiB: not measured"


# -- torch.compile


@starts_ranks
@on_ranks(2, timeout=300, launch=True)
def test_compiled(comm: Any) -> None:
    """What is between layers, several layers at once, and options, without a graph break and as in eager mode."""
    import_compiler()
    with host(comm) as ctx:
        sizes = {"gate": 8, "up": 4}
        layers = pt.FusedColumnParallelLinear(6, sizes, ctx=ctx, sequence_parallel=True, dtype=torch.float64)
        down = pt.RowParallelLinear(
            8, 6, ctx=ctx, sequence_parallel=True, skip_bias_add=True, dtype=torch.float64
        )

        def model(x: Tensor) -> Tensor:
            gate, up = layers(x)
            y, bias = down(gate)
            whole = pt.gather_from_sequence_parallel_region(y + bias, ctx)
            mine = pt.scatter_to_tensor_model_parallel_region(whole, ctx)
            rows = pt.reduce_scatter_to_sequence_parallel_region(mine.tanh(), ctx)
            return rows.sum() + pt.reduce_from_tensor_model_parallel_region(up, ctx).square().sum()

        def same(_: pb.Context) -> None:
            results = []
            for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
                x = drawn(1, 4, 6)[own(4, ctx)].requires_grad_()
                for parameter in (*layers.parameters(), *down.parameters()):
                    parameter.grad = None
                value = run(x)
                value.backward()
                gradients = [local(p.grad) for p in (*layers.parameters(), *down.parameters())]
                results.append([value, x.grad, *gradients])
            for got, expected in zip(*reversed(results), strict=True):
                compare("compiled", got, expected, 1e-12)

        same(ctx)
