# SPDX-License-Identifier: Apache-2.0
"""Any product of C- and F-ordered matrices as one product of F-ordered ones: proved on the memory itself.

The operands are written into the flat memory of every rank as the caller's descriptors say, read back as
the column-major form's say, multiplied as its ops say, and D is read as the caller's descriptor says.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from pblasmp.layout import Grid, MatmulProblem, MatrixDescriptor
from tests.helpers.oracle import empty, read, views, write
from tests.helpers.pairs import pairs

PRODUCTS = list(itertools.product("NTC", repeat=2))
ORDERS = ["".join(letters) for letters in itertools.product("CF", "CF", "CF", "-CF")]  # of A, B, D, C
M, N, K = 7, 5, 6
LAYOUTS = {
    "one rank": (Grid(1, 1), (20, 20, 20), (0, 0)),
    "2x3, ragged blocks": (Grid(2, 3, "row"), (2, 3, 4), (1, 2)),
    "3x2, columns first": (Grid(3, 2, "col"), (3, 1, 2), (2, 0)),
}


def apply(op, matrix):
    return {"N": matrix, "T": matrix.T, "C": matrix.conj().T}[op]


def values(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-9, 10, shape).astype(dtype)
    return (
        numbers + 1j * rng.integers(-9, 10, shape).astype(dtype) if np.dtype(dtype).kind == "c" else numbers
    )


def problem(layout, op_a, op_b, orders, dtype, ld=None):
    grid, (mb, nb, kb), source = LAYOUTS[layout]

    def matrix(rows, cols, rb, cb, op, order):
        shape, block = ((rows, cols), (rb, cb)) if op == "N" else ((cols, rows), (cb, rb))
        return MatrixDescriptor(shape, block, grid, source, dtype, order, (0, 0), ld)

    a = matrix(M, K, mb, kb, op_a, orders[0])
    b = matrix(K, N, kb, nb, op_b, orders[1])
    d = matrix(M, N, mb, nb, "N", orders[2])
    c = None if orders[3] == "-" else replace(d, order=orders[3], ld=None)
    return MatmulProblem(a, b, d, op_a, op_b, c)


def multiply(p, a, b, c):
    """Return the D that the column-major form of ``p`` computes from the memory of ``p``'s operands."""
    form = p.column_major()
    assert {x.order for x in (form.a, form.b, form.d)} == {"F"}
    memory = {"a": write(empty(p.a), p.a, a), "b": write(empty(p.b), p.b, b), "d": empty(p.d)}
    left, right = ("b", "a") if form.swapped else ("a", "b")
    first, second = read(memory[left], form.a), read(memory[right], form.b)
    if form.conj_a:
        first = first.conj()
    if form.conj_b:
        second = second.conj()
    product = 2 * apply(form.op_a, first) @ apply(form.op_b, second)
    if p.c is None:
        assert form.c is None
        assert not form.copy_c
    else:
        of_c = write(empty(p.c), p.c, c)
        if form.copy_c:  # rank by rank, into memory laid out like D's
            copied = empty(p.d)
            for to, of in zip(views(copied, p.d), views(of_c, p.c), strict=True):
                to[...] = of
            of_c = copied
        assert form.c.order == "F"
        product += 3 * read(of_c, form.c)
    write(memory["d"], form.d, product)
    return read(memory["d"], p.d)


MIXES = [*pairs(LAYOUTS, PRODUCTS, ["float64", "complex128"])]


@pytest.mark.parametrize(("layout", "ops", "dtype"), MIXES)
def test_every_mix_of_orders(layout, ops, dtype):
    op_a, op_b = ops
    a = values((M, K) if op_a == "N" else (K, M), dtype, 1)
    b = values((K, N) if op_b == "N" else (N, K), dtype, 2)
    c = values((M, N), dtype, 3)
    for orders in ORDERS:
        expected = 2 * apply(op_a, a) @ apply(op_b, b) + (0 if orders[3] == "-" else 3 * c)
        for ld in (None, 25):
            p = problem(layout, op_a, op_b, orders, dtype, ld)
            assert np.array_equal(multiply(p, a, b, c), expected), (orders, ld)
