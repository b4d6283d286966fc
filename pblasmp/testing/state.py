# SPDX-License-Identifier: Apache-2.0
"""What a test may change in its process, restored so that the next test finds it unchanged."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from functools import lru_cache
from operator import is_
from types import ModuleType
from typing import Any

__all__ = ["State"]

_MISSING = object()
_known: dict[Any, dict[str, Any]] = {}
"""The attributes of modules and classes, copied again only where something has changed."""


class State:
    """The state of this process now, to which :meth:`restore` returns. Local.

    Working directory, environment, warning filters, import path, cores, exception hooks; and, in modules of pblasmp,
    attributes of modules and classes that a test assigned to.
    """

    def __init__(self) -> None:
        self._directory = os.getcwd()  # noqa: PTH109 (as chdir takes it)
        self._environ = dict(os.environ)
        self._filters = list(warnings.filters)
        self._path = list(sys.path)
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self._hooks = sys.excepthook, sys.unraisablehook
        self._owners = _owners(_modules())
        for owner in self._owners:
            if owner not in _known or len(vars(owner)) != len(_known[owner]):
                _known[owner] = vars(owner).copy()
        self._unraisable: list[str] = []
        sys.unraisablehook = self._note
        gc.freeze()  # objects that exist now stay: restore() need not search them

    def restore(self) -> list[str]:
        """Restore everything; return the warnings about what was left open. Local."""
        gc.collect()
        os.chdir(self._directory)
        if os.environ != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        warnings.filters[:] = self._filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        sys.path[:] = self._path
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)
        sys.excepthook, sys.unraisablehook = self._hooks
        for owner in self._owners:
            if not _restore(owner, _known[owner]):
                del _known[owner]
        return self._unraisable

    def _note(self, unraisable: Any) -> None:
        self._unraisable.append(f"{unraisable.err_msg or 'ignored'}: {unraisable.exc_value!r}")


def _modules() -> tuple[ModuleType, ...]:
    """Return the loaded modules of pblasmp."""
    return tuple(
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "pblasmp" and not name.startswith(__package__)
    )


@lru_cache(maxsize=1)
def _owners(modules: tuple[ModuleType, ...]) -> list[Any]:
    """Return these modules and the classes that they define."""
    classes = [
        value
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [*modules, *classes]


def _restore(owner: Any, attributes: dict[str, Any]) -> bool:
    """Give ``owner`` its earlier attributes back; attributes that it has gained since stay.

    Returns:
        whether nothing had changed.
    """
    now = vars(owner)
    if len(now) == len(attributes) and all(map(is_, now.values(), attributes.values())):
        return True  # as good as always, and quickly seen: a name does not change alone, in its place
    for name, value in attributes.items():
        if not name.startswith("__") and now.get(name, _MISSING) is not value:
            setattr(owner, name, value)
    return False
