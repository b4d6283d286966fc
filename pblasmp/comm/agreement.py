# SPDX-License-Identifier: Apache-2.0
"""Agreement: before collective work all ranks compare what they are about to do, and fail together or not at all.

One reduction of a few integers says whether every rank made the same call with the same facts and none found a fault.
Only when it says no are the details gathered, and every rank raises the same error, naming the ranks that differ.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import time
import traceback
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import PblasmpError, RankMismatchError
from .communicator import Communicator

__all__ = ["CLOSING", "Agreement", "is_agreed", "leave"]

CLOSING = "closing the context"
_LEAVING = "leaving the context"
_GRACE_SECONDS = 1.0


def is_agreed(error: BaseException) -> bool:
    """Return whether every rank raised this error together. Local."""
    return hasattr(error, "_pblasmp_reporter")


def is_reported_here(error: BaseException) -> bool:
    """Return whether this rank is the one to show ``error`` to the user. Local."""
    return getattr(error, "_pblasmp_reporter", True)


class Agreement:
    """``with Agreement(comm, "matmul") as facts:`` collects facts and faults; leaving it makes the ranks agree.

    Inside, check the arguments and put into ``facts`` what must be equal on every rank; an exception raised inside is
    this rank's fault. Collective over ``comm``: entered by every rank, left by every rank with the same outcome.

    Raises:
        RankMismatchError: the ranks made different calls or have different facts.
        Exception: the fault that one or more ranks found, on every rank, with the ranks named.
    """

    def __init__(self, comm: Communicator, call: str) -> None:
        self._comm = comm
        self._facts: dict[str, Any] = {"call": call}

    def __enter__(self) -> dict[str, Any]:
        return self._facts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt is nobody's argument
        vote = _Vote(self._comm, self._facts, error)
        vote.wait()
        outcome = vote.outcome()
        if outcome is not None:
            raise outcome from (None if isinstance(error, PblasmpError) else error)


def leave(comm: Communicator, error: BaseException) -> None:
    """Make the other ranks raise ``error`` where they next agree, or end the job if they don't within a second. Local.

    For an exception that this rank alone may have seen. Returns when every rank knows; ``error`` is then one that all
    raise, and one of them shows. Otherwise it is shown here and every rank is aborted.
    """
    if comm.size == 1:
        return
    vote = _Vote(comm, {"call": _LEAVING}, error)
    deadline = time.monotonic() + _GRACE_SECONDS
    while not vote.done():
        if time.monotonic() > deadline:
            traceback.print_exception(error)
            sys.stderr.flush()
            comm.abort(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
        time.sleep(0.01)
    outcome = vote.outcome()
    error._pblasmp_reporter = getattr(outcome, "_pblasmp_reporter")  # type: ignore[attr-defined]  # noqa: B009


class _Vote:
    """One reduction over this rank's facts and fault, and what follows from it."""

    def __init__(self, comm: Communicator, facts: dict[str, Any], error: BaseException | None) -> None:
        self._comm, self._error = comm, error
        self._facts = {
            name: value if isinstance(value, str) else repr(value) for name, value in facts.items()
        }
        digest = hashlib.blake2b(repr(sorted(self._facts.items())).encode(), digest_size=8).digest()
        mine = int.from_bytes(digest, "little", signed=True)
        self._mine = np.array([~mine, mine, error is not None], dtype=np.int64)
        self._all = np.empty_like(self._mine)
        self._request = comm.imax(self._mine, self._all)

    def done(self) -> bool:
        """Return whether every rank has voted."""
        return self._request is None or bool(self._request.Test())

    def wait(self) -> None:
        """Wait until every rank has voted."""
        if self._request is not None:
            self._request.Wait()

    def outcome(self) -> Exception | None:
        """Return None, or the error that every rank raises; ``_pblasmp_reporter`` says whether this rank shows it."""
        low, high, faulty = self._all.tolist()
        if not faulty and ~low == high:
            return None
        everyone = self._comm.allgather(
            (self._facts, None if self._error is None else _portable(self._error))
        )
        faults = [fault for _, fault in everyone]
        if faulty:
            error = _combined(faults)
            reporter = next(rank for rank, fault in enumerate(faults) if fault is not None)
        else:
            error, reporter = _mismatch([facts for facts, _ in everyone]), 0
        error._pblasmp_reporter = self._comm.rank == reporter  # type: ignore[attr-defined]
        self._comm.broken = any(facts["call"] in (CLOSING, _LEAVING) for facts, _ in everyone)
        return error


def _mismatch(facts: list[dict[str, str]]) -> RankMismatchError:
    calls = [each["call"] for each in facts]
    if len(set(calls)) > 1:
        return RankMismatchError("the ranks made different calls:" + _by_rank(calls))
    names = [name for name in facts[0] if len({each.get(name) for each in facts}) > 1]
    text = "".join(f"\n  {name}:" + _by_rank([str(each.get(name)) for each in facts]) for name in names)
    return RankMismatchError(f"{calls[0]}: the ranks gave different arguments:{text}")


def _portable(error: BaseException) -> Exception:
    """Return ``error`` without its traceback, as something that other ranks can unpickle and raise."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs the user's code
        copy = None
    if type(copy) is type(error) and isinstance(copy, Exception):
        return copy
    return PblasmpError(f"{type(error).__name__}: {error}")


def _combined(faults: list[Exception | None]) -> Exception:
    """Return one error for the faults that some ranks found: the first one's type, with the ranks named."""
    found = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
    first = found[0][1]
    if len({str(fault) for _, fault in found}) > 1:
        where = f" (on rank {found[0][0]})" + "".join(
            f"\n  on rank {rank}: {type(fault).__name__}: {fault}" for rank, fault in found[1:]
        )
    elif len(found) < len(faults):
        where = f" (on {_ranks([rank for rank, _ in found])})"
    else:
        return first
    if isinstance(first, OSError) and first.errno is not None:
        return type(first)(first.errno, f"{first.strerror}{where}", first.filename)
    try:
        return type(first)(f"{first}{where}")
    except Exception:  # noqa: BLE001 - a class of the user's that takes other arguments
        return PblasmpError(f"{type(first).__name__}: {first}{where}")


def _by_rank(values: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return "".join(f"\n    {value} on {_ranks(ranks)}" for value, ranks in groups.items())


def _ranks(ranks: list[int]) -> str:
    """Name ranks, runs of them as a range: "rank 3", "ranks 0, 2-5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
