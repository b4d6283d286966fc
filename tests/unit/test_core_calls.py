# SPDX-License-Identifier: Apache-2.0
"""Direct calls of the compiled core against NumPy, on random sub-matrices in random layouts; also under sanitizers."""

import ctypes
import inspect
import pickle
import struct
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest
import scipy.linalg

import pblasmp as pb
from pblasmp import _core, pblas
from pblasmp._core import build, objects
from pblasmp.engines.direct import host_address
from pblasmp.engines.direct.asked import Axes, span_of
from pblasmp.engines.gpu.kernels.compiler import ALIGNED
from pblasmp.engines.host.direct.calls import LIMITS, Limits
from pblasmp.layout.routines import GEMM, ROUTINES, WORDS
from pblasmp.pblas import direct
from pblasmp.runtime.direct_forms import HandleForm
from tests.helpers.core_ranks import CoreRanks, Spread
from tests.helpers.limits import changed_limits
from tests.helpers.sources import ROOT

pytestmark = pytest.mark.skipif(_core.load() is None, reason="there is no core")
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
TYPES = "fdFD"


@needs_compiler
def test_python_lays_out_calls_as_c_does(tmp_path):
    """And numbers routines, functions and statuses as it does."""
    state, request = _core.CallState, _core.REQUEST.size
    names = {"request": "routine", "factor": "factor_at"}
    checks = [
        *(f"offsetof(call, {names.get(n, n)}) == {getattr(state, n).offset}" for n, *_ in state._fields_),
        *(f"offsetof(limits, {n}) == {getattr(Limits, n).offset}" for n, _ in Limits._fields_),
        f"offsetof(call, yields) == {request}",
        f"sizeof(matrix) == {_core.MATRIX.size}",
        f"sizeof(limits) == {ctypes.sizeof(Limits)}",
        f"PIVOTS == {_core.PIVOTS}",
        f"COME == {_core.COME}",
        f"SCRATCH + WORK == {_core.SCRATCH}",
        *(
            f"offsetof(arguments, {n}) == {getattr(objects.Arguments, n).offset}"
            for n, _ in objects.Arguments._fields_
        ),
        *(
            f"offsetof(look, {n}) == 8 * {getattr(objects, n.upper())}"
            for n in ("number", "offsets", "bases", "pattern")
        ),
        f"sizeof(look) == 8 * {objects.LOOK} && offsetof(look, number) == {objects.ASKS.size}",
        f"ALIGNED == {ALIGNED}",
        f"sizeof(form) == {objects.FORM.size}",
        f"offsetof(form, options) == {struct.calcsize('=16s2q8s20s4x')}",
        f"sizeof(python) == {objects.PYTHON.size}",
        f"offsetof(array_fields, flags) + sizeof(int) == {objects.ARRAY.size}",
        f"offsetof(dtype_fields, byteorder) + 1 == {objects.DTYPE.size}",
        f"SIZES == {objects.SIZES} && MATRICES == {objects.MATRICES}",
        f"sizeof(place) * SLOTS == {objects.PLACES_SIZE}",
        f"PLACES == {objects.PLACES}",
        f"BY_NONE == {objects.BY_NONE} && BY_LENGTH == {objects.BY_LENGTH}",
        *(f"{name.upper().replace(' ', '_')} == {i}" for i, name in enumerate(_core.ROUTINES)),
        *(f"B_{name.upper()} == {i}" for i, name in enumerate(_core.BLAS)),
        *(f"{name} == {i}" for i, name in enumerate(_core.STATUSES)),
        f"ROUTINES == {len(_core.ROUTINES)}",
        f"BLAS_FUNCTIONS == {len(_core.BLAS)}",
    ]
    check = tmp_path / "check.c"
    check.write_text(
        f'#include "{ROOT}/pblasmp/_core/arguments.h"\n'
        + "".join(f'_Static_assert({each}, "{each}");\n' for each in checks)
    )
    assert not build.run([*build.compiler(), "-std=c11", "-fsyntax-only", str(check)])


SPAN = ("extent", "block", "source", "nprocs", "lead")


class CSpan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in SPAN]


class CPlaces(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int64), ("count", ctypes.c_int64)]


def functions(**results):
    """Functions of the core that Python calls in tests alone."""
    library = ctypes.CDLL(str(_core.LIBRARY))
    for name, result in results.items():
        getattr(library, name).restype = result
    return library


def test_spans_are_those_of_python():
    rng = np.random.default_rng(0)
    core = functions(
        span_of=CSpan, places_of=CPlaces, span_below=ctypes.c_int64, span_at_place=ctypes.c_int64,
        span_before=ctypes.c_int64, span_process=ctypes.c_int64,
    )  # fmt: skip
    for _ in range(500):
        block, nprocs, extent, start = (
            int(rng.integers(low, high)) for low, high in ((1, 9), (1, 5), (1, 40), (0, 20))
        )
        axes = Axes(
            block, nprocs, int(rng.integers(nprocs)), int(rng.integers(block)), int(rng.integers(-1, nprocs))
        )
        packed = (ctypes.c_int64 * 5)(*axes)
        span = span_of(axes, start, extent)
        of = core.span_of(packed, ctypes.c_int64(start), ctypes.c_int64(extent))
        assert all(getattr(of, name) == getattr(span, name) for name in SPAN)
        whole, at = (
            span_of(axes, 0, start + extent),
            core.places_of(packed, *map(ctypes.c_int64, (start, extent))),
        )
        counts = (whole.below(start, axes.mine), span.count(axes.mine)) if axes.mine >= 0 else (0, 0)
        assert (at.first, at.count) == counts
        before = 0
        for turn in range(nprocs):
            p = (span.source + turn) % nprocs
            assert core.span_before(ctypes.byref(of), ctypes.c_int64(p)) == before
            before += span.count(p)
            for stop in range(extent + 1):
                assert core.span_below(ctypes.byref(of), *map(ctypes.c_int64, (stop, p))) == span.below(
                    stop, p
                )
            for place in range(span.count(p)):
                index = core.span_at_place(ctypes.byref(of), *map(ctypes.c_int64, (p, place)))
                assert index == span.to_global(p, place)
                assert core.span_process(ctypes.byref(of), ctypes.c_int64(index)) == (p if nprocs > 1 else 0)


class Tile(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("down", ctypes.c_int64), ("across", ctypes.c_int64)]

    @classmethod
    def of(cls, array):
        return cls(host_address(array), *array.strides)


