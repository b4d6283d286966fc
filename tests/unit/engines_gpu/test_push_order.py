# SPDX-License-Identifier: Apache-2.0
"""Who sends what for a product: slabs are complete, operands have one order of k, ranks agree (plan.py)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.push import plan as sections
from pblasmp.engines.gpu.push.plan import PushPlan, clip, common_order, cuts
from pblasmp.layout import Grid, MatmulProblem
from pblasmp.layout.axis import Axis
from pblasmp.layout.intersection import Stretch, Stretches
from tests.helpers.layouts import random_product
from tests.helpers.oracle import positions


def global_k(axis: Axis, inner: tuple[Stretches, ...]) -> dict[int, int]:
    """Return by position in the slab which index of k is there."""
    found: dict[int, int] = {}
    for process, stretches in enumerate(inner):
        owned = axis.globals(process)
        for src, dst in positions(stretches):
            assert dst not in found, "two indices in one place"
            found[dst] = int(owned[src])
    return found


def test_k_stays_as_it_is_where_one_operand_has_all_of_it_and_the_other_comes_in_few_runs():
    _, dealt = common_order(Axis(64, 64), Axis(64, 16, 0, 2))
    assert global_k(Axis(64, 16, 0, 2), dealt) == {i: i for i in range(64)}


@pytest.mark.parametrize("blocks", [40, 41])
def test_k_stays_as_it_is_where_the_other_operand_comes_in_equal_blocks(blocks):
    """Copy engines copy them by one command; not if one process has a block more than the other."""
    axis = Axis(64 * blocks, 64, 0, 2)
    of_a, _ = common_order(axis, Axis(axis.extent, axis.extent))
    in_order = global_k(axis, of_a) == {i: i for i in range(axis.extent)}
    assert in_order == (blocks == 40)


def test_short_blocks_arrive_in_one_range():
    of_a, of_b = common_order(Axis(4096, 4, 0, 2), Axis(4096, 4096))
    for stretches in of_a:  # what is sent
        places = [dst for _, dst in positions(stretches)]
        assert places == list(range(places[0], places[0] + 2048))
    assert [dst for _, dst in positions(of_b[0])] == list(range(4096))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 12, 64])
def test_every_slab_is_complete_and_buffers_do_not_overlap(size):
    rng = np.random.default_rng(size)
    for _ in range(8 if size < 10 else 2):
        p, _ = random_product(rng, size)
        plan = PushPlan(p, size)
        for rank in range(size):
            m, n = plan.shapes[rank]
            starts, inboxes, end = plan.places(rank)
            taken = [(starts[which], slab.nbytes(rank)) for which, slab in enumerate(plan.slabs)]
            for which, slab in enumerate(plan.slabs):
                parts = [part for part in slab.parts(rank) if part.source == rank]
                for chunk, received in enumerate(plan.received(which, rank)):
                    parts += received
                    taken += [
                        (inboxes[which, chunk, part.source], math.prod(part.shape) * slab.itemsize)
                        for part in received if not part.direct
                    ]  # fmt: skip
                extent = (m, n)[which] if m * n else 0
                got = [
                    (i, j) for part in parts
                    for _, i in positions(part.outer) for _, j in positions(part.inner)
                ]  # fmt: skip
                assert sorted(got) == [(i, j) for i in range(extent) for j in range(p.k if extent else 0)]
                chunks = plan.chunks(which, rank)
                assert [i for start, stop in chunks for i in range(start, stop)] == list(range(extent))
            taken = sorted(x for x in taken if x[1])
            assert all(at + length <= then for (at, length), (then, _) in pairwise(taken))
            assert end <= plan.nbytes


@pytest.mark.parametrize("seed", range(20))
def test_a_range_of_stretches(seed):
    rng = np.random.default_rng(seed)
    s = Stretch(int(rng.integers(1, 6)), 3, 2, 3 + int(rng.integers(3)), 7, 10)
    for start in range(25):
        for stop in range(start, 25):
            found = positions(clip((s,), start, stop))
            assert found == [(src, dst) for src, dst in positions((s,)) if start <= src < stop]
            assert len(clip((s,), start, stop)) <= 3


@pytest.mark.parametrize(
    ("grid", "op_a", "op_b"), [((1, 4), "T", "N"), ((4, 1), "N", "T"), ((2, 4), "T", "T")]
)
@pytest.mark.parametrize(("m", "block"), [(4096, 256), (4096 + 300, 128), (4096, 64)])
def test_blocks_of_owners_that_take_turns_are_in_sections_if_they_fill_tiles(grid, op_a, op_b, m, block):
    p = MatmulProblem.gemm(m, m, m, Grid(*grid), block, op_a=op_a, op_b=op_b)
    plan = PushPlan(p, p.d.grid.size)
    which = 0 if op_a == "T" else 1
    assert plan.slabs[which].in_sections == (block >= 128)
    assert not plan.slabs[1 - which].in_sections
    for rank in range(plan.size):
        slab, count = plan.slabs[which], plan.shapes[rank][which]
        owners = max(grid) // min(grid) if block >= 128 else 1
        assert len(slab.sections(rank)) == owners
        sent = [part for part in slab.parts(rank) if part.source != rank]
        assert all(part.direct for part in sent) == (block >= 128)
        found = positions(plan.tiles(which, rank, 0, count))
        assert [src for src, _ in found] == list(range(count)) == sorted(dst for _, dst in found)
        if owners > 1 and min(grid) == 1:  # its own section is read where it is, before all others
            assert slab.read_in_place(rank) == 0
            own = p.a.cols.count(rank) if which == 0 else p.b.rows.count(rank)
            assert plan.chunks(which, rank)[0] == (0, own)
        assert len(plan.chunks(which, rank)) <= 8


@pytest.mark.parametrize(("n", "ranks"), [(4096, [0, 1]), (4096 + 7, [1]), (4096 + 8, [0, 1])])
def test_sections_that_would_not_be_aligned_stay_in_order(n, ranks):
    """Rank 0 has the last rows: the section behind them begins where they end."""
    plan = PushPlan(MatmulProblem.gemm(n, n, n, Grid(1, 2), 256, op_a="T", dtype="bfloat16"), 2)
    assert [rank for rank in (0, 1) if len(plan.slabs[0].sections(rank)) == 2] == ranks


@pytest.mark.parametrize("order", ["C", "F"])
def test_what_is_unpacked_also_arrives_in_chunks_and_is_packed_only_if_it_is_in_short_runs(order):
    p = MatmulProblem.gemm(8192, 8192, 8192, Grid(1, 2), 64, op_a="T", dtype="bfloat16", order=order)
    received = PushPlan(p, 2).received(0, 0)
    assert [part.shape for (part,) in received] == [(512, 8192), (512, 8192), (1024, 8192), (2048, 8192)]
    assert not any(part.direct or part.packed for (part,) in received)
    other = MatmulProblem.gemm(8192, 8192, 8192, Grid(2, 1), 48, op_a="T", dtype="bfloat16", order=order)
    assert all(part.packed for (part,) in PushPlan(other, 2).received(0, 0))


def test_chunks_begin_small_and_end_at_tiles():
    assert cuts(0, (1, 1, 2, 4), 128, 16384) == [(0, 2048), (2048, 4096), (4096, 8192), (8192, 16384)]
    assert cuts(0, (1, 1), 128, 100) == [(0, 100)]


def _sizes(plan: PushPlan, which: int) -> list[int]:
    """The sizes of rank 0's chunks of A (0) or B (1)."""
    return [stop - start for start, stop in plan.chunks(which, 0)]


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (4096, [2048]),
        (6144, [1536, 1536]),
        (8192, [2048, 2048]),
        (12288, [1536, 1536, 3072]),
        (16384, [2048, 2048, 4096]),
        (32768, [2048, 2048, 4096, 8192]),
        (65536, [2048, 2048, 4096, 8192, 16384]),
    ],
)
def test_where_both_operands_arrive_the_first_product_is_about_2048_by_2048(n, sizes):
    plan = PushPlan(MatmulProblem.gemm(n, n, 512, Grid(2, 2), 256), 4)
    assert _sizes(plan, 0) == _sizes(plan, 1) == sizes


