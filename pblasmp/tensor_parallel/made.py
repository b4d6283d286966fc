# SPDX-License-Identifier: Apache-2.0
"""What is kept of tensor-parallel calls, by which calls like them are made without reading their arrays again."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ..engines.request import CONSTANTS
from ..layout.value import changed
from ..runtime.interop import (
    address_of,
    is_torch,
    loses_gradient,
    new_like,
    stream_getter,
    torch_type,
)
from ..runtime.planned import run
from ..runtime.plans import Plan
from ..runtime.user_call import NO_STREAM
from .array_facts import ArrayFacts, Specification, result_shapes

if TYPE_CHECKING:
    from ..engines.protocol import Engine
    from ..epilogue import Scales
    from ..layout.schemes import Form

Shape: TypeAlias = "tuple[int, ...]"
Seen: TypeAlias = "tuple[Hashable, tuple[int, ...] | None]"
"""What tells calls apart, but for where their arrays are; and x's dimensions except the last, if calls that differ in
nothing else can be derived from each other: x is contiguous, and neither c nor out is given."""


class Made:
    """A call that has been read, to be made again on arrays like those. It holds none. Local to make.

    Args:
        call: a ``ParallelCall``.

    Attributes:
        problem, shape, gathered_shape: what is computed, and the shapes of the results.
        common: what is known of the arrays, but for x's dimensions and those shapes.
        number: of the call; 0 until it has run.
        plan: the kept plan, perhaps closed since; None until it has run.
    """

    number = 0
    plan: Plan[Any] | None = None
    _of: Made  # from which it was derived

    def __init__(self, call: Any) -> None:
        self.spec, self.known, self._seen = call._spec, call._known, call.seen
        self.problem, self.common = self.spec.problem, self.known
        self.shape, self.gathered_shape = self.known.shape, self.known.gathered_shape
        self._rank, self._size = call.ctx.rank, call.ctx.size
        self._stream = stream_getter(call.x)
        self._sort_of_x = None if isinstance(call.x, tuple) else _sort(call.x, is_torch(call.x))
        self._device = call.x.device.index if is_torch(call.x) else None
        given = call.x, call.w, call.bias, call.out
        self._tensors = all(is_torch(each) for each in given if each is not None)
        if self._tensors:
            self._dtype, self._gathered_dtype = map(torch_type, (self.known.out_dtype, self.known.dtype))
        self._call = changed(call, x=None, w=None, c=None, out=None, bias=None, scales=None)
        for name in ("_local", "_result", "_gathered", "_like", "_made"):
            setattr(self._call, name, None)
        self._varies = self.spec.varies

    @cached_property
    def spec(self) -> Specification:
        """What is computed, and how."""
        return changed(self._of.spec, problem=self.problem)

    @cached_property
    def known(self) -> ArrayFacts:
        """What is known of the arrays."""
        lead = self._seen[1]
        return changed(self.common, lead=lead, shape=self.shape, gathered_shape=self.gathered_shape)

    def seen_with(self, x: Any) -> Seen | None:
        """Return what is seen of a call that differs in the tensor x alone; None if it must be looked at. Local."""
        same, lead = self._seen
        shape = x.shape
        if lead is None or len(shape) != 1 + len(lead) or shape[-1] != self.common.inputs or 0 in shape:
            return None
        alike = _sort(x, True) == self._sort_of_x and x.is_contiguous()
        return (same, tuple(shape[:-1])) if alike else None

    def with_lead(self, seen: Seen) -> Made | None:
        """Return a call that differs in x's dimensions except the last, as on every rank. Local.

        None if it must be read: rows of x are apart, or a rank has no part of the call, or had none of this one.
        """
        lead = seen[1]
        if lead is None or not self._varies:
            return None
        first = lead[0] if lead else 1
        problem = self.problem.with_tokens(first, math.prod(lead[1:]))
        if 0 in problem.rows or problem.tokens[0] < self._size:
            return None
        shape, gathered = result_shapes(problem, self._rank, first * self._size, lead)
        made = changed(
            self,
            problem=problem,
            shape=shape,
            gathered_shape=gathered,
            _of=self,
            _seen=seen,
            number=0,
            plan=None,
        )
        for name in ("spec", "known"):  # are made when they are needed: most of ever new sizes come once
            made.__dict__.pop(name, None)
        return made

    def call_on(self, seen: Seen | None, x: Any, w: Any, bias: Any) -> Any:
        """Return the call on other arrays; none but these was given. Local."""
        return changed(self._call, seen=seen, x=x, w=w, bias=bias, _like=self)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the engine queues on PyTorch's stream if x is a tensor on a GPU. Local."""
        handle = self._stream()
        return NO_STREAM if handle is None else self._call.ctx.engine.on_stream(handle, self._device)

    def __call__(self, x: Any, w: Any, bias: Any) -> tuple[Any, Made]:
        """Make the call; return what the function does, and what makes it again. Collective over the context.

        The latter is another one if the other ranks' arrays are not as they were. On arrays at the same addresses as
        before they are not read again: the ranks vote on its number, and its plan runs, on GPUs as a graph.
        """
        plan, done = self.plan, None
        if plan is not None and plan.current:
            ctx = self._call.ctx
            y, gathered, addresses = self.results(x, w, bias)
            done = plan.rerun(
                addresses, self.number, partial(ctx.kept.find, self.spec), self.on_stream, self._stream(),
            )  # fmt: skip
            if done:
                return y if gathered is None else (y, gathered), self
            del y, gathered  # so that the next results get their memory, which the plan is bound to then
        call = self.call_on(self._seen, x, w, bias)
        result = run(call, voted=done is False)
        return result, call.remembered().ran(call)

    def results(self, x: Any, w: Any, bias: Any, out: Any = None) -> tuple[Any, Any, tuple[int, ...]]:
        """Return new results, or ``out``, an array for what is gathered, and where these and the given arrays are."""
        shape = self.gathered_shape
        if not self._tensors:
            y, gathered = new_results(self._call.ctx.engine, self.common, self.shape, shape, x, out)
            return y, gathered, addresses_of(x, w, bias, y, gathered)
        y = x.new_empty(self.shape, dtype=self._dtype) if out is None else out
        gathered = None if shape is None else x.new_empty(shape, dtype=self._gathered_dtype)
        return y, gathered, (
            x.data_ptr(), w.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(),
            0 if gathered is None else gathered.data_ptr(),
        )  # fmt: skip

    def ran(self, call: Any) -> Made:
        """Remember that a call like this one has run, and by which plan; return itself. Local."""
        self.number, self.plan = call.number, call.ran_by if call.number else None
        return self


