# SPDX-License-Identifier: Apache-2.0
"""A direct call as it is asked for, what is known of its operands: plain integers; and the memory that it uses."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..._core import MATRIX, ROUTINES
from ...dtypes import DTYPES, element_type
from ...layout import Grid, MatrixDescriptor, Trapezoid
from ...layout.axis import Axis, axis

_LARGEST = 2**31 - 1  # BLAS's integers
NARROW = 2  # bytes of an element of 16 bits, which BLAS lacks
_ENTRIES = struct.Struct("=11q")  # of a descriptor
_CORE_LETTERS = "sdczi" + "".join(
    kind.char for kind in map(np.dtype, DTYPES.values()) if kind.itemsize == NARROW
)

Pair = tuple[int, int]


class Axes(NamedTuple):
    """One dimension of a layout, and this rank's place in it.

    Attributes:
        block, nprocs, source, lead: as those of ``Axis``.
        mine: this rank's process; -1 outside the grid.
    """

    block: int
    nprocs: int
    source: int
    lead: int
    mine: int


def span_of(axes: Axes, start: int, extent: int) -> Axis:
    """Return how ``extent`` indices from ``start`` on are dealt out, in its simplest form. Local.

    Two are equal if, and only if, each index is on the same process at the same place among its own.
    """
    block, nprocs, source, lead, _ = axes
    if nprocs == 1:
        return whole_span(extent)
    blocks, lead = divmod(lead + start, block)
    source = (source + blocks) % nprocs
    if lead + extent <= block:
        return axis(extent, extent or 1, source, nprocs, 0)
    return axis(extent, block, source, nprocs, lead)


def whole_span(extent: int) -> Axis:
    """Return indices that are not dealt out. Local."""
    return axis(extent, extent or 1, 0, 1, 0)


class Pattern(NamedTuple):
    """What is known of a layout on this rank.

    Attributes:
        rows, cols: its dimensions.
        grid: rows, columns and, if it matters, the order of its process grid.
        size: how many ranks have a part.
        by_columns: whether local arrays are in Fortran order.
        letter: of BLAS's routines for its type.
        dtype, itemsize, is_complex: that type.
        digest: equal on two ranks if the layouts are.
    """

    rows: Axes
    cols: Axes
    grid: tuple[int, int, str]
    size: int
    by_columns: bool
    letter: str
    dtype: np.dtype
    itemsize: int
    is_complex: bool
    digest: bytes


class Held:
    """A matrix that is no view, as this rank holds it. It does not keep the matrix's memory. Local.

    Attributes:
        pattern: its layout.
        address: of its first element.
        ld: elements from one column to the next, or from one row to the next in C order.
        end: the address after its last element.
    """

    __slots__ = (
        "_array", "_at", "_in_core", "_on_host", "_shape", "_strides", "address", "end", "ld", "pattern",
    )  # fmt: skip

    def __init__(self, pattern: Pattern, array: Any, address: int, ld: int, nbytes: int) -> None:
        self.pattern, self.address, self.ld, self.end = pattern, address, ld, address + nbytes
        self._shape, self._strides, self._on_host = array.shape, array.strides, type(array) is np.ndarray
        self._array: Any = None
        self._at = 0

    @classmethod
    def of(cls, pattern: Pattern, array: Any) -> Held | None:
        """Return a matrix over a local array; None if direct calls do not take it. Local."""
        is_numpys = type(array) is np.ndarray  # else CuPy's
        address = host_address(array) if is_numpys else getattr(array.data, "ptr", None)
        if address is None or array.dtype != pattern.dtype or array.ndim != 2:
            return None
        rows, cols = array.shape
        down, across = array.strides
        if not pattern.by_columns:
            rows, cols, down, across = cols, rows, across, down
        item = array.itemsize
        ld = across // item if cols > 1 and rows else max(1, rows)
        contiguous = down == item or rows <= 1 or not cols
        if not contiguous or ld < rows or ld > _LARGEST or (cols > 1 and rows and ld * item != across):
            return None
        return cls(pattern, array, int(address), ld, item * (ld * (cols - 1) + rows) * (array.size > 0))

    def moved(self, address: int) -> Held:
        """Return what it were at another address; nothing is read or written there. Local."""
        found: Held = object.__new__(Held)
        found.pattern, found.ld, found.address = self.pattern, self.ld, address
        found.end = address + self.end - self.address
        found._shape, found._strides, found._on_host = self._shape, self._strides, False
        found._array = None
        found._at = 0
        return found

    def __index__(self) -> int:
        """Return the address of what the compiled core knows of it. Local."""
        if not self._at:
            pattern = self.pattern
            nprow, npcol, order = pattern.grid
            packed = MATRIX.pack(
                *pattern.rows, *pattern.cols, nprow, npcol, ("", "row", "col").index(order), pattern.by_columns,
                pattern.itemsize, _CORE_LETTERS.index(pattern.letter), pattern.digest, self.address, self.end, self.ld,
            )  # fmt: skip
            self._in_core = np.frombuffer(packed, np.int64)  # it stays as long as there is an address of it
            self._at = host_address(self._in_core)
        return self._at

    @property
    def array(self) -> Any:
        """On the host, an array over the memory of this rank's local array; None on a GPU."""
        if self._array is None and self._on_host:
            self._array = alias(self.address, self._shape, self._strides, self.pattern.dtype.str)
        return self._array


