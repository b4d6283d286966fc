# SPDX-License-Identifier: Apache-2.0
"""The four tensor-parallel products on ranks, against NumPy on whole matrices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import DTYPES
from tests.helpers.mpi import run_mpi
from tests.mpi.cases import TYPES, agreed_error, exact, first, numbers, pick, unlike

SIZES = (1, 2, 3, 4)
FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")
SPLITS = {  # what is split over the ranks: x, w and the result, as (tokens, outputs, inputs)
    "allgather_matmul": ("t", "n", "n"),
    "matmul_reduce_scatter": ("k", "k", "t"),
    "matmul_allreduce": ("k", "k", ""),
    "matmul_allgather": ("", "n", ""),
}


def shard(n, comm):
    return pb.tensor_parallel.shard(n, comm.size, comm.rank)


def other_split(n, comm):
    """Not by the rule: the first rank has most."""
    starts = [0, *(n - (comm.size - r) // 2 for r in range(1, comm.size)), n]
    return slice(max(0, starts[comm.rank]), max(0, starts[comm.rank + 1]))


class Case:
    """One product: whole matrices on every rank, and this rank's parts of them."""

    def __init__(
        self, rng, comm, form, dtype, t, n, k, *, lead=(), split=shard, out_dtype=None, transposed=False
    ):
        """X is (t, *lead, k) and W (n, k); integers that are exact in every type."""
        self.form, self.dtype = form, np.dtype(DTYPES[dtype])
        self.out_dtype = np.dtype(DTYPES[out_dtype or dtype])
        self.transposed = transposed
        self.x, self.w = numbers(rng, (t, *lead, k), self.dtype), numbers(rng, (n, k), self.dtype)
        self.c = numbers(rng, (t, *lead, n), self.out_dtype)
        self.bias = numbers(rng, (n,), self.out_dtype)
        cut = {"t": (0, split(t, comm)), "n": (0, split(n, comm)), "k": (-1, split(k, comm))}
        out = {"t": (0, shard(t, comm)), "n": (-1, split(n, comm)), "": (0, slice(None))}
        everything = (0, slice(None))
        of_x, of_w, of_y = SPLITS[form]
        self._out = out[of_y]
        self.local_x = self._part(self.x, cut.get(of_x, everything))
        self.local_w = self._part(self.w, cut.get(of_w, everything))
        if transposed:
            self.local_w = np.ascontiguousarray(self.local_w.T)
        self.local_c = self.of(self.c)
        self.local_bias = self._part(self.bias, cut["n"]) if of_w == "n" else self.bias

    @staticmethod
    def _part(whole, cut):
        axis, where = cut
        return np.ascontiguousarray(whole[where] if axis == 0 else whole[..., where])

    def of(self, whole):
        """This rank's part of what is like the result."""
        return self._part(whole, self._out)

    def expected(self, alpha=1, beta=0, *, bias=False):
        y = alpha * (exact(self.x) @ exact(self.w).T)
        y = y + beta * exact(self.c) if beta else y
        y = y + exact(self.bias) if bias else y
        return self.of(y.astype(self.out_dtype))

    def __call__(self, ctx, **how):
        if self.out_dtype != self.dtype:
            how.setdefault("dtype", self.out_dtype.name)
        return getattr(pb, self.form)(self.local_x, self.local_w, ctx, transposed=self.transposed, **how)


def sizes(comm):
    p = comm.size
    yield 4 * p, 6 * p, 5 * p  # even
    yield 3 * p + 1, 2 * p + 1, 4 * p + 1  # uneven
    yield p + 1, p + 1, p + 1  # empty last shards from 4 ranks on
    yield 1, 1, 1
    yield 0, 3, 2
    yield 3, 0, 2
    yield 3, 2, 0
    yield 5, 600 * p + 1, 3  # several panels


