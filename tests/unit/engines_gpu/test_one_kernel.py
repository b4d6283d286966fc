# SPDX-License-Identifier: Apache-2.0
"""Algorithm "one_kernel" without its kernel: tiles, packed arguments, boxes of odd and even calls, what is refused."""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pblasmp.dtypes import DTYPES, FLOAT8, is_float8
from pblasmp.engines.gpu.kernels import compiler
from pblasmp.engines.gpu.kernels import one_kernel as kernels
from pblasmp.engines.gpu.kernels.one_kernel import (
    FORMS,
    PARTS,
    TILE_ROWS,
    KernelJob,
    OneKernel,
    Tiling,
    Types,
    tiling,
    way_of_parts,
)
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.engines.gpu.tensor import one_kernel_products as algorithms
from pblasmp.engines.gpu.tensor.copy_methods import CopyMethod
from pblasmp.engines.request import Options
from pblasmp.engines.tensor.tensor_product import offsets, shares
from tests.helpers.copy_products import PRODUCTS, SPLIT, problem, product, queue
from tests.helpers.fakenvrtc import FakeNvrtc
from tests.helpers.fakepeers import Peers, PlayedKernel
from tests.helpers.gpu_memory import Fault
from tests.helpers.kernel_order import Order

HALF, BFLOAT = DTYPES["float16"], DTYPES["bfloat16"]
E4, E5 = FLOAT8["float8_e4m3fn"], FLOAT8["float8_e5m2"]
IN_HALF = Types(HALF, HALF, HALF, HALF)
SHARED_BYTES = 232448  # of a block on Hopper
WAYS = [
    *(("matmul_reduce_scatter", way) for way in PARTS if way != "exchanged"),
    *(("matmul_allreduce", way) for way in PARTS), ("matmul_allgather", "sent"),
]  # fmt: skip


@pytest.fixture
def take(monkeypatch):
    """Sets how parts travel."""
    return lambda way: monkeypatch.setattr(algorithms, "way_of_parts", lambda *_, **__: way)


@pytest.fixture
def small(monkeypatch):
    """Tiles that the model's memory holds, and no compiler."""
    monkeypatch.setattr(kernels, "TILE_ROWS", 8)
    monkeypatch.setattr(kernels, "WIDTHS", (16,))
    monkeypatch.setattr(kernels, "_MMA_WIDTHS", (16,))
    monkeypatch.setattr(algorithms, "OneKernel", PlayedKernel)


