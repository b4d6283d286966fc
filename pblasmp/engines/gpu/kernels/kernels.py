# SPDX-License-Identifier: Apache-2.0
"""The engine's own CUDA kernels: sums of the ranks' parts, barriers and flags, strided and transposing copies.

They are compiled when they are first needed (CuPy caches them on disk), one module for each combination of types. They
include no headers, since CuPy does not find CUDA's everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ....dtypes import accumulation_dtype
from ....errors import ArgumentError
from ...direct.addresses import host_address
from .compiler import CompiledKernels
from .source import ADD, MOVE, NUMBERS, SUM, SYNC, TRANSPOSE
from .stand_ins import placed
from .views import Move, View

__all__ = ["Deal", "Kernels", "Launch", "Tile", "common_run", "vector_width"]

_VECTOR_BYTES = 16
_THREADS = 512
_SUM_THREADS = 256
_TILE = 32
_LONG = 64  # words of a run that a warp copies together
_MOVES = 32  # copies by one kernel, at most: parameters take up to 4 KB
_WAITS = 32  # flags that one kernel waits for, at most: one thread of a warp each
_TILES = 32  # of matrices that are added, by one kernel
_U32 = 2**32
_ARGUMENT = 8  # bytes: each argument that the driver reads begins at a multiple

_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "fp16",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2}

_WORDS = {16: "quad", 8: "u64", 4: "u32", 2: "u16", 1: "u8"}


def vector_width(part: np.dtype, cols: int, views: Sequence[View]) -> int:
    """Return how many adjacent entries a thread can add at once: 16 bytes of a part, or one entry. Local.

    Args:
        part: type of the parts.
        cols: entries of a row.
        views: all matrices that are read or written in this way: their rows must be aligned for vectors.
    """
    width = max(1, _VECTOR_BYTES // part.itemsize)
    if cols % width:
        return 1
    for view in views:
        aligned = min(_VECTOR_BYTES, width * view.dtype.itemsize)
        together = view.address | (view.ld * view.dtype.itemsize if view.rows > 1 else 0)
        if together % aligned:
            return 1
    return width


def common_run(numbers: Sequence[int]) -> int:
    """Return the most bytes, up to 16, a power of two, that every number is a multiple of. Local."""
    together = 0
    for number in numbers:
        together |= number
    return min(_VECTOR_BYTES, together & -together) if together else _VECTOR_BYTES


class Launch:
    """A kernel with its arguments, to be queued any number of times. Local.

    The first time CuPy compiles the kernel and reads the arguments. From the second time on the driver gets the
    addresses of copies of them, which costs the host much less.

    Args:
        kernel: CuPy's.
        blocks, threads: how many.
        arguments: of the kernel.
        addresses: which words of the first argument are addresses, which may be stand-ins.
    """

    __slots__ = (
        "_addresses", "_arguments", "_grid", "_kernel", "_memory", "_place", "_queue", "_shape", "_starts", "_threads",
        "_words",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Any,
        blocks: tuple[int, ...],
        threads: int,
        arguments: tuple[Any, ...],
        addresses: Sequence[int] = (),
    ) -> None:
        self._kernel, self._grid, self._threads, self._arguments = kernel, blocks, threads, arguments
        self._addresses = addresses
        self._shape: tuple[int, ...] | None = None
        self._words: Any = None

    def __call__(self, stream: Any) -> None:
        """Queue it on a stream of CuPy. Local."""
        if self._shape is None:
            self._kernel(self._grid, (self._threads,), self._arguments, stream=stream)
            self._shape = ()
            return
        if self._words is None:
            self._pack()
        self._queue(*self._shape, stream.ptr, self._place, 0)

    def placed(self, bases: Mapping[int, int]) -> Launch:
        """Return the same launch with real addresses, which CuPy never takes. Local.

        Args:
            bases: of each memory that a stand-in is in.
        """
        if self._words is None:
            self._pack()
        found: Launch = object.__new__(Launch)
        found._shape, found._queue, found._starts = self._shape, self._queue, self._starts
        words = self._words.copy()
        for at in self._addresses:
            words[at] = placed(int(words[at]), bases)
        found._point(words)
        return found

    def _pack(self) -> None:
        """Copy the arguments to where the driver reads them."""
        from cupy_backends.cuda.api import driver

        packed, starts = b"", []
        for each in self._arguments:
            starts.append(len(packed))
            packed += np.array(each).tobytes()
            packed += bytes(-len(packed) % _ARGUMENT)
        self._starts = np.array(starts, np.uint64)
        self._queue = driver.launchKernel
        grid = (*self._grid, 1, 1)[:3]
        self._shape = (int(self._kernel.kernel.ptr), *grid, self._threads, 1, 1, 0)
        self._point(np.frombuffer(bytearray(packed), np.uint64))

    def _point(self, words: Any) -> None:
        """Take these words as the arguments."""
        self._words = words
        self._memory = self._starts + host_address(words)  # must last
        self._place = host_address(self._memory)


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
        block, nprocs: as above.
        turn: which block is its first.
        lead: how many indices the first block of all lacks.
        skipped: how many of these it would have.
    """

    block: int
    nprocs: int
    turn: int
    lead: int
    skipped: int


