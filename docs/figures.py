# SPDX-License-Identifier: Apache-2.0
"""Tables and charts of measured times, made from benchmarks/results/*.json."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks import results
from benchmarks.charts import Bars, bar_chart
from benchmarks.results import Run, middle
from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.engines.gpu.tensor.copy_methods import MEASURED, PRODUCTS, cost_by_rule
from pblasmp.engines.gpu.tensor.one_kernel_products import HOPPER
from pblasmp.engines.request import Options
from pblasmp.layout import ParallelProblem

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).parents[1]

SEPARATE = "NCCL + cuBLAS"
FORMS = {
    "allgather_matmul": "AllGather + GEMM",
    "matmul_reduce_scatter": "GEMM + ReduceScatter",
    "matmul_allreduce": "GEMM + AllReduce",
    "matmul_allgather": "GEMM + AllGather",
}
OTHERS = ("GEMM alone", SEPARATE, "PyTorch", "PyTorch's", "cuBLASMp's", "nvmath", "MPI + BLAS")
"""What names of contenders begin with that are not algorithms of pblasmp."""

TITLES = {
    "host_gemm-debian": "Products, compared with Debian's ScaLAPACK and NumPy",
    "host_gemm-debian-thin": "A matrix times few columns, compared with Debian's ScaLAPACK and NumPy",
    "host_gemm-mkl": "Products, compared with MKL's ScaLAPACK",
    "host_gemm-memory": "Peak memory of a product",
    "level3-debian": "Level-3 routines, compared with Debian's ScaLAPACK",
    "level3-debian-thin": "Level-3 routines with few columns, compared with Debian's ScaLAPACK",
    "level3-mkl": "Level-3 routines, compared with MKL's ScaLAPACK",
    "level3-gpu": "Level-3 routines on GPUs",
    "many_calls-debian": "Many calls on sub-matrices, compared with Debian's PBLAS: ",
    "many_calls-mkl": "Many calls on sub-matrices, compared with MKL's PBLAS: ",
    "redistribution": "Moving a matrix",
    "vectors": "Routines of levels 1 and 2",
    "rounding": "Errors by where sums are rounded",
    "nodes": "Routines on simulated nodes, compared with Debian's ScaLAPACK, or MPI and NumPy",
    "nodes-2-many_calls-debian": "Many calls on two simulated nodes, compared with Debian's PBLAS: ",
    "nodes-2-vectors": "Routines of levels 1 and 2 on two simulated nodes",
    "eigenvalues-debian": "Eigenvalues and singular values, compared with Debian's ScaLAPACK, called directly",
    "eigenvalues-mkl": "Eigenvalues and singular values, compared with MKL's ScaLAPACK, called directly",
    "eigenvalues_gpu": "Eigenvalues on GPUs, compared with cuSOLVER and cuSOLVERMp",
    "refined": "Refined solves",
    "whole_problems": "Whole problems: ",
    "eigenvalues-elpa": "Eigenvalues, compared with Debian's ELPA, called directly",
    "cholesky": "Cholesky factorization by level-3 routines",
    "cublasmp_barrier": "cuBLASMp's overlapped products with and without pblasmp's barrier",
    "factorizations-debian": "Factorizations and solves, compared with Debian's ScaLAPACK",
    "factorizations-mkl": "Factorizations and solves, compared with MKL's ScaLAPACK",
    "factorizations-gpu": "Factorizations and solves on GPUs",
    "tensor_parallel": "Tensor-parallel products: ",
    "tensor_parallel-hosts": "Tensor-parallel products between hosts: ",
    "layers": "Tensor-parallel products as users call them",
    "layers-others": "Tensor-parallel products as users call them, beside other process groups",
    "hosts-layers": "Tensor-parallel products as users call them, between hosts",
    "one_kernel": "Products and collectives in one kernel, as CUDA graphs",
    "one_kernel-others": "Products and collectives in one kernel, beside other process groups",
    "transformer": "Transformer blocks in training",
    "predict": "Predictions and measurements",
    "predict-h200": "Predictions and measurements: H200",
    "gpu_matmul-2d": "2D block-cyclic products",
    "gpu_matmul-hosts-2d": "2D block-cyclic products between hosts",
    "gpu_matmul-layouts": "2D block-cyclic products by op and layout",
    "gpu_matmul-allgather_matmul": "AllGather + GEMM in the layout of the scheme",
    "gpu_matmul-matmul_reduce_scatter": "GEMM + ReduceScatter in the layout of the scheme",
    "gpu_matmul-matmul_allreduce": "GEMM + AllReduce in the layout of the scheme",
    "gpu_matmul-host": "Host time per call",
    "gpu_host": "Host time of many small calls",
    "first_calls": "First calls of a process, with the machine code of wheels",
    "first_calls-compiled": "First calls of a process that compiles",
    "gpu_matmul-nvmath": "Compared with nvmath-python: ",
}


NO_RUN = "No run is stored yet: see [benchmarks](performance.md#benchmarks).\n"


def runs_of(*begins: str) -> list[Run]:
    """Return the stored runs whose names begin so."""
    return [run for name, run in results.runs().items() if name.startswith(begins)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """Return a Markdown table whose last ``numbers`` columns are aligned to the right."""
    rule = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows)) + "\n"


def compare(run: Run, contenders: Sequence[str]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield each case with the fastest contender's time divided by pblasmp's."""
    for row in run.rows:
        ratios = [row["ratios"][name] for name in contenders if name in row.get("ratios", {})]
        if run.reference == "pblasmp" and ratios:
            yield row["case"], min(ratios)
            continue
        own = middle(row, "pblasmp")
        times = [time for name in contenders if (time := middle(row, name)) is not None]
        if own is not None and times:
            yield row["case"], min(times) / own


def spread(ratios: Iterable[float]) -> str:
    """Return the median of some ratios, and their minimum and maximum."""
    found = sorted(ratios)
    if len(found) == 1:
        return f"{found[0]:.2f}"
    return f"{median(found):.2f} ({found[0]:.2f}–{found[-1]:.2f})"


READERS = """\
| you have | you get | how fast |
| --- | --- | --- |
| a script for mpirun: [quickstart](docs/quickstart.md) | matrices with NumPy's operators, `A @ B`, `pb.linalg.solve`, Cholesky, LU, QR, least squares, eigenvalues; .npy, HDF5 and Zarr files | factorizations and solves {hosts} times the speed of ScaLAPACK with OpenBLAS ({hosts_on}) |
| a code written against ScaLAPACK: [porting](docs/porting.md), [preload](docs/preload.md), [a script](examples/scalapack_solve.py) | levels 1 to 3, factorizations and eigenvalues under ScaLAPACK's names (`pdgemm`, `pdpotrf`, `pdgesv`, `pdsyev`), in NumPy arrays; a compiled program runs unchanged under `pblasmp preload` | blocked algorithms, call by call on sub-matrices, {calls} times the speed of Debian's PBLAS ({calls_on}); calls of level 1 and [small ones](docs/performance.md) are slower |
| GPUs: [GPUs](docs/gpu.md), [linear algebra](docs/solving.md) | the script above and all others unchanged, on cuBLASMp, and algorithms of our own where they are faster | {solvers}; products {products} times the speed of NCCL + cuBLAS ({products_on}) |
| tensor-parallel layers: [products](docs/tensor-parallel.md), [PyTorch](docs/torch.md), [a script](examples/tensor_parallel_mlp.py) | AllGather + GEMM, GEMM + ReduceScatter, + AllReduce, + AllGather; layers with gradients, DTensor, FSDP2, torch.compile, 8 bits | products {plans} times the speed of NCCL + cuBLAS, in turns or as one CUDA graph{layers} |
| layouts to test or to plan: [layouts](docs/layouts.md), [planning](docs/planning.md) | who owns what, is this product legal, what does it send, how long does it take on 1,000 ranks | without MPI or a GPU |
"""  # noqa: E501


