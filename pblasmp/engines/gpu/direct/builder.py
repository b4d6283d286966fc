# SPDX-License-Identifier: Apache-2.0
"""Builds a direct call: which operands are staged, as what cuBLAS takes, and what is kept for the same call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ....dtypes import accumulation_dtype
from ....layout.axis import Axis
from ....layout.intersection import Stretches, extent, intersect, packed, unpacked
from ...direct import Asked
from ...direct.sub_matrix import SubMatrix, UnfitError
from ..kernels.compiler import stand_in, stood_for
from ..kernels.views import Move, View, moves

if TYPE_CHECKING:
    from ...product import RecordedGraph
    from ..runtime.gpu import Gpu


class CublasMatrix(NamedTuple):
    """A matrix as cuBLAS takes it: its address, whether it is in Fortran order, its leading dimension."""

    at: int
    by_columns: bool
    ld: int

    def below(self, i: int, item: int) -> int:
        """Return the address of row ``i``. Local."""
        return self.at + i * item * (1 if self.by_columns else self.ld)


class StagedOperand:
    """Copies of an operand's parts in the memory of those who need them, and do not have them in place. Local.

    Args:
        x: the operand.
        rows, cols: how its rows and columns are dealt out to those who need them.
        receivers: by rank, whose of the rows and of the columns it needs.
        start: its offset in a set of slabs.
        end: the offset after it.
    """

    def __init__(
        self,
        x: SubMatrix,
        rows: Axis,
        cols: Axis,
        receivers: dict[int, tuple[int, int]],
        start: int,
        end: int,
    ) -> None:
        self.x, self.rows, self.cols, self.start, self.end = x, rows, cols, start, end
        self.receivers = receivers

    def ld(self, p: int, q: int) -> int:
        """Return the leading dimension of the copy of rows ``p`` and columns ``q``."""
        of, process = (self.rows, p) if self.x.by_columns else (self.cols, q)
        return max(1, of.below(of.extent, process))

    @property
    def here(self) -> View:
        """This rank's part of the operand; of its shape nothing is said."""
        return View(self.x.at, 1, 1, self.x.ld, self.x.held.pattern.dtype)

    def slab(self, rank: int, base: int) -> View:
        """Return the copy of a rank whose set of slabs begins at ``base``; of its shape nothing is said."""
        return View(base + self.start, 1, 1, self.ld(*self.receivers[rank]), self.x.held.pattern.dtype)

    def moves(self, me: int, bases: Mapping[int, int]) -> Iterator[Move]:
        """Yield the copies of what rank ``me`` has to ranks; ``bases`` has the addresses of their sets of slabs."""
        for rank, base in bases.items():
            found = self.shared(me, rank)
            if found is not None:
                yield from moves(self.slab(rank, base), self.here, *found)

    def shared(self, sender: int, receiver: int) -> tuple[Stretches, Stretches] | None:
        """Return which lines, and which of their entries, a rank has of what another needs; None: nothing."""
        x, whose = self.x, self.receivers.get(receiver)
        row, col = x.process(sender)
        if whose is None or row < 0:
            return None
        rows, cols = intersect(x.rows, row, self.rows, whose[0]), intersect(x.cols, col, self.cols, whose[1])
        if not (rows and cols):
            return None
        return (cols, rows) if x.by_columns else (rows, cols)

    def factor(self, rank: int, whose: tuple[int, int], base: int) -> CublasMatrix:
        """Return what a rank multiplies: its slab, or its local array."""
        x = self.x
        if rank in self.receivers:
            return CublasMatrix(base + self.start, x.by_columns, self.ld(*whose))
        return CublasMatrix(x.at, x.by_columns, x.ld)


def covers(of: Axis, process: int, needed: Axis, needing: int) -> bool:
    """Return whether a process's indices are just those that another distribution gives a process."""
    if process < 0:
        return False
    if needed.on_one:
        return of.on_one and process == of.source
    return of == needed and process == needing


Queue: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that queues work, and its arguments."""

Compute: TypeAlias = Callable[[Any, int], list[Queue]]
"""Returns what this rank queues once slabs are there, for a stream and the address of its set of slabs."""

Computer: TypeAlias = "Callable[[CallBuilder], Compute]"
"""Prepares a routine: stages its operands, and raises UnfitError if it is not for direct calls."""

_ALIGNED = 256
SCRATCH, SLABS_OF = 15, 16
"""The numbers of memory: 1 to 4 are that of operands, the last is the first rank's set of slabs."""
_MOST_RANKS = 256 - SLABS_OF
MOST_SENT, MOST_GATHERED = 1 << 20, 8 << 20
"""Bytes of a set of slabs between hosts: what is larger takes a plan."""
GATHERED = 256 << 10
"""Bytes of a rank's part, which everyone needs, from which on NCCL gathers them.

Of two H200, over sockets, its messages take 60 us of 64 KiB, 153 of 256 KiB, 485 of 1 MiB; its AllGather 79, 153, 411.
"""


