# SPDX-License-Identifier: Apache-2.0
"""One of ``fakepeers``'s GPUs, alone: on this process's memory, and all that is queued is computed at once."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pblasmp.engines.gpu.kernels.views import Move
from tests.helpers.fakecublas import at
from tests.helpers.fakepeers import FakePeer, Op, PeerKernels


class _Host:
    """What ``Peers`` is to its GPUs. There is nothing to wait for, and nobody to race with."""

    size, domains = 1, ((0,),)
    of = staticmethod(at)

    def __init__(self) -> None:
        new_clock = partial(np.zeros, 1, np.int16)
        self.held: list[np.ndarray] = []
        self.freed: list[tuple[int, int]] = []
        self.program: list[list[Op]] = [[]]
        self.arrivals: dict[Any, list[np.ndarray]] = {}
        self.meetings: dict[Any, dict[int, Any]] = defaultdict(dict)
        self.clocks, self.joined = (defaultdict(new_clock) for _ in range(2))

    def allocate(self, rank: int, nbytes: int) -> int:
        self.held.append(np.full(nbytes, 0xFF, np.uint8))  # NaN in every type
        return self.held[-1].ctypes.data

    def queue(self, op: Op, **_: Any) -> None:
        assert op.ready(), f"{op.name} waits for ever"
        op.do(self.clocks[op.stream])


class _EagerKernels(PeerKernels):
    """``Kernels``, which also transpose; they count what they do."""

    def move(self, stream: Any, moves: Iterable[Move], *, conjugate: int = 0) -> None:
        self._gpu.moves += 1
        super().move(stream, moves, conjugate=conjugate)

    def transpose(
        self, stream: Any, to: int, there: Any, of: int, here: Any, extents: Any, itemsize: int, *, conjugate: bool
    ) -> None:  # fmt: skip
        assert there[1] == here[3] == itemsize
        self._gpu.transposes += 1
        kind = np.dtype(
            {8: "c8", 16: "c16"}[itemsize] if conjugate else f"u{itemsize}" if itemsize < 16 else "c16"
        )
        target, source = (
            as_strided(np.ndarray(1, kind, (ctypes.c_char * itemsize).from_address(base)), extents, strides)
            for base, strides in ((to, there), (of, here))
        )
        target[...] = source.conj() if conjugate else source


class EagerGpu(FakePeer):
    """See ``overlapped.Gpu``.

    Attributes:
        queued: how many products were queued.
        moves: how many copies of blocks.
        transposes: how many copies that transpose.
    """

    def __init__(self, arena: Any = None) -> None:
        super().__init__(_Host(), 0, 2, capability=89)  # type: ignore[arg-type]
        self.queued, self.moves, self.transposes = 0, 0, 0
        self.arena, self.kernels = arena or self.arena, _EagerKernels(self)

    def begin(self, *names: str) -> None:
        self.queued += 1
        super().begin(*names)

    def wrote(self, name: str) -> bool:
        """Whether anything is in a buffer, symmetric or not."""
        at, nbytes = self.scratches.get(name) or self.peers.meetings["reserve " + name, 0].get(0, (0, 0))
        return ctypes.string_at(at, nbytes) != b"\xff" * nbytes

    def close(self) -> None: ...
