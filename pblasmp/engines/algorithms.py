# SPDX-License-Identifier: Apache-2.0
"""The registry of algorithms: which there are for a problem, which apply, and which one is taken.

An algorithm is one row, an ``Algorithm``. Those that every engine can run are listed in ``catalogue.py``; an engine
adds those of its library (``Engine.algorithms``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnsupportedError
from .base import Engine, Product
from .options import Operands, Options, Problem

__all__ = ["Algorithm", "Verdict", "choose", "known_for", "plain_refusal", "survey"]

Planned = Operands | None


def _same(problem: Problem) -> Problem | str:
    return problem


def plain_refusal(engine: Engine, problem: Any, options: Options, operands: Planned) -> str:  # noqa: ARG001
    """Return why a row without a ``refusal`` cannot be taken: it computes plain products only. Local."""
    if options.compute is not None:
        return f"compute: it takes only None, got {options.compute!r}"
    if operands is not None and operands.epilogue is not None:
        return f"epilogue: it takes none, got {operands.epilogue.name!r}"
    return "scales: it takes none" if operands is not None and operands.scales is not None else ""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute a kind of problem.

    Attributes:
        name: what ``algo=`` calls it.
        prepare: ``prepare(engine, problem, options, operands)`` returns the product. Collective over the context.
        serves: whether it is for this kind of problem at all: others don't list it. Local.
        view: returns the problem as ``prepare`` wants it, or why it has no such form. Local.
        refusal: ``refusal(engine, problem, options, operands)`` returns an empty string, or why it cannot be taken;
            ``operands`` are None where they are not known. It depends on nothing but what the ranks agreed on.
            By default epilogues, scales and ``compute`` are refused. Collective over the context.
        cost: relative time by rule; "auto" takes the lowest, the first of equal ones. Local.
    """

    name: str
    prepare: Callable[[Engine, Any, Options, Operands], Product]
    serves: Callable[[Problem], bool]
    view: Callable[[Problem], Any] = _same
    refusal: Callable[[Engine, Any, Options, Planned], str] = plain_refusal
    cost: Callable[[Engine, Any, Options], float] = field(default=lambda *_: 1.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of an algorithm for a problem; true where it applies.

    Attributes:
        applies: it can be taken.
        why: why it was taken, or not.
        taken: "auto", or what was asked for, takes it.
    """

    applies: bool
    why: str
    taken: bool = False

    def __bool__(self) -> bool:
        return self.applies

    def __str__(self) -> str:
        if self.taken:
            return f"taken: {self.why}" if self.why else "taken"
        return f"applies: {self.why}" if self.applies and self.why else self.why or "applies"


def survey(
    engine: Engine, rows: Sequence[Algorithm], problem: Problem, options: Options, operands: Planned = None
) -> dict[str, Verdict]:
    """Return by name what is said of every algorithm for ``problem``, and which one is taken.

    Collective over the context.

    Raises:
        UnsupportedError: there is no algorithm called ``options.algo`` for this problem.
    """
    known = known_for(engine, rows, problem, options)
    found = {name: _judge(engine, row, problem, options, operands) for name, row in known.items()}
    measured = _measured(engine, problem, options)
    costs = {
        name: (measured.get(name, math.inf), row.cost(engine, found[name][0], options))
        for name, row in known.items()
        if not found[name][1]
    }
    if options.algo != "auto":
        best = options.algo if options.algo in costs else None
    else:
        best = min(costs, key=lambda name: costs[name], default=None)
    return {name: _verdict(name, best, options, why, measured) for name, (_, why) in found.items()}


def choose(
    engine: Engine, rows: Sequence[Algorithm], problem: Problem, options: Options, operands: Operands
) -> tuple[Algorithm, Any, dict[str, Verdict]]:
    """Return the algorithm to take, the problem as it sees it, and what is said of every algorithm.

    Collective over the context. What is slower by rule than the one taken is not asked whether it applies.

    Raises:
        UnsupportedError: there is no such algorithm, or it refuses, or all do.
    """
    known = known_for(engine, rows, problem, options)
    views = {name: row.view(problem) for name, row in known.items()}
    refused: dict[str, str] = {name: viewed for name, viewed in views.items() if isinstance(viewed, str)}
    order, measured = [options.algo], _measured(engine, problem, options)
    if options.algo == "auto":
        fit = [name for name in known if name not in refused]
        costs = {
            name: (measured.get(name, math.inf), known[name].cost(engine, views[name], options))
            for name in fit
        }
        order = sorted(fit, key=lambda name: costs[name])
    for name in order:
        why = refused.get(name) or known[name].refusal(engine, views[name], options, operands)
        if not why:
            verdicts = {
                each: _verdict(each, name, options, refused.get(each, ""), measured) for each in known
            }
            return known[name], views[name], verdicts
        refused[name] = why
    if options.algo != "auto":
        raise UnsupportedError(f"algo {options.algo!r}: {refused[options.algo]}")
    reasons = "".join(f"\n  {name}: {why}" for name, why in refused.items())
    if len(set(refused.values())) == 1:
        reasons = f" {next(iter(refused.values()))}"
    raise UnsupportedError(f"no algorithm of the {engine.name} engine takes this problem:{reasons}")


def known_for(
    engine: Engine, rows: Sequence[Algorithm], problem: Problem, options: Options, argument: str = "algo"
) -> dict[str, Algorithm]:
    """Return by name the algorithms for this kind of problem; what ``argument`` asks for is among them. Local."""
    known: dict[str, Algorithm] = {}
    for row in (*engine.algorithms, *rows):
        if row.serves(problem):
            known.setdefault(row.name, row)
    if options.algo != "auto" and options.algo not in known:
        names = ", ".join(map(repr, ("auto", *known)))
        raise UnsupportedError(f"{argument}: the {engine.name} engine has {names} here, got {options.algo!r}")
    return known


def _judge(
    engine: Engine, row: Algorithm, problem: Problem, options: Options, operands: Planned
) -> tuple[Any, str]:
    """Return the problem as the algorithm sees it, and why it refuses it or an empty string."""
    viewed = row.view(problem)
    if isinstance(viewed, str):
        return None, viewed
    return viewed, row.refusal(engine, viewed, options, operands)


def _measured(engine: Engine, problem: Problem, options: Options) -> dict[str, float]:
    """Return by name the seconds that were measured on this machine for such a problem, if any."""
    known = engine.measured
    return {} if known is None or options.algo != "auto" else known.seconds(problem, options)


def _verdict(
    name: str, best: str | None, options: Options, why: str, measured: Mapping[str, float]
) -> Verdict:
    """Return what is said of an algorithm where ``best`` is taken."""
    if why:
        return Verdict(applies=False, why=why)
    if name == best:
        reason = "the fastest by rule"
        if options.algo != "auto":
            reason = "asked for"
        elif name in measured:
            reason = f"measured on this machine, about {measured[name] * 1e6:.0f} µs"
        return Verdict(applies=True, why=reason, taken=True)
    if options.algo != "auto" or best is None:
        return Verdict(applies=True, why="not asked for")
    if best in measured and name in measured:
        return Verdict(applies=True, why=f"slower than {best}: measured, about {measured[name] * 1e6:.0f} µs")
    if best in measured:
        return Verdict(applies=True, why=f"not measured, as {best} was")
    return Verdict(applies=True, why=f"slower than {best} by rule")
