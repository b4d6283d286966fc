# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks share, and how much there is."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from pblasmp.comm.choice import Serial
from pblasmp.comm.shared_memory import SharedMemory, aligned, carve
from tests.helpers.threads import on_ranks


def test_threads_share_it():
    def work(comm):
        memory = SharedMemory(comm)
        array = memory.array(6 * 8).view(np.float64)
        array[comm.rank :: comm.size] = comm.rank
        comm.barrier()
        seen = array.tolist()
        comm.barrier()
        memory.close()
        return memory.why_not, seen

    assert on_ranks(3, work) == [("", [0, 1, 2, 0, 1, 2])] * 3


def test_it_grows_and_is_used_again():
    memory = SharedMemory(Serial())
    small = memory.array(100)
    small[:] = 7
    assert memory.array(50)[0] == 7  # the same
    before = _open_files()
    large = memory.array(3 * mmap.PAGESIZE)
    assert large.size == 3 * mmap.PAGESIZE
    assert not large.any()
    assert small[0] == 7  # what was handed out lives on
    del small
    assert _open_files() == before
    memory.close()
    assert large[-1] == 0


def _open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_all_ranks_are_told_why_not(monkeypatch):
    opened = os.open

    def refuse(path, *args, **kwargs):
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "not yours")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    before = _open_files()
    found = on_ranks(3, lambda comm: SharedMemory(comm).why_not)
    assert len(set(found)) == 1
    assert "cannot open the memory shared by the ranks of this node: [Errno 13] not yours" in found[0]
    assert _open_files() == before


def test_a_file_of_that_name_elsewhere_is_not_shared(tmp_path, monkeypatch):
    """Containers number processes on their own."""
    opened, other = os.open, tmp_path / "other"
    other.write_bytes(bytes(mmap.PAGESIZE))
    monkeypatch.setattr(os, "open", lambda path, *args: opened(other, *args))
    found = on_ranks(2, lambda comm: SharedMemory(comm).why_not)
    assert found == [found[0]] * 2
    assert "the ranks do not see each other's processes" in found[0]


@pytest.mark.parametrize("error", [OSError(12, "no memory"), AttributeError("no such function")])
def test_no_anonymous_file(error, monkeypatch):
    def refuse(*args):
        raise error

    monkeypatch.setattr(os, "memfd_create", refuse)
    found = on_ranks(2, lambda comm: SharedMemory(comm).why_not)
    assert found == [f"cannot create an anonymous file of {mmap.PAGESIZE} bytes: {error}"] * 2


def test_no_room_to_grow(monkeypatch):
    memory = SharedMemory(Serial())
    assert memory.why_not == ""

    def refuse(descriptor, size):
        raise OSError(28, "full")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(MemoryError, match=r"cannot create an anonymous file of 9000000 bytes.*full"):
        memory.array(9_000_000)
    monkeypatch.undo()
    assert memory.array(1).tolist() == [0]  # once there is room again


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages in this Python")
def test_a_kernel_without_huge_pages(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    assert SharedMemory(Serial()).why_not == ""


def test_aligned():
    assert [aligned(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert aligned(9, 8) == 16


@pytest.mark.parametrize("order", "CF")
def test_carve(order):
    memory = np.zeros(1000, np.uint8)
    array = carve(memory, 104, (3, 5), np.dtype(np.float32), order)
    assert array.shape == (3, 5)
    assert array.flags.c_contiguous if order == "C" else array.flags.f_contiguous
    array[...] = 1
    assert not memory[:104].any()
    assert not memory[104 + 60 :].any()
    assert carve(memory, 1000, (0, 5), np.dtype(np.float64), order).shape == (0, 5)