def every_product(comm):
    rng = np.random.default_rng(61)
    with pb.Context(comm, engine="host") as ctx:
        for form, dtype, transposed in itertools.product(FORMS, TYPES, (False, True)):
            for t, n, k in sizes(comm):
                case = Case(rng, comm, form, dtype, t, n, k, transposed=transposed)
                alpha, beta = pick(rng, (1, 2, -1, 0)), pick(rng, (0, 1, 2))
                how = {"alpha": alpha, "beta": beta}
                if beta:
                    how["c"] = case.local_c.copy()
                given = pick(rng, ("new", "out", "c"))
                if given == "out":
                    how["out"] = np.full_like(case.local_c, 99)
                elif given == "c" and beta:
                    how["out"] = how["c"]
                y = case(ctx, **how)
                wrong = unlike(y, case.expected(alpha, beta))
                if "out" in how and y is not how["out"]:
                    wrong = "out is not what is returned"
                if beta and how["c"] is not how.get("out") and wrong is None:
                    wrong = unlike(how["c"], case.local_c)
                yield f"{form} {dtype} {transposed=} {t}x{n}x{k} {alpha=} {beta=} {given}", wrong


def layouts(comm):
    """Leading dimensions, other splits, other memory, other types, all of X gathered."""
    rng = np.random.default_rng(62)
    p = comm.size
    with pb.Context(comm, engine="host") as ctx:
        for form in FORMS:
            case = Case(rng, comm, form, "float32", 2 * p + 1, 5 * p + 2, 3 * p + 1, lead=(2, 3))
            yield f"{form}: leading dimensions", unlike(case(ctx), case.expected())
            if form in ("matmul_allreduce", "matmul_allgather"):
                case = Case(rng, comm, form, "float32", 1, 7, 2 * p)
                case.local_x, wanted = case.local_x[0], case.expected()[0]
                yield f"{form}: one token without a dimension", unlike(case(ctx), wanted)
            case = Case(rng, comm, form, "float64", 4 * p + 2, 3 * p, 5 * p + 1, split=other_split)
            yield f"{form}: another split", unlike(case(ctx), case.expected())
            for dtype in ("float16", "bfloat16"):
                case = Case(rng, comm, form, dtype, 2 * p, 3 * p, 4 * p, out_dtype="float32")
                yield f"{form}: {dtype} to float32", unlike(case(ctx), case.expected())
                out = np.full(case.local_c.shape, 9, np.float32)
                yield (
                    f"{form}: {dtype} to float32 by out",
                    unlike(case(ctx, dtype=None, out=out), case.expected()),
                )
            case = Case(rng, comm, form, "float32", 2 * p, 3 * p + 1, 4 * p)
            wide = np.zeros((case.local_x.shape[0], case.local_x.shape[1] + 3), np.float32)
            wide[:, 1:-2] = case.local_x
            case.local_x = wide[:, 1:-2]
            case.local_w = np.asfortranarray(case.local_w)
            room = np.zeros((case.local_c.shape[0], case.local_c.shape[1] + 2), np.float32)
            y = case(ctx, out=room[:, :-2])
            wrong = first(unlike(y, case.expected()), None if not room[:, -2:].any() else "wrote beside out")
            yield f"{form}: padded rows, Fortran-ordered weights", wrong
            for dtype in ("float32", "bfloat16"):
                case = Case(rng, comm, form, dtype, 2 * p + 1, 3 * p + 1, 4 * p)
                y = case(ctx, bias=case.local_bias)
                yield f"{form}: bias, {dtype}", unlike(y, case.expected(bias=True))
                y = case(ctx, bias=case.local_bias, activation="relu")
                yield f"{form}: bias and relu, {dtype}", unlike(y, np.maximum(case.expected(bias=True), 0))
        for t in (3 * p, 3 * p + 1):
            case = Case(rng, comm, "allgather_matmul", "float32", t, 3 * p, 5, lead=(2,))
            y, gathered = case(ctx, return_gathered=True)
            yield f"gathered, {t}", first(unlike(y, case.expected()), unlike(gathered, case.x))


