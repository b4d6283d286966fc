# SPDX-License-Identifier: Apache-2.0
"""Distributed matrices: the class, how they are made, assigned, added, multiplied, reduced, saved and loaded."""

from __future__ import annotations

from ..lazy import submodule


def __getattr__(name: str) -> object:
    """Import a module of this package when it is first used, as ``pblasmp.matrix.io``."""
    return submodule(__name__, name)
