# SPDX-License-Identifier: Apache-2.0
"""QR factorizations, and products with Q."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from numpy.typing import NDArray

from ..engines.product import Found
from .factorization_call import FactorizationCall, Matrix, Roles, digest, words


class QrFactors:
    """A QR factorization A = Q R, with Q as Householder reflectors. Made by ``pb.linalg.qr``. Local.

    ``q, r = pb.linalg.qr(a)`` forms both, as ``q()`` and ``r()`` do, and ``pb.linalg.qr(a)[1]`` R alone, as of NumPy's.

    Attributes:
        factors: m × n: R in the upper triangle or trapezoid, and below it the vectors of the reflectors.
        tau: the factors of the min(m, n) reflectors, the same array on every rank.
    """

    def __init__(self, factors: Matrix, tau: NDArray[Any]) -> None:
        self.factors, self.tau = factors, tau

    def __iter__(self) -> Iterator[Matrix]:
        yield self.q()
        yield self.r()

    def __getitem__(self, index: int) -> Matrix:
        return (self.q, self.r)[index]()

    def __repr__(self) -> str:
        return f"QrFactors({self.factors.descriptor}; {len(self.tau)} reflectors)"

    def r(self) -> Matrix:
        """Return R, min(m, n) × n, as a new matrix. Collective over the context."""
        least = min(self.factors.shape)
        top = self.factors[:least, :]
        return top.redistribute(replace(top.descriptor, ld=None), uplo="U")

    def q(self, *, algo: str = "auto") -> Matrix:
        """Return the first min(m, n) columns of Q as a new matrix. Collective over the context.

        Args:
            algo: "auto", or the name of an algorithm.

        Source: LAPACK, ?ORGQR and ?UNGQR.
        """
        least = min(self.factors.shape)
        return form_q(self.factors[:, :least], self.tau, algo=algo)

    def apply(
        self, b: Matrix, op: Literal["N", "C"] = "N", out: Matrix | None = None, *, algo: str = "auto"
    ) -> Matrix:
        """Return Q B, or Q^H B with ``op="C"``; Q is m × m. Collective over the context.

        Args:
            b: m rows, in any layout.
            op: "N" or "C".
            out: where to write the product, which may be ``b``; by default a new matrix in the layout of B.
            algo: "auto", or the name of an algorithm.

        Raises:
            ArgumentError: shapes, types or options do not fit; the message names every fault.
            RankMismatchError: the ranks gave different arguments.

        Source: LAPACK, ?ORMQR and ?UNMQR.
        """
        least = min(self.factors.shape)
        return apply_q(self.factors[:, :least], self.tau, b, op, out=out, algo=algo)


def qr(a: Matrix, *, out: Matrix | None = None, algo: str = "auto") -> QrFactors:
    """Return the QR factorization of a matrix, by Householder reflectors. Collective over the context.

    ``q, r = qr(a)`` forms the first min(m, n) columns of Q, as NumPy does; the object itself multiplies by all of Q
    without forming it.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout.
        out: where to write R and the reflectors; it may be ``a``. By default a new matrix in the layout of A.
        algo: "auto", or the name of an algorithm.

    Raises:
        ArgumentError: shapes or types do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GEQRF.

    Example:
        >>> a = ctx.scatter(np.array([[3.0, 0], [4, 5]]), block=1)
        >>> q, r = pb.linalg.qr(a)
        >>> abs(r.allgather()).round(6).tolist()
        [[5.0, 4.0], [0.0, 3.0]]

    See Also:
        lstsq, lu_factor.
    """
    return _Qr(a=a, out=out, algo=algo).run()


class _Qr(FactorizationCall[QrFactors]):
    """A call of ``qr``."""

    name = "qr"

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        return self.at_once("geqrf", self.given["a"])

    def check(self) -> None:
        self.check_matrix("a", square=False)
        self.check_like("out", "a")

    def roles(self) -> Roles:
        return Roles("qr", self["a"], c=self.written)

    def end(self, found: Found) -> QrFactors:
        assert found.tau is not None
        return QrFactors(self.written, found.tau)


def form_q(
    a: Matrix,
    tau: NDArray[Any],
    cols: int | None = None,
    out: Matrix | None = None,
    *,
    algo: str = "auto",
) -> Matrix:
    """Return the first columns of the Q of A's reflectors, as many as A has, or ``cols``. Collective."""
    return _FormQ(a=a, tau=tau, cols=cols, out=out, algo=algo).run()


class _OfReflectors(FactorizationCall[Matrix]):
    """A call that is given the factors of reflectors."""

    def __init__(self, *, tau: NDArray[Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._tau, self.values = tau, {"tau": digest(tau)}


class _FormQ(_OfReflectors):
    """A call of ``form_q``."""

    name = "form_q"

    @property
    def _shape(self) -> tuple[int, int]:
        rows, count = self["a"].shape
        cols = self.how["cols"]
        return rows, count if cols is None else cols

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        return self.at_once("orgqr", self.given["a"], tau=self._tau) if self.how["cols"] is None else None

    def check(self) -> None:
        self.check_matrix("a", square=False)
        self.check_like("out", "a", self._shape)

    def new(self) -> Matrix:
        return self.out_or_new(replace(self["a"].descriptor, shape=self._shape, ld=None))

    def roles(self) -> Roles:
        return Roles("qr", self["a"], d=self.written, options={"factored": True, "inverse": True})


def apply_q(
    a: Matrix,
    tau: NDArray[Any],
    b: Matrix,
    op: str = "N",
    side: str = "L",
    out: Matrix | None = None,
    *,
    algo: str = "auto",
) -> Matrix:
    """Return op(Q) B, or B op(Q) with ``side="R"``, for the Q of A's reflectors. Collective over the context."""
    return _ApplyQ(a=a, tau=tau, b=b, op=op, side=side, out=out, algo=algo).run()


class _ApplyQ(_OfReflectors):
    """A call of ``apply_q``."""

    name = "apply"
    matrices = ("a", "b", "out")
    like = "b"

    @property
    def _right(self) -> bool:
        return bool(self.how["side"] == "R")

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        a, b, _ = self.given.values()
        op = self.how["op"]
        # The core also takes "T", which ``check`` refuses.
        if b is None or self._right or not (isinstance(op, str) and op in ("N", "C")):
            return None
        return self.at_once("ormqr", a, b, tau=self._tau, op_a=op)

    def check(self) -> None:
        a, b, right = self["a"], self["b"], self._right
        self.check_matrix("a", square=False)
        self.check_letter("op", "NC")
        if b.dtype != a.dtype or b.shape[int(right)] != a.shape[0]:
            axis = "columns" if right else "rows"
            self.fault(f"b: expected {a.shape[0]} {axis} of {a.dtype.name}, got {words(b.shape, b.dtype)}")
        self.check_like("out", "b")

    def roles(self) -> Roles:
        right = self._right
        op = "C" if (self.how["op"] == "C") != right else "N"
        options = {"op": op, "factored": True, "conjugate": right}
        return Roles("qr", self["a"], self["b"], d=self.written, turned="bd" * right, options=options)


CALLS = (_Qr,)
"""The calls that can be planned."""
