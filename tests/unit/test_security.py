# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md promises: which files are trusted, that none runs code, that none takes more memory than it says."""

import io
import json
import os
import pickle
import stat
import subprocess
import sys
import tempfile
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import launch, preload, testing
from pblasmp.bindings import Library
from pblasmp.cli.reports import Channel
from pblasmp.costs.machines import load_machine
from pblasmp.launch import last_lines
from pblasmp.launchers import find_launcher
from pblasmp.problems.files import load_grid
from pblasmp.trust import fault_of, make_private, open_trusted, private_folder
from pblasmp.tuning.measurements import Entry, read_file, save, tuning_file
from tests.helpers.command_line import run_here
from tests.helpers.mpi import run_mpi
from tests.helpers.ranks.pool import World

OTHER = os.getuid() + 12345
COMPILER = """#!/bin/sh
for each; do [ "$before" = -o ] && echo made >"$each"; before=$each; done
"""


@pytest.fixture
def give_away(monkeypatch):
    """What makes a file, folder or link another user's: only root can do that really."""

    def give(path):
        if os.geteuid() == 0:
            os.lchown(path, OTHER, OTHER)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: OTHER)

    return give


@pytest.fixture
def file(tmp_path):
    """A file two folders below the test's own."""
    path = tmp_path / "outer" / "inner" / "file"
    path.parent.mkdir(parents=True, mode=0o755)
    path.write_text("x")
    path.chmod(0o644)
    return path


# -- what is trusted


def test_files_of_the_user_that_only_the_user_may_write_are_trusted(file, tmp_path):
    (tmp_path / "link").symlink_to(file.parent)
    file.parent.parent.chmod(0o1777)  # as /tmp
    for path in (file, tmp_path / "link" / "file", tmp_path / "outer" / ".." / "outer" / "inner" / "file"):
        assert fault_of(path) == ""
        with open_trusted(path) as opened:
            assert opened.read() == b"x"
    assert fault_of(tmp_path / "not" / "there") == ""


@pytest.mark.parametrize("mode", [0o666, 0o602, 0o777])
def test_files_that_others_may_write_are_not(file, mode):
    file.chmod(mode)
    with pytest.raises(pb.ArgumentError, match=rf"other users may write it \(mode {mode:04o}\): chmod go-w "):
        open_trusted(file)


@pytest.mark.parametrize("which", [0, 1])
def test_nor_what_is_in_folders_that_others_may_write(file, which):
    file.parents[which].chmod(0o777)
    with pytest.raises(
        pb.ArgumentError, match=rf"{file.parents[which]} is not trusted: other users may write"
    ):
        open_trusted(file)


@pytest.mark.parametrize("which", ["file", "folder", "link"])
def test_nor_what_belongs_to_other_users(file, tmp_path, give_away, which):
    link = tmp_path / "outer" / "link"
    link.symlink_to(file)
    give_away({"file": file, "folder": file.parent, "link": link}[which])
    with pytest.raises(pb.ArgumentError, match="is not trusted: it belongs to another user"):
        open_trusted(link)


@pytest.mark.parametrize(
    ("members", "name", "fault"), [([], "me", False), (["you"], "me", True), ([], "us", True)]
)
def test_a_group_that_has_only_the_user_may_write_folders(file, monkeypatch, members, name, fault):
    """As where every user has a group of the same name, and a umask of 002."""
    uid = file.stat().st_uid or OTHER
    if uid == OTHER:
        for path in (file, *file.parents[:3]):
            os.chown(path, OTHER, 0)
        monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    user = SimpleNamespace(pw_name="me", pw_gid=file.stat().st_gid)
    group = SimpleNamespace(gr_name=name, gr_gid=user.pw_gid, gr_mem=members)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: user)
    monkeypatch.setattr("grp.getgrgid", lambda gid: group)
    file.parent.chmod(0o775)
    assert bool(fault_of(file)) == fault
    file.parent.chmod(0o777)
    assert fault_of(file)
    file.parent.chmod(0o755)
    file.chmod(0o664)
    assert fault_of(file)


