# SPDX-License-Identifier: Apache-2.0
"""The flags that each rank has from every other one, by what they signal: no two things share a number.

A flag is raised by the rank that sends, and lowered by the rank that waits for it. Within one product or message each
is raised once; between two of them, barriers or other flags order what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHUNKS", "FLAGS", "MESSAGES", "PIECES", "PUSHED", "RANGES", "ROOMS", "SLOTS", "FlagRange"]

FLAGS = 80
"""How many flags every rank has from every other one."""


@dataclass(frozen=True, slots=True)
class FlagRange:
    """Consecutive flags for things that are counted from 0.

    Attributes:
        what: what each signals.
        first: the first flag.
        count: how many there are.
    """

    what: str
    first: int
    count: int

    def at(self, i: int) -> int:
        """Return the number of the flag of thing ``i``. Local.

        Raises:
            IndexError: there are not so many.
        """
        if not 0 <= i < self.count:
            raise IndexError(f"flags: {self.what} {i}: there are {self.count}")
        return self.first + i


PUSHED = FlagRange("chunk of A", 0, 8), FlagRange("chunk of B", 8, 8)
PIECES = FlagRange("piece of a tensor-parallel product", 16, 16)
MESSAGES = FlagRange("message in box", 32, 16)
SLOTS = FlagRange("free slot of box", 48, 16)
CHUNKS = FlagRange("chunk of a delivery", 64, 12)
ROOMS = FlagRange("free buffer of deliveries", 76, 3)
RANGES = (*PUSHED, PIECES, MESSAGES, SLOTS, CHUNKS, ROOMS)

_ENDS = [flags.first + flags.count for flags in RANGES]
if any(
    end > first for end, first in zip(_ENDS, [*(flags.first for flags in RANGES[1:]), FLAGS], strict=True)
):
    raise ValueError(f"flags: the ranges must follow each other, below {FLAGS}: {RANGES}")
