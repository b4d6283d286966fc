# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM's symmetric heap, for cuBLASMp 0.5 to 0.7, through nvshmem4py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from typing import Any

from ..errors import LibraryNotFoundError, UnsupportedError
from ..extras import install


def nvshmem_core() -> Any:
    """Return the module nvshmem.core. Local.

    Raises:
        LibraryNotFoundError: nvshmem4py or cuda-core is not installed.
    """
    try:
        import_module("cuda.core")
        return import_module("nvshmem.core")
    except ImportError as error:
        raise LibraryNotFoundError(
            f"cuBLASMp before 0.8 needs NVSHMEM and nvshmem4py ({error}): {install('cu13')}"
        ) from None


class NvshmemHeap:
    """NVSHMEM over all ranks of a context: initialized if needed, finalized only if initialized here. Collective.

    Args:
        rank, size: this rank's number, and how many ranks there are: all that NVSHMEM knows.
        bcast: returns rank 0's value on every rank.
        device: index of this rank's GPU.
        agreement: returns a ``with`` block, as ``Session.agreement`` does.

    Raises:
        LibraryNotFoundError: nvshmem4py is not installed.
        UnsupportedError: NVSHMEM runs already, over another number of ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        bcast: Callable[[Any], Any],
        device: int,
        agreement: Callable[..., AbstractContextManager[Any]],
    ) -> None:
        self._buffers: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        with agreement("Context: NVSHMEM"):
            self._core = core = nvshmem_core()
            self._ours = core.init_status() < core.InitStatus.STATUS_IS_INITIALIZED
            if self._ours:
                from cuda.core import Device

                gpu = Device(device)
                uid = core.get_unique_id(empty=rank != 0)
            elif core.n_pes() != size:
                raise UnsupportedError(
                    f"NVSHMEM already runs over {core.n_pes()} ranks, the context has {size}: they must be the same"
                )
        if self._ours:
            uid._data[...] = bcast(uid._data)
            with agreement("Context: NVSHMEM", blocks=True):
                core.init(device=gpu, uid=uid, rank=rank, nranks=size, initializer_method="uid")

    def allocate(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of new memory. Collective over all ranks."""
        buffer = self._core.buffer(nbytes)
        address = int(buffer.handle)
        self._buffers[address], self._sizes[address] = buffer, nbytes
        return address

    def free(self, address: int) -> None:
        """Free memory. Collective over all ranks."""
        self._sizes.pop(address)
        self._core.free(self._buffers.pop(address))

    def offer(self, address: int, grid: int) -> None:
        """Do nothing: every rank can reach the whole heap."""

    def withdraw(self, grid: int) -> None:
        """Do nothing."""

    def holds(self, address: int) -> int:
        """Return the start of the allocation that contains ``address``, 0 if there is none. Local."""
        return next((s for s, nbytes in self._sizes.items() if s <= address < s + nbytes), 0)

    def close(self) -> None:
        """Free everything, last made first; end NVSHMEM if it was started here. Collective over all ranks."""
        with ExitStack() as last_first:
            if self._ours:
                last_first.callback(self._core.finalize)
            for address in self._buffers:
                last_first.callback(self.free, address)
