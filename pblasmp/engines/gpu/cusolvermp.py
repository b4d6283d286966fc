# SPDX-License-Identifier: Apache-2.0
"""Cusolvermp: cuSOLVERMp in a context: its handle, grids and calls. It is optional, and opened when first asked for."""

from __future__ import annotations

import ctypes
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...bindings import (
    SOLVER_FUNCTIONS,
    EigMode,
    FillMode,
    GridMapping,
    SolverLibrary,
    version_text,
)
from ...dtypes import real_dtype
from ...errors import PblasmpError, StatusError, opened
from ...layout import Grid, MatrixDescriptor
from ...layout.factor_problem import FactorProblem
from ..arrays import move, new_part
from ..local.spectral import OneRankMethod, OneRankProduct, SpectralMethod, SpectralProduct
from ..product import Found, Product
from ..protocol import Engine, Method
from ..request import Operands, Options
from .kernels.views import leading
from .session import Session, session_of
from .types import DATA_TYPES

Array = Any


def solver_of(session: Session) -> Cusolvermp | str:
    """Return cuSOLVERMp, or why a rank has none; the session keeps either. Collective over the context."""
    if session.solver is None:
        library = opened("cuSOLVERMp", SolverLibrary)
        faults = session.runtime.comm.allgather(str(library) if isinstance(library, PblasmpError) else "")
        why = next((fault for fault in faults if fault), "")
        session.solver = why
        if not why and not isinstance(library, PblasmpError):
            session.solver = Cusolvermp(session, library)
            session.close_first(session.solver.close)
    found: Cusolvermp | str = session.solver
    return found


class Cusolvermp:
    """cuSOLVERMp on one GPU of a context. Making and closing one is collective over the context.

    Args:
        session: what it shares with the other parts of the engine.

    Attributes:
        c: the functions of the library.
    """

    def __init__(self, session: Session, library: SolverLibrary) -> None:
        self.c, self._session, self.runtime = library, session, session.runtime
        self._grids: dict[Grid, int] = {}
        runtime, handle = session.runtime, ctypes.c_void_p()
        with ExitStack() as self._closing:
            with runtime.agreement("cuSOLVERMp") as facts:
                device = runtime.device.index
                runtime.follow_stream()
                library.cusolverMpCreate(ctypes.byref(handle), device, runtime.stream.ptr)
                self._closing.callback(library.cusolverMpDestroy, handle.value)
                assert handle.value is not None
                library.check_version(handle.value)
                facts["cuSOLVERMp"] = version_text(library.version)
                self._info = runtime.cupy.zeros(1, np.int32)
            self._closing = self._closing.pop_all()
        self.handle: int = handle.value
        runtime.followers.append(lambda stream: library.cusolverMpSetStream(self.handle, stream.ptr))

    def grid(self, grid: Grid) -> int:
        """Return cuSOLVERMp's handle of a grid over all ranks. Collective the first time."""
        if grid not in self._grids:
            nccl, handle = self._session.nccl.communicator(grid.size), ctypes.c_void_p()
            mapping = GridMapping.ROW_MAJOR if grid.order == "row" else GridMapping.COL_MAJOR
            with self.runtime.agreement("cuSOLVERMp: grid", blocks=True):
                self.c.cusolverMpCreateDeviceGrid(
                    self.handle, ctypes.byref(handle), nccl, grid.nprow, grid.npcol, mapping
                )
                assert handle.value is not None
                self._closing.callback(self.c.cusolverMpDestroyGrid, handle.value)
            self._grids[grid] = handle.value
        return self._grids[grid]

    def descriptor(self, x: MatrixDescriptor, array: Array, closing: ExitStack) -> int:
        """Return cuSOLVERMp's descriptor of a local array, until ``closing`` is closed. Local."""
        out = ctypes.c_void_p()
        self.c.cusolverMpCreateMatrixDesc(
            ctypes.byref(out), self._grids[x.grid], DATA_TYPES[x.dtype.name], *x.shape, *x.block, 0, 0,
            leading(array),
        )  # fmt: skip
        assert out.value is not None
        closing.callback(self.c.cusolverMpDestroyMatrixDesc, out.value)
        return out.value

    def address(self, array: Array, operand: int = 0) -> int:
        """Return the device address of an array; for an empty one, one that is never written to. Local."""
        return self._session.cublasmp.address(array, operand)

    def call(
        self, routine: str, dtype: np.dtype, shared: tuple[Any, ...], after: tuple[Any, ...] = ()
    ) -> int:
        """Call a routine on the current stream, wait for it, and return INFO. Collective over the context.

        Args:
            routine: the function's name without its prefix.
            shared: C's arguments between the handle and the type.
            after: what comes between these and the type, but not in the query of the workspace.

        Returns:
            0, or the least positive INFO of all ranks.
        """
        runtime, compute = self.runtime, DATA_TYPES[dtype.name]
        what = f"cusolverMp{routine}"
        with runtime.agreement(what):
            runtime.follow_stream()
            device, host = ctypes.c_size_t(), ctypes.c_size_t()
            query = getattr(self.c, f"{what}_bufferSize")
            query(self.handle, *shared, compute, ctypes.byref(device), ctypes.byref(host))
            work = _workspace(runtime.cupy, device.value)
            memory = np.empty(max(1, host.value), np.uint8)
            self._info[...] = 0
        with runtime.agreement(what, blocks=True):
            function = self.c.raw(what)
            status = function(
                self.handle, *shared, *after, compute,
                work.data.ptr, device.value, memory.ctypes.data, host.value, self._info.data.ptr,
            )  # fmt: skip
            runtime.wait(runtime.stream)
            info = int(runtime.cupy.asnumpy(self._info)[0])
            if info < 0 or (status and not info):  # potrf returns INTERNAL_ERROR if INFO is positive
                raise self.c.failure(what, status) if status else StatusError(f"{what}: INFO is {info}")
        infos = runtime.comm.allgather(info)
        return min((each for each in infos if each), default=0)

    def close(self) -> None:
        """Free grids and the handle, last made first. Collective."""
        self._closing.close()


