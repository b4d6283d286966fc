# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues of symmetric and Hermitian matrices, also generalized."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ..blas import level3
from ..comm import agree_after
from ..dtypes import element_type
from ..engines.method import survey
from ..engines.product import Found
from ..engines.request import Options
from ..errors import FactorizationError, UnsupportedError, short_repr
from ..layout import MatrixDescriptor
from ..layout.grid import one_of
from ..logs import logger
from ..matrix.creation import Layout, random
from ..matrix.products import matmul
from ..matrix.verification import Verification
from .factorization_call import FactorizationCall, Matrix, Roles, T, flag
from .orthogonal import form_q, qr
from .positive import cholesky
from .residuals import of_eigenpairs
from .systems import whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..layout.level3_problem import Uplo
    from ..layout.schemes import Op

Values = NDArray[Any]


@overload
def eigh(
    a: Matrix,
    b: Matrix | None = None,
    *,
    lower: bool = True,
    subset_by_index: Sequence[int] | None = None,
    eigvals_only: Literal[False] = False,
    check: bool = False,
    algo: str = "auto",
    uplo: Uplo | None = None,
) -> tuple[Values, Matrix]: ...
@overload
def eigh(
    a: Matrix,
    b: Matrix | None = None,
    *,
    lower: bool = True,
    subset_by_index: Sequence[int] | None = None,
    eigvals_only: Literal[True],
    check: bool = False,
    algo: str = "auto",
    uplo: Uplo | None = None,
) -> Values: ...
def eigh(
    a: Matrix,
    b: Matrix | None = None,
    *,
    lower: bool = True,
    subset_by_index: Sequence[int] | None = None,
    eigvals_only: bool = False,
    check: bool = False,
    algo: str = "auto",
    uplo: Uplo | None = None,
) -> tuple[Values, Matrix] | Values:
    """Return eigenvalues and eigenvectors of a symmetric or Hermitian matrix. Collective over the context.

    A V = V diag(w), with V^H V = I; with ``b``, A V = B V diag(w) and V^H B V = I. A is scaled if squares of its
    elements would over- or underflow. NaN or infinity in A or B makes all eigenvalues and eigenvectors NaN.

    Libraries compute it. On CPU ranks that is ELPA or ScaLAPACK, if one is found (see ``docs/solving.md``); up to an
    order of 200, and on one rank, the LAPACK of one rank, which tells the others. On GPUs it is cuSOLVERMp; up to an
    order of 16,384, and on one rank, the cuSOLVER of one. What "auto" computes on several GPUs is always checked.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        b: n × n and positive definite, for the generalized problem; None: the identity. It keeps its values.
        lower: read the lower triangles of A and B, not the upper.
        subset_by_index: the first and the last eigenvalue that are wanted, from 0; None: all.
        eigvals_only: whether to compute no eigenvectors.
        check: whether to check the eigenvectors as ``pb.verify`` does. If they are wrong, or not found, the next
            algorithm computes them, on all ranks: libraries have had faults in which the eigenvalues alone were right.
        algo: "auto", or the name of an algorithm.
        uplo: "L" or "U", as NumPy's: the triangles that are read, in place of ``lower``.

    Returns:
        The eigenvalues in ascending order, the same real array on every rank, and V, whose columns are the
        eigenvectors: a new matrix in the layout of A. With ``eigvals_only`` the eigenvalues alone.

    Raises:
        FactorizationError: the library's iteration does not converge, B is not positive definite, or no algorithm's
            eigenvectors pass the check.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it, or no library is found; the message says which to install.

    Source: LAPACK, ?SYEVD, ?HEEVD and ?SYGVD; ScaLAPACK, P?SYEVD and P?SYNTRD; ELPA, elpa_eigenvectors; cuSOLVERMp,
    cusolverMpSyevd.

    Example:
        >>> a = ctx.scatter(np.array([[2.0, 1], [1, 2]]), block=1)
        >>> w, v = pb.linalg.eigh(a)
        >>> w.round(6).tolist(), round(float((a @ v)[:, :1].norm()), 6)
        ([1.0, 3.0], 1.0)

    See Also:
        eigvalsh, svd.
    """
    how: dict[str, Any] = {
        "lower": lower,
        "subset_by_index": subset_by_index,
        "eigvals_only": eigvals_only,
        "check": check,
        "algo": algo,
        "uplo": uplo,
    }
    return _Eigh(a=a, **how).run() if b is None else _generalized(a, b, how)


