# SPDX-License-Identifier: Apache-2.0
"""trsm with few right-hand sides: A stays where it is, except the blocks on its diagonal.

Some equations are solved at a time, and their contribution to the others is subtracted by a product that moves only the
right-hand sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...layout import Level3Problem, MatmulProblem
from ..arrays import same_memory, scale
from ..local.slab_terms import triangle_of
from ..method import plain_refusal, type_refusal
from ..protocol import Engine, Method
from ..request import AnyProblem, Operands, Options
from .steps import SteppedProduct, Window

__all__ = ["METHODS", "StationarySolve"]

# equations solved at a time: with more, more of A is copied; with fewer, the ranks meet more often
_PANEL = 1024
_LEAST = 4096  # equations; with fewer, the meetings take as long as copying A
_THIN = 32  # needs so many times as many equations as right-hand sides
_LEAST_OF_GPUS, _THIN_OF_GPUS = 8192, 1024  # likewise on GPUs


class StationarySolve(SteppedProduct):
    """X of ``op(A) X = alpha B``, or of ``X op(A) = alpha B``, in D."""

    path = "stationary"

    def _add_steps(self, operands: Operands) -> None:
        p, options = self._p, replace(self._options, alpha=1, algo="auto")
        if self._options.alpha == 0:
            self._then(lambda given: scale(given.d, 0))
            return
        assert p.b is not None
        if p.b.same_places(p.d):
            self._then(self._scale)
        else:
            scaled = replace(options, alpha=self._options.alpha)
            self._step(operands, Level3Problem("geadd", p.b, p.d), scaled, "b", "", "", "d")
        update = replace(options, alpha=-1, beta=1, algo="stationary")
        for these, rest in self._panels():
            a, here, there = (these, these), self._window(these), self._window(rest)
            solve = replace(p, a=p.a[a], b=p.d[here], d=p.d[here])
            self._step(operands, solve, options, "a", "d", "", "d", window=here, of=(a, here))
            if rest.start == rest.stop:
                continue
            a = (rest, these) if (p.op_a == "N") == (p.side == "L") else (these, rest)
            left = p.side == "L"
            product = MatmulProblem(
                a=p.a[a] if left else p.d[here],
                b=p.d[here] if left else p.a[a],
                c=p.d[there],
                d=p.d[there],
                op_a=p.op_a if left else "N",
                op_b="N" if left else p.op_a,
            )
            names, of = (("a", "d"), (a, here)) if left else (("d", "a"), (here, a))
            self._step(operands, product, update, *names, "d", "d", window=there, of=of)

    def _window(self, equations: slice) -> Window:
        """Return where the unknowns of some equations are in D."""
        every = slice(None)
        return (equations, every) if self._p.side == "L" else (every, equations)

    def _panels(self) -> Iterator[tuple[slice, slice]]:
        """Yield the equations to solve next, and those that remain."""
        order, a = self._p.a.shape[0], self._p.a
        unit = max(a.block) * max(a.grid.shape)
        width = max(1, -(-min(_PANEL, order // 4) // unit)) * unit
        starts = range(0, order, width)
        lower = triangle_of(self._p)[2] == "L"
        for start in starts if lower else reversed(starts):
            stop = min(start + width, order)
            yield slice(start, stop), (slice(stop, order) if lower else slice(0, start))

    def _scale(self, given: Operands) -> None:
        """Start from alpha B in D, which may be B. Local."""
        if not (self._options.alpha == 1 and same_memory(given.b, given.d)):
            self._engine.operations.xp.multiply(given.b, self._options.alpha, out=given.d)


class StationarySolveMethod(Method):
    """Solves with few right-hand sides, which alone are moved."""

    name = "stationary"

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, Level3Problem) and problem.traits.solves

    def refusal(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands | None
    ) -> str:
        return type_refusal(engine, problem, options, operands) or plain_refusal(operands)

    def cost(self, engine: Engine, problem: Level3Problem, options: Options) -> float:
        """Return less than the cost of slabs if there are few right-hand sides."""
        order = problem.a.shape[0]
        columns = problem.d.shape[1 if problem.side == "L" else 0]
        least, thin = (_LEAST_OF_GPUS, _THIN_OF_GPUS) if engine.traits.queues else (_LEAST, _THIN)
        few = order >= max(least, thin * columns) and problem.a.grid.size > 1
        return 1.5 if few else 9.0

    def prepare(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands
    ) -> StationarySolve:
        return StationarySolve(engine, problem, options, operands)


METHODS = (StationarySolveMethod(),)
