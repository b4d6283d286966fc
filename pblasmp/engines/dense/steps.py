# SPDX-License-Identifier: Apache-2.0
"""Level 3 in steps: products of parts of the operands, or of matrices that are made for the purpose.

"full": a triangle is filled up first, or is cut out of the result. That takes more operations than a triangle needs,
and memory for one or two more square matrices, and runs at the speed of the engine's fastest product.

"stationary", trsm with few right-hand sides: A stays where it is, except the blocks on its diagonal. Some equations are
solved at a time, and their contribution to the others is subtracted by a product that moves only the right-hand sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from ...layout import Level3Problem, MatmulProblem, MatrixDescriptor, Trapezoid
from ...layout.pieces import LocalPart
from ...layout.schemes import Op
from ..arrays import new_part, same_memory, scale, window_of
from ..composite import Composite
from ..local.slab_terms import THIN, triangle_of
from ..method import ArrayMethod, plain_refusal, prepare_step
from ..protocol import Engine
from ..request import AnyProblem, Operands, Options, Problem

Array = Any
Window = tuple[slice, slice]
ALL: Window = (slice(None), slice(None))


class SteppedProduct(Composite):
    """A routine as products of parts of its operands, which a subclass defines.

    Args:
        options: alpha, beta, compute.
    """

    _fences = True

    def __init__(self, engine: Engine, p: Level3Problem, options: Options, operands: Operands) -> None:
        self._p, self._options, self._rank = p, options, engine.transport.rank
        self._layouts = {name: x for name in "abcd" if (x := getattr(p, name)) is not None}
        super().__init__(engine, operands)

    def _step(
        self, operands: Operands, problem: Problem, options: Options, *names: str, window: Window = ALL,
        of: tuple[Window, Window] = (ALL, ALL),
    ) -> None:  # fmt: skip
        """Add a problem as a step: its a, b, c, d by name, "" for none; parts of a and b, and of d. Collective."""
        places = list(zip(names, (*of, window, window), strict=True))

        def takes(given: Operands) -> Operands:
            return Operands(*(self._local(given, name, part) for name, part in places))

        self._add(prepare_step(self._engine, problem, options, takes(operands)), takes)

    def _make(self, name: str, like: MatrixDescriptor) -> MatrixDescriptor:
        """Make a temporary matrix, laid out like another one. Collective over the context."""
        self._layouts[name] = x = replace(like, ld=None)
        self._own[name] = new_part(self._engine, x)
        return x

    def _local(self, operands: Operands, name: str, window: Window) -> Array:
        if not name:
            return None
        array = self._own[name] if name in self._own else getattr(operands, name)
        return array if window is ALL else window_of(array, self._layouts[name], self._rank, window)


_STRIPES = 4  # in which a triangle is computed: together 10/16 of its square
_FAST, _SLOW = 2.5, 8.0  # gathering costs 3


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


class FullMethod(ArrayMethod):
    """Level 3 by products of whole matrices."""

    name, product = "full", FullProduct

    def serves(self, problem: AnyProblem) -> bool:
        if not isinstance(problem, Level3Problem):
            return False
        return problem.traits.shape == "updated" or (
            problem.traits.shape == "sided" and not problem.traits.triangular
        )

    def refusal(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands | None
    ) -> str:
        why = super().refusal(engine, problem, options, operands)
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
            wasteless = min(problem.d.shape) * THIN >= problem.a.shape[0]
        return _FAST if wasteless and engine.traits.fast_products else _SLOW


# equations solved at a time: with more, more of A is copied; with fewer, the ranks meet more often
_PANEL = 1024
_LEAST = 4096  # equations; with fewer, the meetings take as long as copying A
_THIN = 32  # needs so many times as many equations as right-hand sides


class StationarySolve(SteppedProduct):
    """X of ``op(A) X = alpha B``, or of ``X op(A) = alpha B``, in D."""

    path = "stationary"

    def _add_steps(self, operands: Operands) -> None:
        p, options = self._p, replace(self._options, alpha=1, algo="auto")
        if self._options.alpha == 0:
            self._then(lambda given: scale(given.d, 0))
            return
        assert p.b is not None
        if p.b.same_places(p.d):
            self._then(self._scale)
        else:
            scaled = replace(options, alpha=self._options.alpha)
            self._step(operands, Level3Problem("geadd", p.b, p.d), scaled, "b", "", "", "d")
        update = replace(options, alpha=-1, beta=1, algo="stationary")
        for these, rest in self._panels():
            a, here, there = (these, these), self._window(these), self._window(rest)
            solve = replace(p, a=p.a[a], b=p.d[here], d=p.d[here])
            self._step(operands, solve, options, "a", "d", "", "d", window=here, of=(a, here))
            if rest.start == rest.stop:
                continue
            a = (rest, these) if (p.op_a == "N") == (p.side == "L") else (these, rest)
            left = p.side == "L"
            product = MatmulProblem(
                a=p.a[a] if left else p.d[here],
                b=p.d[here] if left else p.a[a],
                c=p.d[there],
                d=p.d[there],
                op_a=p.op_a if left else "N",
                op_b="N" if left else p.op_a,
            )
            names, of = (("a", "d"), (a, here)) if left else (("d", "a"), (here, a))
            self._step(operands, product, update, *names, "d", "d", window=there, of=of)

    def _window(self, equations: slice) -> Window:
        """Return where the unknowns of some equations are in D."""
        every = slice(None)
        return (equations, every) if self._p.side == "L" else (every, equations)

    def _panels(self) -> Iterator[tuple[slice, slice]]:
        """Yield the equations to solve next, and those that remain."""
        order, a = self._p.a.shape[0], self._p.a
        unit = max(a.block) * max(a.grid.shape)
        width = max(1, -(-min(_PANEL, order // 4) // unit)) * unit
        starts = range(0, order, width)
        lower = triangle_of(self._p)[2] == "L"
        for start in starts if lower else reversed(starts):
            stop = min(start + width, order)
            yield slice(start, stop), (slice(stop, order) if lower else slice(0, start))

    def _scale(self, given: Operands) -> None:
        """Start from alpha B in D, which may be B. Local."""
        if not (self._options.alpha == 1 and same_memory(given.b, given.d)):
            self._engine.operations.xp.multiply(given.b, self._options.alpha, out=given.d)


class StationarySolveMethod(ArrayMethod):
    """Solves with few right-hand sides, which alone are moved."""

    name, product = "stationary", StationarySolve

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, Level3Problem) and problem.traits.solves

    def refusal(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands | None
    ) -> str:
        return super().refusal(engine, problem, options, operands) or plain_refusal(operands)

    def cost(self, engine: Engine, problem: Level3Problem, options: Options) -> float:
        """Return less than the cost of slabs if there are few right-hand sides; hosts of GPUs take longer for steps."""
        order = problem.a.shape[0]
        columns = problem.d.shape[1 if problem.side == "L" else 0]
        few = order >= max(_LEAST, _THIN * columns) and problem.a.grid.size > 1
        return 1.5 if few and not engine.traits.queues else 9.0


METHODS = (FullMethod(), StationarySolveMethod())
