# SPDX-License-Identifier: Apache-2.0
"""PyTorch's layers on GPUs: the cases of tests/mpi/torch on cuBLASMp, started by either launcher.

mpirun -n 4 python -m pytest tests/gpu/test_torch.py
torchrun --nproc-per-node 4 -m pytest tests/gpu/test_torch.py
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pblasmp as pb
import pblasmp.torch as pt
from tests.helpers import inside
from tests.helpers import torch_ranks as ranks
from tests.helpers.slow import fewer
from tests.mpi.torch import test_float8 as scaled
from tests.mpi.torch import test_layers as cases
from tests.mpi.torch import test_models as models


@pytest.fixture(scope="session")
def ctx() -> Iterator[pb.Context]:
    """A context on all ranks' GPUs, of MPI's ranks or of PyTorch's."""
    by_torchrun = dist.is_torchelastic_launched()
    if by_torchrun:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    with pb.Context(engine="cublasmp") as context:
        torch.cuda.set_device(context.engine.device.index)
        yield context
    if by_torchrun:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [(8, 12, 16), (64, 128, 256), *ranks.UNEVEN], ids=str)
def test_functions(ctx, sizes, dtype):
    tolerance = (
        0 if dtype.startswith("float") and dtype != "float16" else ranks.TOLERANCE[getattr(torch, dtype)]
    )
    cases.functions(ctx, sizes, getattr(torch, dtype), tolerance)


@pytest.mark.parametrize("case", cases.LAYERS, ids=lambda case: case.__name__)
def test_layers(ctx, case):
    case(ctx)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(8, 12, 16), (256, 128, 512), *ranks.UNEVEN], ids=str)
def test_mlp(ctx, sizes, dtype, sequence_parallel):
    cases.ten_steps(ctx, ranks.Mlp, sizes, sequence_parallel, dtype)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_attention(ctx, dtype, sequence_parallel):
    cases.ten_steps(ctx, cases.Attention, (64, 128, 256), sequence_parallel, dtype)


@pytest.mark.parametrize("sizes", fewer([(8, 12, 16), (256, 128, 512), *ranks.UNEVEN], 2), ids=str)
def test_scaled_products(ctx, sizes):
    scaled.products(ctx, (sizes,))


@pytest.mark.parametrize("case", scaled.CASES, ids=lambda case: case.__name__)
def test_scaled_layers(ctx, case):
    case(ctx)


@pytest.mark.parametrize(
    "case",
    [models.sequences, models.ties, models.loss_options, models.batch_first, models.bias_apart, models.regions,
     models.fused],
    ids=lambda case: case.__name__,
)  # fmt: skip
def test_models(ctx, case):
    if ctx.size == 1:
        pytest.skip("one rank has no device mesh")
    mesh = pt.meshes.mesh_of(ctx)
    with torch.device("cuda", ctx.engine.device.index):
        case(ctx, mesh)


def test_everything_is_queued_on_pytorchs_stream(ctx):
    """The input is written late, on another stream than the default one; so are the gradients."""
    up, down, split_up, split_down = cases.column_and_row(ctx, True)
    whole, tokens = ranks.integers(ctx, 7, 8, 12), ranks.own(8, ctx)
    x = torch.zeros_like(whole[tokens]).requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            x.copy_(whole[tokens])
        y = split_down(split_up(x).relu())
        torch.cuda._sleep(100_000_000)
        y.sum().backward()
    torch.cuda.synchronize()
    expected = down(up(whole.requires_grad_()).relu())
    expected.sum().backward()
    ranks.compare("y", y, expected[tokens])
    ranks.compare("x", x.grad, whole.grad[tokens])
    cases.compare_gradients("up", split_up, up)


def model_of(ctx: pb.Context) -> torch.nn.Module:
    torch.manual_seed(4)
    how = {"ctx": ctx, "sequence_parallel": True}
    layers = pt.ColumnParallelLinear(64, 256, **how), torch.nn.GELU(), pt.RowParallelLinear(256, 64, **how)
    return torch.nn.Sequential(*layers)


def step_of(ctx: pb.Context, model: torch.nn.Module, x: torch.Tensor, **how):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, **how)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().sum() / (128 * 64)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return optimizer, step


