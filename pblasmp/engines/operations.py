# SPDX-License-Identifier: Apache-2.0
"""The operations of a rank on its own arrays, which an engine supplies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from ..layout.pieces import LocalPart
from .product import Workspace
from .request import LocalArray


class Operations(Protocol):
    """The operations of a rank on its own arrays. Local; on GPUs everything is queued on CuPy's current stream.

    Those of LAPACK take arrays in F order. What they do by default is for ranks that queue nothing.

    Attributes:
        xp: the module of the arrays: numpy or cupy.
        tile: columns of the tiles that cover the diagonal of a triangle.
        band: rows of a triangle that are multiplied together, while other bands are; 0: all are.
        coarser: how many times as large both are for few columns: queueing more takes longer than reading zeros.
        panel: indices of k in a panel of the algorithm "panels".
        lead: indices of k in the first of these panels; 0: as many as in the others.
        solved: equations in a panel of ``trsm``, and in the first one, likewise.
        panel_flops: floating-point operations that take as long as starting a panel's messages.
        stripes: number of parts in which a large matrix is moved and added.
        update_order: memory order of the slabs of rank-k updates, as rows × k; empty: that of the matrix.
        batches: ``gemms`` computes products at equal distances together, at the cost of more temporaries.
        workers: ranks of a node that may compute at the same time: no more than it has cores.
        factor_alone: order up to which one rank of a node factors a matrix alone.
        factor_wait: elements that travel between nodes in the time in which a rank waits for another one.
        shared_panels: makes panels in memory that the only rank has, or all share; None: ranks have their own.
        own_panels: makes panels that ranks have whole, in arrays that no other rank reads; None: ranks that do not
            share memory have all their matrices on a grid.
        grid_panels: makes panels that the ranks of a process column share, all of which reach each other; None: a rank
            has its panels whole.
        split_panels: makes those of which ranks of several nodes have parts.
        shared_from: elements that each of these ranks has of a panel, at least: for small ones, the host of every rank
            takes longer than its GPU.
        shared_width: columns of a shared panel, or as many as a block has if it is narrower.
        spread: makes few right-hand sides that move while a rank's whole panels stay.
    """

    xp: Any
    tile: int
    band: int
    coarser: int
    panel: int
    lead: int
    solved: tuple[int, int]
    panel_flops: float
    stripes: int
    update_order: str
    batches: bool
    workers: int
    factor_alone: int
    factor_wait: int
    shared_panels: Any
    own_panels: Any
    grid_panels: Any
    split_panels: Any
    shared_from: int
    shared_width: int
    spread: Any

    def workspace(self, nbytes: int, *, apart: bool = False, follows: bool = False) -> Workspace:
        """Return ``nbytes`` of scratch memory, and what local products need, as a plan reports it.

        Args:
            nbytes: of scratch memory.
            apart: whether products run at the same time, by ``concurrently``.
            follows: as there.
        """

    def scratch(self, name: str, shape: tuple[int, int], dtype: np.dtype, order: str = "C") -> LocalArray:
        """Return an uninitialized array in the buffer ``name``, which all products of the engine share."""

    def stored(self, dtype: np.dtype) -> np.dtype:
        """Return the type of local arrays of ``dtype``: itself, or bytes for types that the array library lacks."""
        return dtype

    def slab_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which copies of operands of ``dtype`` are kept until they are multiplied."""

    def store(self, d: LocalArray, x: LocalArray, dtype: np.dtype) -> None:
        """Write ``x`` into ``d``, whose elements are ``dtype``, rounding each once."""

    def writes(self, dtype: np.dtype) -> bool:
        """Return whether ``gemm`` writes results of ``dtype`` itself, rounding each once."""

    def operand(self, array: LocalArray, dtype: np.dtype, name: str = "") -> LocalArray:
        """Return ``array``, whose elements are ``dtype``, in a type that ``gemm`` takes: itself, or a copy.

        A copy may be in a buffer that the next operand called ``name`` overwrites.
        """

    def multiplies(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which operands of ``dtype`` are multiplied: one that holds their values."""

    def refusal(self, dtype: np.dtype, compute: str | None) -> str:
        """Return why ``gemm`` cannot sum products of ``dtype`` in ``compute``, or an empty string."""

    def gemm(
        self,
        alpha: complex,
        a: LocalArray,
        b: LocalArray,
        beta: complex,
        d: LocalArray,
        compute: str | None = None,
        c: LocalArray | None = None,
    ) -> None:
        """Compute ``d = alpha a b + beta c`` on 2D arrays with one contiguous dimension each.

        ``c`` is ``d`` by default, and may have another type and memory order. With ``beta == 0`` it is never read.
        ``compute`` is what products are summed in, as in ``Options``.
        """

    def gemms(
        self,
        alpha: complex,
        parts: Sequence[tuple[LocalArray, LocalArray, LocalArray, LocalArray | None]],
        beta: complex,
        compute: str | None = None,
    ) -> None:
        """Compute ``d = alpha a b + beta c`` for several a, b, d and c of equal sizes, each as ``gemm`` does."""
        for a, b, d, c in parts:
            self.gemm(alpha, a, b, beta, d, compute, c)

    def concurrently(
        self, tasks: Sequence[Callable[[], None]], *, follows: bool = False, work: Sequence[int] = ()
    ) -> None:
        """Run tasks that call ``gemm`` and the array library; none needs or overwrites the results of another.

        If they are only queued, small ones run at the same time; ``work`` says how large each is. With ``follows``, as
        many tasks of the same sizes are run in this way next, each of which needs the results of the one with its
        number alone. Until then, what is queued waits for the tasks before these, but perhaps not for these.
        """
        for task in tasks:
            task()

    def trsm(self, alpha: complex, a: LocalArray, x: LocalArray, *, lower: bool, unit: bool) -> None:
        """Replace ``x`` by the solution of ``a y = alpha x`` for a triangular ``a``."""

    def solver(
        self, a: LocalArray, x: LocalArray, *, lower: bool, unit: bool, turn: int = 0
    ) -> tuple[LocalArray, Callable[[], None]]:
        """Return where the right-hand sides of ``a x = b`` are to be, perhaps in ``x``, and what solves for ``x`` then.

        What does not depend on them is done now. ``turn``: 0 and 1 take turns if one is made before the solver that was
        made before has run.
        """
        return x, lambda: self.trsm(1, a, x, lower=lower, unit=unit)

    def multiply_part(self, g: Any, runs: Callable[[], Sequence[LocalArray]], diagonal: str) -> bool:
        """Compute a product, a ``Gemm``, in which some elements of each row of the left matrix count, or return False.

        ``runs`` returns for each row from which element on, up to which, and which is on the main diagonal, or -1, all
        in 32 bits; ``diagonal`` is as in ``LeftPart``. No others are read.
        """

    def add(
        self,
        d: LocalArray,
        alpha: complex,
        x: LocalArray,
        beta: complex,
        c: LocalArray,
        part: LocalPart | None,
        *,
        conjugate: bool,
    ) -> None:
        """Write ``alpha x + beta c`` into ``part`` of ``d``, or everywhere if None. With ``conjugate`` take conj(x).

        With ``alpha == 0`` x is not read, with ``beta == 0`` c is not. ``c`` may be ``d``.
        """

    def copy_where(self, dst: LocalArray, src: Any, mask: LocalArray | None) -> None:
        """Copy ``src`` (an array or a number) where ``mask`` is true, or everywhere if there is no mask."""

    def scale_by_power(self, x: LocalArray, exponent: int) -> None:
        """Multiply an array by a power of two, in its place; denormal numbers count, before and after."""

    def factoring(self) -> AbstractContextManager[None]:
        """Return a context for a factorization or a solve, whose products all have sizes of their own."""
        return nullcontext()

    def coarse(self) -> AbstractContextManager[None]:
        """Return a context in which products in single precision are faster, and less exact, if the engine has such."""
        return nullcontext()

    def panel_width(self, order: int) -> int:
        """Return how many columns a panel of a matrix of that order has."""

    def tallest(self, dtype: np.dtype) -> int:
        """Return how many rows the panels of ``getrf`` and ``geqrt`` can have; the same on every rank."""
        return sys.maxsize

    def potrf(self, a: LocalArray, info: LocalArray, first: int) -> None:
        """Replace the lower triangle of the square on top of ``a`` by its Cholesky factor L, and the rest by X L^-H.

        ``info``, one number, becomes 0 or, if the square is not positive definite, ``first`` more than LAPACK's INFO;
        then the rest is undefined. If there is NaN, ``a`` becomes NaN and ``info`` 0.
        """

    def getrf(self, a: LocalArray, pivots: LocalArray, info: LocalArray, first: int) -> None:
        """Replace ``a`` by its LU factors, and write its pivots.

        The pivots count from 1, and ``first`` rows above ``a``. ``info``, one number that is 0, becomes ``first`` more
        than LAPACK's INFO if ``a`` is singular.
        """

    def swap_rows(
        self, a: LocalArray, first: int, last: int, pivots: LocalArray, *, back: bool = False
    ) -> None:
        """Exchange rows ``first`` to ``last`` (half-open) of ``a`` with those in ``pivots`` (from 1)."""

    def exchanged_rows(self, pivots: Any, first: int, rows: int) -> tuple[Any, Any]:
        """Return which rows change as pivots on the host of those from ``first`` on say, and which they get."""
        held: dict[int, int] = {}
        for i, other in enumerate((pivots - 1).tolist(), first):
            held[i], held[other] = held.get(other, other), held.get(i, i)
        moved = np.array([each for each in held.items() if each[0] != each[1]], np.int64).reshape(-1, 2)
        return moved[:, 0], moved[:, 1]

    def geqrt(self, a: LocalArray, t: LocalArray) -> None:
        """Replace ``a``, no wider than high, by R and Householder vectors, and write their T."""

    @property
    def gemqrt(self) -> Any:
        """``gemqrt(v, t, x, adjoint=...)`` replaces x by Q x, or by the adjoint's product with x.

        For the reflectors that ``geqrt`` leaves in v and t; both then take matrices of any shape, and a t of fewer rows
        than columns, which has the Ts of as many columns each, side by side. None: products are used.
        """

    def larft(self, v: LocalArray, tau: LocalArray, t: LocalArray) -> None:
        """Write the T of Householder vectors below the diagonal of ``v``, whose factors are ``tau``."""
