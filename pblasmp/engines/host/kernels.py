# SPDX-License-Identifier: Apache-2.0
"""Local products of slabs: of all of them, with a triangular left slab, or for one triangle of the result.

Each is ``target = alpha left right + beta target`` where it applies. What may not be read has no effect, even if it is
NaN; what may not be written keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...layout import Trapezoid
from .blas import LocalBlas, scale

__all__ = ["Kernel", "LeftPart", "ResultPart", "update", "whole"]

Array = NDArray[Any]
Indices = NDArray[np.int64]
Kernel = Callable[[LocalBlas, complex, Array, Array, complex, Array, int], None]
"""``kernel(blas, alpha, left, right, beta, target, start)``: k begins at global index ``start``."""


def whole(
    blas: LocalBlas,
    alpha: complex,
    left: Array,
    right: Array,
    beta: complex,
    target: Array,
    start: int,  # noqa: ARG001
) -> None:
    """Multiply everything."""
    blas.gemm(alpha, left, right, beta, target)


@dataclass(frozen=True)
class LeftPart:
    """The left slab counts only inside ``part`` of its matrix.

    Attributes:
        part: in terms of the slab's rows and of k.
        rows: global index of each row of the slab, ascending.
        diagonal: what stands on the main diagonal: what is there, ones, or the real parts.
    """

    part: Trapezoid
    rows: Indices
    diagonal: Literal["there", "ones", "real"] = "there"

    def __call__(
        self,
        blas: LocalBlas,
        alpha: complex,
        left: Array,
        right: Array,
        beta: complex,
        target: Array,
        start: int,
    ) -> None:
        """Multiply what counts for all of some rows, and the tips where the diagonal is."""
        ks = np.arange(start, start + left.shape[1])
        for along, across, mask in self.part.T.parts(ks, self.rows):
            if beta != 1 and across.stop - across.start < len(self.rows):
                scale(target, beta)  # the parts that follow have some of the rows each
                beta = 1
            factors = left[across, along]
            if mask is not None:
                factors = self._tip(factors, mask.T, self.rows[across, None] == ks[along])
            blas.gemm(alpha, factors, right[along], beta, target[across])
            beta = 1
        if beta != 1:
            scale(target, beta)

    def _tip(self, factors: Array, mask: NDArray[np.bool_], on_diagonal: NDArray[np.bool_]) -> Array:
        tip = np.where(mask, factors, factors.dtype.type(0))
        if self.diagonal == "ones":
            tip[on_diagonal] = 1
        elif self.diagonal == "real":
            tip[on_diagonal] = tip[on_diagonal].real
        return tip


@dataclass(frozen=True)
class ResultPart:
    """Only ``part`` of the result is computed.

    Attributes:
        part: what is computed.
        rows, cols: global index of each row and column of the local result, ascending.
        hermitian: the main diagonal is real.
    """

    part: Trapezoid
    rows: Indices
    cols: Indices
    hermitian: bool

    def __call__(
        self,
        blas: LocalBlas,
        alpha: complex,
        left: Array,
        right: Array,
        beta: complex,
        target: Array,
        start: int,  # noqa: ARG002
    ) -> None:
        """Multiply: what lies in the part, and aside what the diagonal crosses."""
        for down, across, mask in self.part.parts(self.rows, self.cols):
            view = target[down, across]
            if mask is None:
                blas.gemm(alpha, left[down], right[:, across], beta, view)
                continue
            product = np.empty(view.shape, view.dtype, order="F")
            blas.gemm(alpha, left[down], right[:, across], 0, product)
            diagonal = (self.rows[down][:, None] == self.cols[across]) if self.hermitian else None
            update(view, product, beta, mask, diagonal)


def update(
    view: Array,
    product: Array,
    beta: complex,
    mask: NDArray[np.bool_] | None,
    real: NDArray[np.bool_] | None = None,
) -> None:
    """Write ``product + beta view`` into ``view`` where ``mask`` says so; ``product`` is used up.

    Args:
        view: read only where ``beta`` is not 0.
        product: what is added.
        beta: scales what is there.
        mask: None for all of it.
        real: elements whose imaginary parts are not read, and written as 0.
    """
    if beta != 0:
        there = view if mask is None else np.where(mask, view, view.dtype.type(0))
        if real is not None:
            there[real] = there[real].real
        product += there if beta == 1 else view.dtype.type(beta) * there
    if real is not None:
        product[real] = product[real].real
    np.copyto(view, product, where=True if mask is None else mask)
