# SPDX-License-Identifier: Apache-2.0
"""Dry runs: all ranks of a computation in this process, one after the other, on messages without buffers.

Each rank is a thread that runs until it has to wait; then it is the next one's turn. A message is delivered when it has
been sent and is awaited, and not before: what runs here needs no buffering at all, so it cannot deadlock with any.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comm.choice import Serial
from ..comm.communicator import chunks
from ..engines.host.host_engine import HostEngine
from ..engines.host.host_operations import HostOperations
from ..engines.host.host_transport import HostTransport
from ..engines.method import prepare
from ..engines.request import AnyProblem, Operands
from ..errors import PblasmpError
from ..layout.value import time_text
from .dry_engine import Ranks
from .traffic import operands_of, size_of, task_of

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class DryRun:
    """What happened in a dry run. Local.

    Attributes:
        algorithm: what ran.
        operands: the local arrays of each rank, the results among them.
        sent_bytes, messages: what each rank sent.
        seconds: how long it took.
    """

    algorithm: str
    operands: list[Operands]
    sent_bytes: NDArray[np.int64]
    messages: NDArray[np.int64]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, with the sums over all ranks. Local."""
        return {
            "ranks": len(self.messages), "algorithm": self.algorithm, "messages": int(self.messages.sum()),
            "sent_bytes": int(self.sent_bytes.sum()), "seconds": self.seconds,
        }  # fmt: skip

    def __str__(self) -> str:
        sent = f"{self.messages.sum()} messages, {self.sent_bytes.sum() / 2**20:.1f} MiB in all"
        return (
            f"dry run: {len(self.messages)} CPU ranks, {self.algorithm}: {sent}; each is awaited once, and nothing "
            f"deadlocks ({time_text(self.seconds)})"
        )


def dry_run(
    problem: AnyProblem,
    algorithm: str = "auto",
    *,
    alpha: complex = 1,
    beta: complex | None = None,
    nranks: int | None = None,
    ranks_per_node: int | None = None,
    fill: Callable[[int, Operands], None] | None = None,
) -> DryRun:
    """Prepare and run a computation on every one of its CPU ranks, in this process and on real arrays. Local.

    Args:
        problem: what is computed; small, since this process holds the arrays of all ranks.
        algorithm, alpha, beta, nranks, ranks_per_node: as of ``problem.traffic``.
        fill: called with each rank and its arrays, to write values into them; by default they are zeros.

    Raises:
        PblasmpError: the ranks wait for each other, a message is sent or awaited by one side only or has another size
            than what is awaited, or a request is not waited for just once.
    """
    start = time.perf_counter()
    task = task_of(problem, algorithm, alpha, beta)
    size = max(size_of(task.problem), nranks or 1)
    ranks = Ranks(size, min(size, ranks_per_node or size))
    world = RanksInTurn(ranks)
    found: dict[int, tuple[str, Operands]] = {}

    def run(rank: int) -> None:
        engine = _PretendedEngine(world, rank)
        operands = operands_of(engine, task.problem)
        for array in (operands.a, operands.b, operands.c, operands.d):
            if array is not None:
                array[...] = 0
        if fill is not None:
            fill(rank, operands)
        product, choice = prepare(engine, task, operands)
        product.run(operands)
        product.close()
        found[rank] = choice.name, operands

    world.run(run)
    return DryRun(
        found[0][0],
        [found[rank][1] for rank in range(size)],
        world.sent,
        world.messages,
        time.perf_counter() - start,
    )


class _Half:
    """One half of a message: it is sent, or it is awaited."""

    def __init__(self, data: Array, what: str) -> None:
        self.data, self.what, self.done, self.waits = data, what, False, 0


