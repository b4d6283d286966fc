# SPDX-License-Identifier: Apache-2.0
"""The registry of algorithms: which ones exist for a problem, which of them apply, and which one is taken.

An algorithm is one row, an ``Algorithm``. Those that every engine can run are listed in ``registry.py``; an engine
adds those of its library (``Engine.algorithms``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnsupportedError
from ..layout import Level3Problem, ParallelProblem
from .product import Product
from .protocol import Engine
from .request import Operands, Options, Problem

__all__ = ["Algorithm", "Verdict", "choose", "known_for", "plain_refusal", "survey", "type_refusal"]

Planned = Operands | None


def _same(problem: Problem) -> Problem | str:
    return problem


def plain_refusal(engine: Engine, problem: Any, options: Options, operands: Planned) -> str:
    """Return why a row without a ``refusal`` cannot be taken, since it computes only plain products. Local."""
    if options.compute is not None:
        dtype = problem.dtype if isinstance(problem, ParallelProblem) else problem.a.dtype
        why = engine.operations.refusal(dtype, options.compute)
        return why or f"compute: it takes only None, got {options.compute!r}"
    if operands is not None and operands.epilogue is not None:
        return f"epilogue: it takes none, got {operands.epilogue.name!r}"
    return "scales: it takes none" if operands is not None and operands.scales is not None else ""


def type_refusal(engine: Engine, problem: Any, options: Options, operands: Operands | None) -> str:
    """Return why an engine's operations cannot compute these types in this way, or an empty string. Local."""
    d = problem.d.dtype
    if isinstance(problem, Level3Problem) and d.itemsize < 4:
        return f"{problem.routine} is for float32, float64, complex64 and complex128, got {d.name}"
    operations = engine.operations
    if operands is not None and operands.scales is not None and operands.scales.mode != "tensor":
        return f"scales of mode {operands.scales.mode!r} are for cuBLASMp on Blackwell GPUs"
    if operands is not None and operands.epilogue is not None and operands.epilogue.fused:
        return "its epilogue runs after the product, but fused=True asks for a fused one"
    return operations.refusal(problem.a.dtype, options.compute)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute a kind of problem.

    Attributes:
        name: what ``algo=`` calls it.
        prepare: ``prepare(engine, problem, options, operands)`` returns the product. Collective over the context.
        serves: whether it is for this kind of problem at all; if not, reports do not list it. Local.
        view: returns the problem in the form that ``prepare`` takes, or why it has no such form. Local.
        refusal: ``refusal(engine, problem, options, operands)`` returns an empty string, or why it cannot be taken;
            ``operands`` is None if they are not known. It depends only on what the ranks agreed on. By default
            epilogues, scales and ``compute`` are refused. Collective over the context.
        cost: relative time by rule; "auto" takes the lowest, or the first of equals. Local.
    """

    name: str
    prepare: Callable[[Engine, Any, Options, Operands], Product]
    serves: Callable[[Problem], bool]
    view: Callable[[Problem], Any] = _same
    refusal: Callable[[Engine, Any, Options, Planned], str] = plain_refusal
    cost: Callable[[Engine, Any, Options], float] = field(default=lambda *_: 1.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on an algorithm for a problem; true if the algorithm applies.

    Attributes:
        applies: the algorithm can be taken.
        why: why it was taken, or not.
        taken: it is the one that runs, chosen by "auto" or by name.
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
    """Return by name the verdict on every algorithm for ``problem``, which says which one is taken.

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
    """Return the algorithm to take, the problem as it sees it, and the verdict on every algorithm.

    Collective over the context. Algorithms that are slower by rule than the one taken are not
    asked whether they apply.

    Raises:
        UnsupportedError: there is no such algorithm, it refuses the problem, or all do.
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
    """Return by name the algorithms for this kind of problem, which must include ``options.algo``. Local."""
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
    """Return the problem as the algorithm sees it, and why the algorithm refuses it or an empty string."""
    viewed = row.view(problem)
    if isinstance(viewed, str):
        return None, viewed
    return viewed, row.refusal(engine, viewed, options, operands)


def _measured(engine: Engine, problem: Problem, options: Options) -> dict[str, float]:
    """Return by name the seconds that were measured for such a problem on this machine, if any."""
    known = engine.measured
    return {} if known is None or options.algo != "auto" else known.seconds(problem, options)


def _verdict(
    name: str, best: str | None, options: Options, why: str, measured: Mapping[str, float]
) -> Verdict:
    """Return the verdict on an algorithm if ``best`` is taken."""
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
        return Verdict(applies=True, why=f"not measured, unlike {best}")
    return Verdict(applies=True, why=f"slower than {best} by rule")
