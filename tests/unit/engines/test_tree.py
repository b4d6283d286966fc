# SPDX-License-Identifier: Apache-2.0
"""The tree in which a panel reaches all ranks, and what it saves."""

import pytest

import pblasmp as pb
from pblasmp.engines.dense.tree import branch


@pytest.mark.parametrize(
    "nodes",
    [
        [[0]],
        [[0, 1, 2, 3]],
        [[0, 2], [1, 3]],
        [[0, 1], [2, 3], [4, 5]],
        [[each] for each in range(7)],
        [[0, 3, 6], [1, 4, 7], [2, 5]],
        [[0, 1, 2], []],
        [list(range(first, first + 8)) for first in range(0, 64, 8)],
        [list(range(first, 64, 8)) for first in range(8)],
    ],
)
def test_a_tree_reaches_every_rank_and_every_node_once(nodes):
    used = [node for node in nodes if node]
    most = (len(used) - 1).bit_length() + (max(map(len, used)) - 1).bit_length()
    ranks = sorted(rank for node in nodes for rank in node)
    node_of = {rank: i for i, node in enumerate(nodes) for rank in node}
    sent = dict.fromkeys(ranks, 0)
    for root in ranks:
        places = {rank: branch(nodes, root, rank) for rank in ranks}
        links = [(rank, child) for rank, place in places.items() for child in place.children]
        assert sorted(links) == sorted((places[rank].parent, rank) for rank in ranks if rank != root)
        assert places[root].parent is None
        assert max(len(place.children) for place in places.values()) <= most
        assert sum(node_of[a] != node_of[b] for a, b in links) == len(used) - 1
        reached, level, depth = {root}, [root], 0
        while level := [child for rank in level for child in places[rank].children]:
            reached, depth = reached | {*level}, depth + 1
        assert sorted(reached) == ranks
        assert depth <= most
        for rank, place in places.items():
            sent[rank] += len(place.children)
        if len(ranks) > 1:
            assert places[root].children[0] == (root + 1) % len(ranks)
    if len(ranks) % len(used) == 0:
        assert max(sent.values()) <= 1.3 * (len(ranks) - 1)  # the average


@pytest.mark.parametrize("routine", ["cholesky", "lu"])
def test_panels_travel_without_the_rows_above_their_diagonal(routine):
    """On two nodes of four ranks, each of which has whole process columns; nothing else crosses."""
    d = pb.MatrixDescriptor((16384, 16384), (128, 128), pb.Grid(2, 4, "col"), order="F")
    counts = pb.layout.FactorProblem(routine, a=d, c=d).traffic(ranks_per_node=4)
    assert sum(counts.received_bytes - counts.node_received) < 0.55 * 8 * 16384**2  # each panel once
