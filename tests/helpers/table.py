# SPDX-License-Identifier: Apache-2.0
"""The table of calls: every routine with its options and the ways to call it, and the one runner.

Levels 1 to 3 are in ``calls.py``; factorizations and solves in ``factor_cases.py`` and ``solve_cases.py``, eigenvalues
and singular values in ``spectral_cases.py``. Ranks draw the same calls from generators with the same seed, or from the
same ``tape.Tape``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import pblasmp as pb
from tests.helpers import factor_cases, named_factorizations, solve_cases, spectral_cases
from tests.helpers.calls import (
    DTYPES,
    FUNCTIONS,
    check_call,
    check_level_1,
    check_reductions,
    draw_thresholds,
    legal_options,
    thresholds,
    ways_of,
)
from tests.helpers.cases import extents, pick, short_messages
from tests.helpers.pairs import pairs

LIMITS = {"panels": factor_cases.panels_of, "direct": factor_cases.direct_blocks_of}
"""Ways to factor small matrices as large ones are: in panels, or in blocks of direct calls."""
BANDS = (0, 2), (1, 16), (1, 16), (33, 100)
"""Of sizes: each call has one of these."""


class Asked(NamedTuple):
    """What a call is to be.

    Attributes:
        options, dtype, way: of the routine's row.
        grid: of all ranks, and its context, for ScaLAPACK's names.
        referee: for these what takes a routine's name and its arguments, and the context of ScaLAPACK's own grid.
        apart: gets, of a call with several operands, in what no two of them are alike.
    """

    options: dict[str, str]
    dtype: str
    way: str
    grid: tuple[pb.Grid, int]
    referee: Any = None
    apart: list[set[str]] | None = None


class Row(NamedTuple):
    """A routine of the table.

    Attributes:
        options: every legal combination of its options, by element type.
        ways: to call it.
        check: ``check(ctx, rng, call)`` makes a call, and fails if it is not right.
        dtypes: element types.
    """

    options: Callable[[str], list[dict[str, str]]]
    ways: tuple[str, ...]
    check: Callable[[pb.Context, Any, Asked], None]
    dtypes: tuple[str, ...] = DTYPES


def _function(routine: str) -> Row:
    """Of levels 1 to 3: on either side of the sizes from which calls take the ways of large matrices."""

    def check(ctx: pb.Context, rng: Any, call: Asked) -> None:
        sizes = extents(rng, *(BANDS if call.referee is None else BANDS[:3]))
        with thresholds(*draw_thresholds(rng)):
            check_call(ctx, rng, routine, call.options, call.dtype, call.way, sizes, *call[3:])

    narrow = ("float16", "bfloat16") if routine == "matmul" else ()
    return Row(partial(legal_options, routine), ways_of(routine), check, (*DTYPES, *narrow))


def _reductions() -> Row:
    def check(ctx: pb.Context, rng: Any, call: Asked) -> None:
        n = extents(rng, *BANDS)[0]
        if call.way == "pblas":
            for size in (n, 0):
                check_reductions(ctx, rng, call.dtype, size, call.grid, call.referee)
        else:
            check_level_1(ctx, rng, call.dtype, n)

    return Row(lambda _: [{}], ("auto", "pblas"), check)


@contextlib.contextmanager
def _own_layouts(rng: Any, call: Asked) -> Iterator[None]:
    """Within, in half of the calls, no two matrices have a grid, blocks or a source in common; orders take turns."""
    layouts: Any = pick(rng, (contextlib.nullcontext, factor_cases.layouts_apart))
    with layouts() as made:
        yield
    if call.apart is not None and made is not None:
        features = {x: [getattr(d, x) for d in made] for x in ("grid", "block", "source")}
        call.apart.append({x for x, of in features.items() if len({*of}) == len(of)} | {"start", "order"})


def _factorization(case: Callable[..., None]) -> Row:
    """In panels or in small direct blocks of few columns; options are drawn."""

    def check(ctx: pb.Context, rng: Any, call: Asked) -> None:
        with LIMITS[call.way](ctx, int(rng.integers(1, 9))), _own_layouts(rng, call):
            case(ctx, rng, call.dtype)

    return Row(lambda _: [{}], tuple(LIMITS), check)


def _named(case: Callable[..., None]) -> Row:
    """The same under ScaLAPACK's names, with INFO, IPIV and TAU."""

    def check(ctx: pb.Context, rng: Any, call: Asked) -> None:
        with LIMITS[call.way](ctx, int(rng.integers(1, 9))):
            case(named_factorizations.Call(ctx, rng, call.dtype, call.grid, call.referee))

    return Row(lambda _: [{}], tuple(LIMITS), check)


