# SPDX-License-Identifier: Apache-2.0
"""The local BLAS: every orientation and leading dimension of its operands, and which library it is."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy
from numpy.lib.stride_tricks import as_strided

import pblasmp as pb
from pblasmp.engines.host import blas, host_engine
from pblasmp.errors import ArgumentError, LibraryNotFoundError
from tests.helpers.pairs import pairs

ORIENTATIONS = {  # views of rows × cols in larger memory, one dimension contiguous
    "C": lambda rows, cols, kind: np.full((rows + 2, cols), 99, kind)[1:-1],
    "F": lambda rows, cols, kind: np.full((rows, cols + 2), 99, kind, order="F")[:, 1:-1],
    "C padded": lambda rows, cols, kind: np.full((rows, cols + 3), 99, kind)[:, 1:-2],
    "F padded": lambda rows, cols, kind: np.full((rows + 3, cols), 99, kind, order="F")[2:-1],
    "turned": lambda rows, cols, kind: np.full((cols, rows + 1), 99, kind)[:, :-1].T,
}
SIZES = ((1, 1, 1), (4, 3, 5), (1, 3, 4), (4, 1, 3), (4, 5, 1), (1, 1, 6), (0, 3, 2), (3, 0, 2))


def filled(orientation, shape, kind, rng):
    array = ORIENTATIONS[orientation](*shape, kind)
    array[...] = rng.integers(-5, 6, shape)
    if array.dtype.kind == "c":
        array += 1j * rng.integers(-5, 6, shape)
    return array


def owner(array):
    while array.base is not None:
        array = array.base
    return array


KINDS = ("float32", "float64", "complex64", "complex128")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gemm(kind, size):
    rng = np.random.default_rng(0)
    m, n, k = size
    alphas, betas = [1, -2], [0, 1, 3]
    if kind.startswith("complex"):
        alphas, betas = [1, 2 - 1j], [0, 1, 1j]
    for orients in pairs(ORIENTATIONS, ORIENTATIONS, ORIENTATIONS):
        alpha, beta = alphas[rng.integers(2)], betas[rng.integers(3)]
        a, b, d = (
            filled(orient, shape, kind, rng)
            for orient, shape in zip(orients, ((m, k), (k, n), (m, n)), strict=True)
        )
        expected = alpha * (a @ b) + beta * d
        before = owner(a).copy(), owner(b).copy()
        if beta == 0:
            d[...] = np.nan  # is not read
        around = np.count_nonzero(owner(d) == 99) - np.count_nonzero(d == 99)
        blas.gemm("scipy", alpha, a, b, beta, d)
        assert np.array_equal(d, expected), orients
        assert np.count_nonzero(owner(d) == 99) - np.count_nonzero(d == 99) == around, "written outside d"
        assert np.array_equal(owner(a), before[0])
        assert np.array_equal(owner(b), before[1])


@pytest.fixture
def narrow(monkeypatch):
    """A BLAS whose integers hold numbers up to 2; it is never given a larger one."""
    real, given = blas._integer, []

    def integer(n):
        assert n <= 2
        given.append(n)
        return real(n)

    monkeypatch.setattr(blas, "_INT_MAX", 2)
    monkeypatch.setattr(blas, "_integer", integer)
    yield
    assert given


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("size", [(5, 4, 3), (1, 7, 2), (2, 1, 5), (3, 3, 1), (1, 1, 4)], ids=str)
def test_products_beyond_the_integers_of_blas(size):
    """Of extents, and of leading dimensions."""
    test_gemm("complex128", size)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("size", [(2, 5), (2, 1), (1, 3)], ids=str)
def test_solves_beyond_the_integers_of_blas(size):
    test_trsm("complex128", size)


def test_sizes_beyond_32_bits():
    assert blas._too_large({"m": 1, "n": 2**31, "k": 1}, [("k", 1)]) == "n"
    assert blas._too_large({"m": 1, "n": 1, "k": 2**31 - 1}, [("k", 2**31 - 1), ("n", 2**31)]) == ""
    assert blas._too_large({"m": 2, "n": 2, "k": 2}, [("n", 2), ("k", 2**31)]) == "k"
    far_apart, x = as_strided(np.ones(2), (2, 1), (2**31 * 8, 8))[:1], np.zeros((1, 1))
    blas.gemm("scipy", 1, np.ones((1, 1)), far_apart, 0, x)
    assert x == 1


def test_no_contiguous_dimension():
    a = np.zeros((6, 6))[::2, ::2]
    with pytest.raises(ArgumentError, match=r"one contiguous dimension, got strides of \(16, 96\) bytes"):
        blas.gemm("scipy", 1, a, np.zeros((3, 3)), 0, np.zeros((3, 3)))


def test_library_name(monkeypatch):
    monkeypatch.delenv("PBLASMP_BLAS", raising=False)
    assert blas.library_name() == "scipy"
    monkeypatch.setenv("PBLASMP_BLAS", "MKL")
    assert blas.library_name() == "mkl"
    monkeypatch.setenv("PBLASMP_BLAS", "atlas")
    with pytest.raises(LibraryNotFoundError, match=r"expected 'scipy' or 'mkl', got 'atlas'"):
        blas.library_name()


def test_mkl_that_is_not_there(monkeypatch, tmp_path):
    blas._mkl.cache_clear()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}:")
    monkeypatch.delenv("MKL_INTERFACE_LAYER", raising=False)
    with pytest.raises(LibraryNotFoundError, match="pip install mkl"):
        blas.load("mkl", "d")


@pytest.mark.parametrize("layer", ["ILP64", "gnu,ilp64"])
def test_mkl_with_integers_of_64_bits_is_refused(layer, monkeypatch):
    blas._mkl.cache_clear()
    monkeypatch.setenv("MKL_INTERFACE_LAYER", layer)
    with pytest.raises(LibraryNotFoundError, match=f"MKL_INTERFACE_LAYER={layer} .* set it to LP64"):
        blas.load("mkl", "d")


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"])
def test_threads_set_by_the_user(name, monkeypatch):
    for other in blas.THREAD_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    assert not blas.threads_set_by_user()
    monkeypatch.setenv(name, "3")
    assert blas.threads_set_by_user()


@pytest.mark.parametrize("kind", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("size", [(1, 1), (4, 3), (3, 1), (1, 4), (0, 2), (3, 0)], ids=str)
def test_trsm(kind, size):
    rng = np.random.default_rng(1)
    m, n = size
    for orient_a, orient_b, lower, unit in itertools.product(
        ORIENTATIONS, ORIENTATIONS, (True, False), (True, False)
    ):
        a = filled(orient_a, (m, m), kind, rng)
        x = filled(orient_b, (m, n), kind, rng)
        triangle = (np.tril if lower else np.triu)(a, -1 if lower else 1)
        diagonal = rng.choice([1, -2, 4], m)
        triangle += np.diag(np.ones(m) if unit else diagonal).astype(kind)
        np.fill_diagonal(a, np.nan if unit else diagonal)
        a[(np.triu if lower else np.tril)(np.ones((m, m), bool), 1 if lower else -1)] = np.nan
        expected = x.copy()
        x[...] = triangle @ expected
        around = np.count_nonzero(owner(x) == 99) - np.count_nonzero(x == 99)
        blas.trsm("scipy", 2, a, x, lower=lower, unit=unit)
        assert np.array_equal(x, 2 * expected), (orient_a, orient_b, lower, unit)
        assert np.count_nonzero(owner(x) == 99) - np.count_nonzero(x == 99) == around


def test_only_openblas_by_avx_512_multiplies_small_matrices_uncopied(monkeypatch):
    for said, found in (
        ("openblas 0.3.31 SkylakeX", True),
        ("openblas 0.3.31 SapphireRapids", True),
        ("openblas 0.3.31 Haswell", False),
        ("mkl 2024.1 SkylakeX", False),
    ):
        monkeypatch.setattr(blas, "described", lambda library, said=said: f"{library}'s {said}")
        assert blas.has_small_kernels("scipy") == found


@pytest.mark.parametrize(("threads", "used"), [({"1"}, True), ({"2"}, False), ({"1", "2"}, False)])
def test_only_a_blas_with_one_thread_computes_many_small_products(monkeypatch, threads, used):
    """Several threads would wait for each other in each of them."""
    made, found = host_engine.HostDirect, []

    def direct(*args, small_kernels, **options):
        found.append(small_kernels)
        return made(*args, small_kernels=small_kernels, **options)

    monkeypatch.setattr(host_engine, "HostDirect", direct)
    monkeypatch.setattr(blas, "has_small_kernels", lambda library: True)
    monkeypatch.setattr(blas, "threads_set_by_user", lambda: threads)
    pb.Context(engine="host").close()
    assert found == [used]


def test_the_blas_is_named(monkeypatch):
    """By what it says of itself; measured times are those of one library."""
    said = [
        {"user_api": "openmp", "internal_api": "openmp", "version": "5", "filepath": "/x/libomp.so"},
        {
            "user_api": "blas",
            "internal_api": "openblas",
            "version": "0.3.1",
            "architecture": "Zen",
            "filepath": "/x/a",
        },
        {"user_api": "blas", "internal_api": "mkl", "version": "2024.1", "filepath": "/x/libmkl_rt.so"},
    ]
    monkeypatch.setattr(blas, "threadpool_info", lambda: said)
    describe = blas.described.__wrapped__
    assert describe("mkl") == "mkl's mkl 2024.1"
    assert describe("scipy") == "scipy's mkl 2024.1 and openblas 0.3.1 Zen"  # whichever of them
    beside = Path(scipy.__path__[0]).parent / "scipy.libs" / "libopenblas.so"
    said[1]["filepath"] = str(beside)
    assert describe("scipy") == "scipy's openblas 0.3.1 Zen"
    said.clear()
    assert describe("scipy") == "scipy"
