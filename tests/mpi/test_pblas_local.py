# SPDX-License-Identifier: Apache-2.0
"""What is local in ScaLAPACK is local here: one process calls, the others do not. And what takes a single meeting."""

import re
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from pblasmp.context import Context
from tests.helpers.cases import check_near, refuses
from tests.helpers.mpi import on_ranks, run_on_one_node

M, N, NB = 7, 9, 2


class Dealt:
    """A matrix on a 2 x 2 grid: its local array, its descriptor, and which of its elements this process has."""

    def __init__(self, ictxt, whole, source=(0, 0), flat=False):
        nprow, npcol, myrow, mycol = pblas.gridinfo(ictxt)
        self.rows, self.cols = (
            np.atleast_1d([g for g in range(n) if (g // NB + first) % of == at])
            for n, first, of, at in ((M, source[0], nprow, myrow), (N, source[1], npcol, mycol))
        )
        lld = len(self.rows) + 1
        self.array = np.full((lld, len(self.cols)), -5, whole.dtype, order="F")
        self.array[:-1] = whole[np.ix_(self.rows, self.cols)]
        self.desc = pblas.descinit(M, N, NB, NB, *source, ictxt, lld)
        self.place = self.array.reshape(-1, order="F") if flat else self.array, 1, 1, self.desc

    def at(self, i, j):
        return self.place[0], i, j, self.desc

    def check(self, whole, case=""):
        """Fail unless it has the elements of a matrix, and its padding is untouched."""
        check_near(self.array[:-1], whole[np.ix_(self.rows, self.cols)], case)
        assert (self.array[-1] == -5).all(), f"{case}: {self.array}"


@contextmanager
def without_agreements():
    """Make agreements fail, and calls with them: local ones and those with one meeting have none."""
    with mock.patch.object(Context, "agreement", side_effect=AssertionError("an agreement")):
        yield


@pytest.mark.parametrize("rank", [1, 2])
@on_ranks(4)
def test_local_routines_need_no_other_process(comm, ctx, rank):
    """One process makes the calls, legal and not; every process looks at its own elements."""
    ictxt = pblas.gridinit(ctx, "Row", 2, 2)
    for letter, dtype, flat in (("d", "f8", False), ("c", "c8", True)):
        call = {
            name: getattr(pblas, f"p{letter}{name}") for name in ("elset", "elget", "laset", "lascl", "lacpy")
        }
        whole = np.arange(1, M * N + 1, dtype=dtype).reshape(M, N)
        a, b, c, d = (Dealt(ictxt, whole, source, flat) for source in ((0, 0), (0, 0), (1, 0), (1, 0)))
        want = {"a": whole, "b": whole, "c": whole, "d": whole}
        found = []
        if comm.rank == rank:
            for i in range(1, M + 1):
                for j in np.arange(1, N + 1):  # indices as indxl2g's arrays have them
                    call["elset"](*a.at(i, j), np.float32(100 * i + j))
                    found += [call["elget"](" ", " ", None, *b.at(i, j))]
            call["elset"](
                alpha=3.0, **dict(zip(("a", "ia", "ja", "desca"), a.at(np.array(M), N), strict=True))
            )
            call["lacpy"]("U", M - 1, N - 2, *a.at(2, 2), *b.at(2, 2))  # b from a
            call["laset"]("L", M - 2, N - 1, 7.0, 9.0, *c.at(3, 2))
            call["laset"]("all", 2, 3, 1.0, 2.0, *c.at(1, 5))
            call["lascl"]("H", 1.0, 2.0, M, N, *d.place, None)
            of_a = dict(zip(("a", "ia", "ja", "desca"), a.at(6, 3), strict=True))
            of_b = dict(zip(("b", "ib", "jb", "descb"), b.at(6, 3), strict=True))
            call["lacpy"](uplo="A", m=np.int8(2), n=2, **of_a, **of_b)  # it takes a closer look
            for name, given, info in (
                ("elset", (*a.at(M + 1, 1), 1.0), -2),
                ("elget", (" ", " ", 3, *a.at(1, 1)), -3),
                ("elget", (" ", " ", None, *a.at(1, N + 1)), -6),
                ("laset", ("A", M, N, "1", 0.0, *a.place), -4),
                ("lascl", ("G", 0.0, 1.0, M, N, *a.place, None), -2),
                ("lacpy", ("A", M, N, *a.place, *(np.zeros(3, "f2"), *b.place[1:])), -8),
            ):
                with pytest.raises(pblas.ParameterError) as caught:
                    call[name](*given)
                assert caught.value.info == info, f"{letter} {name}"
            i, j = np.ogrid[1 : M + 1, 1 : N + 1]
            wanted = {k: v.copy() for k, v in want.items()}
            wanted["a"] = (100 * i + j).astype(dtype)
            wanted["a"][-1, -1] = 3
            inner, part = wanted["b"][1:, 1:-1], wanted["a"][1:, 1:-1]
            inner[...] = np.where(np.tri(*inner.shape, -1), inner, part)
            wanted["b"][5:7, 2:4] = wanted["a"][5:7, 2:4]
            lower = wanted["c"][2:, 1:]
            lower[...] = np.where(np.tri(*lower.shape, -1), 7, np.where(np.eye(*lower.shape), 9, lower))
            wanted["c"][:2, 4:7] = [[2, 1, 1], [1, 2, 1]]
            wanted["d"] = np.where(np.tri(M, N, -2), whole, 2 * whole)
            mine = np.zeros((M, N), dtype)
            mine[np.ix_(b.rows, b.cols)] = whole[np.ix_(b.rows, b.cols)]
            check_near(np.reshape(found, (M, N)), mine, f"{letter} elements")
            want = wanted
        for name, x in zip("abcd", (a, b, c, d), strict=True):
            x.check(want[name], f"{letter} {name}")
    comm.barrier()
    x = Dealt(ictxt, np.ones((M, N)))
    pblas.pdscal(M, 2.0, *x.place, 1)  # the context is as it was
    x.check(np.where(np.arange(N) == 0, 2.0, np.ones((M, N))), "afterwards")


@on_ranks(4, runner=run_on_one_node)
def test_elements_of_process_rows_and_norms(ctx):
    """p?elget of a process row or column, which calls it alone; norms and elements for all in one meeting."""
    rng = np.random.default_rng(5)
    for shape in ((2, 2), (1, 4), (4, 1)):
        ictxt = pblas.gridinit(ctx, "Col", *shape)
        _, _, *here = pblas.gridinfo(ictxt)
        for letter, dtype in (("s", "f4"), ("z", "c16")):
            whole = (rng.integers(-9, 9, (M, N)) + (1j if dtype == "c16" else 0)).astype(dtype)
            whole[0, 0] = -0.0
            a, get = Dealt(ictxt, whole), getattr(pblas, f"p{letter}elget")
            for i, j in ((1, 1), (3, 4), (M, N)):
                owner = (i - 1) // NB % shape[0], (j - 1) // NB % shape[1]
                for axis, scope in enumerate("RC"):
                    good = True  # of those that do not call
                    if here[axis] == owner[axis]:
                        told = np.zeros(1, dtype)
                        number = get(scope, " ", told, *a.at(i, j))
                        good = number == told[0] == whole[i - 1, j - 1] and number.dtype == dtype
                    assert good, f"{scope} {i} {j} {shape}: {number}"
                with without_agreements():
                    number = get("all", " ", None, *a.at(i, j))
                same = number.tobytes() == whole[i - 1, j - 1].tobytes()
                assert same, f"A {i} {j} {shape}: {number!r}"
            sub, norm = whole[1:6, 2:].astype("c16"), getattr(pblas, f"p{letter}lange")
            values = {"M": abs(sub).max(), "f": np.sqrt((abs(sub) ** 2).sum())}
            for factor in (1, 1e-30, np.nan):  # whose squares are no numbers of the type
                x = Dealt(ictxt, (whole * factor).astype(dtype))
                for each, value in values.items():
                    with without_agreements():
                        found = norm(each, 5, N - 2, *x.at(2, 3), None)
                    assert np.allclose(found, value * factor, rtol=4e-6, atol=0, equal_nan=True), (
                        f"{each} {factor} {letter} {shape}: {found!r}"
                    )
            names = ("lansy", ("L",)), ("lantr", ("L", "U", 5)), ("lanhe", ("L",))
            for name, options in names[: 3 if letter == "z" else 2]:
                with without_agreements():  # what they are is in test_pblas_referee.py
                    assert getattr(pblas, f"p{letter}{name}")("E", *options, 5, *a.at(2, 3), None) > 0
            with without_agreements():
                found = getattr(pblas, f"p{letter}latra")(5, *a.at(2, 3))
            assert found == whole[1:6, 2:7].trace(), f"{letter} {shape}: {found!r}"
        pblas.gridexit(ictxt)


@on_ranks(2)
def test_copies_between_other_layouts_are_collective(comm, ctx):
    """Where each process does not have the same elements, p?lacpy is collective."""
    ictxt = pblas.gridinit(ctx, "Row", 2, 1)
    whole = np.arange(1.0, M * N + 1).reshape(M, N)
    a, b = Dealt(ictxt, whole), Dealt(ictxt, -whole)
    pblas.pdlacpy("A", 3, N, *a.at(1, 1), *b.at(2, 1))
    want = -whole
    want[1:4] = whole[:3]
    b.check(want, "moved")
    other = np.zeros(2, "f4") if comm.rank == 1 else b.array
    given = ("A", 3, N, *a.at(1, 1), other, 2, 1, b.desc)
    refuses(ctx, pblas.ParameterError, ["(on rank 1)", "(b)"], pblas.pdlacpy, *given)
    x, copied = ctx.zeros((4, 4), block=2), ("A", 3, N, *a.at(1, 1), *b.at(1 + comm.rank, 1))
    for name, call in {
        "pdlacpy": lambda: pblas.pdlacpy(*copied),
        "matrix[i, j]": lambda: x[0, 0] if comm.rank else x[-4],
    }.items():  # legal on all, and local on the first process only: its next call tells
        if comm.rank == 0:
            call()
        both = x.norm if comm.rank == 0 else call
        refuses(ctx, pb.RankMismatchError, [name, "norm on rank 0"], both)
    given = ("F" if comm.rank else "M", M, N, *a.place, None)
    refuses(ctx, pb.RankMismatchError, ["norm"], pblas.pdlange, *given)


@on_ranks(2)
def test_blacs_names(comm):
    """BLACS's own names: grids as Fortran programs make and free them."""
    ictxt = pblas.blacs_get(-1, 0)
    assert ictxt == 0, "system context"
    ictxt = pblas.blacs_gridinit(ictxt, "Row", 1, 2, engine="host")
    seen = pblas.blacs_gridinfo(ictxt)
    assert seen == (1, 2, 0, comm.rank), "gridinfo"
    with pb.Context(comm, engine="host") as ctx:
        others = [pblas.blacs_gridinit(comm, "Col", n, 1, engine="host") for n in (2, 1)]
        refuses(ctx, pb.PblasmpError, ["expected", "got 7"], pblas.gridinit, 7, "Row", 1, 1)
        pblas.blacs_gridexit(ictxt)
        assert pblas.gridinfo(ictxt) == (-1,) * 4, "freed: still a context"
        pblas.blacs_exit(0)
        left = [pblas.gridinfo(each) for each in others]
        assert left == [(-1,) * 4] * 2, "all freed"
        again = pblas.gridinit(comm, "Col", 2, 1, engine="host")
        assert pblas.gridinfo(again) == (2, 1, comm.rank, 0), "there is no grid after MPI calls"
        pblas.blacs_exit()


@on_ranks(2)
def test_illegal_arguments_of_one_process_in_local_copies(comm, ctx):
    """What one process gives wrongly does not make it wait for others, whose own copies are done."""
    ictxt = pblas.gridinit(ctx, "Row", 1, comm.size)
    desc = pblas.descinit(12, 12, 2, 2, 0, 0, ictxt, 12)
    a, b = np.ones((12, 12), order="F"), np.zeros((12, 12), order="F")
    for at, wrong, word in (
        (1, "x", "(m)"),
        (1, -1, "(m)"),
        (2, 99, "(ja)"),
        (3, None, "(a)"),
        (7, [1], "(b)"),
        (4, 11, "(ia)"),  # others have the same elements of A and B, this process cannot know that
        (10, [1, -5], "(descb)"),
    ):
        args = ["A", 4, 4, a, 1, 1, desc, b, 1, 1, desc]
        if comm.rank == 1:
            args[at] = wrong
            with pytest.raises(pb.ArgumentError, match=re.escape(word)):
                pblas.pdlacpy(*args)
        else:
            pblas.pdlacpy(*args)
        comm.barrier()
    pblas.gridexit(ictxt)


class Raises:
    """What raises an error of its own whatever it is asked, as a file's array does when the file is closed."""

    def _raise(self, *_):
        raise RuntimeError("closed")

    __getitem__ = __iter__ = __len__ = __eq__ = __hash__ = __index__ = __float__ = _raise


@on_ranks(2)
def test_illegal_arguments_of_one_process_leave_nobody_waiting(comm):
    """A process whose arguments hide what others do is not left waiting, nor are they: of scopes and contexts, too."""
    bad = comm.rank == 1
    array, y = np.arange(144.0).reshape(12, 12, order="F"), np.zeros((12, 12), order="F")
    with pb.Context(comm, engine="host") as first, pb.Context(comm, engine="host") as ctx:
        grids = [pblas.gridinit(each, "Row", 1, 2) for each in (first, ctx)]
        desc = pblas.descinit(12, 12, 2, 2, 0, 0, grids[1], 12)
        unknown, outside = desc.copy(), desc.copy()
        unknown[1], outside[1] = 77, -1
        for call, args in (
            (pblas.pdelset, (array, 1, 1, unknown, 1.0)),
            (pblas.pdlaset, ("A", 2, 2, 0.0, 0.0, array, 1, 1, unknown)),
            (pblas.pdlascl, ("G", 1.0, 2.0, 2, 2, array, 1, 1, unknown, None)),
            (pblas.pdelget, (" ", " ", None, array, 1, 1, unknown)),
            (pblas.pdlange, ("F", 2, 2, array, 1, 1, outside, None)),
        ):
            if bad:
                with pytest.raises(pblas.ParameterError, match=r"(77|-1) is not a context"):
                    call(*args)
            comm.barrier()
        wrong = pblas.ParameterError, ["(on rank 1)"]
        unlike = pb.RankMismatchError, ["p?elget: the processes of a process row ask for [(1, 1), (1, 4)]"]
        apart = pb.RankMismatchError, ["blacs_barrier on rank 0", "eye on rank 1"]
        for (kind, words), call, args in (
            (wrong, pblas.pdgeadd,
             ("N", 2, 2, 1.0, array, 1, 1, Raises() if bad else desc, 0.0, y, 1, 1, desc)),
            (wrong, pblas.pdpotrf, ("L", 2, array, 1, 1, Raises() if bad else desc)),
            (wrong, pblas.pdgemr2d,
             (2, 2, array, 1, 1, Raises() if bad else desc, y, 1, 1, desc, grids[1])),
            (wrong, pblas.pdgemr2d,
             (2, 2, array, 1, 1, desc, y, 1, 1, desc, Raises() if bad else grids[1])),
            (wrong, pblas.pdpotrf, (Raises() if bad else "L", 2, array, 1, 1, desc)),
            (wrong, pblas.pdelget, ("q" if bad else "A", " ", None, array, 1, 1, desc)),
            (wrong, pblas.pdlacpy, ("A", 3, 3, array, 13 * bad + 1, 1, desc, y, 1, 3, desc)),
            (wrong, pblas.pdlange, ("F", 2, 2, array, 1, 1, outside if bad else desc, None)),
            (wrong, pblas.pdgemr2d, (2, 2, array, 1, 1, desc, y, 1, 1, desc, -1 if bad else grids[1])),
            (wrong, pblas.pdgemr2d,
             (2, 2, array, 1, 1, desc, y, 1, 1, desc, grids[1] + 0.5 if bad else grids[1])),
            ((pb.ArgumentError, ["communicator", "(on rank 1)"]), pblas.gridinit,
             ("x" if bad else ctx, "Row", 1, 2)),
            (wrong, pblas.blacs_barrier, (grids[1], "q" if bad else "A")),
            (wrong, pblas.blacs_barrier, (77 if bad else grids[1], "A")),
            (unlike, pblas.pdelget, ("R", " ", None, array, 1, 4 if bad else 1, desc)),
            (apart, *((ctx.eye, ((2, 2),)) if bad else (pblas.blacs_barrier, (grids[1], "A")))),
        ):  # fmt: skip
            block = {"block": 1} if call == ctx.eye else {}
            refuses(ctx, kind, words, call, *args, **block)
        for scope in "AR":
            pblas.blacs_barrier(grids[1], scope)
        found = pblas.pdelget("R", " ", None, array, 2, 3, desc)
        assert found == 1, "afterwards"
        own = pblas.gridinit(comm, "Row", 1, 2, engine="host")
        refuses(ctx, *wrong, pblas.gridexit, 77 if bad else own)
        if bad:
            with pytest.raises(pblas.ParameterError, match="77 is not a context"):
                pblas.gridexit(77)
        comm.barrier()
        pblas.gridexit(own)
        # What a row exchanges is no agreement: a process that goes on breaks the context.
        error = ""
        try:
            pblas.pdelget("R", " ", None, array, 13 * bad + 1, 1, desc)
        except pblas.ParameterError:
            try:
                ctx.eye((2, 2), block=1)
            except pb.ClosedError as found:
                error = str(found)
        except pb.RankMismatchError as found:
            error = str(found)
        assert "rank 1 makes another call: it waits in eye" in error, "a row without one"
