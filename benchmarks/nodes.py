# SPDX-License-Identifier: Apache-2.0
"""Each routine on one node, on two and on four, compared with Debian's ScaLAPACK: ``python benchmarks/nodes.py``.

The nodes are made of one machine: MPICH takes UCX between them (MPIR_CVAR_NUM_CLIQUES), and pblasmp takes them for
nodes (PBLASMP_RANKS_PER_NODE). Both contenders run in the same processes, in turns, on the same arrays. Of times the
ratio within a round counts: UCX on one machine says nothing of a network. Debian's ScaLAPACK waits for ever in some
calls there: after ``--limit`` seconds the case is repeated without it, and the row says so. many_calls.py and
vectors.py have ``--nodes``, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from benchmarks.factorizations import Case, Matrices
from benchmarks.ranks import (
    ROOT,
    as_nodes,
    cores,
    interleaved,
    machine,
    on_ranks,
    paired,
    print_facts,
    share_cores,
    versions,
)
from pblasmp import launch
from pblasmp.launch import Job
from reference.scalapack import PATIENT, ScaLAPACK

RANKS, GRID, NODES = 4, (2, 2), (1, 2, 4)
FACTORED = ("potrf", "getrf", "geqrf", "gesv", "gels")
PRODUCTS = ("gemm", "syrk", "trsm", "gemv", "dot")
IN_A_ROW = {"gemv": 20, "dot": 20}  # calls that are timed together: one alone finds nothing in the caches
_RIGHT = 30.0  # the largest residual, in units of rounding


class Products:
    """Matrices of a product, a solve or a routine of level 1 or 2, whose numbers are small integers. Collective.

    Args:
        ctx: the ranks.
        case: the routine, its order and its blocks.
    """

    def __init__(self, ctx: Any, case: Case) -> None:
        import numpy as np

        import pblasmp as pb

        self.case, self.ctx = case, ctx
        n, grid, block = case.n, pb.Grid(*case.grid), (case.block, case.block)
        square, column = (pb.MatrixDescriptor(x, block, grid, order="F") for x in ((n, n), (n, 1)))
        self.a, self.b, self.c = (ctx.empty(square) for _ in range(3))
        self.x, self.y = (ctx.empty(column) for _ in range(2))
        self._known = {}
        for step, matrix in enumerate((self.a, self.b, self.c, self.x, self.y)):
            i, j = (np.asarray(each, float) for each in matrix.descriptor.global_indices(ctx.rank))
            values = (i[:, None] * (step + 2) + j * 5) % 7 - 3
            if step == 0 and case.routine == "trsm":  # well conditioned
                values = values / (10 * n) + (i[:, None] == j)
            self._known[step] = np.asfortranarray(values)
        self.restore()
        self.found: Any = np.zeros(1)

    def restore(self) -> None:
        """Write the values of before the call. Local."""
        for step, matrix in enumerate((self.a, self.b, self.c, self.x, self.y)):
            if matrix.local.size:
                matrix.local[...] = self._known[step]

    def planned(self) -> str:
        """Return which algorithm computes the product, "" of what has no plan. Collective."""
        import pblasmp as pb

        functions = {"gemm": (pb.matmul, self.a, self.b), "syrk": (pb.blas.syrk, self.a)}
        functions["trsm"] = (pb.blas.trsm, self.a, self.b)
        if self.case.routine not in functions:
            return ""
        with pb.plan(*functions[self.case.routine]) as plan:
            return str(plan.report().path)

    def run_pblasmp(self) -> None:
        """Call pblasmp's routine in place. Collective."""
        import pblasmp as pb

        match self.case.routine:
            case "gemm":
                pb.matmul(self.a, self.b, out=self.c)
            case "syrk":
                pb.blas.syrk(self.a, out=self.c)
            case "trsm":
                pb.blas.trsm(self.a, self.b, out=self.b)
            case "gemv":
                pb.blas.gemv(self.a, self.x, out=self.y)
            case _:
                self.found[0] = pb.blas.dot(self.x, self.y)

    def theirs(self, slk: ScaLAPACK, context: int) -> Callable[[], None]:
        """Return ScaLAPACK's call on the same arrays."""
        import numpy as np

        def placed(x: Any) -> tuple[Any, ...]:
            d = x.descriptor
            return x.local, 1, 1, slk.descriptor(context, d.shape, d.block, (0, 0), max(1, len(x.local)))

        n, (one, zero) = self.case.n, (np.array([value]) for value in (1.0, 0.0))
        a, b, c, x, y = (placed(each) for each in (self.a, self.b, self.c, self.x, self.y))
        arguments: dict[str, tuple[Any, ...]] = {
            "gemm": ("N", "N", n, n, n, one, *a, *b, zero, *c),
            "syrk": ("L", "N", n, n, one, *a, zero, *c),
            "trsm": ("L", "L", "N", "N", n, n, one, *a, *b),
            "gemv": ("N", n, n, one, *a, *x, 1, zero, *y, 1),
            "dot": (n, self.found, *x, 1, *y, 1),
        }
        return slk.prepare(f"pd{self.case.routine}_", *arguments[self.case.routine])

    def residual(self) -> float:
        """Return how wrong what is in the arrays is; 0 of what is exact. Collective."""
        import numpy as np

        routine, found = self.case.routine, [m.allgather() for m in (self.b, self.c, self.y)]
        told = self.ctx.comm.allgather(float(self.found[0]))
        self.restore()
        a, b, x, y = (m.allgather() for m in (self.a, self.b, self.x, self.y))
        if routine == "trsm":
            scale = self.case.n * np.finfo(float).eps * abs(b).sum(0).max()
            return float(abs(np.tril(a) @ found[0] - b).sum(0).max() / scale)
        if routine == "dot":  # PBLAS gives it to the ranks of the vectors' process columns
            return float(told[0] != (x * y).sum())
        got, exact = {"gemm": (found[1], a @ b), "gemv": (found[2], a @ x)}.get(
            routine, (np.tril(found[1]), np.tril(a @ a.T))
        )
        return float(abs(got - exact).max()) * _RIGHT


