# SPDX-License-Identifier: Apache-2.0
"""The table of the level-1 and level-2 routines: what they compute, on what, and under which names PBLAS has them.

The functions of ``pblasmp.pblas``, the checks of arguments and the tables of the docs are made from it. A level-2
routine, and some of level 1, is a level-3 routine whose vectors are matrices of one column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["VECTOR_ROUTINES", "VectorRoutine"]


@dataclass(frozen=True, slots=True)
class VectorRoutine:
    """What one routine reads and writes.

    Attributes:
        formula: the definition, for people.
        sizes: by operand, in the order of the function's arguments: rows and columns of A, as "m n"; the length of a
            vector, followed by its length if ``op_a`` is not "N", if that differs.
        written: the operands that PBLAS overwrites; empty if the result is a number.
        twin: the level-3 routine that computes it; empty if there is none.
        passes: the twin's operands ("a", "b", "c"), each with the operand that takes its place.
        options: its options, of "uplo", "op_a" and "diag".
        fixed: options of the twin that never change.
        real: the scalars that must be real.
        adds: the result is added to what PBLAS overwrites, with no factor.
        pblas: PBLAS's arguments in their order; "A" stands for a, ia, ja and desca, "X" for x, ix, jx, descx and incx.
        names: PBLAS's names, each with the letter of its element type.
    """

    formula: str
    sizes: Mapping[str, str]
    written: str
    pblas: str
    names: Mapping[str, str]
    twin: str = ""
    passes: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    fixed: Mapping[str, str] = field(default_factory=dict)
    real: tuple[str, ...] = ()
    adds: bool = False

    @property
    def level(self) -> int:
        """2 if it has a matrix, else 1."""
        return 2 if "a" in self.sizes else 1

    @property
    def optional(self) -> str:
        """The operand that may be absent: the one that is scaled or added to, if it is not the only one."""
        return self.passes.get("c", "") if self.level == 2 else ""


def _names(pattern: str, letters: str) -> dict[str, str]:
    """Return names for several types: ``p?gemv`` with a letter in the place of the question mark."""
    return {pattern.replace("?", letter): letter for letter in letters}


_REAL, _COMPLEX, _ALL = "sd", "cz", "sdcz"
_NORMS = {"s": "s", "d": "d", "sc": "c", "dz": "z"}  # a real number for a vector of another type

VECTOR_ROUTINES: dict[str, VectorRoutine] = {
    "dot": VectorRoutine(
        "x^T y", {"x": "n", "y": "n"}, "", "n dot X Y",
        _names("p?dot", _REAL) | _names("p?dotu", _COMPLEX),
    ),
    "dotc": VectorRoutine("x^H y", {"x": "n", "y": "n"}, "", "n dot X Y", _names("p?dotc", _COMPLEX)),
    "nrm2": VectorRoutine(
        "the square root of x^H x", {"x": "n"}, "", "n norm2 X",
        {f"p{prefix}nrm2": letter for prefix, letter in _NORMS.items()},
    ),
    "asum": VectorRoutine(
        "the sum of abs(Re x_i) + abs(Im x_i)", {"x": "n"}, "", "n asum X",
        {f"p{prefix}asum": letter for prefix, letter in _NORMS.items()},
    ),
    "amax": VectorRoutine(
        "the element with the largest abs(Re x_i) + abs(Im x_i), and its index", {"x": "n"}, "", "n amax indx X",
        _names("p?amax", _ALL),
    ),
    "axpy": VectorRoutine(
        "y = alpha x + y", {"x": "n", "y": "n"}, "y", "n alpha X Y", _names("p?axpy", _ALL),
        twin="geadd", passes={"a": "x", "c": "y"}, adds=True,
    ),
    "scal": VectorRoutine(
        "x = alpha x", {"x": "n"}, "x", "n alpha X",
        _names("p?scal", _ALL) | {"pcsscal": "c", "pzdscal": "z"}, twin="geadd", passes={"a": "x"},
    ),
    "copy": VectorRoutine(
        "y = x", {"x": "n", "y": "n"}, "y", "n X Y", _names("p?copy", _ALL),
        twin="geadd", passes={"a": "x"},
    ),
    "swap": VectorRoutine("x = y and y = x, at once", {"x": "n", "y": "n"}, "xy", "n X Y", _names("p?swap", _ALL)),
    "gemv": VectorRoutine(
        "y = alpha op(A) x + beta y", {"a": "m n", "x": "n m", "y": "m n"}, "y", "trans m n alpha A X beta Y",
        _names("p?gemv", _ALL), "gemm", {"a": "a", "b": "x", "c": "y"}, ("op_a",),
    ),
    "symv": VectorRoutine(
        "y = alpha A x + beta y, A being symmetric", {"a": "n n", "x": "n", "y": "n"}, "y",
        "uplo n alpha A X beta Y", _names("p?symv", _REAL), "symm", {"a": "a", "b": "x", "c": "y"}, ("uplo",),
    ),
    "hemv": VectorRoutine(
        "y = alpha A x + beta y, A being Hermitian", {"a": "n n", "x": "n", "y": "n"}, "y",
        "uplo n alpha A X beta Y", _names("p?hemv", _COMPLEX), "hemm", {"a": "a", "b": "x", "c": "y"}, ("uplo",),
    ),
    "trmv": VectorRoutine(
        "x = op(A) x, A being triangular", {"a": "n n", "x": "n"}, "x", "uplo trans diag n A X",
        _names("p?trmv", _ALL), "trmm", {"a": "a", "b": "x"}, ("uplo", "op_a", "diag"),
    ),
    "trsv": VectorRoutine(
        "x = op(A)^-1 x, A being triangular", {"a": "n n", "x": "n"}, "x", "uplo trans diag n A X",
        _names("p?trsv", _ALL), "trsm", {"a": "a", "b": "x"}, ("uplo", "op_a", "diag"),
    ),
    "ger": VectorRoutine(
        "A = alpha x y^T + A", {"x": "m", "y": "n", "a": "m n"}, "a", "m n alpha X Y A",
        _names("p?ger", _REAL) | _names("p?geru", _COMPLEX),
        "gemm", {"a": "x", "b": "y", "c": "a"}, fixed={"op_b": "T"}, adds=True,
    ),
    "gerc": VectorRoutine(
        "A = alpha x y^H + A", {"x": "m", "y": "n", "a": "m n"}, "a", "m n alpha X Y A",
        _names("p?gerc", _COMPLEX), "gemm", {"a": "x", "b": "y", "c": "a"}, fixed={"op_b": "C"}, adds=True,
    ),
    "syr": VectorRoutine(
        "A = alpha x x^T + A, A being symmetric", {"x": "n", "a": "n n"}, "a", "uplo n alpha X A",
        _names("p?syr", _REAL), "syrk", {"a": "x", "c": "a"}, ("uplo",), adds=True,
    ),
    "her": VectorRoutine(
        "A = alpha x x^H + A, A being Hermitian", {"x": "n", "a": "n n"}, "a", "uplo n alpha X A",
        _names("p?her", _COMPLEX), "herk", {"a": "x", "c": "a"}, ("uplo",), real=("alpha",), adds=True,
    ),
    "syr2": VectorRoutine(
        "A = alpha x y^T + alpha y x^T + A, A being symmetric", {"x": "n", "y": "n", "a": "n n"}, "a",
        "uplo n alpha X Y A", _names("p?syr2", _REAL), "syr2k", {"a": "x", "b": "y", "c": "a"}, ("uplo",), adds=True,
    ),
    "her2": VectorRoutine(
        "A = alpha x y^H + conj(alpha) y x^H + A, A being Hermitian", {"x": "n", "y": "n", "a": "n n"}, "a",
        "uplo n alpha X Y A", _names("p?her2", _COMPLEX), "her2k", {"a": "x", "b": "y", "c": "a"}, ("uplo",), adds=True,
    ),
}  # fmt: skip
"""Every routine by its name."""
