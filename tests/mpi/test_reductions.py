# SPDX-License-Identifier: Apache-2.0
"""Norms, sums, traces and diagonals against NumPy, in every layout; the same bits on every rank and in every run."""

import math
from functools import partial

import ml_dtypes
import numpy as np

import pblasmp as pb
from pblasmp.dtypes import FLOAT8
from pblasmp.matrix import reductions
from tests.helpers.cases import (
    TYPES,
    check_array,
    check_near,
    exact,
    layout,
    numbers,
    pick,
    refuses,
    scattered,
)
from tests.helpers.mpi import on_ranks
from tests.helpers.pairs import pairs
from tests.helpers.slow import draws, only_long

NORMS = {
    "fro": lambda x: np.sqrt((abs(x) ** 2).sum()),
    1: lambda x: abs(x).sum(axis=0).max(initial=0),
    "inf": lambda x: abs(x).sum(axis=1).max(initial=0),
    np.inf: lambda x: abs(x).sum(axis=1).max(initial=0),
    "max": lambda x: abs(x).max(initial=0),
}


def check_std(a, x, axis, case):
    """Fail unless a standard deviation has an element type's accuracy."""
    found, expected = np.asarray(a.std(axis)), np.asarray(x.std(axis)).astype(a.local.real.dtype)
    assert found.dtype == expected.dtype, case
    eps = float(ml_dtypes.finfo(found.dtype).eps)
    check_near(found.astype(float), expected.astype(float), case, rtol=4 * eps)


@on_ranks(1, *only_long(2), 4, *only_long(6))
def test_reductions_are_numpy_s(comm, ctx):
    rng = np.random.default_rng(41 + comm.size)
    for count in range(draws(8, long=24)):
        shape = pick(rng, ((17, 13), (1, 9), (30, 2), (0, 5), (5, 0), (0, 0), (12, 12)))
        d = layout(rng, shape, comm.size, dtype=pick(rng, (*TYPES, *FLOAT8)))
        whole = numbers(rng, shape, d.dtype if d.dtype.kind == "c" else "float64").astype(d.dtype)
        a, x = scattered(ctx, d, whole), exact(whole)
        if count % 3 == 0 and min(shape) > 4:
            a, x = a[1:5, 2 : shape[1]].T, x[1:5, 2:].T
            whole = whole[1:5, 2:].T
        reductions.SLAB, saved = 7, reductions.SLAB
        case = f"{count}: {a.descriptor}"
        for which, function in NORMS.items():
            check_near(a.norm(which), function(x), f"{case}: norm {which}", rtol=1e-13)
        sums = [(a.sum(axis), x.sum(axis).astype(d.dtype)) for axis in (None, 0, 1, -1, -2)]
        for found, expected in (
            *sums,
            (a.sum(dtype="complex128"), np.complex128(x.sum())),
            (a.sum(0, dtype="complex64"), x.sum(0).astype(np.complex64)),
            (a.trace(), x.trace().astype(d.dtype)),
            (a.diagonal(), whole.diagonal()),
        ):
            check_array(np.asarray(found), np.asarray(expected), case)
        for axis in (None, 0, 1, -1) if x.size else ():
            check_std(a, x, axis, f"{case}: std {axis}")
        assert type(a.norm()) is float, case
        assert np.ndim(a.sum()) == 0, case
        reductions.SLAB = saved


