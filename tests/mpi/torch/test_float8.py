# SPDX-License-Identifier: Apache-2.0
"""8-bit products of PyTorch with delayed scaling, against the same arithmetic in one process, in NumPy."""

from __future__ import annotations

import copy
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.torch import float8
from tests.helpers import inside
from tests.helpers.docs import DOCS, blocks
from tests.helpers.mpi import on_ranks, run_mpi, run_torch, starts_ranks
from tests.helpers.slow import in_turn, only_long
from tests.helpers.torch_ranks import (
    UNEVEN,
    Split,
    compare,
    device,
    host,
    import_compiler,
    local,
    matmul_local,
    own,
    raises,
    split_matmul_allreduce,
    splits,
    taken_in_turn,
    world,
)

E4, E5 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
LARGEST = {E4: 448.0, E5: 57344.0}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
RECIPES: tuple[dict[str, Any], ...] = (
    {"amax_history_len": 2},
    {"amax_history_len": 3, "margin": 2, "amax_compute_algo": "most_recent"},
    {"amax_history_len": 1, "fp8_format": "e4m3"},
)


@on_ranks(1, *only_long(2), 4, timeout=300)
def test_with_mpirun(comm: Any) -> None:
    """Products; and all cases on one rank, half of them on two ranks, the others on more."""
    with host(comm) as ctx:
        products(ctx, ((8, 12, 16), *UNEVEN))
        for case in taken_in_turn(CASES, size=ctx.size):
            case(ctx)


@starts_ranks
@on_ranks(2, runner=run_torch, timeout=300)
def test_with_torchrun(comm: Any) -> None:
    test_with_mpirun.on_rank(comm)


@on_ranks(4, timeout=300)
def test_the_script_of_the_page(comm: Any) -> None:
    """The scripts of docs/torch.md and docs/torch-8-bits.md: what they train gets better."""
    torch.set_num_threads(1)
    for name in ("torch", "torch-8-bits"):
        (script,) = [x for x in blocks(DOCS / f"{name}.md", "{code-block} python") if "losses" in x]
        found: dict[str, Any] = {}
        exec(compile(script, f"{name}.md", "exec"), found)
        assert found["losses"][-1] < 0.7 * found["losses"][0]


