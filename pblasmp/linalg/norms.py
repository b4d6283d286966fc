# SPDX-License-Identifier: Apache-2.0
"""Norms, condition numbers, rank and pseudoinverse: what singular values and inverses tell of a matrix."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..dtypes import element_type, scalar
from ..errors import ArgumentError, FactorizationError, LayoutError, short_repr
from ..layout.grid import one_of
from ..matrix.products import matmul
from ..matrix.reductions import kind_of_norm
from ..runtime.reading import check_operands, context_of
from .eigen import svd, svdvals
from .factorization_call import Matrix
from .systems import inv

Order = Literal["fro", "inf", "max", "nuc"] | float | None


def norm(a: Matrix, ord: Order = None) -> float:  # noqa: A002 - NumPy's name
    """Return a norm of a matrix, bit for bit the same on every rank. Collective over the context.

    ``a.norm(ord)`` has those that need no singular values, and takes triangles, too.

    Args:
        a: in any layout; for norms by singular values of a type that ``svd`` takes.
        ord: None or "fro" (Frobenius), 1 (largest column sum of absolute values), "inf" or ``numpy.inf`` (largest row
            sum), "max" (largest absolute value); by singular values 2 (the largest), -2 (the smallest) or "nuc" (their
            sum).

    Raises:
        ArgumentError: there is no such norm, or the type does not fit.
        RankMismatchError: the ranks gave different arguments.
        FactorizationError, UnsupportedError: as ``svdvals`` does.

    Source: NumPy, numpy.linalg.norm.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> float(pb.linalg.norm(a)), float(pb.linalg.norm(a, 1)), round(pb.linalg.norm(a, 2), 6)
        (7.0, 7.0, 6.561553)

    See Also:
        cond, svdvals.
    """
    _check("norm", a, "ord", ord)
    if ord != "nuc" and ord not in (2, -2):
        return a.norm("fro" if ord is None else ord)
    s = svdvals(a)
    if 0 in a.shape:
        return 0.0
    return float(s.sum() if ord == "nuc" else s[0 if ord == 2 else -1])


def cond(a: Matrix, p: Order = 1, *, algo: str = "auto") -> float:
    """Return a condition number, the norm of A times that of its inverse. Collective over the context.

    In the 2-norm, NumPy's default, it is the ratio of the largest and the smallest singular value; else the inverse is
    computed, with 2 n³ operations. ``cond_estimate`` takes a third of these.

    Args:
        a: n × n, in the 2-norm m × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        p: the norm: 1, "inf" or ``numpy.inf``, "fro", "nuc"; 2 or None; -2 for the inverse of that for 2.
        algo: "auto", or the name of an algorithm of ``inv``, in the 2-norm of ``svd``.

    Returns:
        The condition number; infinite if A is exactly singular, 0 for an empty matrix.

    Raises:
        ArgumentError: shapes or types do not fit, or there is no such norm.
        RankMismatchError: the ranks gave different arguments.
        FactorizationError, UnsupportedError: as ``svdvals`` does.

    Source: NumPy, numpy.linalg.cond.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> round(float(pb.linalg.cond(a)), 6)
        3.0625

    See Also:
        cond_estimate, norm, svdvals.
    """
    _check("cond", a, "p", p)
    if p in (None, 2, -2):
        s = svdvals(a, algo=algo)
        if not len(s):
            return 0.0
        ends = (s[0], s[-1]) if p != -2 else (s[-1], s[0])
        with np.errstate(all="ignore"):
            return float("inf") if ends == (0, 0) else float(ends[0] / ends[1])
    try:
        inverse = inv(a, algo=algo)
    except FactorizationError:  # every rank's
        return float("inf")
    return norm(a, p) * norm(inverse, p)


def _check(call: str, a: Matrix, name: str, which: object) -> None:
    """Raise if there is no such norm, on every rank. Collective over the context."""
    ctx = context_of(call, a)
    with ctx.agreement(call) as facts:
        check_operands(ctx, "a", {"a": a})
        facts.update({"a": a.descriptor, name: which})
        number = isinstance(which, (int, float, np.integer, np.floating))
        by_values = one_of(which, ("nuc",)) or (number and which in (2, -2))
        wrong = which is not None and kind_of_norm(which) is None and not by_values
        if wrong or (call == "cond" and which == "max"):
            legal = (
                "'fro', 'nuc', 1, 2, -2 or 'inf'"
                if call == "cond"
                else "'fro', 'nuc', 1, 2, -2, 'inf' or 'max'"
            )
            raise ArgumentError(f"{name}: expected {legal}, got {short_repr(which)}")
        if call == "cond" and which not in (None, 2, -2) and a.shape[0] != a.shape[1]:
            raise LayoutError(f"cond: a: expected a square matrix, got {a.shape[0]} x {a.shape[1]}")


def matrix_rank(a: Matrix, tol: float | None = None, *, algo: str = "auto") -> int:
    """Return how many singular values of a matrix are larger than a threshold. Collective over the context.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        tol: the threshold; None: eps max(m, n) times the largest singular value, as in NumPy.
        algo: "auto", or the name of an algorithm of ``svd``.

    Returns:
        The rank, the same on every rank of the context; 0 if A has NaN or infinity.

    Raises:
        ArgumentError: the type does not fit, or ``tol`` is no number.
        RankMismatchError: the ranks gave different arguments.
        FactorizationError, UnsupportedError: as ``svdvals`` does.

    Source: NumPy, numpy.linalg.matrix_rank.

    Example:
        >>> a = ctx.scatter(np.array([[1.0, 2], [2, 4]]), block=1)
        >>> pb.linalg.matrix_rank(a)
        1

    See Also:
        lstsq, svdvals.
    """
    least = _threshold("matrix_rank", a, "tol", tol)
    s = svdvals(a, algo=algo)
    with np.errstate(all="ignore"):
        return int(np.count_nonzero(s > (_eps(a) * s.max(initial=0) if least is None else least)))


def pinv(a: Matrix, rcond: float | None = None, *, algo: str = "auto") -> Matrix:
    """Return the Moore-Penrose pseudoinverse of a matrix, by its singular values. Collective over the context.

    To solve with it once, ``lstsq(a, b, rcond)`` is faster.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        rcond: singular values that are at most ``rcond`` times the largest are taken as zero. None: eps max(m, n), as
            in SciPy and in ``lstsq``.
        algo: "auto", or the name of an algorithm of ``svd``.

    Returns:
        A new matrix of n × m; all NaN if A has NaN or infinity.

    Raises:
        ArgumentError: the type does not fit, or ``rcond`` is no number.
        RankMismatchError: the ranks gave different arguments.
        FactorizationError, UnsupportedError: as ``svd`` does.

    Source: NumPy, numpy.linalg.pinv; SciPy, scipy.linalg.pinv.

    Example:
        >>> a = ctx.scatter(np.array([[2.0, 0], [0, 0], [0, 4]]), block=1)
        >>> pb.linalg.pinv(a).allgather().tolist()
        [[0.5, 0.0, 0.0], [0.0, 0.0, 0.25]]

    See Also:
        inv, lstsq.
    """
    least = _threshold("pinv", a, "rcond", rcond)
    u, s, vh = svd(a, algo=algo)
    with np.errstate(all="ignore"):
        kept = ~(s <= (_eps(a) if least is None else least) * s.max(initial=0))
        rank = int(np.count_nonzero(kept))
        return matmul(vh[:rank, :], u[:, :rank] / s[:rank], op_a="C", op_b="C")


def _eps(a: Matrix) -> float:
    """Return what a singular value may be in the unit of the largest if it is zero up to rounding. Local."""
    return 2 * element_type(a.dtype).roundoff * max(a.shape)


def _threshold(call: str, a: Matrix, name: str, value: object) -> float | None:
    """Return a threshold as a number, or raise on every rank. Collective over the context."""
    ctx = context_of(call, a)
    with ctx.agreement(call) as facts:
        check_operands(ctx, "a", {"a": a})
        facts.update({"a": a.descriptor, name: value})
        if value is None:
            return None
        found: Any = scalar(value, np.dtype("float64"), name)
        if not found >= 0:
            raise ArgumentError(f"{name}: expected None or a number of at least 0, got {short_repr(value)}")
        return float(found)