SOLVERS = {2: ("potrf-getrf-",), 4: ("potrf-", "getrf-")}
"""The runs of factorizations that the README quotes, by GPUs: those that are not too old."""

CHARTS = (2, 4)
"""The numbers of GPUs whose tensor-parallel products have a chart: likewise."""


def readers() -> str:
    """Return the README's table: for each kind of reader what there is, and how fast it is."""
    runs = results.runs()
    solvers = []
    for count, cases in SOLVERS.items():
        on = [runs[f"factorizations-gpu-{case}{count}-gpus"] for case in cases]
        ratios = (
            (name, at_best_blocks(on, routine))
            for name, routine in (("Cholesky", "potrf"), ("LU", "getrf"), ("QR", "geqrf"))
        )
        told = ", ".join(f"{name} {spread(each)}" for name, each in ratios if each)
        solvers.append(f"{told} times the speed of cuSOLVERMp ({on[0].where})")
    hosts, calls = runs["factorizations-debian-4-ranks"], runs["many_calls-debian-2x2-4-ranks"]
    products = runs["gpu_matmul-2d-2-gpus"]
    plans = {count: [runs[f"tensor_parallel-{form}-{count}-gpus"] for form in FORMS] for count in CHARTS}
    return READERS.format(
        hosts=spread(ratio for _, ratio in compare(hosts, ["debian", "debian-256"])),
        hosts_on=hosts.where,
        calls=spread(1 / row["ratios"]["pblas"] for row in calls.rows if "algorithm" in row["case"]),
        calls_on=calls.where,
        solvers="; ".join(solvers),
        products=spread(ratio for _, ratio in compare(products, [SEPARATE])),
        products_on=products.where,
        plans=" and ".join(
            f"{spread(ratio for run in some for _, ratio in compare(run, [SEPARATE, 'nccl']))} ({some[0].where})"
            for some in plans.values()
        ),
        layers=layers(),
    )


def at_best_blocks(runs: Iterable[Run], routine: str) -> list[float]:
    """Return cuSOLVERMp's time over pblasmp's by order, each at its best block size and grid."""
    best: dict[tuple[int, str], float] = {}
    for run in runs:
        for row in run.rows:
            if row["case"]["routine"] == routine:
                for name in ("pblasmp", "cusolvermp"):
                    key = row["case"]["n"], name
                    best[key] = min(best.get(key, float("inf")), middle(row, name) or float("inf"))
    orders = sorted({n for n, _ in best})
    return [best[n, "cusolvermp"] / best[n, "pblasmp"] for n in orders]


def layers() -> str:
    """Return how fast layers are compared with NCCL + cuBLAS, in words; "" if no run is stored."""
    run = results.runs().get("layers-2-gpus")
    if run is None:
        return ""
    ratios = [
        (middle(row, SEPARATE) or 0.0) / (middle(row, "layer") or 1.0)
        for row in run.rows
        if row["case"]["clock"] == "device"
    ]
    return f"; layers {spread(ratios)} times ({run.where}, eager)"


def layer_times() -> str:
    """Return the times of tensor-parallel products as users call them, in microseconds, by GPUs and groups."""
    return by_groups("layers", _layer_times) or NO_RUN


def _layer_times(run: Run) -> str:
    names = list(run.rows[0]["seconds"])
    rows = [
        [
            FORMS[row["case"]["form"]],
            "host" if row["case"]["clock"] == "host" else "device",
            ", ".join(str(row["case"][name]) for name in ("tokens", "outputs", "inputs")),
            *(f"{1e6 * (middle(row, name) or 0):.0f}" for name in names),
        ]
        for row in run.rows
    ]
    return table(["", "clock", "tokens, outputs, inputs", *names], rows, len(names)) + f"\n{source(run)}\n"


def by_groups(benchmark: str, tabled: Callable[[Run], str]) -> str:
    """Return the table of each run of a benchmark, by GPUs and by whether PyTorch had other process groups."""
    found = [
        (run.gpus, bool(others), run)
        for others in ("", "-others")
        for name, run in results.runs().items()
        if re.fullmatch(rf"{benchmark}{others}-\d+-gpus", name)
    ]
    return "\n".join(
        f"{gpus} GPUs{', PyTorch has other process groups' if others else ''}:\n\n{tabled(run)}"
        for gpus, others, run in sorted(found, key=lambda each: each[:2])
    )


def comparison() -> str:
    """Return the table on the page on performance: how much faster pblasmp is than what else one could use."""
    runs = results.runs()

    measured: dict[str, None] = {}  # in the order of the table

    def row(what: str, benchmarks: Sequence[str], beside: str, contenders: Sequence[str]) -> list[str]:
        chosen = [runs[name] for name in benchmarks]
        measured.update(dict.fromkeys(f"- {title_of(run)}: {source(run)}" for run in chosen))
        where = " or ".join(dict.fromkeys(run.where for run in chosen))
        return [what, where, beside, spread(ratio for run in chosen for _, ratio in compare(run, contenders))]

    trainings = [
        runs[f"transformer-mpirun-{sizes}-2-gpus"] for sizes in ("2048-2048", "4096-2048", "8192-4096")
    ]
    rows = [
        row("products, float64", ["host_gemm-debian-4-ranks"], "ScaLAPACK, OpenBLAS", ["pdgemm"]),
        row("", ["host_gemm-mkl-4-ranks"], "ScaLAPACK, MKL", ["pdgemm"]),
        row("", ["host_gemm-debian-4-ranks"], "one NumPy GEMM on all cores", ["numpy"]),
        row("level-3 routines", ["level3-debian-4-ranks"], "ScaLAPACK, OpenBLAS", ["debian"]),
        row("products, bfloat16 and float64", ["gpu_matmul-2d-2-gpus"], SEPARATE, [SEPARATE]),
        row("", ["gpu_matmul-2d-2-gpus"], "cuBLASMp", ["default"]),
        *(
            row(
                "tensor-parallel products" if count == CHARTS[0] else "",
                [f"tensor_parallel-{form}-{count}-gpus" for form in FORMS],
                f"{SEPARATE}, or both as a CUDA graph", [SEPARATE, "nccl"],
            )
            for count in CHARTS
        ),
    ]  # fmt: skip
    for run in trainings:
        rates = {name: median(each) for name, each in run.rows[0]["rates"].items()}
        for how in ("", ", compiled", ", a step as a CUDA graph"):
            what = f"training transformer blocks of width {run.rows[0]['case']['width']}{how}"
            beside = "PyTorch's tensor parallelism, in the same way"
            rows.append([what, run.where, beside, f"{rates[f'pblasmp{how}'] / rates[f'PyTorch{how}']:.2f}"])
        measured[f"- {title_of(run)}: {source(run)}"] = None
    ratios = table(["", "on", "compared with", "speedup: median (min–max)"], rows, 1)
    return "\n".join([ratios, *measured, ""])


