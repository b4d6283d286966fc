# SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls on CPU ranks and on simulated GPUs, and what they find.

A sequence that ``python -m tests.chaos.sequences`` prints becomes a test as one of ``ONCE_WRONG``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import launch
from pblasmp.engines.gpu.runtime import host_copies
from pblasmp.launch import Job as Ranks
from pblasmp.runtime import matrix_calls
from tests.chaos import sequences
from tests.chaos.sequences import GROWTH, WARM_UP, Sequences, Watch, grown, read, run
from tests.helpers.gpu.jobs import Job
from tests.helpers.machine import machine
from tests.helpers.mpi import ROOT, run_mpi, starts_ranks
from tests.helpers.recorder import build
from tests.helpers.sequences import CALLS, Gpu, Step, drawn, replay, shortened, steps_of
from tests.helpers.slow import draws, only_long

ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def program(comm, engine, **how):
    """The program on the ranks of a test, and the lines that it says."""
    lines = []
    with sequences.device(comm, engine) as device:
        found = Sequences(comm, device, say=lines.append, **how)
        found.lines = lines
        try:
            yield found
        finally:
            found.watch.close()


def some(comm, engine, seed, count, length):
    """Run some sequences; return what the program said, and how often each step was made."""
    with program(comm, engine, seed=seed, length=length) as found:
        for number in range(count):
            found.run(number)
        return found.lines, dict(found.counts)


@starts_ranks
@pytest.mark.parametrize("nranks", [1, *only_long(2), 3, *only_long(4, 5), 6])
def test_sequences_on_cpu_ranks(nranks):
    count = draws(1, long=3)
    lines, counts = run_mpi(some, nranks, engine="host", seed=nranks, count=count, length=60)[0]
    assert not lines, "\n".join(lines)
    assert counts["end"] == count


@starts_ranks
@pytest.mark.parametrize("nranks", [*only_long(1), 2, *only_long(4)])
def test_sequences_on_simulated_gpus(nranks):
    count = draws(1, long=2)
    lines, counts = run_mpi(some, nranks, engine="simulated", seed=nranks, count=count, length=40)[0]
    assert not lines, "\n".join(lines)
    assert counts["end"] == count


@starts_ranks
def test_sequences_while_another_gpu_is_current():
    lines, counts = run_mpi(some, 2, engine="away", seed=2, count=draws(2, long=20), length=40)[0]
    assert not lines, "\n".join(lines)
    assert counts["end"] >= 2


def layout(m, n, block=(64, 64)):
    """A layout on one rank."""
    return {"shape": [m, n], "block": block, "grid": [1, 1, "row"], "source": [0, 0], "dtype": "float64",
            "order": "C", "pad": 0}  # fmt: skip


ONCE_WRONG = {
    "a small copy to the host, then a large one": (1, "simulated", [
        ["from_function", {"to": 0, "layout": layout(24, 24), "a": 1, "b": 2}],
        ["random_numbers", {"layout": layout(200, 200), "seed": 3, "root": 0}],
    ]),
}  # fmt: skip
"""By name, sequences that have failed: the numbers of ranks, the engine, and the steps."""


def one(comm, engine, steps, directory):
    with program(comm, engine) as found:
        outcome = found.replay(steps_of(steps))
        return outcome.faults


@starts_ranks
@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_was_wrong_once(name, tmp_path):
    nranks, engine, steps = ONCE_WRONG[name]
    assert run_mpi(one, nranks, engine=engine, steps=steps, directory=str(tmp_path))[0] == []


# -- what it finds


