# SPDX-License-Identifier: Apache-2.0
"""Levels 1 to 3 of the PBLAS on distributed matrices, under BLAS's names without the letter of the type.

Level 1: vectors. Level 2: matrices times vectors, updates of rank one and two. Level 3: triangular and symmetric
products, solves, updates of rank k, sums; ``pb.matmul`` is GEMM.
"""

from __future__ import annotations

from .level3 import (
    geadd,
    hemm,
    her2k,
    herk,
    herkx,
    symm,
    syr2k,
    syrk,
    syrkx,
    tradd,
    trmm,
    trsm,
)
from .vectors import (
    amax,
    asum,
    axpy,
    copy,
    dot,
    dotc,
    gemv,
    ger,
    gerc,
    hemv,
    her,
    her2,
    nrm2,
    scal,
    swap,
    symv,
    syr,
    syr2,
    trmv,
    trsv,
)

__all__ = [
    "amax",
    "asum",
    "axpy",
    "copy",
    "dot",
    "dotc",
    "geadd",
    "gemv",
    "ger",
    "gerc",
    "hemm",
    "hemv",
    "her",
    "her2",
    "her2k",
    "herk",
    "herkx",
    "nrm2",
    "scal",
    "swap",
    "symm",
    "symv",
    "syr",
    "syr2",
    "syr2k",
    "syrk",
    "syrkx",
    "tradd",
    "trmm",
    "trmv",
    "trsm",
    "trsv",
]


def __dir__() -> list[str]:
    return __all__
