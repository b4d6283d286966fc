# SPDX-License-Identifier: Apache-2.0
"""How a direct call runs on CPU ranks: in the compiled core, which prepares it anew each time.

One meeting of the ranks per call: each rank first writes what others need of its operands into memory that its node
shares; then all vote on one number, which also says that everything has been written; then each rank computes its part
of the result.
If several ranks compute a part together, they meet once more before they take it; who takes nothing does not wait.
What ranks of another node need travels with the vote: one message from each rank to each other node. What is computed
together between nodes takes one more, back; a Cholesky factorization that they share one for each block of columns.
There are two sets of slabs. A rank that writes into one has voted since all ranks began to read the other, so nobody
reads this one any more. After a call without slabs both are free, and the next call takes the first.

The core does all that as long as a wait takes a moment. Longer waits, and what to do if ranks differ, are Python's.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from .... import _core
from ...._core import objects
from ....comm import (
    LARGEST,
    YIELDS,
    Communicator,
    allgather_alike,
    break_off,
    compare_later,
    gather_on,
    late_vote,
)
from ....comm.board import Board
from ....comm.communicator import Request
from ....errors import ClosedError, LibraryNotFoundError
from ...direct import (
    FAMILIES,
    ROUTINE_NUMBERS,
    Asked,
    Held,
    Moved,
    Outcome,
    Part,
    RoutineForm,
    alias,
    host_address,
)
from ...direct.asked import SlabSets
from ...direct.sub_matrix import SubMatrix, UnfitError
from ...local.sums import REDUCTIONS
from .. import blas
from ..host_operations import HostOperations
from ..host_transport import Buffers, HostTransport
from .by_python import MatrixReducer, Move

_EARLY = MemoryError, LibraryNotFoundError
"""What may fail on one rank before anything has happened: the ordinary way works, or the ranks agree on the error."""
_LEAST, _MOST = 1 << 20, 32 << 20  # bytes of a set of slabs; a call that needs more is worth a plan
SLABS = "direct slabs"
FIRST_SLABS = SLABS, 2 * _LEAST
"""The shared buffer of the first two sets of slabs, and its bytes: it takes no memory before it is used."""
_ALIGNED = 64

_LETTERS = "sdcz"
_REAL = {  # what types have in place of a routine
    "gerc": "ger", "hemm": "symm", "hemv": "symv", "herk": "syrk", "her2k": "syr2k", "her": "syr", "her2": "syr2",
}  # fmt: skip
_COMPLEX = {"ger": "geru", "orgqr": "ungqr", "ormqr": "unmqr"}
_WITH_TAU = "orgqr", "ormqr"
_NUMBERS = "dot", "asum"  # in double precision for all types
(
    _UNFIT, _BY_PYTHON, _, _DONE_STAGED, _AWAIT_VOTE, _AWAIT_OTHERS, _AWAIT_SUMS, _NEEDS_ROOM, _BROKEN, _, _UNKNOWN,
) = range(len(_core.STATUSES))  # fmt: skip


class Limits(ctypes.Structure):
    """Up to where which way of computing a direct call is faster: ``limits`` of call.h.

    ``python -m benchmarks.factorization_ways`` measures those of factorizations, and times what is computed on both
    sides of each.

    Attributes:
        tiny: elements of all matrices of a call that each rank computes all of: to divide the work takes a second
            meeting, or hands results from rank to rank. To copy more elements takes longer than that.
        stay: elements that move in a product before it is worth looking whether fewer do if results move instead. All
            ranks that have a part of what stays then share the work.
        portion: elements of a symmetric matrix that a cache keeps between the product with them and the one with their
            transpose.
        handoff: elements of a triangular matrix that are copied while a block's solution is handed on, when nobody
            computes; or sent while it goes to another node.
        uncopied: multiplications of a real product for which a BLAS with small kernels copies no operand: narrow ones
            are computed in pieces of no more.
        transposed: elements of the result for which it copies none of x^T y.
        strip: rows, of a matrix by columns, that such a piece has at least.
        equations: of a triangular solve, from which on halves and a product are faster than its trsm; at least 16.
        lapack: multiplications of a factorization that each rank computes all of. Larger calls are worth a plan, in
            which the ranks share the work.
        cholesky: rows and columns: larger matrices are factored in panels, whose updates move less memory.
        width: of a block of the diagonal, in Cholesky's.
        part: rows: the least that a rank has of a matrix there.
        rows: of which a part, or a piece, is a multiple, as those are that the kernels of OpenBLAS compute at a time.
        meeting: multiplications of an update, or of a triangular product, that take as long as ranks that wait for
            each other.
        factoring: multiplications of an update that take as long as to factor a block of the diagonal.
        dealt: indices of k that a process has, from which on between nodes what it has of both operands is a product of
            its own: then neither is copied to have all of k side by side.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("tiny", "stay", "portion", "handoff", "uncopied", "transposed", "strip", "equations", "lapack"),
            *("cholesky", "width", "part", "rows", "meeting", "factoring", "dealt"),
        )
    )


