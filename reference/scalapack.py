# SPDX-License-Identifier: Apache-2.0
"""The real ScaLAPACK through ctypes: a referee for the tests and a contender in the benchmarks.

``"mkl"`` is the one in Intel's wheel (``pip install --no-deps mkl``), ``"debian"`` the one that Debian and
Ubuntu build for MPICH. ``python -m benchmarks.fetch_scalapack`` puts both into :func:`cache`. Local arrays are
Fortran-ordered; the indices of sub-matrices start at 1, as ScaLAPACK's do.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pblasmp.errors import LibraryNotFoundError

Flavor = Literal["mkl", "debian"]

_NEEDED = {"mkl": "libmkl_scalapack_lp64.so*", "debian": "libscalapack-mpich.so*"}
_LETTER = dict(zip(map(np.dtype, ("float32", "float64", "complex64", "complex128")), "sdcz", strict=True))


PATIENT = {
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "64",
}
"""Variables with which MPICH leaves the core while it waits: polling, it would take those of ranks that compute."""


def cache() -> Path:
    """Return the directory for what is downloaded: $PBLASMP_CACHE, else ~/.cache/pblasmp."""
    return Path(os.environ.get("PBLASMP_CACHE") or Path.home() / ".cache" / "pblasmp")


def locate(flavor: Flavor) -> Path | None:
    """Return the directory that holds this ScaLAPACK: the environment's or the cache's; None without one."""
    places = [cache() / flavor] if flavor == "debian" else [Path(sys.prefix, "lib"), cache() / flavor]
    return next((place for place in places if list(place.glob(_NEEDED[flavor]))), None)


class ScaLAPACK:
    """ScaLAPACK and its BLACS, loaded into this process and bound to an mpi4py communicator.

    One flavor per process: both define the same symbols. Illegal arguments abort the job.

    Raises:
        LibraryNotFoundError: this flavor is not installed, or it cannot work with this process's MPI.
    """

    def __init__(self, flavor: Flavor, comm: Any) -> None:
        from mpi4py import MPI

        self.flavor, self.comm = flavor, comm
        directory = locate(flavor)
        if directory is None:
            raise LibraryNotFoundError(
                f"no ScaLAPACK ({flavor}): python -m benchmarks.fetch_scalapack fetches it"
            )
        openmpi = "Open MPI" in MPI.Get_library_version()
        if openmpi and flavor == "debian":
            raise LibraryNotFoundError("ScaLAPACK (debian) is built for MPICH, this process runs Open MPI")
        # mpi4py keeps MPI's symbols to itself, and BLACS does not say which MPI it wants.
        ctypes.CDLL(_mapped("libmpi"), mode=ctypes.RTLD_GLOBAL)
        if flavor == "mkl":
            blacs = "blacs_openmpi" if openmpi else "blacs_intelmpi"
            names = ["core", "sequential", "intel_lp64", f"{blacs}_lp64", "scalapack_lp64"]
            libraries = [_load(directory, f"libmkl_{name}.so*") for name in names]
        else:
            _same_kernels()
            names = ["libmpich", "libquadmath", "libgfortran", "libopenblas", "libblas", "liblapack"]
            libraries = [_load(directory, f"{name}.so*") for name in [*names, "libscalapack-mpich"]]
        self._libraries = libraries[::-1]
        handle = self._find("Csys2blacs_handle")
        handle.argtypes = [ctypes.c_void_p if openmpi else ctypes.c_int]
        self._system = handle(MPI._handleof(comm))

    @property
    def path(self) -> str:
        """The shared object that has ScaLAPACK, and with Debian's also BLACS."""
        return self._libraries[0]._name

    @property
    def kernels(self) -> str:
        """The processor for which its OpenBLAS has chosen kernels; empty with another BLAS."""
        if self.flavor != "debian":
            return ""
        name = self._find("openblas_get_corename")
        name.restype = ctypes.c_char_p
        found: bytes = name()
        return found.decode()

    def _find(self, name: str) -> Any:
        return next(getattr(library, name) for library in self._libraries if hasattr(library, name))

    @property
    def logical_block(self) -> int:
        """The block that PBLAS works in, whatever the matrices' blocks are; debian only, 32 as shipped."""
        return int(self._logical_block().value)

    @logical_block.setter
    def logical_block(self, block: int) -> None:
        self._logical_block().value = block

    def _logical_block(self) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self._libraries[-1], "logical_block")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a Fortran routine: str and int arguments go by reference, arrays by their address."""
        self.prepare(name, *arguments)()

    def prepare(self, name: str, *arguments: Any) -> Callable[[], None]:
        """Return ``call`` with these arguments, made beforehand."""
        function, references = self._find(name), [_reference(argument) for argument in arguments]

        def call() -> None:
            function(*references)

        return call

    def function(self, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        """Return what a Fortran function returns, by default an integer; arguments as in ``call``."""
        found = self._find(name)
        found.restype = result
        return found(*[_reference(argument) for argument in arguments])

    def gridinfo(self, context: int, out: np.ndarray) -> None:
        """Write the grid's rows and columns, and this process's, into four integers (int32)."""
        self._find("Cblacs_gridinfo")(context, *(_reference(out[i : i + 1]) for i in range(4)))

    def grid(self, nprow: int, npcol: int, order: str = "row") -> int:
        """Make a process grid and return its BLACS context, -1 outside it. Collective over the communicator."""
        context = ctypes.c_int(self._system)
        self._find("Cblacs_gridinit")(ctypes.byref(context), order[0].upper().encode(), nprow, npcol)
        return context.value

    def gridexit(self, context: int) -> None:
        """Free a process grid. Collective over the grid."""
        self._find("Cblacs_gridexit")(context)

    def descriptor(
        self, context: int, shape: tuple[int, int], block: tuple[int, int], source: tuple[int, int], lld: int
    ) -> np.ndarray:
        """Return the nine integers that describe a distributed matrix, as descinit makes them."""
        desc, info = np.empty(9, np.int32), np.zeros(1, np.int32)
        self.call("descinit_", desc, *shape, *block, *source, context, lld, info)
        if info[0]:
            raise ValueError(f"descinit: argument {-info[0]} is illegal: {shape}, {block}, {source}, {lld}")
        return desc

    def gemm(
        self, op_a: str, op_b: str, m: int, n: int, k: int,
        alpha: complex, a: np.ndarray, desc_a: np.ndarray, b: np.ndarray, desc_b: np.ndarray,
        beta: complex, c: np.ndarray, desc_c: np.ndarray,
        at: tuple[tuple[int, int], tuple[int, int], tuple[int, int]] = ((1, 1), (1, 1), (1, 1)),
    ) -> None:  # fmt: skip
        """C = alpha op(A) op(B) + beta C in place of the local array c. Collective over the grid.

        Args:
            op_a: N, T or C; op_b likewise.
            m: rows of op(A) and C; n columns of op(B) and C; k columns of op(A).
            alpha: scalar; beta likewise.
            a: local array, Fortran order, of s, d, c or z; b and c likewise.
            desc_a: its descriptor; desc_b and desc_c likewise.
            at: row and column, from 1, where the sub-matrices of A, B and C begin.
        """
        x, y = np.array([alpha]).astype(c.dtype), np.array([beta]).astype(c.dtype)
        self.call(
            f"p{_LETTER[c.dtype]}gemm_", op_a, op_b, m, n, k,
            x, a, *at[0], desc_a, b, *at[1], desc_b, y, c, *at[2], desc_c,
        )  # fmt: skip


def _same_kernels() -> None:
    """Have an OpenBLAS that is loaded from now on use the kernels of NumPy's, unless OPENBLAS_CORETYPE says which.

    Debian's is older. On a processor that it does not know it uses kernels that are several times slower.
    """
    from threadpoolctl import threadpool_info

    cores = [each.get("architecture") for each in threadpool_info() if each["internal_api"] == "openblas"]
    if cores and cores[0]:
        os.environ.setdefault("OPENBLAS_CORETYPE", cores[0])


def _mapped(name: str) -> str:
    """Return the path of the one library of this name that this process has loaded."""
    maps = Path("/proc/self/maps").read_text().split()
    found = {path for path in maps if path.startswith("/") and Path(path).name.startswith(f"{name}.so")}
    if len(found) != 1:
        raise LibraryNotFoundError(f"expected one {name} in this process, found {sorted(found) or 'none'}")
    return found.pop()


def _load(directory: Path, pattern: str) -> ctypes.CDLL:
    """Load a library globally and lazily: MKL's need each other in a circle, CDLL would bind at once."""
    path = os.fsencode(min(directory.glob(pattern)))
    dl = ctypes.CDLL(None)
    dl.dlopen.restype, dl.dlerror.restype = ctypes.c_void_p, ctypes.c_char_p
    handle = dl.dlopen(path, os.RTLD_LAZY | os.RTLD_GLOBAL)
    if not handle:
        raise LibraryNotFoundError(os.fsdecode(dl.dlerror() or path))
    return ctypes.CDLL(os.fsdecode(path), handle=handle)


def _reference(argument: Any) -> Any:
    if isinstance(argument, str):
        return ctypes.c_char_p(argument.encode())
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data_as(ctypes.c_void_p)  # which keeps the array
    return ctypes.byref(ctypes.c_int(argument))