def test_what_arrives_next_lets_a_rank_multiply_most():
    """Rows and columns in turn where both cost as much; what is at home first; more of what costs less."""

    def sequence(grid: Grid, op_a: str = "N", rank: int = 0) -> str:
        p = MatmulProblem.gemm(16384, 16384, 512, grid, 256, op_a=op_a)
        return " ".join("ab"[which] + str(chunk) for which, chunk in PushPlan(p, grid.size).sequence(rank))

    assert sequence(Grid(2, 2)) == "a0 b0 a1 b1 a2 b2"
    assert sequence(Grid(1, 4)) == "b0 a0 a1 a2 a3 a4"
    assert sequence(Grid(4, 1)) == "a0 b0 b1 b2 b3 b4"
    # A is stored transposed: rank 1 has no part of the rows that it needs, rank 0 has half of them
    assert sequence(Grid(2, 2), "T") == "a0 b0 a1 b1 a2 b2"
    assert sequence(Grid(2, 2), "T", rank=1) == "b0 a0 b1 a1 b2 a2"


@pytest.mark.parametrize("size", [2, 4, 6])
def test_the_products_of_what_arrives_are_d(size, monkeypatch):
    monkeypatch.setattr(sections, "_SIDE", 8)
    monkeypatch.setattr(sections, "_TILE", (4, 4))
    rng, longest = np.random.default_rng(size), 0
    for _ in range(30):
        plan = PushPlan(random_product(rng, size)[0], size)
        for rank in range(size):
            m, n = plan.shapes[rank]
            times, there = np.zeros((m, n), int), [0, 0]
            for which, chunk in plan.sequence(rank):
                assert plan.chunks(which, rank)[chunk][0] == there[which]
                came = slice(there[which], plan.chunks(which, rank)[chunk][1])
                rows, cols = (came, slice(there[1])) if which == 0 else (slice(there[0]), came)
                for down in plan.tiles(0, rank, rows.start or 0, rows.stop):
                    for across in plan.tiles(1, rank, cols.start or 0, cols.stop):
                        at = [[dst for _, dst in positions((x,))] for x in (down, across)]
                        times[np.ix_(*at)] += 1
                there[which] = came.stop
            assert (times == 1).all()
            longest = max(longest, len(plan.sequence(rank)))
    assert longest > 4


