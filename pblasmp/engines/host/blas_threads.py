# SPDX-License-Identifier: Apache-2.0
"""How many threads the local BLAS uses in each call: engines limit it."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def threads_set_by_user() -> set[str]:
    """Return what environment variables already say of how many threads BLAS uses; empty if none does. Local."""
    return {value for name in THREAD_VARIABLES if (value := os.environ.get(name))}


_limits: dict[ThreadLimit, int] = {}
"""Those that are set."""

_before: dict[str, tuple[Any, int]] = {}
"""The limited libraries by file, and how many threads each had before the first limit."""


# The engines are the parent's. What the libraries had before is known: a context of the child restores it.
os.register_at_fork(after_in_child=_limits.clear)


class ThreadLimit:
    """One engine's limit. The first one that is set saves what was there, the last one that is lifted restores it.

    Every method is local, and may be called again.

    Args:
        threads: how many.
        library: the local BLAS, which is loaded.
    """

    def __init__(self, threads: int, library: str) -> None:
        self._threads, self._library = threads, library

    @property
    def is_set(self) -> bool:
        """Whether it counts."""
        return self in _limits

    def set(self) -> None:
        """Limit the libraries that are loaded now."""
        for each in _thread_pools(len(sys.modules), self._library).lib_controllers:
            if each.user_api == "blas":
                _before.setdefault(each.filepath, (each, each.num_threads))
        _limits[self] = self._threads
        _apply()

    @staticmethod
    def look_again() -> None:
        """Have the next ``set`` find libraries that have been loaded without a module of Python."""
        _thread_pools.cache_clear()

    def lift(self) -> None:
        """Let the limits of other engines count, or give BLAS the threads back that it had."""
        if _limits.pop(self, None) is not None:
            _apply()


def _apply() -> None:
    for library, before in list(_before.values()):
        # Read anew each time: the garbage collector may lift a limit meanwhile.
        library.set_num_threads(min(_limits.values(), default=before))
    if not _limits:
        _before.clear()


@functools.lru_cache(1)
def _thread_pools(modules: int, library: str) -> ThreadpoolController:  # noqa: ARG001
    """Return what limits the threads of loaded libraries, looked for again if there may be more of them. Local."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
