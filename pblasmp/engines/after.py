# SPDX-License-Identifier: Apache-2.0
"""Epilogues and scales computed on this rank's part of D, with NumPy or CuPy: on GPUs where they are not fused.

Source: cuBLASLt's documentation of its epilogues; GELU is the tanh form, as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..dtypes import accumulation_dtype, element_type, is_float8
from ..epilogue import Epilogue, along, vector_axis
from ..layout import MatmulProblem, MatrixDescriptor
from ..scales import Scales

__all__ = ["After", "activate", "store"]

Array = Any

_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715


class After:
    """What follows a product. Making one is local, calling it collective over the context.

    Args:
        xp: numpy or cupy.
        epilogue, scales: over arrays of that kind: see their ``adopted``.
        p: the product.
        rank: this rank.
        sum_ranks: replaces a contiguous array by its sum over all ranks. Collective.
    """

    def __init__(
        self,
        xp: Any,
        epilogue: Epilogue,
        scales: Scales,
        p: MatmulProblem,
        rank: int,
        sum_ranks: Callable[[Array], None],
    ) -> None:
        self._xp, self._p, self._rank, self._sum_ranks = xp, p, rank, sum_ranks
        self._epilogue: Epilogue | None = epilogue
        self._scales: Scales | None = scales
        self._planned = bool(epilogue.name)
        self._inside = rank < p.d.grid.size

    def follow(self, epilogue: Epilogue | None, scales: Scales | None) -> None:
        """Let these, made of the same parts, take the place of the planned ones. Local."""
        self._epilogue, self._scales = epilogue, scales or Scales()

    def release(self) -> None:
        """Forget the arrays of both. Local."""
        self._epilogue = self._scales = None

    def unit(self) -> float:
        """Return what a product of one unit of A and one of B stands for. Local."""
        assert self._scales is not None, "scales count only while they are there"
        return _number(self._scales.a) * _number(self._scales.b)

    def __call__(self, x: Array, a: Array, b: Array) -> None:
        """Finish ``x``, this rank's part of the product in the type that it is summed in, in place.

        Args:
            a, b: this rank's part of A and B.
        """
        e, scales, p = self._epilogue if self._planned else Epilogue(), self._scales, self._p
        assert e is not None, "an epilogue follows only while it is there"
        assert scales is not None, "scales count only while they are there"
        if self._inside:
            last = along(p.d)
            activate(self._xp, e, x if last else x.T, e.aux if e.aux is None or last else e.aux.T)
        if e.bias_grad is not None:
            sums = x.sum(axis=1 - along(p.d), dtype=x.dtype) if self._inside else None
            self._write(e.bias_grad, sums, p.d, along(p.d), along(p.d))
        for name, matrix, array, op in (("bias_grad_a", p.a, a, p.op_a), ("bias_grad_b", p.b, b, p.op_b)):
            if getattr(e, name) is None:
                continue
            axis = vector_axis(name, p.d)
            stored = axis if op == "N" else 1 - axis
            sums = None
            if self._rank < matrix.grid.size:
                sums = array.astype(accumulation_dtype(matrix.dtype)).sum(axis=1 - stored)
                sums = sums.conj() if op == "C" else sums
            self._write(getattr(e, name), sums, matrix, stored, axis)
        if scales.amax is not None:
            scales.amax[...] = 0
        store(self._xp, scales, p.d.dtype, x)

    def _write(
        self, out: Array, sums: Array | None, matrix: MatrixDescriptor, stored: int, axis: int
    ) -> None:
        """Add up the ranks' ``sums`` of ``matrix``, one per index of its axis ``stored``, and keep this rank's part.

        Args:
            out: where to; it has one entry per index of D's axis ``axis``.
        """
        xp, p = self._xp, self._p
        if matrix is p.d and p.scheme == "ar":  # every rank has all of D
            if self._inside:
                out[...] = sums
            return
        whole = xp.zeros(matrix.shape[stored], accumulation_dtype(p.d.dtype))
        if sums is not None:
            whole[xp.asarray(matrix.global_indices(self._rank)[stored])] = sums
        self._sum_ranks(whole)
        if self._inside:
            if out.size < whole.size:
                whole = whole[xp.asarray(p.d.global_indices(self._rank)[axis])]
            out[...] = whole


def activate(xp: Any, e: Epilogue, v: Array, aux: Array | None) -> None:
    """Add the bias and apply the activation in place. Local.

    Args:
        xp: numpy or cupy.
        e: says which; its arrays are of that kind.
        v: a part of D in the type that it is summed in, its contiguous dimension last.
        aux: the epilogue's auxiliary array, turned like ``v``.
    """
    if e.bias is not None:
        v += e.bias.astype(v.dtype)
    if e.activation == "relu":
        if aux is not None:
            _pack(xp, v > 0, aux)
        xp.maximum(v, 0, out=v)
    elif e.activation == "gelu":
        if aux is not None:
            aux[...] = v
        v *= 0.5 * (1 + xp.tanh(_ROOT * (v + _CUBE * v * v * v)))
    elif e.activation == "drelu":
        v *= _unpack(xp, aux, v.shape[1])
    elif e.activation == "dgelu":
        at = aux.astype(v.dtype)  # type: ignore[union-attr]  # Epilogue sees to it
        t = xp.tanh(_ROOT * (at + _CUBE * at * at * at))
        v *= 0.5 * (1 + t) + 0.5 * at * (1 - t * t) * _ROOT * (1 + 3 * _CUBE * at * at)


def store(xp: Any, scales: Scales, dtype: np.dtype, v: Array) -> None:
    """Let ``amax`` see a part of D, and make it in place what is stored of a D of ``dtype``. Local.

    Args:
        xp: numpy or cupy.
        scales: over arrays of that kind; ``amax`` holds the largest absolute value of the parts before.
        dtype: D's; a D of 8 bits is NumPy's.
        v: the part, in the type that it is summed in.
    """
    if scales.amax is not None and v.size:
        scales.amax[...] = xp.maximum(scales.amax, abs(v).max())
    if is_float8(dtype):
        largest = element_type(dtype).largest
        v *= _number(scales.d)
        xp.clip(v, -largest, largest, out=v)


def _number(scale: Any) -> float:
    """Return a scale: a number, or what an array of one number holds; 1 where there is none."""
    return 1.0 if scale is None else float(scale.item() if hasattr(scale, "item") else scale)


def _pack(xp: Any, bits: Array, out: Array) -> None:
    """Write a boolean matrix into bytes, eight neighbours of a row in each, lowest bit first; the rest is 0."""
    padded = xp.zeros((out.shape[0], out.shape[1] * 8), xp.uint8)
    padded[:, : bits.shape[1]] = bits
    weights = 1 << xp.arange(8, dtype=xp.uint8)
    out[...] = (padded.reshape(out.shape[0], out.shape[1], 8) * weights).sum(axis=2, dtype=xp.uint8)


def _unpack(xp: Any, packed: Array, count: int) -> Array:
    """Return the first ``count`` bits of each row, each as 0 or 1."""
    bits = (packed[:, :, None] >> xp.arange(8, dtype=xp.uint8)) & 1
    return bits.reshape(packed.shape[0], 8 * packed.shape[1])[:, :count]
