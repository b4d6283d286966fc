# SPDX-License-Identifier: Apache-2.0
"""What an engine supplies, and what it prepares.

An engine supplies *local operations* (``Operations``), a *transport* between ranks (``Transport``), and its algorithms,
each a ``Method``. Those that every engine can run are written once, in terms of the first two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..comm import CellArrays, Communicator, Exchange, Side, greatest
from ..dtypes import accumulation_dtype, is_foreign
from ..layout import MatrixDescriptor
from ..layout.pieces import LocalPart, Trapezoid
from .direct import Direct
from .product import Graphs, Product, Workspace
from .request import AnyProblem, LocalArray, Operands, Options

SHARE = 0.8
"""Of the free memory: what products take at most."""

Message = tuple[LocalArray, int]  # a contiguous array and the other rank


class Operations(Protocol):
    """The operations of a rank on its own arrays. Local; on GPUs everything is queued on CuPy's current stream.

    Those of LAPACK take arrays in F order. What they do by default is for ranks that queue nothing.

    Attributes:
        xp: the module of the arrays: numpy or cupy.
        tile: columns of the tiles that cover the diagonal of a triangle.
        band: rows of a triangle that are multiplied together, while other bands are; 0: all are.
        coarser: how many times as large both are for few columns: queueing more takes longer than reading zeros.
        panel: indices of k in a panel of the algorithm "panels".
        lead: indices of k in the first of these panels; 0: as many as in the others.
        solved: equations in a panel of ``trsm``, and in the first one, likewise.
        panel_flops: floating-point operations that take as long as starting a panel's messages.
        stripes: number of parts in which a large matrix is moved and added.
        update_order: memory order of the slabs of rank-k updates, as rows × k; empty: that of the matrix.
        batches: ``gemms`` computes products at equal distances together, at the cost of more temporaries.
        workers: ranks of a node that may compute at the same time: no more than it has cores.
        factor_alone: order up to which one rank of a node factors a matrix alone.
        factor_wait: elements that travel between nodes in the time in which a rank waits for another one.
        own_panels: makes panels that ranks have whole, in arrays that no other rank reads; None: ranks that do not
            share memory have all their matrices on a grid.
        grid_panels: makes panels that the ranks of a process column share, all of which reach each other; None: a rank
            has its panels whole.
        split_panels: makes those of which ranks of several nodes have parts.
        shared_from: elements that each of these ranks has of a panel, at least: for small ones, the host of every rank
            takes longer than its GPU.
        shared_width: columns of a shared panel, or as many as a block has if it is narrower.
        spread: makes few right-hand sides that move while a rank's whole panels stay.
    """

    xp: Any
    tile: int
    band: int
    coarser: int
    panel: int
    lead: int
    solved: tuple[int, int]
    panel_flops: float
    stripes: int
    update_order: str
    batches: bool
    workers: int
    factor_alone: int
    factor_wait: int
    own_panels: Any
    grid_panels: Any
    split_panels: Any
    shared_from: int
    shared_width: int
    spread: Any

    def workspace(self, nbytes: int) -> Workspace:
        """Return ``nbytes`` of scratch memory in the form in which a plan reports it."""

    def scratch(self, name: str, shape: tuple[int, int], dtype: np.dtype, order: str = "C") -> LocalArray:
        """Return an uninitialized array in the buffer ``name``, which all products of the engine share."""

    def stored(self, dtype: np.dtype) -> np.dtype:
        """Return the type of local arrays of ``dtype``: itself, or bytes for types that the array library lacks."""
        return dtype

    def slab_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which copies of operands of ``dtype`` are kept until they are multiplied."""

    def store(self, d: LocalArray, x: LocalArray, dtype: np.dtype) -> None:
        """Write ``x`` into ``d``, whose elements are ``dtype``, rounding each once."""

    def writes(self, dtype: np.dtype) -> bool:
        """Return whether ``gemm`` writes results of ``dtype`` itself, rounding each once."""

    def operand(self, array: LocalArray, dtype: np.dtype, name: str = "") -> LocalArray:
        """Return ``array``, whose elements are ``dtype``, in a type that ``gemm`` takes: itself, or a copy.

        A copy may be in a buffer that the next operand called ``name`` overwrites.
        """

    def multiplies(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which operands of ``dtype`` are multiplied: one that holds their values."""

    def refusal(self, dtype: np.dtype, compute: str | None) -> str:
        """Return why ``gemm`` cannot sum products of ``dtype`` in ``compute``, or an empty string."""

    def gemm(
        self,
        alpha: complex,
        a: LocalArray,
        b: LocalArray,
        beta: complex,
        d: LocalArray,
        compute: str | None = None,
        c: LocalArray | None = None,
    ) -> None:
        """Compute ``d = alpha a b + beta c`` on 2D arrays with one contiguous dimension each.

        ``c`` is ``d`` by default, and may have another type and memory order. With ``beta == 0`` it is never read.
        ``compute`` is what products are summed in, as in ``Options``.
        """

    def gemms(
        self,
        alpha: complex,
        parts: Sequence[tuple[LocalArray, LocalArray, LocalArray, LocalArray | None]],
        beta: complex,
        compute: str | None = None,
    ) -> None:
        """Compute ``d = alpha a b + beta c`` for several a, b, d and c of equal sizes, each as ``gemm`` does."""
        for a, b, d, c in parts:
            self.gemm(alpha, a, b, beta, d, compute, c)

    def concurrently(
        self, tasks: Sequence[Callable[[], None]], *, follows: bool = False, work: Sequence[int] = ()
    ) -> None:
        """Run tasks that call ``gemm`` and the array library; none needs or overwrites the results of another.

        If they are only queued, small ones run at the same time; ``work`` says how large each is. With ``follows``, as
        many tasks of the same sizes are run in this way next, each of which needs the results of the one with its
        number alone. Until then, what is queued waits for the tasks before these, but perhaps not for these.
        """
        for task in tasks:
            task()

    def trsm(self, alpha: complex, a: LocalArray, x: LocalArray, *, lower: bool, unit: bool) -> None:
        """Replace ``x`` by the solution of ``a y = alpha x`` for a triangular ``a``."""

    def solver(
        self, a: LocalArray, x: LocalArray, *, lower: bool, unit: bool, turn: int = 0
    ) -> tuple[LocalArray, Callable[[], None]]:
        """Return where the right-hand sides of ``a x = b`` are to be, perhaps in ``x``, and what solves for ``x`` then.

        What does not depend on them is done now. ``turn``: 0 and 1 take turns if one is made before the solver that was
        made before has run.
        """
        return x, lambda: self.trsm(1, a, x, lower=lower, unit=unit)

    def multiply_part(self, g: Any, runs: Callable[[], Sequence[LocalArray]], diagonal: str) -> bool:
        """Compute a product, a ``Gemm``, in which some elements of each row of the left matrix count, or return False.

        ``runs`` returns for each row from which element on, up to which, and which is on the main diagonal, or -1, all
        in 32 bits; ``diagonal`` is as in ``LeftPart``. No others are read.
        """

    def add(
        self,
        d: LocalArray,
        alpha: complex,
        x: LocalArray,
        beta: complex,
        c: LocalArray,
        part: LocalPart | None,
        *,
        conjugate: bool,
    ) -> None:
        """Write ``alpha x + beta c`` into ``part`` of ``d``, or everywhere if None. With ``conjugate`` take conj(x).

        With ``alpha == 0`` x is not read, with ``beta == 0`` c is not. ``c`` may be ``d``.
        """

    def copy_where(self, dst: LocalArray, src: Any, mask: LocalArray | None) -> None:
        """Copy ``src`` (an array or a number) where ``mask`` is true, or everywhere if there is no mask."""

    def scale_by_power(self, x: LocalArray, exponent: int) -> None:
        """Multiply an array by a power of two, in its place; denormal numbers count, before and after."""

    def factoring(self) -> AbstractContextManager[None]:
        """Return a context for a factorization or a solve, whose products all have sizes of their own."""
        return nullcontext()

    def coarse(self) -> AbstractContextManager[None]:
        """Return a context in which products in single precision are faster, and less exact, if the engine has such."""
        return nullcontext()

    def panel_width(self, order: int) -> int:
        """Return how many columns a panel of a matrix of that order has."""

    def tallest(self, dtype: np.dtype) -> int:
        """Return how many rows the panels of ``getrf`` and ``geqrt`` can have; the same on every rank."""
        return sys.maxsize

    def potrf(self, a: LocalArray, info: LocalArray, first: int) -> None:
        """Replace the lower triangle of the square on top of ``a`` by its Cholesky factor L, and the rest by X L^-H.

        ``info``, one number, becomes 0 or, if the square is not positive definite, ``first`` more than LAPACK's INFO;
        then the rest is undefined. If there is NaN, ``a`` becomes NaN and ``info`` 0.
        """

    def getrf(self, a: LocalArray, pivots: LocalArray, info: LocalArray, first: int) -> None:
        """Replace ``a`` by its LU factors, and write its pivots.

        The pivots count from 1, and ``first`` rows above ``a``. ``info``, one number that is 0, becomes ``first`` more
        than LAPACK's INFO if ``a`` is singular.
        """

    def swap_rows(
        self, a: LocalArray, first: int, last: int, pivots: LocalArray, *, back: bool = False
    ) -> None:
        """Exchange rows ``first`` to ``last`` (half-open) of ``a`` with those in ``pivots`` (from 1)."""

    def geqrt(self, a: LocalArray, t: LocalArray) -> None:
        """Replace ``a``, no wider than high, by R and Householder vectors, and write their T."""

    @property
    def gemqrt(self) -> Any:
        """``gemqrt(v, t, x, adjoint=...)`` replaces x by Q x, or by the adjoint's product with x.

        For the reflectors that ``geqrt`` leaves in v and t; both then take matrices of any shape, and a t of fewer rows
        than columns, which has the Ts of as many columns each, side by side. None: products are used.
        """

    def larft(self, v: LocalArray, tau: LocalArray, t: LocalArray) -> None:
        """Write the T of Householder vectors below the diagonal of ``v``, whose factors are ``tau``."""


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

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start messages, which wait for what was computed so far. Ranks match messages in order. Local.

        The arrays are in use until the transfer is finished.
        """

    def exchange(self, src: Side, dst: Side, dtype: np.dtype) -> Exchange:
        """Return the exchange plan between two layouts; the last few are cached. Local."""

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
        the rest follow in ``finish``.
        """

    def ahead(self, *, follows: bool = False, joins: bool = True) -> AbstractContextManager[None]:
        """Return a context whose moves, if they are queued, run beside what the caller's stream has meanwhile.

        Args:
            follows: they wait for all that was queued before, not only for what was before the end of the last such
                context that ``joins``. The first one of a call must.
            joins: what is queued later waits for them.
        """
        return nullcontext()

    def sum_ranks(self, array: LocalArray) -> None:
        """Replace a contiguous array by its sum over all ranks, in the order of the ranks. Collective."""

    def fence(self) -> None:
        """Wait until every rank's writes to shared buffers are visible to its node. Collective."""

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
        direct: computes calls that need no plan; None if it has none.
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

    def cost(self, engine: Engine, problem: Any, options: Options) -> float:
        """Return its relative time by rule; "auto" takes the lowest, or the first of equals. Local."""
        return self.least

    def prepare(self, engine: Engine, problem: Any, options: Options, operands: Operands) -> Product:
        """Return the product. Collective over the context."""
        raise NotImplementedError
