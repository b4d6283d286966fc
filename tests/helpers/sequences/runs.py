# SPDX-License-Identifier: Apache-2.0
"""Random sequences on ranks: rank 0 draws them, and shrinks what fails, by Hypothesis; the others do what it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

import pblasmp as pb

from .state import State, WrongError


def search(
    comm: Any,
    machine: Callable[[], State],
    count: int,
    *,
    seed: int = 0,
    steps: int = 40,
    shrink: bool = True,
) -> str:
    """Make random sequences until one is wrong. Collective over ``comm``, one of mpi4py.

    Returns, on every rank, what is wrong with the last that failed, the smallest, and its program; empty if none did.

    Args:
        comm: the ranks.
        machine: makes a state machine. Local.
        count: how many sequences.
        seed: of the draws.
        steps: how many a sequence has.
        shrink: whether to look for a smaller one.
    """
    if comm.rank:
        _follow(comm, machine)
        return str(comm.bcast(None))

    @hypothesis.seed(seed)
    def told() -> State:
        comm.bcast(("", {}))
        state = machine()
        state.tell = comm.bcast
        return state

    fault = ""
    settings = hypothesis.settings(
        max_examples=count, stateful_step_count=steps, database=None, deadline=None, print_blob=False,
        phases=[hypothesis.Phase.generate, *[hypothesis.Phase.shrink] * shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    try:
        run_state_machine_as_test(told, settings=settings)
    except (WrongError, hypothesis.errors.Flaky) as error:
        fault = "\n".join([str(error), *getattr(error, "__notes__", [])])
    finally:
        comm.bcast(None)
    return str(comm.bcast(fault))


def _follow(comm: Any, machine: Callable[[], State]) -> None:
    """Make what rank 0 tells, until it tells nothing. Collective over ``comm``."""
    state = None
    while (told := comm.bcast(None)) is not None:
        name, given = told
        if not name:
            state = machine()
        else:
            with suppress(WrongError):  # which rank 0 raises, too
                getattr(state, name)(**given)


def replay(state: State, program: str) -> None:
    """Run a program that was printed on a new state. Collective over its ranks."""
    names = {"MatrixDescriptor": pb.MatrixDescriptor, "Grid": pb.Grid, type(state).__name__: lambda: state}
    exec(program, names)
