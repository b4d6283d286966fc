# SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls on CPU ranks and on simulated GPUs, and what they find.

A sequence that ``python -m tests.chaos.sequences`` prints becomes a test as one of ``ONCE_WRONG``.
"""

import contextlib
import os
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import launch
from pblasmp.engines.gpu.runtime import host_copies
from pblasmp.launch import Job as Ranks
from pblasmp.runtime import matrix_calls
from tests.chaos import sequences
from tests.chaos.sequences import GROWTH, WARM_UP, Sequences, Watch, grown, run
from tests.helpers import inside
from tests.helpers.gpu.jobs import Job
from tests.helpers.machine import machine
from tests.helpers.mpi import ROOT, on_ranks, run_mpi, starts_ranks
from tests.helpers.recorder import build
from tests.helpers.sequences import Gpu, Host, State, replay, search, step
from tests.helpers.sequences.state import matrices, seeds
from tests.helpers.slow import draws, only_long

ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def program(comm, engine, **how):
    """The program on the ranks of a test."""
    with sequences.device(comm, engine) as device:
        found = Sequences(comm, device, **how)
        try:
            yield found
        finally:
            found.watch.close()


def some(comm, engine, count, length):
    """Make some sequences; return what is wrong, and how many ended."""
    with program(comm, engine, length=length) as found:
        return found.search(count + 1, comm.size), found.counts["end"]


@starts_ranks
@pytest.mark.parametrize(
    ("engine", "nranks"),
    [("host", 1), *only_long(("host", 2)), ("host", 3), *only_long(("host", 4), ("host", 5)), ("host", 6),
     *only_long(("simulated", 1)), ("simulated", 2), *only_long(("simulated", 4)), ("away", 2)],
)  # fmt: skip
def test_sequences(engine, nranks):
    """The simulated GPU of "away" is not the current one."""
    count = draws(2, long=20) if engine == "away" else draws(1, long=3)
    wrong, ended = run_mpi(some, nranks, engine=engine, count=count, length=40)[0]
    assert not wrong, wrong
    assert ended > count  # Hypothesis tries some again, which it cannot tell from others


ONCE_WRONG = {
    "a small copy to the host, then a large one": (1, "simulated", """
state = Sequence()
matrices_0 = state.begin(layouts=[MatrixDescriptor((24, 24), (64, 64), Grid(1, 1))], panels=0)
state.random_numbers(layout=MatrixDescriptor((200, 200), (64, 64), Grid(1, 1)), root=0, seed=3)
state.teardown()
"""),
    "a matrix plus an array of one element, which is legal": (1, "host", """
