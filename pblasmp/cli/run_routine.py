# SPDX-License-Identifier: Apache-2.0
"""``pblasmp run`` of a level-3 routine: on integers, against NumPy on one rank. Every comparison is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pblasmp as pb

from ..context import Context
from ..layout import MatrixDescriptor
from ..problems.files import RoutineFile
from .progress import Reporter
from .reference import dense, touched

__all__ = ["integers", "run_routine"]

Array = NDArray[Any]


def run_routine(ctx: Context, found: RoutineFile, algo: str, reporter: Reporter) -> tuple[Any, int]:
    """Run the routine of a file with alpha 1, and beta 1 if there is a C. Collective over the context.

    Returns:
        The plan's report, and on rank 0 how many elements of D's whole matrix differ from NumPy's.
    """
    problem = found.problem
    has = problem.traits
    reporter.step("making operands")
    values, expected = _values(found) if ctx.rank == 0 else ({}, None)
    wholes = {name: ctx.scatter(values.get(name), parent) for name, parent in found.parents.items()}
    parts = {name: whole[found.windows[name]] for name, whole in wholes.items()}
    operands: dict[str, Any] = {name: parts[name] for name in has.operands if name in parts}
    how: dict[str, Any] = {name: getattr(problem, name) for name in has.options}
    if "c" in has.operands:
        how["beta"] = int("c" in parts)
        operands.setdefault("c", parts["d"] if has.shape == "added" else None)  # sums need one, read or not
    reporter.step("computing")
    run: Any = pb.plan(problem.routine, **operands, out=parts["d"], algo=algo, **how)
    with run as plan:
        plan()
        report = plan.report()
    reporter.step("comparing")
    got = wholes["d"].gather()
    return report, 0 if got is None else int(np.count_nonzero(got != expected))


def _values(found: RoutineFile) -> tuple[dict[str, Array], Array]:
    """Return the whole matrices, and what D's must hold afterwards."""
    p = found.problem
    wholes = {name: _whole(seed, parent) for seed, (name, parent) in enumerate(found.parents.items())}
    parts = {name: whole[found.windows[name]] for name, whole in wholes.items()}
    flags = {name: getattr(p, name) for name in p.traits.options}
    if p.traits.solves:
        _make_solvable(parts["a"])
        result = parts["b"].copy()
        parts["b"][...] = dense("trmm", parts, flags, 1, 0)  # the solution is the B from before
    else:
        result = dense(p.routine, parts, flags, 1, int("c" in parts))
    expected = wholes["d"].copy()
    np.copyto(expected[found.windows["d"]], result, where=touched(p.routine, "d", flags, result.shape))
    return wholes, expected.astype(found.parents["d"].dtype)


def integers(seed: int, descriptor: MatrixDescriptor) -> Callable[[Array, Array], Array]:
    """Return a function of indices whose values are small integers, complex for a complex matrix. Local."""

    def values(i: Array, j: Array) -> Array:
        real: Array = (3 * i + 5 * j + i * j + seed) % 7 - 3.0
        return real + 1j * ((i + 2 * j + seed) % 5 - 2) if descriptor.dtype.kind == "c" else real

    return values


def _whole(seed: int, descriptor: MatrixDescriptor) -> Array:
    return integers(seed, descriptor)(*np.ogrid[: descriptor.shape[0], : descriptor.shape[1]])


def _make_solvable(a: Array) -> None:
    """Give a matrix integer inverses of both triangles: ones and minus ones on the diagonal, few other elements.

    Off the diagonal only elements in an odd row and an even column are not 0, and the product of two such matrices is
    0. So the inverse of D + N is D - D N D, and all algorithms compute with small integers.
    """
    i, j = np.ogrid[: a.shape[0], : a.shape[1]]
    a[(i % 2 == 0) | (j % 2 == 1)] = 0
    np.fill_diagonal(a, 1 - 2 * (np.arange(len(a)) % 3 == 1))
