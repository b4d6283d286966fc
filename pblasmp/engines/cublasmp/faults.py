# SPDX-License-Identifier: Apache-2.0
"""Known faults of the library, by version, and how each is avoided. tests/gpu shows that each is still there.

Measured on H200 GPUs with CUDA 13.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...bindings import version_text
from ...layout import ColumnMajorProduct, MatmulProblem, MatrixDescriptor
from ...layout.descriptor import MemoryOrder

__all__ = ["avoided", "mixed_line_is_unsafe", "needs_c_in_d", "nt_is_wrong"]

_ALIGNMENT = 16  # bytes


def nt_is_wrong(version: int, form: ColumnMajorProduct) -> bool:
    """Return whether cuBLASMp ``version`` would compute wrong numbers for this product.

    op N times op T (or C) on 0.9 and 0.10, where the blocks of m, k and n are not all equal: relative errors of 0.3.
    """
    if not (form.op_a == "N" and form.op_b != "N") or form.d.grid.size == 1:
        return False
    blocks = {form.a.block[0], form.a.block[1], form.b.block[0]}
    return version >= 900 and len(blocks) > 1


def mixed_line_is_unsafe(x: MatrixDescriptor, form: ColumnMajorProduct) -> bool:
    """Return whether operand ``x`` of a product over one row or column of processes is not on D's own grid.

    Memory orders are mixed then. Such products were seen to hang on 0.10, and when is not known.
    """
    return 1 in form.d.grid.shape and not x.grid.same_ranks(form.d.grid)


def needs_c_in_d(d: Any) -> bool:
    """Return whether C must be D itself for this local array of D: a 16-bit one off the 16-byte grid.

    Where C is better aligned than D, 0.10 runs a kernel that ends with a misaligned address (seen for float16 and
    bfloat16; C and D in one place, or D without C, are right).
    """
    address, pitch = int(d.data.ptr), max(d.strides)
    return bool(d.dtype.itemsize == 2 and (address % _ALIGNMENT or pitch % _ALIGNMENT))


def avoided(p: MatmulProblem, version: int) -> tuple[MatmulProblem, tuple[str, ...]]:
    """Return a product without known faults, ``p`` itself or with operands laid out otherwise, and the reasons. Local.

    A product whose layouts are those of AllGather + GEMM is run as such. One with those of GEMM + ReduceScatter is left
    to cuBLASMp, which then sums in float32 what the scheme would sum in D's type.
    """
    if p.scheme != "gemm" or p.d.grid.size == 1:
        return p, ()
    if not replace(p, scheme="ag").faults():
        return replace(p, scheme="ag"), ()
    if not replace(p, scheme="rs").faults():
        return p, ()
    library, reasons = f"cuBLASMp {version_text(version)}", []
    form = p.column_major()
    first, second = ("b", "a") if form.swapped else ("a", "b")
    for name, x in ((first, form.a), (second, form.b)):
        if mixed_line_is_unsafe(x, form):
            moved = getattr(p, name)
            p = _with(p, name, _laid(moved, p.d, moved.order))
            reasons.append(
                f"{name} is moved to D's grid: over one line of processes {library} may hang with mixed memory orders"
            )
    if nt_is_wrong(version, p.column_major()):
        moved = getattr(p, second)
        p = _with(p, second, _laid(moved, p.d, "F" if moved.order == "C" else "C"))
        reasons.append(
            f"{second} is moved to the other memory order: {library} is wrong for op N times op T with unequal blocks"
        )
    return p, tuple(reasons)


def _with(p: MatmulProblem, name: str, x: MatrixDescriptor) -> MatmulProblem:
    return replace(p, a=x) if name == "a" else replace(p, b=x)


def _laid(x: MatrixDescriptor, d: MatrixDescriptor, order: MemoryOrder) -> MatrixDescriptor:
    """Return ``x`` in a memory order, on the grid that is D's own when both are seen in F order."""
    return replace(x, order=order, grid=d.grid if order == d.order else d.grid.T, source=(0, 0), ld=None)
