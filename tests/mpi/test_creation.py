# SPDX-License-Identifier: Apache-2.0
"""New matrices: full, eye, random, and every way to say how they are distributed."""

import hashlib
import itertools
import math

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import FLOAT8
from tests.helpers.cases import SIZES, TYPES, check_array, check_matrix, layout, numbers, pick, refuses
from tests.helpers.mpi import on_ranks, run_mpi

ALL_TYPES = (*TYPES, *FLOAT8)


@on_ranks(1, 4)
def test_values(comm, ctx):
    rng = np.random.default_rng(61)
    for dtype in ALL_TYPES:
        d = layout(rng, pick(rng, ((9, 7), (7, 9), (8, 8), (0, 3))), comm.size, dtype=dtype)
        check_matrix(ctx.full(d, 2.5), np.full(d.shape, 2.5).astype(d.dtype), f"full {d}")
        check_matrix(ctx.eye(d), np.eye(*d.shape).astype(d.dtype), f"eye {d}")
    check_matrix(ctx.eye(5, block=2), np.eye(5), "square")
    check_matrix(ctx.full((3, 4), 1 + 2j, block=1), np.full((3, 4), 1 + 2j), "complex")
    d = pb.MatrixDescriptor((3, 4), (1, 1), pb.Grid.squarest(comm.size))
    refuses(ctx, pb.ArgumentError, ["value", "complex"], ctx.full, d, 2j)
    refuses(ctx, pb.ArgumentError, ["value", "'7'"], ctx.full, d, "7")


def random_digests(comm, seed):
    """A digest of each matrix: layouts are drawn anew for every number of ranks."""
    rng = np.random.default_rng(seed)
    found = {}
    with pb.Context(comm, engine="host") as ctx:
        for dtype in ALL_TYPES:
            for distribution in ("uniform", "normal"):
                d = layout(rng, (61, 47), comm.size, dtype=dtype)
                a = ctx.random(d, seed=9, distribution=distribution)
                whole = np.ascontiguousarray(a.allgather())
                found[f"{dtype} {distribution}"] = hashlib.sha256(whole.tobytes()).hexdigest()
        smaller = ctx.random((11, 13), seed=9, block=3).allgather()
        assert np.array_equal(smaller, ctx.random((61, 47), seed=9, block=4).allgather()[:11, :13])
        anew = ctx.random((6, 6), block=2).allgather()
        assert not np.array_equal(anew, ctx.random((6, 6), block=2).allgather())
        everywhere = ctx.comm.allgather(anew.tobytes())
        assert len(set(everywhere)) == 1
    return found


@on_ranks(1, 4)
def test_random_errors(comm, ctx):
    for seed in (-1, 1 << 64, 1.5, "1"):
        refuses(ctx, pb.ArgumentError, ["seed"], ctx.random, (2, 2), seed=seed)
    words = ["distribution", "'uniform' or 'normal'"]
    refuses(ctx, pb.ArgumentError, words, ctx.random, (2, 2), distribution="gamma")
    if comm.size > 1:
        words = ["seed"]
        refuses(ctx, pb.RankMismatchError, words, ctx.random, (2, 2), seed=comm.rank)


@on_ranks(1, 4)
def test_ways_to_say_it(comm, ctx):
    n = comm.size
    expected = pb.MatrixDescriptor((20, 30), (4, 4), pb.Grid(1, n), (0, n - 1), "float32", "F")
    makers = {
        "empty": ctx.empty, "zeros": ctx.zeros, "ones": ctx.ones, "eye": ctx.eye, "random": ctx.random,
        "full": lambda layout, **rest: ctx.full(layout, 3, **rest),
        "from_function": lambda layout, **rest: ctx.from_function(lambda i, j: i + j, layout, **rest),
        "scatter": lambda layout, **rest: ctx.scatter(np.ones((20, 30)) if comm.rank == 0 else None, **rest),
    }  # fmt: skip
    for name, make in makers.items():
        forms = (4, (4, 4), [4, 4], np.int64(4)), (pb.Grid(1, n), (1, n), f"1x{n}")
        for block, grid in itertools.product(*forms):
            keywords = {"source": (0, n - 1), "dtype": "float32", "order": "F"}
            found = make((20, 30), block=block, grid=grid, **keywords).descriptor
            assert found == expected, f"{name} {block!r} {grid!r}"
        p = max(pb.Grid.squarest(n).shape)
        plain = pb.MatrixDescriptor((20, 30), (math.ceil(20 / p), math.ceil(30 / p)), pb.Grid.squarest(n))
        found = make((20, 30)).descriptor
        assert found == plain, f"{name}, defaults"
        if name != "scatter":
            words = ["block, dtype", "cannot be given with a descriptor"]
            call = (ctx, pb.ArgumentError, words, make, plain)
            refuses(*call, block=4, dtype="float32")
            for grid in ("2", "axb", 3, (1, 2, 3), "1x2x3"):
                refuses(ctx, pb.ArgumentError, ["grid", "'2x3'"], make, (20, 30), grid=grid)
            refuses(ctx, pb.ArgumentError, ["shape"], make, "20x30")
            words = [f"needs {n + 1} ranks, got {n}"]
            refuses(ctx, pb.ArgumentError, words, make, (2, 2), grid=(1, n + 1))
    for shape in ((100, 100), (1, 1000), (7, 3), (0, 5)):
        d = ctx.zeros(shape).descriptor
        spread = all(min(axis.counts()) > 0 or axis.extent < p * axis.block for axis in (d.rows, d.cols))
        assert spread, f"{shape} by default"
        assert max(d.block) <= 256, f"{shape} by default"
    check_matrix(ctx.ones((5, 3), block=2), np.ones((5, 3)), "ones")
    d = ctx.zeros((100, 100)).descriptor
    assert 0 not in d.rows.counts() + d.cols.counts(), "every rank has a part of 100 x 100"
    assert ctx.zeros((3000, 3000)).descriptor.block == (256, 256), "large blocks: others"
    words = ["got 5", "(5, 5) is a square matrix", "(5, 1) a column"]
    refuses(ctx, TypeError, words, ctx.zeros, 5)
    for given in (np.ones((3, 2), int), [[1, 2]], np.ones((2, 2), bool), np.ones((2, 2), np.longdouble)):
        words = ["is not an element type of matrices", "dtype='float64'"]
        refuses(ctx, pb.ArgumentError, words, ctx.scatter, given)
        check_matrix(ctx.scatter(given, dtype="float32"), np.array(given, "float32"), f"{given!r} converted")
    a = ctx.random((20, 30), seed=1, block=(3, 5), order="F")
    whole = a.allgather()
    moved = a.redistribute(block=4, grid=f"1x{n}", source=(0, n - 1), dtype="float32")
    check_matrix(moved, whole.astype("float32"), "redistribute")
    assert moved.descriptor == expected, "redistribute"
    part = a[4:19, 7:23]
    check_matrix(part.redistribute(block=2), whole[4:19, 7:23], "a part")
    check_matrix(part.redistribute(order="C"), whole[4:19, 7:23], "its order")
    again = part.redistribute(dtype="complex64")
    same = again.descriptor.same_places(part.descriptor)
    check_matrix(again, whole[4:19, 7:23].astype("complex64"), "its type")
    assert same, "its type"
    words = ["block cannot be given with a descriptor"]
    refuses(ctx, pb.ArgumentError, words, a.redistribute, expected, block=3)
    words = ["grid cannot be given with out="]
    refuses(ctx, pb.ArgumentError, words, a.redistribute, out=moved, grid=(1, 1))
    refuses(ctx, pb.ArgumentError, ["block="], a.redistribute)


