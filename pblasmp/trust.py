# SPDX-License-Identifier: Apache-2.0
"""Paths that users give, and which files are trusted: those that no other user can write or replace.

A file is trusted if it is the user's or root's and nobody else may write it, and if the same holds for every folder and
symbolic link on the way to it. A folder whose sticky bit is set, such as /tmp, may be written by all: there nobody can
replace what is another user's.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import ArgumentError, ArgumentTypeError, short_repr

_MOST_LINKS = 40  # as in Linux
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def as_path(value: object, name: str = "path") -> Path:
    """Return the path that a user has given as the argument ``name``, or raise ArgumentTypeError. Local."""
    try:
        return Path(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"{name}: expected a path, got {short_repr(value)}") from None


def open_trusted(path: Path) -> BinaryIO:
    """Return a trusted file, opened for reading. Local.

    What is read is what was checked: the file is opened once, and never through a link. ArgumentError, which says what
    to do, if it is not trusted, or no file.
    """
    fault = fault_of(path)
    if fault:
        raise ArgumentError(fault)
    # does not wait for the other end of a pipe
    number = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(number)
    fault = _fault(str(path), status) if stat.S_ISREG(status.st_mode) else f"{path} is no regular file"
    if fault:
        os.close(number)
        raise ArgumentError(fault)
    return os.fdopen(number, "rb")


@contextlib.contextmanager
def private_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for temporary files that no other user can read, write or replace, for a ``with`` block. Local.

    ArgumentError if the folder of temporary files lets others replace what is in it.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        fault = fault_of(Path(name))
        if fault:
            raise ArgumentError(f"{fault}. Or set TMPDIR to another folder")
        yield Path(name)


def make_private(folder: Path) -> None:
    """Make a folder, and the folders on the way to it that are not there, for the user alone. Local."""
    for each in (*reversed(folder.absolute().parents), folder):
        each.mkdir(mode=0o700, exist_ok=True)


def fault_of(path: Path) -> str:
    """Return why what is at a path is not trusted, and what to do; an empty string if it is. Local.

    Nothing is wrong with what is not there yet, if nobody else can put it there.
    """
    try:
        for at, status in on_the_way(path):
            if status is None:
                return ""  # whoever opens it says why it cannot be opened
            if fault := _fault(at, status):
                return fault
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def on_the_way(path: Path) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield each folder, symbolic link and file on the way to a path, with its status; None: it is missing. Local.

    The last one is where the path leads. OSError if it leads through too many links.
    """
    at, links = "/", 0
    rest = [*reversed(path.absolute().parts)]
    while rest:
        part = rest.pop()
        # of a path without links; an absolute part begins anew
        at = os.path.dirname(at) if part == os.pardir else os.path.join(at, part)  # noqa: PTH118, PTH120
        status = None
        with contextlib.suppress(OSError):
            status = os.lstat(at)
        yield at, status
        if status is not None and stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            rest.extend(reversed(Path(os.readlink(at)).parts))  # noqa: PTH115
            at = os.path.dirname(at)  # noqa: PTH120


def _fault(path: str, status: os.stat_result) -> str:
    """Return what is wrong with one file, folder or link, whatever holds it."""
    mode = status.st_mode
    owners = {os.geteuid(), 0}
    if not stat.S_ISREG(mode):
        owners.add(os.stat("/").st_uid)  # noqa: PTH116 - root, where containers give users other numbers
    if status.st_uid not in owners:
        return f"{path} is not trusted: it belongs to another user ({_name(status.st_uid)})"
    if stat.S_ISLNK(mode) or not mode & _OTHERS:
        return ""
    if stat.S_ISDIR(mode) and (mode & stat.S_ISVTX or _is_private(path, status)):
        return ""
    return (
        f"{path} is not trusted: other users may write it (mode {stat.S_IMODE(mode):04o}): chmod go-w {path}"
    )


def _is_private(path: str, status: os.stat_result) -> bool:
    """Return whether only the user is in the group of a folder that its group may write.

    Some systems give every user a group of the same name, and let it write what the user makes.
    """
    if status.st_mode & stat.S_IWOTH or os.geteuid() == 0:
        return False
    with contextlib.suppress(OSError, AttributeError):
        os.getxattr(path, "system.posix_acl_access")  # then the mode shows what others than the group may do
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name) and {*group.gr_mem} <= {user.pw_name}


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
