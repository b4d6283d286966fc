# SPDX-License-Identifier: Apache-2.0
"""Lane: what an engine does on one rank's own arrays, with messages to other ranks under way meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .base import Workspace

__all__ = ["Lane", "blas_operand"]

Array = Any  # numpy.ndarray on the host engine, cupy.ndarray on cublasmp
Message = tuple[Array, int]


class Lane(Protocol):
    """A rank's own products and its messages. On GPUs everything is queued: messages on a stream of their own.

    Attributes:
        rank, size: this rank's number, and how many there are.
        xp: numpy or cupy: whose arrays they are.
        stores_float8: whether results may be 8-bit floats.
        panel_flops: operations of a product that hide what it costs to queue its messages.
    """

    rank: int
    size: int
    xp: Any
    stores_float8: bool
    panel_flops: float

    def workspace(self, nbytes: int) -> Workspace:
        """Return ``nbytes`` of scratch as a plan reports it. Local."""

    def scratch(self, name: str, shape: tuple[int, int], dtype: np.dtype) -> Array:
        """Return a C-ordered array in the buffer ``name``, which all products of the engine use in turn. Local."""

    def multiplies(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which operands of ``dtype`` are multiplied: one that holds their values. Local."""

    def operand(self, array: Array, dtype: np.dtype, name: str = "") -> Array:
        """Return ``array``, whose elements are ``dtype``, as it is multiplied: itself, or a copy. Local.

        A copy may lie in a buffer that the next operand called ``name`` takes.
        """

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:
        """Return the type in which partial sums of a result of ``dtype`` travel. Local."""

    def check(self, dtype: np.dtype, compute: str | None) -> None:
        """Raise UnsupportedError where ``gemm`` cannot sum products of ``dtype`` in ``compute``. Local."""

    def gemm(
        self, alpha: complex, a: Array, b: Array, beta: complex, d: Array, compute: str | None = None
    ) -> None:
        """Compute ``d = alpha a b + beta d`` on 2D arrays with one contiguous dimension each. Local.

        ``compute`` is what products are summed in, as in ``Options``.
        """

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        """Start messages, each a contiguous array and the other rank; they begin after what was computed so far.

        Ranks match messages in order. The arrays are in use until ``wait`` with what this returns.
        """

    def wait(self, messages: Any) -> None:
        """Let what is computed from now on find the messages of ``start`` where they belong."""


def blas_operand(array: Array) -> tuple[str, int]:
    """Return BLAS's trans flag and leading dimension for a 2D array with one contiguous dimension. Local."""
    rows, cols = array.shape
    item = array.itemsize
    if (array.strides[0] == item or rows <= 1) and (cols <= 1 or array.strides[1] >= rows * item):
        return "N", max(1, rows, array.strides[1] // item if cols > 1 else 1)
    assert array.strides[1] == item or cols <= 1, "BLAS needs one contiguous dimension"
    return "T", max(1, cols, array.strides[0] // item if rows > 1 else 1)