def one_buffer_twice(patch):
    """The fault of July: one buffer for two chunks while there are fewer than three."""

    def _buffer(self, i):
        if len(self._buffers) < 3:
            memory = self._cupy.cuda.alloc_pinned_memory(host_copies._CHUNK)
            event = self._cupy.cuda.Event(disable_timing=True)
            self._buffers.append((memory, np.frombuffer(memory, np.uint8, host_copies._CHUNK), event))
            return self._buffers[-1]
        return self._buffers[i % 3]

    patch.setattr(host_copies.HostCopies, "_buffer", _buffer)


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
        how, call._how = call._how, {**call._how, "alpha": 1}
        try:
            return signature(call)
        finally:
            call._how = how

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
    "one buffer twice": (
        one_buffer_twice,
        1,
        "simulated",
        ("random_numbers", "scatter", "gather", "view"),
        11,
        2,
    ),
    "operands of another run": (stale_operands, 2, "host", ("prepare", "run", "wait"), 11, 5),
    "a plan of another call": (calls_that_differ, 2, "host", ("many", "matmul", "scatter"), 7, 1),
    "written without agreement": (no_agreement, 3, "host", ("scatter", "in_place", "mistake"), 3, 2),
}
"""What is spoiled, on how many ranks, the steps that are drawn, a seed that soon finds it, and at most how many
steps are needed."""


def found_in(comm, what):
    spoil, _, engine, only, seed, _ = SPOILED[what]
    with (
        pytest.MonkeyPatch.context() as patch,
        program(comm, engine, seed=seed, length=40, only=only) as found,
    ):
        spoil(patch)
        for number in range(20):
            found.run(number)
            if found.failed:
                break
        return found.lines


@starts_ranks
@pytest.mark.parametrize("what", SPOILED)
def test_a_fault_between_calls_is_found(what):
    _, nranks, *_, enough = SPOILED[what]
    lines = run_mpi(found_in, nranks, what=what)[0]
    text = "\n".join(lines)
    assert "FAILED sequence" in text
    needed = re.search(r"(\d+) of \d+ steps are enough", text)
    assert needed, text
    assert int(needed[1]) <= enough, text


# -- the program


@starts_ranks
def test_the_command_starts_its_ranks(tmp_path):
    options = [
        "--engine=host",
        "-n",
        "2",
        "--sequences=1",
        "--first=3",
        "--length=10",
        "--without=many,context",
    ]
    command = [*launch.interpreter(), "-m", "tests.chaos.sequences", *options]
    with Ranks(command, 1, tmp_path / "output", environ=ENVIRON) as job:
        status = job.wait(120)
        output = job.output.read_text()
    assert status == 0, output
    assert "1 sequences of seed 0 from 3 on 2 ranks" in output
    assert "0 failed" in output


def test_every_step_is_drawn_and_plain(tmp_path):
    steps = [step for seed in range(40) for step in drawn(random.Random(seed), 4, 100, 1 << 20)]
    assert {step.name for step in steps} == CALLS.keys()
    (tmp_path / "steps").write_text("".join(f"  {step},\n" for step in steps))
    assert read(tmp_path / "steps") == steps
    (tmp_path / "steps").write_text(json.dumps([[step.name, step.given] for step in steps]))
    assert read(tmp_path / "steps") == steps


def played(*, fails=(), more=0, seconds=0.0):
    """A program whose sequences only note their numbers, and that holds ``more`` after each one."""
    done = []
    program = SimpleNamespace(
        comm=SimpleNamespace(rank=0, size=1, allgather=lambda x: [x], bcast=lambda x: x),
        counts=Counter(), failed=[], held=[], seed=7, summary=lambda: "nothing",
        watch=SimpleNamespace(what="step 4: ['gather', {}]"),
    )  # fmt: skip

    def one_sequence(number):
        done.append(number)
        if number in fails:
            program.failed.append(number)
        program.held.append({"descriptors": 7 + more * len(program.held)})
        time.sleep(seconds)

    program.run, program.begin = one_sequence, lambda: None
    program.growth = lambda: Sequences.growth(program)
    lines = []
    return program, done, lines


@pytest.mark.parametrize("more", [0, 1])
def test_a_process_that_grows_has_a_status(more):
    program, done, lines = played(more=more)
    assert run(program, seconds=0, count=20, first=3, say=lines.append) == more
    assert done == list(range(3, 23))
    assert ("GROWN descriptors 16, then 24" in "\n".join(lines)) == bool(more)


