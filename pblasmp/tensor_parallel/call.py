# SPDX-License-Identifier: Apache-2.0
"""Calls of tensor-parallel products: their arrays are read, and agreed on with the other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..context import Context
from ..dtypes import as_dtype, is_float8, result_dtype
from ..engines.arrays import same_memory
from ..engines.product import Product
from ..engines.request import Operands, Options, Task
from ..epilogue import Epilogue, Scales, bias_dtype
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, short_repr
from ..layout import MatmulProblem, ParallelProblem
from ..layout.grid import integer, one_of
from ..layout.schemes import Form
from ..layout.value import changed
from ..matrix.products import check_extras
from ..runtime.interop import (
    as_local,
    as_typed,
    fold,
    in_c_order,
    loses_gradient,
    on_stream_of,
    view_like,
)
from ..runtime.planned import run
from ..runtime.reading import refuse
from ..runtime.runtime import Runtime
from ..runtime.user_call import UserCall
from .array_facts import (
    SIZES,
    ArrayFacts,
    Specification,
    check_rule,
    leading,
    typed_operand,
    types_of,
)
from .made import Made, Seen, addresses_of, new_results, seen_of

if TYPE_CHECKING:
    from ..runtime.planned import Kin

_ACTIVATIONS = ("relu", "gelu")
_ARRAYS = ("x", "w", "c", "out", "bias", "scales")


def check_context(ctx: object, call: str) -> None:
    """Raise ArgumentError unless ``ctx`` is a context. Local if it is; else collective, as ``refuse``."""
    if not isinstance(ctx, Context):
        error = ArgumentTypeError(f"{call}: ctx: expected a pblasmp.Context, got {type(ctx).__name__}")
        refuse(call, error)


@dataclass(eq=False, repr=False)
class ParallelCall(UserCall[Any]):
    """A call of a tensor-parallel function. Its plan is kept from the first call on, with the memory that it holds.

    Attributes:
        form: the function's name.
        ctx: the context.
        x, w, c, out, bias, scales: this rank's arrays, as the user passes them. In a call for a plan x may be a shape:
            then the plan makes the array.
        transposed, dtype, alpha, beta, activation, return_gathered, comm_dtype, algo, compute, comm_sms, x_dtype,
            w_dtype: the function's other arguments, the same on every rank.
        by_rule: gathered x, or the weights of gathered outputs, must be split as ``shard`` does.
        for_plan: it is for a plan.
        seen: of the arguments; None if the arrays must be read anew.

    Raises:
        ArgumentError: ``ctx`` is no context.
    """

    names = _ARRAYS
    keeps_memory = keeps_last = True

    form: Form
    ctx: Runtime[Any]
    x: Any
    w: Any
    c: Any = None
    out: Any = None
    bias: Any = None
    scales: Scales | None = None
    transposed: bool = False
    dtype: Any = None
    alpha: Any = 1
    beta: Any = 0
    activation: Literal["relu", "gelu"] | None = None
    return_gathered: bool = False
    comm_dtype: Any = None
    algo: str = "auto"
    compute: str | None = None
    comm_sms: int | None = None
    x_dtype: Any = None
    w_dtype: Any = None
    by_rule: bool = False
    for_plan: bool = False
    seen: Seen | None = None

    # once the arrays are read, or known to be like earlier ones
    _addresses: tuple[int, ...] = field(init=False)
    _fixed: bool = field(init=False)  # arrays are looked at although they are like earlier ones
    _known: ArrayFacts = field(init=False)
    _local: Operands = field(init=False)
    _result: Any = field(init=False)
    _gathered: Any = field(init=False, default=None)
    _spec: Specification = field(init=False)  # once those of all ranks are known
    _like: Made | None = field(init=False, default=None)  # by which it was made, on arrays of the same kind
    _made: Made | None = field(init=False, default=None)  # like which it is
    # of a plan
    _buffer: Any = field(init=False, default=None)  # its own x
    _memory: Any = field(init=False, default=None)  # of the buffer, if it is symmetric

    def __post_init__(self) -> None:
        check_context(self.ctx, self.form)
        self.name = self.form

    def stream(self) -> AbstractContextManager[Any]:
        """Return the block in which the stream of the arrays is the current one. Local."""
        if self._like is not None:
            return self._like.on_stream()
        return on_stream_of(self.ctx.engine, self.w if isinstance(self.x, (tuple, type(None))) else self.x)

    def signature(self) -> Hashable:
        """Return all that decides how the arrays are read; None if they must be read anew. Local."""
        return self.seen

    def kin(self) -> Hashable:
        """Return what calls have in common that differ in x's other dimensions only; None if it has no such kin. Local.

        x is contiguous, and new results are made.
        """
        return None if self.seen is None or self.seen[1] is None else self.seen[0]

    def vary(self, remembered: Made) -> tuple[ParallelProblem, tuple[int, ...]] | None:
        """Place the arrays like those of a kin, assuming that x has these dimensions on every rank. Local."""
        assert self.seen is not None
        made = remembered.with_lead(self.seen)
        if made is None or self.seen[1] is None:
            return None
        self.place(made)
        return made.problem, self.seen[1]

    def read(self, facts: dict[str, Any]) -> None:
        """Check this rank's arrays. Local."""
        if isinstance(self.x, tuple) and not self.for_plan:
            raise ArgumentError(f"x: expected an array, got {self.x}: only a plan takes a shape")
        self.check_gradients()
        self._made = None  # the other ranks' arrays are not as this rank's are like
        self._known, self._local = known, local = self._read()
        lead = known.lead[1:] if self._splits_tokens else known.lead
        equal = {"outputs": known.outputs}
        if self.form in ("allgather_matmul", "matmul_allgather"):
            equal = {"inputs": known.inputs}
        if self.form == "matmul_reduce_scatter":
            equal["tokens"] = known.lead[0]
        facts.update(
            dtype=known.dtype.name, w=known.w_dtype.name, c=known.c_dtype.name, out=known.out_dtype.name,
            options=self._options(known.out_dtype), activation=self.activation,
            scales=local.scales and local.scales.facts(), bias=known.has_bias,
            return_gathered=self.return_gathered, **equal, **{"x's other dimensions": lead},
        )  # fmt: skip

    def check_gradients(self) -> None:
        """Raise ArgumentError if an array requires a gradient, which the product does not have. Local."""
        given = [name for name in _ARRAYS if loses_gradient(getattr(self, name))]
        if given:
            raise ArgumentError(
                f"{' and '.join(given)}: a gradient is required, which pblasmp.{self.form} does not compute: call "
                f"pblasmp.torch.{self.form}, which does, or pass detached tensors, or use torch.no_grad()"
            )

    @property
    def _splits_tokens(self) -> bool:
        """Whether X or Y is split along its first dimension."""
        return self.form in ("allgather_matmul", "matmul_reduce_scatter")

    def _options(self, out_dtype: np.dtype) -> Options:
        """Return the engine's options, or raise an error if one is wrong, or does not fit the type. Local."""
        if self.activation is not None and not one_of(self.activation, _ACTIVATIONS):
            raise ArgumentError(
                f"activation: expected None, 'relu' or 'gelu', got {short_repr(self.activation)}"
            )
        if self.activation and out_dtype.kind == "c":
            raise UnsupportedError(f"activation: only for real types, the result is {out_dtype.name}")
        return Options.of(
            out_dtype,
            alpha=self.alpha,
            beta=self.beta,
            algo=self.algo,
            compute=self.compute,
            comm_dtype=self.comm_dtype,
            comm_sms=self.comm_sms,
        )

    # -- reading this rank's arrays

    def _read(self) -> tuple[ArrayFacts, Operands]:
        """Return the arrays, folded to 2D, and what is known of them without the other ranks. Local.

        ArgumentError if an array is not usable in place, or does not fit the others.
        """
        engine, scales = self.ctx.engine, self.scales
        for name in ("transposed", "return_gathered"):
            if not isinstance(given := getattr(self, name), (bool, int, np.bool_)):
                raise ArgumentTypeError(f"{name}: expected True or False, got {short_repr(given)}")
        check_extras(None, scales)
        w, w_dtype = typed_operand(engine, self.w, "w", self.w_dtype, scales)
        if w.ndim != 2:
            raise ArgumentError(f"w: shape is {tuple(w.shape)}, expected 2 dimensions")
        inputs, outputs = w.shape if self.transposed else w.shape[::-1]
        any_order = in_c_order(w) and in_c_order(w.T)
        turned = not in_c_order(w) and in_c_order(w.T)
        w = fold(w.T if turned else w, "w")
        x, shape = None, self.x
        if isinstance(shape, tuple):
            shape = tuple(
                integer(extent, "x: a dimension of its shape", 0, ArgumentError) for extent in shape
            )
            dtype = w_dtype if self.x_dtype is None else as_dtype(self.x_dtype)
        else:
            x, dtype = typed_operand(engine, self.x, "x", self.x_dtype, scales)
            shape = tuple(x.shape)
        if len(shape) < 1 + self._splits_tokens:
            expected = "(tokens, ..., inputs)" if self._splits_tokens else "(..., inputs)"
            raise ArgumentError(f"x: shape is {shape}, expected {expected}")
        if shape[-1] != inputs:
            raise ArgumentError(f"x: the last dimension is {shape[-1]}, expected w's {inputs} inputs")
        types, arrays = self._read_results(dtype, w_dtype)
        scales = self._bound_scales(types)
        bias = arrays.pop("bias", None)
        if bias is not None and (tuple(bias.shape) != (outputs,) or not in_c_order(bias)):
            raise ArgumentError(
                f"bias: shape {tuple(bias.shape)} with strides of {tuple(bias.strides)} bytes, expected contiguous "
                f"({outputs},): one for each of w's outputs"
            )
        x = None if x is None else fold(x, "x")
        c, out = (None if name not in arrays else fold(arrays[name], name) for name in ("c", "out"))
        known = ArrayFacts(
            tuple(shape[:-1]), inputs, outputs,
            dtype, w_dtype, types.d.dtype if types.c is None else types.c.dtype, types.d.dtype,
            bool(self.transposed) == turned, any_order, turned,
            (leading(x), leading(w), leading(c), leading(out)),
            {name: tuple(array.shape) for name, array in arrays.items()},
            bias is not None, () if scales is None else scales.given,
        )  # fmt: skip
        return known, Operands(x, w, c, out, self._epilogue(bias), scales)

    def _read_results(self, dtype: np.dtype, w_dtype: np.dtype) -> tuple[MatmulProblem, dict[str, Any]]:
        """Return a product of these types, and those of c, out and bias that are given and used. Local.

        ArgumentError if the types cannot be combined, or an array is not usable in place.
        """
        engine = self.ctx.engine
        out_dtype = result_dtype(dtype) if self.dtype is None else as_dtype(self.dtype)
        if self.dtype is None and self.out is not None:
            out_dtype = as_typed(engine, self.out, "out")[1]
        adds = self._options(out_dtype).beta != 0
        if adds and self.c is None:
            raise ArgumentError(f"c: beta is {self.beta}, expected an array to scale by it")
        c_dtype = None
        if adds:
            c_dtype = as_typed(engine, self.c, "c")[1] if is_float8(out_dtype) else out_dtype
        types, faults = types_of(dtype, w_dtype, out_dtype, c_dtype)
        if faults:
            raise ArgumentError("; ".join(faults))
        expected = {"c": c_dtype, "out": out_dtype, "bias": bias_dtype(types)}
        arrays = {}
        for name, kind in expected.items():
            if kind is None or getattr(self, name) is None:
                continue
            arrays[name] = array = as_local(engine, getattr(self, name), name, kind)
            if array.dtype != engine.operations.stored(kind):
                raise ArgumentError(f"{name}: dtype is {array.dtype}, expected {kind.name}")
        if "out" in arrays:
            _check_writable(arrays["out"])
        return types, arrays

    def _bound_scales(self, types: MatmulProblem) -> Scales | None:
        """Return the scales with local arrays, None if none is given. Local."""
        scales = self.scales
        if scales is None:
            return None
        if scales.mode != "tensor":
            raise UnsupportedError(
                f"scales: mode is {short_repr(scales.mode)}, expected 'tensor': "
                "the tensor-parallel functions take one scale for each array"
            )
        scales = scales.bind(partial(as_local, self.ctx.engine, name="scales"), types, self.ctx.rank)
        return scales if scales.given else None

    def _epilogue(self, bias: Any) -> Epilogue | None:
        """Return the epilogue, if there is one. Local."""
        return Epilogue(self.activation, bias=bias) if bias is not None or self.activation else None

    def remembered(self) -> Made:
        """Return what was read, without arrays. Local."""
        if self._made is None:
            self._made = Made(self)
        return self._made

    def again(self, remembered: Made) -> None:
        """Read the arrays, which are like earlier ones, with new results; raise as ``_finish``. Local."""
        self._made = remembered
        self._spec, (known, self._local) = remembered.spec, self._read()
        like = remembered.known
        self._known = changed(known, shape=like.shape, gathered_shape=like.gathered_shape)
        self._finish(self._spec.problem.outputs_first)

    def place(self, remembered: Made) -> tuple[int, ...]:
        """Make the results; return where the arrays are; none of them if there are scales, which may change. Local.

        ArgumentError if a scale is none, or c or out overlaps an array that it must not.
        """
        self._made, known = remembered, remembered.common
        self._result, self._gathered, addresses = remembered.results(self.x, self.w, self.bias, self.out)
        self._addresses = (*addresses, *addresses_of(self.c)) if "c" in known.shapes else addresses
        self._fixed = bool(known.shapes or known.scales)
        if self._fixed:
            self._local = self._at_addresses()
        return self._addresses if self.scales is None else ()

    def placed(self, product: Product) -> Operands:
        """Return the operands of a call that has its place, as a product takes them. Local."""
        if not self._fixed:
            self._local = self._at_addresses(product.operand_at)
        return self._local

    def _at_addresses(self, views: Callable[..., Any] | None = None) -> Operands:
        """Return the local arrays, or what ``views`` makes, by their addresses. Local; raises as ``place``."""
        made = self._made
        assert made is not None
        at, known, rank, p = views or self.ctx.engine.at, made.common, self.ctx.rank, made.problem
        inputs, outputs, rows, width = known.inputs, known.outputs, p.tokens[rank], made.shape[-1]
        x, w, bias, result, gathered, *c = self._addresses
        row = scales = None
        if known.has_bias or known.scales:
            types = types_of(known.dtype, known.w_dtype, known.out_dtype, None)[0]
            scales = self._bound_scales(types) if known.scales else None
            if known.has_bias:
                row = at(bias, (1, outputs), bias_dtype(types))
                row = row if views else row[0]
        local = Operands(
            at(x, (rows, inputs), known.dtype, known.lds[0]),
            at(
                w, (outputs, inputs) if known.outputs_first else (inputs, outputs), known.w_dtype,
                0 if known.any_order else known.lds[1],
            ),
            at(c[0], (p.rows[rank], width), known.c_dtype, known.lds[2]) if c else None,
            at(result, (p.rows[rank], width), known.out_dtype, known.lds[3]),
            self._epilogue(row) if known.has_bias or self.activation else None, scales,
            at(gathered, (sum(p.tokens), inputs), known.dtype) if made.gathered_shape else None,
        )  # fmt: skip
        if known.shapes:
            self._check_overlaps(local)
        return local

    # -- with the other ranks

    def complete(self) -> None:
        """Check that the arrays of all ranks fit together. Collective over the context."""
        ctx, known = self.ctx, self._known
        mine = np.zeros((ctx.size, len(SIZES)), np.int64)
        mine[ctx.rank] = known.sizes
        every = np.empty_like(mine)
        request = ctx.comm.imax(mine, every)
        if request is not None:
            ctx.comm.wait(request)
        options, firsts = self._options(known.out_dtype), every[:, 0].tolist()
        problem = known.problem(
            self.form, every.tolist(), adds=options.beta != 0, return_gathered=self.return_gathered
        )
        with ctx.agreement(self.form) as facts:
            if is_float8(known.dtype) and not problem.outputs_first:
                raise ArgumentError(
                    "w: inputs are not contiguous in memory: 8-bit weights are outputs x inputs, as torch.nn has them"
                )
            if self.by_rule:
                check_rule(self.form, firsts, problem.outputs)
            self._known = known.fitted(problem, ctx.rank, sum(firsts), known.lead)
            self._finish(problem.outputs_first)
            facts["w's outputs come first in memory"] = self._known.outputs_first
        self._spec = Specification(problem, options, self.activation, known.has_bias, known.scales)

    def _finish(self, outputs_first: bool) -> None:
        """Check the shapes of c and out, and make the result if none is given. Local.

        Whether w is outputs × inputs in memory is what the ranks have agreed on. ArgumentError if c or out does not
        have the result's shape, or overlaps an array that it must not.
        """
        local = self._local
        if self._known.any_order and self._known.outputs_first != outputs_first:
            assert local.b is not None
            self._known, local.b = self._known.turned(), local.b.T
        for name, found in self._known.shapes.items():
            if found != self._known.shape:
                raise ArgumentError(f"{name}: shape is {found}, expected {self._known.shape}")
        engine, like = self.ctx.engine, self.w if isinstance(self.x, tuple) else self.x
        known = self._known
        self._result, self._gathered = new_results(
            engine, known, known.shape, known.gathered_shape, like, self.out
        )
        if local.d is None:
            local.d = fold(as_local(engine, self._result, "out"), "out")
        else:
            self._check_overlaps(local)
        if self._known.gathered_shape is not None:
            local.gathered = fold(as_local(engine, self._gathered, "gathered"), "gathered")

    def _check_overlaps(self, local: Operands) -> None:
        """Raise ArgumentError if the given result overlaps an array that it must not. Local."""
        overlap = self.ctx.engine.overlap
        bias = None if local.epilogue is None else local.epilogue.bias
        for name, array in (("x", local.a), ("w", local.b), ("bias", bias)):
            if array is not None and overlap(array, local.d):
                raise ArgumentError(f"out: shares memory with {name}; expected a separate array")
        if local.c is not None and same_memory(local.c, local.d):
            local.c = local.d
        elif local.c is not None and overlap(local.c, local.d):
            raise ArgumentError("out: shares memory with c; expected c itself or a separate array")

    # -- computing

    def key(self, number: int) -> Hashable:  # noqa: ARG002
        """Return what all ranks know of the product. Local."""
        return self._asked

    @property
    def _asked(self) -> Specification:
        """What is computed, and how."""
        return self._spec if self._made is None else self._made.spec

    def task(self) -> Task:
        """Return what is computed, and how. Local."""
        return Task(self._asked.problem, self._asked.options)

    def operands(self) -> Operands:
        """Return the local arrays. Local."""
        return self._local

    def result(self, found: Any) -> Any:  # noqa: ARG002
        """Return the result, and the gathered x if it was asked for. Local."""
        return self._result if self._gathered is None else (self._result, self._gathered)

    # -- as a plan

    def planned(self) -> None:
        """Make x, if only its shape was given. Collective over the context."""
        if self._local.a is None:
            self._make_buffer()
            self.x = self._buffer
            self._local.a = fold(as_local(self.ctx.engine, self._buffer, "x"), "x")

    def replaced(self, given: Mapping[str, Any], product: Product) -> ParallelCall:  # noqa: ARG002
        """Return the call on other arrays like those of the last run, or raise ArgumentError. Local."""
        return self._with(given)

    def _with(self, given: Mapping[str, Any]) -> ParallelCall:
        other, last = copy.copy(self), self._known
        for name, array in {"out": self._result, **given}.items():
            setattr(other, name, array)
        other.check_gradients()
        known, local = other._read()
        faults = [
            f"{name} is {found}, the plan is for {expected}"
            for name, found, expected in (
                *zip(SIZES, known.sizes, self._sizes(), strict=True),
                ("x: shape but for the last dimension", known.lead, last.lead),
                ("x: dtype", known.dtype.name, last.dtype.name),
                ("w: dtype", known.w_dtype.name, last.w_dtype.name),
                ("c: dtype", known.c_dtype.name, last.c_dtype.name),
                ("bias: its presence", known.has_bias, last.has_bias),
                ("scales", local.scales, self._local.scales),
            )
            if repr(found) != repr(expected)
        ]
        if faults:
            raise ArgumentError("; ".join(faults))
        other._known = changed(known, shape=last.shape, gathered_shape=last.gathered_shape)
        other._local = local
        other._finish(self._spec.problem.outputs_first)
        return other

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes with the leading dimensions of what was made for the plan. Local."""
        known, local = self._known, self._local
        lds = leading(local.a), known.lds[1], known.lds[2], leading(local.d)
        return replace(known, lds=lds).sizes

    def facts(self) -> dict[str, Any]:
        """Return which scales there are. Local."""
        self.check_gradients()  # the planned arrays may require gradients since, or be read-only
        _check_writable(self.out)
        scales = self._local.scales
        return {"scales": scales and scales.facts()}

    def recorded(self) -> Any:
        """Return the result. Local."""
        return self._result

    def with_own_x(self) -> tuple[Any, ParallelCall]:
        """Return the plan's own array for x, and the call on it. Collective over the context."""
        if self._buffer is None:
            self._make_buffer()
        if self.x is self._buffer:
            return self._buffer, self
        return self._buffer, self._with({"x": self._buffer})

    def _make_buffer(self) -> None:
        """Make an array for x, in symmetric memory if it is gathered. Collective over the context."""
        ctx, known = self.ctx, self._known
        rows, width = self._spec.problem.tokens[ctx.rank], known.inputs
        # The planned x's leading dimension, so that arrays like that x may replace the buffer later.
        ld = max(1, width, leading(self._local.a))
        if self._spec.problem.gathers:
            local = self._memory = ctx.engine.empty((rows, width), known.dtype, "C", ld, symmetric=True)
        else:
            with ctx.agreement("input buffer"):
                local = ctx.engine.empty((rows, width), known.dtype, "C", ld)
        like = self.w if isinstance(self.x, tuple) else self.x
        self._buffer = view_like(like, local.reshape(*known.lead, width), known.dtype)

    def close(self) -> None:
        """Give back the memory of the plan's own x. Local."""
        if self._memory is not None:
            self.ctx.engine.recycle(self._memory)
        self._buffer = self._memory = None


