# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG001 - all parts of an operator have its arguments
"""Tensors between split layers: what is whole, split or to be summed, with gradients, under Megatron's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..context import Context
from ..errors import ArgumentError, ArgumentTypeError
from ..layout.axis import fault_of_shares
from ..tensor_parallel.call import check_context
from .forms import count, own, refuse_transforms
from .meshes import all_gather, reduce, reduce_scatter
from .registry import Gradients, once, operator


def copy_to_tensor_model_parallel_region(x: Tensor, ctx: Context) -> Tensor:
    """Return x, which every rank has; its gradient is summed over the ranks. Local; going back, it is collective.

    Args:
        x: (...), the same on every rank.
        ctx: the ranks.

    Raises:
        ArgumentError: x is no tensor of real floating-point numbers. This holds for the other functions, too.
    """
    return _moved(x, ctx, "same", "sum")


def reduce_from_tensor_model_parallel_region(x: Tensor, ctx: Context) -> Tensor:
    """Return the sum of the ranks' x on every rank; its gradient goes to all of them. Collective over the context.

    Args:
        x: (...), of one shape on all ranks.
        ctx: the ranks.
    """
    return _moved(x, ctx, "sum", "same")


def scatter_to_tensor_model_parallel_region(x: Tensor, ctx: Context) -> Tensor:
    """Return this rank's part of the last dimension; going back, parts are gathered. Collective over the context.

    Args:
        x: (..., K), the same on every rank.
        ctx: the ranks.

    Returns:
        (..., K/P), by ``pblasmp.tensor_parallel.shard``'s rule, as for all of these functions.
    """
    return _moved(x, ctx, "part", "gather", -1)


def gather_from_tensor_model_parallel_region(x: Tensor, ctx: Context) -> Tensor:
    """Return the ranks' parts of the last dimension together; going back, each takes its own. Collective.

    Collective over the context.

    Args:
        x: (..., K/P), this rank's part.
        ctx: the ranks.

    Returns:
        (..., K).

    Raises:
        ArgumentError: x is not split by ``shard``'s rule; raised on every rank.
    """
    return _moved(x, ctx, "gather", "part", -1)


def scatter_to_sequence_parallel_region(x: Tensor, ctx: Context) -> Tensor:
    """Return this rank's part of the first dimension; going back, parts are gathered. Collective over the context.

    Args:
        x: (T, ...), the same on every rank.
        ctx: the ranks.

    Returns:
        (T/P, ...).
    """
    return _moved(x, ctx, "part", "gather", 0)


def gather_from_sequence_parallel_region(
    x: Tensor, ctx: Context, tensor_parallel_output_grad: bool = True
) -> Tensor:
    """Return the ranks' parts of the first dimension together. Collective over the context.

    Args:
        x: (T/P, ...), this rank's part.
        ctx: the ranks.
        tensor_parallel_output_grad: each rank has its own gradient of the result: going back, they are summed and
            scattered. Otherwise all have the same, and each takes its part.

    Returns:
        (T, ...).

    Raises:
        ArgumentError: x is not split by ``shard``'s rule; raised on every rank.
    """
    return _moved(x, ctx, "gather", "sum_part" if tensor_parallel_output_grad else "part", 0)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, ctx: Context) -> Tensor:
    """Return this rank's part, along the first dimension, of the sum of the ranks' x; going back, parts are gathered.

    Collective over the context.

    Args:
        x: (T, ...), of one shape on all ranks.
        ctx: the ranks.

    Returns:
        (T/P, ...).
    """
    return _moved(x, ctx, "sum_part", "gather", 0)


def _moved(x: Tensor, ctx: Context, forward: str, back: str, dim: int = 0) -> Tensor:
    call = "pblasmp.torch"
    check_context(ctx, call)
    refuse_transforms(call)
    fault: ArgumentError | None = None
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        fault = ArgumentTypeError(f"x: expected a plain tensor, got {type(x).__name__}")
    elif not x.is_floating_point() or not x.ndim:
        fault = ArgumentError(
            f"x: {x.dtype} of shape {tuple(x.shape)}, expected real numbers of one dimension or more"
        )
    if fault is not None:
        with ctx.agreement(call):
            raise fault
    total = None
    if forward == "gather":
        mine = x.shape[dim]
        total = mine * ctx.size if torch.compiler.is_compiling() else _total(mine, ctx)
    moved: Tensor = region(x, ctx.name, forward, back, dim, total)
    return moved


def _total(mine: int, ctx: Context) -> int:
    """Return the length of a dimension of which this rank has ``mine``. Collective over the context."""
    with ctx.running("pblasmp.torch"):
        with ctx.agreement("gather"):
            pass
        found: list[int] = ctx.comm.allgather(mine)
    if fault := fault_of_shares(found):
        raise ArgumentError(f"x: {fault}")
    return sum(found)


def _region_fake(x: Tensor, name: str, forward: str, back: str, dim: int, total: int | None) -> Tensor:
    shape = list(x.shape)
    if forward in ("part", "sum_part"):
        shape[dim] = count(shape[dim], Context.named(name))
    elif forward == "gather":
        assert total is not None
        shape[dim] = total
    if forward in ("same", "sum"):
        return x.new_empty(shape)
    shape.insert(0, shape.pop(dim))
    return x.new_empty(shape).movedim(0, dim)


def _region_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.context_name, _, ctx.back, ctx.dim, _ = inputs
    ctx.total = x.shape[ctx.dim]


@once
def _region_back(node: Any, g: Tensor) -> Gradients:
    total = node.total if node.back == "gather" else None
    return (region(g, node.context_name, node.back, "same", node.dim, total),)


@operator(
    "(Tensor x, str ctx, str forward, str back, int dim, SymInt? total) -> Tensor",
    _region_fake,
    _region_back,
    _region_saves,
)
def region(x: Tensor, name: str, forward: str, back: str, dim: int, total: int | None) -> Tensor:
    """Return x moved ``forward``; its gradient moves ``back``. Collective over the context."""
    ctx = Context.named(name)
    if forward == "same":
        return x.clone()
    with ctx.running("pblasmp.torch"):
        with ctx.agreement("pblasmp.torch") as facts:
            shape = list(x.shape)
            if forward == "gather":
                shape[dim] = -1 if total is None else total
            facts.update(move=forward, x=f"{shape} {x.dtype}")
        if forward == "sum":
            return reduce(x.contiguous().clone(), ctx)
        rows = x.movedim(dim, 0)
        if forward == "part":
            moved = rows[own(rows.shape[0], ctx)].clone()
        elif forward == "gather":
            assert total is not None
            moved = all_gather(rows, ctx, total)
        else:
            moved = reduce_scatter(rows.clone(), ctx)
        return moved.movedim(0, dim)
