# SPDX-License-Identifier: Apache-2.0
"""The host engine in a dry run: the planning code and the algorithms of CPU ranks, on arrays without values, ghosts.

Everything that decides who sends what is the code that runs. Only what moves or multiplies values is replaced, by
counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
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
from ..engines.dense.factor_panels import FactorPanels, SharedPanels
from ..engines.host.host_engine import HostEngine
from ..engines.host.host_operations import HostOperations
from ..engines.protocol import Transport
from ..errors import ArgumentError
from ..layout.caches import Hashed
from ..layout.intersection import strided
from ..layout.pieces import LocalPart
from ..layout.value import Shapes

MOST_BYTES = 1 << 60


class Ghost(np.ndarray):
    """An array of which only the shape is known: on a few bytes of memory, which it claims to be larger.

    Its views are NumPy's, and ghosts. What would make another array makes a ghost, and what would write is counted: the
    memory is neither read nor written. NumPy takes it for read-only.
    """

    written: ClassVar[int] = 0
    """Bytes that were written to ghosts so far, by copies and arithmetic."""

    copied: ClassVar[int] = 0
    """Of these, those that ``np.copyto`` wrote."""

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(each, (np.ndarray, list)) for each in indices):
            return super().__getitem__(index)
        # the rows and columns of every element, or whole rows
        found = np.broadcast_shapes(*map(np.shape, indices))
        return ghost(found if isinstance(index, tuple) else found + self.shape[1:], self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        part = self[index]
        np.broadcast_shapes(np.shape(part), np.shape(value))  # raises ValueError if they do not fit
        Ghost.written += part.nbytes

    def __repr__(self) -> str:
        return f"ghost({self.shape}, {self.dtype.name})"

    __str__ = __repr__

    @property  # type: ignore[misc]
    def imag(self) -> Any:
        """Imaginary parts."""
        return self.real

    def reshape(self, *shape: Any, order: Any = "C") -> Any:  # type: ignore[override]
        """Return the same elements in another shape: a view of a contiguous array, a new one of others."""
        if self.flags.c_contiguous if order == "C" else self.flags.f_contiguous:
            return super().reshape(*shape, order=order)
        return ghost(np.broadcast_to(False, self.size).reshape(*shape).shape, self.dtype, order)

    def astype(self, dtype: Any, copy: bool = True) -> Any:  # type: ignore[override]
        """Return a copy of another type; itself if it has that and no copy is asked for."""
        return self if not copy and self.dtype == dtype else _like(self, dtype)

    def copy(self) -> Any:  # type: ignore[override]
        """Return a copy."""
        return _like(self)

    conj = copy

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **_: Any) -> Any:
        if method != "__call__":
            raise NotImplementedError(f"{ufunc.__name__}.{method} of an array without values")
        if out is not None:
            Ghost.written += out[0].nbytes
            return out[0]
        return _combined(inputs)

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
            return _combined(args)
        if function is np.flatnonzero:  # of what would be faults
            return np.empty(0, np.int64)
        if function in (np.empty_like, np.zeros_like):
            return _like(*args, **kwargs)
        raise NotImplementedError(f"numpy.{function.__name__} of an array without values")


def _like(x: Ghost, dtype: Any = None) -> Ghost:
    """Return a new array of the shape and the memory order of ``x``."""
    return ghost(x.shape, dtype or x.dtype, "F" if x.ndim == 2 and x.strides[0] < x.strides[1] else "C")


def _combined(inputs: Any) -> Ghost:
    """Return the result of arithmetic element by element."""
    shape = np.broadcast_shapes(*map(np.shape, inputs))
    return ghost(shape, np.result_type(*(x.dtype for x in inputs if hasattr(x, "dtype"))))


def ghost(shape: int | tuple[int, ...], dtype: Any, order: str = "C", ld: int | None = None) -> Ghost:
    """Return an array without memory; ``ld`` is a matrix's leading dimension in elements, None if lines touch. Local.

    ArgumentError if it is so large that sums of bytes would not fit into 64 bits.
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
    if order == "F":
        strides.reverse()
    made: Any = as_strided(np.empty(1, dtype).view(Ghost), shape, strides, subok=True, writeable=False)
    return made  # type: ignore[no-any-return]


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

    @cached_property
    def known(self) -> dict[Hashable, tuple[int, int, Shapes]]:
        """What the updates of panels count, by their extents: see ``DryOperations.repeat``."""
        return {}


class _OneOfMany(Serial):
    """The communicator of a rank that is never asked for more than its own."""

    board: Any = Serial()  # its node shares memory, and sees writes in their order


