# SPDX-License-Identifier: Apache-2.0
"""The pure half of pblasmp: grids, descriptors and problems as values. No MPI, no GPU, no state."""

from __future__ import annotations

from .axis import Axis, numroc
from .descriptor import MatrixDescriptor
from .factor_problem import FactorProblem
from .grid import Grid, as_block, as_grid
from .level3_problem import ColumnMajorLevel3, Level3Problem
from .parallel import ParallelProblem
from .pieces import Trapezoid
from .problem import ColumnMajorProduct, MatmulProblem

__all__ = [
    "Axis",
    "ColumnMajorLevel3",
    "ColumnMajorProduct",
    "FactorProblem",
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