def test_tiles_are_copied_summed_and_filled():
    rng, core = np.random.default_rng(1), functions()
    for _ in range(300):
        char, m, n = rng.choice([*TYPES]), int(rng.integers(0, 40)), int(rng.integers(0, 40))
        d, x, c = (
            np.array(
                rng.integers(-9, 10, (m + 2, n + 3)) * (1 + 2j if char in "FD" else 1), char, order=order
            )[1:-1, :n]
            for order in rng.choice([*"CF"], 3)
        )
        if min(m, n) == 0:
            continue
        letter, sizes = TYPES.index(char), (ctypes.c_int64(m), ctypes.c_int64(n))
        alpha, beta = (
            complex(*rng.integers(-2, 3, 2)) if char in "FD" else int(rng.integers(-2, 3)) for _ in "ab"
        )
        alpha = alpha or 1
        conjugated = bool(char in "FD" and rng.integers(2))
        expected = alpha * (x.conj() if conjugated else x) + beta * c
        if beta == 0:
            c[...] = np.nan
        factors = [(ctypes.c_double * 2)(z.real, z.imag) for z in (alpha, beta)]
        core.tile_sum(
            Tile.of(d), factors[0], Tile.of(x), factors[1], Tile.of(c), *sizes, letter, int(conjugated)
        )
        assert np.array_equal(d, expected.astype(char))
        core.tile_copy(Tile.of(d), Tile.of(x), *sizes, ctypes.c_int64(x.itemsize))
        assert np.array_equal(d, x)
        if char in "FD":
            core.tile_conjugate(Tile.of(d), Tile.of(x), *sizes, letter)
            assert np.array_equal(d, x.conj())
        core.tile_fill(Tile.of(d), *sizes, ctypes.c_int64(x.itemsize))
        assert not d.any()


class Cases:
    """Random matrices, dealt out at random on grids of some ranks."""

    def __init__(self, size, seed, nodes=None):
        self.rng, self.size, self.ranks = np.random.default_rng(seed), size, CoreRanks(size, nodes)
        self.char, self.grids = (
            "d",
            [(p, q) for p in range(1, size + 1) for q in range(1, size + 1) if p * q <= size],
        )

    def values(self, m, n):
        values = self.rng.integers(-4, 5, (m, n)).astype(self.char)
        return values * (1 - 2j) if self.char in "FD" else values

    def spread(self, values, block=0):
        """A view of these values in a larger matrix; what is around is NaN.

        With square blocks of an order, those of the diagonal of a square matrix are each on one rank.
        """
        rng, (m, n), turned = self.rng, values.shape, bool(self.rng.integers(2))
        i, j, more, beside = map(int, rng.integers(0, 6, 4))
        j = i if block else j
        p, q = self.grids[rng.integers(len(self.grids))]
        rows, cols = (n, m) if turned else (m, n)
        whole = np.full((i + rows + more, j + cols + beside), np.nan, self.char)
        whole[i : i + rows, j : j + cols] = values.T if turned else values
        descriptor = pb.MatrixDescriptor(
            whole.shape, (block, block) if block else tuple(map(int, rng.integers(1, 9, 2))),
            pb.Grid(p, q, str(rng.choice(["row", "col"]))), (int(rng.integers(p)), int(rng.integers(q))),
            np.dtype(self.char), str(rng.choice([*"CF"])),
        )  # fmt: skip
        return Spread(whole, descriptor), (i, j, rows, cols, turned)

    def compute(self, routine, given, into, beside=(), **how):
        """Make a call; return the result, or None if it is not for direct calls, which no rank may take otherwise."""
        matrices = [*given, into, *beside]
        parts = [
            [None if x is None else x[0].part(rank, x[1]) for x in matrices] for rank in range(self.size)
        ]
        before = into[0].whole()
        ended = {*self.ranks.run(routine, parts, **how)}
        if ended == {"UNFIT"}:
            return None
        assert len(ended) == 1
        assert ended <= {"DONE", "DONE_STAGED"}
        i, j, m, n, turned = into[1]
        after = into[0].whole()
        found = after[i : i + m, j : j + n].copy()
        after[i : i + m, j : j + n] = before[i : i + m, j : j + n]
        assert np.array_equal(after, before, equal_nan=True)  # around it nothing is written
        return found.T if turned else found


OPS = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}


def products(cases, rng):
    """A product, or a sum, and what it should be."""
    m, n, k = map(int, rng.integers(1, 20, 3))
    op_a, op_b = map(str, rng.choice([*"NTC"], 2))
    beta, z = float(rng.integers(-1, 2)), cases.values(m, n)
    d = cases.spread(z)
    if rng.integers(3) == 0:
        y = cases.values(m, n)
        given = [cases.spread(OPS[op_a](y)), None, d]
        return ("geadd", given, d, {"words": f"LL{op_a}NN", "alpha": -1.0, "beta": beta}), -y + beta * z
    x, y = cases.values(m, k), cases.values(k, n)
    given = [cases.spread(OPS[op](v)) for op, v in ((op_a, x), (op_b, y))]
    return (
        "matmul",
        [*given, d],
        d,
        {"words": f"LL{op_a}{op_b}N", "alpha": 2.0, "beta": beta},
    ), 2 * x @ y + beta * z


def triangle(cases, uplo, diag, n):
    """A triangular matrix whose inverse has small integers, with NaN where nothing is read."""
    x = np.tril(cases.values(n, n), -1) * np.tri(n, k=-1) * (np.arange(n) % 3 == 0) + np.eye(n)
    inside = np.tri(n, k=-(diag == "U"), dtype=bool)
    stored = np.where(inside, x, np.nan).astype(cases.char)
    return (x, stored) if uplo == "L" else (x.T, stored.T)


def triangles(cases, rng):
    """A triangular product or solve."""
    (side, uplo, op, diag), routine = (str(rng.choice([*w])) for w in ("LR", "LU", "NTC", "NU")), "trmm"
    m, n = (int(rng.choice([1, 2, 7, 18])) for _ in "mn")
    x, stored = triangle(cases, uplo, diag, m if side == "L" else n)
    b, alpha = cases.values(m, n), float(rng.choice([1, 2]))
    expected = alpha * (OPS[op](x) @ b if side == "L" else b @ OPS[op](x))
    if rng.integers(2):
        routine, b, expected = "trsm", expected / alpha, alpha * b
    a, given = cases.spread(stored, int(rng.integers(0, 5))), cases.spread(b)
    into = given if rng.integers(2) else cases.spread(cases.values(m, n))
    return (routine, [a, given, None], into, {"words": f"{side}{uplo}{op}N{diag}", "alpha": alpha}), expected


