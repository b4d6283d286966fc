# SPDX-License-Identifier: Apache-2.0
"""Every algorithm of the library on GPUs, on random problems whose layouts are those of no library's rules.

One product, routine or tensor-parallel call at a time, from its seed; each asserts after its last collective call.
Numbers are small integers, outputs are NaN before.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

import pblasmp as pb
from tests.helpers import epilogues, float8, inside
from tests.helpers.schemes import AG, AR, MAKERS, RS
from tests.helpers.slow import in_turn
from tests.helpers.tensor_cases import FORMS, Case

from .jobs import TURNS, Job
from .moves import say
from .products import OPS, check_part, integers, part_of, place, poisoned

PRODUCTS = {
    "gemm": ("gathered", "panels", "stationary"),
    AG: ("gathered", "panels", "push"),
    RS: ("gathered", "panels", "push"),
    AR: ("sum", "push"),
}
"""By scheme, the algorithms that are not cuBLASMp's."""

PARALLEL = {
    AG: ("gathered", "panels", "push"),
    RS: ("gathered", "panels", "push"),
    AR: ("sum", "push"),
    "matmul_allgather": ("push",),
}
TYPES = ("float64", "float32", "complex128", "complex64", "float16", "bfloat16")
FLOAT8_TYPES = (
    *((float8.E4, float8.E4, d) for d in ("bfloat16", "float16", "float32", float8.E4)),
    (float8.E4, float8.E5, "bfloat16"), (float8.E5, float8.E4, float8.E5), (float8.E4, float8.E5, float8.E4),
)  # fmt: skip
"""Of A, B and D."""
EPILOGUES = {
    "sum": epilogues.KINDS,
    "gathered": epilogues.KINDS,
    "panels": epilogues.KINDS,
    "push": ("bias", "relu", "relu bias", "gelu", "gelu bias"),
}
TOLERANCE = 2.0**-7  # of results of 16 bits, which are rounded


@contextmanager
def small_panels(ctx: pb.Context, width: int = 7) -> Iterator[None]:
    """Within, there are several panels of k, and of a gathered output's columns, also where matrices are small."""
    operations = type(ctx.engine.operations)
    with (
        mock.patch.multiple(operations, panel=width, lead=3, solved=(width, 3), panel_flops=100.0),
        mock.patch.object(*inside.PANEL_OF_TOKENS, 2),
        mock.patch.object(*inside.STRIPES, 0),
    ):
        yield


# -- repeated calls


KEPT: list[tuple[str, dict[str, str]]] = [
    ("matmul", {"algo": "gathered"}), ("matmul", {"algo": "panels"}), ("matmul", {"algo": "stationary"}),
    ("matmul", {"algo": "default"}),
    ("syrk", {"algo": "gathered"}), ("trsm", {"algo": "gathered"}), ("symm", {"algo": "gathered"}),
    *(("matmul", {"algo": algo, "scheme": scheme}) for scheme in MAKERS for algo in (PRODUCTS[scheme][-1], "default")),
]  # fmt: skip
NOT_KEPT: list[tuple[str, dict[str, str]]] = [
    ("matmul", {"algo": "default", "op_b": "C"}), ("symm", {"algo": "full"})
]  # fmt: skip


def check_repeated_calls(ctx: pb.Context, name: str, how: dict[str, str]) -> None:
    """Call a routine on new matrices again and again; fail, at the end, for numbers unlike a plan's or new plans."""
    kept, n = (name, how) in KEPT, 6 * ctx.size
    routine = pb.matmul if name == "matmul" else getattr(pb.blas, name)
    d = pb.MatrixDescriptor((n, n), (6, 6), pb.Grid.squarest(ctx.size), dtype="complex64", order="F")
    layouts = {"a": d, "b": replace(d, order="C") if "op_b" in how else d}
    if "scheme" in how:
        p = MAKERS[how["scheme"]](n, n, n, ctx.size, "N", "T", dtype=d.dtype, order="C")
        layouts, how = {"a": p.a, "b": p.b}, {**how, "op_b": "T"}
    if name == "syrk":
        del layouts["b"]
    results = []
    for turn in range(4):
        values = integers(d.shape, d.dtype, turn) + 30 * np.eye(n)
        given = {x: ctx.scatter(values, layout) for x, layout in layouts.items()}
        if other := turn == 3 and "scheme" not in how:  # the same descriptors, over memory of other strides
            wider = {x: replace(layout, shape=(2 * n, 2 * n)) for x, layout in layouts.items()}
            given = {x: ctx.scatter(np.tile(values, (2, 2)), wide)[:n, :n] for x, wide in wider.items()}
        before = inside.plans_made(ctx)
        found = ctx.engine.to_host(routine(**given, **how).local)
        made = inside.plans_made(ctx) - before
        with pb.plan(routine, **given, **how) as plan:
            results.append((found, ctx.engine.to_host(plan().local), made, kept and turn > 1 and not other))
    for turn, (found, expected, made, none) in enumerate(results):
        case = f"{name} {how}, turn {turn}"
        check_part(found, expected, d.dtype, case)
        assert (made == 0) == none, f"{case}: {made} new plans"


