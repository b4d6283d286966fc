# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG001 - all parts of an operator have its arguments
"""The products as operators of PyTorch: what they compute, the shapes of their results, and their gradients.

T tokens, K inputs, N outputs, P ranks; w is outputs × inputs, as torch.nn has it. The gradient of x comes from
another product, with the same weights transposed:

    forward                                              gradient of x
    allgather_matmul         gather x, multiply          matmul_reduce_scatter
    matmul_reduce_scatter    multiply, sum, scatter      allgather_matmul
    matmul_allreduce         multiply, sum               local: every rank has the whole gradient of y
    matmul_allgather         multiply, gather y          matmul_allreduce
    split_matmul_allreduce   own part of x, as above     matmul_allgather
    matmul_local             multiply                    matmul_allreduce

``algo`` names the algorithm of the product forward, ``backward_algo`` that of the product that gives the gradient of x.

Gradients of weights and biases are local: they come from the gathered input that was kept, or from the gathered
gradient. On GPUs those that need no gathered gradient are computed on another stream, during the collective product.

Operators take the context by its name: torch.compile then sees a constant, which includes the number of ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import tensor_parallel as product
from ..context import Context
from ..errors import ArgumentTypeError, LayoutError, PblasmpError, UnsupportedError
from ..tensor_parallel.operands import Arrays, Request
from ..tensor_parallel.plan import check_algorithm, run_once

__all__ = [
    "BACK",
    "Gradients",
    "allgather_matmul",
    "as_rows",
    "beside",
    "borrowed",
    "check_total",
    "count",
    "fault_of_algorithms",
    "in_rows",
    "matmul_allgather",
    "matmul_allreduce",
    "matmul_local",
    "matmul_reduce_scatter",
    "once",
    "operator",
    "own",
    "refuse_transforms",
    "split_matmul_allreduce",
]

Gradients: TypeAlias = "tuple[Tensor | None, ...]"

BACK = {
    "allgather_matmul": "matmul_reduce_scatter",
    "matmul_reduce_scatter": "allgather_matmul",
    "matmul_allreduce": "matmul_local",
    "matmul_allgather": "matmul_allreduce",
    "matmul_local": "matmul_allreduce",
    "split_matmul_allreduce": "matmul_allgather",
}
"""By product, the product that gives the gradient of x."""


def own(total: int, ctx: Context) -> slice:
    """Return which of ``total`` indices this rank has, by ``shard``'s rule; total may be symbolic. Local."""
    block = -(-total // ctx.size)
    return slice(min(total, ctx.rank * block), min(total, (ctx.rank + 1) * block))


def count(total: int, ctx: Context) -> int:
    """Return how many of ``total`` indices this rank has. Local."""
    mine = own(total, ctx)
    extent: int = mine.stop - mine.start
    return extent


def operator(name: str, schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Return a new operator of PyTorch. Local."""
    made = torch.library.custom_op(f"pblasmp::{name}", compute, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return made


def refuse_transforms(call: str) -> None:
    """Raise UnsupportedError inside torch.func's grad, vjp, vmap and the like. Local; the same on every rank."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            f"{call}: torch.func.grad, vjp, jvp and vmap do not go through products of several ranks: use "
            "Tensor.backward or torch.autograd.grad (torch.func.functional_call works)"
        )


def fault_of_algorithms(form: str, ctx: Context, algo: object, backward_algo: object) -> PblasmpError | None:
    """Return an error unless these are names of algorithms for a product of ``BACK`` and for its backward pass. Local.

    Compiled code only finds out when it multiplies whether the engine has them.
    """
    for argument, name, which in (("algo", algo, form), ("backward_algo", backward_algo, BACK[form])):
        if not isinstance(name, str):
            return ArgumentTypeError(f"{argument}: expected a string, got {name!r}")
        if name == "auto":
            continue
        if which == "matmul_local":
            way = "forward" if argument == "algo" else "backward"
            return UnsupportedError(
                f"{argument}: expected 'auto', got {name!r}: in this {way} pass each rank multiplies alone"
            )
        if not torch.compiler.is_compiling():
            asked: Any = "matmul_allreduce" if which == "split_matmul_allreduce" else which
            try:
                check_algorithm(ctx, asked, name, argument)
            except UnsupportedError as error:
                return error
    return None


def check_total(form: str, y: Tensor, total: int | None) -> None:
    """Raise LayoutError unless a product has ``total`` rows or outputs; None: any number will do. Local.

    If one rank raises, all do: what is gathered is split by ``shard``'s rule.
    """
    if total is None or form not in ("allgather_matmul", "matmul_allgather"):
        return
    axis, name, what = (0, "x", "rows") if form == "allgather_matmul" else (-1, "w", "outputs")
    if y.shape[axis] != total:
        raise LayoutError(
            f"{name}: the ranks hold {y.shape[axis]} {what} together, expected {total}: under torch.compile every rank "
            f"has the same number of {what}, or {name} is a DTensor"
        )


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


def _call(form: str, x: Tensor, w: Tensor, ctx: Context, **how: Any) -> Any:
    """Return a product. Collective over the context."""
    bias = how.pop("bias")
    return getattr(product, form)(x, borrowed(w), ctx, bias=bias if bias is None else borrowed(bias), **how)


def _split_by_rule(form: Any, x: Tensor, w: Tensor, ctx: Context, **how: Any) -> Any:
    """Return a product whose split operand must be split as ``shard`` splits. Collective over the context.

    Raises:
        LayoutError: it is split otherwise; raised on every rank.
    """
    bias = how.pop("bias")
    arrays = Arrays(x, borrowed(w), bias=bias if bias is None else borrowed(bias))
    return run_once(ctx, Request(form, by_rule=True, **how), arrays)


def borrowed(parameter: Tensor) -> Tensor:
    """Return a tensor over the same memory with a separate storage, valid as long as the parameter's. Local.

    Sharing a CPU tensor with NumPy fixes the size of its storage, which FSDP must be able to free between uses.
    """
    if parameter.device.type != "cpu" or not parameter.numel():
        return parameter
    strides = parameter.stride()
    last = sum((extent - 1) * stride for extent, stride in zip(parameter.shape, strides, strict=True))
    memory = (ctypes.c_byte * ((last + 1) * parameter.itemsize)).from_address(parameter.data_ptr())
    memory.of = parameter  # keeps a temporary parameter alive as long as its memory is used
    return torch.frombuffer(memory, dtype=parameter.dtype).as_strided(parameter.shape, strides)


def _inputs_and_outputs(w: Tensor, transposed: bool) -> tuple[int, int]:
    outputs, inputs = w.shape[::-1] if transposed else w.shape
    return inputs, outputs


# -- allgather_matmul: X is kept gathered for the gradient of w


def _allgather_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    name: str,
    transposed: bool,
    keep: bool,
    by_rule: bool,
    tokens: int | None,
    algo: str,
    backward_algo: str,
) -> tuple[Tensor, Tensor]:
    ctx = Context.named(name)
    call = _split_by_rule if by_rule else _call
    how: dict[str, Any] = {"bias": bias, "transposed": transposed, "return_gathered": keep, "algo": algo}
    y = call("allgather_matmul", in_rows(x), w, ctx, **how)
    y, gathered = y if keep else (y, x.new_empty(0))
    check_total("allgather_matmul", y, tokens)
    return y, gathered


