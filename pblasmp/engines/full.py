# SPDX-License-Identifier: Apache-2.0
"""Level 3 by products of whole matrices: a triangle is filled before, or cut out of the result.

That takes more operations than a triangle needs, and memory for one or two more square matrices, and runs at the
speed of the engine's fastest product.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor, Trapezoid
from ..layout.product import Op
from .algorithms import Algorithm
from .arrays import new_part
from .base import Engine, Product, QueuedProduct, Workspace
from .local_part import LocalPart
from .options import Operands, Options, Problem
from .slabs import type_refusal

__all__ = ["algorithms"]

_STRIPES = 4  # that a triangle is computed in: 10/16 of its square
_FAST, _SLOW = 2.5, 8.0  # gathering costs 3
_THIN = 8  # times as many rows as columns: filling A takes longer then than multiplying it

Array = Any
Prepare = Callable[[Engine, Problem, Options, Operands], Product]
Window = tuple[slice, slice]
_ALL: Window = (slice(None), slice(None))


class FullProduct(QueuedProduct):
    """symm, hemm or a rank-k update. Making, running and closing one is collective over the context.

    Args:
        engine: where it runs.
        prepare: prepares a problem by the algorithm that "auto" takes.
        p: the routine.
        options: alpha, beta, compute.
        operands: the local arrays.
    """

    holds_memory = True

    def __init__(
        self, engine: Engine, prepare: Prepare, p: Level3Problem, options: Options, operands: Operands
    ) -> None:
        self._engine, self._p, self._options, self._rank = engine, p, options, engine.transport.rank
        self._layouts = {name: x for name in "abcd" if (x := getattr(p, name)) is not None}
        self._own: dict[str, Array] = {}
        self._products: list[Product] = []
        self._steps: list[Callable[[Operands], None]] = []
        self._triangle: LocalPart | None = None  # this rank's part of the one that is read, or written
        with ExitStack() as closing:

            def add(
                problem: Problem, options: Options, *names: str, window: Window = _ALL, of: Any = (_ALL, _ALL)
            ) -> None:
                """Prepare a step: its a, b, c and d by name, "" for none; parts of a and b, and of d."""
                places = [(name, part) for name, part in zip(names, (*of, window, window), strict=True)]
                product = prepare(engine, problem, options, self._used(operands, places))
                closing.callback(product.close)
                self._products.append(product)
                self._steps.append(_Step(product, lambda given: self._used(given, places)))

            if p.traits.shape == "sided":
                self._fill_and_multiply(add)
            else:
                self._multiply_and_add(add)
            self._closing = closing.pop_all()
        own = sum(array.nbytes for array in self._own.values())
        on_device = engine.device is not None
        self.workspace = Workspace(
            max(each.workspace.device_bytes for each in self._products) + own * on_device,
            max(each.workspace.host_bytes for each in self._products) + own * (not on_device),
        )
        self.path = f"full: {self._products[-1 if p.traits.shape == 'sided' else 0].path}"
        self.sent_bytes = sum(each.sent_bytes for each in self._products)
        self.copied_bytes = sum(each.copied_bytes for each in self._products)

    @property
    def _adjoint(self) -> Op:
        return "C" if self._p.is_hermitian else "T"

    def _fill_and_multiply(self, add: Callable[..., None]) -> None:
        """Fill a copy of A, both triangles, and multiply it."""
        p, options = self._p, replace(self._options, algo="auto")
        full = self._make("full", p.a)
        other: Literal["L", "U"] = "U" if p.uplo == "L" else "L"
        mirrored = Level3Problem("tradd", p.a, full, uplo=other, op_a=self._adjoint)
        add(mirrored, Options(), "a", "", "", "full")
        if self._rank < full.grid.size:
            places = full.global_indices(self._rank)
            self._triangle = LocalPart(Trapezoid(p.uplo), *places, hermitian=p.is_hermitian)
        self._steps.append(self._copy_triangle)
        assert p.b is not None
        c = p.c if options.beta != 0 else None
        a, b, names = (full, p.b, ("full", "b")) if p.side == "L" else (p.b, full, ("b", "full"))
        add(MatmulProblem(a=a, b=b, c=c, d=p.d), options, *names, "" if c is None else "c", "d")

    def _copy_triangle(self, given: Operands) -> None:
        """Copy the triangle of A, its diagonal included, to where its mirror image is. Local."""
        if self._triangle is not None:
            a, full = given.a, self._own["full"]
            self._engine.operations.add(full, 1, a, 0, full, self._triangle, conjugate=False)

    def _multiply_and_add(self, add: Callable[..., None]) -> None:
        """Multiply into a temporary matrix, add its adjoint if the routine has two terms, and take D's triangle."""
        p, options = self._p, replace(self._options, algo="auto", beta=0)
        full, other = self._make("full", p.d), p.a if p.b is None else p.b
        ops: tuple[Op, Op] = ("N", self._adjoint) if p.op_a == "N" else (self._adjoint, "N")
        for window in self._stripes():
            of = [(rows, slice(None)) if p.op_a == "N" else (slice(None), rows) for rows in window]
            problem = MatmulProblem(a=p.a[of[0]], b=other[of[1]], d=full[window], op_a=ops[0], op_b=ops[1])
            add(problem, options, "a", "a" if p.b is None else "b", "", "full", window=window, of=of)
        if p.traits.swept_twice:
            total = self._make("sum", p.d)
            both = Level3Problem("tradd", full, total, c=full, uplo=p.uplo, op_a=self._adjoint)
            add(both, Options(beta=1), "full", "", "full", "sum")
        if self._rank < p.d.grid.size:
            assert p.written is not None
            self._triangle = LocalPart(p.written, *p.d.global_indices(self._rank), hermitian=p.is_hermitian)

    def _stripes(self) -> Iterator[Window]:
        """Yield what is computed of D's square: stripes that cover the triangle, or all of it."""
        p, order = self._p, self._p.d.shape[0]
        unit = max(p.d.block) * max(p.d.grid.shape)
        width = -(-order // (_STRIPES * unit)) * unit
        if p.traits.swept_twice or width >= order:
            yield _ALL
            return
        for start in range(0, order, width):
            stop = min(start + width, order)
            yield (slice(start, order) if p.uplo == "L" else slice(0, stop)), slice(start, stop)

    def _make(self, name: str, like: MatrixDescriptor) -> MatrixDescriptor:
        """Make a matrix of the product's own, laid out like another. Collective over the context."""
        self._layouts[name] = x = replace(like, ld=None)
        self._own[name] = new_part(self._engine, x)
        return x

    def _used(self, operands: Operands, places: list[tuple[str, Window]]) -> Operands:
        """Return the operands of a step. Local."""
        return Operands(*(self._local(operands, name, window) for name, window in places))

    def _local(self, operands: Operands, name: str, window: Window) -> Array:
        if not name:
            return None
        array = self._own[name] if name in self._own else getattr(operands, name)
        x = self._layouts[name]
        if window is _ALL or self._rank >= x.grid.size:
            return array
        (rows, cols), (p, q) = x.ranges(window), x.grid.coords(self._rank)
        return array[x.rows.local_window(p, *rows), x.cols.local_window(q, *cols)]

    _replays = False  # as a whole: its products do

    @property
    def queues(self) -> bool:
        """Whether a run only queues work: on GPUs."""
        return not self._engine.agrees

    def _queue(self, operands: Operands) -> None:
        for step in self._steps:
            step(operands)
            self._engine.transport.fence()  # the next one writes the buffers that this one's ranks have read
        if self._p.written is not None and self._triangle is not None:
            total = self._own["sum" if "sum" in self._own else "full"]
            c = operands.d if operands.c is None else operands.c
            self._engine.operations.add(
                operands.d, 1, total, self._options.beta, c, self._triangle, conjugate=False
            )

    def close(self) -> None:
        """Free what the steps hold. Collective over the context."""
        super().close()
        self._steps.clear()
        self._own.clear()
        self._closing.close()


class _Step:
    """A product of the routine, with its operands, which stay the same objects from run to run: graphs are theirs."""

    def __init__(self, product: Product, used: Callable[[Operands], Operands]) -> None:
        self._product, self._find = product, used
        self._given: weakref.ref[Operands] | None = None
        self._used: Operands | None = None

    def __call__(self, given: Operands) -> None:
        if self._used is None or self._given is None or self._given() is not given:
            self._used, self._given = self._find(given), weakref.ref(given, self._forget)
        self._product.run(self._used)

    def _forget(self, reference: weakref.ref[Operands]) -> None:
        if self._given is reference:
            self._used = self._given = None


def algorithms(prepare: Prepare) -> tuple[Algorithm, ...]:
    """Return the rows, whose steps ``prepare`` prepares. Local."""

    def serves(problem: Problem) -> bool:
        if not isinstance(problem, Level3Problem):
            return False
        return problem.traits.shape == "updated" or (
            problem.traits.shape == "sided" and not problem.traits.triangular
        )

    def prepared(engine: Engine, p: Level3Problem, options: Options, operands: Operands) -> FullProduct:
        return FullProduct(engine, prepare, p, options, operands)

    def cost(engine: Engine, p: Level3Problem, options: Options) -> float:  # noqa: ARG001
        """Return less than other algorithms cost on GPUs, where no operation is wasted and B is not a few vectors."""
        wasteless = p.traits.swept_twice
        if p.traits.shape == "sided":
            wasteless = min(p.d.shape) * _THIN >= p.a.shape[0]
        return _FAST if wasteless and engine.device is not None else _SLOW

    def refusal(engine: Engine, p: Level3Problem, options: Options, operands: Operands | None) -> str:
        why = type_refusal(engine, p, options, operands)
        if why or options.algo != "auto":
            return why
        like = p.a if p.traits.shape == "sided" else p.d
        largest = max(rows * cols for rows, cols in map(like.local_shape, range(like.grid.size)))
        nbytes = (1 + p.traits.swept_twice) * largest * like.dtype.itemsize
        enough, limit = engine.transport.fits(nbytes)
        return "" if enough else f"whole matrices would need {nbytes} bytes a rank, only {limit} available"

    return (Algorithm("full", prepared, serves, refusal=refusal, cost=cost),)
