# SPDX-License-Identifier: Apache-2.0
"""Files that appear when they are whole: nobody's files collide, and no file in use is removed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from pblasmp.io import temporary
from pblasmp.io.temporary import Replacement, remove_abandoned


def names(path):
    return sorted(x.name for x in path.iterdir())


def test_commit_replaces(tmp_path):
    target = tmp_path / "x"
    target.write_text("old")
    with Replacement(target) as new:
        new.path.write_text("new")
        assert target.read_text() == "old"
        new.commit()
    assert (names(tmp_path), target.read_text()) == (["x"], "new")


@pytest.mark.parametrize("directory", [False, True])
def test_without_commit_nothing_is_left(tmp_path, directory):
    with pytest.raises(ZeroDivisionError), Replacement(tmp_path / "x", directory=directory):  # noqa: PT012
        assert len(names(tmp_path)) == 1
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_directories_are_replaced(tmp_path):
    target = tmp_path / "x"
    target.mkdir()
    (target / "old").touch()
    with Replacement(target, directory=True) as new:
        (new.path / "new").touch()
        new.commit()
    assert (names(tmp_path), names(target)) == (["x"], ["new"])


def test_a_directory_stays_when_it_cannot_be_replaced(tmp_path):
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
from pblasmp.io.temporary import Replacement
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


def test_names_as_long_as_they_may_be(tmp_path):
    target = tmp_path / ("ä" * 127)
    with Replacement(target) as new:
        new.commit()
    assert names(tmp_path) == [target.name]


def test_names_that_look_like_patterns(tmp_path):
    other = tmp_path / ".ab.pblasmp-0123456789abcdef.tmp"
    other.touch()
    with Replacement(tmp_path / "a?") as new, Replacement(tmp_path / "[a]*") as more:
        new.commit()
        more.commit()
    assert names(tmp_path) == [other.name, "[a]*", "a?"]


def test_directories_and_files_are_told_apart(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(IsADirectoryError):
        Replacement(tmp_path)
    with pytest.raises(NotADirectoryError):
        Replacement(tmp_path / "file", directory=True)
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208
