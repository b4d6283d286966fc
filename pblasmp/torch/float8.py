# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG001 - all parts of an operator have its arguments
"""The products in 8 bits as operators of PyTorch: operands are cast with scales, and so are gradients.

    cast_delayed    x and w, or a gradient, to 8 bits with scales from their history; also returns the new history
    cast_static     x and w to 8 bits with scales that the user gives
    scaled          the product of 8-bit x and w; x, w and bias have gradients
    scaled_back     the product that gives the gradient of x
    scaled_weight   the product that gives the gradient of w, local

Every whole tensor has one scale, the same on every rank: parts that are gathered or summed then have the same unit, and
results do not depend on the number of ranks. Hence each amax is reduced over the ranks: those of x and w in one message
of the forward pass, that of the gradient in one of the backward pass.

Most GPUs multiply 8-bit matrices only if both are contiguous along the dimension that is summed over: the backward pass
transposes first. GPUs before compute capability 8.9 multiply none: local products are then in float32.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from ..context import Context
from ..epilogue import Scales
from ..errors import short_repr
from .forms import FORMS, own, shape_of_product
from .meshes import reduce
from .operators import Again, as_rows, beside
from .registry import Gradients, once, operator
from .scaling import GRADIENT, DelayedScaling, units_of

_WIDE = (torch.float32, torch.float16, torch.bfloat16)
_EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)


def scaled_product(
    form: str,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    ctx: Context,
    scales: DelayedScaling | Scales,
    keep: bool,
    by_rule: bool,
    total: int | None,
    algo: str,
    backward_algo: str,
) -> Tensor:
    """Return a product in 8 bits of this rank's parts. Collective over the context.

    Scales and algorithms were checked by ``fault_of_scales`` and ``fault_of_algorithms``; the rest is as of
    ``operators.Again``.
    """
    part = x.detach()
    if FORMS[form].part_of_x:
        part = part[..., own(x.shape[-1], ctx)]
    tensors = [part, w.detach()]
    dtype = torch.bfloat16 if x.dtype in _EIGHT else x.dtype
    if isinstance(scales, Scales):
        units = torch.cat([_unit(each, x.device) for each in (scales.a, scales.b)])
        wide = [i for i, tensor in enumerate(tensors) if tensor.dtype not in _EIGHT]
        cast = cast_static([tensors[i] for i in wide], units[wide], ctx.name, form, scales.facts())
        for i, tensor in zip(wide, cast, strict=True):
            tensors[i] = tensor
        x8, w8 = tensors
        y, _ = scaled(
            x.detach(), w.detach(), None if bias is None else bias.detach(), x8, w8, units, units, form, ctx.name,
            dtype, dtype, 0, "", False, False, by_rule, total, algo, backward_algo,
        )  # fmt: skip
        return y
    records = torch.is_grad_enabled() and scales.training
    how = scales.margin, scales.amax_compute_algo
    x8, w8, units, history = cast_delayed(
        tensors, scales.amax_history, 0, ctx.name, form, scales.extra_repr(), scales.operands, *how,
        records or not scales.has_recorded(), records, scales.agreed != ctx.name,
    )  # fmt: skip
    scales.agreed = ctx.name
    if records:
        scales.amax_history[:GRADIENT].copy_(history)
    y, _ = scaled(
        x, w, bias, x8, w8, units, scales.amax_history, form, ctx.name, dtype, scales.gradients, *how,
        keep, records, by_rule, total, algo, backward_algo,
    )  # fmt: skip
    return y


def fault_of_scales(scales: object, x: Tensor, w: Tensor, bias: Tensor | None) -> str:
    """Return what is wrong with scales for these tensors, "" if nothing is. Local."""
    if not isinstance(scales, (DelayedScaling, Scales)):
        return f"scales: expected a DelayedScaling or pblasmp.Scales, got {type(scales).__name__}"
    static = isinstance(scales, Scales)
    expected = "float32, float16 or bfloat16" + (", or 8 bits" if static else " with DelayedScaling")
    for name, tensor in (("x", x), ("w", w)):
        if tensor.dtype not in _WIDE + _EIGHT * static:
            return f"{name}: dtype is {tensor.dtype}, expected {expected}"
        if tensor.device != x.device:
            return f"{name}: on {tensor.device}, expected x's {x.device}"
    if isinstance(scales, DelayedScaling):
        if scales.amax_history.device != x.device:
            return f"scales: on {scales.amax_history.device}, expected x's {x.device}: move them with scales.to()"
        return ""
    if scales.mode != "tensor" or scales.d is not None or scales.amax is not None:
        return f"scales: {scales!r}, expected only a and b, in mode 'tensor'"
    for name, value in (("a", scales.a), ("b", scales.b)):
        number = value is None or isinstance(value, float)
        if not number and not (
            isinstance(value, Tensor) and value.numel() == 1 and value.dtype == torch.float32
        ):
            return f"scales: {name}: expected a number or a tensor of one float32, got {short_repr(value)}"
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, w, bias)):
        return "scales: pblasmp.Scales has no scale of gradients: use DelayedScaling, or torch.no_grad()"
    return ""


def _unit(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(1).to(device)
    return torch.full((1,), 1.0 if value is None else float(value), device=device)


# -- to 8 bits


def _amax(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, infinity if a value is not finite. Local."""
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high).float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _cast(tensor: Tensor, unit: Tensor, kind: torch.dtype) -> Tensor:
    """Return a contiguous 8-bit tensor; what is too large becomes the largest value. Local."""
    largest = torch.finfo(kind).max
    values = (tensor * unit.reciprocal().reshape(1)).clamp_(-largest, largest)  # in float32, as the unit is
    return values.to(kind, memory_format=torch.contiguous_format)


