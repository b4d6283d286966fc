# SPDX-License-Identifier: Apache-2.0
"""Notes between the ranks of a context, outside its calls: that a rank has broken it, is waiting, or leaves it.

Every wait of this package goes through :meth:`SideChannel.until`, which looks for such notes. So a rank that waits for
another one that will never arrive gets an error instead.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from typing import Any, Protocol

from ..errors import ClosedError, RankMismatchError
from .notes import (
    ALL_LEFT,
    ASKS,
    BROKEN,
    COME,
    HERE,
    LEFT,
    MAKING,
    WAITS,
    Meeting,
    Members,
    NoteTransport,
    Stall,
    read_note,
)
from .polling import PAUSE_SECONDS, Polling, nap

STALL_SECONDS = 1.0  # after which a rank tells where it waits
_DRAIN_SECONDS = 0.1  # that transfers of a broken context get to end
BLOCKED_SECONDS = 1.0  # without a look for notes, after which a rank is assumed to wait in a library
_LISTENERS = 16  # ranks that hear of each one that leaves: all to all, 4,096 ranks sent millions of notes
_LONGEST_TEXT = 2000  # characters of a cause: short notes can be sent without anyone waiting for them

_kept_for_good: list[Any] = []  # transfers that did not end, with the memory that they use
_open: weakref.WeakSet[SideChannel] = weakref.WeakSet()
_broken: list[SideChannel] = []  # those of broken contexts whose communicators have not been freed
_made: Counter[Members] = Counter()
_threads: set[int] = set()  # identifiers of the threads that have used a context


class Mailer(Protocol):
    """What sends messages by the compiled core. Local."""

    def under_way(self) -> list[tuple[Any, bool]]:
        """Return the messages that are under way, and whether they are received; none begins after this."""


class RankDevice(Protocol):
    """A device (GPU) that computes for a rank, and on which work may wait for other ranks. Local."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a block in which it is this thread's current device, whichever the user has made so."""

    def fault(self) -> Exception | None:
        """Return why it cannot be used any more, None while it can."""

    def abort(self, *, blocked: bool = False) -> None:
        """End work that waits for other ranks, or never free what it uses. Neither raises nor waits for long.

        ``blocked``: the rank's own thread may be waiting in the device's libraries.
        """


