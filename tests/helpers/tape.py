# SPDX-License-Identifier: Apache-2.0
"""Hypothesis for ranks: the process of pytest draws a tape of numbers, from which all ranks draw the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st


def tapes(least: int) -> st.SearchStrategy[list[int]]:
    """Tapes of ``least`` numbers or more; what is drawn beyond is 0."""
    return st.lists(st.integers(0, 2**20), min_size=least, max_size=2 * least)


class Tape:
    """Numbers that were drawn elsewhere, as a generator: zeros choose what is first, least, and nearest to nothing.

    Values of matrices, which no failure depends on, come from a generator.
    """

    def __init__(self, drawn: list[int]) -> None:
        self._drawn, self._values = iter(drawn), np.random.default_rng(len(drawn))

    def integers(self, low: Any, high: Any = None, size: Any = None) -> Any:
        """As of ``numpy.random.Generator``."""
        low, high = (0, low) if high is None else (low, high)
        if size is None:
            return np.int64(low + next(self._drawn, 0) % (high - low))
        if isinstance(size, int):
            return np.array([self.integers(low, high) for _ in range(size)])
        return self._values.integers(low, high, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._values, name)