class Template:
    """What all calls of one pattern queue: their operands are dealt out alike, and only lie elsewhere. Local to make.

    Args:
        queue: what is queued, with stand-ins for addresses.
        nbytes: of a set of slabs.
        scratch: bytes of scratch memory.
        sends: messages are among it.

    Attributes:
        nbytes, scratch, sends: as above.
    """

    __slots__ = ("_queue", "nbytes", "scratch", "sends")

    def __init__(self, queue: list[Queue], nbytes: int, scratch: int, *, sends: bool) -> None:
        self.nbytes, self.scratch, self.sends = nbytes, scratch, sends
        self._queue: list[tuple[Any, bool, tuple[Any, ...], list[tuple[int, int, int]]]] = [
            (function, hasattr(function, "placed"), arguments, stood_for(enumerate(arguments)))
            for function, arguments in queue
        ]

    def run(self, bases: Mapping[int, int]) -> None:
        """Queue it once, given the base of each memory by its number. Local."""
        for function, is_launch, arguments, addresses in self._queue:
            if is_launch:
                function.at(bases, *arguments)
            else:
                function(*_moved(arguments, addresses, bases))

    def placed(self, bases: Mapping[int, int]) -> list[Queue]:
        """Return what is queued, given the base of each memory by its number. Local."""
        return [
            (function.placed(bases), arguments)
            if is_launch
            else (function, _moved(arguments, addresses, bases))
            for function, is_launch, arguments, addresses in self._queue
        ]


def _moved(
    arguments: tuple[Any, ...], addresses: list[tuple[int, int, int]], bases: Mapping[int, int]
) -> tuple[Any, ...]:
    """Return arguments with real addresses in the places of stand-ins."""
    if not addresses:
        return arguments
    given = list(arguments)
    for i, number, offset in addresses:
        given[i] = bases[number] + offset
    return tuple(given)


class QueuedCall:
    """A call that is ready to be queued, with what is queued for each set of slabs. Local.

    Attributes:
        template: what calls like it queue.
        bases: of the operands' memory, by number.
        bound: what is queued, by set of slabs.
        uses, graphs: how often it was, and a graph of it, by set of slabs.
        memory: what ``bound`` was bound to: a generation of symmetric memory, and where scratch memory and slabs are.
    """

    __slots__ = ("bases", "bound", "graphs", "memory", "template", "uses")

    def __init__(self, template: Template, bases: dict[int, int]) -> None:
        self.template, self.bases = template, bases
        self.bound: list[list[Queue] | None] = [None, None]
        self.graphs: list[RecordedGraph | None] = [None, None]
        self.uses = [0, 0]
        self.memory = (-1, 0, 0)


Scalars: TypeAlias = dict[tuple[complex, str], Any]
"""cuBLAS's scalars on the host, which calls share, by value and letter of the type."""


