# SPDX-License-Identifier: Apache-2.0
"""The exceptions of pblasmp: one hierarchy, in which each is also the exception that it resembles.

Also the command that installs one of pblasmp's extras, from wherever pblasmp itself was installed: errors name it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from numpy.linalg import LinAlgError

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ClosedError",
    "FactorizationError",
    "LayoutError",
    "LibraryNotFoundError",
    "PblasmpError",
    "RankMismatchError",
    "StatusError",
    "UnsupportedError",
]

T = TypeVar("T")

_LONGEST = 300  # characters of a value in a message


class PblasmpError(Exception):
    """Base of every error that pblasmp raises on purpose."""


class ArgumentError(PblasmpError, ValueError):
    """An argument, option, file or environment variable is not legal; the message says what was expected."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type, such as an array in place of a distributed matrix."""


class LayoutError(ArgumentError):
    """A grid, descriptor or sub-matrix is not legal, or layouts do not fit together; the message names every fault."""


class RankMismatchError(PblasmpError, ValueError):
    """The ranks of a communicator made different calls, or gave different arguments to the same call."""


class UnsupportedError(PblasmpError, NotImplementedError):
    """The request is legal but this engine, library version or machine does not offer it."""


class LibraryNotFoundError(PblasmpError, OSError):
    """A shared library, driver or program that is needed is not on this machine."""


class StatusError(PblasmpError, RuntimeError):
    """A C library returned a status other than success."""


class FactorizationError(PblasmpError, LinAlgError, ArithmeticError):
    """A matrix is singular, not positive definite, or without full rank; raised on every rank.

    Attributes:
        index: the row and column, from 0, of the first diagonal element of the factor that shows it.
    """

    index: int = 0

    @classmethod
    def at(cls, index: int, message: str) -> FactorizationError:
        """Return the error for a diagonal element. Local."""
        error = cls(message)
        error.index = index
        return error


class ClosedError(PblasmpError, RuntimeError):
    """A context, plan or matrix was used after it was closed, or in a context that an error on one rank has broken."""


def faults_text(where: str, faults: Sequence[str]) -> str:
    """Return a message that names every fault, the first one in the first line, which logs and pytest show. Local."""
    first, *others = faults
    count = f" has {len(faults)} faults" if others else ""
    return "\n  - ".join([f"{where}{count}: {first}", *others])


def counted(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``. Local."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 0, 2-5`` of 0, 2, 3, 4, 5. Local."""
    # In a run of neighbors a rank's distance from its place in the list stays the same.
    apart = groupby(enumerate(ranks), key=lambda each: each[1] - each[0])
    runs = [[rank for _, rank in run] for _, run in apart]
    names = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def not_two(ndim: int, array: str = "array") -> str:
    """Return what is wrong with something of so many dimensions that should be a matrix, in words. Local."""
    hint = f": a vector is a matrix of one column, {array}[:, None]" if ndim == 1 else ""
    return f"expected a matrix (2 dimensions), got {ndim}{hint}"


def printed(value: object) -> str:
    """Return ``repr(value)``, or in words that it has an integer of thousands of digits. Local."""
    try:
        return repr(value)
    except ValueError as error:
        if "set_int_max_str_digits" not in str(error):  # the user's own
            raise
        return f"a value of type {type(value).__name__} that is too large to print"


def short_repr(value: object) -> str:
    """Return ``repr(value)`` for a message, shortened if it is long, whatever the value is. Local."""
    try:
        text = printed(value)
    except Exception as error:  # noqa: BLE001 - the user's code, or lists in lists in lists
        why = "is too large to print" if isinstance(error, RecursionError) else "cannot be printed"
        return f"a value of type {type(value).__name__} that {why}"
    return shortened(" ".join(text.split()) if "\n" in text else text)  # arrays have lines


def shortened(text: str, most: int = _LONGEST) -> str:
    """Return a text, cut if it has more than ``most`` characters. Local."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def opened(library: str, make: Callable[[], T]) -> T | PblasmpError:
    """Return what ``make`` opens, or why it cannot be used here: other ranks hear of it, whatever it is. Local."""
    try:
        return make()
    except PblasmpError as error:
        return error
    except Exception as error:  # noqa: BLE001
        return LibraryNotFoundError(f"{library} cannot be used: {type(error).__name__}: {error}")


@contextmanager
def required(what: str, extra: str) -> Iterator[None]:
    """Make the error of an import in this block say which extra has the missing module. Local.

    ``what`` needs the module, as the subject of a sentence in the plural. The error is a LibraryNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise LibraryNotFoundError(f"{what} need {error.name}: {install(extra)}") from None


def install(extra: str) -> str:
    """Return the pip command that installs an extra: in a clone it names the clone, not a package index. Local."""
    editable, source = _source()
    command = f"pip install {'-e ' if editable else ''}{shlex.quote(f'{source}[{extra}]')}"
    return command if source == "pblasmp" else f"{command} (the extra pblasmp[{extra}])"


def _source() -> tuple[bool, str]:
    """Return whether pblasmp is an editable install, and the name or path from which pip installs it."""
    clone = Path(__file__).parents[1]
    if (clone / "pyproject.toml").is_file():
        return True, str(clone)
    import importlib.metadata
    import json
    from urllib.parse import unquote, urlsplit

    try:
        # PEP 610: pip writes this file for packages that do not come from an index.
        text = importlib.metadata.distribution("pblasmp").read_text("direct_url.json")
        url = urlsplit(json.loads(text or "{}").get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False, "pblasmp"
    path = unquote(url.path)
    return False, path if url.scheme == "file" and Path(path).is_dir() else "pblasmp"
