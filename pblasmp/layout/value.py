# SPDX-License-Identifier: Apache-2.0
"""What descriptors and problems have in common as values: tables and TOML text of them, pictures, and traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentTypeError, LayoutError, faults_text, short_repr
from ..lazy import hook

if TYPE_CHECKING:
    from typing_extensions import Self

LINKS = ("same_rank", "same_node", "other_node")

Numbers = NDArray[np.int64]
Kernel = tuple[str, str, int, int, int]
Shapes = Counter[Kernel]
T = TypeVar("T")


def changed(value: T, **changes: Any) -> T:
    """Return a shallow copy with other values of some attributes: sooner than ``dataclasses.replace``. Local."""
    copied: T = object.__new__(type(value))
    object.__setattr__(copied, "__dict__", value.__dict__ | changes)
    return copied


@dataclass(frozen=True, eq=False)
class Traffic:
    """What each rank of a computation does in one run, in arrays over the ranks. Local.

    Attributes:
        call: what is computed.
        algorithm: the algorithm.
        path: how it computes, in a few words.
        nranks, ranks_per_node: the ranks.
        sent_bytes, received_bytes: bytes in messages to and from other ranks. In sums over the ranks parts and results
            count as if they traveled once, as in ``plan.report()``; with several nodes, as if between nodes.
        messages: messages that each rank sends; ``collectives`` are not among them.
        copied_bytes: bytes that each rank copies in its own memory or its node's.
        flops: floating-point operations of products and solves, four times as many of complex types.
        memory_bytes: operands, result and workspace.
        shapes: for each class of ranks that compute alike, how often a kernel is run, by its name, type, m, n and k:
            "gemm", with m and n exchanged if CPU ranks write in row-major order; "trsm" with k = m equations; "potrf",
            "getrf", "geqrt"; "gemqrt" with k reflectors.
        like: the class of each rank.
        touched_bytes: bytes that each rank writes in local sums, copies and exchanges of rows, besides
            ``copied_bytes``.
        node_bytes: of ``sent_bytes``, those to ranks of the same node.
        node_received: of ``received_bytes``, those from ranks of the same node.
        shared_bytes: of ``copied_bytes``, those from or to memory that the ranks of the node share.
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
    node_bytes: Numbers
    node_received: Numbers
    shared_bytes: Numbers
    collectives: int = 0
    meetings: int = 0
    pieces: int = 1

    @property
    def links(self) -> dict[str, int]:
        """Bytes of all ranks by where they go: "same_rank", "same_node" or "other_node".

        Copies from or to memory that the ranks of a node share count as "same_node".
        """
        found = (
            self.copied_bytes - self.shared_bytes,
            self.node_bytes + self.shared_bytes,
            self.sent_bytes - self.node_bytes,
        )
        return {link: _total(numbers) for link, numbers in zip(LINKS, found, strict=True)}

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
            "total": {name: _total(numbers) for name, numbers in each.items()},
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
            *(f"  {n:<10} {form(int(x.max()))} at most, {form(_total(x))} in all" for n, x, form in rows),
            *(f"  {link.replace('_', ' '):<10} {bytes_text(self.links[link])}" for link in LINKS),
            f"  imbalance  {self.imbalance:.2f}",
        ]
        return "\n".join(lines)


def _total(numbers: Numbers) -> int:
    """Return the sum over the ranks, which may need more than the 64 bits that a rank's number has. Local."""
    return sum(numbers.tolist())


def bytes_text(number: int) -> str:
    """Return "64 KiB" for 65536. Local."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def time_text(seconds: float) -> str:
    """Return "1.5 ms" for 0.0015 seconds. Local."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} µs"


def _count(number: int) -> str:
    return f"{number:.3g}"


