# SPDX-License-Identifier: Apache-2.0
"""Builds a direct call: which operands are staged, and what is kept for the same call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...direct import Asked
from ...direct.spans import Span
from ...direct.sub_matrix import SubMatrix, UnfitError, check_overlap, vote_number
from ..kernels.views import Move
from .slabs import StagedOperand, covers

if TYPE_CHECKING:
    from ..runtime.gpu import Gpu

__all__ = ["CallBuilder", "Compute", "Computer", "Cublas", "Patterns", "Queue", "QueuedCall"]

Queue: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that queues work, and its arguments."""

Compute: TypeAlias = Callable[[Any, int], list[Queue]]
"""Returns what this rank queues once slabs are there, for a stream and the address of its set of slabs."""

Computer: TypeAlias = "Callable[[CallBuilder], Compute]"
"""Prepares a routine: stages its operands, and raises UnfitError if it is not for direct calls."""

Patterns: TypeAlias = dict[Any, tuple[dict[int, tuple[int, int]], int]]
"""Who needs what of an operand and lacks it, and the most elements that one of them needs."""

_ALIGNED = 256


class QueuedCall:
    """A call that is ready to be queued, with what is queued for each set of slabs. Local.

    Attributes:
        number: that the ranks vote on.
        nbytes: of a set of slabs.
        bind: returns what is queued, for a stream and the addresses of the ranks' sets of slabs.
        bound: what is queued, by set of slabs.
        replacements: of memory, when ``bound`` was bound to it.
    """

    __slots__ = ("bind", "bound", "nbytes", "number", "replacements")

    def __init__(self, number: int, nbytes: int, bind: Callable[[Any, dict[int, int]], list[Queue]]) -> None:
        self.number, self.nbytes, self.bind = number, nbytes, bind
        self.bound: list[list[Queue] | None] = [None, None]
        self.replacements = -1


class Cublas:
    """cuBLAS's routines and its scalars, which calls share. Local.

    Args:
        gpu: this rank's GPU.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.functions: dict[str, Any] = {}
        self.scalars: dict[tuple[complex, str], Any] = {}

    def function(self, name: str) -> Any:
        """Return a routine of cuBLAS."""
        found = self.functions.get(name)
        if found is None:
            found = self.functions[name] = getattr(self._gpu.products.cublas, name)
        return found

    def scalar(self, value: complex, letter: str) -> int:
        """Return the address of a scalar on the host."""
        found = self.scalars.get((value, letter))
        if found is None:
            kind = {"s": np.float32, "d": np.float64, "c": np.complex64, "z": np.complex128}[letter]
            found = self.scalars[value, letter] = np.array(
                [value if letter in "cz" else complex(value).real], kind
            )
        return int(found.ctypes.data)


class CallBuilder:
    """A call that is being prepared: reads its operands, and stages those that must move. Local.

    Args:
        gpu: this rank's GPU.
        cublas: routines and scalars.
        patterns: those that are known.
        asked: the call.

    Attributes:
        to: the result.
        item, dtype: its elements.
    """

    def __init__(self, gpu: Gpu, cublas: Cublas, patterns: Patterns, asked: Asked) -> None:
        self.gpu, self._cublas, self._patterns, self.asked = gpu, cublas, patterns, asked
        self.to = SubMatrix(asked.d)
        pattern = asked.d[0].pattern
        self._letter, self.item, self.dtype = pattern.letter, pattern.itemsize, pattern.dtype
        self._slabs: list[StagedOperand] = []

    def call(self, computer: Computer) -> QueuedCall:
        """Return the call that a routine's function prepares, or raise UnfitError."""
        asked, gpu = self.asked, self.gpu
        check_overlap(asked, asked.b if asked.routine in ("trsm", "trmm") else asked.c)
        compute = computer(self)
        slabs = [slab for slab in self._slabs if slab.receivers]
        if slabs and gpu.why_no_windows:
            raise UnfitError
        nbytes = slabs[-1].end if slabs else 0

        def bind(stream: Any, bases: dict[int, int]) -> list[Queue]:
            queue: list[Queue] = []
            if slabs:
                copies = [move for slab in slabs for move in slab.moves(bases)]
                queue += [(launch, (stream,)) for launch in gpu.launches_of_moves(copies)]
                queue.append((gpu.launch_of_meeting(), (stream,)))
            if self.to.active:
                queue += compute(stream, bases.get(gpu.rank, 0))
            return queue

        return QueuedCall(vote_number(asked), nbytes, bind)

    def stage(self, x: SubMatrix, rows: Span, cols: Span, whose: str) -> StagedOperand:
        """Have an operand copied to those who need it.

        Args:
            x: the operand.
            rows, cols: how its rows and columns are dealt out to those who need them.
            whose: which of D's processes its rows and perhaps its columns are dealt out to: "row", "col", "row col";
                or "": everyone needs all of it.
        """
        to, patterns = self.to, self._patterns
        key = (
            x.rows, x.cols, x.held.pattern.grid, x.transposed, rows, cols,
            to.rows, to.cols, to.held.pattern.grid, to.transposed, whose,
        )  # fmt: skip
        found = patterns.get(key)
        if found is None:
            found = patterns[key] = self._receivers(x, rows, cols, whose)
        receivers, most = found
        start = self._slabs[-1].end if self._slabs else 0
        end = start + -(-most * self.item // _ALIGNED) * _ALIGNED
        slab = StagedOperand(x, rows, cols, receivers, start, end)
        self._slabs.append(slab)
        return slab

    def _receivers(
        self, x: SubMatrix, rows: Span, cols: Span, whose: str
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """Return who needs what of an operand and lacks it, and the most elements that one of them needs."""
        to = self.to
        receivers, most = {}, 0
        down, across = to.rows.counts(), to.cols.counts()
        heights, widths = rows.counts(), cols.counts()
        for p, q in itertools.product(range(len(down)), range(len(across))):
            if not (down[p] and across[q]):
                continue
            r, c = {"row": (p, 0), "col": (q, 0), "row col": (p, q), "": (0, 0)}[whose]
            rank = to.rank(p, q)
            row, col = x.process(rank)
            if not (covers(x.rows, row, rows, r) and covers(x.cols, col, cols, c)):
                receivers[rank] = r, c
                most = max(most, heights[r] * widths[c])
        return receivers, most

    def scalar(self, value: complex) -> int:
        """Return the address of a scalar of the call's type on the host."""
        return self._cublas.scalar(value, self._letter)

    def function(self, name: str) -> Any:
        """Return a routine of cuBLAS for the call's type."""
        return self._cublas.function(self._letter + name)

    def handle(self, stream: Any) -> int:
        """Return cuBLAS's handle, on a stream."""
        return self.gpu.products.solver(stream.ptr)

    def copied(self, source: SubMatrix | None) -> list[Move]:
        """Return the copies that make D start as another matrix, which is in the same places."""
        to = self.to
        if source is None:
            return []
        if source.by_columns != to.by_columns:
            raise UnfitError
        if not to.active:
            return []
        lines, run = (to.n, to.m) if to.by_columns else (to.m, to.n)
        item = self.item
        return [(to.at, (0, 0, to.ld * item), source.at, (0, 0, source.ld * item), (1, 1, lines, run * item))]

    def queued(self, stream: Any, copies: list[Move]) -> list[Queue]:
        """Return what queues copies."""
        return [(launch, (stream,)) for launch in self.gpu.launches_of_moves(copies)] if copies else []
