# SPDX-License-Identifier: Apache-2.0
"""Notes between ranks that are threads: a broken context, turns, leaving, and contexts in different orders."""

import contextlib
import itertools
import json
import os
import pickle
import signal
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from pblasmp.comm import notes as notes_module
from pblasmp.comm import polling, side_channel
from pblasmp.comm.agreement import Agreement, Running, closing, is_reported_here, leave
from pblasmp.comm.choice import Serial
from pblasmp.comm.side_channel import SideChannel, text_of
from pblasmp.errors import ClosedError, PblasmpError, RankMismatchError
from pblasmp.runtime import runtime
from tests.helpers.interrupts import InterruptError
from tests.helpers.threads import on_ranks

BROKEN = "this context is broken, no collective call is possible any more: "


def raised(work, *args):
    """Return what ``work`` raises."""
    try:
        work(*args)
    except BaseException as error:  # noqa: BLE001 - it is the result
        return error
    return None


def agrees(comm, call="call", **facts):
    with Agreement(comm, call) as known:
        known.update(facts)


def runs(comm, error=None, call="matmul"):
    with Running(comm, call):
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_of_one_rank_breaks_the_context_on_all(error):
    def work(comm):
        first = raised(runs, comm, error if comm.rank == 1 else None)
        return first, raised(agrees, comm)

    found = on_ranks(3, work)
    why = f"{BROKEN}rank 1 left matmul with {text_of(error)}"
    assert found[1][0] is error
    for first, then in found:
        assert type(then) is ClosedError
        assert str(then) == why
        assert first in (None, error) or str(first) == why


def test_the_first_cause_counts():
    def work(comm):
        raised(runs, comm, ValueError("first") if comm.rank == 0 else None)
        time.sleep(0.05)
        comm.channel.look()
        raised(runs, comm, ValueError("second") if comm.rank == 1 else None)
        time.sleep(0.05)
        return str(raised(agrees, comm))

    assert on_ranks(2, work) == [f"{BROKEN}rank 0 left matmul with ValueError: first"] * 2


def test_an_exception_while_the_ranks_vote_breaks_the_context(monkeypatch):
    from pblasmp.comm.agreement import Vote

    def work(comm):
        return raised(agrees, comm), raised(agrees, comm)

    original = Vote.outcome

    def outcome(self, instead=None):
        if self._comm.rank == 1:
            raise MemoryError("no room")
        return original(self, instead)

    monkeypatch.setattr(Vote, "outcome", outcome)
    for first, then in on_ranks(3, work):
        assert first is None or isinstance(first, MemoryError | ClosedError)
        assert str(then) == f"{BROKEN}rank 1 left call with MemoryError: no room"


def test_alone_nothing_breaks():
    comm = Serial()
    assert isinstance(raised(runs, comm, MemoryError("no room")), MemoryError)
    assert raised(agrees, comm) is None


class Unprintable:
    def __repr__(self):
        raise ValueError("mine")

    __str__ = __repr__


def test_a_fact_that_cannot_be_shown_is_a_fault_of_its_rank():
    def work(comm):
        fact = Unprintable() if comm.rank == 1 else 0
        return str(raised(lambda: agrees(comm, fact=fact))), raised(agrees, comm)

    assert on_ranks(3, work) == [("mine (on rank 1)", None)] * 3


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("mine")


def test_an_error_that_cannot_be_shown_is_told_by_its_type():
    assert text_of(UnprintableError()) == "UnprintableError: (its message cannot be shown: ValueError)"
    assert text_of(ValueError()) == "ValueError"

    def work(comm):
        def fails():
            with Agreement(comm, "call"):
                if comm.rank == 1:
                    raise UnprintableError

        error = raised(fails)
        return type(error), str(error)

    words = "UnprintableError: (its message cannot be shown: ValueError) (on rank 1)"
    assert on_ranks(2, work) == [(PblasmpError, words)] * 2


