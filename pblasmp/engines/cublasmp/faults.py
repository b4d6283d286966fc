# SPDX-License-Identifier: Apache-2.0
"""Known faults of the library, by version, and how each is avoided. tests/gpu shows that each is still there.

Measured on H200 GPUs with CUDA 13.
"""

from __future__ import annotations

from ...layout import ColumnMajorProduct, MatrixDescriptor

__all__ = ["mixed_grids_hang", "nt_is_wrong"]


def nt_is_wrong(version: int, form: ColumnMajorProduct) -> bool:
    """Return whether cuBLASMp ``version`` would compute wrong numbers for this product.

    op N times op T (or C) on 0.9 and 0.10, where the blocks of m, k and n are not all equal: relative errors of 0.3.
    """
    if not (form.op_a == "N" and form.op_b != "N") or form.d.grid.size == 1:
        return False
    blocks = {form.a.block[0], form.a.block[1], form.b.block[0]}
    return version >= 900 and len(blocks) > 1


def mixed_grids_hang(version: int, x: MatrixDescriptor, form: ColumnMajorProduct) -> bool:  # noqa: ARG001
    """Return whether operand ``x`` must be on D's own grid: cuBLASMp ``version`` would hang.

    A product over one row or one column of processes with an operand on the transposed grid: memory orders are mixed.
    """
    return 1 in form.d.grid.shape and not x.grid.same_ranks(form.d.grid)
