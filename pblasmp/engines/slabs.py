# SPDX-License-Identifier: Apache-2.0
"""Products of slabs, for every layout and on every engine: three algorithms that differ in which ranks share slabs.

The ranks of a *domain* share slabs of the operands; k is taken in *panels*:

- ``shared``: the ranks of a node are a domain and k is one panel. Between nodes the slabs travel in messages.
- ``gathered``: every rank is its own domain and k is one panel.
- ``panels``: every rank is its own domain; while one panel of k is multiplied, the next one is in flight.

An operand that is already where it is needed stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..dtypes import accumulation_dtype
from ..layout import Level3Problem, MatmulProblem, ParallelProblem
from .algorithms import Algorithm
from .arrays import same_memory
from .base import Engine, QueuedProduct
from .finish import Finish, number
from .operand import Operand, Staging
from .options import Operands, Options, Problem
from .slab_terms import Slabs, matmul_slabs, routine_slabs

__all__ = ["ALGORITHMS", "Panels", "SlabProduct", "domains", "memory_refusal"]

Array = Any

_FOLLOWS = 4  # k must be so many times a first panel for one to be worthwhile


def domains(engine: Engine, way: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that share slabs. Local."""
    if way == "shared":
        return engine.transport.nodes
    return tuple((rank,) for rank in range(engine.transport.size))


def cut(k: int, width: int, lead: int = 0, *, backwards: bool = False) -> list[tuple[int, int]]:
    """Return the panels of k of at most ``width`` indices, in order from either end. Local.

    Nothing is multiplied while the first one arrives: it has ``lead`` indices, if that is given and many more follow.
    """
    begun = [(0, lead)] if 0 < _FOLLOWS * lead <= k else []
    panels = begun + [(at, min(at + width, k)) for at in range(lead if begun else 0, k, width)]
    return [(k - stop, k - start) for start, stop in panels] if backwards else panels


def memory_refusal(
    engine: Engine,
    way: str,
    needs: Callable[[], tuple[Sequence[Operand], int]],
    options: Options,
    extra: int = 0,
) -> str:
    """Return why slabs cannot be shared or gathered, or an empty string. Collective over the context.

    Args:
        engine: where it runs.
        way: "shared", "gathered" or "panels".
        needs: returns the operands and the extent of the summation; called only where memory decides.
        options: an algorithm asked for by name is tried even if memory seems too small.
        extra: bytes that a rank needs besides the operands.
    """
    transport = engine.transport
    if way == "shared" and transport.why_not_shared:
        return transport.why_not_shared
    if options.algo != "auto" or way == "panels":
        return ""
    operands, k = needs()
    moved = [x for x in operands if not x.in_place]
    if not moved and not extra:
        return "" if way == "gathered" else "all operands are multiplied in place: there is nothing to share"
    if way == "shared":
        nbytes = max(
            sum(x.memory_bytes(node, k) for x in moved) + extra * len(node) for node in transport.nodes
        )
        what = "a shared copy of the operands"
    else:
        nbytes = max(
            sum(x.memory_bytes([rank], k) for x in moved for rank in node) + extra * len(node)
            for node in transport.nodes
        )
        what = "gathered operands"
    enough, limit = transport.fits(nbytes)
    return "" if enough else f"{what} would need {nbytes} bytes per node, only {limit} available"


