# SPDX-License-Identifier: Apache-2.0
"""Products in terms of what every engine supplies, and products that consist of others.

The others compute on parts of the operands, on copies in other layouts, or on matrices that are made for the purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from ..comm import Side
from ..comm.exchange import SLOTS
from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor
from ..layout.pieces import LocalPart, Trapezoid
from .arrays import new_part
from .product import Bound, Graphs, Product, Workspace
from .protocol import Engine
from .request import Operands, Options

Array = Any
Takes = Callable[[Operands], Operands]


class QueuedProduct(Product):
    """A product in terms of an engine's operations and transport; recordable on GPUs, where these only queue work.

    It ``replays`` if it keeps no large temporaries and reads nothing on the host.
    """

    _engine: Engine
    replays = True
    allocates = True

    @property
    def queues(self) -> bool:
        """Whether a run only queues work: on GPUs, if it reads nothing on the host."""
        return self.replays and self._engine.traits.queues

    @cached_property
    def graphs(self) -> Graphs | None:
        return self._engine.graphs()


class Composite(QueuedProduct):
    """Other products one after the other. Making, running and closing one is collective over the context.

    On GPUs its steps replay graphs, if they can; as a whole it is recorded only when that is asked for.

    Args:
        operands: the planned local arrays.
    """

    replays = False
    _fences = False  # whether a step writes buffers that other ranks read in the step before

    def __init__(self, engine: Engine, operands: Operands) -> None:
        self._engine = engine
        self._own: dict[str, Array] = {}
        self._steps: list[tuple[Product, Takes] | Callable[[Operands], None]] = []
        self._products: list[Product] = []
        self._closing = ExitStack()
        try:
            self._add_steps(operands)
        except BaseException:
            self._closing.close()
            raise
        needs = [each.workspace for each in self._products]
        own = sum(array.nbytes for array in self._own.values())
        all_, base = (engine.operations.workspace(nbytes) for nbytes in (own, 0))
        self.workspace = Workspace(
            max((each.device_bytes for each in needs), default=0) + all_.device_bytes - base.device_bytes,
            max((each.host_bytes for each in needs), default=0) + all_.host_bytes - base.host_bytes,
        )
        self.sent_bytes = sum(each.sent_bytes for each in self._products)
        self.copied_bytes = sum(each.copied_bytes for each in self._products)

    def _add_steps(self, operands: Operands) -> None:
        """Add every step, in order: ``_add`` or ``_then``. Collective over the context."""
        raise NotImplementedError

    def _add(self, product: Product, takes: Takes) -> None:
        """Add a product, which is closed with this one, and what it takes of the operands. Local."""
        self._closing.callback(product.close)
        self._products.append(product)
        self._steps.append((product, takes))

    def _then(self, action: Callable[[Operands], None]) -> None:
        """Add what this rank does by itself. Local."""
        self._steps.append(action)

    @property
    def queues(self) -> bool:
        """Whether a run only queues work: if every step does."""
        return self._engine.traits.queues and all(each.queues for each in self._products)

    def why_no_graph(self) -> str:
        """Return why it, or a step, cannot be recorded as a CUDA graph, or an empty string. Local."""
        return super().why_no_graph() or next(filter(None, (x.why_no_graph() for x in self._products)), "")

    def bind(self, operands: Operands) -> Bound:
        return _BoundSteps(self, operands)

    def close(self) -> None:
        super().close()
        self._steps.clear()
        self._own.clear()
        self._closing.close()


class _BoundSteps(Bound):
    """A composite whose steps are bound, too: each replays its own graph."""

    def __init__(self, product: Composite, operands: Operands) -> None:
        super().__init__(product, operands)
        fence = product._engine.transport.fence
        self._runs: list[Callable[[], None]] = []
        self._bound: list[Bound] = []
        for step in product._steps:
            if callable(step):
                self._runs.append(partial(step, operands))
                continue
            each, takes = step
            bound = each.bind(takes(operands))
            self._bound.append(bound)
            self._runs.append(bound.run)
            if product._fences:
                self._runs.append(fence)

    def _queue(self) -> None:
        for run in self._runs:
            run()

    def release(self) -> None:
        super().release()
        self._runs.clear()
        for bound in self._bound:
            bound.release()


class WrappedProduct(Composite):
    """One product, and what is done before and after it."""

    _product: Product

    @property
    def path(self) -> str:  # type: ignore[override]
        """The path of the product."""
        return self._product.path

    def misfit(self, name: str, array: Array) -> str:
        return self._product.misfit(name, array)


class MovedProduct(WrappedProduct):
    """A product of operands copied to other layouts first; its result is copied back.

    Args:
        asked: the caller's problem.
        nearest: the problem in the layouts that operands are moved to.
        options: says which operands are read.
        prepare: prepares ``nearest`` for given operands.
        reasons: why they are moved.
    """

    holds_memory = True

    def __init__(
        self,
        engine: Engine,
        asked: MatmulProblem | Level3Problem,
        nearest: MatmulProblem | Level3Problem,
        options: Options,
        operands: Operands,
        prepare: Callable[[Operands], Product],
        reasons: tuple[str, ...] = (),
    ) -> None:
        self._asked, self._nearest, self._reasons, self._prepare = asked, nearest, reasons, prepare
        self._read = _read(nearest, options, operands)
        self._moves: dict[str, Product] = {}  # of operands
        super().__init__(engine, operands)

    def _add_steps(self, operands: Operands) -> None:
        engine, back = self._engine, None
        for name in "abcd":
            old, new = getattr(self._asked, name), getattr(self._nearest, name)
            if new is None or old == new:
                continue
            given, copy = getattr(operands, name), new_part(engine, new)
            self._own[name] = copy
            if name in self._read:
                move = self._moves[name] = engine.prepare_move(old, new, (given, copy))
                self._add(move, partial(self._to_copy, name))
                self.moved += (f"{name} is moved to {new}, {move.path}",)
            if name == "d":
                back = engine.prepare_move(new, old, (copy, given))
                self._closing.callback(back.close)
                self.moved += (f"d is moved back after the computation as {new}, {back.path}",)
        self._product = self._prepare(self._copies(operands))
        self._add(self._product, self._copies)
        if back is not None:
            self._products.append(back)
            self._steps.append((back, self._from_copy))

    def _to_copy(self, name: str, operands: Operands) -> Operands:
        return Operands(getattr(operands, name), None, None, self._own[name])

    def _from_copy(self, operands: Operands) -> Operands:
        return Operands(self._own["d"], None, None, operands.d)

    def _copies(self, operands: Operands) -> Operands:
        """Return the operands of the product: copies replace those that are moved."""
        return replace(operands, **self._own)

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Why operands are moved, and the notes of the product."""
        return self._reasons + self._product.notes

    def misfit(self, name: str, array: Array) -> str:
        if name in self._moves:
            return self._moves[name].misfit("a", array)
        return super().misfit(name, array)


