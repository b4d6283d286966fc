# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues and singular values under ScaLAPACK's names, beside NumPy's; their options and faults."""

import itertools

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from pblasmp.pblas.routine_functions import DTYPE
from tests.helpers.cases import pick, refuses
from tests.helpers.factor_cases import all_small, exact, only, positive, random, relative
from tests.helpers.mpi import run_mpi
from tests.helpers.pairs import pairs
from tests.helpers.pblas_cases import Held

ROUTINES = ("ev", "evd", "evr", "evx", "gvx")


class Call:
    """The arguments of calls on one grid, and what they leave in the matrices."""

    def __init__(self, ctx, rng):
        self.ctx, self.rng = ctx, rng
        self.shape = pick(rng, [(1, ctx.size), (ctx.size, 1)])
        self.context = pblas.gridinit(ctx, "Row", *self.shape)
        self.place = pblas.gridinfo(self.context)[2:]

    def held(self, part):
        """``part`` in a layout at random, and its local array."""
        rng, before = self.rng, self.rng.integers(0, 5, 2)
        whole = np.full(
            tuple(int(x) for x in before + part.shape + rng.integers(0, 4, 2)), np.nan, part.dtype
        )
        block = tuple(int(x) for x in rng.integers(1, 7, 2))
        source = tuple(int(rng.integers(x)) for x in self.shape)
        x = Held(
            self.shape, whole, block, source, tuple(int(i) + 1 for i in before), part.shape, pick(rng, (0, 2))
        )
        whole[x.window] = part
        return x, x.local(self.place)

    def arguments(self, held):
        x, array = held
        return array, *x.at, x.desc(self.context, self.place)

    def part(self, held):
        """sub(A), gathered from all processes, and whether what is around it is as before."""
        x, array = held
        whole = np.zeros_like(x.whole)
        for rows, cols, part in self.ctx.comm.allgather(
            (*x.indices(self.place), array[: len(x.indices(self.place)[0])])
        ):
            whole[rows[:, None], cols] = part
        around = np.ones(whole.shape, bool)
        around[x.window] = False
        return whole[x.window], bool(np.isnan(whole[around]).all())