def test_pipes_folders_and_rings_of_links_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(pb.ArgumentError, match="no regular file"):
        open_trusted(tmp_path / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(pb.ArgumentError, match=f"{tmp_path} is no regular file"):
        open_trusted(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(pb.ArgumentError, match="Too many levels of symbolic links"):
        open_trusted(tmp_path / "a")


# -- the library of pblasmp preload


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache that is not there yet, and a compiler that makes files at once."""
    compiler = tmp_path / "cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "some" / "cache"))
    return tmp_path / "some" / "cache" / "pblasmp"


def test_whatever_the_umask_nobody_else_can_write_the_library(cache):
    before = os.umask(0)
    try:
        library = preload.library()
    finally:
        os.umask(before)
    for path in (library, cache, cache.parent, cache.parent.parent):
        assert path.stat().st_mode & 0o022 == 0, path


def test_a_library_of_others_is_compiled_anew(cache, give_away):
    library = preload.library()
    for planted in ("mode", "owner"):
        library.write_text("planted")
        library.chmod(0o777)
        cache.chmod(0o1777)
        if planted == "owner":
            if os.geteuid():
                continue  # the folder would be another user's, too
            library.chmod(0o755)
            give_away(library)
        assert preload.library().read_text() == "made\n"
        assert library.stat().st_mode & 0o022 == 0
        assert library.stat().st_uid == os.geteuid()


def test_a_link_in_place_of_the_library_is_not_followed_to_others(cache, tmp_path):
    library = preload.library()
    planted = tmp_path / "planted"
    planted.write_text("planted")
    planted.chmod(0o777)
    library.unlink()
    library.symlink_to(planted)
    assert preload.library().read_text() == "made\n"
    assert planted.read_text() == "planted"


@pytest.mark.parametrize("up", [0, 1, 2])
def test_a_cache_that_others_may_write_is_refused(cache, monkeypatch, tmp_path, capsys, up):
    preload.library()
    folder = [cache, *cache.parents][up]
    folder.chmod(0o777)
    done = run_here(["preload", "--", "touch", str(tmp_path / "ran")], monkeypatch, capsys)
    assert done.returncode == 2
    assert not (tmp_path / "ran").exists()
    assert (
        f"{folder} is not trusted: other users may write it (mode 0777): chmod go-w {folder}" in done.stderr
    )
    assert "set XDG_CACHE_HOME" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["a b", "a:b", "a$LIB"])
def test_a_path_that_ld_preload_would_split_is_refused(cache, monkeypatch, tmp_path, capsys, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    done = run_here(["preload", "--", "touch", str(tmp_path / "ran")], monkeypatch, capsys)
    assert done.returncode == 2
    assert not (tmp_path / "ran").exists()
    assert (
        "LD_PRELOAD takes no path with a space, a colon or a dollar sign: set XDG_CACHE_HOME" in done.stderr
    )
    assert not (tmp_path / name).exists()


# -- measured times, and folders for a moment


def test_times_that_others_may_write_are_ignored(tmp_path, give_away):
    times = [Entry("here", "matmul", (64, 64, 64), {"a": 1.0}, "2026-01-01")]
    file = tmp_path / "cache" / "tuning.json"
    before = os.umask(0)
    try:
        assert save(file, times) == ""
    finally:
        os.umask(before)
    assert read_file(file) == times
    assert all(path.stat().st_mode & 0o022 == 0 for path in (file.parent, *file.parent.iterdir()))
    content = file.read_bytes()
    for path in (file, file.parent):
        Path(f"{file}.lock").unlink()
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.warns(UserWarning, match="ignored, .* other users may write it"):
            assert read_file(file) == []
        assert "other users may write it" in save(file, [])
        assert "other users may write it" in save(file, [replace(times[0], machine="there")])
        path.chmod(mode)
        assert file.read_bytes() == content
        assert Path(f"{file}.lock").exists() == (path == file), "nothing is made in such a folder"
    give_away(file)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert read_file(file) == []


def test_the_lock_of_measured_times_is_no_way_to_another_file(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "tuning.json.lock").symlink_to(tmp_path / "precious")
    assert save(tmp_path / "tuning.json", [])
    assert (tmp_path / "precious").read_text() == "precious"


def test_nor_can_others_keep_it_locked(tmp_path, give_away):
    (tmp_path / "tuning.json.lock").touch()
    give_away(tmp_path / "tuning.json.lock")
    assert "belongs to another user" in save(tmp_path / "tuning.json", [])
    assert not (tmp_path / "tuning.json").exists()


def test_folders_on_the_way_are_made_for_the_user_alone(tmp_path):
    make_private(tmp_path / "a" / "b" / "c")
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700] * 3


def test_temporary_folders_in_which_others_can_replace_files_are_refused(tmp_path, monkeypatch, capsys):
    """The orders of ranks, which they unpickle, and the sockets of test ranks lie in such folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_folder("x-") as folder:
        assert folder.stat().st_mode & 0o077 == 0
    tmp_path.chmod(0o777)
    with pytest.raises(pb.ArgumentError, match="set TMPDIR to another folder"), private_folder("x-"):
        pass
    with pytest.raises(pb.ArgumentError, match="set TMPDIR"):
        World(1)
    with pytest.raises(pb.ArgumentError, match="set TMPDIR"):
        testing.run_mpi(hello, 1)
    with pytest.raises(pb.ArgumentError, match="set TMPDIR"):
        preload.run(["true"], 0, "host")
    done = run_here(["matmul", "--size", "8", "-n", "1"], monkeypatch, capsys)
    assert done.returncode == 2
    assert "set TMPDIR" in done.stderr
    assert list(tmp_path.iterdir()) == []


def hello(comm):
    return comm.rank


def test_a_long_name_of_the_temporary_folder(tmp_path, monkeypatch):
    """Names of sockets have 107 bytes at most."""
    launch.interpreter()  # the tests' own server of ranks has a socket, too
    folder = tmp_path / ("x" * 150)
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with World(1) as world:
        assert world.call(f"{__name__}:hello", __file__, {}, 60.0)[0]["result"] == 0


# -- what a variable names


def test_what_a_variable_names_is_taken_as_it_is(tmp_path, monkeypatch, stand_in, give_away):
    launcher, library = tmp_path / "mpirun", tmp_path / "libcublasmp.so.0"
    launcher.write_text("#!/bin/sh\necho Version: 5.0.2\necho HYDRA\n")
    library.write_bytes(Path(stand_in(1000)).read_bytes())
    give_away(launcher)
    give_away(library)
    for path in (launcher, library, tmp_path):
        path.chmod(0o777)
    assert find_launcher({**os.environ, "PBLASMP_MPIRUN": str(launcher)}).path == launcher
    monkeypatch.setenv("PBLASMP_CUBLASMP", str(library))
    assert Library().path == str(library)
    monkeypatch.setenv("PBLASMP_TUNING", str(tmp_path / "tuning.json"))
    assert "is not trusted" in save(tuning_file(), [])


# -- code


class Traveler:
    """What leaves its mark in a process that unpickles it."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return exec, (f"import os; open({self.mark!r} + str(os.getpid()), 'w').close()",)


def travels(comm, mark):
    with pb.Context(comm, engine="host") as ctx:
        ctx.comm.bcast(Traveler(mark) if ctx.rank == 0 else None)
        return os.getpid()


def test_a_rank_can_make_another_one_run_code(tmp_path):
    """Which is no fault: ranks trust each other."""
    _, other = run_mpi(travels, 2, mark=str(tmp_path / "ran"))
    assert [path.name for path in tmp_path.iterdir()] == [f"ran{other}"]


def test_no_npy_file_runs_code(tmp_path):
    path, mark = tmp_path / "x.npy", tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    head = b"\x93NUMPY\x02\x00"
    objects = io.BytesIO()
    np.save(objects, np.array([[Traveler(mark)]], dtype=object), allow_pickle=True)
    expressions = [f"{code}\n", f"{{'descr': {code}, 'fortran_order': False, 'shape': (2, 2)}}\n"]
    texts = [head + len(text).to_bytes(4, "little") + text.encode() for text in expressions]
    with pb.Context(engine="host") as ctx:
        for content in (objects.getvalue(), pickle.dumps(Traveler(mark)), *texts):
            path.write_bytes(content + bytes(64))
            with pytest.raises(pb.ArgumentError, match="not a readable"):
                ctx.load(path)
    assert list(tmp_path.iterdir()) == [path]
    pickle.loads(pickle.dumps(Traveler(mark)))
    assert len(list(tmp_path.iterdir())) == 2, "it does leave a mark"


def test_a_header_is_not_read_to_its_end_if_it_is_none(tmp_path):
    path, size = tmp_path / "x.npy", 1 << 28
    path.write_bytes(b"\x93NUMPY\x02\x00" + size.to_bytes(4, "little"))
    os.truncate(path, 2 * size)
    tracemalloc.start()
    try:
        with pb.Context(engine="host") as ctx, pytest.raises(pb.ArgumentError, match="not a readable"):
            ctx.load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


PROBLEM = {"title": "T", "m": 4, "n": 4, "k": 4, "block": 2, "grid": [2, 2], "dtype": "float64", "alpha": 1.0}


@pytest.mark.parametrize("load", [pb.load_problem, load_grid, load_machine], ids=lambda load: load.__name__)
def test_no_descriptor_file_runs_code(tmp_path, load):
    path, mark = tmp_path / "x.toml", tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    texts = [
        f"{key} = {json.dumps(code)}"
        for key in (*PROBLEM, "form", "op_a", "nprow", "cublasmp", "measured", "copy")
    ]
    for text in (code, f"[{json.dumps(code)}]", *texts):
        path.write_text(f"{text}\n")
        with pytest.raises((pb.LayoutError, pb.ArgumentError)):
            load(path)
    path.write_bytes(pickle.dumps(Traveler(mark)))
    with pytest.raises((pb.LayoutError, pb.ArgumentError)):
        load(path)
    assert list(tmp_path.iterdir()) == [path]


# -- folders that others may write, and memory


MATRICES = {"x.npy": None, "x.h5": "g/x", "x.zarr": None, "g.zarr": "g/x"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of other users")
@pytest.mark.parametrize("name", MATRICES)
def test_neither_load_nor_save_follows_links_of_others(tmp_path, give_away, name):
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    with pb.Context(engine="host") as ctx:
        a, b = ctx.full((4, 4), 1.0, block=2), ctx.full((4, 4), 2.0, block=2)
        a.save(mine / name, dataset=MATRICES[name])
        (shared / name).symlink_to(mine / name)
        b.save(shared / name, dataset=MATRICES[name])  # the user's own links are followed
        assert ctx.load(mine / name, dataset=MATRICES[name]).allgather()[0, 0] == 2

        give_away(shared / name)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        for call in (ctx.load, a.save):
            with pytest.raises(
                PermissionError, match="is a symbolic link of another user in a folder that all"
            ):
                call(shared / name, dataset=MATRICES[name])
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert [path.name for path in shared.iterdir()] == [name]


def test_a_save_does_not_write_through_links_in_place_of_chunks(tmp_path):
    with pb.Context(engine="host") as ctx:
        ctx.full((4, 4), 1.0, block=2).save(tmp_path / "x.zarr")
        chunk, mine = tmp_path / "x.zarr" / "c" / "0" / "0", tmp_path / "mine"
        chunk.rename(mine)
        before = mine.read_bytes()
        chunk.symlink_to(mine)
        assert ctx.load(tmp_path / "x.zarr").allgather()[0, 0] == 1
        ctx.full((4, 4), 2.0, block=2).save(tmp_path / "x.zarr")
        assert ctx.load(tmp_path / "x.zarr").allgather()[0, 0] == 2
        assert mine.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_only_processes_of_the_same_user_can_open_shared_memory():
    """It is opened as here: by the number of a process and of a file."""
    file = os.memfd_create("x")
    try:
        path = f"/proc/{os.getpid()}/fd/{file}"
        code = f"import os, sys; os.setresuid({OTHER}, {OTHER}, {OTHER})\nos.open({path!r}, os.O_RDWR)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "PermissionError: [Errno 13] Permission denied" in done.stderr
        os.close(os.open(path, os.O_RDWR))
    finally:
        os.close(file)


# -- input that is large for its size


DEEP = "a." * 30000 + "b"
TOO_MUCH = {
    "a dotted key": (f"{DEEP} = 1\n", "a dotted key has 30001 parts, expected at most 8"),
    "a table": (f"[{DEEP}]\n" + "x.y = 1\n" * 9, "30001 parts"),
    "an inline table": (f"x = {{ {DEEP} = 1 }}\n", "30001 parts"),
    "quoted": ('"a b" . "c.d" .' * 9 + "e = 1\n", "a dotted key has 19 parts"),
    "after a string": ('x = { y = """a"""", a.a.a.a.a.a.a.a.a = 1, q = "" }\n', "a dotted key has 9 parts"),
    "after an escape": ('x = """a\\\\"""\na.a.a.a.a.a.a.a.a = 1\ny = """ """\n', "a dotted key has 9 parts"),
    "after another string": (
        "x = { y = '''a'''', a.a.a.a.a.a.a.a.a = 1, q = '' }\n",
        "a dotted key has 9 parts",
    ),
    "tables": ("".join(f"[a{i}]\n" for i in range(5000)), "it has 5000 keys, expected at most 4000"),
    "keys": ("".join(f"a{i} = 1\n" for i in range(5000)), "it has 5000 keys"),
    "lists": (f"a = [{'[],' * 100000}]\n", "it has 100001 lists and tables, expected at most 100000"),
    "digits": (f"a = 0x{'f' * 20000}\n", "has 20002 characters, expected at most 10000"),
    "size": ("#" * 5000000, "longer than 4 MiB"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_would_take_much_memory_is_refused_before(what, tmp_path, monkeypatch, capsys):
    text, message = TOO_MUCH[what]
    tracemalloc.start()
    try:
        with (
            patch("pblasmp.problems.files.tomllib.loads", side_effect=AssertionError("it is parsed")),
            pytest.raises(pb.LayoutError, match="not a descriptor file: ") as caught,
        ):
            pb.load_problem(io.StringIO(text))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)
    assert most < 1_000_000 + 12 * len(text)
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(pb.ArgumentError, match="not a descriptor file"):
        load_machine(tmp_path / "x.toml")
    done = run_here(["check", str(tmp_path / "x.toml")], monkeypatch, capsys)
    assert done.returncode == 2
    assert message in done.stdout + done.stderr


JUST_ALLOWED = {
    "keys": "".join(f"a{i}.b.c.d.e.f.g.h = 1\n" for i in range(3900)),
    "lists": f"a = [{'[],' * 99000}]",
    "numbers": f"a = [{'1,' * 20000}]",
    "strings": f"a = [{repr('') + ',' * 50000}]",
    "deep lists": f"a = {'[' * 90000}",
}


@pytest.mark.parametrize("what", JUST_ALLOWED)
def test_what_is_just_allowed_takes_a_small_multiple(what):
    """No load of this machine matters to the bound of time, but time that grows with the square exceeds it."""
    text, since = JUST_ALLOWED[what], time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(pb.LayoutError):
            pb.load_problem(io.StringIO(text))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000 + 40 * len(text)
    finally:
        tracemalloc.stop()
    assert time.process_time() - since < 10


def test_what_only_looks_like_it_is_read():
    words = "a.b.c.d.e.f.g.h.i.j.k"
    text = (
        f'title = "{words} \\" {words}"  # {words}\ndescription = """{words} \\""" {words}"""\n'
        'm = 4\nn = 4\nk = 4\nblock = 2\ngrid = { "nprow" = 2, npcol = 2 }\nalpha = 2.5e-1\n'
    )
    assert pb.load_problem(io.StringIO(text)).m == 4
    numbers = ", ".join(["4"] * 20000)
    text = 'title = "T"\nform = "allgather_matmul"\n'
    text += "".join(f"{name} = [{numbers}]\n" for name in ("tokens", "inputs", "outputs"))
    assert pb.load_problem(io.StringIO(text)).size == 20000


def test_files_without_an_end_are_not_read_to_it():
    with pytest.raises(pb.ArgumentError, match="longer than 4 MiB"):
        load_machine("/dev/zero")


MACHINE = """
title = "T"
measured = true
ranks_per_node = 4
[[ranks]]
ranks = 4
copy = { bytes_per_second = 1e9, seconds = 1e-6 }
[ranks.gemm]
float64 = [[10, 1e9], [100, 1e10]]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("node = 4", "node = 1_000_000_000", "less than or equal to 4096, got 1000000000"),
        ("ranks = 4", "ranks = 4.5", "must be a valid integer, got 4.5"),
        ("1e10", "inf", "must be a finite number, got inf"),
        ("1e10", f"1{'0' * 400}", "must be a valid number, got 1000"),
        ("1e-6", "-1", "must be greater than or equal to 0, got -1"),
        ("[ranks.gemm]", "columns = { getrf = inf }\n[ranks.gemm]", "must be a finite number, got inf"),
    ],
)
def test_absurd_numbers_of_machines_are_refused(tmp_path, old, new, message):
    assert load_machine(_file(tmp_path / "good.toml", MACHINE)).ranks_per_node == 4
    with pytest.raises(pb.ArgumentError, match=message):
        load_machine(_file(tmp_path / "bad.toml", MACHINE.replace(old, new)))


def _file(path, text):
    path.write_text(text)
    return path


# -- output


def loud(comm, n):
    print("x" * n)


def test_what_ranks_printed_is_not_read_again():
    run_mpi(loud, 2, n=1 << 23)
    tracemalloc.start()
    try:
        run_mpi(loud, 2, n=1)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 4 << 20  # of 16 MiB


def test_the_last_lines_of_a_large_file(tmp_path):
    path = _file(tmp_path / "file", "long " * 100000 + "\n" + "first\nsecond\n")
    assert last_lines(path, 2) == "first\nsecond"
    assert last_lines(path, 2, since=path.stat().st_size - 7) == "second"
    assert len(last_lines(path, 9)) == (1 << 16) - 1  # and the last end of a line
    assert last_lines(tmp_path / "none", 2) == ""


def test_reports_of_ranks_are_read_once(tmp_path):
    channel, file = Channel(tmp_path), tmp_path / "rank000000.events"
    file.write_text('{"log": "Größe"}\n{"lo')
    assert list(channel.events()) == [{"log": "Größe"}]
    with file.open("a") as more:
        more.write('g": 2}\n')
    with patch("json.loads", wraps=json.loads) as read:
        assert list(channel.events()) == [{"log": 2}]
        assert read.call_args.args[0] == b'{"log": 2}\n'
    assert list(channel.events()) == []
