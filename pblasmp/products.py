# SPDX-License-Identifier: Apache-2.0
"""Products of distributed matrices: check and agree, plan, run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from .dtypes import as_dtype, scalar
from .engines.base import Options, Workspace
from .epilogue import Epilogue
from .errors import ClosedError, LayoutError, UnsupportedError
from .layout import MatmulProblem, MatrixDescriptor
from .layout.legal import legalised
from .layout.schemes import scheme_operands
from .matrix import DistributedMatrix
from .report import Report
from .standins import StandIns

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from numpy.typing import DTypeLike
    from typing_extensions import Self

    from .context import Context
    from .layout.problem import Op
    from .layout.schemes import Scheme

__all__ = ["MatmulGraph", "MatmulPlan", "matmul", "plan_matmul"]


def matmul(
    a: DistributedMatrix,
    b: DistributedMatrix,
    c: DistributedMatrix | None = None,
    *,
    out: DistributedMatrix | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    op_a: Op = "N",
    op_b: Op = "N",
    epilogue: Epilogue | None = None,
    algo: str = "auto",
    scheme: Scheme = "gemm",
    redistribute: bool = False,
    compute: str | None = None,
    comm_dtype: DTypeLike | None = None,
    comm_sms: int | None = None,
) -> DistributedMatrix:
    """Return ``alpha op(A) op(B) + beta C``. Collective over the context.

    Args:
        a, b: matrices of one context and one type. Products of float16 and bfloat16 are summed in float32.
        c: lies like the result; None stands for zeros. With ``beta == 0`` it is never read.
        out: where to write the result, which may be ``c``; by default a new matrix: blocks of op(A)'s rows and op(B)'s
            columns, on A's grid, in A's memory order.
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
        op_a, op_b: "N", "T" or "C" (conjugate transpose).
        epilogue: what follows the product: a bias, an activation, their gradients (``Epilogue``).
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels").
        scheme: "gemm", or "ag", "rs", "ar" for the 1D layouts of ``MatmulProblem.allgather`` and its siblings.
        redistribute: move operands that break a rule to a legal layout first, instead of raising.
        compute: what products are summed in; None is the type itself, float32 for 16-bit types. cublasmp also has
            "tf32" and "bf16x9" (float32) and "fixedpoint" (float64).
        comm_dtype: type in which partial sums travel (cublasmp, schemes "rs" and "ar"); None is D's type.
        comm_sms: streaming multiprocessors that communicate (cublasmp); None leaves it to the library.

    Raises:
        LayoutError: the layouts break a rule; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
        ClosedError: the context is closed.
    """
    plan = plan_matmul(
        a, b, c, out=out, alpha=alpha, beta=beta, op_a=op_a, op_b=op_b,
        epilogue=epilogue, algo=algo, scheme=scheme, redistribute=redistribute,
        compute=compute, comm_dtype=comm_dtype, comm_sms=comm_sms,
    )  # fmt: skip
    try:
        return plan._run_agreed()
    finally:
        plan.close()


def plan_matmul(
    a: DistributedMatrix,
    b: DistributedMatrix,
    c: DistributedMatrix | None = None,
    *,
    out: DistributedMatrix | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    op_a: Op = "N",
    op_b: Op = "N",
    epilogue: Epilogue | None = None,
    algo: str = "auto",
    scheme: Scheme = "gemm",
    redistribute: bool = False,
    compute: str | None = None,
    comm_dtype: DTypeLike | None = None,
    comm_sms: int | None = None,
) -> MatmulPlan:
    """Prepare ``matmul`` with the same arguments, to run it any number of times. Collective over the context.

    Returns:
        A plan: ``plan()`` multiplies what the matrices then hold. Without ``out`` every run writes the same new matrix.

    Raises:
        As ``matmul``.
    """
    ctx = _context(a, b, c, out)
    with ctx.agreement("matmul") as facts:
        for name, x in (("a", a), ("b", b), ("c", c), ("out", out)):
            if x is None and name in ("c", "out"):
                continue
            if not isinstance(x, DistributedMatrix):
                raise LayoutError(f"{name}: expected a DistributedMatrix, got {type(x).__name__}")
            if x.context is not ctx:
                raise LayoutError(f"{name}: belongs to another context")
        a, op_a = _untransposed(a, op_a)
        b, op_b = _untransposed(b, op_b)
        d = (
            out.descriptor
            if out is not None
            else _default_result(a.descriptor, b.descriptor, c, op_a, op_b, scheme)
        )
        asked = MatmulProblem(
            a.descriptor, b.descriptor, d, op_a, op_b, None if c is None else c.descriptor, scheme
        )
        alpha, beta = scalar(alpha, d.dtype, "alpha"), scalar(beta, d.dtype, "beta")
        options = Options(
            alpha, beta, algo, compute, None if comm_dtype is None else as_dtype(comm_dtype), comm_sms
        )
        facts.update(redistribute=redistribute, out="given" if out is not None else "new")
        facts.update(
            {each.name: getattr(value, each.name) for value in (asked, options) for each in fields(value)}
        )
        if not isinstance(epilogue, (Epilogue, type(None))):
            raise LayoutError(f"epilogue: expected an Epilogue, got {type(epilogue).__name__}")
        facts["epilogue"] = epilogue and epilogue.facts()
        problem = legalised(asked) if redistribute and scheme == "gemm" else asked
        _validate(problem, asked, redistribute)
        problem, reasons = ctx.engine.suited(problem)
        if beta != 0 and c is None:
            raise LayoutError(f"c: beta is {beta}, expected a matrix to scale by it")
        result = ctx.allocate(d) if out is None else out
        options = replace(options, epilogue=_epilogue(ctx, epilogue, asked, problem, (a, b, c, result)))
        _check_overlap(ctx, a, b, c, result)
        stand_ins = {
            name: ctx.allocate(new)
            for name in "abcd"
            if (new := getattr(problem, name)) is not None and new != getattr(asked, name)
        }
    return MatmulPlan(ctx, asked, problem, (a, b, c, result), stand_ins, options, reasons)


def _context(*matrices: object) -> Context:
    for x in matrices:
        if isinstance(x, DistributedMatrix):
            return x.context
    raise TypeError(
        "matmul: expected distributed matrices; ctx.scatter, ctx.load and ctx.from_local make them"
    )


def _untransposed(x: DistributedMatrix, op: Op) -> tuple[DistributedMatrix, Op]:
    """Return ``A, "T"`` for ``A.T, "N"`` and the like, so that the result lies as A's user would expect."""
    if x.transpose_of is None or (op == "C" and x.dtype.kind == "c"):
        return x, op
    return _untransposed(x.transpose_of, "T" if op == "N" else "N")


