# SPDX-License-Identifier: Apache-2.0
"""Calls of levels 1 and 2 at random: rows, columns and parts of larger matrices, NaN where nothing may be read.

Numbers are small integers, so that results are exact: what NumPy computes is compared for equality.
"""

from __future__ import annotations

import itertools

import numpy as np

import pblasmp as pb
from pblasmp.layout.routines import VECTOR_ROUTINES
from tests.helpers.cases import OPS, first, numbers, pick
from tests.helpers.level3_cases import DTYPES, all_placed, placed, triangular, unlike

LETTERS = {"uplo": "LU", "op_a": "NTC", "diag": "NU"}


def legal_options(routine):
    """Every combination of a routine's options."""
    names = VECTOR_ROUTINES[routine].options
    return [
        dict(zip(names, each, strict=True)) for each in itertools.product(*(LETTERS[name] for name in names))
    ]


def stored(uplo, order, *, unit=False):
    """Which elements of a triangle are read or written."""
    ones = np.ones((order, order), bool)
    return np.tril(ones, -int(unit)) if uplo == "L" else np.triu(ones, int(unit))


def filled(a, uplo, *, hermitian):
    """The symmetric or Hermitian matrix of which ``a`` has a triangle."""
    part = np.where(stored(uplo, len(a), unit=True), a, 0)
    diagonal = a.diagonal().real if hermitian else a.diagonal()
    return part + (part.conj().T if hermitian else part.T) + np.diag(diagonal)


def computed(routine, values, options, alpha, beta):
    """What a routine of level 2, or one of level 1 that writes a vector, computes; vectors have one column."""
    a, x, y = (values.get(name) for name in "axy")
    hermitian = routine in ("hemv", "her", "her2") and x.dtype.kind == "c"
    if routine in ("axpy", "copy", "scal"):
        return {"axpy": lambda: alpha * x + y, "copy": lambda: x, "scal": lambda: alpha * x}[routine]()
    if routine == "trsv":
        return values.pop("solution")
    if routine == "trmv":
        t = np.where(stored(options["uplo"], len(a), unit=options["diag"] == "U"), a, 0)
        return OPS[options["op_a"]](t + np.eye(len(a)) if options["diag"] == "U" else t) @ x
    if routine in ("gemv", "symv", "hemv"):
        full = (
            OPS[options["op_a"]](a) if routine == "gemv" else filled(a, options["uplo"], hermitian=hermitian)
        )
        return alpha * (full @ x) + (beta * y if beta else 0)
    if routine in ("ger", "gerc"):
        return alpha * x @ (y.T if routine == "ger" else y.conj().T) + (0 if a is None else a)
    turned = np.conj if hermitian else np.asarray
    other = x if y is None else y
    added = alpha * x @ turned(other.T)
    if y is not None:
        added = added + turned(alpha) * y @ turned(x.T)
    old = np.zeros_like(added) if a is None else a.copy()
    if hermitian:
        np.fill_diagonal(old.imag, 0)
    return added + old


def drawn(rng, routine, options, dtype, m, n, alpha, beta):
    """Values of the operands, vectors as columns; NaN where the routine may not read."""
    row, is_complex = VECTOR_ROUTINES[routine], np.dtype(dtype).kind == "c"
    extents = {"m": m, "n": m if "n n" in row.sizes.values() else n}
    values = {}
    for name, sizes in row.sizes.items():
        letters = sizes.split()
        if name == "a":
            values[name] = numbers(rng, tuple(extents[letter] for letter in letters), dtype)
        else:
            letter = letters[-1 if options.get("op_a", "N") != "N" else 0]
            values[name] = numbers(rng, (extents[letter], 1), dtype)
    if routine == "copy":
        del values["y"]
    if routine == "trsv":
        a = values["a"] = triangular(rng, extents["n"], dtype, options["uplo"])
        part = np.where(stored(options["uplo"], len(a), unit=options["diag"] == "U"), a, 0)
        part = part + np.eye(len(a)) if options["diag"] == "U" else part
        values["solution"] = values["x"]
        values["x"] = (OPS[options["op_a"]](part) @ values["x"]).astype(dtype)
    if "uplo" in options:
        unit = options.get("diag") == "U"
        values["a"][~stored(options["uplo"], extents["n"], unit=unit)] = np.nan
    if routine in ("hemv", "her", "her2") and is_complex:
        np.fill_diagonal(values["a"].imag, np.nan)
    return values


def scalars(rng, routine, dtype):
    """An alpha and a beta that the routine takes."""
    alpha, beta = pick(rng, (1, 2, -1, 0.5)), pick(rng, (0, 1, -2))
    if np.dtype(dtype).kind == "c":
        alpha, beta = alpha * (1 if routine == "her" else 1 + 2j), beta * (2 - 1j)
    return alpha, beta


