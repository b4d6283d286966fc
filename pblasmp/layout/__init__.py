# SPDX-License-Identifier: Apache-2.0
"""The pure half of pblasmp: grids, descriptors and problems as values. No MPI, no GPU, no state."""

from __future__ import annotations

from .axis import Axis, numroc
from .descriptor import MatrixDescriptor
from .grid import Grid
from .problem import ColumnMajorProduct, MatmulProblem

__all__ = ["Axis", "ColumnMajorProduct", "Grid", "MatmulProblem", "MatrixDescriptor", "numroc"]
