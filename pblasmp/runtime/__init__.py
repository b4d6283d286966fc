# SPDX-License-Identifier: Apache-2.0
"""What a context is below its face: its state, the reader of arguments, calls and plans."""

from __future__ import annotations

from ..lazy import submodule


def __getattr__(name: str) -> object:
    """Import a module of this package when it is first used, as ``pblasmp.runtime.plans``."""
    return submodule(__name__, name)