def _allgather_matmul_fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    name: str,
    transposed: bool,
    keep: bool,
    by_rule: bool,
    tokens: int | None,
    algo: str,
    backward_algo: str,
) -> tuple[Tensor, Tensor]:
    lead = (x.shape[0] * Context.named(name).size if tokens is None else tokens, *x.shape[1:-1])
    inputs, outputs = _inputs_and_outputs(w, transposed)
    return x.new_empty((*lead, outputs)), x.new_empty((*lead, inputs) if keep else (0,))


def _allgather_matmul_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, w, _, ctx.context_name, *_, ctx.backward_algo = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    _keep(ctx, output[1], w)


@once
def _allgather_matmul_back(node: Any, gy: Tensor | None, _: None) -> Gradients:
    if gy is None:  # y was not used
        return (None,) * 10
    gathered, w = node.saved_tensors
    gradients = _both(
        node,
        gy,
        lambda: matmul_reduce_scatter(gy, w, None, node.context_name, True, node.backward_algo, "auto"),
        lambda: _of_parameters(node, gy, gathered),
    )
    return (*gradients, *(None,) * 7)


allgather_matmul = operator(
    "allgather_matmul",
    "(Tensor x, Tensor w, Tensor? bias, str ctx, bool transposed, bool keep, bool by_rule, SymInt? tokens, "
    "str algo, str backward_algo) -> (Tensor, Tensor)",
    _allgather_matmul,
    _allgather_matmul_fake,
)
allgather_matmul.register_autograd(_allgather_matmul_back, setup_context=_allgather_matmul_saves)


# -- matmul_reduce_scatter


def _matmul_reduce_scatter(
    x: Tensor, w: Tensor, bias: Tensor | None, name: str, transposed: bool, algo: str, backward_algo: str
) -> Tensor:
    ctx = Context.named(name)
    y: Tensor = _call(
        "matmul_reduce_scatter", in_rows(x), w, ctx, bias=bias, transposed=transposed, algo=algo
    )
    return y