class SideChannel:
    """Notes between the ranks of one context. Every method is local.

    Args:
        rank, members: this rank's number, and the processes in rank order.

    Attributes:
        connected: notes can travel.
        cause: empty, or why no collective call is possible any more.
        raised: this rank's program has had an exception with the cause, or need not have one.
        closed: the ranks have closed the context together.
        name: the name of the context in messages.
        disowned: this process is a fork of the process that the context belongs to.
        device: the device to abort when the context breaks, or None.
        on_break: called once, when this rank's own thread learns that the context is broken.
        user_state: NumPy's error state outside the call that is running, None outside calls.
        runs: how many runs of plans this rank has queued; on a device the ranks do not agree on each of them.
        index: which channel of these processes.
        found: what the next agreement compares besides, a number and what it is made of: see ``compare_later``.
        communicators: MPI's of the context, each with what this rank has counted on it.
        dirty: they have been used without being counted, or transfers on them were given up.
        posts: what sends messages by the compiled core, which this channel does not see.
    """

    def __init__(self, rank: int, members: Members) -> None:
        self.rank, self.size = rank, len(members)
        self.cause = ""
        self.raised = False
        self.closed = False
        self.disowned = False
        self.name = "a context"
        self.device: RankDevice | None = None
        self.on_break: Callable[[], None] | None = None
        self.user_state: Any = None
        self.runs = 0
        self.found: tuple[int, str, int, int] | None = None
        self.communicators: list[tuple[Any, Any]] = []
        self.dirty = False
        self.posts: list[Mailer] = []
        self._members = members
        self.index = _made[members]
        _made[members] += 1
        self.connected = False
        self._transport: NoteTransport | None = None
        self._told = True
        self._agreements = 0
        self._conflict: Meeting | None = None
        self._waiting: dict[int, Meeting] = {}
        self._stalls: dict[int, Stall] = {}
        self._left: dict[int, int] = {}
        self._shows = -1  # the rank that shows its error, once this one knows it
        self._broken_by = rank
        # Ranks that ask in which channel others wait: the agreement here, and what stands for the channel they mean.
        self._asked: dict[int, tuple[int, int]] = {}
        # The last agreement in which each rank has said that it waits, and its name.
        self._met: dict[int, tuple[int, str]] = {}
        self._under_way: list[tuple[Any, bool]] = []
        self._most = 64
        self._turn = threading.RLock()
        self._turns = 0
        self._on_device: AbstractContextManager[Any] | None = None
        self._reading = threading.Lock()
        self._looks = 0
        self._polling = Polling()
        self._gives_up = False
        # number of looks when the note was read, and the time
        self._heard_at: tuple[int, float] | None = None

    def connect(self, transport: NoteTransport) -> None:
        """Send and receive notes through ``transport`` from now on."""
        self.connected = True
        if self.size > 1:
            self._transport = transport
            _open.add(self)

    # -- one thread at a time

    def take_turn(self, call: str, *, on_device: bool = True) -> None:
        """Reserve the context for this thread until ``end_turn``; a thread may take several turns.

        Meanwhile the rank's device is the current one, if it has to be ``on_device``.

        Raises:
            ClosedError: the context is broken, or another thread is using it. That breaks it, since the ranks could see
                the calls in different orders.
        """
        _threads.add(get_ident())
        if not self._turn.acquire(False):
            if not self.cause:
                self._told = False
                self.cause = f"on rank {self.rank} a thread called {call} while another thread was using it"
            raise self.error()
        if self.cause:
            self._turn.release()
            raise self.error()
        if on_device and not self._turns and self.device is not None:
            self._on_device = self.device.current()
            self._on_device.__enter__()
        self._turns += 1

    def end_turn(self) -> None:
        """Let other threads use the context, and make the device current that was so before."""
        self._turns -= 1
        if not self._turns and self._on_device is not None:
            self._on_device.__exit__(None, None, None)
            self._on_device = None
        self._turn.release()

    # -- waiting

    def next_agreement(self, call: str) -> Meeting:
        """Return the place at which a rank waits in the agreement that it begins now."""
        self.begin_agreement()
        return self.place(call)

    def begin_agreement(self) -> None:
        """Begin an agreement; ``place`` is where this rank waits in it."""
        self._agreements += 1

    def place(self, call: str) -> Meeting:
        """Return the place at which a rank waits in the agreement that it has begun last."""
        return Meeting(self._members, self.index, self._agreements, f"{call} ({self.name})")

    def until(
        self,
        done: Callable[[], Any],
        *,
        patient: bool = False,
        pause: Callable[[], None] | None = None,
        sleep: Callable[[], None] | None = None,
        place: Meeting | None = None,
        for_runs: bool = False,
        peers: Collection[int] = (),
    ) -> None:
        """Wait until ``done()``.

        Args:
            done: called again and again.
            patient: leave the core to other processes meanwhile.
            pause: replaces polling: sleeps until it may be done, but not for long.
            sleep: like ``pause``, but used only after polling for a while, or at once if other programs need the cores.
            place: where all ranks wait for each other, if this is such a wait.
            for_runs: this is a wait for work that was queued on the device.
            peers: the ranks that it needs, if others may be in later calls.

        Raises:
            ClosedError: the context is broken.
            RankMismatchError: one of the peers is in a later call.
        """
        began, stalled = time.monotonic(), False
        looks = self._polling.looks(began, patient=patient, pause=pause, sleep=sleep, meets=place is not None)
        while not done():
            if not next(looks):
                continue
            self.check()
            if self._asked and place is not None:
                self._answer(place)
            if (place or for_runs or peers) and time.monotonic() >= began + STALL_SECONDS:
                stalled = self._stalled(place, peers, again=stalled)

    def _stalled(self, place: Meeting | None, peers: Collection[int], *, again: bool) -> bool:
        """Tell where this rank has waited for long, unless it has done so; raise an error if it waits in vain."""
        if peers:
            self._check_peers(peers)
            return False
        if place is not None and _several_threads():  # another one may take part while this one waits
            return again
        if not again:
            self._tell_where(place)
        if place is not None:
            self._check_order(place)
        return True

    def watch(self, transfer: Any, *, receives: bool = False) -> Any:
        """Remember a transfer (what has mpi4py's ``Test``) until it is done, and return it."""
        self._under_way.append((transfer, receives))
        if len(self._under_way) > self._most:
            self.forget()
            self._most = max(64, 2 * len(self._under_way))
        return transfer

    def forget(self) -> None:
        """Forget the transfers that are done."""
        self._under_way = [each for each in self._under_way if each[0]]

    # -- a broken context

    def error(self) -> ClosedError:
        """Return the error to raise, which every use of a broken context gets."""
        self.raised = True
        cause = self.cause or "it was closed in this call"
        return ClosedError(f"this context is broken, no collective call is possible any more: {cause}")

    def check(self) -> None:
        """Look for notes; raise ClosedError if the context is broken."""
        self.look()
        if self.cause:
            raise self.error()

    def look(self) -> None:
        """Read the notes that have arrived, and send the cause if another thread could not do so."""
        if self._transport is not None and not self.closed:
            _if_free(self._turn, partial(self._look, self._transport))

    def _look(self, transport: NoteTransport) -> None:
        self._looks += 1
        self._tell_cause()
        self._read(transport)
        self._tell_cause()
        if self._gives_up:
            self._gives_up = False
            self._give_up()

    def rescue(self) -> bool:
        """Look for notes in another thread while this rank's own may wait in a library; return whether it was aborted.

        If the context has been broken for a second and this rank has not looked for notes meanwhile, the device is
        aborted, which ends the wait in the library.
        """
        transport = self._transport
        if transport is None or self.closed or not transport.any_thread:
            return False
        self._read(transport)
        if not self.cause:
            return False
        now = time.monotonic()
        if self._heard_at is None or self._heard_at[0] != self._looks:
            self._heard_at = self._looks, now
        if now < self._heard_at[1] + BLOCKED_SECONDS:
            return False
        self._abort_device(blocked=True)
        return True

    def _read(self, transport: NoteTransport) -> None:
        """Read the notes that have arrived, unless another thread is doing so."""
        _if_free(self._reading, partial(self._read_all, transport))

    def _read_all(self, transport: NoteTransport) -> None:
        for note in transport.arrived():
            if (found := read_note(note)) is None:
                continue
            index, kind, rank, value = found
            if index != self.index or rank == self.rank or rank >= self.size:
                continue  # of other ranks, meant for an earlier context of theirs, or sent by this rank
            if kind == WAITS:
                self._waiting[rank] = value
            elif kind == HERE:
                self._note_stall(rank, value)
            elif kind == LEFT:
                self._left[rank] = value
            elif kind == ALL_LEFT:
                self._shows = value
            elif kind == ASKS:
                self._asked[rank] = value
            elif kind == COME:
                self._met[rank] = value
            elif not self.cause:
                self._gives_up = True
                self._broken_by = rank
                self.cause, self._conflict = value

    def break_(self, error: BaseException, call: str) -> None:
        """Tell all ranks that this one has left ``call`` with ``error``; end its transfers, or keep their memory."""
        if self._transport is None or self.closed:
            return
        if not self.cause:
            self.cause, self._told = f"rank {self.rank} left {call} with {text_of(error)}", False
        self.raised = True
        self.look()

    def broken_by_agreement(self, cause: str) -> None:
        """Note that the context has ended, as all ranks know."""
        self.cause, self.raised = self.cause or cause, True
        self._let_go()

    def device_fault(self) -> Exception | None:
        """Return why this rank's device is lost; None if it is not, or if the context is broken already."""
        return None if self.device is None or self.cause else self.device.fault()

    def _abort_device(self, *, blocked: bool = False) -> None:
        device, self.device = self.device, None
        if device is not None:
            device.abort(blocked=blocked)

    def _let_go(self) -> None:
        """Do what is local when a context breaks."""
        posts, self.posts = self.posts, []
        for each in posts:
            self._under_way += each.under_way()
        if self.communicators and self not in _broken:
            _broken.append(self)
        self._abort_device()
        on_break, self.on_break = self.on_break, None
        if on_break is not None:
            on_break()

    def _tell_cause(self) -> None:
        if self.cause and not self._told:
            self._send(BROKEN, (self.cause[:_LONGEST_TEXT], self._conflict))
            self._told = True
            self._give_up()

    def _send(self, kind: str, value: Any, to: int | None = None) -> None:
        if self._transport is not None and not self.closed:
            note = json.dumps((self.index, kind, self.rank, value), ensure_ascii=False)
            self._transport.send(note.encode(errors="surrogatepass"), to)

    def _give_up(self) -> None:
        """End the transfers in flight; those that do not end are kept forever, with their memory."""
        self._let_go()
        under_way, self._under_way = self._under_way, []
        _kept_for_good.append(under_way)
        for transfer, receives in under_way:
            if receives and transfer and hasattr(transfer, "Cancel"):
                self.dirty = True
                transfer.Cancel()
        deadline = time.monotonic() + _DRAIN_SECONDS
        left = [transfer for transfer, _ in under_way if transfer]
        while left and time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # a transfer failed: errors of MPI and PyTorch
                left = [transfer for transfer in left if not transfer.Test()]
            time.sleep(PAUSE_SECONDS)
        self.dirty |= bool(left)
        under_way[:] = [(transfer, False) for transfer in left]
        _kept_for_good[:] = filter(None, _kept_for_good)

    def is_idle(self) -> bool:
        """Return whether nothing is under way here. Local."""
        return not self.dirty and all(transfer.Test() for transfer, _ in self._under_way)

    def forget_broken(self) -> None:
        """Forget this channel, whose communicators have been freed. Local."""
        self._transport, self.communicators = None, []
        _broken.remove(self)

    def leave(self, weight: int) -> None:
        """Tell the first ranks, and the one that has broken the context, that this rank leaves it.

        The weight is 0 without an error, 1 with a broken context's error that is not caught, 2 with another error.
        """
        if self.rank not in self._left:
            self._left[self.rank] = weight
            for rank in self._listeners() - {self.rank}:
                self._send(LEFT, weight, rank)

    def _listeners(self) -> set[int]:
        return {*range(min(self.size, _LISTENERS)), self._broken_by}

    def left(self) -> tuple[bool, int]:
        """Return whether every rank has left, and which of them should show its error; -1 if that is not known yet.

        One of those that hear of all tells all others that wait: of two ranks that break it, not all tell both.
        """
        self.look()
        if self._shows < 0 and self.rank in self._listeners():
            shows = min(self._left, key=lambda rank: (-self._left[rank], rank))
            if len(self._left) < self.size:
                return False, shows
            self._shows = shows
            waiting = {rank for rank, weight in self._left.items() if weight}
            if self.rank == min(self._listeners() & waiting, default=-1):
                for rank in waiting - {self.rank}:
                    self._send(ALL_LEFT, shows, rank)
        return self._shows >= 0, self._shows

    def close(self) -> None:
        """Close the channel, as all ranks do together."""
        self.look()
        self.closed = True
        _open.discard(self)

    def disown(self) -> None:
        """Give the context up in a forked child: it belongs to the parent."""
        self.disowned, self._transport, self.device, self.on_break = True, None, None, None
        self._turn, self._turns, self._on_device = threading.RLock(), 0, None
        self.cause, self.raised = f"it belongs to process {os.getppid()}, of which this one is a fork", True

    # -- contexts that the ranks use in different orders

    def making(self) -> Meeting:
        """Return the place at which a rank waits while it makes a context."""
        return Meeting(self._members, self.index, MAKING, "making a context")

    # -- a rank that does not know in which context it makes a call

    def ask(self, first: SideChannel) -> None:
        """Ask whether other ranks wait in the agreement that this rank begins next here.

        If all ranks ask, and all mean ``first``, it is that one.
        """
        self._asked[self.rank] = self._agreements + 1, first._name_of_ranks()
        self._send(ASKS, self._asked[self.rank])

    def _name_of_ranks(self) -> int:
        return zlib.crc32(repr((self._members, self.index)).encode())

    def ask_no_longer(self) -> None:
        """Withdraw the question, if there is one."""
        if self._asked.pop(self.rank, None):
            self._send(ASKS, (0, 0))

    def _check_peers(self, peers: Collection[int]) -> None:
        """Raise RankMismatchError if one of these ranks waits in the next agreement, which this one has not begun."""
        if self.rank not in self._asked:
            self.ask(self)
        for rank, call in self.waiting().items():
            if rank in peers:
                raise RankMismatchError(f"rank {rank} makes another call: it waits in {call}")

    def _answer(self, place: Meeting) -> None:
        """Tell the ranks that ask where this one waits."""
        asking = [rank for rank, (number, _) in self._asked.items() if 0 < number <= self._agreements]
        for rank in asking:
            self._send(COME, (self._asked.pop(rank)[0], place.call), rank)

    def waiting(self) -> dict[int, str]:
        """Return the ranks that wait in the agreement that this rank, which asks, begins next, with their calls."""
        self.look()
        return {rank: call for rank, (number, call) in self._met.items() if number > self._agreements}

    def is_awaited(self, call: str) -> bool:
        """Return whether one of them waits in this call."""
        return any(each.startswith(f"{call} (") for each in self.waiting().values())

    def meant(self, first: SideChannel) -> SideChannel | None:
        """Return which channel it is if all ranks ask, ``first`` or this one; None if they do not all ask here."""
        meant = [each for number, each in self._asked.values() if number == self._agreements + 1]
        if len(meant) < self.size:
            return None
        return first if {*meant} == {first._name_of_ranks()} else self

    def _tell_where(self, place: Meeting | None) -> None:
        """Tell where this rank waits, None for its device: one rank of each context, so that many waits cost little.

        In a context that a device computes for, rank 0 compares where the others wait. Of two contexts that ranks use
        in different orders, it is the first process that has both: once it waits in one of them, it can tell.
        """
        if self.device is not None:
            stall = Stall(self._agreements, self.runs, "" if place is None else place.call)
            if self.rank == 0:
                self._note_stall(0, stall)
            else:
                self._send(HERE, tuple(stall), 0)
        mine = set(self._members)
        for other in list(_open) if place is not None else []:
            if other is not self and not other.cause:
                judge = other._members.index(min(mine.intersection(other._members)))
                if judge != other.rank:
                    other._send(WAITS, place, judge)

    def _note_stall(self, rank: int, new: Stall) -> None:
        """Break the context if a device waits for a run that a rank in a later agreement has not begun."""
        self._stalls[rank] = new
        for each in self._stalls.items():
            for (waiting, on), (late, at) in ((each, (rank, new)), ((rank, new), each)):
                behind = at.agreements > on.agreements and at.runs < on.runs
                if at.call and not on.call and behind and not self.cause:
                    self._told = False
                    self.cause = (
                        f"rank {waiting} waits for run {at.runs + 1} of a plan, "
                        f"which rank {late}, waiting in {at.call}, has not begun"
                    )

    def _check_order(self, place: Meeting) -> None:
        """Raise ClosedError if a rank that this one waits for is itself waiting for this one elsewhere."""
        me = self._members[self.rank]
        for rank, elsewhere in self._waiting.items():
            if me in elsewhere.members and _is_behind(elsewhere):
                self._conflict, self._told = elsewhere, False
                self.cause = (
                    f"the ranks use their contexts in different orders: rank {self.rank} waits in {place.call}, "
                    f"rank {rank} in {elsewhere.call}"
                )
                self.check()
        for other in list(_open):
            if other is not self:
                other.look()
                if other._conflict == place:
                    self.cause, self._told = other.cause, False
                    self.look()
                    raise self.error()


