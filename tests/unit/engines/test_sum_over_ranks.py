# SPDX-License-Identifier: Apache-2.0
"""Products whose sum over k is a sum over ranks, which are threads: some of them have nothing to do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.linalg.cython_blas  # noqa: F401 - threads cannot import it at the same time

import pblasmp as pb
from tests.helpers.cases import misplaced, numbers, product, scattered
from tests.helpers.threads import on_ranks


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_allreduce_of_any_op(dtype):
    def work(comm):
        rng = np.random.default_rng(3)
        with pb.Context(comm, engine="host") as ctx:
            for order, op, algo in itertools.product(
                "CF", "TC", ("sum", "auto")
            ):  # the ops that the scheme has
                op_a, op_b = ("N", op) if order == "C" else (op, "N")
                p = pb.MatmulProblem.matmul_allreduce(4, 5, 6, 3, op_a, op_b, order=order, dtype=dtype)
                x, w = (numbers(rng, e.shape, dtype) for e in (p.a, p.b))
                a, b = scattered(ctx, p.a, x), scattered(ctx, p.b, w)
                d = pb.matmul(a, b, op_a=op_a, op_b=op_b, scheme="matmul_allreduce", algo=algo)
                if comm.rank < 3 and not np.array_equal(d.local, product(x, w, op_a=op_a, op_b=op_b)):
                    return op_a + op_b + algo
        return None

    assert on_ranks(4, work) == [None] * 4


@pytest.mark.parametrize("name", ["syrk", "herk"])
def test_updates_by_sums_with_idle_ranks(name):
    def work(comm):
        rng = np.random.default_rng(4)
        a_layout = pb.MatrixDescriptor((5, 9), (2, 2), pb.Grid(1, 3), dtype="complex128")
        d_layout = pb.MatrixDescriptor((5, 5), (2, 2), pb.Grid(1, 3), dtype="complex128")
        x, y = numbers(rng, (5, 9), "complex128"), numbers(rng, (5, 5), "complex128")
        if name == "herk":
            y = y + y.conj().T
        with pb.Context(comm, engine="host") as ctx:
            a, c = scattered(ctx, a_layout, x), scattered(ctx, d_layout, y)
            d = getattr(pb.blas, name)(a, c, beta=2, uplo="L", algo="summed")
            whole = x @ (x.conj().T if name == "herk" else x.T) + 2 * y
            return misplaced(d, np.where(np.tri(5, dtype=bool), whole, y))

    assert on_ranks(4, work) == [None] * 4
