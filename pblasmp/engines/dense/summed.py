# SPDX-License-Identifier: Apache-2.0
"""Products whose k is split over the ranks: each makes one partial product of all of D, and these are summed.

"summed": rank-k updates of small matrices by long ones. "sum": GEMM + AllReduce without overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...comm import Cells, Exchange, Side
from ...comm.exchange import SLOTS
from ...dtypes import accumulation_dtype
from ...layout import Grid, Level3Problem, MatmulProblem, MatrixDescriptor, ParallelProblem
from ...layout.axis import Axis
from ..local.finish import Finish, number
from ..local.slab_terms import Gemm, ResultPart
from ..method import ArrayMethod, travel_refusal
from ..product import Product
from ..protocol import Engine
from ..request import AnyProblem, Operands, Options

_LONG = 8  # take this only if k is at least so many times n

Array = Any


def _sides(p: Level3Problem) -> list[Side]:
    """Return A, and B if there is one, as n × k."""
    sides = [Side.of(x) for x in (p.a, p.b) if x is not None]
    return [side.T for side in sides] if p.op_a != "N" else sides


@dataclass(frozen=True)
class _SplitOperand:
    """An operand as n × k with k dealt out: the exchange that does it, and what a rank has afterwards."""

    exchange: Exchange | None
    shape: tuple[int, int]


class SummedUpdate(Product):
    """A triangle of D summed from partial triangles. Making and running one is collective over the ranks."""

    path = "summed"

    def __init__(self, engine: Engine, p: Level3Problem, options: Options, _: Operands) -> None:
        assert p.written is not None
        self._engine, self._p, self._part, self._options = engine, p, p.written, options
        self._order = order = p.d.shape[0]
        self._flip, self._conjugate = p.op_a != "N", p.op_a == "C" and p.is_hermitian
        matrices = [p.a] if p.b is None else [p.a, p.b]
        sides, size = _sides(p), engine.transport.size
        like = sides[0] if sides[0].rows.nprocs == 1 and len(sides[0].cells) == size else None
        cells = Cells.of_grid(Grid(1, size))
        self._dealt = []
        for side, matrix in zip(sides, matrices, strict=True):
            target = like or Side(Axis.whole(order), Axis.even(p.k, size), cells, side.order)
            self._dealt.append(_dealt(engine, side, target, matrix))
        indices = np.arange(order)
        self._multiply = ResultPart(self._part, indices, indices, hermitian=p.is_hermitian)
        self._places = None
        if engine.transport.rank < p.d.grid.size:
            self._places = p.d.global_indices(engine.transport.rank)
            self._result = ResultPart(self._part, *self._places, hermitian=p.is_hermitian)
        moves = [x.exchange for x in self._dealt if x.exchange is not None]
        itemsize = p.d.dtype.itemsize
        self.sent_bytes = sum(x.sent_bytes for x in moves)
        if size > 1 and options.alpha != 0:
            self.sent_bytes += order * order * itemsize
        self.copied_bytes = sum(x.copied_bytes for x in moves)
        parts = sum(x.shape[0] * x.shape[1] for x in self._dealt if x.exchange is not None)
        self.workspace = engine.operations.workspace((order * order + parts) * itemsize, apart=True)

    def _queue(self, operands: Operands) -> None:
        engine, options, c, d = self._engine, self._options, operands.c, operands.d
        xp, operations = engine.xp, engine.operations
        partial = xp.zeros((self._order, self._order), self._p.d.dtype, order="F")
        if options.alpha != 0:
            given = (operands.a, operands.b)
            factors = [self._mine(x, each) for x, each in zip(given, self._dealt, strict=False)]
            self._add_up(partial, *factors)
            engine.transport.sum_ranks(partial)
        if self._places is None:
            return
        rows, cols = (xp.asarray(each) for each in self._places)
        self._result.write(
            operations, options.beta, c, d,
            lambda down, across: partial[rows[down][:, None], cols[across][None, :]],
        )  # fmt: skip

    def _mine(self, local: Array, dealt: _SplitOperand) -> Array:
        """Return this rank's part of k of an operand, as n × k."""
        if self._flip:
            local = local.T
        if dealt.exchange is None:
            return local.conj() if self._conjugate else local
        transport = self._engine.transport
        mine: Array = self._engine.xp.empty(dealt.shape, self._p.d.dtype, order=dealt.exchange.order)
        of, to = {transport.rank: local}, {transport.rank: mine}
        transport.start_exchange(dealt.exchange, of, to, conjugate=self._conjugate, slots=SLOTS).finish()
        return mine

    def _add_up(self, partial: Array, x: Array, y: Array | None = None) -> None:
        """Add the triangle of this rank's products to ``partial``."""
        p, operations, alpha = self._p, self._engine.operations, self._options.alpha

        def adjoint(z: Array) -> Any:
            return z.conj().T if p.is_hermitian else z.T

        pairs = [(alpha, x, x if y is None else y)]
        if y is not None and p.traits.swept_twice:
            pairs.append((complex(alpha).conjugate() if p.is_hermitian else alpha, y, x))
        for i, (factor, left, right) in enumerate(pairs):
            self._multiply(operations, Gemm(factor, left, adjoint(right), min(i, 1), partial))


