# SPDX-License-Identifier: Apache-2.0
"""Libraries that call MPI, ELPA and ScaLAPACK: found, opened, called. They must be built for the MPI of this process.

If the library's environment variable is set, only the file that it names is tried, or the files in the folder that it
names. Otherwise the first of these is taken: that in this Python's ``lib`` folder, where MKL's wheel is, then those of
Debian and of other distributions, where the loader looks. A second MPI would begin a job of its own, so a library must
name that of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Agreement, Communicator
from ...dtypes import element_type
from ...errors import LibraryNotFoundError, PblasmpError, StatusError, UnsupportedError, install, opened
from ...layout import Grid, MatrixDescriptor

MPICH, OPEN_MPI = "MPICH", "Open MPI"
_FAMILIES = (
    (MPICH, re.compile(r"libmpi(ch)?\.so\.12\b")),  # Intel MPI and MVAPICH have the same binary interface
    (OPEN_MPI, re.compile(r"libmpi\.so\.[2-8]0\b")),
    ("the MPI ABI", re.compile(r"libmpi_abi\.so\.\d")),
)
_MKL = "libmkl_scalapack_lp64.so"
_MKL_BLACS = {MPICH: "blacs_intelmpi_lp64", OPEN_MPI: "blacs_openmpi_lp64"}
_NAME = re.compile(rb"libmpi[\w-]*\.so\.\d+")
_MISSING = re.compile(r"([^\s:/]+): cannot open shared object file")


@dataclass(frozen=True)
class MpiLibrary:
    """A library that calls MPI. Local.

    Attributes:
        name: what it is called.
        environment: the variable that names its file or folder.
        patterns: what its files are called, the best first.
        install: returns what to install for an MPI library of this name.
    """

    name: str
    environment: str
    patterns: tuple[str, ...]
    install: Callable[[str], str]

    def opened(self) -> list[ctypes.CDLL]:
        """Return the libraries that hold it, opened; the first that has a name is meant. Local.

        Raises:
            LibraryNotFoundError: there is none for this process's MPI, or it cannot be opened.
        """
        mpi = _mpi()
        family = _family_of([Path(mpi).name])
        refused: list[str] = []
        for path in self._candidates():
            why = _misfit(path, family)
            if not why:
                ctypes.CDLL(mpi, mode=ctypes.RTLD_GLOBAL)  # mpi4py keeps MPI's names to itself
                with _same_kernels():
                    return _mkl(path, family) if path.name.startswith(_MKL) else [_opened(path)]
            refused.append(f"{path} {why}")
        found = f" Not taken: {'; '.join(refused)}." if refused else ""
        raise LibraryNotFoundError(
            f"no {self.name} for {family} was found.{found} Install {self.install(family)}; or set {self.environment} "
            "to the path of a library"
        )

    def _candidates(self) -> Iterator[Path]:
        """Yield the files that may be the library, the best first."""
        named = os.environ.get(self.environment)
        if named:
            path = Path(named).absolute()
            files = [*self._in(path)] if path.is_dir() else [path] * path.exists()
            if not files:
                raise LibraryNotFoundError(f"no {self.name} at {path}, which {self.environment} names")
            yield from files
            return
        folders = [Path(sys.prefix, "lib")]
        if "MKLROOT" in os.environ:
            folders += [Path(os.environ["MKLROOT"], "lib"), Path(os.environ["MKLROOT"], "lib", "intel64")]
        folders += [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each]
        multiarch = sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu"
        folders += [Path("/usr/lib", multiarch), Path("/usr/lib64"), Path("/usr/local/lib"), Path("/usr/lib")]
        folders += [Path("/usr/lib64", each, "lib") for each in ("mpich", "openmpi")]  # Fedora and its kin
        for folder in dict.fromkeys(folders):
            yield from self._in(folder)

    def _in(self, folder: Path) -> Iterator[Path]:
        """Yield the files in a folder that may be the library, each once."""
        seen = set()
        for pattern in self.patterns:
            for path in sorted(folder.glob(pattern)):
                real = path.resolve()
                if real not in seen and real.is_file():
                    seen.add(real)
                    yield path


def _mpi() -> str:
    """Return the path of the MPI library that mpi4py calls."""
    from mpi4py import MPI

    from ...bindings.c_library import path_of

    return path_of(ctypes.CDLL(MPI.__file__).MPI_Comm_size)


def _family_of(names: list[str]) -> str:
    """Return whose binary interface the libraries of these names have; the first name if that is unknown."""
    for family, pattern in _FAMILIES:
        if any(pattern.match(name) for name in names):
            return family
    return names[0] if names else ""


def _misfit(path: Path, family: str) -> str:
    """Return why a library cannot be called in this process, or an empty string."""
    if path.name.startswith(_MKL):
        blacs = _MKL_BLACS.get(family)
        if blacs and any(path.parent.glob(f"libmkl_{blacs}.so*")):
            return ""
        return f"has no BLACS for {family} beside it"
    try:
        names = [name.decode() for name in _NAME.findall(path.read_bytes())]
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    built_for = _family_of(names)
    return "" if built_for in ("", family) else f"is built for {built_for}"


def _mkl(path: Path, family: str) -> list[ctypes.CDLL]:
    """Return MKL's libraries, which need each other in a circle: so no name may be bound before it is used."""
    layers = "core", "sequential", "intel_lp64", _MKL_BLACS[family]
    files = [next(iter(sorted(path.parent.glob(f"libmkl_{name}.so*"))), None) for name in layers]
    missing = [f"libmkl_{name}.so" for name, file in zip(layers, files, strict=True) if file is None]
    if missing:
        raise LibraryNotFoundError(f"{path} needs {', '.join(missing)} beside it")
    opened = [_load(each, os.RTLD_LAZY | os.RTLD_GLOBAL) for each in (*filter(None, files), path)]
    return opened[::-1]


