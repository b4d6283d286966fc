# SPDX-License-Identifier: Apache-2.0
"""The algorithms of the host engine."""

from __future__ import annotations

from .. import dense
from ..protocol import Method
from ..tensor import messages, shared_memory
from .scalapack import methods as scalapack

__all__ = ["METHODS"]

METHODS: tuple[Method, ...] = (
    *dense.METHODS,
    *scalapack.METHODS,
    *shared_memory.METHODS,
    *messages.METHODS,
)
