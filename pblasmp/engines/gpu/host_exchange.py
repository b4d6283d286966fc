# SPDX-License-Identifier: Apache-2.0
"""Exchanges between arrays on the host and on GPUs: in panels through the GPU of the rank with the host's array.

Whatever the layout on the GPUs, the host copies whole lines, and the GPUs exchange the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...comm import Agreement, CellArrays, Side
from ...dtypes import is_float8

if TYPE_CHECKING:
    from ..protocol import Engine

__all__ = ["get", "put"]

_PANEL_BYTES = 64 << 20  # that a rank stages at once, about

Array = Any


def put(
    engine: Engine, src: Side, values: CellArrays, dst: Side, arrays: CellArrays, dtype: np.dtype
) -> None:
    """Queue the move of arrays on the host to GPUs, converting their type: see ``Engine.put``. Collective."""
    if src.order == "F":
        src, dst, values, arrays = src.T, dst.T, _turned(values), _turned(arrays)
    for panel, staged in _panels(engine, src, values, dtype):
        source, given = _lines(src, values, panel)
        with Agreement(engine.transport.comm, "staging"):  # copies take memory, too
            for i, lines in given.items():
                engine.from_host(staged[i], lines.astype(dtype, copy=False) if is_float8(dtype) else lines)
        _move(engine, source, staged, *_lines(dst, arrays, panel), dtype)


def get(
    engine: Engine, src: Side, arrays: CellArrays, dst: Side, values: CellArrays, dtype: np.dtype
) -> None:
    """Move arrays on GPUs to arrays on the host of the same type: see ``Engine.get``. Collective."""
    if dst.order == "F":
        src, dst, values, arrays = src.T, dst.T, _turned(values), _turned(arrays)
    for panel, staged in _panels(engine, dst, values, dtype):
        target, wanted = _lines(dst, values, panel)
        _move(engine, *_lines(src, arrays, panel), target, staged, dtype)
        for i, lines in wanted.items():
            engine.to_host(staged[i], lines)


def _move(engine: Engine, src: Side, of: CellArrays, dst: Side, to: CellArrays, dtype: np.dtype) -> None:
    transport = engine.transport
    transport.start_exchange(transport.exchange(src, dst, dtype), of, to).finish()


def _turned(arrays: CellArrays) -> CellArrays:
    return {i: array.T for i, array in arrays.items()}


def _panels(
    engine: Engine, side: Side, values: CellArrays, dtype: np.dtype
) -> Iterator[tuple[tuple[int, int], CellArrays]]:
    """Yield the rows of each panel, and where each cell of the host's ``side`` is staged. Collective."""
    rows, step = side.rows.extent, max(1, _PANEL_BYTES // max(1, max(side.cols.counts()) * dtype.itemsize))
    if rows == 0 or side.cols.extent == 0:
        return
    with Agreement(engine.transport.comm, "staging"):
        room = {
            i: engine.empty((min(step, rows), array.shape[1]), dtype, "C", array.shape[1])
            for i, array in values.items()
        }
    for start in range(0, rows, step):
        panel = start, min(rows, start + step)
        part = side.rows.window(*panel)
        yield panel, {i: array[: part.count(side.cells[i].coords[0])] for i, array in room.items()}


def _lines(side: Side, arrays: CellArrays, panel: tuple[int, int]) -> tuple[Side, CellArrays]:
    """Return some rows of a side, and of its arrays."""
    part = Side(side.rows.window(*panel), side.cols, side.cells, side.order)
    return part, {
        i: array[side.rows.local_window(side.cells[i].coords[0], *panel)] for i, array in arrays.items()
    }
