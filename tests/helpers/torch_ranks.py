# SPDX-License-Identifier: Apache-2.0
"""What tests of PyTorch on ranks share: a context, whole arrays and this rank's parts of them, comparisons.

What is split is compared with the same in one process, which every rank computes too. ``comm`` is an MPI communicator
or a process group; on GPUs (tests/gpu) the same cases run on cuBLASMp.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.tensor_parallel import shard
from pblasmp.torch import functions
from tests.helpers.slow import in_turn

T = TypeVar("T")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
UNEVEN = ((7, 13, 10), (5, 6, 3), (1, 9, 4))  # tokens, inputs, outputs: they leave ranks without a part


@contextmanager
def host(comm: Any) -> Iterator[pb.Context]:
    torch.set_num_threads(1)
    with pb.Context(comm, engine="host") as ctx:
        yield ctx


def matmul_local(x: Tensor, w: Tensor, ctx: pb.Context, **how: Any) -> Tensor:
    """This rank's columns of y: the product of ``ColumnParallelLinear`` if every rank has the input."""
    return _of_layers("matmul_local", x, w, ctx, **how)


def split_matmul_allreduce(x: Tensor, w: Tensor, ctx: pb.Context, **how: Any) -> Tensor:
    """The product of ``RowParallelLinear`` if every rank has the input."""
    return _of_layers("split_matmul_allreduce", x, w, ctx, **how)


def _of_layers(
    form: str, x: Tensor, w: Tensor, ctx: pb.Context, *, bias: Tensor | None = None, scales: Any = None,
    algo: str = "auto", backward_algo: str = "auto",
) -> Tensor:  # fmt: skip
    return functions.multiply(form, x, w, ctx, bias, scales, algo, backward_algo)


PRODUCTS = {  # by function: what goes forward, and what gives the gradient of x
    pt.allgather_matmul: ("allgather_matmul", "matmul_reduce_scatter"),
    pt.matmul_reduce_scatter: ("matmul_reduce_scatter", "allgather_matmul"),
    pt.matmul_allreduce: ("matmul_allreduce", ""),
    pt.matmul_allgather: ("matmul_allgather", "matmul_allreduce"),
    matmul_local: ("", "matmul_allreduce"),
    split_matmul_allreduce: ("matmul_allreduce", "matmul_allgather"),
}


def own(n: int, ctx: pb.Context) -> slice:
    return shard(n, ctx.size, ctx.rank)


def device(ctx: pb.Context) -> torch.device:
    return torch.device("cpu" if ctx.engine.name == "host" else f"cuda:{ctx.engine.device.index}")


def integers(ctx: pb.Context, seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same small integers on every rank: products of them are exact."""
    values = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(device(ctx), dtype)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(name: str, got: Tensor | None, expected: Tensor | None, tolerance: float = 0) -> None:
    if got is None or expected is None:
        assert got is expected, f"{name}: {got} where {expected} was expected"
        return
    got = local(got)
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{name}: {got.dtype}, expected {expected.dtype}"
    if got.numel():
        scale = max(1.0, expected.abs().max().item())
        error = (got.detach().double() - expected.detach().double()).abs().max().item() / scale
        assert error <= tolerance, f"{name}: relative error {error}"  # NaN is not


def raises(
    match: str, call: Callable[..., Any], *args: Any, kind: Any = pb.ArgumentError, **how: Any
) -> None:
    """Fail unless a call raises this."""
    with pytest.raises(kind, match=match):
        call(*args, **how)


class Split(NamedTuple):
    """The layout of a function's operands: which part of a whole array this rank has, by name."""

    function: Callable[..., Tensor]
    x: Any
    w: Any
    bias: Any
    y: Any


def split_of(function: Callable[..., Tensor], ctx: pb.Context, sizes: tuple[int, int, int]) -> Split:
    """How a function's operands are split, for so many tokens, inputs and outputs."""
    tokens, inputs, outputs = (own(extent, ctx) for extent in sizes)
    every: Any = slice(None)
    parts = {
        pt.allgather_matmul: (tokens, outputs, outputs, (..., outputs)),
        pt.matmul_reduce_scatter: ((..., inputs), (..., inputs), every, tokens),
        pt.matmul_allreduce: ((..., inputs), (..., inputs), every, every),
        pt.matmul_allgather: (every, outputs, outputs, every),
        matmul_local: (every, outputs, outputs, (..., outputs)),
        split_matmul_allreduce: (every, (..., inputs), every, every),
    }
    return Split(function, *parts[function])


def splits(ctx: pb.Context, sizes: tuple[int, int, int]) -> list[Split]:
    """Every function's."""
    return [split_of(function, ctx, sizes) for function in PRODUCTS]


def import_compiler() -> None:
    """Import what ``torch.compile`` needs, which warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own
        importlib.import_module("torch._inductor.compile_fx")


def taken_in_turn(cases: Iterable[T], size: int) -> list[T]:
    """All cases on one rank, half of them on two ranks, the others on more."""
    return in_turn(cases, keep=1 if size == 1 else 2, first=int(size > 2))


def one_function(ctx: pb.Context, split: Split, whole: list[Tensor], tolerance: float) -> None:
    parts = [split.x, split.w, split.bias]
    mine = [tensor[part].clone().requires_grad_() for tensor, part in zip(whole, parts, strict=False)]
    whole = [tensor.clone().requires_grad_() for tensor in whole]
    expected = nn.functional.linear(*whole)
    weights = integers(ctx, 4, *expected.shape, dtype=expected.dtype)
    (expected * weights).sum().backward()
    x, w, *rest = mine
    bias = dict(zip(["bias"], rest, strict=False))
    y = split.function(x, w, ctx, **bias)
    compare("y", y, expected[split.y], tolerance)
    (y * weights[split.y]).sum().backward()
    for name, tensor, full, part in zip("xwb", mine, whole, parts, strict=False):
        compare(f"gradient of {name}", tensor.grad, full.grad[part], tolerance)
    with torch.no_grad():
        compare("y without gradient", split.function(x, w, ctx, **bias), expected[split.y], tolerance)


class Mlp(nn.Module):
    """Two layers; whole, or split after a whole one."""

    def __init__(self, sizes: tuple[int, int, int], like: Mlp | None, ctx: pb.Context, **how: Any) -> None:
        super().__init__()
        _, k, n = sizes
        if like is None:
            self.up, self.down = nn.Linear(k, n, **how), nn.Linear(n, k, **how)
        else:
            self.up = pt.ColumnParallelLinear.from_linear(like.up, ctx=ctx, **how)
            self.down = pt.RowParallelLinear.from_linear(like.down, ctx=ctx, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def world(comm: Any) -> Iterator[int]:
    """A process group of all ranks, whatever started them; yield how many there are."""
    torch.set_num_threads(1)
    made = not dist.is_initialized()
    if made:
        pt.init_process_group(comm)
    try:
        yield dist.get_world_size()
    finally:
        if made:
            dist.destroy_process_group()
