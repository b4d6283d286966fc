# SPDX-License-Identifier: Apache-2.0
"""Calls of PBLAS that an engine computes at once, if a glance at their arguments shows that they are legal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..blas import vector_calls
from ..dtypes import element_type
from ..engines.direct import FAMILIES, Asked, Held, Outcome, Part, Pattern, host_address, pattern
from ..engines.direct.spans import Axes
from ..engines.direct.sub_matrix import SubMatrix, in_first_column, local_range
from ..errors import ArgumentError
from ..layout.axis import owned_below
from ..layout.routines import WORDS
from ..resources import rank_share
from ..runtime.reading import number
from ..scalapack import column_major_view
from .arguments import Faults, give, takes_number
from .grids import ProcessGrid, of_number
from .operands import entries

_REMEMBERED = rank_share(1024, 1 << 16)  # layouts of a grid, and calls


_Layout = tuple[Pattern, int, int, tuple[int, int], int]
"""Of a legal descriptor: the layout, rows and columns, those of the local array, and its leading dimension."""


def _layout(grid: ProcessGrid, desc: Any, dtype: np.dtype) -> _Layout | None:
    """Return a descriptor's layout, None if there is something to say about it. Local."""
    faults = Faults("", ["desc"])
    values = entries(faults, "desc", desc)
    if faults or of_number(values[1]) is not grid:
        return None
    _, _, m, n, mb, nb, rsrc, csrc, lld = values
    nprow, npcol, row, col = grid.info
    if min(m, n, rsrc, csrc) < 0 or min(mb, nb) < 1 or rsrc >= nprow or csrc >= npcol:
        return None
    found = pattern((m, n), (mb, nb), grid.grid, (rsrc, csrc), (row, col), dtype)
    if found is None:
        return None
    rows, cols = (
        owned_below(extent, axes.mine, *axes[:4]) for extent, axes in ((m, found.rows), (n, found.cols))
    )
    return None if lld < max(1, rows if cols else 1) else (found, m, n, (rows, cols), lld)


Place = tuple[int, tuple[int, ...], tuple[int, ...], Any]
"""Where a local array is, its shape and strides, and its descriptor's integers: equally legal if they are equal."""


def _place(array: NDArray[Any], desc: Any) -> Place:
    """Return where a local array is, with its descriptor. Local; raises TypeError if that cannot be one."""
    of = (desc.tobytes(), desc.dtype.char) if type(desc) is np.ndarray else tuple(desc)
    return host_address(array), array.shape, array.strides, of


def _looked_up(grid: ProcessGrid, place: Place, array: Any, desc: Any, dtype: np.dtype) -> _Placed | None:
    """Return what is known of an array with its descriptor; None if there is something to say about them. Local."""
    known = grid.layouts
    if len(known) >= _REMEMBERED:
        known.clear()
    of, held = place[-1], None
    layout: _Layout | None = known.get((dtype.char, of))
    if layout is None:
        layout = known[dtype.char, of] = _layout(grid, desc, dtype)
    if layout is not None:
        found, m, n, here, lld = layout
        with suppress(ArgumentError):
            held = Held.of(found, column_major_view(array, here, lld))
    placed = known[dtype.char, place] = None if layout is None or held is None else (m, n, held)
    return placed


_Placed = tuple[int, int, Held]
"""A descriptor's rows and columns, and the local array."""


def _part(placed: _Placed, i: Any, j: Any, m: int, n: int, increment: Any) -> Part | None:
    """Return the part of a matrix or vector that starts at (i, j), counted from 1; None if it is none. Local.

    Args:
        placed: the matrix that it is in.
        i, j: where.
        m, n: its rows and columns; those of a vector as a column.
        increment: 1, or M_ for a row; None if this is a matrix.
    """
    rows, cols, held = placed
    is_row = False
    if increment is not None:
        if type(increment) is not int or m == rows == 1:  # a row of one element looks like a column to PBLAS
            return None
        is_row = increment == rows
        if is_row:
            m, n = n, m
        elif increment != 1:
            return None
    if type(i) is not int or type(j) is not int or i < 1 or j < 1 or i - 1 + m > rows or j - 1 + n > cols:
        return None
    return held, i - 1, j - 1, m, n, is_row


