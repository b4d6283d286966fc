# SPDX-License-Identifier: Apache-2.0
"""Calls of levels 1 and 2: their vectors as columns, checked and agreed on, computed as level-3 routines or as sums."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .calls import compute_directly, number, run
from .dtypes import element_type, scalar
from .engines.dense import vectors as reductions
from .engines.dense.vectors import Vector
from .engines.direct import Asked
from .engines.product import Product
from .engines.request import CONSTANTS, Options
from .errors import ArgumentError, LayoutError, faults_text, short_repr
from .handle import Handle
from .layout import Level3Problem, MatmulProblem, MatrixDescriptor
from .layout.grid import one_of
from .layout.redistribution import with_c_like_d
from .layout.vector_routines import VECTOR_ROUTINES, VectorRoutine
from .matrix import DistributedMatrix
from .matrix_calls import MatrixCall, Reading, Recipe, check_operands, context_of
from .plans import Task
from .runtime import Runtime

__all__ = [
    "after_agreement", "as_level3", "column", "overwritten", "reduced", "same", "typed", "vector_call",
]  # fmt: skip

Matrix = DistributedMatrix
Given = Mapping[str, Any]  # operands by name; None if absent


def column(x: Any) -> Any:
    """Return a vector as a matrix of one column; what is no vector as it is. Local."""
    return x.T if isinstance(x, Handle) and x.shape[0] == 1 != x.shape[1] else x


def same(x: Handle, y: Handle) -> bool:
    """Return whether two columns of one length are the same elements. Local."""
    here, there = x.place, y.place
    one = x.shape == (1, 1) == y.shape  # whose transpose is itself
    return here.whole is there.whole and here[1 : 3 if one else None] == there[1 : 3 if one else None]


def _as_columns(row: VectorRoutine, given: Given, out: Any) -> tuple[dict[str, Any], Any]:
    """Return the operands and ``out`` with every vector as a column. Local."""
    columns = {name: x if name == "a" else column(x) for name, x in given.items()}
    return columns, out if "a" in row.written else column(out)


def _check(ctx: Runtime[Any], row: VectorRoutine, routine: str, given: Given, op_a: object = "N") -> None:
    """Raise an error that names every operand that does not fit. Local.

    Args:
        ctx: the context.
        row: the routine's row of the table.
        routine: its name, in messages.
        given: the operands, vectors as columns, and perhaps "out"; None for those that are absent.
        op_a: what A is to be taken as.
    """
    check_operands(ctx, "".join(given.keys() - {row.optional, "out"}), given)
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


def _agree(
    routine: str, given: Given, options: Mapping[str, Any], *, writes: bool = False, voted: bool = False
) -> Runtime[Any]:
    """Check the arguments and agree on them: of repeated calls with one vote. Collective over the context.

    Args:
        routine: its name.
        given: its operands.
        options: its other arguments: numbers.
        writes: all operands are written.
        voted: whether this rank has tried a direct call, on which the ranks did not agree.
    """
    ctx = context_of(routine, *given.values())
    row = VECTOR_ROUTINES[routine]
    columns, _ = _as_columns(row, given, None)

    def check_memory() -> None:
        if writes:
            _check_written(ctx, columns)

    def first(facts: dict[str, Any]) -> bool:
        _check(ctx, row, routine, columns)
        dtype = columns["x"].dtype
        facts.update({name: scalar(value, dtype, name) for name, value in options.items()})
        facts.update({name: x.descriptor for name, x in columns.items()})
        check_memory()
        return True

    def again(legal: bool) -> bool:
        check_memory()
        return legal

    signature = _signature(ctx, routine, columns, options)
    known, _ = ctx.calls.agree(lambda: ctx.agreement(routine), signature, again, first, voted=voted)
    if not known:
        ctx.calls.remember(signature, True)
    return ctx


def _signature(ctx: Runtime[Any], routine: str, columns: Given, options: Mapping[str, Any]) -> Hashable:
    """Return what the ranks agree on in a call; None if it must be checked anew. Local."""
    fit = all(isinstance(x, Handle) and x.context is ctx for x in columns.values())
    if not (fit and all(isinstance(value, CONSTANTS) for value in options.values())):
        return None
    values = tuple((name, type(value), value) for name, value in options.items())
    return routine, values, *(x.descriptor for x in columns.values())


def overwritten(routine: str, given: Given, alpha: complex = 1) -> None:
    """Compute "scal" or "swap", which write their operands. Collective over the context."""
    columns = [column(x) for x in given.values()]
    done = None
    if _fit_for_direct(columns):
        x, y = columns[0], columns[-1]
        factor = number(alpha, element_type(x.dtype).blas, real=False)
        of_x, of_y = x.direct_part(), y.direct_part()
        if factor and of_x is not None and of_y is not None and all(each.writeable for each in columns):
            asked = Asked(routine, routine, of_x, None, None, of_y, False, alpha=factor)
            done = x.context.direct.run(x.context.control, asked)
    if not done:
        options = {"alpha": alpha} if routine == "scal" else {}
        _agree(routine, given, options, writes=True, voted=done is False)
        after_agreement(routine, given, alpha)


def _check_written(ctx: Runtime[Any], columns: Given) -> None:
    for name, x in columns.items():
        if not getattr(x.local.flags, "writeable", True):
            raise ArgumentError(f"{name}: its local array is read-only")
    if len(columns) == 2:
        x, y = columns["x"], columns["y"]
        if not same(x, y) and ctx.engine.overlap(x.local, y.local):
            raise ArgumentError("y: shares memory with x; expected x itself or a separate vector")


def reduced(routine: str, given: Given) -> Any:
    """Return the number that a routine of level 1 computes, as a NumPy scalar. Collective over the context."""
    found = _reduced_directly(routine, [column(x) for x in given.values()])
    if found is not None and found is not False:
        return typed(given["x"].dtype, routine, found)
    _agree(routine, given, {}, voted=found is False)
    return after_agreement(routine, given)


def _reduced_directly(routine: str, columns: list[Any]) -> Any:
    """Return the number, None or False if it takes the ordinary way. Collective over the context."""
    if not _fit_for_direct(columns):
        return None
    parts = [each.direct_part() for each in columns]
    if None in parts:
        return None
    of_x, of_y = parts[0], parts[1] if len(parts) > 1 else None
    ctx = columns[0].context
    return ctx.direct.reduce(ctx.control, Asked(routine, routine, of_x, of_y, None, of_x, False))


def _fit_for_direct(columns: list[Any]) -> bool:
    """Return whether these are columns of one length and type in an open context whose engine is for them. Local.

    Raises:
        ClosedError: the context is closed.
    """
    x = columns[0]
    if not all(isinstance(each, Handle) and each.shape == (x.shape[0], 1) for each in columns):
        return False
    return (
        bool(x.shape[0])
        and all(each.context is x.context and each.dtype == x.dtype for each in columns)
        and _runs_directly(x.context)
    )


def _runs_directly(ctx: Runtime[Any]) -> bool:
    """Return whether direct calls of levels 1 and 2 are possible: on GPUs plans do not move a matrix either. Local.

    Raises:
        ClosedError: the context is closed.
    """
    if ctx.direct is None or ctx.engine.traits.on_gpus or ctx.control.gone():
        return False
    ctx.check_open()
    return True


def after_agreement(routine: str, given: Given, alpha: complex = 1) -> Any:
    """Compute what is no level-3 routine, on operands on which the ranks have just agreed. Collective over the context.

    Args:
        routine: "scal" and "swap", which write their operands, or one that returns a number.
        given: its operands.
        alpha: what "scal" multiplies by.
    """
    columns = [column(x) for x in given.values()]
    ctx, x = columns[0].context, columns[0]
    with ctx.running(routine), np.errstate(all="ignore"):
        if routine == "scal":
            x.local[...] = 0 if alpha == 0 else x.local * x.dtype.type(alpha)
            return None
        if routine == "swap":
            _exchange(ctx, x, columns[1])
            return None
        ctx.engine.synchronize()  # before values are read: that would wait forever if a rank is gone
        parts = [Vector(each.descriptor, each.local) for each in columns]
        return typed(x.dtype, routine, reductions.reduced(ctx.engine, routine, parts))


def typed(dtype: np.dtype, routine: str, found: Any) -> Any:
    """Return the result of a reduction as NumPy scalars of a vector's type, and amax's index. Local."""
    if dtype.char == "d":
        return (np.float64(found[0].real), found[1]) if routine == "amax" else np.float64(found.real)
    with np.errstate(all="ignore"):
        if routine == "amax":
            value, index = found
            return _as(dtype, value), index
        return _as(dtype, found) if routine in ("dot", "dotc") else dtype.type(found).real


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


def _as(dtype: np.dtype, value: complex) -> Any:
    return dtype.type(value if dtype.kind == "c" else value.real)


class VectorCall(MatrixCall):
    """A call of a routine that is a level-3 routine of one column. Making one is local.

    Args:
        routine: its name.
        given: its operands.
        out: where to write the result; None: a new one.
        how: its other arguments.
    """

    def __init__(self, routine: str, given: Given, out: Matrix | None, how: Mapping[str, Any]) -> None:
        self._row, self._vectors, self._out = VECTOR_ROUTINES[routine], given, out
        self.names = tuple(given)
        operands = _operands(self._row, *_as_columns(self._row, given, out))
        super().__init__(routine, operands, {"routine": routine, **how}, _read)

    def result(self, found: Any) -> Any:
        """Return the result as the caller gets it. Local."""
        return _as_asked(self._row, self._vectors, self._out, super().result(found))

    def replaced(self, given: Mapping[str, Any], product: Product) -> MatrixCall:
        """Return the call on other operands in the same layouts, with the same result. Local.

        Raises:
            ArgumentError: an operand has another layout than the planned one.
        """
        theirs = {mine: name for name, mine in self._row.passes.items()}
        columns, _ = _as_columns(self._row, given, None)
        return super().replaced({theirs[name]: x for name, x in columns.items()}, product)


def vector_call(routine: str, **arguments: Any) -> VectorCall:
    """Return the call of a function of this package's level 1 or 2, by its arguments. Local."""
    given = {name: arguments.pop(name) for name in VECTOR_ROUTINES[routine].sizes if name in arguments}
    return VectorCall(routine, given, arguments.pop("out"), arguments)


