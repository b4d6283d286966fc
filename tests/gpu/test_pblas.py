# SPDX-License-Identifier: Apache-2.0
"""The PBLAS names on cuBLASMp, with NumPy's and CuPy's local arrays, against the host engine."""

from __future__ import annotations

import itertools

import cupy
import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from pblasmp.pblas.routine_functions import DTYPE
from tests.helpers.calls import DTYPES, FUNCTIONS, check_call, legal_options
from tests.helpers.cases import check_near, pick
from tests.helpers.pblas_cases import held
from tests.helpers.slow import thinned

CASES = thinned(3)  # of every routine in every type


def on(device: bool, array: np.ndarray):
    return cupy.asarray(array, order="F") if device else array.copy(order="F")


def both(ctx: pb.Context, host: pb.Context):
    """Every grid of the ranks on both engines: its shape and two numbers."""
    shapes = [(p, ctx.size // p) for p in range(1, ctx.size + 1) if ctx.size % p == 0]
    return [
        (shape, pblas.gridinit(ctx, "Row", *shape), pblas.gridinit(host, "Row", *shape)) for shape in shapes
    ]


def test_routines(ctx, host):
    """On NumPy's and on CuPy's arrays."""
    rng = np.random.default_rng(21)
    every = [(pb.Grid(*shape), gpu) for shape, gpu, _ in both(ctx, host)]
    for routine, dtype in itertools.product(FUNCTIONS, DTYPES * CASES):
        options, grid = pick(rng, legal_options(routine, dtype)), pick(rng, every)
        check_call(ctx, rng, routine, options, dtype, "pblas", None, grid)
    for _, number in every:
        pblas.gridexit(number)


def test_moves_between_engines(ctx, host):
    rng = np.random.default_rng(22)
    shape, gpu, cpu = both(ctx, host)[-1]
    for case in range(8):
        dtype = DTYPE["sdcz"[case % 4]]
        a, b = (held(rng, shape, (9, 7), dtype) for _ in "ab")
        place = pblas.gridinfo(gpu)[2:]
        source, target = on(case % 3 == 0, a.local(place)), on(case % 2 == 0, b.local(place))
        to, everybody = (gpu, gpu) if case % 2 == 0 else (cpu, cpu)
        origin = gpu if case % 3 == 0 else cpu
        move = getattr(pblas, f"p{'sdcz'[case % 4]}gemr2d")
        move(9, 7, source, *a.at, a.desc(origin, place), target, *b.at, b.desc(to, place), everybody)
        b.whole[b.window] = a.whole[a.window]
        check_near(cupy.asnumpy(target), b.local(place), f"case {case}")
    pblas.gridexit(gpu)
    pblas.gridexit(cpu)


def test_arrays_of_the_wrong_kind(host, ctx):
    number = pblas.gridinit(host, "Row", 1, ctx.size)
    x = cupy.zeros((2, 2), order="F")
    desc = pblas.descinit(2, 2 * ctx.size, 2, 2, 0, 0, number, 2)
    with pytest.raises(pblas.ParameterError, match="NumPy") as error:
        pblas.pdgeadd("N", 2, 2, 1.0, x, 1, 1, desc, 0.0, x, 1, 1, desc)
    assert error.value.info == -5
    pblas.gridexit(number)