def part_of(
    array: Any, i: Any, j: Any, desc: Any, shape: tuple[int, int], dtype: np.dtype, *, written: bool
) -> tuple[ProcessGrid, Part] | None:
    """Return a sub-matrix with its grid; None if there is something to say about it. Local.

    Args:
        array, i, j, desc: the arguments of its matrix.
        shape: its rows and columns.
        dtype: its type.
        written: it is to be written.
    """
    try:
        grid = of_number(desc[1])
        if grid is None or type(array) is not np.ndarray or array.dtype != dtype:
            return None
        place = _place(array, desc)
        placed = grid.layouts.get((dtype.char, place)) or _looked_up(grid, place, array, desc, dtype)
    except Exception:  # noqa: BLE001 (a descriptor of any kind)
        return None
    if placed is None or (written and not array.flags.writeable):
        return None
    part = _part(placed, i, j, *shape, None)
    return None if part is None else (grid, part)


class _LegalCall(NamedTuple):
    """A call that has been legal, and was made.

    Attributes:
        asked: what the engine was asked for.
        in_column: whether this rank is in the process column of a vector, if numbers are made of these.
        places: where in IPIV, or TAU, this rank's first number is, and which rows, or columns, of A its numbers are of,
            if it is written.
    """

    asked: Asked
    in_column: bool
    places: tuple[int, NDArray[np.int64]] | None


def _in_column(asked: Asked) -> bool:
    """Return whether this rank is in the process column of a vector. Local."""
    return in_first_column(asked.a) or (asked.b is not None and in_first_column(asked.b))


