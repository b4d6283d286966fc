# SPDX-License-Identifier: Apache-2.0
"""The command ``pblasmp``."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process and exit. Local; commands that compute start their own ranks."""
    from .commands import run_command_line

    run_command_line()
