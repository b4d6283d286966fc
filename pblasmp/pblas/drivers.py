# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's drivers of eigenvalues and singular values under their own names. They keep A and B, unlike its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FactorizationError
from ..linalg import eigh, eigvalsh
from ..linalg.eigen import eigh_into, svd_into
from .scalapack_routine import WANTED, FactorCall, ScalapackRoutine, routine


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
