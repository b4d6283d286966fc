# SPDX-License-Identifier: Apache-2.0
"""Epilogues on ranks: every kind, type, memory order and scheme against NumPy in float64; and what is refused."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.cases import check_array, check_matrix, grids, layout, numbers, pick, refuses, scattered
from tests.helpers.epilogues import (
    KINDS,
    TOLERANCES,
    check_epilogue,
    check_within,
    follow,
    matrix,
    part,
    part_of_d,
)
from tests.helpers.mpi import on_ranks, run_mpi
from tests.helpers.pairs import pairs
from tests.helpers.schemes import AG, AR, MAKERS, RS
from tests.helpers.slow import draws, only_long

ORDERS = tuple(map("".join, itertools.product("CF", repeat=3)))


def general(comm, part, parts):
    """2D block-cyclic layouts as random as they come."""
    rng = np.random.default_rng(71)
    cases = list(itertools.product(KINDS, TOLERANCES, ORDERS))[part % parts :: parts]
    with pb.Context(comm, engine="host") as ctx:
        for kind, dtype, orders in cases:
            grid = pick(rng, grids(ctx.size))
            op_a, op_b = pick(rng, "NT"), pick(rng, "NT")
            (m, n, k), (mb, nb, kb) = rng.integers(1, 40, 3).tolist(), rng.integers(1, 12, 3).tolist()
            out = "float32" if dtype in ("float16", "bfloat16") and rng.integers(2) else dtype

            def lies(rows, cols, block_rows, block_cols, op, order, kind, grid=grid):
                shape, block = ((rows, cols), (block_rows, block_cols))
                if op == "T":
                    shape, block = shape[::-1], block[::-1]
                return layout(rng, shape, ctx.size, grid=grid, block=block, dtype=kind, order=order)

            p = pb.MatmulProblem(
                lies(m, k, mb, kb, op_a, orders[0], dtype),
                lies(k, n, kb, nb, op_b, orders[1], dtype),
                lies(m, n, mb, nb, "N", orders[2], out),
                op_a,
                op_b,
            )
            beta = pick(rng, (0.0, 0.0, -0.5))
            algo = pick(rng, ("auto", "shared", "gathered", "panels"))
            check_epilogue(ctx, rng, p, kind, alpha=pick(rng, (1.0, 2.0)), beta=beta, algo=algo)


@on_ranks(1, *only_long(2), 4)
def test_every_epilogue_in_every_scheme(ctx):
    rng = np.random.default_rng(72)
    ops = {AG: ("TN", "NN", "NT", "TT"), RS: ("TN", "NN", "NT", "TT"), AR: ("TN",)}
    for scheme, kind, dtype, order in pairs(MAKERS, KINDS, TOLERANCES, "CF"):
        op_a, op_b = pick(rng, ops[scheme])
        if order == "C" and scheme == AR:
            op_a, op_b = "N", "T"
        m, n, k = (int(x) * ctx.size for x in rng.integers(1, 9, 3))
        p = MAKERS[scheme](m, n, k, ctx.size, op_a, op_b, dtype=dtype, order=order)
        check_epilogue(ctx, rng, p, kind)


@on_ranks(1, 3)
def test_epilogues_of_empty_products(ctx):
    """Nothing to multiply: the epilogue follows beta C, or zeros."""
    rng = np.random.default_rng(73)
    sizes = (5, 6, 0), (0, 6, 5), (5, 0, 3), (0, 0, 0), (1, 1, 1)
    for (m, n, k), kind, order in pairs(sizes, KINDS, "CF"):
        p = pb.MatmulProblem.gemm(m, n, k, pick(rng, grids(ctx.size)), 2, dtype="float32", order=order)
        check_epilogue(ctx, rng, p, kind)
    p = pb.MatmulProblem.gemm(5, 6, 4, pick(rng, grids(ctx.size)), 2)
    check_epilogue(ctx, rng, p, "gelu bias", alpha=0.0, beta=2.0)


@on_ranks(1, 4)
def test_complex_types(ctx):
    """What needs no activation follows complex products, too."""
    rng = np.random.default_rng(75)
    for dtype, order, (op_a, op_b) in itertools.product(
        ("complex64", "complex128"), "CF", ("NC", "CN", "TT")
    ):
        p = pb.MatmulProblem.gemm(
            13, 9, 7, pick(rng, grids(ctx.size)), (4, 3), op_a=op_a, op_b=op_b, dtype=dtype, order=order
        )
        x, y = (numbers(rng, each.shape, each.dtype) for each in (p.a, p.b))
        a, b = scattered(ctx, p.a, x), scattered(ctx, p.b, y)
        op = {"N": lambda v: v, "T": lambda v: v.T, "C": lambda v: v.conj().T}
        left, right = op[op_a](x), op[op_b](y)
        bias = numbers(rng, (p.n if order == "C" else p.m,), dtype)
        mine = part("bias", bias, p, ctx.rank).copy()
        d = pb.matmul(a, b, op_a=op_a, op_b=op_b, epilogue=pb.Epilogue(bias=mine))
        expected = left @ right + (bias if order == "C" else bias[:, None])
        check_array(d.allgather(), expected.astype(dtype), f"bias {dtype} {order} {op_a}{op_b}")
        for name, sums in (("bias_grad_a", left.sum(1)), ("bias_grad_b", right.sum(0))):
            expected = part(name, sums, p, ctx.rank)
            vector = np.full_like(expected, 99)
            pb.matmul(a, b, op_a=op_a, op_b=op_b, epilogue=pb.Epilogue(**{name: vector}))
            check_array(vector, expected, f"{name} {dtype} {order} {op_a}{op_b}")


@on_ranks(1, 4)
def test_what_a_forward_product_writes_the_backward_one_reads(ctx):
    """A mask and an argument that one product has written are what the next one reads; a plan sees new biases."""
    rng = np.random.default_rng(74)
    for activation, order in itertools.product(("relu", "gelu"), "CF"):
        p = pb.MatmulProblem.gemm(33, 18, 7, pb.Grid.squarest(ctx.size), (4, 3), order=order)
        (a, left), (b, right) = (matrix(ctx, rng.standard_normal(x.shape), x) for x in (p.a, p.b))
        length = p.n if order == "C" else p.m
        bias = np.zeros_like(part("bias", np.zeros(length), p, ctx.rank))
        aux = ctx.empty_aux(p.d, activation)
        forward = pb.Epilogue(activation, bias=bias, aux=aux)
        backward = pb.Epilogue("d" + activation, aux=aux)
        with (
            pb.plan(pb.matmul, a, b, epilogue=forward) as there,
            pb.plan(pb.matmul, a, b, epilogue=backward) as back,
        ):
            for _ in range(2):
                whole = rng.standard_normal(length)
                bias[...] = part("bias", whole, p, ctx.rank)
                ahead = follow(f"{activation} bias aux", left @ right, left, right, order, whole)
                after = follow(f"d{activation} aux", left @ right, left, right, order, None, ahead.aux)
                for name, run, wanted in (("D", there, ahead.d), ("gradient", back, after.d)):
                    case = f"{name}, {activation} {order}"
                    check_within(case, run().local, part_of_d(wanted, p, ctx.rank), 1e-12)


@on_ranks(1, 2)
def test_sums_of_moved_operands(ctx):
    """Operands that are not multiplied, for alpha is 0, are moved where they are summed."""
    p = pb.MatmulProblem.gemm(10, 12, 8, pb.Grid(1, ctx.size), 2)
    a, b = ctx.zeros(replace(p.a, block=(3, 1))), ctx.zeros(replace(p.b, block=(1, 3)))
    for name, x in (("bias_grad_a", a), ("bias_grad_b", b)):
        axis = 0 if x is a else 1
        sums = np.empty(p.d.local_shape(ctx.rank)[axis])
        epilogue = pb.Epilogue(**{name: sums})
        with pb.plan(pb.matmul, a, b, out=ctx.empty(p.d), alpha=0, epilogue=epilogue) as plan:
            for value in (1.0, 3.0):
                x.local[...] = value
                plan()
                assert (sums == value * p.k).all(), f"{name} {value}"


@on_ranks(1, 2)
def test_what_is_refused(ctx):
    p = pb.MatmulProblem.gemm(24, 40, 8, pb.Grid(1, ctx.size), 8, dtype="float32")
    a, b, out = ctx.zeros(p.a), ctx.zeros(p.b), ctx.empty(p.d)
    rows, cols = p.d.local_shape(ctx.rank)
    bias, mask = np.zeros(cols, np.float32), ctx.empty_aux(p.d, "relu")
    frozen = bias.copy()
    frozen.flags.writeable = False
    wide = np.zeros((rows, 2 * cols), np.float32)

    def refused(words, epilogue, kind=pb.ArgumentError):
        refuses(ctx, kind, words, pb.matmul, a, b, out=out, epilogue=epilogue)

    for words, epilogue in (
        (["epilogue: expected an Epilogue, got str"], "relu"),
        (["bias: shape is", "one value per column of D", "one per row: D in F order"],
         pb.Epilogue(bias=np.zeros(cols + 1, np.float32))),
        (["bias: dtype is float64, expected float32"], pb.Epilogue(bias=bias.astype(np.float64))),
        (["bias: stride is 8 bytes"], pb.Epilogue(bias=np.zeros((cols, 2), np.float32)[:, 0])),
        (["bias: shape is"], pb.Epilogue(bias=bias[None])),
        (["bias_grad_a: shape is", "expected (24,): one value per row"], pb.Epilogue(bias_grad_a=bias)),
        (["aux: shape is", "ctx.empty_aux(descriptor, 'relu') makes one"], pb.Epilogue("relu", aux=mask[:1])),
        (["aux: dtype is float32, expected uint8"], pb.Epilogue("relu", aux=mask.astype(np.float32))),
        (["aux: shape is"], pb.Epilogue("gelu", aux=mask)),
        (["aux: strides are"], pb.Epilogue("gelu", aux=wide[:, ::2])),
        (["bias_grad: is read-only"], pb.Epilogue("drelu", aux=mask, bias_grad=frozen)),
        (["local array: expected a NumPy array"], pb.Epilogue(bias=[1.0] * cols)),
    ):  # fmt: skip
        refused(words, epilogue)
    padded = pb.MatmulProblem.gemm(16, 8 * ctx.size, 8, pb.Grid(1, ctx.size), 8, dtype="float32")
    result = ctx.empty(padded.d)
    for name, epilogue in (
        ("aux: shares memory with d", pb.Epilogue("gelu", aux=result.local)),
        ("bias_grad_b: shares memory with d", pb.Epilogue(bias_grad_b=result.local[0])),
    ):
        x, y = ctx.zeros(padded.a), ctx.zeros(padded.b)
        refuses(ctx, pb.ArgumentError, [name], pb.matmul, x, y, out=result, epilogue=epilogue)
    z = ctx.zeros(pb.MatrixDescriptor((8, 8), (8, 8), pb.Grid(1, 1), dtype="complex64"))
    for activation, array in (("relu", "bias"), ("gelu", "aux")):
        there = pb.Epilogue(activation, **{array: np.zeros(8, np.complex64)})
        words = [f"epilogue: '{activation}' is only for real types, D is complex64"]
        refuses(ctx, pb.UnsupportedError, words, pb.matmul, z, z, epilogue=there)
    wide_a = ctx.zeros(pb.MatrixDescriptor((26, 8), (8, 8), pb.Grid(1, ctx.size), dtype="float32"))
    part_of_out = ctx.empty(pb.MatrixDescriptor((27, 40), (8, 8), pb.Grid(1, ctx.size), dtype="float32"))
    found = pb.matmul(wide_a, b, out=part_of_out[1:27, :], epilogue=pb.Epilogue("relu"))
    check_matrix(found, np.zeros((26, 40), "float32"), "inside a block")
    if ctx.size > 1:
        mixed = pb.Epilogue("relu", bias=bias) if ctx.rank else pb.Epilogue("gelu", bias=bias)
        refused(["activation: relu", "activation: gelu"], mixed, pb.RankMismatchError)
        mixed = pb.Epilogue("relu", bias=bias if ctx.rank else None)
        refused(["bias: None", "bias: an array"], mixed, pb.RankMismatchError)
    refuses(ctx, pb.ArgumentError, ["activation"], ctx.empty_aux, p.d, "tanh")
    nothing = pb.matmul(a, b, out=out, epilogue=pb.Epilogue())
    assert not nothing.local.any(), "nothing follows: D is not zero"


@pytest.mark.parametrize(("nranks", "parts"), [(1, 5), *only_long((2, 3)), (4, 11), *only_long((3, 7))])
def test_every_epilogue_on_general_layouts(nranks, parts):
    run_mpi(general, nranks, part=nranks, parts=draws(parts, long=1))
