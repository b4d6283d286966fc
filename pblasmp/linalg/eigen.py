# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues of symmetric and Hermitian matrices."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ..engines.factor import FactorOperands, Found
from ..errors import UnsupportedError
from ..layout.factor_problem import FactorProblem
from .call import FactorisationCall, Matrix, T, flag, turned

__all__ = ["CALLS", "eigh", "eigvalsh"]


def eigh(a: Matrix, *, lower: bool = True, algo: str = "auto") -> tuple[NDArray[Any], Matrix]:
    """Return the eigenvalues and eigenvectors of a symmetric or Hermitian matrix. Collective over the context.

    A V = V diag(w). A is scaled if squares of its elements would over- or underflow. NaN or infinity in A makes all
    eigenvalues and eigenvectors NaN.

    It needs GPUs and cuSOLVERMp. On CPU ranks ScaLAPACK (p?syevd, p?heevd) and ELPA compute it, on the same
    block-cyclic arrays; CPU ranks raise UnsupportedError here.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        lower: read the lower triangle of A, not the upper.
        algo: "auto", or the name of an algorithm.

    Returns:
        The n eigenvalues in ascending order, the same real array on every rank, and V, whose columns are the
        eigenvectors, of norm 1: a new matrix in the layout of A.

    Raises:
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?SYEVD and ?HEEVD; cuSOLVERMp, cusolverMpSyevd.
    """
    return _Eigh(a=a, lower=lower, algo=algo).run()


def eigvalsh(a: Matrix, *, lower: bool = True, algo: str = "auto") -> NDArray[Any]:
    """Return the eigenvalues of a symmetric or Hermitian matrix in ascending order. Collective over the context.

    The same real array on every rank. The eigenvectors are computed, too, and dropped: it takes as long as ``eigh``.

    Args:
        a, lower, algo: as for ``eigh``.

    Raises:
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: NumPy, numpy.linalg.eigvalsh.
    """
    return _Eigvalsh(a=a, lower=lower, algo=algo).run()


class _Eigen(FactorisationCall[T]):
    """A call of ``eigh`` or ``eigvalsh``."""

    def __init__(self, *, lower: bool, **arguments: Any) -> None:
        super().__init__(lower=flag(lower), **arguments)

    def check(self) -> None:
        self.check_matrix("a")
        self.check_flags("lower")
        engine = self.ctx.engine
        if not self.faults and not any(
            row.serves(FactorProblem("eigh", self["a"].descriptor)) for row in engine.methods
        ):
            raise UnsupportedError(
                f"{self.name}: the {engine.name} engine computes no eigenvalues: on CPU ranks ScaLAPACK (p?syevd, "
                "p?heevd) and ELPA do, here only GPUs with cuSOLVERMp"
            )

    def problem(self) -> FactorProblem:
        a = turned(self["a"].descriptor, self.upper)
        return FactorProblem("eigh", a, d=self.written.descriptor, conjugate=self.upper)

    def operands(self) -> FactorOperands:
        return FactorOperands(turned(self["a"].local, self.upper), None, None, self.written.local)


class _Eigh(_Eigen[tuple[NDArray[Any], Matrix]]):
    """A call of ``eigh``."""

    name = "eigh"

    def end(self, found: Found) -> tuple[NDArray[Any], Matrix]:
        assert found.values is not None
        return found.values, self.written


class _Eigvalsh(_Eigen[NDArray[Any]]):
    """A call of ``eigvalsh``."""

    name = "eigvalsh"

    def end(self, found: Found) -> NDArray[Any]:
        assert found.values is not None
        return found.values


CALLS: dict[str, type[FactorisationCall[Any]]] = {"eigh": _Eigh, "eigvalsh": _Eigvalsh}
"""The calls that can be planned, by function."""
