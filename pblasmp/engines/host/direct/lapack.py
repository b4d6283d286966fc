# SPDX-License-Identifier: Apache-2.0
"""Small factorisations, solves and inverses as direct calls: every rank runs LAPACK on its own copy of the operands.

The ranks meet once, as in ``tiny`` calls. In their next call they compare checksums of their results.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ....layout import Trapezoid
from ...direct import Outcome
from ...direct.sub_matrix import SubMatrix, UnfitError, check_overlap
from ..lapack import legal_pivots
from .program import Preparation
from .slabs import Array, Steps, integer
from .tiny import LARGEST, Whole, all_of

__all__ = ["computed_by_lapack", "is_small", "within_triangle"]

# Multiplications: larger calls are worth a plan, in which the ranks share the work.
_MOST = 1 << 22
_IN_TRIANGLE = ("potri", "trtri")  # these alone write one triangle only
_BLOCK = 32  # columns of getri's workspace


def is_small(m: int, n: int, width: int) -> bool:
    """Return whether each rank may factor m × n elements, and solve for ``width`` columns, by itself. Local."""
    return m * n * (min(m, n) + width) <= _MOST and m * (n + width) <= LARGEST


def computed_by_lapack(call: Preparation) -> Callable[[], Steps]:
    """Prepare routines of LAPACK: D is A's factors or inverse, or the solution of op(A) X = B.

    If A is singular, only factors are written. All ranks of the context compute, since each needs INFO.

    Raises:
        UnfitError: the matrices are large, ranks round differently, or D overlaps an operand and is not that operand
            itself.
    """
    asked = call.asked
    check_overlap(asked, asked.a if asked.b is None else asked.b)
    a, to = SubMatrix(asked.a), SubMatrix(asked.d)
    given = [a] if asked.b is None else [a, SubMatrix(asked.b)]
    small = is_small(a.rows.extent, a.cols.extent, 0 if asked.b is None else to.cols.extent)
    if not (small and call.alike):
        raise UnfitError
    copies: list[Whole] = []
    for x in given:
        copies.append(Whole(call, x, by_columns=True, start=copies[-1].end if copies else 0))
    slabs = [] if call.single else [call.stage(x, *all_of(x), by_columns=True) for x in given]
    work = _Lapack(call, *copies)
    call.outcome = work.outcome
    call.checksum = None if call.single else work.checksum
    ipiv = None if asked.ipiv is None else SubMatrix(asked.ipiv)
    if ipiv is not None and not call.single:
        told = call.stage(ipiv, *all_of(ipiv), by_columns=True)

    def compute() -> Steps:
        if call.single:
            filled = [step for copy, x in zip(copies, given, strict=True) for step in copy.start_as(x)]
        else:
            filled = [
                (np.copyto, (copy.array, call.slab_array(slab)))
                for copy, slab in zip(copies, slabs, strict=True)
            ]
        if ipiv is not None:
            array = ipiv.local() if call.single else call.slab_array(told)
            filled.append((work.take_pivots, (array, asked.a[1])))
        handed_out = copies[-1].hand_out(to)
        if asked.routine in _IN_TRIANGLE and to.active:
            handed_out = within_triangle(call, to, handed_out)
        return [*filled, (work.run, ()), (work.unless_singular, (handed_out,))]

    return compute


def within_triangle(call: Preparation, to: SubMatrix, copies: Steps) -> Steps:
    """Return the steps that write all of this rank's part of D, and what makes it right outside the triangle.

    There a new D is zero, and another keeps its values. A diagonal of ones is outside.
    """
    local = to.local()
    part = Trapezoid.of_shape((to.rows.extent, to.rows.extent), call.asked.uplo, call.asked.diag)
    outside = part.rest.mask(to.rows.indices(to.row), to.cols.indices(to.col))
    if call.asked.new:
        return [*copies, (partial(np.copyto, where=outside), (local, local.dtype.type(0)))]
    kept: list[Array] = []
    return [
        (lambda: kept.append(local[outside]), ()),
        *copies,
        (lambda: local.__setitem__(outside, kept.pop()), ()),
    ]


class _Lapack:
    """Routines of LAPACK, one after the other until one finds a fault. Making one is local.

    Args:
        call: the call.
        a, b: copies of A, and of B if there is one; afterwards the last of them is the result.
    """

    def __init__(self, call: Preparation, a: Whole, b: Whole | None = None) -> None:
        self._asked, self._a, self._b, self._info = call.asked, a, b, ctypes.c_int(0)
        self._legal = True
        # gesv would exchange rows with pivots that are none; _fill does what laset stands for
        names = call.asked.routine.replace("gesv", "getrf getrs").replace("laset", "").split()
        m, n = a.array.shape
        self._made = "getrf" in names  # whether pivots are a result
        self._pivots = np.frombuffer(call.asked.pivots, np.int32)
        if self._made or call.asked.ipiv is not None:
            self._pivots = np.empty(min(m, n), np.int32)
        self._work = np.empty(_BLOCK * n if "getri" in names else 0, a.array.dtype)
        self._calls = [(name, call.function(name), self._arguments(name)) for name in names]

    def _arguments(self, name: str) -> list[Any]:
        """Return what a routine is called with."""
        asked, (m, n), info = self._asked, self._a.array.shape, ctypes.byref(self._info)
        uplo, op, diag = asked.uplo.encode(), asked.op_a.encode(), asked.diag.encode()
        a, size = (self._a.factor.at, integer[self._a.factor.ld]), integer[n]
        pivots = self._pivots.ctypes.data
        given: dict[str, tuple[Any, ...]] = {
            "getrf": (integer[m], size, *a, pivots),
            "getri": (size, *a, pivots, self._work.ctypes.data, integer[len(self._work)]),
            "potrf": (uplo, size, *a),
            "potri": (uplo, size, *a),
            "trtri": (uplo, diag, size, *a),
        }
        if self._b is not None:
            sizes = size, integer[self._b.array.shape[1]]
            b = self._b.factor.at, integer[self._b.factor.ld]
            given |= {
                "getrs": (op, *sizes, *a, pivots, *b),
                "potrs": (uplo, *sizes, *a, *b),
                "trtrs": (uplo, op, diag, *sizes, *a, *b),
            }
        return [*given[name], info]

    def take_pivots(self, ipiv: Array, first: int) -> None:
        """Take the pivots from all of IPIV; ``first`` is the row of the whole matrix, from 0, where A begins."""
        rows = ipiv[:, 0] - first
        alike = (ipiv == ipiv[:, :1]).all()
        self._legal = bool(alike and ((rows >= 1) & (rows <= len(rows))).all())
        if self._legal:
            self._pivots[...] = rows

    def run(self) -> None:
        """Compute, if the pivots are rows of A."""
        if not self._legal:
            self._info.value = -1
            return
        for name, function, arguments in self._calls:
            function(*arguments)
            found = self._info.value
            if name == "getrf":
                legal_pivots(self._pivots, len(self._a.array))
            if found and name == "potrf" and np.isnan(self._a.array[found - 1, found - 1]):
                self._a.array[...] = np.nan  # libraries differ in whether NaN is a fault
                self._info.value = 0
            if self._info.value:
                return
        if self._asked.routine in ("potrf potri", "trtri laset"):
            self._fill()

    def _fill(self) -> None:
        """Write what is outside the triangle of an inverse."""
        x, asked = self._a.array, self._asked
        inside = np.tri(len(x), dtype=bool)
        outside = ~inside if asked.uplo == "L" else ~inside.T
        np.copyto(x, x.conj().T if asked.routine == "potrf potri" else x.dtype.type(0), where=outside)
        if asked.diag == "U":
            np.fill_diagonal(x, 1)

    def unless_singular(self, steps: Steps) -> None:
        """Take steps, unless what they write has not been computed."""
        if not self._info.value or self._asked.routine == "getrf":
            for function, arguments in steps:
                function(*arguments)

    def outcome(self) -> Outcome:
        """Return what LAPACK said."""
        diagonal = self._a.array.diagonal().copy() if self._asked.routine == "gesv" else None
        return Outcome(self._info.value, self._pivots.copy() if self._made else None, diagonal)

    def checksum(self) -> int:
        """Return the checksum of the result and of its pivots."""
        found = zlib.crc32((self._b or self._a).array.T)  # the array is in Fortran order
        return zlib.crc32(self._pivots.data, found) if self._made else found
