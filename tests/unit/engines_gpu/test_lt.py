# SPDX-License-Identifier: Apache-2.0
"""What cuBLASLt is asked for: transposed shapes, attributes, alignment, and what is kept between calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pblasmp.bindings import ComputeType, DataType
from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.engines.gpu.kernels import lt as lt_module
from pblasmp.engines.gpu.kernels.lt import WORKSPACE_BYTES, Batch, Fused, LocalProducts, fuses
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.errors import ArgumentError, UnsupportedError
from tests.helpers.fakelt import FakeLt


@pytest.fixture
def lt() -> FakeLt:
    made: Any = FakeLt()
    made.by_cublas = []
    return made  # type: ignore[no-any-return]


@pytest.fixture
def products(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> LocalProducts:
    made = []
    nothing, by_cublas = lambda *_: None, lt.by_cublas
    cublas = SimpleNamespace(create=lambda: 1, destroy=nothing, set_stream=nothing, set_workspace=nothing,
                             gemm_ex=lambda *given: by_cublas.append(given))  # fmt: skip
    monkeypatch.setattr(lt_module, "_BY_CUBLAS", 0)
    modules = {"nvmath": None, "nvmath.bindings": SimpleNamespace(cublas=cublas, cublasLt=lt)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module or SimpleNamespace())

    def empty(nbytes: int, dtype: Any) -> Any:
        made.append(nbytes)
        return SimpleNamespace(data=SimpleNamespace(ptr=0x7000 * len(made)))

    def copy(to: int, of: int, nbytes: int, kind: str, stream: int) -> None:
        lt.copies.append((to, of, nbytes, kind, stream))

    runtime = SimpleNamespace(memcpyAsync=copy, memcpyDeviceToDevice="on the device")
    return LocalProducts(SimpleNamespace(empty=empty, cuda=SimpleNamespace(runtime=runtime)))


def view(rows: int, cols: int, dtype: str = "bfloat16", at: int = 0x1000, ld: int = 0) -> View:
    return View(at, rows, cols, ld or cols, (DTYPES | FLOAT8)[dtype])


def test_small_products_of_16_bits_are_those_of_cublas(lt, products, monkeypatch):
    monkeypatch.setattr(lt_module, "_BY_CUBLAS", 2 * 30 * 20 * 50)
    x, w, d = view(30, 50, at=0x1000, ld=56), view(20, 50, at=0x2000), view(30, 20, at=0x3000, ld=24)
    products.multiply(9, x, w, d, op_w="T", alpha=2)
    ((_, op_w, op_x, n, m, k, *factors),) = lt.by_cublas
    bf16 = DataType.R_16BF
    assert (op_w, op_x, n, m, k) == (1, 0, 20, 30, 50)
    assert factors[1:7] == [0x2000, bf16, 50, 0x1000, bf16, 56]
    assert factors[8:] == [0x3000, bf16, 24, ComputeType.COMPUTE_32F, -1]
    wide = view(30, 20, "float32")
    for of_x, of_d, how in (
        (view(31, 50), view(31, 20), {}), (x, wide, {}), (x, d, {"c": view(30, 20), "beta": 1}),
        (x, d, {"finish": Fused(bias=64)}), (x, d, {"batch": Batch(2, 1500, 0, 600, 600)}),
    ):  # fmt: skip
        products.multiply(9, of_x, w, of_d, op_w="T", **how)
    assert (len(lt.by_cublas), len(lt.calls)) == (1, 5)


def test_c_may_be_another_matrix(lt, products):
    c, d = view(4, 6, "float32", 0x5000, ld=8), view(4, 6, "float32", 0x6000)
    products.multiply(1, view(4, 2, "float32"), view(2, 6, "float32"), d, beta=3, c=c)
    products.multiply(1, view(4, 2, "float32"), view(2, 6, "float32"), d, beta=0, c=c)
    with_c, without = lt.calls
    assert (with_c["c"], with_c["d"], with_c["beta"]) == (0x5000, 0x6000, 3)
    assert with_c["layouts"][2] == (DataType.R_32F, 6, 4, 8)
    assert (without["c"], without["layouts"][2]) == (0x6000, (DataType.R_32F, 6, 4, 6))


def test_scales_of_8_bit_products(lt, products):
    """X is the library's B, and W its A."""
    x, w = view(32, 64, "float8_e5m2"), view(48, 64, "float8_e4m3fn")
    d = view(32, 48, "float8_e4m3fn", 0x3000)
    finish = Fused(scale_x=16, scale_w=32, scale_d=48, amax=4, bias=40)
    products.multiply(1, x, w, d, op_w="T", finish=finish)
    (call,) = lt.calls
    assert (call["A_SCALE_POINTER"], call["B_SCALE_POINTER"]) == (32, 16)
    assert (call["D_SCALE_POINTER"], call["AMAX_D_POINTER"]) == (48, 4)
    assert call["BIAS_DATA_TYPE"] == DataType.R_16BF
    kinds = [layout[0] for layout in call["layouts"]]
    assert kinds == [DataType.R_8F_E4M3, DataType.R_8F_E5M2, DataType.R_16BF, DataType.R_8F_E4M3]
    assert call["c"] == 0
    assert not lt.copies


