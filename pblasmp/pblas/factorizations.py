# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's factorizations and solves under their own names: a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FactorizationError
from ..linalg import cho_solve, cholesky, lu_solve, qr, solve_triangular
from ..linalg.general import lu_with_info
from ..linalg.least_squares import lstsq_in_place
from ..linalg.orthogonal import apply_q, form_q
from ..linalg.systems import Assume, inverse_of, solve_keeping
from ..matrix.distributed import DistributedMatrix
from .scalapack_routine import FactorCall, routine


def _getrf(call: FactorCall) -> None:
    _, pivots, info = lu_with_info(call.a, out=call.a)
    _give_pivots(call, pivots)
    if info:
        raise FactorizationError.at(info - 1, "U has a zero on its diagonal")


def _gesv(call: FactorCall) -> None:
    _getrf(call)
    lu_solve((call.a, _take_pivots(call)), call.b, out=call.b)


def _trtri(call: FactorCall) -> None:
    kind: Assume = "lower triangular" if call.lower else "upper triangular"
    inverse_of(call.a, None, kind, unit_diagonal=call.unit, out=call.a)


def _geqrf(call: FactorCall) -> None:
    found = qr(call.a, out=call.a)
    mine, places = done_here(call, 1, len(found.tau))
    call["tau"].reshape(-1)[places] = found.tau[mine]


def _reflectors(call: FactorCall) -> tuple[DistributedMatrix, NDArray[Any]]:
    """Return the reflectors of sub(A), as many as count, and their factors. Collective."""
    return call.a[:, : call["k"]], _whole(call, call["tau"], 1, call["k"])


def _orgqr(call: FactorCall) -> None:
    reflectors, tau = _reflectors(call)
    form_q(reflectors, tau, call["n"], out=call.a)


def _ormqr(call: FactorCall) -> None:
    reflectors, tau = _reflectors(call)
    c, op = call.matrices["c"], "N" if call["trans"] == "N" else "C"
    apply_q(reflectors, tau, c, op, call["side"], out=c)


