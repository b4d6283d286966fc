# SPDX-License-Identifier: Apache-2.0
"""Factorisations under ScaLAPACK's names, next to ScaLAPACK's own: the same local arrays, arguments and INFO.

A factor that the algorithm fixes, up to rounding, is compared element by element; solutions by their residuals.
ScaLAPACK wants square blocks and an offset of whole blocks: half of the cases have these, and are given to both; the
rest have any layout, and are compared with NumPy.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from pblasmp.pblas.routines import DTYPE
from reference.scalapack import ScaLAPACK, locate
from tests.helpers.cases import first, pick
from tests.helpers.factor_cases import exact, panels_of, positive, random, relative, too_large
from tests.helpers.mpi import run_mpi
from tests.helpers.pblas_cases import Held


@pytest.fixture(scope="module")
def flavour():
    """The ScaLAPACK that is here; without one skip, or fail where PBLASMP_SCALAPACK says that it is required."""
    found = next((flavour for flavour in ("debian", "mkl") if locate(flavour)), None)
    if found is None:
        missing = "no ScaLAPACK: python -m benchmarks.fetch_scalapack --only mkl fetches one"
        assert os.environ.get("PBLASMP_SCALAPACK") != "required", missing
        pytest.skip(missing)
    return found


class Call:
    """Both libraries' arguments for a routine on matrices of one grid, and what they leave in the matrices."""

    def __init__(self, ctx, slk, letter, every, rng):
        self.ctx, self.slk, self.letter, self.rng = ctx, slk, letter, rng
        self.dtype = DTYPE[letter]
        self.shape, self.ours, self.theirs = pick(rng, every)
        self.place = pblas.gridinfo(self.ours)[2:]
        self.aligned = bool(rng.integers(2))
        self.block = int(rng.integers(1, 7))
        self.source = tuple(int(rng.integers(x)) for x in self.shape)

    def held(self, part):
        """``part`` as a Fortran program holds it, within a larger matrix of NaN."""
        rng, block = self.rng, (self.block, self.block)
        before, source = rng.integers(0, 3, 2) * self.block, self.source
        before[1] = before[0]  # the same block row and column begin it
        if not self.aligned:
            before, block = rng.integers(0, 8, 2), tuple(int(x) for x in rng.integers(1, 7, 2))
            source = tuple(int(rng.integers(x)) for x in self.shape)
        after = rng.integers(0, 4, 2)
        whole = np.full(tuple(int(x) for x in before + part.shape + after), np.nan, self.dtype)
        held = Held(
            self.shape, whole, block, source, tuple(int(x) + 1 for x in before), part.shape, pick(rng, (0, 2))
        )
        whole[held.window] = part
        return held

    def run(self, name, head, *held):
        """Run a routine by both, if ScaLAPACK takes the layout; return INFO and the matrices of each."""
        out = []
        for library, context in (("ours", self.ours), ("theirs", self.theirs)):
            if library == "theirs" and not self.aligned:
                continue
            arrays = [x.local(self.place) for x in held]
            placed = [
                each
                for x, array in zip(held, arrays, strict=True)
                for each in (array, *x.at, x.desc(context, self.place))
            ]
            info = np.zeros(1, np.int32)
            full = f"p{self.letter}{name}"
            if library == "ours":
                returned = getattr(pblas, full)(*head, *placed, info)
                assert returned == info[0]
            else:
                self.slk.call(f"{full}_", *head, *placed, info)
            out.append((int(info[0]), [self._whole(x, array) for x, array in zip(held, arrays, strict=True)]))
        return out

    def _whole(self, x, array):
        """Return sub(A), gathered from all processes."""
        rows, cols = x.indices(self.place)
        whole = np.full_like(x.whole, 0)
        parts = self.ctx.comm.allgather((rows, cols, array[: len(rows)]))
        for rows, cols, part in parts:
            whole[rows[:, None], cols] = part
        return whole[x.window]