class _Done:
    """A transfer without data, or flags of shared panels that nobody waits for."""

    def done(self, *_about: Any) -> bool:
        """Return True. Local."""
        return True

    def finish(self, *_about: Any) -> None:
        """Do nothing. Local."""

    wait = finish


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
    """See ``engines.protocol.Transport``; what is asked of it is counted.

    Attributes:
        calls: how often the rank took part in "messages", in a "sum" over the ranks and in a "fence".
        sent, received: bytes of messages to and from each other rank.
        messages: how many messages there were to each.
        moves: the exchanges of each operand, by their cells, order, bytes of an element and slots.
        kept: the buffers.
    """

    why_not_shared = ""
    cuts = True
    """Messages of an exchange with few at a time are cut."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.comm: Any = _OneOfMany()
        self._ranks = ranks
        self.rank, self.size, self.nodes = rank, ranks.size, ranks.nodes
        self.calls: Counter[str] = Counter()
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.messages: Counter[int] = Counter()
        self.moves: dict[tuple[int, int, str, int, int | None, bool], list[tuple[Side, Side]]] = {}
        self.kept = Kept(min(ranks.size, ranks.per_node))
        self._exchanges = 0

    def exchange(self, src: Side, dst: Side, dtype: np.dtype) -> Any:
        """Return the two sides of an exchange: what every rank moves is counted when it is asked for. Local.

        ArgumentError if there are too many of them to be counted one by one.
        """
        self._exchanges += 1
        if self._exchanges > MOST_EXCHANGES:
            raise ArgumentError(
                f"a problem of more than {MOST_EXCHANGES // 2} panels is too large to be counted panel by panel"
            )
        return SimpleNamespace(
            src=src, dst=dst, dtype=dtype, order=dst.order, sent_bytes=0, copied_bytes=0, copies=None
        )

    def start(self, sends: Sequence[tuple[Ghost, int]], receives: Sequence[tuple[Ghost, int]]) -> _Done:
        """Count messages. Local."""
        self.calls["messages"] += 1
        for array, rank in sends:
            self.sent[rank] += array.nbytes
            self.messages[rank] += 1
        for array, rank in receives:
            self.received[rank] += array.nbytes
        return _Done()

    def progress(self, flags: Any) -> _Done:  # noqa: ARG002
        """Return flags of shared panels. Local."""
        return _Done()

    def start_exchange(
        self, exchange: Any, src: Any, dst: Any, *, conjugate: bool = False, slots: int | None = None
    ) -> _Done:  # fmt: skip
        """Note an exchange. Local."""
        del src, dst, conjugate
        x = exchange.src, exchange.dst
        cut = slots if self.cuts else None
        copies = exchange.copies is None  # else what is a rank's own is in its place already
        key = id(x[0].cells), id(x[1].cells), x[1].order, exchange.dtype.itemsize, cut, copies
        self.moves.setdefault(key, []).append(x)
        return _Done()

    def sum_ranks(self, array: Ghost) -> None:  # noqa: ARG002
        """Count a sum over the ranks. Local."""
        self.calls["sum"] += 1

    def fence(self) -> None:
        """Count a meeting of all ranks. Local."""
        self.calls["fence"] += 1

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
    "flatnonzero",
)  # fmt: skip


class Repeats(FactorPanels):
    """Panels whose updates are counted once for all of the same extents: there are as many as pairs of panels."""

    def subtract(self, operations: Any, panel: Any, k: int, blocks: Sequence[Sequence[int]]) -> None:
        """Count what a panel, or several, contribute to others. Local."""
        extents = "subtract", panel.shape[1], tuple((each[0], each[-1]) for each in blocks)
        operations.repeat(extents, super().subtract, operations, panel, k, blocks)

    def eliminate(self, operations: Any, panel: Any, k: int, group: Sequence[int]) -> None:
        """Count the update of panels with L of another one. Local."""
        extents = "eliminate", k, len(group), group[-1] == self.shape.panels - 1
        operations.repeat(extents, super().eliminate, operations, panel, k, group)

    def reflect(self, operations: Any, panel: Any, k: int, x: Any, *, adjoint: bool) -> None:
        """Count the products of columns with the reflectors of a panel. Local."""
        extents = "reflect", k, x.shape
        operations.repeat(extents, super().reflect, operations, panel, k, x, adjoint=adjoint)


class _DrySharedPanels(Repeats, SharedPanels):
    """Panels in the memory of a node."""


class DryOperations(HostOperations):
    """The host's operations, which count instead of computing.

    Attributes:
        shapes: how often a kernel was run, by name, type, m, n and k, as of ``Traffic``.
        flops: floating-point operations of products and solves so far, four times as many of complex types.
    """

    shared_panels: Any = _DrySharedPanels

    xp: Any = SimpleNamespace(
        **{name: getattr(np, name) for name in _OF_NUMPY},
        max=lambda _array, axis=None: 1.0,  # noqa: ARG005 - as of a matrix that is neither tiny nor singular
        min=lambda _array, axis=None: -1.0,  # noqa: ARG005
        sum=lambda _array, axis=None: 1.0,  # noqa: ARG005
        lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=strided)),
        empty=lambda shape, dtype, order="C": ghost(shape, dtype, order),
        zeros=lambda shape, dtype, order="C": ghost(shape, dtype, order),
        empty_like=np.empty_like,
    )

    def __init__(self, ranks: Ranks, kept: Kept) -> None:
        super().__init__("scipy", kept, ranks.cores or ranks.per_node)  # type: ignore[arg-type]
        self.flops = 0
        self.shapes: Shapes = Counter()
        self._known = ranks.known

    def repeat(self, extents: Hashable, count: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Count something by ``count``, or as before if its extents were counted already. Local."""
        flops, written = self.flops, Ghost.written
        if extents in self._known:
            flops, written, shapes = self._known[extents]
            self.flops += flops
            Ghost.written += written
            for shape, times in shapes.items():
                self.shapes[shape] += times
            return
        before, self.shapes = self.shapes, Counter()
        count(*args, **kwargs)
        self._known[extents] = self.flops - flops, Ghost.written - written, self.shapes
        before.update(self.shapes)
        self.shapes = before

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
        """Count the bytes of the rows that change places. Local."""
        del pivots, back
        Ghost.written += 2 * max(0, last - first) * a.shape[1] * a.itemsize

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
    """The engine of one of many CPU ranks that nobody has started. Making one is local."""

    _transport: type[DryTransport] = DryTransport
    _operations: type[DryOperations] = DryOperations

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.why = "a dry run"
        self.transport: Any = self._transport(ranks, rank)
        self.operations: Any = self._operations(ranks, self.transport.kept)
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

    def close(self) -> None:
        """Do nothing. Local."""
