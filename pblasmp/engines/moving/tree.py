# SPDX-License-Identifier: Apache-2.0
"""The tree in which messages carry the same data from one rank to all, over each link between nodes once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Branch", "branch"]


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
