# SPDX-License-Identifier: Apache-2.0
"""What gpu_matmul.py measures and how it shows it: shapes, statistics, tables, the plot. Needs no GPU and no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.charts import Bars, bar_chart
from pblasmp.tuning.timing import slowest

NCCL, GEMM, AUTO, SYMMETRIC, NVMATH = "NCCL + cuBLAS", "GEMM alone", "auto", "auto, symmetric", "nvmath"
CUBLASMP, C_CALL = "plan() of cuBLASMp", "C call"

# tokens, outputs (ag: per rank; rs, ar: all), inputs (ag: all; rs, ar: summed over ranks)
SHAPES = (
    (4096, 1792, 4096),
    (8192, 1792, 4096),
    (16384, 1792, 4096),
    (4096, 3584, 8192),
    (8192, 3584, 8192),
    (16384, 3584, 8192),
    (4096, 6656, 16384),
    (8192, 6656, 16384),
    (16384, 6656, 16384),
    (1024, 1024, 1024),
)
TITLES = {
    "allgather_matmul": "AllGather + GEMM",
    "matmul_reduce_scatter": "GEMM + ReduceScatter",
    "matmul_allreduce": "GEMM + AllReduce",
    "2d": "2D block-cyclic GEMM",
    "layouts": "2D block-cyclic GEMM by op and layout",
    "host": "Host time per call",
}
HEADLINE = (AUTO, SYMMETRIC, NCCL, NVMATH, GEMM)
_LABELS = {AUTO: "pblasmp", SYMMETRIC: "pblasmp, symmetric"}
_CASES = {
    "2d": ("n", "dtype", "grid", "block", "ops"),
    "layouts": ("n", "dtype", "grid", "block"),
    "host": ("product",),
}

Entry = Mapping[str, Any]  # "us" and what goes with it, or "failed": the reason
Row = Mapping[str, Any]  # "case": its label, "entries": contender → entry


def summary(samples: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the entry of a contender, given each rank's samples in microseconds."""
    times = slowest(samples)
    return {"us": median(times), "fastest_us": min(times), "samples_us": times}


