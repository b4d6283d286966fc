# SPDX-License-Identifier: Apache-2.0
"""Few right-hand sides on several GPUs: they move, panels stay, and a panel takes few launches of the host.

cuBLAS's ``trsm`` of a few columns takes as long as its rows take one after another. So a panel's unknowns are products:
by the inverse of its triangle, and of one step of iterative refinement.
"""

from __future__ import annotations

from typing import Any

from ..dense.sweeps import Sides
from ..dense.workbench import Workbench
from .grid_panels import QueuedPanels
from .kernels.lt_product import Op
from .session import session_of
from .triangles import Triangles

FEW = 4  # right-hand sides for which one kernel does all of a panel's step
_HELD = 32 << 10  # bytes of shared memory that it takes for them, at most

Array = Any
Matrix = tuple[int, int, int, int]
"""Address, rows, columns and leading dimension of a matrix in F order."""


class QueuedSpread(Sides):
    """Right-hand sides as rows, each rank with those of its panels. Making one is local.

    Args:
        panels: the matrix, which is final; ranks have whole panels.
        right: the right-hand sides, which the first rank has.
    """

    _panels: QueuedPanels

    def __init__(self, bench: Workbench, panels: QueuedPanels, right: QueuedPanels) -> None:
        self._operations: Any = bench.operations
        self._panels, self._right, self._transport = panels, right, bench.engine.transport
        self._nccl = session_of(bench.engine).nccl
        self._shape, self._dtype, self._item = panels.shape, panels.dtype, panels.dtype.itemsize
        self._columns = right.shape.cols
        self._x: Array = None  # all right-hand sides, in C order; None before and after the sweeps
        # which rows of x are right: "terms" of sums over the ranks, "own" of this rank's panels, or "all"
        self._rows = "terms"
        # which triangles: lower ones, with ones on their diagonals
        self._asked: tuple[bool, bool] | None = None
        self._numbers = {k: i for i, k in enumerate(panels.mine)}
        held = self._columns * self._shape.width * self._item
        self._by_kernel = self._columns <= FEW and held <= _HELD

    def swap(self, last: int, pivots: Array, *, back: bool = False) -> None:
        self.finish()
        if self._right.mine:
            self._operations.swap_rows(self._right.own(0), 0, last, pivots, back=back)

    def count_all(self) -> None:
        """Do nothing: all rows count. Local."""

    def finish(self) -> None:
        if self._x is None:
            return
        if self._rows == "own":
            self._forget_others()
        if self._rows == "terms":
            self._transport.sum_ranks(self._x)
        if self._right.mine:
            self._right.own(0)[...] = self._x
        self._x, self._rows = None, "terms"

    def sweep(self, *, lower: bool, unit: bool = False, op: str = "N") -> None:
        if not self._columns * self._shape.cols:
            return
        if self._x is None:
            self._spread()
        if self._asked != (lower, unit):
            self._invert(lower=lower, unit=unit)
        conjugates = op == "C" and self._dtype.kind == "c"  # conj(T)^T x = b as T^T conj(x) = conj(b)
        if conjugates:
            self._conjugate()
        if op == "N":
            self._forward(lower=lower)
        else:
            self._backward(lower=lower)
        if conjugates:
            self._conjugate()

    def _invert(self, *, lower: bool, unit: bool) -> None:
        """Queue the inversion of the triangles on the diagonal of this rank's panels."""
        shape, wide, panels = self._shape, self._operations.kernels.leaf(self._dtype), self._panels
        while wide < shape.width:
            wide *= 2
        deal = shape.width, shape.group, shape.workers, panels.rank
        about = panels.array, len(panels.mine), deal, shape.cols, wide
        self._triangles = Triangles(self._operations, *about, lower=lower, unit=unit)
        self._asked = lower, unit

    def _spread(self) -> None:
        shape, scratch = (self._shape.cols, self._columns), self._operations.scratch
        self._x = scratch("spread", shape, self._dtype)
        self._part = scratch("spread rows", (self._shape.width, self._columns), self._dtype)
        self._x[...] = self._right.own(0) if self._right.mine else 0

    def _conjugate(self) -> None:
        self._operations.xp.conjugate(self._x, out=self._x)

    def _forget_others(self) -> None:
        """Replace the rows of other ranks' panels by zeros. Local."""
        x, rank, (_, n, width, workers, group, *_) = self._x, self._panels.rank, self._shape
        deal = width * group
        whole = n // (deal * workers) * deal * workers
        rounds = x[:whole].reshape(-1, workers, deal * self._columns)
        for other in range(workers):
            if other != rank:
                rounds[:, other] = 0
                x[whole + other * deal : whole + (other + 1) * deal] = 0
        self._rows = "terms"

    def _at(self, row: int) -> int:
        """Return the address of a row of all right-hand sides."""
        return int(self._x.data.ptr) + row * self._columns * self._item

    def _step(self, k: int, right: int, x: int, *, lower: bool, forward: bool) -> None:
        """Queue the solution for the rows of panel ``k`` from those at ``right``, which it spoils, at ``x``.

        What is below the panel's triangle, or above it, is subtracted from later rows if the sweep goes ``forward``,
        or else earlier rows' contribution from the panel's.
        """
        operations, columns, dtype, (first, stop) = (
            self._operations, self._columns, self._dtype, self._shape.bounds(k)
        )  # fmt: skip
        begin, end = (stop, self._shape.cols) if lower else (0, first)
        at, ld = self._panels.address(k, begin)
        rows, size, others, turned = end - begin, stop - first, self._at(begin), lower != forward
        wide, places = self._triangles.wide, self._triangles.of(self._numbers[k])
        if self._by_kernel:
            numbers = *places, wide, size, int(turned), right, x, at, ld, rows, others, int(forward)
            operations.kernels.step(self._stream, dtype, columns, numbers)
            return
        beside = at, rows, size, ld
        if rows and not forward:
            operations.apply("T", beside, others, -1, 1, right, columns, dtype)
        inverse, triangle = ((place, size, size, wide) for place in places)
        op: Op = "T" if turned else "N"  # of what is stored
        operations.apply(op, inverse, right, 1, 0, x, columns, dtype)
        operations.apply(op, triangle, x, -1, 1, right, columns, dtype)
        operations.apply(op, inverse, right, 1, 1, x, columns, dtype)
        if rows and forward:
            operations.apply("N", beside, x, -1, 1, others, columns, dtype)

    def _forward(self, *, lower: bool) -> None:
        """Solve with a triangle. A panel's rank gets the sum of all terms, and subtracts what later rows have of it."""
        if self._rows == "own":
            self._forget_others()
        shape, nccl, name = self._shape, self._nccl, self._dtype.name
        part, stream, count = int(self._part.data.ptr), self._begun(), shape.panels
        for k in range(count) if lower else reversed(range(count)):
            first, stop = shape.bounds(k)
            rows = self._at(first)
            nccl.sum_at(stream, rows, part, (stop - first) * self._columns, name, shape.owner(k))
            if self._panels.has(k):
                self._step(k, part, rows, lower=lower, forward=True)
        self._rows = "own"

    def _backward(self, *, lower: bool) -> None:
        """Solve with a transposed triangle. A panel's rank has it whole, and sends its solutions to all others."""
        if self._rows == "terms":
            self._transport.sum_ranks(self._x)
        shape, nccl, size = self._shape, self._nccl, self._columns * self._item
        part, stream, count = int(self._part.data.ptr), self._begun(), shape.panels
        for k in reversed(range(count)) if lower else range(count):
            first, stop = shape.bounds(k)
            rows = self._at(first)
            if self._panels.has(k):
                self._step(k, rows, part, lower=lower, forward=False)
            nccl.send_to_all(stream, part, rows, (stop - first) * size, shape.owner(k))
        self._rows = "all"

    def _begun(self) -> int:
        """Return the address of the stream that all steps are queued on."""
        self._stream = self._operations.xp.cuda.get_current_stream()
        return int(self._stream.ptr)