def _check_writable(out: Any) -> None:
    if not getattr(getattr(out, "flags", None), "writeable", True):
        raise ArgumentError("out: is read-only")


def multiply(
    form: Form,
    ctx: Runtime[Any],
    x: Any,
    w: Any,
    c: Any = None,
    out: Any = None,
    bias: Any = None,
    scales: Scales | None = None,
    like: Made | None = None,
    **how: Any,
) -> tuple[Any, Made | None]:
    """Return what a tensor-parallel function returns, and what makes calls like this one again, if anything can.

    Collective over the context. A call like an earlier one is made as ``Made`` does; ``like`` is one that may differ in
    x alone. The other arguments are in the same order in each place that calls this.
    """
    seen: Seen | None = None
    made: Made | None = None
    kin: Kin | None = None
    plain = c is out is scales is None
    if isinstance(ctx, Context):
        try:
            seen = None if like is None else like.seen_with(x)
            if seen is None:
                seen = seen_of(form, (x, w, bias, c, out), scales, how)
            made = ctx.calls.known(seen)[1]
            if plain and made is None and seen is not None and seen[1] is not None:
                kin = ctx.calls.known(seen[0])[1]
        except Exception:  # noqa: BLE001 - reading the arguments says what is wrong
            seen = made = None
        if plain and made is not None:
            return made(x, w, bias)
    if kin is None:
        call = ParallelCall(form, ctx, x, w, c, out, bias, scales, **how, seen=seen)
    else:
        call = kin.remembered.call_on(seen, x, w, bias)
    result = run(call, kin=kin)
    return result, call.remembered().ran(call) if plain and call.number else None
