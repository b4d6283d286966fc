# SPDX-License-Identifier: Apache-2.0
"""The names of the four tensor-parallel products, in one table: functions, schemes, files and options use these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FORMS", "Form", "FormNames"]

Form = Literal["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather"]
"""A tensor-parallel product, by the name of its public function."""


@dataclass(frozen=True, slots=True)
class FormNames:
    """What a tensor-parallel product is called.

    Attributes:
        short: a short form, with which names of files begin.
        title: as papers and cuBLASMp's documentation call it.
    """

    short: str
    title: str


FORMS: dict[Form, FormNames] = {
    "allgather_matmul": FormNames("ag", "AllGather + GEMM"),
    "matmul_reduce_scatter": FormNames("rs", "GEMM + ReduceScatter"),
    "matmul_allreduce": FormNames("ar", "GEMM + AllReduce"),
    "matmul_allgather": FormNames("ga", "GEMM + AllGather of the output"),
}
"""Every tensor-parallel product by its name."""
