# SPDX-License-Identifier: Apache-2.0
"""8-bit floats as bytes, which is how CuPy has them: rounding float32 to them.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["to_bits"]

_MANTISSA, _BIAS = 23, 127  # of float32
_FORMATS = {"float8_e4m3fn": (3, 7, 0x7E), "float8_e5m2": (2, 15, 0x7B)}  # mantissa, bias, the largest number
_NAN = 0x7F


def to_bits(xp: Any, x: Any, dtype: np.dtype) -> Any:
    """Return the bytes of float32 numbers rounded to 8-bit floats: ties to even, too large ones to the largest. Local.

    Args:
        xp: numpy or cupy.
        x: an array of float32.
        dtype: the 8-bit type.
    """
    mantissa, bias, largest = _FORMATS[dtype.name]
    bits, size = x.view(np.uint32), abs(x)
    dropped = _MANTISSA - mantissa
    whole = bits & 0x7FFFFFFF
    half = (1 << (dropped - 1)) - 1  # and one more before an odd number, so that ties are even
    normal = ((whole + ((whole >> dropped) & 1) + half) >> dropped) - ((_BIAS - bias) << mantissa)
    smallest = 2.0 ** (1 - bias)  # that is normal
    steps = xp.rint(xp.where(size < smallest, size, 0) * (2.0**mantissa / smallest)).astype(np.uint32)
    found = xp.minimum(xp.where(size < smallest, steps, normal), largest)
    found = xp.where(size == size, found, _NAN)
    return (found | ((bits >> 24) & 0x80)).astype(np.uint8)
