# SPDX-License-Identifier: Apache-2.0
"""One product as cuBLASMp sees it: descriptors, attributes, workspace, and the call, prepared."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from ...bindings import MatmulAlgoType, MatmulAttribute, MatmulEpilogue, Operation, ctype, version_text
from ...errors import ClosedError, UnsupportedError
from ...layout import ColumnMajorProduct, MatmulProblem, MatrixDescriptor
from ..base import Options, Workspace
from . import faults
from .log import Listening
from .types import ALGORITHMS, DATA_TYPES, compute_type, scale_dtype

if TYPE_CHECKING:
    from .engine import CublasmpEngine

__all__ = ["CublasmpProduct", "LocalProduct", "automatic"]

Array = Any

_SMALL_FLOPS = 2 * 2048**3  # a rank's share; below it cutting the product up costs more than it hides


def automatic(problem: MatmulProblem, version: int) -> str:
    """Return the algorithm that ``algo="auto"`` stands for. Local.

    Without overlap small products are fastest, and so is AllReduce at every size where there is no multicast.
    Source: benchmarks/README.md.
    """
    if version < MatmulAlgoType.NO_OVERLAP.since or problem.scheme == "gemm":
        return "default"
    small = problem.flops < _SMALL_FLOPS * problem.d.grid.size
    return "no_overlap" if small or problem.scheme == "ar" else "default"


class LocalProduct:
    """D = beta C: no product at all, for alpha = 0, an extent of 0, or a rank without a part. Local."""

    sent_bytes = copied_bytes = 0
    workspace = Workspace(0, 0)
    notes: tuple[str, ...] = ()

    def __init__(self, beta: complex, path: str) -> None:
        self._beta, self.path = beta, path

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:  # noqa: ARG002 - neither is read
        """Write beta C into D."""
        if self._beta == 0 or c is None:
            d[...] = 0
        else:
            d[...] = c
            d *= self._beta

    def misfit(self, name: str, array: Array) -> str:  # noqa: ARG002
        """Any array of the planned layout will do."""
        return ""

    def capture(self, a: Array, b: Array, c: Array | None, d: Array) -> Callable[[], None]:  # noqa: ARG002
        """There is no call to record."""
        raise UnsupportedError("a CUDA graph: this product calls nothing")

    def close(self) -> None:
        """Nothing is held."""


class CublasmpProduct:
    """A product on this rank's part of D's grid. Making, growing and closing one is collective over the context."""

    def __init__(
        self, engine: CublasmpEngine, problem: MatmulProblem, options: Options, arrays: Sequence[Array | None]
    ) -> None:
        self._engine, self._lib, self._problem, self._options = engine, engine.library, problem, options
        self._form = form = problem.column_major()
        self._asked = automatic(problem, engine.version) if options.algo == "auto" else options.algo
        self._closing = ExitStack()
        self._notes: list[str] = []
        self._said: list[str] = []
        self._pointers: dict[str, ctypes.c_void_p] = {}
        self._temporaries: dict[str, Array] = {}
        self._copied: set[str] = set()
        self.copied_bytes = 0
        self._sizes = (0, 0)
        self._bound = tuple(arrays)
        self._before: list[Callable[[], None]] = []
        self._call: Callable[[], None] | None = None
        for x in (form.a, form.b, form.d):
            engine.grid(x.grid)
        self._workspace = engine.workspace(self._form.d.grid)
        self._in_grid = engine.rank < form.d.grid.size
        self.sent_bytes = received_bytes(form, problem, engine.rank) if self._in_grid else 0
        if problem.scheme == "ag":
            gathered = arrays[0] if form.swapped else arrays[1]
            self._notes.append(
                _gathered_note("A" if form.swapped else "B", engine.share(gathered, form.d.grid))
            )
        try:
            device, host = engine.largest(lambda: self._prepared(arrays) if self._in_grid else (0, 0))
        except Exception:
            self.close()
            raise
        self.workspace = Workspace(device, host)

    @property
    def path(self) -> str:
        """What cuBLASMp logged that it ran; before the first run, what it is asked for."""
        if self._said:
            return "; ".join(self._said)
        return (
            f"{self._asked}, not run yet"
            if self._call is None
            else f"{self._asked}, of which cuBLASMp logged nothing"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Anything a reader of the plan's report should know."""
        return tuple(self._notes)

    # -- making

    def _prepared(self, arrays: Sequence[Array | None]) -> tuple[int, int]:
        """Create descriptors and return the workspace that the call wants, in bytes on the device and on the host."""
        form, options, problem = self._form, self._options, self._problem
        orders = [problem.a.order, problem.b.order, problem.d.order, problem.d.order]
        if form.swapped:
            orders[:2] = orders[1::-1]
        self._bind(*arrays)
        a, b, c, d = self._sources
        scale = scale_dtype(form.d.dtype)
        self._alpha, self._beta = np.array(options.alpha, dtype=scale), np.array(options.beta, dtype=scale)
        descriptors = {
            name: self._descriptor(x, leading(array, order))
            for name, x, array, order in zip(
                "abcd", (form.a, form.b, form.c, form.d), (a, b, c, d), orders, strict=True
            )
            if x is not None and array is not None
        }
        if c is None and self._engine.version < 800:  # C may not be NULL: D stands in, and is not read
            self._pointers["c"], descriptors["c"] = self._pointers["d"], descriptors["d"]
        m, n = (problem.n, problem.m) if form.swapped else (problem.m, problem.n)
        p = self._pointers
        self._arguments = (
            self._engine.handle, self._matmul_descriptor(), m, n, problem.k,
            self._alpha.ctypes.data, p["a"], 1, 1, descriptors["a"], p["b"], 1, 1, descriptors["b"],
            self._beta.ctypes.data, p["c"], 1, 1, descriptors.get("c"), p["d"], 1, 1, descriptors["d"],
        )  # fmt: skip
        device, host = ctypes.c_size_t(), ctypes.c_size_t()
        self._lib.cublasMpMatmul_bufferSize(*self._arguments, ctypes.byref(device), ctypes.byref(host))
        self._needs = device.value, host.value
        return self._needs

    def _descriptor(self, x: MatrixDescriptor, lld: int) -> int:
        """Create cuBLASMp's descriptor of an F-ordered matrix."""
        lib, out, dtype = self._lib, ctypes.c_void_p(), DATA_TYPES[x.dtype.name]
        grid = self._engine.grid(x.grid)
        lib.cublasMpMatrixDescriptorCreate(*x.shape, *x.block, *x.source, lld, dtype, grid, ctypes.byref(out))
        self._closing.callback(lib.cublasMpMatrixDescriptorDestroy, out.value)
        assert out.value is not None
        return out.value

    def _matmul_descriptor(self) -> int:
        form, lib, options, out = self._form, self._lib, self._options, ctypes.c_void_p()
        lib.cublasMpMatmulDescriptorCreate(ctypes.byref(out), compute_type(form.a.dtype, options.compute))
        self._closing.callback(lib.cublasMpMatmulDescriptorDestroy, out.value)
        attributes: dict[MatmulAttribute, int] = {
            MatmulAttribute.TRANSA: Operation[form.op_a],
            MatmulAttribute.TRANSB: Operation[form.op_b],
        }
        if ALGORITHMS[self._asked] is not MatmulAlgoType.DEFAULT:
            attributes[MatmulAttribute.ALGO_TYPE] = ALGORITHMS[self._asked]
        if options.comm_sms is not None:
            attributes[MatmulAttribute.COMMUNICATION_SM_COUNT] = options.comm_sms
        if self._problem.scheme == "ar":
            attributes[MatmulAttribute.EPILOGUE] = MatmulEpilogue.ALLREDUCE
        travels = self._communication_type()
        if travels is not None:
            attributes[MatmulAttribute.COMMUNICATION_TYPE] = DATA_TYPES[travels.name]
        for attribute, value in attributes.items():
            buffer = ctype(attribute.c_type)(value)
            size = ctypes.sizeof(buffer)
            lib.cublasMpMatmulDescriptorSetAttribute(out.value, attribute, ctypes.byref(buffer), size)
        assert out.value is not None
        return out.value

    def _communication_type(self) -> np.dtype | None:
        """Return the type in which partial sums travel, where that is not the library's own choice, float32."""
        if self._problem.scheme not in ("rs", "ar"):
            return None
        asked = self._options.comm_dtype
        wanted = asked or self._form.d.dtype
        if wanted == scale_dtype(self._form.d.dtype):
            return None
        if self._engine.version >= MatmulAttribute.COMMUNICATION_TYPE.since:
            return wanted
        if asked is not None:
            raise UnsupportedError(
                f"comm_dtype: cuBLASMp has it since 0.8, found {version_text(self._engine.version)}"
            )
        self._notes.append("partial sums travel in float32: cuBLASMp can choose since 0.8")
        return None

    # -- running

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        """Queue the product on CuPy's current stream. Collective; the first run allocates and listens to the log."""
        bound = self._bound
        if a is not bound[0] or b is not bound[1] or c is not bound[2] or d is not bound[3]:
            self._bind(a, b, c, d)
        if self._call is None or not self._workspace.covers(*self._sizes):
            self._first()
            return
        self._engine.follow_stream()
        for action in self._before:
            action()
        self._call()

    def capture(self, a: Array, b: Array, c: Array | None, d: Array) -> Callable[[], None]:
        """Record the product as a CUDA graph and return what replays it on CuPy's current stream. Collective."""
        import cupy

        self.run(a, b, c, d)  # what is done but once is done before recording
        if not self._in_grid:
            return _nothing
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
            try:
                self.run(a, b, c, d)
            finally:
                graph = stream.end_capture()
        generation = self._workspace.generation

        def replay() -> None:
            if generation != self._workspace.generation:
                raise ClosedError("the workspace has been replaced since this graph was made: make it again")
            graph.launch()

        return replay

    def _first(self) -> None:
        self._sizes = (self.workspace.device_bytes, self.workspace.host_bytes)
        self._workspace.grow(*self._sizes)
        if not self._in_grid:
            self._call = _nothing
            return
        device, host = self._needs
        call = self._lib.prepare(
            "cublasMpMatmul", *self._arguments, self._workspace.device, device, self._workspace.host, host
        )
        self._call = call
        self._engine.follow_stream()
        for action in self._before:
            action()
        with Listening(self._lib) as log:
            self._call()
        self._said = log.said

    def _bind(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        """Point the call at these local arrays; what has to be copied on the way goes through temporaries."""
        import cupy

        self._bound = (a, b, c, d)
        self._before = []
        form = self._form
        if form.swapped:
            a, b = b, a
        if form.conj_a:
            a = self._through("B" if form.swapped else "A", a, cupy.conjugate)
        if form.conj_b:
            b = self._through("A" if form.swapped else "B", b, cupy.conjugate)
        if self._options.beta == 0:
            c = None
        elif c is not None and c is not d and (form.copy_c or faults.needs_c_in_d(d)):
            c = self._into_d(c, d, cupy.positive)
        self._sources = (a, b, c, d)
        for name, array in zip("abcd", self._sources, strict=True):
            pointer = self._pointers.setdefault(name, ctypes.c_void_p())
            if array is None:
                continue
            pointer.value = self._engine.address(array)

    def _through(self, name: str, source: Array, function: Callable[..., Any]) -> Array:
        """Return a temporary that ``function(source)`` is written to before each run."""
        if name not in self._temporaries:
            self._temporaries[name] = self._engine.empty_like(source, source.dtype)
            self._copies(name, source.nbytes, "it is conjugated without a transpose")
        out = self._temporaries[name]
        self._before.append(lambda: function(source, out=out))
        return out

    def _into_d(self, c: Array, d: Array, copy: Callable[..., Any]) -> Array:
        """Return D, to which C is copied before each run."""
        self._copies("C", c.nbytes, "it does not lie in memory as D does")
        self._before.append(lambda: copy(c, out=d))
        return d

    def _copies(self, name: str, nbytes: int, why: str) -> None:
        """Tell the report, once, that an operand is copied."""
        if name not in self._copied:
            self._copied.add(name)
            self.copied_bytes += nbytes
            self._notes.append(f"{name} is copied before each run: {why}")

    def misfit(self, name: str, array: Array) -> str:
        """Return why ``array`` cannot stand in for the planned operand ``name``, or an empty string."""
        planned = self._bound["abcd".index(name)]
        if planned is None or array.strides == planned.strides:
            return ""
        return f"the local array has strides {array.strides}, the plan is for {planned.strides}"

    def close(self) -> None:
        """Destroy the descriptors, last made first."""
        self._closing.close()


def _gathered_note(name: str, symmetric: bool) -> str:
    if symmetric:
        return f"{name}, which is gathered, lies in symmetric memory"
    return (
        f"{name}, which is gathered, is copied first; from ctx.empty(..., symmetric=True) it is read in place"
    )


def _nothing() -> None:
    """Run on a rank outside the grid."""


def leading(array: Array, order: str) -> int:
    """Return the leading dimension of a local array, in elements."""
    contiguous, other = (1, 0) if order == "C" else (0, 1)
    tight: int = max(1, array.shape[contiguous])
    if array.size == 0 or array.shape[other] == 1:
        return tight
    stride: int = array.strides[other] // array.itemsize
    return max(tight, stride)


def received_bytes(form: ColumnMajorProduct, problem: MatmulProblem, rank: int) -> int:
    """Return the bytes that a rank must get from others at least: its share of op(A) and op(B), or of partial sums."""
    if problem.scheme in ("rs", "ar"):
        parts = form.d.grid.size
        rows, cols = form.d.local_shape(rank)
        return (parts - 1) * rows * cols * form.d.dtype.itemsize
    rows, cols = form.d.local_shape(rank)
    needed = (rows + cols) * problem.k
    held = [x.local_shape(rank) for x in (form.a, form.b)]
    return max(0, needed - sum(r * c for r, c in held)) * form.a.dtype.itemsize
