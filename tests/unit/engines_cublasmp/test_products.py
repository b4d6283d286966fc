# SPDX-License-Identifier: Apache-2.0
"""Whole products on a cuBLASMp that multiplies what it is told to: what it is told is right.

The library sees pointers, leading dimensions, descriptors and attributes alone. Numbers are small integers: exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.layout import files
from tests.gpu.products import OPS, everywhere, integers, part_of, poisoned, wrong
from tests.helpers.mpi import run_mpi, starts_ranks

from .machine import Multiplying, machine
from .told import misfits

SCALARS = [
    (1, 0, None),
    (2, 0, "same"),
    (-1, 1, "same"),
    (1, -2, "other"),
    (-2, 2, "other"),
]  # alpha, beta, C's order

Window = tuple[slice, slice]


def multiply(
    ctx: pb.Context,
    lib: Multiplying,
    p: pb.MatmulProblem,
    alpha: complex = 1,
    beta: complex = 0,
    within: Mapping[str, tuple[pb.MatrixDescriptor, Window]] = MappingProxyType({}),
) -> str:
    """Return what is wrong with a product, and with what the library was told.

    Operands are sub-matrices of those ``within`` names: the whole matrix, and where they lie in it.
    """
    values = {x: integers(d.shape, d.dtype, seed, 1 if d.dtype.itemsize == 2 else 3)
              for seed, x in enumerate("abc") if (d := getattr(p, x)) is not None}  # fmt: skip
    wholes = {
        x: poisoned(ctx, within[x][0] if x in within else d)
        for x in "abcd"
        if (d := getattr(p, x)) is not None
    }
    matrices = {x: whole[within[x][1]] if x in within else whole for x, whole in wholes.items()}
    for x, of_x in values.items():
        if (part := part_of(ctx, of_x, matrices[x].descriptor)) is not None:
            ctx.engine.from_host(matrices[x].local, part.astype(p.a.dtype))
    out = matrices["d"]
    calls = len(lib.of("Matmul"))
    multiplies = ctx.rank < p.d.grid.size and alpha != 0 and 0 not in (p.m, p.n, p.k)
    with pb.plan_matmul(
        *(matrices.get(x) for x in "abc"),
        out=out,
        alpha=alpha,
        beta=beta,
        op_a=p.op_a,
        op_b=p.op_b,
        scheme=p.scheme,
    ) as plan:
        plan()
        fault = "; ".join(misfits(lib, p, matrices, alpha, beta)) if multiplies else ""
    if len(lib.of("Matmul")) - calls != multiplies:
        return "another number of calls"
    expected = alpha * (OPS[p.op_a](values["a"]) @ OPS[p.op_b](values["b"]))
    if p.scheme == "ar":
        expected = np.tile(expected, (1, p.d.grid.size) if p.d.order == "F" else (p.d.grid.size, 1))
    if beta:
        expected = expected + beta * values["c"]
    fault = fault or wrong(ctx, out, expected, 2.0**-6 if p.d.dtype.itemsize == 2 else 0)
    out.local[...] = np.nan
    return fault or ("" if np.isnan(wholes["d"].local).all() else "wrote beside the sub-matrix")


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "complex64", "float16", "bfloat16"])
def test_every_op_and_order(alone, stand_in, dtype):
    """All operands have blocks, sizes and padding of their own, and C is absent, given, or in the other order."""
    faults = []
    scalars = itertools.cycle(SCALARS)
    with machine(stand_in(1000), Multiplying) as lib, pb.Context(engine="cublasmp") as ctx:
        for op_a, op_b, *orders in itertools.product("NTC", "NTC", "CF", "CF", "CF"):
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
            for file in map(files.load_problem_file, files.find("problems")):
                if file.nranks <= comm.size and not file.problem.faults():
                    within = {x: (parent, file.windows[x]) for x, parent in file.parents.items()}
                    fault = multiply(ctx, lib, file.problem, file.alpha, file.beta, within)
                    yield file.path.name, everywhere(ctx, fault) or None
        lib.assert_clean()
        lib.gpu.assert_clean()


@starts_ranks
def test_problems_on_ranks(stand_in):
    """Grids in both orders and of fewer ranks, sources, ragged and empty parts, sub-matrices, the schemes."""
    run_mpi(problems_on_ranks, 4, path=stand_in(1000))
