# SPDX-License-Identifier: Apache-2.0
"""Scales: the factors of 8-bit operands and results, and the largest value of a result. A plain value.

Source: cublasmp.h of 0.10.0, cuBLASLt's documentation of 8-bit floating point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import numpy as np

from .dtypes import is_float8
from .errors import ArgumentError, short_repr
from .layout import MatmulProblem
from .layout.grid import one_of

__all__ = ["BLOCK", "Scales", "block_scales"]

_LARGEST = float(np.finfo(np.float32).max)
BLOCK = 32  # entries of k that share a scale in mode "block"
_TILE = 128, 4  # rows and scales that are stored together
_ARRAYS = ("a", "b", "d", "amax")


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
            raise ArgumentError(f"scales: mode is {self.mode!r}, expected 'tensor' or 'block'")
        for name in ("a", "b", "d"):
            value = getattr(self, name)
            if isinstance(value, (Number, np.generic)):
                if self.mode != "tensor":
                    raise ArgumentError(f"scales: {name} is {short_repr(value)}, expected an array of bytes")
                object.__setattr__(self, name, _number(name, value))
        if isinstance(self.amax, (Number, np.generic)):
            raise ArgumentError(f"scales: amax is {self.amax!r}, expected an array to write it to")
        if self.mode == "block" and (self.a is None or self.b is None or self.d is not None):
            raise ArgumentError("scales: mode 'block' needs a and b, and has no d")

    @property
    def given(self) -> tuple[str, ...]:
        """Names of what is given."""
        return tuple(name for name in _ARRAYS if getattr(self, name) is not None)

    def __repr__(self) -> str:
        return f"Scales({', '.join([*self.given, self.mode])})"

    def facts(self) -> list[str]:
        """Return what must be the same on every rank. Local."""
        return [self.mode] + [
            f"{name}: {value if isinstance(value, float) else 'an array'}"
            for name in self.given
            for value in [getattr(self, name)]
        ]

    def bind(self, adopt: Callable[[Any], Any], p: MatmulProblem, rank: int) -> Scales:
        """Return it with an engine's arrays; numbers stay as they are. Local.

        Args:
            adopt: makes an engine's array of what the caller gave, without a copy.
            p: the product.
            rank: whose arrays they are.

        Raises:
            ArgumentError: a matrix has no such scale, or an array has another shape or type.
        """
        arrays = {
            name: adopt(value) for name in self.given if not isinstance(value := getattr(self, name), float)
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
