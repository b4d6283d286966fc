# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/c_and_f_order.py
"""C-ordered, F-ordered and mixed local arrays: the same product, without copies to change the order.

Prints:
    A in C order, B in C order, D in C order: right
    A in F order, B in C order, D in C order: right
    A in C order, B in F order, D in F order: right
    A in F order, B in F order, D in F order: right
    A.T is the memory of A, in F order
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb


def f(i, j):
    return (2 * i + j) % 5 - 2.0


def g(i, j):
    return (i + 3 * j) % 5 - 2.0


m, n, k, block = 24, 20, 16, 4
with pb.Context() as ctx:
    grid = pb.Grid.squarest(ctx.size)

    def matrix(rows, cols, order):
        return pb.MatrixDescriptor((rows, cols), (block, block), grid, order=order)

    expected = np.fromfunction(f, (m, k)) @ np.fromfunction(g, (k, n))
    for order_a, order_b, order_d in ("CCC", "FCC", "CFF", "FFF"):
        a = ctx.from_function(f, matrix(m, k, order_a))
        b = ctx.from_function(g, matrix(k, n, order_b))
        d = pb.matmul(a, b, out=ctx.empty(matrix(m, n, order_d)))
        whole = d.gather()
        if ctx.rank == 0:
            assert np.array_equal(whole, expected)
            print(f"A in {order_a} order, B in {order_b} order, D in {order_d} order: right")

    a = ctx.from_function(f, matrix(m, k, "C"))
    t = a.T
    local = t.local
    local[...] += 1  # also changes A
    expected = np.fromfunction(f, (m, k)) + 1
    whole, transposed = a.gather(), t.gather()
    if ctx.rank == 0:
        assert np.array_equal(whole, expected)
        assert np.array_equal(transposed, expected.T)
        print(f"A.T is the memory of A, in {t.descriptor.order} order")
