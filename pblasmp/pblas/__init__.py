# SPDX-License-Identifier: Apache-2.0
"""PBLAS, BLACS and ScaLAPACK's TOOLS under their own names, for programs that were written against them.

Indices are 1-based, descriptors are nine integers, local arrays are in Fortran order and are written in place:

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
counts the entries of its longer descriptor. Redistribution and ``infog2l``, for which ScaLAPACK has no such numbers,
use the same ones.
"""

from __future__ import annotations

from ..errors import ArgumentError
from .arguments import ParameterError
from .grids import gridexit, gridinfo, gridinit
from .moves import mover
from .routines import variant
from .tools import descinit, indxg2l, indxg2p, indxl2g, infog2l, numroc

__all__ = [
    "ArgumentError",
    "ParameterError",
    "descinit",
    "gridexit",
    "gridinfo",
    "gridinit",
    "indxg2l",
    "indxg2p",
    "indxl2g",
    "infog2l",
    "numroc",
    "pcgeadd",
    "pcgemm",
    "pcgemr2d",
    "pchemm",
    "pcher2k",
    "pcherk",
    "pcsymm",
    "pcsyr2k",
    "pcsyrk",
    "pctradd",
    "pctranc",
    "pctranu",
    "pctrmm",
    "pctrmr2d",
    "pctrsm",
    "pdgeadd",
    "pdgemm",
    "pdgemr2d",
    "pdsymm",
    "pdsyr2k",
    "pdsyrk",
    "pdtradd",
    "pdtran",
    "pdtrmm",
    "pdtrmr2d",
    "pdtrsm",
    "psgeadd",
    "psgemm",
    "psgemr2d",
    "pssymm",
    "pssyr2k",
    "pssyrk",
    "pstradd",
    "pstran",
    "pstrmm",
    "pstrmr2d",
    "pstrsm",
    "pzgeadd",
    "pzgemm",
    "pzgemr2d",
    "pzhemm",
    "pzher2k",
    "pzherk",
    "pzsymm",
    "pzsyr2k",
    "pzsyrk",
    "pztradd",
    "pztranc",
    "pztranu",
    "pztrmm",
    "pztrmr2d",
    "pztrsm",
]

psgemm, pdgemm, pcgemm, pzgemm = (variant("gemm", letter) for letter in "sdcz")
pssymm, pdsymm, pcsymm, pzsymm = (variant("symm", letter) for letter in "sdcz")
pchemm, pzhemm = (variant("hemm", letter) for letter in "cz")
pssyrk, pdsyrk, pcsyrk, pzsyrk = (variant("syrk", letter) for letter in "sdcz")
pcherk, pzherk = (variant("herk", letter) for letter in "cz")
pssyr2k, pdsyr2k, pcsyr2k, pzsyr2k = (variant("syr2k", letter) for letter in "sdcz")
pcher2k, pzher2k = (variant("her2k", letter) for letter in "cz")
pstrmm, pdtrmm, pctrmm, pztrmm = (variant("trmm", letter) for letter in "sdcz")
pstrsm, pdtrsm, pctrsm, pztrsm = (variant("trsm", letter) for letter in "sdcz")
psgeadd, pdgeadd, pcgeadd, pzgeadd = (variant("geadd", letter) for letter in "sdcz")
pstradd, pdtradd, pctradd, pztradd = (variant("tradd", letter) for letter in "sdcz")
pstran, pdtran = (variant("tran", letter) for letter in "sd")
pctranu, pztranu = (variant("tranu", letter) for letter in "cz")
pctranc, pztranc = (variant("tranc", letter) for letter in "cz")
psgemr2d, pdgemr2d, pcgemr2d, pzgemr2d = (mover("gemr2d", letter) for letter in "sdcz")
pstrmr2d, pdtrmr2d, pctrmr2d, pztrmr2d = (mover("trmr2d", letter) for letter in "sdcz")
