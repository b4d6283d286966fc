# SPDX-License-Identifier: Apache-2.0
"""Products with one operand much larger than the other and the result: the large one stays where it is.

Each rank multiplies its part of the large operand by the matching rows of the small one; the partial products of a
process row are then moved to where D is, and added up there. So a matrix times a few vectors moves only vectors. A
symmetric matrix multiplies in two parts: its stored triangle, and the rest of the transpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...comm import Cells, Exchange, Side
from ...comm.exchange import SLOTS
from ...comm.shared_memory import aligned, carve
from ...dtypes import accumulation_dtype, is_float8
from ...layout import Level3Problem, MatmulProblem, MatrixDescriptor
from ...layout.axis import Axis
from ..composite import QueuedProduct
from ..local.panels import Operand, Panels
from ..local.slab_terms import (
    THIN,
    Gemm,
    Kernel,
    LeftPart,
    SidedPart,
    matmul_slabs,
    routine_slabs,
    sided_parts,
    whole,
)
from ..method import ArrayMethod, plain_refusal
from ..protocol import Engine
from ..request import AnyProblem, Operands, Options

_LARGER = 2  # worthwhile only if the alternative moves at least so many times as many elements
_LARGE = (
    1 << 22
)  # elements of what stays on GPUs if there are more columns: of less, the host's work takes longer
_LEAST = 1 << 17  # elements that must otherwise be moved; with fewer, an extra meeting costs more

Array = Any
Sided = MatmulProblem | Level3Problem


@dataclass(frozen=True)
class _StationaryTerm:
    """One product L S of the sum that is D; L, or a part of it, stays in place.

    Attributes:
        large: L, as outer × k.
        of: what turns the operand that stays into L, and which part of L counts. For a conjugate, it is multiplied by
            conj(S), and the product is conjugated when it is moved.
        small: S, as k × width.
    """

    large: Side
    of: SidedPart
    small: Operand

    def rows(self, rank: int) -> int:
        """Return how many rows of L a rank has. Local."""
        return self.large.rows.count(self.large.cells[rank].coords[0]) if rank < len(self.large.cells) else 0

    def kernel(self, stays: MatrixDescriptor, rank: int) -> Kernel:
        """Return the kernel that multiplies this rank's part of L. Local."""
        of = self.of
        if of.part is None or rank >= stays.grid.size:
            return whole
        rows, cols = stays.global_indices(rank)
        return LeftPart(of.part, *((cols, of.diagonal, rows) if of.flip else (rows, of.diagonal, cols)))


@dataclass(frozen=True)
class _Seen:
    """A product, or its transpose if ``turned``, as a sum of terms.

    Attributes:
        stays: the operand that stays, "a" or "b".
        result: D.
    """

    turned: bool
    stays: str
    result: Side
    terms: tuple[_StationaryTerm, ...]


