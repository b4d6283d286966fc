# SPDX-License-Identifier: Apache-2.0
"""The tree in which messages carry the same data from one rank to all, over each link between nodes once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..protocol import Engine, Transfer

Array = Any


class Branch(NamedTuple):
    """A rank's place in a tree.

    Attributes:
        parent: the rank that it gets the data from; None at the root.
        children: those that it sends them to, in this order.
    """

    parent: int | None
    children: list[int]


def branch(nodes: Sequence[Sequence[int]], root: int, rank: int) -> Branch:
    """Return a rank's place in the tree of a root: binomial between nodes, and inside each of them. Local.

    The rank after the root, which often has the next data to send, gets them first, from the root itself. Of the other
    children those come first that have most to pass on.

    Args:
        nodes: the ranks of each node that get the data, and the root; some may be empty.
        root: the rank that has them.
        rank: any of them.
    """
    size = 1 + max(max(node, default=0) for node in nodes)
    after = (root + 1) % size

    def first_of(node: Sequence[int]) -> int:
        """Return the rank through which a node gets the data: for each root another one."""
        near = [each for each in (root, after) if each in node]
        return near[0] if near else node[after % len(node)]

    mine = next(node for node in nodes if rank in node)
    first = first_of(mine)
    levels = [sorted(mine, key=lambda each: (each - first) % size)]
    if rank == first:
        levels.insert(0, sorted(map(first_of, filter(None, nodes)), key=lambda each: (each - root) % size))
    parent = None
    children: list[int] = []
    for level in levels:
        at = level.index(rank)
        parent = level[at & (at - 1)] if at else parent
        bits = (at & -at or 1 << len(level).bit_length()) >> 1
        while bits:
            children += [level[at + bits]] if at + bits < len(level) else []
            bits >>= 1
    children.sort(key=lambda child: child != after)
    return Branch(parent, children)


class Outbox:
    """Named buffers that this rank sends from while it goes on: each is used again when it has been sent. Local."""

    def __init__(self, engine: Engine) -> None:
        self._operations, self._transport = engine.operations, engine.transport
        self._queues = engine.traits.queues
        self._sent: dict[str, list[Any]] = {}

    def temporary(self, name: str, shape: tuple[int, int], dtype: np.dtype) -> Array:
        """Return the buffer of a name as an uninitialized array in F order, from which nothing is sent any more."""
        self._finish(name)
        return self._operations.scratch(name, shape, dtype, "F")

    def send(self, name: str, messages: Sequence[tuple[Array, int]]) -> None:
        """Begin to send arrays in the buffer of a name, or beside it, to ranks; empty ones are left out. Local."""
        if messages := [(array, rank) for array, rank in messages if array.size]:
            self._sent.setdefault(name, []).append(self._transport.start(messages, []))

    def swap(self, sends: Mapping[str, tuple[Array, int]], receives: Sequence[tuple[Array, int]]) -> None:
        """Begin to send arrays, each in the buffer of a name, and wait for arrays from the same ranks. Local."""
        if self._queues:  # what is queued first would wait for what a peer queues later
            self._transport.start([*sends.values()], receives).finish()
            return
        for name, message in sends.items():
            self.send(name, [message])
        self.receive(receives)

    def receive(self, messages: Sequence[tuple[Array, int]]) -> None:
        """Wait for arrays from ranks. Local."""
        if (transfer := self.expect(messages)) is not None:
            transfer.finish()

    def expect(self, messages: Sequence[tuple[Array, int]]) -> Transfer | None:
        """Begin to receive arrays from ranks; None if all are empty. Local."""
        messages = [(array, rank) for array, rank in messages if array.size]
        return self._transport.start([], messages) if messages else None

    def push(self) -> None:
        """Let MPI go on with what is sent: it may need this rank. Local."""
        for transfers in self._sent.values():
            transfers[:] = [transfer for transfer in transfers if not transfer.done()]

    def settle(self) -> None:
        """Wait until all is sent. Local."""
        for name in list(self._sent):
            self._finish(name)

    def _finish(self, name: str) -> None:
        for transfer in self._sent.pop(name, ()):
            transfer.finish()


class Line:
    """Ranks among which arrays travel in trees: those of a process row or column, say. Making one is local.

    Args:
        ranks: the ranks, this one among them. Roots are given as indices into these.
        outbox: where what is sent lies.
    """

    def __init__(self, engine: Engine, ranks: Sequence[int], outbox: Outbox) -> None:
        self._ranks, self._outbox = ranks, outbox
        self._own = ranks.index(engine.transport.rank)
        at = {rank: i for i, rank in enumerate(ranks)}
        self._nodes = [[at[rank] for rank in node if rank in at] for node in engine.transport.domains]
        self._places: dict[int, Branch] = {}

    def _place(self, root: int) -> Branch:
        """Return this rank's place in the tree of a root."""
        if root not in self._places:
            parent, children = branch(self._nodes, root, self._own)
            self._places[root] = Branch(
                None if parent is None else self._ranks[parent], [self._ranks[child] for child in children]
            )
        return self._places[root]

    def spread(self, root: int, name: str, arrays: Sequence[Array]) -> None:
        """Let all ranks have what the root has in arrays, the first of them in the buffer of a name. Collective."""
        self.pass_on(root, name, arrays, self.expect(root, arrays))

    def expect(self, root: int, arrays: Sequence[Array]) -> Transfer | None:
        """Begin to receive arrays of a root; ``pass_on`` waits for them. Local."""
        parent = self._place(root).parent
        return None if parent is None else self._outbox.expect([(array, parent) for array in arrays])

    def pass_on(self, root: int, name: str, arrays: Sequence[Array], arriving: Transfer | None) -> None:
        """Begin to send arrays of a root to this rank's children in the tree, when they have come. Local."""
        if arriving is not None:
            arriving.finish()
        children = self._place(root).children
        self._outbox.send(name, [(array, child) for child in children for array in arrays])

    def add_up(self, root: int, name: str, array: Array) -> None:
        """Let the root have the sum of all ranks' arrays, which are in the buffer of a name. Collective.

        The others' arrays are overwritten.
        """
        place = self._place(root)
        for child in reversed(place.children):
            term = self._outbox.temporary("term", array.shape, array.dtype)
            self._outbox.receive([(term, child)])
            array += term
        if place.parent is not None:
            self._outbox.send(name, [(array, place.parent)])
