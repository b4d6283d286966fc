# SPDX-License-Identifier: Apache-2.0
"""What a product must tell the library, from the layout layer's column-major form of it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.bindings import DataType, GridLayout, MatmulAttribute, Operation
from pblasmp.engines.gpu.cublasmp import faults
from tests.helpers.machine import Witness

TYPES = {"float64": DataType.R_64F, "float32": DataType.R_32F, "float16": DataType.R_16F,
         "bfloat16": DataType.R_16BF, "complex64": DataType.C_32F, "complex128": DataType.C_64F}  # fmt: skip


def misfits(
    lib: Witness,
    p: pb.MatmulProblem,
    matrices: Mapping[str, pb.DistributedMatrix],
    alpha: complex = 1,
    beta: complex = 0,
) -> list[str]:
    """Return where the last call of cublasMpMatmul is not that of ``alpha op(A) op(B) + beta C``."""
    call, asked = lib.of("Matmul")[-1], p
    p, _ = faults.avoided(asked, matrices["d"].context.engine.version)
    form = p.column_major()
    moved = {"a": p.a != asked.a, "b": p.b != asked.b}  # to arrays that the plan has made
    if form.swapped:
        moved["a"], moved["b"] = moved["b"], moved["a"]
    version = matrices["d"].context.engine.version
    arrays = {x: matrix.local for x, matrix in matrices.items()}
    if form.swapped:
        arrays["a"], arrays["b"] = arrays["b"], arrays["a"]
    scale = np.dtype(np.float32) if p.d.dtype.itemsize == 2 else p.d.dtype
    attributes = lib.attributes(call["matmulDesc"])
    extents = (p.n, p.m, p.k) if form.swapped else (p.m, p.n, p.k)
    pairs: dict[str, tuple[Any, Any]] = {
        "extents": (tuple(call[x] for x in "mnk"), extents),
        "indices": ({call[i + x] for i in "ij" for x in "abcd"}, {1}),
        "op_a": (attributes[MatmulAttribute.TRANSA], Operation[form.op_a]),
        "op_b": (attributes[MatmulAttribute.TRANSB], Operation[form.op_b]),
        "alpha": (scalar(call["alpha"], scale), scale.type(alpha)),
        "beta": (scalar(call["beta"], scale), scale.type(beta)),
    }
    for name in "abd" if beta == 0 else "abcd":
        x, array, (handle, address) = (
            getattr(form, name),
            arrays[name],
            (call[f"desc{name.upper()}"], call[name]),
        )
        in_d = name == "c" and (form.copy_c or faults.needs_c_in_d(arrays["d"]))
        array = arrays["d"] if in_d else array
        copied = {"a": form.conj_a, "b": form.conj_b}.get(name, False)
        pairs[name] = described(lib, handle), layout(x)
        elsewhere = copied or moved.get(name, False)
        pairs[f"address of {name}"] = pointed(address, array, elsewhere), True
        if not elsewhere:
            pairs[f"lld of {name}"] = lib.made[handle]["lld"], lld(array, matrices, "d" if in_d else name, p)
    if beta == 0:
        stands_in = (0, 0) if version >= 800 else (call["d"], call["descD"])
        pairs["no C"] = (call["c"], call["descC"]), stands_in
    return [
        f"{name}: {got}, expected {expected}" for name, (got, expected) in pairs.items() if got != expected
    ]


def scalar(address: int, dtype: np.dtype) -> Any:
    return np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype)[0]


def described(lib: Witness, handle: int) -> tuple[Any, ...]:
    desc = lib.made[handle]
    grid = lib.made[desc["grid"]]
    return (
        *(desc[name] for name in ("m", "n", "mb", "nb", "rsrc", "csrc", "type")),
        *(grid[name] for name in ("nprow", "npcol", "layout")),
    )


def layout(x: pb.MatrixDescriptor) -> tuple[Any, ...]:
    order = {"row": GridLayout.ROW_MAJOR, "col": GridLayout.COL_MAJOR}[x.grid.order]
    return (*x.shape, *x.block, *x.source, TYPES[x.dtype.name], x.grid.nprow, x.grid.npcol, order)


def pointed(address: int, array: Any, copied: bool) -> bool:
    """Whether an address is the array's, or a copy's; of an empty one anything but NULL."""
    return address != 0 if copied or not array.size else address == array.ctypes.data


def lld(array: Any, matrices: Mapping[str, Any], name: str, p: pb.MatmulProblem) -> int:
    """The distance between columns of the memory read in F order, in elements."""
    form = p.column_major()
    original = {"a": "b", "b": "a"}.get(name, name) if form.swapped else name
    if matrices[original].descriptor.order == "C":
        array = array.T
    return (
        max(1, array.shape[0])
        if array.size == 0 or array.shape[1] == 1
        else array.strides[1] // array.itemsize
    )
