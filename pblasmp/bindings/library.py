# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp and cuSOLVERMp, opened: their functions as Python callables that check the status."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from typing import Any

from ..errors import LibraryNotFoundError, StatusError, UnsupportedError
from .enums import SolverStatus, Status
from .finding import CUBLASMP, CUSOLVERMP, TOO_OLD, LibraryPlace, open_library, path_of
from .solver_table import OLDEST_SOLVER, SOLVER_FUNCTIONS
from .table import FUNCTIONS, OLDEST, Function, ctype

__all__ = ["CLibrary", "Library", "SolverLibrary", "version_text"]


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
        """Return the ctypes function itself: it returns what C returns, unchecked. Local.

        Raises:
            UnsupportedError: This version has no function ``name``.
        """
        function = self._pointer(name)
        function.argtypes = [ctype(argument.type) for argument in self.functions[name].arguments]
        return function

    def prepare(self, name: str, *arguments: Any) -> Callable[[], None]:
        """Return the checked call of ``name``, its arguments converted once, to be repeated cheaply. Local.

        A ctypes object among the arguments is read at each call: set its ``value`` to change the argument.

        Raises:
            UnsupportedError: This version has no function ``name``.
            TypeError: The arguments are not those of the function.
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
        """Ask for the version. Local.

        Raises:
            UnsupportedError: it is too old.
        """
        found = ctypes.c_int()
        self.cusolverMpGetVersion(handle, ctypes.byref(found))
        self.version = found.value
        if self.version < OLDEST_SOLVER:
            oldest = version_text(OLDEST_SOLVER)
            raise UnsupportedError(
                f"it needs cuSOLVERMp {oldest} or newer, found {version_text(self.version)} at {self.path}"
            )
