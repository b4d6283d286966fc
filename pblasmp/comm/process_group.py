# SPDX-License-Identifier: Apache-2.0
"""The ranks of a PyTorch process group, without MPI: our own gloo group, whatever the backend of the user's group.

It is made over the same rendezvous store, so that our messages never mix with the caller's or go through a GPU.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from .. import _core
from ..errors import ArgumentError, LibraryNotFoundError
from ..logs import logger
from .board import Board
from .communicator import Communicator, Request, chunks, described, flat
from .links import Links, connect, failure
from .locations import Location
from .notes import Meeting
from .side_channel import SideChannel

_TIMEOUT = timedelta(days=7)  # a rank may compute for any time; one that ends is noticed at once
_LOOK_SECONDS = 0.05
# the same on every rank: the ranks of a group make communicators in the same order
_made: Counter[str] = Counter()

Array = NDArray[Any]


class _Message:
    """A message in flight."""

    def __init__(self, work: Any, changed: threading.Condition) -> None:
        self._work, self._changed = work, changed
        self._error: BaseException | None = None
        self._done = False

    def wait(self) -> None:
        """Wait until it is done, in a thread of its own; an error is ``Test``'s to raise."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def Test(self) -> bool:  # noqa: N802 - as in mpi4py
        if self._error is not None:
            raise self._error
        return self._done

    def pause(self) -> None:
        """Sleep until it is done, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: self._done, _LOOK_SECONDS)

    def __bool__(self) -> bool:
        return not self._done


class _Messages:
    """Messages to one rank, or from one, which end in their order: a thread waits for them while there are any.

    gloo cannot be polled. One thread for all ranks could wait for a message that comes only after another one,
    which has arrived, is taken.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._waiting: deque[_Message] = deque()
        self._awaited = False

    def add(self, work: Any) -> _Message:
        """Return the message that gloo has begun."""
        message = _Message(work, self._changed)
        with self._changed:
            self._waiting.append(message)
            if not self._awaited:
                threading.Thread(target=self._wait, daemon=True).start()
                self._awaited = True
        return message

    def _wait(self) -> None:
        while True:
            with self._changed:
                self._awaited = bool(self._waiting)
                if not self._awaited:
                    return
                message = self._waiting.popleft()
            message.wait()


class _GroupCollective:
    """A collective call in progress."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def __bool__(self) -> bool:
        return not self._work.is_completed()

    def Test(self) -> bool:  # noqa: N802 - as in mpi4py
        if self:
            return False
        self._work.wait()  # raises the error, if any
        return True

    def pause(self) -> None:
        """Sleep until it is done, but not for long: polling would take the core from gloo's own threads."""
        with contextlib.suppress(RuntimeError):  # a timeout; Test() raises real errors
            self._work.wait(timedelta(seconds=_LOOK_SECONDS))


class StoreNotes:
    """Notes through the store in which the ranks found each other. Each look for notes is a message to its server."""

    any_thread = True

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._read = 0
        self._next_look = 0.0

    def send(self, note: bytes, to: int | None = None) -> None:
        """Leave a note for one rank, or for all others. Local."""
        for rank in range(self._size) if to is None else [to]:
            if rank != self._rank:
                self._store.set(f"note {self._store.add(f'sent {rank}', 1)} {rank}", note)

    def arrived(self) -> list[bytes]:
        """Return the notes that have come since the last look, which is not made often. Local."""
        if time.monotonic() < self._next_look:
            return []
        self._next_look = time.monotonic() + _LOOK_SECONDS
        notes = []
        me = self._rank
        while self._read < self._store.add(f"sent {me}", 0) and self._store.check(
            [name := f"note {self._read + 1} {me}"]
        ):
            notes.append(self._store.get(name))
            self._read += 1
        return notes


