# SPDX-License-Identifier: Apache-2.0
"""A cache of results whose memory is bounded, whatever their size."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

_ENTRIES = 4096
MOST_BYTES = 16 << 20
"""What the results of one cache may take, unless ``limit_caches`` says less."""

_most = MOST_BYTES

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Hashed(tuple[T, ...]):
    """A tuple that computes its hash once: one with an item for each of 65,536 ranks is a key of caches."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


def limit_caches(most: int) -> None:
    """Let the results of each cache take no more than ``most`` bytes from now on. Local."""
    global _most  # noqa: PLW0603
    _most = most


def sized_cache(
    size: Callable[[Any], int], most: int | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator like ``functools.lru_cache``, whose cache is emptied when its results take too much memory.

    Local. ``size`` returns the bytes of a result; together they may take ``most``, apart from the newest one; None: see
    ``limit_caches``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        held = 0

        @wraps(function)
        def compute(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal held
            result = function(*args, **kwargs)
            held += size(result)
            if held > (_most if most is None else most):
                cached.cache_clear()
                held = size(result)
            return result

        cached = lru_cache(_ENTRIES)(compute)
        return cast("Callable[P, R]", cached)

    return decorate