def _opened(path: Path, helped: frozenset[str] = frozenset()) -> ctypes.CDLL:
    """Return a library; what it needs and the loader does not find, unlike ``helped``, is looked for beside it."""
    try:
        return _load(path, os.RTLD_LAZY)
    except LibraryNotFoundError as error:
        match = _MISSING.search(str(error))
        if match is None or match[1] in helped or not (path.parent / match[1]).exists():
            raise
        helped |= {match[1]}
        _opened(path.parent / match[1], helped)
        return _opened(path, helped)


def _load(path: Path, mode: int) -> ctypes.CDLL:
    """Return a library, opened in this mode: ctypes itself would bind all names at once."""
    dl: Any = ctypes.CDLL(None)
    dl.dlopen.restype, dl.dlerror.restype = ctypes.c_void_p, ctypes.c_char_p
    handle = dl.dlopen(os.fsencode(path), mode)
    if not handle:
        why = os.fsdecode(dl.dlerror() or b"the loader does not say why")
        hint = ": add the folder where that is to LD_LIBRARY_PATH" if _MISSING.search(why) else ""
        raise LibraryNotFoundError(f"{path} cannot be opened: {why}{hint}")
    return ctypes.CDLL(str(path), handle=handle)


@contextlib.contextmanager
def _same_kernels() -> Iterator[None]:
    """Have an OpenBLAS that is loaded meanwhile use the kernels of NumPy's, unless OPENBLAS_CORETYPE says which.

    A distribution's is older. On a processor that it does not know it uses kernels that are several times slower.
    """
    from threadpoolctl import threadpool_info

    name = "OPENBLAS_CORETYPE"
    cores = [each.get("architecture") for each in threadpool_info() if each["internal_api"] == "openblas"]
    if name in os.environ or not (cores and cores[0]):
        yield
        return
    os.environ[name] = cores[0]
    try:
        yield
    finally:
        os.environ.pop(name, None)


