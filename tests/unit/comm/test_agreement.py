# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks that are threads: what is raised, with which words, and who shows it."""

import sys
import time
import traceback
from types import SimpleNamespace

import pytest

from pblasmp.comm import agreement
from pblasmp.comm.agreement import (
    CLOSING,
    Agreement,
    Running,
    closing,
    exit_status,
    is_agreed,
    is_reported_here,
    leave,
)
from pblasmp.comm.choice import Serial
from pblasmp.comm.shared_memory import make_boards
from pblasmp.errors import ClosedError, LayoutError, PblasmpError, RankMismatchError
from tests.helpers import threads
from tests.helpers.threads import Aborted


@pytest.fixture(params=["messages", "a board"], autouse=True)
def votes_by(request, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "BY_BOARD", request.param == "a board")


BY_BOARD = False


def on_ranks(size, work):
    """Return what ``work`` returns on each rank, or raises there, where ranks vote as this turn of the tests says."""

    def votes(comm):
        [board] = make_boards(comm, 1)
        comm.board = board if BY_BOARD else None
        return work(comm)

    return threads.on_ranks(size, votes)


class TwoArgumentsError(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


class StubbornError(Exception):
    """Does not pickle."""

    def __reduce__(self):
        raise TypeError("no")


def agree(call="call", raising=lambda rank: None, **facts):
    """What each of 6 ranks raises; a fact may be a function of the rank."""

    def work(comm):
        name = call(comm.rank) if callable(call) else call
        with Agreement(comm, name) as known:
            known.update({key: fact(comm.rank) if callable(fact) else fact for key, fact in facts.items()})
            error = raising(comm.rank)
            if error is not None:
                raise error

    return on_ranks(6, work)


def texts(errors, kind):
    assert all(type(error) is kind for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


def showing(errors):
    return [rank for rank, error in enumerate(errors) if is_reported_here(error)]


def test_ranks_that_agree_raise_nothing():
    assert agree(a=1, b="x") == [None] * 6


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ({3}, "rank 3"),
        ({0, 1, 2}, "ranks 0-2"),
        ({0, 2, 3, 5}, "ranks 0, 2-3, 5"),
        ({4, 5}, "ranks 4-5"),
        ({1, 3, 5}, "ranks 1, 3, 5"),
    ],
)
def test_ranks_are_named_as_ranges(ranks, named):
    errors = agree(raising=lambda rank: LayoutError("too small") if rank in ranks else None)
    assert texts(errors, LayoutError) == f"too small (on {named})"
    assert showing(errors) == [min(ranks)]


def test_other_facts():
    errors = agree(a=lambda rank: "xyxzxx"[rank], b=7, c=lambda rank: rank // 5)
    assert texts(errors, RankMismatchError) == (
        "call: the ranks gave different arguments: a, c\n"
        "  a:\n    x on ranks 0, 2, 4-5\n    y on rank 1\n    z on rank 3\n"
        "  c:\n    0 on ranks 0-4\n    1 on rank 5"
    )
    assert showing(errors) == [0]


def test_a_fact_that_some_ranks_lack():
    def work(comm):
        with Agreement(comm, "call") as facts:
            facts["a"] = 1
            if comm.rank == 1:
                facts.clear()
                facts["call"] = "call"

    assert "a:\n    1 on rank 0\n    None on rank 1" in texts(on_ranks(2, work), RankMismatchError)


def test_a_fault_goes_before_other_facts():
    errors = agree(raising=lambda rank: KeyError("k") if rank == 5 else None, a=lambda rank: rank)
    assert "'k' (on rank 5)" in texts(errors, KeyError)


def test_the_same_fault_on_all_ranks_names_none():
    errors = agree(raising=lambda rank: LayoutError("too small"))
    assert texts(errors, LayoutError) == "too small"
    assert showing(errors) == [0]


def test_different_faults_are_all_told():
    faults = {1: LayoutError("one"), 2: OSError("two"), 4: LayoutError("one")}
    errors = agree(raising=faults.get)
    assert texts(errors, LayoutError) == (
        "one (on rank 1)\n  on rank 2: OSError: two\n  on rank 4: LayoutError: one"
    )


def test_errors_of_the_operating_system_keep_number_and_file():
    errors = agree(raising=lambda rank: FileNotFoundError(2, "gone", "x.npy") if rank == 2 else None)
    assert texts(errors, FileNotFoundError) == "[Errno 2] gone (on rank 2): 'x.npy'"
    assert {error.errno for error in errors} == {2}
    assert {error.filename for error in errors} == {"x.npy"}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TwoArgumentsError(1, 2), "TwoArgumentsError: (1, 2) (on rank 3)"),
        (StubbornError("mine"), "StubbornError: mine (on rank 3)"),
        (type("LocalError", (ValueError,), {})("mine"), "LocalError: mine (on rank 3)"),
    ],
)
def test_what_cannot_travel_is_told_in_words(error, text):
    errors = agree(raising=lambda rank: error if rank == 3 else None)
    assert texts(errors, PblasmpError) == text
    lines = [[frame.line for frame in traceback.extract_tb(errors[rank].__traceback__)] for rank in (0, 3)]
    assert lines[1][-1] == "raise error"  # the rank that has it shows where
    assert "raise error" not in lines[0]


def test_an_interrupt_is_nobodys_argument():
    def work(comm):
        comm.imax, comm.board = None, SimpleNamespace(imax=None)  # it votes nowhere
        with pytest.raises(KeyboardInterrupt), Agreement(comm, "call"):
            raise KeyboardInterrupt

    assert on_ranks(1, work) == [None]


# -- leaving


