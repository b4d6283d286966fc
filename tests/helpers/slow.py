# SPDX-License-Identifier: Apache-2.0
"""The forms of a test: ``pytest`` runs the short ones, always the same cases, ``pytest -m slow`` the long ones.

A test that calls one of these functions, or whose helpers do, has a long form, in which it tries all: ``conftest.py``
marks it as slow, and says by an environment variable, which ranks inherit, which form is run. Where messages are slow,
PBLASMP_TESTS=few makes short forms shorter: ``tests/gpu/hosts.sh`` sets it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

_VARIABLE = "PBLASMP_TESTS"
_FEW = 8  # of so many random cases one is left


def choose_form(*, slow: bool) -> None:
    """Have this process, and those that it starts, run long or short forms. Local."""
    os.environ[_VARIABLE] = "slow" if slow else "few" if is_few() else ""


def is_few() -> bool:
    """Return whether short forms have few cases. Local."""
    return os.environ.get(_VARIABLE) == "few"


def is_long() -> bool:
    """Return whether long forms are run. Local."""
    return os.environ.get(_VARIABLE) == "slow"


def draws(count: int, *, long: int) -> int:
    """Return how many random cases a test draws: ``count``, few of these, or ``long`` of them. Local."""
    return long if is_long() else thinned(count)


def thinned(count: int) -> int:
    """Return how many random cases there are in the long form, too: ``count``, or few of these. Local."""
    return -(-count // _FEW) if is_few() else count


def fewer(values: Sequence[Any], turn: int) -> Sequence[Any]:
    """Return the values, or where cases are to be few that whose turn it is. Local."""
    return [values[turn % len(values)]] if is_few() else values


def only_long(*values: Any) -> tuple[Any, ...]:
    """Return the values in long forms, else none: of a parameter, those whose cases others run, too. Local."""
    return values if is_long() else ()


def in_turn(values: Iterable[T], *, keep: int, first: int = 0) -> list[T]:
    """Return one in ``keep`` of the values, from number ``first`` modulo ``keep`` on; in long forms all. Local.

    Within a loop whose turns are ``first``, the values take turns. Where cases are few, one in twice ``keep``.
    """
    if is_long():
        return list(values)
    keep = 2 * keep if is_few() else keep
    return list(values)[first % keep :: keep]


def with_new_values(items: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return pytest's items so that every value of a parameter of a test has one, and the others. Local.

    Parameters that are given together count as one.
    """
    seen: set[tuple[str, ...]] = set()
    left: list[Any] = []
    out: list[Any] = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        together = (mark.args[0] for mark in item.iter_markers("parametrize"))
        groups = (each.replace(" ", "").split(",") if isinstance(each, str) else each for each in together)
        values = {(name, *(f"{each}={params.pop(each)!r}" for each in group)) for group in groups}
        values |= {(name, f"{each}={value!r}") for each, value in params.items()}
        (left if (values or {(name,)}) - seen else out).append(item)
        seen |= values
    return left, out


_FUNCTIONS = draws, in_turn, only_long
_known: dict[str, bool] = {__name__: False, "tests.helpers.pairs": True}


def has_long_form(module: ModuleType) -> bool:
    """Return whether a test module, or one of the helpers that it uses, calls one of these functions. Local."""
    found = _known.get(module.__name__)
    if found is None:
        _known[module.__name__] = False  # while it is looked at: modules may use each other
        values = list(vars(module).values())
        names = {
            getattr(each, "__name__" if isinstance(each, ModuleType) else "__module__", "") for each in values
        }
        helpers = [sys.modules[name] for name in names if str(name).startswith("tests.helpers.")]
        found = any(each is function for each in values for function in _FUNCTIONS)
        found = found or any(has_long_form(each) for each in helpers)
        _known[module.__name__] = found
    return found
