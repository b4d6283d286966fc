# SPDX-License-Identifier: Apache-2.0
"""Calls of levels 1 to 3: a routine, its options, a type, sizes, where operands are, and a way to call it.

Every operand has a place of its own, as PBLAS allows: grid, blocks, source, memory order, offset, transposition; in
half of the calls no two of these are alike. It is part of a larger matrix. What may not be read is NaN, and what is
around a result stays as it is. Numbers are small integers, so that results are exact: they are compared with NumPy's
for equality.

Ranks draw the same calls from generators with the same seed, or from the same ``tape.Tape``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import pblasmp as pb
from pblasmp import pblas
from pblasmp.cli.run import dense, touched
from pblasmp.engines.host.host_operations import HostOperations
from pblasmp.layout.routines import GEMM, ROUTINES, VECTOR_ROUTINES
from pblasmp.pblas.routine_functions import DTYPE, names_of
from pblasmp.pblas.vector_functions import ROUTINES as PBLAS_VECTORS
from tests.helpers import inside, level3
from tests.helpers.cases import OPS, layout, numbers, part, pick, scattered
from tests.helpers.limits import changed_limits

DTYPES = ("float32", "float64", "complex64", "complex128")
LETTERS = {np.dtype(dtype).name: letter for letter, dtype in DTYPE.items()}
"""In the names of PBLAS and ScaLAPACK."""
_REAL = "pcsscal", "pzdscal"
"""Their alpha is real."""
WRITERS = tuple(name for name, row in VECTOR_ROUTINES.items() if row.written and name != "swap")
"""The routines of levels 1 and 2 that write a matrix or one vector."""
FUNCTIONS = ("matmul", *ROUTINES, *WRITERS)
"""The routines that write one matrix or vector."""


def ways_of(routine: str) -> tuple[str, ...]:
    """The ways to call a routine: plainly, often, by a plan, under PBLAS's name, with each algorithm by its name."""
    ways = ("auto", "often", "plan", "pblas")
    if routine in VECTOR_ROUTINES or (routine != "matmul" and ROUTINES[routine].shape == "added"):
        return ways
    ways = (*ways, "shared", "gathered", "panels")
    if routine != "matmul" and ROUTINES[routine].shape == "updated":
        return (*ways, "summed", "full")
    ways = (*ways, "stationary")
    return ways if routine == "matmul" or ROUTINES[routine].triangular else (*ways, "full")


def legal_options(routine: str, dtype: str = "float64") -> list[dict[str, str]]:
    """Every combination of a routine's options."""
    if routine == "matmul":
        return [{"op_a": a, "op_b": b} for a, b in itertools.product("NTC", repeat=2)]
    if routine in ROUTINES:
        return level3.legal_flags(routine, dtype)
    letters = {"uplo": "LU", "op_a": "NTC", "diag": "NU"}
    names = VECTOR_ROUTINES[routine].options
    return [dict(zip(names, each, strict=True)) for each in itertools.product(*(letters[x] for x in names))]


def draw_thresholds(rng: Any) -> tuple[dict[str, int], dict[str, Any]]:
    """Sizes from which direct calls, and others, on CPU ranks take the ways of large matrices: perhaps small ones."""
    limits = pick(rng, ({}, {"tiny": 0}, {"tiny": 0, "portion": 40}, {"tiny": 0, "stay": 0}))
    panel, lead = pick(rng, (4, 7, 1 << 10)), pick(rng, (0, 2))
    how = {"panel": panel, "lead": lead, "solved": (panel, lead), "stripes": pick(rng, (1, 2))}
    if rng.integers(2):
        how |= {"tile": 16, "band": pick(rng, (0, 40))}
    return limits, how


@contextmanager
def thresholds(limits: dict[str, int], how: dict[str, Any]) -> Iterator[None]:
    """Within, these hold."""
    with (
        changed_limits(**limits),
        mock.patch.multiple(HostOperations, **how),
        mock.patch.object(*inside.STRIPES, 0),
        mock.patch.object(*inside.STRIPE, 100),
        mock.patch.object(*inside.CHUNK, 40),
    ):
        yield


# -- operands