LIMITS = Limits(
    tiny=1 << 10, stay=1 << 13, portion=1 << 16, handoff=1 << 12, uncopied=1_000_000, transposed=1200, strip=120,
    equations=64, lapack=9_000_000, cholesky=1536, width=48, part=128, rows=8, meeting=470_000, factoring=240_000,
    dealt=64,
)  # fmt: skip
_ELEMENTS = 1 << 16  # that a rank has room for, in at most two matrices


def is_small(m: int, n: int, width: int) -> bool:
    """Return whether each rank may factor m × n elements, and solve for ``width`` columns, by itself. Local."""
    return m * n * (min(m, n) + width) <= LIMITS.lapack and m * (n + width) <= _ELEMENTS


def may_be_factored(n: int) -> bool:
    """Return whether a symmetric matrix of order ``n`` may be factored at once. Local."""
    return bool(n <= LIMITS.cholesky)


class HostDirect:
    """Direct calls of the host engine; without the core none is for them. Making one is local.

    Args:
        buffers: where slabs are; ``FIRST_SLABS`` is made, if ranks share memory.
        operations: they know how many ranks may compute at the same time.
        transport: which ranks share memory.
        alike: all ranks round alike, as far as is known; if not, none computes what others compute, too.
        small_kernels: the BLAS multiplies small real matrices without copying them, and has one thread: several would
            wait for each other in each of many small products.

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
        small_kernels: bool,
    ) -> None:
        self._library, self._buffers, self._transport = library, buffers, transport
        self._operations, self._alike = operations, alike
        self._single = transport.size == 1
        core = _core.load()
        self._on_one_node = len(transport.nodes) == 1
        # between nodes all ranks go on, or none does: they agree below
        everywhere = self._on_one_node or all(each.core for each in transport.comm.locations())
        self._under_way = ""  # the name of the call that is
        self._core = core if self._single or (everywhere and not transport.why_not_shared) else None
        self.sets = SlabSets(self._reserve, _LEAST, _MOST)
        self._memory: list[Any] = []  # the two sets
        if self._core is None:
            return
        self._held = ctypes.create_string_buffer(self._core.call_size())
        self._call = ctypes.c_void_p(ctypes.addressof(self._held))
        self._state = state = _core.CallState.from_buffer(self._held)
        self._go_on = self._core.call_go_on
        self._knows_blas = False  # the core knows its functions
        self._addresses = 0, 0  # of the sets
        self._board: Board | None = None  # which the core knows
        self._parts = np.frombuffer(memoryview(self._held), np.int64, 30, 64).reshape(5, 6)  # of the request
        self._places = np.zeros(objects.PLACES_SIZE, np.uint8)
        self._learned: dict[int, Held] = {}  # in these places, by address
        self._arguments = objects.Arguments(
            self._call.value, places=host_address(self._places), held=objects.slot(Held, "_at")
        )
        self._given = ctypes.c_void_p(ctypes.addressof(self._arguments))
        state.ranks, state.rank, state.alike = transport.size, transport.rank, alike
        state.most, state.limits = _MOST, ctypes.addressof(LIMITS)
        state.small_kernels = small_kernels
        # Aligned, since a BLAS may round otherwise elsewhere: all ranks must find the same pivots.
        self._scratch = np.empty(_core.SCRATCH + _ALIGNED, np.uint8)
        state.scratch = -(-host_address(self._scratch) // _ALIGNED) * _ALIGNED
        self._failures: list[BaseException] = []  # of a wait
        self._arrivals: list[Request] = []  # the messages of other nodes, to wait for them
        self._waits = state.waits = _core.WAIT(partial(_waited, transport, self._failures, self._arrivals))
        state.nodes = 1
        if self._on_one_node and not self._single:
            self.sets.fit(_LEAST)  # the buffer is there
        elif not self._single:  # they do not grow: what ranks send has a limit, too
            fits = self.sets.fit(LARGEST)
            state.nodes, state.most = len(transport.nodes), LARGEST
            if not all(allgather_alike(transport.comm, fits)):
                self._core = None

    def untouched(self) -> int:
        """Return how many bytes of the sets take no memory: between nodes they are large from the start. Local."""
        between_nodes = self._core is not None and not self._on_one_node
        return 2 * (self.sets.capacity - self._state.touched) if between_nodes else 0

    def run(self, control: Communicator, asked: Asked | RoutineForm, args: Sequence[Any] = ()) -> bool | None:
        """See ``Direct``. Collective over the context."""
        done = self._in_turn(control, asked, self._status, args)
        return done and True  # or whether it used slabs

    def reduce(self, control: Communicator, asked: Asked | RoutineForm, args: Sequence[Any] = ()) -> Any:
        """See ``Direct``. Collective over the context."""
        compute = self._of_matrix if ": " in asked.routine else self._reduced
        return self._in_turn(control, asked, compute, args, answers=bool(args))

    def factors(self, routine: str, m: int, n: int, width: int) -> bool:
        """See ``Direct``. Local."""
        if FAMILIES[routine] == "lapack":
            return self._core is not None and self._alike and is_small(m, n, width)
        return self._core is not None and (self._on_one_node or self._alike) and may_be_factored(n)

    def factor(
        self, control: Communicator, asked: Asked | RoutineForm, args: Sequence[Any] = ()
    ) -> Outcome | Literal[False] | None:
        """See ``Direct``. Collective over the context."""
        outcome: Outcome | Literal[False] | None
        outcome = self._in_turn(control, asked, self._outcome, args, answers=bool(args))
        return outcome

    def move(self, control: Communicator, moved: Moved) -> bool | None:
        """See ``Direct``. Collective over the context."""
        if not self._on_one_node:
            return None
        try:
            move = Move(moved)
        except _EARLY:
            return None
        done: bool | None
        if self._single:
            done = self._in_turn(control, moved, lambda *_: move.alone())
            return done
        # a large copy needs no more memory than it has
        if move.nbytes > min(max(_LEAST, self.sets.capacity), self.sets.most):
            return None
        done = self._in_turn(control, moved, partial(self._moved, move))
        return done

    def _in_turn(
        self,
        control: Communicator,
        asked: Asked | RoutineForm | Moved,
        compute: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        answers: bool = False,
    ) -> Any:
        """Return what ``compute`` does, None if there is no core or no board. Collective over the context.

        With ``answers`` it is what a ``RoutineForm`` makes of that.
        """
        if self._core is None or (not self._single and control.board is None):
            return None
        channel, call = control.channel, asked.call
        channel.take_turn(call)
        outer, self._under_way = self._under_way, call
        try:
            # A signal's handler, a finalizer or a tracer calls: the core has the arguments of one call.
            if outer:
                if self._single:
                    return None
                raise ClosedError(
                    f"{call} was called in the midst of {outer}, as a signal's handler or a finalizer may do: "
                    "the ranks can see their calls in different orders"
                )
            done = compute(control, asked, args)
            if done is not None and done is not False:
                channel.runs += 1
                if answers:
                    assert not isinstance(asked, (Asked, Moved))
                    return asked.answer(args, self, done)
            return done
        except BaseException as error:
            break_off(control, error, call)
            raise
        finally:
            self._under_way = outer
            channel.end_turn()

    # -- calls: each returns None and False as ``Direct.run`` does

    def _outcome(
        self, control: Communicator, asked: Asked | RoutineForm, args: Sequence[Any]
    ) -> Outcome | Literal[False] | None:
        self._state.workers = self._operations.workers
        done = self._status(control, asked, args)
        if not done:
            return False if done is False else None
        state, routine, dtype, parts = self._state, asked.routine, asked.dtype, self._parts.tolist()
        (_, _, _, m, n, _), (_, _, _, *of_d, _) = parts[0], parts[3]
        if not min(of_d):
            return Outcome(0)
        made = diagonal = None
        if routine in ("getrf", "gesv", "getrf getri", "geqrf"):
            kind = dtype if routine == "geqrf" else np.int32
            made = np.frombuffer(state.numbers, kind, min(m, n)).copy()
        if routine in ("gesv", "posv"):
            step = (state.factor_ld + 1) * dtype.itemsize
            diagonal = alias(state.factor, (n,), (step,), dtype.str).copy()
        if (
            FAMILIES[routine] == "lapack" and not self._single
        ) or not self._on_one_node:  # each has computed all
            compare_later(control, asked.call, state.info, state.checksum)
        return Outcome(state.info, made, diagonal)

    def _reduced(self, control: Communicator, asked: Asked | RoutineForm, args: Sequence[Any]) -> Any:
        status = self._status(control, asked, args)
        if not status:
            return status
        state, (part, total) = self._state, REDUCTIONS[asked.routine]
        if status == _BY_PYTHON:
            parts = (asked.a, asked.b) if isinstance(asked, Asked) else (self.operand(0), self.operand(1))
            mine = _part_by_numpy(parts, part, asked.dtype)
            found = self._gathered(control, asked, state.number ^ state.unlike, mine, total)
            if found is not False:
                self.sets.start_over()  # as the other ranks do
            return found
        if self._single:
            return total([state.tells[: state.told]])
        assert control.board is not None
        return total(control.board.rows(state.told))

    def _of_matrix(self, control: Communicator, asked: Asked, _: Sequence[Any]) -> Any:
        try:
            reducer = MatrixReducer(asked, single=self._single)
            mine = reducer.part()
        except (UnfitError, *_EARLY):
            return None
        return self._gathered(control, asked, reducer.number, mine, reducer.total)

    def _gathered(
        self,
        control: Communicator,
        asked: Asked | RoutineForm,
        number: int,
        mine: Sequence[float],
        total: Callable[..., Any],
    ) -> Any:
        """Return the total of what the ranks tell."""
        rows = [list(mine)] if self._single else gather_on(control, asked.call, number, mine)
        return False if rows is None else total(rows)

    def _moved(self, move: Move, control: Communicator, moved: Moved, _: Sequence[Any]) -> bool | None:
        assert self._core is not None
        ready = move.nbytes <= self.sets.capacity
        if ready:
            move.write(self._core, self._memory[self.sets.half])
        told = gather_on(control, moved.call, move.number, move.told)
        if told is None or not move.fits(told):
            return False
        if not ready:
            if not self.sets.fit(move.nbytes):
                return False
            move.write(self._core, self._memory[self.sets.half])
            self._transport.fence()
        move.read(self._core, self._memory[self.sets.half])
        self.sets.turn()
        return True

    # -- the core

    def _status(
        self, control: Communicator, asked: Asked | RoutineForm, args: Sequence[Any]
    ) -> int | Literal[False] | None:
        """Have the core carry out a call; return how that has ended, else None or False as ``Direct.run`` does."""
        assert self._core is not None
        sets, channel = self.sets, control.channel
        if not self._knows_blas:
            try:
                self._load()
            except _EARLY:
                return None
        if not self._single:
            self._expect_others(control)
        if isinstance(asked, Asked):
            status = self._start(asked)
        else:
            given = self._arguments
            given.form, given.given = asked.address, id(args)
            status = self._core.arguments_start(self._given)
            if status == _UNKNOWN:
                status = self._start_with_learned(asked, args)
        if status <= _BY_PYTHON:
            return status or None
        if not self._single:
            channel.begin_agreement()
        while status > _DONE_STAGED:
            if not self._waited_for(control, asked.call, status):
                return None if self._single else False
            status = self._go_on(self._call)
        channel.found = None
        if status == _DONE_STAGED and not self._single:
            sets.turn()
        elif sets.half:
            sets.start_over()
        return status

    def _expect_others(self, control: Communicator) -> None:
        """Tell the core how the ranks meet in the next call."""
        state, board, found = self._state, control.board, control.channel.found
        assert board is not None
        if board is not self._board:
            self._meet_by(board)
        state.unlike = found[0] if found else 0
        state.memory = self._addresses[self.sets.half]
        state.yields = YIELDS if control.patient else 0

    def _start(self, asked: Asked) -> int:
        """Have the core read a call and start it; return how that has ended."""
        assert self._core is not None
        given, count = asked.given, 0
        if given:
            count = len(given) // (asked.dtype.itemsize if asked.routine in _WITH_TAU else 4)
            room = self._state.numbers
            ctypes.memmove(room, given, min(len(given), ctypes.sizeof(room)))
        self._arguments.given, routine = id(asked), ROUTINE_NUMBERS[asked.routine]
        status: int = self._core.asked_start(self._given, routine, count)
        if status == _UNKNOWN:
            for part in (*asked[2:6], asked.beside):
                if part is not None:
                    operator.index(part[0])
            status = self._core.asked_start(self._given, routine, count)
        return status

    def _start_with_learned(self, form: RoutineForm, args: Sequence[Any]) -> int:
        """Tell the core of the local arrays that it does not know, and start the call; return how that has ended."""
        assert self._core is not None
        if len(self._learned) > objects.PLACES - objects.MATRICES:
            self._places[:] = 0
            self._learned.clear()
        if not form.learn(args, self._learn):
            return _UNFIT
        self._arguments.given = id(args)
        status: int = self._core.arguments_start(self._given)
        return _UNFIT if status == _UNKNOWN else status

    def _learn(self, array: Any, desc: Any, held: Held, rows: int, cols: int) -> None:
        """Tell the core of a local array with its descriptor."""
        assert self._core is not None
        pair, at = (array, desc), operator.index(held)
        self._learned[at], self._arguments.given = held, id(pair)
        self._core.arguments_learn(self._given, ctypes.c_void_p(at), *map(ctypes.c_int64, (rows, cols)))

    def operand(self, place: int) -> Part | None:
        """Return a sub-matrix of the last call whose arguments the core has read: A with 0, and so on. Local."""
        of, i, j, m, n, transposed = self._parts[place].tolist()
        return (self._learned[of], i, j, m, n, bool(transposed)) if of else None

    def vector(self) -> tuple[bool, int]:
        """Return whether this rank is in the process column, or row, of the last call's vectors. Local.

        And where the first of them begins, counted from 1.
        """
        return bool(self._arguments.in_column), self._arguments.start

    def _meet_by(self, board: Board) -> None:
        """Have the ranks meet by these boards."""
        state, here, node_of = self._state, board.here, board.node_of
        state.votes, state.meets = board.address, None if here is None else here.address
        if node_of is not None:
            state.node, state.node_of = node_of[state.rank], node_of.ctypes.data
        self._board, self._arrivals[:] = board, [board.messages()]

    def _waited_for(self, control: Communicator, call: str, status: int) -> bool:
        """Do what the core needs to go on; return whether it may."""
        board = control.board
        if status == _AWAIT_VOTE:
            return late_vote(control, call, self._state.number, self._state.told) is not None
        if status == _AWAIT_SUMS and board is not None:
            control.wait(board.messages())
            return True
        if status == _AWAIT_OTHERS and board is not None and board.here is not None:
            control.wait(board.here.latest())
            return True
        if status == _BROKEN:
            # Before a wait can catch it, ctypes shows and drops what a signal's handler raises.
            raise self._failures.pop() if self._failures else KeyboardInterrupt
        assert status == _NEEDS_ROOM
        fits = self.sets.fit(self._state.nbytes)
        self._state.memory, self._state.most = self._addresses[self.sets.half], self.sets.most
        return fits

    def _load(self) -> None:
        """Tell the core where the BLAS has its functions."""
        for letter, functions in zip(_LETTERS, self._state.functions, strict=True):
            others = _REAL if letter in "sd" else _COMPLEX
            functions[:] = [
                blas.address(self._library, "d" if name in _NUMBERS else letter, others.get(name, name))
                for name in _core.BLAS
            ]
        self._knows_blas = True

    def _reserve(self, nbytes: int) -> None:
        """Replace both sets of slabs. Collective over the context."""
        both = self._buffers.get(SLABS, 2 * nbytes, shared=not self._single)
        self._memory = [both[:nbytes], both[nbytes : 2 * nbytes]]
        first = host_address(both)
        self._addresses, self._state.capacity = (first, first + nbytes), nbytes


def _waited(
    transport: HostTransport, failures: list[BaseException], arrivals: list[Request], flag: int
) -> int:
    """Wait for a flag, or messages; return COME, or 0 if that has failed: the core then returns."""
    try:
        if flag:
            transport.await_flag(flag)
        else:
            transport.comm.wait(arrivals[0])
    except BaseException as error:  # noqa: BLE001 - C cannot pass it on
        failures.append(error)
        return 0
    return _core.COME


def _part_by_numpy(
    parts: Iterable[Part | None], part: Callable[..., Sequence[float]], dtype: np.dtype
) -> Sequence[float]:
    """Return what this rank finds in its part of the vectors."""
    vectors = [SubMatrix(each) for each in parts if each is not None]
    x, nothing = vectors[0], np.empty(0, dtype)
    arrays = [y.local()[:, 0] if y.active else nothing for y in vectors]
    with np.errstate(all="ignore"):
        return part(np, arrays, lambda at: x.rows.to_global(x.row, at))
