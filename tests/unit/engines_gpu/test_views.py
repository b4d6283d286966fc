# SPDX-License-Identifier: Apache-2.0
"""Commands of copy engines: what each of them copies."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from pblasmp.engines.gpu.kernels.views import Blocks, View, blocks
from tests.helpers.hardware import is_legal

ROOM = 4096
F4 = np.dtype("float32")


def copied(commands: list[Blocks], to: np.ndarray, of: np.ndarray) -> None:
    """Do what copy engines do; addresses count from the beginning of the arrays."""
    for b in commands:
        assert is_legal(b)
        shape = b.depth, b.height, b.width
        there, here = (
            as_strided(memory[at:], shape, (b.slices[i], b.pitches[i], 1))
            for i, (memory, at) in enumerate(((to, b.to), (of, b.of)))
        )
        there[...] = here


def random_side(rng: np.random.Generator, rows: int, cols: int, count: int) -> tuple[View, int]:
    """Equal matrices, next to each other or one behind the other, with or without gaps, and how far they are apart."""
    gap, padding, more = (int(rng.choice([0, 0, x])) for x in (1, 2, 1))
    step = cols + padding
    ld = step * (count + gap) + more
    if rng.random() < 0.5:
        ld, step = step, step * (rows + gap)
    first = View(4 * int(rng.integers(0, 5)), rows, cols, ld, F4)
    return (first.shifted((count - 1) * step), -step) if rng.random() < 0.2 else (first, step)


def test_any_blocks():
    rng = np.random.default_rng(1)
    for _ in range(400):
        rows, cols, count = (int(x) for x in rng.integers(1, 6, 3))
        (there, to_step), (here, of_step) = sides = [random_side(rng, rows, cols, count) for _ in range(2)]
        of = rng.integers(0, 256, ROOM, np.uint8)
        to, expected = np.zeros(ROOM, np.uint8), np.zeros(ROOM, np.uint8)
        for i in range(count):
            for row in range(rows):
                at, source = (v.address + 4 * (i * step + row * v.ld) for v, step in sides)
                expected[at : at + 4 * cols] = of[source : source + 4 * cols]
        commands = list(blocks(there, here, count, (to_step, of_step)))
        copied(commands, to, of)
        assert np.array_equal(to, expected), (sides, count)
        assert len(commands) <= (count if min(to_step, of_step) < 0 else min(rows, count))


@pytest.mark.parametrize(
    ("to", "of", "count", "steps", "command"),
    [
        # contiguous on both sides
        ((3, 8, 8), (3, 8, 8), 1, (0, 0), Blocks(0, 0, 96, 1, 1, (96, 96))),
        # a rank's blocks of 4 columns, which are every other one in the slab
        ((6, 4, 32), (6, 4, 16), 4, (8, 4), Blocks(0, 0, 16, 24, 1, (32, 16))),
        # the same in the middle of a wider matrix
        ((6, 4, 48), (6, 4, 16), 4, (8, 4), Blocks(0, 0, 16, 4, 6, (32, 16), (192, 64))),
        # every other block of 5 rows
        ((5, 4, 8), (5, 4, 4), 3, (40, 40), Blocks(0, 0, 16, 5, 3, (32, 16), (160, 160))),
    ],
    ids=["contiguous", "two dimensions", "three dimensions", "rows"],
)
def test_equal_blocks_are_one_command(to, of, count, steps, command):
    assert list(blocks(View(0, *to, F4), View(0, *of, F4), count, steps)) == [command]


def test_blocks_of_rows_that_are_no_multiple_of_their_distance_take_a_command_each():
    commands = list(blocks(View(0, 6, 4, 33, F4), View(0, 6, 4, 16, F4), 4, (8, 4)))
    assert [(b.height, b.depth) for b in commands] == [(6, 1)] * 4


def test_nothing_is_no_command():
    assert not list(blocks(View(0, 0, 4, 4, F4), View(0, 0, 4, 4, F4), 3, (4, 4)))


GIB = 1 << 28  # entries


@pytest.mark.parametrize(
    ("to", "of", "count", "steps", "commands"),
    [
        # as far apart as CUDA takes
        ((3, 8, 2 * GIB - 1), (3, 8, 8), 1, (0, 0), [Blocks(0, 0, 32, 3, 1, (8 * GIB - 4, 32))]),
        # rows of 2 GiB, in the one or the other matrix
        ((2, 8, 2 * GIB), (2, 8, 8), 1, (0, 0), [Blocks(8 * GIB * i, 32 * i, 32, 1, 1, (32, 32)) for i in range(2)]),
        ((2, 8, 8), (2, 8, 9 * GIB), 1, (0, 0), [Blocks(32 * i, 36 * GIB * i, 32, 1, 1, (32, 32)) for i in range(2)]),
        # a row of 4 GiB
        ((1, 4 * GIB, 4 * GIB), (1, 4 * GIB, 9 * GIB), 1, (0, 0), [Blocks(0, 0, 16 * GIB, 1, 1, (16 * GIB,) * 2)]),
        # blocks in such rows: a command for the blocks of a row, not for the rows of a block
        ((3, 4, 2 * GIB + 1), (3, 4, 16), 2, (8, 4),
         [Blocks((8 * GIB + 4) * i, 64 * i, 16, 2, 1, (32, 16)) for i in range(3)]),
        # such rows one behind the other, in blocks
        ((2, 4, 2 * GIB), (2, 4, 4), 2, (6 * GIB, 8),
         [Blocks(8 * GIB * (i + 3 * k), 16 * i + 32 * k, 16, 1, 1, (16, 16)) for k in range(2) for i in range(2)]),
    ],
)  # fmt: skip
def test_rows_of_2_gib_take_a_command_each(to, of, count, steps, commands):
    found = list(blocks(View(0, *to, F4), View(0, *of, F4), count, steps))
    assert found == commands
    assert all(is_legal(b) for b in found)
