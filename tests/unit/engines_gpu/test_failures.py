# SPDX-License-Identifier: Apache-2.0
"""Calls in their order, and every call failing with every status: nothing leaks, nothing is freed twice."""

from __future__ import annotations

import sys
from typing import Any

import pblasmp as pb
from pblasmp.bindings import Status
from tests.helpers.failing_calls import calls_that_failed, left_behind, lives, names
from tests.helpers.machine import Witness, machine
from tests.helpers.mpi import on_ranks
from tests.helpers.schemes import AG, AR, RS
from tests.helpers.slow import draws


def life(lib: Witness, comm: Any = None) -> None:
    """A context and plans of all that there is: symmetric memory, another stream, a workspace that grows."""
    ctx = pb.Context(comm, engine="cublasmp")
    lib.channel = ctx.control.channel
    try:
        make = (
            pb.MatmulProblem.matmul_allreduce,
            pb.MatmulProblem.allgather_matmul,
            pb.MatmulProblem.matmul_reduce_scatter,
        )
        ar, ag, rs = (f(4, 4, 4, ctx.size, dtype="float16", order="F") for f in make)
        first = pb.plan(pb.matmul, ctx.empty(ar.a), ctx.empty(ar.b), op_a="T", scheme=AR, comm_sms=8)
        first()
        gathered = ctx.empty(ag.b, symmetric=True)
        pb.plan(pb.matmul, ctx.empty(ag.a), gathered, op_a="T", scheme=AG, algo="split_p2p")
        lib.workspace = (8192, 1024)
        with sys.modules["cupy"].cuda.Stream():
            first()
            pb.plan(pb.matmul, ctx.empty(rs.a), ctx.empty(rs.b), op_a="T", scheme=RS)()
    finally:
        ctx.close()


def made(attributes: int) -> list[str]:
    return [*["MatrixDescriptorCreate"] * 3, "MatmulDescriptorCreate",
            *["MatmulDescriptorSetAttribute"] * attributes, "Matmul_bufferSize"]  # fmt: skip


HEARD = [
    "LoggerOpenFile",
    "LoggerSetLevel",
    "LoggerSetCallback",
    "Matmul",
    "LoggerSetCallback",
    "LoggerSetLevel",
]
GONE = ["MatmulDescriptorDestroy", *["MatrixDescriptorDestroy"] * 3]
LIFE = [
    "GetVersion", "Create",
    "GridCreate", "GridCreate", *made(6), "synchronize", "window", "BufferRegister", "pinned", *HEARD,
    "window", "BufferRegister", *made(3),
    "wait", "SetStream", "Matmul",
    *made(4), "synchronize", "BufferDeregister", "window released", "window", "BufferRegister", "pinned", *HEARD,
    *GONE, "wait", *GONE, "wait", *GONE,
    "synchronize", "BufferDeregister", "window released", "GridDestroy", "BufferDeregister", "GridDestroy",
    "Destroy", "synchronize", "cuBLAS released", "communicator released", "window released",
]  # fmt: skip


def test_the_order_of_calls(lib):
    life(lib)
    assert [event[0] for event in lib.gpu.events] == LIFE


def test_every_call_failing_with_every_status(alone, stand_in):
    assert len(calls_that_failed(life, stand_in(1000), 7)) > 30


@on_ranks(2, timeout=30)
def test_calls_failing_on_one_rank_of_two(comm: Any, path: str) -> None:
    """What is made is made by all or none; what is given back is given back by all, and one rank has the error."""
    calls = [name for name in LIFE if name[0].isupper()]
    every = draws(0, long=1)  # else, of equal calls in a row, the last
    for at, call in enumerate(calls):
        if calls[at : at + 2] == [call, call] and not every:
            continue
        if call == "SetStream" or calls[at - 1 : at + 1] == ["SetStream", "Matmul"]:
            continue  # but for its first run, ranks don't wait for each other in a run of a plan
        with machine(path, comm=comm) as lib:
            if comm.rank == 1:
                lib.fail(Status.INTERNAL_ERROR, at)
            error = lives(life, lib, comm)
            found = left_behind(lib)
            if lib.channel is not None and lib.channel.cause:  # the other rank's GPU may wait for what it has
                found = [*lib.faults, *lib.gpu.faults]
        spared = comm.rank == 0 and error is None and call.endswith(("Destroy", "Deregister"))
        if not spared and not names(error, call, Status.INTERNAL_ERROR):
            found.append(f"raised {error!r}")
        assert not "; ".join(found), f"{at} {call}"
