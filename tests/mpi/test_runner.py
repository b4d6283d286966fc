# SPDX-License-Identifier: Apache-2.0
"""The runner of tests on ranks: every way in which a rank can fail is reported, nothing hangs or stays behind."""

import gc
import itertools
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.testing import RanksFailedError
from tests.helpers.mpi import on_ranks, run_mpi, run_on_one_node, starts_ranks
from tests.helpers.ranks import pool as pools
from tests.helpers.slow import in_turn, only_long

HERE = "tests.mpi.test_runner"


def identity(comm, offset):
    told = {"rank": comm.rank + offset, "total": np.int64(comm.size), "row": np.arange(2)}
    return {**told, "looks for garbage": gc.isenabled()}


def whole_world(comm):
    from mpi4py import MPI

    return [os.getpid(), comm == MPI.COMM_WORLD]


def wait(comm):
    """Wait for a rank that does not come. MPI polls: other tests go first."""
    os.nice(19)
    comm.Barrier()


def one_raises_the_others_wait(comm):
    if comm.rank == 2:
        raise ZeroDivisionError("only here")
    wait(comm)


def all_raise(comm):
    raise ZeroDivisionError(f"here on {comm.rank}")


def asserts(comm):
    found = [comm.rank, 5]
    assert found == [1, 4]


def one_leaves(comm):
    if comm.rank == 1:
        os._exit(0)
    wait(comm)


def one_is_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait(comm)


def one_aborts(comm):
    if comm.rank == 1:
        comm.Abort(7)
        time.sleep(60)  # MPICH's MPI_Abort may return before the launcher ends the job
    wait(comm)


def one_loops_for_ever(comm):
    os.nice(19)
    while comm.rank == 1:
        pass
    comm.Barrier()


def all_loop_for_ever(comm):
    while True:
        time.sleep(0.01)


def warns(comm):
    warnings.warn("careful", UserWarning, stacklevel=1)


def prints(comm, text):
    print(text)
    assert text == "fine"


def many_cases(comm):
    for n in range(3):
        yield f"case {n}", "odd" if comm.rank == 1 and n == 1 else None


def no_case(comm):
    yield from ()


def other_cases(comm):
    yield f"case of rank {comm.rank}", None


def failure(function, nranks, **options):
    kept = _ranks(nranks) if options.get("launch") else []
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_mpi(function, nranks, **options)
    seconds = time.monotonic() - start
    assert _ranks(nranks) == kept, "a rank is still there"
    return str(caught.value), seconds


def _ranks(nranks):
    """The processes that this one started to be one of ``nranks`` ranks: a client for each rank that is a fork."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes().split(b"\0")
            environ = (directory / "environ").read_bytes()
        except OSError:
            continue
        marked = f"PBLASMP_TEST_OF={os.environ['PBLASMP_TEST_OF']}".encode() in environ.split(b"\0")
        if marked and command[-3:-1] == [b"%d" % nranks, b"mpi"] and b"mpirun" not in command[0]:
            found.append(directory.name)
    return found


@pytest.fixture(autouse=True, scope="module")
def _marked():
    """This module's ranks can be distinguished from others, which are kept meanwhile."""
    own = pools.Pool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "pool", own)
        patch.setattr(pools, "GRACE_SECONDS", 0.3)
        patch.setenv("PBLASMP_TEST_OF", str(os.getpid()))
        yield
    own.close()


@pytest.fixture
def new_python(monkeypatch, request):
    """Ranks are what users get: new Pythons, not forks of one that has imported already; in the short form, once."""
    own = pools.Pool()
    monkeypatch.setattr(pools, "pool", own)
    if request.node.name == NEW or only_long(True):
        monkeypatch.setattr("pblasmp.launch.interpreter", lambda: [sys.executable])
    monkeypatch.setenv("PBLASMP_TEST_OF", f"{os.getpid()}, new")
    yield
    own.close()


NEW = "test_results_come_back_by_rank[launched-2]"
"""The test on new Pythons in the short form: that they start and answer, and what is only theirs."""


@pytest.fixture(params=["kept", "launched"])
def launch(request):
    return {"launch": request.param == "launched"}


