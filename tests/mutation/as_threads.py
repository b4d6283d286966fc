# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: ``run_mpi`` runs its function on threads of this process, for ranks take seconds to start.

Tests that need real ranks fail with it: those that take MPI's communicators, end ranks, or change what threads share.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import scipy.linalg.cython_blas  # noqa: F401 - threads cannot import it at the same time

from pblasmp.testing import RanksFailedError, runner
from pblasmp.testing.rank import run_function
from pblasmp.testing.state import State
from tests.helpers import cases
from tests.helpers.threads import Group, ThreadComm

_this = threading.local()
_short_messages = cases.short_messages


class Rank(ThreadComm):
    """With the names of mpi4py that tests use."""

    Get_rank = property(lambda self: lambda: self.rank)
    Get_size = property(lambda self: lambda: self.size)
    Barrier = ThreadComm.barrier


def _run(
    name: str, file: str, nranks: int, kwargs: dict[str, Any], timeout: float, launch: bool, launcher: Any
) -> list[dict[str, Any]]:
    if launch or launcher is not None:
        pytest.skip("needs real ranks")
    group = Group(nranks)
    state = State()

    def one(rank: int) -> dict[str, Any]:
        _this.rank = Rank(group, rank)
        try:
            return run_function(name, file, _this.rank, kwargs)
        except BaseException:
            group.failed = True
            raise

    try:
        with ThreadPoolExecutor(nranks) as pool:
            futures = [pool.submit(one, rank) for rank in range(nranks)]
        faults = [future.exception() for future in futures]
    finally:
        left = state.restore()
    if any(faults) or left:
        texts = ["".join(traceback.format_exception(fault)) for fault in faults if fault is not None]
        raise RanksFailedError("\n".join([name, *texts, *left]))
    return [future.result() for future in futures]


@contextlib.contextmanager
def _short_messages_of_all(limit: int) -> Iterator[None]:
    """The limits are what all threads have: all begin and end with them at once."""
    comm = _this.rank
    comm.barrier()
    with _short_messages(limit) if comm.rank == 0 else contextlib.nullcontext():
        comm.barrier()
        yield
        comm.barrier()
    comm.barrier()


def pytest_configure(config: pytest.Config) -> None:
    cases.short_messages = _short_messages_of_all
    runner._run = _run