class StationaryProduct(QueuedProduct):
    """A product with A or B in place. Making and running one is collective over the ranks."""

    path = "stationary"

    def __init__(self, engine: Engine, p: Sided, options: Options, _: Operands) -> None:
        transport, operations = engine.transport, engine.operations
        self._engine, self._p, self._options, self._rank = engine, p, options, transport.rank
        self._seen = seen = _see(engine, p)
        self._dtype, self._width = accumulation_dtype(p.d.dtype), seen.result.cols.extent
        self._stays = getattr(p, seen.stays)
        self._kernels = [term.kernel(self._stays, self._rank) for term in seen.terms]
        self._shared = not transport.why_not_shared
        active = options.alpha != 0 and 0 not in (*p.d.shape, p.k)
        way = "shared" if self._shared else "gathered"
        self._panels = Panels(engine, way, [term.small for term in seen.terms], self._width if active else 0)
        self._sharing = (
            next(ranks for ranks in transport.nodes if self._rank in ranks) if self._shared else (self._rank,)
        )
        outer = max(count for term in seen.terms for count in term.large.rows.counts())
        self._temporary_bytes = aligned(outer * self._width * self._dtype.itemsize)
        self._moves = [list(self._find_moves(term)) for term in seen.terms] if active else []
        exchanges = [exchange for moves in self._moves for exchange, _ in moves]
        self.sent_bytes = self._panels.sent_bytes + sum(each.sent_bytes for each in exchanges)
        self.copied_bytes = self._panels.copied_bytes + sum(each.copied_bytes for each in exchanges)
        rows, cols = p.d.local_shape(self._rank) if self._rank < p.d.grid.size else (0, 0)
        self._shape = (cols, rows) if seen.turned else (rows, cols)  # of this rank's part of the terms' sum
        self._count = max(1, len(exchanges))
        partials = self._temporary_bytes * len(self._sharing) * len(self._moves)
        messages = max(map(transport.message_bytes, exchanges), default=0)
        parts = rows * cols * self._dtype.itemsize * self._count
        self.workspace = operations.workspace(
            self._panels.nbytes + partials + parts + messages,
            apart=any(kernel is not whole for kernel in self._kernels),
        )
        if engine.traits.queues:  # the ranks agree now, but not in a run
            self._parts()
            for i in range(len(self._moves)):
                self._partials(i)

    def _find_moves(self, term: _StationaryTerm) -> Iterator[tuple[Exchange, list[int]]]:
        """Yield for each part of k the exchange that moves its partial products to D, and the ranks with those."""
        transport, large, width = self._engine.transport, term.large, self._width
        every = large.cells
        for part, count in enumerate(large.cols.counts()):
            if count:
                here = every.coords[:, 1] == part
                coords, ranks = every.coords[here] * (1, 0), every.ranks[here]
                cells = Cells(coords, ranks[:, 0], transport.nodes) if self._shared else Cells(coords, ranks)
                partial = Side(large.rows, Axis.whole(width), cells, large.order)
                yield transport.exchange(partial, self._seen.result, self._dtype), ranks[:, 0].tolist()

    def _queue(self, operands: Operands) -> None:
        operations, total = self._engine.operations, self._sum(operands)
        if self._rank >= self._p.d.grid.size:
            return
        total = total.T if self._seen.turned else total
        if self._options.beta != 0 and operands.c is not None:
            c = operands.c.astype(self._dtype, copy=False)
            operations.add(total, 1, total, self._options.beta, c, None, conjugate=False)
        operations.store(operands.d, total, self._p.d.dtype)

    def _sum(self, operands: Operands) -> Array:
        """Return this rank's part of the product, transposed if ``turned``. Collective over the ranks."""
        transport, parts = self._engine.transport, self._parts()
        if not self._moves:
            parts[0][...] = 0
            return parts[0]
        partials = self._multiply(operands)
        if self._shared:
            transport.fence()  # wait until every partial product of the node has been written
        free = iter(parts)
        for term, of_term, moves in zip(self._seen.terms, partials, self._moves, strict=True):
            for exchange, ranks in moves:
                of = {i: of_term[rank] for i, rank in enumerate(ranks) if rank in of_term}
                to = {self._rank: next(free)}
                transport.start_exchange(exchange, of, to, conjugate=term.of.conjugate, slots=SLOTS).finish()
        for part in parts[1:]:
            parts[0] += part
        return parts[0]

    def _multiply(self, operands: Operands) -> list[dict[int, Array]]:
        """Compute this rank's partial products; return, for each term, those it can read, by rank. Collective."""
        operations, options, seen = self._engine.operations, self._options, self._seen
        partials = [self._partials(i) for i in range(len(seen.terms))]
        ((_, _, smalls),) = self._panels.arrive({"a": operands.a, "b": operands.b})
        x: Array = getattr(operands, seen.stays)
        x = operations.operand(x, self._stays.dtype, "x")
        for term, kernel, slabs, of_term in zip(seen.terms, self._kernels, smalls, partials, strict=True):
            if self._rank not in of_term or of_term[self._rank].size == 0:
                continue
            slab = slabs[term.large.cells[self._rank].coords[1]] if isinstance(slabs, dict) else slabs
            right = operations.operand(slab, term.small.dtype, "w")
            alpha = complex(options.alpha).conjugate() if term.of.conjugate else options.alpha
            left, mine = x.T if term.of.flip else x, of_term[self._rank]
            kernel(operations, Gemm(alpha, left, right, 0, mine, compute=options.compute))
        return partials

    def _partials(self, i: int) -> dict[int, Array]:
        """Return memory for the partial products of term ``i``, of this rank and those that share it, by rank."""
        term, room = self._seen.terms[i], self._temporary_bytes
        memory = self._engine.transport.buffer(f"partial{i}", room * len(self._sharing), shared=self._shared)
        order = term.large.order  # the order that BLAS multiplies fastest
        return {
            rank: carve(memory, at * room, (term.rows(rank), self._width), self._dtype, order)
            for at, rank in enumerate(self._sharing)
            if rank < len(term.large.cells)
        }

    def _parts(self) -> list[Array]:
        """Return memory for the contribution of each part of k of each term to this rank's part of D."""
        count, (rows, cols), order = self._count, self._shape, self._seen.result.order
        shape = (count * rows, cols) if order == "C" else (rows, count * cols)
        memory = self._engine.operations.scratch("parts", shape, self._dtype, order)
        if order == "C":
            return [memory[i * rows : (i + 1) * rows] for i in range(count)]
        return [memory[:, i * cols : (i + 1) * cols] for i in range(count)]


