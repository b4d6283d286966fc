# SPDX-License-Identifier: Apache-2.0
"""Products, level-3 routines and factorizations that every engine can run. A new one is a file and a row here."""

from __future__ import annotations

from ..protocol import Method
from . import add, factor_methods, slab_products, solve, stationary, steps, summed

__all__ = ["METHODS"]

METHODS: tuple[Method, ...] = (
    *summed.METHODS,
    *slab_products.METHODS,
    *stationary.METHODS,
    *solve.METHODS,
    *add.METHODS,
    *steps.METHODS,
    *factor_methods.METHODS,
)
