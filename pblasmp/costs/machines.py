# SPDX-License-Identifier: Apache-2.0
"""Machines as data: what ranks compute, copy and send per second, measured or from a vendor's sheet.

descriptors/README.md explains the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from ..errors import ArgumentError, counted, required, short_repr
from ..problems.files import find, load_table, to_toml
from ..trust import as_path

with required("machines' files", "cli"):
    from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

_FORMER = {
    "turn", "beside", "slows", "queue", "getrf_panel", "geqrt_panel", "trsm_panel", "gemqrt", "update", "products",
    "trsm", "potrf", "getrf", "swap", "meeting_seconds",
}  # fmt: skip
"""Keys of [[ranks]] in files that earlier releases wrote. They are left out."""

Positive = Annotated[float, Field(strict=True, gt=0, lt=1e30, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, ge=0, lt=1e30, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1, le=4096)]
Curve = Annotated[
    tuple[tuple[Annotated[int, Field(gt=0, lt=1 << 40)], Positive], ...],
    AfterValidator(lambda curve: tuple(sorted(curve))),
]


@dataclass(frozen=True, slots=True)
class Link:
    """What moves data: each move takes ``seconds`` and its bytes divided by ``bytes_per_second``."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    bytes_per_second: Positive
    seconds: Seconds = 0.0


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
        call_seconds: what a call takes the host besides that.
        calls: the same for some kinds of problems: "product", "routine", a form of tensor-parallel products, or a
            factorization.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    ranks: Count
    gemm: Annotated[dict[str, Curve], Field(min_length=1)]
    copy: Link
    link: Link | None = None
    launch_seconds: Seconds = 0.0
    call_seconds: Seconds = 0.0
    calls: dict[str, Seconds] = field(default_factory=dict)
    columns: dict[str, Seconds] = field(default_factory=dict)

    def _curve(self, dtype: str) -> Curve:
        return self.gemm.get(dtype) or self.gemm.get(_LIKE.get(dtype, ""), ())

    def rate(self, dtype: str, size: float) -> float:
        """Return the operations per second in products of n × n matrices. Local.

        They are interpolated in logarithms between measured n, and outside of these as at the next one. A type that was
        not measured has the rate of the real type of its precision, or else that of float32.
        """
        curve = self._curve(dtype) or self._curve("float32") or next(iter(self.gemm.values()))
        return float(np.exp(np.interp(math.log(size), *np.log(curve).T)))

    def largest(self, dtype: str) -> int:
        """Return the largest n of products that was measured for a type, 0 if none was. Local."""
        curve = self._curve(dtype)
        return curve[-1][0] if curve else 0


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

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    name: str
    title: str
    engine: Literal["host", "gpu"]
    measured: bool
    ranks_per_node: Count
    memory_bytes: Annotated[int, Field(gt=0)]
    overlaps: bool
    nodes: tuple[NodeOf, ...]
    network: Link | None = None
    description: str = field(default="", compare=False)
    cores: Annotated[int, Field(ge=0)] = 0

    def node_of(self, ranks: int) -> tuple[NodeOf, str]:
        """Return what so many ranks of a node do, and a remark if that was not measured. Local."""
        found = min(self.nodes, key=lambda each: (abs(math.log(each.ranks / ranks)), each.ranks))
        if found.ranks == ranks:
            return found, ""
        return found, f"{counted(ranks, 'rank')} on a node: measured with {found.ranks}"

    def __str__(self) -> str:
        return self.title if self.measured else f"{self.title} (not measured by pblasmp)"


def load_machine(machine: str | PathLike[str] | Machine) -> Machine:
    """Return a machine: of descriptors/machines by name, or from a file; ArgumentError if it is none. Local."""
    if isinstance(machine, Machine):
        return machine
    known = {path.stem: path for path in find("machines")}
    path = as_path(machine, "machine")
    path = known.get(str(path), path)
    if not path.exists():
        raise ArgumentError(
            f"machine: expected one of {', '.join(known)} or a file, got {short_repr(str(machine))}"
        )
    return machine_from(load_table(path), path.stem)


def machine_from(table: Mapping[str, Any], name: str) -> Machine:
    """Return the machine in a table, the keys of a machine's file; ArgumentError names every fault. Local."""
    engine, entries = table.get("engine", "host"), table.get("ranks", [])
    if not (isinstance(entries, list) and entries and all(isinstance(each, dict) for each in entries)):
        raise ArgumentError(f"machine {name}: ranks: expected tables [[ranks]]")
    if faults := [f"{key}: unknown key" for key in ("name", "nodes") if key in table]:
        raise ArgumentError(f"machine {name}: " + "; ".join(faults))
    nodes = [{key: each for key, each in entry.items() if key not in _FORMER} for entry in entries]
    given = {
        "engine": engine, "memory_bytes": 1 << 40, "overlaps": engine == "gpu", **table, "name": name, "nodes": nodes,
    }  # fmt: skip
    given.pop("ranks", None)
    try:
        return _MACHINE.validate_python(given)
    except ValidationError as error:
        raise ArgumentError(f"machine {name}: " + "; ".join(map(_fault, error.errors()))) from None


_MACHINE = TypeAdapter(Machine)


def _fault(found: Any) -> str:
    """Return in words what pydantic says of a key."""
    first, *more = found["loc"]
    key = ("ranks" if first == "nodes" else first) + "".join(
        f"[{each}]" if isinstance(each, int) else f".{each}" for each in more
    )
    what = {"missing": "missing", "unexpected_keyword_argument": "unknown key"}.get(found["type"])
    return f"{key}: " + (
        what or f"{found['msg'].replace('Input should be', 'must be')}, got {short_repr(found['input'])}"
    )


def with_ranks(table: dict[str, Any] | None, entry: dict[str, Any], **about: Any) -> dict[str, Any]:
    """Return a machine's table with what so many ranks of a node do, which replaces an earlier measurement. Local.

    ``entry`` is a table ``[[ranks]]``, ``about`` the other keys of a new table.
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