def done_here(call: FactorCall, axis: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which of the first ``count`` rows of sub(A) this process has, and their places among its rows of A.

    Or columns, with axis 1.
    """
    part, whole = call.a.descriptor, call.a.whole.descriptor
    process = whole.grid.coords(call.a.context.rank)[axis]
    mine = (part.rows, part.cols)[axis].globals(process)
    start = (call["a"].i, call["a"].j)[axis] - 1
    before = (whole.rows, whole.cols)[axis].local_window(process, 0, start).stop
    mine = mine[mine < count]
    return mine, before + np.arange(len(mine))


def _whole(call: FactorCall, array: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    """Return the first ``count`` elements of an array, of which each process has those of its rows of sub(A).

    Or of its columns, with axis 1. Collective.
    """
    mine, places = done_here(call, axis, count)
    known = array.reshape(-1)[places]
    whole = np.zeros(count, known.dtype)
    for indices, values in call.a.context.comm.allgather((mine, known)):
        whole[indices] = values
    return whole


def _give_pivots(call: FactorCall, pivots: NDArray[np.int64]) -> None:
    """Write the pivots of this process's rows to IPIV: rows of A, from 1."""
    mine, places = done_here(call, 0, len(pivots))
    call["ipiv"].reshape(-1)[places] = pivots[mine] + call["a"].i


def _take_pivots(call: FactorCall) -> NDArray[np.int64]:
    """Return all pivots of sub(A), from 0, of which each process has those of its rows in IPIV. Collective."""
    pivots: NDArray[np.int64] = _whole(call, call["ipiv"], 0, call["n"]).astype(np.int64) - call["a"].i
    return pivots


_MINOR = "the leading minor of order i of sub(A) is not positive"
_ZERO = "the diagonal element i, from 1, of the triangular factor is exactly zero"
_SQUARE = {"a": "n n"}
_BESIDE = {"a": "n n", "b": "n nrhs"}

_ROWS = (
    routine(
        "potrf", "uplo n A", _SQUARE, "a",
        lambda call: cholesky(call.a, call.lower, out=call.a),
        "Replace a triangle of sub(A) by its Cholesky factor", _MINOR,
    ),
    routine(
        "potrs", "uplo n nrhs A B", _BESIDE, "b", lambda call: cho_solve((call.a, call.lower), call.b, out=call.b),
        "Replace sub(B) by the solution of sub(A) X = sub(B), with sub(A) as potrf has left it",
    ),
    routine(
        "posv", "uplo n nrhs A B", _BESIDE, "ab",
        lambda call: solve_keeping(call.a, call.b, call.a, lower=call.lower, out=call.b),
        "Replace a triangle of sub(A) by its Cholesky factor, and sub(B) by the solution of sub(A) X = sub(B)",
        _MINOR,
    ),
    routine(
        "potri", "uplo n A", _SQUARE, "a", lambda call: inverse_of(call.a, None, "pos", lower=call.lower, out=call.a),
        "Replace a triangle of sub(A), as potrf has left it, by that of the inverse", _ZERO,
    ),
    routine(
        "getrf", "m n A ipiv", {"a": "m n"}, "a", _getrf, "Replace sub(A) by its LU factors with partial pivoting",
        _ZERO,
    ),
    routine(
        "getrs", "trans n nrhs A ipiv B", _BESIDE, "b",
        lambda call: lu_solve((call.a, _take_pivots(call)), call.b, call["trans"], out=call.b),
        "Replace sub(B) by the solution of op(sub(A)) X = sub(B), with sub(A) as getrf has left it",
    ),
    routine(
        "gesv", "n nrhs A ipiv B", _BESIDE, "ab", _gesv,
        "Replace sub(A) by its LU factors, and sub(B) by the solution of sub(A) X = sub(B)",
        _ZERO,
    ),
    routine(
        "getri", "n A ipiv work lwork iwork liwork", _SQUARE, "a",
        lambda call: inverse_of(call.a, _take_pivots(call), out=call.a),
        "Replace sub(A), as getrf has left it, by the inverse",
        _ZERO,
    ),
    routine(
        "trtri", "uplo diag n A", _SQUARE, "a", _trtri, "Replace the triangle of sub(A) by its inverse",
        _ZERO,
    ),
    routine(
        "trtrs", "uplo trans diag n nrhs A B", _BESIDE, "b",
        lambda call: solve_triangular(call.a, call.b, call["trans"], call.lower, call.unit, out=call.b),
        "Replace sub(B) by the solution of op(sub(A)) X = sub(B) for a triangular sub(A)",
        _ZERO,
    ),
    routine(
        "geqrf", "m n A tau work lwork", {"a": "m n"}, "a", _geqrf, "Replace sub(A) by R and the reflectors of Q",
    ),
    routine(
        "gels", "trans m n nrhs A B work lwork", {"a": "m n", "b": "longer nrhs"}, "ab",
        lambda call: lstsq_in_place(call.a, call.b, call["trans"]),
        "Replace sub(B) by the solution of op(sub(A)) X = sub(B) in the sense of least squares, or the least solution",
        f"{_ZERO}; that an element is zero up to rounding is no fault here, but is one for ``pblasmp.linalg.lstsq``",
        adjoint=True,
    ),
    *(
        routine(
            name, "m n k A tau work lwork", {"a": "m n"}, "a", _orgqr,
            "Replace k reflectors in sub(A), as geqrf has left them, by the first n columns of Q", letters=letters,
        )
        for name, letters in (("orgqr", "sd"), ("ungqr", "cz"))
    ),
    *(
        routine(
            name, "side trans m n k A tau C work lwork", {"a": "order k", "c": "m n"}, "c", _ormqr,
            "Replace sub(C) by op(Q) sub(C) or sub(C) op(Q), with the k reflectors of Q in sub(A)", letters=letters,
            adjoint=True,
        )
        for name, letters in (("ormqr", "sd"), ("unmqr", "cz"))
    ),
)  # fmt: skip


ROUTINES = {row.name: row for row in _ROWS}
"""Factorizations and solves by name, without p and the letter of the type."""
