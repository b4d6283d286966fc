# SPDX-License-Identifier: Apache-2.0
"""Moves between layouts: what is copied on the way, and how moves of plans are prepared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.cublasmp.prepared_call import part_mask
from pblasmp.engines.gpu.gpu_engine import GpuEngine
from pblasmp.layout import Trapezoid
from pblasmp.matrix import reductions
from tests.helpers.machine import Multiplying, context
from tests.helpers.mpi import on_ranks

D = pb.MatrixDescriptor((6, 8), (2, 3), pb.Grid(1, 1), dtype="float32", order="F")


@pytest.fixture
def travels(monkeypatch):
    """On one process every element stays on its rank: in tests that ask for this, it travels nevertheless."""
    monkeypatch.setattr(pb.MatrixDescriptor, "same_places", lambda *_: False)


@pytest.mark.parametrize("order", "CF")
def test_masks_of_triangles_have_the_order_of_what_they_mask(ctx, monkeypatch, order):
    """A GPU reads another order many times as slowly: masks of moves, and of norms with what they count."""
    d = replace(D, shape=(8, 8), order=order, ld=None)
    for uplo, expected in (("L", np.tril), ("U", np.triu)):
        mask = part_mask(Trapezoid(uplo), d, 0)
        assert mask.flags[f"{order}_CONTIGUOUS"]
        assert np.array_equal(mask, expected(np.ones((8, 8), bool)))
    a, seen = ctx.empty(d), []
    a.local[...] = np.arange(64.0).reshape(8, 8)
    kind = reductions.stored
    monkeypatch.setattr(reductions, "stored", lambda xp, *given: seen.append(given[0]) or kind(xp, *given))
    assert a.norm("inf", uplo="L", kind="hermitian") == 476.0
    assert len(seen) == 2
    assert all(each.flags.c_contiguous for each in seen)  # as masks of rows and columns are


@pytest.mark.usefixtures("travels")
def test_by_messages(ctx, lib):
    """Where GPUs do not reach each other; the report says so, too."""
    x = ctx.empty(D)
    x.local[...] = values = np.arange(48.0).reshape(6, 8)
    lib.clear()
    assert np.array_equal(x.redistribute(replace(D, block=(6, 8), order="C", dtype="float64")).local, values)
    assert not lib.calls
    with pb.plan(pb.matmul, x.T, ctx.empty(replace(D, block=(4, 3))), algo="default") as plan:
        (line,) = plan.report().moved
        assert line.endswith("by NCCL")
    assert "asnumpy" not in lib.gpu.copies


@on_ranks(2)
def test_messages_in_one_piece_are_not_packed(comm: Any, path: str) -> None:
    """All that a rank has goes to another one by NCCL: from where it is, and to where it belongs unless converted."""
    with context(path, Multiplying, comm=comm) as (ctx, lib):
        for of, to, waiting in (
            ("float32", "float32", 0),
            ("float32", "float64", 4),
            ("float64", "float32", 8),
        ):
            d = pb.MatrixDescriptor((4, 6), (2, 6), pb.Grid(2, 1), dtype=of)
            x = ctx.from_function(lambda i, j: 10 * i + j, d)
            lib.gpu.allocations.clear()
            moved = x.redistribute(replace(d, source=(1, 0), dtype=to))
            assert sum(lib.gpu.allocations) == moved.local.nbytes + 12 * waiting
            rows = [[10 * i + j for j in range(6)] for i in range(4)]
            assert np.array_equal(moved.local, rows[2:] if ctx.rank == 0 else rows[:2])


@pytest.mark.usefixtures("travels")
def test_a_plan_s_moves_are_prepared_once(alone, stand_in, monkeypatch):
    with context(stand_in(1000), Multiplying) as (ctx, lib):
        a, b = ctx.empty(D), ctx.empty(replace(D, shape=(8, 4), block=(2, 2)))
        a.local[...], b.local[...] = np.arange(48.0).reshape(6, 8), 2
        other, padded = ctx.empty(b.descriptor), ctx.empty(replace(b.descriptor, ld=11))
        other.local[...] = 3
        with pb.plan(pb.matmul, a, b, algo="default") as plan:
            copy = 8 * 4 * 4  # of B, in the layout that it is moved to
            assert (plan.workspace.device_bytes, plan.workspace.host_bytes) == (4096 + copy, 512)
            (line,) = plan.report().moved
            assert line == f"b is moved to {replace(b.descriptor, block=(3, 2))}, by NCCL"
            monkeypatch.setattr(GpuEngine, "prepare_move", mock.Mock(side_effect=AssertionError))
            assert np.array_equal(plan().local, a.local @ b.local)
            assert np.array_equal(plan(b=other).local, a.local @ other.local)
            padded.local[...] = 5
            foreign = ctx.from_local(padded.local, b.descriptor)  # the same layout, in memory that is padded
            assert np.array_equal(plan(b=foreign).local, a.local @ padded.local)
    lib.assert_clean()
    lib.gpu.assert_clean()


@pytest.mark.parametrize(("of", "to"), [("float8_e4m3fn", "float32"), ("float64", "float8_e5m2")])
def test_a_copy_of_what_is_converted_is_in_the_workspace(ctx, of, to):
    """In bytes, which travel."""
    x = ctx.empty(replace(D, dtype=of))
    d = replace(D, dtype=to, block=(5, 8))
    move = ctx.engine.prepare_move(x.descriptor, d, (x.local, ctx.empty(d).local), None)
    assert move.path.endswith(", converting 8-bit floats")
    assert move.workspace.device_bytes == 6 * 8
    move.close()
