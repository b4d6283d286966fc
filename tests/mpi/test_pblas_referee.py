# SPDX-License-Identifier: Apache-2.0
"""pblasmp.pblas against the real ScaLAPACK: the same local arrays, descriptors and arguments.

``test_calls.py`` has levels 1 to 3 and factorizations; here are norms, moves, descriptors and what else there is.

What our routines must not read holds NaN, which ScaLAPACK itself is spared.
"""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import pblasmp as pb
from pblasmp import pblas
from pblasmp.pblas.routine_functions import DTYPE
from reference.scalapack import ScaLAPACK
from tests.helpers.cases import check_array, check_near, grids, numbers, pick, scattered
from tests.helpers.mpi import run_on_one_node as run_mpi
from tests.helpers.pblas_cases import Held, held, triangle
from tests.helpers.slow import draws, in_turn, only_long


def both_grids(ctx, slk, shape, order):
    """The numbers of a grid's contexts: pblasmp's and ScaLAPACK's, -1 outside it."""
    own, theirs = pblas.gridinit(ctx, order, *shape), slk.grid(*shape, order)
    assert (own == -1) == (theirs == -1)
    return own, theirs


def dense_norm(norm, x):
    """A norm by NumPy."""
    sizes = abs(x.astype(complex))
    if norm in "FE":
        return np.sqrt((sizes**2).sum())
    return sizes.max() if norm == "M" else sizes.sum(axis=int(norm == "I")).max()


def passed(x, place, context):
    """The four arguments of a matrix."""
    return [x.local(place), *x.at, x.desc(context, place)]