def misuse(comm):
    rng = np.random.default_rng(63)
    p = comm.size
    with pb.Context(comm, engine="host") as ctx:
        case = Case(rng, comm, "allgather_matmul", "float32", 2 * p, 3 * p, 4)
        x, w = case.local_x, case.local_w
        last = comm.rank == p - 1

        def unless_last(value, otherwise):
            return otherwise if last else value

        frozen = np.zeros((2 * p, 3), np.float32)
        frozen.flags.writeable = False
        for name, words, args, how in (
            ("inputs differ", ["x: the last dimension is 3, expected w's 4 inputs", f"rank {p - 1}" if p > 1 else ""],
             (unless_last(x, x[:, :3].copy()), w), {}),
            ("a list", ["x: local array: expected a NumPy array", "list"], (unless_last(x, [1.0]), w), {}),
            ("1D", ["x: shape is (4,), expected (tokens, ..., inputs)"], (x[0], w), {}),
            ("3D weights", ["w: shape is", "expected 2 dimensions"], (x, w[None]), {}),
            ("types", ["x: dtype is float64, expected float32 like w"], (x.astype("f8"), w), {}),
            ("type of the result", ["dtype: float64, expected float32"], (x, w), {"dtype": "float64"}),
            ("Fortran order", ["x: shape", "expected C order"], (np.asfortranarray(x), w), {}),
            ("no c", ["c: beta is 2"], (x, w), {"beta": 2}),
            ("shape of c", ["c: shape is (1, 3), expected"], (x, w), {"beta": 2, "c": x[:1, :3].copy()}),
            ("shape of out", ["out: shape is (1, 3), expected"], (x, w), {"out": x[:1, :3].copy()}),
            ("read-only out", ["out: is read-only"], (x, w), {"out": frozen}),
            ("bias", ["bias: shape (5,)", "expected contiguous (3,)"], (x, w), {"bias": np.zeros(5, np.float32)}),
            ("activation", ["activation: expected None, 'relu' or 'gelu', got 'tanh'"], (x, w), {"activation": "tanh"}),
            ("alpha", ["alpha:", "complex"], (x, w), {"alpha": 1j}),
        ):  # fmt: skip
            yield name, agreed_error(ctx, pb.LayoutError, words, pb.allgather_matmul, *args, ctx, **how)
        room = np.zeros(8 * p * p, np.float32)
        x2, out = room[: 4 * p].reshape(p, 4), room[p : p + 3 * p * p].reshape(p, 3 * p)
        words = ["out: shares memory with x"]
        yield "overlap", agreed_error(ctx, pb.LayoutError, words, pb.matmul_allgather, x2, w, ctx, out=out)
        words = ["out: shares memory with c"]
        how = {"out": out, "c": room[p + 1 : p + 1 + 3 * p * p].reshape(p, 3 * p), "beta": 1}
        yield (
            "c",
            agreed_error(ctx, pb.LayoutError, words, pb.matmul_allgather, x[:1].repeat(p, 0), w, ctx, **how),
        )
        if p > 1:
            for name, words, args, how in (
                ("alpha by rank", ["options", "gave different arguments"], (x, w), {"alpha": comm.rank}),
                ("weights by rank", ["inputs"], (unless_last(x, x[:, :3].copy()), unless_last(w, w[:, :3].copy())), {}),
                ("bias on one rank", ["bias"], (x, w), {"bias": unless_last(None, np.zeros(3, np.float32))}),
                ("memory of w by rank", ["w's outputs come first"], (x, unless_last(w, np.asfortranarray(w))), {}),
            ):  # fmt: skip
                yield (
                    name,
                    agreed_error(ctx, pb.RankMismatchError, words, pb.allgather_matmul, *args, ctx, **how),
                )
        yield "and it still works", unlike(case(ctx), case.expected())
    try:
        case(ctx)
    except pb.ClosedError:
        wrong = None
    else:
        wrong = "no ClosedError"
    yield "closed", wrong


@pytest.mark.parametrize("nranks", SIZES)
def test_every_type_and_size(nranks):
    run_mpi(every_product, nranks, timeout=120)


@pytest.mark.parametrize("nranks", SIZES)
def test_layouts(nranks):
    run_mpi(layouts, nranks)


@pytest.mark.parametrize("nranks", [1, 3])
def test_misuse(nranks):
    run_mpi(misuse, nranks)
