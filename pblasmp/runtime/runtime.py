# SPDX-License-Identifier: Apache-2.0
"""Runtime: what a context is below its public face. It owns the communicator, the engine and what is made with them."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Container
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar
from weakref import WeakValueDictionary

from .. import __version__, _core
from ..comm import (
    Agreement,
    Communicator,
    Launched,
    Ready,
    RepeatedCalls,
    Running,
    closing,
    gather_on,
    is_agreed,
    launch_on,
    leave,
    most_ranks,
    open_boards,
    vote_on,
    watch,
    where_others_wait,
    wrap,
)
from ..engines.arrays import empty_part
from ..engines.choose import EngineName, choose_engine
from ..engines.direct import Direct
from ..engines.protocol import Engine
from ..engines.request import LocalArray
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, LayoutError, counted, short_repr
from ..layout import MatrixDescriptor
from ..layout.caches import MOST_BYTES, limit_caches
from ..layout.grid import integer
from ..logs import logger
from ..resources import rank_share
from ..tuning.measurements import Measured, machine_of, read_file, tuning_file
from .kept_plans import Closable, KeptPlans

if TYPE_CHECKING:
    from typing_extensions import Self

Matrix = TypeVar("Matrix")

MANY_PLANS = 1000
_CACHES_OF_MACHINE = 1 << 29  # bytes of one kind of cache, of all ranks of a machine
_GRACE_SECONDS = 1.0
LITTLE = 1 << 20  # bytes of the kept plans of a context that idles
_by_name: WeakValueDictionary[str, Any] = WeakValueDictionary()
_groups: dict[tuple[tuple[tuple[str, str], int], ...], int] = {}
"""Groups of processes, numbered in the order in which this one first met them."""


class Runtime(Generic[Matrix]):
    """The ranks that compute together, and the engine they compute with: what every module below ``Context`` needs.

    Its names are for the modules of pblasmp; users have those of ``Context``. Collective over ``comm``.

    Attributes:
        matrix_type: makes matrices, as ``matrix_type(runtime, descriptor, local)``.
        comm: the communicator of the engine; ``comm.rank`` and ``comm.size`` are the context's.
        control: the communicator on which the ranks agree.
        engine: computes.
        calls: what the ranks have agreed on, by call.
        kept: plans for repeated calls.
        parallel_calls: tensor-parallel calls that have been made, by the kinds of their arrays.
        name: names it in this process; operators of PyTorch take texts.
        made_at: where in the caller's program.
        made_of: the communicator given by the caller.
    """

    matrix_type: Callable[[Any, MatrixDescriptor, LocalArray], Matrix]

    def __init__(self, comm: Any, engine: EngineName, nccl: object) -> None:
        self._open = self._idles = False
        caller = sys._getframe(2)  # of the subclass that is public
        self.made_at = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        self.made_of = comm
        self.control = wrap(comm)
        self.control.channel.name = f"the context made at {self.made_at}"
        self.comm = self.control.split([range(self.control.size)])
        self._children: list[Closable] = []
        self._adopted = 0
        self.calls = RepeatedCalls()
        self.parallel_calls: dict[Any, Any] = {}
        watch(self, self.control)
        try:
            self.engine: Engine = choose_engine(engine, self.comm, nccl)
            sharing = most_ranks(self.comm.locations())
            self.kept = KeptPlans(self.engine, sharing)
            limit_caches(rank_share(MOST_BYTES, _CACHES_OF_MACHINE, sharing))
            self.control.patient = self.comm.patient
            open_boards(self.comm, self.control)
            if self.engine.traits.queues and self.control.board is not None:
                self.control.board.wait_longer()
            self._begin()
            ranks = counted(self.comm.size, "rank")
            logger.info("engine %s on %s: %s", self.engine.name, ranks, self.engine.why)
        except BaseException as error:
            if is_agreed(error, self.comm):
                if hasattr(self, "engine"):
                    self.engine.close()
                self.comm.free()
                self.control.free()
            else:
                leave(self.control, error)
            raise
        self._open = True

    def _begin(self) -> None:
        """Read what was measured on this machine, and find a name. Collective."""
        self.engine.measured = _measured(self.comm, self.engine)
        self.name = _free_name(self.engine.name, self.comm)
        _by_name.pop(self.name, None)  # as the last one: a rank may still have a closed context of that name
        _by_name[self.name] = self

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the open context that has this name, or else one with the same ranks and engine. Local.

        Compiled code holds the name as a constant, and may be run again in a later context.

        Raises:
            ClosedError: there is none.
        """
        found: Self | None = _by_name.get(name)
        if found is None or not found._open:
            ranks = name.partition("#")[0]
            alike = (ctx for ctx in cls.all_open() if ctx.name.partition("#")[0] == ranks)
            found = next(alike, found)
        if found is None:
            raise ClosedError(
                f"no open context is {name.partition(' #')[0]}: open one with the same ranks and engine to run code "
                "that was compiled for it"
            )
        found.check_open()
        return found

    @classmethod
    def all_open(cls) -> list[Self]:
        """Return the open contexts of this process, the last made first. Local."""
        return [ctx for ctx in reversed(list(_by_name.values())) if ctx._open]

    @classmethod
    def where_others_call(
        cls,
        call: str,
        first: Runtime[Any] | None = None,
        among: Container[Runtime[Any]] | None = None,
        limit: float = math.inf,
    ) -> Self | None:
        """Return the open context in which a call is made that this rank cannot tell by its arguments.

        With several it is the one in which other ranks wait in this call; if all ask, that which comes ``first`` in the
        arguments, else the largest, of these the first. With one of this rank alone it is that one if nobody waits
        within a second. Collective over the context; local with a ``limit``: None if after so many seconds nobody
        waits. None if no context is open, or none of those that it is ``among``.
        """
        known = [ctx for ctx in cls.all_open() if among is None or ctx in among]
        contexts = sorted(known, key=lambda ctx: ctx.size)[::-1]
        several = [ctx for ctx in contexts if ctx.size > 1 and not ctx.control.channel.cause]
        alone = next((ctx for ctx in contexts if ctx.size == 1), None)
        if not several or (len(several) == 1 and alone is None and limit == math.inf):
            return next(iter(several or contexts), None)
        channels = [ctx.control.channel for ctx in several]
        of_first = channels[0] if first is None or first.size == 1 else first.control.channel
        met = where_others_wait(
            channels, of_first, call, limit if alone is None else min(limit, _GRACE_SECONDS)
        )
        return next((ctx for ctx in several if ctx.control.channel is met), alone)

    def is_awaited(self, call: str, limit: float) -> bool:
        """Return whether within ``limit`` seconds other ranks wait in a call for this one, or ask, too. Local."""
        channel = self.control.channel
        if self.size == 1 or where_others_wait([channel], channel, limit=limit) is None:
            return False
        return not channel.waiting() or channel.is_awaited(call)  # in this order: others come meanwhile

    @property
    def is_usable(self) -> bool:
        """Whether collective calls are possible, as far as this rank knows."""
        return self._open and not self.control.channel.cause and not self.control.gone()

    @property
    def is_closed(self) -> bool:
        """Whether the ranks have closed it, or are about to; not if it is broken."""
        return not (self._open or self.control.channel.cause)

    @property
    def rank(self) -> int:
        """This process's rank in the context."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    @property
    def direct_on_host(self) -> Direct | None:
        """What computes calls without a plan that only CPU ranks have; None on GPUs, and if a rank is gone."""
        if self.engine.traits.on_gpus or self.control.gone():
            return None
        if self.control.channel.cause or not self._open:
            self.check_open()
        return self.engine.direct

    def __repr__(self) -> str:
        state = "" if self._open else ", closed"
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, engine {self.engine.name}{state})"

    # -- the end of the context

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or is_agreed(error, self.control) or self.size == 1:
            self.close()
        else:
            self.fail(error)

    def close(self) -> None:
        """Give back everything: plans (last made first), the engine, the communicator. Collective; idempotent.

        Collective over the context.

        Raises:
            ClosedError: the context is broken, and this rank has not raised an exception that said so.
        """
        self._end(may_idle=False)

    def idle(self, *, wanted: bool) -> bool:
        """Close, but keep all that it holds for ``resume`` if every rank wants to and holds little. Collective.

        Return whether it idles. For its users it is closed, until it resumes.
        """
        self._end(may_idle=wanted and self.engine.can_idle() and self.kept.nbytes <= LITTLE)
        return self._idles

    def resume(self) -> None:
        """Open again after ``rest``. Collective."""
        self._idles = False
        with Running(self.control, "opening the context again"):  # what one rank raises is told to all
            self.engine.resume()
            self._begin()
        self._open = True

    def _end(self, *, may_idle: bool) -> None:
        channel = self.control.channel
        channel.look()
        has_all = self._open or self._idles
        if has_all and (channel.raised or self.control.gone()):  # nothing collective can follow
            self._open = self._idles = False
            self.engine.idle()
            channel.leave(0)
            return
        if not has_all:
            return
        try:
            everyone, idles = closing(self.control, here=True, may_idle=may_idle)
        except BaseException as error:
            self._open = not is_agreed(error, self.control)  # otherwise fail() has to tell the others
            raise
        self._open = False
        self._idles = everyone and idles
        if not everyone:  # some rank dropped it without closing it, and is ending
            return
        if self._idles:
            self.engine.idle()
            return
        self.kept.log()
        with Running(self.control, "close"), ExitStack() as last_first:  # every step, even if one fails
            last_first.callback(self.control.free)
            last_first.callback(self.comm.free)
            last_first.callback(self.engine.close)
            for child in self._children:
                last_first.callback(child.close)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an exception that this rank leaves with; end them if they do not react. Local."""
        if not self._open:
            return
        self._open = False
        self.engine.idle()
        if not is_agreed(error, self.control):
            leave(self.control, error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of a layer works with the same ranks

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a Context cannot be pickled, nor can a matrix, plan or layer that holds it: it belongs to these "
            "processes. Write a matrix with save(), or gather() its values; of a layer, save its state_dict()"
        )

    def __del__(self) -> None:
        if getattr(self, "_open", False) and self.size > 1 and not self.control.channel.raised:
            warnings.warn(f"{self!r} made at {self.made_at} was never closed", ResourceWarning, stacklevel=1)
        elif hasattr(self, "control"):
            # its memory goes with the context; the other ranks are still told of the end
            self.control.board = None

    # -- what every collective call does

    def agreement(self, call: str, *, nests: bool = False) -> Agreement:
        """Return the agreement that every collective call of this context begins with. Local.

        Args:
            call: what the ranks call, in messages.
            nests: the engine agrees inside: see ``Agreement``.

        Raises:
            ClosedError: the context is closed.
        """
        self.check_open()
        return Agreement(self.control, call, nests=nests)

    def running(
        self, call: str, *, checks: bool = True, computes: bool = True, on_device: bool = True
    ) -> Running:
        """Return the block that goes around every collective call, including its agreements. Local.

        ``with ctx.running("matmul"):`` An exception that only this rank sees inside breaks the context on every rank;
        what the ranks agreed to raise does not.

        Raises:
            ClosedError: the context is closed.
        """
        self.check_open()
        return Running(self.control, call, checks=checks, computes=computes, on_device=on_device)

    def all_repeat(self, call: str, number: int, ready: bool) -> bool | None:
        """Return whether all ranks are ready to repeat the call of that number in the same way. Collective.

        Collective over the context, inside ``running``. None if they do not all repeat that call; False if they cannot
        tell.
        """
        if self.size == 1:
            return ready
        if self.control.board is None:
            return False if vote_on(self.control, call, number) else None
        told = gather_on(self.control, call, number, [ready])
        return None if told is None else all(each[0] for each in told)

    def launch_again(self, call: str, number: int, ready: Ready) -> Launched:
        """Queue at once what this rank has ready if all ranks do: see ``launch_on``. Collective over the context."""
        self.check_open()
        return launch_on(self.control, call, number, ready)

    def check_open(self) -> None:
        """Raise ClosedError if the context is closed. Local."""
        if self.control.channel.cause:
            raise self.control.channel.error()
        if not self._open:
            raise ClosedError(f"this context, made at {self.made_at}, is closed")

    def check_rank(self, rank: int, name: str) -> None:
        """Raise ArgumentError unless ``rank`` is a rank of the context. Local."""
        if integer(rank, name, 0, ArgumentError) >= self.size:
            raise ArgumentError(f"{name}: expected a rank from 0 to {self.size - 1}, got {short_repr(rank)}")

    def check_descriptor(self, descriptor: MatrixDescriptor) -> None:
        """Raise ArgumentError unless ``descriptor`` fits this context. Local."""
        if not isinstance(descriptor, MatrixDescriptor):
            raise ArgumentTypeError(f"descriptor: expected a MatrixDescriptor, got {short_repr(descriptor)}")
        if descriptor.grid.size > self.size:
            needed = counted(descriptor.grid.size, "rank")
            raise LayoutError(f"descriptor: a grid of {descriptor.grid} needs {needed}, got {self.size}")

    def coords(self, descriptor: MatrixDescriptor) -> tuple[int, int] | None:
        """Return this rank's coordinates in the grid, None outside it. Local."""
        grid = descriptor.grid
        return grid.coords(self.rank) if self.rank < grid.size else None

    def cells(self, descriptor: MatrixDescriptor, local: LocalArray) -> dict[int, LocalArray]:
        """Return this rank's part of a matrix by the index of its cell, as an exchange takes it. Local."""
        return {self.rank: local} if self.rank < descriptor.grid.size else {}

    def allocate(self, descriptor: MatrixDescriptor, *, symmetric: bool = False) -> Matrix:
        """Return an uninitialized matrix without agreement. Local; collective if ``symmetric``."""
        return self.matrix(descriptor, empty_part(self.engine, descriptor, symmetric=symmetric))

    def matrix(self, descriptor: MatrixDescriptor, local: LocalArray) -> Matrix:
        """Return the matrix over a local array. Local."""
        return self.matrix_type(self, descriptor, local)

    # -- plans

    def take_over(self, child: Closable) -> int:
        """Close ``child`` when this context closes; return its number, the same on every rank. Local."""
        self._children.append(child)
        self._adopted += 1
        if len(self._children) == MANY_PLANS:
            with self.agreement("keeping plans"):  # warnings may be errors
                warnings.warn(
                    f"{self!r} made at {self.made_at} has {MANY_PLANS} open plans: close those that are no longer used",
                    ResourceWarning,
                    stacklevel=3,
                )
        return self._adopted

    def release(self, child: Closable) -> None:
        """Forget a child that has closed itself. Local."""
        self._children.remove(child)