def as_level3(routine: str, given: Given, out: Matrix | None, **how: Any) -> Matrix:
    """Return what the level-3 routine of one column computes. Collective over the context."""
    row = VECTOR_ROUTINES[routine]
    columns, target = _as_columns(row, given, out)
    done = _level3_directly(routine, columns, _operands(row, columns, target), **how)
    if done is None or done is False:
        found: Matrix = run(VectorCall(routine, given, out, how), voted=done is False)
        return found
    return _as_asked(row, given, out, done)


def _operands(row: VectorRoutine, columns: Given, out: Any) -> tuple[Any, ...]:
    """Return the operands of the level-3 routine. Local."""
    places = {theirs: columns[mine] for theirs, mine in row.passes.items()}
    return places.get("a"), places.get("b"), places.get("c"), out


def _as_asked(row: VectorRoutine, given: Given, out: Matrix | None, result: Matrix) -> Matrix:
    """Return ``out``, or a new result as a row if the vector that it is like is one. Local."""
    if out is not None:
        return out
    like = given.get(row.passes.get("c", "x"))
    like = given["x"] if like is None else like
    return result.T if "a" not in row.written and column(like) is not like else result


def _level3_directly(
    routine: str, columns: Given, operands: Any, *, algo: str = "auto", beta: Any = 0, **how: Any
) -> Any:
    """Return the result, None or False if it takes the ordinary way. Collective over the context.

    Args:
        routine: its name.
        columns: its operands, vectors as columns.
        operands: those of the level-3 routine.
        algo, beta, how: its other arguments.
    """
    row, (a, b, c, out) = VECTOR_ROUTINES[routine], operands
    vectors = [x for name, x in columns.items() if name != "a"] + ([] if row.written == "a" else [out])
    present = [x for x in (*columns.values(), out) if x is not None]
    if (
        type(algo) is not str
        or algo != "auto"
        or any(x is None for name, x in columns.items() if name != row.optional)
        or not all(isinstance(x, Handle) for x in present)
    ):
        return None
    if not _runs_directly(a.context):
        return None
    if any(x is not None and x.shape[1] != 1 for x in vectors):
        return None
    how = {**row.fixed, **how}
    if row.twin == "gemm":
        how = {"op_a": "N", "op_b": "N", **how}
    elif row.twin in ("symm", "hemm", "trmm", "trsm"):
        how["side"] = "L"
    if row.adds:
        beta = 0 if c is None else 1

    def layout() -> MatrixDescriptor:
        like = c.descriptor if c is not None else _result(row, columns, how.get("op_a", "N"))
        return replace(like, ld=None)

    twin = "matmul" if row.twin == "gemm" else row.twin
    return compute_directly(twin, a, b, c, out, layout, call=routine, beta=beta, **how)


