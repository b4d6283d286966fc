# SPDX-License-Identifier: Apache-2.0
"""A product whose operands are first moved to other layouts, and whose result is moved back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ...errors import UnsupportedError
from ...layout import Level3Problem, MatmulProblem
from ..arrays import new_part
from ..product import Product
from ..protocol import Engine, Move, Workspace
from ..request import Operands, Options

__all__ = ["MovedProduct"]

Array = Any
Legal = MatmulProblem | Level3Problem


class MovedProduct(Product):
    """A product of operands copied to other layouts. Making, running and closing one is collective over the context.

    Args:
        engine: the engine that moves them.
        asked: the caller's problem.
        nearest: the problem in the layouts that operands are moved to.
        options: says which operands are read.
        operands: the caller's arrays.
        prepare: prepares ``nearest`` for given operands.
        reasons: why they are moved.
    """

    holds_memory = True

    def __init__(
        self,
        engine: Engine,
        asked: Legal,
        nearest: Legal,
        options: Options,
        operands: Operands,
        prepare: Callable[[Operands], Product],
        reasons: tuple[str, ...] = (),
    ) -> None:
        self._reasons = reasons
        given = {name: getattr(operands, name) for name in "abcd"}
        self._copies: dict[str, Array] = {}
        self._in: dict[str, Move] = {}
        self._out: Move | None = None
        read = _read(nearest, options, operands)
        with ExitStack() as closing:
            for name in "abcd":
                old, new = getattr(asked, name), getattr(nearest, name)
                if new is None or old == new:
                    continue
                copy = self._copies[name] = new_part(engine, new)
                if name in read:
                    self._in[name] = engine.prepare_move(old, new, (given[name], copy))
                    closing.callback(self._in[name].close)
                    self.moved += (f"{name} is moved to {new}, {self._in[name].path}",)
                if name == "d":
                    self._out = engine.prepare_move(new, old, (copy, given[name]))
                    closing.callback(self._out.close)
                    self.moved += (f"d is moved back after the computation as {new}, {self._out.path}",)
            self._product = prepare(self._used(operands))
            closing.callback(self._product.close)
            self._closing = closing.pop_all()
        self._moves = [*self._in.values(), *([] if self._out is None else [self._out])]
        needs = [self._product.workspace, *(move.workspace for move in self._moves)]
        self.workspace = Workspace(
            max(each.device_bytes for each in needs), max(each.host_bytes for each in needs)
        )
        self.copied_bytes = self._product.copied_bytes + sum(move.copied_bytes for move in self._moves)

    @property
    def path(self) -> str:  # type: ignore[override]
        """The path of the product."""
        return self._product.path

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Why operands are moved, and the notes of the product."""
        return self._reasons + self._product.notes

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """The bytes of the product and of the moves."""
        return self._product.sent_bytes + sum(move.sent_bytes for move in self._moves)

    def _used(self, operands: Operands) -> Operands:
        """Return the operands of the product: copies replace those that are moved."""
        return replace(operands, **self._copies)

    def run(self, operands: Operands) -> None:
        """Move the operands, compute, and move the result back. Collective over the context."""
        for name, move in self._in.items():
            move.run(getattr(operands, name), self._copies[name])
        self._product.run(self._used(operands))
        if self._out is not None:
            self._out.run(self._copies["d"], operands.d)

    def capture(self, operands: Operands) -> Callable[[], None]:  # noqa: ARG002
        """Refuse: moves allocate memory and agree while they run."""
        raise UnsupportedError("a CUDA graph: this plan moves operands first, which cannot be recorded")

    def misfit(self, name: str, array: Array) -> str:
        """Return why ``array`` cannot replace the planned operand ``name``, or an empty string. Local."""
        return self._in[name].misfit(array) if name in self._in else self._product.misfit(name, array)

    def close(self) -> None:
        """Free what the moves and the product hold. Collective over the context."""
        self._copies.clear()
        self._closing.close()


def _read(problem: Legal, options: Options, operands: Operands) -> set[str]:
    """Return the operands whose values are read."""
    e = operands.epilogue
    sums = e is not None and {"bias_grad_a", "bias_grad_b"} & {*e.given}
    read = {"a", "b"} if options.alpha != 0 or sums else set()
    if options.beta != 0:
        read.add("c")
    if isinstance(problem, Level3Problem) and problem.written is not None:
        read.add("d")  # elements that are not written are moved back unchanged
    return read
