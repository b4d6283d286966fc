# SPDX-License-Identifier: Apache-2.0
"""Other limits between the ways in which direct calls are computed: with them small matrices take every way."""

import contextlib

from pblasmp.engines.host.direct.calls import LIMITS


@contextlib.contextmanager
def changed_limits(**changes):
    """Within, limits have other values; the same on every rank."""
    saved = {name: getattr(LIMITS, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(LIMITS, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(LIMITS, name, value)