class RanksInTurn:
    """The ranks, whose turn it is, and what is between them.

    Attributes:
        sent, messages: bytes and messages that each rank has sent.
        memory: what the ranks of a node share, by node and name.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.nodes = ranks.nodes
        self.sent, self.messages = (np.zeros(ranks.size, np.int64) for _ in range(2))
        self.memory: dict[tuple[int, str], Array] = {}
        self._sends: dict[tuple[int, int], deque[_Half]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[_Half]] = defaultdict(deque)
        self._requests: list[_Half] = []
        self._meetings: dict[int, dict[int, tuple[str, Any]]] = defaultdict(dict)
        self._turns = [threading.Semaphore(0) for _ in range(ranks.size)]
        self._back = threading.Semaphore(0)
        self._waits_for: dict[int, str] = {}
        self._steps = 0
        self._failed: BaseException | None = None
        self._ended: set[int] = set()

    def run(self, function: Callable[[int], None]) -> None:
        """Run a function on every rank, and check that nothing is left over. Local."""
        before = threading.stack_size(1 << 20)
        threads = [
            threading.Thread(target=self._rank, args=(function, rank)) for rank in range(self.ranks.size)
        ]
        try:
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        while len(self._ended) < self.ranks.size:
            steps = self._steps
            for rank in range(self.ranks.size):
                if rank not in self._ended:
                    self._turns[rank].release()
                    self._back.acquire()
            if self._failed is None and steps == self._steps and len(self._ended) < self.ranks.size:
                waiting = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(self._waits_for.items()))
                self._failed = PblasmpError(f"the ranks wait for each other: {waiting}")
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        for message in self._requests:
            if not message.done or message.waits != 1:
                state = "" if message.done else ", and nobody does the other half of it"
                raise PblasmpError(
                    f"{message.what} is waited for {message.waits} times, expected once{state}"
                )

    def _rank(self, function: Callable[[int], None], rank: int) -> None:
        self._turns[rank].acquire()
        try:
            if self._failed is None:
                function(rank)
        except BaseException as error:  # noqa: BLE001 (raised by run)
            self._failed = self._failed or error
        self._ended.add(rank)
        self._waits_for.pop(rank, None)
        self._steps += 1
        self._back.release()

    def until(self, rank: int, done: Callable[[], bool], what: str) -> None:
        """Let the other ranks run until something is done. Local."""
        while not done():
            self._waits_for[rank] = what
            self._back.release()
            self._turns[rank].acquire()
            if self._failed is not None:
                raise PblasmpError("another rank has failed")
        self._waits_for.pop(rank, None)

    def post(self, source: int, dest: int, data: Array, *, sends: bool) -> _Half:
        """Send or await a message: it is delivered once both have been done. Local."""
        verb = f"rank {source} sends to rank {dest}" if sends else f"rank {dest} awaits from rank {source}"
        message = _Half(data, f"a message of {data.size} bytes that {verb}")
        self._requests.append(message)
        mine, others = (self._sends, self._receives) if sends else (self._receives, self._sends)
        if sends:
            self.sent[source] += data.size
            self.messages[source] += 1
        if not others[source, dest]:
            mine[source, dest].append(message)
            return message
        other = others[source, dest].popleft()
        if other.data.size != data.size:
            raise PblasmpError(f"{message.what} meets {other.what}")
        into, of = (other, message) if sends else (message, other)
        into.data[...] = of.data
        message.done = other.done = True
        self._steps += 1
        return message

    def meet(self, rank: int, turn: int, kind: str, value: Any) -> list[Any]:
        """Return every rank's value of its collective call number ``turn``. Collective over all ranks."""
        place = self._meetings[turn]
        place[rank] = kind, value
        self._steps += 1
        self.until(rank, lambda: len(place) == self.ranks.size, f"collective call {turn}, {kind}")
        if len({each for each, _ in place.values()}) > 1:
            kinds = sorted({each for each, _ in place.values()})
            raise PblasmpError(f"collective call {turn} is {' and '.join(kinds)}")
        return [place[each][1] for each in range(self.ranks.size)]


class PretendedRanks(Serial):
    """A communicator of ranks that are threads which take turns."""

    def __init__(self, world: RanksInTurn, rank: int) -> None:
        super().__init__()
        self._world, self.rank, self.size = world, rank, world.ranks.size
        self._turn = 0

    def _meet(self, kind: str, value: Any = None) -> list[Any]:
        self._turn += 1
        return self._world.meet(self.rank, self._turn, kind, value)

    def isend(self, array: Array, dest: int) -> list[_Half]:
        """Start sending. Local."""
        return [self._world.post(self.rank, dest, each, sends=True) for each in chunks(array)]

    def irecv(self, array: Array, source: int) -> list[_Half]:
        """Start receiving. Local."""
        return [self._world.post(source, self.rank, each, sends=False) for each in chunks(array)]

    def wait(self, request: Any, place: Any = None) -> None:  # noqa: ARG002
        """Wait for a message. Local."""
        self._world.until(self.rank, lambda: request.done, request.what)
        request.waits += 1

    def test_some(self, requests: Sequence[Any]) -> list[int]:
        """Return the indices of the messages that have been delivered. Local."""
        found = [i for i, each in enumerate(requests) if each.done]
        for i in found:
            requests[i].waits += 1
        return found

    def wait_some(self, requests: Sequence[Any]) -> list[int]:
        """Wait for one of several messages. Local."""
        what = " or ".join(each.what for each in requests)
        self._world.until(self.rank, lambda: any(each.done for each in requests), what)
        return self.test_some(requests)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self._meet("barrier")

    def sum_into(self, array: Array) -> None:
        """Sum over the ranks. Collective."""
        array[...] = sum(self._meet("sum", array.copy()))


class _PretendBuffers:
    """A rank's buffers: its own, and those of its node."""

    def __init__(self, world: RanksInTurn, node: int) -> None:
        self._world, self._node = world, node
        self._own: dict[tuple[int, str], Array] = {}

    def get(self, name: str, nbytes: int, *, shared: bool) -> Array:
        """Return bytes of a buffer. Local."""
        place = self._world.memory if shared else self._own
        key = self._node, name
        if key not in place or place[key].size < nbytes:
            place[key] = np.empty(max(1, nbytes), np.uint8)
        return place[key]


class _PretendedTransport(HostTransport):
    """The host's transport, on pretended ranks. The ranks agree without a vote."""

    def __init__(self, world: RanksInTurn, rank: int, memory: _PretendBuffers) -> None:
        ranks: Any = PretendedRanks(world, rank)
        super().__init__(ranks, world.nodes, memory, "")  # type: ignore[arg-type]

    def fits(self, nbytes: int) -> tuple[bool, int]:
        """Return that there is enough memory. Local."""
        return True, nbytes


class _PretendedEngine(HostEngine):
    """The host engine of a pretended rank: everything but its communicator is the real one."""

    def __init__(self, world: RanksInTurn, rank: int) -> None:
        self.why = "a dry run"
        memory = _PretendBuffers(world, rank // world.ranks.per_node)
        self.operations: Any = HostOperations("scipy", memory)  # type: ignore[arg-type]
        self.transport: Any = _PretendedTransport(world, rank, memory)
