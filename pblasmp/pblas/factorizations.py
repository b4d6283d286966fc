# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's factorizations and solves, and drivers of eigenvalues and singular values, under their own names: tables.

Unlike ScaLAPACK's own, the drivers keep A and B.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FactorizationError
from ..linalg import cho_solve, cholesky, eigh, eigvalsh, lu_solve, qr, solve_triangular
from ..linalg.eigen import eigh_into, svd_into
from ..linalg.general import lu_with_info
from ..linalg.least_squares import lstsq_in_place
from ..linalg.orthogonal import apply_q, form_q
from ..linalg.systems import Assume, inverse_of, solve_keeping
from ..matrix.distributed import DistributedMatrix
from .scalapack_routine import WANTED, FactorCall, ScalapackRoutine, routine


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


def _eigenvalues(call: FactorCall) -> None:
    a, b, z, n = call.a, call.matrices.get("b"), call.matrices.get("z"), call["n"]
    kind = call.values.get("range", "A")
    subset = (call["il"] - 1, call["iu"] - 1) if kind == "I" and n else None
    values: NDArray[Any]
    if b is not None:
        how: dict[str, Any] = {"lower": call["uplo"] == "L", "subset_by_index": subset}
        try:
            found = eigvalsh(a, b, **how) if z is None else eigh(a, b, **how)
        except FactorizationError as error:
            if not str(error).startswith("eigh: b:"):
                raise
            if call.values.get("ifail") is not None:
                call["ifail"].reshape(-1)[:1] = error.index + 1
            raise FactorizationError.at(_INDEFINITE - 1, str(error)) from None
        if z is None:
            values = found
        else:
            values, vectors = found
            z[:, : len(values)] = vectors
    else:
        out = z if z is None or subset is None else z[:, : subset[1] - subset[0] + 1]
        values = eigh_into(a, out, call["uplo"] == "L", subset)
    if kind == "V" and not np.isnan(values).any():
        first, last = np.searchsorted(values, (call["vl"], call["vu"]), side="right").tolist()
        values = values[first:last]
        if z is not None and first < last:
            z[:, : last - first] = z[:, first:last].copy()
    call["w"].reshape(-1)[: len(values)] = values
    for name in ("m", "nz"):
        if call.values.get(name) is not None:
            call[name][...] = len(values) if name == "m" or z is not None else 0
    if call.values.get("ifail") is not None:
        call["ifail"][...] = 0


def _singular_values(call: FactorCall) -> None:
    values = svd_into(call.a, call.matrices.get("u"), call.matrices.get("vt"))
    call["s"].reshape(-1)[: len(values)] = values


_INDEFINITE = 16  # INFO of p?sygvx

_VECTORS_OF = {"a": "n n", "z": "n n"}

_SPACES = "work lwork {}iwork liwork"

_RANGE = "vl vu il iu"

_FAILED = "i is what ScaLAPACK, or LAPACK, reports: its iteration does not converge"

_FAILED_PAIR = f"{_INDEFINITE}: sub(B) is not positive definite; others: {_FAILED}"

_TEXTS = {
    "ev": "Return the eigenvalues of sub(A) in W, and with JOBZ = V the eigenvectors in sub(Z)",
    "evr": "Return eigenvalues of sub(A), all or some, in W, and with JOBZ = V their eigenvectors in sub(Z)",
    "gvx": "Return eigenvalues of sub(A) x = lambda sub(B) x in W, and with JOBZ = V their eigenvectors in sub(Z)",
    "svd": "Return the singular values of sub(A) in S, U in sub(U) and V^H in sub(VT)",
}


def _spectral_rows() -> list[ScalapackRoutine]:
    """Return the routines: real and complex ones differ in their names or in their workspaces."""
    rows: list[ScalapackRoutine] = []

    def add(name: str, arguments: str, shapes: dict[str, str], text: str, letters: str) -> None:
        written = tuple(each for each in shapes if each in WANTED)
        compute = _eigenvalues if "w" in arguments.split() else _singular_values
        fault = _FAILED_PAIR if "b" in shapes else _FAILED
        rows.append(routine(name, arguments, shapes, written, compute, _TEXTS[text], fault, letters))

    for family, letters, more in (("sy", "sd", ""), ("he", "cz", "rwork lrwork ")):
        spaces = _SPACES.format(more)
        add(f"{family}ev", f"jobz uplo n A w Z work lwork {more}", _VECTORS_OF, "ev", letters)
        add(f"{family}evd", f"jobz uplo n A w Z {spaces}", _VECTORS_OF, "ev", letters)
        add(f"{family}evr", f"jobz range uplo n A {_RANGE} m nz w Z {spaces}", _VECTORS_OF, "evr", letters)
        last = f"{spaces} ifail iclustr gap"
        add(
            f"{family}evx",
            f"jobz range uplo n A {_RANGE} abstol m nz w orfac Z {last}",
            _VECTORS_OF,
            "evr",
            letters,
        )
        pairs = {"a": "n n", "b": "n n", "z": "n n"}
        arguments = f"ibtype jobz range uplo n A B {_RANGE} abstol m nz w orfac Z {last}"
        add(f"{family}gvx", arguments, pairs, "gvx", letters)
        shapes = {"a": "m n", "u": "m least", "vt": "least n"}
        add("gesvd", f"jobu jobvt m n A s U VT work lwork {more.partition(' ')[0]}", shapes, "svd", letters)
    return rows


DRIVERS = _spectral_rows()
"""The drivers of eigenvalues and singular values: real and complex ones of one name are not the same."""
