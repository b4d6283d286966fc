# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph queues, as the compiled core queues it: see ``_core/launch.h``."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ...._core import LaunchState
from ....errors import StatusError

__all__ = ["Relaunch"]

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_ATTRIBUTE_BYTES = 64


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("more", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class Relaunch:
    """A recorded graph, to be queued any number of times while it exists. Local.

    A graph of one kernel is queued as that kernel, which takes less time.

    Args:
        graph: CuPy's.

    Attributes:
        launch, stream: as in ``comm.Ready``.
        at: the address of the stream.

    Raises:
        StatusError: the driver refuses to tell of it.
    """

    __slots__ = ("_state", "at", "launch", "stream")

    def __init__(self, graph: Any) -> None:
        context, driver = ctypes.c_void_p(), _driver()
        self.check(driver.cuCtxGetCurrent(ctypes.byref(context)))
        self._state = LaunchState(
            *(
                ctypes.cast(function, ctypes.c_void_p).value
                for function in (
                    driver.cuCtxGetCurrent, driver.cuStreamIsCapturing, driver.cuGraphLaunch, driver.cuLaunchKernel
                )
            ),
            context.value, graph.graphExec,
        )  # fmt: skip
        node = self._only_kernel(driver, graph.graph)
        if node is not None:
            self._state.what, self._state.arguments = node.function, node.arguments
            self._state.grid, self._state.block, self._state.shared = node.grid, node.block, node.shared
        self.launch = ctypes.c_void_p(ctypes.addressof(self._state))
        self.on(0)

    def on(self, stream: int) -> Relaunch:
        """Let it be queued on a stream, by its address; return it. Local."""
        self.at, self.stream = stream, ctypes.c_void_p(stream)
        return self

    def _only_kernel(self, driver: Any, graph: int) -> _KernelNode | None:
        """Return the kernel that a graph consists of, whose arguments it keeps; None if it is anything else."""
        count, kind, params = ctypes.c_size_t(2), ctypes.c_int(), _KernelNode()
        nodes = (ctypes.c_void_p * 2)()
        self.check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
        if count.value != 1 or nodes[1]:
            return None
        node = ctypes.c_void_p(nodes[0])
        self.check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value != _KERNEL_NODE:
            return None
        self.check(driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)))
        together = (ctypes.c_int * (_ATTRIBUTE_BYTES // 4))()
        self.check(driver.cuGraphKernelNodeGetAttribute(node, _COOPERATIVE, ctypes.byref(together)))
        return params if params.function and params.arguments and not together[0] else None

    def check(self, failed: int) -> None:
        """Raise StatusError for an error of the driver, by its number. Local."""
        if failed:
            raise StatusError(f"CUDA driver: error {failed}")


@cache
def _driver() -> Any:
    """Return CUDA's driver, which is loaded already."""
    return ctypes.CDLL("libcuda.so.1")
