# SPDX-License-Identifier: Apache-2.0
"""Docstrings of functions that are made from the tables of routines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..layout.routines import ROUTINES, VECTOR_ROUTINES, Routine, VectorRoutine

F = TypeVar("F", bound=Callable[..., Any])


def described(function: F) -> F:
    """Complete the docstring of a routine of levels 1 to 3, of four spaces' indentation, by what the tables say. Local.

    Args:
        function: the function; its docstring has what is particular to it.
    """
    name = function.__name__
    row: Routine | VectorRoutine = ROUTINES[name] if name in ROUTINES else VECTOR_ROUTINES[name]
    parameters = inspect.signature(function).parameters
    text = [(function.__doc__ or "").rstrip(), *(f"    {each}" for each in _notes(row))]
    text += ["\n".join(["    Args:", *(f"        {each}: {_meaning(row, each)}" for each in parameters)])]
    text += ["\n".join(["    Raises:", *(f"        {line}" for line in _RAISES)])]
    text += [
        "\n".join(["    Example:", *(f"        {line}" for line in _example(name, parameters.values()))])
    ]
    text += [f"    See Also:\n        {_see_also(name, row)}"]
    if isinstance(row, VectorRoutine):
        text += [f"    Source: PBLAS, {', '.join(each.upper() for each in row.names)}."]
    function.__doc__ = "\n\n".join(text) + "\n    "
    return function


_OPERANDS = {
    "a": "[[2.0, 0], [1, 2]]", "b": "[[1.0, 2], [3, 4]]", "c": "[[1.0, 1], [1, 1]]", "x": "[[1.0], [2]]",
    "y": "[[3.0], [4]]",
}  # fmt: skip
"""What examples compute with: A as a lower triangle, which is also that of a symmetric matrix."""
_RESULTS = {
    "amax": "(2.0, 1)",
    "asum": "3.0",
    "axpy": "[[4.0], [6.0]]",
    "copy": "[[1.0], [2.0]]",
    "dot": "11.0",
    "dotc": "11.0",
    "geadd": "[[3.0, 1.0], [2.0, 3.0]]",
    "gemv": "[[2.0], [5.0]]",
    "ger": "[[3.0, 4.0], [6.0, 8.0]]",
    "gerc": "[[3.0, 4.0], [6.0, 8.0]]",
    "hemm": "[[5.0, 8.0], [7.0, 10.0]]",
    "hemv": "[[4.0], [5.0]]",
    "her": "[[1.0, 0.0], [2.0, 4.0]]",
    "her2": "[[6.0, 0.0], [10.0, 16.0]]",
    "her2k": "[[4.0, 0.0], [11.0, 22.0]]",
    "herk": "[[4.0, 0.0], [2.0, 5.0]]",
    "herkx": "[[2.0, 0.0], [5.0, 11.0]]",
    "nrm2": "2.236068",
    "scal": "[[2.0], [4.0]]",
    "swap": "x: [[3.0], [4.0]]",
    "symm": "[[5.0, 8.0], [7.0, 10.0]]",
    "symv": "[[4.0], [5.0]]",
    "syr": "[[1.0, 0.0], [2.0, 4.0]]",
    "syr2": "[[6.0, 0.0], [10.0, 16.0]]",
    "syr2k": "[[4.0, 0.0], [11.0, 22.0]]",
    "syrk": "[[4.0, 0.0], [2.0, 5.0]]",
    "syrkx": "[[2.0, 0.0], [5.0, 11.0]]",
    "tradd": "[[3.0, 1.0], [2.0, 3.0]]",
    "trmm": "[[2.0, 4.0], [7.0, 10.0]]",
    "trmv": "[[2.0], [5.0]]",
    "trsm": "[[0.5, 1.0], [1.25, 1.5]]",
    "trsv": "[[0.5], [0.75]]",
}
"""What they print."""


def _example(name: str, parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    """Yield the lines of an example of a routine, with the arguments that have no default. Local."""
    given = [each.name for each in parameters if each.default is each.empty]
    for each in given:
        if each in _OPERANDS:
            yield f">>> {each} = ctx.scatter(np.array({_OPERANDS[each]}), block=1)"
    result, call = _RESULTS[name], ", ".join(each if each in _OPERANDS else f"{each}=2" for each in given)
    if result.startswith("[["):
        yield f">>> pb.blas.{name}({call}).allgather().tolist()"
    elif name == "swap":
        yield f">>> pb.blas.swap({call})"
        yield ">>> x.allgather().tolist()"
        result = result.removeprefix("x: ")
    elif name == "amax":
        yield f">>> value, index = pb.blas.amax({call})"
        yield ">>> float(value), index"
    else:
        yield f">>> round(float(pb.blas.{name}({call})), 6)"
    yield result


_ALIKE = (
    ("trsm", "trmm", "trsv", "trmv"), ("symm", "hemm", "symv", "hemv"),
    ("syrk", "herk", "syr2k", "her2k", "syrkx", "herkx"), ("geadd", "tradd"),
    ("gemv", "symv", "hemv", "trmv", "trsv"), ("ger", "gerc", "syr", "syr2", "her", "her2"),
    ("dot", "dotc", "nrm2", "asum", "amax"), ("copy", "swap", "scal", "axpy"),
)  # fmt: skip
"""Routines that users compare; each one's docstring names the others."""
_BETTER_KNOWN = {
    "trsm": "pb.linalg.solve_triangular", "trsv": "pb.linalg.solve_triangular", "gemv": "pb.matmul",
    "geadd": "A.redistribute", "tradd": "A.redistribute", "nrm2": "pb.linalg.norm", "amax": "A.max",
}  # fmt: skip
"""What else computes the same, under a name of NumPy's or SciPy's."""


