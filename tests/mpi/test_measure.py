# SPDX-License-Identifier: Apache-2.0
"""Measuring machines on ranks, and what pblasmp plan and doctor print."""

import json
import time
from functools import partial
from types import SimpleNamespace
from unittest import mock

import click
import numpy as np
import pytest
from click.testing import CliRunner

import pblasmp as pb
from pblasmp.cli import doctor
from pblasmp.cli.bench import Separate
from pblasmp.cli.commands import cli
from pblasmp.costs.machines import machine_from, machine_toml, with_ranks
from pblasmp.problems.files import load_table
from pblasmp.tuning import speeds, timing
from tests.helpers.mpi import on_ranks, run_mpi, run_on_one_node

SMALL = {
    "SIZES": {"host": (8, 16)},
    "COPIED": {"host": 1 << 16},
    "PANEL": {"host": (16, 8)},
    "SENT": {"host": 1 << 12},
    "ROUNDS": 3,
    "repeated": partial(timing.repeated, least=0.001),
}


def measured(comm):
    with mock.patch.multiple(speeds, **SMALL), pb.Context(comm, engine="host") as ctx:
        a = ctx.zeros(pb.MatrixDescriptor((4, 4), (2, 2), pb.Grid(1, ctx.size)))
        entry = speeds.measure_ranks(ctx.engine, ctx.comm, lambda: a @ a, lambda _: None)
        product = pb.plan(pb.matmul, a, a)
        calls = [
            (product.problem, lambda: time.sleep(0.03)),
            (pb.Level3Problem("trmm", a=a.descriptor, b=a.descriptor, d=a.descriptor), product),
        ]
        return {**entry, "calls": speeds.measure_calls(ctx.engine, ctx.comm, entry, calls)}


def test_measure(tmp_path):
    """On one and two ranks: a file that loads again, and predicts."""
    table = None
    for nranks in (1, 2):
        entry = run_mpi(measured, nranks)[0]
        assert ("link" in entry) == (nranks > 1)
        assert [n for n, _ in entry["gemm"]["complex64"]] == [8, 16]
        assert entry["columns"].keys() == {"trsm", "potrf", "getrf", "geqrt"}
        assert min(entry["columns"].values()) > 0
        assert entry["calls"]["product"] > 0.02 > entry["calls"]["routine"] >= 0
        table = with_ranks(table, entry, title="here", measured=True, memory_bytes=1 << 30)
    file = tmp_path / "here.toml"
    file.write_text(machine_toml(table))
    machine = machine_from(load_table(file), "here")
    assert [each.ranks for each in machine.nodes] == [1, 2]
    found = pb.predict(pb.MatmulProblem.gemm(16, 16, 16, "1x2", 4), file)
    assert found.seconds > 0
    assert found.extrapolated == ()


def test_the_median_round_counts():
    """Number by number, as in the validation of predictions; a curve may end early in a slow round."""
    slow = {"call_seconds": 3.0, "copy": {"bytes_per_second": 5.0}, "gemm": {"float64": [[8, 2.0]]}}
    fast = {**slow, "call_seconds": 1.0, "gemm": {"float64": [[8, 3.0], [16, 4.0]]}}
    links = [
        {"link": {"bytes_per_second": x, "seconds": y}} for x, y in ((4.0, 0.5), (6.0, 0.75), (3.0, 0.25))
    ]
    rounds = [slow | links[0], fast | links[1], slow | links[2]]
    with mock.patch.object(speeds, "one_round", side_effect=rounds), mock.patch.object(speeds, "ROUNDS", 3):
        assert speeds.measure_ranks(None, SimpleNamespace(size=2), None) == {
            "ranks": 2, "call_seconds": 3.0, "copy": {"bytes_per_second": 5.0},
            "gemm": {"float64": [[8, 2.0], [16, 4.0]]}, "link": {"bytes_per_second": 4.0, "seconds": 0.5},
        }  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)], catch_exceptions=False)


