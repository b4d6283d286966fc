# SPDX-License-Identifier: Apache-2.0
"""The level-3 routines by NumPy on whole matrices, and what each may read and write: what results are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layout.routines import ROUTINES

Array = NDArray[Any]
Flags = Mapping[str, str]

OPS: dict[str, Callable[[Array], Array]] = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
"""What each op makes of a matrix."""


def touched(routine: str, name: str, flags: Flags, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a mask of what the routine may read of "a" or "c", or writes of "d". Local."""
    has = ROUTINES[routine]
    mask = np.ones(shape, bool)
    if has.triangle == ("a" if name == "a" else "d"):
        mask = np.tril(mask) if flags["uplo"] == "L" else np.triu(mask)
        if flags.get("diag") == "U":
            np.fill_diagonal(mask, val=False)
    if routine == "tradd" and name == "a":
        lower = (flags["uplo"] == "L") != (flags["op_a"] != "N")
        mask = np.tril(mask) if lower else np.triu(mask)
    return mask


def dense(routine: str, values: Mapping[str, Array], flags: Flags, alpha: complex, beta: complex) -> Array:
    """Return the result; NaN where the routine does not write. What it may not read has no effect. Local."""
    has, a = ROUTINES[routine], values["a"]
    op = OPS[flags.get("op_a", "N")]
    if has.triangle == "a":
        a = _whole(routine, a, flags)
    a = op(a)
    if has.shape == "sided":
        b = values["b"]
        if has.solves:
            left = flags["side"] == "L"
            solved: Array = np.linalg.solve(a, alpha * b) if left else np.linalg.solve(a.T, alpha * b.T).T
            return solved
        out: Array = alpha * (a @ b if flags["side"] == "L" else b @ a)
    elif has.shape == "updated":
        adjoint = OPS["C" if has.hermitian else "T"]
        b = op(values["b"]) if "b" in values else a
        out = alpha * (a @ adjoint(b))
        if has.swept_twice:
            out = out + (np.conj(alpha) if has.hermitian else alpha) * (b @ adjoint(a))
    else:
        out = alpha * a
    if "c" in values and beta != 0:
        out = out + beta * values["c"]
    if has.hermitian and has.shape == "updated":
        out = np.where(np.eye(len(out), dtype=bool), out.real, out).astype(out.dtype)
    whole: Array = np.where(touched(routine, "d", flags, out.shape), out, np.nan)
    return whole


def _whole(routine: str, a: Array, flags: Flags) -> Array:
    """Return all of the matrix that a triangle of A stands for."""
    has = ROUTINES[routine]
    a = np.where(touched(routine, "a", flags, a.shape), a, 0)
    if flags.get("diag") == "U":
        np.fill_diagonal(a, 1)
    if not has.triangular:
        diagonal = a.diagonal().real if has.hermitian else a.diagonal().copy()
        a = a + (a.conj().T if has.hermitian else a.T)
        np.fill_diagonal(a, diagonal)
    return a
