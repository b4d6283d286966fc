# SPDX-License-Identifier: Apache-2.0
"""Combinations of options: all pairs of values in the short form of a test, all combinations in the long one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.helpers.slow import is_long


def pairs(*factors: Sequence[Any], legal: Callable[[list[Any]], bool] = bool) -> Iterator[list[Any]]:
    """Return combinations in which any two values of two factors come together at least once; always the same. Local.

    In the long form of a test, all combinations.

    Args:
        factors: what each may be.
        legal: whether the first values of a combination may come together.
    """
    if is_long():
        return (list(each) for each in itertools.product(*factors) if legal(list(each)))
    if len(factors) == 1:
        return ([each] for each in factors[0])
    from allpairspy import AllPairs  # which the tests on GPUs do without

    numbered = AllPairs(  # what it combines is hashable, and no two are equal
        [range(len(factor)) for factor in factors],
        filter_func=lambda row: legal([factor[i] for factor, i in zip(factors, row, strict=False)]),
    )
    return ([factor[i] for factor, i in zip(factors, each, strict=True)] for each in numbered)
