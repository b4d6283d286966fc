# SPDX-License-Identifier: Apache-2.0
"""Measuring algorithms on this machine: on scratch results, by the median time until all ranks are done."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..comm import Agreement, Communicator, Running, is_agreed
from ..engines.arrays import same_memory
from ..engines.method import names, prepare
from ..engines.product import Product
from ..engines.protocol import Engine
from ..engines.request import Operands, Options, Problem
from ..errors import PblasmpError, UnsupportedError
from ..layout import Level3Problem, MatmulProblem
from ..timing import samples
from .measurements import save, tuning_file

__all__ = ["Tuned", "measure"]

_SAMPLES = 3, 20
_SECONDS = 0.5  # spent on the samples of one algorithm
_HOPELESS = 4  # an algorithm so many times as slow as the best one so far gets no more samples
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
    problem: Problem,
    options: Options,
    operands: Operands,
    nearest: MatmulProblem | Level3Problem | None = None,
    *,
    limit: float = LIMIT,
    progress: Progress | None = None,
) -> Tuned:
    """Time every algorithm that takes a problem, and let "auto" know. Collective over the ranks.

    Args:
        engine, comm: of a context.
        problem, options, operands, nearest: as for ``engines.method.prepare``. No array is written.
        limit: seconds after which no further algorithm is started.
        progress: called with (algorithms done, algorithms in total).

    Raises:
        UnsupportedError: no algorithm can compute it.
    """
    with Agreement(comm, "tune: scratch results"):
        scratch, restore = _scratch(engine, operands)
    candidates = names(engine, nearest or problem, options)
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    began = time.monotonic()
    with Running(comm, "tune"):
        for i, name in enumerate(candidates):
            if progress is not None:
                progress(i, len(candidates))
            if seconds and comm.bcast(time.monotonic() - began > limit):
                refused[name] = f"not measured: {limit:g} s had passed"
                continue
            try:
                with Agreement(comm, f"tune: preparing {name}"):
                    product, _ = prepare(engine, problem, replace(options, algo=name), scratch, nearest)
            except (PblasmpError, MemoryError) as error:
                if not is_agreed(error, comm):
                    raise
                refused[name] = str(error).partition(": ")[2] or str(error)
                continue
            try:
                run = _run(product, scratch, again=options.repeated)
                seconds[name] = _time(engine, comm, run, restore, min(seconds.values(), default=0.0))
            except PblasmpError as error:  # libraries refuse some products only when they run
                if not is_agreed(error, comm):
                    raise
                refused[name] = str(error)
            finally:
                engine.synchronize()
                product.close()
        if progress is not None:
            progress(len(candidates), len(candidates))
    if not seconds:
        reasons = "".join(f"\n  {name}: {why}" for name, why in refused.items())
        raise UnsupportedError(f"tune: no algorithm of the {engine.name} engine takes this problem:{reasons}")
    return _keep(engine, comm, nearest or problem, options, seconds, refused)


def _keep(
    engine: Engine,
    comm: Communicator,
    problem: Problem,
    options: Options,
    seconds: dict[str, float],
    refused: dict[str, str],
) -> Tuned:
    measured = engine.measured
    entry = measured.entry(problem, options, seconds, comm.bcast(time.strftime("%Y-%m-%d")))
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


def _run(product: Product, operands: Operands, *, again: bool) -> Callable[[], None]:
    """Return a function that runs a product: like a plan that runs ``again``, or as if for the first time."""
    return product.bind(operands).run if again else lambda: product.run(operands)


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


def _scratch(engine: Any, operands: Operands) -> tuple[Operands, Callable[[], None]]:
    """Return operands whose outputs are scratch copies, and a function that restores the copies' first values."""
    copies: list[tuple[Any, Any]] = []

    def copy(x: Any) -> Any:
        new = _like(engine, x)
        copies.append((new, x))
        return new

    d = copy(operands.d)
    others = {
        name: d if (x := getattr(operands, name)) is not None and same_memory(x, operands.d) else x
        for name in "abc"
    }
    e, s = operands.epilogue, operands.scales
    if e is not None:
        e = replace(e, **{name: copy(getattr(e, name)) for name in e.outputs})
    if s is not None and s.amax is not None:
        s = replace(s, amax=copy(s.amax))
    gathered = None if operands.gathered is None else _like(engine, operands.gathered)
    restored = copies if any(x is d for x in others.values()) else copies[1:]

    def restore() -> None:
        for new, of in restored:
            new[...] = of

    restore()
    return Operands(**others, d=d, epilogue=e, scales=s, gathered=gathered), restore


def _like(engine: Any, x: Any) -> Any:
    """Return an array with the shape and the strides of another."""
    if x.ndim != 2:
        return engine.xp.empty_like(x)
    size = x.itemsize
    order = "C" if x.strides[1] == size or x.shape[1] <= 1 else "F"
    lines, extent = (0, x.shape[1]) if order == "C" else (1, x.shape[0])
    ld = max(1, extent, x.strides[lines] // size if x.shape[lines] > 1 else extent)
    return engine.empty(x.shape, x.dtype, order, ld)
