# SPDX-License-Identifier: Apache-2.0
"""Plans that a context keeps for repeated calls."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Hashable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Protocol

import numpy as np

from ..engines.product import Bound
from ..engines.protocol import Engine
from ..logs import logger
from ..resources import rank_share

_MOST_BYTES = 64 << 20  # of all kept plans, on the rank where they take the most
_MACHINE_BYTES = 2 << 30  # of those of all ranks of a machine
_LEAST_BYTES = 1 << 17  # what a plan counts at least: not all that it holds is seen from Python
_MOST_BOUND = 1024  # sets of arrays that kept plans are bound to: the products of a model of 128 layers


class Closable(Protocol):
    """What a context closes: plans."""

    def close(self) -> None:
        """Free what it holds. Collective."""


class KeptPlans:
    """The most recently used plans, by key; after a new measurement, earlier plans are no longer found.

    Keys are the same on every rank, and come in the same order. Plans are kept as long as they take little memory
    together, ``most`` bytes, by default a part of what the ranks of the machine may: so many of a program that walks
    over a matrix, fewer of those with large tables. They are bound to at most ``most_bound`` sets of arrays.
    """

    def __init__(
        self, engine: Engine, ranks: int = 1, most: int | None = None, most_bound: int = _MOST_BOUND
    ) -> None:
        self._engine, self._most_bound = engine, most_bound
        self._most = rank_share(_MOST_BYTES, _MACHINE_BYTES, ranks) if most is None else most
        self._plans: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bound: OrderedDict[tuple[int, tuple[int, ...]], Bound] = OrderedDict()
        self._numbers: Counter[int] = Counter()  # to how many sets of arrays each plan is bound
        self.nbytes = self.hits = self.evictions = 0

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, key: Hashable) -> Any:
        """Return the plan for ``key``, None if there is none. Local; the same on every rank."""
        key = self._whole(key)
        found = self._plans.get(key)
        if found is None:
            return None
        self._plans.move_to_end(key)
        self.hits += 1
        return found[0]

    def peek(self, key: Hashable) -> Any:
        """Return what ``find`` does, without using it: to ask before the ranks have agreed. Local."""
        return self._plans.get(self._whole(key), (None,))[0]

    def keep(self, key: Hashable, plan: Closable, *, has_tables: bool = True) -> None:
        """Keep a plan, and close the least recently used ones if they take too much. Collective over the context.

        ``has_tables``, the same on every rank: it may take more than what each counts at least.
        """
        nbytes = _LEAST_BYTES
        if has_tables:  # what is closed must be the same on every rank
            comm, greatest = self._engine.transport.comm, np.zeros(1, np.int64)
            mine = np.array([max(nbytes, held_bytes(plan, self._engine))])
            if (request := comm.imax(mine, greatest)) is not None:
                comm.wait(request)
            nbytes = int(greatest[0])
        self._plans[self._whole(key)] = plan, nbytes
        self.nbytes += nbytes
        while self.nbytes > self._most and len(self._plans) > 1:
            oldest = self._close_oldest()
            logger.info(
                "kept plans: closed %r to make room; %d bytes in %d plans; so far %d hits, %d closed",
                oldest, self.nbytes, len(self._plans), self.hits, self.evictions,
            )  # fmt: skip

    def close_all(self) -> None:
        """Close all plans: there is no memory left for others. Collective over the context."""
        logger.info("kept plans: closed all %d, since memory is short", len(self._plans))
        while self._plans:
            self._close_oldest()

    def _close_oldest(self) -> Any:
        """Close the least recently used plan, and return it. Collective over the context."""
        _, (oldest, freed) = self._plans.popitem(last=False)
        self.nbytes -= freed
        self.evictions += 1
        oldest.close()
        return oldest

    def bound(self, number: int, addresses: tuple[int, ...]) -> Bound | None:
        """Return what runs a plan on the arrays at these addresses, if it has run on them. Local."""
        found = self._bound.get((number, addresses))
        if found is not None:
            self._bound.move_to_end((number, addresses))
        return found

    def bind(self, number: int, addresses: tuple[int, ...], bound: Bound) -> None:
        """Keep what runs a plan on arrays, and drop the least recently used of all plans if there are many. Local.

        Ranks may keep different ones.
        """
        self._bound[number, addresses] = bound
        self._numbers[number] += 1
        if len(self._bound) > self._most_bound:
            (oldest, _), dropped = self._bound.popitem(last=False)
            self._numbers[oldest] -= 1
            dropped.release()

    def release(self, number: int) -> None:
        """Drop what a plan was bound to. Local."""
        if self._numbers.pop(number, 0):  # most plans of ever new sizes are bound to nothing
            for key in [key for key in self._bound if key[0] == number]:
                self._bound.pop(key).release()

    def log(self) -> None:
        """Log how often plans were found, and closed to make room. Local."""
        if self._plans or self.evictions:
            logger.info(
                "kept plans: %d, %d bytes; %d hits, %d closed to make room",
                len(self._plans), self.nbytes, self.hits, self.evictions,
            )  # fmt: skip

    def _whole(self, key: Hashable) -> Hashable:
        return key, self._engine.measured.added


def _shared(engine: Engine) -> set[int]:
    """Return which objects an engine has, and those that these have: what plans share, by ``id``."""
    found = [engine, engine.transport.comm, *vars(engine).values()]
    return {id(x) for each in found for x in (each, *getattr(each, "__dict__", {}).values())}


_SHARED = (ModuleType, type, BuiltinFunctionType, str, bytes, int, float, complex, np.dtype)


def held_bytes(plan: object, engine: Engine) -> int:
    """Return about how many bytes a plan holds, apart from what its engine and its context do. Local."""
    seen = _shared(engine) | {id(getattr(plan, "_ctx", None)), id(gc.garbage)}
    total, left = 0, [plan]
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, _SHARED):
            continue
        if isinstance(x, FunctionType):  # its code is shared, what it has taken from around it is not
            left += [*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__]
            continue
        seen.add(id(x))
        total += int(x.nbytes) if isinstance(x, np.ndarray) and x.base is None else x.__sizeof__()
        left += gc.get_referents(x)
    return total
