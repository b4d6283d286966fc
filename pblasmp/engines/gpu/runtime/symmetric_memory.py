# SPDX-License-Identifier: Apache-2.0
"""Device memory that other GPUs can reach (symmetric memory), as cuBLASMp takes it.

cuBLASMp 0.8 and later take NCCL windows: memory of ncclMemAlloc, registered with the grids that use it. Older versions
take NVSHMEM's heap. Symmetric memory is collective: in the same order on every rank, with the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from typing import Any

from ....errors import LibraryNotFoundError, UnsupportedError, install


class SymmetricHeap:
    """Memory that is registered with cuBLASMp's grids.

    Args:
        allocate: ``allocate(nbytes)`` returns an object with ``handle`` (an address) and ``close()``.
        register: ``register(grid, address, nbytes)``.
        deregister: ``deregister(grid, address)``.
    """

    def __init__(
        self,
        allocate: Callable[[int], Any],
        register: Callable[[int, int, int], object],
        deregister: Callable[[int, int], object],
    ) -> None:
        self._allocate, self._register, self._deregister = allocate, register, deregister
        self._buffers: dict[int, tuple[Any, int]] = {}  # with their bytes, in the order of allocation
        self._offers: list[tuple[int, int]] = []

    def allocate(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of new memory. Collective."""
        buffer = self._allocate(nbytes)
        address = int(buffer.handle)
        self._buffers[address] = buffer, nbytes
        return address

    def free(self, address: int) -> None:
        """Free memory, after withdrawing it from every grid. Collective."""
        buffer, _ = self._buffers.pop(address)
        with ExitStack() as last_first:  # every step, even if one fails
            last_first.callback(self._close, buffer)
            for offer in self._offers:
                if offer[0] == address:
                    last_first.callback(self._take_back, offer)

    def _close(self, buffer: Any) -> None:
        buffer.close()

    def drop(self, address: int) -> None:
        """Free this rank's memory, whose communicators have been aborted, if that can be done alone. Local."""
        self._buffers[address][0].close()

    def offer(self, address: int, grid: int) -> None:
        """Make memory usable by a grid (a handle), if it is not; may be repeated. Collective over the grid."""
        if (address, grid) not in self._offers:
            self._register(grid, address, self._buffers[address][1])
            self._offers.append((address, grid))

    def withdraw(self, grid: int) -> None:
        """Withdraw all memory from a grid that is about to be destroyed. Collective over the grid."""
        with ExitStack() as last_first:
            for offer in self._offers:
                if offer[1] == grid:
                    last_first.callback(self._take_back, offer)

    def _take_back(self, offer: tuple[int, int]) -> None:
        self._offers.remove(offer)
        address, grid = offer
        self._deregister(grid, address)

    def holds(self, address: int) -> int:
        """Return the start of the allocation that contains ``address``, 0 if there is none. Local."""
        return next((s for s, (_, nbytes) in self._buffers.items() if s <= address < s + nbytes), 0)

    def close(self) -> None:
        """Free everything, last made first. Collective."""
        with ExitStack() as last_first:
            for address in self._buffers:
                last_first.callback(self.free, address)


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


class NvshmemHeap(SymmetricHeap):
    """NVSHMEM over all ranks of a context: initialized if needed, finalized only if initialized here. Collective.

    Every rank can reach the whole heap, and all ranks free memory together: no grid need be told of it.

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
        super().__init__(core.buffer, lambda *_: None, lambda *_: None)

    def _close(self, buffer: Any) -> None:
        self._core.free(buffer)

    def drop(self, address: int) -> None:
        """Do nothing: all ranks free memory together. Local."""

    def close(self) -> None:
        """Free everything, last made first; end NVSHMEM if it was started here. Collective over all ranks."""
        with ExitStack() as behind:
            if self._ours:
                behind.callback(self._core.finalize)
            super().close()


_STEP_BYTES = 32 << 20


def roomy(nbytes: int) -> int:
    """Return how much to allocate for ``nbytes``: from 32 MiB on, up to a quarter or 32 MiB more. Local."""
    step = max(_STEP_BYTES, 1 << max(0, nbytes.bit_length() - 3))
    return nbytes if nbytes < _STEP_BYTES else -(-nbytes // step) * step
