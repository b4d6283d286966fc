# SPDX-License-Identifier: Apache-2.0
"""Whether a product, or what a factorization has found, is right: on a few random vectors, in O(n²)."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..dtypes import scalar
from ..errors import ArgumentError, ArgumentTypeError, LayoutError, short_repr
from ..layout.factor_problem import ASSUMED
from ..layout.grid import one_of
from ..matrix import verification
from ..matrix.columns import as_column, is_vector
from ..matrix.distributed import DistributedMatrix
from ..matrix.verification import Verification
from ..runtime.reading import check_operands, context_of, refuse
from .eigen import condition_of
from .factorization_call import pair_of
from .least_squares import LstsqResult
from .residuals import Claim, matrices_of

Array = NDArray[Any]
Matrix = DistributedMatrix


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
    takes as long as reading the matrices a few times; for a subset of the eigenvectors of two matrices B is factored,
    too. Matrices are scaled by powers of two, so that nothing overflows.
    ``error`` is the largest one, relative to what A makes of the vectors; ``bound`` is 20 √n units of rounding.

    | function | checked |
    | --- | --- |
    | ``eigh`` | A V = V diag(w), or A V = B V diag(w) up to B's condition; V^H V, or V^H B V, is I; w is ascending |
    | ``svd`` | A V = U diag(s); A^H U = V diag(s); U and V are orthonormal; s is descending |
    | ``solve``, ``solve_triangular``, ``inv`` | op(A) X = B, or A X = I |
    | ``cho_solve``, ``lu_solve`` | the product of the factors, or its transpose, times X is B |
    | ``lstsq`` | op(A)^H (op(A) X - B) = 0; of singular values the rank, and the sum of the squares |
    | ``cholesky``, ``cho_factor``, ``lu_factor`` | the product of the factors is A |
    | ``qr``, also unpacked as ``(q, r)`` | the product is A; Q is orthonormal, R is upper triangular |

    It is not checked that eigenvalues of a subset are those asked for, nor that X of ``lstsq`` is the least of several
    solutions; where singular values count as zero, X is checked up to the first of these. If the arguments have NaN or
    infinities, it is right that what was found has some, too.

    Args:
        a: a product's A; or a function, ``pb.linalg.eigh`` or another one of the table, or its name.
        *args: B, C or None, and D of the product; the matrices that the function was given, with the values of then,
            or its pair of factors and what belongs to them.
        found: what the function has returned.
        **how: the function's other arguments; of a product those of :func:`pblasmp.matrix.verification.verify`: alpha,
            beta, op_a, op_b, epilogue, scales, scheme, exact.

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
    a, given, found = args[0], args[1:], how.pop("found")
    if len(given) == 2 and is_vector(given[1]):
        given, found = _by_columns(given, found)
    try:
        name = a if isinstance(a, str) else getattr(a, "__name__", "")
        check = _Check(name, given, found, how)
        matrices = [*check.given, *matrices_of(found)]
    except Exception as wrong:  # noqa: BLE001 - what a user's own types raise
        refuse("verify", wrong, *args)
    ctx = context_of("verify", *matrices)
    with ctx.agreement("verify") as facts:
        facts.update(
            function=name, options=str(sorted(check.claim.how.items())), shapes=[x.shape for x in matrices]
        )
        facts["second"] = zlib.crc32(repr(np.asarray(check.claim.second).tolist()).encode())
        named = {f"matrix {i}": x for i, x in enumerate(matrices, 1)}
        check_operands(ctx, [*named], named)
        check.read()
    with ctx.running("verify"), np.errstate(all="ignore"):
        claim = check.claim
        if claim.name == "eigh" and len(claim.args) == 2 and len(found[0]) < claim.args[0].shape[0]:
            claim.condition = condition_of(claim.args[1], claim.uplo == "L")
        return claim.verdict(ctx)


def _by_columns(given: tuple[Any, Any], found: Any) -> tuple[tuple[Any, Any], Any]:
    """Return what a function was given, and has found, for a vector, as matrices of one column. Collective."""
    a, b = given
    factor = pair_of(a)[0]
    if not isinstance(factor, DistributedMatrix):
        return given, found
    with context_of("verify", factor).running("verify"):
        given = a, as_column("verify", factor, b)
        x = found[0] if isinstance(found, tuple) else found
        if is_vector(x):
            x = as_column("verify", factor, x, "found")
    if not isinstance(found, tuple):
        return given, x
    return given, found._replace(x=x) if isinstance(found, LstsqResult) else (x, *found[1:])


class _Check:
    """A claim, and what is wrong with it.

    Attributes:
        claim: what a function has found for its arguments, which are legal once they have been read.
        given: the matrices among these.
    """

    def __init__(self, name: str, given: Sequence[Any], found: Any, how: dict[str, Any]) -> None:
        rules = _RULES.get(name, ("", "", ""))
        matrices = rules[0].replace("?", "").split()
        names = [*matrices, *rules[1].split(), "out", "algo"]
        self._excess = [
            *(each for each in how if each not in names),
            *(f"{each} twice" for each in names[: len(given)] if each in how),
            *map(short_repr, given[len(names) :]),
        ]
        how = {**dict(zip(names, given, strict=False)), **how}
        args, second = [how.pop(each, None) for each in matrices], None
        if rules[0].endswith("?") and args[-1] is None:
            args.pop()
        if name in ("cho_solve", "lu_solve"):
            pair = isinstance(args[0], (tuple, list)) and len(args[0]) == 2
            args[0], second = args[0] if pair else (None, None)
        if name == "cho_factor" and isinstance(found, tuple) and len(found) == 2:
            found, second = found
        if name == "solve" and isinstance(found, tuple) and len(found) == 2:
            found = found[0]  # with what ``return_info`` asks for
        self.given = [x for x in args or given if isinstance(x, DistributedMatrix)]
        for each in ("out", "algo"):
            how.pop(each, None)
        self.claim = Claim(name, args, found, how, second)

    def read(self) -> None:
        """Raise what is wrong with the arguments. Local."""
        if self.claim.name not in _RULES:
            known = ", ".join(_RULES)
            raise ArgumentError(
                f"verify: expected one of the functions {known}, or its name, got {short_repr(self.claim.name)}"
            )
        if self._excess:
            raise ArgumentTypeError(f"verify: {self.claim.name} takes no {', '.join(self._excess)}")
        if one_of(rcond := self.claim.how.get("rcond"), ("full rank",)):
            del self.claim.how["rcond"]
        elif rcond is not None:
            self.claim.how["rcond"] = scalar(rcond, np.dtype(np.float64), "rcond")
        for name, (legal, words) in _LEGAL.items():
            value = self.claim.how.get(name, legal[0])
            if not (isinstance(value, (str, int, np.integer, np.bool_, type(None))) and value in legal):
                raise ArgumentError(f"{name}: expected {words}, got {short_repr(value)}")
        matrices, _, returned = _RULES[self.claim.name]
        if len(self.given) < len(self.claim.args):
            given = ", ".join(type(x).__name__ for x in self.claim.args)
            raise ArgumentTypeError(
                f"verify: {self.claim.name} is given the matrices {matrices}, got {given}"
            )
        if wrong := self._wrong_given():
            raise LayoutError(wrong)
        if wrong := self._wrong_second():
            raise ArgumentError(wrong)
        if not _is_kind(self.claim.found, returned):
            raise ArgumentTypeError(
                f"found: expected what {self.claim.name} returns, got {short_repr(self.claim.found)}"
            )
        if wrong := self._misfit():
            raise LayoutError(f"found: {wrong}")

    def _wrong_given(self) -> str:
        """Return what is wrong with the sizes of what the function was given."""
        (m, n), *others = (x.shape for x in self.claim.args)
        if self.claim.name not in _RECTANGULAR and m != n:
            return f"verify: {self.claim.name} of a square matrix, got {m} x {n}"
        rows = n if self.claim.name == "lstsq" and self.claim.trans != "N" else m
        for shape in others:
            if shape[0] != rows or (self.claim.name == "eigh" and shape[1] != n):
                expected = "the shape of a" if self.claim.name == "eigh" else f"{rows} rows"
                return f"b: expected {expected}, got {shape[0]} x {shape[1]}"
        return ""

    def _wrong_second(self) -> str:
        """Return what is wrong with what belongs to the factors of a solve."""
        n, given = len(self.claim.args[0]), short_repr(self.claim.second)
        if self.claim.name == "cho_solve" and not (
            isinstance(self.claim.second, (bool, int, np.bool_)) and self.claim.second in (0, 1)
        ):
            return f"c_and_lower: expected a factor and True or False, got {given}"
        if self.claim.name == "cho_factor" and self.claim.second is not bool(
            self.claim.how.get("lower", False)
        ):
            return f"found: expected a factor and the argument lower, got {given}"
        if self.claim.name == "lu_solve" and not _are_pivots(self.claim.second, n, n):
            return f"lu_and_piv: expected factors and {n} integers from 0 to {n - 1}, got {given}"
        return ""

    def _misfit(self) -> str:
        """Return what is wrong with the sizes of what was found."""
        (m, n), found = self.claim.args[0].shape, self.claim.found
        if self.claim.name == "eigh":
            w, v = found
            return (
                ""
                if v.shape == (n, len(w)) and m == n
                else f"{len(w)} eigenvalues, and vectors of shape {v.shape}"
            )
        if self.claim.name == "svd":
            u, s, vh = found
            least = min(m, n)
            fits = u.shape[0] == m and vh.shape[1] == n and len(s) == least
            fits &= u.shape[1] in (least, m) and vh.shape[0] in (least, n)
            return (
                "" if fits else f"of a matrix of shape {(m, n)} the shapes {u.shape}, {s.shape}, {vh.shape}"
            )
        if self.claim.name == "qr" and isinstance(found, tuple):
            (q, r), least = found, min(m, n)
            fits = q.shape == (m, least) and r.shape == (least, n)
            return "" if fits else f"of a matrix of shape {(m, n)} the shapes {q.shape}, {r.shape}"
        x = found if isinstance(found, DistributedMatrix) else matrices_of(found)[0]
        if self.claim.name == "lu_factor" and not _are_pivots(found[1], min(m, n), m):
            return f"expected {min(m, n)} pivots from 0 to {m - 1}, got {short_repr(found[1])}"
        expected = self.claim.args[1].shape if "solve" in self.claim.name else (m, n)
        if self.claim.name == "lstsq":
            expected = n if self.claim.trans == "N" else m, self.claim.args[1].shape[1]
            if x is not found and not 0 <= found[2] <= len(found[3]) == min(m, n):
                return f"expected {min(m, n)} singular values and a rank, got {len(found[3])} and {found[2]}"
        return "" if x.shape == expected else f"expected the shape {expected}, got {x.shape}"


def _is_kind(found: Any, kind: str) -> bool:
    """Return whether what was found is what a function returns."""
    if kind == "matrix":
        return isinstance(found, DistributedMatrix)
    if kind == "x":
        return isinstance(found, DistributedMatrix) or _is_kind(found, "x r n s")
    if kind == "qr":
        return isinstance(getattr(found, "factors", None), DistributedMatrix) or _is_kind(found, "q r")
    kinds = {
        "w v": (np.ndarray, Matrix),
        "u s vh": (Matrix, np.ndarray, Matrix),
        "f p": (Matrix, np.ndarray),
        "q r": (Matrix, Matrix),
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
