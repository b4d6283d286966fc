# SPDX-License-Identifier: Apache-2.0
"""Norms, and condition numbers by inverses."""

from __future__ import annotations

from typing import Literal

from ..errors import ArgumentError, FactorizationError, LayoutError, UnsupportedError, short_repr
from ..matrix.reductions import kind_of_norm
from ..runtime.reading import check_operands, context_of
from .factorization_call import Matrix
from .inverses import inv

Order = Literal["fro", "inf", "max"] | float | None


def norm(a: Matrix, ord: Order = None) -> float:  # noqa: A002 - NumPy's name
    """Return a norm of a matrix, bit for bit the same on every rank. Collective over the context.

    It is ``a.norm(ord)``, which also takes triangles.

    Args:
        a: in any layout.
        ord: None or "fro" (Frobenius), 1 (largest column sum of absolute values), "inf" or ``numpy.inf`` (largest row
            sum), or "max" (largest absolute value).

    Raises:
        ArgumentError: there is no such norm.
        UnsupportedError: ``ord`` is 2, -2 or "nuc": those need singular values.

    Source: NumPy, numpy.linalg.norm.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> float(pb.linalg.norm(a)), float(pb.linalg.norm(a, 1))
        (7.0, 7.0)

    See Also:
        cond.
    """
    _check("norm", a, "ord", ord)
    return a.norm("fro" if ord is None else ord)


def cond(a: Matrix, p: Order = 1, *, algo: str = "auto") -> float:
    """Return a condition number, the norm of A times that of its inverse. Collective over the context.

    The inverse is computed, with 2 n³ operations; ``cond_estimate`` takes a third. NumPy's default is the 2-norm,
    which needs singular values and is not available here.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        p: the norm: 1, "inf" or ``numpy.inf``, or "fro".
        algo: "auto", or the name of an algorithm of ``inv``.

    Returns:
        The condition number; infinite if A is exactly singular, 0 for an empty matrix.

    Raises:
        ArgumentError: shapes or types do not fit, or there is no such norm.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: ``p`` is None, 2, -2 or "nuc": those need singular values.

    Source: NumPy, numpy.linalg.cond.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> round(float(pb.linalg.cond(a)), 6)
        3.0625

    See Also:
        cond_estimate, norm, svdvals.
    """
    _check("cond", a, "p", p)
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
        plain = which is None or isinstance(which, (int, float, str))
        if plain and which in ((2, -2, "nuc", None) if call == "cond" else (2, -2, "nuc")):
            raise UnsupportedError(
                f"{call}: {name}={which!r} needs singular values, see pb.linalg.svdvals: expected here 1, 'inf' or "
                "'fro'"
            )
        if which is not None and (kind_of_norm(which) is None or (call == "cond" and which == "max")):
            legal = "'fro', 1 or 'inf'" if call == "cond" else "'fro', 1, 'inf' or 'max'"
            raise ArgumentError(f"{name}: expected {legal}, got {short_repr(which)}")
        if call == "cond" and a.shape[0] != a.shape[1]:
            raise LayoutError(f"cond: a: expected a square matrix, got {a.shape[0]} x {a.shape[1]}")
