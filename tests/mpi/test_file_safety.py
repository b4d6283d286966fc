# SPDX-License-Identifier: Apache-2.0
"""What files must not lose or let in: locks, links, attributes, special values, modes, crafted files."""

import ctypes
import errno
import fcntl
import gc
import itertools
import json
import os
import shutil
import stat
import warnings
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
import zarr

import pblasmp as pb
from pblasmp.dtypes import FLOAT8
from pblasmp.matrix.io import hdf5, saving, temporary
from tests.helpers.cases import TYPES, refuses
from tests.helpers.interrupts import steps
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import draws

LIBC = ctypes.CDLL(None)
_HERE, _EXCHANGE = -100, 2  # of renameat2: the working directory, both names change

FORMATS = {
    "npy": ("x.npy", None),
    "hdf5": ("x.h5", "g/x"),
    "zarr": ("x.zarr", None),
    "group": ("g.zarr", "p/q/x"),
}


def tree(here):
    """All files below a folder, with what is in them."""
    return {str(x): x.read_bytes() if x.is_file() else b"" for x in sorted(Path(here).rglob("*"))}


def names(here):
    return sorted(x.name for x in Path(here).iterdir())


def on_rank_0(comm, call):
    found = call() if comm.rank == 0 else None
    return comm.bcast(found)


def values_of(ctx, path, dataset):
    return sorted(set(ctx.load(path, dataset=dataset, block=2).allgather().ravel().tolist()))


# -- HDF5: one writer at a time


@on_ranks(2)
def test_locked(comm, directory):
    path, new = Path(directory) / "x.h5", Path(directory) / "new.h5"
    with (
        pb.Context(comm, engine="host") as ctx,
        pb.Context(comm, engine="host") as other,
        mock.patch.multiple(temporary, PATIENCE_SECONDS=0.02),
    ):
        a, b = ctx.full((4, 4), 1.0, block=2), other.full((4, 4), 2.0, block=2)
        a.save(path, dataset="old")
        words = ["is locked", "h5py", "x.h5"]
        for mode in ("r", "r+"):
            opened = h5py.File(path, mode) if comm.rank == comm.size - 1 else None
            comm.Barrier()
            before = on_rank_0(comm, lambda: tree(directory))
            refuses(ctx, pb.ArgumentError, words, a.save, path, dataset="a")
            refuses(ctx, pb.ArgumentError, words, ctx.open_file, path)
            after = on_rank_0(comm, lambda: tree(directory))
            assert after == before, f"open in h5py, {mode}: untouched: {sorted(after)}"
            if opened is not None:
                opened.close()
            comm.Barrier()
        with path.open("rb") as opened:
            if comm.rank == 0:
                fcntl.flock(opened, fcntl.LOCK_EX)
            comm.Barrier()
            words = ["another program writes it"]
            with mock.patch.multiple(hdf5, PATIENCE_SECONDS=0.02):
                refuses(ctx, pb.ArgumentError, words, ctx.load, path, dataset="old")
        comm.Barrier()
        words = ["is locked", "open_file"]
        for where in (path, new):
            with ctx.open_file(where) as file:
                a.save(file, dataset="one")
                refuses(ctx, pb.ArgumentError, words, a.save, where, dataset="a")
                refuses(ctx, pb.ArgumentError, words, ctx.open_file, where)
                refuses(other, pb.ArgumentError, words, b.save, where, dataset="b")
                if (
                    where == path
                ):  # a save changes nothing in the old file, so its lock keeps nobody from loading
                    assert values_of(ctx, path, "old") == [1], "loading meanwhile: wrong"
                a.save(file, dataset="two")
            b.save(where, dataset="b")
            expected = ["b", *["old"] * (where == path), "one", "two"]
            found = on_rank_0(comm, lambda where=where: list(h5py.File(where)))
            assert found == expected, f"{where.name} in the end"


