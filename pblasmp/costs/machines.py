# SPDX-License-Identifier: Apache-2.0
"""Machines as data: what ranks compute, copy and send per second, measured or from a vendor's sheet.

docs/planning.md explains the files.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, counted, short_repr
from ..problems.files import find, load_table, to_toml

__all__ = ["Link", "Machine", "NodeOf", "load_machine", "machine_from", "machine_toml", "with_ranks"]

_TOP = {
    "title", "description", "engine", "measured", "ranks_per_node", "memory_bytes", "cores", "overlaps", "network",
    "ranks",
}  # fmt: skip
_MOST_RANKS = 4096  # of a node
_LARGEST = 1e100
_CURVES = ("gemm", "trsm", "potrf", "getrf")
_PANELS = ("getrf_panel", "geqrt_panel", "trsm_panel", "gemqrt", "update", "products")
_ENTRY = {
    "ranks", "call_seconds", "launch_seconds", "meeting_seconds", "calls", "copy", "link", "turn", "swap",
    "beside", "slows", "queue", *_CURVES, *_PANELS,
}  # fmt: skip


Curve = tuple[tuple[int, float], ...]
Panels = Mapping[int, Curve]
"""By width, how many seconds a column of a panel takes, by the number of rows."""
Products = Mapping[tuple[int, int, int], float]
"""By m, n and k, which each have the same extents, the operations per second of products."""


@dataclass(frozen=True, slots=True)
class Link:
    """What moves data: each move takes ``seconds`` and its bytes divided by ``bytes_per_second``."""

    bytes_per_second: float
    seconds: float = 0.0

    def time(self, nbytes: float, moves: float = 0) -> float:
        """Return how long ``moves`` moves of ``nbytes`` together take. Local."""
        return nbytes / self.bytes_per_second + moves * self.seconds


@dataclass(frozen=True)
class NodeOf:
    """What each of so many ranks of a node does while the others do the same.

    Attributes:
        ranks: how many ranks.
        gemm: by element type, the floating-point operations per second in products of n × n matrices, by n.
        trsm, potrf, getrf: likewise in solves of n equations for n right-hand sides and in factorisations of n × n
            matrices; empty if that was not measured.
        getrf_panel, geqrt_panel: by element type, how long factorisations of panels take.
        trsm_panel: likewise solves with few equations, the columns, for many right-hand sides, the rows.
        gemqrt: by element type and n, the operations per second in products of a panel's reflectors with m × n
            matrices, by m.
        update: by element type and k, the operations per second in products of n × k and k × n matrices that are added,
            by n.
        products: by element type, the operations per second of m × k by k × n products that are added, by m,
            n and k, in column-major order.
        copy: copies in a rank's own memory.
        turn: copies from one memory order to the other; like ``copy`` if that was not measured.
        swap: exchanges of rows; likewise.
        beside: on GPUs, what work ahead takes longer while products run, in seconds by kernel: for each column of a
            panel, or for a product.
        slows: how many times as long those products take.
        queue: what it takes the host to queue that, in seconds by kernel, likewise.
        link: messages to other ranks of the node; None if there are none.
        launch_seconds: what it takes the host to start a local product.
        meeting_seconds: how long the ranks take to wait for each other.
        call_seconds: what a call takes the host besides that.
        calls: the same for some kinds of problems: "product", "routine", a form of tensor-parallel products, or a
            factorisation.
    """

    ranks: int
    gemm: Mapping[str, Curve]
    copy: Link
    link: Link | None = None
    launch_seconds: float = 0.0
    meeting_seconds: float = 0.0
    call_seconds: float = 0.0
    calls: Mapping[str, float] = field(default_factory=dict)
    trsm: Mapping[str, Curve] = field(default_factory=dict)
    potrf: Mapping[str, Curve] = field(default_factory=dict)
    getrf: Mapping[str, Curve] = field(default_factory=dict)
    getrf_panel: Mapping[str, Panels] = field(default_factory=dict)
    geqrt_panel: Mapping[str, Panels] = field(default_factory=dict)
    trsm_panel: Mapping[str, Panels] = field(default_factory=dict)
    gemqrt: Mapping[str, Panels] = field(default_factory=dict)
    update: Mapping[str, Panels] = field(default_factory=dict)
    products: Mapping[str, Products] = field(default_factory=dict)
    turn: Link | None = None
    swap: Link | None = None
    beside: Mapping[str, float] = field(default_factory=dict)
    slows: Mapping[str, float] = field(default_factory=dict)
    queue: Mapping[str, float] = field(default_factory=dict)

    def curve(self, kernel: str, dtype: str) -> Curve:
        """Return the rates that were measured for a kernel and a type or the real type of its precision. Local."""
        curves: Mapping[str, Curve] = getattr(self, kernel)
        return curves.get(dtype) or curves.get(_LIKE.get(dtype, ""), ())

    def rate(self, dtype: str, size: float, kernel: str = "gemm") -> float:
        """Return the operations per second of a kernel on n × n matrices, interpolated between measured n. Local.

        What was not measured has the rate of products, and a type that was not measured that of float32.
        """
        curve = self.curve(kernel, dtype) or self.curve("gemm", dtype) or self.curve("gemm", "float32")
        if not curve:
            curve = next(iter(self.gemm.values()))
        return _between(curve, size)

    def product_rate(self, dtype: str, m: int, n: int, k: int) -> float:
        """Return the operations per second of a product of m × k and k × n matrices. Local.

        If products of all shapes were measured, interpolated between these, but for what is larger in every dimension;
        if not, as fast as square ones of as many operations, or as those with a small k.
        """
        of = self.products.get(dtype)
        if of and min(m, n, k) < max(of)[0]:
            return _between_shapes(of, (m, n, k))
        return self.update_rate(dtype, (m * n) ** 0.5, k) or self.rate(dtype, (m * n * k) ** (1 / 3))

    def update_rate(self, dtype: str, size: float, k: int) -> float | None:
        """Return the operations per second of products with a small k; None if k is not small, or none was measured.

        Local.
        """
        of = self.update.get(dtype) or self.update.get(_LIKE.get(dtype, ""))
        if not of or k > max(of) or 2 * k > size:
            return None
        return _between(tuple((width, _between(curve, size)) for width, curve in of.items()), k)

    def reflection_rate(self, dtype: str, m: int, n: int) -> float | None:
        """Return the operations per second in products of a panel's reflectors with an m × n matrix, None if unknown.

        Local.
        """
        of = self.gemqrt.get(dtype) or self.gemqrt.get(_LIKE.get(dtype, ""))
        if not of:
            return None
        return _between(tuple((cols, _between(curve, m)) for cols, curve in of.items()), n)

    def panel_seconds(self, kernel: str, dtype: str, rows: int, cols: int) -> float | None:
        """Return how long a kernel takes on a panel, interpolated between measured ones; None if none was. Local.

        A column takes about as long in panels of any width. What is wider than measured is a panel only if it is a
        factorisation of something tall.
        """
        panels: Mapping[str, Panels] = getattr(self, f"{kernel}_panel")
        of = panels.get(dtype) or panels.get(_LIKE.get(dtype, ""))
        if not of or (cols > max(of) and (kernel == "trsm" or rows < 2 * cols)):
            return None
        return cols * _between(tuple((width, _taller(curve, rows)) for width, curve in of.items()), cols)

    def largest(self, dtype: str) -> int:
        """Return the largest n of products that was measured for a type, 0 if none was. Local."""
        curve = self.curve("gemm", dtype)
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


def _between_shapes(products: Products, shape: tuple[int, int, int]) -> float:
    """Return the value at a shape, interpolated in logarithms; outside of what was measured that of its end."""
    extents = sorted({m for m, _, _ in products})
    near = []
    for x in shape:
        i = min(max(bisect_left(extents, x), 1), len(extents) - 1)
        low, high = extents[i - 1], extents[i]
        part = math.log(x / low) / math.log(high / low)
        part = min(max(part, 0.0), 1.0)
        near.append(((low, 1 - part), (high, part)))
    total = 0.0
    for corner in itertools.product(*near):
        weight = math.prod(part for _, part in corner)
        m, n, k = (at for at, _ in corner)
        total += weight * math.log(products[m, n, k])
    return math.exp(total)


def _taller(curve: Curve, rows: float) -> float:
    """Return the value at ``rows``, interpolated; beyond the curve, extrapolated from its last two points."""
    if len(curve) < 2 or rows <= curve[-1][0]:
        return _between(curve, rows)
    (low, below), (high, above) = curve[-2:]
    return float(above * (rows / high) ** (math.log(above / below) / math.log(high / low)))


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
    path = known.get(str(machine)) or Path(machine)
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
            trsm=_curves(entry.get("trsm", {})),
            potrf=_curves(entry.get("potrf", {})),
            getrf=_curves(entry.get("getrf", {})),
            getrf_panel=_panels(entry.get("getrf_panel", {})),
            geqrt_panel=_panels(entry.get("geqrt_panel", {})),
            trsm_panel=_panels(entry.get("trsm_panel", {})),
            gemqrt=_panels(entry.get("gemqrt", {}), each=False),
            update=_panels(entry.get("update", {}), each=False),
            products={dtype: _products(points) for dtype, points in entry.get("products", {}).items()},
            turn=_link(entry["turn"]) if "turn" in entry else None,
            swap=_link(entry["swap"]) if "swap" in entry else None,
            beside={name: _seconds(seconds) for name, seconds in entry.get("beside", {}).items()},
            slows={name: _seconds(times) for name, times in entry.get("slows", {}).items()},
            queue={name: _seconds(seconds) for name, seconds in entry.get("queue", {}).items()},
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


def _panels(table: Mapping[str, Any], *, each: bool = True) -> dict[str, Panels]:
    """Return by element type and columns what ``[rows, columns, value]`` say; ``each``: the value of a column."""
    found: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for dtype, points in table.items():
        for rows, cols, value in points:
            of = found.setdefault(dtype, {}).setdefault(_positive(cols), [])
            of.append((_positive(rows), _positive(value) / (cols if each else 1)))
    return {
        dtype: {width: tuple(sorted(points)) for width, points in sorted(of.items())}
        for dtype, of in found.items()
    }


def _products(points: Iterable[Any]) -> Products:
    found = {(_positive(m), _positive(n), _positive(k)): float(_positive(rate)) for m, n, k, rate in points}
    extents = {m for m, _, _ in found}
    if len(extents) < 2 or len(found) != len(extents) ** 3 or not {*itertools.chain(*found)} <= extents:
        raise ValueError("products: expected all m, n and k of at least two extents")
    return found


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