class Transfer:
    """Something under way that ends ``after`` so many looks at it, or when it is canceled."""

    def __init__(self, after=1 << 60):
        self.after, self.canceled = after, False

    def __bool__(self):
        return self.after > 0

    def Test(self):  # noqa: N802 - as in mpi4py
        self.after -= 1
        return not self

    def Cancel(self):  # noqa: N802 - as in mpi4py
        self.canceled, self.after = True, 1


def test_transfers_of_a_broken_context_are_ended_or_kept(monkeypatch):
    monkeypatch.setattr(side_channel, "_DRAIN_SECONDS", 0.02)
    monkeypatch.setattr(side_channel, "_kept_for_good", kept := [])
    sent, sending, receiving, received = Transfer(3), Transfer(), Transfer(), Transfer(0)

    def work(comm):
        if comm.rank == 0:
            for transfer in (sent, sending):
                comm.channel.watch(transfer)
            for transfer in (receiving, received):
                comm.channel.watch(transfer, receives=True)
            return raised(runs, comm, ValueError("mine"))
        return None

    on_ranks(2, work)
    assert (receiving.canceled, received.canceled, sending.canceled) == (True, False, False)
    assert [[transfer for transfer, _ in each] for each in kept] == [[sending]]  # nothing of the other rank


def test_transfers_that_are_done_are_forgotten():
    channel = SideChannel(0, (0, 1))
    for _ in range(1000):
        channel.watch(Transfer(0))
    assert len(channel._under_way) <= 64
    under_way = [channel.watch(Transfer()) for _ in range(300)]
    channel.forget()
    assert [transfer for transfer, _ in channel._under_way] == under_way


def test_two_threads_at_once():
    def work(comm):
        if comm.rank == 1:
            found = []

            def first():
                with Running(comm, "first"):
                    thread = threading.Thread(target=lambda: found.append(raised(agrees, comm, "second")))
                    thread.start()
                    thread.join()

            why = str(raised(first))
            return why if why == str(found[0]) else "the first thread got another error"
        return str(raised(agrees, comm))

    why = f"{BROKEN}on rank 1 a thread called second while another thread was using it"
    assert on_ranks(3, work) == [why] * 3


def test_threads_may_take_turns():
    def work(comm):
        found = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: found.append(raised(agrees, comm)))
            thread.start()
            thread.join()
        return found

    assert on_ranks(2, work) == [[None] * 3] * 2


def test_notes_of_an_earlier_channel_are_not_taken_for_this_ones():
    def work(comm):
        if comm.rank == 0:
            comm.channel.index += 1
            raised(runs, comm, ValueError("of another"))
            comm.channel.index -= 1
        else:
            time.sleep(0.1)
            comm.channel.check()

    assert on_ranks(2, work) == [None, None]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_is_told_that_the_context_is_not_its_own():
    def work(comm):
        if comm.rank:
            return b""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writing, str(raised(agrees, comm)).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        told = os.read(reading, 1000)
        os.close(reading)
        os.close(writing)
        return told

    told, _ = on_ranks(2, work)
    assert told.decode() == f"{BROKEN}it belongs to process {os.getpid()}, of which this one is a fork"


def test_closing_tells_whether_all_still_had_it():
    assert on_ranks(3, lambda comm: closing(comm, here=True)) == [(True, False)] * 3
    assert on_ranks(3, lambda comm: closing(comm, here=True, may_idle=True)) == [(True, True)] * 3
    assert on_ranks(3, lambda comm: closing(comm, here=True, may_idle=comm.rank > 0)) == [(True, False)] * 3

    def lost(comm):
        everywhere, _ = closing(comm, here=comm.rank != 1)
        return everywhere, comm.channel.cause

    assert on_ranks(3, lost) == [(False, "a rank dropped it without closing it")] * 3


