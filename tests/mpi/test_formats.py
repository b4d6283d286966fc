# SPDX-License-Identifier: Apache-2.0
"""HDF5 and Zarr on ranks: what h5py and zarr wrote is read, what is written they can read; nothing else is touched."""

import errno
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

import pblasmp as pb
from pblasmp.dtypes import FLOAT8
from pblasmp.matrix.io import hdf5, saving
from tests.helpers.cases import TYPES, check_array, check_matrix, layout, numbers, pick, refuses
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import in_turn, only_long

NAMES = {
    "npy": ("x.npy", None),
    "hdf5": ("x.h5", "g/x"),
    "zarr group": ("g.zarr", "g/x"),
    "zarr": ("x.zarr", None),
}


@on_ranks(1, 2, *only_long(4))
def test_there_and_back(comm, ctx, directory):
    rng = np.random.default_rng(51)
    for number, (kind, (name, dataset)) in enumerate(NAMES.items(), comm.size):
        path = Path(directory) / name
        for dtype in in_turn((*TYPES, *FLOAT8), keep=1 if kind == "npy" else 2, first=number):
            shape = pick(rng, ((37, 41), (1, 50), (50, 1), (16, 16), (1, 1), (0, 4), (5, 0), (0, 0)))
            saving.TILE_BYTES = pick(rng, (8, 200, 8 << 20))
            d = layout(rng, shape, comm.size, dtype=dtype)
            values = numbers(rng, shape, d.dtype if d.dtype.kind == "c" else "float64").astype(d.dtype)
            a = ctx.scatter(values if comm.rank == 0 else None, d)
            order = pick(rng, "CF") if kind == "npy" else "C"
            a.save(path, dataset=dataset, order=order)
            told = {"dtype": dtype} if kind == "npy" else {}  # it has no names for narrow types
            b = ctx.load(path, dataset=dataset, block=3, **told)
            e = ctx.load(path, layout(rng, shape, comm.size, dtype=dtype), dataset=dataset)
            check_matrix(b, values, f"{kind}, {d}")
            check_matrix(e, values, f"{kind}, {d}")
            saving.TILE_BYTES = 8 << 20
            if kind == "npy":
                found = np.load(path)
                assert found.flags.c_contiguous if order == "C" else found.flags.f_contiguous
                assert found.tobytes("A") == values.tobytes(order)
        left = sorted(x.name for x in Path(directory).iterdir())
        comm.Barrier()
        expected = [n for n, _ in list(NAMES.values())[: list(NAMES).index(kind) + 1]]
        assert left == sorted(expected), f"{kind}: nothing else is left"


@on_ranks(1, 2, *only_long(4))
def test_peers(comm, ctx, directory):
    """Files of h5py's and zarr's own, chunked and compressed, and pblasmp's as they read them."""
    values = np.arange(37 * 41, dtype=np.float32).reshape(37, 41)
    complexes = (values * (1 - 2j)).astype(np.complex64)
    here = Path(directory)
    if comm.rank == 0:
        with h5py.File(here / "a.h5", "w") as file:
            file["plain"] = values
            file.create_dataset("q/packed", data=complexes, chunks=(5, 7), compression="gzip")
            file.create_dataset("ints", data=values.astype(">i4"))
            file["vector"] = values[0]
            file.attrs["kept"] = 7
        zarr.create_array(here / "a.zarr", data=values, chunks=(6, 50))
        group = zarr.open_group(here / "b.zarr", mode="w")
        group.create_array("other", data=complexes, chunks=(5, 7))
    comm.Barrier()
    a = ctx.load(here / "a.h5", dataset="plain", block=(3, 5), order="F")
    check_matrix(a, values, "plain")
    check_matrix(ctx.load(here / "a.h5", dataset="q/packed", block=4), complexes, "packed")
    ints = ctx.load(here / "a.h5", dataset="ints", dtype="float64", block=4)
    check_matrix(ints, values.astype("float64"), "integers")
    check_matrix(ctx.load(here / "a.zarr", block=4), values, "zarr")
    b = ctx.load(here / "b.zarr", dataset="other", block=4)
    check_matrix(b, complexes, "zarr group")
    sum_of = a + 1
    sum_of.save(here / "a.h5", dataset="new/sum")
    b.T.save(here / "a.h5", dataset="plain")
    a[3:9, 2:5].save(here / "b.zarr", dataset="part")
    comm.Barrier()
    with h5py.File(here / "a.h5", "r") as file:
        found = file["new/sum"][...], file["plain"][...], file["q/packed"][...], file.attrs["kept"]
        there = sorted(file)
    check_array(found[0], values + 1, "as h5py reads it")
    check_array(found[1], complexes.T, "as h5py reads it")
    check_array(found[2], complexes, "as h5py reads it")
    assert found[3] == 7
    assert there == ["ints", "new", "plain", "q", "vector"]  # fmt: skip
    group = zarr.open_group(here / "b.zarr", mode="r")
    check_array(group["part"][...], values[3:9, 2:5], "as zarr reads it")
    check_array(group["other"][...], complexes, "as zarr reads it")


