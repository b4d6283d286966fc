# SPDX-License-Identifier: Apache-2.0
"""The four 1D products as differentiable functions of tensors, DTensors among them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..context import Context
from ..epilogue import Scales
from ..errors import ArgumentError, ArgumentTypeError, LayoutError, PblasmpError
from ..tensor_parallel.call import check_context
from . import operators
from .float8 import fault_of_scales, scaled_product
from .forms import FORMS, fault_of_algorithms, refuse_transforms
from .meshes import is_of_ranks, local, on_mesh, part_of
from .registry import is_eager
from .scaling import DelayedScaling


def allgather_matmul(
    x: Tensor,
    w: Tensor,
    ctx: Context,
    *,
    bias: Tensor | None = None,
    scales: DelayedScaling | Scales | None = None,
    algo: str = "auto",
    backward_algo: str = "auto",
) -> Tensor:
    """Return this rank's columns of y = x wᵀ + bias; the ranks hold rows of x. Collective over the context.

    Operands may be DTensors, split as described; if x is one, so is the result. The other functions do the same.

    Args:
        x: (T/P, ..., K), this rank's part of the first dimension.
        w: (N/P, K), this rank's outputs.
        ctx: the ranks.
        bias: (N/P,), this rank's outputs.
        scales: multiply in 8 bits: ``DelayedScaling``, or without gradients ``pblasmp.Scales`` (a: x's, b: w's). x and
            w are float32, float16 or bfloat16, and are cast; for ``pblasmp.Scales`` they may have 8 bits already. y is
            of x's type, or bfloat16 if that has 8 bits.
        algo: the algorithm, as for ``pblasmp.allgather_matmul``. If w needs a gradient, the gathered x is needed for
            that, which some algorithms do not provide.
        backward_algo: the algorithm of the product that gives the gradient of x, GEMM + ReduceScatter.

    Returns:
        (T, ..., N/P).

    Raises:
        ArgumentError: shapes or types do not fit, or x needs a gradient and is not split as
            ``pblasmp.tensor_parallel.shard`` splits; raised on every rank.
        UnsupportedError: there is no such algorithm, or it refuses the product; raised on every rank, for
            ``backward_algo`` perhaps only in the backward pass. This holds for the other functions, too.
    """
    return multiply("allgather_matmul", x, w, ctx, bias, scales, algo, backward_algo)


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    ctx: Context,
    *,
    bias: Tensor | None = None,
    scales: DelayedScaling | Scales | None = None,
    algo: str = "auto",
    backward_algo: str = "auto",
) -> Tensor:
    """Return this rank's rows of y = x wᵀ + bias; the ranks hold columns of x and w. Collective over the context.

    Args:
        x: (T, ..., K/P), this rank's inputs.
        w: (N, K/P), this rank's inputs.
        ctx: the ranks.
        bias: (N,), the same on every rank, added once; so is its gradient.
        scales: as for ``allgather_matmul``.
        algo: the algorithm, as for ``pblasmp.matmul_reduce_scatter``.
        backward_algo: the algorithm of the product that gives the gradient of x, AllGather + GEMM. If w or bias needs
            a gradient, the gathered gradient of y is needed for that, which some algorithms do not provide.

    Returns:
        (T/P, ..., N), this rank's part of the first dimension, as ``pblasmp.tensor_parallel.shard`` splits it.

    Raises:
        ArgumentError: shapes or types do not fit; raised on every rank.
    """
    return multiply("matmul_reduce_scatter", x, w, ctx, bias, scales, algo, backward_algo)


def matmul_allreduce(
    x: Tensor,
    w: Tensor,
    ctx: Context,
    *,
    bias: Tensor | None = None,
    scales: DelayedScaling | Scales | None = None,
    algo: str = "auto",
) -> Tensor:
    """Return y = x wᵀ + bias on every rank; the ranks hold columns of x and w. Collective over the context.

    Every rank is expected to use y in the same way: each has the whole gradient of y, and of the bias.

    Args:
        x: (..., K/P), this rank's inputs.
        w: (N, K/P), this rank's inputs.
        ctx: the ranks.
        bias: (N,), the same on every rank, added once.
        scales: as for ``allgather_matmul``.
        algo: the algorithm, as for ``pblasmp.matmul_allreduce``. The backward pass is local.

    Returns:
        (..., N), the same on every rank.

    Raises:
        ArgumentError: shapes or types do not fit; raised on every rank.
    """
    return multiply("matmul_allreduce", x, w, ctx, bias, scales, algo, "auto")


def matmul_allgather(
    x: Tensor,
    w: Tensor,
    ctx: Context,
    *,
    bias: Tensor | None = None,
    scales: DelayedScaling | Scales | None = None,
    algo: str = "auto",
    backward_algo: str = "auto",
) -> Tensor:
    """Return y = x wᵀ + bias on every rank; the ranks hold rows of w. Collective over the context.

    Every rank is expected to use y in the same way: each has the whole gradient of y.

    Args:
        x: (..., K), the same on every rank; so is its gradient.
        w: (N/P, K), this rank's outputs.
        ctx: the ranks.
        bias: (N/P,), this rank's outputs.
        scales: as for ``allgather_matmul``.
        algo: the algorithm, as for ``pblasmp.matmul_allgather``.
        backward_algo: the algorithm of the product that gives the gradient of x, GEMM + AllReduce.

    Returns:
        (..., N), the same on every rank.

    Raises:
        ArgumentError: shapes or types do not fit, or w is not split as ``pblasmp.tensor_parallel.shard`` splits; raised
            on every rank.
    """
    return multiply("matmul_allgather", x, w, ctx, bias, scales, algo, backward_algo)


def multiply(
    form: str,
    x: Tensor,
    w: Tensor,
    ctx: Context,
    bias: Tensor | None,
    scales: DelayedScaling | Scales | None,
    algo: str,
    backward_algo: str,
    mains: Sequence[Tensor] = (),
) -> Tensor:
    """Return a product of ``FORMS``. Collective over the context, unless it is local.

    If there are ``mains``, the gradient of this rank's part of w is added to them, each has its next rows, and w gets
    none.
    """
    key = _key(form, x, w, ctx, bias, scales, algo, backward_algo)
    if key is not None and (known := ctx.parallel_calls.get(key)) is not None:
        ctx.check_open()
        asked, needs = known
        if needs:
            found: Tensor = operators.apply(x, w, bias, asked, mains)
            return found
        return asked.forward(x, part_of(w), None if bias is None else part_of(bias))[0]
    kind = FORMS[form]
    _check(form, x, w, ctx, bias, scales, algo, backward_algo)
    needs_x, needs_w = (torch.is_grad_enabled() and each.requires_grad for each in (x, w))
    by_rule, total, gathered = kind.gathers == "y", None, {"x": x, "y": w}.get(kind.gathers)
    if gathered is not None:
        if isinstance(gathered, DTensor):
            total = gathered.shape[0]
        elif torch.compiler.is_compiling():  # which has to know the result's shape
            total = gathered.shape[0] * ctx.size
        by_rule = by_rule or needs_x or total is not None
    keep = needs_w and kind.gathers == "x"
    part = local(x)
    if scales is None and is_eager(part, w, bias):
        needs_bias = bias is not None and bias.requires_grad and torch.is_grad_enabled()
        needs = needs_x or needs_w or needs_bias
        asked = operators.Multiplication(form, ctx, keep, by_rule, total, algo, backward_algo)
        if needs:
            y = operators.EagerProduct.apply(part, w, bias, asked, mains)
        else:
            y, _ = asked.forward(part, part_of(w), None if bias is None else part_of(bias))
        if key is not None:
            operators.remember(ctx, key, (asked, needs))
    else:
        operands = part, operators.adding_to(mains, local(w)), None if bias is None else local(bias)
        if scales is not None:
            y = scaled_product(form, *operands, ctx, scales, keep, by_rule, total, algo, backward_algo)
        else:
            y, _ = operators.product(
                *operands, form, ctx.name, False, keep, by_rule, total, algo, backward_algo
            )
    if not isinstance(x, DTensor):
        return y
    return on_mesh(y, x.device_mesh, _placement(kind.y, y.ndim), (*x.shape[:-1], w.shape[0]))


def _key(
    form: str,
    x: Any,
    w: object,
    ctx: object,
    bias: object,
    scales: object,
    algo: object,
    backward_algo: object,
) -> Hashable:
    """Return what tells calls apart that nothing but autograd looks at, but for where their arrays are. Local.

    None for others, and for those that may be wrong.
    """
    if scales is not None or not is_eager(x, w, bias):
        return None
    if type(x) in (DTensor, type(None)) or type(algo) is not str or type(backward_algo) is not str:
        return None
    if not isinstance(ctx, Context) or torch._C._are_functorch_transforms_active():
        return None
    of_x = (
        x.ndim,
        x.shape[-1:],
        x.dtype,
        x.layout,
        x.device,
        x.is_neg(),
        x.requires_grad,
    )  # any number of tokens
    of_bias = None if bias is None else _seen(bias)
    return form, algo, backward_algo, torch.is_grad_enabled(), of_x, _seen(w), of_bias


def _seen(tensor: Any) -> Hashable:
    """Return what a product looks at of a tensor. Local."""
    needs, split = tensor.requires_grad, None
    if type(tensor) is DTensor:
        split, tensor = tensor._spec, tensor._local_tensor
    return needs, split, operators.seen(tensor)


# -- DTensors, and checks


def _placement(dim: int | None, dimensions: int) -> Placement:
    return Replicate() if dim is None else Shard(dim % dimensions)


def _check(
    form: str,
    x: Tensor,
    w: Tensor,
    ctx: Context,
    bias: Tensor | None,
    scales: DelayedScaling | Scales | None,
    algo: str,
    backward_algo: str,
) -> None:
    """Raise ArgumentError unless these are tensors that can have gradients, and DTensors are split as they must be.

    Raise UnsupportedError unless there are such algorithms. Every rank raises: the others learn of the error in the
    agreement with which their product begins, unless they multiply alone. Collective over the context if it fails.
    """
    check_context(ctx, "pblasmp.torch")
    if not torch.compiler.is_compiling():
        ctx.check_open()
        refuse_transforms("pblasmp.torch")
    error = _error(form, x, w, ctx, bias, scales) or fault_of_algorithms(form, ctx, algo, backward_algo)
    if error is not None:
        alone = form == "matmul_local" and scales is None
        with nullcontext() if alone else ctx.agreement("pblasmp.torch"):
            raise error


def _error(
    form: str, x: Tensor, w: Tensor, ctx: Context, bias: Tensor | None, scales: object
) -> PblasmpError | None:
    """Return an error unless these are operands of a product. Local."""
    split = FORMS[form]
    for name, value in (("x", x), ("w", w), *([] if bias is None else [("bias", bias)])):
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            found = f"one that is {value.layout}" if isinstance(value, Tensor) else type(value).__name__
            return ArgumentTypeError(f"{name}: expected a tensor, got {found}")
    fault = _fault("x", x, 1) or _fault("w", w, 2)
    if not fault and scales is not None:
        fault = fault_of_scales(scales, x, w, bias)
    fault = fault or _misplaced("x", x, split.x, ctx) or _misplaced("w", w, split.w, ctx)
    fault = fault or _misplaced("bias", bias, split.bias, ctx)
    if not fault and split.w == 0 and isinstance(x, DTensor) and not isinstance(w, DTensor):
        fault = "w: expected a DTensor, because x is one: its shape says how many outputs there are"
    if fault:
        return ArgumentError(fault)
    for name, value in (("x", x), ("bias", bias)):
        if value is not None and value.device != w.device:
            return LayoutError(f"{name}: on {value.device}, expected w's {w.device}")
        if value is not None and scales is None and value.dtype != w.dtype:
            return LayoutError(f"{name}: dtype is {value.dtype}, expected w's {w.dtype}")
    if form == "matmul_local" and x.shape[-1] != w.shape[1]:
        return ArgumentError(f"x: the last dimension is {x.shape[-1]}, expected w's {w.shape[1]} inputs")
    return None


def _fault(name: str, value: Tensor, dimensions: int) -> str:
    if not value.is_floating_point():
        return f"{name}: dtype is {value.dtype}, expected a real floating-point type"
    if value.ndim < dimensions:
        return (
            f"{name}: shape is {tuple(value.shape)}, expected {dimensions} dimension{'s' * (dimensions - 1)}"
        )
    return ""


def _misplaced(name: str, tensor: Tensor | None, dim: int | None, ctx: Context) -> str:
    if not isinstance(tensor, DTensor):
        return ""
    mesh, expected = tensor.device_mesh, (_placement(dim, tensor.ndim),)
    if not is_of_ranks(mesh, ctx):
        return f"{name}: a DTensor on {mesh}, expected one on a mesh of the context's {ctx.size} ranks"
    if tensor.placements != expected:
        return f"{name}: a DTensor placed {tensor.placements}, expected {expected}: redistribute it first"
    return ""
