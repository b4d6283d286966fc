# SPDX-License-Identifier: Apache-2.0
"""Plan: a computation that is checked, agreed on and prepared once, to run any number of times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from .engines.method import Verdict, prepare
from .engines.product import Bound, Product, Workspace
from .engines.request import AnyProblem, Operands, Options, Problem
from .errors import ArgumentError, ArgumentTypeError, ClosedError, LayoutError, PblasmpError, UnsupportedError
from .handle import Handle, Matrix
from .layout import Level3Problem, MatmulProblem, MatrixDescriptor, ParallelProblem
from .layout.factor_problem import FactorProblem
from .logs import logger
from .report import Report
from .runtime import Runtime
from .tuning.measure import measure

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


__all__ = [
    "Graph",
    "Matrices",
    "MatrixPlan",
    "Plan",
    "Reading",
    "Recipe",
    "check_c",
    "check_operands",
    "check_overlap",
    "context_of",
]

Matrices = dict[str, Handle | None]
Result = TypeVar("Result")


class Graph(Generic[Result]):
    """A plan as a CUDA graph, valid until the plan is closed. Made by ``plan.graph()``."""

    def __init__(self, replay: Callable[[], None], result: Result) -> None:
        self._replay, self._result = replay, result

    def replay(self) -> Result:
        """Queue the plan on the current stream and return its result. Collective over the context.

        Raises:
            ClosedError: the plan is closed, or another plan has replaced the workspace since: make the graph again.
        """
        self._replay()
        return self._result


def _nothing() -> None:
    """Do nothing: no stream uses what the plan holds."""


class Plan(Generic[Result]):
    """A prepared computation; a context manager. Made by ``pb.plan``, not directly. Local.

    Args:
        ctx: the context.
        call: the function's name.
        problem: what is computed.
        options: how.
        operands: the planned local arrays.
        nearest: the problem in the layouts that operands are moved to first; None: they stay where they are.
        reasons: why operands are moved, for the report.

    Attributes:
        problem: what the engine computes: the caller's problem, or the one in other layouts.
    """

    def __init__(
        self,
        ctx: Runtime[Any],
        call: str,
        problem: AnyProblem,
        options: Options,
        operands: Operands,
        nearest: MatmulProblem | Level3Problem | None = None,
        reasons: tuple[str, ...] = (),
    ) -> None:
        self._ctx, self._call, self._options = ctx, call, options
        self._bound: Bound | None = None
        self._asked, self.problem, self._reasons = problem, nearest or problem, reasons
        self._open = True
        self._settle: Callable[[], None] = _nothing  # before what the plan holds is freed
        if options.algo == "measure" and not isinstance(problem, FactorProblem):
            self._options = options = replace(options, algo="auto")
            if not ctx.engine.measured.knows(self.problem, options):
                measure(ctx.engine, ctx.comm, problem, options, operands, nearest)
        self._product, self._verdicts = self._prepare(problem, operands, nearest)
        self._number = ctx.adopt(self)
        self._log()

    def _prepare(
        self, problem: AnyProblem, operands: Operands, nearest: MatmulProblem | Level3Problem | None = None
    ) -> tuple[Product, dict[str, Verdict]]:
        """Return the prepared product, and the verdict on every algorithm. Collective over the context.

        The ranks have agreed on the problem. Where nothing else can differ between them, on the host, they agree again
        only to raise an error.
        """
        ctx, what = self._ctx, f"{self._call}: preparing"
        if ctx.engine.traits.queues:
            with ctx.agreement(what):
                self._settle = ctx.engine.lifetime()
            with ctx.agreement(what):
                return prepare(ctx.engine, problem, self._options, operands, nearest)
        with ctx.running(what):
            try:
                return prepare(ctx.engine, problem, self._options, operands, nearest)
            except PblasmpError as error:  # the same on every rank
                with ctx.agreement(what):
                    raise error from None

    def _log(self) -> None:
        """Log what was prepared: the algorithm at INFO, why no other one was taken at DEBUG."""
        if not logger.isEnabledFor(logging.INFO):
            return
        taken = next((name for name, verdict in self._verdicts.items() if verdict.taken), "")
        logger.info("%s: algorithm %s (%s)", self._title(), taken, self._product.path)
        for name, verdict in self._verdicts.items():
            logger.debug("algorithm %s: %s", name, verdict)

    def _repr_html_(self) -> str | None:
        return self.problem._repr_html_()

    @property
    def workspace(self) -> Workspace:
        """Memory that the plan needs on this rank besides its operands, in bytes; shared with other plans. Local."""
        return self._product.workspace

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("this plan is closed")

    def _check_graphs(self) -> None:
        """Raise UnsupportedError if there are no CUDA graphs. Local."""
        if not self._ctx.engine.traits.records:
            name = self._ctx.engine.name
            raise UnsupportedError(
                f"a CUDA graph: the {name} engine has none, expected a GPU: call the plan itself"
            )

    def __call__(self, *operands: Any, **named: Any) -> Result:
        """Run and return the result, on the planned operands or on others like them. Collective over the context."""
        raise NotImplementedError

    def _once(self) -> Result:
        """Run on the planned arrays, on which the ranks have just agreed, and close. Collective over the context."""
        raise NotImplementedError

    def _release(self) -> None:
        """Drop all arrays: from now on this plan is run by ``_run_with``. Local."""

    def _run_with(self, reading: Any) -> Result:
        """Run on arrays on which the ranks have agreed, and keep none of them. Collective over the context."""
        raise NotImplementedError

    def _queue(self, bound: Bound) -> None:
        """Run what only queues work, on which the ranks need not agree. Collective over the context."""
        with self._ctx.running(self._call, checks=False):
            self._ctx.control.channel.runs += 1
            bound.run()

    def _stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return a function whose blocks make the stream of the planned arrays the current one. Local."""
        return nullcontext

    def _recorded(self) -> Result:
        """Return what a graph of the planned arrays writes; raise ArgumentError if there can be none. Local."""
        raise NotImplementedError

    def graph(self) -> Graph[Result]:
        """Return the plan as a CUDA graph, to be replayed at the cost of one launch. Collective over the context.

        A replay reads the current values of the planned arrays, of a tensor-parallel product those of its last run, and
        writes the same result. A plan that has never run is run once first, which writes its result.

        Raises:
            UnsupportedError: the engine has no graphs, or the algorithm cannot be recorded.
            ClosedError: the plan is closed.
        """
        with self._ctx.agreement("plan.graph") as facts:
            self._check_open()
            self._check_graphs()
            facts["plan"] = self._number
        stream, bound = self._stream(), self._bound
        assert bound is not None
        with stream(), self._ctx.agreement("plan.graph: capturing"):
            result, launch = self._recorded(), bound.capture()

        def replay() -> None:
            with stream():
                launch()

        return Graph(replay, result)

    def report(self) -> Report:
        """Return what the plan does on this rank. Local."""
        engine, product = self._ctx.engine, self._product
        return Report(
            call=self._title(),
            engine=engine.name,
            asked=self._options.algo,
            path=product.path,
            sent_bytes=product.sent_bytes,
            copied_bytes=product.copied_bytes,
            workspace=product.workspace,
            algorithms=self._verdicts,
            moved=product.moved,
            notes=self._reasons + product.notes + engine.remarks,
        )

    def _title(self) -> str:
        return str(self._asked)

    def __repr__(self) -> str:
        state = "" if self._open else ", closed"
        return f"Plan({self._title()}: {self._product.path}{state})"

    def close(self) -> None:
        """Free what only this plan holds. Collective over the context; idempotent."""
        if self._open:
            self._open = False
            self._ctx.release(self)
            try:
                self._settle()
            finally:
                self._product.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Recipe:
    """A routine on distributed matrices, but not the matrices: what the ranks have agreed on.

    Attributes:
        call, problem, options, nearest, reasons: see ``Plan``.
        result: D's layout.
        in_place: the operand that may also be the result.
        partial: only a part of the result is written.
        names: what the caller calls operands that have other names than "a", "b" and "c".
    """

    call: str
    problem: MatmulProblem | Level3Problem
    options: Options
    nearest: MatmulProblem | Level3Problem
    reasons: tuple[str, ...]
    result: MatrixDescriptor
    in_place: str = "c"
    partial: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def matrices(
        self,
        ctx: Runtime[Any],
        a: Handle | None,
        b: Handle | None,
        c: Handle | None,
        out: Handle | None,
    ) -> Matrices:
        """Return the operands, and ``out`` or a new matrix for the result. Local.

        Raises:
            ArgumentError: ``out`` shares memory with an operand that it must not overwrite.
        """
        result = ctx.allocate(self.result) if out is None else out
        matrices: Matrices = {"a": a, "b": b, "c": c, "d": result}
        check_overlap(ctx, matrices, self.in_place, self.names)
        if self.partial and out is None and c is None:
            result.local[...] = 0
        return matrices


