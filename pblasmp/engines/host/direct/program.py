# SPDX-License-Identifier: Apache-2.0
"""Programs: what a rank does in a direct call, as steps, and a call for which one is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....comm.progress import Progress
from ...direct import Asked, Outcome
from ...direct.spans import Span
from ...direct.sub_matrix import SubMatrix, vote_number
from ...protocol import SharingTransport
from ..operations import HostOperations
from .slabs import ALIGNED, Array, Factor, SharedSlabs, Steps, Strided

__all__ = ["MOST", "Preparation", "Program"]

MOST = 32 << 20  # bytes of a set of slabs; a larger call is worth a plan


class Program(NamedTuple):
    """A call, ready to run again: each step is a function and its arguments.

    Attributes:
        number: the ranks vote on it.
        before: writes what other ranks need, before the vote.
        compute: after the vote.
        finish: after one more meeting of the ranks; None if there is none.
        staged: whether it uses slabs.
        weight: about how many steps it has.
        outcome: returns what LAPACK says of the last run; None if it is not asked.
        checksum: returns one of the last run's result, which each rank has computed for itself; None if none has.
    """

    number: int
    before: Steps
    compute: Steps
    finish: Steps | None
    staged: bool
    weight: int
    outcome: Callable[[], Outcome] | None
    checksum: Callable[[], int] | None


class Preparation:
    """A direct call that is being prepared. Making one is local.

    Args:
        asked: what is asked for.
        load: returns a routine of the BLAS, by letter and name.
        operations: sums of arrays.
        transport: the ranks.
        scratch: memory of this rank alone, for ``tiny``: calls use it one at a time.
        alike: all ranks round alike, as far as is known.

    Attributes:
        asked, operations, scratch, alike: as above.
        letter: BLAS's letter of its type.
        single: there is one rank.
        ranks: how many there are; ``rank`` is this one.
        nbytes: of all slabs.
        number: the ranks vote on it.
        before: returns steps before the vote, besides those that ``stage`` makes.
        compute: returns the steps after the vote.
        finish: returns the steps after one more meeting of the ranks; None if there is none.
        weight: steps inside steps.
        outcome, checksum: see ``Program``.
    """

    before: Callable[[], Steps] | None = None
    compute: Callable[[], Steps]

    def __init__(
        self,
        asked: Asked,
        load: Callable[[str, str], Callable[..., Any]],
        operations: HostOperations,
        transport: SharingTransport,
        scratch: Array,
        *,
        alike: bool,
    ) -> None:
        self.asked, self.letter, self.operations = asked, asked.d[0].pattern.letter, operations
        self.scratch, self.alike = scratch, alike
        self.ranks, self.rank, self._transport = transport.size, transport.rank, transport
        self.single = self.ranks == 1
        self.number = 0 if self.single else vote_number(asked)
        self.nbytes = 0
        self.finish: Callable[[], Steps] | None = None
        self.weight = 0
        self.outcome: Callable[[], Outcome] | None = None
        self.checksum: Callable[[], int] | None = None
        self._load = load
        self._staged: list[SharedSlabs] = []
        self._memory: tuple[Array, int] | None = None
        self._flags: tuple[int, int, list[int]] | None = None
        self._raised: NDArray[np.int64] | None = None
        self._progress: Progress | None = None

    def function(self, routine: str) -> Callable[..., Any]:
        """Return a routine of the BLAS for the call's type."""
        return self._load(self.letter, routine)

    def stage(self, x: SubMatrix, rows: Span, cols: Span, *, by_columns: bool | None = None) -> SharedSlabs:
        """Have an operand copied into slabs before the ranks vote.

        Args:
            x: the operand.
            rows, cols: how its rows and columns are dealt out to those who need them.
            by_columns: the slabs' memory order, by default the operand's.
        """
        slabs = self.room(x, rows, cols, by_columns=x.by_columns if by_columns is None else by_columns)
        self._staged.append(slabs)
        return slabs

    def room(self, x: SubMatrix, rows: Span, cols: Span, *, by_columns: bool) -> SharedSlabs:
        """Return slabs of x's type into which nothing is copied."""
        slabs = SharedSlabs(x, rows, cols, self.nbytes, by_columns)
        self.nbytes = slabs.end
        return slabs

    def raise_flags(self, count: int, mine: list[int]) -> None:
        """Have flags among the slabs, which are down when the ranks have voted: see ``progress``.

        Args:
            count: how many.
            mine: those that this rank raises.
        """
        self._flags = self.nbytes, count, mine
        self.nbytes += -(-8 * count // ALIGNED) * ALIGNED

    def progress(self) -> Progress:
        """Return the flags."""
        assert self._progress is not None
        return self._progress

    def flags(self) -> NDArray[np.int64]:
        """Return the flags as integers."""
        assert self._raised is not None
        return self._raised

    def slab(self, slabs: SharedSlabs, row: int = 0, col: int = 0) -> Factor:
        """Return a process's slab as BLAS takes it."""
        assert self._memory is not None
        p, q = row if slabs.rows.nprocs > 1 else 0, col if slabs.cols.nprocs > 1 else 0
        return slabs.factor(self._memory[1], p, q)

    def slab_array(self, slabs: SharedSlabs, row: int = 0, col: int = 0) -> Array:
        """Return a process's slab as an array."""
        assert self._memory is not None
        p, q = row if slabs.rows.nprocs > 1 else 0, col if slabs.cols.nprocs > 1 else 0
        return slabs.array(self._memory[0], p, q)

    def slab_strided(self, slabs: SharedSlabs, row: int = 0, col: int = 0) -> Strided:
        """Return a process's slab, of which arrays are made."""
        assert self._memory is not None
        p, q = row if slabs.rows.nprocs > 1 else 0, col if slabs.cols.nprocs > 1 else 0
        return slabs.strided(self._memory[0], p, q)

    def taken_from(self, slabs: SharedSlabs, to: SubMatrix) -> Steps:
        """Return the steps that write what slabs hold into this rank's part of a matrix."""
        assert self._memory is not None
        return slabs.read(to, self._memory[0])

    def bind(self, memory: tuple[Array, int] | None) -> Program:
        """Return the program whose slabs are in ``memory``, an array and its address."""
        self._memory = memory
        before: Steps = []
        if memory is not None:
            for slabs in self._staged:
                before += slabs.write(memory[0])
            if self.before is not None:
                before += self.before()
            if self._flags is not None:
                at, count, mine = self._flags
                flags = self._raised = memory[0][at : at + 8 * count].view(np.int64)
                self._progress = self._transport.progress(flags)
                before.append((flags.__setitem__, (np.array(mine, np.intp), 0)))
        finish = None if self.finish is None else self.finish()
        compute = self.compute()
        weight = 1 + len(before) + len(compute) + self.weight
        del self.compute  # these functions refer to the preparation: without them it is freed at once
        outcome, checksum = self.outcome, self.checksum
        self.before = self.finish = self.outcome = self.checksum = None
        return Program(self.number, before, compute, finish, memory is not None, weight, outcome, checksum)