def library_of(
    engine: Any, wanted: MpiLibrary, make: Callable[[Communicator, Sequence[ctypes.CDLL]], Any]
) -> Any:
    """Return what ``make`` makes of a library, or why a rank has none; the engine keeps either. Collective."""
    if wanted.name not in engine.mpi_libraries:
        comm: Communicator = engine.transport.comm
        libraries, why = _open(comm, wanted)
        why = next((each for each in comm.allgather(why) if each), "")
        if not why:
            try:
                engine.mpi_libraries[wanted.name] = make(comm, libraries)
                engine.limit_new_library()
            except (LibraryNotFoundError, StatusError, UnsupportedError) as error:  # every rank's
                why = str(error)
        if why:
            engine.mpi_libraries[wanted.name] = why
    return engine.mpi_libraries[wanted.name]


def _open(comm: Communicator, wanted: MpiLibrary) -> tuple[list[ctypes.CDLL], str]:
    """Return the opened libraries, and why there are none. Local."""
    if getattr(comm, "handle", None) is None:
        return [], f"{wanted.name} needs ranks that communicate by MPI"
    found = opened(wanted.name, wanted.opened)
    return ([], str(found)) if isinstance(found, PblasmpError) else (found, "")


class RankLibrary:
    """A library that the ranks of a context call together. Making and closing one is collective over them.

    Args:
        libraries: as ``MpiLibrary.opened`` returns them.
    """

    def __init__(self, comm: Communicator, libraries: Sequence[ctypes.CDLL]) -> None:
        self._comm, self._libraries = comm, libraries

    def _find(self, *names: str) -> Any:
        """Return the first function of these names. Local."""
        for library in self._libraries:
            for name in names:
                if hasattr(library, name):
                    return getattr(library, name)
        raise LibraryNotFoundError(f"{self._libraries[0]._name} has no {names[0]}")

    def close(self) -> None:
        """Free what it holds, unless ranks are gone. Collective."""
        if not self._comm.channel.cause and not self._comm.gone():
            self._free()

    def _free(self) -> None:
        """Free what it holds. Collective."""
        raise NotImplementedError


Array = NDArray[Any]

_API = 20170403  # the oldest that all releases since have
_HANDLES = 8  # that are kept: each has communicators, of which MPI has few
_FAILED = -13  # ELPA_ERROR_DURING_COMPUTATION
# As the names of functions end: since 2021, and before.
_ENDINGS = {
    "f": ("float", "f"),
    "d": ("double", "d"),
    "F": ("float_complex", "fc"),
    "D": ("double_complex", "dc"),
}


def _elpa_install(mpi: str) -> str:
    package = "the package libelpa19 of Debian and Ubuntu, or another of their libelpa"
    return (
        package
        if mpi == OPEN_MPI
        else f"one that is built for {mpi}: ELPA's own sources, or Fedora's package"
    )


ELPA = MpiLibrary("ELPA", "PBLASMP_ELPA_LIBRARY", ("libelpa.so*", "libelpa_openmp.so*"), _elpa_install)
"""ELPA with MPI."""


