# SPDX-License-Identifier: Apache-2.0
"""ParallelPlan: a tensor-parallel product prepared once; and how the plain functions keep theirs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import adopted, folded, on_stream_of, shown_like
from ..context import Context
from ..dtypes import is_float8
from ..engines.base import Workspace
from ..engines.pieces import GatheredInput
from ..errors import ClosedError, LayoutError
from ..plans import Graph
from ..report import Report
from ..scales import Scales
from .operands import Arrays, Asked, Local, Operands, Specification, understood
from .ways import prepared

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["ParallelPlan", "planned", "run_once"]


class ParallelPlan:
    """A prepared product; a context manager. Made by ``plan_allgather_matmul`` and its siblings."""

    def __init__(self, ctx: Context, spec: Specification, operands: Operands) -> None:
        self._ctx, self._spec = ctx, spec
        self._last: Operands | None = None
        self._followed: Operands | None = None  # whose epilogue the product has
        self._buffer: Any = None
        self._memory: Any = None  # the buffer's, where it is symmetric
        self._open = True
        with ctx.agreement(f"{spec.asked.form}: preparing"):
            self._product = prepared(ctx, spec, operands)
        self._number = ctx.adopt(self)

    @property
    def workspace(self) -> Workspace:
        """Memory that the plan needs on this rank beside its operands, in bytes; shared with other plans. Local."""
        return self._product.workspace

    def __call__(
        self,
        x: Any = None,
        w: Any = None,
        c: Any = None,
        *,
        out: Any = None,
        bias: Any = None,
        scales: Scales | None = None,
    ) -> Any:
        """Multiply and return the result, which the next run without ``out`` writes again. Collective over the context.

        Args:
            x, w, c, bias, scales: like the planned ones; by default those of the run before. Without any, nothing is
                checked, and GPUs are only given work.
            out: where to write the result; by default where the run before wrote it.

        Raises:
            LayoutError: an array does not fit what was planned.
            ClosedError: the plan is closed.
        """
        new = Arrays(x, w, c, out, bias, scales)
        last = self._last
        with _stream(new if last is None else last.given):
            if last is not None and all(array is None for array in new) and not self._ctx.engine.agrees:
                return self.run(last)
            with self._ctx.agreement("plan") as facts:
                if not self._open or last is None:
                    raise ClosedError("this plan is closed")
                facts["plan"] = self._number
                if any(array is not None for array in new):
                    last = self._fitting(new, last)
                facts["scales"] = last.scales and last.scales.facts()
            self._last = last
            return self.run(last)

    def _fitting(self, new: Arrays, last: Operands) -> Operands:
        """Return operands like those of the last run, or raise LayoutError. Local."""
        given = Arrays(*(old if array is None else array for array, old in zip(new, last.given, strict=True)))
        if given.out is None:
            given = given._replace(out=last.result)
        operands = understood(self._ctx, self._spec.asked, given)
        faults = [
            f"{name} is {found}, the plan is for {expected}"
            for name, found, expected in (
                *zip(_SIZES, operands.local, last.local, strict=True),
                ("x: shape but for the last dimension", operands.lead, last.lead),
                ("x: dtype", operands.dtype.name, last.dtype.name),
                ("w: dtype", operands.w_dtype.name, last.w_dtype.name),
                ("c: dtype", operands.c_dtype.name, last.c_dtype.name),
                ("bias: its presence", operands.bias is not None, last.bias is not None),
                ("scales", operands.scales, last.scales),
            )
            if repr(found) != repr(expected)
        ]
        if faults:
            raise LayoutError("; ".join(faults))
        operands.complete(self._ctx, self._spec)
        return operands

    def run(self, operands: Operands) -> Any:
        """Multiply what the ranks have agreed on. Collective over the context."""
        product = self._product
        self._follow(operands)
        if isinstance(product, GatheredInput):
            product.gathered = operands.gathered
        product.run(operands.x, operands.w, operands.c, operands.out)
        if operands.gathered is None:
            return operands.result
        return operands.result, operands.gathered_result

    def _follow(self, operands: Operands) -> None:
        """Let the product have the epilogue and the scales of these operands. Local."""
        if operands is not self._followed:
            epilogue = operands.epilogue(self._spec)
            if epilogue is not None or operands.scales is not None:
                self._product.follow(epilogue, operands.scales)
            self._followed = operands

    def run_and_forget(self, operands: Operands) -> Any:
        """Multiply, and hold no array afterwards. Collective over the context."""
        try:
            return self.run(operands)
        finally:
            self._followed = None
            self._product.release()

    def remember(self, operands: Operands, buffer: Any, memory: Any) -> None:
        """Take operands for those of the last run, and ``buffer`` for the plan's own x. Local."""
        self._last, self._buffer, self._memory = operands, buffer, memory

    def input_buffer(self) -> Any:
        """Return the plan's own array for x, which it then reads: fill it, and call ``plan()``. Collective.

        Collective over the context. For AllGather + GEMM it lies in memory that other GPUs reach (cublasmp), from where
        it is gathered without a copy. It is yours until the plan is closed, and of the library that the planned ``x``
        or else ``w`` is of.

        Raises:
            ClosedError: the plan is closed.
        """
        last = self._last
        with self._ctx.agreement("plan.input_buffer"):
            if not self._open or last is None:
                raise ClosedError("this plan is closed")
        if self._buffer is None:
            self._buffer, self._memory = made_buffer(self._ctx, self._spec, last)
        if last.given.x is not self._buffer:
            operands = self._fitting(Arrays(self._buffer, None), last)
            with self._ctx.agreement("plan.input_buffer: preparing"):
                self._product.close()
                self._product = prepared(self._ctx, self._spec, operands)
            self._last = operands
        return self._buffer

    def graph(self) -> Graph[Any]:
        """Return the plan as a CUDA graph, to be replayed at the cost of one launch. Collective over the context.

        A replay reads what the arrays of the last run, or the planned ones, then hold, and writes the same result. The
        plan is run once first.

        Raises:
            UnsupportedError: the plan is not a single call of cuBLASMp: it runs on the host, piece by piece, or
                something is computed after the product.
            ClosedError: the plan is closed.
        """
        last = self._last
        with self._ctx.agreement("plan.graph") as facts:
            if not self._open or last is None:
                raise ClosedError("this plan is closed")
            facts["plan"] = self._number
        with _stream(last.given):
            self._follow(last)
            with self._ctx.agreement("plan.graph: capturing"):
                launch = self._product.capture(last.x, last.w, last.c, last.out)

        def replay() -> None:
            with _stream(last.given):
                launch()

        return Graph(replay, last.result)

    def report(self) -> Report:
        """Return what the plan does on this rank. Local."""
        spec, product = self._spec, self._product
        asked, rank = spec.asked, self._ctx.rank
        types = spec.dtype.name
        if is_float8(spec.dtype):
            types = f"{types} by {spec.w_dtype.name} to {spec.out_dtype.name}"
        w = f"{spec.outputs[rank]} x {spec.inputs[rank]}"
        if not spec.outputs_first:
            w = f"{spec.inputs[rank]} x {spec.outputs[rank]}"
        return Report(
            call=f"{types} {asked.form} on {self._ctx.size} ranks: "
            f"x {spec.tokens[rank]} x {spec.inputs[rank]}, w {w} in C order on this one",
            engine=f"{self._ctx.engine.name} ({self._ctx.engine.why})",
            asked=asked.algo,
            path=product.path,
            sent_bytes=product.sent_bytes,
            copied_bytes=product.copied_bytes,
            workspace=product.workspace,
            notes=product.notes,
        )

    def close(self) -> None:
        """Give back what only this plan holds. Collective over the context; idempotent."""
        if self._open:
            self._open = False
            if self._memory is not None:
                self._ctx.engine.recycle(self._memory)
            self._last = self._followed = self._buffer = self._memory = None
            self._ctx.release(self)
            self._product.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_SIZES = ("x: the first dimension", "x: the last dimension", "w: the number of outputs",
          *(f"{name}: the leading dimension" for name in ("x", "w", "c", "out")),
          "w: which dimension comes first in memory")  # fmt: skip


