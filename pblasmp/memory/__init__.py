# SPDX-License-Identifier: Apache-2.0
"""Device memory that other GPUs can reach (symmetric memory), and the workspace that plans share."""

from __future__ import annotations

from .nvshmem import NvshmemHeap, nvshmem_core
from .symmetric import NcclWindows, SymmetricHeap
from .workspace import SharedWorkspace

__all__ = ["NcclWindows", "NvshmemHeap", "SharedWorkspace", "SymmetricHeap", "nvshmem_core"]