@on_ranks(1, 4)
def test_arrays_that_say_it(comm, ctx):
    """scatter takes what is not said from the array."""
    rng = np.random.default_rng(62)
    root = comm.size - 1
    for given, to in (("float32", "float32"), ("complex64", "complex64"), (">f8", "float64")):
        x = numbers(rng, (9, 7), "float64").astype(given)
        a = ctx.scatter(x if comm.rank == root else None, root=root, block=2)
        check_matrix(a, x.astype(to), given)
        check_array(a.allgather(), x.astype(to), given)
    cube = np.ones((2, 2, 2)) if comm.rank == root else None
    refuses(ctx, pb.ArgumentError, ["got 3"], ctx.scatter, cube, root=root)
    given = x if comm.rank != root else None
    refuses(
        ctx,
        pb.ArgumentError,
        [f"expected an array of rank {root}, the root, got None"],
        ctx.scatter,
        given,
        root=root,
    )
    d = pb.MatrixDescriptor((2, 2), (1, 1), pb.Grid.squarest(comm.size))
    masked = np.ma.masked_array(np.ones((2, 2)), mask=[[0, 1], [0, 0]])
    words = ["masked", "filled"]
    refuses(ctx, pb.ArgumentError, words, ctx.scatter, masked, d)
    refuses(ctx, pb.ArgumentError, words, ctx.from_function, lambda i, j: masked, d)
    inside = comm.rank < d.grid.size
    local = np.ma.masked_array(np.ones(d.local_shape(comm.rank) if inside else (0, 0)))
    refuses(ctx, pb.ArgumentError, ["masked"], ctx.from_local, local, d)


@on_ranks(1, 4)
def test_functions_of_numbers(comm, ctx):
    """Functions that take two numbers, and no arrays: the error says what to do, and that works."""
    d = pb.MatrixDescriptor((9, 7), (2, 2), pb.Grid.squarest(comm.size))
    table = [[10.0 * i + j for j in range(7)] for i in range(9)]
    for name, function in (
        ("if", lambda i, j: 1.0 if i == j else 0.0),
        ("max", lambda i, j: float(max(i, j))),
        ("math", lambda i, j: math.floor(i) + math.floor(j)),
        ("lists", lambda i, j: table[i][j]),
    ):
        words = [
            "from_function: the function takes single numbers",
            "numpy.where",
            "numpy.vectorize(function)",
        ]
        refuses(ctx, pb.ArgumentError, words, ctx.from_function, function, d)
        whole = np.array([[function(i, j) for j in range(7)] for i in range(9)], "float64")
        check_matrix(ctx.from_function(np.vectorize(function), d), whole, f"{name} in vectorize")

    called = []

    def effects(value):
        called.append(value.shape)
        raise kind("wrong" if kind is TypeError else "The truth value of an array is ambiguous")

    matrix = ctx.zeros(d)
    for kind, found in ((TypeError, TypeError), (ValueError, pb.ArgumentError)):
        called.clear()
        refuses(ctx, found, [], matrix.map, effects)
        assert called == [matrix.local.shape], f"map, {kind.__name__}"

    def wrong_for_numbers_too(i, j):
        raise ValueError(f"no value for {type(i).__name__}, {type(j).__name__}")

    words = ["no value for ndarray, ndarray"]
    refuses(ctx, ValueError, words, ctx.from_function, wrong_for_numbers_too, d)
    empty = pb.MatrixDescriptor((0, 7), (2, 2), d.grid)
    refuses(ctx, ValueError, words, ctx.from_function, wrong_for_numbers_too, empty)


def test_random_numbers_depend_on_the_seed_alone():
    found = [digests for n in SIZES for digests in run_mpi(random_digests, n, seed=n)]
    assert all(each == found[0] for each in found)
