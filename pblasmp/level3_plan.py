# SPDX-License-Identifier: Apache-2.0
"""What the level-3 routines do before they run: check and agree, lay out the result, then a plan."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from .dtypes import scalar
from .engines.base import Options
from .errors import LayoutError
from .layout import Level3Problem, MatrixDescriptor
from .layout.level3 import ROUTINES, Routine
from .matrix import DistributedMatrix
from .plans import RoutinePlan, check_operands, check_overlap, context_of, stand_ins

__all__ = ["planned", "run"]

Matrix = DistributedMatrix


def run(routine: str, **arguments: Any) -> Matrix:
    """Plan, run and close. Collective over the context."""
    prepared = planned(routine, **arguments)
    try:
        return prepared._run_agreed()
    finally:
        prepared.close()


def planned(
    routine: str,
    *,
    a: Matrix,
    b: Matrix | None = None,
    c: Matrix | None = None,
    out: Matrix | None,
    alpha: complex,
    beta: complex = 0,
    redistribute: bool,
    algo: str,
    **flags: Any,
) -> RoutinePlan:
    """Return the plan of a routine, given all its arguments by name. Collective over the context."""
    traits = ROUTINES[routine]
    ctx = context_of(routine, a, b, c, out)
    with ctx.agreement(routine) as facts:
        required = traits.operands if traits.shape == "added" else traits.operands.replace("c", "")
        check_operands(ctx, required, {"a": a, "b": b, "c": c, "out": out})
        d = out.descriptor if out is not None else _result(routine, a, b, c, flags.get("op_a", "N"))
        b_lies, c_lies = (None if x is None else x.descriptor for x in (b, c))
        asked = Level3Problem(routine, a.descriptor, d, b_lies, c_lies, **flags)
        options = Options(_scalar(alpha, asked, "alpha"), _scalar(beta, asked, "beta"), algo)
        facts.update(redistribute=redistribute, out="given" if out is not None else "new")
        facts.update({each.name: getattr(x, each.name) for x in (asked, options) for each in fields(x)})
        asked.validate(_name_of_result(traits, b, c, out))
        if options.beta != 0 and c is None:
            raise LayoutError(f"c: beta is {beta}, expected a matrix to scale by it")
        problem, reasons = ctx.engine.suited(replace(asked, c=None) if options.beta == 0 else asked)
        if problem.c is not None and not problem.c.same_places(problem.d):
            problem = replace(problem, c=replace(problem.d, ld=None))
            reasons += ("c has to lie like the result",)
        result = ctx.allocate(d) if out is None else out
        matrices = {"a": a, "b": b, "c": c, "d": result}
        check_overlap(ctx, matrices, traits.in_place)
        moved = stand_ins(ctx, asked, problem)
        if moved and not redistribute:
            names = " and ".join(moved)
            raise LayoutError(
                f"{routine}: {names} would have to be moved first, which redistribute=False forbids: "
                + "; ".join(reasons)
            )
        seeded = out is None and c is not None and asked.written is not None
        if out is None and c is None and asked.written is not None:
            result.local[...] = 0
    return RoutinePlan(
        ctx,
        routine,
        asked,
        problem,
        matrices,
        moved,
        options,
        reasons,
        in_place=traits.in_place,
        seeded=seeded,
    )


def _scalar(value: complex, problem: Level3Problem, name: str) -> complex:
    number = scalar(value, problem.d.dtype, name)
    if name in problem.traits.real:
        if number.imag != 0:
            raise LayoutError(f"{name}: {value!r} is complex, but {problem.routine} takes a real one")
        return number.real
    return number


def _name_of_result(traits: Routine, b: Matrix | None, c: Matrix | None, out: Matrix | None) -> str:
    """Return the argument that says how D lies, or "d" where A does."""
    if out is not None:
        return "out"
    return "c" if c is not None else "d" if b is None or traits.shape == "updated" else "b"


def _result(routine: str, a: Matrix, b: Matrix | None, c: Matrix | None, op_a: str) -> MatrixDescriptor:
    """Return how a new result lies: like C, else like B; for a rank-k update in A's blocks on A's grid."""
    square = ROUTINES[routine].shape == "updated"
    like = c if c is not None or square else b
    if like is not None:
        return replace(like.descriptor, ld=None)
    x = a.descriptor
    along = int(op_a != "N")
    order, block = x.shape[along], x.block[along]
    return MatrixDescriptor((order, order), (block, block), x.grid, dtype=x.dtype, order=x.order)