class CallBuilder:
    """A template that is being prepared: reads a call's operands, and stages those that must move. Local.

    Args:
        gpu: this rank's GPU.
        scalars: those of earlier calls, and of this one.
        asked: a call of the pattern, whose operands have stand-ins for addresses.

    Attributes:
        to: the result.
        item, dtype: its elements.
    """

    def __init__(self, gpu: Gpu, scalars: Scalars, asked: Asked) -> None:
        self.gpu, self._scalars, self.asked = gpu, scalars, asked
        self.to = SubMatrix(asked.d)
        pattern = asked.d[0].pattern
        self._letter, self.item, self.dtype = pattern.letter, pattern.itemsize, pattern.dtype
        self._slabs: list[StagedOperand] = []
        self._scratch = 0

    def template(self, computer: Computer, stream: Any) -> Template:
        """Return what a routine's function prepares for a stream, or raise UnfitError."""
        gpu, compute = self.gpu, computer(self)
        slabs = [slab for slab in self._slabs if slab.receivers]
        queue: list[Queue] = []
        bases: dict[int, int] = {}
        nbytes, apart = slabs[-1].end if slabs else 0, bool(slabs and gpu.why_no_windows)
        if apart:
            if gpu.size > _MOST_RANKS:
                raise UnfitError
            bases = {gpu.rank: stand_in(SLABS_OF + gpu.rank)}
            box = self._box(slabs)
            if box >= GATHERED and nbytes <= MOST_GATHERED:
                queue += self._gathered(stream, slabs, bases, box)
                nbytes += gpu.size * box
            elif nbytes <= MOST_SENT:
                queue += self._messages(stream, slabs, bases)
                # also what is packed for others, and what comes from them: as much on every rank
                nbytes = (2 + gpu.size) * nbytes + gpu.size * _ALIGNED
            else:
                raise UnfitError
        elif slabs:
            bases = {rank: stand_in(SLABS_OF + rank) for rank in range(gpu.size)}
            copies = [move for slab in slabs for move in slab.moves(gpu.rank, bases)]
            queue += self.queued(stream, copies)
            assert gpu.windows is not None
            queue.append((gpu.windows.meet, (stream,)))
        if self.to.active:
            queue += compute(stream, bases.get(gpu.rank, 0))
        return Template(queue, nbytes, self._scratch, sends=apart)

    def _box(self, slabs: list[StagedOperand]) -> int:
        """Return the bytes of the largest part that a rank has of all slabs; 0 unless all need all of it. Local."""
        gpu = self.gpu
        if any(len(slab.receivers) < gpu.size or len({*slab.receivers.values()}) > 1 for slab in slabs):
            return 0
        sizes = []
        for rank in range(gpu.size):
            found = filter(None, (slab.shared(rank, gpu.rank) for slab in slabs))
            sizes.append(sum(extent(lines) * extent(runs) * self.item for lines, runs in found))
        return -(-max(sizes) // _ALIGNED) * _ALIGNED

    def _gathered(
        self, stream: Any, slabs: list[StagedOperand], bases: Mapping[int, int], box: int
    ) -> list[Queue]:
        """Return what packs this rank's part of all slabs, gathers all parts behind them, and unpacks them. Local."""
        gpu, first, ((me, base),) = self.gpu, slabs[-1].end, bases.items()
        copies, arrived = [move for slab in slabs for move in slab.moves(me, bases)], list[Move]()
        for rank in range(gpu.size):
            at = first + rank * box
            for slab in slabs:
                found = slab.shared(rank, me)
                if found is None:
                    continue
                lines, runs = found
                length = extent(runs)
                part = View(base + at, 1, 1, length, self.dtype)
                if rank == me:
                    copies += moves(part, slab.here, packed(lines), packed(runs))
                else:
                    arrived += moves(slab.slab(me, base), part, unpacked(lines), unpacked(runs))
                at += extent(lines) * length * self.item
        gather = gpu.gather, (stream.ptr, base + first + me * box, base + first, box)
        return [*self.queued(stream, copies), gather, *self.queued(stream, arrived)]

    def _messages(self, stream: Any, slabs: list[StagedOperand], bases: Mapping[int, int]) -> list[Queue]:
        """Return what packs this rank's parts, sends them to those who need them, and unpacks what comes. Local."""
        gpu, at, sent, ((me, base),) = self.gpu, slabs[-1].end, 0, bases.items()
        copies, arrived = [move for slab in slabs for move in slab.moves(me, bases)], list[Move]()
        messages: list[int] = []
        for sends, rank in itertools.product((True, False), range(gpu.size)):
            start = at
            for slab in slabs if rank != me else ():
                found = slab.shared(me, rank) if sends else slab.shared(rank, me)
                if found is None:
                    continue
                lines, runs = found
                length = extent(runs)
                box = View(base + at, 1, 1, length, self.dtype)
                if sends:
                    copies += moves(box, slab.here, packed(lines), packed(runs))
                else:
                    arrived += moves(slab.slab(me, base), box, unpacked(lines), unpacked(runs))
                at += extent(lines) * length * self.item
            if at > start:
                messages += base + start, at - start, rank
                sent += sends
                at = -(-at // _ALIGNED) * _ALIGNED
        exchange = [(gpu.exchange, (stream.ptr, sent, *messages))] if messages else []
        return [*self.queued(stream, copies), *exchange, *self.queued(stream, arrived)]

    def scratch(self, nbytes: int) -> int:
        """Return the stand-in for the address of scratch memory, which is in use while the call runs."""
        self._scratch = max(self._scratch, nbytes)
        return stand_in(SCRATCH)

    def stage(self, x: SubMatrix, rows: Axis, cols: Axis, whose: str) -> StagedOperand:
        """Have an operand copied to those who need it.

        Args:
            x: the operand.
            rows, cols: how its rows and columns are dealt out to those who need them.
            whose: which of D's processes its rows and perhaps its columns are dealt out to: "row", "col", "row col";
                or "": everyone needs all of it.
        """
        receivers, most = self._receivers(x, rows, cols, whose)
        start = self._slabs[-1].end if self._slabs else 0
        end = start + -(-most * self.item // _ALIGNED) * _ALIGNED
        slab = StagedOperand(x, rows, cols, receivers, start, end)
        self._slabs.append(slab)
        return slab

    def _receivers(
        self, x: SubMatrix, rows: Axis, cols: Axis, whose: str
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
        key = value, self._letter
        found = self._scalars.get(key)
        if found is None:
            number = value if self._letter in "cz" else complex(value).real
            found = self._scalars[key] = np.array([number], accumulation_dtype(self.dtype))
        return int(found.ctypes.data)

    def function(self, name: str) -> Any:
        """Return a routine of cuBLAS for the call's type."""
        return getattr(self.gpu.products.cublas, self._letter + name)

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
        return [(launch, (stream,)) for launch in self.gpu.kernels.moves(copies)] if copies else []
