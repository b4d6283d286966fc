# SPDX-License-Identifier: Apache-2.0
"""Records of what ran on which GPUs: tests/gpu/runs.json, from which the docs' table is made."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pblasmp.bindings import version_text
from pblasmp.engines.gpu.runtime.nccl import nccl_version

RUNS = Path(__file__).parents[1] / "gpu" / "runs.json"
KEYS = ("date", "commit", "gpu", "gpus", "ranks", "cuBLASMp", "NCCL", "suites")
HOSTS = "hosts"  # the key of how many there were, if several


def facts(ctx: Any) -> dict[str, Any]:
    """Return what a record says of a context's ranks on GPUs: date, commit, GPUs and versions. Collective."""
    import cupy

    git = ["git", "-C", str(RUNS.parent), "rev-parse", "--short", "HEAD"]
    commit = (
        os.environ.get("PBLASMP_COMMIT")
        or subprocess.run(git, check=False, capture_output=True, text=True).stdout.strip()
        or "unknown"
    )
    places = ctx.comm.allgather((os.uname().nodename, ctx.engine.device.place))
    hosts, gpus = (len(set(each)) for each in zip(*places, strict=True))
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit,
        "gpu": cupy.cuda.runtime.getDeviceProperties(ctx.engine.device.index)["name"].decode(),
        "gpus": gpus,
        "ranks": ctx.size,
        "cuBLASMp": version_text(ctx.engine.version),
        "NCCL": version_text(nccl_version()),
        **({HOSTS: hosts} if hosts > 1 else {}),
    }


def suites_of(outcomes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return by test file how many tests had which outcome, given each test's name and outcome."""
    found: dict[str, Counter[str]] = {}
    for name, outcome in outcomes:
        found.setdefault(Path(name.partition("::")[0]).stem, Counter())[outcome] += 1
    return {
        suite: ", ".join(
            f"{count} {outcome}" for outcome, count in sorted(counts.items(), key=lambda x: x[0])
        )
        for suite, counts in sorted(found.items())
    }


def add(path: Path, run: Mapping[str, Any]) -> None:
    """Add a run, to the record of its date and commit if there is one.

    What a run of the same versions on the same GPUs says of the same suites is replaced.
    """
    check(run)
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def place(each: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(each.get(key) for key in ("gpu", "gpus", "ranks", "cuBLASMp", HOSTS))

    for each in runs:
        if place(each) == place(run):
            each["suites"] = {s: x for s, x in each["suites"].items() if s not in run["suites"]}
    alike = [each for each in runs if {**each, "suites": run["suites"]} == run]
    suites = {name: of for each in [*alike, run] for name, of in each["suites"].items()}
    runs = [each for each in runs if each["suites"] and each not in alike]
    runs.append({**run, "suites": dict(sorted(suites.items()))})
    lines = ",\n".join(f" {json.dumps(each, ensure_ascii=False)}" for each in runs)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def check(run: Mapping[str, Any]) -> None:
    """Raise ValueError unless a run has every key and at least one suite."""
    if set(run) - {HOSTS} != set(KEYS) or not run["suites"] or not 0 < run["gpus"] <= run["ranks"]:
        raise ValueError(
            f"expected {', '.join(KEYS)}, with suites, and no more GPUs than ranks; got {dict(run)}"
        )
