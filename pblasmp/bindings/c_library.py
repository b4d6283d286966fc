# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp and cuSOLVERMp, opened: their functions as Python callables that check the status."""

from __future__ import annotations

import ctypes
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LibraryNotFoundError, PblasmpError, StatusError, UnsupportedError, install
from .enums import SolverStatus, Status
from .table import FUNCTIONS, OLDEST, OLDEST_SOLVER, SOLVER_FUNCTIONS, Function, ctype

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


def version_text(version: int) -> str:
    """Return a version number as people write it: 901 is 0.9.1, 1000 is 0.10.0. Local."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class CLibrary(ABC):
    """A library, one to one with C: each function of its table is an attribute that takes C's arguments.

    Handles, pointers and enumerations go in as ints, or as ctypes objects; ``ctypes.byref`` is for what C
    writes and None is NULL. Indices are 1-based and nothing has a default. A call returns None, or what C
    returns if that is not a status. A function has its newest name whatever the version.

    Attributes:
        place: where it is looked for, and what it is called.
        functions: its table.
        version: The number that the library gives: 1000 is 0.10.0.
        path: The file that was opened.

    Raises:
        LibraryNotFoundError: The library, the driver or a library it needs is missing.
        UnsupportedError: The library is too old; also, from an attribute, it lacks that function.
        StatusError: From a call, C returned another status than success.
    """

    place: LibraryPlace
    functions: Mapping[str, Function]
    version: int
    path: str
    _statuses: type[IntEnum]
    _returns: str
    _prefix: str

    def __init__(self, path: str | None = None) -> None:
        self._cdll = open_library(self.place, path)
        self._find_version()

    @abstractmethod
    def _find_version(self) -> None:
        """Set version and path, or raise."""

    def _exported(self, name: str) -> Any:
        """Return a function that every version of the library has."""
        try:
            return getattr(self._cdll, name)
        except AttributeError:
            raise LibraryNotFoundError(
                f"{self._cdll._name} is not {self.place.title}: it has no {name}"
            ) from None

    def __repr__(self) -> str:
        return f"<{self.place.title} {version_text(self.version)} at {self.path}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.functions:
            raise AttributeError(f"{self.place.title} has no function {name!r}")
        raw = self.raw(name)

        def checked(*arguments: Any) -> None:
            status = raw(*arguments)
            if status:
                raise self.failure(name, status)

        function: Callable[..., Any] = checked if self.functions[name].returns == self._returns else raw
        setattr(self, name, function)  # later look-ups find the attribute itself
        return function

    def raw(self, name: str) -> Any:
        """Return the ctypes function itself, unchecked; UnsupportedError if this version lacks it. Local."""
        function = self._pointer(name)
        function.argtypes = [ctype(argument.type) for argument in self.functions[name].arguments]
        return function

    def prepare(self, name: str, *arguments: Any) -> Callable[[], None]:
        """Return the checked call of ``name``, its arguments converted once, to be repeated cheaply. Local.

        A ctypes object among the arguments is read at each call: set its ``value`` to change the argument.
        UnsupportedError if this version has no such function, TypeError if the arguments are not its.
        """
        types = [ctype(argument.type) for argument in self.functions[name].arguments]
        if len(types) != len(arguments):
            raise TypeError(f"{name} takes {len(types)} arguments, got {len(arguments)}")
        converted = [type_.from_param(argument) for type_, argument in zip(types, arguments, strict=True)]
        call = partial(self._pointer(name), *converted)

        def prepared() -> None:
            status = call()
            if status:
                raise self.failure(name, status)

        return prepared

    def _pointer(self, name: str) -> Any:
        """Return a new ctypes function with its own prototype; no other user of the library shares it."""
        row = self.functions[name]
        symbol = row.symbol(self.version)
        if symbol is None:
            needed = version_text(row.since)
            raise UnsupportedError(
                f"{name} needs {self.place.title} {needed} or newer, found {version_text(self.version)} at {self.path}"
            )
        try:
            function = self._cdll[symbol]
        except AttributeError:
            raise UnsupportedError(
                f"{name} is in {self.place.title} since {version_text(row.since)},"
                f" but {self.path} ({version_text(self.version)}) does not export {symbol}"
            ) from None
        function.restype = ctype(row.returns)
        return function

    def failure(self, name: str, number: int) -> StatusError:
        """Return the error for a status that a function has returned. Local."""
        known = number in self._statuses._value2member_map_
        status = f"{self._prefix}{self._statuses(number).name}" if known else "an unknown status"
        title, version = self.place.title, version_text(self.version)
        return StatusError(
            f"{name} returned {status} ({number}), {title} {version} at {self.path}."
            f" Set {title.upper()}_LOG_LEVEL=5 to see why"
        )


class Library(CLibrary):
    """cuBLASMp: 0.4 and older raise UnsupportedError."""

    place, functions = CUBLASMP, FUNCTIONS
    _statuses, _returns, _prefix = Status, "cublasMpStatus_t", "CUBLASMP_STATUS_"

    def _find_version(self) -> None:
        get_version = self._exported("cublasMpGetVersion")
        self.path = path_of(get_version)
        found = ctypes.c_int()
        status = get_version(ctypes.byref(found))
        self.version = found.value
        if status:
            raise self.failure("cublasMpGetVersion", status)
        if self.version < OLDEST:
            raise UnsupportedError(f"{self.path} is cuBLASMp {version_text(self.version)}. {TOO_OLD}")


class SolverLibrary(CLibrary):
    """cuSOLVERMp. It tells its version only to a handle: ``check_version`` comes first, and sets ``version``."""

    place, functions = CUSOLVERMP, SOLVER_FUNCTIONS
    _statuses, _returns, _prefix = SolverStatus, "cusolverStatus_t", "CUSOLVER_STATUS_"

    def _find_version(self) -> None:
        self.path = path_of(self._exported("cusolverMpGetVersion"))
        self.version = OLDEST_SOLVER

    def check_version(self, handle: int) -> None:
        """Ask for the version; UnsupportedError if it is too old. Local."""
        found = ctypes.c_int()
        self.cusolverMpGetVersion(handle, ctypes.byref(found))
        self.version = found.value
        if self.version < OLDEST_SOLVER:
            oldest = version_text(OLDEST_SOLVER)
            raise UnsupportedError(
                f"it needs cuSOLVERMp {oldest} or newer, found {version_text(self.version)} at {self.path}"
            )
