# SPDX-License-Identifier: Apache-2.0
"""Turn the tables of benchmarks/README.md at commit 6252a30 into benchmarks/results/*.json.

The tables have medians, not all times. A file's commit is the one that first had the table's first row.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.results import Run, save  # noqa: E402

REVISION = "6252a30"
TEXT = subprocess.run(
    ["git", "show", f"{REVISION}:benchmarks/README.md"], cwd=ROOT, check=True, capture_output=True, text=True
).stdout

EPYC = {"cpu": "AMD EPYC", "cores": 2}
XEON = {"cpu": "Intel Xeon", "cores": 2}
H200 = {"gpu": "NVIDIA H200", "links": "NVLink", "multicast": "off"}
H100 = {"gpu": "NVIDIA H100 80 GB", "links": "NVLink", "multicast": "off"}
LIBRARIES = {"cuBLASMp": "0.10.0", "NCCL": "2.32.3"}
FOUR = LIBRARIES | {
    "driver": "580.159.04", "CUDA": "13.2", "cuBLASMp": "0.10.0.3695", "cuBLAS": "13.1.0.3", "CuPy": "14.2.0",
    "PyTorch": "2.11.0", "nccl4py": "0.6.0", "Python": "3.12.3",
}  # fmt: skip
OPENBLAS = {
    "Python": "3.11.7", "NumPy": "2.4.6", "SciPy": "1.17.1", "mpi4py": "4.1.2", "MPICH": "5.0.2",
    "OpenBLAS": "0.3.30 (SciPy)",
}  # fmt: skip


def table(after: str, start: int = 0) -> tuple[list[list[str]], str]:
    """Return the cells of the first table below some text, header first, and the commit that brought it."""
    below = TEXT[TEXT.index(after, start) + len(after) :]
    found = re.search(r"^\|.*?(?=^[^|]|\Z)", below, re.MULTILINE | re.DOTALL)
    assert found, after
    lines = found[0].splitlines()
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if "| ---" not in line]
    log = ["git", "log", "--format=%h", f"-S{lines[2]}", REVISION, "--", "benchmarks/README.md"]
    commits = subprocess.run(log, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return rows, commits[-1]


def filled(rows: list[list[str]], columns: int = 1) -> Iterator[list[str]]:
    """Yield the rows below the header; an empty cell at the front is the one above."""
    above = [""] * columns
    for row in rows[1:]:
        front = [now or before for now, before in zip(row[:columns], above, strict=True)]
        if front[0] != above[0]:
            front = row[:columns]
        above = front
        yield [*front, *row[columns:]]


def number(text: str) -> float | None:
    """Return the number in a cell, None without one."""
    found = re.match(r"\**([\d.]+)", text)
    return float(found[1]) if found else None


def seconds(scale: float, **cells: str) -> dict[str, list[float]]:
    """Return the times in cells as seconds, by contender; empty cells are left out."""
    return {
        name.replace("_", " "): [float(f"{value * scale:.12g}")]
        for name, cell in cells.items()
        if (value := number(cell)) is not None
    }


def keyed(scale: float, head: list[str], cells: list[str]) -> dict[str, list[float]]:
    """Return the times of a row as seconds, under the names in the header."""
    names = {"ours": "pblasmp", "auto": "pblasmp", '"auto"': "pblasmp"}
    found: dict[str, list[float]] = {}
    for name, cell in zip(head, cells, strict=True):
        clean = name.strip("`\"")
        clean = names.get(clean, clean.replace("ours, symmetric", "pblasmp, symmetric"))
        if (value := number(cell)) is not None:
            found[clean] = [float(f"{value * scale:.12g}")]
    return found


def ratios(**cells: str) -> dict[str, float]:
    return {name.replace("_", "-"): value for name, cell in cells.items() if (value := number(cell)) is not None}


def shape(text: str) -> dict[str, Any]:
    """Return T, N and K."""
    return dict(zip("TNK", map(int, text.split(",")), strict=True))


def put(name: str, date: str, commit: str, rows: list[dict[str, Any]], **about: Any) -> None:
    rows = [{key: value for key, value in row.items() if value != {}} for row in rows]
    gpus = about.pop("gpus", 0)
    ranks = about.pop("ranks", gpus)
    save(
        Run(
            benchmark=name, date=date, commit=commit, ranks=ranks, gpus=gpus,
            machine=about.pop("machine"), versions=about.pop("versions", {}), options=about.pop("options", {}),
            reference=about.pop("reference", ""), sample=about.pop("sample"), rows=rows,
        )
    )  # fmt: skip
    assert not about, about


def host_gemm() -> None:
    rows, commit = table("### Results, 4 ranks on 2 cores")
    put(
        "host_gemm-debian", "2026-11-20", commit,
        [
            {
                "case": {"n": int(n), "ops": ops, "grid": grid, "block": int(block)},
                "seconds": seconds(1e-3, pblasmp=ms),
                "ratios": ratios(pdgemm=a, pdgemm_256=b, numpy=c),
            }
            for n, ops, grid, block, ms, _, a, b, c in rows[1:]
        ],
        ranks=4, machine=EPYC, versions=OPENBLAS, reference="pblasmp", sample="median of 9",
    )  # fmt: skip
    rows, commit = table("With MKL as the local BLAS on both sides:")
    put(
        "host_gemm-mkl", "2026-11-20", commit,
        [
            {
                "case": {"n": int(n), "ops": ops, "grid": grid, "block": int(block)},
                "seconds": seconds(1e-3, pblasmp=ms),
                "ratios": ratios(pdgemm=a),
            }
            for n, ops, grid, block, ms, _, a in rows[1:]
        ],
        ranks=4, machine=EPYC, versions=OPENBLAS, reference="pblasmp", sample="median of 9",
    )  # fmt: skip
    put(
        "host_gemm-memory", "2026-11-20", commit,
        [
            {"case": {"n": 4096, "ops": ops, "grid": "2x2", "block": 128}, "ratios": {"peak": ratio}}
            for ops, ratio in (("NN", 1.03), ("TN", 1.01))
        ],
        ranks=4, machine=EPYC, versions=OPENBLAS, reference="A, B, D and one copy of A and B", sample="peak",
    )  # fmt: skip
    rows, commit = table("A times a few columns,")
    put(
        "host_gemm-debian-thin", "2026-11-23", commit,
        [
            {
                "case": {"n": int(n), "width": int(width), "ops": ops, "grid": grid, "block": 64},
                "seconds": seconds(1e-3, pblasmp=ms),
                "ratios": ratios(pdgemm=a, pdgemm_256=b, numpy=c),
            }
            for n, width, ops, grid, ms, _, a, b, c in rows[1:]
        ],
        ranks=4, machine=EPYC, versions=OPENBLAS, reference="pblasmp", sample="median of 9",
    )  # fmt: skip


def level3() -> None:
    rows, commit = table("Rival's time / ours:")
    for name, columns in (("debian", ("debian", "debian-256")), ("mkl", ("MKL's",))):
        head = rows[0]
        put(
            f"level3-{name}", "2026-11-21", commit,
            [
                {
                    "case": {"routine": row[0], "options": row[1], "n": int(row[2]), "grid": "2x2", "block": 128},
                    "seconds": seconds(1e-3, pblasmp=row[3]) if name == "debian" else {},
                    "ratios": {c.replace("MKL's", "mkl"): float(row[head.index(c)]) for c in columns if row[head.index(c)]},
                }
                for row in rows[1:]
                if name == "debian" or row[head.index("MKL's")]
            ],
            ranks=4, machine=EPYC, versions={"OpenBLAS": "0.3.30 (SciPy), 0.3.31 (Debian)"}, reference="pblasmp",
            sample="median of 9",
        )  # fmt: skip
    rows, commit = table("With `\"shared\"` instead, `trsm` took 31 to 70 ms")
    put(
        "level3-debian-thin", "2026-11-23", commit,
        [
            {
                "case": {"routine": row[0], "options": row[1], "n": int(row[2]), "width": width, "grid": "2x2", "block": 64},
                "seconds": seconds(1e-3, pblasmp=row[at]),
                "ratios": {"debian": float(row[at + 1]), "debian-256": float(row[at + 2])},
            }
            for width, at in ((16, 3), (64, 6))
            for row in rows[1:]
        ],
        ranks=4, machine=EPYC, reference="pblasmp", sample="median of 9",
    )  # fmt: skip

    def gpu(grid: str, n: int, block: int, date: str, commit: str, rows: list[dict[str, Any]], pairs: int) -> None:
        put(
            f"level3-gpu-{grid}-{n}-{block}", date, commit, rows, gpus=2, machine=H200, versions=LIBRARIES,
            reference="gemm", sample=f"median of {pairs}",
        )  # fmt: skip

    def row(cells: list[str], n: int, ms: str = "", auto: str = "", cublasmp: str = "") -> dict[str, Any]:
        return {
            "case": {"routine": cells[0], "options": cells[1], "n": n},
            "by": cells[2].strip("`"),
            "seconds": seconds(1e-3, pblasmp=ms),
            "ratios": ratios(pblasmp=auto, cublasmp=cublasmp),
        }

    rows, commit = table('"By" is the algorithm that "auto" takes:')
    sums, _ = table("which takes 0.35 ms at its copy engines' 388 GB/s (by the\nprofiler):")
    plain = [
        {"case": {"routine": s[0], "options": s[1], "n": 8192}, "seconds": seconds(1e-3, pblasmp=s[2], cublasmp=s[4])}
        for s in sums[1:]
    ]
    gpu("1x2", 8192, 512, "2026-11-22", commit, [row(r, 8192, r[3], r[5], r[7]) for r in rows[1:]] + plain, 3)
    plain = [
        {"case": {"routine": s[0], "options": s[1], "n": 8192}, "seconds": seconds(1e-3, pblasmp=s[3], cublasmp=s[5])}
        for s in sums[1:]
    ]
    gpu("1x2", 8192, 256, "2026-11-22", commit, [row(r, 8192, "", r[6], r[8]) for r in rows[1:]] + plain, 3)
    rows, commit = table("n = 16384 (2026-11-23, `-n 16384 --pairs 3`;")
    gpu("1x2", 16384, 512, "2026-11-23", commit, [row(r, 16384, r[3], r[5]) for r in rows[1:] if r[3]], 3)
    gpu("1x2", 16384, 256, "2026-11-23", commit, [row(r, 16384, r[6], r[8]) for r in rows[1:]], 3)
    rows, commit = table("On 2×1 (2026-11-23,")
    gpu("2x1", 8192, 512, "2026-11-23", commit, [row(r, 8192, r[3], r[4]) for r in rows[1:]], 5)
    gpu("2x1", 8192, 256, "2026-11-23", commit, [row(r, 8192, "", r[5]) for r in rows[1:]], 5)
    gpu("2x1", 16384, 256, "2026-11-23", commit, [row(r, 16384, r[6], r[7]) for r in rows[1:]], 3)

    rows, commit = table("`-n 8192 --block 256`, 2×2 ranks; float64, `hemm` complex128. The range is that of the options:")
    found = []
    for routine, ours, theirs in rows[1:]:
        low, high = (lambda m: (m[1], m[2] or m[1]))(re.match(r"([\d.]+)(?: to ([\d.]+))?", ours))
        least, most = (lambda m: (m[1], m[2] or m[1]))(re.match(r"([\d.]+)(?: to ([\d.]+))?", theirs))
        found.append(
            {
                "case": {"routine": routine, "options": "range of all", "n": 8192},
                "ranges": {"pblasmp": [float(low), float(high)], "cublasmp": [float(least), float(most)]},
            }
        )
    put(
        "level3-gpu-2x2-8192-256", "2026-11-22", commit, found, gpus=4, machine=H200, versions=LIBRARIES,
        reference="gemm", sample="range of the options' medians",
    )  # fmt: skip


def cholesky() -> None:
    rows, commit = table("### Cholesky of order 65536, 2 GPUs")
    put(
        "cholesky", "2026-11-23", commit,
        [
            {
                "case": {"n": 65536, "block": 512, "grid": "1x2"},
                "seconds": {
                    {'`"auto"`': "pblasmp", '`"cublasmp"`': "cublasmp"}[name]: [float(x) for x in times.split(",")]
                    for name, times, _, _ in rows[1:]
                },
            }
        ],
        gpus=2, machine=H200, versions=LIBRARIES, sample="the faster of 2, in two runs on two machines",
    )  # fmt: skip


def redistribution() -> None:
    for after, date, about in (
        ("The same machine; 8192 × 8192 float64", "2026-11-20", {"ranks": 4, "machine": EPYC, "versions": OPENBLAS}),
        ("### Results, 2 GPUs\n\n2026-11-22, 2 × NVIDIA H200, `mpirun -n 2 python3 -m benchmarks.red", "2026-11-22",
         {"gpus": 2, "machine": H200, "versions": LIBRARIES}),
    ):  # fmt: skip
        after = after if after in TEXT else "2026-11-20, the same machine; 8192 × 8192 float64"
        rows, commit = table(after)
        put(
            "redistribution", date, commit,
            [
                {
                    "case": {"operation": row[0], "n": 8192},
                    "seconds": seconds(1e-3, time=row[1]),
                    "ratios": {"np.copyto": float(row[3]), "np.copy": float(row[4])},
                }
                for row in rows[1:]
            ],
            sample="median of 7" if "ranks" in about else "median of 3", reference="time", **about,
        )  # fmt: skip


def rounding() -> None:
    rows, commit = table("ReduceScatter and AllReduce have the same errors,\ndigit for digit:")
    found = [
        {
            "case": {"dtype": row[0], **shape(row[1]), "travels": row[2]},
            "errors": {"relative": float(row[3]), "largest": float(row[4])},
        }
        for row in rows[1:]
    ]
    rows, commit = table("General products:")
    found += [
        {
            "case": {"dtype": row[0], "n": int(row[1]), "grid": "2x2", "block": int(row[2]), "out_dtype": row[3]},
            "errors": {"relative": float(row[4]), "largest": float(row[5])},
        }
        for row in rows[1:]
    ]
    put(
        "rounding", "2026-11-21", commit, found, gpus=4, machine=H200, versions=LIBRARIES, sample="one run",
    )  # fmt: skip


FORMS = {
    "AllGather + GEMM": "allgather_matmul",
    "GEMM + ReduceScatter": "matmul_reduce_scatter",
    "GEMM + AllReduce": "matmul_allreduce",
    "GEMM + AllGather": "matmul_allgather",
}


def bench() -> None:
    rows, commit = table("### CPU ranks")
    of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for ranks, form, case, auto, mpi, separate, ratio, gemm in filled(rows, 2):
        one = {
            "case": shape(case),
            "seconds": seconds(1e-6, pblasmp=auto, mpi=mpi) | {"MPI + BLAS": [float(f"{float(separate) * 1e-6:.12g}")]}
            | {"GEMM alone": [float(f"{float(gemm) * 1e-6:.12g}")]},
            "ratios": {"MPI + BLAS": float(ratio)},
        }  # fmt: skip
        of.setdefault((ranks, form), []).append(one)
    for (ranks, form), each in of.items():
        put(
            f"tensor_parallel-{FORMS[form]}", "2026-11-23", commit, each, ranks=int(ranks), machine=EPYC,
            options={"dtype": "float32"}, reference="pblasmp", sample="median of 50",
        )  # fmt: skip

    rows, commit = table("The ten shapes, `mpirun -n 2 pblasmp bench")
    forms: dict[str, list[dict[str, Any]]] = {}
    for row in filled(rows):
        cells = dict(zip(rows[0], row, strict=True))
        best, name = cells["fastest"].split(", ")
        times = keyed(1e-6, ["ours", "nccl", "NCCL + cuBLAS", "PyTorch", "GEMM alone"],
                      [cells[c] for c in ("ours", "`nccl`", "NCCL + cuBLAS", "PyTorch", "GEMM alone")])  # fmt: skip
        times |= {name.strip("`"): [float(f"{float(best) * 1e-6:.12g}")]} if name != "`nccl`" else {}
        forms.setdefault(row[0], []).append({"case": shape(row[1]), "seconds": times})
    rows, ring = table("GEMM + AllReduce since `\"ring\"` was added:")
    reduce = [
        {"case": shape(row[0]),
         "seconds": keyed(1e-6, ["one_shot, two_shot" if h.startswith("`one_shot") else h for h in rows[0][1:-1]], row[1:-1])}
        for row in rows[1:]
    ]  # fmt: skip
    for form, each in forms.items():
        newest = form == "GEMM + AllReduce"
        put(
            f"tensor_parallel-{FORMS[form]}", "2026-11-24" if newest else "2026-11-23", ring if newest else commit,
            reduce if newest else each, gpus=2, machine=H100 if newest else H200, versions=LIBRARIES,
            options={"dtype": "bfloat16"}, sample="median of 12",
        )  # fmt: skip
    for heading in ("GEMM + ReduceScatter", "GEMM + AllReduce", "GEMM + AllGather of the output"):
        rows, commit = table(f"#### {heading}\n\n| T" if heading[-1] != "t" else "NCCL + cuBLAS reorders the ranks' columns")
        if heading[-1] != "t":
            start = TEXT.index("### Algorithms, 4 GPUs")
            rows, commit = table(f"#### {heading}\n", start)
        each = [{"case": shape(row[0]), "seconds": keyed(1e-6, rows[0][1:], row[1:])} for row in rows[1:]]
        put(
            f"tensor_parallel-{FORMS[heading.removesuffix(' of the output')]}", "2026-11-22", commit, each, gpus=4,
            machine=H200, versions=LIBRARIES | {"PyTorch": "2.11"}, options={"dtype": "bfloat16"},
            sample="median of 15",
        )  # fmt: skip
    rows, commit = table("## pblasmp bench")
    each = [
        {"case": shape(row[1]), "seconds": keyed(1e-6, rows[0][2:], row[2:])}
        for row in filled(rows)
        if row[0] == "AllGather + GEMM"
    ]
    put(
        "tensor_parallel-allgather_matmul", "2026-11-21", commit, each, gpus=4, machine=H200, versions=LIBRARIES,
        options={"dtype": "bfloat16"}, sample="median of 20",
    )  # fmt: skip


def transformer() -> None:
    rows, commit = table("### Results, 2 ranks on 2 cores")
    last = {row[0].removesuffix(", later"): row for row in rows[1:] if "later" in row[0]}

    def rates(text: str) -> list[float]:
        return [float(x) for x in re.findall(r"\d+", text)]

    for launcher, row in last.items():
        put(
            f"transformer-{launcher}-512", "2026-11-22", commit,
            [{"case": {"layers": 1, "width": 512, "heads": 8, "tokens": 512, "batch": 2, "dtype": "float32"},
              "rates": {"pblasmp": rates(row[2]), "PyTorch": rates(row[3])}, "ratios": {"PyTorch": float(row[4])}}],
            ranks=2, machine=XEON, versions={"PyTorch": "2.13.0", "MPICH": "5.0.2"}, reference="pblasmp",
            sample="median, least and most of 9",
        )  # fmt: skip
    for gpus, heading, columns in (
        (4, "### Results, 4 GPUs\n\n2026-11-22, 4 × NVIDIA H200 (NVLink, multicast off), PyTorch 2.11.0, mpirun;", {8192: 1}),
        (2, "### Results, 2 GPUs\n\n2026-11-22, 2 × NVIDIA H200, the same model and options", {8192: 1, 4096: 3}),
    ):
        rows, commit = table(heading)
        for tokens, at in columns.items():
            put(
                f"transformer-mpirun-{tokens}", "2026-11-22", commit,
                [{"case": {"layers": 2, "width": 8192, "heads": 64, "tokens": tokens, "batch": 1, "dtype": "bfloat16"},
                  "rates": {row[0]: [float(row[at]), *rates(row[at + 1])] for row in rows[1:]}}],
                gpus=gpus, machine=H200, versions=LIBRARIES | {"PyTorch": "2.11.0"},
                sample="median, least and most of 5",
            )  # fmt: skip


def gpu_matmul() -> None:
    def scheme(section: str, gpus: int, after: str, second: bool, date: str, versions: dict[str, str]) -> None:
        first, commit = table(after)
        more, _ = table("\n\n", TEXT.index("\n\n| T, N, K | ours | default", TEXT.index(after))) if second else ([first[0]] + [[]] * len(first), "")
        found = []
        for row, other in zip(first[1:], more[1:], strict=False):
            times = keyed(1e-6, first[0][1:], row[1:])
            if second:
                head = [c for c in more[0] if c not in ("T, N, K", "auto / best", "ours", "ours, symmetric")]
                times |= keyed(1e-6, head, [other[more[0].index(c)] for c in head])
            found.append({"case": shape(row[0]), "seconds": times})
        put(
            f"gpu_matmul-{section}", date, commit, found, gpus=gpus, machine=H200, versions=versions,
            options={"dtype": "bfloat16"}, sample="median of 20",
        )  # fmt: skip

    for gpus, date in ((4, "2026-11-20"), (8, "2026-11-21")):
        for section, title in (("ag", "AllGather + GEMM"), ("rs", "GEMM + ReduceScatter"), ("ar", "GEMM + AllReduce")):
            after = f"#### {title}, {gpus} GPUs, µs"
            scheme(section, gpus, after, True, date, FOUR)
        rows, commit = table(f"#### Host time per call, {gpus} GPUs, µs")
        put(
            "gpu_matmul-host", date, commit,
            [{"case": {"product": row[0]}, "seconds": keyed(1e-6, rows[0][1:4], row[1:4])} for row in rows[1:]],
            gpus=gpus, machine=H200, versions=FOUR, sample="median of all calls of all ranks",
        )  # fmt: skip
    old = FOUR | {"cuBLASMp": "0.9.1.3056", "nvmath-python": "1.0.0"}
    for section, title in (("ag", "AllGather + GEMM"), ("rs", "GEMM + ReduceScatter"), ("ar", "GEMM + AllReduce")):
        scheme(f"nvmath-{section}", 4, f"#### {title} on cuBLASMp 0.9.1, µs", False, "2026-11-21", old)
    rows, commit = table("#### Host time per call on cuBLASMp 0.9.1, µs")
    put(
        "gpu_matmul-nvmath-host", "2026-11-21", commit,
        [
            {"case": {"product": row[0]}, "seconds": keyed(1e-6, rows[0][1:5], row[1:5]),
             "device_seconds": {
                 name: [float(f"{float(re.search(r'[(]([0-9]+)', cell)[1]) * 1e-6:.12g}")]
                 for name, cell in zip(rows[0][1:5], row[1:5], strict=True)
             }}
            for row in rows[1:]
        ],
        gpus=4, machine=H200, versions=old, sample="median of all calls of all ranks",
    )  # fmt: skip

    rows, commit = table("#### 2D block-cyclic GEMM, 4 GPUs, µs")
    found = []
    for row in rows[1:]:
        n, dtype, grid, block, ops = row[0].split(", ")
        found.append(
            {"case": {"n": int(n), "dtype": dtype, "grid": grid, "block": int(block), "ops": ops},
             "seconds": keyed(1e-6, ["GEMM alone", "ours", "NCCL + cuBLAS", "gathered"], [row[1], row[2], row[4], row[5]])}
        )  # fmt: skip
    put("gpu_matmul-2d", "2026-11-22", commit, found, gpus=4, machine=H200, versions=FOUR, sample="median of 20")
    rows, commit = table("#### 2D block-cyclic GEMM, 8 GPUs, µs")
    found = []
    for row in rows[1:]:
        dtype, block = row[0].split(", ")
        found.append(
            {"case": {"n": 16384, "dtype": dtype, "grid": "2x4", "block": int(block), "ops": "NN"},
             "seconds": keyed(1e-6, rows[0][1:], row[1:])}
        )  # fmt: skip
    put("gpu_matmul-2d", "2026-11-21", commit, found, gpus=8, machine=H200, versions=FOUR, sample="median of 20")
    rows, commit = table('#### 2D block-cyclic GEMM, 2 GPUs, `"push"`, ms')
    found = []
    for row in rows[1:]:
        n, dtype, grid, block = re.match(r"(\d+) (\w+) (\S+), (\d+)", row[0]).groups()
        found.append(
            {"case": {"n": int(n), "dtype": dtype, "grid": grid.replace("×", "x"), "block": int(block), "ops": "NN"},
             "seconds": keyed(1e-3, ["GEMM alone", "ours", "gathered", "NCCL + cuBLAS", "cuBLASMp's default"],
                              [row[1], row[2], row[4], row[5], row[6]])}
        )  # fmt: skip
    versions = {"CUDA": "13", "cuBLASMp": "0.10", "NCCL": "2.32.3"}
    put("gpu_matmul-2d", "2026-11-25", commit, found, gpus=2, machine=H200, versions=versions, sample="median of 8")
    rows, commit = table("--samples 16`, the same day; times of the first two")
    found = []
    for row in rows[1:]:
        n, dtype, grid, block = re.match(r"(\d+) (\w+) (\S+), (\d+)", row[0]).groups()
        found.append(
            {"case": {"n": int(n), "dtype": dtype, "grid": grid.replace("×", "x"), "block": int(block)},
             "seconds": keyed(1e-3, ["GEMM alone", "NN"], row[1:3]),
             "ratios": {name: float(cell) for name, cell in zip(rows[0][3:], row[3:], strict=True)}}
        )  # fmt: skip
    put(
        "gpu_matmul-layouts", "2026-11-25", commit, found, gpus=2, machine=H200, versions=versions, reference="NN",
        sample="median of 16",
    )  # fmt: skip


if __name__ == "__main__":
    for step in (host_gemm, level3, cholesky, redistribution, rounding, bench, transformer, gpu_matmul):
        step()
