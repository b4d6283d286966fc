# SPDX-License-Identifier: Apache-2.0
"""Which way a tensor-parallel product takes: the engine's own product of its layouts, or one piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..dtypes import is_float8
from ..engines.pieces import GatheredInput, GatheredOutput, SummedOutput
from ..errors import UnsupportedError
from ..layout import Axis, Grid, MatmulProblem, MatrixDescriptor
from .operands import named

if TYPE_CHECKING:
    from ..context import Context
    from ..engines.base import Product
    from ..layout.problem import Op
    from .operands import Operands, Specification

__all__ = ["prepared", "problem_of"]

_ALIGNMENT = 16  # bytes


def prepared(ctx: Context, spec: Specification, operands: Operands) -> Product:
    """Return the product, prepared for arrays like these. Collective over the context."""
    engine = ctx.engine
    options = replace(spec.options, epilogue=operands.epilogue(spec), scales=operands.scales)
    problem, notes = problem_of(spec, uneven=engine.uneven)
    if problem is not None:
        return engine.prepare(problem, options, (operands.x, operands.w, operands.c, operands.out))
    how: dict[str, Any] = {
        "dtype": spec.dtype, "w_dtype": spec.w_dtype, "out_dtype": spec.out_dtype,
        "transposed": spec.outputs_first, "notes": notes,
    }  # fmt: skip
    why = f"this product runs piece by piece, {notes[0] if notes else 'that is the only way'}"
    if options.algo != "auto":
        raise UnsupportedError(f"algo {options.algo!r}: {why}")
    lane, form = engine.lane(), spec.asked.form
    if is_float8(spec.out_dtype) and not lane.stores_float8:
        raise UnsupportedError(f"dtype {spec.out_dtype.name}: {why}, and CuPy has no 8-bit floats")
    lane.check(spec.dtype, options.compute)
    if form == "allgather_matmul":
        return GatheredInput(lane, options, spec.tokens, spec.inputs[0], **how)
    if form == "matmul_allgather":
        return GatheredOutput(lane, options, spec.outputs, spec.tokens[0], spec.inputs[0], **how)
    rows = spec.scattered if form == "matmul_reduce_scatter" else Axis.even(spec.tokens[0], ctx.size).counts()
    everywhere = form == "matmul_allreduce"
    return SummedOutput(lane, options, rows, spec.outputs[0], everywhere=everywhere, **how)


def problem_of(spec: Specification, *, uneven: bool) -> tuple[MatmulProblem | None, tuple[str, ...]]:
    """Return the engine's product of this form or None, and why it has none. Local.

    Args:
        spec: what is asked for.
        uneven: the engine multiplies uneven layouts as well as even ones.
    """
    form = spec.asked.form
    if form == "matmul_allgather":
        return None, ()
    if spec.asked.return_gathered:
        return None, ("X is gathered where the caller gets it",)
    problem, why = _by_rule(spec) if uneven else _even(spec)
    if problem is None:
        return None, (why,) if why else ()
    d = replace(problem.d, dtype=spec.out_dtype)
    c = replace(d, dtype=spec.c_dtype) if spec.options.beta != 0 else None
    problem = replace(problem, b=replace(problem.b, dtype=spec.w_dtype), d=d, c=c)
    if is_float8(spec.dtype) and not uneven:
        faults = [*map(named, problem.faults()), *_apart(spec)]
        if faults:
            return None, (f"cuBLASMp does not take it: {faults[0]}",)
    return problem, ()


def _apart(spec: Specification) -> Iterator[str]:
    """Say which rows do not lie as 8-bit products want them. Source: cuBLASLt's documentation of FP8 kernels."""
    types = {"x": spec.dtype, "w": spec.w_dtype, "c": spec.c_dtype, "out": spec.out_dtype}
    for name, dtype in types.items():
        apart = {getattr(rank, f"ld_{name}") * dtype.itemsize for rank in spec.ranks}
        if any(nbytes % _ALIGNMENT for nbytes in apart):
            yield f"{name}: rows are {max(apart)} bytes apart, expected a multiple of {_ALIGNMENT}"