def addresses_of(*arrays: Any) -> tuple[int, ...]:
    """Return where arrays are, 0 for those that are absent. Local."""
    return tuple([0 if each is None else address_of(each) for each in arrays])


def new_results(
    engine: Engine, known: ArrayFacts, shape: Shape, gathered_shape: Shape | None, like: Any, out: Any = None
) -> tuple[Any, Any]:
    """Return ``out`` or a new result, and a new array for what is gathered, None if that is not wanted. Local."""
    return (
        new_like(like, engine, shape, known.out_dtype) if out is None else out,
        None if gathered_shape is None else new_like(like, engine, gathered_shape, known.dtype),
    )


def seen_of(
    form: Form, arrays: tuple[Any, ...], scales: Scales | None, how: Mapping[str, Any]
) -> Seen | None:
    """Return what is seen of a call's arguments; None if its arrays must be read each time. Local.

    Arrays are x, w, bias, c and out; ``how`` has the other arguments in the same order in each place that calls this.
    """
    x, w, bias, c, out = arrays
    alpha, beta = how.get("alpha", 1), how.get("beta", 0)
    if not (type(alpha) in CONSTANTS and type(beta) in CONSTANTS):
        return None
    # 1, 1.0 and 1 + 0j are equal
    scaled = None if scales is None else tuple(scales.facts())
    same = (
        form, *how, *how.values(), type(alpha), type(beta), _kind(w), None if bias is None else _kind(bias), scaled
    )  # fmt: skip
    if c is out is None and how.get("algo") != "measure":
        shape, tensor = x.shape, is_torch(x)
        if 0 not in shape and (x.is_contiguous() if tensor else x.flags.c_contiguous):
            return _alike((*same, shape[-1], len(shape), _sort(x, tensor))), tuple(shape[:-1])
    return (*same, _kind(x), None if c is None else _kind(c), None if out is None else _kind(out)), None


@lru_cache(1024)
def _alike(facts: Hashable) -> Hashable:  # noqa: ARG001
    """Return what stands for the facts of a call, and is hashed sooner. Local."""
    return object()


def _kind(array: Any) -> Hashable:
    """Return what a call looks at of an array, apart from its values and where they are. Local."""
    tensor = is_torch(array)
    return array.shape, array.stride() if tensor else array.strides, _sort(array, tensor)


def _sort(array: Any, tensor: bool) -> Hashable:
    """Return what a call looks at of an array, perhaps PyTorch's, besides its shape. Local."""
    if tensor:
        state = array.is_conj(), array.is_neg(), array.requires_grad and loses_gradient(array)
        return type(array), array.dtype, array.device, state
    device, writeable = getattr(array, "device", None), getattr(array.flags, "writeable", True)
    return type(array), array.dtype, getattr(device, "id", None), writeable