@dataclass
class Operand:
    """The part ``window`` of a larger matrix, of which every rank has the values, or the transpose of such a part."""

    matrix: pb.DistributedMatrix
    parent: pb.DistributedMatrix
    whole: np.ndarray
    window: tuple[slice, slice]
    transposed: bool
    apart: np.ndarray
    """What of the larger matrix belongs to no operand."""

    def expect(self, values: np.ndarray) -> None:
        """From now on it has these values."""
        self.whole[self.window] = values.T if self.transposed else values

    def put(self, values: np.ndarray) -> None:
        """Give it other values. Local."""
        self.expect(values)
        d, ctx = self.parent.descriptor, self.parent.context
        ctx.engine.from_host(self.parent.local, part(self.whole, d, ctx.rank))

    def again(self) -> pb.DistributedMatrix:
        """The same values in other memory, laid out alike. Collective."""
        other = scattered(self.parent.context, self.parent.descriptor, self.whole)[self.window]
        return other.T if self.transposed else other

    def check(self, case: str, near: float = 0.0) -> None:
        """Fail unless every value here, also around the window, is as ``whole`` says; NaN is NaN. Local."""
        wrong = _unlike(self.parent, self.whole, near=near)
        assert not wrong, f"{case}: {wrong}"

    def around(self) -> str | None:
        """What is wrong unless all that belongs to no operand is as it was."""
        return _unlike(self.parent, self.whole, self.apart)


class Place(NamedTuple):
    """Where in a larger matrix some values begin, and how that is dealt out."""

    grid: pb.Grid
    block: tuple[int, int]
    source: tuple[int, int]
    start: tuple[int, int]


def _two(rng: Any, least: int, stop: int) -> tuple[int, int]:
    i, j = rng.integers(least, stop, 2).tolist()
    return i, j


def draw_place(ctx: pb.Context, rng: Any, grid: pb.Grid | None, unlike: Collection[Place] = ()) -> Place:
    d = layout(rng, (0, 0), ctx.size, grid=grid, block=_two(rng, 1, pick(rng, (9, 9, 65))), unlike=unlike)
    i, j = _two(rng, 0, 6) if rng.integers(2) else (0, 0)
    while (i, j) in [x.start for x in unlike]:
        i += 1
    return Place(d.grid, d.block, d.source, (i, j))


def side_by_side(
    ctx: pb.Context, rng: Any, matrices: list[np.ndarray], at: Place, order: str, *, turns: bool
) -> list[Operand]:
    """Matrices of one type, all parts of the same larger one, perhaps as transposes; poison around and between them."""
    turned = [turns and rng.integers(4) == 3 for _ in matrices]
    held = [x.T if transposed else x for x, transposed in zip(matrices, turned, strict=True)]
    windows, (height, width) = [], (0, 0)
    for x in held:
        i, j = (start + extent for start, extent in zip(at.start, (0, width), strict=True))
        windows.append((slice(i, i + x.shape[0]), slice(j, j + x.shape[1])))
        height, width = max(height, windows[-1][0].stop), windows[-1][1].stop
    below, beside = _two(rng, 0, 6) if rng.integers(2) else (0, 0)
    how = {"grid": at.grid, "block": at.block, "source": at.source, "order": order}
    d = layout(rng, (height + below, width + beside), ctx.size, dtype=matrices[0].dtype, **how)
    whole, apart = np.full(d.shape, 77, d.dtype), np.ones(d.shape, bool)
    for x, window in zip(held, windows, strict=True):
        whole[window], apart[window] = x, False
    parent = scattered(ctx, d, whole)
    return [
        Operand(parent[window].T if transposed else parent[window], parent, whole, window, transposed, apart)
        for window, transposed in zip(windows, turned, strict=True)
    ]


def all_placed(
    ctx: pb.Context, rng: Any, values: dict[str, np.ndarray], grid: pb.Grid | None = None
) -> dict[str, Operand]:
    """Matrices by name, most at places of their own, some where others are; on a grid, as PBLAS has them.

    In half of the cases no two places have a grid, blocks, a source or a start in common, and orders take turns.
    """
    orders, turns, how = "F" if grid else "CF", grid is None, int(rng.integers(4))
    if how == 3 and len({x.dtype for x in values.values()}) == 1:
        at, order = draw_place(ctx, rng, grid), pick(rng, orders)
        found = side_by_side(ctx, rng, [*values.values()], at, order, turns=turns)
        return dict(zip(values, found, strict=True))
    places: list[Place] = []
    operands, order = {}, pick(rng, orders)
    for name, x in values.items():
        alike = how == 0 and places and rng.integers(3) == 2
        places.append(pick(rng, places) if alike else draw_place(ctx, rng, grid, places if how else ()))
        (operands[name],) = side_by_side(ctx, rng, [x], places[-1], order, turns=turns)
        order = orders[1 - orders.index(order)] if how and len(orders) > 1 else pick(rng, orders)
    return operands


# -- values