def eigvalsh(
    a: Matrix,
    b: Matrix | None = None,
    *,
    lower: bool = True,
    subset_by_index: Sequence[int] | None = None,
    algo: str = "auto",
    uplo: Uplo | None = None,
) -> Values:
    """Return the eigenvalues that ``eigh`` returns, without eigenvectors. Collective over the context.

    Args:
        a, b, lower, subset_by_index, algo, uplo: as for ``eigh``.

    Raises:
        FactorizationError, ArgumentError, RankMismatchError, UnsupportedError: as ``eigh`` does.

    Example:
        >>> a = ctx.scatter(np.array([[2.0, 1], [1, 2]]), block=1)
        >>> pb.linalg.eigvalsh(a).round(6).tolist()
        [1.0, 3.0]

    See Also:
        eigh.
    """
    if b is None:
        values: Values = _Eigvalsh(
            a=a, lower=lower, subset_by_index=subset_by_index, algo=algo, uplo=uplo
        ).run()
        return values
    return eigh(a, b, lower=lower, subset_by_index=subset_by_index, eigvals_only=True, algo=algo, uplo=uplo)


def eigh_into(a: Matrix, out: Matrix | None, lower: bool, subset: tuple[int, int] | None = None) -> Values:
    """Return the eigenvalues of A, all or those of a subset, and write the eigenvectors to ``out``. Collective."""
    only = out is None
    how: dict[str, Any] = {"lower": lower, "eigvals_only": only, "check": False, "algo": "auto"}
    found = _Eigh(a=a, subset_by_index=subset, out=out, **how).run()
    values: Values = found if only else found[0]
    return values


class _Eigh(FactorizationCall[Any]):
    """A call of ``eigh``."""

    name = "eigh"
    matrices = ("a", "b", "out")
    optional = ("b", "out")

    def __init__(self, *, subset_by_index: Any = None, uplo: Any = None, **arguments: Any) -> None:
        self._subset, self._malformed = None, ""
        if one_of(uplo, "LU"):
            arguments["lower"] = one_of(uplo, "L")
        elif uplo is not None:
            self._malformed = f"uplo: expected 'L' or 'U', got {short_repr(uplo)}"
        arguments.update({name: flag(arguments[name]) for name in ("lower", "eigvals_only", "check")})
        if subset_by_index is not None:
            try:
                start, stop = (operator.index(each) for each in subset_by_index)
                self._subset = start, stop
            except Exception:  # noqa: BLE001 - the user's code
                self._malformed = (
                    f"subset_by_index: expected a pair of integers, got {short_repr(subset_by_index)}"
                )
        first, last = self._subset or (None, None)
        super().__init__(**arguments, first=first, last=last, malformed=self._malformed)

    def check(self) -> None:
        a = self["a"]
        self.check_matrix("a")
        self.check_flags("lower", "eigvals_only", "check")
        if self.how["check"] is True and self.how["eigvals_only"] is True:
            self.wrong("check: expected False with eigvals_only: there are no eigenvectors to check")
        if self.given["b"] is not None:
            self.check_second()
        if self._malformed:
            self.wrong(self._malformed)
        elif self._subset is not None and not 0 <= self._subset[0] <= self._subset[1] < a.shape[0]:
            self.wrong(
                f"subset_by_index: expected 0 <= first <= last < {a.shape[0]}, got {short_repr(self._subset)}"
            )
        if not self.faults:
            self.check_like("out", "a", self._shape)

    def check_second(self) -> None:
        """Raise UnsupportedError: this call has no B. Local."""
        raise UnsupportedError("eigh: a generalized problem is several calls: it has no plan of its own")

    @property
    def _shape(self) -> tuple[int, int]:
        n = self["a"].shape[0]
        return n, n if self._subset is None else self._subset[1] - self._subset[0] + 1

    def new(self) -> Matrix | None:
        if self.how["eigvals_only"]:
            return None
        return self.out_or_new(replace(self["a"].descriptor, shape=self._shape, ld=None))

    def roles(self) -> Roles:
        options = {"conjugate": self.upper, "subset": self._subset}
        return Roles("eigh", self["a"], d=self.made, turned="a" * self.upper, options=options)

    def end(self, found: Found) -> tuple[Values, Matrix] | Values:
        a, vectors, lower = self["a"], self.made, self.how["lower"]
        check: Callable[..., Verification] | None = of_eigenpairs if self.how["check"] else None
        if found.doubtful and check is None and self.how["algo"] == "auto":
            check = _glance
        if found.info and check is None:
            self.failed(found.info, f"has eigenvalues that the library does not find: INFO is {found.info}")
        if check is None or vectors is None:
            assert found.values is not None
            return found.values if vectors is None else (found.values, vectors)

        def again(algo: str) -> tuple[Values, Matrix]:
            how = {"lower": lower, "eigvals_only": False, "check": False, "algo": algo}
            pairs: tuple[Values, Matrix] = _Eigh(a=a, out=vectors, subset_by_index=self._subset, **how).run()
            return pairs

        pairs = None if found.values is None else (found.values, vectors)
        return _confirmed(self, pairs, lambda pairs: check(a, *pairs, lower), again)


