# SPDX-License-Identifier: Apache-2.0
"""Level3Problem: a level-3 PBLAS routine other than GEMM as descriptors, its faults, its column-major form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from ..dtypes import BLAS_TYPES, DTYPES, plain
from ..errors import ArgumentError, ArgumentTypeError, short_repr
from .descriptor import MatrixDescriptor, MemoryOrder
from .grid import one_of
from .pieces import Trapezoid
from .problem import MatmulProblem, shape_text
from .routines import ROUTINES, Routine
from .schemes import Op
from .value import Problem

Side = Literal["L", "R"]
Uplo = Literal["L", "U"]
Diag = Literal["N", "U"]

_LEGAL = {"side": ("L", "R"), "uplo": ("L", "U"), "op_a": ("N", "T", "C"), "diag": ("N", "U")}
_DEFAULTS = {"side": "L", "uplo": "L", "op_a": "N", "diag": "N"}
_OTHER = {"L": "R", "R": "L"}
_MIRRORED: dict[Uplo, Uplo] = {"L": "U", "U": "L"}


@dataclass(frozen=True, slots=True)
class ColumnMajorLevel3:
    """The same routine on the same memory with every matrix F-ordered, as BLAS and cuBLASMp know it.

    Attributes:
        problem: F-ordered descriptors, and the options that go with them.
        conjugated: the operands of ``problem`` ("a" or "ab") to conjugate first; empty for real types.
        relaid: the caller's operands (of "b" and "c") whose memory order is not the one that the routine needs: first
            copy each locally into the other order. ``problem`` has the copy's descriptor.
        swapped: ``problem.a`` is the caller's B, ``problem.b`` the caller's A.
        conj_alpha: alpha is to be conjugated.
    """

    problem: Level3Problem
    conjugated: str
    relaid: str
    swapped: bool
    conj_alpha: bool


@dataclass(frozen=True, slots=True, repr=False)
class Level3Problem(Problem):
    """A routine of ``ROUTINES`` on distributed matrices. Local.

    Args:
        routine: its name.
        a, d: descriptors of A and of the result D.
        b, c: descriptors of B and C; None if the routine has none, or C is not given.
        side: "L" or "R": the side of B that the square operand A is on.
        uplo: "L" or "U": the triangle of A that is read, or of D that is written.
        op_a: "N", "T" or "C"; in rank-k updates also the op of B.
        diag: "U": A has ones on its diagonal, which is not read.

    Raises:
        ArgumentError: the routine or an option is unknown, or an operand is missing, not expected or no descriptor.
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
        if not one_of(self.routine, ROUTINES):
            raise ArgumentError(
                f"routine: expected one of {', '.join(ROUTINES)}, got {short_repr(self.routine)}"
            )
        has = ROUTINES[self.routine]
        for name in "abcd":
            value = getattr(self, name)
            if name not in (*has.operands, "d") and value is not None:
                raise ArgumentError(f"{name}: {self.routine} has no such operand")
            optional = name == "c" or name not in (*has.operands, "d")
            if not isinstance(value, MatrixDescriptor) and not (optional and value is None):
                raise ArgumentTypeError(f"{name}: expected a MatrixDescriptor, got {short_repr(value)}")
        for name, legal in _LEGAL.items():
            value = plain(getattr(self, name))
            object.__setattr__(self, name, value)
            if not one_of(value, legal):
                expected = f"{', '.join(map(repr, legal[:-1]))} or {legal[-1]!r}"
                raise ArgumentError(f"{name}: expected {expected}, got {short_repr(value)}")
            if name not in has.options and value != _DEFAULTS[name]:
                raise ArgumentError(f"{name}: {self.routine} has no such option")

    @property
    def traits(self) -> Routine:
        """What the routine reads, writes and flips."""
        return ROUTINES[self.routine]

    @property
    def is_hermitian(self) -> bool:
        """Whether a triangle represents a Hermitian matrix (of a complex type), whose diagonal is real."""
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
        """The extent of the summation: the columns of op(A), or A's order; 1 if nothing is summed."""
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
        """Return the part of "a", "b", "c" or "d" that may be read or written; None for all of it. Local."""
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

    def __repr__(self) -> str:
        return f"Level3Problem({self})"

    def _keys(self) -> dict[str, Any]:
        return {"routine": self.routine, **{name: getattr(self, name) for name in self.traits.options}}

    def faults(self, result: str = "d") -> list[str]:
        """Return every reason why the problem is not legal; empty when it is. Local.

        Any grid, block, source, offset and memory order is legal: an engine that cannot take one moves the matrix.

        Args:
            result: the name of D in messages: the caller's argument that gives its layout.
        """
        return [*self._sizes(result), *self._types(result), *self._ops()]

    def _sizes(self, d: str) -> Iterator[str]:
        """Yield what is wrong with the shapes, each compared with what A and D require."""
        shape = self.traits.shape
        m, n = self.d.shape
        transposed = self.op_a != "N"
        op = f" for op_a={self.op_a!r}" if "op_a" in self.traits.options else ""
        if shape == "sided":
            order = m if self.side == "L" else n
            expected = {"a": (order, order), "b": (m, n), "c": (m, n)}
            why = {
                "a": f" for side={self.side!r} and a result of {m}x{n}",
                "b": f" like {d}",
                "c": f" like {d}",
            }
        elif shape == "updated":
            rows, k = self.a.shape[::-1] if transposed else self.a.shape
            if m != n:
                yield f"{d}: shape is {m}x{n}, expected a square matrix"
            elif rows != n:
                yield f"a: shape is {shape_text(self.a)}{op}, so that {d} has order {rows}, but {d} is {m}x{n}"
            expected = {"b": (k, rows) if transposed else (rows, k), "c": (m, n)}
            why = {"b": " like a", "c": f" like {d}"}
        else:
            expected = {"a": (n, m) if transposed else (m, n), "c": (m, n)}
            why = {"a": f"{op} and a result of {m}x{n}", "c": f" like {d}"}
        for name, legal in expected.items():
            x = getattr(self, name)
            if x is not None and x.shape != legal:
                yield f"{name}: shape is {shape_text(x)}, expected {legal[0]}x{legal[1]}{why[name]}"

    def _types(self, d: str) -> Iterator[str]:
        # cuBLASMp has 16 bits for geadd alone. Others it refuses where there is a part of D, while other ranks wait.
        legal = DTYPES if self.routine == "geadd" else BLAS_TYPES
        if self.d.dtype.name not in legal:
            expected = f"expected one of {', '.join(legal)}"
            yield f"{d}: dtype is {self.d.dtype.name}, which {self.routine} does not have, {expected}"
        for name in "abc":
            x = getattr(self, name)
            if x is not None and x.dtype != self.d.dtype:
                yield f"{name}: dtype is {x.dtype.name}, expected {self.d.dtype.name} like {d}"

    def _ops(self) -> Iterator[str]:
        if self.traits.shape != "updated" or self.d.dtype.kind != "c":
            return
        legal = "NC" if self.is_hermitian else "NT"
        if self.op_a not in legal:
            yield (
                f"op_a: {self.routine} of complex matrices has {legal[0]!r} and {legal[1]!r}, got {self.op_a!r}: "
                f"that is {self.traits.twin}'s"
            )

    def column_major(self) -> ColumnMajorLevel3:
        """Return the same routine on the same memory with F-ordered matrices only. Local.

        A C-ordered matrix is its F-ordered transpose: what that flips is each routine's own row of ``ROUTINES``. B
        must have D's layout if D is square like A, and C like D; a complex operand may have to be conjugated
        because BLAS knows no conjugate without a transpose. Nothing moves between ranks.
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
    """Return the op of the transposed operand, and whether it has to be conjugated besides."""
    if hermitian:  # an update by op(A) op(A)^H: flipping exchanges C and N, and "conj" says the rest
        return ("C" if op == "N" else "N"), False
    return ("T" if op == "N" else "N"), op == "C"


def _fortran(x: MatrixDescriptor, order: MemoryOrder) -> MatrixDescriptor:
    """Return ``x`` as F-ordered memory, after a copy to ``order`` if it has the other one."""
    if x.order != order:
        x = replace(x, order=order, ld=None)
    return x.T if order == "C" else x


AnyRoutine = TypeVar("AnyRoutine", MatmulProblem, Level3Problem)


def with_c_like_d(p: AnyRoutine) -> AnyRoutine:
    """Return ``p`` with C in the layout of D, as every algorithm needs it. Local."""
    if p.c is None or p.c.same_places(p.d):
        return p
    return replace(p, c=replace(p.d, dtype=p.c.dtype, ld=None))