def test_other_calls_while_one_closes():
    def work(comm):
        return raised(agrees, comm) if comm.rank else raised(lambda: closing(comm, here=True))

    assert {type(error) for error in on_ranks(2, work)} == {RankMismatchError}


def test_of_many_ranks_few_hear_who_leaves(monkeypatch):
    """They tell the others that wait. Who breaks the context is one of them."""
    monkeypatch.setattr(side_channel, "_LISTENERS", 3)

    def kinds(*broken_by, caught=()):
        """The notes on leaving, and which ranks show their errors."""
        told, ended = [], [ValueError("mine") for _ in range(9)]
        together = threading.Barrier(len(broken_by))

        def work(comm):
            send = comm.channel._transport.send

            def sends(note, to=None):
                told.append((json.loads(note)[1], 8 if to is None else 1))
                send(note, to)

            comm.channel._transport.send = sends
            try:
                with Running(comm, "matmul"):
                    if comm.rank in broken_by:
                        together.wait()
                        raise ended[comm.rank]
                    comm.barrier()
            except Exception as error:  # noqa: BLE001 - it is the result
                if comm.rank in caught:
                    comm.channel.leave(0)
                else:
                    leave(comm, error)
                return error

        found = on_ranks(9, work)
        counts = Counter()
        for kind, count in told:
            counts[kind] += count
        left = [rank for rank in range(9) if rank not in caught]
        return dict(counts), [rank for rank in left if is_reported_here(found[rank])]

    # ranks 0 to 2 and the one that breaks it hear of all others
    assert kinds(7) == ({"broken": 8, "left": 4 * 8, "all left": 8}, [7])
    assert kinds(0) == ({"broken": 8, "left": 3 * 8, "all left": 8}, [0])
    assert kinds(7, caught=range(7)) == ({"broken": 8, "left": 4 * 8, "all left": 1}, [7])
    assert kinds(0, caught=(0, 1)) == ({"broken": 8, "left": 3 * 8, "all left": 6}, [2])
    for _ in range(5):
        assert kinds(5, 7)[1] == [5]  # each takes itself for the one that all others tell


# -- contexts that the ranks use in different orders: the channels of rank 0, and what rank 1 tells it


class Told:
    """Notes of another rank, which the test writes; and those that this one has sent."""

    any_thread = True

    def __init__(self):
        self.coming, self.sent, self.to = [], [], []

    def send(self, note, to=None):
        self.sent.append(notes_module.read_note(note))
        self.to.append(to)

    def arrived(self):
        notes, self.coming = self.coming, []
        return [note if isinstance(note, bytes) else json.dumps(note).encode() for note in notes]


@pytest.fixture
def channels(monkeypatch):
    """Two contexts of ranks 0 and 1, as rank 0 has them."""
    monkeypatch.setattr(side_channel, "_open", weakref.WeakSet())
    monkeypatch.setattr(side_channel, "_made", Counter())
    monkeypatch.setattr(side_channel, "_threads", set())
    monkeypatch.setattr(side_channel, "STALL_SECONDS", 0.02)
    made = []
    for name in ("a", "b"):
        channel = SideChannel(0, (0, 1))
        channel.connect(Told())
        channel.name = name
        made.append(channel)
    return made


class Intruder:
    """What makes ``pickle.loads`` run code."""

    def __reduce__(self):
        return os._exit, (3,)