class Panels:
    """Operands that arrive in slabs, panel by panel, with two panels in memory if there are several. Collective.

    Args:
        engine: where it runs.
        way: "shared", "gathered" or "panels".
        operands: the operands that arrive.
        k: the extent that is cut into panels.
        backwards: the last panel comes first.
        lead: indices in the first panel; 0: as many as in the others.

    Attributes:
        panels: (start, stop) of each.
        sent_bytes, copied_bytes: bytes that this rank sends and copies for all panels.
        nbytes: memory of the slabs on this rank.
        fenced: whether the ranks of a node wait for each other before they use a panel.
    """

    def __init__(
        self,
        engine: Engine,
        way: str,
        operands: Sequence[Operand],
        k: int,
        *,
        backwards: bool = False,
        lead: int = 0,
    ) -> None:
        self._engine, self._operands, self._shared = engine, operands, way == "shared"
        in_panels = way == "panels"
        width = engine.operations.panel if in_panels else max(1, k)
        self.panels = cut(k, width, lead if in_panels else 0, backwards=backwards)
        groups = domains(engine, way)
        domain = next(ranks for ranks in groups if engine.transport.rank in ranks)
        in_place = [x.in_place for x in operands]
        self._stagings: list[list[Staging | None]] = [
            [None if still else Staging(engine, x, groups, *panel) for panel in self.panels]
            for x, still in zip(operands, in_place, strict=True)
        ]
        made = [s for stagings in self._stagings for s in stagings if s is not None]
        self.sent_bytes = sum(s.sent_bytes for s in made)
        self.copied_bytes = sum(s.copied_bytes for s in made)
        # Whether the ranks wait for each other after writing slabs: the same on every rank, even an idle one.
        self.fenced = self._shared and not all(in_place)
        widths = [stop - start for start, stop in self.panels]
        self._bytes = [  # of the two halves
            [
                0 if still else x.memory_bytes(domain, max(widths[half::2], default=0))
                for x, still in zip(operands, in_place, strict=True)
            ]
            for half in range(2)
        ]
        self.nbytes = sum(map(sum, self._bytes)) if made else 0
        self.nbytes += sum(  # of the two panels that are under way at once
            sum(sorted(s.message_bytes for s in stagings if s is not None)[-2:])
            for stagings in self._stagings
        )
        if not engine.agrees:  # the ranks agree now, but not in a run
            for i in range(min(2, len(self.panels))):
                for which, stagings in enumerate(self._stagings):
                    if stagings[i] is not None:
                        self._buffer(which, i)

    def _buffer(self, which: int, i: int) -> Array:
        """Return the memory of an operand's slabs of panel ``i``."""
        name = f"{'abcd'[which]}{i % 2}"
        return self._engine.transport.buffer(name, self._bytes[i % 2][which], shared=self._shared)

    def arrive(self, arrays: dict[str, Array]) -> Iterator[tuple[int, int, list[Array | dict[int, Array]]]]:
        """Yield (start, stop, operands) of each panel when it is there. Collective over the ranks.

        An operand is its slabs by process, each as outer × k, or this rank's own array if it stays in place. The ranks
        have agreed since the last run, so that no rank still multiplies what is overwritten here.
        """
        coming = self._start(0, arrays) if self.panels else []
        for i, (start, stop) in enumerate(self.panels):
            following = self._start(i + 1, arrays) if i + 1 < len(self.panels) else []
            slabs = [self._arrived(part) for part in coming]
            coming = following
            if self.fenced:
                self._engine.transport.fence()  # wait until every slab of the node has been written
            yield (
                start,
                stop,
                [
                    x.local(arrays[x.source])[:, start:stop] if slab is None else slab
                    for x, slab in zip(self._operands, slabs, strict=True)
                ],
            )

    def _start(self, i: int, arrays: dict[str, Array]) -> list[Any]:
        """Start moving panel ``i``; panels alternate between two halves of the buffers."""
        parts: list[Any] = []
        for which, (x, stagings) in enumerate(zip(self._operands, self._stagings, strict=True)):
            staging = stagings[i]
            if staging is None:
                parts.append(None)
                continue
            memory = self._buffer(which, i)
            parts.append(staging.start(arrays[x.source], memory, ahead=len(self.panels) > 1))
        return parts

    @staticmethod
    def _arrived(part: Any) -> dict[int, Array] | None:
        """Return the slabs of an operand by process, None for one that stays in place."""
        if part is None:
            return None
        transfer, slabs = part
        transfer.finish()
        found: dict[int, Array] = slabs
        return found


