# SPDX-License-Identifier: Apache-2.0
"""The level-3 routines by dense NumPy, and what each may read and write."""

from __future__ import annotations

import itertools

import numpy as np

from pblasmp.layout.level3 import ROUTINES

OPS = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}


def legal_flags(routine, dtype):
    """Every legal choice of a routine's options, as keyword arguments."""
    has = ROUTINES[routine]
    choices = {"side": "LR", "uplo": "LU", "op_a": "NTC", "diag": "NU"}
    if has.shape == "updated" and np.dtype(dtype).kind == "c":
        choices["op_a"] = "NC" if routine.startswith("he") else "NT"
    values = itertools.product(*(choices[name] for name in has.options))
    return [dict(zip(has.options, each, strict=True)) for each in values]


def shapes(routine, flags, m, n, k):
    """The shapes of "a", "b", "c" and "d"; for an update D is n × n, else m × n."""
    has = ROUTINES[routine]
    turned = flags.get("op_a", "N") != "N"
    if has.shape == "sided":
        order = m if flags["side"] == "L" else n
        return {"a": (order, order), "b": (m, n), "c": (m, n), "d": (m, n)}
    if has.shape == "updated":
        a = (k, n) if turned else (n, k)
        return {"a": a, "b": a, "c": (n, n), "d": (n, n)}
    return {"a": (n, m) if turned else (m, n), "c": (m, n), "d": (m, n)}


def reads(routine, name, flags, shape):
    """A mask of what the routine may read of "a" or "c", or writes of "d"."""
    has = ROUTINES[routine]
    mask = np.ones(shape, bool)
    if has.triangle == ("a" if name == "a" else "d"):
        mask = np.tril(mask) if flags["uplo"] == "L" else np.triu(mask)
        if flags.get("diag") == "U":
            np.fill_diagonal(mask, False)
    if routine == "tradd" and name == "a":
        lower = (flags["uplo"] == "L") != (flags["op_a"] != "N")
        mask = np.tril(mask) if lower else np.triu(mask)
    return mask


def dense(routine, values, flags, alpha, beta):
    """The result; NaN where the routine does not write. What it may not read has no effect."""
    has, a = ROUTINES[routine], values["a"]
    op = OPS[flags.get("op_a", "N")]
    hermitian = routine.startswith("he")
    if has.triangle == "a":
        a = np.where(reads(routine, "a", flags, a.shape), a, 0)
        if flags.get("diag") == "U":
            np.fill_diagonal(a, 1)
        if routine in ("symm", "hemm"):
            other = a.conj().T if hermitian else a.T
            diagonal = a.diagonal().real if hermitian else a.diagonal()
            a = a + other
            np.fill_diagonal(a, diagonal)
    a = op(a)
    if has.shape == "sided":
        b = values["b"]
        if routine == "trsm":
            if flags["side"] == "L":
                return np.linalg.solve(a, alpha * b)
            return np.linalg.solve(a.T, alpha * b.T).T
        out = alpha * (a @ b if flags["side"] == "L" else b @ a)
    elif has.shape == "updated":
        adjoint = OPS["C" if hermitian else "T"]
        b = op(values["b"]) if "b" in values else a
        out = alpha * (a @ adjoint(b))
        if "2" in routine:
            out = out + (np.conj(alpha) if hermitian else alpha) * (b @ adjoint(a))
    else:
        out = alpha * a
    if "c" in values and beta != 0:
        c = values["c"]
        if hermitian and has.shape == "updated":
            c = np.where(np.eye(len(c), dtype=bool), c.real, c)
        out = out + beta * c
    if hermitian and has.shape == "updated":
        out = np.where(np.eye(len(out), dtype=bool), out.real, out).astype(out.dtype)
    return np.where(reads(routine, "d", flags, out.shape), out, np.nan)
