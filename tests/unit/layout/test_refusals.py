# SPDX-License-Identifier: Apache-2.0
"""What is no layout and no problem: each wrong value is refused with its name, and what was expected and given."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.errors import ArgumentError, LayoutError
from pblasmp.layout import Axis, Grid, MatmulProblem, MatrixDescriptor, as_block, as_grid
from tests.helpers.schemes import MAKERS

PAIR, NO_GRID = (
    "expected a pair of integers, (n, 1) for a vector, got",
    "expected a Grid, a pair like (2, 3) or a text",
)
ORDERS, OPS = "order: expected 'C', 'F' or three of these letters, got", "expected 'N', 'T' or 'C', got"
FORMS, LETTERS = "form: expected one of allgather_matmul", "expected '', 'x', 'w' or 'xw', got"
A, B = (MatrixDescriptor((6, cols), (2, 2), Grid(1, 1)) for cols in (6, 4))


def described(**how):
    return MatrixDescriptor(**{"shape": (10, 20), "block": (3, 4), "grid": Grid(2, 3)} | how)


def gemm(m=4, n=3, k=2, grid=(2, 3), block=1, **how):
    return MatmulProblem.gemm(m, n, k, grid, block, **how)


def matmul(**how):
    return replace(gemm(), **how)


def factored(**how):
    return pb.FactorProblem(**{"routine": "lu", "a": MatrixDescriptor((4, 4), 2, "1x1")} | how)


def parallel(**how):
    sizes = dict.fromkeys(("tokens", "inputs", "outputs", "rows"), (4,))
    types = dict.fromkeys(("dtype", "w_dtype", "out_dtype"), np.dtype("float32"))
    return pb.ParallelProblem(**{"form": "matmul_allreduce"} | sizes | types | how)


def level3(routine="trsm", a=A, b=None, d=A, **how):
    return pb.Level3Problem(routine, a=a, b=b, d=d, **how)


def scalapack(*desc):
    return MatrixDescriptor.from_scalapack(desc, Grid(2, 3))


def to_scalapack(**how):
    made = replace(MatrixDescriptor((5, 5), (1, 1), Grid(1, 1), order="F"), **how)
    return made.to_scalapack(0)


AXIS, GRID, D = Axis(10, 2, 0, 3), Grid(2, 3), MatrixDescriptor((10, 20), (3, 4), Grid(3, 2), (2, 0))

# Of each call, what its error says, from the first word on; a call that is followed by values is made with each.
CALLS = [
    # -- axes and grids
    (lambda: Axis(-1, 1, 0, 1), "extent: expected at least 0, got -1"),
    (lambda: Axis(4, 0, 0, 1), "block: expected at least 1, got 0"),
    (lambda: Axis(4, 2, -1, 2), "source: expected at least 0, got -1"),
    (lambda: Axis(4, 2, 2, 2), "source: process 2 is not among 2 processes"),
    (lambda: Axis(4, 2, 0, 0), "nprocs: expected at least 1, got 0"),
    (lambda: Axis(4, 2, 0, 1, 2), "lead: 2 is not inside a block of 2"),
    (lambda: Axis(4, 2, 0, 1, -1), "lead: expected at least 0, got -1"),
    (lambda: Axis(4.0, 2, 0, 1), "extent: expected an integer, got 4.0"),
    (lambda: Axis(4, "2", 0, 1), "block: expected an integer, got '2'"),
    (lambda: AXIS.owner(10), "index 10 is out of range: the extent is 10"),
    (lambda: AXIS.local(-1), "index: expected at least 0, got -1"),
    (lambda: AXIS.owner(1.5), "index: expected an integer, got 1.5"),
    (lambda: AXIS.count(3), "process 3 is not among 3 processes"),
    (lambda: AXIS.globals(-1), "process: expected at least 0, got -1"),
    (lambda: AXIS.blocks(3), "process 3 is not among 3 processes"),
    (lambda: AXIS.to_global(0, 4), "local index 4 is out of range: process 0 owns 4"),
    (lambda: AXIS.to_global(0, -1), "local index: expected at least 0, got -1"),
    (lambda: AXIS.window(3, 2), "range 3:2 is not inside 0:10"),
    (lambda: AXIS.window(-1, 2), "range -1:2 is not inside 0:10"),
    (lambda: AXIS.window(3, 11), "range 3:11 is not inside 0:10"),
    (lambda: Grid(0, 1), "grid nprow: expected at least 1, got 0"),
    (lambda: Grid(1, -2), "grid npcol: expected at least 1, got -2"),
    (lambda: Grid(1.0, 1), "grid nprow: expected an integer, got 1.0"),
    (lambda: Grid(1, 1, "C"), "grid order: expected 'row' or 'col', got 'C'"),
    (lambda: Grid.squarest(0), "nranks: expected at least 1, got 0"),
    (lambda: GRID.coords(6), "rank 6 is not in a grid of 2x3 processes in row order: expected 0 to 5"),
    (lambda: GRID.coords(-1), "rank: expected at least 0, got -1"),
    (lambda: GRID.rank(2, 0), "process (2, 0) is not in a grid of 2x3 processes in row order"),
    (lambda: GRID.rank(0, 3), "process (0, 3) is not in a grid of 2x3 processes in row order"),
    (lambda: GRID.rank(0, -1), "pcol: expected at least 0, got -1"),
    *((partial(as_grid, given, "layout"), f"layout: {NO_GRID} like '2x3', got ")
      for given in ("2", "2x", "0x3", "2x3x4", "2x-3", " 2x3", "2x3-diag", "", 4, None, (2,), (1, 2, 3), b"23")),
    (lambda: as_grid((0, 1), "layout"), "layout[0]: expected at least 1, got 0"),
    (lambda: as_grid((1, 2.5), "layout"), "layout[1]: expected an integer, got 2.5"),
    (lambda: as_grid(("2", "3"), "layout"), "layout[0]: expected an integer, got '2'"),
    (lambda: as_block(0, "nb"), "nb: expected at least 1, got 0"),
    (lambda: as_block((3, -1), "nb"), "nb[1]: expected at least 1, got -1"),
    (lambda: as_block(2.5, "nb"), "nb: expected an integer or a pair of integers, got 2.5"),
    (lambda: as_block((1, 2, 3), "nb"), "nb: expected an integer or a pair of integers, got (1, 2, 3)"),
    (lambda: as_block(("4", 4), "nb"), "nb[0]: expected an integer, got '4'"),
    (lambda: as_block(None, "nb"), "nb: expected an integer or a pair of integers, got None"),
    # -- descriptors
    (lambda: described(shape=(3,)), f"shape: {PAIR} (3,)"),
    (lambda: described(shape=3), f"shape: {PAIR} 3"),
    (lambda: described(shape=(3, -1)), "shape[1]: expected at least 0, got -1"),
    (lambda: described(shape=(3.5, 1)), "shape[0]: expected an integer, got 3.5"),
    (lambda: described(shape=(10**5000, 1)), "shape[0]: expected at most 10**100, got a value of type int that is too"),
    (lambda: described(block=(0, 1)), "block[0]: expected at least 1, got 0"),
    (lambda: described(block="64"), "block: expected an integer or a pair of integers, got '64'"),
    (lambda: described(grid="2"), f"grid: {NO_GRID} like '2x3', got '2'"),
    (lambda: described(source=(2, 0)), "source: process (2, 0) is not in a grid of 2x3 processes in row order"),
    (lambda: described(source=(0, 3)), "source: process (0, 3) is not in a grid of 2x3 processes in row order"),
    (lambda: described(source=(0, -1)), "source[1]: expected at least 0, got -1"),
    (lambda: described(order="row"), "order: expected 'C' or 'F', got 'row'"),
    (lambda: described(lead=(3, 0)), "lead: (3, 0) is not inside a block of (3, 4)"),
    (lambda: described(lead=(0, 4)), "lead: (0, 4) is not inside a block of (3, 4)"),
    (lambda: described(lead=(0, -1)), "lead[1]: expected at least 0, got -1"),
    (lambda: described(ld=0), "ld: expected at least 1, got 0"),
    (lambda: described(ld=7), "ld: 7 is too small: the local arrays are up to 8 columns wide"),
    (lambda: described(ld=5, order="F"), "ld: 5 is too small: the local arrays are up to 6 rows high"),
    (lambda: described(dtype="int64"), "dtype int64 is not supported: expected one of float64, "),
    (lambda: MatrixDescriptor((5, 1), (4, 1), Grid(3, 1), order="F", lead=(3, 0), ld=3),  # that of the second process
     "ld: 3 is too small: the local arrays are up to 4 rows high"),
    (lambda: D.owner(10, 0), "index 10 is out of range: the extent is 10"),
    (lambda: D.owner(0, 20), "index 20 is out of range: the extent is 20"),
    (lambda: D.to_local(-1, 0), "index: expected at least 0, got -1"),
    (lambda: D.to_global(3, 3, 0), "local index 3 is out of range: process 1 owns 3"),
    (lambda: D.to_global(6, 0, 0), "rank 6 is not in a grid of 3x2 processes in row order: expected 0 to 5"),
    (lambda: D.local_shape(6), "rank 6 is not in a grid of 3x2 processes in row order: expected 0 to 5"),
    (lambda: D.lld(-1), "rank: expected at least 0, got -1"),
    (lambda: D.global_indices("0"), "rank: expected an integer, got '0'"),
    *((partial(D.__getitem__, index), "index: expected integers or slices, such as A[3, 4], ") for index in
      ((0, 0, 0), True, (np.True_, 0), None, [3], 1.0, "3", (..., ...), (..., 1, 2, 3), np.arange(2))),
    (lambda: D[10], "index: row 10 is out of range: the matrix has 10 rows"),
    (lambda: D[0, -21], "index: column -21 is out of range: the matrix has 20 columns"),
    (lambda: D[::2, :], "a sub-matrix has step 1, got slice"),
    (lambda: D[::-1, :], "a sub-matrix has step 1, got slice"),
    (lambda: D[0.5:2, :], "a sub-matrix begins and ends at integers, got slice(0.5, 2, None)"),
    # -- ScaLAPACK's
    (lambda: scalapack(1, 0, 9, 8, 2, 3, 0, 0), "a ScaLAPACK descriptor has 9 integers, got 8"),
    (lambda: scalapack(1, 0, 9, 8, 2, 3, 0, 0, 5, 0), "a ScaLAPACK descriptor has 9 integers, got 10"),
    (lambda: scalapack(501, 0, 9, 8, 2, 3, 0, 0, 5), "desc[0]: expected 1 (a dense block-cyclic matrix), got 501"),
    (lambda: scalapack(1, 0, -1, 8, 2, 3, 0, 0, 5), "shape[0]: expected at least 0, got -1"),
    (lambda: scalapack(1, 0, 9, -1, 2, 3, 0, 0, 5), "shape[1]: expected at least 0, got -1"),
    (lambda: scalapack(1, 0, 9, 8, 0, 3, 0, 0, 5), "block[0]: expected at least 1, got 0"),
    (lambda: scalapack(1, 0, 9, 8, 2, 0, 0, 0, 5), "block[1]: expected at least 1, got 0"),
    (lambda: scalapack(1, 0, 9, 8, 2, 3, 2, 0, 5), "source: process (2, 0) is not in a grid of 2x3 processes in row"),
    (lambda: scalapack(1, 0, 9, 8, 2, 3, 0, -1, 5), "source[1]: expected at least 0, got -1"),
    (lambda: scalapack(1, 0, 9, 8, 2, 3, 0, 0, 0), "ld: expected at least 1, got 0"),
    (lambda: scalapack(1, 0, 9, 8, 2, 3, 0, 0, 3), "ld: 3 is too small: the local arrays are up to 5 rows high"),
    (lambda: scalapack(1, 0, 9.0, 8, 2, 3, 0, 0, 5), "desc[2]: expected an integer, got 9.0"),
    (lambda: MatrixDescriptor.from_scalapack(7, GRID), "desc: expected 9 integers, got 7"),
    (lambda: MatrixDescriptor.from_scalapack(np.array(7), GRID), "desc: expected 9 integers, got array(7)"),
    *((partial(to_scalapack, **how), "a ScaLAPACK descriptor holds 32-bit integers, got 2147483648") for how in
      ({"shape": (2**31, 1)}, {"shape": (1, 2**31)}, {"block": (2**31, 1)}, {"block": (1, 2**31)}, {"ld": 2**31})),
    # -- problems
    (lambda: gemm(m=-4), "m: expected at least 0, got -4"),
    (lambda: gemm(n=3.0), "n: expected an integer, got 3.0"),
    (lambda: gemm(k=-1), "k: expected at least 0, got -1"),
    (lambda: gemm(block=0), "block[0]: expected at least 1, got 0"),
    (lambda: gemm(block=(1, 2, 3, 4)), "block: expected one, two or three integers, got (1, 2, 3, 4)"),
    (lambda: gemm(block=(1,)), "block: expected one, two or three integers, got (1,)"),
    (lambda: gemm(grid="2"), f"grid: {NO_GRID} like '2x3', got '2'"),
    *((partial(gemm, order=given), f"{ORDERS} {given!r}") for given in ("CF", "K", 7, "")),
    (lambda: gemm(op_a="t"), f"op_a: {OPS} 't'"),
    (lambda: gemm(op_b="H"), f"op_b: {OPS} 'H'"),
    (lambda: gemm(op_b=np.zeros(2)), f"op_b: {OPS} array("),
    (lambda: matmul(a=None), "a: expected a MatrixDescriptor, got None"),
    (lambda: matmul(b=3), "b: expected a MatrixDescriptor, got 3"),
    (lambda: matmul(d=None), "d: expected a MatrixDescriptor, got None"),
    (lambda: matmul(c="c"), "c: expected a MatrixDescriptor, got 'c'"),
    (lambda: matmul(op_a=None), f"op_a: {OPS} None"),
    (lambda: matmul(scheme="allgather"), "scheme: expected one of 'gemm', 'allgather_matmul', "),
    *((partial(make, *given, **how), words) for make in MAKERS.values() for *given, how, words in (
        (8, 8, 8, 0, {}, "nranks: expected at least 1, got 0"),
        (-8, 8, 8, 4, {}, "m: expected at least 0, got -8"),
        (-8, 8, 8, 4, {"order": "F"}, "m: expected at least 0, got -8"),
        (8, 8, 8.0, 4, {}, "k: expected an integer, got 8.0"),
        (8, 8, 8, 4, {"order": "R"}, "order: expected 'C' or 'F', got 'R'"),
        (8, 8, 8, 4, {"dtype": "int8"}, "dtype int8 is not supported: "),
    )),
    (lambda: factored(routine="potrf"), "routine: expected one of cholesky, lu, qr, "),
    (lambda: factored(routine=None), "routine: expected one of cholesky, "),
    (lambda: factored(routine=["lu"]), "routine: expected one of"),
    (lambda: factored(op="H"), "op: expected one of N, T, C, got 'H'"),
    (lambda: factored(op=1), "op: expected one of N, T, C, got 1"),
    (lambda: factored(a=None), "a: expected a MatrixDescriptor, got None"),
    (lambda: factored(b=(4, 4)), "b: expected a MatrixDescriptor, got (4, 4)"),
    (lambda: parallel(form="gemm"), FORMS),
    (lambda: parallel(form=None), FORMS),
    (lambda: parallel(transposed="a"), f"transposed: {LETTERS} 'a'"),
    (lambda: parallel(conjugated=True), f"conjugated: {LETTERS} True"),
    (lambda: level3("gemm"), "routine: expected one of trsm"),
    (lambda: level3(b=B, d=B, side="X"), "side: expected 'L' or 'R', got 'X'"),
    (lambda: level3(b=B, d=B, uplo="l"), "uplo: expected 'L' or 'U', got 'l'"),
    (lambda: level3(b=B, d=B, op_a="H"), "op_a: expected 'N', 'T' or 'C'"),
    (lambda: level3(b=B, d=B, diag=1), "diag: expected 'N' or 'U', got 1"),
    (lambda: level3("syrk", uplo=np.array(["L", "U"])), "uplo: expected 'L' or 'U', got array("),
    (lambda: level3("syrk", side="R"), "side: syrk has no such option"),
    (lambda: level3("symm", b=B, d=B, op_a="T"), "op_a: symm has no such option"),
    (lambda: level3("syrk", b=A), "b: syrk has no such operand"),
    (lambda: level3("trmm", d=B), "b: expected a MatrixDescriptor, got None"),
    (lambda: level3("trmm", a="A", b=B, d=B), "a: expected a MatrixDescriptor, got 'A'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_each_wrong_value_is_named(call, words):
    with pytest.raises(ArgumentError) as error:
        call()
    assert str(error.value).startswith(words)


@pytest.mark.parametrize("call", [
    lambda: GRID.coords(6), lambda: GRID.rank(0, -1), lambda: D[10], lambda: D[0, -21], lambda: D[::2, :],
    lambda: D[0.5:2, :], lambda: D[None],
])  # fmt: skip
def test_an_index_out_of_range_is_no_fault_of_the_layout(call):
    with pytest.raises(ArgumentError) as error:
        call()
    assert not isinstance(error.value, LayoutError)
