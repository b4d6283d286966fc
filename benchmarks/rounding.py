# SPDX-License-Identifier: Apache-2.0
"""Measure where 16-bit sums are rounded: ``mpirun -n 4 python3 benchmarks/rounding.py``.

GEMM + ReduceScatter and GEMM + AllReduce by the type in which partial sums are sent, and general products by block
size, for normally distributed numbers, compared with float64. Prints Markdown.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import pblasmp as pb
from benchmarks import results
from pblasmp.dtypes import as_dtype

FORMS = {"RS": pb.matmul_reduce_scatter, "AR": pb.matmul_allreduce}
SHAPES = ((4096, 1792, 4096), (4096, 3584, 8192), (4096, 6656, 16384))
ORDERS = (4096,)
BLOCKS = (64, 256, 1024)
TYPES = ("bfloat16", "float16")


def normal(ctx: Any, array: Any, which: int) -> Any:
    """Fill this rank's local array with normally distributed numbers and return it. Local.

    Args:
        which: 0 or 1, for numbers that have nothing to do with each other.
    """
    random = np.random.default_rng([11, which, ctx.rank])
    ctx.engine.from_host(array, random.standard_normal(array.shape, dtype=np.float32).astype(array.dtype))
    return array


def errors(ctx: Any, got: Any, exact: Any) -> tuple[float, float]:
    """Return the error in the Frobenius norm, and the largest one relative to the largest element. Collective."""
    difference = got.astype(np.float64) - exact
    sums = [float((each * each).sum()) for each in (difference, exact)]
    largest = [float(abs(each).max()) for each in (difference, exact)]
    every = ctx.comm.allgather((sums, largest))
    total = [sum(each[0][i] for each in every) for i in (0, 1)]
    most = [max(each[1][i] for each in every) for i in (0, 1)]
    return (total[0] / total[1]) ** 0.5, most[0] / most[1]


def by_sent_type(ctx: Any, shapes: Sequence[tuple[int, int, int]], say: Any) -> list[dict[str, Any]]:
    """Print and return the errors of sums over ranks. Collective over the context."""
    rows = []
    say("| type of x, w and y | form | T, N, K | sent in | relative error | largest |")
    say("| --- | --- | --- | --- | ---: | ---: |")
    for dtype, (t, n, k) in itertools.product(TYPES, shapes):
        inputs = k // ctx.size
        x, w = (
            normal(ctx, ctx.engine.empty((rows, inputs), as_dtype(dtype), "C", inputs), which)
            for which, rows in enumerate((t, n))
        )
        for form, function in FORMS.items():
            exact = function(x.astype(np.float64), w.astype(np.float64), ctx)
            for sent in (dtype, "float32"):
                relative, largest = errors(ctx, function(x, w, ctx, comm_dtype=sent), exact)
                say(f"| {dtype} | {form} | {t}, {n}, {k} | {sent} | {relative:.2e} | {largest:.2e} |")
                case = {"dtype": dtype, "form": form, "T": t, "N": n, "K": k, "sent": sent}
                rows.append({"case": case, "errors": {"relative": relative, "largest": largest}})
    return rows


def by_block(ctx: pb.Context, orders: Sequence[int], say: Any) -> list[dict[str, Any]]:
    """Print and return the errors of general products. Collective over the context."""
    rows = []
    grid = pb.Grid.squarest(ctx.size)
    say(
        f"| type of a and b | n, on {grid.nprow}x{grid.npcol} | block | type of d | relative error | largest |"
    )
    say("| --- | --- | ---: | --- | ---: | ---: |")
    for dtype, n, block in itertools.product(TYPES, orders, BLOCKS):
        if block * max(grid.shape) > n:
            continue  # some ranks would have nothing
        empty = functools.partial(_empty, ctx, n, block, grid)
        given, wide = ([empty(kind) for _ in "ab"] for kind in (dtype, "float64"))
        for which, (x, exact) in enumerate(zip(given, wide, strict=True)):
            exact.local[...] = normal(ctx, x.local, which)
        expected = pb.matmul(*wide)
        for kind in (dtype, "float32"):
            d = pb.matmul(*given, out=empty(kind))
            relative, largest = errors(ctx, d.local, expected.local)
            say(f"| {dtype} | {n} | {block} | {kind} | {relative:.2e} | {largest:.2e} |")
            case = {
                "dtype": dtype,
                "n": n,
                "grid": f"{grid.nprow}x{grid.npcol}",
                "block": block,
                "out_dtype": kind,
            }
            rows.append({"case": case, "errors": {"relative": relative, "largest": largest}})
    return rows


def _empty(ctx: pb.Context, n: int, block: int, grid: pb.Grid, dtype: str) -> pb.DistributedMatrix:
    return ctx.empty(pb.MatrixDescriptor((n, n), (block, block), grid, dtype=dtype))


def shape(text: str) -> tuple[int, int, int]:
    """Return T, N, K."""
    numbers = [int(number) for number in text.split(",")]
    if len(numbers) != 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected T,N,K")
    return numbers[0], numbers[1], numbers[2]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=shape, action="append", help="T,N,K; K summed over ranks")
    parser.add_argument("-n", type=int, action="append", help="order of the general products")
    results.add_option(parser)
    parser.add_argument("--engine", default="auto", choices=("auto", "host", "cublasmp"))
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    with pb.Context(engine=arguments.engine) as ctx:
        say = print if ctx.rank == 0 else lambda *_: None
        say(f"{ctx.size} ranks, {ctx.engine.name}\n")
        rows = by_sent_type(ctx, arguments.shape or SHAPES, say)
        say("")
        rows += by_block(ctx, arguments.n or ORDERS, say)
        directory = results.directory_of(arguments)
        if ctx.rank == 0 and directory is not None:
            run = results.Run(
                benchmark="rounding", date=results.today(), commit=results.this_commit(), ranks=ctx.size,
                gpus=0 if ctx.engine.device is None else ctx.size, **results.facts(ctx),
                options=results.options_of(arguments), reference="", sample="one run", rows=rows,
            )  # fmt: skip
            say(f"\n{results.save(run, directory)}")


if __name__ == "__main__":
    main()
