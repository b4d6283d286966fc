# SPDX-License-Identifier: Apache-2.0
"""Random statements on matrices, each against NumPy: operators on chains of views, in place, and overlapping.

Hypothesis draws the statements, and shrinks them. After each one all matrices are compared whole, so that a write
outside the place it was meant for is found, too. Values are small integers: every result is exact in every type.
"""

import itertools
import operator
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings

import pblasmp as pb
from pblasmp.dtypes import FLOAT8
from tests.helpers.cases import (
    TYPES,
    check_array,
    check_matrix,
    check_view,
    exact,
    layout,
    numbers,
    part,
    pick,
    product,
    refuses,
    scattered,
    short_messages,
)
from tests.helpers.mpi import on_ranks, run_mpi
from tests.helpers.slow import draws, in_turn, only_long
from tests.helpers.tape import Tape, tapes

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}
IN_PLACE = {
    "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv, "**": operator.ipow,
}  # fmt: skip
ALL_TYPES = (*TYPES, *TYPES, *FLOAT8)
SIDE = 9
STATEMENTS = 12


class Named:
    """A matrix, or a view of one, beside the NumPy array that it must equal, and how it was written."""

    def __init__(self, matrix, array, text):
        self.matrix, self.array, self.text = matrix, array, text

    def at(self, index):
        i, j = index
        text = f"{self.text}[{i.start}:{i.stop}, {j.start}:{j.stop}]"
        return Named(self.matrix[index], self.array[index], text)

    @property
    def T(self):  # noqa: N802
        return Named(self.matrix.T, self.array.T, f"{self.text}.T")

    @property
    def H(self):  # noqa: N802
        """NumPy's is a copy for complex types, and so is this one: no matrix changes with it."""
        array = self.array.conj().T if self.array.dtype.kind == "c" else self.array.T
        return Named(self.matrix.H, array, f"{self.text}.H")


def window(rng, shape, size=None):
    """The index of a part of a matrix of ``shape``, of ``size`` if that is given."""
    size = tuple(int(rng.integers(1, n + 1)) for n in shape) if size is None else size
    starts = (int(rng.integers(n - length + 1)) for n, length in zip(shape, size, strict=True))
    return tuple(slice(start, start + length) for start, length in zip(starts, size, strict=True))


def view(rng, x, size=None, *, writes=False):
    """A chain of views of ``x``, the last of ``size`` if that is given, and fits. None of a copy if it ``writes``."""
    for _ in range(int(rng.integers(3))):
        how = int(rng.integers(3))
        if how == 0:
            smallest = 1 if size is None else max(size)
            x = x.at(
                window(
                    rng,
                    x.array.shape,
                    tuple(int(rng.integers(min(n, smallest), n + 1)) for n in x.array.shape),
                )
            )
        elif how == 1 or (writes and x.array.dtype.kind == "c"):
            x = x.T
        else:
            x = x.H
    if size is None:
        return x
    if any(length > n for length, n in zip(size, x.array.shape, strict=True)):
        return None
    return x if size == x.array.shape and rng.integers(2) else x.at(window(rng, x.array.shape, size))