@on_ranks(1, 2, *only_long(4))
def test_errors(comm, ctx, directory):
    here = Path(directory)
    if comm.rank == 0:
        with h5py.File(here / "a.h5", "w") as file:
            file["x"], file["y"], file["vector"] = np.ones((3, 3)), np.ones((3, 3)), np.ones(3)
            file.create_group("group")["text"] = "no numbers"
            file["texts"] = np.array([["a", "b"]], dtype="S1")
        zarr.open_group(here / "g.zarr", mode="w").create_array("x", data=np.ones((3, 3)))
        zarr.create_array(here / "cube.zarr", data=np.ones((3, 3, 3)))
        (here / "text.h5").write_text("not HDF5")
        (here / "damaged.h5").write_bytes((here / "a.h5").read_bytes().replace(b"TREE", b"TRUE"))
        (here / "plain.zarr").mkdir()
        (here / "plain.zarr" / "mine").write_text("a user's file")
    comm.Barrier()
    before = sorted(str(x) for x in here.rglob("*"))
    a = ctx.zeros((3, 3))

    def refused(call, kind, words, name, **options):
        refuses(ctx, kind, words, call, str(here / name), **options)

    load = (
        ("a.h5", None, ["which dataset", "'x', 'y'"]),
        ("a.h5", "z", ["no dataset 'z'", "'x'"]),
        ("a.h5", "vector", ["got 1"]),
        ("a.h5", "group", ["group", "expected a dataset"]),
        ("a.h5", "texts", ["S1"]),
        ("a.h5", 7, ["expected a name"]),
        ("text.h5", "x", ["not a readable HDF5 file"]),
        ("damaged.h5", "x", ["damaged.h5: a damaged HDF5 file", "B-tree"]),
        ("g.zarr", None, ["not a readable Zarr array", "dataset="]),
        ("g.zarr", "y", ["not a readable Zarr array"]),
        ("cube.zarr", None, ["got 3"]),
        ("plain.zarr", None, ["not a readable Zarr array"]),
    )
    for name, dataset, words in load:
        refused(ctx.load, pb.ArgumentError, words, name, dataset=dataset)
    for name in ("none.h5", "none.zarr"):
        refused(ctx.load, FileNotFoundError, [name], name, dataset="x")
    npy = str(here / "x.npy")
    refuses(ctx, pb.ArgumentError, ["dataset", ".h5"], ctx.load, npy, dataset="x")
    save = (
        ("a.h5", None, ["dataset", "give a name"]),
        ("a.h5", "/", ["expected a name"]),
        ("a.h5", "group", ["group"]),
        ("a.h5", "x/y", ["x/y"]),
        ("text.h5", "x", ["not a readable HDF5 file"]),
        ("g.zarr", None, ["group: give dataset="]),
        ("g.zarr", "../out", ["expected a name"]),
        ("g.zarr", "x/y", ["not a Zarr group"]),
        ("plain.zarr", None, ["not a Zarr array"]),
        ("plain.zarr", "x", ["not a Zarr group"]),
        ("x.npy", "x", ["dataset"]),
    )
    for name, dataset, words in save:
        refused(a.save, pb.ArgumentError, words, name, dataset=dataset)
    refused(a.save, pb.ArgumentError, ["order", "C order"], "a.h5", dataset="x", order="F")
    refused(a.save, FileNotFoundError, ["no/x.h5"], "no/x.h5", dataset="x")

    def failing(*args):
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError

    for name, dataset in (("a.h5", "x"), ("new.h5", "x"), ("g.zarr", "x"), ("new.zarr", None)):
        refused(a.save, ZeroDivisionError, [], name, dataset=dataset, progress=failing)
    comm.Barrier()
    after = sorted(str(x) for x in here.rglob("*"))
    assert after == before, f"nothing has changed: {set(after) ^ set(before)}"
    comm.Barrier()
    if comm.size > 1:
        mine = "x" if comm.rank else "y"
        refused(ctx.load, pb.RankMismatchError, ["dataset"], "a.h5", dataset=mine)


