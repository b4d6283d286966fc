# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG001 - all parts of an operator have its arguments
"""The products of ``FORMS`` as an operator of PyTorch, and without the detour over operators.

``algo`` names the algorithm of the product forward, ``backward_algo`` that of the product that gives the gradient of x.

Gradients of weights and biases are local: they come from the gathered input that was kept, or from the gathered
gradient. On GPUs those that need no gathered gradient are computed on another stream, during the collective product.

Operators take the context by its name: torch.compile then sees a constant, which includes the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..context import Context
from ..errors import ClosedError, LayoutError, UnsupportedError
from ..tensor_parallel.call import multiply
from ..tensor_parallel.made import Made
from .forms import FORMS, Form, own, shape_of_product
from .meshes import gradient_of, part_of, split_of
from .registry import Gradients, once, operator


def _check_total(kind: Form, y: Tensor, total: int) -> None:
    """Raise LayoutError unless so many rows or outputs were gathered, if any were. Local."""
    if not kind.gathers:
        return
    axis, which, what = (0, "x", "rows") if kind.gathers == "x" else (-1, "w", "outputs")
    if y.shape[axis] != total:  # on every rank: what is gathered is split by shard's rule
        raise LayoutError(
            f"{which}: the ranks hold {y.shape[axis]} {what} together, expected {total}: under torch.compile "
            f"every rank has the same number of {what}, or {which} is a DTensor"
        )


def _product_fake(
    x: Tensor, w: Tensor, bias: Tensor | None, form: str, name: str, transposed: bool, keep: bool, by_rule: bool,
    total: int | None, algo: str, backward_algo: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, gathered = shape_of_product(form, x, w.shape[int(transposed)], Context.named(name), total)
    return x.new_empty(y), x.new_empty(gathered if keep else [0])


def _product_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, _, ctx.form, ctx.context_name, *_, ctx.backward_algo = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    kind, (needs_x, needs_w, *_) = FORMS[ctx.form], ctx.needs_input_grad
    ctx.shape, ctx.mains = x.shape, mains_of(w)
    kept = output[1] if kind.gathers == "x" else x
    ctx.save_for_backward(kept if needs_w else None, w if needs_x or kind.scatters else None)


@once
def _product_back(node: Any, gy: Tensor | None, _: None) -> Gradients:
    def multiply(gy: Tensor, w: Tensor, keep: bool, total: int | None) -> tuple[Tensor, Tensor]:
        back = FORMS[node.form].back
        found: tuple[Tensor, Tensor] = product(
            gy, w, None, back, node.context_name, True, keep, bool(FORMS[back].gathers), total, node.backward_algo,
            "auto",
        )  # fmt: skip
        return found

    return _gradients(node, gy, Context.named(node.context_name), multiply)


def _gradients(
    node: Any, gy: Tensor | None, ctx: Context, multiply: Callable[..., tuple[Tensor, Tensor | None]]
) -> Gradients:
    """Return the gradients of x, w and bias. Collective over the context, unless the product back is local.

    ``multiply`` returns the gradient of x and that of y gathered, as ``Multiplication.backward`` does.
    """
    if gy is None:  # y was not used
        return None, None, None
    x, w = node.saved_tensors
    kind, shape = FORMS[node.form], node.shape
    needs_x, needs_w, needs_bias, *_ = node.needs_input_grad
    if kind.scatters:
        gx, gathered = multiply(gy, w, needs_w or needs_bias, shape[0])
        return gx, *of_parameters(node, gathered, x)
    if kind.gathers == "y":
        gy = gy[..., own(gy.shape[-1], ctx)]
    if kind.part_of_x and x is not None:
        x = x[..., own(shape[-1], ctx)]
    if not needs_x:
        return None, *of_parameters(node, gy, x)
    if kind.back == "matmul_local":
        return times(gy, w), *of_parameters(node, gy, x)
    total = shape[-1] if kind.part_of_x else None
    operations = 2.0 * gy.numel() * (w.numel() // max(1, gy.shape[-1]))
    return beside(
        gy, operations, lambda: multiply(gy, w, False, total)[0], lambda: of_parameters(node, gy, x)
    )


@operator(
    "(Tensor x, Tensor w, Tensor? bias, str form, str ctx, bool transposed, bool keep, bool by_rule, SymInt? total, "
    "str algo, str backward_algo) -> (Tensor, Tensor)",
    _product_fake,
    _product_back,
    _product_saves,
)
def product(
    x: Tensor, w: Tensor, bias: Tensor | None, form: str, name: str, transposed: bool, keep: bool, by_rule: bool,
    total: int | None, algo: str, backward_algo: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x wᵀ + bias, x w with ``transposed``; and the gathered x with ``keep``, otherwise an empty tensor."""
    ctx = Context.named(name)
    key = form, transposed, keep, by_rule, total, algo, seen(w), None if bias is None else seen(bias)
    again = ctx.parallel_calls.get(key)
    if again is None:
        again = Again(form, ctx, transposed, keep, by_rule, total, algo=algo)
        remember(ctx, key, again)
    y, gathered = again(x, w, bias)
    return y, x.new_empty(0) if gathered is None else gathered


