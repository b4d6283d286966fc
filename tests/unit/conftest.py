# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for cuBLASMp, compiled once per version."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.helpers.recorder import build


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Returns the path of the stand-in for a version, which may lack some functions."""

    @functools.cache
    def make(version: int = 1000, *omit: str) -> str:
        return build(tmp_path_factory.mktemp(f"cublasmp-{version}-"), version, omit=omit)

    return make


@pytest.fixture
def path(stand_in: Callable[..., str]) -> str:
    """The path of the stand-in for version 0.10."""
    return stand_in(1000)
