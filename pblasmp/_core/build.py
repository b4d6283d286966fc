# SPDX-License-Identifier: Apache-2.0
"""Compiles the core. ``python pblasmp/_core/build.py`` does it in place; ``hatch_build.py`` when pblasmp is installed.

It imports nothing of pblasmp, which is not installed yet then.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = Path(__file__)
_HERE = BUILD.parent
_SOURCES = tuple(sorted(path.name for path in _HERE.glob("*.[ch]")))
LIBRARY = _HERE / "core.linux.so"  # of a name with two dots no importer takes it for a module
# Functions of other libraries that have one of its names must not take their places.
_OPTIONS = "-std=c11", "-O3", "-fPIC", "-shared", "-Wl,-Bsymbolic"


def digest() -> str:
    """Return what tells the sources from others. Local."""
    return hashlib.blake2b(
        b"".join((_HERE / name).read_bytes() for name in _SOURCES), digest_size=8
    ).hexdigest()


def compiler() -> list[str] | None:
    """Return ``$CC``, which may have options, or the first of the usual names that exists; None without one."""
    given = shlex.split(os.environ.get("CC", ""))
    candidates = [given] if given else [["cc"], ["gcc"], ["clang"]]
    return next((each for each in candidates if shutil.which(each[0])), None)


def build(target: Path) -> str:
    """Compile the core into ``target``, which may be in use; return an empty text, or why not. Local."""
    found = compiler()
    if found is None:
        return "no C compiler"
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".core-") as room:
        made = Path(room) / target.name
        sources = (str(_HERE / name) for name in _SOURCES if name.endswith(".c"))
        command = [
            found[0],
            *_OPTIONS,
            *found[1:],
            f'-DCORE_SOURCES="{digest()}"',
            "-o",
            str(made),
            *sources,
        ]
        why_not = run(command)
        if not why_not:
            made.replace(target)
        return why_not


def run(command: list[str]) -> str:
    """Run a compiler; return an empty text, or how it failed."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return f"the C compiler failed: {shlex.join(command)}\n{done.stderr.strip()}" if done.returncode else ""


if __name__ == "__main__":
    sys.exit(build(LIBRARY) or None)
