# SPDX-License-Identifier: Apache-2.0
"""Whether a product, or what a factorization has found, is right: on a few random vectors, in O(n²)."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from . import verification
from .dtypes import element_type, scalar
from .engines.local.extremes import largest, scale_by_power
from .errors import ArgumentError, ArgumentTypeError, LayoutError, short_repr
from .layout import Trapezoid
from .layout.factor_problem import ASSUMED
from .layout.grid import one_of
from .matrix.distributed import DistributedMatrix
from .runtime.reading import check_operands, context_of, refuse
from .runtime.runtime import Runtime
from .verification import Verification, apply

Array = NDArray[Any]
Matrix = DistributedMatrix

_VECTORS = 8
_FACTOR = 20.0  # residuals of stable algorithms are a few times √n units of rounding


@overload
def verify(
    a: DistributedMatrix,
    b: DistributedMatrix,
    c: DistributedMatrix | None,
    d: DistributedMatrix,
    **how: Any,
) -> Verification: ...
@overload
def verify(a: Callable[..., Any] | str, *args: Any, found: Any, **how: Any) -> Verification: ...
def verify(*args: Any, **how: Any) -> Verification:
    """Return whether a product, or what a factorization has found, is right. Collective over the context.

    ``verify(a, b, c, d)`` checks that D is ``alpha op(A) op(B) + beta C``, see below. Called with a function, it checks
    what that has returned for the same arguments:

        w, v = pb.linalg.eigh(a)
        assert pb.verify(pb.linalg.eigh, a, found=(w, v))

    The residual, and whether vectors are orthonormal, are found on 8 random vectors of signs, in double precision: that
    takes as long as reading the matrices a few times. Matrices are scaled by powers of two, so that nothing overflows.
    ``error`` is the largest one, relative to what A makes of the vectors; ``bound`` is 20 √n units of rounding.

    | function | checked |
    | --- | --- |
    | ``eigh`` | A V = V diag(w), or A V = B V diag(w); V^H V, or V^H B V, is I; w is ascending |
    | ``svd`` | A V = U diag(s); A^H U = V diag(s); U and V are orthonormal; s is descending |
    | ``solve``, ``solve_triangular``, ``inv`` | op(A) X = B, or A X = I |
    | ``cho_solve``, ``lu_solve`` | the product of the factors, or its transpose, times X is B |
    | ``lstsq`` | op(A)^H (op(A) X - B) = 0; of singular values the rank, and the sum of the squares |
    | ``cholesky``, ``cho_factor``, ``lu_factor``, ``qr`` | the product of the factors is A; Q is orthonormal |

    It is not checked that eigenvalues of a subset are those asked for, nor that X of ``lstsq`` is the least of several
    solutions; where singular values count as zero, X is checked up to the first of these. If the arguments have NaN or
    infinities, it is right that what was found has some, too.

    Args:
        a: a product's A; or a function, ``pb.linalg.eigh`` or another one of the table, or its name.
        *args: B, C or None, and D of the product; the matrices that the function was given, with the values of then,
            or its pair of factors and what belongs to them.
        found: what the function has returned.
        **how: the function's other arguments; of a product those of :func:`pblasmp.verification.verify`: alpha, beta,
            op_a, op_b, epilogue, scales, scheme, exact.

    Raises:
        LayoutError: sizes or types do not fit together.
        ArgumentError: another argument is wrong, or matrices are of different contexts.
        UnsupportedError: the epilogue has gradients, the scales are of blocks, or the scheme has an epilogue.
        RankMismatchError: the ranks gave different arguments.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> bool(pb.verify(a, a, None, a @ a)), bool(pb.verify(a, a, None, a))
        (True, False)
        >>> bool(pb.verify(pb.linalg.inv, a, found=pb.linalg.inv(a)))
        True

    See Also:
        allclose, linalg.cond_estimate.
    """
    if "found" not in how and not (args and (isinstance(args[0], str) or callable(args[0]))):
        try:
            inspect.signature(verification.verify).bind(*args, **how)
        except TypeError as wrong:
            refuse("verify", ArgumentTypeError(f"verify: {wrong}"), *args)
        return verification.verify(*args, **how)
    if not args or "found" not in how:
        error = ArgumentTypeError(
            "verify: expected a function, what it was given and, as the argument found, what it has returned"
        )
        refuse("verify", error, *args)
    a, args, found = args[0], args[1:], how.pop("found")
    name = a if isinstance(a, str) else getattr(a, "__name__", "")
    check = _Check(name, args, found, how)
    matrices = [*check.given, *_matrices_of(found)]
    ctx = context_of("verify", *matrices)
    with ctx.agreement("verify") as facts:
        facts.update(
            function=name, options=str(sorted(check.how.items())), shapes=[x.shape for x in matrices]
        )
        facts["second"] = zlib.crc32(repr(np.asarray(check.second).tolist()).encode())
        named = {f"matrix {i}": x for i, x in enumerate(matrices, 1)}
        check_operands(ctx, [*named], named)
        check.read()
    with ctx.running("verify"), np.errstate(all="ignore"):
        return check.run(ctx)


def of_eigenpairs(a: Matrix, w: Array, v: Matrix, lower: bool, b: Matrix | None = None) -> Verification:
    """Return whether eigenpairs are right, as ``verify`` does. Collective over the context."""
    with a.context.running("verify"), np.errstate(all="ignore"):
        return _Check("eigh", (a,) if b is None else (a, b), (w, v), {"lower": lower}).run(a.context)


def _matrices_of(found: Any) -> list[Matrix]:
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

        def strictly(i: Array, j: Array) -> Array:
            return np.asarray(i > j if lower else i < j)

        def mirrored(i: Array, j: Array) -> Array:
            return np.asarray(i < j if lower else i > j)

        def diagonal(i: Array, j: Array) -> Array:
            return np.asarray(i == j)

        straight = "N" if mirrors else op
        y = applied(straight, strictly)
        if self.unit:
            least = min(len(x), len(y))
            y[:least] += np.ldexp(1.0, -self.exponent) * x[:least]
            return y
        on = applied(straight, diagonal)
        if mirrors:
            y = y + applied(mirrors, mirrored)
        if mirrors == "C":
            on = (on + applied("C", diagonal)) / 2  # its real part alone counts
        return y + on


class _Check:
    """What a function has found for its arguments."""

    def __init__(self, name: str, args: Sequence[Any], found: Any, how: dict[str, Any]) -> None:
        self.second: Any = None  # with factors: whether they are lower, or their pivots
        rules = _RULES.get(name, ("", "", ""))
        matrices = rules[0].replace("?", "").split()
        names = [*matrices, *rules[1].split(), "out", "algo"]
        self.how: dict[str, Any] = {**dict(zip(names, args, strict=False)), **how}
        self._excess = [
            *(each for each in how if each not in names),
            *(f"{each} twice" for each in names[: len(args)] if each in how),
            *map(short_repr, args[len(names) :]),
        ]
        self._args = [self.how.pop(each, None) for each in matrices]
        if rules[0].endswith("?") and self._args[-1] is None:
            self._args.pop()
        if name in ("cho_solve", "lu_solve"):
            first = self._args[0]
            pair = isinstance(first, (tuple, list)) and len(first) == 2
            self._args[0], self.second = first if pair else (None, None)
        if name == "cho_factor" and isinstance(found, tuple) and len(found) == 2:
            found, self.second = found
        if name == "solve" and isinstance(found, tuple) and len(found) == 2:
            found = found[0]  # with what ``return_info`` asks for
        self.given = [x for x in self._args or args if isinstance(x, DistributedMatrix)]
        for each in ("out", "algo"):
            self.how.pop(each, None)
        self._name, self._found, self._residuals = name, found, list[float]()

    @property
    def _bound(self) -> float:
        a = self._args[0]
        return _FACTOR * math.sqrt(max(1, *a.shape)) * 2 * element_type(a.dtype).roundoff

    @property
    def _kind(self) -> str:
        """What A is: "gen", "her"mitian, "sym"metric or "tri"angular."""
        if self._name in ("eigh", "cholesky", "cho_factor"):
            return "her"
        if self._name in ("solve_triangular", "cho_solve"):
            return "tri"
        kind = ASSUMED[self.how.get("assume_a", "gen")]
        return "her" if kind == "pos" else kind

    @property
    def _uplo(self) -> str:
        """Which triangle of A is read, if not all of it is."""
        assumed = self.how.get("assume_a", "")
        if self._name == "cho_solve":
            return "L" if self.second else "U"
        if self._kind == "tri" and self._name != "solve_triangular":
            return "L" if assumed == "lower triangular" else "U"
        lower = self.how.get("lower", self._name in ("eigh", "cholesky"))
        return self.how.get("uplo") or ("L" if lower else "U")

    @property
    def _trans(self) -> str:
        """Which transpose of A is solved with."""
        given = self.how.get("trans", self.how.get("transposed", 0))
        return given if isinstance(given, str) else "NTC"[int(given)]

    @property
    def _operator(self) -> _Operator:
        """A."""
        unit = bool(self.how.get("unit_diagonal", False)) and self._kind == "tri"
        return _Operator(self._args[0], self._exponents[0], self._kind, self._uplo, unit)

    def read(self) -> None:
        """Raise what is wrong with the arguments. Local."""
        if self._name not in _RULES:
            known = ", ".join(_RULES)
            raise ArgumentError(
                f"verify: expected one of the functions {known}, or its name, got {short_repr(self._name)}"
            )
        if self._excess:
            raise ArgumentTypeError(f"verify: {self._name} takes no {', '.join(self._excess)}")
        if one_of(rcond := self.how.get("rcond"), ("full rank",)):
            del self.how["rcond"]
        elif rcond is not None:
            self.how["rcond"] = scalar(rcond, np.dtype(np.float64), "rcond")
        for name, (legal, words) in _LEGAL.items():
            value = self.how.get(name, legal[0])
            if not (isinstance(value, (str, int, np.integer, np.bool_, type(None))) and value in legal):
                raise ArgumentError(f"{name}: expected {words}, got {short_repr(value)}")
        matrices, _, returned = _RULES[self._name]
        if len(self.given) < len(self._args):
            given = ", ".join(type(x).__name__ for x in self._args)
            raise ArgumentTypeError(f"verify: {self._name} is given the matrices {matrices}, got {given}")
        if wrong := self._wrong_given():
            raise LayoutError(wrong)
        if wrong := self._wrong_second():
            raise ArgumentError(wrong)
        if not _is_kind(self._found, returned):
            raise ArgumentTypeError(
                f"found: expected what {self._name} returns, got {short_repr(self._found)}"
            )
        if wrong := self._misfit():
            raise LayoutError(f"found: {wrong}")

    def _wrong_given(self) -> str:
        """Return what is wrong with the sizes of what the function was given."""
        (m, n), *others = (x.shape for x in self._args)
        if self._name not in _RECTANGULAR and m != n:
            return f"verify: {self._name} of a square matrix, got {m} x {n}"
        rows = n if self._name == "lstsq" and self._trans != "N" else m
        for shape in others:
            if shape[0] != rows or (self._name == "eigh" and shape[1] != n):
                expected = "the shape of a" if self._name == "eigh" else f"{rows} rows"
                return f"b: expected {expected}, got {shape[0]} x {shape[1]}"
        return ""

    def _wrong_second(self) -> str:
        """Return what is wrong with what belongs to the factors of a solve."""
        n, given = len(self._args[0]), short_repr(self.second)
        if self._name == "cho_solve" and not (
            isinstance(self.second, (bool, int, np.bool_)) and self.second in (0, 1)
        ):
            return f"c_and_lower: expected a factor and True or False, got {given}"
        if self._name == "cho_factor" and self.second is not bool(self.how.get("lower", False)):
            return f"found: expected a factor and the argument lower, got {given}"
        if self._name == "lu_solve" and not _are_pivots(self.second, n, n):
            return f"lu_and_piv: expected factors and {n} integers from 0 to {n - 1}, got {given}"
        return ""

    def _misfit(self) -> str:
        """Return what is wrong with the sizes of what was found."""
        (m, n), found = self._args[0].shape, self._found
        if self._name == "eigh":
            w, v = found
            return (
                ""
                if v.shape == (n, len(w)) and m == n
                else f"{len(w)} eigenvalues, and vectors of shape {v.shape}"
            )
        if self._name == "svd":
            u, s, vh = found
            least = min(m, n)
            fits = u.shape[0] == m and vh.shape[1] == n and len(s) == least
            fits &= u.shape[1] in (least, m) and vh.shape[0] in (least, n)
            return (
                "" if fits else f"of a matrix of shape {(m, n)} the shapes {u.shape}, {s.shape}, {vh.shape}"
            )
        x = found if isinstance(found, DistributedMatrix) else _matrices_of(found)[0]
        if self._name == "lu_factor" and not _are_pivots(found[1], min(m, n), m):
            return f"expected {min(m, n)} pivots from 0 to {m - 1}, got {short_repr(found[1])}"
        expected = self._args[1].shape if "solve" in self._name else (m, n)
        if self._name == "lstsq":
            expected = n if self._trans == "N" else m, self._args[1].shape[1]
            if x is not found and not 0 <= found[2] <= len(found[3]) == min(m, n):
                return f"expected {min(m, n)} singular values and a rank, got {len(found[3])} and {found[2]}"
        return "" if x.shape == expected else f"expected the shape {expected}, got {x.shape}"

    def run(self, ctx: Runtime[Any]) -> Verification:
        """Check on random vectors. Collective over the context."""
        given, found_matrices = self._args, _matrices_of(self._found)
        told = ctx.comm.allgather([self._looked_at(ctx.rank, x) for x in (*given, *found_matrices)])
        counts = [sum(count for count, _ in of_ranks) for of_ranks in zip(*told, strict=True)]
        sizes = [max(size for _, size in of_ranks) for of_ranks in zip(*told, strict=True)]
        # of powers of two beside which A, and what else is given, is neither large nor small
        self._exponents = [2 * (math.frexp(size)[1] // 2) for size in sizes[: len(given)]]
        spoiled, nans = sum(counts[: len(given)]), sum(counts[len(given) :])
        bound = self._bound
        if self._name != "svd" and not all(all(x.shape) for x in (*self._args, *_matrices_of(self._found))):
            return Verification(0.0, bound)  # nothing can be wrong
        if spoiled or nans:
            found: Verification = ctx.comm.bcast(
                Verification(0.0, bound, nans, 0, int(bool(spoiled) != bool(nans)))
            )
            return found
        wrong = getattr(self, f"_{self._name}")()
        error = max((each if not math.isnan(each) else math.inf for each in self._residuals), default=0.0)
        verdict: Verification = ctx.comm.bcast(Verification(float(error), bound, 0, 0, int(wrong or 0)))
        return verdict

    def _looked_at(self, rank: int, x: Matrix) -> tuple[int, float]:
        """Return how many of this rank's numbers that are read are not finite, and the largest of the others. Local."""
        by_triangle = [self._args[0]] if self._kind != "gen" else []
        if self._name in ("eigh", "cholesky", "cho_factor"):
            by_triangle = [*self._args, *([] if self._name == "eigh" else [self._found])]
        local = x.on_host()
        read = np.ones(local.shape, bool)
        if local.size and any(x is each for each in by_triangle):
            read = Trapezoid(self._uplo).mask(*x.descriptor.global_indices(rank))
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
        dtype = element_type(self._args[0].dtype)
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
        (w, v), a = self._found, self._operator
        b = None
        of_v, of_w = 0, a.exponent
        if len(self._args) > 1:
            b = a._replace(matrix=self._args[1], exponent=self._exponents[1])
            of_v, of_w = -b.exponent // 2, a.exponent - b.exponent
        v = _Operator(v, of_v)
        x = self._vectors(len(w))
        vx, vwx = (v.times(each) for each in (x, _scaled(w, of_w)[:, None] * x))
        right = vwx if b is None else b.times(vwx)
        # A, and B on the other side, decide how large the residual may be; vectors alone might be those of small ones.
        size = _norm(a.times(self._vectors(v.matrix.shape[0]))) * max(1.0, _norm(vx) / _norm(x))
        self._compare(a.times(vx), right, size, of_w)
        self._orthonormal(v, b)
        return bool((np.diff(w) < 0).any())

    def _svd(self) -> bool:
        a, s = self._operator, self._found[1]
        u, vh = (_Operator(each) for each in self._found[::2])
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
        self._solved_by(partial(_op, self._operator, self._trans), self._exponents[0])

    _solve_triangular = _solve

    def _cho_solve(self) -> None:
        factor = self._operator
        first, second = ("C", "N") if factor.uplo == "L" else ("N", "C")
        self._solved_by(lambda x: factor.times(factor.times(x, first), second), 2 * factor.exponent)

    def _lu_solve(self) -> None:
        op, factors, exponent = self._trans, self._args[0], self._exponents[0]
        u, lower = _Operator(factors, exponent, "tri", "U"), _Operator(factors, 0, "tri", "L", unit=True)

        def times(x: Array) -> Array:
            if op == "N":
                return _exchanged(lower.times(u.times(x)), self.second, back=True)
            return u.times(lower.times(_exchanged(x, self.second), op), op)

        self._solved_by(times, exponent)

    def _lstsq(self) -> bool:
        a, op, ranked = self._operator, self._trans, isinstance(self._found, tuple)
        b = _Operator(self._args[1], self._exponents[1])
        found, _, rank, values = self._found if ranked else (self._found, None, 0, np.empty(0))
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
        y = self._vectors(self._args[0].shape[0])
        self._solved(y, y, -self._exponents[0], self._operator.times)

    def _solved_by(self, times: Callable[[Array], Array], exponent: int) -> None:
        """Note how far X is from a solution, for what multiplies by A over a power of two. Collective."""
        b = _Operator(self._args[1], self._exponents[1])
        y = self._vectors(b.matrix.shape[1])
        self._solved(y, b.times(y), b.exponent - exponent, times)

    def _solved(self, y: Array, by: Array, of_x: int, times: Callable[[Array], Array]) -> None:
        """Note the residual of op(A) X y = B y. Collective."""
        xy, signs = _Operator(self._found, of_x).times(y), self._vectors(len(by))
        self._compare(times(xy), by, _norm(times(signs)) * _norm(xy) / _norm(signs) + _norm(by), of_x)

    def _cholesky(self) -> None:
        a = self._operator
        factor = _Operator(self._found, a.exponent // 2, "tri", a.uplo)
        x = self._vectors(a.matrix.shape[0])
        first, second = ("C", "N") if a.uplo == "L" else ("N", "C")
        ax = a.times(x)
        self._compare(factor.times(factor.times(x, first), second), ax, _norm(ax), factor.exponent)

    _cho_factor = _cholesky

    def _lu_factor(self) -> None:
        (factors, pivots), a = self._found, self._operator
        (m, n), least = factors.shape, min(factors.shape)
        x = self._vectors(n)
        ux = _Operator(factors, a.exponent, "tri", "U").times(x)[:least]
        lux = _Operator(factors, 0, "tri", "L", unit=True).times(_padded(ux, n))[:m]
        ax = a.times(x)
        ax = _exchanged(ax, pivots)
        self._compare(lux, ax, _norm(ax) + _norm(ux), a.exponent)

    def _qr(self) -> None:
        a, q = self._operator, _Operator(self._found.q())
        x = self._vectors(a.matrix.shape[1])
        rx = _Operator(self._found.r(), a.exponent, "tri", "U").times(x)[: q.matrix.shape[1]]
        ax = a.times(x)
        self._compare(q.times(rx), ax, _norm(ax), a.exponent)
        self._orthonormal(q)


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


def _is_kind(found: Any, kind: str) -> bool:
    """Return whether what was found is what a function returns."""
    if kind == "matrix":
        return isinstance(found, DistributedMatrix)
    if kind == "x":
        return isinstance(found, DistributedMatrix) or _is_kind(found, "x r n s")
    if kind == "qr":
        return isinstance(getattr(found, "factors", None), DistributedMatrix)
    kinds = {
        "w v": (np.ndarray, Matrix),
        "u s vh": (Matrix, np.ndarray, Matrix),
        "f p": (Matrix, np.ndarray),
        "x r n s": (Matrix, np.ndarray, int, np.ndarray),
    }[kind]
    return (
        isinstance(found, tuple)
        and len(found) == len(kinds)
        and all(isinstance(x, each) for x, each in zip(found, kinds, strict=True))
        and all(x.ndim == 1 and x.dtype.kind in "iuf" for x in found if isinstance(x, np.ndarray))
    )


def _are_pivots(found: Any, count: int, rows: int) -> bool:
    pivots = np.asarray(found)
    return (
        pivots.shape == (count,)
        and pivots.dtype.kind in "iu"
        and bool(((pivots >= 0) & (pivots < rows)).all())
    )


_RECTANGULAR = ("svd", "lstsq", "lu_factor", "qr")
_LEGAL: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("lower", "unit_diagonal"), ((True, False), "True or False")),
    **dict.fromkeys(("trans", "transposed"), ((0, 1, 2, *"NTC"), "0, 1, 2, 'N', 'T' or 'C'")),
    "uplo": ((None, *"LU"), "'L' or 'U'"),
    "assume_a": (("gen", *ASSUMED), f"one of {', '.join(ASSUMED)}"),
}
"""What options may be."""
_RULES = {
    "eigh": ("a b?", "lower subset_by_index check uplo", "w v"),
    "svd": ("a", "full_matrices", "u s vh"),
    "solve": ("a b", "assume_a lower transposed unit_diagonal refine return_info", "matrix"),
    "solve_triangular": ("a b", "trans lower unit_diagonal", "matrix"),
    "cho_solve": ("c_and_lower b", "", "matrix"),
    "lu_solve": ("lu_and_piv b", "trans", "matrix"),
    "lstsq": ("a b", "rcond trans", "x"),
    "inv": ("a", "assume_a lower unit_diagonal", "matrix"),
    "cholesky": ("a", "lower", "matrix"),
    "cho_factor": ("a", "lower", "matrix"),
    "lu_factor": ("a", "", "f p"),
    "qr": ("a", "", "qr"),
}
"""The matrices that a function is given, its options in the order of its arguments, and what it returns."""
