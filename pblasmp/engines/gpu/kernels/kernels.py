# SPDX-License-Identifier: Apache-2.0
"""The engine's own CUDA kernels: sums of the ranks' parts, barriers and flags, strided and transposing copies.

They are compiled when they are first needed, one module for each combination of types. They include no headers, since
CUDA's are not found everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ....dtypes import DTYPES, FLOAT8, accumulation_dtype
from ....errors import ArgumentError
from .compiler import CompiledKernels, Grid, Kernel, Launch
from .views import Move, View, whole_move

_VECTOR_BYTES = 16
_THREADS = 512
_SUM_THREADS = 256
_TILE = 32
_LONG = 64  # words of a run that a warp copies together
_MOVES = 32  # copies by one kernel, at most: parameters take up to 4 KB
_WORDS_OF_MOVE = 13  # of these
_WAITS = 32  # flags that one kernel waits for, at most: one thread of a warp each
_TILES = 32  # of matrices that are added, by one kernel
_U32 = 2**32

CUDA_TYPES = {
    (DTYPES | FLOAT8)[name]: of
    for name, of in {
        "float64": "double", "float32": "float", "float16": "fp16", "bfloat16": "bf16", "complex64": "c64",
        "complex128": "c128", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
    }.items()
}  # fmt: skip
_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2}

_WORDS = {16: "quad", 8: "u64", 4: "u32", 2: "u16", 1: "u8"}


def vector_width(part: np.dtype, cols: int, views: Sequence[View]) -> int:
    """Return how many adjacent entries a thread can add at once: 16 bytes of a part, or one entry. Local.

    Args:
        part: type of the parts.
        cols: entries of a row.
        views: all matrices that are read or written in this way: their rows must be aligned for vectors.
    """
    width = _VECTOR_BYTES // part.itemsize or 1
    if cols % width:
        return 1
    for view in views:
        size = view.dtype.itemsize
        together = view.address | (view.ld * size if view.rows > 1 else 0)
        if together % _VECTOR_BYTES and together % (width * size):
            return 1
    return width


class Tile(NamedTuple):
    """A part of matrices that are added: the addresses of D, X and C, and how many rows and columns it has.

    Of a triangle also ``i`` and ``j``, the places of its first row and column among those of this rank.
    """

    d: int
    x: int
    c: int
    rows: int
    cols: int
    i: int = 0
    j: int = 0


class Deal(NamedTuple):
    """How the indices of a process are dealt out: in blocks, of which every ``nprocs``-th is its own.

    Attributes:
        turn: which block is its first.
        lead: how many indices the first block of all lacks.
        skipped: how many of these it would have.
    """

    block: int
    nprocs: int
    turn: int
    lead: int
    skipped: int


_Moved = tuple[Kernel, Grid, Sequence[int], int]
Stored = tuple[bool, int]  # whether a matrix is in Fortran order, and its leading dimension


class Kernels(CompiledKernels):
    """The kernels of matrices of any types, and of barriers. Local."""

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        self.multiprocessors = int(properties["multiProcessorCount"])
        self._adders: dict[tuple[Any, ...], Kernel] = {}
        self._movers: dict[tuple[Any, ...], Kernel] = {}
        self._of_flags: dict[str, Kernel] = {}

    def signal(self, what: str, flags: Sequence[int], rank: int, kind: int, kinds: int) -> Launch:
        """Return half a barrier of all ranks, or a whole one. Local.

        Args:
            what: "arrive": signal every rank; "await": wait until every rank has arrived once more than last time;
                "meet": both.
            flags: addresses of every rank's words: ``kinds * (size + 2)`` of them, zero at first.
            rank: the index of this rank's.
            kind: which barrier; each has separate counts.
            kinds: how many there are.
        """
        size = len(flags)
        kernel = self._compiled(what, f"{size}Qiiii", file="sync", RANKS=size, WAITS=_WAITS)
        return kernel.launch((1, 1), -(-size // 32) * 32, (*flags, size, rank, kind, kinds))

    def raise_flags(self, stream: Any, flags: Sequence[int]) -> None:
        """Queue: set the words at these addresses, here or at peers, to 1. Local."""
        self._launch_on_flags("raise_flags", stream, flags)

    def await_flags(self, stream: Any, flags: Sequence[int]) -> None:
        """Queue a wait until the words at these addresses are no longer zero, and set them to zero. Local."""
        self._launch_on_flags("await_flags", stream, flags)

    def _launch_on_flags(self, name: str, stream: Any, flags: Sequence[int]) -> None:
        """Queue a kernel of one warp for every so many flags. Local."""
        kernel = self._of_flags.get(name)
        if kernel is None:
            kernel = self._compiled(name, f"{_WAITS}Qi", file="sync", RANKS=1, WAITS=_WAITS)
            self._of_flags[name] = kernel
        for first in range(0, len(flags), _WAITS):
            some = flags[first : first + _WAITS]
            kernel(stream, (1, 1), _WAITS, (*some, *[0] * (_WAITS - len(some)), len(some)))

    def add(
        self,
        stream: Any,
        parts: Sequence[View],
        outs: Sequence[View],
        *,
        beta: complex = 0,
        c: View | None = None,
        bias: View | None = None,
        activation: str | None = None,
        scale: int = 0,
        amax: int = 0,
        blocks: int = 0,
    ) -> None:
        """Queue ``out = scale f(sum of parts + beta C + bias)``, summed in float32 or wider, rounded once. Local.

        Args:
            parts: matrices of one shape, type and leading dimension, added in this order; none: their sum is 0.
            outs: where the same result is stored, here or at peers; all but the first share a leading dimension.
            beta, c: read if beta is not 0.
            bias: one row.
            activation: None, "relu", "gelu".
            scale, amax: addresses of one float32, 0 for none.
            blocks: of threads, at most; 0: two for each multiprocessor. For tests.

        Raises:
            ArgumentError: the shapes or types differ.
        """
        out = outs[0]
        first, c = parts[0] if parts else out, c if beta != 0 else None
        check_added(parts, outs, c, bias)
        if not first.rows * first.cols:
            return
        width = vector_width(first.dtype, first.cols, [*parts, *outs, *([c] if c else [])])
        lines = first.cols // width
        exact = accumulation_dtype(first.dtype)
        kind = (
            first.dtype, out.dtype, exact, c.dtype if c else exact, bias.dtype if bias else exact,
            len(parts), len(outs), width, _index(first.rows * lines),
        )  # fmt: skip
        kernel = self._adders.get(kind)
        if kernel is None:
            self._adders[kind] = kernel = self._adder(*kind)
        grid = min(blocks or 2 * self.multiprocessors, -(-first.rows * lines // _THREADS))
        kernel(stream, (grid, 1), _THREADS, (
            *([part.address for part in parts] or [0]), first.ld,
            *[view.address for view in outs], out.ld, outs[-1].ld, first.rows, lines,
            c.address if c else 0, c.ld if c else 0, *_scalar(beta, exact),
            bias.address if bias else 0, _ACTIVATIONS[activation], scale, amax,
        ))  # fmt: skip

    def _adder(self, *kind: Any) -> Kernel:
        """Return the kernel of ``add``, by its element types, counts, and what it counts in. Local.

        An operand needs a type even if it is not read.
        """
        *types, parts, outs, width, index = kind
        names = ("PART", "OUT", "SUM", "CTYPE", "BIAS")
        of_types = {name: CUDA_TYPES[dtype] for name, dtype in zip(names, types, strict=True)}
        macros: dict[str, Any] = {**of_types, "P": parts, "OUTS": outs, "V": width, "INDEX": index}
        if types[1].itemsize == 1:
            macros["FLOAT8"] = 1
        parameters = f"{parts or 1}QQ{outs}QQQQQQQ{_letters(types[2])}QiQQ"
        return self._compiled("add", parameters, **macros)

    def copy(self, stream: Any, to: View, of: View) -> None:
        """Queue a copy of a matrix at memory speed. Local."""
        self.move(stream, [whole_move(to, of)])

    def move(self, stream: Any, moves: Iterable[Move], *, conjugate: int = 0) -> None:
        """Queue what ``moves`` returns. Local."""
        for kernel, grid, arguments, _ in self._moves(moves, conjugate):
            kernel(stream, grid, _THREADS, arguments)

    def spread(self, stream: Any, to: Sequence[int], of: int, nbytes: int) -> None:
        """Queue copies of contiguous bytes to several places, by the kernel of ``move``. Local."""
        together = _VECTOR_BYTES | of | nbytes
        for at in to:
            together |= at
        word = together & -together
        for first in range(0, len(to), _MOVES):
            some = [(at, _FLAT, of, _FLAT, (1, 1, 1, nbytes)) for at in to[first : first + _MOVES]]
            kernel, grid, arguments, _ = self._move(word, _times(nbytes, word), some, "")
            kernel(stream, grid, _THREADS, arguments)

    def moves(self, moves: Iterable[Move], *, conjugate: int = 0) -> list[Launch]:
        """Return copies in four dimensions, the last of them contiguous bytes, which do not overlap. Local.

        Blocks of a block-cyclic matrix are packed so: (blocks down, rows of one, blocks across, bytes of a row of one).

        Args:
            moves: of each where it is written, and the bytes from one to the next along the first three dimensions
                there; the same where it is read; the extents of the four dimensions.
            conjugate: the bytes of complex numbers, 8 or 16, whose conjugates are written; 0: bytes are copied.

        Raises:
            ArgumentError: an extent or a stride is negative, or no multiple of the bytes of complex numbers.
        """
        return [
            kernel.launch(
                grid, _THREADS, arguments, [_WORDS_OF_MOVE * i + at for i in range(count) for at in (0, 1)]
            )
            for kernel, grid, arguments, count in self._moves(moves, conjugate)
        ]

    def _moves(self, moves: Iterable[Move], conjugate: int) -> list[_Moved]:
        """Return kernels, each with its grid, its arguments, and how many moves it makes."""
        alike: dict[tuple[int, int], list[Move]] = {}
        for each in moves:
            _, there, _, here, extents = each
            if min(*extents, *there, *here) < 0:
                raise ArgumentError(
                    f"extents {tuple(extents)}, strides {tuple(there)} and {tuple(here)}: none may be < 0"
                )
            if 0 not in extents:
                word = word_of(each)
                if conjugate:
                    if word < conjugate:
                        raise ArgumentError(f"complex numbers of {conjugate} bytes at multiples of {word}")
                    word = conjugate
                alike.setdefault((word, _times(extents[-1], word)), []).append(each)
        return [
            self._move(word, many, some[first : first + _MOVES], "flipped" if conjugate else "")
            for (word, many), some in alike.items()
            for first in range(0, len(some), _MOVES)
        ]

    def _move(self, word: int, each: int, moves: Sequence[Move], flip: str) -> _Moved:
        """Return one kernel: ``word`` bytes at a time, ``each`` times by a thread of a warp, or 0."""
        # a piece is what so many threads copy at a time
        threads, piece = (32, 32 * each * word) if each else (1, word)
        totals = [a * b * c * -(-run // piece) for *_, (a, b, c, run) in moves]
        needed = [-(-total * threads // _THREADS) for total in totals]
        grid, first, words = min(4 * self.multiprocessors, sum(needed)), 0, []
        for (to, there, of, here, (_, b, c, run)), total, count in zip(moves, totals, needed, strict=True):
            words += [to, of, *there, *here, b, c, run // word, total, first]
            first = (first + count) % grid
        capacity = _capacity(len(moves))
        kind = word, each, _index(max(totals)), capacity, flip
        kernel = self._movers.get(kind)
        if kernel is None:
            macros: dict[str, Any] = dict(zip(("T", "EACH", "INDEX", "MOVES", "FLIP"), kind, strict=True))
            macros["T"] = _WORDS[word]
            parameters = f"{_WORDS_OF_MOVE * capacity}Qi"
            self._movers[kind] = kernel = self._compiled("move", parameters, **macros)
        rest = [0] * (_WORDS_OF_MOVE * (capacity - len(moves)))
        return kernel, (grid, 1), (*words, *rest, len(moves)), len(moves)

    def sum(
        self,
        dtype: np.dtype,
        tiles: Sequence[Tile],
        d: Stored,
        x: Stored,
        c: Stored,
        alpha: complex,
        beta: complex,
        *,
        conjugate: bool = False,
        uplo: str = "",
        real: bool = False,
        deals: tuple[Deal, Deal] | None = None,
    ) -> list[Launch]:
        """Return kernels that compute ``D = alpha X + beta C``, in one triangle if ``uplo`` is given. Local.

        Args:
            dtype: the type of all matrices, of those that BLAS has.
            d, x, c: how the matrices are stored.
            alpha, beta: scalars; C is not read if beta is 0.
            conjugate: X's conjugate is added.
            uplo: "L" or "U": only what is on the diagonal and below or above it is read and written.
            real: the diagonal is real.
            deals: how rows and columns are dealt out, for ``uplo``.
        """
        tiles = [tile for tile in tiles if tile.rows and tile.cols]
        (by_columns, ld), deals = d, deals or (Deal(1, 1, 0, 0, 0), Deal(1, 1, 0, 0, 0))
        if not by_columns:  # add the transposes
            tiles = [tile._replace(rows=tile.cols, cols=tile.rows, i=tile.j, j=tile.i) for tile in tiles]
            x, c, deals = (not x[0], x[1]), (not c[0], c[1]), deals[::-1]
            uplo = {"L": "U", "U": "L", "": ""}[uplo]
        strides = [(1, lead) if columns else (lead, 1) for columns, lead in (x, c)]
        macros: dict[str, Any] = {
            "ELEMENT": CUDA_TYPES[dtype], "TRIANGLE": ("", "L", "U").index(uplo), "REAL": int(real),
            "CONJUGATE": int(conjugate), "KEEPS": int(beta != 0),
        }  # fmt: skip
        rest = (
            ld, *(each for pair in strides for each in pair), *_scalar(alpha, dtype), *_scalar(beta, dtype),
            *(number for deal in deals for number in (*deal, 0)),
        )  # fmt: skip
        launches = []
        for first in range(0, len(tiles), _TILES):
            some = tiles[first : first + _TILES]
            words = [
                word
                for tile in some
                for word in (*tile[:3], tile.rows | tile.cols << 32, tile.i | tile.j << 32)
            ]
            capacity, number = _capacity(len(some)), _letters(dtype)
            parameters = f"{5 * capacity}QQQQQQ{number}{number}6I6I"
            kernel = self._compiled("sum", parameters, **macros, TILES=capacity)
            most = max(tile.rows * tile.cols for tile in some)
            grid = max(1, min(8 * self.multiprocessors // len(some), -(-most // _SUM_THREADS)))
            words += [0] * (5 * (capacity - len(some)))
            addresses = [5 * i + at for i in range(len(some)) for at in range(3)]
            launches.append(kernel.launch((grid, len(some)), _SUM_THREADS, (*words, *rest), addresses))
        return launches

    def transpose(
        self,
        stream: Any,
        to: int,
        there: Sequence[int],
        of: int,
        here: Sequence[int],
        extents: Sequence[int],
        itemsize: int,
        *,
        conjugate: bool = False,
    ) -> None:
        """Queue a copy of runs of rows x runs of columns: rows are adjacent in ``to``, columns in ``of``. Local.

        Args:
            to, of: addresses, multiples of ``itemsize`` as all strides are.
            there, here: bytes from one to the next: runs of rows, rows, runs of columns, columns.
            extents: how many of each.
            itemsize: bytes of an entry: 1, 2, 4, 8 or 16.
            conjugate: write the conjugates of complex numbers.
        """
        row_runs, rows, col_runs, cols = extents
        if not row_runs * rows * col_runs * cols:
            return
        flip = "flipped" if conjugate else ""
        kernel = self._compiled("transpose", "Q4QQ4QIIII", T=_WORDS[itemsize], FLIP=flip)
        tiles = -(-row_runs * rows // _TILE) * -(-col_runs * cols // _TILE)
        arguments = to, *there, of, *here, row_runs * rows, rows, col_runs * cols, cols
        kernel(stream, (min(8 * self.multiprocessors, tiles), 1), 8 * _TILE, arguments)


def check_added(parts: Sequence[View], outs: Sequence[View], c: View | None, bias: View | None) -> None:
    """Raise ArgumentError if matrices cannot be added to these results. Local."""
    out, last = outs[0], outs[-1]
    first = parts[0] if parts else out
    rows, cols = first.rows, first.cols
    for view in (*parts, *outs) if c is None else (*parts, *outs, c):
        if view.rows != rows or view.cols != cols:
            raise ArgumentError(f"matrices of other shapes than {rows} x {cols} are to be added")
    unlike = [view for view in parts if view.dtype != first.dtype or view.ld != first.ld]
    if unlike or [view for view in outs[1:] if view.dtype != out.dtype or view.ld != last.ld]:
        raise ArgumentError("parts, and results after the first, must have one type and leading dimension")
    if bias is not None and bias.cols != first.cols:
        raise ArgumentError(f"bias has {bias.cols} entries for {first.cols} columns")


_FLAT = 0, 0, 0


def _times(run: int, word: int) -> int:
    """Return how many words of a run a thread of a warp copies at a time, 0 if threads copy one each."""
    return 0 if run // word < _LONG else 8 if word <= 4 else 4


def word_of(move: Move) -> int:
    """Return how many bytes of a copy a thread can move at once, a power of two up to 16. Local."""
    to, there, of, here, (a, b, c, run) = move
    together = _VECTOR_BYTES | to | of | run
    if a > 1:
        together |= there[0] | here[0]
    if b > 1:
        together |= there[1] | here[1]
    if c > 1:
        together |= there[2] | here[2]
    return together & -together


def _index(total: int) -> str:
    """Return the type for counting to ``total``: division in 64 bits takes three times as long."""
    return "unsigned" if total < _U32 else "u64"


def _capacity(count: int) -> int:
    """Return for how many parts a kernel is compiled that takes ``count`` of at most 32."""
    return 1 if count == 1 else 4 if count <= 4 else 32


def _scalar(value: complex, dtype: np.dtype) -> tuple[float, ...]:
    """Return a scalar as a kernel takes it: a real number, or two."""
    number = dtype.type(value if dtype.kind == "c" else complex(value).real)
    return (float(number.real), float(number.imag)) if dtype.kind == "c" else (float(number),)


@cache
def _letters(dtype: np.dtype) -> str:
    """Return the type of such a scalar among a kernel's parameters."""
    return {"float32": "f", "float64": "d", "complex64": "2f", "complex128": "2d"}[dtype.name]
