# SPDX-License-Identifier: Apache-2.0
"""ParallelPlan: a plan of a tensor-parallel product on changing arrays; and the plans that plain functions keep."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..calls import UserCall
from ..context import Context
from ..dtypes import is_float8
from ..engines.method import check_parallel
from ..errors import ArgumentError, ArgumentTypeError
from ..interop import as_local, fold, on_stream_of, view_like
from ..plans import Plan
from ..runtime import Runtime
from .operands import (
    Arrays,
    Local,
    RankArrays,
    Request,
    Specification,
    read_again,
    read_arrays,
    signature,
)

if TYPE_CHECKING:
    from ..layout.parallel import Form
    from ..scales import Scales

__all__ = ["ParallelCall", "ParallelPlan", "check_algorithm", "check_context"]

Reading = tuple[Any, RankArrays]  # the first: a Specification, None until the arrays of all ranks are known


class ParallelPlan(Plan[Any]):
    """A prepared product; a context manager. Made by ``pb.plan(pb.allgather_matmul, ...)`` and the like."""

    def __init__(self, ctx: Runtime[Any], spec: Specification, arrays: RankArrays) -> None:
        self._spec = spec
        self._last: RankArrays | None = None  # plans that plain functions share hold no arrays
        self._buffer: Any = None
        self._memory: Any = None  # of the buffer, if it is symmetric
        super().__init__(ctx, spec.asked.form, spec.problem, spec.options, arrays.operands(spec))

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
        """Multiply and return the result, which the next run without ``out`` overwrites. Collective over the context.

        Args:
            x, w, c, bias, scales: like the planned ones; by default those of the previous run. If none is given,
                nothing is checked, and on GPUs work is only queued.
            out: where to write the result; by default where the previous run wrote it.

        Raises:
            ArgumentError: an array does not fit what was planned.
            ClosedError: the plan is closed.
        """
        last = self._last
        again = x is None and w is None and c is None and out is None and bias is None and scales is None
        if last is not None and again and self._open and self._product.queues:
            with _stream(self._ctx, last.given):
                return self._run(last)
        new = Arrays(x, w, c, out, bias, scales)
        with _stream(self._ctx, new if last is None else last.given):
            with self._ctx.agreement("plan") as facts:
                self._check_open()
                assert last is not None
                facts["plan"] = self._number
                if not again:
                    last = self._fitting(new, last)
                facts["scales"] = last.scales and last.scales.facts()
            self._hold(last)
            return self._run(last)

    def _stream(self) -> Callable[[], AbstractContextManager[Any]]:
        assert self._last is not None
        return partial(_stream, self._ctx, self._last.given)

    def _fitting(self, new: Arrays, last: RankArrays) -> RankArrays:
        """Return arrays like those of the last run, or raise ArgumentError. Local."""
        given = Arrays(*(old if array is None else array for array, old in zip(new, last.given, strict=True)))
        if given.out is None:
            given = given._replace(out=last.result)
        arrays = read_arrays(self._ctx, self._spec.asked, given)
        faults = [
            f"{name} is {found}, the plan is for {expected}"
            for name, found, expected in (
                *zip(_SIZES, arrays.local, last.local, strict=True),
                ("x: shape but for the last dimension", arrays.lead, last.lead),
                ("x: dtype", arrays.dtype.name, last.dtype.name),
                ("w: dtype", arrays.w_dtype.name, last.w_dtype.name),
                ("c: dtype", arrays.c_dtype.name, last.c_dtype.name),
                ("bias: its presence", arrays.bias is not None, last.bias is not None),
                ("scales", arrays.scales, last.scales),
            )
            if repr(found) != repr(expected)
        ]
        if faults:
            raise ArgumentError("; ".join(faults))
        arrays.complete(self._ctx, self._spec)
        return arrays

    def _hold(self, arrays: RankArrays) -> None:
        """Let a run without arguments use these arrays. Local."""
        if arrays is not self._last:
            if self._bound is not None:
                self._bound.release()
            self._last, self._bound = arrays, self._product.bind(arrays.operands(self._spec))

    def _run(self, arrays: RankArrays) -> Any:
        """Multiply the arrays that the plan holds, on which the ranks have agreed. Collective over the context."""
        assert self._bound is not None
        with self._ctx.running(self._call):
            self._ctx.control.channel.runs += 1
            self._bound.run()
        return arrays.results

    def _run_with(self, reading: Reading) -> Any:
        """Multiply arrays on which the ranks have agreed, and keep none of them. Collective over the context."""
        arrays = reading[1]
        with self._ctx.running(self._call):
            self._ctx.control.channel.runs += 1
            self._product.run(arrays.operands(self._spec))
        return arrays.results

    def input_buffer(self) -> Any:
        """Return the plan's own array for x, which it reads from then on: fill it, and call ``plan()``. Collective.

        Collective over the context. For AllGather + GEMM it is in memory that other GPUs can reach (cublasmp), and is
        gathered from there without a copy. It is yours until the plan is closed. It is an array of the library of the
        planned ``x``, or of ``w`` if a shape was given for x.

        Raises:
            ClosedError: the plan is closed.
        """
        last = self._last
        with self._ctx.agreement("plan.input_buffer"):
            self._check_open()
        assert last is not None
        if self._buffer is None:
            self._use_buffer(*make_buffer(self._ctx, self._spec, last))
        if last.given.x is not self._buffer:
            arrays = self._fitting(Arrays(self._buffer, None), last)
            self._product.close()
            self._product, self._verdicts = self._prepare(self._spec.problem, arrays.operands(self._spec))
            self._hold(arrays)
        return self._buffer

    def _use_buffer(self, buffer: Any, memory: Any) -> None:
        """Take ``buffer`` for the plan's own x, in symmetric ``memory`` if there is any. Local."""
        self._buffer, self._memory = buffer, memory

    def _recorded(self) -> Any:
        assert self._last is not None
        return self._last.result

    def _title(self) -> str:
        spec, rank = self._spec, self._ctx.rank
        types = spec.dtype.name
        if is_float8(spec.dtype):
            types = f"{types} by {spec.w_dtype.name} to {spec.out_dtype.name}"
        w = f"{spec.outputs[rank]} x {spec.inputs[rank]}"
        if not spec.outputs_first:
            w = f"{spec.inputs[rank]} x {spec.outputs[rank]}"
        sizes = f"x {spec.tokens[rank]} x {spec.inputs[rank]}, w {w} in C order on this one"
        return f"{types} {spec.asked.form} on {self._ctx.size} ranks: {sizes}"

    def close(self) -> None:
        """Free what only this plan holds. Collective over the context; idempotent."""
        if self._open:
            if self._memory is not None:
                self._ctx.engine.recycle(self._memory)
            self._last = self._bound = self._buffer = self._memory = None
            super().close()


