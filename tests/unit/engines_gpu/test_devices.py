# SPDX-License-Identifier: Apache-2.0
"""Which GPU a rank takes, and why "auto" takes none; NCCL communicators, made and given."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

import pytest

import pblasmp as pb
from pblasmp.comm import wrap
from pblasmp.engines.gpu.runtime import device
from pblasmp.engines.gpu.runtime.device import find_device
from tests.helpers.fakegpu import NcclError
from tests.helpers.machine import Witness, context, machine
from tests.helpers.mpi import on_ranks, run_mpi


def choices(comm: Any, path: str, old: str) -> Any:
    """Each machine: what its three ranks see, the error of engine="cublasmp", and what it says."""
    first, second, third = buses = [f"0000:0{n}:00.0" for n in range(3)]
    on_rank_1 = comm.rank == 1
    absent, unsupported = pb.LibraryNotFoundError, pb.UnsupportedError
    cases: dict[str, tuple[type[Exception] | None, str, dict[str, Any]]] = {
        "a GPU each": (None, "", {}),
        "one chosen by each": (None, "", {"current": (comm.rank + 1) % 3}),
        "one chosen by all": (None, "", {"current": 1}),
        "one shown to each": (None, "", {"devices": [buses[comm.rank]]}),
        "one for all": (unsupported, f"ranks 0 and 1 have the same GPU ({first}", {"devices": [first]}),
        "one for two": (unsupported, f"ranks 0 and 2 have the same GPU ({first}", {"devices": [buses[comm.rank % 2]]}),
        "one by two numbers": (
            unsupported, f"ranks 1 and 2 have the same GPU ({second}",
            {"devices": [first, third, second] if comm.rank == 2 else buses},
        ),
        "all share one": (None, "", {"devices": [first], "share": True}),
        "three share two": (None, "", {"devices": [first, second], "share": True}),
        "not all want to": (unsupported, "or let them share it: NCCL_MULTI_RANK_GPU_ENABLE=1",
                            {"devices": [first], "share": not on_rank_1}),
        "too few": (unsupported, "3 ranks on a node with 2 GPUs", {"devices": [first, second]}),
        "none": (absent, "no GPU can be used: cudaErrorNoDevice", {"devices": []}),
        "none on a rank": (absent, "(on rank 1)", {"devices": []} if on_rank_1 else {}),
        "no peer access": (None, "", {"deaf": [(1, 0)]}),
        "no CuPy": (absent, "CuPy is not installed", {"without": ["cupy"]}),
        "no CuPy on a rank": (absent, "(on rank 1)", {"without": ["cupy"] * on_rank_1}),
        "no nccl4py": (absent, "nccl4py is not installed", {"without": ["nccl"]}),
        "no nccl4py on a rank": (absent, "nccl4py is not installed", {"without": ["nccl"] * on_rank_1}),
        "no library": (absent, "no cuBLASMp at /nowhere", {"library": "/nowhere"}),
        "no library on a rank": (absent, "/nowhere", {"library": "/nowhere"} if on_rank_1 else {}),
        "too old a library": (unsupported, "is cuBLASMp 0.4.0", {"library": old}),
    }  # fmt: skip
    for case, (expected, message, how) in cases.items():
        share = {"NCCL_MULTI_RANK_GPU_ENABLE": str(int(how.pop("share", False)))}
        with patch.dict(os.environ, share), machine(path, comm=comm, **how) as lib:
            assert not choice(comm, lib, expected, message), case
            lib.assert_clean()
            lib.gpu.assert_clean()


MACHINES = {  # names and boot ids of three ranks with one PCI address; which of them share a GPU
    "one name, different machines": ([("node", "a"), ("node", "b"), ("node", "c")], None),
    "two containers of one machine": (
        [("one", "a"), ("two", "a"), ("three", "b")],
        "ranks 0 and 1 have the same GPU",
    ),
    "no boot id": ([("one", ""), ("two", ""), ("one", "")], "ranks 0 and 2 have the same GPU"),
}


@on_ranks(3)
def test_machines(comm: Any, path: str) -> None:
    """Names of machines repeat; the boot id tells machines apart, and is the same in containers of one machine."""
    for case, (places, message) in MACHINES.items():
        here = patch("pblasmp.engines.gpu.runtime.device.machine", lambda place=places[comm.rank]: place)
        with here, machine(path, comm=comm, devices=["0000:01:00.0"]) as lib:
            found = find_device(wrap(comm))
            told = str(found) if isinstance(found, Exception) else None
            right = told == message or (message and told and told.startswith(message))
            assert right, f"{case}: {found}"
            lib.assert_clean()


@on_ranks(2)
def test_settings(comm: Any, path: str) -> None:
    """What the user has set, and which variable the error names then; only on rank 1."""
    cases = {
        "no interface": ({"NCCL_SOCKET_IFNAME": "none"}, {}, "=none leaves NCCL no network interface of"),
        "none left": ({"NCCL_SOCKET_IFNAME": "^lo,e,i,b,d,v,t,w,s"}, {}, "NCCL_SOCKET_IFNAME=^lo,e"),
        "not exactly": ({"NCCL_SOCKET_IFNAME": "=l"}, {}, "NCCL_SOCKET_IFNAME=="),
        "begins so": ({"NCCL_SOCKET_IFNAME": "none,l"}, {}, ""),
        "exactly": ({"NCCL_SOCKET_IFNAME": "=lo"}, {}, ""),
        "hidden": ({"CUDA_VISIBLE_DEVICES": "-1"}, {"devices": []}, "has 3: CUDA_VISIBLE_DEVICES=-1 hides them"),
    }  # fmt: skip
    for case, (given, how, message) in cases.items():
        mine = comm.rank == 1
        with (
            patch.dict(os.environ, given if mine else {}),
            patch.object(device, "gpus_of_machine", lambda: ["a", "b", "c"]),
            machine(path, comm=comm, **(how if mine else {})) as lib,
        ):
            told = ""
            try:
                pb.Context(comm, engine="cublasmp").close()
            except pb.PblasmpError as error:
                told = str(error)
            assert message in told, case
            assert bool(message) == bool(told), case
            lib.assert_clean()

    for per_node, message in (("1", " NCCL_SOCKET_IFNAME must name what the hosts share"), ("2", "")):
        with (
            patch.dict(os.environ, {"PBLASMP_RANKS_PER_NODE": per_node}),
            machine(path, comm=comm) as lib,
            patch.object(
                sys.modules["nccl.core"].Communicator, "init", side_effect=NcclError("system error")
            ),
        ):
            try:
                pb.Context(comm, engine="cublasmp").close()
            except pb.StatusError as error:
                told = str(error)
            assert "not connect the ranks: system error" in told, f"unconnected, {per_node}"
            for word in ("must name", " lo"):
                assert (word in told) == bool(message), f"unconnected, {per_node}"
            assert message in told, f"unconnected, {per_node}"
            lib.assert_clean()


def choice(comm: Any, lib: Witness, expected: type[Exception] | None, message: str) -> str | None:
    error = None
    try:
        with pb.Context(comm, engine="cublasmp") as ctx:
            mine = ctx.engine.device.index
            chosen = len(set(comm.allgather(lib.gpu.callers))) == comm.size
            taken = lib.gpu.callers if chosen else comm.rank % len(lib.gpu.devices)
            if mine != lib.gpu.current or mine != taken:
                return f"took GPU {mine}, current is {lib.gpu.current}"
    except pb.PblasmpError as caught:
        error = caught
    if type(error) is not (expected or type(None)) or message not in str(error or ""):
        return f"cublasmp: {error!r}"
    with pb.Context(comm, engine="auto") as ctx:
        if ctx.engine.name != ("host" if expected else "cublasmp") or message not in ctx.engine.why:
            return f"auto: {ctx.engine.name}: {ctx.engine.why}"
        ctx.zeros(pb.MatrixDescriptor((4, 4), (2, 2), pb.Grid(1, comm.size)))
    return None


@on_ranks(4)
def test_communicators(comm: Any, path: str) -> None:
    """Grids have a communicator for each number of ranks, made from that of all ranks; what is given stays."""
    grids = [pb.Grid(1, 1), pb.Grid(2, 1), pb.Grid(1, 2), pb.Grid(1, comm.size), pb.Grid(2, 1)]
    with machine(path, comm=comm) as lib:
        own = sys.modules["nccl.core"].Communicator.init(comm.size, comm.rank, b"unique")
        for how, given in {"made": None, "an object": own, "a handle": own.ptr}.items():
            with pb.Context(comm, engine="cublasmp", nccl=given) as ctx:
                lib.clear()
                for grid in grids:
                    d = pb.MatrixDescriptor((4, 4), (2, 2), grid, order="F")
                    pb.matmul(ctx.empty(d), ctx.empty(d))
                made = [(call["nprow"], call["npcol"]) for call in lib.of("GridCreate")]
                by_size = {(call["nprow"] * call["npcol"], call["comm"]) for call in lib.of("GridCreate")}
            mine = [grid.shape for grid in grids[:4] if comm.rank < grid.size]
            assert made == mine, f"{how}: grids"
            sizes = {size for size, _ in by_size}
            handles = {size: lib.gpu.communicators[handle] for size, handle in by_size}
            right = len(by_size) == len(sizes) and all(c.size == size for size, c in handles.items())
            used = (comm.size, own.ptr) in by_size
            assert right, f"{how}: communicators: {by_size}"
            assert used == (given is not None), f"{how}: communicators: {by_size}"
            left = [address for kind, address in lib.gpu.alive if kind == "communicator"]
            assert left == [own.ptr], f"{how}: given back: {lib.gpu.alive}"
        own.destroy()
        lib.assert_clean()
        lib.gpu.assert_clean()


def test_choices(stand_in):
    run_mpi(choices, 3, path=stand_in(1000), old=stand_in(400))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
@on_ranks(2)
def test_ranks_that_share_cores_wait_patiently(comm: Any, path: str) -> None:
    """Ranks with fewer cores than ranks leave them to each other while they wait."""
    cores = sorted(os.sched_getaffinity(0))
    for name, mine in {"one core for all": cores[:1], "all cores": cores}.items():
        os.sched_setaffinity(0, mine)
        with context(path, comm=comm) as (ctx, lib):
            patient = ctx.comm.patient, ctx.control.patient
        assert patient == (len(mine) < comm.size,) * 2, name
        lib.gpu.assert_clean()


def test_why(lib):
    with pb.Context(engine="cublasmp") as asked, pb.Context() as chosen:
        assert asked.engine.why == "requested"
        assert chosen.engine.why == "cuBLASMp 0.10.0 on each rank's own GPU, here 0000:00:00.0"


@pytest.mark.parametrize(("mode", "kept"), [(0o700, False), (0o777, True), (0o1777, True)])
def test_kernels_are_compiled_anew_if_others_may_write_cupys_folder(lib, tmp_path, monkeypatch, mode, kept):
    tmp_path.chmod(mode)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")
    with pb.Context(engine="cublasmp"):
        assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1" * kept


@pytest.mark.parametrize("driver", [True, False])
def test_no_driver_is_not_an_insufficient_one(lib, monkeypatch, driver):
    """CUDA says the same of both."""
    said = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
    runtime = sys.modules["cupy"].cuda.runtime

    def count():
        raise runtime.CUDARuntimeError(said)

    def load(name):
        if not driver:
            raise OSError(name)

    monkeypatch.setattr(runtime, "getDeviceCount", count)
    monkeypatch.setattr("ctypes.CDLL", load)
    with pytest.raises(pb.LibraryNotFoundError) as caught:
        pb.Context(engine="cublasmp")
    assert ("insufficient" in str(caught.value)) == driver
    assert ("there is no NVIDIA driver: libcuda.so.1 was not found" in str(caught.value)) != driver


def test_a_context_on_the_host_looks_for_nothing(lib):
    with pb.Context(engine="host") as ctx:
        assert ctx.engine.why == "requested"
    assert not lib.calls


def test_one_rank_takes_the_callers_gpu(alone, stand_in):
    with context(stand_in(1000), devices=["0000:01:00.0", "0000:02:00.0"], current=1) as (ctx, _):
        assert ctx.engine.device.bus == "0000:02:00.0"
