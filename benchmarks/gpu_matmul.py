# SPDX-License-Identifier: Apache-2.0
"""Time products on GPUs next to NCCL + cuBLAS and nvmath: ``mpirun -n 4 python3 benchmarks/gpu_matmul.py``.

One rank per GPU. AllGather + GEMM, GEMM + ReduceScatter, GEMM + AllReduce and 2D block-cyclic GEMM on the device's
clock, and what a prepared plan costs on the host's. Prints Markdown, writes JSON and a chart. NVLink multicast is
never used.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from benchmarks.gpu_bench import STUCK_SECONDS, Bench, together
from benchmarks.gpu_devices import Gpu, Rehearsal
from benchmarks.gpu_host import time_calls
from benchmarks.gpu_layouts import time_layouts
from benchmarks.gpu_report import AUTO, GEMM, NCCL, NVMATH, SHAPES, plot, report
from benchmarks.ranks import on_ranks
from reference.gpu import Contender

SECTIONS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "2d", "layouts", "host")
ALGORITHMS = ("default", "no_overlap", "split_p2p")
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "CUBLASMP_DISABLE_MULTICAST": "1",
}


Makers = dict[str, Callable[[], Contender]]


def time_scheme(bench: Bench, scheme: str, shape: Sequence[int]) -> None:
    """Time one shape of AG, RS or AR. Collective."""
    import pblasmp as pb

    ranks, (tokens, outputs, inputs) = bench.comm.size, shape
    maker = {
        "allgather_matmul": pb.MatmulProblem.allgather_matmul,
        "matmul_reduce_scatter": pb.MatmulProblem.matmul_reduce_scatter,
        "matmul_allreduce": pb.MatmulProblem.matmul_allreduce,
    }[scheme]
    n = outputs * ranks if scheme == "allgather_matmul" else outputs
    problem = maker(tokens, n, inputs, ranks, "N", "T", dtype="bfloat16", order="C")
    x, w, y = bench.matrix(problem.a, 1), bench.matrix(problem.b, 2), bench.ctx.empty(problem.d)
    places = {"": x}
    if scheme == "allgather_matmul":
        places[", symmetric"] = bench.matrix(problem.a, 1, symmetric=True)
    makers: Makers = {}
    if bench.torch is not None:
        tx, tw = bench.torch.view(x.local), bench.torch.view(w.local)
        makers[NCCL] = partial(getattr(bench.torch, scheme), tx, tw, ranks)
        alone = (
            partial(bench.torch.ag_gemm, tx, tw, ranks)
            if scheme == "allgather_matmul"
            else partial(bench.torch.gemm, tx, tw)
        )
        makers[GEMM] = alone
    for where, a in places.items():
        for algo in ("auto", *bench.arguments.algo):
            makers[f"{algo}{where}"] = partial(bench.planned, problem, a, w, y, algo=algo)
    if scheme in ("matmul_reduce_scatter", "matmul_allreduce"):
        makers["auto, sums in float32"] = partial(bench.planned, problem, x, w, y, comm_dtype="float32")
    if bench.nvmath is not None:
        best = bench.torch.view(places.get(", symmetric", x).local)
        makers[NVMATH] = partial(bench.nvmath.scheme, scheme, best, tw)
    bench.row(scheme, ", ".join(map(str, shape)), makers, "bfloat16")


def time_block_cyclic(bench: Bench, n: int, block: int, dtype: str, shape: tuple[int, int], ops: str) -> None:
    """Time one 2D block-cyclic product of n × n matrices on a grid of ``shape``. Collective."""
    import pblasmp as pb

    grid = pb.Grid(*shape)
    problem = pb.MatmulProblem.gemm(n, n, n, grid, block, op_a=ops[0], op_b=ops[1], dtype=dtype, order="C")
    a, b, d = bench.matrix(problem.a, 1), bench.matrix(problem.b, 2), bench.ctx.empty(problem.d)
    makers: Makers = {}
    if bench.torch is not None:
        ta, tb = bench.torch.view(a.local), bench.torch.view(b.local)
        if ops == "NN" and grid.npcol % grid.nprow == 0:
            makers[NCCL] = partial(bench.torch.block_cyclic, ta, tb, grid, bench.comm.rank, block)
        makers[GEMM] = partial(bench.torch.block_cyclic_gemm, d.local.shape, n, ta.dtype, ops)
    makers[AUTO] = partial(bench.planned, problem, a, b, d)
    others = () if bench.arguments.rehearse else ("gathered", *bench.arguments.algo)
    for algo in others:
        makers[algo] = partial(bench.planned, problem, a, b, d, algo=algo)
    if bench.nvmath is not None and ops == "NN":
        makers[NVMATH] = partial(bench.nvmath.block_cyclic, ta, tb, grid, block)
    bench.row("2d", f"{n}, {dtype}, {shape[0]}x{shape[1]}, {block}, {ops}", makers, dtype)


def planned(arguments: argparse.Namespace, ranks: int) -> list[tuple[str, Callable[[Bench], None]]]:
    """Return what to measure, in order: the section and the function that measures a case of it."""
    shapes: Sequence[tuple[int, int, int]] = (SHAPES[0], SHAPES[-1]) if arguments.quick else SHAPES
    n, small = (2048 if arguments.quick else 16384), 1024
    if arguments.rehearse:
        shapes, n, small = ((64, 32, 128),), 64, 64
    grids = arguments.grid or [squarest(ranks)]
    work: list[tuple[str, Callable[[Bench], None]]] = []
    for section in arguments.only:
        if section == "2d":
            for size, dtype, grid, ops in product(
                arguments.n or [n], ("bfloat16", "float64"), grids, arguments.ops
            ):
                few = (size // 16,) if arguments.quick else (size // 64, size // 16, size // max(grid))
                work += [
                    (section, partial(time_block_cyclic, n=size, block=b, dtype=dtype, shape=grid, ops=ops))
                    for b in arguments.block or few
                ]
        elif section == "layouts":
            work += [
                (section, partial(time_layouts, n=size, block=block, dtype=dtype, shape=grid))
                for size, dtype, grid in product(arguments.n or [n], ("bfloat16", "float64"), grids)
                for block in arguments.block or (size // 64,)
            ]
        elif section == "host":
            work += [
                (section, partial(time_calls, scheme=s, n=small))
                for s in ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "2d")
            ]
        else:
            work += [(section, partial(time_scheme, scheme=section, shape=shape)) for shape in shapes]
    return work


def measure_all(bench: Bench) -> None:
    """Measure every section that was asked for, as far as time allows. Collective."""
    work = planned(bench.arguments, bench.comm.size)
    for at, (section, step) in enumerate(work):
        if bench.late():
            bench.say(f"{bench.arguments.limit:.0f} s are over: {len(work) - at} cases left out")
            bench.results["left_out"] = [name for name, _ in work[at:]]
            break
        bench.alive()
        _, fault = together(bench.comm, partial(step, bench))
        if fault:
            bench.say(f"{section}: failed: {fault}")
            bench.results.setdefault("faults", []).append(f"{section}: {fault}")


def squarest(ranks: int) -> tuple[int, int]:
    """Return the rows and columns of the squarest grid of so many ranks."""
    from pblasmp import Grid

    grid = Grid.squarest(ranks)
    return grid.nprow, grid.npcol


def grid_shape(text: str) -> tuple[int, int]:
    """Return the rows and columns of a grid written as 2x2."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def without_multicast(name: str) -> str:
    """Return the name of an algorithm, or refuse one that asks for NVLink multicast."""
    if name not in ALGORITHMS:
        raise argparse.ArgumentTypeError(
            f"{name!r}: expected one of {', '.join(ALGORITHMS)}; multicast stays off"
        )
    return name


