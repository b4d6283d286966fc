# SPDX-License-Identifier: Apache-2.0
"""Moving a matrix between layouts on GPUs: by copy engines, cublasMpGemr2D or NCCL, or a copy on each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ....comm import Side
from ....dtypes import is_float8
from ....layout import MatrixDescriptor
from ....layout.intersection import Piece, Stretch
from ....layout.pieces import Trapezoid
from ...arrays import new_part
from ...composite import Composite, ExchangeMove, QueuedProduct
from ...product import Product
from ...protocol import Engine
from ...request import Operands
from ..kernels.views import convert
from ..session import Session
from . import faults
from .library import Cublasmp
from .prepared_call import PreparedCall, columns, part_mask, write_part

if TYPE_CHECKING:
    from ..gpu_transport import GpuTransport

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
    if copies(session):
        return ExchangeMove(engine, source, target, part, "by copy engines")
    library = session.cublasmp
    if library.why_no_memory or faults.moves_unseen(library.version, source.dtype):
        return ExchangeMove(engine, source, target, part, "by NCCL")
    return Gemr2D(engine, library, source, target, arrays, part)


def stays(source: MatrixDescriptor, target: MatrixDescriptor) -> bool:
    """Return whether every element is on its rank already, as on one process whatever the blocks are. Local."""
    return source.same_places(target)


def copies(session: Session) -> bool:
    """Return whether GPUs push blocks into each other's memory: faster than cublasMpGemr2D. Local."""
    return not session.gpu.why_no_windows


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


class Gemr2D(PreparedCall):
    """A move by cublasMpGemr2D, between matrices of one type and one memory order.

    A source of another type or memory order goes through a temporary. Offsets inside a block are passed in the call.
    """

    _listens = False  # there is only one algorithm

    def __init__(
        self,
        engine: Engine,
        library: Cublasmp,
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
        part = part.T if part is not None and target.order == "C" else part
        self._in_part, self._mask = part is not None, part_mask(part, self._target, library.runtime.rank)
        self._ranks = max(source.grid.size, target.grid.size)
        for grid in (self._source.grid, self._target.grid):
            library.grid(grid)
        self._communicator = library.communicator(self._ranks)
        operands = Operands(arrays[0], None, None, arrays[1])
        inside = library.runtime.rank < self._ranks
        super().__init__(library, "Gemr2D", self._target.grid, operands, inside=inside)
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

    def why_no_graph(self) -> str:
        """Return that it cannot be recorded: cuBLASMp 0.10 does what CUDA forbids while a stream is captured. Local."""
        return "cublasMpGemr2D cannot be recorded"

    def _point_at(self, operands: Operands) -> None:
        """Point the call at the local arrays, or at temporaries for them."""
        source, target = operands.a, operands.d
        self._before, self._after = [], []
        a, b = columns(source, self._order), columns(target, self._order)
        if self._converted or not self._fits(a, self._source):
            of, a = a, self._temporary("source", self._source)
            self._before.append(lambda: write_part(a, of))
        if self._in_part or not self._fits(b, self._target):
            to, b = b, self._temporary("target", self._target)
            self._after.append(lambda: write_part(to, b, self._mask))
        self._arrays: tuple[Array, Array] = a, b
        self._point("a", a, self._source)
        self._point("b", b, self._target)

    def _forget(self) -> None:
        super()._forget()
        self._arrays = None, None

    def _arguments_of_call(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arguments of cublasMpGemr2D."""
        sides = (self._source, self._target)
        a, b = (
            self._descriptor(x, self._lld(array, x)) for x, array in zip(sides, self._arrays, strict=True)
        )
        (ia, ja), (ib, jb) = ((x.lead[0] + 1, x.lead[1] + 1) for x in sides)
        p = self._pointers
        arguments = self._library.handle, *self._source.shape, p["a"], ia, ja, a, p["b"], ib, jb, b
        return arguments, (self._communicator,)
