# SPDX-License-Identifier: Apache-2.0
"""Messages that copy engines push, on pretended GPUs: what arrives, in any order, and that every signal is needed."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from pblasmp.engines.gpu.kernels.views import View
from pblasmp.engines.gpu.runtime.inbox import Inbox
from pblasmp.engines.gpu.runtime.windows import SLOTS
from tests.helpers.fakepeers import Peers, is_missed

LARGEST = 256
BOXES = 4
FREE = {SLOTS.at(box) for box in range(SLOTS.count)}  # flags that say that a slot may be written again


class Messages:
    """Exchanges of random bytes: each is started after the one before, and finished while others are under way."""

    def __init__(self, peers: Peers, seed: int, count: int = 6, ahead: int = 2) -> None:
        self.peers, self.inboxes = peers, [Inbox(gpu) for gpu in peers.gpus]
        for gpu in peers.gpus:  # on every rank before one asks where the others' are
            for box in range(BOXES):
                gpu.reserve(f"inbox {box}", (gpu.size - 1) * LARGEST)
        self.chance = random.Random(seed)
        self.signals: list[int] = []
        ranks, waiting = range(peers.size), []
        for number in range(count):
            sizes = {
                (a, b): self.chance.randint(1, LARGEST)
                for a in ranks for b in ranks if a != b and self.chance.random() < 0.8
            }  # fmt: skip
            waiting.append(self._started(sizes, number))
            if len(waiting) == ahead:
                self._finish(waiting.pop(0))
        for each in waiting:
            self._finish(each)
        for gpu in peers.gpus:
            gpu.use()  # as where a graph's recording ends

    def _started(self, sizes, number):
        sent = {ends: self._bytes(ends[0], n, number) for ends, n in sizes.items()}
        largest = max(sizes.values(), default=1)
        ends = []
        for rank, inbox in enumerate(self.inboxes):
            packs = {
                to: (sent[rank, to].size, partial(self._copy, rank, sent[rank, to]))
                for to in range(self.peers.size) if (rank, to) in sent
            }  # fmt: skip
            ends.append(inbox.start(packs, largest))
        return sent, ends

    def _finish(self, started) -> None:
        sent, ends = started
        for rank, end in enumerate(ends):
            unpacks = {}
            for (source, to), array in sent.items():
                if to == rank:
                    target = self.peers.array(rank, np.full((1, array.size), 0xEE, np.uint8))
                    unpacks[source] = partial(self._take, rank, target)
                    self.expected.append((array.values, target.values))
            end(unpacks)

    @property
    def expected(self):
        return self.__dict__.setdefault("awaited", [])

    def _bytes(self, rank: int, n: int, number: int):
        return self.peers.array(
            rank, np.full((1, n), 1 + number, np.uint8) + np.arange(n, dtype=np.uint8) % 7
        )

    def _copy(self, rank: int, array, at: int) -> None:
        self.peers.gpus[rank].copy("main", View(at, 1, array.size, array.size, array.dtype), View.of(array))

    def _take(self, rank: int, target, at: int) -> None:
        self.peers.gpus[rank].copy(
            "main", View.of(target), View(at, 1, target.size, target.size, target.dtype)
        )

    def run(self, seed) -> None:
        self.peers.run(seed)
        for sent, found in self.expected:
            np.testing.assert_array_equal(found, sent)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2, None])
def test_messages_arrive_in_any_order_that_the_signals_allow(size, ahead, seed):
    Messages(Peers(size), seed=size, ahead=ahead).run(seed)


def test_no_signal_can_be_left_out():
    """But that the last slots may be written again: nothing follows."""

    def names(skip: tuple[int, int] | None, seed: int) -> list[str]:
        peers = Peers(2, skip)
        Messages(peers, 3).run(seed)
        return peers.gpus[1].names

    needless = [
        name
        for number, name in enumerate(names(None, 0))
        if name.startswith(("await", "raise")) and not is_missed(names, (1, number), range(12))
    ]
    assert len(needless) <= 2  # boxes
    assert all(name in [f"raise {flag} of 0" for flag in FREE] for name in needless)


def test_what_is_queued_does_not_depend_on_what_was_queued_before():
    """A graph may record a first exchange and be replayed often, or never: every exchange waits for its slots."""
    queued = []
    for count in (1, 2):
        peers = Peers(2)
        Messages(peers, 1, count=count, ahead=1)
        queued.append([name for name in peers.gpus[0].names if name.startswith(("await", "raise"))])
    once, twice = queued
    assert f"await {SLOTS.first} of 1" in once
    assert twice[: len(once)] == once


def test_one_kernel_waits_for_the_slots_of_all_receivers():
    peers, waits = Peers(4), []
    gpu = peers.gpus[0]
    wait = gpu.await_flags

    def noted(stream, flags):
        waits.append([number for _, number in flags])
        wait(stream, flags)

    gpu.await_flags = noted
    Messages(peers, 1, count=1)
    assert [numbers for numbers in waits if set(numbers) & FREE] == [[SLOTS.first] * 3]


def test_what_several_ranks_get_is_packed_once():
    peers = Peers(3)
    inboxes, array = [Inbox(gpu) for gpu in peers.gpus], peers.array(0, np.arange(9, dtype=np.uint8)[None])
    for gpu in peers.gpus:
        gpu.reserve("inbox 0", 2 * LARGEST)
    packed: list[int] = []

    def pack(at: int) -> None:
        packed.append(at)
        peers.gpus[0].copy("main", View(at, 1, 9, 9, array.dtype), View.of(array))

    packs = dict.fromkeys((1, 2), (9, pack))
    ends = [inbox.start(packs if rank == 0 else {}, 9) for rank, inbox in enumerate(inboxes)]
    found = {rank: peers.array(rank, np.zeros((1, 9), np.uint8)) for rank in packs}
    for rank, end in enumerate(ends):

        def take(at: int, rank: int = rank) -> None:
            peers.gpus[rank].copy("main", View.of(found[rank]), View(at, 1, 9, 9, array.dtype))

        end({0: take} if rank in packs else {})
    peers.run(0)
    assert len(packed) == 1
    for each in found.values():
        np.testing.assert_array_equal(each.values, array.values)


def test_an_exchange_does_not_wait_for_one_that_began_later():
    """Not for all that the copy engines have: a large panel may be on its way behind a short one."""
    peers = Peers(2)
    Messages(peers, 0, count=3, ahead=2)
    for gpu in peers.gpus:
        assert any(name.startswith("main follows box") for name in gpu.names)
        assert "main follows copy" not in gpu.names


def test_a_free_slot_is_not_signaled_by_a_copy():
    """A copy engine would first carry what it has begun: the next message would wait for the one before."""
    peers = Peers(2)
    kernels: list[int] = []
    for gpu in peers.gpus:
        queue = gpu.raise_flags
        gpu.raise_flags = lambda stream, flags, queue=queue: (
            kernels.extend(n for _, n in flags),
            queue(stream, flags),
        )
    Messages(peers, 0, count=3, ahead=2)
    raised = [name.split()[1] for gpu in peers.gpus for name in gpu.names if name.startswith("raise")]
    assert sorted(kernels) == sorted(int(n) for n in raised if int(n) in FREE) != []


def test_boxes_are_used_again():
    peers = Peers(2)
    inboxes = [Inbox(gpu) for gpu in peers.gpus]
    for gpu in peers.gpus:
        gpu.reserve("inbox 0", 2 * LARGEST)
        gpu.reserve("inbox 1", 2 * LARGEST)
    ends = [[inbox.start({}, 8) for inbox in inboxes] for _ in range(2)]
    assert [inbox._free[0] for inbox in inboxes] == [2, 2]
    for end in ends[0]:
        end({})
    assert [min(inbox._free) for inbox in inboxes] == [0, 0]


@pytest.mark.parametrize("size", [2, 3])
def test_a_box_has_a_slot_for_each_other_rank(size):
    peers = Peers(size)
    Messages(peers, 7)
    assert peers.gpus[0].symmetric_bytes("inbox 0") == (size - 1) * LARGEST
    assert peers.gpus[0].scratches["outbox 0"][1] == (size - 1) * LARGEST


def test_what_is_too_large_travels_otherwise():
    inbox = Inbox(Peers(3).gpus[0])
    assert inbox.takes(2 << 30)
    assert not inbox.takes(3 << 30)