def eigenvalues(call, letter, name, jobz, kind):
    """One call: W, M and NZ, eigenvectors in the first columns of sub(Z); A is kept."""
    rng, dtype, n = call.rng, DTYPE[letter], int(call.rng.integers(3, 12))
    real = np.empty(0, dtype).real.dtype
    uplo = pick(rng, "UL")
    x = random(rng, (n, n), dtype)
    whole = ((x + x.conj().T) / 2).astype(dtype)
    a, z = call.held(only(uplo, whole)), call.held(np.full((n, n), np.nan, dtype))
    weight, more = np.eye(n), []
    if name == "gvx":
        second = positive(rng, n, dtype)
        more, weight = call.arguments(call.held(only(uplo, second))), exact(second)
    half = np.linalg.inv(np.linalg.cholesky(weight))
    expected = np.linalg.eigvalsh(half @ exact(whole) @ half.conj().T)
    il, iu = sorted(int(i) + 1 for i in rng.integers(0, n, 2))
    vl, vu = float(expected[0] - 1), float(expected[n // 2 : n // 2 + 2].mean())
    if kind == "I":
        expected = expected[il - 1 : iu]
    elif kind == "V":
        expected = expected[: n // 2 + 1]
    w = np.full(n, np.nan, real)
    m, nz, info = (np.full(1, -7, np.int32) for _ in range(3))
    arguments = [jobz, uplo, n, *call.arguments(a)]
    result = [w, *call.arguments(z)]
    if name in ("evr", "evx", "gvx"):
        arguments.insert(1, kind)
        bounds = [*more, vl, vu, il, iu, *([] if name == "evr" else [0.0])]
        arguments += [*bounds, m, nz]
        result.insert(1, 1e-3)
        if name == "evr":
            del result[1]
    if name == "gvx":
        arguments.insert(0, 1)
    family = "he" if dtype.kind == "c" else "sy"
    function = getattr(pblas, f"p{letter}{family}{name}")
    returned = function(*arguments, *result, info=info)
    count = len(expected)
    found, around = call.part(z)
    v = exact(found[:, :count]) if jobz == "V" else None
    errors = {"values": relative((w[:count] - expected)[:, None], expected[None] + 1, 10 * n, dtype)}
    if v is not None:
        residual = exact(whole) @ v - weight @ v * w[:count]
        errors["vectors"] = relative(residual, np.abs(exact(whole)) + np.abs(weight), 10 * n, dtype)
    counted = (
        (int(m[0]), int(nz[0])) if name in ("evr", "evx", "gvx") else (count, count if v is not None else 0)
    )
    kept, around_a = call.part(a)
    case = f"{function.__name__} {jobz} {kind} {n} {uplo} {a[0]} {z[0]}"
    all_small(case, **errors)
    assert returned == info[0] == 0, case
    assert counted == (count, count if jobz == "V" else 0), case
    assert around, case
    assert around_a, case
    assert np.array_equal(kept, only(uplo, whole), equal_nan=True), case
    assert jobz == "V" or np.isnan(found).all(), case


def singular_values(call, letter, jobs):
    rng, dtype = call.rng, DTYPE[letter]
    m, n = (int(i) for i in rng.integers(1, 12, 2))
    least, whole = min(m, n), random(rng, (m, n), dtype)
    a, u, vt = (
        call.held(x) for x in (whole, np.full((m, least), np.nan, dtype), np.full((least, n), np.nan, dtype))
    )
    s = np.full(least, np.nan, np.empty(0, dtype).real.dtype)
    info = getattr(pblas, f"p{letter}gesvd")(
        *jobs, m, n, *call.arguments(a), s, *call.arguments(u), *call.arguments(vt)
    )
    expected = np.linalg.svd(exact(whole), compute_uv=False)
    errors = {"values": relative((s - expected)[:, None], exact(whole), m + n, dtype)}
    left, right = (exact(call.part(each)[0]) for each in (u, vt))
    if jobs == "VV":
        errors["product"] = relative(left * s @ right - whole, exact(whole), m + n, dtype)
    elif jobs[0] == "V":
        errors["u"] = relative(left.conj().T @ left - np.eye(least), np.eye(least), m + n, dtype)
    elif jobs[1] == "V":
        errors["vt"] = relative(right @ right.conj().T - np.eye(least), np.eye(least), m + n, dtype)
    unwanted = [x for x, job in zip((left, right), jobs, strict=True) if job == "N"]
    all_small(f"p{letter}gesvd {jobs} {m} {n} {a[0]}", **errors)
    assert info == 0, f"p{letter}gesvd {jobs} {m} {n} {a[0]}"
    assert all(np.isnan(x).all() for x in unwanted), f"p{letter}gesvd {jobs} {m} {n} {a[0]}"


def everything(comm):
    rng = np.random.default_rng(61)
    with pb.Context(comm, engine="host") as ctx:
        call = Call(ctx, rng)
        for letter, name, jobz, kind in pairs("sdcz", ROUTINES, "VN", "AIV"):
            ranged = kind if name in ("evr", "evx", "gvx") else "A"
            eigenvalues(call, letter, name, jobz, ranged)
        for letter, jobs in itertools.product("sdcz", ("VV", "NV", "VN", "NN")):
            singular_values(call, letter, jobs)
        faults(ctx, call)
        pblas.gridexit(call.context)


def faults(ctx, call):
    a, z = (call.arguments(call.held(np.eye(4))) for _ in range(2))
    w, short, single = np.zeros(4), np.zeros(3), np.zeros(4, np.float32)
    wrong = pblas.ParameterError
    for words, function, arguments in (
        (["argument 1 (jobz)", "expected one of N, V, got 'X'"], pblas.pdsyevd, ("X", "L", 4, *a, w, *z)),
        (["argument 8 (w)", "expected at least 4 numbers here, got 3"], pblas.pdsyev,
         ("V", "L", 4, *a, short, *z)),
        (["argument 8 (w)", "float64"], pblas.pdsyevd, ("V", "L", 4, *a, single, *z)),
        (["argument 12 (iu)", "expected 2 to 4, got 5"], pblas.pdsyevr,
         ("V", "I", "L", 4, *a, 0, 0, 2, 5, None, None, w, *z)),
        (["argument 10 (vu)", "expected more than vl"], pblas.pdsyevr,
         ("V", "V", "L", 4, *a, 2.0, 1.0, 1, 1, None, None, w, *z)),
        (["argument 9 (vl)", "expected a real number, got 'low'"], pblas.pdsyevr,
         ("V", "V", "L", 4, *a, "low", 1.0, 1, 1, None, None, w, *z)),
        (["argument 1 (ibtype)", "expected 1, got 2"], pblas.pdsygvx,
         (2, "V", "A", "L", 4, *a, *a, 0, 0, 1, 1, 0, None, None, w, 0, *z)),
        (["(z)", "its local array shares memory with that of A"], pblas.pdsyevd, ("V", "L", 4, *a, w, *a)),
        (["argument 13 (m)", "one element, or None"], pblas.pdsyevr,
         ("N", "A", "L", 4, *a, 0, 0, 1, 1, "m", None, w, *z)),
        *((["argument 26 (ifail)", "expected a writeable array of integers"], pblas.pdsyevx,
           ("N", "A", "L", 4, *a, 0, 0, 1, 1, 0, None, None, w, 0, *z, None, None, None, None, each))
          for each in ("x", np.zeros(4), np.broadcast_to(0, 4))),
    ):  # fmt: skip
        refuses(ctx, wrong, words, function, *arguments)
    spaces = [np.zeros(1), -1, np.zeros(1, np.int32), -1]
    asked = pblas.pdsyevd("V", "L", 4, *a, w, *z, *spaces)
    assert asked == 0
    assert spaces[0][0] == spaces[2][0] == 1
    assert not w.any()
    none = pblas.pdsyevd("N", "L", 4, *a, w, None, 1, 1, z[3])
    assert none == 0
    assert np.allclose(w, 1)
    ifail, one = np.zeros(4, np.int32), np.zeros(1, np.int32)
    b = call.arguments(call.held(np.diag([1.0, 2, -1, 1])))
    info = pblas.pdsygvx(
        1, "N", "A", "L", 4, *a, *b, 0, 0, 1, 1, 0, None, None, w, 0, *z, *[None] * 4, ifail, None, None, one
    )
    right = info == one[0] == 16 and ifail.tolist() == [3, 0, 0, 0]
    assert right, f"B is not positive definite: {info} {ifail}"
    spoiled = call.arguments(call.held(np.full((4, 4), np.nan)))
    info = pblas.pdsyevr("V", "V", "L", 4, *spoiled, 0.0, 3.0, 1, 1, one, None, w, *z)
    assert info == 0
    assert one[0] == 4
    assert np.isnan(w).all()
    counted = np.full(2, -7, np.int32)
    empty = pblas.pdsyevr("V", "I", "L", 0, *a, 0, 0, 1, 0, counted[:1], counted[1:], w, *z)
    assert empty == 0
    assert not counted.any()


@pytest.mark.parametrize("nranks", [1, 2])
def test_eigenvalues_under_scalapacks_names(nranks):
    run_mpi(everything, nranks)
