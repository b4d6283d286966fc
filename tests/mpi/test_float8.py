# SPDX-License-Identifier: Apache-2.0
"""8-bit floats on the host engine, which emulates them: every combination of types and schemes; what is refused."""

import ml_dtypes
import numpy as np

import pblasmp as pb
from tests.helpers import float8
from tests.helpers.cases import check_matrix, refuses
from tests.helpers.mpi import needs_torch, on_ranks
from tests.helpers.pairs import pairs
from tests.helpers.slow import only_long


@on_ranks(1, 2, *only_long(4))
def test_every_combination_of_types(ctx):
    rng = np.random.default_rng(91)
    for scheme, types, order in pairs(*float8.FACTORS):
        p = float8.problem(scheme, ctx.size, types, order)
        float8.check_scaled(ctx, rng, p)
    for types in float8.TYPES:
        p = float8.problem("gemm", ctx.size, types, "C")
        float8.check_scaled(ctx, rng, p, beta=-2.0)
        float8.check_scaled(ctx, rng, p, activation="gelu")
        if types[2].startswith("float8"):
            float8.check_scaled(ctx, rng, p, overflow=True)


@on_ranks(1, 3)
def test_matrices_of_eight_bits(ctx, directory):
    """8-bit matrices are scattered, gathered, moved, saved and taken from bytes like others."""
    rng = np.random.default_rng(92)
    for name in (float8.E4, float8.E5):
        dtype = pb.dtypes.as_dtype(name)
        values = rng.standard_normal((48, 32)).astype(dtype)
        d = pb.MatrixDescriptor((48, 32), (5, 7), pb.Grid.squarest(ctx.size), dtype=name)
        x = ctx.scatter(values if ctx.rank == 0 else None, d)
        turned = x.redistribute(pb.MatrixDescriptor((48, 32), (16, 16), d.grid, dtype=name, order="F"))
        x.save(f"{directory}/{name}.npy")
        loaded = ctx.load(f"{directory}/{name}.npy", grid=d.grid, block=(5, 7), dtype=name)
        over = ctx.from_local(x.local.view(np.uint8), d)
        check_matrix(x, values, name)
        check_matrix(turned, values, name)
        check_matrix(loaded, values, name)
        check_matrix(over, values, name)
        assert np.array_equal(x.allgather(), values), name
        assert np.shares_memory(over.local, x.local), name  # fmt: skip
        filled = (0.25 * np.add.outer(np.arange(48), np.arange(32))).astype(dtype)
        check_matrix(ctx.from_function(lambda i, j: 0.25 * (i + j), d), filled, f"{name} filled")


@on_ranks(1, 2)
def test_what_is_refused(ctx):
    p = float8.problem("gemm", ctx.size, (float8.E4, float8.E4, "bfloat16"), "C")
    a, b = ctx.zeros(p.a), ctx.zeros(p.b)

    def refused(kind, words, scales):
        refuses(ctx, kind, words, pb.matmul, a, b, op_b="T", scales=scales)

    refused(pb.ArgumentError, ["scales: expected Scales, got float"], 2.0)
    refused(pb.ArgumentError, ["scales: d: only for an 8-bit D, D is bfloat16"], pb.Scales(d=2.0))
    sizes = [
        -(-shape[0] // 128) * 128 * (-(-shape[1] // 128) * 4)
        for shape in (x.descriptor.local_shape(ctx.rank) for x in (a, b))
    ]
    blocks = pb.Scales(*(np.zeros(size, np.uint8) for size in sizes), mode="block")
    words = ["takes this problem: scales of mode 'block' are for cuBLASMp on Blackwell GPUs"]
    refused(pb.UnsupportedError, words, blocks)
    refuses(ctx, pb.ArgumentError, ["8-bit operands have k contiguous"], pb.matmul, a, b)
    doubles = ctx.zeros(pb.MatrixDescriptor((16, 16), (16, 16), pb.Grid(1, 1)))
    refuses(
        ctx, pb.ArgumentError, ["scales: only for 8-bit operands, A is float64"],
        pb.matmul, doubles, doubles, scales=pb.Scales(a=2.0))  # fmt: skip
    if ctx.size > 1:
        unlike = pb.Scales(a=1.0 + ctx.rank)
        refused(pb.RankMismatchError, ["a: 1.0", "a: 2.0"], unlike)


@on_ranks(2)
def test_each_run_reads_the_scales(ctx):
    """Scales in arrays are read by each run, and D is bfloat16 by default."""
    p = float8.problem("gemm", ctx.size, (float8.E4, float8.E4, "bfloat16"), "C")
    a, b = ctx.from_function(lambda i, j: np.ones((i.size, j.size)), p.a), ctx.zeros(p.b)
    b.local[...] = 1
    unit = np.ones(1, np.float32)
    with pb.plan(pb.matmul, a, b, op_b="T", scales=pb.Scales(a=unit)) as plan:
        for value in (1.0, 0.5, 4.0):
            unit[0] = value
            d = plan()
            assert (d.local == ml_dtypes.bfloat16(value * p.k)).all(), f"{value}: {d.local}"
            assert d.dtype == ml_dtypes.bfloat16, f"{value}"


@needs_torch
@on_ranks(2)
def test_tensors_of_pytorch(ctx):
    """PyTorch's, of types that NumPy does not know: in place, as matrices, biases and scales."""
    import torch

    p = float8.problem("gemm", ctx.size, (float8.E4, float8.E4, "bfloat16"), "C")
    ones = [torch.ones(x.local_shape(ctx.rank)).to(torch.float8_e4m3fn) for x in (p.a, p.b)]
    a, b = (ctx.from_local(tensor, x) for tensor, x in zip(ones, (p.a, p.b), strict=True))
    bias = torch.full(p.d.local_shape(ctx.rank)[1:], 3.0).to(torch.bfloat16)
    scales = pb.Scales(a=torch.full((1,), 0.5))
    out = ctx.empty(p.d)
    with pb.plan(pb.matmul, a, b, op_b="T", out=out, epilogue=pb.Epilogue(bias=bias), scales=scales) as plan:
        for value in (3.0, -1.0):
            bias.fill_(value)
            assert not (plan().local.astype(float) != 0.5 * p.k + value).any(), f"{value}"
    other = [torch.float8_e5m2, "local array: dtype is float8_e5m2, expected float8_e4m3fn"]
    refuses(ctx, pb.ArgumentError, other[1:], ctx.from_local, ones[0].view(other[0]), p.a)
