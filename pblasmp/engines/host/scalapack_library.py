# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK on the ranks of a context."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Agreement, Communicator
from ...dtypes import element_type
from ...errors import LibraryNotFoundError, StatusError, UnsupportedError
from ...extras import install
from ...layout import Grid, MatrixDescriptor
from .mpi_libraries import OPEN_MPI, MpiLibrary, library_of

Array = NDArray[Any]

_INT_MAX = 2**31 - 1
_INTEGER = np.dtype(np.int32)
_LETTER = ctypes.c_size_t(1)  # the length of a letter, which compilers of Fortran pass after all arguments


def _install(mpi: str) -> str:
    package = "libscalapack-openmpi2.2" if mpi == OPEN_MPI else "libscalapack-mpich2.2"
    return f"MKL's: {install('scalapack')}; or the package {package} of Debian and Ubuntu"


SCALAPACK = MpiLibrary(
    "ScaLAPACK", "PBLASMP_SCALAPACK_LIBRARY", ("libmkl_scalapack_lp64.so*", "libscalapack*.so*"), _install
)
"""ScaLAPACK with its BLACS."""


def scalapack_of(engine: Any) -> Scalapack | str:
    """Return ScaLAPACK, or why a rank has none. Collective over the context."""
    found: Scalapack | str = library_of(engine, SCALAPACK, Scalapack)
    return found


class Scalapack:
    """ScaLAPACK on the ranks of a context. Making and closing one is collective over them.

    Args:
        comm: the ranks.
        libraries: as ``SCALAPACK.opened`` returns them.
    """

    def __init__(self, comm: Communicator, libraries: Sequence[ctypes.CDLL]) -> None:
        self._comm, self._libraries = comm, libraries
        self._contexts: dict[Grid, int] = {}
        with Agreement(comm, "ScaLAPACK"):
            handle: Any = comm.handle  # type: ignore[attr-defined]
            make = self._find("Csys2blacs_handle")
            # MPICH's communicators are integers, Open MPI's are addresses.
            make.argtypes = [ctypes.c_int if abs(handle) <= _INT_MAX + 1 else ctypes.c_void_p]
            self._system = int(make(handle))

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise LibraryNotFoundError(f"{self._libraries[0]._name} has no {name}")

    def grid(self, grid: Grid) -> int:
        """Return the BLACS context of a grid over all ranks. Collective the first time."""
        if grid not in self._contexts:
            context = ctypes.c_int(self._system)
            with Agreement(self._comm, "ScaLAPACK: grid", blocks=True):
                order = grid.order[0].upper().encode()
                self._find("Cblacs_gridinit")(ctypes.byref(context), order, grid.nprow, grid.npcol)
            self._contexts[grid] = context.value
        return self._contexts[grid]

    def operand(self, x: MatrixDescriptor, array: Array) -> tuple[Any, ...]:
        """Return Fortran's four arguments for a whole matrix whose local array is in F order. Local."""
        ld = max(
            1, array.strides[1] // array.itemsize if array.shape[1] > 1 and array.size else array.shape[0]
        )
        numbers = [1, self._contexts[x.grid], *x.shape, *x.block, 0, 0, ld]
        return array, 1, 1, np.array(numbers, _INTEGER)

    def call(
        self,
        name: str,
        dtype: np.dtype,
        shared: tuple[Any, ...],
        works: Sequence[np.dtype | Array],
        why: str,
        more: int = 0,
    ) -> int:
        """Call a routine with workspaces as large as it asks for, and return INFO. Collective over the context.

        Args:
            name: the routine's without P and the letter of the type.
            dtype: the type it computes in.
            shared: its arguments up to the first workspace: letters as texts, numbers, arrays.
            works: the types of its workspaces, each with a size; an array is passed as it is.
            why: what is computed, for errors.
            more: elements by which the first workspace is larger than the routine asks for.

        Returns:
            0, or the least positive INFO of all ranks.
        """
        full = f"p{element_type(dtype).blas}{name}"
        comm = self._comm
        with Agreement(comm, why):
            function = self._find(f"{full}_")
            asked = [each if isinstance(each, np.ndarray) else np.zeros(2, each) for each in works]
        with Agreement(comm, why, blocks=True):
            _checked(full, _run(function, shared, asked, works, ask=True))
        with Agreement(comm, why):
            spaces = [
                each
                if isinstance(each, np.ndarray)
                else np.empty(_size(full, found[0], 0 if i else more), each)
                for i, (each, found) in enumerate(zip(works, asked, strict=True))
            ]
        with Agreement(comm, why, blocks=True):
            info = _run(function, shared, spaces, works, ask=False)
            _checked(full, min(info, 0))
        return min((each for each in comm.allgather(info) if each), default=0)

    def close(self) -> None:
        """Free the grids, unless ranks are gone. Collective."""
        if self._comm.channel.cause or self._comm.gone():
            return
        for context in reversed(self._contexts.values()):
            self._find("Cblacs_gridexit")(context)
        self._contexts.clear()
        self._find("Cfree_blacs_system_handle")(self._system)


def _size(full: str, asked: Any, more: int) -> int:
    """Return how many elements a workspace must have, by ``more`` than asked for. Local.

    Single precision rounds the numbers of large ones.
    """
    size = max(1, math.ceil(float(np.real(asked)) * (1 + float(np.finfo(np.float32).eps)))) + more
    if size > _INT_MAX:
        raise UnsupportedError(
            f"{full} needs a workspace of {size} elements on a rank, more than ScaLAPACK's 32-bit integers count: "
            "take more ranks"
        )
    return size


def _run(
    function: Callable[..., Any],
    shared: tuple[Any, ...],
    spaces: Sequence[Array],
    works: Sequence[np.dtype | Array],
    *,
    ask: bool,
) -> int:
    """Call a routine, or ask it for the sizes of its workspaces, and return INFO. Local."""
    info = ctypes.c_int(0)
    arguments = [_reference(each) for each in shared]
    for space, work in zip(spaces, works, strict=True):
        arguments.append(_reference(space))
        if not isinstance(work, np.ndarray):
            arguments.append(ctypes.byref(ctypes.c_int(-1 if ask else space.size)))
    lengths = [_LETTER for each in shared if isinstance(each, str)]
    function(*arguments, ctypes.byref(info), *lengths)
    return info.value


def _reference(argument: Any) -> Any:
    if isinstance(argument, str):
        return ctypes.c_char_p(argument.encode())
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data_as(ctypes.c_void_p)  # which keeps the array
    return ctypes.byref(ctypes.c_int(argument))


def _checked(full: str, info: int) -> None:
    if info:
        raise StatusError(f"{full}: INFO is {info}")
