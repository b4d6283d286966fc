# SPDX-License-Identifier: Apache-2.0
"""What is looked up when it is first used: modules of a package, and functions that parts above register."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # see pblasmp/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def submodule(package: str, name: str) -> object:
    """Return a module of a package. Local.

    AttributeError if there is none of that name, ModuleNotFoundError if it needs another module that is missing.
    """
    module = f"{package}.{name}"
    try:
        if not name.startswith("_"):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


_HOOKS: dict[str, Callable[..., Any]] = {}


def register(name: str, function: Callable[..., Any]) -> None:
    """Let ``hook(name)`` return a function. Local."""
    _HOOKS[name] = function


def hook(name: str) -> Callable[..., Any]:
    """Return the function registered under a name. Local."""
    return _HOOKS[name]
