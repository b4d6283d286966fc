# SPDX-License-Identifier: Apache-2.0
"""What the tests of the PBLAS names share: matrices as Fortran programs hold them.

Every rank draws the same cases from generators with the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.helpers.cases import numbers, pick

PAD = -77  # what padding holds


@dataclass(repr=False)
class Held:
    """A distributed matrix of a Fortran program: on a grid, the whole of it known to every rank."""

    grid: tuple[int, int]
    whole: np.ndarray
    block: tuple[int, int]
    source: tuple[int, int]
    at: tuple[int, int]  # where sub(A) begins, from 1
    shape: tuple[int, int]  # of sub(A)
    gap: int  # padding of the leading dimension

    def __str__(self):
        return f"{self.whole.shape} in {self.block} from {self.source}, part {self.shape} at {self.at}, gap {self.gap}"

    __repr__ = __str__

    def indices(self, place):
        """Global rows and columns that the process at ``place`` has, by the definition of block-cyclic."""
        return [
            np.flatnonzero((np.arange(extent) // block + source) % processes == here)
            for extent, block, source, processes, here in zip(
                self.whole.shape, self.block, self.source, self.grid, place, strict=True
            )
        ]

    def local(self, place, whole=None, *, flat=False):
        """The local array of ``whole`` at ``place``, in Fortran order and padded; ``flat``: in one dimension."""
        rows, cols = self.indices(place)
        array = np.full((self.lld(place), len(cols)), PAD, self.whole.dtype, order="F")
        array[: len(rows)] = (self.whole if whole is None else whole)[rows[:, None], cols]
        return array.reshape(-1, order="F") if flat else array

    def lld(self, place):
        """The leading dimension of the local array at ``place``."""
        return max(1, len(self.indices(place)[0])) + self.gap

    def desc(self, context, place):
        """The nine integers of the process at ``place``, those of ScaLAPACK too."""
        numbers = [1, context, *self.whole.shape, *self.block, *self.source, self.lld(place)]
        return np.array(numbers, np.int32)

    @property
    def window(self):
        """The position of sub(A) in A."""
        return tuple(slice(i - 1, i - 1 + n) for i, n in zip(self.at, self.shape, strict=True))

    def unread(self, kept):
        """The whole, with NaN wherever a routine has no business: outside sub(A), and where ``kept`` is False."""
        whole = np.full_like(self.whole, np.nan)
        whole[self.window] = np.where(kept, self.whole[self.window], np.nan)
        return whole


def held(rng, grid, shape, dtype):
    """A matrix with a ``shape`` somewhere in it, blocks, source and padding at random."""
    before, after = rng.integers(0, 8, 2), rng.integers(0, 5, 2)
    whole = numbers(rng, tuple(int(x) for x in before + np.array(shape) + after), dtype)
    at = tuple(int(x) + 1 for x in before)
    block = tuple(int(x) for x in rng.integers(1, 7, 2))
    source = tuple(int(rng.integers(x)) for x in grid)
    return Held(grid, whole, block, source, at, shape, pick(rng, (0, 0, 3)))


def triangle(shape, uplo, *, unit=False):
    """Where a triangle's elements are, its diagonal too unless ``unit``."""
    ones = np.ones(shape, bool)
    return np.triu(ones, int(unit)) if uplo == "U" else np.tril(ones, -int(unit))
