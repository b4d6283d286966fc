# SPDX-License-Identifier: Apache-2.0
"""What tensor-parallel products have in common: D[T, N] = alpha X W + beta C, and how they are cut into pieces.

All matrices are C-ordered; X is tokens × inputs, W inputs × outputs. An algorithm is a ``TensorProduct``, written in
terms of tools: products, sums of parts, copies, and memory that other ranks reach. ``ParallelProduct`` has
the tools for arrays, by an engine's operations and transport; the GPU's folder has them for kernels and copy engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from ...dtypes import accumulation_dtype, is_float8
from ...epilogue import Scales
from ...layout import MatmulProblem, ParallelProblem
from ...layout.schemes import FORMS
from ..local.finish import activate, scale_and_clip
from ..product import Product
from ..protocol import Engine, Method
from ..request import AnyProblem, Operands, Options

if TYPE_CHECKING:
    from typing_extensions import Self

Weights = tuple[tuple[float, tuple[int, ...]], ...]

SMALL_LAST: Weights = (12, (2, 2, 2, 2, 1, 1)), (3, (6, 6, 5, 3)), (0, (1,))
"""Relative sizes of the pieces of a product, each from so many waves on. Measured on two H200 in bfloat16."""
EVEN: Weights = (3, (1, 1, 1, 1)), (0, (1,))
"""The same on four H200, where the sums of GEMM + AllReduce are pushed."""
HALVES: Weights = (12, (4, 3, 2, 1)), (1.5, (3, 3, 2)), (0, (1, 1))
"""The same for each half of a product that two ranks share, with sums in the GEMM's epilogue; on two H100."""
FEW: Weights = (3, (2, 1)), (0, (1,))
"""The same of products that come once: what more pieces hide takes less time than the host takes to queue them."""
_TILE = 128, 256  # rows and columns of D that a multiprocessor computes at once, on Hopper


def offsets(parts: Sequence[int]) -> list[int]:
    """Return where each part begins, followed by where the last one ends. Local."""
    return [0, *accumulate(parts)]


@lru_cache(64)  # in a dry run each rank asks for those of all ranks
def shares(total: int, size: int) -> tuple[int, ...]:
    """Return ``total`` divided into ``size`` parts that differ by at most one, the larger ones first. Local."""
    least, more = divmod(total, size)
    return tuple(least + (rank < more) for rank in range(size))


