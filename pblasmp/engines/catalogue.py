# SPDX-License-Identifier: Apache-2.0
"""The algorithms that every engine can run. A new one is a file like those imported here, and its rows below."""

from __future__ import annotations

from ..layout import Level3Problem, MatmulProblem
from . import dealt, overlapped, reduced, slabs, solve, sums
from .algorithms import Verdict, choose
from .base import Engine, Operands, Options, Problem, Product
from .moved import MovedProduct

__all__ = ["ALGORITHMS", "names", "prepare"]

ALGORITHMS = (
    *dealt.ALGORITHMS,
    *slabs.ALGORITHMS,
    *solve.ALGORITHMS,
    *sums.ALGORITHMS,
    *reduced.ALGORITHMS,
    *overlapped.ALGORITHMS,
)


def names(engine: Engine, problem: Problem) -> list[str]:
    """Return the names of the algorithms for a kind of problem. Local."""
    rows = (*engine.algorithms, *ALGORITHMS)
    return list(dict.fromkeys(row.name for row in rows if row.serves(problem)))


def prepare(
    engine: Engine,
    problem: Problem,
    options: Options,
    operands: Operands,
    nearest: MatmulProblem | Level3Problem | None = None,
) -> tuple[Product, dict[str, Verdict]]:
    """Return what was prepared, and what is said of every algorithm. Collective over the context.

    Args:
        engine: where it runs.
        problem: what is computed.
        options: how.
        operands: the local arrays.
        nearest: the same problem in other layouts, which operands are moved to first; None: they stay.

    Raises:
        UnsupportedError: no algorithm takes it.
    """
    row, viewed, verdicts = choose(engine, ALGORITHMS, nearest or problem, options, operands)
    if nearest is None or nearest == problem:
        return row.prepare(engine, viewed, options, operands), verdicts
    assert isinstance(problem, (MatmulProblem, Level3Problem))
    product = MovedProduct(
        engine, problem, nearest, options, operands, lambda used: row.prepare(engine, viewed, options, used)
    )
    return product, verdicts
