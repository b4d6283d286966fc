# SPDX-License-Identifier: Apache-2.0
"""FactorProblem: a factorization, or what is solved with one, as descriptors and options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..dtypes import BLAS_TYPES
from ..errors import ArgumentError, ArgumentTypeError, counted, short_repr
from .descriptor import MatrixDescriptor
from .grid import Grid, as_grid, integer, one_of
from .value import Problem

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from .descriptor import MemoryOrder

BY_NAME = ("cholesky", "lu", "qr", "solve", "lstsq")
"""What ``FactorProblem.of`` makes."""

ASSUMED = {
    **dict.fromkeys(("gen", "general"), "gen"),
    **dict.fromkeys(("pos", "positive definite"), "pos"),
    **dict.fromkeys(("sym", "symmetric"), "sym"),
    **dict.fromkeys(("her", "hermitian"), "her"),
    **dict.fromkeys(("upper triangular", "lower triangular"), "tri"),
}
"""The kind of a matrix, by the names of what ``solve`` and ``inv`` assume of it, which are SciPy's."""

FactorRoutine = Literal["cholesky", "lu", "qr", "lstsq", "triangular", "condition", "eigh", "svd"]


@dataclass(frozen=True, slots=True)
class FactorProblem(Problem):
    """A factorization, or what is solved with one, in the form in which algorithms take it. Local.

    An upper triangle comes as the lower one of the transposed matrix, a wide least-squares problem as a tall one.

    Attributes:
        routine: what is computed; "lstsq" has at least as many rows as columns.
        a: the layout of A, or of its factors. Of "cholesky", "triangular" and "eigh" only the lower triangle counts.
        b: the layout of right-hand sides, or of what Q is multiplied by; None without them.
        c: the layout in which the factors are wanted; None if they are not. Of "svd" that of V^H.
        d: the layout of solutions, of the inverse, of the product with Q, of the eigenvectors, or of U of "svd"; None
            without them.
        op: "N", "T" or "C": solve with A or with its transposes, multiply by Q or by its adjoint. Of "lstsq" "C" asks
            for the least solution of A^H X = B.
        factored: A has its factors already.
        inverse: the right-hand sides are the identity; of "qr" they are the first columns of it. With ``factored`` of
            "cholesky" and "triangular" only the lower triangle of the inverse is written, as by LAPACK.
        unit: of "triangular": the diagonal is taken as ones.
        conjugate: the conjugates of A and of its factors are meant; of "qr" those of what Q is multiplied by.
        subset: of "eigh": the first and the last of the eigenvalues that are wanted, from 0; None: all.

    Raises:
        ArgumentError: the routine or the op is unknown, or a layout is no descriptor.
    """

    routine: FactorRoutine
    a: MatrixDescriptor
    b: MatrixDescriptor | None = None
    c: MatrixDescriptor | None = None
    d: MatrixDescriptor | None = None
    op: str = "N"
    factored: bool = False
    inverse: bool = False
    unit: bool = False
    conjugate: bool = False
    subset: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, legal in (("routine", get_args(FactorRoutine)), ("op", ("N", "T", "C"))):
            if not one_of(getattr(self, name), legal):
                given = short_repr(getattr(self, name))
                raise ArgumentError(f"{name}: expected one of {', '.join(legal)}, got {given}")
        for name in "abcd":
            x = getattr(self, name)
            if not isinstance(x, MatrixDescriptor) and (x is not None or name == "a"):
                raise ArgumentTypeError(f"{name}: expected a MatrixDescriptor, got {short_repr(x)}")

    @classmethod
    def of(
        cls,
        name: str,
        n: int,
        grid: Grid | str | Sequence[int],
        block: int,
        *,
        m: int | None = None,
        right: int | None = None,
        dtype: DTypeLike = "float64",
        order: MemoryOrder = "C",
    ) -> FactorProblem:
        """Return a factorization of an m × n matrix, or what also solves with it, all from process (0, 0). Local.

        Args:
            name: "cholesky", "lu" or "qr"; "solve", by LU, and "lstsq", by QR, have one right-hand side by default.
            n: columns of A.
            grid: the process grid of all the matrices: a ``Grid``, ``(2, 3)`` or ``"2x3"``.
            block: the block size of every dimension.
            m: rows of A, for "qr" and "lstsq"; by default n.
            right: number of right-hand sides: A is also solved for them, with "qr" by least squares.
            dtype: type of all.
            order: memory order of all.

        Raises:
            ArgumentError: the name is unknown, or a number makes no sense.
        """
        if not one_of(name, BY_NAME):
            raise ArgumentError(f"name: expected one of {', '.join(BY_NAME)}, got {short_repr(name)}")
        n, grid = integer(n, "n", 1, ArgumentError), as_grid(grid)
        rows = n if m is None else integer(m, "m", 1, ArgumentError)
        if rows < n or (rows > n and name not in ("qr", "lstsq")):
            fits = f"at least {n}" if name in ("qr", "lstsq") else f"{n}: {name} takes square matrices"
            raise ArgumentError(f"m: expected {fits}, got {rows}")
        solved = name in ("solve", "lstsq")
        count = int(solved) if right is None else integer(right, "right", int(solved), ArgumentError)

        def matrix(rows: int, cols: int) -> MatrixDescriptor:
            return MatrixDescriptor((rows, cols), block, grid, dtype=dtype, order=order)

        a = matrix(rows, n)
        routine: FactorRoutine = {"solve": "lu", "lstsq": "qr"}.get(name, name)  # type: ignore[assignment]
        if not count:
            return cls(routine, a, c=a)
        if routine == "qr":
            routine = "lstsq"
        return cls(routine, a, matrix(rows, count), d=matrix(n, count))

    @property
    def right(self) -> int:
        """Number of right-hand sides, or of columns that Q is multiplied by."""
        return 0 if self.d is None else self.d.shape[1]

    @property
    def options(self) -> dict[str, Any]:
        """The options that are not what they are by default. Local."""
        named = (each for each in fields(self) if each.name not in ("routine", *"abcd"))
        return {each.name: value for each in named if (value := getattr(self, each.name)) != each.default}

    def faults(self, result: str = "d") -> list[str]:  # noqa: ARG002
        """Return what makes no sense, in words. Local."""
        found: list[str] = []
        if self.a.dtype.name not in BLAS_TYPES:
            found.append(f"a: dtype is {self.a.dtype.name}, expected one of {', '.join(BLAS_TYPES)}")
        rows, cols = self.a.shape
        solves_square = self.routine == "lu" and self.d is not None
        if (
            self.routine in ("cholesky", "triangular", "condition", "eigh") or solves_square
        ) and rows != cols:
            found.append(f"a: expected a square matrix, got {rows} x {cols}")
        if self.routine == "lstsq" and (rows < cols or self.b is None or self.d is None):
            found.append(f"lstsq: expected at least as many rows as columns, b and d, got {rows} x {cols}")
        if self.c is not None and self.routine != "svd" and self.c.shape != self.a.shape:
            found.append(f"c: expected the shape of a, {self.a.shape}, got {self.c.shape}")
        found += self._missing()
        if self.d is not None:
            found += self._beside(self.d)
        for name, x in (("b", self.b), ("c", self.c), ("d", self.d)):
            if x is not None and x.dtype != self.a.dtype:
                found.append(f"{name}: dtype is {x.dtype}, expected {self.a.dtype} like a")
        return found

    def _missing(self) -> Iterator[str]:
        by_q = self.routine == "qr" and self.factored
        if self.c is None and self.routine == "qr" and not by_q:
            yield "c: missing: it holds the factors"
        solves = self.b is not None and self.routine in ("cholesky", "lu")
        if self.d is None and (solves or by_q or self.routine == "triangular"):
            yield "d: missing: it holds the result"

    def _beside(self, d: MatrixDescriptor) -> Iterator[str]:
        """Say what of the right-hand sides, or of what Q is multiplied by, does not fit to A and the result."""
        if self.routine not in ("cholesky", "lu", "triangular", "lstsq", "qr"):
            return
        b = self.a if self.inverse else self.b
        rows, cols = self.a.shape
        if self.routine == "qr":
            b, cols = (d if self.b is None else self.b), rows  # without b that of the identity
        elif self.routine == "lstsq" and self.op != "N":
            rows, cols = cols, rows
        if b is None:
            yield "b: missing: d is the solution for its columns"
        elif b.shape[0] != rows:
            yield f"b: expected {rows} rows, got {b.shape[0]}"
        elif d.shape != (cols, b.shape[1]):
            yield f"d: expected {cols} x {b.shape[1]}, got {d.shape[0]} x {d.shape[1]}"

    def _keys(self) -> dict[str, Any]:
        return {"factorization": self.routine, **self.options}

    def __str__(self) -> str:
        rows, cols = self.a.shape
        what: str = self.routine
        right = ""
        if self.inverse:
            what = "Q of qr" if self.routine == "qr" else f"inverse ({self.routine})"
        elif self.d is not None and self.routine not in ("eigh", "svd"):
            right = f", {counted(self.right, 'column')},"
        return f"{self.a.dtype.name} {what} of {rows} x {cols}{right} on {self.a.grid}"
