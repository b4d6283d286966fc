# SPDX-License-Identifier: Apache-2.0
"""nvmath.bindings.cublas, computed by NumPy: by GPUs that queue what they compute, and by those that do it at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from pblasmp.engines.gpu.kernels.views import View

_KINDS = {"s": "f4", "d": "f8", "c": "c8", "z": "c16"}
_TYPES = {0: "f4", 1: "f8", 2: "f2", 4: "c8", 5: "c16"}  # by CUDA's number; other ones are bfloat16
_COMPUTES = {68: ("f4", "c8"), 70: ("f8", "c16")}


def _matrix(address: int, rows: int, cols: int, ld: int, kind: np.dtype, op: int = 0) -> View:
    """A matrix in Fortran order, which ``op`` makes rows × cols: its columns are the view's rows."""
    rows, cols = (cols, rows) if op else (rows, cols)
    assert ld >= max(1, rows)
    return View(address, cols, rows, ld, kind)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _get(memory: Any, view: View) -> np.ndarray:
    return _wide(memory.read(view).T)


def _turned(x: np.ndarray, op: int) -> np.ndarray:
    return (x, x.T, x.conj().T)[op]


def _scalar(kind: np.dtype, address: int) -> Any:
    return np.frombuffer(ctypes.string_at(address, kind.itemsize), kind)[0]


class Cublas:
    """Routines by their names, as ``dgemm``.

    Args:
        queue: is given a routine's name, its sizes and what it does with the GPU's memory.
        rounded: what becomes of the factors of a product.
    """

    def __init__(
        self, queue: Callable[..., None], rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x
    ) -> None:
        self._queue, self._rounded = queue, rounded

    def __getattr__(self, name: str) -> Any:
        """Return a routine of a type."""
        kind, routine = _KINDS.get(name[0]), name[1:]
        if kind is None or not hasattr(type(self), routine):
            raise AttributeError(name)
        return partial(getattr(type(self), routine), self, np.dtype(kind))

    def gemm_ex(
        self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, a: int, type_a: int, lda: int,
        b: int, type_b: int, ldb: int, beta: int, d: int, type_d: int, ldd: int, compute: int, algo: int,
    ) -> None:  # fmt: skip
        assert algo == -1
        kinds = [np.dtype(_TYPES.get(t, bfloat16)) for t in (type_a, type_b, type_d)]
        scale = np.dtype(_COMPUTES[compute][kinds[0].kind == "c"])
        x, y = _matrix(a, m, k, lda, kinds[0], op_a), _matrix(b, k, n, ldb, kinds[1], op_b)
        scalars = _scalar(scale, alpha), _scalar(scale, beta)
        self._multiply(x, op_a, y, op_b, _matrix(d, m, n, ldd, kinds[2]), *scalars, (m, n, k))

    def gemm(
        self, kind: np.dtype, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int,
        a: int, lda: int, b: int, ldb: int, beta: int, d: int, ldd: int,
    ) -> None:  # fmt: skip
        x, y = _matrix(a, m, k, lda, kind, op_a), _matrix(b, k, n, ldb, kind, op_b)
        scalars = _scalar(kind, alpha), _scalar(kind, beta)
        self._multiply(x, op_a, y, op_b, _matrix(d, m, n, ldd, kind), *scalars, (m, n, k))

    def _multiply(
        self, x: View, op_x: int, y: View, op_y: int, to: View, alpha: Any, beta: Any, sizes: Any
    ) -> None:
        def do(memory: Any) -> None:
            left, right = (
                _turned(_wide(self._rounded(memory.read(each).T)), op) for each, op in ((x, op_x), (y, op_y))
            )
            found = alpha * (left @ right) + (beta * _get(memory, to) if beta else 0)
            memory.write(to).T[...] = found

        self._queue("gemm", sizes, do)

    def gemv(
        self, kind: np.dtype, handle: int, op: int, m: int, n: int, alpha: int, a: int, lda: int,
        x: int, one: int, beta: int, y: int, step: int,
    ) -> None:  # fmt: skip
        assert one == step == 1
        rows, cols = (n, m) if op else (m, n)
        of_x, of_y = (x, max(1, cols)), (y, max(1, rows))
        self.gemm(kind, handle, op, 0, rows, 1, cols, alpha, a, lda, *of_x, beta, *of_y)

    def gemm_strided_batched(self, kind: np.dtype, handle: int, op_a: int, op_b: int, m: int, n: int, k: int,
                             alpha: int, a: int, lda: int, step_a: int, b: int, ldb: int, step_b: int, beta: int,
                             d: int, ldd: int, step_d: int, count: int) -> None:  # fmt: skip
        for i in range(count):
            at_a, at_b, at_d = (
                at + i * step * kind.itemsize for at, step in ((a, step_a), (b, step_b), (d, step_d))
            )
            self.gemm(kind, handle, op_a, op_b, m, n, k, alpha, at_a, lda, at_b, ldb, beta, at_d, ldd)

    def trsm(self, kind: np.dtype, handle: int, *arguments: int) -> None:
        self._triangular("trsm", kind, *arguments, *arguments[-2:])

    def trmm(self, kind: np.dtype, handle: int, *arguments: int) -> None:
        self._triangular("trmm", kind, *arguments)

    def _triangular(self, name: str, kind: np.dtype, side: int, fill: int, op: int, diag: int, m: int, n: int,
                    alpha: int, a: int, lda: int, b: int, ldb: int, d: int, ldd: int) -> None:  # fmt: skip
        order, scale = n if side else m, _scalar(kind, alpha)
        x, y, to = (
            _matrix(a, order, order, lda, kind),
            _matrix(b, m, n, ldb, kind),
            _matrix(d, m, n, ldd, kind),
        )

        def do(memory: Any) -> None:
            triangle = (np.triu if fill else np.tril)(_get(memory, x))  # the rest may be anything
            if diag:
                np.fill_diagonal(triangle, 1)
            triangle, right = _turned(triangle, op), scale * _get(memory, y)
            if name == "trsm":
                found = np.linalg.solve(triangle.T, right.T).T if side else np.linalg.solve(triangle, right)
            else:
                found = right @ triangle if side else triangle @ right
            memory.write(to).T[...] = found

        self._queue(name, (m, n), do)

    def symm(self, kind: np.dtype, handle: int, *arguments: int, conjugates: bool = False) -> None:
        side, fill, m, n, alpha, a, lda, b, ldb, beta, d, ldd = arguments
        order, one, other = n if side else m, _scalar(kind, alpha), _scalar(kind, beta)
        x, y, to = (
            _matrix(a, order, order, lda, kind),
            _matrix(b, m, n, ldb, kind),
            _matrix(d, m, n, ldd, kind),
        )

        def do(memory: Any) -> None:
            half = (np.triu if fill else np.tril)(_get(memory, x))
            rest = half - np.diag(np.diag(half))
            whole = half + (rest.conj().T if conjugates else rest.T)
            if conjugates:
                np.fill_diagonal(whole, whole.diagonal().real)
            found = _get(memory, y) @ whole if side else whole @ _get(memory, y)
            memory.write(to).T[...] = one * found + (other * _get(memory, to) if other else 0)

        self._queue("symm", (m, n), do)

    def hemm(self, kind: np.dtype, handle: int, *arguments: int) -> None:
        self.symm(kind, handle, *arguments, conjugates=True)
