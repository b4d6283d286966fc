# SPDX-License-Identifier: Apache-2.0
"""Agreement: before collective work all ranks compare what they are about to do, and fail together or not at all.

One reduction of a few integers tells whether every rank made the same call with the same facts and none found a fault.
Only if not are the details gathered; then every rank raises the same error, which names the ranks that differ.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError, PblasmpError, RankMismatchError, printed, ranks_text, shortened
from .communicator import Communicator, greatest
from .mpi_communicator import FINALIZED
from .side_channel import SideChannel, text_of

NUMBER = "number of the call"
"""The fact that differs if ranks make the same call in different ways, or with different arguments."""

_FOUND = "found"
"""The fact that differs if ranks that each computed the same have found different things: see ``compare_later``."""

CLOSING = "closing the context"
_LEAVING = "leaving the context"
_MOST_NAMED = 4  # calls in the first line of an error
_LONGEST = 2000  # characters of what a rank gave
_GRACE_SECONDS = 1.0
BLOCKED_SECONDS = 20.0


class _Mark:
    """What is known about an exception: who agreed on it, and whether this rank shows it. Not sent to other ranks."""

    def __init__(self) -> None:
        self.agreed_by: list[SideChannel] = []
        self.shown_here = True
        self.differing: list[str] = []  # names of the facts that differ between ranks that made the same call

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()


def _mark(error: BaseException) -> _Mark:
    if not hasattr(error, "_pblasmp"):
        error._pblasmp = _Mark()  # type: ignore[attr-defined]
    mark: _Mark = error._pblasmp  # type: ignore[attr-defined]
    return mark


def is_agreed(error: BaseException, comm: Communicator) -> bool:
    """Return whether every rank of ``comm`` raised this error together. Local."""
    return comm.channel in _mark(error).agreed_by


def is_reported_here(error: BaseException) -> bool:
    """Return whether this rank is the one to show ``error`` to the user. Local."""
    return _mark(error).shown_here


def differs_in(error: RankMismatchError, fact: str) -> bool:
    """Return whether the ranks made the same call, but with a different value of this fact on some rank. Local."""
    return fact in _mark(error).differing


def exit_status(error: BaseException) -> int:
    """Return the exit status, not 0, of a process that ends the other ranks because of ``error``. Local."""
    code = error.code if isinstance(error, SystemExit) else 1
    return code if isinstance(code, int) and code != 0 else 1


class Agreement:
    """``with Agreement(comm, "matmul") as facts:`` collects facts and faults; leaving it makes the ranks agree.

    Inside, check the arguments and put into ``facts`` what must be equal on every rank; an exception raised inside is
    this rank's fault. Collective over ``comm``: entered by every rank, left by every rank with the same outcome.

    Args:
        comm: the ranks.
        call: what they call, in messages.
        blocks: a library call inside waits for the other ranks. If it fails on one rank, the others may wait in it
            forever: if they have not voted 20 seconds later, this rank prints its fault and ends the job.
        nests: the block agrees on other communicators of the context. If it fails on one rank, the others may wait for
            it in one of those: if they have not voted 20 seconds later, this rank's fault breaks the context.

    Raises:
        RankMismatchError: the ranks made different calls or have different facts.
        Exception: the fault that one or more ranks found; raised on every rank, with the ranks named.
        SystemExit: a rank leaves the context with this exit status.
        ClosedError: the context is broken, or MPI is finalized.
    """

    def __init__(self, comm: Communicator, call: str, *, blocks: bool = False, nests: bool = False) -> None:
        self._comm, self._blocks, self._nests = comm, blocks, nests
        self._facts: dict[str, Any] = {"call": call}

    def __enter__(self) -> dict[str, Any]:
        check_alive(self._comm)
        self._comm.channel.take_turn(self._facts["call"])
        user_state = self._comm.channel.user_state
        self._before = None if user_state is None else np.seterr(**user_state)
        return self._facts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            np.seterr(**self._before)
        channel, call = self._comm.channel, self._facts["call"]
        try:
            if error is not None and not isinstance(error, Exception):
                # An interrupt is no fault of the arguments. SystemExit is told where the context is left.
                if not isinstance(error, SystemExit):
                    channel.break_(error, call)
                return
            if error is not None and text_of(error) in channel.cause:
                return  # this error has broken the context: nobody votes any more
            _raise_device_fault(channel, error)  # other ranks may wait for this device instead of voting
            outcome = _vote(self._comm, self._facts, error, blocks=self._blocks, nests=self._nests)
        except BaseException as second:
            channel.break_(second, call)  # the other ranks are waiting for this rank's vote
            raise
        finally:
            channel.end_turn()
        if outcome is not None:
            if error is not None:  # one traceback, which shows where this rank found its fault
                outcome.__traceback__ = error.__traceback__
            try:
                raise outcome from None
            finally:
                # this frame is in the traceback: it would keep the error, and all callers with their arrays, until
                # Python looks for cycles
                del outcome, error, trace


class Running:
    """``with Running(comm, "matmul"):`` around a collective call: an exception on this rank alone breaks the context.

    Errors that the ranks agreed to raise pass through. After any other exception the others would wait for
    messages that never come. So the context is broken from then on: every rank that uses it or waits in it raises
    ClosedError, which names this rank and the exception. Transfers in flight are ended, or their memory is kept.

    NumPy ignores floating-point errors inside, whatever its error state on this rank, as BLAS does: they depend on the
    values that a rank has. In an agreement, where all ranks share an error, the user's state applies.

    Local; may be nested.

    Args:
        comm: the ranks, those of the whole context.
        call: the name of the call in messages.
        checks: afterwards, look for ranks that have left; not needed if the call only queues work.
        computes: whether NumPy computes anything inside.
        on_device: make the rank's device the current one, if it is not yet.

    Raises:
        ClosedError: the context is broken, another thread is using it, or MPI is finalized.
    """

    def __init__(
        self,
        comm: Communicator,
        call: str,
        *,
        checks: bool = True,
        computes: bool = True,
        on_device: bool = True,
    ) -> None:
        self._comm, self._call, self._on_device = comm, call, on_device
        self._checks, self._computes = checks, computes

    def __enter__(self) -> None:
        check_alive(self._comm)
        channel = self._comm.channel
        channel.take_turn(self._call, on_device=self._on_device)
        if self._computes:
            self._before = np.seterr(all="ignore")
            self._outermost = channel.user_state is None
            if self._outermost:
                channel.user_state = self._before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        channel = self._comm.channel
        if self._computes:
            np.seterr(**self._before)
            if self._outermost:
                channel.user_state = None
        try:
            if error is not None:
                break_off(self._comm, error, self._call)
            elif self._checks:
                channel.check()  # data from a rank that has left may be wrong
                channel.forget()
        finally:
            channel.end_turn()


def check_alive(comm: Communicator) -> None:
    """Raise ClosedError if MPI is finalized. Local."""
    if comm.gone():
        raise ClosedError(FINALIZED)


def break_off(comm: Communicator, error: BaseException, call: str) -> None:
    """Break the context of ``comm`` on every rank, unless all ranks leave ``call`` with ``error``. Local.

    StatusError instead if the device is lost, ClosedError if another rank broke the context first.
    """
    channel = comm.channel
    try:
        _raise_device_fault(channel, error)
    except Exception as lost:
        channel.break_(lost, call)
        raise
    if is_agreed(error, comm):
        return
    own = (
        not isinstance(error, Exception) or isinstance(error, ClosedError) or text_of(error) in channel.cause
    )
    if channel.cause and not own:
        raise channel.error() from error
    channel.break_(error, call)


def _raise_device_fault(channel: SideChannel, error: BaseException | None) -> None:
    """Raise the error of this rank's device if it is lost, whichever ``error`` a library has raised because of that."""
    lost = None if error is None else channel.device_fault()
    if lost is not None and lost is not error:
        raise lost from error