@on_ranks(2)
def test_changed_meanwhile(comm, directory):
    """Without locks, what another program has written meanwhile stays."""
    path, new = Path(directory) / "x.h5", Path(directory) / "new.h5"
    os.environ["HDF5_USE_FILE_LOCKING"] = "FALSE"
    with pb.Context(comm, engine="host") as ctx:
        a = ctx.full((4, 4), 1.0, block=2)
        a.save(path, dataset="old")

        def write(where):
            with h5py.File(where, "a", locking=False) as file:
                file["other"] = np.ones((2, 2))

        def by_save(where):
            def progress(done, total):
                if comm.rank == 0 and done == total:
                    write(where)

            a.save(where, dataset="a", progress=progress)

        def by_block(where):
            with ctx.open_file(where) as file:
                a.save(file, dataset="a")
                on_rank_0(comm, lambda: write(where))

        for number, (where, call) in enumerate([(path, by_save), (new, by_block), (path, by_block)]):
            words = ["another program", where.name]
            refuses(ctx, pb.ArgumentError, words, call, where)
            found = on_rank_0(comm, lambda where=where: sorted(h5py.File(where, locking=False)))
            expected = ["old", "other"] if where == path else ["other"]
            left = on_rank_0(comm, lambda: [x for x in names(directory) if "pblasmp" in x])
            assert (found, left) == (expected, []), f"{number}: as it is: {found} {left}"
            if where == path:
                on_rank_0(comm, lambda: h5py.File(path, "a", locking=False).__delitem__("other"))
    del os.environ["HDF5_USE_FILE_LOCKING"]


@on_ranks(2)
def test_halfway(ctx, directory):
    """An error of the user's in the middle of a save drops the open file, of whatever kind it is."""
    path = Path(directory) / "x.h5"
    a = ctx.full((4, 4), 1.0, block=2)

    def failing(done, total):
        if done:
            raise pb.ArgumentError("mine")

    def call():
        with ctx.open_file(path) as file:
            refuses(ctx, pb.ArgumentError, ["mine"], a.save, file, dataset="a", progress=failing)

    refuses(ctx, pb.ClosedError, ["could not be saved"], call)
    assert names(directory) == [], "nothing is left"


# -- HDF5: what a dataset keeps


def example(path):
    with h5py.File(path, "w", track_order=True) as file:
        file["z"] = np.ones((2, 2))
        group = file.create_group("g", track_order=True)
        group["c"] = np.ones((2, 2))
        x = file.create_dataset(
            "x", data=np.ones((4, 4)), chunks=(2, 2), compression="gzip", track_order=True
        )
        values = {
            "unit": "eV",
            "bytes": np.bytes_(b"abc"),
            "names": np.array(["a", "bc"], dtype=object),
            "empty": h5py.Empty("f8"),
            "record": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
            "a": np.arange(3, dtype=">i2"),
            "enum": np.array(1, dtype=h5py.enum_dtype({"A": 0, "B": 1})),
        }
        for name, value in values.items():
            x.attrs[name] = value
        group["é"] = x
        group["b"] = np.ones((2, 2))
        file["soft"], group["up"] = h5py.SoftLink("/g/é"), h5py.SoftLink("/soft")
        file["to"], file["ahead"] = h5py.SoftLink("g"), h5py.SoftLink("/made/later")
        file["a"] = np.ones((2, 2))


def shown(path):
    """All that a file says, except the numbers, shapes and chunks of datasets."""
    with h5py.File(path) as file:
        x, out = file["x"], [list(file), list(file["g"])]
        for name in x.attrs:
            value = x.attrs[name]
            out.append((name, value.tolist() if isinstance(value, np.ndarray) else str(value)))
            out.append(
                (str(x.attrs.get_id(name).dtype), str(h5py.check_enum_dtype(x.attrs.get_id(name).dtype)))
            )
        links = [type(file.get(name, getlink=True)).__name__ for name in ("x", "g/é", "soft", "g/up", "to")]
        same = all(file[name] == x for name in ("g/é", "soft", "g/up", "to/é"))
        return [*out, links, same]


@on_ranks(2)
def test_kept(comm, ctx, directory):
    path = Path(directory) / "x.h5"
    for shape in ((4, 4), (3, 5)):
        a = ctx.full(shape, 7.0, block=2)
        for name in ("x", "/g/é", "soft", "to/up"):
            before = on_rank_0(comm, lambda: (example(path), shown(path))[1])
            for turn in range(2):
                a.save(path, dataset=name)
                after = on_rank_0(comm, lambda: shown(path))
                assert after == before, f"{name}, {shape}, {turn}"
                found = ctx.load(path, dataset="x", block=2)
                same = found.shape == shape and values_of(ctx, path, "x") == [7]
                assert same, f"{name}, {shape}, {turn}: numbers: {found.shape}"
    a.save(path, dataset="ahead")
    assert values_of(ctx, path, "made/later") == [7], "a soft link ahead: wrong"
    small = ctx.full((4, 4), 1.0, block=2, dtype="float8_e4m3fn")
    small.save(path, dataset="new")
    a = ctx.full((4, 4), 7.0, block=2)
    a.save(path, dataset="new")
    kind = ctx.load(path, dataset="new", block=2).dtype
    assert kind == np.float64, "the mark of another type"


