# SPDX-License-Identifier: Apache-2.0
"""Level-3 problems: every flip against dense NumPy, every fault, what is written, and trapezoids."""

import itertools

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.cli.run import dense, touched
from pblasmp.layout import Trapezoid
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers.level3 import legal_flags, shapes

M, N, K = 4, 3, 5
ALPHA, BETA = {"f": (2, -3), "c": (2 + 1j, -3 + 2j)}, {"f": (-1, 0), "c": (1 - 2j, 0)}


def described(shape, order, dtype):
    return pb.MatrixDescriptor(shape, (2, 2), pb.Grid(2, 3), dtype=dtype, order=order)


def memory(values, order):
    """The memory of a matrix of this order, read as column-major: BLAS's view of it."""
    return values if order == "F" else values.T


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_column_major_form_is_the_same_routine(routine, dtype):
    rng = np.random.default_rng(3)
    kind = np.dtype(dtype).kind
    seen = 0
    for flags in legal_flags(routine, dtype):
        for orders in itertools.product("CF", repeat=4):
            order = dict(zip("abcd", orders, strict=True))
            sizes = shapes(routine, flags, M, N, K)
            values = {}
            for name in ROUTINES[routine].operands:
                x = rng.standard_normal(sizes[name])
                values[name] = x + 1j * rng.standard_normal(sizes[name]) if kind == "c" else x
            if "c" in values and routine.startswith("he") and ROUTINES[routine].shape == "updated":
                np.fill_diagonal(values["c"], values["c"].diagonal().real)
            alpha, beta = ALPHA[kind][seen % 2], BETA[kind][seen % 2]
            if routine in ("herk", "her2k", "herkx"):
                beta = beta.real
                alpha = alpha.real if routine == "herk" else alpha
            seen += 1
            descriptors = {name: described(sizes[name], order[name], dtype) for name in (*values, "d")}
            problem = pb.Level3Problem(routine, **descriptors, **flags)
            problem.validate()
            form = problem.column_major()
            p = form.problem
            assert all(x is None or x.order == "F" for x in (p.a, p.b, p.c, p.d))
            p.validate()
            assert (form.conjugated == "" and not form.conj_alpha) or kind == "c"

            # What is in memory, as the form says it is to be seen.
            arrays = {}
            for name, x in values.items():
                lies = order[name]
                if name in form.relaid:
                    lies = "C" if lies == "F" else "F"
                arrays[name] = memory(x, lies)
            if form.swapped:
                arrays["a"], arrays["b"] = arrays["b"], arrays["a"]
            for name in arrays:
                assert arrays[name].shape == getattr(p, name).shape
                if name in form.conjugated:
                    arrays[name] = arrays[name].conj()
            new_flags = {name: getattr(p, name) for name in ROUTINES[routine].options}
            expected = dense(routine, values, flags, alpha, beta)
            got = dense(routine, arrays, new_flags, np.conj(alpha) if form.conj_alpha else alpha, beta)
            assert np.allclose(memory(got, order["d"]), expected, rtol=1e-10, atol=1e-10, equal_nan=True), (
                flags, orders,
            )  # fmt: skip
    assert seen >= 2 * 16


def square(order=6, dtype="float64", grid=None, **more):
    return pb.MatrixDescriptor((order, order), (2, 2), grid or pb.Grid(1, 1), dtype=dtype, **more)


