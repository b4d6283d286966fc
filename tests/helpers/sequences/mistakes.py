# SPDX-License-Identifier: Apache-2.0
"""Steps with a mistake, on all ranks or on one: every rank raises the same error, and everything is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis.strategies import sampled_from

import pblasmp as pb

from .state import Held, SkipStep, State, WrongError, expect, matrices, ranks, step

Mistake = Callable[[State, Held], Any]
ERRORS = (pb.PblasmpError, OSError, ValueError, TypeError, MemoryError)


def _complex_into_real(s: State, x: Held) -> None:
    if x.whole.dtype.kind == "c" or not x.arithmetic:
        raise SkipStep
    x.matrix *= 1j  # type: ignore[misc]


EVERYWHERE: dict[str, Mistake] = {
    "shapes": lambda s, x: pb.matmul(x.matrix, x.matrix.T[1:, :]),
    "no such algorithm": lambda s, x: pb.matmul(x.matrix, x.matrix, op_b="T", algo="fastest"),
    "no such root": lambda s, x: x.matrix.gather(s.ctx.size),
    "no such file": lambda s, x: s.ctx.load(s.directory / "missing.npy"),
    "no such folder": lambda s, x: x.matrix.save(s.directory / "missing" / "a.npy"),
    "itself": lambda s, x: x.matrix.redistribute(out=x.matrix),
    "other shape": lambda s, x: x.matrix.redistribute(
        pb.MatrixDescriptor((x.whole.shape[0] + 1, 3), (2, 2), pb.Grid(1, 1), dtype=x.whole.dtype)
    ),
    "grid too large": lambda s, x: s.ctx.zeros((4, 4), grid=(s.ctx.size + 1, 1)),
    "complex into real": _complex_into_real,
    "step": lambda s, x: x.matrix[::2, :],
    "not square": lambda s, x: pb.blas.trsm(x.matrix[:1, :], x.matrix) if x.whole.shape[1] > 1 else _skip(),
    "ndarray": lambda s, x: x.matrix + np.ones(x.whole.shape) if 1 not in x.whole.shape else _skip(),  # no vector
    "no such element": lambda s, x: x.matrix[x.whole.shape],
    "an array that does not fit": lambda s, x: x.matrix.__setitem__(..., np.ones((1, 2, 3))),
    "integers": lambda s, x: s.ctx.scatter(np.ones((3, 3), int)),
    "no such norm": lambda s, x: x.matrix.norm("nuclear"),
}  # fmt: skip
"""By name, a call that is wrong on every rank."""


def _skip() -> None:
    raise SkipStep


def _fails(i: Any, j: Any) -> Any:
    raise ValueError("a mistake in the user's function")


ON_ONE: dict[str, Callable[[State, Held, bool], Any]] = {
    "no descriptor": lambda s, x, wrong: s.ctx.zeros(None if wrong else x.matrix.descriptor),  # type: ignore[arg-type]
    "another descriptor": lambda s, x, wrong: s.ctx.zeros((8, 8), block=3 + wrong, grid=(1, 1)),
    "another root": lambda s, x, wrong: x.matrix.gather(int(wrong)),
    "another alpha": lambda s, x, wrong: pb.matmul(
        x.matrix, x.matrix, op_b="T", alpha=1 + wrong
    ),
    "a function that raises": lambda s, x, wrong: s.ctx.from_function(
        _fails if wrong else lambda i, j: i + j, (6, 6), block=1
    ),
    "an array of another shape": lambda s, x, wrong: s.ctx.from_local(
        np.zeros((3, 99)) if wrong else x.matrix.local, x.matrix.descriptor
    ),
    "no matrix": lambda s, x, wrong: pb.blas.nrm2(None if wrong else x.matrix[:1, :]),
    "nothing to add": lambda s, x, wrong: x.matrix + (None if wrong else 1),
    "another number": lambda s, x, wrong: x.matrix.__iadd__(2 + wrong),
    "another order": lambda s, x, wrong: x.matrix.save(s.directory / "unwritten.npy", order="F" if wrong else "C"),
    "another call": lambda s, x, wrong: x.matrix.sum() if wrong else x.matrix.copy(),
    "no plan": lambda s, x, wrong: pb.plan(
        pb.matmul, x.matrix, None if wrong else x.matrix, op_b="T"
    ),
}  # fmt: skip
"""By name, a call that is wrong on one rank."""


class Mistakes(State):
    """Every rank raises the same error, and everything is as it was."""

    @step(of=matrices, what=sampled_from([*EVERYWHERE, *ON_ONE]), rank=ranks)
    def mistake(self, of, what, rank):
        """A call that every rank refuses."""
        x = self.pick(of, lambda held: held.arithmetic and held.whole.size > 0)
        if what in ON_ONE and self.ctx.size == 1:
            raise SkipStep
        try:
            if what in EVERYWHERE:
                EVERYWHERE[what](self, x)
            else:
                ON_ONE[what](self, x, rank % x.matrix.descriptor.grid.size == self.ctx.rank)
        except ERRORS as error:
            raised = type(error).__name__
        else:
            raise WrongError(f"no error: {what}")
        kinds = self.comm.allgather(raised)
        expect(f"the ranks raise different errors: {kinds}" if len(set(kinds)) > 1 else "")
        expect("a file was written" if (self.directory / "unwritten.npy").exists() else "")
        self.check(x)
