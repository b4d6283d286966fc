# SPDX-License-Identifier: Apache-2.0
"""How the engine's kernels are launched, on the model that plays them: types, widths of words, bounds, results."""

from __future__ import annotations

import ctypes
import re
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.engines.gpu.kernels.compiler import Kernel, stand_in
from pblasmp.engines.gpu.kernels.kernels import Deal, Kernels, Tile, vector_width, word_of
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.errors import ArgumentError
from tests.helpers import fakelapack
from tests.helpers.epilogues import tanh_gelu
from tests.helpers.fakegpu import FakeGpu

ALL = DTYPES | FLOAT8
STREAM = SimpleNamespace(ptr=0x51)


class Noting(FakeGpu):
    """A GPU that notes how kernels are compiled and launched: blocks, their threads, and macros."""

    def __init__(self) -> None:
        super().__init__(multiprocessors=10)
        self.compiled: list[dict[str, str]] = []
        self.launches: list[tuple[int, int, dict[str, str]]] = []
        self._macros: dict[int, dict[str, str]] = {}

    def load(self, device: int, text: str, *kernel: Any) -> int:
        number = super().load(device, text, *kernel)
        self._macros[number] = dict(re.findall(r"^#define (\w+) (.*)$", text, re.MULTILINE))
        self.compiled.append(self._macros[number])
        return number

    def launch(self, kernel: int, *shape: int, run: Any = fakelapack.launch_kernel) -> None:
        blocks, _, one, threads, *ones, shared, stream, _, _ = shape
        assert (one, *ones, shared, stream) == (1, 1, 1, 0, STREAM.ptr)
        self.launches.append((blocks, threads, self._macros[kernel]))
        run(kernel, *shape)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Noting:
    gpu = Noting()
    monkeypatch.setattr(fakelapack, "launch_kernel", gpu.launch)
    gpu.install(monkeypatch)
    return gpu


@pytest.fixture
def kernels(gpu: Noting) -> Kernels:
    return Kernels(sys.modules["cupy"])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def matrix(rng: np.random.Generator, dtype: str, rows: int = 9, cols: int = 64, ld: int = 0) -> np.ndarray:
    """Whole numbers, rows ``ld`` of them apart."""
    return rng.integers(-2, 3, (rows, ld or cols)).astype(float).astype(ALL[dtype])[:, :cols]


def at(x: np.ndarray) -> View:
    return View(x.ctypes.data, *x.shape, x.strides[0] // x.itemsize, x.dtype)


def view(dtype: str, rows: int = 9, cols: int = 64, at: int = 0x1000, ld: int = 0) -> View:
    return View(at, rows, cols, ld or cols, ALL[dtype])


@pytest.mark.parametrize(("dtype", "cols", "views", "width"), [
    ("bfloat16", 64, [{}], 8),
    ("float32", 64, [{}], 4),
    ("complex128", 7, [{"cols": 7}], 1),
    ("bfloat16", 63, [{"cols": 63}], 1),
    ("bfloat16", 64, [{"at": 0x1008}], 1),
    ("bfloat16", 64, [{"ld": 68}], 1),
    ("bfloat16", 64, [{"ld": 68, "rows": 1}], 8),
    ("bfloat16", 64, [{"ld": 68, "rows": 2}], 1),
    ("bfloat16", 64, [{}, {"dtype": "float32", "ld": 68}], 8),  # 16 bytes are enough for two halves
    ("bfloat16", 64, [{}, {"dtype": "float32", "ld": 66}], 1),
    ("bfloat16", 64, [{}, {"dtype": "float8_e4m3fn", "at": 0x1008, "ld": 72}], 8),
    ("bfloat16", 64, [{}, {"dtype": "float8_e4m3fn", "at": 0x1004}], 1),
])  # fmt: skip
def test_vectors_never_cross_an_alignment_or_a_row(dtype, cols, views, width):
    assert vector_width(ALL[dtype], cols, [view(**({"dtype": dtype} | how)) for how in views]) == width


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(9, 64), (1, 1), (300, 1000), (512, 8), (5, 7)])
def test_sums_cover_every_entry_once(gpu, kernels, rng, dtype, rows, cols):
    one, other = (matrix(rng, dtype, rows, cols, 2 * cols) for _ in range(2))
    d = matrix(rng, dtype, rows, cols)
    kernels.add(STREAM, [at(one), at(other)], [at(d)])
    assert np.array_equal(d, one + other)
    ((blocks, threads, macros),) = gpu.launches
    assert 1 <= blocks <= 20
    # no block has nothing to do
    assert (blocks - 1) * threads < rows * cols // int(macros["V"])


