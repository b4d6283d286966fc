# SPDX-License-Identifier: Apache-2.0
"""Problems as data: descriptor files, the schema of their tables, and the layouts that they describe."""

from __future__ import annotations

from ..lazy import submodule


def __getattr__(name: str) -> object:
    """Import a module of this package when it is first used, as ``pblasmp.problems.files``."""
    return submodule(__name__, name)
