# SPDX-License-Identifier: Apache-2.0
"""Whether what a factorization has found is right: its residuals on a few random vectors, in O(n²)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtypes import element_type
from ..engines.local.extremes import largest, scale_by_power
from ..layout import Trapezoid
from ..layout.factor_problem import ASSUMED
from ..matrix.distributed import DistributedMatrix
from ..matrix.verification import Verification, apply
from ..runtime.runtime import Runtime

Array = NDArray[Any]
Matrix = DistributedMatrix

_VECTORS = 8
_FACTOR = 20.0  # residuals of stable algorithms are a few times √n units of rounding


def of_eigenpairs(
    a: Matrix, w: Array, v: Matrix, lower: bool, b: Matrix | None = None, condition: float = 1.0
) -> Verification:
    """Return whether eigenpairs are right, as ``verify`` does; ``condition``: of B. Collective over the context."""
    with a.context.running("verify"), np.errstate(all="ignore"):
        args, how = (a,) if b is None else (a, b), {"lower": lower}
        return Claim("eigh", args, (w, v), how, condition=condition).verdict(a.context)


def matrices_of(found: Any) -> list[Matrix]:
    """Return the matrices among what was found."""
    if isinstance(found, DistributedMatrix):
        return [found]
    if hasattr(found, "tau"):
        return [found.factors]
    return [x for x in found if isinstance(x, DistributedMatrix)] if isinstance(found, Sequence) else []


class _Operator(NamedTuple):
    """A matrix as it is known: whole ("gen"), a "tri"angle, perhaps with ones on its diagonal, or "her"mitian.

    It is divided by 2 to the power of ``exponent``.
    """

    matrix: Matrix
    exponent: int = 0
    kind: str = "gen"
    uplo: str = "L"
    unit: bool = False

    def times(self, x: Array, op: str = "N") -> Array:
        """Return the product with vectors, the same on every rank. Collective."""

        def applied(op: str, kept: Callable[[Array, Array], Array] | None = None) -> Array:
            return apply(self.matrix, op, x, np.zeros(len(x)), kept=kept, exponent=self.exponent)[0]

        if self.kind == "gen":
            return applied(op)
        mirrors = {"her": "C", "sym": "T"}.get(self.kind, "")
        lower = (self.uplo == "L") == (op == "N" or bool(mirrors))
        strictly, mirrored = (np.greater, np.less) if lower else (np.less, np.greater)
        straight = "N" if mirrors else op
        y = applied(straight, strictly)
        if self.unit:
            least = min(len(x), len(y))
            y[:least] += np.ldexp(1.0, -self.exponent) * x[:least]
            return y
        on = applied(straight, np.equal)
        if mirrors:
            y = y + applied(mirrors, mirrored)
        if mirrors == "C":
            on = (on + applied("C", np.equal)) / 2  # its real part alone counts
        return y + on


@dataclass(eq=False)
class Claim:
    """What a function has found for its arguments, which are legal. Local to make.

    Attributes:
        name: of the function, one of those that ``verify`` knows.
        args: the matrices that it was given.
        found: what it has returned.
        how: its other arguments.
        second: with factors: whether they are lower, or their pivots.
        condition: at least this is B's, of ``eigh`` of two matrices.
    """

    name: str
    args: Sequence[Matrix]
    found: Any
    how: dict[str, Any]
    second: Any = None
    condition: float = 1.0
    _residuals: list[float] = field(default_factory=list)

    @property
    def _bound(self) -> float:
        a = self.args[0]
        return _FACTOR * math.sqrt(max(1, *a.shape)) * 2 * element_type(a.dtype).roundoff

    @property
    def kind(self) -> str:
        """What A is: "gen", "her"mitian, "sym"metric or "tri"angular."""
        if self.name in ("eigh", "cholesky", "cho_factor"):
            return "her"
        if self.name in ("solve_triangular", "cho_solve"):
            return "tri"
        kind = ASSUMED[self.how.get("assume_a", "gen")]
        return "her" if kind == "pos" else kind

    @property
    def uplo(self) -> str:
        """Which triangle of A is read, if not all of it is."""
        assumed = self.how.get("assume_a", "")
        if self.name == "cho_solve":
            return "L" if self.second else "U"
        if self.kind == "tri" and self.name != "solve_triangular":
            return "L" if assumed == "lower triangular" else "U"
        lower = self.how.get("lower", self.name in ("eigh", "cholesky"))
        return self.how.get("uplo") or ("L" if lower else "U")

    @property
    def trans(self) -> str:
        """Which transpose of A is solved with."""
        given = self.how.get("trans", self.how.get("transposed", 0))
        return given if isinstance(given, str) else "NTC"[int(given)]

    @property
    def _operator(self) -> _Operator:
        """A."""
        unit = bool(self.how.get("unit_diagonal", False)) and self.kind == "tri"
        return _Operator(self.args[0], self._exponents[0], self.kind, self.uplo, unit)

    def verdict(self, ctx: Runtime[Any]) -> Verification:
        """Check on random vectors. Collective over the context."""
        given, found_matrices = self.args, matrices_of(self.found)
        told = ctx.comm.allgather([self._looked_at(ctx.rank, x) for x in (*given, *found_matrices)])
        counts = [sum(count for count, _ in of_ranks) for of_ranks in zip(*told, strict=True)]
        sizes = [max(size for _, size in of_ranks) for of_ranks in zip(*told, strict=True)]
        # of powers of two beside which A, and what else is given, is neither large nor small
        self._exponents = [2 * (math.frexp(size)[1] // 2) for size in sizes[: len(given)]]
        spoiled, nans = sum(counts[: len(given)]), sum(counts[len(given) :])
        bound = self._bound
        if self.name != "svd" and not all(all(x.shape) for x in (*self.args, *matrices_of(self.found))):
            return Verification(0.0, bound)  # nothing can be wrong
        if spoiled or nans:
            found: Verification = ctx.comm.bcast(
                Verification(0.0, bound, nans, 0, int(bool(spoiled) != bool(nans)))
            )
            return found
        wrong = getattr(self, f"_{self.name}")()
        error = max((each if not math.isnan(each) else math.inf for each in self._residuals), default=0.0)
        verdict: Verification = ctx.comm.bcast(Verification(float(error), bound, 0, 0, int(wrong or 0)))
        return verdict

    def _looked_at(self, rank: int, x: Matrix) -> tuple[int, float]:
        """Return how many of this rank's numbers that are read are not finite, and the largest of the others. Local."""
        by_triangle = [self.args[0]] if self.kind != "gen" else []
        if self.name in ("eigh", "cholesky", "cho_factor"):
            by_triangle = [*self.args, *([] if self.name == "eigh" else [self.found])]
        local = x.on_host()
        read = np.ones(local.shape, bool)
        if local.size and any(x is each for each in by_triangle):
            read = Trapezoid(self.uplo).mask(*x.descriptor.global_indices(rank))
        finite = np.isfinite(local)
        return int(np.count_nonzero(read & ~finite)), largest(np, [local[read & finite]])

    def _vectors(self, count: int) -> Array:
        """Return random vectors of signs."""
        return np.random.default_rng(20).choice([-1.0, 1.0], (count, _VECTORS))

    def _compare(self, left: Array, right: Array, size: float, exponent: int = 0) -> None:
        """Note the size of a difference relative to ``size``, which is positive unless all is zero.

        What was found has been divided by 2 to the power of ``exponent``: it is rounded to multiples of the smallest
        number of its type, also where it is small itself.
        """
        dtype = element_type(self.args[0].dtype)
        smallest = float(np.ldexp(dtype.smallest / dtype.roundoff, -exponent)) * len(left)
        self._residuals.append(_norm(left - right) / ((size + smallest) or 1.0))

    def _orthonormal(self, v: _Operator, weight: _Operator | None = None, *, rows: bool = False) -> None:
        """Note how far V^H V, or V^H B V, or V V^H, is from the identity. Collective."""
        ops = ("C", "N") if rows else ("N", "C")
        x = self._vectors(v.matrix.shape[0 if rows else 1])
        y, size = v.times(x, ops[0]), _norm(x)
        if weight is not None:
            grown = _norm(y) / size
            size = max(size, _norm(weight.times(self._vectors(v.matrix.shape[0]))) * grown**2)
            y = weight.times(y)
        self._compare(v.times(y, ops[1]), x, size, v.exponent)

    def _eigh(self) -> bool:
        (w, v), a = self.found, self._operator
        b = None
        of_v, of_w = 0, a.exponent
        if len(self.args) > 1:
            b = a._replace(matrix=self.args[1], exponent=self._exponents[1])
            of_v, of_w = -b.exponent // 2, a.exponent - b.exponent
        v = _Operator(v, of_v)
        x = self._vectors(len(w))
        vx, vwx = (v.times(each) for each in (x, _scaled(w, of_w)[:, None] * x))
        right = vwx if b is None else b.times(vwx)
        # A, and B on the other side, decide how large the residual may be; vectors alone might be those of small ones.
        signs, grown = self._vectors(v.matrix.shape[0]), _norm(vx) / _norm(x)
        size = _norm(a.times(signs)) * max(1.0, grown)
        if (
            b is not None
        ):  # the condition of B multiplies what rounding explains; V V^H is the inverse, if V is all
            size *= max(1.0, self.condition, _norm(b.times(signs)) / _norm(signs) * grown**2)
        self._compare(a.times(vx), right, size, of_w)
        self._orthonormal(v, b)
        return bool((np.diff(w) < 0).any())

    def _svd(self) -> bool:
        a, s = self._operator, self.found[1]
        u, vh = (_Operator(each) for each in self.found[::2])
        for each, rows in ((u, False), (vh, True)):
            if all(each.matrix.shape):
                self._orthonormal(each, rows=rows)
        if not len(s):
            return False
        x = self._vectors(len(s))
        sx = _scaled(s, a.exponent)[:, None] * x
        vx, usx, ux, vsx = (
            each.times(_padded(y, each.matrix.shape[axis]), op)
            for each, op, axis, y in ((vh, "C", 0, x), (u, "N", 1, sx), (u, "N", 1, x), (vh, "C", 0, sx))
        )
        size = _norm(a.times(self._vectors(a.matrix.shape[1])))
        self._compare(a.times(vx), usx, size, a.exponent)
        self._compare(a.times(ux, "C"), vsx, size, a.exponent)
        return bool((np.diff(s) > 0).any())

    def _solve(self) -> None:
        self._solved_by(partial(_op, self._operator, self.trans), self._exponents[0])

    _solve_triangular = _solve

    def _cho_solve(self) -> None:
        factor = self._operator
        first, second = ("C", "N") if factor.uplo == "L" else ("N", "C")
        self._solved_by(lambda x: factor.times(factor.times(x, first), second), 2 * factor.exponent)

    def _lu_solve(self) -> None:
        op, factors, exponent = self.trans, self.args[0], self._exponents[0]
        u, lower = _Operator(factors, exponent, "tri", "U"), _Operator(factors, 0, "tri", "L", unit=True)

        def times(x: Array) -> Array:
            if op == "N":
                return _exchanged(lower.times(u.times(x)), self.second, back=True)
            return u.times(lower.times(_exchanged(x, self.second), op), op)

        self._solved_by(times, exponent)

    def _lstsq(self) -> bool:
        a, op, ranked = self._operator, self.trans, isinstance(self.found, tuple)
        b = _Operator(self.args[1], self._exponents[1])
        found, _, rank, values = self.found if ranked else (self.found, None, 0, np.empty(0))
        x, s = _Operator(found, b.exponent - a.exponent), _scaled(values, a.exponent)
        y = self._vectors(b.matrix.shape[1])
        xy, by = x.times(y), b.times(y)
        size = _norm(_op(a, op, self._vectors(len(xy)))) or 1.0
        left = (_op(a, op, xy) - by) / size
        adjoint = np.conj(a.times(np.conj(left))) if op == "T" else a.times(left, "C" if op == "N" else "N")
        largest = size * _norm(xy) + _norm(by)
        if rank < len(s):  # what counts as zero leaves its part of B
            largest += float(s[rank]) / size * _norm(by) / self._bound
        self._compare(adjoint, np.zeros_like(adjoint), largest, x.exponent)
        if not ranked:
            return False
        whole = float(np.ldexp(a.matrix.norm(), -a.exponent))
        if math.isfinite(whole):
            self._compare(np.array([[np.linalg.norm(s)]]), np.array([[whole]]), whole, a.exponent)
        rcond, eps = self.how.get("rcond"), 2 * element_type(a.matrix.dtype).roundoff
        rcond = eps * max(a.matrix.shape) if rcond is None else rcond if rcond >= 0 else eps
        return bool((np.diff(s) > 0).any() or rank != np.count_nonzero(s > rcond * s[0]))

    def _inv(self) -> None:
        y = self._vectors(self.args[0].shape[0])
        self._solved(y, y, -self._exponents[0], self._operator.times)

    def _solved_by(self, times: Callable[[Array], Array], exponent: int) -> None:
        """Note how far X is from a solution, for what multiplies by A over a power of two. Collective."""
        b = _Operator(self.args[1], self._exponents[1])
        y = self._vectors(b.matrix.shape[1])
        self._solved(y, b.times(y), b.exponent - exponent, times)

    def _solved(self, y: Array, by: Array, of_x: int, times: Callable[[Array], Array]) -> None:
        """Note the residual of op(A) X y = B y. Collective."""
        xy, signs = _Operator(self.found, of_x).times(y), self._vectors(len(by))
        self._compare(times(xy), by, _norm(times(signs)) * _norm(xy) / _norm(signs) + _norm(by), of_x)

    def _cholesky(self) -> None:
        a = self._operator
        factor = _Operator(self.found, a.exponent // 2, "tri", a.uplo)
        x = self._vectors(a.matrix.shape[0])
        first, second = ("C", "N") if a.uplo == "L" else ("N", "C")
        ax = a.times(x)
        self._compare(factor.times(factor.times(x, first), second), ax, _norm(ax), factor.exponent)

    _cho_factor = _cholesky

    def _lu_factor(self) -> None:
        (factors, pivots), a = self.found, self._operator
        (m, n), least = factors.shape, min(factors.shape)
        x = self._vectors(n)
        ux = _Operator(factors, a.exponent, "tri", "U").times(x)[:least]
        lux = _Operator(factors, 0, "tri", "L", unit=True).times(_padded(ux, n))[:m]
        ax = a.times(x)
        ax = _exchanged(ax, pivots)
        self._compare(lux, ax, _norm(ax) + _norm(ux), a.exponent)

    def _qr(self) -> bool:
        q, r = self.found
        a, q = self._operator, _Operator(q)
        x = self._vectors(a.matrix.shape[1])
        ax = a.times(x)
        self._compare(q.times(_Operator(r, a.exponent).times(x)), ax, _norm(ax), a.exponent)
        self._orthonormal(q)
        return bool(r.tril(-1).norm("max") > 0)


def _norm(x: Array) -> float:
    """Return the largest 2-norm of a column."""
    return float(np.linalg.norm(x, axis=0).max(initial=0.0))


def _scaled(values: Array, exponent: int) -> Array:
    """Return real numbers in double precision, divided by 2 to the power of ``exponent``."""
    found = values.astype(np.float64)
    scale_by_power(found, -exponent)
    return found


def _exchanged(x: Array, pivots: Array, *, back: bool = False) -> Array:
    """Return vectors with the rows exchanged as LU does, or ``back`` as they were."""
    x, steps = x.copy(), list(enumerate(np.asarray(pivots)))
    for i, j in reversed(steps) if back else steps:
        x[[i, j]] = x[[j, i]]
    return x


def _padded(x: Array, rows: int) -> Array:
    """Return vectors with zeros below."""
    return np.concatenate([x, np.zeros((rows - len(x), x.shape[1]), x.dtype)]) if rows > len(x) else x[:rows]


def _op(a: _Operator, op: str, x: Array) -> Array:
    """Return op(A) x."""
    if a.kind == "her":
        return np.conj(a.times(np.conj(x))) if op == "T" else a.times(x)
    if a.kind == "sym":
        return np.conj(a.times(np.conj(x))) if op == "C" else a.times(x)
    return a.times(x, op)
