# SPDX-License-Identifier: Apache-2.0
"""Time factorizations and solves on GPUs, compared with cuSOLVERMp's; ``factorizations.py --gpu`` calls it.

Both compute in place on the same local arrays, in turns, on matrices of float64 in F order. What restores the matrices
is not timed. Before they are timed, what each computes is checked by the residual of a product or a system.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import pblasmp as pb
from benchmarks import results
from benchmarks.cusolvermp import Solver, open_solver
from benchmarks.ranks import paired
from pblasmp.engines.gpu.session import session_of

__all__ = ["ROUTINES", "run"]

ROUTINES = ("potrf", "getrf", "geqrf", "potrs", "getrs")
_SOLVES = ("potrs", "getrs")
_MOST = 30  # how large a residual may be, in units of n, the norms and the rounding
_COLUMNS = 3  # right-hand sides that a factorization is checked with


class Case(NamedTuple):
    """One call: a routine, the order of its matrix, its layout, and how many right-hand sides a solve has."""

    routine: str
    n: int
    block: int
    grid: tuple[int, int]
    nrhs: int = 0

    def plain(self) -> dict[str, Any]:
        """Return the case as results have it."""
        width = {"nrhs": self.nrhs} if self.nrhs else {}
        grid = "{}x{}".format(*self.grid)
        return {"routine": self.routine, "n": self.n, "block": self.block, "grid": grid, **width}

    def flops(self) -> float:
        """Floating-point operations, as LAPACK counts them."""
        if self.nrhs:
            return 2.0 * self.n**2 * self.nrhs
        return {"potrf": 1 / 3, "getrf": 2 / 3, "geqrf": 4 / 3}[self.routine] * self.n**3


class Matrices:
    """The matrices of a case. Collective to make.

    Args:
        ctx: where.
        case: the case.
        solver: cuSOLVERMp, if the contender "cusolvermp" is there.
    """

    def __init__(self, ctx: pb.Context, case: Case, solver: Solver | None = None) -> None:
        import cupy

        self.case, self.ctx, self._cupy, self._solver = case, ctx, cupy, solver
        d = self._layout(case.n)
        self.a, self.b = ctx.empty(d), ctx.empty(self._layout(case.nrhs or _COLUMNS))
        self._kernels = {
            "po": cupy.ElementwiseKernel(
                "int64 row, int64 col",
                "float64 x",
                "x = exp(-fabs((double)(row - col)) / 50) + (row == col);",
                "near",
            ),
            "ge": cupy.ElementwiseKernel(
                "int64 row, int64 col",
                "float64 x",
                "double y = sin(row * 12.9898 + col * 78.233) * 43758.5453; x = y - floor(y) - 0.5;",
                "mixed",
            ),
        }
        self.found: Any = None  # pivots, or what qr returns

    def _layout(self, cols: int) -> pb.MatrixDescriptor:
        case = self.case
        return pb.MatrixDescriptor((case.n, cols), (case.block, case.block), pb.Grid(*case.grid), order="F")

    def fill(self, x: pb.DistributedMatrix, kind: str) -> None:
        """Write a matrix of a kind. Local."""
        if x.local.size:
            rows, cols = (self._cupy.asarray(each) for each in x.descriptor.global_indices(self.ctx.rank))
            shift = 0 if x is self.a else self.case.n  # right-hand sides are none of A's columns
            self._kernels[kind](cols[:, None] + shift, rows[None, :], x.local.T)

    def restore(self) -> None:
        """Write what the call reads and overwrites: A, or the right-hand sides of a solve. Local."""
        if self.case.routine in _SOLVES:
            self.fill(self.b, "ge")
        else:
            self.fill(self.a, self.case.routine[:2])

    def factor(self, name: str = "pblasmp") -> None:
        """Factor A in place, by a contender. Collective."""
        kind, solver, how = self.case.routine[:2], self._solver, {"out": self.a, "algo": "panels"}
        if name == "cusolvermp":
            assert solver is not None
            routines = {"potrf": solver.cholesky, "potrs": solver.cholesky, "geqrf": solver.qr}
            self.found = routines.get(self.case.routine, solver.lu)(self.a)
        elif kind == "po":
            pb.linalg.cholesky(self.a, **how)
        elif self.case.routine != "geqrf":
            self.found = pb.linalg.lu_factor(self.a, **how)[1]
        else:
            self.found = pb.linalg.qr(self.a, **how)

    def solve(self, name: str) -> None:
        """Solve in place with the factors, by a contender. Collective."""
        positive, solver, how = self.case.routine[:2] == "po", self._solver, {"out": self.b, "algo": "panels"}
        if name == "cusolvermp":
            assert solver is not None
            if positive:
                solver.cho_solve(self.a, self.b)
            else:
                solver.lu_solve(self.a, self.found, self.b)
        elif positive:
            pb.linalg.cho_solve((self.a, True), self.b, **how)
        else:
            pb.linalg.lu_solve((self.a, self.found), self.b, **how)

    def call(self, name: str) -> Callable[[], None]:
        """Return what is timed of a contender. Collective to run."""
        return (lambda: self.solve(name)) if self.case.routine in _SOLVES else (lambda: self.factor(name))

    def residual(self, name: str) -> float:
        """Return a contender's error of a factorization, or of a solve, in units of rounding. Collective."""
        case = self.case
        self.fill(self.a, case.routine[:2])
        size = float(self.a.norm(1))
        self.factor(name)
        self.fill(self.b, "ge")
        if case.routine == "geqrf":  # A^T A x and R^T R x
            squared = pb.blas.trmm(self.a, pb.blas.trmm(self.a, self.b, uplo="U"), uplo="U", op_a="T")
            self.fill(self.a, "ge")
            wanted = pb.matmul(self.a, pb.matmul(self.a, self.b), op_a="T")
            scale = size**2 * float(self.b.norm(1))
            return float((squared - wanted).norm(1)) / (scale * case.n * np.finfo(float).eps)
        self.solve(name)
        x = self.b.copy()
        self.fill(self.b, "ge")
        self.fill(self.a, case.routine[:2])
        scale = size * float(x.norm(1)) * case.n * np.finfo(float).eps
        return float((pb.matmul(self.a, x) - self.b).norm(1)) / scale


