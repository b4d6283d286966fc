# SPDX-License-Identifier: Apache-2.0
"""What the tests on ranks share: layouts of every kind, integers as data, products by NumPy, and comparing.

Every rank draws the same cases from generators with the same seed. The numbers are small integers, so that
every product is exact in every type and results are compared for equality.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import DTYPES

SIZES = (1, 2, 3, 4, 6)
TYPES = tuple(DTYPES)


@cache
def grids(size: int) -> tuple[pb.Grid, ...]:
    """Every grid of at most ``size`` ranks, in both rank orders."""
    sides = range(1, size + 1)
    return tuple(
        pb.Grid(p, q, order) for p in sides for q in sides if p * q <= size for order in ("row", "col")
    )


def pick(rng: np.random.Generator, values):
    """One of ``values``."""
    return values[int(rng.integers(len(values)))]


def extents(rng: np.random.Generator, *bands: tuple[int, int]) -> tuple[int, int, int]:
    """Three extents from one of the ``bands``, the least and the most: two of them, or all, are often the same."""
    least, most = pick(rng, bands)
    m, n, k = (int(x) for x in rng.integers(least, most + 1, 3))
    return pick(rng, ((m, m, m), (m, m, m), (m, m, k), (m, n, n), (m, n, m), (m, n, k)))


def layout(
    rng, shape, size, *, grid=None, block=None, source=None, dtype="float64", order=None, pad=None, unlike=()
):
    """A descriptor of ``shape``, all that is not given at random, but not the grid, blocks or source of others."""
    taken, sources = [x.grid for x in unlike], {x.source for x in unlike}
    free = [g for g in grids(size) if g not in taken and {*np.ndindex(g.shape)} - sources] if taken else ()
    grid = grid or pick(rng, free or grids(size))
    block = block or tuple(int(x) for x in rng.integers(1, 9, 2))
    while block in [x.block for x in unlike]:
        block = block[0] + 1, block[1]
    source = source or pick(rng, sorted({*np.ndindex(grid.shape)} - sources) or [(0, 0)])
    tight = pb.MatrixDescriptor(shape, block, grid, source, dtype, order or pick(rng, "CF"))
    if pad is None:
        pad = int(rng.integers(4)) if rng.integers(3) == 0 else 0
    return replace(tight, ld=max(tight.lld(rank) for rank in range(grid.size)) + pad) if pad else tight


def numbers(rng, shape, dtype):
    """Integers from -4 to 4; for complex types in both parts."""
    values = rng.integers(-4, 5, shape).astype(np.float64)
    if np.dtype(DTYPES[np.dtype(dtype).name]).kind == "c":
        values = values + 1j * rng.integers(-4, 5, shape)
    return values.astype(dtype)


def exact(values):
    """``values`` in a type that holds every product in the tests exactly."""
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def scattered(ctx, d, values):
    """``values``, which every rank has, as a matrix in the layout ``d``. Each rank writes its part: no message."""
    matrix = ctx.allocate(d)
    ctx.engine.from_host(matrix.local, part(values, d, ctx.rank))
    return matrix


OPS = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}


def product(a, b, c=None, *, alpha=1, beta=0, op_a="N", op_b="N", dtype=None):
    """``alpha op(A) op(B) + beta C`` by NumPy; what is scaled by 0 is not read."""
    left, right = OPS[op_a](exact(a)), OPS[op_b](exact(b))
    out = np.zeros((left.shape[0], right.shape[1]), left.dtype) if alpha == 0 else alpha * (left @ right)
    if beta != 0:
        out = out + beta * exact(c)
    return out.astype(a.dtype if dtype is None else dtype)


def part(whole, descriptor, rank):
    """What ``rank`` holds of the matrix ``whole``; 0 × 0 outside the grid."""
    if rank >= descriptor.grid.size:
        return whole[:0, :0]
    rows, cols = descriptor.global_indices(rank)
    return whole[rows[:, None], cols]


def check_array(found, expected, case=""):
    """Fail unless type, shape and every value are as expected. Local."""
    kinds = (found.dtype, found.shape), (expected.dtype, expected.shape)
    assert kinds[0] == kinds[1], f"{case}: type and shape {kinds[0]}, expected {kinds[1]}"
    where = np.argwhere(~np.asarray(found == expected))
    at = tuple(where[0]) if len(where) else ()
    assert not len(where), (
        f"{case}: {len(where)} values differ, first at {at}: {found[at]}, expected {expected[at]}"
    )


def check_view(view, whole, case=""):
    """Fail unless this rank's part of a matrix is that of ``whole``. Local."""
    d = view.descriptor
    assert view.shape == whole.shape, f"{case}: shape {view.shape}, expected {whole.shape}"
    if view.context.rank >= d.grid.size:
        assert not view.local.size, f"{case}: a rank outside the grid holds {view.local}"
        return
    check_array(view.local, part(whole, d, view.context.rank), f"{case}: {d}")


def check_matrix(matrix, whole, case=""):
    """Fail unless this rank's part is that of ``whole``, with the leading dimension of the descriptor. Local."""
    d, local = matrix.descriptor, matrix.local
    check_view(matrix, whole, case)
    if min(local.shape) > 1 and d.ld is not None:
        away = local.strides[0 if d.order == "C" else 1] // local.itemsize
        assert away == d.ld, f"{case}: {d}: leading dimension {away}, expected {d.ld}"


def check_near(found, expected, case="", *, rtol=0.0, atol=0.0):
    """Fail unless a number, or every value of an array, is near to the expected one; NaN is NaN. Local."""
    assert np.shape(found) == np.shape(expected), f"{case}: {found}, expected {expected}"
    near = np.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    at = tuple(np.argwhere(~near)[0]) if not near.all() else ()
    got, wanted = np.asarray(found)[at], np.asarray(expected)[at]
    assert near.all(), f"{case}: {(~near).sum()} values differ, first at {at}: {got}, expected {wanted}"


@contextlib.contextmanager
def short_messages(limit):
    """Within, messages are cut after ``limit`` bytes, and those that are not cut come in chunks of half of it."""
    from pblasmp.comm import communicator, exchange

    chunk = mock.patch.object(communicator, "CHUNK_BYTES", max(16, limit // 2))
    with mock.patch.object(exchange, "MESSAGE_BYTES", limit), chunk:
        yield


def only_last(comm):
    """Return a function that picks what the last rank is given; the others get its second argument."""
    return lambda last, others: last if comm.rank == comm.size - 1 else others


def refuses(ctx, kind, words, call, *args, **kwargs):
    """Fail unless ``call(*args)`` raises ``kind`` on every rank, with one text that has all ``words``."""
    name = getattr(call, "__name__", call)
    try:
        call(*args, **kwargs)
    except kind as error:
        text = str(error)
    except Exception as error:  # noqa: BLE001 - distinguished below
        text = f"raised {type(error).__name__}: {error}, expected {kind.__name__}"
    else:
        text = f"no {kind.__name__}"
    texts = set(ctx.comm.allgather(text))
    assert len(texts) == 1, f"{name}: the ranks differ: {texts}"
    for word in words:
        assert word in text, name
