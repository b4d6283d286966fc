# SPDX-License-Identifier: Apache-2.0
"""Calls of a ScaLAPACK program, answered by ``pblasmp.pblas`` on the program's own memory."""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from typing import Any, NoReturn, cast

import numpy as np

from .. import pblas
from ..engines.choice import EngineName
from ..errors import PblasmpError, UnsupportedError
from .source import ROWS

__all__ = ["Server", "begin"]

_BLACS_COMMUNICATOR = 10  # what BLACS_GET calls the communicator of a grid's processes
_INTEGER = np.dtype(np.intc)
_RESULTS = ("dot", "asum", "norm2", "amax", "indx", "info")  # one number each, which the routine writes
_UNUSED = ("work", "iwork")
_DESCRIPTOR_INTEGERS = {1: 9, 2: 11}  # by DTYPE_

_kept: list[Any] = []  # what C calls: ctypes does not keep it


def begin() -> None:
    """Answer calls of the program in this process from now on; mpi4py neither begins nor ends MPI. Local."""
    server = Server()
    serve = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))(server.serve)
    forget = ctypes.CFUNCTYPE(None, ctypes.c_int)(server.forget)
    _kept.extend([serve, forget])
    server.program.pblasmp_preload_begin(serve, forget)


class Server:
    """What answers the calls of a process: pblasmp's grids, by the program's contexts."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.program = MPI, ctypes.CDLL(None)
        self.engine = cast("EngineName", os.environ["PBLASMP_PRELOAD_ENGINE"])
        self.grids: dict[int, int] = {}
        self.names = list(ROWS)

    def serve(self, routine: int, arguments: Any) -> int:
        """Answer a call; return 0 if the program's library is to. Collective over the grid.

        Args:
            routine: its number, counted from 0 in the order of ``ROWS``.
            arguments: their addresses, as Fortran passes them.
        """
        name = self.names[routine]
        try:
            getattr(pblas, name)(*self._values(name, arguments))
        except pblas.ParameterError:
            return 0  # on every process, and nothing was written: the program's library takes it, or ends the job
        except PblasmpError as error:
            self._end(f"{name}: {error}")
        except BaseException:  # noqa: BLE001 - nothing may pass into C
            self._end(f"{name}: {traceback.format_exc()}")
        return 1

    def forget(self, context: int) -> None:
        """Close what pblasmp has on a grid. Collective over the grid.

        Args:
            context: the program's, -1 for all of its grids.
        """
        try:
            for each in list(self.grids) if context < 0 else [context]:
                if (number := self.grids.pop(each, -1)) != -1:
                    pblas.gridexit(number)
        except BaseException:  # noqa: BLE001 - nothing may pass into C
            self._end(traceback.format_exc())

    def _values(self, name: str, arguments: Any) -> list[Any]:
        """Return the arguments as ``pblasmp.pblas`` takes them."""
        row = ROWS[name]
        real = np.empty(0, row.dtype).real.dtype
        addresses = {each: arguments[i] or 0 for i, each in enumerate(row.arguments)}
        values: dict[str, Any] = {}
        for each, address in addresses.items():
            if each in ("side", "uplo", "diag") or each.startswith("trans"):
                values[each] = ctypes.string_at(address, 1).decode("latin-1")
            elif each in ("alpha", "beta"):
                values[each] = _memory(address, 1, real if each in row.real else row.dtype)[0].item()
            elif each in _RESULTS:
                dtype = (
                    real if each in ("asum", "norm2") else _INTEGER if each in ("indx", "info") else row.dtype
                )
                values[each] = _memory(address, 1, dtype)
            elif each.startswith("desc"):
                kind_of = ctypes.c_int.from_address(address).value
                integers = ctypes.c_int * (9 if row.of_c else _DESCRIPTOR_INTEGERS.get(kind_of, 9))
                values[each] = list(integers.from_address(address))
                values[each][1] = self._grid_of(values[each][1])
                if (
                    row.of_c
                ):  # ScaLAPACK does not read DTYPE_ here, and takes 0 for LLD_ where there is no element
                    values[each][0], values[each][-1] = 1, max(1, values[each][-1])
            elif each not in (*row.matrices, *row.beside, *_UNUSED):
                number = ctypes.c_int.from_address(address).value
                values[each] = self._grid_of(number) if each == "ictxt" else number
        for each in row.matrices:
            values[each] = _local(addresses[each], values[f"desc{each}"], row.dtype)
        for each, axis in row.beside.items():
            dtype = _INTEGER if each == "ipiv" else row.dtype
            values[each] = _beside(addresses[each], values["desca"], axis, dtype)
        return [values.get(each) for each in row.arguments]

    def _grid_of(self, context: int) -> int:
        """Return pblasmp's context for the program's, -1 without one. Collective over the grid, the first time."""
        if context in self.grids:
            return self.grids[context]
        MPI, reference = self.mpi, ctypes.byref
        if not MPI.Is_initialized():
            raise UnsupportedError(
                f"the program's MPI library is not that of mpi4py ({MPI.Get_library_version().splitlines()[0]}): "
                "install mpi4py for the program's (pip install --no-binary mpi4py mpi4py)"
            )
        shape = [ctypes.c_int(-1) for _ in range(4)]
        self.program.Cblacs_gridinfo(context, *map(reference, shape))
        nprow, npcol = shape[0].value, shape[1].value
        if nprow < 1:
            return -1
        number, what, handle = ctypes.c_int(context), ctypes.c_int(_BLACS_COMMUNICATOR), ctypes.c_int()
        self.program.blacs_get_(reference(number), reference(what), reference(handle))
        comm = MPI.Comm.f2py(handle.value)  # its processes are in the order of the grid's, row after row
        self.grids[context] = pblas.gridinit(comm, "Row", nprow, npcol, engine=self.engine)
        return self.grids[context]

    def _end(self, message: str) -> NoReturn:
        """Say why, and end the job."""
        sys.stderr.write(f"pblasmp preload: {message}\n")
        sys.stderr.flush()
        if self.mpi.Is_initialized() and not self.mpi.Is_finalized():
            self.mpi.COMM_WORLD.Abort(1)
        os._exit(1)


def _local(address: int, desc: list[int], dtype: np.dtype) -> np.ndarray:
    """Return the program's local array, column after column, over its memory."""
    return _memory(address, max(0, desc[-1]) * _extent(desc, 1), dtype)


def _beside(address: int, desc: list[int], axis: int, dtype: np.dtype) -> np.ndarray:
    """Return the array of one element for each local row or column of A, over the program's memory.

    TAU may be shorter than the columns: no more than its elements are read or written.
    """
    return _memory(address, _extent(desc, axis), dtype)


def _extent(desc: list[int], axis: int) -> int:
    """Return the local rows or columns; 0 if the descriptor is illegal, which pblasmp finds."""
    shape, here = pblas.gridinfo(desc[1])[:2], pblas.gridinfo(desc[1])[2:]
    n, block, first = desc[2 + axis], desc[-5 + axis], desc[-3 + axis]
    legal = n > 0 and block > 0 and 0 <= first < shape[axis]
    return pblas.numroc(n, block, here[axis], first, shape[axis]) if legal else 0


def _memory(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Return the program's memory as an array."""
    if not (count and address):
        return np.empty(0, dtype)
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)
