# SPDX-License-Identifier: Apache-2.0
"""Direct calls on CPU ranks: BLAS on the local arrays where they lie, and on slabs that the ranks of a node share."""

from __future__ import annotations

from .calls import FIRST_SLABS, HostDirect

__all__ = ["FIRST_SLABS", "HostDirect"]
