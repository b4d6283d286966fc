# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp 0.5 to 0.10 from Python: a table of its C functions, its enumerations, how its library is found.

Nothing is loaded before ``Library()`` is made.
"""

from __future__ import annotations

from .enums import (
    ComputeType,
    DataType,
    DiagType,
    EmulationStrategy,
    FillMode,
    GridLayout,
    MantissaControl,
    MatmulAlgoType,
    MatmulAttribute,
    MatmulEpilogue,
    MatrixScale,
    Operation,
    ResultScheme,
    SideMode,
    SpecialValuesSupport,
    Status,
)
from .library import Library, version_text
from .table import FUNCTIONS, Argument, Function, LoggerCallback, ctype

__all__ = [
    "FUNCTIONS",
    "Argument",
    "ComputeType",
    "DataType",
    "DiagType",
    "EmulationStrategy",
    "FillMode",
    "Function",
    "GridLayout",
    "Library",
    "LoggerCallback",
    "MantissaControl",
    "MatmulAlgoType",
    "MatmulAttribute",
    "MatmulEpilogue",
    "MatrixScale",
    "Operation",
    "ResultScheme",
    "SideMode",
    "SpecialValuesSupport",
    "Status",
    "ctype",
    "version_text",
]