def _vote(
    comm: Communicator, facts: dict[str, Any], error: Exception | None, *, blocks: bool, nests: bool
) -> BaseException | None:
    """Return the error that the ranks agree to raise, None if there is none. Collective.

    Raise ``error`` itself if the others wait for this rank elsewhere.
    """
    call = facts["call"]
    try:
        facts = _as_texts(facts)
    except Exception as unprintable:  # noqa: BLE001 - the user's code is this rank's fault
        facts, error = {"call": call}, error or unprintable
    vote = Vote(comm, facts, error)
    if error is not None and (blocks or nests):
        deadline = time.monotonic() + BLOCKED_SECONDS
        while not vote.done() and not comm.channel.cause:
            if time.monotonic() > deadline:
                if nests:
                    raise error
                _abort(comm, error)
            comm.channel.look()
            time.sleep(0.001)
    vote.wait()
    return vote.outcome()


def leave(comm: Communicator, error: BaseException) -> None:
    """Make the other ranks raise ``error`` at their next agreement, or end the job if none comes in a second. Local.

    For an exception that perhaps only this rank has seen. Returns when every rank knows of it: all ranks then raise
    ``error``, and one of them shows it. Otherwise it is shown here and every rank is aborted. In a broken context
    there are no more agreements: the ranks wait a second for each other to leave.
    """
    if comm.size == 1 or comm.channel.disowned or comm.gone():
        return
    channel, deadline = comm.channel, time.monotonic() + _GRACE_SECONDS
    lost = channel.device_fault()
    if lost is not None:  # other ranks may be waiting for this device: a note tells them
        channel.break_(lost, _LEAVING)
    vote = None if channel.cause else Vote(comm, {"call": _LEAVING}, error)
    while vote is not None and not channel.cause:
        try:
            if vote.done():
                vote.outcome(error)
                return
        except ClosedError:  # the context was broken meanwhile
            break
        except RuntimeError:  # from MPI or PyTorch: a rank cannot be reached
            _abort(comm, error)
        if time.monotonic() > deadline:
            _abort(comm, error)
        time.sleep(0.01)
        channel.look()
    is_own_error = not isinstance(error, (ClosedError, SystemExit))
    channel.leave(2 if is_own_error else 1)
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        everyone, shows = channel.left()
        if everyone:
            _mark(error).shown_here = shows == comm.rank
            return
        if time.monotonic() > deadline + (0 if shows == comm.rank else _GRACE_SECONDS / 2):
            _abort(comm, error)
        time.sleep(0.01)


