# SPDX-License-Identifier: Apache-2.0
"""A graph holds addresses: once memory behind one of them has been replaced, it may not run."""

from __future__ import annotations

from typing import Any

import pytest

import pblasmp as pb
from tests.helpers.fakelt import FakeLt
from tests.helpers.machine import Multiplying

D = pb.MatrixDescriptor((8, 8), (4, 4), pb.Grid(1, 1))

OTHER = pb.MatrixDescriptor((8, 8), (4, 4), pb.Grid(1, 1), order="F")


@pytest.fixture
def played() -> dict[str, Any]:
    return {"kind": Multiplying, "lt": FakeLt()}


def replace_workspace(ctx, lib):
    """Run a product of cuBLASMp that needs a larger workspace than those before."""
    lib.workspace = tuple(2 * nbytes for nbytes in lib.workspace)
    with pb.plan(pb.matmul, ctx.zeros(D), ctx.zeros(D), algo="default") as plan:
        plan()


def test_a_routine_in_steps_holds_cublasmp_s_workspace(ctx, lib):
    """``full`` fills A and multiplies it by cuBLASMp, whose workspace is in the graph of the whole."""
    with pb.plan(pb.blas.symm, ctx.zeros(D), ctx.zeros(D), algo="full") as plan:
        graph = plan.graph()
        assert lib.of("Matmul"), "a product of another library stands for cuBLASMp's"
        with pb.plan(pb.matmul, ctx.zeros(OTHER), ctx.zeros(OTHER), algo="default") as elsewhere:
            elsewhere()  # the first workspace of another grid replaces nothing
        graph.replay()
        replace_workspace(ctx, lib)
        with pytest.raises(pb.ClosedError, match="the workspace has been replaced"):
            graph.replay()
        plan.graph().replay()


def test_a_product_of_moved_operands_holds_cublasmp_s_workspace(ctx, lib, monkeypatch):
    a, b = ctx.zeros(OTHER), ctx.zeros(pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid(1, 1)))
    with pb.plan(pb.matmul, a, b, out=ctx.zeros(D), algo="default") as plan:
        graph = plan.graph()
        assert plan.report().moved
        graph.replay()
        replace_workspace(ctx, lib)
        with pytest.raises(pb.ClosedError, match="the workspace has been replaced"):
            graph.replay()
