# SPDX-License-Identifier: Apache-2.0
"""Counts by periods against counts pair by pair, and products on more ranks than anybody has."""

import itertools
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm import Cell, Cells, Side
from pblasmp.comm.exchange import ends, piece_of
from pblasmp.costs import counts, traffic
from pblasmp.costs.counts import Counts, counts_of
from pblasmp.costs.dry_engine import DryOperations, Ghost, ghost
from pblasmp.engines.dense.stationary import StationaryMethod
from pblasmp.layout import ParallelProblem
from pblasmp.layout.intersection import common_counts
from pblasmp.layout.routines import ROUTINES
from tests.helpers.cases import grids, layout, pick
from tests.helpers.level3 import legal_flags, shapes
from tests.helpers.slow import draws


def by_pairs(src, dst, node, limit):
    """Return the counts of an exchange in elements, pair of cells by pair of cells."""
    found = Counts.none(len(node))
    rows, cols = common_counts(src.rows, dst.rows), common_counts(src.cols, dst.cols)
    for source in src.cells:
        (p, q), s = source.coords, source.ranks
        for target in dst.cells:
            elements = int(rows[p, target.coords[0]] * cols[q, target.coords[1]])
            if not elements:
                continue
            owner, writer = ends(s, target.ranks)
            if owner == writer:
                found.copied_bytes[owner] += elements
                if owner != s[0] or len(target.ranks) > 1:
                    found.shared_bytes[owner] += elements
                continue
            count = 1
            if elements > limit:
                count = len(piece_of(src, source, dst, target).split(limit, dst.order))
            found.sent_bytes[owner] += elements
            found.received_bytes[writer] += elements
            found.messages[owner] += count
            if node[owner] == node[writer]:
                found.node_bytes[owner] += elements
                found.node_received[writer] += elements
    return found


def same(found, expected):
    return all(np.array_equal(getattr(found, f.name), getattr(expected, f.name)) for f in fields(found))


@pytest.mark.parametrize("limit", [1 << 62, 16])
def test_by_periods_like_pair_by_pair(limit, monkeypatch):
    """Any two layouts, also ones that several ranks of a node can write; messages whole, or cut into short ones."""
    rng = np.random.default_rng(5)
    monkeypatch.setattr("pblasmp.comm.exchange.MESSAGE_BYTES", limit)
    shared = False
    for _ in range(draws(60, long=150)):
        size = int(rng.integers(1, 13))
        per_node = int(rng.integers(1, size + 1))
        nodes = [tuple(range(i, min(i + per_node, size))) for i in range(0, size, per_node)]
        shape = tuple(int(x) for x in rng.integers(0, 90, 2))
        src, dst = (Side.of(layout(rng, shape, size)) for _ in range(2))
        readable = rng.integers(3) == 0
        if readable:
            cells = Cells.of(src.cells)
            src = Side(src.rows, src.cols, Cells(cells.coords, cells.ranks[:, 0], nodes), src.order)
        elif rng.integers(2):
            of = {rank: node for node in nodes for rank in node}
            cells = tuple(Cell(cell.coords, of[cell.ranks[0]]) for cell in dst.cells)
            dst, shared = Side(dst.rows, dst.cols, Cells.of(cells), dst.order), True
        node = np.repeat(np.arange(len(nodes)), [len(ranks) for ranks in nodes])
        expected = by_pairs(src, dst, node, limit)
        found = counts_of([(src, dst)], 1, size, nodes, 4)
        assert same(found, expected), (src, dst, nodes)
        found = counts_of([(src, dst)] * 3, 1, size, nodes, 4)
        for each in fields(expected):
            getattr(expected, each.name)[...] *= 3
        assert same(found, expected), (src, dst, nodes)
    assert shared


