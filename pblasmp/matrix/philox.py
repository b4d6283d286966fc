# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: element (i, j) of a matrix depends only on i, j and the seed.

Philox4x32-10 of J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11). Its
counter is (i, j), its key the seed, and its 128 bits are enough for one element of any type. NumPy's own Philox makes
long runs from one counter; here every element has its own, on CPUs and GPUs alike.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["philox4x32", "random_values"]

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Return four 32-bit numbers, in uint64 arrays, for counters of four such numbers, which broadcast. Local."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _LOW, (a >> 32) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def random_values(xp: Any, i: Any, j: Any, seed: int, dtype: np.dtype, distribution: str) -> Any:
    """Return the elements at rows ``i`` (a column, uint64) and columns ``j`` (a row) of a random matrix. Local.

    Args:
        xp: NumPy or CuPy, whose arrays ``i`` and ``j`` are.
        i, j: global indices.
        seed: 0 to 2**64 - 1.
        dtype: element type; for complex types both parts are random.
        distribution: "uniform" in [0, 1), or "normal" with mean 0 and variance 1.

    Returns:
        float64 or complex128; uniform numbers are exact in ``dtype``, which makes none of them 1.
    """
    counter = i & _LOW, j >> 32, j & _LOW, i >> 32
    words = philox4x32(counter, (seed & _LOW, seed >> 32))
    bits = (words[0] << 32) | words[1], (words[2] << 32) | words[3]
    if distribution == "normal":  # Box and Muller: two normal numbers from two uniform ones
        radius = xp.sqrt(-2 * xp.log(((bits[0] >> 11) + 1) * 2.0**-53))
        angle = (bits[1] >> 11) * (2.0**-52 * np.pi)
        real = radius * xp.cos(angle)
        return real + 1j * (radius * xp.sin(angle)) if dtype.kind == "c" else real
    digits = int(ml_dtypes.finfo(dtype).nmant) + 1  # type: ignore[no-untyped-call]
    real = (bits[0] >> (64 - digits)) * 2.0**-digits
    return real + 1j * ((bits[1] >> (64 - digits)) * 2.0**-digits) if dtype.kind == "c" else real
