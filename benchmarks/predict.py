# SPDX-License-Identifier: Apache-2.0
"""Hold predictions against measurements: ``mpirun -n 2 python -m benchmarks.predict --machine here.toml``.

Products of all forms, level-3 routines and factorizations, timed as plans and predicted from the machine's file, which
``pblasmp measure`` has written before. Both are medians of rounds that lie apart, each a call among many. ``--stored``
predicts a stored run again, so that a change of the model can be judged; that needs neither ranks nor GPUs. Prints
Markdown.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import pblasmp as pb
from benchmarks import results
from pblasmp.costs.machines import load_machine
from pblasmp.dtypes import as_dtype
from pblasmp.layout import ParallelProblem
from pblasmp.layout.factor_problem import FactorProblem
from pblasmp.tuning.timing import repeated

SIZES = {"host": (256, 512, 1024, 1536), "gpu": (2048, 4096, 8192, 16384)}
TYPES = {"host": ("float64", "float32"), "gpu": ("bfloat16", "float64")}
_LEAST = 0.05  # seconds of a sample
FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")


def problems(kind: str, size: int) -> Iterator[tuple[str, Any]]:
    """Yield each problem in words, and the problem. Local.

    Args:
        kind: "host" or "gpu".
        size: number of ranks.
    """
    grid, sizes, types = pb.Grid.squarest(size), SIZES[kind], TYPES[kind]
    block, n = 64 if kind == "host" else 512, SIZES[kind][-1]
    gemm = pb.MatmulProblem.gemm
    for dtype in types:
        for m in sizes:
            for op in ("N", "T") if m == n else ("N",):
                yield _with_block(gemm(m, m, m, grid, block, op_b=op, dtype=dtype))
    yield _with_block(gemm(n, n, n // 8, grid, block, dtype=types[0]))
    yield _with_block(gemm(n, n // 8, n, grid, block, dtype=types[0]))
    if size > 1:  # of one rank, the grid above
        yield _with_block(gemm(n, n, n, pb.Grid(size, 1), block, dtype=types[0]))
    yield _with_block(gemm(n, n, n, grid, 2 * block, dtype=types[0], order="F"))
    square = pb.MatrixDescriptor((n, n), (block, block), grid, dtype=TYPES["host"][0])
    for name in ("trsm", "trmm", "symm", "syrk"):
        matrices = {"a": square, "d": square} | ({} if name == "syrk" else {"b": square})
        routine = pb.Level3Problem(name, **matrices)
        yield str(routine), routine
    dtype = as_dtype("float32" if kind == "host" else "bfloat16")
    for tokens, width in ((256, 512), (1024, 1024)) if kind == "host" else ((1024, 4096), (8192, 8192)):
        for form in FORMS:
            yield f"{form} of {tokens} x {width} x {width}", _of_layer(form, tokens, width, size, dtype)
    for m in sizes[-2:]:
        square = pb.MatrixDescriptor((m, m), (block, block), grid)
        for name in ("cholesky", "lu", "qr"):
            factored = FactorProblem(name, a=square, c=square)
            yield str(factored), factored


def _with_block(problem: pb.MatmulProblem) -> tuple[str, pb.MatmulProblem]:
    return f"{problem}, blocks of {problem.d.block[0]}", problem


def _of_layer(form: str, tokens: int, width: int, size: int, dtype: Any) -> ParallelProblem:
    """Return a tensor-parallel product of so many tokens with a square of weights, split over the ranks. Local."""
    gathers, sums = form == "allgather_matmul", form in ("matmul_reduce_scatter", "matmul_allreduce")
    rows = tokens // size if form == "matmul_reduce_scatter" else tokens
    parts = (
        tokens // size if gathers else tokens,
        width // size if sums else width,
        width if sums else width // size,
        rows,
    )
    return ParallelProblem(form, *((each,) * size for each in parts), dtype, dtype, dtype)


def planned(ctx: Any, problem: Any) -> Any:
    """Return the plan of a problem: what runs it, and is closed. Collective over the context."""
    if isinstance(problem, ParallelProblem):
        rank, kind = ctx.rank, problem.dtype
        k = problem.inputs[rank]
        x, w = (
            ctx.engine.empty((rows, k), kind, "C", k)
            for rows in (problem.tokens[rank], problem.outputs[rank])
        )
        x[...], w[...] = 1, 1
        return _Run(pb.plan(problem.form, x, w, ctx), x)
    if isinstance(problem, FactorProblem):
        return pb.plan(problem.routine, ctx.eye(problem.a))
    if isinstance(problem, pb.Level3Problem):
        given = [ctx.eye(problem.a), *([] if problem.b is None else [ctx.zeros(problem.b)])]
        return pb.plan(problem.routine, *given, out=ctx.zeros(problem.d))
    a, b, d = (ctx.full(x, 1) for x in (problem.a, problem.b, problem.d))
    return pb.plan(pb.matmul, a, b, out=d, op_a=problem.op_a, op_b=problem.op_b)


class _Run:
    """A plan of a tensor-parallel product and its X."""

    def __init__(self, plan: Any, x: Any) -> None:
        self.plan, self.x = plan, x

    def __call__(self) -> Any:
        return self.plan(self.x)

    def close(self) -> None:
        self.plan.close()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", required=True, help="a machine's name or file")
    parser.add_argument("--engine", default="auto", choices=("auto", "host", "cublasmp"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--stored", type=Path, metavar="FILE",
        help="a run of this benchmark, or of factorizations on GPUs, that is predicted again instead of measured",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="only check that the script runs")
    results.add_option(parser)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    if arguments.quick:
        SIZES.update(host=(64, 128), gpu=(512, 1024))
    if arguments.stored is not None:
        again(arguments)
        return
    with pb.Context(engine=arguments.engine) as ctx:
        kind = "host" if ctx.engine.device is None else "gpu"
        times, cases = defaultdict(list), dict(problems(kind, ctx.size))
        least = 0.0 if arguments.quick else _LEAST
        for _ in range(1 if arguments.quick else arguments.rounds):
            for words, problem in cases.items():
                run = planned(ctx, problem)
                times[words].append(repeated(ctx.engine, ctx.comm, run, 1, least)[0])
                run.close()
        if ctx.rank:
            return
        print(f"{ctx.size} ranks, {ctx.engine.machine}\n")
        foreseen = table(
            ((words, problem, times[words]) for words, problem in cases.items()), arguments, ctx.size
        )
        directory = results.directory_of(arguments)
        if directory is not None:
            rows = [
                {
                    "case": {"what": words},
                    "seconds": {"predicted": [foreseen[words]], "measured": times[words]},
                }
                for words in cases
            ]
            made = results.Run(
                benchmark="predict", date=results.today(), commit=results.this_commit(), ranks=ctx.size,
                gpus=0 if kind == "host" else ctx.size, **results.facts(ctx), options=results.options_of(arguments),
                reference="measured", sample="one in each round", rows=rows,
            )  # fmt: skip
            print(f"\n{results.save(made, Path(directory))}")


def again(arguments: argparse.Namespace) -> None:
    """Predict a stored run again: of this benchmark, or of factorizations on GPUs. Local."""
    stored = results.load(arguments.stored)
    kind = "gpu" if stored.gpus else "host"
    if stored.benchmark == "factorizations-gpu":
        table(
            (each for each in map(_factorization, stored.rows) if each is not None), arguments, stored.ranks
        )
        return
    known = dict(problems(kind, stored.ranks))
    measured = {row["case"]["what"]: row["seconds"]["measured"] for row in stored.rows}
    foreseen = table(
        ((what, known[what], times) for what, times in measured.items()), arguments, stored.ranks
    )
    directory = results.directory_of(arguments)
    if directory is not None:
        rows = [
            {"case": {"what": what}, "seconds": {"predicted": [foreseen[what]], "measured": times}}
            for what, times in measured.items()
        ]
        options = {**stored.options, "predicted_again": results.today()}
        print(f"\n{results.save(replace(stored, options=options, rows=rows), Path(directory))}")


def _factorization(row: dict[str, Any]) -> tuple[str, FactorProblem, list[float]] | None:
    """Return a factorization of ``gpu_factorizations`` in words, as a problem, and its times; None of solves."""
    case, names = row["case"], {"potrf": "cholesky", "getrf": "lu", "geqrf": "qr"}
    if case["routine"] not in names:
        return None
    n, block, (nprow, npcol) = case["n"], case["block"], map(int, case["grid"].split("x"))
    square = pb.MatrixDescriptor((n, n), (block, block), pb.Grid(nprow, npcol), order="F")
    problem = FactorProblem(names[case["routine"]], a=square, c=square)
    return f"{problem}, blocks of {block}", problem, row["seconds"]["pblasmp"]


def table(
    cases: Iterable[tuple[str, Any, Sequence[float]]], arguments: argparse.Namespace, ranks: int
) -> dict[str, float]:
    """Print the table of cases in words, as problems, and with their times; return what is predicted. Local.

    The median of the times counts. The spread is that of the slowest to the fastest.
    """
    machine = load_machine(arguments.machine)
    machine = replace(machine, ranks_per_node=max(ranks, machine.ranks_per_node))
    print("| | predicted, ms | measured, ms | spread | ratio |\n| --- | ---: | ---: | ---: | ---: |")
    foreseen, ratios = {}, []
    for words, problem, times in cases:
        foreseen[words] = pb.predict(problem, machine, nranks=ranks).seconds
        took = median(times)
        ratios.append(foreseen[words] / took)
        spread = max(times) / min(times)
        print(
            f"| {words} | {foreseen[words] * 1e3:.3f} | {took * 1e3:.3f} | {spread:.2f} | {ratios[-1]:.2f} |"
        )
    within = np.mean([0.8 <= each <= 1.25 for each in ratios])
    print(f"\n{100 * within:.0f} % of {len(ratios)} within 0.8 to 1.25")
    return foreseen


if __name__ == "__main__":
    main()