def waves(rows: int, cols: int, multiprocessors: int) -> float:
    """Return how many tiles each multiprocessor computes until D is done. Local."""
    tile_rows, tile_cols = _TILE
    return -(-rows // tile_rows) * -(-cols // tile_cols) / multiprocessors


def pieces(rows: int, cols: int, multiprocessors: int, weights: Weights = SMALL_LAST) -> tuple[int, ...]:
    """Return the rows of the pieces of a product: one is computed while earlier ones travel. Local.

    Their number depends on how many waves of tiles the product has: a piece costs a launch, and part of a wave. The
    last ones may be smaller, since nothing hides their transfer. All but the last are multiples of a tile's rows.
    """
    tile_rows, _ = _TILE
    high, count = -(-rows // tile_rows), waves(rows, cols, multiprocessors)
    split = next(split for least, split in weights if count >= least)
    total = sum(split)
    ends = [min(rows, round(high * end / total) * tile_rows) for end in accumulate(split)]
    ends[-1] = rows
    return tuple([end - start for start, end in zip([0, *ends], ends, strict=False) if end > start])


Array = Any
Matrix = Any  # an array, or a view of GPU memory: its rows and columns are cut by slices
_NO_SCALES = Scales()
_PIECE_BYTES = 128 << 10  # of each part that is added at a time: a few pieces fit into a core's own cache


def row_major(p: ParallelProblem, operands: Operands, options: Options) -> Operands:
    """Return a run's operands as the product sees them: X, W, C and D turned, transposed, conjugated. Local.

    C is None if it is not read, and D itself if the caller's C is D.
    """
    x, w, c, d = operands.a, operands.b, operands.c, operands.d
    assert w is not None
    if p.turned:
        same = c is d
        x, w, d = w.T, x.T, d.T
        c = d if same else None if c is None else c.T
    if p.transposed or p.conjugated:
        x, w = (each.T if name in p.transposed else each for name, each in (("x", x), ("w", w)))
        x, w = (each.conj() if name in p.conjugated else each for name, each in (("x", x), ("w", w)))
    c = None if options.beta == 0 else c
    return Operands(x, w, c, d, operands.epilogue, operands.scales, operands.gathered)


class Matrices(Protocol):
    """The operands of a run as tools take them: ``Operands``, or the GPU's views of them.

    Attributes:
        a, d: X and D.
        c: C; None if it is not read.
        gathered: for the X of all tokens; None if it is not wanted.
    """

    a: Matrix
    c: Matrix | None
    d: Matrix
    gathered: Matrix | None


OperandsT = TypeVar("OperandsT", bound=Matrices)


@dataclass(frozen=True, slots=True)
class Memory:
    """Contiguous matrices that a product needs besides its operands.

    Attributes:
        dtype: their type.
        shapes: of each: of this rank's own one, or of each rank's.
    """

    dtype: np.dtype
    shapes: Sequence[tuple[int, int]]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum([rows * cols for rows, cols in self.shapes]) * self.dtype.itemsize


class TensorProduct(Product, Generic[OperandsT]):
    """A tensor-parallel product in terms of an engine's tools.

    Attributes:
        options: alpha, beta, types.
        rank, size: of the ranks.
        peers: the other ranks, in an order that spreads the receivers.
        everywhere: every rank gets all sums, not only those of its rows.
        travels: the type in which partial sums travel.
        own: this rank's memory by name, set by ``_prepare``.
        shared: memory that all ranks reach by name, set by ``_prepare``.
    """

    form: ClassVar[str] = ""
    p: ParallelProblem
    options: Options
    rank: int
    size: int
    travels: np.dtype
    has_tables = False

    def _begin(self, p: ParallelProblem, options: Options, rank: int, size: int) -> None:
        self.p, self.options, self.rank, self.size = p, options, rank, size
        self.everywhere = p.form == "matmul_allreduce"
        self.peers = [(rank + step) % size for step in range(1, size)]
        self.own: dict[str, Memory] = {}
        self.shared: dict[str, Memory] = {}

    def _prepare(self) -> None:
        """Choose what depends only on the sizes, and which memory is needed. Local."""

    def _size(self) -> None:
        """Prepare for the sizes of ``p``, and reserve this rank's own memory. Local."""
        self._prepare()

    def resized(self, problem: ParallelProblem, *, once: bool = True) -> Self | None:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, p=problem, own={}, shared={}, once=once)
        for name in ("graphs", "added"):
            other.__dict__.pop(name, None)
        other._size()
        return other if other.covered else None

    def _multiply(self, operands: OperandsT) -> None:
        """Compute D, or queue that. Collective over the ranks."""
        raise NotImplementedError

    @property
    def covered(self) -> bool:
        """Whether all shared memory that it needs is there, on every rank then."""
        raise NotImplementedError

    def _sent(self) -> int:
        """Return the bytes that this rank sends to other ranks in one run, if parts and results travel once."""
        p, others = self.p, self.size - 1
        if p.gathers:
            return int(p.tokens[self.rank] * p.inputs[0] * p.dtype.itemsize * others)
        if not p.sums:
            return int(p.tokens[0] * p.outputs[self.rank] * p.out_dtype.itemsize * others)
        rows = self.added[self.rank]
        mine, outputs = rows.stop - rows.start, p.outputs[0]
        results = mine * outputs * p.out_dtype.itemsize * others if self.everywhere else 0
        return int((p.tokens[0] - mine) * outputs * self.travels.itemsize + results)

    @cached_property
    def added(self) -> list[slice]:
        """The rows that each rank sums up: those of its result, or its share of them if all ranks get all sums."""
        ends = offsets(shares(self.p.tokens[0], self.size) if self.everywhere else self.p.rows)
        return [slice(start, stop) for start, stop in pairwise(ends)]

    # -- tools

    def part(self, operands: OperandsT, x: Matrix, d: Matrix) -> None:
        """Compute a product whose result is added to others: ``d = alpha x W``."""
        raise NotImplementedError

    def add(
        self, operands: OperandsT, parts: Sequence[Matrix], outs: Sequence[Matrix], c: Matrix | None
    ) -> None:
        """Write the sum of ``parts`` and C, after the epilogue and rounded once, into each of ``outs``."""
        raise NotImplementedError

    def whole(self, operands: OperandsT, x: Matrix, c: Matrix | None, d: Matrix) -> None:
        """Compute a product with C, bias, activation and D's scale."""
        raise NotImplementedError

    def copy_all(self, copies: Iterable[tuple[Matrix, Matrix]]) -> None:
        """Make copies, each to a matrix and of one."""
        raise NotImplementedError

    def everyones(self, name: str) -> list[Matrix]:
        """Return each rank's matrix of the shared memory of that name."""
        raise NotImplementedError

    def meet(self) -> None:
        """Wait until every rank is here, and sees what all wrote to shared memory. Collective over the ranks."""
        raise NotImplementedError


class ParallelProduct(TensorProduct[Operands]):
    """A tensor-parallel product by an engine's operations and transport. Making one is local.

    Args:
        options: alpha, beta, the type in which partial sums travel.
    """

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        self._engine, self._operations, self._transport = engine, engine.operations, engine.transport
        self._begin(p, options, engine.transport.rank, engine.transport.size)
        self.travels = engine.transport.carries(p.out_dtype, options.comm_dtype)
        self._float8 = is_float8(p.dtype)
        if self._float8:
            wide = self._operations.multiplies(p.dtype).name
            self.notes += (f"8-bit operands are multiplied in {wide}, which holds their values exactly",)
        self._size()

    def _size(self) -> None:
        super()._size()
        memory = (*self.own.values(), *self.shared.values())
        self.workspace = self._operations.workspace(sum(each.nbytes for each in memory))

    def _queue(self, operands: Operands) -> None:
        run = row_major(self.p, operands, self.options)
        w = self._operations.operand(run.b, self.p.w_dtype, "w")
        run.b = w.T if self.p.outputs_first else w
        amax = None if run.scales is None else run.scales.amax
        if amax is not None:
            amax[...] = 0
        self._multiply(run)
        if amax is not None and self.p.form in ("matmul_allreduce", "matmul_allgather"):
            self._share_amax(amax)

    # -- tools

    def part(self, operands: Operands, x: Array, d: Array) -> None:
        self._sum(operands, x, operands.b, None, d)

    def whole(
        self, operands: Operands, x: Array, c: Array | None, d: Array, columns: slice = slice(None)
    ) -> None:
        """Compute a product with C, bias, activation and D's scale, of W's ``columns``; ``c`` may be ``d``."""
        exact = accumulation_dtype(self.p.out_dtype)
        late = (operands.epilogue is not None or self._float8) and exact != d.dtype  # D is rounded at the end
        target = self._operations.scratch("sum", d.shape, exact) if late else d
        assert operands.b is not None
        self._sum(operands, x, operands.b[:, columns], c, target)
        self._finish(operands, target, columns)
        if late:
            self._operations.store(d, target, self.p.out_dtype)

    def add(self, operands: Operands, parts: Sequence[Array], outs: Sequence[Array], c: Array | None) -> None:
        """Write the sum of ``parts`` and C, after the epilogue, into ``outs``: in pieces that stay in the caches."""
        xp, d = self._engine.xp, outs[0]
        exact = accumulation_dtype(self.p.out_dtype)
        rows, cols = d.shape
        step = max(1, _PIECE_BYTES // max(1, cols * exact.itemsize))
        for start in range(0, rows, step):
            at = slice(start, min(start + step, rows))
            straight = c is None and d.dtype == exact
            total = d[at] if straight else self._operations.scratch("piece", d[at].shape, exact)
            if len(parts) == 1:
                total[...] = parts[0][at]
            else:
                xp.add(parts[0][at], parts[1][at], out=total)
            for part in parts[2:]:
                total += part[at]
            if c is not None:
                total += exact.type(self.options.beta) * c[at].astype(exact, copy=False)
            self._finish(operands, total, slice(None))
            for out in outs if not straight else outs[1:]:
                out[at] = total

    def copy_all(self, copies: Iterable[tuple[Array, Array]]) -> None:
        for to, of in copies:
            to[...] = of

    def memory(self, name: str) -> Array:
        """Return this rank's own matrix of that name. Local."""
        wanted = self.own[name]
        return self._operations.scratch(name, wanted.shapes[0], wanted.dtype)

    @staticmethod
    def cut(matrix: Array, shapes: Sequence[tuple[int, int]]) -> list[Array]:
        """Return matrices of these shapes, end to end in the memory of a contiguous one. Local."""
        flat, found, at = matrix.reshape(-1), [], 0
        for rows, cols in shapes:
            found.append(flat[at : at + rows * cols].reshape(rows, cols))
            at += rows * cols
        return found

    def everyones(self, name: str) -> list[Array]:
        wanted = self.shared[name]
        memory = self._transport.buffer(name, wanted.nbytes, shared=True)[: wanted.nbytes]
        found = self.cut(memory.view(wanted.dtype), wanted.shapes)
        return found * self.size if len(found) == 1 else found

    @property
    def covered(self) -> bool:
        return all(self._transport.holds(name, memory.nbytes) for name, memory in self.shared.items())

    def meet(self) -> None:
        self._transport.fence()

    # -- arithmetic

    def _tokens(self, x: Array) -> Array:
        return self._operations.operand(x, self.p.dtype, "x")

    def _finish(self, operands: Operands, target: Array, columns: slice) -> None:
        """Add the bias of W's ``columns``, apply the activation and D's scale."""
        e = operands.epilogue
        if e is not None:
            activate(self._engine.xp, e if e.bias is None else replace(e, bias=e.bias[columns]), target, None)
        scale_and_clip(self._engine.xp, operands.scales or _NO_SCALES, self.p.out_dtype, target)

    def _sum(self, operands: Operands, x: Array, w: Array, c: Array | None, target: Array) -> None:
        """Compute ``target = alpha x w + beta c``."""
        alpha, beta, x = self.options.alpha, self.options.beta, self._tokens(x)
        if self._float8:
            self._sum_scaled(operands.scales or _NO_SCALES, x, w, c, target)
            return
        if c is None:
            beta = 0
        elif c is not target:
            target[...] = c
        if alpha != 0 and x.size and w.size:
            self._operations.gemm(alpha, x, w, beta, target, self.options.compute)
        elif beta == 0:
            target[...] = 0
        else:
            target *= beta

    def _sum_scaled(self, given: Scales, x: Array, w: Array, c: Array | None, target: Array) -> None:
        """Compute ``target = alpha (a x) (b w) + beta c`` in float32, with the scales' current values."""
        options, exact = self.options, accumulation_dtype(self.p.dtype)
        scales = [scale for scale in (given.a, given.b) if scale is not None]
        numbers = [scale for scale in scales if isinstance(scale, (int, float))]
        separate = target.dtype != exact or c is target
        product = self._operations.scratch("product", target.shape, exact) if separate else target
        if options.alpha != 0 and x.size and w.size:
            self._operations.gemm(math.prod([options.alpha, *numbers]), x, w, 0, product, options.compute)
            for scale in scales:
                if not isinstance(scale, (int, float)):
                    product *= scale.reshape(())
        else:
            product[...] = 0
        if c is not None:
            product += options.beta * c.astype(exact)
        if separate:
            target[...] = product

    def _share_amax(self, amax: Array) -> None:
        """Replace amax by the largest of all ranks, since every rank has all of D."""
        if self.size == 1:
            return
        found = self._operations.scratch("amax", (self.size, 1), np.dtype(np.float32))
        found[self.rank] = amax.reshape(1)
        mine, others = found[self.rank], [(found[source], source) for source in reversed(self.peers)]
        self._transport.start([(mine, to) for to in self.peers], others).finish()
        amax[...] = found.max()


class TensorMethod(Method):
    """A tensor-parallel product, for some of its forms.

    Attributes:
        forms: those that it computes.
    """

    forms: tuple[str, ...] = tuple(FORMS)
    refuses_sizes = False

    def serves(self, problem: AnyProblem) -> bool:
        if isinstance(problem, MatmulProblem):
            return problem.scheme in self.forms
        return isinstance(problem, ParallelProblem) and problem.form in self.forms

    def view(self, problem: AnyProblem) -> AnyProblem | str:
        """Return a problem as a tensor-parallel product, or why it is not one. Local."""
        return ParallelProblem.of_matmul(problem) if isinstance(problem, MatmulProblem) else problem
