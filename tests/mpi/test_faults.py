# SPDX-License-Identifier: Apache-2.0
"""Programs that end badly end at once, on every rank, with a status that says so, and show what happened once."""

import os
import re
import time

import pytest

from pblasmp import launch
from pblasmp.launch import Job
from tests.helpers.mpi import NODES, ROOT, launcher_on, starts_ranks
from tests.helpers.slow import only_long

pytestmark = starts_ranks

LIMIT = 60.0
GRACE = 1.0  # seconds that a rank waits for others before it aborts them


def ends(name, tmp_path, nranks=2, nodes=NODES):
    """Run programs of faults.py; return the status, what was printed and how long the ranks took to end."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*launch.interpreter(), "-W", "error", "-m", "tests.helpers.faults", *name.split()]
    start = time.monotonic()
    launcher = launcher_on(nodes, nranks)
    with Job(command, nranks, tmp_path / "output", environ=environ, launcher=launcher) as job:
        status = job.wait(LIMIT)
        printed = job.tail(1000)  # between nodes, UCX names messages that nobody has received
    seconds = time.monotonic() - start
    print(f"{name}: status {status} after {seconds:.1f} s")
    assert status is not None, f"hangs:\n{printed}"
    return status, printed, seconds


@pytest.mark.parametrize(
    ("name", "nranks", "nodes"),
    [
        ("one_while_others_multiply", 3, NODES),
        ("one_while_others_multiply", 4, "interleaved:2"),
        ("one_while_others_wait_in_mpi", 2, NODES),
        ("one_while_others_wait_in_a_library", 2, NODES),
        ("one_while_others_close", 2, NODES),
        ("one_while_others_run_a_plan", 2, NODES),
        ("all_the_same", 2, NODES),
        ("two_of_them", 3, NODES),
        ("without_with", 2, NODES),
        ("in_a_part_of_the_ranks", 3, NODES),
        ("in_a_part_on_its_own", 4, NODES),
        ("uncaught_in_a_move", 2, NODES),
        ("uncaught_where_others_catch", 2, NODES),
    ],
)
def test_an_exception_ends_the_job_and_is_shown_once(name, nranks, nodes, tmp_path):
    status, printed, seconds = ends(name, tmp_path, nranks, nodes)
    assert seconds < 10 + ("others_wait_in" in name) * GRACE  # of ranks that do not listen
    # Where ranks are aborted inside MPI, MPICH ends with the status of the first it sees end: 1 of the one that aborts,
    # 9 of one that it killed, 11 of one that crashed over the loss of its peer.
    assert status in ((1, 9, 11) if "others_wait_in" in name else (1,)), printed
    assert printed.count("ValueError: my own") == 1, printed
    assert printed.count("Traceback") == 1, printed
    assert "(on rank" not in printed, printed  # the exception itself, not its echo on other ranks


@pytest.mark.parametrize("nodes", ["interleaved:2", *only_long("blocks:2", "blocks:4")])
def test_a_killed_rank_ends_the_job_on_all_nodes(nodes, tmp_path):
    status, printed, seconds = ends("one_is_killed_while_others_multiply", tmp_path, 4, nodes)
    assert seconds < 10, printed
    assert status not in (0, None), printed
    assert "went on" not in printed, printed


def test_different_exceptions_on_all_ranks_show_one(tmp_path):
    status, printed, _ = ends("all_different", tmp_path)
    assert status == 1, printed
    assert printed.count("Traceback") == 1, printed
    assert "ValueError: of rank 0" in printed, printed


@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("no_such_engine", "pblasmp.errors.ArgumentError: engine: expected one of auto, host, cublasmp, got 'none'"),
        ("in_the_making", "ZeroDivisionError: division by zero"),
        (
            "bad_input",
            "pblasmp.errors.ArgumentError: array: shape is (3, 3), expected the descriptor's (8, 8) (on rank 0)",
        ),
        (
            "one_leaves_early",
            "pblasmp.errors.RankMismatchError: the ranks made different calls: matmul, closing the context",
        ),
        ("interrupted", "KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_errors_are_shown_once(name, last_line, tmp_path):
    status, printed, _ = ends(name, tmp_path)
    assert status not in (0, None), printed
    assert printed.count("Traceback") == 1, printed
    assert printed.splitlines().count(last_line) == 1, printed


@pytest.mark.parametrize(
    ("name", "status", "shown"),
    [
        ("exits_with_2", 2, ""),
        ("exits_with_a_text", 1, "good bye"),
        ("exits_with_0", 1, "PblasmpError: SystemExit: 0 (on rank 1)"),
        ("exits_while_others_wait_in_mpi", 5, "SystemExit: 5"),
        ("all_exit_with_0", 0, ""),
    ],
)
def test_exit_statuses_are_kept(name, status, shown, tmp_path):
    found, printed, _ = ends(name, tmp_path)
    # Where ranks are aborted, MPICH ends with the status of the first it sees end: its own, or 9 of one that it killed.
    assert found in ((status, 9) if name == "exits_while_others_wait_in_mpi" else (status,)), printed
    if shown:
        assert printed.count(shown) == 1, printed
        assert printed.count("Traceback") == int("SystemExit" in shown), printed
    else:
        assert "Error" not in printed, printed
        assert "Traceback" not in printed, printed


def test_a_context_that_is_never_closed_warns(tmp_path):
    status, printed, _ = ends("resource_warnings_are_shown never_closed", tmp_path)
    assert status == 0, printed
    for rank in range(2):
        words = (
            f"ResourceWarning: Context(rank {rank} of 2, engine host) made at {ROOT}/tests/helpers/faults.py:"
        )
        assert printed.count(words) == 1, printed


def test_a_context_that_is_closed_does_not(tmp_path):
    names = ["resource_warnings_are_shown", "closed_after_an_exception", "all_exit_with_0"]
    status, printed, _ = ends(" ".join(names), tmp_path)
    assert status == 0, printed
    assert [on_rank(printed, rank) for rank in range(2)] == [names] * 2, printed
    assert "Warning" not in printed, printed


BROKEN = "ClosedError: this context is broken, no collective call is possible any more: "


def on_rank(printed, rank):
    """Return what a rank printed, in order; lines of several ranks may have been printed as one."""
    told = [part for part in re.split(r"(?=rank \d: )|\n", printed) if part]
    return [part[len("rank 0: ") :].strip() for part in told if part.startswith(f"rank {rank}: ")]


CAUGHT = {
    "caught_in_a_move": "redistribute",
    "caught_before_a_move": "redistribute",
    "caught_in_scatter": "scatter",
    "caught_in_gather": "gather",
    "caught_in_a_product": "matmul",
    "caught_in_a_vote": "matmul",
    "caught_between_two_parts": "matmul",
    "caught_between_two_parts_of_a_run": "matmul",
}
"""Programs that go on after an exception on rank 1, and the call that it leaves."""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What such programs print one after the other on the same ranks: the lines of each rank by program."""
    names = [
        *CAUGHT,
        "unprintable",
        "no_room_to_map",
        "caught",
        "child_leaves",
        "slow_but_in_order",
        "too_many_plans",
    ]
    status, printed, seconds = ends(" ".join(names), tmp_path_factory.mktemp("told"), 3)
    assert status == 0, printed
    assert seconds < 30, printed
    assert "Traceback" not in printed, printed
    found = {}
    for rank in range(3):
        for line in on_rank(printed, rank):
            if line in names:
                name = line
                found.setdefault(name, []).append([])
            else:
                found[name][rank].append(line)
    return found