@on_ranks(2)
def test_referred(comm, ctx, directory):
    """A dataset that references lead to stays the same object, or is not replaced."""
    path = Path(directory) / "x.h5"

    def make(how):
        with h5py.File(path, "w") as file:
            file["z"] = np.arange(4.0)
            file["x"] = np.ones((4, 4))
            x, kind = file["x"], h5py.ref_dtype
            if how == "dataset":
                file.create_dataset("r", data=np.array([file["z"].ref, x.ref], dtype=kind))
            elif how == "region":
                file["z"].attrs.create("r", x.regionref[1:2], dtype=h5py.regionref_dtype)
            elif how == "root":
                file.attrs["r"] = x.ref
            elif how == "list":
                file.create_dataset("r", (1,), dtype=h5py.vlen_dtype(kind))[0] = np.array([x.ref], dtype=kind)
            elif how == "record":
                file["r"] = np.array([(1, x.ref)], dtype=[("a", "i4"), ("r", kind)])
            else:
                file["z"].make_scale("z")
                x.dims[0].attach_scale(file["z"])

    for how in ("dataset", "region", "root", "list", "record", "scale"):
        before = on_rank_0(comm, lambda how=how: (make(how), path.read_bytes())[1])
        other = ctx.zeros((3, 3), block=2)
        words = ["refers to it", "'x'"]
        refuses(ctx, pb.ArgumentError, words, other.save, path, dataset="x")
        assert on_rank_0(comm, path.read_bytes) == before, f"{how}: untouched: changed"
        address = on_rank_0(comm, lambda: h5py.h5o.get_info(h5py.File(path)["x"].id).addr)
        ctx.full((4, 4), 5.0, block=2).save(path, dataset="x")
        now = on_rank_0(comm, lambda: h5py.h5o.get_info(h5py.File(path)["x"].id).addr)
        same = now == address and values_of(ctx, path, "x") == [5]
        assert same, f"{how}: the same object: {address} {now}"
        ctx.full((4, 4), 6.0, block=2).save(path, dataset="y")


@on_ranks(2)
def test_led_out(comm, ctx, directory):
    """Names that lead out of the file, or nowhere: refused before anything is written."""
    path, main = Path(directory) / "other.h5", Path(directory) / "x.h5"
    if comm.rank == 0:
        example(main)
        example(path)
        with h5py.File(main, "a") as file:
            file["ext"] = h5py.ExternalLink("other.h5", "/g")
            file["dataset"] = h5py.ExternalLink("other.h5", "/x")
            file["soft_ext"], file["deep"] = h5py.SoftLink("/ext/c"), h5py.SoftLink("g/../ext")
            file["loop"], file["type"] = h5py.SoftLink("/loop"), np.dtype("f8")
            layout = h5py.VirtualLayout((2, 2), "f8")
            layout[...] = h5py.VirtualSource("other.h5", "z", (2, 2))
            file.create_virtual_dataset("virtual", layout)
            file.create_dataset("stored", (2, 2), "f8", external=[("raw", 0, 32)])
    comm.Barrier()
    before = on_rank_0(comm, lambda: tree(directory))
    a = ctx.full((2, 2), 7.0, block=2)
    cases = {
        "another file": ["ext", "ext/new", "ext/c", "dataset", "soft_ext", "soft_ext/new"],
        "other files": ["virtual", "stored"],
        "soft links": ["loop", "loop/x"],
        "expected a group": ["x/new", "soft/new", "type/new", "virtual/new"],
        "not replaced": ["g", "to", "type"],
        "expected a name": ["", "/", "a\0b", "x\0", "..", ".", "g/../x", "./x", "g//x", "a" * 5000, "\udc80"],
    }
    for word, names in cases.items():
        for name in names:
            refuses(ctx, pb.ArgumentError, [word], a.save, main, dataset=name)
    temporary_names = [f"p/.x.pblasmp-0123456789abcdef.{ending}" for ending in ("tmp", "old")]
    for name in ("a\0b", "..", "p//x", "zarr.json", "p/.zarray", "__x", *temporary_names):
        where = Path(directory) / "new.zarr"
        refuses(ctx, pb.ArgumentError, ["expected a name"], a.save, where, dataset=name)
    for name, dataset in (
        ("n.zarr", "p/" + "n" * 300),
        ("n" * 300 + ".npy", None),
        ("n" * 300 + ".zarr", None),
    ):
        words = [os.strerror(errno.ENAMETOOLONG)]
        refuses(ctx, OSError, words, a.save, Path(directory) / name, dataset=dataset)
    for name, dataset in (("a\0.npy", None), ("a\0.h5", "x"), ("a\0.zarr", None)):
        where = f"{directory}/{name}"
        refuses(ctx, pb.ArgumentError, ["NUL"], a.save, where, dataset=dataset)
        refuses(ctx, pb.ArgumentError, ["NUL"], ctx.load, where)
    for name in ("virtual", "ext/c"):
        assert values_of(ctx, main, name) == [1], f"load {name}: wrong"
    after = on_rank_0(comm, lambda: tree(directory))
    assert after == before, f"nothing has changed: {set(after) ^ set(before)}"


