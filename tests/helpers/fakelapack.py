# SPDX-License-Identifier: Apache-2.0
"""cuSOLVER and the engine's kernels of factorizations, played by SciPy's LAPACK on the memory at real addresses."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import struct
import threading
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.linalg import lapack, solve_triangular

from pblasmp.engines.gpu.kernels.compiler import Kernel, cuda
from pblasmp.engines.gpu.types import DATA_TYPES
from tests.helpers.epilogues import tanh_gelu
from tests.helpers.gpu_memory import AtOnce, Place, number
from tests.helpers.hardware import blocks_at_once, why_no_room

MEETING = cuda("meeting.cuh")
_TYPES = {"s": "f4", "d": "f8", "c": "c8", "z": "c16"}
_REAL = {
    np.dtype(kind): np.dtype(f"f{np.dtype(kind).itemsize // (1 + (kind[0] == 'c'))}")
    for kind in _TYPES.values()
}
_KINDS = {"float": "f4", "double": "f8", "c64": "c8", "c128": "c16"}


def matrix(at: int, rows: int, cols: int, ld: int, kind: Any) -> np.ndarray:
    """The matrix in F order at an address."""
    kind = np.dtype(kind)
    assert ld >= max(1, rows)
    nbytes = ((cols - 1) * ld + rows) * kind.itemsize if rows and cols else 0
    memory = (ctypes.c_char * nbytes).from_address(int(at))
    return np.ndarray((rows, cols), kind, memory, strides=(kind.itemsize, ld * kind.itemsize))


def _strided(at: int, rows: int, cols: int, kind: np.dtype, down: int, across: int) -> np.ndarray:
    """The matrix at an address, whose neighbors are so many numbers apart."""
    nbytes = (1 + (rows - 1) * down + (cols - 1) * across) * kind.itemsize
    memory = (ctypes.c_char * nbytes).from_address(at)
    return np.ndarray((rows, cols), kind, memory, strides=(down * kind.itemsize, across * kind.itemsize))


def vector(at: int, count: int, kind: Any) -> np.ndarray:
    """The numbers at an address."""
    return matrix(at, count, 1, max(1, count), kind)[:, 0]


_thread, _numbers = threading.local(), itertools.count(78)


def cusolver_handle() -> int:
    """``cupy.cuda.device.get_cusolver_handle``: the calling thread's, which CuPy destroys when that ends."""
    if not hasattr(_thread, "handle"):
        _thread.handle = next(_numbers)
    return int(_thread.handle)


def cusolver() -> SimpleNamespace:
    """cupy_backends.cuda.libs.cusolver, as far as the engine calls it."""
    functions: dict[str, Any] = {}
    for letter, kind in _TYPES.items():
        functions[f"{letter}potrf_bufferSize"] = lambda handle, fill, n, a, ld: n + 1
        functions[f"{letter}potrf"] = _potrf(letter, kind)
    return SimpleNamespace(
        **functions, CUSOLVER_EIG_MODE_NOVECTOR=0, CUSOLVER_EIG_MODE_VECTOR=1, createParams=lambda: 7,
        destroyParams=lambda params: None, xsyevd=_xsyevd,
        xsyevd_bufferSize=lambda handle, params, job, fill, n, kind, *rest: (n + 2, n + 3),
    )  # fmt: skip


def _xsyevd(
    handle: int, params: int, job: int, fill: int, n: int, kind: int, a: int, ld: int, real: int, w: int, compute: int,
    work: int, size: int, memory: int, host_size: int, info: int,
) -> None:  # fmt: skip
    names = {int(number): name for name, number in DATA_TYPES.items()}
    assert (handle, params, fill, size, host_size, compute) == (cusolver_handle(), 7, 0, n + 2, n + 3, kind)
    x, found = matrix(a, n, n, ld, names[kind]), vector(info, 1, "i4")
    assert names[real] == _REAL[x.dtype].name
    try:
        values, vectors = np.linalg.eigh(x, "L")
        near = np.isclose(values[1:], values[:-1], rtol=1e-13, atol=0).nonzero()[0]
        near = near[np.diff(near, prepend=-2) > 1]  # no number twice
        swapped = np.arange(n)
        swapped[near], swapped[near + 1] = near + 1, near  # cuSOLVER, too, has some out of order
        values, vectors = values[swapped], vectors[:, swapped]
        vector(w, n, names[real])[...] = values
        x[...] = vectors if job else np.nan
        found[0] = 0
    except np.linalg.LinAlgError:
        found[0] = 1


