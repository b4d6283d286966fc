# SPDX-License-Identifier: Apache-2.0
"""What Python does with an exception that nobody catches, while several ranks work together.

One rank shows it; and when only one rank has it, the others are told or ended, so that the job does not hang.
"""

from __future__ import annotations

import sys
import weakref
from types import TracebackType
from typing import Protocol

from .agreement import is_reported_here

__all__ = ["watch"]


class Failing(Protocol):
    """A context: what is told of an exception that nobody catches."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, unless they raise it too."""


_watched: list[weakref.ref[Failing]] = []
_previous_hook = sys.excepthook


def watch(context: Failing) -> None:
    """Have an exception that nobody catches end every rank of ``context``, shown by one of them. Local."""
    global _previous_hook
    _watched[:] = [ref for ref in _watched if ref() is not None]
    _watched.append(weakref.ref(context))
    if sys.excepthook is not _hook:
        _previous_hook, sys.excepthook = sys.excepthook, _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for ref in reversed(_watched):
        context = ref()
        if context is not None:
            context.fail(error)
    if is_reported_here(error):
        _previous_hook(kind, error, trace)