def replaced(text: str) -> str:
    """Return the README's text with the table of ``readers`` between its two marks."""
    begin, end = "<!-- readers, written by python docs/figures.py -->\n", "<!-- end -->"
    before, _, rest = text.partition(begin)
    _, mark, after = rest.partition(end)
    assert mark, "README.md: the marks around the table for readers are missing"
    return f"{before}{begin}{readers()}{mark}{after}"


def own(row: Mapping[str, Any]) -> float | None:
    """Return pblasmp's time in a row: that of "auto", or of its fastest algorithm if "auto" was not timed."""
    if (time := middle(row, "pblasmp")) is not None:
        return time
    return fastest(row)


def fastest(row: Mapping[str, Any]) -> float | None:
    """Return the shortest time in a row of an algorithm that was requested by name, None if there is none."""
    others = (*OTHERS, "pblasmp")
    times = [middle(row, name) for name in row.get("seconds", {}) if not name.startswith(others)]
    return min((time for time in times if time is not None), default=None)


def label(case: Mapping[str, Any]) -> str:
    """Return a case in a few words."""
    return ", ".join(str(value) for value in case.values())


def charts(directory: Path) -> None:
    """Draw the charts of the page on performance: for ScaLAPACK's routines, and for each number of GPUs."""
    runs = results.runs()
    cases = [
        (f"{case['routine']}, {case['options']}", {"pblasmp": 1 / row["ratios"]["debian"], "ScaLAPACK": 1.0})
        for row in runs["level3-debian-4-ranks"].rows
        if (case := row["case"]) and "debian" in row.get("ratios", {})
    ]
    run = runs["level3-debian-4-ranks"]
    draw([Bars(f"level-3 routines, {run.where}", cases)], "ScaLAPACK", directory / "performance-host.svg")
    foreseen = [
        Bars(
            run.where, [(what[:44], {"measured": 1.0, "predicted": ratio}) for what, ratio in ratios.items()]
        )
        for run, ratios in predicted()
    ]
    if foreseen:
        draw(foreseen, "measured", directory / "predictions.svg")
    for gpus, found in tensor_parallel(runs).items():
        bars = []
        for title, run in found:
            timed = [(row, own(row), middle(row, SEPARATE)) for row in run.rows]
            bars.append(
                Bars(
                    f"{title}, {run.where}",
                    [(label(row["case"]), {"pblasmp": a, SEPARATE: b}) for row, a, b in timed if a and b],
                )
            )
        draw(bars, SEPARATE, directory / f"performance-{gpus}-gpus.svg")


def tensor_parallel(runs: Mapping[str, Run]) -> dict[int, list[tuple[str, Run]]]:
    """Return the newest runs of the four products by number of GPUs: as users call them, else of the schemes."""
    found: dict[int, list[tuple[str, Run]]] = {}
    for gpus in CHARTS:
        for form, title in FORMS.items():
            names = f"tensor_parallel-{form}-{gpus}-gpus", f"gpu_matmul-{form}-{gpus}-gpus"
            if run := next((runs[name] for name in names if name in runs), None):
                found.setdefault(gpus, []).append((title, run))
    return found


def draw(bars: Sequence[Bars], reference: str, path: Path) -> None:
    """Draw a chart that has at least one bar."""
    chart = bar_chart(bars, reference=reference)
    if chart is None:
        raise ValueError(f"{path.name}: there is no time to draw")
    chart.save(path)


def performance() -> str:
    """Return the charts by number of GPUs, each with where its times come from."""
    parts = []
    for gpus, found in tensor_parallel(results.runs()).items():
        lines = "\n".join(f"- {title}: {source(run)}{behind(run)}" for title, run in found)
        chart = f"![Time over that of NCCL + cuBLAS](_generated/performance-{gpus}-gpus.svg)"
        parts.append(f"### {gpus} GPUs\n\n{chart}\n\n{lines}\n")
    return "\n".join(parts)


def behind(run: Run) -> str:
    """Return how "auto" compares with the fastest algorithm of the same run, in words; "" if none was timed."""
    times = [(middle(row, "pblasmp"), fastest(row)) for row in run.rows]
    ratios = [auto / best for auto, best in times if auto and best]
    if not ratios:
        return ""
    typical, most = median(ratios), max(ratios)
    return f'; "auto" takes {typical:.2f} times as long as the fastest algorithm, at most {most:.2f} times'


def source(run: Run) -> str:
    """Return where a run's times come from, in words."""
    versions = ", ".join(
        f"{name} {version}"
        for name, version in run.versions.items()
        if name in ("cuBLASMp", "NCCL", "PyTorch")
    )
    tuned = ", after `pblasmp tune`" if run.options.get("tuned") else ""
    about = f"{run.where}, {run.date}, commit {run.commit}, {run.sample}{tuned}"
    return f"{about}, {versions}" if versions else about


def many_calls() -> str:
    """Return the tables of blocked algorithms, times over those of a ScaLAPACK's PBLAS, and of what a call costs."""
    debian, mkl = (runs_of(f"many_calls-{library}-") for library in ("debian", "mkl"))
    if not debian:
        return NO_RUN
    rows = []
    for run in (*debian, *mkl):
        for large in (True, False):
            chosen = [
                row for row in run.rows if "algorithm" in row["case"] and _is_large(row["case"]) == large
            ]
            if not chosen:
                continue
            ratios = [
                spread(row["ratios"][name] for row in chosen) if name in chosen[0]["ratios"] else ""
                for name in ("pblas", "pb", "pb, first time", "debian-256")
            ]
            grid, what = run.benchmark.rpartition("-")[2], "larger" if large else "smaller"
            beside = "Debian's" if run.reference == "debian" else "MKL's"
            rows.append([beside, _on(grid, run), what, str(len(chosen)), *ratios])
    contenders = ["`pblasmp.pblas`", "views", "views, first time", "Debian's, blocks of 256"]
    head = ["compared with", "ranks on cores", "matrices", "cases", *contenders]
    parts = [table(head, rows, 5), *(f"{source(run)}\n" for run in (*debian, *mkl))]
    calls: dict[str, list[str]] = {}
    for run in debian:
        if run.ranks <= 2:
            for row in run.rows:
                if "call" in row["case"]:
                    times = (digits(1e6 * (middle(row, kind) or 0)) for kind in ("new", "repeated"))
                    calls.setdefault(row["case"]["call"], []).extend(times)
    lines = ([f"`{name}`", *("" if cell == "0" else cell for cell in cells)] for name, cells in calls.items())
    head = ["call", "new, 1 rank", "repeated, 1 rank", "new, 2 ranks", "repeated, 2 ranks"]
    parts.append(
        "Time of a call on small sub-matrices (blocks of 16), BLAS included, in µs:\n\n"
        + table(head, lines, 4)
    )
    return "\n".join(parts)


