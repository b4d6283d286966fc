# SPDX-License-Identifier: Apache-2.0
"""Which algorithm takes a product on the host: what must move, whether it fits, and what is said of the rest."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm.choice import Serial
from pblasmp.dtypes import accumulation_dtype
from pblasmp.engines.host.host_engine import METHODS
from pblasmp.engines.local.slab_terms import matmul_slabs
from pblasmp.engines.method import Verdict, choose, plain_refusal, survey
from pblasmp.engines.protocol import Method, Traits
from pblasmp.engines.request import Operands, Options
from pblasmp.errors import UnsupportedError

GRID = pb.Grid(2, 2)
NONE = Operands(None, None, None, None)  # nobody looks at the arrays
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


def engine(nodes=NODES, fits=None, why_not_shared="", rows=METHODS, queues=False):
    """What algorithms ask of an engine before they prepare anything."""
    transport = SimpleNamespace(
        nodes=nodes, rank=0, size=sum(map(len, nodes)), fits=fits, why_not_shared=why_not_shared
    )
    operations = SimpleNamespace(
        lead=0, update_order="C", slab_dtype=accumulation_dtype, refusal=lambda dtype, compute: ""
    )
    return SimpleNamespace(
        name="host", transport=transport, operations=operations, methods=rows, measured=None,
        traits=Traits(
            on_gpus=queues, queues=queues, records=queues, overlaps_messages=queues, fast_products=queues,
            computes_foreign=not queues,
        ),
    )  # fmt: skip


def taken(problem, nodes, fits, why_not_shared, algo="auto"):
    """Return the algorithm that is taken, and by name why others are not."""
    on = engine(nodes, fits, why_not_shared)
    row, _, choice = choose(on, problem, Options(algo=algo), NONE)
    verdicts = choice.verdicts()
    assert [name for name, verdict in verdicts.items() if verdict.taken] == [row.name]
    return row.name, {name: verdict.why for name, verdict in verdicts.items() if verdict.applies is False}


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
    assert taken(SQUARE, nodes, memory, "") == ("shared", {})
    assert memory.asked == [needed]
    name, refused = taken(SQUARE, nodes, Memory(needed - 1), "")
    assert name != "shared"
    expected = (
        f"a shared copy of the operands would need {needed} bytes per node, only {needed - 1} available"
    )
    assert refused["shared"] == expected


def blocks_of_64(m, n, k, grid, **how):
    return pb.MatmulProblem.gemm(m, n, k, grid, 64, **how)


def triangle_and_columns(routine, width, grid=GRID, side="L", order=2048):
    a = pb.MatrixDescriptor((order, order), (64, 64), grid)
    b = pb.MatrixDescriptor((order, width) if side == "L" else (width, order), (64, 64), grid)
    return pb.Level3Problem(routine, a, b, b, side=side)


@pytest.mark.parametrize(
    ("problem", "stays", "on_gpus"),
    [
        (triangle_and_columns("symm", 16), True, True),
        (triangle_and_columns("trmm", 64, side="R"), True, True),
        (triangle_and_columns("symm", 16, pb.Grid(4, 1)), True, True),  # one of the two triangles would move
        (triangle_and_columns("trmm", 16, pb.Grid(4, 1)), False, True),  # A stays anyway
        (triangle_and_columns("symm", 1024), False, False),
        (triangle_and_columns("trsm", 128, order=4096), True, False),
        (triangle_and_columns("trsm", 1, order=4096, side="R"), True, False),
        (triangle_and_columns("trsm", 256, order=4096), False, False),
        (triangle_and_columns("trsm", 16, order=4096, grid=pb.Grid(1, 1)), False, False),
        (triangle_and_columns("trsm", 16), False, False),  # the ranks would meet too often
        (blocks_of_64(2048, 16, 2048, GRID), True, True),
        (blocks_of_64(2048, 16, 2048, GRID, op_a="T", op_b="T"), True, True),
        (blocks_of_64(16, 2048, 2048, GRID), True, True),
        (blocks_of_64(64, 64, 65536, pb.Grid(4, 1), op_a="T"), True, False),  # k is dealt out already
        (blocks_of_64(2048, 1024, 2048, GRID), False, False),
        (blocks_of_64(128, 16, 128, GRID), False, False),  # nothing to save
        (blocks_of_64(2048, 16, 2048, pb.Grid(4, 1)), False, True),  # A stays anyway
        (blocks_of_64(2048, 16, 2048, pb.Grid(1, 1)), False, False),
    ],
)
def test_a_much_larger_operand_stays(problem, stays, on_gpus):
    nodes = (tuple(range(problem.d.grid.size)),)
    assert (taken(problem, nodes, Memory(1 << 40), "")[0] == "stationary") == stays
    on = engine(nodes, Memory(1 << 40), queues=True)
    assert (choose(on, problem, Options(), NONE)[0].name == "stationary") == on_gpus


def test_panels_where_nothing_fits():
    name, refused = taken(SQUARE, NODES, Memory(10), "")
    assert name == "panels"
    assert set(refused) == {"shared", "gathered"}


@pytest.mark.parametrize(("nodes", "sharing"), [(NODES, 4), (((0, 1), (2, 3)), 2), (((0,), (1, 2, 3)), 3)])
def test_solves_need_room_for_right_hand_sides_too(nodes, sharing):
    """Each rank solves for 8 columns of B, which lies in rows and columns of blocks, and needs all of A."""
    a = pb.MatrixDescriptor((40, 40), (10, 10), GRID)
    b = pb.MatrixDescriptor((40, 32), (10, 10), GRID)
    solve = pb.Level3Problem("trsm", a, b, b)
    whole, mine = 16384, 4096  # 40 × 40 and 40 × 8 numbers, in pages
    memory = Memory(whole + sharing * mine)
    assert taken(solve, nodes, memory, "")[0] == "shared"
    assert memory.asked == [whole + sharing * mine]
    memory = Memory(sharing * (whole + mine))
    assert taken(solve, nodes, memory, "no memfd")[0] == "gathered"
    assert memory.asked == [sharing * (whole + mine)]


# -- engines


def test_engines_by_name_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name in ("gpu", None, np.array(["host", "host"])):
        with pytest.raises(pb.ArgumentError, match="expected one of auto, host, cublasmp, got "):
            pb.Context(Serial(), engine=name)
    with pytest.raises(pb.LibraryNotFoundError):  # nothing takes its place
        pb.Context(Serial(), engine="cublasmp")
    for name, why in (("auto", "no cublasmp: CuPy is not installed (on rank 0)"), ("host", "requested")):
        with pb.Context(Serial(), engine=name) as ctx:
            assert (ctx.engine.name, ctx.engine.why) == ("host", why)


# -- what is said of algorithms


class Row(Method):
    """An algorithm for products, which is never prepared."""

    def __init__(self, name, cost, why="", form=""):
        self.name, self._cost, self._why, self._form, self.asked = name, cost, why, form, 0

    def serves(self, problem):
        return isinstance(problem, pb.MatmulProblem)

    def view(self, problem):
        return self._form or problem

    def refusal(self, engine, problem, options, operands):
        self.asked += 1
        return self._why

    def cost(self, engine, problem, options):
        return self._cost


def rows_of_four():
    return Row("slow", 9.0), Row("quick", 1.0, "it is out of order"), Row("good", 2.0), Row("equal", 2.0)


def said(verdicts):
    return {name: str(verdict) for name, verdict in verdicts.items()}


def test_the_cheapest_that_applies_is_taken():
    rows = rows_of_four()
    found, viewed, choice = choose(engine(rows=rows), SQUARE, Options(), NONE)
    verdicts = choice.verdicts()
    assert (found.name, viewed) == ("good", SQUARE)
    assert said(verdicts) == {
        "slow": "not tried: slower than good by rule",
        "quick": "it is out of order",
        "good": "taken: the fastest by rule",
        "equal": "not tried: slower than good by rule",
    }
    assert [name for name, verdict in verdicts.items() if verdict] == ["good"]
    surveyed = survey(engine(rows=rows), SQUARE, Options())
    assert said(surveyed) == {
        "slow": "applies: slower than good by rule",
        "quick": "it is out of order",
        "good": "taken: the fastest by rule",
        "equal": "applies: slower than good by rule",
    }
    assert [name for name, verdict in surveyed.items() if verdict] == ["slow", "good", "equal"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"epilogue": pb.Epilogue(activation="relu")}, "epilogue: it takes none, got 'relu'"),
        ({"scales": pb.Scales(a=2.0)}, "scales: it takes none"),
    ],
)
def test_what_computes_plain_products_refuses_others(given, why):
    assert plain_refusal(Operands(None, None, None, None, **given)) == why
    assert not plain_refusal(None)


def test_an_algorithm_is_taken_by_name():
    options = Options(algo="slow")
    rows = rows_of_four()
    found, _, choice = choose(engine(rows=rows), SQUARE, options, NONE)
    verdicts = choice.verdicts()
    assert found.name == "slow"
    assert str(verdicts["slow"]) == "taken: requested"
    assert survey(engine(rows=rows), SQUARE, options) == {
        "slow": Verdict(True, "requested", taken=True),
        "quick": Verdict(False, "it is out of order"),
        "good": Verdict(True, "not requested"),
        "equal": Verdict(True, "not requested"),
    }


def test_refusals_name_the_algorithm_and_why():
    rows = (*rows_of_four(), Row("other", 1.0, form="it has no such form"))
    for algo, words in (
        ("quick", "algo 'quick': it is out of order"),
        ("other", "algo 'other': it has no such form"),
        (
            "summa",
            "algo: the host engine has 'auto', 'slow', 'quick', 'good', 'equal', 'other' here, got 'summa'",
        ),
    ):
        with pytest.raises(UnsupportedError) as caught:
            choose(engine(rows=rows), SQUARE, Options(algo=algo), NONE)
        assert str(caught.value) == words
    refusing = tuple(Row(name, 1.0, f"{name} will not") for name in ("one", "two"))
    with pytest.raises(
        UnsupportedError, match="takes this problem:\n  one: one will not\n  two: two will not"
    ):
        choose(engine(rows=refusing), SQUARE, Options(), NONE)
    alike = tuple(Row(name, 1.0, "it is Sunday") for name in ("one", "two"))
    with pytest.raises(UnsupportedError, match=r"takes this problem: it is Sunday$"):
        choose(engine(rows=alike), SQUARE, Options(), NONE)
    assert not any(survey(engine(rows=refusing), SQUARE, Options()).values())
    with pytest.raises(UnsupportedError, match="got 'summa'"):
        survey(engine(rows=rows), SQUARE, Options(algo="summa"))


# -- slabs


def operands(problem, size):
    return matmul_slabs(problem, 1, engine((tuple(range(size)),))).operands


def moves(problem, size=4):
    return [not operand.in_place for operand in operands(problem, size)]


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


def test_ranks_outside_the_grid_need_no_slab():
    for operand in operands(SQUARE, 6):
        assert operand.needs[4:] == ((), ())
        assert operand.slabs((4, 5)) == []
        assert operand.memory_bytes((4, 5), 40) == 0
    a, b = operands(SQUARE, 6)
    assert a.needs[:4] == ((0,), (0,), (1,), (1,))
    assert b.needs[:4] == ((0,), (1,), (0,), (1,))
    assert a.slabs((3, 0, 1)) == [0, 1]
    assert (a.slab_bytes(0, 40), b.slab_bytes(1, 40)) == (SLAB_A, SLAB_B)
