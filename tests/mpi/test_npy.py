# SPDX-License-Identifier: Apache-2.0
""".npy files on ranks: C and F order, every type, parts of matrices; what fails leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import tracemalloc
from pathlib import Path

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import DTYPES
from pblasmp.matrix.io import formats, saving
from tests.helpers.cases import TYPES, check_array, check_matrix, numbers, refuses
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import draws, in_turn


def _file(comm, path, values):
    """Have rank 0 write ``values`` as NumPy does; every rank waits until the file is there."""
    if comm.rank == 0:
        Path(path).parent.mkdir(exist_ok=True)
        np.save(path, values)
    comm.Barrier()
    return path


def _read(path, dtype):
    found = np.load(path)
    return found.view(dtype) if found.dtype.kind == "V" else found


@on_ranks(3)
def test_types_of_files(comm, ctx, directory):
    rng = np.random.default_rng(22)
    path = Path(directory) / "x.npy"
    for number, given in enumerate((*TYPES, "bool", "int8", "uint16", "int64", ">f8", ">c16", ">i4", "<f2")):
        kind = DTYPES.get(given) or np.dtype(given)
        values = np.abs(numbers(rng, (12, 7), "float64")).astype(kind)
        _file(comm, path, values)
        for wanted in in_turn((None, *TYPES), keep=2, first=number):
            native = kind.newbyteorder("=")
            to = DTYPES[wanted] if wanted else native
            if wanted is None and native not in DTYPES.values():
                refuses(ctx, pb.ArgumentError, [str(path), "give dtype"], ctx.load, path)
            elif given == "bfloat16" and wanted != "bfloat16":
                refuses(ctx, pb.ArgumentError, [str(path)], ctx.load, path, dtype=wanted)
            elif kind.kind == "c" and to.kind != "c":
                words = [str(path), f"does not convert to {to.name}"]
                refuses(ctx, pb.ArgumentError, words, ctx.load, path, dtype=wanted)
            else:
                check_matrix(ctx.load(path, dtype=wanted, block=3), values.astype(to))
            comm.Barrier()


@on_ranks(1, 4)
def test_what_load_and_save_are_told(comm, ctx, directory):
    """Without a descriptor: the grid, blocks, source, order and type that were given, or the defaults."""
    rng = np.random.default_rng(23)
    values = numbers(rng, (20, 30), "float32")
    c = _file(comm, f"{directory}/c.npy", values)
    f = _file(comm, f"{directory}/f.npy", np.asfortranarray(values))
    squarest = pb.Grid.squarest(comm.size)
    for path, order in ((c, "C"), (f, "F")):
        block = tuple(-(-extent // max(squarest.shape)) for extent in (20, 30))
        expected = pb.MatrixDescriptor((20, 30), block, squarest, dtype="float32", order=order)
        a = ctx.load(path)
        check_matrix(a, values, f"defaults, {order}")
        assert a.descriptor == expected, f"defaults, {order}"
    grid = pb.Grid(1, comm.size, "col")
    expected = pb.MatrixDescriptor((20, 30), (4, 5), grid, (0, comm.size - 1), "float64", "F")
    source = (0, comm.size - 1)
    a = ctx.load(c, grid=grid, block=(4, 5), source=source, order="F", dtype="float64")
    check_matrix(a, values.astype("float64"), "everything given")
    assert a.descriptor == expected, "everything given"
    steps: list[tuple[int, int]] = []
    saving.TILE_BYTES, saved = 256, saving.TILE_BYTES
    a = ctx.load(c, block=4, progress=lambda done, total: steps.append((done, total)))
    read = list(steps)
    steps.clear()
    a.save(f"{directory}/d.npy", progress=lambda done, total: steps.append((done, total)))
    saving.TILE_BYTES = saved
    for what, told in (("reading", read), ("writing", steps)):
        mine = a.local.nbytes
        ends = told[0] == (0, mine) and told[-1] == (mine, mine) and all(x[1] == mine for x in told)
        in_steps = [x[0] for x in told] == sorted(x[0] for x in told) and (len(told) > 2 or mine < 300)
        assert ends, f"progress of {what}: {told}"
        assert in_steps, f"progress of {what}: {told}"
    sub = a[3:17, 8:29]
    sub.save(f"{directory}/sub.npy")
    check_array(np.load(f"{directory}/sub.npy"), values[3:17, 8:29], "a part of a matrix is saved")
    a.T.save(f"{directory}/t.npy")
    check_array(np.load(f"{directory}/t.npy"), values.T, "a transpose is saved")


@on_ranks(4)
def test_no_rank_holds_the_whole(comm, directory):
    """A rank holds its part, and never the whole."""
    values = np.arange(800 * 1000, dtype=np.float64).reshape(800, 1000)
    path = _file(comm, f"{directory}/x.npy", values)
    saving.TILE_BYTES = 1 << 17
    with pb.Context(comm, engine="host") as ctx:
        for order in "CF":
            d = pb.MatrixDescriptor(values.shape, (64, 64), pb.Grid.squarest(comm.size), order=order)
            tracemalloc.start()
            a = ctx.load(path, d)
            a.save(f"{directory}/y.npy")
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            limit = a.local.nbytes + (1 << 20)
            check_matrix(a, values, order)
            check_array(np.load(f"{directory}/y.npy"), values, order)
            assert peak < limit, order
            comm.Barrier()
    saving.TILE_BYTES = 8 << 20


BROKEN = {  # by the error that NumPy leaks
    "tokenize": "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 2",
    "overflow": "{'descr': '<f8', 'fortran_order': False, 'shape': (10**400, 2)}",
    "digits": "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9" * 5000 + ", 2)}",
    "large": "{'descr': '<f8', 'fortran_order': False, 'shape': (9223372036854775807, 9223372036854775807)}",
    "negative": "{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -2)}",
    "type": "{'descr': 7, 'fortran_order': False, 'shape': (2, 2)}",
    "keys": "{'descr': '<f8', 7: False, 'shape': (2, 2)}",
    "floats": "{'descr': '<f8', 'fortran_order': False, 'shape': (2.0, 2)}",
    "nested": "(" * 5000,
    "subarray": "{'descr': [('a', '<f8', (99999999999, 99999999))], 'fortran_order': False, 'shape': (2, 2)}",
    "bytes": "\x00\xff\n",
    "raw": "{'descr': '|V3', 'fortran_order': False, 'shape': (2, 2)}",
}


@on_ranks(1, 2)
def test_broken_headers(comm, ctx, directory):
    """Whatever is wrong with a header: one ArgumentError on every rank that names the file."""
    rng = np.random.default_rng(25)
    path = Path(directory) / "x.npy"

    def refused(content):
        if comm.rank == 0:
            path.write_bytes(content)
        comm.Barrier()
        refuses(ctx, pb.ArgumentError, [str(path)], ctx.load, path)
        comm.Barrier()

    for text in BROKEN.values():
        header = text.encode("latin1") + b"\n"
        for version, size in ((1, 2), (2, 4), (3, 4)):
            content = b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(size, "little") + header
            refused(content + bytes(64))
    refused(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(64))
    good = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    good += b"{'descr': '<f8', 'fortran_order': False, 'shape': (4, 4)}".ljust(117) + b"\n" + bytes(100)
    for _ in range(draws(30, long=60)):  # too short for 4 x 4: never right, whatever the mutation
        content = bytearray(good)
        for at in rng.integers(10, 70, 2):
            content[at] = rng.integers(256)
        refused(bytes(content))


@on_ranks(1, 3)
def test_replacing_a_file(comm, ctx, directory):
    """A file that is replaced keeps its mode, links are followed, what a killed job left is removed."""
    d = pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid.squarest(comm.size))
    a = ctx.random(d, seed=1)
    values = a.allgather()
    here, there = Path(directory) / "here", Path(directory) / "there"
    if comm.rank == 0:
        here.mkdir()
        there.mkdir()
        (there / "x.npy").write_bytes(b"old")
        (there / "x.npy").chmod(0o640)
        (here / "link.npy").symlink_to("../there/x.npy")
        (here / "new.npy").symlink_to("../there/new.npy")
        (there / ".x.npy.pblasmp-0123456789abcdef.tmp").write_bytes(b"left by a killed job")
        (there / ".x.npy.mine.tmp").write_bytes(b"a user's")
        (there / ".y.npy.pblasmp-0123456789abcdef.tmp").write_bytes(b"for another file")
    comm.Barrier()
    for name in ("link.npy", "new.npy"):
        a.save(here / name)
        check_array(np.load(here / name), values, name)
    comm.Barrier()
    left = sorted(x.name for x in there.iterdir())
    expected = [".x.npy.mine.tmp", ".y.npy.pblasmp-0123456789abcdef.tmp", "new.npy", "x.npy"]
    assert left == expected, "what is there"
    mode = (there / "x.npy").stat().st_mode & 0o777
    assert mode == 0o640, "its mode"
    links = all((here / name).is_symlink() for name in ("link.npy", "new.npy"))
    assert links, "the links: a link was replaced"
    umask = os.umask(0)
    os.umask(umask)
    mode = (there / "new.npy").stat().st_mode & 0o777
    assert mode == 0o666 & ~umask, "a new file's mode"
    comm.Barrier()
    if comm.rank == 0:
        os.mkfifo(here / "pipe.npy")
    comm.Barrier()
    path = str(here / "pipe.npy")
    refuses(ctx, pb.ArgumentError, [path, "pipe"], ctx.load, path)
    refuses(ctx, pb.ArgumentError, [path, "pipe"], a.save, path)


@on_ranks(1, 2)
def test_versions(comm, ctx, directory):
    """All versions of the format, as NumPy writes and reads them."""
    for version in ((1, 0), (2, 0), (3, 0)):
        for order in "CF":
            path, values = f"{directory}/x.npy", np.asarray(np.arange(12.0).reshape(4, 3), order=order)
            if comm.rank == 0:
                with Path(path).open("wb") as file:
                    np.lib.format.write_array(file, values, version=version)
            comm.Barrier()
            check_matrix(ctx.load(path, block=2), values, f"version {version}, {order}")
    fields = np.zeros((2, 2), [("ä", "f8"), ("日", "f8")])
    if comm.rank == 0:
        with Path(path).open("wb") as file:
            np.lib.format.write_array(file, fields, version=(3, 0))
    comm.Barrier()
    refuses(ctx, pb.ArgumentError, [path], ctx.load, path)


@on_ranks(1, 4)
def test_load_errors_are_those_of_every_rank(comm, ctx, directory):
    last = comm.size - 1
    good = _file(comm, f"{directory}/good.npy", np.ones((6, 6)))
    other = _file(comm, f"{directory}/other.npy", np.ones((6, 6)))
    flat = _file(comm, f"{directory}/flat.npy", np.ones(6))
    cube = _file(comm, f"{directory}/cube.npy", np.ones((2, 2, 2)))
    objects = _file(comm, f"{directory}/objects.npy", np.array([[{}]]))
    texts = _file(comm, f"{directory}/texts.npy", np.array([["a"]]))
    if comm.rank == 0:
        Path(f"{directory}/text.npy").write_text("no array, but a long enough text to read a header from")
        Path(f"{directory}/empty.npy").write_bytes(b"")
        Path(f"{directory}/cut.npy").write_bytes(Path(good).read_bytes()[:-50])
    comm.Barrier()
    missing = f"{directory}/missing.npy"
    d = pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid.squarest(comm.size))
    refuses(ctx, FileNotFoundError, [missing, "No such file"], ctx.load, missing)
    refuses(ctx, IsADirectoryError, [directory], ctx.load, directory)
    for name, word in (("flat", "got 1"), ("cube", "got 3"), ("objects", "objects.npy"), ("texts", "<U1")):
        path = {"flat": flat, "cube": cube, "objects": objects, "texts": texts}[name]
        refuses(ctx, pb.ArgumentError, [path, word], ctx.load, path)
    for name in ("text", "empty", "cut"):
        path = f"{directory}/{name}.npy"
        refuses(ctx, pb.ArgumentError, [path, "not a readable .npy file"], ctx.load, path)
    wide = pb.MatrixDescriptor((6, 7), (2, 2), d.grid)
    refuses(ctx, pb.ArgumentError, ["(6, 6)", "(6, 7)"], ctx.load, good, wide)
    beyond = pb.Grid(1, comm.size + 1)
    words = [f"needs {comm.size + 1} ranks"]
    refuses(ctx, pb.ArgumentError, words, ctx.load, good, grid=beyond)
    refuses(ctx, pb.ArgumentError, ["int32"], ctx.load, good, dtype="int32")
    refuses(ctx, pb.ArgumentError, ["MatrixDescriptor"], ctx.load, good, "2x2")
    refuses(ctx, pb.ArgumentError, ["block"], ctx.load, good, block=0)
    mine, words = 3 if comm.rank == last else None, ["progress: expected a function", "got 3"]
    refuses(ctx, pb.ArgumentTypeError, words, ctx.load, good, progress=mine)
    for no_path in (None, 3, [good]):
        mine = no_path if comm.rank == last else good
        for call in (ctx.load, ctx.eye(3).save, lambda path: ctx.open_file(path).close()):
            words = ["path: expected a path, got"]
            refuses(ctx, pb.ArgumentTypeError, words, call, mine)
    if comm.size > 1:
        mine = good if comm.rank != last else missing
        refuses(ctx, FileNotFoundError, [missing, f"(on rank {last})"], ctx.load, mine)
        mine = good if comm.rank != last else other
        words = ["load", "path", f"{good} on rank", f"{other} on rank {last}"]
        refuses(ctx, pb.RankMismatchError, words, ctx.load, mine)
        # a name of two files, in working directories of their own
        elsewhere = _file(comm, f"{directory}/elsewhere/good.npy", np.zeros((6, 6)))
        os.chdir(f"{directory}/elsewhere" if comm.rank == last else directory)
        words = ["load", "path", f"{good} on rank", f"{elsewhere} on rank {last}"]
        refuses(ctx, pb.RankMismatchError, words, ctx.load, "good.npy")
        os.chdir(directory)
        check_matrix(ctx.load("good.npy"), np.ones((6, 6)), "in one directory")
        refuses(
            ctx,
            pb.RankMismatchError,
            ["(3, 3)", f"on rank {last}"],
            ctx.load,
            good,
            block=2 + (comm.rank == last),
        )
    check_matrix(ctx.load(good, d), np.ones((6, 6)), "and after all that")


@contextlib.contextmanager
def _file_size_limit(nbytes, here):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@on_ranks(1, 4)
def test_save_errors_leave_nothing_behind(comm, ctx, directory):
    last = comm.size - 1
    values = np.arange(30_000.0).reshape(150, 200)
    d = pb.MatrixDescriptor(values.shape, (16, 16), pb.Grid.squarest(comm.size))
    a = ctx.scatter(values if comm.rank == 0 else None, d)
    old = _file(comm, f"{directory}/old.npy", np.ones((2, 2)))
    if comm.rank == 0:
        Path(f"{directory}/folder").mkdir()
        Path(f"{directory}/plain").write_text("")
    comm.Barrier()

    def failing(*args):
        if comm.rank == last:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "y.npy")

    def refused(kind, words, name, **options):
        refuses(ctx, kind, words, a.save, f"{directory}/{name}", **options)
        comm.Barrier()
        assert sorted(x.name for x in Path(directory).iterdir()) == ["folder", "old.npy", "plain"]
        comm.Barrier()

    refused(FileNotFoundError, [f"{directory}/no/x.npy"], "no/x.npy")
    refused(NotADirectoryError, [f"{directory}/plain/x.npy"], "plain/x.npy")
    refused(IsADirectoryError, [f"{directory}/folder"], "folder")
    with _file_size_limit(5_000, comm.rank == 0):
        words = [os.strerror(errno.EFBIG), directory]
        refused(OSError, [*words, "x.npy"], "x.npy")
        refused(OSError, [*words, "old.npy"], "old.npy")
    check_array(np.load(old), np.ones((2, 2)), "the old version is still there")
    words = [os.strerror(errno.EIO), f"(on rank {last})" if comm.size > 1 else "y.npy"]
    refused(OSError, words, "x.npy", progress=failing)
    refused(pb.ArgumentError, ["'C' or 'F'"], "x.npy", order="K")
    refused(pb.ArgumentError, ["'C' or 'F'"], "x.npy", order=np.ones(2))
    for name in ("x.csv", "x.npz", "x.mat", "x.txt", "x.hdf", "x", "x.npy.bak", ".npy", "plain", "no/x.dat"):
        words = [f"{directory}/{name}", "ends in .npy, .h5, .hdf5 or .zarr"]
        refused(pb.ArgumentError, words, name)
        refused(pb.ArgumentError, words, name, dataset="a")
        refuses(ctx, pb.ArgumentError, words, ctx.load, f"{directory}/{name}")
    if comm.size > 1:
        mine = "x.npy" if comm.rank != last else "y.npy"
        words = [f"y.npy on rank {last}"]
        refused(pb.RankMismatchError, words, mine)
        mine = f"{directory}/{'x.npy' if comm.rank != last else 'x.csv'}"
        refuses(ctx, pb.ArgumentError, ["x.csv"], a.save, mine)
    a.save(old)
    check_array(np.load(old), values, "over what was there")
    upper = f"{directory}/X.NPY"
    a.save(upper)
    check_array(np.load(upper), values, "capitals")
    check_matrix(ctx.load(upper, d), values, "capitals")


def test_a_new_file_has_its_space(tmp_path):
    """A full disk is an error before anything is computed or written."""
    d = pb.MatrixDescriptor((300, 1000), (10, 10), pb.Grid(2, 2))
    (tmp_path / "x.npy").touch()
    formats.create(tmp_path / "x.npy", d, "F")
    status = (tmp_path / "x.npy").stat()
    assert status.st_blocks * 512 >= d.nbytes
    found = np.load(tmp_path / "x.npy")
    assert (found.shape, found.dtype, found.flags.f_contiguous) == (d.shape, d.dtype, True)
    assert status.st_size == d.nbytes + 128
