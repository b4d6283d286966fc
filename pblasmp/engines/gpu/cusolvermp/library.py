# SPDX-License-Identifier: Apache-2.0
"""Cusolvermp: cuSOLVERMp in a context: its handle, grids and calls. It is optional, and opened when first asked for."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

import numpy as np

from ....bindings import GridMapping, SolverLibrary, version_text
from ....errors import LibraryNotFoundError, PblasmpError, StatusError
from ....layout import Grid, MatrixDescriptor
from ..session import Session
from ..types import DATA_TYPES

__all__ = ["Cusolvermp", "open_library", "solver_of"]

Array = Any


def open_library() -> SolverLibrary | PblasmpError:
    """Return cuSOLVERMp, opened, or why it cannot be used here. Local."""
    try:
        return SolverLibrary()
    except PblasmpError as error:
        return error
    except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it, whatever it is
        return LibraryNotFoundError(f"cuSOLVERMp cannot be used: {type(error).__name__}: {error}")


def solver_of(session: Session) -> Cusolvermp | str:
    """Return cuSOLVERMp, or why a rank has none; the session keeps either. Collective over the context."""
    if session.solver is None:
        library = open_library()
        faults = session.runtime.comm.allgather(str(library) if isinstance(library, PblasmpError) else "")
        why = next((fault for fault in faults if fault), "")
        session.solver = why
        if not why and not isinstance(library, PblasmpError):
            session.solver = Cusolvermp(session, library)
            session.close_first(session.solver.close)
    found: Cusolvermp | str = session.solver
    return found


class Cusolvermp:
    """cuSOLVERMp on one GPU of a context. Making and closing one is collective over the context.

    Args:
        session: what it shares with the other parts of the engine.
        library: cuSOLVERMp, opened.

    Attributes:
        c: the functions of the library.
    """

    def __init__(self, session: Session, library: SolverLibrary) -> None:
        self.c, self._session, self.runtime = library, session, session.runtime
        self._grids: dict[Grid, int] = {}
        runtime, handle = session.runtime, ctypes.c_void_p()
        with ExitStack() as self._closing:
            with runtime.agreement("cuSOLVERMp") as facts:
                device = runtime.device.index
                runtime.follow_stream()
                library.cusolverMpCreate(ctypes.byref(handle), device, runtime.stream.ptr)
                self._closing.callback(library.cusolverMpDestroy, handle.value)
                assert handle.value is not None
                library.check_version(handle.value)
                facts["cuSOLVERMp"] = version_text(library.version)
                self._info = runtime.cupy.zeros(1, np.int32)
            self._closing = self._closing.pop_all()
        self.handle: int = handle.value
        runtime.followers.append(lambda stream: library.cusolverMpSetStream(self.handle, stream.ptr))

    def grid(self, grid: Grid) -> int:
        """Return cuSOLVERMp's handle of a grid over all ranks. Collective the first time."""
        if grid not in self._grids:
            nccl, handle = self._session.nccl.communicator(grid.size), ctypes.c_void_p()
            mapping = GridMapping.ROW_MAJOR if grid.order == "row" else GridMapping.COL_MAJOR
            with self.runtime.agreement("cuSOLVERMp: grid", blocks=True):
                self.c.cusolverMpCreateDeviceGrid(
                    self.handle, ctypes.byref(handle), nccl, grid.nprow, grid.npcol, mapping
                )
                assert handle.value is not None
                self._closing.callback(self.c.cusolverMpDestroyGrid, handle.value)
            self._grids[grid] = handle.value
        return self._grids[grid]

    def descriptor(self, x: MatrixDescriptor, array: Array, closing: ExitStack) -> int:
        """Return cuSOLVERMp's descriptor of a local array, until ``closing`` is closed. Local."""
        out = ctypes.c_void_p()
        self.c.cusolverMpCreateMatrixDesc(
            ctypes.byref(out), self._grids[x.grid], DATA_TYPES[x.dtype.name], *x.shape, *x.block, 0, 0,
            leading(array),
        )  # fmt: skip
        assert out.value is not None
        closing.callback(self.c.cusolverMpDestroyMatrixDesc, out.value)
        return out.value

    def address(self, array: Array, operand: int = 0) -> int:
        """Return the device address of an array; for an empty one, one that is never written to. Local."""
        return self._session.cublasmp.address(array, operand)

    def call(
        self, routine: str, dtype: np.dtype, shared: tuple[Any, ...], after: tuple[Any, ...] = ()
    ) -> int:
        """Call a routine on the current stream, wait for it, and return INFO. Collective over the context.

        Args:
            routine: the function's name without its prefix.
            dtype: the type it computes in.
            shared: C's arguments between the handle and the type.
            after: what comes between these and the type, but not in the query of the workspace.

        Returns:
            0, or the least positive INFO of all ranks.
        """
        runtime, compute = self.runtime, DATA_TYPES[dtype.name]
        what = f"cusolverMp{routine}"
        with runtime.agreement(what):
            runtime.follow_stream()
            device, host = ctypes.c_size_t(), ctypes.c_size_t()
            query = getattr(self.c, f"{what}_bufferSize")
            query(self.handle, *shared, compute, ctypes.byref(device), ctypes.byref(host))
            work = runtime.cupy.empty(max(1, device.value), np.uint8)
            memory = np.empty(max(1, host.value), np.uint8)
            self._info[...] = 0
        with runtime.agreement(what, blocks=True):
            function = self.c.raw(what)
            status = function(
                self.handle, *shared, *after, compute,
                work.data.ptr, device.value, memory.ctypes.data, host.value, self._info.data.ptr,
            )  # fmt: skip
            runtime.wait(runtime.stream)
            info = int(runtime.cupy.asnumpy(self._info)[0])
            if info < 0 or (status and not info):  # potrf returns INTERNAL_ERROR if INFO is positive
                raise self.c.failure(what, status) if status else StatusError(f"{what}: INFO is {info}")
        infos = runtime.comm.allgather(info)
        return min((each for each in infos if each), default=0)

    def close(self) -> None:
        """Free grids and the handle, last made first. Collective."""
        self._closing.close()


def leading(array: Array) -> int:
    """Return the leading dimension of an array in F order; for a single column, any legal one. Local."""
    if array.size == 0 or array.shape[1] == 1:
        return max(1, int(array.shape[0]))
    return int(array.strides[1] // array.itemsize)
