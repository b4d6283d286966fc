# SPDX-License-Identifier: Apache-2.0
"""Moving a matrix between layouts on GPUs: by copy engines, by NCCL, or by a copy on each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ...dtypes import is_float8
from ...layout import MatrixDescriptor
from ...layout.intersection import Piece, Stretch
from ...layout.pieces import Trapezoid
from ..arrays import new_part
from ..composite import Composite, ExchangeMove, QueuedProduct
from ..product import Product
from ..protocol import Engine
from ..request import Operands
from .cublasmp.prepared_call import part_mask, write_part
from .kernels.views import convert
from .session import Session

if TYPE_CHECKING:
    from .gpu_transport import GpuTransport

Array = Any


def prepare_move(
    engine: Engine,
    session: Session,
    source: MatrixDescriptor,
    target: MatrixDescriptor,
    arrays: tuple[Array, Array],
    part: Trapezoid | None,
) -> Product:
    """Prepare a move of ``a`` to ``d``, of everything or of ``part``. Collective over the context."""
    float8 = is_float8(source.dtype) or is_float8(target.dtype)
    alike = source.dtype == target.dtype or not float8
    if 0 in source.shape or (alike and stays(source, target)):
        return _Copy(engine, part_mask(part, target, session.runtime.rank))
    if not alike:
        return _Converted(engine, session, source, target, arrays, part)
    way = "by NCCL" if session.gpu.why_no_windows else "by copy engines"
    return ExchangeMove(engine, source, target, part, way)


def stays(source: MatrixDescriptor, target: MatrixDescriptor) -> bool:
    """Return whether every element is on its rank already, as on one process whatever the blocks are. Local."""
    return source.same_places(target)


class _Copy(QueuedProduct):
    """A move in which every element stays on its rank: only memory order or type change."""

    path = "by a local copy"

    def __init__(self, engine: Engine, mask: Array | None) -> None:
        self._engine, self._mask = engine, mask

    def _queue(self, operands: Operands) -> None:
        to, of = operands.d, operands.a
        if self._mask is None and to.size:
            rows, cols = (Stretch(1, extent, 0, 0, 0, 0) for extent in to.shape)
            transport = cast("GpuTransport", self._engine.transport)
            transport.copy_piece(to, of, Piece((rows,), (cols,)))
        else:
            write_part(to, of, self._mask)


class _Converted(Composite):
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
        self._session, self._source, self._target, self._part = session, source, target, part
        self._late = not is_float8(target.dtype)
        self._mask = part_mask(part, target, session.runtime.rank)
        super().__init__(engine, Operands(arrays[0], None, None, arrays[1]))
        self.path = f"{self._products[0].path}, converting 8-bit floats"
        self.copied_bytes += self._own["between"].nbytes

    def _add_steps(self, operands: Operands) -> None:
        engine, source, target = self._engine, self._source, self._target
        like, other = (target, source) if self._late else (source, target)
        layout = replace(like, dtype=other.dtype, ld=None)
        between = self._own["between"] = new_part(engine, layout)
        arrays, layouts = ((operands.a, between), (source, layout)) if self._late else (
            (between, operands.d), (layout, target)
        )  # fmt: skip
        move = prepare_move(engine, self._session, *layouts, arrays, self._part)
        if self._late:
            self._add(move, lambda given: Operands(given.a, None, None, self._own["between"]))
            self._then(self._from_bytes)
        else:
            self._then(self._to_bytes)
            self._add(move, lambda given: Operands(self._own["between"], None, None, given.d))

    def _from_bytes(self, operands: Operands) -> None:
        if operands.d.size:
            values = convert(self._engine.xp, self._own["between"], self._source.dtype, self._target.dtype)
            write_part(operands.d, values, self._mask)

    def _to_bytes(self, operands: Operands) -> None:
        if operands.a.size:
            self._own["between"][...] = convert(
                self._engine.xp, operands.a, self._source.dtype, self._target.dtype
            )

    @property
    def queues(self) -> bool:
        """False: converting allocates."""
        return False

    def misfit(self, name: str, array: Array) -> str:
        """Return why ``array`` cannot replace the planned operand, or an empty string. Local."""
        return self._products[0].misfit(name, array) if self._late else ""