def test_what_is_no_note_is_ignored(channels):
    a, _ = channels
    told = "broken", "waits", "here", "left"
    place = [[0, 1], 1, 1, "gather (b)"]
    good = {"broken": ["a cause", place], "waits": place, "here": [1, 0, "matmul"], "left": 1}
    values = [
        None, True, -1, 1.5, "", "left", [], {}, [[]], [None] * 3, ["", None], ["a cause"], ["a cause", 1], [3, None],
        ["a cause", [[0], 0, 0]], ["a cause", ["01", 0, 0, "x"]], [1, 2, 3], ["1", 0, "matmul"], [1, -1, "matmul"],
        [["0"], 1, 1, "x"], [[0, 1], -1, 1, "x"], [[0, 1], 1, 1.0, "x"], [[0, 1], 1, 1, 5], [5, 1, 1, "x"],
    ]  # fmt: skip
    bad = [
        pickle.dumps(Intruder()), b"", b"\xff\xfe", b"[" * 100_000, b"[0," + b"1" * 10_000 + b"]",
        b"null", b"{}", b"[]",
        *([0, kind, 1, value] for kind in told for value in values),
        *([index, kind, 1, good[kind]] for kind in told for index in (1, -1, True, "0", None, [0])),
        *([0, kind, rank, good[kind]] for kind in told for rank in (0, 2, -1, True, 1.0, "1", None, [1])),
        *([0, kind, 1, "a cause"] for kind in ("other", None, 0, ["left"], {})),
        [0, "left", 1, 1, 1], [0, "left", 1],
    ]  # fmt: skip
    a._transport.coming = bad
    a.look()
    assert (a.cause, a._left, a._stalls, a._waiting) == ("", {}, {}, {})
    a._transport.coming = [[0, kind, 1, good[kind]] for kind in told[::-1]]  # the same, well formed
    a.look()
    assert (a.cause, a._left, a._stalls) == ("a cause", {1: 1}, {1: (1, 0, "matmul")})
    assert a._waiting == {1: elsewhere(1)}
    assert a._conflict == elsewhere(1)


def test_any_text_travels(channels):
    a, _ = channels
    a.cause = '\udc80 \N{SNOWMAN} \0 "'
    a._told = False
    a.look()
    assert notes(a, "broken") == [(a.cause, None)]


def notes(channel, kind):
    return [value for _, each, _, value in channel._transport.sent if each == kind]