def _dealt(engine: Engine, side: Side, target: Side, matrix: MatrixDescriptor) -> _SplitOperand:
    """Return how an operand gets from ``side`` to ``target``; there is no exchange if it is there already."""
    here = next((cell for cell in target.cells if cell.ranks[0] == engine.transport.rank), None)
    shape = (target.rows.extent, target.cols.count(here.coords[1]) if here is not None else 0)
    same = (side.rows, side.cols, side.cells) == (target.rows, target.cols, target.cells)
    exchange = None if same else engine.transport.exchange(side, target, matrix.dtype)
    return _SplitOperand(exchange, shape)


# -- the row of the registry


class SplitKMethod(ArrayMethod):
    """Rank-k updates whose k is split over the ranks."""

    name, product = "summed", SummedUpdate

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, Level3Problem) and problem.traits.shape == "updated"

    def cost(self, engine: Engine, problem: Level3Problem, options: Options) -> float:
        """Return less than slabs cost if k is long and already split, or if one rank has most of the result."""
        p, size = problem, engine.transport.size
        if size == 1 or p.k < _LONG * p.n:
            return 10.0
        sides = _sides(p)
        still = (
            sides[0].rows.nprocs == 1 and len(sides[0].cells) == size and all(x == sides[0] for x in sides)
        )
        largest = max(rows * cols for rows, cols in map(p.d.local_shape, range(p.d.grid.size)))
        return 1.0 if still or 2 * largest > p.n * p.n else 10.0


class ReducedProduct(Product):
    """Each rank multiplies its part of k; the partial products are summed over all ranks. Making one is local.

    Args:
        p: the product, of scheme "matmul_allreduce".
        options: alpha, beta, and the type in which products are summed.
        operands: the planned ones, with an epilogue and scales if there are any.
    """

    path = "partial products summed over ranks"

    def __init__(self, engine: Engine, p: MatmulProblem, options: Options, operands: Operands) -> None:
        self._engine, self._p, self._options = engine, p, options
        self._finish = Finish(engine, p) if Finish.needed(p, operands) else None
        self._dtype = accumulation_dtype(p.d.dtype)
        self._inside = engine.transport.rank < p.d.grid.size
        nbytes = p.m * p.n * self._dtype.itemsize
        self.sent_bytes = nbytes if engine.transport.size > 1 else 0
        self.workspace = engine.operations.workspace(nbytes)

    def _queue(self, operands: Operands) -> None:
        engine, p, options, operations = self._engine, self._p, self._options, self._engine.operations
        partial, alpha = self._partial(operands), options.alpha
        if operands.scales is not None:
            alpha = alpha * number(operands.scales.a) * number(operands.scales.b)
        if self._inside and p.k and alpha != 0:
            left, right = (
                operations.operand(_op(x, op), matrix.dtype, name)
                for x, op, matrix, name in ((operands.a, p.op_a, p.a, "x"), (operands.b, p.op_b, p.b, "w"))
            )
            operations.gemm(alpha, left, right, 0, partial, options.compute)
        else:
            partial[...] = 0
        engine.transport.sum_ranks(partial)
        if self._inside and options.beta != 0 and operands.c is not None:
            c = operands.c.astype(self._dtype, copy=False)
            operations.add(partial, 1, partial, options.beta, c, None, conjugate=False)
        if self._finish is not None:
            self._finish(partial, operands)
        if self._inside and partial is not operands.d:
            operations.store(operands.d, partial, p.d.dtype)

    def _partial(self, operands: Operands) -> Array:
        """Return the array for the sum: D, if it is contiguous, has the right type, and does not hold C."""
        p, d = self._p, operands.d
        packed = d.flags.c_contiguous if p.d.order == "C" else d.flags.f_contiguous
        if self._inside and packed and d.dtype == self._dtype and self._options.beta == 0:
            return d
        return self._engine.operations.scratch("partial", (p.m, p.n), self._dtype, p.d.order)


def _op(array: Array, op: str) -> Array:
    out = array if op == "N" else array.T
    return out.conj() if op == "C" and out.dtype.kind == "c" else out


class SumMethod(ArrayMethod):
    """GEMM + AllReduce as one product and one sum over the ranks."""

    name, least, product = "sum", 3.0, ReducedProduct

    def serves(self, problem: AnyProblem) -> bool:
        if isinstance(problem, ParallelProblem):
            return problem.form == "matmul_allreduce"
        return isinstance(problem, MatmulProblem) and problem.scheme == "matmul_allreduce"

    def view(self, problem: AnyProblem) -> AnyProblem | str:
        return problem.as_allreduce() if isinstance(problem, ParallelProblem) else problem

    def refusal(
        self, engine: Engine, problem: MatmulProblem, options: Options, operands: Operands | None
    ) -> str:
        why = super().refusal(engine, problem, options, operands)
        return why or travel_refusal(options.comm_dtype, accumulation_dtype(problem.d.dtype))


METHODS = (SplitKMethod(), SumMethod())
