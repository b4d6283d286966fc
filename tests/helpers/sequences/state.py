# SPDX-License-Identifier: Apache-2.0
"""What a sequence acts on: a context, its matrices and what NumPy says of them, plans, files, grids. How it steps.

``State`` is a state machine of Hypothesis's, whose rules are the methods with ``@step``. Each is made on all ranks:
in a search rank 0 draws it and tells the others, a program that was printed calls it on every rank. After each step
the ranks hear from each other what was wrong, so all raise the same error, and none waits for another.
"""

from __future__ import annotations

import functools
import inspect
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

import pblasmp as pb
from pblasmp import pblas
from pblasmp.dtypes import ELEMENT_TYPES, accumulation_dtype, is_float8
from tests.helpers.cases import exact
from tests.helpers.gpu.algorithms import small_panels
from tests.helpers.gpu.jobs import Job
from tests.helpers.gpu.products import integers, part_of, place

from .devices import Host
from .layouts import layouts, random_layout

matrices, plans, files, grids = map(Bundle, ("matrices", "plans", "files", "grids"))
"""Numbers in ``State.matrices`` and ``State.plans``, names of files, numbers of grids."""

seeds, numbers, ranks = st.integers(0, 999), st.integers(0, 8), st.integers(0, 5)


STEPS: list[str] = []
"""The names of all steps."""


class SkipStep(Exception):  # noqa: N818 - not an error
    """A step has nothing to do, on all ranks: it is not for such a matrix, or there is no such algorithm."""


class WrongError(AssertionError):
    """Something is not as NumPy has it, on one rank at least."""


def expect(fault: str | None) -> None:
    """Raise WrongError unless ``fault`` is empty."""
    if fault:
        raise WrongError(fault)


def refused(error: BaseException) -> bool:
    """Return whether an error, which every rank raises, says that there is no such algorithm for a call. Local."""
    return isinstance(error, pb.UnsupportedError) or "NOT_SUPPORTED" in str(error)


def on_all_ranks(function: Callable[..., Any], *, on_stream: bool = True) -> Callable[..., Any]:
    """Make a step of a method: all ranks make it, and all raise what any of them finds wrong."""

    @functools.wraps(function)
    def made(self: State, *args: Any, **given: Any) -> Any:
        given |= dict(zip(list(inspect.signature(function).parameters)[1:], args, strict=False))
        self.tell((function.__name__, given))
        name, fault, result = function.__name__, "", None
        self.doing(f"{name} {given}")
        try:
            with self.device.stream(self.stream) if on_stream else nullcontext():
                result = function(self, **given)
                if on_stream:
                    self.check_all()
        except Exception as error:  # noqa: BLE001 - it is the fault
            if isinstance(error, SkipStep) or refused(error):
                name = f"-{name}"
            else:
                fault = str(error) if isinstance(error, WrongError) else traceback.format_exc(-5)
        self.counts[name] += 1
        found = self.comm.allgather((name, fault))
        faults = [f"rank {rank}: {fault.rstrip()[:2000]}" for rank, (_, fault) in enumerate(found) if fault]
        if len({name for name, _ in found}) > 1:
            faults.append(f"the ranks went different ways: {[name for name, _ in found]}")
        self.failed = self.failed or bool(faults)
        expect("\n".join(faults))
        return result

    return made