def solves_of_one_column(cases, rng):
    """A triangular solve whose matrix stays where it is."""
    uplo, op, diag = (str(rng.choice([*w])) for w in ("LU", "NTC", "NU"))
    n = int(rng.integers(5, 30))
    x, stored = triangle(cases, uplo, diag, n)
    y = cases.values(n, 1)
    a, b = cases.spread(stored, int(rng.integers(1, 9))), cases.spread(OPS[op](x) @ y)
    into = b if rng.integers(2) else cases.spread(y)
    return ("trsm", [a, b, None], into, {"words": f"L{uplo}{op}N{diag}"}), y


def symmetric(cases, rng):
    """A symmetric or Hermitian matrix times another one."""
    (side, uplo), m, n = (
        (str(rng.choice([*w])) for w in ("LR", "LU")),
        *map(int, rng.choice([1, 2, 6, 19], 2)),
    )
    beta, k, routine = float(rng.integers(-1, 2)), m if side == "L" else n, str(rng.choice(["symm", "hemm"]))
    x, b, z = cases.values(k, k), cases.values(m, n), cases.values(m, n)
    x = x + (x.conj().T if routine == "hemm" else x.T)
    inside = np.tri(k, dtype=bool) if uplo == "L" else np.tri(k, dtype=bool).T
    a, given, d = (
        cases.spread(np.where(inside, x, np.nan), int(rng.integers(0, 4))),
        cases.spread(b),
        cases.spread(z),
    )
    expected = (x @ b if side == "L" else b @ x) + beta * z
    return (routine, [a, given, d], d, {"words": f"{side}{uplo}NNN", "beta": beta}), expected


def updates(cases, rng):
    """An update of a triangle; the other one keeps its NaN."""
    routine, uplo = str(rng.choice(["syrk", "herk", "syr2k", "her2k"])), str(rng.choice([*"LU"]))
    n, k, beta = int(rng.integers(1, 24)), int(rng.choice([1, 2, 5, 60])), float(rng.integers(-1, 2))
    adjoint = "C" if routine.startswith("he") else "T"
    op = str(rng.choice(["N", adjoint]))
    x, y, z = cases.values(n, k), cases.values(n, k), cases.values(n, n)
    z = z + OPS[adjoint](z)
    inside = np.tri(n, dtype=bool) if uplo == "L" else np.tri(n, dtype=bool).T
    expected = x @ OPS[adjoint](x) if routine.endswith("rk") else x @ OPS[adjoint](y) + y @ OPS[adjoint](x)
    d = cases.spread(np.where(inside, z, np.nan), int(rng.integers(0, 4)))
    given = [cases.spread(OPS[op](x)), None if routine.endswith("rk") else cases.spread(OPS[op](y)), d]
    call = routine, given, d, {"words": f"L{uplo}{op}NN", "beta": beta}
    return call, np.where(inside, expected + beta * z, np.nan)


def factors(cases, rng):
    """A Cholesky factor, an inverse of a triangle, or solutions; outside a triangle D keeps its values."""
    n, width, uplo = int(rng.integers(1, 30)), int(rng.integers(1, 6)), str(rng.choice([*"LU"]))
    inside = np.tri(n, dtype=bool) if uplo == "L" else np.tri(n, dtype=bool).T
    z = cases.values(n, n).astype("D" if cases.char in "FD" else "d")
    whole, y = z @ z.conj().T + 9 * n * np.eye(n), cases.values(n, width)
    x = np.linalg.cholesky(whole) if uplo == "L" else np.linalg.cholesky(whole).conj().T
    stored = np.where(inside, whole, np.nan)
    routine = str(rng.choice(["potrf", "posv", "gesv", "trtri", "potrf potri", "getrf getri", "trtri laset"]))
    words = {"words": f"L{uplo}NNN"}
    if routine in ("posv", "gesv"):
        d = cases.spread(whole @ y)
        a = cases.spread(stored if routine == "posv" else whole)
        return (routine, [a, d, None], d, words), y
    given = {"trtri": x, "trtri laset": np.where(inside, x, np.nan), "getrf getri": whole}.get(
        routine, stored
    )
    a, d = cases.spread(given), cases.spread(z)
    expected = np.where(inside, x if routine == "potrf" else np.linalg.inv(x), z)
    if routine != "potrf" and " " in routine:
        expected = np.linalg.inv(x if routine.startswith("tr") else whole)
    return (routine, [a, None, None], d, words), expected


@pytest.mark.parametrize(
    ("size", "nodes"),
    [(1, None), (2, None), (3, None), (2, [0, 1]), (3, [0, 1, 0]), (4, [0, 1, 1, 2]), (4, [0, 1, 1, 0])],
)
@pytest.mark.parametrize("draw", [products, triangles, solves_of_one_column, symmetric, updates, factors])
def test_calls_on_random_sub_matrices(draw, size, nodes):
    """Tiny ones as if they were not, in one case of two; so that every way is taken with every rank."""
    cases, computed, count = Cases(size, 2, nodes), 0, 30 if nodes else 60
    rng, tiny = cases.rng, LIMITS.tiny
    for turn in range(count):
        cases.char = str(rng.choice([*TYPES]))
        (routine, given, into, how), expected = draw(cases, rng)
        limits = {
            "width": 3,
            "part": 3,
            "meeting": int(rng.choice([9, 100_000])),
            "rows": 2,
            "factoring": 9,
            "handoff": 1 << 60 * (turn % 2),
            "uncopied": 900,
            "transposed": int(rng.choice([90, 1200])),
            "strip": 2,
            "equations": 16,
            "dealt": int(rng.choice([1, 64])),
        }
        with changed_limits(tiny=tiny * int(rng.integers(2)), stay=0, portion=20, **limits):
            found = cases.compute(routine, given, into, **how)
        if found is None:
            continue
        computed += 1
        near = 2e-3 if cases.char in "fF" else 1e-9
        np.testing.assert_allclose(
            found, expected, near, near * (draw is factors), err_msg=f"{routine} {how}"
        )
    assert computed > count / 4


