# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.errors import ArgumentError
from pblasmp.layout import Grid, MatmulProblem

GRID = Grid(2, 3)


def test_flops():
    assert MatmulProblem.gemm(40, 30, 20, GRID, 4, op_a="T").flops == 2 * 40 * 30 * 20
    assert MatmulProblem.gemm(40, 30, 20, GRID, 4, dtype="complex64").flops == 8 * 40 * 30 * 20
    huge = MatmulProblem.gemm(10**9, 10**9, 10**9, GRID, 4)
    assert huge.flops == 2 * 10**27
    assert huge.faults() == []


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-4, 3, 2, GRID, 1), {}, "m: expected at least 0, got -4"),
        ((4, 3.0, 2, GRID, 1), {}, "n: expected an integer, got 3.0"),
        ((4, 3, -1, GRID, 1), {}, "k: expected at least 0, got -1"),
        ((4, 3, 2, GRID, 0), {}, "block[0]: expected at least 1, got 0"),
        ((4, 3, 2, GRID, (1, 2, 3, 4)), {}, "block: expected one, two or three integers, got (1, 2, 3, 4)"),
        ((4, 3, 2, GRID, (1,)), {}, "block: expected one, two or three integers, got (1,)"),
        ((4, 3, 2, "2", 1), {}, "grid: expected a Grid, a pair like (2, 3) or a text like '2x3', got '2'"),
        ((4, 3, 2, GRID, 1), {"order": "CF"}, "order: expected 'C', 'F' or three of these letters, got 'CF'"),
        ((4, 3, 2, GRID, 1), {"order": "K"}, "order: expected 'C', 'F' or three of these letters, got 'K'"),
        ((4, 3, 2, GRID, 1), {"order": 7}, "order: expected 'C', 'F' or three of these letters, got 7"),
        ((4, 3, 2, GRID, 1), {"order": ""}, "order: expected 'C', 'F' or three of these letters, got ''"),
        ((4, 3, 2, GRID, 1), {"op_a": "t"}, "op_a: expected 'N', 'T' or 'C', got 't'"),
        ((4, 3, 2, GRID, 1), {"op_b": "H"}, "op_b: expected 'N', 'T' or 'C', got 'H'"),
    ],
)
def test_illegal_arguments_of_gemm(arguments, options, message):
    with pytest.raises(ArgumentError) as error:
        MatmulProblem.gemm(*arguments, **options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": None}, "a: expected a MatrixDescriptor, got None"),
        ({"b": 3}, "b: expected a MatrixDescriptor, got 3"),
        ({"d": None}, "d: expected a MatrixDescriptor, got None"),
        ({"c": "c"}, "c: expected a MatrixDescriptor, got 'c'"),
        ({"op_a": None}, "op_a: expected 'N', 'T' or 'C', got None"),
        (
            {"scheme": "allgather"},
            (
                "scheme: expected one of 'gemm', 'allgather_matmul', 'matmul_reduce_scatter', "
                "'matmul_allreduce', got 'allgather'"
            ),
        ),
    ],
)
def test_operands_of_the_wrong_kind(changes, message):
    with pytest.raises(ArgumentError) as error:
        replace(MatmulProblem.gemm(4, 3, 2, GRID, 1), **changes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"routine": "potrf"}, "routine: expected one of cholesky, lu, qr, .*, got 'potrf'"),
        ({"routine": None}, "routine: expected one of cholesky, .*, got None"),
        ({"routine": ["lu"]}, "routine: expected one of"),
        ({"op": "H"}, "op: expected one of N, T, C, got 'H'"),
        ({"op": 1}, "op: expected one of N, T, C, got 1"),
        ({"a": None}, "a: expected a MatrixDescriptor, got None"),
        ({"b": (4, 4)}, r"b: expected a MatrixDescriptor, got \(4, 4\)"),
    ],
)
def test_a_factorization_that_is_none(how, words):
    with pytest.raises(pb.ArgumentError, match=words):
        pb.FactorProblem(**{"routine": "lu", "a": pb.MatrixDescriptor((4, 4), 2, "1x1"), **how})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"form": "gemm"}, "form: expected one of allgather_matmul, .*, got 'gemm'"),
        ({"form": None}, "form: expected one of"),
        ({"transposed": "a"}, "transposed: expected '', 'x', 'w' or 'xw', got 'a'"),
        ({"conjugated": True}, "conjugated: expected '', 'x', 'w' or 'xw', got True"),
    ],
)
def test_a_tensor_parallel_product_that_is_none(how, words):
    f = np.dtype("float32")
    good = {"form": "matmul_allreduce", "tokens": (4,), "inputs": (4,), "outputs": (4,), "rows": (4,)}
    with pytest.raises(pb.ArgumentError, match=words):
        pb.ParallelProblem(**{**good, "dtype": f, "w_dtype": f, "out_dtype": f, **how})