def triangular(rng: Any, order: int, dtype: str) -> np.ndarray:
    """A triangle whose solutions are exact, and its inverse small: powers of two on the diagonal, few others."""
    a = numbers(rng, (order, order), dtype) * (rng.integers(0, max(4, order // 3), (order, order)) == 0) / 16
    units = [1, -1, 2, 0.5] if np.dtype(dtype).kind == "f" else [1, -1, 2, 1j, -0.5j]
    np.fill_diagonal(a, rng.choice(np.array(units), order))
    return a.astype(dtype)


def stored(uplo: str, order: int, *, unit: bool = False) -> np.ndarray:
    """Which elements of a triangle are read or written."""
    ones = np.ones((order, order), bool)
    return np.tril(ones, -int(unit)) if uplo == "L" else np.triu(ones, int(unit))


def _touched(routine: str, name: str, options: dict[str, str], shape: tuple[int, ...]) -> np.ndarray:
    """Which elements of an operand may be read, or are written."""
    if routine in ROUTINES and name != "b":
        return touched(routine, name, options, shape)
    if name == "a" and "uplo" in options:
        return stored(options["uplo"], shape[0], unit=options.get("diag") == "U")
    return np.ones(shape, bool)


def written(routine: str, options: dict[str, str], shape: tuple[int, ...]) -> np.ndarray:
    """Which elements of the result are written."""
    name = "d" if routine in ROUTINES else "c" if routine == "matmul" else _row(routine).written
    return _touched(routine, name, options, shape)


def _shapes(routine: str, options: dict[str, str], sizes: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """The shapes of the operands; vectors are columns."""
    m, n, k = sizes
    if routine == "matmul":
        a, b = ((x, y)[:: 1 if options[op] == "N" else -1] for op, x, y in (("op_a", m, k), ("op_b", k, n)))
        return {"a": a, "b": b, "c": (m, n), "d": (m, n)}
    if routine in ROUTINES:
        return level3.shapes(routine, options, m, n, k)
    extents, found = _extents(routine, sizes), {}
    for name, letters in VECTOR_ROUTINES[routine].sizes.items():
        words = letters.split()
        if name == "a":
            found[name] = extents[words[0]], extents[words[1]]
        else:
            found[name] = extents[words[-1 if options.get("op_a", "N") != "N" else 0]], 1
    return found


def _extents(routine: str, sizes: tuple[int, ...]) -> dict[str, int]:
    """The sizes by PBLAS's names; square matrices have one."""
    m, n = sizes[:2]
    square = routine in VECTOR_ROUTINES and "n n" in VECTOR_ROUTINES[routine].sizes.values()
    return dict(zip("mnk", (m, m if square else n, *sizes[2:]), strict=False))


def scalars(rng: Any, routine: str, dtype: str) -> tuple[Any, Any]:
    """An alpha and a beta that the routine takes."""
    alpha, beta = pick(rng, (1, 2, -1, 0.5)), pick(rng, (0, 1, -2, 0.5))
    if routine not in VECTOR_ROUTINES and rng.integers(8) == 7:
        alpha = 0
    if dtype.startswith("c"):
        real = () if routine == "matmul" else {**ROUTINES, **VECTOR_ROUTINES}[routine].real
        alpha, beta = alpha * (1 if "alpha" in real else 1 + 2j), beta * (1 if "beta" in real else 2 - 1j)
    return alpha, beta


def _filled(a: np.ndarray, uplo: str, *, hermitian: bool) -> np.ndarray:
    """The symmetric or Hermitian matrix of which ``a`` has a triangle."""
    part = np.where(stored(uplo, len(a), unit=True), a, 0)
    diagonal = a.diagonal().real if hermitian else a.diagonal()
    return part + (part.conj().T if hermitian else part.T) + np.diag(diagonal)


def _solvable(rng: Any, routine: str, options: dict[str, str], values: dict[str, np.ndarray]) -> np.ndarray:
    """Make A triangular and B, or x, what a solution is multiplied to; return the solution."""
    b, dtype = ("b" if routine == "trsm" else "x"), values["a"].dtype
    values["a"] = triangular(rng, len(values["a"]), dtype)
    t = np.where(stored(options["uplo"], len(values["a"]), unit=options["diag"] == "U"), values["a"], 0)
    t = OPS[options["op_a"]](t + np.eye(len(t)) if options["diag"] == "U" else t)
    x = values[b] // 2 if dtype.kind == "f" else values[b]
    values[b] = (t @ x if options.get("side", "L") == "L" else x @ t).astype(dtype)
    return x


def computed(
    routine: str, values: dict[str, np.ndarray], options: dict[str, str], alpha: Any, beta: Any
) -> np.ndarray:
    """What a routine computes, but for solves, also outside of a triangle; vectors have one column."""
    if routine == "matmul":
        a, b = (OPS[options[f"op_{x}"]](values[x].astype(complex)) for x in "ab")
        found = alpha * (a @ b) if alpha else np.zeros((len(a), b.shape[1]))
        found = found + beta * values["c"] if beta else found
        return found if values["a"].dtype.kind == "c" else found.real
    if routine in ROUTINES:
        return dense(routine, values, options, alpha, beta)
    a, x, y = (values.get(name) for name in "axy")
    hermitian = routine in ("hemv", "her", "her2") and x.dtype.kind == "c"
    if routine in ("axpy", "copy", "scal"):
        return {"axpy": lambda: alpha * x + y, "copy": lambda: x, "scal": lambda: alpha * x}[routine]()
    if routine == "trmv":
        t = np.where(stored(options["uplo"], len(a), unit=options["diag"] == "U"), a, 0)
        return OPS[options["op_a"]](t + np.eye(len(a)) if options["diag"] == "U" else t) @ x
    if routine in ("gemv", "symv", "hemv"):
        full = (
            OPS[options["op_a"]](a) if routine == "gemv" else _filled(a, options["uplo"], hermitian=hermitian)
        )
        return alpha * (full @ x) + (beta * y if beta else 0)
    if routine in ("ger", "gerc"):
        return alpha * x @ (y.T if routine == "ger" else y.conj().T) + (0 if a is None else a)
    turned = np.conj if hermitian else np.asarray
    added = alpha * x @ turned((x if y is None else y).T)
    if y is not None:
        added = added + turned(alpha) * y @ turned(x.T)
    old = np.zeros_like(added) if a is None else a.copy()
    if hermitian:
        np.fill_diagonal(old.imag, 0)
    return added + old


class Drawn(NamedTuple):
    """The operands of a call: their values, what ScaLAPACK may be given in their place, and the result."""

    values: dict[str, np.ndarray]
    plain: dict[str, np.ndarray]
    wanted: np.ndarray


def drawn(
    rng: Any, routine: str, options: dict[str, str], dtype: str, sizes: tuple[int, int, int],
    alpha: Any, beta: Any, without: str = "",
) -> Drawn:  # fmt: skip
    """Values of the operands, but of one that is left out; NaN where the routine may not read."""
    shapes = _shapes(routine, options, sizes)
    has = "xya" if routine in VECTOR_ROUTINES else _row(routine).operands
    names = [x for x in shapes if x in has and x != without and (routine, x) != ("copy", "y")]
    values = {name: numbers(rng, shapes[name], dtype) for name in names}
    solution = _solvable(rng, routine, options, values) if routine in ("trsm", "trsv") else None
    plain = {name: x.copy() for name, x in values.items()}
    for name, x in values.items():
        scaled = routine == "matmul" or routine in ROUTINES
        old = name == ("c" if scaled else "y") and _has_beta(routine)
        unread = ~_touched(routine, name, options, x.shape)
        unread |= (beta == 0) if old else (alpha == 0 and scaled)
        x[unread] = np.nan
    diagonal = values.get("a" if routine in ("hemm", "hemv", "her", "her2") else "c")
    if routine.startswith("he") and dtype.startswith("c") and diagonal is not None:
        np.fill_diagonal(diagonal.imag, np.nan)  # it is taken to be real
    if solution is not None:
        wanted = alpha * solution if routine == "trsm" and alpha else 0 * solution if alpha == 0 else solution
    else:
        wanted = computed(routine, plain, options, alpha, beta)
    return Drawn(values, plain, wanted.astype(dtype))


def _has_beta(routine: str) -> bool:
    return "beta" in _row(routine).pblas or routine in ("syrkx", "herkx")


def _row(routine: str) -> Any:
    return GEMM if routine == "matmul" else {**ROUTINES, **VECTOR_ROUTINES}[routine]


# -- one call


@dataclass
class Call:
    """A call, ready to be made.

    Attributes:
        function, operands, how: of ``pb``, and its arguments.
        given: the operands by name, ``out`` among them if the result goes to none of them.
        out: where the result goes; None if it is new.
        turns: by turn, what the operands hold before it.
        plain: by turn, what ScaLAPACK may be given in their place.
        results: by turn, the result.
    """

    function: Any
    operands: list[Any]
    how: dict[str, Any]
    given: dict[str, Operand]
    out: Operand | None
    turns: list[dict[str, np.ndarray]]
    plain: list[dict[str, np.ndarray]]
    results: list[np.ndarray]

    def apart(self) -> set[str]:
        """In what no two operands are alike; of "order" and "turned": not all."""
        ds = [x.parent.descriptor for x in self.given.values()]
        starts = [tuple(axis.start for axis in x.window) for x in self.given.values()]
        every = {name: [getattr(d, name) for d in ds] for name in ("grid", "block", "source")}
        every |= {"start": starts}
        two = {"order": [d.order for d in ds], "turned": [x.transposed for x in self.given.values()]}
        return {x for x, of in every.items() if len({*of}) == len(of)} | {
            x for x, of in two.items() if len({*of}) > 1
        }

    def __str__(self) -> str:
        given = [f"{x}: {each.matrix}" for x, each in self.given.items()]
        return f"{self.function.__name__} {self.how}, {given}"


def prepared(
    ctx: pb.Context, rng: Any, routine: str, options: dict[str, str], dtype: str, sizes: tuple[int, int, int],
    asks: str, *, turns: int = 1, name: str = "", grid: pb.Grid | None = None, placed: Any = all_placed,
) -> Call:  # fmt: skip
    """Draw the operands of a call, and put them in their places. Collective.

    Args:
        asks: where the result goes: "new", "out", "in place".
        turns: how often there are other operands.
        name: PBLAS's, if it is called by that.
        grid: of all operands, if it is.
        placed: puts operands in their places.
    """
    row, is_vectors = _row(routine), routine in VECTOR_ROUTINES
    target = row.written if is_vectors else row.in_place
    optional = (
        row.optional if is_vectors else "c" * ("c" in row.operands and routine not in ("geadd", "tradd"))
    )
    without = optional if asks != "in place" and rng.integers(2) else ""
    alpha, beta = scalars(rng, routine, dtype)
    alpha = alpha.real if name in _REAL else alpha
    beta = 0 if without or not _has_beta(routine) else beta
    flat = {x: is_vectors and x != "a" and bool(rng.integers(2)) for x in (*"abcxy", "out")}  # as a row
    # C and D may be in single precision
    wide = dtype in ("float16", "bfloat16") and routine == "matmul" and asks == "out" and rng.integers(2)
    every = [drawn(rng, routine, options, dtype, sizes, alpha, beta, without) for _ in range(turns)]
    held, results = [], []
    for values, plain, wanted in every:
        if wide:
            wanted = computed(routine, plain, options, alpha, beta).astype("float32")
            values |= {"c": values["c"].astype("float32")} if "c" in values else {}
        if asks == "out":
            values["out"] = np.full_like(wanted, np.nan)
        elif asks == "in place" and target not in values:  # of copy
            values[target] = plain[target] = np.full_like(wanted, np.nan)
        is_row = {x: flat[x] and (x != "out" or target != "a") for x in values}
        held.append({x: v.T if is_row[x] else v for x, v in values.items()})
        before = values.get("out", values.get(target, np.zeros_like(wanted)))
        mask = written(routine, options, wanted.shape)
        if name and _changes_nothing(routine, sizes, alpha, beta):
            mask = np.zeros_like(mask)
        wanted = np.where(mask, wanted, before)
        like = "out" if asks == "out" else target if target in values else "x"
        if target != "a" and is_row.get(like) and (asks != "new" or values[like].size != 1):
            wanted = wanted.T  # one element is a column
        results.append(wanted)
    given = placed(ctx, rng, held[0], grid)
    out = given.get("out") or (given[target] if asks == "in place" else None)
    how = {**options, **({"alpha": alpha} if "alpha" in row.pblas or not is_vectors else {})}
    how |= {"beta": beta} if _has_beta(routine) else {}
    how |= {} if out is None else {"out": out.matrix}
    order = "x" if routine == "copy" else row.sizes if is_vectors else row.operands
    operands = [given[x].matrix if x in given else None for x in order if x in given or x == optional]
    function = pb.matmul if routine == "matmul" else getattr(pb.blas, routine)
    return Call(function, operands, how, given, out, held, [plain for _, plain, _ in every], results)


def check_call(
    ctx: pb.Context, rng: Any, routine: str, options: dict[str, str], dtype: str, way: str = "auto",
    sizes: tuple[int, ...] | None = None, grid: Any = None, referee: Any = None, apart: Any = None,
) -> None:  # fmt: skip
    """Call a routine; fail if the result, what is around it, or an operand is not as NumPy has it. Collective.

    Args:
        options: those of ``legal_options``.
        way: see ``ways_of``.
        sizes: m, n and k, as far as it has them.
        grid: for the way "pblas" the grid of all ranks and its context.
        referee: for the same way what takes a routine's name and its arguments: ScaLAPACK's routine.
        apart: a list; gets in what no two operands are alike, or have to be: PBLAS has one grid, and one order.
    """
    sizes = (*(sizes or (int(each) for each in rng.integers(0, 13, 3))), 0)[:3]
    name = _pblas_name(rng, routine, options, dtype) if way == "pblas" else ""
    asks = "in place" if name else pick(rng, ("new", "out", "in place"))
    of_grid = {"name": name, "grid": grid[0]} if name else {}
    turns = 3 if way in ("often", "plan") else 1
    call = prepared(ctx, rng, routine, options, dtype, sizes, asks, turns=turns, **of_grid)
    if apart is not None and len(call.given) > 1:
        apart.append(call.apart() | ({"grid", "order"} if name else set()))
    text = f"{routine} {options} {dtype} {way}, {asks}, {sizes}, {call}"
    out, how = call.out, call.how
    if name:
        hosted = ctx.engine.name != "host" and bool(rng.integers(2))
        _check_pblas(f"{name} {text}", name, routine, call, sizes, grid[1], referee, hosted)
        return
    how |= {"algo": way} if way not in ("auto", "often", "plan", "pblas") else {}
    near = 1e-3 * (routine in ("trsm", "trsv") and ctx.engine.name != "host")  # GPUs solve by inverses

    def check(turn: int, result: pb.DistributedMatrix, what: str = "") -> None:
        case = f"{what}turn {turn}, {result}, {text}"
        wrong = _unlike(result, call.results[turn], near=near)
        assert not wrong, f"{case}: {wrong}"
        if out is not None:
            assert result is out.matrix, f"{case}: the result is not out"
            out.expect(call.results[turn])
        for x, each in call.given.items():
            each.check(f"{case}: {x}", near)

    plan = pb.plan(call.function, *call.operands, **how) if way == "plan" else None
    with plan or nullcontext():
        results: list[pb.DistributedMatrix] = []
        for turn, values in enumerate(call.turns):
            for x, each in call.given.items() if turn else ():
                each.put(values[x])
            results.append(plan() if plan else call.function(*call.operands, **how))
            check(turn, results[-1])
        same = all(x is results[0] for x in results)
        if turns > 1 and routine not in VECTOR_ROUTINES:
            assert same == (plan is not None or out is not None), f"the results are one, or not: {text}"
        if plan:
            _check_on_others(plan, call, lambda *found: check(turns - 1, *found))


def _check_on_others(plan: Any, call: Call, check: Any) -> None:
    """Run a plan on another matrix for each, whose planned one comes to nothing meanwhile; then on the planned ones."""
    values = call.turns[-1]
    for x in (*(x for x, each in call.given.items() if each is not call.out), None):
        for name, each in call.given.items():
            each.put(values[name])
        other = {x: call.given[x].again()} if x else {}
        if x:
            call.given[x].put(np.full_like(values[x], np.nan))
        check(plan(**other), f"another {x}, ")
    allowed = "c is moved to" if call.how.get("beta") else "nothing"
    moved = [line for line in plan.report().moved if not line.startswith(allowed)]
    assert not moved or "x" in call.given, f"moved {moved}, {call}"


def _changes_nothing(routine: str, sizes: tuple[int, ...], alpha: Any, beta: Any) -> bool:
    """Whether PBLAS writes nothing: where A has no elements no y, where 0 is added not even a Hermitian diagonal."""
    extents = _extents(routine, sizes)
    if routine in VECTOR_ROUTINES:
        return 0 in (extents.get(word, 1) for word in _row(routine).pblas.split())
    has_k = "k" in _row(routine).pblas.split()
    return beta == 1 and (alpha == 0 or (has_k and extents["k"] == 0))


def _pblas_name(rng: Any, routine: str, options: dict[str, str], dtype: str) -> str:
    """One of PBLAS's names of a routine for a type; empty if there is none."""
    letter = LETTERS.get(dtype)
    if routine in VECTOR_ROUTINES:
        names = [name for name, of in VECTOR_ROUTINES[routine].names.items() if of == letter]
        return pick(rng, names) if names else ""
    names = [f"p{letter}{'gemm' if routine == 'matmul' else routine}"]
    if routine == "geadd" and options["op_a"] != "N":
        op = options["op_a"].replace("T", "U").lower() if dtype.startswith("c") else ""
        names.append(f"p{letter}tran{op}")
    return pick(rng, names) if hasattr(pblas, names[0]) else ""


def _check_pblas(
    case: str, name: str, routine: str, call: Call, sizes: tuple[int, int, int], context: int, referee: Any,
    hosted: bool,
) -> None:  # fmt: skip
    """Call a routine under PBLAS's name, and ScaLAPACK's with what is legal for it; ``hosted``: on NumPy's arrays."""
    row, (plain,), (wanted,), given, how = _row(routine), call.plain, call.results, call.given, call.how
    arrays: dict[str, Any] = {}
    ops = {"trans": how.get("op_a"), "transa": how.get("op_a"), "transb": how.get("op_b")}
    known = {"beta": 0, **how, **ops, **_extents(routine, sizes)}
    engine = next(iter(given.values())).matrix.context.engine
    words = row.pblas.removeprefix("trans ") if name[2:].startswith("tran") else row.pblas

    def arguments(context: int) -> list[Any]:
        for x, each in given.items():
            arrays[x], i, j, desc = each.matrix.to_scalapack(context=context)
            if hosted:
                arrays[x] = np.asfortranarray(engine.to_host(arrays[x]))
                desc = [*desc[:8], max(1, len(arrays[x]))]
            inc = int(desc[2]) if plain[x].shape != each.matrix.shape else 1
            known.update({x: arrays[x], f"i{x}": i, f"j{x}": j, f"desc{x}": desc, f"inc{x}": inc})
        return [known[each] for each in names_of(words)]

    getattr(pblas, name)(*arguments(context))
    if hosted:
        written_to = next(x for x, each in given.items() if each is call.out)
        engine.from_host(call.out.matrix.to_scalapack(context=context)[0], arrays[written_to])
    call.out.expect(wanted)
    near = 1e-3 * (routine in ("trsm", "trsv") and engine.name != "host")
    for x, each in given.items():
        each.check(f"{case}: {x}", near)
    if referee is None:
        return
    run, theirs = referee
    dtype = wanted.dtype
    for x in ("alpha", "beta"):
        is_real = x in row.real or name in _REAL
        known[x] = np.array(known.get(x, 0), np.dtype(dtype.char.lower()) if is_real else dtype)
    for x, each in given.items():
        each.expect(np.nan_to_num(plain[x].reshape(each.matrix.shape)))
    for x, each in given.items():
        rows, cols = each.parent.descriptor.global_indices(each.parent.context.rank)
        arrays[x][...] = each.whole[rows[:, None], cols]
    run(f"{name}_", *arguments(theirs))
    found = call.out.matrix
    rows, cols = found.descriptor.global_indices(found.context.rank)
    part = wanted[rows[:, None], cols]
    near = np.isclose(found.local, part, rtol=200 * np.finfo(dtype).eps, atol=0) | np.isnan(part)
    assert near.all(), f"{case}: ScaLAPACK has {found.local}, expected {part}"


def _unlike(
    result: pb.DistributedMatrix, expected: np.ndarray, among: np.ndarray | None = None, near: float = 0.0
) -> str | None:
    """What is wrong with this rank's part of a matrix, or with some elements of it; NaN is NaN."""
    d = result.descriptor
    if result.shape != expected.shape:
        return f"shape {result.shape}, expected {expected.shape}"
    if result.context.rank >= d.grid.size:
        return None
    rows, cols = d.global_indices(result.context.rank)
    part, found = expected[rows[:, None], cols], result.on_host()
    if np.array_equal(found, part, equal_nan=True):
        return None
    same = (found == part) | (np.isnan(part) & np.isnan(found))
    if near:
        same |= abs(found - part) <= near
    where = np.argwhere(~same if among is None else ~same & among[rows[:, None], cols])
    if not len(where):
        return None
    i = tuple(where[0])
    return f"{d}: {len(where)} values differ, first at {i}: {found[i]}, expected {part[i]}"


# -- numbers


def vector(
    ctx: pb.Context, rng: Any, dtype: str, n: int, values: np.ndarray | None = None
) -> tuple[Operand, np.ndarray]:
    """A row or a column of numbers in a larger matrix, and its elements."""
    x = numbers(rng, (n, 1), dtype) if values is None else values.reshape(-1, 1).astype(dtype)
    return all_placed(ctx, rng, {"x": x.T if rng.integers(2) else x})["x"], x.reshape(-1)


def check_level_1(ctx: pb.Context, rng: Any, dtype: str, n: int) -> None:
    """Run the reductions of two vectors, and exchange them. Collective."""
    x, y = (numbers(rng, n, dtype) for _ in "xy")
    rows = (z.reshape(1, n) for z in (x, y))
    a, b = all_placed(
        ctx, rng, {name: pick(rng, (z, z.T)) for name, z in zip("ab", rows, strict=True)}
    ).values()
    real = np.dtype(dtype).type(0).real.dtype
    sizes = abs(x.real) + abs(x.imag)
    at = int(sizes.argmax()) if n else -1
    value, index = pb.blas.amax(a.matrix)
    assert index == at, f"amax {dtype} {n}"
    length = np.sqrt((abs(x.astype("complex128")) ** 2).sum())
    for name, got, expected, kind, error in (
        ("dot", pb.blas.dot(a.matrix, b.matrix), (x * y).sum(), dtype, 0),
        ("dotc", pb.blas.dotc(a.matrix, b.matrix), (x.conj() * y).sum(), dtype, 0),
        ("asum", pb.blas.asum(a.matrix), sizes.sum(), real, 0),
        ("amax", value, x[at] if n else 0, dtype, 0),
        ("nrm2", pb.blas.nrm2(a.matrix), length, real, 2 * np.finfo(real).eps * length),
    ):
        assert got.dtype == kind, f"{name} {dtype} {n}"
        assert abs(got - expected) <= error, f"{name} {dtype} {n}: {got}, expected {expected}"
    pb.blas.swap(a.matrix, b.matrix)
    a.expect(y.reshape(a.matrix.shape))
    b.expect(x.reshape(b.matrix.shape))
    for each in (a, b):
        each.check(f"swap {dtype} {n}")
    pb.blas.swap(a.matrix, a.matrix.T)
    a.check(f"swap with itself {dtype} {n}")


def check_reductions(
    ctx: pb.Context, rng: Any, dtype: str, n: int, grid: tuple[pb.Grid, int], referee: Any = None
) -> None:
    """Call the reductions, and swap, under PBLAS's names: numbers are where PBLAS puts them, elsewhere 0. Collective.

    Args:
        n: how many elements.
        grid: of all ranks, and its context.
        referee: see ``check_call``.
    """
    for routine in ("dot", "dotc", "nrm2", "asum", "amax", "swap"):
        for name in (name for name, of in VECTOR_ROUTINES[routine].names.items() if of == LETTERS[dtype]):
            values = {v: numbers(rng, n, dtype) for v in "xy"}
            is_row = {v: bool(rng.integers(2)) for v in VECTOR_ROUTINES[routine].sizes}
            shaped = {v: values[v].reshape((1, n) if flat else (n, 1)) for v, flat in is_row.items()}
            given = all_placed(ctx, rng, shaped, grid[0])
            size = pick(rng, (n, np.int64(n)))  # a direct call, and one that is read more closely
            case = f"{name} of {n}: {[f'{v} in {each.parent}' for v, each in given.items()]}"
            _check_numbers(case, name, values, is_row, given, getattr(pblas, name), grid[1], size)
            if referee is not None:
                run, theirs = partial(referee[0], f"{name}_"), referee[1]
                _check_numbers(f"ScaLAPACK's {case}", name, values, is_row, given, run, theirs, n)


def _check_numbers(
    case: str, name: str, values: dict[str, np.ndarray], is_row: dict[str, bool], given: dict[str, Operand], run: Any,
    context: int, n: Any,
) -> None:  # fmt: skip
    """Call a reduction or swap; fail unless it says what NumPy does on the processes that PBLAS tells, else 0."""
    (x, y), row = values.values(), PBLAS_VECTORS[name]
    sizes, real = abs(x.real) + abs(x.imag), x.real.dtype
    kinds = {"dot": x.dtype, "norm2": real, "asum": real, "amax": x.dtype, "indx": np.dtype("int32")}
    told = {each: np.full(1, 77, kinds[each]) for each in row.numbers}
    known: dict[str, Any] = {"n": n, **told}
    told_here = []
    for v, each in given.items():
        each.put(values[v].reshape(each.matrix.shape))
        array, i, j, desc = each.matrix.to_scalapack(context=context)
        known |= {
            v: array,
            f"i{v}": i,
            f"j{v}": j,
            f"desc{v}": desc,
            f"inc{v}": int(desc[2]) if is_row[v] else 1,
        }
        d, flat = each.matrix.descriptor, known[f"inc{v}"] == desc[2]  # all is a row in a matrix of one row
        place = d.grid.coords(each.matrix.context.rank)
        here = [place[i] == axis.owner(0) for i, axis in enumerate((d.rows, d.cols) if n else ())]
        told_here.append(n > 0 and (all(here) if n == desc[2] == 1 else here[0 if flat else 1]))
    returned = run(*(known[each] for each in row.names))
    at, first = int(sizes.argmax()) if n else 0, known["jx" if known["incx"] == known["descx"][2] else "ix"]
    if "indx" in told and isinstance(run, partial) and told["indx"][0]:
        at = int(told["indx"][0]) - first  # of equals ScaLAPACK takes that of the first process
        assert sizes[at] == sizes.max(), f"{case}: element {at}"
    expected = {
        "dot": ((x.conj() if name.endswith("dotc") else x) * y).sum(), "asum": sizes.sum(),
        "norm2": np.sqrt((abs(x.astype("complex128")) ** 2).sum()), "amax": x[at] if n else 0, "indx": at + first,
    }  # fmt: skip
    for each, found in told.items():
        wanted = expected[each] if any(told_here) else 0
        near = 4 * np.finfo(real).eps * abs(wanted) if each == "norm2" else 0
        assert abs(found[0] - wanted) <= near, f"{case}: {each} is {found[0]}, expected {wanted}"
    if told and not isinstance(run, partial):
        assert isinstance(returned, tuple) == (len(told) > 1), f"{case}: {returned} is returned"
        assert np.array_equal(np.atleast_1d(returned), [found[0] for found in told.values()]), case
    for v, z in () if told else (("x", y), ("y", x)):
        given[v].expect(z.reshape(given[v].matrix.shape))
    for v, each in given.items():
        each.check(f"{case}: {v}")
