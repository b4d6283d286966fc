# SPDX-License-Identifier: Apache-2.0
"""cuSOLVERMp, simulated: C functions with the bindings' prototypes, on the memory of every rank's simulated GPU.

It computes eigenvalues and singular values, and notes as faults what the library computes wrongly or never ends on.
"""

from __future__ import annotations

import ctypes
import math
import traceback
from functools import partial
from typing import Any

import numpy as np

from pblasmp.bindings import SOLVER_FUNCTIONS, DataType, SolverLibrary, SolverStatus, ctype
from tests.helpers.fakegpu import FakeGpu

TYPES = {DataType.R_32F: "f4", DataType.R_64F: "f8", DataType.C_32F: "c8", DataType.C_64F: "c16"}
WORK = 4096, 256  # bytes of workspace that every query answers


class FakeSolver(SolverLibrary):
    """The library, opened.

    Attributes:
        calls: the functions called, without their prefix.
        faults: misuse seen.
        alive: handles that are not destroyed, and what they were made from.
        spoils: whether singular vectors are wrong.
    """

    spoils = False

    def __init__(self, gpu: FakeGpu, version: int = 901) -> None:
        self.gpu, self.path, self._answer = gpu, "a simulated cuSOLVERMp", version
        self.calls: list[str] = []
        self.faults: list[str] = []
        self.alive: dict[int, dict[str, Any]] = {}
        self._next = 0x5000
        self._cdll: Any = {}
        for name, row in SOLVER_FUNCTIONS.items():
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *(ctype(each.type) for each in row.arguments))
            self._cdll[name] = prototype(partial(self._called, name))
        self.version = 800

    def assert_clean(self) -> None:
        """Nothing was misused, nothing is left alive."""
        assert not self.faults, self.faults
        assert not self.alive, f"leaked: {self.alive}"

    def _called(self, name: str, *values: Any) -> int:
        short = name.removeprefix("cusolverMp")
        told = {
            each.name: value or 0
            for each, value in zip(SOLVER_FUNCTIONS[name].arguments, values, strict=True)
        }
        self.calls.append(short)
        try:
            return int(self._perform(short, told))
        except Exception:  # noqa: BLE001 - C cannot raise it
            self.faults.append(traceback.format_exc())
            return int(SolverStatus.INTERNAL_ERROR)

    def _perform(self, short: str, told: dict[str, Any]) -> int:
        if short in ("Create", "CreateDeviceGrid", "CreateMatrixDesc"):
            out = "desc" if short == "CreateMatrixDesc" else "grid" if "Grid" in short else "handle"
            self._next += 0x10
            self.alive[self._next] = told
            ctypes.c_void_p.from_address(told[out]).value = self._next
        elif short.startswith("Destroy"):
            (value,) = told.values()
            if self.alive.pop(value, None) is None:
                self.faults.append(f"{short}: {value:#x} is not alive")
        elif short == "GetVersion":
            ctypes.c_int.from_address(told["version"]).value = self._answer
        elif short == "SetStream":
            self.alive[told["handle"]]["stream"] = told["stream"]
        elif short.endswith("_bufferSize"):
            return self._query(short.removesuffix("_bufferSize"), told)
        else:
            return self._compute(short, told)
        return 0

    # -- what the library asks for, and what it does wrong

    def _query(self, short: str, told: dict[str, Any]) -> int:
        for name, value in zip(("workspaceInBytesOnDevice", "workspaceInBytesOnHost"), WORK, strict=True):
            ctypes.c_size_t.from_address(told[name]).value = value
        return 0

    def _check(self, short: str, told: dict[str, Any]) -> None:
        if told["workspaceInBytesOnDevice"] < WORK[0] or told["workspaceInBytesOnHost"] < WORK[1]:
            self.faults.append(f"{short}: too small a workspace")
        blocks = set()
        for name in (name for name in told if name.startswith("desc") and told[name]):
            desc, letter = self.alive[told[name]], name[4:].lower()
            grid = self.alive[desc["grid"]]
            blocks.add((desc["MB_A"], desc["NB_A"], desc["grid"]))
            if desc["MB_A"] != desc["NB_A"] or desc["MB_A"] == 1:
                self.faults.append(f"{short}: blocks of {desc['MB_A']} x {desc['NB_A']}")
            if (desc["RSRC_A"], desc["CSRC_A"], told["i" + letter], told["j" + letter]) != (0, 0, 1, 1):
                self.faults.append(f"{short}: {letter} is a part of a matrix")
            if grid["numRowDevices"] * grid["numColDevices"] != (self.gpu.comm.size if self.gpu.comm else 1):
                self.faults.append(f"{short}: not all ranks are in the grid")
        if len(blocks) > 1:
            self.faults.append(f"{short}: layouts {blocks}")
        if self.alive[told["handle"]]["stream"] != self.gpu.stream:
            self.faults.append(f"{short}: on another stream than the current one")

    # -- matrices

    def _owned(self, desc: dict[str, Any]) -> tuple[list[int], list[int]]:
        grid = self.alive[desc["grid"]]
        p, q = grid["numRowDevices"], grid["numColDevices"]
        comm = self._comm(desc)
        rank = comm.rank if comm else 0
        row, col = divmod(rank, q) if grid["mapping"] else (rank % p, rank // p)
        return (
            [i for i in range(desc["M_A"]) if i // desc["MB_A"] % p == row],
            [j for j in range(desc["N_A"]) if j // desc["NB_A"] % q == col],
        )

    def _comm(self, desc: dict[str, Any]) -> Any:
        return self.gpu.communicators[self.alive[desc["grid"]]["comm"]]

    def _array(self, address: int, shape: tuple[int, ...], kind: str, ld: int = 0) -> np.ndarray:
        dtype = np.dtype(kind)
        strides = (dtype.itemsize, ld * dtype.itemsize)[: len(shape)]
        nbytes = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, (ctypes.c_char * nbytes).from_address(address), strides=strides)

    def _part(self, told: dict[str, Any], letter: str) -> tuple[list[int], list[int], np.ndarray]:
        desc = self.alive[told[f"desc{letter.upper()}"]]
        rows, cols = self._owned(desc)
        if desc["LLD_A"] < max(1, len(rows)):
            self.faults.append(f"{letter}: lld {desc['LLD_A']} with {len(rows)} rows")
        kind = TYPES[DataType(desc["dataType"])]
        return rows, cols, self._array(told[letter], (len(rows), len(cols)), kind, desc["LLD_A"])

    def _whole(self, told: dict[str, Any], letter: str) -> np.ndarray:
        desc = self.alive[told[f"desc{letter.upper()}"]]
        rows, cols, part = self._part(told, letter)
        comm = self._comm(desc)
        mine = rows, cols, part.copy()
        whole = np.full((desc["M_A"], desc["N_A"]), np.nan, part.dtype)
        for at_rows, at_cols, values in comm.allgather(mine) if comm else [mine]:
            whole[np.ix_(at_rows, at_cols)] = values
        return whole

    def _put(self, told: dict[str, Any], letter: str, whole: np.ndarray) -> None:
        rows, cols, part = self._part(told, letter)
        if part.size:
            part[...] = whole[np.ix_(rows, cols)]

    # -- routines

    def _compute(self, short: str, told: dict[str, Any]) -> int:
        self._check(short, told)
        return int(getattr(self, f"_{short.lower()}")(told, self._whole(told, "a")) or 0)

    def _syevd(self, told: dict[str, Any], a: np.ndarray) -> None:
        assert ctypes.string_at(told["jobz"], 1) == b"V"
        values, vectors = np.linalg.eigh(np.tril(a), "L")
        equal = np.flatnonzero(np.diff(values) <= 8 * np.finfo(a.dtype).eps * np.abs(values).max())
        for j in equal[::2]:  # those come in any order
            values[[j, j + 1]], vectors[:, [j, j + 1]] = values[[j + 1, j]], vectors[:, [j + 1, j]]
        far = a.any() and not 0.5 <= np.abs(np.concatenate([a.real, a.imag])).max() <= 2  # it does not scale
        if far or (a.dtype.char in "fF" and 2 * len(equal) > len(values)):  # as on two H200
            vectors[:, equal] = vectors[:, equal + 1]
        self._array(told["w"], values.shape, values.dtype.str)[...] = values
        self._put(told, "q", vectors.astype(a.dtype))
        self._put(told, "a", np.full_like(a, math.nan))

    def _gesvd(self, told: dict[str, Any], a: np.ndarray) -> None:
        assert not told["how"]
        u, values, vt = np.linalg.svd(a, full_matrices=False)
        if a.any() and not 0.5 <= np.abs(np.concatenate([a.real, a.imag])).max() <= 2:
            u[:, 0] = 0  # nobody has tried it so near to the ends of the range
        order = np.roll(np.arange(len(values)), 1)  # its documentation promises none
        u, values, vt = u[:, order], values[order], vt[order]
        for letter, job, x in (("u", told["jobu"], u), ("vt", told["jobvt"], vt)):
            assert bool(told[letter]) == bool(job)
            if job:
                self._put(told, letter, (x * (1 + self.spoils)).astype(a.dtype))
        self._array(told["s"], values.shape, values.dtype.str)[...] = values
        self._put(told, "a", np.full_like(a, math.nan))
