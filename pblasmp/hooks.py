# SPDX-License-Identifier: Apache-2.0
"""Methods of layouts that parts above them compute: files, pictures, counts. ``pblasmp/__init__.py`` registers them."""

from __future__ import annotations

TYPE_CHECKING = False  # see pblasmp/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["hook", "register"]

_HOOKS: dict[str, Callable[..., Any]] = {}


def register(name: str, function: Callable[..., Any]) -> None:
    """Let ``hook(name)`` return a function. Local."""
    _HOOKS[name] = function


def hook(name: str) -> Callable[..., Any]:
    """Return the function registered under a name. Local."""
    return _HOOKS[name]
