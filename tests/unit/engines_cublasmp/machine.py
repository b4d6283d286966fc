# SPDX-License-Identifier: Apache-2.0
"""A rank with a GPU and cuBLASMp, both played: what it was told, in one order, and a library that multiplies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pblasmp.bindings import DataType, MatmulAttribute, MatmulEpilogue, Operation
from pblasmp.dtypes import DTYPES
from pblasmp.engines.cublasmp.types import DATA_TYPES
from tests.helpers.fakegpu import FakeGpu
from tests.helpers.recorder import Call, Recorder

OPS = {Operation.N: lambda x: x, Operation.T: np.transpose, Operation.C: lambda x: x.conj().T}


@dataclass
class Witness(Recorder):
    """A recorder whose calls also stand among the GPU's events, and that knows what its handles were made from.

    Attributes:
        gpu: the machine.
        made: by handle, the arguments of the call that made it.
    """

    gpu: FakeGpu = field(default_factory=FakeGpu)
    made: dict[int, dict[str, int]] = field(default_factory=dict)

    def _called(self, symbol: bytes, values: Any) -> int:
        status = super()._called(symbol, values)
        self.gpu.events.append((self.calls[-1].name.removeprefix("cublasMp"),))
        return status

    def _perform(self, short: str, arguments: dict[str, int], types: dict[str, str], data: bytes) -> None:
        super()._perform(short, arguments, types, data)
        if short.endswith("Create"):
            self.made[self._next] = arguments

    def of(self, name: str) -> list[Call]:
        """The calls of a function, named without its prefix."""
        return [call for call in self.calls if call.name == "cublasMp" + name]

    def attributes(self, matmul_descriptor: int) -> dict[MatmulAttribute, int]:
        """What a matmul descriptor's attributes were set to."""
        stored = self._attributes.get(matmul_descriptor, {})
        return {MatmulAttribute(name): int.from_bytes(data, "little") for name, data in stored.items()}


