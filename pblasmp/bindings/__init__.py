# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp 0.5 to 0.10 and cuSOLVERMp 0.8 to 0.9 from Python: tables of C functions, enumerations, how they are found.

Nothing is loaded before ``Library()`` or ``SolverLibrary()`` is made.
"""

from __future__ import annotations

from .c_library import Library, SolverLibrary, version_text
from .enums import (
    ComputeType,
    DataType,
    DiagType,
    EigMode,
    FillMode,
    GridLayout,
    GridMapping,
    MatmulAlgoType,
    MatmulAttribute,
    MatmulEpilogue,
    MatrixScale,
    Operation,
    ResultScheme,
    SideMode,
    SolverStatus,
    Status,
)
from .table import FUNCTIONS, SOLVER_FUNCTIONS, Argument, Function, LoggerCallback, ctype

__all__ = [
    "FUNCTIONS",
    "SOLVER_FUNCTIONS",
    "Argument",
    "ComputeType",
    "DataType",
    "DiagType",
    "EigMode",
    "FillMode",
    "Function",
    "GridLayout",
    "GridMapping",
    "Library",
    "LoggerCallback",
    "MatmulAlgoType",
    "MatmulAttribute",
    "MatmulEpilogue",
    "MatrixScale",
    "Operation",
    "ResultScheme",
    "SideMode",
    "SolverLibrary",
    "SolverStatus",
    "Status",
    "ctype",
    "version_text",
]
