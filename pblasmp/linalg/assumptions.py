# SPDX-License-Identifier: Apache-2.0
"""What a call is told of the kind of a matrix: symmetric, positive definite, triangular."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..dtypes import plain
from ..engines.product import Found
from ..errors import UnsupportedError, short_repr
from ..layout.factor_problem import ASSUMED
from ..matrix.distributed import DistributedMatrix
from .factorization_call import FactorizationCall, Matrix, flag, level_of_caller
from .general import cond_estimate

Assume = Literal[
    "gen",
    "general",
    "sym",
    "symmetric",
    "her",
    "hermitian",
    "pos",
    "positive definite",
    "upper triangular",
    "lower triangular",
]


_TRIANGLES = {"lower triangular": True, "upper triangular": False}

COMPUTED = ("gen", "pos", "tri")


class AssumingCall(FactorizationCall[Matrix]):
    """A call that is told what kind of matrix A is.

    Attributes:
        kind: that kind, one of ``ASSUMED``; None if it is none.
    """

    warns = False  # of ill-conditioned matrices
    triangular = False  # whether the function is for triangles alone, and ``lower`` says which

    def __init__(
        self, *, assume_a: object, lower: object, unit_diagonal: object = False, **arguments: Any
    ) -> None:
        name = plain(assume_a) if isinstance(assume_a, str) else ""
        self.kind = ASSUMED.get(name)
        if not self.triangular:
            lower = _TRIANGLES.get(name, lower)
        flags = {"lower": flag(lower), "unit_diagonal": flag(unit_diagonal)}
        super().__init__(assume_a=assume_a, **flags, **arguments)

    def run(self) -> Matrix:
        """Compute. Collective over the context."""
        self.make_whole()
        return super().run()

    def make_whole(self) -> None:
        """Make a matrix whole of which one triangle is known, if it has no routine. Collective over the context."""
        a, lower = self.given["a"], self.how["lower"]
        legal = isinstance(a, DistributedMatrix) and a.shape[0] == a.shape[1] and isinstance(lower, bool)
        if self.kind in ("sym", "her") and legal:
            self.given = {**self.given, "a": whole_of(self["a"], lower, hermitian=self.kind == "her")}
            self.kind, self.how = "gen", {**self.how, "assume_a": "gen"}

    def check(self) -> None:
        """Note what is wrong with A, or with what is assumed of it. Local."""
        self.check_matrix("a")
        self.check_flags("lower", "unit_diagonal")
        if self.kind is None:
            known = ", ".join(map(repr, ("gen", "pos", "sym", "her", *_TRIANGLES)))
            self.wrong(f"assume_a: expected one of {known}, got {short_repr(self.how['assume_a'])}")
        elif self.kind not in COMPUTED and not self.faults:
            raise UnsupportedError(
                f"{self.name}: there is no plan with assume_a={self.how['assume_a']!r}: plan it with 'gen' and the "
                "whole matrix"
            )

    @property
    def upper(self) -> bool:
        """Whether A is known by its upper triangle."""
        return self.kind != "gen" and super().upper

    @property
    def unit(self) -> bool:
        """Whether the diagonal is taken as ones."""
        return self.how["unit_diagonal"] is True

    @property
    def diag(self) -> str:
        """That as LAPACK calls it; "" if ``unit_diagonal`` is neither True nor False."""
        return "NU"[self.unit] if isinstance(self.how["unit_diagonal"], bool) else ""

    def end(self, found: Found) -> Matrix:
        """Return X, with a warning if A is ill-conditioned. Collective over the context."""
        if found.info and self.kind == "pos":
            self.not_positive(found.info)
        x = super().end(found)
        if self.warns and found.diagonal is not None and found.diagonal.size:
            self._warn(found.diagonal)
        return x

    def _warn(self, diagonal: NDArray[Any]) -> None:
        """Warn if A is ill-conditioned: found by an estimate if the factor's diagonal makes it likely. Collective."""
        n, eps = len(diagonal), float(np.finfo(diagonal.dtype).eps)
        with np.errstate(all="ignore"):
            sizes = abs(diagonal)
            ratio = sizes.min() / sizes.max()
        likely = min(max(math.sqrt(eps), eps * n * n), 0.1 / n)
        if not (ratio if self.kind == "gen" else ratio * ratio) < likely:
            return
        a = self["a"]
        estimate = cond_estimate(a if self.kind == "gen" else whole_of(a, self.uplo == "L", hermitian=True))
        if estimate > 1 / eps:
            from scipy.linalg import LinAlgWarning

            with self.ctx.agreement(self.name):
                text = (
                    f"{self.name}: ill-conditioned matrix (rcond={1 / estimate:.3g}): X may not be accurate"
                )
                warnings.warn(text, LinAlgWarning, stacklevel=level_of_caller())


def whole_of(a: Matrix, lower: bool, *, hermitian: bool) -> Matrix:
    """Return the matrix that a triangle describes. Collective over the context."""
    triangle = a.tril() if lower else a.triu()
    beside = a.tril(-1) if lower else a.triu(1)
    diagonal = triangle.triu() if lower else triangle.tril()
    if not hermitian:
        return triangle + beside.T
    return beside + beside.H + diagonal.real
