# SPDX-License-Identifier: Apache-2.0
"""8-bit floats as bytes, since CuPy lacks them: their values, and rounding float32 to them.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....dtypes import is_float8

__all__ = ["convert", "to_bits", "why_no_float8"]

_SINCE = 89  # compute capability

_MANTISSA, _BIAS = 23, 127  # of float32
# mantissa, bias, the largest number, what NumPy makes of larger ones
_FORMATS = {"float8_e4m3fn": (3, 7, 0x7E, 0x7F), "float8_e5m2": (2, 15, 0x7B, 0x7C)}
_NAN = 0x7F


def why_no_float8(capability: int) -> str:
    """Return why GPUs of a compute capability, 90 for 9.0, do not multiply in 8 bits; "" if they do. Local."""
    if capability >= _SINCE:
        return ""
    found = f"{capability // 10}.{capability % 10}"
    return f"8-bit floats need GPUs of compute capability 8.9 or above, found {found}"


def convert(xp: Any, x: Any, of: np.dtype, to: np.dtype) -> Any:
    """Return an array of another type, as NumPy's ``astype`` with ml_dtypes rounds. Local.

    Args:
        xp: numpy or cupy.
        x: an array of type ``of``; of bytes if that is an 8-bit float.
        of, to: element types, of which at least one is an 8-bit float. The result is bytes if ``to`` is one, else
            float32.
    """
    if is_float8(of):
        values = np.arange(256, dtype=np.uint8).view(of).astype(np.float32)
        x = xp.take(xp.asarray(values), x)
    elif x.dtype.kind == "c":
        x = x.real
    return to_bits(xp, x.astype(np.float32), to, saturates=False) if is_float8(to) else x


def to_bits(xp: Any, x: Any, dtype: np.dtype, *, saturates: bool = True) -> Any:
    """Return the bytes of float32 numbers rounded to 8-bit floats, ties to even. Local.

    Args:
        xp: numpy or cupy.
        x: an array of float32.
        dtype: the 8-bit type.
        saturates: numbers that are too large become the largest one; otherwise infinity, or NaN if the type has none.
    """
    mantissa, bias, largest, beyond = _FORMATS[dtype.name]
    bits, size = x.view(np.uint32), abs(x)
    dropped = _MANTISSA - mantissa
    whole = bits & 0x7FFFFFFF
    half = (1 << (dropped - 1)) - 1  # one more is added for odd numbers, so that ties go to even
    normal = ((whole + ((whole >> dropped) & 1) + half) >> dropped) - ((_BIAS - bias) << mantissa)
    smallest = 2.0 ** (1 - bias)  # smallest normal number
    steps = xp.rint(xp.where(size < smallest, size, 0) * (2.0**mantissa / smallest)).astype(np.uint32)
    found = xp.where(size < smallest, steps, normal)
    found = xp.where(found > largest, largest if saturates else beyond, found)
    found = xp.where(size == size, found, _NAN)
    return (found | ((bits >> 24) & 0x80)).astype(np.uint8)
