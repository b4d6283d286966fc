# SPDX-License-Identifier: Apache-2.0
"""The commands of ``pblasmp``, and how errors end them."""

from __future__ import annotations

import io
import shlex
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from .. import __version__
from ..dtypes import DTYPES
from ..errors import LayoutError
from ..launchers import surroundings
from ..layout import ParallelProblem
from ..layout.schemes import FORMS, Form
from . import options
from .options import FILE, DescriptorFile, algo, as_json, common, engine, examples
from .ranks import FailureError
from .reports import describe, is_bad_input, warnings_to
from .signals import reraise
from .terminal import StandardOutput, caution, complain, console, leading, plain, print_json, tell


def run_command_line() -> NoReturn:
    """Run the command line and exit: with status 1 for a failure, 2 for bad input. Local."""
    debug = "--debug" in sys.argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × shows a question mark
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        raw = StandardOutput(sys.stdout.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), sys.stdout.encoding, "replace", line_buffering=True
        )
    try:
        with warnings_to(caution):
            cli.main(prog_name="pblasmp", standalone_mode=False)
    except click.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:  # noqa: BLE001 (the last that sees it)
        reraise()
        if isinstance(error, FailureError):
            _leave(str(error), error.status, error.trace if debug else error.printed)
        _leave(describe(error), 2 if is_bad_input(error) else 1, traceback.format_exc() if debug else "")
    sys.exit(0)


def _leave(message: str, status: int, details: str = "") -> NoReturn:
    """Print the reason and exit; only one process prints it."""
    if details and leading():
        click.echo(details.rstrip(), err=True)
    complain(message)
    sys.exit(status)


class _Command(click.Command):
    """A command whose line in the list of commands is never cut."""

    def get_short_help_str(self, limit: int = 1000) -> str:
        return super().get_short_help_str(max(limit, 1000))


