# SPDX-License-Identifier: Apache-2.0
"""The GPU of a rank: the one that it has made current, or the one with its number on the node.

Ranks share GPUs only if NCCL is told to allow it.
Source: NCCL's user guide, environment variables.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....comm import Communicator, machine, machines_of, share_of_cores
from ....errors import LibraryNotFoundError, UnsupportedError, install
from ....trust import fault_of
from ..kernels.compiler import kernel_folder

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPUS = Path("/proc/driver/nvidia/gpus")
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL 2.30 or later obeys it


@dataclass(frozen=True, slots=True)
class Device:
    """A rank's GPU: its CUDA index here, its PCI address, its machine, and how many ranks share it.

    ``host`` is the machine's name; ``boot`` is the same in all containers of a machine, and different on machines that
    have the same name.
    """

    index: int
    bus: str
    host: str
    boot: str = ""
    ranks: int = 1

    @property
    def place(self) -> tuple[str, str]:
        """What no other GPU has."""
        return self.bus, self.boot or self.host


class OnDevice:
    """A block in which a GPU is this thread's current one; afterwards it is the one that was so before. Local.

    A GPU that is lost says so where it is used, not here.

    Args:
        runtime: CuPy's ``cuda.runtime``.
    """

    __slots__ = ("_before", "_index", "_runtime")

    def __init__(self, runtime: Any, index: int) -> None:
        self._runtime, self._index = runtime, index

    def __enter__(self) -> None:
        self._before = self._index
        try:  # every call comes here: suppress() would take as long again
            before = self._runtime.getDevice()
            if before != self._index:
                self._runtime.setDevice(self._index)
                self._before = before
        except self._runtime.CUDARuntimeError:
            pass

    def __exit__(self, *error: object) -> None:
        if self._before != self._index:
            with suppress(self._runtime.CUDARuntimeError):
                self._runtime.setDevice(self._before)


def find_device(comm: Communicator) -> Device | Exception:
    """Return this rank's GPU, or why not every rank has its own; the same outcome on all. Collective.

    If every rank has chosen a different GPU, as with torch.cuda.set_device, these are taken. Otherwise a rank takes the
    GPU whose index is its number among the ranks of its node or, if the launcher shows each rank only one GPU, that
    one. If NCCL_MULTI_RANK_GPU_ENABLE=1 on every rank, ranks share GPUs, which are dealt out in turn.
    """
    locations = comm.locations()
    node = next(ranks for ranks in machines_of(locations) if comm.rank in ranks)
    comm.patient = share_of_cores([locations[rank] for rank in node]) < 1
    said = comm.allgather((_current(), os.environ.get(_SHARING) == "1"))
    current, share = [device for device, _ in said], all(allowed for _, allowed in said)
    chosen = len({device.place for device in current if device is not None}) == comm.size
    indices = [current[rank].index for rank in node] if chosen else list(range(len(node)))
    found = comm.allgather(_own(indices, node.index(comm.rank), share=share))
    wrong = [(rank, fault) for rank, fault in enumerate(found) if isinstance(fault, Exception)]
    if wrong:
        rank, fault = wrong[0]
        return type(fault)(f"{fault} (on rank {rank})")
    devices = [device for device in found if isinstance(device, Device)]
    places = [device.place for device in devices]
    for rank, place in enumerate(places):
        first = places.index(place)
        if first != rank and not share:
            return UnsupportedError(
                f"ranks {first} and {rank} have the same GPU ({devices[rank].bus} of {devices[rank].host}): "
                f"start one rank per GPU, "
                f"show each rank its own through CUDA_VISIBLE_DEVICES, or let them share it: {_SHARING}=1 "
                "(NCCL does not connect MIG instances of a GPU)"
            )
    return replace(devices[comm.rank], ranks=places.count(places[comm.rank]))


def _current() -> Device | None:
    """Return the GPU that is current in this process, None if there is none."""
    try:
        import cupy

        index = cupy.cuda.runtime.getDevice()
        return Device(index, cupy.cuda.runtime.deviceGetPCIBusId(index), *machine())
    except Exception:  # noqa: BLE001 - _own says what is missing
        return None


def _own(indices: list[int], number: int, *, share: bool) -> Device | Exception:
    """Return GPU ``indices[number]``, or why the ranks of this node, which take ``indices``, cannot have them.

    If they may share GPUs, indices after the last GPU begin again at the first.
    """
    try:
        import cupy
    except ImportError as error:
        return LibraryNotFoundError(f"CuPy is not installed ({error}): {install('cu13')}")
    _keep_kernels_from_others()
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        if count == 0:
            return LibraryNotFoundError(f"no GPU is visible{_hidden()}")
        if share:
            indices = [index % count for index in indices]
        if 1 < count < len(indices) and not share:
            return UnsupportedError(
                f"{len(indices)} ranks on a node with {count} GPUs: start one rank per GPU, "
                f"or let them share: {_SHARING}=1"
            )
        index = indices[number] if count > 1 else 0
        return Device(index, runtime.deviceGetPCIBusId(index), *machine())
    except runtime.CUDARuntimeError as error:
        return LibraryNotFoundError(f"no GPU can be used: {in_words(error)}{_hidden()}")


def _hidden() -> str:
    """Return which variable hides this machine's GPUs from this process, "" if none does. Local."""
    there, shown = len(gpus_of_machine()), os.environ.get(VISIBLE)
    if not there:
        return ""
    what = f"; this machine has {there}"
    return what if shown is None else f"{what}: {VISIBLE}={shown} hides them"


