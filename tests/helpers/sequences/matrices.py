# SPDX-License-Identifier: Apache-2.0
"""Steps on the matrices of a session: how they are made, moved, viewed, computed with and written to files."""

from __future__ import annotations

import importlib.util
import operator
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp import pblas
from pblasmp.cli.run import dense, touched
from pblasmp.dtypes import ELEMENT_TYPES, as_dtype, is_float8, is_foreign
from pblasmp.layout import Trapezoid
from pblasmp.layout.routines import ROUTINES
from pblasmp.matrix.creation import random_values
from tests.helpers.calls import DTYPES, FUNCTIONS, called, legal_options
from tests.helpers.gpu.products import OPS, integers

from .session import Held, Session, SkipStep, differs, exact, expect, largest_exact, rounding, small
from .steps import Draw, call, converts, descriptor

FORMATS = (
    "npy",
    *(name for name, module in (("h5", "h5py"), ("zarr", "zarr")) if importlib.util.find_spec(module)),
)
"""Of files, those whose library is installed. Every rank has the same."""

MOST_RANDOM = 1 << 19  # random numbers that NumPy is asked for

SYMBOLS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
IN_PLACE = {"+": operator.iadd, "-": operator.isub, "*": operator.imul}

# -- new matrices


@call(
    6, to=Draw.slot, layout=Draw.layout, root=Draw.rank, seed=Draw.seed, way=Draw.of("C", "F", "every second")
)
def scatter(s: Session, to: int, layout: Any, root: int, seed: int, way: str) -> None:
    """An array of the root, in some memory order."""
    d = descriptor(layout)
    whole = integers(d.shape, d.dtype, seed, small(d.dtype)).astype(d.dtype)
    given = None
    if s.ctx.rank == root % s.ctx.size:
        given = np.array(whole, order="F" if way == "F" else "C")
        if way == "every second":
            given = np.repeat(given, 2, axis=1)[:, ::2]
    s.keep(to, s.ctx.scatter(given, d, root % s.ctx.size), whole)


