# SPDX-License-Identifier: Apache-2.0
"""Which path a product takes on the host: what must move, and whether it fits."""

from __future__ import annotations

import pytest

import pblasmp as pb
from pblasmp.engines.base import Options
from pblasmp.engines.host import product
from pblasmp.engines.host.common import Means
from pblasmp.engines.host.level3 import level3_slabs

GRID = pb.Grid(2, 2)
SQUARE = pb.MatmulProblem.gemm(80, 120, 40, GRID, 10)
ROWS = pb.MatmulProblem(  # A and D in rows of blocks, B on one process
    pb.MatrixDescriptor((80, 40), (20, 40), pb.Grid(4, 1)),
    pb.MatrixDescriptor((40, 120), (40, 120), pb.Grid(4, 1)),
    pb.MatrixDescriptor((80, 120), (20, 120), pb.Grid(4, 1)),
)
NODES = ((0, 1, 2, 3),)
# A slab of A: 40 rows of 40; of B: 60 columns of 40; float64, each rounded up to pages of 4096 bytes.
SLAB_A, SLAB_B = 16384, 20480


class Memory:
    """``fits`` of a machine with so many bytes; remembers what it was asked."""

    def __init__(self, nbytes):
        self.nbytes, self.asked = nbytes, []

    def __call__(self, nbytes):
        self.asked.append(nbytes)
        return nbytes <= self.nbytes, self.nbytes


def operands(problem, size):
    return product.matmul_slabs(problem, 1, size).operands


def choose(problem, algo, nodes, fits, why_not_shared, beside=0):
    means = Means(None, nodes, None, None, None, fits, why_not_shared)
    size = sum(map(len, nodes))
    return product.choose(operands(problem, size), problem.k, algo, means, beside)


def test_what_is_asked_for_is_taken():
    memory = Memory(0)
    for algo in ("shared", "gathered", "panels"):
        assert choose(SQUARE, algo, NODES, memory, "") == (algo, ())
    assert memory.asked == []


@pytest.mark.parametrize(
    ("nodes", "needed"),
    [
        (NODES, 2 * SLAB_A + 2 * SLAB_B),  # every slab once
        (((0, 1), (2, 3)), SLAB_A + 2 * SLAB_B),  # a process row each
        (((0, 2), (1, 3)), 2 * SLAB_A + SLAB_B),  # a process column each
        (((0, 1, 2), (3,)), 2 * SLAB_A + 2 * SLAB_B),  # the fullest node
        (((0,), (1,), (2,), (3,)), SLAB_A + SLAB_B),
        (((0, 1, 2, 3), (4, 5)), 2 * SLAB_A + 2 * SLAB_B),  # idle ranks need nothing
    ],
)
def test_shared_where_one_copy_a_node_fits(nodes, needed):
    memory = Memory(needed)
    assert choose(SQUARE, "auto", nodes, memory, "") == ("shared", ())
    assert memory.asked == [needed]
    path, notes = choose(SQUARE, "auto", nodes, Memory(needed - 1), "")
    assert path != "shared"
    assert notes[0] == f"a shared copy of the operands needs {needed} bytes a node, of {needed - 1} to be had"


def test_without_sharing_each_rank_gathers_its_own():
    needed = 4 * (SLAB_A + SLAB_B)
    memory = Memory(needed)
    assert choose(SQUARE, "auto", NODES, memory, "no memfd") == ("gathered", ("no memfd",))
    assert memory.asked == [needed]
    assert choose(SQUARE, "auto", NODES, Memory(needed - 1), "no memfd") == (
        "panels",
        ("no memfd", f"gathered operands need {needed} bytes a node, of {needed - 1} to be had"),
    )


def test_panels_where_nothing_fits():
    path, notes = choose(SQUARE, "auto", NODES, Memory(10), "")
    assert path == "panels"
    assert len(notes) == 2