@pytest.mark.parametrize(
    ("grid", "m", "n", "of_a", "of_b"),
    [
        (
            Grid(1, 2),
            8192,
            8192,
            [1024, 1024, 2048, 4096],
            [4096],
        ),  # times 4096 columns: as many entries of D
        (Grid(2, 1), 8192, 8192, [4096], [1024, 1024, 2048, 4096]),
        (Grid(1, 2), 2048, 2048, [2048], [1024]),
        (Grid(1, 2), 16384, 512, [16384], [256]),  # a chunk of a slim D is long
        (Grid(1, 2), 65536, 512, [16384, 16384, 32768], [256]),
    ],
)
def test_where_one_operand_arrives_its_first_chunk_has_as_many_entries_of_d(grid, m, n, of_a, of_b):
    plan = PushPlan(MatmulProblem.gemm(m, n, 512, grid, 256), 2)
    assert (_sizes(plan, 0), _sizes(plan, 1)) == (of_a, of_b)


def test_a_push_plan_with_more_chunks_than_flags_is_an_error(monkeypatch):
    """More shares of an operand would otherwise raise the flags of the other one."""
    d = pb.MatrixDescriptor((65536, 65536), (16384, 65536), pb.Grid(4, 1))
    k = pb.MatrixDescriptor((65536, 65536), (65536, 16384), pb.Grid(1, 4))
    p = pb.MatmulProblem(a=k, b=d, d=d)

    def chunks() -> list[int]:
        made = PushPlan(p, 4)
        return [len(made.chunks(which, rank)) for which in (0, 1) for rank in range(4)]

    assert max(chunks()) <= 8
    monkeypatch.setattr(sections, "_SHARES", ((0, (1,) * 9),))
    with pytest.raises(IndexError, match=r"push: \d+ chunks of [AB], there are 8 flags"):
        chunks()
