# SPDX-License-Identifier: Apache-2.0
"""The place where a factorization computes: panels of its matrices in kept memory, and moves into them and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Agreement
from ...comm.shared_memory import aligned, carve
from ...layout import MatrixDescriptor, Trapezoid
from ...layout.factor_problem import FactorProblem
from ...layout.pieces import CopiedParts
from ..arrays import move, same_memory, window_of
from ..product import Found, Product, Workspace
from ..protocol import Engine
from ..request import LocalArray, Operands
from .factor_panels import Array, FactorPanels, SharedPanels
from .panel_shape import PanelShape, are_few, are_split, is_shared

SLAB = 8192  # columns of a triangle that are moved at a time, at least
_SLABS = 8  # block columns of a triangle that are moved, at most


class Workbench:
    """The place where one kind of call computes: panels of its matrices, made anew for each run in memory that is kept.

    Making one is collective over the context.

    Args:
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

    def workspace(self, placed: Sequence[bool], *, delays: bool | None) -> Workspace:
        """Return the memory of a run on this rank. Local.

        Args:
            placed: of each matrix, as far as it is said, whether it is computed in an array of the call.
            delays: as of ``PanelsProduct``.
        """
        if self.shared:
            return self.operations.workspace(self.nbytes)
        nbytes, item, first = self._at[4], self._dtype.itemsize, self._shapes[0]
        if self.rank < first.workers:
            carried = 4, 4 * first.width, math.prod(self._block) * item if self._reflectors else 0
            nbytes += self._own.extra_bytes(first, self._dtype, self.rank, carried, delays=delays)
            for right in self._shapes[1:2]:
                if right.workers < first.workers or (first.grid is not None and are_few(first, right.cols)):
                    nbytes += 2 * right.rows * right.cols * item  # spread over the workers, or terms of them
        for i, shape in enumerate(self._shapes):
            if self.rank < shape.workers and not (i < len(placed) and placed[i]):
                nbytes += math.prod(self.described(i).local_shape(self.rank)) * item
        return self.operations.workspace(nbytes, apart=True)

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
                    out.append(self.operations.shared_panels(place, None, *about, given=True))
                    continue
                assert memory is not None
                whole = carve(memory, at, (ld, shape.cols), self._dtype, "F")[: shape.rows]
                alone = i or shape.workers == 1
                progress = None if alone else transport.progress(flags)
                out.append(self.operations.shared_panels(whole, progress, *about))
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
            return panels.array.diagonal().copy()
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
            mine = panels.array[rows * self.rank // workers : rows * (self.rank + 1) // workers]
            mine[...] = mine[:, order]

    def may_compute_in(self, i: int, d: MatrixDescriptor) -> bool:
        """Return whether local arrays in the layout ``d`` can be the ranks' panels of matrix ``i``. Local.

        If matrices are moved between ranks, it is the same on every rank.
        """
        on_grid = self.operations.own_panels is None or self._shapes[0].grid is not None
        if on_grid and are_split(self.engine) and self.engine.transport.size > 1:
            return False
        alone = self.engine.transport.size == 1
        panels = self._shapes[i].described(self._dtype, d.grid.size)
        return self.shared or (d.order == "F" and (alone or d.same_places(panels)))

    def shape(self, i: int) -> PanelShape:
        """Return the panels of matrix ``i``. Local."""
        return self._shapes[i]

    def described(self, i: int) -> MatrixDescriptor:
        """Return matrix ``i`` in panels that ranks have for themselves, as a layout. Local."""
        return self._shapes[i].described(self._dtype)


class Mover:
    """Moves a matrix of a call between its layout and panels. Collective over the context to make.

    Args:
        i: which of its matrices.
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

    @property
    def in_place(self) -> bool:
        """Whether panels may be computed in the matrix's local array, as far as its layout says."""
        return not self.conjugate and self._bench.may_compute_in(self._i, self._d)

    def place(self, local: LocalArray, same: LocalArray, *apart: LocalArray) -> LocalArray:
        """Return ``local`` if panels may be computed in it, or None. Local.

        Args:
            local: the matrix's local array, which the call overwrites or leaves as it is.
            same: the array that is moved there, which may be this one.
            apart: the call's other arrays, or None: computing must not spoil what they hold.
        """
        overlap = self._bench.engine.overlap
        if local is None or not (self.in_place and (local.strides[0] == local.itemsize or len(local) <= 1)):
            return None
        if not (same is None or same_memory(same, local) or not overlap(same, local)):
            return None
        return None if any(x is not None and overlap(x, local) for x in apart) else local

    def into(self, local: LocalArray, panels: FactorPanels) -> None:
        """Move the matrix into panels. Collective over the context; with shared panels a fence must follow."""
        array = panels.array
        if panels.given and same_memory(local, array):
            return
        if self._moved is not None:
            self._moved.into(local, array, conjugate=self.conjugate, exactly=panels.given)
            return
        described, rows = self._described()
        self._move(self._d, local, described, array[:rows], self._part if panels.given else None)
        if self.conjugate:
            self._bench.engine.xp.conjugate(array, out=array)

    def back(self, local: LocalArray, panels: FactorPanels) -> None:
        """Move the matrix out of panels, which keep it. Collective over the context; with shared ones after a fence."""
        array, xp = panels.array, self._bench.engine.xp
        if panels.given and same_memory(local, array):
            return
        if self._moved is not None:
            self._moved.back(local, array, conjugate=self.conjugate)
            return
        described, rows = self._described()
        if self.conjugate:
            xp.conjugate(array, out=array)
        self._move(described, array[:rows], self._d, local, self._part)
        if self.conjugate:  # the caller may go on with them
            xp.conjugate(array, out=array)

    def _described(self) -> tuple[MatrixDescriptor, int]:
        """Return the matrix in panels that ranks have for themselves, as a layout, and its rows. Local."""
        rows = self._d.shape[0]
        return self._bench.described(self._i)[:rows, :], rows

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


class PanelsProduct(Product):
    """A factorization on panels, or what is solved with one. Making and running one is collective over the context.

    Matrices are moved to panels, computed with there, and moved back.

    Raises:
        UnsupportedError: the engine has no LAPACK for its arrays.
        MemoryError: a node has no room for the panels.
    """

    path = "panels"
    delays: bool | None = False
    """As of ``FactorPanels.begin``; None: all panels stay where they are."""
    _bench: Workbench

    def __init__(self, engine: Engine, problem: FactorProblem) -> None:
        self._engine, self._operations, self._problem = engine, engine.operations, problem
        try:
            self._prepare()
        except MemoryError as error:  # the same on every rank
            with Agreement(engine.transport.comm, problem.routine):
                raise error from None
        placed = [each is not None and each.in_place for each in self._places()]
        self.workspace = self._bench.workspace(placed, delays=self.delays)

    def _queue(self, operands: Operands) -> Found:
        with self._operations.factoring():
            return self._compute(operands)

    def _prepare(self) -> None:
        """Make the bench, and what moves matrices there and back. Collective over the context."""
        raise NotImplementedError

    def _places(self) -> Sequence[Mover | None]:
        """Return what moves each matrix of the bench that may be computed in an array of the call. Local."""
        return ()

    def _compute(self, given: Operands) -> Found:
        """Compute, and return what was found. Collective over the context."""
        raise NotImplementedError

    def _mover(self, i: int, d: MatrixDescriptor | None, **how: bool) -> Mover | None:
        """Return what moves a matrix to panels ``i`` and back, None if there is none."""
        return None if d is None else Mover(self._bench, i, d, **how)


def _leading(rows: int, item: int) -> int:
    """Return a leading dimension that keeps columns out of each other's way in the caches."""
    ld = -(-max(1, rows) * item // 64) * 64 // item
    return ld + 64 // item if ld * item % 1024 == 0 else ld