state = Sequence()
matrices_0 = state.begin(layouts=[MatrixDescriptor((1, 1), (1, 1), Grid(1, 1))], panels=0)
state.mistake(of=1, rank=0, what='ndarray')
state.teardown()
"""),
}  # fmt: skip
"""By name, programs that have failed: the numbers of ranks, the engine, and what was printed."""


def one(comm, engine, text, spoil=False):
    with pytest.MonkeyPatch.context() as patch, program(comm, engine) as found:
        if spoil:
            one_buffer_twice(patch)
        replay(found.new(), text)


@starts_ranks
@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_was_wrong_once(name):
    nranks, engine, text = ONCE_WRONG[name]
    run_mpi(one, nranks, engine=engine, text=text)


@starts_ranks
def test_what_was_wrong_once_is_found():
    nranks, engine, text = ONCE_WRONG["a small copy to the host, then a large one"]
    with pytest.raises(Exception, match=r"WrongError: rank 0: .* wrong, first at local"):
        run_mpi(one, nranks, engine=engine, text=text, spoil=True)


# -- what it finds


def one_buffer_twice(patch):
    """A fault: one buffer for two chunks while there are fewer than three."""

    def _buffer(self, i):
        if len(self._buffers) < 3:
            memory = self._cupy.cuda.alloc_pinned_memory(host_copies.CHUNK)
            event = self._cupy.cuda.Event(disable_timing=True)
            self._buffers.append((memory, np.frombuffer(memory, np.uint8, host_copies.CHUNK), event))
            return self._buffers[-1]
        return self._buffers[i % 3]

    patch.setattr(*inside.STAGING_BUFFER, _buffer)


def stale_operands(patch):
    """Every third run of a call has the operands of another one."""
    original, runs = Job.run, Counter()

    def stale(self, turn):
        runs[id(self)] += 1
        return original(self, 0 if runs[id(self)] % 3 == 0 else turn)

    patch.setattr(Job, "run", stale)


def calls_that_differ(patch):
    """Plain calls with another alpha run the plan of the one before."""
    signature = matrix_calls.MatrixCall.signature

    def without_alpha(call):
        with patch.context() as briefly:
            briefly.setitem(inside.options(call), "alpha", 1)
            return signature(call)

    patch.setattr(matrix_calls.MatrixCall, "signature", without_alpha)


def no_agreement(patch):
    """A rank does not hear that another one has refused a number."""
    iadd = pb.DistributedMatrix.__iadd__

    def alone(self, other):
        if isinstance(other, int):
            self.local[...] += other
        return iadd(self, other)

    patch.setattr(pb.DistributedMatrix, "__iadd__", alone)


SPOILED = {
    "operands of another run": (stale_operands, 2, "host", ("prepare", "run", "wait")),
    "a plan of another call": (calls_that_differ, 2, "host", ("many", "matmul", "scatter")),
    "written without agreement": (no_agreement, 3, "host", ("scatter", "in_place", "mistake")),
}
"""What is spoiled, on how many ranks, and the steps that are drawn."""


def found_in(comm, what):
    spoil, _, engine, only = SPOILED[what]
    with pytest.MonkeyPatch.context() as patch, program(comm, engine, length=40, only=only) as found:
        spoil(patch)
        return found.search(20, 0, shrink=False)


@starts_ranks
@pytest.mark.parametrize("what", SPOILED)
def test_a_fault_between_calls_is_found(what):
    found = run_mpi(found_in, SPOILED[what][1], what=what)
    assert found[0].startswith("rank ")
    assert set(found) == {found[0]}


class Sums(State):
    """Numbers instead of matrices, without a context. Sums that are large fail on one rank."""

    begin = None

    @step(matrices, value=seeds)
    def number(self, value):
        """Any."""
        return value

    @step(of=matrices)
    def other(self, of):
        """Nothing that matters."""

    @step(matrices, one=matrices, two=matrices)
    def sum(self, one, two):
        """Of two."""
        if self.comm.rank == 1 and one + two > 1500:
            raise RuntimeError("on one rank")
        return one + two


@on_ranks(2)
def test_a_fault_of_one_rank_shrinks_on_all(comm):
    """All have the smallest program, and none waits for another."""
    found = search(comm, lambda: Sums(comm, Host()), 100, steps=10)
    program = """state = Sums()
