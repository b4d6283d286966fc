# SPDX-License-Identifier: Apache-2.0
"""Cholesky factorisation of panels: right-looking, one panel ahead of the update."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...layout import MatrixDescriptor
from ..protocol import Engine, FactorOperations
from .factor_panels import (
    FactorPanels,
    Mover,
    PanelJob,
    Workbench,
    free_place,
    identity,
    operations_of,
    shape_beside,
    shape_of,
    shape_of_inverse,
)
from .sweeps import columns_of, sweep

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
        shape = shape_of(engine, *a.shape)
        shapes = [shape]
        if inverse:
            shapes.append(shape_of_inverse(engine, shape))
        elif b is not None:
            shapes.append(shape_beside(engine, shape, b.shape[1]))
        self._bench = bench = Workbench(engine, shapes, a.dtype)
        self._a = Mover(bench, 0, a, lower=True, conjugate=conjugate)
        self._out = None if out is None else Mover(bench, 0, out, lower=True, conjugate=conjugate)
        self._b = None if b is None else Mover(bench, 1, b)
        self._x = None if x is None else Mover(bench, 1, x, lower=inverse, conjugate=conjugate and inverse)

    def run(self, a: Array, out: Array = None, b: Array = None, x: Array = None) -> int:
        """Compute; return 0, or the order of the first leading minor that is not positive definite."""
        bench, operations = self._bench, self._operations
        place = out if self._out is not None else a if self._factored else None
        place = None if self._a.conjugate else free_place(place, a, b, x)
        places = place, None if self._inverse else free_place(x, b, a, out)
        lower, *right = bench.panels(*places)
        self._a.into(a, lower)
        if self._b is not None:
            self._b.into(b, right[0])
        bench.fence()
        info = 0
        if not self._factored:
            factor(operations, lower)
            bench.fence()
            lower.settle()
            info = bench.fault(lower)
        if right and not info:
            if self._inverse:
                identity(right[0])
            columns = columns_of(right[0], begins=self._inverse)
            sweep(operations, lower, columns, lower=True)
            sweep(operations, lower, columns, lower=True, op="C")
            lower.settle()
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
    if panels.rank >= shape.workers:
        return
    if 0 in panels.mine:
        _finish(operations, panels, 0)
    for k in range(shape.panels):
        panel = panels.fetch(k)
        if panels.info[k]:
            break
        right = _adjoint(panel[k * shape.width :])
        for j in panels.mine:
            if j <= k:
                continue
            (first, stop), top = shape.bounds(j), k * shape.width
            operations.gemm(-1, panel[first:], right[:, first - top : stop - top], 1, panels.own(j)[first:])
            if j == k + 1:
                _finish(operations, panels, j)


def _adjoint(x: Array) -> Array:
    return x.T.conj() if x.dtype.kind == "c" else x.T


def _finish(operations: FactorOperations, panels: FactorPanels, k: int) -> None:
    """Factor panel ``k``, which has been updated, and publish it."""
    first, stop = panels.shape.bounds(k)
    panel = panels.own(k)
    square, below = panel[first:stop], panel[stop:]
    info = operations.potrf(square)
    if info and np.isnan(square[info - 1, info - 1]):  # LAPACK's libraries differ in this
        panel[first:] = np.nan
        info = 0
    if info:
        panels.info[k] = first + info
    elif below.size:
        left = square.conj() if square.dtype.kind == "c" else square
        operations.trsm(1, left, below.T, lower=True, unit=False)
    panels.publish(k)
