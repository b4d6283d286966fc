# SPDX-License-Identifier: Apache-2.0
"""A call of a factorization: what all of them check and return."""

from __future__ import annotations

import copy
import hashlib
import sys
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..dtypes import BLAS_TYPES, plain
from ..engines.direct import Asked
from ..engines.product import Found, Product
from ..engines.request import Operands, Options, Task
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    FactorizationError,
    LayoutError,
    UnsupportedError,
    faults_text,
    short_repr,
)
from ..layout import MatrixDescriptor
from ..layout.descriptor import is_integer
from ..layout.factor_problem import FactorProblem, FactorRoutine
from ..layout.grid import one_of
from ..layout.routines import Sizes
from ..logs import logger
from ..matrix.distributed import DistributedMatrix
from ..runtime.handle import Handle
from ..runtime.planned import run
from ..runtime.reading import check_operands, check_writable, comparable, context_of, glance
from ..runtime.user_call import UserCall

Matrix = DistributedMatrix
Pivots = NDArray[np.int64]
Trans = Literal[0, 1, 2, "N", "T", "C"]
T = TypeVar("T")
Right = TypeVar("Right", bound=DistributedMatrix | NDArray[Any])
"""Right-hand sides: a matrix, or a vector that every rank has, and so is the solution."""

_RECTANGULAR = Sizes({"a": "m n", "d": "m n"})
_SQUARE = Sizes({"a": "n n", "d": "n n"})
_SOLVED = Sizes({"a": "n n", "b": "n r", "d": "n r"})
_REFLECTED = Sizes({"a": "n k", "b": "n r", "d": "n r"})


class Roles(NamedTuple):
    """A call as a ``FactorProblem``.

    Attributes:
        routine: the problem's.
        a, b, c, d: its matrices; None for those that it lacks.
        turned: those of them whose transposes are meant.
        options: its other attributes.
    """

    routine: FactorRoutine
    a: Matrix
    b: Matrix | None = None
    c: Matrix | None = None
    d: Matrix | None = None
    turned: str = ""
    options: Mapping[str, Any] = MappingProxyType({})

    def each(self, what: str) -> list[Any]:
        """Return the layout, or the local array, of A, B, C and D; None for those that are missing. Local."""
        found: list[Any] = []
        for name, x in (("a", self.a), ("b", self.b), ("c", self.c), ("d", self.d)):
            its = None if x is None else getattr(x, what)
            found.append(its.T if its is not None and name in self.turned else its)
        return found


