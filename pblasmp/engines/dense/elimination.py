# SPDX-License-Identifier: Apache-2.0
"""Cholesky and LU factorizations of panels, solves with the factors, and estimates of condition numbers by them.

Factorizations are right-looking, one panel ahead.
Source of the estimate: N. J. Higham, FORTRAN codes for estimating the one-norm of a real or complex matrix, ACM TOMS 14
(1988); LAPACK, ?LACN2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...comm import largest_size
from ..local.extremes import largest, scaling
from ..operations import Operations
from ..product import Found
from ..request import Operands
from .factor_panels import FactorPanels, real_diagonal
from .panel_shape import shape_beside, shape_of, shape_of_inverse
from .sweeps import Sides, sides_of
from .workbench import Mover, PanelsProduct, Workbench

Array = Any


def right_looking(
    panels: FactorPanels,
    steps: int,
    finish: Callable[[int], None],
    update: Callable[[int, Array, Sequence[int]], None],
    *,
    ends_at_fault: bool = False,
    delays: bool = False,
) -> None:
    """Factor panels, one after another, and update the later ones with each. Collective over the workers.

    The next panel is updated and factored first, so that the other ranks have it before they need it.

    Args:
        steps: how many panels are factored.
        finish: ``finish(k)`` factors panel k, one of this rank's, which has been updated.
        update: ``update(k, panel, group)`` updates adjacent panels of this rank with panel k, from its diagonal on, and
            with ``delays`` also with the panels after it, which follow it in the same array.
        ends_at_fault: what comes after a panel with a fault is useless. If not, as in LU, where U's diagonal may have a
            zero, all panels are factored.
        delays: an update may wait for more panels: what two have in common is multiplied at once.
    """
    if panels.rank >= panels.shape.workers:
        return
    panels.begin(delays=delays)
    if steps and panels.has(0):
        with panels.ahead():
            finish(0)
            panels.publish(0)
    for k in range(steps):
        panel = panels.fetch(k)
        if ends_at_fault and panels.failed(k):
            break
        for first, group in panels.later(k):
            known = panel if first == k else panels.joined(first, k)
            if group[0] > k + 1:
                update(first, known, group)
                continue
            with panels.ahead():
                update(first, known, group)
                if k + 1 < steps:
                    finish(k + 1)
                    panels.publish(k + 1)


class _FactorSolve(PanelsProduct):
    """A factorization, a solve with the factors, or both.

    Attributes:
        lower: of A and its factors only the lower triangles count. Of an inverse the other triangle is that of a
            Hermitian matrix, but if A is factored already it is not written.
    """

    lower: ClassVar[bool] = False

    def _prepare(self) -> None:
        p, engine, lower = self._problem, self._engine, self.lower
        alone = p.b is None and p.d is None  # a solve on GPUs needs panels that ranks have whole
        shape = shape_of(engine, p.a if p.c is None else p.c, p.routine, shared=lower and alone)
        shapes = [shape]
        if p.inverse:
            shapes.append(shape_of_inverse(engine, shape))
        elif p.b is not None:
            shapes.append(shape_beside(engine, shape, p.b.shape[1], spreads=True))
        self._bench = bench = Workbench(engine, shapes, p.a.dtype)
        spread = shapes[-1].workers < shape.workers
        self.delays = None if spread and p.factored else lower or (len(shapes) > 1 and not spread)
        self._a = Mover(bench, 0, p.a, lower=lower, conjugate=p.conjugate)
        self._out = self._mover(0, p.c, lower=lower, conjugate=p.conjugate)
        self._b = self._mover(1, p.b)
        self._part_of_x, conjugate = lower and p.inverse, p.conjugate and p.inverse
        self._x = self._mover(1, p.d, lower=self._part_of_x, conjugate=conjugate)
        mirrored = p.d.T if p.d is not None and self._part_of_x and not p.factored else None
        self._mirrored = self._mover(1, mirrored, lower=True, strictly=True, conjugate=not conjugate)

    def _places(self) -> Sequence[Mover | None]:
        factors = self._a if self._problem.factored else None
        return factors if self._out is None else self._out, None if self._part_of_x else self._x

    def _moved_in(self, given: Operands) -> list[FactorPanels]:
        """Return the panels of A, and of right-hand sides if there are any. Collective; a fence must follow."""
        a, b, out, x = given.a, given.b, given.c, given.d
        place = beside = None
        if self._out is not None:
            place = self._out.place(out, a, b, x)
        elif self._problem.factored:
            place = self._a.place(a, a, b, x)
        if self._x is not None and not self._part_of_x:
            beside = self._x.place(x, b, a, out)
        panels = self._bench.panels(place, beside)
        self._a.into(a, panels[0])
        if self._b is not None:
            self._b.into(b, panels[1])
        return panels

    def _move_out(self, panels: Sequence[FactorPanels], given: Operands, *, solved: bool) -> None:
        """Move the factors out of panels, and the solutions if there are any. Collective; after a fence."""
        if self._out is not None:
            self._out.back(given.c, panels[0])
        if self._x is not None and solved:
            self._x.back(given.d, panels[1])
            if self._mirrored is not None:
                self._mirrored.back(given.d.T, panels[1])


class CholeskyProduct(_FactorSolve):
    """A Cholesky factorization, a solve with its factor L, or both.

    INFO is the order of the first leading minor that is not positive definite. The diagonal of L is told if A was
    factored and B was solved for.
    """

    lower = True

    def _compute(self, given: Operands) -> Found:
        bench, operations, p = self._bench, self._operations, self._problem
        lower, *right = panels = self._moved_in(given)
        bench.handed_in(panels)
        info, diagonal = 0, None
        if not p.factored:
            with lower.above_kept():  # updates are of whole squares
                factor_cholesky(operations, lower)
                bench.fence()
                lower.settle()
            info = bench.fault(lower)
        if right and not info:
            diagonal = None if p.factored or p.inverse else bench.diagonal(lower)
            if p.inverse:
                right[0].set_identity(operations.xp)
            sides = sides_of(bench, lower, right[0], begins=p.inverse)
            sides.sweep(lower=True)
            sides.sweep(lower=True, op="C")
            sides.finish()
            if p.inverse:
                real_diagonal(operations.xp, right[0])
            bench.fence()
        self._move_out(panels, given, solved=not info)
        return Found(info, diagonal=diagonal)


def factor_cholesky(operations: Operations, panels: FactorPanels) -> None:
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


class LuProduct(_FactorSolve):
    """An LU factorization, a solve with the factors, or both; with A, its transpose, or its conjugate transpose.

    INFO is i if U's diagonal element i, counted from 1, is the first that is exactly zero. Pivots and U's diagonal are
    told of a factorization.
    """

    def _compute(self, given: Operands) -> Found:
        bench, p, pivots = self._bench, self._problem, given.pivots
        panels, *right = both = self._moved_in(given)
        least = min(panels.shape.rows, panels.shape.cols)
        if pivots is not None and (bench.rank == 0 or not bench.shared):
            panels.pivots[:least] = bench.engine.xp.asarray((pivots + 1).astype(np.int32))
        if p.factored:
            bench.fence()  # all ranks read the pivots
        else:
            bench.handed_in(both)
        info = 0 if p.factored else factor_lu(bench, panels)
        if pivots is None:
            pivots = bench.on_host(panels.pivots[:least]).astype(np.int64) - 1
        diagonal = None if p.factored else bench.diagonal(panels)
        if right and not info:
            self._solve(panels, right[0], pivots)
        self._move_out(both, given, solved=not info)
        return Found(info, pivots, diagonal)

    def _solve(self, panels: FactorPanels, right: FactorPanels, pivots: NDArray[np.int64]) -> None:
        """Replace the right-hand sides by the solutions."""
        operations, bench, n, op = self._operations, self._bench, panels.shape.cols, self._problem.op
        begins = self._problem.inverse and bench.shared
        if self._problem.inverse:
            right.set_identity(operations.xp)
        solve_lu(sides_of(bench, panels, right, begins=begins), panels, op, permuted=begins)
        bench.fence()
        if begins:  # A^-1 = (L U)^-1 P: its columns are permuted
            bench.permute_columns(right, np.argsort(permutation(pivots, n)))
            bench.fence()


def permutation(pivots: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return P as a list of rows: row i of P A is row ``p[i]`` of A. Local."""
    rows = list(range(n))
    for i, other in enumerate(pivots.tolist()):
        rows[i], rows[other] = rows[other], rows[i]
    return np.array(rows, np.int64)


