# SPDX-License-Identifier: Apache-2.0
"""Factorisations, and systems of equations: Cholesky, LU with partial pivoting, QR, and what is solved with them.

Matrices of a call may have any layouts: each is moved to panels, computed with there, and moved back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from .dtypes import ELEMENT_TYPES
from .engines.dense.cholesky import CholeskyJob
from .engines.protocol import Engine
from .errors import ArgumentError, FactorisationError, LayoutError, PblasmpError, faults_text
from .handle import Handle
from .layout import MatrixDescriptor
from .layout.grid import one_of
from .matrix import DistributedMatrix
from .plans import check_operands, context_of
from .runtime import Runtime

if TYPE_CHECKING:
    from types import TracebackType

    from .layout.level3 import Uplo

__all__ = ["cho_solve", "cholesky", "solve"]

Matrix = DistributedMatrix
Assume = Literal["gen", "pos", "tri"]
T = TypeVar("T")

_OPTIONAL = {"out", "factor"}
_TYPES = tuple(name for name, row in ELEMENT_TYPES.items() if row.blas)


def cholesky(a: Matrix, uplo: Uplo = "L", out: Matrix | None = None) -> Matrix:
    """Return the Cholesky factor of a positive definite matrix. Collective over the context.

    A = L L^H with ``uplo="L"``, A = U^H U with ``uplo="U"``. Only that triangle of A is read and only that of the
    result is written: outside it ``out`` keeps its values, and a new matrix has zeros.

    Args:
        a: n × n, symmetric or Hermitian: float32, float64, complex64 or complex128, in any layout.
        uplo: "L" or "U".
        out: where to write the factor, which may be ``a``; by default a new matrix in the layout of A.

    Raises:
        FactorisationError: A is not positive definite; ``index`` is the last row, from 0, of the first leading
            principal minor that is not. The columns of L (rows of U) that were finished before are in ``out``.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?POTRF.
    """
    call = _Call("cholesky", {"a": a, "out": out}, {"uplo": uplo})

    def check() -> None:
        call.square("a")
        call.letter("uplo", "LU")
        call.like("out", "a")

    with call:
        result = call.agree(check, lambda: call.result(out, a.descriptor, zeros=True))
        upper = uplo == "U"
        of, to = (_turned(x.descriptor, upper) for x in (a, result))
        job = call.job(lambda engine: CholeskyJob(engine, of, to, conjugate=upper))
        info = job.run(_turned(a.local, upper), _turned(result.local, upper))
        if info:
            call.not_positive(info)
    return result


def cho_solve(factor: Matrix, b: Matrix, uplo: Uplo = "L", out: Matrix | None = None) -> Matrix:
    """Return X with A X = B for a matrix A that ``cholesky`` has factored. Collective over the context.

    Args:
        factor: n × n: L or U, of which the other triangle is not read.
        b: n × m.
        uplo: "L" or "U": which of them ``factor`` is.
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.

    Raises:
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?POTRS.
    """
    call = _Call("cho_solve", {"factor": factor, "b": b, "out": out}, {"uplo": uplo})

    def check() -> None:
        call.square("factor")
        call.letter("uplo", "LU")
        call.right("b", "factor")
        call.like("out", "b")

    with call:
        result = call.agree(check, lambda: call.result(out, b.descriptor))
        upper = uplo == "U"
        of, right, to = _turned(factor.descriptor, upper), b.descriptor, result.descriptor
        job = call.job(
            lambda engine: CholeskyJob(engine, of, None, right, to, factored=True, conjugate=upper)
        )
        job.run(_turned(factor.local, upper), None, b.local, result.local)
    return result


def solve(
    a: Matrix,
    b: Matrix,
    assume: Assume = "gen",
    *,
    uplo: Uplo = "L",
    factor: Matrix | None = None,
    out: Matrix | None = None,
) -> Matrix:
    """Return X with A X = B. Collective over the context.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values unless it is ``factor``.
        b: n × m, in any layout.
        assume: "pos": A is symmetric or Hermitian, and positive definite.
        uplo: with "pos", which triangle of A is read.
        factor: where to write A's factor, too; it may be ``a``.
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.

    Raises:
        FactorisationError: A is not positive definite, see ``cholesky``; then X is not computed.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?POSV.
    """
    given = {"a": a, "b": b, "factor": factor, "out": out}
    call = _Call("solve", given, {"assume": assume, "uplo": uplo})

    def check() -> None:
        call.square("a")
        call.letter("assume", ("pos",))
        call.letter("uplo", "LU")
        call.right("b", "a")
        call.like("factor", "a")
        call.like("out", "b")

    with call:
        result = call.agree(check, lambda: call.result(out, b.descriptor))
        return _solve_positive(call, a, b, result, factor, upper=uplo == "U")


def _solve_positive(
    call: _Call, a: Matrix, b: Matrix, result: Matrix, factor: Matrix | None, *, upper: bool
) -> Matrix:
    """Factor A and solve, on agreed arguments."""
    of, right, to = _turned(a.descriptor, upper), b.descriptor, result.descriptor
    kept = None if factor is None else _turned(factor.descriptor, upper)
    job = call.job(lambda engine: CholeskyJob(engine, of, kept, right, to, conjugate=upper))
    into = None if factor is None else _turned(factor.local, upper)
    info = job.run(_turned(a.local, upper), into, b.local, result.local)
    if info:
        call.not_positive(info)
    return result


def _turned(x: Any, transposed: bool) -> Any:
    """Return a descriptor or an array, or its transpose."""
    return x.T if transposed else x


class _Call:
    """One call: its arguments, what is wrong with them, and the job that the context keeps for such calls.

    A ``with`` block around all that is collective.

    Args:
        name: the function.
        given: its matrices by name; None for those that are left out.
        how: its other arguments.
    """

    def __init__(self, name: str, given: Mapping[str, Matrix | None], how: Mapping[str, Any]) -> None:
        self._name, self._given, self._how = name, given, how
        self._faults: list[str] = []
        self.context: Runtime[Any] = context_of(name, *given.values())

    def __enter__(self) -> None:
        self._running = self.context.running(self._name)
        self._running.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.__exit__(kind, error, trace)

    # -- faults

    def square(self, name: str) -> None:
        """Note that the matrix is not square, or has no type that LAPACK has."""
        x = self._given[name]
        assert x is not None
        if x.dtype.name not in _TYPES:
            self._faults.append(f"{name}: expected one of {', '.join(_TYPES)}, got {x.dtype.name}")
        if x.shape[0] != x.shape[1]:
            self._faults.append(f"{name}: expected a square matrix, got {x.shape[0]} x {x.shape[1]}")

    def right(self, name: str, left: str) -> None:
        """Note that the matrix does not fit on the right of another."""
        x, a = self._given[name], self._given[left]
        assert x is not None
        assert a is not None
        if x.dtype != a.dtype:
            self._faults.append(f"{name}: expected {a.dtype.name} as {left}, got {x.dtype.name}")
        if x.shape[0] != a.shape[1]:
            self._faults.append(f"{name}: {x.shape[0]} rows, but {left} has {a.shape[1]} columns")

    def like(self, name: str, other: str, shape: tuple[int, int] | None = None) -> None:
        """Note that the matrix, if there is one, has not the shape and type of another, or is read-only."""
        x, a = self._given[name], self._given[other]
        assert a is not None
        if x is None:
            return
        shape = a.shape if shape is None else shape
        if (x.shape, x.dtype) != (shape, a.dtype):
            self._faults.append(f"{name}: expected {_words(shape, a.dtype)}, got {_words(x.shape, x.dtype)}")

    def letter(self, name: str, allowed: str | tuple[str, ...]) -> None:
        """Note that an option has a value that it must not have."""
        if not one_of(self._how[name], allowed):
            self._faults.append(f"{name}: expected one of {', '.join(allowed)}, got {self._how[name]!r}")

    # -- what every call does

    def agree(self, check: Callable[[], None], new: Callable[[], T]) -> T:
        """Check the arguments, agree on them, and return what ``new`` does. Collective over the context."""

        def first(facts: dict[str, Any]) -> T:
            check_operands(self.context, tuple(self._given.keys() - _OPTIONAL), self._given)
            self._writable()
            check()
            if self._faults:
                raise LayoutError(faults_text(f"this {self._name}", self._faults))
            facts.update({name: getattr(x, "descriptor", None) for name, x in self._given.items()})
            facts.update(self._how)
            return new()

        def again(_: bool) -> T:
            self._writable()
            return new()

        key = self._key()
        number, made = self.context.calls.agree(lambda: self.context.agreement(self._name), key, again, first)
        if not number:
            self.context.calls.remember(key, True)
        return made

    def _writable(self) -> None:
        for name in ("out", "factor"):
            x = self._given.get(name)
            if x is not None and not getattr(x.local.flags, "writeable", True):
                raise ArgumentError(f"{name}: its local array is read-only")

    def _key(self) -> Hashable:
        """Return all that decides how the call is computed, the same on every rank if the arguments are legal."""
        given: list[object] = list(self._given.values())
        if not all(x is None or (isinstance(x, Handle) and x.context is self.context) for x in given):
            return object()
        described = tuple(None if x is None else x.descriptor for x in self._given.values())
        return self._name, tuple(self._how.items()), described

    def job(self, make: Callable[[Engine], T]) -> T:
        """Return the job for such calls, made by the first. Collective over the context."""
        try:
            found: T = self.context.kept.find_or_make(self._key(), lambda: make(self.context.engine))  # type: ignore[type-var]
        except (PblasmpError, MemoryError) as error:  # the same on every rank
            with self.context.agreement(self._name):
                raise error from None
        return found

    def result(self, out: Matrix | None, d: MatrixDescriptor, *, zeros: bool = False) -> Matrix:
        """Return ``out``, or a new matrix in a layout without padding."""
        if out is not None:
            return out
        made: Matrix = self.context.allocate(replace(d, ld=None))
        if zeros:
            made.local[...] = 0
        return made

    def not_positive(self, info: int) -> NoReturn:
        """Raise the error, as all ranks do."""
        with self.context.agreement(self._name):
            raise FactorisationError.at(
                info - 1,
                f"{self._name}: the matrix is not positive definite: its leading principal minor of order {info}, "
                f"up to index {info - 1}, is not positive",
            )
        raise AssertionError


def _words(shape: tuple[int, int], dtype: Any) -> str:
    return f"{shape[0]} x {shape[1]} of {dtype.name}"