class _Group(click.Group):
    command_class = _Command


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog=examples("pblasmp matmul A.npy B.npy -o D.npy -n 4", "pblasmp check problem.toml", "pblasmp info"),
)
@click.version_option(__version__, prog_name="pblasmp", message="%(prog)s %(version)s")
@common
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Distributed dense linear algebra: PBLAS, factorizations, tensor-parallel products, on MPI ranks or GPUs."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command(
    epilog=examples(
        "pblasmp matmul A.npy B.npy -o D.npy -n 4          D = A B on 4 ranks",
        "pblasmp matmul A.npy B.npy -o D.npy --trans TN    D = Aᵀ B",
        "pblasmp matmul A.npy B.npy --c C.npy --alpha 2 --beta 0.5 -o D.npy",
        "pblasmp matmul -n 4 --check                       two random matrices, checked",
        "pblasmp matmul --size 8192 --dtype float32 --grid 1x4 --repeat 10",
        "pblasmp matmul R.h5:A R.h5:B -o R.h5:D            matrices of one HDF5 file",
        "mpirun -n 16 pblasmp matmul A.npy B.npy -o D.npy  on ranks already running",
    )
)
@click.argument("a", metavar="[A.npy", type=FILE, required=False)
@click.argument("b", metavar="B.npy]", type=FILE, required=False)
@click.option(
    "-o",
    "--output",
    metavar="D.npy",
    type=FILE,
    help="File to write the product to. It appears only when complete.",
)
@options.ranks("as --grid says, else one per core, at most 4")
@click.option(
    "--grid",
    metavar="RxC",
    type=options.GRID,
    help="Rows and columns of ranks.  [default: the squarest]",
)
@click.option(
    "--block",
    metavar="MB[,NB[,KB]]",
    type=options.BLOCK,
    help="Block sizes along m, n and k: one for all, or one each; KB is NB unless given.  [default: 256, or less so "
    "that every rank has a part]",
)
@click.option(
    "--trans",
    metavar="OPS",
    type=options.OPS,
    default="NN",
    show_default=True,
    help="Two letters of N, T and C: the ops of A and B.",
)
@click.option(
    "--alpha",
    metavar="NUMBER",
    type=options.NUMBER,
    default="1",
    show_default=True,
    help="Scales the product.",
)
@click.option("--beta", metavar="NUMBER", type=options.NUMBER, help="Scales C.  [default: 1 with --c]")
@click.option("--c", metavar="C.npy", type=FILE, help="Matrix to add.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="Element type of all matrices.  [default: the files', or float64]",
)
@engine
@algo
@click.option(
    "--check", is_flag=True, help="Verify the product on random vectors; exit with 1 if it is wrong."
)
@click.option(
    "--repeat",
    type=click.IntRange(0),
    help="Timed calls after the first one.  [default: as many as fit into a second, at most 5]",
)
@click.option(
    "--size", type=click.IntRange(0), help="Rows and columns of the random matrices.  [default: 2048]"
)
@as_json
@common
def matmul(
    ranks: int | None, trans: str, beta: complex | None, size: int | None, as_json: bool, **given: Any
) -> None:
    """Multiply two matrices from files, or two random ones: D = alpha op(A) op(B) + beta C.

    Files end in .npy, .h5, .hdf5 or .zarr; A.h5:NAME is one of several matrices in a file.
    """
    from .matmul import ProductOptions, multiply, print_result

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
    tell(result, as_json, partial(print_result, options))
    if not result.get("ok", True):
        raise FailureError("the product is wrong" + (", and not written" if options.output else ""))


def _require_consistent(given: dict[str, Any], beta: complex | None, size: int | None) -> None:
    if given["a"] is not None and given["b"] is None:
        raise click.UsageError("got A but no B: give two files, or none for random matrices")
    if given["a"] is not None and given["output"] is None and not given["check"]:
        raise click.UsageError("no output file: give -o D.npy, or --check to verify without writing")
    if given["a"] is not None and size is not None:
        raise click.UsageError("--size is for random matrices: leave out either --size or A and B")
    if given["c"] is not None and given["a"] is None:
        raise click.UsageError("--c needs A and B")
    if given["c"] is None and beta:
        raise click.UsageError("--beta scales C: give --c C.npy too")


def _ranks_of_grid(ranks: int | None, grid: tuple[int, int] | None) -> int | None:
    """Return how many ranks to start: as many as the grid has, unless told otherwise."""
    if grid is None:
        return ranks
    needed = grid[0] * grid[1]
    if ranks is not None and ranks < needed:
        raise click.UsageError(f"--grid {grid[0]}x{grid[1]} needs {needed} ranks, but -n is {ranks}")
    return ranks if ranks is not None or surroundings() else needed


@cli.command(
    epilog=examples(
        "pblasmp run problem.toml -n 4",
        "pblasmp run grid-2x2          a problem that comes with pblasmp",
        "pblasmp run - < problem.toml",
        "mpirun -n 6 pblasmp run problem.toml",
    )
)
@click.argument("file", metavar="FILE.toml", type=DescriptorFile())
@options.ranks("as many as the file's grids need")
@click.option(
    "--max-ranks",
    type=click.IntRange(1),
    help="Upper limit on the ranks that a file may ask for.  [default: 16, or twice the cores if that is more]",
)
@engine
@algo
@as_json
@common
def run(file: str, ranks: int | None, max_ranks: int | None, engine: str, algo: str, as_json: bool) -> None:
    """Run the product or routine of a descriptor file on integers and compare exactly with NumPy on one rank."""
    from .run import print_run, run_file

    result = run_file(file, ranks, max_ranks, engine, algo)
    tell(result, as_json, print_run)
    if result["wrong"]:
        raise FailureError("the result is wrong")


@cli.command(
    epilog=examples(
        "pblasmp check problem.toml", "pblasmp check layouts/*.toml", "pblasmp check - < problem.toml"
    )
)
@click.argument("files", metavar="FILE.toml...", nargs=-1, required=True, type=DescriptorFile())
@as_json
@common
def check(files: tuple[str, ...], as_json: bool) -> None:
    """Say whether descriptor files are legal, and what is wrong with those that are not."""
    from .descriptor_files import check_files, print_checked

    checked = check_files(files)
    tell(checked, as_json, print_checked)
    if bad := sum(not one["legal"] for one in checked):
        of = f"{bad} of {len(files)} files" if len(files) > 1 else plain(checked[0]["file"])
        raise LayoutError(f"{of} {'is' if bad == 1 else 'are'} not legal")


@cli.command(
    epilog=examples(
        "pblasmp show problem.toml                      in the terminal",
        "pblasmp show problem.toml --output layout.svg  as a picture",
        "pblasmp show nvidia-allgather                  a problem that comes with pblasmp",
    )
)
@click.argument("file", metavar="FILE.toml", type=DescriptorFile())
@click.option("-o", "--output", metavar="PICTURE.svg", type=FILE, help="Write a picture.")
@as_json
@common
@click.pass_context
def show(ctx: click.Context, file: str, output: Path | None, as_json: bool) -> None:
    """Show who owns which block of the matrices of a descriptor file, and every local array."""
    from ..drawing import draw
    from ..drawing.maps import show as show_in_terminal
    from ..problems.files import read_text
    from .descriptor_files import describe_problem, parse, print_shares

    found = parse(file, read_text(file))
    faults = found.problem.faults()
    if output is not None:
        draw(found).save(output)
    if as_json:
        print_json(
            {"file": str(found.path), "legal": not faults, "faults": faults, **describe_problem(found)}
        )
    elif output is None:
        if isinstance(found.problem, ParallelProblem):
            print_shares(found)
        else:
            show_in_terminal(found, console(color=bool(ctx.color)))
    if faults:
        raise LayoutError(f"{plain(found.path)}: this {found.problem.what} is not legal")


@cli.command(name="list", epilog=examples("pblasmp list", "pblasmp list --json", "pblasmp show ag-nn-c"))
@as_json
@common
def list_problems(as_json: bool) -> None:
    """List the problems that come with pblasmp, whose names check, show and run take."""
    from .descriptor_files import print_list, shipped

    problems = shipped()
    tell(problems, as_json, print_list)


@cli.command(
    epilog=examples(
        "pblasmp bench -n 4                                 all four, at a few shapes",
        "pblasmp bench -n 4 -p allgather_matmul -p matmul_reduce_scatter --json > times.json",
        "pblasmp bench -n 2 -p matmul_allreduce --shape 1024,512,2048 --dtype float64 --engine host",
        "pblasmp bench -n 4 -p matmul_allreduce --algo all  every algorithm, side by side",
        "pblasmp bench -n 4 -p matmul_allreduce --algo all --sizes 1KiB-64MiB",
        "mpirun -n 8 pblasmp bench -p allgather_matmul      on ranks already running",
    )
)
@options.ranks()
@options.products("each of them")
@options.of_shapes(" (of each rank for the two that gather), inputs (summed over ranks for the others).")
@click.option(
    "--sizes",
    metavar="FROM-TO",
    type=options.SIZES,
    default=(),
    help="Choose the shapes by the bytes that the collective moves, such as 1KiB-1GiB in steps of four times.",
)
@options.real_dtype
@click.option(
    "--samples", type=click.IntRange(1), default=20, show_default=True, help="Number of timed runs."
)
@click.option(
    "--algo",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="Algorithm of pblasmp's, or all: every one that applies, side by side.",
)
@click.option("--rate", is_flag=True, help="Print TFLOP/s over all ranks instead of times.")
@engine
@as_json
@common
def bench(ranks: int | None, products: tuple[Form, ...], rate: bool, as_json: bool, **given: Any) -> None:
    """Compare tensor-parallel products with GEMM plus a separate collective, and with GEMM alone."""
    from .bench import BenchOptions, print_bench
    from .bench import bench as run_bench

    if given["shapes"] and given["sizes"]:
        raise click.UsageError("--sizes determines the shapes: leave --shape out")
    options = BenchOptions(products=tuple(dict.fromkeys(products)) or tuple(FORMS), **given)
    result = run_bench(options, ranks)
    tell(result, as_json, partial(print_bench, rate=rate))
    if not all(row["good"] for rows in result["sections"].values() for row in rows):
        raise FailureError("a product is wrong")


@cli.command(
    epilog=examples(
        "pblasmp tune -n 4 -p matmul_allreduce --shape 4096,1792,4096",
        "mpirun -n 8 pblasmp tune --model llama-70b --tokens 1024,4096",
        "pblasmp tune -n 4 --json",
    )
)
@options.ranks()
@options.products("the model's, or each of them")
@options.of_shapes(", inputs, as for bench.")
@options.model
@click.option(
    "--tokens", metavar="T,...", type=options.TOKENS, default=(), help="Numbers of tokens, for --model."
)
@options.real_dtype
@click.option(
    "--limit",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Time limit for one product, in seconds, after which no further algorithm is started.",
)
@engine
@as_json
@common
def tune(ranks: int | None, as_json: bool, **given: Any) -> None:
    """Time every algorithm of tensor-parallel products on this machine, and let "auto" take the fastest."""
    from .bench import TuneOptions, print_tuned
    from .bench import tune as run_tune

    if (given["model"] is None) != (not given["tokens"]):
        raise click.UsageError("--model and --tokens go together")
    if given["model"] is not None and given["shapes"]:
        raise click.UsageError("--model determines the shapes: leave --shape out")
    result = run_tune(TuneOptions(**given), ranks)
    tell(result, as_json, print_tuned)


@cli.command(
    epilog=examples(
        "pblasmp plan 40000 40000 40000 --ranks 8 --machine dgx-h100",
        "pblasmp plan 400000 400000 400000 --nodes 64..512 --machine dgx-h100",
        "pblasmp plan --cholesky 100000 --ranks 8 --machine dgx-h100",
        "pblasmp plan problem.toml --machine dgx-h100        what it takes, and whether to move the matrices first",
        "pblasmp plan --model llama-8b --tokens 4096 --machine dgx-h100",
        "pblasmp plan 330 300 280 --ranks 1024 --machine dgx-h100 --dry-run",
    )
)
@click.argument("what", nargs=-1, metavar="M N K | FILE")
@click.option("--ranks", type=click.IntRange(1), help="Number of ranks.  [default: those of a node]")
@click.option(
    "--nodes",
    "span",
    metavar="FIRST..LAST",
    type=options.SPAN,
    help="Numbers of nodes: FIRST, the powers of two after it, and LAST.",
)
@click.option(
    "--machine", required=True, help="A machine that comes with pblasmp, or a file of pblasmp measure."
)
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="Element type.  [default: float64; of models: bfloat16]"
)
@options.factorizations
@click.option("--right", type=click.IntRange(1), help="Number of right-hand sides to solve for as well.")
@options.model
@click.option("--tokens", type=click.IntRange(1), help="Number of tokens, for --model.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Also run every rank in this process, on zeros: is each message awaited, and can nothing deadlock?",
)
@as_json
@common
def plan(
    what: tuple[str, ...], ranks: int | None, span: tuple[int, int] | None, machine: str, dtype: str | None,
    right: int | None, model: str | None, tokens: int | None, dry_run: bool, as_json: bool, **orders: int | None,
) -> None:  # fmt: skip
    """Say which grid, blocks and algorithm are best on a machine, and what they take: without running anything."""
    from . import advice

    factored = [(name, n) for name, n in orders.items() if n is not None]
    if len(factored) > 1 or (factored and (what or model is not None)):
        raise click.UsageError("expected one of a product, a file, a model and a factorization")
    if right is not None and not factored:
        raise click.UsageError("--right is for factorizations: which one is missing")
    if (model is None) != (tokens is None) or (model is not None and what):
        raise click.UsageError("--model and --tokens go together, without sizes and files")
    if ranks is not None and span is not None:
        raise click.UsageError("--nodes determines the ranks: leave --ranks out")
    if model is not None and (ranks is not None or span is not None):
        raise click.UsageError(
            "--model is planned for 1, 2, 4, … ranks of a node: leave --ranks and --nodes out"
        )
    if len(what) == 1 and (ranks is not None or span is not None or dtype is not None):
        raise click.UsageError("the file determines ranks and types: leave --ranks, --nodes and --dtype out")
    if dry_run and (model is not None or span is not None or factored):
        raise click.UsageError("--dry-run is for one product: leave factorizations, --model and --nodes out")
    if model is not None and tokens is not None:
        found = advice.plan_model(model, tokens, machine, dtype or "bfloat16")
    elif factored:
        ((name, n),) = factored
        found = advice.plan_sizes((name, n, right), ranks, span, machine, dtype or "float64")
    elif len(what) == 1:
        found = advice.plan_file(what[0], machine, dry=dry_run)
    elif len(what) == 3 and all(each.isdecimal() for each in what):
        m, n, k = map(int, what)
        found = advice.plan_sizes((m, n, k), ranks, span, machine, dtype or "float64", dry=dry_run)
    else:
        raise click.UsageError(
            f"expected three sizes, one descriptor file or a factorization, got {' '.join(what) or 'nothing'}"
        )
    print_json(advice.as_values(found)) if as_json else advice.print_plan(found)