_SIZES = ("x: the first dimension", "x: the last dimension", "w: the number of outputs",
          *(f"{name}: the leading dimension" for name in ("x", "w", "c", "out")),
          "w: which dimension comes first in memory")  # fmt: skip


def make_buffer(ctx: Runtime[Any], spec: Specification, arrays: RankArrays) -> tuple[Any, Any]:
    """Return a new array for x, and its memory if that is symmetric, as it is if x is gathered. Collective."""
    rows, width = spec.tokens[ctx.rank], arrays.inputs
    # The planned x's leading dimension, so that arrays like that x may replace the buffer later.
    ld = max(1, width, spec.ranks[ctx.rank].ld_x)
    symmetric = spec.asked.form == "allgather_matmul"
    if symmetric:
        local = ctx.engine.empty((rows, width), arrays.dtype, "C", ld, symmetric=True)
    else:
        with ctx.agreement("input buffer"):
            local = ctx.engine.empty((rows, width), arrays.dtype, "C", ld)
    like = arrays.given.w if isinstance(arrays.given.x, tuple) else arrays.given.x
    shown = view_like(like, local.reshape(*arrays.lead, width), arrays.dtype)
    return shown, local if symmetric else None


def check_context(ctx: object, call: str) -> None:
    """Raise ArgumentError unless ``ctx`` is a context. Local."""
    if not isinstance(ctx, Context):
        raise ArgumentTypeError(f"{call}: ctx: expected a pblasmp.Context, got {type(ctx).__name__}")


def check_algorithm(ctx: Runtime[Any], form: Form, algo: str, argument: str) -> None:
    """Raise UnsupportedError unless ``algo``, the value of ``argument``, is a name that a product takes. Local.

    Whether the algorithm takes arrays of a given shape and type is only checked when they are multiplied.
    """
    check_parallel(ctx.engine, form, algo, argument)


