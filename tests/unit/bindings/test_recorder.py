# SPDX-License-Identifier: Apache-2.0
"""The stand-in library sees what it is there to see: tests of engines rely on it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from pblasmp.bindings import Library, MatmulAttribute
from tests.helpers.recorder import Recorder


def make(function: Any, *before: object, last: tuple[object, ...] = ()) -> int:
    out = ctypes.c_void_p()
    function(*before, ctypes.byref(out), *last)
    assert out.value
    return out.value


class Product:
    """A Gemm as an engine makes it: handle, grid, descriptors, the query and the call."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.handle = make(library.cublasMpCreate, last=(5,))
        self.grid = make(library.cublasMpGridCreate, 2, 2, 0, 1234)
        self.desc = make(library.cublasMpMatrixDescriptorCreate, 8, 8, 2, 2, 0, 0, 4, 1, self.grid)

    def gemm(
        self, *, query: bool = True, ia: int = 1, k: int = 8, device: int | None = None, work: int = 1
    ) -> None:
        sizes = ctypes.c_size_t(4096), ctypes.c_size_t(512)
        shared = [self.handle, 0, 0, 8, 8, k, 1, *[1, ia, 1, self.desc] * 2, 1, *[1, 1, 1, self.desc], 70]
        if query:
            self.library.cublasMpGemm_bufferSize(*shared, *map(ctypes.byref, sizes))
        bytes_ = sizes[0].value if device is None else device
        self.library.cublasMpGemm(*shared, work, bytes_, 1, sizes[1].value)

    def close(self) -> None:
        self.library.cublasMpMatrixDescriptorDestroy(self.desc)
        self.library.cublasMpGridDestroy(self.grid)
        self.library.cublasMpDestroy(self.handle)


def test_clean_use(library: Library, recorder: Recorder) -> None:
    product = Product(library)
    recorder.workspace = (8192, 16)
    product.gemm()
    assert recorder.calls[-1]["workspaceSizeInBytesOnDevice"] == 8192
    assert recorder.calls[-1]["workspaceSizeInBytesOnHost"] == 16
    with pytest.raises(AssertionError, match=r"leaked: .*grid"):
        recorder.assert_clean()
    product.close()
    recorder.assert_clean()
    made = ["Create", "GridCreate", "MatrixDescriptorCreate", "Gemm_bufferSize", "Gemm"]
    ended = ["MatrixDescriptorDestroy", "GridDestroy", "Destroy"]
    assert recorder.names == [f"cublasMp{name}" for name in (*made, *ended)]


MISUSES = {
    "an index below 1": (lambda p: p.gemm(ia=0), ["ia is 0, below 1", "ib is 0, below 1"] * 2),
    "no query": (lambda p: p.gemm(query=False), ["workspace was not asked for"]),
    "a query of other arguments": (
        lambda p: (p.gemm(k=8), p.gemm(k=6, query=False)), ["workspace was not asked for with these arguments"]
    ),
    "a small workspace": (lambda p: p.gemm(device=4095), ["workspace 4095, 512, needs"]),
    "no workspace": (lambda p: p.gemm(work=0), ["workspace is NULL"]),
    "a grid before its matrices": (
        lambda p: p.library.cublasMpGridDestroy(p.grid), ["grid released before its matrix descriptor"]
    ),
    "what is released": (
        lambda p: (p.close(), p.close(), p.gemm()),
        [f"is no live {each}" for each in ("matrix descriptor", "grid", "handle",
                                           *["handle", *["matrix descriptor"] * 3] * 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_a_fault(misuse: str, library: Library, recorder: Recorder) -> None:
    wrong, faults = MISUSES[misuse]
    wrong(Product(library))
    assert len(recorder.faults) == len(faults), recorder.faults
    assert all(words in fault for words, fault in zip(faults, recorder.faults, strict=True)), recorder.faults


def test_symmetric_memory(library: Library, recorder: Recorder) -> None:
    product = Product(library)
    address = make(library.cublasMpMalloc, product.grid, last=(64,))
    ctypes.memset(address, 1, 64)
    other = ctypes.create_string_buffer(64)
    library.cublasMpBufferRegister(product.grid, other, 64)
    assert {kind for kind, _ in recorder.alive} == {
        "handle", "grid", "matrix descriptor", "memory", "registration",
    }  # fmt: skip
    library.cublasMpBufferDeregister(product.grid, other)
    library.cublasMpFree(product.grid, address)
    assert not recorder.faults
    library.cublasMpFree(product.grid, address)
    library.cublasMpBufferDeregister(product.grid, other)
    assert [text.partition(":")[0] for text in recorder.faults] == [
        "cublasMpFree",
        "cublasMpBufferDeregister",
    ]


def test_attribute_of_a_wrong_size(library: Library, recorder: Recorder) -> None:
    desc = make(library.cublasMpMatmulDescriptorCreate, last=(68,))
    value = ctypes.c_int64(1)
    library.cublasMpMatmulDescriptorSetAttribute(desc, MatmulAttribute.TRANSA, ctypes.byref(value), 8)
    assert recorder.faults == ["attribute TRANSA takes 4 bytes, got 8"]


def test_matmul_without_c(library: Library, recorder: Recorder) -> None:
    product = Product(library)
    matmul = make(library.cublasMpMatmulDescriptorCreate, last=(70,))
    size = ctypes.byref(ctypes.c_size_t())
    operand = [1, 1, 1, product.desc]
    for c in ([None, 0, 0, None], [1, 1, 1, None]):
        library.cublasMpMatmul_bufferSize(
            product.handle, matmul, 8, 8, 8, 1, *operand, *operand, 1, *c, *operand, size, size
        )
    assert recorder.faults == ["cublasMpMatmul_bufferSize: descC 0x0 is no live matrix descriptor"]
