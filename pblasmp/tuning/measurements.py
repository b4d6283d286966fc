# SPDX-License-Identifier: Apache-2.0
"""Times measured on this machine: a small file per user, and what "auto" makes of it.

The file is JSON. It is read only if it is complete and of the current version: any other file is left alone, with a
warning, and algorithms are chosen by rule.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..comm import Communicator, allgather_alike, machines_of
from ..engines.request import Options, Problem
from ..layout import MatmulProblem, ParallelProblem

__all__ = ["Entry", "Measured", "machine_of", "read_file", "save", "tuning_file"]

_VERSION = 1
_MARK = "pblasmp tuning"
_STEPS = 2  # number of buckets per doubling of a size
_REACH = 2.0  # distance in doublings (root of the sum of squares) up to which a measurement is used
_NEAREST = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """Times of one product on one machine.

    Attributes:
        machine: processors, their number and library versions, as ``machine_of`` returns them.
        key: the kind of product: form, types, layouts.
        sizes: m, n and k; for tensor-parallel products tokens, outputs and inputs of all ranks.
        seconds: by algorithm.
        date: when they were measured.
    """

    machine: str
    key: str
    sizes: tuple[int, int, int]
    seconds: Mapping[str, float]
    date: str

    @property
    def bucket(self) -> tuple[Any, ...]:
        """The key under which a later measurement replaces this one."""
        return self.machine, self.key, *(round(_STEPS * math.log2(max(1, n))) for n in self.sizes)

    @property
    def usable(self) -> bool:
        """Whether other products' times follow from these: not if there is nothing to compute."""
        return 0 not in self.sizes

    @classmethod
    def read(cls, found: Any) -> Entry:
        """Return the entry in a file's JSON. Local.

        Raises:
            ValueError, KeyError, TypeError: it is not an entry.
        """
        texts = [found[name] for name in ("machine", "key", "date")]
        sizes, seconds = found["sizes"], found["seconds"]
        whole = len(sizes) == 3 and all(type(n) is int and n >= 0 for n in sizes)
        times = [t for t in seconds.values() if isinstance(t, (int, float)) and math.isfinite(t) and t > 0]
        if not (whole and seconds and len(times) == len(seconds) and all(isinstance(x, str) for x in texts)):
            raise ValueError(f"no measurement: {found}")
        machine, key, date = texts
        return cls(machine, key, tuple(sizes), dict(seconds), date)


@dataclass
class Measured:
    """The measurements on this machine; the same on every rank.

    Attributes:
        machine: as in the entries.
        planned: whether plans of tensor-parallel products replay CUDA graphs, and are measured apart from single runs.
        entries: by bucket.
        added: how many measurements have been added: algorithms chosen before may no longer be the fastest.
    """

    machine: str
    planned: bool
    entries: dict[tuple[Any, ...], Entry] = field(default_factory=dict)
    added: int = 0

    def add(self, entry: Entry) -> None:
        """Add a usable measurement. Local; the same on every rank."""
        self.entries[entry.bucket] = entry
        self.added += 1

    def entry(self, problem: Problem, options: Options, seconds: Mapping[str, float], date: str) -> Entry:
        """Return a measurement as an entry. Local."""
        return Entry(self.machine, self._key(problem, options), _sizes(problem), seconds, date)

    def knows(self, problem: Problem, options: Options) -> bool:
        """Return whether these sizes, or their bucket, were measured, or cannot be: an extent is 0. Local."""
        entry = self.entry(problem, options, {}, "")
        return not entry.usable or entry.bucket in self.entries

    def seconds(self, problem: Problem, options: Options) -> dict[str, float]:
        """Return by algorithm a problem's time, interpolated between measured sizes; empty if none is near. Local."""
        sizes = _sizes(problem)
        if not self.entries or 0 in sizes:
            return {}
        key = self._key(problem, options)
        near = [(_distance(entry.sizes, sizes), entry) for entry in self.entries.values() if entry.key == key]
        near = sorted((each for each in near if each[0] <= _REACH), key=lambda each: each[0])[:_NEAREST]
        if not near:
            return {}
        if near[0][0] == 0:  # these sizes were measured
            return dict(near[0][1].seconds)
        weights = [1 / (distance + 1e-3) ** 2 for distance, _ in near]
        names = [name for name in near[0][1].seconds if all(name in entry.seconds for _, entry in near)]
        work = math.prod(sizes)
        found = {}
        for name in names:
            logs = [
                weight * math.log(entry.seconds[name] * work / math.prod(entry.sizes))
                for weight, (_, entry) in zip(weights, near, strict=True)
            ]
            found[name] = math.exp(sum(logs) / sum(weights))
        return found

    def _key(self, problem: Problem, options: Options) -> str:
        words: list[Any]
        if isinstance(problem, ParallelProblem):
            types = problem.dtype.name, problem.w_dtype.name, problem.out_dtype.name
            words = [problem.form, *types, "N x K" if problem.outputs_first else "K x N"]
            words += ["X gathered"] if problem.return_gathered else []
            words += ["planned"] if self.planned and options.repeated else []
        elif isinstance(problem, MatmulProblem):
            types = problem.a.dtype.name, problem.b.dtype.name, problem.d.dtype.name
            words = ["matmul", problem.scheme, problem.op_a + problem.op_b, *types, problem.d.grid]
            words += [problem.a.order + problem.b.order + problem.d.order]
        else:
            p = problem
            words = [p.routine, p.side, p.uplo, p.op_a, p.a.dtype.name, p.d.grid, p.a.order + p.d.order]
        words += ["beta"] if options.beta != 0 else []
        words += [options.compute] if options.compute else []
        return " ".join(str(word) for word in words)


