# SPDX-License-Identifier: Apache-2.0
"""What cuBLASMp does, according to its log: nothing else tells which algorithm it takes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from ....bindings import Library, LoggerCallback

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Listening"]

_TRACE = 5


class Listening:
    """Within the ``with`` block, collects in ``said`` the log lines that name the algorithm that the library takes.

    If the user has set the log's level, it stays as it is, and lines that it excludes are not collected.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self.said: list[str] = []
        self._callback = LoggerCallback(self._hear)
        self._users_own = any(name in os.environ for name in ("CUBLASMP_LOG_LEVEL", "CUBLASMP_LOG_MASK"))

    def _hear(self, _level: int, _function: bytes | None, message: bytes | None) -> None:
        text = (message or b"").decode(errors="replace").strip()
        if "using " in text.lower() and text not in self.said:
            self.said.append(text)

    def __enter__(self) -> Self:
        library = self._library
        with ExitStack() as undo:
            if not self._users_own:  # otherwise the log would also go to the user's standard output
                library.cublasMpLoggerOpenFile(os.devnull.encode())
                undo.callback(library.cublasMpLoggerSetLevel, 0)
                library.cublasMpLoggerSetLevel(_TRACE)
            undo.callback(library.cublasMpLoggerSetCallback, None)
            library.cublasMpLoggerSetCallback(self._callback)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