def algorithm(m: Matrices | Products) -> str:
    """Return the algorithm of a case in a word or a few, "" if nothing says so. Collective."""
    if isinstance(m, Products):
        return m.planned().partition(":")[0]
    from pblasmp.layout.factor_problem import FactorProblem

    routine = {"potrf": "cholesky", "getrf": "lu", "geqrf": "qr"}.get(m.case.routine)
    if routine is None:
        return ""
    problem = FactorProblem(routine, a=m.a.descriptor, c=m.a.descriptor)  # type: ignore[arg-type]
    import pblasmp as pb

    return next(name for name, verdict in pb.algorithms(problem, m.ctx).items() if verdict)


@contextmanager
def counted(ctx: Any, comm: Any, per: int) -> Iterator[list[int]]:
    """Within, count the bytes that this rank sends to other nodes, of ``per`` ranks each: messages, and sums."""
    from pblasmp.comm.mpi_communicator import MpiCommunicator

    nbytes = [0]

    def isend_whole(self: MpiCommunicator, data: Any, dest: int) -> Any:
        if self.size == comm.size and dest // per != comm.rank // per:
            nbytes[0] += data.nbytes
        return send(self, data, dest)

    def sum_into(self: MpiCommunicator, array: Any) -> None:
        if self.size > per:
            nbytes[0] += array.nbytes
        add(self, array)

    send, add, board = MpiCommunicator.isend_whole, MpiCommunicator.sum_into, ctx.control.board
    post = None if board is None else board._post
    if post is not None:
        post.state.sent_bytes = 0
    MpiCommunicator.isend_whole, MpiCommunicator.sum_into = isend_whole, sum_into  # type: ignore[method-assign]
    try:
        yield nbytes
    finally:
        MpiCommunicator.isend_whole, MpiCommunicator.sum_into = send, add  # type: ignore[method-assign]
        if post is not None:
            nbytes[0] += post.state.sent_bytes


def repeated(run: Callable[[], Any], count: int) -> Callable[[], Any]:
    """Return a number of calls in a row."""

    def calls() -> None:
        for _ in range(count):
            run()

    return calls