def _even(spec: Specification) -> tuple[MatmulProblem | None, str]:
    """Return the product in cuBLASMp's layouts, or why it has none."""
    size, form = len(spec.ranks), spec.asked.form
    maker = {
        "allgather_matmul": MatmulProblem.allgather,
        "matmul_reduce_scatter": MatmulProblem.reduce_scatter,
        "matmul_allreduce": MatmulProblem.allreduce,
    }[form]
    tokens, outputs, inputs = sum(spec.tokens), spec.outputs[0], sum(spec.inputs)
    if form == "allgather_matmul":
        outputs, inputs = sum(spec.outputs), spec.inputs[0]
        split = {"tokens": spec.tokens, "outputs": spec.outputs}
    else:
        tokens = spec.tokens[0]
        split = {"inputs": spec.inputs}
        if form == "matmul_reduce_scatter":
            split["tokens"] = spec.scattered
    for name, shards in split.items():
        if len(set(shards)) > 1:
            return (
                None,
                f"{sum(shards)} {name} are {shards} on the ranks: cuBLASMp has this form for equal shares",
            )
    if form == "matmul_allreduce" and not spec.outputs_first:
        return None, "weights are inputs x outputs in memory: cuBLASMp has GEMM + AllReduce for the transpose"
    if form == "matmul_allreduce" and spec.options.beta != 0 and size > 1:
        return None, "C is added once: by the rank that sums"
    op_b: Op = "T" if spec.outputs_first else "N"
    return maker(tokens, outputs, inputs, size, "N", op_b, dtype=spec.dtype, order="C"), ""


def _by_rule(spec: Specification) -> tuple[MatmulProblem | None, str]:
    """Return the product in layouts of equal blocks, the last ones shorter or empty, or why there is none."""
    size, form = len(spec.ranks), spec.asked.form
    if form == "matmul_allreduce":
        return None, ""
    gathers = form == "allgather_matmul"
    split = (
        {"first": [r.first for r in spec.ranks], "outputs": spec.outputs}
        if gathers
        else {"inputs": spec.inputs}
    )
    for name, shards in split.items():
        even = Axis.even(sum(shards), size).counts()
        if shards != even:
            what = "tokens" if name == "first" else name
            return (
                None,
                f"{what} are {shards} on the ranks, by the rule they would be {even}",
            )
    blocks = {name: max(1, shards[0]) for name, shards in split.items()}
    down, across = Grid(size, 1), Grid(1, size)

    def matrix(rows: int, cols: int, mb: int, nb: int, grid: Grid, *, flip: bool = False) -> MatrixDescriptor:
        x = MatrixDescriptor((rows, cols), (mb, nb), grid, dtype=spec.dtype, order="C")
        return replace(x.T, order="C") if flip else x

    op_b: Op = "T" if spec.outputs_first else "N"
    flip = not spec.outputs_first
    if gathers:
        tokens, outputs, inputs = sum(spec.tokens), sum(spec.outputs), spec.inputs[0]
        tb, kb = blocks["first"] * max(1, spec.inner), max(1, inputs)
        a = matrix(tokens, inputs, tb, kb, down)
        b = matrix(outputs, inputs, blocks["outputs"], kb, down, flip=flip)
        d = matrix(tokens, outputs, tb, blocks["outputs"], across)
    else:
        tokens, outputs, inputs = spec.tokens[0], spec.outputs[0], sum(spec.inputs)
        tb, nb = max(1, spec.scattered[0]), max(1, outputs)
        a = matrix(tokens, inputs, tb, blocks["inputs"], across)
        b = matrix(outputs, inputs, nb, blocks["inputs"], across, flip=flip)
        d = matrix(tokens, outputs, tb, nb, down)
    return MatmulProblem(a, b, d, "N", op_b), ""
