# SPDX-License-Identifier: Apache-2.0
"""Known faults of the library, and how each is avoided. tests/gpu shows that each still exists.

Measured on H200 GPUs with CUDA 13 and cuBLASMp 0.7.0, 0.8.1, 0.9.1 and 0.10.0. All wrong products have more than one
process and blocks of m, k and n that are not all equal; op(A) = op(B) = N was never wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....bindings import version_text
from ....errors import UnsupportedError
from ....layout import ColumnMajorProduct, Level3Problem, MatmulProblem, MatrixDescriptor

_FIRST_NCCL = 22903
_FIRST_SUMS, _FIRST_SYR2K = 1000, 1000  # versions
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

    With op(A) = N: relative errors of 0.3. With op(A) = T: occasional errors in some rows, if blocks of D are wider
    than high on a column of processes, or higher than wide on a row; on 0.7 and 0.8 some products never end.
    """
    return form.op_b != "N" and _risky(form)


def reads_a_transposed(form: ColumnMajorProduct, version: int) -> bool:
    """Return whether this is a product with op(A) = T or C that 0.8 and older may get wrong.

    On a row of processes, whatever the sources.
    """
    return version < 900 and form.op_a != "N" and _risky(form)


def is_shifted(form: ColumnMajorProduct) -> bool:
    """Return whether op(A) = T, op(B) = N and B's first column is not on the process column of D's.

    Then some columns of D are sometimes wrong.
    """
    shifted = form.b.source[1] != form.d.source[1] and form.d.grid.npcol > 1
    return form.op_a != "N" and form.op_b == "N" and shifted and _risky(form)


def _risky(form: ColumnMajorProduct) -> bool:
    blocks = {*form.d.block, form.a.block[1 if form.op_a == "N" else 0]}
    return form.d.grid.size > 1 and len(blocks) > 1


def needs_c_in_d(d: Any) -> bool:
    """Return whether C must be D itself for this local array of D: a 16-bit one off the 16-byte grid.

    If C is better aligned than D, a kernel fails with a misaligned address (0.10; float16 and bfloat16). Results are
    right if C is D, or if there is no C.
    """
    address, pitch = int(d.data.ptr), max(d.strides)
    return bool(d.dtype.itemsize == 2 and (address % _ALIGNMENT or pitch % _ALIGNMENT))


def ends_before_peers_have_read(problem: MatmulProblem, algo: str) -> bool:
    """Return whether a call ends on one GPU while peers may still read its workspace, or its symmetric operand.

    The next call there writes what a late peer then multiplies. Shown with 0.10: AllGather + GEMM and GEMM +
    ReduceScatter by "default" and "split_p2p" were wrong in up to 131 of 300 runs on two H200 beside a GEMM on a side
    stream or another job on the GPUs, and never with a barrier behind the call. "no_overlap" was right without one.
    """
    return problem.scheme != "gemm" and algo != "no_overlap" and problem.d.grid.size > 1


def sums_may_hang(version: int, d: MatrixDescriptor) -> bool:
    """Return whether cublasMpGeadd and cublasMpTradd of ``version`` must not move data between processes.

    With 0.10, 5,000 random ones were right, without a hang; older versions have not been tried.
    """
    return version < _FIRST_SUMS and d.grid.size > 1


def level3_is_wrong(problem: Level3Problem, alpha: complex, version: int) -> str:
    """Return why cuBLASMp ``version`` gets a level-3 routine wrong, or must not be asked; or an empty string.

    syr2k of 0.9.1 takes the conjugate of a complex alpha in the second of its products, as her2k does.
    """
    if version >= _FIRST_SYR2K or problem.routine != "syr2k" or complex(alpha).imag == 0:
        return ""
    return (
        f"cublasMpSyr2k of cuBLASMp {version_text(version)} is wrong for a complex alpha: scale A and take alpha = 1,"
        f" or use {version_text(_FIRST_SYR2K)}"
    )


def reads_c_with_beta_0(problem: Level3Problem) -> bool:
    """Return whether cuBLASMp multiplies C by a beta of 0 instead of leaving it alone: NaN there stays NaN.

    Seen in cublasMpTradd of 0.10, for upper triangles in column-major terms.
    """
    return problem.routine == "tradd"


def avoided(p: MatmulProblem, version: int) -> tuple[MatmulProblem, tuple[str, ...]]:
    """Return a product without known faults, ``p`` or one with operands in other layouts, and the reasons. Local.

    A product whose layouts are those of AllGather + GEMM is run as such. One with those of GEMM + ReduceScatter is left
    to cuBLASMp, which then sums in float32 what the scheme would sum in D's type.
    """
    if p.scheme != "gemm" or p.d.grid.size == 1:
        return p, ()
    if not replace(p, scheme="allgather_matmul").faults():
        return replace(p, scheme="allgather_matmul"), ()
    if not replace(p, scheme="matmul_reduce_scatter").faults():
        return p, ()
    form, library = p.column_major(), f"cuBLASMp {version_text(version)}"
    first, second = ("b", "a") if form.swapped else ("a", "b")
    moved: dict[str, Any] = {}
    reasons = []
    if reads_a_transposed(form, version):
        moved[first] = _laid_for(form.d, getattr(p, first), form.a, outer=0, flip=True)
        reasons.append(f"{first} is moved to the other memory order: {library} is wrong for op(A) = T")
    if reads_b_transposed(form):
        moved[second] = _laid_for(form.d, getattr(p, second), form.b, outer=1, flip=True)
        reasons.append(f"{second} is moved to the other memory order: {library} is wrong for op(B) = T")
    elif is_shifted(form) and not moved:
        moved[second] = _laid_for(form.d, getattr(p, second), form.b, outer=1, flip=False)
        reasons.append(f"{second} is moved to D's processes: {library} is wrong for unequal sources")
    return replace(p, **moved), tuple(f"{reason} with unequal blocks" for reason in reasons)


def _laid_for(
    d: MatrixDescriptor, x: MatrixDescriptor, seen: MatrixDescriptor, *, outer: int, flip: bool
) -> MatrixDescriptor:
    """Return operand ``x``, which the F-ordered product sees as ``seen``, on D's processes.

    Args:
        d: D of the column-major form.
        outer: which dimension of D it shares, 0 for A and 1 for B; in the result it is along the same processes.
        flip: whether ``x`` moves to the other memory order, so that the product no longer transposes it.
    """
    shape, block = (seen.shape[::-1], seen.block[::-1]) if flip else (seen.shape, seen.block)
    source = (d.source[0], 0) if outer == 0 else (0, d.source[1])
    laid = MatrixDescriptor(shape, block, d.grid, source, x.dtype, "F")
    return laid if (x.order == "F") != flip else laid.T
