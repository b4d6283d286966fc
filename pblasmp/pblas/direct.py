# SPDX-License-Identifier: Apache-2.0
"""Calls of PBLAS that an engine computes at once, if a glance at their arguments shows that they are legal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..calls import number
from ..engines.direct import Asked, Held, Part, Pattern, pattern_of
from .arguments import Faults
from .grids import ProcessGrid, of_number
from .operands import Operand, entries

__all__ = ["directly"]

_REMEMBERED = 1024  # layouts of a grid


class _Layout(NamedTuple):
    """A legal descriptor: what is known of its layout, its size, and this process's part.

    Attributes:
        pattern: its layout.
        m, n: rows and columns.
        rows, cols: those of the local array.
        lld: its leading dimension.
    """

    pattern: Pattern
    m: int
    n: int
    rows: int
    cols: int
    lld: int


def _layout(grid: ProcessGrid, desc: Any, dtype: np.dtype) -> _Layout | None:
    """Return a descriptor's layout, None if there is something to say about it. Local."""
    faults = Faults("", ["desc"])
    values = entries(faults, "desc", desc)
    if faults or of_number(values[1]) is not grid or min(values[2:6]) < 1 or values[8] < 1:
        return None
    if not (0 <= values[6] < grid.grid.nprow and 0 <= values[7] < grid.grid.npcol):
        return None
    descriptor = Operand("a", None, 1, 1, values, (0, 0)).descriptor(grid.grid, dtype)
    rank = grid.context.rank
    pattern, (rows, cols) = pattern_of(descriptor, rank), descriptor.local_shape(rank)
    if pattern is None or values[8] < rows:
        return None
    return _Layout(pattern, values[2], values[3], rows, cols, values[8])


def _part(grid: ProcessGrid, dtype: np.dtype, four: Sequence[Any], shape: tuple[int, int]) -> Part | None:
    """Return sub(A) of a call for its four arguments, None if there is something to say about them. Local."""
    array, i, j, desc = four
    if type(array) is not np.ndarray or array.dtype != dtype or type(i) is not int or type(j) is not int:
        return None
    key = (desc.tobytes(), desc.dtype.char) if type(desc) is np.ndarray else tuple(desc)
    found = grid.layouts.get((key, dtype.char))
    if found is None:
        if len(grid.layouts) >= _REMEMBERED:
            grid.layouts.clear()
        found = grid.layouts[key, dtype.char] = _layout(grid, desc, dtype) or ()
    if not found:
        return None
    pattern, rows_of_all, cols_of_all, rows, cols, lld = found
    m, n = shape
    if i < 1 or j < 1 or i - 1 + m > rows_of_all or j - 1 + n > cols_of_all:
        return None
    item = dtype.itemsize
    end = 0
    if rows and cols:
        if array.ndim == 1:
            if array.size < lld * cols or array.strides[0] != item:
                return None
            array = array[: lld * cols].reshape((lld, cols), order="F")
        elif array.ndim != 2 or array.shape[0] < rows or array.shape[1] < cols:
            return None
        down, across = array.strides
        if (down != item and rows > 1) or (across != lld * item and cols > 1):
            return None
        end = item * (lld * (cols - 1) + rows)
    elif array.ndim not in (1, 2):
        return None
    address = array.__array_interface__["data"][0]
    return Held(pattern, array, address, lld, address + end), i - 1, j - 1, m, n, False


def directly(
    full: str,
    routine: str,
    names: Sequence[str],
    shapes: Mapping[str, Callable[[dict[str, Any]], tuple[int, int]]],
    written: str,
    dtype: np.dtype,
    letter: str,
    allowed: dict[str, str],
    fixed: dict[str, str],
    real: str,
    args: Sequence[Any],
) -> bool | None:
    """Compute a call; return None if nothing has happened, False if the ranks have voted and did not agree.

    Collective over the grid.

    Args:
        full: the call's name.
        routine: what engines call it.
        names: of its arguments.
        shapes: by matrix, the shape of its part.
        written: the matrix that is written.
        dtype, letter: its type.
        allowed: by option, its legal letters.
        fixed: options that are the same in every call.
        real: scalars that are real for every type.
        args: what it was given.
    """
    values = dict(zip(names, args, strict=True))
    try:
        grid = of_number(values["desca"][1])
    except (TypeError, IndexError, KeyError):
        return None
    if grid is None:
        return None
    ctx = grid.context
    direct = ctx.direct
    if direct is None:
        return None
    options = dict(fixed)
    for name, letters in allowed.items():
        value = values[name]
        if type(value) is not str or len(value) != 1:
            return None
        value = value.upper()
        if value not in letters:
            return None
        values[name] = options[_OPTIONS.get(name, name)] = value
    for name in ("m", "n", "k"):
        if name in values and (type(values[name]) is not int or values[name] < 1):
            return None
    alpha = number(values["alpha"], letter, "alpha" in real)
    beta = number(values.get("beta", 0), letter, "beta" in real)
    if not alpha or beta is None:
        return None
    ctx.check_open()
    parts: dict[str, Part] = {}
    for name, shape in shapes.items():
        at = names.index(name)
        part = _part(grid, dtype, args[at : at + 4], shape(values))
        if part is None:
            return None
        parts[name] = part
    of = parts.get
    asked = Asked(
        full, routine, parts["a"], of("b"), of("c"), parts[written], False, alpha=alpha, beta=beta, **options
    )
    return direct.run(ctx.control, asked)


_OPTIONS = {"trans": "op_a", "transa": "op_a", "transb": "op_b"}
