# SPDX-License-Identifier: Apache-2.0
"""Each routine on one node, on two and on four, compared with a rival: ``python benchmarks/nodes.py``.

The nodes are made of one machine: MPICH takes UCX between them (MPIR_CVAR_NUM_CLIQUES), and pblasmp takes them for
nodes (PBLASMP_RANKS_PER_NODE). The rival is Debian's ScaLAPACK; of tensor-parallel products MPI's collective and a GEMM
of NumPy's. Both contenders run in the same processes, in turns, on the same arrays; calls are plain ones, not plans. Of
times the ratio within a round counts: UCX on one machine says nothing of a network. Debian's ScaLAPACK waits for ever
in some calls there: after ``--limit`` seconds in which no call ends the case is repeated without it, and the row says
so. What a library sends by itself is not counted. many_calls.py and vectors.py have ``--nodes``, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import scipy.linalg

from benchmarks import results
from benchmarks.eigenvalues import library_call
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
from reference.scalapack import PATIENT, ScaLAPACK, locate

RANKS, GRID, NODES = 4, (2, 2), (1, 2, 4)
_RIGHT = 30.0  # the largest residual, in units of rounding
_MOVE = "DistributedMatrix.redistribute"
_IN_A_ROW = 100  # short calls are timed together: the first one finds nothing in the caches
_SMALL = 256  # below this order calls are short, and only those of levels 1 to 3 and moves are timed


class Row(NamedTuple):
    """A product, a routine of levels 1 to 3, or a move.

    Attributes:
        given: PBLAS's arguments after its name: options, n, scalars, matrices (a to f, t), vectors (x, y), the
            number that it finds, BLACS's context.
        function: pblasmp's.
        operands: what it is given.
        written: the matrix that it writes, or "number".
        expected: what it must write, given whole matrices of before.
        options: of pblasmp's function.
    """

    given: str
    function: str
    operands: str
    written: str
    expected: Callable[[Any], Any]
    options: Mapping[str, Any] = {}


def _lower(found: Any, kept: Any) -> Any:
    """Return a result whose upper triangle is not written."""
    return np.tril(found) + np.triu(kept, 1)


def _symmetric(a: Any) -> Any:
    return np.tril(a) + np.tril(a, -1).T


def _solved(t: Any, b: Any) -> Any:
    return scipy.linalg.solve_triangular(t, b, lower=True)


def _op(letter: str, a: Any) -> Any:
    return a.T if letter == "T" else a


PRODUCTS = {
    **{
        f"gemm {p}{q}": Row(
            f"pdgemm {p} {q} n n n 1 a b 0 c", "matmul", "ab", "c",
            lambda w, p=p, q=q: _op(p, w.a) @ _op(q, w.b), {"op_a": p, "op_b": q},
        )
        for p, q in ("NN", "TN", "NT", "TT")
    },
    "gemm, unlike layouts": Row("pdgemm N N n n n 1 d e 0 c", "matmul", "de", "c", lambda w: w.d @ w.e),
    "symm": Row("pdsymm L L n n 1 a b 0 c", "blas.symm", "ab", "c", lambda w: _symmetric(w.a) @ w.b),
    "syrk": Row("pdsyrk L N n n 1 a 0 c", "blas.syrk", "a", "c", lambda w: _lower(w.a @ w.a.T, w.c)),
    "syr2k": Row(
        "pdsyr2k L N n n 1 a b 0 c", "blas.syr2k", "ab", "c",
        lambda w: _lower(w.a @ w.b.T + w.b @ w.a.T, w.c),
    ),
    "trmm": Row("pdtrmm L L N N n n 1 t b", "blas.trmm", "tb", "b", lambda w: np.tril(w.t) @ w.b),
    "trsm": Row("pdtrsm L L N N n n 1 t b", "blas.trsm", "tb", "b", lambda w: _solved(w.t, w.b)),
    "geadd, transposed": Row(
        "pdgeadd T n n 1 a 1 c", "blas.geadd", "ac", "c", lambda w: w.a.T + w.c, {"op_a": "T"}
    ),
    "gemr2d, to 4 × 1": Row(
        "pdgemr2d n n a f context", _MOVE, "a", "f", lambda w: w.a
    ),
}  # fmt: skip
VECTORS = {
    "gemv": Row("pdgemv N n n 1 a x 0 y", "blas.gemv", "ax", "y", lambda w: w.a @ w.x),
    "symv": Row("pdsymv L n 1 a x 0 y", "blas.symv", "ax", "y", lambda w: _symmetric(w.a) @ w.x),
    "trmv": Row("pdtrmv L N N n t x", "blas.trmv", "tx", "x", lambda w: np.tril(w.t) @ w.x),
    "trsv": Row("pdtrsv L N N n t x", "blas.trsv", "tx", "x", lambda w: _solved(w.t, w.x)),
    "ger": Row("pdger n n 1 x y c", "blas.ger", "xyc", "c", lambda w: w.c + w.x @ w.y.T),
    "axpy": Row("pdaxpy n 1 x y", "blas.axpy", "xy", "y", lambda w: w.x + w.y),
    "dot": Row("pddot n number x y", "blas.dot", "xy", "number", lambda w: w.x.T @ w.y),
    "nrm2": Row("pdnrm2 n number x", "blas.nrm2", "x", "number", lambda w: np.linalg.norm(w.x)),
}
EIGENVALUES = {"syevd": "eigh", "gesvd": "svd"}
PARALLEL = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")
FACTORED = (
    "potrf",
    "getrf",
    "posv",
    "gesv",
    "geqrf",
    "gels",
)  # Debian's last two wait for ever between nodes
ROUTINES = (*PRODUCTS, *VECTORS, *PARALLEL, *FACTORED, *EIGENVALUES)
_START = 30  # seconds that ranks may take to start


class Trial(Protocol):
    """A case on the ranks of a context: both contenders, and how wrong what they wrote is."""

    def restore(self) -> None:
        """Write the values of before the call. Local."""

    def run_pblasmp(self) -> None:
        """Call pblasmp's routine. Collective."""

    def theirs(self, slk: ScaLAPACK, context: int) -> Callable[[], Any]:
        """Return the rival's call. Collective."""

    def residual(self) -> float:
        """Return the error of what was written last, in units of rounding. Collective."""


