# SPDX-License-Identifier: Apache-2.0
"""One process without MPI, and how messages are cut."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm import communicator
from pblasmp.comm.choice import wrap
from pblasmp.launchers import LAUNCHERS

VARIABLES = [(row.rank, row.size) for row in LAUNCHERS if row.rank]


@pytest.fixture
def no_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for rank, _ in VARIABLES:
        monkeypatch.delenv(rank, raising=False)


@pytest.mark.usefixtures("no_mpi")
@pytest.mark.parametrize("order", "CF")
def test_without_mpi_everything_runs(order, tmp_path):
    x = np.arange(12.0).reshape(4, 3)
    with pb.Context(engine="host") as ctx:
        a = ctx.scatter(x, pb.MatrixDescriptor((4, 3), (2, 2), pb.Grid(1, 1), order=order))
        d = pb.matmul(a, a, op_b="T", algo="shared")
        assert np.array_equal(d.gather(), x @ x.T)
        assert np.array_equal(a.redistribute(a.descriptor.T.T).allgather(), x)
        d.save(tmp_path / "d.npy")
        assert np.array_equal(ctx.load(tmp_path / "d.npy").local, x @ x.T)
        assert np.array_equal(pb.matmul_allreduce(x, x, ctx, algo="sum"), x @ x.T)
        with pytest.raises(pb.LayoutError, match="needs 2 ranks, got 1"):
            ctx.zeros(pb.MatrixDescriptor((4, 3), (2, 2), pb.Grid(1, 2)))


@pytest.mark.parametrize("other", ["world", SimpleNamespace(Dup=None)])  # as groups of processes have
def test_other_communicators_are_refused(other):
    with pytest.raises(
        pb.ArgumentTypeError, match=r"comm: expected an mpi4py communicator, a process group .*, got "
    ):
        wrap(other)


@pytest.mark.usefixtures("no_mpi")
@pytest.mark.parametrize(("rank", "size"), VARIABLES)
def test_under_a_launcher_a_missing_mpi_is_an_error(rank, size, monkeypatch):
    monkeypatch.setenv(rank, "1")
    if size:
        monkeypatch.setenv(size, "4")
    with pytest.raises(pb.LibraryNotFoundError, match=r"MPI launcher started this process.*pblasmp\[mpi\]"):
        wrap(None)


@pytest.mark.parametrize("comm", ["", "MPI.COMM_WORLD"])
def test_ranks_that_do_not_find_each_other_are_an_error(comm):
    """Each rank that mpirun of another MPI starts is alone in its own world."""
    script = f"from mpi4py import MPI; import pblasmp as pb; pb.Context({comm})"
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "LibraryNotFoundError: Open MPI's launcher started 4 ranks, but mpi4py's MPI library (" in last
    assert "sees 1: the launcher belongs to another MPI" in last
    done = subprocess.run(
        [sys.executable, "-c", script.replace(f"({comm})", "(MPI.COMM_SELF).close()")],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_messages_are_cut_into_chunks_in_memory_order(monkeypatch):
    monkeypatch.setattr(communicator, "CHUNK_BYTES", 24)
    for order in "CF":
        array = np.asarray(np.arange(10.0).reshape(5, 2), order=order)
        chunks = communicator.chunks(array)
        assert [chunk.size for chunk in chunks] == [24, 24, 24, 8]
        assert np.array_equal(np.concatenate(chunks).view(np.float64), array.ravel(order="K"))
        chunks[0][:] = 0  # a view of the array
        assert np.count_nonzero(array == 0) == 3
    assert communicator.chunks(np.empty((0, 3))) == []
    assert len(communicator.chunks(np.ones(5, pb.dtypes.as_dtype("bfloat16")))) == 1


def test_abort_ends_this_rank_where_mpi_returns():
    """MPICH's MPI_Abort may return before the launcher ends the job."""
    script = (
        "from mpi4py import MPI; from pblasmp.comm.choice import wrap\n"
        "class Comm(MPI.Intracomm):\n"
        "    def Abort(self, code): print('aborts', flush=True)\n"
        "comm = wrap(MPI.COMM_SELF); comm._made = Comm(MPI.COMM_SELF); comm.abort(7); print('returns')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (7, "aborts\n"), done.stderr