def batches(ctx: pb.Context, count: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(128, 64)[ranks.own(128, ctx)].to("cuda") for _ in range(count)]


def test_repeated_calls_at_the_same_addresses(ctx):
    """From the fourth call on graphs are replayed, unless one rank's arrays are elsewhere."""
    x, w = torch.empty(16, 8, device="cuda"), torch.empty(24, 8, device="cuda")
    for turn in range(12):
        x.copy_(ranks.integers(ctx, turn, 16, 8))
        w.copy_(ranks.integers(ctx, 50 + turn, 24, 8))
        given = x.clone() if turn > 6 and (turn + ctx.rank) % 2 else x
        whole = x @ w.T
        y = pb.matmul_allreduce(given, w, ctx, algo="one_shot")
        ranks.compare(f"matmul_allreduce, turn {turn}", y, ctx.size * whole)
        y = pb.matmul_reduce_scatter(given, w, ctx, algo="pull")
        ranks.compare(f"matmul_reduce_scatter, turn {turn}", y, ctx.size * whole[ranks.own(16, ctx)])
        y = pb.allgather_matmul(given, w, ctx, algo="push")
        ranks.compare(f"allgather_matmul, turn {turn}", y, whole.repeat(ctx.size, 1))
        for algo in ("pull", "nccl"):
            y = pb.matmul_allgather(given, w, ctx, algo=algo)
            ranks.compare(f"matmul_allgather {algo}, turn {turn}", y, whole.repeat(1, ctx.size))
    assert inside.graphs_kept(ctx), "no graph"


def test_other_memory_at_the_same_addresses(ctx):
    """NCCL registers with a graph the memory that it works on, which must not be the user's: that may be gone."""
    rows = 1 << 17  # of 64 bytes: blocks of PyTorch's allocator that it gives back, and that are copied
    w = torch.empty(8, 8, device="cuda", dtype=torch.float64)
    for turn in range(10):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        x = ranks.integers(ctx, turn, rows // ctx.size, 8)
        w.copy_(ranks.integers(ctx, 50 + turn, 8, 8))
        whole = x @ w.T
        y, gathered = pb.allgather_matmul(x, w, ctx, algo="nccl", return_gathered=True)
        ranks.compare(f"gathered, turn {turn}", gathered, x.repeat(ctx.size, 1))
        ranks.compare(f"allgather_matmul, turn {turn}", y, whole.repeat(ctx.size, 1))
        del y, gathered
        y = pb.matmul_allreduce(x, w, ctx, algo="nccl")
        ranks.compare(f"matmul_allreduce, turn {turn}", y, ctx.size * whole)
        del x, y, whole


def test_a_whole_step_is_a_cuda_graph(ctx):
    given = batches(ctx, 8)
    x = given[0].clone()
    _, step = step_of(ctx, model_of(ctx), x)
    expected = []
    for batch in given:
        x.copy_(batch)
        expected.append(float(step()))
    optimizer, step = step_of(ctx, model_of(ctx), x, capturable=True)
    stream, graph, losses = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in given[:2]:
            x.copy_(batch)
            losses.append(float(step()))
    optimizer.zero_grad()
    with torch.cuda.graph(graph, stream=stream):
        loss = step()
    for batch in given[2:]:
        x.copy_(batch)
        graph.replay()
        losses.append(float(loss))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    graph.reset()


def fully_sharded(layer: torch.nn.Module) -> torch.nn.Module:
    return fully_shard(layer, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))


