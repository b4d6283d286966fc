# SPDX-License-Identifier: Apache-2.0
"""Descriptor files on the command line: reading, ``pblasmp check`` and ``list``, and what ``--json`` prints."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..errors import LayoutError, counted, faults_text
from ..layout import FactorProblem, Level3Problem, MatrixDescriptor, ParallelProblem
from ..problems.files import ProblemFile, Text, faults_in, find, load_problem_file, problem_in, read_text
from .terminal import plain

_MOST_RANKS_TOLD = 4096


def parse(file: str, text: Text) -> ProblemFile:
    """Return the problem in the text of a file, its title made harmless. Local.

    LayoutError, which names the file and every fault, if the text does not describe a problem.
    """
    found = problem_in(Path(_name(file)), text)
    return replace(found, title=plain(found.title), description=plain(found.description))


def _name(file: str) -> str:
    return "<stdin>" if file == "-" else file


def check_files(files: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return for each file whether it is legal, its faults, and its contents. Local."""
    checked = []
    for file in files:
        name, told = _name(file), dict[str, Any]()
        try:
            text = read_text(file)
            faults = faults_in(text)
            with contextlib.suppress(LayoutError):  # a grid, or faulty
                told = {} if faults else describe_problem(parse(file, text))
        except LayoutError as error:
            faults = [str(error).removeprefix(f"{name}: ")]
        checked.append({"file": name, "legal": not faults, "faults": faults, **told})
    return checked


def describe_problem(file: ProblemFile) -> dict[str, Any]:
    """Return the contents of a problem file in JSON's types. Local."""
    p = file.problem
    if isinstance(p, ParallelProblem):
        m, n, k = p.sizes
        about = {
            "title": file.title,
            "description": file.description,
            "product": str(p),
            "m": m,
            "n": n,
            "k": k,
        }
        return {**p.to_dict(), **about, "nranks": p.size, "ranks": shares(p)}
    what: dict[str, Any]
    scalars: dict[str, Any] = {}
    if isinstance(p, FactorProblem):
        what = {"factorization": p.routine, **p.options, "text": str(p)}
        sizes = {"m": p.a.shape[0], "n": p.a.shape[1], "right": p.right}
    else:
        sizes = {name: getattr(p, name) for name in "mnk"}
        if isinstance(p, Level3Problem):
            options = {name: getattr(p, name) for name in p.traits.options}
            what = {"routine": p.routine, "formula": p.traits.formula, **options}
        else:
            what = {"scheme": p.scheme, "op_a": p.op_a, "op_b": p.op_b}
            scalars = {"alpha": file.alpha, "beta": file.beta}
    return {
        "title": file.title,
        "description": file.description,
        **what,
        **sizes,
        **scalars,
        "nranks": file.nranks,
        "operands": {
            name: _describe_operand(parent, file.windows[name]) for name, parent in file.parents.items()
        },
    }


def _describe_operand(parent: MatrixDescriptor, window: tuple[slice, slice]) -> dict[str, Any]:
    rows, cols = window
    size = parent.grid.size
    part = (rows.stop - rows.start, cols.stop - cols.start) != parent.shape
    window_text = (
        f", of it rows {rows.start} to {rows.stop}, columns {cols.start} to {cols.stop}" if part else ""
    )
    return {
        "text": f"{parent}{window_text}",
        "shape": parent.shape,
        "block": parent.block,
        "source": parent.source,
        "dtype": parent.dtype.name,
        "order": parent.order,
        "ld": parent.ld,
        "grid": {"nprow": parent.grid.nprow, "npcol": parent.grid.npcol, "order": parent.grid.order},
        "window": [[rows.start, rows.stop], [cols.start, cols.stop]],
        "local_shapes": [parent.local_shape(rank) for rank in range(size)]
        if size <= _MOST_RANKS_TOLD
        else None,
    }


def print_checked(checked: list[dict[str, Any]]) -> None:
    """Print what ``check_files`` returned. Local."""
    for one in checked:
        file, faults = plain(one["file"]), one["faults"]
        if faults:
            first, *others = (plain(fault).replace("\n", "\n    ") for fault in faults)
            click.secho(faults_text(file, [first, *others]), fg="red")
            continue
        click.secho(f"{file}: legal", fg="green")
        if "title" in one:
            _print_problem(one)


def _print_problem(one: dict[str, Any]) -> None:
    click.echo(f"  {one['title']}")
    if "form" in one:
        click.echo(f"  {one['product']}")
        return
    if "routine" in one:
        options = "".join(f" {name}={one[name]}" for name in ("side", "uplo", "op_a", "diag") if name in one)
        click.echo(
            f"  {one['routine']}{options} of {one['m']} × {one['n']}, {counted(one['nranks'], 'rank')}"
        )
        click.echo(f"  {one['formula']}")
    elif "factorization" in one:
        click.echo(f"  {one['text']}")
    else:
        click.echo(
            f"  {one['op_a']}{one['op_b']} product of {one['m']} × {one['n']} × {one['k']}, scheme {one['scheme']}, "
            f"{counted(one['nranks'], 'rank')}"
        )
    for name, operand in one["operands"].items():
        click.echo(f"  {name.upper()}: {operand['text']}")


def shipped() -> list[dict[str, Any]]:
    """Return the problems that come with pblasmp: their names, titles and numbers of ranks. Local."""
    found = [(path.stem, load_problem_file(path)) for path in find("problems")]
    return [{"name": name, "nranks": file.nranks, "title": file.title} for name, file in found]


def print_list(problems: list[dict[str, Any]]) -> None:
    """Print a line for each problem. Local."""
    width = max((len(one["name"]) for one in problems), default=0)
    for one in problems:
        ranks = counted(one["nranks"], "rank")
        click.echo(f"{click.style(one['name'].ljust(width), bold=True)}  {ranks:<8}  {one['title']}")


# -- tensor-parallel products


def shares(p: ParallelProblem) -> list[dict[str, Any]]:
    """Return for each rank the shapes of its arrays: X, W and the result. Local."""
    of_result = [p.sizes[1]] * p.size if p.form == "matmul_allgather" else p.outputs
    rows = zip(p.tokens, p.inputs, p.outputs, p.rows, of_result, strict=True)
    return [
        {"x": [t, k], "w": [n, k] if p.outputs_first else [k, n], "result": [of, columns]}
        for t, k, n, of, columns in rows
    ]


def print_shares(file: ProblemFile) -> None:
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
