# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels of factorizations: panels, exchanges of rows, what LAPACK says of NaN. Matrices are in F order.

One more multiplies a part of a matrix in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .compiler import CompiledKernels, Kernel
from .views import leading

Array = Any

_THREADS = 512
_MOST = 1024  # exchanges of rows by one kernel, at most
_FEW = 128  # of which every block finds the moves itself; threads of a block that finds those of more
_COLUMNS = 4  # whose rows a block of threads exchanges at a time
_WIDEST = {"lu": 64, "qr": 32}  # columns of 8 bytes, or fewer, of a panel that stays in shared memory
_ROWS = 384  # of a panel, that a block has if there are few; of LU, each thread has one of them
_REGISTERS = 512  # bytes of a panel of LU that a thread keeps in registers
_RESERVED = 16384  # bytes of shared memory that a panel does not get
_BLOCKS = 1024  # for which there are slots, at most
_SQUARE = 32  # rows and columns that a block of threads copies of a triangle
_LEAF = 128  # rows of a block of 8 bytes an element that is inverted in shared memory
_TILE = 32  # right-hand sides that a block of threads refines, at most
_DEEP = 16  # columns of a triangle that it has in shared memory meanwhile, at most
_PARTS = 4  # threads for each row of a block; right-hand sides that a warp refines
SUBSTITUTED = 512
"""Rows of a triangle with which ``substitute`` solves, at most."""
_SUBSTITUTING = 64 << 10  # bytes of the triangle that it holds in shared memory, at most
_BEHIND = 96  # elements behind those, which it may read
_COLUMNS_TOGETHER = 8  # which a block of threads solves for
_SUMMING = 256  # threads that have sums of rows, one for each column
_JOINED = 8  # columns of an inverse that a block of threads makes of two
_WELL = 100  # condition up to which a solution by an inverse needs no refinement

_WORD, _WARP = 8, 32  # bytes of a word that is shown with a tag of as many; threads

_TYPES = {"float32": ("float", "float"), "float64": ("double", "double"), "complex64": ("c64", "float")}
_TYPES["complex128"] = ("c128", "double")
_POOR = {"float": 2.0**11.5, "double": 2.0**26}  # conditions up to which a step of refinement is enough: 1/√ε


