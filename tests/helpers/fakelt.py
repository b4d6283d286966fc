# SPDX-License-Identifier: Apache-2.0
"""A stand-in for nvmath.bindings.cublasLt: records its calls, and computes no product or all of them."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import finfo

from pblasmp.dtypes import DTYPES, FLOAT8, accumulation_dtype, is_float8
from pblasmp.engines.gpu.types import DATA_TYPES
from tests.helpers.gpu_memory import AtOnce, Place, number
from tests.helpers.hardware import why_not_8_bits

# As in cublasLt.h of CUDA 13.
Epilogue = IntEnum("Epilogue", {
    "DEFAULT": 1, "RELU": 2, "RELU_AUX": 130, "BIAS": 4, "RELU_BIAS": 6, "RELU_AUX_BIAS": 134, "GELU": 32,
    "GELU_AUX": 160, "GELU_BIAS": 36, "GELU_AUX_BIAS": 164, "DRELU": 136, "DGELU": 192,
})  # fmt: skip
MatmulDescAttribute = IntEnum("MatmulDescAttribute", {
    "TRANSA": 3, "TRANSB": 4, "EPILOGUE": 7, "BIAS_POINTER": 8, "EPILOGUE_AUX_POINTER": 11, "EPILOGUE_AUX_LD": 12,
    "SM_COUNT_TARGET": 15, "A_SCALE_POINTER": 17, "B_SCALE_POINTER": 18, "D_SCALE_POINTER": 20, "AMAX_D_POINTER": 21,
    "BIAS_DATA_TYPE": 26,
})  # fmt: skip
MatmulPreferenceAttribute = IntEnum("MatmulPreferenceAttribute", {
    "MAX_WORKSPACE_BYTES": 1, "MIN_ALIGNMENT_A_BYTES": 5, "MIN_ALIGNMENT_B_BYTES": 6, "MIN_ALIGNMENT_C_BYTES": 7,
    "MIN_ALIGNMENT_D_BYTES": 8,
})  # fmt: skip


MatrixLayoutAttribute = IntEnum(
    "MatrixLayoutAttribute", {"COLS": 3, "BATCH_COUNT": 5, "STRIDED_BATCH_OFFSET": 6}
)


WORKSPACE = 1 << 20  # bytes that every algorithm needs


class CuBLASLtError(Exception):
    pass


class FakeLt:
    """nvmath.bindings.cublasLt: keeps what it was asked for.

    Attributes:
        capability: of the GPU: see ``hardware.why_not_8_bits``.
        refused: why it found no algorithm.
    """

    capability = 90

    Epilogue, MatmulDescAttribute = Epilogue, MatmulDescAttribute
    MatmulPreferenceAttribute = MatmulPreferenceAttribute
    MatrixLayoutAttribute = MatrixLayoutAttribute
    cuBLASLtError = CuBLASLtError  # noqa: N815 - its name
    matmul_heuristic_result_dtype = np.dtype([("algo", "<u8", 8), ("workspace_size", "<u8")])

    def __init__(self) -> None:
        self.alive: dict[int, Any] = {}
        self.calls: list[dict[str, Any]] = []
        self.copies: list[tuple[Any, ...]] = []
        self.searches = 0
        self.refused: list[str] = []
        self.found = 1
        self._last = 100

    def _make(self, value: Any) -> int:
        self._last += 1
        self.alive[self._last] = value
        return self._last

    def create(self) -> int:
        return self._make("handle")

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        return self._make({"compute": compute, "scale": scale})

    def matrix_layout_create(self, kind: int, rows: int, cols: int, ld: int) -> int:
        return self._make((kind, rows, cols, ld))

    def matmul_preference_create(self) -> int:
        return self._make({})

    def destroy(self, handle: int) -> None:
        del self.alive[handle]

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = destroy

    def get_matmul_desc_attribute_dtype(self, attribute: int) -> type:
        return np.uint64 if "POINTER" in MatmulDescAttribute(attribute).name else np.int32

    def get_matmul_preference_attribute_dtype(self, attribute: int) -> type:
        return np.uint64 if attribute == 1 else np.uint32

    def get_matrix_layout_attribute_dtype(self, attribute: int) -> type:
        return {3: np.uint64, 5: np.int32, 6: np.int64}[attribute]

    def _set(self, names: Any, thing: int, attribute: int, at: int, nbytes: int) -> None:
        self.alive[thing][names(attribute).name] = int.from_bytes(ctypes.string_at(at, nbytes), "little")

    def matmul_desc_set_attribute(self, *arguments: int) -> None:
        self._set(MatmulDescAttribute, *arguments)

    def matmul_preference_set_attribute(self, *arguments: int) -> None:
        self._set(MatmulPreferenceAttribute, *arguments)

    def matrix_layout_set_attribute(self, layout: int, attribute: int, at: int, nbytes: int) -> None:
        value, name = (
            int.from_bytes(ctypes.string_at(at, nbytes), "little"),
            MatrixLayoutAttribute(attribute).name,
        )
        if name == "COLS":
            kind, rows, _, *others = self.alive[layout]
            self.alive[layout] = kind, rows, value, *others
        else:
            self.alive[layout] += ((name, value),)

    def matmul_algo_get_heuristic(self, handle: int, desc: int, *rest: int) -> None:
        *layouts, preference, wanted, result, count = rest
        assert self.alive[handle] == "handle"
        assert len(layouts) == 4
        assert wanted == 1
        self.searches += 1
        self.wanted = dict(self.alive[preference])
        told = np.zeros(1, self.matmul_heuristic_result_dtype)
        told["algo"], told["workspace_size"] = 4711, WORKSPACE
        ctypes.memmove(result, told.ctypes.data, told.nbytes)
        (a, _, _, lda, *_), (b, _, _, ldb, *_), _, (d, _, _, ldd, *_) = (self.alive[x] for x in layouts)
        found = self.found
        if a in _FLOAT8 or b in _FLOAT8:
            kept, ops = self.alive[desc], ("TRANSA", "TRANSB")
            aligned = [self.wanted.get(f"MIN_ALIGNMENT_{x}_BYTES", 256) for x in "ABD"]
            aligned += [lda, ldb, ldd * _DTYPES[d].itemsize]
            types, ops = (_DTYPES[a], _DTYPES[b]), [kept.get(x, 0) for x in ops]
            if why_not := why_not_8_bits(self.capability, types, ops, aligned):
                found = 0
                self.refused.append(why_not)
        np.frombuffer((ctypes.c_char * 4).from_address(count), np.int32)[:] = found

    def matmul(self, handle: int, desc: int, alpha: int, a: int, la: int, b: int, lb: int, beta: int, c: int, lc: int,
               d: int, ld: int, algo: int, workspace: int, nbytes: int, stream: int) -> None:  # fmt: skip
        assert ctypes.c_uint64.from_address(algo).value == 4711
        # In place, cuBLASLt refuses another layout of C than of D, such as another distance between products.
        assert c != d or self.alive[lc] == self.alive[ld]
        scale = {0: "f4", 1: "f8", 4: "c8", 5: "c16"}[self.alive[desc]["scale"]]
        read = lambda at: np.frombuffer(ctypes.string_at(at, np.dtype(scale).itemsize), scale)[0]  # noqa: E731
        self.calls.append({
            "a": a, "b": b, "c": c, "d": d, "layouts": [self.alive[x] for x in (la, lb, lc, ld)],
            "alpha": read(alpha), "beta": read(beta), "workspace": (workspace, nbytes), "stream": stream,
            **self.alive[desc],
        })  # fmt: skip


class MultiplyingLt(FakeLt):
    """Also multiplies.

    Attributes:
        queues: where it queues that.
        multiplied: called with the stream and the sizes of each product, as they are in F order.
    """

    multiplied: Any = staticmethod(lambda stream, m, n, k: None)

    def __init__(self, queues: AtOnce | None = None) -> None:
        super().__init__()
        self.queues = queues or AtOnce()

    def matmul(self, handle: int, desc: int, alpha: int, *rest: int) -> None:
        super().matmul(handle, desc, alpha, *rest)
        call = self.calls[-1]
        a, _, _, d = call["layouts"]
        self.queues.queue(call["stream"], "multiply", partial(_multiply, call))
        self.multiplied(call["stream"], *d[1:3], a[1] if call["TRANSA"] else a[2])


def _multiply(call: dict[str, Any], memory: Any) -> None:
    a, b, c, d = (_batch(call[name], *layout) for name, layout in zip("abcd", call["layouts"], strict=True))
    wide = np.result_type(accumulation_dtype(a.dtype), np.float64)
    op_a, op_b = (_OPS[call[name]] for name in ("TRANSA", "TRANSB"))
    at, nbytes = call["workspace"]
    if nbytes:
        memory.write(number(at))
    y = call["alpha"] * (op_a(memory.read(a).astype(wide)) @ op_b(memory.read(b).astype(wide)))
    for name in ("A_SCALE_POINTER", "B_SCALE_POINTER"):
        y = y * _scale(call, name, memory)
    y = y + call["beta"] * memory.read(c).astype(wide) if call["beta"] != 0 else y
    y = _finished(call, y, memory)
    if is_float8(d.dtype):  # 8-bit floats saturate, are scaled, and tell their largest value
        if call.get("AMAX_D_POINTER"):
            memory.write(number(call["AMAX_D_POINTER"]))[...] = abs(y).max()
        largest = float(finfo(d.dtype).max)
        y = np.clip(y * _scale(call, "D_SCALE_POINTER", memory), -largest, largest)
    memory.write(d)[...] = y


def _scale(call: dict[str, Any], name: str, memory: Any) -> float:
    """The float32 at an attribute's address, by default 1."""
    return float(memory.read(number(call[name]))[0]) if call.get(name) else 1.0