def test_growth_is_not_judged_while_it_warms_up():
    program, _, lines = played(more=1)
    assert run(program, seconds=0, count=WARM_UP, first=0, say=lines.append) == 0


def test_what_fails_has_a_status_and_ends_soon():
    program, done, lines = played(fails=range(2, 30))
    assert run(program, seconds=0, count=30, first=0, say=lines.append) == 1
    assert done == list(range(2 + sequences.ENOUGH))
    assert "5 failed [2, 3, 4, 5, 6]" in lines[-1]


def test_time_ends_it():
    program, done, lines = played(seconds=0.02)
    assert run(program, seconds=0.2, count=0, first=0, say=lines.append) == 0
    assert 1 < len(done) <= 10


def test_an_error_comes_with_what_was_being_done(capsys):
    program, _, lines = played()

    def fails(number):
        raise pb.ClosedError(f"in {number}")

    program.run = fails
    with pytest.raises(pb.ClosedError, match="in 4"):
        run(program, seconds=0, count=1, first=4, say=lines.append)
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
    assert not watch._thread.is_alive()


def test_a_rank_takes_the_gpu_of_its_number(tmp_path):
    class Played(Gpu):
        def kernel(self):
            return lambda *_: None

    with machine(build(tmp_path), devices=["0000:01:00.0", "0000:02:00.0"]) as lib:
        Played(3)
        assert lib.gpu.current == 1


# -- sequences are made shorter


def plain(*numbers):
    layout = {"layout": {"shape": [8, 3]}}
    return [Step("scatter", {"to": number, **layout}) for number in numbers]


def test_a_sequence_is_made_shorter():
    tried = []

    def fails(steps):
        tried.append(len(steps))
        places = [step.given["to"] for step in steps]
        return 3 in places and 17 in places[places.index(3) :] and steps[-1].given["layout"]["shape"][0] > 2

    kept = shortened(plain(*range(40)), fails)
    assert [step.given["to"] for step in kept] == [3, 17]
    assert [step.given["layout"]["shape"] for step in kept] == [[1, 1], [4, 1]]
    assert len(tried) < 60


def test_what_needs_every_step_is_kept():
    steps = plain(1, 2, 3)
    assert shortened(steps, lambda less: len(less) == 3 and less[0].given == steps[0].given)[0] == steps[0]


def test_no_more_is_tried_when_time_is_up():
    steps = plain(*range(40))
    left = [True] * 3

    def in_time():
        return bool(left) and left.pop()

    assert len(shortened(steps, lambda less: True, in_time)) >= 10


def missing_steps(comm):
    """Every prefix left out of a sequence: what steps act on may be missing."""
    with sequences.device(comm, "host") as device:
        steps = drawn(random.Random(2), comm.size, 40, device.large)
        with program(comm, "host") as found:
            return [found.replay(steps[first:]).faults for first in range(0, len(steps), 7)]


@starts_ranks
def test_steps_are_legal_whatever_came_before():
    assert not any(run_mpi(missing_steps, 2)[0])


def alone(comm, directory):
    """A step that fails on one rank is a fault of the sequence on every rank."""

    def wrong(session):
        if session.ctx.rank == 1:
            raise RuntimeError("on one rank")

    with pytest.MonkeyPatch.context() as patch, sequences.device(comm, "host") as device:
        patch.setitem(CALLS, "wrong", SimpleNamespace(function=wrong))
        patch.setitem(CALLS, "fine", SimpleNamespace(function=lambda session: session.ctx.zeros((4, 4))))
        outcome = replay(comm, device, directory, [Step(name, {}) for name in ("fine", "wrong", "fine")])
        return outcome.at, outcome.kind, [fault.splitlines()[-1] for fault in outcome.faults]


@starts_ranks
def test_a_fault_of_one_rank_is_a_fault(tmp_path):
    expected = [1, "RuntimeError", ["RuntimeError: on one rank"]]
    assert [list(each) for each in run_mpi(alone, 2, directory=str(tmp_path))] == [expected] * 2
