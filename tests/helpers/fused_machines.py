# SPDX-License-Identifier: Apache-2.0
"""Machines that also compute what is fused with a product: epilogues, and the scales of 8-bit floats."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pblasmp.bindings import MatmulAttribute, ResultScheme
from pblasmp.dtypes import as_dtype
from pblasmp.engines.gpu.types import DATA_TYPES
from tests.helpers import epilogues, float8
from tests.helpers.machine import Multiplying

A = MatmulAttribute


class Following(Multiplying):
    """Also computes epilogues, in column-major terms, from the attributes and nothing else."""

    def _put(self, told: dict[str, int], letter: str, whole: np.ndarray, *extents: Any) -> None:
        if "matmulDesc" not in told:
            super()._put(told, letter, whole, *extents)
            return
        stored = self.attributes(told["matmulDesc"])
        kind = stored.get(A.EPILOGUE, 0)
        desc = self.made[told["desc" + letter.upper()]]
        rows, cols = self._owned(desc)
        part = whole[np.ix_(rows, cols)]
        if kind & 4:
            part = part + self._vector(stored, len(rows))[:, None]
        aux = self._aux(stored, kind, part.shape) if kind & 128 else None
        if kind & 2:
            if aux is not None:
                aux[...] = np.packbits(part > 0, axis=0, bitorder="little")
            part = np.maximum(part, 0)
        if kind & 32:
            if aux is not None:
                aux[...] = part
            part = epilogues.tanh_gelu(part)
        if kind & 8:
            part = part * np.unpackbits(aux, axis=0, bitorder="little")[: len(rows)]
        if kind & 64:
            part = part * epilogues.tanh_gelu_slope(aux.astype(np.float64))
        if kind & 16:
            self._vector(stored, len(rows))[:] = self._summed(part.sum(1), desc, stored)
        if kind & 256:
            self._vector(stored, len(rows))[:] = self._operand(told, stored, "a").sum(1)[rows]
        if kind & 512:
            self._vector(stored, desc["n"])[:] = self._operand(told, stored, "b").sum(0)
        self._store(stored, part, self._part(told, letter)[2])

    def _operand(self, told: dict[str, int], stored: dict[Any, int], letter: str) -> np.ndarray:
        whole = self._whole(told, letter)
        return whole.T if stored[A[f"TRANS{letter.upper()}"]] else whole

    def _summed(self, sums: np.ndarray, desc: dict[str, int], stored: dict[Any, int]) -> np.ndarray:
        grid = self.made[desc["grid"]]
        comm = self.gpu.communicators[grid["comm"]]
        if comm is None or grid["npcol"] == 1:
            return sums
        if stored.get(A.BIAS_RESULT_SCHEME, 0) != ResultScheme.FULL:
            self.faults.append("sums are left partial")
        return sum(comm.allgather(sums))

    def _vector(self, stored: dict[Any, int], length: int) -> np.ndarray:
        dtype = _dtype(stored[A.BIAS_DATA_TYPE])
        memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(stored[A.BIAS_POINTER])
        return np.frombuffer(memory, dtype)

    def _aux(self, stored: dict[Any, int], kind: int, shape: tuple[int, int]) -> np.ndarray:
        """The auxiliary matrix, a mask as bytes."""
        ld, mask = stored[A.EPILOGUE_AUX_LD], bool(kind & (2 | 8))
        if ld % (128 if mask else 8):
            self.faults.append(f"leading dimension {ld}")
        dtype = np.dtype(np.uint8) if mask else _dtype(stored[A.EPILOGUE_AUX_DATA_TYPE])
        ld, rows = (ld // 8, -(-shape[0] // 8)) if mask else (ld, shape[0])
        memory = (ctypes.c_char * (ld * shape[1] * dtype.itemsize)).from_address(
            stored[A.EPILOGUE_AUX_POINTER]
        )
        return np.frombuffer(memory, dtype).reshape(shape[1], ld).T[:rows]


def _dtype(number: int) -> np.dtype:
    return as_dtype(next(name for name, known in DATA_TYPES.items() if number == known))


class Scaling(Following):
    """Also scales products of 8-bit floats."""

    def _number(self, address: int) -> float:
        return ctypes.c_float.from_address(address).value if address else 1.0

    def _scalar(self, told: dict[str, int], name: str, like: str, **how: bool) -> Any:
        value = super()._scalar(told, name, like, **how)
        if name == "alpha" and "matmulDesc" in told:
            stored = self.attributes(told["matmulDesc"])
            for letter in "AB":
                value = value * self._number(stored.get(A[f"{letter}_SCALE_POINTER"], 0))
        return value

    def _store(self, stored: dict[Any, int], part: np.ndarray, out: np.ndarray) -> None:
        if A.AMAX_D_POINTER in stored:
            ctypes.c_float.from_address(stored[A.AMAX_D_POINTER]).value = np.abs(part).max(initial=0)
        limit = float8.LARGEST.get(out.dtype.name, np.inf)
        out[...] = np.clip(part * self._number(stored.get(A.D_SCALE_POINTER, 0)), -limit, limit)