class Products:
    """Matrices of small integers, one that can be solved, and vectors, for a row of the tables. Collective."""

    def __init__(self, ctx: Any, routine: str, n: int, block: int) -> None:
        import pblasmp as pb

        self.row, self.ctx, self._n = {**PRODUCTS, **VECTORS}[routine], ctx, n

        def lies(cols: int = n, width: int = block, **how: Any) -> Any:
            return pb.MatrixDescriptor((n, cols), (block, width), **{"grid": GRID, **how}, order="F")

        layouts = dict.fromkeys("abct", lies()) | dict.fromkeys("xy", lies(1))
        layouts |= {"d": lies(width=block // 2, source=(1, 0)), "e": lies(width=2 * block, source=(0, 1))}
        layouts["f"] = lies(width=2 * block, grid=(RANKS, 1))
        named = self.row.given.split()
        self.matrices = {name: ctx.empty(layout) for name, layout in layouts.items() if name in named}
        self._known, self._number = {}, np.zeros(1)
        for name, matrix in self.matrices.items():
            i, j = (np.asarray(each, float) for each in matrix.descriptor.global_indices(ctx.rank))
            values = (i[:, None] * (ord(name) % 5 + 2) + j * 5) % 7 - 3
            self._known[name] = values / (10 * n) + (i[:, None] == j) if name == "t" else values
        self.restore()

    def restore(self) -> None:
        """Write the values of before the call. Local."""
        for name, matrix in self.matrices.items():
            matrix.local[...] = self._known[name]

    def call(self) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """Return pblasmp's function, what it is given, and its options."""
        import pblasmp as pb

        out = {"out": self.matrices[self.row.written]} if self.row.written in self.matrices else {}
        return (
            operator.attrgetter(self.row.function)(pb),
            [self.matrices[name] for name in self.row.operands],
            {**self.row.options, **out},
        )

    def run_pblasmp(self) -> None:
        """Call pblasmp's routine. Collective."""
        function, given, options = self.call()
        found = function(*given, **options)
        if self.row.written == "number":
            self._number[0] = found

    def theirs(self, slk: ScaLAPACK, context: int) -> Callable[[], Any]:
        """Return ScaLAPACK's call on the same arrays. Collective."""
        contexts = {GRID: context}

        def placed(name: str) -> tuple[Any, ...]:
            d, local = self.matrices[name].descriptor, self.matrices[name].local
            shape = (d.grid.nprow, d.grid.npcol)
            if shape not in contexts:
                contexts[shape] = slk.grid(*shape)
            desc = slk.descriptor(contexts[shape], d.shape, d.block, d.source, max(1, len(local)))
            return (local, 1, 1, desc, *([1] if name in "xy" else []))

        known: dict[str, Any] = {"n": self._n, "1": np.ones(1), "0": np.zeros(1)}
        known |= {"number": self._number, "context": context}
        name, *words = self.row.given.split()
        given = [placed(each) if each in self.matrices else (known.get(each, each),) for each in words]
        return slk.prepare(f"{name}_", *itertools.chain(*given))

    def residual(self) -> float:
        """Return the error of what was written last, in units of rounding. Collective."""
        if self.row.written == "number":  # PBLAS gives it to the ranks of the vectors' process column alone
            found = self.ctx.comm.bcast(self._number)
        else:
            found = self.matrices[self.row.written].allgather()
        self.restore()
        whole = SimpleNamespace(**{name: x.allgather() for name, x in self.matrices.items()})
        return _error(found, np.asarray(self.row.expected(whole)))


class Spectral:
    """A symmetric matrix, and its eigenvectors or singular vectors. Collective."""

    def __init__(self, ctx: Any, routine: str, n: int, block: int) -> None:
        import pblasmp as pb

        self.function = EIGENVALUES[routine]
        whole = np.random.default_rng(n).standard_normal((n, n))
        self._whole = (whole + whole.T) / 2
        self.a = ctx.scatter(self._whole, block=min(block, n // 2), grid=pb.Grid(*GRID), order="F")
        self._values = np.zeros(n)

    def restore(self) -> None:
        """Forget what was found. Local."""
        self._values[...] = 0

    def run_pblasmp(self) -> None:
        import pblasmp as pb

        found = getattr(pb.linalg, self.function)(self.a)
        self._values[...] = found[0 if self.function == "eigh" else 1]

    def theirs(self, slk: ScaLAPACK, context: int) -> Callable[[], Any]:  # noqa: ARG002 (it makes its own)
        call = library_call(slk, self.function, self.a, self._whole)

        def run() -> None:
            self._values[...] = call()

        return run

    def residual(self) -> float:
        solve = (
            np.linalg.eigvalsh if self.function == "eigh" else lambda x: np.linalg.svd(x, compute_uv=False)
        )
        return _error(self._values, solve(self._whole))


class Parallel:
    """A tensor-parallel product in float32, whose rival is MPI's collective and NumPy's GEMM. Collective."""

    def __init__(self, ctx: Any, routine: str, n: int, block: int) -> None:  # noqa: ARG002 (there are no blocks)
        self.ctx, self.routine = ctx, routine
        part = n // RANKS
        mine = slice(part * ctx.rank, part * (ctx.rank + 1))
        self._x, self._w = (
            ((np.arange(n)[:, None] * step + np.arange(n) * 5) % 7 - 3).astype(np.float32) for step in (2, 3)
        )
        every = slice(None)
        at_x, at_w, self._at_y = {
            "allgather_matmul": ((mine, every), (mine, every), (every, mine)),
            "matmul_reduce_scatter": ((every, mine), (every, mine), (mine, every)),
            "matmul_allreduce": ((every, mine), (every, mine), (every, every)),
            "matmul_allgather": ((every, every), (mine, every), (every, every)),
        }[routine]
        self.x, self.w = (np.ascontiguousarray(whole[at]) for whole, at in ((self._x, at_x), (self._w, at_w)))
        self._y = np.empty(0)

    def restore(self) -> None:
        """Forget what was found. Local."""
        self._y = np.empty(0)

    def run_pblasmp(self) -> None:
        import pblasmp as pb

        self._y = getattr(pb, self.routine)(self.x, self.w, self.ctx)

    def theirs(self, slk: ScaLAPACK, context: int) -> Callable[[], Any]:  # noqa: ARG002 (ScaLAPACK has none)
        from mpi4py import MPI

        comm, (x, w) = slk.comm, (self.x, self.w)

        def gathered(part: Any) -> Any:
            whole = np.empty((RANKS, *part.shape), part.dtype)
            comm.Allgather(part, whole)
            return whole

        def run() -> None:
            if self.routine == "allgather_matmul":
                self._y = gathered(x).reshape(-1, x.shape[1]) @ w.T
                return
            y = x @ w.T
            if self.routine == "matmul_allreduce":
                comm.Allreduce(MPI.IN_PLACE, y, MPI.SUM)
            elif self.routine == "matmul_reduce_scatter":
                part = np.empty((len(y) // RANKS, y.shape[1]), y.dtype)
                comm.Reduce_scatter_block(y, part, MPI.SUM)
                y = part
            else:
                y = gathered(y).transpose(1, 0, 2).reshape(len(y), -1)
            self._y = y

        return run

    def residual(self) -> float:
        return _error(self._y, (self._x @ self._w.T)[self._at_y])


def _error(found: Any, expected: Any) -> float:
    """Return the largest difference, in units of the rounding of n operations on the largest number."""
    unit = max(expected.shape, default=1) * np.finfo(found.dtype).eps * max(abs(expected).max(), 1e-300)
    return float(abs(found - expected).max() / unit)


def trial(ctx: Any, routine: str, n: int, block: int) -> Trial:
    """Return the matrices of a case. Collective."""
    if routine in FACTORED:
        return Matrices(ctx, Case(routine, n, block, GRID, 64))
    made: Any = Parallel if routine in PARALLEL else Spectral if routine in EIGENVALUES else Products
    return made(ctx, routine, n, block)  # type: ignore[no-any-return]


def algorithm(m: Trial, routine: str) -> str:
    """Return the algorithm that a plan of the case takes, "" of what has no plan. Collective."""
    import pblasmp as pb
    from pblasmp.layout.factor_problem import FactorProblem

    if isinstance(m, Products) and routine not in VECTORS and m.row.function != _MOVE:
        function, given, options = m.call()
        with pb.plan(function, *given, **options) as plan:
            return str(plan.report().algorithm)
    if isinstance(m, Parallel):
        with pb.plan(routine, m.x, m.w, m.ctx) as plan:
            return str(plan.report().algorithm)
    if isinstance(m, Spectral):
        with pb.plan(m.function, m.a) as plan:
            return str(plan.report().algorithm)
    job = {"potrf": "cholesky", "getrf": "lu", "geqrf": "qr"}.get(routine)
    if job is None or not isinstance(m, Matrices):
        return ""
    problem = FactorProblem(job, a=m.a.descriptor, c=m.a.descriptor)  # type: ignore[arg-type]
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


def repeated(run: Callable[[], Any], count: int, restore: Callable[[], None]) -> Callable[[], Any]:
    """Return a number of calls in a row, with the operands of the first restored in between."""

    def calls() -> None:
        for turn in range(count):
            if turn:
                restore()
            run()

    return calls


def time_case(
    comm: Any, slk: ScaLAPACK, routine: str, why_alone: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Check and time one case on these ranks. Collective over all of them."""
    from mpi4py import MPI

    import pblasmp as pb

    nodes, (n,) = options.nodes[0], options.n
    small, block = n < _SMALL, min(options.block, n // 4)
    n = n // 2 if routine in EIGENVALUES else n

    def go_on(*_: Any) -> None:
        """After a call: write the values of before, and tell who watches that a call has ended."""
        m.restore()
        if comm.rank == 0:
            with options.answer.open("a") as file:
                file.write("\n")

    rival = "mpi" if routine in PARALLEL else "debian"
    with pb.Context(comm, engine="host") as ctx:
        m = trial(ctx, routine, n, block)
        contenders: dict[str, Callable[[], Any]] = {"pblasmp": m.run_pblasmp}
        if not why_alone:
            contenders[rival] = m.theirs(slk, slk.grid(*GRID))
        worst = 0.0
        for run in contenders.values():
            m.restore()
            run()
            worst = max(worst, m.residual())
            go_on()
        if not worst < _RIGHT:
            raise SystemExit(f"{routine} on {nodes} nodes: a residual of {worst}")
        with counted(ctx, comm, RANKS // nodes) as nbytes:
            m.run_pblasmp()
        m.restore()
        most = comm.allreduce(nbytes[0], MPI.MAX)
        by = algorithm(m, routine)
        count = _IN_A_ROW if routine in VECTORS or small else 1
        again = (lambda: None) if routine in VECTORS else m.restore  # a factor cannot be factored
        seconds = interleaved(
            comm,
            {name: repeated(run, count, again) for name, run in contenders.items()},
            options.pairs, settle=0, check=go_on, first=0,
        )  # fmt: skip
    seconds = {name: [each / count for each in times] for name, times in seconds.items()}
    ratios = {name: paired(seconds, name, "pblasmp") for name in contenders if name != "pblasmp"}
    plain = {"routine": routine, "n": n, "block": block, "nodes": nodes, "calls": count}
    row = {"case": plain, "by": by, "seconds": seconds, "ratios": ratios, "sent_bytes": most}
    return row | ({"failed": why_alone} if why_alone else {})


def rank_main(options: argparse.Namespace) -> None:
    """Time the cases in order; rank 0 adds a line to the answer for each. Collective over COMM_WORLD."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    share_cores(comm)
    slk = ScaLAPACK("debian", comm)
    if comm.rank == 0:
        options.answer.write_text("\n")  # the ranks have started
    for routine in options.only:
        row = time_case(comm, slk, routine, options.alone if routine == options.only[0] else "", options)
        if comm.rank == 0:
            with options.answer.open("a") as file:
                file.write(f"{json.dumps(row)}\n")


def launched(options: argparse.Namespace, nodes: int, n: int) -> Iterator[dict[str, Any]]:
    """Run cases on new ranks, and yield a row for each; a case in which Debian's waits for ever runs again alone."""
    environment = {
        **os.environ, **(PATIENT if cores() < RANKS else {}),
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PBLASMP_SCALAPACK_LIBRARY": str(locate("debian") or ""),
        **as_nodes(RANKS, nodes),
    }  # fmt: skip
    left = [each for each in options.only if n >= _SMALL or options.quick or each in {**PRODUCTS, **VECTORS}]
    why_alone = ""
    while left:
        given = {"--nodes": nodes, "-n": n, "--block": options.block, "--pairs": options.pairs}
        with tempfile.TemporaryDirectory() as scratch:
            answer, output = Path(scratch, "rows"), Path(scratch, "output")
            words = [
                str(each)
                for pair in (given | {"--answer": answer, "--alone": why_alone}).items()
                for each in pair
            ]
            module = [*launch.interpreter(), "-u", "-m", "mpi4py", "-m", "benchmarks.nodes"]
            argv = [*module, "--only", *left, *words]
            answer.touch()
            with Job(argv, RANKS, output, environ=environment) as job, answer.open() as lines:
                limit, status = time.monotonic() + options.limit + _START, None
                while status is None and time.monotonic() < limit:
                    status = job.wait(0.1)
                    for line in lines:
                        if line.strip():
                            yield json.loads(line)
                            left.pop(0)
                            why_alone = ""
                        limit = time.monotonic() + options.limit
            if status:
                raise SystemExit(
                    f"{left[0]} on {nodes} nodes ended with status {status}:\n{output.read_text()}"
                )
        if left and why_alone:  # a library that pblasmp calls may wait for ever, too
            routine = left.pop(0)
            case = {"routine": routine, "n": n // 2 if routine in EIGENVALUES else n, "nodes": nodes}
            yield {"case": case, "failed": f"neither ended in {options.limit} s"}
            why_alone = ""
        else:
            why_alone = f"Debian's did not end in {options.limit} s"


def shown(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    case = row["case"]
    about = f"{case['routine']:22} {case['n']:5} {case['nodes']} nodes"
    if "seconds" not in row:
        return f"{about} {row['failed']}"
    own = 1e3 * median(row["seconds"]["pblasmp"])
    beside = "".join(f"{ratio:6.2f}" for ratio in row["ratios"].values()) or f"  ({row['failed']})"
    return f"{about} {own:9.3f} ms {beside} {row['sent_bytes'] / 1024:8.1f} KiB {row['by']}"


def main() -> None:
    """Time all cases, print a line for each, and store them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROUTINES, default=list(ROUTINES), metavar="ROUTINE")
    parser.add_argument("--nodes", nargs="+", type=int, choices=NODES, default=list(NODES))
    parser.add_argument(
        "-n", type=int, nargs="+", help="orders, of eigenvalues half of it (default: 1024, 64)"
    )
    parser.add_argument("--block", type=int, default=64, help="rows and columns of a block, at most n / 4")
    parser.add_argument("--pairs", type=int, default=9, help="rounds after the first")
    parser.add_argument("--limit", type=int, default=10, help="seconds that a call may take")
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    results.add_option(parser)
    options = parser.parse_args()
    options.n = options.n or ([128] if options.quick else [1024, 64])
    if on_ranks():
        rank_main(options)
        return
    about = machine(), versions()
    print_facts(*about)
    print(
        "routine, order, nodes, median, the rival's / pblasmp's, most bytes that a rank sends to other nodes, algorithm"
    )
    rows: list[dict[str, Any]] = []
    directory = results.directory_of(options)
    plain = {key: getattr(options, key) for key in ("block", "pairs", "limit")}
    for n, nodes in itertools.product(options.n, options.nodes):
        for row in launched(options, nodes, n):
            rows.append(row)
            print(shown(row), flush=True)
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
