# SPDX-License-Identifier: Apache-2.0
"""The algorithms of the GPU engine. A new one that needs GPUs takes a row here."""

from __future__ import annotations

from .. import dense
from ..protocol import Method
from ..tensor.algorithms import MESSAGES
from . import cusolver
from .cublasmp import methods as cublasmp
from .cusolvermp import methods as cusolvermp
from .push import product as push
from .tensor import methods as tensor

__all__ = ["METHODS"]

METHODS: tuple[Method, ...] = (
    *cublasmp.METHODS,
    *tensor.METHODS,
    *push.METHODS,
    *dense.METHODS,
    MESSAGES,
    *cusolvermp.METHODS,
    *cusolver.METHODS,
)
