# SPDX-License-Identifier: Apache-2.0
"""Plans: what every routine prepares, runs and reports in the same way."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic, TypeVar

from .engines.base import Options, Workspace
from .errors import ClosedError, LayoutError, UnsupportedError
from .layout import Level3Problem, MatmulProblem
from .matrix import DistributedMatrix
from .report import Report
from .standins import StandIns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from .context import Context

__all__ = ["Graph", "Matrices", "RoutinePlan", "check_operands", "check_overlap", "context_of", "stand_ins"]

Matrices = dict[str, DistributedMatrix | None]
Result = TypeVar("Result")


def context_of(call: str, *matrices: object) -> Context:
    """Return the context of the first distributed matrix. Local.

    Raises:
        LayoutError: there is none.
    """
    for x in matrices:
        if isinstance(x, DistributedMatrix):
            return x.context
    raise LayoutError(
        f"{call}: expected distributed matrices; ctx.scatter, ctx.load and ctx.from_local make them"
    )


def check_operands(ctx: Context, required: str, matrices: Mapping[str, object]) -> None:
    """Raise LayoutError unless all that is ``required``, and all that is given, are matrices of ``ctx``. Local."""
    for name, x in matrices.items():
        if x is None and name not in required:
            continue
        if not isinstance(x, DistributedMatrix):
            raise LayoutError(f"{name}: expected a DistributedMatrix, got {type(x).__name__}")
        if x.context is not ctx:
            raise LayoutError(f"{name}: belongs to another context")


def check_overlap(ctx: Context, matrices: Matrices, in_place: str) -> None:
    """Raise LayoutError if D shares memory with an operand, unless it is the operand ``in_place`` itself. Local."""
    out = matrices["d"]
    assert out is not None
    if not getattr(out.local.flags, "writeable", True):
        raise LayoutError("out: its local array is read-only")
    for name in "abc":
        x = matrices[name]
        if x is None:
            continue
        first = x.local[:1, :1], out.local[:1, :1]
        if name == in_place and x.descriptor == out.descriptor and ctx.engine.overlap(*first):
            continue  # the same memory
        if ctx.engine.overlap(x.local, out.local):
            expected = f"{name} itself or a matrix of its own" if name == in_place else "a matrix of its own"
            raise LayoutError(f"out: shares memory with {name}; expected {expected}")


def stand_ins(
    ctx: Context, asked: MatmulProblem | Level3Problem, problem: MatmulProblem | Level3Problem
) -> dict[str, DistributedMatrix]:
    """Return a new matrix for each operand that lies otherwise in ``problem`` than in ``asked``. Local."""
    return {
        name: ctx.allocate(new)
        for name in "abcd"
        if (new := getattr(problem, name)) is not None and new != getattr(asked, name)
    }


class Graph(Generic[Result]):
    """A plan as a CUDA graph, until the plan is closed. Made by ``plan.graph()``."""

    def __init__(self, replay: Callable[[], None], result: Result) -> None:
        self._replay, self._result = replay, result

    def replay(self) -> Result:
        """Queue the routine on the current stream and return its result. Collective over the context.

        Raises:
            ClosedError: the plan is closed, or another plan has replaced the workspace since: make the graph again.
        """
        self._replay()
        return self._result


class RoutinePlan:
    """A prepared routine; a context manager. Made by ``plan_matmul`` and ``plan``.

    Attributes:
        problem: what the engine runs: the caller's problem, or its legal form after redistribution.
        workspace: memory that it needs beside its operands on this rank.
    """

    def __init__(
        self,
        ctx: Context,
        call: str,
        asked: MatmulProblem | Level3Problem,
        problem: MatmulProblem | Level3Problem,
        matrices: Matrices,
        moved: dict[str, DistributedMatrix],
        options: Options,
        reasons: tuple[str, ...],
        *,
        in_place: str = "c",
        seeded: bool = False,
    ) -> None:
        """Prepare. Collective over the context.

        Args:
            ctx: the context of all the matrices.
            call: the routine's name.
            asked: the caller's problem.
            problem: the one that the engine runs.
            matrices: the caller's "a", "b", "c" and the result "d"; None for those that there are not.
            moved: matrices that the engine uses instead, each laid out as ``problem`` says.
            options: scalars, algorithm and the like.
            reasons: why operands are moved, for the report.
            in_place: the operand that the result may be.
            seeded: the result begins as a copy of C, for what the routine does not write.
        """
        self._reasons = reasons
        self._ctx, self._name, self._asked, self.problem, self._options = ctx, call, asked, problem, options
        self._matrices, self._in_place, self._seeded = matrices, in_place, seeded
        self._open = True
        sums = options.epilogue is not None and {"bias_grad_a", "bias_grad_b"} & {*options.epilogue.given}
        read = ["a", "b"] * (options.alpha != 0 or bool(sums)) + ["c"] * (options.beta != 0)
        if isinstance(problem, Level3Problem) and problem.written is not None:
            read.append("d")  # what is not written comes back as it went
        with ctx.agreement(f"{call}: preparing"), ExitStack() as closing:
            self._stand_ins = StandIns(ctx.engine, matrices, moved, read)
            closing.callback(self._stand_ins.close)
            self._locals = tuple(self._stand_ins.used(matrices).values())
            if isinstance(problem, MatmulProblem):
                self._product = ctx.engine.prepare(problem, options, self._locals)
            else:
                self._product = ctx.engine.prepare_level3(problem, options, self._locals)
            closing.pop_all()
        self._only_queues = not ctx.engine.agrees and not moved and not seeded
        self._number = ctx.adopt(self)

    @property
    def workspace(self) -> Workspace:
        """Memory that the plan needs on this rank beside its operands, in bytes; shared with other plans. Local."""
        own, moves = self._product.workspace, self._stand_ins.workspace
        return Workspace(max(own.device_bytes, moves.device_bytes), max(own.host_bytes, moves.host_bytes))

    @property
    def _result(self) -> DistributedMatrix:
        result = self._matrices["d"]
        assert result is not None
        return result

    def __call__(
        self,
        a: DistributedMatrix | None = None,
        b: DistributedMatrix | None = None,
        c: DistributedMatrix | None = None,
    ) -> DistributedMatrix:
        """Run and return the result, on the planned matrices or on others that lie the same way.

        Collective over the context.

        Raises:
            LayoutError: a matrix does not lie as the planned one.
            ClosedError: the plan is closed.
        """
        if self._only_queues and self._open and a is None and b is None and c is None:
            self._product.run(*self._locals)
            return self._result
        with self._ctx.agreement("plan") as facts:
            if not self._open:
                raise ClosedError("this plan is closed")
            given = {"a": a, "b": b, "c": c}
            matrices = {name: self._replaced(name, x) for name, x in given.items()} | {"d": self._result}
            replaced = [x is not None for x in given.values()]
            facts.update(plan=self._number, product=self._asked, replaced=replaced)
            check_overlap(self._ctx, matrices, self._in_place)
        self._run(matrices)
        return self._result

    def _run_agreed(self) -> DistributedMatrix:
        """Run on the planned matrices, on which the ranks have just agreed. Collective over the context."""
        self._run(self._matrices)
        return self._result

    def _replaced(self, name: str, x: DistributedMatrix | None) -> DistributedMatrix | None:
        planned = self._matrices[name]
        if x is None:
            return planned
        check_operands(self._ctx, name, {name: x})
        if planned is None or x.descriptor != planned.descriptor:
            expected = "no matrix" if planned is None else str(planned.descriptor)
            raise LayoutError(f"{name}: lies as {x.descriptor}, the plan is for {expected}")
        moved = name in self._stand_ins
        misfit = self._stand_ins.misfit(name, x) if moved else self._product.misfit(name, x.local)
        if misfit:
            raise LayoutError(f"{name}: {misfit}")
        return x

    def _run(self, matrices: Matrices) -> None:
        out, c = self._result, matrices["c"]
        with self._ctx.running(self._name):
            if self._seeded and c is not None and out.local.size:
                out.local[...] = c.local
            self._stand_ins.move_in(matrices)
            self._product.run(*self._stand_ins.used(matrices).values())
            self._stand_ins.move_out(matrices)

    def graph(self) -> Graph[DistributedMatrix]:
        """Return the plan as a CUDA graph, to be replayed at the cost of one launch. Collective.

        Collective over the context. A replay reads what the planned matrices then hold. The plan is run once first if
        it never was, which writes its result.

        Raises:
            UnsupportedError: the engine has no graphs, or operands are moved first.
            ClosedError: the plan is closed.
        """
        with self._ctx.agreement("plan.graph"):
            if not self._open:
                raise ClosedError("this plan is closed")
            if self._stand_ins:
                raise UnsupportedError("a CUDA graph: this plan moves operands first")
            if self._seeded:
                raise UnsupportedError("a CUDA graph: this plan copies C first, give out=")
        with self._ctx.agreement("plan.graph: capturing"):
            replay = self._product.capture(*self._locals)
        return Graph(replay, self._result)

    def report(self) -> Report:
        """Return what the plan does on this rank. Local."""
        return Report(
            call=str(self._asked),
            engine=f"{self._ctx.engine.name} ({self._ctx.engine.why})",
            asked=self._options.algo,
            path=self._product.path,
            sent_bytes=self._product.sent_bytes + self._stand_ins.sent_bytes,
            copied_bytes=self._product.copied_bytes + self._stand_ins.copied_bytes,
            workspace=self.workspace,
            moved=self._stand_ins.told(),
            notes=self._reasons + self._product.notes,
        )

    def close(self) -> None:
        """Give back what only this plan holds. Collective over the context; idempotent."""
        if self._open:
            self._open = False
            self._ctx.release(self)
            with ExitStack() as last_first:
                last_first.callback(self._stand_ins.close)
                last_first.callback(self._product.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
