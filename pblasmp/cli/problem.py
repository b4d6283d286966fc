# SPDX-License-Identifier: Apache-2.0
"""``pblasmp run`` and ``check``: the products of descriptor files, on integers, against NumPy on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import pblasmp as pb

from ..context import Context
from ..errors import LayoutError
from ..launch import surroundings
from ..layout import MatrixDescriptor
from ..layout.files import ProblemFile, check, load_problem_file
from .progress import Reporter
from .ranks import on_ranks

__all__ = ["check_files", "print_run", "run_file"]


def run_file(file: str, nranks: int | None, engine: str) -> dict[str, Any]:
    """Run the product of a descriptor file and return how it compares. Collective over ranks.

    Raises:
        LayoutError: the file is faulty, or its grid needs more ranks.
        FailureError: a rank that was started failed.
    """
    found = _load(file)
    around = surroundings()
    ranks = nranks or (around.size if around else found.nranks)
    if ranks < found.nranks:
        raise LayoutError(f"{file} needs {found.nranks} ranks, got {ranks}: -n {found.nranks}")
    return on_ranks(_work, (file, engine), ranks)


def _load(file: str) -> ProblemFile:
    found = load_problem_file(file)
    try:
        found.problem.validate()
    except LayoutError as error:
        raise LayoutError(f"{found.path}: {error}") from None
    return found


def _work(options: tuple[str, Any], reporter: Reporter) -> dict[str, Any]:
    """What every rank does. Collective over all ranks."""
    file, engine = options
    with Context(engine=engine) as ctx, reporter.errors():
        with ctx.agreement("pblasmp run"):
            found = _load(file)
        problem = found.problem
        reporter.step("making operands")
        whole = {
            name: ctx.from_function(_numbers(seed, parent), parent)
            for seed, (name, parent) in enumerate(found.parents.items())
        }
        a, b, d = (whole[name][found.windows[name]] for name in "abd")
        c = whole["c"][found.windows["c"]] if "c" in whole else None
        reporter.step("multiplying")
        with pb.plan_matmul(
            a, b, c, out=d, alpha=found.alpha, beta=found.beta,
            op_a=problem.op_a, op_b=problem.op_b, scheme=problem.scheme,
        ) as plan:  # fmt: skip
            plan()
            report = str(plan.report())
        reporter.step("comparing")
        got = whole["d"].gather()
        wrong = 0 if got is None else int(np.count_nonzero(got != _expected(found)))
        return {
            "title": found.title,
            "ranks": ctx.size,
            "report": report,
            "elements": found.parents["d"].shape[0] * found.parents["d"].shape[1],
            "wrong": ctx.comm.bcast(wrong),
        }


def _numbers(seed: int, descriptor: MatrixDescriptor) -> Any:
    """Return a function of indices that gives small integers, complex ones for a complex matrix."""

    def numbers(i: NDArray[np.int64], j: NDArray[np.int64]) -> Any:
        real = (3 * i + 5 * j + i * j + seed) % 7 - 3
        return real + 1j * ((i + 2 * j + seed) % 5 - 2) if descriptor.dtype.kind == "c" else real

    return numbers


def _expected(found: ProblemFile) -> NDArray[Any]:
    """Return what D's whole matrix holds afterwards, by NumPy in double precision: exact for these integers."""

    def whole(name: str) -> NDArray[Any]:
        parent = found.parents[name]
        i, j = np.ogrid[: parent.shape[0], : parent.shape[1]]
        numbers: NDArray[Any] = _numbers(list(found.parents).index(name), parent)(i, j)
        return numbers.astype(complex if parent.dtype.kind == "c" else float)

    def operand(name: str, op: str = "N") -> NDArray[Any]:
        part = whole(name)[found.windows[name]]
        return part if op == "N" else part.T if op == "T" else part.conj().T

    problem = found.problem
    product = found.alpha * (operand("a", problem.op_a) @ operand("b", problem.op_b))
    if problem.scheme == "ar":
        copies = (
            problem.d.grid.size
        )  # every rank has a whole D: declared side by side, in C order one below the other
        product = np.tile(product, (1, copies) if problem.d.order == "F" else (copies, 1))
    if "c" in found.parents:
        product = product + found.beta * operand("c")
    expected = whole("d")
    expected[found.windows["d"]] = product
    return expected.astype(found.parents["d"].dtype)


def print_run(result: dict[str, Any]) -> None:
    """Print what was run and how it compares. Local."""
    click.echo(f"{click.style(result['title'], bold=True)}, on {result['ranks']} ranks")
    click.echo(result["report"])
    agree = "all equal to" if not result["wrong"] else f"{result['wrong']} DIFFER from"
    click.echo(f"  result     {result['elements']} elements, {agree} NumPy's")


def check_files(files: tuple[str, ...]) -> int:
    """Print for each file whether it is legal and what it says, or every fault; return how many are not. Local."""
    bad = 0
    for file in files:
        faults = check(file)
        if faults:
            bad += 1
            click.echo(
                click.style(f"{file}: {'a fault' if len(faults) == 1 else f'{len(faults)} faults'}", fg="red")
            )
            for fault in faults:
                click.echo("  - " + fault.replace("\n", "\n    "))
        else:
            click.echo(click.style(f"{file}: legal", fg="green"))
            _explain(Path(file))
    return bad


def _explain(file: Path) -> None:
    try:
        found = load_problem_file(str(file))
    except LayoutError:
        return  # a grid file
    p = found.problem
    click.echo(f"  {found.title}")
    click.echo(
        f"  {p.op_a}{p.op_b} product of {p.m} × {p.n} × {p.k}, scheme {p.scheme}, {found.nranks} ranks"
    )
    for name, parent in found.parents.items():
        rows, cols = found.windows[name]
        part = (rows.stop - rows.start, cols.stop - cols.start) != parent.shape
        window = (
            f", of it rows {rows.start} to {rows.stop}, columns {cols.start} to {cols.stop}" if part else ""
        )
        click.echo(f"  {name.upper()}: {parent}{window}")