def _is_behind(place: Meeting) -> bool:
    """Return whether this process has not reached a place yet. Local."""
    if place.number == MAKING:
        return _made[place.members] <= place.channel
    here = [each for each in _open if (each._members, each.index) == (place.members, place.channel)]
    return any(each._agreements < place.number for each in here)


def where_others_wait(
    channels: Sequence[SideChannel], first: SideChannel, call: str = "", limit: float = math.inf
) -> SideChannel | None:
    """Return the channel, of several, in whose next agreement other ranks wait, for a rank that cannot tell.

    If all ranks of ``channels[0]`` ask, it is that one, or ``first`` if all of them have this as ``first``. In
    another call than this rank's others may wait because they are ahead: for a second such a channel does not count.
    Collective over the channels' ranks, each of which waits in one of them or asks; with a limit local.

    Args:
        channels, first: see above.
        call: this rank's call; empty: any call counts.
        limit: seconds after which it is None.
    """
    began = time.monotonic()
    for each in channels:
        each.ask(first)
    found, over = None, False
    while found is None and not over:
        # Before the last look, since this rank may have had no core for long.
        over = time.monotonic() > began + limit
        late = not call or (not over and time.monotonic() > began + STALL_SECONDS)
        awaited = (each for each in channels if each.is_awaited(call) or (late and each.waiting()))
        found = next(awaited, None) or channels[0].meant(first)
        found = found or next((each for each in channels if each.cause), None)
        nap(began)
    for each in channels:
        each.ask_no_longer()
    return found