# -- all formats


@on_ranks(2)
def test_special_values(ctx, directory):
    """Every bit of every type survives; a part of zeros of which some are negative is not left out."""
    rng = np.random.default_rng(7)
    types = (*TYPES, *FLOAT8)
    bits_of = (("any bits", *each) for each in itertools.product(types, FORMATS))
    for what, name, kind in (*bits_of, *(("negative zeros", name, "zarr") for name in types)):
        a = ctx.zeros((8, 6), block=(4, 3), dtype=name)
        if what == "any bits":
            bits = a.local.reshape(-1).view(np.uint8)
            bits[:] = rng.integers(0, 256, bits.size, np.uint8)
        else:
            a.local[...] = complex(-0.0, -0.0) if a.dtype.kind == "c" else -0.0
        (file, dataset) = FORMATS[kind]
        a.save(Path(directory) / file, dataset=dataset)
        b = ctx.load(Path(directory) / file, a.descriptor, dataset=dataset)
        same = b.local.tobytes() == a.local.tobytes()
        assert same, f"{what}, {name}, {kind}: {a.local} became {b.local}"


@on_ranks(2)
def test_modes(comm, ctx, directory):
    a = ctx.full((4, 4), 1.0, block=2)
    umask = comm.bcast(os.umask(0o027))
    for kind, (file, dataset) in FORMATS.items():
        path = Path(directory) / file
        a.save(path, dataset=dataset)
        where = path.joinpath(*dataset.split("/")) if kind == "group" else path
        new = [0o750, 0o640] if where.is_dir() else [0o640]
        files_in = [where / "zarr.json"] * where.is_dir()
        found = [stat.S_IMODE(x.stat().st_mode) for x in (where, *files_in)]
        assert found == new, f"new, {kind}"
        for folder_mode, file_mode in ((0o700, 0o600), (0o775, 0o664), (0o755, 0o600), (0o777, 0o666)):
            comm.Barrier()
            if comm.rank == 0:
                for x in files_in:
                    x.chmod(file_mode)
                where.chmod(folder_mode if where.is_dir() else file_mode)
            comm.Barrier()
            seen = []

            def progress(done, total, where=where, seen=seen):
                for x in where.parent.iterdir():
                    if x.name.startswith(f".{where.name}.pblasmp-"):
                        seen.append(stat.S_IMODE(x.stat().st_mode) & 0o077)

            a.save(path, dataset=dataset, progress=progress)
            all_files = [x for x in where.rglob("*") if x.is_file()] if files_in else [where]
            found = {stat.S_IMODE(x.stat().st_mode) for x in all_files}
            if files_in:
                folders = [where, *(x for x in where.rglob("*") if x.is_dir())]
                found |= {stat.S_IMODE(x.stat().st_mode) for x in folders}
            expected = {file_mode, folder_mode} if files_in else {file_mode}
            case = f"{kind}, {folder_mode:o}, {file_mode:o}"
            assert found == expected, f"{case}: {[oct(x) for x in found]}"
            assert seen, f"{case}, while written"
            assert not any(seen), f"{case}, while written"
            comm.Barrier()
    os.umask(umask)


