# SPDX-License-Identifier: Apache-2.0
"""pblasmp's names as the numbers of cuBLASMp and cuBLAS."""

from __future__ import annotations

from functools import cache

import numpy as np

from ...bindings import ComputeType, DataType, DiagType, FillMode, MatmulAlgoType, Operation, SideMode
from ...dtypes import DTYPES, ELEMENT_TYPES, is_float8
from ...errors import UnsupportedError, short_repr

DATA_TYPES = {name: DataType[row.cuda] for name, row in ELEMENT_TYPES.items()}

SIDES = {"L": int(SideMode.LEFT), "R": int(SideMode.RIGHT)}
FILLS = {"L": int(FillMode.LOWER), "U": int(FillMode.UPPER)}
OPS = {op: int(Operation[op]) for op in "NTC"}
DIAGONALS = {"N": int(DiagType.NON_UNIT), "U": int(DiagType.UNIT)}
"""The options of level 3 by PBLAS's letters."""

ALGO_TYPES = {algo.name.lower(): algo for algo in MatmulAlgoType}
"""cuBLASMp's algorithms by the names that ``algo=`` takes."""

MULTICAST = frozenset(("split_multicast", "atomic_multicast", "fused"))
"""Those that need NVLink multicast."""

_COMPUTE = {
    None: {"float32": ComputeType.COMPUTE_32F, "float64": ComputeType.COMPUTE_64F},
    "tf32": {"float32": ComputeType.COMPUTE_32F_FAST_TF32},
    "bf16x9": {"float32": ComputeType.COMPUTE_32F_EMULATED_16BFX9},
    "fixedpoint": {"float64": ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT},
}


@cache
def compute_type(dtype: np.dtype, compute: str | None) -> ComputeType:
    """Return the compute type for operands of ``dtype``.

    Raises:
        UnsupportedError: there is no such way to compute this type.
    """
    if compute not in _COMPUTE:
        raise UnsupportedError(
            f"compute: expected None, 'tf32', 'bf16x9' or 'fixedpoint', got {short_repr(compute)}"
        )
    precision = "float64" if dtype.name in ("float64", "complex128") else "float32"
    row = _COMPUTE[compute]
    if precision not in row or (compute is not None and dtype.itemsize <= 2):
        raise UnsupportedError(
            f"compute: {short_repr(compute)} is for {' or '.join(row)}, the operands are {dtype.name}"
        )
    return row[precision]


@cache
def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Return ``dtype``, or bytes for 8-bit floats, which CuPy lacks. Local."""
    return np.dtype(np.uint8) if is_float8(dtype) else dtype


def carried(dtype: np.dtype, asked: np.dtype | None) -> np.dtype:
    """Return the type in which partial sums of a result of ``dtype`` travel. Local.

    It is the one that was requested, by default the result's, or bfloat16 if that has 8 bits.
    """
    return asked or (DTYPES["bfloat16"] if is_float8(dtype) else dtype)