def _eigh(ctx: pb.Context, rng: Any, call: Asked) -> None:
    if call.way == "pblas":
        spectral_cases.eigh_by_name(ctx, rng, call.dtype, call.grid, **call.options)
    else:
        with _own_layouts(rng, call):
            spectral_cases.eigh(ctx, rng, call.dtype, int(rng.integers(0, 30)), call.way, **call.options)


def _svd(ctx: pb.Context, rng: Any, call: Asked) -> None:
    m, n = rng.integers(1, 25, 2).tolist()
    if call.way == "pblas":
        spectral_cases.svd_by_name(ctx, rng, call.dtype, call.grid, **call.options)
    else:
        spectral_cases.svd(ctx, rng, call.dtype, (m, n), call.way)


KINDS = [{"kind": kind, "uplo": uplo} for kind in spectral_cases.KINDS for uplo in "LU"]
JOBS = [{"jobu": u, "jobvt": vt} for u in "VN" for vt in "VN"]
NAMED: dict[str, Row] = {
    case.__name__.removesuffix("_case"): _named(case) for case in named_factorizations.CASES
}
"""Factorizations and solves under ScaLAPACK's names."""
LINALG: dict[str, Row] = {
    **{
        case.__name__.removesuffix("_case"): _factorization(case)
        for case in (*factor_cases.CASES, *solve_cases.CASES)
    },
    "eigh": Row(lambda _: KINDS, ("auto", "lapack", "pblas"), _eigh),
    "svd": Row(lambda _: JOBS, ("auto", "lapack", "pblas"), _svd),
}
"""Factorizations, solves, eigenvalues and singular values."""
TABLE: dict[str, Row] = {
    **{x: _function(x) for x in FUNCTIONS},
    "reductions": _reductions(),
    **LINALG,
    **NAMED,
}


def combinations(routine: str, *factors: Collection[Any]) -> Iterator[tuple[Any, ...]]:
    """Legal options of a routine, a type and values of other factors: all pairs of them; in long forms, all of them."""
    row = TABLE[routine]
    every = row.options("complex64") + row.options("float64")
    letters = {name: list(dict.fromkeys(each[name] for each in every)) for name in every[0]}

    def legal(found: list[Any]) -> bool:
        options = dict(zip(letters, found, strict=False))
        return len(found) <= len(letters) or options in row.options(found[len(letters)])

    for found in pairs(*letters.values(), row.dtypes, *factors, legal=legal):
        yield dict(zip(letters, found, strict=False)), *found[len(letters) :]


def check(ctx: pb.Context, rng: Any, routine: str, call: Asked) -> None:
    """Make a call of the table, in small messages or large ones; fail if it is not right. Collective."""
    with short_messages(pick(rng, (64, 1000, 1 << 22))):
        TABLE[routine].check(ctx, rng, call)


def check_any(ctx: pb.Context, rng: Any, grids: list[Any]) -> None:
    """Draw a call of the table, and make it. Collective."""
    routine = pick(rng, pick(rng, ((*FUNCTIONS, "reductions"), (*LINALG, *NAMED))))
    row, dtype = TABLE[routine], pick(rng, DTYPES)
    check(
        ctx, rng, routine, Asked(pick(rng, row.options(dtype)), dtype, pick(rng, row.ways), pick(rng, grids))
    )
