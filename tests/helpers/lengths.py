# SPDX-License-Identifier: Apache-2.0
"""How much a test tries: what finds faults in minutes, or all of it where PBLASMP_TESTS is "long"."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator
from typing import Any

__all__ = ["draws", "in_turn", "only_long"]


def _is_long() -> bool:
    return os.environ.get("PBLASMP_TESTS") == "long"


def draws(count: int, *, long: int) -> int:
    """Return how many random cases a test draws: ``count``, or ``long`` of them. Local."""
    return long if _is_long() else count


def only_long(*values: Any) -> tuple[Any, ...]:
    """Return the values if all is tried, else none: of a parameter, those whose cases others run, too. Local."""
    return values if _is_long() else ()


def in_turn(*factors: Collection[Any], keep: int, first: int = 0) -> Iterator[tuple[Any, ...]]:
    """Yield one in ``keep`` of the combinations: those whose positions add up to ``first`` modulo ``keep``. Local.

    The values of a factor with ``keep`` values take turns: every combination of the other factors comes with one of
    them. Two values of any factors come together if another factor has ``keep`` values or more. The ``keep`` possible
    ``first`` have no combination in common and, together, all.
    """
    numbered = itertools.product(*(list(enumerate(factor)) for factor in factors))
    for combination in numbered:
        if _is_long() or sum(position for position, _ in combination) % keep == first % keep:
            yield tuple(value for _, value in combination)
