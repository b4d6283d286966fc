# SPDX-License-Identifier: Apache-2.0
"""Panels on a grid of CPU ranks: what a rank gets falls with the square root of their number.

The matrix is block-cyclic in both directions, in square blocks. Of a panel, which a process column has, each rank gets
only the rows that its process row has of the trailing matrix, along that row. What it needs of the other factor of an
update travels along its process column: rows of L again (Cholesky), rows of U (LU), sums of V^H A (QR).

A panel of LU or QR is factored by one rank of the process column, each in turn, which gets the rows of the others and
returns them. So it needs no message for each column, and pivots are LAPACK's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any

import numpy as np

from ...layout.axis import Axis
from ...layout.intersection import strided
from ..operations import Operations
from ..protocol import Engine, Transfer
from .factor_panels import OwnPanels, Reflector
from .panel_shape import PanelShape
from .tree import Line, Outbox

Array = Any


class SplitPanels(OwnPanels):
    """The panels of a matrix on a grid of CPU ranks. Making one is local.

    ``blocks`` has of each panel of reflectors only their factors.

    Attributes:
        row: this rank's process row.
        starts: where this rank has the first row of each panel's diagonal, and the end of its rows.
        across, down: the ranks of this process row, and of this process column.
        outbox: where what they are sent lies.
    """

    whole_rows = False

    def __init__(self, engine: Engine, array: Array, *about: Any, given: bool = False) -> None:
        super().__init__(engine, array, *about, given=given)
        shape, grid = self.shape, self.shape.grid
        assert grid is not None
        self._operations: Any = engine.operations
        self.outbox = Outbox(engine)
        self.row, self._col = grid.coords(self.rank)
        across, down = (
            [grid.rank(self.row, col) for col in range(grid.npcol)],
            [grid.rank(row, self._col) for row in range(grid.nprow)],
        )
        self._ranks = down
        self.across, self.down = (Line(engine, ranks, self.outbox) for ranks in (across, down))
        described = shape.described(self.dtype)
        self._rows: Axis = described.rows
        self._cols: Axis = described.cols
        ends = [0, *(min(shape.bounds(k)[1], shape.rows) for k in range(shape.panels)), shape.rows]
        self.starts = [self.upto(end) for end in ends]
        self._beside: tuple[int, Array] = (-1, None)  # what goes down with a panel, of later columns
        self._expected: tuple[list[Array], Transfer | None] | None = (
            None  # the next panel, which is under way
        )
        self._ts: list[Array] = [None, None]  # of the panels in flight, where their diagonal blocks are

    @staticmethod
    def extra_bytes(
        shape: PanelShape, dtype: np.dtype, rank: int, carried: Sequence[int], *, delays: bool | None
    ) -> int:
        """See ``FactorPanels``: of a panel that is factored all rows, and what travels with two. Local."""
        del delays
        rows, cols = shape.described(dtype).local_shape(rank)
        kept = shape.rows + 4 * rows + 3 * cols + 2 * shape.width
        return kept * shape.width * dtype.itemsize + 2 * sum(carried)

    def head(self, k: int) -> int:
        """Return the process row that has the diagonal block of panel ``k``."""
        return k % len(self._ranks)

    @property
    def rows(self) -> Array:
        return self._rows.globals(self.row)

    def upto(self, row: int) -> int:
        return self._upto(row, self.row)

    def _upto(self, row: int, process_row: int) -> int:
        return int(self._rows.local_window(process_row, 0, row).stop)

    def _rows_from(self, k: int, process_row: int) -> int:
        """Return how many rows a process row has from panel ``k``'s diagonal on."""
        return self._upto(self.shape.rows, process_row) - self._upto(self.shape.bounds(k)[0], process_row)

    def columns_upto(self, col: int) -> int:
        """Return how many of this rank's columns come before a column of the matrix. Local."""
        return int(self._cols.local_window(self._col, 0, min(col, self.shape.cols)).stop)

    def local(self, rows: slice) -> slice:
        """Return where this rank has rows of the matrix. Local."""
        start, stop, _ = rows.indices(self.shape.rows)
        return slice(self.upto(start), self.upto(stop))

    def arrays(self) -> list[Array]:
        return [self.array] if self.mine else []

    def set_identity(self, xp: Any) -> None:
        self.array[...] = 0
        cols = self._cols.globals(self._col)
        _, i, j = np.intersect1d(self.rows, cols, assume_unique=True, return_indices=True)
        self.array[xp.asarray(i), xp.asarray(j)] = 1

    def _root(self, k: int) -> int:
        """Return the process row whose rank factors panel ``k`` of LU or QR."""
        return k // self.shape.across % len(self._ranks)

    def _temporary(self, name: str, rows: int, cols: int) -> Array:
        return self.outbox.temporary(name, (rows, cols), self.dtype)

    def square(self, k: int) -> Array:
        starts = self.starts
        return self.own(k)[starts[k] : starts[k + 1]]

    def later(self, k: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield panel ``k + 1`` if this process column has it, then the rest together. Local."""
        rest = [j for j in self.mine if j > k]
        groups = ([rest[:1], rest[1:]] if rest[0] == k + 1 else [rest]) if rest else []
        for group in filter(None, groups):
            self.outbox.push()
            yield k, group

    def failed(self, k: int) -> bool:
        """Return whether panel ``k`` is known to have a fault: what is queued is read at the end. Local."""
        return not self.engine.traits.queues and super().failed(k)

    def settle(self) -> None:
        self.outbox.settle()

    # -- how panels travel

    def publish(self, k: int) -> None:
        """Let this process row have its rows of panel ``k``, which its process column has, as they are. Local."""
        self._publish(k, self.own(k)[self.starts[k] :])

    def again(self, k: int, rows: slice) -> Array:
        """Return this process row's part of rows of panel ``k``. Collective over the workers."""
        here = self.local(rows)
        if self.has(k):
            own = self.own(k)[here]
            self._publish(k, own)
            return own
        return self._fetched(k, here.stop - here.start)

    def _publish(self, k: int, own: Array) -> None:
        panel = self._temporary(f"panel {k % 2}", *own.shape)
        panel[...] = own
        self._spread(k, panel)

    def _spread(self, k: int, panel: Array) -> None:
        """Let this process row have its rows of panel ``k``, which are in a buffer of the column that has it."""
        self.across.spread(self.shape.column(k), f"panel {k % 2}", self._traveling(k, panel))

    def _traveling(self, k: int, panel: Array) -> list[Array]:
        """Return what travels along this process row with its rows of panel ``k``."""
        arrays = [panel, *self.about(k)]
        if self.blocks is not None and self.row == self.head(k):
            if not self.has(k):
                self._new_t(k)
            arrays.append(self._ts[k % 2])
        return arrays

    def _expect(self, k: int) -> None:
        """Begin to receive panel ``k``, if another process column factors it, before updates are queued. Local."""
        if self.engine.traits.queues and k < self.shape.steps and not self.has(k):
            panel = self._empty(k, self.starts[-1] - self.starts[k])
            arrays = self._traveling(k, panel)
            self._expected = arrays, self.across.expect(self.shape.column(k), arrays)

    def fetch(self, k: int) -> Array:
        """Return this process row's rows of panel ``k`` from its diagonal block on, when they are published."""
        start = self.starts[k]
        if self.has(k):
            return self.own(k)[start:]
        if self._expected is None:
            return self._fetched(k, self.starts[-1] - start)
        (arrays, arriving), self._expected = self._expected, None
        self.across.pass_on(self.shape.column(k), f"panel {k % 2}", arrays, arriving)
        return arrays[0]

    def _fetched(self, k: int, rows: int) -> Array:
        panel = self._empty(k, rows)
        self._spread(k, panel)
        return panel

    def _empty(self, k: int, rows: int) -> Array:
        first, stop = self.shape.bounds(k)
        return self._temporary(f"panel {k % 2}", rows, stop - first)

    # -- Cholesky

    def potrf(self, operations: Operations, k: int) -> None:
        """Factor panel ``k`` with the other ranks of its process column. Collective over these."""
        first, stop = self.shape.bounds(k)
        square, info = self._temporary(f"square {k % 2}", stop - first, stop - first), self.info[k : k + 1]
        if self.row == self.head(k):
            diagonal = self.square(k)
            operations.potrf(diagonal, info, first)
            square[...] = diagonal
        self.down.spread(self.head(k), f"square {k % 2}", [square, info])
        below = self.own(k)[self.starts[k + 1] :]
        if below.size and not self.failed(k):
            left = square.conj() if self.dtype.kind == "c" else square
            operations.trsm(1, left, below.T, lower=True, unit=False)

    def subtract(self, operations: Operations, panel: Array, k: int, blocks: Sequence[Sequence[int]]) -> None:
        """Subtract from panels of this process column what panel ``k`` contributes. Collective over the column."""
        if self._beside[0] != k:
            self._beside = k, self._rows_of_columns(panel, k)
            self._expect(k + 1)
        starts = self.starts
        for numbers in blocks:
            at, own, top = self._columns(k, numbers), self.run(numbers), starts[numbers[0]]
            right = self._beside[1][at : at + own.shape[1]]
            adjoint = right.T.conj() if self.dtype.kind == "c" else right.T
            operations.gemm(-1, panel[top - starts[k] :], adjoint, 1, own[top:])

    def _columns(self, k: int, group: Sequence[int]) -> int:
        """Return how many columns this process column has after panel ``k`` and before a group of panels."""
        return (self.mine.index(group[0]) - sum(j <= k for j in self.mine)) * self.shape.width

    def _rows_of_columns(self, panel: Array, k: int) -> Array:
        """Return those rows of panel ``k`` whose numbers are columns of this process column's later panels."""
        shape, starts, down = self.shape, self.starts, len(self._ranks)
        later = [j for j in self.mine if j > k]
        width, cols = shape.width, panel.shape[1]
        whole = self._temporary(f"columns {k % 2}", sum(b - a for a, b in map(shape.bounds, later)), cols)
        period = down // gcd(down, shape.across)  # so many panels on, the same process row has their rows
        for i, j in enumerate(later[:period]):
            head, name = self.head(j), f"rows {k % 2} {i}"
            rows = sum(b - a for a, b in map(shape.bounds, later[i::period]))
            part = self._temporary(name, rows, cols)
            if self.row == head:
                step = period * shape.across // down * width
                _copy_blocks(part, 0, width, panel, starts[j] - starts[k], step, rows, width)
            self.down.spread(head, name, [part])
            if period == 1:
                return part
            _copy_blocks(whole, i * width, period * width, part, 0, width, rows, width)
        return whole

    # -- LU

    def getrf(self, operations: Operations, k: int) -> None:
        """Factor panel ``k`` with the other ranks of its process column. Collective over these."""
        first, stop = self.shape.bounds(k)
        pivots, info = self.pivots[first : min(stop, self.shape.rows)], self.info[k : k + 1]
        whole = self._gathered(k)
        if whole is not None:
            operations.getrf(whole, pivots, info, first)
        self._returned(k, whole, lambda _: [pivots, info])

    def _gathered(self, k: int) -> Array:
        """Return panel ``k`` from its diagonal on to the rank that factors it, and None to others of its column."""
        root, ranks = self._root(k), self._ranks
        own = self.own(k)[self.starts[k] :]
        if len(ranks) == 1:
            return own
        if self.row != root:
            part = self._temporary("part", *own.shape)
            part[...] = own
            self.outbox.send("part", [(part, ranks[root])])
            return None
        whole = self._temporary("whole", self.shape.rows - self.shape.bounds(k)[0], own.shape[1])
        for row, rank in enumerate(ranks):
            part = own
            if row != root:
                part = self._temporary("part", self._rows_from(k, row), own.shape[1])
                self.outbox.receive([(part, rank)])
            self._copy_rows(k, whole, row, part, back=False)
        return whole

    def _returned(self, k: int, whole: Array, about: Callable[[int], Sequence[Array]]) -> None:
        """Write panel ``k``, which ``_gathered`` returned, to where it was.

        The ranks of the column also get what ``about`` returns for their process row.
        """
        root, ranks = self._root(k), self._ranks
        own = self.own(k)[self.starts[k] :]
        if len(ranks) == 1:
            return
        if self.row != root:
            part = self._temporary("part", *own.shape)
            self.outbox.receive([(each, ranks[root]) for each in (part, *about(self.row))])
            own[...] = part
            return
        self._copy_rows(k, whole, root, own, back=True)
        for row, rank in enumerate(ranks):
            if row != root:
                name = f"part {row % 2}"  # not one for each row: together they are a second panel
                part = self._temporary(name, self._rows_from(k, row), own.shape[1])
                self._copy_rows(k, whole, row, part, back=True)
                self.outbox.send(name, [(each, rank) for each in (part, *about(row))])

    def _copy_rows(self, k: int, whole: Array, row: int, part: Array, *, back: bool) -> None:
        """Copy the rows of a process row of panel ``k`` into the panel, or back."""
        width, down = self.shape.width, len(self._ranks)
        places = (whole, (row - self.head(k)) % down * width, down * width), (part, 0, width)
        to, of = reversed(places) if back else places
        _copy_blocks(*to, *of, len(part), width)

    def eliminate(self, operations: Operations, panel: Array, k: int, group: Sequence[int]) -> None:
        """Update adjacent panels of this process column with a panel of L. Collective over the column."""
        if self._beside[0] != k:
            self._beside = k, self._rows_of_u(operations, panel, k)
            self._expect(k + 1)
        starts, u, x = self.starts, self._beside[1], self.run(group)
        at = self._columns(k, group)
        below = panel[starts[k + 1] - starts[k] :, : len(u)]
        operations.gemm(-1, below, u[:, at : at + x.shape[1]], 1, x[starts[k + 1] :])

    def _rows_of_u(self, operations: Operations, panel: Array, k: int) -> Array:
        """Exchange rows of all columns but panel ``k``'s; return the rows of U of later ones. Collective."""
        before, later = ([j for j in self.mine if j < k], [j for j in self.mine if j > k])
        x = self.run(later)
        first = self.shape.bounds(k)[0]
        columns = [x, self.run(before)] if before else [x]
        self.swap_rows(operations, columns, first, first + self.reflectors(k))
        starts, count = self.starts, self.reflectors(k)
        u = self._temporary("u", count, x.shape[1])
        if self.row == self.head(k):
            rows = x[starts[k] : starts[k + 1]]
            operations.trsm(1, panel[:count, :count], rows, lower=True, unit=True)
            u[...] = rows
        self.down.spread(self.head(k), "u", [u])
        return u

    def swap_left(self, operations: Operations) -> None:
        """Exchange rows as panels have after which this process column has none: ``eliminate`` was not called."""
        least = min(self.shape.rows, self.shape.cols)
        for k in range(self.mine[-1] if self.mine else self.shape.steps, self.shape.steps):
            if left := [j for j in self.mine if j < k]:
                first, stop = self.shape.bounds(k)
                self.swap_rows(operations, [self.run(left)], first, min(stop, least))
        self.outbox.settle()

    def swap_rows(
        self,
        operations: Operations,
        columns: Sequence[Array],
        first: int,
        last: int,
        *,
        back: bool = False,
    ) -> None:
        """Exchange rows ``first`` to ``last`` (half-open) with those of the pivots. Collective over the column."""
        ranks, width = self._ranks, self._rows.block
        if len(ranks) == 1:
            for x in columns:
                operations.swap_rows(x, first, last, self.pivots, back=back)
            return
        pivots = self.engine.to_host(self.pivots[first:last].reshape(1, -1)).reshape(-1)
        places = self._operations.exchanged_rows(pivots, first, self.shape.rows)
        (to_row, to), (of_row, of) = (
            (rows // width % len(ranks), rows // (width * len(ranks)) * width + rows % width)
            for rows in (reversed(places) if back else places)
        )
        ends = list(itertools.accumulate((x.shape[1] for x in columns), initial=0))
        parts = [(x, slice(*pair)) for x, pair in zip(columns, itertools.pairwise(ends), strict=True)]
        arrived, receives, xp = [], [], self._operations.xp
        sends: dict[str, tuple[Array, int]] = {}
        leaves, arrives = of_row == self.row, to_row == self.row
        for row in sorted({*to_row[leaves].tolist(), *of_row[arrives].tolist()}):
            rank, rows = ranks[row], None
            leave, arrive = map(xp.asarray, (of[leaves & (to_row == row)], to[arrives & (of_row == row)]))
            if len(leave):
                rows = self._temporary(f"rows to {row}", len(leave), ends[-1])
                for x, part in parts:
                    rows[:, part] = x[leave]
                if rank != self.rank:
                    sends[f"rows to {row}"] = rows, rank
            if len(arrive):
                if rank != self.rank:
                    rows = self._temporary(f"rows of {row}", len(arrive), ends[-1])
                    receives.append((rows, rank))
                assert rows is not None
                arrived.append((arrive, rows))
        self.outbox.swap(sends, receives)
        for place, rows in arrived:
            for x, part in parts:
                x[place] = rows[:, part]

    # -- QR

    def _new_t(self, k: int) -> Array:
        """Return a new array for the T of panel ``k``: that of an earlier one may still be on its way. Local."""
        self._ts[k % 2] = t = self._operations.xp.empty((self.shape.width,) * 2, self.dtype, order="F")
        return t

    def geqrt(self, operations: Operations, k: int) -> None:
        """Factor panel ``k`` with the other ranks of its process column. Collective over these."""
        whole, head = self._gathered(k), self.head(k)
        assert self.blocks is not None
        factors: Array = self.blocks[k]
        t = self._new_t(k)
        if whole is not None:
            count = min(whole.shape)
            operations.geqrt(whole[:, :count], t[:count, :count])
            factors[:count] = t.diagonal()[:count]
            if count < whole.shape[1]:
                Reflector(operations, whole, t, count, adjoint=True).apply(whole[:, count:])
        self._returned(k, whole, lambda row: [factors, t] if row == head else [factors])

    def reflect(self, operations: Operations, panel: Array, k: int, x: Array, *, adjoint: bool) -> None:
        """Multiply columns of this process column by the reflectors of panel ``k``. Collective over the column."""
        head, count = self.head(k), self.reflectors(k)
        x = x[self.starts[k] :]
        if not x.shape[1]:
            return
        reflector = Reflector(
            operations, panel, self._ts[k % 2], count, adjoint=adjoint, below=self.row != head
        )
        w, combined = (self._temporary(name, count, x.shape[1]) for name in ("products", "combined"))
        reflector.products(x, w)
        self.down.add_up(head, "products", w)
        if self.row == head:
            combined[...] = reflector.combined(w)
        self.down.spread(head, "combined", [combined])
        reflector.subtract(x, combined)

    def reflector(self, operations: Operations, k: int) -> Array:
        """Return this process row's rows of panel ``k`` of reflectors, of which it makes T again. Collective."""
        first, count, head = self.shape.bounds(k)[0], self.reflectors(k), self.head(k)
        if self.has(k):
            assert self.blocks is not None
            products = self._temporary("products", count, count)
            own = self.own(k)[self.starts[k] :]
            Reflector(operations, own, None, count, adjoint=False, below=self.row != head).gram(products)
            self.down.add_up(head, "products", products)
            if self.row == head:
                t = self._new_t(k)
                self._operations.block_reflector(products, self.blocks[k][:count], t[:count, :count])
        return self.again(k, slice(first, None))

    def set_factors(self, operations: Operations, tau: Array) -> None:
        """Take the factors of all reflectors, from which the Ts are made when they are needed. Local."""
        assert self.blocks is not None
        for k in range(self.shape.steps):
            first, count = self.shape.bounds(k)[0], self.reflectors(k)
            self.blocks[k][:count] = operations.xp.asarray(tau[first : first + count])

    def total(self, sums: Array) -> Array:
        """Return the sum of a row vector over the process column. Collective over it."""
        whole = self.outbox.temporary("sums", (1, len(sums)), sums.dtype)
        whole[0] = sums
        self.down.add_up(0, "sums", whole)
        found = self.outbox.temporary("total sums", (1, len(sums)), sums.dtype)
        found[...] = whole
        self.down.spread(0, "total sums", [found])
        return found[0]

    def factors(self) -> Array:
        """Return the factors of all reflectors. Local."""
        assert self.blocks is not None
        return self.blocks[: self.shape.steps].reshape(-1)


def _copy_blocks(
    to: Array, at: int, step: int, of: Array, start: int, stride: int, rows: int, block: int
) -> None:
    """Copy rows in blocks that begin at ``start`` and ``stride`` apart to those at ``at``, ``step`` apart. Local."""
    count, rest = divmod(rows, block)
    if count:
        cols = to.shape[1]
        places = []
        for array, first, apart in ((to, at, step), (of, start, stride)):
            down, across = array.strides
            places.append(strided(array[first:], (count, block, cols), (apart * down, down, across)))
        places[0][...] = places[1]
    if rest:
        at, start = at + count * step, start + count * stride
        to[at : at + rest] = of[start : start + rest]
