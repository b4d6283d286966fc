# SPDX-License-Identifier: Apache-2.0
"""MPI that is not initialized, or finalized already, and children of ranks: an error of pblasmp from every entry.

MPICH ends a process that uses it then, without a traceback.
"""

import os
import subprocess
import sys

import pytest

from pblasmp import launch
from pblasmp.launch import Job
from tests.helpers.mpi import ROOT, starts_ranks
from tests.helpers.slow import only_long

pytestmark = starts_ranks

ENTRIES = """
import numpy as np
import pblasmp as pb
from pblasmp import pblas, tensor_parallel as tp

ENTRIES = {  # name: a function of a context, two matrices and a plan made before
    "Context": lambda ctx, a, b, plan: pb.Context(),
    "Context of a communicator": lambda ctx, a, b, plan: pb.Context(MPI.COMM_WORLD),
    "Context of a context's": lambda ctx, a, b, plan: pb.Context(ctx.comm),
    "gridinit": lambda ctx, a, b, plan: pblas.gridinit(None, "R", 1, 1),
    "gridinit of a context": lambda ctx, a, b, plan: pblas.gridinit(ctx, "R", 1, 1),
    "matmul": lambda ctx, a, b, plan: a @ b,
    "matmul, new": lambda ctx, a, b, plan: pb.matmul(a, b, alpha=3.0),
    "symm": lambda ctx, a, b, plan: pb.blas.symm(a, b),
    "plan": lambda ctx, a, b, plan: plan(a, b),
    "a new plan": lambda ctx, a, b, plan: pb.plan(pb.matmul, a, b, alpha=2.0),
    "norm": lambda ctx, a, b, plan: a.norm(),
    "sum": lambda ctx, a, b, plan: a.sum(),
    "gather": lambda ctx, a, b, plan: a.gather(),
    "scatter": lambda ctx, a, b, plan: ctx.scatter(np.ones((4, 4)), block=2),
    "zeros": lambda ctx, a, b, plan: ctx.zeros((4, 4), block=2),
    "random": lambda ctx, a, b, plan: ctx.random((4, 4), block=2, seed=1),
    "redistribute": lambda ctx, a, b, plan: a.redistribute(block=1),
    "redistribute again": lambda ctx, a, b, plan: a.redistribute(block=4),
    "in place": lambda ctx, a, b, plan: a.__iadd__(b),
    "save": lambda ctx, a, b, plan: a.save("never.npy"),
    "load": lambda ctx, a, b, plan: ctx.load("never.npy", block=2),
    "closing a plan": lambda ctx, a, b, plan: plan.close(),
    "the communicator": lambda ctx, a, b, plan: ctx.comm.allgather(1),
    "its barrier": lambda ctx, a, b, plan: ctx.comm.barrier(),
    "splitting it": lambda ctx, a, b, plan: ctx.comm.split([range(ctx.size)]),
}
"""
FINALIZED = """
from mpi4py import MPI
with pb.Context(engine="host") as ctx:
    a, b = ctx.zeros((4, 4), block=2), ctx.zeros((4, 4), block=2)
    a @ b
    a.redistribute(block=4)
    plan = pb.plan(pb.matmul, a, b)
    plan(a, b)
    MPI.Finalize()
    for name, entry in ENTRIES.items():
        try:
            entry(ctx, a, b, plan)
        except pb.ClosedError as error:
            assert "MPI is finalized" in str(error), (name, error)
        else:
            assert name == "closing a plan", name
print("end")
"""
NOT_INITIALIZED = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
for name in ("Context", "Context of a communicator", "gridinit"):
    try:
        ENTRIES[name](None, None, None, None)
    except pb.UnsupportedError as error:
        assert "MPI is not initialized" in str(error), (name, error)
    else:
        raise AssertionError(name)
MPI.Init()
with pb.Context(engine="host") as ctx:
    assert ctx.zeros((4, 4), block=2).sum() == 0
print("end")
MPI.Finalize()
"""
CHILDREN = """
import os, subprocess, sys
from mpi4py import MPI

CODE = "import pblasmp as pb\\nwith pb.Context(engine='host') as ctx: print('size', ctx.size)"
if MPI.COMM_WORLD.rank == 0:
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_", "PRTE"))}
    for how in ({}, {"close_fds": False}, {"env": alone}):
        child = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=50, **how)
        if how.get("env"):
            assert (child.returncode, child.stdout) == (0, "size 1\\n"), child
        else:
            assert child.returncode == 1, child
            assert "this process is a child of rank 0" in child.stderr, child
    if (pid := os.fork()) == 0:
        status = 1
        try:
            import pblasmp as pb
            try:
                pb.Context()
            except pb.UnsupportedError as error:
                status = 0 if "is a child of rank 0" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
MPI.COMM_WORLD.barrier()
"""
WRAPPED = """
import pblasmp as pb
with pb.Context(engine="host") as ctx:
    print(f"size {ctx.size}\\n", end="", flush=True)
"""
NESTED = f"""
import subprocess, sys
from mpi4py import MPI
from pblasmp.launch import find_launcher
if MPI.COMM_WORLD.rank == 0:
    launcher = find_launcher()
    command = launcher.command(1, [sys.executable, "-c", {WRAPPED!r}])
    child = subprocess.run(command, env=launcher.environment(), capture_output=True, text=True, timeout=50)
    assert child.stdout == "size 1\\n", child
MPI.COMM_WORLD.barrier()
print("end")
"""


def job(arguments, nranks, folder):
    """What ranks print that run a command, once they have ended well."""
    with Job(
        arguments, nranks, folder / "output", environ={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as started:
        status = started.wait(100)
        printed = started.tail(200)
    assert status == 0, printed
    return printed


@pytest.mark.parametrize("nranks", [1, 2])
def test_after_finalize_every_call_says_so(nranks, tmp_path):
    printed = job([*launch.interpreter(), "-W", "error", "-c", ENTRIES + FINALIZED], nranks, tmp_path)
    assert printed.count("end") == nranks


@pytest.mark.parametrize("script", [NOT_INITIALIZED, FINALIZED], ids=["not initialized", "finalized"])
def test_without_a_launcher(script):
    command = [*launch.interpreter(), "-W", "error", "-c", ENTRIES + script]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert (child.returncode, child.stdout) == (0, "end\n"), child


def test_before_init_every_way_to_a_context_says_so(tmp_path):
    printed = job([*launch.interpreter(), "-W", "error", "-c", ENTRIES + NOT_INITIALIZED], 2, tmp_path)
    assert printed.count("end") == 2


@pytest.mark.parametrize("wrapper", [["sh", "-c", '"$@"; exit $?', "sh"], *only_long(["env"])])
def test_a_rank_behind_a_wrapper_is_a_rank(wrapper, tmp_path):
    assert job([*wrapper, sys.executable, "-c", WRAPPED], 2, tmp_path).count("size 2") == 2


def test_a_child_of_a_rank_is_told_so_and_a_rank_may_start_a_job(tmp_path):
    assert job([sys.executable, "-c", CHILDREN + NESTED], 2, tmp_path).count("end") == 2