def _agree(ctx: Runtime[Any], asked: Request, arrays: RankArrays) -> Specification:
    """Check that the arrays of all ranks fit together, and return what they ask for. Collective over the context."""
    options = asked.options(arrays.out_dtype)
    mine = np.zeros((ctx.size, len(Local._fields)), np.int64)
    mine[ctx.rank] = arrays.local
    every = np.empty_like(mine)
    request = ctx.comm.imax(mine, every)
    if request is not None:
        ctx.comm.wait(request)
    eight = is_float8(arrays.dtype)
    resolved = replace(
        asked, dtype=arrays.out_dtype, alpha=options.alpha, beta=options.beta, comm_dtype=options.comm_dtype,
        x_dtype=arrays.dtype if eight else None, w_dtype=arrays.w_dtype if eight else None, by_rule=False,
    )  # fmt: skip
    ranks = tuple(Local(*row) for row in every.tolist())
    memory = [rank.w_memory for rank in ranks if rank.w_memory]
    outputs_first = memory[0] == 1 if memory else arrays.outputs_first or eight
    spec = Specification(
        resolved, options, arrays.dtype, arrays.w_dtype, arrays.c_dtype, arrays.out_dtype, outputs_first,
        arrays.lead[1:], arrays.bias is not None, () if arrays.scales is None else arrays.scales.given, ranks,
    )  # fmt: skip
    with ctx.agreement(asked.form) as facts:
        if eight and not outputs_first:
            raise ArgumentError(
                "w: inputs are not contiguous in memory: 8-bit weights are outputs x inputs, as torch.nn has them"
            )
        if asked.by_rule:
            spec.check_rule()
        arrays.complete(ctx, spec)
        facts["w's outputs come first in memory"] = arrays.outputs_first
    return spec


class ParallelCall(UserCall[Reading]):
    """A call of a tensor-parallel function. Its plan is kept from the first call on, with the memory that it holds.

    Args:
        ctx: the context.
        asked: what is asked for besides arrays.
        given: this rank's arrays.
        planned: it is for a plan, which may make x itself.

    Raises:
        ArgumentError: ``ctx`` is no context.
    """

    keeps_memory = True

    def __init__(self, ctx: Runtime[Any], asked: Request, given: Arrays, *, planned: bool = False) -> None:
        check_context(ctx, asked.form)
        self.ctx, self.name, self._asked, self._given, self._planned = ctx, asked.form, asked, given, planned

    def stream(self) -> AbstractContextManager[Any]:
        """Return the block in which the stream of the arrays is the current one. Local."""
        return _stream(self.ctx, self._given)

    def signature(self) -> Hashable:
        """Return all that decides how the arrays are read; None if they must be read anew. Local."""
        return signature(self._asked, self._given)

    def read(self, facts: dict[str, Any]) -> Reading:
        """Check this rank's arrays. Local."""
        asked = self._asked
        if isinstance(self._given.x, tuple) and not self._planned:
            raise ArgumentError(f"x: expected an array, got {self._given.x}: only a plan takes a shape")
        arrays = read_arrays(self.ctx, asked, self._given)
        lead = arrays.lead[1:] if asked.splits_tokens else arrays.lead
        equal = {"outputs": arrays.outputs}
        if asked.form in ("allgather_matmul", "matmul_allgather"):
            equal = {"inputs": arrays.inputs}
        if asked.form == "matmul_reduce_scatter":
            equal["tokens"] = arrays.lead[0]
        facts.update(
            dtype=arrays.dtype.name, w=arrays.w_dtype.name, c=arrays.c_dtype.name, out=arrays.out_dtype.name,
            options=asked.options(arrays.out_dtype), activation=asked.activation,
            scales=arrays.scales and arrays.scales.facts(), bias=arrays.bias is not None,
            return_gathered=asked.return_gathered, **equal, **{"x's other dimensions": lead},
        )  # fmt: skip
        return None, arrays

    def complete(self, reading: Reading) -> Reading:
        """Check that the arrays of all ranks fit together. Collective over the context."""
        arrays = reading[1]
        return _agree(self.ctx, self._asked, arrays), arrays

    def remembered(self, reading: Reading) -> Reading:
        """Return the reading without arrays. Local."""
        return reading[0], reading[1].without_arrays()

    def again(self, remembered: Reading) -> Reading:
        """Return the arrays, read like earlier ones, with new results. Local."""
        spec, before = remembered
        return spec, read_again(self.ctx, spec, self._asked, self._given, before)

    def key(self, number: int, reading: Reading) -> Hashable:  # noqa: ARG002
        """Return what all ranks know of the product. Local."""
        spec: Specification = reading[0]
        return spec

    def plan(self, reading: Reading) -> ParallelPlan:
        """Return a plan: for the user, of these arrays, and of a new one if a shape is given for x. Collective."""
        ctx, (spec, arrays) = self.ctx, reading
        if not self._planned:
            return ParallelPlan(ctx, spec, arrays)
        spec = replace(spec, options=replace(spec.options, repeated=True))
        buffer = memory = None
        if arrays.x is None:
            buffer, memory = make_buffer(ctx, spec, arrays)
            arrays.given = self._given._replace(x=buffer)
            arrays.x = fold(as_local(ctx.engine, buffer, "x"), "x")
        plan = ParallelPlan(ctx, spec, arrays)
        plan._hold(arrays)
        if buffer is not None:
            plan._use_buffer(buffer, memory)
        return plan


def _stream(ctx: Runtime[Any], given: Arrays) -> AbstractContextManager[Any]:
    return on_stream_of(ctx.engine, given.w if given.x is None or isinstance(given.x, tuple) else given.x)