def test_plan():
    done = run(1000, 1000, 1000, "--ranks", 4, "--machine", "dgx-h100")
    assert done.output.startswith("best: ")
    assert "extrapolated  dgx-h100 was not measured" in done.output
    how = ("--nodes", "1..3", "--machine", "dgx-h100")
    done = run(9000, 9000, 9000, *how)
    assert [line.split()[0] for line in done.output.splitlines()[:3]] == ["1", "2", "3"]
    plans = json.loads(run(9000, 9000, 9000, *how, "--json").output)["plans"]
    assert [each["nodes"] for each in plans] == [1, 2, 3]
    assert plans[0]["best"]["extrapolated"]
    output = run("grid-2x2", "--machine", "dgx-h100").output
    assert "extrapolated  dgx-h100 was not measured" in output[output.index("move: ") :]
    found = json.loads(run("grid-2x2", "--machine", "dgx-h100", "--json").output)
    assert found["move"]["extrapolated"][-1:] == ["dgx-h100 was not measured"]
    done = run(70, 60, 50, "--ranks", 8, "--machine", "dgx-h100", "--dry-run")
    assert "dry run: 8 CPU ranks, gathered: " in done.output
    assert "each is awaited once, and nothing deadlocks" in done.output
    dry = json.loads(run("grid-2x2", "--machine", "dgx-h100", "--dry-run", "--json").output)["dry_run"]
    assert (dry["ranks"], dry["algorithm"]) == (4, "gathered")
    assert dry["messages"] > 0 < dry["sent_bytes"]
    done = run("--model", "llama-8b", "--tokens", 64, "--machine", "dgx-h100")
    assert "extrapolated: dgx-h100 was not measured" in done.output
    done = run("--model", "llama-8b", "--tokens", 64, "--machine", "dgx-h100", "--json")
    layers = json.loads(done.output)["layers"]
    assert len(layers) == 6
    assert all("dgx-h100 was not measured" in each["extrapolated"] for each in layers)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("1 2", "expected three sizes, one descriptor file or a factorization, got 1 2"),
        ("8 8 8 --nodes 4..2", "'4..2': expected a number or first..last"),
        ("8 8 8 --nodes 1 --ranks 2", "leave --ranks out"),
        ("8 8 8 --nodes 1..2 --dry-run", "--dry-run is for one product"),
        ("--model llama-8b", "--model and --tokens go together"),
    ],
)
def test_what_plan_refuses(arguments, words):
    with pytest.raises(click.UsageError, match=words.replace(".", r"\.")):
        cli.main(["plan", *arguments.split(), "--machine", "dgx-h100"], standalone_mode=False)


def test_faults_that_doctor_finds():
    """Each with a cure: no MPI, a foreign mpirun, ranks without cores or memory of the node, wrong, slow."""
    facts = {"MPI library": {"problem": "none"}, "mpirun": {"problem": "foreign"}}
    assert [fault for fault, _ in doctor.faults_of_facts(facts)] == ["MPI library: none", "mpirun: foreign"]
    assert list(doctor.faults_of_facts({"MPI library": {}, "mpirun": {}})) == []
    ranks = {
        "ranks": 4, "nodes": 1, "ranks_of_node": 4, "cores": 1, "why_not_shared": "sealed", "engine": "host", "why": "",
        "checked": ["shared", "panels"], "wrong": {"panels": "the product is wrong"}, "gemm_size": 8,
        "speed": {"copy": 1e9, "gemm": 1e12}, "seats": [],
    }  # fmt: skip
    with (
        mock.patch.object(doctor, "on_ranks", return_value=ranks) as started,
        mock.patch.object(doctor, "collect", return_value=facts),
    ):
        found = doctor.diagnose(4, "host", "dgx-h100")
    started.assert_called_once()  # starting takes longer than all else
    faults = [fault for fault, cure in found["faults"] if cure]
    assert faults == [
        "MPI library: none", "mpirun: foreign", "panels: the product is wrong", "4 ranks of a node share 1 core",
        "the ranks of a node share no memory: sealed",
        "copy: 0 % of what dgx-h100 has", "gemm: 10 % of what dgx-h100 has",
    ]  # fmt: skip


