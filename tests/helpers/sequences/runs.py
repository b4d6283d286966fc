# SPDX-License-Identifier: Apache-2.0
"""Sequences are run on a context of their own, and made shorter as long as they fail."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pblasmp as pb

from . import matrices, mistakes, plans  # noqa: F401 - they register their steps
from .devices import Host
from .plans import refused
from .session import Session, SkipStep, WrongError
from .steps import CALLS, Step

__all__ = ["Outcome", "replay", "shortened"]


@dataclass
class Outcome:
    """How a sequence went, the same on every rank.

    Attributes:
        faults: what was wrong, by rank; empty where nothing was.
        at: the number of the step where it was seen.
        kind: of fault: a wrong number, or the name of an exception.
        counts: how often each step was made; "-" before those that had nothing to do.
    """

    faults: list[str] = field(default_factory=list)
    at: int = -1
    kind: str = ""
    counts: Counter[str] = field(default_factory=Counter)


def replay(
    comm: Any,
    device: Host,
    directory: Path,
    steps: Sequence[Step],
    doing: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run a sequence on a new context, and close it. Collective over ``comm``, one of mpi4py.

    Args:
        comm: the ranks, or None for this process alone.
        device: where.
        directory: for files.
        steps: the sequence.
        doing: is told what begins.
    """
    outcome = Outcome()
    with device.thresholds():
        ctx = pb.Context(comm, engine=device.engine)
        session = Session(ctx, device, directory, comm)
        try:
            for number, step in enumerate([*steps, None]):
                doing("the end" if step is None else f"step {number}: {step}")
                _fault(outcome, comm, session, number, step)
                if outcome.faults:
                    return outcome
        finally:
            outcome.counts = session.counts
            session.undo.close()
            with suppress(pb.ClosedError):
                ctx.close()
    return outcome


def _fault(outcome: Outcome, comm: Any, session: Session, number: int, step: Step | None) -> None:
    """Make a step, or end the sequence; note what is wrong. Collective over ``comm``."""
    fault = kind = ""
    name = "end" if step is None else step.name
    try:
        with session.device.stream(session.stream):
            if step is None:
                session.check_all()
                session.close()
            else:
                CALLS[name].function(session, **step.given)
    except SkipStep:
        name = f"-{name}"
    except WrongError as error:
        kind, fault = "wrong", str(error)
    except Exception as error:  # noqa: BLE001 - it is the fault
        if refused(error):
            name = f"-{name}"
        else:
            kind, fault = type(error).__name__, traceback.format_exc(-5)
    session.counts[name] += 1
    mine = (name, kind, fault)
    of_all = [mine] if comm is None else comm.allgather(mine)
    if len({name for name, _, _ in of_all}) > 1 and not any(fault for _, _, fault in of_all):
        of_all = [(name, "differ", "the ranks went different ways") for name, _, _ in of_all]
    outcome.faults = [f"rank {rank}: {fault}" for rank, (_, _, fault) in enumerate(of_all) if fault]
    if outcome.faults:
        outcome.at = number
        kinds = [kind for _, kind, _ in of_all if kind]
        outcome.kind = next((kind for kind in kinds if kind != "ClosedError"), kinds[0])


def shortened(
    steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool], in_time: Callable[[], bool] = lambda: True
) -> list[Step]:
    """Return a sequence that still fails, without the steps that it needs not. Collective if ``fails`` is.

    Parts are left out, first halves, then smaller ones (A. Zeller and R. Hildebrandt, "Simplifying and isolating
    failure-inducing input", 2002); then shapes are halved.

    Args:
        steps: a sequence that fails.
        fails: says whether a sequence fails likewise; the same on every rank.
        in_time: says whether to go on; the same on every rank.
    """
    kept = list(steps)
    size = max(1, len(kept) // 2)
    while in_time():
        before = len(kept)
        at = len(kept)
        while at > 0 and in_time():  # from the end: what failed needs what came before
            at = max(0, at - size)
            less = kept[:at] + kept[at + size :]
            if len(less) < len(kept) and less and fails(less):
                kept = less
        if size == 1 and len(kept) == before:
            break
        size = max(1, size // 2)
    for i in range(len(kept)):
        while in_time() and (smaller := _smaller(kept[i])) is not None:
            less = [*kept[:i], smaller, *kept[i + 1 :]]
            if not fails(less):
                break
            kept = less
    return kept


def _smaller(step: Step) -> Step | None:
    """Return the step with half the extents, None where it has no shape or they are 1."""
    layout = step.given.get("layout", {})
    if max(layout.get("shape", [1])) <= 1:
        return None
    shape = [max(1, extent // 2) for extent in layout["shape"]]
    return Step(step.name, {**step.given, "layout": {**layout, "shape": shape}})
