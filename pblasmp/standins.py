# SPDX-License-Identifier: Apache-2.0
"""StandIns: matrices that lie as the engine wants them, in the place of a plan's operands that do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .engines.base import Move, Workspace
from .matrix import DistributedMatrix

if TYPE_CHECKING:
    from .engines.base import Engine

__all__ = ["StandIns"]

Matrices = Mapping[str, DistributedMatrix | None]


class StandIns:
    """What a plan computes with instead of some of its matrices, and the moves to and fro.

    Collective over the context: making and closing one, and the moves.

    Args:
        engine: what moves them.
        matrices: the plan's own matrices by name; "d" is the result.
        replaced: by name, what stands in.
        read: names of those whose values are moved in before a run; "d" is always moved back after it.

    Attributes:
        workspace: what the moves need on this rank.
        sent_bytes, copied_bytes: what this rank sends and copies in the moves of one run.
    """

    def __init__(
        self,
        engine: Engine,
        matrices: Matrices,
        replaced: Mapping[str, DistributedMatrix],
        read: Collection[str],
    ) -> None:
        self._replaced = dict(replaced)
        self._in: dict[str, Move] = {}
        self._out: Move | None = None
        with ExitStack() as closing:
            for name, new in self._replaced.items():
                own = matrices[name]
                assert own is not None
                if name in read:
                    self._in[name] = _prepared(engine, own, new, closing)
                if name == "d":
                    self._out = _prepared(engine, new, own, closing)
            self._closing = closing.pop_all()
        moves = [*self._in.values(), *filter(None, [self._out])]
        self.workspace = Workspace(
            max((move.workspace.device_bytes for move in moves), default=0),
            max((move.workspace.host_bytes for move in moves), default=0),
        )
        self.sent_bytes = sum(move.sent_bytes for move in moves)
        self.copied_bytes = sum(move.copied_bytes for move in moves)

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def __contains__(self, name: str) -> bool:
        return name in self._replaced

    def used(self, matrices: Matrices) -> dict[str, Any]:
        """Return by name the local arrays that the engine works on. Local."""
        return {
            name: None if (x := self._replaced.get(name, own)) is None else x.local
            for name, own in matrices.items()
        }

    def misfit(self, name: str, x: DistributedMatrix) -> str:
        """Return why ``x`` cannot take the place of the matrix that is moved, or an empty string. Local."""
        return self._in[name].misfit(x.local) if name in self._in else ""

    def move_in(self, matrices: Matrices) -> None:
        """Write what is read into what stands in for it. Collective over the context."""
        for name, move in self._in.items():
            source = matrices[name]
            assert source is not None
            move.run(source.local, self._replaced[name].local)

    def move_out(self, matrices: Matrices) -> None:
        """Write the result to where it belongs. Collective over the context."""
        out = matrices["d"]
        if self._out is not None:
            assert out is not None
            self._out.run(self._replaced["d"].local, out.local)

    def told(self) -> tuple[str, ...]:
        """Return what a report says of each. Local."""
        lines = []
        for name, new in self._replaced.items():
            if name in self._in:
                lines.append(f"{name} is moved to {new.descriptor}, {self._in[name].path}")
            if name == "d" and self._out is not None:
                lines.append(f"d is moved back after the computation as {new.descriptor}, {self._out.path}")
        return tuple(lines)

    def close(self) -> None:
        """Give back what only the moves hold. Collective over the context."""
        self._replaced.clear()
        self._closing.close()


def _prepared(
    engine: Engine, source: DistributedMatrix, target: DistributedMatrix, closing: ExitStack
) -> Move:
    move = engine.prepare_move(source.descriptor, target.descriptor, (source.local, target.local))
    closing.callback(move.close)
    return move
