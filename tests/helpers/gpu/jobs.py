# SPDX-License-Identifier: Apache-2.0
"""Calls that are made once and then queued any number of times, before anything that they wrote is looked at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import pblasmp as pb

TURNS = 2  # sets of operands, so that what is left of the run before is not what this run wants


@dataclass
class Job:
    """A call whose operands change from run to run, and what it must write.

    Attributes:
        what: the call in words.
        queue: queues it and returns its result.
        loads: arrays of this rank, and by turn what they hold before a run: operands, and where the result goes.
        expected: by turn, what this rank must have of the result.
        differs: ``differs(found, expected)`` says what is wrong with a result on the host, or nothing.
        around: says what was written around the result, or nothing.
        plan: what ``queue`` runs; None for a plain function.
    """

    what: str
    queue: Callable[[], Any]
    loads: Sequence[tuple[Any, Sequence[Any]]]
    expected: Callable[[int], np.ndarray | None]
    differs: Callable[[np.ndarray, np.ndarray], str]
    around: Callable[[], str] = lambda: ""
    plan: pb.Plan[Any] | None = None

    def __post_init__(self) -> None:
        self._expected = functools.cache(self.expected)

    def run(self, turn: int) -> Any:
        """Put the operands of a turn in place, queue the call, and return this rank's array of the result.

        Collective over the context; on CuPy's current stream.
        """
        for array, values in self.loads:
            if array.size:
                _bits(array)[...] = _bits(values[turn])
        return local_of(self.queue())

    def wrong(self, found: np.ndarray, turn: int) -> str:
        """Return what is wrong with what a run wrote on this rank, or an empty string. Local."""
        expected = self._expected(turn)
        return "" if expected is None else self.differs(found, expected)

    def check(self, found: np.ndarray, turn: int, case: str = "") -> None:
        """Fail if what a run wrote on this rank is wrong. Local."""
        wrong = self.wrong(found, turn)
        assert not wrong, f"{case}, turn {turn}: {wrong}: {self.what}"

    def record(self) -> bool:
        """Replay a CUDA graph from now on; return whether the call has one. Collective over the context."""
        try:
            assert self.plan is not None
            self.queue = self.plan.graph().replay
        except (pb.UnsupportedError, pb.ArgumentError):
            return False
        return True

    def close(self) -> None:
        """Close the plan. Collective over the context."""
        if self.plan is not None:
            self.plan.close()


def copied(array: Any) -> Any:
    """Queue a copy of an array on this rank, and return it. Local."""
    return _bits(array).copy().view(array.dtype)


def _bits(array: Any) -> Any:
    """Return an array of 16-bit floats as the integers that CuPy copies, strided ones too; others as they are."""
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def local_of(result: Any) -> Any:
    """Return this rank's array of a result."""
    return result.local if isinstance(result, pb.DistributedMatrix) else result
