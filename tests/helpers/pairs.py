# SPDX-License-Identifier: Apache-2.0
"""Combinations of options: all pairs of values in the short form of a test, all combinations in the long one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.helpers.slow import is_long


def pairs(*factors: Iterable[Any], legal: Callable[[list[Any]], bool] = bool) -> Iterator[list[Any]]:
    """Return combinations in which any two values of two factors come together at least once; always the same. Local.

    In the long form of a test, all combinations.

    Args:
        factors: what each may be.
        legal: whether the first values of a combination may come together.
    """
    if is_long():
        return (list(each) for each in itertools.product(*factors) if legal(list(each)))
    values = [list(factor) for factor in factors]
    if len(values) == 1:
        return ([each] for each in values[0])
    from allpairspy import AllPairs  # which the tests on GPUs do without

    numbered = AllPairs(  # what it combines is hashable, and no two are equal
        [range(len(factor)) for factor in values],
        filter_func=lambda row: legal([factor[i] for factor, i in zip(values, row, strict=False)]),
    )
    return ([factor[i] for factor, i in zip(values, each, strict=True)] for each in numbered)
