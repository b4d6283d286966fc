# SPDX-License-Identifier: Apache-2.0
"""Whole products on a cuBLASMp that multiplies what it is told to: what it is told is right.

The library sees pointers, leading dimensions, descriptors and attributes alone. Numbers are small integers: exact.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

import pblasmp as pb
from pblasmp.problems import files
from tests.helpers.gpu.multiply import multiply
from tests.helpers.machine import Multiplying, machine
from tests.helpers.mpi import run_mpi, starts_ranks
from tests.helpers.slow import in_turn

SCALARS = [
    (1, 0, None),
    (2, 0, "same"),
    (-1, 1, "same"),
    (1, -2, "other"),
    (-2, 2, "other"),
]  # alpha, beta, C's order


TYPES = ("float64", "float32", "complex128", "complex64", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", TYPES)
def test_every_op_and_order(alone, stand_in, dtype):
    """All operands have different blocks, sizes and padding, and C is absent, given, or in the other order.

    Types take turns: each choice of ops and orders comes with two of them.
    """
    faults = []
    scalars = itertools.cycle(SCALARS)
    with machine(stand_in(1000), Multiplying) as lib, pb.Context(engine="cublasmp") as ctx:
        for op_a, op_b, *orders in in_turn("NTC", "NTC", "CF", "CF", "CF", keep=3, first=TYPES.index(dtype)):
            p = pb.MatmulProblem.gemm(
                7, 5, 6, pb.Grid(1, 1), (2, 3, 4), op_a=op_a, op_b=op_b, order="".join(orders), dtype=dtype
            )
            p = replace(p, a=replace(p.a, ld=11), b=replace(p.b, ld=10), d=replace(p.d, ld=9))
            alpha, beta, c = next(scalars)
            if c is not None:
                order = p.d.order if c == "same" else {"C": "F", "F": "C"}[p.d.order]
                p = replace(p, c=replace(p.d, order=order, ld=8))
            fault = multiply(ctx, lib, p, alpha, beta)
            if fault:
                faults.append(f"{op_a}{op_b} {orders} {alpha} {beta}: {fault}")
    assert not faults, "\n".join(faults)
    lib.assert_clean()
    lib.gpu.assert_clean()


def problems_on_ranks(comm: Any, path: str) -> Any:
    with machine(path, Multiplying, comm=comm) as lib:
        with pb.Context(comm, engine="cublasmp") as ctx:
            for where, algo in in_turn(list(files.find("problems")), ("auto", "default"), keep=3):
                file = files.load_problem_file(where)
                if file.nranks <= comm.size and not file.problem.faults():
                    within = {x: (parent, file.windows[x]) for x, parent in file.parents.items()}
                    fault = multiply(ctx, lib, file.problem, file.alpha, file.beta, within, algo)
                    yield f"{file.path.name} {algo}", fault or None
        lib.assert_clean()
        lib.gpu.assert_clean()


@starts_ranks
def test_problems_on_ranks(stand_in):
    """Grids in both orders and of fewer ranks, sources, ragged and empty parts, sub-matrices, the schemes."""
    run_mpi(problems_on_ranks, 4, path=stand_in(1000))