matrices_0 = state.number(value=751)
state.sum(one=matrices_0, two=matrices_0)
state.teardown()"""
    assert found.startswith("rank 1: ")
    assert "RuntimeError: on one rank" in found
    assert found.endswith(program)


# -- the program


PROGRAM = """
state = Sequence()
(matrices_0,) = state.begin(layouts=[MatrixDescriptor((1, 1), (1, 1), Grid(1, 1))], panels=0)
state.in_place(number=2, of=matrices_0, other=matrices_0, seed=0, symbol='+')
state.teardown()
"""


@on_ranks(1)
def test_a_program_runs_again(comm, directory):
    path = Path(directory, "program")
    path.write_text(PROGRAM)
    given = Namespace(engine="host", length=1, only="", replay=path)
    assert sequences.work(given) == 0
    with pytest.MonkeyPatch.context() as patch:
        no_agreement(patch)
        assert sequences.work(given) == 1


@starts_ranks
def test_the_command_starts_its_ranks(tmp_path):
    options = [
        "--engine=host",
        "-n",
        "2",
        "--sequences=2",
        "--seed=3",
        "--length=10",
    ]
    command = [*launch.interpreter(), "-m", "tests.chaos.sequences", *options]
    with Ranks(command, 1, tmp_path / "output", environ=ENVIRON) as job:
        status = job.wait(120)
        output = job.output.read_text()
    assert status == 0, output
    assert "seeds 3 to 3 on 2 ranks" in output
    assert "none failed" in output


def played(*, fails=(), more=0, seconds=0.0):
    """A program whose sequences only note their seeds, and that holds ``more`` after each one."""
    done = []
    program = SimpleNamespace(
        comm=SimpleNamespace(rank=0, size=1, allgather=lambda x: [x], bcast=lambda x: x),
        counts=Counter(), held=[], summary=lambda: "nothing",
        watch=SimpleNamespace(what="step 4: ['gather', {}]"),
    )  # fmt: skip

    def some_sequences(count, seed):
        done.append(seed)
        program.held.extend(
            {"descriptors": 7 + more * i} for i in range(len(program.held), len(program.held) + count)
        )
        time.sleep(seconds)
        return "wrong" if seed in fails else ""

    program.search, program.begin = some_sequences, lambda: None
    program.growth = lambda: Sequences.growth(program)
    lines = []
    return program, done, lines


@pytest.mark.parametrize("more", [0, 1])
def test_a_process_that_grows_has_a_status(more):
    program, done, lines = played(more=more)
    assert run(program, seconds=0, count=20, seed=3, say=lines.append) == more
    assert done == [3]
    assert ("GROWN descriptors 16, then 24" in "\n".join(lines)) == bool(more)


def test_growth_is_not_judged_while_it_warms_up():
    program, _, lines = played(more=1)
    assert run(program, seconds=0, count=WARM_UP, seed=0, say=lines.append) == 0


def test_what_fails_has_a_status_and_ends_it():
    program, done, lines = played(fails=[2])
    assert run(program, seconds=9, count=0, seed=0, say=lines.append) == 1
    assert done == [0, 1, 2]
    assert "FAILED, seed 2: wrong" in lines
    assert "one failed" in lines[-1]


def test_time_ends_it():
    program, done, lines = played(seconds=0.02)
    assert run(program, seconds=0.2, count=0, seed=0, say=lines.append) == 0
    assert 1 < len(done) <= 10


def test_an_error_comes_with_what_was_being_done(capsys):
    program, _, lines = played()

    def fails(count, seed):
        raise pb.ClosedError(f"in {seed}")

    program.search = fails
    with pytest.raises(pb.ClosedError, match="in 4"):
        run(program, seconds=0, count=1, seed=4, say=lines.append)
    assert capsys.readouterr().err == "rank 0 raises: step 4: ['gather', {}]\n"


def test_what_grows_is_found():
    before = dict.fromkeys(GROWTH, 100)
    assert grown(before, before) == []
    assert grown(before, {name: 100 + more for name, more in GROWTH.items()}) == []
    for name, more in GROWTH.items():
        assert grown(before, {**before, name: 101 + more}) == [f"{name} 100, then {101 + more}"]


@starts_ranks
def test_a_step_that_hangs_ends(tmp_path):
    code = (
        "from tests.chaos import sequences; import time; sequences.STUCK = 0.5; "
        "watch = sequences.Watch(0); watch.doing('step 7'); time.sleep(60)"
    )
    start = time.monotonic()
    with Ranks([*launch.interpreter(), "-c", code], 1, tmp_path / "output", environ=ENVIRON) as job:
        assert job.wait(40) not in (0, None)
        output = job.output.read_text()
    assert time.monotonic() - start < 30
    assert "rank 0 hangs: step 7" in output
    assert "time.sleep" in output or "in <module>" in output


def test_a_watch_ends_with_its_work():
    watch = Watch(0)
    watch.doing("step 1")
    watch.close()
    assert not watch.thread.is_alive()


def test_a_rank_takes_the_gpu_of_its_number(tmp_path):
    class Played(Gpu):
        def kernel(self):
            return lambda *_: None

    with machine(build(tmp_path), devices=["0000:01:00.0", "0000:02:00.0"]) as lib:
        Played(3)
        assert lib.gpu.current == 1
