# SPDX-License-Identifier: Apache-2.0
"""Time many calls on ever new sub-matrices, as ScaLAPACK-style codes make them: ``python benchmarks/many_calls.py``.

Blocked algorithms, whose every step is a call of the PBLAS on the next sub-matrix: through ``pblasmp.pblas``, through
``pblasmp``'s functions on views, and through ScaLAPACK's PBLAS, the same calls in the same process in turns: Debian's
as shipped and with a larger logical block, and MKL's in processes of their own, since both define the same symbols.
What happens within a block of the diagonal is LAPACK's for all of them. The rounds repeat the same calls; the first
time, when no call is known yet, is printed too. Then what a call costs above its call of the BLAS: on a new sub-matrix,
repeated, and what a view costs. It starts the ranks itself.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from benchmarks.fetch_scalapack import fetch
from benchmarks.ranks import (
    as_nodes,
    interleaved,
    machine,
    on_ranks,
    paired,
    print_facts,
    run_ranks,
    versions,
)
from reference.scalapack import Flavor, ScaLAPACK

GRIDS = ("1x1", "1x2", "2x2")
SIZES = (256, 512, 1024, 2048)
BLOCKS = (16, 32, 64, 128)

Step = tuple[Any, ...]
Window = tuple[int, int, int, int]  # first row and column, rows, columns

# -- the algorithms, as lists of steps


def cholesky(n: int, nb: int) -> Iterator[Step]:
    """Yield a right-looking Cholesky factorization."""
    for k in range(0, n, nb):
        w, rest = min(nb, n - k), n - min(k + nb, n)
        yield "potrf", k, w
        if rest:
            panel, corner = (k + w, k, rest, w), (k + w, k + w, rest, rest)
            yield "trsm", ("R", "L", "T", "N"), 1.0, (k, k, w, w), panel
            yield "syrk", ("L", "N"), -1.0, panel, 1.0, corner


def lu(n: int, nb: int) -> Iterator[Step]:
    """Yield a right-looking LU factorization without pivoting: the columns are diagonally dominant."""
    for k in range(0, n, nb):
        w, rest = min(nb, n - k), n - min(k + nb, n)
        yield "getrf", k, w
        if rest:
            diagonal, below, right = (k, k, w, w), (k + w, k, rest, w), (k, k + w, w, rest)
            yield "trsm", ("R", "U", "N", "N"), 1.0, diagonal, below
            yield "trsm", ("L", "L", "N", "U"), 1.0, diagonal, right
            yield "gemm", ("N", "N"), -1.0, below, right, 1.0, (k + w, k + w, rest, rest)


def inverse(n: int, nb: int) -> Iterator[Step]:
    """Yield the inverse of a lower triangle in place, row of blocks by row of blocks."""
    for k in range(0, n, nb):
        w, rest = min(nb, n - k), n - min(k + nb, n)
        diagonal, below = (k, k, w, w), (k + w, k, rest, w)
        if k:
            yield "trsm", ("L", "L", "N", "N"), 1.0, diagonal, (k, 0, w, k)
        if rest and k:
            yield "gemm", ("N", "N"), -1.0, below, (k, 0, w, k), 1.0, (k + w, 0, rest, k)
        if rest:
            yield "trsm", ("R", "L", "N", "N"), -1.0, diagonal, below
        yield "trtri", k, w


def half_of(n: int, nb: int) -> int:
    """Return the columns of a half of the blocks."""
    return n // (2 * nb) * nb


def gram_schmidt(n: int, nb: int) -> Iterator[Step]:
    """Yield the orthonormal columns of the left half of A, block by block; R is in the upper half of the right one.

    The half is that of the whole blocks: the blocks of R's diagonal are then each on one process.
    """
    half = half_of(n, nb)
    for k in range(0, half, nb):
        w = min(nb, half - k)
        block, r = (0, k, n, w), (k, half + k, w, w)
        if k:
            before, across = (0, 0, n, k), (0, half + k, k, w)
            yield "gemm", ("T", "N"), 1.0, before, block, 0.0, across
            yield "gemm", ("N", "N"), -1.0, before, across, 1.0, block
        yield "syrk", ("U", "T"), 1.0, block, 0.0, r
        yield "potrf_u", k, w
        yield "trsm", ("R", "U", "N", "N"), 1.0, r, block


_SHIPPED_BLOCK, _LARGER_BLOCK = 32, 256  # in which Debian's PBLAS works
_NAMES = {"debian": ("debian", "debian-256"), "mkl": ("mkl",)}

ALGORITHMS = {"cholesky": cholesky, "lu": lu, "inverse": inverse, "gram-schmidt": gram_schmidt}


class Work:
    """A distributed matrix, and an algorithm on it through each door. Collective over comm.

    Args:
        comm: the ranks.
        ctx: pblasmp's context.
        slk: ScaLAPACK; None for nothing but pblasmp.
        algorithm: which one.
        n, nb: order and blocks of the matrix.
        grid: the process grid.
    """

    def __init__(
        self,
        comm: Any,
        ctx: Any,
        slk: ScaLAPACK | None,
        algorithm: str,
        n: int,
        nb: int,
        grid: tuple[int, int],
    ) -> None:
        import numpy as np

        import pblasmp as pb
        from pblasmp import pblas

        self.steps = list(ALGORITHMS[algorithm](n, nb))
        d = pb.MatrixDescriptor((n, n), nb, pb.Grid(*grid), order="F")
        self.rank, self.d = comm.rank, d
        self.matrix = ctx.empty(d)
        self.array = np.asfortranarray(self.matrix.local)
        self.theirs = self.array.copy(order="F")
        rows, cols = d.global_indices(comm.rank)
        i, j = rows[:, None], cols[None, :]
        self.start = np.asfortranarray(np.cos(i * 7.0 + j * 13 + np.minimum(i, j)) / n + (i == j) * 2)
        if algorithm == "gram-schmidt":
            self.start = np.asfortranarray(np.cos(i * 3.0 + j * j * 1.7 + 0.3 * i * j))
        self.ictxt = pblas.gridinit(ctx, "Row", *grid)
        lld = max(1, self.array.shape[0])
        self.desc = pblas.descinit(n, n, nb, nb, 0, 0, self.ictxt, lld)
        self.doors: dict[str, tuple[Any, list[Callable[[], Any]]]] = {
            "pblas": (self.array, list(map(self._pblas, self.steps))),
            "pb": (self.matrix.local, list(map(self._views, self.steps))),
        }
        self.slk, self.context = slk, -1
        if slk is not None:
            self.context = slk.grid(*grid)
            self.their_desc = slk.descriptor(self.context, (n, n), (nb, nb), (0, 0), lld)
            calls = list(map(self._scalapack, self.steps))
            self.doors |= dict.fromkeys(_NAMES[slk.flavor], (self.theirs, calls))

    def run(self, door: str) -> Any:
        """Run the algorithm; return this rank's part of the matrix."""
        array, calls = self.doors[door]
        array[...] = self.start
        if self.slk is not None and self.slk.flavor == "debian":
            self.slk.logical_block = _LARGER_BLOCK if door == "debian-256" else _SHIPPED_BLOCK
        for call in calls:
            call()
        return array

    def close(self) -> None:
        """Free the grids. Collective."""
        from pblasmp import pblas

        pblas.gridexit(self.ictxt)
        if self.slk is not None:
            self.slk.gridexit(self.context)

    def _lapack(self, step: Step, array: Any) -> Callable[[], Any]:
        """Return LAPACK's call on a block of the diagonal."""
        name, k, w = step
        column = k + (half_of(self.d.shape[1], self.d.block[1]) if name == "potrf_u" else 0)
        rank, i, j = self.d.to_local(k, column)
        if rank != self.rank:
            return lambda: None
        at, ld = array[i:, j:].ctypes.data, max(1, array.shape[0])
        size, lead, info = ctypes.c_int(w), ctypes.c_int(ld), ctypes.c_int()
        before: list[Any] = {
            "potrf": [b"L", size], "potrf_u": [b"U", size], "trtri": [b"L", b"N", size], "getrf": [size, size],
        }[name]  # fmt: skip
        pivots = (ctypes.c_int * w)()
        after = [pivots, info] if name == "getrf" else [info]
        function = _lapack(name.removesuffix("_u"))
        arguments = [
            x if isinstance(x, bytes) else ctypes.byref(x)
            for x in (*before, ctypes.c_void_p(at), lead, *after)
        ]
        arguments[len(before)] = ctypes.c_void_p(at)
        return lambda: function(*arguments)

    def _pblas(self, step: Step) -> Callable[[], Any]:
        from pblasmp import pblas

        if isinstance(step[1], int):
            return self._lapack(step, self.array)
        function = getattr(pblas, f"pd{step[0]}")
        arguments: list[Any] = []
        for x in _in_order(step):
            arguments += [self.array, *x, self.desc] if isinstance(x, tuple) else [x]
        return lambda: function(*arguments)

    def _scalapack(self, step: Step) -> Callable[[], Any]:
        if isinstance(step[1], int):
            return self._lapack(step, self.theirs)
        assert self.slk is not None
        function = self.slk._find(f"pd{step[0]}_")
        arguments: list[Any] = []
        for x in _in_order(step):
            if isinstance(x, tuple):
                place = [ctypes.byref(ctypes.c_int(i)) for i in x]
                data = (ctypes.c_void_p(y.ctypes.data) for y in (self.theirs, self.their_desc))
                arguments += [next(data), *place, next(data)]
            elif isinstance(x, str):
                arguments.append(ctypes.c_char_p(x.encode()))
            else:
                arguments.append(
                    ctypes.byref(ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int(x))
                )
        return lambda: function(*arguments)

    def _views(self, step: Step) -> Callable[[], Any]:
        import pblasmp as pb

        if isinstance(step[1], int):
            return self._lapack(step, self.matrix.local)
        name, flags, alpha, *rest = step
        whole = self.matrix
        if name == "trsm":
            (i, j, m, n), (k, p, q, r) = rest
            side, uplo, op, diag = flags

            def trsm() -> None:
                b = whole[k : k + q, p : p + r]
                a = whole[i : i + m, j : j + n]
                pb.blas.trsm(a, b, side=side, uplo=uplo, op_a=op, diag=diag, alpha=alpha, out=b)

            return trsm
        if name == "syrk":
            (i, j, m, n), beta, (k, p, q, r) = rest
            uplo, op = flags

            def syrk() -> None:
                c = whole[k : k + q, p : p + r]
                pb.blas.syrk(
                    whole[i : i + m, j : j + n], c, uplo=uplo, op_a=op, alpha=alpha, beta=beta, out=c
                )

            return syrk
        (i, j, m, n), (k, p, q, r), beta, (s, t, u, v) = rest
        op_a, op_b = flags

        def gemm() -> None:
            c = whole[s : s + u, t : t + v]
            a, b = whole[i : i + m, j : j + n], whole[k : k + q, p : p + r]
            pb.matmul(a, b, c, op_a=op_a, op_b=op_b, alpha=alpha, beta=beta, out=c)

        return gemm


