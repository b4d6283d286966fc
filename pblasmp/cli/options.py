# SPDX-License-Identifier: Apache-2.0
"""The options that commands share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..dtypes import DTYPES
from ..engines.choose import NAMES
from ..layout.factor_problem import BY_NAME
from ..layout.schemes import FORMS
from ..resources import usable_cores
from .terminal import use_color

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


class _Text(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """The value of an option that is read from a text, which matches a pattern when spaces are left out.

    ``expected`` says that in words, and gives an example; ``read`` returns the value, or raises ValueError if there is
    none.
    """

    name = "text"

    def __init__(self, pattern: str, expected: str, read: Callable[[str], Any]) -> None:
        self._pattern, self._expected, self._read = pattern, expected, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of a text; others are defaults."""
        if not isinstance(value, str):
            return value
        text = value.replace(" ", "")
        with suppress(ValueError):
            if re.fullmatch(self._pattern, text):
                return self._read(text)
        raise click.BadParameter(f"{value!r}: expected {self._expected}", ctx, param)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall("[0-9]+", text)))


def _one_or_more(text: str) -> int | tuple[int, ...]:
    """Return block sizes as ``MatmulProblem.gemm`` takes them."""
    found = _integers(text)
    return found if len(found) > 1 else found[0]


def _first_and_last(text: str) -> tuple[int, int]:
    found = _integers(text)
    if found[0] > found[-1]:
        raise ValueError
    return found[0], found[-1]


def _number(text: str) -> complex:
    found = complex(text if re.search("inf|nan", text, re.IGNORECASE) else text.replace("i", "j"))
    return found if found.imag else found.real


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _bytes_by_four(text: str) -> tuple[int, ...]:
    """Return the bytes of "1KiB-1GiB" in steps of four."""
    first, last = (int(n) * _UNITS[unit] for n, unit in re.findall("([0-9]+)([A-Za-z]+)", text))
    if first > last:
        raise ValueError
    found = [first]
    while found[-1] * 4 <= last:
        found.append(found[-1] * 4)
    return tuple(found)


_COUNT = "[1-9][0-9]{0,8}"
GRID = _Text(f"{_COUNT}[x×]{_COUNT}", "rows x columns of ranks, for example 2x2", _integers)
BLOCK = _Text(
    f"{_COUNT}[0-9]?(,{_COUNT}[0-9]?){{0,2}}",
    "one block size, or two or three for m, n and k, for example 64 or 64,32",
    _one_or_more,
)
SPAN = _Text(f"{_COUNT}(\\.\\.{_COUNT})?", "a number or first..last, for example 1..512", _first_and_last)
NUMBER = _Text(".*", "a number, for example 2, -0.5 or 1+2j", _number)
OPS = _Text("[NTC]{2}", "two letters of N, T and C, for A and for B, for example TN", str)
SHAPE = _Text(
    "[1-9][0-9]{0,11}(,[1-9][0-9]{0,11}){2}",
    "tokens, outputs and inputs, for example 1024,512,2048",
    _integers,
)
SIZES = _Text(
    "[1-9][0-9]{0,3}([KMG]iB|B)-[1-9][0-9]{0,3}([KMG]iB|B)",
    "the least and the largest, for example 1KiB-1GiB",
    _bytes_by_four,
)
TOKENS = _Text("[1-9][0-9]{0,11}(,[1-9][0-9]{0,11})*", "numbers of tokens, for example 1024,4096", _integers)


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
        "--shape", "shapes", metavar="T,N,K", multiple=True, type=SHAPE, help=f"Tokens, outputs{rest}"
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

real_dtype = click.option(
    "--dtype",
    type=click.Choice([name for name, dtype in DTYPES.items() if dtype.kind != "c"]),
    help="Element type.  [default: bfloat16 on GPUs, float32 on CPUs]",
)

model = click.option(
    "--model", metavar="NAME", help="The layers of a model: llama-8b or llama-70b. Needs --tokens."
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
