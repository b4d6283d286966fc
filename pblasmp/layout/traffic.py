# SPDX-License-Identifier: Apache-2.0
"""Traffic: what every rank of a computation sends, receives, computes and needs, as a plain value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LINKS", "Kernel", "Numbers", "Shapes", "Traffic", "bytes_text"]

LINKS = ("same_rank", "same_node", "other_node")

Numbers = NDArray[np.int64]
Kernel = tuple[str, str, int, int, int]
Shapes = Counter[Kernel]


@dataclass(frozen=True, eq=False)
class Traffic:
    """What each rank of a computation does in one run, in arrays over the ranks. Local.

    Attributes:
        call: what is computed.
        algorithm: the algorithm.
        path: how it computes, in a few words.
        nranks, ranks_per_node: the ranks.
        sent_bytes, received_bytes: bytes in messages to and from other ranks. In sums over the ranks parts and results
            count as if they travelled once, as in ``plan.report()``; with several nodes, as if between nodes.
        messages: messages that each rank sends; ``collectives`` are not among them.
        copied_bytes: bytes that each rank copies in its own memory or its node's.
        flops: floating-point operations of products and solves, four times as many of complex types.
        memory_bytes: operands, result and workspace.
        shapes: for each class of ranks that compute alike, how often a kernel is run, by its name, type, m, n and k:
            "gemm", with m and n exchanged if CPU ranks write in row-major order; "trsm" with k = m equations; "potrf",
            "getrf", "geqrt"; "gemqrt" with k reflectors; "swap": exchanges of m rows of n columns.
        like: the class of each rank.
        touched_bytes: bytes that each rank writes in local sums and copies, besides ``copied_bytes``.
        links: bytes of all ranks by where they go: "same_rank", "same_node" or "other_node". Copies from or to memory
            that the ranks of a node share count as "same_node".
        node_bytes: of ``sent_bytes``, those to ranks of the same node.
        node_received: of ``received_bytes``, those from ranks of the same node.
        shared_bytes: of ``copied_bytes``, those from or to memory that the ranks of the node share.
        collective_copies: of ``copied_bytes``, those that ``touched_bytes`` has as well.
        collectives: sums over the ranks in a run.
        meetings: times that all ranks wait for each other in a run, besides collectives.
        pieces: in how many pieces, one after another, what is sent arrives: products begin with the first.
    """

    call: str
    algorithm: str
    path: str
    nranks: int
    ranks_per_node: int
    sent_bytes: Numbers
    received_bytes: Numbers
    messages: Numbers
    copied_bytes: Numbers
    flops: Numbers
    memory_bytes: Numbers
    shapes: list[Shapes]
    like: Numbers
    touched_bytes: Numbers
    links: dict[str, int]
    node_bytes: Numbers
    node_received: Numbers
    shared_bytes: Numbers
    collective_copies: Numbers
    collectives: int
    meetings: int
    pieces: int = 1

    @property
    def imbalance(self) -> float:
        """The most operations of a rank, relative to the average; 1 if nothing is computed."""
        return float(self.flops.max() / self.flops.mean()) if self.flops.any() else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return sums, and the most of any rank, as plain values. Local."""
        names = ("sent_bytes", "received_bytes", "messages", "copied_bytes", "flops", "memory_bytes")
        each = {name: getattr(self, name) for name in names}
        return {
            "call": self.call, "algorithm": self.algorithm, "path": self.path, "nranks": self.nranks,
            "ranks_per_node": self.ranks_per_node,
            "total": {name: int(numbers.sum()) for name, numbers in each.items()},
            "most": {name: int(numbers.max()) for name, numbers in each.items()},
            "links": self.links, "imbalance": self.imbalance, "collectives": self.collectives,
        }  # fmt: skip

    def __str__(self) -> str:
        rows: list[tuple[str, Numbers, Callable[[int], str]]] = [
            ("sent", self.sent_bytes, bytes_text), ("received", self.received_bytes, bytes_text),
            ("messages", self.messages, str), ("copied", self.copied_bytes, bytes_text), ("flops", self.flops, _count),
            ("memory", self.memory_bytes, bytes_text),
        ]  # fmt: skip
        lines = [
            self.call,
            f"  algorithm  {self.algorithm}" + (f": {self.path}" if self.path != self.algorithm else ""),
            f"  ranks      {self.nranks}, {self.ranks_per_node} per node",
            *(f"  {n:<10} {form(int(x.max()))} at most, {form(int(x.sum()))} in all" for n, x, form in rows),
            *(f"  {link.replace('_', ' '):<10} {bytes_text(self.links[link])}" for link in LINKS),
            f"  imbalance  {self.imbalance:.2f}",
        ]
        return "\n".join(lines)


def bytes_text(number: int) -> str:
    """Return "64 KiB" for 65536. Local."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def _count(number: int) -> str:
    return f"{number:.3g}"