class Product:
    """A product of whole numbers, and the ranks' parts of it."""

    def __init__(
        self, peers: Peers, form: str, sizes: tuple[int, int, int], dtype: Any = HALF, **how: Any
    ) -> None:
        self.peers, self.form, size = peers, form, peers.size
        (t, n, k), self.bias = sizes, how.pop("bias", None)
        self.parts = {
            name: how.pop(name, shares(total, size)) if name in SPLIT[form] else (total,)
            for name, total in (("tokens", t), ("outputs", n), ("inputs", k))
        }
        self.activation, self.scales = how.pop("activation", None), how.pop("scales", None)
        types = {name: how.pop(name) for name in ("w_dtype", "out_dtype") if name in how}
        self.p, self.options = problem(form, size, self.parts, dtype, **types), Options(**how)
        rng = np.random.default_rng(t + n + k)
        self.x, self.w = rng.integers(-2, 3, (t, k)), rng.integers(-2, 3, (n, k))

    def _cut(self, name: str, rank: int) -> slice:
        parts = self.parts[name]
        return slice(None) if len(parts) == 1 else slice(*offsets(parts)[rank : rank + 2])

    def run(self, times: int = 1, seed: int | None = 0, gap: int = 0) -> None:
        """Queue it on every rank, run it, and compare; rows are ``gap`` entries further apart than they must be."""
        outs, amax, dtype = [], [], self.p.dtype
        made = [product(gpu, "one_kernel", self.p, self.options) for gpu in self.peers.gpus]
        for rank, gpu in enumerate(self.peers.gpus):
            tokens, outputs, inputs = (self._cut(name, rank) for name in ("tokens", "outputs", "inputs"))
            x, w = self.x[:, inputs].astype(dtype), self.w[outputs, inputs].astype(self.p.w_dtype)
            rows = tokens if self.form == "matmul_reduce_scatter" else slice(None)
            unit, d_unit = (self.scales[0] * self.scales[1], self.scales[2]) if self.scales else (1, 1)
            expected = self.options.alpha * unit * (self.x @ self.w.T)[rows]
            put = self.peers.array
            bias = None
            if self.bias is not None:
                bias = put(rank, self.bias[None, outputs].astype(BFLOAT if is_float8(dtype) else dtype))
                expected = expected + self.bias
            if self.activation:
                expected = np.maximum(expected, 0)
            scales, kept = None, []
            if self.scales:
                kept = [put(rank, np.full((1, 1), value, np.float32)) for value in (*self.scales, np.nan)]
                scales = SimpleNamespace(**dict(zip(("a", "b", "d", "amax"), kept, strict=True)))
                amax.append((kept[-1].values, abs(expected).max()))
            if is_float8(self.p.out_dtype):
                expected = np.clip(d_unit * expected, -448, 448).astype(self.p.out_dtype)
            ld = lambda cols: -(-cols // 16) * 16 + gap  # noqa: E731
            x, w = put(rank, x, ld=ld(x.shape[1])), put(rank, w, ld=ld(w.shape[1]))
            for _ in range(times):
                out = put(
                    rank, np.full(expected.shape, 77).astype(self.p.out_dtype), ld=ld(expected.shape[1])
                )
                queue(made[rank], x, w, None, out, bias, scales, activation=self.activation)
                gpu.use(x, w, out, *([] if bias is None else [bias]), *kept)
                outs.append((out.values, expected))
        self.peers.run(seed)
        for out, expected in outs:
            np.testing.assert_array_equal(out.astype(float), expected.astype(float))
        if (
            self.form != "matmul_reduce_scatter" and amax
        ):  # the largest of all ranks is told to all of them later
            amax = [(np.max([found for found, _ in amax]), amax[0][1])]
        assert [np.max(found) for found, _ in amax] == [largest for _, largest in amax]


@pytest.mark.parametrize(("form", "way"), WAYS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sizes", [(13, 40, 12), (30, 72, 9)])
def test_products(small, take, form, way, size, sizes):
    t, n, k = sizes
    take(way)
    outputs = {"outputs": (*[8] * (size - 1), n - 8 * (size - 1))} if form == "matmul_allgather" else {}
    Product(Peers(size), form, (t, n, k), **outputs).run()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_gpus_that_are_not_hopper(small, monkeypatch, form, capability):
    """They store or exchange whatever the size, need no boxes, and have no 8-bit floats."""
    monkeypatch.setattr(kernels, "_FEW", 0)
    outputs = {"outputs": (8, 8, 24)} if form == "matmul_allgather" else {}
    run = Product(Peers(3, capability=capability), form, (30, 40, 9), **outputs)
    run.run(times=3)
    kind = PRODUCTS[form]["one_kernel"]
    made = product(run.peers.gpus[0], "one_kernel", run.p, Options())
    assert made.tiles.mma
    assert made.tiles.parts == ("exchanged" if form == "matmul_allreduce" else "stored")
    assert made.buffers()["one_kernel"] == 0
    eight = problem(form, 3, {"tokens": (9, 9, 9), "outputs": (48,), "inputs": (16, 16, 16)} | (
        {"tokens": (27,), "outputs": (16, 16, 16), "inputs": (16,)} if form == "matmul_allgather" else {}
    ), E4, out_dtype=HALF)  # fmt: skip
    assert "8-bit floats" in kind.why_not(run.peers.gpus[0], eight, Options())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 128, 1025, 8192])
def test_tiles_of_other_gpus_fit(form, rows):
    """Into 99 KB of shared memory, which sm_89 and sm_120 have."""
    for cols in (8, 1024, 3000):
        way = way_of_parts(form, 2, rows, cols, 2048, 108, mma=True)
        tiles = tiling(form, 2, rows, cols, 2048, way, 108, mma=True)
        assert (tiles.cluster, tiles.buffers) == (1, 0)
        assert tiles.row_blocks * TILE_ROWS >= rows
        assert tiles.col_blocks * tiles.width >= cols
        assert tiles.stages >= 3
        assert tiles.shared_bytes <= 99 << 10


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_the_kernel_compiles_for_other_gpus(target):
    """Wherever NVRTC is, without a GPU."""
    pytest.importorskip("cuda.bindings.nvrtc")
    ways = {"matmul_allreduce": "exchanged", "matmul_reduce_scatter": "stored", "matmul_allgather": "stored"}
    for form, way in list(ways.items())[: None if target == "sm_80" else 1]:
        tiles = tiling(form, 2, 256, 256, 256, way, 108, mma=True)
        try:
            code = compiler.compiled(kernels.source(form, IN_HALF, 2, tiles), target)
        except RuntimeError as error:  # the Python bindings are there, the library is not
            pytest.skip(str(error))
        assert b"one_kernel" in code


@pytest.mark.parametrize(("form", "way"), WAYS)
def test_an_epilogue(small, take, form, way):
    take(way)
    outputs = {"outputs": (16, 24)} if form == "matmul_allgather" else {}
    bias = np.arange(-20, 20)
    Product(Peers(2), form, (13, 40, 12), bias=bias, activation="relu", alpha=2, **outputs).run()