def sections(text: str) -> list[str]:
    """Return the names in a list separated by commas."""
    names = text.split(",")
    if set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {','.join(SECTIONS)}")
    return names


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few shapes and samples: does it run?")
    parser.add_argument("--only", type=sections, default=list(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument(
        "--algo", type=without_multicast, nargs="*", default=list(ALGORITHMS), help="besides auto"
    )
    parser.add_argument(
        "--n", type=int, nargs="*", help="2d, layouts: orders of the matrices (default: 16384)"
    )
    parser.add_argument(
        "--block",
        type=int,
        nargs="*",
        help="2d, layouts: block sizes (default: n/64, for 2d also n/16 and n/2)",
    )
    parser.add_argument(
        "--grid", type=grid_shape, nargs="*", help="2d, layouts: grids, as 1x4 (default: the squarest)"
    )
    parser.add_argument(
        "--ops", nargs="*", choices=("NN", "TN", "NT", "TT"), default=["NN"], help="2d: op of A and of B"
    )
    parser.add_argument("--samples", type=int, default=20, help="timed calls per contender")
    parser.add_argument("--limit", type=float, default=125, help="seconds after which no case is started")
    parser.add_argument("--null-stream", action="store_true", help="work on CUDA's default stream")
    parser.add_argument("--ones", action="store_true", help="operands of ones, which cost a GPU less power")
    parser.add_argument("--no-nvmath", action="store_true", help="leave nvmath-python out")
    results.add_option(parser)
    parser.add_argument("--plot", type=Path, help="where the chart goes (SVG)")
    parser.add_argument(
        "--rehearse", action="store_true", help=argparse.SUPPRESS
    )  # no GPU: the host engine, tiny
    return parser.parse_args(argv)


def forbid_multicast() -> None:
    """Switch NVLink multicast off in every library, before one is loaded; refuse an environment that asks for it."""
    for name, value in MULTICAST_OFF.items():
        if os.environ.setdefault(name, value) != value:
            raise SystemExit(
                f"{name}={os.environ[name]}: expected {value}; this benchmark never uses multicast"
            )


def main() -> None:
    started = time.monotonic()
    arguments = parse()
    forbid_multicast()
    if not on_ranks():
        raise SystemExit(
            "start it under a launcher, one rank per GPU: mpirun -n 4 python3 benchmarks/gpu_matmul.py"
        )
    from mpi4py import MPI

    import pblasmp as pb

    comm = MPI.COMM_WORLD
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    with pb.Context(comm, engine="host" if arguments.rehearse else "cublasmp") as ctx:
        device = Rehearsal() if arguments.rehearse else Gpu(ctx, null_stream=arguments.null_stream)
        bench = Bench(comm, ctx, device, arguments, started)
        bench.about = results.facts(ctx)
        bench.results["machine"] = {**bench.about["machine"], **bench.about["versions"]}
        measure_all(bench)
        bench.save()
        if comm.rank == 0:
            print(f"\n{report(bench.results)}\n", flush=True)
            if arguments.plot:
                plot(bench.results, arguments.plot)
        bench.close()
        bench.alive()
    faulthandler.cancel_dump_traceback_later()
    wrong = any(
        e.get("wrong")
        for rows in bench.results["sections"].values()
        for r in rows
        for e in r["entries"].values()
    )
    if wrong or "faults" in bench.results:
        raise SystemExit("something was wrong: see the table")


if __name__ == "__main__":
    main()
