# SPDX-License-Identifier: Apache-2.0
"""Calls of routines on distributed matrices: products, and levels 1 to 3."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .engines.product import Product
from .engines.request import CONSTANTS, Operands, Problem
from .errors import ArgumentError, ArgumentTypeError, LayoutError
from .handle import Handle, no_matrix
from .layout import Level3Problem, MatrixDescriptor, ParallelProblem
from .plans import Task, UserCall
from .runtime import Runtime

__all__ = [
    "Matrices",
    "MatrixCall",
    "Reading",
    "Recipe",
    "check_c",
    "check_operands",
    "check_overlap",
    "context_of",
]

Matrices = dict[str, Handle | None]


@dataclass(frozen=True)
class Recipe:
    """A routine on distributed matrices, but not the matrices: what the ranks have agreed on.

    Attributes:
        task: what is computed, and how.
        result: D's layout.
        in_place: the operand that may also be the result.
        partial: only a part of the result is written.
        names: what the caller calls operands that have other names than "a", "b" and "c".
    """

    task: Task
    result: MatrixDescriptor
    in_place: str = "c"
    partial: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def matrices(
        self,
        ctx: Runtime[Any],
        a: Handle | None,
        b: Handle | None,
        c: Handle | None,
        out: Handle | None,
    ) -> Matrices:
        """Return the operands, and ``out`` or a new matrix for the result. Local.

        Raises:
            ArgumentError: ``out`` shares memory with an operand that it must not overwrite.
        """
        result = ctx.allocate(self.result) if out is None else out
        matrices: Matrices = {"a": a, "b": b, "c": c, "d": result}
        check_overlap(ctx, matrices, self.in_place, self.names)
        if self.partial and out is None and c is None:
            result.local[...] = 0
        return matrices


Reading = tuple[Recipe, Matrices, Any, Any]  # the last two: an epilogue and scales, with the engine's arrays


class MatrixCall(UserCall[Any]):
    """A call of a routine on distributed matrices.

    A plan is kept from the second such call on.

    Args:
        name: the function's name.
        given: A, B, C and ``out``.
        how: its other arguments.
        reader: ``reader(ctx, facts, *given, **how)`` checks them, and returns the recipe, the matrices "a", "b", "c"
            and the result "d", None for those that are absent, and an epilogue and scales with the engine's arrays.

    Raises:
        ArgumentError: no argument is a matrix.
    """

    _recipe: Recipe
    _matrices: Matrices
    _epilogue: Any = None
    _scales: Any = None

    def __init__(
        self, name: str, given: Sequence[Any], how: Mapping[str, Any], reader: Callable[..., Reading]
    ) -> None:
        self.ctx, self.name = context_of(name, *given), name
        self._given, self._how, self._reader = given, how, reader

    def signature(self) -> Hashable:
        """Return all that decides how the call is computed; None if it has an epilogue or scales. Local."""
        given, how = self._given, self._how
        if how.get("epilogue") is not None or how.get("scales") is not None:
            return None
        if not all(x is None or (isinstance(x, Handle) and x.context is self.ctx) for x in given):
            return object()
        if not all(isinstance(value, CONSTANTS) for value in how.values()):
            return object()
        # 1, 1.0 and 1 + 0j are equal
        options = tuple((name, type(value), value) for name, value in how.items())
        return self.name, options, *(None if x is None else (x.descriptor, x.local.strides) for x in given)

    def read(self, facts: dict[str, Any]) -> None:
        """Check the arguments. Local."""
        reading = self._reader(self.ctx, facts, *self._given, **self._how)
        self._recipe, self._matrices, self._epilogue, self._scales = reading

    def remembered(self) -> Recipe:
        """Return the recipe. Local."""
        return self._recipe

    def again(self, remembered: Recipe) -> None:
        """Take the recipe, and the matrices with a new result. Local."""
        self._recipe, self._matrices = remembered, remembered.matrices(self.ctx, *self._given)

    def key(self, number: int) -> Hashable:
        """Return the number of the call. Local."""
        return number or None

    def task(self) -> Task:
        """Return what is computed, and how. Local."""
        return self._recipe.task

    def operands(self) -> Operands:
        """Return the local arrays. Local."""
        m = self._matrices
        a, b, c, d = (None if x is None else x.local for x in (m["a"], m["b"], m["c"], m["d"]))
        return Operands(a, b, c, d, self._epilogue, self._scales)

    @property
    def starts(self) -> bool:
        """Whether the result, of which only a part is written, is new and starts as a copy of C."""
        return self._recipe.partial and self._given[3] is None and self._matrices["c"] is not None

    def start(self) -> None:
        """Copy C. Local."""
        c, d = self._matrices["c"], self._matrices["d"]
        assert c is not None
        assert d is not None
        if d.local.size:
            d.local[...] = c.local

    def result(self, found: Any) -> Any:  # noqa: ARG002
        """Return D. Local."""
        return self._matrices["d"]

    def replaced(self, given: Mapping[str, Any], product: Product) -> MatrixCall:
        """Return the call on other matrices in the same layouts, with the same result. Local.

        Raises:
            ArgumentError: a matrix has another layout than the planned one.
        """
        names = self._recipe.names
        for name, x in given.items():
            said = names.get(name, name)
            check_operands(self.ctx, said, {said: x})
            planned = self._matrices[name]
            if planned is None or x.descriptor != planned.descriptor:
                expected = "no matrix" if planned is None else _layout(planned)
                raise LayoutError(f"{said}: its layout is {_layout(x)}, the plan is for {expected}")
            misfit = product.misfit(name, x.local)
            if misfit:
                raise ArgumentError(f"{said}: {misfit}")
        other = copy.copy(self)
        other._matrices = {**self._matrices, **given}
        check_overlap(self.ctx, other._matrices, self._recipe.in_place, names)
        return other

    def recorded(self) -> Any:
        """Return D; raise ArgumentError if it starts as a copy of C. Local."""
        if self.starts:
            raise ArgumentError("a CUDA graph: the result of this plan starts as a copy of C: give out=")
        return self.result(None)


def _layout(x: Handle) -> str:
    ld = x.descriptor.ld
    return str(x.descriptor) if ld is None else f"{x.descriptor}, leading dimension {ld}"


def context_of(call: str, *matrices: object) -> Runtime[Any]:
    """Return the context of the first distributed matrix, or without one the only open context. Local.

    In that one this rank tells the others that it has no matrix.

    Raises:
        ArgumentError: there is none, or several are open.
    """
    for x in matrices:
        if isinstance(x, Handle):
            return x.context
    contexts: list[Runtime[Any]] = Runtime.all_open()
    if len(contexts) == 1:
        return contexts[0]
    raise ArgumentTypeError(
        f"{call}: expected distributed matrices; ctx.scatter, ctx.load and ctx.from_local make them"
    )


def check_c(problem: Problem, beta: complex) -> None:
    """Raise ArgumentError if beta is nonzero and there is no C. Local."""
    if beta == 0:
        return
    if isinstance(problem, ParallelProblem):
        if problem.c_dtype is None:
            raise ArgumentError(f"c: beta is {beta}, expected an array to scale by it")
    elif isinstance(problem, Level3Problem) and "c" not in problem.traits.operands:
        raise ArgumentError(f"beta: {problem.routine} has no C to scale, expected 0, got {beta}")
    elif problem.c is None:
        raise ArgumentError(f"c: beta is {beta}, expected a matrix to scale by it")


def check_operands(ctx: Runtime[Any], required: Container[str], matrices: Mapping[str, object]) -> None:
    """Raise ArgumentError unless all ``required`` operands, and all that are given, are matrices of ``ctx``. Local."""
    for name, x in matrices.items():
        if x is None and name not in required:
            continue
        if not isinstance(x, Handle):
            raise ArgumentTypeError(f"{name}: {no_matrix(x)}")
        if x.context is not ctx:
            raise ArgumentError(f"{name}: belongs to another context")


def check_overlap(
    ctx: Runtime[Any], matrices: Matrices, in_place: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise ArgumentError if D shares memory with an operand, unless it is the operand ``in_place`` itself. Local.

    ``names`` has what messages call the operands, if not "a", "b" and "c".
    """
    out = matrices["d"]
    assert out is not None
    if not getattr(out.local.flags, "writeable", True):
        raise ArgumentError("out: its local array is read-only")
    for name in "abc":
        x = matrices[name]
        if x is None:
            continue
        first = x.local[:1, :1], out.local[:1, :1]
        if name == in_place and x.descriptor == out.descriptor and ctx.engine.overlap(*first):
            continue  # the same memory
        if ctx.engine.overlap(x.local, out.local):
            said = (names or {}).get(name, name)
            expected = f"{said} itself or a separate matrix" if name == in_place else "a separate matrix"
            raise ArgumentError(f"out: shares memory with {said}; expected {expected}")
