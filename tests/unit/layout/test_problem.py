# SPDX-License-Identifier: Apache-2.0
"""Products as problems: how many operations they take."""

from pblasmp.layout import Grid, MatmulProblem

GRID = Grid(2, 3)


def test_flops():
    assert MatmulProblem.gemm(40, 30, 20, GRID, 4, op_a="T").flops == 2 * 40 * 30 * 20
    assert MatmulProblem.gemm(40, 30, 20, GRID, 4, dtype="complex64").flops == 8 * 40 * 30 * 20
    huge = MatmulProblem.gemm(10**9, 10**9, 10**9, GRID, 4)
    assert huge.flops == 2 * 10**27
    assert huge.faults() == []
