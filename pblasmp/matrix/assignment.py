# SPDX-License-Identifier: Apache-2.0
"""Assignment of matrices and values: to another layout, to a sub-matrix, of a whole matrix to one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comm import Side, agree_after
from ..dtypes import scalar
from ..engines.direct import Asked
from ..errors import ArgumentError, ArgumentTypeError, LayoutError, RankMismatchError, short_repr
from ..layout import MatrixDescriptor, Trapezoid
from ..layout.descriptor import expanded, is_integer
from ..layout.grid import as_block, as_grid, one_of
from ..runtime.handle import Handle, Matrix
from ..runtime.reading import check_operands, sub_matrices
from ..runtime.reading import check_writable as check_read_only
from .arithmetic import as_element, as_numbers, check_pair, check_writable, copied, digest, is_scalar


def gathered(matrix: Handle, call: str, root: int, *, everywhere: bool) -> NDArray[Any] | None:
    """Return the whole matrix on ``root``; elsewhere None or, with ``everywhere``, an uninitialized array.

    Collective over the context.
    """
    ctx, d = matrix.context, matrix.descriptor
    with ctx.agreement(call) as facts:
        facts.update(matrix=d, root=root)
        ctx.check_rank(root, "root")
        here = everywhere or ctx.rank == root
        whole = np.empty(d.shape, d.dtype, order=d.order) if here else None
    target = Side.on_rank(root, d.shape, d.order)
    wanted = {0: whole} if ctx.rank == root else {}
    ctx.engine.get(Side.of(d), ctx.cells(d, matrix.local), target, wanted, d.dtype)
    return whole


# -- to another layout


def redistributed(
    matrix: Matrix,
    descriptor: MatrixDescriptor | None,
    changes: Mapping[str, Any],
    uplo: Any,
    diag: Any,
    out: Matrix | None,
) -> Matrix:
    """Return a matrix in another layout. Collective over the context; see ``DistributedMatrix.redistribute``.

    ``changes`` are its keywords; None for those that are not given.
    """
    ctx = matrix.context

    def read(facts: dict[str, Any]) -> tuple[Matrix, Trapezoid | None]:
        layout = _changed(matrix, descriptor, out, changes)
        if out is not None:
            check_operands(ctx, "", {"out": out})
            check_read_only({"out": out})
            if ctx.engine.overlap(matrix.local, out.local):
                raise ArgumentError("out: shares memory with the matrix; expected a separate matrix")
            layout = out.descriptor if layout is None else layout
        facts.update(matrix=matrix.descriptor, to=layout, uplo=uplo, diag=diag, out=out is not None)
        if layout is None:
            raise ArgumentError(
                "redistribute: expected a descriptor, out=, or keywords such as block= and grid="
            )
        ctx.check_descriptor(layout)
        if out is not None and out.descriptor != layout:
            raise LayoutError(f"out: its layout is {out.descriptor}, expected the new descriptor {layout}")
        if layout.shape != matrix.shape:
            raise LayoutError(
                f"redistribute: the matrix has shape {matrix.shape}, the new descriptor {layout.shape}"
            )
        if matrix.dtype.kind == "c" and layout.dtype.kind != "c":
            raise ArgumentError(f"redistribute: {matrix.dtype.name} does not convert to {layout.dtype.name}")
        part = _trapezoid(matrix, uplo, diag)
        result: Matrix = ctx.allocate(layout) if out is None else out
        if out is None and part is not None:
            result.local[...] = 0
        return result, part

    with ctx.running("redistribute"):
        copy = _at_a_glance(matrix, descriptor, changes, uplo, diag, out)
        done = None if copy is None else copied_at_once("redistribute", matrix, copy)
        if copy is not None and done:
            return copy
        copy = None  # its memory is free again
        result, part = agree_after(done is False, partial(ctx.agreement, "redistribute"), read)
        matrix.move_to(result, part)
        return result


def _at_a_glance(
    matrix: Matrix, descriptor: Any, changes: Mapping[str, Any], uplo: Any, diag: Any, out: Any
) -> Matrix | None:
    """Return what the whole matrix goes to; None if a glance does not show that the call is legal. Local."""
    try:
        direct = matrix.context.direct_on_host is not None and matrix.direct_part() is not None
        if uplo is not None or not one_of(diag, "N") or not direct:
            return None
        layout = _changed(matrix, descriptor, out, changes)
        if out is not None:
            return out if layout is None and isinstance(out, type(matrix)) else None
        if layout is None or layout.shape != matrix.shape or layout.dtype != matrix.dtype:
            return None
        matrix.context.check_descriptor(layout)
        copy: Matrix = matrix.context.allocate(layout)
        return copy
    except Exception:  # noqa: BLE001 (what is wrong is said where all ranks hear it)
        return None


def _changed(
    matrix: Handle, descriptor: MatrixDescriptor | None, out: object, changes: Mapping[str, Any]
) -> MatrixDescriptor | None:
    """Return the new layout if keywords give one, else ``descriptor``."""
    given = {name: value for name, value in changes.items() if value is not None}
    if not given:
        return descriptor
    if descriptor is not None or out is not None:
        what = "a descriptor" if descriptor is not None else "out="
        raise ArgumentError(
            f"redistribute: {', '.join(given)} cannot be given with {what}; expected one or the other"
        )
    if "block" in given:
        given["block"] = as_block(given["block"])
    if "grid" in given:
        given["grid"] = as_grid(given["grid"])
    if given.keys() & {"block", "grid"}:
        given = {"source": (0, 0), "lead": (0, 0)} | given
    if given.keys() - {"dtype"}:
        given["ld"] = None
    return replace(matrix.descriptor, **given)


def _trapezoid(matrix: Handle, uplo: Any, diag: Any) -> Trapezoid | None:
    if uplo is not None and not one_of(uplo, "LU"):
        raise ArgumentError(f"uplo: expected 'L', 'U' or None, got {short_repr(uplo)}")
    if not one_of(diag, "NU") or (uplo is None and diag != "N"):
        expected = "'N' or 'U'" if uplo else "'N' without uplo"
        raise ArgumentError(f"diag: expected {expected}, got {short_repr(diag)}")
    return None if uplo is None else Trapezoid.of_shape(matrix.shape, uplo, diag)


# -- into a sub-matrix

_CALL = "matrix[...] ="


def set_item(matrix: Handle, index: object, value: Any) -> None:
    """Write a value into a sub-matrix. Collective over the context; see ``DistributedMatrix.__setitem__``."""
    array = None
    try:
        part = matrix.part(index)
        if (
            value is None
            or isinstance(value, (list, tuple))
            or (isinstance(value, np.ndarray) and value.ndim)
        ):
            array = None if value is None else as_numbers(value, "value")
        elif not isinstance(value, Handle) and not is_scalar(value):
            kind = type(value)
            name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
            raise ArgumentTypeError(f"expected a DistributedMatrix, a number or a NumPy array, got {name}")
    except Exception as error:
        with matrix.context.agreement(_CALL):
            raise error from None
    if isinstance(value, Handle):
        _copy_matrix(part, value)
    elif value is None or array is not None:
        _copy_array(part, array, index)
    else:
        _fill(part, value)


def _copy_matrix(part: Handle, value: Handle) -> None:
    """Write a matrix of the same shape into ``part``, with which it may share memory. Collective over the context.

    Nothing is written if both are the same part of one matrix: Python ends ``A[i, j] += B`` with such a call.
    """
    ctx = part.context
    here, there = part.place, value.place
    same = here[0] is there[0] and here[1:] == there[1:]

    def read(facts: dict[str, Any]) -> Handle:
        facts.update(matrix=part.descriptor, value=value.descriptor, same=same)
        check_pair(_CALL, part, value)
        if same:
            return part
        check_writable(_CALL, part, value.dtype)
        return (
            copied(value) if ctx.engine.overlap(part.local, value.local) else value
        )  # on this rank alone, maybe

    with ctx.running(_CALL):
        done = None if same else copied_at_once(_CALL, value, part)
        if not done:
            whole = agree_after(done is False, partial(ctx.agreement, _CALL), read)
            if not same:
                whole.move_to(part)


def copied_at_once(call: str, value: Handle, out: Handle) -> bool | None:
    """Copy a matrix into another one of any layout without an agreement in words. Collective over the context.

    Return True if it is done. None: nothing has happened. False: the ranks have voted, and not all of them agreed.
    """
    ctx, extents = value.context, list[int]()
    direct = ctx.direct_on_host
    parts = None if direct is None else sub_matrices(ctx, (value, out), extents)
    if parts is None or 0 in extents or extents[:2] != extents[2:] or not out.writeable:
        return None
    a, d = parts
    assert a is not None
    assert d is not None
    assert direct is not None
    return direct.run(ctx.control, Asked(call, "geadd", a, None, d, d, False))


def _fill(part: Handle, value: Any) -> None:
    """Write a number into every element. Collective over the context."""
    with part.context.agreement(_CALL) as facts:
        number = scalar(value, part.dtype, "value")
        facts.update(matrix=part.descriptor, value=number)
        check_writable(_CALL, part, part.dtype)
        element = as_element(part, number)
    with part.context.running(_CALL):
        part.local[...] = element


def _copy_array(part: Handle, array: NDArray[Any] | None, index: object) -> None:
    """Write a NumPy array into ``part``: the same one on every rank, or that of one rank. Collective."""
    ctx, d = part.context, part.descriptor
    with ctx.running(_CALL):
        with ctx.agreement(_CALL) as facts:
            facts.update(matrix=d, value="a NumPy array")
            check_writable(_CALL, part, d.dtype if array is None else array.dtype)
            mine = None if array is None else digest(array)
            whole = None if array is None else _broadcast(array, d.shape, index)
        theirs = ctx.comm.allgather(mine)
        with ctx.agreement(f"{_CALL} a NumPy array"):
            root = _root(theirs)
        if root is not None:
            _move_array(whole, root, part)
        elif ctx.coords(d) is not None and whole is not None:
            rows, cols = d.global_indices(ctx.rank)
            values = np.asarray(whole[rows[:, None], cols]).astype(d.dtype)
            ctx.engine.from_host(part.local, values)


def _broadcast(array: NDArray[Any], shape: tuple[int, int], index: object) -> NDArray[Any]:
    """Return the array in the shape of the sub-matrix, by NumPy's rules. Local."""
    given = expanded(index if isinstance(index, tuple) else (index,))
    kept = [not (k < len(given) and is_integer(given[k])) for k in range(2)]
    target = tuple(extent for extent, keep in zip(shape, kept, strict=True) if keep)
    while array.ndim > len(target) and array.shape[0] == 1:
        array = array[0]
    try:
        return np.broadcast_to(array, target).reshape(shape)
    except ValueError:
        raise ArgumentError(f"{_CALL}: the array has shape {array.shape}, expected {target}") from None


def _root(theirs: list[Any]) -> int | None:
    """Return the only rank that has an array, None if all have the same. Local."""
    having = [rank for rank, each in enumerate(theirs) if each is not None]
    if len(having) == 1:
        return having[0] if len(theirs) > 1 else None
    expected = "expected the same array on every rank, or an array on one and None on the others"
    if len(having) < len(theirs):
        raise ArgumentError(f"{_CALL}: got arrays on ranks {having} of {len(theirs)}; {expected}")
    others = [rank for rank in having if theirs[rank] != theirs[0]]
    if others:
        raise RankMismatchError(
            f"{_CALL}: the array of ranks {others} differs from that of rank 0; {expected}"
        )
    return None


def _move_array(whole: NDArray[Any] | None, root: int, part: Handle) -> None:
    """Write the array of one rank into ``part``. Collective over the context."""
    ctx, d = part.context, part.descriptor
    values = {} if whole is None else {0: np.array(whole)}
    side = Side.on_rank(root, d.shape, d.order)
    ctx.engine.put(side, values, Side.of(d), ctx.cells(d, part.local), d.dtype)