def digest(history: Tensor) -> str:
    """Return what tells a history of scales from others, in words. Local."""
    return f"{tuple(history.shape)} {hashlib.sha256(history.cpu().numpy().tobytes()).hexdigest()[:12]}"


def _cast_delayed_fake(
    tensors: list[Tensor],
    history: Tensor,
    row: int,
    name: str,
    call: str,
    recipe: str,
    kind: torch.dtype,
    *how: Any,
) -> list[Tensor]:
    n = len(tensors)
    return [
        *(each.new_empty(each.shape, dtype=kind) for each in tensors),
        history.new_empty(n),
        history.new_empty((n, history.shape[1])),
    ]


@operator(
    "(Tensor[] tensors, Tensor history, int row, str ctx, str call, str recipe, ScalarType kind, int margin, str algo, "
    "bool measures, bool records, bool compares) -> Tensor[]",
    _cast_delayed_fake,
)
def cast_delayed(
    tensors: list[Tensor],
    history: Tensor,
    row: int,
    name: str,
    call: str,
    recipe: str,
    kind: torch.dtype,
    margin: int,
    algo: str,
    measures: bool,
    records: bool,
    compares: bool,
) -> list[Tensor]:
    """Return tensors in 8 bits, their units and their rows of the history. Collective over the context."""
    ctx = Context.named(name)
    with ctx.running(call):
        with ctx.agreement(call) as facts:
            if recipe:  # that of the backward pass was agreed on in the forward pass
                facts["scales"] = (
                    f"{recipe}, {'updated' if records else 'measured' if measures else 'frozen'}"
                )
                facts["histories"] = digest(history) if compares else "as agreed before"
        mine, measured = history[row : row + len(tensors)], None
        if measures:
            measured = reduce(torch.stack([_amax(tensor) for tensor in tensors]), ctx, dist.ReduceOp.MAX)
        units = units_of(mine, kind, margin, algo, measured)
        if measured is None:
            after = mine.clone()
        else:
            usable = (measured > 0) & measured.isfinite()
            moved = torch.cat([measured[:, None], mine[:, :-1]], 1)
            after = torch.where(usable[:, None], moved, mine)
    return [*(_cast(tensor, unit, kind) for tensor, unit in zip(tensors, units, strict=True)), units, after]


def _cast_static_fake(tensors: list[Tensor], *_: Any) -> list[Tensor]:
    return [each.new_empty(each.shape, dtype=torch.float8_e4m3fn) for each in tensors]


@operator("(Tensor[] tensors, Tensor units, str ctx, str call, str[] given) -> Tensor[]", _cast_static_fake)
def cast_static(tensors: list[Tensor], units: Tensor, name: str, call: str, given: list[str]) -> list[Tensor]:
    """Return tensors in 8 bits with the scales that the user gives. Collective over the context."""
    with Context.named(name).agreement(call) as facts:
        facts["scales"] = given
    return [_cast(tensor, unit, torch.float8_e4m3fn) for tensor, unit in zip(tensors, units, strict=True)]


# -- products of 8-bit tensors


