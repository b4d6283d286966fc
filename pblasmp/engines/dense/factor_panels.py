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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ...comm.shared_memory import Progress
from ..arrays import adjoint_of, set_diagonal
from ..operations import Operations
from ..protocol import Engine
from .panel_shape import PanelShape

Array = Any


class Reflector:
    """I - V T V^H of one panel, or a rank's rows of V, as what applies it needs it. Local.

    Args:
        panel: the panel from its diagonal on, whose columns up to ``count`` are V below the diagonal; or rows of it.
        t: T; None where only ``products`` and ``subtract`` are needed.
        count: how many reflectors there are.
        adjoint: the adjoint is applied.
        below: the rows are below the diagonal block.
    """

    def __init__(
        self,
        operations: Operations,
        panel: Array,
        t: Array,
        count: int,
        *,
        adjoint: bool,
        below: bool = False,
    ) -> None:
        xp = operations.xp
        self._operations, self._count = operations, 0 if below else count
        self._rest = panel[self._count :, :count]
        self._top = None
        if not below:
            self._top = xp.tril(panel[:count, :count], -1)
            set_diagonal(xp, self._top, 1)
        self._t = None
        if t is not None:
            t = xp.triu(t[:count, :count])
            self._t = t.conj().T if adjoint else t

    def apply(self, x: Array) -> None:
        """Replace ``x`` by its product with it; the rows of V are all its rows."""
        w = self._operations.xp.empty((self._count, x.shape[1]), x.dtype, order="F")
        self.products(x, w)
        self.subtract(x, self.combined(w))

    def products(self, x: Array, w: Array) -> None:
        """Write V^H x to ``w``."""
        beta = 0
        if self._top is not None:
            self._operations.gemm(1, adjoint_of(self._top), x[: self._count], 0, w)
            beta = 1
        self._operations.gemm(1, adjoint_of(self._rest), x[self._count :], beta, w)

    def gram(self, products: Array) -> None:
        """Write V^H V to ``products``."""
        beta = 0
        if self._top is not None:
            self._operations.gemm(1, adjoint_of(self._top), self._top, 0, products)
            beta = 1
        self._operations.gemm(1, adjoint_of(self._rest), self._rest, beta, products)

    def combined(self, w: Array) -> Array:
        """Return T w, or the product with its adjoint."""
        w2 = self._operations.xp.empty_like(w)
        self._operations.gemm(1, self._t, w, 0, w2)
        return w2

    def subtract(self, x: Array, w: Array) -> None:
        """Subtract V w from ``x``."""
        if self._top is not None:
            self._operations.gemm(-1, self._top, w, 1, x[: self._count])
        self._operations.gemm(-1, self._rest, w, 1, x[self._count :])


class FactorPanels:
    """The panels of one matrix during a run. Making one is local.

    Attributes:
        shape: their number and sizes.
        rank: this rank; it works if there are more workers.
        mine: the numbers of this rank's panels, ascending.
        info: of each panel, what LAPACK said of it: 0, or the index of the fault counted from 1. Valid once fetched.
        pivots: row i was exchanged with ``pivots[i]``, both in the whole matrix, the latter counted from 1. Likewise.
        blocks: of each panel of reflectors, T. Likewise.
        array: the memory of this rank's panels, or of all.
        given: that is the local array of a call.
        sends: panels travel as messages, so that all workers take part whenever one is fetched.
        whole_rows: a panel has all rows on one rank.
    """

    sends: bool
    whole_rows = True
    array: Array
    given: bool

    def __init__(
        self, shape: PanelShape, dtype: np.dtype, rank: int, info: Array, pivots: Array, blocks: Array | None
    ) -> None:
        self.shape, self.dtype, self.rank = shape, dtype, rank
        self.info, self.pivots, self.blocks = info, pivots, blocks
        self.mine = shape.numbers(rank)

    @staticmethod
    def extra_bytes(
        shape: PanelShape, dtype: np.dtype, rank: int, carried: Sequence[int], *, delays: bool | None
    ) -> int:
        """Return how many bytes a rank keeps beside its panels, at most. Local.

        Args:
            rank: of the workers.
            carried: bytes of each array that accompanies a panel.
            delays: as for ``begin``; None: all panels stay where they are.
        """
        del shape, dtype, rank, carried, delays
        return 0

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
            panel: a panel, or several, as ``fetch`` and ``joined`` return them: its rows are multiplied by the adjoint
                of those of a block's columns.
            k: the number of the first.
            blocks: the numbers of the panels that are updated, adjacent ones together.
        """
        top = k * self.shape.width
        for numbers in blocks:
            first, stop = numbers[0] * self.shape.width, self.shape.bounds(numbers[-1])[1]
            right = panel[first - top : stop - top]
            operations.gemm(-1, panel[first - top :], adjoint_of(right), 1, self.run(numbers)[first:])

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
        self.array, self.given, self._progress = whole, given, progress

    def own(self, k: int) -> Array:
        first, stop = self.shape.bounds(k)
        return self.array[:, first:stop]

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
        return self.run((k,))

    def run(self, numbers: Sequence[int]) -> Array:
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


def real_diagonal(xp: Any, panels: FactorPanels) -> None:
    """Make the diagonal of a Hermitian matrix in this rank's panels real, as rounding has not. Local."""
    for k in panels.mine if panels.dtype.kind == "c" else ():
        square = panels.square(k)
        # A copy: CuPy takes an assignment of parts of the same numbers, of another type, for one of itself.
        set_diagonal(xp, square, square.diagonal().real.copy())
