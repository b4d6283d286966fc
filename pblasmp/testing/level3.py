# SPDX-License-Identifier: Apache-2.0
"""The level-3 routines by NumPy on whole matrices, and what each may read and write: what results are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..layout.routines import ROUTINES

__all__ = ["OPS", "dense", "legal_flags", "shapes", "touched"]

Array = NDArray[Any]
Flags = Mapping[str, str]

OPS: dict[str, Callable[[Array], Array]] = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
"""What each op makes of a matrix."""


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
