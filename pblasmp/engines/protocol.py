# SPDX-License-Identifier: Apache-2.0
"""Engines and their algorithms.

An engine supplies local ``Operations``, a ``Transport`` between ranks, and its algorithms, each a ``Method``. Those
that every engine can run are written once, in terms of the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..comm import CellArrays, Communicator, Exchange, Side, greatest
from ..dtypes import accumulation_dtype, is_foreign
from ..layout import MatrixDescriptor
from ..layout.pieces import Trapezoid
from .direct import Direct
from .operations import Operations
from .product import Graphs, Product
from .request import AnyProblem, LocalArray, Operands, Options

SHARE = 0.8
"""Of the free memory: what products take at most."""

_REMEMBERED = 64  # exchange plans: repeated products are not planned anew

Message = tuple[LocalArray, int]  # a contiguous array and the other rank


@dataclass(frozen=True, slots=True)
class Traits:
    """What distinguishes one kind of engine from another.

    Attributes:
        on_gpus: each rank computes on a GPU, whose memory its local arrays are in.
        queues: a run returns when its work is queued: the ranks agree while a product is prepared, but not in its runs.
        records: queued work can be recorded as a CUDA graph.
        overlaps_messages: messages travel on their own while a product is computed.
        fast_products: products are so fast, compared with other work, that a triangle is better filled up for one.
        computes_foreign: its array library also computes with the types that NumPy knows from another package:
            bfloat16 and 8-bit floats.
    """

    on_gpus: bool
    queues: bool
    records: bool
    overlaps_messages: bool
    fast_products: bool
    computes_foreign: bool

    def computes(self, *dtypes: np.dtype) -> bool:
        """Return whether the engine's array library computes with elements of all these types. Local."""
        return self.computes_foreign or not any(map(is_foreign, dtypes))


class Transfer(Protocol):
    """Data in flight."""

    def finish(self) -> None:
        """Make everything available in its place to later computations. Collective over the ranks involved."""


