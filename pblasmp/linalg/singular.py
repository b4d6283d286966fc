# SPDX-License-Identifier: Apache-2.0
"""Singular values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ..engines.product import Found
from .call import FactorisationCall, Matrix, Roles, T, flag
from .orthogonal import form_q, qr

__all__ = ["CALLS", "SvdResult", "svd", "svd_into", "svdvals"]

Values = NDArray[Any]


class SvdResult(NamedTuple):
    """U, the singular values, and V^H. Local."""

    u: Matrix
    s: Values
    vh: Matrix


def svd(a: Matrix, full_matrices: bool = False, *, algo: str = "auto") -> SvdResult:
    """Return the singular value decomposition of a matrix. Collective over the context.

    A = U diag(s) V^H. A is scaled if squares of its elements would over- or underflow. NaN or infinity in A makes all
    results NaN.

    ScaLAPACK computes it, if one is found (see ``docs/solving.md``); up to 200 rows and columns, and on one rank, the
    LAPACK of one rank, which tells the others. On GPUs it is the cuSOLVER of one, whose memory must hold it all.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        full_matrices: whether U is m × m and V^H n × n, instead of m × k and k × n with k = min(m, n).
        algo: "auto", or the name of an algorithm.

    Returns:
        U, the k singular values in descending order, the same real array on every rank, and V^H: new matrices with the
        grid, the blocks and the memory order of A.

    Raises:
        FactorizationError: the library's iteration does not converge.
        ArgumentError: types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it, or no library is found; the message says which to install.

    Source: LAPACK, ?GESDD; ScaLAPACK, P?GESVD.
    """
    return _Svd(a=a, full_matrices=full_matrices, algo=algo).run()


def svdvals(a: Matrix, *, algo: str = "auto") -> Values:
    """Return the singular values that ``svd`` returns, without vectors. Collective over the context.

    Args:
        a, algo: as for ``svd``.

    Raises:
        FactorizationError, ArgumentError, RankMismatchError, UnsupportedError: as ``svd`` does.
    """
    return _Svdvals(a=a, algo=algo).run()


def svd_into(a: Matrix, u: Matrix | None, vh: Matrix | None) -> Values:
    """Return the singular values of A, and write U and V^H, or what of them is wanted. Collective."""
    return _Svdvals(a=a, u=u, vh=vh, algo="auto").run()


class _Singular(FactorisationCall[T]):
    """A call of ``svd``, ``svdvals`` or ``svd_into``."""

    matrices = ("a", "u", "vh")
    optional = ("u", "vh")
    _vh: Matrix | None = None

    def check(self) -> None:
        self.check_matrix("a", square=False)
        m, n = self["a"].shape
        self.check_like("u", "a", (m, min(m, n)))
        self.check_like("vh", "a", (min(m, n), n))

    def new(self) -> Matrix | None:
        self._vh = self.given["vh"]
        return self.given["u"]

    def roles(self) -> Roles:
        return Roles("svd", self["a"], c=self._vh, d=self.made)

    def values_of(self, found: Found) -> Values:
        """Return the singular values, or raise that there are none. Collective over the context."""
        if found.info:
            self.failed(
                found.info, f"has singular values that the library does not find: INFO is {found.info}"
            )
        assert found.values is not None
        return found.values


class _Svd(_Singular[SvdResult]):
    """A call of ``svd``."""

    name = "svd"

    def __init__(self, *, full_matrices: object, **arguments: Any) -> None:
        super().__init__(**arguments, full_matrices=flag(full_matrices))

    def check(self) -> None:
        super().check()
        self.check_flags("full_matrices")

    def new(self) -> Matrix:
        d, (m, n) = self["a"].descriptor, self["a"].shape
        u: Matrix = self.ctx.allocate(replace(d, shape=(m, min(m, n)), ld=None))
        self._vh = self.ctx.allocate(replace(d, shape=(min(m, n), n), ld=None))
        return u

    def end(self, found: Found) -> SvdResult:
        s, u, vh = self.values_of(found), self.written, self._vh
        assert vh is not None
        if self.how["full_matrices"]:
            u, vh = _completed(u), _completed(vh.T).T
        return SvdResult(u, s, vh)


class _Svdvals(_Singular[Values]):
    """A call of ``svdvals``, or of ``svd_into``."""

    name = "svdvals"

    def end(self, found: Found) -> Values:
        return self.values_of(found)


def _completed(x: Matrix) -> Matrix:
    """Return a square matrix of orthonormal columns, the first of which are those of ``x``. Collective."""
    rows, count = x.shape
    if rows == count:
        return x
    reflectors = qr(x)
    whole = form_q(reflectors.factors, reflectors.tau, rows)
    if count:
        whole[:, :count] = x  # Q's may have other signs
    return whole


CALLS: dict[str, type[FactorisationCall[Any]]] = {"svd": _Svd, "svdvals": _Svdvals}
"""The calls that can be planned, by function."""