def factor_lu(bench: Workbench, panels: FactorPanels) -> int:
    """Replace a matrix in panels by L and U. Collective over the context.

    Returns:
        0, or the index, from 1, of the first element of U's diagonal that is exactly zero.
    """
    operations = bench.operations

    def finish(k: int) -> None:
        panels.getrf(operations, k)

    def update(k: int, panel: Array, group: Sequence[int]) -> None:
        panels.eliminate(operations, panel, k, group)

    right_looking(panels, panels.shape.steps, finish, update)
    panels.settle()
    if panels.shape.panels > 1:
        bench.fence()  # a panel whose rows are exchanged is read no more
        panels.swap_left(operations)
    bench.fence()
    return bench.fault(panels)


def solve_lu(sides: Sides, panels: FactorPanels, op: str, *, permuted: bool = False) -> None:
    """Replace right-hand sides by the solutions with L and U, or their transposes. Collective over the workers.

    If they are ``permuted``, their rows are exchanged as the pivots say.
    """
    n, plain = panels.shape.cols, op == "N"
    if plain and not permuted:
        sides.swap(n, panels.pivots)
    for lower in (plain, not plain):
        sides.sweep(lower=lower, unit=lower, op=op)
        sides.count_all()
    if not plain:
        sides.swap(n, panels.pivots, back=True)
    sides.finish()


_MOST = 5  # iterations: more hardly ever improve the estimate


class ConditionProduct(PanelsProduct):
    """An estimate of the condition number of a square matrix in the 1-norm.

    It is a lower bound; infinite if A is singular, or nearly so.
    """

    delays = True

    def _prepare(self) -> None:
        engine, a = self._engine, self._problem.a
        shape = shape_of(engine, a, "condition")
        self._bench = Workbench(engine, [shape, shape_beside(engine, shape, 1)], a.dtype)
        self._a, self._n, self._dtype = Mover(self._bench, 0, a), a.shape[0], a.dtype

    def _compute(self, given: Operands) -> Found:
        return Found(condition=self._estimate(given.a))

    def _estimate(self, a: Array) -> float:
        bench, operations = self._bench, self._operations
        panels, right = bench.panels()
        self._a.into(a, panels)
        bench.fence()
        self._scale(panels)
        (size,) = largest_size(self._engine.transport.comm, _largest_column(operations.xp, panels))
        if factor_lu(bench, panels):
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
        bench = self._bench
        for own in right.arrays():
            own[:, 0] = self._operations.xp.asarray(x[right.rows])
        solve_lu(sides_of(bench, panels, right), panels, op)
        parts = [(right.rows, bench.on_host(own[:, 0].copy())) for own in right.arrays()]
        if panels.whole_rows:
            return parts[0][1] if parts else None
        y = np.zeros(self._n, self._dtype)  # one rank has each element
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
