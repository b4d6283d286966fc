# SPDX-License-Identifier: Apache-2.0
"""Products, level-3 routines and factorisations that every engine can run. A new one is a file and a row here."""

from __future__ import annotations

from ..protocol import Method
from . import add, factor_methods, full, slabs, solve, split_k, stationary, stationary_solve, sum_over_ranks

__all__ = ["METHODS"]

METHODS: tuple[Method, ...] = (
    *split_k.METHODS,
    *slabs.METHODS,
    *stationary.METHODS,
    *solve.METHODS,
    *add.METHODS,
    *sum_over_ranks.METHODS,
    *full.METHODS,
    *stationary_solve.METHODS,
    *factor_methods.METHODS,
)