_LARGE = 1 << 28  # bytes of a workspace beside which unused memory counts


def _workspace(cupy: Any, nbytes: int) -> Array:
    """Return memory for a routine; before a large one is made, CuPy's pool gives up what is unused in it. Local."""
    if nbytes >= _LARGE:
        cupy.get_default_memory_pool().free_all_blocks()
    return cupy.empty(max(1, nbytes), np.uint8)


_BLOCK = 512  # of matrices that are moved: the fastest of 256, 512 and 1024 where all ranks still have work


def work_layout(x: MatrixDescriptor, size: int) -> MatrixDescriptor:
    """Return the layout in which a matrix is computed with by ``size`` ranks: its own if cuSOLVERMp takes it. Local.

    It takes F order and square blocks. Blocks of one element have hung, and so have calls on some of the ranks.
    """
    square = x.block[0] == x.block[1] > 1
    if x.order == "F" and square and x.grid.size == size and x.source == x.lead == (0, 0):
        return replace(x, ld=None)
    grid = x.grid if x.grid.size == size else Grid.squarest(size)
    block = min(_BLOCK, max(2, -(-max(x.shape) // (4 * max(grid.nprow, grid.npcol)))))
    return MatrixDescriptor(x.shape, (block, block), grid, dtype=x.dtype, order="F")


class CusolvermpProduct(SpectralProduct):
    """Eigenvalues or singular values by cuSOLVERMp. Making and running one is collective over the context."""

    exponents = range(1)  # near the ends of the range its eigenvectors are wrong

    def __init__(self, engine: Engine, library: Cusolvermp, problem: FactorProblem) -> None:
        super().__init__(engine, problem, work_layout(problem.a, engine.transport.size))
        self._library = library
        library.grid(self._a.grid)
        self.path = "cuSOLVERMp" + (", on moved matrices" if self.moved else "")

    def _queue(self, operands: Operands) -> Found:
        return replace(super()._queue(operands), doubtful=self._problem.d is not None)

    def _eigenvalues(self, a: Array, z: Array | None) -> tuple[int, Array, int]:
        library, work, cupy = self._library, self._a, self._library.runtime.cupy
        n, dtype = work.shape[0], work.dtype
        values = cupy.zeros(n, real_dtype(dtype))
        vectors = new_part(self._engine, work) if z is None else z
        job = ctypes.create_string_buffer(b"V")
        with ExitStack() as closing:
            (of_a, of_v) = (
                (library.address(x, number), 1, 1, library.descriptor(work, x, closing))
                for number, x in enumerate((a, vectors))
            )
            shared = ctypes.addressof(job), FillMode.LOWER, n, *of_a, values.data.ptr, *of_v
            info = library.call("Syevd", dtype, shared)
        found = self._told(values)
        order = np.argsort(found, kind="stable")  # equal ones come in any order
        if z is not None:
            self._sort(work, z, order)
        first, last = self._problem.subset or (0, n - 1)
        return info, found[order[first : last + 1]], first

    def _singular_values(self, a: Array, u: Array | None, vh: Array | None) -> tuple[int, Array]:
        library, work, cupy = self._library, self._a, self._library.runtime.cupy
        (m, n), least = work.shape, min(work.shape)
        values = cupy.zeros(least, real_dtype(work.dtype))
        jobs = [EigMode.NOVECTOR if each is None else EigMode.VECTOR for each in (u, vh)]
        left, right = (replace(work, shape=shape) for shape in ((m, least), (least, n)))
        with ExitStack() as closing:
            of_a, of_u, of_vh = (
                (library.address(x, number), 1, 1, library.descriptor(layout, x, closing))
                if x is not None
                else (None, 1, 1, None)
                for number, (x, layout) in enumerate(((a, work), (u, left), (vh, right)))
            )
            shared = (None, *jobs, m, n, *of_a, values.data.ptr, *of_u, *of_vh)
            info = library.call("Gesvd", work.dtype, shared)
        found = self._told(values)
        order = np.argsort(-found, kind="stable")  # its documentation promises no order
        if u is not None:
            self._sort(left, u, order)
        if vh is not None:
            self._sort(right.T, vh.T, order)
        return info, found[order]

    def _told(self, values: Array) -> NDArray[Any]:
        """Return what the first rank has found, on the host. Collective."""
        found: NDArray[Any] = self._engine.transport.comm.bcast(self._engine.xp.asnumpy(values), 0)
        return found

    def _sort(self, work: MatrixDescriptor, vectors: Array, order: NDArray[np.int64]) -> None:
        """Put column ``order[j]`` of a matrix of vectors into column j. Collective.

        The columns that change their place are packed, and exchanged by way of whole rows: few of a large matrix do.
        """
        if (np.diff(order) == 1).all():
            return
        engine, n = self._engine, len(order)
        columns = [work.cols.globals(part) for part in range(work.grid.npcol)]
        moving = [each[order[each] != each] for each in columns]
        width = max(map(len, moving))
        place = np.zeros(n, np.int64)  # of a column that moves, among those packed
        for part, each in enumerate(moving):
            place[each] = part * width + np.arange(len(each))
        packed = replace(
            work, shape=(work.shape[0], len(moving) * width), block=(work.block[0], width), ld=None
        )
        size = work.grid.size
        rows = replace(packed, block=(-(-work.shape[0] // size), packed.shape[1]), grid=Grid(size, 1))
        few, whole = new_part(engine, packed).T, new_part(engine, rows).T
        part = work.grid.coords(engine.transport.rank)[1]
        here, mine = np.searchsorted(columns[part], moving[part]), few[: len(moving[part])]
        if mine.size:
            mine[...] = vectors.T[engine.xp.asarray(here)]
        move(engine, packed, rows, (few.T, whole.T))
        if whole.size:
            changed = np.concatenate(moving)
            to, of = (engine.xp.asarray(place[each]) for each in (changed, order[changed]))
            whole[to] = whole[of]
        move(engine, rows, packed, (whole.T, few.T))
        if mine.size:
            vectors.T[engine.xp.asarray(here)] = mine


class CusolvermpMethod(SpectralMethod):
    """cuSOLVERMp's syevd and gesvd."""

    name, least = "cusolvermp", 2.0

    def refusal(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands | None
    ) -> str:
        solver = solver_of(session_of(engine))
        if isinstance(solver, str):
            return solver
        is_old = SOLVER_FUNCTIONS["cusolverMpGesvd"].symbol(solver.c.version) is None
        if problem.routine == "svd" and is_old:
            return f"singular values need cuSOLVERMp 0.9 or newer, found {version_text(solver.c.version)}"
        return ""

    def prepare(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands
    ) -> Product:
        solver = solver_of(session_of(engine))
        assert isinstance(solver, Cusolvermp)
        return CusolvermpProduct(engine, solver, problem)


_MOST, _SINGULAR = 16384, 32768  # rows and columns: for singular values what the memory of one GPU holds
_QUICK = 256, 2048
"""Up to how many rows and columns cuSOLVER's gesvd, which iterates, is taken on one GPU, and on several.

On one H200 cuSOLVERMp's needs half of its time at 512, a quarter at 2048 and a fifth at 8192, and twice its memory.
On several it is not known from where on it is faster.
"""


class CusolverProduct(OneRankProduct):
    """Eigenvalues or singular values by cuSOLVER."""

    path = "cuSOLVER on one GPU"
    exponents = range(1)

    def _eigh(self, a: Array, subset: tuple[int, int] | None, *, vectors: bool) -> Array:
        from cupy_backends.cuda.libs import cusolver

        cupy, n, real = self._engine.xp, len(a), real_dtype(a.dtype)
        values, info = cupy.empty(n, real), cupy.zeros(1, np.int32)
        job = cusolver.CUSOLVER_EIG_MODE_VECTOR if vectors else cusolver.CUSOLVER_EIG_MODE_NOVECTOR
        kinds = int(DATA_TYPES[a.dtype.name]), int(DATA_TYPES[real.name])
        handle, parameters = cupy.cuda.device.get_cusolver_handle(), cusolver.createParams()
        try:  # in the place of A, which CuPy's function would copy
            shared = (
                handle, parameters, job, int(FillMode.LOWER), n, kinds[0], int(a.data.ptr), leading(a), kinds[1],
                int(values.data.ptr), kinds[0],
            )  # fmt: skip
            device, host = cusolver.xsyevd_bufferSize(*shared)
            work, memory = _workspace(cupy, device), np.empty(max(1, host), np.uint8)
            cusolver.xsyevd(*shared, int(work.data.ptr), device, memory.ctypes.data, host, int(info.data.ptr))
        finally:
            cusolver.destroyParams(parameters)
        if cupy.asnumpy(info)[0]:
            raise np.linalg.LinAlgError("cuSOLVER's iteration does not converge")
        found = cupy.asnumpy(values)
        order = np.argsort(found, kind="stable")  # nearly equal ones come in any order
        changed = np.flatnonzero(order != np.arange(n))
        if vectors and len(changed):
            to, of = map(cupy.asarray, (changed, order[changed]))
            a.T[to] = a.T[of]
        wanted = slice(None) if subset is None else slice(subset[0], subset[1] + 1)
        return found[order][wanted]

    def _svd(self, a: Array, *, vectors: bool) -> tuple[Array, Array, Array]:
        import cupy

        found = cupy.linalg.svd(a, full_matrices=False, compute_uv=vectors)
        left, values, right = found if vectors else (a, found, a)
        return left, cupy.asnumpy(values), right


class CusolverMethod(OneRankMethod):
    """cuSOLVER's syevd and gesvd."""

    quick = _QUICK

    def _is_fast(self, engine: Engine, problem: FactorProblem) -> bool:
        several = engine.transport.size > 1
        most = self.singular[1] if several else self.most
        late = problem.routine == "svd" and self.quick[several] < max(problem.a.shape) <= most
        return super()._is_fast(engine, problem) and not late


METHODS: tuple[Method, ...] = (
    CusolvermpMethod(),
    CusolverMethod("cusolver", CusolverProduct, _MOST, (sys.maxsize, _SINGULAR)),
)
