# SPDX-License-Identifier: Apache-2.0
"""Runs of benchmarks as data: ``benchmarks/results/*.json`` has the newest run of each, by number of ranks or GPUs.

The docs' tables and charts are made from these files (docs/generate.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date, datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

DIRECTORY = Path(__file__).resolve().parent / "results"

_LISTS = ("seconds", "device_seconds", "rates", "ranges")
_NUMBERS = ("ratios", "errors", "bytes")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one benchmark.

    Attributes:
        benchmark: the script and what of it ran, such as "gpu_matmul-2d".
        date: when it ran, "2026-11-25".
        commit: the commit of pblasmp that ran; of older runs, the one that recorded it. "+" after it: with changes.
        ranks: how many ranks ran.
        gpus: how many GPUs they had; 0: none.
        machine: processor, cores, GPU and the like.
        versions: of the libraries that the times depend on.
        options: of the script.
        reference: whose time ``ratios`` are relative to: a contender's time over the reference's, or, if the reference
            is pblasmp, over pblasmp's; the median over the rounds.
        sample: what the lists of times hold: "all", or a summary such as "median of 9".
        rows: a dictionary for each case: ``case`` (what is computed), and for each contender ``seconds``, ``rates``
            (tokens per second), ``ratios``, ``errors``, ``ranges`` or ``bytes`` (of memory by number of a matrix);
            ``sent_bytes``: the most that a rank sends to other nodes.
    """

    benchmark: str
    date: str
    commit: str
    ranks: int
    gpus: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    reference: str
    sample: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """Return the name of its file, without the ending."""
        count = f"{self.gpus}-gpus" if self.gpus else f"{self.ranks}-ranks"
        return f"{self.benchmark}-{count}"

    @property
    def where(self) -> str:
        """Return the machine in words, such as "2 × NVIDIA H200"; GPUs that ranks share are so many fewer."""
        if self.gpus:
            share = self.machine.get("shared", 1)
            shared = f", shared by {self.ranks} ranks" if share > 1 else ""
            return f"{self.gpus // share} × {self.machine['gpu']}{shared}"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} on {self.machine['cores']} cores ({self.machine['cpu']})"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--results``, the directory that ``directory_of`` returns."""
    parser.add_argument(
        "--results", type=Path, metavar="DIRECTORY",
        help="where the JSON files go (default: benchmarks/results; with --quick nothing is written)",
    )  # fmt: skip


def directory_of(options: argparse.Namespace) -> Path | None:
    """Return where the files go, None if nothing is to be written."""
    if options.results is not None:
        return Path(options.results)
    return None if getattr(options, "quick", False) else DIRECTORY


def options_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a run as plain values, without paths and unset ones."""
    kept = {k: v for k, v in vars(options).items() if v not in (None, False, []) and not isinstance(v, Path)}
    return {
        k: v if isinstance(v, (int, float, str, list)) else str(v)
        for k, v in kept.items()
        if k not in ("rank_of", "rows")
    }


def this_commit() -> str:
    """Return the commit that is checked out; "+" after it: something is changed.

    Of a copy without git's data, ``PBLASMP_COMMIT`` names it; else "unknown".
    """
    git = ["git", "-C", str(DIRECTORY.parent)]
    try:
        commit, changes = (
            subprocess.run([*git, *step], check=True, capture_output=True, text=True).stdout.strip()
            for step in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("PBLASMP_COMMIT", "unknown")
    return commit + "+" * bool(changes)


def facts(ctx: Any) -> dict[str, Any]:
    """Return machine and versions of a context's ranks, as runs have them. Local."""
    if ctx.engine.device is None:
        from benchmarks.ranks import machine, versions

        return {"machine": machine(), "versions": versions()}
    from benchmarks.gpu_devices import gpu_machine, gpu_versions

    return {"machine": gpu_machine(ctx), "versions": gpu_versions(ctx)}


def between_hosts(about: dict[str, Any]) -> str:
    """Return "hosts-" for the name of a run whose ranks were on several hosts, or nothing. Local."""
    return "hosts-" if about["machine"].get("hosts", 1) > 1 else ""


def today() -> str:
    """Return the date, as runs have it."""
    return datetime.now(timezone.utc).date().isoformat()


