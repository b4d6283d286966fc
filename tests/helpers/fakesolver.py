# SPDX-License-Identifier: Apache-2.0
"""cuSOLVERMp, simulated: C functions with the bindings' prototypes, on the memory of every rank's simulated GPU.

It refuses what the library refuses, and notes as faults what the library computes wrongly or never ends on.
"""

from __future__ import annotations

import ctypes
import math
import traceback
from functools import partial
from typing import Any

import numpy as np
from scipy.linalg import lapack

from pblasmp.bindings import SOLVER_FUNCTIONS, DataType, Operation, SolverLibrary, SolverStatus, ctype
from tests.helpers.fakegpu import FakeGpu

TYPES = {DataType.R_32F: "f4", DataType.R_64F: "f8", DataType.C_32F: "c8", DataType.C_64F: "c16"}
WORK = 4096, 256  # bytes of workspace that every query answers


class FakeSolver(SolverLibrary):
    """The library, opened.

    Attributes:
        calls: the functions called, without their prefix.
        faults: misuse seen.
        alive: handles that are not destroyed, and what they were made from.
    """

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

    # -- what the library refuses, and what it does wrong

    def _query(self, short: str, told: dict[str, Any]) -> int:
        for name, value in zip(("workspaceInBytesOnDevice", "workspaceInBytesOnHost"), WORK, strict=True):
            ctypes.c_size_t.from_address(told[name]).value = value
        if short in ("Getrs", "Gels") and told["trans"] != Operation.N:
            return SolverStatus.NOT_SUPPORTED
        if short == "Gels" and told["m"] < told["n"]:
            return SolverStatus.NOT_SUPPORTED
        if short in ("Ormqr", "Gels"):
            beside = self.alive[told["descB" if short == "Gels" else "descC"]]
            if self.alive[beside["grid"]]["numColDevices"] > 1 and beside["N_A"] < beside["NB_A"]:
                return SolverStatus.NOT_SUPPORTED
        return 0

    def _check(self, short: str, told: dict[str, Any]) -> None:
        if told["workspaceInBytesOnDevice"] < WORK[0] or told["workspaceInBytesOnHost"] < WORK[1]:
            self.faults.append(f"{short}: too small a workspace")
        blocks = set()
        for name in (name for name in told if name.startswith("desc")):
            desc, letter = self.alive[told[name]], name[4:].lower()
            grid = self.alive[desc["grid"]]
            blocks.add((desc["MB_A"], desc["NB_A"], desc["grid"]))
            if desc["MB_A"] != desc["NB_A"] or desc["MB_A"] == 1:
                self.faults.append(f"{short}: blocks of {desc['MB_A']} x {desc['NB_A']}")
            if (desc["RSRC_A"], desc["CSRC_A"], told["i" + letter], told["j" + letter]) != (0, 0, 1, 1):
                self.faults.append(f"{short}: {letter} is a part of a matrix")
            if grid["numRowDevices"] * grid["numColDevices"] != (self.gpu.comm.size if self.gpu.comm else 1):
                self.faults.append(f"{short}: not all ranks are in the grid")
            if short in ("Getrf", "Getrs") and grid["numRowDevices"] > 1:
                self.faults.append(f"{short}: several rows of processes, whose pivots are others")
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

    def _columns(
        self, told: dict[str, Any], name: str, kind: str, whole: np.ndarray | None = None
    ) -> np.ndarray:
        """What accompanies the columns of A: given to this rank's if ``whole`` is not None, else read from all."""
        desc = self.alive[told["descA"]]
        _, cols = self._owned(desc)
        part = self._array(told[name], (len(cols),), kind)
        if whole is not None:
            padded = np.zeros(desc["N_A"], kind)
            padded[: len(whole)] = whole
            if part.size:
                part[...] = padded[cols]
            return whole
        found, comm = np.zeros(desc["N_A"], kind), self._comm(desc)
        for at, values in comm.allgather((cols, part.copy())) if comm else [(cols, part)]:
            found[at] = values
        return found

    # -- routines

    def _compute(self, short: str, told: dict[str, Any]) -> int:
        self._check(short, told)
        return int(getattr(self, f"_{short.lower()}")(told, self._whole(told, "a")) or 0)

    def _potrf(self, told: dict[str, Any], a: np.ndarray) -> int:
        a[np.triu_indices(len(a), 1)] = np.nan  # is not read
        factor, found = lapack.get_lapack_funcs("potrf", (a,))(a, lower=1, clean=0)
        found = self._first_fault(a) if found or np.isnan(np.tril(factor)).any() else 0
        rows, cols, part = self._part(told, "a")
        if part.size:
            lower = np.asarray(rows)[:, None] >= np.asarray(cols)
            part[lower] = factor[np.ix_(rows, cols)][lower]
            if found and found - 1 in rows and found - 1 in cols:  # the root of a negative number
                part[rows.index(found - 1), cols.index(found - 1)] = np.nan
        self._array(told["info"], (1,), "i4")[0] = found
        return SolverStatus.INTERNAL_ERROR if found else 0

    def _potrs(self, told: dict[str, Any], a: np.ndarray) -> None:
        lower = np.tril(a)
        self._put(told, "b", np.linalg.solve(lower @ lower.conj().T, self._whole(told, "b")))

    def _getrf(self, told: dict[str, Any], a: np.ndarray) -> None:
        factors, pivots, _ = lapack.get_lapack_funcs("getrf", (a,))(a)
        self._put(told, "a", factors)
        self._columns(told, "ipiv", "i8", pivots.astype("i8") + 1)

    def _getrs(self, told: dict[str, Any], a: np.ndarray) -> None:
        pivots = self._columns(told, "ipiv", "i8") - 1
        b = self._whole(told, "b")
        for i, other in enumerate(pivots.tolist()):
            b[[i, other]] = b[[other, i]]
        lower = np.tril(a, -1) + np.eye(len(a), dtype=a.dtype)
        self._put(told, "b", np.linalg.solve(np.triu(a), np.linalg.solve(lower, b)))

    def _geqrf(self, told: dict[str, Any], a: np.ndarray) -> None:
        factors, tau = lapack.get_lapack_funcs("geqrf", (a,))(a)[:2]
        self._put(told, "a", factors)
        self._columns(told, "tau", a.dtype.str, tau)

    def _ormqr(self, told: dict[str, Any], a: np.ndarray) -> None:
        q = self._q(a, self._columns(told, "tau", a.dtype.str), told["k"])
        self._put(told, "c", (q if told["trans"] == Operation.N else q.conj().T) @ self._whole(told, "c"))

    def _gels(self, told: dict[str, Any], a: np.ndarray) -> None:
        b = self._whole(told, "b")
        factors, tau = lapack.get_lapack_funcs("geqrf", (a,))(a)[:2]
        b = self._q(factors, tau, told["n"]).conj().T @ b
        top = np.triu(factors)[: told["n"]]
        if (top.diagonal() != 0).all():
            b[: told["n"]] = np.linalg.solve(top, b[: told["n"]])
        self._put(told, "a", factors)
        self._put(told, "b", b)

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

    def _first_fault(self, a: np.ndarray) -> int:
        """The order of the first leading minor that is not positive."""
        for k in range(1, len(a) + 1):
            part = np.tril(a[:k, :k])
            found = lapack.get_lapack_funcs("potrf", (a,))(part, lower=1)[1]
            if found or np.isnan(part).any():
                return k
        return 0

    def _q(self, factors: np.ndarray, tau: np.ndarray, count: int) -> np.ndarray:
        q = np.eye(len(factors), dtype=factors.dtype)
        for j in reversed(range(count)):
            v = np.zeros(len(factors), factors.dtype)
            v[j], v[j + 1 :] = 1, factors[j + 1 :, j]
            q -= tau[j] * np.outer(v, v.conj() @ q)
        return q