def auxiliary(comm, count, flavor, seed=1):
    """Norms, copies, constants, scaling, traces and elements."""
    slk = ScaLAPACK(flavor, comm)
    rng = np.random.default_rng(seed)
    with pb.Context(comm, engine="host") as ctx:
        shapes = [(p, comm.size // p) for p in range(1, comm.size + 1) if comm.size % p == 0]
        every = [(shape, *both_grids(ctx, slk, shape, order)) for shape in shapes for order in ("row", "col")]
        for letter in ("sdcz" if comm.size == 1 or only_long(True) else "sz") * count:
            dtype = DTYPE[letter]
            real = dtype.type(0).real.dtype
            single = ctypes.c_float if real.itemsize == 4 else ctypes.c_double
            shape, own, theirs = pick(rng, every)
            place, work = pblas.gridinfo(own)[2:], np.zeros(500)
            n = int(rng.integers(1, 14))
            square = held(rng, shape, (n, n), dtype)
            x = replace(square, block=square.block[:1] * 2, at=square.at[:1] * 2)
            if min(x.whole.shape) < x.at[0] - 1 + n:
                x = replace(x, whole=numbers(rng, (x.at[0] + n, x.at[0] + n), dtype))
            wide = held(rng, shape, tuple(int(i) for i in rng.integers(1, 14, 2)), dtype)
            uplo, diag = pick(rng, "UL"), pick(rng, "NU")

            for norm in "M1OIFE":
                kept, inside = triangle(x.shape, uplo), triangle(x.shape, uplo, unit=diag == "U")
                whole = x.whole[x.window]
                half, ones = np.where(kept, whole, 0), np.eye(n) if diag == "U" else 0
                other = np.where(np.eye(n), 0, half)
                real_half = np.where(np.eye(n), half.real, half)
                # ScaLAPACK's own errs inside blocks, and its pdlantr in row sums
                aligned = (x.at[0] - 1) % x.block[0] == 0
                cases = [
                    (True, "lange", (norm, *wide.shape), wide, None, wide.whole[wide.window]),
                    (aligned, "lansy", (norm, uplo, n), x, kept, half + other.T),
                    (aligned and norm != "I", "lantr", (norm, uplo, diag, n, n), x, inside,
                     np.where(inside, whole, 0) + ones),
                ]  # fmt: skip
                if dtype.kind == "c":
                    cases.append((aligned, "lanhe", (norm, uplo, n), x, kept, real_half + other.conj().T))
                for trusted, name, head, y, read, dense in cases:
                    array = y.local(place, y.whole if read is None else y.unread(read))
                    found = getattr(pblas, f"p{letter}{name}")(*head, array, *y.at, y.desc(own, place), work)
                    expected = [dense_norm(norm, dense)]
                    if trusted:
                        theirs_in = (y.local(place), *y.at, y.desc(theirs, place), work)
                        expected.append(slk.function(f"p{letter}{name}_", *head, *theirs_in, result=single))
                    far = [
                        each for each in expected if abs(found - each) > 16 * np.finfo(dtype).eps * abs(each)
                    ]
                    assert not far, f"{letter}{name}{head} {y}: {found}, expected {expected}"
                    assert found.dtype == real, f"{letter}{name}{head} {y}: {found}, expected {expected}"
            part, factors = pick(rng, "ULA"), (np.array(3, dtype), np.array(-2, dtype))
            one, info = np.ones(1, real), np.zeros(1, np.int32)
            for name, head, tail in (
                ("laset", [part, *wide.shape, *factors], []),
                ("lascl", ["G", 4 * one, 2 * one, *wide.shape], [info]),
            ):
                found, expected = passed(wide, place, own), passed(wide, place, theirs)
                plain = [each.item() if isinstance(each, np.ndarray) else each for each in head]
                getattr(pblas, f"p{letter}{name}")(*plain, *found, *tail)
                slk.call(f"p{letter}{name}_", *head, *expected, *tail)
                check_near(found[0], expected[0], f"{name} {plain} {wide}")
            if (x.at[0] - 1) % x.block[0] == 0:  # ScaLAPACK's own errs inside blocks
                found, expected = passed(x, place, own), passed(x, place, theirs)
                kind = pick(rng, "UL")  # its "H" leaves parts unscaled
                getattr(pblas, f"p{letter}lascl")(kind, 4, 2, n, n, *found, info)
                slk.call(f"p{letter}lascl_", kind, 4 * one, 2 * one, n, n, *expected, info)
                check_near(found[0], expected[0], f"lascl {kind} {x}")
            target = replace(wide, whole=numbers(rng, wide.whole.shape, dtype))
            (a, c), (b, d) = ([passed(y, place, which) for which in (own, theirs)] for y in (wide, target))
            getattr(pblas, f"p{letter}lacpy")(part, *wide.shape, *a, *b)
            slk.call(f"p{letter}lacpy_", part, *wide.shape, *c, *d)
            check_near(b[0], d[0], f"lacpy {part} {wide}")
            trace = getattr(pblas, f"p{letter}latra")(n, *passed(x, place, own))
            assert trace == x.whole[x.window].trace(), f"latra: {x}: {trace}"
            found, expected = passed(wide, place, own), passed(wide, place, theirs)
            getattr(pblas, f"p{letter}elset")(*found, 5)
            slk.call(f"p{letter}elset_", *expected, np.array([5], dtype))
            check_near(found[0], expected[0], f"elset {wide}")
            scope, told, number = pick(rng, "ARC "), np.full(1, 77, dtype), np.full(1, 77, dtype)
            returned = getattr(pblas, f"p{letter}elget")(scope, " ", told, *found)
            slk.call(f"p{letter}elget_", scope, " ", number, *expected)
            check_near(told, number, f"elget {scope}")
            check_near(told, np.array([returned]), f"elget {scope}")
        for _, own, theirs in every:
            pblas.gridexit(own)
            slk.gridexit(theirs)


def moves(comm, count, flavor):
    """p?gemr2d and p?trmr2d between grids of any size."""
    slk = ScaLAPACK(flavor, comm)
    rng = np.random.default_rng(3)
    with pb.Context(comm, engine="host") as ctx:
        everybody = both_grids(ctx, slk, (1, comm.size), "row")
        every = [(g.shape, *both_grids(ctx, slk, g.shape, g.order)) for g in grids(comm.size)]
        for letter in "sdcz" * count:
            dtype = DTYPE[letter]
            size = tuple(int(x) for x in rng.integers(0, 15, 2))
            triangular = bool(rng.integers(2))
            name = f"p{letter}{'trmr2d' if triangular else 'gemr2d'}"
            uplo, diag = pick(rng, "UL"), pick(rng, "NU")
            chosen = [pick(rng, every) for _ in "ab"]
            xs = [held(rng, shape, size, dtype) for shape, _, _ in chosen]
            found = []
            for which, function in ((0, getattr(pblas, name)), (1, None)):
                operands = []
                for x, (_, own, theirs) in zip(xs, chosen, strict=True):
                    context = (own, theirs)[which]
                    place = pblas.gridinfo(own)[2:]
                    local = x.local(place) if own != -1 else np.zeros((1, 1), dtype)
                    desc = x.desc(context, place) if own != -1 else np.full(9, -1, np.int32)
                    operands += [local, *x.at, desc]
                head = [uplo, diag] if triangular else []
                call = function or (lambda *args, name=name: slk.call(f"{name}_", *args))
                call(*head, *size, *operands, everybody[which])
                found.append(operands[4])
            check_near(*found, f"{name} {uplo} {diag} {size} {xs}")
        for own, theirs in (everybody, *(each[1:] for each in every)):
            pblas.gridexit(own)
            if theirs != -1:
                slk.gridexit(theirs)


def tools(comm, flavor):
    """Descriptors and indices."""
    slk = ScaLAPACK(flavor, comm)
    numpys = {each["architecture"] for each in threadpool_info() if each["internal_api"] == "openblas"}
    if flavor == "debian" and numpys:
        assert slk.kernels in numpys, f"kernels: {slk.kernels}, NumPy has {numpys}"
    rng = np.random.default_rng(4)
    shape = pb.Grid.squarest(comm.size).shape
    with pb.Context(comm, engine="host") as ctx:
        own, theirs = both_grids(ctx, slk, shape, "col")
        nprow, npcol, myrow, mycol = pblas.gridinfo(own)
        out = np.zeros(4, np.int32)
        slk.gridinfo(theirs, out)
        check_array(out, np.array((nprow, npcol, myrow, mycol), np.int32), "gridinfo")
        for _ in range(draws(10, long=30)):
            n, index = int(rng.integers(200)), int(rng.integers(1, 200))
            nb, nprocs = int(rng.integers(1, 9)), int(rng.integers(1, 7))
            here, source = (int(x) for x in rng.integers(nprocs, size=2))
            for name, argument in (("numroc", n), ("indxg2p", index), ("indxg2l", index), ("indxl2g", index)):
                known = (argument, nb, here, source, nprocs)
                found, expected = getattr(pblas, name)(*known), slk.function(f"{name}_", *known)
                assert found == expected, f"{name}{known}"
            x = held(rng, shape, tuple(int(i) for i in rng.integers(0, 20, 2)), np.dtype("f8"))
            m, n = x.whole.shape
            desc = pblas.descinit(m, n, *x.block, *x.source, own, x.lld((myrow, mycol)))
            place = nprow, npcol, myrow, mycol
            like = slk.descriptor(theirs, x.whole.shape, x.block, x.source, int(desc[8]))
            like[1] = own
            slk.call("infog2l_", *x.at, desc, *place, *(out[i : i + 1] for i in range(4)))
            found = np.array(pblas.infog2l(*x.at, desc, *place), np.int32)
            check_array(desc, like, f"descinit {x}")
            check_array(found, out, f"infog2l {x}")
        pblas.gridexit(own)
        slk.gridexit(theirs)


def interoperation(comm, flavor):
    """Matrices, and parts of them, are given to ScaLAPACK and back where they are."""
    slk = ScaLAPACK(flavor, comm)
    rng = np.random.default_rng(5)
    with pb.Context(comm, engine="host") as ctx:
        for number, grid in enumerate(grids(comm.size)):
            theirs = slk.grid(grid.nprow, grid.npcol, grid.order)
            for letter in in_turn("sdcz", keep=min(4, comm.size), first=number):
                dtype, order = DTYPE[letter], pick(rng, "CF")
                x = held(rng, grid.shape, (9, 7), dtype)  # what ScaLAPACK sees
                seen = pb.MatrixDescriptor(x.whole.shape, x.block, grid, x.source, dtype, "F")
                if order == "F":
                    a = scattered(ctx, seen, x.whole)
                    part = a[x.window]
                else:
                    a = scattered(ctx, seen.T, x.whole.T)
                    part = a[x.window[::-1]].T
                given = part.to_scalapack(context=theirs)
                y = Held(grid.shape, numbers(rng, (7, 9), dtype), (2, 3), (0, 0), (1, 1), (7, 9), 2)
                inside = comm.rank < grid.size
                local = desc = None
                flat = bool(rng.integers(2))
                if inside:
                    place = grid.coords(comm.rank)
                    local = y.local(place, flat=flat)
                    desc = slk.descriptor(theirs, (7, 9), (2, 3), (0, 0), y.lld(place))
                    one, zero = np.ones(1, dtype), np.zeros(1, dtype)
                    name = f"p{letter}tran{'u' if dtype.kind == 'c' else ''}_"
                    slk.call(name, 7, 9, one, *given, zero, local, 1, 1, desc)
                back = ctx.from_scalapack(local, desc, grid)
                check_array(back.allgather(), x.whole[x.window].T, f"{grid} {letter} {order}")
                assert not given.local.size or np.shares_memory(given.local, a.local), (
                    f"{grid} {letter} {order}"
                )
                assert not back.local.size or np.shares_memory(back.local, local), f"{grid} {letter} {order}"
            if theirs != -1:
                slk.gridexit(theirs)


@pytest.mark.parametrize("nranks", [1, *only_long(2), 4, *only_long(6)])
def test_moves_tools_and_matrices(nranks, scalapack):
    few = draws(2 if nranks == 1 else 1, long=2)
    run_mpi(others, nranks, count=few, moved=draws(2, long=7), flavor=scalapack, launch=True)


def others(comm, count, moved, flavor):
    auxiliary(comm, count, flavor)
    moves(comm, moved, flavor)
    tools(comm, flavor)
    interoperation(comm, flavor)