@pytest.mark.parametrize(("nranks", "per_node"), [(6, 1), (64, 8), (512, 8)])
def test_no_rank_receives_more_than_by_summa(nranks, per_node):
    """On every grid: its rows of A and its columns of B, without what it has."""
    for (m, n, k), nprow in itertools.product(
        ((4096,) * 3, (16384, 1024, 512), (512, 1024, 16384)), (1, 2, nranks // 2, nranks)
    ):
        p = pb.MatmulProblem.gemm(m, n, k, pb.Grid(nprow, nranks // nprow), 64)
        got = p.traffic(ranks_per_node=per_node).received_bytes
        for rank in {0, 1, nranks // 2, nranks - 1, int(got.argmax())}:
            (rows, cols), a, b = p.d.local_shape(rank), p.a.local_shape(rank), p.b.local_shape(rank)
            summa = rows * (k - a[1]) + (k - b[0]) * cols
            assert got[rank] <= 8 * summa, (p, rank)


def test_each_element_comes_to_a_node_once_if_it_is_multiplied_there():
    """Of unlike layouts: also to nodes whose ranks have no block of the result, or all of their operands."""
    rng = np.random.default_rng(66)
    idle = 0
    for size, per_node in itertools.product((5, 6, 7, 15), (1, 2, 4)):
        m, n, k = (int(rng.integers(1, 90)) for _ in range(3))
        op_a, op_b = rng.choice(["N", "T"], 2)
        shapes = (m, k)[:: 1 if op_a == "N" else -1], (k, n)[:: 1 if op_b == "N" else -1], (m, n)
        p = pb.MatmulProblem(*(layout(rng, shape, size) for shape in shapes), op_a=op_a, op_b=op_b)
        found = p.traffic("shared", nranks=size, ranks_per_node=per_node)
        for first in range(0, size, per_node):
            ranks = range(first, min(first + per_node, size))
            needed = {"a": np.zeros((m, k), bool), "b": np.zeros((k, n), bool)}
            places = [p.d.global_indices(rank) for rank in ranks if rank < p.d.grid.size]
            multiplied = [both for both in places if min(map(len, both))]
            idle += not multiplied
            for rows, cols in multiplied:
                needed["a"][rows], needed["b"][:, cols] = True, True
            for (name, each), op in zip(needed.items(), (op_a, op_b), strict=True):
                x = getattr(p, name)
                for rank in ranks:
                    if rank < x.grid.size:
                        own = x.global_indices(rank)
                        each[np.ix_(*(own if op == "N" else own[::-1]))] = False
            arrives = (found.received_bytes - found.node_received)[ranks].sum()
            assert arrives == p.a.dtype.itemsize * sum(each.sum() for each in needed.values()), (p, ranks)
    assert idle


@pytest.mark.parametrize("per_node", [None, 1024, 64])
def test_work_does_not_grow_with_the_ranks_of_a_node(per_node, monkeypatch):
    """By default all ranks are on one node, where each slab is everybody's: once there was a step for each of them."""
    asked = []
    summed = counts._summed
    monkeypatch.setattr(counts, "_summed", lambda *args: asked.append(args) or summed(*args))
    found = pb.MatmulProblem.gemm(5000, 5000, 5000, "64x64", 64).traffic("shared", ranks_per_node=per_node)
    assert found.sent_bytes.any() == (per_node is not None)
    assert len(asked) <= 20 * 4096 // (per_node or 4096)


def test_fewer_blocks_than_processes():
    """Bands of layouts that few processes have a part of, as by pairs; and 65,536 processes take little memory."""
    rng = np.random.default_rng(6)
    nodes = [(rank,) for rank in range(12)]
    for _ in range(draws(40, long=200)):
        shape = tuple(int(x) for x in rng.integers(3, 9, 2))
        src, dst = (Side.of(layout(rng, shape, 12)) for _ in range(2))
        bands = [(start, start + int(rng.integers(1, 3))) for start in rng.integers(shape[0] - 1, size=3)]
        moves = [(src.band(*band), dst.band(*band)) for band in bands]
        expected = Counts.none(12)
        for move in moves:
            expected.add(by_pairs(*move, np.arange(12), 1 << 62))
        assert same(counts_of(moves, 1, 12, nodes, 4), expected), (src, dst, bands)
    src, dst = (Side.of(pb.MatrixDescriptor((100, 100), block, "1x65536")) for block in (8, 7))
    tracemalloc.start()
    moved = counts_of([(src, dst)], 8, 65536, [(rank,) for rank in range(65536)], None)
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()
    assert moved.sent_bytes.sum() == moved.received_bytes.sum() > 0


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


def test_sums_over_the_ranks_beyond_64_bits():
    p = pb.MatmulProblem.gemm(3 * 10**6, 3 * 10**6, 3 * 10**6, "4x4", 750_000)
    counts = p.traffic("gathered")
    assert counts.to_dict()["total"]["flops"] == p.flops > 2**63
    assert "-" not in next(line for line in str(counts).splitlines() if "flops" in line)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"nranks": 3}, "nranks: the layouts need 4 ranks, got 3"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"memory_bytes": "8"}, "memory_bytes: expected an integer, got '8'"),
        ({"cores": 0}, "cores: expected at least 1, got 0"),
        ({"beta": 2}, "beta: the problem has no C"),
        ({"beta": np.zeros(2)}, "beta: expected a number, got array"),
    ],
)
def test_errors(how, words):
    p = pb.MatmulProblem.gemm(8, 8, 8, "2x2", 2)
    with pytest.raises(pb.ArgumentTypeError, match="nranks: expected an integer, got 'x'"):
        pb.predict(p, "dgx-h100", nranks="x")
    with pytest.raises(pb.ArgumentTypeError, match="title: expected a text, got 7"):
        p.to_toml(7)
    with pytest.raises(pb.ArgumentError, match=words):
        p.traffic(**how)
    with pytest.raises(pb.UnsupportedError, match="got 'fastest'"):
        p.traffic("fastest")


