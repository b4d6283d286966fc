# SPDX-License-Identifier: Apache-2.0
"""The path of a call: at once by the engine, by a plan that the context keeps, or by a new plan.

Products, routines of levels 1 to 3 and tensor-parallel products take it: ``run`` computes a ``UserCall``, ``prepare``
returns a plan of it.

Before that, ``compute_directly`` tries a product or level-3 routine without a plan. A call is direct if a glance at its
arguments shows that they are legal and that the engine can do without a plan. Every other one, each faulty one among
them, takes the ordinary way, which also finds the words for faults.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np

from .engines.direct import Asked, Part
from .engines.request import CONSTANTS
from .handle import Handle
from .layout import MatrixDescriptor
from .layout.routines import ROUTINES
from .logs import logger
from .plans import MatrixPlan, Plan, Reading, context_of
from .runtime import Runtime

__all__ = ["MatrixCall", "UserCall", "compute_directly", "prepare", "run"]

R = TypeVar("R")
_NO_STREAM = nullcontext()


class UserCall(ABC, Generic[R]):
    """A call of a public function, as one rank makes it; ``R`` is what is read of its arguments.

    Attributes:
        ctx: the context.
        name: the function's name.
        keeps_memory: whether plans are kept that hold memory of their own.
    """

    ctx: Runtime[Any]
    name: str
    keeps_memory = False

    def stream(self) -> AbstractContextManager[Any]:
        """Return the block in which the stream of the call's arrays is the current one. Local."""
        return _NO_STREAM

    @abstractmethod
    def signature(self) -> Hashable:
        """Return all that decides how the call is computed, apart from its arrays' values. Local.

        None if a call like this one is not remembered; a value that equals no other if its arguments must be checked
        anew.
        """

    @abstractmethod
    def read(self, facts: dict[str, Any]) -> R:
        """Check the arguments, and add what must be equal on every rank to ``facts``. Local."""

    def complete(self, reading: R) -> R:
        """Return the reading with what depends on the other ranks' arrays. Collective over the context."""
        return reading

    @abstractmethod
    def remembered(self, reading: R) -> Any:
        """Return what ``again`` needs of a reading: no arrays. Local."""

    @abstractmethod
    def again(self, remembered: Any) -> R:
        """Read the arguments, which are like those of an earlier call. Local."""

    @abstractmethod
    def key(self, number: int, reading: R) -> Hashable:
        """Return the key of the kept plan, None if none is to be kept; ``number`` is 0 unless all repeat a call. Local.

        Equal on every rank.
        """

    @abstractmethod
    def plan(self, reading: R) -> Plan[Any]:
        """Return a plan that has not run yet. Collective over the context."""


def run(call: UserCall[Any], *, voted: bool = False) -> Any:
    """Return what a call computes, by a kept plan if there is one. Collective over the context.

    Args:
        call: the call.
        voted: whether this rank has tried a direct call, on which the ranks did not agree.
    """
    ctx = call.ctx
    with call.stream():
        signature = call.signature()
        number, reading = ctx.calls.agree(
            lambda: ctx.agreement(call.name), signature, call.again, call.read, voted=voted
        )
        if not number:
            reading = call.complete(reading)
            ctx.calls.remember(signature, call.remembered(reading))
        key = call.key(number, reading)
        plan: Plan[Any] | None = None if key is None else ctx.kept.find(key)
        if plan is not None:
            return plan._run_with(reading)
        plan = call.plan(reading)
        if key is None or (plan._product.holds_memory and not call.keeps_memory):
            return plan._once()
        plan._release()
        result = plan._run_with(reading)
        ctx.kept.keep(key, plan)  # now that it has all its tables
        return result


def prepare(call: UserCall[Any]) -> Plan[Any]:
    """Return a plan for the user of the call, who closes it. Collective over the context."""
    with call.stream():
        with call.ctx.agreement(call.name) as facts:
            reading = call.read(facts)
        return call.plan(call.complete(reading))


class MatrixCall(UserCall[Reading]):
    """A call of a routine on distributed matrices.

    A plan is kept from the second such call on.

    Args:
        name: the function's name.
        given: A, B, C and ``out``.
        how: its other arguments.
        reader: ``reader(ctx, facts, *given, **how)`` checks them, and returns the recipe and the matrices.

    Raises:
        ArgumentError: no argument is a matrix.
    """

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
        options = tuple(
            (name, type(value), value) for name, value in how.items()
        )  # 1, 1.0 and 1 + 0j are equal
        return self.name, options, *(None if x is None else (x.descriptor, x.local.strides) for x in given)

    def read(self, facts: dict[str, Any]) -> Reading:
        """Check the arguments. Local."""
        return self._reader(self.ctx, facts, *self._given, **self._how)

    def remembered(self, reading: Reading) -> Any:
        """Return the recipe. Local."""
        return reading[0]

    def again(self, remembered: Any) -> Reading:
        """Return the recipe, and the matrices with a new result. Local."""
        return remembered, remembered.matrices(self.ctx, *self._given), None, None

    def key(self, number: int, reading: Reading) -> Hashable:  # noqa: ARG002
        """Return the number of the call. Local."""
        return number or None

    def plan(self, reading: Reading) -> MatrixPlan[Any]:
        """Return a plan. Collective over the context."""
        recipe, matrices, epilogue, scales = reading
        out = self._given[3] is not None
        return MatrixPlan(self.ctx, recipe, matrices, out=out, epilogue=epilogue, scales=scales)