class _Interface:
    """What NumPy makes an array of, which keeps it."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__, self.owner = interface, owner


def alias(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str, owner: object = None
) -> NDArray[Any]:
    """Return an array over memory, of which it keeps the owner; ``kind`` is NumPy's word for its type. Local."""
    interface = {"data": (address, False), "shape": shape, "strides": strides, "typestr": kind, "version": 3}
    return np.asarray(_Interface(interface, owner))


Part = tuple[Held, int, int, int, int, bool]
"""A sub-matrix: its matrix, first row and column, how many rows and columns; whether these are exchanged."""


@lru_cache(1024)
def pattern_of(descriptor: MatrixDescriptor, rank: int, *, narrow: bool = False) -> Pattern | None:
    """Return what is known of a layout on this rank; None if BLAS lacks the type or an integer is too large. Local.

    With ``narrow`` types of 16 bits are taken, too.
    """
    d = descriptor
    coords = d.grid.coords(rank) if rank < d.grid.size else (-1, -1)
    return pattern(
        d.shape, d.block, d.grid, d.source, coords, d.dtype, d.order, d.lead, d.ld or 0, narrow=narrow
    )  # fmt: skip


def pattern(
    shape: Pair, block: Pair, grid: Grid, source: Pair, coords: Pair, dtype: np.dtype, order: str = "F",
    lead: Pair = (0, 0), ld: int = 0, *, narrow: bool = False,
) -> Pattern | None:  # fmt: skip
    """Return what ``pattern_of`` does, of legal integers; ``coords``: this rank's on the grid. Local."""
    letter, (nprow, npcol) = element_type(dtype).blas, grid.shape
    if narrow and dtype.itemsize == NARROW:
        letter = dtype.char
    if not letter or max(*shape, *block) > _LARGEST:
        return None
    numbering = "" if nprow == 1 or npcol == 1 else grid.order
    entries = _ENTRIES.pack(*shape, *block, nprow, npcol, *source, *lead, ld)
    digest = hashlib.blake2b(entries + f"{letter}{order}{numbering}".encode(), digest_size=8).digest()
    return Pattern(
        Axes(block[0], nprow, source[0], lead[0], coords[0]), Axes(block[1], npcol, source[1], lead[1], coords[1]),
        (nprow, npcol, numbering), nprow * npcol, order == "F", letter, dtype, dtype.itemsize, dtype.kind == "c",
        digest,
    )  # fmt: skip


FAMILIES = {
    "matmul": "product",
    **dict.fromkeys(("trsm", "trmm"), "triangular"),
    **dict.fromkeys(("symm", "hemm"), "sided"),
    **dict.fromkeys(("syrk", "herk", "syr2k", "her2k"), "updated"),
    "geadd": "added",
    "scal": "scaled",
    "swap": "exchanged",
    **dict.fromkeys(("dot", "dotc", "nrm2", "asum", "amax"), "reduced"),
    "potrf": "factored",
    "posv": "solved",
    **dict.fromkeys(
        (
            *("getrf", "getrs", "gesv", "potrs", "trtrs", "getri", "potri", "trtri"),
            *("getrf getri", "potrf potri", "trtri laset"),
            *("gels", "geqrf", "orgqr", "ormqr"),
        ),
        "lapack",
    ),
}
"""The routines that may be direct calls: those of one family are computed by one function of an engine."""


ROUTINE_NUMBERS = {name: number for number, name in enumerate(ROUTINES)}
"""The core's."""