def made_buffer(ctx: Context, spec: Specification, operands: Operands) -> tuple[Any, Any]:
    """Return a new array for x, and its memory if that is symmetric: where x is gathered. Collective."""
    rows, width = spec.tokens[ctx.rank], operands.inputs
    ld = max(1, width, spec.ranks[ctx.rank].ld_x)  # the planned x's: others like it may take its place again
    symmetric = spec.asked.form == "allgather_matmul"
    if symmetric:
        local = ctx.engine.empty((rows, width), operands.dtype, "C", ld, symmetric=True)
    else:
        with ctx.agreement("input buffer"):
            local = ctx.engine.empty((rows, width), operands.dtype, "C", ld)
    like = operands.given.w if isinstance(operands.given.x, tuple) else operands.given.x
    shown = shown_like(like, local.reshape(*operands.lead, width), operands.dtype)
    return shown, local if symmetric else None


def check_context(ctx: object, call: str) -> None:
    """Raise LayoutError unless ``ctx`` is a context. Local."""
    if not isinstance(ctx, Context):
        raise LayoutError(f"{call}: ctx: expected a pblasmp.Context, got {type(ctx).__name__}")


def agreed(
    ctx: Context, asked: Asked, given: Arrays, *, shape_will_do: bool = False
) -> tuple[Specification, Operands]:
    """Return what the ranks ask for together, and this rank's operands. Collective over the context."""
    check_context(ctx, asked.form)
    with ctx.agreement(asked.form) as facts:
        if isinstance(given.x, tuple) and not shape_will_do:
            raise LayoutError(f"x: expected an array, got {given.x}: only a plan takes a shape")
        operands = understood(ctx, asked, given)
        options = asked.options(operands.out_dtype)
        lead = operands.lead[1:] if asked.splits_tokens else operands.lead
        equal = {"outputs": operands.outputs}
        if asked.form in ("allgather_matmul", "matmul_allgather"):
            equal = {"inputs": operands.inputs}
        if asked.form == "matmul_reduce_scatter":
            equal["tokens"] = operands.lead[0]
        facts.update(
            dtype=operands.dtype.name, w=operands.w_dtype.name, c=operands.c_dtype.name, out=operands.out_dtype.name,
            options=options, activation=asked.activation, scales=operands.scales and operands.scales.facts(),
            bias=operands.bias is not None, return_gathered=asked.return_gathered, **equal,
            **{"x's other dimensions": lead},
        )  # fmt: skip
    mine = np.zeros((ctx.size, len(Local._fields)), np.int64)
    mine[ctx.rank] = operands.local
    every = np.empty_like(mine)
    request = ctx.comm.imax(mine, every)
    if request is not None:
        ctx.comm.wait(request)
    eight = is_float8(operands.dtype)
    resolved = replace(
        asked, dtype=operands.out_dtype, alpha=options.alpha, beta=options.beta, comm_dtype=options.comm_dtype,
        x_dtype=operands.dtype if eight else None, w_dtype=operands.w_dtype if eight else None, by_rule=False,
    )  # fmt: skip
    ranks = tuple(Local(*row) for row in every.tolist())
    memory = [rank.w_memory for rank in ranks if rank.w_memory]
    outputs_first = memory[0] == 1 if memory else operands.outputs_first or eight
    spec = Specification(
        resolved, options, operands.dtype, operands.w_dtype, operands.c_dtype, operands.out_dtype, outputs_first,
        operands.lead[1:], operands.bias is not None, () if operands.scales is None else operands.scales.given, ranks,
    )  # fmt: skip
    with ctx.agreement(asked.form) as facts:
        if eight and not outputs_first:
            raise LayoutError(
                "w: inputs are not contiguous in memory: 8-bit weights are outputs x inputs, as torch.nn has them"
            )
        if asked.by_rule:
            spec.check_rule()
        operands.complete(ctx, spec)
        facts["w's outputs come first in memory"] = operands.outputs_first
    return spec, operands


def planned(ctx: Context, asked: Asked, given: Arrays) -> ParallelPlan:
    """Return a plan of the user's own. Collective over the context."""
    with _stream(given):
        spec, operands = agreed(ctx, asked, given, shape_will_do=True)
        buffer = memory = None
        if operands.x is None:
            buffer, memory = made_buffer(ctx, spec, operands)
            operands.given = given._replace(x=buffer)
            operands.x = folded(adopted(ctx.engine, buffer, "x"), "x")
        plan = ParallelPlan(ctx, spec, operands)
        plan.remember(operands, buffer, memory)
        return plan


def run_once(ctx: Context, asked: Asked, given: Arrays) -> Any:
    """Return the product, by a plan that the context keeps for the next time. Collective over the context."""
    with _stream(given):
        spec, operands = agreed(ctx, asked, given)
        plan = ctx.kept(spec, lambda: ParallelPlan(ctx, spec, operands))
        return plan.run_and_forget(operands)


def _stream(given: Arrays) -> AbstractContextManager[Any]:
    return on_stream_of(given.w if given.x is None or isinstance(given.x, tuple) else given.x)
