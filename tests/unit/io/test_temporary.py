# SPDX-License-Identifier: Apache-2.0
"""Files that appear when they are whole: nobody's files collide, and no file in use is removed."""

import errno
import fcntl
import os
import signal
import stat
import struct
import subprocess
import sys

import pytest

from pblasmp.matrix.io import temporary
from pblasmp.matrix.io.temporary import Replacement, followed, put_back, remove_abandoned


def names(path):
    return sorted(x.name for x in path.iterdir())


@pytest.mark.parametrize("directory", [False, True])
def test_without_commit_nothing_is_left(tmp_path, directory):
    with pytest.raises(ZeroDivisionError), Replacement(tmp_path / "x", directory=directory):  # noqa: PT012
        assert len(names(tmp_path)) == 1
        raise ZeroDivisionError
    assert names(tmp_path) == []


@pytest.fixture(params=["in one step", "in two steps"])
def exchange(request, monkeypatch):
    """Both ways to replace a directory."""
    if request.param == "in two steps":
        monkeypatch.setattr(temporary, "renameat2", lambda *_: errno.EINVAL)


def test_directories_are_replaced(tmp_path, exchange):
    target = tmp_path / "x"
    target.mkdir()
    (target / "old").touch()
    with Replacement(target, directory=True) as new:
        (new.path / "new").touch()
        new.commit()
    assert (names(tmp_path), names(target)) == (["x"], ["new"])


def test_a_directory_stays_when_it_cannot_be_replaced(tmp_path, exchange):
    target = tmp_path / "x"
    target.mkdir()
    (target / "old").touch()
    with Replacement(target, directory=True) as new:
        new.path.rmdir()
        with pytest.raises(FileNotFoundError):
            new.commit()
    assert (names(tmp_path), names(target)) == (["x"], ["old"])


def test_an_error_of_the_clean_up_does_not_hide_the_first(tmp_path):
    with pytest.raises(ZeroDivisionError), Replacement(tmp_path / "x") as new:  # noqa: PT012
        new.path.unlink()
        raise ZeroDivisionError


def test_two_writers_do_not_meet(tmp_path):
    with Replacement(tmp_path / "x") as one, Replacement(tmp_path / "x") as other:
        one.path.write_text("one")
        other.path.write_text("other")
        other.commit()
        one.commit()
    assert (names(tmp_path), (tmp_path / "x").read_text()) == (["x"], "one")