def distributed(layer: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(layer, process_group=dist.new_group())


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("wrap", [fully_sharded, distributed], ids=lambda wrap: wrap.__name__)
def test_data_parallel_layers_beside_tensor_parallel_ones(ctx, wrap, captured):
    """Communicators of PyTorch's run beside ours, ranks late in turn; the losses are those of one process."""
    if not dist.is_initialized():
        pt.init_process_group()
    torch.manual_seed(0)
    sizes = (64, 64), (64, 256), (256, 64), (64, 64)
    wholes = [torch.nn.Linear(*each, bias=False, device="cuda", dtype=torch.float64) for each in sizes]
    given = [torch.randn(128, 64, dtype=torch.float64).to("cuda") for _ in range(20)]
    rate, mine = 1e-4, ranks.own(128, ctx)

    def training(layers: list[torch.nn.Module], x: torch.Tensor, rates: Iterable[float]) -> Any:
        model = torch.nn.Sequential(*layers[:2], torch.nn.GELU(), *layers[2:])
        optimizer = torch.optim.SGD(
            [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]
        )

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.roll(1, 1)).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    x, part = given[0].clone(), given[0][mine].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    how = {"ctx": ctx, "sequence_parallel": True}
    with torch.cuda.stream(stream):
        split = [
            wrap(copy.deepcopy(wholes[0])), pt.ColumnParallelLinear.from_linear(wholes[1], **how),
            pt.RowParallelLinear.from_linear(wholes[2], **how), wrap(copy.deepcopy(wholes[3])),
        ]  # fmt: skip
        alone = training(wholes, x, [rate] * 4)
        # data-parallel layers average the ranks' gradients, the others sum them
        together = training(split, part, [ctx.size * rate, rate, rate, ctx.size * rate])
        expected, losses, graph = [], [], None
        for turn, batch in enumerate(given):
            x.copy_(batch)
            part.copy_(batch[mine])
            expected.append(alone())
            if captured and turn == 12:
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    loss = together()
            if (turn + ctx.rank) % 3 == 0:
                torch.cuda._sleep(1_000_000)
            if graph is None:
                losses.append(together())
            else:
                graph.replay()
                losses.append(loss.clone())
    stream.synchronize()
    sums = torch.stack(losses)
    dist.all_reduce(sums)
    torch.testing.assert_close(sums, torch.stack(expected), rtol=1e-10, atol=0)
    assert sums[-1] < sums[0]
    if graph is not None:
        graph.reset()


def test_fsdp_along_the_other_dimension_of_a_mesh(ctx):
    """Late ranks in turn, exact at first, then in one kernel; the losses are those of one process."""
    if ctx.size < 4 or ctx.size % 2:
        pytest.skip("tensor parallelism takes two ranks, and so does FSDP")
    if not dist.is_initialized():
        pt.init_process_group()
    mesh = init_device_mesh("cuda", (2, ctx.size // 2), mesh_dim_names=("dp", "tp"))
    with pb.Context(mesh["tp"]) as tp:
        for dtype, width, steps, tolerance in (
            (torch.float64, 64, 8, 1e-10),
            (torch.bfloat16, 2048, 60, 5e-2),
        ):
            torch.manual_seed(0)
            up, down = (
                torch.nn.Linear(*sizes, bias=False, device="cuda", dtype=dtype)
                for sizes in ((width, 4 * width), (4 * width, width))
            )
            how = {"ctx": tp, "sequence_parallel": True}
            split = torch.nn.Sequential(
                pt.ColumnParallelLinear.from_linear(up, **how), torch.nn.GELU(),
                pt.RowParallelLinear.from_linear(down, **how),
            )  # fmt: skip
            fully_shard(split, mesh=mesh["dp"])
            rate = 1e-3 / width
            alone = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=rate)
            together = torch.optim.SGD(split.parameters(), lr=2 * rate)  # FSDP averages gradients
            expected, losses = [], []
            for turn in range(steps):
                x = torch.randn(512, width).to("cuda", dtype)
                mine = x.chunk(2)[mesh["dp"].get_local_rank()][ranks.own(256, tp)]
                if (turn + ctx.rank) % 3 == 0:
                    torch.cuda._sleep(1_000_000)
                for model, optimizer, given, found in (
                    (torch.nn.Sequential(up, torch.nn.GELU(), down), alone, x, expected),
                    (split, together, mine, losses),
                ):
                    optimizer.zero_grad()
                    loss = (model(given) - given.roll(1, 1)).double().square().sum()
                    loss.backward()
                    optimizer.step()
                    found.append(loss.detach())
            sums = torch.stack(losses)
            dist.all_reduce(sums)
            torch.testing.assert_close(sums, torch.stack(expected), rtol=tolerance, atol=0)
