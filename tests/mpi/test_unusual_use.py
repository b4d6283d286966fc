# SPDX-License-Identifier: Apache-2.0
"""Unusual arguments, and what programs do to matrices and in the midst of calls: no rank crashes or waits for ever."""

import copy
import pickle
import sys
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from tests.helpers.mpi import on_ranks, run_mpi


@on_ranks(1, 2)
def test_copies_by_the_module_copy_compute_with_their_own_values(comm):
    with pb.Context(engine="host") as ctx:
        rng = np.random.default_rng(0)
        values = [rng.integers(-4, 5, (8, 8)).astype(float) for _ in range(2)]
        a, b = (ctx.scatter(each, block=(2, 2), order="F") for each in values)
        for function in (copy.copy, copy.deepcopy):
            pb.matmul(a, b)
            found, turned = function((a, a.T))[0], function(a.T)
            deep = function is copy.deepcopy
            if deep:  # other memory
                found.local[...] *= 2
                turned.local[...] *= 3
            assert np.array_equal(pb.matmul(found, b).allgather(), (1 + deep) * values[0] @ values[1])
            assert np.array_equal(pb.matmul(turned, b).allgather(), (1 + 2 * deep) * values[0].T @ values[1])
            assert np.array_equal(pb.matmul(a, b).allgather(), values[0] @ values[1])
        both = copy.deepcopy([a, a.T])
        both[0].local[...] = 1
        assert np.array_equal(both[1].allgather(), np.ones((8, 8)))


@on_ranks(1, 2)
def test_numpy_does_not_resize_local_arrays(comm):
    with pb.Context(engine="host") as ctx:
        like = ctx.scatter(np.eye(6), block=(2, 2))
        mine = np.ones(like.local.shape)
        a = ctx.from_local(mine, like.descriptor)
        for matrix in (a, copy.deepcopy(like)):
            for _ in range(2):
                with pytest.raises(ValueError, match="cannot resize"):
                    matrix.local.resize((0, 0), refcheck=False)
                assert matrix.local.shape == like.local.shape
                pb.matmul(matrix, matrix)
        del a, matrix
        mine.resize((2, 2), refcheck=False)


def midst(comm):
    """One rank makes a call at the first line of the function that runs the other."""
    ctx = pb.Context(engine="host")
    a = ctx.scatter(np.eye(4), block=(2, 2))
    pb.matmul(a, a)

    def call(*_):
        sys.settrace(None)
        pb.matmul(a, a)

    if comm.rank == 1:
        sys.settrace(lambda frame, *_: call if frame.f_code.co_name == "_status" else None)
    try:
        with pytest.raises(pb.ClosedError) as raised:
            pb.matmul(a, a)
    finally:
        sys.settrace(None)
    ctx.close()
    return str(raised.value)


def test_with_several_ranks_a_call_in_the_midst_of_another_is_an_error():
    first, second = run_mpi(midst, 2)
    assert second.startswith("matmul was called in the midst of matmul, as a signal's handler")
    assert "rank 1 left matmul with ClosedError: matmul was called in the midst of matmul" in first


@on_ranks(1, 2)
def test_local_arrays_of_derived_classes(comm, directory):
    """np.matrix has other products; np.memmap is as fast as an array."""
    with pb.Context(engine="host") as ctx:
        x = ctx.random((8, 8), block=(2, 2), seed=1)
        memory = np.memmap(f"{directory}/{ctx.rank}", float, "w+", shape=x.local.shape)
        memory[...] = x.local
        for mine in (x.local.view(np.matrix), memory):
            a = ctx.from_local(mine, x.descriptor)
            assert type(a.local) is np.ndarray
            assert np.shares_memory(a.local, mine)
            for call in (
                lambda a: pb.blas.dot(a[:, :1], a[:, 1:2]),
                pb.linalg.norm,
                lambda a: (a @ a).allgather(),
            ):
                assert np.array_equal(call(a), call(x))
        ictxt = pblas.gridinit(ctx, "Row", 1, ctx.size)
        desc = pblas.descinit(5, 5, 5, 5, 0, 0, ictxt, 5)
        values = np.asfortranarray(np.arange(25.0).reshape(5, 5))
        for mine in (values, values.view(np.matrix)):
            found = pblas.pddot(5, None, mine, 1, 2, desc, 1, mine, 1, 3, desc, 1)
            assert found == (ctx.rank == 0) * values[:, 1] @ values[:, 2]


class Hashless(str):
    def __hash__(self):
        raise RuntimeError("the user's hash")


class Unequal(str):
    __hash__ = str.__hash__

    def __eq__(self, other):
        raise RuntimeError("the user's ==")

    __ne__ = __eq__


class Number(float):
    __hash__ = float.__hash__

    def __lt__(self, other):
        raise RuntimeError("the user's <")

    __eq__ = __ne__ = __le__ = __gt__ = __ge__ = __lt__