def _in_order(step: Step) -> list[Any]:
    """Return a step's arguments in PBLAS's order; a matrix is its first row and column, from 1."""
    name, flags, alpha, *rest = step
    places = [(x[0] + 1, x[1] + 1) if isinstance(x, tuple) else x for x in rest]
    *_, (_, _, m, n) = rest
    k = rest[0][3] if flags[-1] == "N" or name == "gemm" else rest[0][2]
    if name == "gemm":
        k = rest[0][3 if flags[0] == "N" else 2]
    sizes = {"trsm": [m, n], "syrk": [n, k], "gemm": [m, n, k]}[name]
    return [*flags, *sizes, alpha, *places]


def _lapack(name: str) -> Any:
    """Return a routine of SciPy's LAPACK."""
    from scipy.linalg import cython_lapack

    capsule = cython_lapack.__pyx_capi__[f"d{name}"]
    get_name, get_pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    count = {"potrf": 5, "trtri": 6, "getrf": 6}[name]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * count)(get_pointer(capsule, get_name(capsule)))


def time_case(
    comm: Any, ctx: Any, slk: ScaLAPACK | None, case: dict[str, Any], grid: tuple[int, int], rounds: int
) -> dict[str, Any]:
    """Time each door once, compare their results, then time them in turns. Collective over comm."""
    import numpy as np

    work = Work(comm, ctx, slk, case["algorithm"], case["n"], case["block"], grid)
    expected = None
    first = {}
    for door in work.doors:
        comm.Barrier()
        start = time.perf_counter()
        found = work.run(door)
        comm.Barrier()
        first[door] = time.perf_counter() - start
        expected = found.copy() if expected is None else expected
        if not np.allclose(found, expected, rtol=1e-9, atol=1e-9):
            raise SystemExit(f"{case}: {door} has another result on rank {comm.rank}")
    runs = {door: (lambda door=door: work.run(door)) for door in work.doors}
    seconds = interleaved(comm, runs, rounds, settle=0, check=lambda *_: None)
    work.close()
    row: dict[str, Any] = {"case": case, "seconds": seconds}
    if slk is not None:
        row["ratios"] = {name: paired(seconds, name, slk.flavor) for name in work.doors if name != slk.flavor}
        row["ratios"] |= {f"{name}, first time": first[name] / first[slk.flavor] for name in ("pblas", "pb")}
    return row


