# SPDX-License-Identifier: Apache-2.0
"""Calls of PBLAS that CPU ranks compute at once: if the core, which reads the arguments, finds that they are legal."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._core import objects
from ..blas import vector_calls
from ..dtypes import element_type
from ..engines.direct import (
    FAMILIES,
    ROUTINE_NUMBERS,
    Asked,
    Held,
    Outcome,
    Part,
    Pattern,
    host_address,
    pattern,
)
from ..engines.direct.asked import Axes
from ..engines.direct.sub_matrix import local_range
from ..errors import ArgumentError
from ..layout.axis import owned_below
from ..layout.routines import WORDS
from ..resources import rank_share
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
    if type(array) is not np.ndarray:  # fields of other objects are elsewhere
        raise TypeError
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


def part_of(
    array: Any, i: Any, j: Any, desc: Any, shape: tuple[int, int], dtype: np.dtype, *, written: bool
) -> tuple[ProcessGrid, Part] | None:
    """Return a sub-matrix with its grid; None if there is something to say about it. Local."""
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
    (m, n), (rows, cols, held) = shape, placed
    if type(i) is not int or type(j) is not int or i < 1 or j < 1 or i - 1 + m > rows or j - 1 + n > cols:
        return None
    return grid, (held, i - 1, j - 1, m, n, False)


class DirectForm:
    """A routine of PBLAS for one type as a direct call, under its full name. Making one is local."""

    def __init__(self, routine: Any, full: str, dtype: np.dtype) -> None:
        names = [each for each in routine.names if each not in routine.optional]
        self.routine, passes, fixed = routine.direct
        at = {each: i for i, each in enumerate(names)}
        self.call, self.dtype, self.letter = full, dtype, element_type(dtype).blas
        self.count = len(names)
        self._places = [(at[x], at[f"desc{x}"]) for x in routine.shapes]
        self._numbers = [at[name] for name in routine.numbers]
        self._scalars = [at[name] for name in ("alpha", "beta") if name in at]
        self._way = _WAYS.get(FAMILIES[self.routine], "run")
        self._beside, self._axis = at.get("ipiv", at.get("tau", -1)), int("tau" in at)
        self._makes = self.routine in ("getrf", "geqrf")
        given = {_OPTIONS.get(name, name): name for name in names if routine.letters_of(name, dtype)}
        defaults = {name: Asked._field_defaults[name] for name in WORDS} | fixed
        letters = (routine.letters_of(given[word], dtype) if word in given else "" for word in WORDS)
        sizes = [name for name in routine.sizes if name in at]
        matrices: list[int] = []
        for name, words in routine.shapes.items():
            rows, cols, option = _sizes(words)
            option = _OPTIONS.get(option, option)
            chosen_by = WORDS.index(option) if option in given else objects.BY_NONE
            matrices += at[name], *map(sizes.index, rows), *map(sizes.index, cols)
            matrices += objects.BY_LENGTH if option == "longer" else chosen_by, at.get(f"inc{name}", -1)
            matrices.append(name in routine.written)
        matrices += [-1] * 8 * (objects.MATRICES - len(routine.shapes))
        order = [*routine.shapes]
        self._form = objects.FORM.pack(
            full.encode(), ROUTINE_NUMBERS[self.routine], "sdcz".index(self.letter),
            "".join(defaults[word] for word in WORDS).encode(),
            b"".join(each.encode().ljust(4, b"\0") for each in letters),
            *(at.get(given.get(word, ""), -1) for word in WORDS),
            *(at[name] for name in sizes), *[-1] * (objects.SIZES - len(sizes)),
            at.get("alpha", -1), at.get("beta", -1), "alpha" in routine.real, "beta" in routine.real,
            0.0 if routine.beta is None else routine.beta.real, *matrices,
            *(order.index(passes[x]) if x in passes else -1 for x in "abcd"),
            bool(self._numbers), self._beside, self._axis, at.get("k", -1), self._makes, *objects.NO_HANDLES,
        )  # fmt: skip
        self.address = host_address(np.frombuffer(self._form, np.uint8))

    def run(self, args: Sequence[Any]) -> Any:
        """Compute a call; return True, the numbers that it makes, or a factorization's INFO.

        None if nothing has happened, False if the ranks have voted and did not agree. Collective over the grid.
        """
        try:
            grid = of_number(args[self._places[0][1]][1])
        except Exception:  # noqa: BLE001 (a descriptor of any kind)
            return None
        if grid is None:
            return None
        ctx = grid.context
        direct: Any = ctx.direct_on_host
        if direct is None:  # on GPUs local arrays may have to be copied there first
            return None
        for i in self._numbers:
            if not takes_number(args[i]):
                return None
        compute = getattr(direct, self._way)
        done = compute(ctx.control, self, args)
        if done is None and (plain := self._plain(args)) is not None:
            done = compute(ctx.control, self, plain)
        return done

    def _plain(self, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return arguments with Python's numbers, and arrays as descriptors, None if that is what these are. Local."""
        found = [*args]
        try:
            for i in self._scalars:
                if isinstance(args[i], np.number):
                    found[i] = args[i].item()
            for _, i in self._places:
                if type(args[i]) in (list, tuple):
                    found[i] = np.array([*map(operator.index, args[i])], np.int64)
        except Exception:  # noqa: BLE001 (what is wrong with an argument is said where all ranks hear it)
            return None
        return None if all(map(operator.is_, found, args)) else tuple(found)

    def learn(self, args: Sequence[Any], tell: Callable[[Any, Any, Held, int, int], None]) -> bool:
        """See ``RoutineForm``. Local."""
        try:
            for i, desc_at in self._places:
                array, desc = args[i], args[desc_at]
                grid = of_number(desc[1])
                place = _place(array, desc)
                placed = None if grid is None else _looked_up(grid, place, array, desc, self.dtype)
                if placed is None:
                    return False
                rows, cols, held = placed
                tell(array, desc, held, rows, cols)
        except Exception:  # noqa: BLE001 (a descriptor of any kind)
            return False
        return True

    def answer(self, args: Sequence[Any], direct: Any, done: Any) -> Any:
        """See ``RoutineForm``. Local."""
        if self._way == "run":
            return done
        return self._info(args, direct, done) if self._way == "factor" else self._told(args, direct, done)

    def _info(self, args: Sequence[Any], direct: Any, outcome: Outcome) -> int | None:
        """Return INFO, and write IPIV or TAU if it is a result; None if IPIV was no legal argument. Local."""
        info, made, _ = outcome
        if info < 0:
            return None
        if self._makes and made is not None:
            held, *start, m, n, _ = direct.operand(0)
            axes = held.pattern.cols if self._axis else held.pattern.rows
            first, places = _places(axes, start[self._axis], n if self._axis else m, min(m, n))
            numbers = made[places] if self._axis else made[places] + start[0]
            args[self._beside][first : first + len(places)] = numbers
        return info

    def _told(self, args: Sequence[Any], direct: Any, found: Any) -> Any:
        """Return the numbers as the caller gets them, and write them. Local.

        Processes that have no part of the process row or column of a vector get 0.
        """
        number: Any = vector_calls.typed(self.dtype, self.routine, found)
        here, start = direct.vector()
        if len(self._numbers) == 1:
            return give(args[self._numbers[0]], number if here else type(number)(0))
        number, index = number
        index += start
        if not here:
            number, index = type(number)(0), 0
        value, place = self._numbers
        return give(args[value], number), give(args[place], index)


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


@lru_cache(rank_share(256, 1 << 14))
def _places(axes: Axes, start: int, extent: int, count: int) -> tuple[int, NDArray[np.int64]]:
    """Return where in IPIV, or TAU, this rank's first number is, and which rows, or columns, its numbers are of. Local.

    The first ``count`` of A's, which begin at ``start``, have numbers.
    """
    first, number, span = local_range(axes, start, extent)
    places = span.globals(axes.mine) if number else np.empty(0, np.int64)
    return first, places[places < count]


_WAYS = {"reduced": "reduce", "factored": "factor", "lapack": "factor"}  # methods that return something
_OPTIONS = {"trans": "op_a", "transa": "op_a", "transb": "op_b"}