def _confirmed(
    call: FactorizationCall[Any],
    found: T | None,
    check: Callable[[T], Verification],
    again: Callable[[str], T],
) -> T:
    """Return what passes a check: what was found, if anything was, or what another algorithm finds. Collective."""
    error = Verification(math.inf, 0.0) if found is None else check(found)
    if found is not None and error:
        return found
    verdicts = survey(call.ctx.engine, call.problem(), Options(algo=call.how["algo"]))
    failed = {name: error for name, verdict in verdicts.items() if verdict.taken}
    for name in [each for each in verdicts if each not in failed]:
        try:
            found = again(name)
        except UnsupportedError:  # every rank's
            continue
        except FactorizationError:  # likewise
            failed[name] = error
            continue
        failed[name] = check(found)
        if failed[name]:
            logger.warning(
                "%s: vectors of %s were wrong, those of %s are right", call.name, next(iter(failed)), name
            )
            return found
    with call.ctx.agreement(call.name):
        texts = ", ".join(f"{name} {each.error:.1e}" for name, each in failed.items())
        raise FactorizationError(
            f"{call.name}: the vectors are wrong, or not found, by every algorithm; relative errors: {texts}"
        )
    raise AssertionError


def _glance(a: Matrix, w: Values, v: Matrix, lower: bool) -> Verification:
    """Return whether eigenpairs are right, by products with a few vectors on the ranks' devices. Collective."""
    times = partial(level3.hemm if a.dtype.kind == "c" else level3.symm, a, uplo="L" if lower else "U")
    size = a.norm("inf", uplo="L" if lower else "U", kind="hermitian")
    return _glanced(a, size, w, ((v, "N"),), (times,))


def _glance_singular(a: Matrix, u: Matrix, s: Values, vh: Matrix) -> Verification:
    """Return whether singular values and vectors are right, likewise. Collective."""
    times = partial(matmul, a), partial(matmul, a, op_a="C")
    return _glanced(a, a.norm("inf"), s, ((vh, "C"), (u, "N")), times)