def test_what_need_not_move_needs_no_memory():
    memory = Memory(0)
    one = pb.MatmulProblem.gemm(8, 8, 8, pb.Grid(1, 1), 8)
    assert choose(one, "auto", ((0,),), memory, "") == (
        "gathered",
        ("both operands are multiplied where they lie",),
    )
    assert memory.asked == []
    memory = Memory(1 << 30)
    assert choose(ROWS, "auto", NODES, memory, "")[0] == "shared"
    assert memory.asked == [40960]  # 40 × 120 numbers of B, in pages: A stays where it is


def moves(problem, size=4):
    return [not operand.in_place() for operand in operands(problem, size)]


@pytest.mark.parametrize(
    ("a", "moved"),
    [
        ({}, False),
        ({"order": "F"}, False),
        ({"ld": 50}, False),
        ({"source": (1, 0)}, True),
        ({"block": (10, 40)}, True),
        ({"grid": pb.Grid(4, 1, "col")}, False),  # the same ranks
        ({"grid": pb.Grid(1, 4), "block": (80, 10)}, True),
        ({"dtype": "float16"}, True),  # multiplied in float32
    ],
    ids=str,
)
def test_an_operand_stays_only_where_it_lies_as_it_is_multiplied(a, moved):
    given = {"shape": (80, 40), "block": (20, 40), "grid": pb.Grid(4, 1), **a}
    problem = pb.MatmulProblem(pb.MatrixDescriptor(**given), ROWS.b, ROWS.d)
    assert moves(problem)[0] is moved


def test_transposed_and_conjugated_operands():
    real = pb.MatmulProblem(ROWS.a.T, ROWS.b, ROWS.d, "T")
    assert moves(real)[0] is False
    assert moves(pb.MatmulProblem(ROWS.a.T, ROWS.b, ROWS.d, "C"))[0] is False
    complex_a = pb.MatrixDescriptor((40, 80), (40, 20), pb.Grid(1, 4), dtype="complex64")
    for op, moved in (("T", False), ("C", True)):
        assert moves(pb.MatmulProblem(complex_a, ROWS.b, ROWS.d, op))[0] is moved


def test_ranks_outside_the_grid_need_no_slab():
    for operand in operands(SQUARE, 6):
        assert operand.needs[4:] == ((), ())
        assert operand.slabs([4, 5]) == []
        assert operand.memory_bytes([4, 5], 40) == 0
    a, b = operands(SQUARE, 6)
    assert a.needs[:4] == ((0,), (0,), (1,), (1,))
    assert b.needs[:4] == ((0,), (1,), (0,), (1,))
    assert a.slabs([3, 0, 1]) == [0, 1]
    assert (a.slab_bytes(0, 40), b.slab_bytes(1, 40)) == (SLAB_A, SLAB_B)


@pytest.mark.parametrize(
    ("routine", "block", "dtype", "count"),
    [
        ("syrk", (10, 10), "float64", 1),  # the same slabs to the left and to the right
        ("syrk", (10, 20), "float64", 2),
        ("herk", (10, 10), "complex64", 2),  # those to the right are conjugated
        ("syr2k", (10, 10), "float64", 2),
        ("her2k", (10, 10), "complex64", 4),
        ("syrkx", (10, 10), "float64", 2),
    ],
)
def test_slabs_that_stand_on_both_sides_are_one(routine, block, dtype, count):
    a = pb.MatrixDescriptor((80, 40), (10, 10), GRID, dtype=dtype)
    d = pb.MatrixDescriptor((80, 80), block, GRID, dtype=dtype)
    b = a if routine in ("syr2k", "her2k", "syrkx") else None
    slabs = level3_slabs(pb.Level3Problem(routine, a, d, b), Options(), 0, 4)
    assert len(slabs.operands) == count
    if routine == "syrk" and count == 1:
        assert slabs.operands[0].needs == ((0,), (0, 1), (0, 1), (1,))
        assert (slabs.terms[0].left, slabs.terms[0].right) == (0, 0)
