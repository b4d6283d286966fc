# SPDX-License-Identifier: Apache-2.0
"""Linear algebra on distributed matrices, under the names of numpy.linalg and scipy.linalg.

Systems of equations, Cholesky, LU with partial pivoting, QR, least squares, inverses, pseudoinverses, determinants,
eigenvalues, singular values, norms, ranks and condition numbers. Matrices of a call may have any layouts; algorithms
move them to those that they take. A function is a ``FactorizationCall``: it is computed by a plan, whose algorithm is
one of the engine's registry.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, NoReturn

from numpy.linalg import LinAlgError

from . import eigen, general, least_squares, orthogonal, positive, systems
from .eigen import SvdResult, eigh, eigvalsh, svd, svdvals
from .factorization_call import FactorizationCall
from .general import cond_estimate, det, lu_factor, lu_solve, slogdet
from .least_squares import LstsqResult, lstsq
from .norms import cond, matrix_rank, norm, pinv
from .orthogonal import QrFactors, qr
from .positive import cho_factor, cho_solve, cholesky
from .refinement import Refinement
from .systems import inv, solve, solve_triangular

__all__ = [
    "LinAlgError",
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
    "matrix_rank",
    "norm",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
    "svdvals",
]

CALLS: dict[str, type[FactorizationCall[Any]]] = {
    call.name: call
    for module in (positive, general, orthogonal, least_squares, systems, eigen)
    for call in module.CALLS
}
"""The calls that can be planned, by function."""


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> NoReturn:
    """Raise AttributeError, which says of a name of NumPy or SciPy where it can be computed. Local."""
    words = f"module {__name__!r} has no attribute {name!r}"
    for there in () if name.startswith("_") else ("numpy.linalg", "scipy.linalg"):
        with contextlib.suppress(ImportError):
            if hasattr(importlib.import_module(there), name):
                words += (
                    f": of a matrix that fits into one rank's memory, take {there}.{name} of a.gather() on rank 0; "
                    "dir(pblasmp.linalg) lists what there is for distributed ones"
                )
                break
    raise AttributeError(words)