def _product(
    form: str, x8: Tensor, w8: Tensor, units: tuple[Tensor, Tensor], bias: Tensor | None, ctx: Context,
    dtype: torch.dtype, keep: bool, by_rule: bool, total: int | None, algo: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x wᵀ + bias, and with ``keep`` the gathered x. Collective over the context, unless it is local."""
    if bias is not None:  # the types that cuBLASLt has
        bias = bias.to(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    if FORMS[form].call is None:
        y = multiply_local(as_rows(x8), w8, units, dtype, bias)
        return y.reshape(*x8.shape[:-1], w8.shape[0]), x8.new_empty(0)
    scales, kind = Scales(a=units[0], b=units[1]), str(dtype).removeprefix("torch.")
    again = Again(form, ctx, False, keep, by_rule, total, scales=scales, dtype=kind, algo=algo)
    y, gathered = again(x8, w8, bias)
    return y, x8.new_empty(0) if gathered is None else gathered


def _product_fake(
    form: str, x8: Tensor, outputs: int, ctx: Context, dtype: torch.dtype, keep: bool, total: int | None
) -> tuple[Tensor, Tensor]:
    y, gathered = shape_of_product(form, x8, outputs, ctx, total)
    return x8.new_empty(y, dtype=dtype), x8.new_empty(gathered if keep else [0])


def multiply_local(
    a: Tensor, b: Tensor, units: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return a bᵀ + bias for 8-bit a (m, k) and b (n, k), both C-ordered. Local."""
    fits = a.numel() and b.numel() and a.shape[1] % 16 == b.shape[0] % 16 == 0
    if fits and a.is_cuda and torch.cuda.get_device_capability(a.device) >= (8, 9):
        y = on_tensor_cores(a, b, units, dtype)
        return y if bias is None else y + bias.to(dtype)
    y = (a.float() @ b.float().t()) * (units[0] * units[1])
    return (y if bias is None else y + bias).to(dtype)


def on_tensor_cores(a: Tensor, b: Tensor, units: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return A Bᵀ of 8-bit matrices with one scale each, by the GPU's tensor cores. Local."""
    each = ScalingType.TensorWise
    # cuBLASLt needs aligned scales.
    a_unit, b_unit = (unit.clone() if unit.data_ptr() % 16 else unit for unit in units)
    return scaled_mm(a, b.t(), a_unit, each, b_unit, each, output_dtype=dtype)


# -- the forward pass, and how it is differentiated


def _scaled_fake(
    x: Tensor, w: Tensor, bias: Tensor | None, x8: Tensor, w8: Tensor, units: Tensor, history: Tensor, form: str,
    name: str, dtype: torch.dtype, gradients: torch.dtype, margin: int, amax_algo: str, keep: bool, records: bool,
    by_rule: bool, total: int | None, *_: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _product_fake(form, x8, w8.shape[0], Context.named(name), dtype, keep, total)


def _scaled_saves(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, bias, x8, w8, units, ctx.history, ctx.form, ctx.context_name, *how = inputs
    _, ctx.gradients, ctx.margin, ctx.amax_algo, _, ctx.records, *_, ctx.backward_algo = how
    ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, w.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    needs_x, needs_w, *_ = ctx.needs_input_grad
    kind = FORMS[ctx.form]
    kept = output[1] if kind.gathers == "x" else x8
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        kept if needs_w else None, w8 if needs_x or (kind.scatters and needs_w) else None, units
    )


@once
def _scaled_to_gradients(node: Any, gy: Tensor | None, _: None) -> Gradients:
    if gy is None:  # y was not used
        return None, None, None
    x8, w8, units = node.saved_tensors
    needs_x, needs_w, needs_bias, *_ = node.needs_input_grad
    form, name = node.form, node.context_name
    kind = FORMS[form]
    mine = gy[..., own(gy.shape[-1], Context.named(name))] if kind.gathers == "y" else gy
    gx = gw = gb = None
    if needs_bias:
        gb = mine.sum(tuple(range(mine.ndim - 1)), dtype=torch.float32)
        gb = (sum_over_ranks(gb, name) if kind.scatters else gb).to(node.bias_dtype)
    if not needs_x and not needs_w:
        return None, None, gb
    g8, of_g, history = cast_delayed(
        [mine], node.history, GRADIENT, name, f"{form}: gradient", "", node.gradients, node.margin, node.amax_algo,
        True, node.records, False,
    )  # fmt: skip
    if node.records:
        node.history[GRADIENT:].copy_(history)

    def of_x(keep: bool = False) -> tuple[Tensor, Tensor]:
        total = node.x_shape[0] if kind.scatters else node.x_shape[-1] if kind.part_of_x else None
        product: tuple[Tensor, Tensor] = scaled_back(
            g8, w8, of_g, units[1:], kind.back, name, node.x_dtype, keep, total, node.backward_algo
        )
        return product

    def of_w(gradient: Tensor) -> Tensor:
        product: Tensor = scaled_weight(gradient, x8, of_g, units[:1], node.w_dtype)
        return product

    if kind.scatters:
        gx, gathered = of_x(needs_w)
        gw = of_w(gathered) if needs_w else None
    elif needs_x and needs_w:
        operations = 2.0 * g8.numel() * (w8.numel() // max(1, g8.shape[-1]))
        gx, gw = beside(gy, operations, lambda: of_x()[0], lambda: (of_w(g8),))
    else:
        gx, gw = (of_x()[0], None) if needs_x else (None, of_w(g8))
    return gx, gw, gb


@operator(
    "(Tensor x, Tensor w, Tensor? bias, Tensor x8, Tensor w8, Tensor units, Tensor history, str form, str ctx, "
    "ScalarType dtype, ScalarType gradients, int margin, str amax_algo, bool keep, bool records, bool by_rule, "
    "SymInt? total, str algo, str backward_algo) -> (Tensor, Tensor)",
    _scaled_fake,
    _scaled_to_gradients,
    _scaled_saves,
)
def scaled(
    x: Tensor, w: Tensor, bias: Tensor | None, x8: Tensor, w8: Tensor, units: Tensor, history: Tensor, form: str,
    name: str, dtype: torch.dtype, gradients: torch.dtype, margin: int, amax_algo: str, keep: bool, records: bool,
    by_rule: bool, total: int | None, algo: str, backward_algo: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the product of 8-bit x and w; x, w and bias have gradients. Collective, unless it is local."""
    each = units[:1], units[1:]
    return _product(form, x8, w8, each, bias, Context.named(name), dtype, keep, by_rule, total, algo)


# -- the backward pass


def _scaled_back_fake(
    g8: Tensor, w8: Tensor, g_unit: Tensor, w_unit: Tensor, form: str, name: str, dtype: torch.dtype, keep: bool,
    total: int | None, algo: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _product_fake(form, g8, w8.shape[1], Context.named(name), dtype, keep, total)


@operator(
    "(Tensor g8, Tensor w8, Tensor g_unit, Tensor w_unit, str form, str ctx, ScalarType dtype, bool keep, "
    "SymInt? total, str algo) -> (Tensor, Tensor)",
    _scaled_back_fake,
)
def scaled_back(
    g8: Tensor, w8: Tensor, g_unit: Tensor, w_unit: Tensor, form: str, name: str, dtype: torch.dtype, keep: bool,
    total: int | None, algo: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the product that gives the gradient of x. Collective over the context, unless it is local."""
    ctx, turned, by_rule = Context.named(name), w8.t().contiguous(), bool(FORMS[form].gathers)
    return _product(form, g8, turned, (g_unit, w_unit), None, ctx, dtype, keep, by_rule, total, algo)


def _scaled_weight_fake(g8: Tensor, x8: Tensor, g_unit: Tensor, x_unit: Tensor, dtype: torch.dtype) -> Tensor:
    return g8.new_empty((g8.shape[-1], x8.shape[-1]), dtype=dtype)


@operator(
    "(Tensor g8, Tensor x8, Tensor g_unit, Tensor x_unit, ScalarType dtype) -> Tensor", _scaled_weight_fake
)
def scaled_weight(g8: Tensor, x8: Tensor, g_unit: Tensor, x_unit: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product that gives the gradient of w. Local."""
    return multiply_local(as_rows(g8).t().contiguous(), as_rows(x8).t().contiguous(), (g_unit, x_unit), dtype)


@operator("(Tensor tensor, str ctx) -> Tensor", lambda tensor, _: torch.empty_like(tensor))
def sum_over_ranks(tensor: Tensor, name: str) -> Tensor:
    """Return the gradient of a bias, summed. Collective over the context."""
    ctx, call = Context.named(name), "gradient of a bias"
    with ctx.running(call):
        with ctx.agreement(call) as facts:
            facts["gradient"] = f"{tuple(tensor.shape)} {tensor.dtype}"
        return reduce(tensor.clone(), ctx)
