# SPDX-License-Identifier: Apache-2.0
"""The cuBLASMp engine: one rank per GPU, CuPy arrays, NVIDIA cuBLASMp 0.5 to 0.10."""

from __future__ import annotations

from .engine import CublasmpEngine
from .runtime.device import find_device
from .runtime.session import open_library

__all__ = ["CublasmpEngine", "find_device", "open_library"]
