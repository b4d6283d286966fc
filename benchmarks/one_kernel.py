# SPDX-License-Identifier: Apache-2.0
"""Time tensor-parallel products as CUDA graphs, by every algorithm: ``mpirun -n 2 python3 benchmarks/one_kernel.py``.

One rank per GPU. The ranks replay a graph some times in a row, after a replay in which they wait for each other; the
slowest one's time per replay counts, on the device's clock. Compared with: PyTorch's GEMM and NCCL's
collective one after the other, and the GEMM alone. Every result is checked, and its error kept: relative, in the
Frobenius norm, to the product in float32. NVLink multicast is never used.

``--dtype float8_e4m3fn``: operands in 8 bits with scales, results in bfloat16. ``--kernel mma``: the one kernel for
GPUs other than Hopper's, which runs on these, too. ``--groups others``: PyTorch has another process group, to whose
communicator the one kernel leaves some multiprocessors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pblasmp as pb
from benchmarks import results
from pblasmp.engines.gpu.tensor import one_kernel_products

FORMS = ("matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather", "allgather_matmul")
SHAPES = (
    (1024, 1024, 1024), (2048, 2048, 2048), (1024, 1792, 4096), (2048, 1792, 4096), (4096, 1792, 4096),
    (8192, 1792, 4096), (16384, 1792, 4096), (4096, 3584, 8192), (8192, 3584, 8192), (4096, 6656, 16384),
)  # fmt: skip
ALGORITHMS = {
    "matmul_reduce_scatter": ("pull", "push", "one_kernel"),
    "matmul_allreduce": ("one_shot", "push", "ring", "one_kernel"),
    "matmul_allgather": ("nccl", "pull", "push", "one_kernel"),
    "allgather_matmul": ("nccl", "pull", "push"),
}
TYPES = ("bfloat16", "float8_e4m3fn")
KERNELS = ("own", "mma")  # of the GPU's own instructions, or of all GPUs'
GROUPS = ("own", "others")  # of PyTorch in the process: the context's, or others too, as of data parallelism
SCALES = 0.5, 0.25  # of X and W in 8 bits
GEMM, NCCL = "the GEMM alone", "NCCL + cuBLAS"
REPLAYS = 10  # timed at once
CYCLES = 700_000  # that every rank's GPU sleeps while the host queues what is timed
WORST = 1e-2  # relative error in bfloat16


class Clock:
    """Times CUDA graphs on all ranks."""

    def __init__(self, ctx: pb.Context, rounds: int) -> None:
        import torch
        import torch.distributed as dist

        self.ctx, self.rounds, self.torch, self.dist = ctx, rounds, torch, dist

    @contextmanager
    def stream(self) -> Iterator[Any]:
        """A new stream, current in the block, whose work is waited for."""
        stream = self.torch.cuda.Stream()
        self.torch.cuda.synchronize()
        with self.torch.cuda.stream(stream):
            yield stream
        stream.synchronize()

    def recorded(self, queue: Callable[[], Any]) -> Callable[[], Any]:
        """Return what replays PyTorch's work as a graph."""
        with self.stream():
            queue()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            queue()
        return graph.replay

    def seconds(self, replay: Callable[[], Any]) -> list[float]:
        """Return the slowest rank's time of each round, in seconds. Collective."""
        event, found = self.torch.cuda.Event, []
        with self.stream() as stream:
            for turn in range(self.rounds + 2):
                self.dist.barrier()
                start, stop = event(enable_timing=True), event(enable_timing=True)
                self.torch.cuda._sleep(CYCLES)
                replay()  # ranks do not start at the same microsecond
                start.record()
                for _ in range(REPLAYS):
                    replay()
                stop.record()
                stream.synchronize()
                if turn > 1:  # the first ones warm up
                    found.append(start.elapsed_time(stop) / 1e3 / REPLAYS)
        return [max(each) for each in zip(*self.ctx.comm.allgather(found), strict=True)]