def rows_of(section: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a section's rows as results have them: times in seconds, contenders that failed or were wrong apart."""
    found = []
    for row in rows:
        entries = {_LABELS.get(name, name): entry for name, entry in row["entries"].items()}
        good = {n: e for n, e in entries.items() if "us" in e and not e.get("wrong")}
        one: dict[str, Any] = {"case": case_of(section, row["case"])}
        one["seconds"] = {n: [us * 1e-6 for us in e.get("samples_us", [e["us"]])] for n, e in good.items()}
        if device := {n: [e["device_us"] * 1e-6] for n, e in good.items() if "device_us" in e}:
            one["device_seconds"] = device
        if bad := {n: e.get("failed", "wrong") for n, e in entries.items() if n not in good}:
            one["failed"] = bad
        found.append(one)
    return found


def case_of(section: str, label: str) -> dict[str, Any]:
    """Return a case as results have it, given its label in tables."""
    names = _CASES.get(section, ("T", "N", "K"))
    values = label.split(", ") if len(names) > 1 else [label]
    return {n: int(v) if v.isdigit() else v for n, v in zip(names, values, strict=True)}


def cell(entry: Entry | None) -> str:
    """Return what a table shows of an entry."""
    if entry is None:
        return ""
    if "failed" in entry:
        return "failed"
    return f"{entry['us']:.0f}" + (" WRONG" if entry.get("wrong") else "")


def host_cell(entry: Entry | None) -> str:
    """Return what the table of host times shows: the call's time on the host, and in brackets the device's."""
    if entry is None or "us" not in entry:
        return cell(entry)
    return f"{entry['us']:.1f}" + (f" ({entry['device_us']:.0f})" if "device_us" in entry else "")


def valid(row: Row) -> dict[str, float]:
    """Return the times of the contenders that ran and were right."""
    return {name: e["us"] for name, e in row["entries"].items() if "us" in e and not e.get("wrong")}


def contenders(rows: Sequence[Row]) -> list[str]:
    """Return the contenders of all rows, in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row["entries"]))


def markdown(rows: Sequence[Row], columns: Sequence[str], first: str) -> str:
    """Return a table of microseconds, a row per case."""
    head = [first, *(_LABELS.get(name, name) for name in columns)]
    lines = [head, ["---", *(["---:"] * len(columns))]]
    lines += [[row["case"], *(cell(row["entries"].get(name)) for name in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tuning(rows: Sequence[Row], first: str) -> str:
    """Return a table of all of pblasmp's variants and how far ``auto`` is from the best of those on the same memory."""
    own = [name for name in contenders(rows) if name not in (NCCL, GEMM, NVMATH)]
    table = markdown(rows, own, first).splitlines()
    extra = ["auto / best", "---:"]
    for row in rows:
        times = valid(row)
        notes = []
        for auto, suffix in ((AUTO, ""), (SYMMETRIC, ", symmetric")):
            same = {n: t for n, t in times.items() if n in own and n.endswith(", symmetric") == bool(suffix)}
            exact = {n: t for n, t in same.items() if "float32" not in n}
            if auto in exact:
                best = min(exact, key=exact.__getitem__)
                notes.append(f"{exact[auto] / exact[best]:.2f} ({best})")
        extra.append("; ".join(notes))
    return "\n".join(f"{line} {more} |" for line, more in zip(table, extra, strict=True))


def host_table(rows: Sequence[Row]) -> str:
    """Return the table of host times, with the ratio of a prepared plan of cuBLASMp's to the bare C call."""
    columns = contenders(rows)
    head = ["product", *columns, f"{CUBLASMP} / {C_CALL}"]
    lines = [head, ["---", *(["---:"] * (len(columns) + 1))]]
    for row in rows:
        entries, times = row["entries"], valid(row)
        ratio = f"{times[CUBLASMP] / times[C_CALL]:.2f}" if {CUBLASMP, C_CALL} <= set(times) else ""
        cells = [host_cell(entries.get(n)) for n in columns]
        lines.append([row["case"], *cells, ratio])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def layouts_table(rows: Sequence[Row]) -> str:
    """Return the table of ops and layouts: microseconds, and in brackets over those of the plain product."""
    columns = contenders(rows)
    lines = [["n, type, grid, nb", *columns], ["---", *(["---:"] * len(columns))]]
    for row in rows:
        times = valid(row)
        plain = times.get("NN")
        cells = [cell(row["entries"].get(name)) for name in columns]
        if plain:
            cells = [
                f"{text} ({times[name] / plain:.2f})" if name in times else text
                for name, text in zip(columns, cells, strict=True)
            ]
        lines.append([row["case"], *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def failures(sections: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return a line for every contender that failed or was wrong, equal reasons together."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for section, rows in sections.items():
        for row in rows:
            for name, entry in row["entries"].items():
                reason = entry.get("failed") or ("wrong" if entry.get("wrong") else "")
                if reason:
                    where.setdefault((section, name, reason), []).append(row["case"])
    return [
        f"{section}, {name}: failed: {reason} ({len(cases)} of {len(sections[section])} cases)"
        for (section, name, reason), cases in where.items()
    ]


def report(results: Mapping[str, Any]) -> str:
    """Return everything as Markdown: machine and versions, a table per section, what failed."""
    parts = ["\n".join(f"- {name}: {value}" for name, value in results["machine"].items())]
    for section, rows in results["sections"].items():
        if not rows:
            continue
        parts.append(f"### {TITLES[section]}, {results['nranks']} GPUs, µs")
        if section == "host":
            parts.append("In brackets: the same call on the device's clock.\n\n" + host_table(rows))
            continue
        if section == "layouts":
            parts.append("In brackets: over the time of NN.\n\n" + layouts_table(rows))
            continue
        first = "n, type, grid, nb, ops" if section == "2d" else "T, N, K"
        present = [name for name in HEADLINE if name in contenders(rows)]
        parts.append(markdown(rows, present, first))
        parts.append(tuning(rows, first))
    failed = failures(results["sections"])
    if failed:
        parts.append("\n".join(f"- {line}" for line in failed))
    return "\n\n".join(parts)


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw every section's times relative to the GEMM alone as grouped bars, into an SVG file."""
    charts = []
    for section, rows in results["sections"].items():
        cases = [
            (row["case"], {_LABELS.get(n, n): us for n, us in valid(row).items() if n in HEADLINE})
            for row in rows
        ]
        charts.append(Bars(f"{TITLES[section]}, {results['nranks']} GPUs", cases))
    chart = bar_chart(charts, reference=GEMM, order=[_LABELS.get(name, name) for name in HEADLINE])
    if chart is not None:
        chart.save(path)