def _finished(call: dict[str, Any], y: np.ndarray, memory: Any) -> np.ndarray:
    """The product after its epilogue: an entry of the bias for every row."""
    names = Epilogue(call["EPILOGUE"]).name.split("_")
    if "BIAS" in names:
        kind = _DTYPES[call["BIAS_DATA_TYPE"]]
        bias = memory.read(Place(call["BIAS_POINTER"], (y.shape[1],), (kind.itemsize,), kind))
        y = y + bias.astype(y.dtype)[:, None]
    if "GELU" in names:
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return np.maximum(y, 0) if "RELU" in names else y


_OPS = (lambda x: x, lambda x: x.swapaxes(1, 2), lambda x: x.conj().swapaxes(1, 2))  # by cuBLAS's number


def _batch(at: int, kind: int, rows: int, cols: int, ld: int, *batch: tuple[str, int]) -> Place:
    """Return the matrices in F order that a layout describes: how many × rows × columns."""
    dtype, how = _DTYPES[kind], dict(batch)
    count, step = how.get("BATCH_COUNT", 1), how.get("STRIDED_BATCH_OFFSET", 0)
    assert ld >= rows
    strides = tuple(entries * dtype.itemsize for entries in (step, 1, ld))
    return Place(at, (count, rows, cols), strides, dtype)


_FLOAT8 = [int(number) for name, number in DATA_TYPES.items() if name.startswith("float8")]
_DTYPES = {
    int(number): (DTYPES | FLOAT8)[name] for name, number in DATA_TYPES.items() if name in DTYPES | FLOAT8
}
