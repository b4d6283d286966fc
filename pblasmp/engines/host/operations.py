# SPDX-License-Identifier: Apache-2.0
"""The host engine's lane: the local BLAS, and MPI messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Communicator
from ...dtypes import accumulation_dtype
from ...errors import UnsupportedError
from ..base import Workspace
from .blas import LocalBlas
from .memory import Buffers

__all__ = ["HostLane"]

Array = NDArray[Any]


class HostLane:
    """See ``engines.lane.Lane``. Local to make."""

    xp: Any = np
    stores_float8 = True
    panel_flops = 1.0

    def __init__(self, comm: Communicator, local_blas: LocalBlas, buffers: Buffers) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._blas, self._buffers = comm, local_blas, buffers

    def workspace(self, nbytes: int) -> Workspace:
        """Return ``nbytes`` on the host. Local."""
        return Workspace(0, nbytes)

    def scratch(self, name: str, shape: tuple[int, int], dtype: np.dtype) -> Array:
        """Return a C-ordered array in the buffer ``name``. Local."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._buffers.get(f"lane {name}", nbytes, shared=False)
        return memory[:nbytes].view(dtype).reshape(shape)

    def multiplies(self, dtype: np.dtype) -> np.dtype:
        """Return the type that BLAS multiplies. Local."""
        return accumulation_dtype(dtype)

    def operand(self, array: Array, dtype: np.dtype, name: str = "") -> Array:  # noqa: ARG002 - a new array
        """Return ``array`` in the type that BLAS multiplies. Local."""
        return array.astype(self.multiplies(dtype), copy=False)

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:  # noqa: ARG002
        """Return the type that products are summed in: sums never travel in less here. Local."""
        return accumulation_dtype(dtype)

    def check(self, dtype: np.dtype, compute: str | None) -> None:  # noqa: ARG002
        """Raise UnsupportedError unless ``compute`` is None. Local."""
        if compute is not None:
            raise UnsupportedError(f"compute: the host engine has only None, got {compute!r}")

    def gemm(
        self,
        alpha: complex,
        a: Array,
        b: Array,
        beta: complex,
        d: Array,
        compute: str | None = None,  # noqa: ARG002
    ) -> None:
        """Compute ``d = alpha a b + beta d``. Local."""
        exact = accumulation_dtype(d.dtype)
        target = d if exact == d.dtype else self.scratch("exact", d.shape, exact)
        if target is not d and beta != 0:
            target[...] = d
        with self._blas.seated():
            self._blas.gemm(alpha, self.operand(a, a.dtype), self.operand(b, b.dtype), beta, target)
        if target is not d:
            d[...] = target

    def start(self, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]]) -> list[Any]:
        """Start messages. Local."""
        requests = [request for array, rank in receives for request in self._comm.irecv(array, rank)]
        return requests + [request for array, rank in sends for request in self._comm.isend(array, rank)]

    def wait(self, messages: list[Any]) -> None:
        """Wait until they are all there. Local."""
        for request in messages:
            self._comm.wait(request)
