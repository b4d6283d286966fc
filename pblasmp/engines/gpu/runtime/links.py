# SPDX-License-Identifier: Apache-2.0
"""How a GPU reaches the others: measured times are valid only for machines with the same links.

Source: nvml.h of CUDA 13.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["links_of"]

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