def check_scheme(ctx: pb.Context, scheme: str, algo: str, seed: int) -> None:
    """Multiply in the layouts of a scheme, with C where it takes one; fail, at the end, if D is wrong."""
    rng = random.Random(f"{scheme} {algo} {seed}")
    size, order, dtype = ctx.size, rng.choice("CF"), rng.choice(TYPES)
    ops = rng.choice("NT"), rng.choice("NT")
    if scheme == AR:
        ops = ("T", "N") if order == "F" else ("N", "T")
    elif algo == "push":  # it wants the rows of X contiguous
        ops = ("N", ops[1]) if order == "C" else (ops[0], "N")
    unit = rng.choice([1, 3, 16, 40])
    m, n, k = (rng.randint(1, 4) * unit * size for _ in range(3))
    p = MAKERS[scheme](m, n, k, size, *ops, dtype=dtype, order=order)
    say(ctx, f"{scheme} {algo} {seed} {p}")
    beta = rng.choice([0, -2]) if scheme != AR else 0
    kinds = {"a": p.a, "b": p.b, **({"c": p.d} if beta else {})}
    values = {name: integers(x.shape, x.dtype, seed + i, 1) for i, (name, x) in enumerate(kinds.items())}
    matrices = {name: place(ctx, values[name], x) for name, x in kinds.items()}
    out = poisoned(ctx, p.d)
    expected = 2 * (OPS[p.op_a](values["a"]) @ OPS[p.op_b](values["b"]))
    if scheme == AR:
        expected = np.tile(expected, (1, size) if order == "F" else (size, 1))
    if beta:
        expected = expected + beta * values["c"]
    results = []
    with pb.plan(
        pb.matmul, matrices["a"], matrices["b"], matrices.get("c"), out=out, alpha=2, beta=beta, op_a=p.op_a,
        op_b=p.op_b, scheme=scheme, algo=algo,
    ) as plan:  # fmt: skip
        for _ in range(2):
            plan()
            results.append(ctx.engine.to_host(out.local))
    part = part_of(ctx, expected, p.d)
    for run, found in enumerate(results if part is not None else ()):
        check_part(
            found, part, p.d.dtype, f"{scheme}, {algo}, seed {seed}, run {run}: {p}", _rounding(p.d.dtype)
        )


def _rounding(dtype: np.dtype) -> float:
    return TOLERANCE if dtype.itemsize == 2 else 0


def scheme_of(
    ctx: pb.Context, rng: np.random.Generator, scheme: str, dtype: str, order: str
) -> pb.MatmulProblem:
    """Return a product of a scheme, or a general one in unequal blocks, whose parts are of unequal size."""
    ops, size = ("NT" if order == "C" else "TN"), ctx.size
    if scheme == "gemm":
        ops = "NT"[rng.integers(2)] + "NT"[rng.integers(2)]
        return pb.MatmulProblem.gemm(
            21, 18, 10, pb.Grid.squarest(size), (4, 3, 2), op_a=ops[0], op_b=ops[1], dtype=dtype, order=order
        )
    return MAKERS[scheme](6 * size, 4 * size, 10 * size, size, *ops, dtype=dtype, order=order)


def every_epilogue(
    ctx: pb.Context, algo: str, dtype: str, rng: np.random.Generator, keep: int = 1
) -> Iterator[Callable[[], None]]:
    """A check for every epilogue that can follow ``algo``, for every scheme that it has; one in ``keep``."""
    schemes = [scheme for scheme in PRODUCTS if algo in PRODUCTS[scheme]]
    for number, (scheme, order) in enumerate(itertools.product(schemes, "CF")):
        for kind in in_turn(EPILOGUES[algo], keep=keep, first=number):
            p = scheme_of(ctx, rng, scheme, dtype, order)
            tolerance = max(epilogues.TOLERANCES[dtype], 2e-3 if "gelu" in kind and dtype != "float64" else 0)
            say(ctx, f"{algo} {scheme} {order} {dtype} {kind}")
            yield functools.partial(
                epilogues.check_epilogue, ctx, rng, p, kind, algo=algo, tolerance=tolerance
            )


