# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues and singular values by ScaLAPACK, ELPA or the LAPACK of one rank, on matrices moved to its layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import real_dtype
from ...layout import Grid, MatrixDescriptor
from ...layout.factor_problem import FactorProblem
from ...layout.intersection import Piece, Stretch, copy
from ...layout.pieces import LocalPart
from ..arrays import move, new_part, same_memory, window_of
from ..local.spectral import LOWER, OneRankMethod, OneRankProduct, SpectralMethod, SpectralProduct
from ..product import Product
from ..protocol import Engine, Method
from ..request import AnyProblem, Operands, Options
from .mpi_libraries import ELPA, SCALAPACK, Elpa, MpiLibrary, Scalapack, library_of

Array = NDArray[Any]

_SHARED = 32 << 20  # bytes of a matrix, up to which the ranks of a node copy from each other's memory
_BLOCK = 64  # of matrices that are moved
_BLOCKS = 16, 256  # of those that stay


def work_layout(x: MatrixDescriptor, size: int) -> MatrixDescriptor:
    """Return the layout in which a matrix is computed with by ``size`` ranks: its own, if that is a good one. Local.

    ScaLAPACK and ELPA take F order, square blocks, and a matrix that begins on the first process. ELPA fails if a
    process has nothing of it.
    """
    rows, cols = x.block
    if (
        rows == cols
        and _BLOCKS[0] <= rows <= _BLOCKS[1]
        and rows * max(x.grid.nprow, x.grid.npcol) <= max(x.shape)
        and x.grid.size == size
        and x.source == x.lead == (0, 0)
    ):
        return replace(x, order="F", ld=None)
    grid = Grid.squarest(size)
    block = max(1, min(_BLOCK, max(x.shape) // max(grid.nprow, grid.npcol)))
    return MatrixDescriptor(x.shape, (block, block), grid, dtype=x.dtype, order="F")


class ScalapackProduct(SpectralProduct):
    """Eigenvalues or singular values by ScaLAPACK."""

    def __init__(self, engine: Engine, problem: FactorProblem, library: Scalapack) -> None:
        super().__init__(engine, problem, work_layout(problem.a, engine.transport.size))
        self._library = library
        library.grid(self._a.grid)
        self.path = f"ScaLAPACK, p?{self._routine}" + (", on moved matrices" if self.moved else "")

    @property
    def _few(self) -> bool:
        """Whether so few eigenvectors are asked for that one rank is as fast with them as all ranks with all."""
        p, size = self._problem, self._engine.transport.size
        count = 0 if p.subset is None or p.d is None else p.subset[1] - p.subset[0] + 1
        return 0 < 2 * size * count**2 <= p.a.shape[0] ** 2

    @property
    def _routine(self) -> str:
        """The routine's name without the letter of its type."""
        p = self._problem
        if p.routine == "svd":
            return "gesvd"
        family = "he" if p.a.dtype.kind == "c" else "sy"
        return family + ("ev" if p.d is None else "ntrd" if self._few else "evd")

    @property
    def _more(self) -> int:
        """The elements that p?ormtr needs; p?syevd asks for fewer on some grids, and then returns wrong vectors."""
        block, (rows, cols) = self._a.block[0], self._a.local_shape(0)
        return block * (rows + cols + 2 * block)

    @property
    def _works(self) -> list[np.dtype | Array]:
        """The types of the workspaces of p?syev, p?syevd and p?syntrd."""
        dtype = self._a.dtype
        real = [real_dtype(dtype)] if dtype.kind == "c" else []
        integers = [np.dtype(np.int32)] if self._routine.endswith("d") and not self._few else []
        return [dtype, *real, *integers]

    def _eigenvalues(self, a: Array, z: Array | None) -> tuple[int, Array, int]:
        if z is not None and self._few:
            return self._few_eigenvalues(a, z)
        p, n, library = self._problem, self._a.shape[0], self._library
        values = np.zeros(n, real_dtype(p.a.dtype))
        of_a = library.operand(self._a, a)
        of_z = library.operand(self._a, a if z is None else z)
        shared = ("N" if z is None else "V", "L", n, *of_a, values, *of_z)
        info = library.call(self._routine, p.a.dtype, shared, self._works, p.routine, self._more)
        first, last = p.subset or (0, n - 1)
        return info, values[first : last + 1], first

    def _few_eigenvalues(self, a: Array, z: Array) -> tuple[int, Array, int]:
        """Compute those of a tridiagonal matrix by LAPACK on one rank, by bisection and inverse iteration.

        ScaLAPACK 2.2's own p?syevr returns eigenvalues of other indices, and other vectors, of matrices that split into
        blocks, or ranks wait for each other for ever.
        """
        p, engine, library, work = self._problem, self._engine, self._library, self._a
        assert p.subset is not None
        rank, comm = engine.transport.rank, engine.transport.comm
        n, count, real = work.shape[0], p.subset[1] - p.subset[0] + 1, real_dtype(p.a.dtype)
        _, cols = work.global_indices(rank)
        diagonal, beside, tau = (np.zeros(max(1, len(cols)), each) for each in (real, real, p.a.dtype))
        of_a = library.operand(work, a)
        shared: tuple[Any, ...] = ("L", n, *of_a, diagonal, beside, tau)
        library.call(self._routine, p.a.dtype, shared, self._works, p.routine)
        whole = np.zeros((2, n))
        if work.grid.coords(rank)[0] == 0:  # all process rows have the same numbers
            whole[:, cols] = diagonal[: len(cols)], beside[: len(cols)]
        comm.sum_into(whole)
        alone = MatrixDescriptor((n, count), (n, count), Grid(1, 1), dtype=p.a.dtype, order="F")
        vectors = new_part(engine, alone)

        def compute() -> Array:
            from scipy.linalg import eigh_tridiagonal

            found: Array
            found, vectors[...] = eigh_tridiagonal(
                whole[0], whole[1, :-1], select="i", select_range=p.subset, lapack_driver="stebz"
            )
            return found.astype(real)

        info, values = self._alone(compute)
        wanted = slice(None), slice(count)
        move(engine, alone, work[wanted], (vectors, window_of(z, work, rank, wanted)))
        shared = ("L", "L", "N", n, count, *of_a, tau, *library.operand(work, z))
        back = "unmtr" if p.a.dtype.kind == "c" else "ormtr"
        library.call(back, p.a.dtype, shared, [p.a.dtype], p.routine, self._more)
        return info, values, 0

    def _singular_values(self, a: Array, u: Array | None, vh: Array | None) -> tuple[int, Array]:
        p, library, work = self._problem, self._library, self._a
        (m, n), least = work.shape, min(work.shape)
        real = real_dtype(p.a.dtype)
        values = np.zeros(least, real)
        of_u = library.operand(work, a) if u is None else library.operand(replace(work, shape=(m, least)), u)
        of_vh = (
            library.operand(work, a) if vh is None else library.operand(replace(work, shape=(least, n)), vh)
        )
        works: list[np.dtype | Array] = [p.a.dtype]
        if p.a.dtype.kind == "c":
            works.append(np.empty(1 + 4 * max(m, n), real))
        jobs = "N" if u is None else "V", "N" if vh is None else "V"
        shared = *jobs, m, n, *library.operand(work, a), values, *of_u, *of_vh
        return library.call("gesvd", p.a.dtype, shared, works, p.routine, self._more), values


class ElpaProduct(SpectralProduct):
    """Eigenvalues by ELPA."""

    exponents = range(16)  # of elements below 1e-5 they are wrong

    def __init__(self, engine: Engine, problem: FactorProblem, library: Elpa) -> None:
        super().__init__(engine, problem, work_layout(problem.a, engine.transport.size))
        self._library = library
        self.path = "ELPA" + (", on moved matrices" if self.moved else "")

    def _new(self, work: MatrixDescriptor, d: MatrixDescriptor | None, array: Array, keep: Array) -> Array:
        """Return an array for A that the other ranks can read, unless it is too large. Collective."""
        self._parts, transport = self._readable_parts(), self._engine.transport
        a = self._parts[transport.rank] if self._parts else super()._new(work, d, array, keep)
        if transport.size == 1:
            self._parts = {0: a}
        return a

    def _take(self, given: Array, a: Array) -> None:
        """Write both triangles to ``a``: ELPA reads both. Collective."""
        p, work, engine = self._problem, self._a, self._engine
        if self._parts:
            move(engine, p.a, work, (given, a))
            if p.conjugate:
                np.conjugate(a, out=a)
            engine.transport.fence()
            self._mirror(self._parts)
            engine.transport.fence()  # A is scaled, and overwritten
            return
        if self.moved:
            there = new_part(engine, work)
            move(engine, p.a, work, (given, there))
            given = there
        move(engine, work.T, work, (given.T, a))
        is_complex = a.dtype.kind == "c"
        if is_complex and not p.conjugate:
            np.conjugate(a, out=a)
        lower = LocalPart(LOWER, *work.global_indices(engine.transport.rank), hermitian=is_complex)
        engine.operations.add(a, 1, given, 0, a, lower, conjugate=p.conjugate)

    def _mirror(self, parts: Mapping[int, Array]) -> None:
        """Write what the ranks' parts have below the diagonal to this rank's part above it. Local."""
        grid, n, block = self._a.grid, self._a.shape[0], self._a.block[0]
        p, q = grid.coords(self._engine.transport.rank)
        mine, period = parts[self._engine.transport.rank], math.lcm(grid.nprow, grid.npcol)
        for number in range(q, -(-n // block), grid.npcol):  # of a block of columns
            width = min(block, n - number * block)
            below, right = (number // each * block for each in (grid.nprow, grid.npcol))
            for first in range(p, min(number, p + period), grid.nprow):  # blocks of rows that one rank has
                to, of = (
                    (first // each * block, period // each * block) for each in (grid.nprow, grid.npcol)
                )
                down = Stretch(len(range(first, number, period)), block, *of, *to)
                piece = Piece((down,), (Stretch(1, width, below, 0, right, 0),))
                copy(mine, parts[grid.rank(number % grid.nprow, first % grid.npcol)].T, piece, conjugate=True)
            if number % grid.nprow == p:
                tile = mine[below : below + width, right : right + width]
                np.copyto(tile, tile.conj().T, where=np.tri(width, dtype=bool).T)
                if tile.dtype.kind == "c":
                    np.fill_diagonal(tile.imag, 0)

    def _readable_parts(self) -> dict[int, Array]:
        """Return memory that is kept, for the ranks' parts of A, and that all can read; none if it is too much.

        Collective.
        """
        work, transport = self._a, self._engine.transport
        ranks, shared = transport.size, transport.size > 1
        shapes = [work.local_shape(each) for each in range(ranks)]
        size = max(math.prod(shape) for shape in shapes) * work.dtype.itemsize
        if ranks * size > _SHARED or ranks > len(transport.nodes[0]) or (shared and transport.why_not_shared):
            return {}
        memory = transport.buffer("parts", ranks * size, shared=shared)
        return {
            each: np.ndarray(shape, work.dtype, memory[each * size :].data, order="F")
            for each, shape in enumerate(shapes)
        }

    def _eigenvalues(self, a: Array, z: Array | None) -> tuple[int, Array, int]:
        work, library = self._a, self._library
        first, last = self._problem.subset or (0, work.shape[0] - 1)
        if not library.single:  # as Debian's is built
            a = a.astype(np.promote_types(a.dtype, np.float64), order="F", copy=False)
        vectors = (
            None if z is None else z if (z.dtype, z.strides) == (a.dtype, a.strides) else np.zeros_like(a)
        )
        info, values = library.solve(replace(work, dtype=a.dtype), a, vectors, last + 1)
        if z is not None and vectors is not z:
            z[...] = vectors
        return info, values[first : last + 1].astype(real_dtype(work.dtype)), first


class LapackProduct(OneRankProduct):
    """Eigenvalues or singular values by LAPACK."""

    path = "LAPACK on one rank"

    def _eigh(self, a: Array, subset: tuple[int, int] | None, *, vectors: bool) -> Array:
        from scipy.linalg import eigh

        how: dict[str, Any] = {} if subset is None else {"subset_by_index": subset, "driver": "evr"}
        if vectors and subset is None:
            how["driver"] = "evd"
        found = eigh(a, lower=True, overwrite_a=True, check_finite=False, eigvals_only=not vectors, **how)
        values: Array = found[0] if vectors else found
        if not vectors:
            return values
        columns = found[1]
        place = a if subset is None else a[:, subset[0] : subset[1] + 1]
        if not same_memory(columns, place):
            place[...] = columns
        return values

    def _svd(self, a: Array, *, vectors: bool) -> tuple[Array, Array, Array]:
        from scipy.linalg import svd

        found = svd(a, full_matrices=False, compute_uv=vectors, overwrite_a=True, check_finite=False)
        return found if vectors else (a, found, a)


SMALL, SINGULAR = 200, (4, 2000)
"""The largest order, or longer side, for which one rank is as fast as all; for singular values with how many ranks.

p?gesvd iterates, and LAPACK divides: one rank needs 0.2 of its time on one, 0.45 on two, 0.65 on four.
"""

_INT_MAX = 2**31 - 1


def _never_ends(p: FactorProblem, size: int) -> bool:
    """Return whether p?gesvd fails on so small a matrix, as that of ScaLAPACK 2.2 does. Local.

    It deals out the rows of U and the columns of V^H to all ranks. One that gets none computes the values by another
    algorithm, so their last bits differ: INFO is min(m, n) + 1, or ranks wait for each other for ever. So do they for a
    single row of two elements.
    """
    wanted = [length for x, length in zip((p.d, p.c), p.a.shape, strict=True) if x is not None]
    return size > 1 and (p.a.shape == (1, 2) or (min(p.a.shape) > 1 and 0 < max(wanted, default=0) < size))


class LibraryMethod(SpectralMethod):
    """A library that calls MPI.

    Args:
        name, least: of the algorithm.
        routines: what it computes.
        library: the library, and what makes of it what its products call.
        misfit: returns why a matrix does not fit the library, which so many ranks call, or an empty string.
    """

    def __init__(
        self,
        name: str,
        least: float,
        routines: Sequence[str],
        library: tuple[MpiLibrary, type[Elpa | Scalapack]],
        product: Callable[[Engine, FactorProblem, Any], Product],
        misfit: Callable[[FactorProblem, int], str],
    ) -> None:
        self.name, self.least, self._routines = name, least, routines
        self._library, self._product, self._misfit = library, product, misfit

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, FactorProblem) and problem.routine in self._routines

    def refusal(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands | None
    ) -> str:
        if why := self._misfit(problem, engine.transport.size):
            return why
        found = library_of(engine, *self._library)
        return found if isinstance(found, str) else ""

    def prepare(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands
    ) -> Product:
        return self._product(engine, problem, library_of(engine, *self._library))


def _misfit_of_scalapack(p: FactorProblem, size: int) -> str:
    work = work_layout(p.a, size)
    rows, cols = work.local_shape(0)
    if max(rows * cols, *work.shape) > _INT_MAX:
        return "a rank would have more elements than ScaLAPACK's 32-bit integers count: take more ranks"
    if p.routine == "svd" and _never_ends(p, size):
        return "p?gesvd fails, or never ends, on matrices with fewer rows and columns than there are ranks"
    return ""


def _misfit_of_elpa(p: FactorProblem, size: int) -> str:
    grid = work_layout(p.a, size).grid
    few = 1 < p.a.shape[0] < max(grid.nprow, grid.npcol)
    return f"ELPA needs at least as many rows as its {grid} have: take fewer ranks" if few else ""


METHODS: tuple[Method, ...] = (
    OneRankMethod("lapack", LapackProduct, SMALL, SINGULAR),
    LibraryMethod("elpa", 0.9, ("eigh",), (ELPA, Elpa), ElpaProduct, _misfit_of_elpa),
    LibraryMethod(
        "scalapack", 1.0, ("eigh", "svd"), (SCALAPACK, Scalapack), ScalapackProduct, _misfit_of_scalapack
    ),
)