class DirectForm:
    """A routine of PBLAS for one type as a direct call. Making one is local.

    Args:
        routine: a ``PblasRoutine``.
        full: its name.
        dtype: its type.
    """

    def __init__(self, routine: Any, full: str, dtype: np.dtype) -> None:
        names = [each for each in routine.names if each not in routine.optional]
        called, passes, fixed = routine.direct
        at = {each: i for i, each in enumerate(names)}
        self._full, self._routine, self._dtype = full, called, dtype
        self._letter = element_type(dtype).blas
        self._real = "alpha" in routine.real, "beta" in routine.real
        self.count = len(names)
        defaults = {name: Asked._field_defaults[name] for name in WORDS} | fixed
        self._words = [defaults[name] for name in WORDS]
        self._options = [
            (
                at[name],
                WORDS.index(_OPTIONS.get(name, name)),
                {each: letter for letter in letters for each in (letter, letter.lower())},
            )
            for name in names
            if (letters := routine.letters_of(name, dtype))
        ]
        self._sizes = [at[name] for name in routine.sizes if name in at]
        self._alpha, self._beta = at.get("alpha"), at.get("beta")
        self._no_beta = 0.0 if routine.beta is None else routine.beta.real
        self._first = next(at[name] for name in names if name.startswith("desc"))
        self._matrices = []
        for name, words in routine.shapes.items():
            rows, cols, option = _sizes(words)
            chosen_by = _LONGER if option == "longer" else at.get(option, -1)
            places = [at[each] for each in rows], [at[each] for each in cols], chosen_by
            self._matrices.append((at[name], places, at.get(f"inc{name}", -1), name in routine.written))
        order = [*routine.shapes]
        a, b, c, d = (order.index(passes[x]) if x in passes else -1 for x in "abcd")
        self._passes = a, b, c, d  # -1: None
        self._numbers = [at[name] for name in routine.numbers]
        self._way = _WAYS.get(FAMILIES[called], "run")
        self._beside = at.get("ipiv", at.get("tau", -1))
        self._axis, self._k = int("tau" in at), at.get("k", -1)
        self._makes = called in ("getrf", "geqrf")
        apart = {at[name] for x in routine.shapes for name in (x, f"desc{x}")}
        apart |= {*self._numbers, self._beside}
        self._plain = itemgetter(*(i for i in range(len(names)) if i not in apart))
        self._places = [(i, i + 3, written) for i, _, _, written in self._matrices]

    def run(self, args: Sequence[Any]) -> Any:
        """Compute a call; return True, the numbers that it makes, or a factorization's INFO.

        None if nothing has happened, False if the ranks have voted and did not agree. Collective over the grid.
        """
        try:
            grid = of_number(args[self._first][1])
        except Exception:  # noqa: BLE001 (a descriptor of any kind)
            return None
        if grid is None:
            return None
        ctx = grid.context
        direct = ctx.direct
        if direct is None or ctx.engine.traits.on_gpus or ctx.control.gone():
            return None  # on GPUs local arrays may have to be copied there first
        key = self._key(args)
        if key is None:
            return None
        try:
            known: _LegalCall | None = grid.calls.get(key)
        except Exception:  # noqa: BLE001 (what should be a number is none: all ranks are told of it elsewhere)
            return None
        made_before = known is not None
        if known is None:
            asked = self._asked(grid, args, key)
            if asked is None:
                return None
            known = _LegalCall(
                asked,
                bool(self._numbers) and _in_column(asked),
                _places(asked.a, self._axis) if self._makes else None,
            )
        ctx.check_open()
        done = getattr(direct, self._way)(ctx.control, known.asked)
        if done is None or done is False:
            return done
        if not made_before:
            if len(grid.calls) >= _REMEMBERED:
                grid.calls.clear()
            grid.calls[key] = known
        if self._way == "factor":
            return self._info(args, known, done)
        return self._told(args, known, done) if self._numbers else done

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return what all of a call depends on but values in arrays, and where numbers go: places come last. Local.

        Calls of one key are equally legal. None if there is something to say about the arguments.
        """
        for i in self._numbers:
            if not takes_number(args[i]):
                return None
        plain = self._plain(args)
        key = [self, plain, *map(type, plain)]
        dtype = self._dtype
        if self._beside >= 0:
            beside = args[self._beside]
            if type(beside) is not np.ndarray or beside.ndim != 1:
                return None
            if beside.dtype != dtype if self._axis else beside.dtype.kind != "i":
                return None
            if not (beside.flags.writeable and beside.flags.c_contiguous):
                return None
            key += host_address(beside), beside.size, beside.dtype.char
        try:
            for at, desc_at, written in self._places:
                array, desc = args[at], args[desc_at]
                if type(array) is not np.ndarray or (array.dtype is not dtype and array.dtype != dtype):
                    return None
                if written and not array.flags.writeable:
                    return None
                of = (desc.tobytes(), desc.dtype.char) if type(desc) is np.ndarray else tuple(desc)
                key.append(
                    (host_address(array), array.shape, array.strides, of)
                )  # ``_place``, which takes longer
        except Exception:  # noqa: BLE001 (what should be a descriptor is none)
            return None
        return tuple(key)

    def _asked(self, grid: ProcessGrid, args: Sequence[Any], key: tuple[Any, ...]) -> Asked | None:
        """Return what the engine is asked for; None if there is something to say about the arguments. Local."""
        words = self._words.copy()
        for i, place, letters in self._options:
            value = args[i]
            word = letters.get(value) if type(value) is str else None
            if word is None:
                return None
            words[place] = word
        for i in self._sizes:
            if type(args[i]) is not int or args[i] < 0:
                return None
        alpha = 1.0 if self._alpha is None else number(args[self._alpha], self._letter, self._real[0])
        beta = self._no_beta if self._beta is None else number(args[self._beta], self._letter, self._real[1])
        if not alpha or beta is None:
            return None
        parts = self._parts(grid, args, key[-len(self._matrices) :])
        if parts is None:
            return None
        a, b, c, d = self._passes
        of_a, of_d = parts[a], parts[d]
        assert of_a is not None
        assert of_d is not None
        if not all(args[i] for i in self._sizes) and (self._numbers or (of_d[3] and of_d[4])):
            return None  # numbers, or a product, of nothing: D may be scaled
        beside = None
        if self._beside >= 0:
            beside = self._part_beside(args, of_a)
            if beside is None:
                return None
        side, uplo, op_a, op_b, diag = words
        return Asked(
            self._full, self._routine, of_a, parts[b], parts[c], of_d, False, side, uplo, op_a, op_b, diag, alpha, beta,
            beside=None if self._makes else beside,
        )  # fmt: skip

    def _part_beside(self, args: Sequence[Any], a: Part) -> Part | None:
        """Return the part of IPIV or TAU that belongs to A; None if there are too few numbers. Local."""
        held, _, j, m, n, _ = a
        count = m
        if self._axis:
            count = min(m, n) if self._k < 0 else args[self._k]
            used = held, 0, j, 1, count, False
        else:
            used = held, 0, 0, int(args[self._first][2]), 1, False  # of all rows of the matrix
        here, given = sum(local_range(used, self._axis)), args[self._beside]
        if given.size < here or (self._axis and count > n):
            return None
        return _beside(given[:here], a, self._axis, count)

    def _info(self, args: Sequence[Any], known: _LegalCall, outcome: Outcome) -> int | None:
        """Return INFO, and write IPIV or TAU if it is a result; None if IPIV was no legal argument. Local."""
        info, made, _ = outcome
        if info < 0:
            return None
        if known.places is not None and made is not None:
            first, places = known.places
            numbers = made[places] if self._axis else made[places] + known.asked.a[1]
            args[self._beside][first : first + len(places)] = numbers
        return info

    def _told(self, args: Sequence[Any], known: _LegalCall, found: Any) -> Any:
        """Return the numbers as the caller gets them, and write them. Local.

        Processes that have no part of the process row or column of a vector get 0.
        """
        number: Any = vector_calls.typed(self._dtype, self._routine, found)
        if len(self._numbers) == 1:
            return give(args[self._numbers[0]], number if known.in_column else type(number)(0))
        number, index = number
        _, i, j, _, _, is_row = known.asked.a
        index += (j if is_row else i) + 1
        if not known.in_column:
            number, index = type(number)(0), 0
        value, place = self._numbers
        return give(args[value], number), give(args[place], index)

    def _parts(
        self, grid: ProcessGrid, args: Sequence[Any], places: Sequence[Place]
    ) -> list[Part | None] | None:
        """Return the sub-matrices, and None as the last; None if there is something to say about one. Local."""
        parts: list[Part | None] = []
        char, known = self._dtype.char, grid.layouts
        for (i, (rows, cols, option), inc, _), place in zip(self._matrices, places, strict=True):
            longer = option == _LONGER and args[rows[0]] < args[rows[1]]
            turned = longer or (option >= 0 and args[option] not in "NnLl")
            m, n = args[rows[turned]], args[cols[turned]]
            placed = known.get((char, place)) or _looked_up(grid, place, args[i], args[i + 3], self._dtype)
            if placed is None:
                return None
            increment = None if inc < 0 else args[inc]
            if inc >= 0 and increment is None:
                return None
            part = _part(placed, args[i + 1], args[i + 2], m, n if inc < 0 else 1, increment)
            if part is None:
                return None
            parts.append(part)
        parts.append(None)
        return parts


def _sizes(words: str) -> tuple[tuple[str, str], tuple[str, str], str]:
    """Return the sizes that may be a matrix's rows, those that may be its columns, and the option that decides. Local.

    The first ones are meant if that is "N" or "L"; "longer": the larger one of the rows.
    """
    if words == "longer nrhs":
        return ("m", "n"), ("nrhs", "nrhs"), "longer"
    if words in ("side", "order k"):
        return ("m", "n"), ("m", "n") if words == "side" else ("k", "k"), "side"
    first, other, option = (*words.split(), "", "")[:3]
    other = other or first
    return (first, other), (other, first), option


def _beside(array: NDArray[Any], a: Part, axis: int, count: int) -> Part:
    """Return the part of IPIV that belongs to rows of A, as a matrix with a column for each process column. Local.

    Or with axis 1 that of TAU, which belongs to columns, as a matrix with a row for each process row.
    """
    held, i, j, *_ = a
    rows, cols, (nprow, npcol, _), letter = *held.pattern[:3], held.pattern.letter
    if axis:
        rows, ld, of, place = Axes(1, nprow, 0, 0, rows.mine), 1, array.reshape(1, -1), (0, j, nprow, count)
    else:
        cols, ld, of, place = (
            Axes(1, npcol, 0, 0, cols.mine),
            max(1, array.size),
            array.reshape(-1, 1),
            (i, 0, count, npcol),
        )
        letter = "i"
    pattern = held.pattern._replace(
        rows=rows, cols=cols, by_columns=True, letter=letter, dtype=array.dtype, itemsize=array.itemsize,
    )  # fmt: skip
    return Held(pattern, of, host_address(array), ld, array.nbytes), *place, False


def _places(a: Part, axis: int) -> tuple[int, NDArray[np.int64]]:
    """Return where in IPIV this rank's first pivot is, and which rows of A, from 0, its pivots are of. Local.

    Or with axis 1 the same of TAU, and columns.
    """
    x, (first, count) = SubMatrix(a), local_range(a, axis)
    span, process = (x.cols, x.col) if axis else (x.rows, x.row)
    places = span.globals(process) if process >= 0 and count else np.empty(0, np.int64)
    return first, places[places < min(a[3], a[4])]


_LONGER = -2
_WAYS = {"reduced": "reduce", "factored": "factor", "lapack": "factor"}  # methods that return something
_OPTIONS = {"trans": "op_a", "transa": "op_a", "transb": "op_b"}
