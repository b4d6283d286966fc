# SPDX-License-Identifier: Apache-2.0
"""What factorisations by other libraries have in common: matrices are moved to layouts that these take, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...layout import MatrixDescriptor, Trapezoid
from ...layout.factor_problem import FactorProblem
from ..arrays import new_part, same_memory
from ..factor import FactorProduct
from ..protocol import Engine
from ..request import Operands
from .extremes import largest, scaling

__all__ = ["LibraryProduct", "is_in"]

Array = Any


class LibraryProduct(FactorProduct):
    """A factorisation by another library. Making and running one is collective over the context.

    Args:
        engine: where.
        problem: what is computed.
    """

    _a: MatrixDescriptor  # the layout in which A and its factors are computed

    def __init__(self, engine: Engine, problem: FactorProblem) -> None:
        self._engine, self._problem = engine, problem

    def _move(
        self,
        source: MatrixDescriptor,
        array: Array,
        target: MatrixDescriptor,
        out: Array,
        part: Trapezoid | None = None,
    ) -> None:
        move = self._engine.prepare_move(source, target, (array, out), part)
        try:
            move.run(Operands(array, None, None, out))
        finally:
            move.close()

    def _read(
        self, x: MatrixDescriptor, array: Array, *, part: Trapezoid | None = None, conjugate: bool = False
    ) -> Array:
        """Return A's factors, which are only read, in the layout that is computed in. Collective."""
        if is_in(x, self._a) and not conjugate:
            return array
        return self._copied(x, array, self._a, part=part, conjugate=conjugate)

    def _copied(
        self,
        x: MatrixDescriptor,
        array: Array,
        work: MatrixDescriptor,
        out: tuple[MatrixDescriptor | None, Array] = (None, None),
        *others: Array,
        part: Trapezoid | None = None,
        conjugate: bool = False,
    ) -> Array:
        """Return a copy of a matrix in the layout ``work``, whose rows beyond the matrix's are not set. Collective.

        Args:
            x, array: the matrix.
            work: the layout.
            out: the layout and array of a result: the copy is there if its layout is ``work``.
            others: arrays that are still read when the copy is overwritten; None for those that are absent.
            part: only this part is needed; the rest is 0, or what the result has.
            conjugate: copy the conjugate, not to the result.
        """
        layout, place = out
        fits, same = layout is not None and is_in(layout, work) and not conjugate, False
        if fits:
            overlap = self._engine.overlap
            mine = place.size == 0 or same_memory(array, place)
            free = (mine or not overlap(array, place)) and not any(
                x is not None and overlap(x, place) for x in others
            )
            everywhere = self._engine.transport.comm.allgather((mine, free))
            same, fits = all(each for each, _ in everywhere), all(each for _, each in everywhere)
        if not fits:
            place = new_part(self._engine, work)
            if part is not None:
                place[...] = 0
        elif same and x.same_places(work):
            return place
        self._move(x, array, work[: x.shape[0], :], place[: self._rows(work, x.shape[0])], part)
        if conjugate:
            self._conjugated(place)
        return place

    def _rows(self, work: MatrixDescriptor, count: int) -> int:
        """Return how many of this rank's rows are among the first ``count`` rows. Local."""
        rank = self._engine.transport.rank
        return int(np.searchsorted(work.global_indices(rank)[0], count)) if rank < work.grid.size else 0

    def _back(
        self,
        work: MatrixDescriptor,
        array: Array,
        x: MatrixDescriptor,
        out: Array,
        part: Trapezoid | None = None,
    ) -> None:
        """Move as many rows as a matrix has to it, if they are not there. Collective."""
        if array is not out:
            count = x.shape[0]
            self._move(work[:count, :], array[: self._rows(work, count)], x, out, part)

    @property
    def _conjugate(self) -> bool:
        p = self._problem
        return p.conjugate and p.a.dtype.kind == "c" and p.routine != "qr"  # there it is of B

    def _conjugated(self, array: Array) -> None:
        """Replace an array by its conjugate. Local."""
        if array.size:
            self._engine.xp.conjugate(array, out=array)

    def _scale(self, array: Array, *, always: bool = False) -> tuple[float, int]:
        """Scale a matrix by a power of two if squares of its elements over- or underflow. Collective.

        Args:
            array: this rank's part.
            always: scale it in any case, to elements of about 1.

        Returns:
            The size of its largest element, and the exponent.
        """
        everyones = self._engine.transport.comm.allgather(largest(self._engine.xp, [array]))
        size = float(np.max(everyones))
        exponent = scaling(size, array.dtype, root=True, always=always)
        self._engine.operations.scale_by_power(array, exponent)
        return size, exponent


def is_in(x: MatrixDescriptor, work: MatrixDescriptor) -> bool:
    """Return whether a matrix's local arrays are what the layout ``work`` has. Local."""
    return x.order == "F" and x.same_places(work)
