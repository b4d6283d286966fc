# SPDX-License-Identifier: Apache-2.0
"""``algo="cusolvermp"`` on simulated GPUs: eigenvalues in layouts at random, and GPUs without it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu import cusolvermp
from pblasmp.errors import LibraryNotFoundError
from tests.helpers import spectral_cases
from tests.helpers.cases import refuses, scattered
from tests.helpers.factor_cases import TYPES
from tests.helpers.fakesolver import FakeSolver
from tests.helpers.machine import Multiplying, Witness, machine
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import only_long
from tests.helpers.spectral_cases import KINDS, eigh, eigh_at_the_ends


def opened(lib: Witness, patch: pytest.MonkeyPatch, version: int = 901) -> FakeSolver:
    """Have contexts find a simulated cuSOLVERMp."""
    solver = FakeSolver(lib.gpu, version)
    patch.setattr(cusolvermp, "SolverLibrary", lambda: solver)
    return solver


@on_ranks(*only_long(1, 2), 4)
def test_everything(comm: Any, path: str) -> None:
    rng = np.random.default_rng(83)
    with machine(path, Multiplying, comm=comm) as lib, pytest.MonkeyPatch.context() as patch:
        solver = opened(lib, patch)
        with pb.Context(comm, engine="cublasmp") as ctx:
            for dtype, kind in zip(TYPES, KINDS, strict=True):
                for each in ("all", kind):
                    eigh(ctx, rng, dtype, int(rng.integers(0, 20)), "cusolvermp", kind=each)
            patch.setattr(cusolvermp.METHODS[1], "most", 0)
            for dtype in ("float32", "complex128"):
                eigh_at_the_ends(ctx, rng, dtype)
            calls(ctx, rng)
            chosen(ctx)
            if ctx.size > 1:
                wrong_singular_vectors(ctx, solver)
                sorted_columns(ctx)
        solver.assert_clean()
        lib.assert_clean()
        lib.gpu.assert_clean()
        assert "Syevd" in solver.calls, "called: never"


def calls(ctx: pb.Context, rng: np.random.Generator) -> None:
    d = pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid.squarest(ctx.size))
    a = scattered(ctx, d, np.eye(8) * 3)
    whole = np.diag(np.arange(8.0)) + 1
    where = scattered(ctx, d, whole)
    singular_values(ctx, rng)
    w, v = pb.linalg.eigh(where, subset_by_index=(2, 4))
    expected = np.linalg.eigvalsh(whole)
    found = v.allgather()
    near = np.allclose(w, expected[2:5]) and np.allclose(whole @ found, found * w)
    assert near, f"subset: {w}"
    assert found.shape == (8, 3), f"subset: {w}"
    w = pb.linalg.eigvalsh(where)
    assert np.allclose(w, expected), "values"
    w, v = pb.linalg.eigh(where, scattered(ctx, d, np.eye(8) * 4))
    found = v.allgather()
    near = np.allclose(w, expected / 4) and np.allclose(whole @ found, 4 * found * w)
    assert near, f"pair: {w}"
    words = ["eigh: a", "expected a square matrix"]
    refuses(ctx, pb.ArgumentError, ["expected a square matrix"], pb.linalg.eigh, a[:4, :])
    with pb.plan(pb.linalg.eigh, a) as plan:
        report = plan.report()
        values, _ = plan()
        words = ["a CUDA graph: a factorization cannot be recorded"]
        refuses(ctx, pb.UnsupportedError, words, plan.graph)
    said = ctx.size == 1 or (report.algorithm == "cusolvermp" and "cuSOLVERMp" in report.path)
    assert said, f"plan: {report}"
    assert np.allclose(values, 3), f"plan: {report}"
    assert len(plan.report().moved) == (d.order == "C"), "moved"


def singular_values(ctx: pb.Context, rng: np.random.Generator) -> None:
    """By one GPU, of any size, and by all with cuSOLVERMp's gesvd."""
    whole = rng.standard_normal((7, 4)) * 1e-200
    a = scattered(ctx, pb.MatrixDescriptor((7, 4), (2, 3), pb.Grid.squarest(ctx.size)), whole)
    u, s, vh = pb.linalg.svd(a)
    near = np.allclose((u.allgather() * (s * 1e200)) @ vh.allgather(), whole * 1e200)
    same = np.allclose(s, pb.linalg.svdvals(a), rtol=1e-12, atol=0) and (np.diff(s) <= 0).all()
    assert near, f"svd: {s}"
    assert same, f"svd: {s}"
    for dtype in TYPES:
        for shape in ((1, 1), (3, 17), (17, 3), (int(rng.integers(2, 20)), int(rng.integers(2, 20)))):
            spectral_cases.svd(ctx, rng, dtype, shape, "cusolvermp")


