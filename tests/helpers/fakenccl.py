# SPDX-License-Identifier: Apache-2.0
"""NCCL's collectives, in terms of one: each rank sends a matrix, and gets what becomes of all that were sent.

``FakeGpu`` carries that by MPI, ``fakepeers.Process`` within this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from pblasmp.dtypes import accumulation_dtype
from pblasmp.engines.gpu.runtime.nccl import NCCL_SUM, REDUCED_TYPES
from tests.helpers.gpu_memory import Place, lines

_TYPES = {
    number: np.dtype(name)
    for name, number in REDUCED_TYPES.items()
    if not name.startswith(("complex", "float8"))
}
"""Types by NCCL's numbers; those of complex ones are their parts'."""
_SUMMED = {number: kind if kind.kind == "i" else accumulation_dtype(kind) for number, kind in _TYPES.items()}
_BYTE = 1
COLLECTIVES = "all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather"
Takes = Sequence[tuple[Place, Callable[[list[np.ndarray]], Any]]]


def _bytes(address: int, nbytes: int) -> Place:
    return lines(address, 1, nbytes, nbytes)


class Collectives:
    """Functions of nccl.bindings.nccl, as methods."""

    def place_in(self, comm: Any) -> tuple[int, int]:
        """Return this rank's number in a communicator, and of how many."""
        raise NotImplementedError

    def collective(
        self, name: str, comm: Any, stream: int, of: Place, takes: Takes, *, sends: bool = True
    ) -> None:
        """Queue a call: what becomes, of what all that do have sent, of each row of numbers that this rank receives."""
        raise NotImplementedError

    def _reduction(
        self, name: str, of: int, to: int, count: int, kind: int, op: int, comm: Any, stream: int, *,
        sent: int = 0, start: int = 0, takes: bool = True,
    ) -> None:  # fmt: skip
        def row(address: int, length: int) -> Place:
            return Place(address, (length,), (_TYPES[kind].itemsize,), _TYPES[kind])

        def made(parts: list[np.ndarray]) -> np.ndarray:
            wide = [part[start : start + count].astype(_SUMMED[kind]) for part in parts]
            return sum(wide) if op == NCCL_SUM else np.max(wide, axis=0)

        mine = [(row(to, count), made)] if takes else ()
        self.collective(name, comm, stream, row(of, sent or count), mine)

    def reduce_scatter(
        self, of: int, to: int, count: int, kind: int, op: int, comm: Any, stream: int
    ) -> None:
        rank, size = self.place_in(comm)
        how = {"sent": size * count, "start": rank * count}
        self._reduction("reduce_scatter", of, to, count, kind, op, comm, stream, **how)

    def reduce(
        self, of: int, to: int, count: int, kind: int, op: int, root: int, comm: Any, stream: int
    ) -> None:
        takes = self.place_in(comm)[0] == root
        self._reduction("reduce", of, to, count, kind, op, comm, stream, takes=takes)

    def all_reduce(self, *arguments: Any) -> None:
        self._reduction("all_reduce", *arguments)

    def all_gather(self, of: int, to: int, nbytes: int, kind: int, comm: Any, stream: int) -> None:
        assert kind == _BYTE
        parts = [_bytes(to + i * nbytes, nbytes) for i in range(self.place_in(comm)[1])]
        takes = [(part, itemgetter(i)) for i, part in enumerate(parts) if part.address != of]
        self.collective("all_gather", comm, stream, _bytes(of, nbytes), takes)

    def broadcast(self, of: int, to: int, nbytes: int, kind: int, root: int, comm: Any, stream: int) -> None:
        assert kind == _BYTE
        is_root = self.place_in(comm)[0] == root
        takes = [] if is_root and to == of else [(_bytes(to, nbytes), itemgetter(root))]
        self.collective("broadcast", comm, stream, _bytes(of, nbytes), takes, sends=is_root)
