# SPDX-License-Identifier: Apache-2.0
"""Systems of equations and inverses, of matrices of which a call is told the kind: definite, triangular, symmetric."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from ..comm import agree_after
from ..dtypes import plain
from ..engines.product import Found
from ..errors import UnsupportedError, short_repr
from ..layout.factor_problem import ASSUMED, FactorRoutine
from ..layout.grid import one_of
from ..logs import logger
from ..matrix.columns import by_column, is_vector
from ..matrix.distributed import DistributedMatrix
from .factorization_call import FactorizationCall, Matrix, Pivots, Right, Roles, flag, level_of_caller, op_of
from .general import cond_estimate
from .refinement import REFINED, SINGLE, Refinement, refined

if TYPE_CHECKING:
    from ..layout.schemes import Op
    from .factorization_call import Trans

Assume = Literal[
    "gen",
    "general",
    "sym",
    "symmetric",
    "her",
    "hermitian",
    "pos",
    "positive definite",
    "upper triangular",
    "lower triangular",
]


_TRIANGLES = {"lower triangular": True, "upper triangular": False}

COMPUTED = ("gen", "pos", "tri")


class AssumingCall(FactorizationCall[Matrix]):
    """A call that is told what kind of matrix A is.

    Attributes:
        kind: that kind, one of ``ASSUMED``; None if it is none.
    """

    warns = False  # of ill-conditioned matrices
    triangular = False  # whether the function is for triangles alone, and ``lower`` says which

    def __init__(
        self, *, assume_a: object, lower: object, unit_diagonal: object = False, **arguments: Any
    ) -> None:
        name = plain(assume_a) if isinstance(assume_a, str) else ""
        self.kind = ASSUMED.get(name)
        if not self.triangular:
            lower = _TRIANGLES.get(name, lower)
        flags = {"lower": flag(lower), "unit_diagonal": flag(unit_diagonal)}
        super().__init__(assume_a=assume_a, **flags, **arguments)

    def run(self) -> Matrix:
        """Compute. Collective over the context."""
        self.make_whole()
        return super().run()

    def make_whole(self) -> None:
        """Make a matrix whole of which one triangle is known, if it has no routine. Collective over the context."""
        a, lower = self.given["a"], self.how["lower"]
        legal = isinstance(a, DistributedMatrix) and a.shape[0] == a.shape[1] and isinstance(lower, bool)
        if self.kind in ("sym", "her") and legal:
            self.given = {**self.given, "a": whole_of(self["a"], lower, hermitian=self.kind == "her")}
            self.kind, self.how = "gen", {**self.how, "assume_a": "gen"}

    def check(self) -> None:
        """Note what is wrong with A, or with what is assumed of it. Local."""
        self.check_matrix("a")
        self.check_flags("lower", "unit_diagonal")
        if self.kind is None:
            known = ", ".join(map(repr, ("gen", "pos", "sym", "her", *_TRIANGLES)))
            self.wrong(f"assume_a: expected one of {known}, got {short_repr(self.how['assume_a'])}")
        elif self.kind not in COMPUTED and not self.faults:
            raise UnsupportedError(
                f"{self.name}: there is no plan with assume_a={self.how['assume_a']!r}: plan it with 'gen' and the "
                "whole matrix"
            )

    @property
    def upper(self) -> bool:
        """Whether A is known by its upper triangle."""
        return self.kind != "gen" and super().upper

    @property
    def unit(self) -> bool:
        """Whether the diagonal is taken as ones."""
        return self.how["unit_diagonal"] is True

    @property
    def diag(self) -> str:
        """That as LAPACK calls it; "" if ``unit_diagonal`` is neither True nor False."""
        return "NU"[self.unit] if isinstance(self.how["unit_diagonal"], bool) else ""

    def end(self, found: Found) -> Matrix:
        """Return X, with a warning if A is ill-conditioned. Collective over the context."""
        if found.info and self.kind == "pos":
            self.not_positive(found.info)
        x = super().end(found)
        if self.warns and found.diagonal is not None and found.diagonal.size:
            self._warn(found.diagonal)
        return x

    def _warn(self, diagonal: NDArray[Any]) -> None:
        """Warn if A is ill-conditioned: found by an estimate if the factor's diagonal makes it likely. Collective."""
        n, eps = len(diagonal), float(np.finfo(diagonal.dtype).eps)
        with np.errstate(all="ignore"):
            sizes = abs(diagonal)
            ratio = sizes.min() / sizes.max()
        likely = min(max(math.sqrt(eps), eps * n * n), 0.1 / n)
        if not (ratio if self.kind == "gen" else ratio * ratio) < likely:
            return
        a = self["a"]
        estimate = cond_estimate(a if self.kind == "gen" else whole_of(a, self.uplo == "L", hermitian=True))
        if estimate > 1 / eps:
            from scipy.linalg import LinAlgWarning

            with self.ctx.agreement(self.name):
                text = (
                    f"{self.name}: ill-conditioned matrix (rcond={1 / estimate:.3g}): X may not be accurate"
                )
                warnings.warn(text, LinAlgWarning, stacklevel=level_of_caller())


