# SPDX-License-Identifier: Apache-2.0
"""What a failing call of the library must leave behind, and raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pblasmp as pb
from pblasmp.bindings import Status
from tests.helpers.machine import Witness


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


def lives(life: Callable[..., None], lib: Witness, *comm: Any) -> Exception | None:
    """Live, and return the error that ends it."""
    try:
        life(lib, *comm)
    except Exception as error:  # noqa: BLE001 - what it is, is the question
        return error
    return None