def _default_result(
    a: MatrixDescriptor, b: MatrixDescriptor, c: DistributedMatrix | None, op_a: str, op_b: str, scheme: str
) -> MatrixDescriptor:
    if c is not None:
        return replace(c.descriptor, ld=None)
    probe = MatmulProblem(a, b, a, op_a, op_b, scheme=scheme)  # type: ignore[arg-type]  # checks ops and scheme
    m, n, k = probe.m, probe.n, probe.k
    if scheme != "gemm":
        form = probe.column_major()
        if form.swapped:
            m, n = n, m
        d = scheme_operands(scheme, m, n, k, a.grid.size, form.op_a, form.op_b, a.dtype)[2]
        return d.T if form.swapped else d
    along = int(op_a != "N"), int(op_b == "N")
    block = a.block[along[0]], b.block[along[1]]
    source = (
        a.source[0] if op_a == "N" else 0,
        b.source[1] if op_b == "N" and b.grid.same_ranks(a.grid) else 0,
    )
    return MatrixDescriptor((m, n), block, a.grid, source, a.dtype, a.order)


def _validate(problem: MatmulProblem, asked: MatmulProblem, redistribute: bool) -> None:
    try:
        problem.validate()
    except LayoutError as error:
        if not redistribute and problem.scheme == "gemm" and not legalised(asked).faults():
            raise LayoutError(
                f"{error}\n  redistribute=True moves the operands to legal layouts first"
            ) from None
        raise


def _check_overlap(
    ctx: Context,
    a: DistributedMatrix,
    b: DistributedMatrix,
    c: DistributedMatrix | None,
    out: DistributedMatrix,
) -> None:
    if not getattr(out.local.flags, "writeable", True):
        raise LayoutError("out: its local array is read-only")
    for name, x in (("a", a), ("b", b)):
        if ctx.engine.overlap(x.local, out.local):
            raise LayoutError(f"out: shares memory with {name}; expected a matrix of its own")
    if c is not None and c.descriptor != out.descriptor and ctx.engine.overlap(c.local, out.local):
        raise LayoutError("out: shares memory with c; expected c itself or a matrix of its own")


def _epilogue(
    ctx: Context,
    epilogue: Epilogue | None,
    asked: MatmulProblem,
    problem: MatmulProblem,
    matrices: tuple[DistributedMatrix | None, ...],
) -> Epilogue | None:
    """Return an epilogue over the engine's arrays, None for one that does nothing."""
    if epilogue is None or not epilogue.name:
        return None
    if ctx.engine.name != "host":
        raise UnsupportedError("epilogue: so far on the host engine alone")
    if problem.d != asked.d:
        raise LayoutError("epilogue: D is moved after the product; expected a D that is legal as it lies")
    fitted = epilogue.adopted(ctx.engine.adopt, problem, ctx.rank)
    for name in fitted.outputs:
        for letter, x in zip("abcd", matrices, strict=True):
            if x is not None and ctx.engine.overlap(getattr(fitted, name), x.local):
                raise LayoutError(
                    f"epilogue: {name}: shares memory with {letter}; expected an array of its own"
                )
    return fitted


class MatmulGraph:
    """A planned product as a CUDA graph. Made by ``plan.graph()``."""

    def __init__(self, replay: Callable[[], None], result: DistributedMatrix) -> None:
        self._replay, self._result = replay, result

    def replay(self) -> DistributedMatrix:
        """Queue the product on CuPy's current stream and return its result. Collective over the context.

        Raises:
            ClosedError: another plan has replaced the workspace since: make the graph again.
        """
        self._replay()
        return self._result


