# SPDX-License-Identifier: Apache-2.0
"""Triangles of local results: what is multiplied for them (slab_terms.py)."""

from types import SimpleNamespace

import numpy as np
import pytest

from pblasmp.engines.host.host_operations import HostOperations
from pblasmp.engines.local import slab_terms
from pblasmp.engines.local.slab_terms import Gemm, LeftPart, ResultPart
from pblasmp.layout import Trapezoid
from pblasmp.layout.pieces import LocalPart
from tests.helpers.slow import only_long


class Counting:
    """Operations that add up what they multiply, and count the tiles that they cut."""

    def __init__(self, tile, batches=False):
        self.tile, self.whole, self.cut, self.elements = tile, 0, 0, 0
        self.batches, self.calls = batches, 0
        self.forked, self.uploads = False, 0
        self.xp = SimpleNamespace(empty=np.empty, asarray=self.upload, where=np.where)
        self.band, self.coarser, self.tasks = 3, 1, 0

    def upload(self, array):
        assert not self.forked, "another stream may read it before it is there"
        self.uploads += 1
        return np.asarray(array)

    def multiply_part(self, *_about):
        return False

    def gemm(self, alpha, a, b, beta, d, compute=None, c=None):
        d[...] = alpha * (a @ b) + (beta * d if beta else 0)
        self.whole += 1
        self.elements += d.size

    def gemms(self, alpha, parts, beta, compute=None):
        sizes = {(a.shape, b.shape, d.shape) for a, b, d, _ in parts}
        assert len(sizes) == 1
        self.calls += 1
        for a, b, d, c in parts:
            self.gemm(alpha, a, b, beta, d, compute, c)

    def add(self, d, alpha, x, beta, c, part, *, conjugate):
        rows, cols = part.indices(self.xp)
        assert np.array_equal(cols - rows <= 0 if part.part.uplo == "L" else cols - rows >= 0, part.mask)
        np.copyto(d, alpha * x + (beta * c if beta else 0), where=part.mask)
        self.cut += 1

    def concurrently(self, tasks, *, follows=False, work=()):
        assert list(work) == sorted(work, reverse=True)
        assert len(work) == len(tasks)
        self.tasks = len(tasks)
        self.forked = True
        for task in tasks:
            task()
        self.forked = False


@pytest.mark.parametrize("uplo", "LU")
@pytest.mark.parametrize(
    ("n", "tile", "batches"),
    [
        (100, 8, False),
        (100, 1, False),
        (1000, 8, False),
        *only_long((3000, 8, False)),
        (100, 8, True),
        (512, 32, True),
    ],
)
def test_a_long_diagonal_is_covered_by_a_few_tiles(uplo, n, tile, batches):
    operations, k = Counting(tile, batches), 2
    rng = np.random.default_rng(3)
    left, right = rng.integers(-3, 4, (n, k)).astype(float), rng.integers(-3, 4, (k, n)).astype(float)
    target = np.full((n, n), np.nan, order="F")
    part = ResultPart(Trapezoid(uplo), np.arange(n), np.arange(n), hermitian=False)
    part(operations, Gemm(1, left, right, 0, target))
    inside = np.tril(np.ones((n, n))) if uplo == "L" else np.triu(np.ones((n, n)))
    assert np.array_equal(np.where(inside, target, 0), np.where(inside, left @ right, 0))
    assert np.isnan(target[inside == 0]).all()
    assert operations.uploads == 2  # indices of all rows and columns
    assert operations.cut <= 2 * slab_terms.TILES
    assert operations.whole <= 4 * slab_terms.TILES
    assert operations.elements < inside.sum() * (1 + 2 / min(n // tile, slab_terms.TILES))
    assert (operations.calls == operations.whole) == (not batches)
    if n == 512:  # squares of 256, 128, 64 and 32, and those on the diagonal
        assert operations.calls == 5


def test_tiles_of_a_diagonal_that_are_multiplied_at_once_take_little_memory(monkeypatch):
    monkeypatch.setattr(slab_terms, "_TEMPORARY", 4 * 8 * 8 * 8)  # of 16 on this diagonal, four at a time
    operations, left, right = Counting(8, batches=True), np.ones((128, 2)), np.ones((2, 128))
    taken = []
    operations.xp.empty = lambda shape, dtype: taken.append(shape) or np.empty(shape, dtype)
    target = np.zeros((128, 128), order="F")
    ResultPart(Trapezoid("L"), np.arange(128), np.arange(128), hermitian=False)(
        operations, Gemm(1, left, right, 0, target)
    )
    assert np.array_equal(target, 2 * np.tri(128))
    assert taken == [(4, 8, 8)] * 4


@pytest.mark.parametrize("uplo", "LU")
def test_the_largest_bands_of_a_triangular_product_are_begun_first(uplo):
    operations, n = Counting(1), 20
    rng = np.random.default_rng(3)
    left, right = (rng.integers(-3, 4, shape).astype(float) for shape in ((n, n), (n, 2)))
    target = np.full((n, 2), np.nan)
    LeftPart(Trapezoid(uplo), np.arange(n))(operations, Gemm(1, left, right, 0, target))
    assert np.array_equal(target, (np.tril(left) if uplo == "L" else np.triu(left)) @ right)
    assert operations.tasks == 7  # ``concurrently`` asserts their order


@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, -1)])
@pytest.mark.parametrize("diagonal", [-1, 0])
def test_what_is_outside_is_not_added(diagonal, alpha, beta, hermitian):
    """It may be memory that nobody has written, where a signaling NaN makes NumPy warn."""
    part = LocalPart(Trapezoid("L", diagonal), np.arange(5), np.arange(5), hermitian=hermitian)
    rng = np.random.default_rng(4)
    x, c = (np.asfortranarray(rng.integers(-3, 4, (5, 5)) + 1j, np.complex64) for _ in "xc")
    d = np.full_like(x, 7)
    expected = np.where(part.mask, alpha * x + beta * c, d)
    if hermitian and diagonal == 0:
        np.fill_diagonal(expected.imag, 0)
    for y in (x, c):
        y.T.view(np.uint32)[np.repeat(~part.mask.T, 2, axis=1)] = 0x7FA00000
    HostOperations(None, None).add(d, alpha, x, beta, c, part, conjugate=False)
    assert np.array_equal(d, expected)
