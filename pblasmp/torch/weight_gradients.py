# SPDX-License-Identifier: Apache-2.0
"""Gradients of weights and biases, on GPUs beside a collective product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .registry import Gradients

WORTH_A_STREAM = 2e10
"""Operations, less than which take less time than another stream takes to be used."""


def beside(
    like: Tensor, operations: float, first: Callable[[], Tensor], then: Callable[[], Gradients]
) -> Gradients:
    """Return the results of both; on GPUs ``then`` runs while ``first`` does, and must not need its result. Local.

    Products on several GPUs wait for each other, which leaves room for the weights' gradient.

    Args:
        like: a tensor of either.
        operations: of ``then``: a little is done behind ``first``.
        first, then: compute.
    """
    streams = None if operations < WORTH_A_STREAM else streams_of(like)
    if streams is None:
        return first(), *then()
    current, side = streams
    ready = current.record_event()
    result = first()
    side.wait_event(ready)
    with torch.cuda.stream(side):
        others = then()
    current.wait_stream(side)
    for tensor in others:
        if tensor is not None:
            tensor.record_stream(current)
    return result, *others


def streams_of(tensor: Tensor) -> tuple[Any, Any] | None:
    """Return the current stream of a tensor's GPU and another one; None elsewhere, and in compiled code. Local."""
    if type(tensor) is not Tensor or not tensor.is_cuda:
        return None
    return torch.cuda.current_stream(tensor.device), _side_stream(tensor.device)


@lru_cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def of_parameters(node: Any, gy: Tensor, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weights and bias, None for those that are not needed. Local."""
    _, needs_w, needs_bias, *_ = node.needs_input_grad
    rows = as_rows(gy) if needs_w or needs_bias else None
    gw = None
    if needs_w:
        assert x is not None
        assert rows is not None
        if node.mains:
            _add_to(node.mains, rows, as_rows(x))
        else:
            gw = torch.mm(rows.t(), as_rows(x))
    return gw, rows.sum(0) if needs_bias and rows is not None else None


_MAINS = "pblasmp_main_grads"


def adding_to(mains: Sequence[Tensor], w: Tensor) -> Tensor:
    """Return weights whose gradient is added to ``mains``, each of which has the next of their rows. Local."""
    if not mains:
        return w
    if torch.compiler.is_compiling():
        raise UnsupportedError("gradient_accumulation_fusion: not in code that torch.compile compiles")
    view = w.view_as(w)
    setattr(view, _MAINS, tuple(mains))
    return view


def mains_of(w: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors to which the gradient of weights is added, as ``adding_to`` has noted them. Local."""
    mains: tuple[Tensor, ...] = getattr(w, _MAINS, ())
    return mains


def _add_to(mains: Sequence[Tensor], gy: Tensor, x: Tensor) -> None:
    """Add gyᵀ x to ``mains``, each of which has the next of its rows, summed in their type. Local."""
    at = 0
    for main in mains:
        part = gy[:, at : at + main.shape[0]].t()
        at += main.shape[0]
        if main.dtype == x.dtype:
            main.addmm_(part, x)
        elif x.is_cuda and main.dtype == torch.float32 and hasattr(torch.ops.aten.mm, "dtype"):
            main += torch.mm(part, x, out_dtype=torch.float32)  # without operands in float32
        else:
            main.addmm_(part.to(main.dtype), x.to(main.dtype))


def as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor with all dimensions but the last folded into one. Local."""
    return tensor if tensor.ndim == 2 else tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