@pytest.mark.parametrize(("form", "way"), WAYS)
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float8_e4m3fn"])
def test_8_bits(small, take, form, way, out):
    """Scales, a bias, the largest result; an 8-bit one is scaled, and its largest values are those of the type."""
    take(way)
    bias, types = np.arange(-24, 24) / 8, {"w_dtype": E5, "out_dtype": (DTYPES | FLOAT8)[out]}
    bias = None if out == "float16" else bias  # which the model reads as bfloat16
    outputs = {"outputs": (16, 32)} if form == "matmul_allgather" else {}
    how = {"bias": bias, "alpha": 2, "scales": (0.5, 0.125, 128.0)} | types | outputs
    Product(Peers(2), form, (13, 48, 32), E4, **how).run(times=2)


@pytest.mark.parametrize(("form", "way"), WAYS)
@pytest.mark.parametrize("seed", [1, 2, None])
def test_call_after_call_without_a_barrier(small, take, form, way, seed):
    """In any order that the flags allow: no rank's box is overwritten before it was read."""
    take(way)
    outputs = {"outputs": (16, 16, 8)} if form == "matmul_allgather" else {}
    Product(Peers(3), form, (9, 40, 6), **outputs).run(times=4, seed=seed)
    outputs = {"outputs": (24, 16)} if outputs else {}
    Product(Peers(2), form, (9, 40, 6), **outputs).run(times=4, seed=seed)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("form", "way"), [
    ("matmul_reduce_scatter", "fetched"), ("matmul_reduce_scatter", "stored"), ("matmul_allreduce", "exchanged"),
])  # fmt: skip
def test_one_set_of_boxes_would_be_a_race(small, monkeypatch, take, form, way, size):
    """The model is not blind: with one set for all calls, a fast rank overwrites what a slow one still reads."""
    real = algorithms.KernelJob

    def run() -> None:
        for seed in range(20):
            Product(Peers(size), form, (9, 40, 6)).run(times=4, seed=seed)

    take(way)
    one = lambda how: {name: [how[name][0]] * 2 for name in ("boxes", "inboxes")}  # noqa: E731
    monkeypatch.setattr(algorithms, "KernelJob", lambda **how: real(**(how | one(how))))
    with pytest.raises(Fault, match=r"being|not emptied"):
        run()


@pytest.mark.parametrize("form", FORMS)
def test_memory_that_no_tensor_map_reaches_is_copied(small, form):
    outputs = {"outputs": (16, 24)} if form == "matmul_allgather" else {}
    Product(Peers(2), form, (13, 40, 12), **outputs).run(times=2, gap=3)


@pytest.mark.parametrize(("how", "why"), [
    ({"dtype": DTYPES["float32"]}, "for bfloat16, float16 and 8-bit floats, not float32"),
    ({"out_dtype": DTYPES["float32"]}, "a single type"),
    ({"w_dtype": HALF}, "a single type"),
    ({"comm_dtype": DTYPES["float32"]}, "a single type"),
    ({"dtype": E4, "w_dtype": E5, "out_dtype": HALF, "inputs": (16, 16)}, ""),
    ({"dtype": E4, "out_dtype": E4, "inputs": (16, 16), "comm_dtype": HALF}, ""),
    ({"dtype": E4, "out_dtype": DTYPES["float32"], "inputs": (16, 16)}, "a single type of 16 bits"),
    ({"dtype": E4, "out_dtype": E4, "inputs": (16, 16), "comm_dtype": DTYPES["float32"]}, "of 16 bits"),
    ({"dtype": E4, "out_dtype": BFLOAT, "inputs": (16, 16), "comm_dtype": HALF}, "a single type of 16 bits"),
    ({"dtype": E4, "out_dtype": BFLOAT, "inputs": (16, 16), "outputs_first": False}, "outputs × inputs"),
    ({"dtype": E5, "w_dtype": E5, "out_dtype": BFLOAT, "inputs": (16, 16)}, "both float8_e5m2"),
    ({"dtype": E4, "out_dtype": BFLOAT}, "multiples of 16 inputs"),
    ({"outputs_first": False}, "outputs × inputs"),
    ({"beta": 1}, "adds no C"),
    ({"alpha": 1j}, "real alpha"),
    ({"compute": "float32"}, "no compute type"),
    ({"inputs": (8, 0)}, "no part of the product"),
    ({"tokens": (1,)}, "fewer tokens than ranks"),
])  # fmt: skip
def test_what_is_refused(how, why):
    gpu = Peers(2).gpus[0]
    kind, how = PRODUCTS["matmul_allreduce"]["one_kernel"], dict(how)
    parts = {"tokens": (64,), "outputs": (48,), "inputs": (8, 8)}
    if "dtype" not in how:
        assert kind.why_not(gpu, problem("matmul_allreduce", 2, parts, BFLOAT), Options()) == ""
    parts |= {name: how.pop(name) for name in parts if name in how}
    options = {name: how.pop(name) for name in ("alpha", "beta", "comm_dtype", "compute") if name in how}
    p = problem("matmul_allreduce", 2, parts, **({"dtype": BFLOAT} | how))
    found = kind.why_not(gpu, p, Options(**options))
    assert why in found if why else not found