def check_classes(problem, monkeypatch, *args, **how):
    """Fail if anything differs where each rank is counted by itself; return how many were counted."""
    found = problem.traffic(*args, **how)
    with monkeypatch.context() as patch:
        patch.setattr(traffic, "classes", lambda _, ranks, *args: np.arange(ranks.size))
        expected = problem.traffic(*args, **how)
    case = f"{problem}, {args}, {how}"
    for name in (each.name for each in fields(found) if each.name != "like"):
        if isinstance(getattr(found, name), np.ndarray):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), f"{name} of {case}"
    assert [found.shapes[i] for i in found.like] == expected.shapes, case
    return len(found.shapes)


def test_routines_by_classes(monkeypatch):
    """Ranks that do alike are counted once, whatever part of a triangle they have."""
    rng, counted, ranks = np.random.default_rng(12), 0, 0
    for _ in range(draws(40, long=400)):
        size = int(rng.choice([4, 6, 9, 16, 36, 64]))
        name = pick(rng, list(ROUTINES))
        flags = pick(rng, list(legal_flags(name, "complex64")))
        known, grid = {}, pick(rng, grids(size)) if rng.integers(2) else None
        of = {}
        for each, shape in shapes(name, flags, *rng.integers(1, 150, 3).tolist()).items():
            if each in ROUTINES[name].operands + "d":
                made = layout(rng, shape, size, grid=grid, dtype="complex64")
                of[each] = known.setdefault(shape, made) if rng.integers(2) else made
        p = pb.Level3Problem(name, **of, **flags)
        algorithms = ["auto"] if p.traits.shape == "added" else ["shared", "gathered", "panels"]
        per_node = int(rng.integers(1, size + 1))
        how = {"nranks": size, "ranks_per_node": per_node}
        classes = check_classes(p, monkeypatch, pick(rng, algorithms), **how)
        counted, ranks = counted + classes, ranks + size
    assert counted < ranks


@pytest.mark.parametrize("per_node", [8, None])
@pytest.mark.parametrize("name", ["geadd", "tradd", "trsm", "syr2k"])
def test_few_ranks_of_many_are_counted(name, per_node):
    """On 1,024 ranks of a square grid, three kinds have parts of a triangle."""
    x = pb.MatrixDescriptor((2048, 2048), 64, "32x32")
    p = pb.Level3Problem(name, **dict.fromkeys((*ROUTINES[name].operands, "d"), x))
    assert len(p.traffic(ranks_per_node=per_node).shapes) <= 6


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize("name", ["lu", "cholesky", "qr"])
def test_panels_that_do_alike_are_counted_once(name, gpus, monkeypatch):
    """As much is counted as pair by pair, in steps that grow with the panels, not with their pairs."""
    calls = []

    def noting(kernel):
        def noted(self, *args, **kwargs):
            calls.append(args)
            return kernel(self, *args, **kwargs)

        return noted

    for kernel in ("gemm", "gemqrt"):
        monkeypatch.setattr(DryOperations, kernel, noting(getattr(DryOperations, kernel)))
    problem = pb.FactorProblem.of(name, 20_000 if gpus else 3000, "2x2", 64)
    once, steps = traffic.traffic(problem, gpus=gpus), len(calls)
    monkeypatch.setattr(DryOperations, "repeat", lambda _, __, count, *args, **how: count(*args, **how))
    every = traffic.traffic(problem, gpus=gpus)
    assert (once.to_dict(), once.shapes) == (every.to_dict(), every.shapes)
    assert np.array_equal(once.touched_bytes, every.touched_bytes)
    assert steps < (len(calls) - steps) / 2