@pytest.mark.parametrize(("size", "nodes"), [(3, None), (4, [0, 1, 1, 0])])
def test_what_ranks_cannot_divide_each_computes(size, nodes):
    """Blocks of any shape, complex updates: up to 8,192 elements; such a triangle goes to who has a column."""
    cases, n = Cases(size, 23, nodes), 40
    for cases.char in TYPES * 3:
        x, y, z = (cases.values(n, k) for k in (n, 1, n))
        half, lower = np.tri(n, dtype=bool), np.where(np.tri(n, dtype=bool), x, np.nan)
        square = x + x.T
        for routine, given, into, expected in (
            ("trmm", lower, cases.spread(y), np.tril(x) @ y),
            ("symm", np.where(half, square, np.nan), cases.spread(np.zeros((n, n))), square @ z),
            (
                "herk",
                x,
                cases.spread(np.where(half, 0, np.nan).astype(cases.char)),
                np.where(half, x @ x.conj().T, np.nan),
            ),
        ):
            b = {"trmm": into, "symm": cases.spread(z)}.get(routine)
            c = into if routine == "herk" else None
            found = cases.compute(routine, [cases.spread(given.astype(cases.char)), b, c], into)
            assert np.array_equal(found, expected, equal_nan=True), routine


@pytest.mark.parametrize(("size", "nodes"), [(1, None), (3, None), (4, [0, 1, 1, 0])])
def test_reflectors(size, nodes):
    """Factors, all columns of Q, and products with it from both sides, with TAU beside a part of A."""
    cases, computed = Cases(size, 4, nodes), 0
    rng = cases.rng
    for _ in range(24):
        cases.char = str(rng.choice([*TYPES]))
        n, m = sorted(map(int, rng.integers(1, 24, 2)))
        x, letter = cases.values(m, n), cases.char in "FD"
        names = ("geqrf", "ungqr", "unmqr", "gels") if letter else ("geqrf", "orgqr", "ormqr", "gels")
        factor, form, apply, solve = scipy.linalg.get_lapack_funcs(names, (x,))
        reflectors, tau, *_ = factor(x)
        a = cases.spread(x)
        found = [cases.compute("geqrf", [a, None, None], a)]
        expected = [reflectors]
        op, c = str(rng.choice(["N", "C" if letter else "T"])), cases.values(m, 3)
        (a, d), (_, solution, _) = map(cases.spread, (x, c)), solve(x, c, op)
        found.append(cases.compute("gels", [a, d, None], d, words=f"LL{op}NN"))
        expected.append(solution)
        a = cases.spread(reflectors)
        descriptor, (_, j, *_, turned) = a[0].descriptor, a[1]
        if not turned:  # TAU belongs to columns of the matrix
            nprow = descriptor.grid.shape[0]
            row = np.full((nprow, descriptor.shape[1]), np.nan, cases.char)
            row[:, j : j + n] = tau
            block, source = (1, descriptor.block[1]), (0, descriptor.source[1])
            of = pb.MatrixDescriptor(row.shape, block, descriptor.grid, source, descriptor.dtype)
            beside = [(Spread(row, of), (0, j, nprow, n, False))]
            side = str(rng.choice([*"LR"]))
            c = cases.values(*(m, 5) if side == "L" else (5, m))
            d = cases.spread(c)
            found.append(cases.compute("ormqr", [a, d, None], d, beside, words=f"{side}L{op}NN"))
            expected.append(apply(side, op, reflectors, tau, c, 4 * m + 9000)[0])
            found.append(cases.compute("orgqr", [a, None, None], a, beside))
            expected.append(form(reflectors, tau)[0])
        for one, other in zip(found, expected, strict=True):
            if one is not None:
                computed += 1
                near = 1e-3 if cases.char in "fF" else 1e-11
                np.testing.assert_allclose(one, other, near, near * m)
    assert computed > 24


@pytest.mark.parametrize("size", [1, 3])
def test_numbers_of_vectors(size):
    cases = Cases(size, 3)
    rng, total = cases.rng, {"dot": "sum", "dotc": "sum", "asum": "sum", "nrm2": "squares", "amax": "largest"}
    computed = 0
    for _ in range(100):
        cases.char, n, routine = (
            str(rng.choice([*TYPES])),
            int(rng.integers(1, 40)),
            str(rng.choice([*total])),
        )
        x, y = cases.values(n, 1), cases.values(n, 1)
        a = cases.spread(x)
        b = a if rng.integers(2) else cases.spread(y)
        y = x if b is a else y
        two = routine in ("dot", "dotc")
        parts = [
            [a[0].part(r, a[1]), b[0].part(r, b[1]) if two else None, None, a[0].part(r, a[1])]
            for r in range(size)
        ]
        ended = {*cases.ranks.run(routine, parts)}
        if ended == {"UNFIT"}:
            continue
        told = np.array([cases.ranks.told(rank) for rank in range(size)])
        if "BY_PYTHON" in ended:
            assert routine == "nrm2"
            continue
        computed += 1
        sizes = abs(x.real) + abs(x.imag)
        if routine == "amax":
            best = max(map(tuple, told), key=lambda row: (row[0], -row[1]))
            at = int(sizes.argmax())
            assert best == (sizes[at, 0], at, x[at, 0].real, x[at, 0].imag)
            continue
        sums = {
            "dot": (x.T @ y)[0, 0],
            "dotc": (x.conj().T @ y)[0, 0],
            "asum": sizes.sum(),
            "nrm2": (abs(x) ** 2).sum(),
        }
        found = told.sum(axis=0)
        found = found[1] if routine == "nrm2" else complex(*found) if two else found[0]
        assert np.isclose(found, sums[routine])
    assert computed > 40


@pytest.mark.parametrize("size", [1, 3])
def test_vectors_that_are_exchanged(size):
    cases, computed = Cases(size, 5), 0
    for _ in range(30):
        cases.char, n = str(cases.rng.choice([*TYPES])), int(cases.rng.integers(1, 40))
        x, y = cases.values(n, 1), cases.values(n, 1)
        a, d = cases.spread(x), cases.spread(y)
        found = cases.compute("swap", [a, None, None], d)
        if found is None:
            continue
        computed += 1
        i, j, m, n, turned = a[1]
        other = a[0].whole()[i : i + m, j : j + n]
        assert np.array_equal(found, x)
        assert np.array_equal(other.T if turned else other, y)
    assert computed == 30


