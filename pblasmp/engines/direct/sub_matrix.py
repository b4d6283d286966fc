# SPDX-License-Identifier: Apache-2.0
"""Sub-matrices in direct calls: what a rank has of each, and what all ranks conclude from that alike.

Also what these calls ask of a BLAS, which sees every matrix in Fortran order: one in C order is the transpose.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Any

from ...layout.axis import Axis, owned_below
from ...layout.routines import ROUTINES
from ...resources import rank_share
from .asked import Asked, Axes, Part, span_of

Array = Any


class UnfitError(Exception):
    """The call is not for direct calls."""


class SubMatrix:
    """A sub-matrix, perhaps transposed: how it is dealt out, and what this rank has of it. Local.

    Attributes:
        rows, cols: how they are dealt out.
        row, col: this rank's process along them; -1 outside the grid.
        m, n: how many of them this rank has.
        at, by_columns, ld: its local array; with ``conjugated`` its conjugate is meant.
        transposed: whether it is, in its matrix.
    """

    __slots__ = (
        "at", "by_columns", "col", "cols", "conjugated", "held", "ld", "m", "n", "part", "row", "rows", "transposed",
    )  # fmt: skip

    def __init__(self, part: Part, *, turned: bool = False, conjugated: bool = False) -> None:
        held, i, j, m, n, transposed = part
        pattern = held.pattern
        down, rows_here, rows = local_range(pattern.rows, i, m)
        right, cols_here, cols = local_range(pattern.cols, j, n)
        self.held, self.part, self.ld = held, part, held.ld
        first = down + right * held.ld if pattern.by_columns else down * held.ld + right
        self.at = held.address + first * pattern.itemsize
        self.transposed = turned != transposed
        self.by_columns = pattern.by_columns != self.transposed
        self.conjugated = conjugated and pattern.is_complex
        if self.transposed:
            self.rows, self.cols, self.m, self.n = cols, rows, cols_here, rows_here
            self.row, self.col = pattern.cols.mine, pattern.rows.mine
        else:
            self.rows, self.cols, self.m, self.n = rows, cols, rows_here, cols_here
            self.row, self.col = pattern.rows.mine, pattern.cols.mine

    @property
    def active(self) -> bool:
        """Whether this rank has a part of it."""
        return self.row >= 0 and self.m > 0 and self.n > 0

    def local(self) -> Array:
        """Return this rank's part as an array."""
        held, i, j, m, n, _ = self.part
        (down, rows, _), (right, cols, _) = (
            local_range(held.pattern.rows, i, m),
            local_range(held.pattern.cols, j, n),
        )
        found: Array = held.array[down : down + rows, right : right + cols]
        return found.T if self.transposed else found

    def rank(self, row: int, col: int) -> int:
        """Return the rank of a process."""
        nprow, npcol, order = self.held.pattern.grid
        if self.transposed:
            row, col = col, row
        return col * nprow + row if order == "col" or npcol == 1 else row * npcol + col

    def process(self, rank: int) -> tuple[int, int]:
        """Return the process of a rank; -1 twice outside the grid."""
        nprow, npcol, order = self.held.pattern.grid
        if rank >= nprow * npcol:
            return -1, -1
        row, col = (rank % nprow, rank // nprow) if order == "col" or npcol == 1 else divmod(rank, npcol)
        return (col, row) if self.transposed else (row, col)

    def same_places(self, other: SubMatrix) -> bool:
        """Return whether each element is on the same rank at the same place in both."""
        return (
            self.rows == other.rows
            and self.cols == other.cols
            and self.held.pattern.grid == other.held.pattern.grid
            and (self.transposed == other.transposed or self.held.pattern.size == 1)
        )


@lru_cache(rank_share(1 << 14, 1 << 18))
def local_range(axes: Axes, start: int, extent: int) -> tuple[int, int, Axis]:
    """Return the first local index and the number of indices of a range, and how it is dealt out. Local."""
    block, nprocs, source, lead, mine = axes
    span = span_of(axes, start, extent)
    if nprocs == 1:
        return start if mine == 0 else 0, extent if mine == 0 else 0, span
    if mine < 0:
        return 0, 0, span
    below = owned_below(start, mine, block, nprocs, source, lead)
    end = owned_below(start + extent, mine, block, nprocs, source, lead)
    return below, end - below, span


def same_elements(x: Part, y: Part) -> bool:
    """Return whether two parts are the same elements at the same addresses.

    Of matrices that have nothing on this rank, and so no address, those of one layout count as the same.
    """
    a, b = x[0], y[0]
    return a.address == b.address and a.ld == b.ld and x[1:] == y[1:] and a.pattern.digest == b.pattern.digest


def vote_number(asked: Asked) -> int:
    """Return the number that the ranks vote on: equal if, and only if, they ask for the same."""
    call, routine, a, b, c, d, *others, given, _ = asked
    parts = [
        part[0].pattern.digest + _place_as_bytes(*part[1:]) if part is not None else b"-"
        for part in (a, b, c, d)
    ]
    options = _options_as_bytes(call, routine, *others)
    digest = hashlib.blake2b(b"".join((options, *parts, given)), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)


_place_as_bytes = struct.Struct("=4q?").pack


@lru_cache(1024)
def _options_as_bytes(
    call: str, routine: str, new: bool, side: str, uplo: str, op_a: str, op_b: str, diag: str, *scalars: complex
) -> bytes:  # fmt: skip
    alpha, beta = map(complex, scalars)
    options = f"{call} {routine} {side}{uplo}{op_a}{op_b}{diag} {new} "
    return options.encode() + struct.pack("=4d", alpha.real, alpha.imag, beta.real, beta.imag)


def same_rank(x: SubMatrix, d: SubMatrix) -> bool:
    """Return whether one rank has all of both."""
    if not (x.rows.on_one and x.cols.on_one and d.rows.on_one and d.cols.on_one):
        return False
    return x.rank(x.rows.source, x.cols.source) == d.rank(d.rows.source, d.cols.source)


_MIRRORED = {"L": "U", "U": "L"}
_OTHER_SIDE = {"L": "R", "R": "L"}


def factors_of_product(asked: Asked) -> tuple[SubMatrix, SubMatrix]:
    """Return op(A) and the transpose of op(B). Local."""
    assert asked.b is not None
    x = SubMatrix(asked.a, turned=asked.op_a != "N", conjugated=asked.op_a == "C")
    return x, SubMatrix(asked.b, turned=asked.op_b == "N", conjugated=asked.op_b == "C")


def moved_in_place(x: SubMatrix, y: SubMatrix, to: SubMatrix) -> int:
    """Return how many elements move if the larger factor of ``x y^T`` stays: the other one, and partial sums. Local."""
    m, n = to.rows.extent, to.cols.extent
    return m * n * (x.cols if m >= n else y.cols).nprocs + min(m, n) * x.cols.extent


def triangular_words(asked: Asked, of_columns: bool, by_columns: bool) -> tuple[str, str, str]:
    """Return the side, the triangle and the op of trsm or trmm. Local.

    Args:
        asked: the call.
        of_columns, by_columns: whether the triangular matrix, and the other one, are in Fortran order.

    Raises:
        UnfitError: BLAS conjugates only what it transposes.
    """
    op = "T" if asked.op_a == "C" and not asked.d[0].pattern.is_complex else asked.op_a
    if of_columns != by_columns:
        if op == "C":
            raise UnfitError
        op = "T" if op == "N" else "N"
    side = asked.side if by_columns else _OTHER_SIDE[asked.side]
    return side, asked.uplo if of_columns else _MIRRORED[asked.uplo], op


def sided_words(asked: Asked, x: SubMatrix, y: SubMatrix, to: SubMatrix) -> tuple[str, str, str, int, int]:
    """Return the name of symm or hemm, the side, the triangle, and D's rows and columns. Local.

    Args:
        asked: the call.
        x, y, to: A, B and D.

    Raises:
        UnfitError: BLAS takes no such mixture of memory orders.
    """
    hermitian = asked.routine == "hemm" and asked.d[0].pattern.is_complex
    if y.by_columns != to.by_columns or (hermitian and x.by_columns != to.by_columns):
        raise UnfitError
    side = asked.side if to.by_columns else _OTHER_SIDE[asked.side]
    uplo = asked.uplo if x.by_columns else _MIRRORED[asked.uplo]
    m, n = (to.m, to.n) if to.by_columns else (to.n, to.m)
    return "hemm" if hermitian else "symm", side, uplo, m, n


def factors_of_update(asked: Asked) -> tuple[list[SubMatrix], int, bool]:
    """Return op(A), and op(B) if there is one, of a rank-k or rank-2k update; k; whether it is Hermitian. Local.

    Raises:
        UnfitError: BLAS knows only the other op.
    """
    is_complex = asked.d[0].pattern.is_complex
    hermitian = ROUTINES[asked.routine].hermitian and is_complex
    if is_complex and asked.op_a == ("T" if hermitian else "C"):
        raise UnfitError
    factors = [SubMatrix(part, turned=asked.op_a != "N") for part in (asked.a, asked.b) if part is not None]
    return factors, factors[0].cols.extent, hermitian


def start_of_update(asked: Asked, to: SubMatrix) -> SubMatrix | None:
    """Return what D starts as, None if it is C already or what it is does not matter. Local.

    Raises:
        UnfitError: C is not where D is, or D was given: outside the triangle it keeps its values.
    """
    c = asked.c
    if c is None or same_elements(c, asked.d) or (not asked.new and asked.beta == 0):
        return None
    if not asked.new:
        raise UnfitError
    return _in_the_places_of(to, c, asked)


def old_values(asked: Asked, to: SubMatrix) -> SubMatrix | None:
    """Return C if it is read, and is not D; its transpose if ``to`` is D's. Local.

    Raises:
        UnfitError: it is not where D is.
    """
    c = asked.c
    if c is None or asked.beta == 0 or same_elements(c, asked.d):
        return None
    return _in_the_places_of(to, c, asked)


def _in_the_places_of(to: SubMatrix, c: Part, asked: Asked) -> SubMatrix:
    """Return C, turned as ``to`` is against D."""
    old = SubMatrix(c, turned=to.transposed != asked.d[-1])
    if not old.same_places(to):
        raise UnfitError
    return old
