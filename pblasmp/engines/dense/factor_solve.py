# SPDX-License-Identifier: Apache-2.0
"""What a factorisation and a solve with its factors have in common: panels, and moves into and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ...layout import MatrixDescriptor
from ..protocol import Engine
from .factor_panels import FactorPanels, Mover, Workbench
from .panel_shape import shape_beside, shape_of, shape_of_inverse

__all__ = ["FactorSolveJob"]

Array = Any


class FactorSolveJob:
    """A factorisation, a solve with the factors, or both. Making one is collective over the context.

    Args:
        engine: where.
        a: the layout of A, or of its factors.
        out: the layout of the factors; None if they are not wanted, or A is factored already.
        b: the layout of right-hand sides; None without them.
        x: the layout of solutions, or of the inverse; None without them.
        factored: A is factored already.
        inverse: the right-hand sides are the identity. Of an inverse with ``lower`` the other triangle is that of a
            Hermitian matrix, but if ``factored`` it is not written.
        conjugate: the panels hold the conjugates of A, of its factors and of the inverse.

    Attributes:
        lower: of these only the lower triangles count.
        routine: what ``FactorProblem`` calls it.
    """

    routine: ClassVar[str]
    lower: ClassVar[bool] = False

    def __init__(
        self,
        engine: Engine,
        a: MatrixDescriptor,
        out: MatrixDescriptor | None = None,
        b: MatrixDescriptor | None = None,
        x: MatrixDescriptor | None = None,
        *,
        factored: bool = False,
        inverse: bool = False,
        conjugate: bool = False,
    ) -> None:
        lower = self.lower
        self._operations, self._factored, self._inverse = engine.operations, factored, inverse
        alone = b is None and x is None  # a solve on GPUs needs panels that ranks have whole
        shape = shape_of(engine, a if out is None else out, self.routine, shared=lower and alone)
        shapes = [shape]
        if inverse:
            shapes.append(shape_of_inverse(engine, shape))
        elif b is not None:
            shapes.append(shape_beside(engine, shape, b.shape[1], spreads=True))
        self._bench = bench = Workbench(engine, shapes, a.dtype)
        self._a = Mover(bench, 0, a, lower=lower, conjugate=conjugate)
        self._out = None if out is None else Mover(bench, 0, out, lower=lower, conjugate=conjugate)
        self._b = None if b is None else Mover(bench, 1, b)
        self._part_of_x = lower and inverse
        self._x: Mover | None = None
        self._mirrored: Mover | None = None
        if x is not None:
            conjugate = conjugate and inverse
            self._x = Mover(bench, 1, x, lower=self._part_of_x, conjugate=conjugate)
            if self._part_of_x and not factored:
                self._mirrored = Mover(bench, 1, x.T, lower=True, strictly=True, conjugate=not conjugate)

    def _moved_in(self, a: Array, out: Array, b: Array, x: Array) -> list[FactorPanels]:
        """Return the panels of A, and of right-hand sides if there are any. Collective; a fence must follow."""
        place = beside = None
        if self._out is not None:
            place = self._out.place(out, a, b, x)
        elif self._factored:
            place = self._a.place(a, a, b, x)
        if self._x is not None and not self._part_of_x:
            beside = self._x.place(x, b, a, out)
        panels = self._bench.panels(place, beside)
        self._a.into(a, panels[0])
        if self._b is not None:
            self._b.into(b, panels[1])
        return panels

    def _move_out(self, panels: Sequence[FactorPanels], out: Array, x: Array, *, solved: bool) -> None:
        """Move the factors out of panels, and the solutions if there are any. Collective; after a fence."""
        if self._out is not None:
            self._out.back(out, panels[0])
        if self._x is not None and solved:
            self._x.back(x, panels[1])
            if self._mirrored is not None:
                self._mirrored.back(x.T, panels[1])
