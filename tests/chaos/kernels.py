# SPDX-License-Identifier: Apache-2.0
"""Our CUDA kernels at the edges of their arrays: ``compute-sanitizer python -m tests.chaos.kernels --count 200``.

Each array has its own allocation, so that the sanitizer sees accesses out of bounds. Sums and copies are compared with
NumPy's. One GPU; ``--tool racecheck``, ``initcheck`` and ``synccheck`` are worth a run, too.
"""

from __future__ import annotations

import argparse
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.engines.gpu.gpu_operations import GpuOperations
from pblasmp.engines.gpu.kernels.kernels import Kernels
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.layout import Trapezoid
from pblasmp.layout.pieces import LocalPart

TYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
WIDE = {"float16": np.float32, "bfloat16": np.float32, "float32": np.float32, "float64": np.float64}


class Matrix:
    """A matrix on the GPU and its values; its memory ends where its last row ends."""

    def __init__(self, cupy: Any, values: np.ndarray, spare: int = 0) -> None:
        rows, cols = values.shape
        ld, self._dtype = cols + spare, values.dtype
        host = np.zeros((rows - 1) * ld + cols, values.dtype)
        for row in range(rows):
            host[row * ld : row * ld + cols] = values[row]
        self.memory = cupy.asarray(host.view(np.uint8))
        self.view = View(int(self.memory.data.ptr), rows, cols, ld, values.dtype)

    def values(self) -> np.ndarray:
        view, host = self.view, self.memory.get().view(self._dtype)
        return np.stack([host[row * view.ld : row * view.ld + view.cols] for row in range(view.rows)])


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Small integers, whose sums every type but the narrowest has exactly."""
    found = rng.integers(-3, 4, shape).astype(np.float64)
    if dtype.kind == "c":
        found = found + 1j * rng.integers(-3, 4, shape)
    return found.astype(dtype)


def one_sum(cupy: Any, kernels: Kernels, rng: random.Random, seed: int) -> str:
    """Add a few matrices; return what is wrong with the result."""
    draw, name = np.random.default_rng(seed), rng.choice(TYPES)
    dtype = DTYPES[name]
    shape = rng.randint(1, 40), rng.choice([rng.randint(1, 70), 8 * rng.randint(1, 20)])
    spare = rng.choice([0, 0, 1, 8])
    wide = dtype if dtype.kind == "c" else np.dtype(WIDE[name])
    out = dtype
    if dtype.itemsize == 2 and rng.random() < 0.4:
        out = rng.choice([np.dtype(np.float32), *FLOAT8.values()])
    parts = [numbers(draw, shape, dtype) for _ in range(rng.randint(1, 4))]
    expected = sum(part.astype(wide) for part in parts)
    given: dict[str, Any] = {}
    if rng.random() < 0.5:
        given["c"] = numbers(draw, shape, dtype if out.itemsize == 1 else out)
        expected = expected + 2 * given["c"].astype(wide)
    if rng.random() < 0.5 and dtype.kind != "c":
        given["bias"] = numbers(draw, (1, shape[1]), dtype)
        expected = expected + given["bias"].astype(wide)
    relu = rng.random() < 0.3 and dtype.kind != "c"
    expected = np.maximum(expected, 0) if relu else expected
    on_gpu = [Matrix(cupy, part, spare) for part in parts]
    outs = [Matrix(cupy, np.zeros(shape, out), each) for each in (0, *[spare] * rng.randint(0, 2))]
    more = {key: Matrix(cupy, value) for key, value in given.items()}
    amax = cupy.zeros(1, np.float32) if dtype.kind != "c" and rng.random() < 0.5 else None
    kernels.add(
        cupy.cuda.get_current_stream(), [each.view for each in on_gpu], [each.view for each in outs],
        beta=2 if "c" in more else 0, activation="relu" if relu else None, blocks=rng.choice([0, 1, 3]),
        amax=0 if amax is None else int(amax.data.ptr), **{key: each.view for key, each in more.items()},
    )  # fmt: skip
    if any(not np.array_equal(each.values(), expected.astype(out)) for each in outs):
        return f"a sum of {len(parts)} matrices of {shape}, {name} to {out.name}, {sorted(given)}, is wrong"
    if amax is not None and float(amax[0]) != np.abs(expected).max():
        return f"amax of a sum of {shape} is {float(amax[0])}, not {np.abs(expected).max()}"
    return ""


def one_move(cupy: Any, kernels: Kernels, rng: random.Random, seed: int) -> str:
    """Make some copies of bytes in four dimensions, or of conjugates; return what is wrong."""
    moves, places, ends = [], [], [0, 0]
    conjugate = rng.choice([0, 0, 8, 16])
    for _ in range(rng.choice([1, 3, 40])):
        unit = max(conjugate, rng.choice([1, 2, 4, 8, 16]))
        run = rng.choice([rng.randint(1, 9), rng.randint(60, 600)])
        extents = [rng.randint(1, 5), rng.randint(1, 6), rng.randint(1, 5), unit * run]
        strides, at = [], []
        for side in (0, 1):
            # from the innermost dimension outwards: rows of a block, blocks across, blocks down
            across = extents[3] + unit * rng.randint(0, 3)
            down = extents[2] * across + unit * rng.randint(0, 3)
            outer = extents[1] * down + unit * rng.randint(0, 3)
            first = -(-ends[side] // unit) * unit
            at.append(
                np.add.outer(
                    first + np.add.outer(np.arange(extents[0]) * outer, np.arange(extents[1]) * down),
                    np.add.outer(np.arange(extents[2]) * across, np.arange(extents[3])),
                ).reshape(-1)
            )
            strides.append((first, (outer, down, across)))
            ends[side] = int(at[side].max()) + 1
        moves.append((*strides, extents))
        places.append(at)
    values = np.random.default_rng(seed).integers(0, 256, ends[1]).astype(np.uint8)
    source, target = cupy.asarray(values), cupy.zeros(ends[0], np.uint8)
    to, of = int(target.data.ptr), int(source.data.ptr)
    kernels.move(
        cupy.cuda.get_current_stream(),
        [(to + at, there, of + start, here, extents) for (at, there), (start, here), extents in moves],
        conjugate=conjugate,
    )
    expected = np.zeros(target.size, np.uint8)
    for there, here in places:
        expected[there] = values[here]
        if conjugate:  # the last byte has the sign of the imaginary part
            expected[there[conjugate - 1 :: conjugate]] ^= 0x80
    wrong = f"copies are wrong, conjugates of {conjugate} bytes: {moves}"
    return "" if np.array_equal(target.get(), expected) else wrong


def one_transpose(cupy: Any, kernels: Kernels, rng: random.Random, seed: int) -> str:
    """Copy runs of rows x runs of columns into the other memory order; return what is wrong."""
    size = rng.choice([1, 2, 4, 8, 16])
    extents = [rng.randint(1, 4), rng.randint(1, 40), rng.randint(1, 4), rng.randint(1, 40)]
    conjugate = size >= 8 and rng.random() < 0.5

    def place(inner: int, outer: int) -> dict[int, int]:
        """Return the bytes from one to the next: of a run of ``inner`` are neighbors, ``outer`` are further apart."""
        steps = {inner: size, inner - 1: (extents[inner] + rng.randint(0, 3)) * size}
        steps[outer] = extents[inner - 1] * steps[inner - 1] + rng.randint(0, 3) * size
        return steps | {outer - 1: extents[outer] * steps[outer] + rng.randint(0, 3) * size}

    there, here = ([steps[i] for i in range(4)] for steps in (place(1, 3), place(3, 1)))
    kind = np.dtype(f"c{size}") if size >= 8 else np.dtype(f"u{size}")

    def at(steps: list[int]) -> np.ndarray:
        along = [index * step // size for index, step in zip(np.indices(extents), steps, strict=True)]
        return np.sum(along, axis=0).reshape(-1)

    values = numbers(np.random.default_rng(seed), (1, int(at(here).max()) + 1), kind)[0]
    source = cupy.asarray(values.view(np.uint8))
    target = cupy.zeros((int(at(there).max()) + 1) * size, np.uint8)
    kernels.transpose(
        cupy.cuda.get_current_stream(), int(target.data.ptr), there, int(source.data.ptr), here, extents, size,
        conjugate=conjugate,
    )  # fmt: skip
    expected = np.zeros(target.size // size, kind)
    expected[at(there)] = values[at(here)].conj() if conjugate else values[at(here)]
    right = np.array_equal(target.get().view(kind), expected)
    return (
        ""
        if right
        else f"a transposing copy of {extents}, {size} bytes each, from {here} to {there} is wrong"
    )


def one_part(cupy: Any, operations: Any, rng: random.Random, seed: int) -> str:
    """Write a sum of two matrices into a part of one of them or of a third; return what is wrong."""
    draw, shape = np.random.default_rng(seed), (rng.randint(1, 70), rng.randint(1, 70))
    name = rng.choice(("float32", "float64", "complex64", "complex128"))
    x, c, d = (np.array(numbers(draw, shape, DTYPES[name]), order=rng.choice(("C", "F"))) for _ in range(3))
    alpha, beta = rng.choice([0, 1, 2]), rng.choice([0, 1, -1])
    conjugate, hermitian = rng.random() < 0.5, rng.random() < 0.5
    rows, cols = (np.sort(draw.choice(80, length, replace=False)) for length in shape)
    part = None
    if rng.random() < 0.7:
        part = Trapezoid(rng.choice("LU"), 0 if hermitian else rng.randint(-30, 30))
    real = (rows[:, None] == cols) & (hermitian and part is not None)
    terms = [np.where(real, term.real, term) for term in (x.conj() if conjugate else x, c)]
    inside = np.ones(shape, bool) if part is None else part.mask(rows, cols)
    on_gpu = {key: cupy.asarray(value, order="A") for key, value in (("x", x), ("c", c), ("d", d))}
    out = on_gpu[rng.choice("dc")]
    expected = np.where(inside, alpha * terms[0] + beta * terms[1], out.get())
    place = None if part is None else LocalPart(part, rows, cols, hermitian=hermitian)
    operations.add(out, alpha, on_gpu["x"], beta, on_gpu["c"], place, conjugate=conjugate)
    right = np.array_equal(out.get(), expected)
    return "" if right else f"{alpha} x + {beta} c of {shape}, {name}, in {part} is wrong"


def barriers(cupy: Any, kernels: Kernels) -> str:
    """A rank that meets itself, by each barrier a few times, and waits for flags."""
    kinds, stream = 2, cupy.cuda.get_current_stream()
    flags = cupy.zeros(kinds * 3, np.uint32)
    for _ in range(3):
        for kind in range(kinds):
            for what in ("arrive", "await", "meet"):
                kernels.signal(what, [int(flags.data.ptr)], 0, kind, kinds)(stream)
    raised = cupy.zeros(40, np.uint32)
    kernels.raise_flags(stream, [int(raised.data.ptr) + 4 * i for i in range(40)])
    kernels.await_flags(stream, [int(raised.data.ptr) + 4 * i for i in range(1, 40)])
    stream.synchronize()
    return "" if raised.get().tolist() == [1] + [0] * 39 else "flags that were awaited are up"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="sums and copies of each kind")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    import cupy

    cupy.cuda.set_allocator(None)  # one allocation for each array
    kernels, faults = Kernels(cupy), []
    operations = GpuOperations(SimpleNamespace(gpu=None, runtime=SimpleNamespace(follow_stream=lambda: None)))  # type: ignore[arg-type]
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        rng = random.Random(seed)
        faults += [
            f"seed {seed}: {fault}"
            for fault in (
                one_sum(cupy, kernels, rng, seed),
                one_part(cupy, operations, rng, seed),
                one_move(cupy, kernels, rng, seed),
                one_transpose(cupy, kernels, rng, seed),
            )
            if fault
        ]
    faults += filter(None, [barriers(cupy, kernels)])
    print(
        *faults,
        f"{arguments.count} sums, sums in a part, copies and transposing ones each, and barriers: {len(faults)} wrong",
        sep="\n",
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
