# SPDX-License-Identifier: Apache-2.0
"""The element types of pblasmp: one table of names, storage, and the type in which each is summed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from .errors import ArgumentError, ArgumentTypeError, short_repr, shortened


@dataclass(frozen=True, slots=True)
class ElementType:
    """What pblasmp knows about one element type; sizes and limits are the dtype's own.

    Attributes:
        dtype: the type in NumPy. PyTorch calls it by the same name.
        accumulation: the name of the type in which its products are summed.
        blas: the letter of its BLAS routines; empty if BLAS lacks the type.
        cuda: its name in CUDA's enumeration of data types, without the prefix ``CUDA_``.
        tolerance: relative error of a product beyond which something is wrong.
        storage: the type as which it passes between libraries that lack it, through DLPack and NumPy views; empty if
            every library has it.
    """

    dtype: np.dtype
    accumulation: str
    blas: str
    cuda: str
    tolerance: float
    storage: str = ""

    @property
    def name(self) -> str:
        """The name in NumPy, ml_dtypes and PyTorch."""
        return str(self.dtype.name)

    @property
    def roundoff(self) -> float:
        """The largest relative error of rounding to the type."""
        return float(_finfo(self.dtype).eps) / 2

    @property
    def largest(self) -> float:
        """The largest finite number; larger 8-bit results are stored as this one."""
        return float(_finfo(self.dtype).max)

    @property
    def smallest(self) -> float:
        """The smallest positive number."""
        return float(_finfo(self.dtype).smallest_subnormal)


_finfo: Any = ml_dtypes.finfo

ELEMENT_TYPES: dict[str, ElementType] = {
    row.name: row
    for row in (
        ElementType(np.dtype(np.float64), "float64", "d", "R_64F", 1e-12),
        ElementType(np.dtype(np.float32), "float32", "s", "R_32F", 1e-4),
        ElementType(np.dtype(np.complex128), "complex128", "z", "C_64F", 1e-12),
        ElementType(np.dtype(np.complex64), "complex64", "c", "C_32F", 1e-4),
        ElementType(np.dtype(np.float16), "float32", "", "R_16F", 1e-2),
        ElementType(np.dtype(ml_dtypes.bfloat16), "float32", "", "R_16BF", 3e-2, "int16"),
        ElementType(np.dtype(ml_dtypes.float8_e4m3fn), "float32", "", "R_8F_E4M3", 0.125, "uint8"),
        ElementType(np.dtype(ml_dtypes.float8_e5m2), "float32", "", "R_8F_E5M2", 0.25, "uint8"),
    )
}
"""Every element type by name. A new one takes a row here, and kernels in the engines that are to compute with it."""

DTYPES: dict[str, np.dtype] = {n: row.dtype for n, row in ELEMENT_TYPES.items() if row.dtype.itemsize > 1}
"""The element types of every routine, by name."""

BLAS_TYPES: tuple[str, ...] = tuple(name for name, row in ELEMENT_TYPES.items() if row.blas)
"""The names of the element types that BLAS and LAPACK have."""

FLOAT8: dict[str, np.dtype] = {n: row.dtype for n, row in ELEMENT_TYPES.items() if row.dtype.itemsize == 1}
"""The element types of products with scales, by name."""

_BY_DTYPE = {row.dtype: row for row in ELEMENT_TYPES.values()}


def element_type(dtype: np.dtype) -> ElementType:
    """Return the row of ``ELEMENT_TYPES`` of one of pblasmp's own dtypes: what ``as_dtype`` returns. Local."""
    return _BY_DTYPE[dtype]


def as_dtype(dtype: Any) -> np.dtype:
    """Return the NumPy dtype meant by ``dtype``: a name ("bfloat16" too), a type or dtype of NumPy or PyTorch. Local.

    Raises:
        ArgumentError: ``dtype`` is not a supported element type in native byte order.
    """
    if isinstance(dtype, np.dtype) and dtype in _BY_DTYPE:
        return dtype  # nearly always
    name = str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else plain(dtype)
    if isinstance(name, str) and name in ELEMENT_TYPES:
        return ELEMENT_TYPES[name].dtype
    try:
        found = np.dtype(name)
    except (
        TypeError,
        ValueError,
        SyntaxError,
        OverflowError,
        RecursionError,
    ):  # NumPy parses what it is given
        found = None
    if found is None or found not in _BY_DTYPE:
        text = shortened(str(name)) if isinstance(dtype, (str, np.dtype)) else short_repr(dtype)
        raise ArgumentError(f"dtype {text} is not supported: expected one of {', '.join(ELEMENT_TYPES)}")
    return found


@lru_cache(64)
def named_like(name: str) -> np.dtype | None:
    """Return NumPy's type of the same name as one of PyTorch's; None if it has none. Local."""
    try:
        return np.dtype(name.removeprefix("torch."))
    except TypeError:
        return None


@lru_cache(64)
def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type in which products of ``dtype`` are summed: float32 for types of 16 and 8 bits. Local."""
    return DTYPES[element_type(dtype).accumulation]


@lru_cache(64)
def is_float8(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is one of the 8-bit floats. Local."""
    return dtype in FLOAT8.values()


def is_foreign(dtype: np.dtype) -> bool:
    """Return whether file formats and CuPy lack ``dtype``: bfloat16 and the 8-bit floats. Local."""
    return dtype in _BY_DTYPE and _BY_DTYPE[dtype].storage != ""


def result_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type of D by default: that of the operands, bfloat16 for 8-bit ones. Local."""
    return DTYPES["bfloat16"] if is_float8(dtype) else dtype


def plain(value: Any) -> Any:
    """Return a text of a class derived from str as str has it, anything else as it is. Local.

    Methods of that class are the user's: they may fail, on one rank.
    """
    return str.__str__(value) if isinstance(value, str) else value


@lru_cache(64)
def real_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type of the real parts of ``dtype``. Local."""
    return np.empty(0, dtype).real.dtype


def double_dtype(*dtypes: np.dtype) -> np.dtype:
    """Return the type of double precision that holds all of these: complex128 if one is complex. Local."""
    return DTYPES["complex128" if any(dtype.kind == "c" for dtype in dtypes) else "float64"]


def scalar(value: Any, dtype: np.dtype, name: str) -> complex:
    """Return ``value`` as the float, or for a complex ``dtype`` the complex, that scales a product. Local.

    ArgumentError if it is not a number, or is complex while ``dtype`` is real.
    """
    try:
        if isinstance(value, (str, np.bool_)):  # complex() would take it
            raise TypeError
        number = complex(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(f"{name}: expected a number, got {short_repr(value)}") from None
    if dtype.kind == "c":
        return number
    if number.imag != 0:
        raise ArgumentError(f"{name}: {short_repr(value)} is complex, but the matrices are {dtype.name}")
    return number.real
