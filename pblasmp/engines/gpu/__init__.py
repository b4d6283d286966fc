# SPDX-License-Identifier: Apache-2.0
"""The GPU engine, "cublasmp": a GPU for each rank, or shared by ranks, CuPy arrays, NVIDIA cuBLASMp 0.5 to 0.10."""

from __future__ import annotations

from .cublasmp.library import open_library
from .gpu_engine import GpuEngine
from .runtime.device import find_device
from .runtime.health import await_broken

__all__ = ["GpuEngine", "await_broken", "find_device", "open_library"]
