# SPDX-License-Identifier: Apache-2.0
"""Measuring algorithms on this machine: on scratch results, by the median time until all ranks are done."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..comm import Agreement, Communicator, Running, is_agreed
from ..engines.arrays import same_memory
from ..engines.method import names, prepare
from ..engines.product import Product
from ..engines.protocol import Engine
from ..engines.request import Operands, Task
from ..errors import PblasmpError, UnsupportedError
from ..layout import FactorProblem
from .measurements import save, tuning_file
from .timing import samples

_SAMPLES = 3, 20
_SECONDS = 0.5  # spent on the samples of one algorithm
_HOPELESS = 4  # an algorithm so many times as slow as the best one so far gets no more samples
_CLOSE = 1.25  # those that take at most so many times as long as the best one are timed again, in turns
_TURNS = 10
_LEAST_TURNS = 5  # of algorithms that take long
_IN_TURNS = 100  # samples of each of them, at most
LIMIT = 60.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was measured.

    Attributes:
        problem: the product, in words.
        machine: the machine, in words.
        seconds: by algorithm, the median of the times until all ranks were done.
        refused: by algorithm, why it was not measured.
        file: where it is kept; empty if it is not.
        reason: why it is not kept.
    """

    problem: str
    machine: str
    seconds: dict[str, float]
    refused: dict[str, str]
    file: str
    reason: str = ""

    @property
    def best(self) -> str:
        """Name of the fastest algorithm; empty if none could be measured."""
        return min(self.seconds, key=lambda name: self.seconds[name], default="")

    def __str__(self) -> str:
        lines = [f"{self.problem}, on {self.machine}"]
        for name, seconds in sorted(self.seconds.items(), key=lambda each: each[1]):
            lines.append(
                f"  {seconds * 1e6:10.0f} µs  {name}{'  taken by auto' if name == self.best else ''}"
            )
        return "\n".join([*lines, *(f"  {'-':>10}     {name}: {why}" for name, why in self.refused.items())])


def measure(
    engine: Engine,
    comm: Communicator,
    task: Task,
    operands: Operands,
    *,
    limit: float = LIMIT,
    progress: Progress | None = None,
) -> Tuned:
    """Time every algorithm that takes a problem, and let "auto" know. Collective over the ranks.

    No array is written. No further algorithm is started after ``limit`` seconds; ``progress`` is called with
    (algorithms done, algorithms in total). UnsupportedError if no algorithm can compute it.
    """
    trials = _Trials(engine, comm, task, operands)
    candidates = names(engine, task.computed, task.options)
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    began = time.monotonic()

    def late() -> bool:
        return bool(comm.bcast(time.monotonic() - began > limit))

    def tell(done: int) -> None:
        with Agreement(comm, "tune"):  # it is the user's, and may raise
            if progress is not None:
                progress(done, len(candidates))

    with Running(comm, "tune"):
        for i, name in enumerate(candidates):
            tell(i)
            if seconds and late():
                refused[name] = f"not measured: {limit:g} s had passed"
                continue
            found = trials.time(name, min(seconds.values(), default=0.0))
            if isinstance(found, str):
                refused[name] = found
            else:
                seconds[name] = found
        close = [name for name in seconds if seconds[name] <= _CLOSE * min(seconds.values())]
        if len(close) > 1 and not late():
            seconds |= trials.time_in_turns(close)
        tell(len(candidates))
    if not seconds:
        reasons = "".join(f"\n  {name}: {why}" for name, why in refused.items())
        raise UnsupportedError(f"tune: no algorithm of the {engine.name} engine takes this problem:{reasons}")
    return _keep(engine, comm, task, operands.follows, seconds, refused)


def _keep(
    engine: Engine,
    comm: Communicator,
    task: Task,
    epilogue: str,
    seconds: dict[str, float],
    refused: dict[str, str],
) -> Tuned:
    measured, problem, today = engine.measured, task.computed, comm.bcast(time.strftime("%Y-%m-%d"))
    entry = measured.entry(problem, task.options, seconds, today, epilogue)
    if not entry.usable:
        why = "an extent is 0, and other products' times do not follow from this one's"
        return Tuned(str(problem), measured.machine, seconds, refused, "", why)
    measured.add(entry)
    file, why = "", ""
    with Agreement(comm, "tune: saving the times"):  # a warning may be an error
        if comm.rank == 0:
            found = tuning_file()
            file, why = str(found), save(found, [entry])
        if why:
            warnings.warn(
                f"tune: the times could not be saved, only this context knows them: {why}", stacklevel=3
            )
    file, why = comm.bcast((file, why))
    return Tuned(str(problem), measured.machine, seconds, refused, "" if why else file, why)


