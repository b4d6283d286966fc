# SPDX-License-Identifier: Apache-2.0
"""The element types of pblasmp and what each is accumulated in."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .errors import LayoutError

__all__ = [
    "DTYPES",
    "FLOAT8",
    "accumulation_dtype",
    "as_dtype",
    "is_float8",
    "is_foreign",
    "result_dtype",
    "scalar",
]

DTYPES: dict[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "complex128": np.dtype(np.complex128),
    "complex64": np.dtype(np.complex64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The element types of every routine, by name."""

FLOAT8: dict[str, np.dtype] = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The element types of products with scales, by name."""

_ALL = DTYPES | FLOAT8


def as_dtype(dtype: Any) -> np.dtype:
    """Return the NumPy dtype meant by ``dtype``: a name ("bfloat16" too), a type or dtype of NumPy, PyTorch's. Local.

    Raises:
        LayoutError: ``dtype`` is none of the supported element types in native byte order.
    """
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype
    if isinstance(name, str) and name in _ALL:
        return _ALL[name]
    try:
        found = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses what it is given
        found = None
    if found is None or found not in _ALL.values():
        raise LayoutError(f"dtype {dtype!s} is not supported: expected one of {', '.join(_ALL)}")
    return found


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type in which products of ``dtype`` are summed: float32 for types of 16 and 8 bits. Local."""
    return DTYPES["float32"] if dtype.itemsize <= 2 else dtype


def is_float8(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is one of the 8-bit floats. Local."""
    return dtype in FLOAT8.values()


def is_foreign(dtype: np.dtype) -> bool:
    """Return whether file formats and CuPy lack ``dtype``: bfloat16 and the 8-bit floats. Local."""
    return dtype == DTYPES["bfloat16"] or is_float8(dtype)


def result_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type of D by default: that of the operands, bfloat16 for 8-bit ones. Local."""
    return DTYPES["bfloat16"] if is_float8(dtype) else dtype


def scalar(value: complex, dtype: np.dtype, name: str) -> complex:
    """Return ``value`` as the float, or for a complex ``dtype`` the complex, that scales a product. Local.

    Raises:
        LayoutError: ``value`` is not a number, or is complex while ``dtype`` is real.
    """
    try:
        number = complex(+value)  # a text has no sign, though complex() would read it
    except (TypeError, ValueError, OverflowError):
        raise LayoutError(f"{name}: expected a number, got {value!r}") from None
    if dtype.kind == "c":
        return number
    if number.imag != 0:
        raise LayoutError(f"{name}: {value!r} is complex, but the matrices are {dtype.name}")
    return number.real