def _potrf(letter: str, kind: str) -> Callable[..., None]:
    def call(handle: int, fill: int, n: int, a: int, ld: int, work: int, size: int, info: int) -> None:
        assert (handle, fill, size) == (cusolver_handle(), 0, n + 1)
        x = matrix(a, n, n, ld, kind)
        factor, found = getattr(lapack, f"{letter}potrf")(x, lower=1, clean=0)
        x[...] = factor
        if found > 0:
            x[found - 1, found - 1] = np.nan  # cuSOLVER's square root of a negative number
        vector(info, 1, "i4")[0] = found

    return call


def loaded(
    device: int,
    text: str,
    name: str,
    room: int = 0,
    target: str = "",
    *,
    shared_memory: Callable[[], int],
    multiprocessors: Callable[[], int],
    gpu: AtOnce | None,
) -> int:
    """``compiler.loaded``: the kernels of factorizations compute, and all others are queued on ``gpu``, if it is given.

    A block of threads has ``shared_memory()`` bytes at most, and those that meet are on ``multiprocessors()`` at once.
    """
    if why_not := why_no_room(room, shared_memory()):
        raise RuntimeError(why_not)
    macros = _macros(text)
    played = dict(_PLAYED)
    if "MOST" in macros:
        played["pairs"] = partial(_pairs, int(macros["MOST"]))
        played["swap"] = partial(_swap, int(macros["MOST"]))
    if "COLUMNS" in macros:
        played["step"] = partial(_step, int(macros["COLUMNS"]))
    if "POLLS" in macros:
        played["lu"] = partial(_lu, macros)
    if "TILE" in macros and "ROWS" in macros and "BY_COLUMNS" not in macros:
        played["substitute"] = partial(_substitute, macros)
    if "BY_COLUMNS" in macros:
        played["part"] = partial(_part, macros)
    if "HALF" in macros:
        played["join"] = partial(_join, macros)
    if "WIDTH" in macros:
        played["invert"] = partial(_invert, int(macros["WIDTH"]))
        played["conditions"] = partial(_conditions, int(macros["WIDTH"]))
        played["triangles"] = partial(_triangles, int(macros["WIDTH"]))
        played["refine"] = partial(_refine, macros)
    queued: dict[str, Any] = {}
    if gpu is not None:
        queued = {each.__name__[1:]: partial(each, macros) for each in (_move, _transpose, _add, _sum)}
        queued |= {each: partial(_barrier, each) for each in ("arrive", "await", "meet")}
        queued |= {each: partial(_on_flags, each) for each in ("raise_flags", "await_flags")}
        played |= {each: partial(play, gpu) for each, play in queued.items()}
    kind = np.dtype(_KINDS.get(macros.get("KIND", ""), "u1"))
    most = max(min(48 << 10, shared_memory()), room)

    def at_once(threads: int, room: int) -> int:
        return blocks_at_once(multiprocessors(), shared_memory(), threads, room)

    together = at_once if MEETING in text else None
    kernel = _Kernel(played.get(name), kind, most, signature(text, name), together, queued=name in queued)
    _KERNELS.append(kernel)
    return len(_KERNELS) - 1