def cases(options: argparse.Namespace, ranks: int) -> list[Case]:
    """Return the cases of a run on so many GPUs."""
    grids = [tuple(map(int, grid.split("x"))) for grid in options.grid]
    return [
        Case(routine, n, block, (rows, cols), nrhs)
        for rows, cols in grids
        if rows * cols == ranks
        for routine in options.only or ROUTINES
        for n in options.n
        for block in options.block
        for nrhs in (options.rhs if routine in _SOLVES else [0])
    ]


def time_case(
    ctx: pb.Context, case: Case, solver: Solver | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Check and time the contenders on one case, in turns. Collective."""
    m = Matrices(ctx, case, solver)
    names = ["pblasmp"] if solver is None else ["pblasmp", "cusolvermp"]
    errors: dict[str, float] = {}
    if case.n <= options.check:
        errors = {name: m.residual(name) for name in names}
        if not errors["pblasmp"] < _MOST:
            raise SystemExit(f"{case}: the residual of pblasmp is {errors['pblasmp']}")
        names = [name for name in names if errors[name] < _MOST]  # what cuSOLVERMp gets wrong is not timed
    seconds: dict[str, list[float]] = {name: [] for name in names}
    if case.routine in _SOLVES:  # which keep the factors
        m.fill(m.a, case.routine[:2])
        m.factor()
    for turn in range(options.pairs + 1):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            m.restore()
            run = m.call(name)
            ctx.engine.synchronize()
            ctx.comm.barrier()
            start = time.perf_counter()
            run()
            ctx.engine.synchronize()
            ctx.comm.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    ratios = {name: paired(seconds, name, "pblasmp") for name in names if name != "pblasmp"}
    return {
        "case": case.plain(),
        "flops": case.flops(),
        "seconds": seconds,
        "ratios": ratios,
        "errors": errors,
    }


class Timeline:
    """What a rank's streams do during a factorization or solve on panels: CUDA events around what is queued. Local.

    Args:
        ctx: where it runs.
    """

    def __init__(self, ctx: pb.Context) -> None:
        import cupy

        self._cuda, operations, session = cupy.cuda, ctx.engine.operations, session_of(ctx.engine)
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._within: list[str] = []
        self._patches = [
            mock.patch.object(where, name, self._timed(operations, label, getattr(where, name)))
            for where, names in ((operations, _STEPS), (session.nccl, _MESSAGES))
            for name, label in names.items()
        ]

    def _timed(self, operations: Any, label: str, function: Any) -> Any:
        def call(*arguments: Any, **how: Any) -> Any:
            stream = self._cuda.get_current_stream()
            start, stop = self._cuda.Event(), self._cuda.Event()
            self._within.append(label)
            start.record(stream)
            try:
                return function(*arguments, **how)
            finally:
                stop.record(stream)
                self._spans.append((operations._lane, " > ".join(self._within), start, stop))
                self._within.pop()

        return call

    def of(self, call: Callable[[], None]) -> list[dict[str, Any]]:
        """Run a call; return by stream and step how often it ran and the milliseconds that it took. Collective."""
        first, last = self._cuda.Event(), self._cuda.Event()
        with ExitStack() as patched:
            for each in self._patches:
                patched.enter_context(each)
            first.record()
            call()
            last.record()
        last.synchronize()
        elapsed = self._cuda.get_elapsed_time
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for lane, label, start, stop in self._spans:
            row = rows.setdefault((lane, label), {"stream": lane, "step": label, "calls": 0, "ms": 0.0})
            row["calls"] += 1
            row["ms"] += elapsed(start, stop)
        for lane in sorted({lane for lane, *_ in self._spans}):
            spans = sorted(
                (elapsed(first, start), elapsed(first, stop))
                for on, _, start, stop in self._spans
                if on == lane
            )
            busy, end = 0.0, 0.0
            for start, stop in spans:
                busy += max(0.0, stop - max(start, end))
                end = max(end, stop)
            rows[lane, "idle"] = {
                "stream": lane, "step": "between these", "calls": 0, "ms": elapsed(first, last) - busy,
            }  # fmt: skip
        self._spans.clear()
        return sorted(rows.values(), key=lambda row: (row["stream"], -row["ms"]))


_STEPS = {
    "potrf": "potrf", "_solver": "square", "getrf": "getrf", "geqrt": "geqrt", "trsm": "trsm", "gemm": "gemm",
    "multiply_at": "gemm", "apply": "product",
    "copy_panel": "copy", "swap_rows": "exchange of rows",
}  # fmt: skip
"""The methods of a GPU's operations that are timed, and what they are called in the table."""
_MESSAGES = {"broadcast": "broadcast", "exchange": "exchange", "sum_at": "sum", "send_to_all": "broadcast"}
"""Likewise of NCCL."""


def print_timeline(ctx: pb.Context, case: Case) -> None:
    """Print what every rank's streams did in a second call of a case. Collective."""
    m = Matrices(ctx, case)
    for turn in range(2):
        if case.routine in _SOLVES:
            m.fill(m.a, case.routine[:2])
            m.factor()
        m.restore()
        ctx.engine.synchronize()
        ctx.comm.barrier()
        found = Timeline(ctx).of(m.call("pblasmp")) if turn else m.call("pblasmp")()
    for rank, rows in enumerate(ctx.comm.allgather(found)):
        if ctx.rank == 0:
            print(
                f"{case.routine} {case.n}, blocks of {case.block}, {case.nrhs} right-hand sides, rank {rank}"
            )
            for row in rows:
                print(
                    f"  {row['stream']:6} {row['step']:28} {row['calls']:6} {row['ms']:10.2f} ms", flush=True
                )


def run(options: argparse.Namespace) -> None:
    """Time every case on the ranks that a launcher has started; rank 0 prints a row for each. Collective."""
    with pb.Context() as ctx:
        if ctx.engine.device is None:
            raise SystemExit("--gpu: this machine has no GPU that pblasmp can use")
        chosen = cases(options, ctx.size)
        if options.timeline:
            for case in chosen:
                print_timeline(ctx, case)
        else:
            time_cases(ctx, chosen, options)


def time_cases(ctx: pb.Context, chosen: Sequence[Case], options: argparse.Namespace) -> None:
    """Time some cases, and write the times where the options say. Collective."""
    solver, rows = open_solver(ctx), []
    if isinstance(solver, str) and ctx.rank == 0:
        print(f"cusolvermp: {solver}")
    directory, kept = results.directory_of(options), None
    if ctx.rank == 0 and directory is not None:
        kept = results.Run(
            benchmark="-".join(["factorizations-gpu", *(options.only or ())]), date=results.today(),
            commit=results.this_commit(), ranks=ctx.size,
            gpus=ctx.size, **results.facts(ctx), options=results.options_of(options), reference="pblasmp",
            sample="all", rows=rows,
        )  # fmt: skip
    for case in chosen:
        rows.append(time_case(ctx, case, None if isinstance(solver, str) else solver, options))
        if ctx.rank == 0:
            print(_line(rows[-1]), flush=True)
        if kept is not None and directory is not None:  # after each case: a run that is cut keeps its rows
            results.save(kept, directory)


def _line(row: dict[str, Any]) -> str:
    times = {name: min(each) for name, each in row["seconds"].items()}
    case = row["case"]
    words = f"{case['routine']:6}{case['n']:7d}{case['block']:6d} {case['grid']:>4}{case.get('nrhs', ''):>6}"
    for name, taken in times.items():
        words += f"   {name} {taken * 1e3:9.2f} ms {row['flops'] / taken / 1e12:7.2f} TFLOP/s"
    words += "".join(f"   {name} / pblasmp {ratio:5.2f}" for name, ratio in row["ratios"].items())
    wrong = (
        f"   {name} is wrong: residual {error:.0f}"
        for name, error in row["errors"].items()
        if name not in times
    )
    return words + "".join(wrong)
