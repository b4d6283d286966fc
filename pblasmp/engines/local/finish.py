# SPDX-License-Identifier: Apache-2.0
"""Epilogues and scales computed on this rank's part of D, if the product itself does not include them.

Source: cuBLASLt's documentation of its epilogues; GELU is the tanh form, as there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...dtypes import accumulation_dtype, element_type, is_float8
from ...epilogue import Epilogue, Scales, along, vector_axis
from ...layout import MatmulProblem, MatrixDescriptor
from ..protocol import Engine
from ..request import Operands

Array = Any

_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715


class Finish:
    """The computation that follows a product on this rank. Making one is local."""

    def __init__(self, engine: Engine, p: MatmulProblem) -> None:
        self._xp, self._p, self._transport = engine.xp, p, engine.transport
        self._rank = engine.transport.rank
        self._inside = self._rank < p.d.grid.size

    @staticmethod
    def needed(p: MatmulProblem, operands: Operands | None) -> bool:
        """Return whether anything follows a product. Local."""
        given = operands is not None and (operands.epilogue is not None or operands.scales is not None)
        return given or is_float8(p.d.dtype)

    @staticmethod
    def why_no_graph(operands: Operands) -> str:
        """Return why an epilogue cannot be recorded as a CUDA graph, or an empty string. Local."""
        e = operands.epilogue
        if e is not None and {"bias_grad", "bias_grad_a", "bias_grad_b"} & {*e.given}:
            return "gradients of a bias are summed with indices that are copied from the host"
        return read_by_host(operands)

    def __call__(self, x: Array, operands: Operands, *, epilogue: bool = True) -> None:
        """Finish ``x``, this rank's part of the product in the type that it is summed in, in place.

        Collective over the context.

        Args:
            x: the part, in the memory order of D.
            epilogue: False: only scales are applied.
        """
        e = (operands.epilogue if epilogue else None) or Epilogue()
        scales, p = operands.scales or Scales(), self._p
        if self._inside:
            last = along(p.d)
            activate(self._xp, e, x if last else x.T, e.aux if e.aux is None or last else e.aux.T)
        if e.bias_grad is not None:
            sums = x.sum(axis=1 - along(p.d), dtype=x.dtype) if self._inside else None
            self._write(e.bias_grad, sums, p.d, along(p.d), along(p.d))
        for name, matrix, array, op in (
            ("bias_grad_a", p.a, operands.a, p.op_a),
            ("bias_grad_b", p.b, operands.b, p.op_b),
        ):
            if getattr(e, name) is None:
                continue
            axis = vector_axis(name, p.d)
            stored = axis if op == "N" else 1 - axis
            sums = None
            if self._rank < matrix.grid.size and array is not None:
                sums = array.astype(accumulation_dtype(matrix.dtype)).sum(axis=1 - stored)
                sums = sums.conj() if op == "C" else sums
            self._write(getattr(e, name), sums, matrix, stored, axis)
        if scales.amax is not None:
            scales.amax[...] = 0
        scale_and_clip(self._xp, scales, p.d.dtype, x)

    def _write(
        self, out: Array, sums: Array | None, matrix: MatrixDescriptor, stored: int, axis: int
    ) -> None:
        """Add up the ranks' ``sums`` of ``matrix``, one per index of its axis ``stored``, and keep this rank's part.

        Args:
            out: where to write; it has one entry per index of D's axis ``axis``.
        """
        xp, p = self._xp, self._p
        if matrix is p.d and p.scheme == "matmul_allreduce":  # every rank has all of D
            if self._inside:
                out[...] = sums
            return
        total = xp.zeros(matrix.shape[stored], accumulation_dtype(p.d.dtype))
        if sums is not None:
            total[xp.asarray(matrix.global_indices(self._rank)[stored])] = sums
        self._transport.sum_ranks(total)
        if self._inside:
            if out.size < total.size:
                total = total[xp.asarray(p.d.global_indices(self._rank)[axis])]
            out[...] = total


def activate(xp: Any, e: Epilogue, v: Array, aux: Array | None) -> None:
    """Add the bias and apply the activation in place. Local.

    Args:
        e: the epilogue; its arrays are of that module.
        v: a part of D in the type that it is summed in, its contiguous dimension last.
        aux: the epilogue's auxiliary array, transposed like ``v``.
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


def scale_and_clip(xp: Any, scales: Scales, dtype: np.dtype, v: Array) -> None:
    """Update ``amax``, then scale ``v`` and clip it to the range of ``dtype``. Local.

    Args:
        scales: with arrays of that module; ``amax`` holds the largest absolute value of the earlier parts.
        dtype: the type of D; only NumPy arrays may have 8 bits.
        v: the part, in the type that it is summed in.
    """
    if scales.amax is not None and v.size:
        scales.amax[...] = xp.maximum(scales.amax, abs(v).max())
    if is_float8(dtype):
        largest = element_type(dtype).largest
        v *= number(scales.d)
        xp.clip(v, -largest, largest, out=v)


def number(scale: Any) -> float:
    """Return the value of a scale, which is a number, an array of one number, or None for 1. Local."""
    return 1.0 if scale is None else float(scale.item() if hasattr(scale, "item") else scale)


def read_by_host(operands: Operands) -> str:
    """Return which scales the host reads in every run, or an empty string. Local."""
    s = operands.scales
    if s is None or all(x is None or isinstance(x, float) for x in (s.a, s.b)):
        return ""
    return "scales of A and B that are arrays are read by the host in every run; numbers are not"


def _pack(xp: Any, bits: Array, out: Array) -> None:
    """Write a boolean matrix into bytes, eight neighbors of a row in each, lowest bit first; the rest is 0."""
    padded = xp.zeros((out.shape[0], out.shape[1] * 8), xp.uint8)
    padded[:, : bits.shape[1]] = bits
    weights = 1 << xp.arange(8, dtype=xp.uint8)
    out[...] = (padded.reshape(out.shape[0], out.shape[1], 8) * weights).sum(axis=2, dtype=xp.uint8)


def _unpack(xp: Any, packed: Array, count: int) -> Array:
    """Return the first ``count`` bits of each row, each as 0 or 1."""
    bits = (packed[:, :, None] >> xp.arange(8, dtype=xp.uint8)) & 1
    return bits.reshape(packed.shape[0], 8 * packed.shape[1])[:, :count]
