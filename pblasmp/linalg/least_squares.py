# SPDX-License-Identifier: Apache-2.0
"""Least squares: by QR for matrices of full rank, by QR and singular values for others."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

import numpy as np
from numpy.typing import NDArray

from ..comm import agree_after
from ..dtypes import element_type, real_dtype
from ..engines.local.extremes import scaling
from ..engines.product import Found
from ..errors import UnsupportedError, short_repr
from ..layout.grid import one_of
from ..matrix.columns import by_column, is_vector
from ..matrix.products import matmul
from .eigen import svd
from .factorization_call import FactorizationCall, Matrix, Right, Roles, op_of, words
from .orthogonal import qr

if TYPE_CHECKING:
    from .factorization_call import Trans

FullRank = Literal["full rank"]


class LstsqResult(NamedTuple):
    """What ``numpy.linalg.lstsq`` returns; all but X the same on every rank. Local.

    Attributes:
        x: the solution, the one of the least norm if there are several; a vector if B is one.
        residuals: of each column the square of the norm of op(A) X - B; empty unless op(A) is of full rank and has more
            rows than columns.
        rank: of A.
        s: the singular values of A, in descending order.
    """

    x: Any
    residuals: NDArray[Any]
    rank: int
    s: NDArray[Any]


@overload
def lstsq(
    a: Matrix,
    b: Right,
    rcond: FullRank = "full rank",
    *,
    trans: Trans = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Right: ...
@overload
def lstsq(
    a: Matrix,
    b: Right,
    rcond: float | None,
    *,
    trans: Trans = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> LstsqResult: ...
def lstsq(
    a: Matrix,
    b: Right,
    rcond: float | FullRank | None = "full rank",
    *,
    trans: Trans = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Right | LstsqResult:
    """Return the X that minimizes the norms of the columns of op(A) X - B. Collective over the context.

    If there are several, as where op(A) has more columns than rows, X is the solution of the least norm.

    ``lstsq(a, b)`` takes A to be of full rank and returns X alone, by QR. The rank is checked up to rounding: the
    smallest singular value of A, or of A^H if A is wide, with columns scaled to norm 1 is estimated from R and is
    larger than 20 eps; eps is ``numpy.finfo``'s. So columns may have units of their own.

    ``lstsq(a, b, rcond)`` takes any A, and returns what NumPy does. It computes the singular values and vectors of R,
    a square matrix as large as the shorter side of A, by ``svd``: on several CPU ranks that takes a ScaLAPACK above 200
    rows and columns. With NaN or infinity in A, X is NaN and the rank 0.

    If the largest element of A or B is near the ends of the type's range, they are scaled, as in LAPACK.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        b: as many rows as op(A), in any layout; or a vector, as for ``solve``.
        rcond: singular values that are at most ``rcond`` times the largest are taken as zero. None: eps max(m, n), as
            in NumPy, which computes float32 in float64 and takes that eps; a negative number: eps. "full rank": there
            are none.
        trans: 0 or "N" for A, 1 or "T" for its transpose, 2 or "C" for its conjugate transpose.
        out: where to write X, with as many rows as op(A) has columns; by default a new matrix in B's blocks.
        algo: "auto", or the name of an algorithm; with ``rcond`` one of ``svd``.

    Returns:
        X; with ``rcond`` X, the residuals, the rank and the singular values.

    Raises:
        FactorizationError: A is taken to have full rank and has not: its column ``index`` (row if A is wide) is a
            combination of others.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it, or no library is found; the message says which to install.

    Source: LAPACK, ?GELS, ?GELSD; NumPy, numpy.linalg.lstsq.

    Example:
        >>> a = ctx.scatter(np.array([[1.0, 0], [0, 1], [0, 0]]), block=1)
        >>> b = ctx.scatter(np.array([[1.0], [2], [3]]), block=1)
        >>> x = pb.linalg.lstsq(a, b)
        >>> x.allgather().round(6).tolist()
        [[1.0], [2.0]]

    See Also:
        solve, qr.
    """
    if is_vector(b):
        return cast("Right", by_column(lstsq, a, locals()))
    given: dict[str, Any] = {"a": a, "b": b, "trans": trans, "out": out, "algo": algo}
    if one_of(rcond, ("full rank",)):
        return cast("Right", _LeastSquares(**given).run())
    return _RankedLeastSquares(**given, rcond=rcond).ranked()


def lstsq_in_place(a: Matrix, b: Matrix, trans: Trans = 0) -> None:
    """Do as ``lstsq`` with B of max(m, n) rows, which gets X, and A, which gets factors, as in LAPACK. Collective."""
    _LeastSquaresInPlace(a=a, b=b, trans=trans, algo="auto").run()


class _LeastSquares(FactorizationCall[Matrix]):
    """A call of ``lstsq``."""

    name = "lstsq"
    matrices = ("a", "b", "out")
    in_place = False

    def __init__(self, *, trans: Trans, rcond: object = "full rank", **arguments: Any) -> None:
        super().__init__(trans=op_of(trans), **arguments, **{"in place": self.in_place})
        self.rcond = rcond

    @property
    def _wide(self) -> bool:
        rows, cols = self["a"].shape
        return rows < cols

    @property
    def _shape(self) -> tuple[int, int]:
        """The shape of op(A)."""
        rows, cols = self["a"].shape
        return (rows, cols) if one_of(self.how["trans"], "N") else (cols, rows)

    def check(self) -> None:
        a, b = self["a"], self["b"]
        self.check_matrix("a", square=False)
        self.check_trans()
        rows, cols = self._shape
        if b.dtype != a.dtype or b.shape[0] != rows:
            self.fault(f"b: expected {rows} rows of {a.dtype.name}, got {words(b.shape, b.dtype)}")
        self.check_like("out", "b", (cols, b.shape[1]))
        self.check_rcond()

    def check_rcond(self) -> None:
        """Raise UnsupportedError if there is one: this call finds no rank. Local."""
        if not one_of(self.rcond, ("full rank",)):
            raise UnsupportedError("lstsq: with rcond it is several calls: it has no plan of its own")

    def new(self) -> Matrix:
        b = self["b"]
        return self.out_or_new(replace(b.descriptor, shape=(self._shape[1], b.shape[1]), ld=None))

    @property
    def _right(self) -> Matrix:
        return self["b"]

    def end(self, found: Found) -> Matrix:
        if found.info:
            what = "row" if self._wide else "column"
            self.failed(
                found.info,
                f"has no full rank: up to rounding, the {what} at index {found.info - 1} is a combination of others",
            )
        return self.written

    def roles(self) -> Roles:
        a, wide, op = self["a"], self._wide, self.how["trans"]
        tall = wide == (op != "N")  # op(A) is
        conjugate = not tall if op == "T" else wide
        options = {"op": "N" if tall else "C", "conjugate": conjugate}
        c = a if self.in_place else None
        return Roles("lstsq", a, self._right, c, self.written, "ac" * wide, options)


class _LeastSquaresInPlace(_LeastSquares):
    """A call of ``lstsq_in_place``."""

    in_place = True

    def check(self) -> None:
        a, b = self["a"], self["b"]
        self.check_matrix("a", square=False)
        self.check_trans()
        if b.dtype != a.dtype or b.shape[0] != max(a.shape):
            self.fault(f"b: expected {max(a.shape)} rows of {a.dtype.name}, got {words(b.shape, b.dtype)}")

    def new(self) -> Matrix:
        return self["b"]

    @property
    def _right(self) -> Matrix:
        return self["b"][: self._shape[0], :]


class _RankedLeastSquares(_LeastSquares):
    """A call of ``lstsq`` with ``rcond``. It is several calls, so it has no plan."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if isinstance(self.rcond, (np.floating, np.integer)):
            self.rcond = self.rcond.item()
        self.how = {**self.how, "rcond": self.rcond}

    def check_rcond(self) -> None:
        """Note that it is neither None nor a number."""
        r: Any = self.rcond
        try:
            legal = r is None or (
                isinstance(r, (int, float)) and not isinstance(r, bool) and not math.isnan(r)
            )
        except OverflowError:  # no float is as large
            legal = False
        if legal and r is not None:
            self.rcond = float(r)
        elif not legal:
            self.wrong(f"rcond: expected None, a number or 'full rank', got {short_repr(r)}")

    def ranked(self) -> LstsqResult:
        """Return what ``lstsq`` returns with ``rcond``. Collective over the context."""
        agree_after(False, partial(self.ctx.agreement, self.name), self.read)
        # In this order, so that it is the user's state for the calls inside.
        with np.errstate(all="ignore"), self.ctx.running(self.name, checks=False):
            a, b, x = self["a"], self["b"], self.written
            if 0 in a.shape:
                x[:, :] = 0
                rest, nothing = b[:, : 0 if self._shape[0] == 0 else None], np.empty(0, real_dtype(a.dtype))
                return LstsqResult(x, (abs(rest) ** 2).sum(axis=0), 0, nothing)
            (a, of_a), (b, of_b) = _scaled(a), _scaled(b)
            found, by = self._solved(a, b), of_a - of_b
            x[:, :] = found.x * 2.0 ** (by // 2) * 2.0 ** (by - by // 2) if by else found.x
            residuals, s = np.ldexp(found.residuals, -2 * of_b), np.ldexp(found.s, -of_a)
            return LstsqResult(x, residuals, found.rank, s)

    def _solved(self, a: Matrix, b: Matrix) -> LstsqResult:
        """Return it for matrices that are scaled and not empty. Collective."""
        rows, cols = self._shape
        least, op = min(rows, cols), self.how["trans"]
        tall = rows >= cols
        if op == "T":
            a = a.T if tall else a.conj()
        elif (op == "N") != tall:
            a = a.H
        q = qr(a)  # of op(A), or of its adjoint
        u, s, vh = svd(q.r(), algo=self.how["algo"])
        eps = 2 * element_type(a.dtype).roundoff
        rcond: Any = eps * max(rows, cols) if self.rcond is None else self.rcond
        kept = s > (rcond if rcond >= 0 else eps) * s[0]
        rank = int(np.count_nonzero(kept))
        inverses = np.where(kept, 1 / s, 0) if np.isfinite(s).all() else s
        right = q.apply(b, "C") if tall else b
        y = matmul(u, right[:least, :], op_a="C") if tall else matmul(vh, right)
        y *= inverses[:, None]
        residuals = np.empty(0, s.dtype)
        if tall:
            x = matmul(vh, y, op_a="C")
            if rank == cols < rows:
                residuals = (abs(right[least:, :]) ** 2).sum(axis=0)
        else:
            x = self.ctx.allocate(replace(b.descriptor, shape=(cols, b.shape[1]), ld=None))
            x.local[...] = 0
            x[:least, :] = matmul(u, y)
            q.apply(x, out=x)
        return LstsqResult(x, residuals, rank, s)


def _scaled(x: Matrix) -> tuple[Matrix, int]:
    """Return a matrix whose largest element is in a comfortable range, and by which power of two. Collective."""
    exponent = scaling(x.norm("max"), x.dtype, root=True)
    return (x * 2.0**exponent if exponent else x), exponent


CALLS = (_LeastSquares,)
"""The calls that can be planned."""