class Case:
    """One product: this rank's operands, what PyTorch and NCCL do, and the right result."""

    def __init__(
        self, clock: Clock, form: str, tokens: int, outputs: int, inputs: int, *, dtype: str = TYPES[0]
    ) -> None:
        torch, dist, ctx = clock.torch, clock.dist, clock.ctx
        self.form, self.clock, size = form, clock, ctx.size
        gathered_x, gathered_y = form == "allgather_matmul", form == "matmul_allgather"
        sums = not (gathered_x or gathered_y)
        x = (tokens // size if gathered_x else tokens, inputs // size if sums else inputs)
        w = (outputs if sums else outputs // size, x[1])
        make = lambda seed, shape: torch.randn(  # noqa: E731
            shape, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(seed)
        ).to(getattr(torch, dtype))
        self.x, self.w = make(0 if gathered_y else 1 + ctx.rank, x), make(100 + ctx.rank, w)
        whole_x = torch.empty(tokens, x[1], device="cuda", dtype=self.x.dtype) if gathered_x else self.x
        partial = torch.empty(tokens, w[0], device="cuda", dtype=torch.bfloat16)
        gathered = torch.empty(size * tokens, w[0], device="cuda", dtype=torch.bfloat16)
        part = torch.empty(tokens // size, w[0], device="cuda", dtype=torch.bfloat16)
        self.how: dict[str, Any] = {}
        self.gemm = lambda: torch.mm(whole_x, self.w.t(), out=partial)
        if dtype != TYPES[0]:
            of_x, of_w = (torch.full((1,), scale, device="cuda") for scale in SCALES)
            self.how = {"scales": pb.Scales(a=of_x, b=of_w)}
            self.gemm = lambda: torch._scaled_mm(
                whole_x, self.w.t(), of_x, of_w, out_dtype=torch.bfloat16, out=partial
            )
        of_bytes = [each.view(torch.uint8) for each in (whole_x, self.x)]
        gather_x = lambda: dist.all_gather_into_tensor(*of_bytes)  # noqa: E731
        steps = {
            "allgather_matmul": (gather_x, self.gemm),
            "matmul_reduce_scatter": (self.gemm, lambda: dist.reduce_scatter_tensor(part, partial)),
            "matmul_allreduce": (self.gemm, lambda: dist.all_reduce(partial)),
            "matmul_allgather": (self.gemm, lambda: dist.all_gather_into_tensor(gathered, partial)),
        }[form]
        self.nccl = lambda: [step() for step in steps]
        all_w = self.w.float()
        if gathered_x:
            gather_x()
        if gathered_y:
            all_w = torch.empty(outputs, inputs, device="cuda")
            dist.all_gather_into_tensor(all_w, self.w.float())
        self.right = whole_x.float() @ all_w.t()
        if sums:
            dist.all_reduce(self.right)
        if form == "matmul_reduce_scatter":
            rows = tokens // size
            self.right = self.right[ctx.rank * rows : (ctx.rank + 1) * rows]
        if self.how:
            self.right = self.right * (SCALES[0] * SCALES[1])
        torch.cuda.synchronize()

    def time(self, algo: str) -> tuple[list[float], float] | str:
        """Return the times of an algorithm of pblasmp and its error, or why there are none. Collective."""
        clock, ctx = self.clock, self.clock.ctx
        try:
            with pb.plan(getattr(pb, self.form), self.x, self.w, ctx, algo=algo, **self.how) as plan:
                with clock.stream():
                    y, graph = plan(), plan.graph()
                times = clock.seconds(graph.replay)
                error = max(ctx.comm.allgather(float((y.float() - self.right).norm() / self.right.norm())))
        except pb.PblasmpError as refused:
            return str(refused)
        return (times, error) if error < WORST else f"wrong: relative error {error:.1e}"


def row(case: Case, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return a row of the results, and print it. Collective."""
    clock, seconds = case.clock, {}
    seconds[GEMM], seconds[NCCL] = (clock.seconds(clock.recorded(f)) for f in (case.gemm, case.nccl))
    failed, errors = {}, {}
    for algo in ALGORITHMS[case.form]:
        found = case.time(algo)
        if isinstance(found, str):
            failed[algo] = found
        else:
            seconds[algo], errors[algo] = found
    if clock.ctx.rank == 0:
        of = {name: f" ({error:.1e})" for name, error in errors.items()}
        told = [f"{name} {median(times) * 1e6:.0f}{of.get(name, '')}" for name, times in seconds.items()]
        print(
            case.form,
            *shape,
            "us:",
            "; ".join([*told, *(f"{k}: {v}" for k, v in failed.items())]),
            flush=True,
        )
    tokens, outputs, inputs = shape
    told = {"failed": failed} if failed else {}
    return {
        "case": {"form": case.form, "tokens": tokens, "outputs": outputs, "inputs": inputs},
        "seconds": seconds, "errors": errors, "flops": 2 * tokens * outputs * inputs, **told,
    }  # fmt: skip


def _shape(text: str) -> tuple[int, int, int]:
    tokens, outputs, inputs = map(int, text.split(","))
    return tokens, outputs, inputs


def main() -> None:
    def rows(ctx: pb.Context, options: argparse.Namespace) -> list[dict[str, Any]]:
        clock = Clock(ctx, options.rounds)
        mma = mock.patch.object(one_kernel_products, "by_mma", return_value=True)
        with mma if options.kernel == "mma" else nullcontext():
            return [
                row(Case(clock, form, *shape, dtype=options.dtype), shape)
                for form in options.forms
                for shape in options.shapes
            ]

    run_on_gpus("one_kernel", __doc__, FORMS, SHAPES, 20, rows, {"dtype": TYPES, "kernel": KERNELS})


def run_on_gpus(
    benchmark: str, doc: str, forms: Sequence[str], shapes: Sequence[tuple[int, int, int]], rounds: int,
    rows: Callable[[pb.Context, argparse.Namespace], list[dict[str, Any]]],
    choices: Mapping[str, Sequence[str]] | None = None,
) -> None:  # fmt: skip
    """Compare tensor-parallel products with NCCL's collectives; ``--results`` saves what it finds.

    ``choices`` are further options and their values; the first one is the default, others are in the file's name.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--forms", nargs="+", choices=forms, default=list(forms))
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        default=list(shapes),
        metavar="T,N,K",
        help="tokens, outputs, inputs",
    )
    choices = {"groups": GROUPS, **(choices or {})}
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    results.add_option(parser)
    options = parser.parse_args()
    benchmark = "-".join([
        benchmark, *(getattr(options, name) for name, values in choices.items() if getattr(options, name) != values[0]),
    ])  # fmt: skip
    import torch
    import torch.distributed as dist

    import pblasmp.torch as pt

    pt.init_process_group()
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    if options.groups == "others":
        dist.new_group()
    with pb.Context(dist.group.WORLD, engine="cublasmp") as ctx:
        found = rows(ctx, options)
        directory, about = results.directory_of(options), results.facts(ctx)
        if ctx.rank == 0 and directory is not None:
            run = results.Run(
                benchmark=f"{results.between_hosts(about)}{benchmark}", date=results.today(),
                commit=results.this_commit(), ranks=ctx.size, gpus=ctx.size, **about,
                options=results.options_of(options), reference="", sample="all", rows=found,
            )  # fmt: skip
            results.save(run, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