def leaving(size, errors, call="gather"):
    """What each rank has in the end, where some leave with an error and the others make a call."""

    def work(comm):
        error = errors.get(comm.rank)
        if error is None:
            with Agreement(comm, call):
                pass
            return comm
        leave(comm, error)
        assert comm.channel.cause
        assert is_agreed(error, comm)
        return error

    return on_ranks(size, work)


def test_all_leave_and_one_shows():
    errors = {rank: ValueError("mine") for rank in range(3)}
    assert leaving(3, errors) == list(errors.values())
    assert showing(errors.values()) == [0]


@pytest.mark.parametrize("status", [3, "bye"])
def test_a_status_is_that_of_all(status):
    found = leaving(3, {1: SystemExit(status)})
    assert all(isinstance(error, SystemExit) for error in found)
    assert found[1].code == status
    assert {found[0].code, found[2].code} == {3 if status == 3 else 1}


def test_who_leaves_in_peace_is_a_fault_that_another_shows():
    found = leaving(3, {0: SystemExit(0)})
    assert [str(found[rank]) for rank in (1, 2)] == ["SystemExit: 0 (on rank 0)"] * 2
    assert type(found[1]) is PblasmpError
    assert showing(found) == [1]


def test_an_exception_goes_before_an_exit():
    found = leaving(3, {0: SystemExit(3), 1: ValueError("mine")})
    assert str(found[2]) == "mine (on rank 1)"
    assert showing(found) == [1]


def test_closing_while_another_leaves():
    assert "mine" in str(leaving(2, {0: ValueError("mine")}, CLOSING)[1])


def test_what_others_show_is_not_shown_again():
    """An error agreed on in one group leaves another group, none of whose ranks is the one to show it."""

    def first(comm):
        with Agreement(comm, "call"):
            raise ValueError("mine")

    shown, *others = on_ranks(3, first)
    assert showing([shown, *others]) == [0]
    leaving(2, dict(enumerate(others)))
    assert showing(others) == []
    leaving(2, {0: shown, 1: others[0]})
    assert showing([shown, *others]) == [0]


def test_those_that_do_not_listen_are_aborted(monkeypatch, capsys):
    monkeypatch.setattr(agreement, "_GRACE_SECONDS", 0.05)

    def work(comm):
        if comm.rank == 0:
            leave(comm, SystemExit(4))

    start = time.monotonic()
    aborted, _ = on_ranks(2, work)
    assert isinstance(aborted, Aborted)
    assert aborted.args == (4,)
    assert 0.05 <= time.monotonic() - start < 5
    assert "SystemExit: 4" in capsys.readouterr().err


def left_broken(size, parts):
    """What each rank has in the end, where ``parts`` says what it does before it leaves with what that raised."""

    def work(comm):
        try:
            with Running(comm, "matmul"):
                parts[comm.rank](comm)
        except Exception as error:  # noqa: BLE001 - it is the result
            leave(comm, error)
            return error

    return on_ranks(size, work)


def raise_mine(comm):
    raise ValueError("mine")


def test_who_broke_the_context_shows_why_and_all_wait_for_each_other():
    def late(comm):
        time.sleep(0.1)
        comm.barrier()

    found = left_broken(3, [late, raise_mine, lambda comm: comm.barrier()])
    assert [type(error) for error in found] == [ClosedError, ValueError, ClosedError]
    assert showing(found) == [1]


def test_a_context_that_breaks_while_one_leaves_it():
    errors = [ValueError("first"), MemoryError("second")]

    def work(comm):
        if comm.rank == 1:
            time.sleep(0.1)  # the other is voting by now
            comm.channel.break_(errors[1], "matmul")
        leave(comm, errors[comm.rank])

    start = time.monotonic()
    assert on_ranks(2, work) == [None, None]
    assert showing(errors) == [0]
    assert time.monotonic() - start >= 0.1


def test_those_that_stay_in_a_broken_context_are_aborted_by_the_one_that_broke_it(monkeypatch, capsys):
    monkeypatch.setattr(agreement, "_GRACE_SECONDS", 0.2)
    start = time.monotonic()
    found = left_broken(3, [lambda comm: comm.barrier(), raise_mine, lambda comm: time.sleep(1)])
    assert [type(error) for error in found[:2]] == [Aborted, Aborted]
    told = capsys.readouterr().err
    assert 0 <= told.find("\nValueError: mine") < told.find("ClosedError: ")
    assert time.monotonic() - start >= 0.2


def test_an_exception_between_agreeing_to_close_and_closing_breaks_the_context():
    def work(comm):
        if comm.rank == 1:
            steps = iter([] if comm.board else [comm.imax])

            def imax(*to):  # fails before the others have heard of this rank
                return next(steps)(*to)

            comm.imax = imax
        return closing(comm, here=True)

    errors = on_ranks(3, work)
    why = "rank 1 left closing the context with StopIteration"
    assert [type(error) for error in errors] == [ClosedError, StopIteration, ClosedError]
    assert all(why in str(errors[rank]) for rank in (0, 2))


def test_closing_sends_nothing_that_grows_with_the_ranks():
    def work(comm):
        comm.allgather = lambda told: [].pop()
        return closing(comm, here=True, may_idle=comm.rank != 1)

    assert on_ranks(3, work) == [(True, False)] * 3


def test_alone_nobody_is_told():
    leave(Serial(), ValueError("mine"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError(), 1),
        (SystemExit(0), 1),
        (SystemExit(None), 1),
        (SystemExit("text"), 1),
        (SystemExit(7), 7),
    ],
)
def test_statuses(error, status):
    assert exit_status(error) == status
