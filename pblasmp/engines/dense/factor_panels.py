# SPDX-License-Identifier: Apache-2.0
"""Panels: a matrix as block columns, dealt round the ranks that work on it. Factorizations compute on these.

A block-cyclic matrix of any blocks, grid, order and offset is moved into panels, factored there, and moved back: so one
program serves every layout, blocks of 16 are as fast as blocks of 128, and a panel, which one rank has whole, is
factored by the local LAPACK without any communication.

On one node all panels are one array in the memory that the ranks share. A rank copies its blocks there; then as many
ranks work as there are cores, and "sending" a panel is raising a flag. Between nodes, and on GPUs, each rank has its
own panels, and gets the others' by messages.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm.shared_memory import Progress, aligned, carve
from ...layout import MatrixDescriptor, Trapezoid
from ...layout.pieces import CopiedParts
from ..arrays import move, same_memory, set_diagonal, window_of
from ..operations import Operations
from ..protocol import Engine
from ..request import LocalArray
from .panel_shape import PanelShape, are_split, is_shared
from .reflector import Reflector

Array = Any

SLAB = 8192  # columns of a triangle that are moved at a time, at least
_SLABS = 8  # block columns of a triangle that are moved, at most


class FactorPanels:
    """The panels of one matrix during a run. Making one is local.

    Attributes:
        shape: their number and sizes.
        dtype: their element type.
        rank: this rank; it works if there are more workers.
        mine: the numbers of this rank's panels, ascending.
        info: of each panel, what LAPACK said of it: 0, or the index of the fault counted from 1. Valid once fetched.
        pivots: row i was exchanged with ``pivots[i]``, both in the whole matrix, the latter counted from 1. Likewise.
        blocks: of each panel of reflectors, T. Likewise.
        sends: panels travel as messages, so that all workers take part whenever one is fetched.
        whole_rows: a panel has all rows on one rank.
    """

    sends: bool
    whole_rows = True

    def __init__(
        self, shape: PanelShape, dtype: np.dtype, rank: int, info: Array, pivots: Array, blocks: Array | None
    ) -> None:
        self.shape, self.dtype, self.rank = shape, dtype, rank
        self.info, self.pivots, self.blocks = info, pivots, blocks
        self.mine = shape.numbers(rank)

    def has(self, k: int) -> bool:
        """Return whether panel ``k``, or a part of it, is this rank's. Local."""
        return self.rank < self.shape.workers and self.shape.has(self.rank, k)

    def own(self, k: int) -> Array:
        """Return panel ``k``, one of this rank's, from its first row. Local."""
        raise NotImplementedError

    def run(self, numbers: Sequence[int]) -> Array:
        """Return adjacent panels of this rank as one array: those of a group that ``later`` yields. Local."""
        return self.own(numbers[0])

    @property
    def rows(self) -> Any:
        """Which rows of the matrix this rank has, to index an array that has all: here all. Local."""
        return slice(None)

    def upto(self, row: int) -> int:
        """Return how many of this rank's rows come before a row of the matrix. Local."""
        return row

    def arrays(self) -> list[Array]:
        """Return this rank's columns: its panels, or all together. Local."""
        return [self.own(k) for k in self.mine]

    def square(self, k: int) -> Array:
        """Return the diagonal block of panel ``k``, one of this rank's; without rows, if another rank has it. Local."""
        first, stop = self.shape.bounds(k)
        return self.own(k)[first:stop]

    def above(self, xp: Any, k: int) -> list[Array]:
        """Return what this rank has of an upper triangle in panel ``k``: arrays, one at least with a row. Local."""
        parts = [self.own(k)[: self.upto(self.shape.bounds(k)[0])], xp.triu(self.square(k))]
        return [part for part in parts if len(part)] or [xp.zeros((1, parts[0].shape[1]), self.dtype)]

    def publish(self, k: int) -> None:
        """Let the other workers have panel ``k``, which is this rank's, as it is. Local."""
        raise NotImplementedError

    def fetch(self, k: int) -> Array:
        """Return panel ``k``, to read, from the row of its first diagonal element on, when it has been published.

        Collective over the workers.
        """
        raise NotImplementedError

    def begin(self, *, delays: bool = False) -> None:
        """Begin a factorization or a solve; with ``delays`` an update may wait for more panels. Local."""

    def ahead(self) -> AbstractContextManager[None]:
        """Return a context for work that the other ranks wait for. Local."""
        return contextlib.nullcontext()

    def potrf(self, operations: Operations, k: int) -> None:
        """Factor panel ``k`` of a positive definite matrix, which is this rank's and has been updated. Local."""
        first = self.shape.bounds(k)[0]
        operations.potrf(self.own(k)[first:], self.info[k : k + 1], first)

    def subtract(self, operations: Operations, panel: Array, k: int, blocks: Sequence[Sequence[int]]) -> None:
        """Subtract from panels of this rank, from their diagonal on, what a panel contributes. Local.

        Args:
            operations: the engine's.
            panel: a panel, or several, as ``fetch`` and ``joined`` return them: its rows are multiplied by the adjoint
                of those of a block's columns.
            k: the number of the first.
            blocks: the numbers of the panels that are updated, adjacent ones together.
        """
        top = k * self.shape.width
        for numbers in blocks:
            first, stop = numbers[0] * self.shape.width, self.shape.bounds(numbers[-1])[1]
            right = panel[first - top : stop - top]
            adjoint = right.T.conj() if right.dtype.kind == "c" else right.T
            operations.gemm(-1, panel[first - top :], adjoint, 1, self.run(numbers)[first:])

    def getrf(self, operations: Operations, k: int) -> None:
        """Factor panel ``k`` with partial pivoting; it is this rank's and has been updated. Local."""
        first, stop = self.shape.bounds(k)
        pivots = self.pivots[first : min(stop, self.shape.rows)]
        operations.getrf(self.own(k)[first:], pivots, self.info[k : k + 1], first)

    def eliminate(self, operations: Operations, panel: Array, k: int, group: Sequence[int]) -> None:
        """Update adjacent panels of this rank with L of panel ``k``, as ``fetch`` returned it. Local."""
        first, stop = self.shape.bounds(k)
        end = min(stop, self.shape.rows)
        square, below = panel[: end - first, : end - first], panel[end - first :, : end - first]
        x = self.run(group)
        operations.swap_rows(x, first, end, self.pivots)
        operations.trsm(1, square, x[first:end], lower=True, unit=True)
        operations.gemm(-1, below, x[first:end], 1, x[end:])

    def swap_left(self, operations: Operations) -> None:
        """Exchange rows of this rank's panels as the panels to the right of each have done. Local."""
        for own, first, last in self.exchanged():
            operations.swap_rows(own, first, last, self.pivots)

    def reflectors(self, k: int) -> int:
        """Return how many reflectors panel ``k`` has. Local."""
        first, stop = self.shape.bounds(k)
        return min(stop, self.shape.rows) - first

    def geqrt(self, operations: Operations, k: int) -> None:
        """Factor panel ``k`` by reflectors; it is this rank's and has been updated. Local."""
        assert self.blocks is not None
        count, panel, t = self.reflectors(k), self.own(k)[self.shape.bounds(k)[0] :], self.blocks[k]
        operations.geqrt(panel[:, :count], t[:count, :count])
        if count < panel.shape[1]:
            Reflector(operations, panel, t, count, adjoint=True).apply(panel[:, count:])

    def reflect(self, operations: Operations, panel: Array, k: int, x: Array, *, adjoint: bool) -> None:
        """Multiply columns by the reflectors of panel ``k``, as ``fetch`` returned it, or by their adjoint. Local."""
        assert self.blocks is not None
        count, t, x = self.reflectors(k), self.blocks[k], x[self.shape.bounds(k)[0] :]
        if operations.gemqrt is not None:
            operations.gemqrt(panel[:, :count], t[:count, :count], x, adjoint=adjoint)
        else:
            Reflector(operations, panel, t, count, adjoint=adjoint).apply(x)

    def reflector(self, operations: Operations, k: int) -> Array:
        """Return panel ``k`` of reflectors from its diagonal on when all are final, for ``reflect``.

        Collective over the workers, in one order.
        """
        return self.again(k, slice(self.shape.bounds(k)[0], None))

    def set_factors(self, operations: Operations, tau: Array) -> None:
        """Write the Ts of this rank's panels of reflectors, whose factors are ``tau``. Local."""
        assert self.blocks is not None
        for k in self.mine:
            if k >= self.shape.steps:
                break
            first, count = self.shape.bounds(k)[0], self.reflectors(k)
            factors = operations.xp.asarray(np.ascontiguousarray(tau[first : first + count]))
            operations.larft(self.own(k)[first:, :count], factors, self.blocks[k][:count, :count])

    def total(self, sums: Array) -> Array:
        """Return sums over this rank's rows, one of each of its columns, added up for all rows. Collective."""
        return sums

    def factors(self) -> Array:
        """Return the factors of all reflectors: the diagonals of the Ts. After a fence; local."""
        assert self.blocks is not None
        return self.blocks[: self.shape.steps].diagonal(axis1=1, axis2=2).reshape(-1)

    def later(self, k: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield groups of this rank's panels that panel ``k`` updates; panel ``k + 1`` comes first, alone. Local.

        Before each group comes the first of the panels up to ``k`` that it has not been updated with.
        """
        for j in self.mine:
            if j > k:
                yield k, (j,)

    def joined(self, first: int, k: int) -> Array:
        """Return panels ``first`` to ``k``, as ``later`` has named them, from the first one's diagonal on. Local."""
        raise NotImplementedError

    def exchanged(self) -> Iterator[tuple[Array, int, int]]:
        """Yield this rank's panels with the pivots, from and to, of later panels: those exchange their rows. Local."""
        least = min(self.shape.rows, self.shape.cols)
        for j in self.mine:
            yield self.own(j), self.shape.bounds(j)[1], least

    def failed(self, k: int) -> bool:
        """Return whether panel ``k`` is known to have a fault that makes the rest of the work useless. Local."""
        return bool(self.info[k])

    def settle(self) -> None:
        """Wait until this rank's panels may be overwritten. Local."""

    def above_kept(self) -> AbstractContextManager[None]:
        """Return a context at whose end what was above the diagonal of a square matrix is there again. Local."""
        return contextlib.nullcontext()

    def set_identity(self, xp: Any) -> None:
        """Write the identity, or its first columns, into this rank's panels. Local."""
        for k in self.mine:
            self.own(k)[...] = 0
            set_diagonal(xp, self.square(k), 1)

    def again(self, k: int, rows: slice) -> Array:
        """Return rows of panel ``k``, to read, when all are final. Collective over the workers, in one order."""
        raise NotImplementedError

    def strips(self) -> Iterator[tuple[int, ...]]:
        """Yield the numbers of panels that are read together, since ``begin``. Local."""
        for k in range(self.shape.panels):
            yield (k,)

    def strip(self, numbers: Sequence[int], rows: slice) -> Array:
        """Return rows of panels that ``strips`` has yielded, side by side; see ``again``."""
        return self.again(numbers[0], rows)


class SharedPanels(FactorPanels):
    """All panels as one array of the node's memory, or the only rank's own array if ``given``. Making one is local."""

    sends = False

    def __init__(self, whole: Array, progress: Progress | None, *about: Any, given: bool = False) -> None:
        super().__init__(*about)
        self.whole, self.given, self._progress = whole, given, progress

    def own(self, k: int) -> Array:
        first, stop = self.shape.bounds(k)
        return self.whole[:, first:stop]

    def again(self, k: int, rows: slice) -> Array:
        return self.own(k)[rows]

    def publish(self, k: int) -> None:
        if self._progress is not None:
            self._progress.done(k)

    def fetch(self, k: int) -> Array:
        if self._progress is not None:
            self._progress.wait(k)
        return self.own(k)[self.shape.bounds(k)[0] :]


class OwnPanels(FactorPanels):
    """This rank's panels in an array of its own, in F order; the others' come by messages. Making one is local."""

    sends = True

    def __init__(self, engine: Engine, array: Array, *about: Any, given: bool = False) -> None:
        super().__init__(*about)
        self.engine, self.array, self.given = engine, array, given

    def own(self, k: int) -> Array:
        """Return panel ``k``, one of this rank's. Local."""
        return self.run((k,))

    def run(self, numbers: Sequence[int]) -> Array:
        """Return adjacent panels of this rank as one array. Local."""
        shape = self.shape
        last, stop = shape.bounds(numbers[-1])
        rounds = ((k // shape.group // shape.across, k % shape.group) for k in (numbers[0], numbers[-1]))
        at, end = ((before * shape.group + within) * shape.width for before, within in rounds)
        return self.array[:, at : end + stop - last]

    def about(self, k: int) -> list[Array]:
        """Return what accompanies panel ``k``."""
        first, stop = self.shape.bounds(k)
        about = [self.info[k : k + 1], self.pivots[first:stop]]
        if self.blocks is not None:
            about.append(self.blocks[k])
        return [each for each in about if each.size]


class Workbench:
    """The place where one kind of call computes: panels of its matrices, made anew for each run in memory that is kept.

    Making one is collective over the context.

    Args:
        engine: where.
        shapes: the panels of each matrix.
        dtype: their element type.
        reflectors: the first matrix's panels get a T each.

    Raises:
        UnsupportedError: the engine has no LAPACK for its arrays.
        MemoryError: a node has no room for them.
    """

    def __init__(
        self, engine: Engine, shapes: Sequence[PanelShape], dtype: np.dtype, *, reflectors: bool = False
    ) -> None:
        self.engine, self._shapes, self._dtype, self._reflectors = engine, shapes, dtype, reflectors
        self.operations = engine.operations
        self.rank = engine.transport.rank
        self.shared = is_shared(engine)
        item = dtype.itemsize
        first = shapes[0]
        sizes = [8 * first.panels, 4 * first.panels, 4 * (min(first.rows, first.cols) + first.width)]
        # on a grid only the ranks with a panel's diagonal block have its T, and the others its diagonal
        self._block = (first.width,) if first.grid is not None else (first.width, first.width)
        sizes.append(first.panels * math.prod(self._block) * item if reflectors else 0)
        self._ld = [_leading(shape.rows, item) for shape in shapes]
        sizes += [ld * shape.cols * item for ld, shape in zip(self._ld, shapes, strict=True)]
        self._at = list(itertools.accumulate((aligned(size, 64) for size in sizes), initial=0))
        self.nbytes = self._at[-1]
        on_grid = self.operations.split_panels if are_split(engine) else self.operations.grid_panels
        self._own = self.operations.own_panels if first.grid is None else on_grid
        if self.shared and not engine.transport.fits(self.nbytes)[0]:
            raise MemoryError(
                f"a factorization needs {self.nbytes} bytes that the ranks of a node share, which are not available"
            )

    def panels(self, *places: LocalArray) -> list[FactorPanels]:
        """Return the panels for a run, uninitialized. Collective over the context.

        Args:
            places: for each matrix an array that may be computed in, as ``Mover.place`` returns it, or None.
        """
        transport: Any = self.engine.transport  # which has ``progress`` if the ranks share panels
        first, item = self._shapes[0], self._dtype.itemsize
        together = self.shared and transport.size > 1
        facts = transport.buffer("panel facts", self._at[3], shared=together)
        memory = None
        if self.shared:
            memory = transport.buffer("panels", self.nbytes - self._at[4], shared=together)
        flags, info, pivots = (facts[a:b] for a, b in itertools.pairwise(self._at[:4]))
        flags, info, pivots = (
            flags[: 8 * first.panels].view(np.int64),
            info[: 4 * first.panels].view(np.int32),
            pivots.view(np.int32),
        )
        reflectors = None
        if self._reflectors:
            blocks = transport.buffer("reflectors", self._at[4] - self._at[3], shared=together)
            reflectors = blocks[: first.panels * math.prod(self._block) * item].view(self._dtype)
            reflectors = reflectors.reshape(first.panels, *self._block)
            if len(self._block) == 2:
                reflectors = reflectors.transpose(0, 2, 1)
        if not self.shared or self.rank == 0:
            flags[...] = 0
            info[...] = 0
        out: list[FactorPanels] = []
        for i, (shape, ld) in enumerate(zip(self._shapes, self._ld, strict=True)):
            about = (shape, self._dtype, self.rank, info, pivots, reflectors)
            place = places[i] if i < len(places) else None
            if self.shared:
                at = self._at[4 + i] - self._at[4]
                if place is not None:
                    out.append(SharedPanels(place, None, *about, given=True))
                    continue
                assert memory is not None
                whole = carve(memory, at, (ld, shape.cols), self._dtype, "F")[: shape.rows]
                alone = i or shape.workers == 1
                out.append(SharedPanels(whole, None if alone else transport.progress(flags), *about))
                continue
            own = self.described(i).local_shape(self.rank) if self.rank < shape.workers else (0, 0)
            array = place
            if array is None:
                array = self.engine.operations.scratch(f"panels {i}", own, self._dtype, "F")
            out.append(self._own(self.engine, array, *about, given=place is not None))
        return out

    def fence(self) -> None:
        """Wait until every rank has written what the others read in shared panels. Collective over the context."""
        if self.shared and self.engine.transport.size > 1:
            self.engine.transport.fence()

    def handed_in(self, panels: Sequence[FactorPanels]) -> None:
        """Wait as ``fence`` does, but only if this rank works on one of these panels. Collective over the context.

        The other ranks must not read or write shared panels before the next fence.
        """
        transport: Any = self.engine.transport
        if self.shared and transport.size > 1:
            if any(self.rank < each.shape.workers for each in panels):
                transport.fence()
            else:
                transport.arrive()

    def fault(self, panels: FactorPanels) -> int:
        """Return the least index, from 1, that LAPACK found fault with, or 0. After a fence; local."""
        info = self.on_host(panels.info)
        found = info[info > 0]
        return int(found.min()) if found.size else 0

    def on_host(self, vector: Array) -> NDArray[Any]:
        """Return the values of a vector, waiting for what computes them. Local."""
        if not vector.size:
            return np.empty(0, vector.dtype)
        return self.engine.to_host(vector.reshape(1, -1)).reshape(-1)

    def diagonal(self, panels: FactorPanels) -> Array:
        """Return the diagonal of a matrix in panels, a copy on every rank. After a fence; collective."""
        if isinstance(panels, SharedPanels):
            return panels.whole.diagonal().copy()
        squares = {k: square for k in panels.mine if len(square := panels.square(k))}
        own = [square.diagonal() for square in squares.values()]
        ends = list(itertools.accumulate((len(part) for part in own), initial=0))
        together = self.engine.xp.empty(ends[-1], self._dtype)
        for part, start, stop in zip(own, ends, ends[1:], strict=False):
            together[start:stop] = part
        values = self.on_host(together)
        parts = {k: values[start:stop] for k, start, stop in zip(squares, ends, ends[1:], strict=False)}
        everyone = self.engine.transport.comm.allgather(parts)
        known = {k: part for each in everyone for k, part in each.items()}
        return np.concatenate([np.empty(0, self._dtype), *(known[k] for k in sorted(known))])

    def permute_columns(self, panels: FactorPanels, order: Array) -> None:
        """Put column ``order[j]`` of shared panels in the place of column j. Local; fences come before and after."""
        assert isinstance(panels, SharedPanels)
        rows, workers = panels.shape.rows, panels.shape.workers
        if self.rank < workers:
            mine = panels.whole[rows * self.rank // workers : rows * (self.rank + 1) // workers]
            mine[...] = mine[:, order]

    def may_compute_in(self, i: int, d: MatrixDescriptor, local: LocalArray) -> bool:
        """Return whether a local array in the layout ``d`` can be this rank's panels of matrix ``i``. Local.

        If matrices are moved between ranks, it is the same on every rank.
        """
        on_grid = self.operations.own_panels is None or self._shapes[0].grid is not None
        if on_grid and are_split(self.engine) and self.engine.transport.size > 1:
            return False
        if not self.shared:
            alone = self.engine.transport.size == 1
            panels = self._shapes[i].described(self._dtype, d.grid.size)
            if d.order != "F" or not (alone or d.same_places(panels)):
                return False
        return bool(local.strides[0] == local.itemsize or len(local) <= 1)

    def shape(self, i: int) -> PanelShape:
        """Return the panels of matrix ``i``. Local."""
        return self._shapes[i]

    def described(self, i: int) -> MatrixDescriptor:
        """Return matrix ``i`` in panels that ranks have for themselves, as a layout. Local."""
        return self._shapes[i].described(self._dtype)


class Mover:
    """Moves a matrix of a call between its layout and panels. Collective over the context to make.

    Args:
        bench: where the panels are.
        i: which of its matrices.
        d: the layout.
        lower: only the lower triangle or trapezoid is moved.
        strictly: nor is its diagonal moved out.
        conjugate: the panels hold the conjugate.
    """

    def __init__(
        self,
        bench: Workbench,
        i: int,
        d: MatrixDescriptor,
        *,
        lower: bool = False,
        strictly: bool = False,
        conjugate: bool = False,
    ) -> None:
        self._bench, self._d, self._i = bench, d, i
        self._part = Trapezoid("L", -int(strictly)) if lower else None
        self.conjugate = conjugate and d.dtype.kind == "c"
        self._moved = CopiedParts(d, bench.rank, lower=lower, strictly=strictly) if bench.shared else None

    def place(self, local: LocalArray, same: LocalArray, *apart: LocalArray) -> LocalArray:
        """Return ``local`` if panels may be computed in it, or None. Local.

        Args:
            local: the matrix's local array, which the call overwrites or leaves as it is.
            same: the array that is moved there, which may be this one.
            apart: the call's other arrays, or None: computing must not spoil what they hold.
        """
        bench, overlap = self._bench, self._bench.engine.overlap
        if local is None or self.conjugate or not bench.may_compute_in(self._i, self._d, local):
            return None
        if not (same is None or same_memory(same, local) or not overlap(same, local)):
            return None
        return None if any(x is not None and overlap(x, local) for x in apart) else local

    def into(self, local: LocalArray, panels: FactorPanels) -> None:
        """Move the matrix into panels. Collective over the context; with shared panels a fence must follow."""
        if self._moved is not None:
            assert isinstance(panels, SharedPanels)
            if not (panels.given and same_memory(local, panels.whole)):
                self._moved.into(local, panels.whole, conjugate=self.conjugate, exactly=panels.given)
            return
        assert isinstance(panels, OwnPanels)
        if panels.given and same_memory(local, panels.array):
            return
        rows, xp = self._d.shape[0], self._bench.engine.xp
        part = self._part if panels.given else None
        self._move(self._d, local, self._bench.described(self._i)[:rows, :], panels.array[:rows], part)
        if self.conjugate:
            xp.conjugate(panels.array, out=panels.array)

    def back(self, local: LocalArray, panels: FactorPanels) -> None:
        """Move the matrix out of panels, which keep it. Collective over the context; with shared ones after a fence."""
        if self._moved is not None:
            assert isinstance(panels, SharedPanels)
            if not (panels.given and same_memory(local, panels.whole)):
                self._moved.back(local, panels.whole, conjugate=self.conjugate)
            return
        assert isinstance(panels, OwnPanels)
        if panels.given and same_memory(local, panels.array):
            return
        rows, xp = self._d.shape[0], self._bench.engine.xp
        described = self._bench.described(self._i)[:rows, :]
        if self.conjugate:
            xp.conjugate(panels.array, out=panels.array)
        self._move(described, panels.array[:rows], self._d, local, self._part)
        if self.conjugate:  # the caller may go on with them
            xp.conjugate(panels.array, out=panels.array)

    def _move(
        self,
        d: MatrixDescriptor,
        array: Array,
        to: MatrixDescriptor,
        out: Array,
        part: Trapezoid | None = None,
    ) -> None:
        """Move a matrix; of a lower triangle, in block columns from the diagonal on, little more than itself."""
        bench, (rows, cols) = self._bench, d.shape
        width = max(1, cols)
        if self._part is not None and not d.same_places(to):
            shape = bench.shape(self._i)
            unit = shape.width * shape.group * shape.workers
            width = -(-max(SLAB, cols // _SLABS) // unit) * unit
        for first in range(0, cols, width):
            top = 0 if width >= cols else min(first, rows)
            window = slice(top, rows), slice(first, min(first + width, cols))
            arrays = window_of(array, d, bench.rank, window), window_of(out, to, bench.rank, window)
            move(bench.engine, d[window], to[window], arrays, part)


def _leading(rows: int, item: int) -> int:
    """Return a leading dimension that keeps columns out of each other's way in the caches."""
    ld = -(-max(1, rows) * item // 64) * 64 // item
    return ld + 64 // item if ld * item % 1024 == 0 else ld


def real_diagonal(xp: Any, panels: FactorPanels) -> None:
    """Make the diagonal of a Hermitian matrix in this rank's panels real, as rounding has not. Local."""
    for k in panels.mine if panels.dtype.kind == "c" else ():
        square = panels.square(k)
        # A copy: CuPy takes an assignment of parts of the same numbers, of another type, for one of itself.
        set_diagonal(xp, square, square.diagonal().real.copy())
