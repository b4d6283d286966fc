# SPDX-License-Identifier: Apache-2.0
"""A Python for ranks that has imported already: most of a short rank's time goes into imports.

A process of pytest starts one server, the first time that it starts ranks. The server imports what ranks need and then
forks for each rank, as multiprocessing's forkserver does. The launcher starts the client as it would start Python. The
client hands the server what makes a process: arguments, environment, directory, open files. It passes signals on, and
ends as the fork ends. What a fork would not do as a new Python does, the client has a new Python do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

__all__ = ["JOB", "Interpreter", "command"]

_ROOT = Path(__file__).parents[3]
JOB = "f" * 32
"""The server's PBLASMP_JOB, over which a fork writes its own: see ``Job``."""


def command(address: str, python: str) -> list[str]:
    """Return the command that starts a client of the server at an address. Local."""
    return [str(Path(address).with_name("client")), address, python]


class Interpreter:
    """Returns the command that starts such a Python; the first call starts the server. Local.

    Args:
        environ: the server's environment.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {**environ, "PBLASMP_JOB": JOB}
        self._python = sys.executable
        self._address = ""
        self._server: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()  # threads may ask at once

    def __call__(self) -> list[str]:
        with self._starting:
            self._start()
        return command(self._address, self._python)

    def _start(self) -> None:
        if self._server is None:
            directory = Path(tempfile.mkdtemp(prefix="pblasmp-warm-"))
            compiler = [os.environ.get("CC", "cc"), "-O1", "-Wall", "-Werror"]
            source = Path(__file__).with_name("client.c")
            subprocess.run([*compiler, "-o", str(directory / "client"), str(source)], check=True)
            self._address = str(directory / "socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(self._address)
                listener.listen(64)
                self._server = subprocess.Popen(
                    [self._python, "-m", f"{__name__}.server", str(listener.fileno()), self._address],
                    cwd=_ROOT, env=self._environ, pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip

    def close(self) -> None:
        """End the server and its forks. Local; idempotent."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
            with contextlib.suppress(OSError):
                shutil.rmtree(Path(self._address).parent)
