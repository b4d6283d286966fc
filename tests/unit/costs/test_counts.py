# SPDX-License-Identifier: Apache-2.0
"""Counts by periods against counts pair by pair, and products on more ranks than anybody has."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm import Cell, Cells, Side
from pblasmp.costs import counts
from pblasmp.costs.counts import by_pairs, counts_of
from pblasmp.engines.dense.stationary import StationaryMethod
from tests.helpers.cases import layout
from tests.helpers.layouts import random_product
from tests.helpers.lengths import draws


def same(found, expected):
    return all(np.array_equal(getattr(found, f.name), getattr(expected, f.name)) for f in fields(found))


@pytest.mark.parametrize("limit", [1 << 62, 16])
def test_by_periods_like_pair_by_pair(limit, monkeypatch):
    """Any two layouts, also ones that several ranks of a node can write; messages whole, or cut into short ones."""
    rng = np.random.default_rng(5)
    monkeypatch.setattr("pblasmp.comm.exchange._MESSAGE_BYTES", limit)
    shared = False
    for _ in range(draws(60, long=150)):
        size = int(rng.integers(1, 13))
        per_node = int(rng.integers(1, size + 1))
        nodes = [tuple(range(i, min(i + per_node, size))) for i in range(0, size, per_node)]
        shape = tuple(int(x) for x in rng.integers(0, 90, 2))
        src, dst = (Side.of(layout(rng, shape, size)) for _ in range(2))
        if rng.integers(2):
            of = {rank: node for node in nodes for rank in node}
            cells = tuple(Cell(cell.coords, of[cell.ranks[0]]) for cell in dst.cells)
            dst, shared = Side(dst.rows, dst.cols, cells, dst.order), True
        node = np.repeat(np.arange(len(nodes)), [len(ranks) for ranks in nodes])
        expected = by_pairs(src, dst, node, limit)
        found = counts_of([(src, dst)], 1, size, nodes, 4)
        assert same(found, expected), (src, dst, nodes)
        found = counts_of([(src, dst)] * 3, 1, size, nodes, 4)
        for each in fields(expected):
            getattr(expected, each.name)[...] *= 3
        assert same(found, expected), (src, dst, nodes)
    assert shared


@pytest.mark.parametrize("algorithm", ["gathered", "shared", "panels", "auto"])
def test_cells_stay_arrays(algorithm, monkeypatch):
    """Nothing makes a Python object for each of 1,024 cells: on 65,536 ranks that took longer than the rest."""
    monkeypatch.setattr(Cells, "_made", property(lambda _: pytest.fail("cells were made one by one")))
    p = pb.MatmulProblem.gemm(5000, 5000, 5000, "32x32", 64)
    p.traffic(algorithm, ranks_per_node=8)


@pytest.mark.parametrize("per_node", [None, 1024, 64])
def test_work_does_not_grow_with_the_ranks_of_a_node(per_node, monkeypatch):
    """By default all ranks are on one node, where each slab is everybody's: once there was a step for each of them."""
    asked = []
    summed = counts._summed
    monkeypatch.setattr(counts, "_summed", lambda *args: asked.append(args) or summed(*args))
    found = pb.MatmulProblem.gemm(5000, 5000, 5000, "64x64", 64).traffic("shared", ranks_per_node=per_node)
    assert found.sent_bytes.any() == (per_node is not None)
    assert len(asked) <= 4 * 4096 // (per_node or 4096)


def test_a_million_rows():
    """As many bytes arrive as the slabs of op(A) and op(B) have beyond each rank's own parts, in little memory."""
    n, side, item = 10**6, draws(128, long=256), 8
    p = pb.MatmulProblem.gemm(n, n, n, f"{side}x{side}", 64)
    tracemalloc.start()
    counts = p.traffic("gathered", ranks_per_node=8)
    assert (
        tracemalloc.get_traced_memory()[1] < 1600 * side**2
    )  # at 256, 100 MiB: Python and NumPy add some 60
    tracemalloc.stop()
    rows = np.array(p.d.rows.counts())
    mine = np.multiply.outer(rows, rows).ravel()
    slabs = np.add.outer(rows, rows).ravel() * n
    assert np.array_equal(counts.received_bytes, (slabs - 2 * mine) * item)
    assert np.array_equal(counts.copied_bytes, 2 * mine * item)
    assert np.array_equal(counts.flops, 2 * mine * n)
    assert counts.sent_bytes.sum() == counts.received_bytes.sum()
    n = draws(200_000, long=10**6)  # each panel takes as long, however large it is
    p = pb.MatmulProblem.gemm(n, n, n, "64x64", 64)
    slabs, panels = (p.traffic(algo, ranks_per_node=8) for algo in ("gathered", "panels"))
    assert np.array_equal(panels.received_bytes, slabs.received_bytes)
    assert panels.memory_bytes.max() < slabs.memory_bytes.max() / 10


def test_counts_add_up():
    """On 64 ranks, where nobody counts by hand: what is sent arrives, and every byte is on one link."""
    rng = np.random.default_rng(9)
    for _ in range(6):
        p, _ = random_product(rng, 64, 300)
        counts = p.traffic(nranks=64, ranks_per_node=8)
        assert counts.sent_bytes.sum() == counts.received_bytes.sum()
        assert sum(counts.links.values()) == counts.sent_bytes.sum() + counts.copied_bytes.sum()
        assert counts.flops.sum() == p.flops


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"nranks": 3}, "nranks: the layouts need 4 ranks, got 3"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"beta": 2}, "beta: the problem has no C"),
    ],
)
def test_errors(how, words):
    p = pb.MatmulProblem.gemm(8, 8, 8, "2x2", 2)
    with pytest.raises(pb.ArgumentError, match=words):
        p.traffic(**how)
    with pytest.raises(pb.UnsupportedError, match="got 'fastest'"):
        p.traffic("fastest")


def test_memory_decides():
    """ "auto" takes panels where slabs do not fit into the memory of a node."""
    p = pb.MatmulProblem.gemm(4096, 4096, 40960, "2x2", 64)
    assert p.traffic().algorithm == "shared"
    assert p.traffic(memory_bytes=1 << 30).algorithm == "panels"


def test_the_ranks_choose_once(monkeypatch):
    """On paper one rank's choice is every rank's: on 65,536 of them, each choice takes a third of a second."""
    asked = []
    cost = StationaryMethod.cost
    monkeypatch.setattr(StationaryMethod, "cost", lambda *args: asked.append(args) or cost(*args))
    counts = pb.MatmulProblem.gemm(110, 90, 70, "3x4", 8).traffic(ranks_per_node=4)
    assert len(counts.shapes) > 4
    assert len(asked) == 1
