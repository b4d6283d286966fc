# SPDX-License-Identifier: Apache-2.0
"""Problems as data: descriptor files, the schema of their tables, and the layouts that they describe."""

from __future__ import annotations

import importlib


def __getattr__(name: str) -> object:
    """Import a module of this package when it is first used, as ``pblasmp.problems.files``."""
    module = f"{__name__}.{name}"
    try:
        if not name.startswith("_"):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
