# SPDX-License-Identifier: Apache-2.0
"""Operators of PyTorch: how a function becomes one, with its fake and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import UnsupportedError

Gradients: TypeAlias = "tuple[Tensor | None, ...]"


def _library() -> Any:
    """Return the place of all operators, in place of the one that this module made when it was imported before."""
    namespace = vars(torch.ops.pblasmp)
    if "library" in namespace:
        namespace["library"]._destroy()
    namespace["library"] = made = torch.library.Library("pblasmp", "FRAGMENT")
    return made


_LIBRARY = _library()


def operator(
    schema: str,
    fake: Callable[..., Any],
    back: Callable[..., Gradients] | None = None,
    saves: Callable[..., None] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Return what makes a function an operator of PyTorch, of its name. Local.

    ``fake`` returns tensors of the results' shapes; ``back`` returns the gradients of the first operands, the others
    have none, and ``saves`` saves what that needs. No result may share memory with an operand or another result.

    Operators of ``torch.library.custom_op`` take three times as long to call: they look for aliases among results each
    time, and go through two functions more, also where no gradient is needed, as in all that is compiled.
    """

    def make(compute: Callable[..., Any]) -> Any:
        name = compute.__name__
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        compute = torch.compiler.disable(compute)
        _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pblasmp::{name}", fake, lib=_LIBRARY)
        made = getattr(torch.ops.pblasmp, name).default
        if back is not None and saves is not None:
            call = _differentiable(made, compute, back, saves)
            _LIBRARY.impl(name, call, "Autograd", with_keyset=True)
        return made

    return make


def _differentiable(
    made: Any, compute: Callable[..., Any], back: Callable[..., Gradients], saves: Callable[..., None]
) -> Callable[..., Any]:
    """Return what an operator does where gradients may be needed. Local."""
    operands = len(made._schema.arguments) + 1  # and the keys
    below, after = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset

    def forward(*given: Any) -> Any:
        *args, keys = given
        with below():
            return made.redispatch(keys & after, *args)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def setup_context(node: Any, given: tuple[Any, ...], y: Any) -> None:
            saves(node, given[:-1], y)

        @staticmethod
        def backward(node: Any, *gradients: Any) -> Gradients:
            found = back(node, *gradients)
            return *found, *(None,) * (operands - len(found))

    Differentiable.forward = staticmethod(forward)
    Differentiable.__name__ = f"{made.name()}.autograd"
    function: Any = Differentiable

    def call(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return function.apply(*args, keys)
        return compute(*args) if is_eager(*args[:3]) else forward(*args, keys)

    return call


def is_eager(*operands: Tensor | None) -> bool:
    """Return whether nothing but PyTorch's autograd looks at what is done with these tensors. Local.

    Otherwise a product must be an operator: for a compiler, or for a mode that counts, records or fakes operators.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return _PLAIN.issuperset(map(type, operands))


_PLAIN = {Tensor, torch.nn.Parameter, DTensor, type(None)}


def once(back: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Return a backward function whose result raises an error if it is differentiated again.

    PyTorch's ``once_differentiable`` gives zeros instead for gradients of sums, and in torch.autograd.functional.
    """

    @wraps(back)
    def checked(node: Any, *gradients: Tensor | None) -> Gradients:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "pblasmp.torch: products have no second derivative: do not pass create_graph=True"
            )
        return back(node, *gradients)

    return checked
