# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: the fixture ``run_mpi``.

A project asks for it with ``pytest_plugins = ["pblasmp.pytest_plugin"]`` in its conftest.py. It loads nothing else
until a test asks for ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def run_mpi() -> Callable[..., list[Any]]:
    """Return :func:`pblasmp.testing.run_mpi`, which runs a function on MPI ranks."""
    from .testing import run_mpi

    return run_mpi