class FactorizationCall(UserCall[T]):
    """One call: its arguments, what is wrong with them, and how it is computed. A function is a subclass.

    Args:
        **arguments: the function's, by name.

    Attributes:
        name: of the function.
        matrices: which of its arguments are matrices.
        optional: which of these may be left out: they are written.
        like: the one in whose layout a new result is.
        given: the matrices by name; None for those that are left out.
        how: its other arguments.
        values: more that the ranks must agree on, but that does not decide how the call is computed.
        made: the matrix that the call writes, once the ranks have agreed; None if it writes none.
    """

    keeps_memory = True
    matrices: tuple[str, ...] = ("a", "out")
    optional: tuple[str, ...] = ("out",)
    like = "a"
    values: Mapping[str, str] = MappingProxyType({})
    made: Matrix | None = None
    _pivots: Pivots | None = None
    _tau: NDArray[Any] | None = None

    def __init__(self, **arguments: Any) -> None:
        given: dict[str, Matrix | None] = {name: arguments.pop(name, None) for name in self.matrices}
        self.given: Mapping[str, Matrix | None] = given
        self.how: Mapping[str, Any] = {name: plain(value) for name, value in arguments.items()}
        self.faults: list[str] = []
        self._error: type[ArgumentError] = LayoutError  # what is raised if there are faults
        self.ctx = context_of(self.name, *given.values())

    # -- what a subclass defines

    @abstractmethod
    def check(self) -> None:
        """Note what is wrong with the arguments. Local."""

    def new(self) -> Matrix | None:
        """Return the matrix that the call writes: ``out``, or a new one; None if it writes none. Local."""
        return self.out_or_new(self[self.like].descriptor)

    @abstractmethod
    def roles(self) -> Roles:
        """Return what is computed, on which matrices. Local."""

    def end(self, found: Found) -> T:
        """Return what the function returns, the matrix it writes if not overridden. Collective over the context.

        FactorizationError if the matrix is singular.
        """
        if found.info:
            self.singular(found.info)
        return cast("T", self.written)

    # -- what every call does

    def problem(self) -> FactorProblem:
        """Return what is computed. Local."""
        roles = self.roles()
        return FactorProblem(roles.routine, *roles.each("descriptor"), **roles.options)

    def operands(self) -> Operands:
        """Return the local arrays, as the problem calls them. Local."""
        a, b, c, d = self.roles().each("local")
        return Operands(a, b, c, d, pivots=self._pivots, tau=self._tau)

    def run(self) -> T:
        """Compute. Collective over the context."""
        algo = self.how["algo"]
        found = self.directly() if type(algo) is str and algo == "auto" else None
        if not found:
            return run(self, voted=found is False)
        self.made, outcome = found
        return self.end(outcome)

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        """Return what ``at_once`` does. Collective over the context."""
        return None

    def at_once(
        self,
        routine: str,
        a: Any,
        b: Any = None,
        *,
        pivots: Pivots | None = None,
        tau: Any = None,
        **options: Any,
    ) -> tuple[Matrix, Found] | Literal[False] | None:
        """Factor A or solve as a direct call, if a glance at the arguments shows that they are legal. Collective.

        The routine is LAPACK's, as ``Asked`` has it; A, or its factors, and right-hand sides are the caller's. Pivots
        are from 0. Return D and what LAPACK found. None if nothing has happened yet; False if the ranks have voted, and
        not all of them agreed.
        """
        ctx, out = self.ctx, self.given["out"]
        direct, like = ctx.engine.direct, a if b is None else b
        if direct is None or not isinstance(a, Handle) or not isinstance(like, Handle) or ctx.control.gone():
            return None
        ctx.check_open()
        if not direct.factors(routine, *a.shape, 0 if b is None else like.shape[1]):
            return None
        sizes = _RECTANGULAR if routine in ("getrf", "geqrf", "orgqr") else _SQUARE if b is None else _SOLVED
        sizes = _REFLECTED if routine == "ormqr" else sizes
        seen = glance(ctx, sizes, (a, b, None, out), options, lambda: replace(like.descriptor, ld=None))
        given = b"" if pivots is None else _as_lapack(pivots, a.shape[0])
        if tau is not None:
            given = tau.tobytes() if (tau.shape, tau.dtype) == (a.shape[1:], a.dtype) else None
        if seen is None or given is None:
            return None
        of_a, of_b, _, of_d, words, d = seen
        asked = (self.name, routine, of_a, of_b, None, of_d, out is None, *words, 1, 0, given, None)
        done = direct.factor(ctx.control, Asked._make(asked))
        if done is None or done is False:
            return done
        logger.debug("%s: computed directly", self.name)
        info, made, diagonal = done
        if made is None or made.dtype != np.int32:
            return d, Found(info, diagonal=diagonal, tau=made)
        return d, Found(info, made.astype(np.int64) - 1, diagonal)

    def signature(self) -> Hashable:
        """Return all that decides how the call is computed. Local."""
        self._known = self._key()
        return self._known, tuple(self.values.items())

    def read(self, facts: dict[str, Any]) -> None:
        """Check the arguments, and make the result. Local."""
        check_operands(self.ctx, [name for name in self.matrices if name not in self.optional], self.given)
        self._writable()
        if not isinstance(self.how["algo"], str):
            raise ArgumentTypeError(f"algo: expected a string, got {short_repr(self.how['algo'])}")
        self.check()
        if self.faults:
            raise self._error(faults_text(f"this {self.name}", self.faults))
        facts.update({name: getattr(x, "descriptor", None) for name, x in self.given.items()})
        facts.update(self.how)
        facts.update(self.values)
        self.names = tuple(name for name, x in self.given.items() if x is not None)
        self.made = self.new()

    def remembered(self) -> bool:
        """Return that there was such a call. Local."""
        return True

    def again(self, remembered: bool) -> None:  # noqa: ARG002
        """Make the result. Local."""
        self._writable()
        self.made = self.new()

    def place(self, remembered: bool) -> tuple[int, ...]:
        """Make the result; plans of factorizations are bound to no arrays. Local."""
        self.again(remembered)
        return ()

    def placed(self, product: Product) -> Operands:  # noqa: ARG002
        """Return the local arrays. Local."""
        return self.operands()

    def key(self, number: int) -> Hashable:  # noqa: ARG002
        """Return all that decides how the call is computed: a plan is kept from the first call on. Local."""
        return self._known

    def task(self) -> Task:
        """Return what is computed, and how. Local."""
        return Task(self.problem(), Options(algo=self.how["algo"]))

    def result(self, found: Any) -> T:
        """Return what the function returns. Collective over the context."""
        return self.end(found)

    def replaced(self, given: Mapping[str, Any], product: Product) -> FactorizationCall[T]:  # noqa: ARG002
        """Return the call on other matrices in the same layouts, or raise ArgumentError. Local."""
        for name, x in given.items():
            check_operands(self.ctx, name, {name: x})
            if x.descriptor != self[name].descriptor:
                raise LayoutError(
                    f"{name}: its layout is {x.descriptor}, the plan is for {self[name].descriptor}"
                )
        other = copy.copy(self)
        other.given = {**self.given, **given}
        other.made = given.get("out", self.made)
        return other

    def facts(self) -> dict[str, Any]:
        """Check that what the call writes may be written to. Local."""
        self._writable()
        return {}

    def _writable(self) -> None:
        written = {name: self.given.get(name) for name in self.optional}
        check_writable(written if self.made is None else {**written, "out": self.made})

    def _key(self) -> Hashable:
        """Return all that decides how the call is computed, the same on every rank if the arguments are legal."""
        if not comparable(self.ctx, self.given.values(), self.how.values()):
            return object()
        described = tuple(None if x is None else x.descriptor for x in self.given.values())
        # 1, 1.0 and True are equal
        options = tuple((name, type(value), value) for name, value in self.how.items())
        return self.name, options, described

    def recorded(self) -> NoReturn:
        """Raise UnsupportedError. Local."""
        raise UnsupportedError("a CUDA graph: a factorization cannot be recorded: its host looks at values")

    # -- faults

    def fault(self, text: str) -> None:
        """Note a fault of layouts."""
        self.faults.append(text)

    def wrong(self, text: str) -> None:
        """Note a fault of another argument."""
        self._error = ArgumentError
        self.faults.append(text)

    def __getitem__(self, name: str) -> Matrix:
        """Return a matrix that is given."""
        x = self.given[name]
        assert x is not None
        return x

    def check_matrix(self, name: str, *, square: bool = True) -> None:
        """Note that the matrix is not square, or has no type that LAPACK has."""
        x = self[name]
        if x.dtype.name not in BLAS_TYPES:
            self.fault(f"{name}: expected one of {', '.join(BLAS_TYPES)}, got {x.dtype.name}")
        if square and x.shape[0] != x.shape[1]:
            self.fault(f"{name}: expected a square matrix, got {x.shape[0]} x {x.shape[1]}")

    def check_right(self, name: str, left: str) -> None:
        """Note that the matrix does not fit on the right of another."""
        x, a = self[name], self[left]
        if x.dtype != a.dtype:
            self.fault(f"{name}: expected {a.dtype.name} as {left}, got {x.dtype.name}")
        if x.shape[0] != a.shape[1]:
            self.fault(f"{name}: {x.shape[0]} rows, but {left} has {a.shape[1]} columns")

    def check_like(self, name: str, other: str, shape: tuple[int, int] | None = None) -> None:
        """Note that the matrix, if there is one, has not the shape and type of another."""
        x, a = self.given[name], self[other]
        shape = a.shape if shape is None else shape
        if x is not None and (x.shape, x.dtype) != (shape, a.dtype):
            self.fault(f"{name}: expected {words(shape, a.dtype)}, got {words(x.shape, x.dtype)}")

    def check_letter(self, name: str, allowed: str | tuple[str, ...]) -> None:
        """Note that an option has a value that it must not have."""
        if not one_of(self.how[name], allowed):
            self.wrong(f"{name}: expected one of {', '.join(allowed)}, got {short_repr(self.how[name])}")

    def check_flags(self, *names: str) -> None:
        """Note which options are neither True nor False."""
        for name in names:
            if not isinstance(self.how[name], bool):
                self.wrong(f"{name}: expected True or False, got {short_repr(self.how[name])}")

    def check_trans(self, name: str = "trans") -> None:
        """Note that an option is none of those that say which transpose of A is meant."""
        if not one_of(self.how[name], "NTC"):
            expected = "0, 1, 2, 'N', 'T' or 'C'"
            self.wrong(f"{name}: expected {expected}, got {short_repr(self.how[name])}")

    # -- results

    @property
    def upper(self) -> bool:
        """Whether A is known by its upper triangle: then its transpose is computed with."""
        return self.how["lower"] is False

    @property
    def uplo(self) -> str:
        """The triangle of A that is read, as LAPACK calls it; "" if ``lower`` is neither True nor False."""
        lower = self.how["lower"]
        return "" if not isinstance(lower, bool) else "L" if lower else "U"

    @property
    def written(self) -> Matrix:
        """The matrix that the call writes."""
        assert self.made is not None
        return self.made

    def out_or_new(self, d: MatrixDescriptor, *, zeros: bool = False) -> Matrix:
        """Return ``out``, or a new matrix in a layout without padding. Local."""
        out = self.given["out"]
        if out is not None:
            return out
        made: Matrix = self.ctx.allocate(replace(d, ld=None))
        if zeros:
            made.local[...] = 0
        return made

    def failed(self, info: int, what: str) -> NoReturn:
        """Raise the error, as all ranks do."""
        with self.ctx.agreement(self.name):
            raise FactorizationError.at(info - 1, f"{self.name}: the matrix {what}")
        raise AssertionError

    def singular(self, info: int) -> NoReturn:
        """Raise the error, as all ranks do."""
        self.failed(info, f"is exactly singular: a zero on the diagonal at index {info - 1}")

    def not_positive(self, info: int) -> NoReturn:
        """Raise the error, as all ranks do."""
        self.failed(
            info,
            f"is not positive definite: its leading principal minor of order {info}, up to index {info - 1}, is not "
            "positive",
        )


