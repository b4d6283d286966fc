# SPDX-License-Identifier: Apache-2.0
"""What is known of the arrays of a tensor-parallel product: by this rank of its own, and by all ranks of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..dtypes import FLOAT8, as_dtype, is_float8
from ..engines.request import Options
from ..errors import ArgumentError, LayoutError
from ..layout import Grid, MatmulProblem, ParallelProblem
from ..layout.axis import even_counts, fault_of_shares
from ..layout.schemes import Form
from ..layout.value import changed
from ..runtime.interop import as_typed

if TYPE_CHECKING:
    from ..engines.protocol import Engine
    from ..epilogue import Scales

SIZES = (
    "x: the first dimension", "x: the last dimension", "w: the number of outputs",
    *(f"{name}: the leading dimension" for name in ("x", "w", "c", "out")), "w: which dimension comes first in memory",
)  # fmt: skip
"""The numbers that the other ranks must know of a rank's arrays, in words."""


@dataclass(frozen=True)
class ArrayFacts:
    """What is known of a rank's arrays, which it does not hold. Those of a call like this one have the same.

    Attributes:
        lead: x's dimensions except the last.
        inputs, outputs: w's dimensions.
        dtype, w_dtype, c_dtype, out_dtype: types of x, w, c and the result; local arrays may be of bytes.
        outputs_first: the local w, in C order, is outputs × inputs; otherwise inputs × outputs.
        any_order: w is in C order either way.
        w_turned: the local w is the transpose of the given array.
        lds: leading dimensions of x, w, c and out, of w as it was given; 0 for an array that is missing.
        shapes: of c and out, if given and used, by name.
        has_bias: whether there is one.
        scales: names of those that are given.
        shape: of the result, once it is known.
        gathered_shape: of X gathered; None if it is not wanted.
    """

    lead: tuple[int, ...]
    inputs: int
    outputs: int
    dtype: np.dtype
    w_dtype: np.dtype
    c_dtype: np.dtype
    out_dtype: np.dtype
    outputs_first: bool
    any_order: bool
    w_turned: bool
    lds: tuple[int, int, int, int]
    shapes: dict[str, tuple[int, ...]]
    has_bias: bool
    scales: tuple[str, ...]
    shape: tuple[int, ...] = ()
    gathered_shape: tuple[int, ...] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers that other ranks must know, as ``SIZES`` says them.

        The first dimension is 1 if x has only one; of w's dimensions 1 is outputs, 2 inputs, and 0 either.
        """
        first = self.lead[0] if self.lead else 1
        memory = 0 if self.any_order else 1 if self.outputs_first else 2
        return first, self.inputs, self.outputs, *self.lds, memory

    def turned(self) -> ArrayFacts:
        """Return what is known if the local w is transposed. Local."""
        return replace(self, outputs_first=not self.outputs_first, w_turned=not self.w_turned)

    def problem(
        self, form: Form, every: Sequence[Sequence[int]], *, adds: bool, return_gathered: bool
    ) -> ParallelProblem:
        """Return the product of all ranks, of the sizes of each rank's arrays. Local; the same on every rank.

        ``adds``: C is read.
        """
        types = self.dtype, self.w_dtype, self.c_dtype, self.out_dtype
        firsts, inputs, outputs, *lds, memories = (tuple(column) for column in zip(*every, strict=True))
        inner = math.prod(self.lead[1:])
        tokens = tuple(first * inner for first in firsts)
        rows = tokens
        if form == "allgather_matmul":
            rows = (sum(tokens),) * len(tokens)
        elif form == "matmul_reduce_scatter":
            rows = tuple(n * inner for n in even_counts(firsts[0], len(firsts)))
        ordered = [memory for memory in memories if memory]
        outputs_first = ordered[0] == 1 if ordered else self.outputs_first or is_float8(self.dtype)
        return ParallelProblem(
            form, tokens, inputs, outputs, rows, self.dtype, self.w_dtype, self.out_dtype,
            self.c_dtype if adds else None, outputs_first, inner, return_gathered,
            tuple(
                (name, tuple(ld * dtype.itemsize for ld in of))
                for name, of, dtype in zip(("x", "w", "c", "out"), lds, types, strict=True)
            ),
        )  # fmt: skip

    def fitted(self, problem: ParallelProblem, rank: int, first: int, lead: tuple[int, ...]) -> ArrayFacts:
        """Return it with the shapes of the results, which depend on other ranks' sizes. Local.

        ``first`` is the sum of x's first dimensions on all ranks, ``lead`` x's dimensions except the last.
        """
        shape, gathered = result_shapes(problem, rank, first, lead)
        return changed(self, lead=lead, shape=shape, gathered_shape=gathered)


def result_shapes(
    problem: ParallelProblem, rank: int, first: int, lead: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shapes of a rank's result and of X gathered, None if that is not wanted. Local; as ``fitted``."""
    form, outputs, rest = problem.form, problem.outputs, lead[1:]
    if form == "allgather_matmul":
        shape = (first, *rest, outputs[rank])
    elif form == "matmul_reduce_scatter":
        shape = (even_counts(lead[0], len(outputs))[rank], *rest, outputs[rank])
    else:
        shape = (*lead, sum(outputs) if form == "matmul_allgather" else outputs[rank])
    return shape, (first, *rest, problem.inputs[0]) if problem.return_gathered else None


@dataclass(frozen=True)
class Specification:
    """All that decides how a product is computed, the same on every rank: plans are kept by it.

    Attributes:
        problem, options: what is computed, and how.
        activation: of the epilogue.
        has_bias: whether a bias is added before it.
        scales: names of those that are given.
    """

    problem: ParallelProblem
    options: Options
    activation: Literal["relu", "gelu"] | None
    has_bias: bool
    scales: tuple[str, ...]

    def __hash__(self) -> int:
        p = self.problem
        return hash((p.form, p.tokens, p.rows, p.inputs, p.outputs, p.inner, self.activation))

    @property
    def varies(self) -> bool:
        """Whether products may be derived from it: no gaps are between rows of x, and all ranks have parts."""
        p = self.problem
        tight = tuple(max(1, width) * p.dtype.itemsize for width in p.inputs)
        full = 0 not in p.tokens and 0 not in p.rows and p.tokens[0] >= len(p.tokens)
        return dict(p.row_bytes)["x"] == tight and full


def check_rule(form: Form, firsts: Sequence[int], outputs: Sequence[int]) -> None:
    """Raise LayoutError unless what the ranks hold is split by ``shard``'s rule. Local.

    That is x's first dimension on each rank, or the outputs of each rank's weights.
    """
    name, held = ("x", firsts) if form == "allgather_matmul" else ("w", outputs)
    if fault := fault_of_shares(held):
        raise LayoutError(f"{name}: {fault}")


def typed_operand(
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


@lru_cache
def types_of(
    x: np.dtype, w: np.dtype, out: np.dtype, c: np.dtype | None
) -> tuple[MatmulProblem, tuple[str, ...]]:
    """Return a small product of these types, and what is wrong with them. Local."""
    p = MatmulProblem.gemm(16, 16, 16, Grid(1, 1), 16, op_b="T", dtype=x, out_dtype=out)
    p = replace(p, b=replace(p.b, dtype=w), c=None if c is None else replace(p.d, dtype=c))
    return p, tuple(map(ParallelProblem.named, p.faults()))


def leading(array: Any) -> int:
    """Return the leading dimension of a C-ordered array as passed to cuBLASMp, 0 for none."""
    if array is None:
        return 0
    rows, width = array.shape
    tight = max(1, width)
    return int(array.strides[0] // array.itemsize) if array.size and rows > 1 else int(tight)