class SlabProduct(QueuedProduct):
    """D computed from slabs of the operands. Making and running one is collective over the ranks.

    Args:
        engine: where it runs.
        slabs: D as a sum of products of slabs.
        options: beta, and the type in which products are summed.
        way: "shared", "gathered" or "panels".
        operands: the planned ones.
        finish: what follows, or None.
    """

    def __init__(
        self,
        engine: Engine,
        slabs: Slabs,
        options: Options,
        way: str,
        operands: Operands,
        finish: Finish | None = None,
    ) -> None:
        self.path, self._way = way, way
        operations, rank, d = engine.operations, engine.transport.rank, slabs.d
        self._slabs, self._options, self._engine, self._finish = slabs, options, engine, finish
        self._coords = d.grid.coords(rank) if rank < d.grid.size else None
        active = any(term.alpha != 0 for term in slabs.terms)
        self._panels = Panels(
            engine,
            way,
            slabs.operands,
            slabs.k if active else 0,
            backwards=slabs.backwards,
            lead=operations.lead,
        )
        self.sent_bytes, self.copied_bytes = self._panels.sent_bytes, self._panels.copied_bytes
        if all(x.in_place for x in slabs.operands):
            self.notes += ("all operands are multiplied in place",)
        if len(self._panels.panels) > 1:
            self.notes += (f"k is taken in {len(self._panels.panels)} panels",)
        # The sum is made in a temporary if its type differs, or if D is B, which is read to the end.
        exact = accumulation_dtype(d.dtype)
        several = len(self._panels.panels) * len(slabs.terms) > 1
        self._rounds = exact != d.dtype and (several or finish is not None or not operations.writes(d.dtype))
        self._late = slabs.in_place and (len(self._panels.panels) > 1 or slabs.operands[-1].in_place)
        temporary = self._temporary(operands)
        self._replays = finish is None
        scratch = 0
        if temporary and self._coords is not None:
            scratch = math.prod(d.local_shape(rank)) * exact.itemsize
        self.workspace = operations.workspace(scratch + self._panels.nbytes)

    def _queue(self, operands: Operands) -> None:
        target = self._target(operands)
        seen = target.T if self._slabs.turned else target
        c = None if self._options.beta == 0 or operands.c is target else operands.c
        if c is not None and self._slabs.turned:
            c = c.T
        first = True
        unit = 1.0
        if self._finish is not None and operands.scales is not None:
            unit = number(operands.scales.a) * number(operands.scales.b)
        for start, _, slabs in self._panels.arrive({"a": operands.a, "b": operands.b}):
            if self._coords is not None:
                self._multiply(slabs, unit, first, seen, start, c if first else None)
            first = False
        if first and self._coords is not None:
            xp = self._engine.xp
            nothing = [xp.empty((extent, 0), seen.dtype) for extent in seen.shape]
            self._slabs.terms[0].multiply(
                self._engine.operations, 0, nothing[0], nothing[1].T, self._options.beta, seen, 0, None, c
            )
        if self._finish is not None:
            self._finish(target, operands)
        if target is not operands.d:
            self._engine.operations.store(operands.d, target, self._slabs.d.dtype)

    def _multiply(
        self, slabs: Sequence[Any], unit: float, first: bool, target: Array, start: int, c: Array | None
    ) -> None:
        assert self._coords is not None
        operations, options = self._engine.operations, self._options
        for i, term in enumerate(self._slabs.terms):
            left, right = (
                self._factor(which, slabs[which], process)
                for which, process in zip((term.left, term.right), self._coords, strict=True)
            )
            beta = options.beta if first and i == 0 else 1
            old = c if i == 0 else None
            term.multiply(
                operations, unit * term.alpha, left, right.T, beta, target, start, options.compute, old
            )

    def _factor(self, which: int, slab: Any, process: int) -> Array:
        """Return a slab in a type that can be multiplied."""
        found = slab[process] if isinstance(slab, dict) else slab
        return self._engine.operations.operand(found, self._slabs.operands[which].dtype, f"slab{which}")

    def _temporary(self, operands: Operands) -> bool:
        """Return whether the sum is made in a temporary. Local."""
        b, d = operands.b, operands.d
        return self._rounds or (self._late and b is not None and same_memory(b, d))

    def _target(self, operands: Operands) -> Array:
        """Return the array that the product is summed in."""
        if not self._temporary(operands):
            return operands.d
        slabs = self._slabs
        order: Any = "C" if (slabs.d.order == "C") != slabs.turned else "F"
        exact = accumulation_dtype(slabs.d.dtype)
        return self._engine.operations.scratch("sum", operands.d.shape, exact, order)


