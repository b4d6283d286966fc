# SPDX-License-Identifier: Apache-2.0
"""cuSOLVER's eigenvalues and singular values on one GPU, as an algorithm of the GPU engine."""

from __future__ import annotations

from typing import Any

from ..local.spectral import OneRankMethod, OneRankProduct
from ..protocol import Method

__all__ = ["METHODS"]

Array = Any

_MOST = 16384  # rows and columns


class CusolverProduct(OneRankProduct):
    """Eigenvalues or singular values by cuSOLVER, through CuPy."""

    path = "cuSOLVER on one GPU"
    always_scales = True

    def _eigh(self, a: Array, subset: tuple[int, int] | None, *, vectors: bool) -> tuple[Array, Array]:
        import cupy

        found = cupy.linalg.eigh(a) if vectors else (cupy.linalg.eigvalsh(a), a)
        wanted = slice(0, None) if subset is None else slice(subset[0], subset[1] + 1)
        return cupy.asnumpy(found[0])[wanted], found[1][:, wanted]

    def _svd(self, a: Array, *, vectors: bool) -> tuple[Array, Array, Array]:
        import cupy

        found = cupy.linalg.svd(a, full_matrices=False, compute_uv=vectors)
        left, values, right = found if vectors else (a, found, a)
        return left, cupy.asnumpy(values), right


METHODS: tuple[Method, ...] = (OneRankMethod("cusolver", CusolverProduct, _MOST, ("svd",)),)
