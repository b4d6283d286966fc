# SPDX-License-Identifier: Apache-2.0
"""Which algorithms of an engine there are for a problem, which of them apply, and which one is taken.

An algorithm is a ``Method``. An engine's are listed where the engine is; those of every engine in ``dense`` and
``tensor``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError, short_repr
from ..layout import Level3Problem, MatmulProblem, ParallelProblem
from ..layout.value import bytes_text
from .composite import MovedProduct
from .product import Product, Workspace
from .protocol import Engine, Method
from .request import AnyProblem, Operands, Options, Task

if TYPE_CHECKING:
    from ..layout.schemes import Form

Planned = Operands | None
_ALIKE = 128  # tokens
_KEPT = 256  # choices for other numbers of tokens


def plain_refusal(operands: Planned) -> str:
    """Return why what computes only plain products cannot be taken, or an empty string. Local."""
    if operands is not None and operands.epilogue is not None:
        return f"epilogue: it takes none, got {operands.epilogue.name!r}"
    return "scales: it takes none" if operands is not None and operands.scales is not None else ""


def type_refusal(engine: Engine, problem: Any, options: Options, operands: Operands | None) -> str:
    """Return why an engine's operations cannot compute these types in this way, or an empty string. Local."""
    d = problem.d.dtype
    if isinstance(problem, Level3Problem) and d.itemsize < 4:
        return f"{problem.routine} is for float32, float64, complex64 and complex128, got {d.name}"
    if why := library_refusal(options, operands):
        return why
    return _fused_refusal(operands) or engine.operations.refusal(problem.a.dtype, options.compute)


def follower_refusal(operands: Planned, *, fuses: bool = False) -> str:
    """Return why an epilogue cannot follow local products, which may have it ``fuses``-d; "" if it can. Local."""
    e = None if operands is None else operands.epilogue
    if e is not None and (set(e.given) - {"bias"} or e.activation in ("drelu", "dgelu")):
        return f"epilogue {e.name!r}: only a bias and an activation follow it"
    return "" if fuses else _fused_refusal(operands)


def _fused_refusal(operands: Planned) -> str:
    if operands is not None and operands.epilogue is not None and operands.epilogue.fused:
        return "its epilogue runs after the product, but fused=True asks for a fused one"
    return ""


def library_refusal(options: Options, operands: Planned, *, leaves_sms: bool = False) -> str:
    """Return which option only cuBLASMp's own algorithms obey, or an empty string. Local.

    ``leaves_sms``: the algorithm in question leaves ``comm_sms`` multiprocessors to others, as they do.
    """
    if options.comm_sms is not None and not leaves_sms:
        return 'comm_sms is for cuBLASMp\'s algorithms and "one_kernel"'
    if operands is not None and operands.scales is not None and operands.scales.mode != "tensor":
        return f"scales of mode {operands.scales.mode!r} are for cuBLASMp on Blackwell GPUs"
    return ""


def travel_refusal(asked: np.dtype | None, travels: np.dtype) -> str:
    """Return why partial sums cannot travel in the type requested or a wider one, or an empty string. Local."""
    if asked is None or asked == travels or asked.itemsize < travels.itemsize:
        return ""
    return f"comm_dtype: partial sums travel in {travels.name} here, not in {asked}"


