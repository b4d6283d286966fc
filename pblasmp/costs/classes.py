# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a computation do alike, so that one of them is counted for all."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

import numpy as np

from ..comm import Cells
from ..engines.dense.panel_shape import shape_beside, shape_of, shape_of_inverse
from ..engines.request import AnyProblem
from ..engines.tensor.tensor_product import shares
from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor, ParallelProblem
from ..layout.axis import Axis
from ..layout.factor_problem import FactorProblem
from ..layout.grid import coordinates
from ..layout.pieces import STRIP
from ..layout.value import Numbers
from .paper import PaperEngine, Ranks

__all__ = ["classes"]

_OF_SLABS = ("shared", "gathered", "panels", "moved")
"""Algorithms in which a rank's part of a matrix counts only by its shape, and by what of it is in a triangle."""


def classes(problem: AnyProblem, ranks: Ranks, algorithm: str, kinds: Collection[str]) -> Numbers:
    """Return for each rank the first one that computes as much and needs as much memory. Local.

    Args:
        problem: what is computed.
        ranks: all of them.
        algorithm: by which.
        kinds: those of the entries in a rank's log. Messages go from each rank to certain others.
    """
    like = np.zeros(ranks.size, np.int64)
    found: Iterable[Numbers] = [np.arange(ranks.size)]
    if isinstance(problem, MatmulProblem) and problem.scheme != "gemm" and algorithm not in _OF_SLABS:
        view = ParallelProblem.of_matmul(problem)
        problem = problem if isinstance(view, str) else view
    if isinstance(problem, ParallelProblem):
        found = _of_shares(problem, ranks)
    elif "messages" not in kinds and (
        isinstance(problem, MatmulProblem) or (isinstance(problem, Level3Problem) and algorithm in _OF_SLABS)
    ):
        found = _of_matrices(problem, ranks, shares="fence" in kinds)
    elif isinstance(problem, FactorProblem) and "messages" not in kinds:
        found = _of_factorization(problem, ranks)
    for kind in found:
        _, firsts, like = np.unique(like * (1 + kind.max()) + kind, return_index=True, return_inverse=True)
    return firsts[like]


def _of_shares(p: ParallelProblem, ranks: Ranks) -> Iterator[Numbers]:
    """Yield what decides in a tensor-parallel product: the shares of a rank, of the next one, and of its node."""
    even = shares(p.tokens[0], p.size)
    here = _numbered(
        list(zip(p.tokens, p.inputs, p.outputs, p.rows, even, *(x for _, x in p.row_bytes), strict=True))
    )
    yield here
    yield np.roll(here, -1)
    yield _numbered([tuple(sorted(here[list(node)].tolist())) for node in ranks.nodes])[
        np.arange(ranks.size) // ranks.per_node
    ]


