# SPDX-License-Identifier: Apache-2.0
"""The structure of descriptor files: their keys, and of what kind each value is.

descriptors/problem.schema.json says the same for editors; tests hold the two together.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ..dtypes import DTYPES

__all__ = ["Table", "grid_faults", "problem_faults", "sweep_faults"]

Table = dict[str, Any]


class _Kind(NamedTuple):
    """What a value must be, in words and as a test."""

    expected: str
    holds: Callable[[Any], bool]


def _is_int(value: object, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _integers(count: int, minimum: int) -> Callable[[Any], bool]:
    return _list(lambda v: _is_int(v, minimum), count)


def _list(holds: Callable[[Any], bool], *counts: int) -> Callable[[Any], bool]:
    return lambda v: (
        isinstance(v, list) and (len(v) in counts if counts else len(v) > 0) and all(map(holds, v))
    )


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None


_TEXT = _Kind("a text", lambda v: isinstance(v, str) and v != "")
_EXTENT = _Kind("an integer, at least 0", lambda v: _is_int(v, 0))
_COUNT = _Kind("an integer, at least 1", lambda v: _is_int(v, 1))
_PAIR = _Kind("two integers, each at least 0", _integers(2, 0))
_NUMBER = _Kind("a number, or [real, imaginary]", lambda v: _is_number(v) or _list(_is_number, 2)(v))
_DTYPE = _Kind(f"one of {', '.join(DTYPES)}", lambda v: isinstance(v, str) and v in DTYPES)
_TABLE = _Kind("a table", lambda v: isinstance(v, dict))
_GRID = _Kind(
    "the name of a grid, or a table with nprow and npcol", lambda v: _TEXT.holds(v) or _TABLE.holds(v)
)

_GRID_KEYS = {
    "nprow": _COUNT,
    "npcol": _COUNT,
    "order": _Kind('"row" or "col"', _matches("row|col")),
    "description": _TEXT,
}
_OPERAND_KEYS = {
    "shape": _PAIR,
    "window": _Kind("[[i0, i1], [j0, j1]], each at least 0", _list(_PAIR.holds, 2)),
    "block": _Kind("two integers, each at least 1", _integers(2, 1)),
    "source": _PAIR,
    "grid": _GRID,
    "dtype": _DTYPE,
    "order": _Kind('"C" or "F"', _matches("[CF]")),
    "ld": _COUNT,
}
_RAISES_KEYS = {
    "at": _Kind('"structure", "values" or "rules"', _matches("structure|values|rules")),
    "error": _TEXT,
    "faults": _Kind("a list of texts", _list(_TEXT.holds)),
}
_PROBLEM_KEYS = {
    "title": _TEXT,
    "description": _TEXT,
    "scheme": _Kind('"gemm", "ag", "rs" or "ar"', _matches("gemm|ag|rs|ar")),
    "ops": _Kind("two letters of N, T and C, for A and B", _matches("[NTC]{2}")),
    "m": _EXTENT,
    "n": _EXTENT,
    "k": _EXTENT,
    "nranks": _COUNT,
    "grid": _GRID,
    "block": _Kind(
        "an integer, or three for m, n and k, each at least 1", lambda v: _is_int(v, 1) or _integers(3, 1)(v)
    ),
    "source": _PAIR,
    "dtype": _DTYPE,
    "order": _Kind('"C", "F", or three of these letters for A, B and D', _matches("[CF]|[CF]{3}")),
    "alpha": _NUMBER,
    "beta": _NUMBER,
    "a": _TABLE,
    "b": _TABLE,
    "d": _TABLE,
    "c": _TABLE,
    "raises": _TABLE,
}
_TABLES = {"grid": _GRID_KEYS, "raises": _RAISES_KEYS, **dict.fromkeys("abdc", _OPERAND_KEYS)}
_PART_KEYS = {
    "shape": _PAIR,
    "block": _OPERAND_KEYS["block"],
    "source": _PAIR,
    "start": _PAIR,
}
_SWEEP_KEYS = {
    "title": _TEXT,
    "description": _TEXT,
    "grids": _Kind("a list of names of grids", _list(_TEXT.holds)),
    "m": _EXTENT,
    "n": _EXTENT,
    "k": _EXTENT,
    "side": _Kind('"L" or "R"', _matches("L|R")),
    "uplo": _Kind('"L" or "U"', _matches("L|U")),
    "ops": _PROBLEM_KEYS["ops"],
    "diag": _Kind('"N" or "U"', _matches("N|U")),
    "alpha": _NUMBER,
    "beta": _NUMBER,
    "gap": _EXTENT,
    "a": _TABLE,
    "b": _TABLE,
    "c": _TABLE,
}


def grid_faults(data: Table) -> list[str]:
    """Return what keeps ``data`` from being a grid. Local."""
    return _faults(data, _GRID_KEYS)


def problem_faults(data: Table) -> list[str]:
    """Return what keeps ``data`` from being a problem file, whatever the values are. Local."""
    return _faults(data, _PROBLEM_KEYS) or _combination_faults(data)


def sweep_faults(data: Table) -> list[str]:
    """Return what keeps ``data`` from being a sweep, whatever the values are. Local."""
    return _faults(data, _SWEEP_KEYS, tables=dict.fromkeys("abc", _PART_KEYS))


def _faults(
    table: Table, keys: dict[str, _Kind], prefix: str = "", tables: dict[str, dict[str, _Kind]] = _TABLES
) -> list[str]:
    found = []
    for key, value in table.items():
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(keys)}"
            found.append(f"{prefix}{key}: unknown key: {hint}")
        elif not keys[key].holds(value):
            found.append(f"{prefix}{key}: expected {keys[key].expected}, got {value!r}")
        elif isinstance(value, dict):
            found += _faults(value, tables[key], f"{prefix}{key}.", tables)
    needed = {
        id(_GRID_KEYS): ("nprow", "npcol"),
        id(_RAISES_KEYS): tuple(_RAISES_KEYS),
        id(_PROBLEM_KEYS): ("title",),
        id(_SWEEP_KEYS): ("title", "grids", "m", "n", "k", "a", "b", "c"),
        id(_PART_KEYS): ("shape", "block"),
    }
    return found + [
        f"{prefix}{key}: missing, expected {keys[key].expected}"
        for key in needed.get(id(keys), ())
        if key not in table
    ]


def _combination_faults(data: Table) -> list[str]:
    """Return which keys are missing or contradict each other, where every value is of the right kind."""
    found = []
    scheme = data.get("scheme", "gemm")
    sizes = [key for key in "mnk" if key in data]
    if 0 < len(sizes) < 3:
        found.append(f"{', '.join(sizes)}: m, n and k come together")
    if data.get("beta", 0) not in (0, [0, 0]) and "c" not in data:
        found.append("beta: there is no C to scale: expected a table [c], or beta = 0")
    if scheme != "gemm":
        why = f"the layouts of scheme {scheme!r} follow from m, n, k and nranks"
        found += [
            f"{key}: missing: {why}"
            for key in ("m", "nranks")
            if key not in data and (key != "m" or not sizes)
        ]
        found += [f"{key}: not expected here: {why}" for key in ("grid", "block", "source") if key in data]
        return found
    a, b = data.get("a", {}), data.get("b", {})
    if not sizes and not ("shape" in a and "shape" in b):
        found.append("m, n, k: missing, expected these or a.shape and b.shape")
    if "block" not in data and not ("block" in a and "block" in b):
        found.append("block: missing, expected this or a.block and b.block")
    if ("grid" in data) == ("nranks" in data):
        found.append(f"grid, nranks: expected one of them, got {'both' if 'grid' in data else 'neither'}")
    return found
