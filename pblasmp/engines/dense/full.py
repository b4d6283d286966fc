# SPDX-License-Identifier: Apache-2.0
"""Level 3 by products of whole matrices: a triangle is filled up first, or is cut out of the result.

That takes more operations than a triangle needs, and memory for one or two more square matrices, and runs at the
speed of the engine's fastest product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from ...layout import Level3Problem, MatmulProblem, Trapezoid
from ...layout.product import Op
from ..local_part import LocalPart
from ..method import type_refusal
from ..protocol import Engine, Method
from ..request import AnyProblem, Operands, Options
from .steps import ALL, SteppedProduct, Window

__all__ = ["METHODS", "FullProduct"]

_STRIPES = 4  # in which a triangle is computed: together 10/16 of its square
_FAST, _SLOW = 2.5, 8.0  # gathering costs 3
_THIN = 8  # with so many times as many rows as columns, filling A costs more than the product


class FullProduct(SteppedProduct):
    """symm, hemm or a rank-k update. Making, running and closing one is collective over the context."""

    holds_memory = True
    _triangle: LocalPart | None = None  # this rank's part of the triangle that is read or written

    def _add_steps(self, operands: Operands) -> None:
        if self._p.traits.shape == "sided":
            self._fill_and_multiply(operands)
        else:
            self._multiply_and_add(operands)
        self.path = f"full: {self._products[-1 if self._p.traits.shape == 'sided' else 0].path}"

    @property
    def _adjoint(self) -> Op:
        return "C" if self._p.is_hermitian else "T"

    def _fill_and_multiply(self, operands: Operands) -> None:
        """Fill both triangles of a copy of A, and multiply the copy."""
        p, options = self._p, replace(self._options, algo="auto")
        full = self._make("full", p.a)
        other: Literal["L", "U"] = "U" if p.uplo == "L" else "L"
        mirrored = Level3Problem("tradd", p.a, full, uplo=other, op_a=self._adjoint)
        self._step(operands, mirrored, Options(), "a", "", "", "full")
        if self._rank < full.grid.size:
            places = full.global_indices(self._rank)
            self._triangle = LocalPart(Trapezoid(p.uplo), *places, hermitian=p.is_hermitian)
        self._then(self._copy_triangle)
        assert p.b is not None
        c = p.c if options.beta != 0 else None
        a, b, names = (full, p.b, ("full", "b")) if p.side == "L" else (p.b, full, ("b", "full"))
        product = MatmulProblem(a=a, b=b, c=c, d=p.d)
        self._step(operands, product, options, *names, "" if c is None else "c", "d")

    def _copy_triangle(self, given: Operands) -> None:
        """Copy the triangle of A, its diagonal included, to where its mirror image is. Local."""
        if self._triangle is not None:
            a, full = given.a, self._own["full"]
            self._engine.operations.add(full, 1, a, 0, full, self._triangle, conjugate=False)

    def _multiply_and_add(self, operands: Operands) -> None:
        """Multiply into a temporary matrix, add its adjoint if the routine has two terms, and take D's triangle."""
        p, options = self._p, replace(self._options, algo="auto", beta=0)
        full, other = self._make("full", p.d), p.a if p.b is None else p.b
        ops: tuple[Op, Op] = ("N", self._adjoint) if p.op_a == "N" else (self._adjoint, "N")
        for window in self._stripes():
            left, right = ((rows, slice(None)) if p.op_a == "N" else (slice(None), rows) for rows in window)
            problem = MatmulProblem(a=p.a[left], b=other[right], d=full[window], op_a=ops[0], op_b=ops[1])
            names = "a", "a" if p.b is None else "b", "", "full"
            self._step(operands, problem, options, *names, window=window, of=(left, right))
        if p.traits.swept_twice:
            total = self._make("sum", p.d)
            both = Level3Problem("tradd", full, total, c=full, uplo=p.uplo, op_a=self._adjoint)
            self._step(operands, both, Options(beta=1), "full", "", "full", "sum")
        if self._rank < p.d.grid.size:
            assert p.written is not None
            self._triangle = LocalPart(p.written, *p.d.global_indices(self._rank), hermitian=p.is_hermitian)
            self._then(self._add_triangle)

    def _stripes(self) -> Iterator[Window]:
        """Yield the parts of D's square that are computed: stripes that cover the triangle, or all of it."""
        p, order = self._p, self._p.d.shape[0]
        unit = max(p.d.block) * max(p.d.grid.shape)
        width = -(-order // (_STRIPES * unit)) * unit
        if p.traits.swept_twice or width >= order:
            yield ALL
            return
        for start in range(0, order, width):
            stop = min(start + width, order)
            yield (slice(start, order) if p.uplo == "L" else slice(0, stop)), slice(start, stop)

    def _add_triangle(self, given: Operands) -> None:
        """Add the triangle of the products, which are complete, to D's. Local."""
        total = self._own["sum" if "sum" in self._own else "full"]
        c = given.d if given.c is None else given.c
        self._engine.operations.add(given.d, 1, total, self._options.beta, c, self._triangle, conjugate=False)


class FullMethod(Method):
    """Level 3 by products of whole matrices."""

    name = "full"

    def serves(self, problem: AnyProblem) -> bool:
        if not isinstance(problem, Level3Problem):
            return False
        return problem.traits.shape == "updated" or (
            problem.traits.shape == "sided" and not problem.traits.triangular
        )

    def refusal(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands | None
    ) -> str:
        why = type_refusal(engine, problem, options, operands)
        if why or options.algo != "auto":
            return why
        like = problem.a if problem.traits.shape == "sided" else problem.d
        largest = max(rows * cols for rows, cols in map(like.local_shape, range(like.grid.size)))
        nbytes = (1 + problem.traits.swept_twice) * largest * like.dtype.itemsize
        enough, limit = engine.transport.fits(nbytes)
        return "" if enough else f"whole matrices would need {nbytes} bytes per rank, only {limit} available"

    def cost(self, engine: Engine, problem: Level3Problem, options: Options) -> float:
        """Return less than other algorithms cost on GPUs, if no operation is wasted and B is not just a few vectors."""
        wasteless = problem.traits.swept_twice
        if problem.traits.shape == "sided":
            wasteless = min(problem.d.shape) * _THIN >= problem.a.shape[0]
        return _FAST if wasteless and engine.traits.fast_products else _SLOW

    def prepare(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands
    ) -> FullProduct:
        return FullProduct(engine, problem, options, operands)


METHODS = (FullMethod(),)
