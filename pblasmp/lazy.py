# SPDX-License-Identifier: Apache-2.0
"""Modules of a package that are imported when they are first used."""

from __future__ import annotations

import importlib

__all__ = ["submodule"]


def submodule(package: str, name: str) -> object:
    """Return a module of a package. Local.

    Args:
        package: its name.
        name: the module's in it.

    Raises:
        AttributeError: there is none of that name.
        ModuleNotFoundError: it needs another module that is missing.
    """
    module = f"{package}.{name}"
    try:
        if not name.startswith("_"):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
