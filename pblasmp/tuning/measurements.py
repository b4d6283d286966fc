# SPDX-License-Identifier: Apache-2.0
"""Times measured on this machine: a small file per user, and what "auto" makes of it.

The file is JSON. It is read only if it is complete and of the current version, and every number in it makes sense: any
other file is ignored with a warning, and algorithms are chosen by rule. A file of an earlier version is replaced by the
next measurement, other files are left alone.

A time counts for a problem only if everything but the sizes is alike: operations, options, and of every operand the
type, the memory order, the grid, the process with the first block and the block size. But a dimension that is cut into
a few equal parts, no more than the longer side of the grid, is like one of another extent in as many equal parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
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
from ..engines.request import AnyProblem, Options
from ..errors import ArgumentError, counted, short_repr
from ..layout import FactorProblem, Level3Problem, MatmulProblem, MatrixDescriptor, ParallelProblem
from ..layout.axis import Axis
from ..trust import fault_of, make_private, open_trusted

_VERSION = 2  # of the file: another key, another version
_MARK = "pblasmp tuning"
_LARGEST_FILE = 8 << 20  # bytes: about 10,000 measurements
_LARGEST_SIZE = 2**48
_TIMES = 1e-9, 1e7  # seconds: the shortest and the longest that can have been measured
_STEPS = 2  # number of buckets per doubling of a size
_REACH = 2.0  # distance in doublings (root of the sum of squares) up to which a measurement is used
_NEAREST = 4
_LONG = 60  # characters of shares in a key


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
        """Return the entry in a file's JSON; ValueError, KeyError or TypeError if it is none. Local."""
        texts = [found[name] for name in ("machine", "key", "date")]
        sizes, seconds = found["sizes"], found["seconds"]
        whole = len(sizes) == 3 and all(type(n) is int and 0 <= n <= _LARGEST_SIZE for n in sizes)
        least, most = _TIMES
        times = [t for t in seconds.values() if type(t) in (int, float) and least <= t <= most]
        if not (whole and seconds and len(times) == len(seconds) and all(isinstance(x, str) for x in texts)):
            raise ValueError(f"no measurement: {short_repr(found)}")
        machine, key, date = texts
        return cls(machine, key, tuple(sizes), dict(seconds), date)


@dataclass
class Measured:
    """The measurements on this machine; the same on every rank.

    Attributes:
        machine: as in the entries.
        entries: by bucket.
        added: how many measurements have been added: algorithms chosen before may no longer be the fastest.
    """

    machine: str
    entries: dict[tuple[Any, ...], Entry] = field(default_factory=dict)
    added: int = 0

    def add(self, entry: Entry) -> None:
        """Add a usable measurement. Local; the same on every rank."""
        self.entries[entry.bucket] = entry
        self.added += 1

    def entry(
        self,
        problem: AnyProblem,
        options: Options,
        seconds: Mapping[str, float],
        date: str,
        epilogue: str = "",
    ) -> Entry:
        """Return a measurement as an entry; ``epilogue`` names what follows the product, if anything does. Local."""
        times = {name: max(_TIMES[0], each) for name, each in seconds.items()}
        return Entry(self.machine, self._key(problem, options, epilogue), _sizes(problem), times, date)

    def knows(self, problem: AnyProblem, options: Options, epilogue: str = "") -> bool:
        """Return whether these sizes, or their bucket, were measured, or cannot be: an extent is 0. Local."""
        entry = self.entry(problem, options, {}, "", epilogue)
        return not entry.usable or entry.bucket in self.entries

    def seconds(self, problem: AnyProblem, options: Options, epilogue: str = "") -> dict[str, float]:
        """Return by algorithm a problem's time, interpolated between measured sizes; empty if none is near. Local."""
        sizes = _sizes(problem)
        if not self.entries or 0 in sizes:
            return {}
        key = self._key(problem, options, epilogue)
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

    def _key(self, problem: AnyProblem, options: Options, epilogue: str) -> str:
        """Return all that decides the times of algorithms but the sizes, in words."""
        words: list[Any] = []
        if isinstance(problem, ParallelProblem):
            words += _parallel_words(problem)
        else:
            words += _matrix_words(problem, options)
        words += ["beta"] if options.beta != 0 else []
        words += [options.compute] if options.compute else []
        words += [f"sent as {options.comm_dtype}"] if options.comm_dtype is not None else []
        words += [f"comm_sms={options.comm_sms}"] if options.comm_sms is not None else []
        words += [f"then {epilogue}"] if epilogue else []
        return " ".join(str(word) for word in words)


def _parallel_words(p: ParallelProblem) -> list[str]:
    """Return what is like another tensor-parallel product of other sizes."""
    types = (kind.name for kind in (p.dtype, p.w_dtype, p.out_dtype, p.c_dtype) if kind is not None)
    words = [p.form, *types, "N x K" if p.outputs_first else "K x N"]
    words += ["X gathered"] if p.return_gathered else []
    words += ["turned"] if p.turned else []
    words += [f"{what} {names}" for what in ("transposed", "conjugated") if (names := getattr(p, what))]
    shares = {name: getattr(p, name) for name in ("tokens", "inputs", "outputs", "rows")}
    return words + [f"{name} {_ratio(each)}" for name, each in shares.items() if not _even(each, p.inner)]