@call(2, to=Draw.slot, layout=Draw.layout, a=Draw.upto(9), b=Draw.upto(9))
def from_function(s: Session, to: int, layout: Any, a: int, b: int) -> None:
    """Element (i, j) is a function of i and j."""
    d = descriptor(layout)

    def function(i: Any, j: Any) -> Any:
        return (a * i + b * j + i * i // 9 + i * j) % 7 - 3  # parts of it differ

    whole = function(np.arange(d.shape[0])[:, None], np.arange(d.shape[1])[None]).astype(d.dtype)
    s.keep(to, s.ctx.from_function(function, d), np.broadcast_to(whole, d.shape).copy())


@call(2, to=Draw.slot, layout=Draw.layout, seed=Draw.seed)
def from_local(s: Session, to: int, layout: Any, seed: int) -> None:
    """A matrix over arrays that are the caller's."""
    d = descriptor(layout)
    held = s.make(seed, d.shape, d.dtype)
    s.keep(to, s.ctx.from_local(held.matrix.local, held.matrix.descriptor), held.whole)


@call(2, to=Draw.slot, layout=Draw.layout, how=Draw.of("zeros", "full", "eye", "empty"), value=Draw.scalar)
def create(s: Session, to: int, layout: Any, how: str, value: int) -> None:
    """Zeros, ones on the diagonal, one number, or what is written later."""
    d = descriptor(layout)
    whole = np.zeros(d.shape, d.dtype)
    if how == "full":
        whole[...] = value
        s.keep(to, s.ctx.full(d, value), whole)
    elif how == "eye":
        np.fill_diagonal(whole, 1)
        s.keep(to, s.ctx.eye(d), whole)
    elif how == "empty":
        held = Held(s.ctx.empty(d), whole)
        s.fill(held, whole + d.dtype.type(value))
        s.keep(to, held.matrix, held.whole)
    else:
        s.keep(to, s.ctx.zeros(d), whole)


@call(4, layout=Draw.layout, seed=Draw.seed, root=Draw.rank)
def random_numbers(s: Session, layout: Any, seed: int, root: int) -> None:
    """Random numbers, gathered at once. Of many rows some are compared: NumPy takes long for these numbers."""
    d = descriptor(layout)
    if is_float8(d.dtype):
        raise SkipStep
    step = 1 + d.shape[0] * d.shape[1] // MOST_RANDOM
    i, j = np.arange(0, d.shape[0], step, dtype=np.uint64), np.arange(d.shape[1], dtype=np.uint64)
    expected = random_values(np, i[:, None], j[None], seed, d.dtype, "uniform").astype(d.dtype)
    _gathered(s, s.ctx.random(d, seed=seed), expected.reshape(len(i), len(j)), root, step)


# -- where they are


def _gathered(s: Session, matrix: pb.DistributedMatrix, rows: np.ndarray, root: int, step: int = 1) -> None:
    """Gather a matrix, of which ``rows`` are known: every ``step``-th."""
    root %= s.ctx.size
    found = matrix.gather(root)
    if (found is None) == (s.ctx.rank == root):
        expect("the root has nothing" if found is None else "a rank has what only the root is to have")
    if found is not None:
        expect(differs(found[::step], rows))


@call(6, of=Draw.slot, root=Draw.rank)
def gather(s: Session, of: int, root: int) -> None:
    """The whole matrix on one rank."""
    held = s.pick(of)
    _gathered(s, held.matrix, held.whole, root)


@call(3, of=Draw.slot)
def allgather(s: Session, of: int) -> None:
    """The whole matrix on every rank."""
    held = s.pick(of)
    expect(differs(held.matrix.allgather(), held.whole))


@call(
    6, of=Draw.slot, to=Draw.slot, layout=Draw.elsewhere, out=Draw.of(True, False), kind=Draw.upto(9),
    part=Draw.of("", "", "", "LN", "UN", "LU", "UU"),
)  # fmt: skip
def redistribute(s: Session, of: int, to: int, layout: Any, out: bool, kind: int, part: str) -> None:
    """Another layout, perhaps another type; to a new matrix or into one that is there."""
    held = s.pick(of)
    dtype = as_dtype(converts(held.whole.dtype.name, kind)) if kind > 5 else held.whole.dtype
    if dtype != held.whole.dtype:
        s.tame(held, 16)
    how: dict[str, Any] = {"uplo": part[0], "diag": part[1]} if part else {}
    mask = np.ones(held.whole.shape, bool)
    if part:
        mask = Trapezoid.of_shape(held.whole.shape, *part).mask(*(np.arange(x) for x in held.whole.shape))
    if out:
        target = s.like(to, kind, held.whole.shape, dtype, held)
        held.matrix.redistribute(out=target.matrix, **how)
        target.whole[mask] = held.whole.astype(dtype)[mask]
        s.check(target)
    else:
        whole = np.where(mask, held.whole.astype(dtype), np.zeros((), dtype))
        s.keep(to, held.matrix.redistribute(descriptor(layout, held.whole.shape, dtype), **how), whole)


# -- views


def _ranges(shape: tuple[int, ...], window: list[int]) -> tuple[slice, slice]:
    i, rows, j, cols = window
    m, n = shape
    i, j = i % (m + 1), j % (n + 1)
    return slice(i, m - rows % (m - i + 1)), slice(j, n - cols % (n - j + 1))


@call(3, of=Draw.slot, to=Draw.slot, window=Draw.window)
def view(s: Session, of: int, to: int, window: list[int]) -> None:
    """A sub-matrix, which shares memory."""
    held = s.pick(of)
    at = _ranges(held.whole.shape, window)
    s.keep(to, held.matrix[at], held.whole[at])


@call(3, of=Draw.slot, to=Draw.slot, adjoint=Draw.of(False, False, True))
def transpose(s: Session, of: int, to: int, adjoint: bool) -> None:
    """The transpose, which shares memory; so does the conjugate transpose of real types."""
    held = s.pick(of, lambda held: held.arithmetic or not adjoint)
    turned = held.whole.T
    if adjoint and held.whole.dtype.kind == "c":
        turned = turned.conj()
    s.keep(to, held.matrix.H if adjoint else held.matrix.T, turned)


@call(
    5, of=Draw.slot, other=Draw.slot, window=Draw.window, seed=Draw.seed,
    value=Draw.of("number", "matrix", "matrix", "itself", "its transpose"),
)  # fmt: skip
def assign(s: Session, of: int, other: int, window: list[int], value: str, seed: int) -> None:
    """Write a number, a matrix, or a part of the same matrix into a sub-matrix."""
    held = s.pick(of)
    at = _ranges(held.whole.shape, window)
    if value == "number":
        held.matrix[at] = seed % 3
        held.whole[at] = seed % 3
    elif value == "matrix":
        given = s.like(other, seed, held.whole[at].shape, held.whole.dtype, held)
        held.matrix[at] = given.matrix
        held.whole[at] = given.whole
    else:
        source = held if value == "itself" else Held(held.matrix.T, held.whole.T)
        room = [e - n for e, n in zip(source.whole.shape, held.whole[at].shape, strict=True)]
        if min(room) < 0:
            raise SkipStep
        of_rows, of_cols = seed % (room[0] + 1), seed * 7 % (room[1] + 1)
        m, n = held.whole[at].shape
        there = slice(of_rows, of_rows + m), slice(of_cols, of_cols + n)
        held.matrix[at] = source.matrix[there]
        held.whole[at] = source.whole[there].copy()
    s.check(held)


# -- arithmetic


def _bounded(s: Session, symbol: str, held: Held, other: Any) -> None:
    """Make the operands small, so that the result is exact."""
    most = min(8.0 if symbol == "*" else 64.0, largest_exact(held.whole.dtype) / 8)
    for each in (held, other):
        if isinstance(each, Held):
            s.tame(each, most)


def _operand(s: Session, held: Held, other: int, seed: int, number: Any) -> tuple[Any, Any, Any]:
    """Return what is added: what ``tame`` takes, what pblasmp takes, what NumPy takes."""
    if isinstance(number, str):
        m, n = held.whole.shape
        vector = integers((m, 1) if number == "column" else (1, n), held.whole.dtype, seed, 2)
        vector = vector.astype(held.whole.dtype)
        return vector, vector, vector
    if number is not None:
        return number, number, np.array(number).astype(held.whole.dtype)
    found = s.find(other, lambda x: x.whole.shape == held.whole.shape and x.whole.dtype == held.whole.dtype)
    found = found or s.make(seed, held.whole.shape, held.whole.dtype)
    return found, found.matrix, found.whole


_OPERANDS: dict[str, Any] = {
    "of": Draw.slot, "other": Draw.slot, "seed": Draw.seed, "symbol": Draw.of(*SYMBOLS),
    "number": Draw.of(None, 2, -1, "row", "column"),
}  # fmt: skip


@call(4, **_OPERANDS, to=Draw.slot)
def arithmetic(s: Session, of: int, other: int, seed: int, symbol: str, number: Any, to: int) -> None:
    """A sum, difference or product, element by element, with a matrix, a number or a vector."""
    held = s.pick(of, lambda held: held.arithmetic)
    operand, given, values = _operand(s, held, other, seed, number)
    _bounded(s, symbol, held, operand)
    s.keep(to, SYMBOLS[symbol](held.matrix, given), SYMBOLS[symbol](held.whole, values))


@call(5, **_OPERANDS)
def in_place(s: Session, of: int, other: int, seed: int, symbol: str, number: Any) -> None:
    """The same in place."""
    held = s.pick(of, lambda held: held.arithmetic)
    operand, given, values = _operand(s, held, other, seed, number)
    _bounded(s, symbol, held, operand)
    IN_PLACE[symbol](held.matrix, given)
    held.whole[...] = SYMBOLS[symbol](held.whole, values)  # of all of it before it is written
    s.check(held)


@call(3, of=Draw.slot, window=Draw.window, symbol=Draw.of(*SYMBOLS), number=Draw.of(2, -1))
def part_in_place(s: Session, of: int, window: list[int], symbol: str, number: int) -> None:
    """``A[i:j, k:l] += 1`` and the like."""
    held = s.pick(of, lambda held: held.arithmetic)
    _bounded(s, symbol, held, number)
    at = _ranges(held.whole.shape, window)
    part = IN_PLACE[symbol](held.matrix[at], number)
    held.matrix[at] = part
    held.whole[at] = SYMBOLS[symbol](held.whole[at], held.whole.dtype.type(number))
    s.check(held)


@call(3, of=Draw.slot, to=Draw.slot, kind=Draw.upto(4), how=Draw.of("copy", "astype", "-", "/"))
def unary(s: Session, of: int, to: int, kind: int, how: str) -> None:
    """A copy, another type, the negative, a half."""
    held = s.pick(of, lambda held: held.arithmetic or how == "copy")
    if how == "copy":
        s.keep(to, held.matrix.copy(), held.whole.copy())
    elif how == "-":
        s.keep(to, -held.matrix, -held.whole)
    elif how == "/":
        s.tame(held)
        s.keep(to, held.matrix / 2, held.whole / held.whole.dtype.type(2))
    else:
        dtype = as_dtype(converts(held.whole.dtype.name, kind))
        s.tame(held, 16)
        s.keep(to, held.matrix.astype(dtype), held.whole.astype(dtype))


@call(
    3, of=Draw.slot, to=Draw.slot, k=Draw.upto(9),
    how=Draw.of("abs", "conj", "real", "imag", "square", "tril", "triu", "map"),
)  # fmt: skip
def function(s: Session, of: int, to: int, k: int, how: str) -> None:
    """A function of each element, or zeros on one side of a diagonal."""
    held = s.pick(of, lambda held: held.arithmetic)
    s.tame(held, 8 if how == "square" else 64)
    x, a, is_complex = held.matrix, held.whole, held.whole.dtype.kind == "c"
    found, expected = {
        "abs": lambda: (abs(x.real), abs(a.real if is_complex else a)),
        "conj": lambda: (x.conj(), a.conj() if is_complex else a.copy()),
        "real": lambda: (x.real, a.real.copy() if is_complex else a),
        "imag": lambda: (x.imag, a.imag.copy() if is_complex else np.zeros_like(a)),
        "square": lambda: (x**2, a * a),
        "tril": lambda: (x.tril(k - 4), np.tril(a, k - 4)),
        "triu": lambda: (x.triu(k - 4), np.triu(a, k - 4)),
        "map": lambda: (x.map(lambda v: v + v), a + a),
    }[how]()
    s.keep(to, found, expected)


@call(
    4,
    of=Draw.slot,
    i=Draw.seed,
    j=Draw.seed,
    how=Draw.of("row", "column", "element"),
    root=Draw.of(None, 0, 1),
)
def item(s: Session, of: int, i: int, j: int, how: str, root: int | None) -> None:
    """Read a row, a column or an element, and write a NumPy array of every rank or of one there."""
    held = s.pick(of, lambda held: held.arithmetic)
    if 0 in held.whole.shape:
        raise SkipStep
    i, j = i % held.whole.shape[0], j % held.whole.shape[1] - held.whole.shape[1]
    at: Any = {"row": i, "column": (slice(None), j), "element": (i, j)}[how]
    if how == "element":
        expect(differs(np.full((1, 1), held.matrix[at]), np.full((1, 1), held.whole[at])))
    values = (np.arange(held.whole[at].size).reshape(held.whole[at].shape) % 3).astype("int16")
    has = root is None or how == "element" or s.ctx.rank == root % s.ctx.size
    held.matrix[at] = values if has else None
    held.whole[at] = values
    s.check(held)


@call(
    3, of=Draw.slot,
    how=Draw.of("sum", "rows", "columns", "trace", "diagonal", "max", "fro", "least", "largest", "mean", "close"),
)  # fmt: skip
def reduce(s: Session, of: int, how: str) -> None:
    """Sums and norms, which every rank has."""
    held = s.pick(of, lambda held: held.arithmetic)
    s.tame(held)
    whole = exact(held.whole)
    scale = 0.0
    if how in ("max", "fro"):
        found: Any = held.matrix.norm(how)
        expected: Any = np.abs(whole).max(initial=0) if how == "max" else np.linalg.norm(whole)
        scale = 1e-12
    elif how == "close":
        found, expected = int(pb.allclose(held.matrix, held.matrix.copy())), 1
    elif how in ("least", "largest"):
        if 0 in whole.shape:
            raise SkipStep
        found = held.matrix.min(0) if how == "least" else held.matrix.max(1)
        expected = whole.min(0) if how == "least" else whole.max(1)
    elif how == "mean":
        if 0 in whole.shape:
            raise SkipStep
        found, expected = held.matrix.mean(), whole.mean().astype(held.whole.dtype)
        scale = 4 * ELEMENT_TYPES[held.whole.dtype.name].roundoff
    elif how == "diagonal":
        found, expected = held.matrix.diagonal(), whole.diagonal()
    elif how == "trace":
        found, expected = held.matrix.trace(), whole.trace()
        scale = 2 * rounding(held.whole.dtype, float(np.abs(whole.diagonal()).sum()))
        if abs(expected) > ELEMENT_TYPES[held.whole.dtype.name].largest:
            raise SkipStep
    else:
        axis = {"sum": None, "rows": 1, "columns": 0}[how]
        expected = whole.sum(axis)
        overflows = np.abs(expected).max(initial=0) > ELEMENT_TYPES[held.whole.dtype.name].largest
        found = held.matrix.sum(axis, dtype=whole.dtype if overflows else None)
        scale = 2 * rounding(held.whole.dtype, float(np.abs(whole).sum()))
    expect(
        differs(np.atleast_1d(exact(np.asarray(found))), np.atleast_1d(exact(np.asarray(expected))), scale)
    )


@call(3, of=Draw.slot, i=Draw.seed, j=Draw.seed, how=Draw.of("swap", "numbers", "gemv"))
def vectors(s: Session, of: int, i: int, j: int, how: str) -> None:
    """Rows and columns of a matrix as vectors."""
    held = s.pick(of, lambda held: held.arithmetic and bool(ELEMENT_TYPES[held.whole.dtype.name].blas))
    if 0 in held.whole.shape:
        raise SkipStep
    s.tame(held)
    a, whole, dtype = held.matrix, exact(held.whole), held.whole.dtype
    i, j, k = i % whole.shape[0], j % whole.shape[1], i % whole.shape[1]
    if how == "swap":
        pb.blas.swap(a[:, j : j + 1], a[:, k : k + 1])
        held.whole[:, [j, k]] = held.whole[:, [k, j]]
        s.check(held)
    elif how == "numbers":
        found, expected = pb.blas.nrm2(a[i : i + 1]), np.linalg.norm(whole[i])
        scale = 2 * ELEMENT_TYPES[dtype.name].roundoff * float(expected)
        expect(differs(np.full(1, float(found)), np.full(1, float(expected)), scale))
    else:
        x = whole[i]
        most = float((np.abs(whole) @ np.abs(x)).max())
        if most > ELEMENT_TYPES[dtype.name].largest:
            raise SkipStep
        found = pb.blas.gemv(a, a[i : i + 1]).allgather().reshape(-1)
        expect(differs(exact(found), whole @ x, len(x) * rounding(dtype, most)))


# -- products


@call(
    8, of=Draw.slot, other=Draw.slot, to=Draw.slot, ops=Draw.of("NN", "NT", "TN", "TT", "CN", "NC"), seed=Draw.seed,
    alpha=Draw.of(1, 1, 2, -1, 0), beta=Draw.of(0, 0, 1, -2), out=Draw.of("new", "new", "there", "c"),
    algo=Draw.of("auto", "auto", "gathered", "panels", "stationary", "shared", "push", "default"),
)  # fmt: skip
def matmul(
    s: Session, of: int, other: int, to: int, ops: str, seed: int, alpha: int, beta: int, out: str, algo: str
) -> None:
    """A product of matrices that are there, with C and into a result that is there."""
    a = s.pick(of, lambda held: held.arithmetic)
    dtype = a.whole.dtype
    m, k = a.whole.shape if ops[0] == "N" else a.whole.shape[::-1]
    most = s.device.flops / max(1, m * k)
    if most < 1:
        raise SkipStep
    turn = 1 if ops[1] == "N" else -1
    b = s.find(
        other,
        lambda held: (
            held.whole.dtype == dtype
            and held.whole.shape[::turn][0] == k
            and held.whole.shape[::turn][1] <= most
        ),
    ) or s.make(seed, (k, min(int(most), 1 + seed % 60))[::turn], dtype)
    n = b.whole.shape[::turn][1]
    for held in (a, b):
        s.tame(held, small(dtype))
    left, right = OPS[ops[0]](exact(a.whole)), OPS[ops[1]](exact(b.whole))
    bound = (
        abs(alpha)
        * float(np.abs(left).sum(1).max(initial=0))
        * small(dtype)
        * (2 if dtype.kind == "c" else 1)
    )
    c, target = None, None
    if out != "new":
        target = s.find(
            to,
            lambda held: (
                held.whole.shape == (m, n)
                and held.whole.dtype == dtype
                and not any(np.may_share_memory(held.whole, x.whole) for x in (a, b))
            ),
        ) or s.make(seed + 1, (m, n), dtype)
    if beta:
        c = target if out == "c" else s.make(seed + 2, (m, n), dtype)
        assert c is not None
        s.tame(c)
        bound += abs(beta) * float(np.abs(c.whole).max(initial=0))
    whole = alpha * (left @ right) + (beta * exact(c.whole) if c is not None else 0)
    result = pb.matmul(
        a.matrix, b.matrix, None if c is None else c.matrix, out=None if target is None else target.matrix,
        alpha=alpha, beta=beta, op_a=ops[0], op_b=ops[1], algo=algo,
    )  # fmt: skip
    if target is None:
        target = s.slots[to] = Held(result, whole.astype(dtype))
    target.whole[...] = whole.astype(dtype)
    tolerance = rounding(dtype, bound)
    s.check(target, tolerance)
    if tolerance:
        s.fill(target, integers((m, n), dtype, seed, small(dtype)))


@call(2, of=Draw.slot, to=Draw.slot, right=Draw.of(True, False))
def gram(s: Session, of: int, to: int, right: bool) -> None:
    """``A.T @ A`` or ``A @ A.T``, by the operator."""
    held = s.pick(
        of, lambda held: held.arithmetic and held.whole.size * min(held.whole.shape) < s.device.flops
    )
    s.tame(held, small(held.whole.dtype))
    if right:
        held = Held(held.matrix.T, held.whole.T)
    if held.whole.shape[0] ** 2 * held.whole.shape[1] > s.device.flops:
        raise SkipStep
    whole = exact(held.whole)
    bound = float((np.abs(whole) @ np.abs(whole).T).max(initial=0))
    tolerance = rounding(held.whole.dtype, bound)
    result = held.matrix @ held.matrix.T
    product = Held(result, (whole @ whole.T).astype(held.whole.dtype))
    s.check(product, tolerance)
    if not tolerance:
        s.keep(to, product.matrix, product.whole)


@call(
    4, of=Draw.slot, to=Draw.slot, routine=Draw.of("syrk", "symm", "trmm", "trsm", "geadd", "tradd"),
    uplo=Draw.of("L", "U"), op=Draw.of("N", "T"), seed=Draw.seed, there=Draw.of(True, False),
)  # fmt: skip
def update(s: Session, of: int, to: int, routine: str, uplo: str, op: str, seed: int, there: bool) -> None:
    """A routine of level 3 on a matrix that is there, perhaps into one that is there."""
    b = s.pick(of, lambda held: held.arithmetic and held.whole.dtype.itemsize > 2)
    dtype, (m, n) = b.whole.dtype, b.whole.shape
    s.tame(b, small(dtype))
    flags = {"side": "L", "uplo": uplo, "op_a": op, "diag": "N"}
    flags = {name: flags[name] for name in ROUTINES[routine].options}
    values: dict[str, Held] = {}
    if routine in ("syrk", "geadd", "tradd"):
        order = (n if op == "T" else m) if routine == "syrk" else 0
        shape = (order, order) if routine == "syrk" else ((n, m) if op == "T" else (m, n))
        if order**2 * max(m, n) > s.device.flops:
            raise SkipStep
        values["a"] = b
    else:
        if m**2 * n > s.device.flops:
            raise SkipStep
        shape = (m, n)
        values = {"a": s.make(seed, (m, m), dtype), "b": b}
        if routine == "trsm":  # twos on the diagonal, and no more than twos beside it: the solution is exact
            a = np.eye(m, dtype=dtype) * 2
            if m > 1:
                a[(m - 1, 0) if uplo == "L" else (0, m - 1)] = 2
            s.fill(values["a"], a)
    target = None
    if there:
        target = s.find(
            to,
            lambda held: (
                held.whole.shape == shape
                and held.whole.dtype == dtype
                and not any(np.may_share_memory(held.whole, x.whole) for x in values.values())
            ),
        ) or s.make(seed + 1, shape, dtype)
        s.tame(target)
    beta = 0
    if routine in ("geadd", "tradd"):
        values["c"], beta = target or s.make(seed + 2, shape, dtype), 1 + seed % 2
    computed = dense(routine, {name: exact(x.whole) for name, x in values.items()}, flags, 1, beta)
    before: Any = target.whole if target else values["c"].whole if beta else np.zeros(shape, dtype)
    whole = np.where(touched(routine, "d", flags, shape), computed, before).astype(dtype)
    given: dict[str, Any] = {name: x.matrix for name, x in values.items()}
    given |= {"beta": beta} if beta else {}
    result = getattr(pb.blas, routine)(**given, **flags, out=None if target is None else target.matrix)
    if target is None:
        s.keep(to, result, whole)
    else:
        target.whole[...] = whole
        s.check(target)


# -- files


@call(3, of=Draw.slot, to=Draw.slot, kind=Draw.of("npy", "h5", "zarr"), order=Draw.of(None, "C", "F"))
def save(s: Session, of: int, to: int, kind: str, order: str | None) -> None:
    """A file, new or in place of one that is there."""
    if kind not in FORMATS:
        raise SkipStep
    held = s.pick(of, lambda held: kind != "npy" or not is_foreign(held.whole.dtype))
    name = f"{to}.{kind}"
    how: dict[str, Any] = {"dataset": "a"} if kind == "h5" else {"order": order} if kind == "npy" else {}
    held.matrix.save(s.directory / name, **how)
    s.files[name] = held.whole.copy()
    if kind == "npy":
        expect(differs(np.load(s.directory / name), held.whole))


@call(3, of=Draw.slot, to=Draw.slot, layout=Draw.elsewhere, kind=Draw.upto(9))
def load(s: Session, of: int, to: int, layout: Any, kind: int) -> None:
    """A file that was saved, in any layout."""
    names = sorted(s.files)
    if not names:
        raise SkipStep
    whole = s.files[names[of % len(names)]]
    dtype = whole.dtype
    matrix = s.ctx.load(s.directory / names[of % len(names)], descriptor(layout, whole.shape, dtype))
    s.keep(to, matrix, whole.copy())


# -- the PBLAS names


@call(1, shape=Draw.upto(9))
def grid(s: Session, shape: int) -> None:
    """Open a grid of all ranks, or close it if it is open."""
    size = s.ctx.size
    shapes = [(p, size // p) for p in range(1, size + 1) if size % p == 0]
    chosen = shapes[shape % len(shapes)]
    if chosen in s.grids:
        pblas.gridexit(s.grids.pop(chosen))
    else:
        s.grids[chosen] = pblas.gridinit(s.ctx, "Row", *chosen)


@call(4, name=Draw.of(*(name for name in FUNCTIONS if name not in ("syrkx", "herkx"))), seed=Draw.seed)
def fortran(s: Session, name: str, seed: int) -> None:
    """A routine under its PBLAS name."""
    rng = np.random.default_rng(seed)
    if not s.grids:
        grid(s, seed)
    shape, number = sorted(s.grids.items())[seed % len(s.grids)]
    dtype = DTYPES[rng.integers(4)]
    options = legal_options(name, dtype)
    on = pb.Grid(*shape), number
    expect(called(s.ctx, rng, name, options[rng.integers(len(options))], dtype, "pblas", grid=on))


@call(
    3, layout=Draw.layout, seed=Draw.seed, n=Draw.upto(40),
    how=Draw.of("gen", "pos", "tri", "lu", "cholesky", "lstsq", "ranked", "refined"),
    uplo=Draw.of("L", "U"), singular=Draw.upto(8),
)  # fmt: skip
def solve(s: Session, layout: Any, seed: int, n: int, how: str, uplo: str, singular: int) -> None:
    """A system with a solution of small integers, or a matrix that has no factor: an error, and the next call works."""
    dtype = descriptor(layout).dtype
    row = ELEMENT_TYPES.get(dtype.name)
    if s.ctx.engine.name != "host" or row is None or not row.blas or n == 0:
        raise SkipStep
    if how == "refined" and dtype.name not in ("float64", "complex128"):
        raise SkipStep
    whole = integers((n, n), dtype, seed, 2).astype(exact(np.zeros(1, dtype)).dtype) / (8 * n) + 2 * np.eye(n)
    if how in ("pos", "cholesky"):
        whole = (whole + whole.conj().T) / 2
    triangle = np.tril if uplo == "L" else np.triu
    whole = triangle(whole) if how == "tri" else whole
    least = how in ("lstsq", "ranked")
    if singular == 0 and not least:
        whole[n // 2, :] = whole[:, n // 2] = 0
    a, b, x = (s.make(seed + i, shape, dtype) for i, shape in enumerate(((n, n), (n, 3), (n, 3))))
    s.fill(a, whole.astype(dtype))
    s.fill(b, (whole @ exact(x.whole)).astype(dtype))
    kind = how if how != "tri" else {"L": "lower triangular", "U": "upper triangular"}[uplo]
    calls = {
        "lu": lambda: pb.linalg.lu_solve(pb.linalg.lu_factor(a.matrix), b.matrix),
        "cholesky": lambda: pb.linalg.cho_solve(
            (pb.linalg.cholesky(a.matrix, lower=uplo == "L"), uplo == "L"), b.matrix
        ),
        "lstsq": lambda: pb.linalg.lstsq(a.matrix, b.matrix),
        "ranked": lambda: pb.linalg.lstsq(a.matrix, b.matrix, None).x,
        "refined": lambda: pb.linalg.solve(a.matrix, b.matrix, refine="float32", out=x.matrix),
    }
    try:
        found = calls.get(
            how, lambda: pb.linalg.solve(a.matrix, b.matrix, kind, lower=uplo == "L", out=x.matrix)
        )()
    except pb.FactorizationError as error:
        expect("" if singular == 0 and error.index == n // 2 else f"{error}")
        return
    expect("" if singular or least else "no error for a singular matrix")
    s.check(Held(found, x.whole), 500 * np.finfo(dtype).eps * max(1, abs(x.whole).max()))


@call(
    2, layout=Draw.layout, seed=Draw.seed, n=Draw.upto(40), how=Draw.of("eigh", "pair", "svd"), uplo=Draw.of("L", "U"),
)  # fmt: skip
def spectrum(s: Session, layout: Any, seed: int, n: int, how: str, uplo: str) -> None:
    """Eigenpairs, of one matrix or of two, or singular values and vectors."""
    dtype = descriptor(layout).dtype
    row = ELEMENT_TYPES.get(dtype.name)
    if s.ctx.engine.name != "host" or row is None or not row.blas or n == 0:
        raise SkipStep
    whole = integers((n, n), dtype, seed, 4)
    if how != "svd":
        whole = ((whole + whole.conj().T) / 2).astype(dtype)
    a = s.make(seed, (n, n), dtype)
    s.fill(a, whole)
    given = [a.matrix]
    if how == "pair":
        given.append(s.make(seed + 1, (n, n), dtype).matrix)
        s.fill(Held(given[1], np.zeros((n, n), dtype)), (4 * np.eye(n)).astype(dtype))
    how_called = {} if how == "svd" else {"lower": uplo == "L"}
    found = (pb.linalg.svd if how == "svd" else pb.linalg.eigh)(*given, **how_called)
    expect(
        ""
        if pb.verify(pb.linalg.svd if how == "svd" else pb.linalg.eigh, *given, found=found, **how_called)
        else f"{how}: wrong"
    )


@call(2, of=Draw.slot, to=Draw.slot, axis=Draw.of(0, 1))
def shards(s: Session, of: int, to: int, axis: int) -> None:
    """To shards of rows or columns, as other libraries have them, and back."""
    held = s.pick(of)
    part = held.matrix.to_dlpack_shard(axis)  # on GPUs those of 8-bit floats are bytes
    back = s.ctx.from_dlpack_shards(part, axis, dtype=held.matrix.dtype)
    s.keep(to, back.copy(), held.whole.copy())


@call(2, of=Draw.slot, to=Draw.slot)
def scalapack(s: Session, of: int, to: int) -> None:
    """To ScaLAPACK's form and back, without a copy."""
    held = s.pick(of, lambda x: x.whole.dtype.itemsize > 2 and x.matrix.descriptor.order == "F")
    try:
        local, i, j, desc = held.matrix.to_scalapack()
    except pb.LayoutError as error:  # it was made from a part that began inside a block
        if "block boundary" in str(error):
            raise SkipStep from None
        raise
    back = s.ctx.from_scalapack(local, desc, held.matrix.descriptor.grid)
    m, n = held.whole.shape
    s.keep(to, back[i - 1 : i - 1 + m, j - 1 : j - 1 + n], held.whole)