@pytest.mark.parametrize(("asked", "beside_others", "left"), [
    (None, False, 0), (None, True, 26), (3, False, 3), (3, True, 3),
])  # fmt: skip
def test_multiprocessors_are_left_to_others(small, monkeypatch, asked, beside_others, left):
    """As many as the caller says, or where PyTorch has other communicators; the tiles and the launch know."""
    peers, launched = Peers(2, multiprocessors=40), []
    gpu = peers.gpus[0]
    monkeypatch.setattr(gpu, "one_kernel", lambda kernel, job, blocks: launched.append(blocks))
    p = problem("matmul_reduce_scatter", 2, {"tokens": (8, 8), "outputs": (48,), "inputs": (8, 8)}, HALF)
    made, _ = (
        product(each, "one_kernel", p, Options(comm_sms=asked), beside_others=beside_others)
        for each in peers.gpus
    )
    sizes = 8, 48, 16, made.parts
    assert made.tiles == tiling("matmul_reduce_scatter", 2, *sizes, 40 - left)
    assert (f"{left} multiprocessors are left" in made.path) == (left > 0)
    x, w, out = (peers.array(0, np.zeros(shape, HALF)) for shape in ((16, 8), (48, 8), (8, 48)))
    queue(made, x, w, None, out)
    assert launched == [40 - left]


@pytest.mark.parametrize(("ranks", "outputs", "beside_others", "options", "refused"), [
    (4, 48, True, Options(), False), (4, 48, False, Options(), False), (3, 48, True, Options(), True),
    (4, 1 << 30, True, Options(), True), (8, 48, True, Options(), True),
    (2, 48, True, Options(), False), (2, 1 << 30, True, Options(), True), (2, 1 << 30, False, Options(), False),
    (8, 48, True, Options(comm_sms=40), False), (8, 48, True, Options(algo="one_kernel"), False),
])  # fmt: skip
def test_auto_does_not_shut_out_other_communicators(ranks, outputs, beside_others, options, refused):
    """Where PyTorch has some, whoever takes the kernel says how much it leaves, unless it is known to pay."""
    gpu = Peers(ranks, multiprocessors=132).gpus[0]
    runtime = SimpleNamespace(size=ranks, beside_others=lambda: beside_others)
    engine = SimpleNamespace(session=SimpleNamespace(gpu=gpu, runtime=runtime, why_no_gpu=""))
    parts = {"tokens": (8,) * ranks, "outputs": (outputs,), "inputs": (8,) * ranks}
    p = problem("matmul_reduce_scatter", ranks, parts, HALF)
    why = CopyMethod(PRODUCTS["matmul_reduce_scatter"]["one_kernel"]).refusal(engine, p, options, None)
    assert ("comm_sms= says how many" in why) is refused
    assert bool(why) is refused


@pytest.mark.parametrize(("outputs", "later", "options", "known"), [
    (48, True, Options(), True), (48, False, Options(), False), (1 << 30, True, Options(), False),
    (1 << 30, True, Options(algo="one_kernel"), True), (1 << 30, False, Options(comm_sms=26), True),
])  # fmt: skip
def test_other_sizes_beside_other_communicators(small, monkeypatch, outputs, later, options, known):
    """A product is resized without a vote while what is left to others, and the rule, are the same."""

    def of(outputs: int) -> Any:
        parts = {"tokens": (8, 8), "outputs": (outputs,), "inputs": (8, 8)}
        return problem("matmul_reduce_scatter", 2, parts, HALF)

    gpus = Peers(2, multiprocessors=132).gpus
    made, _ = (product(each, "one_kernel", of(96), options, beside_others=True, later=later) for each in gpus)
    monkeypatch.setattr(type(made), "covered", True)  # by symmetric memory
    assert (made.resized(of(outputs)) is not None) is known


def test_some_multiprocessor_must_be_left_for_the_kernel():
    gpu, kind = Peers(2, multiprocessors=40).gpus[0], PRODUCTS["matmul_reduce_scatter"]["one_kernel"]
    p = problem("matmul_reduce_scatter", 2, {"tokens": (8, 8), "outputs": (48,), "inputs": (8, 8)}, HALF)
    assert kind.why_not(gpu, p, Options(comm_sms=39)) == ""
    assert kind.why_not(gpu, p, Options(comm_sms=40)) == "comm_sms=40 leaves none of 40 multiprocessors"


