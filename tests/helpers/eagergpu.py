# SPDX-License-Identifier: Apache-2.0
"""What ``overlapped.Gpu`` is to the algorithms, on one rank without peers: everything is computed at once by NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pblasmp.dtypes import accumulation_dtype
from pblasmp.engines.gpu.kernels.lt import PLAIN
from pblasmp.engines.gpu.kernels.views import Move, View


def at(view: View) -> np.ndarray:
    """Return the memory of a view."""
    if not view.rows * view.cols:
        return np.empty((view.rows, view.cols), view.dtype)
    size = view.dtype.itemsize
    nbytes = ((view.rows - 1) * view.ld + view.cols) * size
    memory = (ctypes.c_char * nbytes).from_address(view.address)
    return np.ndarray((view.rows, view.cols), view.dtype, memory, strides=(view.ld * size, size))


class EagerGpu:
    """See ``overlapped.Gpu``.

    Attributes:
        queued: how many products were queued.
        moves: how many copies of blocks.
    """

    rank, size, why_no_windows, multiprocessors, capability, shared_gpus = 0, 1, "", 2, 89, False
    domains, alone = ((0,),), False

    def __init__(self) -> None:
        self.buffers: dict[str, np.ndarray] = {}
        self.outgrown: list[np.ndarray] = []
        self.queued, self.moves, self.transposes = 0, 0, 0
        self.windows = SimpleNamespace(buffer=lambda name: SimpleNamespace(nbytes=0))
        self.arena: Any = SimpleNamespace(replaced=lambda: None)
        self.kernels = SimpleNamespace(copy=self.copy, move=self.move, transpose=self.transpose)

    def agreement(self, what: str, *, blocks: bool = False) -> Any:
        return nullcontext()

    def reserve(self, name: str, nbytes: int) -> None:
        if name in self.buffers and self.buffers[name].nbytes < nbytes:
            self.arena.replaced()
        self.scratch(name, nbytes)

    def symmetric(self, name: str, rank: int) -> int:
        assert rank == 0
        return self.buffers[name].ctypes.data

    def scratch(self, name: str, nbytes: int) -> int:
        if name not in self.buffers or self.buffers[name].nbytes < nbytes:
            if name in self.buffers:
                self.outgrown.append(self.buffers[name])  # graphs may hold its address
            self.buffers[name] = np.full(max(1, nbytes), 0xFF, np.uint8)
        return self.buffers[name].ctypes.data

    def scalar(self, value: Any) -> int:
        if isinstance(value, (int, float)):
            value = self.buffers.setdefault(f"scale {value}", np.array([value], np.float32))
            return value.ctypes.data
        return 0 if value is None else value.data.ptr

    def use_current_stream(self) -> None: ...

    def begin(self, *names: str) -> None:
        self.queued += 1

    def end(self, *names: str) -> None: ...

    def meet(self) -> None: ...

    def follow(self, later: str, earlier: str) -> None: ...

    def raise_flags(self, stream: str, flags: Any) -> None:
        assert not flags, "there are no peers"

    def await_flags(self, stream: str, flags: Any) -> None:
        assert not flags, "there are no peers"

    def multiply(self, stream: str, x: View, w: View, d: View, *, op_w: str, alpha: complex = 1, beta: complex = 0,
                 c: View | None = None, finish: Any = PLAIN, compute: Any = None) -> None:  # fmt: skip
        wide = np.complex128 if d.dtype.kind == "c" else np.float64
        y = alpha * (at(x).astype(wide) @ (at(w).T if op_w == "T" else at(w)).astype(wide))
        y = y + beta * at(c).astype(wide) if beta != 0 else y
        if finish.bias:
            y = y + at(View(finish.bias, 1, d.cols, d.cols, finish.bias_dtype or d.dtype)).astype(wide)
        at(d)[...] = np.maximum(y, 0) if finish.activation == "relu" else y

    def push(self, stream: str, to: View, of: View) -> None:
        at(to)[...] = at(of)

    def move(self, stream: Any, moves: Iterable[Move], *, conjugate: int = 0) -> None:
        self.moves += 1
        kind = np.dtype(f"c{conjugate}") if conjugate else None
        for to, there, of, here, (*counts, run) in moves:
            assert min(*there, *here, *counts, run) >= 0
            if 0 in (*counts, run):
                continue
            target, source = (
                as_strided(
                    np.ndarray(1, f"V{run}", (ctypes.c_char * run).from_address(base)), counts, strides
                )
                for base, strides in ((to, there), (of, here))
            )
            if kind is None:
                target[...] = source
                continue
            for at in np.ndindex(*counts):
                of = np.frombuffer(source[at].tobytes(), kind)
                target[at] = np.conj(of).tobytes()

    def transpose(
        self,
        stream: Any,
        to: int,
        there: Any,
        of: int,
        here: Any,
        extents: Any,
        itemsize: int,
        *,
        conjugate: bool,
    ) -> None:
        assert there[1] == here[3] == itemsize
        self.transposes += 1
        kind = np.dtype(
            {8: "c8", 16: "c16"}[itemsize] if conjugate else f"u{itemsize}" if itemsize < 16 else "c16"
        )
        target, source = (
            as_strided(np.ndarray(1, kind, (ctypes.c_char * itemsize).from_address(base)), extents, strides)
            for base, strides in ((to, there), (of, here))
        )
        target[...] = source.conj() if conjugate else source

    def copy(self, stream: str, to: View, of: View, blocks: int = 0) -> None:
        at(to)[...] = at(of)

    def add(self, stream: str, parts: Any, outs: Any, *, beta: complex = 0, c: View | None = None,
            bias: View | None = None, activation: str | None = None, scale: int = 0, amax: int = 0,
            blocks: int = 0) -> None:  # fmt: skip
        exact = accumulation_dtype(parts[0].dtype)
        y = sum((at(part).astype(exact) for part in parts), exact.type(0))
        y = y + exact.type(beta) * at(c).astype(exact) if beta != 0 else y
        y = y + at(bias).astype(exact) if bias else y
        y = np.maximum(y, 0) if activation == "relu" else y
        if amax:
            largest = ctypes.c_float.from_address(amax)
            largest.value = max(largest.value, abs(y).max())
        for out in outs:
            at(out)[...] = y * ctypes.c_float.from_address(scale).value if scale else y

    def reduce_scatter(self, of: View, to: View, rows: Any) -> None:
        at(to)[...] = at(of)

    def all_reduce(self, matrix: View) -> None: ...

    def all_gather(self, of: View, to: int, nbytes: Any) -> None:
        at(View(to, of.rows, of.cols, of.cols, of.dtype))[...] = at(of)

    def close(self) -> None: ...