def whole_of(a: Matrix, lower: bool, *, hermitian: bool) -> Matrix:
    """Return the matrix that a triangle describes. Collective over the context."""
    triangle = a.tril() if lower else a.triu()
    beside = a.tril(-1) if lower else a.triu(1)
    diagonal = triangle.triu() if lower else triangle.tril()
    if not hermitian:
        return triangle + beside.T
    return beside + beside.H + diagonal.real


@overload
def solve(
    a: Matrix,
    b: Right,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    transposed: bool | Trans = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
    algo: str = "auto",
    refine: Literal["float32", "tf32"] | None = None,
    return_info: Literal[False] = False,
) -> Right: ...
@overload
def solve(
    a: Matrix,
    b: Right,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    transposed: bool | Trans = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
    algo: str = "auto",
    refine: Literal["float32", "tf32"],
    return_info: Literal[True],
) -> tuple[Right, Refinement]: ...
def solve(
    a: Matrix,
    b: Right,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    transposed: bool | Trans = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
    algo: str = "auto",
    refine: Literal["float32", "tf32"] | None = None,
    return_info: bool = False,
) -> Right | tuple[Right, Refinement]:
    """Return X with A X = B. Collective over the context.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        b: n × m, in any layout; or a NumPy vector of n numbers that every rank has alike.
        assume_a: "gen": any matrix, by LU with partial pivoting; "pos": symmetric or Hermitian and positive definite,
            by Cholesky; "upper triangular", "lower triangular"; "sym" and "her": symmetric and Hermitian, of which
            one triangle is read, and the whole made and solved as "gen". SciPy's long names, too.
        lower: with "pos", "sym" and "her": read the lower triangle of A, not the upper.
        transposed: solve with the transpose of A; "C": with its conjugate transpose.
        unit_diagonal: of a triangular A: the diagonal is taken as ones and not read.
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.
        algo: "auto", or the name of an algorithm.
        refine: "float32": factor A in single precision, complex matrices in complex64, and refine X until the residual
            of each column is as small as that of float64 factors. If that fails, since A is singular in single
            precision or its condition exceeds about 1e7, A is factored in its own type after all. "tf32": on GPUs the
            factorization's products round to the 11 bits of TF32, which allow conditions up to about 1e3.
        return_info: with ``refine``: return ``(X, info)``; ``info`` is a :class:`Refinement`.

    X is a vector, which every rank gets, if B is one.

    If the reciprocal of A's condition number in the 1-norm is estimated below ``numpy.finfo(a.dtype).eps``, every rank
    gives a ``scipy.linalg.LinAlgWarning``. It is estimated, by ``cond_estimate``, only where the diagonal of the factor
    makes that likely: matrices exist, in single precision many large ones, that are ill-conditioned without a warning.

    Raises:
        FactorizationError: A is exactly singular, or not positive definite, at ``index``; then X is not computed.
            B keeps its values, also as ``out``; another ``out`` may have been written to.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GESV, ?POSV, ?TRTRS, DSGESV and DSPOSV; SciPy, scipy.linalg.solve.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> b = ctx.scatter(np.array([[8.0], [12]]), block=1)
        >>> x = pb.linalg.solve(a, b, assume_a="pos")
        >>> x.allgather().round(6).tolist()
        [[1.0], [2.0]]

    See Also:
        lu_factor and cho_factor, to solve again and again; solve_triangular, lstsq.
    """
    if is_vector(b):
        return cast("Right", by_column(solve, a, locals()))
    given: dict[str, Any] = {"a": a, "b": b, "assume_a": assume_a, "out": out, "algo": algo}
    given |= {"lower": lower, "transposed": transposed, "unit_diagonal": unit_diagonal}
    if refine is None and return_info is False:
        return cast("Right", _Solve(**given).run())
    found, info = _RefinedSolve(**given, refine=refine, return_info=return_info).refined()
    x = cast("Right", found)
    return (x, info) if return_info else x