class ArrayMethod(Method):
    """An algorithm in terms of an engine's operations and transport, which every engine can run.

    Attributes:
        product: its products; made from an engine, a problem, options and operands.
    """

    product: type[Any]

    def refusal(self, engine: Engine, problem: Any, options: Options, operands: Operands | None) -> str:
        return type_refusal(engine, problem, options, operands)

    def prepare(self, engine: Engine, problem: Any, options: Options, operands: Operands) -> Product:
        product: Product = self.product(engine, problem, options, operands)
        return product


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on an algorithm for a problem; true if the algorithm is known to apply. Local.

    Attributes:
        applies: whether the algorithm can be taken; None if that was not tried, since another one was taken first.
        why: why it was taken, or not.
        taken: it is the one that runs, chosen by "auto" or by name.
    """

    applies: bool | None
    why: str
    taken: bool = False

    def __bool__(self) -> bool:
        return bool(self.applies)

    def __str__(self) -> str:
        if self.taken:
            return f"taken: {self.why}" if self.why else "taken"
        if self.applies is None:
            return f"not tried: {self.why}"
        return f"applies: {self.why}" if self.applies and self.why else self.why or "applies"


@dataclass(frozen=True, slots=True)
class Report:
    """What a plan does on this rank; ``str()`` gives it as text. Made by ``plan.report()``. Local.

    Attributes:
        call: the product: ops, sizes, type, scheme.
        engine: name of the engine; ``ctx.engine.why`` says why it was chosen.
        asked: the algorithm requested.
        path: how it is computed.
        sent_bytes: bytes that this rank sends to other ranks in one run.
        copied_bytes: bytes that this rank copies within its node's memory in one run.
        workspace: memory besides the operands.
        algorithms: by name, why each algorithm was taken or not.
        moved: the operands that are redistributed first, each with its new layout.
        notes: reasons and warnings.
    """

    call: str
    engine: str
    asked: str
    path: str
    sent_bytes: int
    copied_bytes: int
    workspace: Workspace
    algorithms: Mapping[str, Verdict] = field(default_factory=dict)
    moved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def algorithm(self) -> str:
        """Name of the algorithm that was taken."""
        return next((name for name, verdict in self.algorithms.items() if verdict.taken), "")

    @property
    def bytes_moved(self) -> int:
        """Bytes that this rank sends and copies in one run."""
        return self.sent_bytes + self.copied_bytes

    def __str__(self) -> str:
        device, host = self.workspace.device_bytes, self.workspace.host_bytes
        lines = [
            self.call,
            f"  engine     {self.engine}",
            f"  path       {self.path} (requested: {self.asked})",
            f"  each run   {bytes_text(self.sent_bytes)} sent, {bytes_text(self.copied_bytes)} copied by this rank",
            f"  workspace  {bytes_text(device)} on the device, {bytes_text(host)} on the host",
            *(f"  first      {move}" for move in self.moved),
            *(f"  algorithm  {name}: {verdict}" for name, verdict in self.algorithms.items()),
            *(f"  note       {note}" for note in self.notes),
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class Taken:
    """The algorithm that was taken for a problem.

    Attributes:
        name: its name.
        known: all algorithms for this kind of problem, by name.
        problem, options: what was asked for.
        follows: the name of the epilogue.
        measured: by name, the seconds that were measured for such a problem on this machine, if any.
        refused: by name, why those refuse the problem that would have come first.
        number: the algorithm's number, the same on every rank.
    """

    name: str
    known: Mapping[str, Method]
    problem: AnyProblem
    options: Options
    follows: str
    measured: Mapping[str, float]
    refused: Mapping[str, str]
    number: int = field(init=False)
    _resized: dict[tuple[int, int], Taken] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.number = [*self.known].index(self.name)

    def verdicts(self) -> dict[str, Verdict]:
        """Return by name the verdict on every algorithm; those that come after the one taken are not tried. Local."""
        found = {}
        for name, row in self.known.items():
            viewed = self.problem if name == self.name else self.refused.get(name) or row.view(self.problem)
            why = viewed if isinstance(viewed, str) else ""
            found[name] = _verdict(name, self.name, self.options, why, self.measured)
            if found[name].applies and name != self.name:
                why = found[name].why if self.options.algo == "auto" else f"{self.name} was requested"
                found[name] = Verdict(applies=None, why=why)
        return found

    def resized(self, engine: Engine, problem: ParallelProblem) -> Taken | None:
        """Return the choice for a problem that differs in tokens only, if algorithms need not be asked. Local.

        It is that for the next multiple of 128 tokens, the rows that a GPU multiplies at once: for all numbers of
        tokens in between a choice is made once.
        """
        most = -(-problem.tokens[0] // _ALIKE)
        key = most, engine.measured.added
        found = self._resized.get(key)
        if found is None:
            if len(self._resized) >= _KEPT:
                self._resized.clear()
            problem = problem.with_tokens(most * _ALIKE, 1)
            self._resized[key] = found = self.for_problem(engine, problem)
        return None if found.name in self.refused else found

    def for_problem(self, engine: Engine, problem: ParallelProblem) -> Taken:
        """Return the choice for a problem, if what was refused still is. Local."""
        known, options, refused, name = self.known, self.options, self.refused, self.name
        measured = _measured(engine, problem, options, self.follows, alone=True)
        rivals = sorted(
            (row.least, number, other)
            for number, (other, row) in enumerate(known.items())
            if other not in refused or row.refuses_sizes
        )
        if measured:
            left = {other: known[other] for _, _, other in rivals}
            name, _ = next(_cheapest_first(engine, left, problem, options, measured, {}))
        elif options.algo == "auto":
            best = math.inf, math.inf, name
            for least, number, other in rivals:
                if (least, number, other) >= best:
                    break
                row, viewed = known[other], known[other].view(problem)
                if not isinstance(viewed, str) and row.fits(engine, viewed, options):
                    best = min(best, (row.cost(engine, viewed, options), number, other))
            name = best[2]
        return Taken(name, known, problem, options, self.follows, measured, refused)


def survey(engine: Engine, problem: AnyProblem, options: Options) -> dict[str, Verdict]:
    """Return by name the verdict on every algorithm for ``problem``, which says which one is taken.

    Collective over the context.

    Raises:
        UnsupportedError: there is no algorithm called ``options.algo`` for this problem.
    """
    known = known_for(engine, problem, options)
    measured = _measured(engine, problem, options)
    refused: dict[str, str] = {}
    for name, viewed in _cheapest_first(engine, known, problem, options, measured, refused):
        refused[name] = known[name].refusal(engine, viewed, options, None)
    fits = [name for name, why in refused.items() if not why and options.algo in ("auto", name)]
    best = next(iter(fits), None)
    return {name: _verdict(name, best, options, refused[name], measured) for name in known}


def choose(
    engine: Engine, problem: AnyProblem, options: Options, operands: Operands
) -> tuple[Method, Any, Taken]:
    """Return the algorithm to take, the problem as it sees it, and how it was chosen.

    Collective over the context. Algorithms that come after the one taken, by rule or by measured times, are not tried
    whether they apply.

    Raises:
        UnsupportedError: there is no such algorithm, it refuses the problem, or all do.
    """
    known = known_for(engine, problem, options)
    measured = _measured(engine, problem, options, operands.follows)
    refused: dict[str, str] = {}
    asked = known if options.algo == "auto" else {options.algo: known[options.algo]}
    for name, viewed in _cheapest_first(engine, asked, problem, options, measured, refused):
        why = known[name].refusal(engine, viewed, options, operands)
        if not why:
            return (
                known[name],
                viewed,
                Taken(name, known, problem, options, operands.follows, measured, refused),
            )
        refused[name] = why
    if options.algo != "auto":
        raise UnsupportedError(f"algo {options.algo!r}: {refused[options.algo]}")
    reasons = "".join(f"\n  {name}: {refused[name]}" for name in known)
    if len(set(refused.values())) == 1:
        reasons = f" {next(iter(refused.values()))}"
    raise UnsupportedError(f"no algorithm of the {engine.name} engine takes this problem:{reasons}")


def _cheapest_first(
    engine: Engine,
    known: Mapping[str, Method],
    problem: AnyProblem,
    options: Options,
    measured: Mapping[str, float],
    refused: dict[str, str],
) -> Iterator[tuple[str, Any]]:
    """Yield algorithms, by measured times or by rule, each with the problem as it sees it. Local.

    Those that have no such form are added to ``refused``. A problem is viewed when its algorithm may come next.
    """
    left: list[tuple[float, float, int, str, Any]] = [
        (measured.get(name, math.inf), row.least, number, name, None)
        for number, (name, row) in enumerate(known.items())
    ]
    heapq.heapify(left)
    while left:
        seconds, _, number, name, viewed = heapq.heappop(left)
        if viewed is not None:
            yield name, viewed
            continue
        viewed = known[name].view(problem)
        if isinstance(viewed, str):
            refused[name] = viewed
        else:
            cost = known[name].cost(engine, viewed, options) if len(known) > 1 else 0
            heapq.heappush(left, (seconds, cost, number, name, viewed))


def known_for(
    engine: Engine, problem: AnyProblem, options: Options, argument: str = "algo"
) -> dict[str, Method]:
    """Return by name the algorithms for this kind of problem, which must include ``options.algo``. Local."""
    if isinstance(problem, ParallelProblem):
        known = _of_form(tuple(engine.methods), problem.form)
    else:
        known = _serving(engine.methods, problem)
    if not known:
        raise UnsupportedError(f"the {engine.name} engine has no algorithm for a {problem}")
    if options.algo != "auto" and options.algo not in known:
        names = ", ".join(map(repr, ("auto", *known)))
        raise UnsupportedError(
            f"{argument}: the {engine.name} engine has {names} here, got {short_repr(options.algo)}"
        )
    return known


def _serving(methods: Sequence[Method], problem: AnyProblem) -> dict[str, Method]:
    """Return by name the algorithms for this kind of problem; of those with one name the first. Local."""
    known: dict[str, Method] = {}
    for row in methods:
        if row.serves(problem):
            known.setdefault(row.name, row)
    return known


@lru_cache(64)
def _of_form(methods: tuple[Method, ...], form: Form) -> dict[str, Method]:
    """Return by name the algorithms for tensor-parallel products of a form. Local."""
    return _serving(methods, _empty(form))


def _empty(form: Form) -> ParallelProblem:
    none, real = (0,), np.dtype(np.float32)
    return ParallelProblem(form, none, none, none, none, real, real, real)


def _measured(
    engine: Engine, problem: AnyProblem, options: Options, epilogue: str = "", *, alone: bool = False
) -> dict[str, float]:
    """Return by name the seconds that were measured for such a problem on this machine, if any.

    Collective over the context unless ``alone``: they are interpolated by logarithms, which processors round
    differently, and all ranks must take the same algorithm.
    """
    known = engine.measured
    if known is None or not known.entries or options.algo != "auto":
        return {}
    found: dict[str, float] = known.seconds(problem, options, epilogue)
    return found if alone else dict(engine.transport.comm.bcast(found))


def _verdict(
    name: str, best: str | None, options: Options, why: str, measured: Mapping[str, float]
) -> Verdict:
    """Return the verdict on an algorithm if ``best`` is taken."""
    if why:
        return Verdict(applies=False, why=why)
    if name == best:
        reason = "the fastest by rule"
        if options.algo != "auto":
            reason = "requested"
        elif name in measured:
            reason = f"measured on this machine, about {measured[name] * 1e6:.0f} µs"
        return Verdict(applies=True, why=reason, taken=True)
    if options.algo != "auto" or best is None:
        return Verdict(applies=True, why="not requested")
    if best in measured and name in measured:
        return Verdict(applies=True, why=f"slower than {best}: measured, about {measured[name] * 1e6:.0f} µs")
    if best in measured:
        return Verdict(applies=True, why=f"not measured, unlike {best}")
    return Verdict(applies=True, why=f"slower than {best} by rule")


def names(engine: Engine, problem: AnyProblem, options: Options) -> list[str]:
    """Return the names of the algorithms for a kind of problem, the fastest by rule first. Local."""
    known, unfit = known_for(engine, problem, replace(options, algo="auto")), dict[str, str]()
    return [name for name, _ in _cheapest_first(engine, known, problem, options, {}, unfit)] + [*unfit]


def check_parallel(engine: Engine, form: Form, algo: str, argument: str) -> None:
    """Raise UnsupportedError unless ``algo``, the value of ``argument``, exists for a form. Local.

    It may still refuse a particular problem of that form.
    """
    if algo == "measure":
        return
    known_for(engine, _empty(form), Options(algo=algo), argument)


def prepare(engine: Engine, task: Task, operands: Operands) -> tuple[Product, Taken]:
    """Return the prepared product, and how its algorithm was chosen. Collective over the context.

    Raises:
        UnsupportedError: no algorithm can compute it.
    """
    problem, options, nearest, _ = task
    row, viewed, choice = choose(engine, task.computed, options, operands)
    if nearest is None or nearest == problem:
        return row.prepare(engine, viewed, options, operands), choice
    assert isinstance(problem, (MatmulProblem, Level3Problem))
    product = MovedProduct(
        engine, problem, nearest, options, operands, lambda used: row.prepare(engine, viewed, options, used)
    )
    return product, choice


def prepare_step(engine: Engine, problem: AnyProblem, options: Options, operands: Operands) -> Product:
    """Return a product that is a step of another. Collective over the context."""
    return prepare(engine, Task(problem, options), operands)[0]
