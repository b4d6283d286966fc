# SPDX-License-Identifier: Apache-2.0
"""The commands of ``pblasmp``, their options, and what becomes of errors and signals."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from .. import __version__
from ..launch import surroundings
from .progress import describe, is_bad_input
from .ranks import FailureError, leading

__all__ = ["cli", "run_command_line"]

Command = TypeVar("Command", bound=Callable[..., Any])

_DTYPES = ("float64", "float32", "complex128", "complex64", "float16", "bfloat16")
_FILE = click.Path(path_type=Path)


def run_command_line() -> NoReturn:
    """Run the command line and exit: 1 for a failure, 2 for bad input, 128 + N for signal N. Local."""
    debug = "--debug" in sys.argv
    _end_on_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × shows a question mark
    try:
        cli.main(prog_name="pblasmp", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        _leave("interrupted", 128 + signal.SIGINT)
    except FailureError as error:
        _leave(str(error), error.status, error.trace if debug else error.printed)
    except Exception as error:  # noqa: BLE001 (the last that sees it)
        _leave(describe(error), 2 if is_bad_input(error) else 1, traceback.format_exc() if debug else "")
    sys.exit(0)


def _leave(message: str, status: int, details: str = "") -> NoReturn:
    """Exit after one line that says why, from the process that speaks for all."""
    if leading():
        if details:
            click.echo(details.rstrip(), err=True)
        click.echo(f"pblasmp: {' '.join(message.split())}", err=True)
    sys.exit(status)


def _end_on_signals() -> None:
    """Have Ctrl-C, SIGTERM and SIGHUP unwind this process; what cleans up then is not interrupted again."""

    def end(number: int, *_: object) -> None:
        for ignored in numbers:
            signal.signal(ignored, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, end)


def _grid(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)[x×](\d+)", text)
    if match is None or 0 in (grid := (int(match[1]), int(match[2]))):
        raise click.BadParameter(f"{text!r}: expected rows x columns of ranks, for example 2x2", ctx, param)
    return grid


def _number(ctx: click.Context, param: click.Parameter, text: str | None) -> complex | None:
    if text is None:
        return None
    try:
        number = complex(text.replace("i", "j"))
    except ValueError:
        message = f"{text!r}: expected a number, for example 2, -0.5 or 1+2j"
        raise click.BadParameter(message, ctx, param) from None
    return number if number.imag else number.real


def _ops(ctx: click.Context, param: click.Parameter, text: str) -> str:
    if not re.fullmatch("[NTC]{2}", text):
        message = f"{text!r}: expected two letters of N, T and C, for A and for B, for example TN"
        raise click.BadParameter(message, ctx, param)
    return text


def _shapes(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[int, int, int], ...]:
    shapes = []
    for text in texts:
        match = re.fullmatch(r"(\d+),(\d+),(\d+)", text.replace(" ", ""))
        if match is None or 0 in (shape := (int(match[1]), int(match[2]), int(match[3]))):
            message = f"{text!r}: expected tokens, outputs and inputs, for example 1024,512,2048"
            raise click.BadParameter(message, ctx, param)
        shapes.append(shape)
    return tuple(shapes)


_ranks = click.option(
    "-n",
    "--ranks",
    type=click.IntRange(1),
    help="MPI ranks to start; under mpirun or srun, all that there are.",
)
_engine = click.option(
    "--engine",
    type=click.Choice(["auto", "host", "cublasmp"]),
    default="auto",
    show_default=True,
    help="What computes: CPU ranks, cuBLASMp on GPUs, or whichever fits.",
)


def _debug(command: Command) -> Command:
    """Add --debug, which run() looks for itself."""
    return click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(
        command
    )


def _examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog=_examples(
        "pblasmp matmul A.npy B.npy -o D.npy -n 4", "pblasmp check problem.toml", "pblasmp info"
    ),
)
@click.version_option(__version__, prog_name="pblasmp", message="%(prog)s %(version)s")
@_debug
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Distributed dense matrix products, on MPI ranks or GPUs."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command(
    epilog=_examples(
        "pblasmp matmul A.npy B.npy -o D.npy -n 4          D = A B on 4 ranks",
        "pblasmp matmul A.npy B.npy -o D.npy --trans TN    D = Aᵀ B",
        "pblasmp matmul A.npy B.npy --c C.npy --alpha 2 --beta 0.5 -o D.npy",
        "pblasmp matmul -n 4 --check                       two random matrices, checked",
        "pblasmp matmul --size 8192 --dtype float32 --grid 1x4",
        "mpirun -n 16 pblasmp matmul A.npy B.npy -o D.npy  on ranks that run already",
    )
)
@click.argument("a", metavar="[A.npy", type=_FILE, required=False)
@click.argument("b", metavar="B.npy]", type=_FILE, required=False)
@click.option(
    "-o", "--output", metavar="D.npy", type=_FILE, help="File of the product; it appears when it is whole."
)
@_ranks
@click.option(
    "--grid", metavar="RxC", callback=_grid, help="Rows and columns of ranks.  [default: the squarest]"
)
@click.option(
    "--block", type=click.IntRange(1), default=256, show_default=True, help="Rows and columns of a block."
)
@click.option(
    "--trans",
    metavar="OPS",
    callback=_ops,
    default="NN",
    show_default=True,
    help="N, T or C for A and for B.",
)
@click.option(
    "--alpha", metavar="NUMBER", callback=_number, default="1", show_default=True, help="Scales the product."
)
@click.option("--beta", metavar="NUMBER", callback=_number, help="Scales C.  [default: 1 with --c]")
@click.option("--c", metavar="C.npy", type=_FILE, help="Matrix to add.")
@click.option(
    "--dtype", type=click.Choice(_DTYPES), help="Element type of all.  [default: the files', or float64]"
)
@_engine
@click.option(
    "--check", is_flag=True, help="Verify the product on random vectors; exit with 1 if it is wrong."
)
@click.option(
    "--size", type=click.IntRange(0), help="Rows and columns of the random matrices.  [default: 2048]"
)
@_debug
def matmul(ranks: int | None, trans: str, beta: complex | None, size: int | None, **given: Any) -> None:
    """Multiply two matrices from .npy files, or two random ones: D = alpha op(A) op(B) + beta C."""
    from .product import ProductOptions, multiply, print_result

    _require_consistent(given, beta, size)
    ranks = _ranks_of_grid(ranks, given["grid"])
    options = ProductOptions(
        op_a=trans[0],  # type: ignore[arg-type]
        op_b=trans[1],  # type: ignore[arg-type]
        beta=beta if beta is not None else float(given["c"] is not None),
        size=2048 if size is None else size,
        **given,
    )
    result = multiply(options, ranks)
    if leading():
        print_result(options, result)
    if not result.get("good", True):
        raise FailureError("the product is wrong" + (", and not written" if options.output else ""))


def _require_consistent(given: dict[str, Any], beta: complex | None, size: int | None) -> None:
    if given["a"] is not None and given["b"] is None:
        raise click.UsageError("there is A but no B: give two files, or none for random matrices")
    if given["a"] is not None and given["output"] is None and not given["check"]:
        raise click.UsageError("nowhere to write the product to: give -o D.npy, or --check to only check it")
    if given["a"] is not None and size is not None:
        raise click.UsageError("--size is for random matrices: leave it out, or A and B")
    if given["c"] is not None and given["a"] is None:
        raise click.UsageError("--c needs A and B")
    if given["c"] is None and beta:
        raise click.UsageError("--beta scales C: give --c C.npy too")


def _ranks_of_grid(ranks: int | None, grid: tuple[int, int] | None) -> int | None:
    """Return how many ranks to start: as many as the grid has, where nothing else is said."""
    if grid is None:
        return ranks
    needed = grid[0] * grid[1]
    if ranks is not None and ranks < needed:
        raise click.UsageError(f"--grid {grid[0]}x{grid[1]} needs {needed} ranks, but -n says {ranks}")
    return ranks if ranks is not None or surroundings() else needed


@cli.command(
    epilog=_examples(
        "pblasmp run problem.toml -n 4",
        "pblasmp run grid-2x2          a problem that comes with pblasmp",
        "mpirun -n 6 pblasmp run problem.toml",
    )
)
@click.argument("file", metavar="FILE.toml")
@_ranks
@_engine
@_debug
def run(file: str, ranks: int | None, engine: str) -> None:
    """Run the product of a descriptor file on integers and compare it exactly with NumPy on one rank."""
    from .problem import print_run, run_file

    result = run_file(file, ranks, engine)
    if leading():
        print_run(result)
    if result["wrong"]:
        raise FailureError("the product is wrong")


@cli.command(epilog=_examples("pblasmp check problem.toml", "pblasmp check layouts/*.toml"))
@click.argument("files", metavar="FILE.toml...", nargs=-1, required=True)
@_debug
def check(files: tuple[str, ...]) -> None:
    """Say whether descriptor files are legal products, and what is wrong with those that are not."""
    from .problem import check_files

    if bad := check_files(files):
        raise click.UsageError(f"{bad} of {len(files)} files {'is' if bad == 1 else 'are'} not legal")


@cli.command(
    epilog=_examples(
        "pblasmp show problem.toml                      in the terminal",
        "pblasmp show problem.toml --output layout.svg  as a picture (PNG, SVG or PDF)",
        "pblasmp show nvidia-allgather                  a problem that comes with pblasmp",
    )
)
@click.argument("file", metavar="FILE.toml")
@click.option("-o", "--output", metavar="PICTURE", type=_FILE, help="Write a picture; needs pblasmp[plot].")
@_debug
def show(file: str, output: Path | None) -> None:
    """Show who owns which block of the matrices of a descriptor file, and every local array."""
    from ..drawing import draw
    from ..drawing import show as show_in_terminal
    from ..layout.files import load_problem_file

    found = load_problem_file(file)
    if output is None:
        show_in_terminal(found)
    else:
        draw(found, output)


@cli.command(
    epilog=_examples(
        "pblasmp bench -n 4                               all four, at a few shapes",
        "pblasmp bench -n 4 -c all_gather -c reduce_scatter --output chart.png",
        "pblasmp bench -n 2 -c all_reduce --shape 1024,512,2048 --dtype float64 --engine host",
        "mpirun -n 8 pblasmp bench -c all_gather          on ranks that run already",
    )
)
@_ranks
@click.option(
    "-c",
    "--collective",
    "collectives",
    multiple=True,
    type=click.Choice(["all_gather", "reduce_scatter", "all_reduce", "all_scatter"]),
    help="What goes with the GEMM; all_scatter is the all-gather of its output.  [default: each of them]",
)
@click.option(
    "--shape",
    "shapes",
    metavar="T,N,K",
    multiple=True,
    callback=_shapes,
    help="Tokens, outputs (of each rank for all_gather and all_scatter), inputs (summed over ranks for the others).",
)
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "float16", "bfloat16"]),
    help="Element type.  [default: bfloat16 on GPUs, float32 on CPUs]",
)
@click.option("--samples", type=click.IntRange(1), default=20, show_default=True, help="Runs that are timed.")
@_engine
@click.option("-o", "--output", metavar="PICTURE", type=_FILE, help="Draw a chart; needs pblasmp[plot].")
@_debug
def bench(ranks: int | None, collectives: tuple[str, ...], **given: Any) -> None:
    """Time tensor-parallel products beside GEMM and the plain collective (NCCL or MPI), and the GEMM alone."""
    from .bench import COLLECTIVES, BenchOptions, print_bench
    from .bench import bench as run_bench

    options = BenchOptions(collectives=tuple(dict.fromkeys(collectives)) or tuple(COLLECTIVES), **given)
    result = run_bench(options, ranks)
    if leading():
        print_bench(options, result)
    if not all(row["good"] for rows in result["sections"].values() for row in rows):
        raise FailureError("a product is wrong")


@cli.command(epilog=_examples("pblasmp info", "pblasmp info --json > versions.json"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_debug
def info(as_json: bool) -> None:
    """Show versions and paths of what pblasmp uses: Python, BLAS, MPI, GPU libraries."""
    from ..info import collect

    found = collect()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for topic, facts in found.items():
        head = facts.get("version", "")
        click.echo(f"{click.style(f'{topic:<13}', bold=True)}{head}".rstrip())
        for name, value in facts.items():
            for each in value if isinstance(value, list) else [value]:
                text = " ".join(map(str, each.values())) if isinstance(each, dict) else each
                if name != "version":
                    click.echo(f"  {name:<11}{text}")