def called(ctx, rng, routine, options, dtype, algo="auto", sizes=None):
    """Run one routine that writes; return what is wrong with the result or with the values around it."""
    row = VECTOR_ROUTINES[routine]
    m, n = sizes or (int(each) for each in rng.integers(0, 13, 2))
    alpha, beta = scalars(rng, routine, dtype)
    values = drawn(rng, routine, options, dtype, m, n, alpha, beta)
    asks = pick(rng, ("new", "out", "in place"))
    if row.optional and asks != "in place" and rng.integers(2):
        values.pop(row.optional)
        beta = 0
    wanted = computed(routine, values, options, alpha, beta).astype(dtype)
    flat = {name: name != "a" and bool(rng.integers(2)) for name in (*values, "out")}  # as a row
    shown = {name: x.T if flat[name] else x for name, x in values.items()}
    if beta == 0 and "y" in values and row.optional == "y" and asks != "in place":
        shown["y"] = np.full_like(shown["y"], np.nan)
    if asks == "out":
        row_of_out = row.written != "a" and flat["out"]
        shown["out"] = np.full_like(wanted.T if row_of_out else wanted, 7)
    given = all_placed(ctx, rng, shown)
    out, before = given.get("out"), np.zeros_like(wanted)
    target = row.written
    like = target if target in given else "x"
    is_row = target != "a" and flat[like] and values[like].size != 1  # one element is a column
    if out is not None:
        is_row, before = row_of_out, np.full_like(wanted, 7)
    elif asks == "in place" and target in given:
        out, before = given[target], values[target]
    elif "a" in given and target == "a":
        before = values["a"]
    if target == "a" and "uplo" in options:
        wanted = np.where(stored(options["uplo"], len(wanted)), wanted, before)
    wanted = wanted.T if is_row else wanted
    how = dict(options)
    known = {"alpha": alpha, "beta": beta}
    if "alpha" in row.pblas:
        how["alpha"] = alpha
    if "beta" in row.pblas:
        how["beta"] = known["beta"]
    if algo != "auto":
        how["algo"] = algo
    result = getattr(pb.blas, routine)(
        *(given[name].matrix if name in given else None for name in row.sizes if name in given or name == row.optional),
        **how, out=out and out.matrix,
    )  # fmt: skip
    if out is not None:
        out.expect(wanted)
    same_shape = result.shape == wanted.shape
    wrong = first(
        unlike(result, wanted) if same_shape else f"{result.shape}, expected {wanted.shape}",
        None if out is None or result is out.matrix else "the result is not out",
        *(x.changed() for x in given.values()),
    )
    return (
        wrong and f"{asks}, {alpha=}, {beta=}, {result}, {[str(x.matrix) for x in given.values()]}: {wrong}"
    )


def vector(ctx, rng, dtype, n, values=None):
    """A row or a column of numbers in a larger matrix, and its elements."""
    x = numbers(rng, (n, 1), dtype) if values is None else values.reshape(-1, 1).astype(dtype)
    return placed(ctx, rng, x.T if rng.integers(2) else x, pick(rng, "CF")), x.reshape(-1)


def of_level_1(ctx, rng, dtype, n):
    """Run the reductions of two vectors, and exchange them; yield what is wrong with each."""
    x, y = (numbers(rng, n, dtype) for _ in "xy")
    rows = (z.reshape(1, n) for z in (x, y))
    a, b = all_placed(
        ctx, rng, {name: pick(rng, (z, z.T)) for name, z in zip("ab", rows, strict=True)}
    ).values()
    real = np.dtype(dtype).type(0).real.dtype
    sizes = abs(x.real) + abs(x.imag)
    at = int(sizes.argmax()) if n else -1
    value, index = pb.blas.amax(a.matrix)
    wrong = first(
        same(pb.blas.dot(a.matrix, b.matrix), (x * y).sum(), dtype),
        same(pb.blas.dotc(a.matrix, b.matrix), (x.conj() * y).sum(), dtype),
        same(pb.blas.asum(a.matrix), sizes.sum(), real),
        same(value, x[at] if n else 0, dtype),
        None if index == at else f"index {index}, expected {at}",
    )
    norm = pb.blas.nrm2(a.matrix)
    expected = np.sqrt((abs(x.astype("complex128")) ** 2).sum())
    near = norm.dtype == real and abs(norm - expected) <= 2 * np.finfo(real).eps * expected
    yield f"reductions {dtype} {n}", wrong or (None if near else f"norm {norm}, expected {expected}")
    pb.blas.swap(a.matrix, b.matrix)
    a.expect(y.reshape(a.matrix.shape))
    b.expect(x.reshape(b.matrix.shape))
    yield f"swap {dtype} {n}", first(a.changed(), b.changed())
    pb.blas.swap(a.matrix, a.matrix.T)
    yield "swap with itself", a.changed()


def same(found, expected, dtype):
    """What is wrong unless a number is the expected one, in this type."""
    kind = np.dtype(dtype)
    if found.dtype != kind:
        return f"{found.dtype}, expected {kind}"
    return (
        None
        if np.array_equal(found, kind.type(expected), equal_nan=True)
        else f"{found}, expected {expected}"
    )


WRITERS = [name for name, row in VECTOR_ROUTINES.items() if row.written and name != "swap"]
__all__ = [
    "DTYPES",
    "VECTOR_ROUTINES",
    "WRITERS",
    "called",
    "computed",
    "drawn",
    "legal_options",
    "of_level_1",
    "scalars",
    "stored",
    "vector",
]
