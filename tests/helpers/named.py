# SPDX-License-Identifier: Apache-2.0
"""Many small cases in one test: to pytest each test of its own costs more than they do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["named"]


@contextlib.contextmanager
def named(*case: object) -> Iterator[None]:
    """Have what fails within say of which case it is. Local."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"at {', '.join(map(str, case))}") from error