@on_ranks(1, 4)
def test_extremes(ctx):
    """Neither overflow nor underflow where the norm is a number; NaN and infinity come through."""
    kinds = {"float64": (1e300, 1e-300, 5e-324), "complex128": (1e300 + 1e300j, 1e-300j, 5e-324)}
    kinds |= {"float32": (3e38, 1e-38, 1e-45), "complex64": (3e38j, 1e-38, 1e-45), "float16": (6e4, 6e-8)}
    for dtype, values in kinds.items():
        for value in values:
            a = ctx.full((30, 40), value, block=3, dtype=dtype)
            stored = abs(exact(a.local[:1, :1]).sum()) if a.local.size else None
            stored = next(each for each in ctx.comm.allgather(stored) if each is not None)
            for which, factor in (("fro", math.sqrt(1200)), (1, 30), ("inf", 40), ("max", 1)):
                check_near(a.norm(which), stored * factor, f"{dtype} {value} {which}", rtol=1e-12)
    for mixed in ((1e300, 1e-300), (1e-300, 1e300), (5e-324, 1), (0, 1e-200)):
        x = np.zeros((5, 7))
        x[1, 2], x[4, 6] = mixed
        a = ctx.scatter(x, block=2)
        check_near(a.norm(), math.hypot(*mixed), f"{mixed}", rtol=1e-13)
    one = ctx.full((1, 1), 1.1e154 + 1.1e154j, block=2, dtype="complex128")
    check_near(one.norm(), abs(1.1e154 + 1.1e154j), "squares that overflow together", rtol=1e-13)
    huge = ctx.full((9, 9), 1.7e308, block=2)
    for which in ("fro", 1, "inf"):
        assert huge.norm(which) == math.inf, f"too large, {which}"
    every = (*TYPES, "float8_e4m3fn"), ((0, 0), (8, 6), (4, 3)), (math.nan, math.inf)
    for dtype, (i, j), bad in pairs(*every):
        if dtype == "float8_e4m3fn" and bad == math.inf:
            continue  # it has none
        a = ctx.full((9, 7), 1, block=2, dtype=dtype)
        a[i : i + 1, j : j + 1] = bad
        for which in NORMS:
            found = a.norm(which)
            good = math.isnan(found) if math.isnan(bad) else found == bad
            assert good, f"{dtype}, {bad} at {i}, {j}: {which}: {found}"
        found = a.sum()
        good = np.isnan(found) if math.isnan(bad) else np.isinf(found)
        assert good, f"{dtype}, {bad} at {i}, {j}: sum: {found}"
    both = ctx.full((9, 7), math.inf, block=2)
    both[8:9, 6:7] = math.nan
    assert all(math.isnan(both.norm(which)) for which in NORMS), "infinity and NaN: a number"


@on_ranks(1, 3, *only_long(6))
def test_the_same_bits_everywhere(comm, ctx):
    """Numbers whose sum depends on the order: every rank, and every run, has the same."""
    rng = np.random.default_rng(43)
    for dtype in ("float64", "complex64"):
        d = layout(rng, (61, 53), comm.size, block=(3, 5), dtype=dtype)
        a = ctx.random(d, seed=7, distribution="normal")
        a *= ctx.random(d, seed=8) * 1e9

        def bits(a=a):
            found = [a.norm(which) for which in NORMS] + [a.sum(axis) for axis in (None, 0, 1)] + [a.trace()]
            return b"".join(np.asarray(x).tobytes() for x in found)

        mine = bits()
        assert all(bits() == mine for _ in range(5)), f"{dtype}: runs differ"
        assert len(set(ctx.comm.allgather(mine))) == 1, dtype


class NoIndex:
    """What cannot say which number it is."""

    def __index__(self):
        raise RuntimeError("unknown until the program runs")


@on_ranks(1, 4)
def test_errors(comm, ctx):
    a = ctx.zeros((6, 8), block=2)
    for which in (2, -1, -np.inf, "nuc", None, [1], "one", np.nan, True):
        words = ["ord", "'fro', 1, 'inf' or 'max'"]
        refuses(ctx, pb.ArgumentError, words, a.norm, which)
    for axis in (2, -3, "0", (0, 1), True, np.zeros(2), np.ndarray, NoIndex()):
        given = axis if comm.rank == comm.size - 1 else 0
        words = ["axis", "None, 0 or 1"]
        refuses(ctx, pb.ArgumentError, words, a.sum, given)
    for name, wrong in (("diag", a), ("diag", np.ones((2, 2))), ("kind", a), ("uplo", np.ones(2))):
        how = {"uplo": "L", name: wrong} if comm.rank == comm.size - 1 else {}
        call = partial(a.norm, **how)
        refuses(ctx, pb.ArgumentError, [f"{name}: "], call)
    c = ctx.zeros((6, 8), dtype="complex64")
    words = ["complex64 does not convert to float32"]
    refuses(ctx, pb.ArgumentError, words, c.sum, dtype="float32")
    refuses(ctx, pb.ArgumentError, ["int32"], a.sum, dtype="int32")
    if comm.size > 1:
        which = 1 if comm.rank else "fro"
        refuses(ctx, pb.RankMismatchError, ["ord"], a.norm, which)
        axis = 1 if comm.rank else 0
        refuses(ctx, pb.RankMismatchError, ["axis"], a.sum, axis)
        refuses(ctx, pb.RankMismatchError, ["axis"], a.std, axis)
