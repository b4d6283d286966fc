# SPDX-License-Identifier: Apache-2.0
"""Calls of tensor-parallel products: their arrays are read, and agreed on with the other ranks."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..context import Context
from ..dtypes import is_float8
from ..engines.method import check_parallel
from ..engines.product import Product
from ..engines.request import Operands
from ..errors import ArgumentError, ArgumentTypeError
from ..interop import as_local, fold, on_stream_of, view_like
from ..plans import Task, UserCall
from ..runtime import Runtime
from .operands import (
    SIZES,
    Arrays,
    RankArrays,
    Request,
    Specification,
    check_rule,
    read_again,
    read_arrays,
    signature,
    specify,
)

if TYPE_CHECKING:
    from ..layout.parallel import Form

__all__ = ["ParallelCall", "check_algorithm", "check_context"]


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
    mine = np.zeros((ctx.size, len(SIZES)), np.int64)
    mine[ctx.rank] = arrays.sizes
    every = np.empty_like(mine)
    request = ctx.comm.imax(mine, every)
    if request is not None:
        ctx.comm.wait(request)
    spec, firsts = specify(asked, arrays, every.tolist()), every[:, 0].tolist()
    problem = spec.problem
    with ctx.agreement(asked.form) as facts:
        if is_float8(arrays.dtype) and not problem.outputs_first:
            raise ArgumentError(
                "w: inputs are not contiguous in memory: 8-bit weights are outputs x inputs, as torch.nn has them"
            )
        if asked.by_rule:
            check_rule(asked.form, firsts, problem.outputs)
        arrays.fit(problem, ctx.rank, firsts)
        arrays.complete(ctx, problem.outputs_first)
        facts["w's outputs come first in memory"] = arrays.outputs_first
    return spec


class ParallelCall(UserCall[Any]):
    """A call of a tensor-parallel function. Its plan is kept from the first call on, with the memory that it holds.

    Args:
        ctx: the context.
        asked: what is asked for besides arrays.
        given: this rank's arrays.
        planned: it is for a plan, which may make x itself.

    Raises:
        ArgumentError: ``ctx`` is no context.
    """

    names = Arrays._fields
    keeps_memory = keeps_last = True
    _spec: Specification  # once the arrays of all ranks are known
    _arrays: RankArrays
    _buffer: Any = None  # a plan's own x
    _memory: Any = None  # of the buffer, if it is symmetric

    def __init__(self, ctx: Runtime[Any], asked: Request, given: Arrays, *, planned: bool = False) -> None:
        check_context(ctx, asked.form)
        self.ctx, self.name, self._asked, self._given, self._planned = ctx, asked.form, asked, given, planned

    def stream(self) -> AbstractContextManager[Any]:
        """Return the block in which the stream of the arrays is the current one. Local."""
        x, w = self._given[:2]
        return on_stream_of(self.ctx.engine, w if x is None or isinstance(x, tuple) else x)

    def signature(self) -> Hashable:
        """Return all that decides how the arrays are read; None if they must be read anew. Local."""
        return signature(self._asked, self._given)

    def read(self, facts: dict[str, Any]) -> None:
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
        self._arrays = arrays

    def complete(self) -> None:
        """Check that the arrays of all ranks fit together. Collective over the context."""
        self._spec = _agree(self.ctx, self._asked, self._arrays)

    def remembered(self) -> tuple[Specification, RankArrays]:
        """Return what was read, without arrays. Local."""
        return self._spec, self._arrays.without_arrays()

    def again(self, remembered: tuple[Specification, RankArrays]) -> None:
        """Read the arrays like earlier ones, with new results. Local."""
        self._spec, before = remembered
        self._arrays = read_again(self.ctx, self._asked, self._given, before)

    def key(self, number: int) -> Hashable:  # noqa: ARG002
        """Return what all ranks know of the product. Local."""
        return self._spec

    def task(self) -> Task:
        """Return what is computed, and how. Local."""
        return Task(self._spec.problem, self._spec.options)

    def operands(self) -> Operands:
        """Return the local arrays. Local."""
        return self._arrays.operands(self._spec.activation)

    def result(self, found: Any) -> Any:  # noqa: ARG002
        """Return the result, and the gathered x if it was asked for. Local."""
        return self._arrays.results

    # -- as a plan

    def planned(self) -> None:
        """Make x, if only its shape was given. Collective over the context."""
        self._spec = replace(self._spec, options=replace(self._spec.options, repeated=True))
        if self._arrays.x is None:
            self._make_buffer()
            self._given = self._arrays.given = self._given._replace(x=self._buffer)
            self._arrays.x = fold(as_local(self.ctx.engine, self._buffer, "x"), "x")

    def replaced(self, given: Mapping[str, Any], product: Product) -> ParallelCall:  # noqa: ARG002
        """Return the call on other arrays like those of the last run. Local.

        Raises:
            ArgumentError: an array does not fit what was planned.
        """
        return self._with(given)

    def _with(self, given: Mapping[str, Any]) -> ParallelCall:
        other, last = copy.copy(self), self._arrays
        other._given = self._given._replace(**given)
        if other._given.out is None:
            other._given = other._given._replace(out=last.result)
        other._arrays = arrays = read_arrays(self.ctx, self._asked, other._given)
        faults = [
            f"{name} is {found}, the plan is for {expected}"
            for name, found, expected in (
                *zip(SIZES, arrays.sizes, last.sizes, strict=True),
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
        arrays.shape, arrays.gathered_shape = last.shape, last.gathered_shape
        arrays.complete(self.ctx, self._spec.problem.outputs_first)
        return other

    def facts(self) -> dict[str, Any]:
        """Return which scales there are. Local."""
        scales = self._arrays.scales
        return {"scales": scales and scales.facts()}

    def recorded(self) -> Any:
        """Return the result. Local."""
        return self._arrays.result

    def with_own_x(self) -> tuple[Any, ParallelCall]:
        """Return the plan's own array for x, and the call on it. Collective over the context."""
        if self._buffer is None:
            self._make_buffer()
        if self._given.x is self._buffer:
            return self._buffer, self
        return self._buffer, self._with({"x": self._buffer})

    def _make_buffer(self) -> None:
        """Make an array for x, in symmetric memory if it is gathered. Collective over the context."""
        ctx, arrays = self.ctx, self._arrays
        rows, width = self._spec.problem.tokens[ctx.rank], arrays.inputs
        # The planned x's leading dimension, so that arrays like that x may replace the buffer later.
        ld = max(1, width, arrays.sizes[3])
        if self._spec.problem.gathers:
            local = self._memory = ctx.engine.empty((rows, width), arrays.dtype, "C", ld, symmetric=True)
        else:
            with ctx.agreement("input buffer"):
                local = ctx.engine.empty((rows, width), arrays.dtype, "C", ld)
        like = arrays.given.w if isinstance(arrays.given.x, tuple) else arrays.given.x
        self._buffer = view_like(like, local.reshape(*arrays.lead, width), arrays.dtype)

    def close(self) -> None:
        """Give back the memory of the plan's own x. Local."""
        if self._memory is not None:
            self.ctx.engine.recycle(self._memory)
        self._buffer = self._memory = None
