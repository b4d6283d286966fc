# SPDX-License-Identifier: Apache-2.0
"""Factorisations on ranks: every type, option and layout at random, on one node and between nodes; errors."""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.cases import agreed_error, first, layout, pick, scattered, short_messages, unlike
from tests.helpers.factor_cases import (
    TYPES,
    exact,
    only,
    panels_of,
    placed,
    positive,
    random,
    relative,
    too_large,
)
from tests.helpers.mpi import run_mpi


def sizes(rng):
    """An order, and a number of right-hand sides."""
    return int(rng.integers(0, 30)), pick(rng, (0, 1, 1, 5, 9))


def cholesky_case(ctx, rng, dtype):
    n, m = sizes(rng)
    uplo, in_place = pick(rng, "LU"), bool(rng.integers(2))
    whole = positive(rng, n, dtype)
    a = placed(ctx, rng, only(uplo, whole))
    b = placed(ctx, rng, random(rng, (n, m), dtype))
    out = a if in_place else pick(rng, (None, placed(ctx, rng, only(uplo, np.zeros_like(whole)))))
    right, kept = b.allgather(), a.allgather()
    solution = pb.solve(a, b, "pos", uplo=uplo).allgather()
    untouched = None if np.array_equal(a.allgather(), kept, equal_nan=True) else "A has changed"
    found = pb.cholesky(a, uplo, out=out)
    factor = found.allgather()
    outside = factor[np.triu_indices(n, 1) if uplo == "L" else np.tril_indices(n, -1)]
    beyond = (
        None
        if (outside == 0).all() or (out is not None and np.isnan(outside).all())
        else "the other triangle"
    )
    again = pb.cho_solve(found, b, uplo, out=b).allgather()
    lower = exact(np.tril(factor) if uplo == "L" else np.triu(factor).conj().T)
    left = exact(whole)
    errors = too_large(
        factor=relative(lower @ lower.conj().T - left, left, n, dtype),
        solve=relative(left @ solution - right, left, n, dtype),
        cho_solve=relative(left @ again - right, left, n, dtype),
    )
    return f"cholesky {dtype} {n} {m} {uplo} in place: {in_place} {a.descriptor} {b.descriptor}", first(
        errors, untouched, beyond
    )


CASES = (cholesky_case,)


def everything(comm, count):
    rng = np.random.default_rng(61)
    with pb.Context(comm, engine="host") as ctx:
        for case in CASES:
            for dtype in TYPES * count:
                with panels_of(ctx, int(rng.integers(1, 9))), short_messages(pick(rng, (64, 1000, 1 << 22))):
                    yield case(ctx, rng, dtype)


@pytest.mark.parametrize("nranks", [1, 2, 4, 6])
def test_every_layout(nranks):
    run_mpi(everything, nranks, count=8)


