# SPDX-License-Identifier: Apache-2.0
"""Level-3 problems at random: matrices anywhere in larger ones, NaN where nothing may be read, dense expectations."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

import pblasmp as pb
from pblasmp.layout.level3 import ROUTINES
from pblasmp.testing.level3 import OPS, dense, shapes, touched
from tests.helpers.cases import first, layout, numbers, pick, product, scattered

_MATMUL = SimpleNamespace(shape="product", operands=("a", "b", "c"))  # which is no row of ROUTINES

DTYPES = ("float32", "float64", "complex64", "complex128")


@dataclass
class Operand:
    """The part ``window`` of a larger matrix, of which every rank has the values, or the transpose of such a part."""

    matrix: pb.DistributedMatrix
    parent: pb.DistributedMatrix
    whole: np.ndarray
    window: tuple[slice, slice]
    transposed: bool

    def expect(self, values):
        """From now on it has these values."""
        self.whole[self.window] = values.T if self.transposed else values

    def changed(self):
        """What is wrong unless every value, also around the window, is as ``whole`` says; NaN is NaN."""
        d = self.parent.descriptor
        if self.parent.context.rank >= d.grid.size:
            return None
        rows, cols = d.global_indices(self.parent.context.rank)
        same = np.array_equal(self.parent.local, self.whole[rows[:, None], cols], equal_nan=True)
        return None if same else f"{d}: the values around it, or in the other triangle, have changed"


class Place(NamedTuple):
    """Where in a larger matrix some values begin, and how that is dealt out."""

    grid: pb.Grid
    block: tuple[int, int]
    source: tuple[int, int]
    start: tuple[int, int]


def place(ctx, rng):
    """Any place."""
    d = layout(rng, (0, 0), ctx.size, block=_two(rng, 1, pick(rng, (9, 9, 65))))
    return Place(d.grid, d.block, d.source, _two(rng, 0, 6) if rng.integers(2) else (0, 0))


def _two(rng, least, stop):
    i, j = rng.integers(least, stop, 2).tolist()
    return i, j


def placed(ctx, rng, values, order, at=None):
    """``values`` at a place, by default any, perhaps as a transpose; poison around it."""
    return side_by_side(ctx, rng, [values], order, at)[0]


def side_by_side(ctx, rng, matrices, order, at=None):
    """Matrices of one type, all parts of the same larger one; poison around and between them."""
    at = at or place(ctx, rng)
    turned = [rng.integers(4) == 0 for _ in matrices]
    held = [x.T if transposed else x for x, transposed in zip(matrices, turned, strict=True)]
    windows, (height, width) = [], (0, 0)
    for x in held:
        i, j = (start + extent for start, extent in zip(at.start, (0, width), strict=True))
        windows.append((slice(i, i + x.shape[0]), slice(j, j + x.shape[1])))
        height, width = max(height, windows[-1][0].stop), windows[-1][1].stop
    below, beside = _two(rng, 0, 6) if rng.integers(2) else (0, 0)
    how = {"grid": at.grid, "block": at.block, "source": at.source, "order": order}
    d = layout(rng, (height + below, width + beside), ctx.size, dtype=matrices[0].dtype, **how)
    whole = np.full(d.shape, 77, d.dtype)
    for x, window in zip(held, windows, strict=True):
        whole[window] = x
    parent = scattered(ctx, d, whole)
    return [
        Operand(parent[window].T if transposed else parent[window], parent, whole, window, transposed)
        for window, transposed in zip(windows, turned, strict=True)
    ]


def all_placed(ctx, rng, values):
    """Matrices by name, each at a place of its own or at that of another, or all parts of the same larger one."""
    if rng.integers(4) == 0:
        return dict(zip(values, side_by_side(ctx, rng, [*values.values()], pick(rng, "CF")), strict=True))
    places, found = [], {}
    for name, x in values.items():
        places.append(pick(rng, places) if places and rng.integers(3) else place(ctx, rng))
        found[name] = placed(ctx, rng, x, pick(rng, "CF"), places[-1])
    return found


def triangular(rng, order, dtype, uplo):
    """A triangular matrix whose solutions are exact: powers of two on the diagonal, few others."""
    a = numbers(rng, (order, order), dtype) * (rng.integers(0, 4, (order, order)) == 0)
    units = [1, -1, 2, 0.5] if np.dtype(dtype).kind == "f" else [1, -1, 2, 1j, -0.5j]
    np.fill_diagonal(a, rng.choice(np.array(units), order))
    return a.astype(dtype)


def drawn(rng, routine, flags, dtype, sizes, alpha, beta):
    """Values of the operands, NaN wherever the routine may not read."""
    values = {name: numbers(rng, sizes[name], dtype) for name in _traits(routine).operands}
    if routine == "matmul":
        expected = product(**values, **flags, alpha=alpha, beta=beta)
    elif routine == "trsm":
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
            unread = ~_touched(routine, "c", flags, sizes["c"]) | (beta == 0)
        elif name == "a":
            unread = ~_touched(routine, "a", flags, sizes["a"]) | (alpha == 0)
        else:
            unread = np.full(sizes[name], alpha == 0)
        values[name][unread] = np.nan
    unread = values.get("a" if routine == "hemm" else "c")
    if routine.startswith("he") and dtype.startswith("c") and unread is not None:
        np.fill_diagonal(unread.imag, np.nan)  # the diagonal is taken to be real
    if alpha == 0 and routine != "matmul":
        expected = (
            dense(routine, {k: np.nan_to_num(v) for k, v in values.items()}, flags, 0, beta)
            if routine != "trsm"
            else np.zeros(sizes["d"])
        )
    return values, expected.astype(dtype)


def _traits(routine):
    return _MATMUL if routine == "matmul" else ROUTINES[routine]


def _touched(routine, name, flags, shape):
    return np.ones(shape, bool) if routine == "matmul" else touched(routine, name, flags, shape)


def scalars(rng, routine, dtype):
    """An alpha and a beta that the routine takes."""
    traits = _traits(routine)
    alpha, beta = pick(rng, (1, 2, -1, 0.5, 1, 2, -1, 0)), pick(rng, (0, 1, -2, 0.5))
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
    """Run matmul or a level-3 routine on what is drawn; return what is wrong with the result or with what is around."""
    has = _traits(routine)
    alpha, beta = scalars(rng, routine, dtype)
    sizes = shapes(routine, flags, *sizes) if has is not _MATMUL else _shapes_of_product(flags, *sizes)
    if has.shape == "added":
        asks = pick(rng, ("new and c", "out and c", "in place"))
    else:
        asks = pick(rng, ("new", "new and c", "out", "out and c", "out and c", "in place"))
        beta = 0 if asks in ("new", "out") else beta
    values, expected = drawn(rng, routine, flags, dtype, sizes, alpha, beta)
    shown = {name: x for name, x in values.items() if name != "c" or asks not in ("new", "out")}
    if asks in ("out", "out and c"):
        shown["out"] = np.full(sizes["d"], np.nan, dtype)
    given = all_placed(ctx, rng, shown)
    inner = "c" if "c" in has.operands else "b"
    out = given[inner] if asks == "in place" else given.get("out")
    before = np.zeros(sizes["d"], dtype)
    if out is not None or "c" in given:
        before = shown["out"] if "out" in given else values[inner]
    expected = np.where(_touched(routine, "d", flags, sizes["d"]), expected, before)
    arguments = {**flags, "alpha": alpha} | ({"beta": beta} if "c" in has.operands else {})
    result = (pb.matmul if routine == "matmul" else getattr(pb.blas, routine))(
        *(given[name].matrix for name in has.operands if name in given),
        **arguments, out=out and out.matrix, algo=algo,
    )  # fmt: skip
    if out is not None:
        out.expect(expected)
    wrong = first(
        unlike(result, expected),
        None if out is None or result is out.matrix else "the result is not out",
        *(x.changed() for x in given.values()),
    )
    return (
        wrong and f"{asks}, {alpha=}, {beta=}, {result}, {[str(x.matrix) for x in given.values()]}: {wrong}"
    )


def _shapes_of_product(flags, m, n, k):
    a, b = ((x, y) if flags[op] == "N" else (y, x) for op, x, y in (("op_a", m, k), ("op_b", k, n)))
    return {"a": a, "b": b, "c": (m, n), "d": (m, n)}
