# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on simulated GPUs: the calls of cuBLASMp, cuBLAS and NCCL suffice, and are in order."""

from __future__ import annotations

import itertools
import sys
from typing import Any
from unittest.mock import patch

import numpy as np

import pblasmp as pb
from pblasmp.engines.gpu.gpu_operations import GpuOperations
from tests.helpers.cases import TYPES, check_array, pick, refuses
from tests.helpers.fused_machines import Following
from tests.helpers.machine import context
from tests.helpers.mpi import on_ranks
from tests.helpers.pairs import pairs
from tests.helpers.slow import only_long
from tests.helpers.tensor_cases import FORMS, Case, check_gelu, on_gpu, other_split, sizes


@on_ranks(1, 2, *only_long(4), timeout=200)
def test_what_is_told_is_enough(comm: Any, path: str) -> None:
    rng = np.random.default_rng(91)
    GpuOperations.panel_flops = 1.0  # small products in panels, too; this process ends with this function
    with context(path, Following, comm=comm) as (ctx, _):
        for form, dtype, (t, n, k), transposed in pairs(FORMS, TYPES, sizes(comm), (False, True)):
            split = pick(rng, (None, None, other_split))
            how = {} if split is None else {"split": split}
            case = on_gpu(Case(rng, comm, form, dtype, t, n, k, transposed=transposed, **how))
            alpha, beta = pick(rng, (1, 2, 0)), pick(rng, (0, 1, 2))
            options: dict[str, Any] = {"alpha": alpha, "beta": beta}
            if beta:
                options["c"] = case.local_c.copy()
                if rng.integers(2):
                    options["out"] = options["c"]
            what = f"{form} {dtype} {transposed=} {t}x{n}x{k} {alpha=} {beta=}"
            check_array(np.asarray(case(ctx, **options)), case.expected(alpha, beta), what)
        for form, dtype in itertools.product(FORMS, ("float32", "float16")):
            case = on_gpu(Case(rng, comm, form, dtype, 2 * comm.size, 3 * comm.size, 4 * comm.size))
            for turn in (0, 1):  # the same plan, another bias
                case.local_bias = case.local_bias + case.dtype.type(turn)
                case.bias = case.bias + case.dtype.type(turn)
                for activation in (None, "relu"):
                    y = case(ctx, bias=case.local_bias, activation=activation)
                    expected = case.expected(bias=True)
                    expected = np.maximum(expected, 0) if activation else expected
                    check_array(np.asarray(y), expected, f"{form} {dtype} bias {activation} {turn}")
        for form, t in itertools.product(FORMS, (2 * comm.size, 2 * comm.size + 1)):
            case = on_gpu(Case(rng, comm, form, "float64", t, 3 * comm.size, 4 * comm.size))
            check_gelu(ctx, case)
        for t in (3 * comm.size, 3 * comm.size + 1):
            case = on_gpu(Case(rng, comm, "allgather_matmul", "float32", t, 3 * comm.size, 5))
            y, gathered = case(ctx, return_gathered=True)
            check_array(np.asarray(y), case.expected(), f"gathered, {t}")
            check_array(np.asarray(gathered), case.x, f"gathered, {t}")