class FactorKernels(CompiledKernels):
    """The kernels of factorizations. Local.

    Args:
        shared_memory: bytes that a block of threads can have.
        multiprocessors: of the GPU.
    """

    def __init__(self, cupy: Any, shared_memory: int, multiprocessors: int) -> None:
        super().__init__(cupy)
        self._shared_memory = shared_memory
        self._limits = shared_memory - _RESERVED, min(multiprocessors, _BLOCKS)
        self._memory: dict[str, Array] = {}

    def _of(self, name: str, parameters: str, dtype: np.dtype, **how: Any) -> Kernel:
        """Return a kernel for a type; ``how`` is for ``_compiled``."""
        kind, real = _TYPES[dtype.name]
        return self._compiled(name, parameters, **how, KIND=kind, REAL_KIND=real)

    def _kept(self, name: str, count: int, dtype: Any) -> Array:
        """Return zeros that are made once; they stay what the last kernel left there."""
        if name not in self._memory:
            self._memory[name] = self._cupy.zeros(count, dtype)
        return self._memory[name]

    def look(self, stream: Any, a: Array) -> Array:
        """Queue looking for NaN in the lower triangle of a square; return where cuSOLVER writes what it finds. Local.

        ``judge`` must follow on the same stream before the next look.
        """
        found, n = self._kept("found", 2, np.int32), len(a)
        kernel = self._of("look", "QqiQ", np.dtype(a.dtype))
        kernel(stream, (-(-n * 32 // _THREADS), 1), _THREADS, (_at(a), leading(a), n, _at(found)))
        return found

    def judge(self, stream: Any, a: Array, found: Array, info: Array, first: int) -> None:
        """Queue the making of INFO from what cuSOLVER found in the square on top of ``a``. Local."""
        rows, cols = a.shape
        kernel = self._of("judge", "QqiiQQi", np.dtype(a.dtype))
        kernel(stream, (1, 1), _THREADS, (_at(a), leading(a), rows, cols, _at(found), _at(info), first))

    def leaf(self, dtype: np.dtype) -> int:
        """Return how many rows and columns the blocks have that ``invert`` inverts: as the GPU has room. Local."""
        width = _LEAF if dtype.itemsize < 16 else _LEAF // 2
        while width > 1 and _inverting(width, dtype) > self._shared_memory:
            width //= 2
        return width

    def invert(self, stream: Any, triangles: Array, inverses: Array, wide: int) -> None:
        """Queue the inversion of what ``triangles`` has written, ``wide`` columns each. Local."""
        # in a row of triangles, elements on the diagonal are wide + 1 apart: across triangles, too
        dtype, n = np.dtype(triangles.dtype), len(triangles) // (wide + 1)
        width = self.leaf(dtype)
        memory = _inverting(width, dtype)
        kernel = self._of("invert", "QQqi", dtype, room=memory, WIDTH=width)
        places = _at(triangles), _at(inverses), wide
        kernel(stream, (-(-n // width), 1), _PARTS * width, (*places, n), memory)
        while width < wide:
            columns = min(_JOINED, width)
            kernel = self._of("join", "QQq", dtype, HALF=width, COLUMNS=columns)
            kernel(stream, (n // (2 * width), width // columns), width, places)
            width *= 2

    def conditions(self, stream: Any, triangles: Array, inverses: Array, wide: int, out: Array) -> None:
        """Queue finding the condition of each triangle in the maximum norm. Local."""
        kernel = self._of("conditions", "QQQi", np.dtype(triangles.dtype), WIDTH=wide)
        kernel(stream, (len(out), 1), _PARTS * wide, (_at(triangles), _at(inverses), _at(out), len(out)))

    def triangles(
        self,
        stream: Any,
        a: Array,
        count: int,
        deal: tuple[int, int, int, int],
        n: int,
        out: Array,
        inverses: Array,
        wide: int,
        *,
        lower: bool,
        unit: bool,
    ) -> None:
        """Queue the copying of the triangles on the diagonal of a rank's panels. Local.

        Args:
            a: the rank's panels.
            count: how many it has.
            deal: the columns of a panel, how many panels side by side are dealt at once, round how many ranks, and
                which of them this is.
            n: the order of the whole matrix.
            out: of ``wide`` + 1 columns of ``wide`` for each panel, the first ``wide`` become the triangle: L or, if it
                is not ``lower``, the transpose of U, with zeros above the diagonal and ones behind its last column.
            inverses: becomes zero in the same places.
            wide: at least as many as columns of a panel.
            unit: its diagonal is taken as ones.
        """
        kernel = self._of("triangles", "QqqiiiiiiQQ", np.dtype(a.dtype), WIDTH=wide)
        arguments = _at(a), leading(a), n, *deal, lower, unit, _at(out), _at(inverses)
        kernel(stream, ((-(-wide // _SQUARE)) ** 2, count), 8 * _SQUARE, arguments)

    def part(
        self,
        stream: Any,
        dtype: np.dtype,
        matrices: Sequence[tuple[int, int, int]],
        runs: Sequence[Array],
        columns: int,
        scalars: tuple[complex, complex],
        diagonal: str,
    ) -> None:
        """Queue the product of a part of a matrix and few columns. Local.

        Args:
            matrices: the left one, the right one, the target and what ``beta`` scales, each by its address, and how
                many elements apart its rows and columns are.
            runs: for each row of the left one, which of its elements count, from and to, and which is on the main
                diagonal, or -1.
            columns: of the right one.
            diagonal: as in ``LeftPart``.
        """
        rows = len(runs[0])
        by_columns = matrices[0][1] == 1
        together = _rounded(columns)
        # rows of a thread: an element of the right matrix serves them all
        each = min(2 if by_columns or dtype.itemsize == 16 else 4, together)
        macros = {
            "COLUMNS": together,
            "ROWS": each,
            "BY_COLUMNS": int(by_columns),
            "ONES": int(diagonal == "ones"),
            "REALS": int(diagonal == "real"),
        }
        kernel = self._of("part", "QqqQqqQqqQqqQQQiidddd", dtype, **macros)
        numbers = [number for each in scalars for number in (complex(each).real, complex(each).imag)]
        places = [number for each in matrices for number in each]
        a_block = each * (_WARP if by_columns else _SUMMING // _WARP)
        arguments = *places, *map(_at, runs), rows, columns, *numbers
        kernel(stream, (-(-rows // a_block), 1), _SUMMING, arguments)

    def step(self, stream: Any, dtype: np.dtype, columns: int, numbers: Sequence[int]) -> None:
        """Queue one panel's step of a triangular solve for few right-hand sides. Local.

        Args:
            columns: how many right-hand sides; a row of them is contiguous, and rows follow each other.
            numbers: where the inverse of the panel's triangle and the triangle are, and the leading dimension of both;
                the order of the triangle; 1 for its transpose, otherwise 0; where the right-hand sides are, which are
                overwritten, and the solutions; the panel's matrix outside its triangle, its leading dimension and
                its rows, and where the right-hand sides, or known unknowns, of these rows are; 1 if they are right-hand
                sides, from which the new unknowns' part is subtracted, or 0.
        """
        kernel = self._of("step", "QQqiiQQQqiQiQ", dtype, meets=True, COLUMNS=columns)
        memory, count = numbers[3] * columns * dtype.itemsize, _at(self._kept("steps", 1, np.uint32))
        kernel(stream, (self._most()[1], 1), _THREADS, (*numbers, count), memory)

    def refine(
        self,
        stream: Any,
        x: tuple[Array, int],
        found: tuple[Array, int],
        size: int,
        about: tuple[int, int, int],
        wide: int,
        *,
        turned: bool,
        stays: bool,
    ) -> None:
        """Queue writing ``found``, the solution by an inverse, to ``x``, which has the right-hand sides. Local.

        If the condition of the triangle is large, after a step of iterative refinement; if that is not enough, what
        substitution gives.

        Args:
            x, found: an array each, and its first row that is meant.
            size: how many rows.
            about: where the triangle is, its inverse and its condition.
            wide: columns of both.
            turned: it is solved for with the transpose of the triangle.
            stays: the solution stays where it was found.
        """
        columns, dtype = int(x[0].shape[1]), np.dtype(x[0].dtype)
        tile, deep, high = _TILE, _DEEP, max(_WARP, wide)

        def memory() -> int:
            return (2 * tile * high + deep * (high + 1)) * int(dtype.itemsize)

        while tile > _PARTS and memory() > self._shared_memory:
            tile //= 2
        while deep > 1 and memory() > self._shared_memory:
            deep //= 2
        macros = {
            "WIDTH": wide,
            "TILE": tile,
            "DEEP": deep,
            "FAIR": _WELL,
            "POOR": _POOR[_TYPES[dtype.name][1]],
        }
        places = [
            number
            for array, row in (x, found)
            for number in (
                _at(array) + row * int(array.strides[0]),
                *(int(step) // array.itemsize for step in array.strides),
            )
        ]
        kernel = self._of("refine", "QqqQqqQQQiiiq", dtype, room=memory(), **macros)
        arguments = *places, *about, turned, stays, size, columns
        kernel(stream, (-(-columns // tile), 1), _WARP * tile // _PARTS, arguments, memory())

    def substitute(self, stream: Any, a: Array, x: Array) -> None:
        """Queue the solution of ``a y = x`` in the place of ``x``: ``a`` has ones on its diagonal. Local.

        Args:
            a: a lower triangle in F order, of no more rows than ``SUBSTITUTED``.
            x: in F order.
        """
        (n, columns), dtype = x.shape, np.dtype(x.dtype)
        rows, tile = _rounded(-(-n // _WARP)), _WARP // 2
        each = 2 * rows * _WARP * dtype.itemsize  # of one column of two tiles
        behind = _BEHIND * dtype.itemsize
        while tile > 1 and tile * each > min(_SUBSTITUTING, self._shared_memory - behind):
            tile //= 2
        # all that a multiprocessor has: warps that share one with an update's product take five times as long
        memory = self._shared_memory
        kernel = self._of("substitute", "QqiQqi", dtype, room=memory, ROWS=rows, TILE=tile)
        grid = -(-columns // _COLUMNS_TOGETHER), 1
        kernel(stream, grid, _PARTS * _WARP, (_at(a), leading(a), n, _at(x), leading(x), columns), memory)

    def swap(self, stream: Any, a: Array, pivots: Array, first: int, *, back: bool = False) -> None:
        """Queue the exchange of row i of ``a`` with row ``pivots[i] - 1 - first``, for every i in turn. Local.

        With ``back`` in reverse order, which undoes it.
        """
        if not a.size:
            return
        total, cols, dtype = len(pivots), a.shape[1], np.dtype(a.dtype)
        place, some = (_at(a), leading(a), cols), min(total, _MOST)
        together = _COLUMNS if total <= _MOST else _COLUMNS // 2
        grid = min(-(-cols // together), (8 if total <= _MOST else 1) * self._most()[1]), 1
        threads = min(_THREADS, -(-2 * some // 32) * 32)
        macros: dict[str, Any] = {"COLUMNS": together, "FEW": _FEW, "MOST": _MOST}
        if total <= _FEW:
            kernel = self._of("exchange", "QqqQiii", dtype, file="swap", **macros)
            kernel(stream, grid, threads, (*place, _at(pivots), total, first, back))
            return
        pairs = self._cupy.empty(4 * total, np.int32)  # CuPy gives it to later work on this stream only
        kernel = self._compiled("pairs", "QiiiQ", MOST=_MOST)
        arguments = _at(pivots), total, first, back, _at(pairs)
        kernel(stream, (-(-total // _MOST), -(-some // _FEW)), _FEW, arguments)
        kernel = self._of("swap", "QqqQii", dtype, **macros)
        kernel(stream, grid, threads, (*place, _at(pairs), total, back))

    def _most(self) -> tuple[int, int]:
        """Return how many bytes of shared memory a block can have, and how many blocks run at the same time."""
        return self._limits

    def tallest(self, dtype: np.dtype) -> int:
        """Return how many rows "lu" and "qr" take, even of a single column. Local."""
        nbytes, blocks = self._most()
        return blocks * (nbytes // (2 * dtype.itemsize))

    def width(self, name: str, rows: int, dtype: np.dtype) -> int:
        """Return how many columns of so many rows "lu" or "qr" takes: all blocks' shared memory holds them. Local."""
        width = _widest(name, dtype)
        while width > 1 and self._blocks(name, rows, width, dtype)[0] > self._most()[1]:
            width //= 2
        return width

    def _blocks(self, name: str, rows: int, cols: int, dtype: np.dtype) -> tuple[int, int]:
        """Return how many blocks a panel takes, and how many rows each has: with room for one more column."""
        nbytes, most = self._most()
        room = nbytes // ((cols + 1) * dtype.itemsize)
        if name == "lu":
            room = min(room, _ROWS * _rows_each(cols, dtype))
        # the other multiprocessors go on with products
        each = min(room, max(_ROWS, -(-4 * rows // (3 * most))))
        return -(-rows // each), each

    def _launch(
        self,
        name: str,
        parameters: str,
        stream: Any,
        a: Array,
        threads: int,
        arguments: Sequence[int],
        macros: dict[str, int],
    ) -> None:
        """Queue a kernel all of whose blocks run at the same time, each with rows of ``a`` in shared memory."""
        rows, cols = a.shape
        dtype = np.dtype(a.dtype)
        blocks, each = self._blocks(name, rows, cols, dtype)
        assert blocks <= self._most()[1], "the panel does not fit into shared memory"
        kernel = self._of(name, parameters, dtype, room=self._most()[0], meets=True, **macros)
        place = _at(a), leading(a), rows, cols, each
        kernel(stream, (blocks, 1), threads, (*place, *arguments), each * (cols + 1) * dtype.itemsize)

    def lu(self, stream: Any, a: Array, pivots: Array, info: Array, first: int) -> None:
        """Queue the LU factorization of a panel no wider than ``width`` says. Local.

        Pivots count from 1, and ``first`` rows above ``a``. ``info`` becomes the number of the first zero pivot in the
        same way, if it is 0.
        """
        (rows, cols), dtype, most = a.shape, np.dtype(a.dtype), self._most()[1]
        words = 4 + _REGISTERS // _WORD  # at most, of a row and what is known of it
        shown = self._kept("shown", 2 * most * words * 2 * _WORD, np.uint8)  # of odd and even columns
        # meetings of one kernel at a time: a context's factorizations follow each other
        arguments = _at(pivots), first, _at(info), _at(shown), _at(self._kept("tags", 2, np.uint32))
        each = -(-self._blocks("lu", rows, cols, dtype)[1] // _ROWS)
        macros = {
            "COLUMNS": _rounded(cols),
            "ROWS": _rounded(each),
            "THREADS": _ROWS,
            "POLLS": -(-most // _WARP),
        }
        self._launch("lu", "QqiiiQiQQQ", stream, a, _ROWS, arguments, macros)

    def qr(self, stream: Any, a: Array, v: Array, t: Array, tau: Array) -> None:
        """Queue the QR factorization of a panel no wider than ``width`` says, and no wider than high. Local.

        ``v`` becomes the Householder vectors with their ones and zeros, ``t``, contiguous in F order, their T.
        """
        dtype = np.dtype(a.dtype)
        real, widest = np.dtype(f"f{dtype.itemsize // (2 if dtype.kind == 'c' else 1)}"), _widest("qr", dtype)
        shown = self._kept(f"rows {dtype.name}", 2 * (_BLOCKS + 1) * widest, dtype)
        sizes, count = self._kept(f"sizes {real.name}", 2 * _BLOCKS, real), self._kept("count", 1, np.uint32)
        arguments = _at(v), leading(v), _at(t), _at(tau), _at(shown), _at(sizes), _at(count)
        self._launch("qr", "QqiiiQqQQQQQ", stream, a, _THREADS, arguments, {"WIDEST": widest})

    def reflector(self, stream: Any, inner: Array, t: Array, tau: Array, *, after: bool) -> None:
        """Queue what comes before or after the solution of ``inner x = t``, which makes T of ``inner``, V^H V.

        Args:
            stream: where it is queued.
            inner, t: squares in F order.
            tau: contiguous. Where it is zero, T has a row and a column of zeros.
            after: the diagonal of T is written; before, both squares become those of the equations.
        """
        n, dtype = len(tau), np.dtype(tau.dtype)
        kernel = self._of("reflector", "QqQqQii", dtype)
        arguments = _at(inner), leading(inner), _at(t), leading(t), _at(tau), n, after
        kernel(stream, (n, 1), min(_THREADS, -(-n // _WARP) * _WARP), arguments)


def _rounded(count: int) -> int:
    """Return the least power of two that is not less: of each kernel there are few."""
    return 1 << (count - 1).bit_length()


def _rows_each(cols: int, dtype: np.dtype) -> int:
    """Return how many rows of so many columns a thread keeps in registers; several need some for themselves."""
    rows = max(1, _REGISTERS // dtype.itemsize // _rounded(cols))
    return rows // 2 if rows > 1 < cols else rows


def _inverting(width: int, dtype: np.dtype) -> int:
    """Return the shared memory, in bytes, in which a block so wide is inverted; what is behind it may be read."""
    return (width * width + _WARP) * dtype.itemsize


def _widest(name: str, dtype: np.dtype) -> int:
    narrow = dtype.itemsize == 16 or (name == "lu" and dtype.kind == "c")  # registers have no room for more
    return _WIDEST[name] // 2 if narrow else _WIDEST[name]


def _at(array: Array) -> int:
    return int(array.data.ptr)
