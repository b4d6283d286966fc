# SPDX-License-Identifier: Apache-2.0
"""Moving a matrix between layouts on GPUs: by copy engines, cublasMpGemr2D or NCCL, or a copy on each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ....comm import Side
from ....dtypes import is_float8
from ....layout import MatrixDescriptor
from ....layout.trapezoid import Trapezoid
from ...arrays import new_part
from ...moving.exchange_move import ExchangeMove
from ...protocol import Engine, Move, Workspace
from ...request import Operands
from ..kernels.float8 import convert
from ..runtime.session import Session
from . import faults
from .call import PreparedCall, columns
from .masked_copy import part_writer, write_all

__all__ = ["prepare_move"]

Array = Any


def prepare_move(
    engine: Engine,
    session: Session,
    source: MatrixDescriptor,
    target: MatrixDescriptor,
    arrays: tuple[Array, Array],
    part: Trapezoid | None,
) -> Move:
    """Prepare a move between local arrays, of everything or of ``part``. Collective over the context."""
    float8 = is_float8(source.dtype) or is_float8(target.dtype)
    alike = source.dtype == target.dtype or not float8
    if 0 in source.shape or (alike and source.same_places(target)):
        return _Copy(part_writer(part, target, session.rank))
    if not alike:
        return _Converted(engine, session, source, target, arrays, part)
    if copies(session):
        return ExchangeMove(engine, source, target, part, "by copy engines")
    if faults.moves_unseen(session.version, source.dtype):
        return ExchangeMove(engine, source, target, part, "by NCCL")
    return _Gemr2D(engine, session, source, target, arrays, part)


def copies(session: Session) -> bool:
    """Return whether GPUs push blocks into each other's memory: faster than cublasMpGemr2D. Local."""
    return session.gpu is not None and session.gpu.windows is not None


class _Copy:
    """A move in which every element stays on its rank: only memory order or type change."""

    workspace = Workspace(0, 0)
    path = "by a local copy"
    sent_bytes = copied_bytes = 0

    def __init__(self, write: Callable[[Array, Array], None]) -> None:
        self._write = write

    def run(self, source: Array, target: Array) -> None:
        """Queue the copy on CuPy's current stream. Local."""
        self._write(target, source)

    def misfit(self, source: Array) -> str:  # noqa: ARG002
        """Return an empty string: any array of the planned layout will do."""
        return ""

    def close(self) -> None:
        """Do nothing: nothing is held."""


class _Converted:
    """A move that converts 8-bit floats. No library and none of our kernels converts them on the way: bytes travel.

    Elements are converted before they travel if they become 8-bit floats, otherwise after they have arrived.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[Array, Array],
        part: Trapezoid | None,
    ) -> None:
        self._xp, self._of, self._to = engine.xp, source.dtype, target.dtype
        self._late = not is_float8(target.dtype)
        between = (
            replace(target, dtype=source.dtype, ld=None)
            if self._late
            else replace(source, dtype=target.dtype, ld=None)
        )
        self._between = new_part(engine, between)
        moved = arrays[0] if self._late else self._between, self._between if self._late else arrays[1]
        layouts = (source, between) if self._late else (between, target)
        self._move = prepare_move(engine, session, *layouts, moved, part)
        self._write = part_writer(part, target, session.rank)
        self.path = f"{self._move.path}, converting 8-bit floats"
        more, needs = self._between.nbytes, self._move.workspace
        self.workspace = Workspace(needs.device_bytes + more, needs.host_bytes)
        self.sent_bytes, self.copied_bytes = self._move.sent_bytes, self._move.copied_bytes + more

    def run(self, source: Array, target: Array) -> None:
        """Queue the move of everything, or of the part. Collective over the context."""
        between = self._between
        if self._late:
            self._move.run(source, between)
            if target.size:
                self._write(target, convert(self._xp, between, self._of, self._to))
        else:
            if source.size:
                between[...] = convert(self._xp, source, self._of, self._to)
            self._move.run(between, target)

    def misfit(self, source: Array) -> str:
        """Return why ``source`` cannot take the place of the planned array, or an empty string. Local."""
        return self._move.misfit(source) if self._late else ""

    def close(self) -> None:
        """Free what only this move holds. Collective over the context."""
        self._move.close()


class _Gemr2D(PreparedCall):
    """A move by cublasMpGemr2D, between matrices of one type and one memory order.

    A source of another type or memory order goes through a temporary. Offsets inside a block are passed in the call.
    """

    _listens = False  # there is only one algorithm

    def __init__(
        self,
        engine: Engine,
        session: Session,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[Array, Array],
        part: Trapezoid | None,
    ) -> None:
        self._order = target.order
        self._converted = source.order != target.order or source.dtype != target.dtype
        self._exchange = engine.transport.exchange(Side.of(source), Side.of(target), source.dtype)
        source = replace(source, order=target.order, dtype=target.dtype, ld=None)
        self._source, self._target = (source, target) if target.order == "F" else (source.T, target.T)
        self._part = part.T if part is not None and target.order == "C" else part
        self._write = part_writer(self._part, self._target, session.rank)
        self._ranks = max(source.grid.size, target.grid.size)
        for grid in (self._source.grid, self._target.grid):
            session.grid(grid)
        self._communicator = session.communicator(self._ranks)
        operands = Operands(arrays[0], None, None, arrays[1])
        inside = session.rank < self._ranks
        super().__init__(session, "Gemr2D", self._target.grid, operands, inside=inside)
        self._prepare()
        self.copied_bytes = sum(temporary.nbytes for temporary in self._temporaries.values())

    @property
    def path(self) -> str:  # type: ignore[override]
        """How the matrix is moved, on this rank."""
        return "by cublasMpGemr2D" + (", through a temporary" if self._temporaries else "")

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """Bytes that this rank holds and other ranks need."""
        return self._exchange.sent_bytes

    def run(self, source: Array, target: Array) -> None:  # type: ignore[override]
        """Queue the move on CuPy's current stream. Collective over the context."""
        super().run(Operands(source, None, None, target))

    def misfit(self, source: Array) -> str:  # type: ignore[override]
        """Return why ``source`` cannot take the place of the planned array, or an empty string."""
        return super().misfit("a", source)

    def _bind(self, operands: Operands) -> None:
        """Point the call at the local arrays, or at temporaries for them."""
        source, target = operands.a, operands.d
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

    def _arguments_of_call(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arguments of cublasMpGemr2D."""
        sides = (self._source, self._target)
        a, b = (
            self._descriptor(x, self._lld(array, x)) for x, array in zip(sides, self._arrays, strict=True)
        )
        (ia, ja), (ib, jb) = ((x.lead[0] + 1, x.lead[1] + 1) for x in sides)
        p = self._pointers
        arguments = self._session.handle, *self._source.shape, p["a"], ia, ja, a, p["b"], ib, jb, b
        return arguments, (self._communicator,)
