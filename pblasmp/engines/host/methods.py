# SPDX-License-Identifier: Apache-2.0
"""The algorithms of the host engine."""

from __future__ import annotations

from .. import dense
from ..protocol import Method
from ..tensor import collective, messages, shared_memory

__all__ = ["METHODS"]

METHODS: tuple[Method, ...] = (
    *collective.METHODS,
    *dense.METHODS,
    *shared_memory.METHODS,
    *messages.METHODS,
)
