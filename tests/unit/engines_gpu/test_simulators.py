# SPDX-License-Identifier: Apache-2.0
"""The simulators of GPUs are as strict as the hardware: what it refuses, or nothing orders, is a fault in them, too."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.engines.gpu.kernels.lt_product import LtProduct
from pblasmp.engines.gpu.kernels.views import Blocks, View
from pblasmp.errors import UnsupportedError
from tests.helpers import fakelapack
from tests.helpers.fakegpu import FakeGpu
from tests.helpers.fakelapack import MEETING
from tests.helpers.fakenvrtc import FakeNvrtc
from tests.helpers.fakepeers import Peers, PlayedKernel
from tests.helpers.gpu_memory import Fault
from tests.helpers.hardware import SHARED_MEMORY, is_legal

E4, E5, HALF = FLOAT8["float8_e4m3fn"], FLOAT8["float8_e5m2"], DTYPES["float16"]


def faulty(words: str) -> AbstractContextManager[Any]:
    return pytest.raises(Fault, match=words) if words else nullcontext()


def one_kernel(
    capability: int, *, blocks: int = 1, room: int = 0, mma: bool = False, dtype: Any = HALF
) -> None:
    """Launch the kernel that communicates, on a GPU of 2 multiprocessors."""
    gpu, view = Peers(2, capability=capability).gpus[0], SimpleNamespace(dtype=dtype)
    tiles = SimpleNamespace(shared_bytes=room, mma=mma, parts="stored")
    kernel = PlayedKernel("matmul_reduce_scatter", SimpleNamespace(d=dtype), 2, tiles)
    gpu.use_current_stream()
    gpu.one_kernel(kernel, SimpleNamespace(x=view, w=view, d=view), blocks)


# -- pitches


@pytest.mark.parametrize(
    ("pitch", "height", "fits"), [(4, 2, False), (4, 1, True), (8, 2, True), (1 << 31, 1, False)]
)
def test_copies_of_lines(monkeypatch, pitch, height, fits):
    FakeGpu().install(monkeypatch)
    import cupy

    runtime = cupy.cuda.runtime
    memory = (whole := np.zeros(16, np.uint8)).ctypes.data
    with nullcontext() if fits else pytest.raises(runtime.CUDARuntimeError, match="pitch"):
        runtime.memcpy2DAsync(memory, pitch, memory, 8, 8, height, runtime.memcpyHostToDevice, 0)
    assert not whole.any()


@pytest.mark.parametrize("slices", [(8, 16), (20, 16), (16, 16)])
def test_copies_of_blocks(slices):
    """The blocks of a command are whole rows apart, and do not overlap."""
    assert is_legal(Blocks(0, 0, 4, 2, 2, (8, 8), slices)) == (slices == (16, 16))


@pytest.mark.parametrize("height", [1, 2])
def test_blocks_of_a_command_do_not_overlap(height):
    memory = np.zeros(64, np.uint8)
    copy = SimpleNamespace(
        dstDevice=memory.ctypes.data, dstPitch=4, dstHeight=height, srcDevice=memory.ctypes.data + 32, srcPitch=4,
        srcHeight=2, WidthInBytes=4, Height=2, Depth=2,
    )  # fmt: skip
    memory[32:] = np.arange(32)
    with nullcontext() if height == 2 else pytest.raises(AssertionError):
        FakeGpu().copy_3d(copy, 0)
    assert memory[:16].tolist() == (list(range(16)) if height == 2 else [0] * 16)


# -- shared memory, and blocks that wait for each other


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_shared_memory(monkeypatch, capability):
    most = SHARED_MEMORY[capability]
    nvrtc = FakeNvrtc(monkeypatch)
    nvrtc.capability = capability
    assert [nvrtc.driver.cuFuncSetAttribute(0, 8, room) for room in (most, most + 1)] == [(0,), (1,)]
    has = {"shared_memory": lambda: most, "multiprocessors": lambda: 4, "gpu": None}
    with pytest.raises(RuntimeError, match="bytes of shared memory"):
        fakelapack.loaded(0, "", "meet", most + 1, **has)
    with faulty("bytes of shared memory"):
        one_kernel(capability, room=most + 1)


@pytest.mark.parametrize(("threads", "room", "most"), [(1024, 0, 8), (1024, 30_000, 4), (256, 0, 32)])
def test_blocks_that_meet_are_all_there_at_once(threads, room, most):
    """On 4 multiprocessors, each of 2,048 threads and 49 KiB."""
    text = f'{MEETING}\nextern "C" __global__ void meet(int n) {{}}'
    has = {"shared_memory": lambda: 48 << 10, "multiprocessors": lambda: 4}
    function = fakelapack.loaded(0, text, "meet", **has, gpu=None)
    for blocks in (1, most):
        fakelapack.launch_cooperative_kernel(function, blocks, 1, 1, threads, 1, 1, room, 0, 0)
    with pytest.raises(RuntimeError, match="LAUNCH_TOO_LARGE"):
        fakelapack.launch_cooperative_kernel(function, most + 1, 1, 1, threads, 1, 1, room, 0, 0)


def test_blocks_that_wait_for_other_gpus_have_a_multiprocessor_each():
    with faulty("3 blocks on 2 multiprocessors"):
        one_kernel(90, blocks=3)


# -- 8 bits, and Hopper's instructions, by capability


@pytest.mark.parametrize(
    ("capability", "types", "ops", "ld", "words"),
    [
        (90, (E4, E4), "NT", 16, ""),
        (89, (E5, E4), "NT", 16, ""),
        (80, (E4, E4), "NT", 16, "no GPU before 8.9 has them"),
        (90, (E5, E5), "NT", 16, "both e5m2"),
        (90, (E4, E4), "NN", 16, "must be transposed"),
        (90, (E4, E4), "NT", 24, "multiples of 16 bytes"),
    ],
)
def test_products_of_8_bits(monkeypatch, capability, types, ops, ld, words):
    """X times W^T, whose rows are ``ld`` bytes apart, if the engine did not know what cuBLASLt takes."""
    monkeypatch.setattr(LtProduct, "check", lambda asked: None)
    peers = Peers(1, capability=capability)
    x, w = (View.of(peers.array(0, np.ones((16, 16), dtype), ld=ld)) for dtype in types)
    d = View.of(peers.array(0, np.zeros((16, 16), HALF)))
    gpu = peers.gpus[0]
    with pytest.raises(UnsupportedError, match="no algorithm") if words else nullcontext():
        gpu.products.multiply(gpu.stream("main").ptr, x, w, d, op_x=ops[0], op_w=ops[1])
    assert words in "".join(gpu.process.lt.refused)


@pytest.mark.parametrize(
    ("capability", "mma", "dtype", "words"),
    [(89, False, HALF, "Hopper's instructions on 89"), (90, True, E4, "by mma.sync")],
)
def test_one_kernel_has_the_instructions_of_its_gpu(capability, mma, dtype, words):
    with faulty(words):
        one_kernel(capability, mma=mma, dtype=dtype)


# -- other GPUs' memory


@pytest.mark.parametrize("domains", [[(0, 1)], [(0,), (1,)]])
def test_no_host_reaches_the_memory_of_another(domains):
    """As NCCL gives a window over several hosts to no rank: ``test_windows.py`` has what ``FakeGpu`` does then."""
    peers = Peers(2, domains=domains)
    mine, theirs = (View.of(peers.array(rank, np.ones((2, 2)))) for rank in range(2))
    with faulty("" if len(domains) == 1 else "rank 0 does not reach the memory of rank 1"):
        peers.gpus[0].push("copy0", theirs, mine)
        peers.run(0)


def test_windows_are_of_one_size():
    peers = Peers(2)
    peers.gpus[0].reserve("some", 64)
    with faulty("windows of other sizes"):
        peers.gpus[1].reserve("some", 128)


def test_memory_that_was_given_back():
    peers = Peers(1)
    gpu = peers.gpus[0]
    gpu.use_current_stream()
    to = View.of(peers.array(0, np.ones((1, 8))))
    for _ in range(2):  # what was queued before the buffer grew may have its address
        of = View.at(gpu.scratch("some", 64), (1, 8), to.dtype)
        gpu.copy("main", to, of)
    gpu.scratch("some", 128)
    peers.run(0)
    gpu.copy("main", to, of)
    with faulty("given back"):
        peers.run(0)


# -- what nothing orders


def test_a_stream_that_is_not_joined():
    """To the stream that the caller continues on, or records a graph on."""
    peers = Peers(1)
    gpu = peers.gpus[0]
    a, b = (View.of(peers.array(0, np.ones((2, 2)))) for _ in range(2))
    for joined in (True, False):
        gpu.begin("copy")
        gpu.push("copy", a, b)
        gpu.end(*["copy"] * joined)
        gpu.use()
        with faulty("" if joined else "is not joined"):
            peers.run(None)


def test_a_flag_that_is_raised_before_it_was_seen():
    peers = Peers(2)
    main = peers.gpus[0].stream("main")
    for _ in range(2):
        peers.gpus[0].windows.raise_flag(main, 1, 78)
    with faulty("raise 78 of 1: it was not seen yet"):
        peers.run(0)


def test_two_streams_that_write_the_same_bytes():
    peers = Peers(2)
    gpu = peers.gpus[0]
    a, b = (View.of(peers.array(0, np.ones((2, 2)))) for _ in range(2))
    gpu.push("copy0", a, b)
    gpu.push("copy1", a, b)
    with faulty("writes what is being used"):
        peers.run(0)


def test_a_flag_that_nobody_waits_for_or_that_never_comes():
    peers = Peers(2)
    main = peers.gpus[0].stream("main")
    peers.gpus[0].windows.raise_flag(main, 1, 78)
    with faulty("flags that nobody waited for"):
        peers.run(0)
    peers.gpus[0].windows.await_flag(main, 1, 78)
    with faulty("deadlock"):
        peers.run(0)