def level_of_caller() -> int:
    """Return the ``stacklevel`` with which the caller's warning names the line outside pblasmp. Local."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "pblasmp":
        level, frame = level + 1, frame.f_back
    return level


def _as_lapack(pivots: Pivots, order: int) -> bytes | None:
    """Return pivots from 0 as LAPACK has them, None if they are not legal. Local."""
    if pivots.shape != (order,) or not ((pivots >= 0) & (pivots < order)).all():
        return None
    return (pivots + 1).astype(np.int32).tobytes()


def flag(value: object) -> object:
    """Return a Python bool for one of NumPy, for 0 and for 1, other values as they are. Local."""
    number = isinstance(value, (int, np.integer, np.bool_)) and not isinstance(value, np.timedelta64)
    known = number and value in (0, 1)
    return bool(value) if known else value


def op_of(trans: object) -> object:
    """Return "N", "T" or "C" for what SciPy calls 0, 1 and 2, or False and True; other values as they are. Local."""
    if not (isinstance(trans, (bool, np.bool_)) or is_integer(trans)):
        return trans
    number = int(trans)  # type: ignore[call-overload]
    return "NTC"[number] if 0 <= number <= 2 else trans


def pair_of(pair: object) -> tuple[Any, Any]:
    """Return the two values of a pair; what is none, and None. Local."""
    return (pair[0], pair[1]) if isinstance(pair, (tuple, list)) and len(pair) == 2 else (pair, None)


def words(shape: tuple[int, int], dtype: Any) -> str:
    """Return a shape and a type as messages have them. Local."""
    return f"{shape[0]} x {shape[1]} of {dtype.name}"


def digest(array: NDArray[Any]) -> str:
    """Return a text that differs if the values do. Local."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
