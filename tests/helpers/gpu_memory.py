# SPDX-License-Identifier: Apache-2.0
"""What simulated GPUs do with what is queued on them: memory at real addresses, streams, flags and barriers.

Whatever plays a call of CUDA's, cuBLAS's or NCCL's queues a function on a stream, which is given the memory when it
runs: it says what it reads and what it writes. Here it runs at once; ``fakepeers.Peers`` has another kind of GPU, which
runs it later, and checks that something orders it.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pblasmp.engines.gpu.kernels.views import View


class Place(NamedTuple):
    """Elements at an address, so many bytes apart along each dimension."""

    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """From the first byte to the last one."""
        ends = ((n - 1) * step for n, step in zip(self.extents, self.strides, strict=True))
        return sum(ends) + self.dtype.itemsize if 0 not in self.extents else 0


def place(view: View) -> Place:
    size = view.dtype.itemsize
    return Place(view.address, (view.rows, view.cols), (view.ld * size, size), view.dtype)


def lines(address: int, height: int, pitch: int, width: int) -> Place:
    """So many lines of bytes."""
    return Place(address, (height, width), (pitch, 1), np.dtype(np.uint8))


def number(address: int, dtype: Any = np.float32) -> Place:
    """A single number."""
    return Place(address, (1,), (np.dtype(dtype).itemsize,), np.dtype(dtype))


def at(of: Place | View) -> np.ndarray:
    """Return the memory there, of this process."""
    of = place(of) if isinstance(of, View) else of
    if 0 in of.extents:
        return np.empty(of.extents, of.dtype)
    memory = (ctypes.c_char * of.nbytes).from_address(of.address)
    return np.ndarray(of.extents, of.dtype, memory, strides=of.strides)


class Fault(AssertionError):  # noqa: N818
    """What a simulator found."""


@dataclass
class Flag:
    """A word that one rank raises and another one waits for: when either was done last; whether it may stay up."""

    up: bool = False
    stays: bool = False
    raised: Any = None
    lowered: Any = None


class AtOnce:
    """One GPU's streams: what is queued runs at once, so that there is nothing to wait for, and nobody to race with.

    It is also the memory that what runs is given.

    Attributes:
        flags: by their addresses.
        arrivals: of each barrier of a GPU, by the address of its words and its kind: when this GPU arrived.
        epochs: how often it has waited there.
    """

    def __init__(self) -> None:
        self.flags: dict[int, Flag] = defaultdict(Flag)
        self.arrivals: dict[tuple[int, int], list[Any]] = defaultdict(list)
        self.epochs: dict[tuple[int, int], int] = defaultdict(int)

    read = write = staticmethod(at)

    def queue(
        self, stream: int, name: str, do: Callable[[Any], None], *, ready: Callable[[], bool] = lambda: True,
        synchronizes: bool = False,
    ) -> None:  # fmt: skip
        """Queue a function of the memory.

        Args:
            stream: its address.
            name: what it does.
            do: it.
            ready: whether what it waits for has come.
            synchronizes: it orders this stream's work and other's, and a test may leave it out.
        """
        assert ready(), f"{name} waits for ever"
        do(self)

    def is_done(self, stream: int) -> bool:
        """Whether a stream has nothing left to do, which the host waits for."""
        return True

    def stamp(self) -> Any:
        """What runs, as a later one may wait for it."""

    def after(self, stamp: Any, *, by_event: bool = False) -> None:
        """Let what runs, and what follows it on its stream, be later than another."""

    def is_later(self, stamp: Any) -> bool:
        """Whether what runs is certainly later than another."""
        return True

    def name_of(self, flag: int) -> str:
        return hex(flag)

    # -- what orders streams and GPUs

    def copy(self, stream: int, to: Place, of: Place) -> None:
        def do(memory: Any) -> None:
            memory.write(to)[...] = memory.read(of)

        self.queue(stream, "copy", do)

    def raise_flag(self, stream: int, address: int) -> None:
        flag, name = self.flags[address], f"raise {self.name_of(address)}"

        def do(memory: Any) -> None:
            if flag.up or not memory.is_later(flag.lowered):
                raise Fault(f"{name}: it was not seen yet")
            flag.up, flag.raised = True, memory.stamp()

        self.queue(stream, name, do, synchronizes=True)

    def await_flag(self, stream: int, address: int) -> None:
        """Wait for a flag, and lower it."""
        flag = self.flags[address]

        def do(memory: Any) -> None:
            memory.after(flag.raised)
            flag.up, flag.lowered = False, memory.stamp()

        self.queue(stream, f"await {self.name_of(address)}", do, ready=lambda: flag.up, synchronizes=True)

    def arrive(self, stream: int, words: Sequence[int], rank: int, kind: int) -> None:
        """Tell all GPUs, by the addresses of whose words they know each other, that this one is here."""
        came = self.arrivals[words[rank], kind]
        self.queue(stream, "arrive", lambda memory: came.append(memory.stamp()), synchronizes=not kind)

    def await_all(self, stream: int, words: Sequence[int], rank: int, kind: int) -> None:
        """Wait until all GPUs have arrived once more."""
        everyone, epoch = [self.arrivals[each, kind] for each in words], self.epochs[words[rank], kind]
        self.epochs[words[rank], kind] += 1
        self.queue(
            stream, "meet" if kind else "await all",
            lambda memory: [memory.after(came[epoch]) for came in everyone],
            ready=lambda: all(len(came) > epoch for came in everyone), synchronizes=True,
        )  # fmt: skip
