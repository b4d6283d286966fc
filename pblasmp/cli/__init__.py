# SPDX-License-Identifier: Apache-2.0
"""The command ``pblasmp``. Importing it is quick, because until ``main`` runs, Ctrl-C shows Python's own traceback."""

from __future__ import annotations

import gc
import sys

from ..errors import ArgumentError, LibraryNotFoundError, required
from .signals import INTERRUPTED, end_on_signals, let_signals_end, settle

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit. Local; commands that compute start their own ranks."""
    let_signals_end()
    try:
        gc.disable()  # imports leave no garbage, and collecting takes a tenth of the startup time
        try:
            with required("the commands of pblasmp", "cli"):
                from .commands import run_command_line
        except LibraryNotFoundError as error:
            sys.stderr.write(f"pblasmp: {error}\n")
            raise SystemExit(1) from None
        finally:
            gc.enable()
        end_on_signals()
        run_command_line()
    except KeyboardInterrupt:
        settle()
        from .terminal import complain

        complain("interrupted")
        raise SystemExit(INTERRUPTED) from None
    except ArgumentError as error:  # from an environment variable that is read on import
        from .terminal import complain

        complain(str(error))
        raise SystemExit(2) from None
    finally:
        settle()
