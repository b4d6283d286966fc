# SPDX-License-Identifier: Apache-2.0
"""What tensor-parallel products have in common: D[T, N] = alpha X W + beta C.

All arrays are C-ordered; X is tokens × inputs, W inputs × outputs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ...dtypes import accumulation_dtype, is_float8
from ...epilogue import Epilogue
from ...layout import MatmulProblem, ParallelProblem
from ...layout.forms import FORMS
from ...scales import Scales
from ..local.epilogue import activate, scale_and_clip
from ..product import Product
from ..protocol import Engine, Method
from ..request import Operands, Options, Problem

__all__ = ["ParallelProduct", "TensorMethod", "parts_of", "row_major"]

Array = Any
_NO_SCALES = Scales()


def row_major(p: ParallelProblem, operands: Operands) -> tuple[Array, Array, Array | None, Array]:
    """Return X, W, C and D of a run as the product sees them: turned, transposed, conjugated. Local.

    C is D itself if the caller's C is D.
    """
    x, w, c, d = operands.a, operands.b, operands.c, operands.d
    assert w is not None
    if p.turned:
        same = c is d
        x, w, d = w.T, x.T, d.T
        c = d if same else None if c is None else c.T
    x, w = (each.T if name in p.transposed else each for name, each in (("x", x), ("w", w)))
    x, w = (each.conj() if name in p.conjugated else each for name, each in (("x", x), ("w", w)))
    return x, w, c, d


class ParallelProduct(Product):
    """The common part of the products here.

    Args:
        engine: where it runs.
        p: the product.
        options: alpha, beta, the type in which partial sums travel.
    """

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        self._engine, self._operations, self._transport = engine, engine.operations, engine.transport
        self._p, self._options = p, options
        self._float8 = is_float8(p.dtype)
        if self._float8:
            wide = self._operations.multiplies(p.dtype).name
            self.notes += (f"8-bit operands are multiplied in {wide}, which holds their values exactly",)

    def _queue(self, operands: Operands) -> None:
        x, w, c, d = row_major(self._p, operands)
        self._epilogue, self._scales = operands.epilogue, operands.scales or _NO_SCALES
        if self._scales.amax is not None:
            self._scales.amax[...] = 0
        try:
            self._run(x, w, c, d, operands.gathered)
        finally:
            self._epilogue = self._scales = None  # type: ignore[assignment]

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        raise NotImplementedError

    def _turns(self) -> list[tuple[int, int]]:
        """Return the pairs of ranks to send to and to receive from, in an order that spreads the receivers."""
        me, size = self._transport.rank, self._transport.size
        return [((me + step) % size, (me - step) % size) for step in range(1, size)]

    def _tokens(self, x: Array) -> Array:
        return self._operations.operand(x, self._p.dtype, "x")

    def _weights(self, w: Array) -> Array:
        w = self._operations.operand(w, self._p.w_dtype, "w")
        return w.T if self._p.outputs_first else w

    def _multiply(self, x: Array, w: Array, c: Array | None, d: Array, columns: slice) -> None:
        """Compute a part of D from W's ``columns``, and apply the epilogue; ``c`` may be ``d``."""
        exact = accumulation_dtype(self._p.out_dtype)
        late = (self._epilogue is not None or self._float8) and exact != d.dtype  # D is rounded at the end
        target = self._operations.scratch("sum", d.shape, exact) if late else d
        self._sum(x, w, c, target)
        self._finish(target, columns)
        if late:
            self._operations.store(d, target, self._p.out_dtype)

    def _finish(self, target: Array, columns: slice) -> None:
        """Add the bias of W's ``columns``, apply the activation and D's scale."""
        e: Epilogue | None = self._epilogue
        if e is not None:
            activate(self._engine.xp, e if e.bias is None else replace(e, bias=e.bias[columns]), target, None)
        scale_and_clip(self._engine.xp, self._scales, self._p.out_dtype, target)

    def _sum(self, x: Array, w: Array, c: Array | None, target: Array) -> None:
        """Compute ``target = alpha x w + beta c``."""
        alpha, beta = self._options.alpha, self._options.beta
        if self._float8:
            self._sum_scaled(x, w, c, target)
            return
        if beta == 0 or c is None:
            beta = 0
        elif c is not target:
            target[...] = c
        if alpha != 0 and x.size and w.size:
            self._operations.gemm(alpha, x, w, beta, target, self._options.compute)
        elif beta == 0:
            target[...] = 0
        else:
            target *= beta

    def _sum_scaled(self, x: Array, w: Array, c: Array | None, target: Array) -> None:
        """Compute ``target = alpha (a x) (b w) + beta c`` in float32, with the scales' current values."""
        options, exact = self._options, accumulation_dtype(self._p.dtype)
        scales = [scale for scale in (self._scales.a, self._scales.b) if scale is not None]
        numbers = [scale for scale in scales if isinstance(scale, (int, float))]
        separate = target.dtype != exact or c is target
        product = self._operations.scratch("product", target.shape, exact) if separate else target
        if options.alpha != 0 and x.size and w.size:
            self._operations.gemm(math.prod([options.alpha, *numbers]), x, w, 0, product, options.compute)
            for scale in scales:
                if not isinstance(scale, (int, float)):
                    product *= scale.reshape(())
        else:
            product[...] = 0
        if options.beta != 0 and c is not None:
            product += options.beta * c.astype(exact)
        if separate:
            target[...] = product

    def _share_amax(self) -> None:
        """Replace amax by the largest of all ranks, since every rank has all of D."""
        amax, transport = self._scales.amax, self._transport
        if amax is None or transport.size == 1:
            return
        found = self._operations.scratch("amax", (transport.size, 1), np.dtype(np.float32))
        found[transport.rank] = amax.reshape(1)
        turns = self._turns()
        mine, others = found[transport.rank], [(found[source], source) for _, source in turns]
        transport.start([(mine, to) for to, _ in turns], others).finish()
        amax[...] = found.max()


def parts_of(c: Array | None, d: Array, rows: slice) -> tuple[Array | None, Array]:
    """Return the same rows of C and of D, as one array if C is D."""
    part = d[rows]
    return (None if c is None else part if c is d else c[rows]), part


class TensorMethod(Method):
    """A tensor-parallel product, for some of its forms.

    Attributes:
        forms: those that it computes.
    """

    forms: tuple[str, ...] = tuple(FORMS)

    def serves(self, problem: Problem) -> bool:
        """Return whether a problem is, or has, one of the forms. Local."""
        if isinstance(problem, MatmulProblem):
            return problem.scheme in self.forms
        return isinstance(problem, ParallelProblem) and problem.form in self.forms

    def view(self, problem: Problem) -> Problem | str:
        """Return a problem as a tensor-parallel product, or why it is not one. Local."""
        return ParallelProblem.of_matmul(problem) if isinstance(problem, MatmulProblem) else problem
