# SPDX-License-Identifier: Apache-2.0
"""Deliveries between pretended GPUs: what arrives, in any order, and that every signal is needed (inbox.py)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pblasmp.engines.gpu.kernels.views import View
from pblasmp.engines.gpu.runtime import inbox
from pblasmp.engines.gpu.runtime.inbox import Deliveries
from tests.helpers.fakepeers import Peers, is_missed

BYTES = np.dtype(np.uint8)
LARGEST = 900


class Delivered:
    """Deliveries of random bytes from random roots; "main" reads what arrived while later ones are under way."""

    def __init__(self, peers: Peers, seed: int, count: int = 8) -> None:
        self.peers, chance = peers, random.Random(seed)
        self.expected: list[tuple[np.ndarray, np.ndarray]] = []
        self.all = [Deliveries(gpu, "panel") for gpu in peers.gpus]
        room = Deliveries.size(LARGEST, [4, 300])
        for each in self.all:
            each.reserve(room)
        for number in range(count):
            sizes = [chance.randint(1, LARGEST), 4, chance.randint(1, 300)]
            root = chance.randrange(peers.size)
            sent = [np.full((1, n), number + 1, np.uint8) + np.arange(n, dtype=np.uint8) % 7 for n in sizes]
            for gpu, each in zip(peers.gpus, self.all, strict=True):
                self._queue(gpu, each, number, root, sent)

    def _queue(self, gpu, each, number, root, sent) -> None:
        i, (payload, *beside) = number % Deliveries.count, sent
        if number >= Deliveries.count:
            gpu.await_mark("ahead", f"read {number - Deliveries.count}")
        at = View(each.address(i), 1, payload.size, payload.size, BYTES)
        if gpu.rank == root:
            arrays = [self.peers.array(gpu.rank, values) for values in beside]
            gpu.copy("ahead", at, View.of(self.peers.array(gpu.rank, payload)))
        else:
            arrays = [self.peers.array(gpu.rank, np.zeros_like(values)) for values in beside]
        each.deliver("ahead", i, root, payload.size, [(array.data.ptr, array.size) for array in arrays])
        gpu.follow("main", "ahead")
        for values, array in zip(sent, [None, *arrays], strict=True):
            found = self.peers.array(gpu.rank, np.zeros_like(values))
            gpu.copy("main", View.of(found), at if array is None else View.of(array))
            self.expected.append((values, found.values))
        gpu.mark(f"read {number}", "main")

    def run(self, seed: int | None) -> None:
        self.peers.run(seed)
        for sent, found in self.expected:
            np.testing.assert_array_equal(found, sent)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1, 2, None])
def test_all_ranks_get_what_the_root_has(size, seed):
    Delivered(Peers(size), size).run(seed)


def test_a_rank_passes_chunks_on_before_it_has_them_all():
    peers = Peers(3)
    each = [Deliveries(gpu, "panel") for gpu in peers.gpus]
    for one in each:
        one.reserve(4096)
    for one in each:
        one.deliver("ahead", 1, 0, 4096)
    assert [name.split()[0] for name in peers.gpus[1].names] == ["raise", "await", *["await", "raise"] * 4]
    peers.run(0)


def test_no_signal_can_be_left_out(monkeypatch):
    monkeypatch.setattr(inbox, "_ALIGNED", 16)  # several chunks of little memory

    def names(skip: tuple[int, int] | None, seed: int) -> list[str]:
        peers = Peers(3, skip)
        Delivered(peers, 5, 4).run(seed)
        return peers.gpus[1].names

    numbered = enumerate(names(None, 0))
    assert [name for number, name in numbered if not is_missed(names, (1, number), range(12))] == []
