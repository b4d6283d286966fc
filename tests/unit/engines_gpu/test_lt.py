# SPDX-License-Identifier: Apache-2.0
"""What cuBLASLt is asked for: transposed shapes, attributes, alignment, and what is kept between calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pblasmp.bindings import DataType
from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.engines.gpu.kernels import lt as lt_module
from pblasmp.engines.gpu.kernels.lt import WORKSPACE_BYTES, LocalProducts
from pblasmp.engines.gpu.kernels.lt_product import Fused, fuses
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.errors import ArgumentError, UnsupportedError
from tests.helpers.fakelt import WORKSPACE, FakeLt


@pytest.fixture
def lt() -> FakeLt:
    made: Any = FakeLt()
    made.scratches = {}
    return made  # type: ignore[no-any-return]


@pytest.fixture
def products(lt: FakeLt, monkeypatch: pytest.MonkeyPatch) -> LocalProducts:
    made = []
    nothing = lambda *_: None  # noqa: E731
    cublas = SimpleNamespace(create=lambda: 1, destroy=nothing, set_stream=nothing, workspaces=[])
    cublas.set_workspace = lambda _, *given: cublas.workspaces.append(given)
    modules = {"nvmath": None, "nvmath.bindings": SimpleNamespace(cublas=cublas, cublasLt=lt)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module or SimpleNamespace())

    def empty(nbytes: int, dtype: Any) -> Any:
        made.append(nbytes)
        return SimpleNamespace(data=SimpleNamespace(ptr=0x7000 * len(made)))

    def copy(to: int, of: int, nbytes: int, kind: str, stream: int) -> None:
        lt.copies.append((to, of, nbytes, kind, stream))

    runtime = SimpleNamespace(memcpyAsync=copy, memcpyDeviceToDevice="on the device")
    found = LocalProducts(
        SimpleNamespace(empty=empty, cuda=SimpleNamespace(runtime=runtime)),
        lambda name, nbytes: lt.scratches.setdefault((name, nbytes), 0x100000 * (1 + len(lt.scratches))),
    )
    found.reserve()
    return found


def view(rows: int, cols: int, dtype: str = "bfloat16", at: int = 0x1000, ld: int = 0) -> View:
    return View(at, rows, cols, ld or cols, (DTYPES | FLOAT8)[dtype])


def test_products_that_are_queued_once_have_the_algorithm_of_about_as_many_rows(lt, products):
    w = view(20, 50, at=0x2000)

    def searches(rows: int, *, once: bool = True, **how: Any) -> int:
        before, (x, d) = lt.searches, (view(rows, 50, at=0x1000), view(rows, 20, at=0x3000))
        products.multiply(9, x, w, d, op_w="T", once=once, **how)
        assert [layout[2] for layout in lt.calls[-1]["layouts"]] == [20, rows, rows, rows]
        return lt.searches - before

    assert [searches(rows) for rows in (200, 256, 129, 257, 201, 20, 32, 17, 16, 33, 1, 0x1000, 0xF81)] == [
        1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0
    ]  # fmt: skip
    assert [searches(rows, finish=Fused(bias=64)) for rows in (200, 199)] == [1, 0]
    assert [searches(rows, once=False) for rows in (200, 199, 200, 256)] == [1, 1, 0, 0]
    with pytest.raises(ArgumentError, match=r"op\(X\) is 100 x 50, op\(W\) 50 x 20, C 99 x 20, D 99 x 20"):
        products.multiply(9, view(100, 50), w, view(99, 20), op_w="T", once=True)
    with pytest.raises(ArgumentError, match="nothing to multiply"):
        products.multiply(9, view(0, 50), w, view(0, 20), op_w="T", once=True)


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
    assert (mine, again["B_SCALE_POINTER"]) == (0xE000, 0xE000)
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
    """Beside "main" it is as large as the algorithm needs."""
    x, w, d = view(30, 50), view(20, 50), view(30, 20)
    for stream, lane in ((1, "main"), (2, "gemm"), (3, "main"), (4, "gemm")):
        products.multiply(stream, x, w, d, op_w="T", lane=lane)
    main, beside = (0x7000, WORKSPACE_BYTES), (0x100000, WORKSPACE)
    assert [call["workspace"] for call in lt.calls] == [main, beside, main, beside]
    assert [call["stream"] for call in lt.calls] == [1, 2, 3, 4]
    assert lt.scratches == {("workspace gemm", WORKSPACE): 0x100000}


def test_cublas_has_the_workspace_of_its_lane_where_that_is_now(lt, products):
    """A product that needs more has moved it."""
    given, moved = products.cublas.workspaces, [0x200000, 0x200000, 0x300000]
    products._scratch = lambda name, nbytes: moved.pop(0)
    for lane in ("main", "main", "beside0", "beside0", "beside0"):
        products.solver(5, lane)
    sizes = [nbytes for _, nbytes in given]
    assert [at for at, _ in given] == [0x7000, 0x200000, 0x300000]
    assert sizes[0] == WORKSPACE_BYTES > sizes[1] == sizes[2] > 0


def test_what_is_remembered_is_bounded(lt, products, monkeypatch):
    monkeypatch.setattr(lt_module, "_REMEMBERED", 3)
    w, alive = view(20, 50), []
    for rows in (8, 16, 24, 8, 32, 8):
        products.multiply(1, view(rows, 50), w, view(rows, 20), op_w="T", alpha=rows)
        alive.append(len(lt.alive))
    assert alive == [
        7,
        13,
        19,
        19,
        19,
        19,
    ]  # a handle, and of each product itself, four layouts, what was preferred
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
