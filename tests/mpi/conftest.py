# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK for tests; and ``mpirun -n 4 python -m pytest tests/mpi``: all ranks run pytest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pblasmp.engines.host.mpi_libraries import SCALAPACK
from reference.scalapack import locate
from tests.helpers import spectral_cases
from tests.helpers.under_mpirun import (  # noqa: F401 - hooks
    pytest_configure,
    pytest_runtest_logreport,
    pytest_runtest_logstart,
)


@pytest.fixture(scope="session")
def scalapack() -> str:
    """The ScaLAPACK that is here; without one skip, or fail where PBLASMP_SCALAPACK says that it is required."""
    found = next((flavor for flavor in ("debian", "mkl") if locate(flavor)), None)
    if found is None:
        missing = "no ScaLAPACK: python -m benchmarks.fetch_scalapack --only mkl fetches one"
        assert os.environ.get("PBLASMP_SCALAPACK") != "required", missing
        pytest.skip(missing)
    return found


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the ScaLAPACK that contexts find."""
    found = spectral_cases.library()
    monkeypatch.setenv(SCALAPACK.environment, str(found))
    return found


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts find no ScaLAPACK."""
    monkeypatch.setenv(SCALAPACK.environment, "/nowhere/libscalapack.so")
