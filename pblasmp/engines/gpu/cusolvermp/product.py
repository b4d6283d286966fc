# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues by cuSOLVERMp, on matrices in layouts that it takes: moved there and back if they are not."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....bindings import FillMode
from ....layout import Grid, MatrixDescriptor
from ....layout.factor_problem import FactorProblem
from ...arrays import new_part
from ...local.spectral import SpectralProduct
from ...product import FactorOperands, Found
from ...protocol import Engine
from .library import Cusolvermp

__all__ = ["CusolvermpProduct", "work_layout"]

Array = Any

_BLOCK = 512  # of matrices that are moved: the fastest of 256, 512 and 1024 where all ranks still have work


def work_layout(x: MatrixDescriptor, size: int) -> MatrixDescriptor:
    """Return the layout in which a matrix is computed with by ``size`` ranks: its own if cuSOLVERMp takes it. Local.

    It takes F order and square blocks. Blocks of one element have hung, and so have calls on some of the ranks.
    """
    square = x.block[0] == x.block[1] > 1
    if x.order == "F" and square and x.grid.size == size and x.source == x.lead == (0, 0):
        return replace(x, ld=None)
    grid = x.grid if x.grid.size == size else Grid.squarest(size)
    block = min(_BLOCK, max(2, -(-max(x.shape) // (4 * max(grid.nprow, grid.npcol)))))
    return MatrixDescriptor(x.shape, (block, block), grid, dtype=x.dtype, order="F")


class CusolvermpProduct(SpectralProduct):
    """Eigenvalues by cuSOLVERMp. Making and running one is collective over the context.

    Args:
        engine: where.
        library: cuSOLVERMp.
        problem: what is computed.
    """

    always_scales = True  # near the ends of the range its eigenvectors are wrong

    def __init__(self, engine: Engine, library: Cusolvermp, problem: FactorProblem) -> None:
        super().__init__(engine, problem, work_layout(problem.a, engine.transport.size))
        self._library = library
        library.grid(self._a.grid)
        self.path = "cuSOLVERMp" + (", on moved matrices" if self.moved else "")

    def compute(self, operands: FactorOperands) -> Found:
        """Compute, and return what was found. Collective over the context."""
        return replace(super().compute(operands), doubtful=self._problem.d is not None)

    def _eigenvalues(self, a: Array, z: Array | None) -> tuple[int, Array, int]:
        library, work, cupy = self._library, self._a, self._library.runtime.cupy
        n, dtype = work.shape[0], work.dtype
        values = cupy.zeros(n, np.dtype(dtype.char.lower()))
        vectors = new_part(self._engine, work) if z is None else z
        job = ctypes.create_string_buffer(b"V")
        with ExitStack() as closing:
            (of_a, of_v) = (
                (library.address(x, number), 1, 1, library.descriptor(work, x, closing))
                for number, x in enumerate((a, vectors))
            )
            shared = ctypes.addressof(job), FillMode.LOWER, n, *of_a, values.data.ptr, *of_v
            info = library.call("Syevd", dtype, shared)
        found: NDArray[Any] = self._engine.transport.comm.bcast(cupy.asnumpy(values), 0)
        order = np.argsort(found, kind="stable")  # equal ones come in any order
        if z is not None and (np.diff(order) != 1).any():
            self._sort(z, order)
        first, last = self._problem.subset or (0, n - 1)
        return info, found[order[first : last + 1]], first

    def _sort(self, vectors: Array, order: NDArray[np.int64]) -> None:
        """Put column ``order[j]`` of the eigenvectors into column j, by way of whole rows. Collective."""
        size, n = self._engine.transport.size, len(order)
        rows = replace(self._a, block=(-(-n // size), n), grid=Grid(size, 1), ld=None)
        whole = new_part(self._engine, rows)
        self._move(self._a, vectors, rows, whole)
        if whole.size:
            whole[...] = whole[:, self._engine.xp.asarray(order)]
        self._move(rows, whole, self._a, vectors)