def factorizations() -> str:
    """Return the table of factorizations on CPU ranks: ScaLAPACK's times over pblasmp's, Debian's by its better one."""
    rows, measured = [], []
    for name, run in results.runs().items():
        library = next(
            (each for each in ("debian", "mkl") if name.startswith(f"factorizations-{each}-")), None
        )
        if library is None:
            continue
        measured.append(f"- {title_of(run)}: {source(run)}")
        found: dict[tuple[str, str], list[float]] = {}
        for case, ratio in compare(run, ("debian", "debian-256", "mkl")):
            found.setdefault((case["grid"], case["routine"]), []).append(ratio)
        for (grid, routine), ratios in found.items():
            ahead = sum(ratio >= 1 for ratio in ratios)
            beside = {"debian": "Debian's", "mkl": "MKL's"}[library]
            rows.append(
                [
                    beside, _on(grid, run), f"`{routine}`", f"{ahead} of {len(ratios)}", spread(ratios)
                ]
            )  # fmt: skip
    if not rows:
        return NO_RUN
    head = ["compared with", "ranks on cores", "routine", "not slower", "speedup: median (min–max)"]
    return "\n".join([table(head, rows), *measured, ""])


def nodes() -> str:
    """Return the table of each routine on one, two and four simulated nodes, compared with its rival."""
    run = results.runs().get("nodes-4-ranks")
    if run is None:
        return NO_RUN
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    case = max((row["case"] for row in run.rows), key=lambda each: each["n"])
    small: dict[int, list[float]] = {}
    for row in run.rows:
        if row["case"]["n"] >= case["n"] // 2:
            found.setdefault(row["case"]["routine"], {})[row["case"]["nodes"]] = row
        else:
            small.setdefault(row["case"]["nodes"], []).extend(
                1 / each for each in row.get("ratios", {}).values()
            )
    counts = sorted({row["case"]["nodes"] for row in run.rows})

    def cells(rows: Mapping[int, Mapping[str, Any]], cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [cell(rows[count]) if count in rows else "" for count in counts]

    def taken(row: Mapping[str, Any]) -> str:
        own = middle(row, "pblasmp")
        return "–" if own is None else digits(1e3 * own)

    def beside(row: Mapping[str, Any]) -> str:
        return next((f"{ratio:.2f}" for ratio in row.get("ratios", {}).values()), "–")

    def sent(row: Mapping[str, Any]) -> str:
        return digits(row["sent_bytes"] / 1024) if "sent_bytes" in row else "–"

    lines = []
    for routine, rows in found.items():
        by = dict.fromkeys(f'`"{row["by"]}"`' for row in rows.values() if row.get("by"))
        lines.append([
            routine, ", ".join(by),
            *cells(rows, taken), *cells(rows, beside), *cells(rows, sent)[1:],
        ])  # fmt: skip
    head = [
        "routine", "algorithm of a plan",
        *(f"ms, {count}" for count in counts), *(f"rival's ÷ ours, {count}" for count in counts),
        *(f"KiB, {count}" for count in counts[1:]),
    ]  # fmt: skip
    calls = max(row["case"].get("calls", 1) for row in run.rows)
    about = (
        f"Order {case['n']} (eigenvalues half of it), blocks of {case['block']}, on 1, 2 and 4 nodes; "
        f"of levels 1 and 2 {calls} calls in a row. KiB: the most that a rank sends to other nodes in a call, without "
        f"what ScaLAPACK sends for it. –: Debian's did not end in {run.options['limit']} s. "
        f"The load of the machine was {run.machine['load']:.1f}."
    )
    if small:
        n, block = min((row["case"]["n"], row["case"]["block"]) for row in run.rows if "block" in row["case"])
        times = "; ".join(f"{count}: {spread(ratios)}" for count, ratios in small.items())
        about += (
            f" Small ones, of order {n} in blocks of {block}, {calls} in a row with their operands restored, "
            f"take so many times Debian's time, by nodes (median, range of {len(small[counts[0]])} routines): {times}."
        )
    return f"{table(head, lines, len(head) - 2)}\n{about} {source(run)}\n{_calls_on_nodes()}"


def _calls_on_nodes() -> str:
    """Return what many calls on sub-matrices, and vectors, take on two nodes, compared with Debian's, in words."""
    parts = []
    for name, run in results.runs().items():
        if name.startswith("nodes-2-many_calls-debian-"):
            timed = [row["ratios"] for row in run.rows if "algorithm" in row["case"]]
            pblas, views = (spread(row[each] for row in timed) for each in ("pblas", "pb"))
            parts.append(
                f"Many calls on sub-matrices on two nodes ({len(timed)} cases) take {pblas} times Debian's time by "
                f"`pblasmp.pblas`, {views} times by views: {source(run)}."
            )
        elif name.startswith("nodes-2-vectors-"):
            timed = [row["ratios"] for row in run.rows if row["case"]["routine"] != "floor"]
            ahead, still = (sum(row[each] >= 1 for row in timed) for each in ("debian", _PREPARED))
            least = spread(1 / row[_PREPARED] for row in timed)
            parts.append(
                f"Routines of levels 1 and 2 on two nodes are not slower in {ahead} of {len(timed)} cases, in {still} "
                f"than Debian's with pointers made beforehand, whose time they take {least} times: {source(run)}."
            )
    return "".join(f"\n{part}\n" for part in parts)


def between_hosts() -> str:
    """Return the table of products between hosts, compared with NCCL + cuBLAS over the same network."""
    kinds = ("tensor_parallel-hosts-", "gpu_matmul-hosts-2d", "hosts-layers-")
    runs = runs_of(*kinds)
    if not runs:
        return NO_RUN
    rows = []
    for run in runs:
        title = FORMS.get(run.benchmark.removeprefix(kinds[0]), "product: order, type, grid, blocks, ops")
        for row in run.rows:
            case = dict(row["case"])
            plain = case.pop("clock", None) == "device"
            if "form" in case and not plain:
                continue  # of the host's time alone
            own, other = middle(row, "pblasmp"), middle(row, SEPARATE)
            if not own or not other:
                continue
            ratio = row.get("ratios", {}).get(SEPARATE) or other / own
            by = case.pop("algorithm", "auto") if plain else row.get("by", "auto")
            name = f"{FORMS[case.pop('form')]}, plain calls" if plain else title
            hosts = f"{run.machine['hosts']} × {run.gpus // run.machine['hosts']}"
            rows.append([
                name, ", ".join(map(str, case.values())), hosts, f'`"{by}"`', digits(1e3 * own), f"{ratio:.2f}"
            ])  # fmt: skip
    head = ["product", "T, N, K", "hosts × GPUs", "algorithm", "ms", f"{SEPARATE}'s time ÷ pblasmp's"]
    sources = "; ".join(dict.fromkeys(map(source, runs)))
    as_called = by_groups("hosts-layers", _layer_times)
    told = f"\nThe same products as users call them, in µs, as [within a host](#layers-and-plain-calls):\n\n{as_called}"
    return f"{table(head, rows, 4)}\n{sources}\n{told if as_called else ''}"


def eigenvalues() -> str:
    """Return the table of what eigenvalues and singular values take, with direct calls of the same libraries."""
    found = runs_of("eigenvalues-")
    if not found:
        return NO_RUN
    rows = []
    for run in found:
        for row in run.rows:
            case, times, ratios = row["case"], row["seconds"], row["ratios"]
            algo, own = next((name, middle(row, name)) for name in times if name in ("elpa", "scalapack"))
            assert own is not None
            other = f"{ratios['scalapack4py'] - 1:+.1%}" if "scalapack4py" in ratios else ""
            rows.append([
                f"`{case['routine']}`", run.options["library"], str(run.ranks), str(case["n"]),
                digits(1e3 * own), f"{ratios[algo] - 1:+.1%}", other, f"{ratios['lapack']:.2f}",
            ])  # fmt: skip
    head = [
        "call",
        "library",
        "ranks",
        "n",
        "ms",
        "over the library",
        "scalapack4py",
        "one rank's LAPACK ÷ library",
    ]
    load = max(run.machine["load"] for run in found)
    return f"{table(head, rows, 6)}\nThe load of the machine was {load:.1f} at most. {source(found[-1])}\n"


def eigenvalues_on_gpus() -> str:
    """Return the table of eigenvalues and eigenvectors on GPUs: seconds, and bytes of memory by number of a matrix."""
    found = runs_of("eigenvalues_gpu-")
    found.sort(key=lambda run: (run.gpus, run.rows[0]["case"]["n"]))
    if not found:
        return NO_RUN
    names = dict.fromkeys(name for run in reversed(found) for row in run.rows for name in row["seconds"])
    rows = [
        [
            str(run.ranks), row["case"].get("dtype", "float64") + ", svd" * ("routine" in row["case"]),
            str(row["case"]["n"]),
            *(f"{middle(row, name):.2f}, {row['bytes'][name]:.0f}" if name in row["seconds"] else "" for name in names),
        ]
        for run in found
        for row in run.rows
    ]  # fmt: skip
    sources = "; ".join(
        f"n = {', '.join(str(row['case']['n']) for row in run.rows)}: {source(run)}" for run in found
    )
    return f"{table(['GPUs', 'type', 'n', *names], rows, len(names) + 3)}\n{sources}\n"


def refined_solves() -> str:
    """Return the table of how many times as fast as in float64 refined solves are."""
    found = runs_of("refined-")
    rows = [
        [
            run.where, row["case"]["kind"], str(row["case"]["n"]), row["case"]["steps"],
            *(digits(value) if (value := middle(row, name)) else "" for name in ("float64", "float32")),
            *(
                f"{digits(middle(row, name) or 0)}, {1 / row['ratios'][name]:.2f}" if name in row["ratios"] else ""
                for name in ("refined", "refined from TF32")
            ),
        ]
        for run in found
        for row in run.rows
    ]  # fmt: skip
    if not rows:
        return NO_RUN
    head = [
        "where",
        "assume_a",
        "n",
        "steps",
        "float64, s",
        "float32, s",
        "refined, s and gain",
        "from TF32, s and gain",
    ]
    return f"{table(head, rows, 5)}\n{source(found[-1])}\n"


def whole_problems() -> str:
    """Return the table of what the examples of whole problems take."""
    found = runs_of("whole_problems-")
    rows = [
        [
            f"`{row['case']['problem']}.py`", f"`{row['case']['arguments']}`", f"{run.where}, {run.date}, {run.commit}",
            ", ".join(f"{name} {digits(value)}" for name, (value,) in row["seconds"].items()),
        ]
        for run in found
        for row in run.rows
    ]  # fmt: skip
    if not rows:
        return NO_RUN
    return f"{table(['script', 'arguments', 'machine, date, commit', 'seconds'], rows, 0)}\n"


def _on(grid: str, run: Run) -> str:
    """Return a grid, and how many cores its ranks had."""
    return f"{grid.replace('x', '×')} on {run.machine['cores']}"


_PREPARED = "debian-prepared"  # as in benchmarks.vectors


def vector_times() -> str:
    """Return how often routines of levels 1 and 2 are not slower than Debian's, and what any call takes at least."""
    found = runs_of("vectors-")
    if not found or not all(_PREPARED in run.rows[-1]["seconds"] for run in found):
        return NO_RUN
    ahead, floors, votes, theirs, below, total = [], [], [], [], 0, 0
    for run in found:
        grid = f"{run.rows[0]['case']['grid'].replace('x', '×')} ranks on {run.machine['cores']} cores"
        timed = [row for row in run.rows if row["case"]["routine"] != "floor"]
        least = run.rows[-1]["seconds"]
        floor, own = min(least["pblasmp"]), min(least[_PREPARED])
        faster, still = (sum(row["ratios"][each] >= 1 for row in timed) for each in ("debian", _PREPARED))
        ahead.append(f"in {faster} (and in {still}) of {len(timed)} cases on {grid}")
        floors.append(f"{digits(1e6 * floor)} µs on {grid}")
        theirs.append(f"{digits(1e6 * own)} µs on {grid}")
        if "vote" in least:
            votes.append(f"{digits(1e6 * min(least['vote']))} µs on {grid}")
        below += sum((middle(row, _PREPARED) or 0.0) < floor for row in timed)
        total += len(timed)
    of_that = f", of which the vote of all ranks is {_listed(votes)}" if votes else ""
    sizes = found[0].options["n"]
    return (
        f"Compared with Debian's ScaLAPACK, n from {min(sizes)} to {max(sizes)}, these routines are not slower "
        f"{_listed(ahead)}. The first number compares with ScaLAPACK called from Python, by ctypes, which turns the "
        "arguments into pointers in each call; the one in parentheses with the same call whose pointers were made "
        "beforehand, as in a Fortran program.\n\n"
        f"A call of one element takes at least {_listed(floors)}{of_that}. The rest is the call's way through Python, "
        f"which looks at all arguments each time. Debian's, with pointers made beforehand, takes {_listed(theirs)}; "
        f"ranks that have nothing of a vector do not wait there. In {below} of the {total} cases Debian's whole call "
        "takes less than pblasmp's of one element: there Python ends.\n"
    )


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _is_large(case: Mapping[str, Any]) -> bool:
    return bool(case["n"] >= 1024 and case["block"] >= 64)


def level3_gpu() -> str:
    """Return the table of level-3 routines on two GPUs: times over that of a product with as many operations."""
    runs = results.runs()
    wide, narrow = (runs[f"level3-gpu-1x2-8192-{block}-2-gpus"] for block in (512, 256))
    rows = []
    for routine in dict.fromkeys(row["case"]["routine"] for row in wide.rows if "ratios" in row):
        by = dict.fromkeys(row["by"] for row in wide.rows if row["case"]["routine"] == routine)
        cells = [ratios_of(run, routine, name) for name in ("pblasmp", "cublasmp") for run in (wide, narrow)]
        rows.append([f"`{routine}`", ", ".join(f'`"{name}"`' for name in by), *cells])
    head = ["routine", "by", "blocks of 512", "blocks of 256", '`"cublasmp"`, 512', '`"cublasmp"`, 256']
    return table(head, rows, 4) + f"\n{source(wide)}\n"


def few_columns_gpu() -> str:
    """Return the times of level-3 routines with few columns on two GPUs, in milliseconds, and products' beside them."""
    run = results.runs().get("level3-gpu-1x2-16384-512-thin-2-gpus")
    if run is None:
        return NO_RUN.replace("(", "(../")
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in run.rows:
        case, own, product = row["case"], middle(row, "pblasmp"), middle(row, "gemm")
        key = case["routine"], case["options"]
        cells.setdefault(key, {})[case["width"]] = (
            f"{digits(1e3 * (own or 0))} ({digits(1e3 * (product or 0))})"
        )
    widths = sorted({width for each in cells.values() for width in each})
    head = ["routine, options", *(f"{width} column{'s' * (width > 1)}" for width in widths)]
    rows = [[f"`{name}` {letters}", *(each.get(width, "") for width in widths)]
            for (name, letters), each in cells.items()]  # fmt: skip
    return table(head, rows, len(widths)) + f"\n{source(run)}\n"


def solves_gpu() -> str:
    """Return the times of LU and of solves by factors on two GPUs next to cuSOLVERMp's, in milliseconds."""
    names = (f"factorizations-gpu-{which}-2-gpus" for which in ("getrf", "potrs-getrs"))
    runs = [run for name in names if (run := results.runs().get(name)) is not None]
    if not runs:
        return NO_RUN.replace("(", "(../")
    rows = []
    for run in runs:
        for row in run.rows:
            case, own, other = row["case"], middle(row, "pblasmp") or 0.0, middle(row, "cusolvermp")
            theirs = ["", ""] if other is None else [digits(1e3 * other), f"{other / own:.2f}"]
            rows.append([f"`{case['routine']}`", f"{case['n']:,}", str(case.get("nrhs", "")), digits(1e3 * own),
                         f"{row['flops'] / own / 1e12:.1f}", *theirs])  # fmt: skip
    head = ["", "order", "right-hand sides", "ms", "TFLOP/s", "cuSOLVERMp, ms", "ratio"]
    return table(head, rows, 6) + "".join(f"\n{source(run)}\n" for run in runs)


def ratios_of(run: Run, routine: str, name: str) -> str:
    """Return the range of a contender's ratios over the options of a routine."""
    found = [
        row["ratios"][name]
        for row in run.rows
        if row["case"]["routine"] == routine
        and "long" not in row["case"]["options"]
        and name in row.get("ratios", {})
    ]
    least, most = (f"{value:.1f}" for value in (min(found), max(found)))
    return least if least == most else f"{least} to {most}"


def rounding_blocks() -> str:
    """Return the table of errors of cuBLASMp's products by block size."""
    run = results.runs()["rounding-4-gpus"]
    errors = {
        (c["dtype"], c["block"], c["out_dtype"]): row["errors"]["relative"]
        for row in run.rows
        if "block" in (c := row["case"])
    }
    blocks = sorted({block for _, block, _ in errors})
    rows = [
        [dtype, *(f"{errors[dtype, block, dtype]:.1e}" for block in blocks),
         f"{max(errors[dtype, block, 'float32'] for block in blocks):.1e}"]
        for dtype in dict.fromkeys(dtype for dtype, _, _ in errors)
    ]  # fmt: skip
    head = ["type of A, B and D", *(f"blocks of {block}" for block in blocks), "D in float32: at most"]
    return table(head, rows, len(blocks) + 1) + f"\n{source(run)}\n"


def rounding_sums() -> str:
    """Return the table of errors by the type in which partial sums are sent."""
    run = results.runs()["rounding-4-gpus"]
    largest = max(row["case"]["K"] for row in run.rows if "K" in row["case"])
    rows = [
        [c["dtype"], c["sent"], f"{row['errors']['relative']:.1e}", f"{row['errors']['largest']:.1e}"]
        for row in run.rows
        if (c := row["case"]).get("K") == largest
    ]
    head = [
        "x, w and y",
        "sums sent in",
        "relative error (Frobenius norm)",
        "largest error / largest element",
    ]
    return table(head, rows, 2) + f"\n{source(run)}\n"


def first_calls() -> str:
    """Return the table of the first minute in docs/internals/gpu.md: in seconds."""
    runs = [results.runs().get(f"first_calls{how}-2-gpus") for how in ("", "-compiled")]
    if None in runs:
        return NO_RUN
    shipped, compiled = runs
    found = {row["case"]["call"]: row for row in compiled.rows}

    def seconds(row: Mapping[str, Any], which: str) -> str:
        time = middle(row, which)
        return "" if time is None else f"{time:.2f}"

    columns = ("first", "NVRTC", "again")
    rows = [
        [name, seconds(row, "first"), *(seconds(found[name], which) for which in columns)]
        for row in shipped.rows
        if (name := row["case"]["call"]) in found
    ]
    head = ["", "first, from a wheel", "first, compiled", *columns[1:]]
    return table(head, rows, 4) + "".join(f"\n{source(run)}\n" for run in runs)


def one_kernel() -> str:
    """Return the tables of docs/internals/one-kernel.md."""
    return by_groups("one_kernel", _one_kernel)


def one_kernel_in_8_bits() -> str:
    """Return the table of 8-bit operands in docs/internals/one-kernel.md."""
    return _one_kernel(results.runs()["one_kernel-float8_e4m3fn-2-gpus"])


def one_kernel_by_mma() -> str:
    """Return the table of the kernel for other GPUs in docs/internals/one-kernel.md."""
    return _one_kernel(results.runs()["one_kernel-mma-2-gpus"])


def _one_kernel(run: Run) -> str:
    def micro(seconds: float | None) -> str:
        return "" if seconds is None else digits(seconds * 1e6)

    rows, errors = [], any("errors" in row for row in run.rows)
    for row in run.rows:
        case, fused = row["case"], middle(row, "one_kernel")
        names = [name for name in row["seconds"] if name not in ("one_kernel", SEPARATE, "the GEMM alone")]
        others = {name: middle(row, name) for name in names}
        best = min(others, key=lambda name: others[name] or 0.0)
        separate = middle(row, SEPARATE)
        rows.append([
            FORMS[case["form"]], f"{case['tokens']}, {case['outputs']}, {case['inputs']}",
            micro(middle(row, "the GEMM alone")), micro(separate), f"{micro(others[best])} `{best}`", micro(fused),
            "" if fused is None else f"{min(filter(None, (separate, others[best]))) / fused:.2f}",
            *(f"{row['errors'][name]:.1e}" if name in row["errors"] else "" for name in (best, "one_kernel") if errors),
        ])  # fmt: skip
    head = [
        "", "tokens, outputs, inputs", "GEMM", SEPARATE, "others", "one kernel", "speedup over the best",
        *(["error of others", "of one kernel"] if errors else []),
    ]  # fmt: skip
    return table(head, rows, len(head) - 2) + f"\n{source(run)}\n"


_MACHINES = (
    ("2 H100 or H200", 90, 2, ""), ("3 H100 or H200", 90, 3, ""), ("4 H100 or H200", 90, 4, ""),
    ("8 H100 or H200", 90, 8, ""), ("2 A100", 80, 2, ""), ("4 A100", 80, 4, ""),
    ("2 L40S", 89, 2, ""), ("2 Blackwell", 100, 2, ""), ("4 Blackwell", 100, 4, ""),
    ("4 GPUs without NCCL windows", 90, 4, "there are no NCCL windows"),
)  # fmt: skip
"""GPUs by name, compute capability and number, and why they do not reach each other's memory."""
_ORDERS = [256 << i for i in range(8)]


def algorithms_by_machine() -> str:
    """Return what "auto" takes by rule, as the engine's own functions say: by type, machine, form and size."""
    found = []
    for dtype in ("bfloat16", "float8_e4m3fn"):
        rows = []
        for machine, capability, size, deaf in _MACHINES:
            domains = [[rank] for rank in range(size)] if deaf else [[*range(size)]]
            gpu = SimpleNamespace(
                capability=capability, size=size, why_no_windows=deaf, multiprocessors=132, shared_gpus=False,
                domains=domains,
            )  # fmt: skip
            taken = {form: [_taken(form, order, gpu, dtype) for order in _ORDERS] for form in FORMS}
            refusal = next((why for each in taken.values() for _, why in each if why), "")
            known = capability == HOPPER and size in MEASURED[(DTYPES | FLOAT8)[dtype].itemsize]
            measured = "measured" if known else "not measured: as fewer GPUs, or as in 16 bits"
            if capability != HOPPER:
                measured = "not measured there: `one_kernel` for all GPUs on H200, the others as on Hopper"
            cells = [_runs([name for name, _ in each]) for each in taken.values()]
            rows.append([machine, *cells, refusal or measured])
        found.append(table([dtype, *FORMS.values(), "because"], rows, 0))
    return "\n".join(found)


def _taken(form: str, order: int, gpu: Any, dtype: str) -> tuple[str, str]:
    """Return the algorithm of least cost for an order of T, N and K, and what is to be said of it, if anything."""
    kind = (DTYPES | FLOAT8)[dtype]
    share = lambda *split: (order // gpu.size // 16 * 16 if form in split else order,) * gpu.size  # noqa: E731
    p = ParallelProblem(
        form, tokens=share("allgather_matmul"), inputs=share("matmul_reduce_scatter", "matmul_allreduce"),
        outputs=share("allgather_matmul", "matmul_allgather"), rows=share("matmul_reduce_scatter"),
        dtype=kind, w_dtype=kind, out_dtype=DTYPES["bfloat16"],
    )  # fmt: skip
    why_not = {each.name: each.why_not(gpu, p, Options()) for each in PRODUCTS if each.form == form}
    able = [name for name, why in why_not.items() if not why]
    if not able:  # the algorithm of this name has another way
        return "push", f"by messages, multiplied in bfloat16: {why_not['push']}"
    rule = partial(cost_by_rule, p=p, multiprocessors=gpu.multiprocessors, domains=len(gpu.domains))
    best = min(able, key=partial(rule, capability=gpu.capability))
    why = why_not.get("one_kernel", "")
    return best, f"`one_kernel`: {why}" if why else ""


def _runs(names: Sequence[str]) -> str:
    """Return which algorithm is taken from which order on."""
    first = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    return ", ".join(f"`{names[i]}`" + (f" from {_ORDERS[i]} on" if i else "") for i in first)


def barrier() -> str:
    """Return what the barrier behind cuBLASMp's overlapped products costs, for internals/gpu.md."""
    run = results.runs()["cublasmp_barrier-2-gpus"]
    names = ("auto", "default", "default, no barrier", "split_p2p", "split_p2p, no barrier")

    def micro(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e6:.0f}"

    rows = [
        [
            FORMS[row["case"]["form"]],
            ", ".join(str(row["case"][name]) for name in ("tokens", "outputs", "inputs")),
            *(micro(middle(row, name)) for name in names),
        ]
        for row in run.rows
    ]
    head = ["", "tokens, outputs, inputs"]
    head += ['`"auto"`', '`"default"`', "without barrier", '`"split_p2p"`', "without barrier"]
    return table(head, rows, len(names)) + f"\n{source(run)}\n"


def gathered_rates() -> str:
    """Return what AllGather + GEMM of 1024 x 1024 x 1024 reaches by each algorithm, for internals/one-kernel.md."""
    run = results.runs()["tensor_parallel-allgather_matmul-4-gpus"]
    row = next(row for row in run.rows if set(row["case"].values()) == {1024})
    ways = {
        SEPARATE: "NCCL gathers, then one GEMM, in PyTorch",
        "nccl": "the same as a CUDA graph",
        "push": "copy engines gather; a GEMM for the tokens of each rank",
        "no_overlap": "cuBLASMp without overlap",
        "split_p2p": "cuBLASMp with overlap",
        "PyTorch async TP": "PyTorch's symmetric memory",
    }
    flops = 2 * 1024**3 * run.ranks  # N is that of each rank
    rows = []
    for name, what in ways.items():
        if taken := middle(row, name):
            rate = flops / taken / 1e12
            rows.append([name, what, digits(rate), digits(rate / run.gpus * 8)])
    return table(["", "", f"TFLOP/s over {run.gpus} GPUs", "for 8 GPUs"], rows, 2) + f"\n{source(run)}\n"


def gpu_runs() -> str:
    """Return the table of what ran on which GPUs: tests/gpu/runs.json."""
    found = json.loads((ROOT / "tests" / "gpu" / "runs.json").read_text(encoding="utf-8"))
    order = sorted(
        found, key=lambda run: ([int(x) for x in run["cuBLASMp"].split(".")[:2]], run["gpus"], run["gpu"])
    )
    rows = []
    for run in reversed(order):
        gpus = f"{run['gpus']} × {run['gpu']}"
        shared = f", {run['ranks']} ranks" if run["ranks"] != run["gpus"] else ""
        shared += f", as {run['hosts']} hosts" if "hosts" in run else ""
        suites = "; ".join(f"{suite}: {outcome}" for suite, outcome in run["suites"].items())
        rows.append([run["cuBLASMp"], run["NCCL"], gpus + shared, suites, f"{run['date']}, {run['commit']}"])
    return table(["cuBLASMp", "NCCL", "GPUs", "what ran", "date, commit"], rows)


TESTED = {
    "cuBLASMp": "nvidia-cublasmp-cu13",
    "NCCL": "nvidia-nccl-cu13",
    "CUDA": "",
    "driver": "",
    "CuPy": "cupy-cuda13x",
    "nccl4py": "nccl4py",
    "nvmath-python": "nvmath-python",
    "PyTorch": "torch",
    "mpi4py": "mpi4py",
    "MPICH": "mpich",
    "NumPy": "numpy",
    "SciPy": "scipy",
}
"""What is on the page on support, and the name of its package in pyproject.toml."""


def support() -> str:
    """Return the table of versions: the least that pip accepts, and those with which tests and benchmarks have run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [
        *project["dependencies"],
        *(x for extra in project["optional-dependencies"].values() for x in extra),
    ]
    least = {found[1]: found[2] for x in asked if (found := re.match(r"([\w-]+)>=([\w.]+)", x))}
    runs = json.loads((ROOT / "tests" / "gpu" / "runs.json").read_text(encoding="utf-8"))
    ran: dict[str, set[str]] = {name: set() for name in TESTED}
    for versions in (*runs, *(run.versions for run in results.runs().values())):
        for name, package in TESTED.items():
            for key in (name, package):
                if number := re.match(r"\d+(\.\d+){0,2}", str(versions.get(key, ""))):
                    ran[name].add(number[0])
    rows = [
        [name, least.get(package, ""), ", ".join(sorted(ran[name], key=lambda x: [*map(int, x.split("."))]))]
        for name, package in TESTED.items()
    ]
    python = project["requires-python"].removeprefix(">=")
    said = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    return table(["", "at least", "has run with"], [["Python", python, ", ".join(said)], *rows])


def title_of(run: Run) -> str:
    """Return a heading for a run."""
    key = max((key for key in TITLES if run.benchmark.startswith(key)), key=len)
    rest = run.benchmark.removeprefix(key).strip("-")
    return TITLES[key] + (FORMS.get(rest, rest) if TITLES[key].endswith(" ") else "")


BAND, WIDE = (0.8, 1.25), (0.5, 2.0)
"""Predictions over measurements that count as right: of products, and of all else."""


def _foreseen(row: Mapping[str, Any]) -> float:
    return (middle(row, "predicted") or 0) / (middle(row, "measured") or 1)


def predicted() -> list[tuple[Run, dict[str, float]]]:
    """Return each run of predictions with the ratio of predicted to measured time by case."""
    runs = sorted(runs_of("predict-"), key=lambda run: run.benchmark)
    return [(run, {row["case"]["what"]: _foreseen(row) for row in run.rows}) for run in runs]


def predictions() -> str:
    """Return how far predictions are from measurements: a line for each run, and its misses."""
    found = predicted()
    if not found:
        return NO_RUN
    lines, misses = [], []
    for run, ratios in found:
        line = [run.where]
        for band, products in ((BAND, True), (WIDE, False)):
            some = {what: ratio for what, ratio in ratios.items() if (" product of " in what) == products}
            wrong = {what: ratio for what, ratio in some.items() if not band[0] <= ratio <= band[1]}
            line += [f"{len(some) - len(wrong)} of {len(some)}", spread(some.values())]
            misses += [[run.where, what, f"{ratio:.2f}"] for what, ratio in wrong.items()]
        lines.append(line)
    parts = [
        "Predicted over measured time, median (min–max):\n",
        table(["on", "products within 0.8 to 1.25", "", "all else within half to twice", ""], lines, 4),
    ]
    if misses:
        parts.append("Misses:\n\n" + table(["on", "what", "predicted / measured"], misses, 1))
    parts.append("![Predicted over measured](_generated/predictions.svg)\n")
    return "\n".join(parts)


def all_results() -> str:
    """Return every stored run: a heading, where it comes from, and a table of medians."""
    runs = sorted(
        results.runs().values(), key=lambda run: (title_of(run), run.gpus, run.ranks, run.benchmark)
    )
    parts = []
    above = ""
    for run in runs:
        title = title_of(run)
        if title != above:
            parts.append(f"## {title}\n")
        above = title
        parts.append(f"{source(run)}{about(run)}:\n\n{medians(run)}")
    return "\n".join(parts)


def about(run: Run) -> str:
    """Return what a run's ratios mean, and its options."""
    options = ", ".join(
        f"{name} {value}" for name, value in run.options.items() if isinstance(value, (str, int, float))
    )
    meaning = {
        "pblasmp": "time / pblasmp's", "gemm": "time / that of a product with as many operations",
        "time": "speed relative to copying the matrix once", "NN": "time / that of NN",
    }.get(run.reference, f"relative to {run.reference}" if run.reference else "")  # fmt: skip
    ratios = any("ratios" in row or "ranges" in row for row in run.rows)
    return "".join(f"; {text}" for text in (options, f"ratios: {meaning}" if ratios else "") if text)


def medians(run: Run) -> str:
    """Return a run as a table: a column for each part of the cases and for each contender."""
    parts = list(dict.fromkeys(key for row in run.rows for key in row["case"]))
    kinds: dict[str, Callable[[Any], str]] = {
        "seconds": lambda x: digits(median(x) * (1e6 if run.gpus else 1e3)),
        "device_seconds": lambda x: digits(median(x) * 1e6),
        "rates": lambda x: f"{median(x):.0f}",
        "ratios": lambda x: f"{x:.2f}",
        "ranges": lambda x: f"{x[0]:.1f} to {x[1]:.1f}",
        "errors": lambda x: f"{x:.1e}",
    }
    units = {
        "seconds": "µs" if run.gpus else "ms", "device_seconds": "µs on the GPU", "rates": "tokens/s",
        "ratios": "ratio", "ranges": "ratio", "errors": "",
    }  # fmt: skip
    columns = [
        (kind, name)
        for kind in kinds
        for name in dict.fromkeys(n for row in run.rows for n in row.get(kind, {}))
    ]
    with_algorithm = any("by" in row for row in run.rows)
    head = [
        *parts,
        *(["by"] if with_algorithm else []),
        *(f"{name}, {units[kind]}".strip(", ") for kind, name in columns),
    ]
    rows = []
    for row in run.rows:
        case = [str(row["case"].get(part, "")) for part in parts]
        cells = [kinds[kind](row[kind][name]) if name in row.get(kind, {}) else "" for kind, name in columns]
        rows.append([*case, *([row.get("by", "")] if with_algorithm else []), *cells])
    return table(head, rows, len(columns))


def digits(value: float) -> str:
    """Return a number with at least three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def is_current(text: str) -> bool:
    """Return whether the README has the table that the results give."""
    return replaced(text) == text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(replaced(readme.read_text(encoding="utf-8")), encoding="utf-8")
