# SPDX-License-Identifier: Apache-2.0
"""The tables of routines: level 3, and levels 1 and 2, whose routines are mostly level 3's on vectors as matrices.

What calls check, the functions of ``pblasmp.pblas``, cuBLASMp's prototypes and the docs' tables are made from them.
Sizes of operands are letters: "m k op_a" are m rows and k columns, exchanged unless the option ``op_a`` is "N". "side"
is a square matrix, of m rows if ``side`` is "L", else of n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import itemgetter
from typing import Any, Literal

WORDS = ("side", "uplo", "op_a", "op_b", "diag")
"""The options of routines, in the order in which they are handed on."""

_LEGAL = frozenset(product("LR", "LU", "NTC", "NTC", "NU"))
_Key = tuple[tuple[str, ...], tuple[bool, ...]]
_Extents = Callable[[Sequence[int]], Any]


class Sizes:
    """What the sizes of A, B, C and D have to do with each other. Local.

    The texts are rows, columns and perhaps an option, by operand.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        # by options and what is absent: what takes the extents of one matrix, and those that are to be equal
        self._equal: dict[_Key, tuple[_Extents, _Extents]] = {}

    def fit(self, extents: Sequence[int], words: tuple[str, ...], absent: tuple[bool, ...]) -> bool:
        """Return whether operands fit together, and options, in the order of ``WORDS``, are legal. Local.

        Extents are of A, B, C and D, of which B, C and D may be absent.
        """
        equal = self._equal.get((words, absent))
        if equal is None:
            if words not in _LEGAL:
                return False
            equal = self._equal[words, absent] = self._same_letters(words, absent)
        of_one, of_others = equal
        return bool(of_one(extents) == of_others(extents))

    def _same_letters(self, words: tuple[str, ...], absent: tuple[bool, ...]) -> tuple[_Extents, _Extents]:
        options = dict(zip(WORDS, words, strict=True))
        first: dict[str, int] = {}  # A and B, which come first, are there if they have a size
        equal = [(0, 0)]
        for place, operand in enumerate("abcd"):
            if place and absent[place - 1]:
                continue
            for axis, letter in enumerate(letters(self.texts.get(operand, ""), options)):
                here = 2 * place + axis
                at = first.setdefault(letter, here)
                if at != here:
                    equal.append((at, here))
        of_one, of_others = zip(*equal, strict=True)
        return itemgetter(*of_one), itemgetter(*of_others)


def letters(text: str, options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the letters of the rows and columns of an operand, as it is stored. Local."""
    if text == "side":
        return ("m", "m") if options["side"] == "L" else ("n", "n")
    rows, cols, option = (*text.split(), "", "", "")[:3]
    if not text:
        return ()
    return (cols, rows) if option and options[option] != "N" else (rows, cols)


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
    def kind(self) -> str:
        """The word for its matrix of which a triangle is read."""
        return "triangular" if self.triangular else "Hermitian" if self.hermitian else "symmetric"

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