def _glanced(
    a: Matrix,
    size: float,
    values: Values,
    sides: Sequence[tuple[Matrix, Op]],
    times: Sequence[Callable[[Matrix], Matrix]],
) -> Verification:
    """Return whether vectors are orthonormal, and A times those of a side the values times those of the next.

    Collective over the context. ``size`` is A's norm; sides are matrices, each with the op that has the vectors as
    columns and, in ``times``, what multiplies them by A, or its adjoint.
    """
    ctx, n, dtype, (first, op) = a.context, max(a.shape), a.dtype, sides[0]
    layout = MatrixDescriptor(
        (len(values), _VECTORS),
        (first.descriptor.block[op == "N"], _VECTORS),
        first.descriptor.grid,
        dtype=dtype,
    )
    x = random(ctx, Layout(layout, {}), 20, "normal")
    found = [matmul(v, x, op_a=op) for v, op in sides]
    errors = [
        (matmul(v, y, op_a="C" if op == "N" else "N") - x).norm("max")
        for (v, op), y in zip(sides, found, strict=True)
    ]
    size = ctx.comm.bcast(size)  # one rank says whether the rest is computed
    info = np.finfo(dtype)
    if math.sqrt(info.tiny) < size < math.sqrt(info.max):  # else the products may over- or underflow
        if x.local.size:
            rows, _ = layout.global_indices(ctx.rank)
            x.local[...] *= ctx.engine.xp.asarray(values[rows])[:, None]
        for multiply, y, (v, op) in zip(times, found, (*sides[1:], sides[0]), strict=True):
            errors.append((multiply(y) - matmul(v, x, op_a=op)).norm("max") / size)
    bound = _FACTOR * math.sqrt(n) * float(info.eps)
    error = max(each if math.isfinite(each) else math.inf for each in errors)
    told: Verification = ctx.comm.bcast(Verification(0.0 if np.isnan(values).any() else error, bound))
    return told


_VECTORS = 4  # that a glance multiplies with
_FACTOR = 100.0  # times what rounding explains


def _generalized(a: Matrix, b: Matrix, how: dict[str, Any]) -> tuple[Values, Matrix] | Values:
    """Return what ``eigh`` returns for A and B: by the Cholesky factor of B and a standard problem. Collective."""
    call = _Pair(a=a, b=b, **how)
    ctx = call.ctx
    agree_after(False, partial(ctx.agreement, "eigh"), call.read)
    lower = bool(call.how["lower"])
    uplo: Uplo = "L" if lower else "U"
    found: tuple[Values, Matrix] | Values
    with ctx.running("eigh", checks=False):
        whole = whole_of(a, lower, hermitian=True)
        if not math.isfinite(b.norm("max", uplo=uplo)):
            whole *= math.nan
            found = _Eigh(a=whole, **how).run()
            return found
        try:
            factor = cholesky(b, lower)
        except FactorizationError as error:
            with ctx.agreement("eigh"):
                raise FactorizationError.at(
                    error.index, f"eigh: b: {str(error).partition(': ')[2]}"
                ) from None
        inner: Op = "N" if lower else "C"
        outer: Op = "C" if lower else "N"
        level3.trsm(factor, whole, uplo=uplo, op_a=inner, out=whole)
        level3.trsm(factor, whole, side="R", uplo=uplo, op_a=outer, out=whole)
        found = _Eigh(a=whole, **how).run()
        if isinstance(found, tuple):
            level3.trsm(factor, found[1], uplo=uplo, op_a=outer, out=found[1])
            if how["check"]:
                seen = of_eigenpairs(a, *found, lower, b, _condition(b, factor, uplo))
                with ctx.agreement("eigh"):
                    if not seen:
                        raise FactorizationError(
                            f"eigh: the eigenvectors of A and B are wrong; relative error: {seen.error:.1e}"
                        )
        return found


def condition_of(b: Matrix, lower: bool) -> float:
    """Return about the condition of a positive definite matrix, by its Cholesky factor. Collective over the context.

    Only its triangle is read. Of another matrix it is 1.
    """
    try:
        factor = cholesky(b, lower)
    except FactorizationError:  # every rank's
        return 1.0
    return _condition(b, factor, "L" if lower else "U")


