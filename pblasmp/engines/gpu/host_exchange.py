# SPDX-License-Identifier: Apache-2.0
"""Exchanges between arrays on the host and on GPUs: in panels through the GPU of the rank with the host's array.

Whatever the layout on the GPUs, the host copies whole lines, and the GPUs exchange the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Agreement, Side
from ...dtypes import is_float8

if TYPE_CHECKING:
    from ..protocol import Engine

__all__ = ["get", "put"]

_PANEL_BYTES = 64 << 20  # that a rank stages at once, about

Array = Any
OnHost = Sequence[NDArray[Any] | None]
OnGpu = Sequence[Array | None]


def put(engine: Engine, src: Side, values: OnHost, dst: Side, arrays: OnGpu, dtype: np.dtype) -> None:
    """Queue the move of arrays on the host to GPUs, converting their type: see ``Engine.put``. Collective."""
    if src.order == "F":
        src, dst, values, arrays = src.T, dst.T, _turned(values), _turned(arrays)
    for panel, staged in _panels(engine, src, values, dtype):
        source, given = _lines(src, values, panel)
        with Agreement(engine.transport.comm, "staging"):  # copies take memory, too
            for array, lines in zip(staged, given, strict=True):
                if array is not None and lines is not None:
                    engine.from_host(array, lines.astype(dtype, copy=False) if is_float8(dtype) else lines)
        _move(engine, source, staged, *_lines(dst, arrays, panel), dtype)


def get(engine: Engine, src: Side, arrays: OnGpu, dst: Side, values: OnHost, dtype: np.dtype) -> None:
    """Move arrays on GPUs to arrays on the host of the same type: see ``Engine.get``. Collective."""
    if dst.order == "F":
        src, dst, values, arrays = src.T, dst.T, _turned(values), _turned(arrays)
    for panel, staged in _panels(engine, dst, values, dtype):
        target, wanted = _lines(dst, values, panel)
        _move(engine, *_lines(src, arrays, panel), target, staged, dtype)
        for array, lines in zip(staged, wanted, strict=True):
            if array is not None and lines is not None:
                engine.to_host(array, lines)


def _move(engine: Engine, src: Side, of: OnGpu, dst: Side, to: OnGpu, dtype: np.dtype) -> None:
    transport = engine.transport
    transport.start_exchange(transport.exchange(src, dst, dtype), of, to).finish()


def _turned(arrays: Sequence[Array | None]) -> list[Array | None]:
    return [None if array is None else array.T for array in arrays]


def _panels(
    engine: Engine, side: Side, values: OnHost, dtype: np.dtype
) -> Iterator[tuple[tuple[int, int], list[Array | None]]]:
    """Yield the rows of each panel, and where each cell of the host's ``side`` is staged. Collective."""
    rows, step = side.rows.extent, max(1, _PANEL_BYTES // max(1, max(side.cols.counts()) * dtype.itemsize))
    if rows == 0 or side.cols.extent == 0:
        return
    with Agreement(engine.transport.comm, "staging"):
        room = [
            None
            if array is None
            else engine.empty((min(step, rows), array.shape[1]), dtype, "C", array.shape[1])
            for array in values
        ]
    for start in range(0, rows, step):
        panel = start, min(rows, start + step)
        part = side.rows.window(*panel)
        yield (
            panel,
            [
                None if array is None else array[: part.count(cell.coords[0])]
                for cell, array in zip(side.cells, room, strict=True)
            ],
        )


def _lines(
    side: Side, arrays: Sequence[Array | None], panel: tuple[int, int]
) -> tuple[Side, list[Array | None]]:
    """Return some rows of a side, and of its arrays."""
    part = Side(side.rows.window(*panel), side.cols, side.cells, side.order)
    return part, [
        None if array is None else array[side.rows.local_window(cell.coords[0], *panel)]
        for cell, array in zip(side.cells, arrays, strict=True)
    ]
