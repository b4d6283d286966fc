# SPDX-License-Identifier: Apache-2.0
"""How much a test tries: what finds faults in minutes, or all of it.

PBLASMP_TESTS says which tests try all: "long" all of them, "3/16" those of one file in 16. The parts "0/16" to "15/16"
have no file in common and, together, all.
"""

from __future__ import annotations

import itertools
import os
import sys
import zlib
from collections.abc import Collection, Iterator
from typing import Any

__all__ = ["draws", "in_turn", "only_long"]


def _is_long() -> bool:
    """Return whether the module that calls the caller tries all."""
    asked = os.environ.get("PBLASMP_TESTS", "")
    if asked in ("", "long"):
        return bool(asked)
    part, _, parts = asked.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f'PBLASMP_TESTS: expected "long" or PART/PARTS ("0/16" to "15/16"), got {asked!r}')
    name = sys._getframe(2).f_globals["__name__"]
    return zlib.crc32(name.encode()) % int(parts) == int(part)


def draws(count: int, *, long: int) -> int:
    """Return how many random cases a test draws: ``count``, or ``long`` of them. Local."""
    return long if _is_long() else count


def only_long(*values: Any) -> tuple[Any, ...]:
    """Return the values if all is tried, else none: of a parameter, those whose cases others run, too. Local."""
    return values if _is_long() else ()


def in_turn(*factors: Collection[Any], keep: int, first: int = 0) -> Iterator[tuple[Any, ...]]:
    """Return one in ``keep`` of the combinations: those whose positions add up to ``first`` modulo ``keep``. Local.

    The values of a factor with ``keep`` values take turns: every combination of the other factors comes with one of
    them. Two values of any factors come together if another factor has ``keep`` values or more. The ``keep`` possible
    ``first`` have no combination in common and, together, all.
    """
    everything = _is_long()
    numbered = itertools.product(*(list(enumerate(factor)) for factor in factors))
    return (
        tuple(value for _, value in combination)
        for combination in numbered
        if everything or sum(position for position, _ in combination) % keep == first % keep
    )
