# SPDX-License-Identifier: Apache-2.0
"""Level3Problem: a level-3 PBLAS routine other than GEMM as descriptors, its faults, its column-major form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..dtypes import DTYPES, is_float8
from ..errors import LayoutError
from .descriptor import MatrixDescriptor, MemoryOrder
from .grid import one_of
from .problem import Op
from .trapezoid import Trapezoid

__all__ = ["ROUTINES", "ColumnMajorLevel3", "Diag", "Level3Problem", "Routine", "Side", "Uplo"]

Side = Literal["L", "R"]
Uplo = Literal["L", "U"]
Diag = Literal["N", "U"]

_LEGAL = {"side": ("L", "R"), "uplo": ("L", "U"), "op_a": ("N", "T", "C"), "diag": ("N", "U")}
_DEFAULTS = {"side": "L", "uplo": "L", "op_a": "N", "diag": "N"}
_OTHER = {"L": "R", "R": "L"}
_MIRRORED: dict[Uplo, Uplo] = {"L": "U", "U": "L"}


@dataclass(frozen=True, slots=True)
class Routine:
    """What one routine reads and writes, and what becomes of it when memory is seen transposed.

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
        swept_twice: D is updated by two products, of A and B and of B and A.
        real: the scalars that have to be real for D to stay Hermitian.
        twin: the same routine of symmetric matrices where this is the Hermitian one, and the other way round.

    What can flip: "side" and "uplo"; "op", the transposition of A (and B); "conj", whether A (and B, where D is
    square) is conjugated; "alpha", whether alpha is; "swap", which of A and B comes first. What flips twice stays.
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


@dataclass(frozen=True, slots=True)
class ColumnMajorLevel3:
    """The same routine on the same memory with every matrix F-ordered, as BLAS and cuBLASMp know it.

    Attributes:
        problem: F-ordered descriptors, and the options that go with them.
        conjugated: the operands of ``problem`` ("a" or "ab") to conjugate first; none for real types.
        relaid: the caller's operands (of "b" and "c") whose memory order is not the one that the routine wants: copy
            each locally into the other order first. ``problem`` has the copy's descriptor.
        swapped: ``problem.a`` is the caller's B, ``problem.b`` the caller's A.
        conj_alpha: alpha is to be conjugated.
    """

    problem: Level3Problem
    conjugated: str
    relaid: str
    swapped: bool
    conj_alpha: bool