def _see_also(name: str, row: Routine | VectorRoutine) -> str:
    """Return the names of what is like a routine, of PBLAS's last. Local."""
    like = dict.fromkeys(each for group in _ALIKE if name in group for each in group if each != name)
    better = [f"``{_BETTER_KNOWN[name]}``"] if name in _BETTER_KNOWN else []
    if isinstance(row, VectorRoutine):
        names = [*row.names]
    else:
        names = [f"p{'z' if row.hermitian else 'd'}{name}"] if row.pblas else []
    last = [f"``pblasmp.pblas.{names[0]}`` with PBLAS's arguments"] if names else []
    return ", ".join([*better, *like, *last]) + "."


_RAISES = (
    "ArgumentError: shapes, types or options do not fit; the message names every fault.",
    "RankMismatchError: the ranks gave different arguments.",
    "UnsupportedError: the engine does not offer it.",
)
_WORDS = {
    "side": '"L": A is to the left of B; "R": to the right.',
    "op_a": '"N", "T" or "C" (conjugate transpose).',
    "diag": '"U": A has ones on its diagonal, which is not read.',
}


def _notes(row: Routine | VectorRoutine) -> list[str]:
    """Return what else there is to say of a level-3 routine's result, in paragraphs of a docstring. Local."""
    notes: list[str] = []
    if isinstance(row, VectorRoutine):
        return notes
    if row.triangle == "d":
        zeros = "" if row.shape == "added" else ", or zeros if there is no C"
        notes.append(
            "Only the triangle ``uplo`` of C is read, and only that of the result is written: outside it\n"
            f"    ``out`` keeps its values, and a new matrix has those of C{zeros}."
        )
    if row.hermitian:
        what = "A's diagonal are taken as 0 and not read"
        if row.triangle == "d":
            what = "C's diagonal are not read; those of the result are 0"
        notes.append(f"The imaginary parts of {what}.")
    return notes


def _meaning(row: Routine | VectorRoutine, name: str) -> str:
    """Return what an argument is, in words. Local."""
    if name in _WORDS and not (name == "op_a" and isinstance(row, Routine) and row.shape == "updated"):
        return _WORDS[name]
    if name in ("alpha", "beta"):
        return f"a {'real ' * (name in row.real)}number; with 0 {_unread(row, name)} read."
    return _in_level3(row, name) if isinstance(row, Routine) else _in_vectors(row, name)


def _unread(row: Routine | VectorRoutine, scalar: str) -> str:
    """Return what is not read if a scalar is 0. Local."""
    if isinstance(row, VectorRoutine):
        return "y is not" if scalar == "beta" else "what it multiplies is not"
    return "C is not" if scalar == "beta" else "neither A nor B is" if "b" in row.operands else "A is not"


def _in_level3(row: Routine, name: str) -> str:
    updated, added = row.shape == "updated", row.shape == "added"
    if name == "a" and row.shape == "sided":
        return f"square {row.kind} matrix, of which only the triangle ``uplo`` is read."
    if name in "abc":
        rows, cols, *option = row.sizes.texts[name].split()
        text = f"{rows} × {cols}" + f', or {cols} × {rows} if ``op_a`` is not "N"' * bool(option)
        if name == "c":
            text += (
                f"{'' if added else ', in any layout; None means zeros'}. With ``beta == 0`` it is not read"
            )
        return f"{text}."
    if name == "uplo":
        return (
            f'"L" or "U": the triangle {"of A that is read" if row.triangle == "a" else "that is computed"}.'
        )
    if name == "op_a":
        mine, other = "CT" if row.hermitian else "TC"
        return f'"N" or "{mine}"; for real types "{other}" is "{mine}".'
    if name == "out":
        like = "of C" if added else "of B" if "c" not in row.operands else "of C, else of B"
        if updated:
            like = "of C, else in A's blocks on A's grid"
        return f"where to write the result, which may be ``{row.in_place}``; by default a new one in the layout {like}."
    return '"auto", or the name of an algorithm: ``pb.algorithms`` lists them.'


def _in_vectors(row: VectorRoutine, name: str) -> str:
    absent = "; None means zeros" if row.optional == name else ""
    if name in row.sizes:
        first, *rest = row.sizes[name].split()
        if name == "a":
            return f"{first} × {rest[0]}{absent}."
        other = f', or of {rest[0]} if ``op_a`` is not "N"' if rest else ""
        return f"a vector of {first} elements, 1 × {first} or {first} × 1{other}{absent}."
    if name == "uplo":
        return '"L" or "U": the triangle that is used; the other one is neither read nor written.'
    if name == "out":
        new = "matrix" if row.written == "a" else "vector"
        return f"where to write the result, which may be ``{row.written[-1]}``; by default a new {new}."
    return '"auto", which moves only vectors and partial sums, or the name of an algorithm of the level-3 routine.'
