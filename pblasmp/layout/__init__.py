# SPDX-License-Identifier: Apache-2.0
"""The pure half of pblasmp: grids, descriptors and problems as values. No MPI, no GPU, no state."""

from __future__ import annotations

import importlib

from .axis import Axis, numroc
from .descriptor import MatrixDescriptor
from .grid import Grid, as_block, as_grid
from .level3 import ColumnMajorLevel3, Level3Problem
from .parallel import ParallelProblem
from .problem import ColumnMajorProduct, MatmulProblem
from .trapezoid import Trapezoid

__all__ = [
    "Axis",
    "ColumnMajorLevel3",
    "ColumnMajorProduct",
    "Grid",
    "Level3Problem",
    "MatmulProblem",
    "MatrixDescriptor",
    "ParallelProblem",
    "Trapezoid",
    "as_block",
    "as_grid",
    "numroc",
]


def __getattr__(name: str) -> object:
    """Import a module of this package when it is first used, as ``pblasmp.layout.files``."""
    module = f"{__name__}.{name}"
    try:
        if not name.startswith("_"):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