def test_sums_of_other_types(gpu, kernels, rng):
    parts = [matrix(rng, "float16") for _ in range(3)]
    outs = [matrix(rng, "float8_e5m2", ld=ld) for ld in (64, 80, 80)]
    c, bias = matrix(rng, "bfloat16", ld=72), matrix(rng, "float32", 1)
    scale, amax = np.full(1, 0.5, np.float32), np.zeros(1, np.float32)
    kernels.add(
        STREAM, [*map(at, parts)], [*map(at, outs)], beta=2, c=at(c), bias=at(bias), activation="gelu",
        scale=scale.ctypes.data, amax=amax.ctypes.data, blocks=3,
    )  # fmt: skip
    total = tanh_gelu(sum(part.astype(np.float32) for part in parts) + 2 * c.astype(np.float32) + bias)
    for out in outs:
        assert np.array_equal(out, (0.5 * total).astype(out.dtype))
    assert amax[0] == abs(total).max()
    ((blocks, _, macros),) = gpu.launches
    assert (blocks, macros["SUM"], macros["FLOAT8"]) == (1, "float", "1")


def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver is told: whether blocks meet, shape, stream, and where the arguments are."""
    seen: list[Any] = []

    def queue(meets: bool, *given: Any) -> None:
        *shape, stream, places = given if meets else given[:-1]
        assert meets or given[-1] == 0
        seen.append((meets, shape, stream, places))

    driver = SimpleNamespace(launchKernel=partial(queue, False), launchCooperativeKernel=partial(queue, True))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", SimpleNamespace(driver=driver))
    return seen


def at_places(places: int, *nbytes: int) -> list[bytes]:
    addresses = np.frombuffer(ctypes.string_at(places, 8 * len(nbytes)), np.uint64).tolist()
    assert all(at % 8 == 0 for at in addresses)
    return [ctypes.string_at(at, n) for at, n in zip(addresses, nbytes, strict=True)]


@pytest.mark.parametrize("meets", [False, True])
def test_the_driver_finds_each_argument(monkeypatch, meets):
    """Each as its type in C, wherever the one before ends; other arguments are there in the next launch."""
    seen = launched(monkeypatch)
    kernel = Kernel(0x77, "3Qif5sd2dI", meets=meets)
    for number in (-7, 9):
        given = 1, 2, 1 << 63, number, 0.5, b"bytes", 2.5, 1.0, -2.0, 6
        kernel(STREAM, (5, 2), 128, given, 96)
        assert seen[-1][:3] == (meets, [0x77, 5, 2, 1, 128, 1, 1, 96], 0x51)
        expected = [
            np.array(given[:3], np.uint64), np.int32(number), np.float32(0.5), np.array(list(b"bytes"), np.uint8),
            np.float64(2.5), np.complex128(1 - 2j), np.uint32(6),
        ]  # fmt: skip
        assert at_places(seen[-1][3], *(x.nbytes for x in expected)) == [x.tobytes() for x in expected]


def test_a_launch_is_placed_at_real_addresses(monkeypatch):
    """To be kept, or once. Only what is said to be addresses: a scalar's first byte may be the number of a memory."""
    seen = launched(monkeypatch)
    words = stand_in(3, 0x70008), 7, stand_in(16) + 0x120, 0x5000
    template = Kernel(0x77, "4Qid").launch((5, 1), 128, (*words, 2, -1.5), addresses=(0, 2, 3))
    first, second = template.placed({3: 0x8000, 16: 1 << 40}), template.placed({3: 0x9000, 16: 1 << 41})
    once = partial(template.at, {3: 0x9000, 16: 1 << 41})
    for launch, stream in ((first, 1), (once, 2), (second, 2), (first, 3), (once, 1)):
        launch(SimpleNamespace(ptr=stream))
        where = {1: [0x8008, 7, (1 << 40) + 0x120, 0x5000], 2: [0x9008, 7, (1 << 41) + 0x120, 0x5000]}
        assert seen[-1][:3] == (False, [0x77, 5, 1, 1, 128, 1, 1, 0], stream)
        addresses, *rest = at_places(seen[-1][3], 32, 4, 8)
        assert np.frombuffer(addresses, np.uint64).tolist() == where[1 if launch is first else 2]
        assert rest == [np.int32(2).tobytes(), np.float64(-1.5).tobytes()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128", "float8_e4m3fn"])
def test_a_sum_of_no_parts_is_c_and_bias(gpu, kernels, rng, dtype):
    """Without an operand that is not read having a type that the kernel cannot read."""
    d, c = matrix(rng, dtype), matrix(rng, "bfloat16" if dtype.startswith("float8") else dtype)
    for beta in (2, 0):
        expected = beta * c.astype(complex)
        c[...] = c if beta else np.nan
        kernels.add(STREAM, [], [at(d)], beta=beta, c=at(c))
        assert np.array_equal(d.astype(complex), expected)
    assert not {each[name] for each in gpu.compiled for name in ("CTYPE", "BIAS")} & {"e4m3", "e5m2"}
    with pytest.raises(ArgumentError, match="other shapes"):
        kernels.add(STREAM, [], [at(d), at(d[:8])])


def test_large_sums_count_in_64_bits(gpu, kernels, monkeypatch):
    monkeypatch.setattr(gpu.queues, "queue", lambda *_: None)  # there is no such memory
    for shape in ((2**20, 2**14), (9, 64)):
        kernels.add(STREAM, [view("float64", *shape)], [view("float64", *shape)])
    assert [macros["INDEX"] for macros in gpu.compiled] == ["u64", "unsigned"]


@pytest.mark.parametrize(("how", "why"), [
    ({"parts": [view("float32"), view("float32", cols=32)]}, "other shapes than 9 x 64"),
    ({"outs": [view("float32", rows=8)]}, "other shapes than 9 x 64"),
    ({"beta": 1, "c": view("float32", rows=8)}, "other shapes"),
    ({"parts": [view("float32"), view("float32", ld=80)]}, "one type and leading dimension"),
    ({"parts": [view("float32"), view("float16")]}, "one type and leading dimension"),
    ({"outs": [view("float32"), view("float32", ld=80), view("float32")]}, "one type and leading dimension"),
    ({"bias": view("float32", 1, 63)}, "bias has 63 entries for 64 columns"),
], ids=str)  # fmt: skip
def test_sums_that_do_not_fit(gpu, kernels, how, why):
    how = {"parts": [view("float32")], "outs": [view("float32")]} | how
    with pytest.raises(ArgumentError, match=why):
        kernels.add(STREAM, how.pop("parts"), how.pop("outs"), **how)
    assert not gpu.launches


def test_nothing_is_launched_for_nothing(gpu, kernels):
    kernels.add(STREAM, [view("float32", 0)], [view("float32", 0)])
    kernels.copy(STREAM, view("float32", 5, 0), view("float32", 5, 0))
    kernels.transpose(STREAM, 0x1000, (4, 4, 4, 4), 0x2000, (4, 4, 4, 4), (1, 0, 1, 5), 4)
    kernels.await_flags(STREAM, [])
    assert not gpu.launches


@pytest.mark.parametrize(("to", "there", "of", "extents", "run"), [
    (0, 0, 0, (1, 1, 5, 32), 16), (32, 48, 64, (1, 1, 5, 32), 16), (24, 0, 16, (1, 1, 5, 32), 8),
    (32, 6, 4096, (1, 1, 5, 32), 2), (32, 6, 4096, (1, 1, 1, 32), 16), (32, 32, 7, (1, 1, 5, 32), 1),
    (32, 32, 32, (1, 1, 5, 12), 4),
])  # fmt: skip
def test_words_are_as_wide_as_everything_allows(to, there, of, extents, run):
    """Addresses, lengths, and the distances between what there is more than one of."""
    assert word_of((to, (1, 1, there), of, (1, 1, 16), extents)) == run


_BYTES = {"quad": 16, "u64": 8, "u32": 4, "u16": 2, "u8": 1}


def strided(x: np.ndarray, strides: Any, extents: Any, first: int = 0) -> np.ndarray:
    """Entries of a vector, bytes apart, from one of them on."""
    return as_strided(x[first:], extents, strides)


@pytest.mark.parametrize("seed", range(12))
def test_copies_move_each_byte_once(gpu, kernels, seed):
    """Block-cyclic packing with gaps and any alignment, by a kernel for each width of words, and for long runs."""
    rng = np.random.default_rng(seed)
    moves, found, expected = [], [], []
    crowded = seed < 2  # more work than there are blocks, in one kernel
    for _ in range(40 if crowded else int(rng.choice([1, 3, 40]))):
        counts = (8, 8, 8) if crowded else tuple(int(n) for n in rng.integers(1, 4, 3))
        unit = 16 if crowded else int(rng.choice([1, 2, 4, 8, 16]))
        run = unit * (4 if crowded else int(rng.choice([rng.integers(1, 5), 64, rng.integers(60, 400)])))
        (here, size), (there, room) = (_strides(rng, counts, run, unit) for _ in range(2))
        of, to = (unit * int(n) for n in rng.integers(0, 9, 2))
        # and as much behind it, where nothing is written
        source, target = rng.integers(0, 256, (2, 32 + max(of + size, to + room) // 16 * 32), np.uint8)
        extents = *counts, run
        found.append((source, target))
        expected.append(target.copy())
        strided(expected[-1], (*there, 1), extents, to)[...] = strided(source, (*here, 1), extents, of)
        moves.append((target.ctypes.data + to, there, source.ctypes.data + of, here, extents))
    kernels.move(STREAM, moves)
    for (_, target), whole in zip(found, expected, strict=True):
        assert np.array_equal(target, whole)
    # a warp copies a long run together
    kinds = {(word_of(each), each[-1][-1] // word_of(each) >= 64) for each in moves}
    assert {(_BYTES[macros["T"]], macros["EACH"] != "0") for _, _, macros in gpu.launches} == kinds
    assert len(gpu.launches) <= len(kinds) * (1 + len(moves) // 32)
    assert all(blocks <= 40 for blocks, _, _ in gpu.launches)


def _strides(
    rng: np.random.Generator, extents: tuple[int, ...], run: int, unit: int
) -> tuple[tuple[int, ...], int]:
    """Strides of an array with that run, with gaps, and its bytes; those of a dimension of one are anything."""
    found, step = [], run
    for n in reversed(extents):
        step += unit * int(rng.integers(0, 3))
        found.append(step if n > 1 else int(rng.integers(0, 99)))
        step *= n
    return tuple(reversed(found)), step


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "c8", "c16"])
@pytest.mark.parametrize("extents", [(1, 32, 1, 32), (3, 33, 2, 17), (1, 1, 5, 200)])
def test_transposing_copies_move_each_entry_once(gpu, kernels, rng, kind, extents):
    """The conjugates of complex numbers."""
    (row_runs, rows, col_runs, cols), size = extents, np.dtype(kind).itemsize
    there = [rows * size, size, row_runs * rows * (cols + 2) * size, row_runs * rows * size]
    here = [rows * col_runs * (cols + 3) * size, col_runs * (cols + 3) * size, (cols + 3) * size, size]
    found, source = (
        rng.integers(0, 99, row_runs * rows * col_runs * (cols + 3)).astype(kind) for _ in range(2)
    )
    source += 1j * rng.integers(0, 99, source.size) if kind[0] == "c" else 0
    expected = found.copy()
    strided(expected, there, extents)[...] = strided(source.conj(), here, extents)
    addresses = found.ctypes.data, there, source.ctypes.data, here
    kernels.transpose(STREAM, *addresses, extents, size, conjugate=kind[0] == "c")
    assert np.array_equal(found, expected)
    ((blocks, threads, _),) = gpu.launches
    assert 0 < blocks <= -(-row_runs * rows // 32) * -(-col_runs * cols // 32)
    assert threads == 256


@pytest.mark.parametrize("kind", ["c8", "c16"])
def test_copies_that_conjugate_take_a_complex_number_at_a_time(gpu, kernels, rng, kind):
    """However well all of it is aligned."""
    size = np.dtype(kind).itemsize
    source, target = rng.random(0xC00 // size) + 1j * np.ones(0xC00 // size), np.zeros(0xC00 // size)
    source, target = source.astype(kind), target.astype(kind)
    to, of, there, here = target.ctypes.data, source.ctypes.data, (0, 0x400, 0), (0, 0x300, 0)
    for run, conjugate in ((0x200, size), (32, 0), (32, size)):
        kernels.move(STREAM, [(to, there, of, here, (1, 3, 1, run))], conjugate=conjugate)
        copied, given = (
            strided(x, (by, size), (3, run // size)) for x, by in ((target, 0x400), (source, 0x300))
        )
        assert np.array_equal(copied, given.conj() if conjugate else given)
    words = [(_BYTES[macros["T"]], macros["FLIP"]) for _, _, macros in gpu.launches]
    assert words == [(size, "flipped"), (16, ""), (size, "flipped")]
    with pytest.raises(ArgumentError, match=f"complex numbers of {size} bytes at multiples of 4"):
        kernels.move(STREAM, [(to + 4, there, of, here, (1, 3, 1, 32))], conjugate=size)


def test_copies_of_negative_things(kernels):
    with pytest.raises(ArgumentError, match="none may be < 0"):
        kernels.move(STREAM, [(0, (0, 0, -4), 0, (0, 0, 4), (1, 1, 2, 4))])
    with pytest.raises(ArgumentError, match="a matrix of 9 x 64 is to be copied to 9 x 63"):
        kernels.copy(STREAM, view("float32", cols=63), view("float32"))


def test_one_warp_has_up_to_32_flags(gpu, kernels):
    flags = range(1, 35)
    for queue, up in ((kernels.raise_flags, True), (kernels.await_flags, False)):
        queue(STREAM, flags)
        assert {at for at, flag in gpu.queues.flags.items() if flag.up} == ({*flags} if up else set())
    assert [shape[:2] for shape in gpu.launches] == 4 * [(1, 32)]


def test_barriers(gpu, kernels):
    """Of 4 ranks, this one's words being the third."""
    for what, here in (("arrive", 1), ("await", 1), ("meet", 2)):
        for words in (1, 2, 4):
            gpu.queues.arrivals[words, 1] = [None] * 2
        kernels.signal(what, [1, 2, 3, 4], 2, 1, 2)(STREAM)
        assert len(gpu.queues.arrivals[3, 1]) == here
    assert gpu.queues.epochs == {(3, 1): 2}
    assert [shape[:2] for shape in gpu.launches] == 3 * [(1, 32)]


def _dealt(deal: Deal, first: int, count: int) -> np.ndarray:
    """Which indices are dealt out to a process, of its own from ``first`` on."""
    everyone = np.arange(1000) + deal.lead
    own = everyone[everyone // deal.block % deal.nprocs == deal.turn] - deal.lead
    return own[first : first + count]


@pytest.mark.parametrize("count", [1, 3, 33])
@pytest.mark.parametrize("in_rows", [True, False])
def test_sums_of_tiles(gpu, kernels, rng, count, in_rows):
    """Up to 32 by one kernel, none that is empty, in one triangle of what is dealt out."""
    deals = Deal(4, 2, 0, 3, 3), Deal(5, 3, 2, 1, 0)
    d, x, c = (rng.integers(-9, 10, (count, 9, 9)).astype(float) for _ in range(3))
    if not in_rows:
        d = d.transpose(0, 2, 1)
    c = c.transpose(0, 2, 1)
    expected = d.copy()
    tiles = [Tile(*(m[i].ctypes.data for m in (d, x, c)), 5, 7, i, 2 * i) for i in range(count)]
    for i, tile in enumerate(tiles):
        rows, cols = _dealt(deals[0], tile.i, 5), _dealt(deals[1], tile.j, 7)
        lower = rows[:, None] >= cols
        expected[i, :5, :7][lower] = (2 * x + 3 * c)[i, :5, :7][lower]
    stored = (not in_rows, 9), (False, 9), (True, 9)
    assert kernels.sum(d.dtype, [Tile(1, 1, 1, 0, 7)], *stored, 2, 3) == []
    for launch in kernels.sum(d.dtype, tiles, *stored, 2, 3, uplo="L", deals=deals):
        launch(STREAM)
    assert np.array_equal(d, expected)
    assert len(gpu.launches) == -(-count // 32)
    assert all(shape[:2] == (1, 256) for shape in gpu.launches)


def test_sums_of_conjugates(gpu, kernels, rng):
    """C, which is not read, is NaN."""
    x, d, c = rng.random((7, 5)) + 1j, np.zeros((7, 5), complex), np.full((7, 5), np.nan + 0j)
    tile = Tile(d.ctypes.data, x.ctypes.data, c.ctypes.data, 5, 7)
    (launch,) = kernels.sum(x.dtype, [tile], (True, 5), (True, 5), (True, 5), 1, 0, conjugate=True)
    launch(STREAM)
    assert np.array_equal(d, x.conj())
