# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp, opened: its functions as Python callables that check the status."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import LibraryNotFoundError, StatusError, UnsupportedError
from .enums import Status
from .finding import TOO_OLD, open_library, path_of
from .table import FUNCTIONS, OLDEST, ctype

__all__ = ["Library", "version_text"]


def version_text(version: int) -> str:
    """Return a version number as people write it: 901 is 0.9.1, 1000 is 0.10.0. Local."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Library:
    """cuBLASMp, one to one with C: each function of the table is an attribute that takes C's arguments.

    Handles, pointers and enumerations go in as ints, or as ctypes objects; ``ctypes.byref`` is for what C
    writes and None is NULL. Indices are 1-based and nothing has a default. A call returns None, or what C
    returns if that is not a status. A function has its newest name whatever the version.

    Attributes:
        version: The number ``cublasMpGetVersion`` gives: 1000 is 0.10.0.
        path: The file that was opened.

    Raises:
        LibraryNotFoundError: The library, the driver or a library it needs is missing.
        UnsupportedError: The library is 0.4 or older; also, from an attribute, it lacks that function.
        StatusError: From a call, C returned another status than success.
    """

    version: int
    path: str

    def __init__(self, path: str | None = None) -> None:
        self._cdll = open_library(path)
        try:
            get_version = self._cdll.cublasMpGetVersion
        except AttributeError:
            raise LibraryNotFoundError(
                f"{self._cdll._name} is not cuBLASMp: it has no cublasMpGetVersion"
            ) from None
        self.path = path_of(get_version)
        found = ctypes.c_int()
        status = get_version(ctypes.byref(found))
        self.version = found.value
        if status:
            raise self._failure("cublasMpGetVersion", status)
        if self.version < OLDEST:
            raise UnsupportedError(f"{self.path} is cuBLASMp {version_text(self.version)}. {TOO_OLD}")

    def __repr__(self) -> str:
        return f"<cuBLASMp {version_text(self.version)} at {self.path}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS:
            raise AttributeError(f"cuBLASMp has no function {name!r}")
        raw = self.raw(name)

        def checked(*arguments: Any) -> None:
            status = raw(*arguments)
            if status:
                raise self._failure(name, status)

        function: Callable[..., Any] = checked if FUNCTIONS[name].returns == "cublasMpStatus_t" else raw
        setattr(self, name, function)  # later look-ups find the attribute itself
        return function

    def raw(self, name: str) -> Any:
        """Return the ctypes function itself: it returns what C returns, unchecked. Local.

        Raises:
            UnsupportedError: This version has no function ``name``.
        """
        function = self._pointer(name)
        function.argtypes = [ctype(argument.type) for argument in FUNCTIONS[name].arguments]
        return function

    def prepare(self, name: str, *arguments: Any) -> Callable[[], None]:
        """Return the checked call of ``name``, its arguments converted once, to be repeated cheaply. Local.

        A ctypes object among the arguments is read at each call: set its ``value`` to change the argument.

        Raises:
            UnsupportedError: This version has no function ``name``.
            TypeError: The arguments are not those of the function.
        """
        types = [ctype(argument.type) for argument in FUNCTIONS[name].arguments]
        if len(types) != len(arguments):
            raise TypeError(f"{name} takes {len(types)} arguments, got {len(arguments)}")
        converted = [type_.from_param(argument) for type_, argument in zip(types, arguments, strict=True)]
        call = partial(self._pointer(name), *converted)

        def prepared() -> None:
            status = call()
            if status:
                raise self._failure(name, status)

        return prepared

    def _pointer(self, name: str) -> Any:
        """Return a new ctypes function with its own prototype; no other user of the library shares it."""
        row = FUNCTIONS[name]
        symbol = row.symbol(self.version)
        if symbol is None:
            needed = version_text(row.since)
            raise UnsupportedError(
                f"{name} needs cuBLASMp {needed} or newer, found {version_text(self.version)} at {self.path}"
            )
        try:
            function = self._cdll[symbol]
        except AttributeError:
            raise UnsupportedError(
                f"{name} is in cuBLASMp since {version_text(row.since)},"
                f" but {self.path} ({version_text(self.version)}) does not export {symbol}"
            ) from None
        function.restype = ctype(row.returns)
        return function

    def _failure(self, name: str, number: int) -> StatusError:
        known = number in Status._value2member_map_
        status = f"CUBLASMP_STATUS_{Status(number).name}" if known else "an unknown status"
        return StatusError(
            f"{name} returned {status} ({number}), cuBLASMp {version_text(self.version)} at {self.path}."
            " Set CUBLASMP_LOG_LEVEL=5 to see why"
        )