# -- the rows of the registry


def _view(problem: Problem) -> Problem | str:
    """Return a problem that slabs can compute, or why it is not one."""
    return problem.as_gemm() if isinstance(problem, ParallelProblem) else problem


def _serves(problem: Problem) -> bool:
    if isinstance(problem, Level3Problem):
        return problem.traits.shape != "added" and not problem.traits.solves
    if isinstance(problem, MatmulProblem):
        return problem.scheme != "ar"  # in that scheme every rank gets all of the result
    return problem.form in ("allgather_matmul", "matmul_reduce_scatter")


def _slabs(engine: Engine, problem: Problem, options: Options) -> Slabs:
    if isinstance(problem, MatmulProblem):
        return matmul_slabs(problem, options.alpha, engine)
    assert isinstance(problem, Level3Problem)
    return routine_slabs(problem, options.alpha, engine)


def _panels_cost(engine: Engine, p: Problem, options: Options) -> float:  # noqa: ARG001
    """Return more than the cost of gathering, or a little less if most of a long k arrives after a first panel."""
    if isinstance(p, Level3Problem) and (p.traits.shape == "updated" or p.traits.triangular):
        return 2.9 if 0 < _FOLLOWS * engine.operations.lead <= p.k else 4.0
    return 4.0


def _row(way: str, cost: Callable[[Engine, Any, Options], float]) -> Algorithm:
    def refusal(engine: Engine, problem: Any, options: Options, operands: Operands | None) -> str:
        why = type_refusal(engine, problem, options, operands)
        if why:
            return why

        def needs() -> tuple[Sequence[Operand], int]:
            slabs = _slabs(engine, problem, options)
            return slabs.operands, slabs.k

        return memory_refusal(engine, way, needs, options)

    def prepare(engine: Engine, problem: Any, options: Options, operands: Operands) -> SlabProduct:
        finish = None
        if isinstance(problem, MatmulProblem) and Finish.needed(problem, operands):
            finish = Finish(engine, problem)
        return SlabProduct(engine, _slabs(engine, problem, options), options, way, operands, finish)

    return Algorithm(way, prepare, _serves, _view, refusal, cost)


def type_refusal(engine: Engine, problem: Any, options: Options, operands: Operands | None) -> str:
    """Return why an engine's operations cannot compute these types in this way, or an empty string. Local."""
    d = problem.d.dtype
    if isinstance(problem, Level3Problem) and d.itemsize < 4:
        return f"{problem.routine} is for float32, float64, complex64 and complex128, got {d.name}"
    operations = engine.operations
    if operands is not None and operands.scales is not None and operands.scales.mode != "tensor":
        return f"scales of mode {operands.scales.mode!r} are for cuBLASMp on Blackwell GPUs"
    if operands is not None and operands.epilogue is not None and operands.epilogue.fused:
        return "its epilogue runs after the product, but fused=True asks for a fused one"
    return operations.refusal(problem.a.dtype, options.compute)


ALGORITHMS = (
    _row("shared", lambda *_: 2.0),
    _row("gathered", lambda *_: 3.0),
    _row("panels", _panels_cost),
)
"""Relative costs: each is slower than the one before by about a copy of the operands."""
