# SPDX-License-Identifier: Apache-2.0
"""A prepared plan's run is one call of the library, on the current stream, and copies nothing it does not tell of."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.runtime.arena import current
from pblasmp.pblas import gridexit, gridinit, pdlaset
from tests.helpers.machine import context
from tests.helpers.mpi import on_ranks
from tests.helpers.pairs import pairs
from tests.helpers.schemes import AG, RS

D = pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid(1, 1))


def test_a_run_is_one_call(ctx, lib):
    with pb.plan(pb.matmul, ctx.empty(D), ctx.empty(D)) as plan:
        plan()
        lib.clear()
        del lib.gpu.events[:]
        for _ in range(3):
            plan()
        assert lib.gpu.events == [("Matmul",)] * 3


def test_it_follows_the_current_stream(ctx, lib):
    make = sys.modules["cupy"].cuda.Stream
    default, first, second = make(0), make(), make()
    with pb.plan(pb.matmul, ctx.empty(D), ctx.empty(D)) as plan:
        plan()
        lib.clear()
        for stream in (default, first, first, second, default):
            with stream:
                plan()
        told = [call.arguments.get("stream", "run") for call in lib.calls]
    assert told == ["run", first.ptr, "run", "run", second.ptr, "run", 0, "run"]


def test_a_stream_that_was_chosen_by_use_stays_the_current_one(ctx, lib):
    """CuPy's own ``with`` would forget it."""
    cuda = sys.modules["cupy"].cuda
    stream, outer = cuda.Stream(), cuda.Stream()
    with outer, pb.plan(pb.matmul, ctx.empty(D), ctx.empty(D)) as plan:
        stream.use()
        plan.graph()
        assert cuda.get_current_stream().ptr == stream.ptr
        with pytest.raises(RuntimeError), current(cuda.Stream()):
            raise RuntimeError
        assert cuda.get_current_stream().ptr == stream.ptr
        plan()
        assert lib.of("SetStream")[-1]["stream"] == stream.ptr


def test_the_handle_is_made_on_the_current_stream(lib):
    stream = sys.modules["cupy"].cuda.Stream()
    with stream, pb.Context(engine="cublasmp"):
        assert lib.of("Create")[0]["stream"] == stream.ptr


def test_other_matrices_of_the_same_layout(ctx, lib):
    a, b, other = (ctx.empty(D) for _ in range(3))
    with pb.plan(pb.matmul, a, b) as plan:
        plan()
        plan(other)
        plan(b=other)
        plan()
        padded = ctx.empty(replace(D, ld=9))
        with pytest.raises(
            pb.ArgumentError, match=r"b: its layout is 6x6 .* leading dimension 9, the plan is for"
        ):
            plan(b=padded)
        from_outside = ctx.from_local(padded.local, D)  # the same layout, in memory that is padded
        with pytest.raises(pb.ArgumentError, match=r"b: the local array has strides \(72, 8\).*\(48, 8\)"):
            plan(b=from_outside)
    a, b, other = (x.local.data.ptr for x in (a, b, other))
    # in C order the library's A is B
    assert [(call["b"], call["a"]) for call in lib.of("Matmul")] == [(a, b), (other, b), (a, other), (a, b)]


def copies_of(p: pb.MatmulProblem, beta: complex) -> list[str]:
    form = p.column_major()
    conjugated = ["conjugate"] * (form.conj_a + form.conj_b)
    return conjugated + ["positive"] * bool(beta and form.copy_c)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_copies_are_those_of_the_report(ctx, lib, dtype):
    for op_a, op_b, *orders in pairs("NTC", "NTC", "CF", "CF", "CF", "-CF"):
        p = pb.MatmulProblem.gemm(
            4, 5, 6, pb.Grid(1, 1), 2, op_a=op_a, op_b=op_b, order="".join(orders[:3]), dtype=dtype
        )
        c = None if orders[3] == "-" else ctx.empty(replace(p.d, order=orders[3]))
        p = replace(p, c=None if c is None else c.descriptor)
        matrices, beta = [ctx.empty(p.a), ctx.empty(p.b), c], 0 if c is None else 1
        out = ctx.empty(p.d)
        del lib.gpu.copies[:], lib.gpu.allocations[:]
        with pb.plan(pb.matmul, *matrices, out=out, beta=beta, op_a=op_a, op_b=op_b) as plan:
            expected = copies_of(p, beta)
            for run in range(1, 3):
                plan()
                assert lib.gpu.copies == expected * run, (op_a, op_b, orders)
            assert len(lib.gpu.allocations) == expected.count("conjugate")  # C goes straight to D
            report = plan.report()
            into_d = out.local.nbytes if "positive" in expected else 0
            assert report.copied_bytes == sum(lib.gpu.allocations) + into_d
            assert len([note for note in report.notes if "copied" in note]) == len(expected), report