def _matmul_reduce_scatter_fake(
    x: Tensor, w: Tensor, bias: Tensor | None, name: str, transposed: bool, algo: str, backward_algo: str
) -> Tensor:
    rows = count(x.shape[0], Context.named(name))
    return x.new_empty((rows, *x.shape[1:-1], _inputs_and_outputs(w, transposed)[1]))


def _matmul_reduce_scatter_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.context_name, *_, ctx.backward_algo = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)


@once
def _matmul_reduce_scatter_back(node: Any, gy: Tensor) -> Gradients:
    x, w = node.saved_tensors
    keep = any(node.needs_input_grad[1:3])
    how = True, keep, True, node.tokens, node.backward_algo, "auto"
    gx, gathered = allgather_matmul(gy, w, None, node.context_name, *how)
    return (gx, *_of_parameters(node, gathered, x), *(None,) * 4)


matmul_reduce_scatter = operator(
    "matmul_reduce_scatter",
    "(Tensor x, Tensor w, Tensor? bias, str ctx, bool transposed, str algo, str backward_algo) -> Tensor",
    _matmul_reduce_scatter,
    _matmul_reduce_scatter_fake,
)
matmul_reduce_scatter.register_autograd(
    _matmul_reduce_scatter_back, setup_context=_matmul_reduce_scatter_saves
)


# -- matmul_allreduce


def _matmul_allreduce(
    x: Tensor, w: Tensor, bias: Tensor | None, name: str, transposed: bool, algo: str
) -> Tensor:
    ctx = Context.named(name)
    y: Tensor = _call("matmul_allreduce", in_rows(x), w, ctx, bias=bias, transposed=transposed, algo=algo)
    return y


def _matmul_allreduce_fake(
    x: Tensor, w: Tensor, bias: Tensor | None, name: str, transposed: bool, algo: str
) -> Tensor:
    return x.new_empty((*x.shape[:-1], _inputs_and_outputs(w, transposed)[1]))


def _matmul_allreduce_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, *_ = inputs
    _keep(ctx, x, w)


@once
def _matmul_allreduce_back(node: Any, gy: Tensor) -> Gradients:
    x, w = node.saved_tensors
    gx = gy @ w if node.needs_input_grad[0] else None
    return (gx, *_of_parameters(node, gy, x), None, None, None)


matmul_allreduce = operator(
    "matmul_allreduce",
    "(Tensor x, Tensor w, Tensor? bias, str ctx, bool transposed, str algo) -> Tensor",
    _matmul_allreduce,
    _matmul_allreduce_fake,
)
matmul_allreduce.register_autograd(_matmul_allreduce_back, setup_context=_matmul_allreduce_saves)


# -- matmul_allgather


def _matmul_allgather(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    name: str,
    transposed: bool,
    total: int | None,
    algo: str,
    backward_algo: str,
) -> Tensor:
    ctx = Context.named(name)
    how: dict[str, Any] = {"bias": bias, "transposed": transposed, "algo": algo}
    y: Tensor = _split_by_rule("matmul_allgather", in_rows(x), w, ctx, **how)
    check_total("matmul_allgather", y, total)
    return y


def _matmul_allgather_fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    name: str,
    transposed: bool,
    total: int | None,
    algo: str,
    backward_algo: str,
) -> Tensor:
    outputs = _inputs_and_outputs(w, transposed)[1] * Context.named(name).size if total is None else total
    return x.new_empty((*x.shape[:-1], outputs))


def _matmul_allgather_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.context_name, *_, ctx.backward_algo = inputs
    _keep(ctx, x, w)


@once
def _matmul_allgather_back(node: Any, gy: Tensor) -> Gradients:
    x, w = node.saved_tensors
    mine = gy[..., own(gy.shape[-1], Context.named(node.context_name))]
    gradients = _both(
        node,
        gy,
        lambda: matmul_allreduce(mine, w, None, node.context_name, True, node.backward_algo),
        lambda: _of_parameters(node, mine, x),
    )
    return (*gradients, *(None,) * 5)


matmul_allgather = operator(
    "matmul_allgather",
    "(Tensor x, Tensor w, Tensor? bias, str ctx, bool transposed, SymInt? total, str algo, str backward_algo)"
    " -> Tensor",
    _matmul_allgather,
    _matmul_allgather_fake,
)
matmul_allgather.register_autograd(_matmul_allgather_back, setup_context=_matmul_allgather_saves)


# -- matmul_local: communicates in the backward pass


def _matmul_local(x: Tensor, w: Tensor, bias: Tensor | None, name: str, backward_algo: str) -> Tensor:
    return torch.nn.functional.linear(x, w, bias)


