# SPDX-License-Identifier: Apache-2.0
"""Steps on matrices: how they are made, moved, viewed, computed with and written to files."""

from __future__ import annotations

import importlib.util
import operator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import consumes, precondition
from hypothesis.strategies import sampled_from

import pblasmp as pb
from pblasmp import pblas
from pblasmp.cli.run import dense, touched
from pblasmp.dtypes import ELEMENT_TYPES, as_dtype, is_float8, is_foreign
from pblasmp.layout import Trapezoid
from pblasmp.layout.routines import ROUTINES
from pblasmp.matrix.creation import random_values
from tests.helpers.calls import DTYPES, FUNCTIONS, check_call, legal_options
from tests.helpers.cases import exact
from tests.helpers.gpu.moves import CONVERTS
from tests.helpers.gpu.products import OPS, integers

from .layouts import layouts, moved
from .state import (
    Held,
    SkipStep,
    State,
    differs,
    expect,
    files,
    grids,
    largest_exact,
    matrices,
    numbers,
    ranks,
    rounding,
    seeds,
    small,
    step,
)

FORMATS = (
    "npy",
    *(name for name, module in (("h5", "h5py"), ("zarr", "zarr")) if importlib.util.find_spec(module)),
)
"""Of files, those whose library is installed. Every rank has the same."""

MOST_RANDOM = 1 << 19  # random numbers that NumPy is asked for

SYMBOLS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
IN_PLACE = {"+": operator.iadd, "-": operator.isub, "*": operator.imul}


# -- views


def _ranges(shape: tuple[int, ...], window: list[int]) -> tuple[slice, slice]:
    i, rows, j, cols = window
    m, n = shape
    i, j = i % (m + 1), j % (n + 1)
    return slice(i, m - rows % (m - i + 1)), slice(j, n - cols % (n - j + 1))


scalars = sampled_from([1, 2, -1, 3])
blas_types = sampled_from([name for name, row in ELEMENT_TYPES.items() if row.blas])
windows = st.tuples(*[st.just(0) | st.integers(0, 299)] * 4)
"""First row and number of rows, first column and number of columns, each modulo what there is."""
OPERANDS = {
    "of": matrices, "other": matrices, "seed": seeds, "symbol": sampled_from([*SYMBOLS]),
    "number": sampled_from([None, 2, -1, "row", "column"]),
}  # fmt: skip


def converts(dtype: str, choice: int) -> str:
    """Return a type that another one converts to."""
    kinds = CONVERTS.get(dtype, (dtype,))
    return kinds[choice % len(kinds)]


def on_host(state: State) -> bool:
    """Return whether ranks compute on CPUs. Local."""
    return state.device.engine == "host"


