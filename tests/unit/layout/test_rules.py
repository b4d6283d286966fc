# SPDX-License-Identifier: Apache-2.0
"""What makes a product legal: each rule's message, and that following its advice makes the product legal."""

import ast
import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pblasmp.errors import LayoutError
from pblasmp.layout import Grid, MatmulProblem
from tests.helpers.schemes import AG, AR, MAKERS, RS
from tests.helpers.slow import draws

few = settings(max_examples=draws(30, long=100))

GRID = Grid(2, 3)
PRODUCTS = list(itertools.product("NTC", repeat=2))


def gemm(op_a="N", op_b="N", **options):
    """40 x 30 x 20 in blocks of 4, 5 and 6 on 2 x 3 processes."""
    return MatmulProblem.gemm(40, 30, 20, GRID, (4, 5, 6), op_a=op_a, op_b=op_b, with_c=True, **options)


def change(p, name, **fields):
    """Return the problem with fields of one operand replaced."""
    return replace(p, **{name: replace(getattr(p, name), **fields)})


def turned(op, pair):
    """Return (rows, columns) of op(X) as X has them."""
    return pair if op == "N" else pair[::-1]


def side(op, axis):
    """Return what the rows (0) or columns (1) of op(X) are in X."""
    return turned(op, ("row", "column"))[axis]


def follow(p, fault):
    """Return ``p`` with the advice that ``fault`` gives carried out, read from its text alone."""
    if found := re.search(r"\(legal: (\w) in blocks of (\(\d+, \d+\))\)", fault):
        return change(p, found[1], block=ast.literal_eval(found[2]))
    if found := re.match(r"(\w): (shape|block|source) is .*, expected (\(\d+, \d+\))", fault):
        return change(p, found[1], **{found[2]: ast.literal_eval(found[3])})
    if found := re.match(r"(\w): shape is \d+x\d+, expected (\d+)x(\d+)", fault):
        return change(p, found[1], shape=(int(found[2]), int(found[3])))
    if found := re.match(r"(\w): dtype is \w+, expected (\w+)", fault):
        return change(p, found[1], dtype=found[2])
    if found := re.match(
        r"(\w): grid is .*, expected (?:that of d \()?(\d+)x(\d+) processes in (row|col)", fault
    ):
        return change(p, found[1], grid=Grid(int(found[2]), int(found[3]), found[4]), source=(0, 0))
    if found := re.match(r"(\w): the sub-matrix .*: start (\d+) (row|column)s? earlier", fault):
        lead = getattr(p, found[1]).lead
        return change(p, found[1], lead=(0, lead[1]) if found[3] == "row" else (lead[0], 0))
    raise AssertionError(f"no advice in {fault!r}")


def mended(p):
    """Return ``p`` after following all advice."""
    for fault in p.faults():
        p = follow(p, fault)
    return p


@pytest.mark.parametrize("grid", [Grid(1, 4, "col"), Grid(4, 1, "row")])
def test_the_rank_order_of_one_process_row_or_column_is_moot(grid):
    p = MatmulProblem.gemm(8, 8, 8, Grid(1, 4, "row"), 2, with_c=True)
    assert change(p, "a", grid=grid).faults() == []
    assert change(p, "c", grid=Grid(1, 4, "col")).faults() == []


