# SPDX-License-Identifier: Apache-2.0
"""The local BLAS through C pointers: SciPy's by default, MKL's if PBLASMP_BLAS=mkl asks for it.

NumPy's own product cannot add to its output or write into a sub-matrix without a temporary; BLAS can.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import element_type
from ...errors import LibraryNotFoundError, required
from ..arrays import blas_operand, scale, trsm_words

with required("CPU ranks", "run"):
    from threadpoolctl import threadpool_info

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

_INT_MAX = 2**31 - 1
_POINTERS = {  # of functions that Python calls
    "gemm": 13, "trsm": 11, "potrf": 5, "getrf": 6, "laswp": 7, "geqrt": 9, "geqrt3": 7, "larft": 9, "gemqrt": 14,
}  # fmt: skip
_LAPACK = {
    "potrf", "potrs", "potri", "getrf", "getrs", "getri", "trtrs", "trtri", "laswp",
    "gels", "geqrf", "orgqr", "ungqr", "ormqr", "unmqr", "geqrt", "geqrt3", "larft", "gemqrt",
}  # fmt: skip


_WITH_SMALL_KERNELS = "SkylakeX", "Cooperlake", "SapphireRapids"


def library_name() -> str:
    """Return which local BLAS is requested: "scipy" or "mkl" (environment variable PBLASMP_BLAS). Local."""
    name = os.environ.get("PBLASMP_BLAS", "scipy").lower()
    if name not in ("scipy", "mkl"):
        raise LibraryNotFoundError(f"PBLASMP_BLAS: expected 'scipy' or 'mkl', got {name!r}")
    return name


@functools.cache
def described(library: str) -> str:
    """Return the local BLAS in words: "scipy's openblas 0.3.29 Haswell"; or just its name if unknown. Local."""
    found = [each for each in threadpool_info() if each.get("user_api") == "blas"]
    if library == "mkl":
        mine = [each for each in found if each.get("internal_api") == "mkl"]
    else:
        with required("CPU ranks", "run"):
            import scipy

        folder = Path(scipy.__path__[0])
        beside = folder, folder.parent / "scipy.libs"  # where SciPy's wheels have it
        mine = [each for each in found if Path(each.get("filepath", "")).parent in beside] or found
    words = {
        " ".join(str(each[name]) for name in ("internal_api", "version", "architecture") if each.get(name))
        for each in mine
    }
    return f"{library}'s {' and '.join(sorted(words))}" if words else library


def has_small_kernels(library: str) -> bool:
    """Return whether the local BLAS multiplies small real matrices without copying them: OpenBLAS by AVX-512. Local."""
    found = described(library)
    return "openblas" in found and any(name in found for name in _WITH_SMALL_KERNELS)


@functools.cache
def load(library: str, letter: str, routine: str = "gemm") -> Callable[..., Any]:
    """Return a Fortran routine of a local BLAS or of its LAPACK as a C function of pointers. Local.

    Raises:
        LibraryNotFoundError: MKL was requested and is not installed, or takes integers of 64 bits.
    """
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * _POINTERS[routine])
    return prototype(address(library, letter, routine))


@functools.cache
def address(library: str, letter: str, routine: str) -> int:
    """Return where a Fortran routine of a local BLAS or of its LAPACK is; raises as ``load`` does. Local."""
    if library == "mkl":
        function = getattr(_mkl(), f"{letter}{routine}_")
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    capsule = _cython("lapack" if routine in _LAPACK else "blas").__pyx_capi__[f"{letter}{routine}"]
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get_pointer(capsule, get_name(capsule)))


def _cython(library: str) -> ModuleType:
    """Import SciPy's cython_blas or cython_lapack without the rest of ``scipy.linalg``, which takes far longer."""
    with required("CPU ranks", "run"):
        import scipy

    name = f"scipy.linalg.cython_{library}"
    spec = None if name in sys.modules else PathFinder.find_spec(name, [f"{scipy.__path__[0]}/linalg"])
    if spec is None or spec.loader is None:
        return import_module(name)
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@functools.cache
def _mkl() -> ctypes.CDLL:
    layer = os.environ.setdefault("MKL_INTERFACE_LAYER", "LP64")
    if "ILP64" in layer.upper():  # other users of MKL in this process may need it
        raise LibraryNotFoundError(
            f"PBLASMP_BLAS=mkl, but MKL_INTERFACE_LAYER={layer} makes MKL read integers of 64 bits, and pblasmp passes "
            "32: set it to LP64, or leave PBLASMP_BLAS out"
        )
    folders = [
        Path(sys.prefix) / "lib",
        *(Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p),
    ]
    for folder in folders:
        for path in sorted(folder.glob("libmkl_rt.so*")):
            has_openmp = any(folder.glob("libiomp5.so"))
            os.environ.setdefault("MKL_THREADING_LAYER", "INTEL" if has_openmp else "SEQUENTIAL")
            return ctypes.CDLL(str(path))
    raise LibraryNotFoundError("PBLASMP_BLAS=mkl, but libmkl_rt.so was not found: pip install mkl")