def remember(ctx: Context, key: Hashable, value: object) -> None:
    """Keep what makes calls of one kind; where there are too many kinds, drop the others. Local."""
    if len(ctx.parallel_calls) >= _MOST_KNOWN:
        ctx.parallel_calls.clear()
    ctx.parallel_calls[key] = value


_MOST_KNOWN = 1024


class Again:
    """A product of plain tensors with its options, for calls with weights and biases that are alike. Local to make.

    They are not read again: see ``Made``. ``transposed``: w is inputs × outputs, and there is no bias. ``keep``: x
    gathered is a result, too. ``by_rule``: what is gathered must be split as ``shard`` does; ``total`` is how many rows
    or outputs that are, if it has to be known. The rest is a ``ParallelCall``'s; with scales, x is the part that is
    multiplied.
    """

    def __init__(
        self,
        form: str,
        ctx: Context,
        transposed: bool,
        keep: bool,
        by_rule: bool,
        total: int | None,
        **how: Any,
    ) -> None:
        self._kind, self._ctx, self._keep, self._total = FORMS[form], ctx, keep, total
        self._how = {"transposed": transposed, "return_gathered": keep, "by_rule": by_rule, **how}
        self._parts = self._kind.part_of_x and "scales" not in how
        self._made: dict[Any, Made] = {}
        self._latest: Made | None = None

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the product, and x gathered with ``keep``. Collective over the context, unless it is local.

        ArgumentError on every rank if what is gathered is not split by the rule, LayoutError if it is another number.
        """
        if self._kind.call is None:
            return times(x, w) if self._how["transposed"] else torch.nn.functional.linear(x, w, bias), None
        key = seen(x)
        made = self._made.get(key)
        part = x[..., own(x.shape[-1], self._ctx)] if self._parts else x
        if made is not None:
            found, self._made[key] = made(part, w, bias)
        else:
            rows = in_rows(part)
            found, made = multiply(
                self._kind.call, self._ctx, rows, w, bias=bias, like=self._latest, **self._how
            )
            if made is not None:
                self._latest = made
                if rows is part and len(self._made) < _MOST_SEEN:
                    self._made[key] = made
        y, gathered = found if self._keep else (found, None)
        if self._total is not None:
            _check_total(self._kind, y, self._total)
        return y, gathered


_MOST_SEEN = 256  # kinds of x for which a product is not read again


def seen(tensor: Tensor) -> Hashable:
    """Return what a product looks at of a plain tensor, apart from its values and where they are. Local."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()


