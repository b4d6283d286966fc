# SPDX-License-Identifier: Apache-2.0
"""The path of a call: at once by the engine, by a plan that the context keeps, or by a new plan.

Products, routines of levels 1 to 3, factorizations and tensor-parallel products take it: ``run`` computes a
``UserCall``, ``prepare`` returns a plan of it.

Before that, ``compute_directly`` tries a product or level-3 routine without a plan. A call is direct if a glance at its
arguments shows that they are legal and that the engine can do without a plan. Every other one, each faulty one among
them, takes the ordinary way, which also finds the words for faults.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from .engines.direct import Asked, Part
from .engines.factor import Found
from .errors import PblasmpError
from .handle import Handle
from .layout import MatrixDescriptor
from .layout.routines import ROUTINES
from .logs import logger
from .plans import Plan, UserCall
from .resources import rank_share
from .runtime import Runtime

__all__ = ["compute_directly", "factor_directly", "prepare", "run"]

Result = TypeVar("Result")


def run(call: UserCall[Result], *, voted: bool = False) -> Result:
    """Return what a call computes, by a kept plan if there is one. Collective over the context.

    Args:
        call: the call.
        voted: whether this rank has tried a direct call, on which the ranks did not agree.
    """
    ctx = call.ctx
    with ctx.engine.on_device(), call.stream():
        signature = call.signature()
        if not voted:
            again = _again(call, signature)
            if again:
                return again[0]
            voted = again is False
        with ctx.running(call.name, checks=False):
            return _run_anew(call, signature, voted)


def _run_anew(call: UserCall[Result], signature: Hashable, voted: bool) -> Result:
    """Agree on a call, and return what it computes. Collective over the context."""
    ctx = call.ctx
    number, _ = ctx.calls.agree(
        lambda: ctx.agreement(call.name), signature, call.again, call.read, voted=voted
    )
    if not number:
        call.complete()
        ctx.calls.remember(signature, call.remembered())
    key = call.key(number)
    plan: Plan[Result] | None = None if key is None else ctx.kept.find(key)
    if plan is not None:
        return plan._run_with(call)
    plan = _new_plan(call)
    if key is None or (plan._product.holds_memory and not call.keeps_memory):
        with plan:
            return plan._run_with(call)
    return plan._run_with(call, partial(ctx.kept.keep, key, plan))


def _new_plan(call: UserCall[Result]) -> Plan[Result]:
    """Return a new plan of a call; if there is no memory for it, close all kept plans and try once more. Collective."""
    ctx = call.ctx
    try:
        return Plan(call, kept=True)
    except MemoryError as error:
        if not ctx.can_make_room(error):
            raise
    ctx.kept.close_all()
    return Plan(call, kept=True)


def _again(call: UserCall[Result], signature: Hashable) -> tuple[Result] | Literal[False] | None:
    """Return what a call computes that was made before, by its kept plan. Collective over the context.

    Returns:
        The result. None if nothing has happened yet; False if the ranks have voted, and not all of them repeat it.
    """
    ctx = call.ctx
    number, remembered = ctx.calls.known(signature)
    if not number:
        return None
    try:
        addresses = call.place(remembered)
    except Exception:  # noqa: BLE001 - arrays of any class may raise anything; found again where the ranks agree
        logger.debug("%s: the kept plan is not used", call.name, exc_info=True)
        return None
    if addresses is None:
        return None
    key = call.key(number)
    plan: Plan[Result] | None = ctx.kept.peek(key)
    if plan is None:
        return None
    return plan.repeat(call, number, addresses, partial(ctx.kept.find, key))


def prepare(call: UserCall[Result], asked: str = "plan") -> Plan[Result]:
    """Return a plan for the user of the call, who closes it. Collective over the context.

    Args:
        call: the call.
        asked: what the user has called, on which the ranks agree, too.
    """
    with call.ctx.running(call.name, checks=False), call.stream():
        with call.ctx.agreement(call.name) as facts:
            facts["what asks for it"] = asked
            call.read(facts)
        call.complete()
        call.planned()
        return Plan(call)


_REMEMBERED = rank_share(1024, 1 << 16)  # direct calls
_LEGAL = {
    (name, word)
    for name, words in {"side": "LR", "uplo": "LU", "op_a": "NTC", "op_b": "NTC", "diag": "NU"}.items()
    for word in words
}


_WORDS = [(name, Asked._field_defaults[name]) for name in ("side", "uplo", "op_a", "op_b", "diag")]


def compute_directly(
    routine: str,
    a: Any,
    b: Any,
    c: Any,
    out: Any,
    result: Callable[[], MatrixDescriptor],
    *,
    call: str = "",
    alpha: Any = 1,
    beta: Any = 0,
    **options: str,
) -> Any:
    """Compute ``routine``, and return D; None or False if that takes the ordinary way. Collective over the context.

    Args:
        routine: "matmul" or one of ``ROUTINES``.
        a, b, c, out: the caller's matrices.
        result: returns the layout of a new D.
        call: its name in messages, by default that of the routine.
        alpha, beta: the caller's scalars.
        options: those of "side", "uplo", "op_a", "op_b" and "diag" that the routine has.

    Returns:
        D. None if nothing has happened yet; False if the ranks have voted, and not all of them agreed.

    Raises:
        Exception: what the ranks agreed to raise.
    """
    if not isinstance(a, Handle):
        return None
    ctx = a.context
    direct, known = ctx.direct, ctx.direct_calls
    if direct is None or ctx.control.gone():
        return None
    ctx.check_open()
    try:
        key = _key(call, routine, (a, b, c, out), alpha, beta, options)
        asked = known.get(key)
    except (AttributeError, TypeError):  # one is no matrix, or what should be a number or a letter is none
        return None
    d = out
    if asked is not None:
        if not out.writeable:
            return None
        done = direct.run(ctx.control, asked)
    else:
        asked, d = _asked(routine, a, b, c, out, result, call or routine, alpha, beta, options)
        done = None if asked is None else direct.run(ctx.control, asked)
        if done:
            logger.debug("%s: computed directly", call or routine)
            if out is not None:
                if len(known) >= _REMEMBERED:
                    known.clear()
                known[_key(call, routine, (a, b, c, out), alpha, beta, options)] = asked
    return d if done else done


def _key(
    call: str, routine: str, matrices: tuple[Any, ...], alpha: Any, beta: Any, options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return what all of a call depends on but whether D may be written. Local.

    Calls of one key are equally legal. It does not keep the matrices' memory.
    """
    key = [call, routine, alpha, type(alpha), beta, type(beta), *options.values()]
    for x in matrices:
        if x is None:
            key.append(None)
        else:
            whole = x if x._view_of is None else x._view_of
            key += whole._held, x._at
    return tuple(key)