def test_scales_at_other_addresses_are_copied_by_every_product(lt, products):
    x, w, d = view(32, 64, "float8_e5m2"), view(48, 64, "float8_e4m3fn"), view(32, 48)
    for stream in (1, 2):
        products.multiply(stream, x, w, d, op_w="T", finish=Fused(scale_x=20, scale_w=32))
    products.multiply(3, x, w, d, op_w="T", finish=Fused(scale_x=20, scale_w=36), lane="other")
    once, again, other = lt.calls
    assert [call["A_SCALE_POINTER"] for call in lt.calls[:2]] == [32, 32]
    mine = once["B_SCALE_POINTER"]
    assert (mine, again["B_SCALE_POINTER"]) == (0x7000, 0x7000)
    theirs = other["B_SCALE_POINTER"], other["A_SCALE_POINTER"]
    assert len({mine, *theirs}) == 3, "products of two lanes may run at once"
    on = "on the device"
    assert lt.copies == [
        (mine, 20, 4, on, 1), (mine, 20, 4, on, 2), (theirs[0], 20, 4, on, 3), (theirs[1], 36, 4, on, 3)
    ]  # fmt: skip


@pytest.mark.parametrize(("how", "why"), [
    ({"op_w": "N", "w": view(64, 48, "float8_e4m3fn")}, "outputs × inputs"),
    ({"w": view(48, 64, "float8_e5m2"), "x": view(32, 64, "float8_e5m2")}, "both float8_e5m2"),
    ({"x": view(32, 64, "float8_e4m3fn", ld=72)}, "X: .* 72 apart"),
    ({"d": view(32, 48, at=0x1008)}, "D: 8-bit products need rows"),
    (
        {"x": view(32, 56, "float8_e4m3fn", ld=64), "w": view(48, 56, "float8_e4m3fn", ld=64)},
        "multiple of 16 inputs, got 56",
    ),
], ids=str)  # fmt: skip
def test_8_bit_products_that_the_library_lacks(products, how, why):
    usual = {
        "x": view(32, 64, "float8_e4m3fn"),
        "w": view(48, 64, "float8_e4m3fn"),
        "d": view(32, 48),
        "op_w": "T",
    }
    usual |= how
    with pytest.raises(UnsupportedError, match=why):
        products.multiply(1, usual["x"], usual["w"], usual["d"], op_w=usual["op_w"])


def test_a_product_is_looked_up_once(lt, products):
    x, w, d = view(30, 50), view(20, 50), view(30, 20)
    other_x = view(30, 50, at=0x9000)
    for a, bias in ((x, 64), (other_x, 64), (x, 128)):
        products.multiply(1, a, w, d, op_w="T", finish=Fused(bias=bias))
    assert lt.searches == 1
    assert [call["BIAS_POINTER"] for call in lt.calls] == [64, 64, 128]
    products.multiply(1, view(30, 50, at=0x1002), w, d, op_w="T")  # worse aligned
    assert lt.searches == 2


def test_a_lane_has_one_workspace_on_whatever_stream(lt, products):
    x, w, d = view(30, 50), view(20, 50), view(30, 20)
    for stream, lane in ((1, "main"), (2, "gemm"), (3, "main"), (4, "gemm")):
        products.multiply(stream, x, w, d, op_w="T", lane=lane)
    assert [call["workspace"][0] for call in lt.calls] == [0x7000, 0xE000, 0x7000, 0xE000]
    assert [call["stream"] for call in lt.calls] == [1, 2, 3, 4]


