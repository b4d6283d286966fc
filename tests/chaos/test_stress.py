# SPDX-License-Identifier: Apache-2.0
"""The stress program on CPU ranks and on played GPUs, and what it finds wrong."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

import pblasmp as pb
from pblasmp import launch
from pblasmp.launch import Job as Ranks
from tests.chaos import stress
from tests.helpers.gpu.jobs import Job
from tests.helpers.machine import Multiplying, machine
from tests.helpers.mpi import ROOT, run_mpi, starts_ranks
from tests.helpers.recorder import build

ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@starts_ranks
def test_a_few_rounds_on_cpu_ranks(tmp_path):
    command = [*launch.interpreter(), "-m", "tests.chaos.stress", "--engine=host", "--rounds=3", "--first=8"]
    with Ranks(command, 2, tmp_path / "output", environ=ENVIRON) as job:
        status = job.wait(120)
        output = job.output.read_text()
    assert status == 0, output
    assert "3 rounds of seed 0, 0 with wrong numbers" in output
    for words in (*stress.KINDS.values(), "sleeps", "1 out-of-memory errors"):
        assert words in output


class Played(stress.Gpu):
    """Streams of a GPU that is played, whose kernels and graphs do nothing."""

    graphs = False
    excess = stress.Host.excess  # its memory is the host's

    def kernel(self):
        return lambda *_: None


def rounds(comm, path, numbers, graphs=False):
    with machine(path, Multiplying, comm=comm) as lib:
        with pb.Context(comm, engine="cublasmp") as ctx:
            program = stress.Stress(ctx, Played(), seed=3)
            program.device.graphs = graphs
            try:
                faults = [fault for number in numbers for fault in program.round(number)]
                held = program.held()
            finally:
                program.watch.close()
        assert set(held) == set(stress.GROWTH)
        lib.assert_clean()
        lib.gpu.assert_clean()
        return faults, dict(program.counts)


@starts_ranks
def test_a_few_rounds_on_played_gpus(tmp_path):
    for faults, counts in run_mpi(rounds, 2, path=build(tmp_path), numbers=[9, 99]):
        assert not faults
        assert all(counts[kind] for kind in stress.KINDS.values())
        assert (counts["contexts"], counts["out-of-memory errors"]) == (1, 2)


@starts_ranks
def test_a_graph_that_does_nothing_is_found(tmp_path):
    found = run_mpi(rounds, 2, path=build(tmp_path), numbers=[13], graphs=True)  # both ranks have a part of D
    assert found[0] == found[1]
    faults, counts = found[0]
    assert len(faults) == 2 * counts["graphs replayed"] > 0
    assert all("a graph" in fault and "nan" in fault for fault in faults)


def one_kind(comm):
    """Rounds of one kind with a slow rank: how often this one slept, what was counted, which algorithms were asked."""

    class Sleeping(stress.Host):
        naps = 0

        def sleep(self, seconds):
            assert 0 <= seconds <= stress.LONGEST
            self.naps += 1

    asked = set()

    class Asking(stress.Stress):
        def _drawn(self, kind, rng, algo, *names):
            asked.add(algo)
            return super()._drawn(kind, rng, algo, *names)

    with pb.Context(comm, engine="host") as ctx:
        program = Asking(ctx, Sleeping(), seed=2, only="parallel", slow=1, without=["push"])
        try:
            assert [program.round(number) for number in range(3)] == [[], [], []]
        finally:
            program.watch.close()
        return program.device.naps, dict(program.counts), dict(program.taken), sorted(asked)


@starts_ranks
def test_one_kind_of_calls_with_a_slow_rank():
    (none, counts, taken, asked), (naps, *_) = run_mpi(one_kind, 2)
    assert (none, naps) == (0, counts["sleeps"])
    assert naps
    assert {name for name, count in counts.items() if count} == {"tensor-parallel calls", "sleeps"}
    assert sum(taken.values()) == 3 * len(stress.DRAWN)
    assert "auto" in asked
    assert "push" not in asked


def wrong_rounds(comm, patched):
    """Rounds with something wrong on rank 1: the faults of the round, and the program's status."""
    with pytest.MonkeyPatch.context() as patch, pb.Context(comm, engine="host") as ctx:
        program = stress.Stress(ctx, stress.Host(), seed=1)
        PATCHES[patched](patch, ctx)
        try:
            faults = program.round(9)
            return faults, stress.run(program, seconds=0, rounds=1, first=9, warm_up=5)
        finally:
            program.watch.close()


