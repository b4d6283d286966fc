# SPDX-License-Identifier: Apache-2.0
"""Products of slabs in narrow types: what is added up is rounded once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm.communicator import _Serial
from pblasmp.engines.host.operations import HostOperations


@pytest.mark.parametrize(("dtype", "large"), [(np.float16, 2048), (ml_dtypes.bfloat16, 256)])
@pytest.mark.parametrize("follows", ["panels", "bias"])
def test_what_is_added_up_is_rounded_once(dtype, large, follows, monkeypatch):
    """The type has no odd numbers above ``large``: 1 and 1 count together, one after the other neither does."""
    monkeypatch.setattr(HostOperations, "panel", 1 if follows == "panels" else 1024)

    def matrix(ctx, values):
        d = pb.MatrixDescriptor(np.shape(values), np.shape(values), pb.Grid(1, 1), dtype=np.dtype(dtype).name)
        return ctx.scatter(np.array(values, dtype), d)

    with pb.Context(_Serial(), engine="host") as ctx:
        b = matrix(ctx, [[1], [1], [1]])
        if follows == "panels":
            d = pb.matmul(matrix(ctx, [[large, 1, 1]]), b, algo="panels")
        else:
            bias = pb.Epilogue(bias=np.ones(1, dtype))
            d = pb.matmul(matrix(ctx, [[large, 1, 0]]), b, algo="panels", epilogue=bias)
        assert d.local.tolist() == [[large + 2]]