def broken_channels(members: Members) -> list[SideChannel]:
    """Return the channels of broken contexts of these processes that still have communicators. Local."""
    _broken[:] = [each for each in _broken if not each.dirty]
    return [each for each in _broken if each._members == members]


def number_open() -> int:
    """Return how many contexts of this process have not been closed. Local."""
    return len(_open)


def _if_free(lock: Any, work: Callable[[], None]) -> None:
    """Do something with a lock, unless another thread has it. Local.

    Handlers of signals, which may raise, run between two steps of Python. Here taking the lock and noting that is one.
    """
    held: list[bool] = []
    try:
        held.extend(map(lock.acquire, [False]))
        if held[0]:
            work()
    finally:
        if True in held:
            lock.release()


def text_of(error: BaseException) -> str:
    """Return the type and the message of an exception, even if its own code fails. Local."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 - the user's code
        text = f"(its message cannot be shown: {type(second).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _after_fork() -> None:
    """Give up all contexts in a child, which is not its parent's rank."""
    for channel in list(_open):
        channel.disown()
    _broken.clear()


os.register_at_fork(after_in_child=_after_fork)


def _several_threads() -> bool:
    """Return whether more than one thread that has used a context is still running. Local."""
    if len(_threads) > 1:
        _threads.intersection_update(sys._current_frames())
    return len(_threads) > 1
