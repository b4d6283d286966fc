# SPDX-License-Identifier: Apache-2.0
"""One context in the course of a sequence: its matrices and what NumPy says of them, plans, files, grids."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import ELEMENT_TYPES, accumulation_dtype, is_float8
from tests.helpers.cases import exact
from tests.helpers.gpu.jobs import Job
from tests.helpers.gpu.products import integers, part_of, place

from .devices import Host
from .steps import SLOTS, Draw, descriptor


class SkipStep(Exception):  # noqa: N818 - not an error
    """A step has nothing to do, on all ranks: there is no such matrix, or no such algorithm."""


class WrongError(AssertionError):
    """Something is not as NumPy has it, on this rank at least."""


def expect(fault: str | None) -> None:
    """Raise WrongError unless ``fault`` is empty."""
    if fault:
        raise WrongError(fault)


@dataclass(eq=False)
class Held:
    """A matrix, and the whole of it in NumPy; views share memory in both."""

    matrix: pb.DistributedMatrix
    whole: np.ndarray

    @property
    def arithmetic(self) -> bool:
        """Whether it is of a type that has arithmetic."""
        return not is_float8(self.whole.dtype)


@dataclass(eq=False)
class Planned:
    """A call that is made again and again.

    Attributes:
        job: the call.
        stream: the number of the stream on which it runs.
        kind: of call.
        graph: it replays a CUDA graph.
        open: its plan has not been closed.
    """

    job: Job
    stream: int
    kind: str
    graph: bool = False
    open: bool = True


class Session:
    """What the steps of a sequence act on. The same on all ranks, but for local arrays.

    Args:
        ctx: the context.
        device: where it runs.
        directory: for files; all ranks have it.
        comm: the ranks in mpi4py, None for this process alone.

    Attributes:
        slots: matrices by place.
        plans: calls that are made again and again, by place.
        pending: results that nobody has looked at: the call, the turn, a copy of the result.
        files: what the files hold.
        grids: numbers of grids of ``pblas``, by their shape.
        stream: the number of the stream for matrices.
        counts: how often each step was made.
        undo: ends what steps have changed.
    """

    def __init__(self, ctx: pb.Context, device: Host, directory: Path, comm: Any = None) -> None:
        self.ctx, self.device, self.directory, self.comm = ctx, device, directory, comm
        self.slots: dict[int, Held] = {}
        self.plans: dict[int, Planned] = {}
        self.pending: list[tuple[Planned, int, Any]] = []
        self.files: dict[str, np.ndarray] = {}
        self.grids: dict[tuple[int, int], int] = {}
        self.stream = 0
        self.counts: Counter[str] = Counter()
        self.undo = ExitStack()

    # -- matrices

    def find(self, slot: int, serves: Callable[[Held], bool] = lambda held: True) -> Held | None:
        """Return the first matrix from a place on that serves. Local; the same on every rank."""
        places = [(slot + i) % SLOTS for i in range(SLOTS)]
        return next((self.slots[i] for i in places if i in self.slots and serves(self.slots[i])), None)

    def pick(self, slot: int, serves: Callable[[Held], bool] = lambda held: True) -> Held:
        """Return the first matrix from a place on that serves; without one the step is skipped."""
        found = self.find(slot, serves)
        if found is None:
            raise SkipStep
        return found

    def keep(self, slot: int, matrix: pb.DistributedMatrix, whole: np.ndarray) -> Held:
        """Put a matrix into a place and check it."""
        held = self.slots[slot] = Held(matrix, whole)
        self.check(held)
        return held

    def make(self, seed: int, shape: Sequence[int], dtype: Any) -> Held:
        """Return a matrix of small integers in a random layout, in no place."""
        layout = Draw(random.Random(seed), self.ctx.size, self.device.large).layout(
            shape, np.dtype(dtype).name
        )
        d = descriptor(layout)
        whole = integers(d.shape, d.dtype, seed, small(d.dtype)).astype(d.dtype)
        return Held(place(self.ctx, whole, d), whole)

    def like(self, slot: int, seed: int, shape: tuple[int, int], dtype: np.dtype, apart: Held) -> Held:
        """Return a matrix of this shape and type that shares no memory with ``apart``: one that is there, or new."""
        found = self.find(
            slot,
            lambda held: (
                held.whole.shape == shape
                and held.whole.dtype == dtype
                and not np.may_share_memory(held.whole, apart.whole)
            ),
        )
        return found or self.make(seed, shape, dtype)

    def tame(self, held: Held, most: float = 64) -> None:
        """Make a matrix hold small integers again, in place, where it holds anything else."""
        values = exact(held.whole)
        parts = [values.real, values.imag] if values.dtype.kind == "c" else [values]
        if all((np.abs(part) <= most).all() and (part == np.rint(part)).all() for part in parts):
            return
        self.counts["(matrices filled with small integers)"] += 1
        self.fill(
            held, integers(held.whole.shape, held.whole.dtype, held.whole.size, small(held.whole.dtype))
        )

    def fill(self, held: Held, values: np.ndarray) -> None:
        """Write values into a matrix. Local: each rank writes its part."""
        held.whole[...] = values.astype(held.whole.dtype)
        part = part_of(self.ctx, held.whole, held.matrix.descriptor)
        if part is not None:
            self.ctx.engine.from_host(held.matrix.local, part)

    def wrong(self, held: Held, tolerance: float = 0.0) -> str:
        """Return what is wrong with this rank's part of a matrix, or an empty string. Local."""
        d = held.matrix.descriptor
        if (d.shape, d.dtype) != (held.whole.shape, held.whole.dtype):
            return f"{d.shape} of {d.dtype}, expected {held.whole.shape} of {held.whole.dtype}"
        part = part_of(self.ctx, held.whole, d)
        return "" if part is None else differs(held.matrix.on_host(), part, tolerance)

    def check(self, held: Held, tolerance: float = 0.0) -> None:
        """Raise WrongError where this rank's part of a matrix is not as NumPy has it. Local."""
        expect(self.wrong(held, tolerance))

    def check_all(self) -> None:
        """Check every matrix. Local."""
        for slot, held in self.slots.items():
            fault = self.wrong(held)
            expect(fault and f"matrix {slot}, {held.matrix.descriptor}: {fault}")

    # -- plans

    def wait(self) -> None:
        """Wait for what is queued, and check it. Collective over the context."""
        pending, self.pending = self.pending, []
        for number in {planned.stream for planned, _, _ in pending}:
            with self.device.stream(number):
                self.ctx.engine.synchronize()
        for planned, turn, found in pending:
            with self.device.stream(planned.stream):
                fault = planned.job.wrong(self.ctx.engine.to_host(found), turn)
            how = "a graph" if planned.graph else "a run"
            expect(fault and f"{how} of turn {turn}: {fault}: {planned.kind} {planned.job.what}")
        for planned in self.plans.values():
            fault = planned.job.around()
            expect(fault and f"{fault}: {planned.kind} {planned.job.what}")

    def drop(self, slot: int) -> None:
        """Close the plan in a place; what is queued goes on. Collective over the context."""
        planned = self.plans.pop(slot, None)
        if planned is not None:
            planned.open = False
            planned.job.close()

    def close(self) -> None:
        """End what the steps have begun. Collective over the context."""
        from pblasmp import pblas

        self.wait()
        for slot in list(self.plans):
            self.drop(slot)
        for number in self.grids.values():
            pblas.gridexit(number)
        self.slots.clear()
        self.undo.close()


