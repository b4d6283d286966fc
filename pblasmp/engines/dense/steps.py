# SPDX-License-Identifier: Apache-2.0
"""Routines in steps: products of parts of the operands, or of matrices that are made for the purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...layout import Level3Problem, MatrixDescriptor
from ..arrays import new_part
from ..composite import Composite
from ..method import prepare_step
from ..protocol import Engine
from ..request import Operands, Options, Problem

__all__ = ["ALL", "SteppedProduct", "Window"]

Array = Any
Window = tuple[slice, slice]
ALL: Window = (slice(None), slice(None))


class SteppedProduct(Composite):
    """A routine as products of parts of its operands, which a subclass defines.

    Args:
        engine: where it runs.
        p: the routine.
        options: alpha, beta, compute.
        operands: the local arrays.
    """

    _fences = True

    def __init__(self, engine: Engine, p: Level3Problem, options: Options, operands: Operands) -> None:
        self._p, self._options, self._rank = p, options, engine.transport.rank
        self._layouts = {name: x for name in "abcd" if (x := getattr(p, name)) is not None}
        super().__init__(engine, operands)

    def _step(
        self, operands: Operands, problem: Problem, options: Options, *names: str, window: Window = ALL,
        of: tuple[Window, Window] = (ALL, ALL),
    ) -> None:  # fmt: skip
        """Add a problem as a step: its a, b, c, d by name, "" for none; parts of a and b, and of d. Collective."""
        places = list(zip(names, (*of, window, window), strict=True))

        def takes(given: Operands) -> Operands:
            return Operands(*(self._local(given, name, part) for name, part in places))

        self._add(prepare_step(self._engine, problem, options, takes(operands)), takes)

    def _make(self, name: str, like: MatrixDescriptor) -> MatrixDescriptor:
        """Make a temporary matrix, laid out like another one. Collective over the context."""
        self._layouts[name] = x = replace(like, ld=None)
        self._own[name] = new_part(self._engine, x)
        return x

    def _local(self, operands: Operands, name: str, window: Window) -> Array:
        if not name:
            return None
        array = self._own[name] if name in self._own else getattr(operands, name)
        x = self._layouts[name]
        if window is ALL or self._rank >= x.grid.size:
            return array
        (rows, cols), (p, q) = x.ranges(window), x.grid.coords(self._rank)
        return array[x.rows.local_window(p, *rows), x.cols.local_window(q, *cols)]
