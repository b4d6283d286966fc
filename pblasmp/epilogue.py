# SPDX-License-Identifier: Apache-2.0
"""Epilogue: what is done to a product before it is rounded: bias, activation, their gradients. A plain value.

The names are cuBLASLt's. Vectors and auxiliary arrays are local arrays, laid out like this rank's part of D; which way
round follows from D's memory order, because C order is the transpose of what the library knows.

Source: cublasmp.h of 0.10.0, cuBLASLt's documentation of its epilogues.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .dtypes import DTYPES, is_float8
from .errors import ArgumentError, UnsupportedError, short_repr
from .layout.grid import one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .layout import MatmulProblem, MatrixDescriptor

Activation = Literal["relu", "gelu", "drelu", "dgelu"]

_FORWARD, _BACKWARD = ("relu", "gelu"), ("drelu", "dgelu")
_ARRAYS = ("bias", "aux", "bias_grad", "bias_grad_a", "bias_grad_b")
_MASK_LD = 128  # entries of D; one bit each
_GELU_LD = 8


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Epilogue:
    """What follows a product: ``D = f(alpha op(A) op(B) + beta C + bias)``. Local.

    Arrays are local, this rank's part: NumPy arrays on the host engine, GPU memory on cublasmp. "Along" means along the
    dimension of D that is contiguous in memory: with D in C order a bias has one value per column of D, in F order one
    per row.

    Args:
        activation: for real types: "relu" or "gelu" (its tanh form) of the sum; "drelu" or "dgelu": the product is
            multiplied by the derivative at the values saved in ``aux``. None: no activation.
        bias: read: a vector along this rank's part of D, added before the activation.
        aux: from ``ctx.empty_aux(D's descriptor, activation)``: written by "relu" (a bit per entry of D) and "gelu"
            (what it was applied to), read by "drelu" and "dgelu".
        bias_grad: written, with "drelu" or "dgelu": the sums of D across, a vector along D.
        bias_grad_a: written: the sums of op(A) over k, one per row of D.
        bias_grad_b: written: the sums of op(B) over k, one per column of D.
        fused: insist that the engine computes it inside the product. Otherwise an engine that cannot do so computes
            it afterwards, from the rounded product, and ``plan.report()`` says so.

    Raises:
        ArgumentError: a name is unknown, or two parts cannot be combined.
    """

    activation: Activation | None = None
    bias: Any = None
    aux: Any = None
    bias_grad: Any = None
    bias_grad_a: Any = None
    bias_grad_b: Any = None
    fused: bool = False

    def __post_init__(self) -> None:
        if self.activation is not None and not one_of(self.activation, _FORWARD + _BACKWARD):
            raise ArgumentError(
                f"epilogue: activation is {short_repr(self.activation)}, expected None, 'relu', 'gelu', 'drelu' "
                "or 'dgelu'"
            )
        faults = list(self._misfits())
        if faults:
            raise ArgumentError("epilogue: " + "; ".join(faults))

    def _misfits(self) -> Iterator[str]:
        backward = self.activation in _BACKWARD
        if self.aux is not None and self.activation is None:
            yield "aux needs an activation"
        if backward and self.aux is None:
            yield f"{self.activation!r} needs the aux that {self.activation[1:]!r} wrote"  # type: ignore[index]
        if backward and self.bias is not None:
            yield f"{self.activation!r} has no bias"
        if self.bias_grad is not None and not backward:
            yield "bias_grad needs 'drelu' or 'dgelu'"
        sums = [name for name in ("bias_grad_a", "bias_grad_b") if getattr(self, name) is not None]
        if sums and (self.activation or len(self.given) > 1):
            yield f"{sums[0]} cannot be combined with anything else"

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the arrays that are given."""
        return tuple(name for name in _ARRAYS if getattr(self, name) is not None)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the arrays that are written."""
        return tuple(
            x for x in self.given if x != "bias" and not (x == "aux" and self.activation in _BACKWARD)
        )

    @property
    def name(self) -> str:
        """What it does, in a word or two: "relu bias aux"; empty for nothing at all."""
        return " ".join([self.activation or "", *self.given]).strip()

    def __repr__(self) -> str:
        return f"Epilogue({self.name}{', fused' if self.fused else ''})"

    def bind(self, take_over: Callable[[Any], Any], p: MatmulProblem, rank: int) -> Epilogue:
        """Return it with an engine's arrays, each in the form that the product on ``rank`` needs. Local.

        Args:
            take_over: makes an engine's array of what the caller gave, without a copy.
            p: the product.
            rank: whose arrays they are; outside D's grid they are ignored.

        Raises:
            ArgumentError: an array has another shape, type or memory order.
            UnsupportedError: the product is complex and has an activation.
        """
        if p.d.dtype.kind == "c" and self.activation is not None:
            raise UnsupportedError(
                f"epilogue: {self.activation!r} is only for real types, D is {p.d.dtype.name}"
            )
        if rank >= p.d.grid.size:
            nothing: dict[str, Any] = dict.fromkeys(self.given, np.empty(0))
            return replace(self, **nothing)
        arrays = {name: take_over(getattr(self, name)) for name in self.given}
        faults = []
        for name, array in arrays.items():
            fault = _aux_fault(self, array, p, rank) if name == "aux" else _vector_fault(name, array, p, rank)
            faults += [f"epilogue: {name}: {fault}"] if fault else []
            if name in self.outputs and not getattr(array.flags, "writeable", True):
                faults.append(f"epilogue: {name}: is read-only, expected a writable array")
        if faults:
            raise ArgumentError("\n  - ".join(faults))
        return replace(self, **arrays)

    def facts(self) -> list[str]:
        """Return what must be the same on every rank. Local."""
        return [f"{field.name}: {_kind(getattr(self, field.name))}" for field in fields(self)]


def _kind(value: Any) -> str:
    return str(value) if value is None or isinstance(value, (str, bool)) else "an array"


def along(d: MatrixDescriptor) -> int:
    """Return the axis of D that is contiguous in memory. Local."""
    return 1 if d.order == "C" else 0


def bias_dtype(p: MatmulProblem) -> np.dtype:
    """Return the type of bias vectors: D's; with 8-bit operands bfloat16, or float16 if that is D's or C's. Local."""
    if not is_float8(p.a.dtype):
        return p.d.dtype
    like = p.c if p.c is not None and is_float8(p.d.dtype) else p.d
    return DTYPES["float16" if like.dtype == np.float16 else "bfloat16"]


def vector_axis(name: str, d: MatrixDescriptor) -> int:
    """Return which axis of D the vector ``name`` of an epilogue has one entry for. Local."""
    return {"bias_grad_a": 0, "bias_grad_b": 1}.get(name, along(d))


def vector_length(name: str, p: MatmulProblem, rank: int) -> int:
    """Return the length of the vector ``name`` of an epilogue on a rank of D's grid. Local.

    It is that of the rank's part of D; every rank has all of a vector whose axis "matmul_reduce_scatter" scatters.
    """
    axis = vector_axis(name, p.d)
    if p.scheme == "matmul_reduce_scatter" and axis != along(p.d):
        return p.d.shape[axis]
    return p.d.local_shape(rank)[axis]


def _vector_fault(name: str, array: Any, p: MatmulProblem, rank: int) -> str:
    axis, length = vector_axis(name, p.d), vector_length(name, p, rank)
    what = ("row", "column")
    if tuple(array.shape) != (length,):
        why = f"expected ({length},): one value per {what[axis]} of D that this rank has"
        if name in ("bias", "bias_grad"):
            other = "F" if p.d.order == "C" else "C"
            why += f", for D is in {p.d.order} order (one per {what[1 - axis]}: D in {other} order)"
        return f"shape is {tuple(array.shape)}, {why}"
    if length > 1 and array.strides[0] != array.itemsize:
        return f"stride is {array.strides[0]} bytes, expected contiguous values"
    if array.dtype != bias_dtype(p):
        return f"dtype is {array.dtype}, expected {bias_dtype(p).name}"
    return ""


def aux_layout(d: MatrixDescriptor, rank: int, activation: str) -> tuple[tuple[int, int], int, np.dtype]:
    """Return ``(shape, leading dimension in elements, dtype)`` of a rank's auxiliary array, in D's memory order. Local.

    "gelu" and "dgelu": D's shape and type (bfloat16 for 8 bits), the leading dimension a multiple of 8.
    "relu" and "drelu": bytes, each with eight neighbors of D along its contiguous dimension, lowest bit first, that
    dimension padded to a multiple of 128.
    """
    shape = d.local_shape(rank)
    axis = along(d)
    if activation in ("gelu", "dgelu"):
        dtype = DTYPES["bfloat16"] if is_float8(d.dtype) else d.dtype
        return shape, max(1, -(-shape[axis] // _GELU_LD)) * _GELU_LD, dtype
    nbytes = max(1, -(-shape[axis] // _MASK_LD)) * _MASK_LD // 8
    return ((shape[0], nbytes) if axis else (nbytes, shape[1])), nbytes, np.dtype(np.uint8)


def _aux_fault(e: Epilogue, array: Any, p: MatmulProblem, rank: int) -> str:
    shape, _, dtype = aux_layout(p.d, rank, e.activation or "")
    made = f"ctx.empty_aux(descriptor, {e.activation!r}) makes one"
    if tuple(array.shape) != shape:
        return f"shape is {tuple(array.shape)}, expected {shape}: {made}"
    if array.dtype != dtype:
        return f"dtype is {array.dtype}, expected {dtype.name}: {made}"
    axis = along(p.d)
    step = (_MASK_LD // 8 if dtype.itemsize == 1 else _GELU_LD) * dtype.itemsize
    apart = array.strides[1 - axis]
    if array.size and (
        (shape[axis] > 1 and array.strides[axis] != dtype.itemsize)
        or (shape[1 - axis] > 1 and (apart < shape[axis] * dtype.itemsize or apart % step))
    ):
        return (
            f"strides are {tuple(array.strides)} bytes, expected {p.d.order} order like D "
            f"with lines a multiple of {step} bytes apart: {made}"
        )
    return ""


_LARGEST = float(np.finfo(np.float32).max)
BLOCK = 32  # entries of k that share a scale in mode "block"
_TILE = 128, 4  # rows and scales that are stored together
_SCALES = ("a", "b", "d", "amax")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Scales:
    """The scales of a product of 8-bit matrices: ``D = d f(alpha (a op(A)) (b op(B)) + beta C)``. Local.

    A scale is a number, of Python or NumPy, or an array of one float32 of this rank's engine that every run reads; it
    must be the same on every rank. One that is not given is 1. C has 16 or 32 bits and no scale.

    Args:
        a, b: the value of one unit of 8-bit A and B.
        d: factor applied to D before it is stored in 8 bits.
        amax: an array of one float32 that is written: the largest absolute value of this rank's part of D, before ``d``
            scales it.
        mode: "tensor": one scale for a whole matrix. "block" (MXFP8): ``a`` and ``b`` are bytes, powers of 2 with a
            bias of 127, one for every 32 entries along k. It needs a Blackwell GPU, and D then has 16 or 32 bits.

    Raises:
        ArgumentError: the mode is unknown, or does not take these scales.
    """

    a: Any = None
    b: Any = None
    d: Any = None
    amax: Any = None
    mode: str = "tensor"

    def __post_init__(self) -> None:
        if not one_of(self.mode, ("tensor", "block")):
            raise ArgumentError(f"scales: mode is {short_repr(self.mode)}, expected 'tensor' or 'block'")
        for name in ("a", "b", "d"):
            value = getattr(self, name)
            if isinstance(value, (Number, np.generic)):
                if self.mode != "tensor":
                    raise ArgumentError(f"scales: {name} is {short_repr(value)}, expected an array of bytes")
                object.__setattr__(self, name, _number(name, value))
        if isinstance(self.amax, (Number, np.generic)):
            raise ArgumentError(f"scales: amax is {short_repr(self.amax)}, expected an array to write it to")
        if self.mode == "block" and (self.a is None or self.b is None or self.d is not None):
            raise ArgumentError("scales: mode 'block' needs a and b, and has no d")

    @property
    def given(self) -> tuple[str, ...]:
        """Names of what is given."""
        return tuple(name for name in _SCALES if getattr(self, name) is not None)

    def __repr__(self) -> str:
        return f"Scales({', '.join([*self.given, self.mode])})"

    def facts(self) -> list[str]:
        """Return what must be the same on every rank. Local."""
        return [self.mode] + [
            f"{name}: {value if isinstance(value, float) else 'an array'}"
            for name in self.given
            for value in [getattr(self, name)]
        ]

    def bind(self, take_over: Callable[[Any], Any], p: MatmulProblem, rank: int) -> Scales:
        """Return it with an engine's arrays; numbers stay as they are. Local.

        Args:
            take_over: makes an engine's array of what the caller gave, without a copy.
            p: the product.
            rank: whose arrays they are.

        Raises:
            ArgumentError: a matrix has no such scale, or an array has another shape or type.
        """
        arrays = {
            name: take_over(value)
            for name in self.given
            if not isinstance(value := getattr(self, name), float)
        }
        faults = [f"scales: {fault}" for fault in self._faults(arrays, p, rank)]
        if faults:
            raise ArgumentError("\n  - ".join(faults))
        return replace(self, **arrays)

    def _faults(self, arrays: dict[str, Any], p: MatmulProblem, rank: int) -> Iterator[str]:
        if not is_float8(p.a.dtype):
            yield f"only for 8-bit operands, A is {p.a.dtype.name}"
            return
        if self.d is not None and not is_float8(p.d.dtype):
            yield f"d: only for an 8-bit D, D is {p.d.dtype.name}"
        if self.mode == "block" and is_float8(p.d.dtype):
            yield f"mode 'block' does not take an 8-bit D, D is {p.d.dtype.name}"
        for name, array in arrays.items():
            blocks = self.mode == "block" and name in ("a", "b")
            dtype = np.dtype(np.uint8 if blocks else np.float32)
            size = 1
            if blocks:
                matrix, op = (p.a, p.op_a) if name == "a" else (p.b, p.op_b)
                size = (
                    0 if rank >= matrix.grid.size else block_scales(matrix.local_shape(rank), op != "N", name)
                )
            if array.dtype != dtype or array.size != size:
                yield f"{name}: expected {size} {dtype.name}, got {array.size} {array.dtype}"
        if "amax" in arrays and not getattr(arrays["amax"].flags, "writeable", True):
            yield "amax: is read-only, expected a writable array"


def _number(name: str, value: Any) -> float:
    """Return a scale that is a number as a float that float32 can hold. Local."""
    try:
        found = float(value.real if value.imag == 0 else "nan")
    except (TypeError, ValueError, OverflowError):
        found = float("nan")
    if not abs(found) <= _LARGEST:
        raise ArgumentError(
            f"scales: {name} is {short_repr(value)}, expected a finite number that float32 can hold"
        )
    return found


def block_scales(shape: tuple[int, int], transposed: bool, name: str) -> int:
    """Return how many scales mode "block" has for a local array of A or B: tiles of 128 × 4 are complete. Local."""
    outer, k = shape if (name == "a") != transposed else shape[::-1]
    rows, columns = _TILE
    return -(-outer // rows) * rows * (-(-k // (BLOCK * columns)) * columns)
