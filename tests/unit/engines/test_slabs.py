# SPDX-License-Identifier: Apache-2.0
"""Products of slabs in narrow types: what is added up is rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm.choice import Serial
from pblasmp.engines.host.host_operations import HostOperations
from pblasmp.engines.local.panels import Panels, cut


@pytest.mark.parametrize(("dtype", "large"), [(np.float16, 2048), (ml_dtypes.bfloat16, 256)])
@pytest.mark.parametrize("follows", ["panels", "bias"])
def test_what_is_added_up_is_rounded_once(dtype, large, follows, monkeypatch):
    """The type has no odd numbers above ``large``: 1 and 1 count together, one after the other neither does."""
    monkeypatch.setattr(HostOperations, "panel", 1 if follows == "panels" else 1024)

    def matrix(ctx, values):
        d = pb.MatrixDescriptor(np.shape(values), np.shape(values), pb.Grid(1, 1), dtype=np.dtype(dtype).name)
        return ctx.scatter(np.array(values, dtype), d)

    with pb.Context(Serial(), engine="host") as ctx:
        b = matrix(ctx, [[1], [1], [1]])
        if follows == "panels":
            d = pb.matmul(matrix(ctx, [[large, 1, 1]]), b, algo="panels")
        else:
            bias = pb.Epilogue(bias=np.ones(1, dtype))
            d = pb.matmul(matrix(ctx, [[large, 1, 0]]), b, algo="panels", epilogue=bias)
        assert d.local.tolist() == [[large + 2]]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("lead", [0, 2, 3])
def test_panels_cover_k_once_and_the_first_is_short_where_much_follows(lead, backwards):
    for k in range(30):
        panels = cut(k, 5, lead, backwards=backwards)
        widths = [stop - start for start, stop in panels]
        assert [i for start, stop in sorted(panels) for i in range(start, stop)] == list(range(k))
        assert panels == sorted(panels, reverse=backwards)
        assert max(widths, default=0) <= 5
        assert (widths[:1] == [lead]) == (0 < 4 * lead <= k or widths[:1] == [lead] == [k])


@pytest.mark.parametrize("uplo", ["L", "U"])
@pytest.mark.parametrize("side", ["L", "R"])
def test_a_triangular_product_begins_where_most_is_multiplied(side, uplo, monkeypatch):
    monkeypatch.setattr(HostOperations, "panel", 5)
    monkeypatch.setattr(HostOperations, "lead", 2)
    rng = np.random.default_rng(1)
    d = pb.MatrixDescriptor((17, 17), (4, 4), pb.Grid(1, 1), dtype="float64")
    x, y = rng.integers(-3, 4, (2, 17, 17)).astype(float)
    counts = np.tri(17, dtype=bool) if uplo == "L" else np.tri(17, dtype=bool).T
    stored = np.where(counts, x, 0)
    expected = stored @ y if side == "L" else y @ stored
    begun: list[tuple[int, int]] = []
    real = Panels.arrive
    monkeypatch.setattr(Panels, "arrive", lambda panels, arrays: _seen(real(panels, arrays), begun))
    memory = []
    with pb.Context(Serial(), engine="host") as ctx:
        a, b = ctx.scatter(np.where(counts, x, np.nan), d), ctx.scatter(y, d)  # the rest of A is not read
        for out in (ctx.empty(d), b):
            with pb.plan(pb.blas.trmm, a, b, side=side, uplo=uplo, out=out, algo="panels") as plan:
                assert np.array_equal(plan().gather(), expected)
                memory.append(plan.workspace.host_bytes)
                out.local[...] = y  # the same plan, into B from now on
                assert np.array_equal(plan(b=out).gather(), expected)
            assert begun[0] == ((0, 2) if (side == "L") == (uplo == "L") else (15, 17))
            begun.clear()
    assert memory[1] - memory[0] == 17 * 17 * 8  # B is read to the end: the sum is made elsewhere


def _seen(panels: Any, begun: list[tuple[int, int]]) -> Iterator[Any]:
    for panel in panels:
        begun.append(panel[:2])
        yield panel