class MatmulPlan:
    """A prepared product; a context manager. Made by ``plan_matmul``.

    Attributes:
        problem: the product that the engine runs: the caller's, or its legal form after redistribution.
        workspace: memory that it needs beside its operands on this rank.
    """

    def __init__(
        self,
        ctx: Context,
        asked: MatmulProblem,
        problem: MatmulProblem,
        matrices: tuple[DistributedMatrix, DistributedMatrix, DistributedMatrix | None, DistributedMatrix],
        stand_ins: dict[str, DistributedMatrix],
        options: Options,
        reasons: tuple[str, ...],
    ) -> None:
        self._reasons = reasons
        self._ctx, self._asked, self.problem, self._options = ctx, asked, problem, options
        self._matrices = matrices
        self._open = True
        named = dict(zip("abcd", matrices, strict=True))
        read = ("a", "b") * (options.alpha != 0) + ("c",) * (options.beta != 0)
        with ctx.agreement("matmul: preparing"), ExitStack() as closing:
            self._stand_ins = StandIns(ctx.engine, named, stand_ins, read)
            closing.callback(self._stand_ins.close)
            self._locals = tuple(self._stand_ins.used(named).values())
            self._product = ctx.engine.prepare(problem, options, self._locals)
            closing.pop_all()
        self._only_queues = not ctx.engine.agrees and not stand_ins
        self._number = ctx.adopt(self)

    @property
    def workspace(self) -> Workspace:
        """Memory that the plan needs on this rank beside its operands, in bytes; shared with other plans. Local."""
        own, moves = self._product.workspace, self._stand_ins.workspace
        return Workspace(max(own.device_bytes, moves.device_bytes), max(own.host_bytes, moves.host_bytes))

    def __call__(
        self,
        a: DistributedMatrix | None = None,
        b: DistributedMatrix | None = None,
        c: DistributedMatrix | None = None,
    ) -> DistributedMatrix:
        """Multiply and return the result, on the planned matrices or on others that lie the same way.

        Collective over the context.

        Raises:
            LayoutError: a matrix does not lie as the planned one.
            ClosedError: the plan is closed.
        """
        if self._only_queues and self._open and a is None and b is None and c is None:
            self._product.run(*self._locals)
            return self._matrices[3]
        with self._ctx.agreement("plan") as facts:
            if not self._open:
                raise ClosedError("this plan is closed")
            given = [self._replaced(i, x) for i, x in enumerate((a, b, c))]
            out = self._matrices[3]
            facts.update(plan=self._number, product=self._asked, replaced=[x is not None for x in (a, b, c)])
            _check_overlap(self._ctx, given[0], given[1], given[2], out)  # type: ignore[arg-type]
        self._run(dict(zip("abcd", (*given, out), strict=True)))
        return out

    def _run_agreed(self) -> DistributedMatrix:
        """Multiply the planned matrices, on which the ranks have just agreed. Collective over the context."""
        self._run(dict(zip("abcd", self._matrices, strict=True)))
        return self._matrices[3]

    def _replaced(self, which: int, x: DistributedMatrix | None) -> DistributedMatrix | None:
        planned = self._matrices[which]
        if x is None:
            return planned
        if not isinstance(x, DistributedMatrix):
            raise LayoutError(f"{'abc'[which]}: expected a DistributedMatrix, got {type(x).__name__}")
        if x.context is not self._ctx:
            raise LayoutError(f"{'abc'[which]}: belongs to another context")
        if planned is None or x.descriptor != planned.descriptor:
            expected = "no matrix" if planned is None else str(planned.descriptor)
            raise LayoutError(f"{'abc'[which]}: lies as {x.descriptor}, the plan is for {expected}")
        moved = "abc"[which] in self._stand_ins
        misfit = (
            self._stand_ins.misfit("abc"[which], x) if moved else self._product.misfit("abc"[which], x.local)
        )
        if misfit:
            raise LayoutError(f"{'abc'[which]}: {misfit}")
        return x

    def _run(self, matrices: dict[str, DistributedMatrix | None]) -> None:
        self._stand_ins.move_in(matrices)
        self._product.run(*self._stand_ins.used(matrices).values())
        self._stand_ins.move_out(matrices)

    def graph(self) -> MatmulGraph:
        """Return the planned product as a CUDA graph, to be replayed at the cost of one launch. Collective.

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
        with self._ctx.agreement("plan.graph: capturing"):
            replay = self._product.capture(*self._locals)
        return MatmulGraph(replay, self._matrices[3])

    def report(self) -> Report:
        """Return what the plan does on this rank. Local."""
        p = self._asked
        scheme = "" if p.scheme == "gemm" else f", scheme {p.scheme}"
        return Report(
            call=f"{p.a.dtype.name} {p.op_a}{p.op_b} product of {p.m} x {p.n} x {p.k} on {p.d.grid}{scheme}",
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