class MatrixPlan(Plan[Matrix]):
    """A plan of a routine on distributed matrices.

    Args:
        ctx: the context.
        recipe: what is computed, and how.
        matrices: the caller's "a", "b", "c" and the result "d"; None for those that are absent.
        out: whether the caller gave the result. A new one starts as a copy of C if only a part of it is written.
        epilogue, scales: what follows the product, with the engine's arrays.
    """

    _bound: Bound

    def __init__(
        self,
        ctx: Runtime[Any],
        recipe: Recipe,
        matrices: Matrices,
        *,
        out: bool,
        epilogue: Any = None,
        scales: Any = None,
    ) -> None:
        self._matrices, self._in_place = matrices, recipe.in_place
        self._seeded = recipe.partial and not out and matrices["c"] is not None
        operands = Operands(**_locals_of(matrices), epilogue=epilogue, scales=scales)
        super().__init__(
            ctx, recipe.call, recipe.problem, recipe.options, operands, recipe.nearest, recipe.reasons
        )
        self._bound = self._product.bind(operands)
        self._only_queues = self._product.queues and not self._seeded

    @cached_property
    def _words(self) -> str:
        """What it computes, for messages: made once, since CPU ranks agree on it in every run."""
        return repr(self._asked)

    @property
    def _result(self) -> Matrix:
        return cast("Matrix", self._matrices["d"])

    def __call__(
        self,
        a: Matrix | None = None,
        b: Matrix | None = None,
        c: Matrix | None = None,
    ) -> Matrix:
        """Run and return the result, on the planned matrices or on others with the same layouts.

        Collective over the context.

        Raises:
            ArgumentError: a matrix has another layout than the planned one.
            ClosedError: the plan is closed.
        """
        if self._only_queues and self._open and a is None and b is None and c is None:
            self._queue(self._bound)
            return self._result
        given = {"a": a, "b": b, "c": c}
        with self._ctx.agreement("plan") as facts:
            self._check_open()
            matrices = {name: self._replaced(name, x) for name, x in given.items()} | {"d": self._result}
            replaced = [x is not None for x in given.values()]
            facts.update(plan=self._number, product=self._words, replaced=replaced)
            if any(replaced):
                check_overlap(self._ctx, matrices, self._in_place)
        if any(replaced):
            self._run_on(replace(self._bound.operands, **_locals_of(matrices)))
        else:
            self._run(self._bound.run, self._bound.operands)
        return self._result

    def _once(self) -> Matrix:
        """Run on the planned matrices, on which the ranks have just agreed, and close. Collective over the context."""
        try:
            self._run(self._bound.run, self._bound.operands)
            return self._result
        finally:
            self.close()

    def _release(self) -> None:
        """Drop all arrays: from now on this plan is run by ``_run_with``. Local."""
        self._matrices = {}
        self._bound.release()

    def _run_with(self, reading: Reading) -> Matrix:
        """Run on matrices on which the ranks have agreed, and keep none of them. Collective over the context."""
        matrices = reading[1]
        self._run_on(Operands(**_locals_of(matrices)))
        return cast("Matrix", matrices["d"])

    def _replaced(self, name: str, x: Handle | None) -> Handle | None:
        planned = self._matrices[name]
        if x is None:
            return planned
        check_operands(self._ctx, name, {name: x})
        if planned is None or x.descriptor != planned.descriptor:
            expected = "no matrix" if planned is None else _layout(planned)
            raise LayoutError(f"{name}: its layout is {_layout(x)}, the plan is for {expected}")
        misfit = self._product.misfit(name, x.local)
        if misfit:
            raise ArgumentError(f"{name}: {misfit}")
        return x

    def _run_on(self, operands: Operands) -> None:
        """Run on these arrays, once."""
        self._run(partial(self._product.run, operands), operands)

    def _run(self, run: Callable[[], None], operands: Operands) -> None:
        with self._ctx.running(self._call):
            self._ctx.control.channel.runs += 1
            if self._seeded and operands.c is not None and operands.d.size:
                operands.d[...] = operands.c
            run()

    def _recorded(self) -> Matrix:
        if self._seeded:
            raise ArgumentError("a CUDA graph: the result of this plan starts as a copy of C: give out=")
        return self._result


