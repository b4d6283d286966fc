# SPDX-License-Identifier: Apache-2.0
"""Descriptor files of tensor-parallel products on the command line: ``pblasmp show`` and ``run``."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import click
import numpy as np

import pblasmp as pb

from ..context import Context
from ..errors import LayoutError
from ..layout import MatrixDescriptor, ParallelProblem
from ..problems.files import ParallelFile
from .progress import Reporter
from .run_routine import integers

__all__ = ["describe", "needed_bytes", "print_shares", "run_parallel", "shares"]


def shares(p: ParallelProblem) -> list[dict[str, Any]]:
    """Return for each rank the shapes of its arrays: X, W and the result. Local."""
    of_result = [p.sizes[1]] * p.size if p.form == "matmul_allgather" else p.outputs
    rows = zip(p.tokens, p.inputs, p.outputs, p.rows, of_result, strict=True)
    return [
        {"x": [t, k], "w": [n, k] if p.outputs_first else [k, n], "result": [of, columns]}
        for t, k, n, of, columns in rows
    ]


def describe(file: ParallelFile) -> dict[str, Any]:
    """Return the contents of a file in JSON's types. Local."""
    p = file.problem
    m, n, k = p.sizes
    about = {"title": file.title, "description": file.description, "product": str(p), "m": m, "n": n, "k": k}
    return {**p.to_dict(), **about, "nranks": p.size, "ranks": shares(p)}


def print_shares(file: ParallelFile) -> None:
    """Print what every rank holds. Local."""
    click.secho(file.title, bold=True)
    if file.description:
        click.echo(file.description)
    click.echo(f"{file.problem}\n")
    rows = [("rank", "x", "w", "result")]
    for rank, each in enumerate(shares(file.problem)):
        x, w, result = (f"{down} × {across}" for down, across in each.values())
        rows.append((str(rank), x, w, result))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    click.echo("\nThis product is legal.")


def needed_bytes(p: ParallelProblem) -> int:
    """Return how much memory each rank needs to compute the whole product as well. Local."""
    tokens, outputs, inputs = p.sizes
    return 4 * np.dtype(complex).itemsize * (tokens * inputs + outputs * inputs + tokens * outputs)


def run_parallel(ctx: Context, file: ParallelFile, algo: str, reporter: Reporter) -> tuple[Any, int, int]:
    """Run the function of a file, and compare exactly with NumPy on every rank. Collective over the context.

    Returns:
        The plan's report, how many elements of the ranks' results are wrong, and how many there are.
    """
    p, rank = file.problem, ctx.rank
    with ctx.agreement("pblasmp run"):
        if ctx.size != p.size:
            raise LayoutError(f"{file.path} is for {p.size} ranks, got {ctx.size}")
        if p.turned or p.transposed or p.conjugated:
            raise LayoutError(
                f"{file.path}: a product of matrices in this form, which no function computes: run its own file"
            )
    reporter.step("making operands")
    tokens, outputs, inputs = p.sizes
    X, W, C = (
        integers(seed, MatrixDescriptor((rows, cols), 1, "1x1", dtype=kind))(*np.ogrid[:rows, :cols])
        for seed, (rows, cols, kind) in enumerate(
            ((tokens, inputs, p.dtype), (outputs, inputs, p.w_dtype), (tokens, outputs, p.out_dtype))
        )
    )
    expected = (X @ W.T + (0 if p.c_dtype is None else C)).astype(p.out_dtype)
    ends = list(accumulate(p.inputs)) if p.sums else []
    mine = slice(ends[rank] - p.inputs[rank], ends[rank]) if p.sums else slice(None)
    of_x = p.slices("tokens")[rank] if p.gathers else slice(None)
    of_w = slice(None) if p.sums else p.slices("outputs")[rank]
    of_y = p.slices("rows")[rank] if p.form == "matmul_reduce_scatter" else slice(None)
    result = of_y, of_w if p.gathers else slice(None)
    w = _array(ctx, p, "w", W[of_w, mine] if p.outputs_first else W[of_w, mine].T, p.w_dtype)
    how: dict[str, Any] = {"transposed": not p.outputs_first, "dtype": p.out_dtype, "algo": algo}
    if p.c_dtype is not None:
        how |= {"beta": 1, "c": _folded(p, _array(ctx, p, "c", C[result], p.c_dtype))}
    if p.return_gathered:
        how["return_gathered"] = True
    x = _folded(p, _array(ctx, p, "x", X[of_x, mine], p.dtype))
    reporter.step("multiplying")
    with pb.plan(p.form, x, w, ctx, **how) as plan:
        found = plan()
        report = plan.report()
        reporter.step("comparing")
        pairs = [(found, expected[result])]
        if p.return_gathered:
            pairs = [(found[0], expected[result]), (found[1], X.astype(p.dtype))]
        wrong = sum(
            int(np.count_nonzero(ctx.engine.to_host(got).reshape(wanted.shape) != wanted))
            for got, wanted in pairs
        )
    counts = ctx.comm.allgather((wrong, sum(wanted.size for _, wanted in pairs)))
    return report, sum(each for each, _ in counts), sum(each for _, each in counts)


def _array(ctx: Context, p: ParallelProblem, name: str, values: Any, dtype: np.dtype) -> Any:
    """Return values as an array of this rank's, its rows as far apart as the file says. Local."""
    apart = dict(p.row_bytes).get(name)
    ld = values.shape[1] if apart is None else apart[ctx.rank] // dtype.itemsize
    array = ctx.engine.empty(values.shape, dtype, "C", max(1, ld))
    ctx.engine.from_host(array, values.astype(dtype))
    return array


def _folded(p: ParallelProblem, array: Any) -> Any:
    """Return an array whose first dimension is in groups of ``inner`` tokens. Local."""
    return array if p.inner == 1 else array.reshape(-1, p.inner, array.shape[1])