def _see(engine: Engine, p: Sided) -> _Seen:
    """Return the form in which a problem is computed: the larger of A and B, or a routine's A, stays. Local."""
    result, is_complex = Side.of(p.d), p.d.dtype.kind == "c"
    if isinstance(p, MatmulProblem):
        b_stays = turned = p.n > p.m
        op, op_of_comes = (p.op_b, p.op_a) if b_stays else (p.op_a, p.op_b)
        parts: tuple[SidedPart, ...] = (SidedPart((op != "N") != turned, is_complex and op == "C"),)
        flip, conjugate = (op_of_comes != "N") != turned, is_complex and op_of_comes == "C"
    else:
        b_stays, turned, parts = False, p.side == "R", sided_parts(p)
        flip, conjugate = turned, False
    assert p.b is not None
    stays, comes, source = (p.b, p.a, "a") if b_stays else (p.a, p.b, "b")
    dtype, size = engine.operations.slab_dtype(comes.dtype), engine.transport.size
    terms = []
    for x in parts:
        large = Side.of(stays).T if x.flip else Side.of(stays)
        needs = _needs(large, size)
        small = Operand(comes, flip, conjugate != x.conjugate, needs, large.cols, dtype, source)
        terms.append(_StationaryTerm(large, x, small))
    return _Seen(turned, "b" if b_stays else "a", result.T if turned else result, tuple(terms))


def _needs(large: Side, size: int) -> tuple[tuple[int, ...], ...]:
    """Return which part of k each rank multiplies: none if it has no part of the large operand."""
    counts, parts = large.rows.counts(), [(part,) for part in range(large.cols.nprocs)]
    coords = large.cells.coords.tolist()
    held = (parts[part] if counts[row] else () for row, part in coords)
    return (*held, *[()] * (size - len(coords)))


def _is_thin(p: Sided) -> bool:
    """Return whether GPUs compute so few columns that reading the large operand takes the time. Local."""
    few, many = sorted(p.d.shape)
    exact = accumulation_dtype(p.d.dtype) == p.d.dtype  # others are not measured
    return few == 1 < many or (exact and 0 < few * THIN <= min(many, p.k) and many * p.k >= _LARGE)


class StationaryMethod(ArrayMethod):
    """Products that move only vectors, or what is small."""

    name, product = "stationary", StationaryProduct

    def serves(self, problem: AnyProblem) -> bool:
        if isinstance(problem, Level3Problem):
            return problem.traits.shape == "sided" and not problem.traits.solves
        return isinstance(problem, MatmulProblem) and problem.scheme == "gemm"

    def refusal(self, engine: Engine, problem: Sided, options: Options, operands: Operands | None) -> str:
        why = super().refusal(engine, problem, options, operands)
        if not why and is_float8(problem.a.dtype):
            why = "it takes no 8-bit floats"
        return why or plain_refusal(operands)

    def cost(self, engine: Engine, problem: Sided, options: Options) -> float:
        """Return less than the cost of slabs if these would move much more; on GPUs, if B has few columns."""
        p = problem
        if engine.traits.queues:
            return 0.0 if _is_thin(p) and p.a.grid.size > 1 else 9.0
        terms = _see(engine, p).terms
        here = sum(math.prod(p.d.shape) * x.large.cols.nprocs for x in terms)
        here += sum(math.prod(x.small.matrix.shape) for x in terms if not x.small.in_place)
        slabs = matmul_slabs(p, 1, engine) if isinstance(p, MatmulProblem) else routine_slabs(p, 1, engine)
        there = sum(math.prod(x.matrix.shape) for x in slabs.operands if not x.in_place)
        return 1.5 if there >= max(_LARGER * here, _LEAST) else 9.0


METHODS = (StationaryMethod(),)