class Program:
    """Matrices in random layouts, and random statements on them."""

    def __init__(self, ctx, rng):
        self.ctx, self.rng = ctx, rng
        kinds = [pick(self.rng, ALL_TYPES) for _ in range(2)]
        self.matrices = [self.matrix(name, kinds[i % 2]) for i, name in enumerate("ABC")]

    def matrix(self, name, dtype):
        shape = SIDE + int(self.rng.integers(3)), SIDE + int(self.rng.integers(3))
        d = layout(self.rng, shape, self.ctx.size, dtype=dtype)
        values = numbers(self.rng, shape, "float64").astype(d.dtype)
        return Named(scattered(self.ctx, d, values), values, name)

    def any_view(self, size=None, *, writes=False):
        for _ in range(50):
            found = view(self.rng, pick(self.rng, self.matrices), size, writes=writes)
            if found is not None:
                return found
        size = size or (SIDE, SIDE)
        fit = [
            x
            for each in self.matrices
            for x in (each, each.T)
            if np.all(np.greater_equal(x.array.shape, size))
        ]
        x = pick(self.rng, fit)
        return x.at(window(self.rng, x.array.shape, size))

    def size(self):
        return tuple(int(n) for n in self.rng.integers(1, 6, 2))

    def operand(self, size, like):
        """A view, or a number or a vector that ``like``'s type holds."""
        if self.rng.integers(6) == 0:
            shape = pick(self.rng, (size[1:], (1, size[1]), (size[0], 1), (1,)))
            vector = self.rng.integers(-1, 3, shape).astype(like.dtype)
            return Named(vector, vector, f"the vector {vector.tolist()} of shape {shape}")
        if self.rng.integers(6) == 0:
            return self.any_view(pick(self.rng, ((1, size[1]), (size[0], 1), (1, 1))))
        if self.rng.integers(4) == 0:
            number = pick(self.rng, (2, -1, 1j)) if like.dtype.kind == "c" else pick(self.rng, (2, -1))
            return Named(number, number, repr(number))
        return self.any_view(size)

    # -- statements: each returns its text, and what is wrong or None

    def assign(self):
        """``v[i, j] = w``, most often within one matrix, where both overlap."""
        size = self.size()
        target = self.any_view(size, writes=True)
        value = self.any_view(size)
        return self.write(target, value, f"{target.text} = {value.text}", lambda _, y: y)

    def assign_result(self):
        """``v[i, j] = w @ u``."""
        size, k = self.size(), int(self.rng.integers(1, 6))
        x, y, target = (
            self.any_view((size[0], k)),
            self.any_view((k, size[1])),
            self.any_view(size, writes=True),
        )
        text = f"{target.text} = matmul({x.text}, {y.text})"
        if x.array.dtype != y.array.dtype or x.array.dtype in FLOAT8.values():
            return text
        found = pb.matmul(x.matrix, y.matrix)
        expected = product(x.array, y.array)
        check_view(found, expected, text)
        return self.write(target, Named(found, expected, ""), text, lambda _, y: y)

    def augment(self):
        """``v[i, j] += w``: Python reads the item, adds in place, and writes the item."""
        size = self.size()
        target = self.any_view(size, writes=True)
        symbol = pick(self.rng, tuple(OPERATORS))
        value = self.operand(size, target.array) if symbol in "+-*" else Named(2, 2, "2")
        text = f"{target.text} {symbol}= {value.text}"
        return self.write(target, value, text, OPERATORS[symbol], IN_PLACE[symbol])

    def augment_view(self):
        """``v += w`` with a variable that is a view."""
        target = self.any_view(writes=True)
        value = self.operand(target.array.shape, target.array)
        symbol = pick(self.rng, "+-*")
        text = f"v = {target.text}; v {symbol}= {value.text}"
        if complex_into_real(target.array, value.array):
            words = ["does not fit into"]
            refuses(self.ctx, pb.ArgumentError, words, IN_PLACE[symbol], target.matrix, value.matrix)
            return text
        result = combined(OPERATORS[symbol], target.array, value.array)
        found = IN_PLACE[symbol](target.matrix, value.matrix)
        target.array[...] = result
        assert found is target.matrix, f"{text}: another object"
        return text

    def binary(self):
        size = self.size()
        left, symbol = self.any_view(size), pick(self.rng, "+-*")
        right = self.operand(size, left.array)
        pair = (
            (left, right)
            if self.rng.integers(4)
            or (getattr(right.matrix, "descriptor", None) and right.array.shape == size)
            else (right, left)
        )
        text = f"{pair[0].text} {symbol} {pair[1].text}"
        found = OPERATORS[symbol](pair[0].matrix, pair[1].matrix)
        expected = combined(OPERATORS[symbol], pair[0].array, pair[1].array)
        check_view(found, expected, text)
        assert found.descriptor.same_places(left.matrix.descriptor), (
            f"{text}: not laid out like the left operand"
        )
        assert found.descriptor.order == left.matrix.descriptor.order, text
        return text

    def unary(self):
        x = self.any_view(self.size())
        types = ("complex64", "complex128") if x.array.dtype.kind == "c" else ALL_TYPES
        to = layout(self.rng, x.array.shape, self.ctx.size, dtype=pick(self.rng, types))
        text, found, expected = pick(
            self.rng,
            (
                (f"-{x.text}", -x.matrix, -x.array),
                (f"{x.text}.copy()", x.matrix.copy(), x.array),
                (f"{x.text}.H", x.matrix.H, x.array.conj().T if x.array.dtype.kind == "c" else x.array.T),
                (f"{x.text}.astype(complex128)", x.matrix.astype("complex128"), x.array.astype("complex128")),
                (f"{x.text}.redistribute({to})", x.matrix.redistribute(to), x.array.astype(to.dtype)),
            ),
        )
        check_view(found, expected, text)
        return text

    def reduce(self):
        x = self.any_view(self.size())
        wide = x.array.astype("complex128" if x.array.dtype.kind == "c" else "float64")
        axis = pick(self.rng, (None, 0, 1, -1))
        m = x.matrix
        found = (
            m.sum(axis),
            m.mean(axis),
            m.min(axis),
            m.max(axis),
            m.diagonal(),
            m.norm("max"),
            m.allgather(),
        )
        expected = (
            *(
                np.asarray(each(axis)).astype(x.array.dtype)
                for each in (wide.sum, wide.mean, wide.min, wide.max)
            ),
            x.array.diagonal(),
            np.abs(wide).max(),
            x.array,
        )
        text = f"{x.text}.sum({axis}), ..."
        for one, wanted in zip(found, expected, strict=True):
            check_array(np.asarray(one), np.asarray(wanted), text)
        return text

    def function(self):
        """What a method makes of each element, or of those on one side of a diagonal."""
        x, k = self.any_view(self.size()), int(self.rng.integers(-3, 4))
        y = self.any_view(x.array.shape) if self.rng.integers(2) else Named(2, 2, "2")
        m, a, complex_ = x.matrix, x.array, x.array.dtype.kind == "c"
        text, found, expected = pick(
            self.rng,
            (
                (f"abs({x.text})", lambda: abs(m), lambda: abs(a)),
                (f"{x.text}.conj()", m.conj, lambda: a.conj() if complex_ else a),
                (f"{x.text}.real", lambda: m.real, lambda: a.real if complex_ else a),
                (f"{x.text}.imag", lambda: m.imag, lambda: a.imag if complex_ else np.zeros_like(a)),
                (f"{x.text} ** 2", lambda: m**2, lambda: a**2),
                (f"2 ** abs({x.text})", lambda: 2 ** abs(m), lambda: 2 ** abs(a)),
                (f"{x.text}.tril({k})", lambda: m.tril(k), lambda: np.tril(a, k)),
                (f"{x.text}.triu({k})", lambda: m.triu(k), lambda: np.triu(a, k)),
                (f"{x.text}.map(double)", lambda: m.map(lambda v: v + v), lambda: a + a),
                (
                    f"{x.text}.map(positive)",
                    lambda: m.map(lambda v: abs(v) > 1, dtype="float32"),
                    lambda: (abs(a) > 1).astype("float32"),
                ),
            ),
        )
        check_view(found(), expected(), text)
        close = (
            pb.allclose(m, y.matrix, atol=1),
            bool(np.allclose(exact(a), exact(np.asarray(y.array)), atol=1)),
        )
        same = pb.allclose(m, m.copy().redistribute(order="F"))
        text = f"{text}, allclose({x.text}, {y.text})"
        assert close[0] is close[1], text
        assert same, text
        return text

    def index(self):
        """Rows, columns and elements, written as in NumPy; read and written."""
        x = self.any_view(self.size(), writes=True)
        (m, n), rng = x.array.shape, self.rng
        i, j = int(rng.integers(-m, m)), int(rng.integers(-n, n))
        stop, start = int(rng.integers(-m, m + 3)), int(rng.integers(-n - 2, n))
        where, text = pick(rng, (
            ((i, j), f"[{i}, {j}]"), (np.int64(i), f"[{i}]"), ((i, np.s_[:]), f"[{i}, :]"),
            ((np.s_[:], j), f"[:, {j}]"),
            (np.s_[:stop], f"[:{stop}]"), ((np.s_[:stop:1], np.s_[start:]), f"[:{stop}:1, {start}:]"),
            (..., "[...]"), ((i, np.s_[start:]), f"[{i}, {start}:]"), (np.s_[..., j], f"[..., {j}]"),
            (np.s_[i, ...], f"[{i}, ...]"), (np.s_[..., :stop], f"[..., :{stop}]"),
            (np.s_[..., i, j], f"[..., {i}, {j}]"), (np.s_[i, ..., j], f"[{i}, ..., {j}]"),
            (np.s_[start:, :, ...], f"[{start}:, :, ...]"),
        ))  # fmt: skip
        expected, found = x.array[where], x.matrix[where]
        if isinstance(found, pb.DistributedMatrix):
            column = text.startswith(("[:,", "[...,")) and expected.ndim == 1
            two = expected.reshape(-1, 1) if column else np.atleast_2d(expected)
            check_view(found, two, f"{x.text}{text}")
        else:
            check_array(np.asarray(found), np.asarray(expected), f"{x.text}{text}")
        shape = expected.shape
        if shape and rng.integers(2):
            shape = pick(
                rng,
                (shape, shape[-1:], (1, *shape)) if len(shape) < 2 else (shape, shape[-1:], (1, shape[1])),
            )
        kind = pick(rng, (x.array.dtype, np.dtype("int8"), np.dtype("float32")))
        value = numbers(rng, shape, "float64").astype(kind, order=pick(rng, "CF"))
        root = None if shape == () or rng.integers(2) else int(rng.integers(self.ctx.size))
        x.matrix[where] = value if root in (None, self.ctx.rank) or self.ctx.size == 1 else None
        x.array[where] = value
        return f"{x.text}{text} = an array of {kind} {shape} of rank {root}"

    def memory_order(self):
        """A product of ``.T`` is laid out alike, however the transpose was written."""
        x = pick(self.rng, self.matrices)
        if x.array.dtype in FLOAT8.values():
            return ""
        every = np.s_[:, :]
        ways = (
            x.matrix.T,
            x.matrix.T[every],
            x.matrix[every].T,
            x.matrix.T.T.T,
            x.matrix.H,
            x.matrix.H[every],
        )
        found = [pb.matmul(way, x.matrix) for way in ways]
        orders = {each.descriptor for each in found}
        values = product(x.array, x.array, op_a="T"), product(x.array, x.array, op_a="C")
        text = f"{x.text}.T @ {x.text}"
        for i, each in enumerate(found):
            check_view(each, values[i > 3], text)
        assert len(orders) == 1, text
        return text

    def wrong_shape(self):
        size = self.size()
        target, value = self.any_view(size, writes=True), self.any_view((size[0] + 1, size[1]))
        words = ["matrix[...] =", str(size), str(value.array.shape)]
        refuses(self.ctx, pb.ArgumentError, words, target.matrix.__setitem__, np.s_[:, :], value.matrix)
        return f"{target.text} = {value.text}"

    def write(self, target, value, text, function, in_place=None):
        """Run ``target[all] = value`` or ``target[all] op= value``, on both sides."""
        every = np.s_[:, :]
        if complex_into_real(target.array, value.array):
            words = ["does not fit into"]
            call = target.matrix.__setitem__ if in_place is None else in_place
            given = (every, value.matrix) if in_place is None else (target.matrix, value.matrix)
            refuses(self.ctx, pb.ArgumentError, words, call, *given)
            return text
        result = combined(function, target.array, value.array)
        if in_place is None:
            target.matrix[every] = value.matrix
        else:
            item = target.matrix[every]
            target.matrix[every] = in_place(item, value.matrix)
        target.array[...] = result
        return text

    def step(self):
        statement = pick(self.rng, (
            self.assign, self.assign, self.assign, self.augment, self.augment, self.augment_view, self.assign_result,
            self.binary, self.unary, self.reduce, self.memory_order, self.fill, self.wrong_shape,
            self.function, self.function, self.index, self.index,
        ))  # fmt: skip
        text = statement()
        for x in self.matrices:
            check_matrix(x.matrix, x.array, f"after {text}")
            self.refresh(x)

    def fill(self):
        target = self.any_view(self.size(), writes=True)
        number = int(self.rng.integers(-4, 5))
        target.matrix[:, :] = number
        target.array[...] = number
        return f"{target.text} = {number}"

    def refresh(self, x):
        """Give a matrix small integers again if it has others."""
        values = x.array.astype("complex128")
        if (np.abs(values) > 16).any() or (values != np.round(values)).any():
            x.array[...] = numbers(self.rng, x.array.shape, "float64").astype(x.array.dtype)
            x.matrix.local[...] = part(x.array, x.matrix.descriptor, self.ctx.rank)


