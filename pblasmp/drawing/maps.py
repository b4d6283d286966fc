# SPDX-License-Identifier: Apache-2.0
"""Which rank owns what, in the terminal: matrices as colored maps, process grids, and every rank's local shapes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from rich.color import Color
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from .labels import PALETTE, Colors, MatrixView, block_count, blocks, formula, grid_in_words, sizes, views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..layout.axis import Axis
    from ..layout.grid import Grid
    from ..problems.files import ProblemFile

_MOST_LINES = 32  # of a map, and of the table of ranks
_SHADE = 0.9  # brightness of every other block if adjacent blocks are on the same rank


def show(file: ProblemFile, console: Console | None = None) -> None:
    """Draw a problem in the terminal: who owns which block, and the shape of every local array. Local.

    Small matrices are drawn element by element, larger ones block by block, as much as fits. Without
    colors, every element shows the number of its rank.

    Args:
        file: the problem; it need not be legal: its faults are listed.
        console: where to draw; the standard output by default.
    """
    console = console or Console()
    console.print(_page(file, console.width, plain=console.color_system is None), highlight=False)


def _page(file: ProblemFile, width: int, *, plain: bool) -> RenderableType:
    drawn = views(file)
    colors = Colors((file.problem.d or file.problem.a).grid)
    parts: list[RenderableType] = [Text(file.title, style="bold")]
    if file.description:
        parts.append(Text(file.description, style="dim"))
    parts += [Text(f"{formula(file)}   {sizes(file)}"), Text()]
    maps = [Group(*_heading(view), *_map(view, colors, width, plain=plain)) for view in drawn]
    parts.append(Columns([Padding(item, (0, 2, 1, 0)) for item in maps]))
    grids: dict[Grid, list[str]] = {}
    for view in drawn:
        like = next((grid for grid in grids if grid.same_ranks(view.parent.grid)), view.parent.grid)
        grids.setdefault(like, []).append(view.name)
    for grid, names in grids.items():
        of = f"{', '.join(names)}: " if len(grids) > 1 else ""
        parts += [Text(f"{of}{grid_in_words(grid)}"), *_process_grid(grid, colors, width), Text()]
    return Group(*parts, _local_shapes(drawn, colors), _verdict(file))


def _verdict(file: ProblemFile) -> Text:
    faults = file.problem.faults()
    what = file.problem.what
    if not faults:
        return Text(f"This {what} is legal.", style="green")
    return Text("\n  - ".join([f"This {what} is not legal:", *faults]), style="red")


def _ink(color: int, *, shaded: bool = False) -> Style:
    """Return the style of black text on a color of the palette."""
    red, green, blue = (int(PALETTE[color][i : i + 2], 16) * (_SHADE if shaded else 1) for i in (1, 3, 5))
    return Style(color="#000000", bgcolor=Color.from_rgb(red, green, blue))


_OUTSIDE = Style(dim=True)


class _Unit(NamedTuple):
    """A line or column of a map: an element, or a whole block."""

    start: int  # the first index of its block
    process: int
    block: int
    inside: bool


def _units(axis: Axis, window: tuple[int, int], most: int, *, by_element: bool) -> list[_Unit]:
    found: list[_Unit] = []
    for number, block in enumerate(blocks(axis)):
        if len(found) >= most:
            break
        for i in range(block.start, block.stop) if by_element else (block.start,):
            last = i + 1 if by_element else block.stop
            found.append(_Unit(block.start, block.process, number, i < window[1] and window[0] < last))
    return found


def _heading(view: MatrixView) -> list[Text]:
    x = view.parent
    notes = [
        f"{x.dtype.name}, {x.order} order" + ("" if x.ld is None else f", ld {x.ld}"),
        f"blocks of {x.block[0]} × {x.block[1]}"
        + ("" if x.source == (0, 0) else f" from process {x.source}"),
    ]
    if view.windowed:
        notes.append(f"{view.window}{x.shape[0]} × {x.shape[1]}")
    rows, cols = view.descriptor.shape
    return [
        Text.assemble((view.name, "bold"), f"  {rows} × {cols}"),
        *(Text(note, style="dim") for note in notes),
    ]


def _map(view: MatrixView, colors: Colors, width: int, *, plain: bool) -> list[Text]:
    """Return the lines of a map: by element if that fits, else by block, as many as fit."""
    x, rows, cols = view.parent, view.rows, view.cols
    if 0 in x.shape:
        return [Text("(empty)", style="dim")]
    digits = len(str(x.grid.size - 1))
    margin = len(str(x.shape[0])) + 1
    cell = max(2, digits + 1)
    if x.shape[0] <= _MOST_LINES and margin + cell * x.shape[1] <= width:
        lines = _units(x.rows, rows, x.shape[0], by_element=True)
        columns = _units(x.cols, cols, x.shape[1], by_element=True)
        return [
            _header(columns, cell, margin),
            *_lines(lines, columns, x.grid, colors, cell, margin, plain=plain),
        ]
    cell = digits + 2
    most = _MOST_LINES, max(1, (width - margin - 2) // cell)
    if view.windowed and (block_count(x.rows) > most[0] or block_count(x.cols) > most[1]):
        x = view.descriptor  # the part alone
        rows, cols = (0, x.shape[0]), (0, x.shape[1])
    total = block_count(x.rows), block_count(x.cols)
    shown = _shown(total[0], most[0], x.grid.nprow), _shown(total[1], most[1], x.grid.npcol)
    lines = _units(x.rows, rows, shown[0], by_element=False)
    columns = _units(x.cols, cols, shown[1], by_element=False)
    drawn = _lines(lines, columns, x.grid, colors, cell, margin, plain=plain)
    if shown[1] < total[1]:
        drawn = [line.append(" …") for line in drawn]
    if shown[0] < total[0]:
        drawn.append(Text(" " * margin + "⋮"))
    notes = [f"each cell one of {total[0]} × {total[1]} blocks"]
    if shown != total:
        notes.append(f"the first {shown[0]} × {shown[1]} shown")
    return [_header(columns, cell, margin), *drawn, *(Text(note, style="dim") for note in notes)]


def _shown(total: int, most: int, nprocs: int) -> int:
    """Return how many of ``total`` blocks to draw: all, or a few rounds of the processes if those are too many."""
    return total if total <= most else min(most, 12, max(4, 2 * nprocs))


def _header(columns: Sequence[_Unit], cell: int, margin: int) -> Text:
    """Return the line with the first index of each block above it, as many as there is room for."""
    text, last = "", -1
    for i, unit in enumerate(columns):
        here = margin + i * cell
        if unit.block != last and (not text or len(text) < here):
            text = text.ljust(here) + str(unit.start)
        last = unit.block
    return Text(text, style="dim")


def _lines(
    rows: Sequence[_Unit],
    cols: Sequence[_Unit],
    grid: Grid,
    colors: Colors,
    cell: int,
    margin: int,
    *,
    plain: bool,
) -> list[Text]:
    """Return the lines of a map, the first index of each block of rows next to it."""
    lines = []
    heights = Counter(unit.block for unit in rows)
    widths = Counter(unit.block for unit in cols)
    seen: Counter[int] = Counter()
    for row in rows:
        line = Text(style="none").append(
            (str(row.start) if not seen[row.block] else "").rjust(margin - 1) + " ", "dim"
        )
        seen[row.block] += 1
        labeled = seen[row.block] == (heights[row.block] + 1) // 2  # the line in the middle of the blocks
        at = 0
        while at < len(cols):
            block, width = cols[at].block, widths[cols[at].block]
            rank = grid.rank(row.process, cols[at].process)
            label = str(rank).center(cell) * width if plain else (str(rank) * labeled).center(cell * width)
            alike = (row.block if grid.nprow == 1 else 0) + (block if grid.npcol == 1 else 0)
            ink = _ink(colors(rank), shaded=alike % 2 == 1)
            for i, col in enumerate(cols[at : at + width]):
                if row.inside and col.inside:
                    line.append(label[i * cell : (i + 1) * cell], ink)
                else:
                    line.append("·".center(cell), _OUTSIDE)
            at += width
        lines.append(line)
    return lines


def _process_grid(grid: Grid, colors: Colors, width: int) -> list[Text]:
    """Return the ranks where they are in the grid."""
    cell = len(str(grid.size - 1)) + 2
    if grid.nprow > _MOST_LINES or grid.npcol * cell > width:
        return []
    lines = []
    for prow in range(grid.nprow):
        ranks = [grid.rank(prow, pcol) for pcol in range(grid.npcol)]
        lines.append(Text.assemble(*((str(rank).center(cell), _ink(colors(rank))) for rank in ranks)))
    return lines


def _local_shapes(drawn: Sequence[MatrixView], colors: Colors) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("rank", *(f"local {view.name}" for view in drawn)):
        table.add_column(title)
    ranks = max(view.parent.grid.size for view in drawn)
    for rank in range(ranks) if ranks <= _MOST_LINES else (*range(_MOST_LINES // 2), None, ranks - 1):
        if rank is None:
            table.add_row(" …")
        else:
            cells = [_local_shape(view, rank) for view in drawn]
            table.add_row(Text(f" {rank} ", style=_ink(colors(rank))), *cells)
    return table


def _local_shape(view: MatrixView, rank: int) -> str:
    if rank >= view.parent.grid.size:
        return "-"
    return view.local_shape(rank) + ("" if view.parent.ld is None else f", ld {view.parent.ld}")
