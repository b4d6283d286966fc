# SPDX-License-Identifier: Apache-2.0
"""Where the library is while it calls something that a test plays."""

from __future__ import annotations

import sys

_DEEP = 4  # functions that tell one place from another

Places = tuple[str, ...]


def places() -> Places:
    """Return where the library is: its innermost functions that are being run, with their lines."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < _DEEP:
        if frame.f_globals.get("__name__", "").startswith("pblasmp."):
            found.append(f"{frame.f_globals['__name__']}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found)
