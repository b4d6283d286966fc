# SPDX-License-Identifier: Apache-2.0
"""Systems solved by factors of single precision, and refined: what takes the time runs at its speed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..blas import level3
from ..dtypes import element_type
from ..errors import FactorizationError
from ..matrix.products import matmul
from .general import lu_factor, lu_solve
from .positive import cho_factor, cho_solve

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..layout.level3_problem import Uplo
    from ..layout.schemes import Op
    from .factorization_call import Matrix

SINGLE = {"float64": "float32", "complex128": "complex64"}
"""The type in which a matrix is factored, by its own."""

REFINED = "float32", "tf32"
"""What the factorization is computed in."""

_MOST = 30  # steps, as LAPACK has it
_COMFORTABLE = 1e15  # numbers from its inverse on have products and quotients that float32 holds


class Refinement(NamedTuple):
    """How a refined solve went, the same on every rank. Local.

    Attributes:
        iterations: steps of refinement after the first solution.
        error: of X, the largest element of B - A X in a column, relative to that of X and the infinity norm of A; of
            float64 factors NaN, since it is not computed.
        fallback: why A was factored in its own type after all; "" if it was not.
    """

    iterations: int
    error: float
    fallback: str


def refined(
    a: Matrix, b: Matrix, *, positive: bool, lower: bool, op: Op, algo: str, coarse: bool
) -> tuple[Matrix | None, Refinement]:
    """Return X with op(A) X = B, None if refinement does not lead to it. Collective over the context.

    A and B are legal, of float64 or complex128; a positive definite A is read in one triangle. ``coarse``: products of
    the factorization may be less exact than in single precision.
    """
    if 0 in b.shape:
        return b.copy(), Refinement(0, 0.0, "")
    turned = positive and op == "T" and b.dtype.kind == "c"  # conj(A) X = B
    right = b.conj() if turned else b
    size, residual = _operator(a, right, positive, "L" if lower else "U", op)
    if not 0 < size < math.inf:
        return None, Refinement(0, math.nan, f"the infinity norm of A is {size}")
    try:
        with a.context.engine.operations.coarse() if coarse else nullcontext():
            correction = _factored(a, size, positive, lower, op, algo)
    except FactorizationError as fault:  # every rank's
        return None, Refinement(0, math.nan, f"in single precision {str(fault).partition(': ')[2]}")
    # products of complex numbers round sqrt(2) times as much
    terms = 2 * len(a) if a.dtype.kind == "c" else len(a)
    bound = math.sqrt(terms) * 2 * element_type(a.dtype).roundoff
    x, before = correction(right, right.norm("max")), math.inf
    for step in range(_MOST + 1):
        left = residual(x)
        peaks = _peaks(left)
        error = _told(peaks, _peaks(x), size, x)
        if error <= bound:
            return (x.conj() if turned else x), Refinement(step, error, "")
        if not error <= before / 2:
            break
        before = error
        x += correction(left, float(peaks.max()))
    return None, Refinement(step, math.nan, f"after {step} steps the error is {error:.1e}, not {bound:.1e}")


def _operator(
    a: Matrix, b: Matrix, positive: bool, uplo: Uplo, op: Op
) -> tuple[float, Callable[[Matrix], Matrix]]:
    """Return the infinity norm of op(A), and what returns B - op(A) X for an X. Collective."""
    if not positive:
        return a.norm("inf" if op == "N" else 1), lambda x: matmul(a, x, b, alpha=-1, beta=1, op_a=op)
    multiply = level3.hemm if a.dtype.kind == "c" else level3.symm
    size = a.norm("inf", uplo=uplo, kind="hermitian")
    return size, lambda x: multiply(a, x, b, uplo=uplo, alpha=-1, beta=1)


def _factored(
    a: Matrix, size: float, positive: bool, lower: bool, op: Op, algo: str
) -> Callable[[Matrix, float], Matrix]:
    """Factor A in single precision, and return what solves for a B, given its largest element. Collective.

    FactorizationError if A is singular, or not positive definite, in single precision.
    """
    single, scale = SINGLE[a.dtype.name], 1.0
    if not 1 / _COMFORTABLE < size < _COMFORTABLE:
        scale = _near_one(size)
    low = (a if scale == 1 else a * scale).astype(single)
    solve: Callable[..., Matrix]
    if positive:
        solve = partial(cho_solve, cho_factor(low, lower, out=low, algo=algo), algo=algo)
    else:
        solve = partial(lu_solve, lu_factor(low, out=low, algo=algo), trans=op, algo=algo)

    def correction(r: Matrix, peak: float) -> Matrix:
        by, wide = _near_one(peak), r.dtype
        y = r.map(lambda values: values * by, dtype=single)
        x: Matrix = solve(y, out=y)
        return x.map(lambda values: values.astype(wide) / by * scale)

    return correction


def _peaks(x: Matrix) -> NDArray[Any]:
    """Return the largest absolute value of each column, on every rank. Collective."""
    found: NDArray[Any] = abs(x).max(axis=0)
    return found


def _told(above: NDArray[Any], below: NDArray[Any], size: float, x: Matrix) -> float:
    """Return the largest ratio of the peaks of a residual to those of X: one rank tells. Collective."""
    ratios = np.where(above == 0, 0.0, above / size / below)
    largest = float(ratios.max()) if np.isfinite(below).all() else math.inf
    told: float = x.context.comm.bcast(math.inf if math.isnan(largest) else largest)
    return told


def _near_one(size: float) -> float:
    """Return the power of two that brings a number near one, as near as powers of float64 can."""
    return 2.0 ** max(-1000, min(1000, -math.frexp(size)[1])) if 0 < size < math.inf else 1.0