def test_which_gpus_are_refused():
    kind = PRODUCTS["matmul_reduce_scatter"]["one_kernel"]
    p = problem("matmul_reduce_scatter", 2, {"tokens": (8, 8), "outputs": (48,), "inputs": (8, 8)}, BFLOAT)
    for name, value, why in (
        ("capability", 75, "8.0 or above"), ("shared_gpus", True, "share a GPU"),
        ("why_no_windows", "too far", "too far"),
    ):  # fmt: skip
        gpu = Peers(2).gpus[0]
        assert kind.why_not(gpu, p, Options()) == ""
        setattr(gpu, name, value)
        assert why in kind.why_not(gpu, p, Options())
    odd = problem("matmul_allgather", 2, {"tokens": (8,), "outputs": (12, 12), "inputs": (8,)}, BFLOAT)
    kind = PRODUCTS["matmul_allgather"]["one_kernel"]
    assert "multiple of 8 outputs" in kind.why_not(Peers(2).gpus[0], odd, Options())


@pytest.mark.parametrize(("form", "way"), WAYS)
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 1), (128, 64), (129, 65), (2048, 1792), (4096, 3584), (8192, 6656)]
)
@pytest.mark.parametrize("blocks", [1, 114, 132])
@pytest.mark.parametrize("line", [16, 4096, 16384])
def test_tiles_cover_all_and_fit(form, way, rows, cols, blocks, line):
    tiles = tiling(form, 2, rows, cols, line, way, blocks)
    assert tiles.parts == way
    assert way != "exchanged" or tiles.width <= 128  # parts of more columns have no room in registers
    assert tiles.row_blocks * TILE_ROWS >= rows > (tiles.row_blocks - tiles.cluster) * TILE_ROWS
    assert tiles.col_blocks * tiles.width >= cols > (tiles.col_blocks - 1) * tiles.width
    assert tiles.row_blocks % tiles.cluster == 0
    assert tiles.cluster <= blocks
    assert tiles.stages >= 3
    assert tiles.shared_bytes <= SHARED_BYTES


def test_tiles_fill_the_multiprocessors():
    def width(form: str, rows: int, cols: int, line: int = 4096, way: str = "fetched") -> int:
        return tiling(form, 2, rows, cols, line, way, 132).width

    assert width("matmul_reduce_scatter", 512, 1024) == 64  # 128 tiles, one round
    assert width("matmul_reduce_scatter", 4096, 1792) == 224  # 512 tiles, four rounds
    assert width("matmul_allreduce", 4096, 1792) == 128  # more travels: smaller last tiles
    assert width("matmul_reduce_scatter", 512, 1792, way="stored") == 128  # 112 tiles: one round
    assert width("matmul_allreduce", 1024, 1024, way="exchanged") == 64
    assert width("matmul_allreduce", 2048, 2048, way="exchanged") == 128
    # the last transfers take as long as before, multiplying with more inputs longer
    assert [width("matmul_reduce_scatter", 4096, 1792, line) for line in (2048, 4096)] == [128, 224]
    assert [width("matmul_allreduce", 2048, 6656, line) for line in (2048, 8192, 16384)] == [128, 208, 240]
    assert [width("matmul_allgather", 4096, 3328, line) for line in (2048, 32768)] == [128, 208]
    clusters = [tiling(FORMS[0], 2, 1024, 1792, 4096, way, 132).cluster for way in ("stored", "fetched")]
    assert clusters == [1, 2]


@pytest.mark.parametrize("width", kernels.WIDTHS)
def test_boxes_of_tiles(width):
    """They cover a tile, have 8 KiB at most, and rows that TMA swizzles."""
    rows, cols = kernels.Tiling(width, 1, 1, 1, 1, 3, 0, "sent").box
    assert TILE_ROWS % rows == width % cols == 0
    assert rows * cols * 2 <= 8192
    assert cols * 2 in (32, 64, 128)


def test_parts_of_two_ranks_are_stored_or_exchanged_where_nothing_is_hidden():
    way = lambda form, ranks, rows, line=4096: way_of_parts(form, ranks, rows, 2048, line, 132)  # noqa: E731
    assert way("matmul_reduce_scatter", 2, 2048) == "stored"  # 256 tiles
    assert way("matmul_allreduce", 2, 2048) == "exchanged"
    assert not {way(form, 2, 2176) for form in FORMS} & {"stored", "exchanged"}
    assert [way("matmul_allreduce", 2, rows, 2048) for rows in (4224, 4352)] == ["exchanged", "fetched"]
    assert way("matmul_allreduce", 4, 2176, 2048) == way("matmul_reduce_scatter", 2, 2176, 2048) == "sent"


def test_more_ranks_exchange_what_takes_as_long_as_storing_and_a_transfer_back():
    """Each of them sends its parts to all others: 3 times as many bytes on four ranks, not 1.5 times."""
    way = lambda form, ranks, n: way_of_parts(form, ranks, n, n, 2048, 132)  # noqa: E731
    ways = {
        n: [way("matmul_allreduce", ranks, n) for ranks in (2, 3, 4, 8, 16)]
        for n in (256, 512, 1024, 2048, 4096)
    }
    assert ways == {
        256: ["exchanged"] * 5,
        512: ["exchanged"] * 3 + ["stored"] * 2,
        1024: ["exchanged"] * 2 + ["stored"] * 3,
        2048: ["exchanged"] + ["stored"] * 4,
        4096: ["fetched"] + ["sent"] * 4,
    }
    assert {way("matmul_reduce_scatter", ranks, 2048) for ranks in (2, 3, 4, 8, 16)} == {"stored"}
    assert {way("matmul_reduce_scatter", ranks, 4096) for ranks in (3, 4, 8, 16)} == {"sent"}
    assert {way("matmul_allgather", ranks, 256) for ranks in (2, 4)} == {"sent"}


