# SPDX-License-Identifier: Apache-2.0
"""Sequences are run on a context of their own; random ones are drawn, and made small where they fail."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

import pblasmp as pb

from . import matrices, mistakes, plans  # noqa: F401 - they register their steps
from .devices import Host
from .plans import refused
from .session import Session, SkipStep, WrongError, expect
from .steps import CALLS, Step


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


def search(
    comm: Any, strategy: st.SearchStrategy[Any], count: int, seed: int, one: Callable[[Any], str], *,
    shrink: bool = True,
) -> str:  # fmt: skip
    """Make random sequences until one is wrong: rank 0 draws them, and makes what fails small, by Hypothesis.

    Returns what is wrong with the last that failed, the smallest; empty if none did. Collective over ``comm``.

    Args:
        comm: the ranks, of mpi4py.
        strategy: what to draw.
        count: how many, with the smallest of all, which is the first.
        seed: of the draws.
        one: makes a sequence; says what was wrong, the same on every rank. Collective.
        shrink: whether to look for a smaller one.
    """
    failed = [""]
    if comm.rank:
        while (drawn := comm.bcast(None)) is not None:
            one(drawn)
        return str(comm.bcast(None))

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, verbosity=hypothesis.Verbosity.quiet,
        phases=[hypothesis.Phase.generate, *[hypothesis.Phase.shrink] * shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(strategy)
    def every(drawn: Any) -> None:
        comm.bcast(drawn)
        fault = one(drawn)
        failed[0] = fault or failed[0]
        expect(fault)

    try:
        every()
    except WrongError:
        pass
    except hypothesis.errors.Flaky:
        failed[0] += "\nIt does not fail again."
    finally:
        comm.bcast(None)
    return str(comm.bcast(failed[0]))