def _asked(
    routine: str,
    a: Any,
    b: Any,
    c: Any,
    out: Any,
    result: Callable[[], MatrixDescriptor],
    call: str,
    alpha: Any,
    beta: Any,
    options: dict[str, Any],
) -> tuple[Asked | None, Any]:
    """Return what the engine is asked for, and D; None if a call takes the ordinary way. Local."""
    nothing = None, None
    if not _legal(options):
        return nothing
    ctx = a.context
    parts = _parts(ctx, (a, b, c, out))
    if parts is None:
        return nothing
    of_a, of_b, of_c, of_d = parts
    assert of_a is not None
    letter = of_a[0].pattern.letter
    row = ROUTINES.get(routine)
    if b is None and (row is None or "b" in row.operands):
        return nothing
    real: tuple[str, ...] = () if row is None else row.real
    factor, other = number(alpha, letter, "alpha" in real), number(beta, letter, "beta" in real)
    shape = _shape(routine, a.shape, None if b is None else b.shape, options)
    if not factor or other is None or (other != 0 and c is None) or shape is None or 0 in (*shape, *a.shape):
        return nothing
    d = out
    if of_d is None:
        d = _new(ctx, result, zeros=row is not None and row.triangle == "d" and c is None)
        of_d = None if d is None else d.direct_part()
    elif not d.writeable:
        return nothing
    if of_d is None or d.shape != shape or (c is not None and c.shape != shape):
        return nothing
    if (
        of_d[0].pattern.letter != letter
        or (of_b is not None and of_b[0].pattern.letter != letter)
        or (of_c is not None and of_c[0].pattern.letter != letter)
    ):
        return nothing
    words = (options.get(name, default) for name, default in _WORDS)
    return Asked._make(
        (call, routine, of_a, of_b, of_c, of_d, out is None, *words, factor, other, b"", None)
    ), d


def factor_directly(
    routine: str,
    a: Any,
    b: Any,
    out: Any,
    *,
    call: str,
    pivots: NDArray[np.int64] | None = None,
    **options: Any,
) -> tuple[Any, Found] | Literal[False] | None:
    """Factor a matrix or solve, and return D and what LAPACK found. Collective over the context.

    Args:
        routine: LAPACK's, as ``Asked`` has it.
        a, b, out: the caller's matrices; without right-hand sides ``b`` is None.
        call: its name in messages.
        pivots: those of "getrs" and "getri", from 0.
        options: those of "uplo", "op_a" and "diag" that the routine has.

    Returns:
        As ``compute_directly`` does.

    Raises:
        Exception: what the ranks agreed to raise.
    """
    if not isinstance(a, Handle) or not _legal(options):
        return None
    ctx = a.context
    direct, parts = ctx.direct, _parts(ctx, (a, b, out))
    if direct is None or parts is None or ctx.control.gone():
        return None
    ctx.check_open()
    of_a, of_b, of_d = parts
    assert of_a is not None
    like, (rows, cols) = a if b is None else b, a.shape
    if (routine != "getrf" and rows != cols) or like.shape[0] != rows or 0 in like.shape:
        return None
    if not direct.factors(routine, rows, cols, 0 if b is None else like.shape[1]):
        return None
    d = out
    if of_d is None:
        d = _new(ctx, lambda: replace(like.descriptor, ld=None), zeros=False)
        of_d = None if d is None else d.direct_part()
    elif not d.writeable or d.shape != like.shape:
        return None
    if of_d is None or any(x and x[0].pattern.letter != of_a[0].pattern.letter for x in (of_b, of_d)):
        return None
    given = b""
    if pivots is not None:
        if pivots.shape != (rows,) or not ((pivots >= 0) & (pivots < rows)).all():
            return None
        given = (pivots + 1).astype(np.int32).tobytes()
    done = direct.factor(
        ctx.control, Asked(call, routine, of_a, of_b, None, of_d, out is None, pivots=given, **options)
    )
    if done is None or done is False:
        return done
    logger.debug("%s: computed directly", call)
    info, found, diagonal = done
    return d, Found(info, None if found is None else found.astype(np.int64) - 1, diagonal)


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
        with ctx.engine.on_device():
            d = ctx.allocate(result())
            if zeros:
                d.local[...] = 0
    except (MemoryError, PblasmpError, RuntimeError):  # the last one of a GPU's library
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
