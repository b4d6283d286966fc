# SPDX-License-Identifier: Apache-2.0
"""Finding and opening libcublasmp.so.0 and libcusolverMp.so.0, and the libraries they need.

If the environment variable ``PBLASMP_CUBLASMP`` (``PBLASMP_CUSOLVERMP``) is set, only that path is tried. Otherwise the
first of these that opens is used: what ``cuda.pathfinder`` finds, the file of an installed wheel, what the system's
loader finds. What the library needs is found by the loader (the wheels point at one another), or else through
``cuda.pathfinder``, by its own name.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LibraryNotFoundError, PblasmpError, UnsupportedError
from ..extras import install

__all__ = ["CUBLASMP", "CUSOLVERMP", "ENVIRONMENT", "TOO_OLD", "LibraryPlace", "open_library", "path_of"]

ENVIRONMENT = "PBLASMP_CUBLASMP"
TOO_OLD = (
    "cuBLASMp 0.4 and older are not supported: they communicate through CAL, not NCCL."
    f" Install a newer one: {install('cu13')}"
)

_PATHFINDER_NAMES = {
    "libcublas": "cublas",
    "libcublasLt": "cublasLt",
    "libcublasmp": "cublasmp",
    "libcudart": "cudart",
    "libcusolver": "cusolver",
    "libcusparse": "cusparse",
    "libnccl": "nccl",
    "libnvshmem_host": "nvshmem_host",
}


class LibraryPlace(NamedTuple):
    """Where one library is looked for.

    Attributes:
        title: what people call the library.
        file: its name.
        environment: the variable that names its path.
        pathfinder: its name to ``cuda.pathfinder``.
        wheel: the distribution that has it, and its folder there, for a CUDA version.
        extras: the extras that install it for CUDA 13 and 12.
    """

    title: str
    file: str
    environment: str
    pathfinder: str
    wheel: tuple[str, str]
    extras: dict[str, str]


CUBLASMP = LibraryPlace(
    "cuBLASMp",
    "libcublasmp.so.0",
    ENVIRONMENT,
    "cublasmp",
    ("nvidia-cublasmp-{cuda}", "nvidia/cublasmp/{cuda}/lib"),
    {"cu13": "cu13", "cu12": "cu12"},
)
CUSOLVERMP = LibraryPlace(
    "cuSOLVERMp",
    "libcusolverMp.so.0",
    "PBLASMP_CUSOLVERMP",
    "cusolverMp",
    ("nvidia-cusolvermp-{cuda}", "nvidia/{cuda}/lib"),
    {"cu13": "solver", "cu12": "solver-cu12"},
)


class _Failure(NamedTuple):
    """Why a library did not open: the file that the loader did not find, if that was the reason, and the error."""

    missing: str
    error: Exception


def open_library(place: LibraryPlace, path: str | None = None) -> ctypes.CDLL:
    """Return a library, opened with all it needs. Local.

    Args:
        place: which one.
        path: The library's file, or the folder that holds it; None searches as this module says.

    Raises:
        LibraryNotFoundError: The library, the driver or a library it needs is missing.
        UnsupportedError: What was found is cuBLASMp 0.4 or older.
    """
    failures = []
    for opener in _openers(place, path):
        result = _open(opener)
        if isinstance(result, ctypes.CDLL):
            return result
        failures.append(result)
    # The failure of a library that was found says more than that of one that was not.
    said = (failure for failure in failures if failure.missing != place.file)
    raise _explanation(place, next(said, failures[-1]))


def path_of(function: object) -> str:
    """Return the path of the library that holds the ctypes function ``function``. Local."""

    class Info(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        )

    info = Info()
    address: Any = function
    ctypes.CDLL(None).dladdr(ctypes.cast(address, ctypes.c_void_p), ctypes.byref(info))
    return os.fsdecode(info.file)


def _openers(place: LibraryPlace, path: str | None) -> Iterator[Callable[[], ctypes.CDLL]]:
    """Yield functions that try to open the library, in order; each raises OSError or RuntimeError if it cannot."""
    chosen = path or os.environ.get(place.environment)
    if chosen:
        file = Path(chosen).absolute()
        if file.is_dir():
            file /= place.file
        if not file.exists():
            raise LibraryNotFoundError(
                f"no {place.title} at {file}" + ("" if path else f", which {place.environment} names")
            )
        yield partial(ctypes.CDLL, str(file))
        return
    yield partial(_pathfinder, place.pathfinder)
    import importlib.metadata

    for cuda in ("cu13", "cu12"):
        try:
            wheel = importlib.metadata.distribution(place.wheel[0].format(cuda=cuda))
        except importlib.metadata.PackageNotFoundError:
            continue
        folder = wheel.locate_file(place.wheel[1].format(cuda=cuda))
        yield partial(ctypes.CDLL, f"{folder}/{place.file}")
    yield partial(ctypes.CDLL, place.file)


def _pathfinder(name: str) -> ctypes.CDLL:
    """Open a library through cuda.pathfinder, under its name there."""
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as error:
        raise OSError(f"lib{name}.so.0: not found, cuda.pathfinder is not installed") from error
    try:
        return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)
    except DynamicLibNotFoundError as error:
        raise OSError(f"lib{name}.so.0: not found by cuda.pathfinder: {error}") from error


def _open(opener: Callable[[], ctypes.CDLL]) -> ctypes.CDLL | _Failure:
    """Open a library; load missing libraries it needs one by one, until it opens or one cannot be loaded."""
    # nccl4py's NCCL, before the loader finds another one: there must be only one.
    _attempt(partial(_pathfinder, "nccl"))
    helped: set[str] = set()
    while isinstance(result := _attempt(opener), Exception):
        match = re.search(r"([^\s:]+): (?:cannot open shared object file|not found)", str(result))
        missing = Path(match[1]).name if match else ""
        name = _PATHFINDER_NAMES.get(missing.partition(".so")[0])
        if name is None or missing in helped or isinstance(_attempt(partial(_pathfinder, name)), Exception):
            return _Failure(missing, result)
        helped.add(missing)
    return result


def _attempt(opener: Callable[[], ctypes.CDLL]) -> ctypes.CDLL | Exception:
    try:
        return opener()
    except (OSError, RuntimeError) as error:
        return error


def _explanation(place: LibraryPlace, failure: _Failure) -> PblasmpError:
    (missing, error), title = failure, place.title
    extra = place.extras["cu12" if missing.endswith(".12") else "cu13"]
    if missing.startswith("libcal.so") and place is CUBLASMP:
        return UnsupportedError(TOO_OLD)
    if missing == place.file:
        advice = (
            f"{title} ({missing}) was not found. Install it: {install(place.extras['cu13'])}"
            f" ({place.extras['cu12']} for CUDA 12), or set {place.environment} to its path"
        )
    elif missing.startswith("libcuda.so"):
        advice = f"{title} needs an NVIDIA GPU with its driver; {missing} of the driver was not found"
    elif missing:
        advice = f"{title} needs {missing}, which was not found. Install it: {install(extra)}"
    else:
        advice = f"{title} was found but cannot be opened"
    return LibraryNotFoundError(f"{advice} ({error})")
