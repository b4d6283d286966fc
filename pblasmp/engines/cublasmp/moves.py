# SPDX-License-Identifier: Apache-2.0
"""Moving a matrix from one layout to another on the GPUs: cublasMpGemr2D, or a copy where nothing crosses ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...comm import Communicator, Exchange, Side
from ...dtypes import is_float8
from ...layout import MatrixDescriptor
from ...layout.trapezoid import Trapezoid
from ..base import Move, Workspace
from ..exchange import ExchangeMove
from . import faults
from .call import PreparedCall, columns
from .parts import part_writer, write_all

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
    part: Trapezoid | None,
) -> Move:
    """Prepare a move between local arrays, of everything or of ``part``. Collective over the context."""
    alike = source.dtype == target.dtype or not (is_float8(source.dtype) or is_float8(target.dtype))
    if (source.same_places(target) and alike) or 0 in source.shape:
        return _Copy(part_writer(part, target, comm.rank))
    why = faults.moves_through_host(engine.version, source.dtype)
    if why:
        return _ThroughHost(engine, comm, source, target, part, why)
    return _Gemr2D(engine, comm, source, target, arrays, part)


class _Copy:
    """Every element stays on its rank: its memory order or its type changes."""

    workspace = Workspace(0, 0)
    path = "by a local copy"
    sent_bytes = copied_bytes = 0

    def __init__(self, write: Callable[[Array, Array], None]) -> None:
        self._write = write

    def run(self, source: Array, target: Array) -> None:
        """Queue the copy on CuPy's current stream. Local."""
        self._write(target, source)

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
        part: Trapezoid | None,
        why: str,
    ) -> None:
        super().__init__(comm, source, target, part)
        self._engine, self._types = engine, (source.dtype, target.dtype)
        self.path = f"through the host: {why}"

    def run(self, source: Array, target: Array) -> None:
        """Move everything. Collective over the context."""
        on_host = self._engine.to_host(target).view(self._types[1])
        super().run(self._engine.to_host(source).view(self._types[0]), on_host)
        self._engine.from_host(target, on_host)


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
        part: Trapezoid | None,
    ) -> None:
        self._order = target.order
        self._converted = source.order != target.order or source.dtype != target.dtype
        self._sides = Side.of(source), Side.of(target), comm, source.dtype
        source = replace(source, order=target.order, dtype=target.dtype, ld=None)
        self._source, self._target = (source, target) if target.order == "F" else (source.T, target.T)
        self._part = part.T if part is not None and target.order == "C" else part
        self._write = part_writer(self._part, self._target, comm.rank)
        self._ranks = max(source.grid.size, target.grid.size)
        for grid in (self._source.grid, self._target.grid):
            engine.grid(grid)
        self._communicator = engine.communicator(self._ranks)
        super().__init__(engine, "Gemr2D", self._target.grid, arrays, inside=engine.rank < self._ranks)
        self._prepare()
        self.copied_bytes = sum(temporary.nbytes for temporary in self._temporaries.values())

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
        return self._misfit(0, source)

    def _bind(self, source: Array, target: Array) -> None:
        """Point the call at the local arrays, or at temporaries in their place."""
        self._before, self._after = [], []
        a, b = columns(source, self._order), columns(target, self._order)
        if self._converted or not self._fits(a, self._source):
            of, a = a, self._temporary("source", self._source)
            self._before.append(lambda: write_all(a, of))
        if self._part is not None or not self._fits(b, self._target):
            to, b = b, self._temporary("target", self._target)
            self._after.append(lambda: self._write(to, b))
        self._arrays = a, b
        self._point("a", a, self._source)
        self._point("b", b, self._target)

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