@on_ranks(2)
def test_long_names(ctx, directory):
    a = ctx.full((4, 4), 1.0, block=2)
    for ending, dataset in ((".npy", None), (".h5", "x"), (".zarr", None)):
        path = Path(directory) / ("n" * (255 - len(ending)) + ending)
        for turn in range(2):
            a.save(path, dataset=dataset)
            assert values_of(ctx, path, dataset) == [1], f"{ending}, {turn}: wrong"
    assert len(names(directory)) == 3, "nothing else"


@on_ranks(2)
def test_replaced_while_loaded(comm, directory):
    """Ranks never put together a matrix of two versions."""
    here = Path(directory)
    with pb.Context(comm, engine="host") as ctx, mock.patch.multiple(saving, TILE_BYTES=64):
        for kind, (file, dataset) in FORMATS.items():
            for name in ("old", "new"):
                (here / name).mkdir(exist_ok=True)
                ctx.full((40, 4), {"old": 1.0, "new": 2.0}[name], block=2).save(
                    here / name / file, dataset=dataset
                )
            chunk = saving.zarr.CHUNK
            saving.zarr.CHUNK = 2
            ctx.full((40, 4), 1.0, block=2).save(here / "old" / file, dataset=dataset)
            saving.zarr.CHUNK = chunk
            where = (here / "old" / file, here / "new" / file)
            calls = []

            def progress(done, total, where=where, calls=calls, kind=kind):
                calls.append(done)
                # Flat files: after they were opened; Zarr arrays, whose chunks are opened one by one: in the middle.
                if comm.rank == 0 and len(calls) == (1 if kind in ("npy", "hdf5") else 3):
                    # Both names are there all the time: a rank that found none would say that.
                    assert not LIBC.renameat2(_HERE, bytes(where[0]), _HERE, bytes(where[1]), _EXCHANGE)

            words = ["was replaced while it was loaded"]
            refuses(ctx, pb.ArgumentError, words, ctx.load, where[0], dataset=dataset, progress=progress)
            comm.Barrier()
            if comm.rank == 0:
                shutil.rmtree(here / "old")
                shutil.rmtree(here / "new")
            comm.Barrier()


# -- Zarr


def zarr_metadata(**changes):
    grid = {"name": "regular", "configuration": {"chunk_shape": changes.pop("chunk", [2, 2])}}
    return {
        "zarr_format": 3, "node_type": "array", "shape": [4, 4], "data_type": "float64", "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}, "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}], "attributes": {}, **changes,
    }  # fmt: skip


OLD = {"zarr_format": 2, "shape": [2, 2], "chunks": [2, 2], "dtype": "<f8", "fill_value": 0, "order": "C"}
OLD |= {"filters": None, "compressor": None}
PICKLE = {"id": "pickle", "protocol": 5}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
SHARDS = {"chunk_shape": [2, 2], "codecs": [{"name": "numcodecs.pickle"}], "index_codecs": []}
RUNS_CODE = {
    "filter": (".zarray", OLD | {"filters": [PICKLE]}),
    "compressor": (".zarray", OLD | {"compressor": PICKLE}),
    "after another": (".zarray", OLD | {"filters": [{"id": "delta", "dtype": "<f8"}, {"id": "msgpack2"}]}),
    "objects": (".zarray", OLD | {"dtype": "|O", "filters": [{"id": "vlen-utf8"}]}),
    "codec": ("zarr.json", zarr_metadata(codecs=[{"name": "numcodecs.pickle"}])),
    "shards": ("zarr.json", zarr_metadata(codecs=[{"name": "sharding_indexed", "configuration": SHARDS}])),
    "two names": ("zarr.json", zarr_metadata(codecs=[{"id": "gzip", "name": "numcodecs.pickle"}])),
    "two types": ("zarr.json", zarr_metadata(dtype="<f8", data_type="object")),
}
ABSURD = {
    "extents": (zarr_metadata(shape=[10**18, 10**18], chunk=[10**9, 10**9]), MemoryError),
    "small chunks": (zarr_metadata(shape=[5000, 5000], chunk=[1, 1]), pb.ArgumentError),
    "large chunks": (zarr_metadata(chunk=[10**5, 10**5]), pb.ArgumentError),
    "large shards": (
        zarr_metadata(
            chunk=[10**5, 10**5],
            codecs=[
                {
                    "name": "sharding_indexed",
                    "configuration": SHARDS | {"codecs": [BYTES], "index_codecs": [BYTES]},
                }
            ],
        ),
        pb.ArgumentError,
    ),
    "no chunks": (zarr_metadata(chunk=[0, 0]), pb.ArgumentError),
    "negative": (zarr_metadata(shape=[-4, 4]), pb.ArgumentError),
    "fractions": (zarr_metadata(shape=[4.5, 4]), pb.ArgumentError),
    "nested": ("[" * 100_000, pb.ArgumentError),
    "number": ("9" * 100_000, pb.ArgumentError),
}


