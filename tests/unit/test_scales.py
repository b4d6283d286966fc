# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit floats as plain values: types, layouts, pb.Scales. No MPI."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import FLOAT8, accumulation_dtype, as_dtype, is_float8
from pblasmp.epilogue import block_scales
from pblasmp.layout import Level3Problem

GRID = pb.Grid(2, 2)
E4, E5 = "float8_e4m3fn", "float8_e5m2"


def problem(a: str = E4, b: str = E4, d: str | None = None, **how: Any) -> pb.MatmulProblem:
    how = {"block": 16, "op_b": "T", "grid": GRID} | how
    p = pb.MatmulProblem.gemm(32, 64, 48, dtype=a, out_dtype=d, **how)
    return replace(p, b=replace(p.b, dtype=b))


@pytest.mark.parametrize("name", FLOAT8)
def test_the_types(name):
    dtype = as_dtype(name)
    assert (dtype.name, dtype.itemsize, is_float8(dtype)) == (name, 1, True)
    assert as_dtype(dtype) is dtype
    assert accumulation_dtype(dtype) == np.float32
    assert not is_float8(np.dtype(np.uint8))


def test_which_types_go_together():
    outs = ("bfloat16", "float16", "float32", E4, E5, "float64")
    for a, b, d in itertools.product((E4, E5), (E4, E5), outs):
        legal = (a, b) != (E5, E5) and d != "float64" and (d != E5 or E5 in (a, b))
        assert (problem(a, b, d).faults() == []) == legal, (a, b, d)
    assert problem(E5, E5).faults() == [
        "b: dtype is float8_e5m2 like a, expected float8_e4m3fn for one of them"
    ]
    assert problem(E4, "float16").faults() == [
        "b: dtype is float16, expected an 8-bit float like the other operand"
    ]
    assert (
        "d: dtype is float64, expected bfloat16, float16, float32, float8_e4m3fn for"
        in problem(d="float64").faults()[0]
    )


def test_k_must_be_contiguous():
    for ops, order in itertools.product(("NN", "NT", "TN", "TT"), ("CCC", "FFF", "CFC", "FCF")):
        p = problem(op_a=ops[0], op_b=ops[1], order=order)
        contiguous = (ops[0] == "N") == (order[0] == "C") and (ops[1] == "T") == (order[1] == "C")
        assert (p.faults() == []) == contiguous, (ops, order)
    (fault,) = problem(op_b="N").faults()
    assert fault == (
        "ops: 8-bit operands have k contiguous in memory (TN in column-major terms), got NN: "
        "in C order op_a='N' and op_b='T'"
    )


def test_extents_are_multiples_of_sixteen():
    p = pb.MatmulProblem.gemm(32, 64, 40, GRID, (16, 16, 20), op_b="T", dtype=E4)
    assert p.faults() == [
        "a: has 40 columns in blocks of 20, expected multiples of 16 for 8-bit operands",
        "b: has 40 columns in blocks of 20, expected multiples of 16 for 8-bit operands",
    ]
    assert pb.MatmulProblem.gemm(32, 64, 48, pb.Grid(1, 1), 7, op_b="T", dtype=E4).faults() == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", E4])
def test_only_products_have_short_types(dtype):
    x = pb.MatrixDescriptor((32, 32), (16, 16), GRID, dtype=dtype)
    (fault,) = [fault for fault in Level3Problem("syrk", x, x).faults() if "dtype" in fault]
    assert fault == (
        f"d: dtype is {dtype}, which syrk does not have, expected one of float64, float32, complex128, complex64"
    )
    faults = [fault for fault in Level3Problem("geadd", x, x).faults() if "dtype" in fault]
    assert len(faults) == (dtype == E4)


def test_c_has_sixteen_bits():
    p = problem(d=E4)
    for name, legal in (("bfloat16", True), ("float16", True), ("float32", False), (E4, False)):
        assert (replace(p, c=replace(p.d, dtype=name)).faults() == []) == legal
    assert replace(p, c=replace(p.d, dtype=E4)).faults() == [
        "c: dtype is float8_e4m3fn, expected bfloat16 or float16 for a D of 8 bits"
    ]
    turned = replace(p, c=replace(p.d, dtype="float16", order="F"))
    assert turned.faults() == ["c: is in F order, expected C order like a D of 8 bits"]


def bound(scales: pb.Scales, p: pb.MatmulProblem) -> pb.Scales:
    return scales.bind(lambda array: array, p, 0)


@pytest.mark.parametrize("value", [np.nan, np.float32(np.inf), 1e39, 10**400, 1j, np.complex64(2 + 1j)])
def test_numbers_that_float32_cannot_hold(value):
    with pytest.raises(
        pb.ArgumentError, match=r"scales: b is .*, expected a finite number that float32 can hold"
    ):
        pb.Scales(b=value)


def test_amax_is_no_number():
    for value in (0.0, np.float32(0), 1):
        with pytest.raises(pb.ArgumentError, match="expected an array to write it to"):
            pb.Scales(amax=value)


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"mode": "rows"}, "mode is 'rows', expected 'tensor' or 'block'"),
        ({"mode": ["tensor"]}, "mode is ['tensor'], expected 'tensor' or 'block'"),
        ({"amax": 0.0}, "amax is 0.0, expected an array to write it to"),
        ({"a": float("nan")}, "a is nan, expected a finite number"),
        ({"mode": "block", "a": 1.0, "b": np.ones(1)}, "a is 1.0, expected an array of bytes"),
        ({"mode": "block", "a": np.ones(1)}, "mode 'block' needs a and b, and has no d"),
        ({"mode": "block", "a": np.ones(1), "b": np.ones(1), "d": np.ones(1)}, "needs a and b, and has no d"),
    ],
)
def test_scales_that_make_no_sense(scales, words):
    with pytest.raises(pb.ArgumentError) as caught:
        pb.Scales(**scales)
    assert words in str(caught.value)


def test_scales_that_do_not_fit_a_product():
    frozen = np.zeros(1, np.float32)
    frozen.flags.writeable = False
    bytes_ = np.zeros(1, np.uint8)
    blocks = pb.Scales(a=bytes_, b=bytes_, mode="block")
    for scales, p, words in (
        (pb.Scales(a=1.0), pb.MatmulProblem.gemm(4, 4, 4, GRID, 2), "only for 8-bit operands, A is float64"),
        (pb.Scales(d=1.0), problem(), "d: only for an 8-bit D, D is bfloat16"),
        (pb.Scales(a=np.ones(2, np.float32)), problem(), "a: expected 1 float32, got 2 float32"),
        (pb.Scales(amax=np.ones(1)), problem(), "amax: expected 1 float32, got 1 float64"),
        (pb.Scales(amax=frozen), problem(), "amax: is read-only"),
        (blocks, problem(d=E4), "mode 'block' does not take an 8-bit D"),
        (blocks, problem(), "a: expected 512 uint8, got 1 uint8"),
    ):
        with pytest.raises(pb.ArgumentError) as caught:
            bound(scales, p)
        assert words in str(caught.value)


def test_blocks_are_counted_in_whole_tiles():
    assert block_scales((128, 128), False, "a") == 512
    assert block_scales((129, 32), False, "a") == 1024
    assert block_scales((32, 129), True, "a") == 256 * 4
    assert block_scales((256, 100), True, "b") == 256 * 4  # stored n x k
    assert block_scales((100, 256), False, "b") == 256 * 4
