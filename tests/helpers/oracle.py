# SPDX-License-Identifier: Apache-2.0
"""Block-cyclic layouts element by element, as an independent referee, and strategies that draw them.

Nothing here uses the arithmetic under test: indices are dealt out one by one, blocks are changed by counting.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from hypothesis import strategies as st

from pblasmp.layout import Axis, Grid, MatrixDescriptor
from pblasmp.layout.intersection import Stretches


def deal(axis: Axis) -> list[tuple[int, int]]:
    """Return ``(process, local index)`` of every index, by dealing them out."""
    places, held = [], [0] * axis.nprocs
    process, room = axis.source, axis.block - axis.lead
    for _ in range(axis.extent):
        if room == 0:
            process = process + 1 if process + 1 < axis.nprocs else 0
            room = axis.block
        places.append((process, held[process]))
        held[process] += 1
        room -= 1
    return places


def positions(stretches: Stretches) -> list[tuple[int, int]]:
    """Return (source, destination) of every index, in the order of a message."""
    return [
        (s.src + i * s.src_step + j, s.dst + i * s.dst_step + j)
        for s in stretches
        for i in range(s.repeat)
        for j in range(s.length)
    ]


def number(grid: Grid) -> dict[tuple[int, int], int]:
    """Return the rank at every (prow, pcol), by counting along rows or down columns."""
    if grid.order == "row":
        cells = [(p, q) for p in range(grid.nprow) for q in range(grid.npcol)]
    else:
        cells = [(p, q) for q in range(grid.npcol) for p in range(grid.nprow)]
    return {cell: rank for rank, cell in enumerate(cells)}


def places(d: MatrixDescriptor) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return ``(rank, li, lj)`` of every element ``(i, j)``."""
    ranks, cols = number(d.grid), deal(d.cols)
    return {
        (i, j): (ranks[prow, pcol], li, lj)
        for i, (prow, li) in enumerate(deal(d.rows))
        for j, (pcol, lj) in enumerate(cols)
    }


def owners(d: MatrixDescriptor) -> list[list[int]]:
    """Return the rank that owns each element, row by row."""
    ranks, cols = number(d.grid), deal(d.cols)
    return [[ranks[prow, pcol] for pcol, _ in cols] for prow, _ in deal(d.rows)]


def owned(axis: Axis, process: int) -> list[int]:
    """Return the indices of ``process``, ascending."""
    return [i for i, (p, _) in enumerate(deal(axis)) if p == process]


@lru_cache(256)
def local_indices(d: MatrixDescriptor) -> list[tuple[list[int], list[int]]]:
    """Return for every rank the global indices of its local rows and columns."""
    cells = {rank: cell for cell, rank in number(d.grid).items()}
    return [(owned(d.rows, cells[r][0]), owned(d.cols, cells[r][1])) for r in range(d.grid.size)]


@lru_cache(256)
def elements(d: MatrixDescriptor) -> list[tuple[np.ndarray, ...]]:
    """Return for every rank its elements of the whole matrix, as an index."""
    return [np.ix_(rows, cols) for rows, cols in local_indices(d)]


Memory = list[np.ndarray]
"""The flat memory of every rank's local array, padding included."""


def empty(d: MatrixDescriptor, dtype: np.dtype | None = None) -> Memory:
    """Return every rank's memory as the descriptor lays it out, filled with rubbish."""
    contiguous = 1 if d.order == "C" else 0
    sizes = [max(1, len(x[contiguous]), d.ld or 1) * len(x[1 - contiguous]) for x in local_indices(d)]
    return [np.full(size, 77, d.dtype if dtype is None else dtype) for size in sizes]


def views(memory: Memory, d: MatrixDescriptor) -> list[np.ndarray]:
    """Return every rank's local array: its memory read with the descriptor's order and leading dimension."""
    arrays = []
    for flat, (rows, cols) in zip(memory, local_indices(d), strict=True):
        if d.order == "C":
            arrays.append(
                flat.reshape(len(rows), -1)[:, : len(cols)] if len(rows) else flat.reshape(0, len(cols))
            )
        else:
            arrays.append(
                flat.reshape(len(cols), -1)[:, : len(rows)].T if len(cols) else flat.reshape(len(rows), 0)
            )
    return arrays


def write(memory: Memory, d: MatrixDescriptor, matrix: np.ndarray) -> Memory:
    """Put ``matrix`` into the memory of the ranks."""
    for view, own in zip(views(memory, d), elements(d), strict=True):
        view[...] = matrix[own]
    return memory


def read(memory: Memory, d: MatrixDescriptor) -> np.ndarray:
    """Return the matrix that the ranks hold."""
    matrix = np.zeros(d.shape, memory[0].dtype)
    for view, own in zip(views(memory, d), elements(d), strict=True):
        matrix[own] = view
    return matrix


@st.composite
def axes(draw: st.DrawFn, extent: int | None = None, nprocs: int | None = None, most: int = 40) -> Axis:
    """Draw an axis: ragged, empty, with blocks larger than it, with more processes than blocks."""
    n = draw(st.integers(0, most)) if extent is None else extent
    p = draw(st.integers(1, 6)) if nprocs is None else nprocs
    block = draw(st.integers(1, max(12, n + 3)))
    return Axis(n, block, draw(st.integers(0, p - 1)), p, draw(st.just(0) | st.integers(0, block - 1)))


grids = st.builds(Grid, st.integers(1, 3), st.integers(1, 3), st.sampled_from(["row", "col"]))


@st.composite
def descriptors(
    draw: st.DrawFn,
    shape: tuple[int, int] | None = None,
    dtype: str = "float64",
    most: int = 14,
    lead: bool = True,
) -> MatrixDescriptor:
    """Draw a descriptor: sources, leads, both grid orders and memory orders, padded or tight."""
    grid = draw(grids)
    extents = (None, None) if shape is None else shape
    rows = draw(axes(extents[0], grid.nprow, most))
    cols = draw(axes(extents[1], grid.npcol, most))
    order = draw(st.sampled_from(["C", "F"]))
    leads = (rows.lead, cols.lead) if lead else (0, 0)
    d = MatrixDescriptor(
        (rows.extent, cols.extent),
        (rows.block, cols.block),
        grid,
        (rows.source, cols.source),
        dtype,
        order,
        leads,
    )
    if not draw(st.booleans()):
        return d
    widest = max(len(x[1 if order == "C" else 0]) for x in local_indices(d))
    ld = max(1, widest + draw(st.integers(0, 3)))
    return MatrixDescriptor(d.shape, d.block, grid, d.source, d.dtype, order, leads, ld)