def combined(function, x, y):
    """What NumPy says; two narrow types that differ meet in float32. In the type of ``x`` if the caller assigns it."""
    try:
        return function(x, y)
    except TypeError:
        return function(x.astype(np.float32), y.astype(np.float32))


def complex_into_real(x, y):
    return np.iscomplexobj(y) and not np.iscomplexobj(x)


def program(comm, tape):
    with pb.Context(comm, engine="host") as ctx, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 8-bit floats overflow
        program = Program(ctx, Tape(tape))
        with short_messages(pick(program.rng, (24, 300, 1 << 22))):
            for _ in range(STATEMENTS):
                program.step()


def _add_in_transpose(a):
    a.T[0:2, 0:2] += 1


def _add_in_variable(a):
    b = a.T
    b[1:4, 2:5] *= 2


def _add_in_view_of_view(a):
    a[2:8, 1:9].T[1:4, 0:3][0:2, :] -= 3


def _take_transpose(a):
    a[:, :] = a.T


AS_WRITTEN = {
    "A.T[i, j] += 1": _add_in_transpose,
    "b = A.T; b[i, j] *= 2": _add_in_variable,
    "A[i, j].T[k, l][m, n] -= 3": _add_in_view_of_view,
    "A[:, :] = A.T": _take_transpose,
    "A[1:, :] = A[:-1, :]": lambda a: operator.setitem(a, np.s_[1:, :], a[:-1, :]),
    "A[:-1, :] = A[1:, :]": lambda a: operator.setitem(a, np.s_[:-1, :], a[1:, :]),
    "A[:, 1:] = A[:, :-1]": lambda a: operator.setitem(a, np.s_[:, 1:], a[:, :-1]),
    "A[0:3, 0:3] = A[1:4, 1:4]": lambda a: operator.setitem(a, np.s_[0:3, 0:3], a[1:4, 1:4]),
    "A[1:4, 1:4] = A[0:3, 0:3]": lambda a: operator.setitem(a, np.s_[1:4, 1:4], a[0:3, 0:3]),
    "A[0:6, 0:6] = A[0:6, 0:6].T": lambda a: operator.setitem(a, np.s_[0:6, 0:6], a[0:6, 0:6].T),
    "A[0:0, 0:5] = A[2:2, 1:6]": lambda a: operator.setitem(a, np.s_[0:0, 0:5], a[2:2, 1:6]),
}


