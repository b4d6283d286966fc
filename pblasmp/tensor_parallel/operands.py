# SPDX-License-Identifier: Apache-2.0
"""The arguments of a tensor-parallel product: its arrays, read and checked, and what all ranks know of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..dtypes import FLOAT8, as_dtype, is_float8, result_dtype
from ..engines.arrays import same_memory
from ..engines.request import CONSTANTS, Operands, Options
from ..epilogue import Epilogue, bias_dtype
from ..errors import ArgumentError, ArgumentTypeError, LayoutError, UnsupportedError
from ..interop import as_local, as_typed, fold, in_c_order, is_torch, new_like
from ..layout import Grid, MatmulProblem, ParallelProblem
from ..layout.axis import Axis
from ..layout.grid import integer, one_of
from ..layout.parallel import Form
from ..runtime import Runtime
from ..scales import Scales

if TYPE_CHECKING:
    from ..engines.protocol import Engine

__all__ = [
    "SIZES",
    "Arrays",
    "RankArrays",
    "Request",
    "Specification",
    "check_rule",
    "read_again",
    "read_arrays",
    "signature",
    "specify",
]

_ACTIVATIONS = ("relu", "gelu")


class Arrays(NamedTuple):
    """The arrays that a user passes for each run. ``x`` may be a shape: then the plan makes the array."""

    x: Any
    w: Any
    c: Any = None
    out: Any = None
    bias: Any = None
    scales: Scales | None = None


@dataclass(frozen=True)
class Request:
    """What a user asks for besides arrays; the same on every rank."""

    form: Form
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
    by_rule: bool = False  # gathered x, or the weights of gathered outputs, must be split as ``shard`` does

    def options(self, out_dtype: np.dtype) -> Options:
        """Return the engine's options. Local.

        Raises:
            ArgumentError, UnsupportedError: an option is wrong, or does not fit the type.
        """
        if self.activation is not None and not one_of(self.activation, _ACTIVATIONS):
            raise ArgumentError(f"activation: expected None, 'relu' or 'gelu', got {self.activation!r}")
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

    @property
    def splits_tokens(self) -> bool:
        """Whether X or Y is split along its first dimension."""
        return self.form in ("allgather_matmul", "matmul_reduce_scatter")


SIZES = (
    "x: the first dimension", "x: the last dimension", "w: the number of outputs",
    *(f"{name}: the leading dimension" for name in ("x", "w", "c", "out")), "w: which dimension comes first in memory",
)  # fmt: skip
"""The numbers that the other ranks must know of a rank's arrays, in words."""


