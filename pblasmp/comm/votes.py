# SPDX-License-Identifier: Apache-2.0
"""A single vote on a number in place of an agreement, and calls that all ranks repeat, which take one.

Ranks that vote for unlike numbers agree on the details: see ``agreement``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, Protocol, TypeVar

from .. import _core
from ..errors import RankMismatchError
from .agreement import NUMBER, Agreement, Vote, break_off, check_alive, differs_in
from .communicator import Communicator

_KEPT = 512

T = TypeVar("T")
U = TypeVar("U")


def vote_on(comm: Communicator, call: str, number: int) -> bool:
    """Return whether all ranks make the same call with the same number; what they wrote before is then visible to all.

    Collective over ``comm``. If not, every rank that votes here gets False, and those in an agreement with the fact
    ``NUMBER`` a RankMismatchError in which it differs: then all agree on the details. Inside, break the context if it
    raises what the ranks have not agreed on.

    Args:
        comm: the ranks.
        call: what they call.
        number: of 64 bits, the same on two ranks if, and only if, they give the same arguments.

    Raises:
        RankMismatchError: the ranks made different calls.
        Exception: the fault that another rank has found in the call.
    """
    return gather_on(comm, call, number, ()) is not None


def compare_later(comm: Communicator, call: str, info: int, checksum: int) -> None:
    """Have the next agreement compare what each rank has found by computing the same as the others. Local.

    That is LAPACK's INFO, and a checksum of 32 bits of the result and the pivots. If ranks differ, they all raise an
    error then, and the context is broken: results are made of parts that do not belong together.
    """
    comm.channel.found = info << 32 ^ checksum, call, info, checksum


def gather_on(
    comm: Communicator, call: str, number: int, values: Sequence[float]
) -> list[tuple[float, ...]] | None:
    """Return every rank's values if all ranks make the same call with the same number, else None: see ``vote_on``.

    Collective over ``comm``; at most 4 values, as many on each rank. Without a board the list is empty.
    """
    board = comm.board
    if comm.channel.found:
        number ^= comm.channel.found[0]
    if board is None:
        return _looked_closer(comm, call, number, None)
    comm.channel.begin_agreement()
    told: list[tuple[float, ...]] | None = board.vote(number, values, patient=comm.patient)
    if told is None:
        return late_vote(comm, call, number, len(values))
    comm.channel.found = None
    return told


class Ready(Protocol):
    """What is queued on a GPU with one call of the compiled core.

    Attributes:
        core: the compiled core.
        launch: the address of its ``launch``.
        stream: where it is queued.
    """

    core: _core.Core
    launch: Any
    stream: Any

    def check(self, failed: int) -> None:
        """Raise StatusError for an error of the driver, by its number. Local."""


Launched = Literal["queued", "unfit", "unlike", "unready"]
_LAUNCHED: dict[int, Launched] = {
    _core.QUEUED: "queued", _core.UNFIT_NOW: "unfit", _core.UNLIKE: "unlike", _core.UNREADY: "unready",
}  # fmt: skip


def launch_on(comm: Communicator, call: str, number: int, ready: Ready) -> Launched:
    """Vote as ``gather_on`` does, telling that this rank is ready; queue what is if all ranks are. Collective.

    Collective over ``comm``; ranks that are not ready tell so by ``gather_on``. It takes the turn of this thread, and
    breaks the context if it fails.

    Returns:
        "queued", or why not: "unlike" is None of ``gather_on``; "unready": all make this call, but not all are ready;
        "unfit": nothing has happened, since another GPU is the current one, the stream records, or there is no board.

    Raises:
        Exception: as ``gather_on``; StatusError: the GPU's driver refuses it.
    """
    channel, core = comm.channel, ready.core
    if channel.found or (comm.board is None and comm.size > 1):
        return "unfit"
    check_alive(comm)
    channel.take_turn(call, on_device=False)
    try:
        if comm.board is None:
            found = core.launch_again(None, 0, ready.launch, ready.stream)
        else:
            found = comm.board.vote_to_launch(number, ready.launch, ready.stream, patient=comm.patient)
            if found != _core.UNFIT_NOW:
                channel.begin_agreement()
            if found in (_core.LATE, _core.UNLIKE):
                told = late_vote(comm, call, number, 1)
                if told is None:
                    return "unlike"
                if not all(each[0] for each in told):
                    return "unready"
                found = core.launch_now(ready.launch, ready.stream)
        if found > _core.FAILED:
            ready.check(found - _core.FAILED)
        return _LAUNCHED[found]
    except BaseException as error:
        break_off(comm, error, call)
        raise
    finally:
        channel.end_turn()


def late_vote(comm: Communicator, call: str, number: int, count: int) -> list[tuple[float, ...]] | None:
    """Return what ``gather_on`` does of the vote that this rank has begun last by the board. Collective over ``comm``.

    ``count`` is how many values each rank tells.
    """
    assert comm.board is not None
    posted = comm.board.latest()
    comm.wait(posted, comm.channel.place(call))
    told: list[tuple[float, ...]] | None = posted.told(count)
    if told is None:
        return _looked_closer(comm, call, number, posted)
    comm.channel.found = None
    return told


def _looked_closer(comm: Communicator, call: str, number: int, posted: Any) -> list[tuple[float, ...]] | None:
    """Return what ``gather_on`` does of ranks that did not all vote for this number, or that have no board."""
    vote = Vote(comm, {"call": call, NUMBER: f"direct {number}"}, None, number, posted)
    vote.wait()
    error = vote.outcome()
    if error is None:
        return []
    if isinstance(error, RankMismatchError) and differs_in(error, NUMBER):
        return None
    try:
        raise error
    finally:
        del error  # this frame is in its traceback


class RepeatedCalls:
    """What the ranks of a context have agreed on, by call.

    Each call gets a number, the same on every rank. If all ranks find the same number, all repeat the same call.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._count = 0

    def agree(
        self,
        agreement: Callable[[], Agreement],
        key: Hashable,
        again: Callable[[Any], T],
        first: Callable[[dict[str, Any]], U],
        *,
        voted: bool = False,
    ) -> tuple[int, T | U]:
        """Return the call's number and the result of ``again``, or 0 and the result of ``first``. Collective.

        A call that all ranks repeat takes one vote, and so does one that is new to all; the caller then remembers it,
        by a key of its arguments. ``again`` is given what is remembered, ``first`` the facts of the agreement to fill;
        what they raise is a fault of the call. ``voted``: ``vote_on`` has returned False, now all ranks agree on the
        details.
        """
        number, known = (0, None) if voted else self.known(key)
        if known is None:
            return 0, agree_after(voted, agreement, first)
        try:
            with agreement() as facts:
                facts[NUMBER] = number
                return number, again(known)
        except RankMismatchError as error:
            if not differs_in(error, NUMBER):
                raise
        return 0, agree_after(True, agreement, first)

    def known(self, key: Hashable) -> tuple[int, Any]:
        """Return the number of a call and what is remembered of it; 0 and None if it is new. Local."""
        return self._known.get(key, (0, None))

    def remember(self, key: Hashable, value: Any) -> int:
        """Keep what the ranks have agreed on for a call; return its number, 0 if it is not remembered. Local.

        Every rank does so after the same calls.
        """
        self._count += 1
        if key is not None:
            self._known.pop(key, None)
            self._known[key] = self._count, value
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return 0 if key is None else self._count

    def renew(self, key: Hashable) -> None:
        """Keep a known call as long as one that is remembered now. Every rank does so after the same calls. Local."""
        self._known.move_to_end(key)


def agree_after(voted: bool, agreement: Callable[[], Agreement], read: Callable[[dict[str, Any]], T]) -> T:
    """Return the result of ``read`` in an agreement on a call that other ranks may vote on by ``vote_on``. Collective.

    ``read`` is given the facts to fill, perhaps twice. ``voted``: this rank has voted so, and not all agreed.
    """
    if not voted:
        try:
            with agreement() as facts:
                facts[NUMBER] = 0
                return read(facts)
        except RankMismatchError as error:
            if not differs_in(error, NUMBER):
                raise
    with agreement() as facts:
        return read(facts)
