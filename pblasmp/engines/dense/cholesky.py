# SPDX-License-Identifier: Apache-2.0
"""Cholesky factorisation of panels: right-looking, one panel ahead of the update."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..protocol import Operations
from .factor_panels import FactorPanels, real_diagonal
from .factor_solve import FactorSolveJob
from .right_looking import right_looking
from .sweeps import sides_of

__all__ = ["CholeskyJob"]

Array = Any


class CholeskyJob(FactorSolveJob):
    """A Cholesky factorisation, a solve with its factor L, or both. Making and running one is collective.

    Attributes:
        diagonal: of the last run, L's, if A was factored and B was solved for; else None.
    """

    lower, routine = True, "cholesky"
    diagonal: Array = None

    def run(self, a: Array, out: Array = None, b: Array = None, x: Array = None) -> int:
        """Compute; return 0, or the order of the first leading minor that is not positive definite."""
        bench, operations = self._bench, self._operations
        lower, *right = panels = self._moved_in(a, out, b, x)
        bench.handed_in(panels)
        info = 0
        if not self._factored:
            with lower.above_kept():  # updates are of whole squares
                factor(operations, lower)
                bench.fence()
                lower.settle()
            info = bench.fault(lower)
        if right and not info:
            self.diagonal = None if self._factored or self._inverse else bench.diagonal(lower)
            if self._inverse:
                right[0].set_identity(operations.xp)
            sides = sides_of(bench, lower, right[0], begins=self._inverse)
            sides.sweep(lower=True)
            sides.sweep(lower=True, op="C")
            sides.finish()
            if self._inverse:
                real_diagonal(operations.xp, right[0])
            bench.fence()
        self._move_out(panels, out, x, solved=not info)
        return info


def factor(operations: Operations, panels: FactorPanels) -> None:
    """Replace the lower triangle of a matrix in panels by L with A = L L^H. Collective over the workers.

    If it is not positive definite, ``panels.info`` of the first panel that shows it is the order of the leading minor
    that is not positive, and the work ends there.
    """
    shape = panels.shape

    def finish(k: int) -> None:
        panels.potrf(operations, k)

    def update(k: int, panel: Array, group: Sequence[int]) -> None:
        blocks = [list(block) for _, block in groupby(group, lambda j: j // shape.group)]  # adjacent panels
        panels.subtract(operations, panel, k, blocks)

    right_looking(panels, shape.panels, finish, update, ends_at_fault=True, delays=True)
