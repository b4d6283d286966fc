# SPDX-License-Identifier: Apache-2.0
"""Time factorizations and solves next to ScaLAPACK's: ``python benchmarks/factorizations.py``.

It starts its ranks itself, one launch for each ScaLAPACK and number of ranks: Debian's with OpenBLAS, as shipped and
with PBLAS's logical block raised, and MKL's with MKL as pblasmp's local BLAS, too. All compute in place on the same
local arrays, in turns; what restores the matrices between two runs is not timed. Residuals are checked once for each
case. Short cases have more rounds than long ones, and portions (``--only``, ``-n``, ``--grid``) of one commit are put
together. Where ranks outnumber cores, MPICH is told to leave the core while it waits.
On GPUs, compared with cuSOLVERMp: ``mpirun -n 2 python benchmarks/factorizations.py --gpu``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_factorizations
from benchmarks.launches import Launches, add_options, is_rank, variants
from benchmarks.ranks import cores, interleaved, paired, share_cores
from reference.scalapack import PATIENT, Flavor, ScaLAPACK

LAUNCHES = ("debian", "mkl")
GRIDS = ("1x1", "1x2", "2x2", "4x1")
ROUTINES = ("potrf", "getrf", "geqrf", "posv", "gesv", "gels")
_MOST_ROUNDS = 50
DEFAULTS = {
    "n": [256, 512, 1024, 2048, 4096],
    "block": [16, 64, 128],
    "grid": list(GRIDS),
    "check": 1024,
}
GPU_DEFAULTS = {
    "n": [16384, 32768],
    "block": [128, 256, 512, 1024],
    "grid": ["1x2", "2x1"],
    "check": 32768,
}


class Case(NamedTuple):
    """One call: a routine, the order of its matrix, its layout, and how many right-hand sides there are."""

    routine: str
    n: int
    block: int
    grid: tuple[int, int]
    nrhs: int

    def plain(self) -> dict[str, Any]:
        """Return the case as results have it."""
        width = {"nrhs": self.nrhs} if self.routine in ("posv", "gesv", "gels") else {}
        return {
            "routine": self.routine,
            "n": self.n,
            "block": self.block,
            "grid": "{}x{}".format(*self.grid),
            **width,
        }

    def flops(self) -> float:
        """Floating-point operations, as LAPACK counts them."""
        n, factor = self.n, {"po": 1 / 3, "ge": 2 / 3}.get(self.routine[:2], 0)
        if self.routine in ("geqrf", "gels"):
            factor = 4 / 3
        solves = 2.0 * n * n * self.nrhs if "nrhs" in self.plain() else 0
        return factor * n**3 + solves


class Matrices:
    """The matrices of a case on the ranks of a context. Collective to make."""

    def __init__(self, ctx: Any, case: Case) -> None:
        import numpy as np

        import pblasmp as pb

        self.case, self.ctx = case, ctx
        n, grid = case.n, pb.Grid(*case.grid)
        square = pb.MatrixDescriptor((n, n), (case.block, case.block), grid, order="F")
        right = pb.MatrixDescriptor((n, case.nrhs), (case.block, case.block), grid, order="F")
        self.a, self.b = ctx.empty(square), ctx.empty(right)
        inside = ctx.rank < grid.size
        self._a, self._b = np.empty((0, 0)), np.empty((0, 0))
        if inside:
            i, j = (np.asarray(x, float) for x in square.global_indices(ctx.rank))
            if case.routine[:2] == "po":
                self._a = np.asfortranarray(np.exp(-abs(i[:, None] - j) / 50))
            else:
                mixed = np.sin(i[:, None] * 12.9898 + j * 78.233) * 43758.5453
                self._a = np.asfortranarray(mixed - np.floor(mixed) - 0.5)  # as good as random
            i, j = right.global_indices(ctx.rank)
            self._b = np.asfortranarray(np.cos(i[:, None] + j).astype(float))
        self.pivots = np.zeros(max(1, len(self._a) + case.block), np.int32)
        self.info = np.zeros(1, np.int32)
        self.tau = np.zeros(max(1, self._a.shape[1] + case.block))
        size = case.block * (3 * case.block + sum(self._a.shape) + self._b.shape[1]) + 64
        self.work = np.zeros(size), size
        self.restore()

    def restore(self) -> None:
        """Write the values of before the call. Local."""
        if self._a.size:
            self.a.local[...] = self._a
        if self._b.size:
            self.b.local[...] = self._b

    def run_pblasmp(self) -> None:
        """Call pblasmp's routine in place. Collective."""
        import pblasmp as pb

        routine, a, b = self.case.routine, self.a, self.b
        if routine == "potrf":
            pb.linalg.cholesky(a, out=a)
        elif routine == "getrf":
            self.found = pb.linalg.lu_factor(a, out=a)[1]
        elif routine == "geqrf":
            self.found = pb.linalg.qr(a, out=a).tau
        elif routine == "gels":
            pb.linalg.lstsq(a, b, out=b)
        else:
            pb.linalg.solve(a, b, "pos" if routine == "posv" else "gen", lower=True, out=b)

    def theirs(self, slk: ScaLAPACK, context: int) -> Callable[[], None]:
        """Return ScaLAPACK's call on the same arrays."""
        placed = [
            (
                x.local,
                1,
                1,
                slk.descriptor(context, x.descriptor.shape, x.descriptor.block, (0, 0), max(1, len(x.local))),
            )
            for x in (self.a, self.b)
        ]
        n, nrhs, routine = self.case.n, self.case.nrhs, self.case.routine
        a, b = placed
        arguments: dict[str, tuple[Any, ...]] = {
            "potrf": ("L", n, *a),
            "getrf": (n, n, *a, self.pivots),
            "geqrf": (n, n, *a, self.tau, *self.work),
            "posv": ("L", n, nrhs, *a, *b),
            "gesv": (n, nrhs, *a, self.pivots, *b),
            "gels": ("N", n, n, nrhs, *a, *b, *self.work),
        }
        return slk.prepare(f"pd{routine}_", *arguments[routine], self.info)

    def residual(self) -> float:
        """Return the backward error of what is in the arrays, in units that should be below 30. Collective."""
        import numpy as np

        n, routine, found = self.case.n, self.case.routine, self.a.allgather()
        solution = self.b.allgather()
        self.restore()
        a, b = self.a.allgather(), self.b.allgather()
        eps, size = np.finfo(float).eps, abs(a).sum(0).max()
        if routine == "potrf":
            lower = np.tril(found)
            return float(abs(a - lower @ lower.T).sum(0).max() / (n * size * eps))
        if routine == "getrf":
            lower = np.tril(found, -1) + np.eye(n)
            there, here = np.linalg.slogdet(a)[1], np.log(abs(found.diagonal())).sum()
            rows = np.sort(abs(lower @ np.triu(found)).sum(1)) - np.sort(abs(a).sum(1))  # P is not looked at
            return float(max(abs(rows).max() / (n * size * eps), abs(there - here) / (n * eps * abs(there))))
        if routine == "geqrf":
            r = np.triu(found)
            return float(abs(a.T @ a - r.T @ r).sum(0).max() / (n * size**2 * eps))
        scale = size * abs(solution).sum(0).max() * n * eps
        return float(abs(a @ solution - b).sum(0).max() / scale)