def _matrix_words(p: MatmulProblem | Level3Problem | FactorProblem, options: Options) -> list[str]:
    """Return what is like another product, or another call of a routine or a factorization, of other sizes."""
    if isinstance(p, FactorProblem):
        words = [p.routine, *(f"{name}={value}" for name, value in p.options.items())]
    elif isinstance(p, MatmulProblem):
        words = ["matmul", p.scheme, p.op_a + p.op_b]
    else:
        words = [p.routine, p.side, p.uplo, p.op_a, p.diag]
    c = p.c if isinstance(p, FactorProblem) or options.beta != 0 else None
    operands = {"A": p.a, "B": p.b, "C": c, "D": p.d}
    return words + [f"{name}: {_layout(x)}" for name, x in operands.items() if x is not None]


def _layout(x: MatrixDescriptor) -> str:
    """Return what is like the layout of another matrix of another size."""
    most = max(x.grid.shape)
    dealt = " x ".join(_dealt(each, most) for each in (x.rows, x.cols))
    return f"{x.dtype.name} {x.order} {dealt} on {x.grid}"


def _dealt(x: Axis, most: int) -> str:
    """Return how a dimension is dealt out: by its blocks, or by the number of equal parts, up to ``most``."""
    parts = max(1, -(-x.extent // x.block))
    equal = not x.lead and parts <= most and min(x.block, x.extent) == -(-x.extent // parts)
    words = f"{parts} parts" if equal else f"blocks of {x.block}"
    return words + (f" + {x.lead}" if x.lead else "") + (f" from {x.source}" if x.source else "")


def _even(shares: tuple[int, ...], inner: int) -> bool:
    """Return whether all ranks have about as much, or all that they can: the last ones may have less."""
    counts = Axis.even(-(-sum(shares) // inner), len(shares)).counts()
    return max(shares) - min(shares) <= inner or all(
        share == inner * count for share, count in zip(shares, counts, strict=True)
    )


def _ratio(shares: tuple[int, ...]) -> str:
    """Return unequal shares in lowest terms; of many ranks a digest of them."""
    divisor = math.gcd(*shares) or 1
    text = ":".join(str(share // divisor) for share in shares)
    return text if len(text) <= _LONG else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _sizes(problem: AnyProblem) -> tuple[int, int, int]:
    if isinstance(problem, ParallelProblem):
        return problem.sizes
    if isinstance(problem, FactorProblem):
        return *problem.a.shape, max(1, problem.right)
    return problem.m, problem.n, problem.k


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return math.hypot(*(math.log2(max(1, x) / max(1, y)) for x, y in zip(a, b, strict=True)))


# -- the machine, and the file


def machine_of(comm: Communicator, mine: str, libraries: str) -> str:
    """Return the machine in words, the same on every rank: processors, links, ranks, nodes, libraries. Collective.

    ``mine`` is this rank's processor and what links it to others.
    """
    processors, loaded = (
        " and ".join(sorted(set(each)))
        for each in zip(*allgather_alike(comm, (mine, libraries)), strict=True)
    )
    nodes = len(machines_of(comm.locations()))
    return f"{processors}, {counted(comm.size, 'rank')} on {counted(nodes, 'node')}, {loaded}"


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
    except _BROKEN as error:
        warnings.warn(f"{file}: ignored, algorithms are chosen by rule: {_reason(error)}", stacklevel=2)
        return []


class _EarlierError(ValueError):
    """A file of an earlier version."""


_BROKEN = OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError


def _read(file: Path) -> list[Entry]:
    try:
        text = _text(file)
    except FileNotFoundError:
        return []
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("kind") != _MARK:
        raise ValueError("not a file of measurements of pblasmp")
    version = found.get("version")
    if type(version) is int and version < _VERSION:
        raise _EarlierError(
            "it is of an earlier version, which kept less of each layout: the next measurement replaces it"
        )
    if version != _VERSION:
        raise ValueError(f"its version is {short_repr(version)}, expected {_VERSION}")
    return [entry for entry in map(Entry.read, found["measurements"]) if entry.usable]


def _text(file: Path) -> str:
    """Return what is in a file, or raise ValueError if ``save`` cannot have written that much, or there. Local."""
    with open_trusted(file) as opened:
        found = opened.read(_LARGEST_FILE + 1)
    if len(found) > _LARGEST_FILE:
        raise ValueError(f"it is larger than {_LARGEST_FILE >> 20} MiB")
    return found.decode()


def save(file: Path | None, new: list[Entry]) -> str:
    """Add measurements to a file, all or none of them, after waiting for other processes. Local.

    Return why they could not be saved, or an empty string. A file that pblasmp has not written is never overwritten.
    """
    if file is None:
        return "there is no home directory: set PBLASMP_TUNING to a file"
    try:
        if fault := fault_of(file.parent):
            raise ArgumentError(fault)
        make_private(file.parent)
        with _locked(file):
            try:
                old = _read(file)
            except _EarlierError:
                old = []
            entries = {entry.bucket: entry for entry in (*old, *new)}
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
                    if out.tell() > _LARGEST_FILE:
                        raise ValueError(f"it would be larger than {_LARGEST_FILE >> 20} MiB")
                    os.fsync(out.fileno())
                    Path(out.name).replace(file)
                except BaseException:
                    Path(out.name).unlink(missing_ok=True)
                    raise
    except _BROKEN as error:
        return f"{file}: {_reason(error)}; remove it, or set PBLASMP_TUNING to another file"
    return ""


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    number = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if fault := fault_of(Path(f"{file}.lock")):  # its owner could keep it locked
            raise ArgumentError(fault)
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError):
        return f"broken or half-written: {error}"
    return str(error) if isinstance(error, ValueError) else f"broken: {error!r}"
