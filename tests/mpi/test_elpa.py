# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues by ELPA on CPU ranks: by a stand-in for it everywhere, by Debian's where it has been fetched."""

import os
import subprocess
import sys
import tracemalloc
from socket import gethostname

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.host.mpi_libraries import ELPA, MpiLibrary
from reference.elpa import command, environment, locate_elpa
from tests.helpers import elpa_cases as cases
from tests.helpers import inside
from tests.helpers.cases import refuses
from tests.helpers.fake_elpa import opened
from tests.helpers.mpi import ROOT, on_ranks, run_mpi, starts_ranks
from tests.helpers.slow import draws, only_long

la = pb.linalg


@on_ranks(1, 2, 3, *only_long(4, 5, 6))
def test_elpa(comm):
    rng = np.random.default_rng(101 + comm.size)
    with pytest.MonkeyPatch.context() as patch:
        for how in ({}, {"single": False}, {"old": True}):
            patch.setattr(MpiLibrary, "opened", opened(**how))
            with pb.Context(comm, engine="host") as ctx:
                cases.cases(ctx, rng, draws({2: 5}.get(comm.size, 3), long=40))
        for fault in faults if comm.size > 1 else (lean,):
            fault(comm, patch)


def taken(comm, patch):
    """Large matrices by "auto", though ScaLAPACK is looked for, too; singular values are not ELPA's."""
    with pb.Context(comm, engine="host") as ctx, pb.plan(la.eigh, ctx.eye(201, block=32)) as plan:
        assert "elpa: taken" in str(plan.report()), "auto"
        words = ["'auto', 'lapack', 'scalapack' here, got 'elpa'"]
        refuses(ctx, pb.UnsupportedError, words, la.svdvals, ctx.eye(4), algo="elpa")


def refused(comm, patch):
    with pb.Context(comm, engine="host") as ctx:
        if comm.size == 3:
            words = ["algo 'elpa': ELPA needs at least as many rows as its 1x3"]
            refuses(ctx, pb.UnsupportedError, words, la.eigh, ctx.eye(2), algo="elpa")


def failing(comm, patch):
    """What ELPA reports: no convergence; anything else."""
    for fails, error, words in (
        ("compute", pb.FactorizationError, ["eigenvalues that the library does not find: INFO is 13"]),
        ("elpa_setup", pb.StatusError, ["elpa_setup: ELPA's error -6"]),
        ("elpa_set_integer", pb.StatusError, ["elpa_set_integer: ELPA's error -2"]),
        ("elpa_init", pb.UnsupportedError, ["libelpa.so lacks the interface of 20170403"]),
    ):
        with pb.Context(comm, engine="host") as ctx:
            if fails != "elpa_init":
                patch.setattr(MpiLibrary, "opened", opened())
                la.eigvalsh(ctx.eye(8), algo="elpa")
                inside.library(ctx, "ELPA").fails = fails
            else:
                patch.setattr(MpiLibrary, "opened", opened(fails=fails))
            refuses(ctx, error, words, la.eigh, ctx.eye(9), algo="elpa")


def spoiled(comm, patch):
    """Wrong eigenvectors are found by ``check=True``, and computed by another algorithm."""
    patch.setattr(MpiLibrary, "opened", opened(spoils=True))
    with pb.Context(comm, engine="host") as ctx:
        a = ctx.scatter(np.diag([3.0, 1, 2, 5, 4]), block=2)
        w, v = la.eigh(a, algo="elpa")
        wrong = abs(v.allgather()).max()
        assert wrong == 2, "unchecked"
        w, v = la.eigh(a, check=True)
        right = np.allclose(abs(v.allgather()).sum(0), 1) and np.allclose(w, [1, 2, 3, 4, 5])
        assert right, f"checked: {w} {v.allgather()}"


def lean(comm, patch):
    """Matrices in ELPA's layout, already of its type: one copy of A beside the eigenvectors, scaled only if need be."""
    patch.setattr(MpiLibrary, "opened", opened(single=False))
    with pb.Context(comm, engine="host") as ctx:
        la.eigvalsh(ctx.eye(40, block=16, order="F"), algo="elpa")
        library = inside.library(ctx, "ELPA")
        grid = pb.Grid.squarest(ctx.size)
        a = ctx.from_function(lambda i, j: 1.0 / (i + j + 1), (300, 300), block=32, grid=grid, order="F")
        for size, largest in ((3.0, 3.0), (50000.0, 50000.0), (2.0**-30, 1.0), (2.0**40, 1.0)):
            scaled = size * a
            tracemalloc.start()
            w = la.eigh(scaled, algo="elpa")[0]
            tracemalloc.stop()
            assert library.largest == largest, f"{size}"
            assert np.allclose(w / size, np.linalg.eigvalsh(a.allgather())), f"{size}"
            copies = library.memory / a.local.nbytes
            messages = 0.3 * (len(set(comm.allgather(gethostname()))) > 1)  # between nodes a few take room
            assert copies < 3.3 + messages or ctx.size > 3, "memory"


def kept(comm, patch):
    """Calls of one kind set ELPA up once; few of many kinds are kept, and freed with the context."""
    patch.setattr(MpiLibrary, "opened", opened())
    with pb.Context(comm, engine="host") as ctx:
        a = ctx.eye(8, block=2)
        la.eigvalsh(a, algo="elpa")
        library = inside.library(ctx, "ELPA")
        before = len(library.handles)
        for dtype in ("float64", "complex64", "float64"):
            w = la.eigh(a.astype(dtype), algo="elpa")[0]
        assert len(library.handles) == before
        assert np.allclose(w, 1)
        for n in (*range(8, 30), 8):
            w = la.eigvalsh(2.0 * ctx.eye(n, block=2), algo="elpa")
        alive = sum(map(bool, library.handles.values()))
        assert alive < 10
        assert np.allclose(w, 2)
        assert len(w) == 8
    assert not any(library.handles.values()), "freed"


faults = (taken, refused, failing, spoiled, lean, kept)


def absent(comm, wrong):
    with pb.Context(comm, engine="host") as ctx:
        refuses(ctx, pb.UnsupportedError, wrong, la.eigh, ctx.eye(4), algo="elpa")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (None, ["no ELPA at", "which PBLASMP_ELPA_LIBRARY names"]),
        ("libelpa_onenode.so.19", ["no ELPA at", "which PBLASMP_ELPA_LIBRARY names"]),
        ("libelpa.so.19", ["is built for Open MPI", "built for MPICH"]),
    ],
)
def test_an_elpa_that_cannot_be_used(name, words, tmp_path, monkeypatch):
    folder = tmp_path / "lib"
    if name:
        folder.mkdir()
        (folder / name).write_bytes(b"\0libmpi_mpifh.so.40\0libmpi.so.40\0")
    monkeypatch.setenv(ELPA.environment, str(folder))
    run_mpi(absent, 2, wrong=words)


@starts_ranks
def test_debians_elpa():
    folder = locate_elpa()
    if folder is None:
        pytest.skip("no ELPA: python -m benchmarks.fetch_scalapack --only elpa fetches one")
    ranks = [sys.executable, "-m", "tests.helpers.elpa_cases", str(draws(4, long=60))]
    environ = {**os.environ, **environment(folder)}
    done = subprocess.run(
        [*command(folder, 2), *ranks],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["right"]), done.stdout + done.stderr
