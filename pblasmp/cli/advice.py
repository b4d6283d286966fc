# SPDX-License-Identifier: Apache-2.0
"""``pblasmp plan`` and ``pblasmp measure``: what a product takes on a machine, and measuring this one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..context import Context
from ..costs.advise import Advice, advise, advise_layers, advise_move, perfect, remarks_of, scale
from ..costs.machines import Machine, load_machine, machine_from, machine_toml, with_ranks
from ..costs.predict import Prediction, predict
from ..costs.pretend import DryRun, dry_run
from ..dtypes import as_dtype
from ..engines.choose import EngineName
from ..errors import ArgumentError
from ..layout import Grid, MatmulProblem, MatrixDescriptor
from ..layout.schemes import FORMS
from ..layout.value import time_text
from ..matrix.products import matmul
from ..planning import plan
from ..problems.files import load_problem, load_table
from ..resources import machine_cores, memory_bytes
from ..tuning.speeds import measure_calls, measure_ranks
from .options import require_directory
from .ranks import on_ranks
from .reports import Reporter

_LARGE = 2048  # an H200 multiplies matrices of this order five times as fast as its host queues the product


def measure(ranks: Sequence[int], output: Path, engine: EngineName, title: str | None) -> Machine:
    """Measure this machine on each number of ranks, and write its file. Collective over ranks."""
    table: dict[str, Any] | None = None
    require_directory(output)
    if output.exists():
        table = load_table(output)
        machine_from(table, output.stem)
    for count in ranks or (None,):
        found = on_ranks(_measure, engine, count)
        about = {
            "title": title or found["machine"], "engine": found["engine"], "measured": True, "ranks_per_node": 1,
            "memory_bytes": found["memory_bytes"], **({} if found["engine"] == "gpu" else {"cores": machine_cores()}),
        }  # fmt: skip
        table = with_ranks(table, found["entry"], **about)
    assert table is not None
    machine = machine_from(table, output.stem)
    if found["leads"]:
        output.write_text(machine_toml(table))
    return machine


def _measure(engine: EngineName, reporter: Reporter) -> dict[str, Any]:
    """What every rank does. Collective over all ranks."""
    with Context(engine=engine) as ctx, reporter.errors(), ExitStack() as open_plans:
        d = MatrixDescriptor((8, 8), (4, 4), Grid.squarest(ctx.size))
        a, b, out = ctx.eye(d), ctx.zeros(d), ctx.zeros(d)
        x, w = _operands(ctx)
        product: Any = plan(matmul, a, b, out=out)
        routine: Any = plan("trsm", a, b, out=out)
        forms: list[Any] = [plan(form, x, w, ctx) for form in FORMS]
        factorizations: list[Any] = [plan(name, a) for name in ("cholesky", "lu_factor", "qr")]
        for each in (product, routine, *forms, *factorizations):
            open_plans.enter_context(each)
        entry = measure_ranks(ctx.engine, ctx.comm, product, reporter.step)
        calls = [(each.problem, each) for each in (product, routine, *factorizations)]
        calls += [(each.problem, partial(each, x)) for each in forms]
        entry["calls"] = measure_calls(ctx.engine, ctx.comm, entry, calls)
        gpus = ctx.engine.traits.on_gpus
        return {
            "entry": entry, "machine": ctx.engine.machine, "engine": "gpu" if gpus else "host",
            "memory_bytes": _memory(ctx, gpus=gpus), "leads": ctx.rank == 0,
        }  # fmt: skip


def _operands(ctx: Any) -> tuple[Any, Any]:
    """Return x and w of tensor-parallel products, on GPUs of those that take the algorithms of large ones. Local."""
    n, kind = (_LARGE, "bfloat16") if ctx.engine.traits.on_gpus else (8, "float32")
    x, w = (ctx.engine.empty((n, n), as_dtype(kind), "C", n) for _ in range(2))
    x[...], w[...] = 0, 0
    return x, w


def _memory(ctx: Any, *, gpus: bool) -> int:
    """Return the memory of this rank's GPU, or the node's divided by its cores."""
    if gpus:
        import cupy

        return int(cupy.cuda.runtime.memGetInfo()[1])
    return memory_bytes() // max(int(ctx.size), machine_cores())


def plan_sizes(
    sizes: tuple[int | str, int, int | None],
    ranks: int | None,
    nodes: tuple[int, int] | None,
    machine: str,
    dtype: str,
    *,
    dry: bool = False,
) -> dict[str, Any]:
    """Return the advice for a product or a factorization, for one number of ranks or for numbers of nodes. Local.

    With ``dry`` the best choice is run on pretended ranks.
    """
    where = load_machine(machine)
    if nodes is None:
        found = advise(*sizes, ranks or where.ranks_per_node, where, dtype=dtype)
        return {
            "advice": [(0, found)],
            **(_dry(found.best.problem, found.best.prediction, where) if dry else {}),
        }
    counts = [n for n in (1 << i for i in range(nodes[1].bit_length())) if nodes[0] <= n <= nodes[1]]
    return {"advice": scale(*sizes, sorted({nodes[0], *counts, nodes[1]}), where, dtype=dtype)}


def plan_file(file: str, machine: str, *, dry: bool = False) -> dict[str, Any]:
    """Return what the problem in a descriptor file takes and, of a product, whether moving it first pays. Local.

    With ``dry`` it is run on pretended ranks.
    """
    problem = load_problem(file)
    found: dict[str, Any] = {"prediction": predict(problem, machine)}
    if isinstance(problem, MatmulProblem) and problem.scheme == "gemm":
        found["move"] = advise_move(problem, machine)
    return {**found, **(_dry(problem, found["prediction"], load_machine(machine)) if dry else {})}


def _dry(problem: Any, found: Prediction, machine: Machine) -> dict[str, DryRun]:
    """Run a problem on pretended CPU ranks; return what that found. Local.

    ArgumentError if the arrays of all ranks do not fit into this machine's memory.
    """
    needed, here = int(found.traffic.memory_bytes.sum()), memory_bytes()
    if needed > here:
        raise ArgumentError(
            f"--dry-run: this process would hold the arrays of all ranks, {needed / 2**30:.3g} GiB, this machine has "
            f"{here / 2**30:.3g} GiB"
        )
    ranks, algorithm = found.traffic.nranks, found.algorithm
    if isinstance(problem, MatmulProblem) and algorithm == "push":  # of GPUs, which move the same slabs
        algorithm = "gathered"
    per_node = min(ranks, machine.ranks_per_node)
    return {"dry_run": dry_run(problem, algorithm, nranks=ranks, ranks_per_node=per_node)}


def plan_model(model: str, tokens: int, machine: str, dtype: str) -> dict[str, Any]:
    """Return what the layers of a model take over numbers of ranks. Local."""
    return {"layers": advise_layers(model, tokens, machine, dtype=dtype)}


def as_values(found: dict[str, Any]) -> dict[str, Any]:
    """Return a plan as plain values, for JSON. Local."""
    if "layers" in found:
        return {"layers": [each.to_dict() for each in found["layers"]]}
    if "advice" in found:
        dry = {"dry_run": found["dry_run"].to_dict()} if "dry_run" in found else {}
        return {"plans": [{"nodes": nodes, **each.to_dict()} for nodes, each in found["advice"]], **dry}
    return {name: each.to_dict() for name, each in found.items()}


def print_plan(found: dict[str, Any]) -> None:
    """Print a plan. Local."""
    if "layers" in found:
        for each in found["layers"]:
            times = "  ".join(f"{n}: {time_text(x.seconds)}" for n, x in each.predictions.items())
            click.echo(f"{each.name:<20} {each.product:<22} {times}   best on {each.best}")
        _print_remarks(x for each in found["layers"] for x in each.predictions.values())
        return
    if "advice" not in found:
        click.echo("\n".join(str(each) for each in found.values()))
        return
    advice: list[tuple[int, Advice]] = found["advice"]
    if len(advice) == 1:
        click.echo(str(advice[0][1]))
    else:
        _print_scaling(advice)
    if "dry_run" in found:
        click.echo(str(found["dry_run"]))


def _print_scaling(advice: list[tuple[int, Advice]]) -> None:
    _, work = perfect(advice)
    for nodes, each in advice:
        x = each.best.prediction
        relative = f"{100 * work / (nodes * x.seconds):4.0f} %" if x.fits else "does not fit"
        memory = f"{x.memory_bytes / 2**30:7.1f} GiB"
        click.echo(f"{nodes:>4} nodes  {time_text(x.seconds):>8}  {memory}  {relative}  {each.best.label}")
    _print_remarks(each.best.prediction for _, each in advice)


def _print_remarks(predictions: Iterable[Prediction]) -> None:
    for remark in remarks_of(predictions):
        click.echo(f"extrapolated: {remark}")