def _read(problem: MatmulProblem | Level3Problem, options: Options, operands: Operands) -> set[str]:
    """Return the operands whose values are read."""
    e = operands.epilogue
    sums = e is not None and {"bias_grad_a", "bias_grad_b"} & {*e.given}
    read = {"a", "b"} if options.alpha != 0 or sums else set()
    if options.beta != 0:
        read.add("c")
    if isinstance(problem, Level3Problem) and problem.written is not None:
        read.add("d")  # elements that are not written are moved back unchanged
    return read


class ExchangeMove(QueuedProduct):
    """A move of ``a`` to ``d``, converting the element type on arrival. Making one is local.

    Args:
        source, target: the layouts before and after.
        part: what is moved; None: everything.
        path: its name in reports.
    """

    def __init__(
        self,
        engine: Engine,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        part: Trapezoid | None = None,
        path: str = "by MPI",
    ) -> None:
        self.path = path
        self._engine, rank = engine, engine.transport.rank
        self._whole = self.replays = part is None  # what arrives of a part is in a temporary
        self.one_stream = engine.transport.one_stream
        same = source.dtype == target.dtype and source.order == target.order
        self._stays = not self._whole and same and source.same_places(target)
        self._part: LocalPart | None = None  # this rank's elements of it
        if part is not None and rank < target.grid.size:
            self._part = LocalPart(part, *target.global_indices(rank))
        self._exchange = engine.transport.exchange(Side.of(source), Side.of(target), source.dtype)
        self.sent_bytes, self.copied_bytes = self._exchange.sent_bytes, self._exchange.copied_bytes

    def _queue(self, operands: Operands) -> None:
        engine, rank, source, target = self._engine, self._engine.transport.rank, operands.a, operands.d
        arriving = target if self._whole else source if self._stays else engine.xp.empty_like(target)
        if not self._stays:
            moved = {rank: source}, {rank: arriving}
            engine.transport.start_exchange(self._exchange, *moved, slots=SLOTS).finish()
        if self._part is not None:
            engine.operations.add(target, 1, arriving, 0, target, self._part, conjugate=False)