@on_ranks(1, 2, *only_long(4))
def test_several(comm, directory):
    """Matrices in one HDF5 file that is opened once."""
    rng = np.random.default_rng(53)
    path, copies = Path(directory) / "x.h5", []
    copyfile = hdf5.shutil.copyfile
    with pb.Context(comm, engine="host") as ctx, pb.Context(comm, engine="host") as other:
        values = {}
        hdf5.shutil.copyfile = lambda a, b: copies.append(copyfile(a, b))
        for turn in range(2):
            with ctx.open_file(path) as file:
                for dtype in (*TYPES, *FLOAT8):
                    shape = pick(rng, ((37, 41), (1, 9), (0, 4)))
                    d = layout(rng, shape, comm.size, dtype=dtype)
                    x = numbers(rng, shape, "float64").astype(d.dtype)
                    for name in (f"g/{dtype}", f"{dtype} {turn}"):
                        values[name] = x
                        ctx.scatter(x if comm.rank == 0 else None, d).save(file, dataset=name)
                a = ctx.full((20, 20), 7.0, block=3)
                refuses(ctx, pb.ArgumentError, ["give a name"], a.save, file)
                call = other.zeros((2, 2)).save, file
                refuses(ctx, pb.ArgumentError, ["another context"], *call, dataset="a")
                comm.Barrier()
                assert turn == path.exists(), f"{turn}: not there before it is whole: there"
                comm.Barrier()
            for name, x in values.items():
                check_matrix(ctx.load(path, dataset=name, block=3), x, f"{turn}: {name}")
        assert len(copies) == (comm.rank == 0), f"copied once: {len(copies)} copies"
        refuses(ctx, pb.ClosedError, ["the file is closed"], a.save, file, dataset="a")
    hdf5.shutil.copyfile = copyfile


@on_ranks(1, 2, *only_long(4))
def test_unfinished(comm, directory):
    """Files of several matrices that are never complete: an older one stays, and nothing is left."""
    here, write = Path(directory), saving.RawFile.write

    def left_as_it_was():
        comm.Barrier()
        assert [x.name for x in here.iterdir()] == ["x.h5"]
        with h5py.File(here / "x.h5") as file:
            assert [*file] == ["old"]
        comm.Barrier()

    def leave_with_error():
        with ctx.open_file(here / "x.h5") as file:
            a.save(file, dataset="a")
            raise ZeroDivisionError

    def full(self, *given):
        raise OSError(errno.ENOSPC, "no room")

    def go_on_after_error():
        with ctx.open_file(here / "x.h5") as file:
            a.save(file, dataset="a")
            if comm.rank == comm.size - 1:
                saving.RawFile.write = full
            refuses(ctx, OSError, ["no room"], a.save, file, dataset="b")
            saving.RawFile.write = write
            refuses(ctx, pb.ClosedError, ["could not be saved"], a.save, file, dataset="c")

    with pb.Context(comm, engine="host") as ctx, pb.Context(comm, engine="host") as other:
        a = ctx.full((20, 20), 7.0, block=3)
        a.save(here / "x.h5", dataset="old")
        refuses(ctx, ZeroDivisionError, [], leave_with_error)
        left_as_it_was()
        words = ["could not be saved"]
        refuses(ctx, pb.ClosedError, words, go_on_after_error)
        left_as_it_was()
        for name in ("y.npy", "y.zarr"):
            words = ["expected an HDF5 file"]
            refuses(ctx, pb.ArgumentError, words, ctx.open_file, here / name)
        refuses(ctx, FileNotFoundError, ["gone"], ctx.open_file, here / "gone" / "y.h5")
        if comm.size > 1:
            path = here / f"{min(comm.rank, 1)}.h5"
            refuses(ctx, pb.RankMismatchError, ["open_file"], ctx.open_file, path)
        left_as_it_was()
        other.open_file(here / "z.h5")
    left_as_it_was()


@pytest.mark.parametrize(("name", "module"), [("x.h5", "h5py"), ("x.zarr", "zarr")])
def test_a_library_that_is_missing(name, module, tmp_path, monkeypatch):
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, module, None)
    with pb.Context(engine="host") as ctx:
        extra = {"h5py": "hdf5", "zarr": "zarr"}[module]
        with pytest.raises(pb.LibraryNotFoundError, match=f"{module}.*pip install.*{extra}"):
            ctx.load(tmp_path / name)
        with pytest.raises(pb.LibraryNotFoundError, match=f"{module}.*pip install.*{extra}"):
            ctx.zeros((2, 2)).save(tmp_path / name, dataset="x")