def solve_triangular(
    a: Matrix,
    b: Right,
    trans: Trans = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Right:
    """Return X with op(A) X = B for a triangular matrix A. Collective over the context.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. The other triangle is not read.
        b: n × m, in any layout; or a vector, as for ``solve``.
        trans: 0 or "N" for A, 1 or "T" for its transpose, 2 or "C" for its conjugate transpose.
        lower: A is lower triangular, not upper.
        unit_diagonal: the diagonal is taken as ones and not read.
        out, algo: as for ``solve``.

    Raises:
        FactorizationError: A is exactly singular, at ``index``; then X is not computed.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?TRTRS; SciPy, scipy.linalg.solve_triangular.

    Example:
        >>> a = ctx.scatter(np.array([[2.0, 0], [1, 2]]), block=1)
        >>> b = ctx.scatter(np.array([[2.0], [5]]), block=1)
        >>> x = pb.linalg.solve_triangular(a, b, lower=True)
        >>> x.allgather().round(6).tolist()
        [[1.0], [2.0]]

    See Also:
        solve; pb.blas.trsm.
    """
    if is_vector(b):
        return cast("Right", by_column(solve_triangular, a, locals()))
    return cast(
        "Right",
        _SolveTriangular(
            a=a, b=b, trans=trans, lower=lower, unit_diagonal=unit_diagonal, out=out, algo=algo
        ).run(),
    )


def solve_keeping(a: Matrix, b: Matrix, factor: Matrix, *, lower: bool, out: Matrix | None = None) -> Matrix:
    """Do as ``solve`` with a positive definite A, and write its Cholesky factor to ``factor``. Collective."""
    return _Solve(a=a, b=b, assume_a="pos", lower=lower, factor=factor, out=out, algo="auto").run()


class _Solve(AssumingCall):
    """A call of ``solve``, or of ``solve_keeping``."""

    name = "solve"
    warns = True
    matrices = ("a", "b", "factor", "out")
    optional = ("factor", "out")
    like = "b"
    option = "transposed"  # the argument that says which transpose of A is meant

    def __init__(
        self,
        *,
        transposed: object = False,
        refine: object = None,
        return_info: object = False,
        **arguments: Any,
    ) -> None:
        super().__init__(**{self.option: op_of(transposed)}, **arguments)
        self.refine, self.return_info = plain(refine), flag(return_info)

    @property
    def op(self) -> str:
        """Which transpose of A is meant: "N", "T" or "C"."""
        given = self.how[self.option]
        return given if isinstance(given, str) else ""

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        a, b, factor, _ = self.given.values()
        if b is None or factor is not None or self.kind not in COMPUTED:
            return None
        if self.kind != "tri" and (self.unit or self.op != "N"):
            return None
        routine = {"gen": "gesv", "pos": "posv", "tri": "trtrs"}[self.kind]
        return self.at_once(routine, a, b, op_a=self.op, uplo=self.uplo, diag=self.diag)

    def check(self) -> None:
        super().check()
        self.check_trans(self.option)
        self.check_right("b", "a")
        self.check_like("factor", "a")
        self.check_like("out", "b")
        self.check_refine()

    def check_refine(self) -> None:
        """Raise UnsupportedError if it is wanted: this call does not refine. Local."""
        if self.refine is not None or self.return_info is not False:
            raise UnsupportedError("solve: a refined solve is several calls: it has no plan of its own")

    def roles(self) -> Roles:
        kind, op, upper = self.kind, self.op, self.upper
        matrices = self["a"], self["b"], self.given["factor"], self.written, "ac" * upper
        if kind == "gen":
            return Roles("lu", *matrices, {"op": op})
        if kind == "pos":
            # The transpose of a Hermitian matrix is its conjugate.
            return Roles("cholesky", *matrices, {"conjugate": upper != (op == "T")})
        solved = op if not upper else "T" if op == "N" else "N"
        options = {"op": solved, "unit": self.unit, "conjugate": upper and op == "C"}
        return Roles("triangular", *matrices, options)


class _RefinedSolve(_Solve):
    """A call of ``solve`` with ``refine``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.how = {**self.how, "refine": self.refine, "return_info": self.return_info}

    def check_refine(self) -> None:
        """Note what does not fit a refined solve."""
        self.check_flags("return_info")
        dtype = self["a"].dtype.name
        if not one_of(self.refine, REFINED):
            expected = ("" if self.refine is None else "None, ") + "'float32' or 'tf32'"
            self.wrong(f"refine: expected {expected}, got {short_repr(self.refine)}")
        elif dtype not in SINGLE:
            self.fault(f"a: expected {' or '.join(SINGLE)} with refine, got {dtype}")
        elif self.kind == "tri":
            self.wrong("assume_a: expected a matrix that is factored with refine, not a triangle")

    def new(self) -> Matrix | None:
        return self.given["out"]

    def refined(self) -> tuple[Matrix, Refinement]:
        """Return X, and how it was found. Collective over the context."""
        self.make_whole()
        agree_after(False, partial(self.ctx.agreement, self.name), self.read)
        a, b, lower, algo = self["a"], self["b"], self.how["lower"], self.how["algo"]
        # In this order, so that it is the user's state for the calls inside.
        with np.errstate(all="ignore"), self.ctx.running(self.name, checks=False):
            op = cast("Op", self.op)
            positive, coarse = self.kind == "pos", self.refine == "tf32"
            x, info = refined(a, b, positive=positive, lower=lower, op=op, algo=algo, coarse=coarse)
            if x is None:
                logger.info("solve: A is factored in its own type, not refined: %s", info.fallback)
                how: dict[str, Any] = {"assume_a": self.kind, "lower": lower, "transposed": op, "algo": algo}
                return _Solve(a=a, b=b, out=self.made, **how).run(), info
            if self.made is not None:
                self.made[:, :] = x
                x = self.made
        return x, info


class _SolveTriangular(_Solve):
    """A call of ``solve_triangular``."""

    name = "solve_triangular"
    option = "trans"
    triangular = True

    def __init__(self, *, trans: object, **arguments: Any) -> None:
        super().__init__(assume_a="lower triangular", transposed=trans, **arguments)


def inv(
    a: Matrix,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return the inverse of a matrix, all of it whatever ``assume_a`` says. Collective over the context.

    To solve a system, ``solve`` takes a third of the operations and is more accurate.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout.
        assume_a, lower: as for ``solve``.
        unit_diagonal: of a triangular matrix: the diagonal is taken as ones and not read.
        out: where to write the inverse, which may be ``a``; by default a new matrix in the layout of A.
        algo: "auto", or the name of an algorithm.

    Raises:
        FactorizationError: A is exactly singular, or not positive definite, at ``index``.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GETRI, ?POTRI, ?TRTRI; NumPy, numpy.linalg.inv.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> (16 * pb.linalg.inv(a)).allgather().round(6).tolist()
        [[5.0, -2.0], [-2.0, 4.0]]

    See Also:
        solve, which is faster and more accurate than a product with the inverse.
    """
    return _Inverse(
        a=a, assume_a=assume_a, lower=lower, unit_diagonal=unit_diagonal, out=out, algo=algo
    ).run()


def inverse_of(
    a: Matrix,
    pivots: Pivots | None = None,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
) -> Matrix:
    """Do as LAPACK with a factor, and ``pivots`` that are legal and equal everywhere. Collective over the context.

    Of a triangular or positive definite matrix only the triangle is written, without a diagonal of ones.
    """
    how: dict[str, Any] = {"lower": lower, "unit_diagonal": unit_diagonal, "algo": "auto"}
    return _Inverse(a=a, assume_a=assume_a, pivots=pivots, factored=True, out=out, **how).run()


class _Inverse(AssumingCall):
    """A call of ``inv`` or ``inverse_of``."""

    name = "inv"

    def __init__(self, *, pivots: Pivots | None = None, factored: bool = False, **arguments: Any) -> None:
        super().__init__(factored=factored, **arguments)
        self._pivots = pivots

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        a, kind = self.given["a"], self.kind
        if kind not in COMPUTED or (kind != "tri" and self.unit):
            return None
        if self.how["factored"]:
            routine = {"gen": "getri", "pos": "potri", "tri": "trtri"}[kind]
        else:
            routine = {"gen": "getrf getri", "pos": "potrf potri", "tri": "trtri laset"}[kind]
        return self.at_once(routine, a, pivots=self._pivots, uplo=self.uplo, diag=self.diag)

    def check(self) -> None:
        super().check()
        self.check_like("out", "a")

    def new(self) -> Matrix:
        return self.out_or_new(self["a"].descriptor, zeros=self.how["factored"])

    def roles(self) -> Roles:
        kind, upper, options = self.kind, self.upper, {"factored": self.how["factored"], "inverse": True}
        routine: FactorRoutine = "triangular" if kind == "tri" else "lu" if kind == "gen" else "cholesky"
        options |= {"unit": self.unit} if kind == "tri" else {"conjugate": upper}
        return Roles(routine, self["a"], d=self.written, turned="ad" * upper, options=options)


CALLS = (_Solve, _SolveTriangular, _Inverse)
"""The calls that can be planned."""
