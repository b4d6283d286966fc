# SPDX-License-Identifier: Apache-2.0
"""The host engine: MPI ranks with NumPy and BLAS, which share memory within a node."""

from __future__ import annotations

from .host_engine import HostEngine

__all__ = ["HostEngine"]