def test_arrays_without_values():
    """Of 8 TiB there are views, copies and sums; what is written is counted, and what would touch memory is refused."""
    n = 1 << 20
    x = ghost((n, n), np.float64)
    assert x[1:, ::2].T.astype(np.complex64).shape == (n // 2, n - 1)
    assert (x * x[0].astype(np.complex64)).dtype == np.complex128
    assert str(x) == "ghost((1048576, 1048576), float64)"
    assert x.reshape(-1).shape == (n * n,)
    assert x[:, :6].reshape(-1, 4, order="F").shape == (n * 6 // 4, 4)
    assert x[np.arange(3)].shape == (3, n)
    assert np.where(x > 0, x, 0).real.imag.nbytes == x.nbytes == 8 * n * n
    before, copied = Ghost.written, Ghost.copied
    x[:2] = 0
    x += x.T
    np.copyto(x[0], 1)
    assert (Ghost.written - before, Ghost.copied - copied) == (8 * (3 * n + n * n), 8 * n)
    with pytest.raises(ValueError, match="broadcast"):
        x[:2] = np.zeros(3)
    with pytest.raises(ValueError, match="read-only"):
        x.fill(0)
    for refused in (np.sort, np.ndarray.sum, np.linalg.inv):
        with pytest.raises(NotImplementedError, match="of an array without values"):
            refused(x)
    with pytest.raises(pb.ArgumentError, match="expected at most"):
        ghost((1 << 30, 1 << 30), np.float64)


def test_rows_of_any_shares():
    """Slabs have rows in equal blocks; once they were also taken for rows in other parts."""
    kind = np.dtype("float64")
    p = ParallelProblem("matmul_reduce_scatter", (5, 5), (3, 3), (4, 4), (2, 3), kind, kind, kind)
    assert p.traffic().sent_bytes.sum() == 0
    with pytest.raises(pb.UnsupportedError, match=r"rows are \[2, 3\] on the ranks, expected \[3, 2\]"):
        p.traffic("panels")


def test_memory_decides():
    """ "auto" takes panels where slabs do not fit into the memory of a node."""
    p = pb.MatmulProblem.gemm(4096, 4096, 40960, "2x2", 64)
    assert p.traffic().algorithm == "shared"
    assert p.traffic(memory_bytes=1 << 30).algorithm == "panels"


def test_the_ranks_choose_once(monkeypatch):
    """In a dry run one rank's choice is every rank's: on 65,536 of them, each choice takes a third of a second."""
    asked = []
    cost = StationaryMethod.cost
    monkeypatch.setattr(StationaryMethod, "cost", lambda *args: asked.append(args) or cost(*args))
    counts = pb.MatmulProblem.gemm(110, 90, 70, "3x4", 8).traffic(ranks_per_node=4)
    assert len(counts.shapes) > 4
    assert len(asked) == 1


def test_ranks_on_paper_choose_the_panels_of_a_factorization_once(monkeypatch):
    """What one rank finds by looking at all ranks is not found again for each of them."""
    rank, calls = pb.Grid.rank, []
    monkeypatch.setattr(pb.Grid, "rank", lambda *args: calls.append(1) or rank(*args))
    d = pb.MatrixDescriptor((256, 256), (8, 8), pb.Grid(8, 8))
    pb.FactorProblem("cholesky", d, c=d).traffic(ranks_per_node=4)
    assert len(calls) < 15_000  # 36,672 if each rank looks


@pytest.mark.parametrize(("routine", "triangles"), [("trmm", 1), ("symm", 2), ("hemm", 2)])
@pytest.mark.parametrize("uplo", ["L", "U"])
def test_of_each_panel_of_a_triangle_only_its_rows_move(routine, triangles, uplo, monkeypatch):
    """Two ranks have half of the columns each, and get the other half of a staircase; of symm, of one for each term."""
    monkeypatch.setattr("pblasmp.engines.host.host_operations.HostOperations.panel", 64)
    n, width, dtype = 512, 64, np.dtype("complex64")
    d = pb.MatrixDescriptor((n, n), width, pb.Grid(1, 2), dtype=dtype)
    moved = pb.Level3Problem(routine, d, d, d, uplo=uplo).traffic("panels").sent_bytes
    staircase = sum(width * (n - at) for at in range(0, n, width)) * dtype.itemsize
    assert moved.sum() == triangles * staircase