def every_float8(
    ctx: pb.Context, algo: str, rng: np.random.Generator, keep: int = 1
) -> Iterator[Callable[[], None]]:
    """A check for products of 8-bit floats, of every type; one in ``keep``."""
    schemes = [scheme for scheme in PRODUCTS if algo in PRODUCTS[scheme]]
    for number, (scheme, order) in enumerate(itertools.product(schemes, "CF")):
        for types in in_turn(FLOAT8_TYPES, keep=keep, first=number):
            p = float8.problem(scheme, ctx.size, types, order)
            say(ctx, f"{algo} {p}")
            yield functools.partial(
                float8.check_scaled, ctx, rng, p, algo=algo, tolerance=2.0**-7
            )  # sums by NCCL are rounded


# -- tensor-parallel products


def _uneven(n: int, comm: Any) -> slice:
    """This rank's part of a split that is not by the rule: the last rank has most."""
    starts = [n * rank * rank // comm.size**2 for rank in range(comm.size + 1)]
    return slice(starts[comm.rank], starts[comm.rank + 1])


def parallel_job(
    ctx: pb.Context,
    rng: np.random.Generator,
    form: str,
    algo: str,
    *,
    uneven: bool,
    planned: bool,
    most: int = 70,
) -> Job:
    """Return a tensor-parallel product of up to ``most`` tokens, outputs and inputs. Collective over the context.

    Args:
        ctx, rng: where it runs, and what draws it.
        form, algo: which one, and how.
        uneven: operands are not split by the rule.
        planned: run a plan, not the plain function.
        most: of each extent.
    """
    assert form in FORMS
    xp, dtype = ctx.engine.xp, TYPES[rng.integers(len(TYPES))]
    t, n, k = (int(x) for x in rng.integers(0 if rng.random() < 0.1 else 1, most, 3))
    how = {"transposed": bool(rng.integers(2)), **({"split": _uneven} if uneven else {})}
    beta, with_bias = int(rng.choice([0, 0, 2])), bool(rng.integers(2))
    what = f"{form} {algo} {dtype} {t}x{n}x{k} {beta=} {with_bias=} {how}"
    say(ctx, what)
    cases = [Case(rng, ctx, form, dtype, t, n, k, **how) for _ in range(TURNS)]
    nothing = np.full(cases[0].of(cases[0].c).shape, np.nan, cases[0].out_dtype)
    arrays = {name: [np.array(getattr(case, name)) for case in cases]
              for name in ("local_x", "local_w", *["local_c"] * bool(beta), *["local_bias"] * with_bias)}  # fmt: skip
    arrays["out"] = [nothing] * TURNS
    loads = [(xp.asarray(each[0].copy()), [xp.asarray(x) for x in each]) for each in arrays.values()]
    given = {name.removeprefix("local_"): array for name, (array, _) in zip(arrays, loads, strict=True)}
    options: dict[str, Any] = {
        "alpha": 2,
        "beta": beta,
        "algo": algo,
        "transposed": how["transposed"],
        **given,
    }
    call = functools.partial(getattr(pb, form), options.pop("x"), options.pop("w"), ctx, **options)
    plan = pb.plan(call.func, *call.args, **call.keywords) if planned else None

    def differs(found: np.ndarray, expected: np.ndarray) -> str:
        exact = expected.astype(np.complex128)
        scale = max(1.0, float(np.abs(exact).max(initial=0)))
        worst = float(np.abs(found.astype(np.complex128) - exact).max(initial=0))
        roundings = 1 + (ctx.size if form in (RS, AR) else 1)
        limit = _rounding(cases[0].out_dtype) / 2 * roundings * scale  # of each rank's part, then of the sum
        return "" if worst <= limit else f"largest difference {worst} (scale {scale})"

    def expected(turn: int) -> np.ndarray:
        return cases[turn].expected(2, beta, bias=with_bias)

    return Job(what, call if plan is None else plan, loads, expected, differs, plan=plan)


def check_parallel(ctx: pb.Context, form: str, algo: str, seed: int) -> None:
    """Multiply in a tensor-parallel form, with bias, C, or both; fail, at the end, if the result is wrong."""
    rng = np.random.default_rng(seed)
    uneven = rng.random() < 0.3 and algo == "push"  # the others refuse splits that are not by the rule
    job = parallel_job(ctx, rng, form, algo, uneven=uneven, planned=False)
    job.check(ctx.engine.to_host(job.run(0)), 0, f"seed {seed}")
