# SPDX-License-Identifier: Apache-2.0
"""The table of level-3 routines other than GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ROUTINES", "Routine"]


@dataclass(frozen=True, slots=True)
class Routine:
    """What one routine reads and writes, and how it changes if memory is taken as its transpose.

    Attributes:
        formula: the definition, for people.
        operands: the matrices it reads, of "a", "b" and "c".
        options: the options that it has, of "side", "uplo", "op_a" and "diag".
        shape: the rule of its sizes: "sided" (one square operand), "updated" (D is square) or "added".
        triangle: the operand of which only the triangle ``uplo`` is touched: "a" (read) or "d" (written), or none.
        d_flips: what flips when D is in C order: the routine then computes D's transpose.
        a_flips: what flips when A is in C order: its memory then holds A's transpose.
        triangular: A is triangular.
        solves: the routine solves for D.
        hermitian: the triangle describes a Hermitian matrix; of real types, a symmetric one.
        swept_twice: D is updated by two products, A by B and B by A.
        real: the scalars that must be real for D to stay Hermitian.
        twin: the same routine of symmetric matrices if this is the Hermitian one, and the other way round.

    What can flip: "side" and "uplo"; "op", the transposition of A (and B); "conj", whether A (and B, if D is
    square) is conjugated; "alpha", whether alpha is; "swap", which of A and B comes first. Two flips cancel.
    """

    formula: str
    operands: str
    options: tuple[str, ...]
    shape: Literal["sided", "updated", "added"]
    triangle: Literal["a", "d", ""]
    d_flips: frozenset[str]
    a_flips: frozenset[str]
    triangular: bool = False
    solves: bool = False
    hermitian: bool = False
    swept_twice: bool = False
    real: tuple[str, ...] = ()
    twin: str = ""

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


ROUTINES: dict[str, Routine] = {
    "trsm": _routine(
        "op(A) D = alpha B, or D op(A) = alpha B", "ab", "side uplo op_a diag", "sided", "a", "side op", "uplo op",
        triangular=True, solves=True,
    ),
    "trmm": _routine(
        "D = alpha op(A) B, or alpha B op(A)", "ab", "side uplo op_a diag", "sided", "a", "side op", "uplo op",
        triangular=True,
    ),
    "symm": _routine(
        "D = alpha A B + beta C, or alpha B A + beta C", "abc", "side uplo", "sided", "a", "side", "uplo",
        twin="hemm",
    ),
    "hemm": _routine(
        "D = alpha A B + beta C, or alpha B A + beta C",
        "abc", "side uplo", "sided", "a", "side conj", "uplo conj", hermitian=True, twin="symm",
    ),
    "syrk": _routine(
        "D = alpha op(A) op(A)^T + beta C", "ac", "uplo op_a", "updated", "d", "uplo", "op", twin="herk"
    ),
    "herk": _routine(
        "D = alpha op(A) op(A)^H + beta C", "ac", "uplo op_a", "updated", "d", "uplo conj", "op conj",
        hermitian=True, real=("alpha", "beta"), twin="syrk",
    ),
    "syr2k": _routine(
        "D = alpha (op(A) op(B)^T + op(B) op(A)^T) + beta C",
        "abc", "uplo op_a", "updated", "d", "uplo", "op", swept_twice=True, twin="her2k",
    ),
    "her2k": _routine(
        "D = alpha op(A) op(B)^H + conj(alpha) op(B) op(A)^H + beta C",
        "abc", "uplo op_a", "updated", "d", "uplo conj alpha", "op conj",
        hermitian=True, swept_twice=True, real=("beta",), twin="syr2k",
    ),
    "syrkx": _routine(
        "D = alpha op(A) op(B)^T + beta C", "abc", "uplo op_a", "updated", "d", "uplo swap", "op", twin="herkx"
    ),
    "herkx": _routine(
        "D = alpha op(A) op(B)^H + beta C", "abc", "uplo op_a", "updated", "d", "uplo swap conj", "op conj",
        hermitian=True, real=("beta",), twin="syrkx",
    ),
    "geadd": _routine("D = alpha op(A) + beta C", "ac", "op_a", "added", "", "op", "op"),
    "tradd": _routine("D = alpha op(A) + beta C", "ac", "uplo op_a", "added", "d", "uplo op", "op"),
}  # fmt: skip
"""Every routine by its name."""
