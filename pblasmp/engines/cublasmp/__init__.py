# SPDX-License-Identifier: Apache-2.0
"""The cuBLASMp engine: one rank per GPU, CuPy arrays, NVIDIA cuBLASMp 0.5 to 0.10."""

from __future__ import annotations

from .device import find_device
from .engine import CublasmpEngine
from .session import open_library

__all__ = ["CublasmpEngine", "find_device", "open_library"]
