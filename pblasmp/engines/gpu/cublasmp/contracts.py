# SPDX-License-Identifier: Apache-2.0
"""The layouts that cuBLASMp's level-3 routines require, and the nearest such layouts.

Everything is on D's processes. trsm takes any blocks and offsets since 0.9.1; the others need offsets on block
boundaries, and matching blocks. Source: cublasmp.h of 0.8 to 0.10.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....layout import Level3Problem, MatrixDescriptor
from . import faults

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