def _abort(comm: Communicator, error: BaseException) -> NoReturn:
    traceback.print_exception(error)
    sys.stderr.flush()
    comm.abort(exit_status(error))


def closing(comm: Communicator, *, here: bool, may_idle: bool = False) -> tuple[bool, bool]:
    """Agree that the context ends; return whether every rank still had it, and whether all would keep it.

    Collective over ``comm``.
    """
    channel = comm.channel
    try:
        with Agreement(comm, CLOSING):
            pass
        try:
            everywhere, idles = (not one for one in greatest(comm, (not here, not may_idle)))
        except BaseException as error:
            channel.break_(error, CLOSING)  # the other ranks are waiting for this rank's answer
            raise
    except BaseException as error:
        if channel.cause and not is_agreed(error, comm):
            channel.leave(1)  # now, since the caller may catch the error and never close again
        raise
    if not everywhere:
        channel.broken_by_agreement("a rank dropped it without closing it")
    return everywhere, idles


class Vote:
    """One reduction over the ranks' facts (texts) and faults, and its outcome."""

    def __init__(
        self,
        comm: Communicator,
        facts: dict[str, str],
        error: BaseException | None,
        number: int | None = None,
        posted: Any = None,
    ) -> None:
        channel = comm.channel
        if channel.found:
            _, before, info, checksum = channel.found
            facts[_FOUND] = f"{before}: INFO {info}, a result with the checksum {checksum:08x}"
            channel.found = None
        self._comm, self._error, self._facts = comm, error, facts
        self._all = np.empty(3, np.int64)
        self._request = None
        if posted is not None:  # it has been cast, and is done
            posted.write(self._all)
            return
        self._place = channel.next_agreement(facts["call"])
        if number is None:
            self._mine = _values(tuple(facts.items()), error is not None)
        else:
            self._mine = np.array([~number, number, 0], np.int64)
        self._request = (comm.board or comm).imax(self._mine, self._all)

    def done(self) -> bool:
        """Return whether every rank has voted."""
        return self._request is None or bool(self._request.Test())

    def wait(self) -> None:
        """Wait until every rank has voted."""
        if self._request is not None:
            self._comm.wait(self._request, self._place)

    def outcome(self, instead: BaseException | None = None) -> BaseException | None:
        """Return None, or the error that every rank raises: ``instead`` if this rank has its own."""
        low, high, faulty = self._all.tolist()
        if not faulty and ~low == high:
            return None
        shows = None  # Python does not show a SystemExit either
        if self._error is not None and not isinstance(self._error, SystemExit):
            shows = is_reported_here(self._error)
        everyone = self._comm.allgather(
            (self._facts, None if self._error is None else _pack(self._error), shows)
        )
        facts, packed, showing = (list(column) for column in zip(*everyone, strict=True))
        faults = [None if each is None else _unpack(*each) for each in packed]
        found = [each[_FOUND] for each in facts if _FOUND in each]
        error = instead
        if error is None and len({*found}) > 1:
            error = _unlike(found)
            self._comm.channel.broken_by_agreement(str(error))
        if error is None:
            error = _combine(faults) if faulty else _mismatch(facts)
        if any(showing):
            reporter = showing.index(True)
        elif False in showing:
            reporter = -1  # a rank of another communicator shows it
        else:
            reporter = faults.index(None) if None in faults else 0
        mark = _mark(error)
        mark.agreed_by.append(self._comm.channel)
        mark.shown_here = self._comm.rank == reporter
        if any(each["call"] in (CLOSING, _LEAVING) for each in facts):
            self._comm.channel.broken_by_agreement("a rank has left this context")
        return error