def gemm(
    library: str, alpha: complex, a: NDArray[Any], b: NDArray[Any], beta: complex, d: NDArray[Any]
) -> None:
    """Compute ``d = alpha a b + beta d`` in place on 2D arrays with one contiguous dimension each. Local.

    With ``beta == 0``, ``d`` is written and never read.

    Args:
        a, b, d: m × k, k × n, m × n of one type: float32, float64, complex64 or complex128. Extents may exceed BLAS's
            32-bit integers: the product is then computed in parts.

    Source: BLAS, ?GEMM.
    """
    flag, ldd = blas_operand(d)
    if flag == "T":  # d is in C order: compute its transpose
        a, b, d = b.T, a.T, d.T
    (m, n), k = d.shape, a.shape[1]
    if m == 0 or n == 0:
        return
    if k == 0:  # the memory order of empty arrays is unknown
        scale(d, beta)
        return
    (trans_a, lda), (trans_b, ldb) = blas_operand(a), blas_operand(b)
    apart = [("n", ldd), ("k" if trans_a == "N" else "m", lda), ("n" if trans_b == "N" else "k", ldb)]
    along = _too_large({"m": m, "n": n, "k": k}, apart)
    if along == "k":
        gemm(library, alpha, a[:, : k // 2], b[: k // 2], beta, d)
        gemm(library, alpha, a[:, k // 2 :], b[k // 2 :], 1, d)
        return
    if along:
        for half in _halves({"m": m, "n": n}[along]):
            rows, cols = (half, slice(None)) if along == "m" else (slice(None), half)
            gemm(library, alpha, a[rows], b[:, cols], beta, d[rows, cols])
        return
    load(library, element_type(d.dtype).blas)(
        trans_a.encode(), trans_b.encode(), _integer(m), _integer(n), _integer(k),
        _number(alpha, d), a.ctypes.data, _integer(lda), b.ctypes.data, _integer(ldb),
        _number(beta, d), d.ctypes.data, _integer(ldd),
    )  # fmt: skip


def trsm(library: str, alpha: complex, a: NDArray[Any], b: NDArray[Any], *, lower: bool, unit: bool) -> None:
    """Replace ``b`` by the X that solves ``a X = alpha b`` for a triangular ``a``. Local.

    Args:
        a, b: n × n and n × m of one type with one contiguous dimension each.
        lower: which triangle of ``a`` is read.
        unit: the diagonal of ``a`` is taken as ones and not read.

    Source: BLAS, ?TRSM.
    """
    side, uplo, trans, m, n, lda, ldb = trsm_words(a, b, lower=lower)
    if m == 0 or n == 0:
        return
    if max(m, n, lda, ldb) > _INT_MAX:
        _solve_in_parts(library, alpha, a, b, lower=lower, unit=unit)
        return
    load(library, element_type(b.dtype).blas, "trsm")(
        side.encode(), uplo.encode(), trans.encode(), b"U" if unit else b"N",
        _integer(m), _integer(n), _number(alpha, b), a.ctypes.data, _integer(lda), b.ctypes.data, _integer(ldb),
    )  # fmt: skip


def _integer(n: int) -> bytes:
    """Return an INTEGER of Fortran."""
    return n.to_bytes(4, sys.byteorder, signed=True)


def _number(x: complex, like: NDArray[Any]) -> bytes:
    """Return a number of an array's type."""
    return np.array(x, like.dtype).tobytes()


def _too_large(extents: dict[str, int], apart: list[tuple[str, int]]) -> str:
    """Return the dimension to halve since BLAS's integers cannot hold an extent or a leading dimension, or "".

    Args:
        extents: m, n and k.
        apart: leading dimensions, each after the dimension whose elements are so far apart.
    """
    large = [name for name, extent in extents.items() if extent > _INT_MAX]
    large += [name for name, ld in apart if ld > _INT_MAX and extents[name] > 1]
    return large[0] if large else ""


def _halves(extent: int) -> tuple[slice, slice]:
    return slice(0, extent // 2), slice(extent // 2, extent)


def _solve_in_parts(
    library: str, alpha: complex, a: NDArray[Any], b: NDArray[Any], *, lower: bool, unit: bool
) -> None:
    """Solve for half of the right-hand sides at a time, or on copies whose leading dimensions are small."""
    if b.shape[1] > 1 and (b.shape[1] > _INT_MAX or blas_operand(b)[1] > _INT_MAX):
        for half in _halves(b.shape[1]):
            trsm(library, alpha, a, b[:, half], lower=lower, unit=unit)
        return
    close_a, close_b = np.array(a, order="F"), np.array(b, order="F")
    trsm(library, alpha, close_a, close_b, lower=lower, unit=unit)
    b[...] = close_b


Array = NDArray[Any]


def _lapack(library: str, name: str, *given: Any, has_info: bool = True) -> int:
    """Call a routine of LAPACK, and return INFO, 0 if it has none. Local.

    Args:
        name: the routine's, without the letter of its type, which is that of the last matrix.
        *given: its arguments before INFO: letters, integers, vectors without gaps, and matrices in F order, each for
            its address and its leading dimension.
        has_info: whether INFO follows them.
    """
    pointers: list[Any] = []
    for x in given:
        if isinstance(x, np.ndarray) and x.ndim == 2:
            (rows, cols), kind = x.shape, x.dtype
            assert x.strides[0] == x.itemsize or rows <= 1, "expected contiguous columns"
            apart = max(1, rows, x.strides[1] // x.itemsize if cols > 1 else 1)
            pointers += x.ctypes.data, _integer(apart)
        elif isinstance(x, np.ndarray):
            pointers.append(x.ctypes.data)
        else:
            pointers.append(x if isinstance(x, bytes) else _integer(x))
    info = ctypes.c_int(0)
    pointers += [ctypes.byref(info)] * has_info
    load(library, element_type(kind).blas, name)(*pointers)
    return info.value


def potrf(library: str, a: Array, *, lower: bool) -> int:
    """Replace a triangle of ``a`` by its Cholesky factor. Local.

    Returns:
        0, or i if the leading minor of order i is not positive definite; then the columns before it are factored.

    Source: LAPACK, ?POTRF.
    """
    return _lapack(library, "potrf", b"L" if lower else b"U", len(a), a) if a.size else 0


def getrf(library: str, a: Array, pivots: NDArray[np.int32]) -> int:
    """Replace ``a`` by its LU factors with partial pivoting. Local.

    Args:
        a: m × n.
        pivots: min(m, n) integers to write: row i was exchanged with row ``pivots[i]``, both counted from 1.

    Returns:
        0, or i if U[i-1, i-1], the first such, is exactly zero.

    Source: LAPACK, ?GETRF.
    """
    return _lapack(library, "getrf", *a.shape, a, pivots) if a.size else 0


def legal_pivots(pivots: NDArray[np.int32], rows: int) -> None:
    """Make pivots rows of a matrix, from 1 to ``rows``: a BLAS may find no largest element among NaN. Local."""
    np.maximum(pivots, 1, out=pivots)
    np.minimum(pivots, rows, out=pivots)  # faster than np.clip


def laswp(
    library: str, a: Array, first: int, last: int, pivots: NDArray[np.int32], *, back: bool = False
) -> None:
    """Exchange rows ``first`` to ``last`` (half-open, from 0) of ``a`` with those in ``pivots`` (from 1). Local.

    ``pivots[i]`` belongs to row i. With ``back`` in reverse order, which undoes it.

    Source: LAPACK, ?LASWP.
    """
    if a.size and first < last:
        step = -1 if back else 1
        _lapack(library, "laswp", a.shape[1], a, first + 1, last, pivots, step, has_info=False)


def geqrt(library: str, a: Array, t: Array) -> None:
    """Replace ``a`` by R and the Householder vectors, and write the Ts of their block reflectors to ``t``. Local.

    Args:
        a: m × n.
        t: w × min(m, n): the Ts of w columns each, side by side; the factors of the reflectors are their diagonals.

    Source: LAPACK, ?GEQRT; ?GEQRT3 for a single T.
    """
    if not a.size:
        return
    (rows, cols), width = a.shape, len(t)
    if width == cols <= rows:
        _lapack(library, "geqrt3", rows, cols, a, t)
    else:
        work = np.empty(width * cols, a.dtype)
        _lapack(library, "geqrt", rows, cols, min(width, rows, cols), a, t, work)


def gemqrt(library: str, v: Array, t: Array, x: Array, work: Array, *, adjoint: bool) -> None:
    """Replace ``x`` by Q x, or by the product with the adjoint of Q. Local.

    Args:
        v: m × k with the Householder vectors below its diagonal; the rest is not read.
        t: w × k, as ``geqrt`` has written it.
        x: m × n.
        work: as many elements as n × w, which are overwritten.
        adjoint: multiply by the adjoint.

    Source: LAPACK, ?GEMQRT.
    """
    if x.size and v.size:
        trans = b"N" if not adjoint else b"C" if x.dtype.kind == "c" else b"T"
        count = v.shape[1]
        _lapack(
            library,
            "gemqrt",
            b"L",
            trans,
            *x.shape,
            count,
            min(count, len(t)),
            v,
            t,
            x,
            work.reshape(-1, order="F"),
        )


def larft(library: str, v: Array, tau: Array, t: Array) -> None:
    """Write the upper triangle T of a block reflector I - V T V^H to ``t``; the rest of ``t`` keeps its values. Local.

    Args:
        v: m × k with the Householder vectors below its diagonal; the rest is not read.
        tau: their k factors.
        t: k × k.

    Source: LAPACK, ?LARFT, forward and by columns.
    """
    if v.size:
        _lapack(library, "larft", b"F", b"C", *v.shape, v, tau, t, has_info=False)


# -- how many threads it uses in each call: engines limit it

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def threads_set_by_user() -> set[str]:
    """Return what environment variables already say of how many threads BLAS uses; empty if none does. Local."""
    return {value for name in THREAD_VARIABLES if (value := os.environ.get(name))}


_limits: dict[ThreadLimit, int] = {}
"""Those that are set."""

_before: dict[str, tuple[Any, int]] = {}
"""The limited libraries by file, and how many threads each had before the first limit."""


# The engines are the parent's. What the libraries had before is known: a context of the child restores it.
os.register_at_fork(after_in_child=_limits.clear)


class ThreadLimit:
    """One engine's limit. The first one that is set saves what was there, the last one that is lifted restores it.

    Every method is local, and may be called again.

    Args:
        library: the local BLAS, which is loaded.
    """

    def __init__(self, threads: int, library: str) -> None:
        self._threads, self._library = threads, library

    @property
    def is_set(self) -> bool:
        """Whether it counts."""
        return self in _limits

    def set(self) -> None:
        """Limit the libraries that are loaded now."""
        for each in _thread_pools(len(sys.modules), self._library).lib_controllers:
            if each.user_api == "blas":
                _before.setdefault(each.filepath, (each, each.num_threads))
        _limits[self] = self._threads
        _apply()

    @staticmethod
    def look_again() -> None:
        """Have the next ``set`` find libraries that have been loaded without a module of Python."""
        _thread_pools.cache_clear()

    def lift(self) -> None:
        """Let the limits of other engines count, or give BLAS the threads back that it had."""
        if _limits.pop(self, None) is not None:
            _apply()


def _apply() -> None:
    for library, before in list(_before.values()):
        # Read anew each time: the garbage collector may lift a limit meanwhile.
        library.set_num_threads(min(_limits.values(), default=before))
    if not _limits:
        _before.clear()


@functools.lru_cache(1)
def _thread_pools(modules: int, library: str) -> ThreadpoolController:  # noqa: ARG001
    """Return what limits the threads of loaded libraries, looked for again if there may be more of them. Local."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
