# SPDX-License-Identifier: Apache-2.0
"""Factorizations on simulated GPUs: every type, option and layout at random, and failures (factor.py)."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.dense import panel_shape, workbench
from pblasmp.engines.dense.split_panels import SplitPanels
from pblasmp.engines.gpu import factor_operations, spread
from pblasmp.engines.gpu import grid_panels as factor_panels_of_gpus
from pblasmp.engines.gpu.factor_operations import GpuFactorOperations
from pblasmp.engines.gpu.gpu_operations import GpuOperations
from pblasmp.engines.gpu.grid_panels import GridPanels, QueuedPanels
from pblasmp.engines.gpu.kernels import factor
from pblasmp.engines.gpu.kernels.compiler import Kernel
from pblasmp.engines.gpu.kernels.factor import FactorKernels
from pblasmp.engines.gpu.kernels.lt import WORKSPACE_BYTES
from pblasmp.engines.gpu.runtime.inbox import Deliveries
from tests.helpers import factor_cases
from tests.helpers.cases import refuses
from tests.helpers.factor_cases import (
    CASES,
    TYPES,
    empty,
    failures,
    least_squares_at_the_ends,
    panels_of,
    without_full_rank,
)
from tests.helpers.fakelt import FakeLt
from tests.helpers.machine import Multiplying, context, machine
from tests.helpers.mpi import on_ranks, run_mpi
from tests.helpers.pairs import pairs
from tests.helpers.slow import in_turn, only_long
from tests.helpers.solve_cases import conditions_case, ranked_case, refined_case


def everything(comm: Any, path: str, half: str) -> Any:
    """Half of the cases: each of CASES, or what is at the ends of what is possible."""
    rng = np.random.default_rng(91)
    with (
        machine(path, Multiplying, comm=comm) as lib,
        mock.patch.object(FactorKernels, "invert", autospec=True, side_effect=FactorKernels.invert) as invert,
        mock.patch.object(SplitPanels, "publish", autospec=True, side_effect=SplitPanels.publish) as split,
        # three nodes of one rank would get no less: they have no other panels
        mock.patch.object(GpuFactorOperations, "own_panels", None if comm.size == 3 else QueuedPanels),
        mock.patch.object(GpuFactorOperations, "factor_wait", 0),
        mock.patch.object(panel_shape, "ROUNDS", 0),  # small blocks are groups of panels, too
        mock.patch.object(factor, "_MOST", 5),  # exchanges of rows take several kernels
        mock.patch.object(factor, "_FEW", 2),
    ):
        with pb.Context(comm, engine="cublasmp") as ctx:
            if half == "cases":
                random_cases(ctx, rng)
            else:
                ends(ctx, rng, lib.gpu)
        assert invert.call_count or half == "ends", "inverses: none"
        assert split.call_count, "panels in two dimensions"
        lib.assert_clean()
        lib.gpu.assert_clean()


def random_cases(ctx: pb.Context, rng: np.random.Generator) -> None:
    """At random, and one whose panels are in two dimensions for sure."""
    with panels_of(ctx, 4):
        blocks = pb.MatrixDescriptor((40, 40), (4, 4), pb.Grid.squarest(ctx.size), order="F")
        assert np.array_equal(pb.linalg.cholesky(ctx.eye(blocks)).allgather(), np.eye(40))
    for number, case in enumerate(CASES):
        for dtype in in_turn(TYPES, keep=4, first=number):
            with (
                panels_of(ctx, int(rng.integers(1, 9))),
                by_inverses(ctx, int(rng.integers(1, 5))),
                mock.patch.object(FactorKernels, "width", return_value=int(rng.integers(1, 4))),
            ):
                case(ctx, rng, dtype)


def ends(ctx: pb.Context, rng: np.random.Generator, gpu: Any) -> None:
    with panels_of(ctx, 4):
        empty(ctx, rng)
        failures(ctx, rng)
        least_squares_at_the_ends(ctx, rng, "complex64")
        without_full_rank(ctx, rng, "float32")
        refined_case(ctx, rng, "float64")
        refined_case(ctx, rng, "complex128")
        by_tf32(ctx, rng, gpu)
        for dtype in TYPES:
            conditions_case(ctx, rng, dtype)
            ranked_case(ctx, rng, dtype)
        one_right_hand_side(ctx)


def by_tf32(ctx: pb.Context, rng: np.random.Generator, gpu: Any) -> None:
    """A factorization in TF32 takes more steps; nothing else is computed in it, also after a failure."""
    whole = rng.standard_normal((24, 24)) + 6 * np.eye(24)
    right = rng.standard_normal((24, 2))
    a, b = (ctx.scatter(x, block=4) for x in (whole, right))
    x, info = pb.linalg.solve(a, b, refine="tf32", return_info=True)
    _, exact = pb.linalg.solve(a, b, refine="float32", return_info=True)
    close = np.allclose(whole @ x.allgather(), right, atol=1e-13) and not info.fallback
    assert close
    assert info.iterations > exact.iterations
    minus, words = ctx.eye(24, block=4) * -1.0, ["not positive definite"]
    refuses(ctx, pb.FactorizationError, words, pb.linalg.solve, minus, b, "pos", refine="tf32")
    assert not gpu.tf32, "no factors"


def one_right_hand_side(ctx: pb.Context) -> None:
    """Solutions computed where they are, or moved: of one and of several grids."""
    grids = pb.Grid(1, ctx.size), pb.Grid(1, 1), pb.Grid(ctx.size, 1)
    layouts = [pb.MatrixDescriptor((24, 1), (4, 4), grid, order="F") for grid in grids]
    a = ctx.from_function(
        lambda i, j: (i >= j) + 3.0 * (i == j), pb.MatrixDescriptor((24, 24), (4, 4), grids[0], order="F")
    )
    lower, right = a.allgather(), np.arange(1.0, 25)[:, None]
    for of_b, of_x in in_turn(itertools.product(layouts, (*layouts, None)), keep=3):
        b = ctx.scatter(right, of_b)
        x = pb.linalg.cho_solve((a, True), b, out=b if of_x is None else ctx.zeros(of_x)).allgather()
        near = np.allclose(lower @ (lower.T @ x), right)
        assert near, f"from {of_b.grid} to {of_x}: {x}"


@contextmanager
def by_inverses(ctx: pb.Context, width: int) -> Iterator[None]:
    """Solve triangles with more than ``width`` rows by inverses of such blocks; move triangles in narrow columns.

    With an odd ``width``, one kernel does all of a panel's step for few right-hand sides.
    """
    with (
        mock.patch.object(spread, "FEW", 4 * (width % 2)),
        mock.patch.object(factor, "_LEAF", 2 * width),
        mock.patch.object(ctx.engine.operations, "inverts", (width + 1, 1, 1)),
        mock.patch.object(workbench, "SLAB", 2 * width),
    ):
        yield


@pytest.mark.parametrize("half", ["cases", "ends"])
@pytest.mark.parametrize(("nranks", "per_node"), [(3, 1), (4, 2)])
def test_every_layout_between_nodes(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, nranks: int, per_node: int, half: str
) -> None:
    """Panels travel along process rows and columns."""
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", str(per_node))
    run_mpi(everything, nranks, path=stand_in(1000), half=half)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shifts", [(3, 3), (0.01, 0.01), (3, 0.01), (0.01, 3), (1e-13, 1e-13)])
def test_a_solve_by_inverses_is_as_accurate_as_lapack(
    lib: Any, ctx: Any, dtype: str, shifts: tuple[float, float]
) -> None:
    """Small shifts of the diagonal's first part, or of the rest, make its blocks ill-conditioned.

    If all are very small, a step of refinement is not enough.
    """
    rng, operations, eps = np.random.default_rng(5), ctx.engine.operations, np.finfo(dtype).eps
    above = np.triu(np.ones((19, 19), bool), 1)
    shift = np.diag(np.repeat(shifts, (8, 11)))
    with by_inverses(ctx, 4):
        for lower, unit, order, across in itertools.product((True, False), (True, False), "CF", "CF"):
            whole = np.array(factor_cases.random(rng, (19, 19), dtype) / 4 + shift, dtype, order=order)
            triangle = (np.tril if lower else np.triu)(whole)
            if unit:
                np.fill_diagonal(triangle, 1)
            whole[above if lower else above.T] = np.nan  # is not read
            b = factor_cases.random(rng, (19, 5), dtype).astype(dtype)
            x = ctx.engine.xp.asarray(np.array(b, order=across))
            operations.trsm(2, ctx.engine.xp.asarray(whole), x, lower=lower, unit=unit)
            found = np.asarray(x)
            error = abs(triangle @ found - 2 * b) / (abs(triangle) @ abs(found))
            assert error.max() < 20 * eps, (lower, unit, order, across)
    assert not lib.gpu.faults


def in_blocks(block: int, grid: pb.Grid | None = None) -> Any:
    """Return the layout of matrices in square blocks, by default in whole columns."""

    def layout(_: Any, shape: Any, size: int, dtype: str = "float64", **how: Any) -> Any:
        return pb.MatrixDescriptor(shape, (block, block), grid or pb.Grid(1, size), dtype=dtype, order="F")

    return layout


@on_ranks(3)
def test_where_they_are(comm: Any, path: str) -> None:
    """Matrices whose columns the ranks have whole: no element moves, whatever part of a block a panel is."""
    rng = np.random.default_rng(17)
    with context(path, Multiplying, comm=comm) as (ctx, lib):
        for turn, (block, width) in enumerate(((3, 3), (4, 2), (9, 3))):
            layout = in_blocks(block)
            with (
                mock.patch.object(factor_cases, "layout", layout),
                mock.patch.object(panel_shape, "ROUNDS", 0),
                panels_of(ctx, width),
            ):
                for number, case in in_turn(enumerate(CASES), keep=2, first=turn):
                    for dtype in in_turn(TYPES, keep=4, first=number + turn):
                        case(ctx, rng, dtype)
                n = min(27, 5 * block + 1)
                moves = moved(ctx, layout(None, (n, n), ctx.size))
                assert not moves, f"blocks of {block}"
        with panels_of(ctx, 2):  # so few wide blocks leave some ranks much more work than others
            moves = moved(ctx, in_blocks(4)(None, (44, 44), ctx.size))
            assert moves, "too few blocks: nothing moves"
        with panels_of(ctx, 8):
            d = pb.MatrixDescriptor((40, 40), (8, 8), pb.Grid(1, ctx.size), order="F")
            lower, b = pb.linalg.cholesky(ctx.eye(d)), ctx.zeros(d[:, :1])
            lib.gpu.events.clear()
            pb.linalg.cho_solve((lower, True), b)
            # a panel's rows travel once in each sweep, to the panel's rank, and from it to all
            counts = [len(lib.gpu.did(name)) for name in ("reduce", "broadcast", "all_reduce")]
            assert counts == [5, 5, 0], "messages"
            for leaf in (1, 2):
                with by_inverses(ctx, leaf):
                    solves_with_small_pivots(ctx, rng, d, leaf)


@on_ranks(4)
def test_on_process_rows(comm: Any, path: str) -> None:
    """Cholesky where several process rows have square blocks: ranks share panels, and no element moves."""
    rng = np.random.default_rng(18)
    grids = pb.Grid(comm.size, 1), pb.Grid(2, comm.size // 2, "col"), pb.Grid(comm.size // 2, 2)
    with (
        machine(path, Multiplying, comm=comm) as lib,
        mock.patch.object(panel_shape, "ROUNDS", 0),
        mock.patch.object(GpuFactorOperations, "shared_from", 0),
    ):
        with pb.Context(comm, engine="cublasmp") as ctx:
            blocks = (3, 3), (4, 2), (9, 3)
            for turn, (grid, (block, width)) in enumerate(zip(grids, blocks, strict=True)):
                layout = in_blocks(block, grid)
                with (
                    mock.patch.object(factor_cases, "layout", layout),
                    mock.patch.object(GpuFactorOperations, "shared_width", width),
                    panels_of(ctx, width),
                ):
                    for dtype in in_turn(TYPES, keep=4, first=turn):
                        with by_inverses(ctx, width):
                            factor_cases.cholesky_case(ctx, rng, dtype)
                    n = 5 * block + 1
                    whole = factor_cases.positive(rng, n, "complex128")
                    a = ctx.scatter(
                        factor_cases.only("L", whole), layout(None, (n, n), comm.size, dtype="complex128")
                    )
                    with (
                        mock.patch.object(ctx.engine, "prepare_move", wraps=ctx.engine.prepare_move) as moves,
                        mock.patch.object(
                            GridPanels, "potrf", autospec=True, side_effect=GridPanels.potrf
                        ) as shared,
                    ):
                        lower = pb.linalg.cholesky(a, out=a)
                    counts = moves.call_count, bool(shared.call_count)
                    assert counts == (0, True), f"{grid}, blocks of {block}"
                    values = lower.allgather()
                    found = np.tril(values)
                    error = factor_cases.relative(found @ found.conj().T - whole, whole, n, "complex128")
                    above = np.isnan(values[np.triu_indices(n, 1)]).all()
                    assert error < factor_cases.MOST, grid
                    assert above, grid
                    if grid is grids[1]:
                        with panels_of(ctx, min(width, 4)):
                            factor_cases.not_positive(ctx, rng)
        lib.assert_clean()
        lib.gpu.assert_clean()


def test_most_of_a_solve_is_in_large_products(lib: Any, ctx: Any) -> None:
    """One of half the order, two of a quarter, four of an eighth; eight triangles are left, each with its inverse."""
    n, columns, operations, xp = 64, 5, ctx.engine.operations, ctx.engine.xp
    for lower, unit, order in itertools.product((True, False), (True, False), "CF"):
        x = xp.asarray(np.ones((n, columns), order=order))
        with (
            by_inverses(ctx, 2),
            mock.patch.object(operations, "multiply_at", side_effect=operations.multiply_at) as multiply,
        ):
            operations.trsm(1, xp.asarray(np.eye(n)), x, lower=lower, unit=unit)
        sizes = Counter(tuple(sorted(call.args[2])) for call in multiply.mock_calls)
        assert sizes == {(5, 32, 32): 1, (5, 16, 16): 2, (5, 8, 8): 4 + 8}
        assert np.all(np.asarray(x) == 1)


@pytest.mark.parametrize(
    ("n", "columns", "unit", "by_products"),
    [(1024, 2, False, True), (1023, 128, False, False), (1024, 1, False, False), (1024, 4096, True, False),
     (2048, 128, True, True), (2048, 127, True, False), (256, 8192, False, True), (256, 8191, False, False),
     (255, 1 << 20, False, False)],
)  # fmt: skip
def test_which_solves_are_products(ctx: Any, n: int, columns: int, unit: bool, by_products: bool) -> None:
    a, x = (np.broadcast_to(1.0, shape) for shape in ((n, n), (n, columns)))
    with (
        mock.patch.object(factor_operations, "Halves") as halves,
        mock.patch.object(GpuOperations, "trsm") as trsm,
    ):
        ctx.engine.operations.trsm(1, a, x, lower=True, unit=unit)
    assert (halves.call_count, trsm.call_count) == (by_products, not by_products)


@pytest.mark.parametrize(
    ("n", "columns", "unit", "by_products"),
    [
        (256, 2048, False, True),
        (256, 2047, False, False),
        (255, 8192, False, False),
        (256, 8192, True, False),
    ],
)
def test_solves_that_are_prepared_are_products_from_fewer_unknowns_on(
    ctx: Any, n: int, columns: int, unit: bool, by_products: bool
) -> None:
    """Their inverses are made beside other work."""
    xp = ctx.engine.operations.xp
    a, x = xp.asarray(np.eye(n)), xp.asarray(np.ones((n, columns)))
    with mock.patch.object(factor_operations, "Halves") as halves:
        ctx.engine.operations.solver(a, x, lower=True, unit=unit)
    assert halves.call_count == by_products


@pytest.mark.parametrize(
    ("n", "columns", "unit", "order", "by_kernel"),
    [(512, 1024, True, "F", True), (513, 9, True, "F", False), (5, 1025, True, "F", False), (5, 9, False, "F", False),
     (5, 9, True, "C", False)],
)  # fmt: skip
def test_few_unknowns_with_a_diagonal_of_ones_are_substituted(
    ctx: Any, n: int, columns: int, unit: bool, order: Any, by_kernel: bool
) -> None:
    xp = ctx.engine.operations.xp
    a, x = (
        xp.asarray(np.asarray(values, order=order))
        for values in (np.tri(n), np.tri(n)[:, :1] * np.ones(columns))
    )
    with mock.patch.object(
        FactorKernels, "substitute", autospec=True, side_effect=FactorKernels.substitute
    ) as kernel:
        ctx.engine.operations.trsm(1, a, x, lower=True, unit=unit)
    assert kernel.call_count == by_kernel
    assert np.array_equal(np.asarray(x), np.eye(n)[:, :1] * np.ones(columns))


def test_a_block_that_substitutes_has_a_multiprocessor_alone(ctx: Any) -> None:
    operations = ctx.engine.operations
    a, x = (operations.xp.asarray(np.asfortranarray(np.eye(64))) for _ in range(2))
    with mock.patch.object(Kernel, "__call__") as launch:
        operations.trsm(1, a, x, lower=True, unit=True)
    assert launch.call_args.args[-1] == ctx.engine.session.runtime.shared_memory


def solves_with_small_pivots(ctx: pb.Context, rng: Any, d: pb.MatrixDescriptor, turn: int) -> None:
    """Few right-hand sides, by inverses of ill-conditioned triangles: as accurate as by substitution."""
    n, width = d.shape[0], d.block[1]
    panels = np.kron(np.eye(n // width), np.ones((width, width)))
    for dtype, op, columns in pairs(("float64", "complex64"), "NTC", (1, 2)):
        factors = np.array(factor_cases.random(rng, (n, n), dtype) / 4 * panels, dtype)
        np.fill_diagonal(factors, 0.05)
        lower, upper = (factor_cases.exact(each) for each in (np.tril(factors, -1), np.triu(factors)))
        np.fill_diagonal(lower, 1)
        left = [{"N": x, "T": x.T, "C": x.conj().T}[op] for x in (lower, upper)]
        left = left if op == "N" else left[::-1]
        b = (left[0] @ left[1] @ np.ones((n, columns))).astype(dtype)
        a, right = (
            ctx.scatter(values, replace(each, dtype=np.dtype(dtype)))
            for values, each in ((factors, d), (b, d[:, :columns]))
        )
        x = factor_cases.exact(pb.linalg.lu_solve((a, np.arange(n)), right, op).allgather())
        error = abs(left[0] @ (left[1] @ x) - b) / (abs(left[0]) @ (abs(left[1]) @ abs(x)))
        worst = error.max() / np.finfo(dtype).eps
        assert worst < 20, f"small pivots {dtype} {op} {columns}"


def moved(ctx: pb.Context, d: pb.MatrixDescriptor) -> int:
    """How often factorizations in place, and solves with their factors, move the matrix."""
    a, b = ctx.from_function(lambda i, j: 4.0 * (i == j), d), ctx.zeros(d[:, :1])
    with mock.patch.object(ctx.engine, "prepare_move", wraps=ctx.engine.prepare_move) as prepare:
        pb.linalg.cho_solve((pb.linalg.cholesky(a, out=a), True), b, out=b)
        pb.linalg.lu_solve(pb.linalg.lu_factor(a, out=a), b, out=b)
        pb.linalg.qr(a, out=a)
    return sum(call.args[0].shape == d.shape for call in prepare.call_args_list)


def test_the_first_factorization_may_be_in_a_thread_that_ends(ctx: Any) -> None:
    """CuPy destroys what it has of cuSOLVER for a thread when that ends."""
    a = ctx.eye(40, block=8)
    thread = threading.Thread(target=pb.linalg.cholesky, args=[a])
    thread.start()
    thread.join()
    assert (pb.linalg.cholesky(4 * a).allgather() == 2 * np.eye(40)).all()


def test_nothing_waits_for_a_panel(lib: Any, ctx: Any) -> None:
    """The host waits for the GPU as often for ten panels as for two."""
    waits = []
    for n in (8, 40):
        a = ctx.from_function(lambda i, j: 4.0 * (i == j), pb.MatrixDescriptor((n, n), (4, 4), pb.Grid(1, 1)))
        b = ctx.from_function(lambda i, j: 1.0 * i, pb.MatrixDescriptor((n, 1), (4, 4), pb.Grid(1, 1)))
        with panels_of(ctx, 4):
            for call in (
                pb.linalg.cholesky,
                pb.linalg.lu_factor,
                pb.linalg.qr,
                partial(pb.linalg.solve, b=b),
            ):
                call(a)
                lib.gpu.events.clear()
                lib.gpu.copies.clear()
                call(a)
                waits.append(len(lib.gpu.did("synchronize")) + lib.gpu.copies.count("asnumpy"))
    assert waits[:4] == waits[4:]
    assert all(waits)


def test_panels_that_are_not_needed_soon_are_updated_with_two_at_a_time(lib: Any, ctx: Any) -> None:
    a = ctx.from_function(lambda i, j: 4.0 * (i == j), pb.MatrixDescriptor((40, 40), (4, 4), pb.Grid(1, 1)))
    lib.gpu.events.clear()
    with panels_of(ctx, 4):
        pb.linalg.cholesky(a)
    counts = [sizes[2] for *_, sizes in lib.gpu.did("gemm")]
    # of 45 updates, one for each pair of panels, 9 are of the next panel, and 4 of the one after it with only one
    assert sorted(counts) == [4] * 13 + [8] * 16


@on_ranks(*only_long(1), 2)
def test_plans_count_the_panels(comm: Any, path: str) -> None:
    """Those of matrices that are computed elsewhere, and those that travel; few right-hand sides are everywhere."""
    n, width, linalg = 96, 16, pb.linalg
    plain = mock.patch.object(GpuFactorOperations, "inverts", (n + 1, 1, 1))
    leaves = mock.patch.object(
        factor, "_LEAF", width
    )  # inverses are small beside the panels of large matrices
    for name, order, columns in (
        ("cholesky", "F", 0), ("cholesky", "C", 0), ("lu_factor", "F", 0), ("solve", "F", 1), ("lstsq", "F", n),
        *only_long(("qr", "F", 0), ("inv", "C", 0), ("solve", "C", n)),
    ):  # fmt: skip
        with plain, leaves, context(path, Multiplying, comm=comm) as (ctx, _), panels_of(ctx, width):
            how: Any = {"block": width, "grid": pb.Grid(1, comm.size), "order": order}
            right = [ctx.random((n, columns), seed=2, **how)] if columns else []
            with pb.plan(getattr(linalg, name), 2.0 * n * ctx.eye((n, n), **how), *right) as plan:
                plan()
                arena = ctx.engine.session.runtime.arena
                kept, told = arena.held("operations") + arena.held("transport"), plan.workspace.device_bytes
                told -= 4 * WORKSPACE_BYTES
        assert kept <= told <= kept + 5 * 8 * n * width, f"{name}, {order}, {columns}: {told}, held {kept}"


@on_ranks(2)
def test_deliveries(comm: Any, path: str) -> None:
    """Which panels copy engines deliver: the same on every rank, in the order of the panels; NCCL sends the others."""
    sent: list[Any] = []

    def deliver(
        _: Any, stream: str, i: int, root: int, nbytes: int, beside: Any = (), *, start: int = 0
    ) -> None:
        sent.append((stream, i, start, root, nbytes, [size for _, size in beside]))

    with (
        machine(path, Multiplying, comm=comm, lt=FakeLt()) as lib,
        mock.patch.object(Deliveries, "deliver", deliver),
        pb.Context(comm, engine="cublasmp") as ctx,
        panels_of(ctx, 4),
    ):
        a = ctx.eye(pb.MatrixDescriptor((24, 24), (4, 4), pb.Grid(1, comm.size), order="F"))
        for least, count in ((0, 6), (8 * 4 * 10, 4), (1 << 30, 0)):  # two panels have as many rows
            sent.clear()
            lib.gpu.events.clear()
            with mock.patch.object(factor_panels_of_gpus, "LARGE_PANEL", least):
                pb.linalg.cholesky(a, out=a)
            sizes = [8 * 4 * (24 - 8 * (k // 2)) for k in range(count)]
            wanted = [
                ("ahead", k // 2 % 3, k % 2 * size, k % comm.size, size, [4, 16])
                for k, size in enumerate(sizes)
            ]
            by_nccl = len(lib.gpu.did("broadcast"))
            assert (sent, by_nccl) == (wanted, 3 * (6 - count)), f"{least}: {sent} {by_nccl}"
        empty = pb.linalg.qr(
            ctx.zeros(pb.MatrixDescriptor((5, 0), (4, 4), pb.Grid(1, comm.size), order="F"))
        ).q()
        assert empty.shape == (5, 0), "no panel"
        # panels are read two at a time, each only from the first one's diagonal on; the second sweep is upwards
        b = ctx.zeros(a.descriptor)
        lib.gpu.events.clear()
        with mock.patch.object(ctx.engine.operations, "trsm", side_effect=ctx.engine.operations.trsm) as trsm:
            pb.linalg.cho_solve((a, True), b, out=b)
        sizes = [nbytes for *_, nbytes in lib.gpu.did("broadcast") if nbytes >= 8 * 4 * 8]
        down = [8 * 4 * (24 - 8 * (k // 2)) for k in range(6)]
        found = sizes, [call.args[1].shape for call in trsm.mock_calls]
        assert found == (down + down[::-1], [(8, 8)] * 6), "strips"
        # of cuBLAS, a product for what is beside a panel, if anything is, and three for its unknowns; or one kernel
        for few, launches in ((0, 2 * (4 * 3 - comm.rank)), (4, 0)):
            b = ctx.zeros(a.descriptor[:, :1])
            lib.gpu.events.clear()
            with (
                mock.patch.object(spread, "FEW", few),
                mock.patch.object(
                    FactorKernels, "step", autospec=True, side_effect=FactorKernels.step
                ) as step,
            ):
                pb.linalg.cho_solve((a, True), b, out=b)
            counts = [len(lib.gpu.did(name)) for name in ("cuBLAS", "reduce", "broadcast")]
            wanted = [launches, 6, 6], 0 if few == 0 else 6
            found = counts, step.call_count
            assert found == wanted, f"launches, {few}"


SHARED_MEMORY = {
    "7.5": (64 << 10, (64, 64, 64, 32)),
    "8.0": (163 << 10, (128, 128, 128, 64)),
    "8.6, 8.9, 12.0": (99 << 10, (128, 64, 64, 64)),
    "9.0, 10.0": (227 << 10, (128, 128, 128, 64)),
}
"""By compute capability, the bytes that a block of threads can have, and how wide blocks are inverted, by type."""


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize(
    ("number", "dtype"), list(enumerate(("float32", "float64", "complex64", "complex128")))
)
def test_what_a_block_of_threads_needs_fits_every_gpu(
    alone: None, stand_in: Any, number: int, dtype: str, capability: str
) -> None:
    """Large triangles are solved, by blocks as wide as the GPU has room for."""
    room, leaves = SHARED_MEMORY[capability]
    with context(stand_in(1000), shared_memory=room) as (ctx, _):
        operations, rng, n = ctx.engine.operations, np.random.default_rng(8), 150
        assert operations.kernels.leaf(np.dtype(dtype)) == leaves[number]
        operations.inverts = n, 1, 1
        lower = factor_cases.random(rng, (n, n), dtype) / n + 2 * np.eye(n)
        b = factor_cases.random(rng, (n, 3), dtype).astype(dtype)
        x = ctx.engine.xp.asarray(b.copy(order="F"))
        operations.trsm(
            1, ctx.engine.xp.asarray(np.array(lower, dtype, order="F")), x, lower=True, unit=False
        )
        assert np.allclose(np.tril(lower) @ np.asarray(x), b, atol=1e-4)


@on_ranks(2)
def test_little_shared_memory(comm: Any, path: str) -> None:
    """Few right-hand sides; and panels with more rows than all multiprocessors together hold a column of."""
    room, _ = SHARED_MEMORY["8.6, 8.9, 12.0"]
    with context(path, Multiplying, comm=comm, shared_memory=room) as (ctx, _):
        n = 40
        a = factor_cases.positive(np.random.default_rng(9), n, "float64")
        right = np.ones((n, 1))
        d = pb.MatrixDescriptor((n, n), (8, 8), pb.Grid(1, comm.size), order="F")
        lower = pb.linalg.cholesky(ctx.scatter(a, d))
        x = pb.linalg.cho_solve((lower, True), ctx.scatter(right, block=8)).allgather()
        assert np.allclose(a @ x, right), "few right-hand sides: wrong numbers"
    with context(path, Multiplying, comm=comm) as (ctx, _):
        most = ctx.engine.operations.tallest(np.dtype("float32"))
        words = [f"{most + 1} rows: these GPUs factor {most} at most, of float32"]
        for call in (pb.linalg.qr, pb.linalg.lu_factor):
            call(ctx.random((most, 2), seed=1, dtype="float32", block=(256, 1)))
            tall = ctx.random((most + 1, 2), seed=1, dtype="float32", block=(256, 1))
            refuses(ctx, pb.UnsupportedError, words, call, tall)
        wide, b = ctx.random((2, most + 1), seed=1, dtype="float32"), ctx.full((2, 1), 1, dtype="float32")
        refuses(ctx, pb.UnsupportedError, words, pb.linalg.lstsq, wide, b)


@pytest.mark.parametrize(("shared_memory", "multiprocessors"), [(232448, 132), (101376, 84), (166912, 108)])
def test_panels_of_lu_fit_into_registers_and_multiprocessors(shared_memory, multiprocessors):
    kernels = FactorKernels(None, shared_memory, multiprocessors)
    for dtype in map(np.dtype, TYPES):
        tallest = kernels.tallest(dtype)
        for rows in (1, 383, 385, 5000, 16384, 50_000, 65_537, 400_000, tallest):
            widest = kernels.width("lu", min(rows, tallest), dtype)
            for cols in {1, widest // 2 + 1, widest}:
                blocks, each = kernels._blocks("lu", min(rows, tallest), cols, dtype)
                assert blocks <= multiprocessors
                a_thread = -(-each // factor._ROWS)
                held = (1 << (a_thread - 1).bit_length()) * (1 << (cols - 1).bit_length()) * dtype.itemsize
                assert held <= factor._REGISTERS


@pytest.mark.parametrize(("routine", "hosts", "n", "grid"), [
    ("cholesky", 2, 65536, None), ("cholesky", 4, 2048, None), ("cholesky", 4, 8192, (2, 2)),
    ("cholesky", 16, 16384, (4, 4)), ("cholesky", 16, 1024, None), ("lu", 2, 65536, None),
    ("lu", 4, 8192, None), ("lu", 4, 50_000, (2, 2)), ("lu", 16, 50_000, (4, 4)), ("lu", 1024, 50_000, (32, 32)),
])  # fmt: skip
def test_large_matrices_have_panels_in_two_dimensions_on_more_than_two_hosts(
    routine: str, hosts: int, n: int, grid: tuple[int, int] | None
) -> None:
    """A rank gets less then, and nothing is moved, but it waits more often, of LU twice as often."""
    found = shape_between(hosts, routine, n, 512)
    assert (found.grid and found.grid.shape) == grid


@pytest.mark.parametrize(("routine", "hosts", "n", "block", "width"), [
    ("lu", 16, 50_000, 128, 128), ("lu", 64, 50_000, 128, 128), ("lu", 256, 50_000, 256, 256),
    ("cholesky", 64, 12_800, 128, 512), ("cholesky", 64, 12_800, 64, 512),
    ("cholesky", 16, 50_000, 64, 64), ("cholesky", 256, 50_000, 64, 256), ("lu", 1024, 50_000, 128, 128),
])  # fmt: skip
def test_blocks_of_128_are_panels_if_waiting_for_them_costs_little(
    routine: str, hosts: int, n: int, block: int, width: int
) -> None:
    """Then nothing is moved. Few wide panels leave some ranks much more of the matrix than others.

    From an order of 40,000 on no rank gets much more than it needs, and blocks of 64 may stay.
    """
    assert shape_between(hosts, routine, n, block).width == width


def shape_between(hosts: int, routine: str, n: int, block: int) -> panel_shape.PanelShape:
    """The panels of a matrix on the squarest grid of hosts of one GPU each."""
    nodes = tuple((rank,) for rank in range(hosts))
    transport = SimpleNamespace(size=hosts, domains=nodes, nodes=nodes)
    operations = SimpleNamespace(
        own_panels=QueuedPanels,
        panel_width=lambda n: 512 if n < 40_000 else 1024,
        factor_wait=GpuFactorOperations.factor_wait,
    )
    engine: Any = SimpleNamespace(operations=operations, transport=transport)
    d = pb.MatrixDescriptor((n, n), (block, block), pb.Grid.squarest(hosts), order="F")
    return panel_shape.shape_of(engine, d, routine)