class Multiplication:
    """A product and, by ``backward``, the one that gives the gradient of x; with their options. Local to make.

    For calls with weights and biases that are alike; see ``Again``.

    Attributes:
        forward: the product.
        keeps_x: the gradient of w comes from x, not from x gathered.
        scatters: of the form.
    """

    def __init__(
        self,
        form: str,
        ctx: Context,
        keep: bool,
        by_rule: bool,
        total: int | None,
        algo: str,
        backward_algo: str,
    ) -> None:
        self.form, self.ctx, self._how = form, ctx, (keep, by_rule, total, algo, backward_algo)
        self.keeps_x, self.scatters = FORMS[form].gathers != "x", FORMS[form].scatters
        self.forward = Again(form, ctx, False, keep, by_rule, total, algo=algo)
        self._backward: dict[tuple[bool, int | None], Again] = {}

    def in_open_context(self) -> Multiplication:
        """Return it, or the same in a later context that has the name of its own, which is closed. Local.

        ClosedError if there is none.
        """
        try:
            self.ctx.check_open()
        except ClosedError:
            return Multiplication(self.form, Context.named(self.ctx.name), *self._how)
        return self

    def backward(self, gy: Tensor, w: Tensor, keep: bool, total: int | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of x, and with ``keep`` that of y gathered. Collective, unless it is local."""
        found = self._backward.get((keep, total))
        if found is None:
            back = FORMS[self.form].back
            found = Again(back, self.ctx, True, keep, bool(FORMS[back].gathers), total, algo=self._how[-1])
            self._backward[keep, total] = found
        return found(gy, w, None)


class EagerProduct(torch.autograd.Function):
    """``product`` without the detour over PyTorch's operators, which takes longer than a small product.

    Takes x, w, bias, a ``Multiplication`` and the tensors to which the weights' gradient is added; w and bias may be
    DTensors, and so are their gradients then.
    """

    @staticmethod
    def forward(
        node: Any, x: Tensor, w: Tensor, bias: Tensor | None, asked: Multiplication, mains: Sequence[Tensor]
    ) -> Tensor:
        """Return the product. Collective over the context, unless it is local."""
        node.asked, node.form, node.mains, node.shape = asked, asked.form, mains, x.shape
        node.set_materialize_grads(False)
        node.split_w, node.split_bias = split_of(w), split_of(bias)
        w, bias = part_of(w), None if bias is None else part_of(bias)
        y, gathered = asked.forward(x, w, bias)
        needs_x, needs_w, *_ = node.needs_input_grad
        kept = x if asked.keeps_x else gathered
        node.save_for_backward(kept if needs_w else None, w if needs_x or asked.scatters else None)
        return y

    @staticmethod
    @once
    def backward(node: Any, *gradients: Tensor | None) -> Gradients:
        """Return the gradients. Collective over the context, unless they are local."""
        asked = node.asked.in_open_context()
        gx, gw, gb = _gradients(node, gradients[0], asked.ctx, asked.backward)
        if gw is not None and node.split_w is not None:
            gw = gradient_of(gw, node.split_w)
        if gb is not None and node.split_bias is not None:
            gb = gradient_of(gb, node.split_bias)
        return gx, gw, gb, None, None


def apply(
    x: Tensor, w: Tensor, bias: Tensor | None, asked: Multiplication, mains: Sequence[Tensor]
) -> Tensor:
    """Return what ``EagerProduct.apply`` does, which searches for transforms also where no operand has any.

    Collective over the context, unless it is local.
    """
    wraps = torch._C._functorch.is_functorch_wrapped_tensor
    wrapped = wraps(x) or wraps(w) or (bias is not None and wraps(bias))  # by a transform that is over
    function: Any = EagerProduct if wrapped else super(torch.autograd.Function, EagerProduct)
    y: Tensor = function.apply(x, w, bias, asked, mains)
    return y


def in_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy unless its rows are contiguous and at equal distances, as the products want them."""
    if tensor.is_contiguous():
        return tensor
    rows, width = tensor.shape[:-1].numel(), tensor.shape[-1]
    try:
        folded = tensor.view(rows, width)
    except RuntimeError:
        return tensor.contiguous()
    fits = (width <= 1 or folded.stride(1) == 1) and (rows <= 1 or folded.stride(0) >= width)
    return tensor if fits else tensor.contiguous()


# -- gradients of weights and biases, on GPUs beside a collective product

WORTH_A_STREAM = 1e11
"""Operations, less than which take less time than the host takes to use another stream; graphs gain nothing by them."""


def beside(
    like: Tensor, operations: float, first: Callable[[], Tensor], then: Callable[[], Gradients]
) -> Gradients:
    """Return the results of both; on GPUs ``then`` runs while ``first`` does, and must not need its result. Local.

    Products on several GPUs wait for each other, which leaves room for the weights' gradient. ``like`` is a tensor of
    either; a little work, by the operations of ``then``, is done behind ``first``.
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
    if not (needs_w or needs_bias):
        return None, None
    if gy.ndim != 2:
        gy, x = as_rows(gy), None if x is None else as_rows(x)
    gw = None
    if needs_w:
        assert x is not None
        if node.mains:
            _add_to(node.mains, gy, x)
        else:
            gw = torch.mm(gy.t(), x)
    return gw, gy.sum(0) if needs_bias else None


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


def times(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x @ w``, of two matrices without a look at what else they might be. Local."""
    return torch.mm(x, w) if x.ndim == 2 else x @ w


def as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor with all dimensions but the last folded into one. Local."""
    return tensor if tensor.ndim == 2 else tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
