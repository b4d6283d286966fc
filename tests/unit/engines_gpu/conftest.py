# SPDX-License-Identifier: Apache-2.0
"""A machine of one rank, without MPI."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pblasmp as pb
from tests.helpers.eagergpu import EagerGpu
from tests.helpers.machine import Witness, machine


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


@pytest.fixture
def gpu(ctx: pb.Context, monkeypatch: pytest.MonkeyPatch) -> EagerGpu:
    """The context's copies, sums and products on its GPU, computed at once."""
    gpu = EagerGpu(ctx.engine.session.runtime.arena)
    monkeypatch.setattr(ctx.engine.session, "gpu", gpu)
    return gpu
