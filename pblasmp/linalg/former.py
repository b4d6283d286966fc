# SPDX-License-Identifier: Apache-2.0
"""Functions of the last release whose arguments have changed: each passes them on to its successor.

They are what the names at the top stand for until the next release, in which this file goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import linalg
from ..layout.grid import one_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Former:
    """A function of the last release. Collective over the context, as its successor is.

    ``translate`` returns the successor's arguments for the former ones.
    """

    def __init__(self, successor: Callable[..., Any], translate: Callable[..., Arguments]) -> None:
        self.successor, self.translate = successor, translate
        self.__name__ = translate.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the successor does. Collective over the context."""
        args, kwargs = self.translate(*args, **kwargs)
        return self.successor(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<pblasmp.{self.__name__}, now pblasmp.linalg.{self.successor.__name__}>"


FORMER: dict[str, Former] = {}
"""The functions by their former names."""


def _former(successor: Callable[..., Any]) -> Callable[[Callable[..., Arguments]], Callable[..., Arguments]]:
    def note(translate: Callable[..., Arguments]) -> Callable[..., Arguments]:
        FORMER[translate.__name__] = Former(successor, translate)
        return translate

    return note


def _lower(uplo: object) -> object:
    """Return whether a letter is "L"; what is no such letter as it is."""
    return uplo == "L" if one_of(uplo, "LU") else uplo


def _unit(diag: object) -> object:
    return diag == "U" if one_of(diag, "NU") else diag


def _assumed(assume: object, uplo: object) -> dict[str, object]:
    """Return ``assume_a`` and ``lower``."""
    if one_of(assume, ("tri",)) and one_of(uplo, "LU"):
        return {"assume_a": "lower triangular" if uplo == "L" else "upper triangular"}
    return {"assume_a": assume, "lower": _lower(uplo)}


@_former(linalg.cholesky)
def cholesky(a: Any, uplo: Any = "L", out: Any = None, **how: Any) -> Arguments:
    return (a, _lower(uplo)), {"out": out, **how}


@_former(linalg.cho_solve)
def cho_solve(factor: Any, b: Any, uplo: Any = "L", out: Any = None, **how: Any) -> Arguments:
    return ((factor, _lower(uplo)), b), {"out": out, **how}


@_former(linalg.lu_factor)
def lu(a: Any, out: Any = None, **how: Any) -> Arguments:
    return (a,), {"out": out, **how}


@_former(linalg.lu_solve)
def lu_solve(factors: Any, pivots: Any, b: Any, op_a: Any = "N", out: Any = None, **how: Any) -> Arguments:
    return ((factors, pivots), b, op_a), {"out": out, **how}


@_former(linalg.solve)
def solve(
    a: Any, b: Any, assume: Any = "gen", *, op_a: Any = "N", uplo: Any = "L", diag: Any = "N", **how: Any
) -> Arguments:
    return (a, b), {**_assumed(assume, uplo), "transposed": op_a, "unit_diagonal": _unit(diag), **how}


@_former(linalg.inv)
def inv(a: Any, assume: Any = "gen", *, uplo: Any = "L", diag: Any = "N", **how: Any) -> Arguments:
    return (a,), {**_assumed(assume, uplo), "unit_diagonal": _unit(diag), **how}


@_former(linalg.qr)
def qr(a: Any, out: Any = None, **how: Any) -> Arguments:
    return (a,), {"out": out, **how}


@_former(linalg.lstsq)
def lstsq(a: Any, b: Any, op_a: Any = "N", out: Any = None, **how: Any) -> Arguments:
    return (a, b), {"trans": op_a, "out": out, **how}


@_former(linalg.eigh)
def eigh(a: Any, uplo: Any = "L", **how: Any) -> Arguments:
    return (a,), {"lower": _lower(uplo), **how}