@pytest.mark.parametrize("form", FORMS)
def test_the_rule_is_asked_about_the_whole_result(small, monkeypatch, form):
    """Not about the ranks' sizes added up, which are those of the whole on every rank if nothing is split."""
    asked = []
    monkeypatch.setattr(algorithms, "way_of_parts", lambda *sizes, **_: asked.append(sizes) or "sent")
    outputs = {"outputs": (16, 24)} if form == "matmul_allgather" else {}
    Product(Peers(2), form, (13, 40, 12), **outputs).run()
    line = 24 if form == "matmul_allgather" else 12  # bytes
    assert asked == [(form, 2, 13, 40, line, Peers(2).gpus[0].multiprocessors)] * 2


def test_parts_are_fetched_where_that_is_hidden():
    """By the owner of two, if a tile takes as long as its transfer; more ranks are sent what they add."""
    fetches = lambda form, ranks, inputs: way_of_parts(form, ranks, 8192, 1792, 2 * inputs, 132) == "fetched"  # noqa: E731
    assert [fetches("matmul_reduce_scatter", 2, inputs) for inputs in (1024, 2048)] == [False, True]
    assert not fetches("matmul_reduce_scatter", 4, 2048)
    assert fetches("matmul_allreduce", 2, 1024)
    assert not fetches("matmul_allgather", 2, 2048)


