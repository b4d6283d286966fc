# SPDX-License-Identifier: Apache-2.0
"""What programs do to matrices and in the midst of calls, beside calls: it costs an error, never the process."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.mpi import run_mpi


def copies(_):
    with pb.Context(engine="host") as ctx:
        rng = np.random.default_rng(0)
        values = [rng.integers(-4, 5, (8, 8)).astype(float) for _ in range(2)]
        a, b = (ctx.scatter(each, block=(2, 2), order="F") for each in values)
        for function in (copy.copy, copy.deepcopy):
            pb.matmul(a, b)
            found, turned = function((a, a.T))[0], function(a.T)
            deep = function is copy.deepcopy
            if deep:  # other memory
                found.local[...] *= 2
                turned.local[...] *= 3
            assert np.array_equal(pb.matmul(found, b).allgather(), (1 + deep) * values[0] @ values[1])
            assert np.array_equal(pb.matmul(turned, b).allgather(), (1 + 2 * deep) * values[0].T @ values[1])
            assert np.array_equal(pb.matmul(a, b).allgather(), values[0] @ values[1])
        both = copy.deepcopy([a, a.T])
        both[0].local[...] = 1
        assert np.array_equal(both[1].allgather(), np.ones((8, 8)))


@pytest.mark.parametrize("size", [1, 2])
def test_copies_by_the_module_copy_compute_with_their_own_values(size):
    run_mpi(copies, size)


def resized(_):
    with pb.Context(engine="host") as ctx:
        like = ctx.scatter(np.eye(6), block=(2, 2))
        mine = np.ones(like.local.shape)
        a = ctx.from_local(mine, like.descriptor)
        for matrix in (a, copy.deepcopy(like)):
            for _ in range(2):
                with pytest.raises(ValueError, match="cannot resize"):
                    matrix.local.resize((0, 0), refcheck=False)
                assert matrix.local.shape == like.local.shape
                pb.matmul(matrix, matrix)
        del a, matrix
        mine.resize((2, 2), refcheck=False)


@pytest.mark.parametrize("size", [1, 2])
def test_numpy_does_not_resize_local_arrays(size):
    run_mpi(resized, size)


def midst(comm):
    """One rank makes a call at the first line of the function that runs the other."""
    ctx = pb.Context(engine="host")
    a = ctx.scatter(np.eye(4), block=(2, 2))
    pb.matmul(a, a)

    def call(*_):
        sys.settrace(None)
        pb.matmul(a, a)

    if comm.rank == 1:
        sys.settrace(lambda frame, *_: call if frame.f_code.co_name == "_status" else None)
    try:
        with pytest.raises(pb.ClosedError) as raised:
            pb.matmul(a, a)
    finally:
        sys.settrace(None)
    ctx.close()
    return str(raised.value)


def test_with_several_ranks_a_call_in_the_midst_of_another_is_an_error():
    first, second = run_mpi(midst, 2)
    assert second.startswith("matmul was called in the midst of matmul, as a signal's handler")
    assert "rank 1 left matmul with ClosedError: matmul was called in the midst of matmul" in first
