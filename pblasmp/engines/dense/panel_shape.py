# SPDX-License-Identifier: Apache-2.0
"""How a matrix is cut into panels: their width, and the ranks that work on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from ...layout import Grid, MatrixDescriptor
from ..operations import Operations
from ..protocol import Engine

_WIDE = 512  # columns: updates with such panels are nearly as fast as with wider ones
ROUNDS = 8  # groups of panels that a rank has at least: with fewer, some ranks have much more work
_UNLIKE = 3  # times: blocks are used as panels between nodes up to this ratio to their usual width
_NARROW = 128  # columns: blocks from this width on, too; updates with them are not much slower
_BULKY = 40_000  # order from which on no rank gets much more than in two dimensions, however often ranks wait
_MOST = 1.15  # times as much, counted by the model, which is right within 5 %
_NARROWER = 64  # columns: blocks from this width on are used then, if to move the matrix would be too much
_BETWEEN = 3  # bytes between nodes take as long as so many more within one: an order of magnitude is enough
_WORTH = 1.7  # a matrix is moved to another grid if that saves two fifths: the model is no better than that
_FEW, _FEW_OF_GPUS = 0.25, 2  # right-hand sides are few up to so many times a panel's width


class PanelShape(NamedTuple):
    """The panels of one matrix: rows, columns, the columns of a panel, and the ranks that work on it.

    Panels are dealt round the ranks in groups of ``group`` adjacent ones, or with ``grid`` round its process columns:
    then rows are dealt round the process rows in blocks of ``height``, or as high as a group is wide.
    """

    rows: int
    cols: int
    width: int
    workers: int
    group: int = 1
    grid: Grid | None = None
    height: int = 0

    @property
    def across(self) -> int:
        """Number of ranks, or of process columns, that panels are dealt round."""
        return self.workers if self.grid is None else self.grid.npcol

    @property
    def panels(self) -> int:
        """Number of panels."""
        return -(-self.cols // self.width)

    @property
    def steps(self) -> int:
        """Number of panels with an element on the main diagonal."""
        return -(-min(self.rows, self.cols) // self.width)

    def owner(self, k: int) -> int:
        """Return the rank that has panel ``k``."""
        return k // self.group % self.workers

    def column(self, k: int) -> int:
        """Return the process column, or the rank, that has panel ``k``."""
        return k // self.group % self.across

    def has(self, rank: int, k: int) -> bool:
        """Return whether a rank that works has panel ``k``, or a part of it."""
        return self.column(k) == (rank if self.grid is None else self.grid.coords(rank)[1])

    def numbers(self, rank: int) -> list[int]:
        """Return the numbers of a rank's panels, ascending."""
        if rank >= self.workers:
            return []
        first = rank if self.grid is None else self.grid.coords(rank)[1]
        groups = range(first, -(-self.panels // self.group), self.across)
        return [k for i in groups for k in range(i * self.group, min((i + 1) * self.group, self.panels))]

    def bounds(self, k: int) -> tuple[int, int]:
        """Return the columns of panel ``k``: the first, and the one after the last."""
        return k * self.width, min((k + 1) * self.width, self.cols)

    def described(self, dtype: np.dtype, size: int = 0) -> MatrixDescriptor:
        """Return the matrix in panels that ranks have for themselves, as a layout.

        Args:
            size: processes that the grid has at least, if no rank has several panels: the others have nothing.
        """
        across = self.workers if self.panels > self.workers else max(self.workers, size)
        width, grid = self.width * self.group, self.grid or Grid(1, across)
        block = max(1, self.rows) if self.grid is None else self.height or width, width
        return MatrixDescriptor((self.rows, self.cols), block, grid, dtype=dtype, order="F")


def is_shared(engine: Engine) -> bool:
    """Return whether all ranks are on one node and share memory, in which writes are seen in their order. Local."""
    transport = engine.transport
    if engine.operations.own_panels is not None:
        return False
    return transport.size == 1 or (
        transport.comm.board is not None and len(transport.nodes) == 1 and not transport.why_not_shared
    )


def are_split(engine: Engine) -> bool:
    """Return whether panels on a grid are parts of ranks that do not all reach each other's memory. Local."""
    return engine.operations.own_panels is None or len(engine.transport.domains) > 1


def shape_of(
    engine: Engine, d: MatrixDescriptor, routine: str, *, narrow: bool = False, shared: bool = False
) -> PanelShape:
    """Return the panels of a matrix that is factored. Local.

    Args:
        routine: what ``FactorProblem`` calls it.
        narrow: for reflectors, which cost as much as their panel is wide.
        shared: the GPUs of a process column may share a panel.
    """
    operations, size = engine.operations, engine.transport.size
    rows, cols = d.shape
    usual = operations.panel_width(min(rows, cols))
    width = max(1, usual // 2) if narrow else usual
    if not is_shared(engine):
        whole = (size > 1 and _shape_of_blocks(d, width, size)) or PanelShape(rows, cols, width, size)
        if are_split(engine):
            nodes = tuple(map(tuple, engine.transport.domains))
            fits = None if operations.own_panels is None else whole
            return _shape_on_nodes(d, width, nodes, routine, operations.factor_wait, fits)
        return (size > 1 and shared and _shape_on_grid(operations, d, width, size)) or whole
    workers = min(size, operations.workers)
    if min(rows, cols) <= operations.factor_alone:
        workers = 1
    if workers == 1 and not narrow:
        return PanelShape(rows, cols, max(1, cols), 1)
    return PanelShape(rows, cols, width, workers)


@lru_cache(64)  # dry runs ask for each rank
def _shape_on_nodes(
    d: MatrixDescriptor,
    usual: int,
    nodes: tuple[tuple[int, ...], ...],
    routine: str,
    wait: float,
    whole: PanelShape | None,
) -> PanelShape:
    """Return panels on the grid where ranks wait least: the matrix's own, if its blocks are square and fit. Local.

    Args:
        usual: how wide panels are, if they are not the matrix's own.
        routine: what ``FactorProblem`` calls it.
        wait: elements that a rank could get while it waits for its column once.
        whole: the panels if all ranks get all of them, which are returned if they wait less then; None: they must not.
    """
    (rows, cols), size = d.shape, sum(map(len, nodes))
    least = min(rows, cols)
    lower, upper = (max(1, m * least - least**2 // 2) for m in d.shape)
    node_of = {rank: i for i, node in enumerate(nodes) for rank in node}

    def travels(line: Sequence[int]) -> float:
        """Return which part of an array is got by each of some ranks, if one of them has it; more between nodes."""
        others = len({node_of[rank] for rank in line}) - 1
        return (len(line) - 1 + _BETWEEN * others) / len(line)

    def needed(made: PanelShape, grid: Grid) -> tuple[float, float]:
        """Return how much a rank multiplies by: of L, and of U, also of what else travels down its column."""
        above, below = _largest_share(made, cols, grid.npcol), _largest_share(made, rows, grid.nprow)
        beside = upper * above if routine in ("qr", "lstsq") else 2 * rows * cols * below * above
        return lower * below, upper * above + beside * travel

    @cache
    def got(made: PanelShape) -> float:
        """Return how much a rank gets, along its row and down its column, and of the matrix if that is moved."""
        moved = 0 if d.same_places(made.described(d.dtype)) else 2 * rows * cols / size
        grid = made.grid or Grid(1, size)
        across, down = (
            [grid.rank(0, q) for q in range(grid.npcol)],
            [grid.rank(p, 0) for p in range(grid.nprow)],
        )
        if made.grid is None:
            return (lower + moved) * travels(across)
        along, column = needed(made, grid)
        column += 2 * lower * _largest_share(made, least, size) * travel
        return along * travels(across) + column * travels(down) + moved * travels(range(size))

    def cost(made: PanelShape) -> float:
        """Return how much a rank gets. How often it waits for its column counts as what it could get meanwhile."""
        waits = 0 if made.grid is None or made.grid.nprow == 1 else 4 if travel else 2
        return got(made) + waits * made.steps * wait

    travel = routine not in ("cholesky", "triangular")  # panels do, down their column and back
    widths = [usual]
    if least >= _BULKY:
        widths += [w for w in (usual * i // 16 for i in (12, 8, 6, 4, 3, 2)) if w >= _NARROW]
    shapes = []
    for down in range(1, size + 1):
        if size % down == 0:
            grids = (Grid(down, size // down, order) for order in ("row", "col"))
            shapes += [PanelShape(rows, cols, w, size, grid=grid) for grid in grids for w in widths]
    own = PanelShape(rows, cols, d.block[1], size, grid=d.grid)
    stays = d.grid.size == size and own.width <= _UNLIKE * usual and d.same_places(own.described(d.dtype))
    fits = stays and own.width >= min(_NARROW, usual / _UNLIKE)
    wholes = [] if whole is None else [whole]
    if least >= _BULKY:
        narrow = [own] if stays and own.width >= _NARROWER else []
        least_got = min(map(got, (*shapes, *narrow, *wholes)))
        most = _MOST * max((1 + _BETWEEN) * sum(needed(own, d.grid)), least_got)
        shapes, narrow, wholes = (
            [each for each in kind if got(each) <= most] for kind in (shapes, narrow, wholes)
        )
        shapes, fits = shapes or narrow or wholes, fits and own in narrow
    best = min(shapes, key=cost)
    if fits and cost(own) <= _WORTH * cost(best):
        best = own
    return min([*wholes, best], key=cost)


def _largest_share(made: PanelShape, n: int, ranks: int) -> float:
    """Return which part of ``n`` rows or columns the rank has that gets most panels, if they are dealt round. Local."""
    return min(1, -(-n // (made.width * ranks)) * made.width / max(1, n))


def _shape_on_grid(operations: Operations, d: MatrixDescriptor, usual: int, size: int) -> PanelShape | None:
    """Return panels that are shared where the matrix is, in square blocks on several process rows, or None. Local."""
    block = d.block[1]
    group = -(-block // max(1, operations.shared_width))
    several = d.grid.nprow > 1 and d.grid.size == size and d.order == "F"
    if operations.grid_panels is None or not several or block < min(usual, _WIDE) or block % group:
        return None
    made = PanelShape(*d.shape, block // group, size, group, d.grid)
    if made.rows * made.width < operations.shared_from * d.grid.nprow:
        return None
    if group > 1 and min(d.shape) < ROUNDS * size * block:
        return None
    return made if d.same_places(made.described(d.dtype)) else None


def _shape_of_blocks(d: MatrixDescriptor, width: int, size: int) -> PanelShape | None:
    """Return the panels that are parts of the matrix's blocks, about as wide as asked for, or None. Local.

    The ranks have them as the matrix is, or move less: a block of columns becomes panels of a single rank, which is, on
    most grids, one of those that have it. A block that is wider is a group of panels, if that leaves ranks equal work.
    """
    group = -(-d.block[1] // width)
    if d.block[1] < min(width, _WIDE) or d.block[1] % group:
        return None
    if group > 1 and min(d.shape) < ROUNDS * size * d.block[1]:
        return None
    made = PanelShape(*d.shape, d.block[1] // group, size, group)
    return made if made.width == width or d.same_places(made.described(d.dtype)) else None


def shape_of_inverse(engine: Engine, factored: PanelShape) -> PanelShape:
    """Return the panels of an inverse: dealt round like the matrix, since columns differ in their work. Local."""
    n = factored.cols
    if not is_shared(engine):
        return factored
    workers = min(engine.transport.size, engine.operations.workers) if factored.workers > 1 else 1
    usual = engine.operations.panel_width(n)
    return PanelShape(n, n, factored.width if workers > 1 else max(1, min(n, usual)), workers)


def are_few(factored: PanelShape, cols: int) -> bool:
    """Return whether right-hand sides are so few that the panels of a matrix stay where they are. Local."""
    few = _FEW_OF_GPUS if factored.grid is None else _FEW
    return cols <= factored.width * few and factored.across > 1


def shape_beside(engine: Engine, factored: PanelShape, cols: int, *, spreads: bool = False) -> PanelShape:
    """Return the panels of right-hand sides: one for each rank that solves. Local.

    Args:
        factored: the panels of the matrix.
        cols: how many right-hand sides there are.
        spreads: if they are few, the first rank may have all: see ``Operations.spread``.
    """
    grid = factored.grid
    if grid is not None:
        width = cols if are_few(factored, cols) else min(factored.width, -(-cols // grid.npcol))
        return factored._replace(cols=cols, width=max(1, width), height=factored.width)
    workers = factored.workers
    if is_shared(engine):
        workers = min(engine.transport.size, engine.operations.workers, max(1, cols // 8))
    elif spreads and are_few(factored, cols):
        workers = 1
    return PanelShape(factored.rows, cols, max(1, -(-cols // workers)), workers)