@pytest.mark.parametrize(("name", "call"), CAUGHT.items())
def test_an_exception_that_one_rank_catches_breaks_the_context_on_all(name, call, told):
    why = f"{BROKEN}rank 1 left {call} with MemoryError: no room"
    assert told[name][1] == ["MemoryError: no room", why, why]
    for first, *later in told[name][::2]:  # where a rank had no need of rank 1, it has returned
        assert first in ("returned", why)
        assert later == [why, why]


def test_who_catches_the_error_of_close_goes_on(tmp_path):
    """The rank that broke the context waits for nobody who knows, and aborts nobody."""
    status, printed, _ = ends("caught_from_close", tmp_path, 3)
    assert status == 1, printed
    assert printed.count("Traceback") == 1, printed
    assert "\nValueError: my own" in printed, printed
    why = f"{BROKEN}rank 1 left redistribute with ValueError: my own"
    for rank in (0, 2):
        assert on_rank(printed, rank) == [why, "went on"], printed


def test_a_signal_handler_may_raise_anywhere(tmp_path):
    for _ in range(10):
        status, printed, _ = ends("caught_alarm", tmp_path, 3)
        if on_rank(printed, 1) != ["returned"] and "the ranks made different calls" not in printed:
            break  # else it came between two calls, where it breaks nothing: the ranks go on, in step or not
    assert status == 0, printed
    said = [on_rank(printed, rank) for rank in range(3)]
    calls = "redistribute", "from_function"  # of which the moves are made
    assert said in [[[f"{BROKEN}rank 1 left {call} with AlarmError"]] * 3 for call in calls], printed


