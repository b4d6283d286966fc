# SPDX-License-Identifier: Apache-2.0
"""Level-3 problems at random: matrices anywhere in larger ones, NaN where nothing may be read, dense expectations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import pblasmp as pb
from pblasmp.layout.level3 import ROUTINES
from pblasmp.testing.level3 import OPS, dense, shapes, touched
from tests.helpers.cases import first, layout, numbers, pick, scattered

DTYPES = ("float32", "float64", "complex64", "complex128")


@dataclass
class Operand:
    """The part ``window`` of a larger matrix, of which every rank has the values."""

    matrix: pb.DistributedMatrix
    parent: pb.DistributedMatrix
    whole: np.ndarray
    window: tuple[slice, slice]

    def changed(self):
        """What is wrong unless every value, also around the window, is as ``whole`` says; NaN is NaN."""
        d = self.parent.descriptor
        if self.parent.context.rank >= d.grid.size:
            return None
        rows, cols = d.global_indices(self.parent.context.rank)
        same = np.array_equal(self.parent.local, self.whole[rows[:, None], cols], equal_nan=True)
        return None if same else f"{d}: the values around it, or in the other triangle, have changed"


def placed(ctx, rng, values, order):
    """``values`` at any offset of a larger matrix, in any layout; poison around it."""
    before, after = ([int(x) for x in rng.integers(0, 6, 2)] if rng.integers(2) else [0, 0] for _ in range(2))
    shape = tuple(b + n + a for b, n, a in zip(before, values.shape, after, strict=True))
    window = tuple(slice(b, b + n) for b, n in zip(before, values.shape, strict=True))
    d = layout(rng, shape, ctx.size, dtype=values.dtype, order=order)
    whole = np.full(d.shape, 77, values.dtype)
    whole[window] = values
    parent = scattered(ctx, d, whole)
    return Operand(parent[window], parent, whole, window)


def triangular(rng, order, dtype, uplo):
    """A triangular matrix whose solutions are exact: powers of two on the diagonal, few others."""
    a = numbers(rng, (order, order), dtype) * (rng.integers(0, 4, (order, order)) == 0)
    units = [1, -1, 2, 0.5] if np.dtype(dtype).kind == "f" else [1, -1, 2, 1j, -0.5j]
    np.fill_diagonal(a, rng.choice(np.array(units), order))
    return a.astype(dtype)


def drawn(rng, routine, flags, dtype, sizes, alpha, beta):
    """Values of the operands, NaN wherever the routine may not read."""
    values = {name: numbers(rng, sizes[name], dtype) for name in ROUTINES[routine].operands}
    if routine == "trsm":
        values["a"] = triangular(rng, sizes["a"][0], dtype, flags["uplo"])
        t = np.where(touched("trsm", "a", {**flags, "diag": "N"}, sizes["a"]), values["a"], 0)
        if flags["diag"] == "U":
            np.fill_diagonal(t, 1)
        t = OPS[flags["op_a"]](t)
        x = values["b"] // 2 if dtype.startswith("f") else values["b"]
        values["b"] = (t @ x if flags["side"] == "L" else x @ t).astype(dtype)
        expected = alpha * x
    else:
        expected = dense(routine, values, flags, alpha, beta)
    for name in values:
        if name == "c":
            unread = ~touched(routine, "c", flags, sizes["c"]) | (beta == 0)
        elif name == "a":
            unread = ~touched(routine, "a", flags, sizes["a"]) | (alpha == 0)
        else:
            unread = np.full(sizes[name], alpha == 0)
        values[name][unread] = np.nan
    unread = values.get("a" if routine == "hemm" else "c")
    if routine.startswith("he") and dtype.startswith("c") and unread is not None:
        np.fill_diagonal(unread.imag, np.nan)  # the diagonal is taken to be real
    if alpha == 0:
        expected = (
            dense(routine, {k: np.nan_to_num(v) for k, v in values.items()}, flags, 0, beta)
            if routine != "trsm"
            else np.zeros(sizes["d"])
        )
    return values, expected.astype(dtype)


def scalars(rng, routine, dtype):
    """An alpha and a beta that the routine takes."""
    traits = ROUTINES[routine]
    alpha, beta = pick(rng, (1, 2, -1, 0.5, 0)), pick(rng, (0, 1, -2))
    if dtype.startswith("c"):
        alpha = alpha if routine == "herk" else alpha * (1 + 2j)
        beta = beta if routine.startswith("he") and traits.shape == "updated" else beta * (2 - 1j)
    return alpha, beta if "c" in traits.operands else 0


def unlike(result, expected):
    """What is wrong with this rank's part of the result; NaN is NaN."""
    if result.context.rank >= result.descriptor.grid.size:
        return None
    rows, cols = result.descriptor.global_indices(result.context.rank)
    part, found = expected[rows[:, None], cols], result.local
    if np.array_equal(found, part, equal_nan=True):
        return None
    where = np.argwhere(~((found == part) | (np.isnan(part) & np.isnan(found))))
    i = tuple(where[0])
    return f"{len(where)} values differ, first at {i}: {found[i]}, expected {part[i]}"


def called(ctx, rng, routine, flags, dtype, algo, sizes):
    """Run one routine on what is drawn; return what is wrong with the result or with the values around it."""
    has = ROUTINES[routine]
    alpha, beta = scalars(rng, routine, dtype)
    sizes = shapes(routine, flags, *sizes)
    if has.shape == "added":
        asks = pick(rng, ("new and c", "out and c", "in place"))
    else:
        asks = pick(rng, ("new", "new and c", "out", "out and c", "in place"))
        beta = 0 if asks in ("new", "out") else beta
    values, expected = drawn(rng, routine, flags, dtype, sizes, alpha, beta)
    given = {
        name: placed(ctx, rng, x, pick(rng, "CF"))
        for name, x in values.items()
        if name != "c" or asks not in ("new", "out")
    }
    out, before = None, np.zeros(sizes["d"], dtype)
    if asks in ("out", "out and c"):
        before = np.full(sizes["d"], np.nan, dtype)
        out = placed(ctx, rng, before, pick(rng, "CF"))
    elif asks == "in place":
        inner = "c" if "c" in has.operands else "b"
        out, before = given[inner], values[inner]
    elif "c" in given:
        before = values["c"]
    expected = np.where(touched(routine, "d", flags, sizes["d"]), expected, before)
    arguments = {**flags, "alpha": alpha} | ({"beta": beta} if "c" in has.operands else {})
    result = getattr(pb, routine)(
        *(given[name].matrix for name in has.operands if name in given),
        **arguments, out=out and out.matrix, algo=algo,
    )  # fmt: skip
    if out is not None:
        out.whole[out.window] = expected
    wrong = first(
        unlike(result, expected),
        None if out is None or result is out.matrix else "the result is not out",
        *(x.changed() for x in (*given.values(), out) if x is not None),
    )
    return (
        wrong and f"{asks}, {alpha=}, {beta=}, {result}, {[str(x.matrix) for x in given.values()]}: {wrong}"
    )
