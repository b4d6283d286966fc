# SPDX-License-Identifier: Apache-2.0
"""The level-3 routines as cuBLASMp sees them: one call for each, its arguments by their names in C.

The layouts that they require: everything is on D's processes; trsm takes any blocks and offsets since 0.9.1, the others
need offsets on block boundaries, and matching blocks. Source: cublasmp.h of 0.8 to 0.10.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ....bindings import FUNCTIONS
from ....dtypes import accumulation_dtype
from ....layout import Level3Problem, MatmulProblem, MatrixDescriptor
from ....layout.pieces import LocalPart
from ...arrays import same_memory, scale
from ...product import Product
from ...protocol import Engine
from ...request import Operands, Options
from ..kernels.views import copy_where
from ..types import DIAGONALS, FILLS, OPS, SIDES, compute_type
from . import faults
from .library import Cublasmp
from .prepared_call import PreparedCall, columns, part_mask

_ANY_BLOCKS = 901

_WORDS = {"a": "A", "b": "B", "d": "the result"}


def symbol_of(problem: Level3Problem) -> str:
    """Return the function that computes a routine; for real types the Hermitian ones are the symmetric ones. Local."""
    real = problem.d.dtype.kind != "c"
    name = problem.traits.twin if problem.traits.hermitian and real else problem.routine
    return f"cublasMp{name.capitalize()}"


def nearest_level3(problem: Level3Problem, version: int) -> tuple[Level3Problem, tuple[str, ...]]:
    """Return the routine with layouts that cuBLASMp takes, ``problem`` itself if it takes that, and the reasons. Local.

    D stays where it is if possible. Every matrix keeps its memory order.
    """
    form = problem.column_major()
    q = form.problem
    nearest = _nearest(q, version)
    moved: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    b_order = problem.a.order if problem.traits.shape == "updated" else problem.d.order
    for letter, new in nearest.items():
        old = getattr(q, letter)
        if new == old:
            continue
        name = {"a": "b", "b": "a"}.get(letter, letter) if form.swapped else letter
        order = {"a": problem.a.order, "b": b_order, "d": problem.d.order}[name]
        moved[name] = new.T if order == "C" else new
        start = q.traits.solves and letter == "b"
        why = "it must have the result's layout" if start else f"{symbol_of(q)} needs {_what(old, new, q.d)}"
        reasons[name] = f"{_WORDS[name]} is moved: {why}"
    d = moved.get("d", problem.d)
    if problem.c is not None and "d" in moved:
        moved["c"] = d
        reasons["c"] = "C is moved: it must have the result's layout"
    if problem.traits.shape == "added" and faults.sums_may_hang(version, d):
        like = replace(d if problem.op_a == "N" else d.T, ld=None)  # then each rank adds its own parts
        if not problem.a.same_places(like) or problem.a.order != like.order:
            moved["a"] = like
            reasons["a"] = f"A is moved to the result's layout: {symbol_of(q)} may hang if it moves data"
    return replace(problem, **moved), tuple(reasons.values())


def _nearest(q: Level3Problem, version: int) -> dict[str, MatrixDescriptor]:
    """Return the layouts of A, B and D nearest to those of F-ordered matrices."""
    if q.traits.solves and version >= _ANY_BLOCKS:
        return {"a": _laid(q.a, q.a.block, q.d, q.a.lead), "b": _like(q.b, q.d), "d": q.d}
    turned = q.op_a != "N"
    if q.traits.shape == "updated":
        order = q.d.block[0] if q.d.block[0] == q.d.block[1] else q.a.block[int(turned)]
        d = _laid(q.d, (order, order), q.d)
        k_block = q.a.block[int(not turned)]
        block = (k_block, order) if turned else (order, k_block)
        laid = {"a": _laid(q.a, block, d), "d": d}
        return laid if q.b is None else laid | {"b": _laid(q.b, block, d)}
    if q.traits.shape == "added":
        square = q.written is not None or version < _ANY_BLOCKS
        d = _laid(q.d, (q.d.block[0],) * 2 if square else q.d.block, q.d)
        return {"a": _laid(q.a, d.block[::-1] if turned else d.block, d), "d": d}
    order = q.d.block[int(q.side == "R")]
    d = _laid(q.d, (order, order) if q.side == "R" or q.traits.solves else q.d.block, q.d)
    a = _laid(q.a, (order, order), d)
    assert q.b is not None
    b = _like(q.b, d) if q.traits.solves else _laid(q.b, d.block, d)
    return {"a": a, "b": b, "d": d}


def _laid(
    x: MatrixDescriptor, block: tuple[int, int], d: MatrixDescriptor, lead: tuple[int, int] = (0, 0)
) -> MatrixDescriptor:
    """Return ``x`` if it is in ``block`` on D's processes from a supported offset, else such a layout.

    The new layout begins where D does.
    """
    if x.block == block and x.lead == lead and x.grid.same_ranks(d.grid):
        return x
    return replace(x, block=block, grid=d.grid, source=d.source, lead=(0, 0), ld=None)


def _like(x: MatrixDescriptor | None, d: MatrixDescriptor) -> MatrixDescriptor:
    """Return ``x`` if it is laid out like D, to which it is copied, else D's layout."""
    assert x is not None
    return x if x.same_places(d) else replace(d, ld=None)