_LEGAL = {
    (name, word)
    for name, words in {"side": "LR", "uplo": "LU", "op_a": "NTC", "op_b": "NTC", "diag": "NU"}.items()
    for word in words
}


def compute_directly(
    routine: str,
    a: Any,
    b: Any,
    c: Any,
    out: Any,
    result: Callable[[], MatrixDescriptor],
    *,
    alpha: Any = 1,
    beta: Any = 0,
    **options: str,
) -> Any:
    """Compute ``routine``, and return D; None or False if that takes the ordinary way. Collective over the context.

    Args:
        routine: "matmul" or one of ``ROUTINES``.
        a, b, c, out: the caller's matrices.
        result: returns the layout of a new D.
        alpha, beta: the caller's scalars.
        options: those of "side", "uplo", "op_a", "op_b" and "diag" that the routine has.

    Returns:
        D. None if nothing has happened yet; False if the ranks have voted, and not all of them agreed.

    Raises:
        Exception: what the ranks agreed to raise.
    """
    if not isinstance(a, Handle) or not _legal(options):
        return None
    ctx = a.context
    direct, parts = ctx.direct, _parts(ctx, (a, b, c, out))
    if direct is None or parts is None or ctx.control.gone():
        return None
    ctx.check_open()
    of_a, of_b, of_c, of_d = parts
    assert of_a is not None
    letter = of_a[0].pattern.letter
    row = ROUTINES.get(routine)
    if b is None and (row is None or "b" in row.operands):
        return None
    real: tuple[str, ...] = () if row is None else row.real
    factor, other = number(alpha, letter, "alpha" in real), number(beta, letter, "beta" in real)
    shape = _shape(routine, a.shape, None if b is None else b.shape, options)
    if not factor or other is None or (other != 0 and c is None) or shape is None or 0 in (*shape, *a.shape):
        return None
    d = out
    if of_d is None:
        d = _new(ctx, result, zeros=row is not None and row.triangle == "d" and c is None)
        of_d = None if d is None else d.direct_part()
    elif not d.writeable:
        return None
    if of_d is None or any(x is not None and x.shape != shape for x in (c, d)):
        return None
    if any(x is not None and x[0].pattern.letter != letter for x in (of_b, of_c, of_d)):
        return None
    asked = Asked(routine, routine, of_a, of_b, of_c, of_d, out is None, alpha=factor, beta=other, **options)
    done = direct.run(ctx.control, asked)
    if not done:
        return done
    logger.debug("%s: computed directly", routine)
    return d


def _legal(options: Mapping[str, Any]) -> bool:
    """Return whether options have the words that routines know. Local."""
    try:
        return options.items() <= _LEGAL
    except TypeError:  # one is not even hashable
        return False


def _parts(ctx: Runtime[Any], matrices: tuple[Any, ...]) -> list[Part | None] | None:
    """Return what direct calls take, None for what is absent; None if they do not take all matrices. Local."""
    parts: list[Part | None] = []
    for x in matrices:
        part = None
        if x is not None:
            if not isinstance(x, Handle) or x.context is not ctx:
                return None
            part = x.direct_part()
            if part is None:
                return None
        parts.append(part)
    return parts


def _new(ctx: Runtime[Any], result: Callable[[], MatrixDescriptor], *, zeros: bool) -> Any:
    """Return a new matrix; None if that fails, perhaps on this rank only: the ordinary way finds it again. Local."""
    try:
        d = ctx.allocate(result())
        if zeros:
            d.local[...] = 0
    except Exception:  # noqa: BLE001
        return None
    return d


def number(value: Any, letter: str, real: bool) -> complex | None:
    """Return a scalar as a type has it, None if it takes a closer look. Local.

    Args:
        value: the caller's.
        letter: BLAS's, of the type.
        real: whether it must be real for every type.
    """
    kind = type(value)
    if kind is not float:
        if isinstance(value, np.number):
            value = value.item()
        elif kind is not int and kind is not complex:
            return None
        try:
            value = complex(value)
        except (OverflowError, TypeError):
            return None
        if letter in "sd" or real:
            return value.real if value.imag == 0 else None
        return value  # type: ignore[no-any-return]
    return value if letter in "sd" or real else complex(value)


Shape = tuple[int, int]


def _shape(routine: str, a: Shape, b: Shape | None, options: dict[str, str]) -> Shape | None:
    """Return the shape of D; None if the operands do not fit, or if C or ``out`` decides. Local."""
    if routine != "matmul":
        return _routine_shape(routine, a, b, options)
    assert b is not None
    m, k = a if options["op_a"] == "N" else a[::-1]
    inner, n = b if options["op_b"] == "N" else b[::-1]
    return (m, n) if k == inner else None


def _routine_shape(routine: str, a: Shape, b: Shape | None, options: dict[str, str]) -> Shape | None:
    kind = ROUTINES[routine].shape
    if kind == "sided":
        assert b is not None
        order = b[0] if options["side"] == "L" else b[1]
        return b if a == (order, order) else None
    turned = a if options.get("op_a", "N") == "N" else a[::-1]
    if kind == "added":
        return turned
    return (turned[0], turned[0]) if b is None or b == a else None