class Integer(int):
    __hash__ = int.__hash__

    def __eq__(self, other):
        raise RuntimeError("the user's ==")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__


TEXTS = {
    "op_a": lambda a, x: pb.matmul(a, a, op_a=x("T")),
    "algo": lambda a, x: pb.matmul(a, a, algo=x("auto")),
    "planned": lambda a, x: pb.plan(pb.matmul, a, a, algo=x("auto")).close(),
    "uplo": lambda a, x: pb.blas.trsm(a, a, uplo=x("L")),
    "trans": lambda a, x: pb.linalg.lu_solve(pb.linalg.lu_factor(a), a, trans=x("T")),
    "assume_a": lambda a, x: pb.linalg.solve(a, a, assume_a=x("pos")),
    "refine": lambda a, x: pb.linalg.solve(a, a, refine=x("float32")),
    "uplo of eigh": lambda a, x: pb.linalg.eigh(a, uplo=x("L")),
    "algo of cholesky": lambda a, x: pb.linalg.cholesky(a, algo=x("auto")),
    "order": lambda a, x: a.context.zeros((4, 4), order=x("F")),
    "dtype": lambda a, x: a.astype(x("float32")),
}
NUMBERS = {
    "rcond": lambda a, x: pb.linalg.lstsq(a, a, rcond=x(Number, 0.0)),
    "trans": lambda a, x: pb.linalg.lu_solve(pb.linalg.lu_factor(a), a, trans=x(Integer, 1)),
    "axis": lambda a, x: a.sum(axis=x(Integer, 1)),
}


@on_ranks(2)
def test_options_of_derived_classes_whose_methods_fail_on_one_rank(comm):
    """On the last rank options are of classes of the user's."""
    outcomes, last = [], comm.rank == comm.size - 1
    with pb.Context(engine="host") as ctx:
        a = ctx.scatter(np.eye(6), block=(2, 2))
        calls = [
            (name, call, partial(lambda kind, x: kind(x) if last else x, kind))
            for kind in (Hashless, Unequal)
            for name, call in TEXTS.items()
        ]
        calls += [(name, call, lambda kind, x: kind(x) if last else x) for name, call in NUMBERS.items()]
        for name, call, given in calls:
            try:
                call(a, given)
            except Exception as error:  # noqa: BLE001 - agreed or not
                name += f": {error!r}"
            outcomes.append(name)
            assert np.array_equal((a @ a).allgather(), np.eye(6))  # the context goes on
    assert outcomes == [*TEXTS, *TEXTS, *NUMBERS]


@on_ranks(2)
def test_long_texts_are_cut_in_errors(comm):
    text = "x" * 100_000
    with pb.Context(engine="host") as ctx:
        a = ctx.scatter(np.eye(6), block=(2, 2))
        for call in (
            lambda: pb.matmul(a, a, algo=text),
            lambda: pb.matmul(a, a, op_a=text),
            lambda: pb.linalg.cholesky(a, algo=text),
            lambda: a.astype(text),
            lambda: pb.matmul(a, a, algo=text[ctx.rank :]),
        ):
            with pytest.raises(pb.PblasmpError) as raised:
                call()
            assert len(str(raised.value)) < 5000


def test_plans_are_not_copied():
    with pb.Context(engine="host") as ctx:
        a = ctx.scatter(np.eye(4))
        with pb.plan(pb.matmul, a, a) as plan:
            for function in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(pb.ArgumentError, match="a Plan cannot be copied or pickled"):
                    function(plan)


class Unnamed:
    """Asked for any attribute it fails, also for its name."""

    def __getattr__(self, name):
        raise RuntimeError(f"the user's {name}")


@on_ranks(2)
def test_attributes_that_fail_on_one_rank(comm):
    """The last rank alone gives ``verify`` a function whose name cannot be read, and ``+`` such an operand."""
    last = comm.size - 1
    with pb.Context(engine="host") as ctx:
        a = ctx.scatter(np.eye(4), block=2)
        given = Unnamed() if comm.rank == last else pb.linalg.inv
        with pytest.raises(RuntimeError, match=f"the user's __name__.*on rank {last}"):
            pb.verify(given, a, found=a)
        with pytest.raises(RuntimeError, match=f"the user's ndim.*on rank {last}"):
            a + (given if comm.rank == last else 1)
        assert pb.verify(pb.linalg.inv, a, found=a)


def test_tolerances_of_any_class_of_numbers():
    with pb.Context(engine="host") as ctx:
        a = ctx.scatter(np.eye(4))
        for kind in (Decimal, Fraction, np.float32):
            assert pb.allclose(a, a + 0.25, rtol=kind(0), atol=kind(0.5))
            assert not pb.allclose(a, a + 1, rtol=kind(0), atol=kind(0.5))
            with pytest.raises(pb.ArgumentError, match="rtol: expected at least 0"):
                pb.allclose(a, a, rtol=kind(-1))
