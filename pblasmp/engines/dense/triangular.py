# SPDX-License-Identifier: Apache-2.0
"""Solves with a triangular matrix in panels, and its inverse."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...layout import MatrixDescriptor
from ..protocol import Engine
from .factor_panels import Mover, Workbench
from .panel_shape import shape_beside, shape_of, shape_of_inverse
from .sweeps import sides_of

__all__ = ["TriangularJob"]

Array = Any


class TriangularJob:
    """A solve with a lower triangular matrix. Making and running one is collective over the context.

    Args:
        engine: where.
        a: the layout of the triangle.
        b: the layout of right-hand sides; None: the inverse is computed.
        x: the layout of solutions, or of the inverse.
        unit: the diagonal is taken as ones and not read.
        part: of the inverse only the triangle is written, without a diagonal of ones.
        op: "N", "T" or "C".
        conjugate: the panels hold the conjugate of A.
    """

    def __init__(
        self,
        engine: Engine,
        a: MatrixDescriptor,
        b: MatrixDescriptor | None,
        x: MatrixDescriptor,
        *,
        unit: bool = False,
        part: bool = False,
        op: str = "N",
        conjugate: bool = False,
    ) -> None:
        self._operations, self._unit, self._op = engine.operations, unit, op
        shape = shape_of(engine, a, "triangular")
        beside = shape_of_inverse(engine, shape) if b is None else shape_beside(engine, shape, b.shape[1])
        self._bench = bench = Workbench(engine, [shape, beside], a.dtype)
        self._a = Mover(bench, 0, a, lower=True, conjugate=conjugate)
        self._b = None if b is None else Mover(bench, 1, b)
        self._x = Mover(bench, 1, x, lower=part, strictly=part and unit)

    def run(self, a: Array, b: Array, x: Array) -> int:
        """Compute; return 0, or the index from 1 of the first diagonal element that is exactly zero."""
        bench = self._bench
        panels, right = bench.panels(None, None if self._b is None else self._x.place(x, b, a))
        self._a.into(a, panels)
        if self._b is not None:
            self._b.into(b, right)
        else:
            right.set_identity(self._operations.xp)
        bench.fence()
        if not self._unit:
            zeros = np.flatnonzero(bench.diagonal(panels) == 0)
            if zeros.size:
                return int(zeros[0]) + 1
        sides = sides_of(bench, panels, right, begins=self._b is None)
        sides.sweep(lower=True, unit=self._unit, op=self._op)
        sides.finish()
        bench.fence()
        self._x.back(x, right)
        return 0
