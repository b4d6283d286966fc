# SPDX-License-Identifier: Apache-2.0
"""What direct calls of all engines have in common.

A *direct call* is computed at once, without a problem, a choice of algorithms and a plan. In a block-cyclic layout
everything that it needs to know about a sub-matrix is a few integers, so that a call on a new one costs little.
"""

from .asked import (
    FAMILIES,
    ROUTINE_NUMBERS,
    Asked,
    Direct,
    Held,
    Moved,
    Outcome,
    Part,
    Pattern,
    RoutineForm,
    alias,
    host_address,
    pattern,
    pattern_of,
)  # fmt: skip

__all__ = [
    "FAMILIES", "ROUTINE_NUMBERS", "Asked", "Direct", "Held", "Moved", "Outcome", "Part", "Pattern",
    "RoutineForm", "alias", "host_address", "pattern", "pattern_of",
]  # fmt: skip
