# SPDX-License-Identifier: Apache-2.0
"""The table of level-3 routines.

What calls check, the functions of ``pblasmp.pblas``, cuBLASMp's prototypes and the tables of the docs are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .sizes import Sizes

__all__ = ["GEMM", "ROUTINES", "Routine"]

_SIZES = {
    "product": Sizes({"a": "m k op_a", "b": "k n op_b", "c": "m n", "d": "m n"}),
    "sided": Sizes({"a": "side", "b": "m n", "c": "m n", "d": "m n"}),
    "updated": Sizes({"a": "n k op_a", "b": "n k op_a", "c": "n n", "d": "n n"}),
    "added": Sizes({"a": "m n op_a", "c": "m n", "d": "m n"}),
}


@dataclass(frozen=True, slots=True)
class Routine:
    """What one routine reads and writes, and how it changes if memory is taken as its transpose.

    Attributes:
        formula: the definition, for people.
        operands: the matrices it reads, of "a", "b" and "c".
        options: the options that it has, of "side", "uplo", "op_a" and "diag".
        shape: the rule of its sizes: "product", "sided" (one square operand), "updated" (D is square) or "added".
        triangle: the operand of which only the triangle ``uplo`` is touched: "a" (read) or "d" (written), or none.
        d_flips: the options that change if D is in C order: the routine then computes D's transpose.
        a_flips: the options that change if A is in C order: its memory then holds A's transpose.
        triangular: A is triangular.
        solves: the routine solves for D.
        hermitian: the triangle describes a Hermitian matrix; of real types, a symmetric one.
        swept_twice: D is updated by two products, A by B and B by A.
        real: the scalars that must be real for D to stay Hermitian.
        twin: the same routine of symmetric matrices if this is the Hermitian one, and the other way round.
        pblas: PBLAS's arguments in their order; "A" stands for a, ia, ja and desca, and so on. Empty: PBLAS has no such
            routine.
        cublasmp: cuBLASMp's arguments in their order, between the handle and the workspace; "C!" is written.
        since: the first version of cuBLASMp that has it, as ``bindings`` counts; 0: all that pblasmp supports.
        required: the operands that a call must have: without C the others are added to nothing.
        sizes: of its operands and of D.

    What can flip: "side" and "uplo"; "op", the transposition of A (and B); "conj", whether A (and B, if D is
    square) is conjugated; "alpha", whether alpha is; "swap", which of A and B comes first. Two flips cancel.
    """

    formula: str
    operands: str
    options: tuple[str, ...]
    shape: Literal["product", "sided", "updated", "added"]
    triangle: Literal["a", "d", ""]
    d_flips: frozenset[str]
    a_flips: frozenset[str]
    triangular: bool = False
    solves: bool = False
    hermitian: bool = False
    swept_twice: bool = False
    real: tuple[str, ...] = ()
    twin: str = ""
    pblas: str = ""
    cublasmp: str = ""
    since: int = 0
    required: str = field(init=False)
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        needed = self.operands if self.shape == "added" else self.operands.replace("c", "")
        object.__setattr__(self, "required", needed)
        object.__setattr__(self, "sizes", _SIZES[self.shape])

    @property
    def in_place(self) -> Literal["b", "c"]:
        """The operand that D may share its memory with."""
        return "c" if "c" in self.operands else "b"


def _routine(
    formula: str,
    operands: str,
    options: str,
    shape: str,
    triangle: str,
    d_flips: str,
    a_flips: str,
    **traits: Any,
) -> Routine:
    return Routine(
        formula, operands, tuple(options.split()), shape, triangle,  # type: ignore[arg-type]
        frozenset(d_flips.split()), frozenset(a_flips.split()), **traits,
    )  # fmt: skip


GEMM = _routine(
    "D = alpha op(A) op(B) + beta C", "abc", "op_a op_b", "product", "", "", "",
    pblas="transa transb m n k alpha A B beta C",
)  # fmt: skip
"""``matmul``, which is no ``Level3Problem``: cuBLASMp has more of it."""

_SOLVED, _SIDED = "side uplo transa diag m n alpha A B", "side uplo m n alpha A B beta C"
_RANK_K, _RANK_2K = "uplo trans n k alpha A beta C", "uplo trans n k alpha A B beta C"

ROUTINES: dict[str, Routine] = {
    "trsm": _routine(
        "op(A) D = alpha B, or D op(A) = alpha B", "ab", "side uplo op_a diag", "sided", "a", "side op", "uplo op",
        triangular=True, solves=True,
        pblas=_SOLVED, cublasmp="side uplo trans diag m n alpha A B! computeType",
    ),
    "trmm": _routine(
        "D = alpha op(A) B, or alpha B op(A)", "ab", "side uplo op_a diag", "sided", "a", "side op", "uplo op",
        triangular=True,
        pblas=_SOLVED, cublasmp="side uplo trans diag m n alpha A B C! computeType", since=900,
    ),
    "symm": _routine(
        "D = alpha A B + beta C, or alpha B A + beta C", "abc", "side uplo", "sided", "a", "side", "uplo",
        twin="hemm",
        pblas=_SIDED, cublasmp=f"{_SIDED}! computeType", since=900,
    ),
    "hemm": _routine(
        "D = alpha A B + beta C, or alpha B A + beta C",
        "abc", "side uplo", "sided", "a", "side conj", "uplo conj", hermitian=True, twin="symm",
        pblas=_SIDED, cublasmp=f"{_SIDED}! computeType", since=900,
    ),
    "syrk": _routine(
        "D = alpha op(A) op(A)^T + beta C", "ac", "uplo op_a", "updated", "d", "uplo", "op", twin="herk",
        pblas=_RANK_K, cublasmp=f"{_RANK_K}! computeType",
    ),
    "herk": _routine(
        "D = alpha op(A) op(A)^H + beta C", "ac", "uplo op_a", "updated", "d", "uplo conj", "op conj",
        hermitian=True, real=("alpha", "beta"), twin="syrk",
        pblas=_RANK_K, cublasmp=f"{_RANK_K}! computeType", since=900,
    ),
    "syr2k": _routine(
        "D = alpha (op(A) op(B)^T + op(B) op(A)^T) + beta C",
        "abc", "uplo op_a", "updated", "d", "uplo", "op", swept_twice=True, twin="her2k",
        pblas=_RANK_2K, cublasmp=f"{_RANK_2K}! computeType", since=900,
    ),
    "her2k": _routine(
        "D = alpha op(A) op(B)^H + conj(alpha) op(B) op(A)^H + beta C",
        "abc", "uplo op_a", "updated", "d", "uplo conj alpha", "op conj",
        hermitian=True, swept_twice=True, real=("beta",), twin="syr2k",
        pblas=_RANK_2K, cublasmp=f"{_RANK_2K}! computeType", since=900,
    ),
    "syrkx": _routine(
        "D = alpha op(A) op(B)^T + beta C", "abc", "uplo op_a", "updated", "d", "uplo swap", "op", twin="herkx",
        cublasmp=f"{_RANK_2K}! computeType", since=900,
    ),
    "herkx": _routine(
        "D = alpha op(A) op(B)^H + beta C", "abc", "uplo op_a", "updated", "d", "uplo swap conj", "op conj",
        hermitian=True, real=("beta",), twin="syrkx",
        cublasmp=f"{_RANK_2K}! computeType", since=900,
    ),
    "geadd": _routine(
        "D = alpha op(A) + beta C", "ac", "op_a", "added", "", "op", "op",
        pblas="trans m n alpha A beta C", cublasmp="trans m n alpha A beta C!",
    ),
    "tradd": _routine(
        "D = alpha op(A) + beta C", "ac", "uplo op_a", "added", "d", "uplo op", "op",
        pblas="uplo trans m n alpha A beta C", cublasmp="uplo trans m n alpha A beta C!",
    ),
}  # fmt: skip
"""Every routine other than GEMM by its name."""
