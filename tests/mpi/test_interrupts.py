# SPDX-License-Identifier: Apache-2.0
"""A signal's handler may raise an exception at any step of Python: no file stays open."""

from pathlib import Path

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm.choice import Serial
from pblasmp.comm.shared_memory import SharedMemory
from tests.helpers.interrupts import left_open
from tests.helpers.mpi import run_mpi
from tests.helpers.slow import draws


def shared_memory(_, path):
    def call():
        memory = SharedMemory(Serial())
        memory.array(10_000)
        memory.close()

    return list(left_open(call, "pblasmp/comm/", draws(7, long=1))), names(path)


def save(_, path):
    with pb.Context(engine="host") as ctx:
        a = ctx.scatter(np.eye(8), block=(2, 2))
        return list(
            left_open(lambda: a.save(f"{path}/a.npy"), "pblasmp/matrix/io/", draws(17, long=1))
        ), names(path)


def load(_, path):
    with pb.Context(engine="host") as ctx:
        a = ctx.scatter(np.eye(8), block=(2, 2))
        a.save(f"{path}/a.npy")
        found = left_open(
            lambda: ctx.load(f"{path}/a.npy", a.descriptor), "pblasmp/matrix/io/", draws(17, long=1)
        )
        return list(found), names(path)


def names(path):
    return [each.name for each in Path(path).iterdir()]


@pytest.mark.parametrize(("what", "files"), [(shared_memory, []), (save, ["a.npy"]), (load, ["a.npy"])])
def test_an_exception_at_any_step_leaves_no_file_open(what, files, tmp_path):
    assert run_mpi(what, 1, path=str(tmp_path)) == [[[], files]]
