# SPDX-License-Identifier: Apache-2.0
"""Copies between host and GPU in every order of sizes: a copy may not depend on those before it."""

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.runtime.host_copies import HostCopies
from tests.helpers.slow import fewer

_CHUNK = 16 << 20


@pytest.mark.parametrize("chunks", fewer([(1, 2, 8), (1, 8), (2, 8), (1, 3), (8, 1, 4)], 0))
def test_a_copy_is_right_whatever_was_copied_before(ctx, chunks):
    import cupy

    copies = HostCopies(cupy, ctx.size, ctx.engine.session.runtime.wait)
    for seed, count in enumerate(chunks):
        shape = (count, _CHUNK)
        values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        array = cupy.zeros(shape, np.uint8)
        copies.write(array, values)
        np.testing.assert_array_equal(array.get(), values)
        np.testing.assert_array_equal(copies.read(array), values)
    copies.close()


def test_a_large_matrix_is_gathered_after_a_small_one_was_scattered():
    import cupy

    with pb.Context(engine="cublasmp") as ctx:
        n, share = 1024, 8 << 20  # bytes of a rank's part: one chunk
        small = np.ones((share * ctx.size // (8 * n), n))
        ctx.scatter(small if ctx.rank == 0 else None, block=64)
        large = ctx.zeros((8 * _CHUNK // (8 * n) * ctx.size, n), block=64)
        rows, cols = (cupy.asarray(each) for each in large.descriptor.global_indices(ctx.rank))
        large.local[...] = 1000.0 * rows[:, None] + cols  # on the GPU: the host copies nothing
        found = large.gather()
        if ctx.rank == 0:
            i, j = np.ogrid[: large.shape[0], :n]
            np.testing.assert_array_equal(found, 1000.0 * i + j)
