# SPDX-License-Identifier: Apache-2.0
"""Hold predictions against measurements: ``mpirun -n 2 python -m benchmarks.predict --machine here.toml``.

Products of all forms, level-3 routines and factorisations, timed as plans and predicted from the machine's file, which
``pblasmp measure`` has written before. Both are times of a call among many, in rounds that lie apart, of which the
fastest counts. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import pblasmp as pb
from benchmarks import results
from pblasmp.dtypes import as_dtype
from pblasmp.timing import repeated

SIZES = {"host": (256, 512, 1024, 1536), "gpu": (2048, 4096, 8192, 16384)}
TYPES = {"host": ("float64", "float32"), "gpu": ("bfloat16", "float64")}
_LEAST = 0.05  # seconds of a sample
FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")


def products(ctx: Any, kind: str) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Yield each product in words, its problem, and a function that returns its plan. Collective over the context."""
    grid, sizes = pb.Grid.squarest(ctx.size), SIZES[kind]
    block = 64 if kind == "host" else 512
    for dtype in TYPES[kind]:
        for n in sizes:
            for op in ("N", "T") if n == sizes[-1] else ("N",):
                yield of(ctx, pb.MatmulProblem.gemm(n, n, n, grid, block, op_b=op, dtype=dtype))
    n = sizes[-1]
    lines = [pb.Grid(ctx.size, 1)] if ctx.size > 1 else []  # of one rank, the grid above
    for problem in (
        pb.MatmulProblem.gemm(n, n, n // 8, grid, block, dtype=TYPES[kind][0]),
        pb.MatmulProblem.gemm(n, n // 8, n, grid, block, dtype=TYPES[kind][0]),
        *(pb.MatmulProblem.gemm(n, n, n, line, block, dtype=TYPES[kind][0]) for line in lines),
        pb.MatmulProblem.gemm(n, n, n, grid, 2 * block, dtype=TYPES[kind][0], order="F"),
    ):
        yield of(ctx, problem)
    square = pb.MatrixDescriptor((n, n), (block, block), grid, dtype=TYPES["host"][0])
    for name in ("trsm", "trmm", "symm", "syrk"):
        matrices = {"a": square, "d": square} | ({} if name == "syrk" else {"b": square})
        problem = pb.Level3Problem(name, **matrices)
        given = [ctx.eye(square), *([] if name == "syrk" else [ctx.zeros(square)])]
        yield (
            str(problem),
            problem,
            lambda name=name, given=given: pb.plan(name, *given, out=ctx.zeros(square)),
        )


def factorisations(ctx: Any, kind: str) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Yield factorisations of two orders. Collective over the context."""
    for n in SIZES[kind][-2:]:
        square = pb.MatrixDescriptor((n, n), (64 if kind == "host" else 512,) * 2, pb.Grid.squarest(ctx.size))
        for name in ("cholesky", "lu", "qr"):
            plan = pb.plan(name, ctx.eye(square))
            yield str(plan.problem), plan.problem, lambda plan=plan: plan


def of(ctx: Any, problem: pb.MatmulProblem) -> tuple[str, Any, Callable[[], Any]]:
    """Return a product in words, itself, and a function that returns its plan. Local."""

    def plan() -> Any:
        a, b, d = (ctx.full(x, 1) for x in (problem.a, problem.b, problem.d))
        return pb.plan(pb.matmul, a, b, out=d, op_a=problem.op_a, op_b=problem.op_b)

    return f"{problem}, blocks of {problem.d.block[0]}", problem, plan


def forms(ctx: Any, kind: str) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Yield the tensor-parallel products. Collective over the context."""
    dtype = as_dtype("float32" if kind == "host" else "bfloat16")
    for tokens, width in ((256, 512), (1024, 1024)) if kind == "host" else ((1024, 4096), (8192, 8192)):
        for form in FORMS:
            gathers, sums = form == "allgather_matmul", form in ("matmul_reduce_scatter", "matmul_allreduce")
            t, k = tokens // ctx.size if gathers else tokens, width // ctx.size if sums else width
            n = width if sums else width // ctx.size
            x, w = (ctx.engine.empty((rows, k), dtype, "C", k) for rows in (t, n))
            x[...], w[...] = 1, 1
            plan = pb.plan(form, x, w, ctx)
            yield (
                f"{form} of {tokens} x {width} x {width}",
                plan.problem,
                lambda plan=plan, x=x: _Run(plan, x),
            )


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
    parser.add_argument("--samples", type=int, default=3, help="of each case in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--stored", type=Path, metavar="FILE",
        help="a run whose times are predicted again instead of measured, to judge a change of the model",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="only check that the script runs")
    results.add_option(parser)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    if arguments.quick:
        SIZES.update(host=(64, 128), gpu=(512, 1024))
    with pb.Context(engine=arguments.engine) as ctx:
        kind = "host" if ctx.engine.device is None else "gpu"
        say = print if ctx.rank == 0 else lambda *_: None
        say(f"{ctx.size} ranks, {ctx.engine.machine}\n\n| | predicted, ms | measured, ms | ratio |")
        say("| --- | ---: | ---: | ---: |")
        stored = results.load(arguments.stored) if arguments.stored else None
        times, problems = defaultdict(list), {}
        for row in stored.rows if stored else ():
            times[row["case"]["what"]] = list(row["seconds"]["measured"])
        count, least = (1, 0.0) if arguments.quick else (arguments.samples, _LEAST)
        for _ in range(1 if arguments.quick or stored else arguments.rounds):
            for words, problem, planned in (
                *products(ctx, kind),
                *forms(ctx, kind),
                *factorisations(ctx, kind),
            ):
                problems[words] = problem
                if stored is None:
                    run = planned()
                    times[words] += repeated(ctx.engine, ctx.comm, run, count, least)
                    run.close()
        rows, ratios = [], []
        for words, problem in problems.items():
            foreseen = pb.predict(problem, arguments.machine, nranks=ctx.size).seconds
            took = median(times[words]) if stored else min(times[words])
            ratios.append(foreseen / took)
            say(f"| {words} | {foreseen * 1e3:.3f} | {took * 1e3:.3f} | {ratios[-1]:.2f} |")
            seconds = {"predicted": [foreseen], "measured": times[words] if stored else [took]}
            rows.append({"case": {"what": words}, "seconds": seconds})
        within = np.mean([0.8 <= each <= 1.25 for each in ratios])
        say(f"\n{100 * within:.0f} % of {len(ratios)} within 0.8 to 1.25")
        directory = results.directory_of(arguments)
        if ctx.rank == 0 and directory is not None and stored is not None:
            options = {**stored.options, "predicted_again": results.today()}
            say(f"\n{results.save(replace(stored, options=options, rows=rows), Path(directory))}")
        elif ctx.rank == 0 and directory is not None:
            made = results.Run(
                benchmark="predict", date=results.today(), commit=results.this_commit(), ranks=ctx.size,
                gpus=0 if kind == "host" else ctx.size, **results.facts(ctx), options=results.options_of(arguments),
                reference="measured", sample=f"least of {arguments.rounds * arguments.samples}", rows=rows,
            )  # fmt: skip
            say(f"\n{results.save(made, Path(directory))}")


if __name__ == "__main__":
    main()
