# SPDX-License-Identifier: Apache-2.0
"""Plans on GPUs: reuse, graphs, streams, memory, other libraries' arrays, and what is refused."""

from __future__ import annotations

import os

import cupy
import numpy as np
import pytest
import torch

import pblasmp as pb
from tests.helpers.gpu.products import OPS, check_local, check_whole, integers, place, poisoned, product_part


def square(
    ctx: pb.Context, n: int = 256, nb: int = 64, dtype: str = "float32", order: str = "C"
) -> pb.MatrixDescriptor:
    return pb.MatrixDescriptor((n, n), (nb, nb), pb.Grid.squarest(ctx.size), dtype=dtype, order=order)


def refill(ctx: pb.Context, x: pb.DistributedMatrix, seed: int) -> np.ndarray:
    values = integers(x.shape, x.dtype, seed)
    rows, cols = x.descriptor.global_indices(ctx.rank)
    ctx.engine.from_host(x.local, values[np.ix_(rows, cols)].astype(x.dtype))
    return values


def test_a_plan_sees_new_data_and_other_matrices(ctx):
    d = square(ctx)
    a, b = place(ctx, integers(d.shape, d.dtype, 1), d), place(ctx, integers(d.shape, d.dtype, 2), d)
    with pb.plan(pb.matmul, a, b, algo="default") as plan:
        assert plan.workspace.device_bytes > 0
        for seed in (3, 4):
            expected = refill(ctx, a, seed) @ refill(ctx, b, seed + 10)
            check_whole(ctx, plan(), expected)
        other = integers(d.shape, d.dtype, 5)
        check_whole(ctx, plan(place(ctx, other, d)), other @ integers(d.shape, d.dtype, 14))
        report = str(plan.report())
        assert "Using" in report, report


