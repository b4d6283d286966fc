# SPDX-License-Identifier: Apache-2.0
"""The algorithms that every engine can run. A new one takes a file like those imported here, and rows below."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..layout import Level3Problem, MatmulProblem, ParallelProblem
from .composite import MovedProduct
from .dense import add, full, slabs, solve, split_k, stationary, stationary_solve, sum_over_ranks
from .method import Verdict, choose, known_for
from .product import Product
from .protocol import Engine
from .request import Operands, Options, Problem
from .tensor import messages, shared_memory

if TYPE_CHECKING:
    from ..layout.parallel import Form

__all__ = ["ALGORITHMS", "check_parallel", "names", "prepare"]


def _step(engine: Engine, problem: Problem, options: Options, operands: Operands) -> Product:
    """Return a product that is a step of another. Collective over the context."""
    return prepare(engine, problem, options, operands)[0]


ALGORITHMS = (
    *split_k.ALGORITHMS,
    *slabs.ALGORITHMS,
    *stationary.ALGORITHMS,
    *solve.ALGORITHMS,
    *add.ALGORITHMS,
    *sum_over_ranks.ALGORITHMS,
    *shared_memory.ALGORITHMS,
    *messages.ALGORITHMS,
    *full.algorithms(_step),
    *stationary_solve.algorithms(_step),
)


def names(engine: Engine, problem: Problem, options: Options) -> list[str]:
    """Return the names of the algorithms for a kind of problem, the fastest by rule first. Local."""
    costs: dict[str, float] = {}
    for row in (*engine.algorithms, *ALGORITHMS):
        if row.serves(problem) and row.name not in costs:
            viewed = row.view(problem)
            costs[row.name] = math.inf if isinstance(viewed, str) else row.cost(engine, viewed, options)
    return sorted(costs, key=lambda name: costs[name])


def check_parallel(engine: Engine, form: Form, algo: str, argument: str) -> None:
    """Raise UnsupportedError unless ``algo``, the value of ``argument``, exists for a form. Local.

    It may still refuse a particular problem of that form.
    """
    if algo == "measure":
        return
    none, real = (0,), np.dtype(np.float32)
    problem = ParallelProblem(form, none, none, none, none, real, real, real)
    known_for(engine, ALGORITHMS, problem, Options(algo=algo), argument)


def prepare(
    engine: Engine,
    problem: Problem,
    options: Options,
    operands: Operands,
    nearest: MatmulProblem | Level3Problem | None = None,
) -> tuple[Product, dict[str, Verdict]]:
    """Return the prepared product, and the verdict on every algorithm. Collective over the context.

    Args:
        engine: where it runs.
        problem: what is computed.
        options: how.
        operands: the local arrays.
        nearest: the same problem in other layouts, which operands are moved to first; None: they stay.

    Raises:
        UnsupportedError: no algorithm can compute it.
    """
    row, viewed, verdicts = choose(engine, ALGORITHMS, nearest or problem, options, operands)
    if nearest is None or nearest == problem:
        return row.prepare(engine, viewed, options, operands), verdicts
    assert isinstance(problem, (MatmulProblem, Level3Problem))
    product = MovedProduct(
        engine, problem, nearest, options, operands, lambda used: row.prepare(engine, viewed, options, used)
    )
    return product, verdicts
