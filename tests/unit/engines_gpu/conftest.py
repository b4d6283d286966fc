# SPDX-License-Identifier: Apache-2.0
"""A machine of one rank, without MPI."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pblasmp as pb
from pblasmp.engines.gpu.kernels.kernels import Kernels
from pblasmp.engines.gpu.runtime.gpu import Gpu
from pblasmp.engines.gpu.runtime.windows import Windows
from tests.helpers import fakepeers
from tests.helpers.machine import Witness, machine


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ``Peers`` have installed is gone afterwards."""
    yield from fakepeers.installed(monkeypatch)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are of one process without MPI."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)


@pytest.fixture
def played() -> dict[str, Any]:
    """What ``machine`` is given."""
    return {}


@pytest.fixture
def lib(alone: None, stand_in: Callable[..., str], played: dict[str, Any]) -> Iterator[Witness]:
    """cuBLASMp 0.10 on a machine with one GPU; clean at the end of the test."""
    with machine(stand_in(1000), **played) as lib:
        yield lib
        lib.assert_clean()
        lib.gpu.assert_clean()


@pytest.fixture
def ctx(lib: Witness) -> Iterator[pb.Context]:
    """A context on it."""
    with pb.Context(engine="cublasmp") as ctx:
        lib.clear()
        yield ctx


def _counted(gpu: Any, what: str, real: Callable[..., None]) -> Callable[..., None]:
    def counted(*given: Any, **how: Any) -> None:
        setattr(gpu, what, getattr(gpu, what) + 1)
        real(*given, **how)

    return counted


@pytest.fixture
def gpu(ctx: pb.Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The context's GPU, with windows, though it has no peers.

    It counts the products that it begins, and what it copies by kernels.
    """
    session = ctx.engine.session
    gpu: Any = session.gpu
    gpu.queued = gpu.moves = 0
    monkeypatch.setattr(gpu, "windows", Windows(session.runtime, session.nccl.all, gpu.domains, gpu.kernels))
    monkeypatch.setattr(gpu, "why_no_windows", "")
    monkeypatch.setattr(Gpu, "begin", _counted(gpu, "queued", Gpu.begin))
    monkeypatch.setattr(Kernels, "move", _counted(gpu, "moves", Kernels.move))
    yield gpu
    gpu.windows.close()
