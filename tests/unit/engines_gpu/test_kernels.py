# SPDX-License-Identifier: Apache-2.0
"""How the engine's kernels are launched: types, vector widths, bounds. What they compute is tested on GPUs."""

from __future__ import annotations

import ctypes
import itertools
import re
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.engines.gpu.kernels.compiler import Kernel, stand_in
from pblasmp.engines.gpu.kernels.kernels import Deal, Kernels, Tile, vector_width, word_of
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.errors import ArgumentError
from tests.helpers.fakelapack import signature

ALL = DTYPES | FLOAT8


class FakeCupy:
    """Keeps what is compiled and launched; each argument as the text of the kernel declares it."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, str]] = []
        self.launches: list[tuple[int, int, list[Any]]] = []
        self.launched: list[dict[str, str]] = []  # how each of them was compiled
        self.streams: list[int] = []
        self._types: list[list[str]] = []
        runtime = SimpleNamespace(
            getDevice=lambda: 0, setDevice=lambda device: None,
            getDeviceProperties=lambda _: {"multiProcessorCount": 10},
        )  # fmt: skip
        self.cuda = SimpleNamespace(runtime=runtime)

    def loaded(self, device: int, text: str, name: str, room: int) -> int:
        assert (device, room) == (0, 0)
        self.compiled.append(dict(re.findall(r"^#define (\w+) (.*)$", text, re.MULTILINE)))
        self._types.append(signature(text, name))
        return len(self.compiled) - 1

    def launch(self, kernel: int, *shape: int) -> None:
        blocks, many, one, threads, *ones, shared, stream, places, extra = shape
        assert (one, *ones, shared, extra) == (1, 1, 1, 0, 0)
        types, macros = self._types[kernel], self.compiled[kernel]
        at = np.frombuffer(ctypes.string_at(places, 8 * len(types)), np.uint64).tolist()
        ends = [*at[1:], at[-1] + (24 if types[-1] == "" else 8)]
        scalar = _REAL.get(macros.get("SUM", macros.get("ELEMENT", "")), "V0")
        arguments: list[Any] = []
        for letter, begin, end in zip(types, at, ends, strict=True):
            given = ctypes.string_at(begin, end - begin)
            if letter == "?":
                arguments.append(np.frombuffer(given, scalar, 1)[0])
            elif letter:
                arguments.append(np.frombuffer(given, letter, 1)[0])
            else:
                arguments.append({"p": np.frombuffer(given, np.uint64)})
        assert many == (1 if "TILES" not in macros else np.count_nonzero(arguments[0]["p"][::5]))
        self.launches.append((blocks, threads, arguments))
        self.launched.append(macros)
        self.streams.append(stream)


_REAL = {"float": "f4", "double": "f8", "c64": "c8", "c128": "c16"}
STREAM = SimpleNamespace(ptr=0x51)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setattr("pblasmp.engines.gpu.kernels.compiler.loaded", fake.loaded)
    driver = SimpleNamespace(launchKernel=fake.launch, launchCooperativeKernel=None)  # no blocks meet
    for name, module in (
        ("cupy_backends", SimpleNamespace()), ("cupy_backends.cuda", SimpleNamespace()),
        ("cupy_backends.cuda.api", SimpleNamespace(driver=driver)),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.fixture
def kernels(cupy: FakeCupy) -> Kernels:
    return Kernels(cupy)


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
    ("bfloat16", 64, [{}, {"dtype": "float32", "ld": 68}], 8),  # 16 bytes are enough for two halves
    ("bfloat16", 64, [{}, {"dtype": "float32", "ld": 66}], 1),
    ("bfloat16", 64, [{}, {"dtype": "float8_e4m3fn", "at": 0x1008, "ld": 72}], 8),
    ("bfloat16", 64, [{}, {"dtype": "float8_e4m3fn", "at": 0x1004}], 1),
])  # fmt: skip
def test_vectors_never_cross_an_alignment_or_a_row(dtype, cols, views, width):
    assert vector_width(ALL[dtype], cols, [view(**({"dtype": dtype} | how)) for how in views]) == width


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(9, 64), (1, 1), (300, 1000), (5, 7)])
def test_sums_cover_every_entry_once(cupy, kernels, dtype, rows, cols):
    parts = [view(dtype, rows, cols, at, ld=2 * cols) for at in (0x1000, 0x20000)]
    kernels.add(STREAM, parts, [view(dtype, rows, cols)])
    (macros,), ((blocks, threads, arguments),) = cupy.compiled, cupy.launches
    ld_parts, ld_first, n, lines = (int(arguments[i]) for i in (1, 3, 5, 6))
    assert (ld_parts, ld_first, n, lines * int(macros["V"])) == (2 * cols, cols, rows, cols)
    assert 1 <= blocks <= 20
    assert (blocks - 1) * threads < n * lines  # no block has nothing to do
    assert list(arguments[0]["p"]) == [0x1000, 0x20000]
    assert (macros["P"], macros["OUTS"]) == ("2", "1")


def test_sums_of_other_types(cupy, kernels):
    out = view("float8_e5m2")
    kernels.add(
        STREAM, [view("float16")] * 3, [out, view("float8_e5m2", ld=80), view("float8_e5m2", ld=80)],
        beta=2, c=view("bfloat16"), bias=view("float32", 1), activation="gelu", scale=64, amax=128, blocks=3,
    )  # fmt: skip
    (macros,), ((blocks, _, arguments),) = cupy.compiled, cupy.launches
    kinds = [macros[name] for name in ("PART", "OUT", "CTYPE", "BIAS", "SUM", "FLOAT8")]
    assert kinds == ["fp16", "e5m2", "bf16", "float", "float", "1"]
    assert blocks == 1
    assert [int(x) for x in arguments[3:5]] == [64, 80]
    assert [x.item() for x in arguments[7:]] == [0x1000, 64, 2.0, 0x1000, 2, 64, 128]


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
def test_a_sum_of_no_parts_is_c_and_bias(cupy, kernels, dtype):
    """Without an operand that is not read having a type that the kernel cannot read."""
    d, c = view(dtype, at=0x4000), view("bfloat16" if dtype.startswith("float8") else dtype, at=0x5000)
    for beta in (0, 2):
        kernels.add(STREAM, [], [d], beta=beta, c=c)
    macros = cupy.compiled
    assert {each["P"] for each in macros} == {"0"}
    assert not {each[name] for each in macros for name in ("CTYPE", "BIAS")} & {"e4m3", "e5m2"}
    assert [int(arguments[7]) for _, _, arguments in cupy.launches] == [0, 0x5000]
    with pytest.raises(ArgumentError, match="other shapes"):
        kernels.add(STREAM, [], [d, view(dtype, rows=8)])


def test_large_sums_count_in_64_bits(cupy, kernels):
    kernels.add(STREAM, [view("float64", 2**20, 2**14)], [view("float64", 2**20, 2**14)])
    kernels.add(STREAM, [view("float64")], [view("float64")])
    assert [macros["INDEX"] for macros in cupy.compiled] == ["u64", "unsigned"]


@pytest.mark.parametrize(("how", "why"), [
    ({"parts": [view("float32"), view("float32", cols=32)]}, "other shapes than 9 x 64"),
    ({"outs": [view("float32", rows=8)]}, "other shapes than 9 x 64"),
    ({"beta": 1, "c": view("float32", rows=8)}, "other shapes"),
    ({"parts": [view("float32"), view("float32", ld=80)]}, "one type and leading dimension"),
    ({"parts": [view("float32"), view("float16")]}, "one type and leading dimension"),
    ({"outs": [view("float32"), view("float32", ld=80), view("float32")]}, "one type and leading dimension"),
    ({"bias": view("float32", 1, 63)}, "bias has 63 entries for 64 columns"),
], ids=str)  # fmt: skip
def test_sums_that_do_not_fit(cupy, kernels, how, why):
    how = {"parts": [view("float32")], "outs": [view("float32")]} | how
    with pytest.raises(ArgumentError, match=why):
        kernels.add(STREAM, how.pop("parts"), how.pop("outs"), **how)
    assert not cupy.launches


def test_nothing_is_launched_for_nothing(cupy, kernels):
    kernels.add(STREAM, [view("float32", 0)], [view("float32", 0)])
    kernels.copy(STREAM, view("float32", 5, 0), view("float32", 5, 0))
    assert not cupy.launches


@pytest.mark.parametrize(("to", "there", "of", "extents", "run"), [
    (0, 0, 0, (1, 1, 5, 32), 16), (32, 48, 64, (1, 1, 5, 32), 16), (24, 0, 16, (1, 1, 5, 32), 8),
    (32, 6, 4096, (1, 1, 5, 32), 2), (32, 6, 4096, (1, 1, 1, 32), 16), (32, 32, 7, (1, 1, 5, 32), 1),
    (32, 32, 32, (1, 1, 5, 12), 4),
])  # fmt: skip
def test_words_are_as_wide_as_everything_allows(to, there, of, extents, run):
    """Addresses, lengths, and the distances between what there is more than one of."""
    assert word_of((to, (1, 1, there), of, (1, 1, 16), extents)) == run


_BYTES = {"quad": 16, "u64": 8, "u32": 4, "u16": 2, "u8": 1}


@pytest.mark.parametrize("seed", range(12))
def test_copies_move_each_byte_once(cupy, kernels, seed):
    """The kernel's index arithmetic, repeated on the host: block-cyclic packing with gaps and any alignment."""
    rng = np.random.default_rng(seed)
    moves, expected, units = [], [], []
    for number in range(int(rng.choice([1, 3, 40]))):
        a, b, c = (int(n) for n in rng.integers(1, 4, 3))
        units.append(int(rng.choice([1, 2, 4, 8, 16])))
        run = units[-1] * int(rng.choice([rng.integers(1, 5), rng.integers(60, 400)]))
        here, there = (_strides(rng, (a, b, c), run, units[-1]) for _ in range(2))
        of, to = (int(n) * units[-1] + number * 0x100000 for n in rng.integers(0, 9, 2))
        moves.append((to, there, of, here, (a, b, c, run)))
        u, v, w, x = np.indices((a, b, c, run)).reshape(4, -1)
        targets, sources = (
            base + u * steps[0] + v * steps[1] + w * steps[2] + x for base, steps in ((to, there), (of, here))
        )
        expected.append(np.stack((targets, sources), axis=1))
    kernels.move(STREAM, moves)
    moved = []
    for macros, (grid, _, (struct, count)) in zip(cupy.launched, cupy.launches, strict=True):
        each = np.reshape(struct["p"], (int(macros["MOVES"]), 13)).astype(int).tolist()
        assert grid <= 40
        assert all(0 <= words[12] < grid for words in each[: int(count)])
        for words in each[: int(count)]:
            assert (words[10] >= 64) == (macros["EACH"] != "0"), "warps copy long runs"
            moved += _moved(words, _BYTES[macros["T"]], int(macros["EACH"]))
    assert len(cupy.launches) <= 2 * len(set(units)) * (1 + len(moves) // 32)
    found, wanted = (pairs[np.lexsort(pairs.T)] for pairs in map(np.concatenate, (moved, expected)))
    assert np.array_equal(found, wanted)  # of no byte twice, as none is expected twice
    assert len(np.unique(wanted[:, 0])) == len(wanted)


def _moved(words: list[int], size: int, each: int) -> list[np.ndarray]:
    """Bytes and where they are copied from: a word by a thread, or ``each`` words by every thread of a warp."""
    to, of, *strides, nb, nc, run, total, _ = words
    group = 32 * each or 1
    pieces = -(-run // group)
    moved = []
    for i in range(total):
        i, x = divmod(i, pieces)
        i, w = divmod(i, nc)
        u, v = divmod(i, nb)
        target, source = (
            base + u * s[0] + v * s[1] + w * s[2] for base, s in ((to, strides[:3]), (of, strides[3:]))
        )
        assert target % size == source % size == 0
        span = np.arange(size * group * x, size * min(run, group * (x + 1)))
        moved.append(np.stack((target + span, source + span), axis=1))
    return moved


def _strides(rng: np.random.Generator, extents: tuple[int, int, int], run: int, unit: int) -> tuple[int, ...]:
    """Strides of an array with that run, with gaps; those of a dimension of one are anything."""
    found, step = [], run
    for n in reversed(extents):
        step += unit * int(rng.integers(0, 3))
        found.append(step if n > 1 else int(rng.integers(0, 99)))
        step *= n
    return tuple(reversed(found))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("extents", [(1, 32, 1, 32), (3, 33, 2, 17), (1, 1, 5, 200)])
def test_transposing_copies_move_each_entry_once(cupy, kernels, size, extents):
    """The kernel's tiles and index arithmetic, repeated on the host."""
    row_runs, rows, col_runs, cols = extents
    there = [rows * size, size, row_runs * rows * (cols + 2) * size, row_runs * rows * size]
    here = [rows * col_runs * (cols + 3) * size, col_runs * (cols + 3) * size, (cols + 3) * size, size]
    kernels.transpose(STREAM, 0x1000, there, 0x2000, here, extents, size, conjugate=size >= 8)
    (macros,), ((blocks, threads, arguments),) = cupy.compiled, cupy.launches
    assert (_BYTES[macros["T"]], macros["FLIP"], threads) == (size, "flipped" if size >= 8 else "", 256)
    to, there_, of, here_, all_rows, rows_run, all_cols, cols_run = arguments
    assert (int(to), int(of)) == (0x1000, 0x2000)

    def at(steps: Any, r: int, c: int) -> int:
        numbers = (r // int(rows_run), r % int(rows_run), c // int(cols_run), c % int(cols_run))
        return sum(number * int(step) for number, step in zip(numbers, steps["p"], strict=True))

    across = -(-int(all_cols) // 32)
    tiles = -(-int(all_rows) // 32) * across
    assert 0 < blocks <= tiles
    moved: dict[int, int] = {}
    for tile, x, y in itertools.product(range(tiles), range(32), range(32)):
        r, c = tile // across * 32 + x, tile % across * 32 + y
        if r < all_rows and c < all_cols:
            assert moved.setdefault(at(there_, r, c), at(here_, r, c)) == at(here_, r, c)
    expected = {
        sum(i * step for i, step in zip(index, there, strict=True)): sum(
            i * step for i, step in zip(index, here, strict=True)
        )
        for index in itertools.product(*map(range, extents))
    }
    assert moved == expected
    kernels.transpose(STREAM, 0x1000, there, 0x2000, here, (1, 0, 1, 5), size)
    assert len(cupy.launches) == 1


@pytest.mark.parametrize("size", [8, 16])
def test_copies_that_conjugate_take_a_complex_number_at_a_time(cupy, kernels, size):
    """However well all of it is aligned."""
    there, here = (0, 0x400, 0), (0, 0x300, 0)
    for run in (32, 0x200):
        kernels.move(STREAM, [(0x1000, there, 0x9000, here, (1, 3, 1, run))], conjugate=size)
    kernels.move(STREAM, [(0x1000, there, 0x9000, here, (1, 3, 1, 32))])
    found = [(_BYTES[macros["T"]], macros["FLIP"]) for macros in cupy.launched]
    assert found == [(size, "flipped"), (size, "flipped"), (16, "")]
    assert [int(struct["p"][10]) for _, _, (struct, _) in cupy.launches] == [32 // size, 0x200 // size, 2]
    with pytest.raises(ArgumentError, match=f"complex numbers of {size} bytes at multiples of 4"):
        kernels.move(STREAM, [(0x1004, there, 0x9000, here, (1, 3, 1, 32))], conjugate=size)


def test_copies_of_negative_things(kernels):
    with pytest.raises(ArgumentError, match="none may be < 0"):
        kernels.move(STREAM, [(0, (0, 0, -4), 0, (0, 0, 4), (1, 1, 2, 4))])
    with pytest.raises(ArgumentError, match="a matrix of 9 x 64 is to be copied to 9 x 63"):
        kernels.copy(STREAM, view("float32", cols=63), view("float32"))


@pytest.mark.parametrize("name", ["raise_flags", "await_flags"])
def test_one_warp_has_up_to_32_flags(cupy, kernels, name):
    queue = getattr(kernels, name)
    queue(STREAM, range(1, 35))
    waits = []
    for blocks, threads, (words, count) in cupy.launches:
        assert (blocks, threads) == (1, 32)
        waits.append(list(words["p"][: int(count)]))
    assert waits == [list(range(1, 33)), [33, 34]]
    queue(STREAM, [])
    assert len(cupy.launches) == 2


def test_barriers(cupy, kernels):
    for what in ("arrive", "await", "meet"):
        kernels.signal(what, [1, 2, 3, 4], 2, 1, 2)(STREAM)
    for blocks, threads, arguments in cupy.launches:
        assert (blocks, threads) == (1, 32)
        assert [int(x) for x in arguments[1:]] == [4, 2, 1, 2]
        assert list(arguments[0]["p"]) == [1, 2, 3, 4]


@pytest.mark.parametrize("count", [1, 3, 33])
def test_sums_of_tiles(cupy, kernels, count):
    """What the kernel is given: tiles in Fortran order, up to 32 by one kernel, none that is empty."""
    tiles = [Tile(100 + i, 200 + i, 300 + i, 5, 7, i, 2 * i) for i in range(count)]
    deals = Deal(4, 2, 1, 3, 0), Deal(5, 3, 2, 1, 6)
    dtype, how = np.dtype(np.float64), {"uplo": "L", "deals": deals}
    launches = kernels.sum(
        dtype, [*tiles, Tile(1, 1, 1, 0, 7)], (False, 9), (False, 8), (True, 6), 2, 3, **how
    )
    for launch in launches:
        launch(STREAM)
    assert len(cupy.launches) == len(launches) == -(-count // 32)
    found = []
    for (blocks, threads, arguments), macros in zip(cupy.launches, cupy.launched, strict=True):
        assert (blocks, threads) == (1, 256)
        assert macros["ELEMENT"] == "double"
        assert (macros["TRIANGLE"], macros["KEEPS"], macros["CONJUGATE"], macros["REAL"]) == (
            "2",
            "1",
            "0",
            "0",
        )
        words, ld, *steps, alpha, beta, down, across = arguments
        assert (int(ld), [int(x) for x in steps], float(alpha), float(beta)) == (9, [1, 8, 6, 1], 2, 3)
        for deal, expected in ((down, deals[1]), (across, deals[0])):
            assert deal["p"].view(np.uint32)[:5].tolist() == list(expected)
        each = np.reshape(words["p"], (int(macros["TILES"]), 5))
        found += [row for row in each.tolist() if row[0]]
    assert found == [
        [tile.d, tile.x, tile.c, tile.cols | tile.rows << 32, tile.j | tile.i << 32] for tile in tiles
    ]
    kernels.sum(dtype, tiles[:1], (True, 9), (True, 8), (True, 9), 1, 0, conjugate=True)
    assert cupy.compiled[-1]["KEEPS"] == cupy.compiled[-1]["TRIANGLE"] == "0"
    assert cupy.compiled[-1]["CONJUGATE"] == "1"
