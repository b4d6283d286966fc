# SPDX-License-Identifier: Apache-2.0
"""Systems of equations."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np

from ..comm import agree_after
from ..dtypes import plain
from ..engines.product import Found
from ..errors import UnsupportedError, short_repr
from ..layout.grid import one_of
from ..logs import logger
from .assumptions import COMPUTED, Assume, AssumingCall
from .factorization_call import FactorizationCall, Matrix, Roles, flag, op_of
from .refinement import REFINED, SINGLE, Refinement, refined

if TYPE_CHECKING:
    from ..layout.schemes import Op
    from .factorization_call import Trans


@overload
def solve(
    a: Matrix,
    b: Matrix,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    transposed: bool | Trans = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
    algo: str = "auto",
    refine: Literal["float32", "tf32"] | None = None,
    return_info: Literal[False] = False,
) -> Matrix: ...
@overload
def solve(
    a: Matrix,
    b: Matrix,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    transposed: bool | Trans = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
    algo: str = "auto",
    refine: Literal["float32", "tf32"],
    return_info: Literal[True],
) -> tuple[Matrix, Refinement]: ...
def solve(
    a: Matrix,
    b: Matrix,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    transposed: bool | Trans = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
    algo: str = "auto",
    refine: Literal["float32", "tf32"] | None = None,
    return_info: bool = False,
) -> Matrix | tuple[Matrix, Refinement]:
    """Return X with A X = B. Collective over the context.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        b: n × m, in any layout.
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
    given: dict[str, Any] = {"a": a, "b": b, "assume_a": assume_a, "out": out, "algo": algo}
    given |= {"lower": lower, "transposed": transposed, "unit_diagonal": unit_diagonal}
    if refine is None and return_info is False:
        return _Solve(**given).run()
    x, info = _RefinedSolve(**given, refine=refine, return_info=return_info).refined()
    return (x, info) if return_info else x


def solve_triangular(
    a: Matrix,
    b: Matrix,
    trans: Trans = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return X with op(A) X = B for a triangular matrix A. Collective over the context.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. The other triangle is not read.
        b: n × m, in any layout.
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
    return _SolveTriangular(
        a=a, b=b, trans=trans, lower=lower, unit_diagonal=unit_diagonal, out=out, algo=algo
    ).run()


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


CALLS: dict[str, type[FactorizationCall[Any]]] = {
    "solve": _Solve,
    "solve_triangular": _SolveTriangular,
}
"""The calls that can be planned, by function."""
