# SPDX-License-Identifier: Apache-2.0
"""What ``A[i0:i1, j0:j1] = value`` does: a value is a matrix of any layout, a number, or a NumPy array."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comm import Side
from ..dtypes import scalar
from ..errors import ArgumentError, ArgumentTypeError, RankMismatchError
from ..layout.descriptor import expanded, is_integer
from ..runtime.handle import Handle
from .arithmetic import as_element, check_pair, check_writable, copied, is_scalar
from .creation import as_numbers

CALL = "matrix[...] ="


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
    except ArgumentError as error:  # other ranks may have found no fault
        with matrix.context.agreement(CALL):
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
    same = here.whole is there.whole and here[1:] == there[1:]
    with ctx.running(CALL):
        with ctx.agreement(CALL) as facts:
            facts.update(matrix=part.descriptor, value=value.descriptor, same=same)
            check_pair(CALL, part, value)
            if same:
                return
            check_writable(CALL, part, value.dtype)
            if ctx.engine.overlap(part.local, value.local):  # maybe on this rank alone
                value = copied(value)
        value.move_to(part)


def _fill(part: Handle, value: Any) -> None:
    """Write a number into every element. Collective over the context."""
    with part.context.agreement(CALL) as facts:
        number = scalar(value, part.dtype, "value")
        facts.update(matrix=part.descriptor, value=number)
        check_writable(CALL, part, part.dtype)
        element = as_element(part, number)
    with part.context.running(CALL):
        part.local[...] = element


def _copy_array(part: Handle, array: NDArray[Any] | None, index: object) -> None:
    """Write a NumPy array into ``part``: the same one on every rank, or that of one rank. Collective."""
    ctx, d = part.context, part.descriptor
    with ctx.running(CALL):
        with ctx.agreement(CALL) as facts:
            facts.update(matrix=d, value="a NumPy array")
            check_writable(CALL, part, d.dtype if array is None else array.dtype)
            mine = None if array is None else _digest(array)
            whole = None if array is None else _broadcast(array, d.shape, index)
        theirs = ctx.comm.allgather(mine)
        with ctx.agreement(f"{CALL} a NumPy array"):
            root = _root(theirs)
        if root is not None:
            _move_array(whole, root, part)
        elif ctx.coords(d) is not None and whole is not None:
            rows, cols = d.global_indices(ctx.rank)
            values = np.asarray(whole[rows[:, None], cols]).astype(d.dtype)
            ctx.engine.from_host(part.local, values)


def _digest(array: NDArray[Any]) -> tuple[Any, ...]:
    """Return what is equal for equal arrays. Local."""
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.shape, array.dtype.str, blake2b(values.data, digest_size=16).digest()


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
        raise ArgumentError(f"{CALL}: the array has shape {array.shape}, expected {target}") from None


def _root(theirs: list[Any]) -> int | None:
    """Return the only rank that has an array, None if all have the same. Local."""
    having = [rank for rank, each in enumerate(theirs) if each is not None]
    if len(having) == 1:
        return having[0] if len(theirs) > 1 else None
    expected = "expected the same array on every rank, or an array on one and None on the others"
    if len(having) < len(theirs):
        raise ArgumentError(f"{CALL}: got arrays on ranks {having} of {len(theirs)}; {expected}")
    others = [rank for rank in having if theirs[rank] != theirs[0]]
    if others:
        raise RankMismatchError(
            f"{CALL}: the array of ranks {others} differs from that of rank 0; {expected}"
        )
    return None


def _move_array(whole: NDArray[Any] | None, root: int, part: Handle) -> None:
    """Write the array of one rank into ``part``. Collective over the context."""
    ctx, d = part.context, part.descriptor
    values = {} if whole is None else {0: np.array(whole)}
    side = Side.on_rank(root, d.shape, d.order)
    ctx.engine.put(side, values, Side.of(d), ctx.cells(d, part.local), d.dtype)
