# SPDX-License-Identifier: Apache-2.0
"""AllGather + GEMM, GEMM + ReduceScatter, GEMM + AllReduce on GPUs: every op, type, order and algorithm."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.gpu.products import OPS, everywhere, integers, place, poisoned, wrong
from tests.helpers.schemes import AG, AR, MAKERS, RS

TYPES = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
ALGORITHMS = ("auto", "default", "no_overlap", "split_p2p")


def ops_of(scheme: str, order: str) -> list[tuple[str, str]]:
    if scheme == AR:
        return [("T", "N") if order == "F" else ("N", "T")]
    return list(itertools.product("NT", repeat=2))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("scheme", [AG, RS, AR])
def test_schemes_are_right(ctx, scheme, order, dtype):
    faults = []
    for (op_a, op_b), algo in itertools.product(ops_of(scheme, order), ALGORITHMS):
        for m, n, k in ((64, 128, 256), (512, 256, 1024)):
            p = MAKERS[scheme](m, n, k, ctx.size, op_a, op_b, dtype=dtype, order=order)
            p.validate()
            values = [integers(x.shape, x.dtype, i, 1) for i, x in enumerate((p.a, p.b))]
            a, b = (place(ctx, v, x) for v, x in zip(values, (p.a, p.b), strict=True))
            out = poisoned(ctx, p.d)
            if algo == "no_overlap" and ctx.engine.version < 700:
                continue
            try:
                pb.matmul(a, b, out=out, op_a=op_a, op_b=op_b, scheme=scheme, algo=algo)
            except pb.StatusError:
                if algo == "split_p2p":  # which the library does not have for every type
                    continue
                raise
            expected = OPS[op_a](values[0]) @ OPS[op_b](values[1])
            if scheme == AR:
                expected = np.tile(expected, (1, ctx.size) if order == "F" else (ctx.size, 1))
            fault = everywhere(ctx, wrong(ctx, out, expected, 2.0**-6 if p.d.dtype.itemsize == 2 else 0))
            if fault:
                faults.append(f"{scheme} {op_a}{op_b} {order} {algo} {m}x{n}x{k}: {fault}")
    assert not faults, "\n".join(faults)
