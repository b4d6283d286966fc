# SPDX-License-Identifier: Apache-2.0
"""Panels on a grid of GPUs with several process rows: the matrix stays where it is, and ranks share each panel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..protocol import FactorOperations
from .factor_panels import BUFFERS, QueuedPanels

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

    def __init__(self, *about: Any, given: bool = False) -> None:
        super().__init__(*about, given=given)
        assert self.shape.grid is not None
        self._grid, self._d = self.shape.grid, self.shape.described(self.dtype)
        self._row, self._col = self._grid.coords(self.rank)
        self._square: Array = None

    def _head(self, k: int) -> int:
        """Return the process row that has the diagonal block of panel ``k``."""
        return self._d.rows.owner(self.shape.bounds(k)[0])

    def _below(self, row: int, start: int, stop: int | None = None) -> slice:
        """Return where a process row has the rows from ``start`` to ``stop`` of the matrix."""
        return self._d.rows.local_window(row, start, self.shape.rows if stop is None else stop)

    def _made(self) -> list[Array]:
        shape, scratch = self.shape, self._operations.scratch
        self._square = scratch("square", (shape.width, shape.width), self.dtype, "F")
        count = max(1, shape.rows) * shape.width * self._together
        return [scratch(f"panel {i}", (1, count), self.dtype)[0] for i in range(BUFFERS)]

    def potrf(self, operations: FactorOperations, k: int) -> None:
        """Factor panel ``k``, together with the other ranks of its process column. Local to queue."""
        first, stop = self.shape.bounds(k)
        own, square, head = self.own(k), self._square[: stop - first, : stop - first], self._head(k)
        if self._row == head:
            diagonal = own[self._below(head, first, stop)]
            operations.potrf(diagonal, self.info[k : k + 1], first)
            self._operations.copy_panel(square, diagonal)
        self._share(stop - first, head)
        below = own[self._below(self._row, stop)]
        left = square.conj() if self.dtype.kind == "c" else square
        operations.trsm(1, left, below.T, lower=True, unit=False)

    def _share(self, cols: int, head: int) -> None:
        """Queue the sending of a factored diagonal block in this process column. Collective over its ranks."""
        ranks, square = self._ranks(self._col), self._square.T[:cols].reshape(-1)
        root, others = ranks[head], [rank for rank in ranks if rank != self.rank]
        sends = [(square, rank) for rank in others] if self.rank == root else []
        receives = [] if self.rank == root else [(square, root)]
        self._nccl.exchange(int(self._cuda.get_current_stream().ptr), sends, receives)

    def _ranks(self, col: int) -> list[int]:
        """Return the ranks of a process column."""
        return [self._grid.rank(row, col) for row in range(self._grid.nprow)]

    def publish(self, k: int) -> None:
        """Queue the sending of this rank's rows of panel ``k`` after what CuPy's current stream has. Local."""
        self._send(k, self.own(k)[self._below(self._row, self._top(k))])

    def _broadcast(self, k: int, panel: Array) -> None:
        """Queue the exchange of a panel on CuPy's current stream; ``panel`` is this rank's part, if it has one."""
        slot, stream = self._slot(k), self._cuda.get_current_stream()
        if slot in self._free:
            stream.wait_event(self._free.pop(slot))
        parts, about, head = self._parts(k, k), self.about(k), self._head(k)
        owners = self._ranks(self.shape.column(k))
        mine = self.rank in owners
        if mine:
            self._operations.copy_panel(parts[self._row], panel)
        others = [rank for rank in range(self._grid.size) if rank != self.rank]
        carried = [parts[self._row].T, *(about if self._row == head else [])] if mine else []
        sends = [(each.reshape(-1), rank) for rank in others for each in carried if each.size]
        receives = [
            (each.reshape(-1), rank)
            for row, rank in enumerate(owners)
            if rank != self.rank
            for each in (parts[row].T, *(about if row == head else []))
            if each.size
        ]
        self._nccl.exchange(int(stream.ptr), sends, receives)

    def _parts(self, first: int, k: int) -> Parts:
        """Return panels ``first`` to ``k``, from the row on from which they are sent, in their buffer."""
        start, cols = self._top(k), self.shape.bounds(k)[1] - self.shape.bounds(first)[0]
        before = self.shape.bounds(first)[0] - start
        buffer, parts, at = self._buffers[self._slot(k)], [], 0
        for row in range(self._grid.nprow):
            place = self._below(row, start)
            rows = place.stop - place.start
            begin = at + rows * before
            parts.append(buffer[begin : begin + rows * cols].reshape(cols, rows).T)
            at += rows * self.shape.width * self._together
        return parts

    def fetch(self, k: int) -> Parts:
        """Return panel ``k`` from its diagonal on: the caller's stream waits until it is there. Local to queue."""
        self._arrived(k)
        return self._from(self._parts(k, k), self._top(k), self.shape.bounds(k)[0])

    def joined(self, first: int, k: int) -> Parts:
        """Return panels ``first`` to ``k`` side by side, from the first one's diagonal on. Local."""
        return self._parts(first, k)

    def _from(self, parts: Parts, top: int, first: int) -> Parts:
        """Return parts, which begin with row ``top`` of the matrix, from row ``first`` on. Local."""
        skipped = (self._below(row, top, first) for row in range(len(parts)))
        return [part[skip.stop - skip.start :] for part, skip in zip(parts, skipped, strict=True)]

    def factors(self, panel: Parts, top: int, numbers: Sequence[int]) -> tuple[Array, Array, Array]:
        """Return the parts of a panel that update adjacent panels, and what is updated. Local."""
        first, stop = self.shape.bounds(numbers[0])[0], self.shape.bounds(numbers[-1])[1]
        below, head = self._from(panel, top, first), self._head(numbers[0])
        return below[self._row], below[head][: stop - first], self.run(numbers)[self._below(self._row, first)]

    def _squares(self) -> list[Array]:
        blocks = [list(run) for _, run in groupby(self.mine, lambda k: k // self.shape.group)]
        bounds = [(self.shape.bounds(run[0])[0], self.shape.bounds(run[-1])[1]) for run in blocks]
        return [
            self.run(run)[self._below(self._row, *each)]
            for run, each in zip(blocks, bounds, strict=True)
            if self._head(run[0]) == self._row
        ]