def _read(
    ctx: Runtime[Any],
    facts: dict[str, Any],
    a: Handle,
    b: Handle | None,
    c: Handle | None,
    out: Handle | None,
    *,
    routine: str,
    beta: complex = 0,
    algo: str = "auto",
    alpha: complex = 1,
    **options: Any,
) -> Reading:
    """Check the arguments of a routine, and add what must be equal on every rank to ``facts``. Local."""
    row = VECTOR_ROUTINES[routine]
    taken = {"a": a, "b": b, "c": c}
    given = {mine: taken[theirs] for theirs, mine in row.passes.items()}
    op_a = options.get("op_a", "N")
    if not one_of(op_a, ("N", "T", "C")):
        raise ArgumentError(f"op_a: expected 'N', 'T' or 'C', got {short_repr(op_a)}")
    _check(ctx, row, routine, given | {"out": out}, op_a)
    if row.adds and c is not None:
        beta = 1
    of = {name: None if x is None else x.descriptor for name, x in taken.items()}
    assert of["a"] is not None
    like = of["c"] if of["c"] is not None else _result(row, given, op_a)
    settled = replace(like, ld=None) if out is None else out.descriptor
    chosen = Options.of(settled.dtype, alpha=alpha, beta=beta, real=" ".join(row.real), algo=algo)
    if chosen.beta != 0 and c is None:
        raise ArgumentError(f"{row.optional}: beta is {beta}, expected a vector to scale by it")
    asked: MatmulProblem | Level3Problem
    if row.twin == "gemm":
        assert of["b"] is not None
        asked = MatmulProblem(of["a"], of["b"], settled, c=of["c"], **{**options, **row.fixed})
    else:
        asked = Level3Problem(row.twin, of["a"], settled, of["b"], of["c"], **options)
    facts.update(asked.facts() | chosen.facts(), out="given" if out is not None else "new")
    problem = asked if chosen.beta != 0 else replace(asked, c=None)
    nearest: MatmulProblem | Level3Problem = with_c_like_d(problem)  # type: ignore[type-var]
    stays = row.twin in ("gemm", "symm", "hemm", "trmm") and row.level == 2 and not row.adds
    if stays and chosen.algo == "auto" and not ctx.engine.measured.seconds(nearest, chosen):
        chosen = replace(chosen, algo="stationary")
    reasons = () if nearest == problem else (f"{row.optional} is moved to the layout of the result",)
    in_place = next((each for each in ("c", "b") if row.passes.get(each) in (*row.written,)), "")
    partial = isinstance(asked, Level3Problem) and asked.written is not None
    task = Task(problem, chosen, nearest, reasons)
    recipe = Recipe(task, settled, in_place, partial, row.passes)
    return recipe, recipe.matrices(ctx, a, b, c, out), None, None


def _result(row: VectorRoutine, given: Given, op_a: str) -> MatrixDescriptor:
    """Return the layout of a new result that is like no operand: along A, or of an outer product."""
    x: MatrixDescriptor = given["x"].descriptor
    if row.written == "a":
        y: MatrixDescriptor = given["y"].descriptor if "y" in given else x
        shape, block = (x.shape[0], y.shape[0]), (x.block[0], y.block[0])
        return MatrixDescriptor(shape, block, x.grid, dtype=x.dtype, order=x.order)
    if row.twin != "gemm":
        return x
    a: MatrixDescriptor = given["a"].descriptor if op_a == "N" else given["a"].descriptor.T
    lead = (a.lead[0], 0)
    return MatrixDescriptor((a.shape[0], 1), (a.block[0], 1), a.grid, a.source, a.dtype, a.order, lead)