def test_what_a_killed_process_left_is_removed_and_nothing_in_use(tmp_path):
    script = f"""
import sys, time
from pathlib import Path
from pblasmp.matrix.io.temporary import Replacement
with Replacement(Path({str(tmp_path / "x")!r})):
    print("there", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout.readline() == b"there\n"
            held = names(tmp_path)
            remove_abandoned(tmp_path / "x")
            assert names(tmp_path) == held
            assert len(held) == 1
        finally:
            writer.send_signal(signal.SIGKILL)
    assert names(tmp_path) == held
    remove_abandoned(tmp_path / "x")
    assert names(tmp_path) == []


def test_a_file_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    def flock(file, how, first=[True]):  # noqa: B006 - remembers that it was called
        if first.pop() if first else False:
            for path in tmp_path.iterdir():
                path.unlink()
        fcntl.flock(file, how)

    monkeypatch.setattr(temporary, "fcntl", type("fcntl", (), {**vars(fcntl), "flock": staticmethod(flock)}))
    with Replacement(tmp_path / "x") as new:
        new.path.write_text("whole")
        new.commit()
    assert (tmp_path / "x").read_text() == "whole"


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(temporary.fcntl, "flock", flock)
    left = tmp_path / ".x.pblasmp-0123456789abcdef.tmp"
    left.touch()
    with Replacement(tmp_path / "x") as new:
        new.commit()
    assert names(tmp_path) == [left.name, "x"]


@pytest.mark.parametrize("longest", [255, 143])
def test_names_as_long_as_they_may_be(longest, tmp_path, monkeypatch):
    monkeypatch.setattr(temporary.os, "pathconf", lambda *_: longest)
    for length in (1, longest // 2 - 15, longest // 2 - 14, longest // 2):
        target = tmp_path / ("ä" * length)
        with Replacement(target) as new:
            assert len(os.fsencode(new.path.name)) <= longest
            new.commit()
        assert names(tmp_path) == [target.name]
        target.unlink()


def test_directories_and_files_are_told_apart(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError):
        Replacement(tmp_path)
    with pytest.raises(NotADirectoryError):
        Replacement(tmp_path / "file", directory=True)
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


LEFT = ".x.pblasmp-0123456789abcdef"


def killed_between_two_renames(folder):
    for name in ("tmp", "old"):
        (folder / f"{LEFT}.{name}").mkdir()
        (folder / f"{LEFT}.{name}" / name).touch()


def test_a_job_killed_between_two_renames_has_lost_nothing(tmp_path):
    killed_between_two_renames(tmp_path)
    remove_abandoned(tmp_path / "x")
    assert names(tmp_path) == [f"{LEFT}.old", f"{LEFT}.tmp"]
    put_back(tmp_path / "x")
    assert names(tmp_path / "x") == ["old"]
    with Replacement(tmp_path / "x", directory=True) as new:
        (new.path / "newer").touch()
        new.commit()
    assert (names(tmp_path), names(tmp_path / "x")) == (["x"], ["newer"])


def test_an_old_directory_comes_back_only_if_the_new_one_did_not_get_its_name(tmp_path):
    killed_between_two_renames(tmp_path)
    (tmp_path / "x").mkdir()
    put_back(tmp_path / "x")
    assert names(tmp_path / "x") == []
    remove_abandoned(tmp_path / "x")
    assert names(tmp_path) == ["x"]
    (tmp_path / f"{LEFT}.old").mkdir()
    (tmp_path / "x").rmdir()  # by the user
    put_back(tmp_path / "x")
    assert names(tmp_path) == [f"{LEFT}.old"]


def test_a_process_between_two_renames_is_not_disturbed(tmp_path):
    """Loading waits until it has given the name, or was killed."""
    script = f"""
import fcntl, os, sys, time
os.mkdir({str(tmp_path / LEFT)!r} + ".tmp"), os.mkdir({str(tmp_path / LEFT)!r} + ".old")
lock = os.open({str(tmp_path / LEFT)!r} + ".tmp", os.O_RDONLY)
fcntl.flock(lock, fcntl.LOCK_EX)
print("there", flush=True)
time.sleep(0.2)
os.rename({str(tmp_path / LEFT)!r} + ".tmp", {str(tmp_path / "x")!r})
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"there\n"
        put_back(tmp_path / "x")
        assert (names(tmp_path), writer.wait()) == ([f"{LEFT}.old", "x"], 0)


def test_a_file_that_is_there_is_not_amended_by_two(tmp_path):
    for there in (False, True):
        with Replacement(tmp_path / "x", amends=True) as one:
            one.path.write_text("one")
            with pytest.raises(ValueError, match="is locked: another save"):
                Replacement(tmp_path / "x", amends=True).__enter__()
            one.commit()
        assert names(tmp_path) == ["x"], there


def test_a_temporary_file_is_never_one_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(temporary.secrets, "token_hex", lambda _: "0123456789abcdef")
    (tmp_path / "mine").write_text("precious")
    (tmp_path / f"{LEFT}.tmp").symlink_to("mine")
    for directory in (False, True):
        with pytest.raises(FileExistsError):
            Replacement(tmp_path / "x", directory=directory).__enter__()
        assert (tmp_path / "mine").read_text() == "precious"


