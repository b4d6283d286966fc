# SPDX-License-Identifier: Apache-2.0
"""A rank with a GPU and cuBLASMp, both simulated: the calls in order, and a library that multiplies."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

import pblasmp as pb
from pblasmp.bindings import DataType, MatmulAttribute, MatmulEpilogue, Operation, Status
from pblasmp.cli.run import dense, touched
from pblasmp.dtypes import as_dtype
from pblasmp.engines.gpu.types import DATA_TYPES
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers import level3
from tests.helpers.fakegpu import FakeGpu
from tests.helpers.recorder import Call, Recorder

OPS = {Operation.N: lambda x: x, Operation.T: np.transpose, Operation.C: lambda x: x.conj().T}


@dataclass
class Witness(Recorder):
    """A recorder whose calls also stand among the GPU's events, and that knows what its handles were made from.

    Attributes:
        gpu: the machine.
        made: by handle, the arguments of the call that made it.
        channel: by which the ranks of the context hear of each other; None before there is one.
    """

    channel: Any = None
    gpu: FakeGpu = field(default_factory=FakeGpu)
    made: dict[int, dict[str, int]] = field(default_factory=dict)

    def _called(self, symbol: bytes, values: Any) -> int:
        if symbol == b"cublasMpBufferRegister" and self.gpu.null_windows:
            self.fail(Status.NOT_SUPPORTED)
        status = super()._called(symbol, values)
        self.gpu.stay_at_home(self.calls[-1].name)
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


class Meeting(Witness):
    """A library whose routines end when all ranks of their grid have called them, and compute nothing.

    Memory is registered, or is not, when all have come, for which the host waits.
    """

    def _called(self, symbol: bytes, values: Any) -> int:
        if symbol == b"cublasMpBufferRegister":
            comm = self.gpu.communicators[self.made[values[0]]["comm"]]
            if comm is not None:
                comm.Barrier()
        return super()._called(symbol, values)

    def _perform(self, short: str, arguments: dict[str, int], types: dict[str, str], data: bytes) -> None:
        super()._perform(short, arguments, types, data)
        if short == "Matmul" or short.lower() in ROUTINES:
            desc = self.made[arguments["descA"]]
            at = arguments.get("global_comm") or self.made[desc["grid"]]["comm"]
            comm = self.gpu.communicators[at]
            if comm is not None and self.gpu.stream not in self.gpu.capturing:
                self.gpu.finish([comm.Ibarrier()])


@dataclass
class Multiplying(Witness):
    """Also computes Matmul and level 3: from nothing but its arguments and every rank's memory.

    Attributes:
        version: whose contracts the level-3 routines are held to.
    """

    version: int = 1000

    def _perform(self, short: str, arguments: dict[str, int], types: dict[str, str], data: bytes) -> None:
        super()._perform(short, arguments, types, data)
        if short == "Matmul":
            self._matmul(arguments)
        elif short.lower() in ROUTINES:
            self._level3(short, arguments)

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
            self._store(attributes, result, self._part(told, "d")[2])
        else:
            self._put(told, "d", result)

    def _store(self, attributes: dict[MatmulAttribute, int], part: np.ndarray, out: np.ndarray) -> None:
        out[...] = part

    def _level3(self, short: str, told: dict[str, int]) -> None:
        routine, result = short.lower(), "b" if short == "Trsm" else "c"
        flags: dict[str, str] = {}
        for name, argument, letters in (("side", "side", "LR"), ("uplo", "uplo", "LU"), ("op_a", "trans", "NTC"),
                                        ("diag", "diag", "NU")):  # fmt: skip
            if argument in told:
                flags[name] = letters[told[argument]]
        m, n = told.get("m", told["n"]), told["n"]
        extents = level3.shapes(routine, flags, m, n, told.get("k", 0))
        letters = [x for x in "abc" if x in told]
        self.faults += [f"{short}: {fault}" for fault in contract(self, short, told, flags)]
        values = {x: self._whole(told, x, extents[x]) for x in letters if (x, short) != ("c", "Trmm")}
        sums = short in ("Geadd", "Tradd")
        alpha = self._scalar(told, "alpha", "a", narrow=sums)
        beta = self._scalar(told, "beta", "a", narrow=sums) if "beta" in told else 0
        if beta == 0:
            values.pop("c", None)
        whole = dense(routine, values, flags, alpha, beta)
        if short == "Tradd" and beta == 0:
            whole = whole + 0 * self._whole(told, "c", extents["c"])
        self._put(told, result, whole, extents["d"], touched(routine, "d", flags, whole.shape))

    def _scalar(self, told: dict[str, int], name: str, like: str, *, narrow: bool = False) -> Any:
        kind = self._dtype(self.made[told["desc" + like.upper()]])
        kind = np.dtype(np.float32) if kind.itemsize <= 2 and not narrow else kind
        return np.frombuffer(ctypes.string_at(told[name], kind.itemsize), kind)[0]

    @staticmethod
    def _dtype(desc: dict[str, int]) -> np.dtype:
        return as_dtype(next(name for name, number in DATA_TYPES.items() if number == DataType(desc["type"])))

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
        self,
        told: dict[str, int],
        letter: str,
        whole: np.ndarray,
        extents: tuple[int, int] | None = None,
        written: np.ndarray | None = None,
    ) -> None:
        rows, cols, part = self._part(told, letter, extents)
        where = np.ones(part.shape, bool) if written is None else written[np.ix_(rows, cols)]
        np.copyto(part, whole[np.ix_(rows, cols)], casting="unsafe", where=where)


def contract(lib: Multiplying, short: str, told: dict[str, int], flags: dict[str, str]) -> Iterator[str]:
    """Say what the header of the library's version forbids in a call of a level-3 routine."""
    descs = {x: lib.made[told[f"desc{x.upper()}"]] for x in "abc" if x in told}
    made = [lib.made[desc["grid"]] for desc in descs.values()]
    grids = {(g["nprow"], g["npcol"], g["layout"]) for g in made}  # also of a line of processes
    if len(grids) > 1:
        yield f"processes {grids}"
    if len({desc["type"] for desc in descs.values()}) > 1:
        yield "types differ"
    if short == "Trmm" and told["b"] == told["c"]:
        yield "B is C"
    if short == "Geadd" and told["a"] == told["c"] and flags["op_a"] != "N":
        yield "A is C, transposed"
    free = short == "Trsm" and lib.version >= 901
    block = {x: (desc["mb"], desc["nb"]) for x, desc in descs.items()}
    if free:
        return
    for x, (mb, nb) in block.items():
        if (told[f"i{x}"] - 1) % mb or (told[f"j{x}"] - 1) % nb:
            yield f"{x} begins inside a block"
    a, c = block["a"], block.get("c", block.get("b"))
    turned = flags.get("op_a", "N") != "N"
    op_a = a[::-1] if turned else a
    if short in ("Trsm", "Trmm", "Symm", "Hemm"):
        rules = {"A square": a[0] == a[1], "rows": a[0] == c[0] == block["b"][0], "B like C": block["b"] == c}
        rules["side R"] = flags["side"] == "L" or c[1] == a[0]
        rules["trsm square"] = short != "Trsm" or c[0] == c[1]
    elif short in ("Geadd", "Tradd"):
        rules = {"A like C": op_a == c, "C square": (short == "Geadd" and lib.version >= 901) or c[0] == c[1]}
    else:
        rules = {"C square": c[0] == c[1], "n": op_a[0] == c[0], "B like A": block.get("b", a) == a}
    yield from (f"blocks {block}: {name}" for name, holds in rules.items() if not holds)