def later(seconds=0.1):
    """What is done after a while."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def elsewhere(number, index=1, call="gather (b)"):
    return notes_module.Meeting((0, 1), index, number, call)


@pytest.mark.parametrize(
    "place", [elsewhere(1), elsewhere(2), elsewhere(-1, index=2, call="making a context")], ids=str
)
def test_ranks_that_wait_for_each_other_in_two_contexts(channels, place):
    a, b = channels
    if place.number == 2:
        b.next_agreement("an earlier one")
    a._transport.coming.append((0, "waits", 1, place))
    here = a.next_agreement("matmul")
    error = raised(lambda: a.until(later(5), place=here))
    order = "the ranks use their contexts in different orders"
    assert str(error) == f"{BROKEN}{order}: rank 0 waits in matmul (a), rank 1 in {place.call}"
    assert notes(b, "waits") == []  # of these two ranks this one can tell
    assert notes(a, "broken") == [(a.cause, place)]
    assert (notes(a, "waits"), notes(b, "broken")) == ([], [])


@pytest.mark.parametrize("place", [elsewhere(1), elsewhere(-1)], ids=str)
def test_a_rank_that_waits_where_this_one_has_been_is_only_late(channels, place):
    a, b = channels
    b.next_agreement("gather")
    a._transport.coming.append((0, "waits", 1, place))
    done = later()
    a.until(done, place=a.next_agreement("matmul"))
    assert done()
    assert not a.cause


def opened(rank, *groups):
    """The contexts of some groups of processes, as one of these has them: all that are open in it."""
    side_channel._open.clear()
    made = [SideChannel(members.index(rank), members) for members in groups]
    for i, channel in enumerate(made):
        channel.connect(Told())
        channel.name = "abc"[i]
    return made


@pytest.mark.usefixtures("channels")
def test_a_rank_that_waits_tells_one_rank_of_each_context():
    a, b, c = opened(5, (2, 3, 5, 7), (3, 5, 7, 9), (5, 9))
    here = a.next_agreement("matmul")
    a.until(later(), place=here)
    assert (notes(b, "waits"), b._transport.to) == ([here], [0])  # process 3, the first that has both
    assert c._transport.sent == []  # that is this one
    assert a._transport.sent == []  # no device waits


@pytest.mark.usefixtures("channels")
def test_a_context_of_other_processes_is_not_awaited_here():
    a = opened(5, (5, 7))[0]
    a._transport.coming.append((0, "waits", 1, notes_module.Meeting((6, 7), 0, -1, "making a context")))
    done = later()
    a.until(done, place=a.next_agreement("matmul"))
    assert done()
    assert not a.cause


@pytest.mark.usefixtures("channels")
@pytest.mark.parametrize("behind", [True, False])
def test_rank_0_compares_where_ranks_wait_for_their_devices(behind):
    second, first = opened(5, (2, 5, 7))[0], opened(2, (2, 5, 7))[0]
    second.device, second.runs = Device(), 2
    second.until(later(), for_runs=True)
    assert second._transport.to == [0]
    first.index = second.index
    first.device, first.runs = Device(), 1 if behind else 2
    first._transport.coming = list(second._transport.sent)
    done = later()
    error = raised(lambda: first.until(done, place=first.next_agreement("close")))
    why = "rank 1 waits for run 2 of a plan, which rank 0, waiting in close (a), has not begun"
    assert str(error) == (f"{BROKEN}{why}" if behind else "None")
    assert [kind for _, kind, _, _ in first._transport.sent] == ["broken"] * behind
    assert done() != behind


def using(channel, end):
    """A thread that has used a context, and runs until ``end`` is set."""
    used = threading.Event()

    def work():
        channel.take_turn("gather")
        channel.end_turn()
        used.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    assert used.wait(10)
    return thread


@pytest.mark.parametrize("ended", [False, True])
def test_another_thread_may_come_where_a_rank_waits_unless_it_has_ended(channels, ended):
    a, b = channels
    end = threading.Event()
    thread = using(b, end)
    try:
        if ended:
            end.set()
            thread.join()
        a.take_turn("matmul")
        a._transport.coming.append((0, "waits", 1, elsewhere(1)))
        done = later()
        error = raised(lambda: a.until(done, place=a.next_agreement("matmul")))
        assert ("the ranks use their contexts in different orders" in str(error)) == ended
        assert (error is None) == done() == (not ended)
        assert notes(b, "waits") == []
    finally:
        end.set()
        thread.join()


def test_the_context_that_a_conflict_is_about_breaks_too(channels):
    a, b = channels
    b.next_agreement("gather")
    here = notes_module.Meeting((0, 1), 1, 1, "gather (b)")
    a._transport.coming.append((0, "broken", 1, ("a cause", here)))
    assert str(raised(lambda: b.until(later(5), place=here))) == f"{BROKEN}a cause"
    assert notes(b, "broken") == [("a cause", None)]


def test_a_cause_is_told_once_and_a_closed_context_tells_nothing(channels):
    a, b = channels
    a.break_(ValueError("mine"), "matmul")
    for _ in range(3):
        a.look()
    assert notes(a, "broken") == [("rank 0 left matmul with ValueError: mine", None)]
    b.close()
    b.leave(1)
    b.break_(ValueError("mine"), "matmul")
    assert b._transport.sent == []
    assert not b.cause


def test_a_long_wait_sleeps_instead_of_polling(channels, monkeypatch):
    did = []
    monkeypatch.setattr(polling.time, "perf_counter", lambda: 0.0)  # no other program has the core
    monkeypatch.setattr(channels[0], "look", lambda: did.append("look"))
    for name in ("WOKEN_YIELDS", "YIELDS"):  # a rank that another one wakes sleeps sooner
        monkeypatch.setattr(polling, name, 3)
        polls = iter(range(5))
        channels[0].until(
            lambda polls=polls: next(polls) == 4, patient=True, sleep=lambda: did.append("sleep")
        )
        assert did == ["sleep", "look"] * 2
        did.clear()
        monkeypatch.setattr(polling, "WOKEN_YIELDS", 100)


def test_a_wait_with_a_pause_of_its_own_looks_after_each(channels, monkeypatch):
    did = []
    monkeypatch.setattr(channels[0], "look", lambda: did.append("look"))
    polls = iter(range(3))
    channels[0].until(lambda: next(polls) == 2, pause=lambda: did.append("pause"))
    assert did == ["pause", "look"] * 2


def test_a_patient_wait_leaves_the_core_and_looks_now_and_then(channels, monkeypatch):
    pauses, looks, yields = [], [], []
    monkeypatch.setattr(polling, "step_aside", pauses.append)
    monkeypatch.setattr(channels[0], "look", lambda: looks.append(1))
    monkeypatch.setattr(polling.os, "sched_yield", lambda: yields.append(1))
    for patient, expected in ((True, list(range(1, 200))), (False, [])):
        polls = iter(range(200))
        channels[0].until(lambda polls=polls: next(polls) == 199, patient=patient)
        assert pauses == expected
        assert len(looks) == 199 // polling.POLLS
        assert len(yields) == (0 if patient else len(looks)), "a pause has yielded"
        pauses.clear()
        looks.clear()
        yields.clear()


@pytest.mark.parametrize("patient", [False, True])
def test_waits_sleep_at_once_while_other_programs_keep_the_cores(channels, monkeypatch, patient):
    clock, slept = [100.0], []

    def other_programs(seconds):
        monkeypatch.setattr(polling.os, "sched_yield", lambda: clock.__setitem__(0, clock[0] + seconds))

    def polls_before_it_sleeps():
        """How often the wait polls before its first sleep, which ends it, or 90 times."""
        polls = itertools.count()
        slept.clear()
        channels[0].until(
            lambda: slept or next(polls) == 90, patient=patient, sleep=lambda: slept.append(next(polls) - 1)
        )
        return slept[0] if slept else None

    monkeypatch.setattr(polling.time, "perf_counter", lambda: clock[0])
    other_programs(2e-6)
    assert [polls_before_it_sleeps() for _ in range(3)] == [None] * 3
    other_programs(2e-3)
    first = 1 if patient else polling.POLLS
    found = [polls_before_it_sleeps() for _ in range(polling.CROWDED + 2)]
    assert found == [first, *[0] * polling.CROWDED, first], "then it tries again"
    other_programs(2e-6)
    assert [polls_before_it_sleeps() for _ in range(polling.CROWDED + 1)][-1] is None


def test_a_patient_wait_for_other_ranks_sleeps_the_longer_it_lasts(channels, monkeypatch):
    clock, naps, looks = [100.0], [], []

    def sleep(seconds):
        naps.append(seconds)
        clock[0] += 1e-2

    def end_of(wait):
        polls = iter(range(polling.YIELDS + 100))
        return lambda: next(polls) == polling.YIELDS + wait

    monkeypatch.setattr(polling.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(polling.time, "sleep", sleep)
    monkeypatch.setattr(polling.os, "sched_yield", lambda: None)
    channels[0].until(end_of(50), patient=True, place=channels[0].next_agreement("a call"))
    assert naps[:3] == pytest.approx([2e-5, 2e-4, 4e-4]), "a share of 0.02 of what it has lasted"
    assert naps[-1] == 5e-3
    assert len(naps) == 51

    naps.clear()
    monkeypatch.setattr(channels[0], "look", lambda: looks.append(1))
    channels[0].until(end_of(50), patient=True, place=channels[0].next_agreement("a call"))
    assert len(looks) == 51 + (polling.YIELDS - 1) // polling.POLLS, "after each of them"

    naps.clear()
    channels[0].until(end_of(50), patient=True)
    assert set(naps) == {polling.PAUSE_SECONDS}, "a transfer may need this rank"

    naps.clear()
    monkeypatch.setattr(polling, "SPINS", polling.YIELDS + 40)
    channels[0].until(end_of(50), place=channels[0].next_agreement("a call"))
    assert len(naps) == 11, "in the end also where each rank has a core"


class Device:
    """A device that says how it was aborted."""

    def __init__(self):
        self.aborted = []

    def fault(self):
        return None

    def abort(self, *, blocked=False):
        self.aborted.append(blocked)


def test_another_thread_aborts_the_device_of_a_rank_that_does_not_look(channels, monkeypatch):
    monkeypatch.setattr(side_channel, "BLOCKED_SECONDS", 0.05)
    a, device = channels[0], Device()
    a.device = device
    assert not a.rescue()
    a._transport.coming.append((0, "broken", 1, ("a cause", None)))
    assert not a.rescue()  # it may look in a moment
    time.sleep(0.06)
    a._looks += 1
    assert not a.rescue()  # it has
    assert device.aborted == []
    time.sleep(0.06)
    assert a.rescue()
    assert device.aborted == [True]
    assert str(raised(a.check)) == f"{BROKEN}a cause"


def test_what_another_thread_has_read_this_rank_acts_on(channels):
    a, device = channels[0], Device()
    transfer = Transfer()
    a.watch(transfer, receives=True)
    a.device = device
    a._transport.coming.append((0, "broken", 1, ("a cause", None)))
    a.rescue()
    assert (transfer.canceled, device.aborted) == (False, [])  # MPI's requests are the rank's own thread's
    assert str(raised(a.check)) == f"{BROKEN}a cause"
    assert (transfer.canceled, device.aborted) == (True, [False])


def test_notes_that_only_the_ranks_thread_may_read_are_left_to_it(channels, monkeypatch):
    monkeypatch.setattr(side_channel, "BLOCKED_SECONDS", 0.0)
    a = channels[0]
    a._transport.any_thread = False
    a._transport.coming.append((0, "broken", 1, ("a cause", None)))
    assert not a.rescue()
    assert not a.rescue()
    assert a._transport.coming


def test_a_rank_that_asks_sees_those_who_come_between_two_looks(monkeypatch):
    """All ranks ask; while the last of them looks again, the others already wait in the call."""
    looks = [{}, {1: "blacs_barrier (all of 2 ranks)"}]
    channel = SimpleNamespace(waiting=lambda: looks.pop(0) if len(looks) > 1 else looks[0])
    channel.is_awaited = lambda call: any(each.startswith(f"{call} (") for each in channel.waiting().values())
    monkeypatch.setattr(runtime, "where_others_wait", lambda channels, *_, **__: channels[0])
    context = SimpleNamespace(size=2, control=SimpleNamespace(channel=channel))
    assert runtime.Runtime.is_awaited(context, "blacs_barrier", 1.0)
    looks[:] = [{1: "matmul (all of 2 ranks)"}]
    assert not runtime.Runtime.is_awaited(context, "blacs_barrier", 1.0)


def test_an_interrupt_leaves_no_lock_held():
    """A signal's handler may raise after each step of Python: later looks still read notes."""
    channel = SideChannel(0, (0, 1))
    channel.connect(SimpleNamespace(arrived=list, send=lambda *_: None, any_thread=False))

    def interrupts(*_):
        raise InterruptError

    before = signal.signal(signal.SIGALRM, interrupts)
    try:
        for _ in range(200):
            with contextlib.suppress(InterruptError):
                signal.setitimer(signal.ITIMER_REAL, 20e-6)
                while True:
                    channel.look()
            locks = channel._turn, channel._reading
            with ThreadPoolExecutor(1) as another:
                assert (
                    list(another.map(lambda lock: lock.acquire(False) and lock.release() is None, locks))
                    == [True] * 2
                )
    finally:
        signal.signal(signal.SIGALRM, before)
