# SPDX-License-Identifier: Apache-2.0
"""Exceptions at any step of Python, as a signal's handler may raise them, and the descriptors that they leave open."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.helpers.process import descriptors


class InterruptError(Exception):
    """Raised in place of a step."""


def steps(call: Callable[[], object], folder: str, stop_at: int = 0) -> tuple[int, str]:
    """Make a call; return how many steps of Python the files whose path has ``folder`` in it took, and the last one.

    Args:
        call: the call.
        folder: part of a path.
        stop_at: the step, counted from 1, in whose place InterruptError is raised; 0: none.
    """
    count, where = 0, ""

    def traced(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count, where
        if event == "opcode":
            count += 1
            if count == stop_at:
                where = named(frame.f_code, frame.f_lineno)
                raise InterruptError
        return traced

    def entered(frame: FrameType, *_: object) -> Any:
        if folder not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return traced

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    except Exception:  # what the call makes of it
        if not where:
            raise
    finally:
        sys.settrace(before)
    return count, where


def named(code: CodeType, line: int) -> str:
    """Return where a step is."""
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"


def left_open(call: Callable[[], object], folder: str, every: int) -> Iterator[tuple[str, str]]:
    """Repeat a call, interrupted after every, 1 + every, ... steps; yield the steps that leave a file open."""
    call()
    total, _ = steps(call, folder)
    assert total > 100, total
    for stop_at in range(1, total + 1, every):
        before = descriptors()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # a file was closed with its object
            _, where = steps(call, folder, stop_at)
            assert where, f"step {stop_at} of {total} was never taken"
            if descriptors().keys() == before.keys():
                continue
            gc.collect()  # objects that the exception's traceback held may hold each other
        for number, name in descriptors().items():
            if number not in before:
                os.close(number)
                yield where, name