Stored = tuple[bool, int]  # whether a matrix is in Fortran order, and its leading dimension


class Kernels(CompiledKernels):
    """The kernels of matrices of any types, and of barriers. Local."""

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        self.multiprocessors = int(properties["multiProcessorCount"])

    def _launch(self, kernel: Any, blocks: int, threads: int, stream: Any, *arguments: Any) -> None:
        kernel((blocks,), (threads,), arguments, stream=stream)

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
        kernel = self._compiled(what, SYNC, RANKS=size, WAITS=_WAITS)
        ints = (np.int32(size), np.int32(rank), np.int32(kind), np.int32(kinds))
        threads = -(-size // 32) * 32
        return Launch(kernel, (1,), threads, (_struct(flags), *ints))

    def raise_flags(self, stream: Any, flags: Sequence[int]) -> None:
        """Queue: set the words at these addresses, here or at peers, to 1. Local."""
        self._launch_on_flags("raise_flags", stream, flags)

    def await_flags(self, stream: Any, flags: Sequence[int]) -> None:
        """Queue a wait until the words at these addresses are no longer zero, and set them to zero. Local."""
        self._launch_on_flags("await_flags", stream, flags)

    def _launch_on_flags(self, name: str, stream: Any, flags: Sequence[int]) -> None:
        """Queue a kernel of one warp for every so many flags. Local."""
        kernel = self._compiled(name, SYNC, RANKS=1, WAITS=_WAITS)
        for first in range(0, len(flags), _WAITS):
            some = flags[first : first + _WAITS]
            words = _struct([*some, *[0] * (_WAITS - len(some))])
            self._launch(kernel, 1, _WAITS, stream, words, np.int32(len(some)))

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
            stream: CuPy's.
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
        # an operand needs a type even if it is not read
        types = {
            "PART": first.dtype, "OUT": out.dtype, "SUM": exact, "CTYPE": c.dtype if c else exact,
            "BIAS": bias.dtype if bias else exact,
        }  # fmt: skip
        macros: dict[str, Any] = {
            **{name: _TYPES[dtype.name] for name, dtype in types.items()},
            "P": len(parts), "OUTS": len(outs), "V": width, "INDEX": _index(first.rows * lines),
        }  # fmt: skip
        if out.dtype.itemsize == 1:
            macros["FLOAT8"] = 1
        kernel = self._compiled("add", NUMBERS + ADD, **macros)
        grid = min(blocks or 2 * self.multiprocessors, -(-first.rows * lines // _THREADS))
        u64 = np.uint64
        self._launch(
            kernel, grid, _THREADS, stream,
            _struct([part.address for part in parts], 1), u64(first.ld),
            _struct([view.address for view in outs]), u64(out.ld), u64(outs[-1].ld),
            u64(first.rows), u64(lines),
            u64(c.address if c else 0), u64(c.ld if c else 0), _scalar(beta, exact),
            u64(bias.address if bias else 0), np.int32(_ACTIVATIONS[activation]), u64(scale), u64(amax),
        )  # fmt: skip

    def copy(self, stream: Any, to: View, of: View) -> None:
        """Queue a copy of a matrix at memory speed. Local."""
        if (to.rows, to.cols, to.dtype.itemsize) != (of.rows, of.cols, of.dtype.itemsize):
            raise ArgumentError(f"a matrix of {of.rows} x {of.cols} is to be copied to {to.rows} x {to.cols}")
        size = of.dtype.itemsize
        whole = (1, 1, of.rows, of.cols * size)
        self.move(stream, [(to.address, (0, 0, to.ld * size), of.address, (0, 0, of.ld * size), whole)])

    def move(self, stream: Any, moves: Iterable[Move], *, conjugate: int = 0) -> None:
        """Queue what ``moves`` returns. Local."""
        for launch in self.moves(moves, conjugate=conjugate):
            launch(stream)

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
        alike: dict[tuple[int, int], list[Move]] = {}
        for each in moves:
            _, there, _, here, extents = each
            if min(*extents, *there, *here) < 0:
                raise ArgumentError(
                    f"extents {tuple(extents)}, strides {tuple(there)} and {tuple(here)}: none may be < 0"
                )
            if 0 not in extents:
                word = _word(each)
                if conjugate:
                    if word < conjugate:
                        raise ArgumentError(f"complex numbers of {conjugate} bytes at multiples of {word}")
                    word = conjugate
                many = 0 if extents[-1] // word < _LONG else 8 if word <= 4 else 4
                alike.setdefault((word, many), []).append(each)
        return [
            self._move(word, many, some[first : first + _MOVES], "flipped" if conjugate else "")
            for (word, many), some in alike.items()
            for first in range(0, len(some), _MOVES)
        ]

    def _move(self, word: int, each: int, moves: Sequence[Move], flip: str) -> Launch:
        """Return one kernel: ``word`` bytes at a time, ``each`` times by a thread of a warp, or 0."""
        # a piece is what so many threads copy at a time
        threads, piece = (32, 32 * each * word) if each else (1, word)
        totals = [math.prod(counts) * -(-run // piece) for *_, (*counts, run) in moves]
        needed = [-(-total * threads // _THREADS) for total in totals]
        grid, first, words = min(4 * self.multiprocessors, sum(needed)), 0, []
        for (to, there, of, here, (_, b, c, run)), total, count in zip(moves, totals, needed, strict=True):
            words += [to, of, *there, *here, b, c, run // word, total, first]
            first = (first + count) % grid
        room = _room(len(moves))
        kernel = self._compiled(
            "move", MOVE, T=_WORDS[word], EACH=each, INDEX=_index(max(totals)), MOVES=room, FLIP=flip
        )
        each = len(words) // len(moves)
        addresses = [each * i + at for i in range(len(moves)) for at in (0, 1)]
        arguments = _struct(words, each * room), np.int32(len(moves))
        return Launch(kernel, (grid,), _THREADS, arguments, addresses)

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
            tiles: the parts.
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
        u64, strides = np.uint64, [(1, lead) if columns else (lead, 1) for columns, lead in (x, c)]
        macros: dict[str, Any] = {
            "ELEMENT": _TYPES[dtype.name], "TRIANGLE": ("", "L", "U").index(uplo), "REAL": int(real),
            "CONJUGATE": int(conjugate), "KEEPS": int(beta != 0),
        }  # fmt: skip
        rest = (
            u64(ld), *(u64(each) for pair in strides for each in pair), _scalar(alpha, dtype), _scalar(beta, dtype),
            *(_struct([deal[0] | deal[1] << 32, deal[2] | deal[3] << 32, deal[4]]) for deal in deals),
        )  # fmt: skip
        launches = []
        for first in range(0, len(tiles), _TILES):
            some = tiles[first : first + _TILES]
            words = [
                word
                for tile in some
                for word in (*tile[:3], tile.rows | tile.cols << 32, tile.i | tile.j << 32)
            ]
            kernel = self._compiled("sum", SUM, **macros, TILES=_room(len(some)))
            most = max(tile.rows * tile.cols for tile in some)
            grid = max(1, min(8 * self.multiprocessors // len(some), -(-most // _SUM_THREADS)))
            tiles_struct = _struct(words, 5 * _room(len(some)))
            addresses = [5 * i + at for i in range(len(some)) for at in range(3)]
            launches.append(Launch(kernel, (grid, len(some)), _SUM_THREADS, (tiles_struct, *rest), addresses))
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
            stream: CuPy's.
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
        kernel = self._compiled("transpose", TRANSPOSE, T=_WORDS[itemsize], FLIP=flip)
        tiles = -(-row_runs * rows // _TILE) * -(-col_runs * cols // _TILE)
        u32, u64 = np.uint32, np.uint64
        self._launch(
            kernel, min(8 * self.multiprocessors, tiles), 8 * _TILE, stream,
            u64(to), _struct(there), u64(of), _struct(here),
            u32(row_runs * rows), u32(rows), u32(col_runs * cols), u32(cols),
        )  # fmt: skip


def check_added(parts: Sequence[View], outs: Sequence[View], c: View | None, bias: View | None) -> None:
    """Raise ArgumentError if matrices cannot be added to these results. Local."""
    out = outs[0]
    first = parts[0] if parts else out
    like = [view for view in (*parts, *outs, c) if view is not None]
    if any((view.rows, view.cols) != (first.rows, first.cols) for view in like):
        raise ArgumentError(f"matrices of other shapes than {first.rows} x {first.cols} are to be added")
    if any((view.dtype, view.ld) != (first.dtype, first.ld) for view in parts) or any(
        view.dtype != out.dtype or view.ld != outs[-1].ld for view in outs[1:]
    ):
        raise ArgumentError("parts, and results after the first, must have one type and leading dimension")
    if bias is not None and bias.cols != first.cols:
        raise ArgumentError(f"bias has {bias.cols} entries for {first.cols} columns")


def _word(move: Move) -> int:
    """Return how many bytes of a copy a thread can move at once."""
    to, there, of, here, (*counts, run) = move
    used = [stride for n, *pair in zip(counts, there, here, strict=True) if n > 1 for stride in pair]
    return common_run([to, of, run, *used])


def _index(total: int) -> str:
    """Return the type for counting to ``total``: division in 64 bits takes three times as long."""
    return "unsigned" if total < _U32 else "u64"


def _struct(values: Sequence[int], room: int = 0) -> Any:
    """Return a struct of addresses or strides, in the form that kernels take; zeros up to ``room`` follow."""
    words = np.zeros(max(room, len(values)), np.uint64)
    words[: len(values)] = values
    return words.view(_words(len(words)))[0]


@lru_cache
def _words(count: int) -> np.dtype:
    return np.dtype([("p", np.uint64, count)])


def _room(count: int) -> int:
    """Return for how many parts a kernel is compiled that takes ``count`` of at most 32."""
    return 1 if count == 1 else 4 if count <= 4 else 32


def _scalar(value: complex, dtype: np.dtype) -> Any:
    return dtype.type(value) if dtype.kind == "c" else dtype.type(complex(value).real)
