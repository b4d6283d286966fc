# SPDX-License-Identifier: Apache-2.0
"""The host engine: MPI ranks, one local GEMM over the whole of k, and operands that the ranks of a node share."""

from __future__ import annotations

from .engine import HostEngine

__all__ = ["HostEngine"]