@dataclass
class RankArrays:
    """A rank's arrays as local arrays, folded to 2D.

    Attributes:
        given: the arrays as the user passed them.
        lead: x's dimensions except the last.
        w: in C order, outputs × inputs or, unless ``outputs_first``, inputs × outputs.
        any_order: w is in C order either way.
        w_turned: ``w`` is the transpose of the given array.
        ld_w: leading dimension of w as it was given.
        dtype, w_dtype, c_dtype, out_dtype: types of x, w, c and the result; local arrays may be of bytes.
        x, c, out, bias: the other arrays; None if there is none.
        scales: with local arrays.
        shapes: of c and out before they were folded.
        shape: of the result.
        gathered_shape: of X gathered; None if it is not wanted.
        result: what the user gets.
        gathered, gathered_result: where X is gathered to, and what the user gets for it.
    """

    given: Arrays
    lead: tuple[int, ...]
    inputs: int
    outputs: int
    dtype: np.dtype
    w_dtype: np.dtype
    c_dtype: np.dtype
    out_dtype: np.dtype
    w: Any
    outputs_first: bool
    any_order: bool
    w_turned: bool
    ld_w: int
    x: Any = None
    c: Any = None
    out: Any = None
    bias: Any = None
    scales: Scales | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    gathered_shape: tuple[int, ...] | None = None
    result: Any = None
    gathered: Any = None
    gathered_result: Any = None

    @property
    def results(self) -> Any:
        """What a call returns: the result, and the gathered X if it was asked for."""
        return self.result if self.gathered is None else (self.result, self.gathered_result)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers that other ranks must know, as ``SIZES`` says them.

        The first dimension is 1 if x has only one, the leading dimension of a missing array 0; of w's dimensions 1 is
        outputs, 2 inputs, and 0 either.
        """
        first = self.lead[0] if self.lead else 1
        memory = 0 if self.any_order else 1 if self.outputs_first else 2
        ld_x, ld_c, ld_out = map(_ld, (self.x, self.c, self.out))
        return first, self.inputs, self.outputs, ld_x, self.ld_w, ld_c, ld_out, memory

    def operands(self, activation: Literal["relu", "gelu"] | None) -> Operands:
        """Return the operands of a run. Local."""
        epilogue = None
        if self.bias is not None or activation is not None:
            epilogue = Epilogue(activation, bias=self.bias)
        return Operands(self.x, self.w, self.c, self.out, epilogue, self.scales, self.gathered)

    def fit(self, problem: ParallelProblem, rank: int, firsts: Sequence[int]) -> None:
        """Work out the shapes of the results, which depend on other ranks' sizes. Local.

        Args:
            problem: the product of all ranks.
            rank: this one.
            firsts: x's first dimension on each rank.
        """
        form, outputs, rest = problem.form, problem.outputs, self.lead[1:]
        whole = (sum(firsts), *rest)
        if form == "allgather_matmul":
            self.shape = (*whole, outputs[rank])
        elif form == "matmul_reduce_scatter":
            self.shape = (Axis.even(firsts[0], len(firsts)).counts()[rank], *rest, outputs[rank])
        else:
            self.shape = (*self.lead, sum(outputs) if form == "matmul_allgather" else outputs[rank])
        self.gathered_shape = (*whole, problem.inputs[0]) if problem.return_gathered else None

    def complete(self, ctx: Runtime[Any], outputs_first: bool) -> None:
        """Check the shapes of c and out, and make the result if none is given. Local.

        Args:
            ctx: the context.
            outputs_first: whether w is outputs × inputs in memory, as the ranks have agreed.

        Raises:
            ArgumentError: c or out does not have the result's shape, or overlaps an array that it must not.
        """
        if self.any_order and self.outputs_first != outputs_first:
            self.w, self.outputs_first, self.w_turned = self.w.T, outputs_first, not self.w_turned
        for name, found in self.shapes.items():
            if found != self.shape:
                raise ArgumentError(f"{name}: shape is {found}, expected {self.shape}")
        self.make_results(ctx)
        self.check_overlaps(ctx)

    def check_overlaps(self, ctx: Runtime[Any]) -> None:
        """Raise ArgumentError if the given result overlaps an array that it must not. Local."""
        if self.given.out is None:
            return
        for name, array in (("x", self.x), ("w", self.w), ("bias", self.bias)):
            if array is not None and ctx.engine.overlap(array, self.out):
                raise ArgumentError(f"out: shares memory with {name}; expected a separate array")
        if self.c is not None and same_memory(self.c, self.out):
            self.c = self.out
        elif self.c is not None and ctx.engine.overlap(self.c, self.out):
            raise ArgumentError("out: shares memory with c; expected c itself or a separate array")

    def make_results(self, ctx: Runtime[Any]) -> None:
        """Make the result, if none is given, and the array for what is gathered. Local."""
        like = self.given.w if isinstance(self.given.x, tuple) else self.given.x
        self.result = self.given.out
        if self.out is None:
            self.result, self.out = _new(ctx, like, self.shape, self.out_dtype)
        if self.gathered_shape is not None:
            self.gathered_result, self.gathered = _new(ctx, like, self.gathered_shape, self.dtype)

    def without_arrays(self) -> RankArrays:
        """Return a copy that has the facts about the arrays, but not the arrays. Local."""
        return replace(
            self, given=Arrays(None, None), w=None, x=None, c=None, out=None, bias=None, scales=None, result=None,
            gathered=None, gathered_result=None,
        )  # fmt: skip


@dataclass(frozen=True)
class Specification:
    """All that decides how a product is computed, the same on every rank.

    Attributes:
        problem, options: what is computed, and how.
        activation: what follows the product.
        has_bias: whether a bias is added before it.
        scales: names of those that are given.
    """

    problem: ParallelProblem
    options: Options
    activation: Literal["relu", "gelu"] | None
    has_bias: bool
    scales: tuple[str, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.problem, self.options, self.activation))


def specify(asked: Request, arrays: RankArrays, every: Sequence[Sequence[int]]) -> Specification:
    """Return the product of all ranks. Local; the same on every rank.

    Args:
        asked: what is asked for besides arrays.
        arrays: this rank's.
        every: the sizes of each rank's.
    """
    options, types = (
        asked.options(arrays.out_dtype),
        (arrays.dtype, arrays.w_dtype, arrays.c_dtype, arrays.out_dtype),
    )
    firsts, inputs, outputs, *lds, memories = (tuple(column) for column in zip(*every, strict=True))
    inner = math.prod(arrays.lead[1:])
    tokens = tuple(first * inner for first in firsts)
    rows = tokens
    if asked.form == "allgather_matmul":
        rows = (sum(tokens),) * len(tokens)
    elif asked.form == "matmul_reduce_scatter":
        rows = tuple(n * inner for n in Axis.even(firsts[0], len(firsts)).counts())
    ordered = [memory for memory in memories if memory]
    outputs_first = ordered[0] == 1 if ordered else arrays.outputs_first or is_float8(arrays.dtype)
    problem = ParallelProblem(
        asked.form, tokens, inputs, outputs, rows, arrays.dtype, arrays.w_dtype, arrays.out_dtype,
        arrays.c_dtype if options.beta != 0 else None, outputs_first, inner, asked.return_gathered,
        tuple(
            (name, tuple(ld * dtype.itemsize for ld in of))
            for name, of, dtype in zip(("x", "w", "c", "out"), lds, types, strict=True)
        ),
    )  # fmt: skip
    scales = () if arrays.scales is None else arrays.scales.given
    return Specification(problem, options, asked.activation, arrays.bias is not None, scales)


def check_rule(form: Form, firsts: Sequence[int], outputs: Sequence[int]) -> None:
    """Raise LayoutError unless what the ranks hold is split by ``shard``'s rule. Local.

    Args:
        form: which product.
        firsts: x's first dimension on each rank.
        outputs: of each rank's weights.
    """
    name, held = ("x", [*firsts]) if form == "allgather_matmul" else ("w", [*outputs])
    expected = Axis.even(sum(held), len(held)).counts()
    if held != expected:
        raise LayoutError(
            f"{name}: the ranks hold {held} of {sum(held)}, expected {expected}, as "
            "pblasmp.tensor_parallel.shard splits them"
        )


def read_arrays(ctx: Runtime[Any], asked: Request, given: Arrays) -> RankArrays:
    """Return a rank's operands, checked as far as that is possible without the other ranks. Local.

    Raises:
        ArgumentError: an array is not usable in place, or does not fit the others.
    """
    engine = ctx.engine
    if not isinstance(given.scales, (Scales, type(None))):
        raise ArgumentTypeError(f"scales: expected Scales, got {type(given.scales).__name__}")
    w, w_dtype = _operand(engine, given.w, "w", asked.w_dtype, given.scales)
    if w.ndim != 2:
        raise ArgumentError(f"w: shape is {tuple(w.shape)}, expected 2 dimensions")
    inputs, outputs = w.shape if asked.transposed else w.shape[::-1]
    any_order = in_c_order(w) and in_c_order(w.T)
    turned = not in_c_order(w) and in_c_order(w.T)
    outputs_first = bool(asked.transposed) == turned
    w = fold(w.T if turned else w, "w")
    x, shape = None, given.x
    if isinstance(shape, tuple):
        shape = tuple(integer(extent, "x: a dimension of its shape", 0, ArgumentError) for extent in shape)
        dtype = w_dtype if asked.x_dtype is None else as_dtype(asked.x_dtype)
    else:
        x, dtype = _operand(engine, given.x, "x", asked.x_dtype, given.scales)
        shape = tuple(x.shape)
    if len(shape) < 1 + asked.splits_tokens:
        expected = "(tokens, ..., inputs)" if asked.splits_tokens else "(..., inputs)"
        raise ArgumentError(f"x: shape is {shape}, expected {expected}")
    if shape[-1] != inputs:
        raise ArgumentError(f"x: the last dimension is {shape[-1]}, expected w's {inputs} inputs")
    types, arrays = _result_arrays(ctx, asked, given, dtype, w_dtype)
    scales = given.scales
    if scales is not None:
        if scales.mode != "tensor":
            raise UnsupportedError(
                f"scales: mode is {scales.mode!r}, expected 'tensor': "
                "the tensor-parallel functions take one scale for each array"
            )
        scales = scales.bind(partial(as_local, engine, name="scales"), types, ctx.rank)
        scales = scales if scales.given else None
    bias = arrays.pop("bias", None)
    if bias is not None and (tuple(bias.shape) != (outputs,) or not in_c_order(bias)):
        raise ArgumentError(
            f"bias: shape {tuple(bias.shape)} with strides of {tuple(bias.strides)} bytes, expected contiguous "
            f"({outputs},): one for each of w's outputs"
        )
    return RankArrays(
        given, tuple(shape[:-1]), inputs, outputs,
        dtype, w_dtype, types.d.dtype if types.c is None else types.c.dtype, types.d.dtype,
        w, outputs_first, any_order, turned, _ld(w),
        scales=scales,
        x=None if x is None else fold(x, "x"),
        bias=bias,
        shapes={name: tuple(array.shape) for name, array in arrays.items()},
        **{name: fold(array, name) for name, array in arrays.items()},
    )  # fmt: skip


def signature(asked: Request, given: Arrays) -> Hashable:
    """Return all that decides how arrays are read, apart from their values; None if they must be read anew. Local."""
    try:
        scales = None if given.scales is None else tuple(given.scales.facts())
        if not (isinstance(asked.alpha, CONSTANTS) and isinstance(asked.beta, CONSTANTS)):
            return None
        numbers = type(asked.alpha), type(asked.beta)  # 1, 1.0 and 1 + 0j are equal
        key = asked, numbers, scales, *map(_kind, given[:5])
        hash(key)
    except Exception:  # noqa: BLE001 - read_arrays says what is wrong
        return None
    return key


def _kind(array: Any) -> Hashable:
    if array is None:
        return None
    if is_torch(array):
        lazy = array.is_conj(), array.is_neg()
        return type(array), array.shape, array.stride(), array.dtype, array.device, lazy
    device, writeable = getattr(array, "device", None), getattr(array.flags, "writeable", True)
    return type(array), array.shape, array.strides, array.dtype, getattr(device, "id", None), writeable


def read_again(ctx: Runtime[Any], asked: Request, given: Arrays, before: RankArrays) -> RankArrays:
    """Return a rank's arrays, read like earlier ones with the same signature, with new results. Local.

    Raises:
        ArgumentError: c or out overlaps an array that it must not.
    """
    engine = ctx.engine
    w = _operand(engine, given.w, "w", asked.w_dtype, given.scales)[0]
    arrays = copy(before)
    arrays.given, arrays.w = given, w.T if before.w_turned else w
    arrays.x = fold(_operand(engine, given.x, "x", asked.x_dtype, given.scales)[0], "x")
    for name, dtype in (("c", before.c_dtype), ("out", before.out_dtype)):
        if name in before.shapes:  # the array is given, and used
            setattr(arrays, name, fold(as_local(engine, getattr(given, name), name, dtype), name))
    if given.bias is not None:
        arrays.bias = as_local(engine, given.bias, "bias")
    if given.scales is not None and given.scales.given:
        types, _ = _types(before.dtype, before.w_dtype, before.out_dtype, None)
        arrays.scales = given.scales.bind(partial(as_local, engine, name="scales"), types, ctx.rank)
    arrays.make_results(ctx)
    arrays.check_overlaps(ctx)
    return arrays


def _operand(
    engine: Engine, array: Any, name: str, asked: Any, scales: Scales | None
) -> tuple[Any, np.dtype]:
    """Return x or w as a local array, and its type, or raise ArgumentError; with scales, bytes are e4m3. Local."""
    expected = None if asked is None else as_dtype(asked)
    local, dtype = as_typed(
        engine, array, name, expected or (None if scales is None else FLOAT8["float8_e4m3fn"])
    )
    if expected not in (None, dtype):
        raise ArgumentError(f"{name}: dtype is {dtype.name}, expected {name}_dtype, {expected}")
    return local, dtype


def _result_arrays(
    ctx: Runtime[Any], asked: Request, given: Arrays, dtype: np.dtype, w_dtype: np.dtype
) -> tuple[MatmulProblem, dict[str, Any]]:
    """Return a product of these types, and those of c, out and bias that are given and used. Local.

    Raises:
        ArgumentError: the types cannot be combined, or an array is not usable in place.
    """
    engine = ctx.engine
    out_dtype = result_dtype(dtype) if asked.dtype is None else as_dtype(asked.dtype)
    if asked.dtype is None and given.out is not None:
        out_dtype = as_typed(engine, given.out, "out")[1]
    adds = asked.options(out_dtype).beta != 0
    if adds and given.c is None:
        raise ArgumentError(f"c: beta is {asked.beta}, expected an array to scale by it")
    c_dtype = None
    if adds:
        c_dtype = as_typed(engine, given.c, "c")[1] if is_float8(out_dtype) else out_dtype
    types, faults = _types(dtype, w_dtype, out_dtype, c_dtype)
    if faults:
        raise ArgumentError("; ".join(faults))
    expected = {"c": c_dtype, "out": out_dtype, "bias": bias_dtype(types)}
    arrays = {}
    for name, kind in expected.items():
        if kind is None or getattr(given, name) is None:
            continue
        arrays[name] = array = as_local(engine, getattr(given, name), name, kind)
        if array.dtype != engine.operations.stored(kind):
            raise ArgumentError(f"{name}: dtype is {array.dtype}, expected {kind.name}")
    if "out" in arrays and not getattr(arrays["out"].flags, "writeable", True):
        raise ArgumentError("out: is read-only")
    return types, arrays


@lru_cache
def _types(
    x: np.dtype, w: np.dtype, out: np.dtype, c: np.dtype | None
) -> tuple[MatmulProblem, tuple[str, ...]]:
    """Return a small product of these types, and what is wrong with them. Local."""
    p = MatmulProblem.gemm(16, 16, 16, Grid(1, 1), 16, op_b="T", dtype=x, out_dtype=out)
    p = replace(p, b=replace(p.b, dtype=w), c=None if c is None else replace(p.d, dtype=c))
    return p, tuple(map(ParallelProblem.named, p.faults()))


def _new(ctx: Runtime[Any], like: Any, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Any, Any]:
    """Return a new array of the library of ``like``, and the local array over it."""
    array = new_like(like, ctx.engine, shape, dtype)
    return array, fold(as_local(ctx.engine, array, "out"), "out")


def _ld(array: Any) -> int:
    """Return the leading dimension of a C-ordered array as passed to cuBLASMp, 0 for none."""
    if array is None:
        return 0
    rows, width = array.shape
    tight = max(1, width)
    return int(array.strides[0] // array.itemsize) if array.size and rows > 1 else int(tight)