def gpus_of_machine() -> list[str]:
    """Return the PCI addresses of this machine's GPUs, also of those that this process does not see. Local."""
    with suppress(OSError):
        return sorted(each.name for each in _GPUS.iterdir())
    return []


def visible_gpus() -> tuple[list[str], list[tuple[int, int]]]:
    """Return the PCI addresses of the GPUs that this process sees, and which of them do not reach which. Local."""
    try:
        import cupy

        cuda = cupy.cuda.runtime
        gpus = range(cuda.getDeviceCount())
        deaf = [(i, j) for i in gpus for j in gpus if i != j and not cuda.deviceCanAccessPeer(i, j)]
        return [cuda.deviceGetPCIBusId(i) for i in gpus], deaf
    except Exception:  # noqa: BLE001 - _own says what is missing
        return [], []


def in_words(error: Exception) -> str:
    """Return what an error of CUDA says; where there is no driver, CUDA says that it is too old. Local."""
    if "cudaErrorInsufficientDriver" in str(error):
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "there is no NVIDIA driver: libcuda.so.1 was not found"
    return str(error)


def _keep_kernels_from_others() -> None:
    """Have CuPy keep compiled kernels in memory only, if another user could put some into its folder."""
    folder = kernel_folder()
    if folder is None:
        return
    everyones = folder.is_dir() and folder.stat().st_mode & stat.S_ISVTX
    if everyones or fault_of(folder):
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"


_LIBRARY = "libnvidia-ml.so.1"  # the driver's
_MAX_LINKS = 36  # more than any GPU has; beyond a GPU's own number NVML answers with an error


def links_of(bus: str, nvml: Any = None) -> str:
    """Return the links of the GPU at a PCI address, "18 NVLinks" or "PCIe 5 x16"; empty if that is unknown. Local.

    Args:
        bus: the address, as CUDA gives it.
        nvml: the management library, by default the driver's.
    """
    try:
        nvml = nvml or ctypes.CDLL(_LIBRARY)
        if nvml.nvmlInit_v2():
            return ""
    except (OSError, AttributeError):
        return ""
    try:
        return _asked(nvml, bus)
    except AttributeError:  # an old driver
        return ""
    finally:
        nvml.nvmlShutdown()


def _asked(nvml: Any, bus: str) -> str:
    device, number = ctypes.c_void_p(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(device)):
        return ""
    active = 0
    for link in range(_MAX_LINKS):
        if nvml.nvmlDeviceGetNvLinkState(device, ctypes.c_uint(link), ctypes.byref(number)) == 0:
            active += number.value
    if active:
        return f"{active} NVLinks"
    found = []
    for name in ("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"):
        if getattr(nvml, name)(device, ctypes.byref(number)):
            return ""
        found.append(number.value)
    return f"PCIe {found[0]} x{found[1]}"