BLAS = {
    "internal_api": "openblas", "version": "0.3", "filepath": "/openblas.so", "num_threads": 2,
    "architecture": "Haswell",
}  # fmt: skip


def test_what_doctor_prints(capsys):
    """MPI, libraries with their paths, binding, and a verdict: one rank needs no MPI."""
    facts = {
        "MPI library": {"problem": "none"}, "mpirun": {"version": "5.0", "path": "/usr/bin/mpirun"},
        "numpy": {"version": "2.0", "path": "/numpy", "blas": [BLAS]},
    }  # fmt: skip
    ranks = {
        "ranks": 1, "nodes": 1, "ranks_of_node": 1, "cores": 2, "why_not_shared": "", "engine": "host",
        "why": "requested", "checked": ["gathered"], "wrong": {}, "gemm_size": 8, "speed": {"copy": 1e9, "gemm": 1e12},
        "noise": {"calls": 3, "runs": 5}, "seats": [], "why_no_windows": "sockets",
    }  # fmt: skip
    for count, verdict in ((1, "everything works"), (2, "one fault")):
        with (
            mock.patch.object(doctor, "on_ranks", return_value=ranks),
            mock.patch.object(doctor, "collect", return_value=facts),
        ):
            doctor.print_diagnosis(doctor.diagnose(count, "host", None))
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == verdict
        assert lines[:4] == [
            "mpirun       5.0, /usr/bin/mpirun", "MPI library  none",
            "numpy        2.0, openblas 0.3 Haswell /openblas.so",
            "ranks        one rank on one node, engine host (requested)",
        ]  # fmt: skip
        assert "windows      none: sockets" in lines
        assert "binding      the ranks of a node may run on 2 cores" in lines
        assert "noise        3 calls, each made 5 times while other work runs, with late ranks" in lines


def test_ranks_that_do_not_find_each_other_are_a_fault(monkeypatch, capsys):
    """Whatever the reason is, doctor says it with a cure; one that Slurm has to do with names its option."""
    alone = pb.LibraryNotFoundError("Slurm started 4 ranks, but mpi4py's MPI library sees 1")
    for environ, cure in (
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun --mpi=list"),
        ({}, "pblasmp info"),
    ):
        with (
            mock.patch.dict("os.environ", environ, clear=True),
            mock.patch.object(doctor, "on_ranks", side_effect=alone),
            mock.patch.object(doctor, "collect", return_value={"MPI library": {}, "mpirun": {}}),
        ):
            found = doctor.diagnose(None, "host", None)
        doctor.print_diagnosis(found)
        text = capsys.readouterr().out
        assert f"the ranks failed: {alone}" in text
        assert cure in text
        assert text.endswith("one fault\n")


def placed(comm):
    """A node is a machine, for GPUs and CPUs, however its ranks are split for communication."""
    with pb.Context(comm, engine="host") as ctx:
        for gpus in (False, True):
            found = doctor.places(ctx.comm, gpus=gpus)
            ranks = 1 if gpus else ctx.size
            expected = {"ranks": ctx.size, "nodes": 1, "ranks_of_node": ranks, "cores": found["cores"]}
            assert found == expected, f"gpus {gpus}"
            assert found["cores"], f"gpus {gpus}"


def test_where_doctor_finds_the_ranks(monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", "1")
    run_on_one_node(placed, 2, launch=True)


@on_ranks(3)
def test_what_bench_compares_with_is_of_the_contexts_ranks(comm):
    """A GEMM and a collective of the context's ranks, which are not all ranks."""
    half = comm.Split(comm.rank % 2)
    with pb.Context(half, engine="host") as ctx:
        for name in ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather"):
            both = Separate(ctx, name, (4, 6, 8), np.dtype("float64"))
            y = getattr(pb, name)(both.x, both.w, ctx)
            error = both.error(y)
            assert error < 1e-14, name
    half.Free()
