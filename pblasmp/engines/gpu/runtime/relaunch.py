# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph queues, as the compiled core queues it: see ``_core/launch.h``."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ...._core import Core, LaunchState
from ....errors import StatusError


class Relaunch:
    """A recorded graph, to be queued any number of times while it exists. Local.

    Args:
        graph: CuPy's.
        core: the compiled core.

    Attributes:
        core, launch, stream: as in ``comm.Ready``.
        at: the address of the stream.

    Raises:
        StatusError: the driver has no current context.
    """

    __slots__ = ("_state", "at", "core", "launch", "stream")

    def __init__(self, graph: Any, core: Core) -> None:
        self.core = core
        context, driver = ctypes.c_void_p(), _driver()
        self.check(driver.cuCtxGetCurrent(ctypes.byref(context)))
        functions = (
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (driver.cuCtxGetCurrent, driver.cuStreamIsCapturing, driver.cuGraphLaunch)
        )
        self._state = LaunchState(*functions, context.value, graph.graphExec)
        self.launch = ctypes.c_void_p(ctypes.addressof(self._state))
        self.on(0)

    def on(self, stream: int) -> Relaunch:
        """Let it be queued on a stream, by its address; return it. Local."""
        self.at, self.stream = stream, ctypes.c_void_p(stream)
        return self

    def check(self, failed: int) -> None:
        """Raise StatusError for an error of the driver, by its number. Local."""
        if failed:
            raise StatusError(f"CUDA driver: error {failed}")


@cache
def _driver() -> Any:
    """Return CUDA's driver, which is loaded already."""
    return ctypes.CDLL("libcuda.so.1")