class Asked(NamedTuple):
    """A direct call. Options that the routine lacks have their defaults.

    Attributes:
        call: its name in messages.
        routine: "matmul", one of ``ROUTINES``, or one of level 1: "scal" of D, "swap" of A and D, or one of
            ``REDUCTIONS`` of A, and of B if it takes two vectors, or of ``MATRIX_REDUCTIONS`` after the kind of A, as
            in "symmetric: norm 1"; or LAPACK's, which keep A and B: "potrf", "getrf", "geqrf", "getri", "potri",
            "trtri" and, for all types, "orgqr" make D of A, "posv", "gesv", "potrs", "getrs", "trtrs" and "ormqr" of A
            and B, and "getrf getri" and "potrf potri" are two of them in turn. "potrf potri" and "trtri laset" write
            all of the inverse, and "gels", which makes D of A and B, also A's factors over A.
        a, b, c, d: sub-matrices, vectors as columns; None for those that are absent. With ``beta == 0`` C is not read.
        new: D is a new matrix: where it is not computed, it gets the values of C.
        side, uplo, op_a, op_b, diag: as in PBLAS.
        alpha, beta: as the type of D has them. Alpha is not 0: some BLAS then read A and B nevertheless.
        given: the pivots of "getrs" and "getri", as LAPACK has them: integers of 32 bits, from 1; or the factors of the
            reflectors of "orgqr" and "ormqr".
        beside: or those of this rank's part of A as ScaLAPACK has them. IPIV, of rows of the whole matrix from 1, is a
            matrix with a column for each process column of A's grid; TAU, of columns, one with a row for each process
            row.
    """

    call: str
    routine: str
    a: Part
    b: Part | None
    c: Part | None
    d: Part
    new: bool
    side: str = "L"
    uplo: str = "L"
    op_a: str = "N"
    op_b: str = "N"
    diag: str = "N"
    alpha: complex = 1
    beta: complex = 0
    given: bytes = b""
    beside: Part | None = None

    @property
    def dtype(self) -> np.dtype:
        """The type of D."""
        return self.d[0].pattern.dtype


class RoutineForm(Protocol):
    """A routine, of PBLAS for one type or of matrices: the compiled core itself reads the arguments of its calls.

    Attributes:
        call, routine: as in ``Asked``.
        dtype: the type, of a routine that returns numbers.
        address: of what the core knows of it.
    """

    call: str
    routine: str
    dtype: np.dtype
    address: int

    def asked(self, args: Sequence[Any], words: list[str], alpha: complex, beta: complex) -> Asked:
        """Return what a call that the core has read asks for. Local.

        Args:
            args: the arguments.
            words: side, uplo, op_a, op_b and diag.
            alpha, beta: numbers of the result's type.
        """

    def learn(self, args: Sequence[Any], tell: Callable[[Any, Any, Held, int, int], None]) -> bool:
        """Tell the core of the local arrays in a call; return whether there is nothing to say about them. Local.

        Args:
            args: the arguments.
            tell: takes an array, its descriptor, what is known of both, and the descriptor's rows and columns.
        """

    def answer(self, args: Sequence[Any], direct: Any, done: Any) -> Any:
        """Return what the call returns, and write what it writes besides its matrices; None as ``Direct.run``. Local.

        Args:
            args: the arguments.
            direct: what has computed it.
            done: what that has found.
        """


class Outcome(NamedTuple):
    """What LAPACK says of a call.

    Attributes:
        info: INFO; -1 if ``beside`` has pivots that are no rows of A, or columns that differ: nothing is computed then.
        made: pivots, from 1, or the factors of reflectors, if the routine makes any.
        diagonal: that of U or L, if A has been factored to solve with it.
    """

    info: int
    made: NDArray[Any] | None = None
    diagonal: NDArray[Any] | None = None


class Moved(NamedTuple):
    """A copy of a matrix from one grid to another, as this rank is asked for it.

    Attributes:
        call: its name in messages.
        options: what all ranks must give alike.
        shape, itemsize: rows, columns and bytes of an element.
        a, b: this rank's part of the matrix that is read, and of the one that is written; None outside its grid.
        of_a, of_b: what all its ranks must say of it, as a number below 2^53; how many these are; which this one is.
        part: what is copied; None for all.
    """

    call: str
    options: str
    shape: Pair
    itemsize: int
    a: Part | None
    b: Part | None
    of_a: tuple[int, int, int] | None
    of_b: tuple[int, int, int] | None
    part: Trapezoid | None