class Elpa(RankLibrary):
    """ELPA; other contexts may use it, too.

    Attributes:
        single: whether it was built with single precision.
    """

    def __init__(self, comm: Communicator, libraries: Sequence[ctypes.CDLL]) -> None:
        super().__init__(comm, libraries)
        self._handles: dict[tuple[Any, ...], ctypes.c_void_p] = {}  # those used last: a new one takes time
        with Agreement(comm, "ELPA"):
            if self._find("elpa_init")(_API):
                raise UnsupportedError(f"{libraries[0]._name} lacks the interface of {_API}")
            self._find("elpa_allocate").restype = ctypes.c_void_p
        one = MatrixDescriptor((1, 1), (1, 1), Grid(1, comm.size), dtype="float32", order="F")
        self.single = not self.solve(one, np.ones((1, 1), np.float32, "F"), None, 1)[0]

    def solve(self, x: MatrixDescriptor, a: Array, z: Array | None, count: int) -> tuple[int, Array]:
        """Compute eigenvalues, and eigenvectors if there is an array for them. Collective over the context.

        Args:
            x: the layout of A: square blocks, from the first process on.
            a: A's local array, both triangles, in F order without gaps; it is overwritten.
            z: an array like ``a`` for the vectors, or None.
            count: how many are wanted, from the least on.

        Returns:
            0, or an INFO, and the eigenvalues.
        """
        values, error = np.zeros(x.shape[0], a.real.dtype), ctypes.c_int()
        job = "elpa_eigenvalues" if z is None else "elpa_eigenvectors"
        arrays = [each.ctypes.data_as(ctypes.c_void_p) for each in (a, values, z) if each is not None]
        handle = self._handle(x, count)
        with Agreement(self._comm, "ELPA"):
            compute = self._find(*(f"{job}_{ending}" for ending in _ENDINGS[x.dtype.char]))
        with Agreement(self._comm, "ELPA", blocks=True):
            compute(handle, *arrays, ctypes.byref(error))
            _elpa_checked(job, error.value if error.value != _FAILED else 0)
        return -min(self._comm.allgather(error.value)), values

    def _handle(self, x: MatrixDescriptor, count: int) -> ctypes.c_void_p:
        """Return ELPA's handle of a layout and a number of eigenvalues. Collective over the context."""
        key = x.shape, x.block, x.grid, count
        handle = self._handles.pop(key, None)
        if handle is None:
            self._free(_HANDLES - 1)
            handle = self._new_handle(x, count)
        self._handles[key] = handle
        return handle

    def _new_handle(self, x: MatrixDescriptor, count: int) -> ctypes.c_void_p:
        comm, error = self._comm, ctypes.c_int()
        row, col = x.grid.coords(comm.rank)
        rows, cols = x.local_shape(comm.rank)
        numbers = {
            "na": x.shape[0],
            "nev": count,
            "local_nrows": max(1, rows),
            "local_ncols": cols,
            "nblk": x.block[0],
            "mpi_comm_parent": comm.fortran_handle,  # type: ignore[attr-defined]
            "process_row": row,
            "process_col": col,
        }
        with Agreement(comm, "ELPA"):
            handle = ctypes.c_void_p(self._find("elpa_allocate")(ctypes.byref(error)))
            for name, number in numbers.items():
                if not error.value:
                    self._find("elpa_set_integer")(handle, name.encode(), number, ctypes.byref(error))
            _elpa_checked("elpa_set_integer", error.value)
        with Agreement(comm, "ELPA", blocks=True):
            _elpa_checked("elpa_setup", self._find("elpa_setup")(handle))
        return handle

    def _free(self, most: int = 0) -> None:
        """Free the handles that were not used for longest, until there are ``most``. Collective over the context."""
        while len(self._handles) > most:
            handle = self._handles.pop(next(iter(self._handles)))
            self._find("elpa_deallocate")(handle, ctypes.byref(ctypes.c_int()))


def _elpa_checked(what: str, error: int) -> None:
    if error:
        raise StatusError(f"{what}: ELPA's error {error}")


_INT_MAX = 2**31 - 1
_INTEGER = np.dtype(np.int32)
_LETTER = ctypes.c_size_t(1)  # the length of a letter, which compilers of Fortran pass after all arguments


def _scalapack_install(mpi: str) -> str:
    package = "libscalapack-openmpi2.2" if mpi == OPEN_MPI else "libscalapack-mpich2.2"
    return f"MKL's: {install('scalapack')}; or the package {package} of Debian and Ubuntu"


SCALAPACK = MpiLibrary(
    "ScaLAPACK",
    "PBLASMP_SCALAPACK_LIBRARY",
    ("libmkl_scalapack_lp64.so*", "libscalapack*.so*"),
    _scalapack_install,
)
"""ScaLAPACK with its BLACS."""


class Scalapack(RankLibrary):
    """ScaLAPACK."""

    def __init__(self, comm: Communicator, libraries: Sequence[ctypes.CDLL]) -> None:
        super().__init__(comm, libraries)
        self._contexts: dict[Grid, int] = {}
        with Agreement(comm, "ScaLAPACK"):
            handle: Any = comm.handle  # type: ignore[attr-defined]
            make = self._find("Csys2blacs_handle")
            # MPICH's communicators are integers, Open MPI's are addresses.
            make.argtypes = [ctypes.c_int if abs(handle) <= _INT_MAX + 1 else ctypes.c_void_p]
            self._system = int(make(handle))

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

    def _free(self) -> None:
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