def one_number(patch, ctx):
    run = Job.run

    def off_by_one(self, turn):
        result = run(self, turn)
        if ctx.rank == 1 and result.size:
            result[-1, -1] += 1
        return result

    patch.setattr(Job, "run", off_by_one)


def stale_operands(patch, ctx):
    run = Job.run
    patch.setattr(Job, "run", lambda self, turn: run(self, 0 if ctx.rank == 1 else turn))


def plenty(patch, ctx):
    empty = ctx.empty
    patch.setattr(ctx, "empty", lambda x, **how: None if max(x.shape) > 1 << 19 else empty(x, **how))


PATCHES = {"one number": one_number, "operands of the run before": stale_operands, "no memory error": plenty}


@starts_ranks
@pytest.mark.parametrize(
    ("patched", "words"),
    [("one number", ("run ", "rank 1: ")), ("operands of the run before", ("run ", "rank ")),
     ("no memory error", ("no MemoryError",))],
)  # fmt: skip
def test_what_is_wrong_is_found(patched, words):
    found = run_mpi(wrong_rounds, 2, patched=patched)
    assert found[0] == found[1]
    faults, status = found[0]
    assert status == 1
    assert all(word in faults[0] for word in ("seed 1, round 9: ", *words)), faults


@pytest.mark.parametrize(
    "how", [{"rounds": 3, "warm_up": 1}, {"rounds": 0, "warm_up": 9}, {"rounds": 3, "warm_up": 9}]
)
@pytest.mark.parametrize("more", [0, 1])
def test_a_process_that_grows_has_a_status(how, more, capsys):
    done = []

    def held():
        done.append("held")
        return {"descriptors": 7 + more * (done.count("held") - 1)}

    def one_round(number):
        done.append(number)
        time.sleep(0.1)
        return []

    comm = SimpleNamespace(allgather=lambda x: [x], bcast=lambda x: x)
    program = SimpleNamespace(
        ctx=SimpleNamespace(rank=0, comm=comm), round=one_round, held=held, summary=str, taken={}, seed=0
    )
    status = stress.run(program, seconds=0.55, first=0, **how)
    counted = how != {"rounds": 3, "warm_up": 9}
    assert [x for x in done if x != "held"] == list(range(len(done) - 2 * counted))
    assert (done.count("held"), done[0], done[-1] == "held") == (2 * counted, 0, counted)
    assert status == (more and counted)
    assert ("GROWN descriptors 7, then 8" in capsys.readouterr().out) == bool(status)


def test_rounds_are_repeated():
    done = []
    program = SimpleNamespace(
        ctx=SimpleNamespace(rank=1, comm=SimpleNamespace(allgather=lambda x: [x])),
        round=lambda number: done.append(number) or [], summary=str, taken={}, seed=0,
    )  # fmt: skip
    assert stress.run(program, seconds=0, rounds=5, first=3, warm_up=9, different=2) == 0
    assert done == [3, 4, 3, 4, 3]


def test_an_error_comes_with_what_was_being_done(capsys):
    def fails(number):
        raise pb.ClosedError(f"in {number}")

    program = SimpleNamespace(
        ctx=SimpleNamespace(rank=1), round=fails, watch=SimpleNamespace(what="round 4, run 7")
    )
    with pytest.raises(pb.ClosedError, match="in 4"):
        stress.run(program, seconds=0, rounds=1, first=4, warm_up=5)
    assert capsys.readouterr().err == "rank 1 raises: round 4, run 7\n"


def test_what_grows_is_found():
    before = dict.fromkeys(stress.GROWTH, 100)
    assert stress.grown(before, before) == []
    assert stress.grown(before, {name: 100 + more for name, more in stress.GROWTH.items()}) == []
    for name, more in stress.GROWTH.items():
        assert stress.grown(before, {**before, name: 101 + more}) == [f"{name} 100, then {101 + more}"]


@starts_ranks
def test_a_round_that_hangs_ends(tmp_path):
    code = (
        "from tests.chaos import stress; import time; stress.STUCK = 0.5; "
        "watch = stress.Watch(0); watch.doing('round 7'); time.sleep(60)"
    )
    start = time.monotonic()
    with Ranks([*launch.interpreter(), "-c", code], 1, tmp_path / "output", environ=ENVIRON) as job:
        assert job.wait(40) not in (0, None)
        output = job.output.read_text()
    assert time.monotonic() - start < 30
    assert "rank 0 hangs: round 7" in output
    assert "time.sleep" in output or "in <module>" in output
