# SPDX-License-Identifier: Apache-2.0
"""The local LAPACK: reflectors of matrices of every shape, and what they are applied to."""

import numpy as np
import pytest

from pblasmp.engines.host import blas


def padded(array):
    """Return a copy in F order whose columns are further apart than they are long."""
    memory = np.full((array.shape[0] + 3, array.shape[1]), 99, array.dtype, order="F")
    memory[1:-2] = array
    return memory[1:-2]


@pytest.mark.parametrize("kind", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize(
    ("rows", "cols", "width"), [(9, 5, 5), (9, 5, 2), (7, 7, 3), (4, 11, 3), (4, 11, 8), (3, 1, 1), (6, 5, 4)]
)
def test_reflectors(kind, rows, cols, width):
    rng = np.random.default_rng(3)

    def numbers(shape):
        values = rng.standard_normal((2, *shape))
        return (values[0] + 1j * values[1] if kind.startswith("c") else values[0]).astype(kind)

    a, x, least = numbers((rows, cols)), numbers((rows, 3)), min(rows, cols)
    found, applied = padded(a), padded(x)
    t, work = np.full((width, least), np.nan, kind, order="F"), np.empty(3 * width, kind)
    blas.geqrt("scipy", found, t)
    unit = np.tril(found[:, :least], -1) + np.eye(rows, least, dtype=kind)
    q = np.eye(rows, dtype=kind)
    for i in range(least):  # the factors are the diagonals of the Ts
        q = q @ (np.eye(rows) - t[i % width, i] * np.outer(unit[:, i], unit[:, i].conj()))
    few = 100 * np.finfo(kind).eps
    np.testing.assert_allclose(q @ np.triu(found), a, atol=few)
    for adjoint, expected in ((True, q.conj().T @ x), (False, x)):
        blas.gemqrt("scipy", found[:, :least], t, applied, work, adjoint=adjoint)
        np.testing.assert_allclose(applied, expected, atol=few)
    assert (applied.base[[0, -2, -1]] == 99).all()
    assert (found.base[[0, -2, -1]] == 99).all()
