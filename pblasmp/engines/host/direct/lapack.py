# SPDX-License-Identifier: Apache-2.0
"""Small factorisations and solves as direct calls: each rank computes all of it with LAPACK, on copies of its own.

That takes one meeting of the ranks, as ``tiny`` calls do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ...direct import Outcome
from ...direct.sub_matrix import SubMatrix, UnfitError, check_overlap
from .program import Preparation
from .slabs import Steps, integer
from .tiny import LARGEST, Whole, all_of

__all__ = ["computed_by_lapack"]

# Multiplications: larger calls are worth a plan, in which the ranks share the work.
_MOST = 1 << 22


def computed_by_lapack(call: Preparation) -> Callable[[], Steps]:
    """Prepare getrf, getrs, gesv, potrs or trtrs: D is A's factors, or the solution of op(A) X = B.

    A solution is not written if A is singular. All ranks of the context compute, since each needs INFO.

    Raises:
        UnfitError: the matrices are large, or D overlaps A or B in another way than by being the same elements.
    """
    asked = call.asked
    check_overlap(asked, asked.a if asked.b is None else asked.b)
    a, to = SubMatrix(asked.a), SubMatrix(asked.d)
    b = None if asked.b is None else SubMatrix(asked.b)
    m, n = a.rows.extent, a.cols.extent
    width = 0 if b is None else to.cols.extent
    if m * n * (min(m, n) + width) > _MOST or m * (n + width) > LARGEST:
        raise UnfitError
    copies = [Whole(call, a, by_columns=True)]
    if b is not None:
        copies.append(Whole(call, b, by_columns=True, start=copies[0].end))
    given = [a] if b is None else [a, b]
    slabs = [] if call.single else [call.stage(x, *all_of(x), by_columns=True) for x in given]
    work = _Lapack(call, m, n, *copies)
    call.outcome = work.outcome

    def compute() -> Steps:
        if call.single:
            filled = [step for copy, x in zip(copies, given, strict=True) for step in copy.start_as(x)]
        else:
            filled = [
                (np.copyto, (copy.array, call.slab_array(slab)))
                for copy, slab in zip(copies, slabs, strict=True)
            ]
        return [*filled, *work.steps(copies[-1].hand_out(to))]

    return compute


class _Lapack:
    """One routine of LAPACK. Making one is local.

    Args:
        call: the call.
        m, n: rows and columns of A.
        a, b: copies of A, which has the factors afterwards, and of B if there is one, which then has the solution.
    """

    def __init__(self, call: Preparation, m: int, n: int, a: Whole, b: Whole | None = None) -> None:
        asked, name = call.asked, call.asked.routine
        self._function = call.function(name)
        self._info, self._always = ctypes.c_int(0), name == "getrf"
        self._pivots = np.empty(min(m, n), np.int32) if name in ("getrf", "gesv") else None
        of_a, info = (a.factor.at, integer[a.factor.ld]), ctypes.byref(self._info)
        if b is None:
            self._arguments: tuple[Any, ...] = integer[m], integer[n], *of_a, self._pivots_at(), info
            return
        words = {"getrs": asked.op_a, "potrs": asked.uplo, "trtrs": asked.uplo + asked.op_a + asked.diag}
        given = tuple(letter.encode() for letter in words.get(name, ""))
        pivots: tuple[Any, ...] = ()
        if name in ("getrs", "gesv"):
            pivots = (asked.pivots if name == "getrs" else self._pivots_at(),)
        of_b, sizes = (b.factor.at, integer[b.factor.ld]), (integer[n], integer[b.array.shape[1]])
        self._arguments = *given, *sizes, *of_a, *pivots, *of_b, info

    def _pivots_at(self) -> int:
        assert self._pivots is not None
        return self._pivots.ctypes.data

    def steps(self, hand_out: Steps) -> Steps:
        """Return the steps that compute, and those that hand the result out."""
        if self._always:
            return [(self._function, self._arguments), *hand_out]

        def unless_singular() -> None:
            if not self._info.value:
                for function, arguments in hand_out:
                    function(*arguments)

        return [(self._function, self._arguments), (unless_singular, ())]

    def outcome(self) -> Outcome:
        """Return what LAPACK said."""
        return self._info.value, None if self._pivots is None else self._pivots.copy()
