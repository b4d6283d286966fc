# SPDX-License-Identifier: Apache-2.0
"""``python -m pblasmp``: the command pblasmp."""

from __future__ import annotations

import os
import sys


def _leave_the_current_directory() -> None:
    """Stop importing from the current directory, as the script ``pblasmp`` does, unless pblasmp itself is there."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (pathlib comes later)
    try:
        here = os.getcwd()  # noqa: PTH109
    except FileNotFoundError:  # it has been removed, which those commands say that need it
        here = ""
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] in ("", here) and here != package:
        del sys.path[0]


if __name__ == "__main__":
    _leave_the_current_directory()
    from .cli import main

    main()