@pytest.mark.parametrize(("nranks", "per_node"), [(4, 2), (3, 1)])
def test_several_nodes(nranks, per_node, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", str(per_node))
    run_mpi(everything, nranks, count=6)


def large(comm):
    """As users have it: panels, workers and strips of triangles of the engine's own choice."""
    rng = np.random.default_rng(62)
    with pb.Context(comm, engine="host") as ctx:
        whole = positive(rng, 700, "float64")
        for uplo in "LU":
            d = pb.MatrixDescriptor((700, 700), (48, 40), pb.Grid.squarest(comm.size), order=pick(rng, "CF"))
            a = scattered(ctx, d, only(uplo, whole))
            factor = pb.cholesky(a, uplo, out=a).allgather()
            lower = np.tril(factor) if uplo == "L" else np.triu(factor).T
            yield (
                f"cholesky {uplo}",
                too_large(factor=relative(lower @ lower.T - whole, whole, 700, "float64")),
            )


def faults(comm):
    """What is not positive definite, NaN, and arguments that do not fit."""
    rng = np.random.default_rng(63)
    with pb.Context(comm, engine="host") as ctx, panels_of(ctx, 4):
        for index in (0, 5, 16):
            whole = positive(rng, 17, "float64")
            whole[index, index] = -1
            for call in (
                lambda a: pb.cholesky(a, out=a),
                lambda a: pb.solve(a, a, "pos", factor=a),
            ):
                a = scattered(ctx, layout(rng, (17, 17), comm.size), whole)
                words = ["not positive definite", f"index {index}", f"order {index + 1}"]
                wrong = agreed_error(ctx, pb.FactorisationError, words, call, a)
                done = index // 4 * 4
                expected = np.linalg.cholesky(whole[:done, :done]) if done else whole[:0, :0]
                near = np.allclose(np.tril(a.allgather()[:done, :done]), expected)
                yield f"not positive definite at {index}", first(wrong, None if near else "L before it")
        try:
            pb.cholesky(scattered(ctx, layout(rng, (3, 3), comm.size), -np.eye(3)))
        except pb.FactorisationError as error:
            yield "index", None if error.index == 0 else f"{error.index}"
        for at in ((0, 0), (9, 2), (9, 9)):
            whole = positive(rng, 17, "complex64")
            whole[at] = np.nan
            found = pb.cholesky(scattered(ctx, layout(rng, (17, 17), comm.size, dtype="complex64"), whole))
            yield f"NaN at {at}", None if np.isnan(found.allgather()[16, 16]) else "no NaN"
        square, wide = (ctx.zeros(layout(rng, shape, comm.size)) for shape in ((6, 6), (6, 7)))
        single = ctx.zeros(layout(rng, (6, 6), comm.size, dtype="float32"))
        half = ctx.zeros(layout(rng, (6, 6), comm.size, dtype="float16"))
        for kind, words, call in (
            (pb.LayoutError, ["a: expected a square matrix, got 6 x 7"], lambda: pb.cholesky(wide)),
            (pb.LayoutError, ["a: expected one of float64", "float16"], lambda: pb.cholesky(half)),
            (pb.LayoutError, ["uplo: expected one of L, U, got 'X'"], lambda: pb.cholesky(square, "X")),
            (pb.LayoutError, ["out: expected 6 x 6 of float64"], lambda: pb.cholesky(square, out=single)),
            (pb.LayoutError, ["assume: expected one of"], lambda: pb.solve(square, square, "nothing")),
            (pb.LayoutError, ["b: expected float64"], lambda: pb.solve(square, single, "pos")),
            (pb.LayoutError, ["b: 7 rows"], lambda: pb.solve(square, wide.T, "pos")),
            (pb.ArgumentTypeError, ["b: expected a DistributedMatrix"], lambda: pb.solve(square, 1, "pos")),
            (pb.ArgumentTypeError, ["expected distributed matrices"], lambda: pb.cholesky(1)),
        ):
            if "expected distributed" in words[0]:  # no context to agree in
                with pytest.raises(kind):
                    call()
                continue
            yield f"{words}", agreed_error(ctx, kind, words, call)
        if comm.size > 1:
            uplo = "LU"[comm.rank == 1]
            yield "mismatch", agreed_error(ctx, pb.RankMismatchError, ["uplo"], pb.cholesky, square, uplo)
        frozen = scattered(ctx, layout(rng, (6, 6), comm.size), np.eye(6))
        frozen.local.flags.writeable = False
        words = ["out: its local array is read-only"]
        for _ in range(2):
            yield (
                "read-only",
                agreed_error(ctx, pb.ArgumentError, words, lambda: pb.cholesky(square + frozen, out=frozen)),
            )
        same = scattered(ctx, layout(rng, (6, 6), comm.size), 4 * np.eye(6))
        for _ in range(3):
            yield "repeated", unlike(pb.cholesky(same).allgather(), 2 * np.eye(6))


@pytest.mark.parametrize("nranks", [1, 4])
def test_large_and_faults(nranks):
    run_mpi(large, nranks)
    run_mpi(faults, nranks)