class Value:
    """A value that descriptor files can hold, and notebooks draw."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the value in a table of plain values: one from ``to_dict`` or a descriptor file. Local.

        Args:
            data: the keys of a descriptor file, of which ``title`` may be missing. Those that say nothing about layouts
                (``title``, ``description``, ``alpha``, ``beta``) are checked and not kept.

        Raises:
            LayoutError: a key is unknown or missing, or a value makes no sense; the message names every fault.
        """
        made: Self = hook("made_from")(cls, data)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return a table of plain values that ``from_dict`` reads back: JSON and TOML can hold it. Local."""
        raise NotImplementedError

    def _repr_html_(self) -> str | None:
        try:
            picture: str = hook("draw")(self).svg
        except LayoutError:  # it has no picture
            return None
        return picture


class Problem(Value):
    """A problem: a value with a title in files."""

    __slots__ = ()

    def facts(self) -> dict[str, object]:
        """Return by name what must be the same on every rank. Local."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]  # subclasses are

    @property
    def what(self) -> str:
        """What it is called in messages: a product, or the routine's name. Local."""
        return getattr(self, "routine", "product")

    def faults(self, result: str = "d") -> list[str]:
        """Return every reason why the problem is not legal, each with a remedy; empty if it is legal. Local.

        Args:
            result: the name of D in messages: the caller's argument that gives its layout.
        """
        raise NotImplementedError

    def validate(self, result: str = "d") -> None:
        """Raise LayoutError naming every fault at once, or return None. Local.

        Args:
            result: the name of D in messages: the caller's argument that gives its layout.
        """
        found = self.faults(result)
        if found:
            raise LayoutError(faults_text(f"this {self.what}", found))

    def to_dict(self, title: str = "") -> dict[str, Any]:
        """Return a table of plain values that ``from_dict`` reads back: JSON and TOML can hold it. Local.

        Args:
            title: of the file; by default ``str`` of the problem.
        """
        if not isinstance(title, str):
            raise ArgumentTypeError(f"title: expected a text, got {short_repr(title)}")
        operands = {name: x.to_dict() for name in "abcd" if (x := getattr(self, name, None)) is not None}
        return {"title": title or str(self), **self._keys(), **operands}

    def _keys(self) -> dict[str, Any]:
        """Return what a table of it has besides a title and matrices."""
        raise NotImplementedError

    def to_toml(self, title: str = "") -> str:
        """Return the problem as the text of a descriptor file, which ``pblasmp.load_problem`` reads back. Local.

        Args:
            title: of the file; by default ``str`` of the problem.
        """
        text: str = hook("to_toml")(self.to_dict(title))
        return text

    def traffic(
        self,
        algorithm: str = "auto",
        *,
        alpha: complex = 1,
        beta: complex | None = None,
        nranks: int | None = None,
        ranks_per_node: int | None = None,
        memory_bytes: int | None = None,
        cores: int | None = None,
    ) -> Traffic:
        """Return what every CPU rank sends, receives, computes and needs, without ranks. Local.

        The counts come from the code that runs: an algorithm prepares and runs on arrays without values. The matrix of
        a factorization and its factors have separate arrays.

        Args:
            algorithm: a name for ``algo``; "auto" takes the one that is the fastest by rule.
            alpha, beta: scalars; beta is 1 by default if the problem has a C.
            nranks: number of ranks; by default as many as the layouts need.
            ranks_per_node: consecutive ranks that share a node; by default all are on one.
            memory_bytes: free memory of a node, which "auto" looks at; by default enough.
            cores: of a node, which is how many of its ranks factor a matrix; by default all do.

        Returns:
            Arrays over the ranks, such as ``sent_bytes``, ``received_bytes``, ``messages``, ``flops`` and
            ``memory_bytes``, and sums over all ranks by link.

        Raises:
            ArgumentError: the problem is not legal, or an argument makes no sense.
            UnsupportedError: there is no such algorithm, it cannot compute the problem, or what it does depends on the
                values of the matrix.
        """
        found: Traffic = hook("traffic")(
            self, algorithm, alpha=alpha, beta=beta, nranks=nranks, ranks_per_node=ranks_per_node,
            memory_bytes=memory_bytes, cores=cores,
        )  # fmt: skip
        return found