@dataclass(frozen=True, slots=True)
class Level3Problem:
    """A routine of ``ROUTINES`` on distributed matrices. Local.

    Args:
        routine: its name.
        a, d: descriptors of A and of the result D.
        b, c: descriptors of B and C; None where the routine has none, or C is not given.
        side: "L" or "R": on which side of B the square operand A stands.
        uplo: "L" or "U": the triangle of A that is read, or of D that is written.
        op_a: "N", "T" or "C", for the rank-k updates the op of B, too.
        diag: "U": A has ones on its diagonal, which is not read.

    Raises:
        LayoutError: the routine or an option is unknown, an operand is no descriptor, or is one too many or too few.
    """

    routine: str
    a: MatrixDescriptor
    d: MatrixDescriptor
    b: MatrixDescriptor | None = None
    c: MatrixDescriptor | None = None
    side: Side = "L"
    uplo: Uplo = "L"
    op_a: Op = "N"
    diag: Diag = "N"

    def __post_init__(self) -> None:
        if self.routine not in ROUTINES:
            raise LayoutError(f"routine: expected one of {', '.join(ROUTINES)}, got {self.routine!r}")
        has = ROUTINES[self.routine]
        for name in "abcd":
            value = getattr(self, name)
            if name not in (*has.operands, "d") and value is not None:
                raise LayoutError(f"{name}: {self.routine} has no such operand")
            optional = name == "c" or name not in (*has.operands, "d")
            if not isinstance(value, MatrixDescriptor) and not (optional and value is None):
                raise LayoutError(f"{name}: expected a MatrixDescriptor, got {value!r}")
        for name, legal in _LEGAL.items():
            value = getattr(self, name)
            if not one_of(value, legal):
                expected = f"{', '.join(map(repr, legal[:-1]))} or {legal[-1]!r}"
                raise LayoutError(f"{name}: expected {expected}, got {value!r}")
            if name not in has.options and value != _DEFAULTS[name]:
                raise LayoutError(f"{name}: {self.routine} has no such option")

    @property
    def traits(self) -> Routine:
        """What the routine reads, writes and flips."""
        return ROUTINES[self.routine]

    @property
    def is_hermitian(self) -> bool:
        """Whether a triangle stands for a Hermitian matrix (of a complex type), whose diagonal is real."""
        return self.traits.hermitian and self.d.dtype.kind == "c"

    @property
    def m(self) -> int:
        """Rows of D."""
        return self.d.shape[0]

    @property
    def n(self) -> int:
        """Columns of D."""
        return self.d.shape[1]

    @property
    def k(self) -> int:
        """What is summed over: the columns of op(A), or A's order; 1 where nothing is."""
        if self.traits.shape == "added":
            return 1
        return self.a.shape[1 if self.op_a == "N" else 0]

    @property
    def flops(self) -> int:
        """Floating-point operations, four times as many for complex types."""
        times = 4 if self.d.dtype.kind == "c" else 1
        if self.traits.shape == "added":
            return times * 2 * self.m * self.n
        if self.traits.shape == "sided":
            return times * self.m * self.n * self.k * (1 if self.traits.triangular else 2)
        return times * self.n * (self.n + 1) * self.k * (2 if self.traits.swept_twice else 1)

    @property
    def written(self) -> Trapezoid | None:
        """The part of D that the routine writes; None for all of it."""
        return Trapezoid(self.uplo) if self.traits.triangle == "d" else None

    def touched(self, name: str) -> Trapezoid | None:
        """Return the part of "a", "b", "c" or "d" that is read or written at most; None for all of it. Local."""
        if name in ("c", "d"):
            return self.written
        if name == "a" and self.traits.triangle == "a":
            inward = int(self.diag == "U")
            return Trapezoid(self.uplo, -inward if self.uplo == "L" else inward)
        if name == "a" and self.traits.shape == "added" and self.written is not None:
            return self.written if self.op_a == "N" else self.written.T
        return None

    def __str__(self) -> str:
        options = " ".join(f"{name}={getattr(self, name)}" for name in self.traits.options)
        sizes = f"{self.m} x {self.n}" + ("" if self.traits.shape != "updated" else f" x {self.k}")
        return f"{self.d.dtype.name} {self.routine} {options} of {sizes} on {self.d.grid}"

    def faults(self) -> list[str]:
        """Return every reason why the problem is not legal; empty when it is. Local.

        Any grid, block, source, offset and memory order is legal: an engine that cannot take one moves the matrix.
        """
        return [*self._sizes(), *self._types(), *self._ops()]

    def _sizes(self) -> Iterator[str]:
        """Say what is wrong with the shapes, each against what A and D ask of it."""
        shape = self.traits.shape
        m, n = self.d.shape
        transposed = self.op_a != "N"
        op = f" for op_a={self.op_a!r}" if "op_a" in self.traits.options else ""
        if shape == "sided":
            order = m if self.side == "L" else n
            expected = {"a": (order, order), "b": (m, n), "c": (m, n)}
            why = {"a": f" for side={self.side!r} and a result of {m}x{n}", "b": " like d", "c": " like d"}
        elif shape == "updated":
            rows, k = self.a.shape[::-1] if transposed else self.a.shape
            if m != n:
                yield f"d: shape is {m}x{n}, expected a square matrix"
            elif rows != n:
                yield f"a: shape is {_size(self.a)}{op}, so that d has order {rows}, but d is {m}x{n}"
            expected = {"b": (k, rows) if transposed else (rows, k), "c": (m, n)}
            why = {"b": " like a", "c": " like d"}
        else:
            expected = {"a": (n, m) if transposed else (m, n), "c": (m, n)}
            why = {"a": f"{op} and a result of {m}x{n}", "c": " like d"}
        for name, legal in expected.items():
            x = getattr(self, name)
            if x is not None and x.shape != legal:
                yield f"{name}: shape is {_size(x)}, expected {legal[0]}x{legal[1]}{why[name]}"

    def _types(self) -> Iterator[str]:
        if is_float8(self.d.dtype):
            yield f"d: dtype is {self.d.dtype.name}, which only matmul has, expected one of {', '.join(DTYPES)}"
        for name in "abc":
            x = getattr(self, name)
            if x is not None and x.dtype != self.d.dtype:
                yield f"{name}: dtype is {x.dtype.name}, expected {self.d.dtype.name} like d"

    def _ops(self) -> Iterator[str]:
        if self.traits.shape != "updated" or self.d.dtype.kind != "c":
            return
        legal = "NC" if self.is_hermitian else "NT"
        if self.op_a not in legal:
            yield (
                f"op_a: {self.routine} of complex matrices has {legal[0]!r} and {legal[1]!r}, got {self.op_a!r}: "
                f"that is {self.traits.twin}'s"
            )

    def validate(self) -> None:
        """Raise LayoutError naming every fault at once, or return None. Local."""
        found = self.faults()
        if found:
            count = "a fault" if len(found) == 1 else f"{len(found)} faults"
            raise LayoutError("\n  - ".join([f"{count} in this {self.routine}:", *found]))

    def column_major(self) -> ColumnMajorLevel3:
        """Return the same routine on the same memory with F-ordered matrices only. Local.

        A C-ordered matrix is its F-ordered transpose: what that flips is each routine's own row of ``ROUTINES``. B
        must lie like D, where D is square like A, and C like D; a complex operand may have to be conjugated because
        BLAS knows no conjugate without a transpose. Nothing moves between ranks.
        """
        has, is_complex = self.traits, self.d.dtype.kind == "c"
        flips = has.d_flips if self.d.order == "C" else frozenset()
        if self.a.order == "C":
            flips ^= has.a_flips
        op, conjugate = _flipped(self.op_a, self.is_hermitian) if "op" in flips else (self.op_a, False)
        conjugate = is_complex and conjugate != ("conj" in flips)
        wanted = {"b": self.a.order if has.shape == "updated" else self.d.order, "c": self.d.order}
        relaid = "".join(
            name for name, order in wanted.items() if (x := getattr(self, name)) and x.order != order
        )
        a, b = _fortran(self.a, self.a.order), self.b and _fortran(self.b, wanted["b"])
        swapped = "swap" in flips
        if swapped:
            assert b is not None
            a, b = b, a
        problem = Level3Problem(
            self.routine, a, _fortran(self.d, self.d.order), b, self.c and _fortran(self.c, self.d.order),
            _OTHER[self.side] if "side" in flips else self.side,  # type: ignore[arg-type]
            _MIRRORED[self.uplo] if "uplo" in flips else self.uplo,
            "T" if op == "C" and not is_complex else op,
            self.diag,
        )  # fmt: skip
        conjugated = ("ab" if b is not None and has.shape == "updated" else "a") if conjugate else ""
        return ColumnMajorLevel3(problem, conjugated, relaid, swapped, is_complex and "alpha" in flips)


def _flipped(op: Op, hermitian: bool) -> tuple[Op, bool]:
    """Return the op of the transposed operand, and whether it has to be conjugated beside."""
    if hermitian:  # an update by op(A) op(A)^H: its C and N are each other's flips, "conj" says the rest
        return ("C" if op == "N" else "N"), False
    return ("T" if op == "N" else "N"), op == "C"


def _fortran(x: MatrixDescriptor, order: MemoryOrder) -> MatrixDescriptor:
    """Return ``x``, copied to ``order`` where it has another one, as F-ordered memory."""
    if x.order != order:
        x = replace(x, order=order, ld=None)
    return x.T if order == "C" else x


def _size(x: MatrixDescriptor) -> str:
    return f"{x.shape[0]}x{x.shape[1]}"
