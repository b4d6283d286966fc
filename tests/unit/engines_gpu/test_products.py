# SPDX-License-Identifier: Apache-2.0
"""Whole products on a cuBLASMp that multiplies what it is told to: what it is told is right.

The library sees pointers, leading dimensions, descriptors and attributes alone. Numbers are small integers: exact.
"""

from __future__ import annotations

from typing import Any

from pblasmp.problems import files
from tests.helpers.gpu.multiply import multiply
from tests.helpers.machine import Multiplying, context
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import in_turn


@on_ranks(4)
def test_problems_on_ranks(comm: Any, path: str) -> Any:
    """Grids in both orders and of fewer ranks, sources, ragged and empty parts, sub-matrices, the schemes."""
    with context(path, Multiplying, comm=comm) as (ctx, lib):
        for where, algo in in_turn(list(files.find("problems")), ("auto", "default"), keep=3):
            file = files.load_problem_file(where)
            if file.nranks <= comm.size and not file.problem.faults():
                within = {x: (parent, file.windows[x]) for x, parent in file.parents.items()}
                fault = multiply(ctx, lib, file.problem, file.alpha, file.beta, within, algo)
                yield f"{file.path.name} {algo}", fault or None