class Direct(Protocol):
    """How an engine computes direct calls: what it does not say takes the ordinary way.

    Instead of an ``Asked`` they take a ``RoutineForm``, with the arguments of a call.
    """

    def run(self, control: Any, asked: Asked | RoutineForm, args: Sequence[Any] = ()) -> bool | None:
        """Compute a call. Collective over the context.

        Returns:
            True: it is done. None: it is not for direct calls, as far as this rank knows; nothing has happened. False:
            the ranks have voted, and not all of them agree; nothing has been written.

        Raises:
            Exception: what the ranks agreed to raise.
        """

    def reduce(self, control: Any, asked: Asked | RoutineForm, args: Sequence[Any] = ()) -> Any:
        """Return the result of one of ``REDUCTIONS``; None or False as ``run`` does. Collective over the context.

        Raises:
            Exception: what the ranks agreed to raise.
        """
        return None

    def move(self, control: Any, moved: Moved) -> bool | None:
        """Copy a matrix; return what ``run`` does. Collective over the context.

        Raises:
            Exception: what the ranks agreed to raise.
        """
        return None

    def factors(self, routine: str, m: int, n: int, width: int) -> bool:
        """Return whether a factorization may be a direct call. Local.

        Args:
            routine: as in ``Asked``.
            m, n: rows and columns of A.
            width: right-hand sides.
        """
        return False

    def factor(
        self, control: Any, asked: Asked | RoutineForm, args: Sequence[Any] = ()
    ) -> Outcome | Literal[False] | None:
        """Compute a factorization or a solve; return None or False as ``run`` does. Collective over the context.

        Raises:
            Exception: what the ranks agreed to raise.
        """
        return None


# ``__array_interface__`` and ``ctypes`` make several objects each time, which takes longer than a short call of the
# BLAS. The address is the first field of NumPy's array object, after what all objects of Python begin with.
# Source: NumPy's C API, ``PyArrayObject``.
_REMEMBERED = 4096  # places of array objects
_HEAD = object.__basicsize__


class _Fields(dict[int, "ctypes.c_size_t"]):
    """The address fields of array objects, by where these are. They are read only while there is an array."""

    def __missing__(self, place: int) -> ctypes.c_size_t:
        if len(self) >= _REMEMBERED:
            self.clear()
        field = self[place] = ctypes.c_size_t.from_address(place + _HEAD)
        return field


_fields = _Fields()


def _by_interface(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _by_field(array: Any) -> int:
    return _fields[id(array)].value


def _readable() -> bool:
    """Return whether arrays have their addresses where NumPy's C API says. Local."""
    if sys.implementation.name != "cpython":
        return False
    whole = np.zeros(8)
    return all(_by_field(each) == _by_interface(each) for each in (whole, whole[3:], np.zeros((3, 5)).T))


host_address = _by_field if _readable() else _by_interface
"""``host_address(array)`` returns the address of the first element of a NumPy array, which is no subclass's. Local."""


class SlabSets:
    """The sizes of an engine's two sets of slabs, the same on every rank, and whose turn it is. Local to make.

    Args:
        reserve: makes room for two sets of so many bytes each. Collective over the context; raises MemoryError on every
            rank if there is none, and then leaves the sets as they were.
        least: bytes of a set, at least.
        most: bytes of a set, at most.

    Attributes:
        half: the set of the next call that has slabs, 0 or 1.
        capacity: bytes of a set.
        most: as above; no more than there are, once there was no room for more.
    """

    def __init__(self, reserve: Callable[[int], None], least: int, most: int) -> None:
        self._reserve, self._least, self.most = reserve, least, most
        self.half = self.capacity = 0

    def fit(self, nbytes: int) -> bool:
        """Make sets of at least ``nbytes``, and return whether that was possible. Collective over the context."""
        if nbytes <= self.capacity:
            return True
        nbytes = max(self._least, 1 << (nbytes - 1).bit_length())
        try:
            self._reserve(nbytes)
        except MemoryError:
            self.most = self.capacity
            return False
        self.capacity = nbytes
        return True

    def turn(self) -> None:
        """Let the next call use the other set. Local."""
        self.half ^= 1

    def start_over(self) -> None:
        """Let the next call use the first set: since the last call that has slabs, all ranks have met. Local.

        Calls that come again in the same order then find the set that they had before.
        """
        self.half = 0