def test_where_one_rank_catches_the_others_say_what_it_was(tmp_path):
    status, printed, _ = ends("caught_where_others_do_not", tmp_path)
    assert status == 1, printed
    assert printed.count("Traceback") == 1, printed
    assert f"{BROKEN}rank 1 left redistribute with ValueError: my own" in printed, printed


@pytest.mark.parametrize(
    ("name", "status"), [("caught_before_others_close", 1), ("caught_before_others_end", 0)]
)
def test_a_broken_context_does_not_close_in_silence(name, status, tmp_path):
    """close() tells those that no other call has told; the rank that caught the error knows."""
    found, printed, _ = ends(name, tmp_path, 3)
    assert found == status, printed
    assert printed.count("Traceback") == 1, printed
    assert printed.count(f"{BROKEN}rank 1 left redistribute with ValueError: my own") == 1, printed
    assert printed.count("went on") == status, printed


def test_what_cannot_be_shown_is_an_error_of_its_rank(told):
    expected = [
        "ValueError: my own (on rank 1)",
        "PblasmpError: UnprintableError: (its message cannot be shown: ValueError) (on rank 1)",
        "returned",
    ]
    assert told["unprintable"] == [expected] * 3


def test_where_one_rank_cannot_map_all_raise(told):
    for first, _ in told["no_room_to_map"]:
        assert "MemoryError: cannot open the memory shared by the ranks of this node" in first


@pytest.mark.parametrize(("name", "status"), [("end_without_closing", 0), ("exit_without_closing", 3)])
def test_the_end_of_a_process_closes_what_is_open(name, status, tmp_path):
    found, printed, _ = ends(name, tmp_path)
    assert found == status, printed
    assert sorted(printed.splitlines()) == [f"Context(rank {r} of 2, engine host, closed)" for r in range(2)]


@pytest.mark.parametrize(
    ("name", "status"), [("one_ends_while_others_multiply", 1), ("one_exits_while_others_multiply", 3)]
)
def test_a_rank_that_ends_is_told_to_the_others(name, status, tmp_path):
    found, printed, _ = ends(name, tmp_path, 3)
    assert found in (1, status), printed
    assert printed.count("Traceback") == 1, printed
    assert "matmul on ranks 0, 2\n    closing the context on rank 1" in printed, printed


@pytest.mark.parametrize(
    "name", ["one_has_lost_it", "one_has_lost_it_while_others_close", "finalized_before_the_end"]
)
def test_however_a_context_is_lost_the_job_ends(name, tmp_path):
    status, printed, _ = ends(name, tmp_path)
    assert status == 0, printed
    assert printed.count("ResourceWarning: Context(") == (name != "finalized_before_the_end"), printed


def test_what_is_caught_is_over(told):
    assert told["caught"] == [["went on 140"], [], []]


def test_a_child_does_not_speak_for_its_rank(told):
    of_parent, (of_child,), of_other = told["child_leaves"]
    assert (of_parent, of_other) == (["went on 140"], [])
    assert "of which this one is a fork" in of_child


def test_two_threads_get_an_error(tmp_path):
    status, printed, _ = ends("two_threads", tmp_path)
    assert status == 1, printed
    why = f"{BROKEN}on rank 1 a thread called matmul while another thread was using it"
    assert [on_rank(printed, rank)[:1] for rank in range(2)] == [[why]] * 2, printed


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("used_in_different_orders", "from_function (the context made at"),
        ("closed_in_different_orders", "closing the context (the context made at"),
        ("made_while_others_multiply", "making a context"),
    ],
)
def test_contexts_in_different_orders_are_found_out(name, waits, tmp_path):
    status, printed, _ = ends(name, tmp_path)
    assert status not in (0, None), printed
    assert "the ranks use their contexts in different orders: rank" in printed, printed
    assert waits in printed, printed


def test_many_open_plans_warn(told):
    words = "1 warning has 50 open plans: close those that are no longer used"
    assert told["too_many_plans"] == [[words]] * 3


def test_a_slow_rank_is_no_fault(told):
    assert told["slow_but_in_order"] == [["went on 140"], [], []]