@pytest.mark.parametrize("algo", ["gathered", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_run_of_a_plan_sees_new_data(ctx, algo, dtype):
    """Also those that replay graphs, between hosts in pieces: what NCCL has brought is what the others have now."""
    d = square(ctx, dtype=dtype)
    a, b = (place(ctx, integers(d.shape, d.dtype, seed), d) for seed in (1, 2))
    with pb.plan(pb.matmul, a, b, algo=algo) as plan:
        for seed in range(3, 8):
            expected = refill(ctx, a, seed) @ refill(ctx, b, seed + 10)
            check_whole(ctx, plan(), expected, f"run {seed - 2}")


def test_a_graph_sees_new_data_in_the_same_buffers(ctx):
    p = pb.MatmulProblem.allgather_matmul(512, 512, 512, ctx.size, dtype="float32", order="F")
    general = square(ctx)
    for a_d, b_d, ops, scheme in ((p.a, p.b, "TN", "allgather_matmul"), (general, general, "NN", "gemm")):
        a, b = (
            place(ctx, integers(a_d.shape, a_d.dtype, 1), a_d),
            place(ctx, integers(b_d.shape, b_d.dtype, 2), b_d),
        )
        with pb.plan(pb.matmul, a, b, op_a=ops[0], op_b=ops[1], scheme=scheme) as plan:
            graph = plan.graph()
            for seed in (20, 21, 22):
                values = refill(ctx, a, seed), refill(ctx, b, seed + 10)
                expected = OPS[ops[0]](values[0]) @ OPS[ops[1]](values[1])
                check_whole(ctx, graph.replay(), expected, scheme)


def test_a_graph_that_is_kept_does_not_hold_up_its_context(ctx):
    """NCCL destroys no communicator while a graph holds work of it."""
    d = square(ctx, 256)
    with pb.Context(engine="cublasmp") as own:
        a, b = (place(own, integers(d.shape, d.dtype, s), d) for s in (1, 2))
        graph = pb.plan(pb.matmul, a, b).graph()
        expected = integers(d.shape, d.dtype, 1) @ integers(d.shape, d.dtype, 2)
        check_whole(own, graph.replay(), expected)
    with pytest.raises(pb.ClosedError):
        graph.replay()


def test_work_follows_the_current_stream(ctx):
    d = square(ctx, 1024)
    a, b = (place(ctx, integers(d.shape, d.dtype, s), d) for s in (1, 2))
    with pb.plan(pb.matmul, a, b) as plan:
        plan()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            for _ in range(5):  # each product must see the scaling queued just before it
                a.local[...] *= -1
                product = plan()
                kept = product.local.copy()
            stream.synchronize()
        expected = -(integers(d.shape, d.dtype, 1) @ integers(d.shape, d.dtype, 2))
        product.local[...] = kept
        check_whole(ctx, product, expected)


def test_products_on_several_streams_take_turns(ctx):
    """They share a workspace."""
    d = square(ctx, 2048)
    factors = [integers(d.shape, d.dtype, seed) for seed in (1, 2, 3)]
    a, b, c = (place(ctx, values, d) for values in factors)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with pb.plan(pb.matmul, a, b) as first, pb.plan(pb.matmul, b, c, op_a="T") as second:
        graph = second.graph()
        cupy.cuda.runtime.deviceSynchronize()
        for _ in range(6):
            results = []
            for stream, run in zip(streams, (first, graph.replay), strict=True):
                with stream:
                    results.append(run())
        cupy.cuda.runtime.deviceSynchronize()
        expected = factors[0] @ factors[1], factors[1].T @ factors[2]
        for result, values in zip(results, expected, strict=True):
            check_whole(ctx, result, values)


def test_a_stream_that_was_chosen_by_use_stays_the_current_one(ctx):
    """Also where a graph is recorded, and where PyTorch's stream is followed."""
    d = square(ctx)
    a = place(ctx, integers(d.shape, d.dtype, 1), d)
    before, stream = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
    stream.use()
    try:
        with pb.plan(pb.matmul, a, a) as plan:
            plan.graph().replay()
            assert cupy.cuda.get_current_stream() == stream
        x = torch.ones(8, 8, device=f"cuda:{ctx.engine.device.index}")
        pb.allgather_matmul(x, x, ctx)
        assert cupy.cuda.get_current_stream() == stream
        stream.synchronize()
    finally:
        before.use()


class Allocations(cupy.cuda.MemoryHook):
    """Counts what CuPy allocates while in the ``with`` block."""

    name = "allocations"
    bytes = 0

    def malloc_preprocess(self, **allocation: object) -> None:
        self.bytes += int(allocation["size"])  # type: ignore[call-overload]


@pytest.mark.skipif("NCCL_HOSTID" in os.environ, reason="what arrives from other hosts is unpacked")
def test_no_operand_is_copied(ctx):
    """In every mix of memory orders, a plan made and run once more allocates nothing: the workspace is kept."""
    grid = pb.Grid.squarest(ctx.size)
    for orders in ("CCC", "CCF", "CFC", "CFF", "FCC", "FCF", "FFC", "FFF"):
        for ops in ("NN", "TN", "NT", "TT"):
            p = pb.MatmulProblem.gemm(
                256, 256, 256, grid, 64, op_a=ops[0], op_b=ops[1], dtype="float32", order=orders
            )
            values = {n: integers(getattr(p, n).shape, p.a.dtype, i) for i, n in enumerate("ab")}
            a, b, out = place(ctx, values["a"], p.a), place(ctx, values["b"], p.b), poisoned(ctx, p.d)
            with pb.plan(pb.matmul, a, b, out=out, op_a=ops[0], op_b=ops[1]) as plan:
                plan()  # whose workspace the next plan finds
            out.local[...] = np.nan
            with Allocations() as made, pb.plan(pb.matmul, a, b, out=out, op_a=ops[0], op_b=ops[1]) as plan:
                plan()
            assert made.bytes == 0, (orders, ops)
            check_local(ctx, out, product_part(ctx, p, values, 1, 0), (orders, ops))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_are_taken_without_a_copy(ctx, dtype):
    d = square(ctx, dtype=dtype)
    values = integers(d.shape, d.dtype, 1, 1)
    rows, cols = d.global_indices(ctx.rank)
    tensor = torch.tensor(
        values[np.ix_(rows, cols)], dtype=getattr(torch, dtype), device=f"cuda:{ctx.engine.device.index}"
    )
    a = ctx.from_local(tensor, d)
    assert a.local.data.ptr == tensor.data_ptr()
    product = a @ a
    check_whole(ctx, product, values @ values, tolerance=2.0**-7)
    back = torch.from_dlpack(product.local)
    assert back.data_ptr() == product.local.data.ptr


def test_five_hundred_plans_leave_no_memory_behind(ctx):
    d = square(ctx)
    a, b = (place(ctx, integers(d.shape, d.dtype, s), d) for s in (1, 2))
    out = poisoned(ctx, d)

    def some(count: int) -> int:
        for _ in range(count):
            pb.matmul(a, b, out=out)
        cupy.cuda.runtime.deviceSynchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        ctx.comm.barrier()
        return cupy.cuda.runtime.memGetInfo()[0]

    free = [some(20)]
    for _ in range(3):  # other processes may take memory of this GPU meanwhile, but hardly each time
        free.append(some(500))
        if max(ctx.comm.allgather(free[-2] - free[-1])) <= 2 << 20:
            return
    pytest.fail(f"bytes that were free, after 500 calls each: {free}")


def test_symmetric_memory_is_used_and_said(ctx):
    p = pb.MatmulProblem.allgather_matmul(1024, 1024, 1024, ctx.size, dtype="bfloat16", order="F")
    values = [integers(x.shape, x.dtype, i, 1) for i, x in enumerate((p.a, p.b))]
    a = place(ctx, values[0], p.a)
    for symmetric in (False, True):
        b = place(ctx, values[1], p.b, symmetric=symmetric)
        with pb.plan(pb.matmul, a, b, op_a="T", scheme="allgather_matmul", algo="split_p2p") as plan:
            check_whole(ctx, plan(), values[0].T @ values[1], tolerance=2.0**-6)
            report = plan.report()
            assert "SPLIT_P2P" in report.path, report
            assert any(("is in symmetric memory" in note) == symmetric for note in report.notes), report


def test_what_one_rank_does_wrong_all_are_told(ctx):
    d = square(ctx)
    with pytest.raises(pb.ArgumentError, match="local array"):
        ctx.from_local(np.zeros(d.local_shape(ctx.rank), np.float32) if ctx.rank == 0 else None, d)
    a = place(ctx, integers(d.shape, d.dtype, 1), d)
    with pytest.raises(pb.UnsupportedError, match="algo: the cublasmp engine has"):
        pb.matmul(a, a, algo="summa")
    with pytest.raises(pb.UnsupportedError, match="algo 'shared': GPUs share no memory"):
        pb.matmul(a, a, algo="shared")
    with pytest.raises(pb.UnsupportedError, match="compute"):
        pb.matmul(a, a, compute="float8")


@pytest.mark.parametrize(("dtype", "compute"), [("float32", "tf32"), ("float32", "bf16x9")])
def test_compute_types(ctx, dtype, compute):
    d = square(ctx, dtype=dtype)
    values = integers(d.shape, d.dtype, 1)  # small integers are exact in TF32 too
    a = place(ctx, values, d)
    product = pb.matmul(a, a, compute=compute)
    check_whole(ctx, product, values @ values)