def _what(old: MatrixDescriptor, new: MatrixDescriptor, d: MatrixDescriptor) -> str:
    """Return in words which requirement was not met."""
    if not old.grid.same_ranks(d.grid):
        return "it on the result's processes"
    return "it in other blocks" if old.block != new.block else "it to start at a block boundary"


Array = Any


class CublasmpLevel3(PreparedCall):
    """A routine on this rank's part of D's grid. Making, growing and closing one is collective over the context.

    cuBLASMp updates in place: C, or the right-hand sides of a solve, are copied to D first, unless they are D.
    """

    def __init__(
        self,
        library: Cublasmp,
        problem: Level3Problem,
        options: Options,
        operands: Operands,
    ) -> None:
        self._problem, self._options = problem, options
        self._form = problem.column_major()
        self._f_ordered = q = self._form.problem
        library.grid(q.d.grid)
        inside = library.runtime.rank < q.d.grid.size
        self._symbol = symbol_of(problem)
        routine = self._symbol.removeprefix("cublasMp")
        super().__init__(library, routine, q.d.grid, operands, inside=inside)
        self.sent_bytes = _received_bytes(q, library.runtime.rank) if inside else 0
        self._views: dict[str, Array] = {}
        self._prepare()

    @property
    def path(self) -> str:  # type: ignore[override]
        """What cuBLASMp has run according to its log; before the first run, the function that is called."""
        return self._logged(self._symbol)

    # -- making

    def _arguments_of_call(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        q, alpha = self._f_ordered, self._options.alpha
        # sums have no compute type
        scale = q.d.dtype if q.traits.shape == "added" else accumulation_dtype(q.d.dtype)
        alpha = alpha.conjugate() if self._form.conj_alpha else alpha
        self._alpha, self._beta = np.array(alpha, scale), np.array(self._options.beta, scale)
        values: dict[str, Any] = {
            "handle": self._library.handle, "side": SIDES[q.side], "uplo": FILLS[q.uplo],
            "trans": OPS[q.op_a], "diag": DIAGONALS[q.diag], "m": q.m, "n": q.n, "k": q.k,
            "alpha": self._alpha.ctypes.data, "beta": self._beta.ctypes.data,
            "computeType": compute_type(q.d.dtype, None),
        }  # fmt: skip
        for letter, x in self._matrices.items():
            values |= {
                letter: self._pointers[letter],
                f"i{letter}": x.lead[0] + 1,
                f"j{letter}": x.lead[1] + 1,
            }
            there = replace(x, grid=q.d.grid)  # the same processes; cuBLASMp wants the same grid
            values[f"desc{letter.upper()}"] = self._descriptor(there, self._lld(self._views[letter], x))
        names = [argument.name for argument in FUNCTIONS[self._symbol].arguments]
        return tuple(values[name] for name in names[: names.index("d_work")]), ()

    # -- running

    def _forget(self) -> None:
        super()._forget()
        self._views = {}

    def _point_at(self, operands: Operands) -> None:
        self._before, self._after = [], []
        q, p, form = self._f_ordered, self._problem, self._form
        a, b, c, d = operands.a, operands.b, operands.c, operands.d
        out = whole = columns(d, p.d.order)
        if not self._fits(out, q.d):  # there must be room for the rows before the first one
            out = self._temporary("d", q.d)
            self._after.append(lambda: copy_where(whole, out))
        solves = p.traits.solves
        self._views = {"b" if solves else "c": out}
        self._matrices = dict.fromkeys(self._views, q.d)
        begins = b if solves else c if self._options.beta != 0 else None
        if begins is not None and (out is not whole or not same_memory(begins, d)):
            self._start_from("B" if solves else "C", columns(begins, p.d.order), out)
        elif begins is None and faults.reads_c_with_beta_0(p):
            mask = self._mask
            self._before.append(lambda: copy_where(out, 0, mask))
        like = p.a.order if p.traits.shape == "updated" else p.d.order
        factors = {"A": columns(a, p.a.order)}
        if b is not None and not solves:
            factors["B"] = columns(b, like)
        for letter, name in zip("ab", sorted(factors, reverse=form.swapped), strict=False):
            x: MatrixDescriptor = getattr(q, letter)
            self._matrices[letter] = x
            self._views[letter] = self._operand(letter, name, factors[name], x, d)
        for letter, x in self._matrices.items():
            self._point(letter, self._views[letter], x)

    def _operand(self, letter: str, name: str, view: Array, x: MatrixDescriptor, d: Array) -> Array:
        """Return an operand as the call reads it: itself, or a temporary that is written before each run."""
        import cupy

        if letter in self._form.conjugated:
            return self._through(name, view, x, cupy.conjugate, "it is conjugated without a transpose")
        if name.lower() in self._form.relaid:
            return self._through(name, view, x, cupy.positive, "it is in another memory order")
        if self._problem.traits.triangular and self._library.overlap(view, d):
            return self._through(name, view, x, cupy.positive, "it is in the place of the result")
        if not self._fits(view, x):
            return self._through(name, view, x, cupy.positive, "it begins inside a block")
        return view

    def _start_from(self, name: str, begins: Array, out: Array) -> None:
        """Copy to D, before each run, the matrix that the routine updates."""
        self._copies(name, out.nbytes, "the result is computed in its place")
        mask = self._mask
        self._before.append(lambda: copy_where(out, begins, mask))

    @cached_property
    def _mask(self) -> Array | None:
        """Which elements of D the routine writes."""
        return part_mask(self._f_ordered.written, self._f_ordered.d, self._library.runtime.rank)


class ScaledC(Product):
    """D = beta C where it is written, because alpha is 0 or an extent is: there is nothing to multiply. Local."""

    path = "D = beta C: there is nothing to compute"
    queues = True

    def __init__(self, engine: Engine, problem: MatmulProblem | Level3Problem, beta: complex) -> None:
        self._operations, self._beta = engine.operations, beta
        self._part: LocalPart | None = None
        d, rank = problem.d, engine.transport.rank
        if isinstance(problem, Level3Problem) and problem.written is not None and rank < d.grid.size:
            self._part = LocalPart(problem.written, *d.global_indices(rank), hermitian=problem.is_hermitian)

    def _queue(self, operands: Operands) -> None:
        c, d, scales = operands.c, operands.d, operands.scales
        if scales is not None and scales.amax is not None:
            scales.amax[...] = 0  # of an 8-bit D, which is 0; for other types it is computed afterwards
        beta = 0 if c is None else self._beta
        if self._part is not None:
            self._operations.add(d, 0, d, beta, d if c is None else c, self._part, conjugate=False)
            return
        if beta != 0:
            d[...] = c
        scale(d, beta)


def _received_bytes(q: Level3Problem, rank: int) -> int:
    """Return about how many bytes a rank needs from others: its share of the operands; triangles count as squares."""
    rows, cols = q.d.local_shape(rank)
    if q.traits.shape == "added":
        needed = rows * cols if q.op_a != "N" else 0
        operands = [q.a]
    elif q.traits.shape == "sided":
        needed = (rows if q.side == "L" else cols) * q.k + (cols if q.side == "L" else rows) * q.k
        operands = [q.a, q.d]
    else:
        operands = [x for x in (q.a, q.b) if x is not None]
        needed = (rows + cols) * q.k * len(operands)
    held = sum(r * c for r, c in (x.local_shape(rank) for x in operands))
    return max(0, needed - held) * q.d.dtype.itemsize
