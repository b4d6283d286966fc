# SPDX-License-Identifier: Apache-2.0
"""How a process exits while it shares contexts with other ranks: with or without an uncaught exception.

One rank shows an exception. If only one rank has it, the others are notified or ended, so that the job does not hang.
A process that ends without one closes the contexts that are still open, as leaving a ``with`` block does. At Python's
prompt an exception does not end the process.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from .agreement import closing, is_reported_here
from .communicator import Communicator


class Ending(Protocol):
    """A context, which is notified when the process ends."""

    def fail(self, error: BaseException) -> None:
        """Notify the other ranks of an uncaught exception, unless they raise it too."""

    def close(self) -> None:
        """Free everything, unless that has been done. Collective."""


_watched: list[tuple[weakref.ref[Ending], Communicator]] = []  # in order of making, the same on all ranks


class _Hooks:
    """What shows exceptions besides ``_hook``: what was there before it was set first, and last."""

    first: Callable[..., Any] | None = None
    last: Callable[..., Any] = sys.excepthook
    asking = False  # the last one is being called


def watch(context: Ending, comm: Communicator) -> None:
    """Close ``context``, whose ranks agree through ``comm``, when the process ends. Local."""
    _watched[:] = [(ref, comm) for ref, comm in _watched if ref() is not None or _is_open(comm)]
    _watched.append((weakref.ref(context), comm))
    atexit.unregister(_close_all)
    # What is registered last is called first: before the libraries that engines need end.
    atexit.register(_close_all)
    if sys.excepthook is not _hook:
        _Hooks.last, sys.excepthook = sys.excepthook, _hook
        _Hooks.first = _Hooks.first or _Hooks.last


def _is_open(comm: Communicator) -> bool:
    """Return whether other ranks may be waiting for this one to close a context that it has dropped. Local."""
    return comm.size > 1 and not (comm.channel.closed or comm.channel.raised or comm.gone())


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _Hooks.asking and _Hooks.first is not None:
        _Hooks.first(kind, error, trace)  # a hook that was set after ours, as PyTorch's, calls ours in turn
        return
    goes_on = hasattr(sys, "ps1")  # at Python's prompt an exception ends nothing
    for ref, _ in () if goes_on else reversed(_watched):
        context = ref()
        if context is not None:
            context.fail(error)
    if is_reported_here(error):
        _Hooks.asking = True
        try:
            _Hooks.last(kind, error, trace)
        finally:
            _Hooks.asking = False


def _close_all() -> None:
    """Close what is open, last made first. The exit status stays; ranks that are not about to end get an error."""
    for ref, comm in reversed(_watched):
        context = ref()
        try:
            if context is not None:
                context.close()
            elif _is_open(comm):
                closing(comm, here=False)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the rest is closed, too
            _hook(type(error), error, error.__traceback__)