def time_case(comm: Any, ctx: Any, slk: ScaLAPACK, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Check both contenders' residuals on one case, then time them. Collective over comm."""
    m = Matrices(ctx, case)
    context = slk.grid(*case.grid)
    call = m.theirs(slk, context)
    contenders = {"pblasmp": m.run_pblasmp} | variants(slk, call)
    if case.n <= options.check:
        for name, run in contenders.items():
            m.restore()
            run()
            if not (error := m.residual()) < 30:
                raise SystemExit(f"{case}: the residual of {name} is {error}")

    def timed(rounds: int, first: int = 0) -> dict[str, list[float]]:
        return interleaved(comm, contenders, rounds, settle=0, check=lambda *_: m.restore(), first=first)

    m.restore()
    seconds = timed(1)
    length = sum(each[0] for each in seconds.values())
    rounds = (
        options.pairs
        if options.quick
        else min(max(int(options.seconds / length), options.pairs), _MOST_ROUNDS)
    )
    more = timed(rounds, first=2)
    seconds = {name: seconds[name] + more[name] for name in seconds}
    slk.gridexit(context)
    ratios = {name: paired(seconds, name, "pblasmp") for name in contenders if name != "pblasmp"}
    return {"case": case.plain(), "flops": case.flops(), "seconds": seconds, "ratios": ratios}


def time_all(comm: Any, flavor: Flavor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every case of one launch; rank 0 prints a row for each. Collective over comm."""
    import pblasmp as pb

    rows: list[dict[str, Any]] = []
    share_cores(comm)
    slk = ScaLAPACK(flavor, comm)
    names = ["mkl"] if flavor == "mkl" else ["debian", "debian-256"]
    grids = [tuple(map(int, grid.split("x"))) for grid in options.grid]
    if comm.rank == 0:
        print(f"\n{comm.size} ranks; pblasmp's median; time / pblasmp's, and the ratio of the least times")
        print("routine   grid block     n   pblasmp  GFLOP/s" + "".join(f"{name:>12}" for name in names))
    with pb.Context(comm, engine="host") as ctx:
        for routine in options.only or ROUTINES:
            for grid in grids:
                if grid[0] * grid[1] != comm.size:
                    continue
                for block in options.block:
                    for n in options.n:
                        case = Case(routine, n, block, (grid[0], grid[1]), options.nrhs)
                        row = time_case(comm, ctx, slk, case, options)
                        if comm.rank == 0:
                            own = row["seconds"]["pblasmp"]
                            taken = median(own)
                            ratios = "".join(
                                f" {ratio:5.2f} {min(row['seconds'][name]) / min(own):5.2f}"
                                for name, ratio in row["ratios"].items()
                            )
                            print(
                                f"{routine:8} {grid[0]}x{grid[1]} {block:6d} {n:5d} {taken * 1e3:7.2f}ms "
                                f"{row['flops'] / taken / 1e9:8.1f} {ratios}", flush=True,
                            )  # fmt: skip
                        rows.append(row)
    for name in names:
        found = [row["ratios"][name] for row in rows]
        if comm.rank == 0 and found:
            ahead = sum(ratio >= 1 for ratio in found)
            print(f"{name}: pblasmp is not slower in {ahead} of {len(found)}, median {median(found):.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="on GPUs, on ranks that mpirun started")
    parser.add_argument("-n", type=int, nargs="+", help="orders")
    parser.add_argument("--block", type=int, nargs="+")
    parser.add_argument("--grid", nargs="+", help="grids, such as 2x2")
    parser.add_argument("--rhs", type=int, nargs="+", default=[1, 64, 4096], help="right-hand sides on GPUs")
    parser.add_argument(
        "--timeline", action="store_true", help="on GPUs: print what each stream does, instead"
    )
    parser.add_argument("--nrhs", type=int, default=64, help="right-hand sides of solves")
    add_options(parser, pairs=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="more rounds, if they take less than this")
    parser.add_argument("--check", type=int, help="largest order whose residuals are checked")
    routines = dict.fromkeys((*ROUTINES, *gpu_factorizations.ROUTINES))
    parser.add_argument("--only", nargs="+", choices=routines, help="routines to time")
    parser.add_argument(
        "--scalapack", choices=LAUNCHES, nargs="+", default=list(LAUNCHES), help="launches to do"
    )
    options = parser.parse_args()
    for name, given in (GPU_DEFAULTS if options.gpu else DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, given)
    if options.quick:
        options.n, options.block, options.nrhs, options.rhs = [80], [16], 5, [5]
        options.grid = ["1x1", "1x2"] if options.gpu else ["1x2"]
    if options.gpu:
        gpu_factorizations.run(options)
        return
    if is_rank(parser, options):
        rank_main(options)
        return
    launches = Launches("benchmarks.factorizations", options)
    sizes = sorted({p * q for p, q in (map(int, grid.split("x")) for grid in options.grid)})
    for launch in options.scalapack:
        for ranks in sizes:
            how = {"pairs": options.pairs, "seconds": options.seconds, "nrhs": options.nrhs}
            environ = PATIENT if ranks > cores() else {}
            launches.run(launch, ranks, f"factorizations-{launch}", environ, options=how)


def rank_main(options: argparse.Namespace) -> None:
    """What a rank of one launch does. Collective over COMM_WORLD."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rows = time_all(comm, options.rank_of, options)
    if comm.rank == 0:
        options.rows.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
