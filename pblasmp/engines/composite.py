# SPDX-License-Identifier: Apache-2.0
"""Products in steps, each a product of parts of the operands, or of matrices that are made for the purpose."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ..layout import Level3Problem, MatrixDescriptor
from .arrays import new_part
from .product import Product, QueuedProduct
from .protocol import Engine, Workspace
from .request import Operands, Options, Problem

__all__ = ["ALL", "Prepare", "SteppedProduct", "Window"]

Array = Any
Prepare = Callable[[Engine, Problem, Options, Operands], Product]
Window = tuple[slice, slice]
ALL: Window = (slice(None), slice(None))


class SteppedProduct(QueuedProduct):
    """A routine in steps that a subclass defines. Making, running and closing one is collective over the context.

    Args:
        engine: where it runs.
        prepare: prepares a step.
        p: the routine.
        options: alpha, beta, compute.
        operands: the local arrays.
    """

    _replays = False  # not as a whole: its steps do

    def __init__(
        self, engine: Engine, prepare: Prepare, p: Level3Problem, options: Options, operands: Operands
    ) -> None:
        self._engine, self._p, self._options, self._rank = engine, p, options, engine.transport.rank
        self._layouts = {name: x for name in "abcd" if (x := getattr(p, name)) is not None}
        self._own: dict[str, Array] = {}
        self._products: list[Product] = []
        self._steps: list[Callable[[Operands], None]] = []
        with ExitStack() as closing:

            def add(
                problem: Problem, options: Options, *names: str, window: Window = ALL, of: Any = (ALL, ALL)
            ) -> None:
                """Prepare a step: its a, b, c and d by name, "" for none; parts of a and b, and of d."""
                places = [(name, part) for name, part in zip(names, (*of, window, window), strict=True)]
                product = prepare(engine, problem, options, self._used(operands, places))
                closing.callback(product.close)
                self._products.append(product)
                self._steps.append(_Step(product, lambda given: self._used(given, places)))

            self._add_steps(add)
            self._closing = closing.pop_all()
        own = sum(array.nbytes for array in self._own.values())
        on_device = engine.device is not None
        self.workspace = Workspace(
            max((each.workspace.device_bytes for each in self._products), default=0) + own * on_device,
            max((each.workspace.host_bytes for each in self._products), default=0) + own * (not on_device),
        )
        self.sent_bytes = sum(each.sent_bytes for each in self._products)
        self.copied_bytes = sum(each.copied_bytes for each in self._products)

    def _add_steps(self, add: Callable[..., None]) -> None:
        """Add every step, in order. Collective over the context."""
        raise NotImplementedError

    def _make(self, name: str, like: MatrixDescriptor) -> MatrixDescriptor:
        """Make a temporary matrix, laid out like another one. Collective over the context."""
        self._layouts[name] = x = replace(like, ld=None)
        self._own[name] = new_part(self._engine, x)
        return x

    def _used(self, operands: Operands, places: list[tuple[str, Window]]) -> Operands:
        """Return the operands of a step. Local."""
        return Operands(*(self._local(operands, name, window) for name, window in places))

    def _local(self, operands: Operands, name: str, window: Window) -> Array:
        if not name:
            return None
        array = self._own[name] if name in self._own else getattr(operands, name)
        x = self._layouts[name]
        if window is ALL or self._rank >= x.grid.size:
            return array
        (rows, cols), (p, q) = x.ranges(window), x.grid.coords(self._rank)
        return array[x.rows.local_window(p, *rows), x.cols.local_window(q, *cols)]

    @property
    def queues(self) -> bool:
        """Whether a run only queues work: on GPUs."""
        return not self._engine.agrees

    def _queue(self, operands: Operands) -> None:
        for step in self._steps:
            step(operands)
            self._engine.transport.fence()  # the next step writes buffers that ranks read in this one

    def close(self) -> None:
        """Free what the steps hold. Collective over the context."""
        super().close()
        self._steps.clear()
        self._own.clear()
        self._closing.close()


class _Step:
    """A step, with its operands: the same objects in every run, since CUDA graphs belong to them."""

    def __init__(self, product: Product, used: Callable[[Operands], Operands]) -> None:
        self._product, self._find = product, used
        self._given: weakref.ref[Operands] | None = None
        self._used: Operands | None = None

    def __call__(self, given: Operands) -> None:
        if self._used is None or self._given is None or self._given() is not given:
            self._used, self._given = self._find(given), weakref.ref(given, self._forget)
        self._product.run(self._used)

    def _forget(self, reference: weakref.ref[Operands]) -> None:
        if self._given is reference:
            self._used = self._given = None
