# SPDX-License-Identifier: Apache-2.0
"""Calls of routines on distributed matrices: products, and levels 1 to 3."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..dtypes import is_float8, plain
from ..engines.direct import FAMILIES, Asked
from ..engines.product import Product
from ..engines.request import Operands, Options, Problem, Task
from ..errors import ArgumentError, LayoutError
from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor, ParallelProblem
from ..layout.level3_problem import with_c_like_d
from ..layout.routines import GEMM, ROUTINES, Routine
from .direct_forms import tell_of_interrupt
from .handle import Handle
from .planned import run
from .reading import check_operands, check_overlap, check_writable, comparable, context_of, glance, number
from .user_call import UserCall

Matrices = dict[str, Handle | None]
_OF_PRODUCTS = ("scheme", "epilogue", "scales")
_ROWS = {"matmul": GEMM, **ROUTINES}


class MatrixCall(UserCall[Any]):
    """A call of a routine on distributed matrices, and the reader of its arguments.

    It is direct if a glance at them shows that they are legal and that the engine can do without a plan. A plan is kept
    from the second other call on.

    Args:
        name: the function's name.
        routine: "matmul" or one of ``ROUTINES``.
        given: A, B, C and ``out``; None for those that are absent.
        how: the function's other arguments.

    Attributes:
        direct: whether it may be a direct call.
        row: what the tables say of the routine.
        called: what the function calls operands, if not "a", "b" and "c".

    Raises:
        ArgumentError: no argument is a matrix.
    """

    called: Mapping[str, str] = MappingProxyType({})
    row: Routine
    _task: Task
    _layout: MatrixDescriptor  # D's
    _matrices: Matrices
    _epilogue: Any = None
    _scales: Any = None

    def __init__(
        self, name: str, routine: str, given: tuple[Any, ...], how: dict[str, Any], direct: bool = True
    ) -> None:
        a = given[0]
        self.ctx = a.context if isinstance(a, Handle) else context_of(name, *given)
        self.name, self.routine, self._given, self._how, self.direct = name, routine, given, how, direct
        self.row = _ROWS[routine]

    def find_context(self) -> None:
        """Find out where the other ranks make this call, if that is in doubt. Collective over that context."""
        self.ctx = context_of(self.name, *self._given)

    # -- what a family of routines defines

    @property
    def required(self) -> str:
        """Those of A, B and C that it must have."""
        return self.row.required

    @property
    def in_place(self) -> str:
        """That of A, B and C which ``out`` may be."""
        return self.row.in_place

    def check(self) -> None:
        """Raise an error that names what is wrong with the operands, all of which are matrices. Local."""

    @abstractmethod
    def new(self) -> MatrixDescriptor:
        """Return the layout of a new result. Local."""

    def validate(self, problem: Any, facts: dict[str, Any]) -> None:
        """Raise LayoutError that names every reason why the problem is not legal. Local.

        ``facts`` gets what else must be equal on every rank.
        """

    def chosen(self, options: Options, nearest: MatmulProblem | Level3Problem) -> Options:
        """Return the options, perhaps with an algorithm for "auto". Local."""
        del nearest
        return options

    def bind(self, problem: Any) -> None:
        """Read the arguments that are neither matrices nor options. Local."""

    # -- at a glance

    def run(self, *, voted: bool = False) -> Any:
        """Compute; ``voted``: the ranks have voted on it, and did not agree. Collective over the context."""
        algo, found = self._how["algo"], False if voted else None
        if (
            found is None
            and self.direct
            and type(algo) is str
            and algo == "auto"
            and self.routine in FAMILIES
        ):
            try:
                found = self.directly()
            except BaseException as error:
                tell_of_interrupt(self.ctx, error, self.name)
                raise
        if found is not None and found is not False:
            return found
        if found is None:
            self.find_context()
        self._how = {name: plain(value) for name, value in self._how.items()}
        return run(self, voted=found is False)

    def directly(self) -> Any:
        """Return D, computed without a plan. Collective over the context.

        None if nothing has happened yet; False if the ranks have voted, and not all of them agreed.
        """
        ctx = self.ctx
        direct = ctx.engine.direct
        if direct is None or not ctx.is_usable:
            if not (ctx.is_closed or ctx.control.gone()):
                ctx.check_open()
            return None
        seen = self._seen()
        if seen is None:
            return None
        asked, d = seen
        return direct.run(ctx.control, asked) and d

    def _seen(self) -> tuple[Asked, Handle] | None:
        """Return what the engine is asked for, and D; None if the call takes the ordinary way. Local."""
        _, b, c, out = given = self._given
        row, how, required = self.row, self._how, self.required
        if (b is None and "b" in required) or (c is None and "c" in required):
            return None
        new = c is None and row.triangle == "d"
        alpha, beta = how.get("alpha", 1), how.get("beta", 0)
        if out is None and not number(alpha, "z", real=False):  # before a result is made for nothing
            return None
        found = glance(self.ctx, row.sizes, given, how, self.new, zeros=new)
        if found is None:
            return None
        of_a, of_b, of_c, of_d, words, d = found
        letter = of_d[0].pattern.letter
        factor, other = number(alpha, letter, "alpha" in row.real), number(beta, letter, "beta" in row.real)
        if not factor or other is None or (other != 0 and c is None):
            return None
        side, uplo, op_a, op_b, diag = words
        asked = Asked(
            self.name, self.routine, of_a, of_b, of_c, of_d, out is None, side, uplo, op_a, op_b, diag, factor, other
        )  # fmt: skip
        return asked, d

    # -- with words

    def signature(self) -> Hashable:
        """Return all that decides how the call is computed; None if it has an epilogue or scales. Local."""
        given, how = self._given, self._how
        if how.get("epilogue") is not None or how.get("scales") is not None:
            return None
        if not comparable(self.ctx, given, how.values()):
            return object()
        # 1, 1.0 and 1 + 0j are equal
        options = tuple([(name, type(value), value) for name, value in how.items()])
        return self.name, options, *[None if x is None else (x.descriptor, x.local.strides) for x in given]

    def read(self, facts: dict[str, Any]) -> None:
        """Check the arguments. Local."""
        given, how, row = self._given, self._how, self.row
        a, b, c, out = (self.called.get(name, name) for name in ("a", "b", "c", "out"))
        required = [self.called.get(name, name) for name in self.required]
        check_operands(self.ctx, required, dict(zip((a, b, c, out), given, strict=True)))
        self.check()
        d = self.new() if given[3] is None else given[3].descriptor
        asked = self._problem(d)
        apart = (*row.options, *_OF_PRODUCTS)
        rest = {name: value for name, value in how.items() if name not in apart}
        options = Options.of(d.dtype, real=" ".join(row.real), **rest)
        facts.update(asked.facts() | options.facts(), out="new" if given[3] is None else "given")
        self.validate(asked, facts)
        check_c(asked, how.get("beta", 0), c)
        problem = as_read(asked, options.beta)
        nearest: MatmulProblem | Level3Problem = with_c_like_d(problem)
        reasons = () if nearest == problem else (f"{c} is moved to the layout of the result",)
        if options.beta == 0:  # a C that is not read may have any layout
            problem = nearest
        self._task, self._layout = Task(problem, self.chosen(options, nearest), nearest, reasons), d
        self._lay_out()
        self.bind(problem)

    def _problem(self, d: MatrixDescriptor) -> MatmulProblem | Level3Problem:
        """Return what is asked for, with a result in this layout. Local."""
        how = self._how
        a, b, c = (None if x is None else x.descriptor for x in self._given[:3])
        options = {name: how[name] for name in (*self.row.options, "scheme") if name in how}
        if self.row is GEMM:
            return MatmulProblem(a, b, d, c=c, **options)  # type: ignore[arg-type]
        return Level3Problem(self.routine, a, d, b, c, **options)  # type: ignore[arg-type]

    def _lay_out(self) -> None:
        """Put the matrices in their places, with a new one for the result if there is none. Local.

        ArgumentError if ``out`` shares memory with an operand that it must not overwrite.
        """
        a, b, c, out = self._given
        d = self.ctx.allocate(self._layout) if out is None else out
        self._matrices = {"a": a, "b": b, "c": c, "d": d}
        check_overlap(self.ctx, self._matrices, self.in_place, self.called)
        if self._writes_part and out is None and c is None:
            d.local[...] = 0

    @property
    def _writes_part(self) -> bool:
        return self.row.triangle == "d"

    def remembered(self) -> tuple[Task, MatrixDescriptor]:
        """Return what is computed, and how; and D's layout. Local."""
        return self._task, self._layout

    def again(self, remembered: tuple[Task, MatrixDescriptor]) -> None:
        """Take these, and the matrices with a new result. Local."""
        self._task, self._layout = remembered
        self._lay_out()

    def place(self, remembered: tuple[Task, MatrixDescriptor]) -> tuple[int, ...] | None:
        """Do what ``again`` does: the plan is not bound to matrices, which would then be kept. Local."""
        self.again(remembered)
        return None if self.starts else ()

    def placed(self, product: Product) -> Operands:  # noqa: ARG002
        """Return the local arrays. Local."""
        return self.operands()

    def key(self, number: int) -> Hashable:
        """Return the number of the call. Local."""
        return number or None

    def task(self) -> Task:
        """Return what is computed, and how. Local."""
        return self._task

    def operands(self) -> Operands:
        """Return the local arrays. Local."""
        m = self._matrices
        a, b, c, d = [None if x is None else x.local for x in (m["a"], m["b"], m["c"], m["d"])]
        return Operands(a, b, c, d, self._epilogue, self._scales)

    def facts(self) -> dict[str, Any]:
        """Check that D may be written to. Local."""
        check_writable({"out": self._matrices["d"]})
        return {}

    @property
    def starts(self) -> bool:
        """Whether the result, of which only a part is written, is new and starts as a copy of C."""
        return self._writes_part and self._given[3] is None and self._matrices["c"] is not None

    def start(self) -> None:
        """Copy C. Local."""
        c, d = self._matrices["c"], self._matrices["d"]
        assert c is not None
        assert d is not None
        if d.local.size:
            d.local[...] = c.local

    def result(self, found: Any) -> Any:  # noqa: ARG002
        """Return D. Local."""
        return self._matrices["d"]

    def replaced(self, given: Mapping[str, Any], product: Product) -> MatrixCall:
        """Return the call on other matrices in the same layouts, with the same result. Local.

        ArgumentError if a matrix has another layout than the planned one.
        """
        for name, x in given.items():
            said = self.called.get(name, name)
            check_operands(self.ctx, said, {said: x})
            planned = self._matrices[name]
            if planned is None or x.descriptor != planned.descriptor:
                expected = "no matrix" if planned is None else _layout(planned)
                raise LayoutError(f"{said}: its layout is {_layout(x)}, the plan is for {expected}")
            misfit = product.misfit(name, x.local)
            if misfit:
                raise ArgumentError(f"{said}: {misfit}")
        other = copy.copy(self)
        other._matrices = {**self._matrices, **given}
        check_overlap(self.ctx, other._matrices, self.in_place, self.called)
        return other

    def recorded(self) -> Any:
        """Return D; raise ArgumentError if it starts as a copy of C. Local."""
        if self.starts:
            raise ArgumentError("a CUDA graph: the result of this plan starts as a copy of C: give out=")
        return self.result(None)


def _layout(x: Handle) -> str:
    ld = x.descriptor.ld
    return str(x.descriptor) if ld is None else f"{x.descriptor}, leading dimension {ld}"


def as_read(problem: Any, beta: complex) -> Any:
    """Return a product or routine without a C that is not read. Local.

    With an 8-bit D it keeps its C, whose type is that of biases.
    """
    return replace(problem, c=None) if beta == 0 and not is_float8(problem.d.dtype) else problem


def check_c(problem: Problem, beta: complex, name: str = "c") -> None:
    """Raise ArgumentError if beta is nonzero and there is no C, which messages call ``name``. Local."""
    if beta == 0:
        return
    if isinstance(problem, ParallelProblem):
        if problem.c_dtype is None:
            raise ArgumentError(f"c: beta is {beta}, expected an array to scale by it")
    elif isinstance(problem, Level3Problem) and "c" not in problem.traits.operands:
        raise ArgumentError(f"beta: {problem.routine} has no C to scale, expected 0, got {beta}")
    elif problem.c is None:
        what = "a matrix" if name == "c" else "a vector"
        raise ArgumentError(f"{name}: beta is {beta}, expected {what} to scale by it")
