# SPDX-License-Identifier: Apache-2.0
"""Moves between layouts: the arguments of cublasMpGemr2D, what is copied on the way, and what goes another way."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.bindings import Status
from pblasmp.engines.gpu.cublasmp import faults, move
from pblasmp.engines.gpu.cublasmp.prepared_call import part_mask
from pblasmp.layout import Trapezoid
from pblasmp.matrix import reductions
from tests.helpers.failing_calls import calls_that_failed
from tests.helpers.fakelt import FakeLt
from tests.helpers.gpu.moves import one_move
from tests.helpers.machine import Multiplying, Witness, context
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import draws, only_long

D = pb.MatrixDescriptor((6, 8), (2, 3), pb.Grid(1, 1), dtype="float32", order="F")


@on_ranks(*only_long(2), 4, seeds=draws(30, long=150))
def test_random_moves(comm: Any, path: str, seeds: int) -> None:
    ways: set[str] = set()
    with context(path, Multiplying, comm=comm) as (ctx, _):
        for seed in range(seeds):
            way, fault = one_move(ctx, seed)
            ways.add(way)
            assert not fault, f"seed {seed}"
    assert not {"by a local copy", "by cublasMpGemr2D", "by cublasMpGemr2D, through a temporary"} - ways


@pytest.fixture
def travels(monkeypatch):
    """On one process every element stays on its rank: in tests that ask for this, it travels nevertheless."""
    monkeypatch.setattr(move, "stays", lambda *_: False)


@pytest.mark.parametrize(
    "change", [{"order": "C"}, {"dtype": "float64"}, {"order": "C", "dtype": "complex64"}]
)
@pytest.mark.usefixtures("travels")
def test_another_order_or_type_is_a_temporary_s(alone, stand_in, change):
    with context(stand_in(1000), Multiplying) as (ctx, lib):
        x, target = ctx.empty(D), replace(D, block=(6, 8), **change)
        x.local[...] = values = np.arange(48.0).reshape(6, 8)
        del lib.gpu.allocations[:]
        assert np.array_equal(x.redistribute(target).local, values)
        (call,) = lib.of("Gemr2D")
        assert call["a"] != x.local.ctypes.data
        assert lib.gpu.allocations == [target.nbytes] * 2  # the result and the temporary
    lib.assert_clean()


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


@pytest.mark.parametrize(
    ("where", "name", "way"), [(faults, "moves_unseen", "by NCCL"), (move, "copies", "by copy engines")]
)
@pytest.mark.usefixtures("travels")
def test_by_our_own_exchange(ctx, lib, monkeypatch, where, name, way):
    """Where cuBLASMp has not been seen to move, and where GPUs reach each other; the report says so, too."""
    monkeypatch.setattr(where, name, lambda *_: True)
    x = ctx.empty(D)
    x.local[...] = values = np.arange(48.0).reshape(6, 8)
    lib.clear()
    assert np.array_equal(x.redistribute(replace(D, block=(6, 8), order="C", dtype="float64")).local, values)
    assert not lib.calls
    with pb.plan(pb.matmul, x.T, ctx.empty(replace(D, block=(4, 3))), algo="default") as plan:
        (line,) = plan.report().moved
        assert line.endswith(way)
    assert "asnumpy" not in lib.gpu.copies


@on_ranks(2)
def test_messages_in_one_piece_are_not_packed(comm: Any, path: str) -> None:
    """All that a rank has goes to another one by NCCL: from where it is, and to where it belongs unless converted."""
    with context(path, Multiplying, comm=comm) as (ctx, lib), pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "moves_unseen", lambda *_: True)
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


def test_which_gpus_reach_each_other():
    gpus = [SimpleNamespace(why_no_windows=why) for why in ("", "there are several domains")]
    assert [move.copies(SimpleNamespace(gpu=gpu)) for gpu in gpus] == [True, False]


@pytest.mark.usefixtures("travels")
def test_a_plan_s_moves_are_prepared_once(alone, stand_in):
    with context(stand_in(1000), Multiplying) as (ctx, lib):
        a, b = ctx.empty(D), ctx.empty(replace(D, shape=(8, 4), block=(2, 2)))
        a.local[...], b.local[...] = np.arange(48.0).reshape(6, 8), 2
        other, padded = ctx.empty(b.descriptor), ctx.empty(replace(b.descriptor, ld=11))
        other.local[...] = 3
        with pb.plan(pb.matmul, a, b, algo="default") as plan:
            copy = 8 * 4 * 4  # of B, in the layout that it is moved to
            assert (plan.workspace.device_bytes, plan.workspace.host_bytes) == (4096 + copy, 512)
            (line,) = plan.report().moved
            assert line == f"b is moved to {replace(b.descriptor, block=(3, 2))}, by cublasMpGemr2D"
            prepared = len(lib.of("Gemr2D_bufferSize"))
            assert np.array_equal(plan().local, a.local @ b.local)
            assert np.array_equal(plan(b=other).local, a.local @ other.local)
            foreign = ctx.from_local(padded.local, b.descriptor)  # the same layout, in memory that is padded
            with pytest.raises(pb.ArgumentError, match=r"b: the local array has strides"):
                plan(b=foreign)
            assert [len(lib.of(f"Gemr2D{name}")) for name in ("", "_bufferSize")] == [2, prepared]
    lib.assert_clean()
    lib.gpu.assert_clean()


def moving_plan(ctx: pb.Context, a: Any, b: Any) -> Any:
    """A plan of cuBLASMp's that moves B."""
    return pb.plan(pb.matmul, a, b, algo="default")


@pytest.mark.usefixtures("travels")
def test_a_plan_that_moves_operands_by_cublasmp_is_no_graph(alone, stand_in):
    """On real GPUs cublasMpGemr2D invalidates the recording."""
    with context(stand_in(1000), Multiplying, lt=FakeLt()) as (ctx, lib):
        a, b = ctx.zeros(D), ctx.zeros(replace(D, shape=(8, 4), block=(2, 2)))
        with moving_plan(ctx, a, b) as plan:
            with pytest.raises(pb.UnsupportedError, match="cublasMpGemr2D cannot be recorded"):
                plan.graph()
            plan()
    lib.assert_clean()


def life(_: Witness, comm: Any = None) -> None:
    """A move by itself, and those of a plan: of an operand and of the result."""
    ctx = pb.Context(comm, engine="cublasmp")
    try:
        d = replace(D, grid=pb.Grid(1, ctx.size), order="C")
        x, out = ctx.empty(d), ctx.empty(replace(d, shape=(7, 6)))
        x.redistribute(replace(D, block=(6, 8)))
        with pb.plan(pb.matmul, ctx.empty(D), x.T, out=out[1:, :], algo="default") as plan:
            plan()
    finally:
        ctx.close()


@pytest.mark.usefixtures("travels")
def test_every_call_failing(alone, stand_in):
    calls = calls_that_failed(life, stand_in(1000), len(Status) - 1)
    assert calls.count("cublasMpGemr2D") == 3


@pytest.mark.parametrize(("of", "to"), [("float8_e4m3fn", "float32"), ("float64", "float8_e5m2")])
def test_a_copy_of_what_is_converted_is_in_the_workspace(ctx, of, to):
    """In bytes, which travel."""
    x = ctx.empty(replace(D, dtype=of))
    d = replace(D, dtype=to, block=(5, 8))
    move = ctx.engine.prepare_move(x.descriptor, d, (x.local, ctx.empty(d).local), None)
    assert move.path.endswith(", converting 8-bit floats")
    assert move.workspace.device_bytes == 6 * 8
    move.close()
