# SPDX-License-Identifier: Apache-2.0
"""Calls of levels 1 and 2: their vectors as columns, checked and agreed on, computed as level-3 routines or as sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..dtypes import element_type, scalar
from ..engines.direct import Asked
from ..engines.local import sums
from ..engines.local.sums import Vector
from ..engines.product import Product
from ..engines.request import Options
from ..errors import ArgumentError, LayoutError, faults_text, short_repr
from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor
from ..layout.grid import one_of
from ..layout.routines import VECTOR_ROUTINES, VectorRoutine
from ..matrix.distributed import DistributedMatrix
from ..runtime.handle import Handle
from ..runtime.matrix_calls import MatrixCall
from ..runtime.reading import check_operands, check_writable, comparable, context_of, number, sub_matrices
from ..runtime.runtime import Runtime

Given = Mapping[str, Any]  # operands by name; None if absent


def column(x: Any) -> Any:
    """Return a vector as a matrix of one column; what is no vector as it is. Local."""
    if not isinstance(x, Handle):
        return x
    _, _, m, n, transposed = x._at
    return x.T if (n == 1 != m if transposed else m == 1 != n) else x


def same(x: Handle, y: Handle) -> bool:
    """Return whether two columns of one length are the same elements. Local."""
    here, there = x.place, y.place
    one = x.shape == (1, 1) == y.shape  # whose transpose is itself
    return here[0] is there[0] and here[1 : 3 if one else None] == there[1 : 3 if one else None]


def _check_fit(row: VectorRoutine, routine: str, given: Given, op_a: object = "N") -> None:
    """Raise an error that names every operand that does not fit. Local.

    Vectors are columns, "out" may be among the operands; None for those that are absent.
    """
    present = {name: x for name, x in given.items() if x is not None}
    faults = [*_size_faults(row, present, op_a), *_type_faults(present)]
    if faults:
        raise LayoutError(faults_text(f"this {routine}", faults))


def _size_faults(row: VectorRoutine, present: Given, op_a: object) -> Iterator[str]:
    known: dict[str, tuple[int, str]] = {}  # m and n, and the operand that they are from
    for name in sorted(present, key=lambda name: (name != "a", name == "out")):
        sizes = row.sizes[row.written[-1] if name == "out" else name].split()
        shape: tuple[int, ...] = present[name].shape
        if name == "a" or (name == "out" and row.written == "a"):
            expected, shown = sizes, f"{shape[0]}x{shape[1]}"
        else:
            if shape[1] != 1:
                yield f"{name}: shape is {shape[0]}x{shape[1]}, expected a vector, 1 x n or n x 1"
                continue
            expected, shown = [sizes[-1] if op_a != "N" else sizes[0]], f"{shape[0]} elements"
        for letter, extent in zip(expected, shape, strict=False):
            wanted, source = known.setdefault(letter, (extent, name))
            if extent != wanted:
                square = name == source
                why = "a square matrix" if square else f"{letter} = {wanted} like {source}"
                yield f"{name}: has {shown}, expected {why}"


def _type_faults(present: Given) -> Iterator[str]:
    (first, x), *others = present.items()
    if not element_type(x.dtype).blas:
        yield f"{first}: dtype is {x.dtype.name}, expected float32, float64, complex64 or complex128"
    for name, other in others:
        if other.dtype != x.dtype:
            yield f"{name}: dtype is {other.dtype.name}, expected {x.dtype.name} like {first}"


def computed(routine: str, given: Given, alpha: complex = 1) -> Any:
    """Compute what is no level-3 routine: "scal" and "swap", which write their operands, and numbers. Collective.

    Return the number, as a NumPy scalar; None for the others.
    """
    called, writes = (routine, *given.values(), alpha), routine in _WRITING
    x = given["x"]
    asked = x.known_call(called) if isinstance(x, Handle) else None
    if asked is not None and not (writes and not all(each.writeable for each in given.values())):
        direct = x.context.engine.direct
        found = (direct.run if writes else direct.reduce)(x.context.control, asked)
    else:
        found = _directly(called, [column(each) for each in given.values()], alpha)
    if found is not None and found is not False:
        return (
            None if writes else typed(x.dtype if asked is None else asked.d[0].pattern.dtype, routine, found)
        )
    columns = {name: column(each) for name, each in given.items()}
    _agree(routine, columns, {"alpha": alpha} if routine == "scal" else {}, voted=found is False)
    return after_agreement(routine, given, alpha)


_WRITING = ("scal", "swap")


def _directly(called: tuple[Any, ...], columns: list[Any], alpha: complex) -> Any:
    """Return what a direct call returns, None or False if it takes the ordinary way. Collective over the context."""
    (routine, given, *_), x, extents = called, columns[0], list[int]()
    ctx = x.context if isinstance(x, Handle) else None
    direct = None if ctx is None or ctx.is_closed else ctx.direct_on_host
    if ctx is None or direct is None:
        return None
    ctx.check_open()
    parts = sub_matrices(ctx, columns, extents)
    if parts is None or not extents[0] or extents != [extents[0], 1] * len(columns):
        return None
    of_x, of_y = parts[0], parts[-1]
    assert of_x is not None
    assert of_y is not None
    if routine not in _WRITING:
        asked = Asked(routine, routine, of_x, of_y if len(parts) > 1 else None, None, of_x, False)
        given.know(called, asked)
        return direct.reduce(ctx.control, asked)
    factor = number(alpha, of_x[0].pattern.letter, real=False)
    if not factor or not all(each.writeable for each in columns):
        return None
    asked = Asked(routine, routine, of_x, None, None, of_y, False, alpha=factor)
    given.know(called, asked)
    return direct.run(ctx.control, asked)


def _agree(routine: str, columns: Given, options: Mapping[str, Any], *, voted: bool) -> None:
    """Check the arguments and agree on them: of repeated calls with one vote. Collective over the context.

    Options are numbers. ``voted``: this rank has tried a direct call, on which the ranks did not agree.
    """
    ctx = context_of(routine, *columns.values())

    def first(facts: dict[str, Any]) -> bool:
        check_operands(ctx, "xy", columns)
        _check_fit(VECTOR_ROUTINES[routine], routine, columns)
        dtype = columns["x"].dtype
        facts.update({name: scalar(value, dtype, name) for name, value in options.items()})
        facts.update({name: x.descriptor for name, x in columns.items()})
        return again(True)

    def again(legal: bool) -> bool:
        if routine in _WRITING:
            check_writable(columns)
        if routine == "swap":
            x, y = columns["x"], columns["y"]
            if not same(x, y) and ctx.engine.overlap(x.local, y.local):
                raise ArgumentError("y: shares memory with x; expected x itself or a separate vector")
        return legal

    signature = None
    if comparable(ctx, columns.values(), options.values()) and all(x is not None for x in columns.values()):
        values = tuple((name, type(value), value) for name, value in options.items())
        signature = routine, values, *(x.descriptor for x in columns.values())
    known, _ = ctx.calls.agree(lambda: ctx.agreement(routine), signature, again, first, voted=voted)
    if not known:
        ctx.calls.remember(signature, True)


def after_agreement(routine: str, given: Given, alpha: complex = 1) -> Any:
    """Compute what is no level-3 routine, on operands on which the ranks have just agreed. Collective."""
    columns = [column(x) for x in given.values()]
    ctx, x = columns[0].context, columns[0]
    with ctx.running(routine), np.errstate(all="ignore"):
        if routine == "scal":
            factor = scalar(alpha, x.dtype, "alpha")
            x.local[...] = 0 if factor == 0 else x.local * x.dtype.type(factor)
            return None
        if routine == "swap":
            _exchange(ctx, x, columns[1])
            return None
        ctx.engine.synchronize()  # before values are read: that would wait forever if a rank is gone
        parts = [Vector(each.descriptor, each.local) for each in columns]
        return typed(x.dtype, routine, sums.reduced(ctx.engine, routine, parts))


def typed(dtype: np.dtype, routine: str, found: Any) -> Any:
    """Return the result of a reduction as NumPy scalars of a vector's type, and amax's index. Local."""
    if dtype.char == "d":
        return (np.float64(found[0].real), found[1]) if routine == "amax" else np.float64(found.real)
    with np.errstate(all="ignore"):
        if routine == "amax":
            value, index = found
            return as_number(dtype, value), index
        return as_number(dtype, found) if routine in ("dot", "dotc") else dtype.type(found).real


def _exchange(ctx: Runtime[Any], x: Handle, y: Handle) -> None:
    """Exchange the elements of two columns. Collective over the context."""
    if same(x, y):
        return
    d = y.descriptor
    memory = ctx.engine.operations.scratch("swap", y.local.shape, d.dtype, d.order)
    memory[...] = y.local
    kept = type(y)(ctx, replace(d, ld=None), memory)
    x.move_to(y)
    kept.move_to(x)


def as_number(dtype: np.dtype, value: complex) -> Any:
    """Return a number that ranks have told, in the type of a matrix. Local."""
    return dtype.type(value if dtype.kind == "c" else value.real)


def written(routine: str, arguments: dict[str, Any]) -> DistributedMatrix:
    """Return what the level-3 routine of one column computes. Collective over the context.

    Args:
        routine: its name.
        arguments: all of its function's.
    """
    out, done = arguments["out"], None
    asked = out.known_call((routine, *arguments.values())) if isinstance(out, Handle) else None
    if asked is not None and out.writeable:
        done = out.context.engine.direct.run(out.context.control, asked)
    found: DistributedMatrix = out if done else VectorCall(routine, arguments).run(voted=done is False)
    return found


class VectorCall(MatrixCall):
    """A call of a routine that is a level-3 routine of one column, with its function's arguments. Local to make."""

    def __init__(self, routine: str, arguments: dict[str, Any]) -> None:
        self._all = (routine, *arguments.values())
        row, self.called, twin, self._required = _TWINS[routine]
        self._vector_row, pop = row, arguments.pop
        self._vectors = given = {name: pop(name) for name in row.sizes if name in arguments}
        self.names = tuple(given)
        self._out = out = pop("out")
        if row.written != "a":
            out = column(out)
        names = self.called.get("a", ""), self.called.get("b", ""), self.called.get("c", "")
        a, b, c = [given.get(name) if name == "a" else column(given.get(name)) for name in names]
        how = {"algo": "auto", **arguments, **row.fixed}
        if row.adds:
            how["beta"] = 0 if c is None else 1
        if routine == "scal" and isinstance(a, Handle) and isinstance(out, Handle) and same(a, out):
            out = a  # one element is its own transpose
        super().__init__(routine, twin, (a, b, c, out), how)

    @property
    def required(self) -> str:
        """Those of A, B and C that it must have."""
        return self._required

    @property
    def in_place(self) -> str:
        """That of A, B and C which ``out`` may be."""
        return "a" if self.name == "scal" else super().in_place

    def directly(self) -> Any:
        """See ``MatrixCall``; on GPUs plans do not move a matrix either. Collective over the context."""
        found = None if self.ctx.engine.traits.on_gpus else super().directly()
        return found if found is None or found is False else self._as_asked(found)

    def _seen(self) -> tuple[Asked, Handle] | None:
        x, out = self._vectors["x"], self._out
        seen = super()._seen() if isinstance(x, Handle) and 1 in x.shape else None
        if seen is not None and out is not None:
            out.know(self._all, seen[0])
        return seen

    def check(self) -> None:
        """Raise an error that names every operand that does not fit. Local."""
        op_a = self._how.get("op_a", "N")
        if not one_of(op_a, ("N", "T", "C")):
            raise ArgumentError(f"op_a: expected 'N', 'T' or 'C', got {short_repr(op_a)}")
        _check_fit(self._vector_row, self.name, self._columns(), op_a)

    def _columns(self) -> dict[str, Any]:
        """Return the operands and ``out`` by the function's names, vectors as columns. Local."""
        given = dict(zip(("a", "b", "c"), self._given, strict=False))
        return {mine: given[theirs] for theirs, mine in self.called.items()} | {"out": self._given[3]}

    def new(self) -> MatrixDescriptor:
        """Return the layout of a new result. Local."""
        row, given, c = self._vector_row, self._columns(), self._given[2]
        x: MatrixDescriptor = given["x"].descriptor
        if c is not None:
            x = c.descriptor
        elif row.written == "a":
            y: MatrixDescriptor = given["y"].descriptor if "y" in given else x
            shape, block = (x.shape[0], y.shape[0]), (x.block[0], y.block[0])
            return MatrixDescriptor(shape, block, x.grid, dtype=x.dtype, order=x.order)
        elif row.twin == "gemm":  # along A
            a = given["a"].descriptor if self._how.get("op_a", "N") == "N" else given["a"].descriptor.T
            lead = (a.lead[0], 0)
            return MatrixDescriptor(
                (a.shape[0], 1), (a.block[0], 1), a.grid, a.source, a.dtype, a.order, lead
            )
        return replace(x, ld=None)

    def chosen(self, options: Options, nearest: MatmulProblem | Level3Problem) -> Options:
        """Return the options: A stays where it is. Local."""
        row = self._vector_row
        stays = row.twin in ("gemm", "symm", "hemm", "trmm") and row.level == 2 and not row.adds
        if stays and options.algo == "auto" and not self.ctx.engine.measured.seconds(nearest, options):
            return replace(options, algo="stationary")
        return options

    def result(self, found: Any) -> Any:
        """Return the result as the caller gets it. Local."""
        return self._as_asked(super().result(found))

    def _as_asked(self, result: Any) -> Any:
        """Return ``out``, or a new result as a row if the vector that it is like is one. Local."""
        if self._out is not None:
            return self._out
        given = self._vectors
        like = given.get(self.called.get("c", "x"))
        like = given["x"] if like is None else like
        return result.T if "a" not in self._vector_row.written and column(like) is not like else result

    def replaced(self, given: Mapping[str, Any], product: Product) -> MatrixCall:
        """Return the call on other operands in the same layouts, with the same result. Local."""
        theirs = {mine: name for name, mine in self.called.items()}
        columns = {theirs[name]: x if name == "a" else column(x) for name, x in given.items()}
        return super().replaced(columns, product)


def _twin(row: VectorRoutine) -> tuple[VectorRoutine, Mapping[str, str], str, str]:
    """Return the row, what the function calls A, B and C, the level-3 routine and its required operands. Local."""
    required = "".join(theirs for theirs, mine in row.passes.items() if mine != row.optional)
    return row, row.passes, "matmul" if row.twin == "gemm" else row.twin, required


_TWINS = {name: _twin(row) for name, row in VECTOR_ROUTINES.items() if row.twin}
