# SPDX-License-Identifier: Apache-2.0
"""Copies between host and GPU through pinned memory, on a pretended GPU whose copies are done late."""

import ctypes
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.runtime import host_copies
from pblasmp.engines.gpu.runtime.host_copies import HostCopies

TO_DEVICE, TO_HOST = 1, 2


class OnGpu(np.ndarray):
    """An array with an address, as CuPy's have."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def on_gpu(shape, dtype, order, ld=0):
    lines, width = shape if order == "C" else shape[::-1]
    whole = np.zeros((lines, max(width, ld)), dtype).view(OnGpu)[:, :width]
    return whole if order == "C" else whole.T


class Pinned(bytearray):
    @property
    def ptr(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class LateGpu:
    """Copies are queued, and done when an event behind them is waited for."""

    def __init__(self):
        self.queue, self.allocated, self.carried = [], [], []
        gpu = self

        class Event:
            def __init__(self, disable_timing):
                assert disable_timing
                self.behind = 0

            def record(self, stream):
                self.behind = len(gpu.queue)

            def synchronize(self):
                gpu.run(self.behind)

        runtime = SimpleNamespace(
            memcpy2DAsync=self.copy, memcpyHostToDevice=TO_DEVICE, memcpyDeviceToHost=TO_HOST,
            memcpyAsync=lambda to, of, width, *how: self.copy(to, width, of, width, width, 1, *how),
        )  # fmt: skip
        self.cuda = SimpleNamespace(
            Event=Event, runtime=runtime, alloc_pinned_memory=self.allocate,
            get_current_stream=lambda: SimpleNamespace(ptr=7),
        )  # fmt: skip

    def allocate(self, nbytes):
        self.allocated.append(nbytes)
        return Pinned(nbytes)

    def copy(self, to, to_pitch, of, of_pitch, width, height, kind, stream):
        assert stream == 7
        assert height == 1 or max(to_pitch, of_pitch) <= host_copies.LONGEST_PITCH
        self.carried.append(kind)
        self.queue.append((to, to_pitch, of, of_pitch, width, height))

    def run(self, until):
        for i in range(until):
            if self.queue[i] is not None:
                to, to_pitch, of, of_pitch, width, height = self.queue[i]
                for line in range(height):
                    ctypes.memmove(to + line * to_pitch, of + line * of_pitch, width)
                self.queue[i] = None


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(host_copies, "CHUNK", 1024)
    monkeypatch.setattr(host_copies, "_WORTH", 2048)


@pytest.fixture
def gpu():
    return LateGpu()


@pytest.fixture
def copies(gpu):
    found = HostCopies(gpu)
    yield found
    found.close()


@pytest.mark.parametrize("given", ["C", "F"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("dtype", "kind"), [("float64", "float64"), ("complex64", "complex64"), ("uint8", "uint8"),
                                             ("float32", "float64")])  # fmt: skip
def test_what_is_written_is_read_again(copies, gpu, order, given, dtype, kind):
    array = on_gpu((61, 53), dtype, order, ld=70)
    values = np.asarray(np.random.default_rng(1).integers(0, 100, array.shape), kind, order=given)
    expected = values.copy()
    copies.write(array, values)
    values[...] = 0  # they were read before it returned
    gpu.run(len(gpu.queue))
    np.testing.assert_array_equal(np.asarray(array), expected)
    found = copies.read(array)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == array.dtype
    assert found.flags.c_contiguous == (order == "C")
    assert set(gpu.carried) == {TO_DEVICE, TO_HOST}


@pytest.mark.parametrize("order", ["C", "F"])
def test_lines_that_are_far_apart_take_a_command_each(copies, gpu, monkeypatch, order):
    monkeypatch.setattr(host_copies, "LONGEST_PITCH", 559)
    shape = (61, 53) if order == "C" else (53, 61)
    for ld, commands in ((69, 31), (70, 61)):  # chunks of two lines, or single lines
        array = on_gpu(shape, "float64", order, ld=ld)
        values = np.random.default_rng(2).random(shape)
        gpu.carried.clear()
        copies.write(array, values)
        assert len(gpu.carried) == commands
        np.testing.assert_array_equal(copies.read(array), values)


def test_three_buffers_are_used_again(copies, gpu):
    array = on_gpu((400, 128), "uint8", "C")
    copies.write(array, np.ones((400, 128), np.uint8))
    copies.read(array)
    assert gpu.allocated == [1024] * 3
    assert len(gpu.carried) == 2 * 50


@pytest.mark.parametrize("first", ["write", "read"])
@pytest.mark.parametrize("chunks", [(1, 2, 8), (1, 8), (2, 8), (1, 3), (2, 1, 2, 3), (8, 1, 4)])
def test_a_copy_is_right_whatever_was_copied_before(copies, gpu, chunks, first):
    lines = 1024 // 128
    for seed, count in enumerate(chunks):
        values = np.random.default_rng(seed).integers(0, 256, (count * lines, 128), np.uint8)
        array = on_gpu(values.shape, "uint8", "C")
        if first == "write":
            copies.write(array, values)
        else:
            array[...] = values
        np.testing.assert_array_equal(copies.read(array), values)
    assert gpu.allocated == [1024] * min(3, max(chunks))


def test_small_arrays_and_long_lines_are_left_to_cupy(copies):
    assert copies.takes(on_gpu((64, 64), "float32", "C"))
    assert copies.takes(on_gpu((64, 64), "float32", "F", ld=99))
    assert not copies.takes(on_gpu((4, 4), "float32", "C"))
    assert not copies.takes(on_gpu((4, 1000), "float32", "C"))
    assert not copies.takes(on_gpu((128, 128), "float32", "C")[:, ::2])


def test_what_a_function_computes_on_the_gpu_stays_there(ctx, lib, monkeypatch):
    """Values in the engine's arrays are not copied to the host and back; what is wrong with them is said."""
    xp = ctx.engine.xp
    monkeypatch.setattr(type(ctx.engine), "from_host", None)

    def values(i, j):
        return xp.asarray(i) * 10.0 + xp.asarray(j)

    whole = np.arange(5)[:, None] * 10.0 + np.arange(4)
    for order, dtype in itertools.product("CF", ("float32", "complex128")):
        a = ctx.from_function(values, (5, 4), block=2, order=order, dtype=dtype)
        assert np.array_equal(a.on_host(), whole)
    for wrong, words in (
        (lambda i, j: values(i, j) * 1j, "complex128 does not convert to float64"),
        (lambda i, j: values(i, j)[:2], "expected values of shape"),
    ):
        with pytest.raises(pb.ArgumentError, match=words):
            ctx.from_function(wrong, (5, 4), block=2)
    monkeypatch.undo()
    narrow = ctx.from_function(values, (5, 4), block=2, dtype="bfloat16")  # which CuPy lacks
    assert np.array_equal(narrow.on_host().astype(float), whole)