def wrong_singular_vectors(ctx: pb.Context, solver: FakeSolver) -> None:
    """Those that "auto" finds are checked, and found again by one GPU."""
    whole = np.arange(24.0).reshape(6, 4) + np.eye(6, 4)
    a = ctx.scatter(whole, block=2)
    method = cusolvermp.METHODS[1]
    for limits in ({"most": 0, "singular": (0, 0)}, {"quick": (5, 5)}):
        solver.spoils = True
        with mock.patch.multiple(method, **limits):
            u, s, vh = pb.linalg.svd(a)
            by_name = pb.linalg.svd(a, algo="cusolvermp")
        solver.spoils = False
        near = np.allclose((u.allgather() * s) @ vh.allgather(), whole)
        kept = np.allclose((by_name.u.allgather() * s) @ by_name.vh.allgather(), whole)
        assert near, f"spoiled {limits}: {s} {near}"
        assert not kept, f"spoiled {limits}: {s} {near}"
    with mock.patch.multiple(method, quick=(6, 5)), pb.plan(pb.linalg.svd, a) as plan:
        right = np.allclose(plan().s, s)
        assert right
        assert plan.report().algorithm == "cusolvermp"
    with mock.patch.multiple(method, quick=(5, 6)), pb.plan(pb.linalg.svd, a) as plan:
        assert plan.report().algorithm == "cusolver", "small"


