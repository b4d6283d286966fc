# SPDX-License-Identifier: Apache-2.0
"""Linear algebra on distributed matrices, under the names of numpy.linalg and scipy.linalg.

Systems of equations, Cholesky, LU with partial pivoting, QR, least squares, inverses, determinants, eigenvalues,
singular values, norms and condition numbers. Matrices of a call may have any layouts; algorithms move them to those
that they take. A function is a ``FactorizationCall``: it is computed by a plan, whose algorithm is one of the engine's
registry.
"""

from __future__ import annotations

from typing import Any

from . import eigen, general, inverses, least_squares, orthogonal, positive, systems
from .eigen import SvdResult, eigh, eigvalsh, svd, svdvals
from .factorization_call import FactorizationCall
from .general import cond_estimate, det, lu_factor, lu_solve, slogdet
from .inverses import inv
from .least_squares import LstsqResult, lstsq
from .norms import cond, norm
from .orthogonal import QrFactors, qr
from .positive import cho_factor, cho_solve, cholesky
from .refinement import Refinement
from .systems import solve, solve_triangular

__all__ = [
    "LstsqResult",
    "QrFactors",
    "Refinement",
    "SvdResult",
    "cho_factor",
    "cho_solve",
    "cholesky",
    "cond",
    "cond_estimate",
    "det",
    "eigh",
    "eigvalsh",
    "inv",
    "lstsq",
    "lu_factor",
    "lu_solve",
    "norm",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
    "svdvals",
]

CALLS: dict[str, type[FactorizationCall[Any]]] = {
    **positive.CALLS,
    **general.CALLS,
    **orthogonal.CALLS,
    **least_squares.CALLS,
    **systems.CALLS,
    **inverses.CALLS,
    **eigen.CALLS,
}
"""The calls that can be planned, by function."""


def __dir__() -> list[str]:
    return __all__
