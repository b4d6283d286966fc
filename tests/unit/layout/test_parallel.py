# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products as values, and the matrix products that they are."""

from dataclasses import replace

import pytest

from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.layout import Grid, MatmulProblem, MatrixDescriptor, ParallelProblem

F32, E4 = DTYPES["float32"], FLOAT8["float8_e4m3fn"]


def parallel(form, tokens, inputs, outputs, rows=None, **more):
    """A product of float32."""
    rows = rows or ((sum(tokens),) * len(tokens) if form == "allgather_matmul" else tokens)
    return ParallelProblem(form, tokens, inputs, outputs, rows, F32, F32, F32, **more)


AG = parallel("allgather_matmul", (2, 2), (5, 5), (3, 3))
RS = parallel("matmul_reduce_scatter", (4, 4), (5, 5), (6, 6), (2, 2))
AR = parallel("matmul_allreduce", (4, 4), (5, 5), (6, 6))
OUT = parallel("matmul_allgather", (4, 4), (5, 5), (3, 3))
MAKERS = {
    "allgather_matmul": MatmulProblem.allgather_matmul,
    "matmul_reduce_scatter": MatmulProblem.matmul_reduce_scatter,
    "matmul_allreduce": MatmulProblem.matmul_allreduce,
}


# -- of matrix products


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("allgather_matmul", parallel("allgather_matmul", (4, 4), (20, 20), (6, 6))),
        ("matmul_reduce_scatter", parallel("matmul_reduce_scatter", (8, 8), (10, 10), (12, 12), (4, 4))),
        ("matmul_allreduce", parallel("matmul_allreduce", (8, 8), (10, 10), (12, 12))),
    ],
)
def test_schemes_of_c_ordered_matrices(scheme, expected):
    """X in C order and W as outputs x inputs: the arrays are those of the tensor-parallel functions."""
    p = MAKERS[scheme](8, 12, 20, 2, "N", "T", order="C", dtype="float32")
    assert ParallelProblem.of_matmul(p) == expected
    assert ParallelProblem.of_matmul(replace(p, b=p.b.T, op_b="N")) == replace(expected, transposed="w")


def test_matrix_products_that_have_no_such_form():
    def why(p):
        found = ParallelProblem.of_matmul(p)
        assert isinstance(found, str)
        return found

    assert "for the layouts of the schemes" in why(MatmulProblem.gemm(8, 8, 8, Grid(2, 2), 2))
    gathered = MatmulProblem.allgather_matmul(8, 12, 20, 2, "T", "T", order="C", dtype="float32")
    assert why(gathered) == "X is gathered by rows, which are not contiguous in memory"
    in_rows = replace(gathered, a=replace(gathered.a, order="F"))
    assert ParallelProblem.of_matmul(in_rows).transposed == "x"
    summed = MatmulProblem.matmul_allreduce(8, 12, 20, 2, "N", "T", order="C", dtype="float32")
    assert "C may differ from rank to rank" in why(replace(summed, c=summed.d))
    eight = MatmulProblem.matmul_reduce_scatter(32, 32, 32, 2, "N", "N", order="C", dtype=E4)
    assert why(eight) == "8-bit weights are outputs x inputs in memory"


# -- as matrix products


@pytest.mark.parametrize(
    ("p", "words"),
    [
        (OUT, "it has no scheme: every rank computes columns of the result"),
        (replace(AG, return_gathered=True), "it does not return the gathered X"),
        (replace(AG, tokens=(3, 1)), "4 tokens are [3, 1] on the ranks"),
        (replace(AG, outputs=(2, 4)), "6 outputs are [2, 4] on the ranks"),
        (replace(RS, inputs=(6, 4)), "10 inputs are [6, 4] on the ranks"),
        (replace(RS, rows=(3, 1)), "4 tokens are [3, 1] on the ranks"),
        (replace(AR, outputs_first=False), "weights are inputs x outputs in memory"),
        (replace(AR, c_dtype=F32), "C is added once"),
        (
            replace(RS, dtype=E4, w_dtype=E4, inputs=(16, 16), row_bytes=(("x", (17, 17)),), tokens=(32, 32),
                    rows=(16, 16), outputs=(16, 16)),
            "cuBLASMp does not take it: x: rows are 17 bytes apart, expected a multiple of 16",
        ),
    ],
)  # fmt: skip
def test_what_no_scheme_has(p, words):
    assert words in p.as_scheme()


@pytest.mark.parametrize(
    ("p", "words"),
    [
        (OUT, "every rank gets all of the result, which is not a block-cyclic layout"),
        (AR, "see the algorithms that sum partial products"),
        (replace(AG, return_gathered=True), "it does not return the gathered X"),
        (replace(AG, outputs=(2, 4)), "outputs are [2, 4] on the ranks, expected [3, 3]"),
        (replace(RS, inputs=(4, 6)), "inputs are [4, 6] on the ranks, expected [5, 5]"),
    ],
)
def test_what_has_no_layout_of_blocks(p, words):
    assert words in p.as_gemm()


@pytest.mark.parametrize("outputs_first", [True, False])
def test_as_gemm_and_allreduce(outputs_first):
    p = parallel("matmul_allreduce", (4, 4), (3, 2), (6, 6), outputs_first=outputs_first, c_dtype=F32)
    found = p.as_allreduce()
    assert (found.scheme, found.op_b) == ("matmul_allreduce", "T" if outputs_first else "N")
    assert [found.a.local_shape(rank) for rank in range(2)] == [(4, 3), (4, 2)]
    shapes = [(6, 3), (6, 2)] if outputs_first else [(3, 6), (2, 6)]
    assert [found.b.local_shape(rank) for rank in range(2)] == shapes
    assert [found.d.local_shape(rank) for rank in range(2)] == [(4, 6), (4, 6)]
    assert found.c == found.d


def test_what_is_no_gemm_and_allreduce():
    assert AG.as_allreduce() == "its result is not the same on every rank"
    assert "inputs are [2, 8] on the ranks" in replace(AR, inputs=(2, 8)).as_allreduce()


def test_faults_are_told_in_words_of_x_and_w():
    assert ParallelProblem.named("b: dtype is float16, expected float32 like a") == (
        "w: dtype is float16, expected float32 like x"
    )
    assert ParallelProblem.named("d: grid") == "result: grid"
    assert isinstance(AG.as_scheme().a, MatrixDescriptor)
