# SPDX-License-Identifier: Apache-2.0
"""The level-3 routines by NumPy on whole matrices, what each may read and write, and every choice of their options."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from numpy.typing import DTypeLike

from pblasmp.layout.routines import ROUTINES

Flags = Mapping[str, str]


def legal_flags(routine: str, dtype: DTypeLike) -> list[dict[str, str]]:
    """Return every legal choice of a routine's options, as keyword arguments. Local."""
    has = ROUTINES[routine]
    choices = {"side": "LR", "uplo": "LU", "op_a": "NTC", "diag": "NU"}
    if has.shape == "updated" and np.dtype(dtype).kind == "c":
        choices["op_a"] = "NC" if has.hermitian else "NT"
    values = itertools.product(*(choices[name] for name in has.options))
    return [dict(zip(has.options, each, strict=True)) for each in values]


def shapes(routine: str, flags: Flags, m: int, n: int, k: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of "a", "b", "c" and "d"; for an update D is n × n, else m × n. Local."""
    has = ROUTINES[routine]
    turned = flags.get("op_a", "N") != "N"
    if has.shape == "sided":
        order = m if flags["side"] == "L" else n
        return {"a": (order, order), "b": (m, n), "c": (m, n), "d": (m, n)}
    if has.shape == "updated":
        a = (k, n) if turned else (n, k)
        return {"a": a, "b": a, "c": (n, n), "d": (n, n)}
    return {"a": (n, m) if turned else (m, n), "c": (m, n), "d": (m, n)}