def drawn(ctx: pb.Context, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same normal numbers on every rank."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device(ctx), dtype)


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().float().numpy()


class OneProcess:
    """What delayed scaling does to one layer, written down again for whole arrays."""

    def __init__(
        self, *, margin: int = 0, fp8_format: str = "hybrid", amax_history_len: int = 1024,
        amax_compute_algo: str = "max",
    ) -> None:  # fmt: skip
        self.margin, self.length, self.algo = margin, amax_history_len, amax_compute_algo
        self.gradients = E5 if fp8_format == "hybrid" else E4
        self.histories: dict[str, list[float]] = {"x": [], "w": [], "g": []}

    def cast(self, which: str, values: np.ndarray, *, update: bool = True) -> tuple[np.ndarray, float]:
        """The 8-bit values and their unit, both in float64."""
        kind = self.gradients if which == "g" else E4
        history, own_amax = self.histories[which], float(np.abs(values).max(initial=0))
        known = history[: self.length]
        amax = (known[0] if self.algo == "most_recent" else max(known)) if known else own_amax
        unit = np.float32(amax) * np.float32(2.0**self.margin / LARGEST[kind]) if amax else np.float32(1)
        stored = np.clip(values * (np.float32(1) / unit), -LARGEST[kind], LARGEST[kind]).astype(kind)
        if update and own_amax > 0:
            history.insert(0, own_amax)
        return stored.astype(np.float64), float(unit)

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None, *, update: bool = True) -> np.ndarray:
        self.x, self.of_x = self.cast("x", array(x), update=update)
        self.w, self.of_w = self.cast("w", array(w), update=update)
        y = self.x @ self.w.T * (self.of_x * self.of_w)
        if bias is not None:
            y = y + array(bias.to(torch.float16 if x.dtype == torch.float16 else torch.bfloat16))
        return y

    def back(self, gy: Tensor, *, update: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        g, of_g = self.cast("g", array(gy), update=update)
        rows = g.reshape(-1, g.shape[-1])
        gw = rows.T @ self.x.reshape(-1, self.x.shape[-1]) * (of_g * self.of_x)
        return g @ self.w * (of_g * self.of_w), gw, array(gy).reshape(-1, g.shape[-1]).sum(0)

    def history(self) -> np.ndarray:
        rows = [(row + [0.0] * self.length)[: self.length] for row in self.histories.values()]
        return np.array(rows, np.float32)


def near(name: str, got: Tensor | None, expected: np.ndarray, dtype: torch.dtype) -> None:
    assert got is not None, f"{name}: none"
    tolerance = TOLERANCE[dtype]
    if got.device.type != "cpu":  # tensor cores; and each rank's part of a sum is rounded to 16 bits
        tolerance = max(2 * tolerance, 4e-3)
    compare(name, got, torch.from_numpy(expected).to(got.device, dtype), tolerance)


# -- functions


def products(ctx: pb.Context, all_sizes: tuple[tuple[int, int, int], ...]) -> None:
    """Every function for three steps, whose values grow and shrink: results, gradients and histories."""
    turn = 0
    for number, sizes in enumerate(all_sizes):
        for split in splits(ctx, sizes):
            for dtype in TOLERANCE if number == 0 else (torch.float32,):
                for recipe in (
                    RECIPES if dtype == torch.float32 and number == 0 else RECIPES[number % 3 :][:1]
                ):
                    turn += 1
                    for lead, has_bias in in_turn((((3,), True), ((), False)), keep=2, first=turn + number):
                        three_steps(ctx, split, sizes, lead, has_bias, dtype, recipe)


def three_steps(
    ctx: pb.Context, split: Split, sizes: tuple[int, int, int], lead: tuple[int, ...], has_bias: bool,
    dtype: torch.dtype, recipe: dict[str, Any],
) -> None:  # fmt: skip
    t, k, n = sizes
    faults: list[str] = []  # all steps are made, so that a fault of one rank is not taken for another call

    def check(name: str, got: Tensor | None, expected: np.ndarray) -> None:
        try:
            near(name, got, expected, dtype)
        except AssertionError as error:
            faults.append(str(error))

    scales, expected = pt.DelayedScaling(**recipe).to(device(ctx)), OneProcess(**recipe)
    for step, factor in enumerate((4.0, 0.25, 1.5)):
        whole = [
            factor * drawn(ctx, step, t, *lead, k, dtype=dtype),
            drawn(ctx, step + 10, n, k, dtype=dtype) / factor,
        ]
        if has_bias:
            whole.append(drawn(ctx, step + 20, n, dtype=dtype))
        gradient = 1e-4 * factor * drawn(ctx, step + 30, t, *lead, n, dtype=dtype)
        parts = [split.x, split.w, split.bias]
        x, w, *rest = mine = [
            each[part].clone().requires_grad_() for each, part in zip(whole, parts, strict=False)
        ]
        bias = dict(zip(["bias"], rest, strict=False))
        y = split.function(x, w, ctx, **bias, scales=scales)
        check(f"step {step}: y", y, expected.forward(whole[0], whole[1], *whole[2:] or [None])[split.y])
        y.backward(gradient[split.y])
        whole_gradients = expected.back(gradient)
        for name, tensor, full, part in zip("xwb", mine, whole_gradients, parts, strict=False):
            scale = 1e4 / max(1.0, 1e4 * float(np.abs(full).max(initial=0)))  # gradients are small
            check(f"step {step}: gradient of {name}", scale * tensor.grad, scale * full[part])
        if not np.array_equal(array(scales.amax_history), expected.history()):
            faults.append(f"step {step}: histories")
    frozen = scales.amax_history.clone()
    whole[0] = whole[0] * 2  # larger than what was recorded: the scale stays, values saturate
    with torch.no_grad():
        y = split.function(whole[0][split.x], w, ctx, **bias, scales=scales)
    kept = expected.forward(whole[0], whole[1], *whole[2:] or [None], update=False)
    check("frozen y", y, kept[split.y])
    if not torch.equal(scales.amax_history, frozen):
        faults.append("the frozen history changed")
    assert not faults, "; ".join(faults)


def near_float32(ctx: pb.Context) -> None:
    """8 bits are near float32: by two bits of mantissa where gradients are e5m2."""
    for split in splits(ctx, (16, 64, 32)):
        x, w, gradient = (
            drawn(ctx, seed, *shape) for seed, shape in ((1, (16, 64)), (2, (32, 64)), (3, (16, 32)))
        )
        mine = [each[part].clone().requires_grad_() for each, part in ((x, split.x), (w, split.w))]
        y = split.function(*mine, ctx, scales=pt.DelayedScaling().to(x.device))
        y.backward(gradient[split.y])
        for name, got, exact, allowed in (
            ("y", y, (x @ w.t())[split.y], 0.05),
            ("x", mine[0].grad, (gradient @ w)[split.x], 0.09),
            ("w", mine[1].grad, (gradient.t() @ x)[split.w], 0.09),
        ):
            errors = ctx.comm.allgather(((got - exact).norm() / exact.norm()).item())
            assert min(errors) > 1e-4, f"{split.function.__name__} {name}: {errors}"
            assert max(errors) < allowed, f"{split.function.__name__} {name}: {errors}"


# -- layers


class Mlp(nn.Module):
    def __init__(
        self, ctx: pb.Context, dtype: torch.dtype, sequence_parallel: bool, scales: Any, k: int = 32
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        how = {"ctx": ctx, "sequence_parallel": sequence_parallel, "dtype": dtype, "scales": scales}
        self.up, self.down = pt.ColumnParallelLinear(k, 2 * k, **how), pt.RowParallelLinear(2 * k, k, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def loss_goes_down(ctx: pb.Context) -> None:
    """Training in 8 bits follows training in the type of the weights."""
    kinds = ((torch.bfloat16, True), (torch.float32, False))
    for dtype, sequence_parallel in in_turn(kinds, keep=2, first=ctx.size // 2):
        x = drawn(ctx, 1, 64, 32, dtype=dtype)
        target = (x.float() @ drawn(ctx, 2, 32, 32).t() / 6).tanh()
        tokens = own(64, ctx) if sequence_parallel else slice(None)
        curves = []
        for scales in (None, pt.DelayedScaling(amax_history_len=16)):
            model = Mlp(ctx, dtype, sequence_parallel, scales)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            losses = []
            for _ in range(60):
                optimizer.zero_grad()
                loss = (model(x[tokens]).float() - target[tokens]).square().sum() / target.numel()
                loss.backward()
                optimizer.step()
                losses.append(sum(ctx.comm.allgather(loss.item())) if sequence_parallel else loss.item())
            curves.append(losses)
        plain, eight = curves
        assert eight[-1] < 0.25 * eight[0], f"{eight[0]} to {eight[-1]}"
        assert eight[-1] < plain[-1] + 0.01 * eight[0], f"{eight[-1]}, {plain[-1]} without scales"


def one_recipe_for_many_layers(ctx: pb.Context) -> None:
    recipe = pt.DelayedScaling(amax_history_len=3)
    model = Mlp(ctx, torch.float32, False, recipe)
    model(drawn(ctx, 1, 8, 32)).sum().backward()
    assert not recipe.amax_history.any()
    up, down = model.up.scales, model.down.scales
    assert up.amax_history[:, 0].all()
    assert not torch.equal(up.amax_history, down.amax_history)
    assert (
        "DelayedScaling(margin=0, fp8_format='hybrid', amax_history_len=3, amax_compute_algo='max')"
        in repr(model)
    )
    assert model.bfloat16().up.scales.amax_history.dtype == torch.float32
    assert set(model.state_dict()) == {
        f"{layer}.{name}" for layer in ("up", "down") for name in ("weight", "bias", "scales.amax_history")
    }
    copied = copy.deepcopy(model)
    copied(drawn(ctx, 2, 8, 32, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(up.amax_history, model.up.scales.amax_history)
    assert not torch.equal(up.amax_history, copied.up.scales.amax_history)


def forms_of_layers(ctx: pb.Context) -> None:
    """Each way to make a layer, by class, by from_linear and by style, multiplies as OneProcess does."""
    t, k, n = 8, 12, 16
    torch.manual_seed(0)
    whole, x, gradient = nn.Linear(k, n).to(device(ctx)), drawn(ctx, 1, t, k), drawn(ctx, 2, t, n)
    whole.load_state_dict({"weight": drawn(ctx, 3, n, k), "bias": drawn(ctx, 4, n)})
    scales = pt.DelayedScaling(amax_history_len=2)
    tokens, inputs, outputs = (own(extent, ctx) for extent in (t, k, n))
    column, row = pt.ColumnParallelLinear.from_linear, pt.RowParallelLinear.from_linear
    everything: Any = slice(None)
    layers = [
        (column(whole, ctx, scales=scales), everything, (..., outputs)),
        (column(whole, ctx, scales=scales, gather_output=True), everything, everything),
        (column(whole, ctx, scales=scales, sequence_parallel=True), tokens, (..., outputs)),
        (row(whole, ctx, scales=scales), (..., inputs), everything),
        (row(whole, ctx, scales=scales, input_is_parallel=False), everything, everything),
        (row(whole, ctx, scales=scales, sequence_parallel=True), (..., inputs), tokens),
    ]
    mesh = pt.meshes.mesh_of(ctx)
    if mesh is not None:
        for style, of_x, of_y in (
            (pt.ColwiseParallel(ctx=ctx, scales=scales), everything, (..., outputs)),
            (pt.RowwiseParallel(ctx=ctx, scales=scales), (..., inputs), everything),
        ):
            layers.append((parallelize_module(copy.deepcopy(whole), mesh, style), of_x, of_y))
    for layer, of_x, of_y in layers:
        expected, part = OneProcess(amax_history_len=2), layer.shard
        mine = x[of_x].clone().requires_grad_()
        y = layer(mine)
        near("y", y, expected.forward(x, whole.weight, whole.bias)[of_y], torch.float32)
        y.backward(gradient[of_y])
        gx, gw, gb = expected.back(gradient)
        near("x", mine.grad, gx[of_x], torch.float32)
        near(
            "weight", layer.weight.grad, gw[part if inside.split(layer) == 0 else (..., part)], torch.float32
        )
        near("bias", layer.bias.grad, gb[part] if inside.split(layer) == 0 else gb, torch.float32)
        assert np.array_equal(array(layer.scales.amax_history), expected.history())


def types(ctx: pb.Context) -> None:
    """Weights of float32 with an input of bfloat16, also by autocast: gradients have the types of what they are of."""
    x, where = drawn(ctx, 1, 8, 12, dtype=torch.bfloat16), device(ctx).type
    for autocast in (False, True):
        layer = pt.ColumnParallelLinear(12, 16, ctx=ctx, sequence_parallel=True, scales=pt.DelayedScaling())
        mine = (x.float() if autocast else x)[own(8, ctx)].clone().requires_grad_()
        with torch.autocast(where, torch.bfloat16, enabled=autocast):
            y = layer(mine)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert (mine.grad.dtype, layer.weight.grad.dtype) == (mine.dtype, torch.float32)
        weight = layer.weight.full_tensor() if ctx.size > 1 else layer.weight
        amax = layer.scales.amax_history[:2, 0]  # of the weight in float32, not in bfloat16
        assert torch.equal(amax, torch.stack([x.float().abs().max(), weight.detach().abs().max()]))


def dtensors(ctx: pb.Context) -> None:
    mesh = pt.meshes.mesh_of(ctx)
    if mesh is None:
        return
    x, w = drawn(ctx, 1, 7, 6), drawn(ctx, 2, 8, 6)
    scales = pt.DelayedScaling().to(x.device)
    y = pt.allgather_matmul(
        *(distribute_tensor(each, mesh, [Shard(0)]) for each in (x, w)), ctx, scales=scales
    )
    near("y", y.full_tensor(), OneProcess().forward(x, w, None), torch.float32)


def partly_frozen(ctx: pb.Context) -> None:
    """Only what needs a gradient gets one; the gradient is recorded if x or w needs one."""
    for needs in range(1, 8):
        for make in (pt.ColumnParallelLinear, pt.RowParallelLinear):
            layer = make(12, 16, ctx=ctx, sequence_parallel=True, scales=pt.DelayedScaling())
            rows = own(8, ctx) if make is pt.ColumnParallelLinear else slice(None)
            width = slice(None) if make is pt.ColumnParallelLinear else layer.shard
            x = drawn(ctx, 1, 8, 12)[rows, width].clone().requires_grad_(bool(needs & 1))
            layer.weight.requires_grad_(bool(needs & 2))
            layer.bias.requires_grad_(bool(needs & 4))
            layer(x).square().sum().backward()
            for bit, each in ((1, x), (2, layer.weight), (4, layer.bias)):
                assert (each.grad is not None) == bool(needs & bit), f"{needs}: {each.shape}"
            assert bool(layer.scales.amax_history[2, 0] > 0) == (needs != 4)


def used_twice(ctx: pb.Context) -> None:
    """A layer twice in one graph, and a graph that goes back twice: each use is recorded."""
    layer = pt.RowParallelLinear(
        12, 12, ctx=ctx, input_is_parallel=False, scales=pt.DelayedScaling(amax_history_len=8)
    )
    y = layer(layer(drawn(ctx, 1, 8, 12))).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert (layer.scales.amax_history > 0).sum(1).tolist() == [2, 2, 4]


def checkpointed(ctx: pb.Context) -> None:
    """Activation checkpointing: the second pass is recorded, and the first too where gradients are enabled in it."""
    for reentrant, passes in ((False, 2), (True, 1)):
        layer = pt.ColumnParallelLinear(
            12, 16, ctx=ctx, gather_output=True, scales=pt.DelayedScaling(amax_history_len=4)
        )
        x = drawn(ctx, 1, 8, 12)
        mine, expected = (x.clone().requires_grad_() for _ in range(2))
        y = checkpoint(layer, mine, use_reentrant=reentrant)
        y.sum().backward()
        assert (layer.scales.amax_history > 0).sum(1).tolist() == [passes, passes, 1]
        other = pt.ColumnParallelLinear(12, 16, ctx=ctx, gather_output=True, scales=pt.DelayedScaling())
        other.load_state_dict({name: layer.state_dict()[name] for name in ("weight", "bias")})
        other(expected).sum().backward()
        compare("x", mine.grad, expected.grad, 1e-6)


# -- histories


def one_scale_for_all_ranks(ctx: pb.Context) -> None:
    """The largest value is on one rank, and every rank scales by it."""
    scales = pt.DelayedScaling(amax_history_len=2)
    x = torch.full((2, 4), 1.0 + ctx.rank, device=device(ctx)).requires_grad_()
    w = torch.full((3, 4), 2.0 - ctx.rank / 8, device=device(ctx)).requires_grad_()
    y = pt.allgather_matmul(x, w, ctx, scales=scales.to(x.device))
    y.backward(torch.full_like(y, -3.0 * (1 + ctx.rank)))
    assert scales.amax_history[:, 0].tolist() == [float(ctx.size), 2.0, 3.0 * ctx.size]
    expected = [448 / ctx.size, 448 / 2, 57344 / (3 * ctx.size)]
    assert scales.scale.tolist() == pytest.approx(expected, rel=1e-6)


def windows(ctx: pb.Context) -> None:
    """How scales follow from what was recorded."""
    w = torch.eye(4, device=device(ctx))

    def scale_after(values: list[float], **how: Any) -> float:
        scales = pt.DelayedScaling(**how).to(w.device)
        for value in values:
            pt.matmul_allreduce(torch.full((2, 4), value, device=w.device), w, ctx, scales=scales)
        return scales.scale[0].item()

    for values, how, amax in (
        ([], {}, 448.0),
        ([8.0, 1.0, 2.0], {"amax_history_len": 3}, 8.0),
        ([8.0, 1.0, 2.0], {"amax_history_len": 2}, 2.0),
        ([8.0, 2.0, 1.0], {"amax_compute_algo": "most_recent"}, 1.0),
        ([8.0, 1.0], {"margin": 3}, 64.0),
        ([8.0, 0.0, -0.0], {"amax_history_len": 1}, 8.0),
        ([8.0, float("nan"), -float("inf")], {"amax_compute_algo": "most_recent"}, 8.0),
        ([1e-42], {}, 448 * 2.0**-126),
    ):
        assert scale_after(values, **how) == pytest.approx(448 / amax, rel=1e-6), f"{values} {how}"


def not_finite(ctx: pb.Context) -> None:
    """An infinity on one rank makes the result of all no number, as a gradient scaler looks for; none is recorded."""
    scales = pt.DelayedScaling(amax_history_len=2).to(device(ctx))
    x, w = drawn(ctx, 1, 2, 4).requires_grad_(), drawn(ctx, 2, 3, 4).requires_grad_()
    pt.allgather_matmul(x, w, ctx, scales=scales).sum().backward()
    before = scales.amax_history.clone()
    wrong = x.detach().clone()
    if ctx.rank == ctx.size - 1:
        wrong[0, 0] = float("inf")
    assert pt.allgather_matmul(wrong, w, ctx, scales=scales).isnan().all()
    assert torch.equal(scales.amax_history[0], before[0])
    x.grad = None
    y = pt.allgather_matmul(x, w, ctx, scales=scales)
    y.backward(torch.full_like(y, float("nan") if ctx.rank == 0 else 1.0))
    assert x.grad.isnan().all()
    assert torch.equal(scales.amax_history[2], before[2])


def inference(ctx: pb.Context) -> None:
    """Under no_grad and in eval mode nothing is recorded; where nothing ever was, the tensors' own scale is taken."""
    x, w = drawn(ctx, 1, 8, 12), drawn(ctx, 2, 16, 12)
    for evaluates in (False, True):
        layer = pt.ColumnParallelLinear(
            12, 16, False, ctx=ctx, gather_output=True, scales=pt.DelayedScaling()
        )
        with torch.no_grad():
            local(layer.weight).copy_(w[layer.shard])
        layer.train(not evaluates)
        with torch.set_grad_enabled(evaluates):
            near("own scale", layer(3 * x), OneProcess().forward(3 * x, w, None), torch.float32)
        assert not layer.scales.amax_history.any()
        layer.train()
        expected = OneProcess()
        expected.forward(x, w, None)
        expected.back(torch.ones(8, 16))
        layer(x).sum().backward()
        before = layer.scales.amax_history.clone()
        assert np.array_equal(array(before), expected.history())
        layer.train(not evaluates)
        with torch.set_grad_enabled(evaluates):
            y = layer(3 * x)
        near("frozen scale", y, expected.forward(3 * x, w, None, update=False), torch.float32)
        if evaluates:  # a gradient may go through frozen layers
            layer.weight.grad = None
            y.backward(torch.full_like(y, 5.0))
            gw = expected.back(torch.full((8, 16), 5.0), update=False)[1]
            near("gradient", layer.weight.grad, gw[layer.shard], torch.float32)
        assert torch.equal(layer.scales.amax_history, before)


def frozen_says_nothing(ctx: pb.Context) -> None:
    """With frozen scales that were recorded no amax is reduced; histories are compared once, and after a load again."""
    scales = pt.DelayedScaling().to(device(ctx))
    x, w = drawn(ctx, 1, 8, 12), drawn(ctx, 2, 16, 12)
    calls: list[str] = []

    def log(name: str) -> None:
        function = getattr(float8, name)
        patch.setattr(float8, name, lambda *args: calls.append(name) or function(*args))

    with pytest.MonkeyPatch.context() as patch:
        log("reduce")
        log("digest")
        for training, expected in ((True, ["digest", "reduce"]), (True, ["reduce"]), (False, [])):
            pt.matmul_allreduce(x, w, ctx, scales=scales.train(training))
            assert calls == expected
            calls.clear()
        scales.load_state_dict(scales.state_dict())
        pt.matmul_allreduce(x, w, ctx, scales=scales)
        assert calls == ["digest"]


def static(ctx: pb.Context) -> None:
    """pblasmp.Scales: of wider tensors, which are cast, and of 8-bit ones."""
    x, w, bias = drawn(ctx, 1, 8, 12), drawn(ctx, 2, 16, 12), drawn(ctx, 3, 16)
    of_x, of_w = 2.0**-6, 2.0**-7
    x8, w8 = ((each / unit).clamp(-448, 448).to(torch.float8_e4m3fn) for each, unit in ((x, of_x), (w, of_w)))
    expected = (x8.double() @ w8.double().t()) * (of_x * of_w) + bias.bfloat16().double()
    arrays = pb.Scales(a=torch.full((), of_x, device=x.device), b=torch.full((1,), of_w, device=x.device))
    for split in splits(ctx, (8, 12, 16)):
        for scales in (pb.Scales(a=of_x, b=of_w), arrays):
            y = split.function(x[split.x], w[split.w], ctx, bias=bias[split.bias], scales=scales)
            near("y", y, array(expected)[split.y], torch.float32)
            y = split.function(x8[split.x], w8[split.w], ctx, bias=bias[split.bias], scales=scales)
            near("y of 8 bits", y, array(expected)[split.y], torch.bfloat16)
    layer = pt.RowParallelLinear(12, 16, False, ctx=ctx, scales=pb.Scales(a=of_x, b=of_w))
    assert "scales=Scales(a, b, tensor)" in repr(layer)
    with torch.no_grad():
        local(layer.weight).copy_(w[:, layer.shard])
        near("layer", layer(x[:, layer.shard]), array(expected - bias.bfloat16()), torch.float32)
    ones = pt.matmul_allreduce(x8[:, own(12, ctx)], w8[:, own(12, ctx)], ctx, scales=pb.Scales())
    near("no scales", ones, array(x8.double() @ w8.double().t()), torch.bfloat16)


# -- what is kept


def keep(kept: list[Tensor], tensor: Tensor) -> Tensor:
    kept.append(tensor)
    return tensor


def saved_tensors(ctx: pb.Context) -> None:
    """A layer keeps its input once, in 8 bits with scales, and nothing that no gradient needs."""
    t, k, n = 24 * ctx.size, 16 * ctx.size, 32 * ctx.size
    wide, eight = torch.float32, torch.float8_e4m3fn
    mine = {
        "allgather_matmul": ((t, k), (n // ctx.size, k)),
        "matmul_reduce_scatter": ((t, k // ctx.size), (n, k // ctx.size)),
        "matmul_allreduce": ((t, k // ctx.size), (n, k // ctx.size)),
        "matmul_allgather": ((t, k), (n // ctx.size, k)),
        "matmul_local": ((t, k), (n // ctx.size, k)),
        "split_matmul_allreduce": ((t, k), (n, k // ctx.size)),
    }
    for split in splits(ctx, (t, k, n)):
        of_x, of_w = mine[split.function.__name__]
        for scales in (None, pt.DelayedScaling().to(device(ctx))):
            for needs in range(4):
                x, w = drawn(ctx, 1, t, k)[split.x].contiguous(), drawn(ctx, 2, n, k)[split.w].contiguous()
                x.requires_grad_(bool(needs & 1))
                w.requires_grad_(bool(needs & 2))
                kept: list[Tensor] = []
                with torch.autograd.graph.saved_tensors_hooks(partial(keep, kept), lambda each: each):
                    split.function(x, w, ctx, scales=scales)
                kind = wide if scales is None else eight
                expected = []
                if needs & 2:
                    shape = of_x
                    if scales is not None and split.function is split_matmul_allreduce:
                        shape = (t, k // ctx.size)  # this rank's part only
                    expected.append((shape, kind))
                gathers = split.function is pt.matmul_reduce_scatter
                if needs & 1 or (gathers and needs):
                    expected.append((of_w, kind))
                if scales is not None and needs:
                    expected.append(((2,), wide))
                found = [(tuple(each.shape), each.dtype) for each in kept]
                assert found == expected, f"{split.function.__name__} {needs}: {found}, expected {expected}"
                if scales is None:  # no copies: what was given
                    assert all(
                        each.data_ptr() in (x.data_ptr(), w.data_ptr())
                        for each in kept
                        if split.function is not pt.allgather_matmul or each.shape == w.shape
                    )


def tensor_cores(ctx: pb.Context) -> None:
    """What a GPU multiplies local 8-bit matrices with, on the CPU, which has that function too."""
    g, x = drawn(ctx, 1, 16, 48).to(torch.float8_e5m2), drawn(ctx, 2, 32, 48).to(torch.float8_e4m3fn)
    units = torch.tensor([0.5], device=g.device), torch.tensor([0.25], device=g.device)
    for dtype in (torch.bfloat16, torch.float32):
        y = float8.on_tensor_cores(g, x, units, dtype)
        compare(
            "product",
            y,
            float8.multiply_local(g, x, units, dtype),
            2**-7 if dtype == torch.bfloat16 else 1e-6,
        )


# -- FSDP2


@starts_ranks
@on_ranks(4, runner=run_torch, timeout=300)
def test_with_fsdp(comm: Any) -> None:
    """Sharded along the other dimension of a mesh, layers train as they do without: all have the same tokens."""
    with world(comm):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pb.Context(mesh["tp"], engine="host") as ctx:
            for dtype in (torch.float32, torch.bfloat16):
                one_fsdp(ctx, mesh, dtype)


def one_fsdp(ctx: pb.Context, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    model = Mlp(ctx, dtype, True, pt.DelayedScaling(amax_history_len=2))
    sharded = copy.deepcopy(model)
    for layer in (sharded.up, sharded.down, sharded):
        fully_shard(layer, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, sharded)]
    for step in range(3):
        x = drawn(ctx, step, 8, 32, dtype=dtype)[own(8, ctx)]
        results = []
        for each, optimizer in zip((model, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            results.append(each(x))
            results[-1].square().sum().backward()
            optimizer.step()
        compare(f"step {step}: y", results[1], results[0], TOLERANCE[dtype])
        for got, expected in zip(sharded.buffers(), model.buffers(), strict=True):
            compare(f"step {step}: histories", got, expected, TOLERANCE[dtype])


# -- checkpoints


def save(comm: Any, directory: str) -> None:
    """Train two steps and save; what the next step gives is for whoever loads it."""
    with host(comm) as ctx:
        model = trained(ctx, pt.DelayedScaling(amax_history_len=4), range(2))
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=directory)
        histories = [layer.scales.amax_history.clone() for layer in (model.up, model.down)]
        with torch.no_grad():
            y = model(3 * drawn(ctx, 9, 8, 32))
        if ctx.rank == 0:
            torch.save({"y": y, "histories": histories}, Path(directory) / "expected.pt")
        ctx.comm.barrier()


def trained(ctx: pb.Context, scales: Any, steps: range) -> Mlp:
    model = Mlp(ctx, torch.float32, False, scales)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps:
        optimizer.zero_grad()
        model(drawn(ctx, step, 8, 32)).square().sum().backward()
        optimizer.step()
    return model


def load(comm: Any, directory: str) -> None:
    """Histories and scales come back on any number of ranks."""
    with host(comm) as ctx:
        expected = torch.load(Path(directory) / "expected.pt")
        model = Mlp(ctx, torch.float32, False, pt.DelayedScaling(amax_history_len=4))
        x = drawn(ctx, 9, 8, 32)
        with torch.no_grad():
            model(x)  # frozen before anything was recorded
        state = get_model_state_dict(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as PyTorch warns on one rank
            dcp.load({"model": state}, checkpoint_id=directory)
        set_model_state_dict(model, state)
        for layer, history in zip((model.up, model.down), expected["histories"], strict=True):
            assert torch.equal(layer.scales.amax_history, history)
        with torch.no_grad():
            compare(
                "y", model(3 * x), expected["y"], 0.02
            )  # a sum in another order may round to another of 8 bits
        model(x).sum().backward()
        assert torch.equal(model.up.scales.amax_history[0, 1:], expected["histories"][0][0, :-1])


def state_dicts(ctx: pb.Context) -> None:
    """Histories of other lengths are taken, newest first; a state without any leaves them."""
    layer, short, long = (
        pt.ColumnParallelLinear(12, 16, ctx=ctx, scales=pt.DelayedScaling(amax_history_len=length))
        for length in (3, 2, 5)
    )
    for seed in range(3):
        layer(seed + drawn(ctx, seed, 8, 12)).sum().backward()
    state = layer.state_dict()
    short.load_state_dict(state)
    long.load_state_dict(state)
    history = layer.scales.amax_history
    assert torch.equal(short.scales.amax_history, history[:, :2])
    assert torch.equal(long.scales.amax_history[:, :3], history)
    assert not long.scales.amax_history[:, 3:].any()
    plain = pt.ColumnParallelLinear(12, 16, ctx=ctx)
    long.load_state_dict(plain.state_dict())
    assert torch.equal(long.scales.amax_history[:, :3], history)
    with pytest.raises(RuntimeError, match=r"size mismatch for scales\.amax_history"):
        long.load_state_dict({**state, "scales.amax_history": torch.zeros(2, 5)})


# -- torch.compile


def compiled(comm: Any, backend: str, sequence_parallel: list[bool]) -> None:
    """torch.compile without a graph break: losses, gradients and histories as without it."""
    import_compiler()
    with host(comm) as ctx:
        for each in sequence_parallel:
            one_compiled(ctx, each, backend)


def one_compiled(ctx: pb.Context, sequence_parallel: bool, backend: str) -> None:
    torch._dynamo.reset()
    eager = Mlp(ctx, torch.float32, sequence_parallel, pt.DelayedScaling(amax_history_len=2))
    other = copy.deepcopy(eager)
    fast = torch.compile(other, backend=backend, fullgraph=True)
    for step in range(3):
        x = (1 + step) * drawn(ctx, step, 8, 32)[own(8, ctx) if sequence_parallel else slice(None)]
        results = []
        for run, model in ((eager, eager), (fast, other)):
            model.zero_grad()
            y = run(x)
            y.square().sum().backward()
            results.append([y, *(local(p.grad) for p in model.parameters()), *model.buffers()])
        for got, expected in zip(*reversed(results), strict=True):
            compare(f"step {step}", got, expected, 1e-6)
    with torch.no_grad():
        compare("frozen", fast(x), eager(x), 1e-6)
        static = pt.RowParallelLinear(32, 8, ctx=ctx, scales=pb.Scales(a=0.01, b=torch.tensor(0.001)))
        mine = x[..., own(32, ctx)]
        fast = torch.compile(static, backend=backend, fullgraph=True)
        compare("static", fast(mine), static(mine), 1e-6)


# -- errors


def refused(ctx: pb.Context) -> None:
    recipe: Any = pt.DelayedScaling
    raises("margin: expected", recipe, margin=-1)
    raises("margin: expected an integer from 0 to 64, got 65", recipe, margin=65)
    raises("margin: expected an integer", recipe, margin=0.5)
    raises("amax_history_len: expected", recipe, amax_history_len=0)
    raises("fp8_format: expected 'hybrid' or 'e4m3', got 'e5m2'", recipe, fp8_format="e5m2")
    raises("amax_compute_algo: expected 'max' or 'most_recent', got 'min'", recipe, amax_compute_algo="min")
    unknown = "scales: expected a DelayedScaling or pblasmp.Scales, got float"
    scales, x, w = recipe().to(device(ctx)), drawn(ctx, 1, 4, 12), drawn(ctx, 2, 8, 12)
    last = ctx.rank == ctx.size - 1  # what is wrong there is raised on every rank
    for make in (pt.ColumnParallelLinear, pt.RowParallelLinear):
        raises(unknown, make, 12, 16, ctx=ctx, scales=1.0 if last else scales)
    types = "expected float32, float16 or bfloat16"
    for split in splits(ctx, (4, 12, 8)):
        product = partial(split.function, ctx=ctx)
        mine, weights = x[split.x].contiguous(), w[split.w].contiguous()
        raises(unknown, product, mine, weights, scales=1.0 if last else scales)
        for other in (torch.float64, torch.float8_e4m3fn):
            wrong = mine.to(other) if last else mine
            match = f"x: dtype is {other}, {types} with DelayedScaling"
            raises(match, product, wrong, weights, scales=scales)
        match = f"w: dtype is torch.float64, {types}, or 8 bits"
        raises(match, product, mine, weights.double(), scales=pb.Scales())
        for given in (pb.Scales(d=2.0), pb.Scales(amax=np.zeros(1)), pb.Scales(mode="block", a=x, b=x)):
            raises("scales: .*, expected only a and b", product, mine, weights, scales=given)
        for value in (torch.ones(2), torch.ones(1).double(), np.ones(1, np.float32)):
            match = "scales: b: expected a number or a tensor of one float32"
            raises(match, product, mine, weights, scales=pb.Scales(b=value))
        match = r"pblasmp.Scales has no scale of gradients: use DelayedScaling, or torch.no_grad\(\)"
        raises(match, product, mine, weights.clone().requires_grad_(), scales=pb.Scales())
        raises("scales: on meta, expected x's", product, mine, weights, scales=recipe().to("meta"))
        raises("w: on meta, expected x's", product, mine, weights.to("meta"), scales=scales)
    match = "x: the last dimension is 11, expected w's 12"
    raises(match, matmul_local, x[:, :11], w, ctx, scales=scales)
    asked = w.clone().requires_grad_()
    y = matmul_local(x, asked, ctx, scales=scales)
    with pytest.raises(pb.UnsupportedError, match="no second derivative"):
        torch.autograd.grad(y.sum(), asked, create_graph=True)
    if ctx.size > 1:
        ranks_differ(ctx, x, w)


def ranks_differ(ctx: pb.Context, x: Tensor, w: Tensor) -> None:
    """What must be the same on every rank, and is not, is said on every rank."""
    held = torch.ones(1 if ctx.rank == 0 else 3, 12, device=device(ctx))
    words = r": the ranks hold \[1, 3.*, expected \["
    scales, last = pt.DelayedScaling().to(x.device), ctx.rank == ctx.size - 1
    raises("x" + words, pt.allgather_matmul, held.clone().requires_grad_(), w, ctx, scales=scales)
    raises("w" + words, pt.matmul_allgather, x, held, ctx, scales=scales)
    other = pt.DelayedScaling().to(x.device)
    other.load_state_dict({"amax_history": other.amax_history + ctx.rank})
    unlike: tuple[tuple[str, Any], ...] = (
        ("scales", pt.DelayedScaling(margin=ctx.rank)),
        ("scales", pt.DelayedScaling(amax_compute_algo="most_recent" if last else "max")),
        ("scales", pt.DelayedScaling(fp8_format="e4m3" if last else "hybrid")),
        ("scales", pt.DelayedScaling().train(not last)),
        ("scales", pb.Scales(a=1.0 + ctx.rank)),
        ("scales", None if last else scales),
        ("histories", other),
    )
    for name, mine in unlike:
        with pytest.raises(pb.RankMismatchError, match=f"{name}:"):
            pt.matmul_allreduce(x, w, ctx, scales=mine.to(x.device) if isinstance(mine, nn.Module) else mine)
    with pytest.raises(pb.RankMismatchError, match="margin=1, "):
        pt.RowParallelLinear(12, 16, ctx=ctx, scales=pt.DelayedScaling(margin=int(last)))


CASES = (
    near_float32, loss_goes_down, one_recipe_for_many_layers, forms_of_layers, types, dtensors, partly_frozen,
    used_twice, checkpointed, one_scale_for_all_ranks, windows, not_finite, inference, frozen_says_nothing, static,
    saved_tensors, tensor_cores, state_dicts, refused,
)  # fmt: skip


# -- the tests


@starts_ranks
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("run", [run_mpi, run_torch])
def test_histories_are_loaded_on_other_numbers_of_ranks(tmp_path, run):
    run(save, 4, timeout=300, directory=str(tmp_path))
    for nranks in (2, 1):
        run(load, nranks, timeout=300, directory=str(tmp_path))


@starts_ranks
@pytest.mark.parametrize(
    ("run", "backend", "sequence_parallel"),
    [(run_mpi, "aot_eager", [False, *only_long(True)]), (run_torch, "inductor", [*only_long(False), True])],
)
def test_compiled(run, backend, sequence_parallel):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    how = {"backend": backend, "sequence_parallel": sequence_parallel}
    run(compiled, 2, timeout=500, launch=True, **how)  # PyTorch keeps meshes of before


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("capability", "in_8_bits"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)]
)
def test_local_products_take_tensor_cores_that_the_gpu_has(monkeypatch, capability, in_8_bits):
    a, b = (torch.ones(n, 32).to(torch.float8_e4m3fn) for n in (16, 48))
    units = torch.full((1,), 0.5), torch.full((1,), 2.0)
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        float8, "on_tensor_cores", lambda *given: asked.append(1) or torch.full((16, 48), 32.0)
    )
    y = float8.multiply_local(a.as_subclass(OnGpu), b, units, torch.float32)
    assert torch.equal(y.as_subclass(Tensor), torch.full((16, 48), 32.0))
    assert bool(asked) == in_8_bits
