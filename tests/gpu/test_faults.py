# SPDX-License-Identifier: Apache-2.0
"""Known faults of cuBLASMp: each is shown to be still there, and shown to be avoided."""

from __future__ import annotations

import pblasmp as pb
from pblasmp.engines.cublasmp import faults

from .products import everywhere, integers, place, poisoned, wrong


def nt_product(ctx: pb.Context) -> tuple[str, pb.MatmulProblem]:
    """Multiply op N by op T with unequal blocks; return what is wrong with the result."""
    p = pb.MatmulProblem.gemm(
        256, 192, 320, pb.Grid.squarest(ctx.size), (32, 48, 64), op_b="T", dtype="float64", order="F"
    )
    values = [integers(x.shape, x.dtype, i) for i, x in enumerate((p.a, p.b))]
    a, b = (place(ctx, v, x) for v, x in zip(values, (p.a, p.b), strict=True))
    out = poisoned(ctx, p.d)
    pb.matmul(a, b, out=out, op_b="T")
    return everywhere(ctx, wrong(ctx, out, values[0] @ values[1].T)), p


def test_nt_with_unequal_blocks_is_right(ctx):
    fault, _ = nt_product(ctx)
    assert fault == ""


def test_nt_with_unequal_blocks_is_still_wrong_without_the_guard(ctx, monkeypatch):
    """When this fails, the library has been mended: narrow the guard to the versions that need it."""
    p = nt_product(ctx)[1]
    guarded = faults.nt_is_wrong(ctx.engine.version, p.column_major())
    monkeypatch.setattr(faults, "nt_is_wrong", lambda *_: False)
    fault, _ = nt_product(ctx)
    assert (fault != "") == guarded, f"version {ctx.engine.version}: {fault or 'right'}"
