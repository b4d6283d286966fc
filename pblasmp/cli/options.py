# SPDX-License-Identifier: Apache-2.0
"""The options that commands share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..engines.choose import NAMES
from ..layout.factor_problem import BY_NAME
from ..layout.schemes import FORMS
from ..resources import usable_cores
from .terminal import use_color

__all__ = [
    "DEFAULT_RANKS",
    "FILE",
    "DescriptorFile",
    "algo",
    "as_json",
    "block",
    "common",
    "engine",
    "examples",
    "factorizations",
    "grid",
    "number",
    "of_shapes",
    "ops",
    "products",
    "ranks",
    "require_directory",
    "shapes",
    "sizes",
    "span",
    "tokens",
]

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_RANKS = min(4, usable_cores())

FILE = click.Path(path_type=Path)


class DescriptorFile(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.4 on
    """A descriptor file: its path, "-" for standard input, or the name of one that comes with pblasmp."""

    name = "file"

    def shell_complete(
        self, _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the names of problems that come with pblasmp, and files."""
        from ..problems.files import find

        names = [path.stem for path in find("problems") if path.stem.startswith(incomplete)]
        if names:  # bash shows either these or all files, and drops what comes before those
            names += sorted(path.name for path in Path().glob("*.toml") if path.name.startswith(incomplete))
        return [CompletionItem(incomplete, type="file"), *map(CompletionItem, names)]


def require_directory(path: Path) -> None:
    """Raise FileNotFoundError unless the directory of a file that is to be written exists. Local."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no directory {path.parent}")


def grid(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """Return the rows and columns of "2x3"."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})[x×]([0-9]{1,9})", text)
    if match is None or 0 in (found := (int(match[1]), int(match[2]))):
        raise click.BadParameter(f"{text!r}: expected rows x columns of ranks, for example 2x2", ctx, param)
    return found


def block(ctx: click.Context, param: click.Parameter, text: str | None) -> int | tuple[int, ...] | None:
    """Return the block sizes of "64", "64,32" or "64,32,16" as ``MatmulProblem.gemm`` takes them."""
    if text is None:
        return None
    if not re.fullmatch("[1-9][0-9]{0,9}(,[1-9][0-9]{0,9}){0,2}", text.replace(" ", "")):
        message = (
            f"{text!r}: expected one block size, or two or three for m, n and k, for example 64 or 64,32"
        )
        raise click.BadParameter(message, ctx, param)
    found = tuple(map(int, text.split(",")))
    return found if len(found) > 1 else found[0]


def span(text: str) -> tuple[int, int]:
    """Return the numbers of "1..512", or of "8" twice."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})(?:\.\.([1-9][0-9]{0,8}))?", text)
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise click.UsageError(f"--nodes {text}: expected a number or first..last, for example 1..512")
    return int(match[1]), int(match[2] or match[1])


def number(ctx: click.Context, param: click.Parameter, text: str | None) -> complex | None:
    """Return a real or complex number."""
    if text is None:
        return None
    try:
        found = complex(text.replace("i", "j") if not re.search("inf|nan", text, re.IGNORECASE) else text)
    except ValueError:
        message = f"{text!r}: expected a number, for example 2, -0.5 or 1+2j"
        raise click.BadParameter(message, ctx, param) from None
    return found if found.imag else found.real


def ops(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """Return the two letters of --trans."""
    if not re.fullmatch("[NTC]{2}", text):
        message = f"{text!r}: expected two letters of N, T and C, for A and for B, for example TN"
        raise click.BadParameter(message, ctx, param)
    return text


def shapes(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[int, int, int], ...]:
    """Return T, N and K of each --shape."""
    found = []
    for text in texts:
        match = re.fullmatch(r"([0-9]{1,12}),([0-9]{1,12}),([0-9]{1,12})", text.replace(" ", ""))
        if match is None or 0 in (shape := (int(match[1]), int(match[2]), int(match[3]))):
            message = f"{text!r}: expected tokens, outputs and inputs, for example 1024,512,2048"
            raise click.BadParameter(message, ctx, param)
        found.append(shape)
    return tuple(found)


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def sizes(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Return the bytes of "1KiB-1GiB" in steps of four."""
    if text is None:
        return ()
    match = re.fullmatch("([1-9][0-9]{0,3})([KMG]iB|B)-([1-9][0-9]{0,3})([KMG]iB|B)", text.replace(" ", ""))
    first, last = (int(match[i]) * _UNITS[match[i + 1]] for i in (1, 3)) if match else (1, 0)
    if first > last:
        message = f"{text!r}: expected the least and the largest, for example 1KiB-1GiB"
        raise click.BadParameter(message, ctx, param)
    found = [first]
    while found[-1] * 4 <= last:
        found.append(found[-1] * 4)
    return tuple(found)


def tokens(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Return the numbers of "1024,4096"."""
    if text is None:
        return ()
    found = text.replace(" ", "").split(",")
    if not all(re.fullmatch("[1-9][0-9]{0,11}", each) for each in found):
        message = f"{text!r}: expected numbers of tokens, for example 1024,4096"
        raise click.BadParameter(message, ctx, param)
    return tuple(map(int, found))


def ranks(default: str = "one per core, at most 4") -> Callable[[Command], Command]:
    """Return the option -n, with its default in the help."""
    return click.option(
        "-n",
        "--ranks",
        type=click.IntRange(1),
        help=f"MPI ranks to start; 1 needs no MPI. Under mpirun or srun, all of its ranks.  [default: {default}]",
    )


def products(default: str) -> Callable[[Command], Command]:
    """Return the option -p of tensor-parallel products, with its default in the help."""
    return click.option(
        "-p",
        "--product",
        "products",
        multiple=True,
        type=click.Choice(list(FORMS)),
        help=f"The product, by its name in Python.  [default: {default}]",
    )


def of_shapes(rest: str) -> Callable[[Command], Command]:
    """Return the option --shape; ``rest`` is of its help, after "Tokens, outputs"."""
    return click.option(
        "--shape", "shapes", metavar="T,N,K", multiple=True, callback=shapes, help=f"Tokens, outputs{rest}"
    )


def factorizations(command: Command) -> Command:
    """Add an option for each factorization or solve that ``pblasmp plan`` takes: its order."""
    for name in reversed(BY_NAME):
        what = {"solve": "A system by LU", "lstsq": "Least squares by QR"}.get(name, name.capitalize())
        command = click.option(
            f"--{name}", metavar="N", type=click.IntRange(1), help=f"{what}, of an N × N matrix."
        )(command)
    return command


engine = click.option(
    "--engine",
    type=click.Choice(NAMES),
    default="auto",
    show_default=True,
    help="Engine: CPU ranks, cuBLASMp on GPUs, or the best one available.",
)

algo = click.option(
    "--algo",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="Algorithm, by its name in Python; an unknown name prints the list.",
)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def common(command: Command) -> Command:
    """Add the options of every command: --color, and --debug, which run_command_line looks for itself."""
    debug = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
    color = click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        expose_value=False,
        callback=_color,
        help="Colors in the output.  [default: auto, on a terminal unless NO_COLOR is set]",
    )
    return color(debug(command))


def _color(ctx: click.Context, _param: click.Parameter, when: str | None) -> None:
    if when is not None or ctx.color is None:  # otherwise the option before the command's name counts
        ctx.color = use_color(when or "auto")


def examples(*lines: str) -> str:
    """Return the examples at the end of a help text."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