@cache
def _macros(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#define (\w+) (.*)$", text, re.MULTILINE))


@cache
def signature(text: str, name: str) -> list[str]:
    """The types of a kernel's arguments, as its text has them: in the letters of ``struct``.

    "" for a structure, "?" for a scalar whose type is a macro.
    """
    found = re.search(rf"__global__[^;{{]*?\b{name}\(([^)]*)\)", text)
    assert found is not None, name
    types = [" ".join(each.split()[:-1]) for each in found[1].split(",")]
    return ["Q" if "*" in each else _C_TYPES.get(each, "") for each in types]


_C_TYPES = {"double": "d", "int": "i", "i64": "q", "u64": "Q", "u32": "I", "SUM": "?", "E": "?"}


class _Kernel:
    """A kernel; what it is launched with is checked by those that are played."""

    def __init__(
        self, played: Any, kind: np.dtype, most: int, parameters: list[str], together: Any, *, queued: bool
    ) -> None:
        self.together = together  # how many blocks there is room for at once, if CUDA begins all at once
        self._played, self._kind, self._most, self.parameters = played, kind, most, parameters
        self._queued = queued
        while isinstance(played, partial):
            played = played.func
        self._takes_grid = played is not None and "grid" in played.__code__.co_varnames

    def __call__(self, grid: Any, block: Any, places: int, *, stream: int, shared_mem: int) -> None:
        assert 0 < block[0] <= 1024
        assert grid[0] > 0
        assert shared_mem <= self._most
        if self._played is not None:
            at = vector(places, len(self.parameters), "u8").tolist()
            given = zip(self.parameters, at, strict=True)  # of a structure, where it is
            how = {"grid": grid} if self._takes_grid else {}
            self._played(
                stream if self._queued else self._kind,
                *(struct.unpack(kind, ctypes.string_at(each, struct.calcsize(kind)))[0]
                              if kind.isalpha() else each for kind, each in given), **how
            )  # fmt: skip


_KERNELS: list[_Kernel] = []


def kernel(function: int, parameters: str, *, meets: bool = False) -> Kernel:
    """``compiler.Kernel``, if the types of its parameters are those of the text."""
    letters = re.findall(r"\d*[a-zA-Z]", parameters)
    assert len(letters) == len(_KERNELS[function].parameters)
    for letter, expected in zip(letters, _KERNELS[function].parameters, strict=True):
        fits = (
            letter[-1] in "fd"
            if expected == "?"
            else letter == expected or (not expected and letter[0].isdigit())
        )
        assert fits, (parameters, _KERNELS[function].parameters)
    return Kernel(function, parameters, meets=meets)


def launch_kernel(kernel: int, *shape: int) -> None:
    """cupy_backends.cuda.api.driver.launchKernel."""
    *shape, extra = shape
    assert extra == 0
    assert not _KERNELS[kernel].together
    _launch(kernel, *shape)


def launch_cooperative_kernel(kernel: int, *shape: int) -> None:
    """The same of launchCooperativeKernel: all blocks must be there at once."""
    most = _KERNELS[kernel].together(shape[3], shape[6])
    if math.prod(shape[:3]) > most:
        raise RuntimeError(f"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: {shape[:3]} blocks, room for {most}")
    _launch(kernel, *shape)


def _launch(kernel: int, *shape: int) -> None:
    *shape, shared, stream, places = shape
    _KERNELS[kernel](tuple(shape[:3]), tuple(shape[3:]), places, stream=stream, shared_mem=shared)


def _look(kind: Any, a: int, ld: int, n: int, found: int) -> None:
    rows = np.flatnonzero(np.isnan(np.tril(matrix(a, n, n, ld, kind))).any(1))
    about = vector(found, 2, "i4")
    assert not about.any()
    about[1] = n - rows[0] if len(rows) else 0


def _judge(kind: Any, a: int, ld: int, rows: int, cols: int, found: int, info: int, first: int) -> None:
    about = vector(found, 2, "i4")
    at, nan = int(about[0]), about[1] and about[0] > cols - about[1]
    if at > 0 and nan:
        matrix(a, rows, cols, ld, kind)[...] = np.nan
    vector(info, 1, "i4")[0] = first + at if at > 0 and not nan else 0
    about[...] = 0


def _lu(
    macros: dict[str, str], kind: Any, a: int, ld: int, m: int, w: int, rows: int, pivots: int, first: int, info: int,
    shown: int, tags: int, *, grid: tuple[int, ...],
) -> None:  # fmt: skip
    columns, each, threads, polls = (int(macros[name]) for name in ("COLUMNS", "ROWS", "THREADS", "POLLS"))
    assert w <= columns
    assert rows <= each * threads
    assert each * columns * kind.itemsize <= 512  # bytes of registers
    assert -(-m // rows) == grid[0] <= 32 * polls
    slots = vector(shown, 2 * grid[0] * (4 + -(-columns * kind.itemsize // 8)) * 2, "u8")
    slots[...] += 1  # the memory is there
    assert not vector(tags, 2, "u4")[0]
    x, letter = matrix(a, m, w, ld, kind), {np.dtype(k): letter for letter, k in _TYPES.items()}[kind]
    factors, found, bad = getattr(lapack, f"{letter}getrf")(x)
    x[...] = factors
    vector(pivots, min(m, w), "i4")[...] = found + 1 + first
    about = vector(info, 1, "i4")
    if bad > 0 and not about[0]:
        about[0] = first + bad


def _qr(
    kind: Any, a: int, ld: int, m: int, w: int, rows: int, v: int, ldv: int, t: int, tau: int, *slots: int
) -> None:
    x, letter = matrix(a, m, w, ld, kind), {np.dtype(k): letter for letter, k in _TYPES.items()}[kind]
    factors, scalars, _, _ = getattr(lapack, f"{letter}geqrf")(x)
    x[...] = factors
    vector(tau, w, kind)[...] = scalars
    vectors = matrix(v, m, w, ldv, kind)
    vectors[...] = np.tril(factors, -1) + np.eye(m, w)
    block = np.zeros((w, w), kind)
    for j in range(w):
        block[:j, j] = -scalars[j] * (block[:j, :j] @ (vectors[:, :j].conj().T @ vectors[:, j]))
        block[j, j] = scalars[j]
    matrix(t, w, w, w, kind)[...] = block


def _reflector(kind: Any, inner: int, ldi: int, t: int, ldt: int, tau: int, n: int, after: int) -> None:
    scalars, of, to = vector(tau, n, kind), matrix(inner, n, n, ldi, kind), matrix(t, n, n, ldt, kind)
    none = scalars == 0
    if after:
        np.fill_diagonal(to, scalars)
        return
    of[none] = 0
    np.fill_diagonal(of, 1 / np.where(none, 1, scalars))
    to[...] = np.diag(np.where(none, 0, 1))


def _moves(pivots: int, count: int, first: int, back: int) -> list[tuple[int, int]]:
    others = vector(pivots, count, "i4") - 1 - first
    now = {row: row for row in sorted({*range(count), *others.tolist()})}
    for i, other in enumerate(others.tolist()):
        now[i], now[other] = now[other], now[i]
    return [(of, to) if back else (to, of) for to, of in now.items()]


def _pairs(most: int, kind: Any, pivots: int, count: int, first: int, back: int, pairs: int) -> None:
    out = vector(pairs, 4 * count, "i4")
    out[...] = 0
    for start in range(0, count, most):
        part = pivots + 4 * start, min(most, count - start), first + start, back
        for i, move in enumerate(_moves(*part)):
            out[4 * start + 2 * i : 4 * start + 2 * i + 2] = move


def _exchange(kind: Any, a: int, ld: int, cols: int, pivots: int, count: int, first: int, back: int) -> None:
    _carry(kind, a, ld, cols, np.array(_moves(pivots, count, first, back)))


def _swap(most: int, kind: Any, a: int, ld: int, cols: int, pairs: int, count: int, back: int) -> None:
    starts = range(0, count, most)
    for start in reversed(starts) if back else starts:
        some = vector(pairs + 16 * start, 4 * min(most, count - start), "i4").reshape(-1, 2)
        _carry(kind, a + start * kind.itemsize, ld, cols, some)


def _carry(kind: Any, a: int, ld: int, cols: int, pairs: np.ndarray) -> None:
    to, of = pairs[pairs[:, 0] != pairs[:, 1]].T
    assert len(set(to.tolist())) == len(to)
    if len(to):
        x = matrix(a, int(max(to.max(), of.max())) + 1, cols, ld, kind)
        x[to] = x[of]


def _invert(width: int, kind: Any, a: int, inverse: int, ld: int, n: int) -> None:
    for start in range(0, n, width):
        size, behind = min(width, n - start), start * (ld + 1) * kind.itemsize
        block, to = (matrix(at + behind, size, size, ld, kind) for at in (a, inverse))
        found = np.full_like(block, np.nan)
        with np.errstate(all="ignore"):
            if np.all(block.diagonal()):
                found = np.linalg.inv(np.tril(block))
        lower = np.tri(size, dtype=bool)
        to[lower] = found[lower]


def _join(macros: dict[str, str], kind: Any, a: int, inverse: int, ld: int, *, grid: tuple[int, ...]) -> None:
    half, columns = int(macros["HALF"]), int(macros["COLUMNS"])
    assert grid[1] * columns == half
    for pair in range(grid[0]):
        behind = pair * 2 * half * (ld + 1) * kind.itemsize
        below, last = half * kind.itemsize, half * (ld + 1) * kind.itemsize
        between, x11, x22, to = (
            matrix(at, half, half, ld, kind)
            for at in (a + behind + below, *(inverse + behind + each for each in (0, last, below)))
        )
        with np.errstate(all="ignore"):
            to[...] = -(x22 @ (between @ x11))


def _conditions(wide: int, kind: Any, triangles: int, inverses: int, out: int, count: int) -> None:
    found = vector(out, count, _REAL[kind])
    for i in range(count):
        places = (at + i * wide * (wide + 1) * kind.itemsize for at in (triangles, inverses))
        sizes = [abs(np.tril(matrix(at, wide, wide, wide, kind))).sum(1).max() for at in places]
        with np.errstate(all="ignore"):
            found[i] = sizes[0] * sizes[1]


def _triangles(
    wide: int, kind: Any, a: int, ld: int, n: int, width: int, group: int, workers: int, rank: int, lower: int,
    unit: int, out: int, inverse: int,
) -> None:  # fmt: skip
    mine = [k for k in range(-(-n // width)) if k // group % workers == rank]
    for i, k in enumerate(mine):
        size = min(width, n - k * width)
        square = matrix(a + (i * width * ld + k * width) * kind.itemsize, size, size, ld, kind)
        triangle = np.eye(wide, dtype=kind)
        triangle[:size, :size] = np.tril(square) if lower else np.triu(square).T
        if unit:
            np.fill_diagonal(triangle, 1)
        behind = i * wide * (wide + 1) * kind.itemsize
        matrix(out + behind, wide, wide, wide, kind)[...] = triangle
        matrix(inverse + behind, wide, wide, wide, kind)[...] = 0


def _step(
    columns: int, kind: Any, inverse: int, triangle: int, wide: int, size: int, transposed: int, right: int, x: int,
    a: int, ld: int, rows: int, y: int, forward: int, count: int,
) -> None:  # fmt: skip
    assert not vector(count, 1, "u4")[0]
    solve, factor = (matrix(at, size, size, wide, kind) for at in (inverse, triangle))
    if transposed:
        solve, factor = solve.T, factor.T
    given, found = (matrix(at, columns, size, columns, kind).T for at in (right, x))
    beside, others = matrix(a, rows, size, ld, kind), matrix(y, columns, rows, columns, kind).T
    if not forward:
        given -= beside.T @ others
    found[...] = solve @ given
    given -= factor @ found
    found += solve @ given
    if forward:
        others -= beside @ found


def _refine(
    macros: dict[str, str], kind: Any, x: int, down: int, across: int, found: int, found_down: int,
    found_across: int, triangle: int, inverse: int, condition: int, turned: int, stays: int, size: int,
    columns: int,
) -> None:  # fmt: skip
    right, wide = _strided(x, size, columns, kind, down, across), int(macros["WIDTH"])
    result = _strided(found, size, columns, kind, found_down, found_across)
    known = result.copy()
    factor, solve = (np.tril(matrix(at, size, size, wide, kind)) for at in (triangle, inverse))
    if turned:
        factor, solve = factor.T, solve.T
    worst = vector(condition, 1, _REAL[kind])[0]
    if not worst <= float(macros["POOR"]):
        known = solve_triangular(factor, right, lower=not turned, check_finite=False)
    elif not worst <= float(macros["FAIR"]):
        known += solve @ (right - factor @ known)
    (result if stays else right)[...] = known


_PLAYED = {"look": _look, "judge": _judge, "qr": _qr, "exchange": _exchange, "reflector": _reflector}


def _substitute(
    macros: dict[str, str], kind: Any, a: int, ld: int, n: int, x: int, ldx: int, columns: int, *,
    grid: tuple[int, ...],
) -> None:  # fmt: skip
    assert n <= 32 * int(macros["ROWS"])
    assert grid[0] * 8 >= columns
    unknowns, triangle = matrix(x, n, columns, ldx, kind), matrix(a, n, n, ld, kind)
    unknowns[...] = solve_triangular(triangle, unknowns, lower=True, unit_diagonal=True, check_finite=False)


def _part(
    macros: dict[str, str], kind: Any, left: int, down: int, along: int, right: int, right_down: int,
    right_across: int, target: int, target_down: int, target_across: int, c: int, c_down: int, c_across: int,
    begin: int, end: int, own: int, rows: int, columns: int, alpha_re: float, alpha_im: float, beta_re: float,
    beta_im: float, *, grid: tuple[int, ...],
) -> None:  # fmt: skip
    alpha, beta = complex(alpha_re, alpha_im), complex(beta_re, beta_im)
    ones, reals = (macros[name] == "1" for name in ("ONES", "REALS"))
    assert grid[1] == 1
    assert int(macros["COLUMNS"]) >= columns
    assert (down == 1) == (macros["BY_COLUMNS"] == "1")
    factor = (lambda x: x) if np.dtype(kind).kind == "c" else (lambda x: x.real)
    d = _strided(target, rows, columns, kind, target_down, target_across)
    for r, (first, stop, special) in enumerate(
        zip(*(vector(at, rows, "i4") for at in (begin, end, own)), strict=True)
    ):
        total = np.zeros(columns, kind)
        if stop > first:
            row = _strided(left + r * down * kind.itemsize, 1, stop, kind, 1, along)[0, first:].copy()
            if first <= special < stop and ones:
                row[special - first] = 1
            if first <= special < stop and reals:
                row[special - first] = row[special - first].real
            total = row @ _strided(right, stop, columns, kind, right_down, right_across)[first:]
        old = factor(beta) * _strided(c, rows, columns, kind, c_down, c_across)[r] if c else 0
        d[r] = factor(alpha) * total + old


_WORDS = {"quad": "c16", "u64": "c8", "u32": "u4", "u16": "u2", "u8": "u1"}
_NUMBERS = {**_KINDS, "bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def _strides(at: int, count: int) -> list[int]:
    return vector(at, count, "u8").tolist()


def _word(macros: dict[str, str]) -> np.dtype:
    return np.dtype(_WORDS[macros["T"]] if macros["FLIP"] else f"V{np.dtype(_WORDS[macros['T']]).itemsize}")


def _carry_words(
    macros: dict[str, str], gpu: AtOnce, stream: int, name: str, pairs: list[tuple[Place, Place]]
) -> None:
    """Copy words, or the conjugates of complex numbers; CUDA reads and writes each at a multiple of its bytes."""
    for each in itertools.chain(*pairs):
        steps = (step for step, n in zip(each.strides, each.extents, strict=True) if n > 1)
        assert not any(at % each.dtype.itemsize for at in (each.address, *steps)), f"{name}: {each}"

    def do(memory: Any) -> None:
        for to, of in pairs:
            found = memory.read(of)
            memory.write(to)[...] = np.conj(found) if macros["FLIP"] else found

    gpu.queue(stream, name, do)


def _move(
    macros: dict[str, str], gpu: AtOnce, stream: int, moves: int, count: int, *, grid: tuple[int, ...]
) -> None:
    word, piece = _word(macros), 32 * int(macros["EACH"]) or 1
    pairs = []
    for words in vector(moves, 13 * count, "u8").reshape(count, 13).tolist():
        to, of, *strides, b, c, run, total, first = words
        assert first < grid[0]
        extents = total // (b * c * -(-run // piece)), b, c, run
        there, here = ((*steps, word.itemsize) for steps in (strides[:3], strides[3:]))
        pairs.append((Place(to, extents, there, word), Place(of, extents, here, word)))
    _carry_words(macros, gpu, stream, "move", pairs)


def _transpose(
    macros: dict[str, str], gpu: AtOnce, stream: int, to: int, there: int, of: int, here: int, rows: int,
    each_row: int, cols: int, each_col: int,
) -> None:  # fmt: skip
    word, extents = _word(macros), (rows // each_row, each_row, cols // each_col, each_col)
    places = (Place(at, extents, tuple(_strides(by, 4)), word) for at, by in ((to, there), (of, here)))
    _carry_words(macros, gpu, stream, "transpose", [tuple(places)])


def _add(
    macros: dict[str, str], gpu: AtOnce, stream: int, parts: int, ld_parts: int, outs: int, ld_first: int,
    ld_rest: int, rows: int, lines: int, c: int, ld_c: int, beta: int, bias: int, activation: int, scale: int,
    amax: int,
) -> None:  # fmt: skip
    part, out, exact, of_c, of_bias = (
        np.dtype(_NUMBERS[macros[name]]) for name in ("PART", "OUT", "SUM", "CTYPE", "BIAS")
    )
    cols = lines * int(macros["V"])

    def numbers(at: int, ld: int, dtype: np.dtype) -> Place:
        return Place(at, (rows, cols), (ld * dtype.itemsize, dtype.itemsize), dtype)

    parts_at, outs_at = _strides(parts, int(macros["P"])), _strides(outs, int(macros["OUTS"]))
    factor = vector(beta, 1, exact)[0].copy()

    def do(memory: Any) -> None:
        y = np.zeros((rows, cols), exact)
        for at in parts_at:
            y = y + memory.read(numbers(at, ld_parts, part)).astype(exact)
        if c:
            y = y + factor * memory.read(numbers(c, ld_c, of_c)).astype(exact)
        if bias:
            y = y + memory.read(Place(bias, (cols,), (of_bias.itemsize,), of_bias)).astype(exact)
        y = tanh_gelu(y) if activation == 2 else np.maximum(y, 0) if activation else y
        if amax:
            largest = memory.write(number(amax))
            largest[0] = max(largest[0], abs(y).max())
        y = y * memory.read(number(scale))[0] if scale else y
        for i, at in enumerate(outs_at):
            memory.write(numbers(at, ld_rest if i else ld_first, out))[...] = y

    gpu.queue(stream, "add", do)


def _sum(
    macros: dict[str, str], gpu: AtOnce, stream: int, tiles: int, ld: int, x_down: int, x_across: int, c_down: int,
    c_across: int, alpha: int, beta: int, down: int, across: int, *, grid: tuple[int, ...],
) -> None:  # fmt: skip
    kind = np.dtype(_NUMBERS[macros["ELEMENT"]])
    one, other = (vector(each, 1, kind)[0].copy() for each in (alpha, beta))
    deals = [vector(each, 6, "u4").tolist() for each in (down, across)]
    conjugate, keeps, real, triangle = (int(macros[x]) for x in ("CONJUGATE", "KEEPS", "REAL", "TRIANGLE"))
    parts = vector(tiles, 5 * grid[1], "u8").reshape(-1, 5).tolist()

    def index(deal: list[int], first: int, count: int) -> np.ndarray:
        block, nprocs, turn, lead, skipped, _ = deal
        at = first + np.arange(count) + skipped
        return (at // block * nprocs + turn) * block + at % block - lead

    def do(memory: Any) -> None:
        for d, x, c, extents, first in parts:
            shape = extents & 0xFFFFFFFF, extents >> 32
            to, of, old = (
                Place(at, shape, (along * kind.itemsize, beside * kind.itemsize), kind)
                for at, along, beside in ((d, 1, ld), (x, x_down, x_across), (c, c_down, c_across))
            )
            added = one * (np.conj if conjugate else np.positive)(memory.read(of))
            added = added + other * memory.read(old) if keeps else added
            inside: Any = True
            if triangle:
                r, q = index(deals[0], first & 0xFFFFFFFF, shape[0]), index(deals[1], first >> 32, shape[1])
                r, q = r[:, None], q[None, :]
                inside = r >= q if triangle == 1 else r <= q
                added = np.where(r == q, added.real, added) if real else added
            np.copyto(memory.write(to), added, where=inside)

    gpu.queue(stream, "sum", do)


def _barrier(
    name: str, gpu: AtOnce, stream: int, peers: int, size: int, rank: int, kind: int, kinds: int
) -> None:
    words = _strides(peers, size)
    assert 0 <= kind < kinds
    if name != "await":
        gpu.arrive(stream, words, rank, kind)
    if name != "arrive":
        gpu.await_all(stream, words, rank, kind)


def _on_flags(name: str, gpu: AtOnce, stream: int, flags: int, count: int) -> None:
    for address in _strides(flags, count):
        getattr(gpu, name.removesuffix("s"))(stream, address)