def _free_name(engine: str, comm: Communicator) -> str:
    """Return a name for a context: the same as an earlier one's that is closed and had these ranks. Collective.

    Compiled code has the name as a constant: what PyTorch keeps of another version is not taken. Two open contexts
    never have one name.
    """
    processes = tuple((each.machine, each.process) for each in comm.locations())
    group = _groups.setdefault(processes, len(_groups) + 1)
    ranks = f"pblasmp {__version__}, rank {comm.rank} of {comm.size} on {engine}, group {group} #"
    return next(
        name
        for number in itertools.count(1)
        if (found := _by_name.get(name := f"{ranks}{number}")) is None or not found._open
    )


def _measured(comm: Communicator, engine: Engine) -> Measured:
    """Return, on every rank, the times of algorithms on this machine that rank 0 knows. Collective."""
    with Agreement(comm, "Context"):
        mine = engine.machine, engine.libraries
    machine = machine_of(comm, *mine)
    entries = None
    with Agreement(comm, "Context: measured times"):  # an unusable file is a warning, which may be an error
        if comm.rank == 0 and (why := _core.stale()):
            warnings.warn(f"small calls are slow: {why}", RuntimeWarning, stacklevel=1)
        if comm.rank == 0:
            entries = [entry for entry in read_file(tuning_file()) if entry.machine == machine]
    return Measured(machine, {entry.bucket: entry for entry in comm.bcast(entries)})