class _Gloo:
    """A communicator of ``ranks``, numbered as in PyTorch's default group. Making one is collective over them."""

    of_group = True
    __repr__ = described

    def __init__(self, ranks: Sequence[int], channel: SideChannel | None = None) -> None:
        if not dist.is_gloo_available():
            raise LibraryNotFoundError(
                "this PyTorch was built without gloo, which pblasmp needs to use a process group"
            )
        self._ranks = list(ranks)
        self.rank = self._ranks.index(dist.get_rank())
        self.size = len(self._ranks)
        self.patient = True
        self.board: Board | None = None
        self.node: Communicator | None = None
        self._locations: list[Location] = []
        self._links: Links | None = None
        name = "-".join(map(str, self._ranks))
        _made[name] += 1
        store = dist.PrefixStore(f"pblasmp/{name}/{_made[name]}", dist.distributed_c10d._get_default_store())
        self._group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, _TIMEOUT)
        self._changed = threading.Condition()
        self._sent, self._received = ([_Messages(self._changed) for _ in ranks] for _ in range(2))
        self.channel = channel or SideChannel(self.rank, tuple(self._ranks))
        self._carries_notes = channel is None
        if self._carries_notes:
            self.channel.connect(StoreNotes(store, self.rank, self.size))

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _GroupCollective:
        out[...] = values
        return self._reduce(out, dist.ReduceOp.MAX)

    def _started(self, work: Any) -> _GroupCollective:
        collective: _GroupCollective = self.channel.watch(_GroupCollective(work))
        return collective

    def _reduce(self, array: Array, op: Any) -> _GroupCollective:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._started(self._group.allreduce([torch.from_numpy(array)], options))

    def allgather(self, value: Any) -> list[Any]:
        message = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        sizes[self.rank] = message.size
        self.wait(self._reduce(sizes, dist.ReduceOp.MAX))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded.numpy()[: message.size] = message
        everyones = [torch.empty_like(padded) for _ in range(self.size)]
        self.wait(self._started(self._group.allgather([everyones], [padded])))
        return [
            pickle.loads(each.numpy()[:size].tobytes()) for each, size in zip(everyones, sizes, strict=True)
        ]

    def bcast(self, value: Any, root: int = 0) -> Any:
        message = np.frombuffer(pickle.dumps(value) if self.rank == root else b"", np.uint8)
        size = np.array([message.size])
        self.bcast_into(size, root)
        data = message.copy() if self.rank == root else np.empty(int(size[0]), np.uint8)
        self.bcast_into(data, root)
        return value if self.rank == root else pickle.loads(data.tobytes())

    def barrier(self) -> None:
        self.wait(self._started(self._group.barrier()))

    def wait(self, request: _Message | _GroupCollective, place: Meeting | None = None) -> None:
        self.channel.until(request.Test, pause=request.pause, place=place)

    def wait_some(self, requests: Sequence[_Message]) -> list[int]:
        with self._changed:
            while not (found := self.test_some(requests)):
                self._changed.wait(_LOOK_SECONDS)
                self.channel.check()
        return found

    def test_some(self, requests: Sequence[_Message]) -> list[int]:
        return [i for i, request in enumerate(requests) if request.Test()]

    def sum_into(self, array: Array) -> None:
        if array.size:
            self.wait(self._reduce(flat(array).view(array.real.dtype), dist.ReduceOp.SUM))

    def bcast_into(self, array: Array, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        for chunk in chunks(array):
            self.wait(self._started(self._group.broadcast([torch.from_numpy(chunk)], options)))

    def isend(self, array: Array, dest: int) -> list[_Message]:
        parts = [x if x.flags.writeable else x.copy() for x in chunks(array)]
        return self._post(self._group.send, parts, dest, self._sent[dest])

    def irecv(self, array: Array, source: int) -> list[_Message]:
        return self._post(self._group.recv, chunks(array), source, self._received[source])

    def _post(
        self, start: Callable[..., Any], parts: Sequence[Array], rank: int, messages: _Messages
    ) -> list[_Message]:
        works = (start([torch.from_numpy(part)], rank, 0) for part in parts)
        return [self.channel.watch(messages.add(work)) for work in works]

    # -- messages that the compiled core sends, over its own sockets

    def for_core(self, ranks: Collection[int]) -> tuple[int | None, ...]:
        core, sockets = _core.load(), connect(self, ranks)
        if core is None or sockets is None:
            logger.info(
                "not every rank of another node is reached over TCP: the ranks agree by gloo, which is slower"
            )
            return ()
        self._links = Links(core, self.size, sockets)
        return self._links.for_core()

    def request(self) -> tuple[Request, int]:
        assert self._links is not None
        made = self._links.request()
        return made, made.address

    def count_messages(self, rank: int, number: int, *, receives: bool) -> None:
        """Do nothing: they cannot be taken for other messages."""

    def failure(self, code: int) -> Exception:
        return failure(code)

    def locations(self) -> list[Location]:
        self._locations = self._locations or self.allgather(Location.here())
        return self._locations

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        mine = next(group for group in groups if self.rank in group)
        return _Gloo([self._ranks[rank] for rank in mine], self.channel)

    def duplicate(self) -> Communicator:
        return _Gloo(self._ranks)

    def abort(self, code: int) -> NoReturn:
        os._exit(code)  # the other ranks see their connections close

    def gone(self) -> bool:
        return False

    def free(self) -> None:
        self.board = None
        if self._links is not None:
            self._links.close()
        if self._carries_notes:
            self.channel.close()
        self._group = None


def from_group(group: dist.ProcessGroup | DeviceMesh) -> Communicator:
    """Return a communicator of the ranks of ``group``, in their order. Collective over ``group``.

    ArgumentError for a device mesh of several dimensions, or one that this rank is not in.
    """
    if not isinstance(group, DeviceMesh):
        return _Gloo(dist.get_process_group_ranks(group))
    if group.ndim != 1:
        names = group.mesh_dim_names
        example = f", as device_mesh[{names[-1]!r}] has it" if names else ""
        raise ArgumentError(f"comm: a device mesh of {group.ndim} dimensions, expected 1{example}")
    if group.get_coordinate() is None:
        raise ArgumentError(f"comm: expected a device mesh that this rank is in, got {group}")
    return _Gloo(group.mesh.tolist())