Reading = tuple[Recipe, Matrices, Any, Any]  # the last two: an epilogue and scales, with the engine's arrays


def _layout(x: Handle) -> str:
    ld = x.descriptor.ld
    return str(x.descriptor) if ld is None else f"{x.descriptor}, leading dimension {ld}"


def _locals_of(matrices: Matrices) -> dict[str, Any]:
    return {name: None if x is None else x.local for name, x in matrices.items()}


def context_of(call: str, *matrices: object) -> Runtime[Any]:
    """Return the context of the first distributed matrix. Local.

    Raises:
        ArgumentError: there is none.
    """
    for x in matrices:
        if isinstance(x, Handle):
            return x.context
    raise ArgumentTypeError(
        f"{call}: expected distributed matrices; ctx.scatter, ctx.load and ctx.from_local make them"
    )


def check_c(problem: Problem, beta: complex) -> None:
    """Raise ArgumentError if beta is nonzero and there is no C. Local."""
    if beta == 0:
        return
    if isinstance(problem, ParallelProblem):
        if problem.c_dtype is None:
            raise ArgumentError(f"c: beta is {beta}, expected an array to scale by it")
    elif isinstance(problem, Level3Problem) and "c" not in problem.traits.operands:
        raise ArgumentError(f"beta: {problem.routine} has no C to scale, expected 0, got {beta}")
    elif problem.c is None:
        raise ArgumentError(f"c: beta is {beta}, expected a matrix to scale by it")


