# SPDX-License-Identifier: Apache-2.0
"""Existing ScaLAPACK programs, with their large calls computed by pblasmp: ``pblasmp preload``.

A small C library, made from the tables of routines (``source``) and compiled when it is first needed, is loaded into
the program before its ScaLAPACK (LD_PRELOAD). It has the names of the PBLAS and of factorizations. It passes large
calls to a Python inside the program's process (``serve``), and leaves all others to the program's own library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..engines.choose import EngineName
from ..errors import ArgumentError, LibraryNotFoundError, UnsupportedError
from ..trust import fault_of, make_private, open_trusted, private_folder
from .c_source import source

__all__ = ["COUNTS", "VECTORS", "Calls", "environment", "library", "run"]

_NOT_IN_LD_PRELOAD = " :$"  # two end a path, the third begins a name that is replaced

COUNTS = "PBLASMP_PRELOAD_COUNTS"
"""The variable that names the file into which process 0 writes ``Calls``."""

VECTORS = "PBLASMP_PRELOAD_VECTORS"
"""The variable that is set if levels 1 and 2 are computed, too: for programs whose processes all make these calls."""


class Calls(NamedTuple):
    """How a program's process 0 had its calls computed, of those that pblasmp could see.

    Attributes:
        by_pblasmp: the number of calls that pblasmp answered.
        by_library: the number of those that the program's own library answered.
        grids: the number of pblasmp's grids that they needed.
        pblasmp_seconds, library_seconds, grid_seconds: what each took, with the wait for other processes; a call that
            is made inside another one counts for itself, and so do grids. Without the start of Python in this process.
    """

    by_pblasmp: int
    by_library: int
    grids: int
    pblasmp_seconds: float
    library_seconds: float
    grid_seconds: float

    @classmethod
    def read(cls, path: Path) -> Calls:
        """Return what a process has written. Local."""
        numbers = [int(word) for word in path.read_text().split()]
        return cls(*numbers[::2], *(nanoseconds / 1e9 for nanoseconds in numbers[1::2]))


def run(command: Sequence[str], least: int, engine: EngineName) -> tuple[int, Calls | None]:
    """Run a command that starts a ScaLAPACK program. Local.

    Args:
        command: such as ``["mpirun", "-n", "4", "./program"]``.
        least: n, as for ``environment``.
        engine: as in ``pblasmp.Context``.

    Returns:
        Its exit status, or 128 + the number of the signal that ended it; and its calls, None if process 0 made none
        that could be seen, or did not come to its end.

    Raises:
        ArgumentError: ``least`` is negative, or the cache is as ``library`` refuses it.
        LibraryNotFoundError: the command is not there, or there is no C compiler, or this Python has no shared library.
        UnsupportedError: the compiler fails, or this is not Linux.
    """
    with private_folder("pblasmp-preload-") as folder:
        counts = folder / "counts"
        variables = {**os.environ, **environment(least, engine), COUNTS: str(counts)}
        try:
            process = subprocess.Popen(command, env=variables)
        except OSError as error:
            raise LibraryNotFoundError(f"cannot start {command[0]!r}: {error.strerror}") from None
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        calls = Calls.read(counts) if counts.exists() else None
    return (status if status >= 0 else 128 - status), calls


def environment(least: int, engine: EngineName) -> dict[str, str]:
    """Return the variables with which every process of a program must be started. Local.

    Compiles the library if that has not been done before.

    Args:
        least: n; calls with at least n³ multiplications, as many as the product of two n × n matrices has, are computed
            by pblasmp. With 0 all are, also those that mostly move, such as p?geadd and p?gemr2d.
        engine: as in ``pblasmp.Context``.

    Returns:
        Their values by name; ``LD_PRELOAD`` has what it had before, too.

    Raises:
        ArgumentError: ``least`` is negative, or the cache is as ``library`` refuses it.
        LibraryNotFoundError: there is no C compiler, or this Python has no shared library.
        UnsupportedError: the compiler fails, or this is not Linux.
    """
    if least < 0:
        raise ArgumentError(f"expected a size of at least 0, got {least}")
    if sys.platform != "linux":
        raise UnsupportedError(f"libraries are loaded into programs on Linux only, this is {sys.platform}")
    before = os.environ.get("LD_PRELOAD", "")
    return {
        "LD_PRELOAD": f"{library()}:{before}".rstrip(":"),
        "PBLASMP_PRELOAD_MIN": str(least),
        "PBLASMP_PRELOAD_ENGINE": engine,
        "PBLASMP_PRELOAD_PYTHON": str(_shared_python()),
        "PBLASMP_PRELOAD_HOME": sys.base_prefix,
        "PBLASMP_PRELOAD_SYS": json.dumps(
            {
                "path": [str(Path(each).resolve()) for each in sys.path if each],
                "prefix": sys.prefix,
                "executable": sys.executable,
            }
        ),
    }


def library() -> Path:
    """Return the path of the library, compiled with ``$CC`` or ``cc`` if it is not in the cache. Local.

    It is loaded into every process of a program, so it is taken only from where no other user can put it.

    Raises:
        ArgumentError: another user may write in the cache, or its path is none that LD_PRELOAD can have.
        LibraryNotFoundError: there is no C compiler.
        UnsupportedError: the compiler fails.
    """
    text = source()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "pblasmp"
    path = folder / f"preload-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if any(each in str(path) for each in _NOT_IN_LD_PRELOAD):
        raise ArgumentError(
            f"the library for ScaLAPACK programs would be {str(path)!r}, but LD_PRELOAD takes no path with a space, a "
            "colon or a dollar sign: set XDG_CACHE_HOME to a folder without"
        )
    if fault := fault_of(folder):
        raise ArgumentError(f"{fault}. Or set XDG_CACHE_HOME to a folder that only you can write")
    with contextlib.suppress(FileNotFoundError, ArgumentError):  # what is not trusted is replaced
        open_trusted(path).close()
        return path
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]  # CC may have options
    if shutil.which(compiler[0]) is None:
        raise LibraryNotFoundError(
            f"the library for ScaLAPACK programs is compiled when it is first needed, but there is no C compiler "
            f"{compiler[0]!r}: install one (gcc, clang), or name it in CC"
        )
    make_private(folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        code, made = Path(scratch, "preload.c"), Path(scratch, path.name)
        code.write_text(text, encoding="utf-8")
        command = [*compiler, "-O2", "-fPIC", "-shared", "-o", str(made), str(code), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnsupportedError(f"{' '.join(command[:-4])} failed: {done.stderr.strip()}")
        made.chmod(0o700)
        made.replace(path)  # another process may have been as fast
    return path


def _shared_python() -> Path:
    """Return the path of the shared library of this Python."""
    name, folder = str(sysconfig.get_config_var("INSTSONAME")), str(sysconfig.get_config_var("LIBDIR"))
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        for place in (Path(folder), Path(folder, multiarch)):
            if (place / name).exists():
                return place / name
    version = ".".join(map(str, sys.version_info[:2]))
    raise LibraryNotFoundError(
        f"{sys.executable}: this Python has no shared library, libpython{version}.so, which a program could load. "
        f"On Debian install the package libpython{version}; a Python built here needs --enable-shared"
    )
