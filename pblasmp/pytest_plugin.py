# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: the fixture ``run_mpi``, and an option to start new ranks for every call.

A project asks for it with ``pytest_plugins = ["pblasmp.pytest_plugin"]`` in its conftest.py. It loads nothing else
until a test asks for ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["pytest_addoption", "pytest_configure", "pytest_unconfigure", "run_mpi"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--fresh-ranks``. Local."""
    parser.getgroup("pblasmp").addoption(
        "--fresh-ranks",
        action="store_true",
        help="start new MPI ranks for every run_mpi, to see whether a test depends on earlier ones",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Obey ``--fresh-ranks``. Local."""
    if config.getoption("fresh_ranks"):
        from .testing.pool import pool

        pool.keep = False


def pytest_unconfigure() -> None:
    """End the ranks that were kept. Local."""
    module = sys.modules.get("pblasmp.testing.pool")
    if module is not None:
        module.pool.close()


@pytest.fixture(scope="session")
def run_mpi() -> Callable[..., list[Any]]:
    """Return :func:`pblasmp.testing.run_mpi`, which runs a function on MPI ranks."""
    from .testing import run_mpi

    return run_mpi
