# SPDX-License-Identifier: Apache-2.0
"""PBLAS, BLACS and ScaLAPACK's TOOLS under their own names, for programs that were written against them.

Indices are 1-based, descriptors are nine integers (or eleven, of type 2), local arrays are in Fortran order and are
written in place:

    from pblasmp import pblas

    ictxt = pblas.gridinit(None, "Row", 2, 2)
    nprow, npcol, myrow, mycol = pblas.gridinfo(ictxt)
    lld = max(1, pblas.numroc(m, mb, myrow, 0, nprow))
    desca = pblas.descinit(m, n, mb, nb, 0, 0, ictxt, lld)
    a = numpy.zeros((lld, pblas.numroc(n, nb, mycol, 0, npcol)), order="F")
    pblas.pdsyrk("L", "N", m, n, 1.0, a, 1, 1, desca, 0.0, c, 1, 1, descc)
    pblas.gridexit(ictxt)

Options may be in lower case and longer than one letter. An illegal argument raises ``ParameterError``, an
``ArgumentError``, on every process. Its ``info`` is the number that PBLAS reports: -i for argument i, -(100 i + j) for
an entry of descriptor i. For DTYPE_ to NB_, j is 1 to 6; for RSRC_, CSRC_ and LLD_ it is 9, 10 and 11, because PBLAS
counts the entries of its longer descriptor. In one of eleven integers, IMB_ to NB_ are 5 to 8. Redistribution and
``infog2l``, for which ScaLAPACK has no such numbers, use the same ones. Factorizations and solves have ScaLAPACK's: 7,
8 and 9 for RSRC_, CSRC_ and LLD_, and a sub-matrix that is larger than the rest of its matrix is a fault of M, N, K or
NRHS, not of IA or JA.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ArgumentError
from .arguments import ParameterError
from .auxiliary import FUNCTIONS as AUXILIARY
from .factorizations import DRIVERS
from .factorizations import ROUTINES as FACTORIZATIONS
from .grids import (
    blacs_barrier,
    blacs_exit,
    blacs_get,
    blacs_gridexit,
    blacs_gridinfo,
    blacs_gridinit,
    blacs_gridmap,
    blacs_pcoord,
    blacs_pinfo,
    blacs_pnum,
    gridexit,
    gridinfo,
    gridinit,
)
from .moves import FUNCTIONS as MOVES
from .routine_functions import ROUTINES, PblasFunction, functions_of, instead_of
from .tools import descinit, descset, iceil, ilcm, indxg2l, indxg2p, indxl2g, infog1l, infog2l, numroc
from .vector_functions import FUNCTIONS as VECTOR_FUNCTIONS

__all__ = [
    "ArgumentError",
    "ParameterError",
    "blacs_barrier",
    "blacs_exit",
    "blacs_get",
    "blacs_gridexit",
    "blacs_gridinfo",
    "blacs_gridinit",
    "blacs_gridmap",
    "blacs_pcoord",
    "blacs_pinfo",
    "blacs_pnum",
    "descinit",
    "descset",
    "gridexit",
    "gridinfo",
    "gridinit",
    "iceil",
    "ilcm",
    "indxg2l",
    "indxg2p",
    "indxl2g",
    "infog1l",
    "infog2l",
    "numroc",
]

_FUNCTIONS: dict[str, Callable[..., object]] = (
    functions_of((*FACTORIZATIONS.values(), *DRIVERS, *ROUTINES.values()))
    | VECTOR_FUNCTIONS
    | AUXILIARY
    | MOVES
)
__all__ += [*sorted(_FUNCTIONS)]  # noqa: PLE0604
globals().update(_FUNCTIONS)


def __getattr__(name: str) -> PblasFunction:
    """Say what to use instead of a name that is not here. To type checkers it returns one of the functions above."""
    known = name.lower().rstrip("_")
    text = f": it is {known} here" if known in __all__ else instead_of(known)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{text}", name=name)