def potrf_case(call):
    rng, dtype = call.rng, call.dtype
    n, uplo = int(rng.integers(1, 25)), pick(rng, "UL")
    a = positive(rng, n, dtype)
    bad = int(rng.integers(n)) if rng.integers(4) == 0 else None
    if bad is not None:
        a[bad, bad] = -1
    kept = np.triu(np.ones((n, n), bool)) if uplo == "U" else np.tril(np.ones((n, n), bool))
    x = call.held(np.where(kept, a, 7).astype(dtype))
    results = call.run("potrf", (uplo, n), x)
    wrong = []
    for info, (factor,) in results:
        wrong.append(None if info == (0 if bad is None else bad + 1) else f"INFO {info}, expected {bad}")
        wrong.append(None if (factor[~kept] == 7).all() else "the other triangle is written")
        if bad is None:
            lower = exact(np.where(kept, factor, 0))
            lower = lower.conj().T if uplo == "U" else lower
            wrong.append(too_large(potrf=relative(lower @ lower.conj().T - a, exact(a), n, dtype)))
    if len(results) == 2 and bad is None:
        ours, theirs = (np.where(kept, exact(factor), 0) for _, (factor,) in results)
        wrong.append(too_large(beside=relative(ours - theirs, theirs, n, dtype)))
    return f"potrf {uplo} {n} {bad} {x}", first(*wrong)


def posv_case(call):
    rng, dtype = call.rng, call.dtype
    n, nrhs, uplo = int(rng.integers(1, 25)), int(rng.integers(1, 7)), pick(rng, "UL")
    a, b = positive(rng, n, dtype), random(rng, (n, nrhs), dtype)
    x, y = call.held(a), call.held(b)
    if call.aligned:  # ScaLAPACK wants sub(B) to begin in the process row of sub(A)
        y = Held(
            y.grid,
            np.full((x.at[0] - 1 + n, nrhs), np.nan, dtype),
            x.block,
            x.source,
            (x.at[0], 1),
            (n, nrhs),
            1,
        )
        y.whole[y.window] = b
    wrong = []
    for info, (factor, solution) in call.run("posv", (uplo, n, nrhs), x, y):
        wrong.append(None if info == 0 else f"INFO {info}")
        wrong.append(too_large(posv=relative(exact(a) @ solution - b, exact(a), n, dtype)))
        for _, (_, again) in call.run("potrs", (uplo, n, nrhs), _like(x, factor), y)[:1]:
            wrong.append(too_large(potrs=relative(exact(a) @ again - b, exact(a), n, dtype)))
    return f"posv {uplo} {n} {nrhs} {x} {y}", first(*wrong)


def _like(x, part):
    """``part`` held as ``x`` is."""
    whole = x.whole.copy()
    whole[x.window] = part
    return Held(x.grid, whole, x.block, x.source, x.at, x.shape, x.gap)


CASES = (potrf_case, posv_case)


def everything(comm, count, flavour):
    slk = ScaLAPACK(flavour, comm)
    rng = np.random.default_rng(71)
    with pb.Context(comm, engine="host") as ctx:
        shapes = [(p, comm.size // p) for p in range(1, comm.size + 1) if comm.size % p == 0]
        every = [(s, pblas.gridinit(ctx, o, *s), slk.grid(*s, o)) for s in shapes for o in ("row", "col")]
        for letter in "sdcz" * count:
            for case in CASES:
                with panels_of(ctx, int(rng.integers(1, 9))):
                    name, wrong = case(Call(ctx, slk, letter, every, rng))
                    yield f"p{letter}{name}", wrong
        for _, ours, theirs in every:
            pblas.gridexit(ours)
            slk.gridexit(theirs)


@pytest.mark.parametrize("nranks", [1, 2, 4, 6])
def test_beside_scalapack(nranks, flavour):
    run_mpi(everything, nranks, count=13, flavour=flavour, timeout=120, launch=True)
