# SPDX-License-Identifier: Apache-2.0
"""Time every level-3 routine: ``python benchmarks/level3.py``.

On CPU ranks, which it starts itself, each routine of the host engine next to ScaLAPACK's: Debian's with OpenBLAS, and
MKL's with MKL as pblasmp's local BLAS, too. With ``mpirun -n 4 python benchmarks/level3.py --gpu`` every algorithm of
each routine, cuBLASMp's among them, next to a product of as many operations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results, timeline
from benchmarks.launches import Launches, add_options, is_rank, variants
from benchmarks.ranks import interleaved, on_ranks, paired
from pblasmp.dtypes import ELEMENT_TYPES
from reference.scalapack import Flavor, ScaLAPACK

NRANKS = 4
_FILLED = 1 << 26  # elements at a time: their temporaries take some bytes each
LAUNCHES = ("debian", "mkl")


class Case(NamedTuple):
    """One call: a routine, its options, whether its matrices are long, and their type."""

    routine: str
    flags: dict[str, str]
    long: bool = False
    dtype: str = "float64"

    def plain(self, n: int, width: int, options: argparse.Namespace) -> dict[str, Any]:
        """Return the case as results have it; the width only if there is one."""
        wide = {"width": width} if width else {}
        letters = "".join(self.flags.values()) + (", long" if self.long else "")
        about = {"routine": self.routine, "options": letters, "n": n, **wide}
        return {**about, "grid": options.grid, "block": options.block}

    def __str__(self) -> str:
        return f"{self.routine:6} {''.join(self.flags.values()):4} {'long' if self.long else '':4}"


CASES = (
    *(Case(name, {"side": side, "uplo": "L", "op_a": op, "diag": "N"})
      for name in ("trsm", "trmm") for side, op in ("LN", "LT", "RN", "RT")),
    *(Case(name, {"side": side, "uplo": "L"}, dtype=dtype)
      for name, dtype in (("symm", "float64"), ("hemm", "complex128")) for side in "LR"),
    *(Case(name, {"uplo": "L", "op_a": op}, dtype=dtype)
      for name, dtype, ops in (("syrk", "float64", "NT"), ("herk", "complex128", "NC"),
                               ("syr2k", "float64", "NT"), ("her2k", "complex128", "NC"))
      for op in ops),
    *(Case(name, {"uplo": "L", "op_a": "N"}, dtype=dtype)
      for name, dtype in (("syrkx", "float64"), ("herkx", "complex128"))),
    Case("syrk", {"uplo": "L", "op_a": "T"}, long=True),
    Case("geadd", {"op_a": "N"}),
    Case("geadd", {"op_a": "T"}),
    Case("tradd", {"uplo": "L", "op_a": "N"}),
    Case("tradd", {"uplo": "L", "op_a": "T"}),
)  # fmt: skip


class Matrices:
    """The matrices of a case on the ranks of a context, and the call. Collective.

    ``width`` is how many columns B and C have where A is on one side of B, or how many rows; and A and B of an update,
    if they are not long. 0: n.
    """

    def __init__(
        self, ctx: Any, case: Case, n: int, block: int, grid: tuple[int, int], width: int = 0
    ) -> None:
        import pblasmp as pb
        from pblasmp.layout.level3_problem import ROUTINES

        traits = ROUTINES[case.routine]
        self.case, self.n, self.k = case, n, 16 * n if case.long else width or n
        shape = (n, self.k) if case.flags.get("op_a", "N") == "N" else (self.k, n)
        shapes = {"a": shape, "b": shape, "c": (n, n)}
        if traits.shape == "sided":
            of_b = (n, width or n) if case.flags["side"] == "L" else (width or n, n)
            shapes = {"a": (n, n), "b": of_b, "c": of_b}

        def matrix(name: str) -> Any:
            extents = shapes[name]
            d = pb.MatrixDescriptor(extents, (block, block), pb.Grid(*grid), dtype=case.dtype, order="F")
            return _filled(ctx, d, "abc".index(name), solvable=name == "a" and case.routine == "trsm")

        self.matrices = {name: matrix(name) for name in traits.operands}
        scaled = self.matrices["c" if "c" in self.matrices else "b"]
        self.out = ctx.zeros(scaled.descriptor)
        self.scalars = {"alpha": 1.0} | ({"beta": 1.0} if "c" in self.matrices else {})

    def run(self) -> Any:
        """Run pblasmp's routine; ``out`` is what is left of C or B."""
        import pblasmp as pb

        call = getattr(pb.blas, self.case.routine)
        return call(*self.matrices.values(), out=self.out, **self.case.flags, **self.scalars).local

    def flops(self) -> int:
        """Floating-point operations of the call."""
        import pblasmp as pb

        lies = {name: x.descriptor for name, x in self.matrices.items()}
        return pb.Level3Problem(self.case.routine, d=self.out.descriptor, **lies, **self.case.flags).flops


