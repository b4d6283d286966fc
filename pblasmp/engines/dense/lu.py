# SPDX-License-Identifier: Apache-2.0
"""LU factorisation of panels with partial pivoting: right-looking, one panel ahead of the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..protocol import Operations
from .factor_panels import FactorPanels
from .factor_solve import FactorSolveJob
from .right_looking import right_looking
from .sweeps import sides_of

__all__ = ["LuJob", "permutation"]

Array = Any


class LuJob(FactorSolveJob):
    """An LU factorisation, a solve with the factors, or both. Making and running one is collective.

    Attributes:
        pivots: of the last run: row i was exchanged with ``pivots[i]``, both from 0.
        diagonal: of the last run, U's; None if A was factored already.
    """

    routine = "lu"
    pivots: NDArray[np.int64]
    diagonal: Array

    def run(
        self,
        a: Array,
        out: Array = None,
        b: Array = None,
        x: Array = None,
        pivots: NDArray[np.int64] | None = None,
        *,
        op: str = "N",
    ) -> int:
        """Compute; return 0, or i if U's diagonal element i, counted from 1, is the first that is exactly zero.

        Args:
            a, out, b, x: the local arrays.
            pivots: of an A that is factored already.
            op: "N", "T" or "C": solve with A, its transpose, or its conjugate transpose.
        """
        bench = self._bench
        panels, *right = both = self._moved_in(a, out, b, x)
        least = min(panels.shape.rows, panels.shape.cols)
        if pivots is not None and (bench.rank == 0 or not bench.shared):
            panels.pivots[:least] = bench.engine.xp.asarray((pivots + 1).astype(np.int32))
        if self._factored:
            bench.fence()  # all ranks read the pivots
        else:
            bench.handed_in(both)
        info = 0
        if not self._factored:
            info = self._factor(panels)
        self.pivots = bench.on_host(panels.pivots[:least]).astype(np.int64) - 1 if pivots is None else pivots
        self.diagonal = None if self._factored else bench.diagonal(panels)
        if right and not info:
            self._solve(panels, right[0], op)
        self._move_out(both, out, x, solved=not info)
        return info

    def _factor(self, panels: FactorPanels) -> int:
        factor(self._operations, panels)
        panels.settle()
        if panels.shape.panels > 1:
            self._bench.fence()  # a panel whose rows are exchanged is read no more
            panels.swap_left(self._operations)
        self._bench.fence()
        return self._bench.fault(panels)

    def _solve(self, panels: FactorPanels, right: FactorPanels, op: str) -> None:
        """Replace the right-hand sides by the solutions."""
        operations, bench, n = self._operations, self._bench, panels.shape.cols
        begins = self._inverse and bench.shared
        if self._inverse:
            right.set_identity(operations.xp)
        sides = sides_of(bench, panels, right, begins=begins)
        if op == "N":
            if not begins:
                sides.swap(n, panels.pivots)
            sides.sweep(lower=True, unit=True)
            sides.count_all()
            sides.sweep(lower=False)
        else:
            sides.sweep(lower=False, op=op)
            sides.sweep(lower=True, unit=True, op=op)
            sides.swap(n, panels.pivots, back=True)
        sides.finish()
        bench.fence()
        if begins:  # A^-1 = (L U)^-1 P: its columns are permuted
            bench.permute_columns(right, np.argsort(permutation(self.pivots, n)))
            bench.fence()


def permutation(pivots: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return P as a list of rows: row i of P A is row ``p[i]`` of A. Local."""
    rows = list(range(n))
    for i, other in enumerate(pivots.tolist()):
        rows[i], rows[other] = rows[other], rows[i]
    return np.array(rows, np.int64)


def factor(operations: Operations, panels: FactorPanels) -> None:
    """Replace a matrix in panels by L and U, without the exchanges of rows in panels to the left. Collective.

    Collective over the workers. ``panels.info`` of a panel is the index, from 1, of the first of its diagonal elements
    of U that is exactly zero.
    """

    def finish(k: int) -> None:
        panels.getrf(operations, k)

    def update(k: int, panel: Array, group: Sequence[int]) -> None:
        panels.eliminate(operations, panel, k, group)

    right_looking(panels, panels.shape.steps, finish, update)