@pytest.mark.parametrize("nranks", [1, 2])
@pytest.mark.usefixtures("new_python")
def test_results_come_back_by_rank(nranks, launch):
    results = run_mpi(identity, nranks, offset=5, **launch)
    told = {"total": nranks, "row": [0, 1], "looks for garbage": True}
    assert results == [{"rank": r + 5, **told} for r in range(nranks)]


@starts_ranks
@pytest.mark.parametrize("launch", ["kept", *only_long("launched")], indirect=True)
@pytest.mark.usefixtures("new_python")
def test_one_rank_raises_while_the_others_wait(launch):
    message, seconds = failure(one_raises_the_others_wait, 3, **launch)
    assert "rank 2 FAILED" in message
    assert "ZeroDivisionError: only here" in message
    for rank in (0, 1):
        after = message.split(f"--- rank {rank} did not finish")[1].split("---")[0]
        assert "one_raises_the_others_wait" in after, "it must say where the rank was"
    assert seconds < 15


@starts_ranks
@pytest.mark.parametrize(
    ("launch", "function"),
    in_turn(itertools.product(["kept", "launched"], [one_leaves, one_is_killed, one_aborts]), keep=2),
    indirect=["launch"],
)
@pytest.mark.usefixtures("new_python")
def test_a_rank_disappears(function, launch):
    message, seconds = failure(function, 2, **launch)
    assert "rank 1 did not finish\nno report" in message
    assert seconds < 15


@starts_ranks
@pytest.mark.parametrize("launch", ["kept", *only_long("launched")], indirect=True)
def test_endless_loop_ends_at_the_limit(launch):
    function, limit = (all_loop_for_ever, 3) if launch["launch"] else (one_loops_for_ever, 0.3)
    if not launch["launch"]:
        run_mpi(identity, 2, offset=0)  # else ranks start within the limit
    message, seconds = failure(function, 2, timeout=limit, **launch)
    assert f"did not end in {limit} s" in message
    assert "while comm.rank == 1" not in message
    assert message.count(f"in {function.__name__}") == 2
    assert seconds < 10


@starts_ranks
@pytest.mark.parametrize("launch", [*only_long("kept"), "launched"], indirect=True)
def test_warnings_are_errors_on_ranks_too(launch):
    message, _ = failure(warns, 1, **launch)
    assert "UserWarning: careful" in message


@starts_ranks
def test_what_is_printed_is_shown_with_its_call_only():
    run_mpi(prints, 1, text="fine")
    message, _ = failure(prints, 1, text="bad")
    assert message.split("--- printed\n")[1] == "bad"


@starts_ranks
def test_assertions_show_their_values():
    message, _ = failure(asserts, 1)
    assert "AssertionError: assert [0, 5] == [1, 4]" in message
    assert re.search(r"test_runner\.py:\d+: found = \[0, 5\]\n", message)


@starts_ranks
def test_each_case_is_reported_and_breaks_no_rank():
    before = run_mpi(whole_world, 2)
    with pytest.raises(RanksFailedError, match=r"case 1, rank 1: odd$"):
        run_mpi(many_cases, 2)
    assert run_mpi(whole_world, 2) == before


@starts_ranks
@on_ranks(2)
def returns(comm):
    return comm.rank


def test_a_test_on_ranks_returns_nothing():
    with pytest.raises(AssertionError, match=r"returns returns \[0, 1\], at which nobody looks"):
        returns(nranks=2)


def test_ranks_must_run_the_same_cases_and_at_least_one():
    with pytest.raises(RanksFailedError, match="at least one"):
        run_mpi(no_case, 1)
    with pytest.raises(RanksFailedError, match="the same cases"):
        run_mpi(other_cases, 2)


@starts_ranks
def test_no_launcher_is_a_failure(monkeypatch, tmp_path):
    from pblasmp.errors import LibraryNotFoundError, install

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LibraryNotFoundError, match=re.escape(install("mpi"))):
        run_mpi(identity, 1, offset=0, launch=True)


# -- ranks that are kept


@starts_ranks
def test_what_cannot_run_on_ranks():
    def local(comm):
        return comm.rank

    for function in (local, lambda comm: comm.rank, 3):
        with pytest.raises(pb.ArgumentError, match="function: expected one at the top level of a module"):
            run_mpi(function, 2)
    for nranks in (0, "2"):
        with pytest.raises(
            pb.ArgumentError, match=f"nranks: expected an integer, at least 1, got {nranks!r}"
        ):
            run_on_one_node(identity, nranks, offset=5)


