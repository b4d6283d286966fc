# SPDX-License-Identifier: Apache-2.0
"""PyTorch's layers on GPUs: the cases of tests/mpi/torch on cuBLASMp, started by either launcher.

mpirun -n 4 python -m pytest tests/gpu/test_torch.py
torchrun --nproc-per-node 4 -m pytest tests/gpu/test_torch.py
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

import pblasmp as pb
import pblasmp.torch as pt
from tests.helpers import torch_ranks as ranks
from tests.helpers.gpu.products import everywhere
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


def check(ctx: pb.Context, results: Iterable[ranks.Case]) -> None:
    faults = [f"{case}: {fault}" for case, fault in results if fault]
    fault = everywhere(ctx, "\n".join(faults))
    assert not fault, fault


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [(8, 12, 16), (64, 128, 256), *ranks.UNEVEN], ids=str)
def test_functions(ctx, sizes, dtype):
    tolerance = (
        0 if dtype.startswith("float") and dtype != "float16" else ranks.TOLERANCE[getattr(torch, dtype)]
    )
    check(ctx, cases.functions(ctx, sizes, getattr(torch, dtype), tolerance))


@pytest.mark.parametrize("case", cases.LAYERS, ids=lambda case: case.__name__)
def test_layers(ctx, case):
    check(ctx, [(case.__name__, ranks.failure(case, ctx))])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(8, 12, 16), (256, 128, 512), *ranks.UNEVEN], ids=str)
def test_mlp(ctx, sizes, dtype, sequence_parallel):
    check(ctx, cases.trained(ctx, ranks.Mlp, sizes, sequence_parallel, dtype))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_attention(ctx, dtype, sequence_parallel):
    check(ctx, cases.trained(ctx, cases.Attention, (64, 128, 256), sequence_parallel, dtype))


@pytest.mark.parametrize("sizes", [(8, 12, 16), (256, 128, 512), *ranks.UNEVEN], ids=str)
def test_scaled_products(ctx, sizes):
    check(ctx, scaled.products(ctx, (sizes,)))


@pytest.mark.parametrize("case", scaled.CASES, ids=lambda case: case.__name__)
def test_scaled_layers(ctx, case):
    check(ctx, [(case.__name__, ranks.failure(case, ctx))])


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
        check(ctx, [(case.__name__, ranks.failure(partial(case, mesh=mesh), ctx))])


def test_everything_is_queued_on_pytorchs_stream(ctx):
    """The input is written late, on another stream than the default one; so are the gradients."""

    def late(ctx: pb.Context) -> None:
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

    check(ctx, [("late", ranks.failure(late, ctx))])
