# SPDX-License-Identifier: Apache-2.0
"""The host engine in a dry run: the planning code and the algorithms of CPU ranks, on arrays without values, ghosts.

Everything that decides who sends what is the code that runs. Only what moves or multiplies values is replaced, by an
entry in a log.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..comm import Side
from ..comm.choice import Serial
from ..engines.arrays import blas_operand
from ..engines.composite import ExchangeMove
from ..engines.host.host_engine import HostEngine
from ..engines.host.host_operations import HostOperations
from ..engines.transport import Transport
from ..errors import ArgumentError
from ..layout import MatrixDescriptor
from ..layout.caches import Hashed
from ..layout.intersection import strided
from ..layout.pieces import LocalPart, Trapezoid
from ..layout.value import Shapes

MOST_BYTES = 1 << 60


class Ghost:
    """An array of which only the shape is known. Views are ghosts, results of arithmetic too; writing does nothing.

    Args:
        view: a view on a few bytes of memory that claims to be as large as the array. It is never read or written:
            NumPy only derives the shapes and addresses of other views from it.
    """

    written: ClassVar[int] = 0
    """Bytes that were written to ghosts so far, by copies and arithmetic."""

    copied: ClassVar[int] = 0
    """Of these, those that ``np.copyto`` wrote."""

    def __init__(self, view: NDArray[Any]) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "strides", "size", "nbytes", "itemsize", "ndim", "flags"):
            return getattr(self._view, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def T(self) -> Ghost:  # noqa: N802
        """The transpose."""
        return Ghost(self._view.T)

    @property
    def real(self) -> Ghost:
        """Real parts."""
        return ghost(self.shape, self._view.real.dtype)

    imag = real

    @property
    def data(self) -> _Data:
        """Where it would be, as CuPy's arrays say it."""
        return _Data(self._view.__array_interface__["data"][0])

    def __getitem__(self, index: Any) -> Ghost:
        if isinstance(index, np.ndarray):  # whole rows
            return ghost((*index.shape, *self.shape[1:]), self.dtype)
        indices = index if isinstance(index, tuple) else (index,)
        # the rows and columns of every element
        if any(isinstance(each, (np.ndarray, list)) for each in indices):
            return ghost(np.broadcast_shapes(*(np.shape(each) for each in indices)), self.dtype)
        return Ghost(self._view[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        part = self[index]
        np.broadcast_shapes(np.shape(part), np.shape(value))  # raises ValueError if they do not fit
        Ghost.written += part.nbytes

    def view(self, dtype: np.dtype) -> Ghost:
        """Return the same bytes as another type."""
        return Ghost(self._view.view(dtype))

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Ghost:
        """Return a view of the same memory, from the first element on, in another shape."""
        return Ghost(as_strided(self._view, shape, strides))

    def diagonal(self, **axes: int) -> Ghost:
        """Return the diagonal."""
        return Ghost(self._view.diagonal(**axes))

    def transpose(self, *axes: int) -> Ghost:
        """Return a view with axes in another order."""
        return Ghost(self._view.transpose(*axes))

    def reshape(self, *shape: Any, order: Any = "C") -> Ghost:
        """Return the same elements in another shape: a view of a contiguous array, a new one of others."""
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if -1 in shape:
            known = math.prod(n for n in shape if n != -1)
            shape = tuple(self.size // max(1, known) if n == -1 else n for n in shape)
        if self.size != math.prod(shape):
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        view = _view_as(self._view, shape, order)
        return ghost(shape, self.dtype, order) if view is None else Ghost(view)

    def astype(self, dtype: Any, copy: bool = True) -> Ghost:
        """Return a copy of another type; itself if it has that and no copy is asked for."""
        return self if not copy and self.dtype == dtype else ghost(self.shape, np.dtype(dtype), self._order)

    def copy(self) -> Ghost:
        """Return a copy."""
        return ghost(self.shape, self.dtype, self._order)

    def conj(self) -> Ghost:
        """Return the conjugate."""
        return self.copy()

    @property
    def _order(self) -> str:
        return "F" if self.ndim == 2 and self.strides[0] < self.strides[1] else "C"

    def _combined(self, other: Any) -> Ghost:
        shape = np.broadcast_shapes(self.shape, np.shape(other))
        return ghost(shape, np.result_type(self.dtype, getattr(other, "dtype", self.dtype)))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _combined

    def _changed(self, other: Any) -> Ghost:
        self[...] = other
        return self

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _changed

    def __len__(self) -> int:
        return int(self.shape[0])

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **_: Any) -> Any:
        if method != "__call__":
            raise NotImplementedError(f"{ufunc.__name__}.{method} of an array without values")
        if out is not None:
            Ghost.written += out[0].nbytes
            return out[0]
        shape = np.broadcast_shapes(*map(np.shape, inputs))
        return ghost(shape, np.result_type(*(x.dtype for x in inputs if hasattr(x, "dtype"))))

    def __array_function__(self, function: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.shape:
            return self.shape
        if function is np.copyto:
            where = kwargs.get("where", True)
            nbytes = args[0].nbytes if where is True else int(where.sum()) * args[0].itemsize
            Ghost.written += nbytes
            Ghost.copied += nbytes
            return None
        if function in (np.tril, np.triu):
            return args[0].copy()
        if function is np.concatenate:
            return ghost((sum(len(x) for x in args[0]),), args[0][0].dtype)
        if function is np.where:
            shape = np.broadcast_shapes(*map(np.shape, args))
            return ghost(shape, np.result_type(*(x.dtype for x in args[1:] if hasattr(x, "dtype"))))
        if function in (np.empty_like, np.zeros_like):
            return ghost(args[0].shape, kwargs.get("dtype") or args[0].dtype, args[0]._order)
        raise NotImplementedError(f"numpy.{function.__name__} of an array without values")


_ASKS_FOR_VIEWS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


def _view_as(array: NDArray[Any], shape: tuple[int, ...], order: Any) -> NDArray[Any] | None:
    """Return a view in another shape, or None if there is none."""
    if not _ASKS_FOR_VIEWS:
        flat = array.flags.c_contiguous if order == "C" else array.flags.f_contiguous
        return array.reshape(shape, order=order) if flat else None
    try:
        return np.reshape(array, shape, order=order, copy=False)
    except ValueError:
        return None


class _Data:
    """An address."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def ghost(shape: int | tuple[int, ...], dtype: Any, order: str = "C", ld: int | None = None) -> Ghost:
    """Return an array without memory. Local.

    Args:
        shape: its extents.
        dtype: its element type.
        order: "C" or "F".
        ld: leading dimension of a matrix, in elements; None: its rows (in F order: columns) touch.

    Raises:
        ArgumentError: it is so large that sums of bytes would not fit into 64 bits.
    """
    dtype, shape = np.dtype(dtype), (shape,) if isinstance(shape, int) else shape
    lengths = list(shape if order == "C" else shape[::-1])
    if ld is not None:
        lengths[-1] = ld
    if dtype.itemsize * math.prod(lengths) > MOST_BYTES:
        extents = " × ".join(map(str, shape))
        raise ArgumentError(
            f"an array of {extents} {dtype.name} is too large: expected at most 2^60 bytes on a rank"
        )
    strides = [dtype.itemsize * math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
    return Ghost(as_strided(np.empty(1, dtype), shape, strides if order == "C" else strides[::-1]))


_PLENTY = 1 << 62
_GOLDEN = 0.6180339887498949  # its multiples are dealt evenly between whole numbers
MOST_EXCHANGES = 1 << 13  # on a rank: each is planned and counted by itself


@dataclass(frozen=True)
class Ranks:
    """Ranks that nobody has started. Local.

    Attributes:
        size: how many.
        per_node: how many of them a node has; the last node may have fewer.
        memory_bytes: memory of a node that buffers may take; None: enough.
        cores: of a node; None: one for each rank.
    """

    size: int
    per_node: int
    memory_bytes: int | None = None
    cores: int | None = None

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        firsts = range(0, self.size, self.per_node)
        return Hashed(Hashed(range(first, min(first + self.per_node, self.size))) for first in firsts)


@dataclass(frozen=True)
class LogEntry:
    """What a rank does with others, as its transport is asked to.

    Attributes:
        kind: "exchange", "messages", "sum" or "fence".
        exchange, slots: of an exchange.
        sends, receives: of messages, (bytes, other rank) of each.
        nbytes: of a sum, what this rank puts in.
    """

    kind: str
    exchange: PlannedExchange | None = None
    slots: int | None = None
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()
    nbytes: int = 0


class PlannedExchange:
    """An exchange of which only the two sides are known: what every rank moves is counted when it is asked for."""

    def __init__(self, src: Side, dst: Side, dtype: np.dtype) -> None:
        self.src, self.dst, self.dtype, self.order = src, dst, dtype, dst.order

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one run."""
        return 0

    copied_bytes = sent_bytes


class _OneOfMany(Serial):
    """The communicator of a rank that is never asked for more than its own."""

    board: Any = Serial()  # its node shares memory, and sees writes in their order


class _DryFlags:
    """Flags of shared panels, which nobody waits for."""

    def done(self, i: int) -> None:
        """Do nothing. Local."""

    wait = done


class _Done:
    """A transfer without data."""

    def done(self) -> bool:
        """Return True. Local."""
        return True

    def finish(self) -> None:
        """Do nothing. Local."""


class Kept:
    """Buffers without memory: what a rank keeps between calls is counted. Making one is local."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._sizes: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """A rank's bytes in all buffers: of one that its node shares its part."""
        return sum(self._sizes.values())

    def get(self, name: str, nbytes: int, *, shared: bool) -> Ghost:
        """Return bytes without memory. Local."""
        own = -(-nbytes // self._per_node) if shared else nbytes
        self._sizes[name] = max(self._sizes.get(name, 0), own)
        return ghost((max(1, nbytes),), np.uint8)


class DryTransport(Transport):
    """See ``engines.protocol.Transport``; every request is written into ``log``."""

    why_not_shared = ""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.comm: Any = _OneOfMany()
        self._ranks = ranks
        self.rank, self.size, self.nodes = rank, ranks.size, ranks.nodes
        self.log: list[LogEntry] = []
        self.kept = Kept(min(ranks.size, ranks.per_node))
        self._exchanges = 0

    def exchange(self, src: Side, dst: Side, dtype: np.dtype) -> Any:
        """Return an exchange between two layouts. Local.

        Raises:
            ArgumentError: there are too many of them to be counted one by one.
        """
        self._exchanges += 1
        if self._exchanges > MOST_EXCHANGES:
            raise ArgumentError(
                f"a problem of more than {MOST_EXCHANGES // 2} panels is too large to be counted panel by panel"
            )
        return PlannedExchange(src, dst, dtype)

    def start(self, sends: Sequence[tuple[Ghost, int]], receives: Sequence[tuple[Ghost, int]]) -> _Done:
        """Write messages down. Local."""
        made = (tuple((array.nbytes, rank) for array, rank in each) for each in (sends, receives))
        self.log.append(LogEntry("messages", sends=next(made), receives=next(made)))
        return _Done()

    def progress(self, flags: Any) -> _DryFlags:  # noqa: ARG002
        """Return flags of shared panels. Local."""
        return _DryFlags()

    def start_exchange(
        self, exchange: Any, src: Any, dst: Any, *, conjugate: bool = False, slots: int | None = None
    ) -> _Done:  # fmt: skip
        """Write an exchange down. Local."""
        del src, dst, conjugate
        self.log.append(LogEntry("exchange", exchange, slots))
        return _Done()

    def sum_ranks(self, array: Ghost) -> None:
        """Write a sum over the ranks down. Local."""
        self.log.append(LogEntry("sum", nbytes=array.nbytes))

    def fence(self) -> None:
        """Write a meeting of all ranks down. Local."""
        self.log.append(LogEntry("fence"))

    arrive = fence

    def buffer(self, name: str, nbytes: int, *, shared: bool) -> Any:
        """Return bytes without memory; with it what panels are accompanied by: no fault, no pivot. Local."""
        if name == "panel facts":
            return np.zeros(max(1, nbytes), np.uint8)
        return self.kept.get(f"transport {name}", nbytes, shared=shared)

    def _available(self) -> int:
        return self._ranks.memory_bytes or _PLENTY


FLOPS: dict[str, Callable[[int, int, int], int]] = {
    "gemm": lambda m, n, k: 2 * m * n * k,
    "trsm": lambda m, n, k: m * n * k,
    "potrf": lambda m, n, k: m * n * k // 3,
    "getrf": lambda m, n, k: 2 * m * n * k - (m + n) * k**2 + 2 * k**3 // 3,
    "geqrt": lambda m, n, k: 2 * m * n * k - 2 * n * n * k // 3,
    "gemqrt": lambda m, n, k: (4 * m - k) * n * k,
}
"""Operations of a kernel. Source: LAPACK Working Note 41."""


def pivots_anywhere(first: int, stop: int, rows: int) -> NDArray[np.int64]:
    """Return pivots of columns, from 1, that are dealt evenly over the rows below the diagonal. Local."""
    columns = np.arange(first, stop)
    return columns + 1 + (_GOLDEN * (columns + 1) % 1 * (rows - columns)).astype(np.int64)


_OF_NUMPY = (
    "asarray", "where", "multiply", "add", "abs", "maximum", "tril", "triu", "conjugate", "eye", "less_equal", "sqrt",
)  # fmt: skip


class DryOperations(HostOperations):
    """The host's operations, which count instead of computing.

    Attributes:
        shapes: how often a kernel was run, by name, type, m, n and k, as of ``Traffic``.
        flops: floating-point operations of products and solves so far, four times as many of complex types.
    """

    xp: Any = SimpleNamespace(
        **{name: getattr(np, name) for name in _OF_NUMPY},
        max=lambda _array, axis=None: 1.0,  # noqa: ARG005 - as of a matrix that is neither tiny nor singular
        min=lambda _array, axis=None: -1.0,  # noqa: ARG005
        sum=lambda _array, axis=None: 1.0,  # noqa: ARG005
        flatnonzero=lambda _array: np.empty(0, np.int64),
        lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=strided)),
        empty=lambda shape, dtype, order="C": ghost(shape, dtype, order),
        zeros=lambda shape, dtype, order="C": ghost(shape, dtype, order),
        empty_like=np.empty_like,
    )

    def __init__(self, cores: int, kept: Kept) -> None:
        super().__init__("scipy", kept, cores)  # type: ignore[arg-type]
        self.flops = 0
        self.shapes: Shapes = Counter()

    def _count(self, kernel: str, m: int, n: int, k: int, dtype: np.dtype, flops: int | None = None) -> None:
        flops = FLOPS[kernel](m, n, k) if flops is None else flops
        self.flops += flops * (4 if dtype.kind == "c" else 1)
        if flops:
            self.shapes[kernel, dtype.name, m, n, k] += 1

    def gemm(
        self, alpha: complex, a: Any, b: Any, beta: complex, d: Any, compute: Any = None, c: Any = None
    ) -> None:  # fmt: skip
        """Count a product. Local."""
        del alpha, beta, compute, c
        if (a.shape[0], b.shape[1]) != d.shape or a.shape[1] != b.shape[0]:
            raise ValueError(f"cannot multiply {a.shape} by {b.shape} to {d.shape}")
        (m, n), k = d.shape, a.shape[1]
        if blas_operand(d)[0] == "T":  # BLAS computes its transpose
            m, n = n, m
        self._count("gemm", m, n, k, a.dtype)

    def trsm(self, alpha: complex, a: Any, x: Any, *, lower: bool, unit: bool) -> None:
        """Count a solve. Local."""
        del alpha, a, lower, unit
        m, n = x.shape
        self._count("trsm", m, n, m, x.dtype)

    def potrf(self, a: Any, info: Any, first: int) -> None:
        """Count the factorization of a panel. Local."""
        del info, first
        n = a.shape[1]
        self._count("potrf", n, n, n, a.dtype)
        if len(a) > n:
            self.trsm(1, a[:n], a[n:].T, lower=True, unit=False)

    def getrf(self, a: Any, pivots: Any, info: Any, first: int) -> None:
        """Count the factorization of a panel. Local."""
        del pivots, info, first
        m, n = a.shape
        self._count("getrf", m, n, min(m, n), a.dtype)

    def swap_rows(self, a: Any, first: int, last: int, pivots: Any, *, back: bool = False) -> None:
        """Count exchanges of rows. Local."""
        del pivots, back
        rows, cols = max(0, last - first), a.shape[1]
        if rows and cols:
            kernel = "swap", a.dtype.name, rows, cols, 0
            self.shapes[kernel] += 1

    def exchanged_rows(self, pivots: Any, first: int, rows: int) -> tuple[Any, Any]:
        """Return what the pivots of a panel exchange if they are anywhere in its columns. Local."""
        return super().exchanged_rows(pivots_anywhere(first, first + len(pivots), rows), first, rows)

    def geqrt(self, a: Any, t: Any) -> None:
        """Count the factorization of a panel, or of each panel of a matrix and what it does to the rest. Local."""
        (m, n), width = a.shape, len(t)
        for first in range(0, min(m, n), width):
            rows, cols = m - first, min(width, m - first, n - first)
            self._count("geqrt", rows, cols, cols, a.dtype)
            if n > first + cols:
                self.gemqrt(
                    a[first:, first : first + cols], t[:cols], a[first:, first + cols :], adjoint=True
                )

    def gemqrt(self, v: Any, t: Any, x: Any, *, adjoint: bool) -> None:
        """Count products with the reflectors of a panel, or of each panel of a matrix. Local."""
        del adjoint
        (m, n), count, width = x.shape, v.shape[1], len(t)
        for first in range(0, count, width):
            self._count("gemqrt", m - first, n, min(width, count - first), x.dtype)

    def block_reflector(self, products: Any, tau: Any, t: Any) -> None:
        """Count the products that it is. Local."""
        del tau, t
        n = len(products)
        self._count("gemm", n, n, n, products.dtype, n**3 // 3)

    def larft(self, v: Any, tau: Any, t: Any) -> None:
        """Count the product that it is. Local."""
        del tau, t
        m, n = v.shape
        self._count("gemm", n, n, m, v.dtype, m * n * n)

    def add(
        self, d: Any, alpha: complex, x: Any, beta: complex, c: Any, part: LocalPart | None, *, conjugate: bool
    ) -> None:  # fmt: skip
        """Count the bytes that are written. Local."""
        del alpha, x, beta, c, conjugate
        if part is None:
            d[...] = d
            return
        for piece in part.pieces(self.tile):
            d[piece.here] = d[piece.here]


class DryEngine(HostEngine):
    """The engine of one of many CPU ranks that nobody has started. Making one is local.

    Args:
        ranks: all of them.
        rank: which one this is.
    """

    _transport: type[DryTransport] = DryTransport
    _operations: type[DryOperations] = DryOperations

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.why = "a dry run"
        self.transport: Any = self._transport(ranks, rank)
        self.operations: Any = self._operations(ranks.cores or ranks.per_node, self.transport.kept)
        self.xp: Any = self.operations.xp

    def to_host(self, array: Any, out: Any = None) -> Any:  # noqa: ARG002
        """Return the array. Local."""
        return array

    def overlap(self, a: Any, b: Any) -> bool:  # noqa: ARG002
        """Return False: no two arrays of a dry run share memory. Local."""
        return False

    def empty(
        self, shape: tuple[int, int], dtype: np.dtype, order: str, ld: int, *, symmetric: bool = False
    ) -> Any:
        """Return a local array without memory. Local."""
        del symmetric
        return ghost(shape, dtype, order, ld)

    def prepare_move(
        self,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[Any, Any],  # noqa: ARG002
        part: Trapezoid | None = None,
    ) -> ExchangeMove:
        """Prepare a move by messages. Local."""
        return ExchangeMove(self, source, target, part)

    def close(self) -> None:
        """Do nothing. Local."""
