# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ELPA's shared object: its functions in Python, which compute on one rank and are as strict as ELPA."""

from __future__ import annotations

import ctypes
import tracemalloc
from typing import Any

import numpy as np

import pblasmp as pb

_TYPES = {"float": "f", "f": "f", "double": "d", "d": "d", "float_complex": "F", "fc": "F",
          "double_complex": "D", "dc": "D"}  # fmt: skip
_NAMES = {"na", "nev", "local_nrows", "local_ncols", "nblk", "mpi_comm_parent", "process_row", "process_col"}


class FakeElpa:
    """What ``ctypes.CDLL`` returns of ELPA.

    Args:
        old: whether it has the names of functions from before 2021.
        single: whether it was built with single precision; Debian's was not.
        fails: what fails, as ELPA reports that: "elpa_init", "elpa_setup", "elpa_set_integer" or "compute".
        spoils: whether its eigenvectors are wrong.

    Attributes:
        memory: bytes of arrays of the process at most, until it was called, if tracemalloc counts them.
        largest: the largest element of the last matrix.
        handles: what has been set, by handle; nothing of those that are freed.
    """

    _name = "libelpa.so"
    memory, largest = 0, 0.0

    def __init__(self, *, old: bool = False, single: bool = True, fails: str = "", spoils: bool = False):
        self.handles: dict[int, dict[str, int]] = {}
        self.fails, self.spoils, self._single = fails, spoils, single
        # Functions of their own: ctypes's have attributes that can be set.
        self.elpa_init = lambda api: -8 * (fails == "elpa_init" or api > 20170403)
        self.elpa_allocate = lambda error: self._allocate(error._obj)
        for ending in (
            ("f", "d", "fc", "dc") if old else ("float", "double", "float_complex", "double_complex")
        ):
            self._add(ending)

    def _add(self, ending: str) -> None:
        dtype = np.dtype(_TYPES[ending])
        setattr(self, f"elpa_eigenvectors_{ending}",
                lambda handle, a, w, z, error: self._compute(handle, dtype, a, w, z, error._obj))  # fmt: skip
        setattr(self, f"elpa_eigenvalues_{ending}",
                lambda handle, a, w, error: self._compute(handle, dtype, a, w, None, error._obj))  # fmt: skip

    def _allocate(self, error: Any) -> int:
        error.value = 0
        number = len(self.handles) + 1
        self.handles[number] = {}
        return number

    def elpa_set_integer(self, handle: Any, name: bytes, value: int, error: Any) -> None:
        known = name.decode() in _NAMES and self.fails != "elpa_set_integer"
        self.handles[handle.value][name.decode()] = value
        error._obj.value = 0 if known else -2

    def elpa_setup(self, handle: Any) -> int:
        return -6 if self.fails == "elpa_setup" else 0

    def elpa_deallocate(self, handle: Any, error: Any) -> None:
        self.handles[handle.value].clear()
        error._obj.value = 0

    def _compute(self, handle: Any, dtype: Any, a: Any, w: Any, z: Any, error: Any) -> None:
        from mpi4py import MPI

        set_ = self.handles[handle.value]
        assert set(set_) == _NAMES, set_
        comm, n = MPI.Comm.f2py(set_["mpi_comm_parent"]), set_["na"]
        empty = min(set_["local_nrows"], set_["local_ncols"]) == 0 < n - 1
        shape = set_["local_nrows"], set_["local_ncols"]
        mine = _array(a, shape, dtype)
        self.memory = tracemalloc.get_traced_memory()[1]  # the most until it is called
        told = comm.allgather((set_["process_row"], set_["process_col"], mine.copy(), empty))
        error.value = 0
        if (
            any(each[3] for each in told)
            or (dtype.char in "fF" and not self._single)
            or self.fails == "compute"
        ):
            error.value = -13
            return
        block = set_["nblk"]
        places = [
            [
                np.flatnonzero(np.arange(n) // block % (1 + max(each[i] for each in told)) == each[i])
                for i in (0, 1)
            ]
            for each in told
        ]
        whole = np.zeros((n, n), dtype)
        for (rows, cols), (*_, part, _) in zip(places, told, strict=True):
            whole[np.ix_(rows, cols)] = part[: len(rows)]
        assert np.array_equal(whole, whole.conj().T), "ELPA reads both triangles"
        size = max(abs(whole.real).max(), abs(whole.imag).max())
        self.largest = size
        wrong = 0 < size < 1  # as ELPA's results of small elements are
        values, vectors = np.linalg.eigh(np.zeros_like(whole) if wrong else whole)
        mine[...] = np.nan  # it is overwritten
        _array(w, (n,), np.dtype(dtype.char.lower()))[: set_["nev"]] = values[: set_["nev"]]
        if z is not None:
            vectors[:, set_["nev"] :] = np.nan
            rows, cols = places[comm.rank]
            _array(z, shape, dtype)[: len(rows)] = vectors[np.ix_(rows, cols)] * (1 + self.spoils)


def _array(at: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = (ctypes.c_byte * count).from_address(at.value) if count else bytearray()
    return np.frombuffer(raw, dtype).reshape(shape, order="F")


def opened(**how: Any) -> Any:
    """Return what takes the place of ``MpiLibrary.opened``: ELPA is this stand-in, other libraries are not there."""

    def open_(self: Any) -> list[Any]:
        if self.name == "ELPA":
            return [FakeElpa(**how)]
        raise pb.LibraryNotFoundError(f"no {self.name} here")

    return open_