def time_case(options: argparse.Namespace) -> dict[str, Any]:
    """Check and time one case on these ranks. Collective over all of them."""
    from mpi4py import MPI

    import pblasmp as pb

    comm, nodes = MPI.COMM_WORLD, options.nodes[0]
    share_cores(comm)
    case = Case(options.only[0], options.n, options.block, GRID, 64)
    with pb.Context(comm, engine="host") as ctx:
        m = (Matrices if case.routine in FACTORED else Products)(ctx, case)
        contenders: dict[str, Callable[[], Any]] = {"pblasmp": m.run_pblasmp}
        if not options.alone:
            slk = ScaLAPACK("debian", comm)
            contenders["debian"] = m.theirs(slk, slk.grid(*GRID))
        worst = 0.0
        for run in contenders.values():
            m.restore()
            run()
            worst = max(worst, m.residual())
        if not worst < _RIGHT:
            raise SystemExit(f"{case} on {nodes} nodes: a residual of {worst}")
        m.restore()
        with counted(ctx, comm, RANKS // nodes) as nbytes:
            m.run_pblasmp()
        m.restore()
        most = comm.allreduce(nbytes[0], MPI.MAX)
        by = algorithm(m)
        count = IN_A_ROW.get(case.routine, 1)
        seconds = interleaved(
            comm,
            {name: repeated(run, count) for name, run in contenders.items()},
            options.pairs, settle=0, check=lambda *_: m.restore(), first=0,
        )  # fmt: skip
        seconds = {name: [each / count for each in times] for name, times in seconds.items()}
    ratios = {name: paired(seconds, name, "pblasmp") for name in contenders if name != "pblasmp"}
    plain = {"routine": case.routine, "n": case.n, "block": case.block, "nodes": nodes, "calls": count}
    row = {"case": plain, "by": by, "seconds": seconds, "ratios": ratios, "sent_bytes": most}
    return row | ({"failed": options.alone} if options.alone else {})


def launched(options: argparse.Namespace, routine: str, nodes: int, why_alone: str = "") -> dict[str, Any]:
    """Run one case on new ranks and return its row."""
    environment = {
        **os.environ, **(PATIENT if cores() < RANKS else {}),
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **as_nodes(RANKS, nodes),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        answer, output = Path(scratch, "row.json"), Path(scratch, "output")
        given = [
            "--only",
            routine,
            "--nodes",
            str(nodes),
            "-n",
            str(options.n),
            "--block",
            str(options.block),
        ]
        given += ["--pairs", str(options.pairs), "--answer", str(answer), "--alone", why_alone]
        argv = [*launch.interpreter(), "-u", "-m", "mpi4py", "-m", "benchmarks.nodes", *given]
        with Job(argv, RANKS, output, environ=environment) as job:
            status = job.wait(10 * options.limit if why_alone else options.limit)
        if status == 0:
            row: dict[str, Any] = json.loads(answer.read_text())
            return row
        if status is None and not why_alone:
            return launched(options, routine, nodes, f"Debian's did not end in {options.limit} s")
        raise SystemExit(f"{routine} on {nodes} nodes ended with status {status}:\n{output.read_text()}")


def shown(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    case, own = row["case"], median(row["seconds"]["pblasmp"])
    beside = f"{row['ratios']['debian']:6.2f}" if row["ratios"] else f"  ({row['failed']})"
    sent = f"{row['sent_bytes'] / 1024:8.1f} KiB"
    return f"{case['routine']:6} {case['nodes']} nodes {own * 1e3:9.2f} ms {beside} {sent} {row['by']}"


def main() -> None:
    """Time all cases, print a line for each, and store them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=(*PRODUCTS, *FACTORED), default=[*PRODUCTS, *FACTORED])
    parser.add_argument("--nodes", nargs="+", type=int, choices=NODES, default=list(NODES))
    parser.add_argument("-n", type=int, help="order (default: 1024)")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=9, help="rounds after the first")
    parser.add_argument("--limit", type=int, default=90, help="seconds that a case may take")
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    results.add_option(parser)
    options = parser.parse_args()
    options.n = options.n or (128 if options.quick else 1024)
    if on_ranks():
        row = time_case(options)
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 0:
            options.answer.write_text(json.dumps(row))
        return
    about = machine(), versions()
    print_facts(*about)
    print("routine, median, Debian's / pblasmp's, most bytes that a rank sends to other nodes, algorithm")
    rows: list[dict[str, Any]] = []
    directory = results.directory_of(options)
    plain = {key: getattr(options, key) for key in ("n", "block", "pairs", "limit")}
    for routine, nodes in product(options.only, options.nodes):
        rows.append(launched(options, routine, nodes))
        print(shown(rows[-1]), flush=True)
        if directory is None:
            continue
        about[0]["load"] = os.getloadavg()[2]
        run = results.Run(
            "nodes", results.today(), results.this_commit(), RANKS, 0, *about,
            plain, "pblasmp", "all", rows,
        )  # fmt: skip
        results.save(results.with_earlier(run, directory), directory)


if __name__ == "__main__":
    main()
