# SPDX-License-Identifier: Apache-2.0
"""``mpirun -n 4 python -m pytest tests/gpu``: every rank runs pytest, one GPU each; a failure ends the job.

Too few GPUs is an error, not a skip: these tests are only collected where they are asked for. With
NCCL_MULTI_RANK_GPU_ENABLE=1 ranks share GPUs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import pblasmp as pb
from pblasmp.engines.gpu.tensor import ALGORITHMS
from tests.helpers.under_mpirun import (  # noqa: F401 - hooks
    pytest_configure,
    pytest_runtest_logreport,
    pytest_runtest_logstart,
)


@pytest.fixture(scope="session")
def ctx() -> Iterator[pb.Context]:
    """A context on all ranks' GPUs, shared by the tests; closed at the end."""
    with pb.Context(engine="cublasmp") as context:
        yield context


@pytest.fixture(scope="session")
def host(ctx: pb.Context) -> Iterator[pb.Context]:
    """A context of the same ranks on the host engine."""
    with pb.Context(engine="host") as context:
        yield context


@pytest.fixture(autouse=True)
def _together(ctx: pb.Context) -> Iterator[None]:
    """Collect garbage and wait for each other after every test."""
    yield
    gc.collect(0)
    ctx.comm.barrier()


@pytest.fixture(autouse=True)
def _for_so_many_ranks(request: pytest.FixtureRequest, ctx: pb.Context) -> None:
    """Skip an algorithm that is for another number of ranks."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    kinds = [kinds[name] for kinds in ALGORITHMS.values() if name in kinds]
    if kinds and all(kind.ranks not in (None, ctx.size) for kind in kinds):
        pytest.skip(f"{name} is for {kinds[0].ranks} ranks")