@pytest.mark.parametrize(("ranks", "cluster"), [(2, 1), (2, 2), (3, 1), (4, 2)])
def test_the_order_of_the_tiles(tmp_path, ranks, cluster):
    """Each tile once, those of a cluster side by side, and none waits for another rank's tile of a later position.

    The kernel's own lines, compiled for the CPU.
    """
    kernel = Order(tmp_path, ranks, cluster, "matmul_reduce_scatter")
    for rows, cols, most in itertools.product((1, 3, 8, 9), (1, 2, 7), (1, 5, 66)):
        share, blocks = (rows * cluster, cols), most * cluster
        orders = []
        for rank in range(ranks):
            found = kernel.tiles(share, rank, blocks)
            others = [tile for tile in np.ndindex(ranks, *share) if tile[0] != rank]
            assert sorted(map(tuple, kernel.results(share, rank, blocks).tolist())) == others
            assert np.unique(found, axis=0).tolist() == list(map(list, np.ndindex(ranks, *share)))
            for i in range(cluster):
                shifted = found[::cluster] + np.array([0, i, 0])
                np.testing.assert_array_equal(found[i::cluster], shifted)
            orders.append({tuple(tile): s // cluster for s, tile in enumerate(found.tolist())})
        for rank, order in enumerate(orders):
            for tile, position in order.items():
                if tile[0] == rank:
                    assert all(each[tile] < position for each in orders if each is not order)


@pytest.mark.parametrize(("form", "way"), WAYS)
def test_buffers_are_as_large_as_the_kernel_needs(small, take, tmp_path, form, way):
    """By the kernel's own lines: no image lies beyond a buffer, and none is reserved that no rank's image can be in."""
    take(way)
    outputs = (16, 24, 8) if form == "matmul_allgather" else (48,)
    split = {"tokens": (9, 9, 9), "outputs": (48,), "inputs": (8, 8, 8)}
    parts = {**split, "outputs": outputs} | {name: (27,) for name in ("tokens",) if name not in SPLIT[form]}
    parts["inputs"] = (8,) if form == "matmul_allgather" else parts["inputs"]
    made = product(Peers(3).gpus[0], "one_kernel", problem(form, 3, parts, HALF), Options())
    kernel, buffers, tiles = Order(tmp_path, 3, 1, form, way), made.buffers(), made.tiles
    gives = form == "matmul_allreduce" and way == "stored"  # results, behind the parts of all ranks
    last = tiles.count - 1, 2
    most = [
        max(kernel.image(tiles.count, *reversed(last), inbox) + 1 for inbox in inboxes)
        for inboxes in ([0], [1, 2] if gives else [1])
    ]
    half = {name: nbytes // 2 // tiles.image_bytes for name, nbytes in buffers.items()}
    stores = way in ("stored", "exchanged")
    assert half[algorithms.ONE_KERNEL_INBOXES] == (most[1] if stores else 0)
    assert half["one_kernel"] == (0 if stores else most[0])
    if form == "matmul_allgather":
        assert most[0] == tiles.count


@pytest.mark.parametrize("form", FORMS)
def test_copies_of_what_no_tensor_map_reaches_are_reserved_and_counted(small, form):
    """Where rows are not multiples of 16 bytes: nothing is allocated in a run, which a graph may record."""
    sizes = {"tokens": 13, "outputs": 42, "inputs": 10}
    parts = {name: (n, n) if name in SPLIT[form] else (n,) for name, n in sizes.items()}
    if form == "matmul_allgather":
        parts["outputs"] = (40, 42)
    peers = Peers(2)
    made = [product(gpu, "one_kernel", problem(form, 2, parts, HALF), Options()) for gpu in peers.gpus]
    for rank, (gpu, each) in enumerate(zip(peers.gpus, made, strict=True)):
        before = dict(gpu.scratches)
        p = each.p
        columns = sum(p.outputs) if form == "matmul_allgather" else p.outputs[rank]
        shapes = (p.tokens[rank], p.inputs[rank]), (p.outputs[rank], p.inputs[rank]), (p.rows[rank], columns)
        x, w, out = (peers.array(rank, np.zeros(shape, HALF)) for shape in shapes)
        queue(each, x, w, None, out)
        assert gpu.scratches == before
        assert {name for name in before if name.startswith("one_kernel")} == {
            f"one_kernel {name}" for name in ("x", "w", "out")
        }
        told = each.workspace.device_bytes
        assert told == sum(nbytes for _, nbytes in before.values()) + sum(each.buffers().values())


def test_a_kernel_is_loaded_once_on_each_gpu(monkeypatch):
    """However many plans use it; GPUs, forms and tilings are told apart."""
    here, nvrtc = SimpleNamespace(device=0), FakeNvrtc(monkeypatch)
    nvrtc.driver.cuCtxGetDevice = lambda: (0, here.device)
    launches = SimpleNamespace(driver=SimpleNamespace(launchKernel=None, launchCooperativeKernel=None))
    for name in ("cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", launches)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    narrow, wide = (tiling(FORMS[0], 2, rows, 1792, 4096, "fetched", 132) for rows in (512, 2048))
    asked = [(0, FORMS[0], narrow), (0, FORMS[0], wide), (0, FORMS[1], wide), (1, FORMS[0], narrow)]
    functions = []
    for here.device, form, tiles in asked * 3:
        functions.append(OneKernel(form, IN_HALF, 2, tiles)._function)
    assert len(nvrtc.modules) == len(set(functions)) == len(asked)
    assert functions == functions[: len(asked)] * 3
    assert set(nvrtc.targets) == {"sm_90a"}
    assert nvrtc.rooms == [tiles.shared_bytes for _, _, tiles in asked]
    OneKernel(FORMS[0], IN_HALF, 2, tiling(FORMS[0], 2, 512, 1792, 4096, "stored", 132, mma=True))
    assert nvrtc.targets[-1] == "sm_90"  # the GPU's own


class _Packed(ctypes.Structure):
    """``struct Job`` of the kernel, for three ranks."""

    _fields_ = (
        ("maps", ctypes.c_char * 128 * 5), ("control", ctypes.c_uint64), ("flags", ctypes.c_uint64 * 3),
        ("boxes", ctypes.c_uint64 * 3 * 2),
        ("inboxes", ctypes.c_uint64 * 3 * 2), ("bias", ctypes.c_uint64), ("scales", ctypes.c_uint64 * 3),
        ("amax", ctypes.c_uint64), ("starts", ctypes.c_int * 4),
        ("row_blocks", ctypes.c_int), ("col_blocks", ctypes.c_int), ("steps", ctypes.c_int), ("rank", ctypes.c_int),
        ("cols", ctypes.c_int), ("capacity", ctypes.c_int), ("tiles", ctypes.c_int),
        ("activation", ctypes.c_int), ("bias_type", ctypes.c_int), ("alpha", ctypes.c_float),
    )  # fmt: skip


def test_packed_arguments(monkeypatch):
    """Against a declaration of the kernel's structure; the kernel itself asserts its size."""
    kernel = object.__new__(OneKernel)
    kernel._driver = None
    kernel._lay_out(HALF, 3, tiling("matmul_allreduce", 3, 40, 72, 200, "sent", 132))
    monkeypatch.setattr(kernels, "_map", lambda _, matrix, box: f"{matrix.address} {box}".encode().ljust(128))
    x, w, d = View(1, 120, 100, 104, HALF), View(2, 72, 100, 104, HALF), View(3, 40, 72, 80, HALF)
    copies = [View(10, 40, 72, 80, HALF), None, View(12, 39, 72, 80, HALF)]
    job = KernelJob(x, w, d, [0, 40, 80, 119], 20, [21, 22, 23], [[30, 31, 32], [40, 41, 42]],
              [[60, 61, 62], [70, 71, 72]], 7, 1, copies,
              View(50, 1, 72, 72, np.dtype(np.float32)), "gelu", 0.5, 81, 82, 83, 84)  # fmt: skip
    packed = kernel._packed(job)
    assert len(packed) == kernels.job_bytes(3) == -(-ctypes.sizeof(_Packed) // 64) * 64
    got = _Packed.from_buffer_copy(packed)
    width, box, cluster = kernel.tiles.width, kernel.tiles.box, kernel.tiles.cluster
    assert [bytes(each).decode().strip() for each in got.maps] == [
        "1 (128, 64)", f"2 ({width // cluster}, 64)",
        *(f"{address} {box}" for address in (10, 3, 12)),
    ]  # fmt: skip
    assert (got.control, list(got.flags), [list(b) for b in got.boxes]) == (20, [21, 22, 23], job.boxes)
    assert [list(b) for b in got.inboxes] == job.inboxes
    assert (got.bias, got.bias_type, list(got.scales), got.amax) == (50, 2, [81, 82, 83], 84)
    assert (list(got.starts), got.steps, got.rank, got.cols) == ([0, 40, 80, 119], 2, 1, 72)
    assert (got.capacity, got.tiles, got.activation, got.alpha) == (7, kernel.tiles.count, 2, 0.5)


def test_matrices_of_other_gpus():
    """By address, bytes from row to row, rows and columns, where Hopper has maps of TMA."""
    kernel = object.__new__(OneKernel)
    kernel._lay_out(HALF, 2, tiling("matmul_reduce_scatter", 2, 40, 72, 200, "stored", 108, mma=True))
    x, w, d = (View(i << 40, 40, 72, 80 + 8 * i, HALF) for i in (1, 2, 3))
    packed = kernel._packed(KernelJob(x, w, d, [0, 40, 80], 20, [0] * 2, [[0] * 2] * 2, [[0] * 2] * 2, 7, 1))
    found = [struct.unpack_from("<QQii", packed, 128 * i) for i in range(4)]
    assert found == [(1 << 40, 176, 40, 72), (2 << 40, 192, 40, 72), (0, 0, 0, 0), (3 << 40, 208, 40, 72)]


@pytest.mark.parametrize("dtype", [HALF, E4])
def test_steps_and_boxes_of_k_are_128_bytes(monkeypatch, dtype):
    kernel, boxes = object.__new__(OneKernel), []
    kernel._lay_out(dtype, 2, tiling("matmul_reduce_scatter", 2, 40, 72, 272 * dtype.itemsize, "sent", 132))
    kernel._driver = None
    monkeypatch.setattr(kernels, "_map", lambda _, matrix, box: boxes.append(box) or bytes(128))
    x, w, d = View(1, 40, 272, 272, dtype), View(2, 72, 272, 272, dtype), View(3, 40, 72, 80, HALF)
    packed = kernel._packed(KernelJob(x, w, d, [0, 40, 80], 20, [0] * 2, [[0] * 2] * 2, [[0] * 2] * 2, 7, 1))
    inputs = 128 // dtype.itemsize
    assert kernel.tiles.width == 64
    assert [box[1] for box in boxes[:2]] == [inputs] * 2
    steps = 128 * 4 + 8 * 16 + 4 * 5  # behind maps, addresses, starts and two numbers
    assert (
        int.from_bytes(packed[steps : steps + 4], "little") == {2: 5, 1: 4}[dtype.itemsize]
    )  # 8 bits: two at a time


def test_8_bits_are_multiplied_in_the_instructions_for_their_types():
    """As many columns at once as registers have room for beside the sums."""
    for width, columns in ((64, 64), (128, 128), (192, 96), (224, 112), (256, 128)):
        tiles = Tiling(width, 8, 8, 1, 1, 3, 0, "sent")
        text = kernels.source(FORMS[0], Types(E5, E4, BFLOAT, BFLOAT), 2, tiles)
        assert f"m64n{columns}k32.f32.e5m2.e4m3" in text
        assert f"#define WN {columns}\n" in text
        assert "#define EIGHT 1\n#define HALF 0\n#define RESULT 0\n" in text
    text = kernels.source(FORMS[2], Types(E4, E4, HALF, E5), 2, Tiling(64, 8, 8, 1, 1, 3, 2, "sent"))
    assert "#define EIGHT 1\n#define HALF 1\n#define RESULT 2\n" in text


@pytest.mark.parametrize("form", FORMS)
def test_the_source_has_its_macros(form):
    text = kernels.source(form, IN_HALF, 4, Tiling(128, 8, 8, 2, 2, 5, 2, "stored"))
    head, body = text.split("// SPDX", 1)
    assert f"#define FORM {FORMS.index(form)}\n" in head
    assert "m64n128k16.f32.f16.f16" in head
    assert head.count('"+f"') == 64
    assert all(
        f"#define {name} " not in body
        for name in ("FORM", "RANKS", "BN", "CLUSTER", "STAGES", "SLOTS", "PARTS")
    )