def test_a_copied_c_is_named_as_the_caller_knows_it(ctx):
    a, c = ctx.empty(replace(D, dtype="complex64")), ctx.empty(replace(D, dtype="complex64", order="F"))
    with pb.plan(pb.matmul, a, c, c, beta=1, op_b="C", out=ctx.empty(a.descriptor)) as plan:
        notes = [note for note in plan.report().notes if "copied" in note]
    assert [note.partition(" ")[0] for note in notes] == ["B", "C"]


def test_arrays_of_other_libraries_are_taken_without_a_copy(ctx, lib):
    values = np.arange(36.0).reshape(6, 6)
    interface = {"data": (values.ctypes.data, False), "shape": values.shape, "typestr": "<f8", "version": 3}
    shared = SimpleNamespace(__cuda_array_interface__=interface)
    exported = SimpleNamespace(__dlpack__=values.__dlpack__, __dlpack_device__=values.__dlpack_device__)
    for foreign in (shared, exported):
        x = ctx.from_local(foreign, D)
        assert x.local.data.ptr == values.ctypes.data
        whole = ctx.from_dlpack_shards(foreign)
        assert whole.local.data.ptr == whole.to_dlpack_shard(1).data.ptr == values.ctypes.data
    stored = sys.modules["cupy"].zeros((6, 6), np.uint8)  # of 8-bit floats, of which CuPy has no type
    narrow = ctx.from_dlpack_shards(stored, dtype="float8_e4m3fn")
    assert narrow.dtype.name == "float8_e4m3fn"
    again = ctx.from_dlpack_shards(narrow.to_dlpack_shard(), dtype=narrow.dtype)
    assert again.dtype == narrow.dtype
    assert again.local.data.ptr == stored.data.ptr
    with pytest.raises(pb.ArgumentError, match=r"shard: .*uint8"):
        ctx.from_dlpack_shards(stored)
    with pytest.raises(pb.ArgumentError, match="shard: dtype is float64, expected float8_e5m2"):
        ctx.from_dlpack_shards(exported, dtype="float8_e5m2")
    assert not lib.gpu.copies
    for wrong in (values, [[1.0]]):
        with pytest.raises(pb.ArgumentError, match=rf"{type(wrong).__name__} does not share GPU memory"):
            ctx.from_local(wrong, D)


@pytest.mark.parametrize("stream", [0, 77])
def test_tensors_on_the_current_stream_are_taken_by_their_address(ctx, lib, monkeypatch, stream):
    """Else DLPack is asked: on another stream, which it orders, of types that NumPy lacks, and of what is on no GPU."""
    values = np.arange(72.0).reshape(6, 12)[:, 2:8]
    asked = []

    class Tensor:
        is_cuda, shape, dtype = True, values.shape, "torch.float64"
        device = SimpleNamespace(type="cuda", index=0)

        def __dlpack__(self, **how):
            asked.append(how)
            return values.__dlpack__(**how)

        __dlpack_device__ = staticmethod(values.__dlpack_device__)
        numel = staticmethod(lambda: values.size)
        stride = staticmethod(lambda: (12, 1))
        data_ptr = staticmethod(lambda: values.ctypes.data)

    current = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=stream))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=current))
    kinds = (
        ("torch.float64", True, stream == 0),
        ("torch.float64", False, False),
        ("torch.bfloat16", True, False),
    )
    for Tensor.dtype, Tensor.is_cuda, by_address in kinds:
        del asked[:]
        array = ctx.engine.take_over(Tensor())
        assert (array.ctypes.data, array.strides) == (values.ctypes.data, (96, 8))
        assert np.array_equal(array, values)
        assert bool(asked) != by_address