NO_CHUNKS = {
    "pipe": (os.mkfifo, "is not a file"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "is not a file"),
    "folder": (Path.mkdir, "is not a file"),
    "sparse": (
        lambda path: (path.touch(), os.truncate(path, 1 << 40)),
        "1099511627776 bytes, expected at most",
    ),
    "short": (lambda path: path.write_bytes(b"1"), "a chunk cannot be read"),
}
"""What may lie where a chunk should, and what is said of it."""


def unreadable(path):
    """Make an HDF5 file of datasets that HDF5 allows and NumPy does not, and of links in a circle."""
    with h5py.File(path, "w") as file:
        odd, tagged = h5py.h5t.NATIVE_INT32.copy(), h5py.h5t.create(h5py.h5t.OPAQUE, 8)
        odd.set_size(3)
        tagged.set_tag(b"NUMPY:__import__('os')")
        square, one = h5py.h5s.create_simple((2, 2)), h5py.h5s.create(h5py.h5s.SCALAR)
        for name, kind in (("time", h5py.h5t.UNIX_D32LE), ("three bytes", odd), ("tag", tagged)):
            h5py.h5d.create(file.id, name.encode(), kind, square)
        file["mark"] = np.ones((2, 2))
        h5py.h5a.create(file["mark"].id, hdf5.MARK.encode(), h5py.h5t.UNIX_D32LE, one)
        file["circle"], file["back"] = h5py.SoftLink("/back"), h5py.SoftLink("/circle")