def _sizes(problem: Problem) -> tuple[int, int, int]:
    if isinstance(problem, ParallelProblem):
        return problem.sizes
    return problem.m, problem.n, problem.k


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return math.hypot(*(math.log2(max(1, x) / max(1, y)) for x, y in zip(a, b, strict=True)))


# -- the machine, and the file


def machine_of(comm: Communicator, mine: str, libraries: str) -> str:
    """Return the machine in words, the same on every rank: processors, links, ranks, nodes, libraries. Collective.

    Args:
        comm: the ranks.
        mine: this rank's processor and what links it to others.
        libraries: those of this rank.
    """
    processors, loaded = (
        " and ".join(sorted(set(each)))
        for each in zip(*allgather_alike(comm, (mine, libraries)), strict=True)
    )
    nodes = len(machines_of(comm.locations()))
    return f"{processors}, {comm.size} ranks on {nodes} node{'s' if nodes > 1 else ''}, {loaded}"


def tuning_file() -> Path | None:
    """Return the file of measurements: PBLASMP_TUNING, or else one in the user's cache directory. Local.

    None if the variable is not set and the user has no home directory.
    """
    named = os.environ.get("PBLASMP_TUNING", "")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "pblasmp" / "tuning.json"
    except RuntimeError:  # the user has no entry among the accounts, as in some containers
        return None


def read_file(file: Path | None) -> list[Entry]:
    """Return the usable measurements in a file; none, with a warning, if ``save`` did not write it. Local."""
    if file is None:
        return []
    try:
        return _read(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(f"{file}: ignored, algorithms are chosen by rule: {_reason(error)}", stacklevel=2)
        return []


def _read(file: Path) -> list[Entry]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("kind") != _MARK:
        raise ValueError("not a file of measurements of pblasmp")
    if found.get("version") != _VERSION:
        raise ValueError(f"its version is {found.get('version')!r}, expected {_VERSION}")
    return [entry for entry in map(Entry.read, found["measurements"]) if entry.usable]


def save(file: Path | None, new: list[Entry]) -> str:
    """Add measurements to a file, all or none of them, after waiting for other processes. Local.

    Returns:
        Why they could not be saved, or an empty string. A file that pblasmp has not written is never overwritten.
    """
    if file is None:
        return "there is no home directory: set PBLASMP_TUNING to a file"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file):
            entries = {entry.bucket: entry for entry in (*_read(file), *new)}
            content = {
                "kind": _MARK,
                "version": _VERSION,
                "measurements": [asdict(entry) for entry in entries.values()],
            }
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=file.parent, prefix=f".{file.name}.", delete=False
            ) as out:
                try:
                    json.dump(content, out, indent=1)
                    out.flush()
                    os.fsync(out.fileno())
                    Path(out.name).replace(file)
                except BaseException:
                    Path(out.name).unlink(missing_ok=True)
                    raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{file}: {_reason(error)}; remove it, or set PBLASMP_TUNING to another file"
    return ""


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with Path(f"{file}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError):
        return f"broken or half-written: {error}"
    return str(error) if isinstance(error, ValueError) else f"broken: {error!r}"
