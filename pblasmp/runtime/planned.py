# SPDX-License-Identifier: Apache-2.0
"""The path of a call that is not direct: a plan that the context keeps, or a new one.

Products, routines of levels 1 to 3, factorizations and tensor-parallel products take it: ``run`` computes a
``UserCall``, ``prepare`` returns a plan of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from ..comm import gather_on, is_agreed
from ..engines.method import Taken
from ..engines.product import Product
from ..engines.protocol import Engine
from ..layout import ParallelProblem
from ..logs import logger
from .plans import Plan
from .user_call import Result, UserCall


def run(call: UserCall[Result], *, voted: bool = False, kin: Kin | None = None) -> Result:
    """Return what a call computes, by a kept plan if there is one. Collective over the context.

    ``voted``: this rank has tried a direct call, on which the ranks did not agree. ``kin`` is the call's, if it is
    known to be none that was made before.
    """
    ctx = call.ctx
    with ctx.engine.on_device(), call.stream():
        signature = call.signature()
        if not voted:
            number, remembered = ctx.calls.known(signature) if kin is None else (0, None)
            found = _again(call, number, remembered) if number else None
            if found is None:
                found = _varied(call, signature, number, kin)
            if found:
                return found[0]
            voted = found is False
        with ctx.running(call.name, checks=False):
            return _run_anew(call, signature, voted)


def _run_anew(call: UserCall[Result], signature: Hashable, voted: bool) -> Result:
    """Agree on a call, and return what it computes. Collective over the context."""
    ctx = call.ctx
    repeats, _ = ctx.calls.agree(
        lambda: ctx.agreement(call.name), signature, call.again, call.read, voted=voted
    )
    call.number = repeats
    if not repeats:
        call.complete()
        call.number = ctx.calls.remember(signature, call.remembered())
    key = call.key(repeats)
    plan: Plan[Result] | None = None if key is None else ctx.kept.find(key)
    call.ran_by = plan
    if plan is not None:
        return plan._run_with(call)
    plan = _new_plan(call)
    _remember_kin(call, plan)
    if key is None or (plan._product.holds_memory and not call.keeps_memory):
        with plan:
            return plan._run_with(call)
    call.ran_by = plan
    return plan._run_with(call, partial(ctx.kept.keep, key, plan, has_tables=plan._product.has_tables))


def _new_plan(call: UserCall[Result]) -> Plan[Result]:
    """Return a new plan of a call; if there is no memory for it, close all kept plans and try once more. Collective."""
    ctx = call.ctx
    try:
        return Plan(call, kept=True)
    except MemoryError as error:
        if not (len(ctx.kept) and is_agreed(error, ctx.control)):
            raise
    ctx.kept.close_all()
    return Plan(call, kept=True)


def _again(call: UserCall[Result], number: int, remembered: Any) -> tuple[Result] | Literal[False] | None:
    """Return what a call computes that was made before, by its kept plan. Collective over the context.

    None if nothing has happened yet; False if the ranks have voted, and not all of them repeat it.
    """
    ctx = call.ctx
    call.number = number
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


def _varied(
    call: UserCall[Result], signature: Hashable, before: int, kin: Kin | None
) -> tuple[Result] | Literal[False] | None:
    """Return what a call computes that differs from an earlier one as ``vary`` says, or as ``_again``. Collective.

    Each rank prepares alone what all would, if they all vary the same call in the same way and nothing that another
    rank must know is missing, and the ranks take a single vote on that. A plan is kept from the second such call on,
    the one with a number ``before``: most of ever new sizes come once.
    """
    ctx, calls = call.ctx, call.ctx.calls
    try:
        if kin is None:
            kin = calls.known(call.kin())[1]
        varied = None if kin is None else call.vary(kin.remembered)
        if kin is None or varied is None:
            return None
        problem, numbers = varied
        plan: Plan[Result] | None = ctx.kept.peek(call.key(0)) if before else None
        found = (
            kin.resized(ctx.engine, problem, once=not before)
            if plan is None
            else (plan._product, plan._choice)
        )
        if found is None:
            return None
        product, choice = found
        operands = call.placed(product)
    except Exception:  # noqa: BLE001 - what is wrong is found again where the ranks agree
        logger.debug("%s: it is read as a new call", call.name, exc_info=True)
        return None
    queues = product.queues
    with ctx.running(call.name, checks=not queues, computes=not queues, on_device=False):
        vote = hash((kin.number, before, plan is None, choice.number, *numbers)) & _VOTES
        if ctx.size > 1 and gather_on(ctx.control, call.name, vote, ()) is None:
            return False
        calls.renew(kin.signature)  # first: it may be the next to go
        call.number = calls.remember(signature, call.remembered())
        run = partial(product.run, operands)
        if plan is not None:
            call.ran_by = plan
            return (plan._run(call, run, partial(ctx.kept.find, call.key(0))),)
        if not before:
            ctx.control.channel.runs += 1
            return (call.result(run()),)
        call.ran_by = plan = Plan(call, kept=True, made=found)
        keep = partial(ctx.kept.keep, call.key(0), plan, has_tables=product.has_tables)
        return (plan._run(call, run, keep),)


class Kin:
    """A call from which others may be derived, and how it was computed. Local.

    The ranks know it by ``number``.
    """

    number = 0

    def __init__(self, signature: Hashable, remembered: Any) -> None:
        self.signature, self.remembered = signature, remembered
        self._products: dict[str, Product] = {}

    def add(self, product: Product, choice: Taken) -> None:
        """Add what has been prepared for one of these calls. Every rank does so after the same calls."""
        self._choice = choice
        self._products[choice.name] = product

    def resized(
        self, engine: Engine, problem: ParallelProblem, *, once: bool
    ) -> tuple[Product, Taken] | None:
        """Return what computes a call of another size, perhaps only ``once``; None if it must be prepared."""
        choice = self._choice.resized(engine, problem)
        if choice is None or (product := self._products.get(choice.name)) is None:
            return None
        other = product.resized(problem, once=once)
        return None if other is None else (other, choice)


def _remember_kin(call: UserCall[Any], plan: Plan[Any]) -> None:
    """Remember a call as one from which others may be derived, with its plan. Local.

    Every rank does so after the same calls, whether there may be others or not.
    """
    calls, signature = call.ctx.calls, call.kin()
    kin = calls.known(signature)[1] or Kin(signature, call.remembered())
    kin.add(plan._product, plan._choice)
    kin.number = calls.remember(signature, kin)


_VOTES = (1 << 62) - 1  # numbers of votes


def prepare(call: UserCall[Result], asked: str = "plan") -> Plan[Result]:
    """Return a plan for the user of the call, who closes it. Collective over the context.

    The ranks agree on what the user has ``asked`` for, too.
    """
    with reading(call, asked):
        call.planned()
        return Plan(call)


@contextmanager
def reading(call: UserCall[Any], asked: str) -> Iterator[None]:
    """Read a call for what the user has ``asked``; return a block in which it runs. Collective over the context."""
    call.find_context()
    with call.ctx.running(call.name, checks=False), call.stream():
        with call.ctx.agreement(call.name) as facts:
            facts["what asks for it"] = asked
            call.read(facts)
        call.complete()
        yield