def sorted_columns(ctx: pb.Context) -> None:
    """Only columns that are out of order travel, wherever they are: cuSOLVERMp swaps nearly equal ones."""
    n, real = 40, cusolvermp.move
    moved: list[tuple[int, int]] = []

    def move(engine: Any, source: pb.MatrixDescriptor, *rest: Any) -> None:
        moved.append(source.shape)
        real(engine, source, *rest)

    for equal in ((3, 4), (7, 8), tuple(range(n))):  # in a block, in two, all
        values = np.arange(1.0, n + 1)
        values[list(equal)] = 50.0
        q = np.linalg.qr(np.random.default_rng(5).standard_normal((n, n)))[0]
        whole = (q * values) @ q.T
        moved.clear()
        a = scattered(ctx, pb.MatrixDescriptor((n, n), (8, 8), pb.Grid.squarest(ctx.size)), whole)
        with mock.patch.object(cusolvermp, "move", move):
            w, v = pb.linalg.eigh(a, algo="cusolvermp")
        found = v.allgather()
        near = np.allclose(w, np.sort(values)) and np.allclose(whole @ found, found * w)
        few = len(moved) == 2 and moved[0][1] <= min(len(equal), n // 2) * ctx.size
        assert near, f"sorted {len(equal)}: {w} {moved}"
        assert few, f"sorted {len(equal)}: {w} {moved}"


def chosen(ctx: pb.Context) -> None:
    """ "auto" solves and factors on panels, for a single right-hand side, too."""
    a = ctx.eye(40, block=4)
    lower, (factors, pivots) = pb.linalg.cholesky(a), pb.linalg.lu_factor(a)
    for width in (1, 2):
        b = ctx.zeros((40, width), block=4)
        for function, given in (
            (pb.linalg.cho_solve, ((lower, True), b)), (pb.linalg.lu_solve, ((factors, pivots), b)),
            (pb.linalg.solve, (a, b)), (pb.linalg.cholesky, (a,)), (pb.linalg.lu_factor, (a,)),
        ):  # fmt: skip
            with pb.plan(function, *given) as plan:
                found = plan.report().algorithm
            case = f"auto {function.__name__} {width}"
            assert found == "panels", case


def test_one_gpu_computes_in_the_place_of_the_eigenvectors(
    ctx: pb.Context, lib: Any, monkeypatch: Any
) -> None:
    """There is one matrix besides A, wherever the eigenvectors are wanted; cuSOLVER says if it does not converge."""
    from cupy_backends.cuda.libs import cusolver

    solve, places = cusolver.xsyevd, []
    monkeypatch.setattr(cusolver, "xsyevd", lambda *given: [places.append(given[6]), solve(*given)])
    x = np.random.default_rng(84).standard_normal((9, 9))
    w, v = np.linalg.eigh(x + x.T)
    for order in "FC":
        a = scattered(ctx, pb.MatrixDescriptor((9, 9), (4, 4), pb.Grid(1, 1), order=order), x + x.T)
        found, vectors = pb.linalg.eigh(a)
        assert np.allclose(found, w)
        assert np.allclose(abs(vectors.allgather()), abs(v))
        assert (places.pop() == vectors.local.data.ptr) == (order == "F")
        found, vectors = pb.linalg.eigh(a, subset_by_index=(3, 5))
        assert np.allclose(found, w[3:6])
        assert np.allclose(abs(vectors.allgather()), abs(v[:, 3:6]))
    q = np.linalg.qr(x)[0]
    whole = (q * [1, 2, 2, 3, 4, 5, 7, 7, 9]) @ q.T
    found, vectors = pb.linalg.eigh(scattered(ctx, pb.MatrixDescriptor((9, 9), (9, 9), pb.Grid(1, 1)), whole))
    assert (np.diff(found) >= 0).all()
    assert np.allclose(whole @ vectors.allgather(), vectors.allgather() * found)
    monkeypatch.setattr(cusolvermp, "_LARGE", 8)
    lib.gpu.events.clear()
    pb.linalg.eigh(a)
    assert ("pool emptied",) in lib.gpu.events  # of what a move has left there
    monkeypatch.setattr(np.linalg, "eigh", lambda *given: np.linalg.cholesky(np.zeros((1, 1))))
    with pytest.raises(pb.FactorizationError, match="INFO is 1"):
        pb.linalg.eigh(a)


@pytest.mark.parametrize(("most", "name"), [(16384, "cusolvermp"), (5, "cusolver")])
def test_one_gpu_takes_cusolvermp_for_singular_values(
    ctx: pb.Context, lib: Any, monkeypatch: Any, most: int, name: str
) -> None:
    """Unless it is missing, or would need too much memory."""
    method = cusolvermp.METHODS[1]
    monkeypatch.setattr(method, "quick", (5, 9))
    with pb.plan(pb.linalg.svd, ctx.eye(6)) as plan:
        assert plan.report().algorithm == "cusolver"  # there is no other one
    opened(lib, monkeypatch)
    monkeypatch.setattr(method, "most", most)
    with pb.Context(engine="cublasmp") as other, pb.plan(pb.linalg.svd, other.eye(6)) as plan:
        assert plan.report().algorithm == name


@on_ranks(2)
def test_without_the_library(comm: Any, path: str) -> None:
    """A rank lacks the cusolvermp, or it is too old: every rank says why, once."""
    with machine(path, Multiplying, comm=comm) as lib, pytest.MonkeyPatch.context() as patch:
        asked = []

        def lacking() -> Any:
            asked.append(1)
            if comm.rank == comm.size - 1:
                raise LibraryNotFoundError("cuSOLVERMp (libcusolverMp.so.0) was not found")
            return FakeSolver(lib.gpu)

        patch.setattr(cusolvermp, "SolverLibrary", lacking)
        patch.setattr(cusolvermp.METHODS[1], "most", 0)
        with pb.Context(comm, engine="cublasmp") as ctx:
            a = ctx.eye(6)
            for _ in range(2):
                words = [
                    "no algorithm of the cublasmp engine",
                    "cuSOLVERMp (libcusolverMp.so.0) was not found",
                ]
                refuses(ctx, pb.UnsupportedError, words, pb.linalg.eigh, a)
            words = ["algo 'cusolvermp': cuSOLVERMp (libcusolverMp.so.0) was not found"]
            refuses(ctx, pb.UnsupportedError, words, pb.linalg.eigh, a, algo="cusolvermp")
            assert asked == [1], f"once: opened {len(asked)} times"
        old = opened(lib, patch, version=702)
        with pb.Context(comm, engine="cublasmp") as ctx:
            words = ["needs cuSOLVERMp 0.8.0 or newer, found 0.7.2 at a simulated"]
            refuses(ctx, pb.UnsupportedError, words, pb.linalg.eigh, ctx.eye(6))
        old.assert_clean()
        middle = opened(lib, patch, version=801)
        with pb.Context(comm, engine="cublasmp") as ctx:
            words = ["algo 'cusolvermp': singular values need cuSOLVERMp 0.9 or newer, found 0.8.1"]
            refuses(ctx, pb.UnsupportedError, words, pb.linalg.svd, ctx.eye(6), algo="cusolvermp")
        middle.assert_clean()
        lib.gpu.assert_clean()
