# SPDX-License-Identifier: Apache-2.0
"""Factorisations, and systems of equations: Cholesky, LU with partial pivoting, QR, and what is solved with them.

Matrices of a call may have any layouts; algorithms move them to those that they take. A function is a
``FactorisationCall``: it is computed by a plan, whose algorithm is one of the engine's registry.
"""

from __future__ import annotations

from typing import Any

from . import eigen, general, orthogonal, positive, systems
from .call import FactorisationCall
from .eigen import eigh
from .general import cond_estimate, lu, lu_solve, lu_with_info, slogdet
from .orthogonal import QrFactors, apply_q, form_q, lstsq, lstsq_in_place, qr
from .positive import cho_solve, cholesky
from .systems import inv, inverse_of, solve, solve_keeping

__all__ = [
    "CALLS",
    "QrFactors",
    "apply_q",
    "cho_solve",
    "cholesky",
    "cond_estimate",
    "eigh",
    "form_q",
    "inv",
    "inverse_of",
    "lstsq",
    "lstsq_in_place",
    "lu",
    "lu_solve",
    "lu_with_info",
    "qr",
    "slogdet",
    "solve",
    "solve_keeping",
]

CALLS: dict[str, type[FactorisationCall[Any]]] = {
    **positive.CALLS,
    **general.CALLS,
    **orthogonal.CALLS,
    **systems.CALLS,
    **eigen.CALLS,
}
"""The calls that can be planned, by function."""