# -- what one call costs


def costs(comm: Any, ctx: Any, grid: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
    """Return rows of what calls cost above their calls of the BLAS. Collective over comm."""
    import pblasmp as pb

    n, nb, w = 2048, 16, 32
    layout = {"block": nb, "grid": grid, "order": "F"}
    matrix, other, third = (
        ctx.from_function(lambda i, j: 0.0 * (i + j) + 1, (n, n), **layout) for _ in range(3)
    )
    eye = ctx.from_function(lambda i, j: (i == j) * 1.0, (n, n), **layout)
    rows = []

    def views(x: Any) -> list[Any]:
        return [x[i : i + w, j : j + nb] for i in range(0, n - w, w) for j in range(0, n - nb, nb)][:repeats]

    a, b, c = views(matrix), views(other), views(third)
    t = [eye[i : i + nb, i : i + nb] for i in range(0, n - nb, nb)]
    s = [third[i : i + nb, i : i + nb] for i in range(0, n - nb, nb)]
    calls: dict[str, Callable[[int], Any]] = {
        "matmul": lambda i: pb.matmul(a[i], t[i % len(t)], c[i], alpha=1.0, beta=1.0, out=c[i]),
        "trsm": lambda i: pb.blas.trsm(t[i % len(t)], b[i], side="R", out=b[i]),
        "syrk": lambda i: pb.blas.syrk(a[i], s[i % len(s)], op_a="T", beta=1.0, out=s[i % len(s)]),
        "geadd": lambda i: pb.blas.geadd(a[i], c[i], out=c[i]),
    }
    for name, call in calls.items():
        found: dict[str, list[float]] = {}
        for kind in ("new", "repeated"):
            comm.Barrier()
            times = []
            for i in range(1, repeats):
                start = time.perf_counter()
                call(i if kind == "new" else 0)
                times.append(time.perf_counter() - start)
            found[kind] = [median(times)]
        rows.append({"case": {"call": name, "ranks": comm.size}, "seconds": found})
    start = time.perf_counter()
    for i in range(10_000):
        matrix[i % n : n, 16:32]
    rows.append(
        {
            "case": {"call": "view", "ranks": comm.size},
            "seconds": {"new": [(time.perf_counter() - start) / 10_000]},
        }
    )
    return rows


# -- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", default=list(SIZES), help="orders of the matrix")
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS))
    parser.add_argument("--grids", nargs="+", default=list(GRIDS))
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument(
        "--scalapack", nargs="+", choices=["debian", "mkl", "none"], default=["debian", "mkl"]
    )
    parser.add_argument("--nodes", type=int, default=1, help="simulated ones that the ranks are on")
    parser.add_argument("--pairs", type=int, default=7, help="measured rounds per case")
    parser.add_argument("--quick", action="store_true", help="small matrices: does it run?")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    results.add_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.n, options.blocks, options.pairs = [72], [16], 1
    if on_ranks():
        measure(options)
        return
    print_facts(machine(), versions())
    for flavor in options.scalapack:
        if flavor != "none":
            fetch(flavor)
        for grid in options.grids:
            rows, cols = map(int, grid.split("x"))
            arguments, ranks = [*sys.argv[1:], "--rank-of", grid, flavor], rows * cols
            run_ranks("benchmarks.many_calls", arguments, ranks, as_nodes(ranks, options.nodes))