def check_operands(ctx: Runtime[Any], required: Container[str], matrices: Mapping[str, object]) -> None:
    """Raise ArgumentError unless all ``required`` operands, and all that are given, are matrices of ``ctx``. Local."""
    for name, x in matrices.items():
        if x is None and name not in required:
            continue
        if not isinstance(x, Handle):
            raise ArgumentTypeError(f"{name}: expected a DistributedMatrix, got {type(x).__name__}")
        if x.context is not ctx:
            raise ArgumentError(f"{name}: belongs to another context")


def check_overlap(
    ctx: Runtime[Any], matrices: Matrices, in_place: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise ArgumentError if D shares memory with an operand, unless it is the operand ``in_place`` itself. Local.

    ``names`` has what messages call the operands, if not "a", "b" and "c".
    """
    out = matrices["d"]
    assert out is not None
    if not getattr(out.local.flags, "writeable", True):
        raise ArgumentError("out: its local array is read-only")
    for name in "abc":
        x = matrices[name]
        if x is None:
            continue
        first = x.local[:1, :1], out.local[:1, :1]
        if name == in_place and x.descriptor == out.descriptor and ctx.engine.overlap(*first):
            continue  # the same memory
        if ctx.engine.overlap(x.local, out.local):
            said = (names or {}).get(name, name)
            expected = f"{said} itself or a separate matrix" if name == in_place else "a separate matrix"
            raise ArgumentError(f"out: shares memory with {said}; expected {expected}")
