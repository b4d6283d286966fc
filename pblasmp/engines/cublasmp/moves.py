# SPDX-License-Identifier: Apache-2.0
"""Moving a matrix from one layout to another on the GPUs: cublasMpGemr2D, or a copy where nothing crosses ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...comm import Communicator, Exchange, Side
from ...layout import MatrixDescriptor
from ..base import Move, Workspace
from ..exchange import ExchangeMove
from . import faults
from .call import PreparedCall, columns

if TYPE_CHECKING:
    from .engine import CublasmpEngine

__all__ = ["prepare_move"]

Array = Any


def prepare_move(
    engine: CublasmpEngine,
    comm: Communicator,
    source: MatrixDescriptor,
    target: MatrixDescriptor,
    arrays: tuple[Array, Array],
) -> Move:
    """Prepare a move between local arrays. Collective over the context."""
    if source.same_places(target) or 0 in source.shape:
        return _Copy(source)
    why = faults.moves_through_host(engine.version, source, target)
    if why:
        return _ThroughHost(engine, comm, source, target, why)
    return _Gemr2D(engine, comm, source, target, arrays)


class _Copy:
    """Every element stays on its rank: its memory order or its type changes."""

    workspace = Workspace(0, 0)
    path = "by a local copy"
    sent_bytes = 0

    def __init__(self, source: MatrixDescriptor) -> None:
        self._source = source
        self.copied_bytes = 0

    def run(self, source: Array, target: Array) -> None:
        """Queue the copy on CuPy's current stream. Local."""
        if source.size:
            target[...] = source

    def misfit(self, source: Array) -> str:  # noqa: ARG002
        """Any array of the planned layout will do."""
        return ""

    def close(self) -> None:
        """Nothing is held."""


class _ThroughHost(ExchangeMove):
    """A move through MPI, by way of the host's memory."""

    def __init__(
        self,
        engine: CublasmpEngine,
        comm: Communicator,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        why: str,
    ) -> None:
        super().__init__(comm, source, target)
        self._engine, self._order = engine, target.order
        self.path = f"through the host: {why}"

    def run(self, source: Array, target: Array) -> None:
        """Move everything. Collective over the context."""
        arrived = np.empty(target.shape, target.dtype, order=self._order)
        super().run(self._engine.to_host(source), arrived)
        self._engine.from_host(target, arrived)


class _Gemr2D(PreparedCall):
    """A move by cublasMpGemr2D, between matrices of one type and one memory order.

    A source of another type or memory order goes through a temporary. Offsets inside a block are offsets of the call.
    """

    _listens = False  # there is one way

    def __init__(
        self,
        engine: CublasmpEngine,
        comm: Communicator,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[Array, Array],
    ) -> None:
        self._order = target.order
        self._converted = source.order != target.order or source.dtype != target.dtype
        self._sides = Side.of(source), Side.of(target), comm, source.dtype
        source = replace(source, order=target.order, dtype=target.dtype, ld=None)
        self._source, self._target = (source, target) if target.order == "F" else (source.T, target.T)
        self._ranks = max(source.grid.size, target.grid.size)
        for grid in (self._source.grid, self._target.grid):
            engine.grid(grid)
        self._communicator = engine.communicator(self._ranks)
        super().__init__(engine, "Gemr2D", self._target.grid, arrays, inside=engine.rank < self._ranks)
        self._planned = arrays[0].strides
        self._prepare()

    @property
    def path(self) -> str:
        """How the matrix is moved, on this rank."""
        return "by cublasMpGemr2D" + (", through a temporary" if self._temporaries else "")

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that this rank holds and others need."""
        source, target, comm, dtype = self._sides
        return Exchange(comm, source, target, dtype).sent_bytes

    def run(self, source: Array, target: Array) -> None:
        """Queue the move on CuPy's current stream. Collective over the context."""
        self._run(source, target)

    def misfit(self, source: Array) -> str:
        """Return why ``source`` cannot take the place of the planned array, or an empty string."""
        if source.strides == self._planned:
            return ""
        return f"the local array has strides {source.strides}, the plan is for {self._planned}"

    def _bind(self, source: Array, target: Array) -> None:
        """Point the call at the local arrays, or at temporaries in their place."""
        self._before, self._after = [], []
        a, b = columns(source, self._order), columns(target, self._order)
        if self._converted or not self._fits(a, self._source):
            of, a = a, self._temporary("source", self._source)
            self._before.append(lambda: _assign(a, of))
        if not self._fits(b, self._target):
            to, b = b, self._temporary("target", self._target)
            self._after.append(lambda: _assign(to, b))
        self._arrays = a, b
        self._point("a", a, self._source)
        self._point("b", b, self._target)

    def _temporary(self, name: str, x: MatrixDescriptor) -> Array:
        """Return an F-ordered array for this rank's part of ``x``."""
        if name not in self._temporaries:
            inside = self._engine.rank < x.grid.size
            shape = x.local_shape(self._engine.rank) if inside else (0, 0)
            new = self._engine.empty(shape, x.dtype, "F", self._height(x))
            self._temporaries[name] = new
            self.copied_bytes += new.nbytes
        return self._temporaries[name]

    def _told(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arguments of cublasMpGemr2D."""
        sides = (self._source, self._target)
        a, b = (
            self._descriptor(x, self._lld(array, x)) for x, array in zip(sides, self._arrays, strict=True)
        )
        (ia, ja), (ib, jb) = ((x.lead[0] + 1, x.lead[1] + 1) for x in sides)
        p = self._pointers
        arguments = self._engine.handle, *self._source.shape, p["a"], ia, ja, a, p["b"], ib, jb, b
        return arguments, (self._communicator,)


def _assign(to: Array, of: Array) -> None:
    if to.size:
        to[...] = of