def measure(options: argparse.Namespace) -> None:
    """Time every case on one grid; rank 0 prints and writes the results. Collective."""
    from mpi4py import MPI

    import pblasmp as pb

    comm = MPI.COMM_WORLD
    grid, asked = options.rank_of
    rows, cols = map(int, grid.split("x"))
    flavor: Flavor | None = None if asked == "none" else asked
    slk = None if flavor is None else ScaLAPACK(flavor, comm)
    found = []
    with pb.Context(comm, engine="host") as ctx:
        cases = [
            {"algorithm": name, "n": n, "block": nb, "grid": grid}
            for name in options.only for n in options.n for nb in options.blocks if 2 * nb <= n
        ]  # fmt: skip
        if comm.rank == 0:
            print(f"\n{grid}: medians of {options.pairs} rounds, ms, and times over {flavor}'s")
        for name in options.only:  # the first times are not those of loading libraries
            time_case(comm, ctx, slk, {"algorithm": name, "n": 32, "block": 16}, (rows, cols), 1)
        for case in cases:
            row = time_case(comm, ctx, slk, case, (rows, cols), options.pairs)
            found.append(row)
            if comm.rank == 0:
                times = "  ".join(
                    f"{name} {median(each) * 1e3:8.2f}" for name, each in row["seconds"].items()
                )
                ratios = "  ".join(f"{name} {ratio:5.2f}" for name, ratio in row.get("ratios", {}).items())
                print(f"{case['algorithm']:13}{case['n']:5}{case['block']:4}  {times}   {ratios}", flush=True)
        found += costs(comm, ctx, (rows, cols), 100 if options.quick else 2000)
        if comm.rank == 0:
            for row in found[len(cases) :]:
                times = "  ".join(f"{kind} {each[0] * 1e6:6.1f} µs" for kind, each in row["seconds"].items())
                print(f"{row['case']['call']:8} {times}", flush=True)
            directory = results.directory_of(options)
            if directory is not None:
                nodes = "" if options.nodes == 1 else f"nodes-{options.nodes}-"
                run = results.Run(
                    benchmark=f"{nodes}many_calls-{asked}-{grid}", date=results.today(), commit=results.this_commit(),
                    ranks=comm.size, gpus=0, **results.facts(ctx), options={"pairs": options.pairs},
                    reference=flavor or "", sample="all", rows=found,
                )  # fmt: skip
                print(f"all times: {results.save(results.with_earlier(run, directory), directory)}")


if __name__ == "__main__":
    main()
