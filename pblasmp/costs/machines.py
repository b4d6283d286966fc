# SPDX-License-Identifier: Apache-2.0
"""Machines as data: what ranks compute, copy and send per second, measured or from a vendor's sheet.

descriptors/README.md explains the files.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from ..errors import ArgumentError, counted, short_repr
from ..problems.files import find, load_table, to_toml
from ..trust import as_path

_TOP = {
    "title", "description", "engine", "measured", "ranks_per_node", "memory_bytes", "cores", "overlaps", "network",
    "ranks",
}  # fmt: skip
_MOST_RANKS = 4096  # of a node
_LARGEST = 1e100
_FORMER = {
    "turn", "beside", "slows", "queue", "getrf_panel", "geqrt_panel", "trsm_panel", "gemqrt", "update", "products",
    "trsm", "potrf", "getrf", "swap",
}  # fmt: skip
"""Keys of files that earlier releases wrote. They are left out."""
_ENTRY = {
    "ranks", "call_seconds", "launch_seconds", "meeting_seconds", "calls", "copy", "link", "columns", "gemm", *_FORMER,
}  # fmt: skip

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Link:
    """What moves data: each move takes ``seconds`` and its bytes divided by ``bytes_per_second``."""

    bytes_per_second: float
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeOf:
    """What each of so many ranks of a node does while the others do the same.

    Attributes:
        ranks: how many ranks.
        gemm: by element type, the floating-point operations per second in products of n × n matrices, by n.
        columns: by kernel ("trsm", "potrf", "getrf" or "geqrt"), the seconds of each equation, or column, besides those
            of its operations.
        copy: copies in a rank's own memory.
        link: messages to other ranks of the node; None if there are none.
        launch_seconds: what it takes the host to start a local product.
        meeting_seconds: how long the ranks take to wait for each other.
        call_seconds: what a call takes the host besides that.
        calls: the same for some kinds of problems: "product", "routine", a form of tensor-parallel products, or a
            factorization.
    """

    ranks: int
    gemm: Mapping[str, Curve]
    copy: Link
    link: Link | None = None
    launch_seconds: float = 0.0
    meeting_seconds: float = 0.0
    call_seconds: float = 0.0
    calls: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, float] = field(default_factory=dict)

    def _curve(self, dtype: str) -> Curve:
        return self.gemm.get(dtype) or self.gemm.get(_LIKE.get(dtype, ""), ())

    def rate(self, dtype: str, size: float) -> float:
        """Return the operations per second in products of n × n matrices, interpolated between measured n. Local.

        A type that was not measured has the rate of the real type of its precision, or else that of float32.
        """
        curve = self._curve(dtype) or self._curve("float32")
        return _between(curve or next(iter(self.gemm.values())), size)

    def largest(self, dtype: str) -> int:
        """Return the largest n of products that was measured for a type, 0 if none was. Local."""
        curve = self._curve(dtype)
        return curve[-1][0] if curve else 0


def _between(curve: Curve, size: float) -> float:
    """Return the value at ``size``, interpolated in logarithms; outside of the curve that of its end."""
    sizes = [n for n, _ in curve]
    i = bisect_left(sizes, size)
    if i in (0, len(curve)):
        return curve[min(i, len(curve) - 1)][1]
    (low, below), (high, above) = curve[i - 1], curve[i]
    part = math.log(size / low) / math.log(high / low)
    return math.exp(math.log(below) * (1 - part) + math.log(above) * part)


_LIKE = {"complex64": "float32", "complex128": "float64", "float16": "bfloat16", "bfloat16": "float16"}


@dataclass(frozen=True)
class Machine:
    """A machine: nodes of ``ranks_per_node`` ranks, and a network if there are several. Local.

    Attributes:
        name: of its file.
        title: what it is.
        engine: "host" (CPU ranks) or "gpu".
        measured: its numbers are from ``pblasmp measure``; otherwise they are a vendor's, or estimates.
        ranks_per_node: ranks of a node.
        memory_bytes: memory for each rank.
        cores: of a node, which is how many of its CPU ranks factor matrices; 0: all.
        overlaps: messages travel while ranks compute.
        nodes: what ranks do, by how many of a node's work at once.
        network: messages between nodes, for each rank; None: there is one node.
    """

    name: str
    title: str
    engine: str
    measured: bool
    ranks_per_node: int
    memory_bytes: int
    overlaps: bool
    nodes: tuple[NodeOf, ...]
    network: Link | None = None
    description: str = field(default="", compare=False)
    cores: int = 0

    def node_of(self, ranks: int) -> tuple[NodeOf, str]:
        """Return what so many ranks of a node do, and a remark if that was not measured. Local."""
        found = min(self.nodes, key=lambda each: (abs(math.log(each.ranks / ranks)), each.ranks))
        if found.ranks == ranks:
            return found, ""
        return found, f"{counted(ranks, 'rank')} on a node: measured with {found.ranks}"

    def __str__(self) -> str:
        return self.title if self.measured else f"{self.title} (not measured by pblasmp)"


def load_machine(machine: str | PathLike[str] | Machine) -> Machine:
    """Return a machine: of descriptors/machines by name, or from a file. Local.

    Raises:
        ArgumentError: there is no such machine, or the file is not a machine's.
    """
    if isinstance(machine, Machine):
        return machine
    known = {path.stem: path for path in find("machines")}
    path = known.get(str(machine)) or as_path(machine, "machine")
    if not path.exists():
        raise ArgumentError(f"machine: expected one of {', '.join(known)} or a file, got {str(machine)!r}")
    return machine_from(load_table(path), path.stem)


def machine_from(table: Mapping[str, Any], name: str) -> Machine:
    """Return the machine in a table: the keys of a machine's file. Local.

    Raises:
        ArgumentError: keys are missing or unknown, or values make no sense; every fault is named.
    """
    faults = [f"{key}: unknown key" for key in table if key not in _TOP]
    faults += [
        f"{key}: missing" for key in ("title", "measured", "ranks_per_node", "ranks") if key not in table
    ]
    entries = table.get("ranks", [])
    if not (isinstance(entries, list) and entries and all(isinstance(each, dict) for each in entries)):
        faults.append("ranks: expected tables [[ranks]]")
        entries = []
    for i, entry in enumerate(entries):
        faults += [f"ranks[{i}].{key}: unknown key" for key in entry if key not in _ENTRY]
        faults += [f"ranks[{i}].{key}: missing" for key in ("ranks", "copy", "gemm") if key not in entry]
    if not faults:
        try:
            return _machine(table, name)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            faults.append(f"{type(error).__name__}: {error}")
    raise ArgumentError(f"machine {name}: " + "; ".join(faults))


def _machine(table: Mapping[str, Any], name: str) -> Machine:
    nodes = tuple(
        NodeOf(
            _count(entry["ranks"]),
            copy=_link(entry["copy"]),
            link=_link(entry["link"]) if "link" in entry else None,
            calls={kind: _seconds(seconds) for kind, seconds in entry.get("calls", {}).items()},
            launch_seconds=_seconds(entry.get("launch_seconds", 0)),
            meeting_seconds=_seconds(entry.get("meeting_seconds", 0)),
            call_seconds=_seconds(entry.get("call_seconds", 0)),
            gemm=_curves(entry["gemm"]),
            columns={name: _seconds(seconds) for name, seconds in entry.get("columns", {}).items()},
        )
        for entry in table["ranks"]
    )
    engine = table.get("engine", "host")
    if engine not in ("host", "gpu"):
        raise ValueError(f"engine: expected 'host' or 'gpu', got {short_repr(engine)}")
    return Machine(
        name, table["title"], engine, bool(table["measured"]), _count(table["ranks_per_node"]),
        _positive(table.get("memory_bytes", 1 << 40)), bool(table.get("overlaps", engine == "gpu")), nodes,
        _link(table["network"]) if "network" in table else None, table.get("description", ""),
        int(table.get("cores", 0)),
    )  # fmt: skip


def _curves(table: Mapping[str, Any]) -> dict[str, Curve]:
    return {
        dtype: tuple(sorted((_positive(n), float(_positive(rate))) for n, rate in curve))
        for dtype, curve in table.items()
    }


def _positive(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST:
        raise ValueError(f"expected a positive number, got {short_repr(value)}")
    return value


def _count(value: Any) -> int:
    if type(_positive(value)) is not int or value > _MOST_RANKS:
        raise ValueError(f"ranks of a node: expected an integer, at most {_MOST_RANKS}, got {value}")
    return int(value)


def _seconds(value: Any) -> float:
    return 0.0 if value == 0 else float(_positive(value))


def _link(table: Mapping[str, Any]) -> Link:
    return Link(float(_positive(table["bytes_per_second"])), _seconds(table.get("seconds", 0)))


def with_ranks(table: dict[str, Any] | None, entry: dict[str, Any], **about: Any) -> dict[str, Any]:
    """Return a machine's table with what so many ranks of a node do, which replaces an earlier measurement. Local.

    Args:
        table: the table so far, if any.
        entry: a table ``[[ranks]]``.
        about: the other keys of a new table.
    """
    old = [] if table is None else [x for x in table["ranks"] if x["ranks"] != entry["ranks"]]
    entries = sorted([*old, entry], key=lambda each: each["ranks"])
    made = {**about, **(table or {}), "ranks": entries}
    made["ranks_per_node"] = max(each["ranks"] for each in entries)
    return made


def machine_toml(table: Mapping[str, Any]) -> str:
    """Return a machine's table as the text of its file, in which numbers have four digits. Local."""

    def rounded(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: rounded(each) for key, each in x.items()}
        if isinstance(x, (list, tuple)):
            return [rounded(each) for each in x]
        return float(f"{x:.4g}") if isinstance(x, float) else x

    return to_toml(rounded(table))
