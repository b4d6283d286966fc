# SPDX-License-Identifier: Apache-2.0
"""Calls of a ScaLAPACK program, answered by ``pblasmp.pblas`` on the program's own memory."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import sys
import time
import traceback
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from .. import pblas
from ..bindings.c_library import path_of
from ..comm import world_ranks
from ..dtypes import real_dtype
from ..engines.choose import EngineName
from ..errors import PblasmpError
from .c_source import ROWS, Row

_BLACS_COMMUNICATOR = 10  # what BLACS_GET calls the communicator of a grid's processes
_INTEGER = np.dtype(np.intc)
_REAL = ("asum", "norm2")
_DESCRIPTOR_INTEGERS = {1: 9, 2: 11}  # by DTYPE_
_KNOWN = 4096  # descriptors

_FIRST = 4096  # no address of memory is less
_memory: Any = (ctypes.c_char * (sys.maxsize - _FIRST)).from_address(_FIRST)  # the process's
_read_integer = struct.Struct("=i").unpack_from

_kept: list[Any] = []  # what C calls: ctypes does not keep it


def begin() -> None:
    """Answer calls of the program in this process from now on; mpi4py neither begins nor ends MPI. Local."""
    if fault := _mpi_fault():
        _say(fault)
        os._exit(1)
    server = Server()
    serve = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_long))(server.serve)
    forget = ctypes.CFUNCTYPE(None, ctypes.c_int)(server.forget)
    _kept.extend([serve, forget])
    server.program.pblasmp_preload_begin(serve, forget)


def _mpi_fault() -> str:
    """Return what keeps mpi4py from using the program's MPI; an empty string if nothing does.

    mpi4py is not imported for that: with two MPI libraries in a process, it already calls the wrong one. The names with
    PMPI are the library's own, while tools that watch a program replace the others.
    """
    found = find_spec("mpi4py.MPI")
    assert found is not None
    assert found.origin is not None
    try:
        theirs, ours = (Path(path_of(ctypes.CDLL(name).PMPI_Init)) for name in (None, found.origin))
        if theirs.samefile(ours):
            return ""
        libraries = f"{ours}, while the program has {theirs}"
    except (
        OSError,
        AttributeError,
    ) as error:  # a library is not found, or the program's functions cannot be seen
        libraries = str(error)
    return (
        f"the program's MPI library is not that of mpi4py ({libraries}): install mpi4py for the program's "
        "(pip install --no-binary mpi4py mpi4py)"
    )


def _say(message: str) -> None:
    sys.stderr.write(f"pblasmp preload: {message}\n")
    sys.stderr.flush()


class _Places(NamedTuple):
    """How the arguments of a routine are read.

    Attributes:
        function: ``pblasmp.pblas``'s.
        row: the routine.
        places: by kind, the places of arguments, with a scalar's format, a result's type, the place of an array's
            descriptor, or what an array beside A has: the place of A's descriptor, the axis that it follows, its type.
    """

    function: Any
    row: Row
    places: dict[str, list[tuple[int, Any]]]

    @classmethod
    def of(cls, name: str, row: Row) -> _Places:
        """Return the form of a routine. Local."""
        form = cls(getattr(pblas, name), row, defaultdict(list))
        real = real_dtype(row.dtype)
        at = {each: i for i, each in enumerate(row.arguments)}
        for each, i in at.items():
            kind, how = row.kind(each), cast("Any", None)
            if kind == "scalar":
                parts = 1 if each in row.real or row.dtype.kind != "c" else 2
                how = struct.Struct("=" + parts * real.char)
            elif kind == "result":
                how = _INTEGER if each in ("indx", "info") else real if each in _REAL else row.dtype
            elif kind == "array":
                how = at[f"desc{each}"]
            elif kind == "beside":
                how = at["desca"], row.beside[each], _INTEGER if each == "ipiv" else row.dtype
            form.places["context" if each == "ictxt" else kind].append((i, how))
        return form


class Server:
    """What answers the calls of a process: pblasmp's grids, by the program's contexts."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.program = MPI, ctypes.CDLL(None)
        self.engine = cast("EngineName", os.environ["PBLASMP_PRELOAD_ENGINE"])
        self.grids: dict[int, int] = {}
        self._shared: dict[Any, int] = {}  # pblasmp's contexts, by processes and shape
        self._closed: set[Any] = set()  # those of these that have been closed before
        self._frozen = False  # what the garbage collector need not look through
        self.names = list(ROWS)
        self._forms: dict[int, _Places] = {}
        self._known: dict[Any, tuple[list[int], int, int, int]] = {}  # what ``_descriptor`` returns

    def serve(self, routine: int, arguments: Any) -> int:
        """Answer a call; return 0 if the program's library is to. Collective over the grid.

        The routine is counted from 0 in the order of ``ROWS``; arguments are letters and integers as values, and
        addresses.
        """
        form = self._forms.get(routine)
        name = self.names[routine]
        try:
            if form is None:
                form = self._forms[routine] = _Places.of(name, ROWS[name])
            form.function(*self._values(form, arguments[: len(form.row.arguments)]))
        except pblas.ParameterError:
            return 0  # on every process, and nothing was written: the program's library takes it, or ends the job
        except PblasmpError as error:
            self._end(f"{name}: {error}")
        except BaseException:  # noqa: BLE001 - nothing may pass into C
            self._end(f"{name}: {traceback.format_exc()}")
        return 1

    def forget(self, context: int) -> None:
        """Close what pblasmp has on a grid, unless such grids are made again and again. Collective over the grid.

        The context is the program's, -1 for all of its grids.
        """
        self._known.clear()  # another grid may get the number
        try:
            freed = {self.grids.pop(each, -1) for each in (list(self.grids) if context < 0 else [context])}
            for key, number in list(self._shared.items()):
                unused = number in freed and number not in self.grids.values()
                if context < 0 or (unused and key not in self._closed):
                    del self._shared[key]
                    if type(key[-1]) is tuple:  # else another grid may get the key
                        self._closed.add(key)
                    pblas.gridexit(number)
        except BaseException:  # noqa: BLE001 - nothing may pass into C
            self._end(traceback.format_exc())

    def _values(self, form: _Places, values: list[Any]) -> list[Any]:
        """Return the arguments as ``pblasmp.pblas`` takes them, in the place of what C has passed."""
        places, dtype, counts = form.places, form.row.dtype, {}
        for i, _ in places["letter"]:
            values[i] = chr(values[i])
        for i, _ in places["context"]:
            values[i] = self._grid_of(values[i])
        for i, _ in places["unused"]:
            values[i] = None
        for i, numbers in places["scalar"]:
            found = numbers.unpack_from(_memory, values[i] - _FIRST)
            values[i] = complex(*found) if len(found) == 2 else found[0]
        for i, kind in places["result"]:
            values[i] = _array(values[i], 1, kind)
        for i, _ in places["descriptor"]:
            values[i], *counts[i] = self._descriptor(values[i], of_c=form.row.of_c)
        for i, of in places["array"]:
            values[i] = _array(values[i], counts[of][2], dtype)
        for i, (of, axis, kind) in places["beside"]:
            values[i] = _array(values[i], counts[of][axis], kind)
        return values

    def _descriptor(self, address: int, *, of_c: bool) -> tuple[list[int], int, int, int]:
        """Return a descriptor with pblasmp's context; rows, columns and elements of its local array.

        Collective over the grid, the first time.
        """
        integers = 9 if of_c else _DESCRIPTOR_INTEGERS.get(_read_integer(_memory, address - _FIRST)[0], 9)
        key = of_c, _memory[address - _FIRST : address - _FIRST + 4 * integers]
        found = self._known.get(key)
        if found is None:
            desc = list(struct.unpack(f"={integers}i", key[1]))
            desc[1] = self._grid_of(desc[1])
            if of_c:  # ScaLAPACK does not read DTYPE_ here, and takes 0 for LLD_ where there is no element
                desc[0], desc[-1] = 1, max(1, desc[-1])
            rows, cols = _extent(desc, 0), _extent(desc, 1)
            found = desc, rows, cols, max(0, desc[-1]) * cols
            if desc[1] != -1:  # else there may be a grid later
                if len(self._known) >= _KNOWN:
                    self._known.clear()
                self._known[key] = found
        return found

    def _grid_of(self, context: int) -> int:
        """Return pblasmp's context for the program's, -1 without one. Collective over the grid, the first time.

        Grids of the same processes and shape share one, and its communicators, of which MPI has few: programs make
        grids in a loop and free none. When the last of them is freed, theirs is closed the first time, and kept
        afterwards: ScaLAPACK's eigensolvers make and free grids in every call.
        """
        if context in self.grids:
            return self.grids[context]
        MPI, reference = self.mpi, ctypes.byref
        shape = [ctypes.c_int(-1) for _ in range(4)]
        self.program.Cblacs_gridinfo(context, *map(reference, shape))
        nprow, npcol = shape[0].value, shape[1].value
        if nprow < 1:
            return -1
        number, what, handle = ctypes.c_int(context), ctypes.c_int(_BLACS_COMMUNICATOR), ctypes.c_int()
        self.program.blacs_get_(reference(number), reference(what), reference(handle))
        since = time.perf_counter_ns()
        comm = MPI.Comm.f2py(handle.value)  # its processes are in the order of the grid's, row after row
        ranks = world_ranks(comm)
        key = nprow, npcol, ranks if MPI.UNDEFINED not in ranks else context
        if key not in self._shared:
            self._shared[key] = pblas.gridinit(comm, "Row", nprow, npcol, engine=self.engine)
            if not self._frozen:  # by now all has been imported, and stays: to look through it takes 10 ms
                gc.freeze()
                self._frozen = True
        self.grids[context] = self._shared[key]
        self.program.pblasmp_preload_grid(ctypes.c_long(time.perf_counter_ns() - since))
        return self.grids[context]

    def _end(self, message: str) -> NoReturn:
        """Say why, and end the job."""
        _say(message)
        if self.mpi.Is_initialized() and not self.mpi.Is_finalized():
            self.mpi.COMM_WORLD.Abort(1)
        os._exit(1)


def _extent(desc: list[int], axis: int) -> int:
    """Return the local rows or columns; 0 if the descriptor is illegal, which pblasmp finds."""
    info = pblas.gridinfo(desc[1])
    nprocs, mine = info[axis], info[2 + axis]
    n, block, first = desc[2 + axis], desc[-5 + axis], desc[-3 + axis]
    legal = n > 0 and block > 0 and 0 <= first < nprocs
    return pblas.numroc(n, block, mine, first, nprocs) if legal else 0


def _array(address: int | None, count: int, dtype: np.dtype) -> np.ndarray:
    """Return the program's memory as an array.

    TAU may be shorter than the columns of its matrix: no more than its elements are read or written.
    """
    return np.ndarray(count, dtype, _memory, address - _FIRST) if count and address else np.empty(0, dtype)
