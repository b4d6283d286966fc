# SPDX-License-Identifier: Apache-2.0
"""Known faults of the library, and how each is avoided. tests/gpu shows that each is still there.

Measured on H200 GPUs with CUDA 13. The wrong products were wrong on cuBLASMp 0.7.0 to 0.10.0 alike; all have
more than one process and blocks of m, k and n that are not all equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...bindings import version_text
from ...errors import UnsupportedError
from ...layout import ColumnMajorProduct, MatmulProblem, MatrixDescriptor

__all__ = ["avoided", "check_nccl", "is_shifted", "moves_through_host", "needs_c_in_d", "reads_b_transposed"]

_FIRST_NCCL = 22903
_ALIGNMENT = 16  # bytes


def check_nccl(version: int, nccl: int) -> None:
    """Refuse an NCCL with which this cuBLASMp cannot run every product.

    With 0.10 on NCCL 2.29.2 products of many tiles die in NCCL's proxy thread (2 x 2 processes, n = 16384, nb = 256);
    on 2.29.3, 2.29.7, 2.30.7 and 2.32.3 they are right.

    Raises:
        UnsupportedError: NCCL is too old.
    """
    if version >= 1000 and nccl < _FIRST_NCCL:
        needed, found = (f"{v // 10000}.{v // 100 % 100}.{v % 100}" for v in (_FIRST_NCCL, nccl))
        raise UnsupportedError(
            f"cuBLASMp {version_text(version)} needs NCCL {needed} or newer, found {found}:"
            " pip install -U nvidia-nccl-cu13 (nvidia-nccl-cu12 for CUDA 12)"
        )


def reads_b_transposed(form: ColumnMajorProduct) -> bool:
    """Return whether this is a product with op(B) = T or C that cuBLASMp may get wrong.

    With op(A) = N: relative errors of 0.3. With op(A) = T: errors in some rows, now and then, where blocks of D are
    wider than high on a column of processes, higher than wide on a row; on 0.7 and 0.8 some never end.
    """
    return form.op_b != "N" and _risky(form)


def is_shifted(form: ColumnMajorProduct) -> bool:
    """Return whether op(A) = T, op(B) = N and B's first column is not on the process column of D's.

    Some columns of D are wrong then, not always.
    """
    shifted = form.b.source[1] != form.d.source[1] and form.d.grid.npcol > 1
    return form.op_a != "N" and form.op_b == "N" and shifted and _risky(form)


def _risky(form: ColumnMajorProduct) -> bool:
    blocks = {*form.d.block, form.a.block[1 if form.op_a == "N" else 0]}
    return form.d.grid.size > 1 and len(blocks) > 1


def needs_c_in_d(d: Any) -> bool:
    """Return whether C must be D itself for this local array of D: a 16-bit one off the 16-byte grid.

    Where C is better aligned than D, a kernel ends with a misaligned address (0.10; float16 and bfloat16). C and D in
    one place, or D without C, are right.
    """
    address, pitch = int(d.data.ptr), max(d.strides)
    return bool(d.dtype.itemsize == 2 and (address % _ALIGNMENT or pitch % _ALIGNMENT))


def moves_through_host(version: int, source: MatrixDescriptor, target: MatrixDescriptor) -> str:  # noqa: ARG001
    """Return why a matrix is not moved by cublasMpGemr2D of ``version``, or an empty string where it is."""
    return ""


def avoided(p: MatmulProblem) -> tuple[MatmulProblem, tuple[str, ...]]:
    """Return a product without known faults, ``p`` or one with an operand laid out otherwise, and the reasons. Local.

    A product whose layouts are those of AllGather + GEMM is run as such. One with those of GEMM + ReduceScatter is left
    to cuBLASMp, which then sums in float32 what the scheme would sum in D's type.
    """
    if p.scheme != "gemm" or p.d.grid.size == 1:
        return p, ()
    if not replace(p, scheme="ag").faults():
        return replace(p, scheme="ag"), ()
    form = p.column_major()
    transposed = reads_b_transposed(form)
    if not replace(p, scheme="rs").faults() or not (transposed or is_shifted(form)):
        return p, ()
    name = "a" if form.swapped else "b"
    x = _laid_for(form, getattr(p, name), flip=transposed)
    why = (
        f"{name} is moved to the other memory order: cuBLASMp is wrong for op(B) = T with unequal blocks"
        if transposed
        else f"{name} is moved to D's processes: cuBLASMp is wrong where blocks and sources are unequal"
    )
    return (replace(p, a=x) if name == "a" else replace(p, b=x)), (why,)


def _laid_for(form: ColumnMajorProduct, x: MatrixDescriptor, *, flip: bool) -> MatrixDescriptor:
    """Return ``x``, which is B of ``form``, as a k × n matrix whose columns lie on the processes that D's do."""
    shape, block = (form.b.shape[::-1], form.b.block[::-1]) if flip else (form.b.shape, form.b.block)
    laid = MatrixDescriptor(shape, block, form.d.grid, (0, form.d.source[1]), x.dtype, "F")
    return laid if (x.order == "F") != flip else laid.T
