# SPDX-License-Identifier: Apache-2.0
"""Which GPU a rank takes: the one it has chosen, or the one with its number on the node, never another rank's."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from ...comm import Communicator, cores_of
from ...errors import LibraryNotFoundError, UnsupportedError
from ...extras import install

__all__ = ["Device", "find_device"]


@dataclass(frozen=True, slots=True)
class Device:
    """A rank's GPU: its CUDA index here, its PCI address, and the node it is in."""

    index: int
    bus: str
    host: str


def find_device(comm: Communicator) -> Device | Exception:
    """Return this rank's GPU, or why not every rank has its own; the same outcome on all. Collective.

    Where every rank has chosen a different GPU, as with torch.cuda.set_device, these are taken. Otherwise a rank
    takes the GPU whose index is its number among the ranks of its node; where a launcher shows each rank a single GPU,
    that one.
    """
    node = next(ranks for ranks in comm.nodes() if comm.rank in ranks)
    comm.patient |= len(set().union(*cores_of(comm, node))) < len(node)
    current = comm.allgather(_current())
    chosen = len({(device.bus, device.host) for device in current if device is not None}) == comm.size
    indices = [current[rank].index for rank in node] if chosen else list(range(len(node)))
    found = comm.allgather(_own(indices, node.index(comm.rank)))
    wrong = [(rank, fault) for rank, fault in enumerate(found) if isinstance(fault, Exception)]
    if wrong:
        rank, fault = wrong[0]
        return type(fault)(f"{fault} (on rank {rank})")
    holders: dict[Device, int] = {}
    for rank, device in enumerate(found):
        place = Device(0, device.bus, device.host)
        if place in holders:
            return UnsupportedError(
                f"ranks {holders[place]} and {rank} have the same GPU ({device.bus} of {device.host}): "
                "start one rank per GPU, or show each rank its own through CUDA_VISIBLE_DEVICES"
            )
        holders[place] = rank
    mine = found[comm.rank]
    assert isinstance(mine, Device)
    return mine


def _current() -> Device | None:
    """Return the GPU that is current in this process, None without one."""
    try:
        import cupy

        index = cupy.cuda.runtime.getDevice()
        return Device(index, cupy.cuda.runtime.deviceGetPCIBusId(index), platform.node())
    except Exception:  # noqa: BLE001 - _own says what is missing
        return None


def _own(indices: list[int], number: int) -> Device | Exception:
    """Return GPU ``indices[number]``, or why the ranks of this node, which take ``indices``, cannot have them."""
    try:
        import cupy
    except ImportError as error:
        return LibraryNotFoundError(f"CuPy is not installed ({error}): {install('cu13')}")
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        if count == 0:
            return LibraryNotFoundError("no GPU is visible")
        if 1 < count < len(indices):
            return UnsupportedError(
                f"{len(indices)} ranks on a node with {count} GPUs: start one rank per GPU"
            )
        index = indices[number] if count > 1 else 0
        peers = [peer for peer in indices if peer != index and peer < count]
        deaf = [peer for peer in peers if not runtime.deviceCanAccessPeer(index, peer)]
        if deaf:
            return UnsupportedError(f"GPU {index} cannot reach GPU {deaf[0]} of its node (no peer access)")
        return Device(index, runtime.deviceGetPCIBusId(index), platform.node())
    except runtime.CUDARuntimeError as error:
        return LibraryNotFoundError(f"no GPU can be used: {error}")