@pytest.mark.parametrize(("size", "nodes"), [(1, None), (3, None), (3, [0, 1, 1]), (4, [0, 0, 1, 1])])
@pytest.mark.parametrize("routine", ["potrf", "posv", "potrf potri"])
def test_faults_of_positive_definite_matrices(routine, size, nodes):
    """The order of the first minor that is not positive; NaN is no fault."""
    cases, n = Cases(size, 6, nodes), 20
    for at, value in ((13, -1.0), (13, np.nan)):
        for cases.char in TYPES:
            whole = 3 * np.eye(n) + 1
            whole[at, at] = value
            d = cases.spread(np.ones((n, 3) if routine == "posv" else (n, n)))
            given = [cases.spread(whole), d if routine == "posv" else None, None]
            limits = {"width": 3, "part": 3, "meeting": 9, "rows": 2, "factoring": 9}
            with changed_limits(**limits):
                found = cases.compute(routine, given, d)
            if found is None:
                continue
            info = {cases.ranks.info(rank) for rank in range(size)}
            assert info == {0 if np.isnan(value) else at + 1}
            if np.isnan(value) and routine != "posv":
                assert np.isnan(found[at:, at:][np.tri(n - at, dtype=bool)]).all()


@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 1, 0], [0, 0, 1, 2, 1, 2, 2], [0, 0, 0, 1]])
def test_nodes_share_the_work_of_a_factorization(nodes):
    """Each rank solves for rows of its own, which all nodes receive: one exchange for each block but the last."""
    cases, n = Cases(len(nodes), 8, nodes), 29
    limits = {"width": 3, "part": 3, "meeting": 9, "rows": 2, "factoring": 9}
    for cases.char in TYPES:
        x = np.tril(cases.values(n, n), -1) / 16 + 2 * np.eye(n)
        whole, given = x @ x.conj().T, {"U": x.conj().T, "L": x}
        for routine, uplo in (("potrf", "L"), ("potrf", "U"), ("posv", "L"), ("posv", "U")):
            y, inside = cases.values(n, 3), np.tri(n, dtype=bool)
            a = cases.spread(np.where(inside if uplo == "L" else inside.T, whole, np.nan))
            d = cases.spread(np.zeros((n, n)) if routine == "potrf" else whole @ y)
            before = cases.ranks.exchanges()
            with changed_limits(**limits):
                found = cases.compute(
                    routine, [a, d if routine == "posv" else None, None], d, words=f"L{uplo}NNN"
                )
            expected = given[uplo] if routine == "potrf" else y
            assert np.allclose(found, expected, rtol=1e-4 if cases.char in "fF" else 1e-11)
            assert cases.ranks.exchanges() - before == -(-n // 3)  # the last one brings nothing, or solutions
    cases.char, width = "d", 8  # each rank solves for its own columns
    seen, d = cases.ranks.products(0, "trsm"), cases.spread(whole.real @ np.ones((n, width)))
    with changed_limits(**limits):
        assert np.allclose(cases.compute("posv", [cases.spread(whole.real), d, None], d), 1)
    assert [cols for rows, cols in seen if rows == n] == [-(-width // len(nodes))] * 2


@pytest.mark.parametrize(("size", "nodes"), [(1, None), (2, None), (2, [0, 1])])
@pytest.mark.parametrize("char", [*TYPES])
def test_columns_of_a_factor_begin_at_unlike_places_of_a_cache(char, size, nodes):
    """If they were 1 KiB apart, or a multiple of it, a few lines of a cache would have to hold all of a row."""
    cases, item = Cases(size, 9, nodes), np.dtype(char).itemsize
    cases.char = char
    for n, gap in ((1024 // item, 64 // item), (1024 // item - 1, 0)):
        y, found = cases.values(n, 2), None
        while found is None:  # a single rank solves for columns that are contiguous
            d = cases.spread((2 * n * np.eye(n) + 1) @ y)
            with changed_limits(width=48, part=32):
                found = cases.compute("posv", [cases.spread(2 * n * np.eye(n) + 1), d, None], d)
        assert np.allclose(found, y, atol=1e-4 if char in "fF" else 1e-11)
        assert {cases.ranks.factor_ld(rank) for rank in range(size)} == {n + gap}


class Interrupted(CoreRanks):
    """Ranks whose messages take a while, and whose waits for them raise."""

    def __init__(self, *given):
        self._looks = Counter()
        super().__init__(*given)

    def _test(self, request, *given):
        self._looks[request] += 1
        return 0 if self._looks[request] % 40 else super()._test(request, *given)

    def _wait(self, *_):
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_that_ctypes_drops_breaks_the_call():
    """As a signal's handler may raise it before the wait can catch it: nothing has come, whatever ctypes returns."""
    cases, ranks = Cases(2, 8, [0, 1]), Interrupted(2, [0, 1])
    x, at = cases.spread(3 * np.eye(29) + 1)
    parts = [[x.part(rank, at), None, None, x.part(rank, at)] for rank in range(2)]
    with changed_limits(width=3, part=3, meeting=9, rows=2, factoring=9):
        assert ranks.run("potrf", parts) == ["BROKEN"] * 2


def test_ranks_that_ask_for_different_things():
    ranks, cases = CoreRanks(2), Cases(2, 4)
    x = cases.spread(np.ones((4, 4)))
    part, other = (x[0].part(0, (*x[1][:4], turned)) for turned in (False, True))
    assert ranks.run("scal", [[part, None, None, part], [other, None, None, other]]) == ["UNLIKE"] * 2
    assert ranks.run("scal", [[part, None, None, part]] * 2, alpha=2.0) == ["DONE"] * 2


@pytest.fixture
def grid():
    """A context, and the number of its grid of one process."""
    with pb.Context(engine="host") as ctx:
        yield ctx, pblas.gridinit(ctx, "Row", 1, 1)


def direct_calls(ctx, call):
    """How many direct calls a call makes, and what it returns."""
    before = ctx.control.channel.runs
    found = call()
    return ctx.control.channel.runs - before, found


def test_the_core_reads_the_arguments_of_pblas(grid):
    """Places that it has not seen, numbers and descriptors of several types, arrays that were pickled."""
    ctx, ictxt = grid
    rng = np.random.default_rng(3)
    for n in range(1, 2 * objects.PLACES, 200):
        for char in TYPES:
            letter = {"f": "s", "d": "d", "F": "c", "D": "z"}[char]
            a, b, c = (np.asfortranarray(rng.integers(-4, 5, (9, 9)).astype(char)) for _ in range(3))
            a = pickle.loads(pickle.dumps(a))  # its dtype is no longer NumPy's own object
            expected = c.copy()
            expected[2:5, 3:8] = 2 * a[:3, 1:5] @ b[4:9, 2:6].T - c[2:5, 3:8]
            desc = pblas.descinit(9, 9, 1 + n % 5, 3, 0, 0, ictxt, 9)
            of_a = [desc.tolist(), tuple(desc), desc.astype(np.longlong), desc.astype(np.intc)][n // 200 % 4]
            alpha, beta = (
                (2, 2.0, np.float64(2), np.int32(2))[n // 200 % 4],
                (-1.0, -1, np.complex128(-1))[n % 3],
            )
            call = getattr(pblas, f"p{letter}gemm")
            given = ["n", "T", 3, 5, 4, alpha, a, 1, 2, of_a, b, 5, 3, desc, beta, c, 3, 4, desc]
            assert direct_calls(ctx, lambda given=given, call=call: call(*given)) == (1, None)
            assert np.array_equal(c, expected)


def test_what_the_core_does_not_read_takes_the_ordinary_way(grid):
    ctx, ictxt = grid
    a, b = np.eye(6, order="F"), np.ones((6, 6), order="F")
    desc = pblas.descinit(6, 6, 2, 2, 0, 0, ictxt, 6)
    legal = ["L", "L", "N", "N", 4, 3, 1.0, a, 1, 1, desc, b, 2, 1, desc]
    assert direct_calls(ctx, lambda: pblas.pdtrsm(*legal))[0] == 1
    locked = b.copy(order="F")
    locked.flags.writeable = False
    for i, value in (
        (0, 1), (1, "X"), (2, "\ud800"), (3, None), (4, -1), (4, 7), (5, 1 << 70), (5, 2.0), (6, "1"),
        (6, 1j), (7, a.astype("f")), (7, a.tolist()), (7, a[:5]), (7, a.astype(">f8")), (8, 0), (8, 4), (9, 1.0),
        (10, desc[:8]), (10, desc + 0.5), (10, None), (11, locked), (12, 4), (14, [*desc[:3], "6", *desc[4:]]),
    ):  # fmt: skip
        wrong = [*legal]
        wrong[i] = value
        with pytest.raises(pblas.ParameterError):
            pblas.pdtrsm(*wrong)
    before = b.copy()
    assert direct_calls(ctx, lambda: pblas.pdtrsm(*legal))[0] == 1
    assert np.array_equal(b, before)
    x = np.ones(6)
    row = pblas.descinit(1, 6, 1, 2, 0, 0, ictxt, 1)
    vector = [6, None, x, 1, 1, row, 1, b, 1, 1, desc, 6]
    assert direct_calls(ctx, lambda: pblas.pddot(*vector)) == (1, 6.0)
    for i, value in ((1, 0.0), (6, 2), (11, 1.0), (3, 2), (0, 7)):
        wrong = [*vector]
        wrong[i] = value
        with pytest.raises(pblas.ParameterError):
            pblas.pddot(*wrong)


def test_a_call_in_the_midst_of_another(grid):
    """Such as a signal's handler, a finalizer or a tracer makes: neither takes the other's arguments or results."""
    ctx, ictxt = grid
    desc, nested = pblas.descinit(5, 5, 5, 5, 0, 0, ictxt, 5), []

    def product(factor):
        a, b = ctx.scatter(np.full((5, 5), factor)), ctx.scatter(np.eye(5))
        assert np.array_equal(pb.matmul(a, b).local, a.local)

    def dot(factor):
        x, y, n = np.full(25, factor), np.ones(25), 1 + len(nested) % 4
        assert pblas.pddot(n, None, x, 1, 1 + n % 2, desc, 1, y, 1, 1, desc, 1) == n * factor

    def lu(factor):
        a, pivots = np.full((5, 5), factor) + np.diag(np.arange(5.0)), np.zeros(10, np.int32)
        a = np.asfortranarray(a[:: -1 if factor else 1])
        expected = scipy.linalg.lapack.dgetrf(a)[1] + 1
        pblas.pdgetrf(5, 5, a, 1, 1, desc, pivots)
        assert np.array_equal(pivots[:5], expected)

    calls = product, dot, lu

    def midst(frame, event, _):
        if event == "line":
            sys.settrace(None)
            nested.append(frame.f_lineno)
            calls[len(nested) % 3](float(len(nested)))
            sys.settrace(trace)
        return midst

    def trace(frame, *_):
        of_direct_calls = frame.f_code.co_filename.endswith(("host/direct/calls.py", "pblas/direct.py"))
        return midst if of_direct_calls else trace

    tracer = sys.gettrace()
    try:
        for k in range(30):
            sys.settrace(trace)
            calls[k % 3](float(k % 7))
            sys.settrace(tracer)
    finally:
        sys.settrace(tracer)
    assert len(set(nested)) > 50


def test_an_option_that_only_says_that_it_is_equal_to_a_letter(grid):
    class Letter:
        def __hash__(self):
            return hash("L")

        def __eq__(self, other):
            return other == "L"

    a = grid[0].scatter(np.eye(4))
    for call in (pb.blas.trsm, pb.blas.symm):
        with pytest.raises(pb.ArgumentError, match=r"uplo: expected 'L' or 'U', got <.*Letter object"):
            call(a, a, uplo=Letter())


def test_only_arrays_are_looked_at_as_arrays(grid, monkeypatch):
    _, ictxt = grid
    kinds = []
    monkeypatch.setattr(direct, "host_address", lambda x: kinds.append(type(x)) or host_address(x))
    desc = pblas.descinit(4, 4, 4, 4, 0, 0, ictxt, 4)
    for x in (object(), None, 5, np.float64(1), np.ma.ones((4, 4))):
        with pytest.raises(pblas.ParameterError, match="argument 8 "):
            pblas.pdtrsm("L", "L", "N", "N", 4, 4, 1.0, x, 1, 1, desc, np.ones((4, 4), order="F"), 1, 1, desc)
        with pytest.raises(pblas.ParameterError, match="argument 12 "):
            pblas.pdtrsm("L", "L", "N", "N", 4, 4, 1.0, np.eye(4, order="F"), 1, 1, desc, x, 1, 1, desc)
    assert set(kinds) == {np.ndarray}


def test_arrays_in_the_memory_of_others_are_told_apart(grid):
    """The same address with another shape, stride or descriptor is another matrix."""
    ctx, ictxt = grid
    memory = np.arange(40.0)
    for rows, cols, lld in ((4, 5, 4), (5, 4, 5), (4, 4, 5), (2, 9, 4), (4, 5, 8), (4, 5, 4)):
        x = np.ndarray((rows, cols), float, memory, strides=(8, 8 * lld))
        desc, y = pblas.descinit(rows, cols, 2, 2, 0, 0, ictxt, lld), np.zeros((rows, cols), order="F")
        of_y = pblas.descinit(rows, cols, 2, 2, 0, 0, ictxt, rows)
        call = (pblas.pdgeadd, "N", rows, cols, 1.0, x, 1, 1, desc, 0.0, y, 1, 1, of_y)
        assert direct_calls(ctx, lambda call=call: call[0](*call[1:])) == (1, None)
        assert np.array_equal(x, y)


def test_more_arrays_than_the_core_knows(grid, monkeypatch):
    """Those that it has forgotten it is told again."""
    ctx, ictxt = grid
    memory, y = np.arange(1.0, objects.PLACES + 60), np.zeros((1, 2), order="F")
    desc, of_y = pblas.descinit(1, 1, 1, 1, 0, 0, ictxt, 1), pblas.descinit(1, 2, 1, 2, 0, 0, ictxt, 1)
    monkeypatch.setattr(ctx, "agreement", None)  # no call takes the ordinary way
    for k in (*range(len(memory)), *range(40)):
        call = partial(pblas.pdgeadd, "N", 1, 1, 2.0, memory[k : k + 1], 1, 1, desc, 0.0, y, 1, 2, of_y)
        runs, _ = direct_calls(ctx, call)
        assert (runs, y[0, 1]) == (1, 2 * memory[k])


def test_calls_on_new_sub_matrices_take_as_few_steps_of_python_as_known_ones(grid):
    ctx, ictxt = grid
    a, desc = np.eye(40, order="F"), pblas.descinit(40, 40, 4, 4, 0, 0, ictxt, 40)
    x, v, steps = ctx.scatter(a), ctx.scatter(a[:, :1]), []

    def count(_frame, event, _given):
        steps[-1] += event == "call"

    def by_views(i):
        view = x[i : i + 4, 20:24]
        pb.matmul(x[i : i + 4, :4], x[:4, 9:13], view, beta=1, out=view)

    def by_slices(i):
        pb.blas.dot(v[i : i + 4], v[20:24])
        pb.blas.dot(x[:, i], x[:, 20])

    for call, most in (
        (
            lambda i: pblas.pdgemm("N", "N", i, 4, 4, 1.0, a, i, 1, desc, a, 1, 9, desc, 0.0, a, i, 20, desc),
            10,
        ),
        (by_views, 21),
        (by_slices, 69),
    ):
        steps.clear()
        for i in (1, 1, 1, 3, 7):
            steps.append(0)
            sys.setprofile(count)
            try:
                call(i)
            finally:
                sys.setprofile(None)
        assert max(steps[1:]) <= most < steps[0]


def test_the_core_reads_calls_of_functions_of_views():
    """New results, transposed views, scalars of several kinds, operands that are absent, pivots that are given."""
    rng = np.random.default_rng(5)
    with pb.Context(engine="host") as ctx:
        for k, char in enumerate(TYPES):
            x, y = (rng.integers(-4, 5, (9, 9)).astype(char) for _ in range(2))
            a, b = ctx.scatter(x, block=2, order="FC"[k % 2]), ctx.scatter(y, block=3)
            alpha, beta = (2, 2.0, 2j, np.complex64(2))[k], (1, np.float32(-1), 0.5, -1j)[k]
            for call, given, how, expected in (
                (pb.matmul, (a[1:5, :].T, b[3:7, 2:]), {"alpha": alpha}, alpha * x[1:5].T @ y[3:7, 2:]),
                (pb.blas.geadd, (a.T, b), {"alpha": alpha, "beta": beta}, alpha * x.T + beta * y),
                (pb.blas.scal, (a[:, 1:2],), {"alpha": alpha}, alpha * x[:, 1:2]),
            ):
                runs, found = direct_calls(ctx, partial(call, *given, **how))
                assert runs == 1, call
                assert np.array_equal(found.allgather(), expected.astype(char)), call
            shifted = x + 40 * np.eye(9, dtype=char)
            factors = pb.linalg.lu_factor(ctx.scatter(shifted, block=4))
            runs, found = direct_calls(ctx, partial(pb.linalg.lu_solve, factors, b))
            assert runs == 1
            assert np.allclose(shifted @ found.allgather(), y, atol=1e-4 if char in "fF" else 1e-12)


class OfMatrices:
    """A call of level 3 on views of larger matrices, in place if its result has no size.

    Args:
        ctx: the context.
        char: the type.
        case: the routine, the sizes of matrices, which of them are transposed, and other arguments.
        order: in memory.
    """

    def __init__(self, ctx, char, case, order="F"):
        routine, sizes, turned, given = case
        self.call = pb.matmul if routine == "matmul" else getattr(pb.blas, routine)
        row = GEMM if routine == "matmul" else ROUTINES[routine]
        names = inspect.signature(self.call).parameters
        read = ("alpha", "beta", "out", "algo", *row.operands, *WORDS)
        self.form = HandleForm(routine, row, [name for name in names if name in read])
        self.given, rng = {"alpha": 2.0, **given}, np.random.default_rng(8)
        for k, (name, (m, n)) in enumerate(sizes.items(), start=1):
            x = rng.integers(-4, 5, (14, 14)).astype(char) + 20 * np.eye(14, dtype=char)
            x = ctx.scatter(x, block=3, order=order)
            self.given[name] = x[k : k + n, 2 : m + 2].T if name in turned else x[k : k + m, 2 : n + 2]
        self.given.setdefault("out", self.given.get(row.in_place))
        self.operands = [*sizes]

    def reads(self, **changes):
        """What the core says to the call, with some arguments changed."""
        given = {name: each.default for name, each in inspect.signature(self.call).parameters.items()}
        given |= self.given | changes
        return self.form.run(tuple(given[name] for name in self.form.names))


SQUARE, TALL = {"a": (4, 4), "b": (4, 3)}, {"a": (5, 4), "c": (4, 4)}
PRODUCT = "matmul", {"a": (4, 5), "b": (5, 3), "c": (4, 3)}, "b", {"beta": -1.0}
NEW = "matmul", {"a": (5, 4), "b": (3, 5), "out": (4, 3)}, "a out", {"op_a": "T", "op_b": "T"}
SOLVED = "trsm", SQUARE, "b", {"uplo": "U", "diag": "U"}
HERMITIAN = "herk", {"a": (4, 5), "c": (4, 4)}, "", {"beta": 1.0}
ADDED = "geadd", {"a": (4, 5), "c": (5, 4)}, "c", {"op_a": "T", "beta": -1.0}
CALLS_ON_MATRICES = [
    *(PRODUCT, NEW, SOLVED, HERMITIAN, ADDED),
    ("trsm", {"a": (3, 3), "b": (4, 3)}, "a", {"side": "R", "op_a": "T"}),
    ("trmm", {**SQUARE, "out": (4, 3)}, "", {}),
    ("symm", {**SQUARE, "c": (4, 3)}, "a", {"beta": 3}),
    ("hemm", {"a": (3, 3), "b": (4, 3), "out": (4, 3)}, "a b out", {"side": "R", "uplo": "U"}),
    ("syrk", TALL, "a", {"op_a": "T", "beta": 1}),
    ("syr2k", {**TALL, "b": (5, 4)}, "c", {"op_a": "T", "beta": -1.0}),
    ("her2k", {"a": (4, 5), "b": (4, 5), "c": (4, 4)}, "", {"beta": 2.0}),
]


@pytest.mark.parametrize("char", TYPES)
def test_the_core_reads_matrices(grid, char):
    """It computes what Python has read, which does so if a scalar is NumPy's."""
    ctx, _ = grid
    for case in CALLS_ON_MATRICES:
        for order in "FC":
            one, other = (OfMatrices(ctx, char, case, order) for _ in range(2))
            assert direct_calls(ctx, one.reads) == (1, True), (case, order)
            assert other.reads(alpha=np.float64(2.0)) is None
            found = other.call(**other.given | {"alpha": np.float64(2.0)})
            assert np.array_equal(one.given["out"].whole.local, found.whole.local), (case, order)


def test_matrices_that_the_core_does_not_read(grid):
    """Nothing happens: the ordinary way computes them, or says what is wrong."""
    ctx, _ = grid
    with pb.Context(engine="host") as another:
        wrong = [
            None,
            3.0,
            np.ones((4, 4)),
            ctx.zeros((7, 6)),
            ctx.zeros((4, 4), dtype="f"),
            ctx.zeros((0, 4)),
        ]
        wrong += another.zeros((4, 3)), another.zeros((4, 4)), ctx.zeros((4, 4), dtype="bfloat16")
        for case, changes in (
            (PRODUCT, {"op_a": ("n", "X", "NN", 1, None), "beta": ("1", 1j, None), "algo": (None, ["auto"])}),
            (NEW, {"op_a": ("N",), "beta": (1.0,)}),
            (SOLVED, {"side": ("R", "l"), "uplo": ("N",), "diag": ("L",), "alpha": (0, 1 << 2000, 1j, True)}),
            (HERMITIAN, {"alpha": (1j,), "beta": (1j,)}),
            (ADDED, {"op_a": ("N",), "algo": ("moved",)}),
        ):
            of = OfMatrices(ctx, "d", case)
            out = of.given["out"]
            before = out.allgather()
            for name, values in {**dict.fromkeys([*of.operands, "out"], wrong), **changes}.items():
                for value in values:
                    assert direct_calls(ctx, partial(of.reads, **{name: value})) == (0, None), (
                        case,
                        name,
                        value,
                    )
            out.whole.local.flags.writeable = False
            assert of.reads() is None
            out.whole.local.flags.writeable = True
            assert np.array_equal(out.allgather(), before)
            assert of.reads() is True
            assert not np.array_equal(out.allgather(), before)


@pytest.mark.parametrize("char", TYPES)
def test_the_core_reads_matrices_of_cholesky(grid, monkeypatch, char):
    """In place and beside A, both triangles, transposed views; a fault; a flag of NumPy's takes the ordinary way."""
    ctx, _ = grid
    asked, run = [], HandleForm.run
    monkeypatch.setattr(HandleForm, "run", lambda self, args: asked.append(run(self, args)) or asked[-1])
    x = np.random.default_rng(4).integers(-3, 4, (9, 9)).astype(char)
    x = x @ x.conj().T + 40 * np.eye(9, dtype=char)
    for lower in (True, False, np.False_):
        for a in (ctx.scatter(x, block=3, order="F")[1:8, 1:8], ctx.scatter(x.T, block=4)[2:7, 2:7].T):
            expected, of = (
                scipy.linalg.cholesky(a.allgather(), lower=bool(lower)),
                np.tril if lower else np.triu,
            )
            for out in (ctx.zeros(a.descriptor), a):
                assert pb.linalg.cholesky(a, lower, out=out) is out
                assert (asked[-1] is not None) == isinstance(lower, bool)
                assert np.allclose(of(out.allgather()), expected, rtol=1e-4, atol=1e-4)
    runs = len(asked)
    bad = ctx.scatter(np.diag([1.0, 2, -3, 4]).astype(char), block=2)
    with pytest.raises(
        pb.FactorizationError, match=r"cholesky: .* minor of order 3, up to index 2"
    ) as caught:
        pb.linalg.cholesky(bad, out=bad)
    assert caught.value.index == 2
    assert asked[runs:] == [(3, None, None)]
    for wrong in (ctx.zeros((4, 3)), ctx.zeros((4, 4), dtype="f" if char != "f" else "d"), 3.0):
        with pytest.raises(pb.ArgumentError):
            pb.linalg.cholesky(bad, out=wrong)
        assert asked[-1] is None


def test_narrow_blocks_of_a_triangle_are_joined():
    """A rank multiplies many blocks at once: BLAS's product over each of them would copy more than it multiplies."""
    ranks, n, nb = CoreRanks(2), 64, 4
    seen = ranks.products(0)
    x = np.random.default_rng(8).integers(-4, 5, (n, nb)).astype(float)
    a, d = (
        Spread(each, pb.MatrixDescriptor(each.shape, nb, pb.Grid(1, 2), order="F"))
        for each in (x, np.zeros((n, n)))
    )
    for uplo, half in (("L", np.tril), ("U", np.triu)):
        seen.clear()
        parts = [
            [a.part(rank, (0, 0, n, nb, False)), None, None, d.part(rank, (0, 0, n, n, False))]
            for rank in (0, 1)
        ]
        with changed_limits(tiny=0):
            assert {*ranks.run("syrk", parts, words=f"L{uplo}NNN", new=True)} == {"DONE_STAGED"}
        assert np.array_equal(half(d.whole()), half(x @ x.T))
        assert 0 < len(seen) <= n // nb // 2  # no more products than blocks,
        assert max(map(min, seen)) == n // 4  # the largest with half of them
