# SPDX-License-Identifier: Apache-2.0
"""Cholesky factorisation of panels: right-looking, one panel ahead of the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...layout import MatrixDescriptor
from ..protocol import Engine, FactorOperations
from .factor_panels import FactorPanels, Mover, PanelJob, Workbench, identity
from .lapack import operations_of
from .panel_shape import shape_beside, shape_of, shape_of_inverse
from .right_looking import right_looking
from .sweeps import sides_of

__all__ = ["CholeskyJob"]

Array = Any


class CholeskyJob(PanelJob):
    """A Cholesky factorisation, a solve with its factor, or both. Making and running one is collective.

    Collective over the context.

    Args:
        engine: where.
        a: the layout of A, of which the lower triangle counts, or of the factor.
        out: the layout of the factor; None if it is not wanted, or A is factored already.
        b, x: the layouts of right-hand sides and solutions; None if there are none.
        factored: A is L.
        inverse: the right-hand sides are the identity; X, the inverse, has a lower triangle, too.
        conjugate: the panels hold the conjugates of A and L.
    """

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
        self._operations, self._factored, self._inverse = operations_of(engine), factored, inverse
        shape = shape_of(engine, a)
        shapes = [shape]
        if inverse:
            shapes.append(shape_of_inverse(engine, shape))
        elif b is not None:
            shapes.append(shape_beside(engine, shape, b.shape[1], spreads=True))
        self._bench = bench = Workbench(engine, shapes, a.dtype)
        self._a = Mover(bench, 0, a, lower=True, conjugate=conjugate)
        self._out = None if out is None else Mover(bench, 0, out, lower=True, conjugate=conjugate)
        self._b = None if b is None else Mover(bench, 1, b)
        self._x = None if x is None else Mover(bench, 1, x, lower=inverse, conjugate=conjugate and inverse)

    def _places(self, a: Array, out: Array, b: Array, x: Array) -> tuple[Array, Array]:
        """Return the arrays that may be computed in, None for those that must not."""
        place = None
        if self._out is not None:
            place = self._out.place(out, a, b, x)
        elif self._factored:
            place = self._a.place(a, a, b, x)
        return place, None if self._x is None or self._inverse else self._x.place(x, b, a, out)

    def run(self, a: Array, out: Array = None, b: Array = None, x: Array = None) -> int:
        """Compute; return 0, or the order of the first leading minor that is not positive definite."""
        bench, operations = self._bench, self._operations
        lower, *right = bench.panels(*self._places(a, out, b, x))
        self._a.into(a, lower)
        if self._b is not None:
            self._b.into(b, right[0])
        bench.fence()
        info = 0
        if not self._factored:
            with lower.above_kept():  # updates are of whole squares
                factor(operations, lower)
                bench.fence()
                lower.settle()
            info = bench.fault(lower)
        if right and not info:
            if self._inverse:
                identity(operations.xp, right[0])
            sides = sides_of(bench, lower, right[0], begins=self._inverse)
            sides.sweep(lower=True)
            sides.sweep(lower=True, op="C")
            sides.finish()
            bench.fence()
        if self._out is not None:
            self._out.back(out, lower)
        if self._x is not None and not info:
            self._x.back(x, right[0])
        return info


def factor(operations: FactorOperations, panels: FactorPanels) -> None:
    """Replace the lower triangle of a matrix in panels by L with A = L L^H. Collective over the workers.

    If it is not positive definite, ``panels.info`` of the first panel that shows it is the order of the leading minor
    that is not positive, and the work ends there.
    """
    shape = panels.shape

    def finish(k: int) -> None:
        first = shape.bounds(k)[0]
        operations.potrf(panels.own(k)[first:], panels.info[k : k + 1], first)

    def update(k: int, panel: Array, group: Sequence[int]) -> None:
        top = k * shape.width
        for j in group:
            first, stop = shape.bounds(j)
            right = _adjoint(panel[first - top : stop - top])
            operations.gemm(-1, panel[first - top :], right, 1, panels.own(j)[first:])

    right_looking(panels, shape.panels, finish, update, ends_at_fault=True)


def _adjoint(x: Array) -> Array:
    return x.T.conj() if x.dtype.kind == "c" else x.T
