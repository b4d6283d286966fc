# SPDX-License-Identifier: Apache-2.0
"""The 1D layouts of AG, RS and AR, against NVIDIA's table as it is written there."""

import pytest

from pblasmp.errors import LayoutError
from pblasmp.layout import Grid, MatmulProblem
from tests.helpers.schemes import AG, AR, MAKERS, RS

PRODUCTS = {AG: ("NN", "TN", "NT", "TT"), RS: ("NN", "TN", "NT", "TT"), AR: ("TN",)}
CASES = [(scheme, ops) for scheme, products in PRODUCTS.items() for ops in products]

SIZES = [(8, 12, 20, 4), (6, 18, 12, 3), (16, 8, 8, 8), (5, 7, 3, 1), (1, 1, 1, 1)]

# Shape, block, grid and leading dimension of every operand by its op, column-major.
# "col" is a P x 1 grid in column order, "row" a 1 x P grid in row order.
TABLE = {
    (AG, "A", "N"): ("m k", "m/P k", "col", "m/P"),
    (AG, "A", "T"): ("k m", "k m/P", "row", "k"),
    (AG, "B", "N"): ("k n", "k n/P", "row", "k"),
    (AG, "B", "T"): ("n k", "n/P k", "col", "n/P"),
    (AG, "D", "N"): ("m n", "m/P n/P", "col", "m/P"),
    (RS, "A", "N"): ("m k", "m k/P", "row", "m"),
    (RS, "A", "T"): ("k m", "k/P m", "col", "k/P"),
    (RS, "B", "N"): ("k n", "k/P n/P", "col", "k/P"),
    (RS, "B", "T"): ("n k", "n/P k/P", "row", "n"),
    (RS, "D", "N"): ("m n", "m n/P", "row", "m"),
    (AR, "A", "T"): ("k m", "k/P m", "col", "k/P"),
    (AR, "B", "N"): ("k n", "k/P n", "col", "k/P"),
    (AR, "D", "N"): ("m n*P", "m n", "row", "m"),
}


def row_of_table(scheme, operand, op, m, n, k, P):
    """Return (shape, block, grid, lld), all of them column-major."""
    values = {"m": m, "n": n, "k": k, "m/P": m // P, "n/P": n // P, "k/P": k // P, "n*P": n * P}
    shape, block, grid, lld = TABLE[scheme, operand, op]
    shape, block = (tuple(values[word] for word in words.split()) for words in (shape, block))
    return shape, block, Grid(P, 1, "col") if grid == "col" else Grid(1, P, "row"), values[lld]


def assert_is(x, row, order):
    shape, block, grid, lld = row
    if order == "C":  # the same memory, named in rows
        shape, block, grid = shape[::-1], block[::-1], grid.T
    assert (x.shape, x.block, x.order) == (shape, block, order)
    assert (x.source, x.lead, x.ld) == ((0, 0), (0, 0), None)
    assert x.grid.same_ranks(grid)
    assert [x.lld(rank) for rank in range(grid.size)] == [lld] * grid.size


@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize(("scheme", "ops"), CASES)
def test_the_table(scheme, ops, order, subtests):
    """In C order D^T = op(B)^T op(A)^T: the table's A is B, its B is A, its m is n and its n is m."""
    for m, n, k, nranks in SIZES:
        with subtests.test(m=m, n=n, k=k, nranks=nranks):
            mine = ops if order == "F" else ops[::-1]
            p = MAKERS[scheme](m, n, k, nranks, *mine, order=order, dtype="float32")
            assert (p.m, p.n, p.k, p.scheme, p.op_a + p.op_b, p.c) == (m, n, k, scheme, mine, None)
            sizes, operands = ((m, n), (p.a, p.b)) if order == "F" else ((n, m), (p.b, p.a))
            for x, operand, op in zip((*operands, p.d), "ABD", (*ops, "N"), strict=True):
                assert_is(x, row_of_table(scheme, operand, op, *sizes, k, nranks), order)
            p.validate()


@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize(("scheme", "sharded"), [(AG, "mn"), (RS, "nk"), (AR, "k")])
def test_what_is_sharded_must_divide(scheme, sharded, order):
    """In C order the sharded n is m and the other way round. The advice given is good."""
    renamed = {"m": "n", "n": "m", "k": "k"} if order == "C" else {"m": "m", "n": "n", "k": "k"}
    ops = "TN" if order == "F" else "NT"
    for name in "mnk":
        sizes = {"m": 8, "n": 12, "k": 20}
        sizes[name] = 10
        if renamed[name] not in sharded:
            MAKERS[scheme](*sizes.values(), 4, *ops, order=order, dtype="float32").validate()
            continue
        with pytest.raises(LayoutError) as error:
            MAKERS[scheme](*sizes.values(), 4, *ops, order=order, dtype="float32")
        assert f"{name} = 10 must be divisible by 4 ranks (nearest: 8 or 12)" in str(error.value)
        for nearest in (8, 12):
            MAKERS[scheme](
                *(sizes | {name: nearest}).values(), 4, *ops, order=order, dtype="float32"
            ).validate()


@pytest.mark.parametrize("ops", ["NN", "NT", "TT", "NC", "CC"])
def test_allreduce_is_tn_only(ops):
    with pytest.raises(
        LayoutError,
        match=r"scheme 'matmul_allreduce': GEMM \+ AllReduce exists for TN in column-major terms, got ",
    ):
        MatmulProblem.matmul_allreduce(8, 12, 20, 4, *ops, order="F", dtype="float32")
    with pytest.raises(LayoutError, match="exists for TN"):
        MatmulProblem.matmul_allreduce(8, 12, 20, 4, *ops[::-1], order="C", dtype="float32")