def test_links_are_followed_as_realpath_does(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "to_b").symlink_to("a/b")
    (tmp_path / "a" / "up").symlink_to("../to_b/../b/file")
    (tmp_path / "absolute").symlink_to(tmp_path / "a" / "up")
    (tmp_path / "dangling").symlink_to("none/there")
    for name in ("to_b/file", "to_b/../up", "absolute", "dangling", "a/./b//file", "none", "a/b/file/none"):
        assert str(followed(tmp_path / name)) == os.path.realpath(tmp_path / name), name
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        followed(tmp_path / "loop")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_what_other_users_put_into_a_shared_folder(tmp_path):
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    for path in (mine / "file", shared / "file", shared / "own"):
        path.write_text("precious")
    (mine / "folder").mkdir()
    (shared / "link").symlink_to(mine / "file")
    (shared / "folder").symlink_to(mine)
    (shared / "own_link").symlink_to(mine / "file")
    for name in ("link", "folder", "file"):
        os.lchown(shared / name, 12345, 12345)
    (tmp_path / "over").symlink_to(shared / "link")
    for path in (shared / "link", shared / "folder" / "file", tmp_path / "over"):
        for call in (followed, Replacement):
            with pytest.raises(PermissionError, match="symbolic link of another user"):
                call(path)
    with pytest.raises(PermissionError, match="file of another user"):
        Replacement(shared / "file")
    assert followed(shared / "file") == shared / "file"
    for name in ("own", "own_link"):
        with Replacement(shared / name) as new:
            new.path.write_text(name)
            new.commit()
    assert ((shared / "own").read_text(), (mine / "file").read_text()) == ("own", "own_link")
    assert (shared / "own_link").is_symlink()
    killed_between_two_renames(shared)
    for ending in ("tmp", "old"):
        os.lchown(shared / f"{LEFT}.{ending}", 12345, 12345)
    put_back(shared / "x")
    assert not (shared / "x").exists()
    os.lchown(shared, 12345, 12345)  # the folder's owner may set links for others, as Linux has it
    assert followed(shared / "link") == mine / "file"
    shared.chmod(0o755)
    os.lchown(shared, 0, 0)
    assert followed(shared / "link") == mine / "file"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_owner_is_kept_or_nobody_else_gets_in(tmp_path, monkeypatch):
    target = tmp_path / "x"
    target.touch()
    target.chmod(0o4664)
    os.chown(target, 12345, 12346)
    os.chmod(target, 0o4664)  # noqa: PTH101
    for allowed, mode in ((True, 0o4664), (False, 0o644)):
        if not allowed:
            monkeypatch.setattr(temporary.os, "fchown", lambda *_: os.open("/none", os.O_RDONLY))
        with Replacement(target) as new:
            new.commit()
        status = target.stat()
        assert stat.S_IMODE(status.st_mode) == mode
        assert (status.st_uid, status.st_gid) == ((12345, 12346) if allowed else (0, 0))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("directory", [False, True])
def test_what_is_read_only_is_not_replaced(directory, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    target = folder / "x"
    target.mkdir() if directory else target.touch()
    target.chmod(0o555)
    above = [x for x in tmp_path.parents if x.owner() == "root" and x.stat().st_mode & 0o001 == 0]
    before = [x.stat().st_mode for x in above]
    try:
        for each in (tmp_path, *above):
            each.chmod(0o711)
        os.seteuid(12345)
        with pytest.raises(PermissionError, match="Permission denied"):
            Replacement(target, directory=directory)
    finally:
        os.seteuid(0)
        for each, mode in zip(above, before, strict=True):
            each.chmod(mode)
    assert names(folder) == ["x"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_read_only_file_system_is_named(tmp_path):
    (tmp_path / "x").touch()
    mounted = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    code = (
        "import sys, pathlib; from pblasmp.matrix.io import temporary\n"
        "temporary.Replacement(pathlib.Path(sys.argv[1]))"
    )
    replaces = sys.executable, "-c", code, str(tmp_path / "x")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, str(tmp_path), *replaces],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"nothing can be mounted: {done.stderr}")
    assert "OSError: [Errno 30] Read-only file system" in done.stderr


def test_the_access_list_is_kept(tmp_path):
    entries = ((0x01, 6, -1), (0x02, 4, 12345), (0x04, 0, -1), (0x10, 4, -1), (0x20, 0, -1))
    wanted = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    target, kind = tmp_path / "x", "system.posix_acl_access"
    target.touch()
    try:
        os.setxattr(target, kind, wanted)
    except OSError:
        pytest.skip("the file system has no access lists")
    with Replacement(target) as new:
        new.commit()
    assert os.getxattr(target, kind) == wanted
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