@on_ranks(2)
def test_crafted(comm, ctx, directory):
    """Files that describe what they do not hold, or what would run code: an error at once."""
    here = Path(directory)
    if comm.rank == 0:
        for name, (file, metadata) in RUNS_CODE.items():
            (here / f"{name}.zarr").mkdir()
            (here / f"{name}.zarr" / file).write_text(json.dumps(metadata))
        for name, (metadata, _) in ABSURD.items():
            text = metadata if isinstance(metadata, str) else json.dumps(metadata)
            (here / f"{name}.zarr").mkdir()
            (here / f"{name}.zarr" / "zarr.json").write_text(text)
        (here / "pipe.zarr").mkdir()
        os.mkfifo(here / "pipe.zarr" / "zarr.json")
        (here / "attributes.zarr").mkdir()
        (here / "attributes.zarr" / ".zarray").write_text(json.dumps(OLD))
        os.mkfifo(here / "attributes.zarr" / ".zattrs")
        (here / "sparse.zarr").mkdir()
        (here / "sparse.zarr" / "zarr.json").touch()
        os.truncate(here / "sparse.zarr" / "zarr.json", 1 << 40)
        for name, (make, _) in NO_CHUNKS.items():
            (here / f"chunk, {name}.zarr" / "c" / "0").mkdir(parents=True)
            (here / f"chunk, {name}.zarr" / "zarr.json").write_text(json.dumps(zarr_metadata()))
            make(here / f"chunk, {name}.zarr" / "c" / "0" / "0")
        unreadable(here / "unreadable.h5")
        os.mkfifo(here / "pipe.h5")
        with h5py.File(here / "x.h5", "w") as file:
            file.create_dataset("small chunks", (5000, 5000), "f8", chunks=(1, 1))
            file.create_dataset("extents", (2**40, 2**40), "f8", chunks=(1000, 1000))
            file.create_dataset("large chunks", (4, 4), "f8", chunks=(10**4, 10**4), maxshape=(None, None))
            file.create_virtual_dataset("virtual", h5py.VirtualLayout((10**9, 10**9), "f8"))
            for number in range(30):
                file[f"d{number}"] = np.ones((2, 2))
            file["circle"] = file["/"]
        with (here / "bool.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f8", "fortran_order": False, "shape": (1, 2)}
            )
        text = (here / "bool.npy").read_bytes().replace(b"(1, 2)", b"(True,2)").replace(b"  \n", b"\n")
        (here / "bool.npy").write_bytes(text + bytes(64))
    comm.Barrier()
    before = on_rank_0(comm, lambda: sorted(str(x) for x in here.rglob("*")))
    a = ctx.full((4, 4), 1.0, block=2)
    for name in RUNS_CODE:
        word = "Python objects" if name in ("objects", "two types") else "is not one of those"
        path = here / f"{name}.zarr"
        refuses(ctx, pb.ArgumentError, [word], ctx.load, path)
        refuses(ctx, pb.ArgumentError, ["not replaced"], a.save, path)
    for name, (_, kind) in ABSURD.items():
        word = "array" if kind is MemoryError else f"{name}.zarr: not a readable"
        refuses(ctx, kind, [word], ctx.load, here / f"{name}.zarr")
    for name, kind in (
        ("small chunks", pb.ArgumentError),
        ("large chunks", pb.ArgumentError),
        ("extents", MemoryError),
        ("virtual", MemoryError),
    ):
        refuses(
            ctx, kind, ["array" if kind is MemoryError else "chunks"], ctx.load, here / "x.h5", dataset=name
        )
    words = ["no dataset 'none'", "'d1'", "and more"]
    refuses(ctx, pb.ArgumentError, words, ctx.load, here / "x.h5", dataset="none")
    for name, (_, word) in NO_CHUNKS.items():
        path = here / f"chunk, {name}.zarr"
        refuses(ctx, pb.ArgumentError, [path.name, word], ctx.load, path)
    for name in ("time", "three bytes", "tag", "mark", "circle"):
        words = ["unreadable.h5", repr(f"/{name}") if name != "circle" else "no dataset 'circle'"]
        load = ctx.load, here / "unreadable.h5"
        refuses(ctx, pb.ArgumentError, words, *load, dataset=name)
    for name in ("pipe.zarr", "pipe.h5", "attributes.zarr", "sparse.zarr"):
        refuses(ctx, pb.ArgumentError, [name], ctx.load, here / name)
    refuses(ctx, pb.ArgumentError, ["True"], ctx.load, here / "bool.npy")
    after = on_rank_0(comm, lambda: sorted(str(x) for x in here.rglob("*")))
    assert after == before, f"nothing has changed: {set(after) ^ set(before)}"


