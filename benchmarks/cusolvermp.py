# SPDX-License-Identifier: Apache-2.0
"""cuSOLVERMp's factorizations and solves, to be compared with pblasmp's: in place, in layouts that it takes.

These are float64 matrices in F order with square blocks on a grid of all ranks. On several rows of processes its pivots
of LU are not those of partial pivoting.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.bindings import FillMode, Operation
from pblasmp.engines.gpu.cusolvermp import Cusolvermp, solver_of
from pblasmp.engines.gpu.session import session_of

__all__ = ["Solver", "open_solver"]


def open_solver(ctx: pb.Context) -> Solver | str:
    """Return the library, or why there is none. Collective."""
    found = solver_of(session_of(ctx.engine))
    return found if isinstance(found, str) else Solver(ctx, found)


class Solver:
    """The library's routines on distributed matrices. Collective to call.

    Args:
        ctx: where they are.
        library: cuSOLVERMp.
    """

    def __init__(self, ctx: pb.Context, library: Cusolvermp) -> None:
        self._ctx, self._library = ctx, library

    def cholesky(self, a: pb.DistributedMatrix) -> None:
        """Replace the lower triangle by its factor."""
        self._call("Potrf", a, FillMode.LOWER, len(a), a)

    def cho_solve(self, a: pb.DistributedMatrix, b: pb.DistributedMatrix) -> None:
        """Replace right-hand sides by solutions, given the factor."""
        self._call("Potrs", a, FillMode.LOWER, len(a), b.shape[1], a, b)

    def lu(self, a: pb.DistributedMatrix) -> np.ndarray:
        """Replace a matrix by its factors, and return the pivots."""
        pivots = self._of_columns(a, np.arange(1, len(a) + 1))
        self._call("Getrf", a, *a.shape, a, pivots)
        _, cols = a.descriptor.global_indices(self._ctx.rank)
        whole = np.zeros(len(a), np.int64)
        mine = self._library.runtime.cupy.asnumpy(pivots)[: len(cols)]
        for at, part in self._ctx.comm.allgather((cols, mine)):
            whole[at] = part
        return whole - 1

    def lu_solve(self, a: pb.DistributedMatrix, pivots: np.ndarray, b: pb.DistributedMatrix) -> None:
        """Replace right-hand sides by solutions, given the factors."""
        self._call("Getrs", a, Operation.N, len(a), b.shape[1], a, self._of_columns(a, pivots + 1), b)

    def qr(self, a: pb.DistributedMatrix) -> None:
        """Replace a matrix by R and the reflectors."""
        tau = self._of_columns(a, np.zeros(a.shape[1]))
        self._call("Geqrf", a, *a.shape, a, after=(tau.data.ptr,))

    def eigenvalues(self, a: pb.DistributedMatrix) -> np.ndarray:
        """Return the eigenvalues of a symmetric matrix, which it keeps; compute the eigenvectors, too."""
        cupy, job = self._library.runtime.cupy, ctypes.create_string_buffer(b"V")
        copied, vectors, values = (
            a.copy(),
            self._ctx.empty(a.descriptor),
            cupy.zeros(len(a), a.dtype.char.lower()),
        )
        given = ctypes.addressof(job), FillMode.LOWER, len(a), copied, values, vectors
        self._call("Syevd", a, *given)
        return np.sort(cupy.asnumpy(values))

    def _of_columns(self, a: pb.DistributedMatrix, whole: np.ndarray) -> Any:
        """Return this rank's part of what accompanies the columns of A, on its GPU."""
        _, cols = a.descriptor.global_indices(self._ctx.rank)
        part = np.zeros(len(cols) + a.descriptor.block[1], whole.dtype)
        part[: len(cols)] = whole[cols]
        return self._library.runtime.cupy.asarray(part)

    def _call(self, routine: str, a: pb.DistributedMatrix, *given: Any, after: tuple[int, ...] = ()) -> None:
        self._library.grid(a.descriptor.grid)
        arguments: list[Any] = []
        with ExitStack() as closing:
            for each in given:
                if isinstance(each, pb.DistributedMatrix):
                    descriptor = self._library.descriptor(each.descriptor, each.local, closing)
                    arguments += [self._library.address(each.local), 1, 1, descriptor]
                else:
                    arguments.append(each if isinstance(each, int) else each.data.ptr)
            info = self._library.call(routine, a.dtype, tuple(arguments), after)
        if info:
            raise SystemExit(f"cusolverMp{routine}: INFO is {info}")
