# SPDX-License-Identifier: Apache-2.0
"""Calls of PBLAS that an engine computes at once, if a glance at their arguments shows that they are legal."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..blas import vector_calls
from ..dtypes import element_type
from ..engines.direct import FAMILIES, Asked, Held, Outcome, Part, Pattern, host_address, pattern_of
from ..engines.direct.spans import Axes
from ..engines.direct.sub_matrix import SubMatrix, in_first_column, local_rows
from ..errors import ArgumentError
from ..layout.routines import WORDS
from ..resources import rank_share
from ..runtime.reading import number
from ..scalapack import column_major_view
from .arguments import Faults
from .grids import ProcessGrid, of_number
from .operands import PblasOperand, entries

_REMEMBERED = rank_share(1024, 1 << 16)  # layouts of a grid, and calls


class _LegalDescriptor(NamedTuple):
    """A legal descriptor.

    Attributes:
        pattern: its layout.
        m, n: rows and columns.
        here: those of the local array.
        lld: its leading dimension.
    """

    pattern: Pattern
    m: int
    n: int
    here: tuple[int, int]
    lld: int

    def held(self, array: NDArray[Any]) -> Held | None:
        """Return a local array as direct calls take it; None if there is something to say about it. Local."""
        try:
            return Held.of(self.pattern, column_major_view(array, self.here, self.lld))
        except ArgumentError:
            return None


def _layout(grid: ProcessGrid, desc: Any, dtype: np.dtype) -> _LegalDescriptor | None:
    """Return a descriptor's layout, None if there is something to say about it. Local."""
    faults = Faults("", ["desc", "i", "j"])
    values = entries(faults, "desc", desc)
    if faults or of_number(values[1]) is not grid:
        return None
    shape = values[2], values[3]
    whole = PblasOperand("", None, 1, 1, values, shape)
    whole.check(faults, grid)
    if faults:
        return None
    descriptor, rank = whole.descriptor(grid.grid, dtype), grid.context.rank
    pattern = pattern_of(descriptor, rank)
    return pattern and _LegalDescriptor(pattern, *shape, descriptor.local_shape(rank), values[8])


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
    of = place[-1]
    layout: _LegalDescriptor | None = known.get((dtype.char, of))
    if layout is None:
        layout = known[dtype.char, of] = _layout(grid, desc, dtype)
    held = None if layout is None else layout.held(array)
    found = known[dtype.char, place] = None if layout is None or held is None else (layout.m, layout.n, held)
    return found


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
    except (TypeError, IndexError, KeyError):
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
        pivot_rows: where in IPIV the first of this rank's pivots is, and which rows of A they are of, if it is written.
    """

    asked: Asked
    in_column: bool
    pivot_rows: tuple[int, NDArray[np.int64]] | None


def _in_column(asked: Asked) -> bool:
    """Return whether this rank is in the process column of a vector. Local."""
    return in_first_column(asked.a) or (asked.b is not None and in_first_column(asked.b))


def _holds_a_number(given: Any) -> bool:
    """Return whether a number can be written to an argument. Local."""
    return type(given) is np.ndarray and given.size == 1 and given.flags.writeable


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
            first, *rest = words.split() if words != "side" else ("m", "n", "side")
            other, option = (*rest, "")[:2] if rest else (first, "")
            inc = at.get(f"inc{name}", -1)
            which = at[first], at[other], at.get(option, -1)
            self._matrices.append((at[name], which, option == "side", inc, name in routine.written))
        order = [*routine.shapes]
        a, b, c, d = (order.index(passes[x]) if x in passes else -1 for x in "abcd")
        self._passes = a, b, c, d  # -1: None
        self._numbers = [at[name] for name in routine.numbers]
        self._way = _WAYS.get(FAMILIES[called], "run")
        self._ipiv = at.get("ipiv", -1)
        apart = {at[name] for x in routine.shapes for name in (x, f"desc{x}")} | {*self._numbers, self._ipiv}
        self._plain = itemgetter(*(i for i in range(len(names)) if i not in apart))
        self._places = [(i, i + 3, written) for i, _, _, _, written in self._matrices]

    def run(self, args: Sequence[Any]) -> Any:
        """Compute a call; return True, the numbers that it makes, or a factorization's INFO.

        None if nothing has happened, False if the ranks have voted and did not agree. Collective over the grid.
        """
        try:
            grid = of_number(args[self._first][1])
        except (TypeError, IndexError, KeyError):
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
        except TypeError:  # what should be a number is none
            return None
        made_before = known is not None
        if known is None:
            asked = self._asked(grid, args, key)
            if asked is None:
                return None
            writes_pivots = self._ipiv >= 0 and asked.ipiv is None
            known = _LegalCall(
                asked,
                bool(self._numbers) and _in_column(asked),
                _pivot_rows(asked.a) if writes_pivots else None,
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
            if args[i] is not None and not _holds_a_number(args[i]):
                return None
        plain = self._plain(args)
        key = [self, plain, *map(type, plain)]
        dtype = self._dtype
        if self._ipiv >= 0:
            ipiv = args[self._ipiv]
            if type(ipiv) is not np.ndarray or ipiv.dtype.kind != "i" or ipiv.ndim != 1:
                return None
            if not (ipiv.flags.writeable and ipiv.flags.c_contiguous):
                return None
            key += host_address(ipiv), ipiv.size, ipiv.dtype.char
        try:
            for at, desc_at, written in self._places:
                array, desc = args[at], args[desc_at]
                if type(array) is not np.ndarray or (array.dtype is not dtype and array.dtype != dtype):
                    return None
                if written and not array.flags.writeable:
                    return None
                key.append(_place(array, desc))
        except TypeError:  # what should be a descriptor is none
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
        ipiv = None
        if self._ipiv >= 0:
            whole = of_a[0], 0, 0, int(args[self._first][2]), 1, False
            _, rows = local_rows(whole)
            if args[self._ipiv].size < rows:
                return None
            if self._routine != "getrf":
                ipiv = _pivots_of(args[self._ipiv][:rows], of_a)
        side, uplo, op_a, op_b, diag = words
        return Asked(
            self._full, self._routine, of_a, parts[b], parts[c], of_d, False, side, uplo, op_a, op_b, diag, alpha, beta,
            ipiv=ipiv,
        )  # fmt: skip

    def _info(self, args: Sequence[Any], known: _LegalCall, outcome: Outcome) -> int | None:
        """Return INFO, and write IPIV if it is a result; None if IPIV was no legal argument. Local."""
        info, pivots, _ = outcome
        if info < 0:
            return None
        if known.pivot_rows is not None and pivots is not None:
            first, rows = known.pivot_rows
            args[self._ipiv][first : first + len(rows)] = pivots[rows] + known.asked.a[1]
        return info

    def _told(self, args: Sequence[Any], known: _LegalCall, found: Any) -> Any:
        """Return the numbers as the caller gets them, and write them. Local.

        Processes that have no part of the process row or column of a vector get 0.
        """
        number: Any = vector_calls.typed(self._dtype, self._routine, found)
        if len(self._numbers) == 1:
            return self._written(args, self._numbers[0], number if known.in_column else type(number)(0))
        number, index = number
        _, i, j, _, _, is_row = known.asked.a
        index += (j if is_row else i) + 1
        if not known.in_column:
            number, index = type(number)(0), 0
        value, place = self._numbers
        return self._written(args, value, number), self._written(args, place, index)

    @staticmethod
    def _written(args: Sequence[Any], at: int, number: Any) -> Any:
        """Return a number, written to an argument that may be None. Local."""
        if args[at] is not None:
            args[at][...] = number
        return number

    def _parts(
        self, grid: ProcessGrid, args: Sequence[Any], places: Sequence[Place]
    ) -> list[Part | None] | None:
        """Return the sub-matrices, and None as the last; None if there is something to say about one. Local."""
        parts: list[Part | None] = []
        char, known = self._dtype.char, grid.layouts
        for (i, (first, other, option), sided, inc, _), place in zip(self._matrices, places, strict=True):
            m, n = args[first], args[other]
            if sided:
                m = n = m if args[option] in "Ll" else n
            elif option >= 0 and args[option] not in "Nn":
                m, n = n, m
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


def _pivots_of(ipiv: NDArray[Any], a: Part) -> Part:
    """Return the part of IPIV that belongs to rows of A, as a matrix with a column for each process column. Local."""
    held, i, _, m, _, _ = a
    npcol = held.pattern.grid[1]
    pattern = held.pattern._replace(
        cols=Axes(1, npcol, 0, 0, held.pattern.cols.mine), by_columns=True, letter="i", dtype=ipiv.dtype,
        itemsize=ipiv.itemsize,
    )  # fmt: skip
    column = Held(pattern, ipiv.reshape(-1, 1), host_address(ipiv), max(1, ipiv.size), ipiv.nbytes)
    return column, i, 0, m, npcol, False


def _pivot_rows(a: Part) -> tuple[int, NDArray[np.int64]]:
    """Return where in IPIV this rank's first pivot is, and which rows of A, from 0, its pivots are of. Local."""
    x, (first, count) = SubMatrix(a), local_rows(a)
    rows = x.rows.indices(x.row) if x.row >= 0 and count else np.empty(0, np.int64)
    return first, rows[rows < min(a[3], a[4])]


_WAYS = {"reduced": "reduce", "factored": "factor", "lapack": "factor"}  # methods that return something
_OPTIONS = {"trans": "op_a", "transa": "op_a", "transb": "op_b"}
