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
from contextlib import ExitStack
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
        self._pending = False
        self._mode: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self._mode = self.target.stat().st_mode
        if self._mode is not None:
            _check_kind(path, self._mode, directory)
        remove_abandoned(path)

    def begin(self, stack: ExitStack) -> Self:
        """Do what ``with`` does; what ``stack`` undoes, even if a signal's handler raises an exception now. Local."""
        stack.push(self)
        return self.__enter__()

    def __enter__(self) -> Self:
        try:
            while not self._create():
                self._close()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _create(self) -> bool:
        """Create and lock the file; return False if another process removed it as abandoned before it was locked."""
        self.path = self.target.with_name(f"{_prefix(self.target)}{secrets.token_hex(8)}.tmp")
        self._closing, numbers = _no_numbers()
        self._pending = True
        if self._directory:
            self.path.mkdir()
            flags = os.O_RDONLY | os.O_DIRECTORY
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        lock = _open(self.path, flags, numbers)
        # On a file system without locks, nothing is removed that others may use.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not os.path.samestat(os.fstat(lock), self.path.lstat()):
                return False
        except FileNotFoundError:
            return False
        if self._mode is not None and not self._directory:
            os.fchmod(lock, stat.S_IMODE(self._mode))
        return True

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
        self._close()

    def _close(self) -> None:
        list(self._closing)
        self._pending = False

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # an earlier failure is the error to report
            try:
                if self._directory:
                    shutil.rmtree(self.path, ignore_errors=True)
                else:
                    self.path.unlink()
            finally:
                self._close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending:
            self._remove()


def _no_numbers() -> tuple[Iterator[None], list[int]]:
    """Return what closes the files whose numbers come into a list, each file once; and the list. Local."""
    numbers: list[int] = []
    return map(os.close, numbers), numbers


def _open(path: Path, flags: int, numbers: list[int]) -> int:
    """Open a file, and return its number, which is in a list before a signal's handler can raise anything. Local.

    Handlers run between two steps of Python: here, opening and keeping the number is one.
    """
    numbers.extend(map(os.open, [path], [flags | os.O_CLOEXEC], [0o666]))
    return numbers[-1]


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
            closing, numbers = _no_numbers()
            try:
                lock = _open(leftover, (os.O_RDONLY if directory else os.O_RDWR) | os.O_NOFOLLOW, numbers)
                # Fails if the file is locked, or there are no locks.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if directory:
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink()
            finally:
                list(closing)