def test_no_matrix_is_copied_to_the_host_for_its_norm(ctx, lib):
    a = ctx.full((6, 6), 3.0, block=2)
    del lib.gpu.copies[:]
    assert a.norm() == 18
    assert not lib.gpu.copies


def test_an_array_on_another_gpu_is_refused(ctx, lib):
    lib.gpu.current = 1
    array = sys.modules["cupy"].empty((6, 6))
    lib.gpu.current = 0
    with pytest.raises(pb.ArgumentError, match="is on GPU 1, this rank's is 0"):
        ctx.from_local(array, D)


def mistaken(a):
    with pytest.raises(pb.ArgumentError):
        pb.matmul(a, "b")


def test_local_work_is_done_on_the_contexts_gpu(ctx, lib, subtests):
    """That of calls which the ranks make alone, or after they have agreed."""
    gpu, a, z = lib.gpu, ctx.random((6, 6), seed=1, block=2), ctx.full((6, 6), 1 + 2j, block=2)
    number = gridinit(ctx, "Row", 1, 1)
    desc, array = np.array([1, number, 6, 6, 2, 2, 0, 0, 6], np.int32), np.zeros((6, 6), order="F")
    calls = {
        "H": lambda: z.H, "real": lambda: z.real, "imag": lambda: a.imag, "zeros": lambda: ctx.zeros((5, 5)),
        "aux": lambda: ctx.empty_aux(D, "relu"), "item": lambda: a[0, 0],
        "pdlaset": lambda: pdlaset("A", 6, 6, 0.0, 1.0, array, 1, 1, desc),
        "verify": lambda: pb.verify(a, a, None, a @ a),
        "a mistake": lambda: mistaken(a),
    }  # fmt: skip
    for name, call in calls.items():
        with subtests.test(name):
            gpu.home, gpu.current = 0, 5
            try:
                call()
                assert gpu.current == 5
                assert not gpu.faults
            finally:
                gpu.home, gpu.current = None, 0
                gpu.faults.clear()
    gridexit(number)


def test_a_graph_ends_with_its_plan(lib):
    """NCCL waits for every graph that holds its work before it destroys a communicator."""
    with pb.Context(engine="cublasmp") as ctx:
        plans = [pb.plan(pb.matmul, ctx.empty(D), ctx.empty(D)) for _ in range(2)]
        graphs = [plan.graph() for plan in plans]
        events = lib.gpu.events
        events.clear()
        plans[0].close()
        assert events[0] == ("graph destroyed",)
        assert ("graph destroyed",) not in events[1:]
        with pytest.raises(pb.ClosedError, match="the plan of this graph is closed"):
            graphs[0].replay()
        graphs[1].replay()
        events.clear()
    names = [event[0] for event in events]
    assert names.count("graph destroyed") == 1
    assert names.index("graph destroyed") < names.index("GridDestroy"), names
    with pytest.raises(pb.ClosedError, match="the plan of this graph is closed"):
        graphs[1].replay()


@on_ranks(2)
def test_a_barrier_follows_what_overlaps(comm, path):
    """The events of a second run, by scheme and algorithm, and the plan's word on it."""
    with context(path, comm=comm) as (ctx, lib):
        problems = {
            AG: pb.MatmulProblem.allgather_matmul(8, 8, 8, comm.size, "N", "T", dtype="float32", order="C"),
            RS: pb.MatmulProblem.matmul_reduce_scatter(
                8, 8, 8, comm.size, "N", "T", dtype="float32", order="C"
            ),
            "gemm": pb.MatmulProblem.gemm(8, 8, 8, pb.Grid(1, comm.size), 4, dtype="float32"),
        }
        for (scheme, p), algo in itertools.product(
            problems.items(), ("default", "split_p2p", "atomic_p2p", "no_overlap")
        ):
            a, b = ctx.zeros(p.a), ctx.zeros(p.b)
            with pb.plan(pb.matmul, a, b, op_a=p.op_a, op_b=p.op_b, scheme=p.scheme, algo=algo) as plan:
                plan()
                lib.gpu.events.clear()
                plan()
                events = [event[0] for event in lib.gpu.events]
                notes = " ".join(plan.report().notes)
            meets = scheme != "gemm" and algo != "no_overlap"
            fine = events == ["Matmul", "all_reduce"][: 1 + meets] and ("a barrier follows" in notes) == meets
            assert fine, f"{scheme} {algo}: {events} {notes}"