def step(target: Bundle[Any] | None = None, **strategies: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a method a rule that is made on all ranks; what it returns, if not None, goes into the bundle ``target``."""

    def made(function: Callable[..., Any]) -> Any:
        STEPS.append(function.__name__)
        function = on_all_ranks(function)
        if target is None:
            return rule(**strategies)(function)

        @functools.wraps(function)
        def targeted(*args: Any, **given: Any) -> Any:
            result = function(*args, **given)
            return multiple() if result is None else result

        return rule(target=target, **strategies)(targeted)

    return made


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
    """A call that is made again and again, on the stream of a number; ``graph`` if it replays a CUDA graph."""

    job: Job
    stream: int
    kind: str
    graph: bool = False


class State(RuleBasedStateMachine):
    """The same on all ranks, but for local arrays.

    Args:
        comm: the ranks, of mpi4py.
        device: where they run.
        doing: is told what begins.
        ended: is called at the end. Collective over the ranks.

    Attributes:
        ctx: the context.
        matrices, plans, files: by number or name, what the bundles' elements stand for.
        grids: numbers of PBLAS's grids, by shape.
        pending: what runs of plans have queued: the plan, whose turn it was, and a copy of the result.
        stream: on which steps run.
        counts: how often each step was made; "-" before those that had nothing to do.
        undo: what to undo at the end, in reverse.
    """

    def __init__(
        self,
        comm: Any,
        device: Host,
        doing: Callable[[str], None] = lambda text: None,
        ended: Callable[[Any], None] = lambda state: None,
    ) -> None:
        super().__init__()
        self.comm, self.device, self.doing, self.ended = comm, device, doing, ended
        self.counts: Counter[str] = Counter()
        self.tell: Callable[[Any], Any] = lambda told: None
        self.matrices: dict[int, Held] = {}
        self.plans: dict[int, Planned] = {}
        self.files: dict[str, np.ndarray] = {}
        self.grids: dict[int, tuple[int, int]] = {}
        self.pending: list[tuple[Planned, int, Any]] = []
        self.stream, self.made, self.failed = 0, 0, False
        self.undo = ExitStack()

    @initialize(
        target=matrices, layouts=st.lists(layouts(), min_size=1, max_size=4), panels=st.sampled_from([0, 7])
    )
    @functools.partial(on_all_ranks, on_stream=False)
    def begin(self, layouts, panels):
        """Open the context, with some matrices. With ``panels`` so narrow, products of small ones have several, too."""
        self.undo.enter_context(self.device.thresholds())
        self.directory = Path(
            self.comm.bcast(None if self.comm.rank else tempfile.mkdtemp(prefix="pblasmp-"))
        )
        self.undo.callback(self.remove_directory)
        self.ctx = self.undo.enter_context(pb.Context(self.comm, engine=self.device.engine))
        if panels:
            self.undo.enter_context(small_panels(self.ctx, panels))
        with self.device.stream(self.stream):
            made = [self.make(number, layout) for number, layout in enumerate(layouts)]
            return multiple(*(self.keep(each.matrix, each.whole) for each in made))

    def remove_directory(self):
        """Collective over the ranks."""
        self.comm.barrier()
        if self.comm.rank == 0:
            shutil.rmtree(self.directory, ignore_errors=True)

    def check_all(self) -> None:
        """Raise WrongError unless every matrix is as NumPy has it, after each step. Local."""
        for number, held in self.matrices.items():
            fault = self.wrong(held)
            expect(fault and f"matrix {number}, {held.matrix.descriptor!r}: {fault}")

    def teardown(self):
        """End what the steps have begun."""
        try:
            if not self.failed:
                self.end()
        finally:
            self.close()

    @on_all_ranks
    def end(self):
        """Wait for plans, and close them and grids."""
        self.wait_for_plans()
        while self.plans:
            self.plans.popitem()[1].job.close()
        for number in self.grids:
            pblas.gridexit(number)

    @functools.partial(on_all_ranks, on_stream=False)
    def close(self):
        """Close the context."""
        self.matrices.clear()
        self.undo.close()
        self.ended(self)

    # -- matrices

    def find(self, first: int, serves: Callable[[Held], bool]) -> Held | None:
        """Return the first matrix from a number on that serves. Local; the same on every rank."""
        in_order = sorted(self.matrices, key=lambda number: (number < first, number))
        return next((self.matrices[i] for i in in_order if serves(self.matrices[i])), None)

    def pick(self, number: int, serves: Callable[[Held], bool] = lambda held: True) -> Held:
        """Return a matrix; if it does not serve the step is skipped."""
        held = self.matrices[number]
        if not serves(held):
            raise SkipStep
        return held

    def keep(self, matrix: pb.DistributedMatrix, whole: np.ndarray) -> int:
        """Check a matrix, and return the number that it has from now on."""
        held = Held(matrix, whole)
        self.check(held)
        self.made += 1
        self.matrices[self.made] = held
        return self.made

    def new(self, seed: int, shape: Sequence[int], dtype: Any) -> Held:
        """Return a matrix of small integers in a random layout, which has no number yet."""
        return self.make(seed, random_layout(random.Random(seed), self.comm.size, shape, np.dtype(dtype)))

    def make(self, seed: int, d: pb.MatrixDescriptor) -> Held:
        """Return a matrix of small integers, which has no number yet."""
        whole = integers(d.shape, d.dtype, seed, small(d.dtype)).astype(d.dtype)
        return Held(place(self.ctx, whole, d), whole)

    def like(self, first: int, seed: int, shape: Sequence[int], dtype: np.dtype, *apart: Held) -> Held:
        """Return a matrix of this shape and type that shares no memory with others: one that is there, or new."""
        found = self.find(
            first,
            lambda held: (
                held.whole.shape == tuple(shape)
                and held.whole.dtype == dtype
                and not any(np.may_share_memory(held.whole, each.whole) for each in apart)
            ),
        )
        return found or self.new(seed, shape, dtype)

    def tame(self, held: Held, most: float = 64) -> None:
        """Make a matrix hold small integers again, in place, where it holds anything else."""
        values = exact(held.whole)
        parts = [values.real, values.imag] if values.dtype.kind == "c" else [values]
        if all((np.abs(part) <= most).all() and (part == np.rint(part)).all() for part in parts):
            return
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

    # -- plans

    def wait_for_plans(self) -> None:
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
    if np.array_equal(found, expected):
        return ""
    a, b = exact(found), exact(expected)
    scale = max(1.0, float(np.abs(b).max(initial=0)))
    wrong = ~(np.abs(a - b) <= tolerance * scale)
    if not wrong.any():
        return ""
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    return f"{int(wrong.sum())} of {wrong.size} wrong, first at local {at}: {a[at]}, expected {b[at]}"
