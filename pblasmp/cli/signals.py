# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and SIGHUP unwind the command line, reliably and once.

While the command line is being imported, signals end the process at once: there is nothing to unwind. After that a
handler raises an exception. Python drops exceptions that are raised in its own callbacks, in a ``__del__`` or around a
fork. So the handler also sets a timer, which raises again until the exception is being handled or has arrived; Python's
messages about dropped ones are silenced meanwhile. Nothing is raised in the middle of an import, because C code of the
imported module may print the exception or exit at once (NumPy's does): the timer raises it after the import. A library
may replace the exception by a different one (pydantic does): code that is about to report an error calls ``reraise``
first.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

INTERRUPTED = 128 + signal.SIGINT  # the exit status after Ctrl-C
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_SECONDS = 0.05


class _EndingException:
    """The exception that ends this process, and the earlier handler, timer and hook."""

    error: BaseException | None = None
    settled = False
    before: tuple[object, tuple[float, float], Callable[[Any], Any]] | None = None


_ending = _EndingException()


def let_signals_end() -> None:
    """Have Ctrl-C end this process at once, as SIGTERM and SIGHUP do in a newly started Python. Local."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_on_signals() -> None:
    """Have signals end this process by an exception: KeyboardInterrupt, or SystemExit with 128 + their number. Local.

    The cleanup that follows is not interrupted again.
    """
    _ending.error, _ending.settled = None, False
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _end)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Return a context in which signals end this process at once: for C code that may wait, and lets no handler run."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    mine = [number for number, handler in before.items() if handler is _end]
    for number in mine:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, _end)


def reraise() -> None:
    """Raise the exception of the signal, if one has arrived: a library may have replaced it by its own. Local."""
    if _ending.error is not None and not _ending.settled:
        raise _ending.error.with_traceback(None)


def settle() -> None:
    """Note that the exception has arrived, or that none will come any more. Local."""
    _ending.settled = True
    if _ending.before is not None:
        handler, timer, sys.unraisablehook = _ending.before
        _ending.before = None
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)  # type: ignore[arg-type]


def _end(number: int, frame: FrameType | None) -> None:
    if _ending.error is not None or _ending.settled:
        return
    _ending.error = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
    _ending.before = (
        signal.getsignal(signal.SIGALRM),
        signal.getitimer(signal.ITIMER_REAL),
        sys.unraisablehook,
    )
    sys.unraisablehook = _dropped
    signal.signal(signal.SIGALRM, _again)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
    _again(number, frame)


def _again(_number: int, frame: FrameType | None) -> None:
    """Raise the exception unless it is being handled (by ``finally``, ``__exit__`` or ``except``) or an import runs."""
    if _ending.settled or _ending.error is None:
        return
    handled = sys.exc_info()[1]
    while handled is not None:
        if handled is _ending.error:
            return
        handled = handled.__context__
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return
        frame = frame.f_back
    raise _ending.error.with_traceback(None)


def _dropped(what: Any) -> None:
    """Suppress the message about our exception if Python dropped it, since it is raised again."""
    if what.exc_value is not _ending.error and _ending.before is not None:
        _ending.before[2](what)