class Matrices(State):
    """How matrices are made, moved, viewed, computed with and written to files."""

    # -- new matrices

    @step(matrices, layout=layouts(), root=ranks, seed=seeds, way=sampled_from(["C", "F", "every second"]))
    def scatter(self, layout, root, seed, way):
        """An array of the root, in some memory order."""
        whole = integers(layout.shape, layout.dtype, seed, small(layout.dtype)).astype(layout.dtype)
        given = None
        if self.ctx.rank == root % self.ctx.size:
            given = np.array(whole, order="F" if way == "F" else "C")
            if way == "every second":
                given = np.repeat(given, 2, axis=1)[:, ::2]
        return self.keep(self.ctx.scatter(given, layout, root % self.ctx.size), whole)

    @step(matrices, layout=layouts(), a=numbers, b=numbers)
    def from_function(self, layout, a, b):
        """Element (i, j) is a function of i and j."""

        def function(i: Any, j: Any) -> Any:
            return (a * i + b * j + i * i // 9 + i * j) % 7 - 3  # parts of it differ

        whole = function(np.arange(layout.shape[0])[:, None], np.arange(layout.shape[1])[None]).astype(
            layout.dtype
        )
        return self.keep(
            self.ctx.from_function(function, layout), np.broadcast_to(whole, layout.shape).copy()
        )

    @step(matrices, layout=layouts(), seed=seeds)
    def from_local(self, layout, seed):
        """A matrix over arrays that are the caller's."""
        held = self.make(seed, layout)
        return self.keep(self.ctx.from_local(held.matrix.local, held.matrix.descriptor), held.whole)

    @step(matrices, layout=layouts(), how=sampled_from(["zeros", "full", "eye", "empty"]), value=scalars)
    def create(self, layout, how, value):
        """Zeros, ones on the diagonal, one number, or what is written later."""
        whole = np.zeros(layout.shape, layout.dtype)
        if how == "full":
            whole[...] = value
            return self.keep(self.ctx.full(layout, value), whole)
        if how == "eye":
            np.fill_diagonal(whole, 1)
            return self.keep(self.ctx.eye(layout), whole)
        if how == "zeros":
            return self.keep(self.ctx.zeros(layout), whole)
        held = Held(self.ctx.empty(layout), whole)
        self.fill(held, whole + layout.dtype.type(value))
        return self.keep(held.matrix, held.whole)

    @step(of=consumes(matrices))
    def forget(self, of):
        """A matrix goes; views of it stay."""
        del self.matrices[of]

    @step(layout=layouts(), seed=seeds, root=ranks)
    def random_numbers(self, layout, seed, root):
        """Random numbers, gathered at once. Of many rows some are compared: NumPy takes long for these numbers."""
        if is_float8(layout.dtype):
            raise SkipStep
        step = 1 + layout.shape[0] * layout.shape[1] // MOST_RANDOM
        i, j = (
            np.arange(0, layout.shape[0], step, dtype=np.uint64),
            np.arange(layout.shape[1], dtype=np.uint64),
        )
        expected = random_values(np, i[:, None], j[None], seed, layout.dtype, "uniform").astype(layout.dtype)
        self.gathered(self.ctx.random(layout, seed=seed), expected.reshape(len(i), len(j)), root, step)

    # -- where they are

    def gathered(self, matrix: pb.DistributedMatrix, rows: np.ndarray, root: int, step: int = 1) -> None:
        """Gather a matrix, of which ``rows`` are known: every ``step``-th."""
        root %= self.ctx.size
        found = matrix.gather(root)
        if (found is None) == (self.ctx.rank == root):
            expect("the root has nothing" if found is None else "a rank has what only the root is to have")
        if found is not None:
            expect(differs(found[::step], rows))

    @step(of=matrices, root=ranks)
    def gather(self, of, root):
        """The whole matrix on one rank."""
        held = self.pick(of)
        self.gathered(held.matrix, held.whole, root)

    @step(of=matrices)
    def allgather(self, of):
        """The whole matrix on every rank."""
        held = self.pick(of)
        expect(differs(held.matrix.allgather(), held.whole))

    @step(
        matrices, of=matrices, out=st.none() | matrices, layout=layouts(), kind=numbers,
        part=sampled_from(["", "LN", "UN", "LU", "UU"]),
    )  # fmt: skip
    def redistribute(self, of, out, layout, kind, part):
        """Move to another layout, perhaps another type, as a new matrix or into an existing one."""
        held = self.pick(of)
        dtype = as_dtype(converts(held.whole.dtype.name, kind)) if kind > 5 else held.whole.dtype
        if dtype != held.whole.dtype:
            self.tame(held, 16)
        how: dict[str, Any] = {"uplo": part[0], "diag": part[1]} if part else {}
        mask = np.ones(held.whole.shape, bool)
        if part:
            mask = Trapezoid.of_shape(held.whole.shape, *part).mask(*(np.arange(x) for x in held.whole.shape))
        if out is not None:
            target = self.like(out, kind, held.whole.shape, dtype, held)
            held.matrix.redistribute(out=target.matrix, **how)
            target.whole[mask] = held.whole.astype(dtype)[mask]
            return self.check(target)
        whole = np.where(mask, held.whole.astype(dtype), np.zeros((), dtype))
        return self.keep(held.matrix.redistribute(moved(layout, held.whole.shape, dtype), **how), whole)

    @step(matrices, of=matrices, window=windows)
    def view(self, of, window):
        """A sub-matrix, which shares memory."""
        held = self.pick(of)
        at = _ranges(held.whole.shape, window)
        return self.keep(held.matrix[at], held.whole[at])

    @step(matrices, of=matrices, adjoint=st.booleans())
    def transpose(self, of, adjoint):
        """The transpose, which shares memory; so does the conjugate transpose of real types."""
        held = self.pick(of, lambda held: held.arithmetic or not adjoint)
        turned = held.whole.T
        if adjoint and held.whole.dtype.kind == "c":
            turned = turned.conj()
        return self.keep(held.matrix.H if adjoint else held.matrix.T, turned)

    @step(
        of=matrices, other=matrices, window=windows, seed=seeds,
        value=sampled_from(["number", "matrix", "itself", "its transpose"]),
    )  # fmt: skip
    def assign(self, of, other, window, seed, value):
        """Write a number, a matrix, or a part of the same matrix into a sub-matrix."""
        held = self.pick(of)
        at = _ranges(held.whole.shape, window)
        if value == "number":
            held.matrix[at] = seed % 3
            held.whole[at] = seed % 3
        elif value == "matrix":
            given = self.like(other, seed, held.whole[at].shape, held.whole.dtype, held)
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
        self.check(held)

    # -- arithmetic

    def bounded(self, symbol: str, held: Held, other: Any) -> None:
        """Make the operands small, so that the result is exact."""
        most = min(8.0 if symbol == "*" else 64.0, largest_exact(held.whole.dtype) / 8)
        for each in (held, other):
            if isinstance(each, Held):
                self.tame(each, most)

    def operand(self, held: Held, other: int, seed: int, number: Any) -> tuple[Any, Any, Any]:
        """Return what is added: what ``tame`` takes, what pblasmp takes, what NumPy takes."""
        if isinstance(number, str):
            m, n = held.whole.shape
            vector = integers((m, 1) if number == "column" else (1, n), held.whole.dtype, seed, 2)
            vector = vector.astype(held.whole.dtype)
            return vector, vector, vector
        if number is not None:
            return number, number, np.array(number).astype(held.whole.dtype)
        found = self.like(other, seed, held.whole.shape, held.whole.dtype)
        return found, found.matrix, found.whole

    @step(matrices, **OPERANDS)
    def arithmetic(self, of, other, seed, symbol, number):
        """A sum, difference or product, element by element, with a matrix, a number or a vector."""
        held = self.pick(of, lambda held: held.arithmetic)
        operand, given, values = self.operand(held, other, seed, number)
        self.bounded(symbol, held, operand)
        return self.keep(SYMBOLS[symbol](held.matrix, given), SYMBOLS[symbol](held.whole, values))

    @step(
        matrices,
        of=matrices,
        other=matrices,
        seed=numbers,
        symbol=sampled_from([*SYMBOLS]),
        turned=st.booleans(),
    )
    def across(self, of, other, seed, symbol, turned):
        """A row and a column, which make a matrix."""
        held = self.pick(of, lambda held: held.arithmetic)
        if not held.whole.shape[0]:
            raise SkipStep
        column = self.like(other, seed, (held.whole.shape[1], 1), held.whole.dtype)
        self.bounded(symbol, held, column)
        pairs = (held.matrix[:1], held.whole[:1]), (column.matrix, column.whole)
        (left, x), (right, y) = pairs[::-1] if turned else pairs
        return self.keep(SYMBOLS[symbol](left, right), SYMBOLS[symbol](x, y))

    @step(**OPERANDS)
    def in_place(self, of, other, seed, symbol, number):
        """The same in place."""
        held = self.pick(of, lambda held: held.arithmetic)
        operand, given, values = self.operand(held, other, seed, number)
        self.bounded(symbol, held, operand)
        IN_PLACE[symbol](held.matrix, given)
        held.whole[...] = SYMBOLS[symbol](held.whole, values)  # of all of it before it is written
        self.check(held)

    @step(of=matrices, window=windows, symbol=sampled_from([*SYMBOLS]), number=scalars)
    def part_in_place(self, of, window, symbol, number):
        """``A[i:j, k:l] += 1`` and the like."""
        held = self.pick(of, lambda held: held.arithmetic)
        self.bounded(symbol, held, number)
        at = _ranges(held.whole.shape, window)
        part = IN_PLACE[symbol](held.matrix[at], number)
        held.matrix[at] = part
        held.whole[at] = SYMBOLS[symbol](held.whole[at], held.whole.dtype.type(number))
        self.check(held)

    @step(matrices, of=matrices, kind=numbers, how=sampled_from(["copy", "astype", "-", "/"]))
    def unary(self, of, kind, how):
        """A copy, another type, the negative, a half."""
        held = self.pick(of, lambda held: held.arithmetic or how == "copy")
        if how == "copy":
            return self.keep(held.matrix.copy(), held.whole.copy())
        if how == "-":
            return self.keep(-held.matrix, -held.whole)
        self.tame(held, 16)
        if how == "/":
            return self.keep(held.matrix / 2, held.whole / held.whole.dtype.type(2))
        dtype = as_dtype(converts(held.whole.dtype.name, kind))
        return self.keep(held.matrix.astype(dtype), held.whole.astype(dtype))

    @step(
        matrices, of=matrices, k=numbers,
        how=sampled_from(["abs", "conj", "real", "imag", "square", "tril", "triu", "map", "np.negative"]),
    )  # fmt: skip
    def function(self, of, k, how):
        """A function of each element, or zeros on one side of a diagonal."""
        held = self.pick(of, lambda held: held.arithmetic)
        self.tame(held, 8 if how == "square" else 64)
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
            "np.negative": lambda: (np.negative(x), -a),
        }[how]()
        return self.keep(found, expected)

    @step(
        of=matrices, i=seeds, j=seeds, how=sampled_from(["row", "column", "element"]), root=st.none() | ranks
    )
    def item(self, of, i, j, how, root):
        """Read a row, a column or an element, and write a NumPy array of every rank or of one there."""
        held = self.pick(of, lambda held: held.arithmetic)
        if 0 in held.whole.shape:
            raise SkipStep
        i, j = i % held.whole.shape[0], j % held.whole.shape[1] - held.whole.shape[1]
        at: Any = {"row": i, "column": (slice(None), j), "element": (i, j)}[how]
        if how == "element":
            expect(differs(np.full((1, 1), held.matrix[at]), np.full((1, 1), held.whole[at])))
        values = (np.arange(held.whole[at].size).reshape(held.whole[at].shape) % 3).astype("int16")
        has = root is None or how == "element" or self.ctx.rank == root % self.ctx.size
        held.matrix[at] = values if has else None
        held.whole[at] = values
        self.check(held)

    @step(
        of=matrices,
        how=sampled_from(["sum", "rows", "columns", "trace", "diagonal", "max", "fro", "least", "largest", "mean",
                          "close"]),
    )  # fmt: skip
    def reduce(self, of, how):
        """Sums and norms, which every rank has."""
        held = self.pick(of, lambda held: held.arithmetic)
        self.tame(held)
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
            differs(
                np.atleast_1d(exact(np.asarray(found))), np.atleast_1d(exact(np.asarray(expected))), scale
            )
        )

    @step(of=matrices, i=seeds, j=seeds, how=sampled_from(["swap", "numbers", "gemv"]))
    def vectors(self, of, i, j, how):
        """Rows and columns of a matrix as vectors."""
        held = self.pick(of, lambda held: held.arithmetic and bool(ELEMENT_TYPES[held.whole.dtype.name].blas))
        if 0 in held.whole.shape:
            raise SkipStep
        self.tame(held)
        a, whole, dtype = held.matrix, exact(held.whole), held.whole.dtype
        i, j, k = i % whole.shape[0], j % whole.shape[1], i % whole.shape[1]
        if how == "swap":
            pb.blas.swap(a[:, j : j + 1], a[:, k : k + 1])
            held.whole[:, [j, k]] = held.whole[:, [k, j]]
            self.check(held)
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

    @step(
        matrices, of=matrices, other=matrices, ops=sampled_from(["NN", "NT", "TN", "TT", "CN", "NC"]),
        seed=seeds, alpha=sampled_from([1, 2, -1, 0]), beta=sampled_from([0, 1, -2]),
        out=sampled_from(["new", "there", "c"]),
        algo=sampled_from(["auto", "gathered", "panels", "stationary", "shared", "push", "default"]),
    )  # fmt: skip
    def matmul(self, of, other, ops, seed, alpha, beta, out, algo):
        """A product of matrices that are there, with C and into a result that is there."""
        a = self.pick(of, lambda held: held.arithmetic)
        dtype = a.whole.dtype
        m, k = a.whole.shape if ops[0] == "N" else a.whole.shape[::-1]
        most = self.device.flops / max(1, m * k)
        if most < 1:
            raise SkipStep
        turn = 1 if ops[1] == "N" else -1
        b = self.find(
            other,
            lambda held: (
                held.whole.dtype == dtype
                and held.whole.shape[::turn][0] == k
                and held.whole.shape[::turn][1] <= most
            ),
        ) or self.new(seed, (k, min(int(most), 1 + seed % 60))[::turn], dtype)
        n = b.whole.shape[::turn][1]
        for held in (a, b):
            self.tame(held, small(dtype))
        left, right = OPS[ops[0]](exact(a.whole)), OPS[ops[1]](exact(b.whole))
        bound = (
            abs(alpha)
            * float(np.abs(left).sum(1).max(initial=0))
            * small(dtype)
            * (2 if dtype.kind == "c" else 1)
        )
        c, target = None, None
        if out != "new":
            target = self.like(other, seed + 1, (m, n), dtype, a, b)
        if beta:
            c = target if target and out == "c" else self.new(seed + 2, (m, n), dtype)
            self.tame(c)
            bound += abs(beta) * float(np.abs(c.whole).max(initial=0))
        whole = alpha * (left @ right) + (beta * exact(c.whole) if c is not None else 0)
        result = pb.matmul(
            a.matrix, b.matrix, None if c is None else c.matrix, out=None if target is None else target.matrix,
            alpha=alpha, beta=beta, op_a=ops[0], op_b=ops[1], algo=algo,
        )  # fmt: skip
        found = target or Held(result, np.empty((m, n), dtype))
        found.whole[...] = whole.astype(dtype)
        tolerance = rounding(dtype, bound)
        self.check(found, tolerance)
        if tolerance:
            self.fill(found, integers((m, n), dtype, seed, small(dtype)))
        return self.keep(found.matrix, found.whole) if target is None else None

    @step(matrices, of=matrices, right=st.booleans())
    def gram(self, of, right):
        """``A.T @ A`` or ``A @ A.T``, by the operator."""
        held = self.pick(
            of, lambda held: held.arithmetic and held.whole.size * min(held.whole.shape) < self.device.flops
        )
        self.tame(held, small(held.whole.dtype))
        if right:
            held = Held(held.matrix.T, held.whole.T)
        if held.whole.shape[0] ** 2 * held.whole.shape[1] > self.device.flops:
            raise SkipStep
        whole = exact(held.whole)
        bound = float((np.abs(whole) @ np.abs(whole).T).max(initial=0))
        tolerance = rounding(held.whole.dtype, bound)
        product = Held(held.matrix @ held.matrix.T, (whole @ whole.T).astype(held.whole.dtype))
        self.check(product, tolerance)
        return None if tolerance else self.keep(product.matrix, product.whole)

    @step(
        matrices, of=matrices, other=matrices,
        routine=sampled_from(["syrk", "symm", "trmm", "trsm", "geadd", "tradd"]), uplo=sampled_from("LU"),
        op=sampled_from("NT"), seed=seeds, there=st.booleans(),
    )  # fmt: skip
    def update(self, of, other, routine, uplo, op, seed, there):
        """A routine of level 3 on a matrix that is there, perhaps into one that is there."""
        b = self.pick(of, lambda held: held.arithmetic and held.whole.dtype.itemsize > 2)
        dtype, (m, n) = b.whole.dtype, b.whole.shape
        self.tame(b, small(dtype))
        flags = {"side": "L", "uplo": uplo, "op_a": op, "diag": "N"}
        flags = {name: flags[name] for name in ROUTINES[routine].options}
        values: dict[str, Held] = {}
        if routine in ("syrk", "geadd", "tradd"):
            order = (n if op == "T" else m) if routine == "syrk" else 0
            shape = (order, order) if routine == "syrk" else ((n, m) if op == "T" else (m, n))
            if order**2 * max(m, n) > self.device.flops:
                raise SkipStep
            values["a"] = b
        else:
            if m**2 * n > self.device.flops:
                raise SkipStep
            shape = (m, n)
            values = {"a": self.new(seed, (m, m), dtype), "b": b}
            if (
                routine == "trsm"
            ):  # twos on the diagonal, and no more than twos beside it: the solution is exact
                a = np.eye(m, dtype=dtype) * 2
                if m > 1:
                    a[(m - 1, 0) if uplo == "L" else (0, m - 1)] = 2
                self.fill(values["a"], a)
        target = None
        if there:
            target = self.like(other, seed + 1, shape, dtype, *values.values())
            self.tame(target)
        beta = 0
        if routine in ("geadd", "tradd"):
            values["c"], beta = target or self.new(seed + 2, shape, dtype), 1 + seed % 2
        computed = dense(routine, {name: exact(x.whole) for name, x in values.items()}, flags, 1, beta)
        before: Any = target.whole if target else values["c"].whole if beta else np.zeros(shape, dtype)
        whole = np.where(touched(routine, "d", flags, shape), computed, before).astype(dtype)
        given: dict[str, Any] = {name: x.matrix for name, x in values.items()}
        given |= {"beta": beta} if beta else {}
        result = getattr(pb.blas, routine)(**given, **flags, out=None if target is None else target.matrix)
        if target is None:
            return self.keep(result, whole)
        target.whole[...] = whole
        return self.check(target)

    # -- files

    @step(
        files, of=matrices, number=st.integers(0, 2), kind=sampled_from(FORMATS),
        order=sampled_from([None, "C", "F"]),
    )  # fmt: skip
    def save(self, of, number, kind, order):
        """A file, new or in place of one that is there."""
        held = self.pick(of, lambda held: kind != "npy" or not is_foreign(held.whole.dtype))
        name = f"{number}.{kind}"
        how: dict[str, Any] = {"dataset": "a"} if kind == "h5" else {"order": order} if kind == "npy" else {}
        held.matrix.save(self.directory / name, **how)
        self.files[name] = held.whole.copy()
        if kind == "npy":
            expect(differs(np.load(self.directory / name), held.whole))
        return name

    @step(matrices, file=files, layout=layouts())
    def load(self, file, layout):
        """A file that was saved, in any layout."""
        whole = self.files[file]
        matrix = self.ctx.load(self.directory / file, moved(layout, whole.shape, whole.dtype))
        return self.keep(matrix, whole.copy())

    # -- the PBLAS names

    @step(grids, shape=numbers)
    def open_grid(self, shape):
        """A grid of all ranks."""
        size = self.ctx.size
        shapes = [(p, size // p) for p in range(1, size + 1) if size % p == 0]
        chosen = shapes[shape % len(shapes)]
        number = pblas.gridinit(self.ctx, "Row", *chosen)
        self.grids[number] = chosen
        return number

    @step(grid=consumes(grids))
    def close_grid(self, grid):
        """The grid is gone."""
        del self.grids[grid]
        pblas.gridexit(grid)

    @step(
        grid=grids, name=sampled_from([name for name in FUNCTIONS if name not in ("syrkx", "herkx")]),
        seed=seeds,
    )  # fmt: skip
    def fortran(self, grid, name, seed):
        """A routine under its PBLAS name."""
        rng = np.random.default_rng(seed)
        dtype = DTYPES[rng.integers(4)]
        options = legal_options(name, dtype)
        on = pb.Grid(*self.grids[grid]), grid
        check_call(self.ctx, rng, name, options[rng.integers(len(options))], dtype, "pblas", grid=on)

    @precondition(on_host)
    @step(
        dtype=blas_types, seed=seeds, n=st.integers(1, 39),
        how=sampled_from(["gen", "pos", "tri", "lu", "cholesky", "lstsq", "ranked", "refined"]),
        uplo=sampled_from("LU"), singular=st.booleans(),
    )  # fmt: skip
    def solve(self, dtype, seed, n, how, uplo, singular):
        """A system with a solution of small integers, or a matrix that has no factor: an error, and all goes on."""
        dtype = np.dtype(dtype)
        if how == "refined" and dtype.name not in ("float64", "complex128"):
            raise SkipStep
        whole = integers((n, n), dtype, seed, 2).astype(exact(np.zeros(1, dtype)).dtype) / (
            8 * n
        ) + 2 * np.eye(n)
        if how in ("pos", "cholesky"):
            whole = (whole + whole.conj().T) / 2
        triangle = np.tril if uplo == "L" else np.triu
        whole = triangle(whole) if how == "tri" else whole
        least = how in ("lstsq", "ranked")
        if singular and not least:
            whole[n // 2, :] = whole[:, n // 2] = 0
        a, b, x = (self.new(seed + i, shape, dtype) for i, shape in enumerate(((n, n), (n, 3), (n, 3))))
        self.fill(a, whole.astype(dtype))
        self.fill(b, (whole @ exact(x.whole)).astype(dtype))
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
            expect("" if singular and error.index == n // 2 else f"{error}")
            return
        expect("" if not singular or least else "no error for a singular matrix")
        self.check(Held(found, x.whole), 500 * np.finfo(dtype).eps * max(1, abs(x.whole).max()))

    @precondition(on_host)
    @step(
        dtype=blas_types, seed=seeds, n=st.integers(1, 39), how=sampled_from(["eigh", "pair", "svd"]),
        uplo=sampled_from("LU"),
    )  # fmt: skip
    def spectrum(self, dtype, seed, n, how, uplo):
        """Eigenpairs, of one matrix or of two, or singular values and vectors."""
        dtype = np.dtype(dtype)
        whole = integers((n, n), dtype, seed, 4)
        if how != "svd":
            whole = ((whole + whole.conj().T) / 2).astype(dtype)
        a = self.new(seed, (n, n), dtype)
        self.fill(a, whole)
        given = [a.matrix]
        if how == "pair":
            given.append(self.new(seed + 1, (n, n), dtype).matrix)
            self.fill(Held(given[1], np.zeros((n, n), dtype)), (4 * np.eye(n)).astype(dtype))
        how_called = {} if how == "svd" else {"lower": uplo == "L"}
        function = pb.linalg.svd if how == "svd" else pb.linalg.eigh
        found = function(*given, **how_called)
        expect("" if pb.verify(function, *given, found=found, **how_called) else f"{how}: wrong")

    @step(matrices, of=matrices, axis=sampled_from([0, 1]))
    def shards(self, of, axis):
        """To shards of rows or columns, as other libraries have them, and back."""
        held = self.pick(of)
        part = held.matrix.to_dlpack_shard(axis)  # on GPUs those of 8-bit floats are bytes
        back = self.ctx.from_dlpack_shards(part, axis, dtype=held.matrix.dtype)
        return self.keep(back.copy(), held.whole.copy())

    @step(matrices, of=matrices)
    def scalapack(self, of):
        """To ScaLAPACK's form and back, without a copy."""
        held = self.pick(of, lambda x: x.whole.dtype.itemsize > 2 and x.matrix.descriptor.order == "F")
        try:
            local, i, j, desc = held.matrix.to_scalapack()
        except pb.LayoutError as error:  # it was made from a part that began inside a block
            if "block boundary" in str(error):
                raise SkipStep from None
            raise
        back = self.ctx.from_scalapack(local, desc, held.matrix.descriptor.grid)
        m, n = held.whole.shape
        return self.keep(back[i - 1 : i - 1 + m, j - 1 : j - 1 + n], held.whole)
