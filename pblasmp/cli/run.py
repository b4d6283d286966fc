# SPDX-License-Identifier: Apache-2.0
"""``pblasmp run``: the product or routine of a descriptor file, on integers, against NumPy on one rank."""

from __future__ import annotations

from typing import Any

import click
import numpy as np

import pblasmp as pb

from ..context import Context
from ..errors import LayoutError, counted
from ..launchers import surroundings
from ..problems.files import ParallelFile, ProblemFile, RoutineFile
from ..resources import memory_bytes, usable_cores
from .descriptor_files import AnyFile, legal, read_text
from .parallel_file import needed_bytes, run_parallel
from .progress import Reporter
from .ranks import on_ranks
from .run_routine import integers, run_routine

__all__ = ["print_run", "run_file"]


def run_file(
    file: str, nranks: int | None, max_ranks: int | None, engine: str, algo: str = "auto"
) -> dict[str, Any]:
    """Run the problem of a descriptor file and return how it compares. Collective over ranks.

    Args:
        file: its path, "-", or the name of one that comes with pblasmp.
        nranks: ranks to start; None: as many as the file needs.
        max_ranks: the most ranks to start for a file that asks for them; None: 16, or twice the cores.
        engine: as in Context.
        algo: as for ``pb.matmul``.

    Raises:
        LayoutError: the file is faulty, its grid needs more or fewer ranks, or its matrices do not fit into memory.
        FailureError: a rank that was started failed.
    """
    if surroundings() is not None:
        return on_ranks(_work, (file, None, engine, algo), nranks)
    text = read_text(file)
    found = _load(file, text)
    if nranks is None:
        nranks = found.nranks
        most = max_ranks or max(16, 2 * usable_cores())
        if nranks > most:
            raise LayoutError(
                f"{file} needs {counted(nranks, 'rank')}, at most {most} are started: give --max-ranks {nranks} if the "
                "machine can take them"
            )
    if nranks < found.nranks:
        raise LayoutError(
            f"{file} needs {counted(found.nranks, 'rank')}, got {nranks}: give -n {found.nranks}"
        )
    return on_ranks(_work, (file, text, engine, algo), nranks)


def _load(file: str, text: bytes) -> AnyFile:
    """Return the problem in a file, checked to fit into memory as whole matrices on one rank. Local."""
    found = legal(file, text)
    if isinstance(found, ParallelFile):
        needed, where = needed_bytes(found.problem) * found.nranks, "every rank"
    else:
        elements = sum(parent.shape[0] * parent.shape[1] for parent in found.parents.values())
        distributed = sum(parent.nbytes for parent in found.parents.values())
        needed, where = distributed + elements * 2 * np.dtype(complex).itemsize, "one rank"
    here = memory_bytes()
    if needed > here:
        raise LayoutError(
            f"{file}: run compares whole matrices on {where}; these need {needed / 2**30:.3g} GiB, "
            f"this machine has {here / 2**30:.3g} GiB"
        )
    return found


def _work(options: tuple[str, bytes | None, Any, str], reporter: Reporter) -> dict[str, Any]:
    """What every rank does. Collective over all ranks."""
    file, text, engine, algo = options
    with Context(engine=engine) as ctx, reporter.errors():
        with ctx.agreement("pblasmp run: reading"):
            if text is None and ctx.rank == 0:  # standard input is rank 0's alone
                text = read_text(file)
        text = ctx.comm.bcast(text)
        with ctx.agreement("pblasmp run"):
            assert text is not None
            found = _load(file, text)
            if ctx.size < found.nranks:
                raise LayoutError(f"{file} needs {counted(found.nranks, 'rank')}, got {ctx.size}")
        if isinstance(found, ParallelFile):
            report, wrong, elements = run_parallel(ctx, found, algo, reporter)
        else:
            run_file_of = run_routine if isinstance(found, RoutineFile) else _run_product
            report, wrong = run_file_of(ctx, found, algo, reporter)  # type: ignore[arg-type]
            elements = found.parents["d"].shape[0] * found.parents["d"].shape[1]
        return {
            "file": str(found.path),
            "title": found.title,
            "ranks": ctx.size,
            "engine": ctx.engine.name,
            "algorithm": report.algorithm,
            "path": report.path,
            "report": str(report),
            "elements": elements,
            "wrong": ctx.comm.bcast(wrong),
        }


def _run_product(ctx: Context, found: ProblemFile, algo: str, reporter: Reporter) -> tuple[Any, int]:
    """Return the plan's report, and on rank 0 how many elements of D's whole matrix are wrong. Collective."""
    problem = found.problem
    reporter.step("making operands")
    whole = {
        name: ctx.from_function(integers(seed, parent), parent)
        for seed, (name, parent) in enumerate(found.parents.items())
    }
    a, b, d = (whole[name][found.windows[name]] for name in "abd")
    c = whole["c"][found.windows["c"]] if "c" in whole else None
    reporter.step("multiplying")
    with pb.plan(
        pb.matmul, a, b, c, out=d, alpha=found.alpha, beta=found.beta,
        op_a=problem.op_a, op_b=problem.op_b, scheme=problem.scheme, algo=algo,
    ) as plan:  # fmt: skip
        plan()
        report = plan.report()
    reporter.step("comparing")
    scalars: dict[str, Any] = {"alpha": found.alpha, "beta": found.beta}
    ops: dict[str, Any] = {"op_a": problem.op_a, "op_b": problem.op_b, "scheme": problem.scheme}
    verified = pb.verify(a, b, c, d, **scalars, **ops, exact=True)
    got = whole["d"].gather()
    if got is None:
        return report, 0
    outside = np.ones(got.shape, bool)
    outside[found.windows["d"]] = False
    before = integers(list(whole).index("d"), found.parents["d"])(*np.ogrid[: got.shape[0], : got.shape[1]])
    return report, verified.wrong + int(np.count_nonzero((got != before) & outside))


def print_run(result: dict[str, Any]) -> None:
    """Print what was run and how it compares. Local."""
    click.echo(f"{click.style(result['title'], bold=True)}, on {counted(result['ranks'], 'rank')}")
    click.echo(result["report"])
    agree = (
        "all equal to"
        if not result["wrong"]
        else f"{result['wrong']} DIFFER{'S' if result['wrong'] == 1 else ''} from"
    )
    click.echo(f"  result     {counted(result['elements'], 'element')}, {agree} NumPy's")
