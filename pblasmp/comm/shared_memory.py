# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of a node share: an anonymous file, mapped by each of them.

A memfd is not bounded by the size of /dev/shm, which is 64 MiB in many containers.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .communicator import Communicator, allgather_alike


class SharedMemory:
    """One growing buffer shared by the ranks of a node. Every method is collective over ``node``.

    Args:
        node: the ranks.
        nbytes: its size at first.

    Attributes:
        why_not: empty, or why the ranks of this node cannot share memory.
    """

    def __init__(self, node: Communicator, nbytes: int = mmap.PAGESIZE) -> None:
        self._node = node
        self._map: mmap.mmap | None = None
        self._size = 0
        self.why_not = self._grow(nbytes)

    def array(self, nbytes: int) -> NDArray[np.uint8]:
        """Return ``nbytes`` of the buffer, growing it if needed, which loses its contents."""
        if nbytes > self._size:
            why_not = self._grow(nbytes)
            if why_not:
                raise MemoryError(why_not)
        assert self._map is not None
        return np.frombuffer(self._map, np.uint8, nbytes)

    @property
    def nbytes(self) -> int:
        """The buffer's size. Local."""
        return self._size

    def close(self) -> None:
        """Unmap the buffer; arrays that were handed out keep their memory as long as they exist."""
        self._map = None
        self._size = 0

    def _grow(self, nbytes: int) -> str:
        self.close()
        file: io.FileIO | None = None
        mapped = None
        path, inode, why_not = "", 0, ""
        if self._node.rank == 0:
            try:
                file = _opened(os.memfd_create, "pblasmp", os.MFD_CLOEXEC)
                os.ftruncate(file.fileno(), nbytes)
                path, inode = f"/proc/{os.getpid()}/fd/{file.fileno()}", os.fstat(file.fileno()).st_ino
            except (AttributeError, OSError, OverflowError) as error:
                why_not = f"cannot create an anonymous file of {nbytes} bytes: {error}"
        try:
            path, inode = self._node.bcast((path, inode))
            if path:
                try:
                    if self._node.rank != 0:
                        file = _opened(os.open, path, os.O_RDWR | os.O_CLOEXEC)
                        if os.fstat(file.fileno()).st_ino != inode:  # containers number processes separately
                            raise OSError("the ranks do not see each other's processes")
                    assert file is not None
                    mapped = mmap.mmap(file.fileno(), nbytes)
                except (OSError, ValueError, OverflowError, MemoryError) as error:
                    why_not = f"cannot open the memory shared by the ranks of this node: {error}"
            # Nothing can fail from here on. Rank 0's descriptor has stayed open until all ranks had opened the file.
            reasons = [reason for reason in allgather_alike(self._node, why_not) if reason]
        finally:
            if file is not None:
                file.close()
        if not reasons:
            self._map, self._size = mapped, nbytes
            if mapped is not None and hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # huge pages are faster, if the kernel has them
                    mapped.madvise(mmap.MADV_HUGEPAGE)
        return reasons[0] if reasons else ""


def _opened(opener: Callable[[str, int], int], path: str, flags: int) -> io.FileIO:
    """Return an open file that is closed with its object: a signal's handler may raise anywhere but within ``map``."""
    return next(map(io.FileIO, map(opener, [path], [flags]), ["r+b"]))


def aligned(nbytes: int, boundary: int = 4096) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``boundary``. Local."""
    return -(-nbytes // boundary) * boundary


def carve(
    memory: NDArray[np.uint8], at: int, shape: tuple[int, int], dtype: np.dtype, order: Any
) -> NDArray[Any]:
    """Return a 2D array ``at`` bytes into ``memory``. Local."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return memory[at : at + nbytes].view(dtype).reshape(shape, order=order)
