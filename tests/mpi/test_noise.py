# SPDX-License-Identifier: Apache-2.0
"""Calls that are repeated while the ranks are disturbed: all are right, and what is wrong is found."""

import subprocess
from functools import partial
from unittest import mock

import numpy as np

import pblasmp as pb
from pblasmp.cli import doctor
from pblasmp.cli.noise import Noise, Trial, trials, wrong_runs
from tests.helpers.mpi import on_ranks, run_mpi

ORDER = 24


@on_ranks(2)
def test_every_trial(comm):
    names = []
    with pb.Context(comm) as ctx, Noise(ctx, beside=False) as noise:
        for trial in trials(ctx, ORDER):
            names.append(trial.name)
            found = wrong_runs(ctx, trial, noise, 2)
            assert found == 0, trial.name
    assert len(set(names)) == len(names) > 40, "all names differ"


def of_another_run(ctx, rank, value):
    """What a rank computes with the value of the run before, in one of its elements."""
    result = np.full(3, value)
    if ctx.rank == rank:
        result[1] = of_another_run.last
    of_another_run.last = value
    return result


def refused(ctx, value):
    with ctx.agreement("a call"):
        raise pb.UnsupportedError("not here")


def what_is_found(comm):
    spied = mock.patch("pblasmp.cli.noise.subprocess.Popen", wraps=subprocess.Popen)
    with pb.Context(comm) as ctx, spied as started, Noise(ctx, naps=False, neighbor=True) as noise:
        assert (
            started.call_args.kwargs["env"]["OMP_NUM_THREADS"] == "1"
        )  # with more it takes the cores of all ranks
        of_another_run.last = 1.0
        late = Trial("late", partial(of_another_run, ctx, 1), 1e-3)
        nan = Trial("nan", lambda _: np.array([np.nan]))
        few = Trial("no elements on a rank", lambda value: np.full(comm.rank, value + 1))
        return [
            wrong_runs(ctx, late, noise, 6),
            wrong_runs(ctx, nan, None, 2),
            wrong_runs(ctx, few, None, 2),
            wrong_runs(ctx, Trial("refused", partial(refused, ctx)), noise, 2),
            wrong_runs(ctx, Trial("right", lambda value: np.full(2, value)), None, 2),
        ]


def what_doctor_finds(comm):
    def few(ctx, n):
        yield Trial("late", lambda value: np.full(3, value + (comm.rank == 1)))
        yield Trial("refused", partial(refused, ctx))
        yield Trial("right", lambda value: np.full(2, value))

    facts = {"MPI library": {}, "mpirun": {}}
    narrow = {"ranks": 2, "nodes": 1, "ranks_of_node": 2, "cores": 1}
    with (
        mock.patch.object(doctor, "trials", few),
        mock.patch.object(doctor, "collect", return_value=facts),
        mock.patch.object(doctor, "places", return_value=narrow),
        mock.patch("pblasmp.cli.noise.subprocess.Popen", wraps=subprocess.Popen) as started,
    ):
        found = doctor.diagnose(None, "host", None, 1)
        doctor.print_diagnosis(found)
    neighbors = comm.allgather(started.call_count)
    return found["faults"] if comm.rank == 0 else (found["wrong"], neighbors)


def test_what_doctor_finds():
    faults, (wrong, neighbors) = run_mpi(what_doctor_finds, 2)
    assert neighbors == [1, 0]  # one for the core that the ranks share
    assert wrong == {"late": "wrong in 1 of 1 run while other work runs beside them"}
    assert [
        "late: wrong in 1 of 1 run while other work runs beside them",
        "report this with the output",
    ] in faults


def test_what_is_found():
    assert run_mpi(what_is_found, 2) == [[5, 2, 2, "not here", 0]] * 2
