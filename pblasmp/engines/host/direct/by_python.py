# SPDX-License-Identifier: Apache-2.0
"""Direct calls that Python computes: copies from one grid to another, and norms, sums and elements of matrices.

A copy goes through a slab that is the whole matrix: no rank needs to know who has what. Numbers are told with votes.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...._core import Core
from ....layout.pieces import write_inside
from ...direct import Asked, Moved, Part, host_address
from ...direct.sub_matrix import SubMatrix, UnfitError, vote_number
from ...local.sums import MATRIX_REDUCTIONS, stored

_RANKS = 1 << 24  # of a grid, at most
_NONE = 0, 0, 0
_PART = struct.Struct("=6q")

Array = NDArray[Any]


def _complete(told: Sequence[tuple[float, float]]) -> bool:
    """Return whether all ranks of a grid, and at least one, say the same of a matrix. Local."""
    found = [(int(number), *divmod(int(place), _RANKS)) for number, place in told if place]
    if not found:
        return False
    number, size, _ = found[0]
    alike = all(each[:2] == (number, size) for each in found)
    return alike and sorted(index for _, _, index in found) == [*range(size)]


class Move:
    """What this rank does in a copy. Making one is local.

    Attributes:
        number: the ranks vote on it.
        told: what this rank tells with its vote of A and B.
        nbytes: of the slab.
    """

    def __init__(self, moved: Moved) -> None:
        digest = hashlib.blake2b(f"{moved.call} {moved.options} {moved.shape}".encode(), digest_size=8)
        self.number = int.from_bytes(digest.digest(), "little", signed=True)
        m, n = moved.shape
        self.nbytes = m * n * moved.itemsize
        self.told: list[int] = []
        for number, size, index in (moved.of_a or _NONE, moved.of_b or _NONE):
            self.told += number, size * _RANKS + index
        self._moved = moved

    def alone(self) -> bool | None:
        """Copy between grids of this rank alone; None if one of them is none."""
        a, b, part = self._moved.a, self._moved.b, self._moved.part
        if a is None or b is None or not self.fits([self.told]):
            return None
        of, to = SubMatrix(a).local(), SubMatrix(b).local()
        if part is None:
            np.copyto(to, of)
        else:
            write_inside(to, of.__getitem__, part, *map(np.arange, to.shape))
        return True

    def write(self, core: Core, memory: Array) -> None:
        """Write what this rank has into the slab."""
        self._copy(core, self._moved.a, memory, back=False)

    def fits(self, told: Sequence[Sequence[float]]) -> bool:
        """Return whether what the ranks say of both matrices fits together: the same on every rank."""
        return all(_complete([(row[i], row[i + 1]) for row in told]) for i in (0, 2))

    def read(self, core: Core, memory: Array) -> None:
        """Write what is in the slab into this rank's part."""
        self._copy(core, self._moved.b, memory, back=True)

    def _copy(self, core: Core, part: Part | None, memory: Array, *, back: bool) -> None:
        if part is None:
            return
        half = self._moved.part
        uplo, diagonal = (0, 0) if half is None else (ord(half.uplo), half.diagonal)
        packed = np.frombuffer(_PART.pack(*part), np.int64)
        places = map(ctypes.c_void_p, (host_address(packed), host_address(memory)))
        core.part_copy(*places, int(back), uplo, ctypes.c_int64(diagonal))


class MatrixReducer:
    """A reduction of a matrix. Making one is local.

    Args:
        asked: a kind of matrix and one of ``MATRIX_REDUCTIONS``, as in "symmetric: norm 1".
        single: there is one rank.

    Attributes:
        number: the ranks vote on it.
        total: makes the result of every rank's numbers.

    Raises:
        UnfitError: a rank would have to have more of the columns or rows that it sums up.
    """

    def __init__(self, asked: Asked, *, single: bool) -> None:
        x = SubMatrix(asked.a)
        self._kind, _, name = asked.routine.partition(": ")
        both = self._kind in ("symmetric", "hermitian")
        for norm, span in (("norm 1", x.rows), ("norm inf", x.cols)):
            if name == norm and not (x.rows.on_one and x.cols.on_one if both else span.on_one):
                raise UnfitError
        self.number = 0 if single else vote_number(asked)
        self._find, self.total = MATRIX_REDUCTIONS[name]
        self._options = asked.uplo, asked.diag
        places = np.empty(0, np.int64)
        self._array, self._rows, self._cols = np.empty((0, 0)), places, places
        if x.active:
            self._array, self._rows, self._cols = x.local(), x.rows.globals(x.row), x.cols.globals(x.col)

    def part(self) -> Sequence[float]:
        """Return what this rank finds in its elements."""
        with np.errstate(all="ignore"):
            of = stored(np, self._array, self._rows, self._cols, self._kind, *self._options)
            return self._find(np, of, int)
