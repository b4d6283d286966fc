# SPDX-License-Identifier: Apache-2.0
"""How a direct call runs on GPUs: what is queued is bound to addresses once, and kept for the same call.

After one vote of the ranks on a number, a call queues at most four things: a kernel that writes what others need of
this rank's operands into their memory, a barrier on the stream, products, and for a triangle of the result one kernel
that writes the tiles on its diagonal. There are two sets of slabs. A rank that writes into one has queued that behind
the barrier of the call before, which its peers reached after they had read this set for the last time.

Between hosts the first kernel packs what others need, NCCL sends or gathers it, and a second kernel puts what has come
into the slabs: one set is enough, since a stream has one call after the other. That is for small calls, which no graph
records.

What a call queues depends on how its operands are dealt out, and on addresses. The former is the same for many calls of
a program that walks over a matrix: these have one template, whose addresses are stand-ins. A new call queues what its
template has, at its own addresses. What a call queues that is made again is placed at them and kept, for each set of
slabs: it only votes and queues, from the fourth time on as a graph, by the compiled core. Nothing that is kept holds an
array.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .... import _core
from ...._core import objects
from ....comm import Communicator, Launched, break_off, gather_on, launch_on
from ...direct import FAMILIES, ROUTINE_NUMBERS, Asked, Direct, Held, RoutineForm, host_address
from ...direct.asked import NARROW, SlabSets
from ...direct.sub_matrix import UnfitError
from ...product import RecordedGraph
from ..kernels.compiler import stand_in
from .builder import SCRATCH, SLABS_OF, CallBuilder, Computer, Queue, QueuedCall, Scalars, Template
from .computers import added, matmul, sided, triangular, updated

if TYPE_CHECKING:
    from ..runtime.gpu import Gpu

_REMEMBERED = 1024  # calls that are kept bound, a few kB each
_USES_BEFORE_GRAPHS = 3  # of a set of slabs
_MOST_GRAPHS = 512
_LEAST = 1 << 24  # bytes of a set of slabs
_MOST = 512 << 20  # bytes of a set of slabs: a panel of 512 columns and 65536 rows, and its half
_SLABS, _TRIANGLE = "direct slabs", "direct triangle"
_OK, _UNKNOWN = map(_core.STATUSES.index, ("OK", "UNKNOWN"))


class GpuDirect(Direct):
    """Direct calls of GPU ranks: reductions, moves and factorizations take the ordinary way. Local to make.

    Args:
        gpu: this rank's GPU.
        current: returns CuPy's current stream.
        follow: lets work move to CuPy's current stream.
        core: which reads the calls; None: a rank has none, and no call is direct.
        record: returns a CUDA graph of what a function queues on CuPy's current stream; None: there are no graphs.

    Attributes:
        sets: the sets of slabs.
    """

    def __init__(
        self,
        gpu: Gpu,
        current: Callable[[], Any],
        follow: Callable[[], None],
        core: _core.Core | None,
        record: Callable[[Callable[[], None]], RecordedGraph] | None = None,
    ) -> None:
        self.gpu, self._current, self._follow, self._record = gpu, current, follow, record
        self._core, self._held = core, objects.slot(Held, "_at")
        self._single = gpu.size == 1
        self.sets = SlabSets(self._reserve, _LEAST, _MOST)
        self._calls: dict[_Key, QueuedCall] = {}
        self._templates: dict[_Key, Template | None] = {}
        self._graphs = 0  # that the calls have
        self._scalars: Scalars = {}

    def _reserve(self, nbytes: int) -> None:
        """Make room for two sets of slabs; one, if messages are sent of it. Collective over the context."""
        if not self.gpu.why_no_windows:
            self.gpu.reserve(_SLABS, 2 * nbytes)
            return
        with self.gpu.agreement("direct calls"):
            self.gpu.scratch(_SLABS, nbytes)

    # -- the call

    def run(self, control: Communicator, asked: Asked | RoutineForm, args: Sequence[Any] = ()) -> bool | None:
        """See ``Direct``. Collective over the context."""
        look = self._looked(asked, args)
        if look is None:
            return None
        channel, name, number = control.channel, asked.call, look.item(objects.NUMBER)
        stream, told = self._current(), "unfit"
        key = stream.ptr, look[objects.BASES :].tobytes()
        call = self._calls.get(key)
        if call is None and self._templates.get(_pattern_of(key), key) is None:  # known to be unfit
            return None
        if call is not None:
            told = self._launched(control, name, number, call, stream)
            if told in ("queued", "unlike"):
                return told == "queued"
        channel.take_turn(name)
        try:
            stream = self._current()  # of this rank's GPU, which is the current one now
            if stream.is_capturing():  # a replay would not take turns with the sets of slabs
                return None
            if stream.ptr != key[0]:
                key = stream.ptr, key[1]
                call = self._calls.get(key)
            if call is None:
                call = self._made(stream, key, look, asked, args)
            if call is None or call.template.nbytes > self.sets.most:
                return None
            if told != "unready" and not self._single and gather_on(control, name, number, (0,)) is None:
                return False
            if not self.sets.fit(call.template.nbytes):
                return False
            channel.runs += 1
            self._queue(call, stream)
        except BaseException as error:
            break_off(control, error, name)
            raise
        finally:
            channel.end_turn()
        return True

    def _queue(self, call: QueuedCall, stream: Any) -> None:
        """Queue a call on which the ranks have voted. Local."""
        self._follow()
        half = self.sets.half
        memory = self._memory(call.template)
        self.gpu.products.solver(stream.ptr)
        if not call.uses[half]:  # most calls on new sub-matrices come once
            call.template.run(self._bases(call, half, memory))
            call.uses[half] = 1
        else:
            queue = self._bound(call, half, memory)
            for function, arguments in queue:
                function(*arguments)
            call.uses[half] += 1
            self._note(call, half, queue, stream)
        if call.template.nbytes and not call.template.sends:
            self.sets.turn()

    def _looked(self, asked: Asked | RoutineForm, args: Sequence[Any]) -> Any:
        """Return what the core finds in a call, ``look`` of arguments.h; None if it is not for direct calls. Local."""
        if self._core is None:
            return None
        # Its own memory: another thread's call may be read meanwhile.
        look: Any = np.empty(objects.LOOK, np.int64)
        if isinstance(asked, Asked):
            objects.ASKS.pack_into(look, 0, 0, id(asked), self._held, ROUTINE_NUMBERS[asked.routine])
        else:
            objects.ASKS.pack_into(look, 0, asked.address, id(args), self._held, 0)
        place = ctypes.c_void_p(host_address(look))
        found = self._core.asked_look(place)
        if found == _UNKNOWN:
            if isinstance(asked, Asked):
                for part in asked[2:6]:
                    if part is not None:
                        operator.index(part[0])  # it has an address in the core then
            elif not asked.learn(args, _unlearned):
                return None
            found = self._core.asked_look(place)
        return look if found == _OK else None

    def _launched(
        self, control: Communicator, name: str, number: int, call: QueuedCall, stream: Any
    ) -> Launched:
        """Launch a call's graph if all ranks have one; return what ``launch_on`` does. Collective over the context."""
        graph = call.graphs[self.sets.half]
        ready = None if graph is None else graph.at_once(stream.ptr)
        if ready is None:
            return "unfit"
        told = launch_on(control, name, number, ready)
        if told == "queued":
            control.channel.runs += 1
            if call.template.nbytes:
                self.sets.turn()
        return told

    def _note(self, call: QueuedCall, half: int, queue: list[Queue], stream: Any) -> None:
        """Record a graph of what a call queues with a set of slabs if it is made often. Local."""
        graph = call.graphs[half]
        if self._record is None or call.template.sends or call.uses[half] < _USES_BEFORE_GRAPHS:
            return
        if graph is not None and graph.current:
            return
        if graph is None:
            if self._graphs == _MOST_GRAPHS:
                return
            self._graphs += 1

        def queued() -> None:
            here = self._current()
            self.gpu.products.solver(here.ptr)
            if call.template.scratch:  # the graph keeps it
                self.gpu.scratch(_TRIANGLE, call.template.scratch)
            for function, arguments in queue:
                function(
                    *(arguments if len(arguments) > 1 else (here,))
                )  # kernels are given the stream alone

        call.graphs[half] = self._record(queued)
        self.gpu.products.solver(stream.ptr)

    def _made(
        self, stream: Any, key: _Key, look: Any, asked: Asked | RoutineForm, args: Sequence[Any]
    ) -> QueuedCall | None:
        """Return a new call by the template of its pattern; None if it is not for direct calls. Local."""
        pattern = _pattern_of(key)
        if pattern not in self._templates:
            if len(self._templates) >= _REMEMBERED:
                self._forget()
                self._templates.clear()
                self._scalars.clear()
            if not isinstance(asked, Asked):
                asked = asked.asked(args, *_words_in(look))
            offsets = look[objects.OFFSETS : objects.BASES].tolist()
            self._templates[pattern] = self._template(stream, asked, offsets)
        template = self._templates[pattern]
        if template is None:
            return None
        if len(self._calls) >= _REMEMBERED:
            self._forget()
        bases = dict(enumerate(look[objects.BASES : objects.PATTERN].tolist(), 1))
        call = self._calls[key] = QueuedCall(template, bases)
        return call

    def _forget(self) -> None:
        """Keep no calls any more, and no graphs of them. Local."""
        self._calls.clear()
        self._graphs = 0

    def _template(self, stream: Any, asked: Asked, offsets: list[int]) -> Template | None:
        """Return the template of a call's pattern, None if it is not for direct calls: of 16 bits, only products are.

        Args:
            stream: CuPy's.
            asked: the call.
            offsets: of A, B, C and D in their matrices, in bytes; -1 for what is absent, or is D.
        """
        if asked.d[0].pattern.itemsize == NARROW and asked.routine != "matmul":
            return None
        parts: list[Any] = []
        for number, (part, offset) in enumerate(zip(asked[2:6], offsets, strict=True), 1):
            if part is not None and offset >= 0:
                address = stand_in(number, part[0].address + offset) - offset
                part = (part[0].moved(address), *part[1:])
            parts.append(part)
        for i, offset in enumerate(offsets):
            if parts[i] is not None and offset < 0:
                parts[i] = parts[-1]
        a, b, c, d = parts
        asked = asked._replace(a=a, b=b, c=c, d=d)
        try:
            builder = CallBuilder(self.gpu, self._scalars, asked)
            return builder.template(_COMPUTERS[FAMILIES[asked.routine]], stream)
        except UnfitError:
            return None

    def _memory(self, template: Template) -> _Memory:
        """Return where scratch memory and the ranks' sets of slabs are now, and a number of the latter's memory.

        Every call looks it up, which marks the memory that a user's graph records.
        """
        gpu = self.gpu
        scratch = gpu.scratch(_TRIANGLE, template.scratch) if template.scratch else 0
        slabs: Mapping[int, int] = {}
        if template.sends:
            slabs = {gpu.rank: gpu.scratch(_SLABS, 0)}
        elif template.nbytes:
            slabs = gpu.symmetric_of_all(_SLABS)
        return gpu.arena.generation, scratch, slabs

    def _bases(self, call: QueuedCall, half: int, memory: _Memory) -> dict[int, int]:
        """Return the base of each memory by its number."""
        _, scratch, slabs = memory
        start = half * self.sets.capacity
        return {
            **call.bases, SCRATCH: scratch, **{SLABS_OF + rank: at + start for rank, at in slabs.items()}
        }  # fmt: skip

    def _bound(self, call: QueuedCall, half: int, memory: _Memory) -> list[Queue]:
        """Return what a call queues in the memory that there is now."""
        generation, scratch, slabs = memory
        place = generation, scratch, slabs.get(self.gpu.rank, 0)
        if call.memory != place:
            call.memory, call.bound = place, [None, None]
        queue = call.bound[half]
        if queue is None:
            queue = call.bound[half] = call.template.placed(self._bases(call, half, memory))
        return queue


_Memory = tuple[int, int, Mapping[int, int]]
_Key = tuple[int, bytes]
"""A stream, and words of a ``look``: of a call where its operands are and its pattern, of a template the latter."""


def _pattern_of(key: _Key) -> _Key:
    """Return the key of the template of a call. Local."""
    return key[0], key[1][8 * (objects.PATTERN - objects.BASES) :]


def _unlearned(*_: Any) -> None:
    """What a form of handles tells no one."""


def _words_in(look: Any) -> tuple[list[str], complex, complex]:
    """Return the options, and alpha and beta, of a call that the core has read. Local."""
    _, words, *parts = _OPTIONS.unpack_from(look, 8 * objects.PATTERN)
    return [*words[:5].decode()], complex(*parts[:2]), complex(*parts[2:])


_OPTIONS = struct.Struct("=q8s4d")  # how a pattern begins
_COMPUTERS: dict[str, Computer] = {
    "product": matmul,
    "triangular": triangular,
    "sided": sided,
    "updated": updated,
    "added": added,
}
