# SPDX-License-Identifier: Apache-2.0
"""How a direct call runs on CPU ranks: a program of steps, made once and kept for the same call.

One meeting of the ranks per call: each rank first writes what others need of its operands into shared memory; then all
vote on one number, which also says that everything has been written; then each rank computes its part of the result.
If several ranks compute a part together, they meet once more before they take it; who takes nothing does not wait.
There are two sets of slabs. A rank that writes into one has voted since all ranks began to read the other, so nobody
reads this one any more. After a call without slabs both are free, and the next call takes the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ....comm import Communicator, break_off, compare_later, gather_on, vote_on
from ....errors import LibraryNotFoundError
from ....resources import rank_share
from ...direct import FAMILIES, Asked, Moved, Outcome, host_address
from ...direct.slab_sets import SlabSets
from ...direct.sub_matrix import UnfitError
from .. import blas
from ..buffers import Buffers
from ..operations import HostOperations
from ..transport import HostTransport
from .cholesky import factored, may_be_factored, solved
from .lapack import computed_by_lapack, is_small
from .moves import Move
from .products import added, matmul
from .program import MOST, Preparation, Program
from .slabs import Array, Steps
from .tiny import scratch
from .triangles import sided, triangular
from .updates import updated
from .vectors import MatrixReducer, Reducer, exchanged, scaled

__all__ = ["FIRST_SLABS", "HostDirect"]

_UNKNOWN: Any = object()
_EARLY = MemoryError, LibraryNotFoundError
"""What may fail on one rank before anything has happened: the ordinary way works, or the ranks agree on the error."""
_KEPT_STEPS = rank_share(
    1 << 15, 1 << 20
)  # of all kept programs: each is a call with its arguments, about 500 bytes
_SEEN = rank_share(1 << 16, 1 << 20)  # calls that are remembered by a number each
_LEAST = 1 << 20  # bytes of a set of slabs
_SLABS = "direct slabs"
FIRST_SLABS = _SLABS, 2 * _LEAST
"""The shared buffer of the first two sets of slabs, and its bytes: it takes no memory before it is used."""


class HostDirect:
    """Direct calls of the host engine. Making one is local.

    Args:
        library: the local BLAS.
        buffers: where slabs are; ``FIRST_SLABS`` is made, if ranks share memory.
        operations: sums of arrays.
        transport: which ranks share memory.
        alike: all ranks round alike, as far as is known; if not, none computes what others compute, too.

    Attributes:
        sets: the sets of slabs.
    """

    def __init__(
        self,
        library: str,
        buffers: Buffers,
        operations: HostOperations,
        transport: HostTransport,
        *,
        alike: bool,
    ) -> None:
        self._library, self._buffers, self._alike = library, buffers, alike
        self._operations, self._transport = operations, transport
        self._single = transport.size == 1
        self._able = self._single or (len(transport.nodes) == 1 and not transport.why_not_shared)
        self.sets = SlabSets(self._reserve, _LEAST, MOST)
        self._scratch = scratch()
        self._memory: list[tuple[Array, int]] = []  # the two sets of slabs and their addresses
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}
        # By set of slabs; None for a call that is not for direct calls.
        self._programs: tuple[dict[Asked, Program | None], ...] = {}, {}
        self._reducers: dict[Asked, Reducer | MatrixReducer] = {}
        self._steps = 0
        self._seen: set[int] = set()  # hashes of calls that have been made once
        if self._able and not self._single:
            self.sets.fit(_LEAST)  # the buffer is there

    def run(self, control: Communicator, asked: Asked) -> bool | None:
        """See ``Direct``. Collective over the context."""
        done = self._run(control, asked)
        return done if not done else True

    def factors(self, routine: str, m: int, n: int, width: int) -> bool:
        """See ``Direct``. Local."""
        if FAMILIES[routine] == "lapack":
            return self._able and self._alike and is_small(m, n, width)
        return self._able and may_be_factored(n)

    def factor(self, control: Communicator, asked: Asked) -> Outcome | Literal[False] | None:
        """See ``Direct``. Collective over the context."""
        done = self._run(control, asked)
        if not done:
            return done
        if done.outcome is None:  # of a matrix without elements
            return Outcome(0)
        outcome = done.outcome()
        if done.checksum is not None:
            compare_later(control, asked.call, outcome.info, done.checksum())
        return outcome

    def _run(self, control: Communicator, asked: Asked) -> Program | Literal[False] | None:
        """Run a call; return its program, or what ``Direct.run`` does if that is not done. Collective."""
        if not self._able or (not self._single and control.board is None):
            return None
        channel = control.channel
        channel.take_turn(asked.call)
        try:
            if not self._single:
                return self._run_together(control, asked)
            program: Program | None = self._found(asked)
            if program is None:
                return None
            channel.runs += 1
            _do(program.compute)
            return program
        finally:
            channel.end_turn()

    def _run_together(self, control: Communicator, asked: Asked) -> Program | Literal[False] | None:
        """Run a call if it is for direct calls, and if the ranks agree."""
        try:
            found: Any = self._found(asked)
            if found is None:
                return None
            fits = type(found) is Program
            if fits:
                _do(found.before)
            if not vote_on(control, asked.call, found.number):
                return False
            if not fits:
                if not self.sets.fit(found.nbytes):
                    return False
                found = self._kept(asked, found)
                _do(found.before)
                self._transport.fence()
            control.channel.runs += 1
            _do(found.compute)
            if found.finish:
                self._transport.fence()
                _do(found.finish)
            elif found.finish is not None:
                self._transport.arrive()
            self.sets.turn() if found.staged else self.sets.start_over()
        except BaseException as error:
            break_off(control, error, asked.call)
            raise
        program: Program = found
        return program

    def reduce(self, control: Communicator, asked: Asked) -> Any:
        """See ``Direct``. Collective over the context."""
        if not self._able or (not self._single and control.board is None):
            return None
        channel = control.channel
        channel.take_turn(asked.call)
        try:
            try:
                reducer = self._reducers.get(asked) or self._new_reducer(asked)
                mine = reducer.part()
            except (UnfitError, *_EARLY):
                return None
            rows = [list(mine)] if self._single else gather_on(control, asked.call, reducer.number, mine)
            channel.runs += 1
            return False if rows is None else reducer.total(rows)
        except BaseException as error:
            break_off(control, error, asked.call)
            raise
        finally:
            channel.end_turn()

    def move(self, control: Communicator, moved: Moved) -> bool | None:
        """See ``Direct``. Collective over the context."""
        try:
            move = Move(moved)
        except _EARLY:
            return None
        # a large copy needs no more memory than it has
        room = min(max(_LEAST, self.sets.capacity), self.sets.most)
        if not self._single and (not self._able or control.board is None or move.nbytes > room):
            return None
        channel = control.channel
        channel.take_turn(moved.call)
        try:
            if self._single:
                return move.alone()
            ready = move.nbytes <= self.sets.capacity
            if ready:
                _do(move.write(self._memory[self.sets.half][0]))
            told = gather_on(control, moved.call, move.number, move.told)
            if told is None or not move.fits(told):
                return False
            if not ready:
                if not self.sets.fit(move.nbytes):
                    return False
                _do(move.write(self._memory[self.sets.half][0]))
                self._transport.fence()
            channel.runs += 1
            move.read(self._memory[self.sets.half][0])
            self.sets.turn()
        except BaseException as error:
            break_off(control, error, moved.call)
            raise
        finally:
            channel.end_turn()
        return True

    def _function(self, letter: str, routine: str) -> Callable[..., Any]:
        found = self._functions.get((letter, routine))
        if found is None:
            found = self._functions[letter, routine] = blas.load(self._library, letter, routine)
        return found

    # -- programs

    def _found(self, asked: Asked) -> Any:
        """Return the program of a call; the call itself if it needs more memory; None if it is not for direct calls."""
        found = self._programs[self.sets.half].get(asked, _UNKNOWN)
        if found is not _UNKNOWN:
            return found
        try:
            call = Preparation(
                asked, self._function, self._operations, self._transport, self._scratch, alike=self._alike
            )
            _, _, _, m, n, _ = asked.d
            call.compute = _COMPUTERS[FAMILIES[asked.routine]](call) if m and n else list
            if call.nbytes > self.sets.most:
                raise UnfitError
            return self._kept(asked, call) if call.nbytes <= self.sets.capacity else call
        except UnfitError:
            self._keep(asked, None, in_both=True)
            return None
        except _EARLY:
            return None

    def _kept(self, asked: Asked, call: Preparation) -> Program:
        """Return a call's program in the set of slabs that comes next."""
        program = call.bind(self._memory[self.sets.half] if call.nbytes else None)
        self._keep(asked, program, in_both=not call.nbytes)
        return program

    def _new_reducer(self, asked: Asked) -> Reducer | MatrixReducer:
        of_matrix = ": " in asked.routine
        reducer = (
            MatrixReducer(asked, single=self._single)
            if of_matrix
            else Reducer(asked, self._function, single=self._single)
        )
        if self._comes_again(asked, 1):
            self._reducers[asked] = reducer
        return reducer

    def _keep(self, asked: Asked, program: Program | None, *, in_both: bool) -> None:
        """Keep a program if the call comes again: for both sets of slabs if it uses none."""
        if self._comes_again(asked, 1 if program is None else program.weight):
            half = self.sets.half
            for programs in self._programs if in_both else self._programs[half : half + 1]:
                programs[asked] = program

    def _comes_again(self, asked: Asked, steps: int) -> bool:
        """Return whether a call has been made before, and make room for its steps.

        Most calls on ever new sub-matrices are not made again.
        """
        name = hash(asked)
        if name not in self._seen:
            if len(self._seen) >= _SEEN:
                self._seen.clear()
            self._seen.add(name)
            return False
        self._steps += steps
        if self._steps > _KEPT_STEPS:
            self._forget()
        return True

    def _forget(self) -> None:
        for programs in self._programs:
            programs.clear()
        self._reducers.clear()
        self._steps = 0

    def _reserve(self, nbytes: int) -> None:
        """Replace both sets of slabs; programs are bound to them. Collective over the context."""
        both = self._buffers.get(_SLABS, 2 * nbytes, shared=True)
        self._forget()
        self._memory = [(half, host_address(half)) for half in (both[:nbytes], both[nbytes : 2 * nbytes])]


def _do(steps: Steps) -> None:
    for function, arguments in steps:
        function(*arguments)


_COMPUTERS: dict[str, Callable[[Preparation], Callable[[], Steps]]] = {
    "product": matmul,
    "triangular": triangular,
    "sided": sided,
    "updated": updated,
    "added": added,
    "scaled": scaled,
    "exchanged": exchanged,
    "factored": factored,
    "solved": solved,
    "lapack": computed_by_lapack,
}
