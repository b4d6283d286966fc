# SPDX-License-Identifier: Apache-2.0
"""An estimate of a condition number from a few solves with LU factors.

Source: N. J. Higham, FORTRAN codes for estimating the one-norm of a real or complex matrix, ACM TOMS 14 (1988); LAPACK,
?LACN2.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import numpy as np

from ...comm import largest_size
from ...layout import MatrixDescriptor
from ..local.extremes import largest, scaling
from ..protocol import Engine
from .elimination import factor_lu
from .factor_panels import FactorPanels, Mover, Workbench
from .panel_shape import shape_beside, shape_of
from .sweeps import sides_of

__all__ = ["ConditionJob"]

Array = Any

_MOST = 5  # iterations: more hardly ever improve the estimate


class ConditionJob:
    """An estimate of the condition number in the 1-norm. Making and running one is collective over the context.

    Args:
        engine: where.
        a: the layout of a square matrix.
    """

    def __init__(self, engine: Engine, a: MatrixDescriptor) -> None:
        self._operations, self._engine = engine.operations, engine
        shape = shape_of(engine, a, "condition")
        self._bench = Workbench(engine, [shape, shape_beside(engine, shape, 1)], a.dtype)
        self._a, self._n, self._dtype = Mover(self._bench, 0, a), a.shape[0], a.dtype

    def run(self, a: Array) -> float:
        """Return the estimate, which is a lower bound; infinite if A is singular, or nearly so."""
        bench, operations = self._bench, self._operations
        panels, right = bench.panels()
        self._a.into(a, panels)
        bench.fence()
        self._scale(panels)
        (size,) = largest_size(self._engine.transport.comm, _largest_column(operations.xp, panels))
        factor_lu(operations, panels)
        panels.settle()
        bench.fence()
        panels.swap_left(operations)
        bench.fence()
        if bench.fault(panels):
            return math.inf
        if not self._n:
            return 0.0
        estimate = float(size * self._norm_of_inverse(panels, right))
        # Solves with a finite A give NaN if they overflow on the way.
        return math.inf if math.isfinite(size) and math.isnan(estimate) else estimate

    def _scale(self, panels: FactorPanels) -> None:
        """Scale A by a power of two, which keeps its condition, if it is near the ends of the range. Collective."""
        own = panels.arrays()
        (size,) = largest_size(self._engine.transport.comm, largest(self._operations.xp, own))
        exponent = scaling(size, self._dtype, root=True)
        for panel in own:
            self._operations.scale_by_power(panel, exponent)

    def _norm_of_inverse(self, panels: FactorPanels, right: FactorPanels) -> float:
        """Return an estimate of the norm of A's inverse. The first rank decides what is solved next, and tells."""
        comm = self._engine.transport.comm
        steps, y = _estimated(self._n, self._dtype), None
        while True:
            told: tuple[str, Array] | float = 0.0
            if comm.rank == 0:
                try:
                    told = steps.send(y)
                except StopIteration as end:
                    told = end.value
            op = comm.bcast(told[0] if isinstance(told, tuple) else told, 0)
            if not isinstance(op, str):
                return float(op)
            x = told[1] if isinstance(told, tuple) else None
            y = self._solved(panels, right, x if panels.whole_rows else comm.bcast(x, 0), op)

    def _solved(self, panels: FactorPanels, right: FactorPanels, x: Array, op: str) -> Array:
        """Return the solution of ``op(A) y = x`` on the first rank; the ranks that have right-hand sides have x."""
        bench, n = self._bench, self._n
        for own in right.arrays():
            own[:, 0] = self._operations.xp.asarray(x[right.rows])
        sides = sides_of(bench, panels, right)
        if op == "N":
            sides.swap(n, panels.pivots)
        for lower in (op == "N", op != "N"):
            sides.sweep(lower=lower, unit=lower, op=op)
        if op != "N":
            sides.swap(n, panels.pivots, back=True)
        sides.finish()
        parts = [(right.rows, bench.on_host(own[:, 0].copy())) for own in right.arrays()]
        if panels.whole_rows:
            return parts[0][1] if parts else None
        y = np.zeros(n, self._dtype)  # one rank has each element
        for rows, values in parts:
            y[rows] = values
        self._engine.transport.comm.sum_into(y)
        return y


def _estimated(n: int, dtype: np.dtype) -> Generator[tuple[str, Array], Array, float]:
    """Yield an op and an x for each y that is needed, with ``op(A) y = x``; return the estimate of A^-1's norm. Local.

    It goes on as long as the estimate grows. Ranks round differently, so only one of them may decide that.
    """
    y = yield "N", np.full(n, 1 / n, dtype)
    best, last = _norm(y), -1
    for _ in range(_MOST):
        z = np.abs((yield "C", _signs(y)))
        largest = int(z.argmax())
        if last >= 0 and z[largest] <= z[last]:
            break
        last = largest
        x = np.zeros(n, dtype)
        x[largest] = 1
        y = yield "N", x
        found = _norm(y)
        if not found > best:
            break
        best = found
    alternating = np.array([(-1) ** i * (1 + i / max(1, n - 1)) for i in range(n)], dtype)
    y = yield "N", alternating
    return max(best, 2 * _norm(y) / (3 * n))


def _largest_column(xp: Any, panels: FactorPanels) -> float:
    """Return the largest 1-norm of a column of this rank's panels. Collective."""
    sums = [panels.total(xp.abs(columns).sum(0)) for columns in panels.arrays() if columns.shape[1]]
    return float(np.max([float(each.max()) for each in sums], initial=0.0))


def _norm(x: Array) -> float:
    return float(np.abs(x).sum())


def _signs(x: Array) -> Array:
    """Return each element divided by its absolute value, 1 for 0."""
    size = np.abs(x)
    return np.where(size == 0, 1, x / np.where(size == 0, 1, size)).astype(x.dtype)