@on_ranks(1, *only_long(3), 4)
def test_shifts_and_transposes_in_place(comm):
    """The shifts and transposes of public scripts, in every type."""
    rng = np.random.default_rng(5)
    with pb.Context(comm, engine="host") as ctx, pb.Context(comm, engine="host") as other:
        every = itertools.product((*TYPES, *FLOAT8), AS_WRITTEN.items())
        for dtype, (case, statement) in in_turn(every, keep=1 if comm.size == 1 else 2):
            d = layout(rng, (12, 12), comm.size, dtype=dtype)
            x = numbers(rng, d.shape, "float64").astype(d.dtype)
            a = scattered(ctx, d, x)
            statement(a)
            statement(x)
            check_matrix(a, x, f"{case} of {d}")
        for left, right, words in (
            (np.s_[0:3, 0:3], a[0:2, 0:2], ["matrix[...] =", "(3, 3)", "(2, 2)"]),
            (np.s_[0:1, :], a[:, 0:1], ["matrix[...] =", "(1, 12)", "(12, 1): transpose it, other.T"]),
            ([0, 1], 7, ["index: expected integers or slices", "got [0, 1]"]),  # in NumPy these are two rows
            (np.s_[:, :], other.zeros(d), ["matrix[...] =", "another context"]),
            (np.s_[:, :], ctx.zeros((12, 12), dtype="complex64"), ["matrix[...] =", "complex64"]),
        ):
            refuses(ctx, pb.ArgumentError, words, a.__setitem__, left, right)
        if comm.size > 1:
            start = int(comm.rank == comm.size - 1)
            call = a.__setitem__, np.s_[start : start + 3, :], a[0:3, :]
            refuses(ctx, pb.RankMismatchError, ["matrix[...] ="], *call)
            last = comm.rank == comm.size - 1
            words = [
                "expected a DistributedMatrix, a number or a NumPy array, got str",
                f"on rank {comm.size - 1}",
            ]
            call = a.__setitem__, np.s_[:, :], "7" if last else 7
            refuses(ctx, TypeError, words, *call)
            words = ["the array of ranks", str(comm.size - 1), "differs from that of rank 0"]
            call = a.__setitem__, np.s_[0:2, 0:2], np.full((2, 2), int(last))
            refuses(ctx, pb.RankMismatchError, words, *call)
            words = ["a NumPy array", f"on rank {comm.size - 1}"]
            call = a.__setitem__, np.s_[0:2, 0:2], 1 if last else np.ones((2, 2))
            refuses(ctx, pb.RankMismatchError, words, *call)
            call = a.__getitem__, (0, int(last))
            refuses(ctx, pb.RankMismatchError, ["matrix[i, j]"], *call)
            words = ["map: result", "float64", "float32"]
            call = a.map, lambda v: np.ones(v.shape, "float32" if last else "float64")
            refuses(ctx, pb.RankMismatchError, words, *call)
            words = ["a sub-matrix has step 1", f"on rank {comm.size - 1}"]
            call = a.__setitem__, np.s_[:: 2 if last else 1, :], a
            refuses(ctx, pb.ArgumentError, words, *call)
        two, beyond = max(1, comm.size - 1), pb.Grid(comm.size + 1, 1)
        some = np.ones((2, 2)) if comm.rank < two and comm.size > 2 else None
        ranks = list(range(two)) if comm.size > 2 else []
        for error, words, call, *given in (
            (pb.ArgumentError, [f"on ranks {ranks}"], a.__setitem__, np.s_[0:2, 0:2], some),
            (pb.ArgumentError, ["(12,)", "(5,)"], a.__setitem__, 3, np.ones(5)),
            (pb.ArgumentError, ["complex128"], a.__setitem__, 3, np.ones(12) * 1j),
            (TypeError, ["expected numbers"], a.__setitem__, 3, ["a"] * 12),
            (pb.ArgumentError, ["masked"], a.__setitem__, 3, np.ma.masked_array(np.ones(12), True)),
            (pb.ArgumentError, ["row 12 is out of range"], a.__setitem__, 12, 1),
            (pb.ArgumentError, ["column -13"], a.__getitem__, (0, -13)),
            (pb.ArgumentError, ["A[3, 4]"], a.__getitem__, (0, 0, 0)),
            (pb.ArgumentError, ["A[3, 4]"], a.__getitem__, True),
            (pb.ArgumentError, ["A[3, 4]"], a.__getitem__, [0, 1]),
            (pb.ArgumentError, ["slice"], a.__getitem__, np.s_[:, 0:6:2]),
            (pb.ArgumentError, ["slice"], a.__getitem__, np.s_[:1, :1, :1]),
            (pb.ArgumentError, ["expected integers or slices"], a.__setitem__, (..., ...), 1),
            (pb.ArgumentError, ["expected integers or slices"], a.__setitem__, (..., 1, 2, 3), 1),
            (pb.ArgumentError, ["(12, 12)"], a.redistribute, layout(rng, (12, 13), comm.size)),
            (
                pb.ArgumentError,
                [f"needs {comm.size + 1} ranks"],
                a.redistribute,
                replace(d, grid=beyond, source=(0, 0)),
            ),
            (pb.ArgumentError, ["does not convert"], ctx.zeros((12, 12), dtype="complex64").redistribute, d),
            (pb.ArgumentError, ["bool", "dtype="], a.map, lambda v: v > 0),
            (pb.ArgumentError, ["returned 3"], a.map, lambda v: 3),
            (pb.ArgumentError, ["<memory"], a.map, lambda v: memoryview(np.ones(v.shape))),
            (pb.ArgumentError, ["vectorize"], a.map, lambda v: 1.0 if v > 0 else 0.0),
            (ValueError, ["read-only"], a.map, lambda v: v.__iadd__(1)),
            (TypeError, ["expected a function"], a.map, 3),
            (TypeError, ["k: expected an integer"], a.tril, 0.5),
            (pb.ArgumentError, ["at least one element"], a[:0].min),
            (pb.ArgumentError, ["at least one element"], a[:, :0].max, 1),
            (pb.ArgumentError, ["(12, 12)", "(1, 12)"], pb.allclose, a, a[3]),
            (pb.ArgumentError, ["rtol"], pb.allclose, a, a, -1.0),
            (TypeError, ["b: expected"], pb.allclose, a, "a"),
            (TypeError, ["a: expected"], pb.allclose, a if comm.rank else "a", a),
            (TypeError, ["equal_nan: exp"], partial(pb.allclose, equal_nan=np.ones(2)), a, a),
        ):
            refuses(ctx, error, words, call, *given)
        nan = ctx.full((7, 5), np.nan)
        values = [
            pb.allclose(nan, nan),
            pb.allclose(nan, nan, equal_nan=True),
            bool(np.isnan(nan.min(0)).all()),
        ]
        assert values == [False, True, True], "NaN"
        check_matrix(a, x, "nothing was written")
        memory = np.arange(12.0 * 12).reshape(12, 12) if comm.size == 1 else None
        if memory is not None:
            d = pb.MatrixDescriptor((12, 12), (12, 12), pb.Grid(1, 1))
            one, same = ctx.from_local(memory, d), ctx.from_local(memory, d)
            one[1:, :] = same[:-1, :]
            x = np.arange(12.0 * 12).reshape(12, 12)
            x[1:, :] = x[:-1, :].copy()
            check_matrix(same, x, "two matrices over one array")


@pytest.mark.parametrize("nranks", [1, *only_long(2), 3, 4, *only_long(5, 6)])
@given(tape=tapes(150))
@settings(max_examples=draws(5, long=100))
def test_statements_mean_what_they_mean_in_numpy(nranks, tape):
    run_mpi(program, nranks, tape=tape)
