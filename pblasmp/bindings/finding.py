# SPDX-License-Identifier: Apache-2.0
"""Finding and opening libcublasmp.so.0 and the libraries it needs.

If the environment variable ``PBLASMP_CUBLASMP`` is set, only that path is tried. Otherwise the first of
these that opens is used: what ``cuda.pathfinder`` finds, the file of an installed nvidia-cublasmp wheel, what
the system's loader finds. What cuBLASMp needs is found by the loader (the wheels point at one another),
or else through ``cuda.pathfinder``, by its own name.
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

__all__ = ["ENVIRONMENT", "TOO_OLD", "open_library", "path_of"]

ENVIRONMENT = "PBLASMP_CUBLASMP"
TOO_OLD = (
    "cuBLASMp 0.4 and older are not supported: they communicate through CAL, not NCCL."
    f" Install a newer one: {install('cu13')}"
)

_FILE = "libcublasmp.so.0"
_PATHFINDER_NAMES = {
    "libcublas": "cublas",
    "libcublasLt": "cublasLt",
    "libnccl": "nccl",
    "libnvshmem_host": "nvshmem_host",
}


class _Failure(NamedTuple):
    """Why a library did not open: the file that the loader did not find, if that was the reason, and the error."""

    missing: str
    error: Exception


def open_library(path: str | None = None) -> ctypes.CDLL:
    """Return cuBLASMp, opened with all it needs. Local.

    Args:
        path: The library's file, or the folder that holds it; None searches as this module says.

    Raises:
        LibraryNotFoundError: The library, the driver or a library it needs is missing.
        UnsupportedError: What was found is cuBLASMp 0.4 or older.
    """
    failures = []
    for opener in _openers(path):
        result = _open(opener)
        if isinstance(result, ctypes.CDLL):
            return result
        failures.append(result)
    # The failure of a library that was found says more than that of one that was not.
    raise _explanation(next((failure for failure in failures if failure.missing != _FILE), failures[-1]))


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


def _openers(path: str | None) -> Iterator[Callable[[], ctypes.CDLL]]:
    """Yield functions that try to open cuBLASMp, in order; each raises OSError or RuntimeError if it cannot."""
    chosen = path or os.environ.get(ENVIRONMENT)
    if chosen:
        file = Path(chosen).absolute()
        if file.is_dir():
            file /= _FILE
        if not file.exists():
            raise LibraryNotFoundError(
                f"no cuBLASMp at {file}" + ("" if path else f", which {ENVIRONMENT} names")
            )
        yield partial(ctypes.CDLL, str(file))
        return
    yield partial(_pathfinder, "cublasmp")
    import importlib.metadata

    for cuda in ("cu13", "cu12"):
        try:
            wheel = importlib.metadata.distribution(f"nvidia-cublasmp-{cuda}")
        except importlib.metadata.PackageNotFoundError:
            continue
        yield partial(ctypes.CDLL, str(wheel.locate_file(f"nvidia/cublasmp/{cuda}/lib/{_FILE}")))
    yield partial(ctypes.CDLL, _FILE)


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


def _explanation(failure: _Failure) -> PblasmpError:
    missing, error = failure
    cuda = "cu12" if missing.endswith(".12") else "cu13"
    if missing.startswith("libcal.so"):
        return UnsupportedError(TOO_OLD)
    if missing == _FILE:
        advice = (
            f"cuBLASMp ({_FILE}) was not found. Install it: {install('cu13')}"
            f" (cu12 for CUDA 12), or set {ENVIRONMENT} to its path"
        )
    elif missing.startswith("libcuda.so"):
        advice = f"cuBLASMp needs an NVIDIA GPU with its driver; {missing} of the driver was not found"
    elif missing:
        advice = f"cuBLASMp needs {missing}, which was not found. Install it: {install(cuda)}"
    else:
        advice = "cuBLASMp was found but cannot be opened"
    return LibraryNotFoundError(f"{advice} ({error})")