@cli.command(epilog=examples("pblasmp doctor -n 4", "mpirun -n 8 pblasmp doctor --machine node.toml"))
@options.ranks()
@click.option("--machine", metavar="NAME", help="A machine's name or file, to compare speeds with.")
@click.option(
    "--runs",
    type=click.IntRange(0),
    help="How often each call is repeated while other work runs.  [default: 300 on GPUs, 5 on CPU ranks]",
)
@engine
@as_json
@common
def doctor(ranks: int | None, machine: str | None, runs: int | None, engine: Any, as_json: bool) -> None:
    """Show where the ranks are; check that they start, share memory and compute right; say what to do if not."""
    from .doctor import diagnose, print_diagnosis, print_seats

    found = diagnose(ranks, engine, machine, runs, (lambda _: None) if as_json else print_seats)
    tell(found, as_json, print_diagnosis)
    if found["faults"]:
        raise FailureError("something does not work here")


@cli.command(
    epilog=examples(
        "pblasmp measure -n 1 -n 2 -n 4 -o here.toml",
        "mpirun -n 8 pblasmp measure --engine cublasmp -o node.toml   the ranks that mpirun starts, added to the file",
    )
)
@click.option(
    "-n", "--ranks", "counts", multiple=True, type=click.IntRange(1), help="Number of ranks; may be repeated."
)
@click.option(
    "-o", "--output", metavar="FILE", type=FILE, required=True, help="The machine's file, which is added to."
)
@click.option("--title", help="What the machine is called.  [default: its processor]")
@engine
@common
def measure(counts: tuple[int, ...], output: Path, title: str | None, engine: Any) -> None:
    """Measure what the ranks of this machine compute, copy and send, for pblasmp plan and pb.predict."""
    from . import advice

    machine = advice.measure(counts, output, engine, title)
    if leading():
        measured = ", ".join(str(each.ranks) for each in machine.nodes)
        click.echo(f"{plain(str(output))}: {plain(machine.title)}, measured with {measured} ranks")


