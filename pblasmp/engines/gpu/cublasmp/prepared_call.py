# SPDX-License-Identifier: Apache-2.0
"""A prepared cuBLASMp routine: descriptors, pointers, temporaries, workspace, the call itself, its CUDA graph."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from ....layout import Grid, MatrixDescriptor
from ....layout.axis import Axis
from ....layout.pieces import Trapezoid
from ...product import Bound, Graphs, Product, Workspace
from ...request import Operands
from ..runtime.graphs import Recordings
from ..types import DATA_TYPES
from .library import Cublasmp, Listening

Array = Any


class PreparedCall(Product, ABC):
    """One routine on this rank's local arrays. Making, growing and closing one is collective over the context.

    A subclass defines the call's arrays in ``_point_at``, and its other arguments in ``_arguments_of_call``. The call
    is pointed at the arrays that it ran on last, until these are released.

    Args:
        routine: the function's name without its prefix.
        grid: the grid whose workspace is used.
        operands: those that ``run`` is expected to get.
        inside: whether this rank calls the routine, or only takes part in the collective steps.

    Attributes:
        workspace: the largest workspace of any rank, plus this rank's temporaries.
        copied_bytes: bytes that are copied to and from temporaries in one run.
    """

    holds_memory = True  # some ranks keep temporaries
    _ends: Callable[[], None] | None = None  # what follows the call itself, on ranks that make it

    def __init__(
        self, library: Cublasmp, routine: str, grid: Grid, operands: Operands, *, inside: bool
    ) -> None:
        self._library, self._lib, self._routine = library, library.c, routine
        self._closing = ExitStack()
        self._planned = operands  # until the call is prepared
        self._bound: Bound | None = None  # whose arrays the call is pointed at
        self._strides = {
            name: None if (x := getattr(operands, name)) is None else x.strides for name in "abcd"
        }
        self._inside = inside
        self._notes: list[str] = []
        self._said: list[str] = []
        self._pointers: dict[str, ctypes.c_void_p] = {}
        self._temporaries: dict[str, Array] = {}
        self._copied: set[str] = set()
        self._before: list[Callable[[], object]] = []
        self._after: list[Callable[[], object]] = []
        self._call: Callable[[], None] | None = None
        self._sizes = self._needs = (0, 0)
        self._workspace = library.workspace(grid)
        self.copied_bytes = 0
        self.workspace = Workspace(0, 0)

    # -- what a subclass defines

    @abstractmethod
    def _point_at(self, operands: Operands) -> None:
        """Point the call at these local arrays, and list the steps before and after it."""

    @abstractmethod
    def _arguments_of_call(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return C's arguments before and after the workspace; descriptors are made here."""

    def _forget(self) -> None:
        """Forget the arrays of the last run."""
        self._before, self._after = [], []

    # -- making

    def _prepare(self) -> None:
        """Make descriptors and query the workspace. Collective; if a rank fails, closes what was made."""
        try:
            self._sizes = device, host = self._library.largest(self._asked_for)
            self.workspace = Workspace(device + sum(x.nbytes for x in self._temporaries.values()), host)
        except Exception:
            self.close()
            raise
        finally:
            del self._planned

    def _asked_for(self) -> tuple[int, int]:
        """Return the bytes of workspace that the call needs on the device and on the host. Local."""
        if not self._inside:
            return 0, 0
        self._point_at(self._planned)
        self._arguments, self._last = self._arguments_of_call()
        device, host = ctypes.c_size_t(), ctypes.c_size_t()
        query = getattr(self._lib, f"cublasMp{self._routine}_bufferSize")
        query(*self._arguments, ctypes.byref(device), ctypes.byref(host), *self._last)
        self._needs = device.value, host.value
        return self._needs

    def _descriptor(self, x: MatrixDescriptor, lld: int) -> int:
        """Return cuBLASMp's descriptor of an F-ordered matrix, which begins where its first block begins."""
        lib, out, grid = self._lib, ctypes.c_void_p(), self._library.grid(x.grid)
        extents = x.shape[0] + x.lead[0], x.shape[1] + x.lead[1]
        dtype = DATA_TYPES[x.dtype.name]
        lib.cublasMpMatrixDescriptorCreate(
            *extents, *x.block, *x.source, max(lld, 1), dtype, grid, ctypes.byref(out)
        )
        self._closing.callback(lib.cublasMpMatrixDescriptorDestroy, out.value)
        assert out.value is not None
        return out.value

    # -- arrays

    def _point(self, name: str, array: Array | None, x: MatrixDescriptor | None = None) -> None:
        """Point an argument at an F-ordered array, or at where the first block of ``x`` would begin. Local."""
        pointer = self._pointers.setdefault(name, ctypes.c_void_p())
        if array is None:
            return
        pointer.value = self._library.address(array, "abcd".index(name))
        if x is not None and array.size and x.lead != (0, 0):
            rows, cols = self._before_first(x)
            pointer.value -= (rows + cols * self._lld(array, x)) * array.itemsize

    def _before_first(self, x: MatrixDescriptor) -> tuple[int, int]:
        """Return the rows and columns of the first block that would come before this rank's local array."""
        prow, pcol = x.grid.coords(self._library.runtime.rank)
        return x.lead[0] * (prow == x.source[0]), x.lead[1] * (pcol == x.source[1])

    def _height(self, x: MatrixDescriptor) -> int:
        """Return the smallest leading dimension that cuBLASMp takes for this rank's array of an F-ordered matrix."""
        if self._library.runtime.rank >= x.grid.size:
            return 1
        axis = Axis(x.shape[0] + x.lead[0], x.block[0], x.source[0], x.grid.nprow)
        return max(1, axis.count(x.grid.coords(self._library.runtime.rank)[0]))

    def _lld(self, array: Array, x: MatrixDescriptor) -> int:
        """Return the leading dimension of an F-ordered local array; for a single column, any legal one."""
        if array.size == 0 or array.shape[1] == 1:
            return self._height(x)
        stride: int = array.strides[1] // array.itemsize
        return stride

    def _fits(self, array: Array, x: MatrixDescriptor) -> bool:
        """Return whether cuBLASMp takes the leading dimension of a local array: it counts the rows before the first."""
        return self._lld(array, x) >= self._height(x)

    def _temporary(self, name: str, x: MatrixDescriptor) -> Array:
        """Return an F-ordered array for this rank's part of ``x``, the same one each time."""
        if name not in self._temporaries:
            inside = self._library.runtime.rank < x.grid.size
            shape = x.local_shape(self._library.runtime.rank) if inside else (0, 0)
            self._temporaries[name] = self._library.empty(shape, x.dtype, "F", self._height(x))
        return self._temporaries[name]

    def _through(
        self, name: str, source: Array, x: MatrixDescriptor, function: Callable[..., Any], why: str
    ) -> Array:
        """Return a temporary for ``x`` that ``function(source, out=temporary)`` writes before each run."""
        out = self._temporary(name, x)
        self._copies(name, out.nbytes, why)
        if out.size:
            self._before.append(lambda: function(source, out=out))
        return out

    def _copies(self, name: str, nbytes: int, why: str) -> None:
        """Note in the report, once, that an operand is copied."""
        if name not in self._copied:
            self._copied.add(name)
            self.copied_bytes += nbytes
            self._notes.append(f"{name} is copied before each run: {why}")

    # -- running

    @property
    def queues(self) -> bool:
        """Whether a run only queues work: always, but the first, on which the ranks agree."""
        return True

    def _logged(self, asked: str) -> str:
        """Return what cuBLASMp has run according to its log; before the first run, what it is asked for."""
        if self._said:
            return "; ".join(self._said)
        return f"{asked}, not run yet" if self._call is None else f"{asked}, cuBLASMp logged nothing"

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Remarks for the plan's report."""
        return tuple(self._notes)

    def bind(self, operands: Operands) -> Bound:
        return _BoundCall(self, operands)

    @cached_property
    def graphs(self) -> Graphs:
        return Recordings(self._library.runtime)

    @property
    def inside(self) -> bool:
        """Whether this rank calls the routine."""
        return self._inside

    def make(self, bound: Bound) -> None:
        """Queue the call on CuPy's current stream. Collective; the first run allocates and reads the log."""
        if self._bound is not bound:
            self._bound = bound
            if self._inside:
                self._point_at(bound.operands)
        if self._call is None or not self._workspace.covers(*self._sizes):
            self._first()
            return
        self._prepare_operands()
        self._make_results()

    def released(self, bound: Bound) -> None:
        """Forget the arrays, if the call is pointed at these. Local."""
        if self._bound is bound:
            self._bound = None
            self._forget()

    def _first(self) -> None:
        """Prepare, then run: all that can fail here comes before any GPU waits for other ranks."""
        self._workspace.grow(*self._sizes)
        what, log = f"cublasMp{self._routine}: the first run", None
        try:
            with ExitStack() as listening:
                with self._library.runtime.agreement(what):
                    self._make_call()
                    self._prepare_operands()
                    if self._inside:
                        log = listening.enter_context(Listening(self._lib))
                with self._library.runtime.queueing(what), listening:
                    self._make_results()
        except Exception:
            self._call = None  # the next run is a first one again
            raise
        self._said = [] if log is None else log.said

    def _make_call(self) -> None:
        if not self._inside:
            self._call = _nothing
            return
        device, host = self._needs
        self._call = self._lib.prepare(
            f"cublasMp{self._routine}",
            *self._arguments, self._workspace.device, device, self._workspace.host, host, *self._last,
        )  # fmt: skip

    def _prepare_operands(self) -> None:
        if self._inside:
            self._library.runtime.follow_stream()
        for action in self._before:
            action()

    def _make_results(self) -> None:
        assert self._call is not None
        self._call()
        if self._ends is not None:
            self._ends()
        for action in self._after:
            action()

    def misfit(self, name: str, array: Array) -> str:
        planned = self._strides[name]
        if planned is None or array.strides == planned:
            return ""
        return f"the local array has strides {array.strides}, the plan is for {planned}"

    def close(self) -> None:
        super().close()
        self._closing.close()


class _BoundCall(Bound):
    """A call and its arrays."""

    _product: PreparedCall

    def run(self, *, replay: bool = True) -> None:
        self._product.make(self)

    _queue = run

    def capture(self) -> Callable[[], None]:
        if self._product.inside:
            return super().capture()
        self.run()
        return _nothing

    def release(self) -> None:
        self._product.released(self)
        super().release()


def _nothing() -> None:
    """Do nothing, on a rank that does not call the routine."""


def columns(array: Array, order: str) -> Array:
    """Return a local array as cuBLASMp sees it: the same memory in F order, transposed if it is in C order."""
    return array.T if order == "C" else array


def part_mask(part: Trapezoid | None, x: MatrixDescriptor, rank: int) -> Array | None:
    """Return which of this rank's elements are in ``part`` of a matrix, as an array on the GPU; None: all. Local.

    It has the order of the matrix: another one takes several times as long to read.
    """
    if part is None or rank >= x.grid.size:
        return None
    import cupy

    rows, cols = map(cupy.asarray, x.global_indices(rank))
    return part.T.mask(cols, rows).T if x.order == "C" else part.mask(rows, cols)
