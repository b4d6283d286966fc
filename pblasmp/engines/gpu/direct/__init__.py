# SPDX-License-Identifier: Apache-2.0
"""Direct calls on GPUs: cuBLAS on the local arrays where they lie, and on slabs in symmetric memory."""

from __future__ import annotations

from .gpu_direct import GpuDirect

__all__ = ["GpuDirect"]