def small(dtype: np.dtype) -> int:
    """Return the largest of the small integers of a type."""
    return 1 if dtype.itemsize <= 2 else 3


def largest_exact(dtype: np.dtype) -> float:
    """Return up to which number all integers are exact in a type."""
    return 1 / ELEMENT_TYPES[dtype.name].roundoff


def rounding(dtype: np.dtype, bound: float) -> float:
    """Return the relative error of sums whose terms add up to ``bound``, at most: 0 where all are exact."""
    if bound <= largest_exact(dtype):
        return 0.0
    wide = accumulation_dtype(dtype)
    return 8 * max(float(ELEMENT_TYPES[kind.name].roundoff) for kind in (dtype, wide))


def differs(found: np.ndarray, expected: np.ndarray, tolerance: float = 0.0) -> str:
    """Return how an array differs from another, or an empty string."""
    if found.shape != expected.shape:
        return f"shape {found.shape}, expected {expected.shape}"
    if tolerance == 0 and found.tobytes() == expected.tobytes():
        return ""
    a, b = exact(found), exact(expected)
    scale = max(1.0, float(np.abs(b).max(initial=0)))
    wrong = ~(np.abs(a - b) <= tolerance * scale)
    if not wrong.any():
        return ""
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    return f"{int(wrong.sum())} of {wrong.size} wrong, first at local {at}: {a[at]}, expected {b[at]}"