@on_ranks(2)
def test_zarr_saves(comm, ctx, directory):
    here = Path(directory)
    a, b = ctx.full((4, 4), 1.0, block=2), ctx.full((3, 5), 2.0, block=2)
    path = here / "g.zarr"

    def failing(done, total):
        if done:
            raise ZeroDivisionError

    def make_group(done, total):  # another job, while this one writes
        if comm.rank == 0 and done == total:
            zarr.open_group(path / "p", mode="w").create_array("other", data=np.ones((2, 2)))
            zarr.open_group(path, mode="a")

    refuses(ctx, ZeroDivisionError, [], a.save, path, dataset="p/q/x", progress=failing)
    assert on_rank_0(comm, lambda: names(here)) == [], "a failure leaves no groups: left"
    a.save(path, dataset="p/q/x", progress=make_group)
    found = values_of(ctx, path, "p/q/x"), values_of(ctx, path, "p/other")
    assert found == ([1], [1]), "a group that another job made"
    if comm.rank == 0:
        with_attributes = zarr.open_array(path / "p/q/x", mode="r+")
        with_attributes.attrs.update({"unit": "eV", "n": 3})
        zarr.create_array(here / "old.zarr", shape=(2, 2), dtype="f4", zarr_format=2, attributes={"u": 1})
        zarr.open_group(here / "old_group.zarr", mode="w", zarr_format=2)
    comm.Barrier()
    b.save(path, dataset="p/q/x")
    b.save(here / "old.zarr")
    b.save(here / "old_group.zarr", dataset="x/y")
    assert dict(zarr.open_array(path / "p/q/x").attrs) == {"unit": "eV", "n": 3}, "attributes"
    assert dict(zarr.open_array(here / "old.zarr").attrs) == {"u": 1}, "attributes"
    seen = zarr.open_group(here / "old_group.zarr", mode="r")["x/y"].shape
    kept_format = (here / "old.zarr" / ".zarray").exists() and seen == (3, 5)
    assert kept_format, "the format of what is there: another"
    comm.Barrier()
    if comm.rank == 0:
        (here / "old.zarr" / "notes.txt").write_text("a user's")
    comm.Barrier()
    here_too = here / "new.zarr"
    with mock.patch.multiple(saving.zarr, check_length=lambda _: zarr.open_group(here_too, mode="a")):
        words = ["another job made", "new.zarr"]
        refuses(ctx, pb.ArgumentError, words, a.save, here_too, dataset="x")
    if comm.rank == 0:  # a job was killed between two renames
        shutil.rmtree(here_too)
        left = here / ".g.zarr.pblasmp-0123456789abcdef.tmp"
        left.mkdir()
        path.rename(left.with_suffix(".old"))
    comm.Barrier()
    assert values_of(ctx, path, "p/q/x") == [2], "put back by load: wrong"
    if comm.rank == 0:
        left = path / "p" / "q" / ".x.pblasmp-0123456789abcdef.tmp"
        left.mkdir()
        (path / "p" / "q" / "x").rename(left.with_suffix(".old"))
    comm.Barrier()
    assert values_of(ctx, path, "p/q/x") == [2], "an array put back by load: wrong"
    a.save(path, dataset="p/q/x")
    left = on_rank_0(comm, lambda: names(path / "p" / "q"))
    assert left == ["x", "zarr.json"], "nothing is left of it"
    if comm.rank == 0:
        (here / ".g.zarr.pblasmp-0123456789abcdef.tmp").rmdir()
    words = ["notes.txt", "not replaced"]
    refuses(ctx, pb.ArgumentError, words, a.save, here / "old.zarr")
    left = on_rank_0(comm, lambda: names(here))
    assert left == ["g.zarr", "old.zarr", "old_group.zarr"], "nothing else"


@on_ranks(2)
def test_two_jobs_make_one_zarr_array(comm, directory):
    """The later one replaces it, as with files."""
    path = Path(directory) / "a.zarr"

    def make_array(done, total):  # the other job, while this one writes
        if comm.rank == 0 and done == total and not path.exists():
            zarr.create_array(path, data=np.zeros((7, 7)))

    with pb.Context(comm, engine="host") as ctx:
        ctx.full((4, 4), 1.0, block=2).save(path, progress=make_array)
        assert values_of(ctx, path, None) == [1]
    assert on_rank_0(comm, lambda: names(directory)) == ["a.zarr"], "nothing else"


@pytest.mark.parametrize("one_step", [True, False])
@on_ranks(1)
def test_an_exception_at_any_step_loses_nothing(comm, directory, one_step):
    """An exception at any step leaves the old or the new matrix, whole."""
    every = draws(499, long=9)
    with (
        pb.Context(engine="host") as ctx,
        mock.patch.multiple(
            temporary, renameat2=temporary.renameat2 if one_step else lambda *_: errno.EINVAL
        ),
    ):
        matrices = [ctx.full((4, 4), float(value), block=2) for value in range(2)]
        for kind, (file, dataset) in FORMATS.items():
            path, state = Path(directory) / file, [0]

            def call(path=path, dataset=dataset, state=state):
                matrices[1 - state[0]].save(path, dataset=dataset)

            call()
            state[0] = 1
            total, _ = steps(call, "pblasmp/matrix/io/")
            state[0] = 0
            for stop_at in range(1, total + 1, every):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ResourceWarning)  # a file was closed with its object
                    _, where = steps(call, "pblasmp/matrix/io/", stop_at)
                    gc.collect()
                found = values_of(ctx, path, dataset)
                assert found in ([0], [1]), f"{kind}, {where}"
                state[0] = int(found[0])
            call()
        left = names(directory)
        assert left == sorted(file for file, _ in FORMATS.values()), f"nothing else: {left}"
