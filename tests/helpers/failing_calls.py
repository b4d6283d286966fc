# SPDX-License-Identifier: Apache-2.0
"""What a failing call of the library must leave behind, and raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pblasmp as pb
from pblasmp.bindings import Status
from tests.helpers.machine import Witness, machine
from tests.helpers.slow import in_turn


def left_behind(lib: Witness) -> list[str]:
    """What is misused, leaked or not as it was."""
    leaked = [f"leaked {what}" for what in (*lib.alive, *lib.gpu.alive)]
    levels = [call["level"] for call in lib.of("LoggerSetLevel")][-1:]
    callbacks = [call["callback"] for call in lib.of("LoggerSetCallback")][-1:]
    listening = ["the log is still listened to"] * any(levels + callbacks)
    return [
        *lib.faults,
        *lib.gpu.faults,
        *leaked,
        *listening,
        *["the GPU is not given back"] * lib.gpu.current,
    ]


def names(error: Exception | None, call: str, status: Status) -> bool:
    return (
        isinstance(error, pb.StatusError) and f"{call} returned" in str(error) and status.name in str(error)
    )


def calls_that_failed(life: Callable[..., None], path: str, keep: int) -> list[str]:
    """Live with one of the library's calls failing, each in turn, and return the calls: all is told, nothing is left.

    Args:
        life: what is done.
        path: the library.
        keep: a call fails with one in so many of the statuses, which take turns: how one is told does not depend on it.
    """
    with machine(path) as lib:
        life(lib)
        calls = lib.names
    faults = []
    for at, call in enumerate(calls):
        for status in in_turn(list(Status)[1:], keep=keep, first=at):
            with machine(path) as lib:
                lib.fail(status, at)
                error = lives(life, lib)
                found = left_behind(lib) + [f"raised {error!r}"] * (not names(error, call, status))
            faults += [f"call {at} ({call}), {status.name}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)
    return calls


def lives(life: Callable[..., None], lib: Witness, *comm: Any) -> Exception | None:
    """Live, and return the error that ends it."""
    try:
        life(lib, *comm)
    except Exception as error:  # noqa: BLE001 - what it is, is the question
        return error
    return None
