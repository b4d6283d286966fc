# SPDX-License-Identifier: Apache-2.0
"""Output to the terminal: colors, escaped text from files, JSON, and which rank prints for all."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..launchers import PROCESSES, ancestors, surroundings

if TYPE_CHECKING:
    from rich.console import Console

_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # all but the line feed


def leading() -> bool:
    """Return whether this process prints for all: it is rank 0, or was not started as a rank. Local."""
    around = surroundings()
    return around is None or around.rank == 0


def complain(message: str) -> None:
    """Write an error, one fault per line and the rest in one line, from the process that prints for all. Local."""
    if leading():
        head, *faults = plain(message).split("\n  - ")
        click.echo(f"pblasmp: {' '.join(head.split())}", err=True)
        for fault in faults:
            click.echo(f"  - {' '.join(fault.split())}", err=True)


def caution(message: str) -> None:
    """Write a warning in one line, from the process that prints for all. Local."""
    if leading():
        click.echo(f"pblasmp: warning: {' '.join(plain(message).split())}", err=True)


def plain(text: object) -> str:
    """Return a text with control characters except line feeds escaped: it may come from a stranger's file. Local."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], str(text))


class StandardOutput(io.FileIO):
    """Standard output: what follows a failed write goes nowhere. A reader may leave, as ``head`` does."""

    _ended = False

    def write(self, data: Any) -> int:
        """Write, unless a write has failed before. Local."""
        try:
            if not self._ended:
                return super().write(data)
        except OSError as error:
            self._ended = True
            if not isinstance(error, BrokenPipeError):
                raise OSError(error.errno, error.strerror, "standard output") from None
        return memoryview(data).nbytes


def tell(result: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    """Print a result as JSON, or as text by ``show``, from the process that prints for all. Local."""
    if leading():
        print_json(result) if as_json else show(result)


def print_json(value: Any) -> None:
    """Print a result as JSON; numbers that JSON lacks (NaN, infinities) are null. Local."""
    click.echo(json.dumps(_for_json(value), indent=2, allow_nan=False))


def _for_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _for_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(each) for each in value]
    if isinstance(value, complex):
        return [_for_json(value.real), _for_json(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def use_color(when: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether standard output takes colors: "always", "never", or "auto". Local.

    "auto" means no if NO_COLOR is set (https://no-color.org), if TERM is dumb, or if the output is not a terminal.
    """
    if when != "auto":
        return when == "always"
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and is_terminal(1)


def is_terminal(descriptor: int) -> bool:
    """Return whether what this process writes to file descriptor 1 or 2 reaches a terminal. Local.

    A launcher may give its ranks a pseudo-terminal, as Open MPI does: then the launcher's own output decides.
    """
    stream = sys.stdout if descriptor == 1 else sys.stderr
    if stream is None or not stream.isatty():
        return False
    if surroundings() is None:
        return True
    launchers = [pid for pid, name in ancestors() if name in PROCESSES]  # none if they are on another node
    if not launchers:
        return False
    try:
        return str(Path(f"/proc/{launchers[-1]}/fd/{descriptor}").readlink()).startswith(_TERMINALS)
    except OSError:
        return False


def console(*, color: bool, stderr: bool = False, terminal: bool | None = None) -> Console:
    """Return rich's console on standard output or standard error. Local."""
    from rich.console import Console  # which takes longer to import than the rest of the command line

    return Console(
        stderr=stderr,
        force_terminal=color if terminal is None else terminal,
        color_system="auto" if color else None,
        no_color=not color,
    )
