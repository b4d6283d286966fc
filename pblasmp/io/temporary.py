# SPDX-License-Identifier: Apache-2.0
"""Files that appear under their name only when they are complete: written under a hidden name first, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import ArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Replacement", "remove_abandoned"]

_LONGEST = 200  # bytes of a name that leave room for the ending


class Replacement:
    """A new version of a file or directory: ``with Replacement(path) as new: write new.path; new.commit()``. Local.

    It is written in the same directory, as ``.NAME.pblasmp-RANDOM.tmp``, and replaces ``path`` on commit; without a
    commit it is removed. A lock (flock) tells others that it is in use: a file that a killed process left is removed by
    the next process that writes the same file. Symbolic links are followed, and a file keeps its mode.

    Args:
        path: what to write.
        directory: whether it is a directory, not a file.

    Raises:
        IsADirectoryError, NotADirectoryError: ``path`` is of the other kind.
        ArgumentError: ``path`` is neither a file nor a directory, but for example a device.
        OSError: nothing can be created there.
    """

    def __init__(self, path: Path, *, directory: bool = False) -> None:
        self.target = Path(os.path.realpath(path))
        self._directory = directory
        self._mode: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self._mode = self.target.stat().st_mode
        if self._mode is not None:
            _check_kind(path, self._mode, directory)
        remove_abandoned(path)
        self._lock = -1
        self._create()

    def _create(self) -> None:
        while self._lock < 0:
            self.path = self.target.with_name(f"{_prefix(self.target)}{secrets.token_hex(8)}.tmp")
            if self._directory:
                self.path.mkdir()
                flags = os.O_RDONLY | os.O_DIRECTORY
            else:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._lock = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
            # On a file system without locks, nothing is removed that others may use.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if not self._is_there():  # another process removed it as abandoned before it was locked
                os.close(self._lock)
                self._lock = -1
        try:
            if self._mode is not None and not self._directory:
                os.fchmod(self._lock, stat.S_IMODE(self._mode))
        except BaseException:
            self._remove()
            raise

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock), self.path.lstat())
        except FileNotFoundError:
            return False

    def __enter__(self) -> Self:
        return self

    def commit(self) -> None:
        """Replace what is at ``path``. Local."""
        if self._directory and self.target.exists():  # rename does not replace a directory that is not empty
            with Replacement(self.target, directory=True) as old:
                self.target.rename(old.path)
                try:
                    self.path.rename(self.target)
                except BaseException:
                    old.path.rename(self.target)
                    raise
        else:
            self.path.replace(self.target)
        os.close(self._lock)
        self._lock = -1

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # an earlier failure is the error to report
            if self._directory:
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                self.path.unlink()
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock >= 0:
            self._remove()


def _check_kind(path: Path, mode: int, directory: bool) -> None:
    if stat.S_ISDIR(mode) and not directory:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISREG(mode) and directory:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ArgumentError(f"{path}: expected a file, got a device, socket or pipe")


def _prefix(target: Path) -> str:
    """Return how the names of temporary files for ``target`` begin."""
    name = os.fsencode(target.name)
    stem = target.name if len(name) <= _LONGEST else blake2b(name, digest_size=16).hexdigest()
    return f".{stem}.pblasmp-"


def _leftovers(target: Path) -> Iterator[Path]:
    pattern = re.compile(re.escape(_prefix(target)) + r"[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        yield from [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name)]


def remove_abandoned(path: Path) -> None:
    """Remove temporary files for ``path`` that a killed job left and no process has open. Local; raises nothing."""
    for leftover in _leftovers(Path(os.path.realpath(path))):
        with contextlib.suppress(OSError):
            directory = leftover.is_dir()
            flags = (os.O_RDONLY if directory else os.O_RDWR) | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(leftover, flags)
            try:
                # Fails if the file is locked, or there are no locks.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if directory:
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink()
            finally:
                os.close(lock)