@on_ranks(2, 3)
def test_messages_travel_while_pieces_are_multiplied(comm: Any, path: str) -> None:
    """Messages travel on a separate stream, while another piece is multiplied; even shares go to cuBLASMp."""
    rng = np.random.default_rng(92)
    p = comm.size
    with context(path, Following, comm=comm) as (ctx, lib):
        gpu = lib.gpu

        def names() -> list[str]:
            return [each[0] for each in gpu.events if each[0] in ("gemm", "send", "recv", "wait", "Matmul")]

        case = on_gpu(Case(rng, comm, "allgather_matmul", "float32", 2 * p, 3 * p, 4))
        with pb.plan(pb.allgather_matmul, case.local_x, case.local_w, ctx) as plan:
            gpu.events.clear()
            plan()
            assert names() == ["Matmul"], "even: one call of the library"
        case = on_gpu(Case(rng, comm, "allgather_matmul", "float32", 2 * p + 1, 3 * p, 4))
        with pb.plan(pb.allgather_matmul, case.local_x, case.local_w, ctx) as plan:
            gpu.events.clear()
            y = plan()
            report = str(plan.report())
            said = "cuBLASMp has this form only for equal shares" in report and "as it arrives" in report
            assert said, f"uneven: the report says it: {report}"
            check_array(np.asarray(y), case.expected(), "uneven")
            messages = [each for each in gpu.events if each[0] in ("send", "recv")]
            beside = all(stream != gpu.stream for _, stream, *_ in messages)
            assert beside, f"messages are on the stream that multiplies: {messages}"
            gemms = [i for i, name in enumerate(names()) if name == "gemm"]
            last = max(i for i, name in enumerate(names()) if name in ("send", "recv"))
            assert last <= gemms[0], f"every message is under way before the first product: {names()}"
            assert len(gemms) == sum(len(x) > 0 for x in shards(2 * p + 1, p)), names()
        case = on_gpu(Case(rng, comm, "matmul_reduce_scatter", "bfloat16", 2 * p, 3 * p, 4 * p + 1))
        with pb.plan(pb.matmul_reduce_scatter, case.local_x, case.local_w, ctx) as plan:
            gpu.events.clear()
            plan()
            sizes_sent = {each[3] for each in gpu.events if each[0] == "send"}
            assert sizes_sent == {2 * 3 * p * 2}, "sums travel in the result's type"
        with pb.plan(pb.matmul_reduce_scatter, case.local_x, case.local_w, ctx, comm_dtype="float32") as plan:
            gpu.events.clear()
            y = plan()
            sizes_sent = {each[3] for each in gpu.events if each[0] == "send"}
            check_array(np.asarray(y), case.expected(), "or in the one requested")
            assert sizes_sent == {2 * 3 * p * 4}, "or in the one requested"
            words = ["x and w: a gradient is required", "call pblasmp.torch.matmul_reduce_scatter"]
            with patch(
                "pblasmp.tensor_parallel.call.loses_gradient",
                lambda each: each is case.local_x or each is case.local_w,
            ):
                refuses(ctx, pb.ArgumentError, words, plan)
        case = on_gpu(Case(rng, comm, "matmul_allgather", "float32", 2, 512 * p, 3))
        with pb.plan(pb.matmul_allgather, case.local_x, case.local_w, ctx) as plan:
            assert plan.report().path.endswith(": 1"), "small products take one panel: more"
        GpuOperations.panel_flops = 1.0  # this process ends with this function
        with pb.plan(pb.matmul_allgather, case.local_x, case.local_w, ctx) as plan:
            gpu.events.clear()
            plan()
            order = "".join({"gemm": "g", "send": "s"}.get(each[0], "") for each in gpu.events)
            once = "s" * (p - 1)
            assert order == f"g{once}g{once}", "panels in turn"
            arrived = [i for i, each in enumerate(gpu.events) if each[0] == "wait" and each[1] == gpu.stream]
            second = [i for i, each in enumerate(gpu.events) if each[0] == "gemm"][1]
            assert arrived[0] > second, "the first is waited for after the second product: before"
            gpu.events.clear()
            with (other := sys.modules["cupy"].cuda.Stream()):
                plan()
            assert ("wait", other.ptr, gpu.stream) == gpu.events[0], (
                f"another stream waits: the buffers are the same: {gpu.events[:3]}"
            )


def shards(n: int, p: int) -> list[range]:
    return [range(n)[pb.tensor_parallel.shard(n, p, rank)] for rank in range(p)]


def test_no_operand_is_copied(lib, ctx):
    """Neither by CuPy nor by us: on one rank everything is multiplied where it lies."""
    rng = np.random.default_rng(93)
    for form, dtype in itertools.product(FORMS, ("float32", "bfloat16")):
        case = on_gpu(Case(rng, ctx.comm, form, dtype, 4, 6, 8))
        out = case.local_c.copy()
        case(ctx, out=out)  # makes the workspace
        lib.gpu.copies.clear()
        lib.gpu.allocations.clear()
        case(ctx, out=out)
        assert (lib.gpu.copies, lib.gpu.allocations) == ([], [])
        case(ctx)
        assert (lib.gpu.copies, lib.gpu.allocations) == ([], [out.nbytes])


def test_arrays_are_not_kept(lib, ctx):
    import gc
    import weakref

    rng, gone = np.random.default_rng(94), []
    for form in FORMS:
        case = on_gpu(Case(rng, ctx.comm, form, "float32", 4, 6, 8))
        gone += [weakref.ref(getattr(case, name)) for name in ("local_x", "local_w", "local_bias")]
        y = case(ctx, bias=case.local_bias)
        gone.append(weakref.ref(y))
        del case, y
    gc.collect()
    assert [each() for each in gone] == [None] * 4 * len(FORMS)


def test_symmetric_input(alone, stand_in):
    with context(stand_in(1000), Following) as (ctx, lib):
        case = on_gpu(Case(np.random.default_rng(95), ctx.comm, "allgather_matmul", "float32", 4, 6, 8))
        with pb.plan(pb.allgather_matmul, (4, 8), case.local_w, ctx) as plan:
            buffer = plan.input_buffer()
            assert len(lib.gpu.did("window")) == 1, "no symmetric memory"
            assert lib.of("BufferRegister"), "cuBLASMp does not know of it"
            buffer[...] = case.local_x
            expected = case.x.astype(float) @ case.w.astype(float).T
            assert np.array_equal(np.asarray(plan()), expected)
            assert "is in symmetric memory" in str(plan.report())
            assert np.array_equal(np.asarray(plan(2 * case.local_x)), 2 * expected)
            assert plan.input_buffer() is buffer
            assert np.array_equal(np.asarray(plan()), expected)
            lib.gpu.events.clear()
        assert ("synchronize",) in lib.gpu.events  # work may still use the memory
        made = len(lib.gpu.did("window"))
        for rows in (4, 3):  # the memory of a plan that was closed is used again
            with pb.plan(pb.allgather_matmul, (rows, 8), case.local_w, ctx) as plan:
                plan.input_buffer()[...] = case.local_x[:rows]
                assert np.array_equal(np.asarray(plan()), expected[:rows])
        assert len(lib.gpu.did("window")) == made
        with pb.plan(pb.allgather_matmul, (9, 8), case.local_w, ctx):
            assert len(lib.gpu.did("window")) == made + 1
