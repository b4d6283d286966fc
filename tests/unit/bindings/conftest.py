# SPDX-License-Identifier: Apache-2.0
"""The recorder of calls and a library over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pblasmp.bindings import Library
from tests.helpers.recorder import Recorder


@pytest.fixture
def recorder(stand_in: Callable[..., str]) -> Iterator[Recorder]:
    with Recorder(stand_in(1000)) as recorder:
        yield recorder


@pytest.fixture
def library(recorder: Recorder) -> Library:
    library = Library(recorder.path)
    recorder.clear()
    return library