def test_ranks_are_kept_and_are_a_world():
    first = run_mpi(whole_world, 2)
    assert run_mpi(whole_world, 2) == first
    assert all(same for _, same in first)
    assert {pid for pid, _ in run_mpi(whole_world, 2, launch=True)}.isdisjoint({pid for pid, _ in first})


@starts_ranks
@pytest.mark.parametrize("how", ["raises", "killed while idle"])
@pytest.mark.usefixtures("new_python")
def test_ranks_are_replaced_when_they_break(how):
    before = {pid for pid, _ in run_on_one_node(whole_world, 2)}
    if how == "raises":
        failure(all_raise, 2, on_nodes="")
    else:
        (world,) = pools.pool.worlds.values()
        os.kill(min(before), signal.SIGKILL)
        assert world.wait(10.0) is not None
    after = {pid for pid, _ in run_on_one_node(whole_world, 2)}
    assert after.isdisjoint(before)
    found = set(map(int, _ranks(2)))
    assert found == after if only_long(True) else len(found) == 2  # of a fork it is the client's number


@starts_ranks
def test_the_longest_unused_ranks_make_room(monkeypatch):
    monkeypatch.setattr(pools, "MOST_RANKS", 3)
    own = pools.Pool()
    try:
        pids = [
            [outcome["result"][0] for outcome in own.call(f"{HERE}:whole_world", "", nranks, {}, 60.0)]
            for nranks in (1, 2, 1, 3)
        ]
        assert pids[0] == pids[2]
        alive = [Path(f"/proc/{pid}").exists() for each in pids[1:] for pid in each]
        assert alive == [False, False, False, True, True, True]
    finally:
        own.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids[3])


def disturb(comm, directory):
    from pblasmp.comm import exchange, side_channel
    from pblasmp.comm.exchange import Exchange

    os.chdir(directory)
    os.environ["PBLASMP_DISTURBED"] = "yes"
    del os.environ["HOME"]
    warnings.simplefilter("ignore")
    sys.path.insert(0, directory)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.excepthook = print
    exchange.MESSAGE_BYTES = -1
    Exchange.run = None
    delattr(side_channel, [*vars(side_channel)][-1])


def undisturbed(comm):
    from pblasmp.comm import exchange, side_channel
    from pblasmp.comm.exchange import Exchange

    with pytest.raises(UserWarning):
        warnings.warn("careful", UserWarning, stacklevel=1)
    return [
        *(str(Path.cwd()), os.environ.get("PBLASMP_DISTURBED"), os.environ["HOME"], sys.path),
        *(len(os.sched_getaffinity(0)), sys.excepthook is sys.__excepthook__),
        *(exchange.MESSAGE_BYTES, callable(Exchange.run), [*vars(side_channel)], os.getpid()),
    ]


@starts_ranks
def test_each_call_finds_the_state_that_the_first_one_found(tmp_path):
    before = run_mpi(undisturbed, 2)
    run_mpi(disturb, 2, directory=str(tmp_path))
    assert run_mpi(undisturbed, 2) == before
    assert before[0][0] == str(Path.cwd())


def seen(comm):
    return [str(Path.cwd()), os.environ.get("PBLASMP_SEEN"), os.environ.get("PBLASMP_TEST_OF")]


@starts_ranks
def test_directory_and_environment_are_those_of_the_call(monkeypatch, tmp_path):
    before = run_mpi(seen, 1)[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PBLASMP_SEEN", "yes")
    monkeypatch.delenv("PBLASMP_TEST_OF")
    assert run_mpi(seen, 1) == [[str(tmp_path), "yes", None]]
    monkeypatch.undo()
    assert run_mpi(seen, 1)[0] == before


def leaves_a_message(comm):
    if comm.rank == 1:
        comm.send("hello", 0, tag=5)


@starts_ranks
@pytest.mark.parametrize("launch", [*only_long("kept"), "launched"], indirect=True)
def test_a_message_that_is_left_behind_is_a_failure(launch):
    message, _ = failure(leaves_a_message, 2, **launch)
    assert "rank 0 FAILED\na message from rank 1 with tag 5 was never received" in message
    assert "rank 1 was done" in message