class _Trials:
    """A problem whose algorithms are timed, on scratch results. Making one is collective over the ranks."""

    def __init__(self, engine: Engine, comm: Communicator, task: Task, operands: Operands) -> None:
        self._engine, self._comm, self._task = engine, comm, task
        with Agreement(comm, "tune: scratch results"):
            written = "abcd" if isinstance(task.problem, FactorProblem) else "d"
            self._operands, self._restore = _scratch(engine, operands, written)

    def time(self, name: str, best: float) -> float | str:
        """Return the seconds that an algorithm takes, or why it refuses. Collective.

        ``best`` is the shortest time so far, 0 if there is none.
        """
        try:
            product = self._prepared(name)
        except (PblasmpError, MemoryError) as error:
            if not is_agreed(error, self._comm):
                raise
            return str(error).partition(": ")[2] or str(error)
        try:
            return _time(self._engine, self._comm, self._run(product), self._restore, best)
        except PblasmpError as error:  # libraries refuse some products only when they run
            if not is_agreed(error, self._comm):
                raise
            return str(error)
        finally:
            self._engine.synchronize()
            product.close()

    def time_in_turns(self, names: Sequence[str]) -> dict[str, float]:
        """Return the seconds of algorithms that take turns, so that other load on the machine affects all alike.

        Collective. There are none if the algorithms do not fit into memory together.
        """
        engine, comm = self._engine, self._comm
        runs: dict[str, Callable[[], None]] = {}
        times: dict[str, list[float]] = {name: [] for name in names}
        with ExitStack() as closing:
            try:
                for name in names:
                    product = self._prepared(name)
                    closing.callback(product.close)
                    runs[name] = self._run(product)
                    samples(engine, comm, runs[name], 2, self._restore)
            except (PblasmpError, MemoryError) as error:
                if not is_agreed(error, comm):
                    raise
                return {}
            finally:
                closing.callback(engine.synchronize)  # first
            for turn in range(_TURNS):
                if turn >= _LEAST_TURNS and all(sum(each) >= _SECONDS for each in times.values()):
                    break  # on every rank alike: the times are those of all ranks
                for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                    shortest = min(times[name], default=_SECONDS)
                    count = max(1, min(_IN_TURNS, int(_SECONDS / max(shortest, 1e-9))) // _TURNS)
                    times[name] += samples(engine, comm, runs[name], count, self._restore)
        return {name: float(np.median(each)) for name, each in times.items()}

    def _prepared(self, name: str) -> Product:
        with Agreement(self._comm, f"tune: preparing {name}"):
            task = self._task._replace(options=replace(self._task.options, algo=name))
            return prepare(self._engine, task, self._operands)[0]

    def _run(self, product: Product) -> Callable[[], None]:
        """Return a function that runs a product like a plan that runs again."""
        return product.bind(self._operands).run


def _time(
    engine: Engine, comm: Communicator, run: Callable[[], Any], restore: Callable[[], None], best: float
) -> float:
    """Return the median of the times until all ranks were done."""
    least, most = _SAMPLES
    samples(engine, comm, run, 2, restore)  # allocates, and records a graph
    times = samples(engine, comm, run, least, restore)
    middle = float(np.median(times))
    if best and middle > _HOPELESS * best:
        return middle
    more = min(most, int(_SECONDS / max(middle, 1e-9))) - least
    return float(np.median([*times, *samples(engine, comm, run, more, restore)])) if more > 0 else middle


def _scratch(engine: Any, operands: Operands, written: str) -> tuple[Operands, Callable[[], None]]:
    """Return operands whose outputs are scratch copies, and a function that restores the copies' first values.

    ``written`` are the matrices that may be written; others keep their values, but are the copy of one of these if they
    are the same memory.
    """
    copies: list[tuple[Any, Any]] = []

    def copy(x: Any) -> Any:
        new = _like(engine, x)
        copies.append((new, x))
        return new

    made: dict[str, Any] = {}
    for name in (*written, *(each for each in "abcd" if each not in written)):
        x = getattr(operands, name)
        like = (copied for copied, of in copies if x is not None and same_memory(x, of))
        made[name] = x if x is None else next(like, None)
        if made[name] is None and x is not None:
            made[name] = copy(x) if name in written else x
    reads = written != "d" or any(made[name] is made["d"] for name in "abc")
    e, s = operands.epilogue, operands.scales
    if e is not None:
        e = replace(e, **{name: copy(getattr(e, name)) for name in e.outputs})
    if s is not None and s.amax is not None:
        s = replace(s, amax=copy(s.amax))
    gathered = None if operands.gathered is None else _like(engine, operands.gathered)
    kept = copies if reads else copies[1:]

    def restore() -> None:
        for new, of in kept:
            new[...] = of

    restore()
    return replace(operands, **made, epilogue=e, scales=s, gathered=gathered), restore


def _like(engine: Any, x: Any) -> Any:
    """Return an array with the shape and the strides of another."""
    if x.ndim != 2:
        return engine.xp.empty_like(x)
    size = x.itemsize
    order = "C" if x.strides[1] == size or x.shape[1] <= 1 else "F"
    lines, extent = (0, x.shape[1]) if order == "C" else (1, x.shape[0])
    ld = max(1, extent, x.strides[lines] // size if x.shape[lines] > 1 else extent)
    return engine.empty(x.shape, x.dtype, order, ld)
