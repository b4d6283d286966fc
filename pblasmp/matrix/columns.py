# SPDX-License-Identifier: Apache-2.0
"""Vectors, NumPy arrays that all ranks have alike, where a function takes matrices of one column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..layout import MatrixDescriptor
from ..runtime.handle import Handle, no_matrix
from ..runtime.reading import context_of, refuse
from .arithmetic import as_numbers, digest


def is_vector(x: object) -> bool:
    """Return whether it is a NumPy array of one dimension. Local."""
    return isinstance(x, np.ndarray) and x.ndim == 1


def by_column(function: Callable[..., Any], a: Any, arguments: Mapping[str, Any]) -> Any:
    """Return what a function finds for a vector B, as vectors: X, or a tuple that begins with X. Collective.

    Args:
        function: takes B as a matrix of one column.
        a: the matrix that decides on B's layout and type.
        arguments: the function's, by name.

    Raises:
        ArgumentError: A is no matrix, the vector is complex and A real, or it holds no numbers.
        RankMismatchError: the ranks gave different vectors.
    """
    name, vector = function.__name__, arguments["b"]
    if not isinstance(a, Handle):
        refuse(name, ArgumentTypeError(f"{next(iter(arguments))}: {no_matrix(a)}"))
    ctx = context_of(name, a)
    with ctx.running(name):
        with ctx.agreement(name) as facts:
            vector = as_numbers(vector, "b")
            facts.update({"a": a.descriptor, "the vector's shape, type and digest": digest(vector)})
            if vector.dtype.kind == "c" and a.dtype.kind != "c":
                raise ArgumentError(f"b: {vector.dtype} does not convert to {a.dtype.name}, the type of a")
            of_a = a.descriptor
            d = MatrixDescriptor((len(vector), 1), (of_a.block[0], 1), of_a.grid, dtype=of_a.dtype)
            column = ctx.allocate(d)
            if ctx.coords(d) is not None:
                rows = d.global_indices(ctx.rank)[0]
                here = vector[rows].astype(d.dtype)[:, None]
                ctx.engine.from_host(column.local, here[:, : column.local.shape[1]])
        found = function(**{**arguments, "b": column})
        if not isinstance(found, tuple):
            return found.allgather()[:, 0]
        x = found[0].allgather()[:, 0]
        return found._replace(x=x) if hasattr(found, "_replace") else (x, *found[1:])