def test_what_is_remembered_is_bounded(lt, products, monkeypatch):
    monkeypatch.setattr(lt_module, "_REMEMBERED", 3)
    w, alive = view(20, 50), []
    for rows in (8, 16, 24, 8, 32, 8):
        products.multiply(1, view(rows, 50), w, view(rows, 20), op_w="T", alpha=rows)
        alive.append(len(lt.alive))
    assert alive == [7, 13, 19, 19, 19, 19]  # a handle, and six of each product
    assert lt.searches == 4  # the one used last is not forgotten
    products.multiply(1, view(16, 50), w, view(16, 20), op_w="T")
    assert lt.searches == 5
    assert len(products._scalars) <= 3
    assert [call["alpha"] for call in lt.calls] == [8, 16, 24, 8, 32, 8, 1]
    products.close()
    assert not lt.alive


@pytest.mark.parametrize(
    ("at", "ld", "expected"),
    [(0x1000, 50, 4), (0x1000, 64, 128), (0x1010, 64, 16), (0x1002, 64, 2), (0x1000, 128, 256)],
)
def test_alignment_is_that_of_every_row(lt, products, at, ld, expected):
    products.multiply(1, view(30, 50, at=at, ld=ld), view(50, 20), view(30, 20))
    assert lt.wanted["MIN_ALIGNMENT_B_BYTES"] == expected
    assert lt.wanted["MAX_WORKSPACE_BYTES"] == WORKSPACE_BYTES


def test_wrong_shapes(products):
    with pytest.raises(ArgumentError, match=r"op\(X\) is 30 x 50, op\(W\) 20 x 50, C 30 x 20, D 30 x 20"):
        products.multiply(1, view(30, 50), view(20, 50), view(30, 20))
    with pytest.raises(ArgumentError, match="nothing to multiply"):
        products.multiply(1, view(30, 0), view(0, 20), view(30, 20))


def test_what_the_library_cannot_do(lt, products):
    lt.found = 0
    with pytest.raises(
        UnsupportedError,
        match="a product of 30 x 20 x 50, bfloat16 N by bfloat16 N to bfloat16, epilogue BIAS",
    ):
        products.multiply(1, view(30, 50), view(50, 20), view(30, 20), finish=Fused(bias=64))
    assert list(lt.alive.values()) == ["handle"]  # nothing of it is left
    with pytest.raises(UnsupportedError, match="compute: 'tf32' is for float32"):
        products.multiply(1, view(30, 50), view(50, 20), view(30, 20), compute="tf32")


def test_everything_is_given_back(lt, products):
    products.multiply(1, view(30, 50), view(50, 20), view(30, 20))
    assert len(lt.alive) == 7  # the handle, the product, four layouts, what was preferred
    products.close()
    assert not lt.alive


def test_where_epilogues_are():
    assert [name for name, dtype in (DTYPES | FLOAT8).items() if not fuses(dtype)] == [
        "float64", "complex128", "complex64",
    ]  # fmt: skip


def test_views():
    array = np.zeros((4, 10), np.float32)[:, 2:8]
    found = View.of(_on_gpu(array))
    assert (found.rows, found.cols, found.ld) == (4, 6, 10)
    assert found.lines(1, 3).address == found.address + 40
    assert found.columns(2, 5) == View(found.address + 8, 4, 3, 10, np.dtype(np.float32))
    assert not found.contiguous
    assert found.lines(1, 2).contiguous
    assert View.of(_on_gpu(np.zeros((4, 6), np.uint8)), FLOAT8["float8_e4m3fn"]).dtype.itemsize == 1
    with pytest.raises(ArgumentError, match=r"w: strides are \(4, 16\) bytes, expected row-major"):
        View.of(_on_gpu(np.zeros((6, 4), np.float32).T), name="w")
    with pytest.raises(ArgumentError, match="expected a matrix of bfloat16, got 2 dimensions of float32"):
        View.of(_on_gpu(array), DTYPES["bfloat16"])


def _on_gpu(array: np.ndarray) -> Any:
    return SimpleNamespace(
        ndim=array.ndim, dtype=array.dtype, itemsize=array.itemsize, shape=array.shape, strides=array.strides,
        size=array.size, data=SimpleNamespace(ptr=array.ctypes.data),
    )  # fmt: skip
