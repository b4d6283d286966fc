# SPDX-License-Identifier: Apache-2.0
"""The 1D schemes on ranks: AllGather + GEMM, GEMM + ReduceScatter and GEMM + AllReduce, in every op and order."""

import itertools
from dataclasses import replace

import numpy as np

import pblasmp as pb
from pblasmp.layout.schemes import OPS as SCHEME_OPS
from tests.helpers.cases import (
    TYPES,
    check_array,
    check_matrix,
    exact,
    numbers,
    pick,
    product,
    refuses,
    scattered,
)
from tests.helpers.mpi import on_ranks
from tests.helpers.schemes import AG, AR, MAKERS, RS
from tests.helpers.slow import only_long

FLIPPED = {"N": "T", "T": "N", "C": "N"}


def problems(rng, size):
    """Every op and mix of orders that each scheme has, on all ranks and on fewer."""
    every_order = ["".join(orders) for orders in itertools.product("CF", repeat=3)]
    for scheme, orders in itertools.product(MAKERS, every_order):
        for column_major in SCHEME_OPS[scheme]:
            ranks = size if rng.integers(3) else int(rng.integers(1, size + 1))
            m, n, k = (ranks * int(x) for x in rng.integers(1, 5, 3))
            dtype = pick(rng, TYPES)
            # These are the ops of an F-ordered product; in C order it is the transposed one that has them.
            ops = column_major if orders[2] == "F" else column_major[::-1]
            p = MAKERS[scheme](m, n, k, ranks, *ops, dtype=dtype, order=orders[2])
            for name, order in zip("ab", orders, strict=False):
                if order != orders[2]:  # the same product, this operand given as its transpose
                    flipped = FLIPPED[getattr(p, f"op_{name}")]
                    p = replace(p, **{name: getattr(p, name).T, f"op_{name}": flipped})
            if dtype.startswith("complex"):
                conjugated = [op.replace("T", pick(rng, "TC")) for op in (p.op_a, p.op_b)]
                p = replace(p, op_a=conjugated[0], op_b=conjugated[1])
            yield f"{scheme} {p.op_a}{p.op_b} {orders} {dtype} {m}x{n}x{k} on {ranks}", p


def check_scheme(ctx, rng, p, algo, case, **how):
    """Fail unless a product of integers, its layout, and what it must leave alone are as NumPy has them."""
    x, y, z = (numbers(rng, d.shape, d.dtype) for d in (p.a, p.b, p.d))
    copies, alpha, beta = p.d.grid.size if p.scheme == AR else 1, how["alpha"], how["beta"]
    whole = product(x, y, alpha=alpha, op_a=p.op_a, op_b=p.op_b, dtype=exact(x).dtype)
    expected = np.tile(whole, (1, copies) if p.d.order == "F" else (copies, 1))
    expected = (expected + beta * exact(z) if beta else expected).astype(z.dtype)
    a, b, c = scattered(ctx, p.a, x), scattered(ctx, p.b, y), scattered(ctx, p.d, z) if beta else None
    outs = [scattered(ctx, p.d, np.full_like(z, np.nan)), *([c] if beta else [])]
    out = pick(rng, [*outs, None] if p.a.order == p.d.order else outs)  # a new D is in A's memory order
    result = pb.matmul(a, b, c, out=out, algo=algo, op_a=p.op_a, op_b=p.op_b, scheme=p.scheme, **how)
    assert result.descriptor == p.d, case
    check_matrix(result, expected, case)
    check_matrix(a, x, f"{case}: A")
    check_matrix(b, y, f"{case}: B")
    if c is not None and c is not out:
        check_matrix(c, z, f"{case}: C")
    if p.scheme == AR and ctx.rank < copies and not beta:
        check_array(
            result.local, whole.astype(z.dtype), f"{case}: this rank does not hold all of the product"
        )


@on_ranks(1, *only_long(2), 3, 4, *only_long(6))
def test_every_op_in_every_mix_of_orders(comm, ctx):
    """By one after the other of the algorithms that take it."""
    rng, taken = np.random.default_rng(55), set()
    for turn, (case, p) in enumerate(problems(rng, comm.size)):
        p.validate()
        how = {"alpha": pick(rng, (1, 2, -1, 0)), "beta": pick(rng, (0, 0, 1, 2))}
        found = pb.algorithms(replace(p, c=p.d if how["beta"] else None), ctx, **how)
        names = ["auto", *(name for name, verdict in found.items() if verdict)]
        kind = p.scheme, p.d.order
        algo = "push" if "push" in names and kind not in taken else names[turn % len(names)]
        taken |= {kind} if algo == "push" else set()
        check_scheme(ctx, rng, p, algo, f"{case} {how} {algo}", **how)
    assert comm.size >= 4 or taken == {*itertools.product(MAKERS, "CF")}  # by push


@on_ranks(3)
def test_a_c_that_is_not_read_changes_nothing_and_what_is_no_scheme(comm, ctx):
    """With beta = 0 a given C changes nothing: neither the algorithms nor the result."""
    p = pb.MatmulProblem.matmul_allreduce(
        8, 6, 4 * comm.size, comm.size, "N", "T", order="C", dtype="float64"
    )
    a, b = ctx.full(p.a, 1.0), ctx.full(p.b, 2.0)
    c = ctx.full(p.d, np.nan)
    with_c = replace(p, c=p.d)
    assert pb.algorithms(with_c, ctx) == pb.algorithms(p, ctx)
    how = {"op_b": "T", "scheme": AR}
    with pb.plan(pb.matmul, a, b, **how) as plan:
        expected = plan.report().algorithms
    with pb.plan(pb.matmul, a, b, c, **how) as plan:
        assert plan.report().algorithms == expected
        assert (plan(c=c).local == 8 * comm.size).all()
    for name, verdict in pb.algorithms(p, ctx).items():
        if verdict:
            assert (pb.matmul(a, b, c, algo=name, **how).local == 8 * comm.size).all()
    wrong = ctx.zeros(p.a)
    words = ["c: shape is"]
    refuses(ctx, pb.ArgumentError, words, pb.matmul, a, b, wrong, out=c, **how)
    words = ["algo 'push': C may differ from rank to rank"]
    refuses(ctx, pb.UnsupportedError, words, pb.matmul, a, b, c, beta=1, algo="push", **how)
    square = ctx.zeros(pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid(comm.size, 1), order="F"))
    for scheme, words in ((AG, "AllGather + GEMM"), (RS, "GEMM + ReduceScatter"), (AR, "GEMM + AllReduce"),
                          ("sr", "scheme: expected one of 'gemm', 'allgather_matmul'")):  # fmt: skip
        refuses(ctx, pb.ArgumentError, [words], pb.matmul, square, square, op_a="T", scheme=scheme)
    mine = AG if comm.rank else "gemm"
    refuses(ctx, (pb.ArgumentError, pb.RankMismatchError), ["rank"], pb.matmul, a, b, op_b="T", scheme=mine)
