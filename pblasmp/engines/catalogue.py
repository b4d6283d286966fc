# SPDX-License-Identifier: Apache-2.0
"""The algorithms that every engine can run. A new one is a file like those imported here, and its rows below."""

from __future__ import annotations

from . import dealt, overlapped, reduced, slabs, solve, sums

__all__ = ["ALGORITHMS"]

ALGORITHMS = (
    *dealt.ALGORITHMS,
    *slabs.ALGORITHMS,
    *solve.ALGORITHMS,
    *sums.ALGORITHMS,
    *reduced.ALGORITHMS,
    *overlapped.ALGORITHMS,
)