A = square()
B = pb.MatrixDescriptor((6, 4), (2, 2), pb.Grid(1, 1))
Z = square(dtype="complex128")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trsm", A, B, B, None, "R"), ["a: shape is 6x6, expected 4x4 for side='R'"]),
        (("trsm", A, B, A), ["b: shape is 6x6, expected 6x4 like d"]),
        (("symm", A, B, B, A), ["c: shape is 6x6, expected 6x4 like d"]),
        (("syrk", A, B), ["d: shape is 6x4, expected a square matrix"]),
        (("syrk", B, square(4)), ["a: shape is 6x4 for op_a='N'", "d has order 6, but d is 4x4"]),
        (("syr2k", A, A, B), ["b: shape is 6x4, expected 6x6 like a"]),
        (("geadd", B, A, None, B), ["a: shape is 6x4, expected 6x6 for op_a='N'", "c: shape is 6x4"]),
        (("trsm", Z, B, B), ["a: dtype is complex128, expected float64 like d"]),
        (("syrk", Z, Z, None, None, "L", "L", "C"), ["op_a: syrk of complex", "'N' and 'T'", "herk's"]),
        (("her2k", Z, Z, Z, None, "L", "L", "T"), ["op_a: her2k of complex", "'N' and 'C'", "syr2k's"]),
    ],
)
def test_faults(arguments, words):
    problem = pb.Level3Problem(*arguments)
    with pytest.raises(pb.LayoutError) as caught:
        problem.validate()
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_faults_at_once():
    problem = pb.Level3Problem("symm", Z, B, A, Z)
    assert len(problem.faults()) == 4
    with pytest.raises(pb.LayoutError, match="this symm has 4 faults: "):
        problem.validate()


def test_any_layout_is_legal():
    grid = pb.Grid(2, 3)
    odd = pb.MatrixDescriptor((6, 6), (5, 3), grid, (1, 2), order="F", lead=(4, 1))
    assert pb.Level3Problem("syrk", odd, A).faults() == []


@pytest.mark.parametrize(
    ("arguments", "flops"),
    [
        (("trsm", A, B, B), 6 * 6 * 4),
        (("symm", square(4), B, B, None, "R"), 2 * 6 * 4 * 4),
        (("syrk", B, A), 6 * 7 * 4),
        (("her2k", Z, Z, Z), 4 * 2 * 6 * 7 * 6),
        (("syrkx", A, A, A), 6 * 7 * 6),
        (("geadd", B, B, None, B), 2 * 6 * 4),
    ],
)
def test_flops(arguments, flops):
    assert pb.Level3Problem(*arguments).flops == flops


def test_what_is_written():
    assert pb.Level3Problem("trsm", A, B, B).written is None
    assert pb.Level3Problem("syrk", A, A, uplo="U").written == Trapezoid("U")
    assert pb.Level3Problem("geadd", A, A, None, A).written is None


@pytest.mark.parametrize("routine", ROUTINES)
def test_what_is_touched(routine):
    for flags in legal_flags(routine, "complex128"):
        sizes = shapes(routine, flags, M, N, K)
        names = [*ROUTINES[routine].operands, "d"]
        descriptors = {name: described(sizes[name], "C", "complex128") for name in names}
        problem = pb.Level3Problem(routine, **descriptors, **flags)
        for name in names:
            part, expected = problem.touched(name), np.ones(sizes[name], bool)
            if name != "b":
                expected = touched(routine, name, flags, sizes[name])
            found = np.ones_like(expected) if part is None else part.mask(*map(np.arange, sizes[name]))
            assert np.array_equal(found, expected), (name, flags)


@pytest.mark.parametrize(
    ("shape", "uplo", "diag", "expected"),
    [
        ((3, 3), "L", "N", ["x..", "xx.", "xxx"]),
        ((3, 3), "U", "U", [".xx", "..x", "..."]),
        ((2, 4), "L", "N", ["xxx.", "xxxx"]),
        ((4, 2), "U", "N", ["xx", "xx", "xx", ".x"]),
        ((4, 2), "L", "U", ["..", "x.", "xx", "xx"]),
        ((2, 4), "U", "U", [".xxx", "..xx"]),
    ],
)
def test_trapezoids_of_trmr2d(shape, uplo, diag, expected):
    mask = Trapezoid.of_shape(shape, uplo, diag).mask(np.arange(shape[0]), np.arange(shape[1]))
    assert ["".join(".x"[int(x)] for x in row) for row in mask] == expected
