# SPDX-License-Identifier: Apache-2.0
"""Random layouts: small or large, on any grid of the ranks, in blocks of any size."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.vendor import pretty

import pblasmp as pb
from tests.helpers.gpu.moves import grids

TYPES = ("float64", "float64", "float32", "complex128", "complex64", "float16", "bfloat16")
EXTENTS = (1, 7, 24, 24, 40, 40, 96)  # those of many matrices, so that some fit each other

pretty.for_type_by_name(  # in programs that are printed, too, as users write it
    pb.MatrixDescriptor.__module__,
    "MatrixDescriptor",
    lambda layout, printer, cycle: printer.text(repr(layout)),
)


_often = st.shared(st.sampled_from([0.05, 0.2, 0.5]), key="the share of large matrices in a sequence")


@st.composite
def layouts(draw: st.DrawFn) -> pb.MatrixDescriptor:
    """Any layout, on the ranks of the state machine that draws it."""
    rng, state, often = draw(st.randoms(use_true_random=False)), draw(st.runner()), draw(_often)
    return random_layout(rng, state.comm.size, random_shape(rng, state.device.large, often))


def random_shape(rng: random.Random, large: int, often: float) -> list[int]:
    """Return a shape: mostly small, now and then so large that copies and messages come in several parts.

    Args:
        rng: draws; of Hypothesis's random numbers the integers, its floats are rarely ordinary.
        large: bytes of the smallest large matrix.
        often: the share of large matrices.
    """
    kind = rng.randrange(100) / 100
    if kind < 0.04:
        return [rng.randrange(3), rng.randrange(3)]
    if kind < 0.55 * (1 - often):
        return [rng.choice(EXTENTS), rng.choice(EXTENTS)]
    share = rng.randrange(2, 31) / (100 if kind < 1 - often else 10)
    elements = share * large / 8
    rows = int(elements**0.5 * rng.choice([0.5, 1, 1, 2]))
    return [rows, int(elements / rows)]


def random_layout(
    rng: random.Random, ranks: int, shape: Sequence[int], dtype: np.dtype | None = None
) -> pb.MatrixDescriptor:
    """Return a layout of a shape; by default, of any type."""
    grid = rng.choice(grids(ranks))
    block = [rng.randint(1, rng.choice([3, 16, 64, extent + 5])) for extent in shape]
    while (shape[0] // block[0] + 1) * (shape[1] // block[1] + 1) > 400:
        block = [b * 2 for b in block]
    source = rng.randrange(grid.nprow), rng.randrange(grid.npcol)
    drawn = rng.choice(TYPES) if rng.randrange(20) < 19 else "float8_e4m3fn"
    pad = rng.randint(1, 5) if rng.randrange(5) == 4 else 0
    return pb.MatrixDescriptor(
        shape, block, grid, source, drawn if dtype is None else dtype, rng.choice("CF"),
        ld=max(shape) + pad if pad else None,
    )  # fmt: skip


def moved(layout: pb.MatrixDescriptor, shape: Sequence[int], dtype: Any) -> pb.MatrixDescriptor:
    """Return the layout for another shape and type."""
    ld = None if layout.ld is None else layout.ld + max(shape)
    return dataclasses.replace(layout, shape=shape, dtype=dtype, ld=ld)
