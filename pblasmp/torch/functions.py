# SPDX-License-Identifier: Apache-2.0
"""The four 1D products as differentiable functions.

T tokens, K inputs, N outputs, P ranks; w is outputs × inputs, as torch.nn has it. What goes forward through one product
comes back through another, with the same weights transposed:

    forward                                              gradient of x
    allgather_matmul         gather x, multiply          matmul_reduce_scatter
    matmul_reduce_scatter    multiply, sum, scatter      allgather_matmul
    matmul_allreduce         multiply, sum               local: every rank has the whole gradient of y
    matmul_allgather         multiply, gather y          matmul_allreduce
    split_matmul_allreduce   own part of x, as above     matmul_allgather
    matmul_local             multiply                    matmul_allreduce

Gradients of weights and biases are local: from the gathered input that was kept, or the gathered gradient.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import tensor_parallel as product
from ..errors import LayoutError
from ..tensor_parallel.operands import Arrays, Request
from ..tensor_parallel.plan import check_context, run_once

if TYPE_CHECKING:
    from ..context import Context

__all__ = [
    "allgather_matmul",
    "matmul_allgather",
    "matmul_allreduce",
    "matmul_local",
    "matmul_reduce_scatter",
    "split_matmul_allreduce",
]


def allgather_matmul(x: Tensor, w: Tensor, ctx: Context, bias: Tensor | None = None) -> Tensor:
    """Return this rank's columns of y = x wᵀ + bias, where the ranks hold rows of x. Collective over the context.

    Args:
        x: (T/P, ..., K), this rank's part of the first dimension.
        w: (N/P, K), this rank's outputs.
        ctx: the ranks.
        bias: (N/P,), this rank's outputs.

    Returns:
        (T, ..., N/P).

    Raises:
        LayoutError: shapes or types do not fit, on every rank; or x needs a gradient and is not split as
            ``pblasmp.tensor_parallel.shard`` splits.
    """
    _check(x, w, ctx)
    keep = torch.is_grad_enabled() and w.requires_grad
    y: Tensor = _AllGatherMatmul.apply(x, w, bias, ctx, keep)
    return y


def matmul_reduce_scatter(x: Tensor, w: Tensor, ctx: Context, bias: Tensor | None = None) -> Tensor:
    """Return this rank's rows of y = x wᵀ + bias, where the ranks hold columns of x and w. Collective over the context.

    Args:
        x: (T, ..., K/P), this rank's inputs.
        w: (N, K/P), this rank's inputs.
        ctx: the ranks.
        bias: (N,), the same on every rank, added once; so is its gradient.

    Returns:
        (T/P, ..., N), this rank's part of the first dimension, as ``pblasmp.tensor_parallel.shard`` splits it.

    Raises:
        LayoutError: shapes or types do not fit, on every rank.
    """
    _check(x, w, ctx)
    y: Tensor = _MatmulReduceScatter.apply(x, w, bias, ctx)
    return y


def matmul_allreduce(x: Tensor, w: Tensor, ctx: Context, bias: Tensor | None = None) -> Tensor:
    """Return y = x wᵀ + bias on every rank, where the ranks hold columns of x and w. Collective over the context.

    Every rank is expected to go on with y in the same way: each has the whole gradient of y, and of the bias.

    Args:
        x: (..., K/P), this rank's inputs.
        w: (N, K/P), this rank's inputs.
        ctx: the ranks.
        bias: (N,), the same on every rank, added once.

    Returns:
        (..., N), the same on every rank.

    Raises:
        LayoutError: shapes or types do not fit, on every rank.
    """
    _check(x, w, ctx)
    y: Tensor = _MatmulAllReduce.apply(x, w, bias, ctx)
    return y


def matmul_allgather(x: Tensor, w: Tensor, ctx: Context, bias: Tensor | None = None) -> Tensor:
    """Return y = x wᵀ + bias on every rank, where the ranks hold rows of w. Collective over the context.

    Every rank is expected to go on with y in the same way: each has the whole gradient of y.

    Args:
        x: (..., K), the same on every rank; so is its gradient.
        w: (N/P, K), this rank's outputs.
        ctx: the ranks.
        bias: (N/P,), this rank's outputs.

    Returns:
        (..., N), the same on every rank.

    Raises:
        LayoutError: shapes or types do not fit, on every rank; or w is not split as
            ``pblasmp.tensor_parallel.shard`` splits.
    """
    _check(x, w, ctx)
    y: Tensor = _MatmulAllGather.apply(x, w, bias, ctx)
    return y


def matmul_local(x: Tensor, w: Tensor, ctx: Context, bias: Tensor | None = None) -> Tensor:
    """Return this rank's columns of y = x wᵀ + bias, where every rank has x; its gradient is summed. Collective.

    As ``matmul_allgather`` without the gathering: communicates when it goes back.
    """
    _check(x, w, ctx, agree=False)
    if x.shape[-1] != w.shape[1]:
        raise LayoutError(f"x: the last dimension is {x.shape[-1]}, expected w's {w.shape[1]} inputs")
    y: Tensor = _MatmulLocal.apply(x, w, bias, ctx)
    return y


def split_matmul_allreduce(x: Tensor, w: Tensor, ctx: Context, bias: Tensor | None = None) -> Tensor:
    """Return y = x wᵀ + bias on every rank, where every rank has x, and its columns of w. Collective.

    As ``matmul_allreduce`` of this rank's columns of x.
    """
    _check(x, w, ctx)
    y: Tensor = _SplitMatmulAllReduce.apply(x, w, bias, ctx)
    return y


# -- what goes forward, and back

Gradients: TypeAlias = "tuple[Tensor | None, ...]"


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, x: Tensor, w: Tensor, bias: Tensor | None, ctx: Context, keep: bool) -> Tensor:
        asked = Request("allgather_matmul", return_gathered=keep, by_rule=node.needs_input_grad[0])
        y = run_once(ctx, asked, Arrays(_in_rows(x), w, bias=bias))
        y, gathered = y if keep else (y, None)
        node.save_for_backward(gathered, w)
        node.ctx = ctx
        out: Tensor = y
        return out

    @staticmethod
    @once_differentiable
    def backward(node: Any, gy: Tensor) -> Gradients:
        gathered, w = node.saved_tensors
        gy, gx = _in_rows(gy), None
        if node.needs_input_grad[0]:
            gx = product.matmul_reduce_scatter(gy, w, node.ctx, transposed=True)
        return (gx, *_parameters(node, gy, gathered), None, None)


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, x: Tensor, w: Tensor, bias: Tensor | None, ctx: Context) -> Tensor:
        node.save_for_backward(x, w)
        node.ctx = ctx
        y: Tensor = product.matmul_reduce_scatter(_in_rows(x), w, ctx, bias=bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(node: Any, gy: Tensor) -> Gradients:
        x, w = node.saved_tensors
        gy = _in_rows(gy)
        if any(node.needs_input_grad[1:3]):
            gx, gy = product.allgather_matmul(gy, w, node.ctx, transposed=True, return_gathered=True)
        else:
            gx = product.allgather_matmul(gy, w, node.ctx, transposed=True)
        return (gx, *_parameters(node, gy, x), None)


class _MatmulAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, x: Tensor, w: Tensor, bias: Tensor | None, ctx: Context) -> Tensor:
        node.save_for_backward(x, w)
        y: Tensor = product.matmul_allreduce(_in_rows(x), w, ctx, bias=bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(node: Any, gy: Tensor) -> Gradients:
        x, w = node.saved_tensors
        gx = gy @ w if node.needs_input_grad[0] else None
        return (gx, *_parameters(node, gy, x), None)


class _MatmulAllGather(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, x: Tensor, w: Tensor, bias: Tensor | None, ctx: Context) -> Tensor:
        asked = Request("matmul_allgather", by_rule=True)
        y: Tensor = run_once(ctx, asked, Arrays(_in_rows(x), w, bias=bias))
        node.save_for_backward(x, w)
        node.ctx, node.mine = ctx, _own(y.shape[-1], ctx)
        return y

    @staticmethod
    @once_differentiable
    def backward(node: Any, gy: Tensor) -> Gradients:
        x, w = node.saved_tensors
        mine, gx = _in_rows(gy)[..., node.mine], None
        if node.needs_input_grad[0]:
            gx = product.matmul_allreduce(mine, w, node.ctx, transposed=True)
        return (gx, *_parameters(node, mine, x), None)


class _MatmulLocal(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, x: Tensor, w: Tensor, bias: Tensor | None, ctx: Context) -> Tensor:
        node.save_for_backward(x, w)
        node.ctx = ctx
        return torch.nn.functional.linear(x, w, bias)

    @staticmethod
    @once_differentiable
    def backward(node: Any, gy: Tensor) -> Gradients:
        x, w = node.saved_tensors
        gy, gx = _in_rows(gy), None
        if node.needs_input_grad[0]:
            gx = product.matmul_allreduce(gy, w, node.ctx, transposed=True)
        return (gx, *_parameters(node, gy, x), None)


class _SplitMatmulAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, x: Tensor, w: Tensor, bias: Tensor | None, ctx: Context) -> Tensor:
        mine = _in_rows(x)[..., _own(x.shape[-1], ctx)]
        node.save_for_backward(mine, w)
        node.ctx = ctx
        y: Tensor = product.matmul_allreduce(mine, w, ctx, bias=bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(node: Any, gy: Tensor) -> Gradients:
        mine, w = node.saved_tensors
        gy, gx = _in_rows(gy), None
        if node.needs_input_grad[0]:
            gx = product.matmul_allgather(gy, w, node.ctx, transposed=True)
        return (gx, *_parameters(node, gy, mine), None)


def _parameters(node: Any, gy: Tensor, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weights and bias, None for those that are not needed. Local."""
    _, needs_w, needs_bias, *_ = node.needs_input_grad
    rows = _rows(gy)
    gw = None
    if needs_w:
        assert x is not None
        gw = rows.t() @ _rows(x)
    return gw, rows.sum(0) if needs_bias else None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _in_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy unless its rows are contiguous and at equal distances, as the products want them."""
    rows, width = tensor.shape[:-1].numel(), tensor.shape[-1]
    try:
        folded = tensor.view(rows, width)
    except RuntimeError:
        return tensor.contiguous()
    fits = (width <= 1 or folded.stride(1) == 1) and (rows <= 1 or folded.stride(0) >= width)
    return tensor if fits else tensor.contiguous()


# -- checks


def _check(x: Tensor, w: Tensor, ctx: Context, *, agree: bool = True) -> None:
    """Raise LayoutError unless these are tensors that can have gradients here.

    With ``agree`` on every rank: the others then are at what a product of theirs begins with. Collective, where it
    fails, over the context.
    """
    check_context(ctx, "pblasmp.torch")
    fault = _fault("x", x, 1) or _fault("w", w, 2)
    if fault:
        with ctx.agreement("pblasmp.torch") if agree else nullcontext():
            raise LayoutError(fault)


def _fault(name: str, value: object, dimensions: int) -> str:
    if not isinstance(value, Tensor):
        return f"{name}: expected a tensor, got {type(value).__name__}"
    if not value.is_floating_point():
        return f"{name}: dtype is {value.dtype}, expected a real floating-point type"
    if value.ndim < dimensions:
        return (
            f"{name}: shape is {tuple(value.shape)}, expected {dimensions} dimension{'s' * (dimensions - 1)}"
        )
    return ""


def _own(total: int, ctx: Context) -> slice:
    """Return which of ``total`` indices this rank has. Local."""
    return product.shard(total, ctx.size, ctx.rank)