def _matmul_local_fake(x: Tensor, w: Tensor, bias: Tensor | None, name: str, backward_algo: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _matmul_local_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.context_name, ctx.backward_algo = inputs
    _keep(ctx, x, w)


@once
def _matmul_local_back(node: Any, gy: Tensor) -> Gradients:
    x, w = node.saved_tensors
    gradients = _both(
        node,
        gy,
        lambda: matmul_allreduce(gy, w, None, node.context_name, True, node.backward_algo),
        lambda: _of_parameters(node, gy, x),
    )
    return (*gradients, None, None)


matmul_local = operator(
    "matmul_local",
    "(Tensor x, Tensor w, Tensor? bias, str ctx, str backward_algo) -> Tensor",
    _matmul_local,
    _matmul_local_fake,
)
matmul_local.register_autograd(_matmul_local_back, setup_context=_matmul_local_saves)


# -- split_matmul_allreduce: every rank has all of x, and multiplies its part


def _split_matmul_allreduce(
    x: Tensor, w: Tensor, bias: Tensor | None, name: str, algo: str, backward_algo: str
) -> Tensor:
    ctx = Context.named(name)
    return _matmul_allreduce(x[..., own(x.shape[-1], ctx)], w, bias, name, False, algo)


def _split_matmul_allreduce_fake(
    x: Tensor, w: Tensor, bias: Tensor | None, name: str, algo: str, backward_algo: str
) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _split_matmul_allreduce_saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.context_name, _, ctx.backward_algo = inputs
    ctx.inputs = x.shape[-1]
    _keep(ctx, x, w)


@once
def _split_matmul_allreduce_back(node: Any, gy: Tensor) -> Gradients:
    x, w = node.saved_tensors
    if x is not None:
        x = x[..., own(node.inputs, Context.named(node.context_name))]
    how = True, node.inputs, node.backward_algo, "auto"
    gradients = _both(
        node,
        gy,
        lambda: matmul_allgather(gy, w, None, node.context_name, *how),
        lambda: _of_parameters(node, gy, x),
    )
    return (*gradients, *(None,) * 3)


split_matmul_allreduce = operator(
    "split_matmul_allreduce",
    "(Tensor x, Tensor w, Tensor? bias, str ctx, str algo, str backward_algo) -> Tensor",
    _split_matmul_allreduce,
    _split_matmul_allreduce_fake,
)
split_matmul_allreduce.register_autograd(
    _split_matmul_allreduce_back, setup_context=_split_matmul_allreduce_saves
)


# -- what they share


def _keep(node: Any, x: Tensor, w: Tensor) -> None:
    """Keep what the backward pass needs: x for the gradient of w, w for that of x. Local."""
    needs_x, needs_w, *_ = node.needs_input_grad
    node.save_for_backward(x if needs_w else None, w if needs_x else None)


def _both(
    node: Any, gy: Tensor, of_x: Callable[[], Tensor], of_parameters: Callable[[], Gradients]
) -> Gradients:
    """Return the gradient of x, if needed, by a collective product, and meanwhile those of weights and bias. Local."""
    if not node.needs_input_grad[0]:
        return None, *of_parameters()
    return beside(gy, of_x, of_parameters)


def beside(like: Tensor, first: Callable[[], Tensor], then: Callable[[], Gradients]) -> Gradients:
    """Return the results of both; on GPUs ``then`` runs while ``first`` does, and must not need its result. Local.

    Products on several GPUs wait for each other, which leaves room for the weights' gradient.
    """
    streams = _streams(like)
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


def _streams(tensor: Tensor) -> tuple[Any, Any] | None:
    """Return the current stream of a tensor's GPU and another one; None elsewhere, and in compiled code. Local."""
    if type(tensor) is not Tensor or not tensor.is_cuda:
        return None
    return torch.cuda.current_stream(tensor.device), _side_stream(tensor.device)


@lru_cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _of_parameters(node: Any, gy: Tensor, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weights and bias, None for those that are not needed. Local."""
    _, needs_w, needs_bias, *_ = node.needs_input_grad
    rows = as_rows(gy) if needs_w or needs_bias else None
    gw = None
    if needs_w:
        assert x is not None
        assert rows is not None
        gw = rows.t() @ as_rows(x)
    return gw, rows.sum(0) if needs_bias and rows is not None else None


def as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor with all dimensions but the last folded into one. Local."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def in_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy unless its rows are contiguous and at equal distances, as the products want them."""
    rows, width = tensor.shape[:-1].numel(), tensor.shape[-1]
    try:
        folded = tensor.view(rows, width)
    except RuntimeError:
        return tensor.contiguous()
    fits = (width <= 1 or folded.stride(1) == 1) and (rows <= 1 or folded.stride(0) >= width)
    return tensor if fits else tensor.contiguous()