def _of_factorization(p: FactorProblem, ranks: Ranks) -> Iterator[Numbers]:
    """Yield what decides in a factorization whose panels are shared: which panels a rank has, and its parts."""
    engine = PaperEngine(ranks, 0)
    here = np.arange(ranks.size)
    shapes = [shape_of(engine, p.a, p.routine, narrow=narrow) for narrow in (False, True)]
    shapes += [shape_of_inverse(engine, each) for each in shapes if p.inverse]
    yield np.where(here < max(each.panels for each in shapes), 1 + here, 0)
    if p.d is not None:  # right-hand sides, and rows whose columns are permuted
        for each in shapes:
            beside = shape_beside(engine, each, p.d.shape[1])
            ends = np.minimum((1 + here) * beside.width, beside.cols)
            yield np.where(here < beside.workers, np.maximum(ends - here * beside.width, 0), 0)
            rows = np.diff(each.rows * np.arange(ranks.size + 1) // each.workers)
            yield np.where(here < each.workers, rows, 0)
    for x in (p.a, p.b, p.c, p.d):
        if x is None:
            continue
        yield _of_parts(x, ranks.size)
        if x.shape[0] == x.shape[1]:  # a triangle may be copied, in strips of columns
            strips = np.arange(STRIP, x.shape[1] + STRIP, STRIP)
            cuts = _numbered(
                [np.searchsorted(x.cols.globals(q), strips).tobytes() for q in range(x.cols.nprocs)]
            )
            yield _on_grid(x, cuts[Cells.of_grid(x.grid).coords[:, 1]], ranks.size)
            yield _on_grid(x, _cuts(x), ranks.size)


def _of_parts(x: MatrixDescriptor, size: int) -> Numbers:
    """Return a number for the shape of each rank's part of a matrix."""
    down, across = Cells.of_grid(x.grid).coords.T
    of_rows, of_cols = _numbered(x.rows.counts()), _numbered(x.cols.counts())
    return _on_grid(x, of_rows[down] * (1 + of_cols.max()) + of_cols[across], size)


def _of_matrices(problem: MatmulProblem | Level3Problem, ranks: Ranks, *, shares: bool) -> Iterator[Numbers]:
    """Yield, as numbers for each rank, all that decides what it does."""
    node_of = np.arange(ranks.size) // ranks.per_node
    yield _numbered([len(node) for node in ranks.nodes])[node_of]
    for x in (getattr(problem, name) for name in "abcd"):
        if x is None:
            continue
        yield _of_parts(x, ranks.size)
        if shares:  # memory of a node depends on all its ranks
            rows, cols, coords = x.rows.counts(), x.cols.counts(), coordinates(x.grid)
            yield _numbered([_extents(coords[n[0] : n[-1] + 1], rows, cols) for n in ranks.nodes])[node_of]
    if isinstance(problem, Level3Problem):
        yield from _of_routine(problem, ranks)


def _of_routine(p: Level3Problem, ranks: Ranks) -> Iterator[Numbers]:
    """Yield what decides in a level-3 routine besides."""
    if p.traits.solves:  # right-hand sides are dealt out
        dealt = Axis.even(p.d.shape[1 if p.side == "L" else 0], ranks.size)
        yield _numbered(dealt.counts())
    elif p.traits.shape == "sided":  # the rows of a rank begin and end somewhere in A's triangle
        yield _on_grid(p.d, Cells.of_grid(p.d.grid).coords[:, 0 if p.side == "L" else 1], ranks.size)
    elif p.traits.shape == "added":  # a rank reads its own A, or another one's
        source = p.a.T if p.op_a != "N" else p.a
        both = min(source.grid.size, p.d.grid.size)
        mine, theirs = (Cells.of_grid(x.grid).coords[:both] for x in (source, p.d))
        here = np.zeros(ranks.size, np.int64)
        here[:both] = (mine == theirs).all(axis=1)
        yield here
        if p.written is not None:
            yield _on_grid(source, _cuts(source), ranks.size)
    if p.written is not None:
        yield _on_grid(p.d, _cuts(p.d), ranks.size)


def _on_grid(x: MatrixDescriptor, numbers: Numbers, size: int) -> Numbers:
    """Return numbers of the ranks of a matrix's grid, which all others differ from."""
    found = np.zeros(size, np.int64)
    found[: x.grid.size] = 1 + numbers
    return found


def _cuts(x: MatrixDescriptor) -> Numbers:
    """Return a number for how the diagonal of a matrix cuts each rank's part of it.

    That is known if, for some columns of the part, the number of rows above the diagonal is, and whether one is on it:
    for the first column of each block, and one in each step that divides all distances between blocks of rows and of
    columns.
    """
    rows, cols = x.rows, x.cols
    step = math.gcd(rows.block, cols.block, rows.lead - cols.lead)
    looked_at, ways = [], []
    for q in range(cols.nprocs):
        firsts, stops = cols.blocks(q)
        before = (firsts + cols.lead) % step  # where the first block is cut, of a step
        counts = -((before + firsts - stops) // step)
        within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        at = np.maximum((firsts - before).repeat(counts) + within * step, firsts.repeat(counts))
        looked_at.append(at)
        own = (stops - firsts).cumsum() - (stops - firsts)
        ways.append((at + (own - firsts).repeat(counts)).tobytes())
    ends = np.cumsum([0, *map(len, looked_at)])
    every, of_cols = np.concatenate(looked_at), _numbered(ways)
    cells: dict[tuple[int, int], Hashable] = {}
    for p in range(rows.nprocs):
        above = np.stack([np.searchsorted(rows.globals(p), every, side) for side in ("left", "right")])
        for q in range(cols.nprocs):
            cells[p, q] = int(of_cols[q]), above[:, ends[q] : ends[q + 1]].tobytes()
    return _numbered([cells[coords] for coords in coordinates(x.grid)])


def _numbered(values: Sequence[Hashable]) -> Numbers:
    """Return a number for each value, the same for equal ones."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(each, len(known)) for each in values], np.int64)


def _extents(
    coords: Sequence[tuple[int, int]], rows: list[int], cols: list[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the extents of the different process rows, and columns, of some ranks, and of both together."""
    down, across = ({each[axis] for each in coords} for axis in (0, 1))
    found = [sorted(rows[p] for p in down), sorted(cols[q] for q in across)]
    if rows == cols:  # a slab of rows may be one of columns
        found.append(sorted(rows[p] for p in down | across))
    return tuple(map(tuple, found))