def _condition(b: Matrix, factor: Matrix, uplo: Uplo) -> float:
    """Return about the condition of B: how much its inverse makes of random vectors. Collective over the context."""
    layout = replace(b.descriptor, shape=(b.shape[0], _VECTORS), ld=None)
    x = random(b.context, Layout(layout, {}), 20, "normal")
    y = x
    for op in ("N", "C") if uplo == "L" else ("C", "N"):
        y = level3.trsm(factor, y, uplo=uplo, op_a=op)
    size = b.norm("inf", uplo=uplo, kind="hermitian")
    found = size * y.norm() / x.norm() if b.shape[0] else 1.0
    return min(max(1.0, found), 0.5 / element_type(b.dtype).roundoff)


class _Eigvalsh(_Eigh):
    """A call of ``eigvalsh``."""

    name = "eigvalsh"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, eigvals_only=True, check=False)


class _Pair(_Eigh):
    """The arguments of ``eigh`` with a second matrix, which are checked; it computes nothing itself."""

    def check_second(self) -> None:
        self.check_matrix("b")
        self.check_like("b", "a")

    def new(self) -> None:
        return None


class SvdResult(NamedTuple):
    """U, the singular values, and V^H. Local."""

    u: Matrix
    s: Values
    vh: Matrix


def svd(a: Matrix, full_matrices: bool = False, *, algo: str = "auto") -> SvdResult:
    """Return the singular value decomposition of a matrix. Collective over the context.

    A = U diag(s) V^H. A is scaled if squares of its elements would over- or underflow. NaN or infinity in A makes all
    results NaN.

    ScaLAPACK computes it, if one is found (see ``docs/solving.md``); up to 200 rows and columns, on up to four ranks up
    to 2,000, and on one rank, the LAPACK of one rank, which tells the others. On GPUs it is the cuSOLVER of one, up to
    256 rows and columns, on several GPUs up to 2,048; above that cuSOLVERMp 0.9 or newer on all, if there is one, whose
    vectors are checked. Above 16,384 a single GPU takes cuSOLVER, which needs less memory.

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

    Source: LAPACK, ?GESDD; ScaLAPACK, P?GESVD; cuSOLVERMp, cusolverMpGesvd.

    Example:
        >>> a = ctx.scatter(np.array([[0.0, 3], [4, 0]]), block=1)
        >>> u, s, vh = pb.linalg.svd(a)
        >>> s.round(6).tolist(), u.shape, vh.shape
        ([4.0, 3.0], (2, 2), (2, 2))

    See Also:
        svdvals, eigh.
    """
    return _Svd(a=a, full_matrices=full_matrices, algo=algo).run()


def svdvals(a: Matrix, *, algo: str = "auto") -> Values:
    """Return the singular values that ``svd`` returns, without vectors. Collective over the context.

    Args:
        a, algo: as for ``svd``.

    Raises:
        FactorizationError, ArgumentError, RankMismatchError, UnsupportedError: as ``svd`` does.

    Example:
        >>> a = ctx.scatter(np.array([[0.0, 3], [4, 0]]), block=1)
        >>> pb.linalg.svdvals(a).round(6).tolist()
        [4.0, 3.0]

    See Also:
        svd.
    """
    return _Svdvals(a=a, algo=algo).run()


def svd_into(a: Matrix, u: Matrix | None, vh: Matrix | None) -> Values:
    """Return the singular values of A, and write U and V^H, or what of them is wanted. Collective."""
    return _Svdvals(a=a, u=u, vh=vh, algo="auto").run()


class _Singular(FactorizationCall[T]):
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
        a, vh = self["a"], self._vh
        assert vh is not None
        if found.doubtful and self.how["algo"] == "auto":
            result = None if found.values is None else SvdResult(self.written, found.values, vh)
            result = _confirmed(
                self, result, lambda each: _glance_singular(a, *each), lambda algo: svd(a, algo=algo)
            )
        else:
            result = SvdResult(self.written, self.values_of(found), vh)
        if self.how["full_matrices"]:
            result = SvdResult(_completed(result.u), result.s, _completed(result.vh.T).T)
        return result


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


CALLS = (_Eigh, _Eigvalsh, _Svd, _Svdvals)
"""The calls that can be planned."""