class Multiplying(Witness):
    """Also computes Matmul and Gemr2D: from nothing but what it is told, with every rank's memory."""

    def _perform(self, short: str, arguments: dict[str, int], types: dict[str, str], data: bytes) -> None:
        super()._perform(short, arguments, types, data)
        play = {"Matmul": self._matmul, "Gemr2D": self._gemr2d}.get(short)
        if play is not None:
            play(arguments)

    def _matmul(self, told: dict[str, int]) -> None:
        attributes = self.attributes(told["matmulDesc"])
        op_a, op_b = (Operation(attributes[MatmulAttribute[f"TRANS{x}"]]) for x in "AB")
        product = OPS[op_a](self._whole(told, "a")) @ OPS[op_b](self._whole(told, "b"))
        assert product.shape == (told["m"], told["n"])
        result = self._scalar(told, "alpha", "d") * product
        beta = self._scalar(told, "beta", "d")
        if beta:
            result = result + beta * self._whole(told, "c")
        if attributes.get(MatmulAttribute.EPILOGUE) == MatmulEpilogue.ALLREDUCE:
            self._part(told, "d")[2][...] = result
        else:
            self._put(told, "d", result)

    def _gemr2d(self, told: dict[str, int]) -> None:
        a, b = (self.made[told[f"desc{x}"]] for x in "AB")
        if a["type"] != b["type"]:
            self.faults.append(f"Gemr2D: types {a['type']} and {b['type']}")
        extents = told["m"], told["n"]
        self._put(told, "b", self._whole(told, "a", extents, told["global_comm"]), extents)

    def _scalar(self, told: dict[str, int], name: str, like: str) -> Any:
        kind = self._dtype(self.made[told["desc" + like.upper()]])
        kind = np.dtype(np.float32) if kind.itemsize == 2 else kind
        return np.frombuffer(ctypes.string_at(told[name], kind.itemsize), kind)[0]

    @staticmethod
    def _dtype(desc: dict[str, int]) -> np.dtype:
        return DTYPES[next(name for name, number in DATA_TYPES.items() if number == DataType(desc["type"]))]

    def _owned(self, desc: dict[str, int]) -> tuple[list[int], list[int]]:
        """The global rows and columns of this rank's part; none outside the grid."""
        if not desc["grid"]:
            return [], []
        grid = self.made[desc["grid"]]
        comm = self.gpu.communicators[grid["comm"]]
        rank = comm.rank if comm else 0
        p, q = grid["nprow"], grid["npcol"]
        row, col = divmod(rank, q) if grid["layout"] else (rank % p, rank // p)
        return (
            [i for i in range(desc["m"]) if (i // desc["mb"] + desc["rsrc"]) % p == row],
            [j for j in range(desc["n"]) if (j // desc["nb"] + desc["csrc"]) % q == col],
        )

    def _part(
        self, told: dict[str, int], letter: str, extents: tuple[int, int] | None = None
    ) -> tuple[list[int], list[int], np.ndarray]:
        """This rank's part of a matrix, or of the sub-matrix that the indices begin: 0-based in it, and the memory."""
        desc = self.made[told["desc" + letter.upper()]]
        owned = self._owned(desc)
        if desc["lld"] < max(1, len(owned[0])):
            self.faults.append(f"{letter}: lld {desc['lld']} with {len(owned[0])} rows")
        first = told["i" + letter] - 1, told["j" + letter] - 1
        whole = desc["m"], desc["n"]
        extents = extents or whole
        if any(f + e > w for f, e, w in zip(first, extents, whole, strict=True)):
            self.faults.append(f"{letter}: {extents} from {first} is not inside {whole}")
        rows, cols = (
            [i - f for i in mine if f <= i < f + e] for mine, f, e in zip(owned, first, extents, strict=True)
        )
        kind = self._dtype(desc)
        strides = kind.itemsize, desc["lld"] * kind.itemsize
        before = [sum(i < f for i in mine) * s for mine, f, s in zip(owned, first, strides, strict=True)]
        nbytes = (len(cols) - 1) * strides[1] + len(rows) * strides[0] if rows and cols else 0
        memory = (ctypes.c_char * nbytes).from_address(told[letter] + sum(before))
        return rows, cols, np.ndarray((len(rows), len(cols)), kind, memory, strides=strides)

    def _whole(
        self,
        told: dict[str, int],
        letter: str,
        extents: tuple[int, int] | None = None,
        communicator: int | None = None,
    ) -> np.ndarray:
        """A matrix as all ranks have it, in a type that sums of small integers are exact in."""
        desc = self.made[told["desc" + letter.upper()]]
        rows, cols, part = self._part(told, letter, extents)
        wide = np.complex128 if part.dtype.kind == "c" else np.float64
        comm = self.gpu.communicators[communicator or self.made[desc["grid"]]["comm"]]
        mine = (rows, cols, part.astype(wide))
        whole = np.full(extents or (desc["m"], desc["n"]), np.nan, wide)
        for at_rows, at_cols, values in comm.allgather(mine) if comm else [mine]:
            whole[np.ix_(at_rows, at_cols)] = values
        return whole

    def _put(
        self, told: dict[str, int], letter: str, whole: np.ndarray, extents: tuple[int, int] | None = None
    ) -> None:
        rows, cols, part = self._part(told, letter, extents)
        part[...] = whole[np.ix_(rows, cols)]


@contextmanager
def machine(
    path: str,
    kind: type[Witness] = Witness,
    *,
    library: str = "",
    without: Sequence[str] = (),
    **how: Any,
) -> Iterator[Witness]:
    """A rank's machine, until the end of the ``with`` block; ``pb.Context(engine="cublasmp")`` finds it.

    Args:
        path: the library that is recorded.
        kind: how.
        library: the library that is found, by default the same.
        without: modules that are not installed.
        **how: of the GPU.
    """
    with pytest.MonkeyPatch.context() as patch, kind(path, gpu=FakeGpu(**how)) as lib:
        lib.gpu.install(patch, without)
        patch.setenv("PBLASMP_CUBLASMP", library or path)
        for name in ("CUBLASMP_LOG_LEVEL", "CUBLASMP_LOG_MASK"):
            patch.delenv(name, raising=False)
        yield lib