def save(run: Run, directory: Path) -> Path:
    """Write a run into a directory, in place of the one before, and return the file's path.

    Raises:
        ValueError: the run is not as ``faults`` expects it.
    """
    if found := faults(asdict(run)):
        raise ValueError(f"{run.name}: {'; '.join(found)}")
    path = directory / f"{run.name}.json"
    directory.mkdir(parents=True, exist_ok=True)
    about = {key: value for key, value in asdict(run).items() if key != "rows"}
    head = json.dumps(about, indent=1, ensure_ascii=False).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in run.rows)
    path.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    return path


def with_earlier(run: Run, directory: Path) -> Run:
    """Return a run with the other cases of the one that is stored there, if commit and options are the same."""
    path = directory / f"{run.name}.json"
    earlier = load(path) if path.exists() else None
    if earlier is None or (earlier.commit, earlier.options) != (run.commit, run.options):
        return run
    cases = [row["case"] for row in run.rows]
    return replace(run, rows=[*(row for row in earlier.rows if row["case"] not in cases), *run.rows])


def load(path: Path) -> Run:
    """Return the run in a file.

    Raises:
        ValueError: the file is not as ``save`` writes it; the message has every fault.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    wrong = faults(found)
    if not wrong and (name := Run(**found).name) != path.stem:
        wrong = [f"the file is called {path.name}, expected {name}.json"]
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    return Run(**found)


def runs(directory: Path = DIRECTORY) -> dict[str, Run]:
    """Return all runs by name."""
    return {path.stem: load(path) for path in sorted(directory.glob("*.json"))}


def middle(row: Mapping[str, Any], contender: str) -> float | None:
    """Return the median time of a contender in a row in seconds, None if it has none."""
    times = row.get("seconds", {}).get(contender)
    return median(times) if times else None


def faults(run: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a run as a dictionary."""
    expected = [field.name for field in fields(Run)]
    if not isinstance(run, Mapping) or set(run) != set(expected):
        return [f"expected the keys {', '.join(expected)}"]
    found = [
        f"{key}: expected text, got {run[key]!r}"
        for key in ("benchmark", "date", "commit", "sample")
        if not isinstance(run[key], str) or not run[key]
    ]
    try:
        date.fromisoformat(run["date"])
    except (TypeError, ValueError):
        found.append(f"date: expected a date such as 2026-11-25, got {run['date']!r}")
    dictionaries = [key for key in ("machine", "versions", "options") if not isinstance(run[key], Mapping)]
    found += (f"{key}: expected a dictionary" for key in dictionaries)
    if not (
        isinstance(run["ranks"], int)
        and isinstance(run["gpus"], int)
        and 0 <= run["gpus"] <= run["ranks"] > 0
    ):
        found.append(
            f"ranks, gpus: expected at least one rank and no more GPUs, got {run['ranks']!r}, {run['gpus']!r}"
        )
    elif isinstance(run["machine"], Mapping) and not ({"gpu"} if run["gpus"] else {"cpu", "cores"}) <= set(
        run["machine"]
    ):
        found.append("machine: expected the GPU, or the processor and its cores")
    if not run["rows"]:
        found.append("rows: there are none")
    seen = []
    for i, row in enumerate(run["rows"]):
        case = row.get("case")
        if not isinstance(case, Mapping) or not case:
            found.append(f"row {i}: expected a case")
            continue
        if case in seen:
            found.append(f"row {i}: {dict(case)} again")
        seen.append(case)
        found += (f"row {i}: {fault}" for fault in _row_faults(row, run["reference"]))
    return found


def _row_faults(row: Mapping[str, Any], reference: Any) -> Iterator[str]:
    unknown = set(row) - {"case", "by", "flops", "failed", "sent_bytes", *_LISTS, *_NUMBERS}
    if unknown:
        yield f"unknown keys {', '.join(sorted(unknown))}"
    if not any(row.get(key) for key in (*_LISTS, *_NUMBERS, "failed")):
        yield "nothing was measured"
    for key in _LISTS:
        for name, values in row.get(key, {}).items():
            if not values or not all(_positive(value) for value in values):
                yield f"{key} of {name}: expected positive numbers, got {values}"
    for key in _NUMBERS:
        for name, value in row.get(key, {}).items():
            if not _positive(value):
                yield f"{key} of {name}: expected a positive number, got {value}"
    if row.get("ratios") and not reference:
        yield "ratios without a reference"


def _positive(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    )