@functools.lru_cache(1024)  # every run of a plan has the same facts
def _values(facts: tuple[tuple[str, str], ...], faulty: bool) -> NDArray[np.int64]:
    """Return a rank's vote: a 64-bit hash of its facts, twice (once inverted), and whether it found a fault."""
    digest = hashlib.blake2b(repr(sorted(facts)).encode(), digest_size=8).digest()
    mine = int.from_bytes(digest, "little", signed=True)
    return np.array([~mine, mine, faulty], dtype=np.int64)


def _mismatch(facts: list[dict[str, str]]) -> RankMismatchError:
    calls = [each["call"] for each in facts]
    if len(set(calls)) > 1:
        some = ", ".join(list(dict.fromkeys(calls))[:_MOST_NAMED])
        return RankMismatchError(f"the ranks made different calls: {some}{_by_rank(calls)}")
    everyones = dict.fromkeys(name for each in facts for name in each)
    names = [name for name in everyones if len({each.get(name) for each in facts}) > 1]
    # A fact that some ranks lack shows that they came another way: as to a plan. Without a number of the call they do
    # not come again to agree on the details.
    common = [name for name in names if all(name in each for each in facts)]
    shown = common or [name for name in names if name != NUMBER][:1]
    text = "".join(f"\n  {name}:" + _by_rank([str(each.get(name)) for each in facts]) for name in shown)
    error = RankMismatchError(f"{calls[0]}: the ranks gave different arguments: {', '.join(shown)}{text}")
    _mark(error).differing = common
    return error


def _unlike(found: list[str]) -> RankMismatchError:
    return RankMismatchError(
        "the ranks have computed the same, each for itself, and found different things, so that its result is useless:"
        f"{_by_rank(found)}\nTheir libraries round differently: see that all ranks have the same ones, with the same "
        "numbers of threads"
    )


def _as_texts(facts: dict[str, Any]) -> dict[str, str]:
    # as str has them: texts of a class of the user's are hashed and compared by the user's code
    return {
        name: str.__str__(value if isinstance(value, str) else printed(value))
        for name, value in facts.items()
    }


def _pack(error: BaseException) -> tuple[bytes, str]:
    """Return ``error`` without its traceback, pickled, and its text: pickling and printing run the user's code."""
    text = text_of(error)
    if isinstance(error, SystemExit) and error.code:  # exit status 0 on one rank is an error on the others
        return pickle.dumps(SystemExit(exit_status(error))), text
    if isinstance(error, Exception):
        try:
            packed = pickle.dumps(error)
            if type(pickle.loads(packed)) is type(error):
                return packed, text
        except Exception:  # noqa: BLE001
            pass
    if isinstance(error, MemoryError):  # CuPy's own class cannot be unpickled
        return pickle.dumps(MemoryError(str(error))), text
    return b"", text


def _unpack(packed: bytes, text: str) -> BaseException:
    """Return another rank's error, to be raised on this rank, too."""
    if packed:
        try:
            error = pickle.loads(packed)
            str(error)
            if isinstance(error, BaseException):
                return error
        except Exception:  # noqa: BLE001
            pass
    return PblasmpError(text)


def _combine(faults: list[BaseException | None]) -> BaseException:
    """Return one error for the faults that some ranks found: of the type of the first one, with the ranks named."""
    found = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
    first = next((fault for _, fault in found if isinstance(fault, Exception)), found[0][1])
    if isinstance(first, SystemExit):
        return first
    found = [(rank, fault) for rank, fault in found if isinstance(fault, Exception)]
    if len({str(fault) for _, fault in found}) > 1:
        where = f" (on rank {found[0][0]})" + "".join(
            f"\n  on rank {rank}: {type(fault).__name__}: {fault}" for rank, fault in found[1:]
        )
    elif len(found) < len(faults):
        where = f" (on {ranks_text([rank for rank, _ in found])})"
    else:
        where = ""
    if isinstance(first, OSError) and first.errno is not None:
        return type(first)(first.errno, f"{first.strerror}{where}", first.filename)
    if not where:
        return first
    if isinstance(first, MemoryError):  # CuPy's class takes other arguments
        return MemoryError(f"{first}{where}")
    try:
        error = type(first)(f"{first}{where}")
        vars(error).update(vars(first))  # its other attributes
        return error
    except Exception:  # noqa: BLE001 - a class of the user's that takes other arguments
        return PblasmpError(f"{type(first).__name__}: {first}{where}")


def _by_rank(values: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return "".join(
        f"\n    {shortened(value, _LONGEST)} on {ranks_text(ranks)}" for value, ranks in groups.items()
    )
