# SPDX-License-Identifier: Apache-2.0
"""Plan: a call that is checked, agreed on and prepared once, to run any number of times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn

from ..engines.method import Report, Taken, prepare
from ..engines.product import Bound, Product, Workspace
from ..engines.request import AnyProblem, Operands
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, PblasmpError, UnsupportedError
from ..layout import ParallelProblem
from ..layout.factor_problem import FactorProblem
from ..logs import logger
from ..tuning.measure import measure
from .user_call import NO_STREAM, Result, UserCall

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_RUNS_BEFORE_GRAPHS = 2  # at the same addresses: later runs replay a graph
_REPEATS_BETWEEN_USES = 16  # after so many runs a kept plan counts as the one that was used last


class Graph(Generic[Result]):
    """A plan as a CUDA graph, valid until the plan is closed. Made by ``plan.graph()``."""

    def __init__(self, replay: Callable[[], None], result: Result) -> None:
        self._replay, self._result = replay, result

    def __repr__(self) -> str:
        return f"Graph(result {self._result!r})"

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
        call: the call, on which the ranks have agreed.
        kept: the context keeps the plan: it holds no arrays, and is run by ``_run_with``.
        made: its product, if the ranks have agreed on that, too.

    Attributes:
        problem: what the engine computes: the caller's problem, or the one in other layouts.
    """

    def __init__(
        self, call: UserCall[Result], *, kept: bool = False, made: tuple[Product, Taken] | None = None
    ) -> None:
        self._ctx, self._name = ctx, _ = call.ctx, call.name
        self._task = task = call.task()
        self.problem: AnyProblem = task.computed
        self._open, self._number, self._repeats, self._measured = True, 0, 0, ctx.engine.measured.added
        self._settle: Callable[[], None] = _nothing  # before what the plan holds is freed
        if made is None:
            operands = call.operands()
            if task.options.algo == "measure" and not isinstance(task.problem, FactorProblem):
                self._task = task = task._replace(options=replace(task.options, algo="auto"))
                if not ctx.engine.measured.knows(task.computed, task.options, operands.follows):
                    measure(ctx.engine, ctx.comm, task, operands)
            self._prepare(operands)
        else:  # which holds no arrays
            self._product, self._choice = made
            self._product.first, self._product.once = None, False
        self._call: UserCall[Result] | None = None
        self._bound: Bound | None = None
        self._only_queues = False
        if not kept:
            self._hold(call)
        self._number = ctx.take_over(self)
        self._log()

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a Plan cannot be copied or pickled: it holds memory and libraries of these processes. Plan the call again"
        )

    def _prepare(self, operands: Operands) -> None:
        """Prepare the product. Collective over the context.

        The ranks have agreed on the problem. Where nothing else can differ between them, on the host, they agree again
        only to raise an error.
        """
        ctx, what = self._ctx, f"{self._name}: preparing"
        made: tuple[Product, Taken]
        if ctx.engine.traits.queues:
            with ctx.agreement(what, nests=True):
                self._settle = ctx.engine.lifetime()
                made = prepare(ctx.engine, self._task, operands)
        else:
            with ctx.running(what):
                try:
                    made = prepare(ctx.engine, self._task, operands)
                except PblasmpError as error:  # the same on every rank
                    with ctx.agreement(what):
                        raise error from None
        self._product, self._choice = made

    def _hold(self, call: UserCall[Result]) -> None:
        """Let a run without arguments use the arrays of a call. Local."""
        if call is not self._call:
            if self._bound is not None:
                self._bound.release()
            self._call, self._bound = call, self._product.bind(call.operands())
            self._only_queues = self._product.queues and not call.starts

    def _log(self) -> None:
        """Log what was prepared: the algorithm at INFO, why no other one was taken at DEBUG."""
        if not logger.isEnabledFor(logging.INFO):
            return
        logger.info("%s: algorithm %s (%s)", self._title(), self._choice.name, self._product.path)
        for name, verdict in self._choice.verdicts().items():
            logger.debug("algorithm %s: %s", name, verdict)

    def _repr_html_(self) -> str | None:
        return self.problem._repr_html_()

    @property
    def workspace(self) -> Workspace:
        """Memory that the plan needs on this rank besides its operands, in bytes; shared with other plans. Local."""
        return self._product.workspace

    @cached_property
    def _words(self) -> str:
        """What it computes, for messages: made once, since CPU ranks agree on it in every run."""
        return repr(self._task.problem)

    def _opened(self) -> UserCall[Result]:
        """Return the call that is planned. Local."""
        if self._call is None:
            raise ClosedError("this plan is closed")
        return self._call

    def __call__(self, *operands: Any, **named: Any) -> Result:
        """Run and return the result, on the planned operands or on others like them. Collective over the context.

        A run without arguments that only queues work on GPUs is not checked.

        Args:
            *operands, **named: by the names that the planned function has for its arrays: ``plan(a, b)``, say, or
                ``plan(c=other)``. Those that are left out, or None, are the planned ones; of a tensor-parallel product
                those of the previous run, which also wrote to the result that the next run overwrites.

        Raises:
            ArgumentError: an operand does not fit what was planned, or there was none of that name.
            FactorizationError: as the function raises it.
            ClosedError: the plan is closed.
        """
        if self._only_queues and not operands and not named:
            return self._queued()
        ctx, call = self._ctx, self._call
        with ctx.running(self._name, checks=False), NO_STREAM if call is None else call.stream():
            with ctx.agreement("plan") as facts:
                call = planned = self._opened()
                given = _by_name(planned.names, operands, named)
                if given:
                    call = planned.replaced(given, self._product)
                facts.update(plan=self._number, product=self._words, replaced=", ".join(sorted(given)))
                facts.update(call.facts())
            if call is not planned and not call.keeps_last:
                return self._run_with(call)
            self._hold(call)
            assert self._bound is not None
            with ctx.running(self._name):
                return self._run(call, self._bound.run)

    def _queued(self) -> Result:
        """Run what only queues work, on which the ranks need not agree. Collective over the context."""
        call, bound = self._call, self._bound
        assert call is not None
        assert bound is not None
        try:
            call.check_gradients()
        except ArgumentError as error:  # others that have queued the run hear of it where they agree next
            with self._ctx.agreement("plan"):
                raise error from None
        with self._ctx.running(self._name, checks=False, computes=False), call.stream():
            self._ctx.control.channel.runs += 1
            bound.run()
            return call.result(None)

    def _run_with(self, call: UserCall[Result], keep: Callable[[], None] = _nothing) -> Result:
        """Run on a call's arrays, on which the ranks have agreed, and hold none of them. Collective over the context.

        The call is like the planned one; ``keep`` is done once the plan has all its tables.
        """
        with self._ctx.running(self._name):
            return self._run(call, partial(self._product.run, call.operands()), keep)

    def _run(
        self, call: UserCall[Result], run: Callable[[], Any], keep: Callable[[], object] = _nothing
    ) -> Result:
        """Run, inside ``running``, and return the call's result. Collective over the context."""
        self._ctx.control.channel.runs += 1
        if call.starts:
            call.start()
        found = run()
        keep()
        return call.result(found)

    def repeat(
        self, call: UserCall[Result], number: int, addresses: tuple[int, ...], used: Callable[[], object]
    ) -> tuple[Result] | Literal[False]:
        """Run on arrays at these addresses, if all ranks repeat the call; else False. Collective over the context.

        The ranks take one vote. What was run at the same addresses before is bound to them, and on GPUs replays a
        graph from the third run on, if all ranks have one: nothing is read, wrapped or looked up again.

        Args:
            call: the call, which has its place.
            number: the call's, the same on every rank that repeats it.
            addresses: of its arrays.
            used: called if all ranks repeat it.
        """
        ctx, product = self._ctx, self._product
        call.ran_by, queues = self, product.queues
        bound = ctx.kept.bound(self._number, addresses) if addresses else None
        with ctx.running(self._name, checks=not queues, computes=not queues):
            replay = self._all_repeat(number, bound, used)
            if replay is None:
                return False
            if not addresses:
                return (call.result(product.run(call.placed(product))),)
            if bound is None:
                bound = product.bind(call.placed(product))
                ctx.kept.bind(self._number, addresses, bound)
            return (call.result(bound.run(replay=replay)),)

    @property
    def current(self) -> bool:
        """Whether the plan is open, and nothing was measured since it was made that may choose another one. Local."""
        return self._open and self._measured == self._ctx.engine.measured.added

    def rerun(
        self,
        addresses: tuple[int, ...],
        number: int,
        used: Callable[[], object],
        stream: Callable[[], AbstractContextManager[Any]],
        handle: int | None,
    ) -> bool | None:
        """Run again on arrays at these addresses, without a look at them. Collective over the context.

        Args:
            addresses, number, used: as for ``repeat``.
            stream: returns the block in which the stream of the arrays is the current one.
            handle: its address, if it need not be the current one.

        Returns:
            Whether it has run. None if nothing has happened: it has not run on such arrays before. False if the ranks
            have voted, and not all of them repeat the call.
        """
        bound = self._ctx.kept.bound(self._number, addresses)
        if bound is None:
            return None
        ctx, queues, told = self._ctx, self._product.queues, "unfit"
        if (ready := bound.at_once(handle)) is not None:
            told = ctx.launch_again(self._name, number, ready)
            if told == "unlike":
                return False
            if told != "unfit":
                self._repeat(used)
            if told == "queued":
                return True
        with ctx.running(self._name, checks=not queues, computes=not queues), stream():
            replay = False if told == "unready" else self._all_repeat(number, bound, used)
            if replay is None:
                return False
            bound.run(replay=replay)
            return True

    def _all_repeat(self, number: int, bound: Bound | None, used: Callable[[], object]) -> bool | None:
        """Return whether all ranks can replay a graph of the call; None if not all repeat it. Collective."""
        ctx = self._ctx
        ready = bound is not None and bound.runs >= _RUNS_BEFORE_GRAPHS and not self._product.registers
        replay = ctx.all_repeat(self._name, number, ready)
        if replay is not None:
            self._repeat(used)
        return replay

    def _repeat(self, used: Callable[[], object]) -> None:
        """Count a run of a call that all ranks repeat. Local."""
        if not self._repeats % _REPEATS_BETWEEN_USES:
            used()
        self._repeats += 1  # the same on every rank
        self._ctx.control.channel.runs += 1

    def input_buffer(self) -> Any:
        """Return the plan's own array for x, which it reads from then on: fill it, and call ``plan()``.

        Collective over the context. Only plans of tensor-parallel products have one. For AllGather + GEMM it is in
        memory that other GPUs can reach (cublasmp), and is gathered from there without a copy. It is yours until the
        plan is closed. It is an array of the library of the planned ``x``, or of ``w`` if a shape was given for x.

        Raises:
            UnsupportedError: the plan is of another function.
            ClosedError: the plan is closed.
        """
        with self._ctx.agreement("plan.input_buffer"):
            planned = self._opened()
        buffer, call = planned.with_own_x()
        if call is not planned:
            self._product.close()
            self._prepare(call.operands())
            self._hold(call)
        return buffer

    def graph(self) -> Graph[Result]:
        """Return the plan as a CUDA graph, to be replayed at the cost of one launch. Collective over the context.

        A replay reads the current values of the planned arrays, of a tensor-parallel product those of its last run, and
        writes the same result. A plan that has never run is run once first, which writes its result.

        Raises:
            UnsupportedError: the engine has no graphs, or the algorithm cannot be recorded.
            ClosedError: the plan is closed.
        """
        with self._ctx.agreement("plan.graph") as facts:
            call, engine = self._opened(), self._ctx.engine
            call.check_gradients()
            if not engine.traits.records:
                raise UnsupportedError(
                    f"a CUDA graph: the {engine.name} engine has none, expected a GPU: call the plan itself"
                )
            facts["plan"] = self._number
        bound = self._bound
        assert bound is not None
        with self._ctx.agreement("plan.graph: capturing"), call.stream():
            result, launch = call.recorded(), bound.capture()

        def replay() -> None:
            with engine.on_device(), call.stream():
                launch()

        return Graph(replay, result)

    def report(self) -> Report:
        """Return what the plan does on this rank. Local."""
        engine, product = self._ctx.engine, self._product
        return Report(
            call=self._title(),
            engine=engine.name,
            asked=self._task.options.algo,
            path=product.path,
            sent_bytes=product.sent_bytes,
            copied_bytes=product.copied_bytes,
            workspace=product.workspace,
            algorithms=self._choice.verdicts(),
            moved=product.moved,
            notes=self._task.reasons + product.notes + engine.remarks,
        )

    def _title(self) -> str:
        if isinstance(self._task.problem, ParallelProblem):
            return self._task.problem.on_rank(self._ctx.rank)
        return str(self._task.problem)

    def __repr__(self) -> str:
        state = "" if self._open else ", closed"
        return f"Plan({self._title()}: {self._product.path}{state})"

    def close(self) -> None:
        """Free what only this plan holds. Collective over the context; idempotent."""
        if self._open:
            self._open = self._only_queues = False
            self._ctx.release(self)
            if self._call is not None:
                self._call.close()
                self._call = self._bound = None
            self._ctx.kept.release(self._number)
            with self._ctx.engine.on_device():
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


def _by_name(names: Sequence[str], operands: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return by name the operands that are given, or raise an error as Python does. Local."""
    known = ", ".join(names)
    if len(operands) > len(names):
        raise ArgumentTypeError(f"plan: expected at most {len(names)} operands, {known}, got {len(operands)}")
    given = dict(zip(names, operands, strict=False))
    for name, x in named.items():
        if name not in names:
            raise ArgumentTypeError(f"{name}: expected one of the planned operands {known}")
        if name in given:
            raise ArgumentTypeError(f"{name}: is given twice")
        given[name] = x
    return {name: x for name, x in given.items() if x is not None}