# Each rule: what to break in a legal product, what is said, all of it.
BROKEN = {
    "k": (
        lambda p: change(p, "b", shape=turned(p.op_b, (21, 30))),
        lambda p: (
            "sizes: op(A) is 40x20 and op(B) is 21x30: the columns of op(A) must be the rows of op(B); "
            f"a is {'40x20' if p.op_a == 'N' else '20x40'} with op {p.op_a}, "
            f"b is {'21x30' if p.op_b == 'N' else '30x21'} with op {p.op_b}"
        ),
    ),
    "m of d": (
        lambda p: replace(p, d=replace(p.d, shape=(41, 30)), c=None),
        lambda p: "d: shape is 41x30, expected 40x30 = rows of op(A) x columns of op(B)",
    ),
    "n of d": (
        lambda p: replace(p, d=replace(p.d, shape=(40, 29)), c=None),
        lambda p: "d: shape is 40x29, expected 40x30 = rows of op(A) x columns of op(B)",
    ),
    "type of b": (
        lambda p: change(p, "b", dtype="complex128"),
        lambda p: "b: dtype is complex128, expected float64 like a",
    ),
    "type of d": (
        lambda p: replace(p, d=replace(p.d, dtype="float32"), c=None),
        lambda p: "d: dtype is float32, expected float64 for operands of float64",
    ),
    "start of a": (
        lambda p: change(p, "a", lead=turned(p.op_a, (3, 0))),
        lambda p: (
            f"a: the sub-matrix starts 3 {side(p.op_a, 0)}s into a block of 4, expected at a block boundary: "
            f"start 3 {side(p.op_a, 0)}s earlier or 1 later"
        ),
    ),
    "start of b": (
        lambda p: change(p, "b", lead=turned(p.op_b, (0, 1))),
        lambda p: (
            f"b: the sub-matrix starts 1 {side(p.op_b, 1)} into a block of 5, expected at a block boundary: "
            f"start 1 {side(p.op_b, 1)} earlier or 4 later"
        ),
    ),
    "start of d": (
        lambda p: change(p, "d", lead=(1, 0)),
        lambda p: (
            "d: the sub-matrix starts 1 row into a block of 4, expected at a block boundary: "
            "start 1 row earlier or 3 later"
        ),
    ),
    "start of c": (
        lambda p: change(p, "c", lead=(0, 2)),
        lambda p: (
            "c: the sub-matrix starts 2 columns into a block of 5, expected at a block boundary: "
            "start 2 columns earlier or 3 later"
        ),
    ),
    "grid of a": (
        lambda p: change(p, "a", grid=Grid(1, 6)),
        lambda p: (
            "a: grid is 1x6 processes in row order, expected that of d (2x3 processes in row order) or its "
            "transpose (3x2 processes in col order)"
        ),
    ),
    "grid of b": (
        lambda p: change(p, "b", grid=Grid(2, 3, "col")),
        lambda p: (
            "b: grid is 2x3 processes in col order, expected that of d (2x3 processes in row order) or its "
            "transpose (3x2 processes in col order)"
        ),
    ),
    "m block of a": (
        lambda p: change(p, "a", block=turned(p.op_a, (7, 6))),
        lambda p: (
            "a: the rows of op(A) are in blocks of 7, expected 4 like the rows of d "
            f"(legal: a in blocks of {turned(p.op_a, (4, 6))})"
        ),
    ),
    "k block of b": (
        lambda p: change(p, "b", block=turned(p.op_b, (7, 5))),
        lambda p: (
            "b: the rows of op(B) are in blocks of 7, expected 6 like the columns of op(A) "
            f"(legal: b in blocks of {turned(p.op_b, (6, 5))})"
        ),
    ),
    "k block of a": (
        lambda p: change(p, "a", block=turned(p.op_a, (4, 7))),
        lambda p: (
            "b: the rows of op(B) are in blocks of 6, expected 7 like the columns of op(A) "
            f"(legal: b in blocks of {turned(p.op_b, (7, 5))})"
        ),
    ),
    "n block of b": (
        lambda p: change(p, "b", block=turned(p.op_b, (6, 7))),
        lambda p: (
            "b: the columns of op(B) are in blocks of 7, expected 5 like the columns of d "
            f"(legal: b in blocks of {turned(p.op_b, (6, 5))})"
        ),
    ),
    "type of c": (
        lambda p: change(p, "c", dtype="float32"),
        lambda p: "c: dtype is float32, expected float64 like d",
    ),
    "shape of c": (
        lambda p: change(p, "c", shape=(40, 31)),
        lambda p: "c: shape is (40, 31), expected (40, 30) like d",
    ),
    "block of c": (
        lambda p: change(p, "c", block=(5, 4)),
        lambda p: "c: block is (5, 4), expected (4, 5) like d",
    ),
    "source of c": (
        lambda p: change(p, "c", source=(1, 2)),
        lambda p: "c: source is (1, 2), expected (0, 0) like d",
    ),
    "grid of c": (
        lambda p: change(p, "c", grid=Grid(3, 2)),
        lambda p: "c: grid is 3x2 processes in row order, expected 2x3 processes in row order like d",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule(rule, subtests):
    breaking, message = BROKEN[rule]
    for (op_a, op_b), order in itertools.product(PRODUCTS, ["C", "F", "CFC"]):
        with subtests.test(op_a=op_a, op_b=op_b, order=order):
            legal = gemm(op_a, op_b, order=order)
            p = breaking(legal)
            assert p.faults() == [message(legal)]
            with pytest.raises(LayoutError) as error:
                p.validate()
            assert str(error.value) == f"this product: {message(legal)}"
            if rule != "k":  # which of the two sizes is meant, nobody but the caller knows
                assert mended(p).faults() == []


def test_mixed_precision():
    p = MatmulProblem.gemm(4, 4, 4, GRID, 2, dtype="bfloat16", out_dtype="float16")
    assert p.faults() == ["d: dtype is float16, expected bfloat16 or float32 for operands of bfloat16"]
    for legal in ("bfloat16", "float32"):
        assert change(p, "d", dtype=legal).faults() == []


def test_every_fault_is_named_at_once():
    p = gemm("T", "N")
    p = change(p, "a", grid=Grid(1, 1), lead=(1, 1))
    p = change(p, "b", shape=(21, 30), block=(7, 8), dtype="float32")
    p = change(p, "d", shape=(39, 30), lead=(1, 0))
    p = change(p, "c", source=(1, 1), dtype="complex64")
    with pytest.raises(LayoutError) as error:
        p.validate()
    first, *found = str(error.value).split("\n  - ")
    found = [first.removeprefix("this product has 12 faults: "), *found]
    assert sorted(fault.partition(":")[0] for fault in found) == [*"aaabbbcccdd", "sizes"]
    assert p.faults() == found


TITLES = {AG: "AllGather + GEMM", RS: "GEMM + ReduceScatter", AR: "GEMM + AllReduce"}


def one_dimensional(scheme, order):
    ops = "TN" if order == "F" else "NT"
    return MAKERS[scheme](8, 12, 20, 4, *ops, order=order, dtype="float32")


@pytest.mark.parametrize("name", "abd")
@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("scheme", MAKERS)
def test_each_rule_of_a_scheme(scheme, order, name):
    legal = one_dimensional(scheme, order)
    x = getattr(legal, name)
    on_other_process = (1, 0) if x.grid.nprow > 1 else (0, 1)
    changes = {"block": (3, 7), "source": on_other_process, "grid": Grid(2, 2)}
    for field, value in changes.items():
        p = change(legal, name, **{field: value})
        why = f"for {TITLES[scheme]} on 4 ranks"
        assert p.faults() == [f"{name}: {field} is {value}, expected {getattr(x, field)} {why}"]
        assert mended(p) == legal
    with pytest.raises(LayoutError, match=r"^this product has 3 faults: .*\n  - "):
        change(legal, name, block=(3, 7), source=(1, 1), grid=Grid(2, 2)).validate()


def mutations(names, size):
    """Draw changes to the layout of some operands."""
    grids = st.sampled_from([Grid(p, q, o) for p in range(1, 7) for q in range(1, 7) for o in ("row", "col")])
    fields = st.fixed_dictionaries(
        {},
        optional={
            "block": st.tuples(st.integers(1, 9), st.integers(1, 9)),
            "grid": grids if size is None else grids.filter(lambda grid: grid.size == size),
            "dtype": st.sampled_from(["float32", "float64", "complex64"]),
        },
    )
    return st.dictionaries(st.sampled_from(names), fields)


def mutate(p, changes):
    for name, fields in changes.items():
        p = change(p, name, source=(0, 0), **fields) if getattr(p, name) is not None else p
    return p


@few
@given(st.sampled_from(PRODUCTS), st.sampled_from(["C", "F", "CFC"]), mutations("abdc", None))
def test_following_all_advice_at_once_mends_any_layout(ops, order, changes):
    p = mended(mutate(gemm(*ops, order=order), changes))
    if [fault[:9] for fault in p.faults()] == ["c: dtype "]:  # C follows D, which followed A
        p = mended(p)
    assert p.faults() == []


@few
@given(st.sampled_from(list(MAKERS)), st.sampled_from("FC"), mutations("abd", 4))
def test_following_all_advice_at_once_mends_any_scheme(scheme, order, changes):
    p = mutate(one_dimensional(scheme, order), changes)
    assert mended(p).faults() == []


@few
@given(st.sampled_from(PRODUCTS), mutations("abdc", None))
def test_the_transposed_problem_is_legal_when_the_problem_is(ops, changes):
    p = mutate(gemm(*ops), changes)
    assert (p.faults() == []) == (p.T.faults() == [])


@pytest.mark.parametrize("scheme", ["gemm", AG])
def test_faults_name_the_argument_that_d_is_made_from(scheme):
    p = (
        MatmulProblem.allgather_matmul(8, 8, 8, 4, order="F", dtype="float32")
        if scheme == AG
        else MatmulProblem.gemm(8, 8, 8, GRID, 2)
    )
    wrong = replace(p, d=replace(p.d, shape=(6, 8), block=(3, 3), dtype="complex64"))
    for result in ("c", "out"):
        faults = wrong.faults(result)
        assert [fault.replace(result, "d") for fault in faults] == [
            fault.replace(result, "d") for fault in wrong.faults()
        ]
        assert any(fault.startswith(f"{result}: shape is 6x8") for fault in faults)
        assert not any(re.search(r"\bd\b", fault) for fault in faults)
        with pytest.raises(LayoutError, match=f"{result}: shape is 6x8"):
            wrong.validate(result)
