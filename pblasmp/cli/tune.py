# SPDX-License-Identifier: Apache-2.0
"""``pblasmp tune``: time every algorithm of tensor-parallel products on this machine, and keep the times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from ..context import Context
from ..dtypes import as_dtype
from ..engines.choose import EngineName
from ..launchers import surroundings
from ..layout.schemes import FORMS, Form
from ..planning import tune as tune_product
from ..problems.files import load_model
from .bench import Separate, default_shapes, require_even
from .ranks import on_ranks
from .reports import Reporter
from .terminal import plain


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What the user asks for.

    Attributes:
        products: which of ``FORMS``; empty: the model's, or each of them.
        shapes: T, N, K each.
        model: name of a model in descriptors/models.
        tokens: numbers of tokens, for the model.
        dtype: of all arrays; None: bfloat16 on GPUs, float32 on the host.
        limit: seconds for one product.
        engine: as in Context.
    """

    products: tuple[Form, ...]
    shapes: tuple[tuple[int, int, int], ...]
    model: str | None
    tokens: tuple[int, ...]
    dtype: str | None
    limit: float
    engine: EngineName


def tune(options: TuneOptions, nranks: int | None) -> dict[str, Any]:
    """Measure what the options say on ``nranks`` ranks. Collective over ranks.

    Raises:
        PblasmpError: the options are not valid.
        FailureError: a rank that was started failed.
    """
    if surroundings() is None and options.model is not None:
        load_model(options.model)
    return on_ranks(_work, options, nranks)


def _cases(options: TuneOptions, ranks: int, *, on_gpus: bool) -> list[tuple[Form, tuple[int, int, int]]]:
    """Return the products to measure: which one, and T, N, K as ``pblasmp bench`` takes them. Local."""
    if options.model is not None:
        asked = options.products or tuple(FORMS)
        return [
            (layer.product, layer.shape(tokens, ranks))
            for tokens in options.tokens
            for layer in load_model(options.model)
            if layer.product in asked
        ]
    shapes = options.shapes or default_shapes(ranks, on_gpus=on_gpus)
    return [(name, shape) for name in options.products or FORMS for shape in shapes]


def _work(options: TuneOptions, reporter: Reporter) -> dict[str, Any]:
    """What every rank does. Collective over all ranks."""
    with Context(engine=options.engine) as ctx, reporter.errors():
        dtype = options.dtype or ("bfloat16" if ctx.engine.traits.on_gpus else "float32")
        with ctx.agreement("pblasmp tune"):
            cases = _cases(options, ctx.size, on_gpus=ctx.engine.traits.on_gpus)
            for name, shape in cases:
                require_even(name, shape, ctx.size)
        rows, file, reason = [], "", ""
        for name, shape in cases:
            t, n, k = shape
            reporter.step(f"{name} {t}, {n}, {k}")
            with ctx.agreement("pblasmp tune: arrays"):
                operands = Separate(ctx, name, shape, as_dtype(dtype))
            found = tune_product(
                name, operands.x, operands.w, ctx, limit=options.limit, progress=reporter.progress
            )
            file, reason = found.file, found.reason
            rows.append(
                {
                    "product": name, "case": f"{t}, {n}, {k}", "best": found.best,
                    "us": {each: seconds * 1e6 for each, seconds in found.seconds.items()},
                    "refused": found.refused,
                }
            )  # fmt: skip
        return {
            "machine": ctx.engine.measured.machine, "dtype": dtype, "file": file, "reason": reason, "measured": rows,
        }  # fmt: skip


def print_tuned(result: dict[str, Any]) -> None:
    """Print what was measured. Local."""
    click.echo(f"{result['machine']}, {result['dtype']}")
    known = "; from now on auto takes the fastest algorithm" if result["file"] else ""
    click.echo(f"median times until all ranks are done, in µs{known}")
    for row in result["measured"]:
        times = sorted(row["us"].items(), key=lambda each: each[1])
        head = click.style(f"{row['product']:<23}", bold=True)
        click.echo(f"{head}{row['case']:>20}  " + "  ".join(f"{name} {us:.0f}" for name, us in times))
    failed = f"the times could not be kept: {plain(result['reason'])}"
    click.echo(f"kept in {plain(result['file'])}" if result["file"] else failed)