class Transport(Protocol):
    """How ranks exchange data.

    Attributes:
        comm: the ranks.
        rank, size: this rank's number, and how many there are.
        nodes: the ranks of each node, in the order of their first ranks.
        why_not_shared: empty, or why the ranks of a node cannot share memory.
    """

    comm: Communicator
    rank: int
    size: int
    nodes: tuple[tuple[int, ...], ...]
    why_not_shared: str

    @property
    def domains(self) -> Sequence[tuple[int, ...]]:
        """The ranks between which messages are fast: of a node, or GPUs that reach each other's memory."""
        return self.nodes

    @property
    def one_stream(self) -> bool:
        """Whether exchanges that nothing overlaps are queued on one stream of a GPU, NCCL's messages among them."""
        return False

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start messages, which wait for what was computed so far. Ranks match messages in order. Local.

        The arrays are in use until the transfer is finished.
        """

    @cached_property
    def _plans(self) -> Callable[..., Exchange]:
        return lru_cache(_REMEMBERED)(partial(Exchange, self.comm))

    def exchange(self, src: Side, dst: Side, dtype: np.dtype) -> Exchange:
        """Return the exchange plan between two layouts; the last few are cached. Local."""
        return self._plans(src, dst, dtype)

    def gathers(self, src: Side, dst: Side, dtype: np.dtype) -> bool:
        """Return whether a collective makes this exchange, and brings each element to each node once. Local."""
        return False

    def message_bytes(self, exchange: Exchange) -> int:
        """Return how many bytes the messages of an exchange take on every rank until it ends. Local."""
        return 0  # they are cut into small ones

    def start_exchange(
        self,
        exchange: Exchange,
        src: CellArrays,
        dst: CellArrays,
        *,
        conjugate: bool = False,
        slots: int | None = None,
    ) -> Transfer:
        """Start the moves of an exchange plan between this rank's arrays, by the indices of their cells.

        Without ``slots`` all messages are in flight when this returns; otherwise at most that many at a time, and
        the rest follow in ``finish``, before which nothing else is computed.
        """
        return exchange.start(src, dst, conjugate=conjugate, slots=slots)

    def ahead(self, *, follows: bool = False) -> AbstractContextManager[Callable[[], None]]:
        """Return a context whose moves, if they are queued, run beside what the caller's stream has meanwhile.

        It yields a function, "join", from which on what the caller queues waits for the moves so far. The last such
        context of a call must call it.

        Args:
            follows: they wait for all that was queued before, not only for what was before the last "join" or context
                that ``follows``. The first one of a call must.
        """
        return nullcontext(lambda: None)

    def sum_ranks(self, array: LocalArray) -> None:
        """Replace a contiguous array by its sum over all ranks, in the order of the ranks. Collective."""
        self.comm.sum_into(array)

    def fence(self) -> None:
        """Wait until writes to shared buffers are visible to all ranks of a node. Collective over the node."""

    def buffer(self, name: str, nbytes: int, *, shared: bool) -> LocalArray:
        """Return at least ``nbytes`` of the buffer ``name`` as bytes. Collective over the node if ``shared``."""

    def holds(self, name: str, nbytes: int) -> bool:
        """Return whether the shared buffer ``name`` is that large, on all ranks of the node then. Local."""
        return False

    def _available(self) -> int:
        """Return the bytes that this node has available. Collective over the node.

        Memory that buffers already have is used again, and so is available.
        """

    def fits(self, nbytes: int) -> tuple[bool, int]:
        """Return whether every node has ``nbytes`` of memory available, and the least that any node has. Collective."""
        least = -greatest(self.comm, [-self._available()])[0]
        return nbytes <= least, least

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:
        """Return the type in which partial sums of a result of ``dtype`` travel. Local."""
        return accumulation_dtype(dtype)  # never in less precision


_NOTHING: AbstractContextManager[Any] = nullcontext()


class Engine(Protocol):
    """Arrays, operations and transport of one kind of machine. Local unless said otherwise.

    What it does unless an engine does otherwise is for ranks that queue nothing, have no GPU, and never idle.

    Attributes:
        operations: the operations of a rank on its own arrays.
        transport: how ranks exchange data.
        methods: its algorithms; of several with one name that serve a problem the first counts.
        name: "host" or "cublasmp", for reports.
        why: why this engine was chosen.
        traits: what its algorithms and plans need to know of its kind.
        xp: numpy or cupy.
        device: this rank's GPU, with its ``index``; None on the host.
        measured: times of algorithms on this machine; None until the context has read them.
        direct: computes calls that need no plan; None if it has none. Measured times do not matter for these: they are
            those of plans, which such a call costs more to look up than to compute.
    """

    operations: Operations
    transport: Transport
    methods: Sequence[Method]
    measured: Any = None
    direct: Direct | None
    name: str
    why: str
    traits: Traits
    xp: Any
    device: Any = None

    def __repr__(self) -> str:
        return f"<engine {self.name}: {self.why}>"

    @property
    def machine(self) -> str:
        """A description of this rank's processor."""

    @property
    def libraries(self) -> str:
        """Names and versions of the libraries that compute and communicate."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the runs so far did otherwise than planned, for the reports of plans."""
        return ()

    def empty(
        self, shape: tuple[int, int], dtype: np.dtype, order: str, ld: int, *, symmetric: bool = False
    ) -> LocalArray:
        """Return an uninitialized local array with leading dimension ``ld``. Collective if ``symmetric``."""

    def lifetime(self) -> Callable[[], None]:
        """Return a function to be called before arrays that are made from now on are freed.

        On GPUs, later work on the current stream, whose new arrays get their memory, waits for their last use.
        """
        return lambda: None

    def recycle(self, array: LocalArray) -> None:
        """Let later symmetric arrays reuse the memory of this one, which is no longer used. Collective."""
        return

    def take_over(self, array: Any, dtype: np.dtype | None = None) -> LocalArray:
        """Return ``array`` as a local array of this engine, without a copy.

        Args:
            array: the caller's array; 8-bit floats may come as bytes.
            dtype: the expected element type, if it matters.

        Raises:
            ArgumentError: it is not an array that this engine can use in place.
        """

    def at(self, address: int, shape: tuple[int, int], dtype: np.dtype, ld: int = 0) -> LocalArray:
        """Return a C-ordered array over memory that it does not keep, rows ``ld`` entries apart. Local."""

    def put(
        self,
        src: Side,
        values: CellArrays,
        dst: Side,
        arrays: CellArrays,
        dtype: np.dtype,
    ) -> None:
        """Move arrays on the host into local arrays of another layout, converting their type. Collective.

        Args:
            src: the layout of the arrays on the host; if several ranks have some, each has its own cells.
            values: this rank's, by the indices of their cells; copied fastest in memory order ``src.order``.
            dst: the layout to move them to.
            arrays: this rank's local arrays of ``dst``, likewise.
            dtype: their element type.

        Raises:
            MemoryError: a GPU has no room to stage them; raised on every rank.
        """

    def get(
        self,
        src: Side,
        arrays: CellArrays,
        dst: Side,
        values: CellArrays,
        dtype: np.dtype,
    ) -> None:
        """Move local arrays into arrays on the host of the same type and another layout, see ``put``. Collective."""

    def to_host(self, array: LocalArray, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the values as a NumPy array: the array itself if it already is one, or ``out`` filled with them."""

    def like_on_host(self, array: LocalArray) -> NDArray[Any]:
        """Return an array to fill for ``from_host``: the array itself if it is NumPy's, or one like it."""

    def from_host(self, array: LocalArray, values: NDArray[Any]) -> None:
        """Write ``values`` into ``array``."""

    def overlap(self, a: LocalArray, b: LocalArray) -> bool:
        """Return whether two local arrays have an element in common."""

    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which this rank's GPU, if it has one, is the current one; calls take it in their turn."""
        return _NOTHING

    def on_stream(self, handle: int, device: int) -> AbstractContextManager[Any]:
        """Return a context in which work is queued on another library's stream of that GPU."""
        return _NOTHING

    def graphs(self) -> Graphs | None:
        """Return a store for a product's CUDA graphs, None if the engine has no graphs. Local."""
        return None

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        return

    def prepare_move(
        self,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[LocalArray, LocalArray],
        part: Trapezoid | None = None,
    ) -> Product:
        """Return what moves everything, or ``part``, between the local arrays of two matrices of one shape.

        Collective over the context. It moves its operand ``a`` to ``d``, and converts the element type. Elements that
        are not moved keep their values.
        """

    def can_idle(self) -> bool:
        """Return whether all that it holds may stay while nobody uses it. Local."""
        return False

    def idle(self) -> None:
        """Give back what it has changed in this process, until ``resume``, and keep everything else. Local."""
        return

    def resume(self) -> None:
        """Change it again after ``idle``. Local."""
        return

    def close(self) -> None:
        """Free everything. Collective over the context."""


class Method:
    """One way to compute a kind of problem: an algorithm, as a row of an engine's registry.

    Attributes:
        name: what ``algo=`` calls it.
        least: what ``cost`` returns at least. A problem is not viewed while others that cost less may be taken.
        refuses_sizes: whether ``refusal`` may depend on a problem's sizes, as long as every rank has a part of it.
    """

    name: str
    least: float = 0.0
    refuses_sizes: bool = True

    def serves(self, problem: AnyProblem) -> bool:
        """Return whether it is for this kind of problem at all; if not, reports do not list it. Local."""
        raise NotImplementedError

    def view(self, problem: AnyProblem) -> Any:
        """Return the problem in the form that the rest takes, or as a text why it has no such form. Local."""
        return problem

    def refusal(self, engine: Engine, problem: Any, options: Options, operands: Operands | None) -> str:
        """Return why it cannot be taken, or an empty string. Collective over the context.

        It depends only on what the ranks agreed on.

        Args:
            engine: where it would run.
            problem: as ``view`` returns it.
            options: how it is computed.
            operands: the arrays; None if they are not known.
        """
        raise NotImplementedError

    def fits(self, engine: Engine, problem: Any, options: Options) -> bool:
        """Return whether it is worth asking if it takes a problem that differs in sizes only from one before. Local."""
        return True

    def cost(self, engine: Engine, problem: Any, options: Options) -> float:
        """Return its relative time by rule; "auto" takes the lowest, or the first of equals. Local."""
        return self.least

    def prepare(self, engine: Engine, problem: Any, options: Options, operands: Operands) -> Product:
        """Return the product. Collective over the context."""
        raise NotImplementedError
