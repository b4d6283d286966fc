# SPDX-License-Identifier: Apache-2.0
"""Products of slabs, for every layout and on every engine: three algorithms that differ in which ranks share slabs.

The ranks of a *domain* share slabs of the operands; k is taken in *panels*:

- ``shared``: the ranks of a node are a domain and k is one panel. Between nodes the slabs travel in messages.
- ``gathered``: every rank is its own domain and k is one panel.
- ``panels``: every rank is its own domain; while one panel of k is multiplied, the next one is in flight.

An operand that is already where it is needed stays there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...dtypes import accumulation_dtype
from ...layout import Level3Problem, MatmulProblem, ParallelProblem
from ..arrays import same_memory
from ..composite import QueuedProduct
from ..local.finish import Finish, number
from ..local.panels import Operand, Panels, SlabsMethod
from ..local.slab_terms import Gemm, Slabs, matmul_slabs, routine_slabs, whole
from ..protocol import Engine
from ..request import AnyProblem, Operands, Options, Problem

Array = Any


class SlabProduct(QueuedProduct):
    """D computed from slabs of the operands. Making and running one is collective over the ranks.

    Args:
        slabs: D as a sum of products of slabs.
        options: beta, and the type in which products are summed.
        way: "shared", "gathered" or "panels".
        operands: the planned ones.
        finish: computes the epilogue and amax; None if there is neither.
    """

    def __init__(
        self,
        engine: Engine,
        slabs: Slabs,
        options: Options,
        way: str,
        operands: Operands,
        finish: Finish | None = None,
    ) -> None:
        self.path = way
        operations, rank, d = engine.operations, engine.transport.rank, slabs.d
        self._slabs, self._options, self._engine, self._finish = slabs, options, engine, finish
        has_some = rank < d.grid.size and 0 not in d.local_shape(rank)
        self._coords = d.grid.coords(rank) if has_some else None
        active = any(term.alpha != 0 for term in slabs.terms)
        self._panels = Panels(
            engine,
            way,
            slabs.operands,
            slabs.k if active else 0,
            backwards=slabs.backwards,
            lead=operations.lead,
            ahead=slabs.part is None,  # parts of a result are multiplied until after the next panel's begin
        )
        self.sent_bytes, self.copied_bytes = self._panels.sent_bytes, self._panels.copied_bytes
        if all(x.in_place for x in slabs.operands):
            self.notes += ("all operands are multiplied in place",)
        if len(self._panels.panels) > 1:
            self.notes += (f"k is taken in {len(self._panels.panels)} panels",)
        # Slabs that are converted are so in one buffer, which the last product must no longer read.
        self._as_they_are = all(operations.multiplies(x.dtype) == x.dtype for x in slabs.operands)
        # The sum is made in a temporary if its type differs, or if D is B, which is read to the end.
        exact = accumulation_dtype(d.dtype)
        several = len(self._panels.panels) * len(slabs.terms) > 1
        self._rounds = exact != d.dtype and (several or finish is not None or not operations.writes(d.dtype))
        self._late = slabs.in_place and (len(self._panels.panels) > 1 or slabs.operands[-1].in_place)
        temporary = self._temporary(operands)
        self.replays = finish is None
        self.one_stream = engine.transport.one_stream and len(self._panels.panels) <= 1
        self._why_no_graph = "" if finish is None else Finish.why_no_graph(operands)
        scratch = 0
        if temporary and self._coords is not None:
            scratch = math.prod(d.local_shape(rank)) * exact.itemsize
        self.workspace = operations.workspace(
            scratch + self._panels.nbytes,
            apart=any(term.multiply is not whole for term in slabs.terms),
            follows=slabs.part is not None and several and self._as_they_are,
        )

    def why_no_graph(self) -> str:
        return super().why_no_graph() or self._why_no_graph

    def _queue(self, operands: Operands) -> None:
        target = self._target(operands)
        seen = target.T if self._slabs.turned else target
        c = None if self._options.beta == 0 or operands.c is target else operands.c
        if c is not None and self._slabs.turned:
            c = c.T
        first, last = True, self._panels.panels[-1][0] if self._panels.panels else 0
        unit = 1.0
        if self._finish is not None and operands.scales is not None:
            unit = number(operands.scales.a) * number(operands.scales.b)
        for start, stop, slabs in self._panels.arrive({"a": operands.a, "b": operands.b}):
            if self._coords is not None:
                self._multiply(slabs, unit, first, start == last, seen, (start, stop), c if first else None)
            first = False
        if first and self._coords is not None:
            xp = self._engine.xp
            nothing = [xp.empty((extent, 0), seen.dtype) for extent in seen.shape]
            empty = Gemm(0, nothing[0], nothing[1].T, self._options.beta, seen, c=c)
            self._slabs.terms[0].multiply(self._engine.operations, empty)
        if self._finish is not None:
            self._finish(target, operands)
        if target is not operands.d:
            self._engine.operations.store(operands.d, target, self._slabs.d.dtype)

    def _multiply(
        self,
        slabs: Sequence[Any],
        unit: float,
        first: bool,
        last: bool,
        target: Array,
        panel: tuple[int, int],
        c: Array | None,
    ) -> None:
        assert self._coords is not None
        operations, options = self._engine.operations, self._options
        for i, term in enumerate(self._slabs.terms):
            left, right = (
                self._factor(which, slabs[which], process)
                for which, process in zip((term.left, term.right), self._coords, strict=True)
            )
            beta = options.beta if first and i == 0 else 1
            old = c if i == 0 else None
            follows = self._as_they_are and not (last and i + 1 == len(self._slabs.terms))
            rows = self._slabs.operands[term.left].rows_of(self._coords[0], *panel)
            g = Gemm(
                unit * term.alpha, left, right.T, beta, target[rows], panel[0], options.compute,
                None if old is None else old[rows], follows, rows.start,
            )  # fmt: skip
            term.multiply(operations, g)

    def _factor(self, which: int, slab: Any, process: int) -> Array:
        """Return a slab in a type that can be multiplied."""
        found = slab[process] if isinstance(slab, dict) else slab
        return self._engine.operations.operand(found, self._slabs.operands[which].dtype, f"slab{which}")

    def _temporary(self, operands: Operands) -> bool:
        """Return whether the sum is made in a temporary. Local."""
        b, d = operands.b, operands.d
        return self._rounds or (self._late and b is not None and same_memory(b, d))

    def _target(self, operands: Operands) -> Array:
        """Return the array that the product is summed in."""
        if not self._temporary(operands):
            return operands.d
        slabs = self._slabs
        order: Any = "C" if (slabs.d.order == "C") != slabs.turned else "F"
        exact = accumulation_dtype(slabs.d.dtype)
        return self._engine.operations.scratch("sum", operands.d.shape, exact, order)


# -- the rows of the registry


class ProductMethod(SlabsMethod):
    """Products of slabs of the operands."""

    def serves(self, problem: AnyProblem) -> bool:
        if isinstance(problem, Level3Problem):
            return problem.traits.shape != "added" and not problem.traits.solves
        if isinstance(problem, MatmulProblem):
            return problem.scheme != "matmul_allreduce"  # in that scheme every rank gets all of the result
        return isinstance(problem, ParallelProblem) and problem.form in (
            "allgather_matmul", "matmul_reduce_scatter",
        )  # fmt: skip

    def view(self, problem: AnyProblem) -> AnyProblem | str:
        return problem.as_gemm() if isinstance(problem, ParallelProblem) else problem

    def needs(self, engine: Engine, problem: Any, options: Options) -> tuple[Sequence[Operand], int, int]:
        slabs = _slabs(engine, problem, options)
        return slabs.operands, slabs.k, 0

    def overlaps(self, engine: Engine, problem: Any) -> bool:
        """Return whether a triangle is read or written. Local."""
        return isinstance(problem, Level3Problem) and (
            problem.traits.shape == "updated" or problem.traits.triangular
        )

    def prepare(self, engine: Engine, problem: Any, options: Options, operands: Operands) -> SlabProduct:
        finish = None
        if isinstance(problem, MatmulProblem) and Finish.needed(problem, operands):
            finish = Finish(engine, problem)
        return SlabProduct(engine, _slabs(engine, problem, options), options, self.name, operands, finish)


def _slabs(engine: Engine, problem: Problem, options: Options) -> Slabs:
    if isinstance(problem, MatmulProblem):
        return matmul_slabs(problem, options.alpha, engine)
    assert isinstance(problem, Level3Problem)
    return routine_slabs(problem, options.alpha, engine)


METHODS = (ProductMethod("shared", 2.0), ProductMethod("gathered", 3.0), ProductMethod("panels", 4.0))
