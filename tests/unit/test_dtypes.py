# SPDX-License-Identifier: Apache-2.0
"""The table of element types: names, limits, what BLAS, CUDA kernels and NCCL know of each; which scalars fit."""

import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from pblasmp.bindings import DataType
from pblasmp.dtypes import DTYPES, ELEMENT_TYPES, FLOAT8, accumulation_dtype, as_dtype, element_type, scalar
from pblasmp.engines.gpu.kernels.kernels import CUDA_TYPES
from pblasmp.engines.gpu.runtime.nccl import NCCL_TYPES
from pblasmp.errors import ArgumentError

NAMES = ["float64", "float32", "complex128", "complex64", "float16", "bfloat16"]


def test_names():
    assert list(DTYPES) == NAMES
    assert [dtype.name for dtype in DTYPES.values()] == NAMES
    assert [dtype.itemsize for dtype in DTYPES.values()] == [8, 4, 16, 8, 2, 2]


def test_the_table_is_whole():
    assert ELEMENT_TYPES.keys() == DTYPES.keys() | FLOAT8.keys()
    for name, row in ELEMENT_TYPES.items():
        assert element_type(as_dtype(name)) is row
        assert row.name == name
        assert ELEMENT_TYPES[row.accumulation].blas, "products are summed by BLAS"
        assert element_type(DTYPES[row.accumulation]).accumulation == row.accumulation
        assert row.roundoff < row.tolerance < 1
        assert row.storage == "" or np.dtype(row.storage).itemsize == row.dtype.itemsize
    assert len({DataType[row.cuda] for row in ELEMENT_TYPES.values()}) == len(ELEMENT_TYPES)


def test_kernels_and_nccl_know_every_type():
    assert {dtype.name for dtype in CUDA_TYPES} == NCCL_TYPES.keys() == ELEMENT_TYPES.keys()


def test_blas_has_its_four_letters():
    assert {row.blas: row.name for row in ELEMENT_TYPES.values() if row.blas} == {
        "s": "float32", "d": "float64", "c": "complex64", "z": "complex128",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "largest", "roundoff", "smallest"),
    [
        ("float8_e4m3fn", 448.0, 2.0**-4, 2.0**-9),
        ("float8_e5m2", 57344.0, 2.0**-3, 2.0**-16),
        ("bfloat16", 2.0**128 - 2.0**120, 2.0**-8, 2.0**-133),
        ("float16", 65504.0, 2.0**-11, 2.0**-24),
        ("float64", sys.float_info.max, 2.0**-53, 5e-324),
        ("complex64", 2.0**128 - 2.0**104, 2.0**-24, 2.0**-149),
    ],
)
def test_limits(name, largest, roundoff, smallest):
    row = ELEMENT_TYPES[name]
    assert (row.largest, row.roundoff, row.smallest) == (largest, roundoff, smallest)


@pytest.mark.parametrize("name", NAMES)
def test_a_type_may_be_given_in_any_of_numpys_ways(name):
    dtype = DTYPES[name]
    for given in (name, dtype, dtype.type, np.zeros(1, dtype).dtype):
        assert as_dtype(given) is dtype


def test_other_spellings():
    assert as_dtype(float) is as_dtype("f8") is as_dtype("double") is DTYPES["float64"]
    assert as_dtype(complex) is as_dtype("<c16") is DTYPES["complex128"]
    assert as_dtype(np.half) is DTYPES["float16"]
    assert as_dtype(ml_dtypes.bfloat16) is DTYPES["bfloat16"]


@pytest.mark.parametrize(
    "given",
    [
        int,
        bool,
        object,
        "int64",
        "longdouble",
        "S8",
        ">f8",
        ">c8",
        "float8_e4m3",
        ml_dtypes.float8_e4m3fnuz,
        "bf16",
        "float 64",
        "",
        ",",
        "f8,,",
        "f8,f4",
        "(2,)f8",
        3,
        [("x", "f8")],
        {"names": 1},
    ],
)
def test_unsupported_types_are_refused(given):
    with pytest.raises(ArgumentError) as error:
        as_dtype(given)
    assert str(error.value) == f"dtype {given!s} is not supported: expected one of {', '.join(ELEMENT_TYPES)}"


def test_sixteen_bits_are_summed_in_float32():
    sums = ["float64", "float32", "complex128", "complex64", "float32", "float32"]
    assert [accumulation_dtype(dtype).name for dtype in DTYPES.values()] == sums


@pytest.mark.parametrize("value", [2, 2.0, 2 + 0j, np.float32(2), np.int8(2), np.array(2.0), Fraction(2)])
@pytest.mark.parametrize("name", NAMES)
def test_scalars(name, value):
    number = scalar(value, DTYPES[name], "alpha")
    assert number == 2
    assert type(number) is (complex if name.startswith("complex") else float)


def test_the_scalar_may_be_of_the_matrices_type():
    assert scalar(ml_dtypes.bfloat16(0.5), DTYPES["bfloat16"], "alpha") == 0.5
    assert scalar(np.complex64(1 - 2j), DTYPES["complex64"], "alpha") == 1 - 2j


def test_a_complex_scalar_needs_complex_matrices():
    assert scalar(1j, DTYPES["complex128"], "beta") == 1j
    with pytest.raises(ArgumentError, match=r"^beta: 1j is complex, but the matrices are float32$"):
        scalar(1j, DTYPES["float32"], "beta")


class Copied:
    """As distributed matrices, it has a unary plus, in which all ranks take part."""

    def __pos__(self):
        raise AssertionError("it was copied")

    def __repr__(self):
        return "Copied()"


@pytest.mark.parametrize(
    "value", ["2", np.str_("2"), "x", None, [1], np.ones(2), 10**400, Copied()], ids=repr
)
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ArgumentError, match=r"^alpha: expected a number, got "):
        scalar(value, DTYPES["complex128"], "alpha")
