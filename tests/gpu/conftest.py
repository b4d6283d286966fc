# SPDX-License-Identifier: Apache-2.0
"""``mpirun -n 4 python -m pytest tests/gpu``: every rank runs pytest, one GPU each; a failure ends the job.

Too few GPUs is an error, not a skip: these tests are only collected if they are asked for. With
NCCL_MULTI_RANK_GPU_ENABLE=1 ranks share GPUs. PBLASMP_GPU_RUNS=tests/gpu/runs.json adds the outcome to that file.
PBLASMP_TESTS=few leaves of each test so many cases that every value of a parameter has one.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pblasmp as pb
from tests.helpers import gpu_runs
from tests.helpers.copy_products import PRODUCTS
from tests.helpers.gpu.tables import why_refused_here
from tests.helpers.slow import is_few, with_new_values
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
    kinds = [kinds[name] for kinds in PRODUCTS.values() if name in kinds]
    if kinds and all(kind.ranks not in (None, ctx.size) for kind in kinds):
        pytest.skip(f"{name} is for {kinds[0].ranks} ranks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[Any]:
    """Skip what is refused where the tests run: between hosts (hosts.sh), or with ranks that share a GPU."""
    try:
        return (yield)
    except (pb.UnsupportedError, AssertionError) as error:  # the same on every rank
        if why := why_refused_here(error):
            pytest.skip(f"refused here: {why}")
        raise


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep few cases of each test where PBLASMP_TESTS asks for that."""
    if not is_few():
        return
    left, out = with_new_values(items)
    config.hook.pytest_deselected(items=out)
    items[:] = left


FACTS = pytest.StashKey[dict[str, Any]]()


@pytest.fixture(scope="session", autouse=True)
def _facts(request: pytest.FixtureRequest, ctx: pb.Context) -> None:
    """Keep on rank 0 what the record of the run says about GPUs and versions."""
    facts = gpu_runs.facts(ctx)
    if ctx.rank == 0:
        request.config.stash[FACTS] = facts


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Add this run to the file that PBLASMP_GPU_RUNS names."""
    path, facts = os.environ.get("PBLASMP_GPU_RUNS"), config.stash.get(FACTS, None)
    if not path or facts is None:
        return
    stats = terminalreporter.stats
    found = [
        (each.nodeid, outcome) for outcome in ("passed", "failed", "error") for each in stats.get(outcome, [])
    ]
    if found:
        gpu_runs.add(Path(path), facts | {"suites": gpu_runs.suites_of(found)})
