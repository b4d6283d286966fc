# SPDX-License-Identifier: Apache-2.0
"""Views and moves: sub-matrices, transposes, products written with @, redistribution between any two layouts."""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.cases import (
    TYPES,
    agreed_error,
    first,
    layout,
    misplaced,
    numbers,
    pick,
    refuses,
    scattered,
    short_messages,
    unlike,
)
from tests.helpers.mpi import run_mpi
from tests.helpers.slow import draws, only_long


def slices(comm):
    rng = np.random.default_rng(12)
    with pb.Context(comm, engine="host") as ctx:
        d = layout(rng, (9, 7), comm.size, block=(2, 2))
        values = numbers(rng, d.shape, d.dtype)
        a = scattered(ctx, d, values)
        for i, j in (
            (slice(None), slice(None)),
            (slice(-4, None), slice(None, -2)),
            (slice(3, 100), slice(5, 2)),
            (slice(9, 9), slice(0, 7)),
        ):
            yield f"[{i}, {j}]", unlike(a[i, j].allgather(), values[i, j])
        for index in (
            np.s_[..., 2],
            np.s_[2, ...],
            np.s_[...],
            np.s_[..., :3],
            np.s_[1:, ...],
            np.s_[:, :, ...],
        ):
            found = a[index].allgather()
            yield f"[{index}]", unlike(found, values[index].reshape(found.shape))
            values[index] = 5 if index == np.s_[...] else np.arange(values[index].shape[-1])
            a[index] = 5 if index == np.s_[...] else np.arange(values[index].shape[-1])
            yield f"[{index}] =", unlike(a.allgather(), values)
        for index in (np.s_[..., 8, 6], np.s_[8, ..., 6], np.s_[8, 6, ...]):
            a[index] = values[index] = 3
            yield (
                f"element [{index}]",
                first(
                    None if np.isscalar(a[index]) and a[index] == 3 else f"{a[index]}",
                    unlike(a.allgather(), values),
                ),
            )
        for index in ((..., ...), (..., 1, 2, 3)):
            wrong = agreed_error(
                ctx, pb.ArgumentError, ["expected integers or slices"], a.__setitem__, index, 1
            )
            yield f"[{index}] is refused", wrong
        for index in ((slice(None), slice(0, 6, 2)), (slice(1), slice(1), slice(1))):
            wrong = agreed_error(ctx, pb.ArgumentError, ["slice"], a.__getitem__, index)
            yield f"[{index}] is refused", wrong


def moves(comm):
    rng = np.random.default_rng(14)
    with pb.Context(comm, engine="host") as ctx:
        cases = draws(16, long=24) if comm.size > 4 else draws(30, long=60)
        for count in range(cases):
            shape = pick(rng, ((17, 13), (20, 20), (1, 30), (0, 4), (4, 0), (2, 2)))
            src = layout(rng, shape, comm.size, dtype=pick(rng, TYPES))
            dst = layout(rng, shape, comm.size, dtype=pick(rng, TYPES))
            values = numbers(rng, shape, src.dtype)
            a = scattered(ctx, src, values)
            case = f"{count}: {src} to {dst}"
            if src.dtype.kind == "c" and dst.dtype.kind != "c":
                words = [f"{src.dtype.name} does not convert to {dst.dtype.name}"]
                refuses(ctx, pb.ArgumentError, words, a.redistribute, dst)
                continue
            with short_messages(pick(rng, (24, 300, 1 << 22))):
                b = a.redistribute(dst)
            yield case, first(misplaced(b, values.astype(dst.dtype)), misplaced(a, values))
        d = layout(rng, (17, 13), comm.size, block=(3, 2))
        values = numbers(rng, d.shape, d.dtype)
        a = scattered(ctx, d, values)
        for i, j in ((slice(1, 16), slice(3, 12)), (slice(6, 9), slice(0, 13)), (slice(4, 4), slice(2, 5))):
            view = a[i, j]
            to = layout(rng, view.shape, comm.size)
            yield f"a view at {i}, {j} to {to}", misplaced(view.redistribute(to), values[i, j])
            yield f"its transpose to {to.T}", misplaced(view.T.redistribute(to.T), values[i, j].T)
        other = layout(rng, (17, 14), comm.size)
        refuses(ctx, pb.ArgumentError, ["(17, 13)"], a.redistribute, other)
        beyond = pb.MatrixDescriptor((17, 13), (2, 2), pb.Grid(comm.size + 1, 1))
        words = [f"needs {comm.size + 1} ranks, got {comm.size}"]
        refuses(ctx, pb.ArgumentError, words, a.redistribute, beyond)


def test_slices_mean_what_they_mean_in_numpy():
    run_mpi(slices, 2)


@pytest.mark.parametrize("nranks", [1, *only_long(2), 3, *only_long(4), 6])
def test_redistribution_between_any_two_layouts(nranks):
    run_mpi(moves, nranks)
