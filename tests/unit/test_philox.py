# SPDX-License-Identifier: Apache-2.0
"""Random numbers by counters: the published generator, numbers of the right kind, every type."""

import ml_dtypes
import numpy as np
import pytest

from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.matrix.creation import philox4x32, random_values

# kat_vectors of Random123 1.14, philox4x32 with 10 rounds: counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    found = philox4x32(tuple(np.array([c], np.uint64) for c in counter), key)
    assert tuple(int(x[0]) for x in found) == expected


def draw(shape, dtype="float64", distribution="uniform", seed=5):
    i, j = (np.arange(n, dtype=np.uint64) for n in shape)
    return random_values(np, i[:, None], j[None, :], seed, np.dtype(dtype), distribution)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), *FLOAT8.values()], ids=str)
def test_uniform_numbers_are_exact_and_below_one(dtype):
    values = draw((300, 300), dtype)
    rounded = values.astype(dtype)
    assert np.array_equal(rounded.astype(values.dtype), values)
    parts = (values.real, values.imag) if dtype.kind == "c" else (values,)
    for part in parts:
        assert part.min() >= 0
        assert part.max() < 1
        assert abs(part.mean() - 0.5 * (1 - 2.0 ** -(ml_dtypes.finfo(dtype).nmant + 1))) < 0.005


def test_distributions():
    from scipy import stats  # slow to import, by every worker that collects this file

    assert stats.kstest(draw((200, 500)).ravel(), "uniform").pvalue > 1e-3
    assert stats.kstest(draw((200, 500), distribution="normal").ravel(), "norm").pvalue > 1e-3
    values = draw((200, 500), "complex128", "normal").ravel()
    assert stats.kstest(values.imag, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(values.real, values.imag)[0, 1]) < 0.02
    assert np.isfinite(values).all()


def test_seeds_rows_and_columns_matter():
    a = draw((40, 40))
    assert not np.isin(a, draw((40, 40), seed=6)).any()
    assert not np.isin(a, draw((40, 40), seed=5 + (1 << 32))).any()
    assert len(np.unique(a)) == a.size
    assert np.array_equal(draw((20, 50))[:, :40], a[:20])


def test_indices_beyond_32_bits():
    i = np.array([[5], [5 + (1 << 32)]], np.uint64)
    j = np.array([[7, 7 + (1 << 32)]], np.uint64)
    found = random_values(np, i, j, 1, np.dtype("float64"), "uniform")
    assert len(np.unique(found)) == 4
