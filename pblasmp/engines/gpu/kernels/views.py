# SPDX-License-Identifier: Apache-2.0
"""View: a row-major matrix in GPU memory, by its address: this GPU's or a peer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ....dtypes import is_float8
from ....errors import ArgumentError
from ....layout.intersection import Piece, Stretches

Move = tuple[int, tuple[int, int, int], int, tuple[int, int, int], tuple[int, int, int, int]]
Four = tuple[int, int, int, int]


def contiguous(array: Any, *, turned: bool) -> bool:
    """Return whether the entries of a row (if ``turned``, of a column) are contiguous. Local."""
    return bool(array.shape[not turned] == 1 or array.strides[not turned] == array.itemsize)


@dataclass(slots=True, unsafe_hash=True)  # a frozen one takes four times as long to make
class View:
    """Rows of ``cols`` entries, ``ld`` entries apart, from ``address`` on. A plain value: it keeps nothing alive.

    It is never changed.
    """

    address: int
    rows: int
    cols: int
    ld: int
    dtype: np.dtype

    @classmethod
    def of(cls, array: Any, dtype: np.dtype | None = None, name: str = "array") -> View:
        """Return a view of a CuPy array of two dimensions, or a view itself. Local.

        Args:
            array: row-major: a row's entries are contiguous, and rows do not overlap.
            dtype: the element type, if the array cannot tell: 8-bit floats in an array of bytes.
            name: of the operand, for the error.

        Raises:
            ArgumentError: the array has another memory order, or ``dtype`` another size.
        """
        if type(array) is cls:
            return array
        dtype = np.dtype(array.dtype) if dtype is None else dtype
        size = dtype.itemsize
        if array.ndim != 2 or array.itemsize != size:
            raise ArgumentError(
                f"{name}: expected a matrix of {dtype.name}, got {array.ndim} dimensions of {array.dtype}"
            )
        rows, cols = array.shape
        if not array.size:
            return cls(0, rows, cols, max(1, cols), dtype)
        across = array.strides[1] if cols > 1 else size
        down = array.strides[0] if rows > 1 else cols * size
        if across != size or down < cols * size or down % size:
            raise ArgumentError(
                f"{name}: strides are {tuple(array.strides)} bytes, expected row-major memory (C order)"
            )
        return cls(int(array.data.ptr), rows, cols, down // size, dtype)

    @classmethod
    def at(cls, address: int, shape: tuple[int, int], dtype: np.dtype, ld: int = 0) -> View:
        """Return a view of the memory at an address, whose rows are tight unless ``ld`` says otherwise. Local."""
        return cls(address, shape[0], shape[1], ld or max(1, shape[1]), dtype)

    @classmethod
    def of_bytes(cls, address: int, nbytes: int) -> View:
        """Return memory as one row of bytes. Local."""
        return cls(address, 1, nbytes, nbytes, np.dtype(np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of its entries, without the gaps between its rows."""
        return self.rows * self.cols * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether there are no gaps between its rows."""
        return self.ld == self.cols or self.rows <= 1

    def __getitem__(self, at: slice | tuple[slice, slice]) -> View:
        """Return some rows, or some columns of some rows, as of an array. Local."""
        down, across = at if isinstance(at, tuple) else (at, slice(None))
        row, col = down.start or 0, across.start or 0
        rows = (self.rows if down.stop is None else down.stop) - row
        cols = (self.cols if across.stop is None else across.stop) - col
        address = self.address + (row * self.ld + col) * self.dtype.itemsize
        return View(address, rows, cols, self.ld, self.dtype)

    def shifted(self, entries: int) -> View:
        """Return a matrix of the same size that begins so many entries later. Local."""
        at = self.address + entries * self.dtype.itemsize
        return View(at, self.rows, self.cols, self.ld, self.dtype)

    def lines(self, start: int, stop: int) -> View:
        """Return the rows from ``start`` to before ``stop``. Local."""
        at = self.address + start * self.ld * self.dtype.itemsize
        return View(at, stop - start, self.cols, self.ld, self.dtype)

    def columns(self, start: int, stop: int) -> View:
        """Return the columns from ``start`` to before ``stop``. Local."""
        at = self.address + start * self.dtype.itemsize
        return View(at, self.rows, stop - start, self.ld, self.dtype)


LONGEST_PITCH = (1 << 31) - 1
"""Bytes from one line to the next, at most, in a command of a copy engine: ``cudaDeviceProp.memPitch``."""


class Blocks(NamedTuple):
    """Memory that a copy engine copies by one command: ``depth`` slices of ``height`` lines of ``width`` bytes.

    Attributes:
        to, of: addresses.
        pitches: bytes from one line to the next, in ``to`` and in ``of``.
        slices: bytes from one slice to the next, multiples of the pitches.
    """

    to: int
    of: int
    width: int
    height: int
    depth: int
    pitches: tuple[int, int]
    slices: tuple[int, int] = (0, 0)


def blocks(to: View, of: View, count: int, steps: tuple[int, int]) -> Iterator[Blocks]:
    """Yield the commands that copy ``count`` matrices, ``steps`` entries apart in ``to`` and ``of``. Local.

    It is one command, if it can be: each takes a copy engine about 2 us in addition to its bytes.
    """
    size = of.dtype.itemsize
    width = of.cols * size
    if not width * of.rows:
        return
    if min(steps) < 0:  # backwards
        for i in range(count):
            yield from blocks(to.shifted(i * steps[0]), of.shifted(i * steps[1]), 1, (0, 0))
        return
    levels = [(of.rows, (to.ld * size, of.ld * size)), (count, (steps[0] * size, steps[1] * size))]
    levels = sorted((level for level in levels if level[0] > 1), key=lambda level: level[1])
    while levels and levels[0][1] == (width, width):
        width *= levels.pop(0)[0]
    levels += [(1, (width, width))] * (2 - len(levels))
    (height, pitches), (depth, slices) = levels
    if depth == 1 or slices == (height * pitches[0], height * pitches[1]):
        yield from _short(Blocks(to.address, of.address, width, height * depth, 1, pitches))
    elif all(s % p == 0 and s >= height * p for s, p in zip(slices, pitches, strict=True)):
        yield from _short(Blocks(to.address, of.address, width, height, depth, pitches, slices))
    else:  # CUDA has no such command
        levels.sort(key=lambda level: (max(level[1]) <= LONGEST_PITCH, level), reverse=True)
        (height, pitches), (again, apart) = levels
        for i in range(again):
            one = Blocks(to.address + i * apart[0], of.address + i * apart[1], width, height, 1, pitches)
            yield from _short(one)


def _short(b: Blocks) -> Iterator[Blocks]:
    """Yield a command, or one for each line if CUDA does not take lines so far apart. Local."""
    if max(b.pitches) <= LONGEST_PITCH:
        yield b
        return
    for k in range(b.depth):
        for i in range(b.height):
            at, source = (k * s + i * p for s, p in zip(b.slices, b.pitches, strict=True))
            yield Blocks(b.to + at, b.of + source, b.width, 1, 1, (b.width, b.width))


def whole_move(to: View, of: View) -> Move:
    """Return what ``Kernels.move`` takes to copy a matrix to another one. Local.

    Raises:
        ArgumentError: they differ in shape or in the size of an entry.
    """
    if (to.rows, to.cols, to.dtype.itemsize) != (of.rows, of.cols, of.dtype.itemsize):
        raise ArgumentError(f"a matrix of {of.rows} x {of.cols} is to be copied to {to.rows} x {to.cols}")
    size = of.dtype.itemsize
    whole = (1, 1, of.rows, of.cols * size)
    return to.address, (0, 0, to.ld * size), of.address, (0, 0, of.ld * size), whole


def moves(to: View, of: View, lines: Stretches, runs: Stretches) -> Iterator[Move]:
    """Yield what ``Kernels.move`` takes to copy blocks of one matrix to their places in another. Local.

    Args:
        to, of: matrices of one element type.
        lines, runs: which rows, and which of their entries: ``src`` in ``of``, ``dst`` in ``to``.
    """
    size = to.dtype.itemsize
    down, up = to.ld * size, of.ld * size
    for line in lines:
        for run in runs:
            yield (
                to.address + line.dst * down + run.dst * size,
                (line.dst_step * down, down, run.dst_step * size),
                of.address + line.src * up + run.src * size,
                (line.src_step * up, up, run.src_step * size),
                (line.repeat, line.length, run.repeat, run.length * size),
            )


def transposing_moves(to: Any, of: Any, piece: Piece) -> Iterator[tuple[int, Four, int, Four, Four]]:
    """Yield arguments of ``Kernels.transpose`` that copy a piece of one CuPy array to its place in another. Local."""
    (down, across), (up, along) = to.strides, of.strides
    for rows in piece.rows:
        for cols in piece.cols:
            yield (
                int(to.data.ptr) + rows.dst * down + cols.dst * across,
                (rows.dst_step * down, down, cols.dst_step * across, across),
                int(of.data.ptr) + rows.src * up + cols.src * along,
                (rows.src_step * up, up, cols.src_step * along, along),
                (rows.repeat, rows.length, cols.repeat, cols.length),
            )


_SINCE = 89  # compute capability

_MANTISSA, _BIAS = 23, 127  # of float32
# mantissa, bias, the largest number, what NumPy makes of larger ones
_FORMATS = {"float8_e4m3fn": (3, 7, 0x7E, 0x7F), "float8_e5m2": (2, 15, 0x7B, 0x7C)}
_NAN = 0x7F


def copy_where(dst: Any, src: Any, mask: Any = None) -> None:
    """Queue the copy of an array or a number to an array where a mask says so, converting its type. Local."""
    if dst.size and mask is None:
        dst[...] = src
    elif dst.size:
        import cupy

        if dst.strides[0] < dst.strides[1]:  # CuPy's kernels run along rows
            dst, src, mask = dst.T, getattr(src, "T", src), mask.T
        cupy.copyto(dst, src, casting="unsafe", where=mask)


def leading(array: Any) -> int:
    """Return the leading dimension of an array in F order; for a single column, any legal one. Local."""
    return max(1, len(array), int(array.strides[1]) // array.itemsize if array.shape[1] > 1 else 1)


def why_no_float8(capability: int) -> str:
    """Return why GPUs of a compute capability, 90 for 9.0, do not multiply in 8 bits; "" if they do. Local."""
    if capability >= _SINCE:
        return ""
    found = f"{capability // 10}.{capability % 10}"
    return f"8-bit floats need GPUs of compute capability 8.9 or above, found {found}"


def convert(xp: Any, x: Any, of: np.dtype, to: np.dtype) -> Any:
    """Return an array of another type, as NumPy's ``astype`` with ml_dtypes rounds. Local.

    Args:
        x: an array of type ``of``; of bytes if that is an 8-bit float.
        of, to: element types, of which at least one is an 8-bit float. The result is bytes if ``to`` is one, else
            float32.
    """
    if is_float8(of):
        values = np.arange(256, dtype=np.uint8).view(of).astype(np.float32)
        x = xp.take(xp.asarray(values), x)
    elif x.dtype.kind == "c":
        x = x.real
    return to_bits(xp, x.astype(np.float32), to, saturates=False) if is_float8(to) else x


def to_bits(xp: Any, x: Any, dtype: np.dtype, *, saturates: bool = True) -> Any:
    """Return the bytes of float32 numbers rounded to 8-bit floats, ties to even. Local.

    Args:
        x: an array of float32.
        dtype: the 8-bit type.
        saturates: numbers that are too large become the largest one; otherwise infinity, or NaN if the type has none.
    """
    mantissa, bias, largest, beyond = _FORMATS[dtype.name]
    bits, size = x.view(np.uint32), abs(x)
    dropped = _MANTISSA - mantissa
    whole = bits & 0x7FFFFFFF
    half = (1 << (dropped - 1)) - 1  # one more is added for odd numbers, so that ties go to even
    normal = ((whole + ((whole >> dropped) & 1) + half) >> dropped) - ((_BIAS - bias) << mantissa)
    smallest = 2.0 ** (1 - bias)  # smallest normal number
    steps = xp.rint(xp.where(size < smallest, size, 0) * (2.0**mantissa / smallest)).astype(np.uint32)
    found = xp.where(size < smallest, steps, normal)
    found = xp.where(found > largest, largest if saturates else beyond, found)
    found = xp.where(size == size, found, _NAN)
    return (found | ((bits >> 24) & 0x80)).astype(np.uint8)
