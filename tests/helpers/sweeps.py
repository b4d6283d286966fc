# SPDX-License-Identifier: Apache-2.0
"""One case of a sweep, on any engine, against dense NumPy; what must not be read holds NaN."""

from __future__ import annotations

import numpy as np

import pblasmp as pb
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers.gpu.products import integers, part_of, place
from tests.helpers.level3 import OPS, dense, shapes, touched
from tests.helpers.sweep_files import Sweep, find_sweeps, load_sweep

NAMES = ("gemm", *(name for name in ROUTINES if name not in ("syrkx", "herkx")))  # those that PBLAS has
TYPES = ("float32", "float64", "complex64", "complex128")


def sweeps() -> list[Sweep]:
    """Every sweep that comes with pblasmp."""
    return [load_sweep(path) for path in find_sweeps()]


def cases(nranks: int):
    """Every routine on every grid of ``nranks`` in every sweep: (sweep, routine, grid, type, memory order)."""
    found = [
        (sweep, name, grid) for sweep in sweeps() for grid in sweep.grids.values() if grid.size == nranks
        for name in NAMES
    ]  # fmt: skip
    for i, (sweep, name, grid) in enumerate(found):
        hermitian = name.startswith("he")
        dtype = TYPES[2 + i % 2] if hermitian else TYPES[i % 4]
        yield sweep, name, grid, np.dtype(dtype), "FC"[i // 5 % 2]


def flags_of(sweep: Sweep, name: str) -> dict[str, str]:
    """The options of a routine; where a Hermitian update has no T, C takes its place."""
    if name == "gemm":
        return {"op_a": sweep.op_a, "op_b": sweep.op_b}
    flags = {each: getattr(sweep, each) for each in ROUTINES[name].options}
    if name in ("herk", "her2k") and flags["op_a"] == "T":
        flags["op_a"] = "C"
    return flags


def fault(ctx: pb.Context, sweep: Sweep, name: str, grid: pb.Grid, dtype: np.dtype, order: str) -> str:
    """Run one case and return what is wrong with this rank's part of the result, or an empty string."""
    m, n, k, flags = sweep.m, sweep.n, sweep.k, flags_of(sweep, name)
    alpha, beta = (x if dtype.kind == "c" else x.real for x in (sweep.alpha, sweep.beta))
    if name in ("herk", "her2k"):
        alpha, beta = alpha.real if name == "herk" else alpha, beta.real
    if name == "gemm":
        stored = {"a": (m, k), "b": (k, n), "c": (m, n)}
        sizes = {x: size if flags.get(f"op_{x}", "N") == "N" else size[::-1] for x, size in stored.items()}
        written, operands = "c", "abc"
    else:
        sizes, operands = shapes(name, flags, m, n, k), ROUTINES[name].operands
        written = "c" if "c" in operands else "b"
    parents, wholes, parts, windows = {}, {}, {}, {}
    for i, x in enumerate(operands):
        d = sweep.parent(x, grid, dtype, order)
        whole = integers(d.shape, dtype, i)
        windows[x] = tuple(slice(at, at + size) for at, size in zip(sweep.start(x), sizes[x], strict=True))
        part = whole[windows[x]]
        if name == "trsm" and x == "a":
            part /= 2 * len(part) + 1
            np.fill_diagonal(part, 2)
        parts[x] = part.copy()
        if x != written:
            partly = x == "a" and name != "gemm"
            mask = touched(name, x, flags, part.shape) if partly else np.ones(part.shape, bool)
            whole = np.full(whole.shape, np.nan, whole.dtype)
            whole[windows[x]] = np.where(mask, parts[x], np.nan)
        wholes[x], parents[x] = whole, place(ctx, whole, d)
    given = {x: parents[x][windows[x]] for x in operands}
    scalars = {"alpha": alpha, "beta": beta} if "c" in operands else {"alpha": alpha}
    if name == "gemm":
        pb.matmul(*given.values(), out=given["c"], **flags, **scalars)
        a, b = OPS[flags["op_a"]](parts["a"]), OPS[flags["op_b"]](parts["b"])
        expected = alpha * (a @ b) + beta * parts["c"]
    else:
        getattr(pb.blas, name)(*given.values(), out=given[written], **flags, **scalars)
        expected = dense(name, parts, flags, alpha, beta)
    target = wholes[written]
    target[windows[written]] = np.where(np.isnan(expected), parts[written], expected)
    mine = part_of(ctx, target, parents[written].descriptor)
    if mine is None:
        return ""
    found = np.asarray(ctx.engine.to_host(parents[written].local))
    bound = 100 * np.finfo(dtype).eps * np.abs(target).max() if name == "trsm" else 0
    wrong = ~(np.abs(found - mine) <= bound)
    return f"{wrong.sum()} of {wrong.size} values differ" if wrong.any() else ""


def label(sweep: Sweep, name: str, grid: pb.Grid, dtype: np.dtype, order: str) -> str:
    """What a case is called."""
    return f"{sweep.path.stem} {name} {dtype.name} {order} on {grid}"
