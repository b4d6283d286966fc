# SPDX-License-Identifier: Apache-2.0
"""Files that appear under their name only when they are complete: written under a hidden name first, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ...errors import ArgumentError
from ...trust import on_the_way

if TYPE_CHECKING:
    from typing_extensions import Self

_AROUND = len(".") + len(".pblasmp-0123456789abcdef.tmp")  # bytes that are added to a name
PATIENCE_SECONDS = 0.5  # for locks that are about to be released, such as those of another rank's load
_EXCHANGE = 2  # RENAME_EXCHANGE in linux/fs.h
_HERE = -100  # AT_FDCWD in fcntl.h
_ASIDE = ".old"
_TEMPORARY = re.compile(r"\..*\.pblasmp-[0-9a-f]{16}\.(tmp|old)", re.DOTALL)
_ACCESS_LIST = "system.posix_acl_access"
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK)


class Replacement:
    """A new version of a file or directory: ``with Replacement(path) as new: write new.path; new.commit()``. Local.

    It is written in the same directory, as ``.NAME.pblasmp-RANDOM.tmp``, and replaces ``path`` on commit; without a
    commit it is removed. A lock (flock) tells others that it is in use: a file that a killed process left is removed by
    the next process that writes the same file. Symbolic links are followed, see ``followed``. What is replaced keeps
    its mode, its owner as far as the user may give it away, and its access list.

    Args:
        path: what to write.
        directory: whether it is a directory, not a file.
        amends: the new version keeps a part of the old one, so only one writer at a time is allowed. The old file is
            locked as HDF5 locks files, and is not replaced if it has changed meanwhile.

    Raises:
        IsADirectoryError, NotADirectoryError: ``path`` is of the other kind.
        ArgumentError: ``path`` is neither a file nor a directory, but for example a device; or it is in use.
        PermissionError: ``path`` may not be written, or is another user's in a folder that all may write, such as /tmp.
        OSError: nothing can be created there; the file system is read-only.
    """

    def __init__(self, path: Path, *, directory: bool = False, amends: bool = False) -> None:
        self.target = followed(path)
        self._given, self._directory, self._amends = path, directory, amends
        self._pending = self._closed = False
        self._closing, self._numbers = _no_numbers()
        if directory:
            put_back(self.target)
        self._old: os.stat_result | None = None
        with contextlib.suppress(FileNotFoundError):
            self._old = self.target.lstat()
        if self._old is not None:
            check_kind(path, self._old.st_mode, directory=directory)
            _check_owner(path, self.target, self._old)
            # A rename needs no right to the file itself, but a read-only file is not to be replaced.
            if not os.access(self.target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
                read_only = os.statvfs(self.target).f_flag & os.ST_RDONLY
                number = errno.EROFS if read_only else errno.EACCES
                raise OSError(number, os.strerror(number), str(path))
        remove_abandoned(self.target)

    @property
    def replaces(self) -> bool:
        """Whether there is an old version. Local."""
        return self._old is not None

    def begin(self, stack: ExitStack) -> Self:
        """Do what ``with`` does; what ``stack`` undoes, even if a signal's handler raises an exception now. Local."""
        stack.push(self)
        return self.__enter__()

    def __enter__(self) -> Self:
        try:
            if self._amends:
                self._lock_old()
            while not self._create():
                self._pending = False
            if self._amends and is_being_written(self.target, but=self.path):
                raise self._in_use()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _lock_old(self) -> None:
        """Take HDF5's lock on the old file, so that neither HDF5 nor another save changes it.

        HDF5_USE_FILE_LOCKING=FALSE, for file systems whose locks do not work, is heeded as HDF5 does. Then, or if there
        are no locks, ``commit`` still finds that the file has changed.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._old is not None:
            number = _open(self.target, os.O_RDWR | os.O_NOFOLLOW, self._numbers)
            if os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() not in ("FALSE", "0"):
                while not _lock(number):
                    if time.monotonic() > deadline:
                        raise self._in_use()
                    time.sleep(0.01)
            self._old = os.fstat(number)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(self._old, self.target.lstat()):
                    return
            self._old = None  # another save has just replaced it, or it was removed
            with contextlib.suppress(FileNotFoundError):
                self._old = self.target.lstat()

    def _in_use(self) -> ArgumentError:
        if is_being_written(self.target, but=getattr(self, "path", None)):
            return ArgumentError(
                f"{self._given}: is locked: another save, or the block of an open_file, writes this file at the "
                "moment, in this job or another one. Save to what open_file returned, or save again later"
            )
        return ArgumentError(
            f"{self._given}: is locked: a program has it open, probably through h5py, in this job or another one. "
            "Close it there and save again; HDF5_USE_FILE_LOCKING=FALSE turns these locks off"
        )

    def _create(self) -> bool:
        """Create and lock the file; return False if another process removed it as abandoned before it was locked."""
        self.path = self.target.with_name(f"{_prefix(self.target)}{secrets.token_hex(8)}.tmp")
        self._pending = True
        # Until the new version has the old one's mode, nobody else may read it. Its own mode follows from the umask.
        private = self._old is not None
        try:
            if self._directory:
                self.path.mkdir(0o700 if private else 0o777)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            else:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._number = _open(self.path, flags, self._numbers, 0o600 if private else 0o666)
        except FileExistsError:
            self._pending = False  # it is not ours
            raise
        # On a file system without locks, nothing is removed that others may use.
        with contextlib.suppress(OSError):
            fcntl.flock(self._number, fcntl.LOCK_EX)
        try:
            return os.path.samestat(os.fstat(self._number), self.path.lstat())
        except FileNotFoundError:
            return False

    def commit(self) -> None:
        """Replace what is at ``path``. Local.

        ArgumentError if the old file, of which the new one keeps a part, has changed meanwhile; OSError if it cannot be
        replaced, for example because there is a directory that was not there before.
        """
        if self._old is not None:
            _keep_access(self._number, self.path, self.target)
        if self._amends:
            self._check_unchanged()
        if self._amends and self._old is None:
            self._put_new()
        elif self._directory and self._old is not None:
            self.path = exchange(self.path, self.target)
            self._remove()
        else:
            self.path.replace(self.target)
        self._close()

    def _check_unchanged(self) -> None:
        now = None
        with contextlib.suppress(FileNotFoundError):
            now = self.target.lstat()
        if _version(now) != _version(self._old):
            raise ArgumentError(
                f"{self._given}: another program changed this file while it was saved; it was left as it is now. Save "
                "again"
            )

    def _put_new(self) -> None:
        """Give the file its name unless there is one meanwhile, which ``replace`` would overwrite."""
        try:
            os.link(self.path, self.target)
        except FileExistsError:
            self._check_unchanged()
            raise
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
            self.path.replace(self.target)
        else:
            self.path.unlink()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):  # a forked process may have the files open, too
                list(map(fcntl.flock, self._numbers, repeat(fcntl.LOCK_UN)))
        list(self._closing)
        self._pending = False

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # an earlier failure is the error to report
            if self._directory:
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                self.path.unlink()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._pending:
                self._remove()
        finally:
            self._close()


def followed(path: Path) -> Path:
    """Return where a path leads, as ``os.path.realpath`` does. Local.

    In a folder in which all may write, such as /tmp, another user's symbolic link would decide which file is read or
    replaced. Linux does not follow such links by itself (fs.protected_symlinks), nor does this.

    Raises:
        PermissionError: the path leads through such a link.
        OSError: it leads through too many links.
        ArgumentError: it is not a path.
    """
    if "\0" in str(path):
        raise ArgumentError(f"path: expected a name without NUL, got {str(path)!r}")
    at = "/"
    for at, status in on_the_way(path):
        if status is not None and stat.S_ISLNK(status.st_mode):
            _check_owner(path, Path(at), status)
    return Path(at)


def _check_owner(path: Path, found: Path, status: os.stat_result) -> None:
    """Raise PermissionError if another user put ``found`` into a folder that all may write. Local."""
    folder = found.parent.stat()
    if (
        folder.st_mode & stat.S_ISVTX
        and folder.st_mode & stat.S_IWOTH
        and status.st_uid not in (os.geteuid(), folder.st_uid)
    ):
        what = "symbolic link" if stat.S_ISLNK(status.st_mode) else "file"
        why = f"{found} is a {what} of another user in a folder that all may write"
        raise PermissionError(errno.EACCES, f"{os.strerror(errno.EACCES)}: {why}", str(path))


def check_kind(path: Path, mode: int, *, directory: bool) -> None:
    """Raise an error unless a mode is that of a file, or of a directory. Local."""
    if stat.S_ISDIR(mode) and not directory:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISREG(mode) and directory:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ArgumentError(f"{path}: expected a file, got a device, socket or pipe")


def _version(status: os.stat_result | None) -> tuple[int, ...]:
    """Return what tells whether a file is still the same and has not been written."""
    if status is None:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _keep_access(new: int, where: Path, path: Path) -> None:
    """Give a new file or directory the owner, the access list and the mode of the one at ``path``. Local.

    What cannot be kept, as only root may give files away, never lets more users in: where the group differs, it gets no
    more than all others.
    """
    old, now = path.lstat(), os.fstat(new)
    if stat.S_ISDIR(old.st_mode):
        _keep_access_inside(where, path, old)
    for owner in (old.st_uid, -1):
        if (now.st_uid, now.st_gid) != (old.st_uid, old.st_gid):
            with contextlib.suppress(OSError):
                os.fchown(new, owner, old.st_gid)
            now = os.fstat(new)
    mode = stat.S_IMODE(old.st_mode)
    if now.st_uid != old.st_uid:
        mode &= ~(stat.S_ISUID | stat.S_ISGID)
    if not _keep_list(new, path) or now.st_gid != old.st_gid:
        mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    os.fchmod(new, mode)


def _keep_access_inside(new: Path, path: Path, old: os.stat_result) -> None:
    """Give all in a new directory the modes and owner of the old one and of a file in it, if they differ. Local."""
    like, made = _first_file(path), _first_file(new)
    if like is None or made is None:
        return
    mode, inner_mode = stat.S_IMODE(like.st_mode), stat.S_IMODE(old.st_mode)
    new_mode = stat.S_IMODE(made.st_mode)
    as_made = (new_mode, new_mode | (new_mode & 0o444) >> 2, made.st_uid)  # as far as it shows the umask
    if as_made == (mode, inner_mode, old.st_uid):
        return
    for folder, folders, files in os.walk(new):
        for names, its_mode in ((files, mode), (folders, inner_mode)):
            for name in names:
                inner = Path(folder, name)
                with contextlib.suppress(OSError):
                    os.chown(inner, old.st_uid, old.st_gid, follow_symlinks=False)
                inner.chmod(its_mode)


def _first_file(folder: Path) -> os.stat_result | None:
    with os.scandir(folder) as entries:
        return next((each.stat() for each in entries if each.is_file(follow_symlinks=False)), None)


def _keep_list(new: int, path: Path) -> bool:
    """Give a new file the access list of another, or none if that has none; return whether it has. Local."""
    wanted, there = _access_list(path), _access_list(new)
    try:
        if wanted:
            os.setxattr(new, _ACCESS_LIST, wanted)
        elif there:
            os.removexattr(new, _ACCESS_LIST)
    except OSError:
        return False
    return True


def _access_list(file: int | Path) -> bytes:
    try:
        return os.getxattr(file, _ACCESS_LIST)
    except (OSError, AttributeError):  # it has none, or there are none on this system
        return b""


def exchange(new: Path, target: Path) -> Path:
    """Put the directory ``new`` in the place of ``target``; return where the old one is then. Local.

    Linux does so in one step. Elsewhere it takes two, with the old directory under a third name: if a process is killed
    between them, ``put_back`` sets that right.
    """
    number = renameat2(new, target)
    if not number:
        return new
    if number not in _NOT_OFFERED:
        raise OSError(number, os.strerror(number), str(target))
    aside = new.with_suffix(_ASIDE)
    try:
        list(map(os.rename, (target, new), (aside, target)))  # no signal's handler runs in between
    except BaseException:
        if not os.path.lexists(target):
            aside.rename(target)
        raise
    return aside


def renameat2(one: Path, other: Path) -> int:
    """Exchange two names in one step; return 0, or the number of the error."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return errno.ENOSYS
    names = ctypes.c_char_p(os.fsencode(one)), ctypes.c_char_p(os.fsencode(other))
    return ctypes.get_errno() if rename(_HERE, names[0], _HERE, names[1], _EXCHANGE) else 0


