# SPDX-License-Identifier: Apache-2.0
"""What a prepared factorisation takes, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .product import Product
from .request import Operands

__all__ = ["FactorOperands", "FactorProduct", "Found"]


@dataclass(eq=False)
class FactorOperands(Operands):
    """The arrays of one run on this rank, by the names that ``FactorProblem`` has for their layouts.

    Attributes:
        pivots: of LU factors, from 0.
        tau: of reflectors, their factors.
    """

    pivots: NDArray[np.int64] | None = None
    tau: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a run found besides the matrices it wrote, the same on every rank.

    Attributes:
        info: 0, or as LAPACK counts it the order of the first leading minor that is not positive definite, or the index
            from 1 of the first diagonal element that is exactly zero. Of "lstsq" without factors: zero up to rounding.
        pivots: of "lu": row i was exchanged with ``pivots[i]``, from 0.
        diagonal: of "lu" that of U, of "cholesky" with right-hand sides that of L; None if the library keeps it.
        tau: of "qr": the factors of the reflectors.
        values: of "eigh": the eigenvalues, ascending; of "svd": the singular values, descending.
        condition: of "condition": the estimate.
        doubtful: whether the vectors are to be checked: the library has returned wrong ones.
    """

    info: int = 0
    pivots: NDArray[np.int64] | None = None
    diagonal: NDArray[Any] | None = None
    tau: NDArray[Any] | None = None
    values: NDArray[Any] | None = None
    condition: float = 0.0
    doubtful: bool = False


class FactorProduct(Product):
    """A prepared factorisation, or what is solved with one."""

    def compute(self, operands: FactorOperands) -> Found:
        """Compute, and return what was found. Collective over the context."""
        raise NotImplementedError

    def _queue(self, operands: Operands) -> Found:
        assert isinstance(operands, FactorOperands)
        return self.compute(operands)