@cli.command(
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "pblasmp preload -- mpirun -n 4 ./program",
        "pblasmp preload --min 4096 --engine cublasmp -- mpirun -n 8 ./program input.dat",
        'eval "$(pblasmp preload)"; srun ./program     in a batch job: the variables alone',
    ),
)
@click.option(
    "--min",
    "least",
    type=click.IntRange(0),
    default=1024,
    show_default=True,
    envvar="PBLASMP_PRELOAD_MIN",
    show_envvar=True,
    help="Compute products with at least as many operations as one of N × N matrices; leave smaller ones to the "
    "program's own library.",
    metavar="N",
)
@engine
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@common
def preload(least: int, engine: Any, command: tuple[str, ...]) -> None:
    """Run an existing ScaLAPACK program with its large products and factorizations computed by pblasmp.

    Without a command, print the variables that do so, for a shell.
    """
    from ..preload import environment, run

    if not command:
        for name, value in environment(least, engine).items():
            click.echo(f"export {name}={shlex.quote(value)}")
        return
    status, calls = run(command, least, engine)
    if calls is not None:
        total = calls.by_pblasmp + calls.by_library
        said = f"pblasmp: {calls.by_pblasmp} of {total} calls computed by pblasmp in {calls.pblasmp_seconds:.3g} s"
        if calls.grids:
            said += f", after {calls.grid_seconds:.3g} s for grids"
        if calls.by_library:
            said += f"; the others in {calls.library_seconds:.3g} s"
        click.echo(said, err=True)
    elif status == 0:  # else the command has said what is wrong
        caution(
            "no call of the program could be seen: it has made none, or its ScaLAPACK is linked statically"
        )
    sys.exit(status)


@cli.command(epilog=examples("pblasmp info", "pblasmp info --json > versions.json"))
@as_json
@common
def info(as_json: bool) -> None:
    """Show versions and paths of what pblasmp uses: Python, BLAS, MPI, GPU libraries; and the engine chosen here."""
    from ..info import collect

    if not leading():
        return
    found = collect()
    if as_json:
        print_json(found)
        return
    width = max(
        map(len, [name for facts in found.values() for name in facts] + [topic[2:] for topic in found])
    )
    for topic, facts in found.items():
        head = facts.get("version", "")
        click.echo(f"{click.style(topic.ljust(width + 2), bold=True)}  {head}".rstrip())
        for name, value in facts.items():
            for each in value if isinstance(value, list) else [value]:
                text = " ".join(map(str, each.values())) if isinstance(each, dict) else each
                if name != "version":
                    click.echo(f"  {name:<{width}}  {plain(text)}")
