# SPDX-License-Identifier: Apache-2.0
"""Vectors, NumPy arrays that all ranks have alike, where a function takes matrices of one column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, ArgumentTypeError
from ..layout import MatrixDescriptor
from ..runtime.handle import Handle, no_matrix
from ..runtime.reading import context_of, refuse
from .arithmetic import as_numbers, digest


def is_vector(x: object) -> bool:
    """Return whether it is a NumPy array of one dimension. Local."""
    return isinstance(x, np.ndarray) and x.ndim == 1


def as_column(call: str, a: Handle, vector: NDArray[Any], name: str = "b") -> Any:
    """Return a matrix of one column with a vector's values, of A's type and on its grid. Collective over the context.

    ArgumentError if the vector is complex and A real, or it holds no numbers; RankMismatchError if ranks gave different
    ones.
    """
    ctx, of_a = a.context, a.descriptor
    with ctx.agreement(call) as facts:
        vector = as_numbers(vector, name)
        facts.update({"a": of_a, "the vector's shape, type and digest": digest(vector)})
        if vector.dtype.kind == "c" and a.dtype.kind != "c":
            raise ArgumentError(f"{name}: {vector.dtype} does not convert to {a.dtype.name}, the type of a")
        d = MatrixDescriptor((len(vector), 1), (of_a.block[0], 1), of_a.grid, dtype=of_a.dtype)
        column = ctx.allocate(d)
        if ctx.coords(d) is not None:
            rows = d.global_indices(ctx.rank)[0]
            here = vector[rows].astype(d.dtype)[:, None]
            ctx.engine.from_host(column.local, here[:, : column.local.shape[1]])
        return column


def by_column(function: Callable[..., Any], a: Any, arguments: Mapping[str, Any], vector: str = "b") -> Any:
    """Return what a function finds for a vector B, as vectors: X, or a tuple that begins with X. Collective.

    The function takes B as a matrix of one column in A's layout and type; with "a" for ``vector`` as one of one row,
    and A as "b". ArgumentError if A is no matrix; else as ``as_column``.
    """
    name = function.__name__
    if not isinstance(a, Handle):
        other = next(each for each in arguments if each != vector)
        refuse(name, ArgumentTypeError(f"{other}: {no_matrix(a)}"))
    with context_of(name, a).running(name):
        column = as_column(name, a, arguments[vector], vector)
        found = function(**{**arguments, vector: column if vector == "b" else column.T})
        if not isinstance(found, tuple):
            return found.allgather().reshape(-1)
        x = found[0].allgather().reshape(-1)
        return found._replace(x=x) if hasattr(found, "_replace") else (x, *found[1:])
