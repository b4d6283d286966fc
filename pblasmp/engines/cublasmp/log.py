# SPDX-License-Identifier: Apache-2.0
"""What cuBLASMp says that it does: the way it takes is known only from its log."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING

from ...bindings import Library, LoggerCallback

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Listening"]

_TRACE = 5


class Listening:
    """While in the ``with`` block, collects in ``said`` the lines in which the library names the way it takes."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.said: list[str] = []
        self._callback = LoggerCallback(self._hear)

    def _hear(self, _level: int, _function: bytes | None, message: bytes | None) -> None:
        text = (message or b"").decode(errors="replace").strip()
        if "using " in text.lower() and text not in self.said:
            self.said.append(text)

    def __enter__(self) -> Self:
        self._library.cublasMpLoggerSetCallback(self._callback)
        self._library.cublasMpLoggerSetLevel(_TRACE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        level = os.environ.get("CUBLASMP_LOG_LEVEL", "0")
        self._library.cublasMpLoggerSetLevel(int(level) if level.isdigit() else 0)
        self._library.cublasMpLoggerSetCallback(None)
