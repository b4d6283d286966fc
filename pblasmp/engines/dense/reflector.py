# SPDX-License-Identifier: Apache-2.0
"""The block reflector I - V T V^H of a panel."""

from __future__ import annotations

from typing import Any

from ..arrays import adjoint_of, set_diagonal
from ..operations import Operations

Array = Any


class Reflector:
    """I - V T V^H of one panel, or a rank's rows of V, as what applies it needs it. Local.

    Args:
        operations: the engine's.
        panel: the panel from its diagonal on, whose columns up to ``count`` are V below the diagonal; or rows of it.
        t: T; None where only ``products`` and ``subtract`` are needed.
        count: how many reflectors there are.
        adjoint: the adjoint is applied.
        below: the rows are below the diagonal block.
    """

    def __init__(
        self,
        operations: Operations,
        panel: Array,
        t: Array,
        count: int,
        *,
        adjoint: bool,
        below: bool = False,
    ) -> None:
        xp = operations.xp
        self._operations, self._count = operations, 0 if below else count
        self._rest = panel[self._count :, :count]
        self._top = None
        if not below:
            self._top = xp.tril(panel[:count, :count], -1)
            set_diagonal(xp, self._top, 1)
        self._t = None
        if t is not None:
            t = xp.triu(t[:count, :count])
            self._t = t.conj().T if adjoint else t

    def apply(self, x: Array) -> None:
        """Replace ``x`` by its product with it; the rows of V are all its rows."""
        w = self._operations.xp.empty((self._count, x.shape[1]), x.dtype, order="F")
        self.products(x, w)
        self.subtract(x, self.combined(w))

    def products(self, x: Array, w: Array) -> None:
        """Write V^H x to ``w``."""
        beta = 0
        if self._top is not None:
            self._operations.gemm(1, adjoint_of(self._top), x[: self._count], 0, w)
            beta = 1
        self._operations.gemm(1, adjoint_of(self._rest), x[self._count :], beta, w)

    def gram(self, products: Array) -> None:
        """Write V^H V to ``products``."""
        beta = 0
        if self._top is not None:
            self._operations.gemm(1, adjoint_of(self._top), self._top, 0, products)
            beta = 1
        self._operations.gemm(1, adjoint_of(self._rest), self._rest, beta, products)

    def combined(self, w: Array) -> Array:
        """Return T w, or the product with its adjoint."""
        w2 = self._operations.xp.empty_like(w)
        self._operations.gemm(1, self._t, w, 0, w2)
        return w2

    def subtract(self, x: Array, w: Array) -> None:
        """Subtract V w from ``x``."""
        if self._top is not None:
            self._operations.gemm(-1, self._top, w, 1, x[: self._count])
        self._operations.gemm(-1, self._rest, w, 1, x[self._count :])