def _filled(ctx: Any, d: Any, seed: int, *, solvable: bool = False) -> Any:
    """Return a matrix of small integers; where it is to be solved, nearly the identity. Collective."""
    out, xp = ctx.empty(d), ctx.engine.xp
    rows, cols = (xp.asarray(each) for each in d.global_indices(ctx.rank))
    step = max(1, _FILLED // max(1, len(rows)))
    for at in range(0, len(cols), step):
        i, j = rows[:, None], cols[None, at : at + step]
        values = (i * (7 + seed) + j * 13 + i * j % 11) % 9 - 4
        out.local[:, at : at + step] = values / (8 * d.shape[0]) + (i == j) if solvable else values
    return out


def scalapack_call(slk: ScaLAPACK, context: int, m: Matrices) -> Callable[[], Any] | None:
    """Return ScaLAPACK's call of the same case, None where it has none."""
    import numpy as np

    case = m.case
    if case.routine in ("syrkx", "herkx"):
        return None
    arrays = {name: np.array(x.local, order="F") for name, x in m.matrices.items()}
    written = "c" if "c" in arrays else "b"
    target = np.empty_like(arrays[written])
    placed: dict[str, tuple[Any, ...]] = {}
    for name, x in m.matrices.items():
        d, local = x.descriptor, target if name == written else arrays[name]
        placed[name] = (
            local,
            1,
            1,
            slk.descriptor(context, d.shape, d.block, d.source, max(1, local.shape[0])),
        )
    one = np.ones(1, target.dtype)
    real = np.ones(1) if case.routine in ("herk", "her2k") else one
    sizes = (m.n, m.k) if case.routine[:4] in ("syrk", "herk", "syr2", "her2") else m.out.shape
    arguments: list[Any] = [
        *case.flags.values(),
        *sizes,
        real if case.routine == "herk" else one,
        *placed["a"],
    ]
    if "b" in placed:
        arguments += placed["b"]
    if "c" in placed:
        arguments += [real, *placed["c"]]

    def call() -> Any:
        target[...] = arrays[written]
        slk.call(f"p{ELEMENT_TYPES[case.dtype].blas}{case.routine}_", *arguments)
        return target

    return call


def cases(options: argparse.Namespace) -> list[tuple[Case, int]]:
    """Return the cases of a run, each with the width of its matrices."""
    chosen = [case for case in CASES if not options.only or case.routine in options.only]
    return [(case, width) for width in options.width for case in chosen]


def time_case(
    comm: Any, ctx: Any, slk: ScaLAPACK, case: Case, width: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Compare both contenders' results on one case, then time them. Collective over comm."""
    import numpy as np

    n = options.n // 2 if case.dtype == "complex128" or case.long else options.n
    grid = tuple(map(int, options.grid.split("x")))
    m = Matrices(ctx, case, n, options.block, grid, width)
    context = slk.grid(*grid)
    contenders = {"pblasmp": m.run}
    if (call := scalapack_call(slk, context, m)) is not None:
        contenders |= variants(slk, call)
        rows, cols = m.out.descriptor.global_indices(comm.rank)
        everything = case.routine in ("trsm", "trmm", "symm", "hemm", "geadd")
        counts = np.ones((len(rows), len(cols)), bool) if everything else rows[:, None] >= cols
        found, expected = m.run()[counts], call()[counts]
        if not np.allclose(found, expected, rtol=0, atol=1e-12 * m.k * max(1, abs(expected).max(initial=0))):
            raise SystemExit(f"{case}: the results differ on rank {comm.rank}")
    settle = 0 if options.quick else options.settle
    seconds = interleaved(comm, contenders, options.pairs, settle=settle, check=lambda *_: None)
    slk.gridexit(context)
    ratios = {name: paired(seconds, name, "pblasmp") for name in contenders if name != "pblasmp"}
    return {"case": case.plain(n, width, options), "flops": m.flops(), "seconds": seconds, "ratios": ratios}


def time_all(comm: Any, flavor: Flavor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every case of one launch; rank 0 prints a row for each. Collective over comm."""
    import pblasmp as pb

    rows: list[dict[str, Any]] = []
    slk = ScaLAPACK(flavor, comm)
    names = ["mkl"] if flavor == "mkl" else ["debian", "debian-256"]
    if comm.rank == 0:
        print(
            f"\n{options.grid}, blocks of {options.block}; time / pblasmp's, median of {options.pairs} pairs"
        )
        print("routine               n   pblasmp  GFLOP/s" + "".join(f"{name:>12}" for name in names))
    with pb.Context(comm, engine="host") as ctx:
        for case, width in cases(options):
            result = time_case(comm, ctx, slk, case, width, options)
            if comm.rank == 0:
                taken = median(result["seconds"]["pblasmp"])
                ratios = "".join(f"{ratio:12.2f}" for ratio in result["ratios"].values())
                speed = result["flops"] / taken / 1e9
                print(f"{case} {result['case']['n']:7d} {taken * 1e3:7.1f}ms {speed:8.1f}{ratios}")
            rows.append(result)
    for name in names:
        found = [row["ratios"][name] for row in rows if row["ratios"]]
        if comm.rank == 0 and found:
            ahead = sum(ratio > 1 for ratio in found)
            print(f"{name}: pblasmp is faster in {ahead} of {len(found)}, median {median(found):.2f}")
    return rows


def time_on_gpus(comm: Any, options: argparse.Namespace) -> None:
    """Time every algorithm of every routine, next to a product of as many operations. Collective over comm."""
    import pblasmp as pb

    rows: list[dict[str, Any]] = []
    if comm.rank == 0:
        print(
            "routine               n      auto  TFLOP/s  time over the GEMM's, by algorithm",
            flush=True,
        )
    with pb.Context(comm, engine="cublasmp") as ctx:
        for case, width in cases(options):
            grid = tuple(map(int, options.grid.split("x")))
            m = Matrices(ctx, case, options.n, options.block, grid, width)
            d = m.out.descriptor
            rows_of_d, cols = d.shape
            k = max(1, m.flops() // (2 * rows_of_d * cols * (4 if case.dtype == "complex128" else 1)))
            left, right = (
                _filled(ctx, pb.MatrixDescriptor(shape, d.block, d.grid, dtype=case.dtype, order="F"), 0)
                for shape in ((rows_of_d, k), (k, cols))
            )
            with ExitStack() as stack:
                plans = {"gemm": stack.enter_context(pb.plan(pb.matmul, left, right, out=ctx.empty(d)))}

                def planned(algo: str, case: Case = case, m: Matrices = m, stack: ExitStack = stack) -> Any:
                    routine = getattr(pb.blas, case.routine)
                    how = {**case.flags, **m.scalars, "out": m.out, "algo": algo}
                    return stack.enter_context(pb.plan(routine, *m.matrices.values(), **how))

                plans["auto"] = planned("auto")
                report = plans["auto"].report()
                for algo in report.algorithms if options.algo is None else options.algo:
                    with suppress(pb.UnsupportedError):  # on every rank
                        plans[algo] = planned(algo)
                runs = {name: _finished(ctx, plan) for name, plan in plans.items()}
                for run in runs.values():
                    run()  # the second run may record a graph
                seconds = interleaved(comm, runs, options.pairs, settle=0, check=lambda *_: None)
            seconds = {"pblasmp" if name == "auto" else name: each for name, each in seconds.items()}
            ratios = {name: paired(seconds, name, "gemm") for name in seconds if name != "gemm"}
            if comm.rank == 0:
                taken = median(seconds["pblasmp"])
                each = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
                speed = m.flops() / taken / 1e12
                print(
                    f"{case} {m.n:5d} {width or '':4} {taken * 1e3:7.2f}ms {speed:8.2f}  {each}  "
                    f"({report.algorithm})",
                    flush=True,
                )
            row = {"case": case.plain(m.n, width, options), "by": report.algorithm, "flops": m.flops()}
            rows.append(row | {"seconds": seconds, "ratios": ratios})
            del m, left, right
        directory = results.directory_of(options)
        thin = ["thin"] if any(options.width) else []
        about = ["level3-gpu", options.grid, options.n, options.block, *thin]
        if comm.rank == 0 and directory is not None:
            run = results.Run(
                benchmark="-".join(map(str, about)), date=results.today(),
                commit=results.this_commit(), ranks=comm.size, gpus=comm.size, **results.facts(ctx),
                options=results.options_of(options), reference="gemm", sample="all",
                rows=rows,
            )  # fmt: skip
            print(f"all times: {results.save(run, directory)}")


def print_timelines(comm: Any, options: argparse.Namespace) -> None:
    """Print what all GPUs do in the fastest and in the slowest round of every case's plan. Collective over comm."""
    import pblasmp as pb

    timeline.begin()
    with pb.Context(comm, engine="cublasmp") as ctx:
        for case, width in cases(options):
            grid = tuple(map(int, options.grid.split("x")))
            m = Matrices(ctx, case, options.n, options.block, grid, width)
            how = {**case.flags, **m.scalars, "out": m.out, "algo": (options.algo or ["auto"])[0]}
            with pb.plan(getattr(pb.blas, case.routine), *m.matrices.values(), **how) as plan:
                run = _finished(ctx, plan)
                for _ in range(2):
                    run()  # the second run may record a graph
                found = sorted(timeline.record(comm, run, options.pairs), key=timeline.elapsed)
            if comm.rank == 0:
                taken = "".join(f"{timeline.elapsed(each) / 1e3:8.2f}" for each in found)
                print(f"\n{case} {m.n:5d}, all rounds, ms:{taken}")
                for name, ranks in (("fastest", found[0]), ("slowest", found[-1])):
                    print(f"{name} round, ms; blocks and threads of kernels, sizes of copies")
                    print("\n".join(timeline.lines(ranks)), flush=True)
            del m


def _finished(ctx: Any, plan: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        plan()
        ctx.engine.synchronize()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-n", type=int, default=2048, help="order of the matrices; half of it for complex ones"
    )
    parser.add_argument(
        "--width",
        type=int,
        nargs="+",
        default=[0],
        help="columns or rows of B next to a triangular or symmetric A, columns of A in an update",
    )
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--grid", default="2x2", help=f"grid of {NRANKS} ranks")
    add_options(parser, pairs=9, settles=True)
    parser.add_argument("--only", nargs="+", help="routines to time")
    parser.add_argument(
        "--scalapack", choices=LAUNCHES, nargs="+", default=list(LAUNCHES), help="launches to do"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="on GPUs, next to cuBLASMp's, on ranks already running"
    )
    parser.add_argument("--algo", nargs="*", help="on GPUs: algorithms besides auto (default: all)")
    parser.add_argument(
        "--timeline", action="store_true", help="on GPUs: print what all of them do, instead (needs PyTorch)"
    )
    options = parser.parse_args()
    if options.quick:
        options.n, options.block = 256, 32
    if (options.gpu and on_ranks()) or is_rank(parser, options):
        rank_main(options)
        return
    launches = Launches("benchmarks.level3", options)
    for launch in options.scalapack:
        launches.run(launch, NRANKS, f"level3-{launch}" + ("-thin" if any(options.width) else ""))


def rank_main(options: argparse.Namespace) -> None:
    """What a rank of one launch does. Collective over COMM_WORLD."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if options.gpu:
        (print_timelines if options.timeline else time_on_gpus)(comm, options)
        return
    rows = time_all(comm, options.rank_of, options)
    if comm.rank == 0:
        options.rows.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
