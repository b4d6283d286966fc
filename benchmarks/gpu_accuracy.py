# SPDX-License-Identifier: Apache-2.0
"""Errors of GEMM + ReduceScatter and GEMM + AllReduce by the type that partial sums travel in.

``mpirun -n 4 python -m benchmarks.gpu_accuracy`` on GPUs; rank 0 prints a table. x is of standard normal numbers, w
too, divided by the square root of k: results are about 1. Errors are against float64, of x and w as they are stored.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np

import pblasmp as pb

MAKERS = {"rs": pb.MatmulProblem.reduce_scatter, "ar": pb.MatmulProblem.allreduce}


@dataclass(frozen=True)
class Errors:
    """Of a product over all ranks: the largest error, and the root of the mean square; infinite for a wrong one."""

    largest: float
    typical: float


def measure(ctx: pb.Context, scheme: str, dtype: str, travels: str, shape: tuple[int, int, int]) -> Errors:
    """Return the errors of one product in C order. Collective over the context."""
    p = MAKERS[scheme](*shape, ctx.size, "N", "T", dtype=dtype, order="C")
    rng = np.random.default_rng(1)
    whole = [rng.standard_normal(x.shape, np.float32) for x in (p.a, p.b)]
    whole[1] /= np.sqrt(np.float32(p.k))
    whole = [values.astype(p.a.dtype) for values in whole]
    a, b = (placed(ctx, values, x) for values, x in zip(whole, (p.a, p.b), strict=True))
    out = ctx.empty(p.d)
    pb.matmul(a, b, out=out, op_b="T", scheme=scheme, comm_dtype=travels)
    x, w = (values.astype(np.float64) for values in whole)
    rows = np.arange(p.m) if scheme == "ar" else p.d.global_indices(ctx.rank)[0]
    error = out.on_host().astype(np.float64) - x[rows] @ w.T
    found = ctx.comm.allgather((np.abs(error).max(), np.square(error).mean()))
    return Errors(max(each[0] for each in found), float(np.sqrt(np.mean([each[1] for each in found]))))


def placed(ctx: pb.Context, whole: Any, d: pb.MatrixDescriptor) -> pb.DistributedMatrix:
    """Return a matrix of which every rank has the whole. Collective over the context."""
    out = ctx.empty(d)
    rows, cols = d.global_indices(ctx.rank)
    ctx.engine.from_host(out.local, whole[np.ix_(rows, cols)])
    return out


def table(ctx: pb.Context, shape: tuple[int, int, int]) -> list[str]:
    """Return the lines of a Markdown table. Collective over the context."""
    m, n, k = shape
    lines = [
        f"{m} x {n} x {k} on {ctx.size} ranks, {ctx.engine.name}",
        "",
        "| scheme | type | partial sums in | largest error | root mean square |",
        "| --- | --- | --- | --- | --- |",
    ]
    for scheme in MAKERS:
        for dtype in ("float16", "bfloat16"):
            for travels in (dtype, "float32"):
                found = measure(ctx, scheme, dtype, travels, shape)
                lines.append(
                    f"| {scheme} | {dtype} | {travels} | {found.largest:.1e} | {found.typical:.1e} |"
                )
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="cublasmp", choices=["cublasmp", "host"])
    parser.add_argument("--shape", type=int, nargs=3, default=(2048, 2048, 8192), metavar=("M", "N", "K"))
    given = parser.parse_args()
    with pb.Context(engine=given.engine) as ctx:
        lines = table(ctx, tuple(given.shape))
        if ctx.rank == 0:
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
