# SPDX-License-Identifier: Apache-2.0
"""Finding and opening libraries that call MPI: they must be built for the MPI library of this process.

If the library's environment variable is set, only the file that it names is tried, or the files in the folder that it
names. Otherwise the first of these is taken: that in this Python's ``lib`` folder, where MKL's wheel is, then those of
Debian and of other distributions, where the loader looks. A second MPI would begin a job of its own, so a library must
name that of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...comm import Communicator
from ...errors import LibraryNotFoundError, PblasmpError, StatusError, UnsupportedError

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
            if not path.exists():
                raise LibraryNotFoundError(f"no {self.name} at {path}, which {self.environment} names")
            yield from self._in(path) if path.is_dir() else [path]
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
        raise LibraryNotFoundError(os.fsdecode(dl.dlerror() or b"cannot open the library: ") or str(path))
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
    try:
        return wanted.opened(), ""
    except PblasmpError as error:
        return [], str(error)
    except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it, whatever it is
        return [], f"{wanted.name} cannot be used: {type(error).__name__}: {error}"