@contextmanager
def machine(
    path: str, kind: type[Witness] = Witness, *, library: str = "", without: Sequence[str] = (), **how: Any
) -> Iterator[Witness]:
    """A rank's machine, until the end of the ``with`` block; ``pb.Context(engine="cublasmp")`` finds it.

    Args:
        path: the library that is recorded.
        kind: how.
        library: the library that is found, by default the same.
        without: modules that are not installed.
        **how: of the GPU.
    """
    one_thread = _blas().limit(limits=1, user_api="blas")  # the ranks share the cores
    with one_thread, pytest.MonkeyPatch.context() as patch, kind(path, gpu=FakeGpu(**how)) as lib:
        lib.gpu.install(patch, without)
        patch.setenv("PBLASMP_CUBLASMP", library or path)
        patch.setattr("pblasmp.engines.gpu.runtime.health._end_in_time", lambda: None)  # the tests go on
        patch.setattr("pblasmp.engines.gpu.runtime.health._broken", [])  # a machine that nobody has used
        for name in ("CUBLASMP_LOG_LEVEL", "CUBLASMP_LOG_MASK"):
            patch.delenv(name, raising=False)
        yield lib


@contextmanager
def context(
    path: str, kind: type[Witness] = Witness, *, comm: Any = None, **how: Any
) -> Iterator[tuple[pb.Context, Any]]:
    """A context on such a machine, and the machine: clean at the end."""
    with machine(path, kind, comm=comm, **how) as lib:
        with pb.Context(comm, engine="cublasmp") as ctx:
            yield ctx, lib
        lib.assert_clean()
        lib.gpu.assert_clean()


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()