def put_back(target: Path) -> None:
    """Give an old directory its name again if a process was killed while ``exchange`` replaced it. Local.

    Only then are both the old and the new one there, and nothing under the name itself.
    """
    if os.path.lexists(target):
        return
    for aside in _leftovers(target, _ASIDE):
        closing, numbers = _no_numbers()
        try:
            with contextlib.suppress(OSError):
                _check_owner(target, aside, aside.lstat())
                lock = _open(aside.with_suffix(".tmp"), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, numbers)
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process that is about to give the name
                if not os.path.lexists(target):
                    aside.rename(target)
        finally:
            list(closing)


def _no_numbers() -> tuple[Iterator[None], list[int]]:
    """Return what closes the files whose numbers come into a list, each file once; and the list. Local."""
    numbers: list[int] = []
    return map(os.close, numbers), numbers


def _open(path: Path, flags: int, numbers: list[int], mode: int = 0o600) -> int:
    """Open a file, and return its number, which is in a list before a signal's handler can raise anything. Local.

    Handlers run between two steps of Python: here, opening and keeping the number is one.
    """
    numbers.extend(map(os.open, [path], [flags | os.O_CLOEXEC], [mode]))
    return numbers[-1]


def _lock(number: int) -> bool:
    """Take a lock that allows no other; return False if another has one, True also if there are no locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _prefix(target: Path) -> str:
    """Return how the names of temporary files for ``target`` begin."""
    name, longest = os.fsencode(target.name), 255
    with contextlib.suppress(OSError):  # such as that the folder is not there
        longest = os.pathconf(target.parent, "PC_NAME_MAX")
    stem = target.name if len(name) + _AROUND <= longest else blake2b(name, digest_size=16).hexdigest()
    return f".{stem}.pblasmp-"


def is_temporary(name: str) -> bool:
    """Return whether a name is like those of temporary files, which the next save removes. Local."""
    return _TEMPORARY.fullmatch(name) is not None


def _leftovers(target: Path, *endings: str) -> Iterator[Path]:
    pattern = re.compile(f"{re.escape(_prefix(target))}[0-9a-f]{{16}}({'|'.join(map(re.escape, endings))})")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        yield from [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name)]


def is_being_written(target: Path, *, but: Path | None = None) -> bool:
    """Return whether a process writes a new version of ``target``, other than ``but``. Local; raises nothing."""
    for leftover in _leftovers(target, ".tmp"):
        if leftover == but:
            continue
        closing, numbers = _no_numbers()
        try:
            number = _open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, numbers)
            fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            continue
        finally:
            list(closing)
    return False


def remove_abandoned(path: Path) -> None:
    """Remove temporary files for ``path`` that a killed job left and no process has open. Local; raises nothing."""
    try:
        target = followed(path)
    except (OSError, ArgumentError):
        return
    found = list(_leftovers(target, ".tmp", _ASIDE))
    if not os.path.lexists(target):  # ``put_back`` may need them
        asides = {each.stem for each in found if each.suffix == _ASIDE}
        found = [each for each in found if each.stem not in asides]
    for leftover in found:
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
