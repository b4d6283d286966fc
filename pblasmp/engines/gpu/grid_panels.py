# SPDX-License-Identifier: Apache-2.0
"""Panels on a grid of GPUs with several process rows: the matrix stays where it is, and ranks share each panel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..protocol import Operations
from .factor_panels import BUFFERS, QueuedPanels, place_of

__all__ = ["GridPanels"]

Array = Any
Parts = list[Array]
"""A panel, or several side by side: the rows of each process row, one after another, in F order."""


class GridPanels(QueuedPanels):
    """The panels of a positive definite matrix on a grid, block-cyclic in both directions. Making one is local.

    A panel is in one process column. The rank with its diagonal block factors that and sends it to the others of the
    column; each solves for the rows that it has, and sends them to all ranks. So a panel takes as much less time as
    there are process rows, and all links are busy at once.
    """

    routines = ("cholesky",)

    def __init__(self, *about: Any, given: bool = False) -> None:
        super().__init__(*about, given=given)
        assert self.shape.grid is not None
        self._grid, rows = self.shape.grid, self.shape.described(self.dtype).rows
        self._row, self._col = self._grid.coords(self.rank)
        self._square: Array = None
        ends = [0, *(self.shape.bounds(k)[1] for k in range(self.shape.panels))]
        # where each process row has the first row of each panel's diagonal, and its end
        self._starts = [
            [rows.local_window(row, 0, end).stop for end in ends] for row in range(self._grid.nprow)
        ]

    def _head(self, k: int) -> int:
        """Return the process row that has the diagonal block of panel ``k``."""
        return k // self.shape.group % self._grid.nprow

    def _made(self) -> list[Array]:
        shape, scratch = self.shape, self._operations.scratch
        self._square = scratch("square", (shape.width, shape.width), self.dtype, "F")
        count = max(1, shape.rows) * shape.width * self._together
        return [scratch(f"panel {i}", (1, count), self.dtype)[0] for i in range(BUFFERS)]

    def potrf(self, operations: Operations, k: int) -> None:
        """Factor panel ``k``, together with the other ranks of its process column. Local to queue."""
        first, stop = self.shape.bounds(k)
        own, square, head = self.own(k), self._square[: stop - first, : stop - first], self._head(k)
        starts = self._starts[self._row]
        if self._row == head:
            diagonal = own[starts[k] : starts[k + 1]]
            operations.potrf(diagonal, self.info[k : k + 1], first)
            self._operations.copy_panel(square, diagonal)
        self._share(stop - first, head)
        below = own[starts[k + 1] :]
        left = square.conj() if self.dtype.kind == "c" else square
        operations.trsm(1, left, below.T, lower=True, unit=False)

    def _share(self, cols: int, head: int) -> None:
        """Queue the sending of a factored diagonal block in this process column. Collective over its ranks."""
        ranks, square = self._ranks(self._col), self._square[:, :cols]
        root, others = ranks[head], [rank for rank in ranks if rank != self.rank]
        sends = [(square, rank) for rank in others] if self.rank == root else []
        receives = [] if self.rank == root else [(square, root)]
        self._nccl.exchange(int(self._cuda.get_current_stream().ptr), sends, receives)

    def _ranks(self, col: int) -> list[int]:
        """Return the ranks of a process column."""
        return [self._grid.rank(row, col) for row in range(self._grid.nprow)]

    def publish(self, k: int) -> None:
        """Queue the sending of this rank's rows of panel ``k`` after what CuPy's current stream has. Local."""
        self._send(k, self.own(k)[self._starts[self._row][self._first(k)] :])

    def _broadcast(self, k: int, panel: Array) -> None:
        """Queue the exchange of a panel on CuPy's current stream; ``panel`` is this rank's part, if it has one."""
        slot, stream = self._slot(k), self._cuda.get_current_stream()
        if slot in self._free:
            stream.wait_event(self._free.pop(slot))
        parts, owners = self._parts(k, k), self._ranks(self.shape.column(k))
        sends = []
        if self.rank in owners:
            own = parts[self._row]
            self._operations.copy_panel(own, panel)
            sends = [(own, rank) for rank in range(self._grid.size) if rank != self.rank and own.size]
        receives = [
            (part, rank) for part, rank in zip(parts, owners, strict=True) if rank != self.rank and part.size
        ]
        self._nccl.exchange(int(stream.ptr), sends, receives)

    def settle(self) -> None:
        """Let all ranks know what was found, and CuPy's current stream wait for the work ahead. Collective."""
        super().settle()
        self.engine.transport.sum_ranks(self.info)  # only the rank of a diagonal block wrote to it

    def _parts(self, first: int, k: int) -> Parts:
        """Return panels ``first`` to ``k``, from the row on from which they are sent, in their buffer."""
        begin, width, end = self._first(k), self.shape.width, self.shape.bounds(k)[1]
        cols, before = end - first * width, (first - begin) * width
        buffer, parts, at = self._buffers[self._slot(k)], [], 0
        for starts in self._starts:
            rows = starts[-1] - starts[begin]
            part = buffer[at + rows * before : at + rows * (before + cols)]
            parts.append(part.reshape(cols, rows).T)
            at += rows * width * self._together
        return parts

    def fetch(self, k: int) -> Parts:
        """Return panel ``k`` from its diagonal on: the caller's stream waits until it is there. Local to queue."""
        self._arrived(k)
        parts, begin = self._parts(k, k), self._first(k)
        return [part[starts[k] - starts[begin] :] for part, starts in zip(parts, self._starts, strict=True)]

    def joined(self, first: int, k: int) -> Parts:
        """Return panels ``first`` to ``k`` side by side, from the first one's diagonal on. Local."""
        return self._parts(first, k)

    def subtract(self, operations: Any, panel: Parts, k: int, blocks: Sequence[Sequence[int]]) -> None:
        """Queue the updates of panels; the rows of their columns are in the part of one process row. Local."""
        parts, own, item = [place_of(part) for part in panel], self._starts[self._row], self.dtype.itemsize
        at, ld = parts[self._row]
        products, depth = [], panel[0].shape[1]
        for numbers in blocks:
            first, end, head = numbers[0], numbers[-1] + 1, self._head(numbers[0])
            (of, ldo), other = parts[head], self._starts[head]
            sizes = own[-1] - own[first], other[end] - other[first], depth
            if 0 not in sizes:
                left, right = at + (own[first] - own[k]) * item, of + (other[first] - other[k]) * item
                products.append((sizes, (left, ld, right, ldo, *self.address(first, own[first]))))
        operations.subtract(products, self.dtype)

    def _squares(self) -> list[Array]:
        starts, blocks = self._starts[self._row], groupby(self.mine, lambda k: k // self.shape.group)
        runs = [list(run) for block, run in blocks if block % self._grid.nprow == self._row]
        return [self.run(run)[starts[run[0]] : starts[run[-1] + 1]] for run in runs]
