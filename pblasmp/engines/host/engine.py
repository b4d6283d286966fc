# SPDX-License-Identifier: Apache-2.0
"""HostEngine: NumPy arrays, MPI ranks, the CPU's BLAS."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ...comm import Agreement, Communicator
from ...comm.shared import available_bytes
from ...dtypes import is_float8
from ...epilogue import Epilogue
from ...errors import LayoutError, UnsupportedError
from ...layout import Level3Problem, MatmulProblem, MatrixDescriptor
from ...layout.trapezoid import Trapezoid
from ...scales import Scales
from ..after import After
from ..base import Options, Problem, Product, overlap
from ..exchange import ExchangeMove
from . import blas
from .blas import LocalBlas
from .common import Means
from .lane import HostLane
from .level3 import level3_slabs
from .memory import Buffers
from .operand import Staging
from .product import ALGORITHMS, AllReduceProduct, SlabProduct, choose, matmul_slabs
from .solve import SolveProduct
from .summed import SummedUpdate, is_better
from .sums import SumProduct

__all__ = ["HostEngine"]

_SHARE_OF_MEMORY = 0.8
_STAGINGS = 64  # layouts whose moves are remembered: a product that is repeated is not planned anew


class HostEngine:
    """Products on CPU ranks. Making and closing one is collective over ``comm``.

    BLAS gets the cores of the node divided by its ranks, unless an environment variable such as OMP_NUM_THREADS says
    otherwise. PBLASMP_RANKS_PER_NODE splits a machine into several nodes, to try what crosses nodes on one machine.
    """

    name = "host"
    xp: Any = np
    agrees = uneven = True

    def __init__(self, comm: Communicator, why: str) -> None:
        self.why = why
        self._comm = comm
        self._nodes = comm.nodes()
        here = next(ranks for ranks in self._nodes if comm.rank in ranks)
        per_node = os.environ.get("PBLASMP_RANKS_PER_NODE", "")
        if per_node.isdigit() and int(per_node) > 0:
            step = int(per_node)
            self._nodes = [node[i : i + step] for node in self._nodes for i in range(0, len(node), step)]
        self._node = comm.split(self._nodes)
        self._held = 0
        staging = lru_cache(_STAGINGS)(partial(Staging, comm))
        with Agreement(comm, "HostEngine"):
            library = blas.library_name()
            blas.load(library, "d")  # now, so that its threads can be limited
        self._buffers = Buffers(self._node)
        why_not_shared = next((why for why in comm.allgather(self._buffers.why_not_shared()) if why), "")
        everyones = comm.allgather(_cores())
        cores = sorted(set().union(*(everyones[rank] for rank in here)))
        comm.patient = self._node.patient = len(cores) < len(here)
        self.threads = max(1, len(cores) // self._node.size)
        users = blas.threads_set_by_user()
        self._limits = None if users else threadpool_limits(self.threads, "blas")
        unbound = all(everyones[rank] == set(cores) for rank in here)
        seated = comm.patient and unbound and users <= {"1"} and hasattr(os, "sched_setaffinity")
        self._blas = LocalBlas(library, cores[here.index(comm.rank) % len(cores)] if seated else None)
        self._means = Means(
            comm, tuple(self._nodes), self._buffers, self._blas, staging, self._fits, why_not_shared
        )

    def recycle(self, array: NDArray[Any]) -> None:
        """Memory is the garbage collector's here. Local."""

    def empty(
        self,
        shape: tuple[int, int],
        dtype: np.dtype,
        order: str,
        ld: int,
        *,
        symmetric: bool = False,  # noqa: ARG002 - every rank of a node reads the shared copy anyway
    ) -> NDArray[Any]:
        """Return an uninitialised local array with leading dimension ``ld``. Local."""
        rows, cols = shape
        if order == "C":
            return np.empty((rows, ld), dtype)[:, :cols]
        return np.empty((ld, cols), dtype, order="F")[:rows]

    def stored(self, dtype: np.dtype) -> np.dtype:
        """Return ``dtype``: NumPy knows them all. Local."""
        return dtype

    def adopt(self, array: Any, dtype: np.dtype | None = None) -> NDArray[Any]:
        """Return a NumPy array over the memory of ``array``: NumPy's, or anything that shares the host's. Local.

        Bytes become the 8-bit floats that ``dtype`` says they are.
        """
        adopted = self._shared(array)
        if dtype is not None and is_float8(dtype) and adopted.dtype == np.uint8:
            return adopted.view(dtype)
        return adopted

    @staticmethod
    def _shared(array: Any) -> NDArray[Any]:
        if isinstance(array, np.ndarray):
            return array
        why = ""
        try:
            if hasattr(array, "__array_interface__"):
                return np.asarray(array)
            if hasattr(array, "__dlpack__"):
                return np.from_dlpack(array)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            why = f", which does not share the host's memory: {error}"
        kind = f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"
        raise LayoutError(f"local array: expected a NumPy array on the host engine, got {kind}{why}")

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return ``array``. Local."""
        return array

    def from_host(self, array: NDArray[Any], values: NDArray[Any]) -> None:
        """Write ``values`` into ``array``. Local."""
        if array is not values:
            array[...] = values

    def overlap(self, a: NDArray[Any], b: NDArray[Any]) -> bool:
        """Return whether two local arrays have an element in common. Local."""
        return overlap(a, b)

    def suited(self, problem: Problem) -> tuple[Problem, tuple[str, ...]]:
        """Return ``problem``: every legal one can be run here. Local."""
        return problem, ()

    def synchronize(self) -> None:
        """Nothing is ever queued here. Local."""

    def prepare_move(
        self,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[NDArray[Any], NDArray[Any]],  # noqa: ARG002 - any will do
        part: Trapezoid | None = None,
    ) -> ExchangeMove:
        """Prepare a move by MPI. Local."""
        return ExchangeMove(self._comm, source, target, part)

    def prepare(
        self,
        problem: MatmulProblem,
        options: Options,
        arrays: Sequence[NDArray[Any] | None],  # noqa: ARG002 - the path depends on layouts alone
    ) -> Product:
        """Prepare a legal product. Collective over the context.

        ``comm_dtype`` and ``comm_sms`` mean nothing here: sums never travel in less than float32.
        """
        algo = options.algo
        self._check_algo(algo, ALGORITHMS)
        if options.compute is not None:
            raise UnsupportedError(f"compute: the host engine has only None, got {options.compute!r}")
        alpha, beta = options.alpha, options.beta
        after = None
        if options.scales is not None and options.scales.mode != "tensor":
            raise UnsupportedError(
                f"scales: mode {options.scales.mode!r} is for Blackwell GPUs, the host engine has 'tensor'"
            )
        if options.epilogue is not None or options.scales is not None or is_float8(problem.d.dtype):
            epilogue, scales = options.epilogue or Epilogue(), options.scales or Scales()
            after = After(np, epilogue, scales, problem, self._comm.rank, self._comm.sum_into)
        if problem.scheme == "ar":
            return AllReduceProduct(problem, alpha, beta, self._comm, self._blas, after)
        slabs = matmul_slabs(problem, alpha, self._comm.size)
        path, notes = choose(slabs.operands, slabs.k, algo, self._means)
        return SlabProduct(slabs, beta, path, self._means, notes, after)

    def _check_algo(self, algo: str, ways: Sequence[str]) -> None:
        if algo not in ways:
            raise UnsupportedError(f"algo: the host engine has {', '.join(ways)}, got {algo!r}")
        if algo == "shared" and self._means.why_not_shared:
            raise UnsupportedError(f"algo 'shared': {self._means.why_not_shared}")

    def prepare_level3(
        self,
        problem: Level3Problem,
        options: Options,
        arrays: Sequence[NDArray[Any] | None],  # noqa: ARG002 - the path depends on layouts alone
    ) -> Product:
        """Prepare a level-3 routine. Collective over the context."""
        shape, size, algo = problem.traits.shape, self._comm.size, options.algo
        if problem.d.dtype.itemsize < 4:
            raise UnsupportedError(
                f"{problem.routine}: the host engine has float32, float64, complex64 and complex128, "
                f"got {problem.d.dtype.name}"
            )
        if shape == "added":
            self._check_algo(algo, ("auto",))
            return SumProduct(problem, options, self._means)
        self._check_algo(algo, (*ALGORITHMS, "summed") if shape == "updated" else ALGORITHMS)
        if problem.routine == "trsm":
            return SolveProduct(problem, options, self._means)
        if algo == "summed" or (algo == "auto" and is_better(problem, size)):
            return SummedUpdate(problem, options, self._means)
        slabs = level3_slabs(problem, options, self._comm.rank, size)
        path, notes = choose(slabs.operands, slabs.k, algo, self._means)
        return SlabProduct(slabs, options.beta, path, self._means, notes)

    def _fits(self, nbytes: int) -> tuple[bool, int]:
        """Return whether ``nbytes`` a node are to be had on every node, and how many are. Collective.

        What was had once is held in the buffers and not asked for again.
        """
        if nbytes > self._held:
            everywhere: list[int] = self._comm.allgather(available_bytes())
            limit = self._held + int(min(everywhere) * _SHARE_OF_MEMORY)
            if nbytes > limit:
                return False, limit
            self._held = nbytes
        return True, self._held

    def lane(self) -> HostLane:
        """Return the local BLAS and MPI messages. Local."""
        return HostLane(self._comm, self._blas, self._buffers)

    def close(self) -> None:
        """Give back shared memory and BLAS's threads. Collective over the context."""
        self._buffers.close()
        if self._limits is not None:
            self._limits.restore_original_limits()
        if self._node is not self._comm:
            self._node.free()


def _cores() -> set[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
